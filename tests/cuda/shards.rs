//! Shards of every kind on several ranks, against the CPU path on all rows: trajectories through a
//! warm-up. The pairs have ranks among their settings too.

use crate::arguments::{Arguments, Offsets, Wanted};
use crate::common::{keep, Data};
use candle::{DType, Result};
use candle_powernorm::{PowerNormConfig, Recipe, Statistics};

const WARM_UP: usize = 3;
const STEPS: usize = 9;
const ROWS: usize = 23;

/// How a step's batch is spread: shares by weight, and the rank whose rows are all padding, if
/// there is a mask.
struct Spread {
    shares: &'static [usize],
    padded: Option<usize>,
}

/// Each comes in the warm-up or after it, and some in both.
const SPREADS: [Spread; 5] = [
    spread(&[1, 1], None),
    spread(&[1, 4, 0, 2], Some(1)),
    spread(&[0, 1, 0], None),
    spread(&[5, 1, 3], Some(0)),
    spread(&[0, 1], Some(1)),
];

const fn spread(shares: &'static [usize], padded: Option<usize>) -> Spread {
    Spread { shares, padded }
}

fn trajectory(
    config: PowerNormConfig,
    (input, builder): (DType, DType),
    cols: usize,
    masked: bool,
) -> Result<()> {
    let mut data = Data::new(cols as u64);
    let mut state = None;
    for step in 0..STEPS {
        let Spread { shares, padded } = SPREADS[step % SPREADS.len()];
        let mut arguments = Arguments::random(&mut data, config, ROWS, input, builder, cols);
        arguments.steps = step;
        if let Some((phi, nu)) = state {
            arguments.running_phi = phi;
            arguments.ema_gz = (nu / (1. - config.alpha_bwd))?;
        }
        if masked {
            let mut mask = data.mask(ROWS);
            if let Some(padded) = padded {
                mask[arguments.rows_of(shares, padded)].fill(false);
            }
            arguments.keep = Some(keep(&mask, &[ROWS]));
        }
        if step % 2 == 1 {
            arguments.loss_scale = 64.;
            let residual = data.normal(ROWS * cols);
            arguments.residual = Some(data.tensor(&residual, &[ROWS, cols], input));
        }
        let what = format!("{input:?}, {cols}, {config:?}, masked {masked}, step {step}");
        let (wanted, offsets) = (Wanted::ALL, Offsets::AtTheStart);
        let results = arguments.check(&what, builder, wanted, offsets, shares, false)?;
        let (phi, nu) = results[0].state();
        state = Some((phi.clone(), nu.clone()));
    }
    Ok(())
}

/// Every recipe and statistic, with and without a mask.
fn trajectories(dtypes: (DType, DType), cols: usize, groups: Option<usize>) -> Result<()> {
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        for statistics in [Statistics::Running, Statistics::Batch] {
            for masked in [false, true] {
                let config = PowerNormConfig {
                    recipe,
                    statistics,
                    group_scaling: groups,
                    warmup_steps: WARM_UP,
                    affine: groups != Some(1),
                    ..1e-5.into()
                };
                trajectory(config, dtypes, cols, masked)?;
            }
        }
    }
    Ok(())
}

#[test]
fn shards_in_f32() -> Result<()> {
    trajectories((DType::F32, DType::F32), 66, Some(2))
}

#[test]
fn shards_in_f64() -> Result<()> {
    trajectories((DType::F64, DType::F64), 33, None)
}

#[test]
fn shards_in_f16_with_f32_parameters() -> Result<()> {
    trajectories((DType::F16, DType::F32), 40, Some(1))
}

#[test]
fn shards_in_bf16() -> Result<()> {
    trajectories((DType::BF16, DType::BF16), 48, Some(4))
}

/// Groups wider than a block, whose factors a launch of its own reduces.
#[test]
fn shards_in_f64_with_wide_groups() -> Result<()> {
    for (recipe, statistics) in [
        (Recipe::Paper, Statistics::Running),
        (Recipe::Fairseq, Statistics::Batch),
    ] {
        let config = PowerNormConfig {
            recipe,
            statistics,
            group_scaling: Some(1),
            warmup_steps: WARM_UP,
            ..1e-5.into()
        };
        trajectory(config, (DType::F64, DType::F64), 2051, true)?;
    }
    Ok(())
}
