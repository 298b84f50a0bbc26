//! RMSNorm: a LayerNorm that subtracts no mean.

use crate::layer_norm::LayerNorm;
use crate::op;
use candle::{Module, Result, Tensor};
use candle_nn::{LayerNormConfig, VarBuilder};

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
    RmsNorm::build(size, eps, vb, false)
}

/// Builds an [`RmsNorm`] layer whose weight is stored as its distance from 1: γ = 1 + w, as in Gemma
/// and Qwen3-Next. Its tensor is that of [`rms_norm`], and a fresh one is 0.
///
/// GGUF files store γ itself, also of these models
/// ([weights with an offset](crate::guide::coming_from#weights-with-an-offset)).
///
/// # Errors
///
/// As in [`rms_norm`].
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_powernorm::rms_norm_1p;
///
/// # fn main() -> Result<()> {
/// let varmap = VarMap::new();
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let norm = rms_norm_1p(2, 1e-6, vb.pp("norm"))?;
/// assert_eq!(norm.weight().to_vec1::<f32>()?, [0., 0.]); // what a checkpoint stores
///
/// let ys = norm.forward(&Tensor::new(&[[3f32, -3.]], &Device::Cpu)?)?; // γ is 1
/// assert!((ys.to_vec2::<f32>()?[0][0] - 1.).abs() < 1e-6);
/// # Ok(()) }
/// ```
pub fn rms_norm_1p(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    RmsNorm::build(size, eps, vb, true)
}

/// The name of the layer in errors.
const LAYER: &str = "rms_norm";

/// RMSNorm, which trains: divides each row by its root mean square, and multiplies it by a weight.
///
/// `y = γ ⊙ x / sqrt(mean(x²) + ε)` (Zhang and Sennrich, "Root Mean Square Layer Normalization",
/// 2019). candle's `RmsNorm` computes the same, but records no backward for contiguous inputs. This
/// one has a fused forward and a fused backward. It has no state, and is the same in training and
/// evaluation.
///
/// # Shapes
///
/// Input and output are `[.., size]`, of any rank from 1 and any strides. The number of rows may be
/// 0.
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
pub struct RmsNorm(LayerNorm);

impl RmsNorm {
    /// Builds a layer from its weight, `[size]`, with the same call as candle's `RmsNorm::new`.
    /// A tensor that does not fit is an error in the first [`forward`](#method.forward).
    ///
    /// A weight that is computed here, as in `RmsNorm::new((&w + 1.)?, eps)` for a model that stores
    /// γ − 1, keeps the values of that moment: `w` gets a gradient in each step, but the layer does
    /// not follow it. Use [`with_unit_offset`](Self::with_unit_offset) for such models. For other
    /// computed weights, build the layer in each forward, where such a call is right, which is why
    /// it is accepted. A view such as `w.flatten_all()?` shares the values of `w`, and follows.
    ///
    /// `RmsNorm::new(size, eps, vb)` of candle_transformers' `with_tracing` is
    /// [`rms_norm(size, eps, vb)`](rms_norm) here.
    /// [Porting](crate::guide::coming_from#the-edits-for-rmsnorm) lists what to edit in which file.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self(LayerNorm::rms_norm(weight, eps))
    }

    fn build(size: usize, eps: f64, vb: VarBuilder, unit_offset: bool) -> Result<Self> {
        let config = LayerNormConfig {
            eps,
            remove_mean: false,
            affine: false,
        };
        LayerNorm::build(LAYER, size, config, vb, unit_offset).map(Self)
    }

    /// The same layer with γ = 1 + w, as [`LayerNorm::with_unit_offset`] explains.
    #[must_use]
    pub fn with_unit_offset(self) -> Self {
        Self(self.0.with_unit_offset())
    }

    /// `true` if γ is 1 + [`weight`](Self::weight).
    pub fn unit_offset(&self) -> bool {
        self.0.unit_offset()
    }

    /// Adds `residual` to `xs`, and returns the normalized sum and the sum, in one fused pass, as
    /// [`LayerNorm::forward_residual`] does.
    ///
    /// # Errors
    ///
    /// As in [`forward`](#method.forward), or `residual` has another dtype, shape or device.
    pub fn forward_residual(&self, xs: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        let pass = self.0.pass(LAYER, xs)?.with_residual(residual)?;
        op::add_and_normalize(pass, None)
    }

    /// The layer as a [`LayerNorm`] that removes no mean.
    pub fn into_inner(self) -> LayerNorm {
        self.0
    }

    pub(crate) fn as_layer_norm(&self) -> &LayerNorm {
        &self.0
    }

    /// γ, `[size]`; γ − 1 [with a unit offset](Self::with_unit_offset).
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// The number of channels.
    pub fn size(&self) -> usize {
        self.0.size()
    }

    /// ε.
    pub fn eps(&self) -> f64 {
        self.0.eps()
    }

    /// The same as [`forward`](#method.forward). candle's `RmsNorm` has both methods, and there
    /// only `forward_diff` records a backward.
    pub fn forward_diff(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward(xs)
    }
}

impl Module for RmsNorm {
    /// Normalizes `xs`, `[.., size]`.
    ///
    /// # Errors
    ///
    /// - The input is a scalar, its last dimension is not `size`, or its dtype or device does not
    ///   fit.
    /// - The weight's rank is not 1, it has no channels, or its dtype is not one of those above.
    /// - ε is not positive and finite in the dtype of the sums.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        op::normalize(self.0.pass(LAYER, xs)?, None)
    }
}
