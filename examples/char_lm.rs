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

mod model;

use candle::{D, Device, Error, Result, Tensor, bail};
use candle_nn::{VarBuilder, ops};
use candle_powernorm::{Mode, PowerNormConfig, power_norm, trainable_vars};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use model::{BATCH, CONTEXT, Gpt, Norm, Text, Training, WIDTH};
use plotters::prelude::*;
use rand::distr::{Distribution, weighted::WeightedIndex};
use rand::{SeedableRng, rngs::StdRng};
use std::path::{Path, PathBuf};
use std::{env, fs, time::Instant};

/// With glibc's allocator, page faults on large blocks take almost a third of a step.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const VALIDATIONS: usize = 5;
const MOST_VALIDATION_STRETCHES: usize = 500;
const MOST_SAMPLE_CHARACTERS: usize = 250;

/// Steps whose mean loss is one point of the picture.
const STEPS_A_POINT: usize = 10;

/// Characters on which two cores train a model in a second.
const SPEED: f64 = 6e3;

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
type NewNorm = fn(warmup: usize, &Mode, VarBuilder) -> Result<Norm>;

/// Names, the best rate of a sweep over 2e-3, 4e-3 and 8e-3, colors.
const CONTENDERS: [(&str, f64, NewNorm, RGBColor); 2] = [
    ("PowerNorm", 4e-3, new_power_norm, BLUE),
    ("LayerNorm", 4e-3, new_layer_norm, RED),
];

fn new_power_norm(warmup_steps: usize, mode: &Mode, vb: VarBuilder) -> Result<Norm> {
    let config = PowerNormConfig {
        warmup_steps,
        ..Default::default()
    };
    let norm = power_norm(WIDTH, config, vb)?;
    Ok(Norm::Power(norm.with_mode(mode)))
}

fn new_layer_norm(_: usize, _: &Mode, vb: VarBuilder) -> Result<Norm> {
    Norm::layer(vb)
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

/// The result of a training.
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
        // SAFETY: no other thread runs yet that could read the environment.
        unsafe { env::set_var("CANDLE_NUM_THREADS", "1") };
    }
    let args = Args::parse();
    let (steps, device) = (args.steps, &args.device);
    let warmup = args.warmup.unwrap_or(steps / 4);
    let text = Text::read(args.text)?;
    let validation = text.validation(steps.clamp(1, MOST_VALIDATION_STRETCHES));

    let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {msg} [{eta}]");
    let style = style.map_err(Error::wrap)?;
    let bar = |prefix| {
        ProgressBar::no_length()
            .with_style(style.clone())
            .with_prefix(prefix)
    };
    let mut reports = vec![];
    for (name, best_rate, new_norm, color) in CONTENDERS {
        let mode = Mode::train();
        let new_norm = |vb: VarBuilder| new_norm(warmup, &mode, vb);
        let rate = args.rate.unwrap_or(best_rate);
        let schedule = (rate, warmup, steps);
        let mut training = Training::new(text.vocab.len(), &new_norm, schedule, args.seed, device)?;
        if reports.is_empty() {
            let variables = trainable_vars(&training.varmap);
            let numbers: usize = variables.iter().map(|var| var.elem_count()).sum();
            let minutes = (2 * steps * BATCH * CONTEXT) as f64 / SPEED / 60.;
            let minutes = match minutes.round() {
                ..=1. => "a minute".to_owned(),
                minutes => format!("{minutes:.0} minutes"),
            };
            println!(
                "{} characters, {} different. Two models of {:.2} million parameters train for \
                 {steps} steps: about {minutes} on two cores.",
                text.len,
                text.vocab.len(),
                numbers as f64 / 1e6,
            );
        }

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
        let progress = bar(name);
        progress.set_length(steps as u64);
        for step in 1..=steps {
            let start = Instant::now();
            losses.push(training.step(&text.train, device)?);
            seconds += start.elapsed().as_secs_f64();
            progress.inc(1);
            if losses.len() == STEPS_A_POINT || step == steps {
                let mean = losses.iter().sum::<f64>() / losses.len() as f64;
                progress.set_message(format!("loss {mean:.3}"));
                report
                    .train
                    .push((step as f64 - losses.len() as f64 / 2., mean));
                losses.clear();
            }
            if step.is_multiple_of(steps.div_ceil(VALIDATIONS)) || step == steps {
                let _evaluation = mode.eval_scope();
                let loss = training.model.validate(&validation, device)?;
                report.validation.push((step as f64, f64::from(loss)));
                progress.suspend(|| println!("{name}, step {step}: validation loss {loss:.3}"));
            }
        }
        progress.finish_and_clear();
        report.speed = (steps * BATCH * CONTEXT) as f64 / seconds;
        let _evaluation = mode.eval_scope();
        let most = MOST_SAMPLE_CHARACTERS.min(steps);
        report.sample = sample(&training.model, most, &text.vocab, device)?;
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
