//! Functions of candle_nn that record no backward there, with one: normalizations for models that
//! keep their parameters themselves, the softmax and rotary embeddings. And candle's GELUs, many
//! times faster on CPUs in both directions, and with a backward that is right in half precision.
//!
//! Each takes the arguments of candle_nn's function of the same name, and is differentiable in every
//! argument, so a changed import is the whole change:
//!
//! | here | in candle 0.11 |
//! |---|---|
//! | [`layer_norm`], [`rms_norm`] | `candle_nn::ops::layer_norm`, `rms_norm` |
//! | [`softmax_last_dim`] | `candle_nn::ops::softmax_last_dim` |
//! | [`rope`], [`rope_i`], [`rope_thd`] | the same names in `candle_nn::rotary_emb` |
//! | [`gelu`]`(&xs)`, [`gelu_erf`]`(&xs)` | `xs.gelu()`, `xs.gelu_erf()` |
//!
//! [`add_layer_norm`] and [`add_rms_norm`] add a residual first, in the same pass.
//!
//! # Normalizations
//!
//! [`LayerNorm`] and [`RmsNorm`](crate::RmsNorm) have the equations, shapes, dtypes and gradients.
//!
//! # Softmax and rotary embeddings
//!
//! The forward is candle_nn's own fused function, on every device and in every dtype in which that
//! runs, except that a CPU computes the softmax of half precision in `F32`. The graph keeps the input
//! and the output. candle_nn's differentiable forms, `ops::softmax` and `rotary_emb::rope_slow`, keep
//! each intermediate result, and `rope_slow` both tables, at their full length, twice as wide. An
//! input that is not contiguous is copied, where candle_nn's function rejects it. The gradients can
//! be differentiated again.
//!
//! An error begins with the name of the function that was called, and names its arguments.
//!
//! ```
//! use candle::{Device, Result, Tensor, Var};
//! use candle_powernorm::ops; // was: use candle_nn::ops;
//!
//! # fn main() -> Result<()> {
//! let weight = Var::ones(4, candle::DType::F32, &Device::Cpu)?;
//! let xs = Tensor::randn(0f32, 1., (2, 3, 4), &Device::Cpu)?;
//! let ys = ops::rms_norm(&xs, &weight, 1e-6)?;
//! let (normalized, sum) = ops::add_rms_norm(&ys, &xs, &weight, 1e-6)?;
//! let gradients = (normalized + sum)?.sqr()?.sum_all()?.backward()?;
//! assert!(gradients.get(&weight).is_some());
//! # Ok(()) }
//! ```

use crate::check::check_device;
use crate::config::state_dtype;
use crate::layer_norm::LayerNorm;
use crate::op;
use crate::op::fused::{self, Rotation};
use crate::op::gelu::Curve;
use candle::{DType, Result, Tensor};

/// LayerNorm of `xs`, `[.., C]`: `alpha` is γ and `beta` β, `[C]` each. candle_nn's
/// `ops::layer_norm`, with a backward.
///
/// # Errors
///
/// The arguments' shapes, dtypes or devices do not fit each other, or ε is not positive and finite.
pub fn layer_norm(xs: &Tensor, alpha: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    check("layer_norm", xs, alpha, Some(beta))?;
    let layer = LayerNorm::new(alpha.clone(), beta.clone(), eps.into());
    op::normalize(layer.pass("layer_norm", xs)?, None)
}

/// RMSNorm of `xs`, `[.., C]`: `alpha` is γ, `[C]`. candle_nn's `ops::rms_norm`, with a backward.
///
/// # Errors
///
/// As in [`layer_norm`].
pub fn rms_norm(xs: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    check("rms_norm", xs, alpha, None)?;
    let layer = LayerNorm::rms_norm(alpha.clone(), eps.into());
    op::normalize(layer.pass("rms_norm", xs)?, None)
}

/// Returns [`layer_norm`] of `xs + residual`, and the sum.
///
/// # Errors
///
/// As in [`layer_norm`], or `residual` has another shape, dtype or device than `xs`.
pub fn add_layer_norm(
    xs: &Tensor,
    residual: &Tensor,
    alpha: &Tensor,
    beta: &Tensor,
    eps: f32,
) -> Result<(Tensor, Tensor)> {
    check("add_layer_norm", xs, alpha, Some(beta))?;
    let layer = LayerNorm::new(alpha.clone(), beta.clone(), eps.into());
    let pass = layer.pass("add_layer_norm", xs)?.with_residual(residual)?;
    op::add_and_normalize(pass, None)
}

/// Returns [`rms_norm`] of `xs + residual`, and the sum.
///
/// # Errors
///
/// As in [`add_layer_norm`].
pub fn add_rms_norm(
    xs: &Tensor,
    residual: &Tensor,
    alpha: &Tensor,
    eps: f32,
) -> Result<(Tensor, Tensor)> {
    check("add_rms_norm", xs, alpha, None)?;
    let layer = LayerNorm::rms_norm(alpha.clone(), eps.into());
    let pass = layer.pass("add_rms_norm", xs)?.with_residual(residual)?;
    op::add_and_normalize(pass, None)
}

/// The softmax of `xs` over its last dimension. candle_nn's `ops::softmax_last_dim`, with a
/// backward.
///
/// `y = exp(x − max x) / Σ exp(x − max x)`, with the gradient `∂L/∂x = y ⊙ (∂L/∂y − Σ ∂L/∂y ⊙ y)`,
/// where maximum and sums run over the last dimension.
///
/// `xs` is of any rank from 1 and any layout, in `F32`, `F64`, `F16` or `BF16`. A row that is −∞
/// throughout is NaN, as in candle_nn. Rows in half precision are computed in `F32` on a CPU, where
/// candle_nn adds the exponentials in half precision, so that long rows are wrong there
/// ([traps](crate::guide::traps)).
///
/// # Errors
///
/// `xs` is a scalar, or of another dtype.
///
/// # Example
///
/// ```
/// use candle::{Device, Result, Tensor, Var};
/// use candle_powernorm::ops::softmax_last_dim; // was: use candle_nn::ops::softmax_last_dim;
///
/// # fn main() -> Result<()> {
/// let scores = Var::new(&[[0f32, 1., 2.], [2., 0., 0.]], &Device::Cpu)?;
/// let attention = softmax_last_dim(&scores)?;
/// let gradients = attention.sqr()?.sum_all()?.backward()?;
/// assert!(gradients.get(&scores).is_some());
/// # Ok(()) }
/// ```
pub fn softmax_last_dim(xs: &Tensor) -> Result<Tensor> {
    fused::softmax_last_dim(xs)
}

/// Rotary position embeddings of queries or keys. candle_nn's `rotary_emb::rope`, with a backward.
///
/// Rotates element i and element i + D/2 of each head by the angle of its position:
/// `y₁ = x₁ cos − x₂ sin`, `y₂ = x₁ sin + x₂ cos` (Su et al., "RoFormer", 2021). The gradient of
/// `xs` is the gradient of the output, rotated back.
///
/// # Shapes
///
/// - `xs`: `[batch, heads, positions, D]`, of any layout.
/// - `cos` and `sin`: `[P, D/2]`, or `[batch, P, D/2]` with a table for each sequence, where P is at
///   least the number of positions. Position 0 of `xs` uses the first row, so narrow the tables for
///   a sequence that begins later. They have the dtype of `xs`: `F32`, `F64`, `F16` or `BF16`.
///
/// # Gradients
///
/// `cos` and `sin` get theirs if they depend on variables. Rows beyond the last position get 0.
///
/// # Errors
///
/// The arguments' shapes, dtypes or devices do not fit each other.
///
/// # Example
///
/// ```
/// use candle::{Device, Result, Tensor, Var};
/// use candle_powernorm::ops::rope; // was: use candle_nn::rotary_emb::rope;
///
/// # fn main() -> Result<()> {
/// let queries = Var::randn(0f32, 1., (2, 4, 16, 8), &Device::Cpu)?;
/// let angles = Tensor::rand(0f32, 3., (32, 4), &Device::Cpu)?; // for up to 32 positions
/// let rotated = rope(&queries, &angles.cos()?, &angles.sin()?)?;
/// let gradients = rotated.powf(3.)?.sum_all()?.backward()?;
/// assert!(gradients.get(&queries).is_some());
/// # Ok(()) }
/// ```
pub fn rope(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    Rotation::Halves.apply(xs, cos, sin)
}

/// [`rope`] of neighbours: rotates element 2i and element 2i + 1 of each head. candle_nn's
/// `rotary_emb::rope_i`, with a backward.
///
/// # Errors
///
/// As in [`rope`].
pub fn rope_i(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    Rotation::Interleaved.apply(xs, cos, sin)
}

/// [`rope`] of `xs` in the layout `[batch, positions, heads, D]`. candle_nn's
/// `rotary_emb::rope_thd`, with a backward.
///
/// # Errors
///
/// As in [`rope`].
pub fn rope_thd(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    Rotation::HalvesThd.apply(xs, cos, sin)
}

/// GELU by its tanh approximation, element by element. candle's `Tensor::gelu`, in one pass in each
/// direction on CPUs.
///
/// `y = x (1 + tanh u)/2` with `u = √(2/π) (x + 0.044715 x³)` (Hendrycks & Gimpel, "Gaussian Error
/// Linear Units", 2016, arXiv:1606.08415), computed as `x/(1 + exp(-2u))`, whose digits do not cancel
/// for negative x. So `gelu(&xs)?` takes the place of `xs.gelu()?`, of `Activation::NewGelu` and of
/// `Activation::GeluPytorchTanh`. `Activation::Gelu` is [`gelu_erf`].
///
/// `xs` is of any shape and layout, in `F32`, `F64`, `F16` or `BF16`. On a CPU, elements in half
/// precision are computed in `F32` and rounded once. An `F32` output is off by less than 1e-6 of its
/// value, and an `F64` output by a few units in the last place, where candle's lose all digits from
/// −6 on in `F32` and −8 in `F64`. Below the normal numbers the result is rounded once, and it is −0 where that is
/// nothing. The bits of an element depend neither on its place nor on threads. Other devices run
/// candle's kernel.
///
/// # Gradients
///
/// `∂L/∂x = ∂L/∂y σ(2u) (1 + x (2u)′ σ(−2u))` with `σ(v) = 1/(1 + exp(−v))`, as precise as the
/// output, except that near x = −0.7525, where the gradient changes its sign, the error is 1e-6 of
/// its terms. It is 1 for large x and 0 for large −x, in every dtype, also where candle's gradient is
/// NaN: in `F16` from |x| = 41 on ([traps](crate::guide::traps)). The graph keeps the input. Other
/// devices compute the gradient by candle's operations, in `F32` for half precision. With
/// `CANDLE_GRAD_DO_NOT_DETACH` every device does, so that the gradient can be differentiated again.
///
/// # Values that are not finite
///
/// GELU of ∞ is ∞, of −∞ it is −0 (candle's is NaN), and of NaN it is NaN.
///
/// # Errors
///
/// `xs` is of another dtype.
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Result, Tensor, Var};
/// use candle_powernorm::ops::gelu;
///
/// # fn main() -> Result<()> {
/// let xs = Var::new(&[-100f32, -1., 0., 1., 100.], &Device::Cpu)?.to_dtype(DType::F16)?;
/// let xs = Var::from_tensor(&xs)?;
/// let ys = gelu(&xs)?; // was: xs.gelu()?
/// let gradients = ys.sum_all()?.backward()?;
/// let dx = gradients.get(&xs).unwrap().to_dtype(DType::F32)?.to_vec1::<f32>()?;
/// assert_eq!([dx[0], dx[2], dx[4]], [0., 0.5, 1.]);
/// # Ok(()) }
/// ```
pub fn gelu(xs: &Tensor) -> Result<Tensor> {
    Curve::Tanh.apply(xs)
}

/// GELU by the error function, element by element. candle's `Tensor::gelu_erf`, in one pass in each
/// direction on CPUs.
///
/// `y = x Φ(x)` with `Φ(x) = (1 + erf(x/√2))/2`, the normal distribution (Hendrycks & Gimpel, as in
/// [`gelu`]), computed from the small tail `Φ(−|x|)`, whose digits do not cancel for negative x. So
/// `gelu_erf(&xs)?` takes the place of `xs.gelu_erf()?` and of `Activation::Gelu`.
///
/// Shapes, dtypes, errors, values that are not finite and other devices are as in [`gelu`], and so
/// is the precision on a CPU. Where candle computes, `1 + erf` cancels for negative x.
///
/// # Gradients
///
/// `∂L/∂x = ∂L/∂y (Φ(x) + x exp(−x²/2)/√(2π))`, as precise as the output, except that near
/// x = −0.7518, where the gradient changes its sign, the error is 1e-6 of its terms. candle's has a
/// constant of six digits. The graph keeps the input.
///
/// # Errors
///
/// `xs` is of another dtype.
///
/// # Example
///
/// ```
/// use candle::{Device, Result, Var};
/// use candle_powernorm::ops::gelu_erf;
///
/// # fn main() -> Result<()> {
/// let xs = Var::new(&[-100f32, -1., 0., 1., 100.], &Device::Cpu)?;
/// let ys = gelu_erf(&xs)?; // was: xs.gelu_erf()?
/// let gradients = ys.sum_all()?.backward()?;
/// let dx = gradients.get(&xs).unwrap().to_vec1::<f32>()?;
/// assert_eq!([dx[0], dx[2], dx[4]], [0., 0.5, 1.]);
/// # Ok(()) }
/// ```
pub fn gelu_erf(xs: &Tensor) -> Result<Tensor> {
    Curve::Erf.apply(xs)
}

/// Checks the arguments of the function `name` under the names that they have in its call. The
/// layers' own checks, which follow, call them weight, bias and input.
fn check(name: &str, xs: &Tensor, alpha: &Tensor, beta: Option<&Tensor>) -> Result<()> {
    let Some(&size) = xs.dims().last() else {
        candle::bail!(
            "{name}: expected xs of rank 1 or more, got a scalar: \
             give it a last dimension of channels"
        )
    };
    state_dtype(name, "xs", xs.dtype())?;
    let beta = beta.map(|beta| ("beta", beta));
    for (argument, tensor) in [("alpha", alpha)].into_iter().chain(beta) {
        let (got, input) = (tensor.dtype(), xs.dtype());
        if tensor.dims() != [size] {
            candle::bail!(
                "{name}: expected {argument} of shape [{size}] (xs's last dimension), got {:?}",
                tensor.shape()
            )
        }
        if got != input && got != DType::F32 {
            let or_f32 = if input == DType::F32 { "" } else { " or F32" };
            candle::bail!(
                "{name}: expected {argument} of dtype {input:?} (as xs){or_f32}, got {got:?}: \
                 convert it by `to_dtype`"
            )
        }
        check_device(name, argument, tensor.device(), xs.device())?;
    }
    Ok(())
}
