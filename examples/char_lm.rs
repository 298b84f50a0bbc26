//! Trains a small transformer on the characters of a text, once with PowerNorm and once with
//! LayerNorm, from the same weights and on the same batches, each at the learning rate that suited
//! it best in a sweep. Prints the losses of both in training and on parts of the text that they did
//! not see, draws them, and prints a text that each makes up.
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
use candle_powernorm::{power_norm, Mode, PowerNormConfig};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use plotters::prelude::*;
use rand::distr::{weighted::WeightedIndex, Distribution};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{env, fs, time::Instant};

/// With glibc's allocator, page faults on large blocks take almost a third of a step.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const LAYERS: usize = 3;
const HEADS: usize = 4;
const WIDTH: usize = 96;
const CONTEXT: usize = 64;
const BATCH: usize = 8;

/// Every tenth piece of the text, of so many characters, is for validation.
const PIECE: usize = 10 * (CONTEXT + 1);

const VALIDATIONS: usize = 5;
const MOST_VALIDATION_STRETCHES: usize = 500;
const MOST_SAMPLE_CHARACTERS: usize = 250;

/// nanoGPT's, where a step has few characters.
const BETA_2: f64 = 0.99;

/// Steps whose mean loss is one point of the picture.
const STEPS_A_POINT: usize = 10;

/// Characters on which two cores train a model in a second.
const SPEED: f64 = 6e3;

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

    /// Steps to train each model; a short run also validates and makes up little
    #[arg(long, default_value_t = 400)]
    steps: usize,

    /// Steps in which the learning rate rises [default: a quarter of all]
    #[arg(long, value_name = "STEPS")]
    warmup: Option<usize>,

    /// Highest learning rate of both models [default: for each the best of a sweep]
    #[arg(long, value_name = "RATE")]
    rate: Option<f64>,

    /// Decides the initial weights and the batches
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// cpu, or cuda for the first NVIDIA GPU
    #[arg(long, default_value = "cpu", value_parser = device)]
    device: Device,

    /// Picture of the losses
    #[arg(long, value_name = "FILE", default_value = "target/char_lm.svg")]
    picture: PathBuf,
}

fn device(name: &str) -> Result<Device> {
    match name {
        "cpu" => Ok(Device::Cpu),
        "cuda" => Device::new_cuda(0),
        _ => bail!("expected cpu or cuda"),
    }
}

/// Builds a normalization, whose warm-up is as long as the learning rate's.
type Norm = fn(warmup: usize, &Mode, VarBuilder) -> Result<Sequential>;

/// Names, the best rate of a sweep over 2e-3, 4e-3 and 8e-3, colors.
const CONTENDERS: [(&str, f64, Norm, RGBColor); 2] = [
    ("PowerNorm", 4e-3, new_power_norm, BLUE),
    ("LayerNorm", 4e-3, new_layer_norm, RED),
];

fn new_power_norm(warmup_steps: usize, mode: &Mode, vb: VarBuilder) -> Result<Sequential> {
    let config = PowerNormConfig {
        warmup_steps,
        ..Default::default()
    };
    Ok(seq().add(power_norm(WIDTH, config, vb)?.with_mode(mode)))
}

/// Builds LayerNorm from candle's operations. `candle_nn::layer_norm` records no backward, so
/// nothing before it would train.
fn new_layer_norm(_: usize, _: &Mode, vb: VarBuilder) -> Result<Sequential> {
    let weight = vb.get_with_hints(WIDTH, "weight", Init::Const(1.))?;
    let bias = vb.get_with_hints(WIDTH, "bias", Init::Const(0.))?;
    Ok(seq().add_fn(move |xs| ops::layer_norm_slow(xs, &weight, &bias, 1e-5)))
}

type NewNorm<'a> = &'a dyn Fn(VarBuilder) -> Result<Sequential>;

/// A decoder-only transformer: from tokens `[batch, time]` to logits `[batch, time, vocab]`.
struct Gpt {
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    output: Sequential,
}

impl Gpt {
    fn new(vocab: usize, norm: NewNorm, vb: VarBuilder) -> Result<Self> {
        let blocks = (0..LAYERS).map(|i| Block::new(norm, vb.pp(i)));
        let output = linear_no_bias(WIDTH, vocab, vb.pp("output"))?;
        Ok(Self {
            tokens: embedding(vocab, WIDTH, vb.pp("tokens"))?,
            positions: vb.get((CONTEXT, WIDTH), "positions")?,
            blocks: blocks.collect::<Result<_>>()?,
            output: norm(vb.pp("norm"))?.add(output),
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
    fn new(norm: NewNorm, vb: VarBuilder) -> Result<Self> {
        let linear = |from, to, name| linear_no_bias(from, to, vb.pp(name));
        let query_key_value = linear(WIDTH, 3 * WIDTH, "query_key_value")?;
        Ok(Self {
            query_key_value: norm(vb.pp("norm_1"))?.add(query_key_value),
            project: linear(WIDTH, WIDTH, "project")?,
            mlp: norm(vb.pp("norm_2"))?
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

/// Stretches of a text, and for each character the one after it.
fn batch(stretches: &[&[u32]], device: &Device) -> Result<[Tensor; 2]> {
    let (mut inputs, mut targets) = (vec![], vec![]);
    for stretch in stretches {
        inputs.extend_from_slice(&stretch[..CONTEXT]);
        targets.extend_from_slice(&stretch[1..]);
    }
    let tensor = |tokens| Tensor::from_vec(tokens, (stretches.len(), CONTEXT), device);
    Ok([tensor(inputs)?, tensor(targets)?])
}

/// The mean loss, over a few stretches at a time: their tensors live until the loss is known.
fn validate(model: &Gpt, stretches: &[&[u32]], bar: ProgressBar, device: &Device) -> Result<f32> {
    bar.set_length(stretches.len() as u64);
    let mut sum = 0.;
    for few in stretches.chunks(BATCH) {
        let loss: f32 = model.loss(batch(few, device)?)?.to_scalar()?;
        sum += loss * few.len() as f32;
        bar.inc(few.len() as u64);
    }
    bar.finish_and_clear();
    Ok(sum / stretches.len() as f32)
}

/// A text that the model makes up.
fn sample(model: &Gpt, length: usize, vocab: &[char], device: &Device) -> Result<String> {
    let mut rng = StdRng::seed_from_u64(0);
    let mut text = vec![0];
    for _ in 0..length {
        let seen = &text[text.len().saturating_sub(CONTEXT)..];
        let logits = model.forward(&Tensor::new(seen, device)?.unsqueeze(0)?)?;
        let last = (logits.get(0)?.get(seen.len() - 1)? / 0.8)?;
        let weights = ops::softmax(&last, D::Minus1)?.to_vec1::<f32>()?;
        let next = WeightedIndex::new(weights).map_err(Error::wrap)?;
        text.push(next.sample(&mut rng) as u32);
    }
    Ok(text.iter().map(|&token| vocab[token as usize]).collect())
}

/// Steps and losses.
type Curve = Vec<(f64, f64)>;

/// What became of a model.
struct Report {
    name: &'static str,
    color: RGBColor,
    rate: f64,
    train: Curve,
    validation: Curve,
    speed: f64,
    sample: String,
}

/// Draws training thin and validation thick.
fn draw(reports: &[Report], path: &Path) -> std::result::Result<(), Box<dyn std::error::Error>> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let points = || reports.iter().flat_map(|report| &report.train);
    let steps = points().fold(1., |most: f64, point| most.max(point.0));
    let most = points().fold(0., |most: f64, point| most.max(point.1));
    let all = points().chain(reports.iter().flat_map(|report| &report.validation));
    let least = all.fold(most, |least, point| least.min(point.1));

    let area = SVGBackend::new(path, (900, 560)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(
            "Loss: thick in validation, thin in training",
            ("sans-serif", 20),
        )
        .margin(15)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d(0. ..steps, least - 0.1..most + 0.1)?;
    chart
        .configure_mesh()
        .x_desc("steps")
        .y_desc("nats per character")
        .draw()?;
    for report in reports {
        let color = report.color;
        chart.draw_series(LineSeries::new(report.train.clone(), color.mix(0.5)))?;
        chart
            .draw_series(LineSeries::new(
                report.validation.clone(),
                color.stroke_width(3),
            ))?
            .label(report.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(3)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .border_style(BLACK)
        .background_style(WHITE)
        .draw()?;
    area.present()?;
    Ok(())
}

fn main() -> Result<()> {
    // candle's threads for element-wise operations spin while they wait: a trap on a busy machine.
    if env::var_os("CANDLE_NUM_THREADS").is_none() {
        env::set_var("CANDLE_NUM_THREADS", "1");
    }
    let args = Args::parse();
    let (steps, device) = (args.steps, &args.device);
    let warmup = args.warmup.unwrap_or(steps / 4);
    let text = match args.text {
        None => SOURCES.to_string(),
        Some(path) => fs::read_to_string(&path).map_err(|e| Error::from(e).with_path(path))?,
    };
    let vocab: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
    let token = |c| vocab.partition_point(|&known| known < c) as u32;
    let text: Vec<u32> = text.chars().map(token).collect();
    let (mut train, mut validation) = (vec![], vec![]);
    for (i, piece) in text.chunks(PIECE).enumerate() {
        match i % 10 {
            1 => validation.extend(piece.chunks_exact(CONTEXT + 1)),
            _ => train.extend_from_slice(piece),
        }
    }
    if validation.is_empty() {
        bail!(
            "the text must have more than {} characters",
            PIECE + CONTEXT
        );
    }
    // As many as are wanted, from all of the text.
    let wanted = steps.clamp(1, MOST_VALIDATION_STRETCHES);
    let apart = validation.len().div_ceil(wanted);
    let validation: Vec<&[u32]> = validation.into_iter().step_by(apart).collect();

    let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {msg} [{eta}]");
    let style = style.map_err(Error::wrap)?;
    let bar = |prefix| {
        ProgressBar::no_length()
            .with_style(style.clone())
            .with_prefix(prefix)
    };
    let mut reports = vec![];
    for (name, best_rate, new_norm, color) in CONTENDERS {
        let (mode, varmap) = (Mode::train(), VarMap::new());
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let model = Gpt::new(vocab.len(), &|vb| new_norm(warmup, &mode, vb), vb)?;
        let mut rng = StdRng::seed_from_u64(args.seed);
        init(&varmap, &mut rng)?;
        let mut optimizer = AdamW::new(
            varmap.all_vars(),
            ParamsAdamW {
                beta2: BETA_2,
                ..Default::default()
            },
        )?;
        if reports.is_empty() {
            let numbers: usize = varmap.all_vars().iter().map(|var| var.elem_count()).sum();
            let minutes = (2 * steps * BATCH * CONTEXT) as f64 / SPEED / 60.;
            let minutes = match minutes.round() {
                ..=1. => "a minute".to_owned(),
                minutes => format!("{minutes:.0} minutes"),
            };
            println!(
                "{} characters, {} different. Two models of {:.2} million parameters train for \
                 {steps} steps: about {minutes} on two cores.",
                text.len(),
                vocab.len(),
                numbers as f64 / 1e6,
            );
        }

        let rate = args.rate.unwrap_or(best_rate);
        let mut report = Report {
            name,
            color,
            rate,
            train: vec![],
            validation: vec![],
            speed: 0.,
            sample: String::new(),
        };
        let mut seconds = 0.;
        let mut losses = vec![];
        let training = bar(name);
        training.set_length(steps as u64);
        for step in 1..=steps {
            let start = Instant::now();
            let rise = step as f64 / (warmup + 1) as f64;
            let fall = (steps - step + 1) as f64 / (steps - warmup).max(1) as f64;
            optimizer.set_learning_rate(rate * rise.min(fall).min(1.));
            let starts = (0..BATCH).map(|_| rng.random_range(..train.len() - CONTEXT));
            let stretches: Vec<_> = starts.map(|i| &train[i..=i + CONTEXT]).collect();
            let loss = model.loss(batch(&stretches, device)?)?;
            optimizer.backward_step(&loss)?;
            losses.push(f64::from(loss.to_scalar::<f32>()?));
            seconds += start.elapsed().as_secs_f64();
            training.inc(1);
            if losses.len() == STEPS_A_POINT || step == steps {
                let mean = losses.iter().sum::<f64>() / losses.len() as f64;
                training.set_message(format!("loss {mean:.3}"));
                report
                    .train
                    .push((step as f64 - losses.len() as f64 / 2., mean));
                losses.clear();
            }
            if step.is_multiple_of(steps.div_ceil(VALIDATIONS)) || step == steps {
                let _evaluation = mode.eval_scope();
                let loss = validate(&model, &validation, bar("validation"), device)?;
                report.validation.push((step as f64, f64::from(loss)));
                training.suspend(|| println!("{name}, step {step}: validation loss {loss:.3}"));
            }
        }
        training.finish_and_clear();
        report.speed = (steps * BATCH * CONTEXT) as f64 / seconds;
        let _evaluation = mode.eval_scope();
        report.sample = sample(&model, MOST_SAMPLE_CHARACTERS.min(steps), &vocab, device)?;
        reports.push(report);
    }

    for report in &reports {
        println!("\nMade up with {}:\n{}", report.name, report.sample.trim());
    }
    println!("\n           rate     training  validation  characters/s");
    for report in &reports {
        let last = |curve: &Curve| curve.last().map_or(f64::NAN, |point| point.1);
        println!(
            "{:9}  {:<7}  {:8.3}  {:10.3}  {:12.0}",
            report.name,
            report.rate,
            last(&report.train),
            last(&report.validation),
            report.speed
        );
    }
    draw(&reports, &args.picture).map_err(|error| Error::msg(error.to_string()))?;
    println!(
        "\nLosses are in nats per character. Another --seed moves each by a few hundredths, as much \
         as they differ.\nTheir picture: {}",
        args.picture.display()
    );
    Ok(())
}
