//! ψ² recomputed from data.

mod common;

use candle::{DType, Module, Result, Tensor, Var};
use candle_powernorm::{Mode, PowerNorm, PowerNormConfig, Recipe};
use common::{assert_relative, assert_same_bits, layer, run, state, to_f64, var, Batch, Data, CPU};

const SIZE: usize = 6;

fn config() -> PowerNormConfig {
    PowerNormConfig {
        warmup_steps: 2,
        group_scaling: Some(2),
        ..Default::default()
    }
}

fn batches(data: &mut Data, count: usize) -> Vec<Batch> {
    (0..count)
        .map(|_| Batch::random(data, &[5, SIZE], DType::F64, false))
        .collect()
}

/// The mean over all rows, from the formula.
fn mean_square(batches: &[Batch], groups: usize) -> Result<Vec<f64>> {
    let xs: Vec<_> = batches.iter().map(|batch| &batch.xs).collect();
    let xs = Tensor::cat(&xs, 0)?.reshape(((), groups, SIZE / groups))?;
    let rms = (xs.sqr()?.mean_keepdim(2)? + 1e-5)?.sqrt()?;
    let scaled = xs.broadcast_div(&rms)?.reshape(((), SIZE))?;
    Ok(to_f64(&scaled.sqr()?.mean(0)?))
}

fn recalibrate(layer: &PowerNorm, batches: &[Batch]) -> Result<()> {
    let _guard = layer.mode().recalibrate_scope();
    for batch in batches {
        layer.forward(&batch.xs)?;
    }
    Ok(())
}

/// Whatever stood before; ν, t and the mode stay.
#[test]
fn the_mean_over_the_batches_replaces_the_state() -> Result<()> {
    let mut data = Data::new(1);
    let (layer, varmap) = layer(SIZE, config(), DType::F64);
    for batch in batches(&mut data, 5) {
        run(&layer, &batch, true);
    }
    let (_, nu, t) = state(&layer);
    let pass = batches(&mut data, 4);
    let expected = mean_square(&pass, 2)?;
    for (training, broken) in [(true, false), (false, false), (false, true)] {
        layer.mode().set_training(training);
        if broken {
            var(&varmap, "running_phi").set(&Tensor::full(f64::NAN, SIZE, &CPU)?)?;
        }
        recalibrate(&layer, &pass)?;
        assert_relative("ψ²", &layer.running_phi()?, &expected, 1e-14);
        assert_eq!((state(&layer).1, state(&layer).2), (nu.clone(), t));
        assert_eq!(layer.mode().is_training(), training);
    }
    // Another pass starts anew.
    recalibrate(&layer, &pass[..1])?;
    assert_relative(
        "ψ²",
        &layer.running_phi()?,
        &mean_square(&pass[..1], 2)?,
        1e-14,
    );
    Ok(())
}

/// Each batch by its own ψ_B², so that the layers of a model are fed what they expect.
#[test]
fn outputs_are_those_of_the_batch() -> Result<()> {
    let mut data = Data::new(2);
    let (layer, _) = layer(SIZE, config(), DType::F64);
    let batch = &batches(&mut data, 1)[0];
    let guard = layer.mode().recalibrate_scope();
    let y = layer.forward(&batch.xs)?;
    drop(guard);
    let own = layer.forward_t(&batch.xs, false)?;
    assert_relative("y", &y, &to_f64(&own), 1e-14);
    Ok(())
}

/// Layers of one mode are recalibrated together, a scope inside another ends alone, and an explicit `train` stays what
/// it says.
#[test]
fn follows_the_mode() -> Result<()> {
    let mut data = Data::new(3);
    let mode = Mode::eval();
    let [(a, _), (b, _)] = [(); 2].map(|()| layer(SIZE, config(), DType::F64));
    let (a, b) = (a.with_mode(&mode), b.with_mode(&mode));
    let pass = batches(&mut data, 3);
    {
        let _guard = mode.recalibrate_scope();
        assert!(!mode.is_training());
        for batch in &pass {
            let y = a.forward(&batch.xs)?;
            b.forward(&y)?;
            let _inner = mode.eval_scope();
            let before = state(&a);
            a.forward(&batch.xs)?;
            a.forward_t(&batch.xs, false)?;
            assert_eq!(state(&a), before);
        }
    }
    assert_relative("ψ²", &a.running_phi()?, &mean_square(&pass, 2)?, 1e-14);
    assert!(to_f64(&b.running_phi()?).iter().all(|&phi| phi != 1.));
    assert_eq!((a.steps()?, b.steps()?), (0, 0));
    Ok(())
}

/// A gradient through it is the exact one of the batch's statistic, and moves nothing.
#[test]
fn a_backward_leaves_nu() -> Result<()> {
    let mut data = Data::new(4);
    let (layer, _) = layer(SIZE, config(), DType::F64);
    for batch in batches(&mut data, 5) {
        run(&layer, &batch, true);
    }
    let batch = &batches(&mut data, 1)[0];
    let xs = Var::from_tensor(&batch.xs)?;
    let gradient = |y: Tensor| -> Result<Tensor> {
        Ok((y * &batch.dy)?.sum_all()?.backward()?.remove(&xs).unwrap())
    };
    let nu = layer.nu()?;
    let guard = layer.mode().recalibrate_scope();
    let dx = gradient(layer.forward(&xs)?)?;
    drop(guard);
    assert_same_bits("ν", &layer.nu()?, &nu);
    // A fresh layer's warm-up has that gradient.
    let fresh = common::layer(SIZE, config(), DType::F64).0;
    let expected = gradient(fresh.forward_t(&xs, true)?)?;
    assert_relative("dx", &dx, &to_f64(&expected), 1e-14);
    Ok(())
}

/// Padding is not seen, and batches without a kept row do not count.
#[test]
fn padding_and_empty_batches_count_for_nothing() -> Result<()> {
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        let mut data = Data::new(5);
        let config = PowerNormConfig { recipe, ..config() };
        let [(whole, _), (masked, _)] = [(); 2].map(|()| layer(SIZE, config, DType::F64));
        let pass = batches(&mut data, 2);
        recalibrate(&whole, &pass)?;
        let _guard = masked.mode().recalibrate_scope();
        let none = Tensor::zeros(5, DType::U8, &CPU)?;
        for batch in &pass {
            masked.forward_masked(&batch.xs, &none)?;
            masked.forward(&batch.xs.narrow(0, 0, 0)?)?;
            let padded = Tensor::cat(&[&batch.xs, &(&batch.xs * 1e3)?], 0)?;
            let keep = Tensor::cat(&[&none.ones_like()?, &none], 0)?;
            masked.forward_masked(&padded, &keep)?;
        }
        assert_relative(
            "ψ²",
            &masked.running_phi()?,
            &to_f64(&whole.running_phi()?),
            1e-14,
        );
    }
    Ok(())
}

/// A reset starts the mean anew, and what a channel cannot take leaves it as it is.
#[test]
fn resets_and_overflows() -> Result<()> {
    let config = PowerNormConfig {
        group_scaling: None,
        ..Default::default()
    };
    let (layer, _) = layer(2, config, DType::F64);
    let _guard = layer.mode().recalibrate_scope();
    layer.forward(&Tensor::new(&[[5f64, 5.]], &CPU)?)?;
    layer.reset_running_stats()?;
    layer.forward(&Tensor::new(&[[2f64, 2.]], &CPU)?)?;
    layer.forward(&Tensor::new(&[[f64::INFINITY, 4.]], &CPU)?)?;
    assert_eq!(to_f64(&layer.running_phi()?), [4., 10.]);
    Ok(())
}
