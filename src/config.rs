//! The layer's configuration and its checks.

use crate::error::Error;
use candle::{DType, Result};

/// The statistic that normalizes a training step after the warm-up: PN's or PN-V's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum Statistics {
    /// PN: a step divides by the running root mean square, so its output depends on no other row of
    /// the batch. The backward is an approximation with the running correction ν.
    ///
    /// `D = sqrt(ψ²₍ₜ₋₁₎ + ε)`; Definition 3 and Eq. 12 of the paper.
    #[default]
    Running,
    /// PN-V: a step divides by the batch's own root mean square, as if the warm-up never ended.
    /// Under [`Recipe::Paper`] the backward is the exact gradient. In a causal model the statistic
    /// contains later tokens, so a batch needs many sequences.
    ///
    /// `D = sqrt(ψ_B² + ε)`; Definition 1 and Eq. 6 of the paper.
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
    /// A training forward, or a recalibration, which moves ψ² too.
    pub fn is_training(self) -> bool {
        self != Self::Evaluation
    }
}

/// The equations of a training step: the paper's, or those of the code that its authors released.
/// Choose the second only to continue training from one of their checkpoints.
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
    /// The paper's equations, and two guards that keep ψ² and ν finite whatever batches come.
    ///
    /// - `t ≤ T`: `D = sqrt(ψ_B² + ε)`, `∂L/∂X̃ = (g − Λ X̂)/D`, the exact gradient;
    ///   `ψ² ← ψ²(t−1)/t + ψ_B²/t`.
    /// - `t > T`: `D = sqrt(ψ²₍ₜ₋₁₎ + ε)`, `∂L/∂X̃ = (g − ν₍ₜ₋₁₎ X̂)/D`;
    ///   `ψ² ← α_f ψ² + (1−α_f) ψ_B²` (Eq. 8, 10, 12).
    /// - Always: `ν ← max(0, 1−(1−α_b)Γ) ν + (1−α_b) Λ`, Eq. 13 with its factor clamped at 0.
    /// - A channel whose new ψ² or ν is not finite keeps the old value for that step.
    /// - Padded rows enter no sum, and their input gradient is 0.
    ///
    /// [Bad batches](crate::guide::paper#bad-batches) explains the two guards.
    #[default]
    Paper,
    /// The code that the authors released (`MaskPowerNorm` of sIncerass/powernorm), to continue
    /// from its checkpoints. It has no guards. [Equations](crate::guide::paper#recipefairseq) lists
    /// how it differs.
    Fairseq,
}

/// Configuration of a [`PowerNorm`](crate::PowerNorm) layer.
///
/// Start with the defaults, and set [`warmup_steps`](Self::warmup_steps) to the length of the
/// learning rate's warm-up. [Training](crate::guide::training#which-settings) says what is known
/// about the others. A number converts into a configuration with that `eps`, as for candle's own
/// layers.
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
/// format without null, such as TOML, cannot express. Values are checked when a layer is built.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(default, deny_unknown_fields)
)]
pub struct PowerNormConfig {
    /// ε, added to each mean square inside the root. Must be positive and finite after rounding to
    /// `F32` (`F64` for an `F64` layer). Default 1e-5.
    pub eps: f64,
    /// α_f, the weight of the *old* ψ² in its moving average (the reverse of candle's `momentum`).
    /// Must be between 0 and 1 after the same rounding. Default 0.9.
    pub alpha_fwd: f64,
    /// α_b, the weight of the *old* ν in its moving average. Must be between 0 and 1 after the same
    /// rounding. Default 0.9.
    pub alpha_bwd: f64,
    /// T, the length of the warm-up: the first steps, which divide by the batch's own statistic.
    /// Default 100. Make it as long as the learning rate's warm-up, as the paper does.
    pub warmup_steps: usize,
    /// G, the number of groups of the [group scaling](crate::GroupScaling) that comes first, or
    /// `None` to leave it out. Default `Some(1)`. The released code uses as many groups as there
    /// are attention heads.
    pub group_scaling: Option<usize>,
    /// The statistic after the warm-up. Default [`Statistics::Running`].
    pub statistics: Statistics,
    /// The equations of a step. Default [`Recipe::Paper`].
    pub recipe: Recipe,
    /// `true` for a layer with a weight γ and, unless [`bias`](Self::bias) is `false`, a bias β.
    /// Default `true`. With `affine: false` this layer has neither, while candle's LayerNorm keeps
    /// its weight.
    pub affine: bool,
    /// `false` for a weight without a bias, as in candle's `layer_norm_no_bias`. Default `true`.
    /// Without `affine` there is no bias either way.
    pub bias: bool,
}

/// The update of ψ² in a step: first by the cumulative mean, then by the moving average.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PhiStep {
    pub cumulative: Option<AverageWeights>,
    pub moving: Option<AverageWeights>,
}

/// The weights of an average of ψ² and ψ_B².
#[derive(Debug, Clone, Copy)]
pub(crate) struct AverageWeights {
    pub old: f64,
    pub new: f64,
}

impl AverageWeights {
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
        validate_eps("power_norm", self.eps, sums)?;
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
            cumulative: cumulative.then(|| AverageWeights::of_mean(t)),
            moving: moving.then_some(AverageWeights {
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

/// The differences between the recipes, apart from the warm-up of ψ² in
/// [`PowerNormConfig::phi_step`].
impl Recipe {
    /// A channel whose new statistic is not finite keeps the old one, so that an overflowed batch
    /// does not outlive its step, and the factor of ν is clamped at 0.
    pub(crate) fn is_guarded(self) -> bool {
        self == Self::Paper
    }

    /// Γ and the sums of a backward leave padded rows out, and padded rows get no gradient.
    pub(crate) fn masks_backward(self) -> bool {
        self == Self::Paper
    }

    /// The backward divides by the batch's statistic, whatever the forward divided by.
    pub(crate) fn divides_by_batch(self) -> bool {
        self == Self::Fairseq
    }

    /// The input's gradient is exact, as in PN-V, after a forward of this kind with a kept row.
    /// Such a gradient takes Λ of the whole batch before any row of it can be computed.
    pub(crate) fn is_exact(self, kind: ForwardKind) -> bool {
        self == Self::Paper && kind == ForwardKind::BatchStatistic
    }

    /// The number of sums of squares that a training forward takes, each with its number of rows:
    /// over the kept rows for ψ_B², and over all rows for Γ if that is a mean over all.
    pub(crate) fn square_sums(self) -> usize {
        match self.masks_backward() {
            true => 1,
            false => 2,
        }
    }
}

/// Checks an ε in the dtype of the sums, where a value that is fine in f64 may be 0 or infinite.
#[inline]
pub(crate) fn validate_eps(layer: &str, eps: f64, dtype: DType) -> Result<()> {
    let used = rounded(eps, dtype);
    if !(used > 0. && used.is_finite()) {
        candle::bail!(
            "{layer}: expected eps positive and finite after rounding to {dtype:?}, \
             got {eps:?}: choose a number such as 1e-5"
        )
    }
    Ok(())
}

/// Returns the dtype of a layer's statistics. The layer is built from `name`, whose dtype is
/// `dtype`. Rejects a dtype that the layer does not compute in.
pub(crate) fn state_dtype(layer: &str, name: &str, dtype: DType) -> Result<DType> {
    match dtype {
        DType::F64 => Ok(DType::F64),
        DType::F32 | DType::F16 | DType::BF16 => Ok(DType::F32),
        got => {
            candle::bail!("{layer}: expected {name} of dtype F32, F64, F16 or BF16, got {got:?}")
        }
    }
}

/// A setting, rounded to the dtype of the sums.
#[inline]
fn rounded(setting: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => setting,
        DType::F32 | DType::F16 | DType::BF16 => f64::from(setting as f32),
        other => unreachable!("no layer computes in {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shares of step `t` in a warm-up of 3 steps, old and new, of the mean and of the moving
    /// average.
    fn shares(recipe: Recipe, t: usize) -> [Option<(f64, f64)>; 2] {
        let config = PowerNormConfig {
            alpha_fwd: 0.75,
            warmup_steps: 3,
            recipe,
            ..Default::default()
        };
        let PhiStep { cumulative, moving } = config.phi_step(t);
        [cumulative, moving].map(|shares| shares.map(|shares| (shares.old, shares.new)))
    }

    #[test]
    fn steps_of_phi_around_the_end_of_the_warm_up() {
        let moving = Some((0.75, 0.25));
        let mean = [(0., 1.), (0.5, 0.5), (2. / 3., 1. / 3.)];
        for t in 1..=3 {
            assert_eq!(shares(Recipe::Paper, t), [Some(mean[t - 1]), None]);
        }
        assert_eq!(shares(Recipe::Paper, 4), [None, moving]);
        for t in 1..=2 {
            assert_eq!(shares(Recipe::Fairseq, t), [Some(mean[t - 1]), moving]);
        }
        assert_eq!(shares(Recipe::Fairseq, 3), [None, moving]);
    }

    #[test]
    fn the_running_statistic_normalizes_after_the_warm_up() {
        let kinds = |statistics, warmup_steps| {
            let config = PowerNormConfig {
                statistics,
                warmup_steps,
                ..Default::default()
            };
            [1, 3, 4].map(|t| config.kind_at(t) == ForwardKind::RunningStatistic)
        };
        assert_eq!(kinds(Statistics::Running, 3), [false, false, true]);
        assert_eq!(kinds(Statistics::Running, 0), [true, true, true]);
        assert_eq!(kinds(Statistics::Batch, 3), [false; 3]);
    }

    /// 1e-46 rounds to 0 in f32, and 0.99999999 to 1.
    #[test]
    fn settings_are_checked_as_the_sums_take_them() {
        let fits = |eps, alpha_fwd, dtype| {
            let config = PowerNormConfig {
                eps,
                alpha_fwd,
                ..Default::default()
            };
            config.validate(4, dtype).is_ok()
        };
        for (eps, alpha, in_f32, in_f64) in [
            (1e-5, 0.9, true, true),
            (1e-46, 0.9, false, true),
            (1e39, 0.9, false, true),
            (0., 0.9, false, false),
            (-1., 0.9, false, false),
            (f64::NAN, 0.9, false, false),
            (f64::INFINITY, 0.9, false, false),
            (1e-5, 0.99999999, false, true),
            (1e-5, 1., false, false),
            (1e-5, 0., false, false),
            (1e-5, f64::NAN, false, false),
        ] {
            assert_eq!(fits(eps, alpha, DType::F32), in_f32, "{eps}, {alpha}");
            assert_eq!(fits(eps, alpha, DType::F64), in_f64, "{eps}, {alpha}");
        }
        // Without parameters the sums are f32 whatever the state's dtype.
        let config = PowerNormConfig {
            affine: false,
            ..1e-46.into()
        };
        assert!(config.validate(4, DType::F64).is_err());
        assert!(!config.has_bias());
    }

    #[test]
    fn groups_divide_the_size() {
        for (size, groups, fits) in [
            (6, Some(1), true),
            (6, Some(3), true),
            (6, Some(6), true),
            (6, None, true),
            (6, Some(4), false),
            (6, Some(12), false),
            (6, Some(0), false),
            (0, None, false),
        ] {
            let config = PowerNormConfig {
                group_scaling: groups,
                ..Default::default()
            };
            assert_eq!(
                config.validate(size, DType::F32).is_ok(),
                fits,
                "{groups:?}"
            );
        }
    }
}
