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
use super::lanes::{sum_terms, sweep, Columns, Groups, Lanes, Scaling, Span, Terms};
use super::simd;
use super::uninit::{fill_output, Part, RowWriter, Stores, NON_TEMPORAL};
use candle::WithDType;
use num_traits::Float;
use pulp::{Simd, WithSimd};
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
pub(super) struct Rows<'a, T> {
    pub x: Matrix<'a, T>,
    /// Added to `x` before anything else. It has the shape of `x`.
    pub residual: Option<Matrix<'a, T>>,
    /// `[rows]`, 0 for a padded row.
    pub keep: Option<&'a [u8]>,
    /// G, the groups of the group scaling, and its ε.
    pub groups: Option<(usize, f64)>,
    /// A forward's squares are summed over all rows too.
    pub sums_all: bool,
}

/// Σ x̃² of each column, over some of the rows.
pub(super) struct SquareSums<T: Element> {
    pub squares: Numbers<T>,
    /// The number of rows in the sums.
    pub rows: usize,
}

/// The arrays that a pass wrote, `[rows, cols]` each.
pub(super) struct Written<T> {
    /// The output, which is dx in a backward. `None` if only sums were wanted.
    pub y: Option<Vec<T>>,
    /// `x + residual`, if there is a residual.
    pub stream: Option<Vec<T>>,
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

    /// The same rows, read from the stream, which is `x + residual`.
    pub fn of_stream<'a>(&'a self, stream: &'a [T]) -> Rows<'a, T> {
        Rows {
            x: Matrix {
                cols: self.cols(),
                rows: self.len(),
                values: stream,
                blocks: vec![0],
            },
            residual: None,
            keep: self.keep,
            groups: self.groups,
            sums_all: self.sums_all,
        }
    }

    #[inline(always)]
    pub fn keeps(&self, row: usize) -> bool {
        self.keep.is_none_or(|keep| keep[row] != 0)
    }

    /// Channels of a group; all of them without group scaling.
    fn group_len(&self) -> usize {
        self.cols() / self.groups.map_or(1, |(groups, _)| groups)
    }

    fn scaler(&self) -> Option<Scaler<T::Acc>> {
        let (_, eps) = self.groups?;
        Some(Scaler {
            share: T::Acc::ONE / T::Acc::from_f64(self.group_len() as f64),
            eps: T::Acc::from_f64(eps),
        })
    }
}

/// `x + residual` if there is a residual, `y = gain ⊙ x̃ + shift` if these are given, and the
/// column sums of x̃² if they are wanted.
pub(super) fn forward<T: Element>(
    rows: &Rows<T>,
    coefficients: Option<&[Numbers<T>; 2]>,
    sums: bool,
) -> (Written<T>, Vec<SquareSums<T>>) {
    let cols = rows.cols();
    // Sums over kept rows, and then sums over padded ones if they count.
    let width = match (sums, rows.keep) {
        (false, _) => 0,
        (true, Some(_)) if rows.sums_all => 2 * cols,
        (true, _) => cols,
    };
    let (written, mut squares) = run(rows, &Forward { coefficients }, width);
    if !sums {
        return (written, vec![]);
    }
    let of_padded = squares.split_off(cols);
    let mut sums = vec![SquareSums {
        squares,
        rows: rows.kept(),
    }];
    if rows.sums_all {
        let mut squares = sums[0].squares.clone();
        for (square, padded) in squares.iter_mut().zip(of_padded) {
            *square += padded;
        }
        sums.push(SquareSums {
            squares,
            rows: rows.len(),
        });
    }
    (written, sums)
}

/// `y = gain ⊙ x̃ + shift` alone.
pub(super) fn normalize<T: Element>(rows: &Rows<T>, coefficients: &[Numbers<T>; 2]) -> Vec<T> {
    let (written, _) = forward(rows, Some(coefficients), false);
    let Some(y) = written.y else {
        unreachable!("a forward with coefficients writes its output")
    };
    y
}

/// The mean of x² of some columns, whose sum of x² overflows. Each element is divided by the root
/// of the number of rows before it is squared, so that no sum exceeds the mean. The mean is
/// infinite only where it leaves f64 itself, or where x does.
///
/// With group scaling x̃² is at most the width of a group, and no sum overflows. Slow, in f64 and
/// on one thread, but no more than the columns that overflowed.
#[cold]
pub(super) fn means_of_huge<T: Element>(
    rows: &Rows<T>,
    columns: &[usize],
    counts: impl Fn(usize) -> bool,
) -> Vec<f64> {
    debug_assert!(rows.groups.is_none());
    let counted = || (0..rows.len()).filter(|&row| counts(row));
    let root = (counted().count() as f64).sqrt();
    let mut means = vec![0.; columns.len()];
    for row in counted() {
        let x = rows.x.row(row);
        for (mean, &column) in means.iter_mut().zip(columns) {
            *mean += (x[column].to_f64() / root).powi(2);
        }
    }
    means
}

/// Column sums that a backward may take over the kept rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BackwardSums {
    None,
    /// Σ dy x̃.
    DyX,
    /// Σ dy x̃ and Σ dy.
    DyXAndDy,
}

/// The input's gradient, if its gain and decay are given, and the column sums that are wanted, one
/// after the other.
///
/// The gradient is `dx̃ = gain ⊙ dy − decay ⊙ x̃`, taken back through the group scaling, and 0 in
/// padded rows.
pub(super) fn backward<T: Element>(
    rows: &Rows<T>,
    dy: &Matrix<T>,
    coefficients: Option<&[Numbers<T>; 2]>,
    sums: BackwardSums,
) -> (Option<Vec<T>>, Numbers<T>) {
    let width = match sums {
        BackwardSums::None => 0,
        BackwardSums::DyX => rows.cols(),
        BackwardSums::DyXAndDy => 2 * rows.cols(),
    };
    let (written, sums) = run(rows, &Backward { dy, coefficients }, width);
    (written.y, sums)
}

/// Vectors per bounds check in a pass.
///
/// `x + residual` takes one at a time: with four, a forward with a residual of 1024x512 f32 took as
/// long or up to 5 % longer.
const UNROLL: usize = 4;

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
trait RowPass<T: Element>: Sync {
    /// True if the rows may have a residual. A backward reads `x + residual`, which the forward
    /// wrote. Code to add one would take registers from its loops, and up to 7 % more time in f16.
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
    scaler: Option<&'a Scaler<T::Acc>>,
}

/// `x̃ = r x`, Σ x̃² and `y = gain x̃ + shift`.
struct Forward<'a, A> {
    /// Gain and shift, `[C]` each. `None` if only sums are wanted.
    coefficients: Option<&'a [Vec<A>; 2]>,
}

impl<T: Element> RowPass<T> for Forward<'_, T::Acc> {
    const ADDS_RESIDUAL: bool = true;

    fn has_output(&self) -> bool {
        self.coefficients.is_some()
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
        if let Some(scaler) = row.scaler {
            scaler.scale(simd, x, groups);
        }
        // AddSquares of padded rows have sums of their own, or none.
        let start = if row.keeps { 0 } else { cols };
        let sums = (start < sums.len()).then(|| &mut sums[start..][..cols]);
        let mut squares = AddSquares { x, sums };
        let (Some(y), Some([gain, shift])) = (y, self.coefficients) else {
            return sweep::<UNROLL, _, T>(simd, groups, &mut squares, ());
        };
        let mut columns = Normalized {
            squares,
            gain: &gain[..cols],
            shift: &shift[..cols],
        };
        y.extend::<UNROLL, _>(simd, groups, &mut columns);
    }
}

/// x̃, added to Σ x̃².
struct AddSquares<'a, T: Element> {
    x: &'a [T],
    sums: Option<&'a mut [T::Acc]>,
}

impl<T: Element> Columns<T::Acc> for AddSquares<'_, T> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(&mut self, at: Span<S, T::Acc, K>) -> Lanes<S, T::Acc, K> {
        let x = at.load(self.x) * at.splat(at.scaling.rms_inv);
        if let Some(sums) = &mut self.sums {
            at.store(x.mul_add(x, at.load(sums)), sums);
        }
        x
    }
}

/// y.
struct Normalized<'a, T: Element> {
    squares: AddSquares<'a, T>,
    gain: &'a [T::Acc],
    shift: &'a [T::Acc],
}

impl<T: Element> Columns<T::Acc> for Normalized<'_, T> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(&mut self, at: Span<S, T::Acc, K>) -> Lanes<S, T::Acc, K> {
        let x = self.squares.apply(at);
        let shift = at.load(self.shift);
        x.mul_add(at.load(self.gain), shift)
    }
}

/// `x̃ = r x`, Σ dy x̃, Σ dy, `dx̃ = gain dy − decay x̃` and `dx = r (dx̃ − x̃ · mean(dx̃ x̃))`.
struct Backward<'a, T: Element> {
    dy: &'a Matrix<'a, T>,
    /// Gain and decay, `[C]` each. `None` if only sums are wanted.
    coefficients: Option<&'a [Numbers<T>; 2]>,
}

impl<T: Element> RowPass<T> for Backward<'_, T> {
    const ADDS_RESIDUAL: bool = false;

    fn has_output(&self) -> bool {
        self.coefficients.is_some()
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
        let dy = &self.dy.row(row.index)[..cols];
        if !row.keeps {
            if let Some(dx) = dx {
                dx.extend::<1, _>(simd, groups, &mut Zeros);
            }
            return;
        }
        let (Some(dx), Some([gain, decay])) = (dx, self.coefficients) else {
            let sums = Sums::of(sums, cols);
            if let Some(scaler) = row.scaler {
                scaler.scale(simd, x, groups);
            }
            return sweep::<UNROLL, _, T>(simd, groups, &mut AddProducts { x, dy, sums }, ());
        };
        let (gain, decay) = (&gain[..cols], &decay[..cols]);
        if let Some(scaler) = row.scaler {
            scaler.scale_bwd(simd, &GroupTerms { x, dy, gain, decay }, groups);
        }
        let sums = Sums::of(sums, cols);
        let mut columns = NormalizedBwd {
            products: AddProducts { x, dy, sums },
            gain,
            decay,
        };
        dx.extend::<UNROLL, _>(simd, groups, &mut columns);
    }
}

/// Sums over rows that a backward adds to.
enum Sums<'a, A> {
    None,
    DyX(&'a mut [A]),
    DyXAndDy(&'a mut [A], &'a mut [A]),
}

impl<'a, A> Sums<'a, A> {
    /// The sums of `cols` columns in `all`: none, one a column, or two.
    #[inline(always)]
    fn of(all: &'a mut [A], cols: usize) -> Self {
        if all.is_empty() {
            return Self::None;
        }
        let (dy_x, dy) = all.split_at_mut(cols);
        match dy.is_empty() {
            true => Self::DyX(dy_x),
            false => Self::DyXAndDy(dy_x, &mut dy[..cols]),
        }
    }
}

/// x̃ and dy, added to Σ dy x̃ and Σ dy.
struct AddProducts<'a, T: Element> {
    x: &'a [T],
    dy: &'a [T],
    sums: Sums<'a, T::Acc>,
}

impl<T: Element> AddProducts<'_, T> {
    #[inline(always)]
    fn add<S: Simd, const K: usize>(&mut self, at: Span<S, T::Acc, K>) -> [Lanes<S, T::Acc, K>; 2] {
        let x = at.load(self.x) * at.splat(at.scaling.rms_inv);
        let dy = at.load(self.dy);
        match &mut self.sums {
            Sums::None => {}
            Sums::DyX(dy_x) => at.store(dy.mul_add(x, at.load(dy_x)), dy_x),
            Sums::DyXAndDy(dy_x, dy_sum) => {
                at.store(dy.mul_add(x, at.load(dy_x)), dy_x);
                at.store(at.load(dy_sum) + dy, dy_sum);
            }
        }
        [x, dy]
    }
}

impl<T: Element> Columns<T::Acc> for AddProducts<'_, T> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(&mut self, at: Span<S, T::Acc, K>) -> Lanes<S, T::Acc, K> {
        let [x, _] = self.add(at);
        x
    }
}

/// dx.
struct NormalizedBwd<'a, T: Element> {
    products: AddProducts<'a, T>,
    gain: &'a [T::Acc],
    decay: &'a [T::Acc],
}

impl<T: Element> Columns<T::Acc> for NormalizedBwd<'_, T> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(&mut self, at: Span<S, T::Acc, K>) -> Lanes<S, T::Acc, K> {
        let [x, dy] = self.products.add(at);
        let dx_tilde = at.load(self.gain) * dy - at.load(self.decay) * x;
        let dx = dx_tilde - x * at.splat(at.scaling.mean);
        dx * at.splat(at.scaling.rms_inv)
    }
}

/// dx of a padded row.
struct Zeros;

impl<A: Accumulator> Columns<A> for Zeros {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(&mut self, at: Span<S, A, K>) -> Lanes<S, A, K> {
        at.splat(A::ZERO)
    }
}

/// `columns + row`.
struct Plus<'a, T, C> {
    columns: C,
    row: &'a [T],
}

impl<T: Element, C: Columns<T::Acc>> Columns<T::Acc> for Plus<'_, T, C> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(&mut self, at: Span<S, T::Acc, K>) -> Lanes<S, T::Acc, K> {
        self.columns.apply(at) + at.load(self.row)
    }
}

/// Group scaling: `r = 1/√(mean(x²) + ε)` of each group.
struct Scaler<A> {
    /// 1 over the channels of a group.
    share: A,
    eps: A,
}

impl<A: Accumulator> Scaler<A> {
    /// Sets r of each group of a row.
    #[inline(always)]
    fn scale<S: Simd, T: Element<Acc = A>>(&self, simd: S, x: &[T], groups: &mut Groups<A>) {
        for (group, scaling) in groups.each_mut() {
            let [squares] = sum_terms::<4, 1, S, A>(simd, group.clone(), &GroupSquares { x });
            scaling.rms_inv = self.rms_inv(&x[group], squares);
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
        for (group, scaling) in groups.each_mut() {
            // Because x̃ = r x, all r in the mean of (gain dy − decay x̃) x̃ stand outside its
            // sums. So the pass that sums x² for r can take these sums too.
            let [squares, gain_dy_x, decay_x2] =
                sum_terms::<2, 3, S, A>(simd, group.clone(), terms);
            let rms_inv = self.rms_inv(&terms.x[group.clone()], squares);
            let total = rms_inv * (gain_dy_x - rms_inv * decay_x2);
            let total = if total.is_finite() {
                total
            } else {
                terms.total_with(rms_inv, group)
            };
            *scaling = Scaling {
                rms_inv,
                mean: total * self.share,
            };
        }
    }

    /// r of a group whose squares add up to `squares`.
    #[inline(always)]
    fn rms_inv<T: Element<Acc = A>>(&self, x: &[T], squares: A) -> A {
        let square = squares * self.share + self.eps;
        if square.is_finite() {
            square.sqrt().recip()
        } else {
            self.rms_inv_of_huge(x)
        }
    }

    /// r of a group whose mean square overflows, or does with ε. It divides x and √ε by the largest
    /// magnitude of x before it squares. If x is not finite, r is NaN: the output shows that, and
    /// the statistics leave the batch out.
    #[cold]
    fn rms_inv_of_huge<T: Element<Acc = A>>(&self, x: &[T]) -> A {
        let x = || x.iter().copied().map(widened);
        if !x().all(Float::is_finite) {
            return A::nan();
        }
        let largest = x().map(Float::abs).fold(A::ZERO, Float::max);
        let squares = x().fold(A::ZERO, |sum, x| {
            let x = x / largest;
            sum + x * x
        });
        let square = squares / A::from_f64(x().len() as f64) + self.eps / largest / largest;
        (largest * square.sqrt()).recip()
    }
}

/// An element in the dtype of the sums.
fn widened<T: Element>(value: T) -> T::Acc {
    T::Acc::from_f64(value.to_f64())
}

/// Σ x² of a group.
struct GroupSquares<'a, T> {
    x: &'a [T],
}

impl<T: Element> Terms<T::Acc, 1> for GroupSquares<'_, T> {
    #[inline(always)]
    fn add<S: Simd, const K: usize>(
        &self,
        at: Span<S, T::Acc, K>,
        [squares]: &mut [Lanes<S, T::Acc, K>; 1],
    ) {
        let x = at.load(self.x);
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
        at: Span<S, T::Acc, K>,
        [squares, gain_dy_x, decay_x2]: &mut [Lanes<S, T::Acc, K>; 3],
    ) {
        let x = at.load(self.x);
        let gain_dy = at.load(self.gain) * at.load(self.dy);
        let square = x * x;
        *squares = *squares + square;
        *gain_dy_x = gain_dy.mul_add(x, *gain_dy_x);
        *decay_x2 = square.mul_add(at.load(self.decay), *decay_x2);
    }
}

impl<T: Element> GroupTerms<'_, T> {
    /// Σ (gain dy − decay x̃) x̃, if products with x itself overflow.
    #[cold]
    fn total_with(&self, rms_inv: T::Acc, group: Range<usize>) -> T::Acc {
        let mut total = T::Acc::ZERO;
        for i in group {
            let x = rms_inv * widened(self.x[i]);
            total += (self.gain[i] * widened(self.dy[i]) - self.decay[i] * x) * x;
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

/// Runs `pass` over all rows, and returns what it wrote and `width` column sums.
fn run<T: Element>(
    rows: &Rows<T>,
    pass: &impl RowPass<T>,
    width: usize,
) -> (Written<T>, Vec<T::Acc>) {
    if rows.residual.is_none() || rows.bytes() <= LARGE {
        return run_at_once(rows, pass, width);
    }
    // Without coefficients and without sums, a forward adds the residual and does nothing else.
    let (Written { stream, .. }, _) = run_at_once(rows, &Forward { coefficients: None }, 0);
    let Some(stream) = stream else {
        unreachable!("a forward with a residual writes the sum")
    };
    let (written, sums) = run_at_once(&rows.of_stream(&stream), pass, width);
    let stream = Some(stream);
    (Written { stream, ..written }, sums)
}

/// [`run`], which adds a residual row by row.
fn run_at_once<T: Element>(
    rows: &Rows<T>,
    pass: &impl RowPass<T>,
    width: usize,
) -> (Written<T>, Vec<T::Acc>) {
    run_chunks(rows, pass.has_output(), width, &|chunk| {
        simd::vectorize::<T, _>(rows.group_len(), ChunkPass { pass, rows, chunk });
    })
}

/// Calls `run` for each chunk of rows, in threads, and returns the outputs and the sums.
///
/// What does not depend on the pass is here, so that it is compiled once for each dtype.
fn run_chunks<T: Element>(
    rows: &Rows<T>,
    has_output: bool,
    width: usize,
    run: &(dyn Fn(Chunk<T>) + Sync),
) -> (Written<T>, Vec<T::Acc>) {
    let chunk = chunk_rows(rows.len(), rows.cols());
    let count = rows.len().div_ceil(chunk);
    let len = rows.len() * rows.cols();
    let chunk_len = chunk * rows.cols();
    let mut partials = vec![T::Acc::ZERO; count * width];
    let mut stream = None;
    let y = fill_output(has_output.then_some(len), chunk_len, rows.stores(), |y| {
        let stream_len = rows.residual.is_some().then_some(len);
        stream = fill_output(stream_len, chunk_len, Stores::Cached, |stream| {
            let (mut y, mut stream) = (y.into_iter(), stream.into_iter());
            let mut partials = partials.chunks_mut(width.max(1));
            let chunks: Vec<_> = (0..count)
                .map(|i| Chunk {
                    range: i * chunk..rows.len().min((i + 1) * chunk),
                    output: y.next(),
                    stream: stream.next(),
                    sums: partials.next().unwrap_or_default(),
                })
                .collect();
            if len <= SERIAL {
                chunks.into_iter().for_each(run);
            } else {
                chunks.into_par_iter().for_each(run);
            }
        });
    });
    (Written { y, stream }, add_partials(&partials, width))
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
    output: Option<Part<'a, T>>,
    /// `x + residual`.
    stream: Option<Part<'a, T>>,
    sums: &'a mut [T::Acc],
}

/// A pass over a chunk, to be run at a SIMD level.
struct ChunkPass<'a, 'b, T: Element, P> {
    pass: &'a P,
    rows: &'a Rows<'a, T>,
    chunk: Chunk<'b, T>,
}

impl<T: Element, P: RowPass<T>> WithSimd for ChunkPass<'_, '_, T, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { pass, rows, chunk } = self;
        let cols = rows.cols();
        let mut output = chunk.output.map(RowWriter::new);
        let mut stream = chunk.stream.map(RowWriter::new);
        let mut subtotals = vec![T::Acc::ZERO; chunk.sums.len()];
        let scaler = rows.scaler();
        let mut groups = Groups::new(cols, rows.group_len());
        let whole_row = Groups::new(cols, cols);
        for index in chunk.range.clone() {
            let mut x = &rows.x.row(index)[..cols];
            if P::ADDS_RESIDUAL {
                if let (Some(residual), Some(stream)) = (&rows.residual, &mut stream) {
                    let (columns, row) = (x, &residual.row(index)[..cols]);
                    stream.extend_cached::<1, _>(simd, &whole_row, &mut Plus { columns, row });
                    x = stream.last(cols);
                }
            }
            let row = Row {
                index,
                x,
                keeps: rows.keeps(index),
                scaler: scaler.as_ref(),
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

    /// Chunks of rows, by hand from the constants above.
    #[test]
    fn chunks_are_worth_a_thread_and_few() {
        for ([rows, cols], expected) in [
            ([4096, 512], CHUNK / 512),
            ([1 << 24, 3], (1 << 24) / MAX_CHUNKS),
            ([5000, 1 << 17], MIN_ROWS),
            ([100, 1 << 17], 3), // so that there are about `MIN_ROWS` chunks
            ([10, 1 << 17], 1),
        ] {
            assert_eq!(chunk_rows(rows, cols), expected, "{rows}x{cols}");
        }
        assert_eq!(CHUNK / 512, 128);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn large_outputs_of_whole_cache_lines_bypass_the_caches() {
        for (rows, groups, expected) in [
            (4096, 64, Stores::NonTemporal), // 16 MiB, and 64 bytes in a group
            (4095, 64, Stores::Cached),
            (4096, 128, Stores::Cached),
        ] {
            let rows = Rows {
                x: Matrix::<f32> {
                    cols: 1024,
                    rows,
                    values: &[],
                    blocks: vec![],
                },
                residual: None,
                keep: None,
                groups: Some((groups, 1e-5)),
                sums_all: false,
            };
            assert_eq!(rows.stores(), expected, "{} by {groups}", rows.len());
        }
    }
}
