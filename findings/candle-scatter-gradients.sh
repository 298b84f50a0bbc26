#!/usr/bin/env bash
# The targets of scatter and scatter_add get each other's gradient.
#
# Expected: scatter overwrites elements of its target, whose gradient is therefore 0 there;
# scatter_add adds to them, so the gradient is 1 everywhere. Seen: the reverse.
#
# candle-core 0.11.1, on a CPU, 2026-11-29. Exits non-zero if this changes.
# FINDINGS_TARGET_DIR may name a folder for builds that several of these scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1
cat >src/main.rs <<'END'
use candle_core::{DType, Device::Cpu, Result, Tensor, Var};

fn main() -> Result<()> {
    let target = Var::zeros((2, 3), DType::F32, &Cpu)?;
    let source = Tensor::ones((2, 3), DType::F32, &Cpu)?;
    // All of the source goes to the first row.
    let rows = Tensor::zeros((2, 3), DType::U32, &Cpu)?;
    let gradient = |ys: Tensor| -> Result<Vec<Vec<f32>>> {
        ys.sum_all()?.backward()?.get(&target).expect("a gradient").to_vec2()
    };
    let overwritten = gradient(target.scatter(&rows, &source, 0)?)?;
    let added = gradient(target.scatter_add(&rows, &source, 0)?)?;
    println!("scatter, whose first row is overwritten: {overwritten:?}");
    println!("scatter_add: {added:?}");
    assert_eq!(overwritten, [[1.; 3], [1.; 3]]);
    assert_eq!(added, [[0.; 3], [1.; 3]]);
    Ok(())
}
END
cargo run --quiet
