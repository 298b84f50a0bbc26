//! Reproduces the claims of the PowerNorm paper that a laptop can test: the same transformer,
//! trained with each normalization on the same batches of a text, and what the paper looks at
//! inside.
//!
//! ```text
//! cargo run --release -p lab -- study --text tinyshakespeare.txt
//! cargo run --release -p lab -- study --text captions.en --words --experiments norms
//! ```
//!
//! The first reads `data/tinyshakespeare/input.txt` of github.com/karpathy/char-rnn, and makes
//! 106 runs, 53 for each of two seeds, of some 1.2 minutes each on one core: two hours. It says at
//! its start what that is on the machine it is on.
//!
//! Every run goes to its own file in `--out`. Finished runs are skipped and interrupted ones go on
//! from their last checkpoint. Two commands with other `--seeds` may share a folder, at the same
//! time too. The report is of all runs in the folder.
//!
//! `docs/paper.md` sets what comes out beside the paper's claims.

mod report;

use crate::common::checkpoint::write_whole;
use crate::common::data::{Corpus, HeldOut, Unit};
use crate::common::measure::{self, Observations, Snapshot};
use crate::common::model::{Size, CONTEXT, HEADS};
use crate::common::norm::{Norm, NormConfig, MOMENTUM};
use crate::common::optim::Schedule;
use crate::common::train::{Regularization, Run, Settings, BATCH};
use crate::common::{self, Place};
use anyhow::{ensure, Context, Result};
use candle::Device;
use candle_powernorm::Recipe;
use clap::{ArgAction, Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use report::Outcome;
use serde_json::{json, Value};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

/// What PowerNorm's α, forward and backward, are chosen from, as in the paper. The first is the
/// crate's default, and what the other experiments have.
const ALPHAS: [f64; 3] = [0.9, 0.95, 0.99];

/// Sequences whose tokens statistics are taken over, in the experiment on their number. The batch
/// stays the same.
const MICRO_BATCHES: [usize; 4] = [12, 6, 3, 1];

/// Steps between two points of what is observed.
const OBSERVE_EVERY: usize = 10;

/// Batches of an evaluation along the way, and of the final one, for which the validation split may
/// have less.
const EVAL_BATCHES: usize = 10;
const FINAL_EVAL_BATCHES: usize = 100;

/// Steps of the run that the budget is told from.
const TRIAL_STEPS: usize = 3;

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

    /// What to run, separated by commas
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

    /// Of these, only PowerNorm's runs with this pair of α [default: all]
    #[arg(
        long,
        action = ArgAction::Set,
        num_args = 2,
        value_names = ["FORWARD", "BACKWARD"]
    )]
    alphas: Vec<f64>,

    /// Seeds of the runs, separated by commas: each a start and a sequence of batches, the same for
    /// every normalization
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    seeds: Vec<u64>,

    #[command(flatten)]
    regularization: Regularization,

    #[command(flatten)]
    schedule: Schedule,

    /// Steps of the warm-up of PowerNorm, BRN and MABN [default: as many as the learning rate's, as
    /// in the paper]
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

    /// Where to train
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,

    /// Folder of the runs and of the report
    #[arg(long, value_name = "DIR", default_value = "target/study")]
    out: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Experiment {
    /// Every normalization behind the same layer-scale, of a group for each head: losses,
    /// statistics, gradients, embeddings
    Norms,
    /// Every normalization without layer-scale, and behind one of one group, as in the paper
    Scales,
    /// Fewer rows for the statistics, in the same batch by gradient accumulation
    Rows,
    /// PowerNorm's recipes, layer-scale and guard, each with and without
    Recipes,
    /// PowerNorm with each α of the forward and of the backward, behind a layer-scale of one group
    /// and without one
    Alphas,
}

/// One configuration of the model, run from several seeds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Variant {
    pub norm: Norm,
    /// Groups of the layer-scale before the normalization.
    pub groups: Option<usize>,
    pub recipe: Recipe,
    /// Whether ν's update is guarded where the paper's assumption does not hold.
    pub guard: bool,
    pub micro_batch: usize,
    /// PowerNorm's α, forward and backward.
    pub alpha: [f64; 2],
}

/// As the paper calls them.
const PN: Variant = Variant::of(Norm::Power);
const PN_V: Variant = Variant::of(Norm::PowerV);
const BN: Variant = Variant::of(Norm::Batch);
const LN: Variant = Variant::of(Norm::Layer);

impl Variant {
    pub const fn of(norm: Norm) -> Self {
        Self {
            norm,
            groups: Some(HEADS),
            recipe: Recipe::Paper,
            guard: true,
            micro_batch: BATCH,
            alpha: [ALPHAS[0]; 2],
        }
    }

    pub const fn with_groups(self, groups: Option<usize>) -> Self {
        Self { groups, ..self }
    }

    pub const fn without_layer_scale(self) -> Self {
        self.with_groups(None)
    }

    /// The name of its files.
    pub fn name(&self) -> String {
        let default = Self::of(self.norm);
        let mut name = self.norm.to_string();
        if self.recipe != default.recipe {
            name += "-fairseq";
        }
        match self.groups {
            None => name += "-noscale",
            groups if groups == default.groups => {}
            Some(groups) => name += &format!("-scale{groups}"),
        }
        if !self.guard {
            name += "-noguard";
        }
        if self.micro_batch != default.micro_batch {
            name += &format!("-rows{}", self.rows());
        }
        if self.alpha != default.alpha {
            let [forward, backward] = self.alpha;
            name += &format!("-alpha{forward}-{backward}");
        }
        name
    }

    /// The rows that statistics are taken over.
    pub fn rows(&self) -> usize {
        self.micro_batch * CONTEXT
    }
}

impl Experiment {
    fn variants(self) -> Vec<Variant> {
        match self {
            Self::Norms => Norm::CAUSAL.iter().map(|&norm| Variant::of(norm)).collect(),
            Self::Scales => [None, Some(1)]
                .into_iter()
                .flat_map(|groups| {
                    let norms = Norm::CAUSAL.iter();
                    norms.map(move |&norm| Variant::of(norm).with_groups(groups))
                })
                .collect(),
            Self::Rows => {
                let of_rows = |variant| {
                    MICRO_BATCHES.map(|micro_batch| Variant {
                        micro_batch,
                        ..variant
                    })
                };
                // LN takes no statistics over rows: of fewer it is the same run.
                let mut variants = vec![LN];
                variants.extend([BN, PN_V, PN].into_iter().flat_map(of_rows));
                variants
            }
            Self::Recipes => {
                let mut variants = vec![PN_V.without_layer_scale()];
                for power in [PN, PN.without_layer_scale()] {
                    variants.extend([
                        power,
                        Variant {
                            guard: false,
                            ..power
                        },
                        Variant {
                            recipe: Recipe::Fairseq,
                            ..power
                        },
                    ]);
                }
                variants
            }
            Self::Alphas => [Some(1), None]
                .into_iter()
                .flat_map(|groups| {
                    let pairs = ALPHAS.iter().flat_map(|&f| ALPHAS.map(|b| [f, b]));
                    pairs.map(move |alpha| Variant {
                        alpha,
                        ..PN.with_groups(groups)
                    })
                })
                .collect(),
        }
    }
}

/// What these experiments run, each once.
fn variants(experiments: &[Experiment]) -> Vec<Variant> {
    let mut variants: Vec<Variant> = vec![];
    for variant in experiments
        .iter()
        .flat_map(|experiment| experiment.variants())
    {
        if !variants.contains(&variant) {
            variants.push(variant);
        }
    }
    variants
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

    for norm in &args.norms {
        norm.check_causal()?;
    }
    let mut variants = variants(&args.experiments);
    variants.retain(|variant| {
        let groups = variant.groups.unwrap_or(0);
        (args.norms.is_empty() || args.norms.contains(&variant.norm))
            && (args.groups.is_empty() || args.groups.contains(&groups))
            && (args.alphas.is_empty() || (variant.norm.is_power() && args.alphas == variant.alpha))
    });
    ensure!(!variants.is_empty(), "no run is left of these experiments");
    let seeds: BTreeSet<u64> = args.seeds.iter().copied().collect();
    let jobs: Vec<_> = (seeds.iter())
        .flat_map(|&seed| variants.iter().map(move |&variant| (variant, seed)))
        .filter(|&(variant, seed)| !result_path(args, variant, seed).exists())
        .collect();
    if !jobs.is_empty() {
        print_budget(args, &corpus, jobs.len(), &device)?;
    }
    for (i, &(variant, seed)) in jobs.iter().enumerate() {
        let prefix = format!("{}/{} {} {seed}", i + 1, jobs.len(), variant.name());
        let outcome = train(args, variant, seed, &corpus, &device, prefix.clone())
            .with_context(|| format!("in run {}", run_name(variant, seed)))?;
        let result = match outcome.val_loss {
            Some(loss) => format!("validation loss {loss:.4}"),
            None => format!("diverged at step {}", outcome.train.len()),
        };
        eprintln!("{prefix}: {result}, {:.0} s", outcome.seconds);
        let bytes = serde_json::to_vec(&outcome)?;
        write_whole(&result_path(args, variant, seed), &bytes)?;
        // All is in the result.
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

/// Says what the runs will take, by a few steps of one.
fn print_budget(args: &Args, corpus: &Corpus, runs: usize, device: &Device) -> Result<()> {
    let settings = settings(args, LN, 0, corpus);
    let mut run = Run::new(settings, corpus, device)?;
    run.step()?;
    let start = Instant::now();
    for _ in 0..TRIAL_STEPS {
        run.step()?;
    }
    let step = start.elapsed() / TRIAL_STEPS as u32;
    // An evaluation is a forward, about a third of a step.
    let evaluations = args.steps / args.eval_every * EVAL_BATCHES + 2 * FINAL_EVAL_BATCHES;
    let total = step * (runs * (args.steps + evaluations / 3)) as u32;
    eprintln!(
        "{runs} runs of {} steps, {} {}s each: about {:.0} minutes on this machine",
        args.steps,
        BATCH * CONTEXT,
        corpus.unit,
        total.as_secs_f64() / 60.
    );
    Ok(())
}

fn settings(args: &Args, variant: Variant, seed: u64, corpus: &Corpus) -> Settings {
    let norm_warmup = args.norm_warmup.unwrap_or(args.schedule.rate_warmup);
    Settings {
        norm: NormConfig {
            norm: variant.norm,
            groups: variant.groups,
            // A layer's step is a forward, of which a step of the optimizer has several where
            // gradients accumulate.
            warmup_steps: norm_warmup * (BATCH / variant.micro_batch),
            recipe: variant.recipe,
            alpha: variant.alpha,
            group_norm_groups: HEADS,
            momentum: args.momentum,
        },
        size: Size::small(corpus.vocab.len()),
        batch: BATCH,
        micro_batch: variant.micro_batch,
        regularization: args.regularization,
        schedule: args.schedule,
        steps: args.steps,
        seed,
    }
}

/// What decides a run's result, its variant's name aside.
fn description(args: &Args, variant: Variant, seed: u64, corpus: &Corpus) -> Value {
    let mut description = settings(args, variant, seed, corpus).describe(corpus);
    description["--device"] = json!(format!("{:?}", args.device));
    description["batches of the last evaluation"] = json!(FINAL_EVAL_BATCHES);
    description
}

/// One run, from its checkpoint on if there is one.
fn train(
    args: &Args,
    variant: Variant,
    seed: u64,
    corpus: &Corpus,
    device: &Device,
    prefix: String,
) -> Result<Outcome> {
    let checkpoint = checkpoint_path(args, variant, seed);
    let settings = settings(args, variant, seed, corpus);
    let description = description(args, variant, seed, corpus);
    let mut run = Run::new(settings, corpus, device)?;
    let mut observations = Observations::default();
    if checkpoint.exists() {
        let notes = run.load(&checkpoint)?;
        observations = serde_json::from_str(notes.note("observations")?)?;
    }
    let style = ProgressStyle::with_template("{prefix:32} {wide_bar} {pos}/{len} {msg} [{eta}]")?;
    let bar = ProgressBar::new(args.steps as u64)
        .with_style(style)
        .with_prefix(prefix)
        .with_position(run.steps() as u64);
    bar.reset_eta();
    // With several forwards a step, what the state was before the last of them is not known here.
    let observed = variant.micro_batch == BATCH && Observations::are_of(variant.norm);
    ensure!(variant.guard || observed, "nothing to take the guard from");
    while run.steps() < args.steps {
        let start = Instant::now();
        let before = observed.then(|| Snapshot::of(&run.varmap)).transpose()?;
        let (loss, gradients) = run.gradients()?;
        if let Some(before) = before {
            let after = Snapshot::of(&run.varmap)?;
            let states = [&before, &after];
            let norm = &settings.norm;
            let recorded = run.steps().is_multiple_of(OBSERVE_EVERY);
            observations.observe(
                &run.optimizer,
                norm,
                variant.rows(),
                states,
                &gradients,
                recorded,
            )?;
            if !variant.guard {
                measure::unguard(
                    &run.varmap,
                    &run.optimizer,
                    norm,
                    variant.rows(),
                    states,
                    &gradients,
                )?;
            }
        }
        if !loss.is_finite() {
            return Ok(Outcome::unfinished(
                variant,
                description,
                &run,
                observations,
            ));
        }
        run.update(loss, &gradients)?;
        run.elapsed += start.elapsed();
        bar.set_message(format!("loss {loss:.3}"));
        bar.inc(1);
        let step = run.steps();
        if step.is_multiple_of(args.eval_every) && step < args.steps {
            let val_loss = run.evaluate(&corpus.val, EVAL_BATCHES)?;
            if !val_loss.is_finite() {
                return Ok(Outcome::unfinished(
                    variant,
                    description,
                    &run,
                    observations,
                ));
            }
            run.history.val.push((step as u32, val_loss));
            let notes = [("observations", serde_json::to_string(&observations)?)];
            run.save(&checkpoint, &notes)?;
        }
    }
    bar.finish_and_clear();
    let all_of = |split: &[u32]| split.len().div_ceil(BATCH * CONTEXT);
    let batches = FINAL_EVAL_BATCHES.min(all_of(&corpus.val));
    let val_loss = run.evaluate(&corpus.val, batches)?;
    let train_loss = run.evaluate(&corpus.train, batches)?;
    let test_loss = (corpus.test.as_deref())
        .map(|test| run.evaluate(test, FINAL_EVAL_BATCHES.min(all_of(test))))
        .transpose()?;
    let finite = |loss: f32| loss.is_finite();
    if !finite(val_loss) || !finite(train_loss) || !test_loss.is_none_or(finite) {
        return Ok(Outcome::unfinished(
            variant,
            description,
            &run,
            observations,
        ));
    }
    let losses = [train_loss, val_loss];
    let outcome = Outcome::of(variant, description, &run, losses, observations)?;
    Ok(Outcome {
        test_loss,
        ..outcome
    })
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
            alphas: vec![],
            regularization: Regularization::default(),
            schedule: Schedule::default(),
            norm_warmup: None,
            momentum: MOMENTUM,
            seeds: vec![1],
            steps: 3,
            eval_every: 2,
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
        // 8 norms behind 3 layer-scales, 3 norms with 3 other numbers of rows, and without the
        // guard or with the released code's recipe, with and without layer-scale, and 8 other pairs
        // of α, likewise. The head of this file tells what they take.
        assert_eq!(variants.len(), 8 * 3 + 3 * 3 + 2 * 2 + 2 * 8);
    }

    /// A run leaves its last checkpoint, from which the next call goes on. What runs report when
    /// the guard is off, for one seed that came to its end and one that did not.
    #[test]
    fn a_resumed_run_has_the_outcome_of_one_that_never_stopped() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let (args, corpus) = (args(dir.path().into()), corpus());
        let variant = Variant {
            guard: false,
            ..Variant::of(Norm::Power)
        };
        let train = || train(&args, variant, 1, &corpus, &Device::Cpu, String::new());
        let whole = train()?;
        assert!(checkpoint_path(&args, variant, 1).exists());
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
            anyhow::Ok(std::fs::write(
                result_path(&args, variant, outcome.seed),
                bytes,
            )?)
        };
        write(&whole)?;
        write(&Outcome {
            seed: 2,
            settings: description(&args, variant, 2, &corpus),
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

        let refused = |args: &Args| report::check(args, &corpus).unwrap_err().to_string();
        let error = refused(&Args { steps: 4, ..args });
        assert!(error.contains("power-noguard."), "{error}");
        assert!(
            error.ends_with(
                "has --steps 3, this study 4: give the study another --out, or remove the file to \
                 have the run made again"
            ),
            "{error}"
        );
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
            let variant = Variant::of(Norm::Power).with_groups(Some(1));
            let outcome = train(args, variant, 1, corpus, &Device::Cpu, String::new())?;
            std::fs::remove_file(checkpoint_path(args, variant, 1))?;
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
        assert!(outcome
            .test_loss
            .is_some_and(|loss| Some(loss) != outcome.val_loss));
        let but = |outcome: Outcome| Outcome {
            test_loss: None,
            seconds: 0.,
            ..outcome
        };
        assert_eq!(but(outcome), but(plain));
        Ok(())
    }

    #[test]
    fn a_result_of_other_settings_is_refused() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let (args, corpus) = (args(dir.path().into()), corpus());
        let variant = Variant::of(Norm::Batch);
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
            let outcome = Outcome::unfinished(variant, other, &run, Observations::default());
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
