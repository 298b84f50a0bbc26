#!/usr/bin/env bash
# burn 0.22.1, backend Flex (2026-11-29): BatchNorm keeps the biased variance.
#
# Expected: the batch is normalized by the biased variance, Σ (x − mean)²/n, and the running one moves
# towards the unbiased one, which divides by n − 1, as in PyTorch and candle.
# Seen: the running variance is the biased one as well. After one batch of four, with a momentum of
# 1, it is 3/4 of PyTorch's.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/src"
cat >"$dir/Cargo.toml" <<'EOF'
[package]
name = "burnt"
version = "0.1.0"
edition = "2024"

[dependencies]
burn = { version = "=0.22.1", features = ["flex", "pytorch", "safetensors"] }

[profile.dev]
debug = false
EOF
cat >"$dir/src/main.rs" <<'EOF'
use burn::nn::BatchNormConfig;
use burn::tensor::{Device, Tensor};

fn main() {
    let device = Device::flex().autodiff();
    let norm = BatchNormConfig::new(1).with_momentum(1.).init(&device);
    // Mean 3, squares of deviations 4 + 1 + 1 + 4.
    let x: Tensor<2> = Tensor::from_data([[1f32], [2.], [4.], [5.]], &device);
    norm.forward(x);
    let variance = norm.running_var.value_sync();
    let variance = variance.into_data_as::<f32>().try_to_vec::<f32>().unwrap()[0];
    println!("running variance {variance}: biased is 2.5, unbiased 3.333");
    assert!((variance - 2.5).abs() < 1e-5, "this has changed");
}
EOF
cargo run --quiet --manifest-path "$dir/Cargo.toml"
