//! The seam between the layer and its devices: the traits of a device, and what they read and
//! write.
//!
//! A training step has these phases, and every device has all of them:
//!
//! 1. A forward normalizes the rows and sums their squares. The batch's statistic is known only
//!    after the sums. If it normalizes, the forward only sums.
//! 2. [`DeviceStep::update_phi`] makes the batch's statistics of the sums, and moves ψ².
//! 3. [`DeviceStep::normalize_by_batch`] writes the output, if the batch's statistic normalizes.
//! 4. [`DeviceStep::backward`] makes the input's gradient and sums over the rows. An exact gradient
//!    needs these sums first, and is left to phase 6.
//! 5. [`DeviceBackward::update_nu`] makes Λ and the parameters' gradients of the sums, and moves ν.
//! 6. [`DeviceBackward::gradients`] makes an exact gradient of the input, and hands out all
//!    gradients.
//!
//! Phases 1 and 4 check their inputs before they compute. On an NVIDIA GPU they also allocate and
//! load all that the later phases need. So a call that fails there has moved nothing.
//!
//! Other processes may have rows of the same batch. A device does not know about them. It hands out
//! the sums over its local rows, and takes in the global sums. `op/step.rs` decides when.
//!
//! CONTRIBUTING.md says how to add a device.

mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod host;
pub(crate) mod pick;

use crate::config::{ForwardKind, PhiStep, PowerNormConfig};
use candle::{DType, Result, Storage, Tensor, Var};

/// Settings of a forward.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub config: PowerNormConfig,
    pub kind: ForwardKind,
    /// Sums are handed out and taken in. If not, the device has all rows of the batch.
    pub over_ranks: bool,
    /// A backward may follow.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub tracked: bool,
}

/// Inputs of a forward, in a layout that the device reads.
pub(crate) struct ForwardInputs {
    /// `[.., C]`.
    pub x: Tensor,
    /// Added to `x` before anything else. It has the shape of `x`.
    pub residual: Option<Tensor>,
    /// The padding mask: `x` without its last dimension, of `U8`, 0 for a padded row.
    pub keep: Option<Tensor>,
    /// γ, `[C]`.
    pub weight: Option<Tensor>,
    /// β, `[C]`.
    pub bias: Option<Tensor>,
    /// ψ² before the step, `[C]`. Without it D is 1, which leaves the group scaling.
    pub phi: Option<Tensor>,
}

/// Outputs of a forward, shaped as its input.
pub(crate) struct Outputs {
    /// If the batch's statistic normalizes, this may be `None` until
    /// [`DeviceStep::normalize_by_batch`].
    pub y: Option<Storage>,
    /// `x + residual`, if there is a residual.
    pub sum: Option<Storage>,
}

/// Inputs of a backward.
#[derive(Clone, Copy)]
pub(crate) struct BackwardInputs<'a> {
    /// The tensor that the forward normalized: its input, or the sum with the residual.
    pub x: &'a Tensor,
    /// The gradient of the output.
    pub dy: &'a Tensor,
    /// The gradient of the sum with the residual, if the sum has a gradient.
    pub dsum: Option<&'a Tensor>,
    /// As in the forward.
    pub keep: Option<&'a Tensor>,
    /// As in the forward.
    pub weight: Option<&'a Tensor>,
    /// As in the forward.
    pub bias: Option<&'a Tensor>,
    /// ν; `None` in an evaluation.
    pub running: Option<RunningNu<'a>>,
    /// The gradient of `x` is wanted. A parameter's gradient is wanted if its
    /// [`Tensor::track_op`] is true.
    pub wants_input: bool,
}

/// ν of the state.
#[derive(Clone, Copy)]
pub(crate) struct RunningNu<'a> {
    /// ν/(1−α_b), `[C]`, in its variable.
    pub ema_gz: &'a Tensor,
    /// The factor of the loss.
    pub loss_scale: f64,
}

/// The gradients of a backward, as far as they were wanted.
#[derive(Default)]
pub(crate) struct Gradients {
    /// The gradient of `x`, which is also the residual's.
    pub input: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
}

/// A forward on a device, and what the device keeps of it for later phases.
///
/// Sums are tensors of f64, `[n]`, on [`DeviceKind::sums_device`](pick::DeviceKind::sums_device). A
/// forward's sums are Σ x̃² over the kept rows, `[C]`, followed by the number of kept rows. Under
/// [`Recipe::Fairseq`](crate::Recipe::Fairseq) the same two follow for all rows.
pub(crate) trait DeviceStep: Send + Sync {
    /// Hands out the sums over the local rows.
    fn local_sums(&self) -> Result<Tensor>;

    /// Takes in the sums over the rows of all processes.
    fn set_global_sums(&mut self, global: &Tensor) -> Result<()>;

    /// `true` for a training step with a kept row. A GPU does not wait to learn the number of
    /// rows, and says yes.
    fn is_step(&self) -> bool;

    /// Makes the batch's statistics from the sums, and moves ψ² by them. The state is locked. Not
    /// called if [`is_step`](Self::is_step) says no.
    fn update_phi(&mut self, phi: &Var, step: &PhiStep) -> Result<()>;

    /// Normalizes by the batch's statistic and writes the output. Called only for
    /// [`ForwardKind::BatchStatistic`]. The state is not locked: a CPU runs rows here. If no row
    /// is kept, ψ² normalizes.
    fn normalize_by_batch(&mut self, inputs: &ForwardInputs, outputs: Outputs) -> Result<Outputs>;

    /// Sums over the rows, and makes the input's gradient unless it depends on the sums.
    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>>;
}

/// A backward on a device. Its sums are Σ dy x̃ over the kept rows, `[C]`.
pub(crate) trait DeviceBackward {
    /// Hands out the sums over the local rows of a step.
    fn local_sums(&self) -> Result<Tensor>;

    /// Takes in the sums over the rows of all processes.
    fn set_global_sums(&mut self, global: &Tensor) -> Result<()>;

    /// Makes Λ and the parameters' gradients from the sums. Moves ν, which `ema_gz` keeps, if it is
    /// given; the state is locked then.
    fn update_nu(&mut self, ema_gz: Option<&Var>) -> Result<()>;

    /// Makes the input's gradient if it needs Λ, and hands out the gradients.
    fn gradients(self: Box<Self>) -> Result<Gradients>;
}

/// The dtype that sums over rows of `dtype` are taken in.
pub(crate) fn sums_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}
