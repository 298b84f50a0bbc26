#!/usr/bin/env bash
# candle-transformers adds 1 to the weights of Gemma 4's norms, which hold the whole factor.
#
# Expected: the logits of transformers for the same file. Seen: Gemma up to 3 stores γ − 1, and
# Gemma 4 stores γ. candle has the norm of Gemma 3, so fresh weights of 1 act as 2. There is a second
# difference: candle divides the scores of the attention by √head_dim, and Gemma 4 does not. With two
# layers the logits are off by 7 in logits of up to 10, without an error. They agree to six digits
# once the norms of candle's file are 1 smaller, and the norms of its queries √head_dim times as
# large before that. The vision model has the same norm.
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

# Writes models of no layer and of two, with random norms, and transformers' logits.
PYTHONPATH="$project/lib" HF_HUB_OFFLINE=1 python3 - <<'EOF'
import torch
import transformers as hf
from safetensors.torch import save_file

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
for layers in (0, 2):
    config = hf.Gemma4TextConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        hidden_size_per_layer_input=0,
        sliding_window=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = hf.Gemma4ForCausalLM(config).eval()
    ids = torch.arange(3, 14)[None]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() > 1 or "norm" in name else 0
            parameter.add_(scale * torch.randn_like(parameter))
        logits = model(ids).logits[0, -1]
    model.save_pretrained(f"{layers}")
    save_file({"ids": ids, "logits": logits.contiguous()}, f"{layers}/expected.safetensors")
EOF

cat >src/main.rs <<'EOF'
use candle_core::{DType, Device::Cpu, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::gemma4::{Gemma4TextConfig, text::TextModel};
use std::{collections::HashMap, error::Error};

fn main() -> Result<(), Box<dyn Error>> {
    for layers in [0, 2] {
        let config = std::fs::read_to_string(format!("{layers}/config.json"))?;
        let config: Gemma4TextConfig = serde_json::from_str(&config)?;
        let load = |file| candle_core::safetensors::load(format!("{layers}/{file}"), &Cpu);
        let (expected, weights) = (load("expected.safetensors")?, load("model.safetensors")?);
        let ids = expected["ids"].to_dtype(DType::U32)?;
        let largest = |xs: Tensor| xs.abs()?.max_all()?.to_scalar::<f32>();
        let error = |weights: HashMap<String, Tensor>| {
            let vb = VarBuilder::from_tensors(weights, DType::F32, &Cpu);
            let logits = TextModel::new(&config, vb)?.forward(&ids, 0)?.flatten_all()?;
            largest((logits - &expected["logits"])?)
        };
        let mut changed = weights.clone();
        for (name, weight) in &mut changed {
            if name.ends_with("q_norm.weight") {
                *weight = (&*weight * (weight.elem_count() as f64).sqrt())?;
            }
            if name.ends_with("norm.weight") {
                *weight = (&*weight - 1.)?;
            }
        }
        let (wrong, right) = (error(weights)?, error(changed)?);
        let size = largest(expected["logits"].clone())?;
        println!("{layers} layers: off by {wrong:.1} in {size:.1}, for changed weights {right:.0e}");
        assert!(right < 1e-3, "the rest of the model has changed");
        assert!(wrong > 1., "this has changed");
    }
    Ok(())
}
EOF
cargo run --quiet
