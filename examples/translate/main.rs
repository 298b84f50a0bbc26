//! Trains a small transformer to translate, with PowerNorm or another normalization in its encoder, and translates a test
//! split with it.
//!
//! ```text
//! cargo run --release --example translate -- --data multi30k --norm power
//! cargo run --release --example translate -- --data multi30k --compare layer,batch,power-v,power
//! sacrebleu multi30k/test.en -i target/translate/power.1.hyp.en
//! ```
//!
//! As in the paper's Table 1 the encoder has the normalization that is compared and the decoder LayerNorm, PowerNorm's
//! warm-up is that of the learning rate, and padding enters no statistic; but the model and the text are small enough for
//! a laptop's CPU.
//!
//! Progress goes to stderr, one line of JSON for each normalization to stdout; translations, checkpoints, subwords and
//! loss curves go to the folder `--out`.

#[path = "../common/mod.rs"]
mod common;
mod data;
mod model;
mod search;
mod train;

use anyhow::{ensure, Context, Result};
use candle_powernorm::Recipe;
use clap::Parser;
use common::norm::{Norm, NormConfig};
use common::{plot, Place};
use data::Corpus;
use indicatif::{ProgressBar, ProgressStyle};
use model::Size;
use search::Beam;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use train::{Run, Settings};

// Large blocks go back to the kernel at every free under glibc's allocator, and come back as page
// faults.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const HEADS: usize = 4;
const SMOOTHING: f64 = 0.1;

/// What differs between devices.
struct Budget {
    layers: usize,
    width: usize,
    subwords: usize,
    batch: usize,
    rate: f64,
    warmup_steps: usize,
    dropout: f64,
    steps: usize,
    /// How long that takes on Multi30k, in words.
    time: &'static str,
}

const CPU: Budget = Budget {
    layers: 2,
    width: 128,
    subwords: 4000,
    batch: 1500,
    rate: 5e-3,
    warmup_steps: 400,
    dropout: 0.1,
    steps: 1800,
    time: "about 10 minutes of one core (AMD EPYC), which more cores share",
};

const CUDA: Budget = Budget {
    layers: 4,
    width: 256,
    subwords: 6000,
    batch: 4000,
    rate: 2e-3,
    warmup_steps: 1000,
    dropout: 0.3,
    steps: 5000,
    time: "not measured on a GPU",
};

impl Budget {
    fn of(place: Place) -> &'static Self {
        match place {
            Place::Cpu => &CPU,
            Place::Cuda => &CUDA,
        }
    }
}

const SOURCES: &str = "\
--data DIR must name a folder of parallel text: train.de, train.en, val.de, val.en, test.de and test.en, a sentence a \
line, plain or with .gz. Multi30k has 29,000 pairs of short sentences: take train, val and test_2016_flickr, of both \
languages, from the folder data/task1/raw of https://github.com/multi30k/dataset. The sample that comes with this \
example, examples/translate/sample, is too small to learn from";

/// Trains a small transformer to translate German to English, with PowerNorm or another normalization in its encoder.
#[derive(Debug, Parser)]
#[command(name = "translate")]
struct Args {
    /// Folder of the text: {train,val,test}.{de,en}, plain or compressed (.gz), also under the names that
    /// Multi30k has: multi30k.train.de.gz, test_2016_flickr.de.gz, multi30k.test_2016_flickr.de.gz
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,

    /// Normalization of the encoder; the decoder has LayerNorm
    #[arg(long, value_enum, default_value_t = Norm::Power)]
    norm: Norm,

    /// Train with each of these normalizations, separated by commas, from the same seed, one after the other. Peak memory
    /// is then null: it is a process's, so for a figure of each train each by --norm
    #[arg(
        long,
        value_enum,
        value_name = "NORMS",
        value_delimiter = ',',
        num_args = 1..,
        hide_possible_values = true,
        conflicts_with = "norm"
    )]
    compare: Option<Vec<Norm>>,

    /// Steps to train [default: about 10 minutes' on a CPU, more on a GPU]. The learning rate does not depend on them: a
    /// finished run goes on with --resume and more of them
    #[arg(long, value_parser = common::positive)]
    steps: Option<usize>,

    /// Highest learning rate, where the warm-up ends [default: 0.005, on a GPU 0.002]
    #[arg(long)]
    rate: Option<f64>,

    /// Decides the initial weights, the batches and the dropout
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Channel groups of PowerNorm's layer-scale, a divisor of the width, 128 (256 on a GPU); 0 for no layer-scale
    #[arg(long, default_value_t = HEADS)]
    groups: usize,

    /// Translations of a sentence that the search follows at once
    #[arg(long, default_value_t = 5, value_parser = common::positive)]
    beam: usize,

    /// Steps between two evaluations on the validation split; each also writes a checkpoint
    #[arg(long, value_name = "STEPS", default_value_t = 250, value_parser = common::positive)]
    eval_every: usize,

    /// Where to train. On a GPU the model is larger
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,

    /// Folder of the checkpoints (NORM.SEED.safetensors), the translations of the test split (NORM.SEED.hyp.en), the
    /// plots and the subwords
    #[arg(long, value_name = "DIR", default_value = "target/translate")]
    out: PathBuf,

    /// Continue from the checkpoints in --out, as if training had never stopped. Without it
    /// training starts afresh and replaces them
    #[arg(long)]
    resume: bool,
}

impl Args {
    fn norms(&self) -> Vec<Norm> {
        self.compare.clone().unwrap_or_else(|| vec![self.norm])
    }

    fn steps(&self) -> usize {
        self.steps.unwrap_or(Budget::of(self.device).steps)
    }

    /// The file of a normalization.
    fn file(&self, norm: Norm, extension: &str) -> PathBuf {
        self.out.join(format!("{norm}.{}.{extension}", self.seed))
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let folder = args.data.as_ref().context(SOURCES)?;
    let budget = Budget::of(args.device);
    ensure!(
        args.groups == 0 || budget.width.is_multiple_of(args.groups),
        "--groups {}: the model's width, {}, is not a multiple of it",
        args.groups,
        budget.width,
    );
    let checkpoint = |norm| args.file(norm, "safetensors");
    ensure!(
        !args.resume || args.norms().iter().any(|&norm| checkpoint(norm).exists()),
        "there is no checkpoint to resume from in {}",
        args.out.display(),
    );
    let device = args.device.device("translate")?;
    let corpus = Corpus::read(folder, budget.subwords)
        .with_context(|| format!("cannot use {} as --data", folder.display()))?;
    std::fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    corpus.subwords.save(&args.out.join("subwords.json"))?;
    announce(args, &corpus);

    let mut curves = Vec::new();
    for norm in args.norms() {
        let checkpoint = checkpoint(norm);
        let mut run = Run::new(settings(args, norm, &corpus), &corpus, &device)?;
        // Comparing may have stopped before this one began.
        if args.resume && checkpoint.exists() {
            run.load(&checkpoint)?;
        }
        train(&mut run, args, norm, &checkpoint)
            .with_context(|| format!("training with --norm {norm}"))?;
        let val_loss = report(&run, args, &corpus, norm)?;
        curves.push((format!("{norm}: {val_loss:.3}"), run.history));
        let plot = match args.compare {
            None => args.file(norm, "svg"),
            Some(_) => args.out.join(format!("compare.{}.svg", args.seed)),
        };
        let runs: Vec<_> = (curves.iter())
            .map(|(label, history)| (label.clone(), history))
            .collect();
        let title = "Loss: thick on the validation split, thin in training (smoothed labels)";
        plot::draw(
            &plot,
            &[plot::losses(title.into(), "nats per subword", &runs)],
            1,
        )?;
    }
    Ok(())
}

/// Says what the run will take before it begins.
fn announce(args: &Args, corpus: &Corpus) {
    let budget = Budget::of(args.device);
    let batches = data::epoch(&corpus.train, budget.batch, args.seed, 0).len();
    eprintln!(
        "{} pairs to train on, {} subwords. For each normalization: {} steps of up to {} tokens on either side, about {:.1} \
         passes",
        corpus.train.len(),
        corpus.subwords.count(),
        args.steps(),
        budget.batch,
        args.steps() as f64 / batches as f64,
    );
    if args.steps.is_none() {
        eprintln!("Time on Multi30k for each: {}", budget.time);
    }
}

fn settings(args: &Args, norm: Norm, corpus: &Corpus) -> Settings {
    let budget = Budget::of(args.device);
    Settings {
        norm: NormConfig {
            norm,
            groups: (args.groups > 0).then_some(args.groups),
            // The paper ties the layer's warm-up to that of the learning rate.
            warmup_steps: budget.warmup_steps,
            recipe: Recipe::Paper,
            group_norm_groups: HEADS,
        },
        size: Size {
            layers: budget.layers,
            heads: HEADS,
            width: budget.width,
            hidden: 4 * budget.width,
            vocab: corpus.subwords.count(),
        },
        batch: budget.batch,
        rate: args.rate.unwrap_or(budget.rate),
        dropout: budget.dropout,
        smoothing: SMOOTHING,
        seed: args.seed,
    }
}

fn bar(norm: Norm, length: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{prefix:8} {wide_bar} {pos}/{len} {msg} [{eta}]")?;
    Ok(ProgressBar::new(length as u64)
        .with_style(style)
        .with_prefix(norm.to_string()))
}

/// Makes the steps that are left, with evaluations and checkpoints along the way.
fn train(run: &mut Run, args: &Args, norm: Norm, checkpoint: &Path) -> Result<()> {
    let steps = args.steps();
    let bar = bar(norm, steps)?.with_position(run.steps() as u64);
    bar.reset_eta();
    while run.steps() < steps {
        let loss = run.step()?;
        bar.set_message(format!("loss {loss:.3}, {:.0} tokens/s", run.speed()));
        bar.inc(1);
        let step = run.steps();
        if step.is_multiple_of(args.eval_every) || step == steps {
            let val_loss = run.evaluate()?;
            run.history.val.push((step as u32, val_loss));
            run.save(checkpoint)?;
            bar.suspend(|| {
                eprintln!(
                    "{norm:8} step {step:5}, pass {:4.1}: loss {loss:.4}, validation loss {val_loss:.4}, {:.0} tokens/s",
                    run.epochs(),
                    run.speed(),
                )
            });
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Translates the test split, prints the results of a finished run, and gives its validation loss.
fn report(run: &Run, args: &Args, corpus: &Corpus, norm: Norm) -> Result<f32> {
    let val_loss = run.evaluate()?;
    let peak_memory = peak_memory().filter(|_| args.compare.is_none());
    let hypotheses = args.file(norm, "hyp.en");
    let searching = translate(run, args, corpus, norm, &hypotheses)?;
    // Beside the translations, for the test split may be compressed, or among other files.
    let references = args.out.join("test.en");
    write_lines(&references, &corpus.references)?;
    eprintln!(
        "{norm:8} validation loss {val_loss:.4}. For BLEU: sacrebleu {} -i {}",
        references.display(),
        hypotheses.display(),
    );
    println!(
        "{}",
        json!({
            "norm": norm.to_string(),
            "data": args.data,
            "groups": norm.folds().then_some(args.groups),
            "seed": args.seed,
            "steps": run.steps(),
            "epochs": run.epochs(),
            "parameters": run.parameters(),
            "val_loss": val_loss,
            "val_perplexity": val_loss.exp(),
            "seconds": run.elapsed.as_secs_f64(),
            "ms_per_step": 1e3 * run.elapsed.as_secs_f64() / run.steps() as f64,
            "tokens_per_second": run.speed(),
            "peak_memory_bytes": peak_memory,
            "beam": args.beam,
            "search_seconds": searching.as_secs_f64(),
            "hypotheses": hypotheses,
        })
    );
    Ok(val_loss)
}

/// Writes the translations of the test split to `path`. Gives the time they took.
fn translate(run: &Run, args: &Args, corpus: &Corpus, norm: Norm, path: &Path) -> Result<Duration> {
    let start = Instant::now();
    let bar = bar(norm, corpus.test.len())?.with_message("sentences translated");
    let beam = Beam::new(args.beam);
    let batch = Budget::of(args.device).batch;
    let translations = run.in_evaluation(|model| {
        let progress = |done| bar.set_position(done as u64);
        search::translate(model, &corpus.test, &beam, batch, &run.device, progress)
    })?;
    bar.finish_and_clear();
    let elapsed = start.elapsed();
    let lines = translations
        .iter()
        .map(|tokens| corpus.subwords.decode(tokens));
    write_lines(path, &lines.collect::<Result<Vec<_>>>()?)?;
    Ok(elapsed)
}

fn write_lines(path: &Path, lines: &[String]) -> Result<()> {
    std::fs::write(path, lines.join("\n") + "\n")
        .with_context(|| format!("cannot write {}", path.display()))
}

/// The most memory that this process has held, where the system tells.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(1024 * kilobytes)
}
