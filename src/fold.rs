//! Folding: a trained layer's multiply-add, moved into the linear layer beside it.

use crate::error::Error;
use crate::group_scaling::GroupScaling;
use crate::layer::PowerNorm;
use crate::mode::Purpose;
use candle::{DType, Result, Tensor};
use candle_nn::Linear;

impl PowerNorm {
    /// The linear layer that does in one what evaluation and then `next` do: without a layer-scale, nothing is left
    /// of the normalization.
    ///
    /// In evaluation `Y = s ⊙ X̃ + β` with `s = γ / sqrt(ψ² + ε)`, so `W Y + b = W' X̃ + b'` with
    ///
    /// ```text
    /// W' = W diag(s),   b' = b + W β
    /// ```
    ///
    /// X̃ is the input itself without a layer-scale; with one it is what [`group_scaling`](Self::group_scaling) makes of
    /// it. Where several linear layers read the normalized input, as an attention's query, key and value do, fold into
    /// each. This layer and `next` are left as they are.
    ///
    /// # Shapes
    ///
    /// `next` and the result map `[.., size]` to `[.., out]`. The result has a bias where `next` or this layer has one.
    ///
    /// # Dtypes
    ///
    /// The result has the dtype of `next`, which need not be this layer's; its numbers are computed in `F64` and rounded
    /// once. (The range of `F16` is short: where `s` is far from 1, W' may leave it.)
    ///
    /// # State
    ///
    /// The result is made of the ψ², γ, β, W and b that stand, and does not follow them: they can be trained on. It is
    /// itself for inference; no gradient passes from it to them.
    ///
    /// # Errors
    ///
    /// A layer whose [`Mode`](crate::Mode) is not evaluation, a `next` whose input features are not the layer's channels or
    /// which lives on another device.
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
    /// let scaling = norm.group_scaling().expect("the default has a layer-scale");
    ///
    /// let expected = next.forward(&norm.forward(&xs)?)?;
    /// let error = (folded.forward(&scaling.forward(&xs)?)? - expected)?.abs()?.max_all()?;
    /// assert!(error.to_scalar::<f64>()? < 1e-12);
    /// # Ok(()) }
    /// ```
    pub fn fold_into(&self, next: &Linear) -> Result<Linear> {
        let weight = next.weight();
        let (scale, shift) = self.multiply_add("next", weight, "input", weight.dim(1)?)?;
        let weight = to_f64(weight)?;
        let moved = match shift {
            Some(shift) => Some(weight.matmul(&shift.unsqueeze(1)?)?.squeeze(1)?),
            None => None,
        };
        let bias = add_biases(next.bias().map(to_f64).transpose()?, moved)?;
        linear_like(weight.broadcast_mul(&scale)?, bias, next)
    }

    /// The linear layer that does in one what `previous` and then evaluation do, where the layer has no layer-scale:
    /// [`fold_into`](Self::fold_into), of the layer before the norm.
    ///
    /// `s ⊙ (W X + b) + β = W' X + b'` with `s = γ / sqrt(ψ² + ε)` and
    ///
    /// ```text
    /// W' = diag(s) W,   b' = s ⊙ b + β
    /// ```
    ///
    /// It is right where the norm alone reads what `previous` gives. Shapes, dtypes and state are as in `fold_into`,
    /// with `previous` and the result mapping `[.., in]` to `[.., size]`.
    ///
    /// # Errors
    ///
    /// A layer with a layer-scale, which would stand between the two; one whose [`Mode`](crate::Mode) is not evaluation; a
    /// `previous` whose output features are not the layer's channels or which lives on another device.
    pub fn fold_into_previous(&self, previous: &Linear) -> Result<Linear> {
        if let Some(groups) = self.config().group_scaling {
            return Err(Error::FoldThroughLayerScale { groups }.into());
        }
        let weight = previous.weight();
        let (scale, shift) = self.multiply_add("previous", weight, "output", weight.dim(0)?)?;
        let scaled = match previous.bias() {
            Some(bias) => Some((to_f64(bias)? * &scale)?),
            None => None,
        };
        let weight = to_f64(weight)?.broadcast_mul(&scale.unsqueeze(1)?)?;
        linear_like(weight, add_biases(scaled, shift)?, previous)
    }

    /// The layer-scale that is left of the layer once it is [folded](Self::fold_into) into the linear layers after it;
    /// `None` for a layer without one.
    pub fn group_scaling(&self) -> Option<GroupScaling> {
        let config = self.config();
        config.group_scaling.map(|groups| GroupScaling {
            groups,
            eps: config.eps,
        })
    }

    /// γ / sqrt(ψ² + ε) and β, exact, for the linear layer `name` of this weight, whose `side` has `features`.
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

/// The tensor's values in a dtype that holds those of any other: a copy, which does not follow a variable.
fn to_f64(tensor: &Tensor) -> Result<Tensor> {
    tensor.detach().copy()?.to_dtype(DType::F64)
}

/// The sum of two biases, where there are two.
fn add_biases(left: Option<Tensor>, right: Option<Tensor>) -> Result<Option<Tensor>> {
    match (left, right) {
        (Some(left), Some(right)) => (left + right).map(Some),
        (left, right) => Ok(left.or(right)),
    }
}

/// The linear layer of this weight and bias, in the dtype of `like`.
fn linear_like(weight: Tensor, bias: Option<Tensor>, like: &Linear) -> Result<Linear> {
    let round = |tensor: Tensor| tensor.to_dtype(like.weight().dtype());
    Ok(Linear::new(round(weight)?, bias.map(round).transpose()?))
}
