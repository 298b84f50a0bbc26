//! Trains a small transformer to translate, with PowerNorm or another normalization in its encoder,
//! and translates a test split with it.
//!
//! ```text
//! cargo run --release -p lab -- translate --data multi30k --norm power
//! cargo run --release -p lab -- translate --data multi30k --compare layer,batch,power-v,power
//! cargo run --release -p lab -- translate --data multi30k --speed \
//!     --compare layer,batch,power-v,power
//! sacrebleu target/translate/test.en -i target/translate/power.1.hyp.en
//! ```
//!
//! As in the paper's Table 1 the encoder has the normalization that is compared and the decoder
//! LayerNorm, PowerNorm's warm-up is that of the learning rate, and padding enters no statistic;
//! but the model and the text are small enough for a laptop's CPU.
//!
//! Progress goes to stderr, one line of JSON for each normalization to stdout; translations,
//! checkpoints, subwords and loss curves go to the folder `--out`. Translations are the last
//! checkpoint's: no average is taken of several.
//!
//! Runs one after the other, on a machine that does other things too, differ in speed by more than
//! their normalizations do. `--speed` lets them take turns instead, a step each.

mod data;
mod model;
mod search;
mod speed;
mod train;

use crate::common::checkpoint::History;
use crate::common::norm::{share, Norm, NormArgs};
use crate::common::{self, plot, Place};
use anyhow::{ensure, Context, Result};
use candle::Device;
use clap::builder::RangedU64ValueParser;
use clap::Parser;
use data::Corpus;
use indicatif::{ProgressBar, ProgressStyle};
use model::Size;
use search::Beam;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use train::{Run, Settings};

const HEADS: usize = 4;

/// Steps of each run under `--speed`.
const SPEED_STEPS: usize = 50;
/// Its learning rate: nothing is to be learned, and without a warm-up much might diverge.
const SPEED_RATE: f64 = 1e-5;

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
    // Of 3e-3 and 5e-3 the better one on the validation split, with LayerNorm.
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

const SOURCES: &str = "--data DIR must name a folder of parallel text: train.de, train.en, \
    val.de, val.en, test.de and test.en, a sentence a line, plain or with .gz. Multi30k has \
    29,000 pairs of short sentences: take train, val and test_2016_flickr, of both languages, \
    from the folder data/task1/raw of https://github.com/multi30k/dataset. The sample in \
    lab/sample is too small to learn from";

/// Trains a small transformer to translate German to English, with PowerNorm or another
/// normalization in its encoder.
///
/// Prints a line of JSON for each normalization: its results, or its error. Translations of the
/// test split are made with the weights of the last checkpoint, which is the last step's; no
/// average is taken of several checkpoints.
///
/// peak_memory_bytes is this process's peak resident memory: learning the subwords, training and
/// evaluations included, the translations not. It is null with --compare, since later runs would
/// have the memory of earlier ones; with --device cuda, since a GPU's memory is not in it; and
/// where a resumed run was finished already, since nothing was trained. So for a figure of each
/// normalization train each by --norm.
#[derive(Debug, Parser)]
pub struct Args {
    /// Folder of the text: {train,val,test}.{de,en}, plain or compressed (.gz), also under the
    /// names that Multi30k has: multi30k.train.de.gz, test_2016_flickr.de.gz,
    /// multi30k.test_2016_flickr.de.gz
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,

    /// Normalization of the encoder; the decoder has LayerNorm
    #[arg(long, value_enum, default_value_t = Norm::Power)]
    norm: Norm,

    /// Train with each of these normalizations, separated by commas, from the same seed, one after
    /// the other. One that fails, because its loss diverges say, does not stop the others
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

    /// Steps to train [default: about 10 minutes' on a CPU, more on a GPU; 50 with --speed]. The
    /// learning rate does not depend on them: a finished run goes on with --resume and more of them
    #[arg(long, value_parser = common::positive)]
    steps: Option<usize>,

    /// Highest learning rate, where the warm-up ends [default: 0.005, chosen with LayerNorm; on a
    /// GPU 0.002]
    #[arg(long, value_parser = rate)]
    rate: Option<f64>,

    /// Decides the initial weights, the batches and the dropout
    #[arg(long, default_value_t = 1)]
    seed: u64,

    #[command(flatten)]
    layer: NormArgs,

    /// Share of elements that dropout zeroes [default: 0.1; on a GPU 0.3]
    #[arg(long, value_parser = share)]
    dropout: Option<f64>,

    /// Label smoothing: the share of a target that all subwords divide
    #[arg(long, value_parser = share, default_value_t = 0.1)]
    smoothing: f64,

    /// Translations of a sentence that the search follows at once
    #[arg(
        long,
        default_value_t = 5,
        value_parser = RangedU64ValueParser::<usize>::new().range(1..=64)
    )]
    beam: usize,

    /// Steps between two evaluations on the validation split; each also writes a checkpoint
    #[arg(long, value_name = "STEPS", default_value_t = 250, value_parser = common::positive)]
    eval_every: usize,

    /// Where to train. On a GPU the model is larger
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,

    /// Folder of the checkpoints (NORM.SEED.safetensors), the translations of the test split
    /// (NORM.SEED.hyp.en), the plots and the subwords
    #[arg(long, value_name = "DIR", default_value = "target/translate")]
    out: PathBuf,

    /// Continue from the checkpoints in --out, as if training had never stopped. Without it
    /// training starts afresh and replaces them
    #[arg(long)]
    resume: bool,

    /// Only measure speed: the normalizations of --compare take turns, a step each, so that
    /// whatever slows the machine down slows all of them. After 3 steps each to warm up, prints the
    /// medians over --steps steps. PowerNorm's warm-up is 1 step here, so that the steps timed are
    /// PowerNorm's own, and the learning rate is next to nothing. Nothing of the training is kept,
    /// and nothing written to --out
    #[arg(long, conflicts_with_all = ["resume", "rate"])]
    speed: bool,
}

/// Parses a learning rate.
fn rate(arg: &str) -> Result<f64, String> {
    match arg.parse() {
        Ok(rate) if rate > 0. && rate < f64::INFINITY => Ok(rate),
        Ok(_) => Err("it must be more than 0, and finite".into()),
        Err(error) => Err(error.to_string()),
    }
}

impl Args {
    fn norms(&self) -> Vec<Norm> {
        self.compare.clone().unwrap_or_else(|| vec![self.norm])
    }

    fn steps(&self) -> usize {
        self.steps.unwrap_or(match self.speed {
            true => SPEED_STEPS,
            false => Budget::of(self.device).steps,
        })
    }

    fn checkpoint(&self, norm: Norm) -> PathBuf {
        self.file(norm, "safetensors")
    }

    /// The file of a normalization.
    fn file(&self, norm: Norm, extension: &str) -> PathBuf {
        self.out.join(format!("{norm}.{}.{extension}", self.seed))
    }
}

/// Results go to `out`.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<()> {
    let folder = args.data.as_ref().context(SOURCES)?;
    let budget = Budget::of(args.device);
    args.layer.check(budget.width)?;
    let has_checkpoint = |&norm: &Norm| args.checkpoint(norm).exists();
    ensure!(
        !args.resume || args.norms().iter().any(has_checkpoint),
        "there is no checkpoint to resume from in {}",
        args.out.display(),
    );
    let device = args.device.device("translate")?;
    let corpus = Corpus::read(folder, budget.subwords)
        .with_context(|| format!("cannot use {} as --data", folder.display()))?;
    announce(args, &corpus);
    if args.speed {
        return compare_speed(args, &corpus, &device, out);
    }
    std::fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    corpus.subwords.save(&args.out.join("subwords.json"))?;

    let (mut curves, mut failed) = (vec![], vec![]);
    for norm in args.norms() {
        match train_and_translate(args, norm, &corpus, &device, out) {
            Ok(curve) => {
                curves.push(curve);
                draw(args, norm, &curves)?;
            }
            Err(error) => {
                let error = format!("{error:#}");
                eprintln!("{norm:8} failed: {error}");
                let result = json!({ "norm": norm.to_string(), "error": error });
                writeln!(out, "{result}")?;
                failed.push(norm.to_string());
            }
        }
    }
    ensure!(
        failed.is_empty(),
        "no results with {}, as said above",
        failed.join(", ")
    );
    Ok(())
}

/// The whole run of a normalization. Gives its losses and what to call them.
fn train_and_translate(
    args: &Args,
    norm: Norm,
    corpus: &Corpus,
    device: &Device,
    out: &mut dyn Write,
) -> Result<(String, History)> {
    let checkpoint = args.checkpoint(norm);
    let mut run = Run::new(settings(args, norm, corpus), corpus, device)?;
    // Comparing may have stopped before this one began.
    if args.resume && checkpoint.exists() {
        run.load(&checkpoint)?;
    }
    let begun = run.steps();
    train(&mut run, args, norm, &checkpoint)?;
    let peak_memory = peak_memory().filter(|_| {
        args.compare.is_none() && matches!(args.device, Place::Cpu) && run.steps() > begun
    });
    let val_loss = report(&mut run, args, corpus, norm, peak_memory, out)?;
    Ok((format!("{norm}: {val_loss:.3}"), run.history))
}

/// Draws the losses of the normalizations trained so far, the last of them `norm`.
fn draw(args: &Args, norm: Norm, curves: &[(String, History)]) -> Result<()> {
    let path = match args.compare {
        None => args.file(norm, "svg"),
        Some(_) => args.out.join(format!("compare.{}.svg", args.seed)),
    };
    let runs: Vec<_> = (curves.iter())
        .map(|(label, history)| (label.clone(), history))
        .collect();
    let title = "Loss: thick on the validation split, thin in training (smoothed labels)";
    plot::draw(
        &path,
        &[plot::losses(title.into(), "nats per subword", &runs)],
        1,
    )
}

/// Prints how fast the normalizations train, when they take turns.
fn compare_speed(args: &Args, corpus: &Corpus, device: &Device, out: &mut dyn Write) -> Result<()> {
    let norms = args.norms();
    let settings = |&norm: &Norm| {
        let mut settings = settings(args, norm, corpus);
        settings.norm.warmup_steps = 1;
        settings.rate = SPEED_RATE;
        settings
    };
    let runs = norms
        .iter()
        .map(|norm| Run::new(settings(norm), corpus, device));
    let mut runs = runs.collect::<Result<Vec<_>>>()?;
    let bar = bar("speed", speed::UNTIMED + args.steps())?.with_message("turns");
    let speeds = speed::measure(&mut runs, args.steps(), || bar.inc(1))?;
    bar.finish_and_clear();
    for (norm, speed) in norms.into_iter().zip(speeds) {
        let result = json!({
            "norm": norm.to_string(),
            "data": args.data,
            "groups": args.layer.groups,
            "seed": args.seed,
            "timed_steps": args.steps(),
            "median_ms_per_step": 1e3 * speed.seconds_per_step,
            "median_tokens_per_second": speed.tokens_per_second,
        });
        writeln!(out, "{result}")?;
    }
    Ok(())
}

/// Says what the run will take before it begins.
fn announce(args: &Args, corpus: &Corpus) {
    let budget = Budget::of(args.device);
    let batches = data::epoch(&corpus.train, budget.batch, args.seed, 0).len();
    if args.speed {
        eprintln!(
            "{} pairs, {} subwords. For each normalization: {} steps of up to {} tokens on either \
             side, in turns",
            corpus.train.len(),
            corpus.subwords.count(),
            speed::UNTIMED + args.steps(),
            budget.batch,
        );
        return;
    }
    eprintln!(
        "{} pairs to train on, {} subwords. For each normalization: {} steps of up to {} tokens \
         on either side, about {:.1} passes",
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
        norm: args.layer.config(norm, HEADS, budget.warmup_steps),
        size: Size {
            layers: budget.layers,
            heads: HEADS,
            width: budget.width,
            hidden: 4 * budget.width,
            vocab: corpus.subwords.count(),
        },
        batch: budget.batch,
        rate: args.rate.unwrap_or(budget.rate),
        warmup_steps: budget.warmup_steps,
        dropout: args.dropout.unwrap_or(budget.dropout),
        smoothing: args.smoothing,
        seed: args.seed,
    }
}

fn bar(prefix: impl ToString, length: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{prefix:8} {wide_bar} {pos}/{len} {msg} [{eta}]")?;
    Ok(ProgressBar::new(length as u64)
        .with_style(style)
        .with_prefix(prefix.to_string()))
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
            let val_loss = run.validate()?;
            run.save(checkpoint)?;
            bar.suspend(|| {
                eprintln!(
                    "{norm:8} step {step:5}, pass {:4.1}: loss {loss:.4}, validation loss \
                     {val_loss:.4}, {:.0} tokens/s",
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
fn report(
    run: &mut Run,
    args: &Args,
    corpus: &Corpus,
    norm: Norm,
    peak_memory: Option<u64>,
    out: &mut dyn Write,
) -> Result<f32> {
    let val_loss = run.validate()?;
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
    writeln!(
        out,
        "{}",
        json!({
            "norm": norm.to_string(),
            "data": args.data,
            "settings": run.describe(),
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
    )?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/sample");

    fn args(out: &Path, more: &[&str]) -> Result<Args, clap::Error> {
        let out = out.to_str().unwrap();
        Args::try_parse_from([&["translate", "--data", SAMPLE, "--out", out], more].concat())
    }

    /// What a command prints, and how it ends.
    fn results(args: &Args) -> (Vec<Value>, Result<()>) {
        let mut out = vec![];
        let end = run(args, &mut out);
        let lines = String::from_utf8(out).unwrap();
        let lines = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap());
        (lines.collect(), end)
    }

    fn norms(results: &[Value]) -> Vec<&str> {
        results
            .iter()
            .map(|r| r["norm"].as_str().unwrap())
            .collect()
    }

    #[test]
    fn a_normalization_that_fails_does_not_stop_the_others() -> Result<()> {
        let out = tempfile::tempdir()?;
        let comparison = ["--compare", "rms,layer", "--steps", "4", "--beam", "1"];
        let diverging = [&comparison[..], &["--rate", "1e30"]].concat();
        let (diverged, end) = results(&args(out.path(), &diverging)?);
        assert_eq!(norms(&diverged), ["rms", "layer"]);
        for result in &diverged {
            let error = result["error"].as_str().unwrap();
            assert!(error.starts_with("the loss is NaN"), "{error}");
        }
        let end = end.unwrap_err().to_string();
        assert_eq!(end, "no results with rms, layer, as said above");

        std::fs::write(out.path().join("rms.1.safetensors"), "no checkpoint")?;
        let resumed = [&comparison[..], &["--resume"]].concat();
        let (mixed, end) = results(&args(out.path(), &resumed)?);
        assert_eq!(norms(&mixed), ["rms", "layer"]);
        assert!(mixed[0]["error"].is_string() && mixed[1]["error"].is_null());
        assert!(mixed[1]["val_loss"].as_f64() > Some(0.));
        assert_eq!(mixed[1]["peak_memory_bytes"], Value::Null);
        assert!(end.is_err());
        Ok(())
    }

    #[test]
    fn a_finished_run_resumed_gives_the_same_result_without_memory() -> Result<()> {
        let out = tempfile::tempdir()?;
        let short = ["--norm", "power", "--steps", "3", "--beam", "1"];
        let (mut first, end) = results(&args(out.path(), &short)?);
        end?;
        let (mut again, end) = results(&args(out.path(), &[&short[..], &["--resume"]].concat())?);
        end?;
        assert_eq!(again[0]["peak_memory_bytes"], Value::Null);
        if cfg!(target_os = "linux") {
            assert!(first[0]["peak_memory_bytes"].as_u64() > Some(0));
        }
        for results in [&mut first, &mut again] {
            for key in ["peak_memory_bytes", "search_seconds"] {
                results[0].as_object_mut().unwrap().remove(key);
            }
        }
        assert_eq!(first, again);
        Ok(())
    }

    #[test]
    fn speed_has_a_figure_for_each_normalization_and_leaves_no_files() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let out = folder.path().join("out");
        let all = "power,power-v,batch,layer,rms,group,renorm,mabn,batch-padded,batch-own,\
                   instance,instance-padded";
        let (results, end) = results(&args(&out, &["--speed", "--compare", all, "--steps", "2"])?);
        end?;
        assert_eq!(norms(&results).join(","), all);
        for result in &results {
            for key in ["median_ms_per_step", "median_tokens_per_second"] {
                let value = result[key].as_f64().unwrap();
                assert!(value > 0. && value.is_finite(), "{result}");
            }
        }
        assert!(!out.exists());
        Ok(())
    }

    #[test]
    fn refuses_rates_and_beams_that_make_no_sense() -> Result<()> {
        let out = Path::new("out");
        for wrong in [
            "--rate=0",
            "--rate=-1",
            "--rate=nan",
            "--rate=inf",
            "--rate=x",
            "--beam=0",
            "--beam=65",
        ] {
            assert!(args(out, &[wrong]).is_err(), "{wrong}");
        }
        let args = args(out, &["--rate=0.001", "--beam=64"])?;
        assert_eq!((args.rate, args.beam), (Some(1e-3), 64));
        Ok(())
    }
}
