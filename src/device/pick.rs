//! Which device a layer has, and in what layout it reads tensors.

use super::cpu::{self, with_element};
#[cfg(feature = "cuda")]
use super::cuda;
use super::{composed, DeviceStep, ForwardInputs, Outputs, Setting};
use crate::error::Error;
use candle::{Device, Result, Tensor};
use std::ffi::OsString;
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

impl DeviceKind {
    /// The device of a layer whose state is on `device`.
    ///
    /// The environment variable `CANDLE_POWERNORM_DEVICE=composed` runs [`DeviceKind::Composed`] on
    /// a CPU, to test it there. Another name is an error: a test that ignored it would test
    /// something else.
    pub fn of(device: &Device) -> Result<Self> {
        static NAME: LazyLock<OsString> =
            LazyLock::new(|| std::env::var_os("CANDLE_POWERNORM_DEVICE").unwrap_or_default());
        match device {
            Device::Cpu => match NAME.to_str() {
                Some("") => {
                    cpu::check_level()?;
                    Ok(Self::Cpu)
                }
                Some("composed") => Ok(Self::Composed),
                _ => Err(Error::Environment {
                    variable: "CANDLE_POWERNORM_DEVICE",
                    expected: "composed",
                    got: NAME.clone(),
                }
                .into()),
            },
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => Ok(Self::Cuda(Arc::default())),
            _ => Ok(Self::Composed),
        }
    }

    /// Runs a forward.
    pub fn forward(
        &self,
        setting: Setting,
        inputs: &ForwardInputs,
    ) -> Result<(Box<dyn DeviceStep>, Outputs)> {
        /// A step of any device.
        fn boxed(
            (step, outputs): (impl DeviceStep + 'static, Outputs),
        ) -> (Box<dyn DeviceStep>, Outputs) {
            (Box::new(step), outputs)
        }
        match self {
            Self::Cpu => with_element!(inputs.x.dtype(), T => {
                cpu::CpuStep::<T>::forward(setting, inputs).map(boxed)
            }),
            #[cfg(feature = "cuda")]
            Self::Cuda(kernels) => cuda::CudaStep::forward(setting, inputs, kernels).map(boxed),
            Self::Composed => composed::ComposedStep::forward(setting, inputs).map(boxed),
        }
    }

    /// The device on which a layer on `device` hands its sums out.
    pub fn sums_device(&self, device: &Device) -> Device {
        match self {
            Self::Cpu => device.clone(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => device.clone(),
            Self::Composed => Device::Cpu,
        }
    }

    /// `true` if a forward with rows on `rows` reads ψ² from its variable, which is on `state`, and
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
