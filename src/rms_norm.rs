//! RMSNorm: the group scaling of one group, with a weight.

use crate::builder::parameter;
use crate::config::{state_dtype, validate_eps};
use crate::device::pick::DeviceKind;
use crate::error::Error;
use crate::group_scaling::GroupScaling;
use crate::layer::check_input;
use candle::{Module, Result, Tensor};
use candle_nn::VarBuilder;

/// Builds an [`RmsNorm`] layer over `size` channels from the tensors of `vb`, by the same call as
/// candle's `rms_norm`.
///
/// Its only tensor is `weight` or `gamma` (γ), `[size]`, of the builder's dtype. A fresh one is 1.
///
/// # Errors
///
/// - `size` is 0, or `eps` is not positive and finite in the dtype of the sums.
/// - The builder's dtype is not a float that the layer computes in.
/// - The weight is missing, or has another shape.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    if size == 0 {
        return Err(Error::Size.into());
    }
    state_dtype("a builder", vb.dtype())?;
    RmsNorm::new(parameter(&vb, size, ["weight", "gamma"], 1.)?, eps)
}

/// RMSNorm, which trains: divides each row by its root mean square, and multiplies it by a weight.
///
/// `y = γ ⊙ x / sqrt(mean(x²) + ε)` (Zhang and Sennrich, "Root Mean Square Layer Normalization",
/// 2019). candle's `RmsNorm` computes the same, but records no backward for contiguous inputs. This
/// one has a fused forward and a fused backward. It has no state, and is the same in training and
/// evaluation.
///
/// # Shapes
///
/// Input and output are `[.., size]`, of any rank from 1 and any strides. There may be no rows.
///
/// # Dtypes
///
/// Inputs are `F32`, `F64`, `F16` or `BF16`, and outputs have the input's dtype. The weight has the
/// input's dtype or `F32`. Sums are taken in `F32` (`F64` for `F64` inputs), and results are
/// rounded once on store.
///
/// # Gradients
///
/// Both are exact. Let `r = 1 / sqrt(mean(x²) + ε)` and `g = γ ⊙ ∂L/∂y`. Then
///
/// - `∂L/∂x = r (g − r x · mean(g ⊙ r x))`,
/// - `∂L/∂γ = Σ ∂L/∂y ⊙ r x` over rows.
///
/// They cannot be differentiated again: where candle keeps their graph
/// (`CANDLE_GRAD_DO_NOT_DETACH=1`), a backward through one of them is an error.
///
/// # Example
///
/// Attention that normalizes its queries and keys (QK-norm) does so over the width of a head:
///
/// ```
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_powernorm::rms_norm;
///
/// # fn main() -> Result<()> {
/// let varmap = VarMap::new();
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let [q_norm, k_norm] = ["q_norm", "k_norm"].map(|name| rms_norm(16, 1e-6, vb.pp(name)));
/// // [batch, heads, tokens, width of a head]
/// let [q, k] = [(); 2].map(|()| Tensor::randn(0f32, 1., (2, 4, 8, 16), &Device::Cpu));
/// let (q, k) = (q_norm?.forward(&q?)?, k_norm?.forward(&k?)?);
/// let scores = (q.matmul(&k.transpose(2, 3)?)? / 4.)?;
///
/// let gradients = scores.sqr()?.mean_all()?.backward()?;
/// assert!(varmap.all_vars().iter().all(|var| gradients.get(var).is_some()));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Tensor,
    scaling: GroupScaling,
    /// Found once, so that a call does not look for it.
    device: DeviceKind,
}

impl RmsNorm {
    /// Builds a layer from its weight, `[size]`, as candle's `RmsNorm::new(weight, eps)` does.
    /// candle's returns the layer, and this one a `Result`.
    ///
    /// `RmsNorm::new(size, eps, vb)` of candle_transformers' `with_tracing` is
    /// [`rms_norm(size, eps, vb)`](rms_norm) here. [Training](crate::guide::training) lists what to
    /// edit in which file.
    ///
    /// # Errors
    ///
    /// - The weight has another rank than 1, no channels, or a dtype other than those above.
    /// - `eps` is not positive and finite in the dtype of the sums.
    pub fn new(weight: Tensor, eps: f64) -> Result<Self> {
        match weight.dims() {
            [0] => return Err(Error::Size.into()),
            [_] => {}
            _ => return Err(Error::WeightRank(weight.shape().clone()).into()),
        }
        validate_eps(eps, state_dtype("weight", weight.dtype())?)?;
        let scaling = GroupScaling { groups: 1, eps };
        Ok(Self {
            device: DeviceKind::of(weight.device())?,
            weight,
            scaling,
        })
    }

    /// γ, `[size]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The number of channels.
    pub fn size(&self) -> usize {
        self.weight.elem_count()
    }

    /// ε.
    pub fn eps(&self) -> f64 {
        self.scaling.eps
    }
}

impl Module for RmsNorm {
    /// Normalizes `xs`, `[.., size]`.
    ///
    /// # Errors
    ///
    /// The input is a scalar, its last dimension is not `size`, or its dtype or device does not
    /// fit.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        check_input(
            xs,
            self.size(),
            [Some(&self.weight), None],
            self.weight.device(),
        )?;
        self.scaling.scale(xs, Some(&self.weight), &self.device)
    }
}
