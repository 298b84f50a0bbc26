//! Stands for a download: writes `config.json` and `model.safetensors` as bert-base-uncased has
//! them, at a small width and with random weights.

use candle::{Device, Error, Result, Tensor};
use candle_transformers::models::bert::Config;
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

const CONFIG: &str = r#"{
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "model_type": "bert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "use_cache": true,
    "vocab_size": 259
}"#;

/// Writes the two files into a folder.
pub fn write(folder: &Path) -> Result<()> {
    fs::write(folder.join("config.json"), CONFIG)?;
    let config: Config = serde_json::from_str(CONFIG).map_err(Error::wrap)?;
    let mut rng = StdRng::seed_from_u64(0);
    // Uniform numbers up to this limit have BERT's deviation.
    let limit = (config.initializer_range * 3f64.sqrt()) as f32;
    let mut tensors = HashMap::new();
    for (name, shape) in shapes(&config) {
        let count = shape.iter().product();
        let values: Vec<f32> = match name.rsplit('.').next() {
            Some("gamma") => vec![1.; count],
            Some("beta" | "bias") => vec![0.; count],
            _ => (0..count)
                .map(|_| rng.random_range(-limit..limit))
                .collect(),
        };
        tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
    }
    candle::safetensors::save(&tensors, folder.join("model.safetensors"))
}

/// The names and shapes of the tensors in `model.safetensors`.
pub fn shapes(config: &Config) -> Vec<(String, Vec<usize>)> {
    let (width, inner) = (config.hidden_size, config.intermediate_size);
    let mut all = vec![];
    for (table, rows) in [
        ("word", config.vocab_size),
        ("position", config.max_position_embeddings),
        ("token_type", config.type_vocab_size),
    ] {
        let name = format!("bert.embeddings.{table}_embeddings.weight");
        all.push((name, vec![rows, width]));
    }
    all.extend(norm("bert.embeddings", width));
    for i in 0..config.num_hidden_layers {
        let layer = format!("bert.encoder.layer.{i}");
        for of in ["query", "key", "value"] {
            all.extend(linear(
                &format!("{layer}.attention.self.{of}"),
                width,
                width,
            ));
        }
        let attention = format!("{layer}.attention.output");
        all.extend(linear(&format!("{attention}.dense"), width, width));
        all.extend(norm(&attention, width));
        all.extend(linear(&format!("{layer}.intermediate.dense"), inner, width));
        all.extend(linear(&format!("{layer}.output.dense"), width, inner));
        all.extend(norm(&format!("{layer}.output"), width));
    }
    all.extend(linear("bert.pooler.dense", width, width));

    // The heads of the pretraining. The first one multiplies by the words' embedding, which the
    // file does not repeat.
    all.extend(linear("cls.predictions.transform.dense", width, width));
    all.extend(norm("cls.predictions.transform", width));
    all.push(("cls.predictions.bias".to_owned(), vec![config.vocab_size]));
    all.extend(linear("cls.seq_relationship", 2, width));
    all
}

fn linear(name: &str, outputs: usize, inputs: usize) -> [(String, Vec<usize>); 2] {
    [
        (format!("{name}.weight"), vec![outputs, inputs]),
        (format!("{name}.bias"), vec![outputs]),
    ]
}

/// The file has TensorFlow's names for γ and β.
fn norm(name: &str, width: usize) -> [(String, Vec<usize>); 2] {
    ["gamma", "beta"].map(|of| (format!("{name}.LayerNorm.{of}"), vec![width]))
}
