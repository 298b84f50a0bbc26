//! candle's own tests of its LayerNorm and its RMSNorm, which `build.rs` makes run on this crate's
//! by other paths alone. The other tests of `ops.rs` are of candle as it is.

use candle::{Module, Result, Tensor};
use candle_powernorm::{LayerNorm, RmsNorm};

/// As `candle_nn::ops::rms_norm`.
fn rms_norm(xs: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    RmsNorm::new(weight.clone(), eps.into()).forward(xs)
}

/// As `candle_nn::ops::layer_norm`.
fn layer_norm(xs: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Result<Tensor> {
    LayerNorm::new(weight.clone(), bias.clone(), eps.into()).forward(xs)
}

/// Features of candle's package are none of this one's.
#[allow(unexpected_cfgs, clippy::all)]
mod layers {
    include!(concat!(env!("OUT_DIR"), "/candle_layer_norm.rs"));
}
#[allow(unexpected_cfgs, clippy::all)]
mod ops {
    include!(concat!(env!("OUT_DIR"), "/candle_ops.rs"));
}
