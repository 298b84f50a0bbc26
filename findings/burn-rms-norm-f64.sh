#!/usr/bin/env bash
# burn 0.22.1, backend Flex (2026-11-29): RmsNorm of f64 has the digits of f32.
#
# Expected: an error near 1e-15, as LayerNorm of f64 has.
# Seen: 6e-9 for this row, and 2e-7 for random ones. It squares, adds up and takes the root in f32, whatever the input's dtype, and returns
# f64.
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
use burn::nn::{LayerNormConfig, RmsNormConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};

const C: usize = 512;

fn largest_error(y: Tensor<2>, expected: &[f64]) -> f64 {
    assert_eq!(y.dtype(), DType::F64);
    let y = y.into_data_as::<f64>().try_to_vec::<f64>().unwrap();
    let errors = y.iter().zip(expected).map(|(y, expected)| (y - expected).abs());
    errors.fold(0., f64::max)
}

fn main() {
    let device = Device::flex();
    let x: Vec<f64> = (0..C).map(|i| (i as f64 * 0.7).sin()).collect();
    let tensor = || Tensor::from_data(TensorData::new(x.clone(), [1, C]), (&device, DType::F64));
    let normalized = |mean: f64| -> Vec<f64> {
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / C as f64;
        x.iter().map(|x| (x - mean) / (variance + 1e-5).sqrt()).collect()
    };

    let mut rms_norm = RmsNormConfig::new(C).init(&device);
    rms_norm.gamma = rms_norm.gamma.map(|gamma| gamma.cast(DType::F64));
    let mut layer_norm = LayerNormConfig::new(C).init(&device);
    layer_norm.gamma = layer_norm.gamma.map(|gamma| gamma.cast(DType::F64));
    layer_norm.beta = layer_norm.beta.map(|beta| beta.map(|beta| beta.cast(DType::F64)));

    let of_rms_norm = largest_error(rms_norm.forward(tensor()), &normalized(0.));
    let mean = x.iter().sum::<f64>() / C as f64;
    let of_layer_norm = largest_error(layer_norm.forward(tensor()), &normalized(mean));
    println!("largest error in f64: RmsNorm {of_rms_norm:.1e}, LayerNorm {of_layer_norm:.1e}");
    assert!(of_rms_norm > 1e-9 && of_layer_norm < 1e-13, "this has changed");
}
EOF
cargo run --quiet --manifest-path "$dir/Cargo.toml"
