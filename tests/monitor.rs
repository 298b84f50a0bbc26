//! ψ_B², Γ and Λ of a step, from the state before and after it.

mod common;

use candle::{DType, Module, Result, Tensor};
use candle_powernorm::{LossScale, PowerNormConfig, Recipe, Statistics, StepStatistics};
use common::reference::Quantity;
use common::{assert_close, layer, message, run, to_f64, Batch, Bound, Data, Twin, CPU};

const SIZE: usize = 6;
const ROWS: usize = 9;

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0., |max, value| max.max(value.abs()))
}

/// Steps a layer and its oracle side by side, on batches with a mask or without, and compares what
/// the oracle's batches had.
fn compare(config: PowerNormConfig, dtype: DType, padded: bool) -> Result<()> {
    let mut data = Data::new(1);
    let mut twin = Twin::new(&mut data, SIZE, config, dtype);
    // What the loss is multiplied by does not show.
    let scale = LossScale::new(8.)?;
    twin.layer = twin.layer.with_loss_scale(&scale);
    for _ in 0..8 {
        let batch = Batch::random(&mut data, &[ROWS, SIZE], dtype, padded);
        let scaled = Batch {
            dy: (&batch.dy * scale.get())?,
            ..batch.clone()
        };
        let before = twin.layer.snapshot()?;
        run(&twin.layer, &scaled, true);
        let seen = twin.layer.step_since(&before)?;

        let old = twin.oracle.clone();
        let pass = twin
            .oracle
            .train(&to_f64(&batch.xs), batch.mask().as_deref());
        let gradients = twin.oracle.backward(&pass, &to_f64(&batch.dy));
        let batch_phi = pass.batch_phi.expect("a training step");

        // What the roundings of the state are magnified by.
        let t = twin.oracle.steps;
        let by_batch = t <= config.warmup_steps || config.statistics == Statistics::Batch;
        let in_phi = (t as f64).max(1. / (1. - config.alpha_fwd)) * largest(&twin.oracle.phi);
        let divisors = if by_batch { &batch_phi } else { &old.phi };
        let in_gamma = in_phi
            / divisors
                .iter()
                .fold(f64::INFINITY, |min, &phi| min.min(phi));
        let in_lambda =
            in_gamma * largest(&old.nu) + twin.oracle.nu().magnitude / (1. - config.alpha_bwd);
        for (name, actual, values, magnitude) in [
            ("ψ_B²", &seen.batch_phi, batch_phi.clone(), in_phi),
            ("Γ", &seen.gamma, gradients.gamma, in_gamma),
            ("Λ", &seen.lambda, gradients.lambda, in_lambda),
        ] {
            let bound = Bound {
                out: DType::F64,
                sums: dtype,
                n: ROWS * t,
            };
            let expected = Quantity { values, magnitude };
            assert_close(
                &format!("{config:?}, step {t}, {name}"),
                actual,
                &expected,
                bound,
            );
        }
    }
    Ok(())
}

#[test]
fn statistics_are_those_of_the_batch() -> Result<()> {
    for dtype in [DType::F64, DType::F32] {
        for group_scaling in [None, Some(2)] {
            for statistics in [Statistics::Running, Statistics::Batch] {
                let config = PowerNormConfig {
                    group_scaling,
                    statistics,
                    warmup_steps: 3,
                    alpha_fwd: 0.8,
                    ..Default::default()
                };
                let fairseq = PowerNormConfig {
                    recipe: Recipe::Fairseq,
                    ..config
                };
                compare(config, dtype, false)?;
                compare(config, dtype, true)?;
                compare(fairseq, dtype, false)?;
            }
        }
    }
    Ok(())
}

/// Where Γ is large the clamp takes ν's whole past, and Γ says so.
#[test]
fn a_clamped_factor_is_seen() -> Result<()> {
    let config = PowerNormConfig {
        group_scaling: None,
        warmup_steps: 0,
        ..1e-12.into()
    };
    let (layer, _) = layer(2, config, DType::F64);
    let step = |xs: [f64; 2]| -> Result<StepStatistics> {
        let before = layer.snapshot()?;
        // γ is 1, so Λ is the mean of X̂ where the loss is the sum of the outputs.
        layer
            .forward(&Tensor::new(&[xs], &CPU)?)?
            .sum_all()?
            .backward()?;
        layer.step_since(&before)
    };
    step([1., 1.])?;
    // ψ² is 1 still.
    let seen = step([20., 1.])?;
    let close = |actual: &Tensor, expected: [f64; 2]| {
        // ε is 1e-12.
        common::assert_relative("", actual, &expected, 1e-11);
    };
    close(&seen.batch_phi, [400., 1.]);
    close(&seen.gamma, [400., 1.]);
    close(&seen.lambda, [20., 1.]);
    Ok(())
}

#[test]
fn only_one_step_has_statistics() -> Result<()> {
    let (layer, _) = layer(SIZE, Default::default(), DType::F32);
    let batch = Batch::random(&mut Data::new(2), &[ROWS, SIZE], DType::F32, false);
    let before = layer.snapshot()?;
    let refused = |after: usize| {
        let text = format!(
            "power_norm: expected one training step since the snapshot, got {after} steps \
             after 0: take a snapshot before each step"
        );
        assert_eq!(message(layer.step_since(&before)), text);
    };
    refused(0);
    run(&layer, &batch, false);
    refused(0);
    run(&layer, &batch, true);
    assert!(layer.step_since(&before).is_ok());
    run(&layer, &batch, true);
    refused(2);
    Ok(())
}

/// As documented: a channel that was left out looks like one that moved nothing.
#[test]
fn a_channel_that_was_left_out() -> Result<()> {
    let config = PowerNormConfig {
        group_scaling: None,
        warmup_steps: 0,
        ..Default::default()
    };
    let (layer, _) = layer(2, config, DType::F64);
    let before = layer.snapshot()?;
    let xs = Tensor::new(&[[f64::INFINITY, 2.]], &CPU)?;
    layer.forward(&xs)?.sum_all()?.backward()?;
    let seen = layer.step_since(&before)?;
    common::assert_relative("ψ_B²", &seen.batch_phi, &[1., 4.], 1e-14);
    Ok(())
}
