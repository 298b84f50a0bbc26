//! A loss times a factor that changes.

use crate::common::*;
use candle::{DType, Module, Result, Var};
use candle_nn::{Activation, linear, loss::mse, seq};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use candle_powernorm::{LossScale, Mode, PowerNorm, PowerNormBuilder};

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
    let config = 1e-5.with_warm_up(2);
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
fn scales_that_are_none_are_rejected() -> Result<()> {
    let scale = LossScale::new(8.)?;
    for bad in [0., -1., f64::NAN, f64::INFINITY, 1e39, 1e-39] {
        let text = format!(
            "a loss scale that is positive and finite in F32, \
             and whose inverse is too, got {bad}"
        );
        rejected(scale.set(bad), &text);
        rejected(LossScale::new(bad), &text);
    }
    assert_eq!(scale.get(), 8.);
    Ok(())
}

/// Steps left out, and the first and the last loss, of 150 steps of a regression by a model whose
/// parameters are all in f16.
fn in_f16(eps: f64) -> Result<(usize, [f32; 2])> {
    const WIDTH: usize = 64;
    let scale = LossScale::new(65536.)?;
    let norms = PowerNormBuilder::new(1e-5, &Mode::train()).with_loss_scale(&scale);
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F16, &CPU);
    let mut model = seq();
    for (i, from) in [8, WIDTH, WIDTH].into_iter().enumerate() {
        model = (model.add(linear(from, WIDTH, vb.pp(format!("linear_{i}")))?))
            .add(norms.build(WIDTH, vb.pp(format!("norm_{i}")))?)
            .add(Activation::Relu);
    }
    let model = model.add(linear(WIDTH, 1, vb.pp("head"))?);
    let vars = varmap.all_vars().into_iter();
    let vars: Vec<_> = vars.filter(|var| var.dtype() == DType::F16).collect();
    let params = ParamsAdamW {
        lr: 3e-3,
        eps,
        ..Default::default()
    };
    let mut optimizer = AdamW::new(vars.clone(), params)?;
    let xs = tensor(&Data::new(7).normal(64 * 8), &[64, 8], DType::F32);
    let targets = xs.sum_keepdim(1)?.sin()?;
    let (mut left_out, mut losses) = (0, vec![]);
    for _ in 0..150 {
        let ys = model.forward(&xs.to_dtype(DType::F16)?)?;
        let loss = mse(&ys.to_dtype(DType::F32)?, &targets)?;
        losses.push(loss.to_scalar()?);
        let mut gradients = (loss * scale.get())?.backward()?;
        let mut finite = true;
        for var in &vars {
            if let Some(gradient) = gradients.remove(var) {
                let gradient = (gradient.to_dtype(DType::F32)? / scale.get())?;
                finite &= gradient.sum_all()?.to_scalar::<f32>()?.is_finite();
                gradients.insert(var, gradient.to_dtype(DType::F16)?);
            }
        }
        match finite {
            true => optimizer.step(&gradients)?,
            false => {
                left_out += 1;
                scale.set((scale.get() / 2.).max(1.))?;
            }
        }
    }
    Ok((left_out, [losses[0], losses[149]]))
}

/// AdamW's ε decides whether a model of f16 parameters trains: an ε that f16 rounds to 0 ends it at
/// the first steps. The guide's page on techniques has the figures.
#[test]
fn f16_parameters_train_with_an_epsilon_that_f16_has() -> Result<()> {
    let (left_out, [first, last]) = in_f16(1e-4)?;
    println!("1e-4: {left_out} steps left out, loss {first} to {last}");
    assert!(left_out < 15 && last < 0.01 * first);
    let (left_out, [first, last]) = in_f16(1e-8)?;
    println!("1e-8: {left_out} steps left out, loss {first} to {last}");
    assert!(left_out > 135);
    Ok(())
}
