//! LayerNorm: the mean μ of a row and its standard deviation 1/r, and the two means that its
//! backward subtracts.
//!
//! ```text
//! x̃ = r (x − μ)
//! dx = r (dx̃ − mean(dx̃) − x̃ · mean(dx̃ x̃))      with dx̃ = gain ⊙ dy
//! ```
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
use super::sweep::{Groups, Scaling, Terms, sum_terms};
use super::vectors::{Lanes, Span};
use crate::device::cpu::convert::{Accumulator, Element};
use num_traits::Zero;
use pulp::Simd;

/// The scaling of a row, which is one group.
impl<A: Accumulator> Scaler<A> {
    /// Sets μ and r of a row.
    #[inline(always)]
    pub fn centre<S: Simd, T: Element<Acc = A>>(&self, simd: S, x: &[T], groups: &mut Groups<A>) {
        let mut distances = Distances::new(simd, self, x);
        *groups.only_mut() = loop {
            let [rest, squares] = sum_terms::<4, 2, S, A>(simd, 0..x.len(), &distances);
            if !distances.moves_mean(rest, squares) {
                break distances.scaling(self, rest, squares);
            }
        };
    }

    /// Sets μ, r, mean(dx̃) and mean(dx̃ x̃) of a row.
    #[inline(always)]
    pub fn centre_bwd<S: Simd, T: Element<Acc = A>>(
        &self,
        simd: S,
        [x, dy]: [&[T]; 2],
        gain: &[A],
        groups: &mut Groups<A>,
    ) {
        let distances = Distances::new(simd, self, x);
        let mut terms = CentredTerms {
            distances,
            dy,
            gain,
        };
        let [rest, squares, total, products] = loop {
            let sums = sum_terms::<2, 4, S, A>(simd, 0..x.len(), &terms);
            if !terms.distances.moves_mean(sums[0], sums[1]) {
                break sums;
            }
        };
        let scaling = terms.distances.scaling(self, rest, squares);
        // Σ dx̃ x̃, because x̃ = r (x − mean − rest) and the walk took Σ dx̃ and Σ dx̃ (x − mean).
        let mut total_x = scaling.rms_inv * (products - rest * total);
        if !total_x.is_finite() {
            total_x = terms.total_of_huge(&scaling);
        }
        *groups.only_mut() = Scaling {
            mean_dx: total * self.share,
            mean_dx_x: total_x * self.share,
            ..scaling
        };
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
    /// Distances to the rounded mean. Its terms are divided before they are added, so that no sum
    /// overflows.
    #[inline(always)]
    fn new<S: Simd>(simd: S, scaler: &Scaler<T::Acc>, x: &'a [T]) -> Self {
        let share = scaler.share;
        let [mean] = sum_terms::<4, 1, S, T::Acc>(simd, 0..x.len(), &Shares { x, share });
        Self {
            x,
            mean,
            share,
            has_moved: false,
        }
    }

    /// μ and r, from the sums of the distances.
    #[inline(always)]
    fn scaling(&self, scaler: &Scaler<T::Acc>, rest: T::Acc, squares: T::Acc) -> Scaling<T::Acc> {
        // Not below 0. Either `rest²` is a hundredth of the mean square at most. Or the mean is
        // from f64, and `rest` about half the distance to the next float at most. Then every value
        // on that side is as far away as that float, which makes the mean square about twice
        // `rest²` at least.
        let variance = squares * scaler.share - rest * rest;
        Scaling {
            mean: self.mean,
            rest,
            rms_inv: scaler.rms_inv(self.x, [self.mean, rest], variance),
            ..Scaling::none()
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
/// values, and its error grows with the spread of the values, not with their size, until it is
/// rounded to `A`. Distances are halved and terms divided before they are added, so that nothing
/// overflows unless a distance to the mean does.
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

/// The sums of [`Distances`], then Σ dx̃ and Σ dx̃ (x − mean), where `dx̃ = gain ⊙ dy`.
struct CentredTerms<'a, T: Element> {
    distances: Distances<'a, T>,
    dy: &'a [T],
    gain: &'a [T::Acc],
}

impl<T: Element> Terms<T::Acc, 4> for CentredTerms<'_, T> {
    #[inline(always)]
    fn add<S: Simd, const K: usize>(
        &self,
        at: Span<S, T::Acc, K>,
        [rest, squares, total, products]: &mut [Lanes<S, T::Acc, K>; 4],
    ) {
        let Distances { x, mean, share, .. } = self.distances;
        let distance = at.load(x) - at.splat(mean);
        let dx = at.load(self.gain) * at.load(self.dy);
        *rest = distance.mul_add(at.splat(share), *rest);
        *squares = distance.mul_add(distance, *squares);
        *total = *total + dx;
        *products = dx.mul_add(distance, *products);
    }
}

impl<T: Element> CentredTerms<'_, T> {
    /// Σ dx̃ x̃ of a row for which a product with a distance itself overflows.
    #[cold]
    fn total_of_huge(&self, scaling: &Scaling<T::Acc>) -> T::Acc {
        let mut total = T::Acc::zero();
        for i in 0..self.dy.len() {
            let distance = self.distances.x[i].widen() - scaling.mean - scaling.rest;
            total += self.gain[i] * self.dy[i].widen() * (scaling.rms_inv * distance);
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::run::level::Level;
    use pulp::{Scalar, WithSimd};

    /// The scaling of a row in a forward, with ε = `eps`.
    struct Centre<'a, T> {
        x: &'a [T],
        eps: f64,
    }

    impl<T: Element> WithSimd for Centre<'_, T> {
        type Output = Scaling<T::Acc>;

        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            let mut groups = Groups::new(self.x.len(), self.x.len());
            Scaler::new(self.x.len(), self.eps).centre(simd, self.x, &mut groups);
            *groups.only_mut()
        }
    }

    /// The scaling of a row in a backward, without ε.
    struct CentreBwd<'a> {
        x: &'a [f32],
        dy: &'a [f32],
        gain: &'a [f32],
    }

    impl WithSimd for CentreBwd<'_> {
        type Output = Scaling<f32>;

        fn with_simd<S: Simd>(self, simd: S) -> Scaling<f32> {
            let mut groups = Groups::new(self.x.len(), self.x.len());
            let scaler = Scaler::new(self.x.len(), 0.);
            scaler.centre_bwd(simd, [self.x, self.dy], self.gain, &mut groups);
            *groups.only_mut()
        }
    }

    #[track_caller]
    fn assert_close(actual: f32, expected: f32) {
        let error = (actual - expected).abs();
        assert!(error <= 1e-6 * expected.abs(), "{actual:e}, {expected:e}");
    }

    /// The example at the top of this file.
    #[test]
    fn a_mean_between_two_floats() {
        let x = [16_777_216f32, 16_777_216., 16_777_218.];
        for level in Level::all() {
            let scaling = level.run(Centre { x: &x, eps: 0. });
            assert_eq!(scaling.mean, 16_777_216.);
            assert_close(scaling.rest, 2. / 3.);
            assert_close(scaling.rms_inv, (9f32 / 8.).sqrt());
        }
    }

    /// Sums of 1000 terms are rounded, but r is 1/√ε, and x − μ is 0.
    #[test]
    fn equal_values_are_their_mean() {
        for value in [0.1f32, 1.64e7, -3e34, f32::MAX] {
            for level in Level::all() {
                let x = [value; 1000];
                let scaling = level.run(Centre { x: &x, eps: 0.25 });
                assert_eq!(scaling.mean, value);
                assert_eq!((scaling.rest, scaling.rms_inv), (0., 2.), "{value}");
            }
        }
    }

    #[test]
    fn a_first_mean() {
        let scaler = Scaler::<f32>::new(3, 0.);
        assert_close(Distances::new(Scalar, &scaler, &[1f32, 2., 6.]).mean, 3.);
    }

    #[test]
    fn a_mean_from_the_first_value() {
        assert_eq!(mean_from_first(&[1f32, 2., 3., 6.]), 3.);
        assert_eq!(mean_from_first(&[f32::MAX, -f32::MAX]), 0.);
        assert_eq!(mean_from_first(&[f64::MAX; 3]), f64::MAX);
        assert_eq!(mean_from_first(&[f64::MAX, -f64::MAX]), 0.);
    }

    #[test]
    fn a_tenth_of_the_deviation_is_far() {
        for (rest, mean_square, far) in [
            (0.09, 1., false),
            (0.11, 1., true),
            (-0.11, 1., true),
            (0.19, 4., false),
            (0., 0., false),
            (0., f32::INFINITY, true),
            (0., f32::NAN, true),
        ] {
            assert_eq!(is_far(rest, mean_square), far, "{rest} {mean_square}");
        }
    }

    /// x̃ is [−1, 1], and dx̃ is [2, 6] times `of_dy`.
    fn backward(of_x: f32, of_dy: f32) -> [Scaling<f32>; 3] {
        let x = [of_x, 3. * of_x];
        let dy = [of_dy, 2. * of_dy];
        let gain = [2., 3.];
        Level::all().map(|level| {
            level.run(CentreBwd {
                x: &x,
                dy: &dy,
                gain: &gain,
            })
        })
    }

    #[test]
    fn backward_by_hand() {
        for scaling in backward(1., 1.) {
            assert_eq!(scaling.mean + scaling.rest, 2.);
            assert_eq!(scaling.rms_inv, 1.);
            assert_eq!((scaling.mean_dx, scaling.mean_dx_x), (4., 2.));
        }
    }

    /// Squares of distances overflow, and so do products of distances and gradients.
    #[test]
    fn backward_of_huge_values() {
        for scaling in backward(1e20, 1e30) {
            assert_close(scaling.mean + scaling.rest, 2e20);
            assert_close(scaling.rms_inv, 1e-20);
            assert_close(scaling.mean_dx, 4e30);
            assert_close(scaling.mean_dx_x, 2e30);
        }
    }
}
