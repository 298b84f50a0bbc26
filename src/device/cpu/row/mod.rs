//! The arithmetic of a row: its output, and its share of the column sums.
//!
//! `run` calls the functions of this folder for one row after another: `forward_row` and
//! `backward_row`, of LayerNorm in `layer_norm.rs`, and of all other rows in `group_scaling.rs`. A
//! row is walked twice, or more often:
//!
//! 1. *Along the row.* Group scaling sums the squares of each group for `r = 1/√(mean(x²) + ε)`, a
//!    backward two more sums; LayerNorm sums deviations too, and takes the mean of a few columns
//!    first. These are [`sum_spans!`]. Rows that are not normalized by themselves skip this walk.
//! 2. *Down the columns.* The row is read again, now from the first-level cache. Block by block,
//!    the output is computed and written, and x̃² or dy x̃ is added to the column sums of the row's
//!    chunk. This is [`for_spans!`].
//!
//! Files, each using the ones before:
//!
//! - `vectors.rs`: arithmetic on adjacent columns.
//! - `non_temporal.rs`: stores that bypass the caches.
//! - `spans.rs`: the walks along a row.
//! - `output.rs`: outputs that are written once, by several threads.
//! - `group_scaling.rs` and `layer_norm.rs`: a row's forward and backward, each on one page.
//!
//! All of it is `#[inline(always)]` up to the function of a chunk, which is compiled for each
//! level. The functions of a row cut all of its arrays to one length first. Then a block's columns
//! are in bounds of all arrays or of none, and the condition of a loop over blocks is the one test.
//! Arithmetic stays out of closures: at AVX-512 the compiler does not inline them.
//!
//! [`sum_spans!`]: spans::sum_spans
//! [`for_spans!`]: spans::for_spans
//
// Rows are taken one at a time. Four at a time would share the loads of a channel's coefficients,
// which saves 20 % of the time in the caches. But they read and write in four places, and from
// memory they take up to twice as long: a backward of 1024x512 f32 took 0.42 ms instead of 0.21.
// Prefetches did not make up for it. Nor is r of the next row computed before a row is written,
// though that hides the latency of the root: a backward of 4096x512 f32 then took 0.95 ms instead
// of 0.60. Loops over slices, which the compiler would vectorize, take up to 1.5 times as long in
// f32, and 1.5 to 1.9 times in bf16. See `benches/results/cpu-choices.md`.

pub(crate) mod group_scaling;
pub(crate) mod layer_norm;
#[cfg(target_arch = "x86_64")]
mod non_temporal;
pub(crate) mod output;
mod spans;
pub(crate) mod vectors;

use super::convert::{Accumulator, Element};
use output::{RowWriter, write_row};
use pulp::Simd;
use spans::for_spans;
use vectors::{Lanes, Span};

/// Vectors a step where a row is written.
///
/// `x + residual` takes one at a time: with four, a forward with a residual of 1024x512 f32 took as
/// long or up to 5 % longer.
const UNROLL: usize = 4;

/// Writes `x + residual` of a row, rounded to its dtype, and returns it. Code to add a residual in
/// the loops of a row would take registers from them.
#[inline(always)]
pub(crate) fn add_residual<'a, S: Simd, T: Element>(
    simd: S,
    x: &[T],
    residual: &[T],
    residual_out: &'a mut RowWriter<T>,
) -> &'a [T] {
    let residual = &residual[..x.len()];
    let mut row = residual_out.row::<false>(x.len());
    for_spans!(simd, 1, 0..x.len(), row, |at| {
        at.load(x) + at.load(residual)
    });
    row.end();
    residual_out.last(x.len())
}

/// Writes the values of a parameter plus `offset` in the dtype of the sums.
#[inline(always)]
pub(crate) fn widen_row<S: Simd, T: Element>(
    simd: S,
    values: &[T],
    offset: T::Acc,
    widened: &mut RowWriter<T::Acc>,
) {
    let mut row = widened.row::<false>(values.len());
    for_spans!(simd, UNROLL, 0..values.len(), row, |at| {
        at.load(values) + at.splat(offset)
    });
    row.end();
}

/// Writes dx of a padded row.
#[inline(always)]
pub(crate) fn zero_row<S: Simd, T: Element>(simd: S, cols: usize, dx: &mut RowWriter<T>) {
    write_row!(T, dx, cols, |row| {
        for_spans!(simd, 1, 0..cols, row, |at| at.zero());
    });
}

/// Column sums of a backward, over the kept rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BackwardSums {
    None,
    /// Σ dy x̃.
    DyX,
    /// Σ dy x̃ and Σ dy.
    DyXAndDy,
}

impl BackwardSums {
    pub fn per_column(self) -> usize {
        match self {
            Self::None => 0,
            Self::DyX => 1,
            Self::DyXAndDy => 2,
        }
    }
}

/// The column sums that a row of a backward is added to. Those that are not wanted are empty.
pub(crate) struct ColumnSums<'a, A> {
    cols: usize,
    /// Σ dy x̃.
    dy_x: &'a mut [A],
    /// Σ dy.
    dy: &'a mut [A],
}

impl<'a, A: Accumulator> ColumnSums<'a, A> {
    /// Splits the sums of a chunk: none, one for each of `cols` columns, or two.
    #[inline(always)]
    pub fn of(sums: &'a mut [A], cols: usize) -> Self {
        let (dy_x, dy) = sums.split_at_mut_checked(cols).unwrap_or_default();
        let dy = dy.get_mut(..cols).unwrap_or_default();
        Self { cols, dy_x, dy }
    }

    /// Adds x̃ and dy of some columns.
    #[inline(always)]
    fn add<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, A, K>,
        x: Lanes<S, A, K>,
        dy: Lanes<S, A, K>,
    ) {
        // Not `is_empty`: from this the compiler knows that the columns are in bounds.
        if self.dy_x.len() == self.cols {
            at.store(dy.mul_add(x, at.load(self.dy_x)), self.dy_x);
        }
        if self.dy.len() == self.cols {
            at.store(at.load(self.dy) + dy, self.dy);
        }
    }
}
