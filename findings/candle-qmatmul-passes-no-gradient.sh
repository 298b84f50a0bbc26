#!/usr/bin/env bash
# A quantized linear layer passes no gradient to its input, and no error says so.
#
# Expected: under LoRA the base is frozen and quantized, and gradients flow through it to the
# adapters below, or the backward fails. Seen: QMatMul computes without recording itself, so the
# backward succeeds and the variable below has no gradient. Through a residual beside the layer a
# part of it arrives, which looks like training.
#
# candle-core and candle-nn 0.11.1, on a CPU, 2026-11-29. Exits non-zero if this changes.
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
use candle_core::{Device::Cpu, Module, Result, Tensor, Var};

fn main() -> Result<()> {
    let weight = QTensor::quantize(&Tensor::randn(0f32, 1., (256, 256), &Cpu)?, GgmlDType::Q8_0)?;
    let dense = weight.dequantize(&Cpu)?;
    let layer = QMatMul::from_qtensor(weight)?;
    let adapter = Var::from_tensor(&Tensor::randn(0f32, 1., (2, 256), &Cpu)?)?;
    let gradient = |ys: Tensor| -> Result<Option<f32>> {
        let gradients = ys.sum_all()?.backward()?;
        let largest = |g: &Tensor| g.abs()?.max_all()?.to_scalar::<f32>();
        gradients.get(&adapter).map(largest).transpose()
    };
    let quantized = gradient(layer.forward(&adapter)?)?;
    let with_residual = gradient((layer.forward(&adapter)? + adapter.as_tensor())?)?;
    let exact = gradient((adapter.matmul(&dense.t()?)? + adapter.as_tensor())?)?;
    println!("largest gradient: {quantized:?}; with a residual {with_residual:?}, by the same numbers in f32 {exact:?}");
    assert_eq!((quantized, with_residual), (None, Some(1.)));
    assert!(exact > Some(10.));
    Ok(())
}
END
cargo run --quiet
