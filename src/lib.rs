//! Normalization layers for [candle](https://github.com/huggingface/candle) that train:
//! [`LayerNorm`], [`RmsNorm`] and [`PowerNorm`], each with a fused forward and a fused backward on
//! CPUs and NVIDIA GPUs.
//!
//! **Status:** tested on CPUs and on one NVIDIA GPU, an H200, where all CUDA tests passed on
//! 2026-11-26. Later changes to the kernels, and other GPUs, have only been tested in software. On
//! other devices, such as Metal, the layers run as candle's own operations.
//!
//! # LayerNorm and RMSNorm
//!
//! In candle 0.11, `RmsNorm`, and `LayerNorm` with a bias, record no backward for contiguous
//! inputs, so parameters that reach the loss only through such a layer do not train, and no error
//! says so. To fix a model, import [`layer_norm`], [`LayerNorm`], [`rms_norm`] and [`RmsNorm`] from
//! this crate. Calls, checkpoints and results stay the same:
//!
//! ```
//! use candle::{DType, Device, Module, Result, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use candle_powernorm::{layer_norm, rms_norm}; // was: use candle_nn::{layer_norm, rms_norm};
//!
//! fn main() -> Result<()> {
//!     let varmap = VarMap::new();
//!     let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
//!     let first = layer_norm(512, 1e-5, vb.pp("first"))?;
//!     let second = rms_norm(512, 1e-5, vb.pp("second"))?;
//!     let xs = Tensor::randn(0f32, 1., (8, 128, 512), &Device::Cpu)?;
//!     let loss = second.forward(&first.forward(&xs)?)?.sqr()?.mean_all()?;
//!     let gradients = loss.backward()?;
//!     assert!(varmap.all_vars().iter().all(|var| gradients.get(var).is_some()));
//!     Ok(())
//! }
//! ```
//!
//! `forward_residual` of both adds a residual in the same pass, [`ops`] has both as functions, and
//! [`layer_norm_1p`] and [`rms_norm_1p`] take weights that are stored as γ − 1. [`ops`] also has
//! candle's fused softmax and rotary embeddings with the backward that they lack there, and a GELU
//! that is fast on CPUs.
//!
//! [`untrained`] lists the variables of a model that get no gradient, and [`check_gradients`] those
//! whose gradient is wrong.
//!
//! # PowerNorm
//!
//! LayerNorm divides each token by its own statistic. PowerNorm first does the same, with the root
//! mean square, and then divides each channel by the root of a running mean of its squares. So it
//! has a state, and has to be told when the model evaluates:
//!
//! ```
//! use candle::{DType, Device, Module, Result, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use candle_powernorm::{power_norm, Mode};
//!
//! fn main() -> Result<()> {
//!     let mode = Mode::train(); // one for the whole model
//!     let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
//!     let norm = power_norm(512, 1e-5, vb.pp("norm"))?.with_mode(&mode);
//!     let xs = Tensor::randn(0f32, 1., (8, 128, 512), &Device::Cpu)?;
//!     norm.forward(&xs)?; // training: the statistics move
//!
//!     let _guard = mode.eval_scope();
//!     norm.forward(&xs)?; // evaluation: nothing moves
//!     Ok(())
//! }
//! ```
//!
//! - [`PowerNormBuilder`] builds all layers of a model alike, and [`PowerNormConfig`] has their
//!   settings. [`Recipe`] and [`Statistics`] select the equations.
//! - [`trainable_vars`] lists the variables for an optimizer, without the statistics.
//! - [`PowerNorm::forward_masked`] leaves padding out, and [`PowerNorm::forward_residual`] adds a
//!   residual first.
//! - [`PowerNorm::fold_into`] merges a trained layer into the linear layer after it.
//! - [`LossScale`] is for mixed precision, and [`Ranks`] for several processes or GPUs.
//!
//! For a model with any normalization, [`Masters`] let an optimizer move weights of half precision in
//! f32, [`SavedAdamW`] is candle's AdamW with a state that can be saved, and [`sum_gradients`] adds
//! gradients up over ranks.
//!
//! The [`guide`] has a page for each task. Begin with [porting](guide::coming_from),
//! [choosing](guide::choosing) or [troubleshooting](guide::troubleshooting). On Linux use mimalloc
//! as the allocator, and on a CPU set `CANDLE_NUM_THREADS=1` ([performance](guide::performance)).
//!
//! # Features
//!
//! | feature | what it adds |
//! |---|---|
//! | `cuda` | the layers on NVIDIA GPUs; building needs `nvcc` |
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
mod check;
mod config;
mod device;
mod error;
mod fold;
mod gradient_check;
mod group_norm;
mod group_scaling;
mod layer_norm;
mod loss_scale;
mod mode;
mod op;
pub mod ops;
mod optim;
mod power_norm;
mod ranks;
mod rms_norm;
mod state;
mod vars;
pub mod with_tracing;

pub use builder::{PowerNormBuilder, power_norm, power_norm_no_bias};
pub use candle_nn::LayerNormConfig;
pub use config::{PowerNormConfig, Recipe, Statistics};
pub use gradient_check::{WrongGradient, check_gradients};
pub use group_norm::{GroupNorm, group_norm};
pub use group_scaling::GroupScaling;
pub use layer_norm::{LayerNorm, layer_norm, layer_norm_1p, layer_norm_no_bias};
pub use loss_scale::LossScale;
pub use mode::{Mode, ModeScope};
pub use optim::{Masters, SavedAdamW};
pub use power_norm::{PowerNorm, PowerNormT};
#[cfg(feature = "mpi")]
pub use ranks::MpiCommunicator;
#[cfg(feature = "nccl")]
pub use ranks::NcclCommunicator;
pub use ranks::{Communicator, Ranks, sum_gradients};
pub use rms_norm::{RmsNorm, rms_norm, rms_norm_1p};
pub use vars::{Untrained, trainable_vars, untrained};

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
        "[allocator]: crate::guide::performance#the-allocator\n\
         [autograd]: crate::guide::performance#candles-autograd\n\
         [candle-traps]: crate::guide::traps\n\
         [checkpointing]: crate::guide::recipes#activation-checkpointing\n\
         [checkpoints]: crate::guide::checkpoints\n\
         [choosing]: crate::guide::choosing\n\
         [coming-from]: crate::guide::coming_from\n\
         [compare]: crate::guide::compare\n\
         [exactly]: crate::guide::checkpoints\
         #from-layernorm-to-rmsnorm-and-powernorm-exactly\n\
         [folding]: crate::guide::inference#folding\n\
         [gpu]: crate::guide::gpu\n\
         [gpu-times]: crate::guide::performance#on-a-gpu\n\
         [guide]: crate::guide\n\
         [heads]: crate::guide::performance#norms-of-heads\n\
         [inference]: crate::guide::inference\n\
         [memory]: crate::guide::performance#memory\n\
         [memory-grows]: crate::guide::troubleshooting#memory-grows\n\
         [mixed-precision]: crate::guide::recipes#mixed-precision\n\
         [offset]: crate::guide::coming_from#weights-with-an-offset\n\
         [padding]: crate::guide::padding\n\
         [paper]: crate::guide::paper\n\
         [performance]: crate::guide::performance\n\
         [ranks-fail]: crate::guide::ranks#when-a-rank-fails\n\
         [ranks]: crate::guide::ranks\n\
         [recipes]: crate::guide::recipes\n\
         [runtimes]: crate::guide::runtimes\n\
         [sharing]: crate::guide::training#sharing-a-layer\n\
         [short-runs]: crate::guide::training#short-runs\n\
         [threads]: crate::guide::performance#threads\n\
         [training]: crate::guide::training\n\
         [traps]: crate::guide::recipes#traps-of-half-precision\n\
         [troubleshooting]: crate::guide::troubleshooting\n\
         [views]: crate::guide::gpu#launches\n\
         [what-to-log]: crate::guide::training#what-to-log\n\
         [whole-model]: crate::guide::performance#in-a-whole-model\n\
         [without-a-backward]: crate::guide::coming_from#functions-without-a-backward\n\
         [wrong-gradients]: crate::guide::coming_from#gradients-that-are-wrong\n"
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

/// A page for each task, and a glossary.
///
#[doc = links!()]
#[doc = include_str!("../docs/guide/README.md")]
pub mod guide {
    pages! {
        /// PowerNorm, RMSNorm or LayerNorm, with what was measured.
        choosing: "choosing",
        /// Comparison with candle-nn, candle's open pull requests, other crates, burn, and PyTorch
        /// with Liger: facts and versions.
        compare: "compare",
        /// Training: a whole program, `Mode`, settings, short runs, and what a step changes.
        training: "training",
        /// Porting: an existing model, the edits for `LayerNorm` and `RmsNorm`, and PyTorch's
        /// layers in this crate's terms.
        coming_from: "coming-from",
        /// Inputs: padding masks and residuals.
        padding: "padding",
        /// Techniques: activation checkpointing, micro-batches, half precision, averages, adapters.
        recipes: "recipes",
        /// Checkpoints: saving and loading, PyTorch's files, averaging, recalibration.
        checkpoints: "checkpoints",
        /// Inference: evaluation, and folding a layer into the linear layer after it.
        inference: "inference",
        /// Your norm in other runtimes: PyTorch, JAX, ONNX and devices.
        runtimes: "runtimes",
        /// Distributed training: statistics over several processes or GPUs.
        ranks: "ranks",
        /// GPUs: building, launches, streams and CUDA graphs, and what is tested.
        gpu: "gpu",
        /// Performance: allocator, threads, and times on a CPU and on a GPU.
        performance: "performance",
        /// Troubleshooting, by what you see: NaN, a loss that does not fall, an evaluation that is
        /// worse than training, loading, resuming, speed, digits, memory.
        troubleshooting: "troubleshooting",
        /// Traps of training with candle 0.11: wrong values, wrong gradients and NaN without an
        /// error, and what to write instead.
        traps: "traps",
        /// Equations, every difference from the paper, bad batches and numerics.
        paper: "paper",
    }
}

/// Runs the README's code among the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
