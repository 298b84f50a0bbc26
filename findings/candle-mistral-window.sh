#!/usr/bin/env bash
# With a window of 4 tokens, candle-transformers' Mistral sees 5 of a text that it reads at once, and
# all of one that it reads token by token.
#
# Expected: a token sees itself and the three before it, as in transformers, however the text is
# split. Seen: the mask of a whole text hides distances greater than the window, not those equal to
# it. A single token has no mask, and the cache keeps everything. The logits are those of
# transformers for a window of 5 and for none. The masks of Gemma 2 and 3, Mixtral, Qwen 2 and
# StarCoder 2 have the same line.
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

# Writes a model of random weights, and transformers' logits with windows of 4, 5 and none.
PYTHONPATH="$project/lib" HF_HUB_OFFLINE=1 python3 - <<'EOF'
import json

import torch
import transformers as hf
from safetensors.torch import save_file

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
shared = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
special = {"bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}
ids = torch.arange(3, 15)[None]
results = {"ids": ids}
for window in (4, 5, None):
    torch.manual_seed(0)
    model = hf.MistralForCausalLM(hf.MistralConfig(**shared, **special, sliding_window=window))
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        whole = model(ids).logits[0, -1].clone()
        cache = None
        for token in ids[0]:
            output = model(token[None, None], cache=cache, use_cache=True)
            cache = output.cache
    assert (output.logits[0, -1] - whole).abs().max() < 1e-4, "transformers has changed"
    results[f"window {window}"] = whole
weights = {name: weight.clone() for name, weight in model.state_dict().items()}
save_file(weights, "model.safetensors")
save_file(results, "expected.safetensors")
with open("config.json", "w") as file:
    json.dump(shared | {"rope_theta": 10000.0, "sliding_window": 4}, file)
EOF

cat >src/main.rs <<'EOF'
use candle_core::{DType, Device::Cpu};
use candle_nn::VarBuilder;
use candle_transformers::models::mistral::{Config, Model};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let config: Config = serde_json::from_str(&std::fs::read_to_string("config.json")?)?;
    let expected = candle_core::safetensors::load("expected.safetensors", &Cpu)?;
    let weights = candle_core::safetensors::load("model.safetensors", &Cpu)?;
    let vb = VarBuilder::from_tensors(weights, DType::F32, &Cpu);
    let ids = expected["ids"].to_dtype(DType::U32)?;
    let whole = Model::new(&config, vb.clone())?.forward(&ids, 0)?.flatten_all()?;
    let mut model = Model::new(&config, vb)?;
    let mut single = whole.clone();
    for at in 0..ids.dim(1)? {
        single = model.forward(&ids.narrow(1, at, 1)?, at)?.flatten_all()?;
    }
    for (split, logits, equal) in [("at once", whole, "5"), ("one at a time", single, "None")] {
        for window in ["4", "5", "None"] {
            let difference = (&logits - &expected[&format!("window {window}")])?;
            let error = difference.abs()?.max_all()?.to_scalar::<f32>()?;
            println!("{split}: {error:.0e} from transformers with sliding_window={window}");
            assert_eq!(error < 1e-3, window == equal, "this has changed");
        }
    }
    Ok(())
}
EOF
cargo run --quiet
