//! Starts a run from trained weights of the same model with LayerNorm or RMSNorm.
//!
//! To PowerNorm behind group scaling of one group the move is exact. A row's mean square is divided
//! out before the normalization, which starts with ψ² = 1 and so divides by nothing. LayerNorm
//! subtracts a row's mean too. It has nothing to subtract if whatever is added to the residual
//! stream is centred, which changes nothing that LayerNorm computes.
//!
//! PowerNorm without group scaling multiplies each channel by a number, where the normalization
//! before it also divides each row by its own. No weights make these the same. γ is then the best
//! that a number can do: the slope of the line through 0, by least squares, from what the layer
//! reads to what it is to write.

use super::EPS;
use super::checkpoint::variables;
use super::language::{Run, Start};
use super::measure::numbers;
use super::model::norm_names;
use super::norm::{Norm, is_buffer};
use super::random::fnv1a;
use anyhow::{Context, Result, ensure};
use candle::{Device, Module, Tensor, Var};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Batches of the training split that ψ² and γ are computed from.
const BATCHES: usize = 20;

/// Weights to start from.
pub struct Weights {
    /// The normalization that they were trained with.
    pub norm: Norm,
    tensors: HashMap<String, Tensor>,
    /// A hash of the file.
    pub fingerprint: u64,
}

impl Weights {
    pub fn read(path: &Path, norm: Norm) -> Result<Self> {
        let read = || -> Result<Self> {
            let bytes = std::fs::read(path)?;
            Ok(Self {
                norm,
                tensors: candle::safetensors::load_buffer(&bytes, &Device::Cpu)?,
                fingerprint: fnv1a(&bytes),
            })
        };
        read().with_context(|| format!("cannot read weights from {}", path.display()))
    }

    /// How a run's settings record these weights.
    pub fn start(&self) -> Start {
        let Self {
            norm, fingerprint, ..
        } = *self;
        Start { norm, fingerprint }
    }
}

/// Gives `run`, which is new, the weights of `from`. They come from a run without group scaling.
///
/// [`Run::new`] has done its part already: the model has centred embeddings if
/// [`Start::centres`].
pub fn convert(run: &Run, from: &Weights) -> Result<()> {
    let vars = variables(&run.state.varmap);
    for name in from.tensors.keys() {
        ensure!(
            vars.contains_key(name),
            "{name} of the weights to start from has no place in this run"
        );
    }
    let to = run.settings().norm;
    let centres = from.start().centres(to.norm);
    for (name, var) in &vars {
        let value = match from.tensors.get(name) {
            Some(value) if writes_stream(name) && centres => centred(value)?,
            Some(value) => value.clone(),
            // A fresh statistic, and a bias of 0.
            None => {
                ensure!(
                    is_buffer(name) || name.ends_with("bias"),
                    "the weights to start from lack {name}"
                );
                continue;
            }
        };
        ensure!(
            value.shape() == var.shape(),
            "{name} has the shape {:?} in the weights to start from, and {:?} in this run",
            value.shape(),
            var.shape()
        );
        var.set(&value.to_device(var.device())?)?;
    }
    match to.norm.is_power() && to.groups.is_none() {
        true => fit(run, from, &vars),
        false => Ok(()),
    }
}

/// A matrix whose output is added to the residual stream.
fn writes_stream(name: &str) -> bool {
    name.ends_with("project.weight")
}

/// The matrix with outputs whose mean over the channels is 0.
fn centred(weight: &Tensor) -> candle::Result<Tensor> {
    weight.broadcast_sub(&weight.mean_keepdim(0)?)
}

/// Sets ψ² and γ of each normalization, in their order: what one reads depends on those before it.
fn fit(run: &Run, from: &Weights, vars: &BTreeMap<String, Var>) -> Result<()> {
    let before = run.with_norm(from.norm)?;
    convert(&before, from)?;
    let read_before = before.streams(BATCHES)?;
    for (i, name) in norm_names(run.settings().size.layers).iter().enumerate() {
        let var = |what| -> Result<&Var> {
            let name = format!("{name}.{what}");
            vars.get(&name)
                .with_context(|| format!("no {name} in the model"))
        };
        let bias = var("bias")?.as_tensor();
        let mut channels = vec![Channel::default(); bias.elem_count()];
        for (read, read_before) in run.streams(BATCHES)?.iter().zip(&read_before) {
            let written = before.model.norms()[i].forward(&read_before[i])?;
            let (xs, ys) = (numbers(&read[i])?, numbers(&written.broadcast_sub(bias)?)?);
            for (i, (x, y)) in xs.iter().zip(&ys).enumerate() {
                let channel = i % bias.elem_count();
                channels[channel].see(*x, *y);
            }
        }
        let set = |name, of: fn(&Channel) -> f64| -> Result<()> {
            let values: Vec<f32> = channels.iter().map(|c| of(c) as f32).collect();
            let var = var(name)?;
            Ok(var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?)
        };
        set("running_phi", Channel::mean_square)?;
        set("weight", Channel::weight)?;
    }
    Ok(())
}

/// Sums over the inputs x of a channel and the outputs y that the normalization should have there.
#[derive(Debug, Clone, Copy, Default)]
struct Channel {
    count: f64,
    /// Sums over rows of x² and of x y.
    square: f64,
    product: f64,
}

impl Channel {
    fn see(&mut self, x: f64, y: f64) {
        self.count += 1.;
        self.square += x * x;
        self.product += x * y;
    }

    /// ψ².
    fn mean_square(&self) -> f64 {
        self.square / self.count
    }

    /// γ, with which γ x / sqrt(ψ² + ε) is nearest to y.
    fn weight(&self) -> f64 {
        let slope = self.product / self.square.max(f64::MIN_POSITIVE);
        slope * (self.mean_square() + EPS).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::super::data::Corpus;
    use super::super::language::Settings;
    use super::super::norm::NormConfig;
    use super::super::random::Dropout;
    use super::super::train::Train;
    use super::*;

    fn settings(norm: Norm, groups: Option<usize>, corpus: &Corpus) -> Settings {
        let settings = Settings::small(norm, corpus);
        Settings {
            norm: NormConfig {
                groups,
                warmup_steps: 0,
                ..settings.norm
            },
            ..settings
        }
    }

    /// Weights after some steps with `norm`, and the logits of a batch.
    fn trained(norm: Norm, corpus: &Corpus) -> Result<(Weights, Vec<f64>)> {
        let mut run = Run::new(settings(norm, None, corpus), corpus, &Device::Cpu)?;
        for _ in 0..8 {
            run.step()?;
        }
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("weights.safetensors");
        run.state.varmap.save(&path)?;
        Ok((Weights::read(&path, norm)?, logits(&run)?))
    }

    fn logits(run: &Run) -> Result<Vec<f64>> {
        let _guard = run.state.mode.eval_scope();
        let tokens = Tensor::new(&[[1u32, 5, 3, 2, 4, 1], [2, 2, 6, 1, 3, 5]], &Device::Cpu)?;
        numbers(&run.model.forward(&tokens, &Dropout::none())?)
    }

    fn moved<'a>(
        from: &Weights,
        norm: Norm,
        groups: Option<usize>,
        corpus: &'a Corpus,
    ) -> Result<Run<'a>> {
        let settings = Settings {
            start: Some(from.start()),
            ..settings(norm, groups, corpus)
        };
        let run = Run::new(settings, corpus, &Device::Cpu)?;
        convert(&run, from)?;
        Ok(run)
    }

    fn farthest(a: &[f64], b: &[f64]) -> f64 {
        let distances = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        distances.fold(0., f64::max)
    }

    #[test]
    fn a_move_to_one_group_is_exact() -> Result<()> {
        let corpus = Corpus::sample(8);
        for norm in [Norm::Layer, Norm::Rms] {
            let (weights, before) = trained(norm, &corpus)?;
            let largest = before.iter().fold(0f64, |most, x| most.max(x.abs()));
            for (to, groups) in [
                (norm, None),
                (Norm::Power, Some(1)),
                (Norm::PowerV, Some(1)),
            ] {
                let after = logits(&moved(&weights, to, groups, &corpus)?)?;
                let far = farthest(&before, &after);
                assert!(far < 1e-5 * largest, "{norm} to {to}: {far}");
            }
            // Without group scaling it is near, and no more.
            let after = logits(&moved(&weights, Norm::Power, None, &corpus)?)?;
            let far = farthest(&before, &after);
            assert!(far > 1e-3 * largest && far < largest, "{norm}: {far}");
        }
        Ok(())
    }

    /// Each ψ² is the mean square of what its layer then reads, so none changes the others.
    #[test]
    fn statistics_are_of_the_model_that_was_moved() -> Result<()> {
        let corpus = Corpus::sample(8);
        let (weights, _) = trained(Norm::Layer, &corpus)?;
        let run = moved(&weights, Norm::Power, None, &corpus)?;
        let vars = variables(&run.state.varmap);
        let streams = run.streams(BATCHES)?;
        for (i, name) in norm_names(2).iter().enumerate() {
            let read: Vec<Tensor> = streams.iter().map(|batch| batch[i].clone()).collect();
            let read = Tensor::cat(&read, 0)?.flatten_to(1)?;
            let expected = numbers(&read.sqr()?.mean(0)?)?;
            let stored = numbers(&vars[&format!("{name}.running_phi")])?;
            let largest = expected.iter().copied().fold(0., f64::max);
            let far = farthest(&stored, &expected);
            assert!(far < 1e-5 * largest, "{name}: {far}");
        }
        Ok(())
    }

    #[test]
    fn a_weight_is_the_slope_with_the_least_squares() {
        let rows = [(1., 3.), (-2., -4.), (0.5, 0.)];
        let mut channel = Channel::default();
        rows.iter().for_each(|&(x, y)| channel.see(x, y));
        assert_eq!(channel.mean_square(), 1.75);
        let slope = channel.weight() / (1.75 + EPS).sqrt();
        let off = |slope: f64| -> f64 { rows.iter().map(|(x, y)| (slope * x - y).powi(2)).sum() };
        assert!(off(slope) < off(slope * 1.001) && off(slope) < off(slope * 0.999));
        // A channel that is always 0.
        let mut silent = Channel::default();
        silent.see(0., 0.);
        assert_eq!((silent.mean_square(), silent.weight()), (0., 0.));
    }

    #[test]
    fn weights_that_do_not_fit_are_rejected() -> Result<()> {
        let corpus = Corpus::sample(8);
        let (layer, _) = trained(Norm::Layer, &corpus)?;
        let error = |from: &Weights, norm| match moved(from, norm, None, &corpus) {
            Ok(_) => panic!("{norm} took them"),
            Err(error) => error.to_string(),
        };
        let text = error(&layer, Norm::Rms);
        assert!(
            text.contains("bias of the weights to start from has no place"),
            "{text}"
        );
        let (mut rms, _) = trained(Norm::Rms, &corpus)?;
        rms.tensors.remove("norm.weight");
        let text = error(&rms, Norm::Rms);
        assert_eq!(text, "the weights to start from lack norm.weight");
        let narrow = Tensor::ones(3, candle::DType::F32, &Device::Cpu)?;
        rms.tensors.insert("norm.weight".into(), narrow);
        let text = error(&rms, Norm::Rms);
        assert!(
            text.starts_with("norm.weight has the shape [3] in the weights"),
            "{text}"
        );
        Ok(())
    }
}
