//! The life of a step: a forward and its backward, on one rank or on many.
//!
//! A training forward sums over the rows of a batch, and these sums move ψ². Its backward sums too,
//! and these sums move ν. If several ranks have rows of one batch, each call first adds its sums up
//! over the ranks, in an exchange. All ranks come to the same exchanges in the same order. A rank
//! whose call fails before its exchange tells the others, when its [`Turn`] is dropped.
//!
//! A forward that fails leaves the state as it was, and a backward that fails leaves ν as it was.
//! Nothing is pending between calls.

use crate::config::{ForwardKind, PowerNormConfig};
use crate::device::pick::{readable, Arguments, DeviceKind};
use crate::device::{BackwardInputs, DeviceStep, ForwardInputs, Gradients, Outputs, RunningNu};
use crate::loss_scale::LossScale;
use crate::mode::Purpose;
use crate::ranks::{Exchange, Member, Turn};
use crate::state::State;
use candle::{Result, Tensor};
use std::sync::Arc;

/// A forward that is about to run.
pub(crate) struct Call<'a> {
    pub device: &'a DeviceKind,
    pub config: &'a PowerNormConfig,
    pub arguments: Arguments<'a>,
    /// ψ² and t. `None` for the group scaling alone, whose D is 1.
    pub state: Option<&'a State>,
    /// `None` in an evaluation.
    pub training: Option<Training>,
    /// `None` without other ranks.
    pub turn: Option<Turn<'a>>,
}

/// The state that a training forward and its backward move.
pub(crate) struct Training {
    pub state: Arc<State>,
    /// Training or recalibration.
    pub purpose: Purpose,
    pub loss_scale: LossScale,
    /// `None` if there is no other rank.
    pub ranks: Option<Member>,
}

/// A forward that ran, and what its backward needs.
pub(crate) struct Step {
    device_step: Box<dyn DeviceStep>,
    training: Option<Training>,
    /// t before the step.
    steps: usize,
    keep: Option<Tensor>,
}

impl Step {
    /// Runs a forward. Returns its inputs as the device read them, and its outputs.
    /// [`commit_forward`](Self::commit_forward) then moves the state.
    pub fn forward(call: Call) -> Result<(Arc<Self>, ForwardInputs, Outputs)> {
        let purpose = (call.training.as_ref()).map_or(Purpose::Evaluation, |it| it.purpose);
        let over_ranks = call.turn.is_some();
        let ran = (call.device).forward(
            &call.arguments,
            call.config,
            purpose,
            call.state,
            over_ranks,
        )?;
        let (mut device_step, inputs, mut outputs) = (ran.step, ran.inputs, ran.outputs);
        if let Some(turn) = call.turn {
            let global = turn.sum(&device_step.local_sums()?, ran.steps)?;
            device_step.set_global_sums(&global)?;
        }
        if ran.kind == ForwardKind::BatchStatistic {
            outputs = device_step.normalize_by_batch(&inputs, outputs)?;
        }
        let step = Self {
            device_step,
            training: call.training,
            steps: ran.steps,
            keep: inputs.keep.clone(),
        };
        Ok((Arc::new(step), inputs, outputs))
    }

    /// Moves ψ² and t. The caller has its output by then.
    pub fn commit_forward(&self) -> Result<()> {
        let Some(training) = self.counted() else {
            return Ok(());
        };
        (training.state).update_phi(training.purpose, |phi, step| {
            self.device_step.update_phi(phi, step)
        })
    }

    /// Runs a backward, which moves ν. `x` is what was normalized, `dy` the gradient of the output,
    /// and `dsum` the gradient of the sum with a residual.
    pub fn backward(
        &self,
        x: &Tensor,
        affine: Option<[&Tensor; 2]>,
        dy: &Tensor,
        dsum: Option<&Tensor>,
        wants_input: bool,
    ) -> Result<Gradients> {
        let training = self.counted();
        let ranks = training.and_then(|training| training.ranks.as_ref());
        let turn = ranks.map(|ranks| ranks.turn(Exchange::Backward));
        let (dy, dsum) = (readable(dy)?, dsum.map(readable).transpose()?);
        let mut backward = self.device_step.backward(&BackwardInputs {
            x,
            dy: &dy,
            dsum: dsum.as_ref(),
            keep: self.keep.as_ref(),
            affine,
            running: training.map(|training| RunningNu {
                ema_gz: training.state.nu_variable(),
                loss_scale: training.loss_scale.get(),
            }),
            wants_input,
        })?;
        if let Some(turn) = turn {
            let global = turn.sum(&backward.local_sums()?, self.steps)?;
            backward.set_global_sums(&global)?;
        }
        let updates_nu = training.filter(|training| training.purpose == Purpose::Training);
        backward.finish(updates_nu.is_some())?;
        if let Some(training) = updates_nu {
            (training.state).update_nu(|ema_gz| backward.update_nu(ema_gz))?;
        }
        Ok(backward.gradients())
    }

    /// The state to move, if this forward counts as a step. A batch without a kept row does not.
    fn counted(&self) -> Option<&Training> {
        self.training
            .as_ref()
            .filter(|_| self.device_step.is_step())
    }
}
