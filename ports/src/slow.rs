//! This crate's layers and functions as the slow forms that candle has or that are written in its
//! operations, all of them differentiable. A port must compute the same with either.

use candle::{Module, Result, Tensor, D};
use candle_nn::{Init, VarBuilder};

/// The normalizations alone: the functions are this crate's.
pub mod norms {
    pub use super::*;
    pub use candle_powernorm::ops;

    pub mod with_tracing {
        pub use super::super::RmsNorm;
    }
}

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
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
}

impl Module for LayerNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match &self.bias {
            Some(bias) => candle_nn::ops::layer_norm_slow(xs, &self.weight, bias, self.eps as f32),
            // Without a bias, candle's layer records a backward.
            None => candle_nn::LayerNorm::new_no_bias(self.weight.clone(), self.eps).forward(xs),
        }
    }
}

pub fn layer_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    Ok(LayerNorm {
        bias: Some(vb.get_with_hints(size, "bias", Init::Const(0.))?),
        ..layer_norm_no_bias(size, eps, vb)?
    })
}

pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    Ok(LayerNorm {
        weight: vb.get_with_hints(size, "weight", Init::Const(1.))?,
        bias: None,
        eps,
    })
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
