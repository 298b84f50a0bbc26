//! Reproduces the claims of the PowerNorm paper that a laptop can test: the same transformer,
//! trained with each normalization on the same batches of a text, and what the paper looks at
//! inside.
//!
//! ```text
//! cargo lab study --text tinyshakespeare.txt
//! cargo lab study --text captions.en --words --experiments norms
//! ```
//!
//! The first reads `data/tinyshakespeare/input.txt` of github.com/karpathy/char-rnn, and makes 40
//! runs, 20 for each of two seeds.
//!
//! Every run goes to its own file in `--out`. Finished runs are skipped and interrupted ones go on
//! from their last checkpoint. Two commands with other `--seeds` may share a folder, at the same
//! time too. The report is of all runs in the folder.
//!
//! `docs/paper.md` sets what comes out beside the paper's claims.

mod report;

use crate::common::checkpoint::write_whole;
use crate::common::convert::{Weights, convert};
use crate::common::data::{Corpus, HeldOut, Unit};
use crate::common::language::{BATCH, Regularization, Run, Settings};
use crate::common::measure::Observations;
use crate::common::model::{CONTEXT, HEADS, Size};
use crate::common::norm::{MOMENTUM, Norm, NormConfig};
use crate::common::optim::Schedule;
use crate::common::train::{Diverged, Plan, Train, train};
use crate::common::{self, Place};
use anyhow::{Context, Result, ensure};
use candle::Device;
use clap::{Parser, ValueEnum};
use report::Outcome;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Steps between two points of the observed series.
const OBSERVE_EVERY: usize = 10;

/// Batches of the final evaluation, for which a split may have less.
const FINAL_EVAL_BATCHES: usize = 100;

/// Trains a small transformer with each normalization and writes tables of the paper's
/// claims.
#[derive(Debug, Parser)]
pub struct Args {
    /// UTF-8 text to learn
    #[arg(long, value_name = "FILE")]
    text: PathBuf,

    #[command(flatten)]
    held_out: HeldOut,

    /// Learn words, those that come three times at least, and not characters
    #[arg(long)]
    words: bool,

    /// Runs to make, separated by commas
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_values_t = Experiment::value_variants().to_vec()
    )]
    experiments: Vec<Experiment>,

    /// Of these, only runs with these normalizations, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', hide_possible_values = true)]
    norms: Vec<Norm>,

    /// Of these, only runs whose layer-scale has these many groups, separated by commas, 0 for none
    /// [default: all]
    #[arg(long, value_delimiter = ',')]
    groups: Vec<usize>,

    /// Seeds of the runs, separated by commas: each a start and a sequence of batches, the same for
    /// every normalization
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    seeds: Vec<u64>,

    #[command(flatten)]
    regularization: Regularization,

    #[command(flatten)]
    schedule: Schedule,

    /// Steps of PowerNorm's warm-up [default: as many as the learning rate's, as in the paper]
    #[arg(long, value_name = "STEPS")]
    norm_warmup: Option<usize>,

    /// BatchNorm's weight of the batch in its running statistics
    #[arg(long, value_name = "WEIGHT", default_value_t = MOMENTUM)]
    momentum: f64,

    /// Steps of each run
    #[arg(long, default_value_t = 600, value_parser = common::positive)]
    steps: usize,

    /// Steps between two evaluations on the validation split; each also writes a checkpoint
    #[arg(long, value_name = "STEPS", default_value_t = 100, value_parser = common::positive)]
    eval_every: usize,

    /// Start from the weights that runs without group scaling kept in this folder, of the same
    /// seeds, and not from new ones. Needs --from-norm
    #[arg(long, value_name = "DIR", requires = "from_norm")]
    from: Option<PathBuf>,

    /// Normalization that the weights of --from were trained with. PowerNorm, PN-V and itself can
    /// take its place
    #[arg(long, value_name = "NORM", value_parser = from_norm, requires = "from")]
    from_norm: Option<Norm>,

    /// Keep the weights that each run ends with, in the folder `weights` beside the runs
    #[arg(long)]
    keep_weights: bool,

    /// Device to train on
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,

    /// Folder of the runs and of the report
    #[arg(long, value_name = "DIR", default_value = "target/study")]
    out: PathBuf,
}

/// Parses a normalization that a model can be moved from.
fn from_norm(arg: &str) -> Result<Norm, String> {
    match Norm::from_str(arg, false)? {
        norm @ (Norm::Layer | Norm::Rms) => Ok(norm),
        _ => Err("it must be layer or rms".into()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Experiment {
    /// Every normalization behind the same layer-scale, of a group for each head: losses,
    /// statistics, gradients, embeddings
    Norms,
    /// Every normalization without layer-scale, and behind one of one group, as in the paper
    Scales,
    /// Functions of each number by itself in place of a normalization
    Pointwise,
}

/// One configuration of the model, run from several seeds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Variant {
    pub norm: Norm,
    /// Groups of the layer-scale before the normalization.
    pub groups: Option<usize>,
}

impl Variant {
    /// The name of its files.
    pub fn name(&self) -> String {
        let norm = self.norm;
        match self.groups {
            None => format!("{norm}-noscale"),
            Some(HEADS) => norm.to_string(),
            Some(groups) => format!("{norm}-scale{groups}"),
        }
    }
}

impl Experiment {
    fn variants(self) -> Vec<Variant> {
        let scales: &[_] = match self {
            Self::Norms => &[Some(HEADS)],
            Self::Scales => &[None, Some(1)],
            Self::Pointwise => &[None],
        };
        let of_scale = |&groups| {
            let norms = Norm::value_variants().iter();
            norms
                .filter(|norm| norm.is_pointwise() == (self == Self::Pointwise))
                .map(move |&norm| Variant { norm, groups })
        };
        scales.iter().flat_map(of_scale).collect()
    }
}

/// The runs of these experiments, each once.
fn variants(experiments: &[Experiment]) -> Vec<Variant> {
    let named = |experiment: &&Experiment| experiments.contains(experiment);
    let experiments = Experiment::value_variants().iter().filter(named);
    experiments
        .flat_map(|experiment| experiment.variants())
        .collect()
}

pub fn run(args: &Args) -> Result<()> {
    let device = args.device.device("study")?;
    let unit = match args.words {
        true => Unit::Word,
        false => Unit::Character,
    };
    let corpus = Corpus::read(&args.text, &args.held_out, unit, CONTEXT)?;
    std::fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot make the folder {}", args.out.display()))?;

    // Before hours of work: those of another study cannot be in one report with it.
    for name in report::check(args, &corpus)? {
        eprintln!("{name} is of no variant that this study has: it is left out");
    }

    let mut variants = variants(&args.experiments);
    variants.retain(|variant| {
        let groups = variant.groups.unwrap_or(0);
        (args.norms.is_empty() || args.norms.contains(&variant.norm))
            && (args.groups.is_empty() || args.groups.contains(&groups))
    });
    ensure!(!variants.is_empty(), "no run is left of these experiments");
    if let Some(from) = args.from_norm {
        for variant in &variants {
            let same = variant.norm == from && variant.groups.is_none();
            ensure!(
                same || variant.norm.is_power(),
                "a model with {from} cannot be moved to {}: leave it out with --norms and --groups",
                variant.name()
            );
        }
    }
    let seeds: BTreeSet<u64> = args.seeds.iter().copied().collect();
    let jobs: Vec<_> = (seeds.iter())
        .flat_map(|&seed| variants.iter().map(move |&variant| (variant, seed)))
        .filter(|&(variant, seed)| !result_path(args, variant, seed).exists())
        .collect();
    for (i, &(variant, seed)) in jobs.iter().enumerate() {
        let prefix = format!("{}/{} {} {seed}", i + 1, jobs.len(), variant.name());
        let outcome = outcome(args, variant, seed, &corpus, &device, prefix.clone())
            .with_context(|| format!("in run {}", run_name(variant, seed)))?;
        let result = match outcome.val_loss {
            Some(loss) => format!("validation loss {loss:.4}"),
            None => format!("diverged at step {}", outcome.train.len()),
        };
        eprintln!("{prefix}: {result}, {:.0} s", outcome.seconds);
        let bytes = serde_json::to_vec(&outcome)?;
        write_whole(&result_path(args, variant, seed), &bytes)?;
        // The result, and the weights if they are kept, are all that is needed of it.
        let checkpoint = checkpoint_path(args, variant, seed);
        if checkpoint.exists() {
            std::fs::remove_file(checkpoint)?;
        }
    }
    let report = report::write(args, &corpus)?;
    println!("{report}");
    eprintln!("\nThe report is {}", args.out.join("report.md").display());
    Ok(())
}

fn run_name(variant: Variant, seed: u64) -> String {
    format!("{}.{seed}", variant.name())
}

fn result_path(args: &Args, variant: Variant, seed: u64) -> PathBuf {
    args.out.join(format!("{}.json", run_name(variant, seed)))
}

fn checkpoint_path(args: &Args, variant: Variant, seed: u64) -> PathBuf {
    (args.out).join(format!("{}.safetensors", run_name(variant, seed)))
}

fn weights_path(args: &Args, variant: Variant, seed: u64) -> PathBuf {
    let name = format!("{}.safetensors", run_name(variant, seed));
    args.out.join("weights").join(name)
}

/// The weights that the runs of a seed start from, if they do not start from new ones.
fn start(args: &Args, seed: u64) -> Result<Option<Weights>> {
    let (Some(dir), Some(norm)) = (&args.from, args.from_norm) else {
        return Ok(None);
    };
    let name = run_name(Variant { norm, groups: None }, seed);
    Weights::read(&dir.join(format!("{name}.safetensors")), norm).map(Some)
}

fn settings(args: &Args, variant: Variant, seed: u64, corpus: &Corpus) -> Settings {
    let norm_warmup = args.norm_warmup.unwrap_or(args.schedule.rate_warmup);
    Settings {
        norm: NormConfig {
            norm: variant.norm,
            groups: variant.groups,
            warmup_steps: norm_warmup,
            group_norm_groups: HEADS,
            momentum: args.momentum,
        },
        size: Size::small(corpus.vocab.len()),
        batch: BATCH,
        regularization: args.regularization,
        schedule: args.schedule,
        steps: args.steps,
        seed,
        start: None,
    }
}

/// All that a run's result follows from, except the name of its variant.
fn description(args: &Args, variant: Variant, seed: u64, corpus: &Corpus) -> Value {
    described(args, &settings(args, variant, seed, corpus), corpus)
}

fn described(args: &Args, settings: &Settings, corpus: &Corpus) -> Value {
    let mut description = settings.describe(corpus);
    description["--from-norm"] = json!(args.from_norm.map(|norm| norm.to_string()));
    description["--device"] = json!(format!("{:?}", args.device));
    description["batches of the last evaluation"] = json!(FINAL_EVAL_BATCHES);
    description
}

/// Makes one run, from its checkpoint on if there is one.
fn outcome(
    args: &Args,
    variant: Variant,
    seed: u64,
    corpus: &Corpus,
    device: &Device,
    name: String,
) -> Result<Outcome> {
    let plan = Plan {
        name,
        steps: args.steps,
        eval_every: args.eval_every,
        at_end: false,
        checkpoint: checkpoint_path(args, variant, seed),
    };
    let start = start(args, seed)?;
    let settings = Settings {
        start: start.as_ref().map(Weights::start),
        ..settings(args, variant, seed, corpus)
    };
    let mut run = Run::new(settings, corpus, device)?;
    let settings = described(args, &settings, corpus);
    run.state.observe_every = OBSERVE_EVERY;
    run.state.observations = Observations::are_of(variant.norm).then(Observations::default);
    if plan.checkpoint.exists() {
        run.load(&plan.checkpoint)?;
    } else if let Some(weights) = &start {
        convert(&run, weights)?;
        run.validate()?;
    }
    match train(&mut run, &plan, |_| Ok(())).and_then(|()| Losses::of(&run)) {
        Ok(losses) => {
            if args.keep_weights {
                let path = weights_path(args, variant, seed);
                std::fs::create_dir_all(path.parent().unwrap_or(&args.out))?;
                run.state.varmap.save(path)?;
            }
            Outcome::of(variant, settings, &run, losses)
        }
        Err(error) if error.is::<Diverged>() => Ok(Outcome::unfinished(variant, settings, &run)),
        Err(error) => Err(error),
    }
}

/// Losses of a finished run.
pub struct Losses {
    train: f32,
    val: f32,
    test: Option<f32>,
    /// Of the model whose normalizations are folded away, if they fold.
    test_folded: Option<f32>,
}

impl Losses {
    fn of(run: &Run) -> Result<Self> {
        let corpus = run.corpus;
        let all_of = |split: &[u32]| split.len().div_ceil(BATCH * CONTEXT);
        let batches = FINAL_EVAL_BATCHES.min(all_of(&corpus.val));
        let test = corpus.test.as_deref();
        let test_batches = |test| FINAL_EVAL_BATCHES.min(all_of(test));
        let folded = |test| run.evaluate_folded(test, test_batches(test));
        Ok(Self {
            val: run.evaluate(&corpus.val, batches)?,
            train: run.evaluate(&corpus.train, batches)?,
            test: test
                .map(|test| run.evaluate(test, test_batches(test)))
                .transpose()?,
            test_folded: test.map(folded).transpose()?.flatten(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::model::LAYERS;

    fn args(out: PathBuf) -> Args {
        let text = "a text".into();
        Args {
            text,
            held_out: HeldOut::default(),
            words: false,
            experiments: vec![],
            norms: vec![],
            groups: vec![],
            regularization: Regularization::default(),
            schedule: Schedule::default(),
            norm_warmup: None,
            momentum: MOMENTUM,
            seeds: vec![1],
            steps: 3,
            eval_every: 2,
            from: None,
            from_norm: None,
            keep_weights: false,
            device: Place::Cpu,
            out,
        }
    }

    fn corpus() -> Corpus {
        Corpus::sample(CONTEXT)
    }

    #[test]
    fn variants_have_names_of_their_own() {
        let variants = variants(Experiment::value_variants());
        let names: BTreeSet<String> = variants.iter().map(Variant::name).collect();
        assert_eq!(names.len(), variants.len());
        assert_eq!(variants.len(), 6 * 3 + 2);
        let twice = [Experiment::Norms, Experiment::Norms];
        assert_eq!(self::variants(&twice).len(), 6);
    }

    const PN: Variant = Variant {
        norm: Norm::Power,
        groups: Some(1),
    };

    /// A run leaves its last checkpoint, from which the next call goes on. The report is of one seed
    /// that came to its end and one that did not.
    #[test]
    fn a_resumed_run_has_the_outcome_of_one_that_never_stopped() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let (args, corpus) = (args(dir.path().into()), corpus());
        let train = || outcome(&args, PN, 1, &corpus, &Device::Cpu, String::new());
        let whole = train()?;
        assert!(checkpoint_path(&args, PN, 1).exists());
        let resumed = Outcome {
            seconds: whole.seconds,
            ..train()?
        };
        assert_eq!(resumed, whole);
        assert_eq!((whole.train.len(), whole.val.len()), (3, 1));
        let distances = &whole.observations.series["distance of the quadratic mean"];
        assert_eq!(distances.len(), 2 * LAYERS + 1);

        let write = |outcome: &Outcome| {
            let bytes = serde_json::to_vec(outcome)?;
            anyhow::Ok(std::fs::write(result_path(&args, PN, outcome.seed), bytes)?)
        };
        write(&whole)?;
        write(&Outcome {
            seed: 2,
            settings: description(&args, PN, 2, &corpus),
            val_loss: None,
            ..whole.clone()
        })?;
        let report = report::write(&args, &corpus)?;
        let loss = format!("{:.3}, 1 of 2 diverged", whole.val_loss.context("no loss")?);
        assert!(
            report.contains(&loss) && !report.contains("NaN"),
            "{report}"
        );

        std::fs::write(
            dir.path().join("layer-rows64.1.json"),
            r#"{"variant": "layer-rows64"}"#,
        )?;
        let strangers = report::check(&args, &corpus)?;
        assert_eq!(strangers, ["layer-rows64.1.json"]);
        assert_eq!(report::write(&args, &corpus)?, report);

        let rejected = |args: &Args| report::check(args, &corpus).unwrap_err().to_string();
        let error = rejected(&Args { steps: 4, ..args });
        assert!(error.contains("power-scale1."), "{error}");
        assert!(
            error.ends_with(
                "has --steps 3, this study 4: give the study another --out, or remove the file to \
                 have the run made again"
            ),
            "{error}"
        );
        Ok(())
    }

    #[test]
    fn a_run_that_diverges_has_an_outcome_without_losses() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let args = Args {
            schedule: Schedule {
                rate: 1e30,
                rate_warmup: 0,
                clip: 0.,
            },
            ..args(dir.path().into())
        };
        let outcome = outcome(&args, PN, 1, &corpus(), &Device::Cpu, String::new())?;
        assert_eq!((outcome.val_loss, outcome.test_loss), (None, None));
        assert!(outcome.train.len() < args.steps && outcome.singular_values.is_empty());
        Ok(())
    }

    /// The rate, its warm-up and PowerNorm's own are a run's settings. A test split is scored and
    /// changes nothing else; without one there is no such score.
    #[test]
    fn a_run_has_its_schedule_and_its_test_split() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let args = Args {
            schedule: Schedule {
                rate: 4e-3,
                rate_warmup: 0,
                clip: 0.,
            },
            norm_warmup: Some(2),
            ..args(dir.path().into())
        };
        let run = |args: &Args, corpus: &Corpus| {
            let outcome = outcome(args, PN, 1, corpus, &Device::Cpu, String::new())?;
            std::fs::remove_file(checkpoint_path(args, PN, 1))?;
            anyhow::Ok(outcome)
        };
        let corpus = corpus();
        let plain = run(&args, &corpus)?;
        assert_eq!(plain.settings["learning rate"][0], json!(4e-3));
        assert_eq!(plain.settings["learning rate's warm-up"], json!(0));
        assert_eq!(plain.settings["PowerNorm warm-up"], json!(2));
        assert_eq!(plain.settings["largest norm of a gradient"], json!(0.));
        assert_eq!(plain.settings["BatchNorm momentum"], json!(0.1));
        assert_eq!(plain.test_loss, None);
        // The first two losses are of the same weights and of those after one step.
        let slow = run(
            &Args {
                schedule: Schedule::default(),
                ..self::args(dir.path().into())
            },
            &corpus,
        )?;
        assert!(slow.train[0] == plain.train[0] && slow.train[1] > plain.train[1]);

        let tested = Corpus {
            test: Some(corpus.val[..CONTEXT + 9].to_vec()),
            ..corpus
        };
        let outcome = run(&args, &tested)?;
        assert!(
            outcome
                .test_loss
                .is_some_and(|loss| Some(loss) != outcome.val_loss)
        );
        let but = |outcome: Outcome| Outcome {
            test_loss: None,
            seconds: 0.,
            ..outcome
        };
        assert_eq!(but(outcome), but(plain));
        Ok(())
    }

    /// The weights that are kept are those that the loss is of.
    #[test]
    fn a_run_keeps_its_weights() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let args = Args {
            keep_weights: true,
            ..args(dir.path().into())
        };
        let corpus = corpus();
        let outcome = outcome(&args, PN, 1, &corpus, &Device::Cpu, String::new())?;
        let mut kept = Run::new(settings(&args, PN, 1, &corpus), &corpus, &Device::Cpu)?;
        kept.state.varmap.load(weights_path(&args, PN, 1))?;
        let batches = corpus.val.len().div_ceil(BATCH * CONTEXT);
        let loss = kept.evaluate(&corpus.val, FINAL_EVAL_BATCHES.min(batches))?;
        assert_eq!(Some(loss), outcome.val_loss);
        Ok(())
    }

    /// The control starts where the run before it ended, and so does PowerNorm with one group.
    #[test]
    fn a_run_starts_from_kept_weights() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let corpus = corpus();
        let args = Args {
            keep_weights: true,
            ..args(dir.path().into())
        };
        let rms = Variant {
            norm: Norm::Rms,
            groups: None,
        };
        outcome(&args, rms, 1, &corpus, &Device::Cpu, String::new())?;
        std::fs::remove_file(checkpoint_path(&args, rms, 1))?;
        let mut kept = Run::new(settings(&args, rms, 1, &corpus), &corpus, &Device::Cpu)?;
        kept.state.varmap.load(weights_path(&args, rms, 1))?;
        let ended = kept.validate()?;

        let args = Args {
            from: Some(dir.path().join("weights")),
            from_norm: Some(Norm::Rms),
            keep_weights: false,
            out: dir.path().join("on"),
            ..args
        };
        std::fs::create_dir(&args.out)?;
        for variant in [rms, PN] {
            let train = || outcome(&args, variant, 1, &corpus, &Device::Cpu, String::new());
            let whole = train()?;
            let (step, started) = whole.val[0];
            assert!(step == 0 && (started - ended).abs() < 1e-5 * ended);
            assert_eq!(whole.settings["--from-norm"], json!("rms"));
            assert_ne!(
                whole.settings["weights at the start (as a hash)"],
                Value::Null
            );
            // From its checkpoint, not from the weights again.
            assert_eq!(train()?.val, whole.val);
        }
        let missing = outcome(&args, rms, 2, &corpus, &Device::Cpu, String::new()).unwrap_err();
        assert!(
            missing.to_string().contains("rms-noscale.2.safetensors"),
            "{missing}"
        );
        Ok(())
    }

    #[test]
    fn a_result_of_other_settings_is_rejected() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let (args, corpus) = (args(dir.path().into()), corpus());
        let variant = Variant {
            norm: Norm::Batch,
            groups: Some(HEADS),
        };
        let run = Run::new(settings(&args, variant, 1, &corpus), &corpus, &Device::Cpu)?;
        let description = description(&args, variant, 1, &corpus);
        for key in [
            "width",
            "layers",
            "learning rate",
            "batch",
            "dtype",
            "--device",
        ] {
            let mut other = description.clone();
            assert_ne!(other[key], Value::Null, "{key}");
            other[key] = json!("another");
            let outcome = Outcome::unfinished(variant, other, &run);
            let bytes = serde_json::to_vec(&outcome)?;
            std::fs::write(result_path(&args, variant, 1), bytes)?;
            let error = report::check(&args, &corpus).unwrap_err().to_string();
            let named = format!(
                "batch.1.json has {key} \"another\", this study {}",
                description[key]
            );
            assert!(error.contains(&named), "{error}");
        }
        std::fs::write(result_path(&args, variant, 1), r#"{"variant": "batch"}"#)?;
        let error = report::check(&args, &corpus).unwrap_err();
        assert!(error.to_string().ends_with("is no run of a study"));
        Ok(())
    }
}
