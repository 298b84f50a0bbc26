//! candle's `gelu` as an op with a backward in one pass.

use super::fused::graph_of_gradients;
use super::{Computed, KEEPS_GRAPH_OF_GRADIENTS, forwards};
use crate::config::state_dtype;
use crate::device::pick;
use candle::{CustomOp1, DType, Result, Tensor};
use candle_nn::ops::sigmoid;

const NAME: &str = "gelu";

/// GELU of a tensor of any layout.
pub(crate) fn gelu(xs: &Tensor) -> Result<Tensor> {
    state_dtype(NAME, "xs", xs.dtype())?;
    if xs.elem_count() == 0 {
        return Ok(xs.clone());
    }
    let x = xs.detach();
    let y = match pick::gelu([&x])? {
        Some(y) => y,
        None => x.gelu()?,
    };
    match xs.track_op() {
        true => xs.apply_op1(Gelu {
            output: Computed::of(y)?,
        }),
        false => Ok(y),
    }
}

struct Gelu {
    output: Computed,
}

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        NAME
    }

    forwards!(1);

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        // A gradient in a graph is one of candle's operations.
        if !KEEPS_GRAPH_OF_GRADIENTS.with(|keeps| *keeps)
            && let Some(dx) = pick::gelu([&x.detach(), dy])?
        {
            return Ok(Some(dx));
        }
        let (own, dtype) = (x.dtype(), state_dtype(NAME, "xs", x.dtype())?);
        let dx = (dy.to_dtype(dtype)? * slope(&graph_of_gradients(x).to_dtype(dtype)?)?)?;
        Ok(Some(dx.to_dtype(own)?))
    }
}

/// `σ(v) (1 + x v′ σ(−v))`, where `v = 2 √(2/π) (x + 0.044715 x³)`.
fn slope(xs: &Tensor) -> Result<Tensor> {
    // Beyond, σ(v) is 0 or 1, and the cube of a huge x would overflow.
    let most = if xs.dtype() == DType::F64 { 22.5 } else { 11. };
    let x = xs.clamp(-most, most)?;
    let alpha = 2. * (2. / std::f64::consts::PI).sqrt();
    let square = x.sqr()?;
    let v = (&x * square.affine(alpha * 0.044715, alpha)?)?;
    let v_slope = (&x * square.affine(alpha * 3. * 0.044715, alpha)?)?;
    let slope = (sigmoid(&v)? * ((v_slope * sigmoid(&v.neg()?)?)? + 1.)?)?;
    // A NaN is clamped to a number on GPUs.
    xs.eq(xs)?.where_cond(&slope, xs)
}
