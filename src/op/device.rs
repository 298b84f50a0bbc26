//! The seam between the layer and its devices: what a device does for a step, and which device does
//! it.
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
//! own sums out and takes the sums of the whole batch in. [`step`](super::step) decides when.
//!
//! A new device is an implementation of the two traits, a variant of [`DeviceKind`], and an arm in
//! each of its methods.

use crate::composed;
use crate::config::{ForwardKind, PhiStep, PowerNormConfig};
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::op::rows::with_element;
use candle::{DType, Device, Result, Storage, Tensor, Var};
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::sync::LazyLock;

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

/// What a forward reads. Tensors of rows come from [`readable`](super::rows::readable), and the
/// other tensors are contiguous.
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
/// Sums are tensors of f64, `[n]`, on [`DeviceKind::sums_device`]. A forward's sums are Σ x̃² over
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

/// The device of a layer.
#[derive(Debug, Clone)]
pub(crate) enum DeviceKind {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda::Kernels>),
    /// Any other device, by candle's own operations.
    Composed,
}

/// Tests set this environment variable to `composed` to run [`DeviceKind::Composed`] on a CPU.
/// Another name panics: a test that ignored it would test something else.
static COMPOSED: LazyLock<bool> = LazyLock::new(|| {
    let name = std::env::var_os("CANDLE_POWERNORM_DEVICE").unwrap_or_default();
    match name.to_str() {
        Some("composed") => true,
        Some("") => false,
        _ => panic!("CANDLE_POWERNORM_DEVICE: expected composed, got {name:?}"),
    }
});

impl DeviceKind {
    pub fn of(device: &Device) -> Self {
        match device {
            Device::Cpu if *COMPOSED => Self::Composed,
            Device::Cpu => Self::Cpu,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => Self::Cuda(Arc::default()),
            _ => Self::Composed,
        }
    }

    /// The device of calls without a layer.
    pub fn without_layer(device: &Device) -> Self {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Self::Cuda(cuda::Kernels::without_layer(device)),
            _ => Self::of(device),
        }
    }

    /// A step on the rows of `x`.
    pub fn step(&self, x: &Tensor, setting: Setting) -> Result<Box<dyn DeviceStep>> {
        match self {
            Self::Cpu => {
                with_element!(x.dtype(), T => Ok(Box::new(cpu::CpuStep::<T>::new(setting))))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(kernels) => Ok(Box::new(cuda::CudaStep::new(x, setting, kernels)?)),
            Self::Composed => Ok(Box::new(composed::ComposedStep::new(setting))),
        }
    }

    /// Where a layer on `device` hands its sums out.
    pub fn sums_device(&self, device: &Device) -> Device {
        match self {
            Self::Cpu => device.clone(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => device.clone(),
            Self::Composed => Device::Cpu,
        }
    }

    /// Whether a forward with rows on `rows` reads ψ² from its variable, which is on `state`, and
    /// not from a copy. That is right if both have one queue, in which the update comes after the
    /// read.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn reads_phi_in_place(&self, rows: &Device, state: &Device) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => cuda::reads_in_place(rows, state),
            _ => false,
        }
    }

    /// The layer-scale without a layer: X̃ of `x`, whose last dimension is a multiple of `groups`.
    pub fn scale_groups(&self, x: &Tensor, groups: usize, eps: f64) -> Result<Storage> {
        match self {
            Self::Cpu => with_element!(x.dtype(), T => cpu::scale_groups::<T>(x, groups, eps)),
            #[cfg(feature = "cuda")]
            Self::Cuda(kernels) => cuda::scale_groups(x, groups, eps, kernels),
            Self::Composed => composed::scale_groups(x, groups, eps),
        }
    }

    /// The gradient of [`scale_groups`](Self::scale_groups) from `dy`.
    pub fn scale_groups_bwd(
        &self,
        x: &Tensor,
        dy: &Tensor,
        groups: usize,
        eps: f64,
    ) -> Result<Tensor> {
        match self {
            Self::Cpu => {
                with_element!(x.dtype(), T => cpu::scale_groups_bwd::<T>(x, dy, groups, eps))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(kernels) => cuda::scale_groups_bwd(x, dy, groups, eps, kernels),
            Self::Composed => composed::scale_groups_bwd(x, dy, groups, eps),
        }
    }
}

/// The dtype that sums over rows of `dtype` are taken in.
pub(crate) fn sums_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}
