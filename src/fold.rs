//! Folding: moves a trained layer's multiply-add into the linear layer after it.

use crate::check::check_device;
use crate::group_scaling::GroupScaling;
use crate::layer_norm::LayerNorm;
use crate::mode::Purpose;
use crate::power_norm::PowerNorm;
use crate::rms_norm::RmsNorm;
use candle::{DType, Device, Result, Tensor};
use candle_nn::Linear;

impl PowerNorm {
    /// Folds the layer into the linear layer `next`, which reads its output.
    ///
    /// The result computes the same as this layer (in evaluation) followed by `next`. In evaluation
    /// `Y = s ⊙ X̃ + β` with `s = γ / sqrt(ψ² + ε)`, so `W Y + b = W' X̃ + b'` with
    /// `W' = W diag(s)` and `b' = b + W β`. The result reads X̃, which is the output of
    /// [`group_scaling`](Self::group_scaling), or the layer's input without it.
    /// [Inference](crate::guide::inference) says when to fold.
    ///
    /// # Layout of the input
    ///
    /// Give the result contiguous rows. In candle 0.11 a [`Linear`] of a transposed view of two or
    /// more sequences, such as `xs.transpose(1, 2)?`, computes wrong outputs without an error. This
    /// layer's output is contiguous whatever it reads, so `next` behind it is right; once the layer
    /// is folded away, call [`contiguous`](candle::Tensor::contiguous) on such a view first. The
    /// output of the group scaling is contiguous.
    ///
    /// # Shapes and dtypes
    ///
    /// `next` and the result map `[.., size]` to `[.., out]`, in the dtype of `next`, which may
    /// differ from this layer's. The result has a bias if `next` or this layer has one. If `s` is
    /// far from 1, W' may exceed the narrow range of `F16`.
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
    /// /// `next.forward(&norm.forward(xs)?)`, for inference; fold once, and keep the result.
    /// fn folded(norm: &PowerNorm, next: &Linear, xs: &Tensor) -> Result<Tensor> {
    ///     let folded = norm.fold_into(next)?;
    ///     match norm.group_scaling() {
    ///         Some(scaling) => folded.forward(&scaling.forward(xs)?),
    ///         None => folded.forward(xs),
    ///     }
    /// }
    /// ```
    pub fn fold_into(&self, next: &Linear) -> Result<Linear> {
        let scale = self.scale()?;
        fold(
            "power_norm",
            scale,
            self.bias(),
            self.state().device(),
            next,
        )
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

    /// γ / sqrt(ψ² + ε) in f64 on the CPU, once the layer is checked.
    fn scale(&self) -> Result<Tensor> {
        // A recalibration moves ψ² too.
        if self.purpose(self.mode().purpose()) != Purpose::Evaluation {
            candle::bail!(
                "power_norm: expected a layer in evaluation to fold, got one whose statistic \
                 moves: call `mode.set_training(false)`, or end the recalibration, first"
            )
        }
        self.state().check_groups()?;
        let phi = to_f64(&self.running_phi()?)?;
        let square = (phi + self.config().eps)?;
        // NaN where ψ² is infinite, as in an evaluation.
        let inv_d = (square.sqrt()?.recip()? + (square * 0.)?)?;
        match self.weight() {
            Some(weight) => to_f64(weight)? * inv_d,
            None => Ok(inv_d),
        }
    }
}

impl RmsNorm {
    /// Folds the weight into the linear layer `next`, which reads this layer's output.
    ///
    /// `W (γ ⊙ X̃) + b = W' X̃ + b` with `W' = W diag(γ)`. The result reads X̃, which is the output
    /// of [`group_scaling`](Self::group_scaling): each row divided by its root mean square, which
    /// no linear layer does. So a folded RMSNorm loses its multiplication, and nothing else.
    ///
    /// # Shapes and dtypes
    ///
    /// As in [`PowerNorm::fold_into`]: W' is computed in f64, and rounded once to the dtype of
    /// `next`. X̃ is contiguous, as the result needs it.
    ///
    /// # State
    ///
    /// The result is a copy for inference: training this layer or `next` does not change it.
    ///
    /// # Errors
    ///
    /// - The input features of `next` are not the layer's channels.
    /// - The weight of `next` holds integers, which would cut W' to whole numbers.
    /// - `next` is on another device.
    /// - [`forward`](#method.forward) rejects this layer's weight, or the shape or device of
    ///   its bias.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{Module, Result, Tensor};
    /// use candle_nn::Linear;
    /// use candle_powernorm::RmsNorm;
    ///
    /// /// `next.forward(&norm.forward(xs)?)`, for inference; fold once, and keep the result.
    /// fn folded(norm: &RmsNorm, next: &Linear, xs: &Tensor) -> Result<Tensor> {
    ///     let folded = norm.fold_into(next)?;
    ///     folded.forward(&norm.group_scaling().forward(xs)?)
    /// }
    /// ```
    pub fn fold_into(&self, next: &Linear) -> Result<Linear> {
        self.as_layer_norm().fold_as("rms_norm", next)
    }

    /// The scaling of rows, which is what is left of the layer once it is
    /// [folded](Self::fold_into): a group scaling of one group, as in a PowerNorm.
    pub fn group_scaling(&self) -> GroupScaling {
        GroupScaling {
            groups: 1,
            eps: self.eps(),
        }
    }
}

impl LayerNorm {
    /// Folds weight and bias into the linear layer `next`, which reads this layer's output.
    ///
    /// `W (γ ⊙ X̂ + β) + b = W' X̂ + b'` with `W' = W diag(γ)` and `b' = b + W β`. The result reads
    /// X̂, which is the output of [`without_affine`](Self::without_affine).
    ///
    /// # Shapes and dtypes
    ///
    /// As in [`PowerNorm::fold_into`]. The result has a bias if `next` or this layer has one. X̂ is
    /// contiguous, as the result needs it.
    ///
    /// # State
    ///
    /// The result is a copy for inference: training this layer or `next` does not change it.
    ///
    /// # Errors
    ///
    /// As in [`RmsNorm::fold_into`].
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{Module, Result, Tensor};
    /// use candle_nn::Linear;
    /// use candle_powernorm::LayerNorm;
    ///
    /// /// `next.forward(&norm.forward(xs)?)`, for inference; fold once, and keep the result.
    /// fn folded(norm: &LayerNorm, next: &Linear, xs: &Tensor) -> Result<Tensor> {
    ///     let folded = norm.fold_into(next)?;
    ///     folded.forward(&norm.without_affine()?.forward(xs)?)
    /// }
    /// ```
    pub fn fold_into(&self, next: &Linear) -> Result<Linear> {
        self.fold_as("layer_norm", next)
    }

    /// Folds the layer `name`, as which this one was built.
    fn fold_as(&self, name: &str, next: &Linear) -> Result<Linear> {
        self.check_parameters(name)?;
        let weight = to_f64(self.weight())?;
        let scale = match self.unit_offset() {
            true => (weight + 1.)?,
            false => weight,
        };
        fold(name, scale, self.bias(), self.weight().device(), next)
    }

    /// The layer with a weight of 1 and without a bias, which is what is left once the layer is
    /// [folded](Self::fold_into): it subtracts each row's mean and divides by the deviation.
    pub fn without_affine(&self) -> Result<Self> {
        let ones = self.weight().ones_like()?.detach();
        Ok(match self.remove_mean() {
            true => Self::new_no_bias(ones, self.eps()),
            false => Self::rms_norm(ones, self.eps()),
        })
    }
}

/// `next` after a layer that multiplies by `scale`, in f64 on the CPU, and adds `shift`. The layer
/// is on `own`, and errors call it `name`.
fn fold(
    name: &str,
    scale: Tensor,
    shift: Option<&Tensor>,
    own: &Device,
    next: &Linear,
) -> Result<Linear> {
    let (size, got) = (scale.elem_count(), next.weight().dim(1)?);
    if got != size {
        candle::bail!("{name}: expected a linear layer of {size} input features, got {got}")
    }
    let dtype = next.weight().dtype();
    if !dtype.is_float() {
        candle::bail!(
            "{name}: expected the weight of `next` in a float dtype, got {dtype:?}: \
             convert the linear layer by `to_dtype` first"
        )
    }
    check_device(name, "the weight of `next`", next.weight().device(), own)?;
    let weight = to_f64(next.weight())?;
    let moved = match shift {
        Some(shift) => Some(weight.matmul(&to_f64(shift)?.unsqueeze(1)?)?.squeeze(1)?),
        None => None,
    };
    let bias = match (next.bias().map(to_f64).transpose()?, moved) {
        (Some(bias), Some(moved)) => Some((bias + moved)?),
        (bias, moved) => bias.or(moved),
    };
    let round = |tensor: Tensor| tensor.to_dtype(dtype)?.to_device(next.weight().device());
    let weight = round(weight.broadcast_mul(&scale)?)?;
    Ok(Linear::new(weight, bias.map(round).transpose()?))
}

/// A copy of the tensor in f64, which holds the values of every other dtype, on the CPU: Metal has
/// no f64.
fn to_f64(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.detach().copy()?.to_device(&Device::Cpu)?;
    tensor.to_dtype(DType::F64)
}
