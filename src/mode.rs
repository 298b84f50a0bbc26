//! The switch between training and evaluation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// A shared switch between training and evaluation.
///
/// [`candle::Module`] has no `train` argument, so a layer reads one of these instead. Clones share
/// the switch: one `Mode` given to every layer of a model
/// ([`PowerNorm::with_mode`](crate::PowerNorm::with_mode)) flips them all, like `model.eval()` in
/// PyTorch.
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
pub struct Mode(Arc<AtomicBool>);

impl Mode {
    /// A new switch, in training.
    pub fn train() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }

    /// A new switch, in evaluation.
    pub fn eval() -> Self {
        Self(Arc::new(AtomicBool::new(false)))
    }

    /// Sets the switch, for every clone of it.
    pub fn set_training(&self, training: bool) {
        self.0.store(training, Ordering::Release);
    }

    /// Whether the switch is set to training.
    pub fn is_training(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Switches to evaluation until the guard is dropped, which restores what stood before.
    pub fn eval_scope(&self) -> EvalScope {
        EvalScope {
            before: self.0.swap(false, Ordering::AcqRel),
            mode: self.clone(),
        }
    }
}

/// Restores a [`Mode`] when dropped; made by [`Mode::eval_scope`].
#[must_use = "the mode is restored as soon as the guard is dropped"]
#[derive(Debug)]
pub struct EvalScope {
    mode: Mode,
    before: bool,
}

impl Drop for EvalScope {
    fn drop(&mut self) {
        self.mode.set_training(self.before);
    }
}
