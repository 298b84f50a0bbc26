//! The arithmetic of a row: its output, and its share of the column sums.
//!
//! A pass over the rows is a [`RowPass`], a forward's or a backward's. `run` calls it for one row
//! after another, and it takes two steps in each:
//!
//! 1. *Along the row.* Group scaling sums the squares of each group for `r = 1/√(mean(x²) + ε)`, a
//!    backward two more sums; LayerNorm takes the mean first ([`sum_terms`](sweep::sum_terms)).
//!    Rows that are not normalized by themselves skip this step.
//! 2. *Down the columns.* The row is read again, now from the first-level cache. Block by block,
//!    the output is computed and written, and x̃² or dy x̃ is added to the column sums of the row's
//!    chunk ([`sweep`](sweep::sweep)).
//!
//! Files, each using the ones before:
//!
//! - `vectors.rs`: arithmetic on adjacent columns.
//! - `non_temporal.rs`: stores that bypass the caches.
//! - `sweep.rs`: the walk along a row, and its groups.
//! - `output.rs`: outputs that are written once, by several threads.
//! - `group_scaling.rs` and `layer_norm.rs`: the two ways in which a row is normalized by itself.
//! - `pass.rs`: the passes.
//
// Rows are taken one at a time. Four at a time would share the loads of a channel's coefficients,
// which saves 20 % of the time in the caches. But they read and write in four places, and from
// memory they take up to twice as long: a backward of 1024x512 f32 took 0.42 ms instead of 0.21.
// Prefetches did not make up for it. Nor is r of the next row computed before a row is written,
// though that hides the latency of the root: a backward of 4096x512 f32 then took 0.95 ms instead
// of 0.60. Loops over slices, which the compiler would vectorize, take up to 1.5 times as long in
// f32, and 1.5 to 1.9 times in bf16. See `benches/results/cpu-choices.md`.

mod group_scaling;
mod layer_norm;
#[cfg(target_arch = "x86_64")]
mod non_temporal;
pub(crate) mod output;
pub(crate) mod pass;
pub(crate) mod sweep;
pub(crate) mod vectors;

pub(crate) use group_scaling::Scaler;

use super::convert::{Accumulator, Element};
use output::RowWriter;
use pulp::Simd;
use sweep::Groups;
use vectors::{Lanes, Span};

/// Vectors per bounds check in a pass.
///
/// `x + residual` takes one at a time: with four, a forward with a residual of 1024x512 f32 took as
/// long or up to 5 % longer.
const UNROLL: usize = 4;

/// The equations of a row, in a forward or a backward.
///
/// Implementations are `#[inline(always)]`, so that they are compiled for each level. They cut all
/// arrays of a row to one length first. Then a vector's columns are in bounds of all arrays or of
/// none, which is tested once a block.
pub(crate) trait RowPass<T: Element>: Sync {
    /// True for a forward, which adds the residual if there is one. LayerNorm has none. A backward
    /// reads `x + residual`, which the forward wrote. Code to add a residual would take registers
    /// from the backward's loops, and up to 7 % more time in f16.
    const ADDS_RESIDUAL: bool = false;

    /// True if the pass has an output, of which [`row`](Self::row) then writes each row.
    fn writes(&self) -> bool;

    /// The number of sums that the pass takes in each column.
    fn sums_per_column(&self) -> usize;

    /// Writes the row to `output` and adds its column sums to `sums`, one kind after the other. The
    /// scalings of `groups` are scratch memory, set for each row that is normalized by itself.
    ///
    /// LayerNorm, which subtracts the mean of a row, is compiled apart (`CENTRED`), so that other
    /// rows do not pay for the subtractions.
    fn row<S: Simd, const CENTRED: bool>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &mut Groups<T::Acc>,
        output: Option<&mut RowWriter<T>>,
        sums: &mut [T::Acc],
    );
}

/// A row of the input.
pub(crate) struct Row<'a, T> {
    pub index: usize,
    /// Its elements, with the residual added.
    pub x: &'a [T],
    /// False if the row is padding.
    pub keeps: bool,
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
    fn per_column(self) -> usize {
        match self {
            Self::None => 0,
            Self::DyX => 1,
            Self::DyXAndDy => 2,
        }
    }
}

/// A row's share of the column sums of a backward.
enum ColumnSums<'a, A> {
    None,
    /// Σ dy x̃.
    DyX(&'a mut [A]),
    /// Σ dy x̃ and Σ dy.
    DyXAndDy(&'a mut [A], &'a mut [A]),
}

impl<'a, A: Accumulator> ColumnSums<'a, A> {
    /// Splits the sums of a chunk: none, one for each of `cols` columns, or two.
    #[inline(always)]
    fn of(sums: &'a mut [A], cols: usize) -> Self {
        if sums.is_empty() {
            return Self::None;
        }
        let (dy_x, dy) = sums.split_at_mut(cols);
        match dy.is_empty() {
            true => Self::DyX(dy_x),
            false => Self::DyXAndDy(dy_x, &mut dy[..cols]),
        }
    }

    /// Adds x̃ and dy of some columns.
    #[inline(always)]
    fn add<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, A, K>,
        x: Lanes<S, A, K>,
        dy: Lanes<S, A, K>,
    ) {
        match self {
            Self::None => {}
            Self::DyX(dy_x) => at.store(dy.mul_add(x, at.load(dy_x)), dy_x),
            Self::DyXAndDy(dy_x, dy_sum) => {
                at.store(dy.mul_add(x, at.load(dy_x)), dy_x);
                at.store(at.load(dy_sum) + dy, dy_sum);
            }
        }
    }
}
