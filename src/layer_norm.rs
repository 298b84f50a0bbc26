//! LayerNorm, and what RMSNorm shares with it.

use crate::builder::parameter;
use crate::config::{state_dtype, validate_eps};
use crate::device::pick::DeviceKind;
use crate::device::{RowNorm, sums_dtype};
use crate::error::Error;
use crate::layer::{check_device, check_input};
use crate::op;
use crate::op::step::Call;
use candle::{Module, Result, Tensor};
use candle_nn::{LayerNormConfig, VarBuilder};

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
    let LayerNormConfig {
        eps,
        remove_mean,
        affine,
    } = config.into();
    if size == 0 {
        return Err(Error::Size.into());
    }
    validate_eps(eps, state_dtype("a builder", vb.dtype())?)?;
    let weight = parameter(&vb, size, ["weight", "gamma"], 1.)?;
    let bias = match affine {
        true => Some(parameter(&vb, size, ["bias", "beta"], 0.)?),
        false => None,
    };
    Ok(LayerNorm {
        weight,
        bias,
        remove_mean,
        eps,
    })
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
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    remove_mean: bool,
    eps: f64,
}

impl LayerNorm {
    /// Builds a layer from its weight and bias, `[size]` each. Tensors that do not fit are an
    /// error in the first [`forward`](Module::forward).
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self {
            bias: Some(bias),
            ..Self::new_no_bias(weight, eps)
        }
    }

    /// Builds a layer from its weight, `[size]`, without a bias.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self {
            weight,
            bias: None,
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

    /// γ, `[size]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// β, `[size]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
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
        self.weight.elem_count()
    }

    /// Checks weight and bias, because the constructors accept any tensors.
    pub(crate) fn check_parameters(&self) -> Result<()> {
        match self.weight.dims() {
            [0] => return Err(Error::Size.into()),
            [_] => {}
            _ => return Err(Error::WeightRank(self.weight.shape().clone()).into()),
        }
        if let Some(bias) = &self.bias {
            if bias.dims() != [self.size()] {
                candle::bail!(
                    "power_norm: expected a bias of shape [{}] (as the weight), got {:?}: \
                     reshape it",
                    self.size(),
                    bias.shape()
                )
            }
            check_device("bias", bias.device(), self.weight.device())?;
        }
        state_dtype("weight", self.weight.dtype())?;
        Ok(())
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
        self.check_parameters()?;
        let parameters = [Some(&self.weight), self.bias.as_ref()];
        check_input(xs, self.size(), parameters, self.weight.device())?;
        validate_eps(self.eps, sums_dtype(xs.dtype()))?;
        let eps = self.eps;
        let norm = match self.remove_mean {
            true => RowNorm::Centred { eps },
            false => RowNorm::Groups { count: 1, eps },
        };
        let device = DeviceKind::of(xs.device())?;
        let call = Call::of_rows(&device, xs, norm);
        op::power_norm(Call {
            weight: Some(&self.weight),
            bias: self.bias.as_ref(),
            ..call
        })
    }
}
