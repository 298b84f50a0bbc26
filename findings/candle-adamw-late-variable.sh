#!/usr/bin/env bash
# AdamW's first step of a variable that joins late is 2.5 to 3.2 times the learning rate.
#
# Expected: Adam's first step of a variable is the learning rate, by the bias correction. Seen:
# candle counts the steps of the optimizer and not those of the variable (PyTorch counts each
# parameter's). For a variable whose first gradient comes after 1000 steps, as that of a layer
# which was frozen, the correction is nearly gone: (1 − β₁) / √(1 − β₂) = 3.16 in the limit.
#
# candle-core and candle-nn 0.11.1, on a CPU, 2026-11-29. Exits non-zero if this changes.
# FINDINGS_TARGET_DIR may name a folder for builds that several of these scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1 candle-nn@=0.11.1
cat >src/main.rs <<'END'
use candle_core::{Device::Cpu, Result, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};

fn main() -> Result<()> {
    let [early, late] = [Var::new(0f32, &Cpu)?, Var::new(0f32, &Cpu)?];
    let params = ParamsAdamW { lr: 1., weight_decay: 0., ..Default::default() };
    let mut optimizer = AdamW::new(vec![early.clone(), late.clone()], params)?;
    optimizer.backward_step(early.as_tensor())?;
    let first = -early.to_scalar::<f32>()?;
    for _ in 0..999 {
        optimizer.backward_step(early.as_tensor())?;
    }
    optimizer.backward_step(&(early.as_tensor() + late.as_tensor())?)?;
    let joined = -late.to_scalar::<f32>()?;
    println!("first step from the start: {first} learning rates; after 1000 steps: {joined}");
    assert!((first - 1.).abs() < 1e-3 && (2.4..3.2).contains(&joined));
    Ok(())
}
END
cargo run --quiet
