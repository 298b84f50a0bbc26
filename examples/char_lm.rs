//! Trains a small transformer on the characters of a text, once with PowerNorm and once with
//! LayerNorm, from the same weights and on the same batches. Prints the loss of both on a part of
//! the text that they did not see, and a text that each makes up.
//!
//! ```text
//! cargo run --release --example char_lm
//! cargo run --release --example char_lm -- --text shakespeare.txt --steps 2000
//! cargo run --release --features cuda --example char_lm -- --device cuda
//! ```

use candle::{bail, DType, Device, Error, Module, Result, Tensor, D};
use candle_nn::{
    embedding, linear_no_bias, loss::cross_entropy, ops, seq, Activation, AdamW, Embedding, Init,
    Linear, Optimizer, ParamsAdamW, Sequential, VarBuilder, VarMap,
};
use candle_powernorm::{power_norm, Mode};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use rand::distr::{weighted::WeightedIndex, Distribution};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::{collections::BTreeSet, fs, path::PathBuf, time::Instant};

/// With glibc's allocator, page faults on large blocks take almost a third of a step.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const LAYERS: usize = 4;
const HEADS: usize = 4;
const WIDTH: usize = 128;
const CONTEXT: usize = 64;
const BATCH: usize = 12;

/// The text to learn without `--text`.
const SOURCES: &str = concat!(
    include_str!("../README.md"),
    include_str!("../src/layer.rs"),
    include_str!("../src/state.rs"),
    include_str!("../kernels/power_norm.cu"),
);

/// Trains a small transformer on a text, with PowerNorm and with LayerNorm
#[derive(Parser)]
struct Args {
    /// UTF-8 text to learn [default: some of this crate]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,

    /// Steps to train each model
    #[arg(long, default_value_t = 800)]
    steps: usize,

    /// cpu, or cuda for the first NVIDIA GPU
    #[arg(long, default_value = "cpu", value_parser = device)]
    device: Device,
}

fn device(name: &str) -> Result<Device> {
    match name {
        "cpu" => Ok(Device::Cpu),
        "cuda" => Device::new_cuda(0),
        _ => bail!("expected cpu or cuda"),
    }
}

type Norm = fn(&Mode, VarBuilder) -> Result<Sequential>;

fn new_power_norm(mode: &Mode, vb: VarBuilder) -> Result<Sequential> {
    Ok(seq().add(power_norm(WIDTH, 1e-5, vb)?.with_mode(mode)))
}

/// Builds LayerNorm from candle's operations. `candle_nn::layer_norm` records no backward, so
/// nothing before it would train.
fn new_layer_norm(_: &Mode, vb: VarBuilder) -> Result<Sequential> {
    let weight = vb.get_with_hints(WIDTH, "weight", Init::Const(1.))?;
    let bias = vb.get_with_hints(WIDTH, "bias", Init::Const(0.))?;
    Ok(seq().add_fn(move |xs| ops::layer_norm_slow(xs, &weight, &bias, 1e-5)))
}

/// A decoder-only transformer: from tokens `[batch, time]` to logits `[batch, time, vocab]`.
struct Gpt {
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    output: Sequential,
}

impl Gpt {
    fn new(vocab: usize, norm: Norm, mode: &Mode, vb: VarBuilder) -> Result<Self> {
        let blocks = (0..LAYERS).map(|i| Block::new(norm, mode, vb.pp(i)));
        let output = linear_no_bias(WIDTH, vocab, vb.pp("output"))?;
        Ok(Self {
            tokens: embedding(vocab, WIDTH, vb.pp("tokens"))?,
            positions: vb.get((CONTEXT, WIDTH), "positions")?,
            blocks: blocks.collect::<Result<_>>()?,
            output: norm(mode, vb.pp("norm"))?.add(output),
        })
    }

    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let positions = self.positions.narrow(0, 0, tokens.dim(1)?)?;
        let mut xs = self.tokens.forward(tokens)?.broadcast_add(&positions)?;
        for block in &self.blocks {
            xs = block.forward(&xs)?;
        }
        self.output.forward(&xs)
    }

    fn loss(&self, [tokens, targets]: [Tensor; 2]) -> Result<Tensor> {
        let logits = self.forward(&tokens)?.flatten_to(1)?;
        cross_entropy(&logits, &targets.flatten_all()?)
    }
}

/// Attention and two linear layers, each after a normalization and added to what came in.
struct Block {
    query_key_value: Sequential,
    project: Linear,
    mlp: Sequential,
}

impl Block {
    fn new(norm: Norm, mode: &Mode, vb: VarBuilder) -> Result<Self> {
        let linear = |from, to, name| linear_no_bias(from, to, vb.pp(name));
        let query_key_value = linear(WIDTH, 3 * WIDTH, "query_key_value")?;
        Ok(Self {
            query_key_value: norm(mode, vb.pp("norm_1"))?.add(query_key_value),
            project: linear(WIDTH, WIDTH, "project")?,
            mlp: norm(mode, vb.pp("norm_2"))?
                .add(linear(WIDTH, 4 * WIDTH, "expand")?)
                .add(Activation::Gelu)
                .add(linear(4 * WIDTH, WIDTH, "contract")?),
        })
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let xs = (xs + self.attention(xs)?)?;
        &xs + self.mlp.forward(&xs)?
    }

    fn attention(&self, xs: &Tensor) -> Result<Tensor> {
        let (batch, time, _) = xs.dims3()?;
        let head = WIDTH / HEADS;
        let all = self.query_key_value.forward(xs)?;
        let all = all.reshape((batch, time, 3 * HEADS, head))?;
        let all = all.transpose(1, 2)?;
        let heads = |i| all.narrow(1, i * HEADS, HEADS)?.contiguous();
        let (query, key, value) = (heads(0)?, heads(1)?, heads(2)?);
        let scores = (query.matmul(&key.t()?)? * (head as f64).powf(-0.5))?;
        // 0 where a position may look, -1e9 where it would see the future.
        let mask = ((Tensor::tril2(time, xs.dtype(), xs.device())? - 1.)? * 1e9)?;
        let weights = ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
        let mixed = weights.matmul(&value)?.transpose(1, 2)?;
        self.project.forward(&mixed.reshape((batch, time, WIDTH))?)
    }
}

/// Draws every matrix, in the order of their names. candle's generator has no seed on a CPU.
fn init(varmap: &VarMap, rng: &mut StdRng) -> Result<()> {
    let data = varmap.data().lock().unwrap();
    let mut vars: Vec<_> = data.iter().filter(|(_, var)| var.rank() == 2).collect();
    vars.sort_by_key(|(name, _)| *name);
    for (_, var) in vars {
        let values = (0..var.elem_count()).map(|_| rng.random_range(-0.04f32..0.04));
        var.set(&Tensor::from_iter(values, var.device())?.reshape(var.shape())?)?;
    }
    Ok(())
}

/// `batch` random stretches of a text, and for each character the one after it.
fn stretches(text: &[u32], batch: usize, rng: &mut StdRng, device: &Device) -> Result<[Tensor; 2]> {
    let (mut inputs, mut targets) = (vec![], vec![]);
    for _ in 0..batch {
        let start = rng.random_range(..text.len() - CONTEXT);
        inputs.extend_from_slice(&text[start..start + CONTEXT]);
        targets.extend_from_slice(&text[start + 1..start + CONTEXT + 1]);
    }
    let tensor = |tokens| Tensor::from_vec(tokens, (batch, CONTEXT), device);
    Ok([tensor(inputs)?, tensor(targets)?])
}

/// A text that the model makes up.
fn sample(model: &Gpt, vocab: &[char], device: &Device) -> Result<String> {
    let mut rng = StdRng::seed_from_u64(0);
    let mut text = vec![0];
    for _ in 0..300 {
        let seen = &text[text.len().saturating_sub(CONTEXT)..];
        let logits = model.forward(&Tensor::new(seen, device)?.unsqueeze(0)?)?;
        let last = (logits.get(0)?.get(seen.len() - 1)? / 0.8)?;
        let weights = ops::softmax(&last, D::Minus1)?.to_vec1::<f32>()?;
        let next = WeightedIndex::new(weights).map_err(Error::wrap)?;
        text.push(next.sample(&mut rng) as u32);
    }
    Ok(text.iter().map(|&token| vocab[token as usize]).collect())
}

fn main() -> Result<()> {
    // candle's threads for element-wise operations spin while they wait: a trap on a busy machine.
    if std::env::var_os("CANDLE_NUM_THREADS").is_none() {
        std::env::set_var("CANDLE_NUM_THREADS", "1");
    }
    let args = Args::parse();
    let (steps, device) = (args.steps, &args.device);
    let text = match args.text {
        None => SOURCES.to_string(),
        Some(path) => fs::read_to_string(&path).map_err(|e| Error::from(e).with_path(path))?,
    };
    let vocab: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
    let token = |c| vocab.partition_point(|&known| known < c) as u32;
    let text: Vec<u32> = text.chars().map(token).collect();
    let (train, validation) = text.split_at(text.len() * 9 / 10);
    if validation.len() <= CONTEXT {
        bail!("a tenth of the text must have more than {CONTEXT} characters");
    }

    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg} [{eta}]");
    let style = style.map_err(Error::wrap)?;
    let norms: [(&str, Norm); 2] = [("PowerNorm", new_power_norm), ("LayerNorm", new_layer_norm)];
    for (name, norm) in norms {
        let (mode, varmap) = (Mode::train(), VarMap::new());
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let model = Gpt::new(vocab.len(), norm, &mode, vb)?;
        let mut rng = StdRng::seed_from_u64(1);
        init(&varmap, &mut rng)?;
        let mut optimizer = AdamW::new(varmap.all_vars(), ParamsAdamW::default())?;
        let bar = ProgressBar::new(steps as u64).with_style(style.clone());
        let start = Instant::now();
        for step in 0..steps {
            optimizer.set_learning_rate(2e-3 * (1. - step as f64 / steps as f64));
            let loss = model.loss(stretches(train, BATCH, &mut rng, device)?)?;
            optimizer.backward_step(&loss)?;
            let loss = loss.to_scalar::<f32>()?;
            if step % 100 == 0 {
                bar.suspend(|| println!("{name}, step {step}: loss {loss:.3}"));
            }
            bar.set_message(format!("{name}: loss {loss:.3}"));
            bar.inc(1);
        }
        bar.finish_and_clear();
        let speed = (steps * BATCH * CONTEXT) as f64 / start.elapsed().as_secs_f64();

        let _evaluation = mode.eval_scope();
        // The same stretches for both models.
        let rng = &mut StdRng::seed_from_u64(0);
        let loss: f32 = model
            .loss(stretches(validation, 500, rng, device)?)?
            .to_scalar()?;
        println!("{name}: validation loss {loss:.3}, {speed:.0} characters/s. A sample:\n");
        println!("{}\n", sample(&model, &vocab, device)?.trim());
    }
    Ok(())
}
