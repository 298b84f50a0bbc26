//! The row kernels: each reads its rows once, writes its output once, and sums columns on the way.
//!
//! Rows are cut into chunks whose size depends on the shape
//! alone; a chunk adds its rows in order into a partial sum of its own, and the partial sums are added
//! in order: the same bits whatever the number of threads.

use super::element::{Accumulator, Element};
use super::lanes::{each, reduce, sweep, Columns, Lanes, Reduction};
use super::uninit::{written, Block, Piece};
use candle::WithDType;
use num_traits::Float;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;
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

    /// Channels of a group; all of them without a layer-scale.
    #[inline(always)]
    fn group_len(&self) -> usize {
        self.cols / self.groups.map_or(1, |(groups, _)| groups)
    }

    /// Columns `start..start + n` of the `R` rows from `first`, out of a tensor shaped as these rows.
    #[inline(always)]
    fn block<'s, const R: usize>(
        &self,
        tensor: &'s [T],
        first: usize,
        start: usize,
        n: usize,
    ) -> [&'s [T]; R] {
        each(&tensor[..0], |r| {
            &tensor[(first + r) * self.cols..][start..][..n]
        })
    }

    /// The factor from x to x̃ where a group's squares add up to `squares`.
    #[inline(always)]
    fn inv_rms(&self, squares: T::Acc) -> T::Acc {
        match self.groups {
            Some((_, eps)) => {
                let mean = squares / T::Acc::from_count(self.group_len());
                (mean + T::Acc::from_f64(eps)).sqrt().recip()
            }
            None => T::Acc::ONE,
        }
    }

    /// The factors from x to x̃ of one group in each of `R` rows.
    #[inline(always)]
    fn inv_rms_of<const R: usize>(&self, x: &[&[T]; R]) -> [T::Acc; R] {
        each(T::Acc::ONE, |r| match self.groups {
            Some(_) => self.inv_rms(reduce(x[r].len(), Squares { x: x[r] })[0]),
            None => T::Acc::ONE,
        })
    }

    /// Columns that the sums of squares take: kept rows first, then padded ones if asked for.
    fn square_sums_width(&self, with_padded: bool) -> usize {
        self.cols * (1 + usize::from(with_padded && self.keep.is_some()))
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
    let width = rows.square_sums_width(with_padded);
    let sums = run(&SquareSumCols { rows }, &mut [], width);
    SquareSums::split(sums, rows.cols)
}

/// `y = x̃ ⊙ scale + shift`.
pub(super) fn normalize<T: Element>(rows: &Rows<T>, scale: &[T::Acc], shift: &[T::Acc]) -> Vec<T> {
    let kernel = Normalize { rows, scale, shift };
    write_and_sum(&kernel, 0).0
}

/// [`normalize`], with the column sums of x̃² taken on the way.
pub(super) fn normalize_and_sum<T: Element>(
    rows: &Rows<T>,
    scale: &[T::Acc],
    shift: &[T::Acc],
    with_padded: bool,
) -> (Vec<T>, SquareSums<T::Acc>) {
    let kernel = Normalize { rows, scale, shift };
    let width = rows.square_sums_width(with_padded);
    let (y, sums) = write_and_sum(&kernel, width);
    (y, SquareSums::split(sums, rows.cols))
}

/// Column sums of dy x̃ and dy over kept rows; `dy` is shaped as the rows.
pub(super) fn grad_sum_cols<T: Element>(rows: &Rows<T>, dy: &[T]) -> GradSums<T::Acc> {
    let sums = run(&GradSumCols { rows, dy }, &mut [], 2 * rows.cols);
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
        rows,
        dy,
        gain,
        decay,
    };
    write_and_sum(&kernel, 0).0
}

/// [`normalize_bwd`], with the sums of [`grad_sum_cols`] taken on the way.
pub(super) fn normalize_bwd_and_sum<T: Element>(
    rows: &Rows<T>,
    dy: &[T],
    gain: &[T::Acc],
    decay: &[T::Acc],
) -> (Vec<T>, GradSums<T::Acc>) {
    let kernel = NormalizeBwd {
        rows,
        dy,
        gain,
        decay,
    };
    let (dx, sums) = write_and_sum(&kernel, 2 * rows.cols);
    (dx, GradSums::split(sums, rows.cols))
}

/// Elements of a chunk. One chunk must outweigh the cost of handing it to a thread, and a sum over its
/// rows must stay short enough for f32.
const CHUNK: usize = 1 << 16;

/// The most chunks a call is cut into, so that partial sums stay small beside the rows.
const MAX_CHUNKS: usize = 256;

/// Inputs up to this many elements run on the calling thread: waking another costs more.
const SERIAL: usize = CHUNK;

/// Rows of a chunk, from the shape alone.
fn chunk_rows(rows: usize, cols: usize) -> usize {
    (CHUNK / cols).max(rows.div_ceil(MAX_CHUNKS)).max(1)
}

/// Rows worked on together, so that what a column needs is loaded once for all of them.
const BLOCK: usize = 4;

/// What is done to a block of rows.
trait Kernel<T: Element>: Sync {
    fn rows(&self) -> &Rows<'_, T>;

    /// Works on the `R` rows from `first`, which are all kept or all padded: writes their output to
    /// `out`, if the kernel has one, and adds to the chunk's `sums`, empty where none are wanted.
    ///
    /// Implementations are `#[inline(always)]`, so that they are compiled for each SIMD level.
    fn block<const R: usize>(
        &self,
        first: usize,
        keeps: bool,
        out: Option<&mut Piece<T>>,
        sums: &mut [T::Acc],
    );
}

/// Runs `kernel` into a fresh output shaped as its rows, and sums `width` columns on the way.
fn write_and_sum<T: Element>(kernel: &impl Kernel<T>, width: usize) -> (Vec<T>, Vec<T::Acc>) {
    let rows = kernel.rows();
    let mut sums = vec![];
    let piece = chunk_rows(rows.len(), rows.cols) * rows.cols;
    let out = written(rows.x.len(), piece, |pieces| {
        sums = run(kernel, pieces, width);
    });
    (out, sums)
}

/// Runs `kernel` over all chunks and returns the sums of its `width` columns.
fn run<T: Element, K: Kernel<T>>(kernel: &K, pieces: &mut [Piece<T>], width: usize) -> Vec<T::Acc> {
    let rows = kernel.rows();
    let chunk = chunk_rows(rows.len(), rows.cols);
    let count = rows.len().div_ceil(chunk);
    let mut partials = vec![T::Acc::ZERO; count * width];
    let mut pieces = pieces.iter_mut();
    let mut sums = partials.chunks_mut(width.max(1));
    let chunks: Vec<_> = (0..count)
        .map(|i| Chunk {
            kernel,
            rows: i * chunk..rows.len().min((i + 1) * chunk),
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
struct Chunk<'c, 'out, T, A, K> {
    kernel: &'c K,
    rows: Range<usize>,
    out: Option<&'c mut Piece<'out, T>>,
    sums: &'c mut [A],
}

impl<T: Element, K: Kernel<T>> WithSimd for Chunk<'_, '_, T, T::Acc, K> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        let rows = self.kernel.rows();
        let mut first = self.rows.start;
        while first < self.rows.end {
            let keeps = rows.keeps(first);
            let alike = (first..self.rows.end)
                .take(BLOCK)
                .take_while(|&row| rows.keeps(row) == keeps)
                .count();
            let out = self.out.as_deref_mut();
            if alike == BLOCK {
                self.kernel.block::<BLOCK>(first, keeps, out, self.sums);
                first += BLOCK;
            } else {
                self.kernel.block::<1>(first, keeps, out, self.sums);
                first += 1;
            }
        }
    }
}

/// Σ x².
struct Squares<'a, T> {
    x: &'a [T],
}

impl<T: Element> Reduction<T::Acc, 1> for Squares<'_, T> {
    #[inline(always)]
    fn at<const W: usize>(&self, start: usize) -> [Lanes<T::Acc, W>; 1] {
        let x = Lanes::load(self.x, start);
        [x * x]
    }
}

/// Where the squares of a row are added: nowhere (an empty slice) for a padded row, unless the sums have
/// room for those too.
#[inline(always)]
fn square_slot<A>(sums: &mut [A], keeps: bool, cols: usize) -> &mut [A] {
    let start = if keeps { 0 } else { cols };
    sums.get_mut(start..start + cols).unwrap_or_default()
}

struct SquareSumCols<'a, T> {
    rows: &'a Rows<'a, T>,
}

impl<T: Element> Kernel<T> for SquareSumCols<'_, T> {
    fn rows(&self) -> &Rows<'_, T> {
        self.rows
    }

    #[inline(always)]
    fn block<const R: usize>(
        &self,
        first: usize,
        keeps: bool,
        _: Option<&mut Piece<T>>,
        sums: &mut [T::Acc],
    ) {
        struct Step<'a, T: Element, const R: usize> {
            x: [&'a [T]; R],
            inv_rms: [T::Acc; R],
            sums: &'a mut [T::Acc],
        }
        impl<T: Element, const R: usize> Columns for Step<'_, T, R> {
            #[inline(always)]
            fn step<const W: usize>(&mut self, start: usize) {
                let mut sums = Lanes::<_, W>::load(self.sums, start);
                for r in 0..R {
                    let x = Lanes::load(self.x[r], start) * self.inv_rms[r];
                    sums += x * x;
                }
                sums.store(self.sums, start);
            }
        }
        let rows = self.rows;
        let sums = square_slot(sums, keeps, rows.cols);
        if sums.is_empty() {
            return;
        }
        let n = rows.group_len();
        for start in (0..rows.cols).step_by(n) {
            let x = rows.block::<R>(rows.x, first, start, n);
            let mut step = Step {
                inv_rms: rows.inv_rms_of(&x),
                x,
                sums: &mut sums[start..][..n],
            };
            sweep(n, &mut step);
        }
    }
}

struct Normalize<'a, T: Element> {
    rows: &'a Rows<'a, T>,
    scale: &'a [T::Acc],
    shift: &'a [T::Acc],
}

impl<T: Element> Kernel<T> for Normalize<'_, T> {
    fn rows(&self) -> &Rows<'_, T> {
        self.rows
    }

    #[inline(always)]
    fn block<const R: usize>(
        &self,
        first: usize,
        keeps: bool,
        out: Option<&mut Piece<T>>,
        sums: &mut [T::Acc],
    ) {
        struct Step<'a, 'b, 'out, T: Element, const R: usize> {
            x: [&'a [T]; R],
            inv_rms: [T::Acc; R],
            scale: &'a [T::Acc],
            shift: &'a [T::Acc],
            sums: &'a mut [T::Acc],
            y: &'a mut Block<'b, 'out, T, R>,
        }
        impl<T: Element, const R: usize> Columns for Step<'_, '_, '_, T, R> {
            #[inline(always)]
            fn step<const W: usize>(&mut self, start: usize) {
                let scale = Lanes::<_, W>::load(self.scale, start);
                let shift = Lanes::load(self.shift, start);
                let x: [_; R] = each(Lanes::ZERO, |r| {
                    Lanes::load(self.x[r], start) * self.inv_rms[r]
                });
                if !self.sums.is_empty() {
                    let mut sums = Lanes::load(self.sums, start);
                    for x in x {
                        sums += x * x;
                    }
                    sums.store(self.sums, start);
                }
                self.y
                    .put(each([T::zero(); W], |r| (x[r] * scale + shift).narrow()));
            }
        }
        let rows = self.rows;
        let Some(out) = out else { return };
        let mut y = out.block::<R>(rows.cols);
        let sums = square_slot(sums, keeps, rows.cols);
        let n = rows.group_len();
        for start in (0..rows.cols).step_by(n) {
            let x = rows.block::<R>(rows.x, first, start, n);
            let mut step = Step {
                inv_rms: rows.inv_rms_of(&x),
                x,
                scale: &self.scale[start..][..n],
                shift: &self.shift[start..][..n],
                sums: sums.get_mut(start..start + n).unwrap_or_default(),
                y: &mut y,
            };
            sweep(n, &mut step);
        }
    }
}

struct GradSumCols<'a, T> {
    rows: &'a Rows<'a, T>,
    dy: &'a [T],
}

impl<T: Element> Kernel<T> for GradSumCols<'_, T> {
    fn rows(&self) -> &Rows<'_, T> {
        self.rows
    }

    #[inline(always)]
    fn block<const R: usize>(
        &self,
        first: usize,
        keeps: bool,
        _: Option<&mut Piece<T>>,
        sums: &mut [T::Acc],
    ) {
        struct Step<'a, T: Element, const R: usize> {
            x: [&'a [T]; R],
            dy: [&'a [T]; R],
            inv_rms: [T::Acc; R],
            dy_x: &'a mut [T::Acc],
            dy_sum: &'a mut [T::Acc],
        }
        impl<T: Element, const R: usize> Columns for Step<'_, T, R> {
            #[inline(always)]
            fn step<const W: usize>(&mut self, start: usize) {
                let mut dy_x = Lanes::<_, W>::load(self.dy_x, start);
                let mut dy_sum = Lanes::<_, W>::load(self.dy_sum, start);
                for r in 0..R {
                    let x = Lanes::load(self.x[r], start) * self.inv_rms[r];
                    let dy = Lanes::load(self.dy[r], start);
                    dy_x += dy * x;
                    dy_sum += dy;
                }
                dy_x.store(self.dy_x, start);
                dy_sum.store(self.dy_sum, start);
            }
        }
        let rows = self.rows;
        if !keeps {
            return;
        }
        let (dy_x, dy_sum) = sums.split_at_mut(rows.cols);
        let n = rows.group_len();
        for start in (0..rows.cols).step_by(n) {
            let x = rows.block::<R>(rows.x, first, start, n);
            let mut step = Step {
                inv_rms: rows.inv_rms_of(&x),
                x,
                dy: rows.block(self.dy, first, start, n),
                dy_x: &mut dy_x[start..][..n],
                dy_sum: &mut dy_sum[start..][..n],
            };
            sweep(n, &mut step);
        }
    }
}

struct NormalizeBwd<'a, T: Element> {
    rows: &'a Rows<'a, T>,
    dy: &'a [T],
    gain: &'a [T::Acc],
    decay: &'a [T::Acc],
}

/// What the layer-scale's backward needs of a row's group, in one pass: Σ x², Σ gain dy x, Σ decay x².
struct GroupSums<'a, T: Element> {
    x: &'a [T],
    dy: &'a [T],
    gain: &'a [T::Acc],
    decay: &'a [T::Acc],
}

impl<T: Element> Reduction<T::Acc, 3> for GroupSums<'_, T> {
    #[inline(always)]
    fn at<const W: usize>(&self, start: usize) -> [Lanes<T::Acc, W>; 3] {
        let x = Lanes::load(self.x, start);
        let g = Lanes::load(self.dy, start) * Lanes::load(self.gain, start);
        let square = x * x;
        [square, g * x, Lanes::load(self.decay, start) * square]
    }
}

impl<T: Element> Kernel<T> for NormalizeBwd<'_, T> {
    fn rows(&self) -> &Rows<'_, T> {
        self.rows
    }

    #[inline(always)]
    fn block<const R: usize>(
        &self,
        first: usize,
        keeps: bool,
        out: Option<&mut Piece<T>>,
        sums: &mut [T::Acc],
    ) {
        struct Step<'a, 'b, 'out, T: Element, const R: usize> {
            x: [&'a [T]; R],
            dy: [&'a [T]; R],
            inv_rms: [T::Acc; R],
            mean: [T::Acc; R],
            gain: &'a [T::Acc],
            decay: &'a [T::Acc],
            dy_x: &'a mut [T::Acc],
            dy_sum: &'a mut [T::Acc],
            dx: &'a mut Block<'b, 'out, T, R>,
        }
        impl<T: Element, const R: usize> Columns for Step<'_, '_, '_, T, R> {
            #[inline(always)]
            fn step<const W: usize>(&mut self, start: usize) {
                let gain = Lanes::<_, W>::load(self.gain, start);
                let decay = Lanes::load(self.decay, start);
                let x: [_; R] = each(Lanes::ZERO, |r| {
                    Lanes::load(self.x[r], start) * self.inv_rms[r]
                });
                let dy: [_; R] = each(Lanes::ZERO, |r| Lanes::load(self.dy[r], start));
                if !self.dy_x.is_empty() {
                    let mut dy_x = Lanes::load(self.dy_x, start);
                    let mut dy_sum = Lanes::load(self.dy_sum, start);
                    for r in 0..R {
                        dy_x += dy[r] * x[r];
                        dy_sum += dy[r];
                    }
                    dy_x.store(self.dy_x, start);
                    dy_sum.store(self.dy_sum, start);
                }
                self.dx.put(each([T::zero(); W], |r| {
                    let dx_scaled = gain * dy[r] - decay * x[r] - x[r] * self.mean[r];
                    (dx_scaled * self.inv_rms[r]).narrow()
                }));
            }
        }
        /// Fills rows with zeros.
        struct Zero<'a, 'b, 'out, T, const R: usize>(&'a mut Block<'b, 'out, T, R>);
        impl<T: Element, const R: usize> Columns for Zero<'_, '_, '_, T, R> {
            #[inline(always)]
            fn step<const W: usize>(&mut self, _: usize) {
                self.0.put([Lanes::<_, W>::ZERO.narrow(); R]);
            }
        }
        let rows = self.rows;
        let Some(out) = out else { return };
        let mut dx = out.block::<R>(rows.cols);
        if !keeps {
            return sweep(rows.cols, &mut Zero(&mut dx));
        }
        let (dy_x, dy_sum) = sums.split_at_mut(sums.len() / 2);
        let n = rows.group_len();
        for start in (0..rows.cols).step_by(n) {
            let x = rows.block::<R>(rows.x, first, start, n);
            let dy = rows.block::<R>(self.dy, first, start, n);
            let gain = &self.gain[start..][..n];
            let decay = &self.decay[start..][..n];
            let mut inv_rms = [T::Acc::ONE; R];
            let mut mean = [T::Acc::ZERO; R];
            if rows.groups.is_some() {
                // dx = r (dx̃ − x̃ · mean over the group of dx̃ x̃), with x̃ = r x.
                for r in 0..R {
                    let group = GroupSums {
                        x: x[r],
                        dy: dy[r],
                        gain,
                        decay,
                    };
                    let [squares, gain_dy_x, decay_x2] = reduce(n, group);
                    inv_rms[r] = rows.inv_rms(squares);
                    mean[r] =
                        inv_rms[r] * (gain_dy_x - inv_rms[r] * decay_x2) / T::Acc::from_count(n);
                }
            }
            let mut step = Step {
                x,
                dy,
                inv_rms,
                mean,
                gain,
                decay,
                dy_x: dy_x.get_mut(start..start + n).unwrap_or_default(),
                dy_sum: dy_sum.get_mut(start..start + n).unwrap_or_default(),
                dx: &mut dx,
            };
            sweep(n, &mut step);
        }
    }
}
