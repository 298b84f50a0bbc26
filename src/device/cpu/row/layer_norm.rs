//! LayerNorm's passes over rows: `x̃ = r (x − μ)`, with the mean μ and the standard deviation 1/r
//! of the row.
//!
//! The row is one group. A pass usually reads it three times, from the first-level cache after the
//! first time: for the mean, for the squared distances to the mean, and for the output.
//!
//! The mean is computed twice. In f32 a mean of 1e4 is rounded by up to 0.0005, which for rows with
//! a deviation of 1 is half a thousandth of x̃. So the second walk also takes the mean of the
//! distances to the rounded mean, `rest`, and μ is `mean + rest`. For example, in f32
//!
//! ```text
//! x                  16777216, 16777216, 16777218      2²⁴, where f32 has every second integer
//! mean               16777216                          rounded, from 16777216 2/3
//! distances          0, 0, 2                           exact
//! rest               2/3                               so x − μ is −2/3, −2/3, 4/3
//! variance           (0 + 0 + 4)/3 − (2/3)² = 8/9      the mean of the squares of x − μ
//! ```
//!
//! In a row whose values are nearly the same, the rounding errors of a long sum can leave the first
//! mean several deviations away. Then both squares in the variance are large, and their difference
//! is noise. So if `rest` is more than a tenth of the deviation, the mean is computed again in f64,
//! and the second walk is repeated.

use super::group_scaling::Scaler;
use super::output::RowWriter;
use super::sweep::{Columns, Groups, Scaling, Target, Terms, sum_terms, sweep};
use super::vectors::{Lanes, Span};
use super::{BackwardSums, ColumnSums, Row, RowPass, UNROLL};
use crate::device::cpu::convert::{Accumulator, Element, PerChannel};
use crate::device::cpu::layout::Matrix;
use num_traits::{Float, Zero};
use pulp::Simd;

/// The statistics of a row: μ, which is `mean + rest`, and r.
#[derive(Clone, Copy)]
struct Statistics<A> {
    mean: A,
    rest: A,
    rms_inv: A,
}

impl<A: Accumulator> Statistics<A> {
    /// From the sums of the distances to the rounded mean.
    #[inline(always)]
    fn new<T: Element<Acc = A>>(
        scaler: &Scaler<A>,
        distances: &Distances<T>,
        rest: A,
        squares: A,
    ) -> Self {
        let Distances { x, mean, .. } = *distances;
        let variance = squares * scaler.share - rest * rest;
        // Rounding may leave a value below 0. `max` would drop a NaN.
        let variance = if variance < A::zero() {
            A::zero()
        } else {
            variance
        };
        Self {
            mean,
            rest,
            rms_inv: scaler.rms_inv(x, [mean, rest], variance),
        }
    }

    /// x̃.
    #[inline(always)]
    fn apply<S: Simd, T: Element<Acc = A>, const K: usize>(
        self,
        at: Span<S, A, K>,
        x: &[T],
    ) -> Lanes<S, A, K> {
        let distance = at.load(x) - at.splat(self.mean);
        (distance - at.splat(self.rest)) * at.splat(self.rms_inv)
    }
}

/// The rounded mean. Terms are divided before they are added, so that no sum overflows.
#[inline(always)]
fn mean<S: Simd, T: Element>(simd: S, scaler: &Scaler<T::Acc>, x: &[T]) -> T::Acc {
    let share = scaler.share;
    let [mean] = sum_terms::<4, 1, S, T::Acc>(simd, 0..x.len(), &Shares { x, share });
    mean
}

#[inline(always)]
fn statistics<S: Simd, T: Element>(
    simd: S,
    scaler: &Scaler<T::Acc>,
    x: &[T],
) -> Statistics<T::Acc> {
    let mut distances = Distances::new(scaler, x, mean(simd, scaler, x));
    loop {
        let [rest, squares] = sum_terms::<4, 2, S, T::Acc>(simd, 0..x.len(), &distances);
        if !distances.moves_mean(rest, squares) {
            return Statistics::new(scaler, &distances, rest, squares);
        }
    }
}

/// Σ x/n.
struct Shares<'a, T: Element> {
    x: &'a [T],
    share: T::Acc,
}

impl<T: Element> Terms<T::Acc, 1> for Shares<'_, T> {
    #[inline(always)]
    fn add<S: Simd, const K: usize>(
        &self,
        at: Span<S, T::Acc, K>,
        [mean]: &mut [Lanes<S, T::Acc, K>; 1],
    ) {
        *mean = at.load(self.x).mul_add(at.splat(self.share), *mean);
    }
}

/// Σ (x − mean)/n and Σ (x − mean)².
#[derive(Clone, Copy)]
struct Distances<'a, T: Element> {
    x: &'a [T],
    mean: T::Acc,
    share: T::Acc,
    has_moved: bool,
}

impl<'a, T: Element> Distances<'a, T> {
    #[inline(always)]
    fn new(scaler: &Scaler<T::Acc>, x: &'a [T], mean: T::Acc) -> Self {
        Self {
            x,
            mean,
            share: scaler.share,
            has_moved: false,
        }
    }

    /// Replaces the mean if it is off by more than a tenth of the deviation, or if the squares
    /// overflowed, perhaps only because it is off. Returns whether the sums must be taken again,
    /// which happens once at most.
    #[inline(always)]
    fn moves_mean(&mut self, rest: T::Acc, squares: T::Acc) -> bool {
        let moves = !self.has_moved && is_far(rest, squares * self.share);
        if moves {
            self.mean = mean_from_first(self.x);
            self.has_moved = true;
        }
        moves
    }
}

/// `rest` is more than a tenth of the root of the mean square, or that has overflowed.
#[inline(always)]
fn is_far<A: Accumulator>(rest: A, mean_square: A) -> bool {
    let ten_rests = A::from_f64(10.) * rest;
    ten_rests * ten_rests > mean_square || !mean_square.is_finite()
}

/// The mean, in f64: the first value, and the mean of the distances to it. So it is exact for equal
/// values, and otherwise rounded as little as the values are apart. Distances are halved and terms
/// divided before they are added, so that nothing overflows unless a distance to the mean does.
#[cold]
fn mean_from_first<A: Accumulator, T: Element<Acc = A>>(x: &[T]) -> A {
    let half = |x: &T| x.to_f64() / 2.;
    let first = x.first().map_or(0., half);
    let share = 2. / x.len() as f64;
    let distance: f64 = x.iter().map(|x| (half(x) - first) * share).sum();
    A::from_f64(2. * first + distance)
}

impl<T: Element> Terms<T::Acc, 2> for Distances<'_, T> {
    #[inline(always)]
    fn add<S: Simd, const K: usize>(
        &self,
        at: Span<S, T::Acc, K>,
        [rest, squares]: &mut [Lanes<S, T::Acc, K>; 2],
    ) {
        let distance = at.load(self.x) - at.splat(self.mean);
        *rest = distance.mul_add(at.splat(self.share), *rest);
        *squares = distance.mul_add(distance, *squares);
    }
}

/// `y = gain ⊙ x̃ + shift`.
pub(crate) struct Forward<'a, T: Element> {
    pub scaler: Scaler<T::Acc>,
    /// Gain and shift, `[C]` each.
    pub coefficients: &'a [PerChannel<T>; 2],
}

impl<T: Element> RowPass<T> for Forward<'_, T> {
    fn writes(&self) -> bool {
        true
    }

    /// LayerNorm has no statistics of channels.
    fn sums_per_column(&self) -> usize {
        0
    }

    #[inline(always)]
    fn row<S: Simd>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &mut Groups<T::Acc>,
        y: Option<&mut RowWriter<T>>,
        _: &mut [T::Acc],
    ) {
        let (x, cols) = (row.x, row.x.len());
        let [gain, shift] = self.coefficients;
        let mut columns = Output {
            x,
            statistics: statistics(simd, &self.scaler, x),
            gain: &gain[..cols],
            shift: &shift[..cols],
        };
        if let Some(y) = y {
            y.extend::<UNROLL, _>(simd, groups, &mut columns);
        }
    }
}

/// y.
struct Output<'a, T: Element> {
    x: &'a [T],
    statistics: Statistics<T::Acc>,
    gain: &'a [T::Acc],
    shift: &'a [T::Acc],
}

impl<T: Element> Columns<T::Acc> for Output<'_, T> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, T::Acc, K>,
        _: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let x = self.statistics.apply(at, self.x);
        x.mul_add(at.load(self.gain), at.load(self.shift))
    }
}

/// `g = gain ⊙ dy`, `dx = r (g − mean(g) − x̃ · mean(g x̃))`, Σ dy x̃ and Σ dy.
pub(crate) struct Backward<'a, T: Element> {
    pub dy: &'a Matrix<'a, T>,
    pub scaler: Scaler<T::Acc>,
    /// `[C]`. `None` if only sums are wanted.
    pub gain: Option<&'a PerChannel<T>>,
    pub sums: BackwardSums,
}

impl<T: Element> RowPass<T> for Backward<'_, T> {
    fn writes(&self) -> bool {
        self.gain.is_some()
    }

    fn sums_per_column(&self) -> usize {
        self.sums.per_column()
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
        let scaler = &self.scaler;
        let (x, cols) = (row.x, row.x.len());
        let dy = &self.dy.row(row.index)[..cols];
        let sums = ColumnSums::of(sums, cols);
        let (Some(dx), Some(gain)) = (dx, self.gain) else {
            let statistics = statistics(simd, scaler, x);
            let mut products = AddProducts {
                x,
                dy,
                statistics,
                sums,
            };
            return sweep::<UNROLL, _, T>(simd, groups, &mut products, Target::Nowhere);
        };
        let gain = &gain[..cols];
        let mut terms = BackwardTerms {
            distances: Distances::new(scaler, x, mean(simd, scaler, x)),
            dy,
            gain,
        };
        let [rest, squares, total, products] = loop {
            let sums = sum_terms::<2, 4, S, T::Acc>(simd, 0..cols, &terms);
            if !terms.distances.moves_mean(sums[0], sums[1]) {
                break sums;
            }
        };
        let statistics = Statistics::new(scaler, &terms.distances, rest, squares);
        // Σ g x̃, because x̃ = r (x − mean − rest) and the walk took Σ g and Σ g (x − mean).
        let mut total_x = statistics.rms_inv * (products - statistics.rest * total);
        if !total_x.is_finite() {
            total_x = terms.total_of_huge(statistics);
        }
        let mut columns = InputGradient {
            products: AddProducts {
                x,
                dy,
                statistics,
                sums,
            },
            gain,
            mean: total * scaler.share,
            mean_x: total_x * scaler.share,
        };
        dx.extend::<UNROLL, _>(simd, groups, &mut columns);
    }
}

/// The sums of [`Distances`], then Σ g and Σ g (x − mean).
struct BackwardTerms<'a, T: Element> {
    distances: Distances<'a, T>,
    dy: &'a [T],
    gain: &'a [T::Acc],
}

impl<T: Element> Terms<T::Acc, 4> for BackwardTerms<'_, T> {
    #[inline(always)]
    fn add<S: Simd, const K: usize>(
        &self,
        at: Span<S, T::Acc, K>,
        [rest, squares, total, products]: &mut [Lanes<S, T::Acc, K>; 4],
    ) {
        let Distances { x, mean, share, .. } = self.distances;
        let distance = at.load(x) - at.splat(mean);
        let gradient = at.load(self.gain) * at.load(self.dy);
        *rest = distance.mul_add(at.splat(share), *rest);
        *squares = distance.mul_add(distance, *squares);
        *total = *total + gradient;
        *products = gradient.mul_add(distance, *products);
    }
}

impl<T: Element> BackwardTerms<'_, T> {
    /// Σ g x̃ of a row for which a product with a distance itself overflows.
    #[cold]
    fn total_of_huge(&self, statistics: Statistics<T::Acc>) -> T::Acc {
        let mut total = T::Acc::zero();
        for i in 0..self.dy.len() {
            let distance = self.distances.x[i].widen() - statistics.mean - statistics.rest;
            total += self.gain[i] * self.dy[i].widen() * (statistics.rms_inv * distance);
        }
        total
    }
}

/// x̃, whose products with dy are added to Σ dy x̃, as dy is to Σ dy.
struct AddProducts<'a, T: Element> {
    x: &'a [T],
    dy: &'a [T],
    statistics: Statistics<T::Acc>,
    sums: ColumnSums<'a, T::Acc>,
}

impl<T: Element> AddProducts<'_, T> {
    /// Returns x̃ and dy.
    #[inline(always)]
    fn add<S: Simd, const K: usize>(&mut self, at: Span<S, T::Acc, K>) -> [Lanes<S, T::Acc, K>; 2] {
        let x = self.statistics.apply(at, self.x);
        let dy = at.load(self.dy);
        self.sums.add(at, x, dy);
        [x, dy]
    }
}

impl<T: Element> Columns<T::Acc> for AddProducts<'_, T> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, T::Acc, K>,
        _: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let [x, _] = self.add(at);
        x
    }
}

/// dx.
struct InputGradient<'a, T: Element> {
    products: AddProducts<'a, T>,
    gain: &'a [T::Acc],
    /// The mean of g.
    mean: T::Acc,
    /// The mean of g x̃.
    mean_x: T::Acc,
}

impl<T: Element> Columns<T::Acc> for InputGradient<'_, T> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, T::Acc, K>,
        _: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let [x, dy] = self.products.add(at);
        let centred = at.load(self.gain) * dy - at.splat(self.mean);
        (centred - x * at.splat(self.mean_x)) * at.splat(self.products.statistics.rms_inv)
    }
}
