//! The switch between training and evaluation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// A shared switch between training and evaluation.
///
/// [`candle::Module`] has no `train` argument, so a layer reads a `Mode` instead. Clones share the
/// switch. Give one `Mode` to every layer of a model
/// ([`PowerNorm::with_mode`](crate::PowerNorm::with_mode)), and it switches them all, as
/// `model.eval()` does in PyTorch. [`recalibrate_scope`](Self::recalibrate_scope) is a third
/// setting.
///
/// ```
/// use candle_powernorm::Mode;
///
/// let mode = Mode::train();
/// let shared = mode.clone();
/// {
///     let _guard = mode.eval_scope();
///     assert!(!shared.is_training());
/// }
/// assert!(shared.is_training());
/// ```
#[derive(Debug, Clone)]
pub struct Mode(Arc<AtomicU64>);

/// What a forward is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Evaluation,
    Training,
    /// ψ² is recomputed in the pass over the data of this number.
    Recalibration(u64),
}

const EVALUATION: u64 = 0;
const TRAINING: u64 = 1;

/// The number of the next pass of a recalibration. Passes of all `Mode`s have different numbers.
static NEXT_PASS: AtomicU64 = AtomicU64::new(TRAINING + 1);

impl Mode {
    /// A new switch, in training.
    pub fn train() -> Self {
        Self(Arc::new(AtomicU64::new(TRAINING)))
    }

    /// A new switch, in evaluation.
    pub fn eval() -> Self {
        Self(Arc::new(AtomicU64::new(EVALUATION)))
    }

    /// Sets the switch, for every clone of it.
    pub fn set_training(&self, training: bool) {
        let purpose = if training { TRAINING } else { EVALUATION };
        self.0.store(purpose, Ordering::Release);
    }

    /// Whether the switch is set to training. In a scope of evaluation or recalibration it is not.
    pub fn is_training(&self) -> bool {
        self.purpose() == Purpose::Training
    }

    /// Switches to evaluation until the guard is dropped. The guard then restores the setting from
    /// before.
    pub fn eval_scope(&self) -> ModeScope {
        self.scope(EVALUATION)
    }

    /// Recomputes ψ² of every layer that follows this switch, from the batches that the model gets
    /// until the guard is dropped. The guard then restores the setting from before.
    ///
    /// Use it where ψ² no longer fits the weights: after checkpoints were averaged or edited, or
    /// for data of another kind.
    ///
    /// ψ² becomes the mean of ψ_B² over the batches, `ψ² ← ψ²(k−1)/k + ψ_B²/k` in the k-th,
    /// whatever it was before. Every batch counts the same, so use batches of one size. Each batch
    /// is normalized by its own ψ_B². ν, t and the weights stay.
    ///
    /// - A layer that gets no batch keeps its ψ². A batch without a kept row does not count.
    /// - Under [`Recipe::Paper`](crate::Recipe::Paper), a channel whose mean is not finite keeps
    ///   its old value. If that happens in the first batch, the value from before the scope takes
    ///   that batch's share.
    /// - On a GPU, a batch without a kept row does count. All channels keep their old value in it.
    /// - A scope inside another one starts a new mean, and so does the return to the outer one. A
    ///   clone of the layer that follows another `Mode` does the same.
    /// - Calls that say themselves whether they train ([`forward_t`](crate::PowerNorm::forward_t),
    ///   [`PowerNormT`](crate::PowerNormT)) recalibrate nothing.
    ///
    /// ```
    /// use candle::{DType, Device, Module, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use candle_powernorm::{power_norm, PowerNormConfig};
    ///
    /// # fn main() -> candle::Result<()> {
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let config = PowerNormConfig { group_scaling: None, ..Default::default() };
    /// let model = power_norm(2, config, vb)?;
    /// {
    ///     let _guard = model.mode().recalibrate_scope();
    ///     for batch in [[[1f32, 2.], [3., 2.]], [[2., 4.], [0., 0.]]] {
    ///         model.forward(&Tensor::new(&batch, &Device::Cpu)?)?;
    ///     }
    /// }
    /// assert_eq!(model.running_phi()?.to_vec1::<f32>()?, [3.5, 6.]);
    /// assert_eq!(model.steps()?, 0);
    /// # Ok(()) }
    /// ```
    pub fn recalibrate_scope(&self) -> ModeScope {
        self.scope(NEXT_PASS.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn purpose(&self) -> Purpose {
        match self.0.load(Ordering::Acquire) {
            EVALUATION => Purpose::Evaluation,
            TRAINING => Purpose::Training,
            pass => Purpose::Recalibration(pass),
        }
    }

    fn scope(&self, purpose: u64) -> ModeScope {
        ModeScope {
            before: self.0.swap(purpose, Ordering::AcqRel),
            mode: self.clone(),
        }
    }
}

/// Restores a [`Mode`] when dropped. [`Mode::eval_scope`] and [`Mode::recalibrate_scope`] make it.
#[must_use = "the mode is restored as soon as the guard is dropped"]
#[derive(Debug)]
pub struct ModeScope {
    mode: Mode,
    before: u64,
}

impl Drop for ModeScope {
    fn drop(&mut self) {
        self.mode.0.store(self.before, Ordering::Release);
    }
}
