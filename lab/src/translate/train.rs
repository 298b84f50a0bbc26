//! One training run: a step, an evaluation, and the checkpoint that continues it.

use super::FIRST_NORM;
use super::data::{Batch, Corpus, by_length, cut, epoch};
use super::model::{Size, Transformer, init_weights};
use crate::common::checkpoint::{variables, write_whole};
use crate::common::measure::Observations;
use crate::common::norm::{ALPHA, NormConfig};
use crate::common::optim::AdamWConfig;
use crate::common::random::{Dropout, Use, generator};
use crate::common::train::{State, Train};
use anyhow::{Context, Result, ensure};
use candle::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::Mode;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

const ADAMW: AdamWConfig = AdamWConfig {
    beta_2: 0.98,
    weight_decay: 1e-4,
    max_grad_norm: 1.,
};

/// Two runs of the same settings on the same text are the same run, as far as the shorter one goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    pub norm: NormConfig,
    pub size: Size,
    /// Tokens of a batch on either side, padding included, at most.
    pub batch: usize,
    /// The highest learning rate, where the warm-up ends.
    pub rate: f64,
    /// The steps over which the learning rate rises.
    pub warmup_steps: usize,
    pub dropout: f64,
    pub smoothing: f64,
    pub seed: u64,
}

pub struct Run<'a> {
    pub settings: Settings,
    corpus: &'a Corpus,
    pub model: Transformer,
    pub state: State,
    /// Target tokens trained on.
    pub tokens: u64,
    epoch: Epoch,
}

/// The batches of one epoch.
struct Epoch {
    number: usize,
    /// Steps of the run before it.
    start: usize,
    batches: Vec<Vec<usize>>,
}

impl<'a> Run<'a> {
    pub fn new(settings: Settings, corpus: &'a Corpus, device: &Device) -> Result<Self> {
        let (mode, varmap) = (Mode::train(), VarMap::new());
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let model = Transformer::new(settings.size, &settings.norm, &mode, vb)?;
        init_weights(&varmap, &mut generator(settings.seed, Use::Weights, 0))?;
        let mut state = State::new(settings.norm, device, mode, varmap, ADAMW)?;
        state.observations =
            Observations::are_of(settings.norm.norm).then(|| Observations::of_layer(FIRST_NORM));
        Ok(Self {
            settings,
            corpus,
            model,
            state,
            tokens: 0,
            epoch: Epoch {
                number: 0,
                start: 0,
                batches: epoch(&corpus.train, settings.batch, settings.seed, 0),
            },
        })
    }

    /// Passes over the training split so far.
    pub fn epochs(&self) -> f64 {
        let Epoch {
            number,
            start,
            batches,
        } = &self.epoch;
        *number as f64 + (self.state.steps() - start) as f64 / batches.len() as f64
    }

    /// The loss of the batch, and its gradients. Normalizations update their statistics.
    fn gradients(&self, batch: &Batch) -> Result<(f32, Vec<Tensor>)> {
        let Settings {
            dropout,
            smoothing,
            seed,
            ..
        } = self.settings;
        let dropout = Dropout::new(dropout, generator(seed, Use::Dropout, self.state.steps()));
        let objective = self.model.objective(batch, smoothing, &dropout)?;
        let loss = objective.loss.to_scalar::<f32>()? / batch.count() as f32;
        let store = (objective.gradient / batch.count() as f64)?.backward()?;
        Ok((loss, self.state.optimizer.gradients(&store)?))
    }

    fn next_batch(&mut self) -> Result<Batch> {
        self.find_epoch();
        let pairs = &self.epoch.batches[self.state.steps() - self.epoch.start];
        let pairs = pairs.iter().map(|&i| &self.corpus.train[i]);
        Batch::new(pairs, &self.state.device)
    }

    /// Goes on to the epoch of the next step.
    fn find_epoch(&mut self) {
        let Settings { batch, seed, .. } = self.settings;
        while self.state.steps() >= self.epoch.start + self.epoch.batches.len() {
            let number = self.epoch.number + 1;
            self.epoch = Epoch {
                number,
                start: self.epoch.start + self.epoch.batches.len(),
                batches: epoch(&self.corpus.train, batch, seed, number),
            };
        }
    }

    /// The mean loss over the tokens of the validation split, without smoothing, in evaluation
    /// mode.
    pub fn evaluate(&self) -> Result<f32> {
        let _guard = self.state.mode.eval_scope();
        let val = &self.corpus.val;
        let (mut sum, mut count) = (0., 0);
        for indices in cut(val, &by_length(val), self.settings.batch) {
            let batch = Batch::new(indices.iter().map(|&i| &val[i]), &self.state.device)?;
            sum += f64::from(self.model.loss(&batch)?.to_scalar::<f32>()?);
            count += batch.count();
        }
        self.state.evaluated((sum / count as f64) as f32)
    }

    /// Calls `translate` with the model in evaluation mode.
    pub fn in_evaluation<T>(&self, translate: impl FnOnce(&Transformer) -> T) -> T {
        let _guard = self.state.mode.eval_scope();
        translate(&self.model)
    }

    /// Writes the weights and the running statistics, for [`average`](Self::average).
    pub fn save_weights(&self, path: &Path) -> Result<()> {
        let weights = (variables(&self.state.varmap).into_iter())
            .map(|(name, var)| (name, var.as_detached_tensor()));
        let notes = HashMap::from([("settings".to_string(), self.describe().to_string())]);
        let bytes = safetensors::serialize(weights.collect::<Vec<_>>(), Some(notes))?;
        write_whole(path, &bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Gives the model the mean of these weights, running statistics among them. Weights of a run
    /// with other settings are rejected.
    pub fn average(&mut self, paths: &[PathBuf]) -> Result<()> {
        let settings = self.describe().to_string();
        let read = |path: &PathBuf| -> Result<_> {
            let bytes = std::fs::read(path)?;
            let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes)?;
            let theirs = metadata
                .metadata()
                .as_ref()
                .and_then(|notes| notes.get("settings"));
            ensure!(theirs == Some(&settings), "its run has other settings");
            Ok(candle::safetensors::load_buffer(
                &bytes,
                &self.state.device,
            )?)
        };
        let all = (paths.iter())
            .map(|path| read(path).with_context(|| format!("cannot average {}", path.display())))
            .collect::<Result<Vec<_>>>()?;
        for (name, var) in variables(&self.state.varmap) {
            // The model keeps its own counts of steps.
            if !var.dtype().is_float() || name.ends_with(".iters") {
                continue;
            }
            let of_name = |weights: &HashMap<String, Tensor>| {
                let tensor = weights.get(&name).cloned();
                tensor.with_context(|| format!("no {name} in the weights to average"))
            };
            let tensors = all.iter().map(of_name).collect::<Result<Vec<_>>>()?;
            var.set(&Tensor::stack(&tensors, 0)?.mean(0)?)?;
        }
        Ok(())
    }

    /// Takes up the run that was saved to `path`.
    pub fn load(&mut self, path: &Path) -> Result<()> {
        let checkpoint = self.state.load(path, &self.describe())?;
        self.tokens = checkpoint.note("tokens")?.parse()?;
        self.find_epoch();
        Ok(())
    }

    /// The settings and the text, as a checkpoint names them.
    pub fn describe(&self) -> Value {
        let Settings {
            norm,
            size,
            batch,
            rate,
            warmup_steps,
            dropout,
            smoothing,
            seed,
        } = self.settings;
        json!({
            "--norm": norm.norm.to_string(),
            "--groups": norm.groups,
            "--seed": seed,
            "learning rate's warm-up": warmup_steps,
            "PowerNorm recipe": "Paper",
            "PowerNorm warm-up": norm.warmup_steps,
            "PowerNorm alpha": [ALPHA, ALPHA],
            "batch": batch,
            "--parts": 1,
            "learning rate": rate,
            "dropout": dropout,
            "label smoothing": smoothing,
            "layers": size.layers,
            "heads": size.heads,
            "width": size.width,
            "hidden": size.hidden,
            "subwords": size.vocab,
            "text (as a hash)": format!("{:016x}", self.corpus.fingerprint),
        })
    }
}

impl Train for Run<'_> {
    fn state(&self) -> &State {
        &self.state
    }

    fn step(&mut self) -> Result<f32> {
        let before = self.state.snapshot()?;
        let start = Instant::now();
        let batch = self.next_batch()?;
        let (loss, gradients) = self.gradients(&batch)?;
        self.state.elapsed += start.elapsed();
        self.state
            .observe(before, batch.sources.padding.rows.dim(0)?, &gradients)?;
        let start = Instant::now();
        let Settings {
            rate, warmup_steps, ..
        } = self.settings;
        let rate = rate * inverse_square_root(self.state.steps(), warmup_steps);
        self.state.update(loss, &gradients, rate)?;
        self.tokens += batch.count() as u64;
        self.state.elapsed += start.elapsed();
        Ok(loss)
    }

    /// An evaluation after the same steps is not made again.
    fn validate(&mut self) -> Result<f32> {
        let step = self.state.steps() as u32;
        if let Some(&(last, loss)) = self.state.history.val.last()
            && last == step
        {
            return Ok(loss);
        }
        let loss = self.evaluate()?;
        self.state.history.val.push((step, loss));
        Ok(loss)
    }

    fn save(&self, path: &Path) -> Result<()> {
        let tokens = [("tokens", self.tokens.to_string())];
        self.state.save(path, &self.describe(), &tokens)
    }

    fn tokens(&self) -> u64 {
        self.tokens
    }
}

/// The learning rate of `step`, counted from 0, as a part of the highest: a linear rise, then a
/// fall by the root of the steps.
fn inverse_square_root(step: usize, warmup_steps: usize) -> f64 {
    let progress = (step + 1) as f64 / warmup_steps as f64;
    progress.min(progress.powf(-0.5))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::EPS;
    use crate::common::checkpoint;
    use crate::common::measure::numbers;
    use crate::common::norm::Norm;
    use crate::translate::data::tests::corpus;
    use crate::translate::model::tests::size;
    use crate::translate::search::{Beam, translate};
    use clap::ValueEnum;

    fn bits(run: &Run) -> Vec<(String, Vec<u64>)> {
        checkpoint::bits(&run.state.varmap, &run.state.optimizer)
    }

    fn settings(norm: Norm, corpus: &Corpus) -> Settings {
        Settings {
            norm: NormConfig::small(norm),
            size: size(corpus.subwords.count()),
            batch: 120,
            rate: 1e-2,
            warmup_steps: 10,
            dropout: 0.1,
            smoothing: 0.1,
            seed: 1,
        }
    }

    #[test]
    fn a_resumed_run_is_the_run_that_never_stopped() -> Result<()> {
        let corpus = corpus();
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("run.safetensors");
        for &norm in Norm::value_variants() {
            let settings = settings(norm, &corpus);
            let mut whole = Run::new(settings, &corpus, &Device::Cpu)?;
            // More than an epoch on either side of the checkpoint.
            let (middle, end) = (whole.epoch.batches.len() + 2, 3 * whole.epoch.batches.len());
            while whole.state.steps() < middle {
                whole.step()?;
            }
            whole.validate()?;
            whole.save(&path)?;
            let mut resumed = Run::new(settings, &corpus, &Device::Cpu)?;
            resumed.load(&path)?;
            assert_eq!(resumed.state.steps(), middle);
            assert_eq!((whole.epoch.number, resumed.epoch.number), (1, 1));
            assert_eq!(resumed.epochs(), whole.epochs());
            // The evaluation is not made again.
            assert_eq!(resumed.validate()?, whole.validate()?);
            assert_eq!(resumed.state.history.val.len(), 1);
            while whole.state.steps() < end {
                whole.step()?;
            }
            while resumed.state.steps() < end {
                resumed.step()?;
            }
            assert_eq!(resumed.state.history, whole.state.history, "{norm}");
            assert_eq!(
                resumed.state.observations, whole.state.observations,
                "{norm}"
            );
            assert_eq!(bits(&resumed), bits(&whole), "{norm}");
            assert_eq!(resumed.tokens, whole.tokens);
            assert_eq!(resumed.epochs(), whole.epochs());
        }
        Ok(())
    }

    /// The loss falls in a short run of every normalization, and neither an evaluation nor a search
    /// changes the run.
    #[test]
    fn learns() -> Result<()> {
        let corpus = corpus();
        for &norm in Norm::value_variants() {
            let mut run = Run::new(settings(norm, &corpus), &corpus, &Device::Cpu)?;
            let first = run.evaluate()?;
            while run.state.steps() < 60 {
                run.step()?;
            }
            let last = run.evaluate()?;
            assert!(last < first - 1., "{norm}: {first} to {last}");

            let before = bits(&run);
            assert_eq!(run.evaluate()?, last, "{norm}");
            search(&run, &corpus)?;
            assert_eq!(bits(&run), before, "{norm}");
            assert!(run.state.mode.is_training());
        }
        Ok(())
    }

    fn search(run: &Run, corpus: &Corpus) -> Result<()> {
        run.in_evaluation(|model| {
            translate(
                model,
                &corpus.test,
                &Beam::new(2),
                120,
                &run.state.device,
                |_| {},
            )
        })?;
        Ok(())
    }

    /// Losses differ by roundings only, and a search ends.
    #[cfg(feature = "cuda")]
    #[test]
    fn a_gpu_takes_the_steps_of_the_cpu() -> Result<()> {
        let corpus = corpus();
        let gpu = Device::new_cuda(0)?;
        for &norm in Norm::value_variants() {
            let mut on_gpu = Run::new(settings(norm, &corpus), &corpus, &gpu)?;
            let mut on_cpu = Run::new(settings(norm, &corpus), &corpus, &Device::Cpu)?;
            for step in 0..3 {
                let (got, expected) = (on_gpu.step()?, on_cpu.step()?);
                assert!(
                    (got - expected).abs() < 1e-4 * expected,
                    "{norm}, step {step}: {got} and {expected}"
                );
            }
            if norm == Norm::Power {
                search(&on_gpu, &corpus)?;
            }
        }
        Ok(())
    }

    /// Padding is no observed row: after the first step ψ² is the batch's, and γ is 1.
    #[test]
    fn observations_are_of_real_tokens() -> Result<()> {
        let corpus = corpus();
        let new = || -> Result<_> {
            let mut run = Run::new(settings(Norm::PowerV, &corpus), &corpus, &Device::Cpu)?;
            // Of two lengths.
            run.epoch.batches[0] = vec![0, 2];
            Ok(run)
        };
        let mut run = new()?;
        run.step()?;
        let seen = run.state.observations.context("nothing was observed")?;
        let (step, observed) = seen.series["gradient of the quadratic mean"][FIRST_NORM][0];

        let mut run = new()?;
        let batch = run.next_batch()?;
        let (_, gradients) = run.gradients(&batch)?;
        let pairs = &run.epoch.batches[0];
        let rows: usize = pairs.iter().map(|&i| corpus.train[i].source.len()).sum();
        let padded = batch.sources.tokens.elem_count();
        assert!(rows < padded, "no padding among {padded} tokens");
        let phi = &variables(&run.state.varmap)[&format!("{FIRST_NORM}.running_phi")];
        let name = format!("{FIRST_NORM}.weight");
        let gradient = numbers(run.state.optimizer.gradient(&gradients, &name)?)?;
        let shares = (gradient.iter().zip(numbers(phi.as_tensor())?))
            .map(|(gradient, phi)| gradient / rows as f64 / (phi + EPS).sqrt());
        let expected = shares.map(|share| share * share).sum::<f64>().sqrt() / 8.;
        assert_eq!(step, 0);
        assert!(
            (observed - expected).abs() < 1e-4 * expected,
            "{observed}, {expected}"
        );
        Ok(())
    }

    #[test]
    fn an_average_is_the_mean_of_weights_and_statistics() -> Result<()> {
        let corpus = corpus();
        let dir = tempfile::tempdir()?;
        let paths = [1, 2].map(|step| dir.path().join(format!("{step}.safetensors")));
        let mut run = Run::new(settings(Norm::Power, &corpus), &corpus, &Device::Cpu)?;
        let mut states = vec![];
        for path in &paths {
            run.step()?;
            run.save_weights(path)?;
            let state = variables(&run.state.varmap).into_iter();
            states.push(
                state
                    .map(|(name, var)| Ok((name, numbers(var.as_tensor())?)))
                    .collect::<Result<Vec<_>>>()?,
            );
        }
        run.average(&paths)?;
        for (i, (name, var)) in variables(&run.state.varmap).into_iter().enumerate() {
            let [(_, first), (_, second)] = [&states[0][i], &states[1][i]];
            for ((mean, a), b) in numbers(var.as_tensor())?.iter().zip(first).zip(second) {
                let expected = match name.ends_with(".iters") {
                    true => *b,
                    false => (a + b) / 2.,
                };
                assert!((mean - expected).abs() <= 1e-6 * expected.abs(), "{name}");
            }
        }
        let mut other = Run::new(settings(Norm::PowerV, &corpus), &corpus, &Device::Cpu)?;
        let error = format!("{:#}", other.average(&paths).unwrap_err());
        assert!(error.ends_with("its run has other settings"), "{error}");
        let missing = dir.path().join("3.safetensors");
        let error = run.average(&[missing]).unwrap_err().to_string();
        assert!(error.starts_with("cannot average"), "{error}");
        Ok(())
    }

    #[test]
    fn the_rate_rises_for_the_warmup_then_falls_by_the_root() {
        let rates: Vec<f64> = (0..1600)
            .map(|step| inverse_square_root(step, 100))
            .collect();
        assert_eq!(rates[0], 0.01);
        assert!(rates[..100].is_sorted() && rates[99..].is_sorted_by(|a, b| a > b));
        assert_eq!([rates[99], rates[399], rates[1599]], [1., 0.5, 0.25]);
    }
}
