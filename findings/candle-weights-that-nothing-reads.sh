#!/usr/bin/env bash
# candle-transformers' Llama and StableLM leave out tensors of a file that their configuration asks
# for, without an error.
#
# Expected: `attention_bias` and `qk_layernorm` are read, or are an error. Seen: neither is a field
# of candle's configurations, serde skips unknown fields, and a VarBuilder does not tell which
# tensors nobody asked for. So Llama runs without its biases, and StableLM without the LayerNorms of
# its queries and keys. The logits are those of transformers with these tensors taken out. From
# those with them they are 2 off, in logits of up to 3.
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

# Writes both models, transformers' logits, and its logits without the tensors in question.
PYTHONPATH="$project/lib" HF_HUB_OFFLINE=1 python3 - <<'EOF'
import json
import pathlib

import torch
import transformers as hf
from safetensors.torch import save_file

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
shared = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
for name, kind, field in (
    ("llama", hf.LlamaConfig, "attention_bias"),
    ("stablelm", hf.StableLmConfig, "qk_layernorm"),
):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(kind(**shared, **{field: True})).eval()
    without = hf.AutoModelForCausalLM.from_config(kind(**shared, **{field: False})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        unread = without.load_state_dict(model.state_dict(), strict=False).unexpected_keys
        ids = torch.arange(3, 14)[None]
        results = {"ids": ids, "logits": model(ids).logits[0, -1].clone()}
        results["without"] = without(ids).logits[0, -1].clone()
    print(f"{name}: {len(unread)} tensors of {field}")
    assert unread
    model.save_pretrained(name)
    path = pathlib.Path(name, "config.json")
    fields = json.loads(path.read_text())
    # Where published files have these fields.
    rope = fields["rope_parameters"]
    path.write_text(json.dumps({key: rope[key] for key in rope if key != "rope_type"} | fields))
    save_file(results, f"{name}/expected.safetensors")
EOF

cat >src/main.rs <<'EOF'
use candle_core::{DType, Device::Cpu, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, stable_lm};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    for name in ["llama", "stablelm"] {
        let config = std::fs::read_to_string(format!("{name}/config.json"))?;
        let load = |file| candle_core::safetensors::load(format!("{name}/{file}"), &Cpu);
        let (expected, weights) = (load("expected.safetensors")?, load("model.safetensors")?);
        let vb = VarBuilder::from_tensors(weights, DType::F32, &Cpu);
        let ids = expected["ids"].to_dtype(DType::U32)?;
        let logits = if name == "llama" {
            let config: llama::LlamaConfig = serde_json::from_str(&config)?;
            let config = config.into_config(false);
            let mut cache = llama::Cache::new(false, DType::F32, &config, &Cpu)?;
            llama::Llama::load(vb, &config)?.forward(&ids, 0, &mut cache)?
        } else {
            let config: stable_lm::Config = serde_json::from_str(&config)?;
            stable_lm::Model::new(&config, vb)?.forward(&ids, 0)?
        };
        let largest = |xs: Tensor| xs.abs()?.max_all()?.to_scalar::<f32>();
        let logits = logits.flatten_all()?;
        let error = largest((&logits - &expected["logits"])?)?;
        let without = largest((&logits - &expected["without"])?)?;
        let size = largest(expected["logits"].clone())?;
        println!("{name}: off by {error:.1} in {size:.1}, and without these tensors {without:.0e}");
        assert!(without < 1e-3, "the rest of the model has changed");
        assert!(error > 0.2, "this has changed");
    }
    Ok(())
}
EOF
cargo run --quiet
