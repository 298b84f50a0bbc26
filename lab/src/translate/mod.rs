//! Trains a small transformer to translate, with PowerNorm or another normalization in its encoder,
//! and translates a test split with it.
//!
//! ```text
//! cargo lab translate --data multi30k --norm power
//! cargo lab translate --data multi30k --compare layer,batch,power-v,power
//! sacrebleu target/translate/test.en -i target/translate/power.1.test.hyp.en -m bleu chrf
//! ```
//!
//! The encoder has the normalization that is compared, and the decoder LayerNorm, as in the paper's
//! Table 1. PowerNorm's warm-up is the learning rate's, and padding enters no statistic. The model
//! and the text are small enough for a laptop's CPU.
//!
//! Progress goes to stderr, one line of JSON for each normalization to stdout; translations,
//! checkpoints and subwords go to the folder `--out`. With `--resume` and its
//! `--steps`, a finished run translates once more, as the other options say: another split, another
//! length penalty, or the mean of its last weights if it was trained with `--average`.

mod data;
mod model;
mod search;
mod train;

use crate::common::measure::{Outliers, Series, singular_values};
use crate::common::norm::{MOMENTUM, Norm, NormConfig, share};
use crate::common::train::{Plan, Train, bar, train};
use crate::common::{self, Place};
use anyhow::{Context, Result, bail, ensure};
use candle::Device;
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use data::{Corpus, Split};
use model::Size;
use search::Beam;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use train::{Run, Settings};

const HEADS: usize = 4;

/// The encoder's first normalization, where the paper looks.
const FIRST_NORM: &str = "encoder.0.norm_1";

/// Layers of the encoder, and of the decoder.
const LAYERS: usize = 2;
const WIDTH: usize = 128;
const SUBWORDS: usize = 4000;
/// Tokens of a batch on either side.
const BATCH: usize = 1500;
/// Of the learning rate and of PowerNorm.
const WARMUP_STEPS: usize = 400;

const SOURCES: &str = "--data DIR must name a folder of parallel text: train.de, train.en, \
    val.de, val.en, test.de and test.en, a sentence a line, plain or with .gz. Multi30k has \
    29,000 pairs of short sentences: take train, val and test_2016_flickr, of both languages, \
    from the folder data/task1/raw of https://github.com/multi30k/dataset. The sample in \
    lab/sample is too small to learn from";

/// Trains a small transformer to translate German to English, with PowerNorm or another
/// normalization in its encoder.
///
/// Prints a line of JSON for each normalization: its results, or its error. Of power, power-v and
/// batch it has, over the steps after the warm-up:
///
/// - observed: how quantities of the encoder's first normalization are spread;
/// - within: by normalization, the share of channels with |γ| ≤ ψ_B (of batch, σ_B);
/// - guarded: the share of channels for which the guard of ν's update made a difference.
///
/// All are null with other normalizations, and guarded is of power only.
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

    /// Steps to train, about 10 minutes' of a CPU's core on Multi30k. The learning rate does not
    /// depend on them: a finished run goes on with --resume and more of them
    #[arg(long, default_value_t = 1800, value_parser = common::positive)]
    steps: usize,

    /// Highest learning rate, where the warm-up ends. The default is the better one of 3e-3 and
    /// 5e-3 on the validation split, with LayerNorm
    #[arg(long, value_parser = rate, default_value_t = 5e-3)]
    rate: f64,

    /// Decides the initial weights, the batches and the dropout
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Channel groups of the layer-scale before every normalization compared, a divisor of the
    /// model's width; 0 for no layer-scale
    #[arg(long, default_value_t = 4)]
    groups: usize,

    /// Share of elements that dropout zeroes
    #[arg(long, value_parser = share, default_value_t = 0.1)]
    dropout: f64,

    /// Label smoothing: the share of a target that all subwords divide
    #[arg(long, value_parser = share, default_value_t = 0.1)]
    smoothing: f64,

    /// Translate with the mean of the weights at the last N evaluations. A run keeps them in --out
    /// as it trains, so it needs this option from its start on
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = common::positive)]
    average: usize,

    /// The split to translate
    #[arg(long, value_enum, default_value_t = Split::Test)]
    split: Split,

    /// The power of a translation's length that its log-probability is divided by in the search:
    /// the larger, the longer the translations
    #[arg(long, value_name = "POWER", value_parser = power, default_value_t = 1.)]
    length_penalty: f64,

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

    /// Device to train on
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,

    /// Folder of the checkpoints (NORM.SEED.safetensors), the weights to average
    /// (NORM.SEED.STEP.weights.safetensors), the translations (NORM.SEED.SPLIT.hyp.en) and their
    /// results (.json), the references (SPLIT.en) and the subwords. The options that a
    /// finished run is translated with are in the name too: NORM.SEED.SPLIT.average10.hyp.en
    #[arg(long, value_name = "DIR", default_value = "target/translate")]
    out: PathBuf,

    /// Continue from the checkpoints in --out to --steps, as if training had never stopped. Without
    /// it training starts afresh and replaces them
    #[arg(long)]
    resume: bool,
}

/// Parses a power that keeps the order of lengths.
fn power(arg: &str) -> Result<f64, String> {
    common::number(
        arg,
        |power| (0. ..f64::INFINITY).contains(&power),
        "at least 0, and finite",
    )
}

/// Parses a learning rate.
fn rate(arg: &str) -> Result<f64, String> {
    common::number(
        arg,
        |rate| rate > 0. && rate.is_finite(),
        "more than 0, and finite",
    )
}

impl Args {
    fn norms(&self) -> Vec<Norm> {
        self.compare.clone().unwrap_or_else(|| vec![self.norm])
    }

    fn checkpoint(&self, norm: Norm) -> PathBuf {
        self.file(norm, "safetensors")
    }

    /// Its weights after `step` steps, for an average.
    fn weights(&self, norm: Norm, step: u32) -> PathBuf {
        self.file(norm, &format!("{step}.weights.safetensors"))
    }

    /// A file of translations. Each way to translate has its own.
    fn translations(&self, norm: Norm, extension: &str) -> PathBuf {
        let mut name = self.split.to_string();
        if self.average > 1 {
            name += &format!(".average{}", self.average);
        }
        if self.length_penalty != 1. {
            name += &format!(".penalty{}", self.length_penalty);
        }
        if self.beam != 5 {
            name += &format!(".beam{}", self.beam);
        }
        self.file(norm, &format!("{name}.{extension}"))
    }

    /// The file of a normalization.
    fn file(&self, norm: Norm, extension: &str) -> PathBuf {
        self.out.join(format!("{norm}.{}.{extension}", self.seed))
    }
}

/// Results go to `out`.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<()> {
    let folder = args.data.as_ref().context(SOURCES)?;
    let groups = args.groups;
    ensure!(
        groups == 0 || WIDTH.is_multiple_of(groups),
        "--groups {groups}: the model's width, {WIDTH}, is not a multiple of it"
    );
    let has_checkpoint = |&norm: &Norm| args.checkpoint(norm).exists();
    ensure!(
        !args.resume || args.norms().iter().any(has_checkpoint),
        "there is no checkpoint to resume from in {}",
        args.out.display(),
    );
    let device = args.device.device("translate")?;
    let corpus = Corpus::read(folder, SUBWORDS)
        .with_context(|| format!("cannot use {} as --data", folder.display()))?;
    announce(args, &corpus);
    std::fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    corpus.subwords.save(&args.out.join("subwords.json"))?;

    let mut failed = vec![];
    for norm in args.norms() {
        if let Err(error) = train_and_translate(args, norm, &corpus, &device, out) {
            let error = format!("{error:#}");
            eprintln!("{norm:8} failed: {error}");
            let result = json!({ "norm": norm.to_string(), "error": error });
            writeln!(out, "{result}")?;
            failed.push(norm.to_string());
        }
    }
    ensure!(
        failed.is_empty(),
        "no results with {}, as said above",
        failed.join(", ")
    );
    Ok(())
}

/// The whole run of a normalization.
fn train_and_translate(
    args: &Args,
    norm: Norm,
    corpus: &Corpus,
    device: &Device,
    out: &mut dyn Write,
) -> Result<()> {
    let checkpoint = args.checkpoint(norm);
    let mut run = Run::new(settings(args, norm, corpus), corpus, device)?;
    // Comparing may have stopped before this one began.
    if args.resume && checkpoint.exists() {
        run.load(&checkpoint)?;
        // Before hours of training: some of these may be averaged.
        if let Some(lost) = (averaged(&run, args, norm).into_iter()).find(|path| !path.exists()) {
            bail!(
                "{} is not there: only a run with --average from its start keeps its weights",
                lost.display(),
            );
        }
    }
    let plan = Plan {
        name: norm.to_string(),
        steps: args.steps,
        eval_every: args.eval_every,
        at_end: true,
        checkpoint,
    };
    train(&mut run, &plan, |run| match args.average > 1 {
        true => keep_weights(run, args, norm),
        false => Ok(()),
    })?;
    run.validate()?;
    if args.average > 1 {
        let paths = averaged(&run, args, norm);
        ensure!(
            paths.len() == args.average,
            "--average {}: the run had {} evaluations",
            args.average,
            paths.len(),
        );
        run.average(&paths)?;
    }
    report(&run, args, corpus, norm, out)
}

/// The files of the weights at the last evaluations, as many as an average takes.
fn averaged(run: &Run, args: &Args, norm: Norm) -> Vec<PathBuf> {
    let count = if args.average > 1 { args.average } else { 0 };
    let steps = run.state.history.val.iter().rev().take(count);
    steps.map(|&(step, _)| args.weights(norm, step)).collect()
}

/// Says how long the run will take before it begins.
fn announce(args: &Args, corpus: &Corpus) {
    let batches = data::epoch(&corpus.train, BATCH, args.seed, 0);
    eprintln!(
        "{} pairs to train on, {} subwords. For each normalization: {} steps of up to {} tokens \
         on either side, about {:.1} passes. Of the encoder's tokens {:.1} % are padding",
        corpus.train.len(),
        corpus.subwords.count(),
        args.steps,
        BATCH,
        args.steps as f64 / batches.len() as f64,
        100. * data::padding_share(&corpus.train, &batches),
    );
}

fn settings(args: &Args, norm: Norm, corpus: &Corpus) -> Settings {
    Settings {
        norm: NormConfig {
            norm,
            groups: (args.groups > 0).then_some(args.groups),
            warmup_steps: WARMUP_STEPS,
            group_norm_groups: HEADS,
            momentum: MOMENTUM,
        },
        size: Size {
            layers: LAYERS,
            heads: HEADS,
            width: WIDTH,
            hidden: 4 * WIDTH,
            vocab: corpus.subwords.count(),
        },
        batch: BATCH,
        rate: args.rate,
        warmup_steps: WARMUP_STEPS,
        dropout: args.dropout,
        smoothing: args.smoothing,
        seed: args.seed,
    }
}

/// Keeps the weights of this evaluation, and of no more than an average takes before it.
fn keep_weights(run: &Run, args: &Args, norm: Norm) -> Result<()> {
    let mut steps = run.state.history.val.iter().rev().map(|&(step, _)| step);
    if let Some(step) = steps.next() {
        run.save_weights(&args.weights(norm, step))?;
    }
    for old in steps.skip(args.average - 1) {
        let old = args.weights(norm, old);
        if old.exists() {
            std::fs::remove_file(old)?;
        }
    }
    Ok(())
}

/// Translates, and prints the results of a finished run.
fn report(run: &Run, args: &Args, corpus: &Corpus, norm: Norm, out: &mut dyn Write) -> Result<()> {
    let val_loss = run.evaluate()?;
    let hypotheses = args.translations(norm, "hyp.en");
    let searching = translate(run, args, corpus, norm, &hypotheses)?;
    // Beside the translations, for the split may be compressed, or among other files.
    let references = args.out.join(format!("{}.en", args.split));
    write_lines(&references, corpus.split(args.split).1)?;
    eprintln!(
        "{norm:8} validation loss {val_loss:.4}. For BLEU: sacrebleu {} -i {} -m bleu chrf",
        references.display(),
        hypotheses.display(),
    );
    let [spreads, within, guarded] = observed(run);
    let result = json!({
        "norm": norm.to_string(),
        "data": args.data,
        "settings": run.describe(),
        "seed": args.seed,
        "steps": run.state.steps(),
        "epochs": run.epochs(),
        "parameters": run.state.parameters(),
        "val_loss": val_loss,
        "val_perplexity": val_loss.exp(),
        "val": run.state.history.val,
        "seconds": run.state.elapsed.as_secs_f64(),
        "ms_per_step": 1e3 * run.state.elapsed.as_secs_f64() / run.state.steps() as f64,
        "tokens_per_second": run.speed(),
        "averaged_weights": args.average,
        "evaluation_steps": args.eval_every,
        // Of results of earlier labs, where these were options.
        "recalibrate": null,
        "own_statistics": false,
        "observed": spreads,
        "within": within,
        "guarded": guarded,
        "singular_values": singular_values(&run.state.varmap)?,
        "split": args.split.to_string(),
        "beam": args.beam,
        "length_penalty": args.length_penalty,
        "search_seconds": searching.as_secs_f64(),
        "hypotheses": hypotheses,
    });
    writeln!(out, "{result}")?;
    write_lines(&args.translations(norm, "json"), &[result.to_string()])
}

/// The observations after the warm-up: the spread of each quantity, the share of channels with
/// |γ| ≤ ψ_B by normalization, and the share of channels that the guard acted on.
fn observed(run: &Run) -> [Value; 3] {
    let Some(seen) = &run.state.observations else {
        return [const { Value::Null }; 3];
    };
    let Settings {
        norm, warmup_steps, ..
    } = run.settings;
    let warmup_steps = warmup_steps.max(norm.warmup_steps);
    let spread = |(quantity, layers): (&String, &BTreeMap<String, Series>)| {
        let series = layers.get(FIRST_NORM)?;
        let late = series.iter().filter(|&&(step, _)| step >= warmup_steps);
        let late: Vec<f64> = late.map(|&(_, value)| value).collect();
        Some((quantity.clone(), json!(Outliers::of(&[late])?)))
    };
    let share = |(layer, [within, all]): (&String, &[usize; 2])| {
        (layer.clone(), json!(*within as f64 / *all as f64))
    };
    [
        Value::Object(seen.series.iter().filter_map(spread).collect()),
        Value::Object(seen.within.iter().map(share).collect()),
        json!((seen.channels > 0).then(|| seen.guarded as f64 / seen.channels as f64)),
    ]
}

/// Writes the translations of the split to `path`. Gives the time they took.
fn translate(run: &Run, args: &Args, corpus: &Corpus, norm: Norm, path: &Path) -> Result<Duration> {
    let start = Instant::now();
    let (pairs, _) = corpus.split(args.split);
    let bar = bar(&norm.to_string(), pairs.len())?.with_message("sentences translated");
    let beam = Beam {
        length_penalty: args.length_penalty,
        ..Beam::new(args.beam)
    };
    let translations = run.in_evaluation(|model| {
        let progress = |done| bar.set_position(done as u64);
        search::translate(model, pairs, &beam, BATCH, &run.state.device, progress)
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

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/sample");

    fn args(out: &Path, more: &[&str]) -> Result<Args, clap::Error> {
        let out = out.to_str().unwrap();
        Args::try_parse_from([&["translate", "--data", SAMPLE, "--out", out], more].concat())
    }

    /// The output of a command, and its end.
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
        assert!(end.is_err());
        Ok(())
    }

    #[test]
    fn a_finished_run_resumed_gives_the_same_result() -> Result<()> {
        let out = tempfile::tempdir()?;
        let short = ["--norm", "power", "--steps", "3", "--beam", "1"];
        let (mut first, end) = results(&args(out.path(), &short)?);
        end?;
        let (mut again, end) = results(&args(out.path(), &[&short[..], &["--resume"]].concat())?);
        end?;
        for results in [&mut first, &mut again] {
            results[0].as_object_mut().unwrap().remove("search_seconds");
        }
        assert_eq!(first, again);
        Ok(())
    }

    /// Neither the warm-up nor another normalization's series is in what the JSON has.
    #[test]
    fn what_was_observed_is_of_the_steps_after_the_warmup() -> Result<()> {
        let out = tempfile::tempdir()?;
        let args = args(out.path(), &[])?;
        let corpus = Corpus::read(Path::new(SAMPLE), SUBWORDS)?;
        let settings = settings(&args, Norm::Power, &corpus);
        let mut run = Run::new(settings, &corpus, &Device::Cpu)?;
        assert_eq!(observed(&run), [json!({}), json!({}), Value::Null]);
        let seen = run
            .state
            .observations
            .as_mut()
            .context("nothing to observe")?;
        // A thousand in the warm-up's 400 steps, then 1 to 101.
        let value = |step: usize| (step.max(399) as f64 - 399.).max(1e3 * f64::from(step < 400));
        let series: Series = (0..501).map(|step| (step, value(step))).collect();
        let quantity = "distance of the quadratic mean".to_string();
        let layers = BTreeMap::from([("another".into(), vec![]), (FIRST_NORM.into(), series)]);
        seen.series.insert(quantity.clone(), layers);
        seen.within.insert("encoder.norm".into(), [3, 4]);
        (seen.channels, seen.guarded) = (8, 2);
        let [spreads, within, guarded] = observed(&run);
        let spread = &spreads[&quantity];
        assert_eq!((&spread["median"], &guarded), (&json!(51.), &json!(0.25)));
        assert_eq!(spread["largest_over_median"], json!(101. / 51.));
        assert_eq!(within, json!({ "encoder.norm": 0.75 }));
        Ok(())
    }

    /// A finished run translates again as other options say, without a step more.
    #[test]
    fn the_last_weights_are_kept_and_averaged() -> Result<()> {
        let out = tempfile::tempdir()?;
        let short = ["--steps=12", "--eval-every=3", "--beam=3", "--rate=1"];
        let options = [&short[..], &["--average", "2"]].concat();
        let (first, end) = results(&args(out.path(), &options)?);
        end?;
        let kept = |step| {
            out.path()
                .join(format!("power.1.{step}.weights.safetensors"))
                .exists()
        };
        assert_eq!([3, 6, 9, 12].map(kept), [false, false, true, true]);

        let again = |average, more: &[&str]| -> Result<Value> {
            let options = [&short[..], &["--resume", "--average", average], more].concat();
            let (mut results, end) = results(&args(out.path(), &options)?);
            end?;
            Ok(results.remove(0))
        };
        let file = |name: &str| std::fs::read_to_string(out.path().join(name));
        let val_loss = &first[0]["val_loss"];
        assert_eq!(&again("2", &[])?["val_loss"], val_loss);
        assert_ne!(&again("1", &[])?["val_loss"], val_loss);
        let val = again("2", &["--split", "val"])?;
        assert_eq!(&val["val_loss"], val_loss);
        let mean = file("power.1.val.average2.beam3.hyp.en")?;
        assert_eq!(mean.lines().count(), file("val.en")?.lines().count());
        let result: Value = serde_json::from_str(&file("power.1.val.average2.beam3.json")?)?;
        assert_eq!(result, val);
        assert!(!file("power.1.test.average2.beam3.hyp.en")?.is_empty());
        assert!(!file("power.1.test.beam3.hyp.en")?.is_empty());
        let length = |penalty| -> Result<usize> {
            again("2", &["--split", "val", "--length-penalty", penalty])?;
            Ok(file(&format!(
                "power.1.val.average2.penalty{penalty}.beam3.hyp.en"
            ))?
            .len())
        };
        assert!(length("0")? < length("9")?);
        // Weights that were not kept.
        assert!(again("3", &[]).is_err());
        Ok(())
    }

    #[test]
    fn rejects_rates_and_beams_that_make_no_sense() -> Result<()> {
        let out = Path::new("out");
        for wrong in [
            "--rate=0",
            "--rate=-1",
            "--rate=nan",
            "--rate=inf",
            "--rate=x",
            "--beam=0",
            "--beam=65",
            "--length-penalty=-1",
            "--length-penalty=nan",
            "--length-penalty=inf",
        ] {
            assert!(args(out, &[wrong]).is_err(), "{wrong}");
        }
        let args = args(out, &["--rate=0.001", "--beam=64"])?;
        assert_eq!((args.rate, args.beam), (1e-3, 64));
        Ok(())
    }
}
