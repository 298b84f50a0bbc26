//! LayerNorm, and what RMSNorm shares with it.

use crate::builder::parameter;
use crate::config::{state_dtype, validate_eps};
use crate::device::pass::{Affine, Pass, RowNorm, check_affine};
use crate::op;
use candle::{Module, Result, Tensor};
use candle_nn::{LayerNormConfig, VarBuilder};
use std::fmt;

/// The name of the layer in errors.
pub(crate) const LAYER: &str = "layer_norm";

/// Builds a [`LayerNorm`] layer over `size` channels from the tensors of `vb`, by the same call as
/// candle's `layer_norm`.
///
/// `config` is ε or a [`LayerNormConfig`]. The tensors are `weight` or `gamma` (γ) and, if
/// `config.affine`, `bias` or `beta` (β), each `[size]` and of the builder's dtype. Fresh ones are
/// 1 and 0.
///
/// # Errors
///
/// - `size` is 0, or ε is not positive and finite in the dtype of the sums.
/// - The builder's dtype is not a float that the layer computes in.
/// - A tensor is missing, or has another shape.
pub fn layer_norm<C: Into<LayerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder,
) -> Result<LayerNorm> {
    LayerNorm::build(LAYER, size, config.into(), vb, false)
}

/// Builds a [`LayerNorm`] layer whose weight is stored as its distance from 1: γ = 1 + w, as in
/// Nemotron's LayerNorm1P. The tensors are those of [`layer_norm`], and a fresh weight is 0.
///
/// # Errors
///
/// As in [`layer_norm`].
pub fn layer_norm_1p<C: Into<LayerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder,
) -> Result<LayerNorm> {
    LayerNorm::build(LAYER, size, config.into(), vb, true)
}

/// Builds a [`LayerNorm`] layer without a bias, by the same call as candle's `layer_norm_no_bias`.
/// A `bias` in `vb` is ignored.
///
/// # Errors
///
/// As in [`layer_norm`].
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    let config = LayerNormConfig {
        affine: false,
        ..eps.into()
    };
    layer_norm(size, config, vb)
}

/// A LayerNorm that trains: subtracts each row's mean, divides by its standard deviation, and
/// applies a weight and a bias.
///
/// `y = γ ⊙ (x − μ) / sqrt(σ² + ε) + β`, with `μ = mean(x)` and `σ² = mean((x − μ)²)` (Ba, Kiros
/// and Hinton, "Layer Normalization", 2016). candle's `LayerNorm` computes the same, but with a
/// bias it records no backward for contiguous inputs. This one has a fused forward and a fused
/// backward. It has no state, and is the same in training and evaluation.
///
/// Its functions, constructors and accessors are those of candle's `LayerNorm`, so in a model of
/// candle's a changed import is the whole change.
///
/// # Shapes
///
/// Input and output are `[.., size]`, of any rank from 1 and any strides. The number of rows may be
/// 0.
///
/// # Dtypes
///
/// Inputs are `F32`, `F64`, `F16` or `BF16`, and outputs have the input's dtype. Weight and bias
/// have the input's dtype or `F32`. Sums are taken in `F32` (`F64` for `F64` inputs), and results
/// are rounded once on store. The variance is the mean of the squares of centred values, so a large
/// mean does not swamp it. Rows whose squares overflow the dtype of the sums work too, as long as
/// the distances to the mean fit it.
///
/// # Gradients
///
/// All are exact. Let `r = 1 / sqrt(σ² + ε)`, `x̂ = r (x − μ)` and `g = γ ⊙ ∂L/∂y`. Then
///
/// - `∂L/∂x = r (g − mean(g) − x̂ · mean(g ⊙ x̂))`,
/// - `∂L/∂γ = Σ ∂L/∂y ⊙ x̂` over rows,
/// - `∂L/∂β = Σ ∂L/∂y` over rows.
///
/// They cannot be differentiated again: where candle keeps their graph
/// (`CANDLE_GRAD_DO_NOT_DETACH=1`), a backward through one of them is an error.
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_powernorm::{layer_norm, LayerNorm, LayerNormConfig};
///
/// # fn main() -> Result<()> {
/// let varmap = VarMap::new();
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let norm: LayerNorm = layer_norm(64, LayerNormConfig::default(), vb.pp("norm"))?;
///
/// let xs = Tensor::randn(3f32, 2., (4, 10, 64), &Device::Cpu)?;
/// let gradients = norm.forward(&xs)?.sqr()?.mean_all()?.backward()?;
/// assert!(varmap.all_vars().iter().all(|var| gradients.get(var).is_some()));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct LayerNorm {
    affine: Affine,
    remove_mean: bool,
    eps: f64,
}

impl fmt::Debug for LayerNorm {
    /// As candle's layer, and `unit_offset` if it is set.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut layer = f.debug_struct("LayerNorm");
        layer.field("weight", &self.affine.weight);
        layer.field("bias", &self.affine.bias);
        layer.field("remove_mean", &self.remove_mean);
        layer.field("eps", &self.eps);
        if self.unit_offset() {
            layer.field("unit_offset", &true);
        }
        layer.finish()
    }
}

impl LayerNorm {
    /// Builds a layer from its weight and bias, `[size]` each. Tensors that do not fit are an
    /// error in the first [`forward`](#method.forward).
    ///
    /// A weight that is computed from a variable, such as `(&w + 1.)?`, keeps the values of that
    /// moment and does not follow the variable, so build such a layer in each forward, as
    /// [`RmsNorm::new`](crate::RmsNorm::new) explains.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self {
            affine: Affine::new(weight, Some(bias)),
            remove_mean: true,
            eps,
        }
    }

    /// Builds a layer from its weight, `[size]`, without a bias.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self {
            affine: Affine::new(weight, None),
            remove_mean: true,
            eps,
        }
    }

    /// Builds an RMSNorm from its weight, `[size]`: it subtracts no mean, and has no bias.
    pub fn rms_norm(weight: Tensor, eps: f64) -> Self {
        Self {
            remove_mean: false,
            ..Self::new_no_bias(weight, eps)
        }
    }

    /// The same layer with γ = 1 + w, where w is the weight that it was built with. The 1 is added in
    /// the dtype of the sums, so that γ is not rounded to a half-precision weight's dtype.
    ///
    /// Gemma and Qwen3-Next (RMSNorm) and Nemotron (LayerNorm) store such weights, which start at 0.
    /// Weight decay then pulls γ towards 1. `VarBuilder::get`, which those models call, makes a fresh
    /// weight of zeros, and so do [`layer_norm_1p`] and [`rms_norm_1p`](crate::rms_norm_1p), while
    /// [`layer_norm`] makes ones.
    #[must_use]
    pub fn with_unit_offset(mut self) -> Self {
        self.affine.offset = 1.;
        self
    }

    /// `true` if γ is 1 + [`weight`](Self::weight).
    pub fn unit_offset(&self) -> bool {
        self.affine.offset != 0.
    }

    /// γ, `[size]`; γ − 1 [with a unit offset](Self::with_unit_offset).
    pub fn weight(&self) -> &Tensor {
        &self.affine.weight
    }

    /// β, `[size]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.affine.bias.as_ref()
    }

    /// ε.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// `false` if the layer is an RMSNorm: it divides rows by their root mean square, and subtracts
    /// no mean.
    pub fn remove_mean(&self) -> bool {
        self.remove_mean
    }

    /// The number of channels.
    pub fn size(&self) -> usize {
        self.affine.weight.elem_count()
    }

    /// Adds `residual` to `xs`, and returns the normalized sum and the sum, in one fused pass. In a
    /// pre-norm transformer the next block reads the normalized sum, and the sum is the residual
    /// stream.
    ///
    /// Both inputs and both outputs are `[.., size]`, of one shape and dtype. The sum has the values
    /// of `xs + residual`, and the normalized sum those of [`forward`](#method.forward) of it.
    ///
    /// # Errors
    ///
    /// As in [`forward`](#method.forward), or `residual` has another dtype, shape or device.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{Device, Module, Result, Tensor};
    /// use candle_nn::Linear;
    /// use candle_powernorm::LayerNorm;
    ///
    /// /// A feed-forward block and the normalization before the next block. `xs` is the output of
    /// /// the block before, and `stream` the residual stream up to it.
    /// fn block(norm: &LayerNorm, mlp: &Linear, xs: &Tensor, stream: &Tensor) -> Result<[Tensor; 2]> {
    ///     let (normalized, stream) = norm.forward_residual(xs, stream)?;
    ///     Ok([mlp.forward(&normalized)?, stream])
    /// }
    /// ```
    pub fn forward_residual(&self, xs: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        let pass = self.pass(LAYER, xs)?.with_residual(residual)?;
        op::add_and_normalize(pass, None)
    }

    /// The layer `name` on the tensors of `vb`.
    pub(crate) fn build(
        name: &str,
        size: usize,
        config: LayerNormConfig,
        vb: VarBuilder,
        unit_offset: bool,
    ) -> Result<Self> {
        let LayerNormConfig {
            eps,
            remove_mean,
            affine,
        } = config;
        if size == 0 {
            candle::bail!("{name}: expected a size of at least 1, got 0")
        }
        validate_eps(name, eps, state_dtype(name, "a builder", vb.dtype())?)?;
        let fresh = if unit_offset { 0. } else { 1. };
        let weight = parameter(&vb, size, ["weight", "gamma"], fresh)?;
        let bias = match affine {
            true => Some(parameter(&vb, size, ["bias", "beta"], 0.)?),
            false => None,
        };
        Ok(Self {
            affine: Affine::new(weight, bias).with_offset(if unit_offset { 1. } else { 0. }),
            remove_mean,
            eps,
        })
    }

    /// The forward of the layer `name`, as which this one was built.
    #[inline]
    pub(crate) fn pass<'a>(&'a self, name: &'static str, xs: &'a Tensor) -> Result<Pass<'a>> {
        let eps = self.eps;
        let norm = match self.remove_mean {
            true => RowNorm::Centred { eps },
            false => RowNorm::Groups { count: 1, eps },
        };
        Pass::of_rows(name, xs, norm, Some(&self.affine))
    }

    /// Checks weight and bias, because the constructors accept any tensors.
    pub(crate) fn check_parameters(&self, name: &str) -> Result<()> {
        check_affine(name, &self.affine)
    }
}

impl Module for LayerNorm {
    /// Normalizes `xs`, `[.., size]`.
    ///
    /// # Errors
    ///
    /// - The input is a scalar, its last dimension is not `size`, or its dtype or device does not
    ///   fit.
    /// - The weight's rank is not 1, it has no channels, its dtype is not one of those above, or
    ///   the bias has another shape or device.
    /// - ε is not positive and finite in the dtype of the sums.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        op::normalize(self.pass(LAYER, xs)?, None)
    }
}
