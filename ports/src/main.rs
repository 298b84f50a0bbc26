//! Trains BERT and ViT of candle-transformers with PowerNorm, and both Llamas with this crate's
//! RmsNorm, in single and in half precision:
//!
//! ```text
//! cargo run --release -p ports
//! ```
//!
//! `build.rs` makes the models from candle-transformers' files by the steps of the guide's page on
//! porting. Each learns a small task. Prints the losses, and fails if a parameter gets no gradient
//! or a loss does not fall. In half precision the optimizer moves masters in single precision, as
//! in the guide's page on techniques.
//!
//! ChatGLM and CSM are compiled only. They stand for files that reach `RmsNorm` and `LayerNorm` in
//! other ways than the Llamas.
//!
//! With a text, llama2.c learns its characters by candle's RmsNorm, by this crate's, and by
//! PowerNorm, in f32, and nothing else is trained:
//!
//! ```text
//! cargo run --release -p ports -- --text shakespeare.txt
//! ```
//!
//! With `--gradients`, it counts the gradients that are right in five models that people fine-tune,
//! before and after the port (gradients.rs):
//!
//! ```text
//! cargo run --release -p ports -- --gradients
//! ```
//!
//! With `--times`, it times a training step with this crate's layers beside candle's slow forms
//! (times.rs):
//!
//! ```text
//! RAYON_NUM_THREADS=1 cargo run --release -p ports -- --times
//! ```
//!
//! `cargo test -p ports` tests those five, and runs candle's own tests of LayerNorm and RmsNorm on
//! this crate's.

#[cfg(test)]
mod candle_tests;
mod gradients;
mod slow;
mod text;
#[path = "../../benches/common/threads.rs"]
mod threads;
mod times;

use candle::backprop::GradStore;
use candle::{bail, DType, Device, Error, Result, Tensor};
use candle_nn::{loss::cross_entropy, AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use candle_powernorm::{trainable_vars, Masters, Mode, PowerNormBuilder, Untrained};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::path::PathBuf;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// As candle-transformers has them, with all that a model does not use.
#[allow(dead_code, clippy::all)]
mod bert {
    include!(concat!(env!("OUT_DIR"), "/bert.rs"));
}
#[allow(dead_code, clippy::all)]
mod chatglm {
    include!(concat!(env!("OUT_DIR"), "/chatglm.rs"));
}
#[allow(dead_code, unused_doc_comments, clippy::all)]
mod csm {
    include!(concat!(env!("OUT_DIR"), "/csm.rs"));
}
#[allow(dead_code, clippy::all)]
mod llama {
    include!(concat!(env!("OUT_DIR"), "/llama.rs"));
}
#[allow(dead_code, clippy::all)]
mod llama2_c {
    include!(concat!(env!("OUT_DIR"), "/llama2_c.rs"));
}
/// `llama2_c` with candle's `RmsNorm`: the import is the only difference.
#[allow(dead_code, clippy::all)]
mod llama2_c_candle {
    include!(concat!(env!("OUT_DIR"), "/llama2_c_candle.rs"));
}
/// `llama2_c` with PowerNorm.
#[allow(dead_code, clippy::all)]
mod llama2_c_power {
    include!(concat!(env!("OUT_DIR"), "/llama2_c_power.rs"));
}
#[allow(dead_code, clippy::all)]
mod vit {
    include!(concat!(env!("OUT_DIR"), "/vit.rs"));
}

const WIDTH: usize = 64;
const LAYERS: usize = 2;
const HEADS: usize = 4;
const STEPS: usize = 300;
const BATCH: usize = 16;
const RATE: f64 = 2e-3;

/// The variables that a backward does not train. Zeros are right in the rows of an embedding whose
/// tokens are not in the batch, and in the keys' bias, which the softmax cancels.
fn untrained(varmap: &VarMap, gradients: &GradStore) -> Result<Vec<Untrained>> {
    let mut found = candle_powernorm::untrained(varmap, gradients)?;
    found.retain(|variable| match variable {
        Untrained::ZeroRows { name, .. } => !name.contains("embed") && !name.ends_with("key.bias"),
        _ => true,
    });
    Ok(found)
}

/// Trains a model on batches that `loss` draws. Gives the loss of the first step, and the mean over
/// the last ten.
fn train(varmap: &VarMap, mut loss: impl FnMut() -> Result<Tensor>) -> Result<[f32; 2]> {
    let params = ParamsAdamW {
        lr: RATE,
        ..Default::default()
    };
    let masters = Masters::new(varmap)?;
    let mut optimizer = AdamW::new(trainable_vars(masters.varmap()), params)?;
    let mut losses = vec![];
    for step in 0..STEPS {
        optimizer.set_learning_rate(RATE * ((step + 1) as f64 / 50.).min(1.));
        let loss = loss()?;
        let mut gradients = loss.backward()?;
        let frozen = untrained(varmap, &gradients)?;
        if !frozen.is_empty() {
            bail!("a backward does not train {frozen:?}");
        }
        if !masters.unscale(&mut gradients, 1.)? {
            bail!("a gradient is not finite");
        }
        masters.step(&mut optimizer, &gradients)?;
        losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
    }
    let last = &losses[STEPS - 10..];
    Ok([losses[0], last.iter().sum::<f32>() / last.len() as f32])
}

const SENTENCES: &str = include_str!("../../lab/sample/train.en");

/// BERT fills in characters of sentences, which differ in length.
fn train_bert(dtype: DType) -> Result<[f32; 2]> {
    const TIME: usize = 48;
    const PAD: u32 = 0;
    const MASK: u32 = 1;
    let device = Device::Cpu;
    let sentences: Vec<&[u8]> = SENTENCES
        .lines()
        .map(|line| &line.as_bytes()[..line.len().min(TIME)])
        .collect();
    let varmap = VarMap::new();
    let config = bert::Config {
        norms: PowerNormBuilder::new(1e-5, &Mode::train()),
        vocab_size: 128,
        hidden_size: WIDTH,
        num_hidden_layers: LAYERS,
        num_attention_heads: HEADS,
        intermediate_size: 4 * WIDTH,
        max_position_embeddings: TIME,
        ..Default::default()
    };
    let vb = VarBuilder::from_varmap(&varmap, dtype, &device);
    let model = bert::BertForMaskedLM::load(vb, &config)?;
    let mut rng = StdRng::seed_from_u64(0);
    train(&varmap, || {
        let (mut ids, mut keep, mut places, mut targets) = (vec![], vec![], vec![], vec![]);
        for _ in 0..BATCH {
            let sentence = sentences[rng.random_range(..sentences.len())];
            for i in 0..TIME {
                let id = sentence
                    .get(i)
                    .map_or(PAD, |&byte| u32::from(byte.min(127)));
                keep.push(u32::from(id != PAD));
                let masked = id != PAD && rng.random_bool(0.15);
                if masked {
                    places.push(ids.len() as u32);
                    targets.push(id);
                }
                ids.push(if masked { MASK } else { id });
            }
        }
        let ids = Tensor::from_vec(ids, (BATCH, TIME), &device)?;
        let keep = Tensor::from_vec(keep, (BATCH, TIME), &device)?;
        let logits = model.forward(&ids, &ids.zeros_like()?, Some(&keep))?;
        let logits = logits
            .flatten_to(1)?
            .index_select(&Tensor::new(places, &device)?, 0)?;
        cross_entropy(
            &logits.to_dtype(DType::F32)?,
            &Tensor::new(targets, &device)?,
        )
    })
}

/// Llama continues text, character by character.
fn train_llama(dtype: DType) -> Result<[f32; 2]> {
    const TIME: usize = 48;
    let device = Device::Cpu;
    let varmap = VarMap::new();
    let config = llama::Config {
        hidden_size: WIDTH,
        intermediate_size: 4 * WIDTH,
        vocab_size: 128,
        num_hidden_layers: LAYERS,
        num_attention_heads: HEADS,
        num_key_value_heads: HEADS / 2,
        max_position_embeddings: TIME,
        ..llama::Config::config_7b_v2(false)
    };
    let vb = VarBuilder::from_varmap(&varmap, dtype, &device);
    let model = llama::Llama::load(vb, &config)?;
    // In training nothing is kept of earlier calls but the mask.
    let mut cache = llama::Cache::new(false, dtype, &config, &device)?;
    train_on_text(&varmap, TIME, |ids| model.forward(ids, 0, &mut cache))
}

/// The Llama of llama2.c does so too.
fn train_llama2_c(dtype: DType) -> Result<[f32; 2]> {
    const TIME: usize = 48;
    let varmap = VarMap::new();
    let config = llama2_c::Config {
        dim: WIDTH,
        hidden_dim: 4 * WIDTH,
        vocab_size: 128,
        n_layers: LAYERS,
        n_heads: HEADS,
        n_kv_heads: HEADS / 2,
        seq_len: TIME,
        norm_eps: 1e-5,
    };
    let vb = VarBuilder::from_varmap(&varmap, dtype, &Device::Cpu);
    let mut cache = llama2_c::Cache::new(false, &config, vb.pp("rot"))?;
    let model = llama2_c::Llama::load(vb, config)?;
    train_on_text(&varmap, TIME, |ids| model.forward(ids, 0, &mut cache))
}

/// Trains a model that makes logits of the next character, in windows of `time` characters.
fn train_on_text(
    varmap: &VarMap,
    time: usize,
    mut logits: impl FnMut(&Tensor) -> Result<Tensor>,
) -> Result<[f32; 2]> {
    let mut rng = StdRng::seed_from_u64(0);
    let text = SENTENCES.as_bytes();
    train(varmap, || {
        let mut ids = vec![];
        for _ in 0..BATCH {
            let start = rng.random_range(..text.len() - time);
            let window = &text[start..=start + time];
            ids.extend(window.iter().map(|&byte| u32::from(byte.min(127))));
        }
        let ids = Tensor::from_vec(ids, (BATCH, time + 1), &Device::Cpu)?;
        let inputs = ids.narrow(1, 0, time)?.contiguous()?;
        let targets = ids.narrow(1, 1, time)?.flatten_all()?;
        cross_entropy(&logits(&inputs)?.flatten_to(1)?, &targets)
    })
}

/// ViT tells the directions of stripes in noise.
fn train_vit(dtype: DType) -> Result<[f32; 2]> {
    const SIDE: usize = 16;
    const DIRECTIONS: usize = 4;
    let device = Device::Cpu;
    let varmap = VarMap::new();
    let config = vit::Config {
        norms: PowerNormBuilder::new(1e-5, &Mode::train()),
        hidden_size: WIDTH,
        num_hidden_layers: LAYERS,
        num_attention_heads: HEADS,
        intermediate_size: 4 * WIDTH,
        image_size: SIDE,
        patch_size: 4,
        num_channels: 1,
        ..vit::Config::vit_base_patch16_224()
    };
    let vb = VarBuilder::from_varmap(&varmap, dtype, &device);
    let model = vit::Model::new(&config, DIRECTIONS, vb)?;
    let mut rng = StdRng::seed_from_u64(0);
    train(&varmap, || {
        let (mut pixels, mut labels) = (vec![], vec![]);
        for _ in 0..BATCH {
            let label = rng.random_range(..DIRECTIONS);
            let (across, down) = [(1., 0.), (0., 1.), (1., 1.), (1., -1.)][label];
            let phase = rng.random_range(0f32..6.);
            for i in 0..SIDE * SIDE {
                let along = across * (i % SIDE) as f32 + down * (i / SIDE) as f32;
                pixels.push((along + phase).sin() + rng.random_range(-1f32..1.));
            }
            labels.push(label as u32);
        }
        let pixels = Tensor::from_vec(pixels, (BATCH, 1, SIDE, SIDE), &device)?;
        let logits = model.forward(&pixels.to_dtype(dtype)?)?;
        cross_entropy(
            &logits.to_dtype(DType::F32)?,
            &Tensor::new(labels, &device)?,
        )
    })
}

const USAGE: &str =
    "usage: ports [--gradients | --times | --text FILE [--steps 300] [--seeds 1,2]]";

/// Arguments of a training on a text.
struct Args {
    text: PathBuf,
    steps: usize,
    seeds: Vec<u64>,
}

impl Args {
    /// `None` without arguments.
    fn of(
        mut words: impl Iterator<Item = String>,
    ) -> std::result::Result<Option<Self>, Box<dyn std::error::Error>> {
        let (mut text, mut steps, mut seeds) = (None, None, None);
        while let Some(name) = words.next() {
            let value = words.next().ok_or(USAGE)?;
            match name.as_str() {
                "--text" => text = Some(PathBuf::from(value)),
                "--steps" => steps = Some(value.parse()?),
                "--seeds" => {
                    let each = value.split(',').map(str::parse);
                    seeds = Some(each.collect::<std::result::Result<_, _>>()?);
                }
                _ => return Err(USAGE.into()),
            }
        }
        match text {
            Some(text) => Ok(Some(Self {
                text,
                steps: steps.unwrap_or(300),
                seeds: seeds.unwrap_or_else(|| vec![1, 2]),
            })),
            None if steps.is_none() && seeds.is_none() => Ok(None),
            None => Err(USAGE.into()),
        }
    }
}

type Train = fn(DType) -> Result<[f32; 2]>;

fn main() -> Result<()> {
    threads::set_threads();
    if std::env::args().skip(1).eq(["--gradients"]) {
        return gradients::compare();
    }
    if std::env::args().skip(1).eq(["--times"]) {
        return times::compare();
    }
    let args = Args::of(std::env::args().skip(1)).map_err(|error| Error::msg(error.to_string()))?;
    if let Some(args) = args {
        return text::compare(&args.text, args.steps, &args.seeds);
    }
    println!("loss of                first step  after {STEPS}");
    let models: [(&str, Train); 4] = [
        ("BERT", train_bert),
        ("ViT", train_vit),
        ("Llama", train_llama),
        ("llama2.c", train_llama2_c),
    ];
    for (name, train) in models {
        for dtype in [DType::F32, DType::BF16] {
            let [first, last] = train(dtype)?;
            println!("{name:8} in {:8} {first:12.3} {last:9.3}", dtype.as_str());
            if last.is_nan() || last >= 0.8 * first {
                bail!("{name} did not learn");
            }
        }
    }
    Ok(())
}
