//! The parts of a training run that do not depend on its model, and the loop that trains.

use super::checkpoint::{Checkpoint, History, variables};
use super::measure::{Observations, Snapshot};
use super::norm::{NormConfig, is_buffer};
use super::optim::{AdamW, AdamWConfig};
use anyhow::{Context, Result};
use candle::{Device, Tensor};
use candle_nn::VarMap;
use candle_powernorm::Mode;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{error, fmt};

/// A loss that is no number.
#[derive(Debug, Clone, Copy)]
pub struct Diverged {
    loss: f32,
    step: usize,
    in_evaluation: bool,
}

impl fmt::Display for Diverged {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let place = if self.in_evaluation {
            " in evaluation"
        } else {
            ""
        };
        write!(f, "the loss is {}{place} at step {}", self.loss, self.step)
    }
}

impl error::Error for Diverged {}

/// The variables of a run and all that belongs to them.
pub struct State {
    pub norm: NormConfig,
    pub device: Device,
    /// All normalizations of the model follow it.
    pub mode: Mode,
    pub varmap: VarMap,
    pub optimizer: AdamW,
    /// Losses with dropout and smoothing in training, and plain ones in validation.
    pub history: History,
    /// `None` where nothing is observed.
    pub observations: Option<Observations>,
    /// Steps between two points of the observed series.
    pub observe_every: usize,
    /// Time spent in steps, without evaluations and observations.
    pub elapsed: Duration,
}

impl State {
    /// The state of a new run with the model whose variables are in `varmap`.
    pub fn new(
        norm: NormConfig,
        device: &Device,
        mode: Mode,
        varmap: VarMap,
        optimizer: AdamWConfig,
    ) -> Result<Self> {
        let parameters = variables(&varmap)
            .into_iter()
            .filter(|(name, _)| !is_buffer(name));
        Ok(Self {
            norm,
            device: device.clone(),
            mode,
            optimizer: AdamW::new(parameters, optimizer)?,
            varmap,
            history: History::default(),
            observations: None,
            observe_every: 1,
            elapsed: Duration::ZERO,
        })
    }

    /// Steps made so far.
    pub fn steps(&self) -> usize {
        self.optimizer.steps
    }

    /// Numbers that the optimizer moves.
    pub fn parameters(&self) -> usize {
        let slots = self.optimizer.slots.iter();
        slots.map(|slot| slot.var.elem_count()).sum()
    }

    /// The normalizations before a step that is observed.
    pub fn snapshot(&self) -> Result<Option<Snapshot>> {
        let observed = self.observations.as_ref();
        observed.map(|_| Snapshot::of(&self.varmap)).transpose()
    }

    /// Observes a step of `rows` real tokens between its gradients and its update.
    pub fn observe(
        &mut self,
        before: Option<Snapshot>,
        rows: usize,
        gradients: &[Tensor],
    ) -> Result<()> {
        let recorded = self.steps().is_multiple_of(self.observe_every);
        if let (Some(observations), Some(before)) = (&mut self.observations, before) {
            let states = [&before, &Snapshot::of(&self.varmap)?];
            let (optimizer, norm) = (&self.optimizer, &self.norm);
            observations.observe(optimizer, norm, rows, states, gradients, recorded)?;
        }
        Ok(())
    }

    /// Moves the parameters, if the loss is a number.
    pub fn update(&mut self, loss: f32, gradients: &[Tensor], rate: f64) -> Result<()> {
        self.finite(loss, false)?;
        self.optimizer.step(gradients, rate)?;
        self.history.train.push(loss);
        Ok(())
    }

    /// The `loss` of an evaluation, if it is a number.
    pub fn evaluated(&self, loss: f32) -> Result<f32> {
        self.finite(loss, true)
    }

    fn finite(&self, loss: f32, in_evaluation: bool) -> Result<f32> {
        let step = self.steps();
        match loss.is_finite() {
            true => Ok(loss),
            false => Err(Diverged {
                loss,
                step,
                in_evaluation,
            }
            .into()),
        }
    }

    /// Writes everything that the future of the run with these `settings` depends on, and `notes`.
    pub fn save(&self, path: &Path, settings: &Value, notes: &[(&str, String)]) -> Result<()> {
        let (varmap, optimizer, history) = (&self.varmap, &self.optimizer, &self.history);
        let mut checkpoint = Checkpoint::new(settings, varmap, optimizer, history, self.elapsed)?;
        let observations = serde_json::to_string(&self.observations)?;
        checkpoint.notes.insert("observations".into(), observations);
        let notes = notes.iter().cloned();
        (checkpoint.notes).extend(notes.map(|(key, note)| (key.to_string(), note)));
        checkpoint.write(path)
    }

    /// Takes up the run that [`save`](Self::save) wrote to `path`, and gives its notes.
    pub fn load(&mut self, path: &Path, settings: &Value) -> Result<Checkpoint> {
        let mut load = || -> Result<Checkpoint> {
            let (varmap, optimizer) = (&self.varmap, &mut self.optimizer);
            let mut checkpoint = Checkpoint::restore(path, settings, varmap, optimizer)?;
            (self.history, self.elapsed) = checkpoint.take_history()?;
            if self.observations.is_some() {
                self.observations = serde_json::from_str(checkpoint.note("observations")?)?;
            }
            Ok(checkpoint)
        };
        load().with_context(|| format!("cannot resume from {}", path.display()))
    }
}

/// A run that [`train`] trains.
pub trait Train {
    fn state(&self) -> &State;

    /// Makes one update of the parameters, and gives the loss before it.
    fn step(&mut self) -> Result<f32>;

    /// The loss on the validation split, which the history then has.
    fn validate(&mut self) -> Result<f32>;

    fn save(&self, path: &Path) -> Result<()>;

    /// Tokens trained on so far.
    fn tokens(&self) -> u64;

    /// Tokens trained on in a second.
    fn speed(&self) -> f64 {
        self.tokens() as f64 / self.state().elapsed.as_secs_f64()
    }
}

/// The way of a run to its end.
pub struct Plan {
    /// The run's name on the screen.
    pub name: String,
    pub steps: usize,
    pub eval_every: usize,
    /// Evaluates after the last step too.
    pub at_end: bool,
    pub checkpoint: PathBuf,
}

/// Makes the steps that are left. Each evaluation also writes the checkpoint, after `evaluated`.
pub fn train<R: Train>(
    run: &mut R,
    plan: &Plan,
    evaluated: impl Fn(&R) -> Result<()>,
) -> Result<()> {
    let Plan {
        name,
        steps,
        eval_every,
        at_end,
        checkpoint,
    } = plan;
    let bar = bar(name, *steps)?.with_position(run.state().steps() as u64);
    bar.reset_eta();
    while run.state().steps() < *steps {
        let loss = run.step()?;
        let speed = run.speed();
        bar.set_message(format!("loss {loss:.3}, {speed:.0} tokens/s"));
        bar.inc(1);
        let step = run.state().steps();
        let evaluates = match step == *steps {
            true => *at_end,
            false => step.is_multiple_of(*eval_every),
        };
        if evaluates {
            let val_loss = run.validate()?;
            evaluated(run)?;
            run.save(checkpoint)?;
            bar.suspend(|| {
                eprintln!(
                    "{name:8} step {step:5}: loss {loss:.4}, validation loss {val_loss:.4}, \
                     {speed:.0} tokens/s"
                )
            });
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// A progress bar of `length`.
pub fn bar(name: &str, length: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{prefix:8} {wide_bar} {pos}/{len} {msg} [{eta}]")?;
    Ok(ProgressBar::new(length as u64)
        .with_style(style)
        .with_prefix(name.to_string()))
}
