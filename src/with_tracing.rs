//! The layers of candle_transformers' `models::with_tracing`, with the constructors that they have
//! there, so that a changed import is the whole change.
//!
//! ```
//! use candle::{DType, Device, Module, Result, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use candle_powernorm::with_tracing::RmsNorm; // was: candle_transformers::models::with_tracing
//!
//! # fn main() -> Result<()> {
//! let varmap = VarMap::new();
//! let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
//! let norm = RmsNorm::new(64, 1e-6, vb.pp("input_layernorm"))?;
//!
//! let xs = Tensor::randn(0f32, 1., (2, 8, 64), &Device::Cpu)?;
//! let gradients = norm.forward(&xs)?.sqr()?.mean_all()?.backward()?;
//! assert!(varmap.all_vars().iter().all(|var| gradients.get(var).is_some()));
//! # Ok(()) }
//! ```
//!
//! Leave `Linear` and the rest of that module as they are: they record a backward. These layers
//! open no span of `tracing`.
//!
//! In a file of your own, call [`rms_norm`](crate::rms_norm) instead: its layer also has
//! [`forward_residual`](crate::RmsNorm::forward_residual).

pub use crate::layer_norm::{LayerNorm, layer_norm};

use candle::{Module, Result, Tensor};
use candle_nn::VarBuilder;

/// An [`RmsNorm`](crate::RmsNorm) that is built from a `VarBuilder`.
#[derive(Debug, Clone)]
pub struct RmsNorm(crate::RmsNorm);

impl RmsNorm {
    /// The same as [`rms_norm`](crate::rms_norm).
    ///
    /// # Errors
    ///
    /// As in [`rms_norm`](crate::rms_norm).
    pub fn new(size: usize, eps: f64, vb: VarBuilder) -> Result<Self> {
        crate::rms_norm(size, eps, vb).map(Self)
    }

    /// The same as `forward`.
    ///
    /// # Errors
    ///
    /// As in `forward` of [`RmsNorm`](crate::RmsNorm#method.forward).
    pub fn forward_diff(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward(xs)
    }
}

impl Module for RmsNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.0.forward(xs)
    }
}
