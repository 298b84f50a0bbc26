//! The row kernels: each reads rows, writes its output, and sums columns on the way.
//!
//! 1. `run` cuts the rows into chunks, whose size depends only on the shape. Threads take chunks.
//! 2. A chunk takes its rows one by one. With a residual, it first writes the row's `x + residual`.
//!    A large input has a pass of its own for that.
//! 3. A row is cut into groups of channels. Without group scaling it is one group.
//! 4. A pass is `Forward` or `Backward`. It reads each group of a row and takes the sums of group
//!    scaling: Σ x² in a forward, and Σ gain dy x and Σ decay x² too in a backward.
//! 5. It reads the whole row again, now from the first-level cache. Four vectors at a time, it
//!    writes the output and adds to the chunk's sums.
//! 6. The chunks' sums are added in order. So the bits are the same for any number of threads.

use super::element::{Accumulator, Element, Numbers};
use super::lanes::{sum_terms, sweep, Columns, Groups, Lanes, Scaling, Terms};
use super::simd;
use super::uninit::{fill_output, OutputChunk, RowWriter, Stores, NON_TEMPORAL};
use crate::device::host::{ForwardSums, GradientSums, RowSum, SquareSums};
use candle::WithDType;
use pulp::{Scalar, Simd, WithSimd};
use rayon::prelude::*;
use std::ops::Range;

/// `[rows, cols]`, where the elements of a row are adjacent in memory.
pub(super) struct Matrix<'a, T> {
    /// C, at least 1.
    pub cols: usize,
    pub rows: usize,
    /// All elements of the storage.
    pub values: &'a [T],
    /// Starts of blocks of packed rows, equally many in each.
    pub blocks: Vec<usize>,
}

/// The input's rows, with their padding mask and group scaling.
pub(crate) struct Rows<'a, T> {
    pub x: Matrix<'a, T>,
    /// Added to `x` before anything else. It has the shape of `x`.
    pub residual: Option<Matrix<'a, T>>,
    /// `[rows]`, 0 for a padded row.
    pub keep: Option<&'a [u8]>,
    /// G, the groups of the group scaling, and its ε.
    pub groups: Option<(usize, f64)>,
}

/// The gradients of a forward's outputs, shaped as its rows.
pub(super) struct RowGradients<'a, T> {
    pub dy: &'a Matrix<'a, T>,
    /// The gradient of `x + residual`, if that is an output.
    pub dsum: Option<&'a Matrix<'a, T>>,
}

/// Outputs of a forward, `[rows, cols]` each.
pub(super) struct RowOutputs<T> {
    /// `None` if only sums were wanted.
    pub y: Option<Vec<T>>,
    /// `x + residual`, if there is a residual.
    pub sum: Option<Vec<T>>,
}

impl<T> Matrix<'_, T> {
    #[inline(always)]
    fn row(&self, row: usize) -> &[T] {
        let start = match self.blocks[..] {
            [start] => start + row * self.cols,
            _ => {
                let rows = self.rows / self.blocks.len();
                self.blocks[row / rows] + row % rows * self.cols
            }
        };
        &self.values[start..][..self.cols]
    }
}

impl<T: Element> Rows<'_, T> {
    pub fn len(&self) -> usize {
        self.x.rows
    }

    pub fn cols(&self) -> usize {
        self.x.cols
    }

    /// The bytes of the input, which are those of an output.
    fn bytes(&self) -> usize {
        self.len() * self.cols() * size_of::<T>()
    }

    /// Non-temporal for a large output whose groups are whole cache lines, so that no line is
    /// written in both ways if rows begin with one.
    fn stores(&self) -> Stores {
        #[cfg(target_arch = "x86_64")]
        if self.bytes() >= NON_TEMPORAL && (self.group_len() * size_of::<T>()).is_multiple_of(64) {
            return Stores::NonTemporal;
        }
        Stores::Cached
    }

    /// The number of rows that are not padding.
    pub fn kept(&self) -> usize {
        match self.keep {
            Some(keep) => keep.iter().filter(|&&keep| keep != 0).count(),
            None => self.len(),
        }
    }

    /// The same rows, read from `sum`, which is `x + residual`.
    pub fn summed<'a>(&'a self, sum: &'a [T]) -> Rows<'a, T> {
        Rows {
            x: Matrix {
                cols: self.cols(),
                rows: self.len(),
                values: sum,
                blocks: vec![0],
            },
            residual: None,
            keep: self.keep,
            groups: self.groups,
        }
    }

    #[inline(always)]
    fn keeps(&self, row: usize) -> bool {
        self.keep.is_none_or(|keep| keep[row] != 0)
    }

    /// The number of sums of squares: C over kept rows, then C over padded ones if they count.
    fn squares_width(&self, sums: SquareSums) -> usize {
        let padded = sums == SquareSums::KeptAndAll && self.keep.is_some();
        self.cols() * (1 + usize::from(padded))
    }

    /// Splits a pass's column sums, laid out as [`Self::squares_width`] says, into those over kept
    /// rows and over all rows.
    fn forward_sums(&self, sums: SquareSums, mut totals: Numbers<T>) -> ForwardSums<Numbers<T>> {
        let padded = totals.split_off(self.cols());
        let all = (sums == SquareSums::KeptAndAll).then(|| {
            let mut squares = totals.clone();
            for (square, padded) in squares.iter_mut().zip(padded) {
                *square += padded;
            }
            let rows = self.len();
            RowSum { squares, rows }
        });
        let (squares, rows) = (totals, self.kept());
        let kept = RowSum { squares, rows };
        ForwardSums { kept, all }
    }

    /// Channels of a group; all of them without group scaling.
    fn group_len(&self) -> usize {
        self.cols() / self.groups.map_or(1, |(groups, _)| groups)
    }

    fn group_scaling(&self) -> Option<GroupScaling<T::Acc>> {
        let (_, eps) = self.groups?;
        Some(GroupScaling {
            share: T::Acc::ONE / T::Acc::from_count(self.group_len()),
            eps: T::Acc::from_f64(eps),
        })
    }
}

/// `x + residual` if there is a residual, `y = gain ⊙ x̃ + shift` if these are given, and the column
/// sums of x̃² that are wanted.
pub(super) fn forward<T: Element>(
    rows: &Rows<T>,
    factors: Option<&[Numbers<T>; 2]>,
    sums: Option<SquareSums>,
) -> (RowOutputs<T>, Option<ForwardSums<Numbers<T>>>) {
    let [gain, shift] = slices(factors);
    let pass = Forward { gain, shift };
    let (outputs, totals) = run(rows, &pass, sums.map_or(0, |sums| rows.squares_width(sums)));
    (outputs, sums.map(|sums| rows.forward_sums(sums, totals)))
}

/// The input's gradient, if its gain and decay are given, and the column sums of dy x̃ and dy over
/// kept rows, if they are wanted.
///
/// The gradient is `dx̃ = gain ⊙ dy − decay ⊙ x̃`, taken back through the group scaling, and 0 in
/// padded rows. If there is a `dsum`, it is added.
pub(super) fn backward<T: Element>(
    rows: &Rows<T>,
    gradients: &RowGradients<T>,
    factors: Option<&[Numbers<T>; 2]>,
    sums: bool,
) -> (RowOutputs<T>, Option<GradientSums<Numbers<T>>>) {
    let [gain, decay] = slices(factors);
    let pass = Backward {
        gradients,
        gain,
        decay,
    };
    let width = if sums { 2 * rows.cols() } else { 0 };
    let (outputs, mut dy_x) = run(rows, &pass, width);
    let sums = sums.then(|| GradientSums {
        dy: dy_x.split_off(rows.cols()),
        dy_x,
    });
    (outputs, sums)
}

/// The factors of a pass; empty without an output.
fn slices<A>(factors: Option<&[Vec<A>; 2]>) -> [&[A]; 2] {
    factors.map_or([&[], &[]], |factors| factors.each_ref().map(Vec::as_slice))
}

/// Vectors per bounds check in a pass.
///
/// `x + residual` takes one at a time: with four, a forward with a residual of 1024x512 f32 took as
/// long or up to 5 % longer.
const STEP: usize = 4;

/// The equations of a row, in a forward or a backward.
///
/// Implementations are `#[inline(always)]`, so that they are compiled for each SIMD level. They cut
/// all arrays of a row to one length. So a vector's columns are in bounds of all or of none, which
/// is tested once.
//
// Rows are taken one at a time. Four at a time would share the loads of a channel's numbers, which
// saves 20 % of the time in the caches. But they read and write in four places, and from memory
// they take up to twice as long: a backward of 1024x512 f32 took 0.42 ms instead of 0.21.
// Prefetches did not make up for it. Nor are the scales of the next row computed before a row is
// written, though that hides the time of their roots: a backward of 4096x512 f32 then took 0.95 ms
// instead of 0.60. See `benches/results/2026-11-22-cpu.md`.
trait Pass<T: Element>: Sync {
    /// True if the rows may have a residual. A backward reads `x + residual`, which the forward
    /// wrote.
    const ADDS_RESIDUAL: bool;

    /// False if only sums are wanted.
    fn has_output(&self) -> bool;

    /// Writes a row of the output, if there is an output, and adds to the chunk's `sums`, which is
    /// empty if no sums are wanted. If there is group scaling, sets the scalings of `groups`.
    fn row<S: Simd>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &mut Groups<T::Acc>,
        output: Option<&mut RowWriter<T>>,
        sums: &mut [T::Acc],
    );
}

/// A row of the input.
struct Row<'a, T: Element> {
    index: usize,
    /// With the residual.
    x: &'a [T],
    /// False if the row is padding.
    keeps: bool,
    /// `None` without group scaling.
    group_scaling: Option<&'a GroupScaling<T::Acc>>,
}

/// `x̃ = r x`, Σ x̃² and `y = gain x̃ + shift`.
struct Forward<'a, A> {
    /// `[C]`, as `shift`. Empty if only sums are wanted.
    gain: &'a [A],
    shift: &'a [A],
}

impl<T: Element> Pass<T> for Forward<'_, T::Acc> {
    const ADDS_RESIDUAL: bool = true;

    fn has_output(&self) -> bool {
        !self.gain.is_empty()
    }

    #[inline(always)]
    fn row<S: Simd>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &mut Groups<T::Acc>,
        y: Option<&mut RowWriter<T>>,
        sums: &mut [T::Acc],
    ) {
        if y.is_none() && sums.is_empty() {
            return; // only `x + residual` was wanted
        }
        let (x, cols) = (row.x, row.x.len());
        if let Some(group_scaling) = row.group_scaling {
            group_scaling.scale(simd, x, groups);
        }
        // Squares of padded rows have sums of their own, or none.
        let start = if row.keeps { 0 } else { cols };
        let sums = (start < sums.len()).then(|| &mut sums[start..][..cols]);
        let mut squares = Squares { x, sums };
        let Some(y) = y else {
            return sweep::<STEP, _, T>(simd, groups, &mut squares, ());
        };
        let mut columns = Normalized {
            squares,
            gain: &self.gain[..cols],
            shift: &self.shift[..cols],
        };
        y.extend::<STEP, _>(simd, groups, &mut columns);
    }
}

/// x̃, added to Σ x̃².
struct Squares<'a, T: Element> {
    x: &'a [T],
    sums: Option<&'a mut [T::Acc]>,
}

impl<T: Element> Columns<T::Acc> for Squares<'_, T> {
    #[inline(always)]
    fn step<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        scaling: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let x = Lanes::load(simd, self.x, at) * Lanes::splat(simd, scaling.factor);
        if let Some(sums) = &mut self.sums {
            x.mul_add(x, Lanes::load(simd, sums, at)).store(sums, at);
        }
        x
    }
}

/// y.
struct Normalized<'a, T: Element> {
    squares: Squares<'a, T>,
    gain: &'a [T::Acc],
    shift: &'a [T::Acc],
}

impl<T: Element> Columns<T::Acc> for Normalized<'_, T> {
    #[inline(always)]
    fn step<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        scaling: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let x = self.squares.step(simd, at, scaling);
        let shift = Lanes::load(simd, self.shift, at);
        x.mul_add(Lanes::load(simd, self.gain, at), shift)
    }
}

/// `x̃ = r x`, Σ dy x̃, Σ dy, `dx̃ = gain dy − decay x̃` and
/// `dx = r (dx̃ − x̃ · mean(dx̃ x̃)) + dsum`.
struct Backward<'a, T: Element> {
    gradients: &'a RowGradients<'a, T>,
    /// `[C]`, as `decay`. Empty if only sums are wanted.
    gain: &'a [T::Acc],
    decay: &'a [T::Acc],
}

impl<T: Element> Pass<T> for Backward<'_, T> {
    const ADDS_RESIDUAL: bool = false;

    fn has_output(&self) -> bool {
        !self.gain.is_empty()
    }

    #[inline(always)]
    fn row<S: Simd>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &mut Groups<T::Acc>,
        dx: Option<&mut RowWriter<T>>,
        sums: &mut [T::Acc],
    ) {
        let (x, cols) = (row.x, row.x.len());
        let dy = &self.gradients.dy.row(row.index)[..cols];
        let dsum = (self.gradients.dsum).map(|dsum| &dsum.row(row.index)[..cols]);
        if !row.keeps {
            if let Some(dx) = dx {
                dx.extend::<1, _>(simd, groups, &mut Padded { dsum });
            }
            return;
        }
        let Some(dx) = dx else {
            let sums = Some(halves(sums, cols));
            if let Some(group_scaling) = row.group_scaling {
                group_scaling.scale(simd, x, groups);
            }
            return sweep::<STEP, _, T>(simd, groups, &mut Products { x, dy, sums }, ());
        };
        let (gain, decay) = (&self.gain[..cols], &self.decay[..cols]);
        if let Some(group_scaling) = row.group_scaling {
            group_scaling.scale_bwd(simd, &GroupTerms { x, dy, gain, decay }, groups);
        }
        let sums = (!sums.is_empty()).then(|| halves(sums, cols));
        let mut columns = NormalizedBwd {
            products: Products { x, dy, sums },
            gain,
            decay,
        };
        // A test of `dsum` in each step would cost up to a tenth.
        match dsum {
            Some(dsum) => dx.extend::<STEP, _>(simd, groups, &mut Plus { columns, dsum }),
            None => dx.extend::<STEP, _>(simd, groups, &mut columns),
        }
    }
}

/// Σ dy x̃ and Σ dy.
#[inline(always)]
fn halves<A>(sums: &mut [A], cols: usize) -> [&mut [A]; 2] {
    let (dy_x, dy) = sums.split_at_mut(cols);
    [dy_x, &mut dy[..cols]]
}

/// x̃ and dy, added to Σ dy x̃ and Σ dy.
struct Products<'a, T: Element> {
    x: &'a [T],
    dy: &'a [T],
    sums: Option<[&'a mut [T::Acc]; 2]>,
}

impl<T: Element> Products<'_, T> {
    #[inline(always)]
    fn add<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        scaling: Scaling<T::Acc>,
    ) -> [Lanes<S, T::Acc, K>; 2] {
        let x = Lanes::load(simd, self.x, at) * Lanes::splat(simd, scaling.factor);
        let dy = Lanes::load(simd, self.dy, at);
        if let Some([dy_x, dy_sum]) = &mut self.sums {
            dy.mul_add(x, Lanes::load(simd, dy_x, at)).store(dy_x, at);
            (Lanes::load(simd, dy_sum, at) + dy).store(dy_sum, at);
        }
        [x, dy]
    }
}

impl<T: Element> Columns<T::Acc> for Products<'_, T> {
    #[inline(always)]
    fn step<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        scaling: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let [x, _] = self.add(simd, at, scaling);
        x
    }
}

/// dx without dsum.
struct NormalizedBwd<'a, T: Element> {
    products: Products<'a, T>,
    gain: &'a [T::Acc],
    decay: &'a [T::Acc],
}

impl<T: Element> Columns<T::Acc> for NormalizedBwd<'_, T> {
    #[inline(always)]
    fn step<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        scaling: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let [x, dy] = self.products.add(simd, at, scaling);
        let gain = Lanes::load(simd, self.gain, at);
        let dx_tilde = gain * dy - Lanes::load(simd, self.decay, at) * x;
        let dx = dx_tilde - x * Lanes::splat(simd, scaling.mean);
        dx * Lanes::splat(simd, scaling.factor)
    }
}

/// `columns + dsum`.
struct Plus<'a, T, C> {
    columns: C,
    dsum: &'a [T],
}

impl<T: Element, C: Columns<T::Acc>> Columns<T::Acc> for Plus<'_, T, C> {
    #[inline(always)]
    fn step<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        scaling: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        self.columns.step(simd, at, scaling) + Lanes::load(simd, self.dsum, at)
    }
}

/// dx of a padded row.
struct Padded<'a, T> {
    dsum: Option<&'a [T]>,
}

impl<T: Element> Columns<T::Acc> for Padded<'_, T> {
    #[inline(always)]
    fn step<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        _: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let zero = Lanes::splat(simd, T::Acc::ZERO);
        match self.dsum {
            Some(dsum) => zero + Lanes::load(simd, dsum, at),
            None => zero,
        }
    }
}

/// `x + residual`.
struct Addition<'a, T> {
    x: &'a [T],
    residual: &'a [T],
}

impl<T: Element> Columns<T::Acc> for Addition<'_, T> {
    #[inline(always)]
    fn step<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        _: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        Lanes::load(simd, self.x, at) + Lanes::load(simd, self.residual, at)
    }
}

/// Group scaling: `r = 1/√(mean(x²) + ε)` of each group.
struct GroupScaling<A> {
    /// 1 over the channels of a group.
    share: A,
    eps: A,
}

impl<A: Accumulator> GroupScaling<A> {
    /// Sets r of each group of a row.
    #[inline(always)]
    fn scale<S: Simd, T: Element<Acc = A>>(&self, simd: S, x: &[T], groups: &mut Groups<A>) {
        let (mut start, len) = (0, groups.len());
        for scaling in groups.scalings_mut() {
            let group = start..start + len;
            let [squares] = sum_terms::<4, 1, S, A>(simd, group.clone(), &GroupSquares { x });
            scaling.factor = self.factor(&x[group], squares);
            start += len;
        }
    }

    /// Sets r and mean(dx̃ x̃) of each group of a row.
    #[inline(always)]
    fn scale_bwd<S: Simd, T: Element<Acc = A>>(
        &self,
        simd: S,
        terms: &GroupTerms<T>,
        groups: &mut Groups<A>,
    ) {
        let (mut start, len) = (0, groups.len());
        for scaling in groups.scalings_mut() {
            let group = start..start + len;
            // Because x̃ = r x, all r in the mean of (gain dy − decay x̃) x̃ stand outside its
            // sums. So the pass that sums x² for r can take these sums too.
            let [squares, gain_dy_x, decay_x2] =
                sum_terms::<2, 3, S, A>(simd, group.clone(), terms);
            let factor = self.factor(&terms.x[group.clone()], squares);
            let total = factor * (gain_dy_x - factor * decay_x2);
            let total = if total.is_finite() {
                total
            } else {
                terms.total_with(factor, group)
            };
            *scaling = Scaling {
                factor,
                mean: total * self.share,
            };
            start += len;
        }
    }

    /// r of a group whose squares add up to `squares`.
    #[inline(always)]
    fn factor<T: Element<Acc = A>>(&self, x: &[T], squares: A) -> A {
        let square = squares * self.share + self.eps;
        if square.is_finite() {
            square.sqrt().recip()
        } else {
            self.factor_of_huge(x)
        }
    }

    /// r of a group whose mean square overflows, or does with ε. It divides x and √ε by the largest
    /// magnitude of x before it squares. If x is not finite, r is NaN: the output shows that, and
    /// the statistics leave the batch out.
    #[cold]
    fn factor_of_huge<T: Element<Acc = A>>(&self, x: &[T]) -> A {
        let x = || (0..x.len()).map(|i| value(x, i));
        if !x().all(|x| x.is_finite()) {
            return A::nan();
        }
        let largest = x().fold(A::ZERO, |largest, x| {
            let magnitude = x.abs();
            if magnitude > largest {
                magnitude
            } else {
                largest
            }
        });
        let squares = x().fold(A::ZERO, |sum, x| {
            let x = x / largest;
            sum + x * x
        });
        let square = squares / A::from_count(x().len()) + self.eps / largest / largest;
        (largest * square.sqrt()).recip()
    }
}

/// An element in the dtype of the sums.
fn value<T: Element>(row: &[T], i: usize) -> T::Acc {
    Lanes::<Scalar, _, 1>::load(Scalar, row, i).total()
}

/// Σ x² of a group.
struct GroupSquares<'a, T> {
    x: &'a [T],
}

impl<T: Element> Terms<T::Acc, 1> for GroupSquares<'_, T> {
    #[inline(always)]
    fn add<S: Simd, const K: usize>(
        &self,
        simd: S,
        at: usize,
        [squares]: &mut [Lanes<S, T::Acc, K>; 1],
    ) {
        let x = Lanes::load(simd, self.x, at);
        *squares = x.mul_add(x, *squares);
    }
}

/// The sums for the backward of group scaling: Σ x², Σ gain dy x, Σ decay x².
struct GroupTerms<'a, T: Element> {
    x: &'a [T],
    dy: &'a [T],
    gain: &'a [T::Acc],
    decay: &'a [T::Acc],
}

impl<T: Element> Terms<T::Acc, 3> for GroupTerms<'_, T> {
    #[inline(always)]
    fn add<S: Simd, const K: usize>(
        &self,
        simd: S,
        at: usize,
        sums: &mut [Lanes<S, T::Acc, K>; 3],
    ) {
        let [squares, gain_dy_x, decay_x2] = sums;
        let x = Lanes::load(simd, self.x, at);
        let gain_dy = Lanes::load(simd, self.gain, at) * Lanes::load(simd, self.dy, at);
        let square = x * x;
        *squares = *squares + square;
        *gain_dy_x = gain_dy.mul_add(x, *gain_dy_x);
        *decay_x2 = square.mul_add(Lanes::load(simd, self.decay, at), *decay_x2);
    }
}

impl<T: Element> GroupTerms<'_, T> {
    /// Σ (gain dy − decay x̃) x̃, if products with x itself overflow.
    #[cold]
    fn total_with(&self, factor: T::Acc, group: Range<usize>) -> T::Acc {
        let mut total = T::Acc::ZERO;
        for i in group {
            let x = factor * value(self.x, i);
            total += (self.gain[i] * value(self.dy, i) - self.decay[i] * x) * x;
        }
        total
    }
}

/// Elements of a chunk, which must outweigh the cost of handing it to a thread.
const CHUNK: usize = 1 << 16;

/// A chunk adds up this many rows apart before it adds them to its sums, because in f32 the
/// rounding error of a sum grows with the number of its terms.
const SUBTOTAL_ROWS: usize = 512;

/// The most chunks a call is cut into, so that partial sums stay small beside the rows.
const MAX_CHUNKS: usize = 256;

/// Fewest rows in a chunk of wide rows: its partial sums cost a row of traffic. A call with fewer
/// than `MIN_ROWS²` rows has smaller chunks, so that it still has about `MIN_ROWS` of them.
const MIN_ROWS: usize = 32;

/// Inputs up to this many elements run on the calling thread: waking another costs more.
const SERIAL: usize = CHUNK;

/// Rows of a chunk, from the shape alone.
fn chunk_rows(rows: usize, cols: usize) -> usize {
    let least = MIN_ROWS.min(rows / MIN_ROWS);
    (CHUNK / cols)
        .max(rows.div_ceil(MAX_CHUNKS))
        .max(least)
        .max(1)
}

/// With a residual, inputs of more bytes have a pass of their own for `x + residual`, which reads
/// and writes fewer arrays at a time. In one pass, a forward of 4096x512 f32 took 7 to 19 % longer.
/// At 2 MiB and less one pass is faster, because a row that was just summed is still in the
/// first-level cache.
const LARGE: usize = 4 << 20;

/// Runs `pass` over all rows, and returns fresh outputs and `width` column sums.
fn run<T: Element>(
    rows: &Rows<T>,
    pass: &impl Pass<T>,
    width: usize,
) -> (RowOutputs<T>, Vec<T::Acc>) {
    if rows.residual.is_none() || rows.bytes() <= LARGE {
        return run_with(rows.stores(), rows, pass, width);
    }
    // Without an output and without sums, a forward adds the residual and does nothing else.
    let [gain, shift] = slices(None);
    let (RowOutputs { sum, .. }, _) = run_with(Stores::Cached, rows, &Forward { gain, shift }, 0);
    let summed = rows.summed(sum.as_deref().unwrap_or_default());
    let (outputs, sums) = run_with(rows.stores(), &summed, pass, width);
    (RowOutputs { sum, ..outputs }, sums)
}

/// [`run`], whose output is written by `stores`.
fn run_with<T: Element>(
    stores: Stores,
    rows: &Rows<T>,
    pass: &impl Pass<T>,
    width: usize,
) -> (RowOutputs<T>, Vec<T::Acc>) {
    run_chunks(stores, rows, pass.has_output(), width, &|chunk| {
        simd::vectorize::<T, _>(rows.group_len(), ChunkPass { pass, rows, chunk });
    })
}

/// Calls `run` for each chunk of rows, in threads, and returns the outputs and the sums.
///
/// What does not depend on the pass is here, so that it is compiled once for each dtype.
fn run_chunks<T: Element>(
    stores: Stores,
    rows: &Rows<T>,
    has_output: bool,
    width: usize,
    run: &(dyn Fn(Chunk<T>) + Sync),
) -> (RowOutputs<T>, Vec<T::Acc>) {
    let chunk = chunk_rows(rows.len(), rows.cols());
    let count = rows.len().div_ceil(chunk);
    let len_if = |wanted: bool| match wanted {
        true => rows.len() * rows.cols(),
        false => 0,
    };
    let chunk_len = chunk * rows.cols();
    let mut partials = vec![T::Acc::ZERO; count * width];
    let mut sum = None;
    let y = fill_output(len_if(has_output), chunk_len, stores, |y| {
        let len = len_if(rows.residual.is_some());
        sum = Some(fill_output(len, chunk_len, Stores::Cached, |sum| {
            let (mut y, mut sum) = (y.into_iter(), sum.into_iter());
            let mut partials = partials.chunks_mut(width.max(1));
            let chunks: Vec<_> = (0..count)
                .map(|i| Chunk {
                    range: i * chunk..rows.len().min((i + 1) * chunk),
                    output: y.next(),
                    sum: sum.next(),
                    sums: partials.next().unwrap_or_default(),
                })
                .collect();
            if rows.len() * rows.cols() <= SERIAL {
                chunks.into_iter().for_each(run);
            } else {
                chunks.into_par_iter().for_each(run);
            }
        }));
    });
    let outputs = RowOutputs {
        y: has_output.then_some(y),
        sum: sum.filter(|_| rows.residual.is_some()),
    };
    (outputs, add_partials(&partials, width))
}

/// The sum of the rows of `partials`, first to last.
fn add_partials<A: Accumulator>(partials: &[A], width: usize) -> Vec<A> {
    let mut total = vec![A::ZERO; width];
    for partial in partials.chunks(width.max(1)) {
        for (total, &partial) in total.iter_mut().zip(partial) {
            *total += partial;
        }
    }
    total
}

/// A chunk of rows, and its parts of the outputs and sums, if there are such.
struct Chunk<'a, T: Element> {
    range: Range<usize>,
    output: Option<OutputChunk<'a, T>>,
    /// `x + residual`.
    sum: Option<OutputChunk<'a, T>>,
    sums: &'a mut [T::Acc],
}

/// A pass over a chunk, to be run at a SIMD level.
struct ChunkPass<'a, 'b, T: Element, P> {
    pass: &'a P,
    rows: &'a Rows<'a, T>,
    chunk: Chunk<'b, T>,
}

impl<T: Element, P: Pass<T>> WithSimd for ChunkPass<'_, '_, T, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { pass, rows, chunk } = self;
        let cols = rows.cols();
        let mut output = chunk.output.map(RowWriter::new);
        let mut sum = chunk.sum.map(RowWriter::new);
        let mut subtotals = vec![T::Acc::ZERO; chunk.sums.len()];
        let group_scaling = rows.group_scaling();
        let mut groups = Groups::new(cols, rows.group_len());
        let whole_row = Groups::new(cols, cols);
        for index in chunk.range.clone() {
            let mut x = &rows.x.row(index)[..cols];
            if P::ADDS_RESIDUAL {
                if let (Some(residual), Some(sum)) = (&rows.residual, &mut sum) {
                    let residual = &residual.row(index)[..cols];
                    let mut columns = Addition { x, residual };
                    sum.extend_cached::<1, _>(simd, &whole_row, &mut columns);
                    x = sum.last(cols);
                }
            }
            let row = Row {
                index,
                x,
                keeps: rows.keeps(index),
                group_scaling: group_scaling.as_ref(),
            };
            pass.row(simd, row, &mut groups, output.as_mut(), &mut subtotals);
            let rows_done = index + 1 - chunk.range.start;
            if rows_done.is_multiple_of(SUBTOTAL_ROWS) || index + 1 == chunk.range.end {
                for (sum, subtotal) in chunk.sums.iter_mut().zip(&mut subtotals) {
                    *sum += std::mem::replace(subtotal, T::Acc::ZERO);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix<T>(values: &[T], cols: usize) -> Matrix<'_, T> {
        Matrix {
            cols,
            rows: values.len() / cols,
            values,
            blocks: vec![0],
        }
    }

    /// The bits of an output and of its column sums, by every kind of stores.
    fn bits<T: Element>(rows: &Rows<T>, pass: &impl Pass<T>, width: usize) -> [Vec<u64>; 2] {
        [Stores::Cached, Stores::NonTemporal].map(|stores| {
            let (outputs, sums) = run_with(stores, rows, pass, width);
            let y = outputs.y.into_iter().flatten().map(WithDType::to_f64);
            let sums = sums.into_iter().map(WithDType::to_f64);
            y.chain(sums).map(f64::to_bits).collect()
        })
    }

    /// Miri takes its time.
    const ROWS: usize = if cfg!(miri) { 2 } else { 6 };

    /// Rows and groups of neither whole vectors nor whole cache lines, of whole vectors, and of
    /// both.
    fn outputs_past_the_caches_have_the_bits_of_cached_ones<T: Element>() {
        let shapes = [
            (7, None),
            (100, Some(4)),
            (192, None),
            (192, Some(1)),
            (192, Some(3)),
        ];
        for (cols, groups) in shapes.into_iter().take(if cfg!(miri) { 2 } else { 5 }) {
            let values = |scale: f64| -> Vec<T> {
                let value = |i: usize| T::from_f64(scale * (i as f64 * 0.7 + scale).sin());
                (0..ROWS * cols).map(value).collect()
            };
            let (x, dy, dsum) = (values(1.), values(2.), values(3.));
            let numbers = |shift: f64| -> Vec<T::Acc> {
                let number = |i: usize| <T::Acc as WithDType>::from_f64((i as f64 + shift).cos());
                (0..cols).map(number).collect()
            };
            let (gain, other) = (&numbers(0.)[..], &numbers(1.)[..]);
            let rows = Rows {
                x: matrix(&x, cols),
                residual: None,
                keep: Some(&[1, 0, 1, 1, 0, 1][..ROWS]),
                groups: groups.map(|groups| (groups, 1e-5)),
            };
            let width = rows.squares_width(SquareSums::KeptAndAll);
            let [cached, past] = bits(&rows, &Forward { gain, shift: other }, width);
            assert_eq!(cached, past, "forward, {cols} in {groups:?}");
            let (dy, dsum) = (matrix(&dy, cols), matrix(&dsum, cols));
            for dsum in [None, Some(&dsum)] {
                let pass = Backward {
                    gradients: &RowGradients { dy: &dy, dsum },
                    gain,
                    decay: other,
                };
                let [cached, past] = bits(&rows, &pass, 2 * cols);
                assert_eq!(cached, past, "backward, {cols} in {groups:?}");
            }
        }
    }

    #[test]
    fn outputs_past_the_caches_have_the_bits_of_cached_ones_in_every_type() {
        outputs_past_the_caches_have_the_bits_of_cached_ones::<f32>();
        outputs_past_the_caches_have_the_bits_of_cached_ones::<f64>();
        outputs_past_the_caches_have_the_bits_of_cached_ones::<half::f16>();
        outputs_past_the_caches_have_the_bits_of_cached_ones::<half::bf16>();
    }
}
