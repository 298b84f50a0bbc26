//! The seam between the layer and its devices: what a pass computes, what it asks of the outside,
//! and what it returns.
//!
//! [`DeviceKind::forward`](pick::DeviceKind::forward) runs a forward and returns a [`Saved`], whose
//! [`backward`](Saved::backward) runs the backward. Each device has both as straight-line code, to
//! be read from top to bottom beside the equations of [`Recipe`]. A training forward
//!
//! 1. sums the squares of its rows, and writes the output in the same pass unless the batch's own
//!    statistic normalizes;
//! 2. exchanges the sums with the other ranks ([`Env::exchange`]);
//! 3. moves ψ² ([`Env::move_phi`]);
//! 4. writes the output, if the batch's statistic normalizes.
//!
//! Its backward
//!
//! 1. sums Σ dy x̃ over its rows, and writes the input's gradient in the same pass unless the
//!    gradient is exact, which takes Λ of the whole batch;
//! 2. exchanges the sums;
//! 3. moves ν ([`Env::move_nu`]), and makes the gradients of weight and bias;
//! 4. writes the input's gradient, if it is exact.
//!
//! Operations that can fail come first: an NVIDIA GPU allocates and loads all that a call needs
//! before its first launch. A call that fails before it has moved ψ² or ν has changed nothing.
//!
//! A device works on storage and numbers. Ranks and the layer's state stay behind [`Env`], which
//! lends the variables of ψ² and ν for an update.
//!
//! CONTRIBUTING.md says how to add a device.

mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod pick;

use crate::config::{ForwardKind, PhiStep, Recipe};
use candle::{DType, Result, Storage, Tensor, Var};

/// One forward of a layer, or the backward of that forward: its settings, and its tensors in a
/// layout that the device reads.
pub(crate) struct Pass {
    /// The rows to normalize, `[.., C]`. A forward with a residual adds it to them first, and in
    /// its backward `x` is the sum.
    pub x: Tensor,
    /// The padding mask: `x` without its last dimension, of `U8`, 0 for a padded row.
    pub keep: Option<Tensor>,
    /// γ, `[C]`.
    pub weight: Option<Tensor>,
    /// β, `[C]`.
    pub bias: Option<Tensor>,
    pub kind: ForwardKind,
    pub settings: Settings,
}

/// What a forward takes besides its [`Pass`]. Its backward needs none of it.
pub(crate) struct Inputs {
    /// Added to the rows before anything else. It has their shape.
    pub residual: Option<Tensor>,
    /// ψ² before the step, in its variable's shape: `[C]` or `[1, C, 1, 1]`. Without it D is 1,
    /// and rows are only normalized by themselves.
    pub phi: Option<Tensor>,
    /// A backward may follow.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub tracked: bool,
}

impl Pass {
    /// The mask that a backward takes.
    fn backward_keep(&self) -> Option<&Tensor> {
        (self.keep.as_ref()).filter(|_| self.settings.recipe.masks_backward())
    }
}

/// The settings of a normalization.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub norm: RowNorm,
    /// ε of D.
    pub eps: f64,
    pub recipe: Recipe,
}

impl Settings {
    /// A normalization of rows by themselves. D is 1, so its ε and the recipe change nothing.
    pub fn of_rows(norm: RowNorm) -> Self {
        Self {
            norm,
            eps: 0.,
            recipe: Recipe::default(),
        }
    }
}

/// The normalization of a row by itself, before the statistics of channels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RowNorm {
    None,
    /// Group scaling: each group is divided by its root mean square.
    Groups {
        /// G.
        count: usize,
        eps: f64,
    },
    /// LayerNorm: the row's mean is subtracted, and the row divided by its standard deviation.
    /// There is no residual then and no mask, and D is 1.
    Centred {
        eps: f64,
    },
}

impl RowNorm {
    /// Group scaling with this number of groups, if there is one.
    pub fn of_groups(groups: Option<usize>, eps: f64) -> Self {
        groups.map_or(Self::None, |count| Self::Groups { count, eps })
    }
}

/// Outputs of a forward, shaped as its input.
pub(crate) struct Outputs {
    pub y: Storage,
    /// `x + residual`, if there is a residual.
    pub stream: Option<Storage>,
}

/// The gradients that a backward is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub input: bool,
    pub weight: bool,
    pub bias: bool,
}

/// The gradients of a backward, as far as they were wanted.
pub(crate) struct Gradients {
    /// The gradient of `x`.
    pub input: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
}

/// A device's record of a forward, from which it makes the backward. The [`Pass`] has the rest.
pub(crate) trait Saved: Send + Sync {
    /// Makes the gradients from `dy`, the gradient of the output, and moves ν if the forward was a
    /// training step.
    fn backward(
        &self,
        pass: &Pass,
        dy: &Tensor,
        wanted: Wanted,
        env: &mut dyn Env,
    ) -> Result<Gradients>;
}

/// A pass's connection to the outside: sums over the other ranks, and the layer's state.
///
/// Sums are exchanged as tensors of f64, `[n]`, on
/// [`DeviceKind::sums_device`](pick::DeviceKind::sums_device). A training forward's sums are Σ x̃²
/// over the kept rows, `[C]`, followed by the number of kept rows. Under [`Recipe::Fairseq`] the
/// same two follow for all rows. A backward's sums are Σ dy x̃, `[C]`.
pub(crate) trait Env {
    /// Other processes have rows of the same batch, so sums must be exchanged.
    fn has_ranks(&self) -> bool;

    /// Returns the sums over the rows of all ranks. Called at most once in a pass, and only if
    /// there are ranks.
    fn exchange(&mut self, sums: Tensor) -> Result<Tensor>;

    /// Locks ψ², has `update` move it, and counts the step. Called in a training forward, at most
    /// once. A call without it is no step: its backward moves nothing.
    fn move_phi(&mut self, update: &mut dyn FnMut(&Var, &PhiStep) -> Result<()>) -> Result<()>;

    /// ν as it stands now; `None` unless the forward was a step.
    fn nu(&self) -> Option<Nu<'_>>;

    /// Calls `update` once. If this backward moves ν, the state is locked meanwhile and `update`
    /// gets ν.
    fn move_nu(&mut self, update: &mut dyn FnMut(Option<&Nu>) -> Result<()>) -> Result<()>;
}

/// The running correction ν, and how a step moves it.
#[derive(Clone, Copy)]
pub(crate) struct Nu<'a> {
    /// ν/(1−α_b), in its variable: `[C]` or `[1, C, 1, 1]`.
    pub ema_gz: &'a Var,
    /// 1−α_b.
    pub share: f64,
    /// The factor of the loss. It is fixed for one backward, even if another thread sets it.
    pub loss_scale: f64,
}

impl Nu<'_> {
    /// What `ema_gz` is multiplied by for ν times the loss scale, which corrects a gradient.
    fn scale(&self) -> f64 {
        self.share * self.loss_scale
    }
}

/// The dtype that sums over rows of `dtype` are taken in.
pub(crate) fn sums_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}
