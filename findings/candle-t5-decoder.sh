#!/usr/bin/env bash
# candle-transformers' T5 has logits that are d_model times too large, and a decoder with the
# encoder's relative positions.
#
# Expected: transformers' logits, up to rounding. Seen: with tied embeddings, T5 multiplies the
# decoder's output by 1/√d_model and candle by √d_model. The largest logit stays where it is, but
# the softmax is nearly one-hot, so sampling is greedy and a loss is far too high. Divided by
# d_model, the logits agree for up to nine tokens. A decoder looks back only, so all of its 32
# buckets are for distances back, and distances share buckets from 16 on. candle uses 16 buckets, as
# an encoder does for one direction, and distances share them from 8 on. With 30 tokens that is off
# by 0.2, in logits of up to 0.5.
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

# Writes a model of random weights, and transformers' logits for decoders of several lengths.
PYTHONPATH="$project/lib" HF_HUB_OFFLINE=1 python3 - <<'EOF'
import torch
import transformers as hf
from safetensors.torch import save_file

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
torch.manual_seed(0)
config = hf.T5Config(
    d_model=64, d_ff=64, d_kv=16, num_layers=2, num_heads=4, vocab_size=32, decoder_start_token_id=0
)
model = hf.T5ForConditionalGeneration(config).eval()
ids = torch.arange(3, 14)[None]
results = {"ids": ids}
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = 1.0 if "relative" in name else 0.15
            parameter.copy_(scale * torch.randn_like(parameter))
    for length in (2, 9, 10, 16, 30):
        output = model(input_ids=ids, decoder_input_ids=torch.arange(length)[None])
        results[f"{length}"] = output.logits[0, -1].clone()
model.save_pretrained(".")
save_file(results, "expected.safetensors")
EOF

cat >src/main.rs <<'EOF'
use candle_core::{DType, Device::Cpu, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::t5;
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let config: t5::Config = serde_json::from_str(&std::fs::read_to_string("config.json")?)?;
    let expected = candle_core::safetensors::load("expected.safetensors", &Cpu)?;
    let weights = candle_core::safetensors::load("model.safetensors", &Cpu)?;
    let vb = VarBuilder::from_tensors(weights, DType::F32, &Cpu);
    let largest = |xs: Tensor| xs.abs()?.max_all()?.to_scalar::<f32>();
    for length in [2u32, 9, 10, 16, 30] {
        let mut model = t5::T5ForConditionalGeneration::load(vb.clone(), &config)?;
        let ids = expected["ids"].to_dtype(DType::U32)?;
        let targets = Tensor::arange(0u32, length, &Cpu)?.unsqueeze(0)?;
        let logits = model.forward(&ids, &targets)?.flatten_all()?;
        let expected = &expected[&length.to_string()];
        let error = largest(((&logits / config.d_model as f64)? - expected)?)?;
        let (logits, size) = (largest(logits)?, largest(expected.clone())?);
        println!("{length} tokens: {logits:.1} for {size:.2}; over d_model, off by {error:.0e}");
        assert!(logits > 50. * size, "the scale has changed");
        assert_eq!(error > 1e-3, length > 9, "the positions have changed");
    }
    Ok(())
}
EOF
cargo run --quiet
