//! One training run: a step, an evaluation, and the checkpoint that continues it.

use crate::common::checkpoint::{variables, Checkpoint};
use crate::common::norm::{is_buffer, NormConfig};
use crate::common::optim::{AdamW, AdamWConfig};
use crate::common::random::{generator, Use};
use crate::common::train::History;
use crate::data::{by_length, cut, epoch, Batch, Corpus};
use crate::model::{cross_entropy, init_weights, Dropout, Size, Transformer};
use anyhow::{ensure, Context, Result};
use candle::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::Mode;
use serde_json::{json, Value};
use std::path::Path;
use std::time::{Duration, Instant};

const ADAMW: AdamWConfig = AdamWConfig {
    beta_2: 0.98,
    weight_decay: 1e-4,
    max_grad_norm: 1.,
};

/// What decides a run: two runs of the same settings on the same text are the same run, as far as the shorter one goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    pub norm: NormConfig,
    pub size: Size,
    /// Tokens of a batch on either side, padding included, at most.
    pub batch: usize,
    /// The highest learning rate, where the warm-up ends.
    pub rate: f64,
    pub dropout: f64,
    pub smoothing: f64,
    pub seed: u64,
}

pub struct Run<'a> {
    settings: Settings,
    corpus: &'a Corpus,
    pub device: Device,
    mode: Mode,
    varmap: VarMap,
    pub model: Transformer,
    optimizer: AdamW,
    /// Smoothed losses in training, plain ones in validation.
    pub history: History,
    /// Target tokens trained on.
    tokens: u64,
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
        let start = Instant::now();
        let Settings {
            rate,
            dropout,
            smoothing,
            seed,
            norm,
            ..
        } = self.settings;
        let step = self.steps();
        let batch = self.next_batch()?;
        let dropout = Dropout::new(dropout, generator(seed, Use::Dropout, step));
        let logits = self.model.forward(&batch, &dropout)?;
        let (loss, _) = cross_entropy(&logits, &batch.targets, smoothing)?;
        let loss = (loss / batch.count() as f64)?;
        let value = loss.to_scalar::<f32>()?;
        ensure!(value.is_finite(), "the loss is {value} at step {step}");
        let gradients = self.optimizer.gradients(&loss.backward()?)?;
        let rate = rate * inverse_square_root(step, norm.warmup_steps);
        self.optimizer.step(&gradients, rate)?;
        self.history.train.push(value);
        self.tokens += batch.count() as u64;
        self.elapsed += start.elapsed();
        Ok(value)
    }

    fn next_batch(&mut self) -> Result<Batch> {
        let Settings { batch, seed, .. } = self.settings;
        while self.steps() >= self.epoch.start + self.epoch.batches.len() {
            let number = self.epoch.number + 1;
            self.epoch = Epoch {
                number,
                start: self.epoch.start + self.epoch.batches.len(),
                batches: epoch(&self.corpus.train, batch, seed, number),
            };
        }
        let indices = &self.epoch.batches[self.steps() - self.epoch.start];
        let pairs = indices.iter().map(|&i| &self.corpus.train[i]);
        Batch::new(pairs, &self.device)
    }

    /// The mean loss over the tokens of the validation split, without smoothing, in evaluation mode.
    pub fn evaluate(&self) -> Result<f32> {
        let _guard = self.mode.eval_scope();
        let val = &self.corpus.val;
        let (mut sum, mut count) = (0., 0);
        for indices in cut(val, &by_length(val), self.settings.batch) {
            let batch = Batch::new(indices.iter().map(|&i| &val[i]), &self.device)?;
            let logits = self.model.forward(&batch, &Dropout::none())?;
            let (_, loss) = cross_entropy(&logits, &batch.targets, 0.)?;
            sum += f64::from(loss.to_scalar::<f32>()?);
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

    /// Writes everything the run's future depends on.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut checkpoint = Checkpoint::new(&self.describe(), &self.varmap, &self.optimizer);
        let (val_steps, val): (Vec<_>, Vec<_>) = self.history.val.iter().copied().unzip();
        let cpu = &Device::Cpu;
        let train = Tensor::new(&*self.history.train, cpu)?;
        checkpoint.tensors.insert("history.train".into(), train);
        for (name, history) in [
            ("history.val_steps", Tensor::new(val_steps, cpu)?),
            ("history.val", Tensor::new(val, cpu)?),
        ] {
            checkpoint.tensors.insert(name.into(), history);
        }
        let seconds = self.elapsed.as_secs_f64().to_string();
        checkpoint.notes.insert("seconds".into(), seconds);
        checkpoint
            .notes
            .insert("tokens".into(), self.tokens.to_string());
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
        let val_steps = checkpoint.take("history.val_steps")?.to_vec1()?;
        let val = checkpoint.take("history.val")?.to_vec1()?;
        self.history = History {
            train: checkpoint.take("history.train")?.to_vec1()?,
            val: val_steps.into_iter().zip(val).collect(),
        };
        self.tokens = checkpoint.note("tokens")?.parse()?;
        self.elapsed = Duration::try_from_secs_f64(checkpoint.note("seconds")?.parse()?)?;
        Ok(())
    }

    /// The settings and the text, as a checkpoint names them.
    fn describe(&self) -> Value {
        let Settings {
            norm,
            size,
            batch,
            rate,
            dropout,
            smoothing,
            seed,
        } = self.settings;
        json!({
            "--norm": norm.norm.to_string(),
            "--groups": norm.groups,
            "--seed": seed,
            "warm-up": norm.warmup_steps,
            "PowerNorm recipe": format!("{:?}", norm.recipe),
            "batch": batch,
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

/// The learning rate of `step`, counted from 0, as a part of the highest: a linear rise, then a fall by the root of the
/// steps.
fn inverse_square_root(step: usize, warmup_steps: usize) -> f64 {
    let progress = (step + 1) as f64 / warmup_steps as f64;
    progress.min(progress.powf(-0.5))
}
