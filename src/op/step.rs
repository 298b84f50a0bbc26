//! The life of a step: a forward and its backward, on one rank or on many.
//!
//! A training forward sums over the rows of a batch, and these sums move ψ². Its backward sums too,
//! and these sums move ν. If several ranks have rows of one batch, each call first adds its sums up
//! over the ranks, in an exchange. All ranks come to the same exchanges in the same order. A rank
//! whose call fails before its exchange tells the others, when its [`Turn`] is dropped.
//!
//! A call that fails before its state moves changes nothing. Checks and the exchange come first,
//! and on an NVIDIA GPU so do allocations and the loading of kernels. A call that fails later, in
//! the driver or among candle's own operations, may have moved the state. Nothing is pending
//! between calls.

use super::{as_bytes, readable};
use crate::config::{ForwardKind, PowerNormConfig};
use crate::device::pick::DeviceKind;
use crate::device::{
    BackwardInputs, DeviceStep, ForwardInputs, Gradients, Outputs, RunningNu, Setting,
};
use crate::loss_scale::LossScale;
use crate::mode::Purpose;
use crate::ranks::{Exchange, Member, Turn};
use crate::state::State;
use candle::{Result, Tensor};
use std::sync::Arc;

/// A forward that is about to run, on arguments that the layer has checked.
pub(crate) struct Call<'a> {
    pub device: &'a DeviceKind,
    pub config: &'a PowerNormConfig,
    /// `[.., C]`.
    pub xs: &'a Tensor,
    /// Added to `xs` first.
    pub residual: Option<&'a Tensor>,
    /// The padding mask: `xs` without its last dimension.
    pub keep: Option<&'a Tensor>,
    /// γ, `[C]`.
    pub weight: Option<&'a Tensor>,
    /// β, `[C]`.
    pub bias: Option<&'a Tensor>,
    /// ψ² and t. `None` for the group scaling alone, whose D is 1.
    pub state: Option<&'a State>,
    /// `None` in an evaluation.
    pub training: Option<Training>,
    /// `None` without other ranks.
    pub turn: Option<Turn<'a>>,
}

impl Call<'_> {
    /// Reads ψ² and t, and brings the arguments into a layout that their device reads. Returns t
    /// last.
    fn begin(&self) -> Result<(Setting, ForwardInputs, usize)> {
        let (phi, steps) = match self.state {
            Some(state) => {
                let rows = self.xs.device();
                let in_place = self.device.reads_phi_in_place(rows, state.device());
                let (phi, steps) = state.begin(in_place)?;
                (Some(phi), steps)
            }
            None => (None, 0),
        };
        let arguments = [Some(self.xs), self.residual, self.weight, self.bias];
        let setting = Setting {
            config: *self.config,
            kind: match self.training.as_ref().map(|training| training.purpose) {
                None | Some(Purpose::Evaluation) => ForwardKind::Evaluation,
                Some(Purpose::Training) => self.config.kind_at(steps + 1),
                Some(Purpose::Recalibration(_)) => ForwardKind::BatchStatistic,
            },
            over_ranks: self.turn.is_some(),
            tracked: arguments.into_iter().flatten().any(Tensor::track_op),
        };
        let is_own = |rows: &Tensor| self.state.is_some_and(|state| state.owns(rows));
        let readable = |rows: &Tensor| match setting.kind.is_training() && is_own(rows) {
            // ψ² and ν move before these rows are read for the last time.
            true => rows.force_contiguous(),
            false => readable(rows),
        };
        let inputs = ForwardInputs {
            x: readable(self.xs)?,
            residual: self.residual.map(readable).transpose()?,
            keep: self.keep.map(as_bytes).transpose()?,
            weight: self.weight.map(Tensor::contiguous).transpose()?,
            bias: self.bias.map(Tensor::contiguous).transpose()?,
            phi,
        };
        Ok((setting, inputs, steps))
    }
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
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

impl Step {
    /// Runs a forward, which moves ψ² and t. Returns its inputs as the device read them, and its
    /// outputs.
    pub fn forward(call: Call) -> Result<(Arc<Self>, ForwardInputs, Outputs)> {
        let (setting, inputs, steps) = call.begin()?;
        let (device_step, mut outputs) = call.device.forward(setting, &inputs)?;
        let mut step = Self {
            device_step,
            training: call.training,
            steps,
            keep: inputs.keep.clone(),
            weight: inputs.weight.clone(),
            bias: inputs.bias.clone(),
        };
        if let Some(turn) = call.turn {
            let global = turn.sum(&step.device_step.local_sums()?, steps)?;
            step.device_step.set_global_sums(&global)?;
        }
        if let (true, Some(training)) = (step.device_step.is_step(), &step.training) {
            (training.state).update_phi(training.purpose, |phi, shares| {
                step.device_step.update_phi(phi, shares)
            })?;
        }
        if setting.kind == ForwardKind::BatchStatistic {
            outputs = step.device_step.normalize_by_batch(&inputs, outputs)?;
        }
        Ok((Arc::new(step), inputs, outputs))
    }

    /// Runs a backward, which moves ν. `x` is what was normalized, `dy` the gradient of the output,
    /// and `dsum` the gradient of the sum with a residual.
    pub fn backward(
        &self,
        x: &Tensor,
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
            weight: self.weight.as_ref(),
            bias: self.bias.as_ref(),
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
        match training.filter(|training| training.purpose == Purpose::Training) {
            Some(training) => (training.state).update_nu(|nu| backward.update_nu(Some(nu)))?,
            None => backward.update_nu(None)?,
        }
        backward.gradients()
    }

    /// The state to move, if this forward counts as a step. A batch without a kept row does not.
    fn counted(&self) -> Option<&Training> {
        self.training
            .as_ref()
            .filter(|_| self.device_step.is_step())
    }
}
