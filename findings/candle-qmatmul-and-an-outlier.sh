#!/usr/bin/env bash
# A product with a quantized identity matrix turns ones into zeros if a 1000 stands beside them.
#
# Expected: only the weight is quantized, and the numbers of an identity matrix are exact in Q8_0,
# so the output is the input. Seen: the input is quantized too, to 8 bits in blocks of 32 with one
# scale: beside 1000 the step is 7.9, and 1 becomes 0. Activations of trained transformers have
# such outliers. In other blocks the error is about half a per cent.
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
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device::Cpu, Module, Result, Tensor};

fn main() -> Result<()> {
    let identity = Tensor::eye(64, DType::F32, &Cpu)?;
    let layer = QMatMul::from_qtensor(QTensor::quantize(&identity, GgmlDType::Q8_0)?)?;
    let mut xs = vec![1f32; 64];
    xs[0] = 1000.;
    let ys = layer.forward(&Tensor::from_vec(xs, (1, 64), &Cpu)?)?.to_vec2::<f32>()?;
    println!("[1000, 1, .., 1, 1] becomes [{}, {}, .., {}, {}]", ys[0][0], ys[0][1], ys[0][32], ys[0][63]);
    assert!((ys[0][0] - 1000.).abs() < 1. && ys[0][1..32].iter().all(|&y| y == 0.));
    assert!(ys[0][32..].iter().all(|&y| (y - 1.).abs() < 0.01));
    Ok(())
}
END
cargo run --quiet
