//! Why a layer could not be built or a call could not run.

use candle::{DType, DeviceLocation, Shape};

/// The reasons this crate refuses a configuration or an input.
///
/// Functions return [`candle::Result`]; these reasons arrive in it as [`candle::Error::Wrapped`], which
/// keeps a reason's text and not its type. An error leaves the layer's state as it was.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The layer has no channel to normalize.
    #[error("power_norm: expected a size of at least 1, got 0")]
    Size,

    /// `eps` is not positive and finite in the dtype of the sums.
    #[error("power_norm: expected eps positive and finite in {dtype:?}, got {got}")]
    Eps {
        /// The value configured.
        got: f64,
        /// The dtype of the layer's sums and state.
        dtype: DType,
    },

    /// A moving-average weight lies outside the open interval (0, 1).
    #[error("power_norm: expected {name} between 0 and 1, both excluded, got {got}")]
    Alpha {
        /// `alpha_fwd` or `alpha_bwd`.
        name: &'static str,
        /// The value configured.
        got: f64,
    },

    /// The groups of the layer-scale do not divide the channels evenly.
    #[error("power_norm: expected group_scaling to divide the size {size}, got {groups}")]
    Groups {
        /// Channels of the layer.
        size: usize,
        /// Groups configured.
        groups: usize,
    },

    /// A layer-scale of no group.
    #[error("power_norm: expected at least 1 group, got 0")]
    NoGroups,

    /// The builder's dtype is not a floating-point type the layer computes in.
    #[error("power_norm: expected a builder of dtype F32, F64, F16 or BF16, got {0:?}")]
    BuilderDType(DType),

    /// A buffer that came from the builder has a dtype other than the state's.
    #[error("power_norm: expected {name} of dtype {expected:?}, got {got:?}")]
    StateDType {
        /// Name of the tensor.
        name: &'static str,
        /// What the layer keeps it in.
        expected: DType,
        /// What the builder holds.
        got: DType,
    },

    /// A tensor that came from the builder lives on another device than the layer needs it on.
    #[error("power_norm: expected {name} on {expected:?}, got it on {got:?}")]
    StateDevice {
        /// Name of the tensor.
        name: &'static str,
        /// The device of ψ², or the CPU for the step count.
        expected: DeviceLocation,
        /// Where the builder holds it.
        got: DeviceLocation,
    },

    /// The step count that was loaded is negative.
    #[error("power_norm: expected iters of at least 0, got {0}")]
    Steps(i64),

    /// A scalar has no last dimension to normalize.
    #[error("power_norm: expected an input of rank 1 or more, got a scalar")]
    Rank,

    /// The input's last dimension is not the layer's size.
    #[error("power_norm: expected a last dimension of {size}, got shape {got:?}")]
    LastDim {
        /// Channels of the layer.
        size: usize,
        /// Shape of the input.
        got: Shape,
    },

    /// The input's dtype is not one the layer computes in.
    #[error("power_norm: expected an input of dtype F32, F64, F16 or BF16, got {0:?}")]
    InputDType(DType),

    /// Weight and bias have neither the input's dtype nor `F32`.
    #[error("power_norm: expected {name} of dtype {input:?} (as the input) or F32, got {got:?}")]
    ParameterDType {
        /// `weight` or `bias`.
        name: &'static str,
        /// Dtype of the input.
        input: DType,
        /// Dtype of the parameter.
        got: DType,
    },

    /// The input, the mask, the residual or the linear layer to fold into lives on another device than the layer.
    #[error("power_norm: expected {name} on the layer's device {expected:?}, got {got:?}")]
    Device {
        /// `xs`, `keep`, `residual`, `next` or `previous`.
        name: &'static str,
        /// Device of the layer.
        expected: DeviceLocation,
        /// Device of the argument.
        got: DeviceLocation,
    },

    /// The mask is not a `U8` tensor.
    #[error("power_norm: expected keep of dtype U8, got {0:?}")]
    KeepDType(DType),

    /// The mask does not have one entry for each row of the input.
    #[error("power_norm: expected keep of shape {expected:?} (xs without its last dimension), got {got:?}")]
    KeepShape {
        /// Shape of the input without its last dimension.
        expected: Shape,
        /// Shape of the mask.
        got: Shape,
    },

    /// The residual does not have the input's shape and dtype.
    #[error("power_norm: expected a residual of shape {expected:?} and dtype {dtype:?} (as the input), got {got:?} and {got_dtype:?}")]
    Residual {
        /// Shape of the input.
        expected: Shape,
        /// Dtype of the input.
        dtype: DType,
        /// Shape of the residual.
        got: Shape,
        /// Dtype of the residual.
        got_dtype: DType,
    },

    /// A loss scale is not positive and finite in `F32`, or its inverse is not.
    #[error(
        "power_norm: expected a loss scale positive and finite in F32, as its inverse, got {0}"
    )]
    LossScale(f64),

    /// Another rank could not come to a sum: its call failed. (On a GPU ranks hear of each other in a layer's first training
    /// forward alone. Later this says that a sum failed, and with it the step, whose backward is called again.)
    #[error("power_norm: expected every rank to take part in a sum, got a rank whose call failed")]
    RankFailed,

    /// The ranks came to one sum for different things: layers of different sizes, or calls in different orders. (On a GPU that is
    /// noticed in a layer's first training forward alone; there it may be that t, T, recipe or statistic differ.)
    #[error("power_norm: expected every rank to sum {numbers} numbers of {exchange}, got ranks that differ")]
    RanksDisagree {
        /// What this rank came for.
        exchange: &'static str,
        /// How many numbers it brought.
        numbers: usize,
    },

    /// The engine that sums over ranks could not be set up, or did not sum.
    #[error("power_norm: {engine}: {reason}")]
    Communicator {
        /// `MPI` or `NCCL`.
        engine: &'static str,
        /// What was expected of it, and what came.
        reason: String,
    },

    /// A layer that is not in evaluation cannot be folded: its statistic still moves.
    #[error("power_norm: expected a layer in evaluation to fold, got one whose statistic moves")]
    FoldOutsideEvaluation,

    /// The linear layer to fold into does not meet the layer's channels.
    #[error("power_norm: expected a linear layer of {size} {side} features, got {got}")]
    FoldFeatures {
        /// `input` of the layer after the norm, `output` of the one before it.
        side: &'static str,
        /// Channels of the layer.
        size: usize,
        /// Features of the linear layer.
        got: usize,
    },

    /// The layer-scale, which is no multiply-add, stands between the norm and the linear layer before it.
    #[error("power_norm: expected no layer-scale after the linear layer to fold into, got {groups} groups")]
    FoldThroughLayerScale {
        /// Groups of the layer-scale.
        groups: usize,
    },

    /// A CUDA kernel of this crate cannot run on the device: it was compiled for another compute capability, as
    /// a rule.
    #[error("power_norm: expected kernel {kernel} to load on compute capability {compute_capability}, got {reason}")]
    Kernel {
        /// Name of the entry point.
        kernel: String,
        /// That of the device.
        compute_capability: String,
        /// What the driver says.
        reason: String,
    },
}

impl From<Error> for candle::Error {
    fn from(error: Error) -> Self {
        candle::Error::wrap(error)
    }
}
