#!/usr/bin/env bash
# The softmax of 4096 equal scores in bf16 adds up to 16, and in f16 to 2.
#
# Expected: a softmax adds up to 1, within rounding. Seen: the exponentials are added in the dtype
# of the scores, where 256 + 1 is 256 (bf16) and 2048 + 1 is 2048 (f16), so each weight is 1/256
# or 1/2048. The fused softmax_last_dim does the same. For the same reason the cross-entropy of
# equal logits over 32,000 classes is 5.5 and 7.6, and not ln 32,000 = 10.4.
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
use candle_core::{DType, Device::Cpu, Result, Tensor};
use candle_nn::{loss, ops};

fn main() -> Result<()> {
    for (dtype, expected, expected_loss) in [(DType::BF16, 16., 5.53), (DType::F16, 2., 7.63)] {
        let scores = Tensor::zeros((1, 4096), dtype, &Cpu)?;
        for (name, weights) in [
            ("softmax", ops::softmax(&scores, 1)?),
            ("softmax_last_dim", ops::softmax_last_dim(&scores)?),
        ] {
            let sum = weights.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
            println!("{dtype:?}: {name} adds up to {sum}");
            assert_eq!(sum, expected);
        }
        let logits = Tensor::zeros((1, 32_000), dtype, &Cpu)?;
        let loss = loss::cross_entropy(&logits, &Tensor::new(&[3u32], &Cpu)?)?;
        let loss = loss.to_dtype(DType::F32)?.to_scalar::<f32>()?;
        println!("{dtype:?}: the loss of equal logits over 32,000 classes is {loss}");
        assert!((loss - expected_loss).abs() < 0.01);
    }
    Ok(())
}
END
cargo run --quiet
