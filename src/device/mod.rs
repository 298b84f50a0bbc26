//! The seam between the layer and its devices: the traits of a device, and what they read and write.
//!
//! A training step has five phases, and every device has all of them:
//!
//! 1. [`DeviceStep::forward`] normalizes the rows and sums their squares. The batch's statistic is
//!    known only after the sums. If it normalizes, this phase only sums.
//! 2. [`DeviceStep::finish_forward`] then normalizes by the batch's statistic.
//! 3. [`DeviceStep::move_phi`] moves ψ².
//! 4. [`DeviceStep::backward`] makes the gradients and sums over them.
//! 5. [`DeviceBackward::finish`] makes what is left of the gradients, and
//!    [`DeviceBackward::move_nu`] moves ν. ν moves last, so a backward that fails leaves ν as it
//!    was.
//!
//! Other processes may have rows of the same batch. A device does not know about them. It hands its
//! own sums out and takes the sums of the whole batch in. `op/step.rs` decides when.
//!
//! A new device is an implementation of the two traits, a variant of [`DeviceKind`](pick::DeviceKind),
//! and an arm in each of its methods.

mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod pick;

use crate::config::{ForwardKind, PhiStep, PowerNormConfig};
use candle::{DType, Result, Storage, Tensor, Var};

/// What a device knows of a forward besides its tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub config: PowerNormConfig,
    pub kind: ForwardKind,
    /// Whether sums are handed out and taken in. If not, the device has all rows of the batch.
    pub shared: bool,
    /// Whether a backward may follow.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub tracked: bool,
}

/// What a forward reads. Tensors of rows come from [`readable`](pick::readable), and the other
/// tensors are contiguous.
#[derive(Clone, Copy)]
pub(crate) struct ForwardInputs<'a> {
    /// `[.., C]`.
    pub x: &'a Tensor,
    /// Added to `x` before anything else. It has the shape of `x`.
    pub residual: Option<&'a Tensor>,
    /// The padding mask: `x` without its last dimension, 0 for a padded row.
    pub keep: Option<&'a Tensor>,
    /// γ and β, `[C]` each.
    pub affine: Option<[&'a Tensor; 2]>,
    /// ψ² before the step, `[C]`.
    pub phi: &'a Tensor,
}

/// What a forward writes, shaped as its input.
pub(crate) struct Outputs {
    /// If the batch's statistic normalizes, only [`DeviceStep::finish_forward`] writes it. It may
    /// be `None` before.
    pub y: Option<Storage>,
    /// `x + residual`, if there is a residual.
    pub sum: Option<Storage>,
}

/// What a backward reads.
#[derive(Clone, Copy)]
pub(crate) struct BackwardInputs<'a> {
    /// What the forward normalized: its input, or the sum with the residual.
    pub x: &'a Tensor,
    /// The gradient of the output.
    pub dy: &'a Tensor,
    /// The gradient of the sum with the residual, if the sum has a gradient.
    pub dsum: Option<&'a Tensor>,
    /// As in the forward.
    pub keep: Option<&'a Tensor>,
    /// As in the forward.
    pub affine: Option<[&'a Tensor; 2]>,
    /// ψ², `[C]`, in its variable.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub phi: &'a Tensor,
    /// ν/(1−α_b), `[C]`, in its variable.
    pub ema_gz: &'a Tensor,
    /// What the loss was multiplied by.
    pub loss_scale: f64,
    /// Whether the gradient of `x` is wanted. A parameter's gradient is wanted if its
    /// [`Tensor::track_op`] is true.
    pub wants_input: bool,
}

/// The gradients of a backward, as far as they were wanted.
#[derive(Default)]
pub(crate) struct Gradients {
    /// The gradient of `x`, which is also the residual's.
    pub input: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
}

/// A forward on a device, and what the device keeps from it for the phases that follow.
///
/// Sums are tensors of f64, `[n]`, on [`DeviceKind::sums_device`](pick::DeviceKind::sums_device). A forward's sums are Σ x̃² over
/// the kept rows, `[C]`, followed by the number of kept rows. Under
/// [`Recipe::Fairseq`](crate::Recipe::Fairseq) the same two follow for all rows.
pub(crate) trait DeviceStep: Send + Sync {
    /// Adds the residual, sums the squares and writes the output. If the batch's statistic
    /// normalizes, the output is left to [`finish_forward`](Self::finish_forward).
    fn forward(&mut self, inputs: &ForwardInputs) -> Result<Outputs>;

    /// Normalizes by the batch's statistic, once its sums are in, and writes the output.
    fn finish_forward(&mut self, inputs: &ForwardInputs, outputs: Outputs) -> Result<Outputs>;

    /// Hands out the forward's sums. A GPU keeps no copy.
    fn sums(&self) -> Result<Tensor>;

    /// Takes in the forward's sums of the whole batch.
    fn take_sums(&self, total: &Tensor) -> Result<()>;

    /// Moves ψ² by the batch of this forward, and says whether the batch had a kept row. Without a
    /// `step` ψ² stays, and only the statistics for the backward are made.
    fn move_phi(&self, phi: &Var, step: Option<&PhiStep>) -> Result<bool>;

    /// Sums over the rows, and makes those gradients that do not depend on the sums.
    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>>;
}

/// A backward on a device. Its sums are Σ dy x̃ over the kept rows, `[C]`. If the forward's sums
/// were not handed out yet, they follow in the same tensor.
pub(crate) trait DeviceBackward {
    /// Hands out the sums; `None` after an evaluation.
    fn sums(&mut self) -> Result<Option<Tensor>>;

    /// Takes in the sums of the whole batch.
    fn take_sums(&mut self, total: &Tensor) -> Result<()>;

    /// Makes Λ and the remaining gradients. If `moves_nu`, a device may leave a part of this to
    /// [`move_nu`](Self::move_nu), which then follows.
    fn finish(&mut self, moves_nu: bool) -> Result<()>;

    /// Moves ν, which `ema_gz` keeps. If this fails, ν is as it was.
    fn move_nu(&mut self, ema_gz: &Var) -> Result<()>;

    /// Hands out the gradients.
    fn gradients(self: Box<Self>) -> Gradients;
}

/// The dtype that sums over rows of `dtype` are taken in.
pub(crate) fn sums_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}
