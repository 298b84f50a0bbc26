//! A loss times a factor that changes.

use crate::common::{assert_relative, layer, message, to_f64, var, Batch, Data, Twin};
use candle::{DType, Result, Var};
use candle_powernorm::{LossScale, PowerNorm, PowerNormConfig};

/// A training step on the loss times the scale that stands; the gradient of the input, unscaled.
fn step(layer: &PowerNorm, batch: &Batch, scale: f64) -> Result<candle::Tensor> {
    let xs = Var::from_tensor(&batch.xs)?;
    let y = layer.forward_t(&xs, true)?;
    let loss = ((y * &batch.dy)?.sum_all()? * scale)?;
    let dx = loss.backward()?.remove(&xs).expect("a gradient");
    dx / scale
}

#[test]
fn it_prints_its_number() -> Result<()> {
    assert_eq!(format!("{:?}", LossScale::new(1024.)?), "LossScale(1024.0)");
    Ok(())
}

/// Without a switch ν carries the scale.
#[test]
fn nu_is_in_the_units_of_the_loss() -> Result<()> {
    let scale = LossScale::new(1000.)?;
    let build = || Twin::new(&mut Data::new(3), 6, 1e-5.into(), DType::F64).layer;
    let (carries, follows) = (build(), build().with_loss_scale(&scale));
    let batch = Batch::random(&mut Data::new(4), &[9, 6], DType::F64, false);
    step(&carries, &batch, 1000.)?;
    step(&follows, &batch, 1000.)?;
    let expected: Vec<_> = to_f64(&follows.nu()?).iter().map(|nu| 1000. * nu).collect();
    assert_relative("ν", &carries.nu()?, &expected, 1e-14);
    Ok(())
}

/// The loop of dynamic loss scaling in f16. In a step that overflows a channel's ν is what the
/// unscaled step makes of it, or what it was.
#[test]
fn overflowed_steps_leave_no_trace() -> Result<()> {
    let config = PowerNormConfig {
        warmup_steps: 2,
        ..Default::default()
    };
    let (size, dtype) = (8, DType::F16);
    let scale = LossScale::new(2f64.powi(20))?;
    let (plain, unscaled) = layer(size, config, DType::F32);
    let (scaled, varmap) = layer(size, config, DType::F32);
    let scaled = scaled.with_loss_scale(&scale);
    let mut data = Data::new(5);
    let (mut overflows, mut kept) = (0, 0);
    for t in 0..60 {
        if t % 20 == 5 {
            scale.set(scale.get() * 2f64.powi(10))?;
        }
        let batch = Batch::random(&mut data, &[16, size], dtype, false);
        let before = to_f64(&scaled.nu()?);
        step(&plain, &batch, 1.)?;
        // The gradient of y is in f16, whose largest number is 65504.
        let dx = step(&scaled, &batch, scale.get())?;
        let overflowed = to_f64(&dx).iter().any(|dx| !dx.is_finite());
        let (after, expected) = (to_f64(&scaled.nu()?), to_f64(&plain.nu()?));
        for c in 0..size {
            let stays = overflowed && after[c] == before[c];
            kept += usize::from(stays);
            let error = (after[c] - expected[c]).abs();
            assert!(stays || error < 1e-3, "step {t}, channel {c}: {error}");
        }
        if overflowed {
            overflows += 1;
            scale.set(scale.get() / 2.)?;
        }
        var(&unscaled, "ema_gz").set(&var(&varmap, "ema_gz"))?;
    }
    assert!(
        overflows > 5 && kept > size * overflows / 2,
        "{overflows} overflows, {kept} kept"
    );
    assert!(scale.get() <= 65504.);
    Ok(())
}

#[test]
fn scales_that_are_none_are_refused() -> Result<()> {
    let scale = LossScale::new(8.)?;
    for bad in [0., -1., f64::NAN, f64::INFINITY, 1e39, 1e-39] {
        let text = format!(
            "power_norm: expected a loss scale that is positive and finite in F32, \
             and whose inverse is too, got {bad}"
        );
        assert_eq!(message(scale.set(bad)), text);
        assert_eq!(message(LossScale::new(bad)), text);
    }
    assert_eq!(scale.get(), 8.);
    Ok(())
}
