//! One training run: a step, an evaluation, and the checkpoint that continues it.

use super::data::{by_length, cut, epoch, Batch, Corpus};
use super::model::{init_weights, Size, Transformer};
use super::FIRST_NORM;
use crate::common::checkpoint::{variables, write_whole, Checkpoint, History};
use crate::common::measure::{Observations, Snapshot};
use crate::common::norm::{is_buffer, Norm, NormConfig};
use crate::common::optim::{AdamW, AdamWConfig};
use crate::common::random::{generator, Dropout, Use};
use anyhow::{ensure, Context, Result};
use candle::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::Mode;
use serde_json::{json, Value};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const ADAMW: AdamWConfig = AdamWConfig {
    beta_2: 0.98,
    weight_decay: 1e-4,
    max_grad_norm: 1.,
};

/// What decides a run: two runs of the same settings on the same text are the same run, as far as
/// the shorter one goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    pub norm: NormConfig,
    pub size: Size,
    /// Tokens of a batch on either side, padding included, at most.
    pub batch: usize,
    /// Parts of a batch that pass the model one after the other. Statistics are of one part, and
    /// the gradients of all parts add up to the batch's.
    pub parts: usize,
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
    pub device: Device,
    mode: Mode,
    pub varmap: VarMap,
    pub model: Transformer,
    optimizer: AdamW,
    /// Smoothed losses in training, plain ones in validation.
    pub history: History,
    /// Of every step; `None` where nothing is observed.
    pub observations: Option<Observations>,
    /// Target tokens trained on.
    pub tokens: u64,
    /// Time spent in steps, evaluations not included.
    pub elapsed: Duration,
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
        let mode = Mode::train();
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let model = Transformer::new(settings.size, &settings.norm, &mode, vb)?;
        init_weights(&varmap, &mut generator(settings.seed, Use::Weights, 0))?;
        let parameters = variables(&varmap)
            .into_iter()
            .filter(|(name, _)| !is_buffer(name));
        let optimizer = AdamW::new(parameters, ADAMW)?;
        Ok(Self {
            settings,
            corpus,
            device: device.clone(),
            mode,
            varmap,
            model,
            optimizer,
            history: History::default(),
            // With several parts, the state before the last of them is not known.
            observations: (settings.parts == 1 && Observations::are_of(settings.norm.norm))
                .then(|| Observations::of_layer(FIRST_NORM)),
            tokens: 0,
            elapsed: Duration::ZERO,
            epoch: Epoch {
                number: 0,
                start: 0,
                batches: epoch(&corpus.train, settings.batch, settings.seed, 0),
            },
        })
    }

    /// Steps made so far.
    pub fn steps(&self) -> usize {
        self.optimizer.steps
    }

    /// Passes over the training split so far.
    pub fn epochs(&self) -> f64 {
        let Epoch {
            number,
            start,
            batches,
        } = &self.epoch;
        *number as f64 + (self.steps() - start) as f64 / batches.len() as f64
    }

    /// Numbers the optimizer moves.
    pub fn parameters(&self) -> usize {
        let slots = self.optimizer.slots.iter();
        slots.map(|slot| slot.var.elem_count()).sum()
    }

    /// Target tokens trained on in a second, so far.
    pub fn speed(&self) -> f64 {
        self.tokens as f64 / self.elapsed.as_secs_f64()
    }

    /// One update of the parameters. Gives the loss before it.
    pub fn step(&mut self) -> Result<f32> {
        // What is observed is not timed.
        let before = (self.observations.as_ref())
            .map(|_| Snapshot::of(&self.varmap))
            .transpose()?;
        let start = Instant::now();
        let parts = self.next_parts()?;
        let (loss, gradients) = self.gradients(&parts)?;
        let step = self.steps();
        ensure!(loss.is_finite(), "the loss is {loss} at step {step}");
        self.elapsed += start.elapsed();
        if let (Some(observations), Some(before)) = (&mut self.observations, before) {
            let states = [&before, &Snapshot::of(&self.varmap)?];
            let (norm, rows) = (&self.settings.norm, parts[0].sources.padding.rows.dim(0)?);
            observations.observe(&self.optimizer, norm, rows, states, &gradients, true)?;
        }
        let start = Instant::now();
        let rate = self.settings.rate * inverse_square_root(step, self.settings.warmup_steps);
        self.optimizer.step(&gradients, rate)?;
        self.history.train.push(loss);
        self.tokens += parts.iter().map(Batch::count).sum::<usize>() as u64;
        self.elapsed += start.elapsed();
        Ok(loss)
    }

    /// The loss of the batch that these are the parts of, and its gradients. Normalizations update
    /// their statistics with each part.
    fn gradients(&self, parts: &[Batch]) -> Result<(f32, Vec<Tensor>)> {
        let Settings {
            dropout,
            smoothing,
            seed,
            ..
        } = self.settings;
        let dropout = Dropout::new(dropout, generator(seed, Use::Dropout, self.steps()));
        let count: usize = parts.iter().map(Batch::count).sum();
        let (mut value, mut gradients) = (0., vec![]);
        for part in parts {
            let objective = self.model.objective(part, smoothing, &dropout)?;
            value += objective.loss.to_scalar::<f32>()? / count as f32;
            let store = (objective.gradient / count as f64)?.backward()?;
            let of_part = self.optimizer.gradients(&store)?;
            gradients = match gradients.is_empty() {
                true => of_part,
                false => (gradients.iter().zip(&of_part))
                    .map(|(sum, gradient)| sum + gradient)
                    .collect::<candle::Result<_>>()?,
            };
        }
        Ok((value, gradients))
    }

    /// The parts of the next batch. A batch of fewer pairs than parts has a part for each pair.
    fn next_parts(&mut self) -> Result<Vec<Batch>> {
        self.find_epoch();
        let pairs = &self.epoch.batches[self.steps() - self.epoch.start];
        let parts = self.settings.parts;
        let part = |i: usize| &pairs[i * pairs.len() / parts..(i + 1) * pairs.len() / parts];
        (0..parts)
            .map(part)
            .filter(|part| !part.is_empty())
            .map(|part| Batch::new(part.iter().map(|&i| &self.corpus.train[i]), &self.device))
            .collect()
    }

    /// Goes on to the epoch of the next step.
    fn find_epoch(&mut self) {
        let Settings { batch, seed, .. } = self.settings;
        while self.steps() >= self.epoch.start + self.epoch.batches.len() {
            let number = self.epoch.number + 1;
            self.epoch = Epoch {
                number,
                start: self.epoch.start + self.epoch.batches.len(),
                batches: epoch(&self.corpus.train, batch, seed, number),
            };
        }
    }

    /// The validation loss after the steps made so far, which the history then has.
    pub fn validate(&mut self) -> Result<f32> {
        let step = self.steps() as u32;
        if let Some(&(last, loss)) = self.history.val.last() {
            if last == step {
                return Ok(loss);
            }
        }
        let loss = self.evaluate()?;
        self.history.val.push((step, loss));
        Ok(loss)
    }

    /// The mean loss over the tokens of the validation split, without smoothing, in evaluation
    /// mode.
    pub fn evaluate(&self) -> Result<f32> {
        let _guard = self.mode.eval_scope();
        let val = &self.corpus.val;
        let (mut sum, mut count) = (0., 0);
        for indices in cut(val, &by_length(val), self.settings.batch) {
            let batch = Batch::new(indices.iter().map(|&i| &val[i]), &self.device)?;
            sum += f64::from(self.model.loss(&batch)?.to_scalar::<f32>()?);
            count += batch.count();
        }
        let mean = (sum / count as f64) as f32;
        let step = self.steps();
        ensure!(
            mean.is_finite(),
            "the loss is {mean} in evaluation at step {step}"
        );
        Ok(mean)
    }

    /// Calls `translate` with the model in evaluation mode.
    pub fn in_evaluation<T>(&self, translate: impl FnOnce(&Transformer) -> T) -> T {
        let _guard = self.mode.eval_scope();
        translate(&self.model)
    }

    /// Writes the weights and the running statistics, for [`average`](Self::average).
    pub fn save_weights(&self, path: &Path) -> Result<()> {
        let weights = (variables(&self.varmap).into_iter())
            .map(|(name, var)| (name, var.as_detached_tensor()));
        let notes = HashMap::from([("settings".to_string(), self.describe().to_string())]);
        let bytes = safetensors::serialize(weights.collect::<Vec<_>>(), Some(notes))?;
        write_whole(path, &bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Gives the model the mean of these weights, running statistics among them. Weights of a run
    /// with other settings are refused.
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
            Ok(candle::safetensors::load_buffer(&bytes, &self.device)?)
        };
        let all = (paths.iter())
            .map(|path| read(path).with_context(|| format!("cannot average {}", path.display())))
            .collect::<Result<Vec<_>>>()?;
        for (name, var) in variables(&self.varmap) {
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

    /// Replaces the running statistics of PowerNorm by the mean over the next `batches` batches of
    /// this epoch, then of its first ones, without dropout.
    pub fn recalibrate(&mut self, batches: usize) -> Result<()> {
        self.find_epoch();
        let _guard = self.mode.recalibrate_scope();
        let made = self.steps() - self.epoch.start;
        for indices in self.epoch.batches.iter().cycle().skip(made).take(batches) {
            let pairs = indices.iter().map(|&i| &self.corpus.train[i]);
            let batch = Batch::new(pairs, &self.device)?;
            self.model.encode(&batch.sources, &Dropout::none())?;
        }
        Ok(())
    }

    /// Lets batch normalization take the statistics of its batch in evaluation too.
    pub fn use_own_statistics(&mut self) -> Result<()> {
        let norm = NormConfig {
            norm: Norm::BatchOwn,
            ..self.settings.norm
        };
        let vb = VarBuilder::from_varmap(&self.varmap, DType::F32, &self.device);
        self.model = Transformer::new(self.settings.size, &norm, &self.mode, vb)?;
        Ok(())
    }

    /// Writes everything the run's future depends on.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut checkpoint = Checkpoint::new(
            &self.describe(),
            &self.varmap,
            &self.optimizer,
            &self.history,
            self.elapsed,
        )?;
        checkpoint
            .notes
            .insert("tokens".into(), self.tokens.to_string());
        let observations = serde_json::to_string(&self.observations)?;
        checkpoint.notes.insert("observations".into(), observations);
        checkpoint.write(path)
    }

    /// Takes up the run that [`save`](Self::save) wrote to `path`.
    pub fn load(&mut self, path: &Path) -> Result<()> {
        self.try_load(path)
            .with_context(|| format!("cannot resume from {}", path.display()))
    }

    fn try_load(&mut self, path: &Path) -> Result<()> {
        let settings = self.describe();
        let mut checkpoint =
            Checkpoint::restore(path, &settings, &self.varmap, &mut self.optimizer)?;
        (self.history, self.elapsed) = checkpoint.take_history()?;
        self.tokens = checkpoint.note("tokens")?.parse()?;
        self.observations = serde_json::from_str(checkpoint.note("observations")?)?;
        self.find_epoch();
        Ok(())
    }

    /// The settings and the text, as a checkpoint names them.
    pub fn describe(&self) -> Value {
        let Settings {
            norm,
            size,
            batch,
            parts,
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
            "PowerNorm recipe": format!("{:?}", norm.recipe),
            "PowerNorm warm-up": norm.warmup_steps,
            "PowerNorm alpha": norm.alpha,
            "batch": batch,
            "--parts": parts,
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

/// The learning rate of `step`, counted from 0, as a part of the highest: a linear rise, then a
/// fall by the root of the steps.
fn inverse_square_root(step: usize, warmup_steps: usize) -> f64 {
    let progress = (step + 1) as f64 / warmup_steps as f64;
    progress.min(progress.powf(-0.5))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::checkpoint;
    use crate::common::measure::numbers;
    use crate::common::norm::EPS;
    use crate::translate::data::tests::corpus;
    use crate::translate::model::tests::{norm_config, size};
    use crate::translate::search::{translate, Beam};
    use clap::ValueEnum;

    fn bits(run: &Run) -> Vec<(String, Vec<u64>)> {
        checkpoint::bits(&run.varmap, &run.optimizer)
    }

    fn settings(norm: Norm, corpus: &Corpus) -> Settings {
        Settings {
            norm: norm_config(norm),
            size: size(corpus.subwords.count()),
            batch: 120,
            parts: 1,
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
            while whole.steps() < middle {
                whole.step()?;
            }
            whole.validate()?;
            whole.save(&path)?;
            let mut resumed = Run::new(settings, &corpus, &Device::Cpu)?;
            resumed.load(&path)?;
            assert_eq!(resumed.steps(), middle);
            assert_eq!((whole.epoch.number, resumed.epoch.number), (1, 1));
            assert_eq!(resumed.epochs(), whole.epochs());
            // The evaluation is not made again.
            assert_eq!(resumed.validate()?, whole.validate()?);
            assert_eq!(resumed.history.val.len(), 1);
            while whole.steps() < end {
                whole.step()?;
            }
            while resumed.steps() < end {
                resumed.step()?;
            }
            assert_eq!(resumed.history, whole.history, "{norm}");
            assert_eq!(resumed.observations, whole.observations, "{norm}");
            assert_eq!(bits(&resumed), bits(&whole), "{norm}");
            assert_eq!(resumed.tokens, whole.tokens);
            assert_eq!(resumed.epochs(), whole.epochs());
        }
        Ok(())
    }

    #[test]
    fn a_checkpoint_of_other_settings_is_refused() -> Result<()> {
        let corpus = corpus();
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("run.safetensors");
        let settings = settings(Norm::Layer, &corpus);
        Run::new(settings, &corpus, &Device::Cpu)?.save(&path)?;
        let other = Settings {
            seed: 2,
            ..settings
        };
        let error = Run::new(other, &corpus, &Device::Cpu)?
            .load(&path)
            .unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.ends_with("its run has --seed 1, this one 2"),
            "{error}"
        );
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
            while run.steps() < 60 {
                run.step()?;
            }
            let last = run.evaluate()?;
            assert!(last < first - 1., "{norm}: {first} to {last}");

            let before = bits(&run);
            assert_eq!(run.evaluate()?, last, "{norm}");
            search(&run, &corpus)?;
            assert_eq!(bits(&run), before, "{norm}");
            assert!(run.mode.is_training());
        }
        Ok(())
    }

    fn search(run: &Run, corpus: &Corpus) -> Result<()> {
        run.in_evaluation(|model| {
            translate(model, &corpus.test, &Beam::new(2), 120, &run.device, |_| {})
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

    /// The gradients of the parts add up to the batch's where no statistic is of a part. Batch
    /// normalization has others then, and PowerNorm counts a step for each part.
    #[test]
    fn parts_add_up_but_for_statistics() -> Result<()> {
        let corpus = corpus();
        let gradients = |norm, parts| -> Result<(f64, Vec<f64>)> {
            let settings = Settings {
                parts,
                dropout: 0.,
                ..settings(norm, &corpus)
            };
            let mut run = Run::new(settings, &corpus, &Device::Cpu)?;
            let batches = run.next_parts()?;
            assert_eq!(batches.len(), parts);
            let (loss, gradients) = run.gradients(&batches)?;
            if norm == Norm::Power {
                let steps = &variables(&run.varmap)["encoder.0.norm_1.iters"];
                assert_eq!(numbers(steps.as_tensor())?, [parts as f64]);
            }
            let all = gradients.iter().map(numbers).collect::<Result<Vec<_>>>()?;
            Ok((loss.into(), all.concat()))
        };
        for (norm, add_up) in [
            (Norm::Layer, true),
            (Norm::Batch, false),
            (Norm::Power, false),
        ] {
            let ((whole_loss, whole), (loss, parts)) = (gradients(norm, 1)?, gradients(norm, 3)?);
            let far = (whole.iter().zip(&parts)).fold(0f64, |far, (a, b)| far.max((a - b).abs()));
            let largest = whole.iter().fold(0f64, |most, value| most.max(value.abs()));
            assert!(largest > 0.);
            assert_eq!(far < 1e-4 * largest, add_up, "{norm}: {far}");
            let same = (loss - whole_loss).abs() < 1e-6 * whole_loss;
            assert_eq!(same, add_up, "{norm}: {loss} and {whole_loss}");
        }
        Ok(())
    }

    /// Padding is no row of what is observed: after the first step ψ² is the batch's, and γ is 1.
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
        let seen = run.observations.context("nothing was observed")?;
        let (step, observed) = seen.series["gradient of the quadratic mean"][FIRST_NORM][0];

        let mut run = new()?;
        let parts = run.next_parts()?;
        let (_, gradients) = run.gradients(&parts)?;
        let pairs = &run.epoch.batches[0];
        let rows: usize = pairs.iter().map(|&i| corpus.train[i].source.len()).sum();
        let padded = parts[0].sources.tokens.elem_count();
        assert!(rows < padded, "no padding among {padded} tokens");
        let phi = &variables(&run.varmap)[&format!("{FIRST_NORM}.running_phi")];
        let name = format!("{FIRST_NORM}.weight");
        let gradient = numbers(run.optimizer.gradient(&gradients, &name)?)?;
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
            let state = variables(&run.varmap).into_iter();
            states.push(
                state
                    .map(|(name, var)| Ok((name, numbers(var.as_tensor())?)))
                    .collect::<Result<Vec<_>>>()?,
            );
        }
        run.average(&paths)?;
        for (i, (name, var)) in variables(&run.varmap).into_iter().enumerate() {
            let [(_, first), (_, second)] = [&states[0][i], &states[1][i]];
            for ((mean, a), b) in numbers(var.as_tensor())?.iter().zip(first).zip(second) {
                let expected = match name.ends_with(".iters") {
                    true => *b,
                    false => (a + b) / 2.,
                };
                assert!((mean - expected).abs() <= 1e-6 * expected.abs(), "{name}");
            }
        }
        // ψ² anew is that of the batches: not the mean, and all else stays.
        let before = bits(&run);
        run.recalibrate(2)?;
        for ((name, before), (_, after)) in before.iter().zip(&bits(&run)) {
            assert_eq!(before != after, name.ends_with("running_phi"), "{name}");
        }
        let mut other = Run::new(settings(Norm::PowerV, &corpus), &corpus, &Device::Cpu)?;
        let error = format!("{:#}", other.average(&paths).unwrap_err());
        assert!(error.ends_with("its run has other settings"), "{error}");
        let missing = dir.path().join("3.safetensors");
        let error = run.average(&[missing]).unwrap_err().to_string();
        assert!(error.starts_with("cannot average"), "{error}");
        Ok(())
    }

    /// The loss by the batches' statistics is another one, of the same variables.
    #[test]
    fn batch_normalization_can_take_its_own_statistics() -> Result<()> {
        let corpus = corpus();
        let mut run = Run::new(settings(Norm::Batch, &corpus), &corpus, &Device::Cpu)?;
        run.step()?;
        let (before, running) = (bits(&run), run.evaluate()?);
        run.use_own_statistics()?;
        let own = run.evaluate()?;
        assert!((own - running).abs() > 1e-3, "{own} and {running}");
        assert_eq!(bits(&run), before);
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
