#!/usr/bin/env bash
# In bf16 candle-transformers' Qwen 2 gives other logits for the same tokens further on in a text.
#
# Expected: rotary embeddings see distances only, so a text that starts at position 1000 has the
# logits of one that starts at 0, up to bf16's rounding. Mistral, of the same crate and here with
# the same weights, has them. Seen: Qwen 2 makes its tables in the model's dtype. With bf16's eight
# bits an angle of 100 is off by up to 0.25, and from position 256 on tokens share positions.
# From 250 on the logits are off by 0.7 to 2.0, in logits of up to 3.2, and Mistral's, which makes
# its tables in f32, by 0.07 at most. In f32 both are right. Gemma, Mixtral, ModernBERT, OLMo, Phi 3
# and StarCoder 2 have the lines of Qwen 2.
#
# candle-transformers 0.11.1, on a CPU, 2026-11-29. Exits non-zero if this changes.
# FINDINGS_TARGET_DIR may name a folder for builds that several of these scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1 candle-nn@=0.11.1 candle-transformers@=0.11.1 serde_json@1
cat >src/main.rs <<'END'
use candle_core::{DType, Device::Cpu, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{mistral, qwen2};
use std::collections::HashMap;

/// Numbers of deviation 0.15 that bf16 holds exactly.
fn random(rows: usize, state: &mut u32) -> Result<Tensor> {
    let mut number = || {
        *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((*state >> 24) as f32 - 127.5) / 500.
    };
    let numbers: Vec<f32> = (0..rows * 64).map(|_| number()).collect();
    Tensor::from_vec(numbers, (rows, 64), &Cpu)?.to_dtype(DType::BF16)?.to_dtype(DType::F32)
}

/// One layer of Qwen 2 whose biases are 0, which makes it one of Mistral.
fn weights() -> Result<HashMap<String, Tensor>> {
    let mut weights = HashMap::new();
    let mut state = 1;
    let layer = "model.layers.0.";
    for name in ["q", "k", "v", "o"] {
        let name = format!("{layer}self_attn.{name}_proj");
        weights.insert(format!("{name}.weight"), random(64, &mut state)?);
        weights.insert(format!("{name}.bias"), Tensor::zeros(64, DType::F32, &Cpu)?);
    }
    for name in ["gate", "up", "down"] {
        weights.insert(format!("{layer}mlp.{name}_proj.weight"), random(64, &mut state)?);
    }
    for name in ["layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"] {
        weights.insert(format!("model.{name}.weight"), Tensor::ones(64, DType::F32, &Cpu)?);
    }
    for name in ["model.embed_tokens", "lm_head"] {
        weights.insert(format!("{name}.weight"), random(32, &mut state)?);
    }
    Ok(weights)
}

/// The logits after eight tokens, of which the first has position `start`.
fn logits(start: usize, mut next: impl FnMut(&Tensor, usize) -> Result<Tensor>) -> Result<Tensor> {
    let mut last = None;
    for (i, token) in [3u32, 14, 15, 9, 26, 5, 30, 8].into_iter().enumerate() {
        last = Some(next(&Tensor::new(&[[token]], &Cpu)?, start + i)?);
    }
    last.expect("a token").flatten_all()?.to_dtype(DType::F32)
}

fn main() -> Result<()> {
    let config = serde_json::json!({
        "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "sliding_window": 8192, "use_sliding_window": false, "max_window_layers": 1,
        "tie_word_embeddings": false, "rope_theta": 10_000., "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "use_flash_attn": false,
    });
    let qwen: qwen2::Config = serde_json::from_value(config.clone()).expect("a configuration");
    let mistral: mistral::Config = serde_json::from_value(config).expect("a configuration");
    let weights = weights()?;
    let run_qwen = |dtype, start| {
        let vb = VarBuilder::from_tensors(weights.clone(), dtype, &Cpu);
        let mut model = qwen2::ModelForCausalLM::new(&qwen, vb)?;
        logits(start, |ids, at| model.forward(ids, at))
    };
    let run_mistral = |dtype, start| {
        let vb = VarBuilder::from_tensors(weights.clone(), dtype, &Cpu);
        let mut model = mistral::Model::new(&mistral, vb)?;
        logits(start, |ids, at| model.forward(ids, at))
    };
    let right = run_mistral(DType::F32, 0)?;
    let largest = |xs: Tensor| xs.abs()?.max_all()?.to_scalar::<f32>();
    println!("largest logit {:.1}; errors of a text", largest(right.clone())?);
    for start in [0, 50, 100, 250, 1000, 4000] {
        let mut errors = Vec::new();
        for dtype in [DType::F32, DType::BF16] {
            errors.push(largest((run_qwen(dtype, start)? - &right)?)?);
            errors.push(largest((run_mistral(dtype, start)? - &right)?)?);
        }
        println!(
            "from {start}: Qwen 2 {:.0e}, Mistral {:.0e}; in bf16 Qwen 2 {:.2}, Mistral {:.2}",
            errors[0], errors[1], errors[2], errors[3]
        );
        assert!(errors[0] < 1e-3 && errors[1] < 1e-3, "f32 has changed");
        assert!(errors[3] < 0.2, "Mistral has changed");
        assert!(start < 250 || errors[2] > 0.5, "this has changed");
    }
    Ok(())
}
END
cargo run --quiet
