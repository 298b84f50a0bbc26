//! This crate's layers and functions as the slow forms that candle has or that are written in its
//! operations, all of them differentiable. A port must compute the same with either.

use candle::{Module, Result, Tensor, D};
use candle_nn::{Init, VarBuilder};

// Without a bias, candle's layer records a backward.
pub use candle_nn::{layer_norm_no_bias, LayerNorm};

pub mod ops {
    pub use candle_nn::rotary_emb::rope_slow as rope;

    pub fn softmax_last_dim(xs: &super::Tensor) -> super::Result<super::Tensor> {
        candle_nn::ops::softmax(xs, super::D::Minus1)
    }
}

pub mod with_tracing {
    pub use super::RmsNorm;
}

#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    /// What is added to the weight.
    offset: f64,
    eps: f64,
}

impl RmsNorm {
    pub fn new(size: usize, eps: f64, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: vb.get_with_hints(size, "weight", Init::Const(1.))?,
            offset: 0.,
            eps,
        })
    }
}

impl Module for RmsNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let mean_square = xs.sqr()?.mean_keepdim(D::Minus1)?;
        let normalized = xs.broadcast_div(&(mean_square + self.eps)?.sqrt()?)?;
        normalized.broadcast_mul(&(&self.weight + self.offset)?)
    }
}

pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    RmsNorm::new(size, eps, vb)
}

pub fn rms_norm_1p(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm {
        weight: vb.get_with_hints(size, "weight", Init::Const(0.))?,
        offset: 1.,
        eps,
    })
}
