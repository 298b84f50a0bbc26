//! Trains a small transformer on the characters of a text with PowerNorm or with another
//! normalization, and compares them.
//!
//! ```text
//! cargo run --release -p lab -- char-lm --text shakespeare.txt
//! cargo run --release -p lab -- char-lm --text shakespeare.txt --compare power,layer
//! cargo run --release -p lab --features cuda -- char-lm --text shakespeare.txt --device cuda
//! ```
//!
//! The setting is the smallest one of nanoGPT, made for a laptop's CPU: 4 layers, 4 heads, width
//! 128, context 64, batch 12, AdamW, no dropout. Its linear layers have no bias; the
//! normalizations keep theirs, as these layers have by default (RmsNorm has none).
//!
//! With `--fold` the trained model is built once more as inference would run it, with its
//! normalizations folded into the linear layers after them, and compared with the one that was
//! trained.
//!
//! Progress and a sample of made-up text go to stderr, one line of JSON for each normalization to
//! stdout, checkpoints to the folder `--out`.

use crate::common::data::{Corpus, HeldOut, Unit};
use crate::common::language::{Regularization, Run, Settings, BATCH};
use crate::common::model::{Size, CONTEXT, HEADS, WIDTH};
use crate::common::norm::{Norm, NormArgs};
use crate::common::train::{train, Plan, Train};
use crate::common::{self, optim, Place};
use anyhow::{ensure, Context, Result};
use clap::{Parser, ValueEnum};
use serde_json::{json, Value};
use std::path::PathBuf;

/// Batches of the final evaluation.
const FINAL_EVAL_BATCHES: usize = 200;

const SAMPLE_CHARACTERS: usize = 400;
const SAMPLE_TEMPERATURE: f64 = 0.8;

/// Times that the speed of inference is taken, with and without folding.
const FOLD_ROUNDS: usize = 5;

/// Trains a small transformer on the characters of a text, with PowerNorm or another normalization.
#[derive(Debug, Parser)]
pub struct Args {
    /// Normalization of the model
    #[arg(long, value_enum, default_value_t = Norm::Power)]
    norm: Norm,

    /// Train a model with each of these normalizations, separated by commas (all, if none is
    /// named), from the same seed
    #[arg(
        long,
        value_enum,
        value_name = "NORMS",
        value_delimiter = ',',
        num_args = 0..,
        hide_possible_values = true,
        conflicts_with = "norm"
    )]
    compare: Option<Vec<Norm>>,

    /// UTF-8 text to learn
    #[arg(long, value_name = "FILE")]
    text: PathBuf,

    /// Steps to train; the learning rate's cosine ends with them
    #[arg(long, default_value_t = 2000, value_parser = common::positive)]
    steps: usize,

    /// Decides the initial weights, the batches and the sample
    #[arg(long, default_value_t = 1337)]
    seed: u64,

    #[command(flatten)]
    layer: NormArgs,

    #[command(flatten)]
    regularization: Regularization,

    /// Steps between two evaluations on the validation split; each also writes a checkpoint
    #[arg(long, value_name = "STEPS", default_value_t = 250, value_parser = common::positive)]
    eval_every: usize,

    /// Device to train on. A checkpoint loads on either device
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,

    /// Folder of the checkpoints (NORM.SEED.safetensors)
    #[arg(long, value_name = "DIR", default_value = "target/char-lm")]
    out: PathBuf,

    /// Continue from the checkpoints in --out, as if training had never stopped. Without it
    /// training starts afresh and replaces them
    #[arg(long)]
    resume: bool,

    /// Fold the trained model's normalizations into the linear layers after them (power and power-v
    /// can be), and compare the sample and the speed of inference with and without
    #[arg(long)]
    fold: bool,
}

pub fn run(args: &Args) -> Result<()> {
    args.layer.check(WIDTH)?;
    let device = args.device.device("char-lm")?;
    let corpus = Corpus::read(&args.text, &HeldOut::default(), Unit::Character, CONTEXT)?;
    let norms = match &args.compare {
        None => vec![args.norm],
        Some(norms) if norms.is_empty() => Norm::value_variants().to_vec(),
        Some(norms) => norms.clone(),
    };
    for norm in &norms {
        ensure!(
            !args.fold || norm.is_power(),
            "--fold is for PowerNorm, --norm power or power-v, not {norm}"
        );
    }
    let checkpoint = |norm: Norm| args.out.join(format!("{norm}.{}.safetensors", args.seed));
    ensure!(
        !args.resume || norms.iter().any(|&norm| checkpoint(norm).exists()),
        "there is no checkpoint to resume from in {}",
        args.out.display(),
    );
    std::fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot make the folder {}", args.out.display()))?;

    for norm in norms {
        let checkpoint = checkpoint(norm);
        let mut run = Run::new(settings(args, norm, &corpus), &corpus, &device)?;
        // Comparing may have stopped before this one began.
        if args.resume && checkpoint.exists() {
            run.load(&checkpoint)?;
        }
        let plan = Plan {
            name: norm.to_string(),
            steps: args.steps,
            eval_every: args.eval_every,
            at_end: true,
            checkpoint,
        };
        train(&mut run, &plan, |_| Ok(()))
            .with_context(|| format!("training with --norm {norm}"))?;
        report(&run, args, &corpus, norm)?;
    }
    eprintln!("\nCheckpoints are in {}", args.out.display());
    Ok(())
}

fn settings(args: &Args, norm: Norm, corpus: &Corpus) -> Settings {
    Settings {
        norm: args.layer.config(norm, HEADS, optim::WARMUP_STEPS),
        size: Size::small(corpus.vocab.len()),
        batch: BATCH,
        regularization: args.regularization,
        schedule: Default::default(),
        steps: args.steps,
        seed: args.seed,
    }
}

/// Prints the results of a finished run.
fn report(run: &Run, args: &Args, corpus: &Corpus, norm: Norm) -> Result<()> {
    // Twice over a short split is enough.
    let batches = |split: &[u32]| FINAL_EVAL_BATCHES.min(2 * split.len().div_ceil(BATCH * CONTEXT));
    let train_loss = run.evaluate(&corpus.train, batches(&corpus.train))?;
    let val_loss = run.evaluate(&corpus.val, batches(&corpus.val))?;
    let sample = run.sample(&run.model, SAMPLE_CHARACTERS, SAMPLE_TEMPERATURE)?;
    eprintln!("{norm:8} training loss {train_loss:.4}, validation loss {val_loss:.4}. A sample:");
    eprintln!("{}", sample.trim());
    let fold = match args.fold {
        true => Some(report_fold(run, norm, &sample)?),
        false => None,
    };
    println!(
        "{}",
        json!({
            "norm": norm.to_string(),
            "text": args.text,
            "settings": run.describe(),
            "seed": args.seed,
            "steps": run.state.steps(),
            "parameters": run.state.parameters(),
            "train_loss": train_loss,
            "val_loss": val_loss,
            "val": run.state.history.val,
            "seconds": run.state.elapsed.as_secs_f64(),
            "ms_per_step": 1e3 * run.state.elapsed.as_secs_f64() / run.state.steps() as f64,
            "tokens_per_second": run.speed(),
            "fold": fold,
        })
    );
    Ok(())
}

/// Prints how the folded model compares with the one that was trained, which made up `sample`, and
/// gives it as JSON.
fn report_fold(run: &Run, norm: Norm, sample: &str) -> Result<Value> {
    let folded = run.fold()?;
    let theirs = run.sample(&folded, SAMPLE_CHARACTERS, SAMPLE_TEMPERATURE)?;
    let differs = (sample.chars().zip(theirs.chars())).position(|(ours, theirs)| ours != theirs);
    let speed = run.inference_speed([&run.model, &folded], run.eval_batches, FOLD_ROUNDS)?;
    let same = match differs {
        None => format!("the same {SAMPLE_CHARACTERS} characters"),
        Some(i) => format!("other characters from the {i}-th on"),
    };
    eprintln!(
        "{norm:8} folded: {same}; inference at {:.0} tokens/s, unfolded at {:.0}",
        speed[1], speed[0]
    );
    Ok(json!({
        "sample_differs_from": differs,
        "tokens_per_second": speed[1],
        "tokens_per_second_unfolded": speed[0],
    }))
}
