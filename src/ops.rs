//! Normalizations as functions, for models that keep their parameters themselves.
//!
//! [`layer_norm`] and [`rms_norm`] take the arguments of candle_nn's functions of these names, which
//! record no backward. These are differentiable in every argument, so a changed import is the whole
//! change. [`add_layer_norm`] and [`add_rms_norm`] add a residual first, in the same pass.
//!
//! [`LayerNorm`] and [`RmsNorm`](crate::RmsNorm) have the equations, shapes, dtypes and gradients.
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

use crate::config::state_dtype;
use crate::device::pass::check_device;
use crate::layer_norm::LayerNorm;
use crate::op;
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
    op::normalize(layer.pass("layer_norm", xs)?, None, None)
}

/// RMSNorm of `xs`, `[.., C]`: `alpha` is γ, `[C]`. candle_nn's `ops::rms_norm`, with a backward.
///
/// # Errors
///
/// As in [`layer_norm`].
pub fn rms_norm(xs: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    check("rms_norm", xs, alpha, None)?;
    let layer = LayerNorm::rms_norm(alpha.clone(), eps.into());
    op::normalize(layer.pass("rms_norm", xs)?, None, None)
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
    op::add_and_normalize(pass, None, None)
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
    op::add_and_normalize(pass, None, None)
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
