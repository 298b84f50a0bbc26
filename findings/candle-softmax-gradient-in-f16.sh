#!/usr/bin/env bash
# The gradient of a softmax over 512 nearly equal scores in f16 is wrong by ten times its size.
#
# Expected: the f32 gradient, within f16's rounding of about 1e-3. The forward is right to that.
# Seen: the largest score's gradient is off by more than ten times the largest gradient there is.
# The backward of a quotient divides by the square of the divisor, here the sum of exponentials,
# which overflows f16 from 256 on; the term is lost, and the maximum that softmax subtracts gets
# the negative of what is missing.
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
use candle_core::{DType, Device::Cpu, Result, Tensor, Var};
use candle_nn::ops::softmax;

fn main() -> Result<()> {
    for (n, wrong) in [(128, false), (512, true)] {
        // Scores of fresh attention: small.
        let scores = (Tensor::arange(0f32, n as f32, &Cpu)?.sin()? * 0.1)?.reshape((1, n))?;
        let dy = (Tensor::arange(0f32, n as f32, &Cpu)? / n as f64)?.reshape((1, n))?;
        let run = |dtype| -> Result<(Tensor, Tensor)> {
            let scores = Var::from_tensor(&scores.to_dtype(dtype)?)?;
            let ys = softmax(&scores, 1)?;
            let gradients = (&ys * dy.to_dtype(dtype)?)?.sum_all()?.backward()?;
            let gradient = gradients.get(&scores).expect("a gradient").to_dtype(DType::F32)?;
            Ok((ys.to_dtype(DType::F32)?, gradient))
        };
        let ((ys, exact), (half_ys, half)) = (run(DType::F32)?, run(DType::F16)?);
        let max = |t: Tensor| t.abs()?.max_all()?.to_scalar::<f32>();
        let forward = max((half_ys - &ys)?)? / max(ys)?;
        let backward = max((half - &exact)?)? / max(exact)?;
        println!("{n} scores: the output is off by {forward:.1e}, the gradient by {backward:.1e}");
        assert!(forward < 5e-3);
        assert_eq!(backward > 10., wrong);
    }
    Ok(())
}
END
cargo run --quiet
