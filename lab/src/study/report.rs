//! The results of runs, and the tables made of them.

use super::{description, variants, Args, Experiment, Variant, ALPHAS, BN, LN, PN, PN_V};
use crate::common::data::{Corpus, Unit};
use crate::common::measure::{gains, singular_values, Observations, Outliers};
use crate::common::model::CONTEXT;
use crate::common::norm::Norm;
use crate::common::train::{Regularization, Run, BATCH};
use anyhow::{ensure, Context, Result};
use candle_powernorm::Recipe;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// A finished run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub variant: String,
    pub seed: u64,
    /// The [`description`] of the run.
    pub settings: Value,
    /// `None` of a run that diverged, as everything that its end would tell.
    pub val_loss: Option<f32>,
    pub train_loss: Option<f32>,
    /// On the test split, if the study has one.
    #[serde(default)]
    pub test_loss: Option<f32>,
    pub train: Vec<f32>,
    pub val: Vec<(u32, f32)>,
    pub observations: Observations,
    /// γ/ψ by layer.
    pub gains: BTreeMap<String, Vec<f64>>,
    /// Of the embedding.
    pub singular_values: Vec<f64>,
    pub seconds: f64,
}

/// Steps at the end of a run that its loss in training mode is the mean of.
const LAST_STEPS: usize = 50;

impl Outcome {
    /// The loss that the last steps saw, by their batches' statistics where a normalization has
    /// them.
    fn last_loss(&self) -> Option<f64> {
        let last = &self.train[self.train.len().saturating_sub(LAST_STEPS)..];
        let sum: f64 = last.iter().map(|&loss| f64::from(loss)).sum();
        self.val_loss.map(|_| sum / last.len() as f64)
    }

    pub fn of(
        variant: Variant,
        settings: Value,
        run: &Run,
        [train_loss, val_loss]: [f32; 2],
        observations: Observations,
    ) -> Result<Self> {
        Ok(Self {
            train_loss: Some(train_loss),
            val_loss: Some(val_loss),
            gains: gains(&run.varmap)?,
            singular_values: singular_values(&run.varmap)?,
            ..Self::unfinished(variant, settings, run, observations)
        })
    }

    /// A run without losses at its end.
    pub fn unfinished(
        variant: Variant,
        settings: Value,
        run: &Run,
        observations: Observations,
    ) -> Self {
        Self {
            variant: variant.name(),
            seed: run.settings().seed,
            settings,
            val_loss: None,
            train_loss: None,
            test_loss: None,
            train: run.history.train.clone(),
            val: run.history.val.clone(),
            observations,
            gains: BTreeMap::new(),
            singular_values: vec![],
            seconds: run.elapsed.as_secs_f64(),
        }
    }
}

/// Runs of one variant, in the order of their seeds.
struct Runs<'a>(Vec<&'a Outcome>);

impl Runs<'_> {
    /// Mean and range of a number that every run has, or what became of the run.
    fn spread(&self, of: impl Fn(&Outcome) -> Option<f64>) -> String {
        let values: Vec<_> = self.0.iter().map(|run| of(run)).collect();
        spread(&values, |value| format!("{value:.3}"))
    }

    /// The same of the differences to the `others` of one [`Compared`], seed by seed.
    fn spread_over(&self, others: &Runs, of: impl Fn(&Outcome) -> Option<f64>) -> String {
        let pairs = self.0.iter().zip(&others.0);
        let differences: Vec<_> = pairs
            .map(|(run, other)| Some(of(run)? - of(other)?))
            .collect();
        spread(&differences, |value| format!("{value:+.3}"))
    }
}

fn spread(values: &[Option<f64>], show: fn(f64) -> String) -> String {
    let finished: Vec<f64> = values.iter().copied().flatten().collect();
    let diverged = values.len() - finished.len();
    let mut text = match finished.len() {
        0 => String::new(),
        1 => show(finished[0]),
        _ => {
            let least = finished.iter().copied().fold(f64::INFINITY, f64::min);
            let most = finished.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            format!(
                "{} ({} to {})",
                show(mean(&finished)),
                show(least),
                show(most)
            )
        }
    };
    if diverged > 0 {
        let gap = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{gap}{diverged} of {} diverged", values.len());
    }
    text
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn val_loss(outcome: &Outcome) -> Option<f64> {
    outcome.val_loss.map(f64::from)
}

/// Variants with their runs from the same seeds, because seeds differ by as much as variants do.
struct Compared<'a>(Vec<(Variant, Runs<'a>)>);

impl Compared<'_> {
    fn get(&self, variant: Variant) -> Option<&Runs<'_>> {
        let mut all = self.0.iter();
        all.find(|(other, _)| *other == variant)
            .map(|(_, runs)| runs)
    }
}

/// By variant, then by seed.
type Outcomes = BTreeMap<String, BTreeMap<u64, Outcome>>;

/// All runs in the folder, and the files of those that the study does not have.
fn read_all(args: &Args, corpus: &Corpus) -> Result<(Outcomes, Vec<String>)> {
    #[derive(Deserialize)]
    struct Named {
        variant: String,
    }
    let known: BTreeMap<String, Variant> = (variants(Experiment::value_variants()).into_iter())
        .map(|variant| (variant.name(), variant))
        .collect();
    let (mut all, mut strangers) = (Outcomes::new(), vec![]);
    for entry in std::fs::read_dir(&args.out)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let bytes = std::fs::read(&path)?;
        let unreadable = || format!("{} is no run of a study", path.display());
        // The study may have had a variant once, and another form of results then.
        let name = serde_json::from_slice::<Named>(&bytes).with_context(unreadable)?;
        let Some(&variant) = known.get(&name.variant) else {
            strangers.extend(path.file_name().map(|name| name.display().to_string()));
            continue;
        };
        let outcome: Outcome = serde_json::from_slice(&bytes).with_context(unreadable)?;
        let description = description(args, variant, outcome.seed, corpus);
        for (key, ours) in description.as_object().into_iter().flatten() {
            let theirs = &outcome.settings[key];
            ensure!(
                theirs == ours,
                "{} has {key} {theirs}, this study {ours}: give the study another --out, or \
                 remove the file to have the run made again",
                path.display(),
            );
        }
        let runs = all.entry(name.variant).or_default();
        runs.insert(outcome.seed, outcome);
    }
    strangers.sort_unstable();
    Ok((all, strangers))
}

/// Checks that all runs in the folder can be in one report, and gives the names of files that will
/// not be.
pub fn check(args: &Args, corpus: &Corpus) -> Result<Vec<String>> {
    read_all(args, corpus).map(|(_, strangers)| strangers)
}

/// Writes `report.md` from all runs in the folder, and gives the text.
pub fn write(args: &Args, corpus: &Corpus) -> Result<String> {
    let (all, _) = read_all(args, corpus)?;
    let text = Report { args, corpus, all }.text()?;
    std::fs::write(args.out.join("report.md"), &text)?;
    Ok(text)
}

struct Report<'a> {
    args: &'a Args,
    corpus: &'a Corpus,
    all: Outcomes,
}

impl Report<'_> {
    fn text(&self) -> Result<String> {
        let unit = self.corpus.unit;
        let Regularization { dropout, smoothing } = self.args.regularization;
        let mut text = format!(
            "# {} {unit}s to train on, {} to validate, {} kinds; {} steps{}{}\n",
            self.corpus.train.len(),
            self.corpus.val.len(),
            self.corpus.vocab.len(),
            self.args.steps,
            match dropout > 0. {
                true => format!(", dropout {dropout}"),
                false => String::new(),
            },
            match smoothing > 0. {
                true => format!(", label smoothing {smoothing}"),
                false => String::new(),
            },
        );
        self.losses(&mut text)?;
        self.scales(&mut text)?;
        self.statistics(&mut text)?;
        self.rows(&mut text)?;
        self.recipes(&mut text)?;
        self.alphas(&mut text)?;
        self.embeddings(&mut text)?;
        self.gains(&mut text)?;
        Ok(text)
    }

    /// Opens a section on those of the variants that ran. `None` where there is nothing to say of
    /// them.
    fn section<'a>(
        &'a self,
        text: &mut String,
        title: &str,
        variants: impl IntoIterator<Item = Variant>,
    ) -> Result<Option<Compared<'a>>> {
        let ran: Vec<_> = (variants.into_iter())
            .filter_map(|variant| Some((variant, self.all.get(&variant.name())?)))
            .collect();
        let Some((_, first)) = ran.first() else {
            return Ok(None);
        };
        let mut seeds: Vec<u64> = first.keys().copied().collect();
        seeds.retain(|seed| ran.iter().all(|(_, runs)| runs.contains_key(seed)));
        writeln!(text, "\n## {title}\n")?;
        if seeds.is_empty() {
            writeln!(text, "There is no seed yet that all its runs are of.")?;
            return Ok(None);
        }
        let rest = match ran.iter().any(|(_, runs)| runs.len() > seeds.len()) {
            true => "; others have not run all that is compared here",
            false => "",
        };
        let listed: Vec<String> = seeds.iter().map(u64::to_string).collect();
        writeln!(text, "Seeds: {}{rest}.\n", listed.join(", "))?;
        let of_seeds = |(variant, runs): (Variant, &'a BTreeMap<u64, Outcome>)| {
            let runs = seeds.iter().filter_map(|seed| runs.get(seed));
            (variant, Runs(runs.collect()))
        };
        Ok(Some(Compared(ran.into_iter().map(of_seeds).collect())))
    }

    fn losses(&self, text: &mut String) -> Result<()> {
        let Some(compared) = self.section(text, "Losses", Experiment::Norms.variants())? else {
            return Ok(());
        };
        let words = self.corpus.unit == Unit::Word;
        let (head, line) = match words {
            true => (" perplexity |", "---|"),
            false => ("", ""),
        };
        writeln!(
            text,
            "Nats a {}, mean (range) over seeds. On both splits, they are of the finished model, \
             by running statistics where a normalization has them. The last steps are the last \
             {LAST_STEPS} batches in training, with dropout and smoothed labels if the run has \
             them. Less layer's: the difference to its validation loss from the same seed.\n",
            self.corpus.unit
        )?;
        writeln!(
            text,
            "| normalization | validation | less layer's |{head} training split | last steps |"
        )?;
        writeln!(text, "|---|---|---|{line}---|---|")?;
        for (variant, runs) in &compared.0 {
            let perplexity = match words {
                true => format!(" {} |", runs.spread(|run| val_loss(run).map(f64::exp))),
                false => String::new(),
            };
            let norm = variant.norm;
            writeln!(
                text,
                "| {norm} | {} | {} |{perplexity} {} | {} |",
                runs.spread(val_loss),
                less(runs, *variant, &compared, LN),
                runs.spread(|run| run.train_loss.map(f64::from)),
                runs.spread(Outcome::last_loss),
            )?;
        }
        Ok(())
    }

    /// Every normalization behind every layer-scale, against the others behind the same one.
    fn scales(&self, text: &mut String) -> Result<()> {
        let scales = Experiment::Scales.variants();
        if !(scales.iter()).any(|variant| self.all.contains_key(&variant.name())) {
            return Ok(());
        }
        let norms = Experiment::Norms.variants();
        let mut variants = [scales, norms].concat();
        // By normalization, as these are listed: the sort keeps the order of layer-scales.
        variants
            .sort_by_key(|variant| (Norm::CAUSAL.iter()).position(|norm| *norm == variant.norm));
        let Some(compared) = self.section(text, "Layer-scale", variants)? else {
            return Ok(());
        };
        writeln!(
            text,
            "Validation losses, mean (range) over seeds. Each difference is of runs from the same \
             seed: to LN and to PN behind the same layer-scale, and to the same normalization \
             without one.\n\n\
             | normalization | layer-scale | validation | less LN's, same scale | less PN's, same \
             scale | less its own without |\n\
             |---|---|---|---|---|---|"
        )?;
        for (variant, runs) in &compared.0 {
            let scale = match variant.groups {
                None => "none".to_string(),
                Some(1) => "1 group".to_string(),
                Some(groups) => format!("{groups} groups"),
            };
            let less = |base: Variant| less(runs, *variant, &compared, base);
            writeln!(
                text,
                "| {} | {scale} | {} | {} | {} | {} |",
                variant.norm,
                runs.spread(val_loss),
                less(LN.with_groups(variant.groups)),
                less(PN.with_groups(variant.groups)),
                less(variant.without_layer_scale()),
            )?;
        }
        Ok(())
    }

    /// Distances of batch from running statistics, and the norms of their gradients.
    fn statistics(&self, text: &mut String) -> Result<()> {
        let shown = [
            ("BN", BN),
            ("BN without layer-scale", BN.without_layer_scale()),
            ("PN-V", PN_V),
            ("PN-V without layer-scale", PN_V.without_layer_scale()),
        ];
        let variants = shown.map(|(_, variant)| variant);
        let Some(compared) = self.section(text, "Statistics", variants)? else {
            return Ok(());
        };
        let shown: Vec<_> = (shown.into_iter())
            .filter_map(|(label, variant)| Some((label, compared.get(variant)?)))
            .collect();
        writeln!(
            text,
            "Means over the second half of training and over seeds, in the first normalization, \
             in the last, and over all. Distances are (1/d)‖batch − running‖ of d channels. \
             Relative distances are ‖batch − running‖ over the length of the running statistic. \
             For the mean it is the length of the running deviation.\n\n\
             | distance | of | first layer | last layer | mean | first, relative | last, relative \
             | mean, relative |\n\
             |---|---|---|---|---|---|---|---|"
        )?;
        for (label, runs) in &shown {
            for statistic in statistics(runs) {
                let cells = |what: &str, show: fn(f64) -> String| {
                    let layers = self.late(runs, &format!("{what} of the {statistic}"));
                    Some([*layers.first()?, *layers.last()?, mean(&layers)].map(show))
                };
                let absolute = cells("distance", |value| format!("{value:.2e}"));
                let relative = cells("relative distance", |value| format!("{value:.4}"));
                if let (Some(absolute), Some(relative)) = (absolute, relative) {
                    let cells = [absolute, relative].concat().join(" | ");
                    writeln!(text, "| {statistic} | {label} | {cells} |")?;
                }
            }
        }
        writeln!(
            text,
            "\n\
             Gradients are (1/d)‖g/σ_B‖ of d channels. For the mean, g is (1/n) Σ ∂L/∂X̂. For the \
             variance and the quadratic mean it is (1/n) Σ ∂L/∂X̂ ⊙ X̂, and the latter has ψ_B for \
             σ_B. Means are over the second half of \
             training. The largest is of all of training, and the step counts from 0.\n\n\
             | gradient | of | first layer | last layer | mean | largest | in layer | at step |\n\
             |---|---|---|---|---|---|---|---|"
        )?;
        for (label, runs) in &shown {
            for statistic in statistics(runs) {
                let quantity = format!("gradient of the {statistic}");
                let layers = self.late(runs, &quantity);
                let (Some(first), Some(last)) = (layers.first(), layers.last()) else {
                    continue;
                };
                let points = (runs.0.iter())
                    .filter_map(|run| run.observations.series.get(&quantity))
                    .flatten()
                    .flat_map(|(layer, series)| series.iter().map(move |point| (layer, point)));
                let largest = points.max_by(|(_, (_, a)), (_, (_, b))| a.total_cmp(b));
                let Some((layer, (step, largest))) = largest else {
                    continue;
                };
                writeln!(
                    text,
                    "| {statistic} | {label} | {first:.2e} | {last:.2e} | {:.2e} | {largest:.2e} \
                     | {layer} | {step} |",
                    mean(&layers)
                )?;
            }
        }
        writeln!(
            text,
            "\n\
             Outliers in the first normalization, where the paper looks, over all seeds and \
             recorded steps after the warm-up. The last column is the median of the last quarter \
             of these steps over the median of the first quarter.\n\n\
             | quantity | of | median | 99th percentile, over it | largest, over it | last \
             quarter over first |\n\
             |---|---|---|---|---|---|"
        )?;
        for (label, runs) in &shown {
            for statistic in statistics(runs) {
                for what in ["distance", "relative distance", "gradient"] {
                    let quantity = format!("{what} of the {statistic}");
                    if let Some(outliers) = outliers(runs, &quantity) {
                        writeln!(text, "| {quantity} | {label} | {outliers} |")?;
                    }
                }
            }
        }
        Ok(())
    }

    /// A quantity over the second half of training: its mean over steps and seeds in each layer,
    /// from the first to the last.
    fn late(&self, runs: &Runs, quantity: &str) -> Vec<f64> {
        let mut layers: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for run in &runs.0 {
            for (layer, series) in run.observations.series.get(quantity).into_iter().flatten() {
                let late = series
                    .iter()
                    .filter(|(step, _)| *step >= self.args.steps / 2);
                let values = layers.entry(layer).or_default();
                values.extend(late.map(|&(_, value)| value));
            }
        }
        (layers.values())
            .filter(|values| !values.is_empty())
            .map(|values| mean(values))
            .collect()
    }

    fn rows(&self, text: &mut String) -> Result<()> {
        let variants = Experiment::Rows.variants();
        let fewer = |variant: &Variant| variant.micro_batch != BATCH;
        let ran = |variant: &Variant| self.all.contains_key(&variant.name());
        if !variants
            .iter()
            .any(|variant| fewer(variant) && ran(variant))
        {
            return Ok(());
        }
        let title = "Rows that statistics are taken over";
        let Some(compared) = self.section(text, title, variants)? else {
            return Ok(());
        };
        writeln!(
            text,
            "Mean (range) over seeds. The rows of a step of the optimizer stay the same. \
             {CONTEXT} rows are one sequence. The statistic of such a batch tells each token of \
             those after it, so a model in training can read them. Running statistics forget at \
             each forward, and of few rows have seen less. LN takes no statistic over rows, so it \
             is one run, whatever their number."
        )?;
        let rows: BTreeSet<usize> = compared
            .0
            .iter()
            .map(|(variant, _)| variant.rows())
            .collect();
        let mut norms: Vec<Norm> = vec![];
        for (variant, _) in &compared.0 {
            if !norms.contains(&variant.norm) {
                norms.push(variant.norm);
            }
        }
        let runs = |norm: Norm, rows: usize| {
            let micro_batch = match norm {
                Norm::Layer => BATCH,
                _ => rows / CONTEXT,
            };
            compared.get(Variant {
                micro_batch,
                ..Variant::of(norm)
            })
        };
        type Number = fn(&Outcome) -> Option<f64>;
        let losses = |number: Number| move |runs: &Runs, _: &Runs| runs.spread(number);
        let table = |text: &mut String, title: &str, cell: &dyn Fn(&Runs, &Runs) -> String| {
            let names: Vec<String> = norms.iter().map(Norm::to_string).collect();
            writeln!(text, "\n{title}:\n\n| rows | {} |", names.join(" | "))?;
            writeln!(text, "|---|{}", "---|".repeat(norms.len()))?;
            for &rows in &rows {
                let cell = |&norm: &Norm| match (runs(norm, rows), runs(norm, BATCH * CONTEXT)) {
                    (Some(runs), Some(whole)) => cell(runs, whole),
                    _ => String::new(),
                };
                let cells: Vec<String> = norms.iter().map(cell).collect();
                writeln!(text, "| {rows} | {} |", cells.join(" | "))?;
            }
            anyhow::Ok(())
        };
        table(
            text,
            "Validation, by running statistics where a normalization has them",
            &losses(val_loss),
        )?;
        table(
            text,
            "Validation, less that of the same seed by the statistics of the whole batch",
            &|runs, whole| match std::ptr::eq(runs, whole) {
                true => String::new(),
                false => runs.spread_over(whole, val_loss),
            },
        )?;
        table(
            text,
            "The last batches in training, by theirs where it takes those",
            &losses(Outcome::last_loss),
        )?;
        Ok(())
    }

    fn recipes(&self, text: &mut String) -> Result<()> {
        let mut variants = Experiment::Recipes.variants();
        variants.retain(|variant| self.all.contains_key(&variant.name()));
        // Some are there for other sections.
        let others = [Experiment::Norms, Experiment::Scales].map(Experiment::variants);
        let others = others.concat();
        if variants.iter().all(|variant| others.contains(variant)) {
            return Ok(());
        }
        let Some(compared) = self.section(text, "Recipes", variants)? else {
            return Ok(());
        };
        writeln!(
            text,
            "Mean (range) over seeds. The difference is to the validation loss of PN from the \
             same seed: the paper's recipe, with layer-scale and guard. The last column counts \
             the channels with (1−α_b)Γ > 1, over all steps and layers after the warm-up. The \
             guard acts there, where it is on.\n\n\
             | recipe | layer-scale | guard | validation | less PN's | training | outside \
             Assumption 10 |\n\
             |---|---|---|---|---|---|---|"
        )?;
        for (variant, runs) in &compared.0 {
            let recipe = match (variant.norm, variant.recipe) {
                (Norm::PowerV, _) => "PN-V",
                (_, Recipe::Paper) => "paper",
                _ => "released code",
            };
            let guard = match (variant.norm, variant.recipe) {
                (Norm::Power, Recipe::Paper) => {
                    if variant.guard {
                        "on"
                    } else {
                        "off"
                    }
                }
                _ => "has none",
            };
            let guarded = match variant.norm {
                Norm::Power => {
                    let guarded: usize = runs.0.iter().map(|run| run.observations.guarded).sum();
                    let channels: usize = runs.0.iter().map(|run| run.observations.channels).sum();
                    format!("{guarded} of {channels}")
                }
                _ => String::new(),
            };
            writeln!(
                text,
                "| {recipe} | {} | {guard} | {} | {} | {} | {guarded} |",
                if variant.groups.is_some() {
                    "on"
                } else {
                    "off"
                },
                runs.spread(val_loss),
                less(runs, *variant, &compared, PN),
                runs.spread(|run| run.train_loss.map(f64::from)),
            )?;
        }
        Ok(())
    }

    /// PowerNorm with each α, on the seeds that it ran.
    fn alphas(&self, text: &mut String) -> Result<()> {
        let default = |variant: Variant| Variant {
            alpha: Variant::of(variant.norm).alpha,
            ..variant
        };
        let ran: Vec<_> = (Experiment::Alphas.variants().into_iter())
            .filter_map(|variant| Some((variant, self.all.get(&variant.name())?)))
            .collect();
        if ran.iter().all(|(variant, _)| *variant == default(*variant)) {
            return Ok(());
        }
        writeln!(
            text,
            "\n## α\n\n\
             Validation loss of PN, mean (range) over the seeds that ran. The difference is to α = \
             {0} in both passes, from the same seeds.\n\n\
             | layer-scale | α, forward | α, backward | validation | less {0}'s | seeds |\n\
             |---|---|---|---|---|---|",
            ALPHAS[0]
        )?;
        for (variant, runs) in ran {
            let base =
                (self.all.get(&default(variant).name())).filter(|_| default(variant) != variant);
            let pairs = base
                .into_iter()
                .flatten()
                .filter_map(|(seed, base)| Some((runs.get(seed)?, base)));
            let (paired, bases): (Vec<_>, Vec<_>) = pairs.unzip();
            let less = match paired.is_empty() {
                true => String::new(),
                false => Runs(paired).spread_over(&Runs(bases), val_loss),
            };
            let [forward, backward] = variant.alpha;
            let scale = variant.groups.map_or("none", |_| "1 group");
            let seeds: Vec<String> = runs.keys().map(u64::to_string).collect();
            writeln!(
                text,
                "| {scale} | {forward} | {backward} | {} | {less} | {} |",
                Runs(runs.values().collect()).spread(val_loss),
                seeds.join(", "),
            )?;
        }
        Ok(())
    }

    fn embeddings(&self, text: &mut String) -> Result<()> {
        let title = "Singular values of the embedding";
        let Some(compared) = self.section(text, title, Experiment::Norms.variants())? else {
            return Ok(());
        };
        writeln!(
            text,
            "Mean (range) over seeds.\n\n\
             | normalization | largest | median | smallest | largest / median |\n\
             |---|---|---|---|---|"
        )?;
        for (variant, runs) in &compared.0 {
            let nth = |place: fn(usize) -> usize| {
                move |run: &Outcome| {
                    run.singular_values
                        .get(place(run.singular_values.len()))
                        .copied()
                }
            };
            let (largest, median) = (nth(|_| 0), nth(|count| count / 2));
            let norm = variant.norm;
            writeln!(
                text,
                "| {norm} | {} | {} | {} | {} |",
                runs.spread(largest),
                runs.spread(median),
                runs.spread(|run| run.singular_values.last().copied()),
                runs.spread(|run| Some(largest(run)? / median(run)?)),
            )?;
        }
        Ok(())
    }

    /// Medians of |γ/ψ|, layer by layer.
    fn gains(&self, text: &mut String) -> Result<()> {
        let variants = [
            PN,
            PN.without_layer_scale(),
            PN_V,
            PN_V.without_layer_scale(),
            BN,
            BN.without_layer_scale(),
        ];
        let Some(compared) = self.section(text, "γ/ψ", variants)? else {
            return Ok(());
        };
        writeln!(
            text,
            "Magnitudes in the finished model. ψ is the running one at the end of training, and \
             of BatchNorm it is the running deviation σ. Mean (range) over seeds."
        )?;
        let layers: BTreeSet<&String> = (compared.0.iter())
            .flat_map(|(_, runs)| runs.0.iter().flat_map(|run| run.gains.keys()))
            .collect();
        let names: Vec<String> = compared
            .0
            .iter()
            .map(|(variant, _)| variant.name())
            .collect();
        let sorted = |run: &Outcome, layer: &String| {
            let mut gains: Vec<f64> = run
                .gains
                .get(layer)?
                .iter()
                .map(|gain| gain.abs())
                .collect();
            gains.sort_unstable_by(f64::total_cmp);
            Some(gains)
        };
        for (title, place) in [
            (
                "The median over channels",
                (|count| count / 2) as fn(usize) -> usize,
            ),
            ("The largest", |count| count - 1),
        ] {
            writeln!(text, "\n{title}:\n\n| layer | {} |", names.join(" | "))?;
            writeln!(text, "|---|{}", "---|".repeat(names.len()))?;
            for layer in &layers {
                let nth = |run: &Outcome| {
                    let gains = sorted(run, layer)?;
                    gains.get(place(gains.len())).copied()
                };
                let cells: Vec<String> = (compared.0.iter())
                    .map(|(_, runs)| runs.spread(nth))
                    .collect();
                writeln!(text, "| {layer} | {} |", cells.join(" | "))?;
            }
        }
        writeln!(
            text,
            "\n\
             The share of channels with |γ| ≤ ψ_B, the batch's (σ_B with BatchNorm), over the \
             recorded steps after the warm-up. In Figure 7 it is all channels of PN-V:\n\n\
             | layer | {} |",
            names.join(" | ")
        )?;
        writeln!(text, "|---|{}", "---|".repeat(names.len()))?;
        for layer in &layers {
            let share = |run: &Outcome| {
                let [within, all] = run.observations.within.get(*layer)?;
                Some(*within as f64 / *all as f64)
            };
            let cells: Vec<String> = (compared.0.iter())
                .map(|(_, runs)| runs.spread(share))
                .collect();
            writeln!(text, "| {layer} | {} |", cells.join(" | "))?;
        }
        Ok(())
    }
}

/// What validation losses of `runs` have over those of `base` from the same seeds, if these are
/// others.
fn less(runs: &Runs, variant: Variant, compared: &Compared, base: Variant) -> String {
    let base = compared.get(base).filter(|_| variant != base);
    base.map_or(String::new(), |base| runs.spread_over(base, val_loss))
}

/// How a quantity of the first layer is spread after the warm-up, as cells of a table.
fn outliers(runs: &Runs, quantity: &str) -> Option<String> {
    let late = |run: &&Outcome| -> Option<Vec<f64>> {
        let (_, series) = run.observations.series.get(quantity)?.first_key_value()?;
        let warmup = run.settings["PowerNorm warm-up"].as_u64().unwrap_or(0) as usize;
        let late = series.iter().filter(|(step, _)| *step >= warmup);
        Some(late.map(|&(_, value)| value).collect())
    };
    let by_run: Vec<Vec<f64>> = runs.0.iter().filter_map(late).collect();
    let outliers = Outliers::of(&by_run)?;
    Some(format!(
        "{:.2e} | {:.2} | {:.2} | {:.2}",
        outliers.median,
        outliers.percentile_99_over_median,
        outliers.largest_over_median,
        outliers.last_quarter_over_first,
    ))
}

/// The names of the statistics that were observed.
fn statistics(runs: &Runs) -> BTreeSet<String> {
    let quantities = runs.0.iter().flat_map(|run| run.observations.series.keys());
    quantities
        .filter_map(|quantity| quantity.strip_prefix("distance of the "))
        .map(str::to_string)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::Place;
    use std::path::PathBuf;

    fn args(out: PathBuf) -> Args {
        Args {
            text: "a text".into(),
            words: false,
            experiments: vec![],
            norms: vec![],
            groups: vec![],
            alphas: vec![],
            regularization: Default::default(),
            held_out: Default::default(),
            schedule: Default::default(),
            norm_warmup: None,
            momentum: 0.1,
            seeds: vec![],
            steps: 4,
            eval_every: 2,
            device: Place::Cpu,
            out,
        }
    }

    fn outcome(variant: Variant, seed: u64, val_loss: Option<f32>) -> Outcome {
        Outcome {
            variant: variant.name(),
            seed,
            settings: serde_json::json!({ "PowerNorm warm-up": 100 }),
            val_loss,
            train_loss: val_loss,
            test_loss: None,
            train: vec![2.; 4],
            val: vec![(2, 2.)],
            observations: Observations::default(),
            gains: BTreeMap::new(),
            singular_values: vec![],
            seconds: 1.,
        }
    }

    /// The report of these outcomes.
    fn report(outcomes: Vec<Outcome>) -> Result<String> {
        let dir = tempfile::tempdir()?;
        let args = args(dir.path().into());
        let corpus = Corpus::sample(CONTEXT);
        let mut all = Outcomes::new();
        for outcome in outcomes {
            let runs = all.entry(outcome.variant.clone()).or_default();
            runs.insert(outcome.seed, outcome);
        }
        let report = Report {
            args: &args,
            corpus: &corpus,
            all,
        };
        let text = report.text()?;
        Ok(text)
    }

    fn few_rows(variant: Variant) -> Variant {
        Variant {
            micro_batch: 3,
            ..variant
        }
    }

    /// The whole batch had a mean over two seeds beside one of fewer rows, 3.000 beside 2.500.
    #[test]
    fn means_are_compared_over_the_same_seeds() -> Result<()> {
        let off = Variant { guard: false, ..PN };
        let text = report(vec![
            outcome(PN, 1, Some(2.)),
            outcome(PN, 2, Some(4.)),
            outcome(PN, 3, Some(2.25)),
            outcome(few_rows(PN), 1, Some(2.5)),
            outcome(few_rows(PN), 3, Some(3.25)),
            outcome(off, 1, Some(2.125)),
            outcome(off, 4, Some(9.)),
        ])?;
        let section = |title: &str| {
            let section = text.split("\n## ").find(|part| part.starts_with(title));
            section.unwrap_or_default()
        };
        let rows = section("Rows");
        for line in [
            "Seeds: 1, 3; others have not run all that is compared here.",
            "| 192 | 2.875 (2.500 to 3.250) |",
            "| 768 | 2.125 (2.000 to 2.250) |",
            "| 192 | +0.750 (+0.500 to +1.000) |",
        ] {
            assert!(rows.contains(line), "{line} in {rows}");
        }
        let recipes = section("Recipes");
        for line in [
            "Seeds: 1; others",
            "| paper | on | on | 2.000 |  | 2.000 |",
            "| paper | on | off | 2.125 | +0.125 | 2.125 |",
        ] {
            assert!(recipes.contains(line), "{line} in {recipes}");
        }
        assert!(section("Losses").contains("Seeds: 1, 2, 3.\n"), "{text}");
        Ok(())
    }

    #[test]
    fn without_a_common_seed_nothing_is_compared() -> Result<()> {
        let text = report(vec![
            outcome(PN, 1, Some(2.)),
            outcome(few_rows(PN), 2, Some(3.)),
        ])?;
        let rows = text.split("\n## Rows").nth(1).context("no section")?;
        assert!(rows.contains("There is no seed yet"), "{text}");
        assert!(!rows.contains("3.000"), "{text}");
        Ok(())
    }

    /// LN has one run, and the same place at any number of rows.
    #[test]
    fn layer_norm_is_the_same_of_any_rows() -> Result<()> {
        let text = report(vec![
            outcome(LN, 1, Some(2.5)),
            outcome(BN, 1, Some(2.25)),
            outcome(few_rows(BN), 1, Some(136.)),
            outcome(PN, 1, Some(2.)),
            outcome(few_rows(PN), 1, None),
        ])?;
        for line in [
            "| 192 | 2.500 | 136.000 | 1 of 1 diverged |",
            "| 768 | 2.500 | 2.250 | 2.000 |",
            "| 192 |  | +133.750 | 1 of 1 diverged |",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        Ok(())
    }

    /// Layers whose distances differ 500-fold were one mean.
    #[test]
    fn statistics_are_told_by_layer() -> Result<()> {
        let mut run = outcome(BN, 1, Some(2.));
        let layer = |late: f64, early: f64| vec![(0, early), (2, late), (3, 3. * late)];
        for (quantity, scale) in [
            ("distance of the mean", 1.),
            ("relative distance of the mean", 10.),
            ("gradient of the mean", 100.),
        ] {
            let layers = BTreeMap::from([
                ("blocks.0.norm_1".to_string(), layer(2e-3 * scale, 1.)),
                ("blocks.0.norm_2".to_string(), layer(1e-3 * scale, 9.)),
                ("norm".to_string(), layer(3e-3 * scale, 1.)),
            ]);
            run.observations.series.insert(quantity.into(), layers);
        }
        let text = report(vec![run])?;
        for line in [
            "| mean | BN | 4.00e-3 | 6.00e-3 | 4.00e-3 | 0.0400 | 0.0600 | 0.0400 |",
            "| mean | BN | 4.00e-1 | 6.00e-1 | 4.00e-1 | 9.00e0 | blocks.0.norm_2 | 0 |",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        Ok(())
    }

    #[test]
    fn outliers_are_told_beside_the_median() -> Result<()> {
        let mut run = outcome(BN, 1, Some(2.));
        // 100 steps of a warm-up that are left out, then 1 to 200 with a spike.
        let series =
            (0..300).map(|step| (step, (step as f64 - 99.).max(1e6 * f64::from(step < 100))));
        let mut series: Vec<(usize, f64)> = series.collect();
        series[299].1 = 1000.;
        let layers = BTreeMap::from([("blocks.0.norm_1".to_string(), series)]);
        let quantity = "distance of the mean".to_string();
        run.observations.series.insert(quantity, layers);
        let text = report(vec![run])?;
        let line = "| distance of the mean | BN | 1.01e2 | 1.96 | 9.90 | 6.77 |";
        assert!(text.contains(line), "{line} in {text}");
        Ok(())
    }

    /// Each α has the seeds that it ran, and is compared with the default on those alone.
    #[test]
    fn alphas_are_compared_over_the_seeds_that_both_ran() -> Result<()> {
        let base = PN.without_layer_scale();
        let other = Variant {
            alpha: [0.95, 0.9],
            ..base
        };
        let text = report(vec![
            outcome(base, 1, Some(2.)),
            outcome(base, 2, Some(2.5)),
            outcome(other, 2, Some(2.25)),
            outcome(other, 3, Some(9.)),
        ])?;
        for line in [
            "| none | 0.9 | 0.9 | 2.250 (2.000 to 2.500) |  | 1, 2 |",
            "| none | 0.95 | 0.9 | 5.625 (2.250 to 9.000) | -0.250 | 2, 3 |",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        Ok(())
    }

    #[test]
    fn layer_scales_are_compared_with_their_own_kind() -> Result<()> {
        let text = report(vec![
            outcome(LN, 1, Some(2.5)),
            outcome(LN.without_layer_scale(), 1, Some(2.625)),
            outcome(BN.with_groups(Some(1)), 1, Some(3.)),
            outcome(PN, 1, Some(2.)),
            outcome(PN.without_layer_scale(), 1, Some(2.25)),
        ])?;
        for line in [
            "| power | none | 2.250 | -0.375 |  |  |",
            "| power | 4 groups | 2.000 | -0.500 |  | -0.250 |",
            "| batch | 1 group | 3.000 |  |  |  |",
            "| layer | none | 2.625 |  | +0.375 |  |",
            "| layer | 4 groups | 2.500 |  | +0.500 | -0.125 |",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        Ok(())
    }

    #[test]
    fn gains_are_told_with_and_without_layer_scale() -> Result<()> {
        let with = |variant: Variant, gains: &[f64]| {
            let mut run = outcome(variant, 1, Some(2.));
            let layer = "blocks.0.norm_1";
            run.gains.insert(layer.into(), gains.to_vec());
            let within = gains.iter().filter(|gain| gain.abs() <= 1.).count();
            (run.observations.within).insert(layer.into(), [within, gains.len()]);
            run
        };
        let text = report(vec![
            with(PN, &[1., -1.25, 0.5]),
            with(PN.without_layer_scale(), &[18., -20., 17.]),
            with(PN_V.without_layer_scale(), &[16., -20., 17.]),
        ])?;
        for line in [
            "| layer | power | power-noscale | power-v-noscale |",
            "| blocks.0.norm_1 | 1.000 | 18.000 | 17.000 |",
            "| blocks.0.norm_1 | 1.250 | 20.000 | 20.000 |",
            "| blocks.0.norm_1 | 0.667 | 0.000 | 0.000 |",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        Ok(())
    }
}
