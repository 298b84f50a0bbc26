//! The seam between the layer and its devices: what a device does for a step, and which device does
//! it.
//!
//! A training step has five phases, and every device has all of them:
//!
//! 1. [`DeviceStep::forward`] normalizes the rows and sums their squares. The batch's statistic is
//!    not known before the sums are, so with it this phase only sums.
//! 2. [`DeviceStep::finish_forward`] then normalizes by the batch's statistic.
//! 3. [`DeviceStep::move_phi`] moves ψ².
//! 4. [`DeviceStep::backward`] makes the gradients and sums over them.
//! 5. [`DeviceBackward::finish`] makes what is left of the gradients, and
//!    [`DeviceBackward::move_nu`] moves ν. ν moves last, so that a backward that fails leaves it.
//!
//! Other processes may have rows of the same batch. A device does not know: it hands its sums out
//! and takes those of the whole batch in. [`step`](super::step) decides when.
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
    /// Whether sums are handed out and taken in. If not, the device's own are those of the whole
    /// batch.
    pub shared: bool,
    /// Whether a backward may follow.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub tracked: bool,
}

/// What a forward reads. Rows are as [`readable`](super::rows::readable) leaves them, the others
/// contiguous.
#[derive(Clone, Copy)]
pub(crate) struct ForwardInputs<'a> {
    /// `[.., C]`.
    pub x: &'a Tensor,
    /// What is added to `x` first, shaped as it.
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
    /// `None` until [`DeviceStep::finish_forward`] where the batch's statistic normalizes.
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
    /// The gradient of the sum with the residual, if it has one.
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
    /// Whether the gradient of `x` is wanted. That of a parameter is where [`Tensor::track_op`]
    /// says so.
    pub wants_input: bool,
}

/// The gradients of a backward, where they were wanted.
#[derive(Default)]
pub(crate) struct Gradients {
    /// That of `x`, and of its residual.
    pub input: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
}

/// A forward on a device, and what the device keeps of it for the phases that follow.
///
/// Sums are tensors of f64, `[n]`, on [`DeviceKind::sums_device`]. Those of a forward are Σ x̃²
/// over the kept rows, `[C]`, and the number of these rows; under
/// [`Recipe::Fairseq`](crate::Recipe::Fairseq) the same of all rows comes after.
pub(crate) trait DeviceStep: Send + Sync {
    /// Writes the outputs and sums the squares. By the batch's statistic it only sums, and adds the
    /// residual.
    fn forward(&mut self, inputs: &ForwardInputs) -> Result<Outputs>;

    /// Writes the output by the batch's statistic, once its sums are in.
    fn finish_forward(&mut self, inputs: &ForwardInputs, outputs: Outputs) -> Result<Outputs>;

    /// Hands out the forward's sums. A GPU has no copy of them.
    fn sums(&self) -> Result<Tensor>;

    /// Takes in the forward's sums of the whole batch.
    fn take_sums(&self, total: &Tensor) -> Result<()>;

    /// Moves ψ² by the batch of this forward, and says whether the batch had a kept row. Without a
    /// `step` ψ² stays, and the statistics are made for the backward alone.
    fn move_phi(&self, phi: &Var, step: Option<&PhiStep>) -> Result<bool>;

    /// Makes the gradients as far as they go without the sums over rows, and sums.
    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>>;
}

/// A backward on a device. Its sums are Σ dy x̃ over the kept rows, `[C]`, and after them those of
/// its forward if these are not in yet.
pub(crate) trait DeviceBackward {
    /// Hands out the sums; none after an evaluation.
    fn sums(&mut self) -> Result<Option<Tensor>>;

    /// Takes in the sums of the whole batch.
    fn take_sums(&mut self, total: &Tensor) -> Result<()>;

    /// Makes Λ and what is left of the gradients. If [`move_nu`](Self::move_nu) follows, what it
    /// makes on the way may wait for it.
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
    /// Any other, by candle's own operations.
    Composed,
}

/// Tests set this environment variable to `composed` to run [`DeviceKind::Composed`] on a CPU.
static COMPOSED: LazyLock<bool> =
    LazyLock::new(|| std::env::var("CANDLE_POWERNORM_DEVICE").as_deref() == Ok("composed"));

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

    /// Where the sums are that a layer on `device` hands out.
    pub fn sums_device(&self, device: &Device) -> Device {
        match self {
            Self::Cpu => device.clone(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => device.clone(),
            Self::Composed => Device::Cpu,
        }
    }

    /// Whether a forward reads ψ² from its variable, in the order of the device's queue, and not
    /// from a copy.
    pub fn reads_phi_in_place(&self) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => true,
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
