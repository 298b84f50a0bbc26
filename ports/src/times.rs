//! How long a training step takes with this crate's layers and functions, and with candle's slow
//! forms in their place: of the normalizations alone, and of the softmax and the rotations too.
//!
//! Every step of one form is followed by a step of each other form, so that work beside it slows all
//! alike. The time is that of the processor, where Linux tells it. A gain compares the least times,
//! and in brackets is where four fifths of the rounds lie.

use crate::gradients::{files, ours, slow};
use candle::{DType, Device, Error, Result, Tensor};
use candle_nn::{loss::cross_entropy, AdamW, Optimizer, VarBuilder, VarMap};
use candle_powernorm::trainable_vars;
use rand::{rngs::StdRng, Rng, SeedableRng};
use serde::de::DeserializeOwned;
use std::fs;
use std::sync::OnceLock;
use std::time::Instant;

mod ours_too {
    pub(super) use super::ours::{gemma3, llama, mamba, modernbert, qwen3};
    super::files!(bert: "bert_layer_norm");
}

mod slow_too {
    pub(super) use super::slow::{gemma3, llama, mamba, modernbert, qwen3};
    super::files!(bert: "bert_slow");
}

mod slow_norms {
    super::files!(
        gemma3: "gemma3_slow_norms", llama: "llama_slow_norms",
        modernbert: "modernbert_slow_norms", qwen3: "qwen3_slow_norms"
    );
    // Nothing but the normalizations is this crate's in these.
    pub(super) use super::slow_too::{bert, mamba};
}

const VOCAB: usize = 256;
const LAYERS: usize = 4;
const HEAD: usize = 32;
const TIME: usize = 128;
const BATCH: usize = 4;
/// Widths, and how many rounds each has.
const WIDTHS: [(usize, usize); 2] = [(64, 31), (384, 9)];

/// What a `config.json` of each model has, `key_value_heads` apart.
fn config<C: DeserializeOwned>(width: usize, key_value_heads: usize) -> Result<C> {
    let config = serde_json::json!({
        "vocab_size": VOCAB,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": width / HEAD,
        "num_key_value_heads": key_value_heads,
        "head_dim": HEAD,
        "max_position_embeddings": TIME,
        "tie_word_embeddings": true,
        "attention_bias": false,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",

        "sliding_window": TIME,
        "max_window_layers": 0,
        "use_sliding_window": false,

        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 100.0,
        "query_pre_attn_scalar": HEAD,
        "sliding_window_pattern": 2,

        "layer_norm_eps": 1e-5,
        "pad_token_id": 0,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 10000.0,
        "local_attention": TIME,
        "local_rope_theta": 100.0
    });
    serde_json::from_value(config).map_err(Error::wrap)
}

type Logits = Box<dyn FnMut(&Tensor) -> Result<Tensor>>;
type Build = fn(usize, VarBuilder) -> Result<Logits>;

struct Model {
    name: &'static str,
    /// Normalizations in each layer.
    norms: &'static str,
    /// This crate's, candle's slow normalizations, and its slow softmax and rotations too.
    forms: [Build; 3],
}

macro_rules! model {
    ($name:literal, $file:ident, $norms:literal, |$width:ident, $vb:ident| $build:block) => {
        Model {
            name: $name,
            norms: $norms,
            forms: [
                |$width, $vb| {
                    use ours_too::$file as file;
                    $build
                },
                |$width, $vb| {
                    use slow_norms::$file as file;
                    $build
                },
                |$width, $vb| {
                    use slow_too::$file as file;
                    $build
                },
            ],
        }
    };
}

const MODELS: [Model; 6] = [
    model!(
        "gemma3.rs",
        gemma3,
        "6 RMSNorms, 2 of them of heads",
        |width, vb| {
            let model = file::Model::new(false, &config(width, 1)?, vb)?;
            Ok(Box::new(move |ids| model.clone().forward(ids, 0)))
        }
    ),
    model!(
        "qwen3.rs",
        qwen3,
        "4 RMSNorms, 2 of them of heads",
        |width, vb| {
            let model = file::ModelForCausalLM::new(&config(width, width / HEAD)?, vb)?;
            Ok(Box::new(move |ids| model.clone().forward(ids, 0)))
        }
    ),
    model!("llama.rs", llama, "2 RMSNorms", |width, vb| {
        let config = config::<file::LlamaConfig>(width, width / HEAD)?.into_config(false);
        let mut cache = file::Cache::new(false, vb.dtype(), &config, vb.device())?;
        let model = file::Llama::load(vb, &config)?;
        Ok(Box::new(move |ids| model.forward(ids, 0, &mut cache)))
    }),
    model!(
        "modernbert.rs",
        modernbert,
        "2 LayerNorms without a bias",
        |width, vb| {
            let model = file::ModernBertForMaskedLM::load(vb, &config(width, width / HEAD)?)?;
            Ok(Box::new(move |ids| model.forward(ids, &ids.ones_like()?)))
        }
    ),
    model!("bert.rs", bert, "2 LayerNorms", |width, vb| {
        let config = file::Config {
            vocab_size: VOCAB,
            hidden_size: width,
            intermediate_size: 4 * width,
            num_hidden_layers: LAYERS,
            num_attention_heads: width / HEAD,
            max_position_embeddings: TIME,
            ..Default::default()
        };
        let model = file::BertForMaskedLM::load(vb, &config)?;
        Ok(Box::new(move |ids| {
            model.forward(ids, &ids.zeros_like()?, None)
        }))
    }),
    model!("Mamba", mamba, "1 RMSNorm", |width, vb| {
        let model = file::Model::load(VOCAB, LAYERS, width, vb)?;
        Ok(Box::new(move |ids| model.forward(ids)))
    }),
];

/// A model in one form, and its optimizer.
struct Run {
    logits: Logits,
    optimizer: AdamW,
}

impl Run {
    fn new(build: Build, width: usize) -> Result<Self> {
        let varmap = VarMap::new();
        let logits = build(
            width,
            VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu),
        )?;
        let optimizer = AdamW::new_lr(trainable_vars(&varmap), 1e-4)?;
        Ok(Self { logits, optimizer })
    }

    /// A training step, in milliseconds.
    fn step(&mut self, ids: &Tensor) -> Result<f64> {
        let inputs = ids.narrow(1, 0, TIME)?.contiguous()?;
        let start = now();
        let logits = (self.logits)(&inputs)?;
        let positions = logits.elem_count() / BATCH / VOCAB;
        let targets = ids.narrow(1, 1 + TIME - positions, positions)?;
        let loss = cross_entropy(&logits.reshape(((), VOCAB))?, &targets.flatten_all()?)?;
        self.optimizer.backward_step(&loss)?;
        let time = now() - start;
        if !loss.to_scalar::<f32>()?.is_finite() {
            candle::bail!("the loss is {loss}");
        }
        Ok(time)
    }
}

/// Milliseconds of processor time of this process's threads, or else of a clock.
fn now() -> f64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = START.get_or_init(Instant::now);
    // The first number of each file is how many nanoseconds the thread has run.
    let ran = |task: fs::DirEntry| -> Option<f64> {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse().ok()
    };
    let tasks = fs::read_dir("/proc/self/task");
    let nanoseconds: f64 = (tasks.into_iter().flatten().flatten())
        .filter_map(ran)
        .sum();
    match nanoseconds > 0. {
        true => nanoseconds / 1e6,
        false => 1e3 * start.elapsed().as_secs_f64(),
    }
}

/// The least, and the range that leaves out a tenth at either end.
fn spread(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values[(share * (values.len() - 1) as f64).round() as usize];
    [at(0.), at(0.1), at(0.9)]
}

/// Prints the table of benches/results/ports.md.
pub fn compare() -> Result<()> {
    println!(
        "{LAYERS} layers, heads of {HEAD}, {BATCH} x {TIME} tokens, f32\n\n\
         | file | normalizations of a layer | width | ms | less than with slow normalizations | \
         and slow functions |\n|---|---|--:|--:|--:|--:|"
    );
    let mut rng = StdRng::seed_from_u64(0);
    for (width, count) in WIDTHS {
        for model in MODELS {
            let mut runs = vec![];
            for build in model.forms {
                runs.push(Run::new(build, width)?);
            }
            let mut rounds: Vec<[f64; 3]> = vec![];
            // In the first rounds the memory is mapped.
            for round in 0..count + 2 {
                let ids = (0..BATCH * (TIME + 1)).map(|_| rng.random_range(0..VOCAB as u32));
                let ids = Tensor::from_iter(ids, &Device::Cpu)?.reshape((BATCH, TIME + 1))?;
                let mut times = [0.; 3];
                for turn in 0..3 {
                    let form = (round + turn) % 3;
                    times[form] = runs[form].step(&ids)?;
                }
                if round >= 2 {
                    rounds.push(times);
                }
            }
            let least = |form: usize| spread(rounds.iter().map(|times| times[form]).collect())[0];
            let ms = least(0);
            let less = |form: usize| {
                let of = |times: &[f64; 3]| 100. * (1. - times[0] / times[form]);
                let [_, low, high] = spread(rounds.iter().map(of).collect());
                let least = 100. * (1. - ms / least(form));
                format!("{least:.0} % ({low:.0} to {high:.0})")
            };
            println!(
                "| {} | {} | {width} | {ms:.1} | {} | {} |",
                model.name,
                model.norms,
                less(1),
                less(2)
            );
        }
    }
    Ok(())
}
