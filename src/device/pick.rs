//! Picks a layer's device, and has it run a forward.

pub(crate) use super::cpu::{Curve, Folded};
#[cfg(feature = "cuda")]
use super::cuda;
use super::pass::Pass;
use super::{Env, Evaluation, Outputs, Record, composed, cpu};
use crate::error::Error;
use candle::{Device, Result, Tensor};
use std::ffi::OsString;
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::sync::LazyLock;

/// The environment variable that names a device kind.
const VARIABLE: &str = "CANDLE_POWERNORM_DEVICE";

/// Its value.
static NAME: LazyLock<OsString> = LazyLock::new(|| std::env::var_os(VARIABLE).unwrap_or_default());

/// The device of a layer.
#[derive(Debug, Clone)]
pub(crate) enum DeviceKind {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda::Kernels>),
    /// Any other device, with candle's own operations.
    Composed,
}

impl DeviceKind {
    /// Runs a forward that moves nothing: of rows by themselves, or an evaluation.
    pub fn evaluate(&self, pass: &mut Pass) -> Result<(Box<dyn Record>, Outputs)> {
        match self {
            Self::Cpu => cpu::evaluate(pass),
            #[cfg(feature = "cuda")]
            Self::Cuda(kernels) => cuda::forward(kernels, pass, &mut Evaluation),
            Self::Composed => composed::forward(pass, &mut Evaluation),
        }
    }

    /// The outputs of such a forward, if no backward follows.
    pub fn normalize(&self, pass: &mut Pass) -> Result<Outputs> {
        match self {
            Self::Cpu => cpu::normalize(pass),
            _ => Ok(self.evaluate(pass)?.1),
        }
    }

    /// Runs a training forward, which moves ψ².
    pub fn forward(
        &self,
        pass: &mut Pass,
        env: &mut dyn Env,
    ) -> Result<(Box<dyn Record>, Outputs)> {
        match self {
            Self::Cpu => cpu::forward(pass, env),
            #[cfg(feature = "cuda")]
            Self::Cuda(kernels) => cuda::forward(kernels, pass, env),
            Self::Composed => composed::forward(pass, env),
        }
    }

    /// The device of a layer whose state is on `device`.
    ///
    /// The environment variable `CANDLE_POWERNORM_DEVICE=composed` runs [`DeviceKind::Composed`] on
    /// a CPU, to test it there. Another name is an error: a test that ignored it would test
    /// something else.
    ///
    /// In a build whose candle has CUDA and whose copy of this crate has no kernels, a GPU would
    /// silently run dozens of candle's operations for each call. That is an error too, unless the
    /// variable asks for it.
    pub fn of(device: &Device) -> Result<Self> {
        static ON_CPU: LazyLock<Option<DeviceKind>> = LazyLock::new(|| DeviceKind::on_cpu().ok());
        match device {
            Device::Cpu => match &*ON_CPU {
                Some(kind) => Ok(kind.clone()),
                None => Self::on_cpu(),
            },
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => Ok(Self::Cuda(cuda::Kernels::of(device)?)),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) if *NAME != "composed" => Err(Error::NoKernels.into()),
            _ => Ok(Self::Composed),
        }
    }

    /// The device of a layer on a CPU, by the environment.
    fn on_cpu() -> Result<Self> {
        match NAME.to_str() {
            Some("") => {
                cpu::check_environment()?;
                Ok(Self::Cpu)
            }
            Some("composed") => Ok(Self::Composed),
            _ => Err(Error::Environment {
                variable: VARIABLE,
                expected: "composed",
                got: NAME.clone(),
            }
            .into()),
        }
    }

    /// `true` if an evaluation without gradients is faster with γ/D from [`Folded`].
    pub fn folds(&self) -> bool {
        matches!(self, Self::Cpu)
    }

    /// The device on which a layer on `device` exchanges its sums.
    pub fn sums_device(&self, device: &Device) -> Device {
        match self {
            Self::Composed => Device::Cpu,
            _ => device.clone(),
        }
    }

    /// Whether a forward of rows on `rows` may read ψ² where it is, in its variable on `state`, or
    /// needs a copy. On one stream it may, because the update is queued after the read.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn reads_phi_in_place(&self, rows: &Device, state: &Device) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => cuda::reads_in_place(rows, state),
            _ => false,
        }
    }
}

/// GELU of `[x]`, or its gradient of `[x, dy]`, in one pass; `None` on a device where candle's
/// operations are to compute it.
pub(crate) fn gelu(curve: Curve, arrays: &[&Tensor]) -> Result<Option<Tensor>> {
    match arrays[0].device() {
        device @ Device::Cpu if matches!(DeviceKind::of(device)?, DeviceKind::Cpu) => {
            cpu::gelu(curve, arrays).map(Some)
        }
        _ => Ok(None),
    }
}

#[cfg(all(test, not(feature = "cuda")))]
mod tests {
    use super::*;

    /// Without candle's feature `cuda`, its type of a GPU is a unit. It stands here for a GPU of a
    /// build in which another crate turns the feature on.
    #[test]
    fn a_gpu_without_kernels_is_an_error() {
        let kind = |device| DeviceKind::of(&device).map(|kind| format!("{kind:?}"));
        let gpu = kind(Device::Cuda(candle::CudaDevice));
        // `.ci/run` runs the unit tests with it too.
        if std::env::var_os(VARIABLE).is_some_and(|name| name == "composed") {
            assert_eq!(gpu.unwrap(), "Composed");
        } else {
            let text = gpu.unwrap_err().to_string();
            let expected = "expected this crate's feature cuda for a layer on an NVIDIA GPU";
            assert!(text.contains(expected), "{text}");
        }
    }
}
