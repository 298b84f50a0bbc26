//! The results of runs, and the tables and plots made of them.

use crate::common::data::{Corpus, Unit};
use crate::common::norm::Norm;
use crate::common::plot::{self, draw, Chart, Line, Style};
use crate::common::train::{History, Run};
use crate::measure::{gains, singular_values, Observations, Series};
use crate::{Experiment, Variant, CONTEXT};
use anyhow::{ensure, Context, Result};
use candle_powernorm::Recipe;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// A finished run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub variant: String,
    pub seed: u64,
    pub steps: usize,
    /// A hash of the text.
    pub text: u64,
    /// `None` of a run that diverged, as everything that its end would tell.
    pub val_loss: Option<f32>,
    pub train_loss: Option<f32>,
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
    /// The loss that the last steps saw, by their batches' statistics where a normalization takes those.
    fn last_loss(&self) -> Option<f64> {
        let last = &self.train[self.train.len().saturating_sub(LAST_STEPS)..];
        let sum: f64 = last.iter().map(|&loss| f64::from(loss)).sum();
        self.val_loss.map(|_| sum / last.len() as f64)
    }

    pub fn of(
        variant: Variant,
        run: &Run,
        [train_loss, val_loss]: [f32; 2],
        observations: Observations,
    ) -> Result<Self> {
        Ok(Self {
            train_loss: Some(train_loss),
            val_loss: Some(val_loss),
            gains: gains(run)?,
            singular_values: singular_values(run)?,
            ..Self::diverged(variant, run, observations)
        })
    }

    pub fn diverged(variant: Variant, run: &Run, observations: Observations) -> Self {
        let settings = run.settings();
        Self {
            variant: variant.name(),
            seed: settings.seed,
            steps: settings.steps,
            text: run.corpus().fingerprint,
            val_loss: None,
            train_loss: None,
            train: run.history.train.clone(),
            val: run.history.val.clone(),
            observations,
            gains: BTreeMap::new(),
            singular_values: vec![],
            seconds: run.elapsed.as_secs_f64(),
        }
    }
}

/// Runs of one variant, by seed.
struct Runs(Vec<Outcome>);

impl Runs {
    /// The first to come to its end, or else the first.
    fn first(&self) -> Option<&Outcome> {
        let mut runs = self.0.iter();
        runs.clone()
            .find(|run| run.val_loss.is_some())
            .or(runs.next())
    }

    /// Mean and range of a number that every run has, or what became of the run.
    fn spread(&self, of: impl Fn(&Outcome) -> Option<f64>) -> String {
        let values: Vec<f64> = self.0.iter().filter_map(of).collect();
        let diverged = self.0.len() - values.len();
        let mut text = match values.len() {
            0 => String::new(),
            1 => format!("{:.3}", values[0]),
            _ => {
                let least = values.iter().copied().fold(f64::INFINITY, f64::min);
                let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                format!("{:.3} ({least:.3} to {most:.3})", mean(&values))
            }
        };
        if diverged > 0 {
            let gap = if text.is_empty() { "" } else { ", " };
            let _ = write!(text, "{gap}{diverged} of {} diverged", self.0.len());
        }
        text
    }

    fn mean(&self, of: impl Fn(&Outcome) -> Option<f64>) -> Option<f64> {
        let values: Vec<f64> = self.0.iter().filter_map(of).collect();
        (!values.is_empty()).then(|| mean(&values))
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn val_loss(outcome: &Outcome) -> Option<f64> {
    outcome.val_loss.map(f64::from)
}

/// All runs in the folder, by variant.
fn read_all(out: &Path, corpus: &Corpus, steps: usize) -> Result<BTreeMap<String, Runs>> {
    let mut all: BTreeMap<String, Runs> = BTreeMap::new();
    for entry in std::fs::read_dir(out)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let outcome: Outcome = serde_json::from_slice(&std::fs::read(&path)?)
            .with_context(|| format!("{} is no run of a study", path.display()))?;
        ensure!(
            outcome.text == corpus.fingerprint && outcome.steps == steps,
            "{} is of another text, or of {} steps and not {steps}: give this study another --out",
            path.display(),
            outcome.steps,
        );
        let runs = all.entry(outcome.variant.clone());
        runs.or_insert_with(|| Runs(vec![])).0.push(outcome);
    }
    for runs in all.values_mut() {
        runs.0.sort_unstable_by_key(|outcome| outcome.seed);
    }
    Ok(all)
}

/// Checks that all runs in the folder can be in one report.
pub fn check(out: &Path, corpus: &Corpus, steps: usize) -> Result<()> {
    read_all(out, corpus, steps).map(drop)
}

/// Writes `report.md` and its plots from all runs in the folder, and gives the text.
pub fn write(out: &Path, corpus: &Corpus, steps: usize) -> Result<String> {
    let all = read_all(out, corpus, steps)?;
    let report = Report { out, corpus, all };
    let text = report.text(steps)?;
    std::fs::write(out.join("report.md"), &text)?;
    Ok(text)
}

struct Report<'a> {
    out: &'a Path,
    corpus: &'a Corpus,
    all: BTreeMap<String, Runs>,
}

impl Report<'_> {
    fn runs(&self, variant: Variant) -> Option<&Runs> {
        self.all.get(&variant.name())
    }

    /// The normalizations that ran as the experiment on them has them.
    fn norms(&self) -> impl Iterator<Item = (Norm, &Runs)> {
        (Norm::value_variants().iter())
            .filter_map(|&norm| Some((norm, self.runs(Variant::of(norm))?)))
    }

    fn text(&self, steps: usize) -> Result<String> {
        let unit = self.corpus.unit;
        let mut text = format!(
            "# {} {unit}s to train on, {} to validate, {} kinds; {steps} steps\n",
            self.corpus.train.len(),
            self.corpus.val.len(),
            self.corpus.vocab.len(),
        );
        self.losses(&mut text)?;
        self.statistics(&mut text)?;
        self.rows(&mut text)?;
        self.recipes(&mut text)?;
        self.embeddings(&mut text)?;
        self.gains(&mut text)?;
        Ok(text)
    }

    fn losses(&self, text: &mut String) -> Result<()> {
        let words = self.corpus.unit == Unit::Word;
        let (head, line) = match words {
            true => (" perplexity |", "---|"),
            false => ("", ""),
        };
        writeln!(
            text,
            "\n## Losses\n\nNats a {}, mean (range) over seeds: of the finished model on both splits, which is by running statistics \
             where a normalization has them, and of the last {LAST_STEPS} batches in training, which is by theirs where it takes those.\n",
            self.corpus.unit
        )?;
        writeln!(
            text,
            "| normalization | seeds | validation |{head} training split | last steps |"
        )?;
        writeln!(text, "|---|---|---|{line}---|---|")?;
        let mut curves = vec![];
        for (norm, runs) in self.norms() {
            let perplexity = match words {
                true => format!(" {} |", runs.spread(|run| val_loss(run).map(f64::exp))),
                false => String::new(),
            };
            writeln!(
                text,
                "| {norm} | {} | {} |{perplexity} {} | {} |",
                runs.0.len(),
                runs.spread(val_loss),
                runs.spread(|run| run.train_loss.map(f64::from)),
                runs.spread(Outcome::last_loss),
            )?;
            if let Some(run) = runs.first() {
                // The evaluation at the end is of other batches than those along the way.
                let along = |&(step, _): &(u32, f32)| step < run.steps as u32;
                let history = History {
                    train: run.train.clone(),
                    val: run.val.iter().copied().filter(along).collect(),
                };
                curves.push((norm.to_string(), history));
            }
        }
        let runs: Vec<_> = (curves.iter())
            .map(|(label, history)| (label.clone(), history))
            .collect();
        let title = "Loss of the first seed: thick on the validation split, thin in training";
        let y = match words {
            true => "nats per word",
            false => "nats per character",
        };
        draw(
            &self.out.join("losses.svg"),
            &[plot::losses(title.into(), y, &runs)],
            1,
        )
    }

    /// Distances of batch from running statistics, and the norms of their gradients.
    fn statistics(&self, text: &mut String) -> Result<()> {
        let noscale = Variant {
            groups: None,
            ..Variant::of(Norm::PowerV)
        };
        let shown = [
            ("BN", Variant::of(Norm::Batch)),
            ("PN-V", Variant::of(Norm::PowerV)),
            ("PN-V without layer-scale", noscale),
        ];
        writeln!(
            text,
            "\n## Statistics\n\nOver the second half of training: the mean over steps, layers and seeds, and the largest value of any. \
             Distances are (1/C)‖batch − running‖; relative ones ‖batch − running‖ over the length of the running statistic, or of the \
             running deviation where it is the mean's. Gradients are lengths of (1/n) Σ ∂L/∂X̂ for the mean, and of \
             (1/n) Σ ∂L/∂X̂ ⊙ X̂ for the variance and the quadratic mean: what of them reaches the input.\n\n\
             | quantity | of | mean | largest |\n|---|---|---|---|"
        )?;
        for (what, y, file) in [
            ("distance", "(1/C)‖batch − running‖", "distances.svg"),
            (
                "relative distance",
                "relative to the running one",
                "relative_distances.svg",
            ),
            ("gradient", "norm", "gradients.svg"),
        ] {
            let mut charts = vec![];
            for (label, variant) in shown {
                let Some(runs) = self.runs(variant) else {
                    continue;
                };
                let Some(first) = runs.first() else { continue };
                for (quantity, layers) in &first.observations.series {
                    if !quantity.starts_with(what) {
                        continue;
                    }
                    let late = |run: &Outcome| {
                        let layers = run.observations.series.get(quantity);
                        let layers = layers.into_iter().flat_map(BTreeMap::values);
                        let values = layers.flatten().filter(|(step, _)| *step >= run.steps / 2);
                        values.map(|&(_, value)| value).collect::<Vec<_>>()
                    };
                    let values: Vec<f64> = runs.0.iter().flat_map(late).collect();
                    if values.is_empty() {
                        continue;
                    }
                    let largest = values.iter().copied().fold(0., f64::max);
                    writeln!(
                        text,
                        "| {quantity} | {label} | {:.2e} | {largest:.2e} |",
                        mean(&values)
                    )?;
                    charts.push(chart_of_layers(format!("{label}: {quantity}"), y, layers));
                }
            }
            if !charts.is_empty() {
                draw(&self.out.join(file), &charts, 2)?;
            }
        }
        Ok(())
    }

    fn rows(&self, text: &mut String) -> Result<()> {
        let mut by_rows: BTreeMap<usize, BTreeMap<String, &Runs>> = BTreeMap::new();
        let mut norms = vec![];
        for variant in Experiment::Rows.variants() {
            let Some(runs) = self.runs(variant) else {
                continue;
            };
            let norm = variant.norm.to_string();
            if !norms.contains(&norm) {
                norms.push(norm.clone());
            }
            by_rows
                .entry(variant.rows())
                .or_default()
                .insert(norm, runs);
        }
        if by_rows.len() < 2 {
            return Ok(());
        }
        writeln!(
            text,
            "\n## Rows that statistics are taken over\n\nThe rows of a step of the optimizer stay the same. {CONTEXT} rows are one sequence: \
             the statistic of a batch then tells each token of those after it, and a model that is trained by it can read them, until \
             it is evaluated. Running statistics forget by the forward, and of few rows have seen less."
        )?;
        type Number = fn(&Outcome) -> Option<f64>;
        let numbers: [(&str, Number); 2] = [
            (
                "Validation, by running statistics where a normalization has them",
                val_loss,
            ),
            (
                "The last batches in training, by theirs where it takes those",
                Outcome::last_loss,
            ),
        ];
        for (title, number) in numbers {
            writeln!(text, "\n{title}:\n\n| rows | {} |", norms.join(" | "))?;
            writeln!(text, "|---|{}", "---|".repeat(norms.len()))?;
            for (rows, of_norm) in &by_rows {
                let cell = |norm| {
                    let runs: Option<&&Runs> = of_norm.get(norm);
                    runs.map_or(String::new(), |runs| runs.spread(number))
                };
                let cells: Vec<String> = norms.iter().map(cell).collect();
                writeln!(text, "| {rows} | {} |", cells.join(" | "))?;
            }
        }
        let line = |(color, norm): (usize, &String)| {
            let point = |(&rows, of_norm): (&usize, &BTreeMap<String, &Runs>)| {
                Some((rows as f64, of_norm.get(norm)?.mean(val_loss)?))
            };
            Line {
                label: norm.clone(),
                points: by_rows.iter().filter_map(point).collect(),
                style: Style::Thick,
                color,
            }
        };
        let chart = Chart {
            title: "Validation loss by the rows that statistics are taken over".into(),
            x: "rows",
            y: "nats",
            // One loss of many times the others would press those into a flat line.
            ceiling: Some(self.ceiling()),
            lines: norms.iter().enumerate().map(line).collect(),
            ..Default::default()
        };
        draw(&self.out.join("rows.svg"), &[chart], 1)
    }

    /// The most that a plot of losses shows: the loss of knowing no more than how often each token comes.
    fn ceiling(&self) -> f64 {
        let mut counts = vec![0f64; self.corpus.vocab.len()];
        for &token in &self.corpus.train {
            counts[token as usize] += 1.;
        }
        let total = self.corpus.train.len() as f64;
        let entropy = |count: &f64| -count / total * (count / total).ln();
        counts
            .iter()
            .filter(|&&count| count > 0.)
            .map(entropy)
            .sum()
    }

    fn recipes(&self, text: &mut String) -> Result<()> {
        let mut lines = String::new();
        for variant in Experiment::Recipes.variants() {
            let Some(runs) = self.runs(variant) else {
                continue;
            };
            let recipe = match (variant.norm, variant.recipe) {
                (Norm::PowerV, _) => "PN-V",
                (_, Recipe::Paper) => "paper",
                (_, Recipe::Fairseq) => "released code",
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
                lines,
                "| {recipe} | {} | {guard} | {} | {} | {guarded} |",
                if variant.groups.is_some() {
                    "on"
                } else {
                    "off"
                },
                runs.spread(val_loss),
                runs.spread(|run| run.train_loss.map(f64::from)),
            )?;
        }
        if !lines.is_empty() {
            writeln!(
                text,
                "\n## Recipes\n\nThe last column counts the channels, over all steps and layers after the warm-up, with (1−α_b)Γ > 1: where the guard acts. Where there is none, on and off are one run.\n\n\
                 | recipe | layer-scale | guard | validation | training | outside Assumption 10 |\n|---|---|---|---|---|---|\n{}",
                lines.trim_end()
            )?;
        }
        Ok(())
    }

    fn embeddings(&self, text: &mut String) -> Result<()> {
        writeln!(
            text,
            "\n## Singular values of the embedding\n\nMean (range) over seeds.\n\n\
             | normalization | largest | median | smallest | largest / median |\n|---|---|---|---|---|"
        )?;
        let mut lines = vec![];
        for (color, (norm, runs)) in self.norms().enumerate() {
            let nth = |place: fn(usize) -> usize| {
                move |run: &Outcome| {
                    run.singular_values
                        .get(place(run.singular_values.len()))
                        .copied()
                }
            };
            let (largest, median) = (nth(|_| 0), nth(|count| count / 2));
            writeln!(
                text,
                "| {norm} | {} | {} | {} | {} |",
                runs.spread(largest),
                runs.spread(median),
                runs.spread(|run| run.singular_values.last().copied()),
                runs.spread(|run| Some(largest(run)? / median(run)?)),
            )?;
            if let Some(run) = runs.first() {
                let values = run.singular_values.iter().enumerate();
                lines.push(Line {
                    label: norm.to_string(),
                    points: values.map(|(i, &value)| (i as f64, value)).collect(),
                    style: Style::Thin,
                    color,
                });
            }
        }
        let chart = Chart {
            title: "Singular values of the embedding (first seed)".into(),
            x: "index",
            y: "singular value",
            lines,
            logarithmic: true,
            ..Default::default()
        };
        draw(&self.out.join("singular_values.svg"), &[chart], 1)
    }

    /// Histograms of |γ/ψ|, layer by layer.
    fn gains(&self, text: &mut String) -> Result<()> {
        writeln!(
            text,
            "\n## γ/ψ\n\nMagnitudes over all channels, mean (range) over seeds; γ/σ of BatchNorm.\n\n\
             | normalization | layer | median | largest |\n|---|---|---|---|"
        )?;
        let mut layers: BTreeMap<String, Vec<(String, usize, Vec<f64>)>> = BTreeMap::new();
        for (color, (norm, runs)) in self.norms().enumerate() {
            let Some(first) = runs.first() else { continue };
            for (layer, gains) in &first.gains {
                let sorted = |run: &Outcome| {
                    let mut gains: Vec<f64> = run
                        .gains
                        .get(layer)?
                        .iter()
                        .map(|gain| gain.abs())
                        .collect();
                    gains.sort_unstable_by(f64::total_cmp);
                    Some(gains)
                };
                writeln!(
                    text,
                    "| {norm} | {layer} | {} | {} |",
                    runs.spread(|run| sorted(run).map(|gains| gains[gains.len() / 2])),
                    runs.spread(|run| sorted(run)?.last().copied()),
                )?;
                let gains = gains.iter().map(|gain| gain.abs()).collect();
                let of_layer = layers.entry(layer.clone()).or_default();
                of_layer.push((norm.to_string(), color, gains));
            }
        }
        let charts: Vec<Chart> = (layers.into_iter())
            .map(|(layer, norms)| {
                let gains = norms.iter().flat_map(|(_, _, gains)| gains);
                let width = gains.copied().fold(f64::MIN_POSITIVE, f64::max) / BINS as f64;
                let line = |(label, color, gains): (String, usize, Vec<f64>)| Line {
                    label,
                    points: histogram(&gains, width),
                    style: Style::Thin,
                    color,
                };
                Chart {
                    title: layer,
                    x: "|γ/ψ|",
                    y: "channels",
                    lines: norms.into_iter().map(line).collect(),
                    ..Default::default()
                }
            })
            .collect();
        match charts.is_empty() {
            true => Ok(()),
            false => draw(&self.out.join("gains.svg"), &charts, 3),
        }
    }
}

fn chart_of_layers(title: String, y: &'static str, layers: &BTreeMap<String, Series>) -> Chart {
    let line = |(color, (layer, series)): (usize, (&String, &Series))| Line {
        label: layer.clone(),
        points: series
            .iter()
            .map(|&(step, value)| (step as f64, value))
            .collect(),
        style: Style::Thin,
        color,
    };
    Chart {
        title,
        x: "steps",
        y,
        lines: layers.iter().enumerate().map(line).collect(),
        logarithmic: true,
        ..Default::default()
    }
}

/// Bins of a histogram.
const BINS: usize = 40;

/// Counts in bins of this `width`, as steps of a line.
fn histogram(magnitudes: &[f64], width: f64) -> Vec<(f64, f64)> {
    let mut counts = [0.; BINS];
    for magnitude in magnitudes {
        counts[((magnitude / width) as usize).min(BINS - 1)] += 1.;
    }
    (counts.iter().enumerate())
        .flat_map(|(bin, &count)| [bin, bin + 1].map(|edge| (edge as f64 * width, count)))
        .collect()
}
