#!/usr/bin/env bash
# Q2K, Q4K and Q5K turn constant numbers into zeros.
#
# Expected: numbers that are all the same are the easiest to quantize: 1 comes back as 1, as from
# Q4_0, Q3K, Q6K and Q8_0. Seen: each run of 16 (Q2K) or 32 (Q4K, Q5K) equal numbers comes back as
# 0, with other numbers beside it or not. A normalization's fresh weight of ones is such a run.
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
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device::Cpu, Result, Tensor};

fn main() -> Result<()> {
    // Four runs of 32 ones, and other numbers.
    let numbers: Vec<f32> = (0..256).map(|k| if k < 128 { 1. } else { k as f32 / 256. }).collect();
    let xs = Tensor::from_vec(numbers, (1, 256), &Cpu)?;
    for (dtype, of_ones) in [
        (GgmlDType::Q2K, 0.),
        (GgmlDType::Q4K, 0.),
        (GgmlDType::Q5K, 0.),
        (GgmlDType::Q3K, 1.),
        (GgmlDType::Q6K, 1.),
        (GgmlDType::Q4_0, 1.),
        (GgmlDType::Q8_0, 1.),
    ] {
        let ys = QTensor::quantize(&xs, dtype)?.dequantize(&Cpu)?.flatten_all()?.to_vec1::<f32>()?;
        println!("{dtype:?}: 1 becomes {}, {} becomes {}", ys[0], 200. / 256., ys[200]);
        assert!((ys[0] - of_ones).abs() < 0.01 && (ys[200] - 200. / 256.).abs() < 0.2);
    }
    Ok(())
}
END
cargo run --quiet
