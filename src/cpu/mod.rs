//! The layer's passes on the CPU: what a channel needs is computed here, what a row needs by the kernels.
//!
//! Slices and numbers only; tensors stay in `op`.

mod element;
mod half;
mod kernels;
mod lanes;
mod level;
mod uninit;

pub(crate) use element::{Accumulator, Element};
use kernels::GradSums;
pub(crate) use kernels::{Matrix, Rows};

use crate::{Recipe, Statistics};

/// What the passes of a layer know of it besides its rows.
pub(crate) struct Layer<A> {
    /// γ, `[cols]`; 1 where `None`.
    pub weight: Option<Vec<A>>,
    /// β, `[cols]`; 0 where `None`.
    pub bias: Option<Vec<A>>,
    /// ε under the root of D.
    pub eps: f64,
    pub recipe: Recipe,
}

/// What a forward leaves to its backward and to the state.
pub(crate) struct Saved<A> {
    /// 1/D, `[cols]`.
    inv_rms: Vec<A>,
    /// `None` for an evaluation.
    pub step: Option<Step<A>>,
}

/// The statistics of a training step.
pub(crate) struct Step<A> {
    /// ψ_B², `[cols]`.
    pub batch_phi: Vec<A>,
    /// Γ, the mean of X̂², `[cols]`.
    pub gamma: Vec<A>,
    /// The statistic that normalized.
    statistics: Statistics,
    /// The rows that Γ and Λ are means over.
    rows: usize,
}

/// The gradients to compute.
pub(crate) struct Wanted {
    pub input: bool,
    pub params: bool,
}

/// ∂L/∂γ and ∂L/∂β, `[cols]`.
pub(crate) struct ParamGradients<A> {
    pub weight: Vec<A>,
    pub bias: Vec<A>,
}

/// A backward's results.
pub(crate) struct Gradients<T: Element> {
    /// ∂L/∂X, `[rows, cols]`.
    pub input: Option<Vec<T>>,
    pub params: Option<ParamGradients<T::Acc>>,
    /// Λ, `[cols]`, after a training step.
    pub lambda: Option<Vec<T::Acc>>,
}

impl<A: Accumulator> Layer<A> {
    /// `Y = γ ⊙ X̃/D + β`. `train` names the statistic of a training step; `None` is an evaluation, and
    /// so is a step without a kept row.
    pub fn forward<T: Element<Acc = A>>(
        &self,
        rows: &Rows<T>,
        running_phi: &[A],
        train: Option<Statistics>,
    ) -> (Vec<T>, Saved<A>) {
        let kept = rows.kept();
        let train = train.filter(|_| kept > 0);
        // Fairseq's Γ runs over padded rows too.
        let with_padded = self.recipe == Recipe::Fairseq;
        let (y, inv_rms, sums) = match train {
            None => {
                let inv_rms = self.inv_rms(running_phi);
                let (scale, shift) = self.scale_and_shift(&inv_rms);
                (kernels::normalize(rows, &scale, &shift), inv_rms, None)
            }
            Some(Statistics::Batch) => {
                let sums = kernels::square_sum_cols(rows, with_padded);
                let inv_rms = self.inv_rms(&mean(&sums.kept, kept));
                let (scale, shift) = self.scale_and_shift(&inv_rms);
                (
                    kernels::normalize(rows, &scale, &shift),
                    inv_rms,
                    Some(sums),
                )
            }
            Some(Statistics::Running) => {
                let inv_rms = self.inv_rms(running_phi);
                let (scale, shift) = self.scale_and_shift(&inv_rms);
                let (y, sums) = kernels::normalize_and_sum(rows, &scale, &shift, with_padded);
                (y, inv_rms, Some(sums))
            }
        };
        let step = train.zip(sums).map(|(statistics, sums)| {
            let batch_phi = mean(&sums.kept, kept);
            let (square, rows) = match sums.padded {
                Some(padded) => {
                    let all = zip(&sums.kept, &padded, |kept, padded| kept + padded);
                    (mean(&all, rows.len()), rows.len())
                }
                None => (batch_phi.clone(), kept),
            };
            Step {
                batch_phi,
                gamma: zip(&square, &inv_rms, |square, inv_rms| {
                    square * inv_rms * inv_rms
                }),
                statistics,
                rows,
            }
        });
        (y, Saved { inv_rms, step })
    }

    /// The gradients of [`forward`](Self::forward) from `dy`, shaped as the rows; `nu` is ν₍ₜ₋₁₎.
    ///
    /// With `g = γ ⊙ dy` every `∂L/∂X̃` has the form `gain ⊙ dy − decay ⊙ X̃`:
    ///
    /// - an evaluation: `g/D`;
    /// - PN-V, Eq. 6: `(g − Λ X̂)/D`, which takes the sums of the whole batch first;
    /// - PN, Eq. 12: `(g − ν X̂)/D`; under recipe Fairseq the divisor is the batch's, and this is the
    ///   gradient at every step.
    pub fn backward<T: Element<Acc = A>>(
        &self,
        rows: &Rows<T>,
        dy: &Matrix<T>,
        saved: &Saved<A>,
        nu: &[A],
        wanted: Wanted,
    ) -> Gradients<T> {
        let Saved { inv_rms, step } = saved;
        let divisor = match step {
            Some(step) if self.recipe == Recipe::Fairseq => &self.inv_rms(&step.batch_phi),
            _ => inv_rms,
        };
        let gain = match &self.weight {
            Some(weight) => &zip(weight, divisor, |weight, divisor| weight * divisor),
            None => divisor,
        };
        // Λ or ν, as it stands before X̃.
        let decay = |correction: &[A]| {
            let per_x_hat = zip(correction, divisor, |correction, divisor| {
                correction * divisor
            });
            zip(&per_x_hat, inv_rms, |per_x_hat, inv_rms| {
                per_x_hat * inv_rms
            })
        };
        let lambda = |sums: &GradSums<A>, rows: usize| {
            let g_x_hat = zip(&sums.dy_x, inv_rms, |dy_x, inv_rms| dy_x * inv_rms);
            let g_x_hat = match &self.weight {
                Some(weight) => zip(&g_x_hat, weight, |g_x_hat, weight| g_x_hat * weight),
                None => g_x_hat,
            };
            mean(&g_x_hat, rows)
        };
        let exact =
            |step: &Step<A>| step.statistics == Statistics::Batch && self.recipe == Recipe::Paper;

        let (input, sums, lambda) = match step {
            Some(step) if exact(step) => {
                let sums = kernels::grad_sum_cols(rows, dy);
                let lambda = lambda(&sums, step.rows);
                let input = wanted
                    .input
                    .then(|| kernels::normalize_bwd(rows, dy, gain, &decay(&lambda)));
                (input, Some(sums), Some(lambda))
            }
            Some(step) => {
                let (input, sums) = if wanted.input {
                    let (dx, sums) = kernels::normalize_bwd_and_sum(rows, dy, gain, &decay(nu));
                    (Some(dx), sums)
                } else {
                    (None, kernels::grad_sum_cols(rows, dy))
                };
                let lambda = lambda(&sums, step.rows);
                (input, Some(sums), Some(lambda))
            }
            None => {
                let decay = vec![A::ZERO; rows.cols()];
                match (wanted.input, wanted.params) {
                    (true, true) => {
                        let (dx, sums) = kernels::normalize_bwd_and_sum(rows, dy, gain, &decay);
                        (Some(dx), Some(sums), None)
                    }
                    (true, false) => {
                        let dx = kernels::normalize_bwd(rows, dy, gain, &decay);
                        (Some(dx), None, None)
                    }
                    (false, _) => (None, Some(kernels::grad_sum_cols(rows, dy)), None),
                }
            }
        };
        let params = sums.filter(|_| wanted.params).map(|sums| ParamGradients {
            weight: zip(&sums.dy_x, inv_rms, |dy_x, inv_rms| dy_x * inv_rms),
            bias: sums.dy,
        });
        Gradients {
            input,
            params,
            lambda,
        }
    }

    /// 1/D from D².
    fn inv_rms(&self, phi: &[A]) -> Vec<A> {
        let eps = A::from_f64(self.eps);
        phi.iter().map(|&phi| (phi + eps).sqrt().recip()).collect()
    }

    /// What the output takes X̃ by and adds to it.
    fn scale_and_shift(&self, inv_rms: &[A]) -> (Vec<A>, Vec<A>) {
        let scale = match &self.weight {
            Some(weight) => zip(weight, inv_rms, |weight, inv_rms| weight * inv_rms),
            None => inv_rms.to_vec(),
        };
        let shift = match &self.bias {
            Some(bias) => bias.clone(),
            None => vec![A::ZERO; inv_rms.len()],
        };
        (scale, shift)
    }
}

/// The layer-scale by itself: X̃.
pub(crate) fn scale_groups<T: Element>(rows: &Rows<T>) -> Vec<T> {
    let (ones, zeros) = ones_and_zeros(rows.cols());
    kernels::normalize(rows, &ones, &zeros)
}

/// The gradient of [`scale_groups`] from `dy`, shaped as the rows.
pub(crate) fn scale_groups_bwd<T: Element>(rows: &Rows<T>, dy: &Matrix<T>) -> Vec<T> {
    let (ones, zeros) = ones_and_zeros(rows.cols());
    kernels::normalize_bwd(rows, dy, &ones, &zeros)
}

/// A multiply-add of each channel that leaves it as it is.
fn ones_and_zeros<A: Accumulator>(cols: usize) -> (Vec<A>, Vec<A>) {
    (vec![A::ONE; cols], vec![A::ZERO; cols])
}

fn mean<A: Accumulator>(sums: &[A], rows: usize) -> Vec<A> {
    let rows = A::from_count(rows);
    sums.iter().map(|&sum| sum / rows).collect()
}

fn zip<A: Copy>(left: &[A], right: &[A], f: impl Fn(A, A) -> A) -> Vec<A> {
    left.iter().zip(right).map(|(&l, &r)| f(l, r)).collect()
}
