#!/usr/bin/env bash
# In bf16 a weight of Gemma's RMSNorm below 0.0039 does nothing in candle-transformers.
#
# Expected: the norm multiplies by 1 + weight in f32 and rounds once, as in transformers, whose
# logits for a weight of 0.0035 are 0.35 % larger than those for 0. Seen: candle adds 1 in bf16,
# where the next number after 1 is 1.0078. Weights of 0.0035 and −0.0019 give the logits of a weight
# of 0, bit for bit, so small steps of a fine-tuning are lost although the weight holds them. A
# weight of 0.02 acts as 0.0234. Gemma 2 and 3 and RecurrentGemma have the same lines.
#
# candle-transformers 0.11.1, transformers 5.24.0, torch 2.15.0, on a CPU, 2026-11-29. Exits
# non-zero if this changes.
# FINDINGS_TARGET_DIR may name a folder for builds that several of these scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
python3 -m pip install --quiet --no-compile --target "$project/lib" \
  transformers==5.24.0 torch==2.15.0 numpy==2.4.6
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1 candle-nn@=0.11.1 candle-transformers@=0.11.1 serde_json@1

# Writes an embedding, a norm and the tied head in bf16, and transformers' logits in bf16 and f32.
PYTHONPATH="$project/lib" HF_HUB_OFFLINE=1 python3 - <<'EOF'
import json

import torch
import transformers as hf
from safetensors.torch import save_file

hf.logging.set_verbosity_error()
shared = {
    "vocab_size": 64,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
}
special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
model = hf.GemmaForCausalLM(hf.GemmaConfig(**shared, **special)).eval()
generator = torch.Generator().manual_seed(0)
tensors = {"ids": torch.arange(64)[:, None]}
with torch.no_grad():
    embedding = torch.randn(64, 512, generator=generator).bfloat16().float()
    model.model.embed_tokens.weight.copy_(embedding)
    tensors["model.embed_tokens.weight"] = embedding.bfloat16()
    for weight in (0.0, 0.0035, -0.0019, 0.02):
        model.model.norm.weight.fill_(torch.tensor(weight).bfloat16())
        for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            tensors[f"{name} {weight}"] = model.to(dtype)(tensors["ids"]).logits[:, 0].float()
        model.float()
save_file(tensors, "tensors.safetensors")
with open("config.json", "w") as file:
    json.dump(shared | {"rope_theta": 10000.0}, file)
EOF

cat >src/main.rs <<'EOF'
use candle_core::{DType, Device::Cpu, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::gemma::{Config, Model};
use std::{collections::HashMap, error::Error};

fn main() -> Result<(), Box<dyn Error>> {
    let config: Config = serde_json::from_str(&std::fs::read_to_string("config.json")?)?;
    let tensors = candle_core::safetensors::load("tensors.safetensors", &Cpu)?;
    let ids = tensors["ids"].to_dtype(DType::U32)?;
    let run = |weight: f64| {
        let embedding = tensors["model.embed_tokens.weight"].clone();
        let weight = (Tensor::ones(512, DType::F32, &Cpu)? * weight)?.to_dtype(DType::BF16)?;
        let weights = HashMap::from([
            ("model.embed_tokens.weight".to_owned(), embedding),
            ("model.norm.weight".to_owned(), weight),
        ]);
        let vb = VarBuilder::from_tensors(weights, DType::BF16, &Cpu);
        Model::new(false, &config, vb)?.forward(&ids, 0)?.squeeze(1)?.to_dtype(DType::F32)
    };
    // How many times as large as for a weight of 0, over 64 × 64 logits.
    let base = &tensors["f32 0.0"];
    let gain = |logits: &Tensor| -> candle_core::Result<f32> {
        (logits * base)?.sum_all()?.div(&base.sqr()?.sum_all()?)?.to_scalar()
    };
    let zero = run(0.)?;
    for weight in ["0.0035", "-0.0019", "0.02"] {
        let logits = run(weight.parse()?)?;
        let changed = (&logits - &zero)?.abs()?.max_all()?.to_scalar::<f32>()?;
        let right = gain(&tensors[&format!("f32 {weight}")])?;
        let torch = gain(&tensors[&format!("bf16 {weight}")])?;
        let candle = gain(&logits)?;
        println!("{weight}: {right:.4}; in bf16 transformers {torch:.4}, candle {candle:.4}");
        assert!((right - torch).abs() < 1e-3, "transformers has changed");
        assert_eq!(changed == 0., weight != "0.02", "this has changed");
    }
    Ok(())
}
EOF
cargo run --quiet
