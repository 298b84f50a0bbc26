//! Why a layer could not be built or a call could not run.
//!
//! candle keeps the text of an error and not its type, so this type stays inside the crate. A text
//! says what was expected and what came. It also says what to do, unless the rest of the text makes
//! that plain.

use candle::{DType, DeviceLocation, Shape};

/// The reasons this crate refuses a configuration or an input.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    // Construction
    #[error("power_norm: expected a size of at least 1, got 0")]
    Size,

    #[error(
        "power_norm: expected eps positive and finite after rounding to {dtype:?}, \
         got {got:?}: choose a number such as 1e-5"
    )]
    Eps {
        got: f64,
        /// The dtype that it was rounded to.
        dtype: DType,
    },

    #[error(
        "power_norm: expected {name} between 0 and 1, both excluded, after rounding to {dtype:?}, \
         got {got:?}: choose a number such as 0.9"
    )]
    Alpha {
        name: &'static str,
        got: f64,
        /// The dtype that it was rounded to.
        dtype: DType,
    },

    #[error(
        "power_norm: expected group_scaling to divide the size {size}, got {groups}: \
         choose `None`, 1 or another divisor"
    )]
    Groups { size: usize, groups: usize },

    #[error("power_norm: expected at least 1 group, got 0")]
    NoGroups,

    #[error(
        "power_norm: expected {groups} groups to divide the {size} channels of the input: \
         choose another number of groups"
    )]
    GroupsOfInput { size: usize, groups: usize },

    #[error("power_norm: expected {name} of dtype F32, F64, F16 or BF16, got {got:?}")]
    LayerDType {
        /// The argument that the layer is built from.
        name: &'static str,
        got: DType,
    },

    #[error(
        "power_norm: expected affine: true beside a weight and a bias, got false: \
         build a layer without them by `power_norm`"
    )]
    NotAffine,

    #[error(
        "power_norm: expected bias: true beside a bias, got false: \
         pass `None` in place of the bias"
    )]
    UnwantedBias,

    #[error(
        "power_norm: expected a weight of rank 1, got shape {0:?}: \
         flatten it, to one number a channel"
    )]
    WeightRank(Shape),

    /// No input would fit both parameters.
    #[error(
        "power_norm: expected bias of dtype {weight:?} (as the weight) or F32, got {got:?}: \
         convert one of them"
    )]
    BiasDType { weight: DType, got: DType },

    /// A tensor given to a constructor does not have one number a channel.
    #[error("power_norm: expected {name} of shape [{size}] (as the weight), got {got:?}")]
    ChannelShape {
        name: &'static str,
        size: usize,
        got: Shape,
    },

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

    /// A tensor of the state has another dtype than the layer keeps it in.
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

    /// A tensor of the layer lives on another device than the layer needs it on.
    #[error(
        "power_norm: expected {name} on {expected:?}, got it on {got:?}: \
         move it before the layer is built"
    )]
    StateDevice {
        name: &'static str,
        /// The device of ψ², or the CPU for the step count.
        expected: DeviceLocation,
        got: DeviceLocation,
    },

    /// The step count that was loaded is negative.
    #[error(
        "power_norm: expected iters of at least 0, got {0}: \
         load another checkpoint, or call `reset_running_stats`"
    )]
    Steps(i64),

    /// An environment variable names something that there is not.
    #[error("power_norm: expected {variable} to be {expected}, got {got:?}")]
    Environment {
        variable: &'static str,
        expected: &'static str,
        got: std::ffi::OsString,
    },

    // Calls
    #[error(
        "power_norm: expected an input of rank 1 or more, got a scalar: \
         give it a last dimension of channels"
    )]
    Scalar,

    #[error(
        "power_norm: expected a last dimension of {size}, got shape {got:?}: \
         move the channels last, or build a layer of another size"
    )]
    LastDim { size: usize, got: Shape },

    #[error(
        "power_norm: expected an input of dtype F32, F64, F16 or BF16, got {0:?}: \
         convert it by `to_dtype`"
    )]
    InputDType(DType),

    #[error(
        "power_norm: expected {name} of dtype {}, got {got:?}: \
         convert the input to {got:?}, or the parameters to F32",
        match input {
            DType::F32 => "F32 (as the input)".to_owned(),
            other => format!("{other:?} (as the input) or F32"),
        }
    )]
    ParameterDType {
        name: &'static str,
        input: DType,
        got: DType,
    },

    /// An argument lives on another device than the layer.
    #[error(
        "power_norm: expected {name} on the layer's device {expected:?}, got {got:?}: \
         move it by `to_device`"
    )]
    Device {
        name: &'static str,
        expected: DeviceLocation,
        got: DeviceLocation,
    },

    #[error(
        "power_norm: expected keep of dtype U8, U32 or I64, got {0:?}: make it 0 for padding, by \
         `ne(0f64)` from a mask of 1 and 0, or by `eq(0f64)` from an additive mask"
    )]
    KeepDType(DType),

    #[error(
        "power_norm: expected keep of shape {expected:?} (xs without its last dimension), \
         got {got:?}: give it one number for each row of xs"
    )]
    KeepShape { expected: Shape, got: Shape },

    #[error(
        "power_norm: expected a residual of shape {expected:?} and dtype {dtype:?} \
         (as the input), got {got:?} and {got_dtype:?}: give it the input's shape and dtype"
    )]
    Residual {
        expected: Shape,
        dtype: DType,
        got: Shape,
        got_dtype: DType,
    },

    #[error(
        "power_norm: expected a loss scale that is positive and finite in F32, \
         and whose inverse is too, got {0}"
    )]
    LossScale(f64),

    // Folding
    #[error(
        "power_norm: expected a layer in evaluation to fold, got one whose statistic moves: \
         call `mode.set_training(false)`, or end the recalibration, first"
    )]
    FoldOutsideEvaluation,

    #[error("power_norm: expected a linear layer of {size} input features, got {got}")]
    FoldFeatures { size: usize, got: usize },

    /// A kernel did not load. Usually the kernels were compiled for another compute capability.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    #[error(
        "power_norm: expected kernel {kernel} to load on compute capability \
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
        "power_norm: expected at most 2147483647 channels, and as many rows for each block of the \
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

    /// No machine has every device, so this test makes the errors directly.
    #[test]
    fn texts_of_reasons_that_need_a_second_device() {
        let gpu = |gpu_id| DeviceLocation::Cuda { gpu_id };
        for (reason, text) in [
            (
                Error::Device {
                    name: "xs",
                    expected: DeviceLocation::Cpu,
                    got: gpu(1),
                },
                "power_norm: expected xs on the layer's device Cpu, got Cuda { gpu_id: 1 }: \
                 move it by `to_device`",
            ),
            (
                Error::StateDevice {
                    name: "iters",
                    expected: DeviceLocation::Cpu,
                    got: gpu(0),
                },
                "power_norm: expected iters on Cpu, got it on Cuda { gpu_id: 0 }: \
                 move it before the layer is built",
            ),
            (
                Error::Kernel {
                    kernel: "normalize_f32_1".to_owned(),
                    compute_capability: "7.0".to_owned(),
                    reason: "no kernel image".to_owned(),
                },
                "power_norm: expected kernel normalize_f32_1 to load on compute capability 7.0, \
                 got no kernel image: build on this machine, or set CUDA_COMPUTE_CAP",
            ),
        ] {
            assert_eq!(reason.to_string(), text);
        }
    }
}
