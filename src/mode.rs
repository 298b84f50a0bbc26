//! The switch between training and evaluation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A shared switch between training and evaluation, for all PowerNorm layers of a model.
///
/// candle's `Module` has no `train` argument, so a layer reads a `Mode` instead. Clones share the
/// switch. Give one `Mode` to every layer of a model
/// ([`PowerNorm::with_mode`](crate::PowerNorm::with_mode)), and it switches them all, as
/// `model.train()` and `model.eval()` do in PyTorch. [`Mode::train`](Self::train) and
/// [`Mode::eval`](Self::eval) are constructors and do not switch anything: call
/// [`set_training`](Self::set_training), or hold an [`eval_scope`](Self::eval_scope).
/// [`recalibrate_scope`](Self::recalibrate_scope) is a third setting.
///
/// A layer on frozen tensors evaluates while its `Mode` is in training, because no `VarMap` would
/// save what a step moves. So one `Mode` serves a model of frozen layers and trainable ones.
/// [`PowerNorm::with_unsaved_statistics`](crate::PowerNorm::with_unsaved_statistics) is the
/// exception.
///
/// # Threads
///
/// A `Mode` is one switch for all threads. While one thread holds [`eval_scope`](Self::eval_scope),
/// a training forward in another thread silently evaluates: ψ² and ν do not move, and no step is
/// counted. To validate in one thread while another one trains, use layers that follow another
/// `Mode` for the validation: a second model on the same `VarMap` that is built with
/// [`Mode::eval`](Self::eval), or clones ([`with_mode`](crate::PowerNorm::with_mode)). Or call
/// [`forward_t`](crate::PowerNorm::forward_t), which ignores the `Mode`.
/// [Training](crate::guide::training) has an example.
///
/// # Example
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
pub struct Mode(Arc<Mutex<Switch>>);

#[derive(Debug)]
struct Switch {
    /// The purpose outside every scope.
    setting: Purpose,
    /// The open scopes by number, in the order in which they were opened. The last one decides.
    scopes: Vec<(u64, Purpose)>,
}

/// The purpose of a forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Evaluation,
    Training,
    /// ψ² is recomputed in the pass over the data of this number.
    Recalibration(u64),
}

impl Purpose {
    pub fn of(train: bool) -> Self {
        match train {
            true => Self::Training,
            false => Self::Evaluation,
        }
    }
}

/// The number of the next scope, unique among all `Mode`s. No scope has 0, which a new state has.
static NEXT_SCOPE: AtomicU64 = AtomicU64::new(1);

impl Mode {
    /// A new switch, in training.
    #[must_use = "this makes a new switch; `set_training(true)` sets one"]
    pub fn train() -> Self {
        Self::new(Purpose::Training)
    }

    /// A new switch, in evaluation.
    #[must_use = "this makes a new switch; `set_training(false)` sets one"]
    pub fn eval() -> Self {
        Self::new(Purpose::Evaluation)
    }

    fn new(setting: Purpose) -> Self {
        let scopes = vec![];
        Self(Arc::new(Mutex::new(Switch { setting, scopes })))
    }

    /// Switches to training or to evaluation, for every clone of the switch. While scopes are open
    /// they decide, and the setting takes effect when the last of them ends.
    pub fn set_training(&self, training: bool) {
        self.switch().setting = Purpose::of(training);
    }

    /// `true` if layers train now: training is set, and no scope is open. Layers on frozen tensors
    /// evaluate nevertheless. It is `false` in a recalibration too, although that moves ψ².
    pub fn is_training(&self) -> bool {
        self.purpose() == Purpose::Training
    }

    /// Switches to evaluation until the guard is dropped.
    ///
    /// Several scopes of a `Mode` may be open, in one thread or in several, and their guards may be
    /// dropped in any order. The scope that was opened last decides.
    ///
    /// The scope holds [for all threads](Self#threads): a forward in another thread does not train
    /// meanwhile.
    pub fn eval_scope(&self) -> ModeScope {
        self.scope(|_| Purpose::Evaluation)
    }

    /// Recomputes ψ² of every layer that follows this switch, from the batches that the model gets
    /// until the guard is dropped.
    ///
    /// Use it when ψ² no longer fits the weights: after checkpoints were averaged or edited, or for
    /// a different kind of data.
    ///
    /// ψ² becomes the mean of ψ_B² over the batches, each of which is normalized by its own ψ_B².
    /// Every batch counts the same, so use batches of one size. ν, t and the weights stay.
    ///
    /// Layers on frozen tensors are recalibrated too. Their ψ² is a copy that no `VarMap` saves, so
    /// save [`running_phi`](crate::PowerNorm::running_phi) of each if a reloaded model should have
    /// it.
    ///
    /// Calls that ignore the `Mode` ([`forward_t`](crate::PowerNorm::forward_t),
    /// [`PowerNormT`](crate::PowerNormT)) do not recalibrate.
    /// [Checkpoints](crate::guide::checkpoints#averaged-and-edited-checkpoints) has more rules.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{DType, Device, Module, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use candle_powernorm::{power_norm, Mode, PowerNormConfig};
    ///
    /// # fn main() -> candle::Result<()> {
    /// let mode = Mode::eval();
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let config = PowerNormConfig { group_scaling: None, ..1e-5.into() };
    /// let norm = power_norm(4, config, vb.pp("norm"))?.with_mode(&mode);
    /// {
    ///     let _guard = mode.recalibrate_scope();
    ///     for value in [1f32, 3.] {
    ///         norm.forward(&Tensor::full(value, (8, 4), &Device::Cpu)?)?; // a batch of data
    ///     }
    /// }
    /// let phi = norm.running_phi()?.to_vec1::<f32>()?;
    /// assert!(phi.iter().all(|phi| (phi - 5.).abs() < 1e-6)); // (1² + 3²)/2
    /// # Ok(()) }
    /// ```
    pub fn recalibrate_scope(&self) -> ModeScope {
        self.scope(Purpose::Recalibration)
    }

    pub(crate) fn purpose(&self) -> Purpose {
        let switch = self.switch();
        (switch.scopes.last()).map_or(switch.setting, |&(_, purpose)| purpose)
    }

    /// Opens a scope; `purpose` gets its number.
    fn scope(&self, purpose: impl FnOnce(u64) -> Purpose) -> ModeScope {
        let number = NEXT_SCOPE.fetch_add(1, Ordering::Relaxed);
        self.switch().scopes.push((number, purpose(number)));
        ModeScope {
            mode: self.clone(),
            number,
        }
    }

    fn switch(&self) -> MutexGuard<'_, Switch> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends a scope of a [`Mode`] when dropped. [`Mode::eval_scope`] and [`Mode::recalibrate_scope`]
/// make it. Keep it in a variable with a name, such as `_guard`: `let _ = ..` drops it at once.
#[must_use = "the scope ends as soon as the guard is dropped"]
#[derive(Debug)]
pub struct ModeScope {
    mode: Mode,
    number: u64,
}

impl Drop for ModeScope {
    fn drop(&mut self) {
        let mut switch = self.mode.switch();
        switch.scopes.retain(|&(number, _)| number != self.number);
    }
}
