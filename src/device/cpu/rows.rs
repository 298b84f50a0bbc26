//! Walks over the rows of a pass: between a step, whose values of channels are f64, and `run/`,
//! whose values are in the dtype of the sums. This file alone picks the dtype of rows.

use super::convert::{Accumulator, Element, PerChannel, to_f64, to_sums_dtype};
use super::layout::{Rows, channels_of, matrix, on_cpu, packed, storage, with_rows};
use super::row::BackwardSums;
use super::run::{self, Chunks, SquareSums};
use crate::device::Outputs;
use crate::device::pass::Pass;
use candle::{DType, Layout, Result, Storage, Tensor, WithDType};
use half::{bf16, f16};
use num_traits::One;
use pulp::bytemuck::cast_slice;
use std::borrow::Cow;

/// Two coefficients of each channel: gain and shift in a forward, gain and −decay in a backward.
pub(super) enum Coefficients {
    /// γ and β in a forward, γ and 0 in a backward, because D is 1. They are read where they are, in
    /// their own dtype.
    Parameters,
    Values([Vec<f64>; 2]),
}

/// What a training forward wrote, shaped as its input, and the squares that it summed.
pub(super) struct Walked {
    /// `None` if there were no coefficients.
    pub y: Option<Storage>,
    /// `x + residual`, if there is a residual.
    pub residual_out: Option<Storage>,
    pub squares: Option<BatchSquares>,
}

/// Σ x̃² and the mean of x̃² of each channel, over some of the rows.
pub(super) struct MeanSquares {
    pub sums: Vec<f64>,
    pub means: Vec<f64>,
    pub rows: usize,
}

impl MeanSquares {
    pub fn new(sums: Vec<f64>, rows: usize) -> Self {
        let means = sums.iter().map(|sum| sum / rows as f64).collect();
        Self { sums, means, rows }
    }
}

/// The squares of a batch.
pub(super) struct BatchSquares {
    /// Over the kept rows: ψ_B² is their mean.
    pub kept: MeanSquares,
    /// Over all rows, if Γ is a mean over these.
    pub all: Option<MeanSquares>,
}

impl BatchSquares {
    /// The squares that Γ is a mean of.
    pub fn for_gamma(&self) -> &MeanSquares {
        self.all.as_ref().unwrap_or(&self.kept)
    }
}

/// Calls a function for rows of the pass's dtype.
macro_rules! of_dtype {
    ($pass:expr, $function:ident($($argument:expr),*)) => {
        match $pass.x.dtype() {
            DType::F32 => $function::<f32>($pass, $($argument),*),
            DType::F64 => $function::<f64>($pass, $($argument),*),
            DType::F16 => $function::<f16>($pass, $($argument),*),
            DType::BF16 => $function::<bf16>($pass, $($argument),*),
            other => unreachable!("a pass has no rows of {other:?}"),
        }
    };
}

/// `y = gain ⊙ x̃ + shift` of the rows or, if their sum with the residual is there, of `sum`.
pub(super) fn normalize(
    pass: &Pass,
    sum: Option<&Storage>,
    coefficients: &Coefficients,
) -> Result<Outputs> {
    of_dtype!(pass, normalize_of(sum, coefficients))
}

#[inline]
fn normalize_of<T: Chunks>(
    pass: &Pass,
    sum: Option<&Storage>,
    coefficients: &Coefficients,
) -> Result<Outputs> {
    let residual = pass.residual().filter(|_| sum.is_none());
    with_rows::<T, _>(pass, residual, pass.keep.as_ref(), |rows| {
        let of_sum = match sum {
            Some(sum) => Some(rows.of_sum(on_cpu(sum)?.as_slice()?)),
            None => None,
        };
        let rows = of_sum.as_ref().unwrap_or(rows);
        with_coefficients(pass, rows, coefficients, pass.bias(), |coefficients| {
            let (y, residual_out) = run::normalize(rows, coefficients);
            Ok(Outputs {
                y: storage(y),
                residual_out: residual_out.map(storage),
            })
        })
    })
}

/// `x + residual` if there is a residual, `y = gain ⊙ x̃ + shift` if there are coefficients, and the
/// squares of x̃.
pub(super) fn forward(pass: &Pass, coefficients: Option<&Coefficients>) -> Result<Walked> {
    of_dtype!(pass, forward_of(coefficients))
}

fn forward_of<T: Chunks>(pass: &Pass, coefficients: Option<&Coefficients>) -> Result<Walked> {
    with_rows::<T, _>(pass, pass.residual(), pass.keep.as_ref(), |rows| {
        let walk = |coefficients: Option<[&[T::Acc]; 2]>| {
            let (written, sums) = run::forward(rows, coefficients, true);
            let squares = sums.map(|sums| match &written.residual_out {
                Some(sum) => batch_squares(&rows.of_sum(sum), sums),
                None => batch_squares(rows, sums),
            });
            Ok(Walked {
                y: written.y.map(storage),
                residual_out: written.residual_out.map(storage),
                squares,
            })
        };
        match coefficients {
            Some(coefficients) => {
                with_coefficients(pass, rows, coefficients, pass.bias(), |both| {
                    walk(Some(both))
                })
            }
            None => walk(None),
        }
    })
}

/// The input's gradient if there are coefficients, and Σ dy x̃ and Σ dy as far as they are wanted.
pub(super) fn backward(
    pass: &Pass,
    dy: &Tensor,
    coefficients: Option<&Coefficients>,
    sums: BackwardSums,
) -> Result<(Option<Storage>, [Vec<f64>; 2])> {
    if coefficients.is_none() && sums == BackwardSums::None {
        return Ok(Default::default());
    }
    of_dtype!(pass, backward_of(dy, coefficients, sums))
}

fn backward_of<T: Chunks>(
    pass: &Pass,
    dy: &Tensor,
    coefficients: Option<&Coefficients>,
    sums: BackwardSums,
) -> Result<(Option<Storage>, [Vec<f64>; 2])> {
    with_rows::<T, _>(pass, None, pass.backward_keep(), |rows| {
        let (dy, layout) = dy.storage_and_layout();
        let dy = matrix(&dy, layout)?;
        let walk = |coefficients: Option<[&[T::Acc]; 2]>| {
            let (dx, sums) = run::backward(rows, &dy, coefficients, sums);
            let (dy_x, dy_sum) = sums.split_at(sums.len().min(rows.cols()));
            Ok((dx.map(storage), [to_f64::<T>(dy_x), to_f64::<T>(dy_sum)]))
        };
        match coefficients {
            Some(coefficients) => {
                with_coefficients(pass, rows, coefficients, None, |both| walk(Some(both)))
            }
            None => walk(None),
        }
    })
}

/// Calls `run` with coefficients in the dtype of the sums; `second` is the parameter that is the
/// second one, if there is one.
///
/// Parameters that have that dtype are read where they are, and stay locked meanwhile, as in
/// candle's own operations. But not on more threads than this one: rayon may start this layer again
/// on the same stack, and a thread that locks a parameter twice can deadlock with one that sets it.
/// Beside so many rows a copy costs nothing.
#[inline]
fn with_coefficients<T: Chunks, R>(
    pass: &Pass,
    rows: &Rows<T>,
    coefficients: &Coefficients,
    second: Option<&Tensor>,
    run: impl FnOnce([&[T::Acc]; 2]) -> Result<R>,
) -> Result<R> {
    match coefficients {
        Coefficients::Values([first, second]) => {
            run([&to_sums_dtype::<T>(first), &to_sums_dtype::<T>(second)])
        }
        Coefficients::Parameters => {
            let offset = pass.affine().map_or(0., |affine| affine.offset);
            let weight = pass.weight().map(Tensor::storage_and_layout);
            let locked = second.map(Tensor::storage_and_layout);
            let cols = rows.cols();
            let gain = match &weight {
                Some((storage, layout)) => parameter::<T>(storage, layout, offset)?,
                None => vec![T::Acc::one(); cols].into(),
            };
            let second = match &locked {
                Some((storage, layout)) => parameter::<T>(storage, layout, 0.)?,
                None => zeros(cols),
            };
            if run::runs_here(rows) {
                return run([&gain, &second]);
            }
            let (gain, second) = (gain.into_owned(), second.into_owned());
            drop((weight, locked));
            run([&gain, &second])
        }
    }
}

/// Zeros for rows without a bias. For a few rows, as in decoding, to allocate and fill them takes a
/// tenth of a call.
fn zeros<A: Accumulator>(cols: usize) -> Cow<'static, [A]> {
    /// 4096 of f32, or 2048 of f64.
    static ZEROS: [u64; 2048] = [0; 2048];
    match cast_slice(&ZEROS).get(..cols) {
        Some(zeros) => zeros.into(),
        None => vec![A::zero(); cols].into(),
    }
}

/// A parameter plus `offset`, in the dtype of the sums.
#[inline]
fn parameter<'a, T: Chunks>(
    storage: &'a Storage,
    layout: &Layout,
    offset: f64,
) -> Result<Cow<'a, [T::Acc]>> {
    let (dtype, storage) = (storage.dtype(), on_cpu(storage)?);
    // The one number whose addition keeps -0.
    let offset = if offset == 0. { -0. } else { offset };
    if dtype == T::Acc::DTYPE && offset == 0. {
        Ok(packed(storage, layout)?.into())
    } else if dtype == T::Acc::DTYPE {
        let offset = T::Acc::from_f64(offset);
        Ok(run::widened::<T::Acc>(packed(storage, layout)?, offset).into())
    } else if dtype == T::DTYPE {
        let offset = T::Acc::from_f64(offset);
        Ok(run::widened::<T>(packed(storage, layout)?, offset).into())
    } else {
        // Of f32, beside rows of f64.
        let mut values = channels_of(storage, layout)?;
        values.iter_mut().for_each(|value| *value += offset);
        Ok(to_sums_dtype::<T>(&values).into())
    }
}

/// The squares of a batch in f64.
fn batch_squares<T: Element>(rows: &Rows<T>, sums: SquareSums<T>) -> BatchSquares {
    let kept = mean_squares(rows, &sums.kept, rows.kept(), |row| rows.keeps(row));
    let all = (sums.all).map(|sums| mean_squares(rows, &sums, rows.len(), |_| true));
    BatchSquares { kept, all }
}

/// The squares of the `count` rows for which `counts` is true. A column whose sum overflowed is
/// summed once more, so that its mean is finite if f64 can hold it.
fn mean_squares<T: Element>(
    rows: &Rows<T>,
    sums: &PerChannel<T>,
    count: usize,
    counts: impl Fn(usize) -> bool,
) -> MeanSquares {
    let mut squares = MeanSquares::new(to_f64::<T>(sums), count);
    let columns: Vec<usize> = (0..squares.sums.len())
        .filter(|&c| squares.sums[c] == f64::INFINITY)
        .collect();
    if !columns.is_empty() {
        let means = run::means_of_huge(rows, &columns, counts);
        for (c, mean) in columns.into_iter().zip(means) {
            squares.means[c] = mean;
            squares.sums[c] = mean * count as f64;
        }
    }
    squares
}
