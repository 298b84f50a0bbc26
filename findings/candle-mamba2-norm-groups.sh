#!/usr/bin/env bash
# candle-transformers' Mamba 2 normalizes all groups of a layer together.
#
# Expected: with `n_groups` of 2 the gated norm has a mean square for each half of the channels, as
# in transformers and mamba_ssm. Seen: candle has groups everywhere but in the norm. With one group
# the logits agree to six digits. With two, where half of the channels are smaller, they are off by
# 1 in logits of up to 2.5. Nothing fails, because the norm's weight has the same shape for any
# number of groups.
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

# Writes a model of one group and one of two, and transformers' logits.
PYTHONPATH="$project/lib" HF_HUB_OFFLINE=1 python3 - <<'EOF'
import torch
import transformers as hf
from safetensors.torch import save_file

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
for groups in (1, 2):
    config = hf.Mamba2Config(
        hidden_size=64,
        num_hidden_layers=2,
        vocab_size=32,
        num_heads=8,
        head_dim=16,
        n_groups=groups,
        state_size=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = hf.Mamba2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.backbone.layers:
            layer.mixer.conv1d.weight[:64] *= 0.1  # the first half of the channels
            layer.mixer.D.uniform_(0, 1)
        ids = torch.arange(3, 14)[None]
        logits = model(ids).logits[0, -1]
    model.save_pretrained(f"{groups}")
    save_file({"ids": ids, "logits": logits.contiguous()}, f"{groups}/expected.safetensors")
EOF

cat >src/main.rs <<'EOF'
use candle_core::{DType, Device::Cpu, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::mamba2::{Config, Model, State};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let mut errors = Vec::new();
    for groups in [1, 2] {
        let config = std::fs::read_to_string(format!("{groups}/config.json"))?;
        let config: Config = serde_json::from_str(&config)?;
        let load = |name| candle_core::safetensors::load(format!("{groups}/{name}"), &Cpu);
        let (expected, weights) = (load("expected.safetensors")?, load("model.safetensors")?);
        let vb = VarBuilder::from_tensors(weights, DType::F32, &Cpu);
        let model = Model::new(&config, vb.pp("backbone"))?;
        let mut state = State::new(1, &config, DType::F32, &Cpu)?;
        let mut logits = Tensor::zeros(32, DType::F32, &Cpu)?;
        for token in expected["ids"].to_dtype(DType::U32)?.squeeze(0)?.to_vec1::<u32>()? {
            logits = model.forward(&Tensor::new(&[token], &Cpu)?, &mut state)?.flatten_all()?;
        }
        let largest = |xs: Tensor| xs.abs()?.max_all()?.to_scalar::<f32>();
        let error = largest((logits - &expected["logits"])?)?;
        let size = largest(expected["logits"].clone())?;
        println!("n_groups {groups}: off by {error:.1e} in {size:.1}");
        errors.push(error);
    }
    assert!(errors[0] < 1e-3, "the rest of the model has changed");
    assert!(errors[1] > 0.1, "this has changed");
    Ok(())
}
EOF
cargo run --quiet
