#!/usr/bin/env bash
# A step of AdamW takes several times as long for weights in bf16 as for as many in f32.
#
# Expected: it is limited by memory, so half the bytes take half the time. Seen: AdamW makes 15 tensors
# for each variable, and candle's element-wise loops are slow in bf16. On an Intel Xeon with AVX512-BF16 a
# million weights took 99 ms in bf16 and 9 in f32, and 90 and 8 with -C target-cpu=native.
#
# candle-core and candle-nn 0.11.1, 2026-11-30. Exits non-zero if this changes. FINDINGS_TARGET_DIR may
# name a folder for builds that several of these scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
export CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target} CANDLE_NUM_THREADS=1
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1 candle-nn@=0.11.1 mimalloc@0.1
cat >src/main.rs <<'END'
use candle_core::{DType, Device::Cpu, Result, Var};
use candle_nn::{AdamW, Optimizer};
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The least milliseconds of ten steps of a million weights.
fn step(dtype: DType) -> Result<f64> {
    let weight = Var::randn(0f32, 1., (1024, 1024), &Cpu)?;
    let weight = Var::from_tensor(&weight.as_tensor().to_dtype(dtype)?)?;
    let gradients = weight.as_tensor().sqr()?.sum_all()?.backward()?;
    let mut optimizer = AdamW::new_lr(vec![weight], 1e-3)?;
    let mut least = f64::INFINITY;
    for _ in 0..10 {
        let start = Instant::now();
        optimizer.step(&gradients)?;
        least = least.min(start.elapsed().as_secs_f64() * 1e3);
    }
    println!("{dtype:?}: {least:.1} ms");
    Ok(least)
}

fn main() -> Result<()> {
    let (f32, bf16) = (step(DType::F32)?, step(DType::BF16)?);
    assert!(bf16 > 3. * f32);
    Ok(())
}
END
cargo run --quiet --release
RUSTFLAGS="-C target-cpu=native" cargo run --quiet --release
