//! PowerNorm for [candle](https://github.com/huggingface/candle): a normalization layer in place of
//! LayerNorm, with a fused forward and a fused backward on CPUs and NVIDIA GPUs. On other devices
//! the layer runs as candle's own operations.
//!
//! ```
//! use candle::{DType, Device, Module, Result, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use candle_powernorm::power_norm;
//!
//! fn main() -> Result<()> {
//!     let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
//!     let norm = power_norm(512, 1e-5, vb.pp("norm"))?; // was: layer_norm(512, 1e-5, ..)
//!     let xs = Tensor::randn(0f32, 1., (8, 128, 512), &Device::Cpu)?;
//!     norm.forward(&xs)?; // training: the statistics move
//!
//!     norm.mode().set_training(false);
//!     norm.forward(&xs)?; // evaluation: nothing moves
//!     Ok(())
//! }
//! ```
//!
//! LayerNorm divides a token by its own statistics. PowerNorm divides each channel by the root of a
//! running mean of its squares, which is known before a batch is read.
//!
//! - [`power_norm`] builds a [`PowerNorm`], and [`PowerNormConfig`] has its settings.
//! - [`PowerNormBuilder`] builds all layers of a model alike.
//! - [`Mode`] switches a whole model between training and evaluation.
//! - [`PowerNorm::forward_masked`] takes padded batches, and [`PowerNorm::forward_residual`] takes
//!   a residual.
//! - [`PowerNorm::fold_into`] moves a trained layer into the linear layer after it.
//! - [`RmsNorm`] is RMSNorm with the same fused backward.
//! - [`trainable_vars`] lists what an optimizer moves: the parameters, without the statistics.
//! - [`LossScale`] is for mixed precision, and [`Ranks`] for several processes or GPUs.
//! - [`Recipe`] chooses between the paper's equations and the equations of the released code.
//!
//! The [`guide`] has a page on each part.
//!
//! | feature | what it adds |
//! |---|---|
//! | `cuda` | the layer on NVIDIA GPUs; building needs `nvcc` |
//! | `mpi` | `MpiCommunicator`, which sums over the processes of an MPI job |
//! | `nccl` | `NcclCommunicator`, which sums over GPUs; turns on `cuda` |
//! | `serde` | [`PowerNormConfig`] in a model's `config.json` |
#![deny(missing_docs, unsafe_code, unsafe_op_in_unsafe_fn)]
#![cfg_attr(
    not(test),
    deny(clippy::expect_used, clippy::panic, clippy::unwrap_used)
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod builder;
mod config;
mod device;
mod error;
mod fold;
mod group_scaling;
mod layer;
mod loss_scale;
mod mode;
mod op;
mod ranks;
mod rms_norm;
mod state;
mod vars;

pub use builder::{power_norm, power_norm_no_bias, PowerNormBuilder};
pub use config::{PowerNormConfig, Recipe, Statistics};
pub use group_scaling::GroupScaling;
pub use layer::{PowerNorm, PowerNormT};
pub use loss_scale::LossScale;
pub use mode::{Mode, ModeScope};
#[cfg(feature = "mpi")]
pub use ranks::MpiCommunicator;
#[cfg(feature = "nccl")]
pub use ranks::NcclCommunicator;
pub use ranks::{Communicator, Ranks};
pub use rms_norm::{rms_norm, RmsNorm};
pub use vars::trainable_vars;

/// The `mpi` crate, whose types [`MpiCommunicator::new`] takes.
#[cfg(feature = "mpi")]
pub use ::mpi;
/// The `cudarc` crate, whose types [`NcclCommunicator::new`] takes.
#[cfg(feature = "nccl")]
pub use cudarc;

/// The targets of links between the guide's pages in rustdoc. Each page also defines its links, to
/// files, for readers of the repository. In rustdoc these definitions come first, and the first one
/// wins.
macro_rules! links {
    () => {
        "[checkpoints]: crate::guide::checkpoints\n\
         [choosing]: crate::guide::choosing\n\
         [coming-from]: crate::guide::coming_from\n\
         [gpu]: crate::guide::gpu\n\
         [inference]: crate::guide::inference\n\
         [mixed-precision]: crate::guide::mixed_precision\n\
         [padding]: crate::guide::padding\n\
         [paper]: crate::guide::paper\n\
         [performance]: crate::guide::performance\n\
         [ranks]: crate::guide::ranks\n\
         [recipes]: crate::guide::recipes\n\
         [residuals]: crate::guide::residuals\n\
         [robustness]: crate::guide::robustness\n\
         [training]: crate::guide::training\n"
    };
}

/// Defines the pages: each has a line about it, a name and a file.
macro_rules! pages {
    ($($(#[$line:meta])* $page:ident: $file:literal,)*) => {
        $(
            $(#[$line])*
            #[doc = ""]
            #[doc = links!()]
            #[doc = include_str!(concat!("../docs/guide/", $file, ".md"))]
            pub mod $page {}
        )*
    };
}

/// The guide: a page on each part of the crate. Start with [`training`](guide::training).
pub mod guide {
    pages! {
        /// `Mode`, settings, existing models, and what a step changes.
        training: "training",
        /// When PN, when PN-V, when RMSNorm, when LayerNorm, with the number of each.
        choosing: "choosing",
        /// The same layer in PyTorch's terms, and in those of the released code.
        coming_from: "coming-from",
        /// Padded rows stay out of every statistic and gradient.
        padding: "padding",
        /// An addition and its normalization in one call.
        residuals: "residuals",
        /// Half precision, its traps in candle, and a loss scale that changes.
        mixed_precision: "mixed-precision",
        /// Activation checkpointing, micro-batches, frozen statistics, averaged weights, adapters.
        recipes: "recipes",
        /// The layer folds into the linear layer after it.
        inference: "inference",
        /// Saving, PyTorch, averaging, recalibration.
        checkpoints: "checkpoints",
        /// Several processes or GPUs, with shared statistics or without.
        ranks: "ranks",
        /// Bad batches, numerics, and what is tested.
        robustness: "robustness",
        /// Launches, limits, streams and CUDA graphs on NVIDIA GPUs.
        gpu: "gpu",
        /// Speed, threads and allocators.
        performance: "performance",
        /// Equations, symbols, and every difference from the paper.
        paper: "paper",
    }
}

/// Runs the README's code among the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
