//! Group scaling as a module of its own.

use crate::config::validate_eps;
use crate::device::pass::{Pass, RowNorm};
use crate::op;
use candle::{DType, Module, Result, Tensor};

/// The name of the layer in errors.
const LAYER: &str = "group_scaling";

/// Group scaling as a layer of its own: divides each group of a row's channels by the group's root
/// mean square. The paper calls it layer-scale.
///
/// `x̃ = x / sqrt(mean_{i ∈ group(c)} x_i² + ε)` in each row, over G equal groups of adjacent
/// channels (Shen et al., appendix A; `GroupScaling1D` in the released code). It has no parameters
/// and no state. It is what [folding](crate::PowerNorm::fold_into) leaves of a
/// [`PowerNorm`](crate::PowerNorm) and, with one group, of an [`RmsNorm`](crate::RmsNorm).
///
/// # Shapes
///
/// Input and output are `[.., C]`, of any rank from 1 and any strides. G divides C. The number of
/// rows may be 0, but C is at least 1.
///
/// # Dtypes
///
/// `F32`, `F64`, `F16` or `BF16`. Sums are taken in `F32` (`F64` for `F64` inputs) and rounded once
/// on store.
///
/// # Gradients
///
/// Exact: with r = x̃/x, `∂L/∂x = r (∂L/∂x̃ − x̃ · mean_group(∂L/∂x̃ ⊙ x̃))`. It cannot be
/// differentiated again: where candle keeps graphs of gradients (`CANDLE_GRAD_DO_NOT_DETACH=1`), a
/// backward through it is an error.
///
/// # Example
///
/// ```
/// use candle::{Device, Module, Tensor};
/// use candle_powernorm::GroupScaling;
///
/// # fn main() -> candle::Result<()> {
/// let scaling = GroupScaling::new(2, 1e-12)?;
/// let xs = Tensor::new(&[[3f64, 3., 0.5, -0.5]], &Device::Cpu)?;
/// let ys = scaling.forward(&xs)?.to_vec2::<f64>()?;
/// for (y, expected) in ys[0].iter().zip([1., 1., 1., -1.]) {
///     assert!((y - expected).abs() < 1e-10);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupScaling {
    pub(crate) groups: usize,
    pub(crate) eps: f64,
}

impl GroupScaling {
    /// A group scaling of `groups` groups, with `eps` added to each mean square.
    ///
    /// # Errors
    ///
    /// `groups` is 0, or `eps` is not positive and finite.
    pub fn new(groups: usize, eps: f64) -> Result<Self> {
        if groups == 0 {
            candle::bail!("{LAYER}: expected at least 1 group, got 0: pass 1 to scale whole rows")
        }
        validate_eps(LAYER, eps, DType::F64)?;
        Ok(Self { groups, eps })
    }

    /// G.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// ε.
    pub fn eps(&self) -> f64 {
        self.eps
    }
}

impl Module for GroupScaling {
    /// Scales `xs`, `[.., C]`.
    ///
    /// # Errors
    ///
    /// - `xs` is a scalar, or has another dtype than those above.
    /// - C is 0, or not a multiple of the number of groups.
    /// - ε is 0 or infinite in the dtype of the sums.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let (count, eps) = (self.groups, self.eps);
        let pass = Pass::of_rows(LAYER, xs, RowNorm::Groups { count, eps }, None)?;
        op::normalize(pass, None)
    }
}
