//! An inference without normalizations. Trains a small transformer with PN-V without group scaling,
//! folds each normalization into the linear layer behind it, and compares the losses and the speed
//! of both models.
//!
//! ```text
//! cargo run --release --example fold
//! ```

mod model;
#[path = "../benches/common/threads.rs"]
mod threads;

use candle::{Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_powernorm::{Mode, PowerNormConfig, Statistics, power_norm};
use clap::Parser;
use model::{BATCH, CONTEXT, Gpt, LAYERS, Norm, Text, Training, WIDTH, batch};
use std::path::PathBuf;
use std::time::Instant;

/// As in `char_lm`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The best of 2e-3, 4e-3 and 8e-3, from two seeds.
const RATE: f64 = 4e-3;

/// Stretches of text that the losses are means over.
const VALIDATIONS: usize = 100;

/// Rounds in which the two models take turns. The fastest round of each counts.
const ROUNDS: usize = 10;

/// Trains a model, folds its normalizations away, and compares
#[derive(Parser)]
struct Args {
    /// UTF-8 text to learn [default: 100 KB of Shakespeare]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,

    /// Steps to train
    #[arg(long, default_value_t = 400)]
    steps: usize,

    /// Decides the initial weights and the batches
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// The greatest difference between two models' logits of `tokens`.
fn difference(one: &Gpt, other: &Gpt, tokens: &Tensor) -> Result<f32> {
    let apart = (one.forward(tokens)? - other.forward(tokens)?)?;
    apart.abs()?.max_all()?.to_scalar()
}

/// The least seconds in which each model reads `tokens`.
fn seconds(models: [&Gpt; 2], tokens: &Tensor) -> Result<[f64; 2]> {
    let mut least = [f64::INFINITY; 2];
    for _ in 0..ROUNDS {
        for (model, least) in models.iter().zip(&mut least) {
            let start = Instant::now();
            model.forward(tokens)?;
            *least = least.min(start.elapsed().as_secs_f64());
        }
    }
    Ok(least)
}

fn main() -> Result<()> {
    threads::set_threads();
    let args = Args::parse();
    let device = &Device::Cpu;
    let text = Text::read(args.text.as_deref())?;
    let (mode, warmup) = (Mode::train(), args.steps / 4);
    let config = PowerNormConfig {
        group_scaling: None,
        bias: false,
        statistics: Statistics::Batch,
        warmup_steps: warmup,
        ..Default::default()
    };
    let new_norm = |vb: VarBuilder| {
        let norm = power_norm(WIDTH, config, vb)?;
        Ok(Norm::Power(norm.with_mode(&mode)))
    };
    let schedule = (RATE, warmup, args.steps);
    let mut training = Training::new(text.vocab.len(), &new_norm, schedule, args.seed, device)?;
    println!("{} steps of training", args.steps);
    for step in 1..=args.steps {
        let loss = training.step(&text.train, device)?;
        if step.is_multiple_of(args.steps.div_ceil(4)) || step == args.steps {
            println!("step {step}: loss {loss:.3}");
        }
    }

    mode.set_training(false);
    let (unfolded, folded) = (&training.model, &training.model.fold()?);
    let validation = text.validation(VALIDATIONS);
    println!("\n{:24}{:>10}{:>10}", "", "unfolded", "folded");
    println!("{:24}{:10}{:10}", "normalizations", 2 * LAYERS + 1, 0);
    let losses = [unfolded, folded].map(|model| model.validate(&validation, device));
    let [before, after] = losses;
    println!("{:24}{:10.5}{:10.5}", "validation loss", before?, after?);
    // A batch of texts, and one character, as in decoding.
    let [tokens, _] = batch(&validation[..BATCH.min(validation.len())], device)?;
    let one = tokens.narrow(0, 0, 1)?.narrow(1, 0, 1)?;
    for (name, tokens) in [
        ("characters/s", &tokens),
        ("characters/s, one by one", &one),
    ] {
        let speeds = seconds([unfolded, folded], tokens)?;
        let [before, after] = speeds.map(|seconds| tokens.elem_count() as f64 / seconds);
        println!("{name:24}{before:10.0}{after:10.0}");
    }
    println!(
        "\nThe greatest difference of a logit is {:.0e}, in texts of {CONTEXT} characters.",
        difference(unfolded, folded, &tokens)?
    );
    Ok(())
}
