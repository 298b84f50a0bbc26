//! The factor that mixed-precision training puts on its loss.

use candle::Result;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The loss scale of a training run in half precision, shared with the PowerNorm layers.
///
/// Training in `F16` multiplies the loss by a large number S, so that small gradients do not
/// vanish, and changes S now and then. ν averages gradients over many steps, so without a
/// `LossScale` it would be wrong after each change. A layer that has one
/// ([`PowerNorm::with_loss_scale`](crate::PowerNorm::with_loss_scale)) keeps ν in the units of the
/// unscaled loss: its gradient is `(g − S ν X̂)/D`, and ν is updated with `Λ/S`.
/// [Techniques](crate::guide::recipes#mixed-precision) has a training loop.
///
/// Clones share the number. A backward uses the current number, so change it only between steps.
///
/// ```
/// use candle_powernorm::{LossScale, Mode, PowerNormBuilder};
///
/// # fn main() -> candle::Result<()> {
/// let scale = LossScale::new(65536.)?;
/// let norms = PowerNormBuilder::new(1e-5, &Mode::train()).with_loss_scale(&scale);
/// scale.set(scale.get() / 2.)?; // for all layers that `norms` builds
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct LossScale(Arc<AtomicU64>);

impl fmt::Debug for LossScale {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_tuple("LossScale").field(&self.get()).finish()
    }
}

impl LossScale {
    /// A new shared number, `scale`.
    ///
    /// # Errors
    ///
    /// `scale` is not positive and finite in `F32`, or its inverse is not.
    pub fn new(scale: f64) -> Result<Self> {
        let new = Self::default();
        new.set(scale)?;
        Ok(new)
    }

    /// Sets the number, for every clone.
    ///
    /// # Errors
    ///
    /// `scale` is not positive and finite in `F32`, or its inverse is not. The number is then
    /// unchanged.
    pub fn set(&self, scale: f64) -> Result<()> {
        // Sums are in f32 as a rule, and f32 must hold the number and its inverse.
        let single = scale as f32;
        if !(single > 0. && single.is_finite() && single.recip().is_finite()) {
            candle::bail!(
                "power_norm: expected a loss scale that is positive and finite in F32, \
                 and whose inverse is too, got {scale}"
            )
        }
        self.0.store(scale.to_bits(), Ordering::Release);
        Ok(())
    }

    /// The number.
    pub fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Acquire))
    }
}

impl Default for LossScale {
    /// The number 1, which scales nothing.
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(1f64.to_bits())))
    }
}
