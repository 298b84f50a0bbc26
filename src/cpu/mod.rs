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
use kernels::{GradSums, SquareSums};
pub(crate) use kernels::{Matrix, OutputGradients, Outputs, Rows};

use crate::communicator::{Exchange, LayerRanks};
use crate::{Recipe, Statistics};
use candle::{Result, WithDType};
use std::sync::OnceLock;

/// What the passes of a layer know of it besides its rows.
pub(crate) struct Layer<A> {
    /// γ, `[cols]`; 1 where `None`.
    pub weight: Option<Vec<A>>,
    /// β, `[cols]`; 0 where `None`.
    pub bias: Option<Vec<A>>,
    /// ε under the root of D.
    pub eps: f64,
    pub recipe: Recipe,
    /// Those that statistics run over.
    pub ranks: LayerRanks,
}

/// What a forward leaves to its backward and to the state.
pub(crate) struct Saved<A> {
    /// 1/D, `[cols]`.
    inv_rms: Vec<A>,
    /// `None` for an evaluation.
    training: Option<Training<A>>,
}

/// What a training forward leaves.
struct Training<A> {
    /// The statistic that normalized.
    statistics: Statistics,
    /// Of this rank's rows.
    totals: Totals<A>,
    /// The statistics of all ranks' rows, once they are known; `None` without a kept row.
    step: OnceLock<Option<Step<A>>>,
}

/// What the rows of a training forward add up to.
#[derive(Clone)]
struct Totals<A> {
    /// ψ_B² and Γ are of kept rows.
    kept: Total<A>,
    /// Where Γ is of all rows, padded ones included.
    all: Option<Total<A>>,
}

/// A sum over rows.
#[derive(Clone)]
struct Total<A> {
    /// Σ x̃², `[cols]`.
    squares: Vec<A>,
    rows: usize,
}

/// The statistics of a training step.
pub(crate) struct Step<A> {
    /// ψ_B², `[cols]`.
    pub batch_phi: Vec<A>,
    /// Γ, the mean of X̂², `[cols]`.
    pub gamma: Vec<A>,
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
    /// `Y = γ ⊙ X̃/D + β`, and the sum of the input and its residual. `train` names the statistic of a training step;
    /// `None` is an evaluation, and so is a step without a kept row.
    pub fn forward<T: Element<Acc = A>>(
        &self,
        rows: &Rows<T>,
        running_phi: &[A],
        train: Option<Statistics>,
    ) -> Result<(Outputs<T>, Saved<A>)> {
        let normalize = |rows: &Rows<T>, inv_rms: &[A]| {
            let (scale, shift) = self.scale_and_shift(inv_rms);
            kernels::normalize(rows, &scale, &shift)
        };
        // Fairseq's Γ runs over padded rows too.
        let with_padded = self.recipe == Recipe::Fairseq;
        let (outputs, inv_rms, training) = match train {
            None => {
                let inv_rms = self.inv_rms(running_phi);
                (normalize(rows, &inv_rms), inv_rms, None)
            }
            Some(Statistics::Batch) => {
                let (sum, sums) = kernels::square_sum_cols(rows, with_padded);
                let totals = self.totals(rows, sums).over(&self.ranks)?;
                let inv_rms = match totals.batch_phi() {
                    Some(batch_phi) => self.inv_rms(&batch_phi),
                    None => self.inv_rms(running_phi),
                };
                let training = Training::known(Statistics::Batch, totals, &inv_rms);
                let mut outputs = match &sum {
                    Some(sum) => normalize(&rows.summed(sum), &inv_rms),
                    None => normalize(rows, &inv_rms),
                };
                outputs.sum = sum;
                (outputs, inv_rms, Some(training))
            }
            Some(Statistics::Running) => {
                let inv_rms = self.inv_rms(running_phi);
                let (scale, shift) = self.scale_and_shift(&inv_rms);
                let (outputs, sums) = kernels::normalize_and_sum(rows, &scale, &shift, with_padded);
                let totals = self.totals(rows, sums);
                // Nothing of the output depends on other ranks: their sums can wait for the backward's.
                let training = match self.ranks.is_alone() {
                    true => Training::known(Statistics::Running, totals, &inv_rms),
                    false => Training::local(Statistics::Running, totals),
                };
                (outputs, inv_rms, Some(training))
            }
        };
        Ok((outputs, Saved { inv_rms, training }))
    }

    /// The gradients of [`forward`](Self::forward) from those of its outputs; the rows are those that were
    /// normalized. `nu` is ν₍ₜ₋₁₎.
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
        outputs: &OutputGradients<T>,
        saved: &Saved<A>,
        nu: &[A],
        wanted: Wanted,
    ) -> Result<Gradients<T>> {
        if self.recipe == Recipe::Fairseq {
            saved.settle(&self.ranks)?;
        }
        let Saved { inv_rms, .. } = saved;
        let training = (saved.training.as_ref()).filter(|training| training.may_be_step());
        let divisor = match saved.step() {
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
        let lambda = |sums: &GradSums<A>| -> Result<Option<Vec<A>>> {
            let Some((dy_x, rows)) = saved.sum_gradients(sums, &self.ranks)? else {
                return Ok(None);
            };
            let g_x_hat = zip(&dy_x, inv_rms, |dy_x, inv_rms| dy_x * inv_rms);
            let g_x_hat = match &self.weight {
                Some(weight) => zip(&g_x_hat, weight, |g_x_hat, weight| g_x_hat * weight),
                None => g_x_hat,
            };
            Ok(Some(mean(&g_x_hat, rows)))
        };
        let exact = |training: &Training<A>| {
            training.statistics == Statistics::Batch && self.recipe == Recipe::Paper
        };

        let (input, sums, lambda) = match training {
            Some(training) if exact(training) => {
                let sums = kernels::grad_sum_cols(rows, outputs);
                let lambda = lambda(&sums)?;
                let decay = match &lambda {
                    Some(lambda) => decay(lambda),
                    None => vec![A::ZERO; rows.cols()],
                };
                let input = wanted
                    .input
                    .then(|| kernels::normalize_bwd(rows, outputs, gain, &decay));
                (input, Some(sums), lambda)
            }
            Some(_) => {
                let (input, sums) = if wanted.input {
                    let (dx, sums) =
                        kernels::normalize_bwd_and_sum(rows, outputs, gain, &decay(nu));
                    (Some(dx), sums)
                } else {
                    (None, kernels::grad_sum_cols(rows, outputs))
                };
                let lambda = lambda(&sums)?;
                (input, Some(sums), lambda)
            }
            None => {
                let decay = vec![A::ZERO; rows.cols()];
                match (wanted.input, wanted.params) {
                    (true, true) => {
                        let (dx, sums) =
                            kernels::normalize_bwd_and_sum(rows, outputs, gain, &decay);
                        (Some(dx), Some(sums), None)
                    }
                    (true, false) => {
                        let dx = kernels::normalize_bwd(rows, outputs, gain, &decay);
                        (Some(dx), None, None)
                    }
                    (false, _) => (None, Some(kernels::grad_sum_cols(rows, outputs)), None),
                }
            }
        };
        let params = sums.filter(|_| wanted.params).map(|sums| ParamGradients {
            weight: zip(&sums.dy_x, inv_rms, |dy_x, inv_rms| dy_x * inv_rms),
            bias: sums.dy,
        });
        Ok(Gradients {
            input,
            params,
            lambda,
        })
    }

    /// This rank's part of a step.
    fn totals<T: Element<Acc = A>>(&self, rows: &Rows<T>, sums: SquareSums<A>) -> Totals<A> {
        let all = (self.recipe == Recipe::Fairseq).then(|| Total {
            squares: match &sums.padded {
                Some(padded) => zip(&sums.kept, padded, |kept, padded| kept + padded),
                None => sums.kept.clone(),
            },
            rows: rows.len(),
        });
        let kept = Total {
            squares: sums.kept,
            rows: rows.kept(),
        };
        Totals { kept, all }
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

impl<A: Accumulator> Saved<A> {
    /// The statistics of a training step, unless other ranks' sums are still to come or no row was kept.
    pub fn step(&self) -> Option<&Step<A>> {
        self.training.as_ref()?.step.get()?.as_ref()
    }

    /// Whether a training step waits for other ranks' sums.
    pub fn is_unsettled(&self) -> bool {
        (self.training.as_ref()).is_some_and(|training| training.step.get().is_none())
    }

    /// Adds the sums of other ranks to the step, if they are still to come.
    pub fn settle(&self, ranks: &LayerRanks) -> Result<()> {
        match &self.training {
            Some(training) if self.is_unsettled() => {
                let totals = training.totals.clone().over(ranks)?;
                training.settle(totals, &self.inv_rms);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Σ dy x̃ of all ranks, `[cols]`, and the rows that Λ is a mean over, unless there are none. A step that is not settled
    /// is on the way: that takes one exchange, not two.
    fn sum_gradients(
        &self,
        sums: &GradSums<A>,
        ranks: &LayerRanks,
    ) -> Result<Option<(Vec<A>, usize)>> {
        let Some(training) = &self.training else {
            return Ok(None);
        };
        let mut dy_x = sums.dy_x.clone();
        if !ranks.is_alone() {
            let mut numbers = widened(&dy_x);
            let mut exchange = Exchange::Backward;
            if self.is_unsettled() {
                exchange = Exchange::Both;
                numbers.extend(training.totals.numbers());
            }
            let numbers = ranks.sum(exchange, numbers)?;
            let (gradients, totals) = numbers.split_at(dy_x.len());
            dy_x = narrowed(gradients);
            if !totals.is_empty() {
                training.settle(Totals::of_numbers(totals, dy_x.len()), &self.inv_rms);
            }
        }
        Ok(self.step().map(|step| (dy_x, step.rows)))
    }
}

impl<A: Accumulator> Training<A> {
    /// A step of this rank's rows alone so far.
    fn local(statistics: Statistics, totals: Totals<A>) -> Self {
        Self {
            statistics,
            totals,
            step: OnceLock::new(),
        }
    }

    /// A step that `totals` are all of.
    fn known(statistics: Statistics, totals: Totals<A>, inv_rms: &[A]) -> Self {
        let training = Self::local(statistics, totals.clone());
        training.settle(totals, inv_rms);
        training
    }

    fn settle(&self, totals: Totals<A>, inv_rms: &[A]) {
        let step = totals.batch_phi().map(|batch_phi| {
            let over = totals.all.as_ref().unwrap_or(&totals.kept);
            let square = mean(&over.squares, over.rows);
            Step {
                batch_phi,
                gamma: zip(&square, inv_rms, |square, inv_rms| {
                    square * inv_rms * inv_rms
                }),
                rows: over.rows,
            }
        });
        // The first to come to it knows as much as any other.
        let _ = self.step.set(step);
    }

    /// Whether a row is kept, as far as this rank knows.
    fn may_be_step(&self) -> bool {
        self.step.get().is_none_or(Option::is_some)
    }
}

impl<A: Accumulator> Totals<A> {
    /// ψ_B², unless no row is kept.
    fn batch_phi(&self) -> Option<Vec<A>> {
        (self.kept.rows > 0).then(|| mean(&self.kept.squares, self.kept.rows))
    }

    /// These totals of all ranks.
    fn over(self, ranks: &LayerRanks) -> Result<Self> {
        if ranks.is_alone() {
            return Ok(self);
        }
        let cols = self.kept.squares.len();
        let numbers = ranks.sum(Exchange::Forward, self.numbers())?;
        Ok(Self::of_numbers(&numbers, cols))
    }

    /// As ranks add them up.
    fn numbers(&self) -> Vec<f64> {
        let mut numbers = vec![];
        for total in [&self.kept].into_iter().chain(&self.all) {
            numbers.extend(widened(&total.squares));
            numbers.push(total.rows as f64);
        }
        numbers
    }

    fn of_numbers(numbers: &[f64], cols: usize) -> Self {
        let total = |numbers: &[f64]| Total {
            squares: narrowed(&numbers[..cols]),
            rows: numbers[cols] as usize,
        };
        let (kept, all) = numbers.split_at(cols + 1);
        Self {
            kept: total(kept),
            all: (!all.is_empty()).then(|| total(all)),
        }
    }
}

fn widened<A: Accumulator>(numbers: &[A]) -> Vec<f64> {
    numbers
        .iter()
        .map(|&number| WithDType::to_f64(number))
        .collect()
}

fn narrowed<A: Accumulator>(numbers: &[f64]) -> Vec<A> {
    numbers.iter().map(|&number| A::from_f64(number)).collect()
}

/// The layer-scale by itself: X̃.
pub(crate) fn scale_groups<T: Element>(rows: &Rows<T>) -> Vec<T> {
    let (ones, zeros) = ones_and_zeros(rows.cols());
    kernels::normalize(rows, &ones, &zeros).y
}

/// The gradient of [`scale_groups`] from `dy`, shaped as the rows.
pub(crate) fn scale_groups_bwd<T: Element>(rows: &Rows<T>, dy: &Matrix<T>) -> Vec<T> {
    let (ones, zeros) = ones_and_zeros(rows.cols());
    kernels::normalize_bwd(rows, &OutputGradients { dy, dsum: None }, &ones, &zeros)
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
