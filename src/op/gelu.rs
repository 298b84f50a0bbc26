//! candle's `gelu` and `gelu_erf` as ops with a backward in one pass.

use super::fused::graph_of_gradients;
use super::{Computed, KEEPS_GRAPH_OF_GRADIENTS, forwards};
use crate::config::state_dtype;
use crate::device::pick;
use candle::{CustomOp1, DType, Result, Tensor};
use candle_nn::ops::sigmoid;
use std::f64::consts::PI;

pub(crate) use pick::Curve;

impl Curve {
    /// The name of its function in candle and here.
    fn name(self) -> &'static str {
        match self {
            Self::Tanh => "gelu",
            Self::Erf => "gelu_erf",
        }
    }

    /// GELU of a tensor of any layout.
    pub(crate) fn apply(self, xs: &Tensor) -> Result<Tensor> {
        state_dtype(self.name(), "xs", xs.dtype())?;
        if xs.elem_count() == 0 {
            return Ok(xs.clone());
        }
        let x = xs.detach();
        let y = match (pick::gelu(self, &[&x])?, self) {
            (Some(y), _) => y,
            (None, Self::Tanh) => x.gelu()?,
            (None, Self::Erf) => x.gelu_erf()?,
        };
        match xs.track_op() {
            true => xs.apply_op1(Gelu {
                curve: self,
                output: Computed::of(y)?,
            }),
            false => Ok(y),
        }
    }

    /// The derivative, in candle's operations.
    fn slope(self, xs: &Tensor) -> Result<Tensor> {
        // Beyond, it is 0 or 1, and the cube of a huge x would overflow.
        let most = match (self, xs.dtype()) {
            (Self::Tanh, DType::F64) => 22.5,
            (Self::Tanh, _) => 11.,
            (Self::Erf, DType::F64) => 39.,
            (Self::Erf, _) => 15.,
        };
        // `Tensor::clamp` is generic over its arguments, so that 150 KB of candle's loops over two
        // tensors would be compiled into this crate. A NaN is beyond neither limit.
        let limit = |most: f64| {
            let limit = Tensor::full(most, (), xs.device())?;
            limit.to_dtype(xs.dtype())?.broadcast_as(xs.shape())
        };
        let x = xs.gt(most)?.where_cond(&limit(most)?, xs)?;
        let x = xs.lt(-most)?.where_cond(&limit(-most)?, &x)?;
        let square = x.sqr()?;
        match self {
            // σ(v) (1 + x v′ σ(−v)), where v = 2 √(2/π) (x + 0.044715 x³).
            Self::Tanh => {
                let alpha = 2. * (2. / PI).sqrt();
                let v = (&x * square.affine(alpha * 0.044715, alpha)?)?;
                let v_slope = (&x * square.affine(alpha * 3. * 0.044715, alpha)?)?;
                sigmoid(&v)? * ((v_slope * sigmoid(&v.neg()?)?)? + 1.)?
            }
            // (1 + erf(x/√2))/2 + x exp(−x²/2)/√(2π).
            Self::Erf => {
                let below = (&x * 0.5f64.sqrt())?.erf()?.affine(0.5, 0.5)?;
                below + (x * (square * -0.5)?.exp()?)? * (2. * PI).sqrt().recip()
            }
        }
    }
}

#[derive(Clone)]
struct Gelu {
    curve: Curve,
    output: Computed,
}

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        self.curve.name()
    }

    forwards!(1);

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        // A gradient in a graph is one of candle's operations.
        if !KEEPS_GRAPH_OF_GRADIENTS.with(|keeps| *keeps)
            && let Some(dx) = pick::gelu(self.curve, &[&x.detach(), dy])?
        {
            return Ok(Some(dx));
        }
        let (own, dtype) = (x.dtype(), state_dtype(self.name(), "xs", x.dtype())?);
        let slope = self.curve.slope(&graph_of_gradients(x).to_dtype(dtype)?)?;
        Ok(Some((dy.to_dtype(dtype)? * slope)?.to_dtype(own)?))
    }
}
