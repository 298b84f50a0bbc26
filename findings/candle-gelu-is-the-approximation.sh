#!/usr/bin/env bash
# candle's `gelu` is PyTorch's `gelu(approximate="tanh")`, and candle-transformers' DistilBERT and
# Whisper call it where the models have the exact one.
#
# Expected: the outputs of transformers up to rounding, 1e-6, as BERT's are here, whose activation is
# `gelu_erf`. Seen: DistilBERT is off by 5e-4 and Whisper by 7e-4, hundreds of roundings. They agree
# once PyTorch's gelu is the approximation too. Falcon, DINOv2, BEiT, Hiera and Segment Anything call
# `gelu` as well.
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

# Writes models of random weights, and transformers' outputs with the exact gelu and the other.
PYTHONPATH="$project/lib" HF_HUB_OFFLINE=1 python3 - <<'EOF'
import json
import pathlib

import torch
import transformers as hf
from safetensors.torch import save_file

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
exact = torch.nn.functional.gelu
torch.manual_seed(0)
ids = torch.arange(3, 14)[None]
sound = {"input_features": torch.randn(1, 8, 40), "decoder_input_ids": ids}
whisper = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": [],
}
bert = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
for name, kind, options, inputs in (
    ("bert", hf.BertConfig, bert | {"num_hidden_layers": 2}, {"input_ids": ids}),
    (
        "distilbert",
        hf.DistilBertConfig,
        {"dim": 64, "hidden_dim": 256, "n_layers": 2, "n_heads": 4},
        {"input_ids": ids},
    ),
    ("whisper", hf.WhisperConfig, whisper, sound),
):
    config = kind(vocab_size=32, attn_implementation="eager", **options)
    results = dict(inputs)
    for approximate in ("none", "tanh"):
        gelu = lambda x, approximate=approximate: exact(x, approximate=approximate)
        torch.nn.functional.gelu = gelu
        torch.manual_seed(0)
        model = hf.AutoModel.from_config(config).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "encoder.embed_positions" not in parameter_name:  # sinusoids
                    parameter.add_(0.1 * torch.randn_like(parameter))
            results[approximate] = model(**inputs).last_hidden_state.clone()
    torch.nn.functional.gelu = exact
    model.save_pretrained(name)
    save_file(results, f"{name}/expected.safetensors")
    path = pathlib.Path(name, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"suppress_tokens": []}))
EOF

cat >src/main.rs <<'EOF'
use candle_core::{DType, Device::Cpu, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{bert, distilbert, whisper};
use std::{collections::HashMap, error::Error};

fn output(name: &str, inputs: &HashMap<String, Tensor>) -> Result<Tensor, Box<dyn Error>> {
    let config = std::fs::read_to_string(format!("{name}/config.json"))?;
    let mut weights = candle_core::safetensors::load(format!("{name}/model.safetensors"), &Cpu)?;
    if name == "whisper" {
        let prefixed = |(name, weight)| (format!("model.{name}"), weight);
        weights = weights.into_iter().map(prefixed).collect();
    }
    let vb = VarBuilder::from_tensors(weights, DType::F32, &Cpu);
    let ids = |name: &str| inputs[name].to_dtype(DType::U32);
    Ok(match name {
        "bert" => {
            let config: bert::Config = serde_json::from_str(&config)?;
            let ids = ids("input_ids")?;
            bert::BertModel::load(vb, &config)?.forward(&ids, &ids.zeros_like()?, None)?
        }
        "distilbert" => {
            let config: distilbert::Config = serde_json::from_str(&config)?;
            let ids = ids("input_ids")?;
            let mask = Tensor::zeros((ids.dim(1)?, ids.dim(1)?), DType::U8, &Cpu)?;
            distilbert::DistilBertModel::load(vb, &config)?.forward(&ids, &mask)?
        }
        _ => {
            let config: whisper::Config = serde_json::from_str(&config)?;
            let mut model = whisper::model::Whisper::load(&vb, config)?;
            let sound = model.encoder.forward(&inputs["input_features"], true)?;
            model.decoder.forward(&ids("decoder_input_ids")?, &sound, true)?
        }
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    for name in ["bert", "distilbert", "whisper"] {
        let tensors = candle_core::safetensors::load(format!("{name}/expected.safetensors"), &Cpu)?;
        let output = output(name, &tensors)?;
        let error = |gelu| (&output - &tensors[gelu])?.abs()?.max_all()?.to_scalar::<f32>();
        let (exact, approximate) = (error("none")?, error("tanh")?);
        println!("{name}: off by {exact:.0e}, and by {approximate:.0e} from the approximation");
        let (right, wrong) =
            if name == "bert" { (exact, approximate) } else { (approximate, exact) };
        assert!(right < 1e-5 && wrong > 1e-4, "this has changed");
    }
    Ok(())
}
EOF
cargo run --quiet
