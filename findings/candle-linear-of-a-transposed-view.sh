#!/usr/bin/env bash
# `Linear` of a transposed view is right for one sequence and wrong for two.
#
# Expected: a view and a contiguous copy of it have the same output. Seen: with one sequence they
# do; with two the outputs differ by more than their size, in f32 and f64, without an error. The
# product of a batch with one weight is computed as one matrix of all rows, as if the rows of the
# view followed each other.
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
use candle_core::{DType, Device::Cpu, Module, Result, Tensor};
use candle_nn::Linear;

fn main() -> Result<()> {
    for dtype in [DType::F32, DType::F64] {
        let weight = Tensor::randn(0f32, 1., (4, 8), &Cpu)?.to_dtype(dtype)?;
        let linear = Linear::new(weight, None);
        for sequences in [1, 2] {
            let xs = Tensor::randn(0f32, 1., (sequences, 8, 5), &Cpu)?.to_dtype(dtype)?;
            let view = xs.transpose(1, 2)?;
            let copy = view.contiguous()?;
            let difference = (linear.forward(&view)? - linear.forward(&copy)?)?.abs()?.max_all()?;
            let difference = difference.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            println!("{dtype:?}, {sequences} sequences: the view's output is off by {difference:.1e}");
            assert_eq!(difference > 0.1, sequences == 2);
        }
    }
    Ok(())
}
END
cargo run --quiet
