//! ψ_B², Γ and Λ of training steps beside the oracle's, on any device.

use super::reference::Quantity;
use super::{assert_close, run, to_f64, Batch, Bound, Data, Twin};
use candle::{DType, Device, Result};
use candle_powernorm::{LossScale, PowerNormConfig, Recipe, Statistics};

const SIZE: usize = 6;
const ROWS: usize = 9;

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0., |max, value| max.max(value.abs()))
}

/// Steps a layer and its oracle side by side, on batches with a mask or without, and compares what
/// the oracle's batches had.
fn compare(device: &Device, config: PowerNormConfig, dtype: DType, padded: bool) -> Result<()> {
    let mut data = Data::on(device, 1);
    let mut twin = Twin::new(&mut data, SIZE, config, dtype);
    // The factor of the loss does not show.
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

        // The factors by which roundings of the state grow.
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

/// Both recipes and statistics, with group scaling and without, with a mask and without.
pub fn statistics_are_those_of_the_batch(device: &Device) -> Result<()> {
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
                compare(device, config, dtype, false)?;
                compare(device, config, dtype, true)?;
                compare(device, fairseq, dtype, false)?;
            }
        }
    }
    Ok(())
}
