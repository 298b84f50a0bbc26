//! A training run of a language model: its steps and its evaluations.

use super::checkpoint::Checkpoint;
use super::data::{Batch, Corpus};
use super::model::{Gpt, Size, init_weights};
use super::norm::{ALPHA, Norm, NormConfig, share};
use super::optim::{AdamWConfig, Schedule};
use super::random::{Dropout, Use, generator};
use super::train::{State, Train};
use anyhow::Result;
use candle::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap, loss::cross_entropy};
use candle_powernorm::Mode;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

const BETA_2: f64 = 0.99;
const WEIGHT_DECAY: f64 = 0.1;

const DTYPE: DType = DType::F32;

/// Sequences of a batch of `study`.
pub const BATCH: usize = 12;

/// Batches of an evaluation along the way, for which the validation split may have less.
const EVAL_BATCHES: usize = 10;

/// Two runs of the same settings on the same text are the same run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    pub norm: NormConfig,
    pub size: Size,
    /// Sequences of a step.
    pub batch: usize,
    pub regularization: Regularization,
    pub schedule: Schedule,
    pub steps: usize,
    pub seed: u64,
    /// `None` if the run starts from new weights.
    pub start: Option<Start>,
}

/// The weights that a run starts from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Start {
    /// The normalization that they were trained with.
    pub norm: Norm,
    /// A hash of their file.
    pub fingerprint: u64,
}

impl Start {
    /// A move to `norm` needs a residual stream that is centred.
    pub fn centres(self, norm: Norm) -> bool {
        self.norm == Norm::Layer && norm != self.norm
    }
}

/// Dropout and label smoothing, which only training has.
#[derive(Debug, Clone, Copy, Default, PartialEq, clap::Args)]
pub struct Regularization {
    /// Share of elements that dropout zeroes, of embeddings and branches
    #[arg(long, value_parser = share, default_value_t = 0.)]
    pub dropout: f64,

    /// Label smoothing: the share of a target that all tokens divide
    #[arg(long, value_parser = share, default_value_t = 0.)]
    pub smoothing: f64,
}

pub struct Run<'a> {
    settings: Settings,
    pub corpus: &'a Corpus,
    pub model: Gpt,
    pub state: State,
}

impl<'a> Run<'a> {
    pub fn new(settings: Settings, corpus: &'a Corpus, device: &Device) -> Result<Self> {
        let (mode, varmap) = (Mode::train(), VarMap::new());
        let vb = VarBuilder::from_varmap(&varmap, DTYPE, device);
        let mut model = Gpt::new(settings.size, &settings.norm, &mode, vb)?;
        if (settings.start).is_some_and(|start| start.centres(settings.norm.norm)) {
            model = model.with_centred_embeddings();
        }
        let mut rng = generator(settings.seed, Use::Weights, 0);
        init_weights(&varmap, settings.size.layers, &mut rng)?;
        let optimizer = AdamWConfig {
            beta_2: BETA_2,
            weight_decay: WEIGHT_DECAY,
            max_grad_norm: settings.schedule.clip,
        };
        Ok(Self {
            settings,
            corpus,
            model,
            state: State::new(settings.norm, device, mode, varmap, optimizer)?,
        })
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Tokens of a step.
    fn rows(&self) -> usize {
        self.settings.batch * self.settings.size.context
    }

    /// A new run of the same settings with another normalization, without group scaling.
    pub fn with_norm(&self, norm: Norm) -> Result<Self> {
        let norm = NormConfig {
            norm,
            groups: None,
            ..self.settings.norm
        };
        let settings = Settings {
            norm,
            start: None,
            ..self.settings
        };
        Self::new(settings, self.corpus, &self.state.device)
    }

    /// The inputs of each normalization in an evaluation of `batches` batches of the training
    /// split, by batch.
    pub fn streams(&self, batches: usize) -> Result<Vec<Vec<Tensor>>> {
        let _guard = self.state.mode.eval_scope();
        let Settings { size, batch, .. } = self.settings;
        let train = &self.corpus.train;
        let spread = Batch::spread(train, batches, batch, size.context, &self.state.device);
        let streams = spread.map(|batch| {
            let mut streams = vec![];
            let see = |stream: &Tensor| streams.push(stream.detach());
            self.model
                .forward_seen(&batch?.inputs, &Dropout::none(), see)?;
            Ok(streams)
        });
        streams.collect()
    }

    /// The loss of the next batch, and the gradients of the parameters as the optimizer has them.
    /// Normalizations update their statistics.
    pub fn gradients(&self) -> Result<(f32, Vec<Tensor>)> {
        let step = self.state.steps();
        let Settings {
            size,
            batch,
            regularization,
            seed,
            ..
        } = self.settings;
        let Regularization { dropout, smoothing } = regularization;
        let dropout = Dropout::new(dropout, generator(seed, Use::Dropout, step));
        let mut rng = generator(seed, Use::Batch, step);
        let (train, device) = (&self.corpus.train, &self.state.device);
        let batch = Batch::random(train, batch, size.context, &mut rng, device)?;
        let loss = loss(&self.model, &batch, smoothing, &dropout)?;
        let gradients = self.state.optimizer.gradients(&loss.backward()?)?;
        Ok((loss.to_scalar()?, gradients))
    }

    /// Takes the step of these gradients.
    pub fn update(&mut self, loss: f32, gradients: &[Tensor]) -> Result<()> {
        let rate = (self.settings.schedule).rate(self.state.steps(), self.settings.steps);
        self.state.update(loss, gradients, rate)
    }

    /// The mean loss over `batches` batches spread over `tokens`, in evaluation mode.
    pub fn evaluate(&self, tokens: &[u32], batches: usize) -> Result<f32> {
        self.evaluate_model(&self.model, tokens, batches)
    }

    /// [`evaluate`](Self::evaluate) of the model whose normalizations are folded away, if they
    /// fold.
    pub fn evaluate_folded(&self, tokens: &[u32], batches: usize) -> Result<Option<f32>> {
        let folded = {
            let _guard = self.state.mode.eval_scope();
            self.model.folded()?
        };
        let evaluate = |model| self.evaluate_model(&model, tokens, batches);
        folded.map(evaluate).transpose()
    }

    fn evaluate_model(&self, model: &Gpt, tokens: &[u32], batches: usize) -> Result<f32> {
        let _guard = self.state.mode.eval_scope();
        let Settings { size, batch, .. } = self.settings;
        let mut sum = 0.;
        for batch in Batch::spread(tokens, batches, batch, size.context, &self.state.device) {
            let loss = loss(model, &batch?, 0., &Dropout::none())?;
            sum += f64::from(loss.to_scalar::<f32>()?);
        }
        self.state.evaluated((sum / batches as f64) as f32)
    }

    /// Takes up the run that was saved to `path`.
    pub fn load(&mut self, path: &Path) -> Result<Checkpoint> {
        let settings = self.describe();
        self.state.load(path, &settings)
    }

    /// The run's settings, as its checkpoint names them.
    pub fn describe(&self) -> Value {
        self.settings.describe(self.corpus)
    }
}

impl Train for Run<'_> {
    fn state(&self) -> &State {
        &self.state
    }

    fn step(&mut self) -> Result<f32> {
        let before = self.state.snapshot()?;
        let start = Instant::now();
        let (loss, gradients) = self.gradients()?;
        self.state.elapsed += start.elapsed();
        self.state.observe(before, self.rows(), &gradients)?;
        let start = Instant::now();
        self.update(loss, &gradients)?;
        self.state.elapsed += start.elapsed();
        Ok(loss)
    }

    fn validate(&mut self) -> Result<f32> {
        let loss = self.evaluate(&self.corpus.val, EVAL_BATCHES)?;
        (self.state.history.val).push((self.state.steps() as u32, loss));
        Ok(loss)
    }

    fn save(&self, path: &Path) -> Result<()> {
        self.state.save(path, &self.describe(), &[])
    }

    fn tokens(&self) -> u64 {
        (self.state.steps() * self.rows()) as u64
    }
}

/// The cross entropy of a batch, with label smoothing.
fn loss(model: &Gpt, batch: &Batch, smoothing: f64, dropout: &Dropout) -> Result<Tensor> {
    let logits = model.forward(&batch.inputs, dropout)?;
    let logits = logits.flatten_to(1)?;
    Ok(match smoothing > 0. {
        true => smoothed_cross_entropy(&logits, &batch.targets, smoothing)?,
        false => cross_entropy(&logits, &batch.targets)?,
    })
}

/// The mean cross entropy of `logits`, `[rows, vocab]`, with the `smoothing` share of each target
/// spread over all of the vocabulary.
///
/// Its gradient, the softmax less the smoothed target, is computed here with it, row by row.
/// Autograd would pass over the logits, the largest tensor of a step, many times.
fn smoothed_cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    smoothing: f64,
) -> candle::Result<Tensor> {
    let (rows, vocab) = logits.dims2()?;
    let mut values: Vec<f32> = logits.detach().flatten_all()?.to_vec1()?;
    let share = 1. / rows as f64;
    let mut loss = 0.;
    for (row, target) in values
        .chunks_exact_mut(vocab)
        .zip(targets.to_vec1::<u32>()?)
    {
        let target = target as usize;
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (mut sum, mut sum_of_exps) = (0., 0.);
        let of_target = f64::from(row[target] - largest);
        for value in &mut *row {
            let less = *value - largest;
            *value = less.exp();
            sum += f64::from(less);
            sum_of_exps += f64::from(*value);
        }
        let smoothed = (1. - smoothing) * of_target + smoothing * sum / vocab as f64;
        loss += (sum_of_exps.ln() - smoothed) * share;
        let scale = (share / sum_of_exps) as f32;
        let of_each = (smoothing * share / vocab as f64) as f32;
        row.iter_mut()
            .for_each(|value| *value = *value * scale - of_each);
        row[target] -= ((1. - smoothing) * share) as f32;
    }
    let gradient = Tensor::from_vec(values, (rows, vocab), logits.device())?;
    // The carrier has that gradient, and its value is made the loss.
    let carrier = (logits * gradient)?.sum_all()?;
    let gap = (Tensor::new(loss as f32, logits.device())? - carrier.detach())?;
    carrier + gap
}

impl Settings {
    /// The settings, those that every run has, and the text, as checkpoints and results name them.
    pub fn describe(&self, corpus: &Corpus) -> Value {
        let Settings {
            norm,
            size,
            batch,
            regularization,
            schedule,
            steps,
            seed,
            start,
        } = *self;
        let mut description = json!({
            "--norm": norm.norm.to_string(),
            "--groups": norm.groups,
            "--steps": steps,
            "--seed": seed,
            "PowerNorm warm-up": norm.warmup_steps,
            "PowerNorm recipe": "Paper",
            "PowerNorm alpha": [ALPHA, ALPHA],
            "GroupNorm groups": norm.group_norm_groups,
            "BatchNorm momentum": norm.momentum,
            "batch": batch,
            "micro-batch": batch,
            "--dropout": regularization.dropout,
            "--smoothing": regularization.smoothing,
            "layers": size.layers,
            "heads": size.heads,
            "width": size.width,
            "context": size.context,
            "learning rate": [schedule.rate, schedule.least()],
            "learning rate's warm-up": schedule.rate_warmup,
            "AdamW's beta 2": BETA_2,
            "weight decay": WEIGHT_DECAY,
            "largest norm of a gradient": schedule.clip,
            "dtype": DTYPE.as_str(),
            "text (as a hash)": format!("{:016x}", corpus.fingerprint),
        });
        if let Some(Start { norm, fingerprint }) = start {
            description["--from-norm"] = json!(norm.to_string());
            description["weights at the start (as a hash)"] = json!(format!("{fingerprint:016x}"));
        }
        description
    }
}

#[cfg(test)]
impl Settings {
    /// A model small enough for a test. PowerNorm's warm-up ends before the run does.
    pub fn small(norm: super::norm::Norm, corpus: &Corpus) -> Self {
        Self {
            norm: NormConfig::small(norm),
            size: Size {
                layers: 2,
                heads: 2,
                width: 8,
                context: 8,
                vocab: corpus.vocab.len(),
            },
            batch: 3,
            regularization: Regularization::default(),
            schedule: Schedule::default(),
            steps: 8,
            seed: 1,
            start: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checkpoint::{self, variables};
    use super::super::data::Unit;
    use super::super::norm::Norm;
    use super::*;
    use anyhow::Context;
    use candle::D;
    use candle_nn::ops;
    use clap::ValueEnum;
    use rand::Rng;

    fn bits(run: &Run) -> Vec<(String, Vec<u64>)> {
        checkpoint::bits(&run.state.varmap, &run.state.optimizer)
    }

    fn corpus() -> Corpus {
        Corpus::sample(8)
    }

    /// With smoothing s the loss is (1−s) of the target's and s of the mean over all tokens. An
    /// evaluation has neither smoothing nor dropout.
    #[test]
    fn smoothing_and_dropout_are_of_training() -> Result<()> {
        let corpus = corpus();
        let run = |dropout, smoothing| {
            let settings = Settings {
                regularization: Regularization { dropout, smoothing },
                ..Settings::small(Norm::Layer, &corpus)
            };
            Run::new(settings, &corpus, &Device::Cpu)
        };
        let loss = |dropout, smoothing| anyhow::Ok(run(dropout, smoothing)?.gradients()?.0);
        let plain = loss(0., 0.)?;
        let (half, all) = (loss(0., 0.5)?, loss(0., 0.999)?);
        let of_all = (all - 0.001 * plain) / 0.999;
        assert!(
            (half - (plain + of_all) / 2.).abs() < 1e-5 * plain,
            "{plain}, {half}, {all}"
        );
        assert!((half - plain).abs() > 1e-3 * plain);
        assert!((loss(0.5, 0.)? - plain).abs() > 1e-3 * plain);
        let evaluated = |run: &Run| run.evaluate(&corpus.val, 2);
        assert_eq!(evaluated(&run(0.5, 0.5)?)?, evaluated(&run(0., 0.)?)?);
        Ok(())
    }

    /// The value, and the gradient, are those that candle's operations have by autograd.
    #[test]
    fn the_smoothed_loss_is_that_of_candles_operations() -> Result<()> {
        let mut rng = generator(1, Use::Weights, 0);
        let values: Vec<f32> = (0..7 * 5).map(|_| rng.random_range(-4f32..4.)).collect();
        let logits = candle::Var::from_vec(values, (7, 5), &Device::Cpu)?;
        let targets = Tensor::new(&[0u32, 4, 1, 1, 3, 2, 0], &Device::Cpu)?;
        let ours = smoothed_cross_entropy(&logits, &targets, 0.1)?;
        let of_all = ops::log_softmax(logits.as_tensor(), D::Minus1)?.mean_all()?;
        let theirs = ((cross_entropy(&logits, &targets)? * 0.9)? - (of_all * 0.1)?)?;
        let gradient = |loss: &Tensor| -> Result<Vec<f32>> {
            let store = loss.backward()?;
            let gradient = store.get(&logits).context("no gradient")?;
            Ok(gradient.flatten_all()?.to_vec1()?)
        };
        let (gradient, theirs_gradient) = (gradient(&ours)?, gradient(&theirs)?);
        let (ours, theirs) = (ours.to_scalar::<f32>()?, theirs.to_scalar::<f32>()?);
        assert!((ours - theirs).abs() < 1e-6 * theirs, "{ours}, {theirs}");
        for (ours, theirs) in gradient.iter().zip(&theirs_gradient) {
            assert!((ours - theirs).abs() < 1e-7, "{ours}, {theirs}");
        }
        assert!(gradient.iter().any(|value| value.abs() > 0.01));
        Ok(())
    }

    #[test]
    fn a_resumed_run_is_the_run_that_never_stopped() -> Result<()> {
        let corpus = corpus();
        let dir = tempfile::tempdir()?;
        for &norm in Norm::value_variants() {
            let path = dir.path().join("run.safetensors");
            let settings = Settings {
                regularization: Regularization {
                    dropout: 0.1,
                    smoothing: 0.1,
                },
                ..Settings::small(norm, &corpus)
            };
            let mut whole = Run::new(settings, &corpus, &Device::Cpu)?;
            for step in 0..settings.steps {
                if step == 5 {
                    whole
                        .state
                        .history
                        .val
                        .push((5, whole.evaluate(&corpus.val, 2)?));
                    whole.save(&path)?;
                }
                whole.step()?;
            }
            let mut resumed = Run::new(settings, &corpus, &Device::Cpu)?;
            resumed.load(&path)?;
            assert_eq!(resumed.state.steps(), 5);
            while resumed.state.steps() < settings.steps {
                resumed.step()?;
            }
            assert_eq!(resumed.state.history, whole.state.history, "{norm}");
            assert_eq!(bits(&resumed), bits(&whole), "{norm}");
        }
        Ok(())
    }

    #[test]
    fn a_checkpoint_of_other_settings_is_rejected() -> Result<()> {
        let corpus = corpus();
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("run.safetensors");
        let settings = Settings::small(Norm::Rms, &corpus);
        Run::new(settings, &corpus, &Device::Cpu)?.save(&path)?;

        let message = |settings, corpus| {
            let error = Run::new(settings, corpus, &Device::Cpu)
                .unwrap()
                .load(&path)
                .unwrap_err();
            format!("{:#}", error)
        };
        let error = message(
            Settings {
                seed: 2,
                ..settings
            },
            &corpus,
        );
        assert!(
            error.ends_with("its run has --seed 1, this one 2"),
            "{error}"
        );
        let other = Corpus::new(include_str!("../../sample/train.de"), Unit::Character, 8)?;
        let error = message(settings, &other);
        assert!(error.contains("text (as a hash)"), "{error}");
        std::fs::write(&path, "no checkpoint")?;
        assert!(
            Run::new(settings, &corpus, &Device::Cpu)?
                .load(&path)
                .is_err()
        );
        Ok(())
    }

    #[test]
    fn a_seed_is_the_same_start_for_every_norm() -> Result<()> {
        let corpus = corpus();
        let matrices = |norm| -> Result<Vec<(String, Vec<u64>)>> {
            let run = Run::new(Settings::small(norm, &corpus), &corpus, &Device::Cpu)?;
            let mut bits = bits(&run);
            bits.retain(|(name, _)| name.ends_with("weight") && !name.contains("norm"));
            Ok(bits)
        };
        let power = matrices(Norm::Power)?;
        // Two embeddings, and six matrices a layer.
        assert_eq!(power.len(), 2 + 2 * 6);
        for &norm in Norm::value_variants() {
            assert_eq!(matrices(norm)?, power, "{norm}");
        }
        Ok(())
    }

    #[test]
    fn an_evaluation_changes_nothing() -> Result<()> {
        let corpus = corpus();
        for &norm in Norm::value_variants() {
            let mut run = Run::new(Settings::small(norm, &corpus), &corpus, &Device::Cpu)?;
            run.step()?;
            let before = bits(&run);
            let loss = run.evaluate(&corpus.val, 2)?;
            assert_eq!(run.evaluate(&corpus.val, 2)?, loss, "{norm}");
            assert_eq!(bits(&run), before, "{norm}");
            assert!(run.state.mode.is_training());
        }
        Ok(())
    }

    /// Without a layer-scale PN and PN-V fold away, and the loss changes by rounding errors only.
    /// Others do not fold.
    #[test]
    fn normalizations_that_fold_leave_the_loss() -> Result<()> {
        let corpus = corpus();
        for &norm in Norm::value_variants() {
            for groups in [None, Some(2)] {
                let mut settings = Settings::small(norm, &corpus);
                settings.norm.groups = groups;
                let mut run = Run::new(settings, &corpus, &Device::Cpu)?;
                for _ in 0..settings.norm.warmup_steps + 2 {
                    run.step()?;
                }
                let loss = run.evaluate(&corpus.val, 2)?;
                let folded = run.evaluate_folded(&corpus.val, 2)?;
                match folded {
                    // Each layer rounds a few sums of 8 to 32 terms in another order.
                    Some(folded) => assert!((folded - loss).abs() < 1e-5 * loss, "{norm}"),
                    None => assert!(!norm.is_power() || groups.is_some(), "{norm}"),
                }
                assert!(folded.is_none() || groups.is_none(), "{norm}");
            }
        }
        Ok(())
    }

    /// The loss falls in a short run of every normalization, and its checkpoint is the run.
    #[test]
    fn learns() -> Result<()> {
        let corpus = corpus();
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("run.safetensors");
        for &norm in Norm::value_variants() {
            let settings = Settings {
                steps: 200,
                ..Settings::small(norm, &corpus)
            };
            let mut run = Run::new(settings, &corpus, &Device::Cpu)?;
            while run.state.steps() < settings.steps {
                run.step()?;
            }
            let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
            let (first, last) = run.state.history.train.split_at(10);
            let (first, last) = (mean(first), mean(&last[last.len() - 10..]));
            assert!(last < first - 0.1, "{norm}: {first} to {last}");

            run.save(&path)?;
            let mut loaded = Run::new(settings, &corpus, &Device::Cpu)?;
            loaded.load(&path)?;
            assert_eq!(bits(&loaded), bits(&run), "{norm}");
            let loss = |run: &Run| run.evaluate(&corpus.val, 2);
            assert_eq!(loss(&loaded)?, loss(&run)?, "{norm}");
        }
        Ok(())
    }

    /// Losses differ by roundings only, and the CPU continues from the GPU's checkpoint.
    #[cfg(feature = "cuda")]
    #[test]
    fn a_gpu_takes_the_steps_of_the_cpu() -> Result<()> {
        let corpus = corpus();
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("run.safetensors");
        let gpu = Device::new_cuda(0)?;
        for &norm in Norm::value_variants() {
            let settings = Settings::small(norm, &corpus);
            let mut on_gpu = Run::new(settings, &corpus, &gpu)?;
            let mut on_cpu = Run::new(settings, &corpus, &Device::Cpu)?;
            for step in 0..settings.steps {
                let (got, expected) = (on_gpu.step()?, on_cpu.step()?);
                assert!(
                    (got - expected).abs() < 1e-4 * expected,
                    "{norm}, step {step}: {got} and {expected}"
                );
            }
            on_gpu.save(&path)?;
            on_cpu.load(&path)?;
            assert_eq!(bits(&on_cpu), bits(&on_gpu), "{norm}");
        }
        Ok(())
    }

    /// In evaluation.
    #[test]
    fn no_position_sees_its_future() -> Result<()> {
        let corpus = corpus();
        for &norm in Norm::value_variants() {
            let run = Run::new(Settings::small(norm, &corpus), &corpus, &Device::Cpu)?;
            let _guard = run.state.mode.eval_scope();
            let logits = |tokens: [u32; 4]| -> Result<Vec<Vec<f32>>> {
                let tokens = Tensor::new(&[tokens], &run.state.device)?;
                Ok(run
                    .model
                    .forward(&tokens, &Dropout::none())?
                    .get(0)?
                    .to_vec2()?)
            };
            let (one, other) = (logits([1, 2, 3, 4])?, logits([1, 2, 5, 4])?);
            assert_eq!(one[..2], other[..2], "{norm}");
            assert_ne!(one[2], other[2], "{norm}");
            assert_ne!(one[3], other[3], "{norm}");
        }
        Ok(())
    }

    #[test]
    fn a_loss_that_is_no_number_stops_the_run() -> Result<()> {
        let corpus = corpus();
        let mut run = Run::new(Settings::small(Norm::Layer, &corpus), &corpus, &Device::Cpu)?;
        let positions = &variables(&run.state.varmap)["positions.weight"];
        positions.set(&(positions.ones_like()? * f64::NAN)?)?;
        let error = run.step().unwrap_err();
        assert_eq!(error.to_string(), "the loss is NaN at step 0");
        let error = run.evaluate(&corpus.val, 2).unwrap_err();
        assert_eq!(error.to_string(), "the loss is NaN in evaluation at step 0");
        Ok(())
    }
}
