//! The life of a training step, from its forward to its backward, on one rank or on many.
//!
//! A training forward sums over the rows of a batch, and these sums move ψ². Its backward sums too,
//! and these sums move ν. Where several ranks have rows of one batch, every sum is first added up
//! over the ranks, in an *exchange*. All ranks come to the same exchanges in the same order.
//!
//! # When ranks meet
//!
//! - While the batch's statistic normalizes, a forward exchanges its sums before it writes its
//!   output. Its backward exchanges the sums of the backward.
//! - After the warm-up no output depends on the batch. The forward's sums wait, and go with the
//!   backward's sums in one exchange. Recipe Fairseq needs the forward's sums before the
//!   backward's, and makes two exchanges.
//! - A forward that no backward followed is settled by the next training forward.
//!
//! # The life of a step
//!
//! ```text
//!                     forward
//!       ┌────────────────┼────────────────────────┐
//!  an evaluation   its sums are in       other ranks' sums are to come
//!       │                ▼                        ▼
//!       │              Known ◄──── exchange ──── Waits ──── exchange fails on a GPU ───► Lost
//!       ▼                │
//!    Settled ◄───────────┘ ψ² moves
//! ```
//!
//! # After a failure
//!
//! - *A call that is refused* does not come to its exchange. A check refuses it, or memory runs out
//!   before the device starts. The rank tells the others instead, and all of them fail: [`begin`].
//! - *An exchange that fails on the CPU* fails on all ranks, because ranks announce what they bring
//!   before they sum. The step still waits, so the backward can be called again. If it is not, the
//!   next training forward skips the step, on all ranks. After a refused call or a disagreement it
//!   also skips every other step that waited then: [`LayerRanks::failures`].
//! - *An exchange that fails on a GPU* may have failed on one rank only. On a GPU ranks announce
//!   nothing, because the host would have to wait for the GPU to learn of an announcement. A step
//!   whose sums were in that exchange is lost, and its backward is refused.
//! - *A state that cannot move* fails the call. The sums are in by then, so the backward can be
//!   called again.
//! - *A state that was reset, or loaded with another t,* between a forward and its exchange keeps
//!   ψ² and t. A backward still moves ν.
//! - *A backward that failed* leaves the step out, unless it is called again. Where ψ² had moved by
//!   then, only ν is left out.

use super::Request;
use crate::config::{ForwardKind, PowerNormConfig, Recipe};
use crate::device::{BackwardInputs, DeviceStep, ForwardInputs, Gradients, Outputs, Setting};
use crate::error::Error;
use crate::mode::Purpose;
use crate::ranks::{Exchange, LayerRanks};
use crate::state::{State, Version};
use candle::{Result, Tensor};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where a step is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    /// Nothing is pending.
    Settled,
    /// The sums of the whole batch are in. ψ² has yet to move.
    Known,
    /// The sums of other ranks are still to come.
    Waits,
    /// The sums went into an exchange that failed.
    Lost,
}

impl Life {
    /// The sums of the whole batch have come in.
    fn take_sums(&mut self) {
        if *self == Self::Waits {
            *self = Self::Known;
        }
    }
}

/// A forward, and the step of the state that belongs to it.
pub(crate) struct Step {
    device: Box<dyn DeviceStep>,
    config: PowerNormConfig,
    purpose: Purpose,
    shared: bool,
    ranks: LayerRanks,
    /// [`LayerRanks::failures`] before it.
    failures: usize,
    /// The version of the state before it.
    version: Version,
    /// Locked during exchanges and while ψ² moves, but never while rows are processed.
    life: Mutex<Life>,
}

/// Runs `prepare`, which is what can fail before the device starts: checks and copies.
///
/// In training it first applies the pending step, and tells the other ranks if `prepare` fails.
pub(crate) fn begin<R>(request: &Request, prepare: impl FnOnce() -> Result<R>) -> Result<R> {
    if request.purpose == Purpose::Evaluation {
        return prepare();
    }
    // The other ranks settle too, before they come to an exchange of this forward.
    let settled = request.state.waiting().settle(request.state);
    let prepared = settled.and_then(|()| prepare());
    if prepared.is_err() {
        request.ranks.fail(&request.state.sums_device());
    }
    prepared
}

impl Step {
    /// Runs a forward. Its step is taken by [`finish_forward`](Self::finish_forward).
    pub fn forward(
        request: &Request,
        inputs: &ForwardInputs,
        tracked: bool,
        version: Version,
    ) -> Result<(Self, Outputs)> {
        let (purpose, state, ranks) = (request.purpose, request.state, request.ranks);
        let config = *state.config();
        let kind = match purpose {
            Purpose::Evaluation => ForwardKind::Evaluation,
            Purpose::Training => config.kind_at(version.steps + 1),
            Purpose::Recalibration(_) => ForwardKind::BatchStatistic,
        };
        let shared = kind.is_training() && !ranks.is_alone();
        if shared {
            compare(state, ranks, kind, version)?;
        }
        let setting = Setting {
            config,
            kind,
            shared,
            tracked,
        };
        let mut device = state.device_kind().step(inputs.x, setting)?;
        let mut outputs = device.forward(inputs)?;
        if kind == ForwardKind::BatchStatistic {
            if shared {
                device.take_sums(&ranks.sum(Exchange::Forward, &device.sums()?)?)?;
            }
            outputs = device.finish_forward(inputs, outputs)?;
        }
        let life = match kind {
            ForwardKind::Evaluation => Life::Settled,
            ForwardKind::RunningStatistic if shared => Life::Waits,
            _ => Life::Known,
        };
        let step = Self {
            device,
            config,
            purpose,
            shared,
            ranks: ranks.clone(),
            failures: ranks.failures(),
            version,
            life: Mutex::new(life),
        };
        Ok((step, outputs))
    }

    /// Moves ψ² and t now, or defers that until the other ranks' sums arrive. The caller has its
    /// output by then.
    pub fn finish_forward(self: &Arc<Self>, state: &State) -> Result<()> {
        if *self.life() == Life::Waits {
            state.waiting().put(self.clone());
            return Ok(());
        }
        self.move_phi(state)
    }

    /// Runs a backward, which also moves ψ² and t if that was deferred.
    pub fn backward(&self, state: &State, inputs: &BackwardInputs) -> Result<Gradients> {
        let gradients = self.backward_phases(state, inputs);
        // The step is done, or it failed. Either way it is no longer pending.
        self.leave_out(state);
        gradients
    }

    /// Skips the step, unless its backward is called again.
    pub fn leave_out(&self, state: &State) {
        state.waiting().forget(self);
    }

    fn backward_phases(&self, state: &State, inputs: &BackwardInputs) -> Result<Gradients> {
        if self.config.recipe == Recipe::Fairseq {
            // Its divisor is the batch's.
            self.take_forward_sums()?;
        }
        if *self.life() == Life::Lost {
            return Err(Error::StepLost.into());
        }
        let mut backward = self.device.backward(inputs)?;
        if self.shared {
            if let Some(sums) = backward.sums()? {
                let mut life = self.life();
                let exchange = match *life {
                    Life::Waits => Exchange::Both,
                    _ => Exchange::Backward,
                };
                let total = self.exchange(&mut life, exchange, &sums)?;
                backward.take_sums(&total)?;
                life.take_sums();
            }
        }
        // The state's lock is not held while ranks wait for each other.
        self.move_phi(state)?;
        let moves_nu = self.purpose == Purpose::Training;
        backward.finish(moves_nu)?;
        if moves_nu {
            state.move_nu(|ema_gz| backward.move_nu(ema_gz))?;
        }
        Ok(backward.gradients())
    }

    /// Moves ψ² and t without a backward.
    fn settle(&self, state: &State) -> Result<()> {
        // A rank did not come to a sum since then, or ranks disagreed: all ranks skip this step.
        if self.ranks.failures() != self.failures {
            return Ok(());
        }
        self.take_forward_sums()?;
        self.move_phi(state)
    }

    /// Exchanges the forward's sums, if they still wait.
    fn take_forward_sums(&self) -> Result<()> {
        let mut life = self.life();
        if *life == Life::Waits {
            let sums = self.device.sums()?;
            let total = self.exchange(&mut life, Exchange::Forward, &sums)?;
            self.device.take_sums(&total)?;
            life.take_sums();
        }
        Ok(())
    }

    /// Adds up `sums` over all ranks.
    fn exchange(&self, life: &mut Life, exchange: Exchange, sums: &Tensor) -> Result<Tensor> {
        let total = self.ranks.sum(exchange, sums);
        if *life == Life::Waits && total.is_err() && !sums.device().is_cpu() {
            *life = Life::Lost;
        }
        total
    }

    /// Moves ψ² and t, once, when the sums are in.
    fn move_phi(&self, state: &State) -> Result<()> {
        let mut life = self.life();
        if *life != Life::Known {
            return Ok(());
        }
        if self.shared && state.version()? != self.version {
            // The state was replaced, so this step does not move it. The backward still needs the
            // batch's statistics.
            self.device.move_phi(state.phi_variable(), None)?;
        } else {
            state.move_phi(self.purpose, |phi, step| {
                self.device.move_phi(phi, Some(step))
            })?;
        }
        *life = Life::Settled;
        Ok(())
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Compares the ranks before a layer's first exchange on a GPU, where ranks announce nothing.
fn compare(state: &State, ranks: &LayerRanks, kind: ForwardKind, version: Version) -> Result<()> {
    let device = state.sums_device();
    if device.is_cpu() {
        return Ok(());
    }
    let config = state.config();
    let of_forward = match config.recipe {
        Recipe::Paper => state.size() + 1,
        Recipe::Fairseq => 2 * (state.size() + 1),
    };
    let (exchange, numbers) = match (kind, config.recipe) {
        (ForwardKind::RunningStatistic, Recipe::Paper) => {
            (Exchange::Both, state.size() + of_forward)
        }
        _ => (Exchange::Forward, of_forward),
    };
    ranks.compare(exchange, numbers, config, version.steps, &device)
}

/// The pending step of a layer: it waits for other ranks' sums. `None` if there is no such step.
#[derive(Default)]
pub(crate) struct Waiting(Mutex<Option<Arc<Step>>>);

impl Waiting {
    fn put(&self, step: Arc<Step>) {
        *self.lock() = Some(step);
    }

    /// Applies the pending step.
    fn settle(&self, state: &State) -> Result<()> {
        let step = self.lock().take();
        step.map_or(Ok(()), |step| step.settle(state))
    }

    /// Forgets this step, if it is pending.
    fn forget(&self, step: &Step) {
        self.lock()
            .take_if(|waiting| std::ptr::eq(Arc::as_ptr(waiting), step));
    }

    /// Forgets the pending step.
    pub fn clear(&self) {
        self.lock().take();
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Step>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Waiting")
    }
}
