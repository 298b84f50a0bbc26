//! The results of runs, and the tables made of them.

use super::{Args, Experiment, Losses, Variant, description, variants};
use crate::common::data::{Corpus, Unit};
use crate::common::language::{Regularization, Run};
use crate::common::measure::{Observations, Outliers, singular_values};
use crate::common::norm::Norm;
use anyhow::{Context, Result, ensure};
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
    /// `None` of a run that diverged, like all that follows from its end.
    pub val_loss: Option<f32>,
    pub train_loss: Option<f32>,
    /// On the test split, if the study has one.
    #[serde(default)]
    pub test_loss: Option<f32>,
    /// The same of the model whose normalizations are folded away, if they fold.
    #[serde(default)]
    pub test_loss_folded: Option<f32>,
    pub train: Vec<f32>,
    pub val: Vec<(u32, f32)>,
    pub observations: Observations,
    /// Of the embedding.
    pub singular_values: Vec<f64>,
    pub seconds: f64,
}

/// Steps at the end of a run that its loss in training mode is the mean of.
const LAST_STEPS: usize = 50;

impl Outcome {
    /// The mean loss of the last steps, by their batches' statistics where a normalization has
    /// them.
    fn last_loss(&self) -> Option<f64> {
        let last = &self.train[self.train.len().saturating_sub(LAST_STEPS)..];
        let sum: f64 = last.iter().map(|&loss| f64::from(loss)).sum();
        self.val_loss.map(|_| sum / last.len() as f64)
    }

    pub fn of(variant: Variant, settings: Value, run: &Run, losses: Losses) -> Result<Self> {
        Ok(Self {
            val_loss: Some(losses.val),
            train_loss: Some(losses.train),
            test_loss: losses.test,
            test_loss_folded: losses.test_folded,
            singular_values: singular_values(&run.state.varmap)?,
            ..Self::unfinished(variant, settings, run)
        })
    }

    /// A run without losses at its end.
    pub fn unfinished(variant: Variant, settings: Value, run: &Run) -> Self {
        Self {
            variant: variant.name(),
            seed: run.settings().seed,
            settings,
            val_loss: None,
            train_loss: None,
            test_loss: None,
            test_loss_folded: None,
            train: run.state.history.train.clone(),
            val: run.state.history.val.clone(),
            observations: run.state.observations.clone().unwrap_or_default(),
            singular_values: vec![],
            seconds: run.state.elapsed.as_secs_f64(),
        }
    }
}

/// Runs of one variant, by seed.
type Runs = BTreeMap<u64, Outcome>;

/// By variant.
type Outcomes = BTreeMap<String, Runs>;

/// Mean and range of a number that every run has, or what became of the run.
fn over_seeds(runs: &Runs, of: impl Fn(&Outcome) -> Option<f64>) -> String {
    let values: Vec<_> = runs.values().map(of).collect();
    spread(&values, |value| format!("{value:.3}"))
}

/// The same of the differences in validation loss to `base`, over the seeds that both ran.
fn less(runs: &Runs, base: &Runs) -> String {
    let pairs = (runs.iter()).filter_map(|(seed, run)| Some((run, base.get(seed)?)));
    let difference = |(run, base)| Some(val_loss(run)? - val_loss(base)?);
    let differences: Vec<_> = pairs.map(difference).collect();
    spread(&differences, |value| format!("{value:+.3}"))
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
    let text = text(args, corpus, &all)?;
    std::fs::write(args.out.join("report.md"), &text)?;
    Ok(text)
}

/// The report of the runs of these variants.
fn text(args: &Args, corpus: &Corpus, all: &Outcomes) -> Result<String> {
    let Regularization { dropout, smoothing } = args.regularization;
    let mut text = format!(
        "# {} {}s to train on, {} to validate, {} kinds; {} steps",
        corpus.train.len(),
        corpus.unit,
        corpus.val.len(),
        corpus.vocab.len(),
        args.steps,
    );
    for (name, share) in [("dropout", dropout), ("label smoothing", smoothing)] {
        if share > 0. {
            write!(text, ", {name} {share}")?;
        }
    }
    let ran: Vec<_> = (variants(Experiment::value_variants()).into_iter())
        .filter_map(|variant| Some((variant, all.get(&variant.name())?)))
        .collect();
    text += "\n\nMean (range) over seeds.\n";
    losses(&mut text, corpus.unit, &ran)?;
    statistics(&mut text, &ran)?;
    embeddings(&mut text, &ran)?;
    shares(&mut text, &ran)?;
    Ok(text)
}

/// Writes a table's head, and the line under it.
fn head(text: &mut String, cells: &[&str]) -> Result<()> {
    writeln!(
        text,
        "\n| {} |\n|{}",
        cells.join(" | "),
        "---|".repeat(cells.len())
    )?;
    Ok(())
}

fn losses(text: &mut String, unit: Unit, ran: &[(Variant, &Runs)]) -> Result<()> {
    writeln!(
        text,
        "\n## Losses\n\n\
         Nats a {unit}. The losses of splits are of the finished model, with running statistics \
         where a normalization has them. The last steps are the last {LAST_STEPS} batches in \
         training, with dropout and smoothed labels if the run has them. \"Less LN's\" is the \
         validation loss minus LN's from the same seed, behind the same layer-scale."
    )?;
    head(
        text,
        &[
            "run",
            "seeds",
            "validation",
            "less LN's",
            "perplexity",
            "test",
            "training split",
            "last steps",
        ],
    )?;
    for (variant, runs) in ran {
        let layer = Variant {
            norm: Norm::Layer,
            ..*variant
        };
        let layer = ran
            .iter()
            .find(|(other, _)| *other == layer && other != variant);
        let seeds: Vec<String> = runs.keys().map(u64::to_string).collect();
        let number = |loss: Option<f32>| loss.map(f64::from);
        let cells = [
            variant.name(),
            seeds.join(", "),
            over_seeds(runs, val_loss),
            layer.map_or(String::new(), |(_, layer)| less(runs, layer)),
            over_seeds(runs, |run| val_loss(run).map(f64::exp)),
            match runs.values().any(|run| run.test_loss.is_some()) {
                true => over_seeds(runs, |run| number(run.test_loss)),
                false => String::new(),
            },
            over_seeds(runs, |run| number(run.train_loss)),
            over_seeds(runs, Outcome::last_loss),
        ];
        writeln!(text, "| {} |", cells.join(" | "))?;
    }
    Ok(())
}

/// The spread of the distances of batch from running statistics, and of their gradients.
fn statistics(text: &mut String, ran: &[(Variant, &Runs)]) -> Result<()> {
    if ran.iter().all(|(_, runs)| quantities(runs).is_empty()) {
        return Ok(());
    }
    writeln!(
        text,
        "\n## Statistics\n\n\
         Of the first normalization, where the paper looks, over all seeds and recorded steps after \
         the warm-up. Distances are (1/d)‖batch − running‖ of d channels. Relative distances are \
         ‖batch − running‖ over the length of the running statistic. For the mean it is the length \
         of the running deviation. Gradients are (1/d)‖g/σ_B‖. For the mean, g is (1/n) Σ ∂L/∂X̂. \
         For the variance and the quadratic mean it is (1/n) Σ ∂L/∂X̂ ⊙ X̂, and the latter has ψ_B \
         for σ_B. The last column is the median of the last quarter of these steps over the median \
         of the first quarter."
    )?;
    head(
        text,
        &[
            "quantity",
            "of",
            "median",
            "99th percentile, over it",
            "largest, over it",
            "last quarter over first",
        ],
    )?;
    for (variant, runs) in ran {
        for quantity in quantities(runs) {
            if let Some(outliers) = outliers(runs, quantity) {
                writeln!(text, "| {quantity} | {} | {outliers} |", variant.name())?;
            }
        }
    }
    Ok(())
}

/// The quantities that were observed.
fn quantities(runs: &Runs) -> BTreeSet<&String> {
    let series = runs.values().map(|run| &run.observations.series);
    series.flat_map(BTreeMap::keys).collect()
}

fn embeddings(text: &mut String, ran: &[(Variant, &Runs)]) -> Result<()> {
    writeln!(text, "\n## Singular values of the embedding")?;
    head(
        text,
        &["run", "largest", "median", "smallest", "largest / median"],
    )?;
    for (variant, runs) in ran {
        let largest = |run: &Outcome| run.singular_values.first().copied();
        let median = |run: &Outcome| {
            let values = &run.singular_values;
            values.get(values.len() / 2).copied()
        };
        writeln!(
            text,
            "| {} | {} | {} | {} | {} |",
            variant.name(),
            over_seeds(runs, largest),
            over_seeds(runs, median),
            over_seeds(runs, |run| run.singular_values.last().copied()),
            over_seeds(runs, |run| Some(largest(run)? / median(run)?)),
        )?;
    }
    Ok(())
}

/// The channels in which |γ/ψ_B| is at most 1, layer by layer.
fn shares(text: &mut String, ran: &[(Variant, &Runs)]) -> Result<()> {
    let within = |run: &Outcome, layer: &str| {
        let [within, all] = run.observations.within.get(layer)?;
        Some(*within as f64 / *all as f64)
    };
    let layers: BTreeSet<&String> = (ran.iter())
        .flat_map(|(_, runs)| runs.values().flat_map(|run| run.observations.within.keys()))
        .collect();
    if layers.is_empty() {
        return Ok(());
    }
    writeln!(
        text,
        "\n## |γ| ≤ ψ_B\n\n\
         The share of channels with |γ| at most the batch's ψ_B (σ_B with BatchNorm), over the \
         recorded steps after the warm-up. In Figure 7 it is all channels of PN-V."
    )?;
    let names = ran.iter().map(|(variant, _)| variant.name());
    let heads: Vec<String> = ["layer".to_string()].into_iter().chain(names).collect();
    head(text, &heads.iter().map(String::as_str).collect::<Vec<_>>())?;
    for layer in layers {
        let share = |runs: &Runs| over_seeds(runs, |run| within(run, layer));
        let cells: Vec<String> = (ran.iter())
            .map(
                |(_, runs)| match runs.values().any(|run| within(run, layer).is_some()) {
                    true => share(runs),
                    false => String::new(),
                },
            )
            .collect();
        writeln!(text, "| {layer} | {} |", cells.join(" | "))?;
    }
    Ok(())
}

/// The spread of a quantity of the first layer after the warm-up, as cells of a table.
fn outliers(runs: &Runs, quantity: &str) -> Option<String> {
    let late = |run: &Outcome| -> Option<Vec<f64>> {
        let (_, series) = run.observations.series.get(quantity)?.first_key_value()?;
        let warmup = run.settings["PowerNorm warm-up"].as_u64().unwrap_or(0) as usize;
        let late = series.iter().filter(|(step, _)| *step >= warmup);
        Some(late.map(|&(_, value)| value).collect())
    };
    let by_run: Vec<Vec<f64>> = runs.values().filter_map(late).collect();
    let outliers = Outliers::of(&by_run)?;
    Some(format!(
        "{:.2e} | {:.2} | {:.2} | {:.2}",
        outliers.median,
        outliers.percentile_99_over_median,
        outliers.largest_over_median,
        outliers.last_quarter_over_first,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::model::CONTEXT;
    use clap::Parser;

    const fn of(norm: Norm, groups: Option<usize>) -> Variant {
        Variant { norm, groups }
    }

    const PN: Variant = of(Norm::Power, Some(1));
    const BN: Variant = of(Norm::Batch, Some(1));

    fn outcome(variant: Variant, seed: u64, val_loss: Option<f32>) -> Outcome {
        Outcome {
            variant: variant.name(),
            seed,
            settings: serde_json::json!({ "PowerNorm warm-up": 100 }),
            val_loss,
            train_loss: val_loss,
            test_loss: None,
            test_loss_folded: None,
            train: vec![2.; 4],
            val: vec![(2, 2.)],
            observations: Observations::default(),
            singular_values: vec![],
            seconds: 1.,
        }
    }

    #[track_caller]
    fn assert_lines(outcomes: Vec<Outcome>, lines: &[&str]) {
        let args = Args::parse_from(["study", "--text", "a text", "--steps", "4"]);
        let mut all = Outcomes::new();
        for outcome in outcomes {
            let runs = all.entry(outcome.variant.clone()).or_default();
            runs.insert(outcome.seed, outcome);
        }
        let text = text(&args, &Corpus::sample(CONTEXT), &all).unwrap();
        for line in lines {
            assert!(text.contains(line), "{line} in {text}");
        }
    }

    /// Over the seeds that both ran, and behind the same layer-scale.
    #[test]
    fn losses_are_compared_with_layer_norm() {
        let layer = of(Norm::Layer, Some(1));
        assert_lines(
            vec![
                outcome(layer, 1, Some(2.5)),
                outcome(layer, 3, Some(2.)),
                Outcome {
                    test_loss: Some(2.125),
                    ..outcome(PN, 1, Some(2.))
                },
                outcome(PN, 2, Some(4.)),
                outcome(BN, 1, None),
                outcome(of(Norm::Power, None), 1, Some(2.25)),
            ],
            &[
                "| layer-scale1 | 1, 3 | 2.250 (2.000 to 2.500) |  | ",
                "| power-scale1 | 1, 2 | 3.000 (2.000 to 4.000) | -0.500 | ",
                "| 2.125, 1 of 2 diverged |",
                "| batch-scale1 | 1 | 1 of 1 diverged | 1 of 1 diverged | ",
                "| power-noscale | 1 | 2.250 |  | 9.488 |  | 2.250 | 2.000 |",
            ],
        );
    }

    #[test]
    fn outliers_are_told_beside_the_median() {
        let mut run = outcome(BN, 1, Some(2.));
        // 100 steps of a warm-up that are left out, then 1 to 200 with a spike.
        let series =
            (0..300).map(|step| (step, (step as f64 - 99.).max(1e6 * f64::from(step < 100))));
        let mut series: Vec<(usize, f64)> = series.collect();
        series[299].1 = 1000.;
        let layers = BTreeMap::from([("blocks.0.norm_1".to_string(), series)]);
        let quantity = "distance of the mean".to_string();
        run.observations.series.insert(quantity, layers);
        let line = "| distance of the mean | batch-scale1 | 1.01e2 | 1.96 | 9.90 | 6.77 |";
        assert_lines(vec![run], &[line]);
    }

    #[test]
    fn shares_of_channels_are_told_by_layer() {
        let with = |variant: Variant, within: usize| {
            let mut run = outcome(variant, 1, Some(2.));
            (run.observations.within).insert("blocks.0.norm_1".into(), [within, 3]);
            run
        };
        assert_lines(
            vec![
                with(PN, 2),
                with(of(Norm::PowerV, None), 0),
                outcome(of(Norm::Layer, Some(1)), 1, Some(2.)),
            ],
            &[
                "| layer | power-v-noscale | power-scale1 | layer-scale1 |",
                "| blocks.0.norm_1 | 0.000 | 0.667 |  |",
            ],
        );
    }
}
