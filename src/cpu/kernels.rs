//! The row kernels: each reads its rows once, writes its output once, and sums columns on the way.
//!
//! Rows are cut into chunks whose size depends on the shape
//! alone; a chunk adds its rows in order into a partial sum of its own, and the partial sums are added
//! in order: the same bits whatever the number of threads.

use super::element::{Accumulator, Element};
use super::lanes::{sum, sweep, Columns, Lanes, Terms};
use super::uninit::{written, Piece, PieceRows};
use candle::WithDType;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::Range;

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

/// Column sums of x̃², `[start..][..n]` each.
pub(super) struct SquareSums<A> {
    /// Over kept rows.
    pub kept: Vec<A>,
    /// Over padded rows, where they were asked for and there is a mask.
    pub padded: Option<Vec<A>>,
}

/// Column sums of a backward over kept rows, `[start..][..n]` each.
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

/// Elements of a chunk. One chunk must outweigh the cost of handing it to a thread, and a sum over its
/// rows must stay short enough for f32.
const CHUNK: usize = 1 << 16;

/// The most chunks a call is cut into, so that partial sums stay small beside the rows.
const MAX_CHUNKS: usize = 256;

/// Inputs up to this many elements run on the calling thread: waking another costs more.
const SERIAL: usize = CHUNK;

/// Rows worked on together, so that what a column needs is loaded once for all of them.
const BLOCK: usize = 4;

/// Rows of a chunk, from the shape alone.
fn chunk_rows(rows: usize, cols: usize) -> usize {
    (CHUNK / cols).max(rows.div_ceil(MAX_CHUNKS)).max(1)
}

/// What is done to a block of `R` adjacent rows, in the dtype of the sums.
///
/// Implementations are `#[inline(always)]`, so that they are compiled for each SIMD level.
pub(super) trait Kernel<A>: Sync {
    /// Works on rows `x` of the input and `dy` of its gradient (empty in a forward), which are all kept
    /// or all padded, and adds to the chunk's `sums`, empty where none are wanted.
    fn block<const R: usize>(
        &self,
        x: [&[A]; R],
        dy: [&[A]; R],
        keeps: bool,
        out: &mut impl Sink<A, R>,
        sums: &mut [A],
    );
}

/// Where a block's output goes.
pub(super) trait Sink<A, const R: usize> {
    /// Writes the next `W` columns of each row.
    fn put<const W: usize>(&mut self, values: [Lanes<A, W>; R]);
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
    let arch = Arch::new();
    if rows.x.len() <= SERIAL {
        chunks.into_iter().for_each(|chunk| arch.dispatch(chunk));
    } else {
        chunks
            .into_par_iter()
            .for_each(|chunk| arch.dispatch(chunk));
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
        let mut scratch = Scratch {
            x: vec![],
            dy: vec![],
            out: vec![],
        };
        let mut first = self.range.start;
        while first < self.range.end {
            let keeps = self.rows.keeps(first);
            let mut alike = 1;
            while alike < BLOCK
                && first + alike < self.range.end
                && self.rows.keeps(first + alike) == keeps
            {
                alike += 1;
            }
            if alike == BLOCK {
                self.block::<BLOCK>(first, keeps, &mut scratch);
                first += BLOCK;
            } else {
                self.block::<1>(first, keeps, &mut scratch);
                first += 1;
            }
        }
    }
}

/// Room for a block's rows where they have to be converted.
struct Scratch<A> {
    x: Vec<A>,
    dy: Vec<A>,
    out: Vec<A>,
}

impl<T: Element, K: Kernel<T::Acc>> Chunk<'_, '_, T, K> {
    #[inline(always)]
    fn block<const R: usize>(&mut self, first: usize, keeps: bool, scratch: &mut Scratch<T::Acc>) {
        let cols = self.rows.cols;
        let span = first * cols..(first + R) * cols;
        let x = split::<_, R>(T::widened(&self.rows.x[span.clone()], &mut scratch.x), cols);
        let dy = match self.dy {
            Some(dy) => split::<_, R>(T::widened(&dy[span], &mut scratch.dy), cols),
            None => [[].as_slice(); R],
        };
        match self.out.as_deref_mut() {
            None => self.kernel.block(x, dy, keeps, &mut NoOutput, self.sums),
            Some(piece) => match T::direct(piece) {
                Ok(piece) => {
                    let mut out = piece.rows::<R>(cols);
                    self.kernel.block(x, dy, keeps, &mut out, self.sums);
                }
                Err(piece) => {
                    scratch.out.resize(R * cols, T::Acc::ZERO);
                    let mut out = ScratchRows {
                        out: &mut scratch.out,
                        cols,
                        col: 0,
                    };
                    self.kernel.block(x, dy, keeps, &mut out, self.sums);
                    piece.extend(&scratch.out, T::narrow);
                }
            },
        }
    }
}

/// The `R` rows of a block.
#[inline(always)]
fn split<A, const R: usize>(block: &[A], cols: usize) -> [&[A]; R] {
    let mut rows = [&block[..0]; R];
    for r in 0..R {
        rows[r] = &block[r * cols..][..cols];
    }
    rows
}

/// The output of a kernel that only sums.
struct NoOutput;

impl<A, const R: usize> Sink<A, R> for NoOutput {
    #[inline(always)]
    fn put<const W: usize>(&mut self, _: [Lanes<A, W>; R]) {}
}

/// An output that is yet to be converted.
struct ScratchRows<'s, A> {
    out: &'s mut [A],
    cols: usize,
    col: usize,
}

impl<A: Accumulator, const R: usize> Sink<A, R> for ScratchRows<'_, A> {
    #[inline(always)]
    fn put<const W: usize>(&mut self, values: [Lanes<A, W>; R]) {
        for r in 0..R {
            values[r].store(&mut self.out[r * self.cols..][..self.cols], self.col);
        }
        self.col += W;
    }
}

impl<A: Accumulator, const R: usize> Sink<A, R> for PieceRows<'_, '_, A, R> {
    #[inline(always)]
    fn put<const W: usize>(&mut self, values: [Lanes<A, W>; R]) {
        let mut bare = [[A::ZERO; W]; R];
        for r in 0..R {
            bare[r] = values[r].0;
        }
        PieceRows::put(self, &bare);
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
    /// r, the factor from x to x̃, where a group's squares add up to `squares`.
    #[inline(always)]
    fn inv_rms(&self, squares: A, eps: A) -> A {
        (squares / A::from_count(self.group_len) + eps)
            .sqrt()
            .recip()
    }

    /// The factors of one group in each of `R` rows.
    #[inline(always)]
    fn factors<const R: usize>(&self, x: [&[A]; R]) -> [A; R] {
        let mut factors = [A::ONE; R];
        if let Some(eps) = self.eps {
            for r in 0..R {
                let [squares] = sum(x[r].len(), &Squares { x: x[r] });
                factors[r] = self.inv_rms(squares, eps);
            }
        }
        factors
    }
}

/// Columns `start..start + n` of each row.
#[inline(always)]
fn columns<A, const R: usize>(rows: [&[A]; R], start: usize, n: usize) -> [&[A]; R] {
    let mut columns = rows;
    for r in 0..R {
        columns[r] = &rows[r][start..][..n];
    }
    columns
}

/// Columns `start..start + n` of sums, or none of none.
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
    fn block<const R: usize>(
        &self,
        x: [&[A]; R],
        _: [&[A]; R],
        keeps: bool,
        _: &mut impl Sink<A, R>,
        sums: &mut [A],
    ) {
        let cols = x[0].len();
        let sums = square_slot(sums, keeps, cols);
        if sums.is_empty() {
            return;
        }
        let n = self.layer_scale.group_len;
        for start in (0..cols).step_by(n) {
            let x = columns(x, start, n);
            let mut step = SquareSumStep {
                factors: self.layer_scale.factors(x),
                x,
                sums: columns_mut(sums, start, n),
            };
            sweep(n, &mut step);
        }
    }
}

struct SquareSumStep<'a, A, const R: usize> {
    x: [&'a [A]; R],
    factors: [A; R],
    sums: &'a mut [A],
}

impl<A: Accumulator, const R: usize> Columns for SquareSumStep<'_, A, R> {
    #[inline(always)]
    fn step<const W: usize>(&mut self, start: usize) {
        let mut sums = Lanes::<A, W>::load(self.sums, start);
        for r in 0..R {
            let x = Lanes::load(self.x[r], start) * self.factors[r];
            sums += x * x;
        }
        sums.store(self.sums, start);
    }
}

struct Normalize<'a, A> {
    layer_scale: LayerScale<A>,
    scale: &'a [A],
    shift: &'a [A],
}

impl<A: Accumulator> Kernel<A> for Normalize<'_, A> {
    #[inline(always)]
    fn block<const R: usize>(
        &self,
        x: [&[A]; R],
        _: [&[A]; R],
        keeps: bool,
        y: &mut impl Sink<A, R>,
        sums: &mut [A],
    ) {
        let cols = x[0].len();
        let sums = square_slot(sums, keeps, cols);
        let n = self.layer_scale.group_len;
        for start in (0..cols).step_by(n) {
            let x = columns(x, start, n);
            let mut step = NormalizeStep {
                factors: self.layer_scale.factors(x),
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

struct NormalizeStep<'a, A, Y, const R: usize> {
    x: [&'a [A]; R],
    factors: [A; R],
    scale: &'a [A],
    shift: &'a [A],
    sums: &'a mut [A],
    y: &'a mut Y,
}

impl<A: Accumulator, Y: Sink<A, R>, const R: usize> Columns for NormalizeStep<'_, A, Y, R> {
    #[inline(always)]
    fn step<const W: usize>(&mut self, start: usize) {
        let scale = Lanes::<A, W>::load(self.scale, start);
        let shift = Lanes::load(self.shift, start);
        let mut squares = Lanes::ZERO;
        let mut y = [Lanes::ZERO; R];
        for r in 0..R {
            let x = Lanes::load(self.x[r], start) * self.factors[r];
            squares += x * x;
            y[r] = x * scale + shift;
        }
        if !self.sums.is_empty() {
            (Lanes::load(self.sums, start) + squares).store(self.sums, start);
        }
        self.y.put(y);
    }
}

struct GradSumCols<A> {
    layer_scale: LayerScale<A>,
}

impl<A: Accumulator> Kernel<A> for GradSumCols<A> {
    #[inline(always)]
    fn block<const R: usize>(
        &self,
        x: [&[A]; R],
        dy: [&[A]; R],
        keeps: bool,
        _: &mut impl Sink<A, R>,
        sums: &mut [A],
    ) {
        if !keeps {
            return;
        }
        let cols = x[0].len();
        let (dy_x, dy_sum) = sums.split_at_mut(cols);
        let n = self.layer_scale.group_len;
        for start in (0..cols).step_by(n) {
            let x = columns(x, start, n);
            let mut step = GradSumStep {
                factors: self.layer_scale.factors(x),
                x,
                dy: columns(dy, start, n),
                dy_x: columns_mut(dy_x, start, n),
                dy_sum: columns_mut(dy_sum, start, n),
            };
            sweep(n, &mut step);
        }
    }
}

struct GradSumStep<'a, A, const R: usize> {
    x: [&'a [A]; R],
    dy: [&'a [A]; R],
    factors: [A; R],
    dy_x: &'a mut [A],
    dy_sum: &'a mut [A],
}

impl<A: Accumulator, const R: usize> Columns for GradSumStep<'_, A, R> {
    #[inline(always)]
    fn step<const W: usize>(&mut self, start: usize) {
        let mut dy_x = Lanes::<A, W>::load(self.dy_x, start);
        let mut dy_sum = Lanes::<A, W>::load(self.dy_sum, start);
        for r in 0..R {
            let x = Lanes::load(self.x[r], start) * self.factors[r];
            let dy = Lanes::load(self.dy[r], start);
            dy_x += dy * x;
            dy_sum += dy;
        }
        dy_x.store(self.dy_x, start);
        dy_sum.store(self.dy_sum, start);
    }
}

struct NormalizeBwd<'a, A> {
    layer_scale: LayerScale<A>,
    gain: &'a [A],
    decay: &'a [A],
}

impl<A: Accumulator> Kernel<A> for NormalizeBwd<'_, A> {
    #[inline(always)]
    fn block<const R: usize>(
        &self,
        x: [&[A]; R],
        dy: [&[A]; R],
        keeps: bool,
        dx: &mut impl Sink<A, R>,
        sums: &mut [A],
    ) {
        let cols = x[0].len();
        if !keeps {
            return sweep(cols, &mut ZeroStep(dx, PhantomData));
        }
        let (dy_x, dy_sum) = sums.split_at_mut(sums.len() / 2);
        let n = self.layer_scale.group_len;
        for start in (0..cols).step_by(n) {
            let x = columns(x, start, n);
            let dy = columns(dy, start, n);
            let gain = &self.gain[start..][..n];
            let decay = &self.decay[start..][..n];
            // dx = r (dx̃ − x̃ · mean over the group of dx̃ x̃), with x̃ = r x.
            let mut factors = [A::ONE; R];
            let mut means = [A::ZERO; R];
            if let Some(eps) = self.layer_scale.eps {
                for r in 0..R {
                    let terms = GroupTerms {
                        x: x[r],
                        dy: dy[r],
                        gain,
                        decay,
                    };
                    let [squares, gain_dy_x, decay_x2] = sum(n, &terms);
                    let factor = self.layer_scale.inv_rms(squares, eps);
                    factors[r] = factor;
                    means[r] = factor * (gain_dy_x - factor * decay_x2) / A::from_count(n);
                }
            }
            let mut step = NormalizeBwdStep {
                x,
                dy,
                factors,
                means,
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

struct NormalizeBwdStep<'a, A, D, const R: usize> {
    x: [&'a [A]; R],
    dy: [&'a [A]; R],
    factors: [A; R],
    means: [A; R],
    gain: &'a [A],
    decay: &'a [A],
    dy_x: &'a mut [A],
    dy_sum: &'a mut [A],
    dx: &'a mut D,
}

impl<A: Accumulator, D: Sink<A, R>, const R: usize> Columns for NormalizeBwdStep<'_, A, D, R> {
    #[inline(always)]
    fn step<const W: usize>(&mut self, start: usize) {
        let gain = Lanes::<A, W>::load(self.gain, start);
        let decay = Lanes::load(self.decay, start);
        let (mut dy_x, mut dy_sum) = (Lanes::ZERO, Lanes::ZERO);
        let mut dx = [Lanes::ZERO; R];
        for r in 0..R {
            let x = Lanes::load(self.x[r], start) * self.factors[r];
            let dy = Lanes::load(self.dy[r], start);
            dy_x += dy * x;
            dy_sum += dy;
            dx[r] = (gain * dy - decay * x - x * self.means[r]) * self.factors[r];
        }
        if !self.dy_x.is_empty() {
            (Lanes::load(self.dy_x, start) + dy_x).store(self.dy_x, start);
            (Lanes::load(self.dy_sum, start) + dy_sum).store(self.dy_sum, start);
        }
        self.dx.put(dx);
    }
}

/// Puts zeros.
struct ZeroStep<'a, A, D, const R: usize>(&'a mut D, PhantomData<[A; R]>);

impl<A: Accumulator, D: Sink<A, R>, const R: usize> Columns for ZeroStep<'_, A, D, R> {
    #[inline(always)]
    fn step<const W: usize>(&mut self, _: usize) {
        self.0.put([Lanes::<A, W>::ZERO; R]);
    }
}
