//! Passes over all rows: chunks, threads, outputs and column sums.
//!
//! [`forward`] and [`backward`] cut the rows into chunks, and [`ForwardChunk`] and [`BackwardChunk`]
//! call the arithmetic of a row (`row/`):
//!
//! 1. The rows are cut into *chunks* of adjacent rows, whose size depends only on the shape
//!    ([`chunk_rows`]). rayon's threads take chunks.
//! 2. A chunk has a part of each output and column sums of its own. It takes its rows one by one,
//!    in the vector instructions of a level (`level.rs`). With a residual, it first writes
//!    `x + residual` of the row, and reads the row from there.
//! 3. The chunks' sums are added first to last.
//!
//! Neither the chunks nor the order in which sums are added depends on threads, so the bits are the
//! same for any number of them.
//!
//! A sum down a column has three levels, because in f32 the rounding error of a sum grows with the
//! number of its terms. 1,000,000 rows of 512 channels are 256 chunks of 3907 rows. A chunk adds up
//! 512 rows into a subtotal, adds its 8 subtotals, and at the end 256 chunks are added. So no sum
//! has more than 512 terms.

pub(crate) mod level;

use super::convert::{Accumulator, Element, PerChannel};
use super::layout::{Matrix, Rows};
use super::row::group_scaling::{self, Groups, Scaler};
use super::row::output::{Output, Part, RowWriter, Stores};
use super::row::{BackwardSums, ColumnSums, add_residual, layer_norm, widen_row, zero_row};
use crate::device::pass::RowNorm;
use num_traits::Zero;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;
use std::ops::Range;

/// Σ x̃² of each column.
pub(super) struct SquareSums<T: Element> {
    /// Over the kept rows.
    pub kept: PerChannel<T>,
    /// Over all rows, if [`sums_all`](Rows::sums_all).
    pub all: Option<PerChannel<T>>,
}

/// The arrays that a pass wrote, `[rows, cols]` each.
pub(super) struct Written<T> {
    /// The output, which is dx in a backward. `None` if only sums were wanted.
    pub y: Option<Vec<T>>,
    /// `x + residual`, if there is a residual.
    pub residual_out: Option<Vec<T>>,
}

/// With a residual, inputs of more bytes have a pass of their own for `x + residual`, which reads
/// and writes fewer arrays at a time. In one pass, a forward of 4096x512 f32 took 7 to 19 % longer.
/// At 2 MiB and less one pass is faster, because a row that was just summed is still in the
/// first-level cache.
const LARGE: usize = 4 << 20;

/// `x + residual` if there is a residual, `y = gain ⊙ x̃ + shift` if these are given, and the
/// column sums of x̃² if they are wanted.
pub(super) fn forward<T: Chunks>(
    rows: &Rows<T>,
    coefficients: Option<[&[T::Acc]; 2]>,
    sums: bool,
) -> (Written<T>, Option<SquareSums<T>>) {
    let run = |coefficients: Option<[&[T::Acc]; 2]>, sums_per_column| {
        let width = sums_per_column * rows.cols();
        run_chunks(rows, coefficients.is_some(), width, &|chunk| {
            let chunk = ForwardChunk {
                rows,
                coefficients,
                chunk,
            };
            T::forward(rows.group_len(), chunk);
        })
    };
    if rows.residual.is_some() && rows.bytes() > LARGE {
        let (Written { residual_out, .. }, _) = run(None, 0);
        let Some(sum) = &residual_out else {
            unreachable!("a forward with a residual writes the sum")
        };
        let (Written { y, .. }, sums) = forward(&rows.of_sum(sum), coefficients, sums);
        return (Written { y, residual_out }, sums);
    }
    let is_centred = matches!(rows.norm, RowNorm::Centred { .. });
    assert!(!(sums && is_centred), "LayerNorm has no sums");
    let sums_per_column = match (sums, rows.keep) {
        (false, _) => 0,
        // Over the kept rows, and over the padded rows apart.
        (true, Some(_)) if rows.sums_all => 2,
        (true, _) => 1,
    };
    let (written, mut kept) = run(coefficients, sums_per_column);
    if !sums {
        return (written, None);
    }
    let of_padded = kept.split_off(rows.cols());
    let all = rows.sums_all.then(|| {
        let mut all = kept.clone();
        for (square, padded) in all.iter_mut().zip(of_padded) {
            *square += padded;
        }
        all
    });
    (written, Some(SquareSums { kept, all }))
}

/// `y = gain ⊙ x̃ + shift`, and `x + residual` if there is a residual.
///
/// A few rows, as in decoding, take less time than to cut them would: they are one chunk, without
/// sums and without threads.
#[inline]
pub(super) fn normalize<T: Chunks>(
    rows: &Rows<T>,
    coefficients: [&[T::Acc]; 2],
) -> (Vec<T>, Option<Vec<T>>) {
    let len = rows.len() * rows.cols();
    if len > CHUNK {
        let (written, _) = forward(rows, Some(coefficients), false);
        let Some(y) = written.y else {
            unreachable!("a forward with coefficients writes its output")
        };
        return (y, written.residual_out);
    }
    let output = || Output::new(len, len, Stores::Cached);
    let (mut y, mut residual_out) = (output(), rows.residual.is_some().then(output));
    let chunk = Chunk {
        range: 0..rows.len(),
        output: Some(y.whole()),
        residual_out: residual_out.as_mut().map(Output::whole),
        sums: &mut [],
    };
    let coefficients = Some(coefficients);
    T::forward(
        rows.group_len(),
        ForwardChunk {
            rows,
            coefficients,
            chunk,
        },
    );
    (y.finish(), residual_out.map(Output::finish))
}

/// The mean of x² in columns whose Σ x² overflowed, over the rows for which `counts` is true.
///
/// Each element is divided by the root of the number of rows before it is squared, so that no sum
/// exceeds the mean. In f64, two rows of 1e154 have squares of 1e308, whose sum overflows. Divided
/// first, each adds (1e154/√2)² = 5e307, and the mean is 1e308. The mean is infinite only if it
/// exceeds f64, or if x is infinite.
///
/// This is slow, in f64 and on one thread, but reads only the columns that overflowed. With group
/// scaling there are none, because x̃² is at most the width of a group.
#[cold]
pub(super) fn means_of_huge<T: Element>(
    rows: &Rows<T>,
    columns: &[usize],
    counts: impl Fn(usize) -> bool,
) -> Vec<f64> {
    debug_assert!(rows.norm == RowNorm::None);
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

/// The input's gradient, if its gain and −decay are given, and the column sums that are wanted, one
/// after the other.
///
/// The gradient is `dx̃ = gain ⊙ dy − decay ⊙ x̃`, taken back through the row's own normalization,
/// and 0 in padded rows. LayerNorm has no decay.
///
/// # Panics
///
/// If the gain of LayerNorm is not given. It always writes the gradient, as a LayerNorm whose
/// input wants none is rare: the first of a model whose embedding is not trained.
pub(super) fn backward<T: Chunks>(
    rows: &Rows<T>,
    dy: &Matrix<T>,
    coefficients: Option<[&[T::Acc]; 2]>,
    sums: BackwardSums,
) -> (Option<Vec<T>>, PerChannel<T>) {
    let width = sums.per_column() * rows.cols();
    let (written, sums) = run_chunks(rows, coefficients.is_some(), width, &|chunk| {
        let chunk = BackwardChunk {
            rows,
            dy,
            coefficients,
            chunk,
        };
        T::backward(rows.group_len(), chunk);
    });
    (written.y, sums)
}

/// The values of a parameter plus `offset`, in the dtype of the sums over rows of `T`.
pub(super) fn widened<T: Element>(values: &[T], offset: T::Acc) -> PerChannel<T> {
    let mut output = Output::new(values.len(), values.len().max(1), Stores::Cached);
    let widen = Widen {
        values,
        offset,
        widened: RowWriter::new(output.whole()),
    };
    level::vectorize::<T, _>(values.len(), widen);
    output.finish()
}

struct Widen<'a, 'b, T: Element> {
    values: &'a [T],
    offset: T::Acc,
    widened: RowWriter<'b, T::Acc>,
}

impl<T: Element> WithSimd for Widen<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        widen_row(simd, self.values, self.offset, &mut self.widened);
    }
}

/// An [`Element`] with the functions of a chunk, which pick a level for groups of `group_len`
/// columns.
pub(super) trait Chunks: Element {
    fn forward(group_len: usize, chunk: ForwardChunk<Self>);
    fn backward(group_len: usize, chunk: BackwardChunk<Self>);
}

/// Implements [`Chunks`], with a module for each function.
///
/// rustc compiles the instances of a generic function in the codegen unit of its module, on one
/// thread, and the unit of `level.rs` would have all rows of all dtypes: half the code of the crate.
/// `vectorize` is inlined into each of these functions instead, so that units of about one size are
/// compiled side by side.
macro_rules! chunks {
    ($($module:ident: $dtype:ty,)*) => {$(
        mod $module {
            use super::{BackwardChunk, Chunks, ForwardChunk};

            mod forward {
                use super::super::{ForwardChunk, level};

                #[inline(never)]
                pub fn run(group_len: usize, chunk: ForwardChunk<$dtype>) {
                    level::vectorize::<$dtype, _>(group_len, chunk);
                }
            }

            mod backward {
                use super::super::{BackwardChunk, level};

                #[inline(never)]
                pub fn run(group_len: usize, chunk: BackwardChunk<$dtype>) {
                    level::vectorize::<$dtype, _>(group_len, chunk);
                }
            }

            impl Chunks for $dtype {
                fn forward(group_len: usize, chunk: ForwardChunk<Self>) {
                    forward::run(group_len, chunk);
                }

                fn backward(group_len: usize, chunk: BackwardChunk<Self>) {
                    backward::run(group_len, chunk);
                }
            }
        }
    )*};
}

chunks! {
    of_f32: f32,
    of_f64: f64,
    of_f16: half::f16,
    of_bf16: half::bf16,
}

/// Elements of a chunk, whose work must outweigh the cost of passing it to a thread.
const CHUNK: usize = 1 << 16;

/// Rows that a chunk adds up in a subtotal, before it adds the subtotal to its sums.
const SUBTOTAL_ROWS: usize = 512;

/// The most chunks of a call, so that their sums stay small beside the rows.
const MAX_CHUNKS: usize = 256;

/// The fewest rows in a chunk of wide rows, because its sums cost a row of traffic. A call with
/// fewer than `MIN_ROWS²` rows has smaller chunks, so that it still has about `MIN_ROWS` of them.
const MIN_ROWS: usize = 32;

/// Inputs of up to this many elements run on the calling thread, because waking another costs more.
const SERIAL: usize = CHUNK;

/// Rows of a chunk, from the shape alone. For example, at 512 columns:
///
/// ```text
/// 1024 rows         128 rows: `CHUNK` elements, 8 chunks
/// 1,000,000 rows    3907 rows: `MAX_CHUNKS` chunks
/// ```
fn chunk_rows(rows: usize, cols: usize) -> usize {
    let least = MIN_ROWS.min(rows / MIN_ROWS);
    (CHUNK / cols)
        .max(rows.div_ceil(MAX_CHUNKS))
        .max(least)
        .max(1)
}

/// `true` if all chunks run on the calling thread. A single thread of rayon's gains nothing over
/// this one. In a process that was forked it is gone, and a wait for it never ends.
#[inline]
pub(super) fn runs_here<T: Element>(rows: &Rows<T>) -> bool {
    rows.len() * rows.cols() <= SERIAL || rayon::current_num_threads() == 1
}

/// Cuts the rows into chunks, and calls `run_chunk` for each, on rayon's threads.
///
/// `run_chunk` is a `dyn` function, so that this is compiled once for each dtype.
pub(super) fn run_chunks<T: Element>(
    rows: &Rows<T>,
    has_output: bool,
    width: usize,
    run_chunk: &(dyn Fn(Chunk<T>) + Sync),
) -> (Written<T>, Vec<T::Acc>) {
    let (len, cols) = (rows.len(), rows.cols());
    let chunk = chunk_rows(len, cols);
    let count = len.div_ceil(chunk);
    let stores = Stores::of::<T>(len * cols, rows.group_len());
    let output = |stores| Output::new(len * cols, chunk * cols, stores);
    let mut y = has_output.then(|| output(stores));
    // Read at once, so through the caches.
    let mut residual_out = rows.residual.is_some().then(|| output(Stores::Cached));
    let mut sums = vec![T::Acc::zero(); count * width];

    let mut parts_of_y = y.iter_mut().flat_map(Output::parts);
    let mut parts_of_residual_out = residual_out.iter_mut().flat_map(Output::parts);
    let mut sums_of_chunks = sums.chunks_mut(width.max(1));
    let chunks = (0..count).map(|i| Chunk {
        range: i * chunk..len.min((i + 1) * chunk),
        output: parts_of_y.next(),
        residual_out: parts_of_residual_out.next(),
        sums: sums_of_chunks.next().unwrap_or_default(),
    });
    if runs_here(rows) {
        chunks.for_each(run_chunk);
    } else {
        let chunks: Vec<_> = chunks.collect();
        chunks.into_par_iter().for_each(run_chunk);
    }
    drop((parts_of_y, parts_of_residual_out));
    let written = Written {
        y: y.map(Output::finish),
        residual_out: residual_out.map(Output::finish),
    };
    (written, add_chunks(&sums, width))
}

/// The rows of a chunk, in runs that have a subtotal each.
fn subtotals(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(SUBTOTAL_ROWS)
        .map(move |start| start..end.min(start + SUBTOTAL_ROWS))
}

/// The column sums of all chunks, added first to last.
fn add_chunks<A: Accumulator>(sums: &[A], width: usize) -> Vec<A> {
    let mut total = vec![A::zero(); width];
    for chunk in sums.chunks(width.max(1)) {
        for (total, &sum) in total.iter_mut().zip(chunk) {
            *total += sum;
        }
    }
    total
}

/// A chunk of rows, with its parts of the outputs and its column sums. These are empty if no sums
/// are wanted.
pub(super) struct Chunk<'a, T: Element> {
    pub range: Range<usize>,
    pub output: Option<Part<'a, T>>,
    /// `x + residual`.
    residual_out: Option<Part<'a, T>>,
    sums: &'a mut [T::Acc],
}

/// A forward of a chunk, to be run at a level.
pub(super) struct ForwardChunk<'a, 'b, T: Element> {
    rows: &'a Rows<'a, T>,
    /// Gain and shift; `None` if only sums, or only `x + residual`, are wanted.
    coefficients: Option<[&'a [T::Acc]; 2]>,
    chunk: Chunk<'b, T>,
}

impl<T: Element> WithSimd for ForwardChunk<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            rows,
            coefficients,
            chunk,
        } = self;
        let cols = rows.cols();
        let mut y = chunk.output.map(RowWriter::new);
        let mut residual_out = chunk.residual_out.map(RowWriter::new);
        let mut sums = Subtotals::new(chunk.sums);
        let scaler = match rows.norm {
            RowNorm::None => None,
            RowNorm::Groups { eps, .. } => Some(Scaler::new(rows.group_len(), eps)),
            // A loop of its own, so that each loop has the registers to itself.
            RowNorm::Centred { eps } => {
                let scaler = Scaler::new(cols, eps);
                let coefficients = coefficients.map(|both| both.map(|values| &values[..cols]));
                for index in chunk.range {
                    let x = &input_row(simd, rows, index, &mut residual_out)[..cols];
                    if let (Some(y), Some(coefficients)) = (&mut y, coefficients) {
                        layer_norm::forward_row(simd, x, &scaler, coefficients, y);
                    }
                }
                return;
            }
        };
        let (scaler, mut groups) = (scaler.as_ref(), Groups::new(cols, rows.group_len()));
        // A padded row's sums come second. If padding does not count, or no sums are wanted, the
        // range is out of bounds, and `get_mut` returns `None`.
        let first = |index| if rows.keeps(index) { 0 } else { cols };
        if let (Some(y), Some(coefficients)) = (&mut y, coefficients) {
            let coefficients = coefficients.map(|values| &values[..cols]);
            for rows_of_subtotal in subtotals(chunk.range) {
                for index in rows_of_subtotal {
                    let x = &input_row(simd, rows, index, &mut residual_out)[..cols];
                    let squares = sums.of_rows.get_mut(first(index)..first(index) + cols);
                    group_scaling::forward_row(
                        simd,
                        x,
                        scaler,
                        &mut groups,
                        y,
                        coefficients,
                        squares,
                    );
                }
                sums.add();
            }
        } else {
            for rows_of_subtotal in subtotals(chunk.range) {
                for index in rows_of_subtotal {
                    let x = &input_row(simd, rows, index, &mut residual_out)[..cols];
                    if !sums.is_empty() {
                        let squares = sums.of_rows.get_mut(first(index)..first(index) + cols);
                        group_scaling::square_row(simd, x, scaler, &mut groups, squares);
                    }
                }
                sums.add();
            }
        }
    }
}

/// A row of the input, with the residual added if there is one.
#[inline(always)]
fn input_row<'a, S: Simd, T: Element>(
    simd: S,
    rows: &'a Rows<T>,
    index: usize,
    residual_out: &'a mut Option<RowWriter<T>>,
) -> &'a [T] {
    let x = &rows.x.row(index)[..rows.cols()];
    match (&rows.residual, residual_out) {
        (Some(residual), Some(out)) => add_residual(simd, x, residual.row(index), out),
        _ => x,
    }
}

/// A backward of a chunk, to be run at a level.
pub(super) struct BackwardChunk<'a, 'b, T: Element> {
    rows: &'a Rows<'a, T>,
    dy: &'a Matrix<'a, T>,
    /// Gain and −decay; `None` if only sums are wanted.
    coefficients: Option<[&'a [T::Acc]; 2]>,
    chunk: Chunk<'b, T>,
}

impl<T: Element> WithSimd for BackwardChunk<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            rows,
            dy,
            coefficients,
            chunk,
        } = self;
        let cols = rows.cols();
        let mut dx = chunk.output.map(RowWriter::new);
        let mut sums = Subtotals::new(chunk.sums);
        let scaler = match rows.norm {
            RowNorm::None => None,
            RowNorm::Groups { eps, .. } => Some(Scaler::new(rows.group_len(), eps)),
            RowNorm::Centred { eps } => {
                let (Some(dx), Some([gain, _])) = (&mut dx, coefficients) else {
                    unreachable!("a backward of LayerNorm writes dx");
                };
                let (scaler, gain) = (Scaler::new(cols, eps), &gain[..cols]);
                for rows_of_subtotal in subtotals(chunk.range) {
                    for index in rows_of_subtotal {
                        if rows.keeps(index) {
                            let row = [&rows.x.row(index)[..cols], dy.row(index)];
                            let sums = sums.of_backward(cols);
                            layer_norm::backward_row(simd, row, &scaler, gain, dx, sums);
                        } else {
                            zero_row(simd, cols, dx);
                        }
                    }
                    sums.add();
                }
                return;
            }
        };
        let (scaler, mut groups) = (scaler.as_ref(), Groups::new(cols, rows.group_len()));
        if let (Some(dx), Some([gain, neg_decay])) = (&mut dx, coefficients) {
            let coefficients = [&gain[..cols], &neg_decay[..cols]];
            for rows_of_subtotal in subtotals(chunk.range) {
                for index in rows_of_subtotal {
                    if rows.keeps(index) {
                        let row = [&rows.x.row(index)[..cols], dy.row(index)];
                        let sums = sums.of_backward(cols);
                        group_scaling::backward_row(
                            simd,
                            row,
                            scaler,
                            &mut groups,
                            dx,
                            coefficients,
                            sums,
                        );
                    } else {
                        zero_row(simd, cols, dx);
                    }
                }
                sums.add();
            }
        } else {
            for rows_of_subtotal in subtotals(chunk.range) {
                for index in rows_of_subtotal {
                    if rows.keeps(index) {
                        let row = [&rows.x.row(index)[..cols], dy.row(index)];
                        let sums = sums.of_backward(cols);
                        group_scaling::sum_row(simd, row, scaler, &mut groups, sums);
                    }
                }
                sums.add();
            }
        }
    }
}

/// The column sums of a chunk, and those of its last rows, which it adds to them from time to time.
struct Subtotals<'a, A> {
    of_chunk: &'a mut [A],
    of_rows: Vec<A>,
}

impl<'a, A: Accumulator> Subtotals<'a, A> {
    fn new(of_chunk: &'a mut [A]) -> Self {
        Self {
            of_rows: vec![A::zero(); of_chunk.len()],
            of_chunk,
        }
    }

    /// No sums are wanted.
    fn is_empty(&self) -> bool {
        self.of_chunk.is_empty()
    }

    /// Those that a row of a backward is added to.
    #[inline(always)]
    fn of_backward(&mut self, cols: usize) -> ColumnSums<'_, A> {
        ColumnSums::of(&mut self.of_rows, cols)
    }

    /// Adds the sums of the last rows to those of the chunk.
    fn add(&mut self) {
        for (sum, subtotal) in self.of_chunk.iter_mut().zip(&mut self.of_rows) {
            *sum += std::mem::replace(subtotal, A::zero());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::WithDType;
    use half::{bf16, f16};

    /// Rows of `cols` columns in one block.
    fn rows<T: Element>(values: &[T], cols: usize, norm: RowNorm) -> Rows<'_, T> {
        Rows {
            x: matrix(values, cols),
            residual: None,
            keep: None,
            norm,
            sums_all: false,
        }
    }

    fn matrix<T>(values: &[T], cols: usize) -> Matrix<'_, T> {
        Matrix::packed(values.len() / cols, cols, values)
    }

    fn slices<A>(coefficients: Option<&[Vec<A>; 2]>) -> Option<[&[A]; 2]> {
        coefficients.map(|both| both.each_ref().map(Vec::as_slice))
    }

    fn forward<T: Chunks>(
        rows: &Rows<T>,
        coefficients: Option<&[PerChannel<T>; 2]>,
        sums: bool,
    ) -> (Written<T>, Option<SquareSums<T>>) {
        super::forward(rows, slices(coefficients), sums)
    }

    fn normalize<T: Chunks>(rows: &Rows<T>, coefficients: &[PerChannel<T>; 2]) -> Vec<T> {
        super::normalize(rows, coefficients.each_ref().map(Vec::as_slice)).0
    }

    fn backward<T: Chunks>(
        rows: &Rows<T>,
        dy: &Matrix<T>,
        coefficients: Option<&[PerChannel<T>; 2]>,
        sums: BackwardSums,
    ) -> (Option<Vec<T>>, PerChannel<T>) {
        super::backward(rows, dy, slices(coefficients), sums)
    }

    /// Groups of group scaling, without ε.
    fn groups(count: usize) -> RowNorm {
        RowNorm::Groups { count, eps: 0. }
    }

    #[track_caller]
    fn assert_close(actual: &[f32], expected: &[f32]) {
        assert_eq!(actual.len(), expected.len());
        for (a, e) in actual.iter().zip(expected) {
            let bound = 4e-6 * e.abs().max(0.1);
            assert!((a - e).abs() <= bound, "{actual:?}, {expected:?}");
        }
    }

    /// Chunks of rows, by hand from the constants above.
    #[test]
    fn chunks_are_worth_a_thread_and_few() {
        for ([rows, cols], expected) in [
            ([4096, 512], CHUNK / 512),
            ([1024, 512], 128),
            ([1_000_000, 512], 3907),
            ([1 << 24, 3], (1 << 24) / MAX_CHUNKS),
            ([5000, 1 << 17], MIN_ROWS),
            ([100, 1 << 17], 3), // so that there are about `MIN_ROWS` chunks
            ([10, 1 << 17], 1),
            ([0, 512], 128),
        ] {
            assert_eq!(chunk_rows(rows, cols), expected, "{rows}x{cols}");
        }
        assert_eq!(CHUNK / 512, 128);
    }

    #[test]
    fn chunks_are_added_first_to_last() {
        // In another order the small terms would stay.
        let sums = [1., 2., -1e8f32, 3., 1e8, 4.];
        assert_eq!(add_chunks(&sums, 2), [1. - 1e8 + 1e8, 9.]);
        assert_eq!(add_chunks::<f32>(&[], 2), [0., 0.]);
        assert_eq!(add_chunks::<f32>(&[], 0), [0.; 0]);
    }

    /// y = gain x + shift, and Σ x².
    #[test]
    fn forward_by_hand() {
        let x = [1f32, 2., 3., -4.];
        let coefficients = [vec![10., 100.], vec![0.5, -0.5]];
        let rows = rows(&x, 2, RowNorm::None);
        let (written, sums) = forward(&rows, Some(&coefficients), true);
        assert_eq!(written.y.unwrap(), [10.5, 199.5, 30.5, -400.5]);
        assert!(written.residual_out.is_none());
        let sums = sums.unwrap();
        assert_eq!(sums.kept, [10., 20.]);
        assert!(sums.all.is_none());
        // Only the output, or only the sums.
        assert_eq!(normalize(&rows, &coefficients), [10.5, 199.5, 30.5, -400.5]);
        let (written, sums) = forward(&rows, None, true);
        assert!(written.y.is_none());
        assert_eq!(sums.unwrap().kept, [10., 20.]);
    }

    /// A padded row has an output, and enters only the sums over all rows.
    #[test]
    fn sums_of_kept_rows_and_of_all() {
        let x = [1f32, 2., 1., 3., -4., 2., 5., 6., 3.];
        let coefficients = [vec![1.; 3], vec![0.; 3]];
        let mut rows = rows(&x, 3, RowNorm::None);
        rows.keep = Some(&[1, 0, 1]);
        let squares = |rows: &Rows<f32>| {
            let (written, sums) = forward(rows, Some(&coefficients), true);
            assert_eq!(written.y.unwrap(), x);
            let SquareSums { kept, all } = sums.unwrap();
            (kept, all)
        };
        let (kept, all) = (vec![26., 40., 10.], vec![35., 56., 14.]);
        assert_eq!(squares(&rows), (kept.clone(), None));
        rows.sums_all = true;
        assert_eq!(squares(&rows), (kept, Some(all.clone())));
        // Without a mask both are the same.
        rows.keep = None;
        assert_eq!(squares(&rows), (all.clone(), Some(all)));
    }

    /// Rows of two groups: r of [3, 3] is 1/3, of [7, 1] 1/5, of [0.5, 0.5] 2, and of [0, 0] 1/√ε.
    #[test]
    fn group_scaling_by_hand() {
        let x = [3f32, 3., 7., 1., 0.5, 0.5, 0., 0.];
        let norm = RowNorm::Groups {
            count: 2,
            eps: 1e-20,
        };
        let coefficients = [vec![1., 1., 5., 5.], vec![0., 1., 0., 1.]];
        let rows = rows(&x, 4, norm);
        let (written, sums) = forward(&rows, Some(&coefficients), true);
        assert_close(&written.y.unwrap(), &[1., 2., 7., 2., 1., 2., 0., 1.]);
        assert_close(&sums.unwrap().kept, &[2., 2., 1.96, 0.04]);
        // The sums alone.
        let (written, sums) = forward(&rows, None, true);
        assert!(written.y.is_none());
        assert_close(&sums.unwrap().kept, &[2., 2., 1.96, 0.04]);
    }

    /// A channel's group of one: x̃ is the sign.
    #[test]
    fn groups_of_one_channel() {
        let x = [3f32, -0.25];
        let coefficients = [vec![2.; 1], vec![1.; 1]];
        let y = normalize(&rows(&x, 1, groups(1)), &coefficients);
        assert_close(&y, &[3., -1.]);
    }

    #[test]
    fn no_rows() {
        let coefficients = [vec![1f32; 5], vec![0.; 5]];
        for norm in [RowNorm::None, groups(5)] {
            let mut rows = rows::<f16>(&[], 5, norm);
            rows.sums_all = true;
            let (written, sums) = forward(&rows, Some(&coefficients), true);
            assert_eq!(written.y, Some(vec![]));
            let sums = sums.unwrap();
            assert_eq!((sums.kept, sums.all), (vec![0.; 5], Some(vec![0.; 5])));
            let dy = matrix(&[], 5);
            let sums = BackwardSums::DyXAndDy;
            let (dx, sums) = backward(&rows, &dy, Some(&coefficients), sums);
            assert_eq!((dx, sums), (Some(vec![]), vec![0.; 10]));
        }
    }

    /// The sum is rounded to the rows' dtype, and y is of the rounded sum.
    #[test]
    fn a_residual_is_added_first() {
        let half = |values: &[f32]| values.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>();
        let (x, residual) = (half(&[2048., 1., 0.5, -4.]), half(&[1., 2., 0.25, 4.]));
        let mut rows = rows(&x, 2, RowNorm::None);
        rows.residual = Some(matrix(&residual, 2));
        let coefficients = [vec![1., 2.], vec![0., 0.]];
        let (written, sums) = forward(&rows, Some(&coefficients), true);
        // f16 has every second integer from 2048 on: a tie, to even.
        assert_eq!(written.residual_out.unwrap(), half(&[2048., 3., 0.75, 0.]));
        assert_eq!(written.y.unwrap(), half(&[2048., 6., 0.75, 0.]));
        assert_eq!(sums.unwrap().kept, [2048f32 * 2048. + 0.5625, 9.]);
        // The sum alone, for a forward that waits for its statistic.
        let (written, sums) = forward(&rows, None, false);
        assert_eq!(written.residual_out.unwrap(), half(&[2048., 3., 0.75, 0.]));
        assert!(written.y.is_none() && sums.is_none());
    }

    /// Larger inputs add the residual in a pass of its own, with the same result.
    #[test]
    fn a_large_residual_is_added_first() {
        let cols = 1024;
        let len = LARGE / size_of::<f32>() + cols;
        let x: Vec<f32> = (0..len).map(|i| (i % 7) as f32).collect();
        let residual: Vec<f32> = (0..len).map(|i| (i % 5) as f32).collect();
        let mut rows = rows(&x, cols, RowNorm::None);
        rows.residual = Some(matrix(&residual, cols));
        assert!(rows.bytes() > LARGE);
        let coefficients = [vec![2.; 1024], vec![1.; 1024]];
        let (written, sums) = forward(&rows, Some(&coefficients), true);
        let sum: Vec<f32> = x.iter().zip(&residual).map(|(x, r)| x + r).collect();
        let y: Vec<f32> = sum.iter().map(|s| 2. * s + 1.).collect();
        let squares = |column| sum.iter().skip(column).step_by(cols).map(|s| s * s).sum();
        let squares: Vec<f32> = (0..cols).map(squares).collect();
        assert!(written.y.unwrap() == y && written.residual_out.unwrap() == sum);
        assert_eq!(sums.unwrap().kept, squares); // whole numbers, which are exact
    }

    /// dx = gain dy − decay x, Σ dy x and Σ dy, of which padded rows have none.
    #[test]
    fn backward_by_hand() {
        let (x, dy) = ([1f32, 2., 3., 4., -5., 6.], [0.5f32, 1., 7., 7., 2., -1.]);
        let coefficients = [vec![10., 100.], vec![-1., -0.5]];
        let mut rows = rows(&x, 2, RowNorm::None);
        rows.keep = Some(&[1, 0, 1]);
        let dx = [4., 99., 0., 0., 25., -103.];
        for (sums, expected) in [
            (BackwardSums::None, &[][..]),
            (BackwardSums::DyX, &[-9.5, -4.]),
            (BackwardSums::DyXAndDy, &[-9.5, -4., 2.5, 0.]),
        ] {
            let got = backward(&rows, &matrix(&dy, 2), Some(&coefficients), sums);
            assert_eq!(got, (Some(dx.to_vec()), expected.to_vec()));
            let got = backward(&rows, &matrix(&dy, 2), None, sums);
            assert_eq!(got, (None, expected.to_vec()));
        }
    }

    /// With one group of [7, 1], r is 1/5 and x̃ = [1.4, 0.2]. With gain 1 and decay 0, dx̃ = dy =
    /// [1, 3] and mean(dx̃ x̃) = 1, so dx = ([1, 3] − [1.4, 0.2]) / 5.
    #[test]
    fn backward_through_group_scaling_by_hand() {
        let (x, dy) = ([7f32, 1.], [1f32, 3.]);
        let coefficients = [vec![1.; 2], vec![0.; 2]];
        let rows = rows(&x, 2, groups(1));
        let sums = BackwardSums::DyX;
        let (dx, sums) = backward(&rows, &matrix(&dy, 2), Some(&coefficients), sums);
        assert_close(&dx.unwrap(), &[-0.08, 0.56]);
        assert_close(&sums, &[1.4, 0.6]);
        // The sums alone.
        let (dx, same) = backward(&rows, &matrix(&dy, 2), None, BackwardSums::DyX);
        assert!(dx.is_none());
        assert_eq!(same, sums);
    }

    /// μ of [1, 3, 8] is 4, and the mean of [9, 1, 16] is 26/3.
    #[test]
    fn layer_norm_by_hand() {
        let x = [1f32, 3., 8.];
        let rows = rows(&x, 3, RowNorm::Centred { eps: 1e-20 });
        let coefficients = [vec![1., 2., 1.], vec![0., 0., 1.]];
        let r = (3f32 / 26.).sqrt();
        let y = normalize(&rows, &coefficients);
        assert_close(&y, &[-3. * r, -2. * r, 4. * r + 1.]);

        // g = [3, 0, 0], mean(g) = 1, and mean(g x̃) = −3 r. dx = r (g − 1 + 3 r x̃).
        let dy = [3f32, 0., 0.];
        let sums = BackwardSums::DyXAndDy;
        let (dx, sums) = backward(&rows, &matrix(&dy, 3), Some(&coefficients), sums);
        let expected = [-3f32, -1., 4.].map(|x| r * 3. * r * r * x);
        let expected = [2. * r + expected[0], -r + expected[1], -r + expected[2]];
        assert_close(&dx.unwrap(), &expected);
        assert_close(&sums[..1], &[-9. * r]);
        assert_eq!(sums[1..], [0., 0., 3., 0., 0.]);
    }

    /// A row's sum with its residual is rounded to the rows' dtype and normalized, in one pass or in
    /// two.
    #[test]
    fn layer_norm_of_a_sum_with_a_residual() {
        fn check<T: Chunks>(len: usize) {
            let cols = 1000;
            let values = |step: usize| -> Vec<T> {
                let values = (0..len).map(|i| (i * step % 1013) as f64 / 7. - 50.);
                values.map(T::from_f64).collect()
            };
            let (x, residual) = (values(37), values(101));
            let norm = RowNorm::Centred { eps: 1e-5 };
            let mut rows = rows(&x, cols, norm);
            rows.residual = Some(matrix(&residual, cols));
            let one_to_three = (0..cols).map(|c| (1 + c % 3) as f64);
            let gain: Vec<_> = one_to_three.map(T::Acc::from_f64).collect();
            let coefficients = [gain, vec![T::Acc::from_f64(0.5); cols]];
            let (written, sums) = forward(&rows, Some(&coefficients), false);
            assert!(sums.is_none());
            let sum = (x.iter().zip(&residual))
                .map(|(x, r)| T::from_f64((x.widen() + r.widen()).to_f64()));
            let sum: Vec<T> = sum.collect();
            assert!(written.residual_out.unwrap() == sum);
            let y = normalize(&self::rows(&sum, cols, norm), &coefficients);
            assert!(written.y.unwrap() == y);
        }
        check::<f32>(3000);
        check::<f64>(3000);
        check::<f16>(3000);
        check::<bf16>(3000);
        check::<f32>(LARGE / 4 + 1000 - LARGE / 4 % 1000);
    }

    /// x̃ is as for [−2, 0, 2], although f32 has only every second integer around this mean.
    #[test]
    fn layer_norm_of_a_large_mean() {
        let x = [0f32, 2., 4.].map(|x| 16_777_216. + x);
        let rows = rows(&x, 3, RowNorm::Centred { eps: 1e-20 });
        let y = normalize(&rows, &[vec![1.; 3], vec![0.; 3]]);
        let r = (3f32 / 8.).sqrt();
        assert_close(&y, &[-2. * r, 0., 2. * r]);
    }

    /// A row of equal values has no deviation, and ε keeps r finite. The variance may be rounded
    /// below 0, and below −ε if ε is small.
    #[test]
    fn layer_norm_of_a_constant_row() {
        for cols in 1..60 {
            for value in [0.1f32, 0.3, 7.7, 1234.5] {
                let x = vec![value; cols];
                let coefficients = [vec![1.; cols], vec![0.; cols]];
                let y = |eps| normalize(&rows(&x, cols, RowNorm::Centred { eps }), &coefficients);
                assert!(y(1e-5).iter().all(|y| y.abs() < 0.1), "{:?}", y(1e-5));
                assert!(y(1e-30).iter().all(|y| y.is_finite()), "{:?}", y(1e-30));
            }
        }
    }

    /// f32 has every second integer around this mean, which is a third more than one of them. The
    /// gradient is that of the same row around 0.
    #[test]
    fn layer_norm_backward_of_a_large_mean() {
        let coefficients = [vec![1., 2., 3.], vec![0.; 3]];
        let dy = [0.5f32, 4., -2.];
        let gradients = |mean: f32| {
            let x = [0f32, 2., 2.].map(|x| mean + x);
            let rows = rows(&x, 3, RowNorm::Centred { eps: 1e-20 });
            let sums = BackwardSums::DyX;
            let (dx, sums) = backward(&rows, &matrix(&dy, 3), Some(&coefficients), sums);
            (dx.unwrap(), sums)
        };
        let ((dx, sums), (around_0, sums_around_0)) = (gradients(16_777_216.), gradients(0.));
        assert_close(&dx, &around_0);
        assert_close(&sums, &sums_around_0);
    }

    /// Products of g with distances overflow f32, and not f64. In the second row the mean is 10⁴
    /// times as large as the distances, so that its own rounding shows.
    #[test]
    fn layer_norm_backward_of_huge_values() {
        let dy = [1e10f32, -3e10, 1e9];
        for x in [[1e30f32, 3e30, -2e30], [1.0001e34, 1.0003e34, 0.9998e34]] {
            let rows_of_f32 = rows(&x, 3, RowNorm::Centred { eps: 1e-5 });
            let ours = [vec![1f32, 2., 3.], vec![0.; 3]];
            let dy_of_f32 = matrix(&dy, 3);
            let (dx, _) = backward(&rows_of_f32, &dy_of_f32, Some(&ours), BackwardSums::None);
            let (x, dy) = (x.map(f64::from), dy.map(f64::from));
            let rows = rows(&x, 3, RowNorm::Centred { eps: 1e-5 });
            let exact = [vec![1f64, 2., 3.], vec![0.; 3]];
            let (exact, _) = backward(&rows, &matrix(&dy, 3), Some(&exact), BackwardSums::None);
            for (dx, exact) in dx.unwrap().into_iter().zip(exact.unwrap()) {
                assert!(
                    (f64::from(dx) / exact - 1.).abs() < 1e-5,
                    "{dx:e} {exact:e}"
                );
            }
        }
    }

    /// 600 ones are added to a first square of 2²⁴, above which f32 has only every second integer.
    /// Those in the first subtotal are lost one by one. The other 89 have a subtotal of their own.
    #[test]
    fn long_sums_have_subtotals() {
        let mut x = vec![1f32; 601];
        x[0] = 4096.;
        let rows = rows(&x, 1, RowNorm::None);
        assert_eq!(chunk_rows(601, 1), CHUNK);
        let (_, sums) = forward(&rows, None, true);
        assert_eq!(sums.unwrap().kept, [16_777_216. + 88.]);
        assert_eq!(601 - SUBTOTAL_ROWS, 89);
    }

    /// Values that are not finite pass through as they are in IEEE arithmetic, and stay in their
    /// row.
    #[test]
    fn values_that_are_not_finite() {
        let x = [-0f32, f32::INFINITY, f32::NAN, 2.];
        let coefficients = [vec![1.; 2], vec![-0.; 2]];
        let y = normalize(&rows(&x, 2, RowNorm::None), &coefficients);
        assert!(y[0] == 0. && y[0].is_sign_negative());
        assert!(y[1] == f32::INFINITY && y[2].is_nan() && y[3] == 2.);
        let x = [f32::INFINITY, 1., 3., 3.];
        let y = normalize(&rows(&x, 2, groups(1)), &coefficients);
        assert!(y[0].is_nan() && y[1].is_nan());
        assert_close(&y[2..], &[1., 1.]);
    }

    /// The example of `means_of_huge`: squares of 1e308, whose sum is beyond f64.
    #[test]
    fn means_of_huge_by_hand() {
        let x = [1e154f64, 3., 1e154, 4., 5., 5.];
        let rows = rows(&x, 2, RowNorm::None);
        let means = means_of_huge(&rows, &[0], |row| row < 2);
        assert!((means[0] / 1e308 - 1.).abs() < 1e-15, "{means:?}");
        let means = means_of_huge(&rows, &[1, 0], |row| row < 2);
        assert!((means[0] / 12.5 - 1.).abs() < 1e-15, "{means:?}");
        assert!((means[1] / 1e308 - 1.).abs() < 1e-15, "{means:?}");
        // Beyond f64 itself.
        let x = [1e200];
        let rows = self::rows(&x, 1, RowNorm::None);
        assert_eq!(means_of_huge(&rows, &[0], |_| true), [f64::INFINITY]);
    }
}
