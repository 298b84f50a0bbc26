//! Errors that several files share, and those of a layer's state and device. A check of an argument
//! has its text beside it.
//!
//! candle keeps the text of an error and not its type, so this type stays inside the crate. A text
//! says what was expected and what was found. It also says what to do, unless the rest of the text
//! makes that plain.

use candle::{DType, DeviceLocation, Shape};

/// A reason why a layer could not be built, or a call could not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    // Arguments
    #[error("power_norm: expected a size of at least 1, got 0")]
    Size,

    #[error(
        "power_norm: expected a weight of rank 1, got shape {0:?}: \
         flatten it, to one number a channel"
    )]
    WeightRank(Shape),

    // The state
    #[error(
        "power_norm: expected a running_phi of finite numbers of at least 0, got {0:?}: \
         pass the mean squares of a checkpoint, or ones for a fresh layer"
    )]
    RunningPhi(f64),

    /// A frozen builder lacks ψ². Its full name.
    #[error(
        "power_norm: expected a tensor {0}, got none: a checkpoint of LayerNorm has no statistics, \
         so put its tensors into a `VarMap` and train on"
    )]
    NoStatistics(String),

    #[error(
        "power_norm: expected {name} of dtype {expected:?}, got {got:?}: \
         convert it before the layer is built"
    )]
    StateDType {
        name: &'static str,
        expected: DType,
        got: DType,
    },

    /// Of a state's tensors, only some are variables, so not all of it would be saved.
    #[error(
        "power_norm: expected variables for all of the state or for none, got a copy of {0}: \
         keep running_phi and ema_gz in F32 (F64 in an F64 model), and iters and groups on the \
         CPU; on a GPU, rename the variables themselves, not by `rename`"
    )]
    CopiedState(&'static str),

    /// A checkpoint brought the statistics of a layer with another group scaling.
    #[error(
        "power_norm: expected statistics with group_scaling {expected:?}, got group_scaling {got}: \
         set it as it was in training, or begin new statistics, by `reset_running_stats` or from a \
         checkpoint without running_phi, ema_gz, iters and groups"
    )]
    StateGroups {
        expected: Option<usize>,
        /// The setting that `groups` records.
        got: String,
    },

    #[error(
        "power_norm: expected {name} on {expected:?}, got it on {got:?}: \
         move it before the layer is built"
    )]
    StateDevice {
        name: &'static str,
        /// The device of ψ².
        expected: DeviceLocation,
        got: DeviceLocation,
    },

    /// A variable of the state that the host reads in every step is on a GPU.
    #[error(
        "power_norm: expected {name} on the CPU, got it on {got:?}: keep iters and groups on the \
         CPU, where a step reads them without waiting for a GPU. To fill a `VarMap` from a file, \
         load it on the CPU, and move every tensor except these two"
    )]
    CountDevice {
        name: &'static str,
        got: DeviceLocation,
    },

    /// The step count that was loaded is negative.
    #[error(
        "power_norm: expected iters of at least 0, got {0}: \
         load another checkpoint, or call `reset_running_stats`"
    )]
    Steps(i64),

    // Devices
    /// An environment variable names something that there is not.
    #[error("candle_powernorm: expected {variable} to be {expected}, got {got:?}")]
    Environment {
        variable: &'static str,
        expected: &'static str,
        got: std::ffi::OsString,
    },

    /// candle's feature `cuda` is on, and this crate's is off.
    #[cfg_attr(feature = "cuda", allow(dead_code))]
    #[error(
        "candle_powernorm: expected this crate's feature cuda for a layer on an NVIDIA GPU, got it \
         off: turn it on beside candle's (`--features candle-powernorm/cuda`), or set \
         CANDLE_POWERNORM_DEVICE=composed to run the layer as many of candle's operations, slowly"
    )]
    NoKernels,

    /// The kernels have no such numbers.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    #[error("candle_powernorm: expected numbers of dtype F32, F64, F16 or BF16, got {0:?}")]
    DType(DType),

    /// A kernel did not load. Usually the kernels were compiled for another compute capability.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    #[error(
        "candle_powernorm: expected kernel {kernel} to load on compute capability \
         {compute_capability}, got {reason}: build on this machine, or set CUDA_COMPUTE_CAP"
    )]
    Kernel {
        kernel: String,
        compute_capability: String,
        reason: String,
    },

    /// The kernels count channels, and the rows of a block, in 32 bits.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    #[error(
        "candle_powernorm: expected at most 2147483647 channels, and as many rows for each block of the \
         GPU, got {rows} rows of {cols} channels: split the batch"
    )]
    TooLarge { rows: usize, cols: usize },
}

impl From<Error> for candle::Error {
    fn from(error: Error) -> Self {
        candle::Error::wrap(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No machine of the tests has a GPU that the kernels do not fit, so this test makes the error.
    #[test]
    fn text_of_a_kernel_that_does_not_load() {
        let reason = Error::Kernel {
            kernel: "normalize_f32_1".to_owned(),
            compute_capability: "7.0".to_owned(),
            reason: "no kernel image".to_owned(),
        };
        assert_eq!(
            reason.to_string(),
            "candle_powernorm: expected kernel normalize_f32_1 to load on compute capability 7.0, \
             got no kernel image: build on this machine, or set CUDA_COMPUTE_CAP"
        );
    }
}
