//! The layer's configuration and its checks.

use crate::error::Error;
use candle::{DType, Result};

/// Which statistic normalizes a training step after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum Statistics {
    /// PN, Definition 3 of the paper. A step divides by the running quadratic mean,
    /// `D = sqrt(ψ²₍ₜ₋₁₎ + ε)`. The backward is the paper's approximation, Eq. 12, with the running
    /// correction ν.
    #[default]
    Running,
    /// PN-V, Definition 1 of the paper. A step divides by the batch's own quadratic mean,
    /// `D = sqrt(ψ_B² + ε)`, as in a warm-up without end. Under [`Recipe::Paper`] the backward is
    /// the exact gradient, Eq. 6.
    Batch,
}

/// The statistic that a forward normalizes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ForwardKind {
    /// ψ², in evaluation. ψ² does not move.
    Evaluation,
    /// The batch's own statistic, in training.
    BatchStatistic,
    /// ψ² before the step, in training.
    RunningStatistic,
}

impl ForwardKind {
    pub fn is_training(self) -> bool {
        self != Self::Evaluation
    }
}

/// Whose equations a training step runs: the paper's, or the equations of the code that its authors
/// released.
///
/// ψ_B² is the mean square of a batch of `B` rows. `t` is the step, counted from 1, and `T` the
/// number of warm-up steps. Further, `X̂ = X̃/D`, `g = γ ⊙ ∂L/∂Y`, `Γ = mean X̂²` and
/// `Λ = mean g X̂`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum Recipe {
    /// The paper's equations, and two guards that keep a bad batch from outliving its step.
    ///
    /// - `t ≤ T`: `D = sqrt(ψ_B² + ε)`, `∂L/∂X̃ = (g − Λ X̂)/D`, the exact gradient;
    ///   `ψ² ← ψ²(t−1)/t + ψ_B²/t`.
    /// - `t > T`: `D = sqrt(ψ²₍ₜ₋₁₎ + ε)`, `∂L/∂X̃ = (g − ν₍ₜ₋₁₎ X̂)/D`;
    ///   `ψ² ← α_f ψ² + (1−α_f) ψ_B²` (Eq. 8, 10, 12).
    /// - Always: `ν ← max(0, 1−(1−α_b)Γ) ν + (1−α_b) Λ`, Eq. 13 with its factor clamped at 0.
    /// - A channel whose new ψ² or ν is not finite keeps the old value for that step.
    /// - Padded rows enter no sum, and their input gradient is 0.
    ///
    /// [Robustness](crate::guide::robustness) explains the two guards.
    #[default]
    Paper,
    /// The code that the authors released (`MaskPowerNorm` of sIncerass/powernorm), to continue
    /// from its checkpoints. It has no guards. [The paper's page](crate::guide::paper) lists how
    /// its equations differ.
    Fairseq,
}

/// Configuration of a [`PowerNorm`](crate::PowerNorm) layer.
///
/// A number converts into a configuration with that `eps`, as for candle's own layers.
///
/// ```
/// use candle_powernorm::PowerNormConfig;
///
/// let config = PowerNormConfig { warmup_steps: 4000, ..1e-6.into() };
/// assert_eq!((config.eps, config.alpha_fwd), (1e-6, 0.9));
/// ```
///
/// # Feature `serde`
///
/// The configuration can be part of a model's `config.json`:
/// `"norm": { "warmup_steps": 4000, "group_scaling": 8, "statistics": "batch" }`. A missing field
/// has its default, and an unknown field is an error. `"group_scaling": null` is `None`, which a
/// format without null, such as TOML, cannot say. Values are checked when a layer is built.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct PowerNormConfig {
    /// ε, added to each mean square inside the root. Positive and finite, also when rounded to
    /// `F32`, or to `F64` if the parameters are. Default 1e-5.
    pub eps: f64,
    /// α_f, the weight of the *old* ψ² in its moving average (the reverse of candle's `momentum`).
    /// In (0, 1), rounded as ε is; default 0.9. In `F32`, 0.99999 is rounded so that ψ² becomes
    /// 0.14 % too small.
    pub alpha_fwd: f64,
    /// α_b, the weight of the *old* ν in its moving average. In (0, 1), rounded as ε is; default
    /// 0.9.
    pub alpha_bwd: f64,
    /// T, the number of steps that use the batch's statistic before the running one takes over.
    /// Default 100. The paper makes it as long as the learning rate's warm-up.
    pub warmup_steps: usize,
    /// G, the number of groups of the [group scaling](crate::GroupScaling), which comes first, or
    /// `None` for none. Default `Some(1)`. The released code takes as many groups as there are
    /// attention heads.
    pub group_scaling: Option<usize>,
    /// The statistic after the warm-up. Default [`Statistics::Running`].
    pub statistics: Statistics,
    /// The equations of a step. Default [`Recipe::Paper`].
    pub recipe: Recipe,
    /// `true` for a layer with a weight γ, and with a bias β unless [`bias`](Self::bias) says no.
    /// Default `true`. With `affine: false` candle's LayerNorm keeps its weight, and this layer
    /// does not.
    pub affine: bool,
    /// `false` for a weight without a bias, as in candle's `layer_norm_no_bias`. Default `true`.
    /// Without `affine` there is no bias either way.
    pub bias: bool,
}

/// The step of ψ²: first by the cumulative mean, then by the moving average.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PhiStep {
    pub cumulative: Option<Shares>,
    pub moving: Option<Shares>,
}

/// The weights of an average of ψ² and ψ_B².
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shares {
    pub old: f64,
    pub new: f64,
}

impl Shares {
    /// The weights in a mean of `count` values, of which the last is new.
    pub fn of_mean(count: usize) -> Self {
        Self {
            old: (count - 1) as f64 / count as f64,
            new: 1. / count as f64,
        }
    }
}

impl Default for PowerNormConfig {
    fn default() -> Self {
        Self {
            eps: 1e-5,
            alpha_fwd: 0.9,
            alpha_bwd: 0.9,
            warmup_steps: 100,
            group_scaling: Some(1),
            statistics: Statistics::default(),
            recipe: Recipe::default(),
            affine: true,
            bias: true,
        }
    }
}

impl From<f64> for PowerNormConfig {
    fn from(eps: f64) -> Self {
        Self {
            eps,
            ..Self::default()
        }
    }
}

impl PowerNormConfig {
    /// Checks the values against a layer of `size` channels whose state is kept in `dtype`.
    pub(crate) fn validate(&self, size: usize, dtype: DType) -> Result<()> {
        if size == 0 {
            return Err(Error::Size.into());
        }
        // Unless its parameters are f64, the layer takes inputs whose sums are f32.
        let sums = if self.affine { dtype } else { DType::F32 };
        validate_eps(self.eps, sums)?;
        for (name, got) in [("alpha_fwd", self.alpha_fwd), ("alpha_bwd", self.alpha_bwd)] {
            let used = rounded(got, sums);
            if !(used > 0. && used < 1.) {
                candle::bail!(
                    "power_norm: expected {name} between 0 and 1, both excluded, after rounding \
                     to {sums:?}, got {got:?}: choose a number such as 0.9"
                )
            }
        }
        match self.group_scaling {
            Some(groups) if !size.is_multiple_of(groups) => candle::bail!(
                "power_norm: expected group_scaling to divide the size {size}, got {groups}: \
                 choose `None`, 1 or another divisor"
            ),
            _ => Ok(()),
        }
    }

    /// `true` for a layer with a β.
    pub(crate) fn has_bias(&self) -> bool {
        self.affine && self.bias
    }

    /// The step of ψ² in training step `t`, counted from 1.
    pub(crate) fn phi_step(&self, t: usize) -> PhiStep {
        let (cumulative, moving) = match self.recipe {
            Recipe::Paper => (t <= self.warmup_steps, t > self.warmup_steps),
            Recipe::Fairseq => (t < self.warmup_steps, true),
        };
        PhiStep {
            cumulative: cumulative.then(|| Shares::of_mean(t)),
            moving: moving.then_some(Shares {
                old: self.alpha_fwd,
                new: 1. - self.alpha_fwd,
            }),
        }
    }

    /// The statistic that normalizes training step `t`, counted from 1.
    pub(crate) fn kind_at(&self, t: usize) -> ForwardKind {
        match self.statistics {
            Statistics::Running if t > self.warmup_steps => ForwardKind::RunningStatistic,
            Statistics::Running | Statistics::Batch => ForwardKind::BatchStatistic,
        }
    }
}

impl Recipe {
    /// How many sums of squares a training forward exchanges, each with its number of rows: over
    /// the kept rows, and under recipe Fairseq over all rows too.
    pub(crate) fn square_sums(self) -> usize {
        match self {
            Self::Paper => 1,
            Self::Fairseq => 2,
        }
    }
}

/// Checks an ε in the dtype of the sums, where a value that is fine in f64 may be 0 or infinite.
pub(crate) fn validate_eps(eps: f64, dtype: DType) -> Result<()> {
    let used = rounded(eps, dtype);
    if !(used > 0. && used.is_finite()) {
        candle::bail!(
            "power_norm: expected eps positive and finite after rounding to {dtype:?}, \
             got {eps:?}: choose a number such as 1e-5"
        )
    }
    Ok(())
}

/// Returns the dtype of a layer's statistics. The layer is built from `name`, whose dtype is
/// `dtype`. Refuses a dtype that the layer does not compute in.
pub(crate) fn state_dtype(name: &str, dtype: DType) -> Result<DType> {
    match dtype {
        DType::F64 => Ok(DType::F64),
        DType::F32 | DType::F16 | DType::BF16 => Ok(DType::F32),
        got => {
            candle::bail!("power_norm: expected {name} of dtype F32, F64, F16 or BF16, got {got:?}")
        }
    }
}

/// A setting as sums of `dtype` take it.
fn rounded(setting: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => setting,
        _ => f64::from(setting as f32),
    }
}
