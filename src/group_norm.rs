//! GroupNorm: a LayerNorm of the groups of a sample's channels.

use crate::builder::parameter;
use crate::check::check_device;
use crate::config::{state_dtype, validate_eps};
use crate::device::pass::{Pass, RowNorm};
use crate::op;
use candle::{Module, Result, Tensor};
use candle_nn::VarBuilder;

/// The name of the layer in errors.
const LAYER: &str = "group_norm";

/// Builds a [`GroupNorm`] layer over `num_channels` channels in `num_groups` groups from the tensors
/// of `vb`, by the same call as candle's `group_norm`.
///
/// The tensors are `weight` or `gamma` (γ) and `bias` or `beta` (β), each `[num_channels]` and of the
/// builder's dtype. Fresh ones are 1 and 0.
///
/// # Errors
///
/// - `num_groups` is 0, or does not divide `num_channels`.
/// - ε is not positive and finite in the dtype of the sums.
/// - The builder's dtype is not a float that the layer computes in.
/// - A tensor is missing, or has another shape.
pub fn group_norm(
    num_groups: usize,
    num_channels: usize,
    eps: f64,
    vb: VarBuilder,
) -> Result<GroupNorm> {
    validate_eps(LAYER, eps, state_dtype(LAYER, "a builder", vb.dtype())?)?;
    check_groups(num_channels, num_groups)?;
    let weight = parameter(&vb, num_channels, ["weight", "gamma"], 1.)?;
    let bias = parameter(&vb, num_channels, ["bias", "beta"], 0.)?;
    GroupNorm::new(weight, bias, num_channels, num_groups, eps)
}

/// GroupNorm of inputs whose channels come first, as in a convolution: subtracts the mean of each
/// group of a sample, divides by its standard deviation, and applies a weight and a bias to each
/// channel.
///
/// `y = γ_c (x − μ) / sqrt(σ² + ε) + β_c`, where μ and σ² are over the C/G adjacent channels of a
/// group and over all positions (Wu and He, "Group Normalization", 2018; PyTorch's `GroupNorm`). One
/// group is a LayerNorm of the whole sample, and C groups are an InstanceNorm. candle's `GroupNorm`
/// computes the same with about a dozen operations. This one normalizes in one fused pass in each
/// direction, and then applies weight and bias with two of candle's operations.
///
/// [`GroupScaling`](crate::GroupScaling) and PowerNorm have their channels last, and their groups
/// are parts of a row.
///
/// # Shapes
///
/// Input and output are `[N, C, ..]`, of any rank from 2. A view that is not contiguous is copied. N
/// may be 0.
///
/// # Dtypes
///
/// Inputs are `F32`, `F64`, `F16` or `BF16`. Weight, bias and output have the input's dtype. As in
/// candle's layer, a group's sums are in `F32` (`F64` for `F64` inputs), its normalized values are
/// rounded to the input's dtype, and weight and bias are applied in that.
///
/// # Gradients
///
/// All are exact. They cannot be differentiated again: where candle keeps their graph
/// (`CANDLE_GRAD_DO_NOT_DETACH=1`), a backward through one of them is an error.
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_powernorm::group_norm; // was: use candle_nn::group_norm;
///
/// # fn main() -> Result<()> {
/// let varmap = VarMap::new();
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let norm = group_norm(4, 32, 1e-5, vb.pp("norm"))?;
///
/// let images = Tensor::randn(3f32, 2., (2, 32, 16, 16), &Device::Cpu)?;
/// let gradients = norm.forward(&images)?.powf(3.)?.mean_all()?.backward()?;
/// assert!(varmap.all_vars().iter().all(|var| gradients.get(var).is_some()));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
    num_channels: usize,
    num_groups: usize,
}

impl GroupNorm {
    /// Builds a layer from its weight and bias, `[num_channels]` each. Tensors that do not fit are
    /// an error in the first [`forward`](#method.forward).
    ///
    /// # Errors
    ///
    /// `num_groups` is 0, or does not divide `num_channels`.
    pub fn new(
        weight: Tensor,
        bias: Tensor,
        num_channels: usize,
        num_groups: usize,
        eps: f64,
    ) -> Result<Self> {
        check_groups(num_channels, num_groups)?;
        Ok(Self {
            weight,
            bias,
            eps,
            num_channels,
            num_groups,
        })
    }
}

fn check_groups(channels: usize, groups: usize) -> Result<()> {
    if groups == 0 || channels == 0 || !channels.is_multiple_of(groups) {
        candle::bail!("{LAYER}: expected groups that divide {channels} channels, got {groups}")
    }
    Ok(())
}

impl Module for GroupNorm {
    /// Normalizes `xs`, `[N, C, ..]`.
    ///
    /// # Errors
    ///
    /// - `xs` has another rank or number of channels, no position, or another dtype than those
    ///   above.
    /// - Weight or bias has another shape, dtype or device.
    /// - ε is not positive and finite in the dtype of the sums.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let (channels, groups, eps) = (self.num_channels, self.num_groups, self.eps);
        let batch = match xs.dims() {
            [batch, got, ..] if *got == channels => *batch,
            got => candle::bail!("{LAYER}: expected an input [N, {channels}, ..], got {got:?}"),
        };
        for (name, parameter) in [("weight", &self.weight), ("bias", &self.bias)] {
            let (dtype, got) = (parameter.dtype(), parameter.shape());
            if parameter.dims() != [channels] || dtype != xs.dtype() {
                candle::bail!(
                    "{LAYER}: expected {name} of shape [{channels}] and dtype {:?} (as the input), \
                     got {got:?} and {dtype:?}",
                    xs.dtype()
                )
            }
            check_device(LAYER, name, parameter.device(), xs.device())?;
        }
        let positions: usize = xs.dims()[2..].iter().product();
        let rows = xs.reshape((batch * groups, channels / groups * positions))?;
        let pass = Pass::of_rows(LAYER, &rows, RowNorm::Centred { eps }, None)?;
        let normalized = op::normalize(pass, None)?.reshape(xs.shape())?;
        let mut per_channel = vec![1; xs.rank()];
        per_channel[1] = channels;
        let of = |parameter: &Tensor| parameter.reshape(per_channel.as_slice());
        let scaled = normalized.broadcast_mul(&of(&self.weight)?)?;
        scaled.broadcast_add(&of(&self.bias)?)
    }
}
