#!/usr/bin/env bash
# In bf16 the product of 8 rows of a large matrix takes over a hundred times as long as that of a
# copy of these rows.
#
# Expected: a narrow view is free, so both take the same time, as they do in f16. Seen: a product
# in bf16 first converts the whole tensor behind the view to f32, and does so in each call. A
# cache that is allocated for 32,000 tokens costs 32,000 tokens each time 8 of them are read.
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
use std::time::Instant;

fn main() -> Result<()> {
    for (dtype, slow) in [(DType::BF16, true), (DType::F16, false)] {
        let view = Tensor::ones((32_000, 512), dtype, &Cpu)?.narrow(0, 100, 8)?;
        let copy = view.force_contiguous()?;
        let xs = Tensor::ones((512, 4), dtype, &Cpu)?;
        let time = |rows: &Tensor| -> Result<f64> {
            let mut least = f64::INFINITY;
            for _ in 0..3 {
                let start = Instant::now();
                rows.matmul(&xs)?;
                least = least.min(start.elapsed().as_secs_f64());
            }
            Ok(least)
        };
        let ratio = time(&view)? / time(&copy)?;
        println!("{dtype:?}: the view takes {ratio:.1} times as long as the copy");
        assert_eq!(ratio > 100., slow);
    }
    Ok(())
}
END
cargo run --quiet
