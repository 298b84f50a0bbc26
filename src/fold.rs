//! Folding: moves a trained layer's multiply-add into the linear layer after it.

use crate::group_scaling::GroupScaling;
use crate::layer::PowerNorm;
use crate::mode::Purpose;
use candle::{DType, Device, Result, Tensor};
use candle_nn::Linear;

impl PowerNorm {
    /// Folds the layer into the linear layer `next`, which reads its output.
    ///
    /// The result does what an evaluation of this layer and then `next` do. In evaluation
    /// `Y = s ⊙ X̃ + β` with `s = γ / sqrt(ψ² + ε)`, so `W Y + b = W' X̃ + b'` with
    /// `W' = W diag(s)` and `b' = b + W β`. The result reads X̃, which is the output of
    /// [`group_scaling`](Self::group_scaling), or the layer's input without it.
    /// [Inference](crate::guide::inference) says when to fold.
    ///
    /// # Shapes and dtypes
    ///
    /// `next` and the result map `[.., size]` to `[.., out]`, in the dtype of `next`, which may
    /// differ from this layer's. The result has a bias if `next` or this layer has one. If `s` is
    /// far from 1, W' may leave the short range of `F16`.
    ///
    /// # State
    ///
    /// The result is a copy for inference. Training this layer or `next` afterwards does not change
    /// it, and no gradient passes from it to them.
    ///
    /// # Errors
    ///
    /// - The layer's [`Mode`](crate::Mode) is not evaluation. (A layer on frozen tensors evaluates
    ///   in training too, so only a recalibration is an error for it.)
    /// - The statistics are from a layer with another group scaling.
    /// - The input features of `next` are not the layer's channels.
    /// - The weight of `next` holds integers, which would cut W' to whole numbers.
    /// - `next` is on another device.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{Module, Result, Tensor};
    /// use candle_nn::Linear;
    /// use candle_powernorm::PowerNorm;
    ///
    /// /// `next.forward(&norm.forward(xs)?)` in an inference; fold once, and keep the result.
    /// fn folded(norm: &PowerNorm, next: &Linear, xs: &Tensor) -> Result<Tensor> {
    ///     let folded = norm.fold_into(next)?;
    ///     match norm.group_scaling() {
    ///         Some(scaling) => folded.forward(&scaling.forward(xs)?),
    ///         None => folded.forward(xs),
    ///     }
    /// }
    /// ```
    pub fn fold_into(&self, next: &Linear) -> Result<Linear> {
        let (scale, shift) = self.multiply_add(next.weight())?;
        let weight = to_f64(next.weight())?;
        let moved = match shift {
            Some(shift) => Some(weight.matmul(&shift.unsqueeze(1)?)?.squeeze(1)?),
            None => None,
        };
        let bias = match (next.bias().map(to_f64).transpose()?, moved) {
            (Some(bias), Some(moved)) => Some((bias + moved)?),
            (bias, moved) => bias.or(moved),
        };
        let round = |tensor: Tensor| {
            let tensor = tensor.to_dtype(next.weight().dtype())?;
            tensor.to_device(next.weight().device())
        };
        let weight = round(weight.broadcast_mul(&scale)?)?;
        Ok(Linear::new(weight, bias.map(round).transpose()?))
    }

    /// The group scaling, which is what is left of the layer once it is
    /// [folded](Self::fold_into) into the linear layers after it; `None` for a layer without it.
    pub fn group_scaling(&self) -> Option<GroupScaling> {
        let config = self.config();
        config.group_scaling.map(|groups| GroupScaling {
            groups,
            eps: config.eps,
        })
    }

    /// γ / sqrt(ψ² + ε) and β in f64 on the CPU, once the layer and the weight that follows it are
    /// checked.
    fn multiply_add(&self, next: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        // A recalibration moves ψ² too.
        if self.purpose(self.mode().purpose()) != Purpose::Evaluation {
            candle::bail!(
                "power_norm: expected a layer in evaluation to fold, got one whose statistic \
                 moves: call `mode.set_training(false)`, or end the recalibration, first"
            )
        }
        self.state().check_groups()?;
        let (size, got) = (self.size(), next.dim(1)?);
        if got != size {
            candle::bail!("power_norm: expected a linear layer of {size} input features, got {got}")
        }
        if !next.dtype().is_float() {
            candle::bail!(
                "power_norm: expected the weight of `next` in a float dtype, got {:?}: \
                 convert the linear layer by `to_dtype` first",
                next.dtype()
            )
        }
        self.check_device("the weight of `next`", next.device())?;
        let phi = to_f64(&self.running_phi()?)?;
        let square = (phi + self.config().eps)?;
        // NaN where ψ² is infinite, as in an evaluation.
        let inv_rms = (square.sqrt()?.recip()? + (square * 0.)?)?;
        let scale = match self.weight() {
            Some(weight) => (to_f64(weight)? * inv_rms)?,
            None => inv_rms,
        };
        Ok((scale, self.bias().map(to_f64).transpose()?))
    }
}

/// A copy of the tensor in f64, which holds the values of every other dtype, on the CPU: Metal has
/// no f64.
fn to_f64(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.detach().copy()?.to_device(&Device::Cpu)?;
    tensor.to_dtype(DType::F64)
}
