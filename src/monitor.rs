//! The statistics of a training step's batch, for monitoring.
//!
//! They follow from the state before and after a step. So the layer stores nothing for a monitor,
//! and a run without one pays nothing.

use crate::config::{ForwardKind, PowerNormConfig, Recipe};
use crate::error::Error;
use crate::layer::PowerNorm;
use crate::state::Snapshot;
use candle::{Result, Tensor};

/// The statistics of one training step's batch. See [`PowerNorm::step_since`].
///
/// Each is `[size]`, in `F64` on the CPU.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StepStatistics {
    /// ψ_B², the mean of X̃² over the batch. PN divides by the root of ψ² instead.
    pub batch_phi: Tensor,
    /// Γ, the mean of X̂² over the batch. Where `(1−α_b) Γ > 1`, Assumption 10 of the paper does
    /// not hold, and [`Recipe::Paper`](crate::Recipe::Paper) clamps the factor of ν.
    pub gamma: Tensor,
    /// Λ, the mean of g ⊙ X̂ over the batch, of which ν is the running estimate. It is in the units
    /// of the loss without its [`LossScale`](crate::LossScale).
    pub lambda: Tensor,
}

impl PowerNorm {
    /// A copy of ψ², ν and the step count, for [`step_since`](Self::step_since).
    ///
    /// On a GPU the host waits for the values.
    pub fn snapshot(&self) -> Result<Snapshot> {
        self.state().snapshot()
    }

    /// The statistics ψ_B², Γ and Λ of the training step since `before`, for monitoring.
    ///
    /// The step is one training forward and its backward. The layer records nothing for this: the
    /// statistics are computed from the state before and after the step, by Eq. 10 and 13 solved
    /// for ψ_B² and Λ.
    ///
    /// # Accuracy
    ///
    /// The state is rounded to its dtype, `F32` as a rule, and solving for ψ_B² magnifies that: by
    /// `1/(1−α_f)`, and by t in the t-th step of the warm-up. With `α_f = 0.9`, ψ_B² has an error
    /// of about 10⁻⁶ ψ².
    ///
    /// If the batch's statistic normalizes, Γ and Λ are noise in a channel whose ψ_B² is below that
    /// error.
    ///
    /// The state does not tell everything:
    ///
    /// - A channel that [`Recipe::Paper`](crate::Recipe::Paper) left out, because its batch was not
    ///   finite, looks like one with `ψ_B² = ψ²` and `Λ = Γ ν`.
    /// - The same holds on an NVIDIA GPU for a batch with no kept row.
    /// - A step without a backward has `Λ = Γ ν`.
    /// - After a recalibration, a reset, a load or a second backward since `before`, the statistics
    ///   mean nothing.
    /// - Under [`Recipe::Fairseq`](crate::Recipe::Fairseq) with a mask, Γ and Λ run over padded
    ///   rows too, so `gamma` and `lambda` are then wrong.
    ///
    /// # Errors
    ///
    /// - `before` is a snapshot of another layer.
    /// - The layer took no step since `before`, or more than one. A layer that a model uses twice
    ///   takes two.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{DType, Device, Module, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use candle_powernorm::power_norm;
    ///
    /// # fn main() -> candle::Result<()> {
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let norm = power_norm(8, 1e-5, vb)?;
    /// let xs = Tensor::randn(0f32, 1., (16, 8), &Device::Cpu)?;
    ///
    /// let before = norm.snapshot()?;
    /// norm.forward(&xs)?.sqr()?.mean_all()?.backward()?;
    /// let step = norm.step_since(&before)?;
    ///
    /// // Where Γ is near 1, the batch's statistic is near the one that normalized it.
    /// println!("largest Γ: {}", step.gamma.max(0)?);
    /// # assert!((step.gamma.max(0)?.to_scalar::<f64>()? - 1.).abs() < 1e-4);
    /// # Ok(()) }
    /// ```
    pub fn step_since(&self, before: &Snapshot) -> Result<StepStatistics> {
        let after = self.snapshot()?;
        if after.layer != before.layer {
            return Err(Error::OtherLayer.into());
        }
        if after.steps != before.steps + 1 {
            let (before, after) = (before.steps, after.steps);
            return Err(Error::NotOneStep { before, after }.into());
        }
        step_statistics(self.config(), before, &after)
    }
}

fn step_statistics(
    config: &PowerNormConfig,
    before: &Snapshot,
    after: &Snapshot,
) -> Result<StepStatistics> {
    // ψ² ← old ψ² + new ψ_B², in one average or two.
    let step = config.phi_step(after.steps);
    let (mut old, mut new) = (1., 0.);
    for shares in [step.cumulative, step.moving].into_iter().flatten() {
        (old, new) = (shares.old * old, shares.old * new + shares.new);
    }
    let of_batch = match old {
        // The old ψ² does not count here, and may be NaN.
        0. => after.phi.clone(),
        old => (&after.phi - (&before.phi * old)?)?,
    };
    // A mean of squares, which rounding must not make negative.
    let batch_phi = at_least_zero(&(of_batch / new)?)?;
    let divisor = match config.kind_at(after.steps) {
        ForwardKind::BatchStatistic => &batch_phi,
        _ => &before.phi,
    };
    let gamma = (&batch_phi / (divisor + config.eps)?)?;
    // Eq. 13 divided by 1−α_b: ema_gz ← (1 − (1−α_b)Γ) ema_gz + Λ.
    let decay = gamma.affine(config.alpha_bwd - 1., 1.)?;
    let decay = match config.recipe {
        Recipe::Paper => at_least_zero(&decay)?,
        Recipe::Fairseq => decay,
    };
    Ok(StepStatistics {
        lambda: (&after.ema_gz - (decay * &before.ema_gz)?)?,
        batch_phi,
        gamma,
    })
}

/// The larger of each number and 0. NaN stays NaN, of which `relu` would make 0.
///
/// `maximum(0.)` would give the same. But it is generic, so it would compile candle's `maximum` of
/// every dtype into this crate: 83 KB of code.
fn at_least_zero(numbers: &Tensor) -> Result<Tensor> {
    numbers.broadcast_maximum(&Tensor::zeros((), numbers.dtype(), numbers.device())?)
}
