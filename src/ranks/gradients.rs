//! Gradients, added up over ranks.

use super::Communicator;
use crate::vars::named_trainable_vars;
use candle::backprop::GradStore;
use candle::{DType, Result, Tensor};
use candle_nn::VarMap;

/// Replaces the gradient of each variable that [`trainable_vars`](crate::trainable_vars) lists with
/// its sum over the ranks.
///
/// Call it on every rank, between the backward and the step of the optimizer. If the ranks' losses
/// add up to the loss of the whole batch, the sums are the gradients of the whole batch
/// ([the rules](crate::guide::ranks#the-rules)). Keep the communicator in an `Arc`, and give a
/// clone of the `Arc` to [`Ranks::new`](crate::Ranks::new), so that layers and gradients share it.
///
/// The variables are summed one by one, sorted by name, in `F32` (`F64` for `F64`), and each sum is
/// rounded to the variable's dtype. With [`Masters`](crate::Masters), sum before
/// [`unscale`](crate::Masters::unscale).
///
/// A rank without a gradient for a variable adds zeros, so that all ranks make the same calls. On a
/// CPU this happens with an empty shard, where candle makes no gradient for a bias, or if a rank's
/// batch skips a branch of the model. After the call every variable has a gradient, so an optimizer
/// also moves those that no rank has used, by its weight decay and its averages.
///
/// # Errors
///
/// The communicator's error, or candle's, or if the map [stays
/// locked](crate::trainable_vars#the-lock-of-the-map). As with
/// [`Communicator::all_reduce_sum`], an error on one rank may leave the others waiting.
///
/// [Distributed training](crate::guide::ranks#the-rules) has an example.
pub fn sum_gradients<C: Communicator + ?Sized>(
    communicator: &C,
    varmap: &VarMap,
    gradients: &mut GradStore,
) -> Result<()> {
    for (_, var) in named_trainable_vars(varmap)? {
        let sums = match var.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        // The call below must not depend on what this rank has: the others make it too.
        let own = match gradients.remove(&var) {
            Some(gradient) => gradient.to_dtype(sums)?.contiguous()?,
            None => Tensor::zeros(var.shape(), sums, var.device())?,
        };
        let sum = communicator.all_reduce_sum(&own.detach())?;
        gradients.insert(&var, sum.to_dtype(var.dtype())?);
    }
    Ok(())
}
