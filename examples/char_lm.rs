//! Trains one small transformer on the characters of a text with several normalizations: candle's
//! fused one, which has no backward, candle's slow one, and this crate's. All start from the same
//! weights, and take their steps in turns, on the same batches. Prints a table of what each costs
//! and learns, and a text that each makes up, and draws the losses.
//!
//! ```text
//! cargo run --release --example char_lm
//! cargo run --release --example char_lm -- --text FILE --steps 2000
//! cargo run --release --example char_lm -- --norms rms_norm --steps 2000 --save model.safetensors
//! cargo run --release --example char_lm -- --generate model.safetensors --prompt "ROMEO:"
//! cargo run --release --features cuda --example char_lm -- --device cuda
//! ```

#[path = "../benches/common/counting.rs"]
mod counting;
mod model;
#[path = "../benches/common/threads.rs"]
mod threads;
#[path = "../benches/common/unused.rs"]
mod unused;

use candle::{D, Device, Error, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder, ops};
use candle_powernorm::{
    Mode, PowerNormConfig, Untrained, check_gradients, power_norm_no_bias, rms_norm,
    trainable_vars, untrained,
};
use clap::{Parser, ValueEnum};
use counting::Counting;
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use model::{BATCH, CONTEXT, EPS, Gpt, Norm, Text, Training, WIDTH, batch};
use rand::distr::{Distribution, weighted::WeightedIndex};
use rand::{SeedableRng, rngs::StdRng};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use std::{fmt::Write, fs};

/// With glibc's allocator, page faults on large blocks take almost a third of a step.
#[global_allocator]
static ALLOCATOR: Counting<mimalloc::MiMalloc> = Counting(mimalloc::MiMalloc);

const VALIDATIONS: usize = 5;
const MOST_VALIDATION_STRETCHES: usize = 500;
const SAMPLE_CHARACTERS: usize = 250;
const GENERATED_CHARACTERS: usize = 1000;

/// Characters on which gradients are checked, some thousand times if they are wrong.
const CHECKED_CHARACTERS: usize = 16;

/// Steps whose mean loss is one point of the picture.
const STEPS_A_POINT: usize = 10;

/// Characters on which two cores train a model in a second.
const SPEED: f64 = 1.2e4;

/// Trains a small transformer on a text, side by side with several normalizations
#[derive(Parser)]
struct Args {
    /// UTF-8 text to learn [default: 100 KB of Shakespeare]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,

    /// Steps to train each model; a short run also validates and makes up little
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,

    /// Normalizations to compare, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_values = Kind::ALL)]
    norms: Vec<Kind>,

    /// Highest learning rate
    #[arg(long, default_value_t = 4e-3)]
    rate: f64,

    /// Decides the initial weights and the batches
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// cpu, or cuda for the first NVIDIA GPU
    #[arg(long, default_value = "cpu", value_parser = device)]
    device: Device,

    /// Picture of the losses
    #[arg(long, value_name = "FILE", default_value = "target/char_lm.svg")]
    picture: PathBuf,

    /// Writes the model after each validation; --norms has to name one only
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,

    /// Makes up a text with a model that --save wrote, and trains none
    #[arg(long, value_name = "FILE", conflicts_with = "save")]
    generate: Option<PathBuf>,

    /// Start of the text that --generate makes up
    #[arg(long, default_value = "", requires = "generate")]
    prompt: String,
}

fn device(name: &str) -> Result<Device> {
    match name {
        "cpu" => Ok(Device::Cpu),
        "cuda" => Device::new_cuda(0),
        _ => bail!("expected cpu or cuda"),
    }
}

#[derive(Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Kind {
    Candle,
    CandleSlow,
    RmsNorm,
    PowerNorm,
}

impl Kind {
    const ALL: [&str; 4] = ["candle", "candle_slow", "rms_norm", "power_norm"];

    /// As in the table.
    fn name(self) -> &'static str {
        match self {
            Self::Candle => "candle's `rms_norm`",
            Self::CandleSlow => "candle's `ops::rms_norm_slow`",
            Self::RmsNorm => "this crate's `rms_norm`",
            Self::PowerNorm => "this crate's `power_norm_no_bias`",
        }
    }

    fn norm(self, warmup_steps: usize, mode: &Mode, vb: VarBuilder) -> Result<Norm> {
        Ok(match self {
            Self::Candle => Norm::Candle(candle_nn::rms_norm(WIDTH, EPS, vb)?),
            Self::CandleSlow => {
                Norm::CandleSlow(vb.get_with_hints(WIDTH, "weight", Init::Const(1.))?)
            }
            Self::RmsNorm => Norm::Rms(rms_norm(WIDTH, EPS, vb)?),
            Self::PowerNorm => {
                let config = PowerNormConfig {
                    warmup_steps,
                    ..Default::default()
                };
                Norm::Power(power_norm_no_bias(WIDTH, config, vb)?.with_mode(mode))
            }
        })
    }
}

/// A model in training.
struct Run {
    kind: Kind,
    training: Training,
    /// All variables, those without a gradient, and those whose gradient is wrong.
    variables: [usize; 3],
    losses: Vec<f64>,
    validation: f32,
    /// Of each step.
    milliseconds: Vec<f64>,
}

/// Counts variables, those without a gradient, and those whose gradient is wrong.
fn check(training: &Training, text: &Text, device: &Device) -> Result<[usize; 3]> {
    let few = |from| Tensor::new(&text.train[from..][..CHECKED_CHARACTERS], device)?.unsqueeze(0);
    let [tokens, targets] = [few(0)?, few(1)?];
    let loss = || training.model.loss([tokens.clone(), targets.clone()]);
    // Rows of the embedding whose characters are not in the batch have no gradient, and need none.
    let missing = untrained(&training.varmap, &loss()?.backward()?)?
        .into_iter()
        .filter(|entry| matches!(entry, Untrained::NoGradient { .. }));
    let wrong = check_gradients(&training.varmap, loss)?;
    let all = trainable_vars(&training.varmap);
    Ok([all.len(), missing.count(), wrong.len()])
}

/// MiB that a forward of a training batch keeps for its backward.
fn kept(model: &Gpt, text: &Text, device: &Device) -> Result<f64> {
    let stretches = [&text.train[..=CONTEXT]; BATCH];
    let batch = batch(&stretches, device)?;
    let before = counting::live();
    let _loss = model.loss(batch)?;
    Ok((counting::live() - before) as f64 / f64::from(1 << 20))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A text that the model makes up after `prompt`.
fn sample(
    model: &Gpt,
    prompt: &str,
    length: usize,
    vocab: &[char],
    device: &Device,
) -> Result<String> {
    let mut text = vec![];
    for c in prompt.chars() {
        match vocab.binary_search(&c) {
            Ok(token) => text.push(token as u32),
            Err(_) => bail!("the model never saw {c:?}: leave it out of --prompt"),
        }
    }
    if text.is_empty() {
        text.push(0);
    }
    let mut rng = StdRng::seed_from_u64(0);
    for _ in 0..length {
        let seen = &text[text.len().saturating_sub(CONTEXT)..];
        let logits = model.forward(&Tensor::new(seen, device)?.unsqueeze(0)?)?;
        let last = (logits.get(0)?.get(seen.len() - 1)? / 0.8)?;
        let weights = ops::softmax(&last, D::Minus1)?.to_vec1::<f32>()?;
        let Ok(next) = WeightedIndex::new(weights) else {
            bail!("the training diverged: lower --rate");
        };
        text.push(next.sample(&mut rng) as u32);
    }
    Ok(text.iter().map(|&token| vocab[token as usize]).collect())
}

/// The picture follows the reader's light or dark theme, and is legible on a page 360 pixels wide.
/// Curves that coincide are drawn narrower and narrower.
const STYLE: &str = "text{font:14px sans-serif;fill:#222}.title{font-weight:bold}.page{fill:#fff}\
path{fill:none;stroke:#ddd;stroke-linejoin:round}.candle{stroke:#d55e00;stroke-width:2.5}\
.candle_slow{stroke:#bbb;stroke-width:10}.rms_norm{stroke:#0072b2;stroke-width:5}\
.power_norm{stroke:#e69f00;stroke-width:2}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}path{stroke:#30363d}\
.candle{stroke:#f0883e}.candle_slow{stroke:#6e7681}.rms_norm{stroke:#56b4e9}}";

/// Draws the losses in training, as means over a few steps.
fn draw(runs: &[Run], steps: usize, path: &Path) -> Result<()> {
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let curves: Vec<Vec<f64>> = runs
        .iter()
        .map(|run| run.losses.chunks(STEPS_A_POINT).map(mean).collect())
        .collect();
    let all = || {
        curves
            .iter()
            .flatten()
            .copied()
            .filter(|loss| loss.is_finite())
    };
    // At most 4 nats: the curve of a training that diverges ends at the top.
    let low = (2. * all().fold(9., f64::min)).floor() / 2.;
    let high = (2. * all().fold(low + 0.5, f64::max).min(low + 4.)).ceil() / 2.;
    let (top, left, width, height) = (46. + 21. * runs.len() as f64, 40., 340., 200.);
    let x = |step: f64| left + width * step / steps as f64;
    let y = |loss: f64| top + height * (high - loss.min(high)) / (high - low);

    let (bottom, end) = (top + height, top + height + 50.);
    let mut svg = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='400' height='{end}' \
         viewBox='0 0 400 {end}'>\n<style>{STYLE}</style>\n\
         <rect class='page' width='400' height='{end}'/>\n\
         <text x='12' y='24' class='title'>Loss in training, nats per character</text>\n"
    );
    let mut line = |part: String| svg.push_str(&(part + "\n"));
    for half in (2. * low) as usize..=(2. * high) as usize {
        let (loss, y) = (half as f64 / 2., y(half as f64 / 2.));
        line(format!("<path d='M{left} {y:.1}h{width}'/>"));
        line(format!(
            "<text x='34' y='{:.1}' text-anchor='end'>{loss}</text>",
            y + 5.
        ));
    }
    for (step, anchor) in [(0, "start"), (steps / 2, "middle"), (steps, "end")] {
        let (x, y) = (x(step as f64), bottom + 20.);
        line(format!(
            "<text x='{x}' y='{y}' text-anchor='{anchor}'>{step}</text>"
        ));
    }
    line(format!(
        "<text x='210' y='{}' text-anchor='middle'>steps</text>",
        bottom + 40.
    ));
    for (i, (run, curve)) in runs.iter().zip(&curves).enumerate() {
        let value = run.kind.to_possible_value();
        let class = value.as_ref().map_or("", |value| value.get_name());
        let key = 46. + 21. * i as f64;
        let name = run.kind.name().replace('`', "");
        line(format!("<path class='{class}' d='M12 {key}h22'/>"));
        line(format!("<text x='42' y='{}'>{name}</text>", key + 5.));
        let mut path = String::new();
        for (point, &loss) in curve.iter().enumerate() {
            let step = ((point as f64 + 0.5) * STEPS_A_POINT as f64).min(steps as f64);
            let _ = write!(path, "{:.1},{:.1} ", x(step), y(loss));
        }
        line(format!("<path class='{class}' d='M{path}'/>"));
    }
    svg.push_str("</svg>\n");
    create_folder(path)?;
    Ok(fs::write(path, svg)?)
}

/// Creates the folder that a file is to be in.
fn create_folder(path: &Path) -> Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => Ok(fs::create_dir_all(folder)?),
        _ => Ok(()),
    }
}

fn train(args: &Args) -> Result<()> {
    let (steps, device) = (args.steps as usize, &args.device);
    if let Some(path) = &args.save {
        if args.norms.len() != 1 {
            bail!("--save writes one model: choose its normalization, as in --norms rms_norm");
        }
        create_folder(path)?;
    }
    let text = Text::read(args.text.as_deref())?;
    let validation = text.validation(steps.min(MOST_VALIDATION_STRETCHES));

    let (mode, warmup) = (Mode::train(), steps / 4);
    let mut runs = vec![];
    for &kind in &args.norms {
        let norm = |vb: VarBuilder| kind.norm(warmup, &mode, vb);
        let schedule = (args.rate, warmup, steps);
        let training = Training::new(text.vocab.len(), &norm, schedule, args.seed, device)?;
        // PowerNorm's gradient in training is an approximation, which no check finds right.
        let _evaluation = mode.eval_scope();
        runs.push(Run {
            kind,
            variables: check(&training, &text, device)?,
            training,
            losses: vec![],
            validation: f32::NAN,
            milliseconds: vec![],
        });
    }
    let numbers = trainable_vars(&runs[0].training.varmap);
    let numbers: usize = numbers.iter().map(|var| var.elem_count()).sum();
    let seconds = (runs.len() * steps * BATCH * CONTEXT) as f64 / SPEED;
    println!(
        "{} characters, {} different. Models of {:.2} million parameters, {steps} steps: about {} \
         on two cores.",
        text.len,
        text.vocab.len(),
        numbers as f64 / 1e6,
        HumanDuration(Duration::from_secs_f64(seconds)),
    );

    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg} [{eta}]");
    let progress = ProgressBar::new((runs.len() * steps) as u64);
    progress.set_style(style.map_err(Error::wrap)?);
    for step in 1..=steps {
        for run in &mut runs {
            let start = Instant::now();
            let loss = run.training.step(&text.train, device)?;
            run.milliseconds.push(start.elapsed().as_secs_f64() * 1e3);
            run.losses.push(loss);
            progress.inc(1);
        }
        if step.is_multiple_of(steps.div_ceil(VALIDATIONS)) || step == steps {
            let _evaluation = mode.eval_scope();
            let mut line = format!("step {step}: validation loss");
            for run in &mut runs {
                run.validation = run.training.model.validate(&validation, device)?;
                let _ = write!(line, " {:.3}", run.validation);
                if let Some(path) = &args.save {
                    run.training.save(&text.vocab, path)?;
                }
            }
            progress.suspend(|| println!("{line}"));
        }
    }
    progress.finish_and_clear();

    println!(
        "\n| normalization | variables without a gradient | gradients that are right | validation \
         loss | ms per step | MiB kept for backward |\n|---|--:|--:|--:|--:|--:|"
    );
    for run in &runs {
        let [all, missing, wrong] = run.variables;
        let kept = match device {
            Device::Cpu => format!("{:.1}", kept(&run.training.model, &text, device)?),
            _ => "–".to_owned(), // only the host's memory is counted
        };
        println!(
            "| {} | {missing} of {all} | {} of {all} | {:.2} | {:.0} | {kept} |",
            run.kind.name(),
            all - wrong,
            run.validation,
            median(run.milliseconds.clone()),
        );
    }
    let _evaluation = mode.eval_scope();
    for run in &runs {
        let most = SAMPLE_CHARACTERS.min(steps);
        let sample = sample(&run.training.model, "", most, &text.vocab, device)?;
        println!("\nMade up with {}:\n{}", run.kind.name(), sample.trim());
    }
    draw(&runs, steps, &args.picture)?;
    println!("\nPicture of the losses: {}", args.picture.display());
    Ok(())
}

fn generate(path: &Path, args: &Args) -> Result<()> {
    let (model, vocab) = Gpt::load(path, &args.device)?;
    let text = sample(
        &model,
        &args.prompt,
        GENERATED_CHARACTERS,
        &vocab,
        &args.device,
    )?;
    println!("{}", text.trim());
    Ok(())
}

fn main() -> ExitCode {
    threads::set_threads();
    let args = Args::parse();
    if args.device.is_cpu() {
        unused::warn_of_unused(false);
    }
    let result = match &args.generate {
        Some(path) => generate(path, &args),
        None => train(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
