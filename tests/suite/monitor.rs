//! ψ_B², Γ and Λ of a step, from the state before and after it.

use crate::common::{self, layer, message, monitoring, run, to_f64, var, Batch, Data, CPU};
use candle::{DType, Module, Result, Tensor};
use candle_powernorm::{PowerNormConfig, Statistics, StepStatistics};

const SIZE: usize = 6;
const ROWS: usize = 9;

#[test]
fn statistics_are_those_of_the_batch() -> Result<()> {
    monitoring::statistics_are_those_of_the_batch(&CPU)
}

/// If Γ is large, the clamp takes ν's whole past, and Γ says so.
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

/// The rounding of ψ² must not make a mean of squares negative. (Seen: Γ of both signs, and beyond
/// every bound, in channels whose batch was all zeros.)
#[test]
fn silent_channels_have_no_negative_statistic() -> Result<()> {
    const CHANNELS: usize = 100;
    let config = PowerNormConfig {
        group_scaling: None,
        statistics: Statistics::Batch,
        warmup_steps: 0,
        ..1e-5.into()
    };
    let (layer, varmap) = layer(CHANNELS, config, DType::F32);
    let phi: Vec<f32> = (1..=CHANNELS).map(|k| 37.3 * k as f32).collect();
    var(&varmap, "running_phi").set(&Tensor::new(phi, &CPU)?)?;
    let before = layer.snapshot()?;
    let silent = Tensor::zeros((3, CHANNELS), DType::F32, &CPU)?;
    layer.forward(&silent)?.sum_all()?.backward()?;
    let seen = layer.step_since(&before)?;
    for (psi, gamma) in to_f64(&seen.batch_phi).iter().zip(to_f64(&seen.gamma)) {
        assert!(
            *psi >= 0. && (0. ..=1.).contains(&gamma),
            "{psi:e}, {gamma:e}"
        );
    }
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

/// A model has many layers of one size, and their snapshots look the same.
#[test]
fn a_snapshot_of_another_layer_is_refused() -> Result<()> {
    let [(ours, _varmap), (other, _other_varmap)] =
        [(); 2].map(|()| layer(SIZE, Default::default(), DType::F32));
    let before = other.snapshot()?;
    let batch = Batch::random(&mut Data::new(2), &[ROWS, SIZE], DType::F32, false);
    run(&ours, &batch, true);
    assert_eq!(
        message(ours.step_since(&before)),
        "power_norm: expected a snapshot of this layer, got one of another layer: \
         take it by this layer's `snapshot`, or by a clone's"
    );
    let before = ours.clone().snapshot()?;
    run(&ours, &batch, true);
    assert!(ours.clone().step_since(&before).is_ok());
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
