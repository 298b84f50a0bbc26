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
use crate::device::pick::{readable, DeviceKind};
use crate::device::{
    BackwardInputs, DeviceStep, ForwardInputs, Gradients, Outputs, RunningNu, Setting,
};
use crate::loss_scale::LossScale;
use crate::mode::Purpose;
use crate::ranks::{Exchange, Member, Turn};
use crate::state::State;
use candle::{Result, Tensor};
use std::sync::Arc;

/// A forward that is about to run. Its arguments are checked, and in a layout that its device
/// reads.
pub(crate) struct Call<'a> {
    pub device: &'a DeviceKind,
    pub config: PowerNormConfig,
    pub kind: ForwardKind,
    /// `[.., C]`.
    pub xs: Tensor,
    /// Added to `xs` first.
    pub residual: Option<Tensor>,
    /// The padding mask: `xs` without its last dimension.
    pub keep: Option<Tensor>,
    /// γ and β, `[C]`.
    pub affine: Option<[Tensor; 2]>,
    /// ψ² before the step, `[C]`. Without it D is 1.
    pub phi: Option<Tensor>,
}

/// The state that a training forward and its backward move.
pub(crate) struct Training {
    pub state: Arc<State>,
    /// Training or recalibration.
    pub purpose: Purpose,
    /// t before the step.
    pub steps: usize,
    pub loss_scale: LossScale,
    /// `None` if there is no other rank.
    pub ranks: Option<Member>,
}

impl Call<'_> {
    /// γ and β.
    pub fn affine(&self) -> Option<[&Tensor; 2]> {
        self.affine.as_ref().map(|affine| affine.each_ref())
    }
}

/// A forward that ran, and what its backward needs.
pub(crate) struct Step {
    device: Box<dyn DeviceStep>,
    training: Option<Training>,
    keep: Option<Tensor>,
}

impl Step {
    /// Runs a forward. `training` is `None` for an evaluation, and `turn` without other ranks.
    /// `tracked` says whether a backward may follow. [`commit_forward`](Self::commit_forward) then
    /// moves the state.
    pub fn forward(
        call: &Call,
        training: Option<Training>,
        turn: Option<Turn>,
        tracked: bool,
    ) -> Result<(Self, Outputs)> {
        let setting = Setting {
            config: call.config,
            kind: call.kind,
            over_ranks: turn.is_some(),
            tracked,
        };
        let inputs = ForwardInputs {
            x: &call.xs,
            residual: call.residual.as_ref(),
            keep: call.keep.as_ref(),
            affine: call.affine(),
            phi: call.phi.as_ref(),
        };
        let (mut device, mut outputs) = call.device.forward(setting, &inputs)?;
        if let (Some(turn), Some(training)) = (turn, &training) {
            let global = turn.sum(&device.local_sums()?, training.steps)?;
            device.set_global_sums(&global)?;
        }
        if call.kind == ForwardKind::BatchStatistic {
            outputs = device.normalize_by_batch(&inputs, outputs)?;
        }
        let step = Self {
            device,
            training,
            keep: call.keep.clone(),
        };
        Ok((step, outputs))
    }

    /// Moves ψ² and t. The caller has its output by then.
    pub fn commit_forward(&self) -> Result<()> {
        let Some(training) = self.counted() else {
            return Ok(());
        };
        (training.state).update_phi(training.purpose, |phi, step| {
            self.device.update_phi(phi, step)
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
        let mut backward = self.device.backward(&BackwardInputs {
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
        if let (Some(turn), Some(training)) = (turn, training) {
            let global = turn.sum(&backward.local_sums()?, training.steps)?;
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
        self.training.as_ref().filter(|_| self.device.is_step())
    }
}
