//! Which device a layer has, and in what layout it reads tensors.

use super::cpu::{self, with_element};
#[cfg(feature = "cuda")]
use super::cuda;
use super::{composed, DeviceStep, Setting};
use candle::{Device, Result, Storage, Tensor};
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::sync::LazyLock;

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

/// Returns the tensor in a layout that its device reads, copied if need be. A CPU reads rows
/// anywhere, if their elements are adjacent. Other devices read packed rows, and on an NVIDIA GPU
/// they begin on a 16-byte boundary.
pub(crate) fn readable(xs: &Tensor) -> Result<Tensor> {
    if xs.device().is_cpu() && cpu::has_packed_rows(xs.layout()) {
        return Ok(xs.clone());
    }
    let xs = xs.contiguous()?;
    let start = xs.layout().start_offset() * xs.dtype().size_in_bytes();
    if xs.device().is_cuda() && !start.is_multiple_of(16) {
        return xs.force_contiguous();
    }
    Ok(xs)
}
