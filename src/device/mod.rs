//! The interface between the layer and its devices: what a pass asks of the outside, and what it
//! returns. [`pass`] has what it computes.
//!
//! [`DeviceKind::forward`](pick::DeviceKind::forward) runs a training forward, and
//! [`DeviceKind::evaluate`](pick::DeviceKind::evaluate) any other. The record that they return
//! becomes a [`Saved`], whose [`backward`](Saved::backward) runs the backward. Each device has them as
//! straight-line code, to be read from top to bottom beside the equations of
//! [`Recipe`](crate::Recipe). A training forward
//!
//! 1. sums the squares of its rows, and writes the output in the same pass unless the batch's own
//!    statistic normalizes;
//! 2. exchanges the sums with the other ranks ([`Env::exchange`]);
//! 3. writes the output, if the batch's statistic normalizes;
//! 4. moves ψ² ([`Env::move_phi`]). A GPU moves it before 3, in the kernel that makes ψ_B².
//!
//! Its backward
//!
//! 1. sums Σ dy x̃ over its rows, and writes the input's gradient in the same pass unless the
//!    gradient is exact, which takes Λ of the whole batch;
//! 2. exchanges the sums;
//! 3. moves ν ([`Env::move_nu`]), and makes the gradients of weight and bias;
//! 4. writes the input's gradient, if it is exact.
//!
//! Operations that can fail come first: an NVIDIA GPU allocates and loads all that a call needs
//! before its first launch. A call that fails before it has moved ψ² or ν has changed nothing.
//!
//! A device works on storage and numbers. Ranks and the layer's state stay behind [`Env`], which
//! lends the variables of ψ² and ν for an update.
//!
//! Each device writes the step out. A step that they share, with a device as rows and channels behind
//! traits, was written too, for CPUs, for candle's operations and, without compiling it, for GPUs. It
//! took 112 lines of code more without GPUs and 216 with them, of which 55 were shared: a call keeps
//! its buffers between the parts, each device moves the state at another place, and a proof that a
//! GPU's memory is written would lie in two files.
//!
//! CONTRIBUTING.md says how to add a device.

mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod pass;
pub(crate) mod pick;

use self::pass::Pass;
use crate::config::PhiStep;
use candle::{DType, Result, Storage, Tensor, Var};

/// Outputs of a forward, shaped as its input.
pub(crate) struct Outputs {
    pub y: Storage,
    /// `x + residual`, if there is a residual.
    pub residual_out: Option<Storage>,
}

/// The gradients that a backward is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub input: bool,
    pub weight: bool,
    pub bias: bool,
}

/// The gradients of a backward, as far as they were wanted.
pub(crate) struct Gradients {
    /// The gradient of `x`.
    pub input: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
}

/// A forward that ran, with what its backward needs.
pub(crate) struct Saved {
    pass: Pass<'static>,
    record: Box<dyn Record>,
}

impl Saved {
    /// What the backward of a forward of `pass` needs.
    pub fn new(pass: Pass, record: Box<dyn Record>) -> Self {
        let pass = pass.into_owned();
        Self { pass, record }
    }

    /// The pass of the forward, as the device laid it out.
    pub fn pass(&self) -> &Pass<'static> {
        &self.pass
    }

    /// After a forward with a residual: the backward reads `sum`, which holds the sum that the
    /// forward wrote.
    pub fn of_sum(self, sum: Tensor) -> Result<Self> {
        let pass = self.pass.of_sum(sum)?;
        Ok(Self { pass, ..self })
    }

    /// Makes the gradients from `dy`, the gradient of the output, and moves ν if the forward was a
    /// training step.
    pub fn backward(&self, dy: &Tensor, env: &mut dyn Env) -> Result<Gradients> {
        self.pass.check_dy(dy)?;
        self.record.backward(&self.pass, dy, env)
    }
}

/// A device's record of a forward, from which it makes the backward.
///
/// [`Saved`] alone calls it: with the pass of that forward, as the forward laid it out, in which the
/// sum stands for the input and its residual, and with a `dy` that has the shape, dtype and device of
/// `x`.
pub(crate) trait Record: Send + Sync {
    fn backward(&self, pass: &Pass, dy: &Tensor, env: &mut dyn Env) -> Result<Gradients>;
}

/// A pass's connection to the outside: sums over the other ranks, and the layer's state.
///
/// Sums are exchanged as tensors of f64, `[n]`, on
/// [`DeviceKind::sums_device`](pick::DeviceKind::sums_device). A training forward's sums are Σ x̃²
/// over the kept rows, `[C]`, followed by the number of kept rows. Under
/// [`Recipe::Fairseq`](crate::Recipe::Fairseq) the same two follow for all rows. A backward's sums
/// are Σ dy x̃, `[C]`. On an NVIDIA GPU the [`Announcement`] precedes the sums, and a backward's are
/// padded to the length of a forward's.
pub(crate) trait Env {
    /// Other processes have rows of the same batch, so sums must be exchanged.
    fn has_ranks(&self) -> bool;

    /// The announcement of the exchange to come; `None` if there are no ranks. Only a device whose
    /// sums stay on it asks for the announcement, and compares it. Other sums are compared on the
    /// host.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    fn announcement(&self) -> Option<Announcement>;

    /// Returns the sums over the rows of all ranks. Called at most once in a pass, and only if
    /// there are ranks.
    fn exchange(&mut self, sums: Tensor) -> Result<Tensor>;

    /// Locks ψ², has `update` move it, and counts the step. Called in a training forward, at most
    /// once. A call without it is no step: its backward moves nothing.
    fn move_phi(&mut self, update: &mut dyn FnMut(&Var, &PhiStep) -> Result<()>) -> Result<()>;

    /// ν as it stands now; `None` unless the forward was a step.
    fn nu(&self) -> Option<Nu<'_>>;

    /// Calls `update` once. If this backward moves ν, the state is locked meanwhile and `update`
    /// gets ν.
    fn move_nu(&mut self, update: &mut dyn FnMut(Option<&Nu>) -> Result<()>) -> Result<()>;
}

/// The [`Env`] of a pass that is no step: of rows by themselves, or of an evaluation.
pub(crate) struct Evaluation;

impl Env for Evaluation {
    fn has_ranks(&self) -> bool {
        false
    }

    fn announcement(&self) -> Option<Announcement> {
        None
    }

    fn exchange(&mut self, _: Tensor) -> Result<Tensor> {
        unreachable!("an evaluation has no ranks")
    }

    fn move_phi(&mut self, _: &mut dyn FnMut(&Var, &PhiStep) -> Result<()>) -> Result<()> {
        unreachable!("an evaluation moves no ψ²")
    }

    fn nu(&self) -> Option<Nu<'_>> {
        None
    }

    fn move_nu(&mut self, update: &mut dyn FnMut(Option<&Nu>) -> Result<()>) -> Result<()> {
        update(None)
    }
}

/// The numbers that a rank sends ahead of its sums, to be added up with them. Unless each comes
/// back as `ranks` times what was sent, the ranks have made different calls, and their sums do not
/// belong together.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct Announcement {
    pub numbers: [f64; 8],
    pub ranks: usize,
}

/// The running correction ν, and how a step moves it.
#[derive(Clone, Copy)]
pub(crate) struct Nu<'a> {
    /// ν/(1−α_b), in its variable: `[C]` or `[1, C, 1, 1]`.
    pub ema_gz: &'a Var,
    /// 1−α_b.
    pub share: f64,
    /// The factor of the loss. It is fixed for one backward, even if another thread sets it.
    pub loss_scale: f64,
}

impl Nu<'_> {
    /// What `ema_gz` is multiplied by for ν times the loss scale, which corrects a gradient.
    fn scale(&self) -> f64 {
        self.share * self.loss_scale
    }
}

/// The dtype that sums over rows of `dtype` are taken in.
pub(crate) fn sums_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        DType::F32 | DType::F16 | DType::BF16 => DType::F32,
        other => unreachable!("a pass has no rows of {other:?}"),
    }
}
