//! The row kernels: each reads its rows once, writes its output once, and sums columns on the way.
//!
//! Rows are cut into chunks whose size depends on the shape alone; a chunk adds its rows in order into a
//! partial sum of its own, and the partial sums are added in order: the same bits whatever the number of
//! threads.

use super::element::{Accumulator, Element};
use super::lanes::{sum, sweep, Columns, Lanes, Terms};
use super::uninit::{written, Piece};
use candle::WithDType;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::LazyLock;

/// Packed rows of `cols` channels, with their padding mask and layer-scale.
pub(crate) struct Rows<'a, T> {
    /// `[rows, cols]`.
    pub x: &'a [T],
    /// C, at least 1.
    pub cols: usize,
    /// `[rows]`, 0 for a padded row.
    pub keep: Option<&'a [u8]>,
    /// G, the groups of the layer-scale, and its ε.
    pub groups: Option<(usize, f64)>,
}

/// Column sums of x̃², `[cols]` each.
pub(super) struct SquareSums<A> {
    /// Over kept rows.
    pub kept: Vec<A>,
    /// Over padded rows, where they were asked for and there is a mask.
    pub padded: Option<Vec<A>>,
}

/// Column sums of a backward over kept rows, `[cols]` each.
pub(super) struct GradSums<A> {
    /// Σ dy x̃.
    pub dy_x: Vec<A>,
    /// Σ dy.
    pub dy: Vec<A>,
}

impl<T: Element> Rows<'_, T> {
    pub fn len(&self) -> usize {
        self.x.len() / self.cols
    }

    /// The number of rows that are not padding.
    pub fn kept(&self) -> usize {
        match self.keep {
            Some(keep) => keep.iter().filter(|&&keep| keep != 0).count(),
            None => self.len(),
        }
    }

    #[inline(always)]
    fn keeps(&self, row: usize) -> bool {
        self.keep.is_none_or(|keep| keep[row] != 0)
    }

    /// Columns that the sums of squares take: kept rows first, then padded ones if asked for.
    fn square_sums_width(&self, with_padded: bool) -> usize {
        self.cols * (1 + usize::from(with_padded && self.keep.is_some()))
    }

    fn layer_scale(&self) -> LayerScale<T::Acc> {
        LayerScale {
            group_len: self.cols / self.groups.map_or(1, |(groups, _)| groups),
            eps: self.groups.map(|(_, eps)| T::Acc::from_f64(eps)),
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

/// Column sums of x̃².
pub(super) fn square_sum_cols<T: Element>(rows: &Rows<T>, with_padded: bool) -> SquareSums<T::Acc> {
    let kernel = SquareSumCols {
        layer_scale: rows.layer_scale(),
    };
    let width = rows.square_sums_width(with_padded);
    let sums = run(&kernel, rows, None, &mut [], width);
    SquareSums::split(sums, rows.cols)
}

/// `y = x̃ ⊙ scale + shift`.
pub(super) fn normalize<T: Element>(rows: &Rows<T>, scale: &[T::Acc], shift: &[T::Acc]) -> Vec<T> {
    let kernel = Normalize {
        layer_scale: rows.layer_scale(),
        scale,
        shift,
    };
    run_into_output(&kernel, rows, None, 0).0
}

/// [`normalize`], with the column sums of x̃² taken on the way.
pub(super) fn normalize_and_sum<T: Element>(
    rows: &Rows<T>,
    scale: &[T::Acc],
    shift: &[T::Acc],
    with_padded: bool,
) -> (Vec<T>, SquareSums<T::Acc>) {
    let kernel = Normalize {
        layer_scale: rows.layer_scale(),
        scale,
        shift,
    };
    let width = rows.square_sums_width(with_padded);
    let (y, sums) = run_into_output(&kernel, rows, None, width);
    (y, SquareSums::split(sums, rows.cols))
}

/// Column sums of dy x̃ and dy over kept rows; `dy` is shaped as the rows.
pub(super) fn grad_sum_cols<T: Element>(rows: &Rows<T>, dy: &[T]) -> GradSums<T::Acc> {
    let kernel = GradSumCols {
        layer_scale: rows.layer_scale(),
    };
    let sums = run(&kernel, rows, Some(dy), &mut [], 2 * rows.cols);
    GradSums::split(sums, rows.cols)
}

/// The input's gradient: `dx̃ = gain ⊙ dy − decay ⊙ x̃`, taken back through the layer-scale; 0 in padded
/// rows.
pub(super) fn normalize_bwd<T: Element>(
    rows: &Rows<T>,
    dy: &[T],
    gain: &[T::Acc],
    decay: &[T::Acc],
) -> Vec<T> {
    let kernel = NormalizeBwd {
        layer_scale: rows.layer_scale(),
        gain,
        decay,
    };
    run_into_output(&kernel, rows, Some(dy), 0).0
}

/// [`normalize_bwd`], with the sums of [`grad_sum_cols`] taken on the way.
pub(super) fn normalize_bwd_and_sum<T: Element>(
    rows: &Rows<T>,
    dy: &[T],
    gain: &[T::Acc],
    decay: &[T::Acc],
) -> (Vec<T>, GradSums<T::Acc>) {
    let kernel = NormalizeBwd {
        layer_scale: rows.layer_scale(),
        gain,
        decay,
    };
    let (dx, sums) = run_into_output(&kernel, rows, Some(dy), 2 * rows.cols);
    (dx, GradSums::split(sums, rows.cols))
}

/// Elements of a chunk, which must outweigh the cost of handing it to a thread.
const CHUNK: usize = 1 << 16;

/// Rows of a chunk that are added up by themselves before they join its sums: in f32 the rounding error
/// of a sum grows with the number of its terms.
const RUN: usize = 512;

/// The most chunks a call is cut into, so that partial sums stay small beside the rows.
const MAX_CHUNKS: usize = 256;

/// Inputs up to this many elements run on the calling thread: waking another costs more.
const SERIAL: usize = CHUNK;

/// Rows of a chunk, from the shape alone.
fn chunk_rows(rows: usize, cols: usize) -> usize {
    (CHUNK / cols).max(rows.div_ceil(MAX_CHUNKS)).max(1)
}

/// What is done to a row, in the dtype of the sums.
///
/// Implementations are `#[inline(always)]`, so that they are compiled for each SIMD level.
//
// Rows are taken one at a time: several together would share the loads of a channel's numbers, but where
// C is a power of two their lines compete for the same places in the cache (measured at 4096x512 f32, AMD
// EPYC: a backward of two or four rows together takes 1.4 times as long).
pub(super) trait Kernel<A>: Sync {
    /// Works on row `x` of the input and `dy` of its gradient (empty in a forward), puts all columns of
    /// the output in order, and adds to the chunk's `sums`, empty where none are wanted.
    fn row(&self, x: &[A], dy: &[A], keeps: bool, out: &mut impl Sink<A>, sums: &mut [A]);
}

/// Where a row's output goes.
pub(super) trait Sink<A> {
    /// Writes the next `W` columns.
    fn put<const W: usize>(&mut self, values: Lanes<A, W>);
}

/// Runs `kernel` into a fresh output shaped as the rows, and sums `width` columns on the way.
fn run_into_output<T: Element>(
    kernel: &impl Kernel<T::Acc>,
    rows: &Rows<T>,
    dy: Option<&[T]>,
    width: usize,
) -> (Vec<T>, Vec<T::Acc>) {
    let mut sums = vec![];
    let piece = chunk_rows(rows.len(), rows.cols) * rows.cols;
    let out = written(rows.x.len(), piece, |pieces| {
        sums = run(kernel, rows, dy, pieces, width);
    });
    (out, sums)
}

/// Runs `kernel` over all chunks and returns the sums of its `width` columns.
fn run<T: Element, K: Kernel<T::Acc>>(
    kernel: &K,
    rows: &Rows<T>,
    dy: Option<&[T]>,
    pieces: &mut [Piece<T>],
    width: usize,
) -> Vec<T::Acc> {
    let chunk = chunk_rows(rows.len(), rows.cols);
    let count = rows.len().div_ceil(chunk);
    let mut partials = vec![T::Acc::ZERO; count * width];
    let mut pieces = pieces.iter_mut();
    let mut sums = partials.chunks_mut(width.max(1));
    let chunks: Vec<_> = (0..count)
        .map(|i| Chunk {
            kernel,
            rows,
            dy,
            range: i * chunk..rows.len().min((i + 1) * chunk),
            out: pieces.next(),
            sums: sums.next().unwrap_or_default(),
        })
        .collect();
    let arch = *SIMD;
    if rows.x.len() <= SERIAL {
        chunks.into_iter().for_each(|chunk| arch.dispatch(chunk));
    } else {
        chunks
            .into_par_iter()
            .for_each(|chunk| arch.dispatch(chunk));
    }
    add_partials(&partials, width)
}

/// The vector instructions in use: the best of this processor, or those that the environment variable
/// `CANDLE_POWERNORM_SIMD` names (`scalar` or `avx2`), so that each level can be tested on one machine.
static SIMD: LazyLock<Arch> =
    LazyLock::new(|| match std::env::var("CANDLE_POWERNORM_SIMD").as_deref() {
        Ok("scalar") => Arch::Scalar,
        #[cfg(target_arch = "x86_64")]
        Ok("avx2") => pulp::x86::V3::try_new().map_or(Arch::Scalar, Arch::V3),
        _ => Arch::new(),
    });

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
struct Chunk<'c, 'out, T: Element, K> {
    kernel: &'c K,
    rows: &'c Rows<'c, T>,
    dy: Option<&'c [T]>,
    range: Range<usize>,
    out: Option<&'c mut Piece<'out, T>>,
    sums: &'c mut [T::Acc],
}

impl<T: Element, K: Kernel<T::Acc>> WithSimd for Chunk<'_, '_, T, K> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        let cols = self.rows.cols;
        let (mut x_scratch, mut dy_scratch, mut out_scratch) = (vec![], vec![], vec![]);
        let mut run_sums = vec![T::Acc::ZERO; self.sums.len()];
        for row in self.range.clone() {
            let keeps = self.rows.keeps(row);
            let x = T::widened(&self.rows.x[row * cols..][..cols], &mut x_scratch);
            let dy = match self.dy {
                Some(dy) => T::widened(&dy[row * cols..][..cols], &mut dy_scratch),
                None => &[],
            };
            match self.out.as_deref_mut().map(T::direct) {
                None => self.kernel.row(x, dy, keeps, &mut NoOutput, &mut run_sums),
                Some(Ok(out)) => self.kernel.row(x, dy, keeps, out, &mut run_sums),
                Some(Err(out)) => {
                    out_scratch.resize(cols, T::Acc::ZERO);
                    let mut unconverted = Unconverted {
                        row: &mut out_scratch,
                        col: 0,
                    };
                    self.kernel
                        .row(x, dy, keeps, &mut unconverted, &mut run_sums);
                    out.extend(&out_scratch, T::narrow);
                }
            }
            let rows_done = row + 1 - self.range.start;
            if rows_done.is_multiple_of(RUN) || row + 1 == self.range.end {
                for (sum, run_sum) in self.sums.iter_mut().zip(&mut run_sums) {
                    *sum += std::mem::replace(run_sum, T::Acc::ZERO);
                }
            }
        }
    }
}

/// The output of a kernel that only sums.
struct NoOutput;

impl<A> Sink<A> for NoOutput {
    #[inline(always)]
    fn put<const W: usize>(&mut self, _: Lanes<A, W>) {}
}

/// An output row that is yet to be converted.
struct Unconverted<'a, A> {
    row: &'a mut [A],
    col: usize,
}

impl<A: Accumulator> Sink<A> for Unconverted<'_, A> {
    #[inline(always)]
    fn put<const W: usize>(&mut self, values: Lanes<A, W>) {
        values.store(self.row, self.col);
        self.col += W;
    }
}

impl<A: Accumulator> Sink<A> for Piece<'_, A> {
    #[inline(always)]
    fn put<const W: usize>(&mut self, values: Lanes<A, W>) {
        self.extend(&values.0, |value| value);
    }
}

/// The layer-scale of rows, or none.
struct LayerScale<A> {
    /// Channels of a group; all of them without a layer-scale.
    group_len: usize,
    eps: Option<A>,
}

/// Σ x² of a group.
struct Squares<'a, A> {
    x: &'a [A],
}

impl<A: Accumulator> Terms<A, 1> for Squares<'_, A> {
    #[inline(always)]
    fn at<const W: usize>(&self, start: usize) -> [Lanes<A, W>; 1] {
        let x = Lanes::load(self.x, start);
        [x * x]
    }
}

impl<A: Accumulator> LayerScale<A> {
    /// r, the factor from x to x̃ of one group.
    #[inline(always)]
    fn factor(&self, x: &[A]) -> A {
        match self.eps {
            Some(eps) => {
                let [squares] = sum(x.len(), &Squares { x });
                self.factor_of(x, squares, eps)
            }
            None => A::ONE,
        }
    }

    /// [`factor`](Self::factor), where the group's squares add up to `squares`.
    #[inline(always)]
    fn factor_of(&self, x: &[A], squares: A, eps: A) -> A {
        if squares.is_finite() {
            (squares / A::from_count(x.len()) + eps).sqrt().recip()
        } else {
            Self::factor_of_huge(x)
        }
    }

    /// The factor of a group whose squares overflow: they are taken of x over its largest magnitude, beside
    /// which ε is nothing. NaN if x is not finite, so that the output shows it and the statistics forget it.
    #[cold]
    fn factor_of_huge(x: &[A]) -> A {
        if !x.iter().all(|x| x.is_finite()) {
            return A::nan();
        }
        let largest = x.iter().fold(A::ZERO, |largest, x| {
            let magnitude = x.abs();
            if magnitude > largest {
                magnitude
            } else {
                largest
            }
        });
        let squares = x.iter().fold(A::ZERO, |sum, &x| {
            let x = x / largest;
            sum + x * x
        });
        (largest * (squares / A::from_count(x.len())).sqrt()).recip()
    }
}

/// Columns `start..start + n` of `sums`; an empty slice where no sums are wanted.
#[inline(always)]
fn columns_mut<A>(sums: &mut [A], start: usize, n: usize) -> &mut [A] {
    sums.get_mut(start..start + n).unwrap_or_default()
}

/// Where the squares of a row are added: nowhere for a padded row, unless the sums have room for it.
#[inline(always)]
fn square_slot<A>(sums: &mut [A], keeps: bool, cols: usize) -> &mut [A] {
    columns_mut(sums, if keeps { 0 } else { cols }, cols)
}

struct SquareSumCols<A> {
    layer_scale: LayerScale<A>,
}

impl<A: Accumulator> Kernel<A> for SquareSumCols<A> {
    #[inline(always)]
    fn row(&self, x: &[A], _: &[A], keeps: bool, _: &mut impl Sink<A>, sums: &mut [A]) {
        let sums = square_slot(sums, keeps, x.len());
        if sums.is_empty() {
            return;
        }
        let n = self.layer_scale.group_len;
        for start in (0..x.len()).step_by(n) {
            let x = &x[start..][..n];
            let mut step = SquareSumStep {
                factor: self.layer_scale.factor(x),
                x,
                sums: columns_mut(sums, start, n),
            };
            sweep(n, &mut step);
        }
    }
}

struct SquareSumStep<'a, A> {
    x: &'a [A],
    factor: A,
    sums: &'a mut [A],
}

impl<A: Accumulator> Columns for SquareSumStep<'_, A> {
    #[inline(always)]
    fn step<const W: usize>(&mut self, start: usize) {
        let x = Lanes::<A, W>::load(self.x, start) * self.factor;
        (Lanes::load(self.sums, start) + x * x).store(self.sums, start);
    }
}

struct Normalize<'a, A> {
    layer_scale: LayerScale<A>,
    scale: &'a [A],
    shift: &'a [A],
}

impl<A: Accumulator> Kernel<A> for Normalize<'_, A> {
    #[inline(always)]
    fn row(&self, x: &[A], _: &[A], keeps: bool, y: &mut impl Sink<A>, sums: &mut [A]) {
        let sums = square_slot(sums, keeps, x.len());
        let n = self.layer_scale.group_len;
        for start in (0..x.len()).step_by(n) {
            let x = &x[start..][..n];
            let mut step = NormalizeStep {
                factor: self.layer_scale.factor(x),
                x,
                scale: &self.scale[start..][..n],
                shift: &self.shift[start..][..n],
                sums: columns_mut(sums, start, n),
                y,
            };
            sweep(n, &mut step);
        }
    }
}

struct NormalizeStep<'a, A, Y> {
    x: &'a [A],
    factor: A,
    scale: &'a [A],
    shift: &'a [A],
    sums: &'a mut [A],
    y: &'a mut Y,
}

impl<A: Accumulator, Y: Sink<A>> Columns for NormalizeStep<'_, A, Y> {
    #[inline(always)]
    fn step<const W: usize>(&mut self, start: usize) {
        let x = Lanes::<A, W>::load(self.x, start) * self.factor;
        if !self.sums.is_empty() {
            (Lanes::load(self.sums, start) + x * x).store(self.sums, start);
        }
        self.y
            .put(x * Lanes::load(self.scale, start) + Lanes::load(self.shift, start));
    }
}

struct GradSumCols<A> {
    layer_scale: LayerScale<A>,
}

impl<A: Accumulator> Kernel<A> for GradSumCols<A> {
    #[inline(always)]
    fn row(&self, x: &[A], dy: &[A], keeps: bool, _: &mut impl Sink<A>, sums: &mut [A]) {
        if !keeps {
            return;
        }
        let (dy_x, dy_sum) = sums.split_at_mut(x.len());
        let n = self.layer_scale.group_len;
        for start in (0..x.len()).step_by(n) {
            let x = &x[start..][..n];
            let mut step = GradSumStep {
                factor: self.layer_scale.factor(x),
                x,
                dy: &dy[start..][..n],
                dy_x: columns_mut(dy_x, start, n),
                dy_sum: columns_mut(dy_sum, start, n),
            };
            sweep(n, &mut step);
        }
    }
}

struct GradSumStep<'a, A> {
    x: &'a [A],
    dy: &'a [A],
    factor: A,
    dy_x: &'a mut [A],
    dy_sum: &'a mut [A],
}

impl<A: Accumulator> Columns for GradSumStep<'_, A> {
    #[inline(always)]
    fn step<const W: usize>(&mut self, start: usize) {
        let x = Lanes::<A, W>::load(self.x, start) * self.factor;
        let dy = Lanes::load(self.dy, start);
        (Lanes::load(self.dy_x, start) + dy * x).store(self.dy_x, start);
        (Lanes::load(self.dy_sum, start) + dy).store(self.dy_sum, start);
    }
}

struct NormalizeBwd<'a, A> {
    layer_scale: LayerScale<A>,
    gain: &'a [A],
    decay: &'a [A],
}

impl<A: Accumulator> Kernel<A> for NormalizeBwd<'_, A> {
    #[inline(always)]
    fn row(&self, x: &[A], dy: &[A], keeps: bool, dx: &mut impl Sink<A>, sums: &mut [A]) {
        if !keeps {
            return sweep(x.len(), &mut ZeroStep(dx, PhantomData));
        }
        let (dy_x, dy_sum) = sums.split_at_mut(sums.len() / 2);
        let n = self.layer_scale.group_len;
        for start in (0..x.len()).step_by(n) {
            let x = &x[start..][..n];
            let dy = &dy[start..][..n];
            let gain = &self.gain[start..][..n];
            let decay = &self.decay[start..][..n];
            let (factor, mean) = match self.layer_scale.eps {
                Some(eps) => self.factor_and_mean(x, dy, start, eps),
                None => (A::ONE, A::ZERO),
            };
            let mut step = NormalizeBwdStep {
                x,
                dy,
                factor,
                mean,
                gain,
                decay,
                dy_x: columns_mut(dy_x, start, n),
                dy_sum: columns_mut(dy_sum, start, n),
                dx,
            };
            sweep(n, &mut step);
        }
    }
}

impl<A: Accumulator> NormalizeBwd<'_, A> {
    /// What takes the gradient of one group, which begins at column `start`, back through the layer-scale,
    /// `dx = r (dx̃ − x̃ · mean(dx̃ x̃))`: the factor r and that mean.
    #[inline(always)]
    fn factor_and_mean(&self, x: &[A], dy: &[A], start: usize, eps: A) -> (A, A) {
        let gain = &self.gain[start..][..x.len()];
        let decay = &self.decay[start..][..x.len()];
        // With x̃ = r x, the mean of (gain dy − decay x̃) x̃ takes no r inside its sums: one pass does.
        let terms = GroupTerms { x, dy, gain, decay };
        let [squares, gain_dy_x, decay_x2] = sum(x.len(), &terms);
        let factor = self.layer_scale.factor_of(x, squares, eps);
        let total = factor * (gain_dy_x - factor * decay_x2);
        let total = if total.is_finite() {
            total
        } else {
            total_with(factor, &terms)
        };
        (factor, total / A::from_count(x.len()))
    }
}

/// Σ (gain dy − decay x̃) x̃ of a group in which products with x itself overflow.
#[cold]
fn total_with<A: Accumulator>(factor: A, group: &GroupTerms<A>) -> A {
    let mut total = A::ZERO;
    for i in 0..group.x.len() {
        let x = factor * group.x[i];
        total += (group.gain[i] * group.dy[i] - group.decay[i] * x) * x;
    }
    total
}

/// What the backward of a group's layer-scale needs, in one pass: Σ x², Σ gain dy x, Σ decay x².
struct GroupTerms<'a, A> {
    x: &'a [A],
    dy: &'a [A],
    gain: &'a [A],
    decay: &'a [A],
}

impl<A: Accumulator> Terms<A, 3> for GroupTerms<'_, A> {
    #[inline(always)]
    fn at<const W: usize>(&self, start: usize) -> [Lanes<A, W>; 3] {
        let x = Lanes::load(self.x, start);
        let gain_dy = Lanes::load(self.gain, start) * Lanes::load(self.dy, start);
        let square = x * x;
        [square, gain_dy * x, Lanes::load(self.decay, start) * square]
    }
}

struct NormalizeBwdStep<'a, A, D> {
    x: &'a [A],
    dy: &'a [A],
    factor: A,
    mean: A,
    gain: &'a [A],
    decay: &'a [A],
    dy_x: &'a mut [A],
    dy_sum: &'a mut [A],
    dx: &'a mut D,
}

impl<A: Accumulator, D: Sink<A>> Columns for NormalizeBwdStep<'_, A, D> {
    #[inline(always)]
    fn step<const W: usize>(&mut self, start: usize) {
        let x = Lanes::<A, W>::load(self.x, start) * self.factor;
        let dy = Lanes::load(self.dy, start);
        if !self.dy_x.is_empty() {
            (Lanes::load(self.dy_x, start) + dy * x).store(self.dy_x, start);
            (Lanes::load(self.dy_sum, start) + dy).store(self.dy_sum, start);
        }
        let gain = Lanes::load(self.gain, start);
        let decay = Lanes::load(self.decay, start);
        self.dx
            .put((gain * dy - decay * x - x * self.mean) * self.factor);
    }
}

/// Puts zeros.
struct ZeroStep<'a, A, D>(&'a mut D, PhantomData<A>);

impl<A: Accumulator, D: Sink<A>> Columns for ZeroStep<'_, A, D> {
    #[inline(always)]
    fn step<const W: usize>(&mut self, _: usize) {
        self.0.put(Lanes::<A, W>::ZERO);
    }
}
