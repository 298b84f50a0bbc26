//! The life of a step: a forward and its backward, on one rank or on many.
//!
//! A training forward sums over the rows of a batch, and these sums move ψ². Its backward sums too,
//! and these sums move ν. If several ranks have rows of one batch, each call first adds its sums up
//! over the ranks, in an exchange. All ranks come to the same exchanges in the same order. A rank
//! whose call fails before its exchange tells the others, when its [`Turn`] is dropped.
//!
//! The [device](crate::device) computes a step, in its order. Through [`StepEnv`] it exchanges
//! sums, moves ψ² and ν under the state's lock, and counts the step. Nothing is pending between
//! calls.

use super::{as_bytes, readable};
use crate::config::{ForwardKind, PhiStep, Recipe};
use crate::device::pick::DeviceKind;
use crate::device::{Env, Gradients, Nu, Outputs, Pass, Saved, Wanted};
use crate::loss_scale::LossScale;
use crate::mode::Purpose;
use crate::ranks::{Exchange, Member, Turn};
use crate::state::State;
use candle::{Result, Tensor, Var};
use std::sync::Arc;

/// A forward that is about to run, on arguments that the layer has checked.
pub(crate) struct Call<'a> {
    pub device: &'a DeviceKind,
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
    /// G of the group scaling; `None` without it.
    pub groups: Option<usize>,
    pub eps: f64,
    pub recipe: Recipe,
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

impl Call<'_> {
    /// Reads ψ² and t, and brings the arguments into a layout that their device reads. Returns t
    /// last.
    fn pass(&self) -> Result<(Pass, usize)> {
        let (mut phi, mut step_count, mut kind) = (None, 0, ForwardKind::Evaluation);
        if let Some(state) = self.state {
            let rows = self.xs.device();
            let in_place = self.device.reads_phi_in_place(rows, state.device());
            let (before, t) = state.begin(in_place)?;
            (phi, step_count) = (Some(before), t);
            kind = match self.training.as_ref().map(|training| training.purpose) {
                None | Some(Purpose::Evaluation) => ForwardKind::Evaluation,
                Some(Purpose::Training) => state.config().kind_at(t + 1),
                Some(Purpose::Recalibration(_)) => ForwardKind::BatchStatistic,
            };
        }
        let is_own = |rows: &Tensor| self.state.is_some_and(|state| state.owns(rows));
        let readable = |rows: &Tensor| match kind.is_training() && is_own(rows) {
            // ψ² and ν move before these rows are read for the last time.
            true => rows.force_contiguous(),
            false => readable(rows),
        };
        let arguments = [Some(self.xs), self.residual, self.weight, self.bias];
        let pass = Pass {
            x: readable(self.xs)?,
            residual: self.residual.map(readable).transpose()?,
            keep: self.keep.map(as_bytes).transpose()?,
            weight: self.weight.map(Tensor::contiguous).transpose()?,
            bias: self.bias.map(Tensor::contiguous).transpose()?,
            phi,
            kind,
            groups: self.groups,
            eps: self.eps,
            recipe: self.recipe,
            tracked: arguments.into_iter().flatten().any(Tensor::track_op),
        };
        Ok((pass, step_count))
    }
}

/// A forward that ran, and what its backward needs.
pub(crate) struct Step {
    /// As in the forward, without ψ². With a residual, `x` becomes the sum that the forward
    /// normalized.
    pub pass: Pass,
    saved: Box<dyn Saved>,
    /// `None` unless the forward counted as a step.
    training: Option<Training>,
    /// t before the step.
    step_count: usize,
}

impl Step {
    /// Runs a forward, which moves ψ² and t if it is a training step.
    pub fn forward(call: Call) -> Result<(Self, Outputs)> {
        let (mut pass, step_count) = call.pass()?;
        let mut env = StepEnv {
            has_ranks: call.turn.is_some(),
            turn: call.turn,
            training: call.training.as_ref(),
            step_count,
            counted: false,
        };
        let (saved, outputs) = call.device.forward(&pass, &mut env)?;
        let counted = env.counted;
        drop(env);
        // No backward reads ψ², which is a copy or the layer's own.
        pass.phi = None;
        let step = Self {
            pass,
            saved,
            training: call.training.filter(|_| counted),
            step_count,
        };
        Ok((step, outputs))
    }

    /// Runs a backward from `dy`, the gradient of the output. It moves ν if the forward counted as
    /// a step.
    pub fn backward(&self, dy: &Tensor) -> Result<Gradients> {
        let training = self.training.as_ref();
        let ranks = training.and_then(|training| training.ranks.as_ref());
        // From here on a failure tells the other ranks.
        let turn = ranks.map(|ranks| ranks.turn(Exchange::Backward));
        let is_tracked =
            |parameter: &Option<Tensor>| parameter.as_ref().is_some_and(Tensor::track_op);
        let wanted = Wanted {
            input: self.pass.x.track_op(),
            weight: is_tracked(&self.pass.weight),
            bias: is_tracked(&self.pass.bias),
        };
        let mut env = StepEnv {
            has_ranks: turn.is_some(),
            turn,
            training,
            step_count: self.step_count,
            counted: false,
        };
        let dy = readable(dy)?;
        self.saved.backward(&self.pass, &dy, wanted, &mut env)
    }
}

/// What a forward or a backward needs besides its tensors.
struct StepEnv<'a> {
    has_ranks: bool,
    /// The turn in the exchange of this call, until it is taken.
    turn: Option<Turn<'a>>,
    /// `None` in an evaluation.
    training: Option<&'a Training>,
    step_count: usize,
    /// ψ² has moved.
    counted: bool,
}

impl Env for StepEnv<'_> {
    fn has_ranks(&self) -> bool {
        self.has_ranks
    }

    fn exchange(&mut self, sums: Tensor) -> Result<Tensor> {
        match self.turn.take() {
            Some(turn) => turn.sum(&sums, self.step_count),
            None if self.has_ranks => unreachable!("a device exchanges sums once in a pass"),
            None => Ok(sums),
        }
    }

    fn move_phi(&mut self, update: &mut dyn FnMut(&Var, &PhiStep) -> Result<()>) -> Result<()> {
        if let Some(training) = self.training {
            (training.state).update_phi(training.purpose, |phi, step| update(phi, step))?;
            self.counted = true;
        }
        Ok(())
    }

    fn nu(&self) -> Option<Nu<'_>> {
        self.training.map(|training| Nu {
            ema_gz: training.state.nu_variable(),
            share: 1. - training.state.config().alpha_bwd,
            loss_scale: training.loss_scale.get(),
        })
    }

    fn move_nu(&mut self, update: &mut dyn FnMut(Option<&Var>) -> Result<()>) -> Result<()> {
        match self.training {
            // A recalibration leaves ν alone.
            Some(training) if training.purpose == Purpose::Training => {
                training.state.update_nu(|ema_gz| update(Some(ema_gz)))
            }
            _ => update(None),
        }
    }
}
