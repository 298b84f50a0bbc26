//! Folding: moves a trained layer's multiply-add into the linear layer beside it.

use crate::error::Error;
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
    ///
    /// ```text
    /// W' = W diag(s),   b' = b + W β
    /// ```
    ///
    /// Without group scaling X̃ is the input itself, and nothing is left of the normalization.
    /// With it, X̃ is the output of [`group_scaling`](Self::group_scaling). If several linear
    /// layers read the normalized input, as an attention's query, key and value do, fold into each.
    ///
    /// # Shapes
    ///
    /// `next` and the result map `[.., size]` to `[.., out]`. The result has a bias if `next` or
    /// this layer has one.
    ///
    /// # Dtypes
    ///
    /// The result has the dtype of `next`, which may differ from this layer's. Its numbers are
    /// computed in `F64` and rounded once. If `s` is far from 1, W' may leave the short range of
    /// `F16`.
    ///
    /// # State
    ///
    /// The result is a copy for inference. Training this layer or `next` afterwards does not change
    /// it, and no gradient passes from it to them.
    ///
    /// # Errors
    ///
    /// - The layer's [`Mode`](crate::Mode) is not evaluation.
    /// - The statistics are from a layer with another group scaling.
    /// - The input features of `next` are not the layer's channels.
    /// - `next` is on another device.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{DType, Device, Module, Tensor};
    /// use candle_nn::{linear, VarBuilder, VarMap};
    /// use candle_powernorm::power_norm;
    ///
    /// # fn main() -> candle::Result<()> {
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F64, &Device::Cpu);
    /// let norm = power_norm(8, 1e-5, vb.pp("norm"))?;
    /// let next = linear(8, 3, vb.pp("next"))?;
    /// let xs = Tensor::randn(0., 2., (5, 8), &Device::Cpu)?;
    /// norm.forward(&xs)?; // a step of training
    ///
    /// norm.mode().set_training(false);
    /// let folded = norm.fold_into(&next)?;
    /// let scaling = norm.group_scaling().expect("the default has group scaling");
    ///
    /// let expected = next.forward(&norm.forward(&xs)?)?;
    /// let error = (folded.forward(&scaling.forward(&xs)?)? - expected)?.abs()?.max_all()?;
    /// assert!(error.to_scalar::<f64>()? < 1e-12);
    /// # Ok(()) }
    /// ```
    pub fn fold_into(&self, next: &Linear) -> Result<Linear> {
        let weight = next.weight();
        let (scale, shift) =
            self.multiply_add("the weight of `next`", weight, "input", weight.dim(1)?)?;
        let weight = to_f64(weight)?;
        let moved = match shift {
            Some(shift) => Some(weight.matmul(&shift.unsqueeze(1)?)?.squeeze(1)?),
            None => None,
        };
        let bias = add_biases(next.bias().map(to_f64).transpose()?, moved)?;
        linear_like(weight.broadcast_mul(&scale)?, bias, next)
    }

    /// Folds a layer without group scaling into the linear layer `previous`, whose output it
    /// reads.
    ///
    /// The result does what `previous` and then an evaluation of this layer do:
    /// `s ⊙ (W X + b) + β = W' X + b'` with `s = γ / sqrt(ψ² + ε)` and
    ///
    /// ```text
    /// W' = diag(s) W,   b' = s ⊙ b + β
    /// ```
    ///
    /// Use it only if nothing else reads the output of `previous`. `previous` and the result map
    /// `[.., in]` to `[.., size]`. Dtypes and state are as in [`fold_into`](Self::fold_into).
    ///
    /// # Errors
    ///
    /// - The layer has group scaling, which would stand between the two.
    /// - Its [`Mode`](crate::Mode) is not evaluation.
    /// - The statistics are from a layer with another group scaling.
    /// - The output features of `previous` are not the layer's channels.
    /// - `previous` is on another device.
    pub fn fold_into_previous(&self, previous: &Linear) -> Result<Linear> {
        if let Some(groups) = self.config().group_scaling {
            return Err(Error::FoldThroughGroupScaling { groups }.into());
        }
        let weight = previous.weight();
        let (scale, shift) =
            self.multiply_add("the weight of `previous`", weight, "output", weight.dim(0)?)?;
        let scaled = match previous.bias() {
            Some(bias) => Some((to_f64(bias)? * &scale)?),
            None => None,
        };
        let weight = to_f64(weight)?.broadcast_mul(&scale.unsqueeze(1)?)?;
        linear_like(weight, add_biases(scaled, shift)?, previous)
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

    /// γ / sqrt(ψ² + ε) and β in f64 on the CPU, once the linear layer is checked: it has the
    /// weight that errors call `name`, and `features` on the `side` that meets the layer.
    fn multiply_add(
        &self,
        name: &'static str,
        weight: &Tensor,
        side: &'static str,
        features: usize,
    ) -> Result<(Tensor, Option<Tensor>)> {
        // A recalibration moves ψ² too.
        if self.mode().purpose() != Purpose::Evaluation {
            return Err(Error::FoldOutsideEvaluation.into());
        }
        self.state().check_groups()?;
        let phi = to_f64(&self.running_phi()?)?;
        let size = phi.dim(0)?;
        if features != size {
            return Err(Error::FoldFeatures {
                side,
                size,
                got: features,
            }
            .into());
        }
        self.check_device(name, weight.device())?;
        let inv_rms = (phi + self.config().eps)?.sqrt()?.recip()?;
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

/// The sum of two biases, or the one that there is.
fn add_biases(left: Option<Tensor>, right: Option<Tensor>) -> Result<Option<Tensor>> {
    match (left, right) {
        (Some(left), Some(right)) => (left + right).map(Some),
        (left, right) => Ok(left.or(right)),
    }
}

/// The linear layer of this weight and bias, in the dtype of `like` and on its device.
fn linear_like(weight: Tensor, bias: Option<Tensor>, like: &Linear) -> Result<Linear> {
    let like = like.weight();
    let round = |tensor: Tensor| tensor.to_dtype(like.dtype())?.to_device(like.device());
    Ok(Linear::new(round(weight)?, bias.map(round).transpose()?))
}
