#!/usr/bin/env bash
# A byte-level model that keeps its ids in U8 never learns byte 255.
#
# Expected: with 256 classes and logits of 0, each label has a loss of ln 256 = 5.545. Seen: label
# 255 in U8 has a loss of 0, and its embedding is a row of zeros, because the largest number of an
# index's dtype means "no index". In U32 both are right.
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
use candle_nn::loss::cross_entropy;

fn main() -> Result<()> {
    let logits = Tensor::zeros((1, 256), DType::F32, &Cpu)?;
    let embeddings = Tensor::ones((256, 1), DType::F32, &Cpu)?;
    for (id, loss_in_u8, row_in_u8) in [(254u8, 256f32.ln(), 1.), (255, 0., 0.)] {
        for dtype in [DType::U8, DType::U32] {
            let id_tensor = Tensor::new(&[id], &Cpu)?.to_dtype(dtype)?;
            let loss = cross_entropy(&logits, &id_tensor)?.to_scalar::<f32>()?;
            let row = embeddings.embedding(&id_tensor)?.to_vec2::<f32>()?[0][0];
            println!("label {id} in {dtype:?}: loss {loss}, embedding {row}");
            let expected = if dtype == DType::U8 { (loss_in_u8, row_in_u8) } else { (256f32.ln(), 1.) };
            assert!((loss - expected.0).abs() < 1e-4 && row == expected.1);
        }
    }
    Ok(())
}
END
cargo run --quiet
