//! The paper's observations inside a training run. Nothing is added to the model: a layer's running
//! statistics before and after a step tell what its batch's were, and the gradients of its γ and β
//! tell those of its statistics.

use super::EPS;
use super::checkpoint::variables;
use super::norm::{ALPHA, Norm, NormConfig};
use super::optim::AdamW;
use anyhow::{Context, Result};
use candle::Tensor;
use candle_nn::VarMap;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Numbers over a run, each with the steps made before it.
pub type Series = Vec<(usize, f64)>;

/// The observations of a run so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Observations {
    /// The only layer whose `series` are kept, or `None` for all layers.
    only: Option<String>,
    /// By quantity, then by layer. A layer has d channels. Its batch's statistic is s_B, and its
    /// running value s. These are the quantities.
    ///
    /// - "distance": `(1/d)‖s_B − s‖`.
    /// - "relative distance": `‖s_B − s‖/‖s‖`, and of a mean `‖μ_B − μ‖/‖σ‖`.
    /// - "gradient": `(1/d)‖g/σ_B‖`. For μ, g is the mean over tokens of `∂L/∂x̂`. For σ² it
    ///   is the mean of `x̂ ∂L/∂x̂`, and for ψ² too, with ψ_B in place of σ_B. PN has no gradient
    ///   of ψ²: its backward takes ν instead.
    pub series: BTreeMap<String, BTreeMap<String, Series>>,
    /// Over the recorded steps after the warm-up, by layer: the channels with |γ| ≤ ψ_B (σ_B with
    /// BatchNorm), and all channels.
    pub within: BTreeMap<String, [usize; 2]>,
    /// Channels of all layers and steps after PowerNorm's warm-up, and those among them for which
    /// the guard of ν's update made a difference.
    pub channels: usize,
    pub guarded: usize,
}

/// The state of a model's normalization layers at one moment, by variable.
pub struct Snapshot(BTreeMap<String, Vec<f64>>);

impl Snapshot {
    pub fn of(varmap: &VarMap) -> Result<Self> {
        let mut state = BTreeMap::new();
        for (name, var) in variables(varmap) {
            let of_norm = name
                .rsplit('.')
                .nth(1)
                .is_some_and(|part| part.starts_with("norm"));
            if of_norm && !name.ends_with("iters") && var.dtype().is_float() {
                state.insert(name, numbers(var.as_tensor())?);
            }
        }
        Ok(Self(state))
    }

    fn get(&self, layer: &str, name: &str) -> Result<&[f64]> {
        let name = format!("{layer}.{name}");
        let values = self.0.get(&name).map(Vec::as_slice);
        values.with_context(|| format!("no {name} in the model"))
    }

    /// The layers that keep a statistic called `name`.
    fn layers(&self, name: &str) -> Vec<String> {
        let layer = |key: &String| Some(key.strip_suffix(name)?.strip_suffix('.')?.to_string());
        self.0.keys().filter_map(layer).collect()
    }
}

pub fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    let values = tensor.to_dtype(candle::DType::F64)?.flatten_all()?;
    Ok(values.to_vec1()?)
}

impl Observations {
    /// The normalizations that have statistics to observe.
    pub fn are_of(norm: Norm) -> bool {
        matches!(norm, Norm::Batch | Norm::Power | Norm::PowerV)
    }

    /// Keeps the series of one layer.
    pub fn of_layer(layer: &str) -> Self {
        Self {
            only: Some(layer.into()),
            ..Self::default()
        }
    }

    /// Observes one step, between its gradients and the optimizer's update. The step has `rows`
    /// real tokens, and its forward took the statistics from `before` to `after`. `recorded` says
    /// whether the step is one of `series` and `within`.
    pub fn observe(
        &mut self,
        optimizer: &AdamW,
        norm: &NormConfig,
        rows: usize,
        [before, after]: [&Snapshot; 2],
        gradients: &[Tensor],
        recorded: bool,
    ) -> Result<()> {
        let step = optimizer.steps;
        let gradient = |layer: &str, name: &str| {
            numbers(optimizer.gradient(gradients, &format!("{layer}.{name}"))?)
        };
        match norm.norm {
            Norm::Batch if recorded => {
                for layer in before.layers("running_mean") {
                    let batch = |name| -> Result<Vec<f64>> {
                        let (old, new) = (before.get(&layer, name)?, after.get(&layer, name)?);
                        let batch = |(new, old)| old + (new - old) / norm.momentum;
                        Ok(new.iter().zip(old).map(batch).collect())
                    };
                    // candle keeps the unbiased variance, and normalizes by the other.
                    let bias = (rows - 1) as f64 / rows as f64;
                    let variances = batch("running_var")?.into_iter();
                    let own: Vec<f64> = variances.map(|square| (bias * square).max(0.)).collect();
                    let variance = before.get(&layer, "running_var")?;
                    let deviation: Vec<f64> = variance.iter().map(|square| square.sqrt()).collect();
                    let gamma = before.get(&layer, "weight")?;
                    self.within(&layer, step, norm, gamma, &own);
                    for (statistic, name, scale, param) in [
                        ("mean", "running_mean", &*deviation, "bias"),
                        ("variance", "running_var", variance, "weight"),
                    ] {
                        let running = before.get(&layer, name)?;
                        self.distances(statistic, &layer, step, [&batch(name)?, running, scale]);
                        let gradient = gradient(&layer, param)?;
                        let gradient = products(gamma, &gradient, rows);
                        self.gradient(statistic, &layer, step, gradient, &own);
                    }
                }
            }
            Norm::PowerV | Norm::Power => {
                for layer in before.layers("running_phi") {
                    let running = before.get(&layer, "running_phi")?;
                    let batch = batch_phi(running, after.get(&layer, "running_phi")?, step, norm);
                    if norm.norm == Norm::Power && step >= norm.warmup_steps {
                        self.channels += running.len();
                        self.guarded += outside(&batch, running);
                    }
                    if recorded {
                        let statistic = "quadratic mean";
                        self.distances(statistic, &layer, step, [&batch, running, running]);
                        let gamma = before.get(&layer, "weight")?;
                        self.within(&layer, step, norm, gamma, &batch);
                        // The backward takes ψ_B² as a variable here, and elsewhere takes ν.
                        if norm.norm == Norm::PowerV {
                            let gradient = gradient(&layer, "weight")?;
                            let lambda = products(gamma, &gradient, rows);
                            self.gradient(statistic, &layer, step, lambda, &batch);
                        }
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The distance of the `batch` from the `running` statistic, as it is and relative to `scale`.
    fn distances(
        &mut self,
        statistic: &str,
        layer: &str,
        step: usize,
        [batch, running, scale]: [&[f64]; 3],
    ) {
        let distance = length(batch.iter().zip(running).map(|(a, b)| a - b));
        let mean = distance / running.len() as f64;
        self.push("distance", statistic, layer, step, mean);
        let relative = distance / length(scale.iter().copied());
        self.push("relative distance", statistic, layer, step, relative);
    }

    /// `(1/d)‖gradient / σ_B‖` with the batch's `variance` σ_B².
    fn gradient(
        &mut self,
        statistic: &str,
        layer: &str,
        step: usize,
        gradient: impl Iterator<Item = f64>,
        variance: &[f64],
    ) {
        let scaled = gradient
            .zip(variance)
            .map(|(g, square)| g / (square + EPS).sqrt());
        let mean = length(scaled) / variance.len() as f64;
        self.push("gradient", statistic, layer, step, mean);
    }

    /// Counts the channels whose |γ| is at most the root of the batch's `square`.
    fn within(
        &mut self,
        layer: &str,
        step: usize,
        norm: &NormConfig,
        gamma: &[f64],
        square: &[f64],
    ) {
        if step >= norm.warmup_steps {
            let [within, all] = self.within.entry(layer.into()).or_default();
            let channels = gamma.iter().zip(square);
            *within += channels
                .filter(|(gamma, square)| gamma.powi(2) <= **square)
                .count();
            *all += gamma.len();
        }
    }

    fn push(&mut self, what: &str, statistic: &str, layer: &str, step: usize, value: f64) {
        let kept = self.only.as_ref().is_none_or(|only| only == layer);
        if !kept || !value.is_finite() {
            return;
        }
        let quantity = format!("{what} of the {statistic}");
        let layers = self.series.entry(quantity).or_default();
        layers.entry(layer.into()).or_default().push((step, value));
    }
}

/// The spread of a quantity over steps.
#[derive(Debug, Serialize)]
pub struct Outliers {
    pub median: f64,
    pub percentile_99_over_median: f64,
    pub largest_over_median: f64,
    /// Of the medians of each run's last quarter and first quarter.
    pub last_quarter_over_first: f64,
}

impl Outliers {
    /// Of the values of all `runs` together, each in the order of its steps.
    pub fn of(runs: &[Vec<f64>]) -> Option<Self> {
        let sorted = |part: fn(&[f64]) -> &[f64]| {
            let mut values: Vec<f64> = runs.iter().flat_map(|run| part(run)).copied().collect();
            values.sort_unstable_by(f64::total_cmp);
            values
        };
        let nth = |values: &[f64], share: f64| {
            let last = values.len().checked_sub(1)?;
            Some(values[(last as f64 * share).round() as usize])
        };
        let all = sorted(|run| run);
        let first = sorted(|run| &run[..run.len().div_ceil(4)]);
        let last = sorted(|run| &run[run.len() - run.len().div_ceil(4)..]);
        let median = nth(&all, 0.5)?;
        Some(Self {
            median,
            percentile_99_over_median: nth(&all, 0.99)? / median,
            largest_over_median: nth(&all, 1.)? / median,
            last_quarter_over_first: nth(&last, 0.5)? / nth(&first, 0.5)?,
        })
    }
}

/// ψ_B² of the step that took ψ² from `old` to `new`, after `steps` others.
fn batch_phi(old: &[f64], new: &[f64], steps: usize, norm: &NormConfig) -> Vec<f64> {
    let share = match steps < norm.warmup_steps {
        true => 1. / (steps + 1) as f64,
        false => 1. - ALPHA,
    };
    (new.iter().zip(old))
        .map(|(new, old)| (old + (new - old) / share).max(0.))
        .collect()
}

/// The mean over tokens of `x̂ ∂L/∂x̂` (Λ) from γ's gradient, γ ∂L/∂γ / rows; of `∂L/∂x̂` from β's.
fn products<'a>(
    gamma: &'a [f64],
    gradient: &'a [f64],
    rows: usize,
) -> impl Iterator<Item = f64> + 'a {
    (gamma.iter().zip(gradient)).map(move |(gamma, gradient)| gamma * gradient / rows as f64)
}

fn length(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

/// Counts the channels for which Assumption 10 does not hold: (1−α_b) Γ > 1.
fn outside(batch: &[f64], running: &[f64]) -> usize {
    (batch.iter().zip(running))
        .filter(|(batch, running)| (1. - ALPHA) * (*batch / (*running + EPS)) > 1.)
        .count()
}

/// The singular values of the embedding, the largest first: the roots of the eigenvalues of EᵀE.
pub fn singular_values(varmap: &VarMap) -> Result<Vec<f64>> {
    let embedding = &variables(varmap)["tokens.weight"];
    let (rows, cols) = embedding.dims2()?;
    let matrix = nalgebra::DMatrix::from_row_slice(rows, cols, &numbers(embedding)?);
    let gram = match rows > cols {
        true => matrix.tr_mul(&matrix),
        false => &matrix * matrix.transpose(),
    };
    let mut values: Vec<f64> = (gram.symmetric_eigenvalues().iter())
        .map(|value| value.max(0.).sqrt())
        .collect();
    values.sort_unstable_by(|a, b| b.total_cmp(a));
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::data::{Batch, Corpus};
    use crate::common::language::{Run, Settings};
    use crate::common::model::Size;
    use crate::common::random::{Use, generator};
    use crate::common::train::Train;
    use candle::{Device, Module};
    use candle_powernorm::GroupScaling;

    const CONTEXT: usize = 8;
    const BATCH: usize = 3;
    const ROWS: usize = BATCH * CONTEXT;
    const LAYER: &str = "blocks.0.norm_1";

    fn corpus() -> Corpus {
        Corpus::sample(CONTEXT)
    }

    fn settings(norm: Norm, corpus: &Corpus) -> Settings {
        let settings = Settings::small(norm, corpus);
        Settings {
            norm: NormConfig {
                momentum: 0.05,
                ..settings.norm
            },
            size: Size {
                layers: 1,
                ..settings.size
            },
            ..settings
        }
    }

    /// The input of the first normalization in the coming step.
    fn input(run: &Run) -> Result<Tensor> {
        let mut rng = generator(1, Use::Batch, run.state.steps());
        let batch = Batch::random(&run.corpus.train, BATCH, CONTEXT, &mut rng, &Device::Cpu)?;
        let vars = variables(&run.state.varmap);
        let table = vars["tokens.weight"].as_tensor().clone();
        let tokens = candle_nn::Embedding::new(table, 8).forward(&batch.inputs)?;
        let stream = tokens.broadcast_add(&vars["positions.weight"])?;
        Ok(stream.flatten_to(1)?.detach())
    }

    /// The same behind the layer-scale that all have.
    fn scaled(run: &Run) -> Result<Tensor> {
        Ok(GroupScaling::new(2, EPS)?.forward(&input(run)?)?)
    }

    fn direct_phi(run: &Run) -> Result<Vec<f64>> {
        numbers(&scaled(run)?.sqr()?.mean(0)?)
    }

    /// Statistics pass through f32, and differences of them through a division by 0.1 or less.
    fn assert_close(ours: &[f64], theirs: &[f64]) {
        assert_eq!(ours.len(), theirs.len());
        let size = theirs
            .iter()
            .fold(0f64, |size, value| size.max(value.abs()));
        assert!(size > 0.);
        for (i, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
            let error = (ours - theirs).abs();
            assert!(error <= 1e-4 * size, "{i}: {ours}, {theirs}");
        }
    }

    /// Gives γ of the first normalization values that are no ones.
    fn spread_weight(run: &Run) -> Result<Vec<f64>> {
        let gamma: Vec<f32> = (0..8).map(|i| 0.5 + 0.2 * i as f32).collect();
        let var = &variables(&run.state.varmap)[&format!("{LAYER}.weight")];
        var.set(&Tensor::new(&*gamma, &Device::Cpu)?)?;
        Ok(gamma.into_iter().map(f64::from).collect())
    }

    fn gradient_of(run: &Run, gradients: &[Tensor], name: &str) -> Result<Vec<f64>> {
        numbers((run.state.optimizer).gradient(gradients, &format!("{LAYER}.{name}"))?)
    }

    /// The observations of one recorded step.
    fn observed(
        run: &Run,
        norm: &NormConfig,
        states: [&Snapshot; 2],
        gradients: &[Tensor],
    ) -> Result<Observations> {
        let mut seen = Observations::default();
        seen.observe(&run.state.optimizer, norm, ROWS, states, gradients, true)?;
        Ok(seen)
    }

    #[test]
    fn statistics_of_a_batch_follow_from_two_states() -> Result<()> {
        let corpus = corpus();
        for norm in [Norm::Power, Norm::PowerV] {
            let settings = settings(norm, &corpus);
            let mut run = Run::new(settings, &corpus, &Device::Cpu)?;
            for _ in 0..6 {
                let direct = direct_phi(&run)?;
                let before = Snapshot::of(&run.state.varmap)?;
                let (loss, gradients) = run.gradients()?;
                let after = Snapshot::of(&run.state.varmap)?;
                let phi = |state: &Snapshot| state.get(LAYER, "running_phi").map(<[f64]>::to_vec);
                let ours = batch_phi(
                    &phi(&before)?,
                    &phi(&after)?,
                    run.state.steps(),
                    &settings.norm,
                );
                assert_close(&ours, &direct);

                let seen = observed(&run, &settings.norm, [&before, &after], &gradients)?;
                let running = phi(&before)?;
                let off = length(direct.iter().zip(&running).map(|(a, b)| a - b));
                let value = |quantity: &str| seen.series[quantity][LAYER][0].1;
                assert_close(&[value("distance of the quadratic mean")], &[off / 8.]);
                let relative = off / length(running.into_iter());
                assert_close(
                    &[value("relative distance of the quadratic mean")],
                    &[relative],
                );
                let series = seen.series.get("gradient of the quadratic mean");
                assert_eq!(
                    series.map(BTreeMap::len),
                    (norm == Norm::PowerV).then_some(3)
                );
                run.update(loss, &gradients)?;
            }
        }
        Ok(())
    }

    #[test]
    fn distances_of_batch_norm_are_those_of_its_input() -> Result<()> {
        let corpus = corpus();
        let settings = settings(Norm::Batch, &corpus);
        let run = Run::new(settings, &corpus, &Device::Cpu)?;
        let input = scaled(&run)?;
        let mean = numbers(&input.mean(0)?)?;
        let variance = numbers(&input.var(0)?)?;
        let before = Snapshot::of(&run.state.varmap)?;
        let (_, gradients) = run.gradients()?;
        let after = Snapshot::of(&run.state.varmap)?;
        let seen = observed(&run, &settings.norm, [&before, &after], &gradients)?;
        let value = |quantity: &str| seen.series[quantity][LAYER][0].1;
        let of_mean = length(mean.into_iter());
        let of_variance = length(variance.into_iter().map(|variance| variance - 1.));
        let root = 8f64.sqrt();
        assert_close(
            &[
                value("distance of the mean"),
                value("relative distance of the mean"),
                value("distance of the variance"),
                value("relative distance of the variance"),
            ],
            &[
                of_mean / 8.,
                of_mean / root,
                of_variance / 8.,
                of_variance / root,
            ],
        );
        assert_eq!(seen.series.len(), 6);
        Ok(())
    }

    /// γ ∂L/∂γ is Σ ∂L/∂X̂ ⊙ X̂, and γ ∂L/∂β is Σ ∂L/∂X̂.
    #[test]
    fn gradients_of_gamma_and_beta_are_those_of_the_normalized() -> Result<()> {
        let random = |shape: &[usize], shift: f32| {
            let count: usize = shape.iter().product();
            let values: Vec<f32> = (0..count).map(|i| (i as f32 * 0.7 + shift).sin()).collect();
            candle::Var::from_vec(values, shape, &Device::Cpu)
        };
        let (normalized, dy) = (random(&[ROWS, 8], 0.)?, random(&[ROWS, 8], 2.)?);
        let (gamma, beta) = (random(&[8], 4.)?, random(&[8], 5.)?);
        let y = normalized.broadcast_mul(&gamma)?.broadcast_add(&beta)?;
        let grads = (y * dy.as_tensor())?.sum_all()?.backward()?;
        let of = |var: &candle::Var| grads.get(var).context("no gradient");
        let direct = of(&normalized)?;
        for (var, expected) in [
            (&gamma, (direct * normalized.as_tensor())?),
            (&beta, direct.clone()),
        ] {
            let (gamma, gradient) = (numbers(&gamma)?, numbers(of(var)?)?);
            let ours: Vec<f64> = products(&gamma, &gradient, ROWS).collect();
            assert_close(&ours, &numbers(&expected.mean(0)?)?);
        }
        Ok(())
    }

    #[test]
    fn gradients_of_statistics_are_observed() -> Result<()> {
        let corpus = corpus();
        for (norm, quantities) in [
            (Norm::Batch, &[("mean", "bias"), ("variance", "weight")][..]),
            (Norm::PowerV, &[("quadratic mean", "weight")]),
        ] {
            let settings = settings(norm, &corpus);
            let run = Run::new(settings, &corpus, &Device::Cpu)?;
            let gamma = spread_weight(&run)?;
            let input = scaled(&run)?;
            let centred = match norm {
                Norm::Batch => input.broadcast_sub(&input.mean_keepdim(0)?)?,
                _ => input,
            };
            let square = numbers(&centred.sqr()?.mean(0)?)?;
            let before = Snapshot::of(&run.state.varmap)?;
            let (_, gradients) = run.gradients()?;
            let states = [&before, &Snapshot::of(&run.state.varmap)?];
            let seen = observed(&run, &settings.norm, states, &gradients)?;
            for (statistic, param) in quantities {
                let gradient = gradient_of(&run, &gradients, param)?;
                let share =
                    |i: usize| gamma[i] * gradient[i] / ROWS as f64 / (square[i] + EPS).sqrt();
                let expected = length((0..8).map(share)) / 8.;
                let value = seen.series[&format!("gradient of the {statistic}")][LAYER][0].1;
                assert_close(&[value], &[expected]);
            }
            // The warm-up counts nothing.
            assert!(seen.within.is_empty());
            let after_warmup = NormConfig {
                warmup_steps: 0,
                ..settings.norm
            };
            let mut seen = Observations::of_layer("another");
            let optimizer = &run.state.optimizer;
            seen.observe(optimizer, &after_warmup, ROWS, states, &gradients, true)?;
            assert!(seen.series.is_empty());
            if norm == Norm::Batch {
                let within = (0..8).filter(|&i| gamma[i] <= square[i].sqrt()).count();
                assert!((1..8).contains(&within), "{within}");
                assert_eq!(seen.within[LAYER], [within, 8]);
            }
        }
        Ok(())
    }

    /// ψ² is made so small in one channel that the guard of ν acts there.
    #[test]
    fn channels_outside_assumption_10_are_counted() -> Result<()> {
        let corpus = corpus();
        let settings = settings(Norm::Power, &corpus);
        let mut run = Run::new(settings, &corpus, &Device::Cpu)?;
        while run.state.steps() < 4 {
            run.step()?;
        }
        let phi = &variables(&run.state.varmap)[&format!("{LAYER}.running_phi")];
        phi.set(&Tensor::new(
            &[1f32, 1., 1e-3, 1., 1., 1., 1., 1.],
            &Device::Cpu,
        )?)?;
        let before = Snapshot::of(&run.state.varmap)?;
        let (_, gradients) = run.gradients()?;
        let states = [&before, &Snapshot::of(&run.state.varmap)?];
        let (mut seen, optimizer) = (Observations::default(), &run.state.optimizer);
        seen.observe(optimizer, &settings.norm, ROWS, states, &gradients, false)?;
        assert_eq!((seen.guarded, seen.channels), (1, 3 * 8));
        assert!(seen.series.is_empty());
        Ok(())
    }

    #[test]
    fn singular_values_are_those_of_the_embedding() -> Result<()> {
        let corpus = corpus();
        let settings = settings(Norm::Layer, &corpus);
        let run = Run::new(settings, &corpus, &Device::Cpu)?;
        let embedding = &variables(&run.state.varmap)["tokens.weight"];
        let (rows, cols) = embedding.dims2()?;
        let values = numbers(embedding)?;
        let direct = nalgebra::DMatrix::from_row_slice(rows, cols, &values).singular_values();
        let mut direct = direct.as_slice().to_vec();
        direct.sort_unstable_by(|a, b| b.total_cmp(a));
        assert_close(&singular_values(&run.state.varmap)?, &direct);
        Ok(())
    }
}
