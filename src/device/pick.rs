//! Picks a layer's device, and starts a forward on it.

use super::composed::ComposedRows;
use super::cpu::{self, CpuRows};
#[cfg(feature = "cuda")]
use super::cuda;
use super::host::HostStep;
use super::{DeviceStep, ForwardInputs, Outputs, Setting};
use crate::config::{ForwardKind, PowerNormConfig};
use crate::error::Error;
use crate::mode::Purpose;
use crate::state::State;
use candle::{DType, Device, Result, Tensor};
use half::{bf16, f16};
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
            Device::Cuda(_) => Ok(Self::Cuda(cuda::Kernels::of(device)?)),
            _ => Ok(Self::Composed),
        }
    }

    /// Runs a forward on the arguments of a layer.
    ///
    /// `state` has ψ² and t. Without it D is 1. If the batch's statistic normalizes, the output is
    /// left to [`normalize_by_batch`](DeviceStep::normalize_by_batch).
    pub fn forward(
        &self,
        arguments: &Arguments,
        config: &PowerNormConfig,
        purpose: Purpose,
        state: Option<&State>,
        over_ranks: bool,
    ) -> Result<Forward> {
        let (phi, steps) = match state {
            Some(state) => {
                let in_place = self.reads_phi_in_place(arguments.xs, state.device());
                let (phi, steps) = state.begin(in_place)?;
                (Some(phi), steps)
            }
            None => (None, 0),
        };
        let setting = Setting {
            config: *config,
            kind: match purpose {
                Purpose::Evaluation => ForwardKind::Evaluation,
                Purpose::Training => config.kind_at(steps + 1),
                Purpose::Recalibration(_) => ForwardKind::BatchStatistic,
            },
            over_ranks,
            tracked: arguments.track_op(),
        };
        let inputs = arguments.readable(phi)?;
        let (step, outputs) = match self {
            Self::Cpu => match inputs.x.dtype() {
                DType::F32 => HostStep::<CpuRows<f32>>::forward(setting, &inputs)?,
                DType::F64 => HostStep::<CpuRows<f64>>::forward(setting, &inputs)?,
                DType::F16 => HostStep::<CpuRows<f16>>::forward(setting, &inputs)?,
                DType::BF16 => HostStep::<CpuRows<bf16>>::forward(setting, &inputs)?,
                other => return Err(Error::InputDType(other).into()),
            },
            #[cfg(feature = "cuda")]
            Self::Cuda(kernels) => cuda::CudaStep::forward(setting, &inputs, kernels)?,
            Self::Composed => HostStep::<ComposedRows>::forward(setting, &inputs)?,
        };
        Ok(Forward {
            step,
            outputs,
            inputs,
            kind: setting.kind,
            steps,
        })
    }

    /// The device on which a layer on `device` hands its sums out.
    pub fn sums_device(&self, device: &Device) -> Device {
        match self {
            Self::Composed => Device::Cpu,
            _ => device.clone(),
        }
    }

    /// `true` if a forward of `xs` reads ψ² in its variable, else it reads a copy. In place is safe
    /// if one queue orders both: the update comes after the read.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    fn reads_phi_in_place(&self, xs: &Tensor, state_device: &Device) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => cuda::reads_in_place(xs.device(), state_device),
            _ => false,
        }
    }
}

/// A layer's arguments, which the layer has checked.
#[derive(Clone, Copy)]
pub(crate) struct Arguments<'a> {
    /// `[.., C]`.
    pub xs: &'a Tensor,
    /// Added to `xs` first.
    pub residual: Option<&'a Tensor>,
    /// The padding mask: `xs` without its last dimension.
    pub keep: Option<&'a Tensor>,
    /// γ and β, `[C]`.
    pub affine: Option<[&'a Tensor; 2]>,
}

impl Arguments<'_> {
    /// `true` if a backward may follow.
    fn track_op(&self) -> bool {
        let rows = [Some(self.xs), self.residual].into_iter().flatten();
        rows.chain(self.affine.into_iter().flatten())
            .any(Tensor::track_op)
    }

    /// The arguments and ψ² in a layout that their device reads, copied if need be.
    fn readable(&self, phi: Option<Tensor>) -> Result<ForwardInputs> {
        Ok(ForwardInputs {
            x: readable(self.xs)?,
            residual: self.residual.map(readable).transpose()?,
            keep: self.keep.map(as_bytes).transpose()?,
            affine: match self.affine {
                Some([weight, bias]) => Some([weight.contiguous()?, bias.contiguous()?]),
                None => None,
            },
            phi,
        })
    }
}

/// A forward that ran.
pub(crate) struct Forward {
    pub step: Box<dyn DeviceStep>,
    pub outputs: Outputs,
    /// The inputs as the device read them.
    pub inputs: ForwardInputs,
    pub kind: ForwardKind,
    /// t before the step.
    pub steps: usize,
}

/// Returns the rows in a layout that their device reads, copied if need be. A CPU reads rows
/// anywhere, if their elements are adjacent. Other devices read packed rows, and on an NVIDIA GPU
/// they begin on a 16-byte boundary.
pub(crate) fn readable(xs: &Tensor) -> Result<Tensor> {
    // A row of one element may have any stride.
    let is_adjacent = xs.dims().last() == Some(&1) || xs.stride().last() == Some(&1);
    if xs.device().is_cpu() && is_adjacent {
        return Ok(xs.clone());
    }
    let xs = xs.contiguous()?;
    let start = xs.layout().start_offset() * xs.dtype().size_in_bytes();
    if xs.device().is_cuda() && !start.is_multiple_of(16) {
        return xs.force_contiguous();
    }
    Ok(xs)
}

/// The mask in the form in which devices read it: contiguous, of `U8`.
fn as_bytes(keep: &Tensor) -> Result<Tensor> {
    match keep.dtype() {
        DType::U8 => keep.contiguous(),
        // A GPU cannot launch an operation on nothing.
        _ if keep.elem_count() == 0 => Tensor::zeros(keep.shape(), DType::U8, keep.device()),
        _ => keep.ne(0u8),
    }
}
