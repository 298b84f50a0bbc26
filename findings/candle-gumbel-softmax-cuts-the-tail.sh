#!/usr/bin/env bash
# gumbel_softmax never draws a token of probability 0.0001, and one of 0.001 less than half as
# often as it should.
#
# Expected: adding Gumbel noise and taking the largest draws from the softmax exactly. Seen: the
# uniform numbers behind the noise end at 0.999, so the noise ends at 6.9, and a token whose logit
# is further below the others has no chance.
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
use candle_core::{D, DType, Device::Cpu, Result, Tensor};
use candle_nn::sampling::gumbel_softmax;

fn main() -> Result<()> {
    const DRAWS: usize = 400_000;
    for (p, least, most) in [(0.05f32, 0.95, 1.05), (1e-3, 0.3, 0.7), (1e-4, 0., 0.05)] {
        let logits = Tensor::new(&[(1. - p).ln(), p.ln()], &Cpu)?;
        let logits = logits.broadcast_as((DRAWS, 2))?.contiguous()?;
        let drawn = gumbel_softmax(&logits, 1., D::Minus1)?.to_dtype(DType::F64)?;
        let share = drawn.sum_all()?.to_scalar::<f64>()? / DRAWS as f64;
        println!("a token of probability {p} is drawn with {share}");
        assert!((least..=most).contains(&(share / f64::from(p))));
    }
    Ok(())
}
END
cargo run --quiet
