//! The row kernels: each reads rows, writes its output, and sums columns on the way.
//!
//! 1. `run` cuts the rows into chunks, whose size depends only on the shape. Threads take chunks.
//! 2. A chunk takes its rows one by one. With a residual, it first writes the row's `x + residual`.
//!    Only for large inputs, a pass of its own writes all sums before.
//! 3. A row is cut into the groups of the layer-scale. Without a layer-scale it is one group.
//! 4. `group_scale` reads each group of a row and takes the sums of the layer-scale: Σ x² in a
//!    forward; Σ x², Σ gain dy x and Σ decay x² in a backward.
//! 5. `row` reads the whole row again, now from the first-level cache. Four vectors at a time, it
//!    writes the output, past the caches if all of it is large, and adds to the chunk's sums.
//! 6. The chunks' sums are added in order. So the bits are the same for any number of threads.

use super::element::{Accumulator, Element};
use super::lanes::{sum_terms, sweep, Columns, Lanes, Terms};
use super::simd;
use super::uninit::{fill_output, Piece, Values, STREAMED};
use candle::WithDType;
use pulp::{Scalar, Simd, WithSimd};
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::Range;

/// `[rows, cols]`, where the elements of a row are adjacent in memory.
pub(super) struct Matrix<'a, T> {
    /// C, at least 1.
    pub cols: usize,
    pub rows: usize,
    /// Where all elements are.
    pub values: &'a [T],
    /// Where blocks of packed rows begin, equally many in each.
    pub blocks: Vec<usize>,
}

/// The input's rows, with their padding mask and layer-scale.
pub(crate) struct Rows<'a, T> {
    pub x: Matrix<'a, T>,
    /// Added to `x` before anything else. It has the shape of `x`.
    pub residual: Option<Matrix<'a, T>>,
    /// `[rows]`, 0 for a padded row.
    pub keep: Option<&'a [u8]>,
    /// G, the groups of the layer-scale, and its ε.
    pub groups: Option<(usize, f64)>,
}

/// The gradients of a forward's outputs, shaped as its rows.
#[derive(Clone, Copy)]
pub(super) struct RowGradients<'a, T> {
    pub dy: &'a Matrix<'a, T>,
    /// The gradient of `x + residual`, if that is an output.
    pub dsum: Option<&'a Matrix<'a, T>>,
}

/// What a forward writes, `[rows, cols]` each.
pub(super) struct RowOutputs<T> {
    /// Empty if only sums were wanted.
    pub y: Vec<T>,
    /// `x + residual`, if there is a residual.
    pub sum: Option<Vec<T>>,
}

/// Column sums of x̃², `[cols]` each.
pub(super) struct SquareSums<A> {
    /// Over kept rows.
    pub kept: Vec<A>,
    /// Over padded rows, if asked for and if there is a mask.
    pub padded: Option<Vec<A>>,
}

/// Column sums of a backward over kept rows, `[cols]` each.
pub(super) struct GradSums<A> {
    /// Σ dy x̃.
    pub dy_x: Vec<A>,
    /// Σ dy.
    pub dy: Vec<A>,
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

    /// Whether the output bypasses the caches. Groups are whole cache lines then, so that no line
    /// is written in both ways if rows begin with one.
    #[cfg(target_arch = "x86_64")]
    fn are_streamed(&self) -> bool {
        self.bytes() >= STREAMED && (self.group_len() * size_of::<T>()).is_multiple_of(64)
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

    /// The number of sums of squares: C over kept rows, then C over padded ones if asked for.
    fn square_sums_width(&self, with_padded: bool) -> usize {
        self.cols() * (1 + usize::from(with_padded && self.keep.is_some()))
    }

    /// Channels of a group; all of them without a layer-scale.
    fn group_len(&self) -> usize {
        self.cols() / self.groups.map_or(1, |(groups, _)| groups)
    }

    fn group_factors(&self) -> GroupFactors<T::Acc> {
        GroupFactors {
            eps: self.groups.map(|(_, eps)| T::Acc::from_f64(eps)),
            share: T::Acc::ONE / T::Acc::from_count(self.group_len()),
        }
    }
}

impl<A: Accumulator> SquareSums<A> {
    fn split(mut sums: Vec<A>, cols: usize) -> Self {
        let padded = (sums.len() > cols).then(|| sums.split_off(cols));
        Self { kept: sums, padded }
    }
}

impl<A: Accumulator> GradSums<A> {
    fn split(mut sums: Vec<A>, cols: usize) -> Self {
        let dy = sums.split_off(cols);
        Self { dy_x: sums, dy }
    }
}

/// `x + residual`, if there is a residual, and the column sums of x̃².
pub(super) fn square_sum_cols<T: Element>(
    rows: &Rows<T>,
    with_padded: bool,
) -> (Option<Vec<T>>, SquareSums<T::Acc>) {
    let width = rows.square_sums_width(with_padded);
    let (outputs, sums) = run_sums(&SquareSumCols, rows, None, width);
    (outputs.sum, SquareSums::split(sums, rows.cols()))
}

/// `y = gain ⊙ x̃ + shift`, and `x + residual`.
pub(super) fn normalize<T: Element>(
    rows: &Rows<T>,
    gain: &[T::Acc],
    shift: &[T::Acc],
) -> RowOutputs<T> {
    run(&Normalize { gain, shift }, rows, None, 0).0
}

/// [`normalize`], with the column sums of x̃² taken on the way.
pub(super) fn normalize_and_sum<T: Element>(
    rows: &Rows<T>,
    gain: &[T::Acc],
    shift: &[T::Acc],
    with_padded: bool,
) -> (RowOutputs<T>, SquareSums<T::Acc>) {
    let width = rows.square_sums_width(with_padded);
    let (outputs, sums) = run(&Normalize { gain, shift }, rows, None, width);
    (outputs, SquareSums::split(sums, rows.cols()))
}

/// Column sums of dy x̃ and dy over kept rows.
pub(super) fn grad_sum_cols<T: Element>(
    rows: &Rows<T>,
    gradients: &RowGradients<T>,
) -> GradSums<T::Acc> {
    let (_, sums) = run_sums(&GradSumCols, rows, Some(gradients), 2 * rows.cols());
    GradSums::split(sums, rows.cols())
}

/// The input's gradient: `dx̃ = gain ⊙ dy − decay ⊙ x̃`, taken back through the layer-scale, and 0
/// in padded rows. If there is a `dsum`, it is added.
pub(super) fn normalize_bwd<T: Element>(
    rows: &Rows<T>,
    gradients: &RowGradients<T>,
    gain: &[T::Acc],
    decay: &[T::Acc],
) -> Vec<T> {
    run_normalize_bwd(rows, gradients, gain, decay, 0).0.y
}

/// [`normalize_bwd`], with the sums of [`grad_sum_cols`] taken on the way.
pub(super) fn normalize_bwd_and_sum<T: Element>(
    rows: &Rows<T>,
    gradients: &RowGradients<T>,
    gain: &[T::Acc],
    decay: &[T::Acc],
) -> (Vec<T>, GradSums<T::Acc>) {
    let (dx, sums) = run_normalize_bwd(rows, gradients, gain, decay, 2 * rows.cols());
    (dx.y, GradSums::split(sums, rows.cols()))
}

fn run_normalize_bwd<T: Element>(
    rows: &Rows<T>,
    gradients: &RowGradients<T>,
    gain: &[T::Acc],
    decay: &[T::Acc],
    width: usize,
) -> (RowOutputs<T>, Vec<T::Acc>) {
    let kernel = NormalizeBwd { gain, decay };
    match gradients.dsum {
        Some(_) => run(&ResidualBwd(kernel), rows, Some(gradients), width),
        None => run(&kernel, rows, Some(gradients), width),
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

/// With a residual, inputs of more bytes have a pass of their own for `x + residual`. It was a
/// little faster at 8 MiB, because it reads and writes fewer arrays at a time. At 2 MiB and less
/// there is none, because a row that was just summed is still in the first-level cache.
const LARGE: usize = 4 << 20;

/// Rows of a chunk, from the shape alone.
fn chunk_rows(rows: usize, cols: usize) -> usize {
    let least = MIN_ROWS.min(rows / MIN_ROWS);
    (CHUNK / cols)
        .max(rows.div_ceil(MAX_CHUNKS))
        .max(least)
        .max(1)
}

/// Vectors that a pass takes at a time: they share tests, such as whether columns are in bounds.
///
/// `x + residual` takes one: with four, a forward with a residual of 1024x512 f32 took as long or
/// up to 5 % longer.
const STEP: usize = 4;

/// What a pass does to each row.
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
pub(super) trait Kernel<A: Accumulator>: Sync {
    /// The layer-scale of a group, which is the columns `group` of a row.
    #[inline(always)]
    fn group_scale<S: Simd, T: Element<Acc = A>>(
        &self,
        simd: S,
        group_factors: &GroupFactors<A>,
        row: Row<T>,
        group: Range<usize>,
    ) -> GroupScale<A> {
        GroupScale {
            factor: group_factors.factor(simd, row.x, group),
            mean: A::ZERO,
        }
    }

    /// Writes a row of `out`, whose groups have these scales, and adds to the chunk's `sums`. `out`
    /// has no columns if only sums are wanted, and `sums` is empty if none are.
    fn row<S: Simd, T: Element<Acc = A>, const STREAMS: bool>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &[GroupScale<A>],
        out: &mut Piece<T, STREAMS>,
        sums: &mut [A],
    );
}

/// The numbers in a group's layer-scale: `x̃ = r x` forward, `dx = r (dx̃ − x̃ · mean(dx̃ x̃))`
/// backward.
#[derive(Clone, Copy)]
pub(super) struct GroupScale<A> {
    /// r.
    factor: A,
    /// The mean of dx̃ x̃; 0 in a forward.
    mean: A,
}

impl<A: Accumulator> GroupScale<A> {
    /// Changes nothing.
    const NONE: Self = Self {
        factor: A::ONE,
        mean: A::ZERO,
    };
}

/// A row of the input, with its gradients.
#[derive(Clone, Copy)]
pub(super) struct Row<'a, T> {
    x: &'a [T],
    /// The gradient of the output; empty in a forward.
    dy: &'a [T],
    /// The gradient of `x + residual`; empty if that is no output.
    dsum: &'a [T],
    /// Channels of a group, which without a layer-scale are all.
    group_len: usize,
    /// False if the row is padding.
    keeps: bool,
}

impl<T> Row<'_, T> {
    #[inline(always)]
    fn cols(&self) -> usize {
        self.x.len()
    }
}

/// Runs `kernel` over all rows, and returns fresh outputs and `width` column sums.
fn run<T: Element, K: Kernel<T::Acc>>(
    kernel: &K,
    rows: &Rows<T>,
    gradients: Option<&RowGradients<T>>,
    width: usize,
) -> (RowOutputs<T>, Vec<T::Acc>) {
    // Compiled apart: with a test in each step, groups of 64 columns took 11 to 16 % longer, and
    // with one in each row, a backward in the caches took 3 to 7 % longer.
    #[cfg(target_arch = "x86_64")]
    if rows.are_streamed() {
        return with_sum(rows, |rows| {
            run_pass::<T, K, true>(kernel, rows, gradients, true, width)
        });
    }
    with_sum(rows, |rows| {
        run_pass::<T, K, false>(kernel, rows, gradients, true, width)
    })
}

/// [`run`] for a kernel that writes no output: `y` is empty.
fn run_sums<T: Element, K: Kernel<T::Acc>>(
    kernel: &K,
    rows: &Rows<T>,
    gradients: Option<&RowGradients<T>>,
    width: usize,
) -> (RowOutputs<T>, Vec<T::Acc>) {
    with_sum(rows, |rows| {
        run_pass::<T, K, false>(kernel, rows, gradients, false, width)
    })
}

/// Calls `pass` with the rows. If there is a residual and they are large, `x + residual` has a pass
/// of its own before.
fn with_sum<T: Element>(
    rows: &Rows<T>,
    pass: impl FnOnce(&Rows<T>) -> (RowOutputs<T>, Vec<T::Acc>),
) -> (RowOutputs<T>, Vec<T::Acc>) {
    let sum = match &rows.residual {
        Some(_) if rows.bytes() > LARGE => {
            let (outputs, _) = run_pass::<T, _, false>(&SumOnly, rows, None, false, 0);
            outputs.sum
        }
        _ => None,
    };
    let Some(sum) = sum else {
        return pass(rows);
    };
    let (outputs, sums) = pass(&rows.summed(&sum));
    let sum = Some(sum);
    (RowOutputs { sum, ..outputs }, sums)
}

/// Runs `kernel` in one pass over the rows. `y` says whether it writes an output besides
/// `x + residual`, and `STREAMS` whether that bypasses the caches.
fn run_pass<T: Element, K: Kernel<T::Acc>, const STREAMS: bool>(
    kernel: &K,
    rows: &Rows<T>,
    gradients: Option<&RowGradients<T>>,
    y: bool,
    width: usize,
) -> (RowOutputs<T>, Vec<T::Acc>) {
    let len = rows.len() * rows.cols();
    let piece = chunk_rows(rows.len(), rows.cols()) * rows.cols();
    let (mut sum, mut sums) = (None, vec![]);
    let y = fill_output::<_, STREAMS>(if y { len } else { 0 }, piece, |y| {
        if rows.residual.is_some() {
            sum = Some(fill_output(len, piece, |sum| {
                sums = run_chunks(kernel, rows, gradients, y, sum, width);
            }));
        } else {
            sums = run_chunks(kernel, rows, gradients, y, &mut [], width);
        }
    });
    (RowOutputs { y, sum }, sums)
}

/// Runs `kernel` over all chunks, which write pieces of `y` and of `x + residual`, and returns the
/// column sums.
fn run_chunks<T: Element, K: Kernel<T::Acc>, const STREAMS: bool>(
    kernel: &K,
    rows: &Rows<T>,
    gradients: Option<&RowGradients<T>>,
    y: &mut [Piece<T, STREAMS>],
    sum: &mut [Piece<T, false>],
    width: usize,
) -> Vec<T::Acc> {
    let chunk = chunk_rows(rows.len(), rows.cols());
    let count = rows.len().div_ceil(chunk);
    let mut partials = vec![T::Acc::ZERO; count * width];
    let (mut y, mut sum) = (y.iter_mut(), sum.iter_mut());
    let mut sums = partials.chunks_mut(width.max(1));
    let chunks: Vec<_> = (0..count)
        .map(|i| Chunk {
            kernel,
            rows,
            gradients,
            range: i * chunk..rows.len().min((i + 1) * chunk),
            out: y.next(),
            sum: sum.next(),
            sums: sums.next().unwrap_or_default(),
        })
        .collect();
    let run = |chunk| simd::vectorize::<T, _>(rows.group_len(), chunk);
    if rows.len() * rows.cols() <= SERIAL {
        chunks.into_iter().for_each(run);
    } else {
        chunks.into_par_iter().for_each(run);
    }
    add_partials(&partials, width)
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

/// One chunk of a kernel's rows, to be run at a SIMD level.
struct Chunk<'c, 'y, 'sum, T: Element, K, const STREAMS: bool> {
    kernel: &'c K,
    rows: &'c Rows<'c, T>,
    gradients: Option<&'c RowGradients<'c, T>>,
    range: Range<usize>,
    out: Option<&'c mut Piece<'y, T, STREAMS>>,
    /// Where `x + residual` goes.
    sum: Option<&'c mut Piece<'sum, T, false>>,
    sums: &'c mut [T::Acc],
}

impl<T: Element, K: Kernel<T::Acc>, const STREAMS: bool> WithSimd
    for Chunk<'_, '_, '_, T, K, STREAMS>
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut nowhere = Piece::default();
        let out = Fenced(self.out.unwrap_or(&mut nowhere));
        let mut subtotals = vec![T::Acc::ZERO; self.sums.len()];
        let (cols, group_len) = (self.rows.cols(), self.rows.group_len());
        let group_factors = self.rows.group_factors();
        let mut sum = self.sum;
        let mut groups = vec![GroupScale::NONE; cols / group_len];
        for i in self.range.clone() {
            let mut x = &self.rows.x.row(i)[..cols];
            // What is streamed is so large that its sum was written before.
            const { assert!(STREAMED > LARGE) };
            let residual = self.rows.residual.as_ref().filter(|_| !STREAMS);
            if let (Some(residual), Some(sum)) = (residual, &mut sum) {
                let residual = &residual.row(i)[..cols];
                let values = Plus {
                    values: Elements(x),
                    residual,
                };
                sum.extend::<1, _, _>(simd, cols, &[GroupScale::NONE], cols, values);
                x = sum.last(cols);
            }
            let gradients = self.gradients;
            let dsum = gradients.and_then(|gradients| gradients.dsum);
            let row = Row {
                x,
                dy: gradients.map_or(&[][..], |gradients| gradients.dy.row(i)),
                dsum: dsum.map_or(&[][..], |dsum| dsum.row(i)),
                group_len,
                keeps: self.rows.keeps(i),
            };
            // All scales first: their roots then overlap.
            let mut start = 0;
            for group in &mut groups {
                let columns = start..start + group_len;
                *group = (self.kernel).group_scale(simd, &group_factors, row, columns);
                start += group_len;
            }
            (self.kernel).row(simd, row, &groups, out.0, &mut subtotals);
            let rows_done = i + 1 - self.range.start;
            if rows_done.is_multiple_of(SUBTOTAL_ROWS) || i + 1 == self.range.end {
                for (sum, subtotal) in self.sums.iter_mut().zip(&mut subtotals) {
                    *sum += std::mem::replace(subtotal, T::Acc::ZERO);
                }
            }
        }
    }
}

/// Fences what a chunk wrote when the chunk ends, even in a panic.
struct Fenced<'c, 'y, T: Element, const STREAMS: bool>(&'c mut Piece<'y, T, STREAMS>);

impl<T: Element, const STREAMS: bool> Drop for Fenced<'_, '_, T, STREAMS> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.fence();
    }
}

/// Computes r, the factor from x to x̃, for each group.
pub(super) struct GroupFactors<A> {
    /// The layer-scale's ε; `None` without a layer-scale.
    eps: Option<A>,
    /// 1 over the number of channels in a group.
    share: A,
}

/// Σ x² of a group.
struct Squares<'a, T> {
    x: &'a [T],
}

impl<T: Element> Terms<T::Acc, 1> for Squares<'_, T> {
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

impl<A: Accumulator> GroupFactors<A> {
    /// r of one group.
    #[inline(always)]
    fn factor<S: Simd, T: Element<Acc = A>>(&self, simd: S, x: &[T], group: Range<usize>) -> A {
        match self.eps {
            Some(eps) => {
                let [squares] = sum_terms::<4, 1, S, A>(simd, group.clone(), &Squares { x });
                self.factor_of(&x[group], squares, eps)
            }
            None => A::ONE,
        }
    }

    /// [`factor`](Self::factor), where the group's squares add up to `squares`.
    #[inline(always)]
    fn factor_of<T: Element<Acc = A>>(&self, x: &[T], squares: A, eps: A) -> A {
        let square = squares * self.share + eps;
        if square.is_finite() {
            square.sqrt().recip()
        } else {
            Self::factor_of_huge(x, eps)
        }
    }

    /// The factor of a group whose mean square overflows, or does with ε. It divides x and √ε by
    /// the largest magnitude of x before it squares. If x is not finite, the factor is NaN: the
    /// output shows that, and the statistics leave the batch out.
    #[cold]
    fn factor_of_huge<T: Element<Acc = A>>(x: &[T], eps: A) -> A {
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
        let square = squares / A::from_count(x().len()) + eps / largest / largest;
        (largest * square.sqrt()).recip()
    }
}

/// An element in the dtype of the sums.
fn value<T: Element>(row: &[T], i: usize) -> T::Acc {
    Lanes::<Scalar, _, 1>::load(Scalar, row, i).total()
}

/// The sums that a row's squares are added to. A padded row's are added to none, unless padded
/// rows have sums too.
#[inline(always)]
fn square_slot<'a, T, A>(row: &Row<T>, sums: &'a mut [A]) -> Option<&'a mut [A]> {
    let start = if row.keeps { 0 } else { row.cols() };
    (start < sums.len()).then(|| &mut sums[start..][..row.cols()])
}

/// Writes nothing besides `x + residual`.
struct SumOnly;

impl<A: Accumulator> Kernel<A> for SumOnly {
    #[inline(always)]
    fn group_scale<S: Simd, T: Element<Acc = A>>(
        &self,
        _: S,
        _: &GroupFactors<A>,
        _: Row<T>,
        _: Range<usize>,
    ) -> GroupScale<A> {
        GroupScale::NONE
    }

    #[inline(always)]
    fn row<S: Simd, T: Element<Acc = A>, const STREAMS: bool>(
        &self,
        _: S,
        _: Row<T>,
        _: &[GroupScale<A>],
        _: &mut Piece<T, STREAMS>,
        _: &mut [A],
    ) {
    }
}

struct SquareSumCols;

impl<A: Accumulator> Kernel<A> for SquareSumCols {
    #[inline(always)]
    fn row<S: Simd, T: Element<Acc = A>, const STREAMS: bool>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &[GroupScale<A>],
        _: &mut Piece<T, STREAMS>,
        sums: &mut [A],
    ) {
        if let Some(sums) = square_slot(&row, sums) {
            let mut step = SquareSumStep { x: row.x, sums };
            sweep::<STEP, _, _, _>(simd, groups, row.group_len, &mut step);
        }
    }
}

struct SquareSumStep<'a, T, A> {
    x: &'a [T],
    sums: &'a mut [A],
}

impl<T: Element> Columns<T::Acc> for SquareSumStep<'_, T, T::Acc> {
    type Group = GroupScale<T::Acc>;

    #[inline(always)]
    fn step<S: Simd, const K: usize>(&mut self, simd: S, at: usize, group: GroupScale<T::Acc>) {
        let x = Lanes::<S, _, K>::load(simd, self.x, at) * Lanes::splat(simd, group.factor);
        let sum = x.mul_add(x, Lanes::load(simd, self.sums, at));
        sum.store(self.sums, at);
    }
}

struct Normalize<'a, A> {
    gain: &'a [A],
    shift: &'a [A],
}

impl<A: Accumulator> Kernel<A> for Normalize<'_, A> {
    #[inline(always)]
    fn row<S: Simd, T: Element<Acc = A>, const STREAMS: bool>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &[GroupScale<A>],
        y: &mut Piece<T, STREAMS>,
        sums: &mut [A],
    ) {
        let values = NormalizeValues {
            x: row.x,
            gain: &self.gain[..row.cols()],
            shift: &self.shift[..row.cols()],
            sums: square_slot(&row, sums),
        };
        y.extend::<STEP, _, _>(simd, row.cols(), groups, row.group_len, values);
    }
}

struct NormalizeValues<'a, T, A> {
    x: &'a [T],
    gain: &'a [A],
    shift: &'a [A],
    sums: Option<&'a mut [A]>,
}

impl<T: Element> Values<T::Acc> for NormalizeValues<'_, T, T::Acc> {
    type Group = GroupScale<T::Acc>;

    #[inline(always)]
    fn at<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        group: GroupScale<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let x = Lanes::load(simd, self.x, at) * Lanes::splat(simd, group.factor);
        if let Some(sums) = &mut self.sums {
            let sum = x.mul_add(x, Lanes::load(simd, sums, at));
            sum.store(sums, at);
        }
        let shift = Lanes::load(simd, self.shift, at);
        x.mul_add(Lanes::load(simd, self.gain, at), shift)
    }
}

struct GradSumCols;

impl<A: Accumulator> Kernel<A> for GradSumCols {
    #[inline(always)]
    fn row<S: Simd, T: Element<Acc = A>, const STREAMS: bool>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &[GroupScale<A>],
        _: &mut Piece<T, STREAMS>,
        sums: &mut [A],
    ) {
        if row.keeps {
            let (dy_x, dy_sum) = sums.split_at_mut(row.cols());
            let mut step = GradSumStep {
                x: row.x,
                dy: &row.dy[..row.cols()],
                dy_x,
                dy_sum: &mut dy_sum[..row.cols()],
            };
            sweep::<STEP, _, _, _>(simd, groups, row.group_len, &mut step);
        }
    }
}

struct GradSumStep<'a, T, A> {
    x: &'a [T],
    dy: &'a [T],
    dy_x: &'a mut [A],
    dy_sum: &'a mut [A],
}

impl<T: Element> Columns<T::Acc> for GradSumStep<'_, T, T::Acc> {
    type Group = GroupScale<T::Acc>;

    #[inline(always)]
    fn step<S: Simd, const K: usize>(&mut self, simd: S, at: usize, group: GroupScale<T::Acc>) {
        let x = Lanes::<S, _, K>::load(simd, self.x, at) * Lanes::splat(simd, group.factor);
        let dy = Lanes::load(simd, self.dy, at);
        let dy_x = dy.mul_add(x, Lanes::load(simd, self.dy_x, at));
        dy_x.store(self.dy_x, at);
        (Lanes::load(simd, self.dy_sum, at) + dy).store(self.dy_sum, at);
    }
}

struct NormalizeBwd<'a, A> {
    gain: &'a [A],
    decay: &'a [A],
}

impl<A: Accumulator> Kernel<A> for NormalizeBwd<'_, A> {
    #[inline(always)]
    fn group_scale<S: Simd, T: Element<Acc = A>>(
        &self,
        simd: S,
        group_factors: &GroupFactors<A>,
        row: Row<T>,
        group: Range<usize>,
    ) -> GroupScale<A> {
        let (Some(eps), true) = (group_factors.eps, row.keeps) else {
            return GroupScale::NONE;
        };
        // Because x̃ = r x, all r in the mean of (gain dy − decay x̃) x̃ stand outside its sums. So
        // the pass that sums x² for r can take these sums too.
        let terms = GroupTerms {
            x: row.x,
            dy: &row.dy[..row.cols()],
            gain: &self.gain[..row.cols()],
            decay: &self.decay[..row.cols()],
        };
        let [squares, gain_dy_x, decay_x2] = sum_terms::<2, 3, S, A>(simd, group.clone(), &terms);
        let factor = group_factors.factor_of(&row.x[group.clone()], squares, eps);
        let total = factor * (gain_dy_x - factor * decay_x2);
        let total = if total.is_finite() {
            total
        } else {
            terms.total_with(factor, group)
        };
        GroupScale {
            factor,
            mean: total * group_factors.share,
        }
    }

    #[inline(always)]
    fn row<S: Simd, T: Element<Acc = A>, const STREAMS: bool>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &[GroupScale<A>],
        dx: &mut Piece<T, STREAMS>,
        sums: &mut [A],
    ) {
        if !row.keeps {
            return dx.extend::<STEP, _, _>(
                simd,
                row.cols(),
                groups,
                row.group_len,
                Zeros(PhantomData),
            );
        }
        dx.extend::<STEP, _, _>(
            simd,
            row.cols(),
            groups,
            row.group_len,
            self.values(&row, sums),
        );
    }
}

impl<A: Accumulator> NormalizeBwd<'_, A> {
    /// dx of a row that is not padding.
    #[inline(always)]
    fn values<'a, T: Element<Acc = A>>(
        &'a self,
        row: &Row<'a, T>,
        sums: &'a mut [A],
    ) -> NormalizeBwdValues<'a, T, A> {
        let cols = row.cols();
        NormalizeBwdValues {
            x: row.x,
            dy: &row.dy[..cols],
            gain: &self.gain[..cols],
            decay: &self.decay[..cols],
            sums: (!sums.is_empty()).then(|| {
                let (dy_x, dy_sum) = sums.split_at_mut(cols);
                (dy_x, &mut dy_sum[..cols])
            }),
        }
    }
}

/// The sums for the backward of the layer-scale: Σ x², Σ gain dy x, Σ decay x².
#[derive(Clone, Copy)]
struct GroupTerms<'a, T, A> {
    x: &'a [T],
    dy: &'a [T],
    gain: &'a [A],
    decay: &'a [A],
}

impl<T: Element> Terms<T::Acc, 3> for GroupTerms<'_, T, T::Acc> {
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

impl<T: Element> GroupTerms<'_, T, T::Acc> {
    /// Σ (gain dy − decay x̃) x̃, if products with x itself overflow.
    #[cold]
    fn total_with(self, factor: T::Acc, group: Range<usize>) -> T::Acc {
        let mut total = T::Acc::ZERO;
        for i in group {
            let x = factor * value(self.x, i);
            total += (self.gain[i] * value(self.dy, i) - self.decay[i] * x) * x;
        }
        total
    }
}

struct NormalizeBwdValues<'a, T, A> {
    x: &'a [T],
    dy: &'a [T],
    gain: &'a [A],
    decay: &'a [A],
    /// Σ dy x̃ and Σ dy.
    sums: Option<(&'a mut [A], &'a mut [A])>,
}

impl<T: Element> Values<T::Acc> for NormalizeBwdValues<'_, T, T::Acc> {
    type Group = GroupScale<T::Acc>;

    #[inline(always)]
    fn at<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        group: GroupScale<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let factor = Lanes::splat(simd, group.factor);
        let x = Lanes::load(simd, self.x, at) * factor;
        let dy = Lanes::load(simd, self.dy, at);
        if let Some((dy_x, dy_sum)) = &mut self.sums {
            dy.mul_add(x, Lanes::load(simd, dy_x, at)).store(dy_x, at);
            (Lanes::load(simd, dy_sum, at) + dy).store(dy_sum, at);
        }
        let gain = Lanes::load(simd, self.gain, at);
        let dx_tilde = gain * dy - Lanes::load(simd, self.decay, at) * x;
        (dx_tilde - x * Lanes::splat(simd, group.mean)) * factor
    }
}

/// [`NormalizeBwd`], with the gradient of `x + residual` added.
struct ResidualBwd<'a, A>(NormalizeBwd<'a, A>);

impl<A: Accumulator> Kernel<A> for ResidualBwd<'_, A> {
    #[inline(always)]
    fn group_scale<S: Simd, T: Element<Acc = A>>(
        &self,
        simd: S,
        group_factors: &GroupFactors<A>,
        row: Row<T>,
        group: Range<usize>,
    ) -> GroupScale<A> {
        self.0.group_scale(simd, group_factors, row, group)
    }

    #[inline(always)]
    fn row<S: Simd, T: Element<Acc = A>, const STREAMS: bool>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &[GroupScale<A>],
        dx: &mut Piece<T, STREAMS>,
        sums: &mut [A],
    ) {
        let residual = &row.dsum[..row.cols()];
        if !row.keeps {
            let values = Zeros(PhantomData);
            return dx.extend::<STEP, _, _>(
                simd,
                row.cols(),
                groups,
                row.group_len,
                Plus { values, residual },
            );
        }
        let values = self.0.values(&row, sums);
        dx.extend::<STEP, _, _>(
            simd,
            row.cols(),
            groups,
            row.group_len,
            Plus { values, residual },
        );
    }
}

/// `values + residual`.
struct Plus<'a, T, V> {
    values: V,
    residual: &'a [T],
}

impl<T: Element, V: Values<T::Acc>> Values<T::Acc> for Plus<'_, T, V> {
    type Group = V::Group;

    #[inline(always)]
    fn at<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        group: V::Group,
    ) -> Lanes<S, T::Acc, K> {
        self.values.at(simd, at, group) + Lanes::load(simd, self.residual, at)
    }
}

/// Elements as they are.
struct Elements<'a, T>(&'a [T]);

impl<T: Element> Values<T::Acc> for Elements<'_, T> {
    type Group = GroupScale<T::Acc>;

    #[inline(always)]
    fn at<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        _: GroupScale<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        Lanes::load(simd, self.0, at)
    }
}

struct Zeros<A>(PhantomData<A>);

impl<A: Accumulator> Values<A> for Zeros<A> {
    type Group = GroupScale<A>;

    #[inline(always)]
    fn at<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        _: usize,
        _: GroupScale<A>,
    ) -> Lanes<S, A, K> {
        Lanes::splat(simd, A::ZERO)
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
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

    /// The bits of an output and of its column sums.
    fn bits<T: Element>((outputs, sums): (RowOutputs<T>, Vec<T::Acc>)) -> Vec<u64> {
        let y = outputs.y.into_iter().map(WithDType::to_f64);
        let sums = sums.into_iter().map(WithDType::to_f64);
        y.chain(sums).map(f64::to_bits).collect()
    }

    /// Miri takes its time.
    const ROWS: usize = if cfg!(miri) { 2 } else { 6 };

    /// Rows and groups of neither whole vectors nor whole cache lines, of whole vectors, and of
    /// both.
    fn streamed_outputs_have_the_bits_of_cached_ones<T: Element>() {
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
            let (gain, other) = (numbers(0.), numbers(1.));
            let rows = Rows {
                x: matrix(&x, cols),
                residual: None,
                keep: Some(&[1, 0, 1, 1, 0, 1][..ROWS]),
                groups: groups.map(|groups| (groups, 1e-5)),
            };
            let (dy, dsum) = (matrix(&dy, cols), matrix(&dsum, cols));
            let gradients = RowGradients {
                dy: &dy,
                dsum: Some(&dsum),
            };
            let (gain, other) = (&gain[..], &other[..]);
            let forward = &Normalize { gain, shift: other };
            let width = rows.square_sums_width(true);
            assert_eq!(
                bits(run_pass::<T, _, true>(forward, &rows, None, true, width)),
                bits(run_pass::<T, _, false>(forward, &rows, None, true, width)),
            );
            let backward = NormalizeBwd { gain, decay: other };
            let (width, gradients) = (2 * cols, Some(&gradients));
            assert_eq!(
                bits(run_pass::<T, _, true>(
                    &backward, &rows, gradients, true, width
                )),
                bits(run_pass::<T, _, false>(
                    &backward, &rows, gradients, true, width
                )),
            );
            let backward = ResidualBwd(backward);
            assert_eq!(
                bits(run_pass::<T, _, true>(
                    &backward, &rows, gradients, true, width
                )),
                bits(run_pass::<T, _, false>(
                    &backward, &rows, gradients, true, width
                )),
            );
        }
    }

    #[test]
    fn streamed_outputs_have_the_bits_of_cached_ones_in_every_type() {
        streamed_outputs_have_the_bits_of_cached_ones::<f32>();
        streamed_outputs_have_the_bits_of_cached_ones::<f64>();
        streamed_outputs_have_the_bits_of_cached_ones::<half::f16>();
        streamed_outputs_have_the_bits_of_cached_ones::<half::bf16>();
    }
}
