//! The sum of an input and its residual as an op of its own.
//!
//! [`forward_residual`](crate::PowerNorm::forward_residual) adds and normalizes in one fused pass.
//! In the graph it is two ops, as if the sum had been computed first: [`ResidualSum`] of the input
//! and the residual, whose output is the pass's sum, and then the ordinary op of the layer, whose
//! input is that sum. In a backward candle adds the layer's gradient of the sum to the gradients
//! from elsewhere, and [`ResidualSum`] passes the total on to both arguments.

use super::{Computed, forwards, untracked};
use candle::{CustomOp2, Result, Storage, Tensor};

/// `xs + residual`, from the storage in which a forward has left the sum.
pub(super) fn sum(xs: &Tensor, residual: &Tensor, computed: Storage) -> Result<Tensor> {
    if !xs.track_op() && !residual.track_op() {
        return Ok(untracked(computed, xs.shape()));
    }
    let output = Computed::new(computed, xs.shape());
    xs.apply_op2(residual, ResidualSum { output })
}

#[derive(Clone)]
struct ResidualSum {
    output: Computed,
}

impl CustomOp2 for ResidualSum {
    fn name(&self) -> &'static str {
        "residual_sum"
    }

    forwards!(2);

    fn bwd(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        _sum: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let of = |argument: &Tensor| argument.track_op().then(|| gradient.clone());
        Ok((of(xs), of(residual)))
    }
}
