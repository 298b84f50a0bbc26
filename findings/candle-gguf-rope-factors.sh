#!/usr/bin/env bash
# candle-transformers' quantized Llama does not read `rope_freqs.weight`, so a GGUF file of Llama
# 3.1 is another model than its checkpoint.
#
# Expected: the same logits for the same weights. They are the same without RoPE scaling. Seen: the
# scaling of Llama 3.1 and later, `rope_scaling` in a config.json, is in GGUF a tensor of the
# factors by which frequencies are divided. `llama.rs` computes them, and `quantized_llama.rs`
# leaves the tensor out without an error: its logits are those of a file without it. After 500
# tokens, which is within the original context, they are off by 0.5 in logits of up to 3.3.
#
# candle-transformers 0.11.1, on a CPU, 2026-11-29. Exits non-zero if this changes.
# FINDINGS_TARGET_DIR may name a folder for builds that several of these scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1 candle-nn@=0.11.1 candle-transformers@=0.11.1
cat >src/main.rs <<'END'
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Device::Cpu, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, quantized_llama};
use std::{collections::HashMap, f32::consts::PI, io::Cursor};

const SIZE: usize = 64; // two heads
const HEAD: usize = 32;

/// Numbers of deviation 0.15.
fn random(rows: usize, state: &mut u32) -> Result<Tensor> {
    let mut number = || {
        *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((*state >> 24) as f32 - 127.5) / 500.
    };
    Tensor::from_vec((0..rows * SIZE).map(|_| number()).collect(), (rows, SIZE), &Cpu)
}

/// One layer, under the names of a checkpoint and under those of GGUF.
fn weights() -> Result<[HashMap<String, Tensor>; 2]> {
    let mut state = 1;
    let (mut checkpoint, mut gguf) = (HashMap::new(), HashMap::new());
    for (long, short, rows) in [
        ("model.embed_tokens", "token_embd", 32),
        ("lm_head", "output", 32),
        ("model.layers.0.self_attn.q_proj", "blk.0.attn_q", SIZE),
        ("model.layers.0.self_attn.k_proj", "blk.0.attn_k", SIZE),
        ("model.layers.0.self_attn.v_proj", "blk.0.attn_v", SIZE),
        ("model.layers.0.self_attn.o_proj", "blk.0.attn_output", SIZE),
        ("model.layers.0.mlp.gate_proj", "blk.0.ffn_gate", SIZE),
        ("model.layers.0.mlp.up_proj", "blk.0.ffn_up", SIZE),
        ("model.layers.0.mlp.down_proj", "blk.0.ffn_down", SIZE),
    ] {
        let weight = random(rows, &mut state)?;
        checkpoint.insert(format!("{long}.weight"), weight.clone());
        // GGUF has the two halves of a head's rows interleaved.
        let interleaved = if short.ends_with("attn_q") || short.ends_with("attn_k") {
            let halves = weight.reshape((SIZE / HEAD, 2, HEAD / 2, SIZE))?;
            halves.transpose(1, 2)?.reshape((SIZE, SIZE))?
        } else {
            weight
        };
        gguf.insert(format!("{short}.weight"), interleaved);
    }
    for (long, short) in [
        ("model.norm", "output_norm"),
        ("model.layers.0.input_layernorm", "blk.0.attn_norm"),
        ("model.layers.0.post_attention_layernorm", "blk.0.ffn_norm"),
    ] {
        let ones = Tensor::ones(SIZE, DType::F32, &Cpu)?;
        checkpoint.insert(format!("{long}.weight"), ones.clone());
        gguf.insert(format!("{short}.weight"), ones);
    }
    Ok([checkpoint, gguf])
}

/// The factors of Llama 3.1, 8 for wavelengths beyond the original context of 8192 tokens.
fn factors(base: f32) -> Result<Tensor> {
    let factor = |i: usize| {
        let wavelength = 2. * PI * base.powf(2. * i as f32 / HEAD as f32);
        let smooth = ((8192. / wavelength - 1.) / 3.).clamp(0., 1.);
        1. / ((1. - smooth) / 8. + smooth)
    };
    Tensor::from_vec((0..HEAD / 2).map(factor).collect::<Vec<_>>(), HEAD / 2, &Cpu)
}

/// The last logits of 500 tokens from the checkpoint's model, with RoPE scaling or without.
fn checkpoint(
    weights: &HashMap<String, Tensor>,
    ids: &Tensor,
    base: f32,
    scaled: bool,
) -> Result<Tensor> {
    let config = llama::Config {
        hidden_size: SIZE,
        intermediate_size: SIZE,
        vocab_size: 32,
        num_hidden_layers: 1,
        num_attention_heads: SIZE / HEAD,
        num_key_value_heads: SIZE / HEAD,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: base,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: scaled.then_some(llama::Llama3RopeConfig {
            factor: 8.,
            low_freq_factor: 1.,
            high_freq_factor: 4.,
            original_max_position_embeddings: 8192,
            rope_type: llama::Llama3RopeType::Llama3,
        }),
        max_position_embeddings: 8192,
        tie_word_embeddings: false,
    };
    let vb = VarBuilder::from_tensors(weights.clone(), DType::F32, &Cpu);
    let mut cache = llama::Cache::new(false, DType::F32, &config, &Cpu)?;
    llama::Llama::load(vb, &config)?.forward(ids, 0, &mut cache)?.flatten_all()
}

/// The same from a GGUF file in memory, with `rope_freqs.weight` or without.
fn gguf(
    weights: &HashMap<String, Tensor>,
    ids: &Tensor,
    base: f32,
    scaled: bool,
) -> Result<Tensor> {
    let mut weights = weights.clone();
    if scaled {
        weights.insert("rope_freqs.weight".to_owned(), factors(base)?);
    }
    let mut tensors = Vec::new();
    for (name, weight) in &weights {
        tensors.push((name.as_str(), QTensor::quantize(weight, GgmlDType::F32)?));
    }
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    use gguf_file::Value::{F32, String, U32};
    let metadata = [
        ("general.architecture", String("llama".to_owned())),
        ("llama.attention.head_count", U32((SIZE / HEAD) as u32)),
        ("llama.attention.head_count_kv", U32((SIZE / HEAD) as u32)),
        ("llama.attention.layer_norm_rms_epsilon", F32(1e-5)),
        ("llama.block_count", U32(1)),
        ("llama.embedding_length", U32(SIZE as u32)),
        ("llama.rope.dimension_count", U32(HEAD as u32)),
        ("llama.rope.freq_base", F32(base)),
    ];
    let metadata: Vec<_> = metadata.iter().map(|(name, value)| (*name, value)).collect();
    let mut file = Cursor::new(Vec::new());
    gguf_file::write(&mut file, &metadata, &tensors)?;
    file.set_position(0);
    let content = gguf_file::Content::read(&mut file)?;
    quantized_llama::ModelWeights::from_gguf(content, &mut file, &Cpu)?
        .forward(ids, 0)?
        .flatten_all()
}

fn main() -> Result<()> {
    let [long, short] = weights()?;
    let ids: Vec<u32> = (0..500).map(|i| (i * i + 3 * i) % 31).collect();
    let ids = Tensor::new(ids, &Cpu)?.unsqueeze(0)?;
    let largest = |xs: Tensor| xs.abs()?.max_all()?.to_scalar::<f32>();
    let base = 500_000.;
    let plain = gguf(&short, &ids, base, false)?;
    let scaled = gguf(&short, &ids, base, true)?;
    let size = largest(plain.clone())?;
    let control = largest((&plain - checkpoint(&long, &ids, base, false)?)?)?;
    let error = largest((&scaled - checkpoint(&long, &ids, base, true)?)?)?;
    println!("without scaling GGUF is off by {control:.0e}, with it by {error:.0e}, in {size:.1}");
    assert!(control < 1e-4, "the rest of the model has changed");
    assert!(error > 100. * control, "this has changed");
    assert_eq!(largest((plain - scaled)?)?, 0., "the tensor is read");
    Ok(())
}
END
cargo run --quiet
