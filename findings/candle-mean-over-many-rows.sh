#!/usr/bin/env bash
# The mean over 2^20 rows of 0.1 in f32 is 0.101, and the sum of 20,971,520 ones is 16,777,216.
#
# Expected: about seven digits, as from a sum in parts. Seen: sums over the first dimension add
# one row after the other to one accumulator in f32. The same numbers along the last dimension are
# added in many accumulators: sum_all of the ones is exact.
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
use candle_core::{DType, Device::Cpu, Result, Tensor};

fn main() -> Result<()> {
    let xs = Tensor::full(0.1f32, (1 << 20, 2), &Cpu)?;
    let mean = xs.mean(0)?.to_vec1::<f32>()?[0];
    let in_parts = xs.reshape((1 << 10, 1 << 10, 2))?.mean(0)?.mean(0)?.to_vec1::<f32>()?[0];
    println!("mean of 2^20 rows of 0.1: {mean}; by two means over 2^10: {in_parts}");
    assert!((0.1005..0.1015).contains(&mean) && (in_parts - 0.1).abs() < 1e-5);

    let n = (1 << 24) + (1 << 22);
    let ones = Tensor::ones(n, DType::F32, &Cpu)?;
    let (all, rows) = (ones.sum_all()?.to_scalar::<f32>()?, ones.reshape((n, 1))?.sum(0)?);
    let rows = rows.to_vec1::<f32>()?[0];
    println!("sum of {n} ones: {all} by sum_all, {rows} by sum(0) of a column");
    assert_eq!((all, rows), (n as f32, 16_777_216.));
    Ok(())
}
END
cargo run --quiet
