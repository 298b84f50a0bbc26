//! LayerNorm's rows.
//!
//! ```text
//! x̃ = r (x − μ)                                 with r = 1/√(σ² + ε)
//! y = gain ⊙ x̃ + shift
//! dx = r (dx̃ − mean(dx̃) − x̃ · mean(dx̃ x̃))      with dx̃ = gain ⊙ dy
//! ```
//!
//! A row is usually read twice, the second time from the first-level cache: for μ and r, and for the
//! output.
//!
//! Σ x² and Σ x would give both in one walk, but if the mean is large beside the deviation, σ² is a
//! small difference of large numbers. So the walk takes the *shifted data* algorithm of textbooks: it
//! sums deviations from a number near the mean, and their squares. This number is the mean of the
//! first [`SAMPLE`] columns, `mean`. With the mean of the deviations from it, `shifted_mean`, μ is
//! `mean + shifted_mean`, and σ² is the mean of the squares − `shifted_mean²`. A single number for μ
//! would be rounded: in f32 a mean of 1e4 is rounded by up to 0.0005, which for rows with a deviation
//! of 1 is half a thousandth of x̃. For example, in f32
//!
//! ```text
//! x                  16777216, 16777216, 16777218      2²⁴, where f32 has every second integer
//! mean               16777216                          rounded, from 16777216 2/3
//! deviations         0, 0, 2                           exact
//! shifted_mean       2/3                               so x − μ is −2/3, −2/3, 4/3
//! variance           (0 + 0 + 4)/3 − (2/3)² = 8/9      the mean of the squares of x − μ
//! ```
//!
//! If `shifted_mean` is more than half the root of the mean square, σ² would again be a small
//! difference. Then the walk is repeated, up to twice:
//!
//! 1. The first columns lie elsewhere than the row. For a random row they rarely do: the deviation
//!    of their mean from μ is an eighth of the row's. The second walk is from `mean + shifted_mean`.
//! 2. The row's values are nearly the same, so that the rounding errors of the sums leave even that
//!    number several deviations away from μ. The third walk is from a mean computed in f64.

use super::group_scaling::Scaler;
use super::output::{RowWriter, write_row};
use super::spans::{for_spans, sum_spans};
use super::vectors::{Lanes, Span};
use super::{ColumnSums, UNROLL};
use crate::device::cpu::convert::{Accumulator, Element};
use candle::WithDType;
use pulp::Simd;

/// Writes y of a row.
#[inline(always)]
pub(crate) fn forward_row<S: Simd, T: Element>(
    simd: S,
    x: &[T],
    scaler: &Scaler<T::Acc>,
    [gain, shift]: [&[T::Acc]; 2],
    y: &mut RowWriter<T>,
) {
    let cols = x.len();
    let (gain, shift) = (&gain[..cols], &shift[..cols]);
    // Along the row: μ and r.
    let stats = scaler.centre(simd, x);
    // Down the columns: y.
    write_row!(T, y, cols, |row| {
        for_spans!(simd, UNROLL, 0..cols, row, |at| {
            let x = stats.normalized(at, x);
            let shift = at.load(shift);
            x.mul_add(at.load(gain), shift)
        });
    });
}

/// Writes dx of a row, and adds dy x̃ and dy to `sums`.
#[inline(always)]
pub(crate) fn backward_row<S: Simd, T: Element>(
    simd: S,
    [x, dy]: [&[T]; 2],
    scaler: &Scaler<T::Acc>,
    gain: &[T::Acc],
    dx: &mut RowWriter<T>,
    mut sums: ColumnSums<T::Acc>,
) {
    let cols = x.len();
    let (dy, gain) = (&dy[..cols], &gain[..cols]);
    // Along the row: μ, r, mean(dx̃) and mean(dx̃ x̃).
    let (stats, [mean_dx, mean_dx_x]) = scaler.centre_bwd(simd, [x, dy], gain);
    // Down the columns: Σ dy x̃ and Σ dy, and dx.
    write_row!(T, dx, cols, |row| {
        for_spans!(simd, UNROLL, 0..cols, row, |at| {
            let (x, dy) = (stats.normalized(at, x), at.load(dy));
            sums.add(at, x, dy);
            let dx = dy.mul_add(at.load(gain), at.splat(-mean_dx));
            x.mul_add(at.splat(-mean_dx_x), dx) * at.splat(stats.rstd)
        });
    });
}

/// Statistics of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowStats<A> {
    /// μ, as `mean + shifted_mean`: a number near it, and the mean of the deviations from that.
    mean: A,
    shifted_mean: A,
    /// r = 1/√(σ² + ε).
    rstd: A,
}

impl<A: Accumulator> RowStats<A> {
    /// x̃ in some columns.
    #[inline(always)]
    fn normalized<S: Simd, T: Element<Acc = A>, const K: usize>(
        &self,
        at: Span<S, A, K>,
        x: &[T],
    ) -> Lanes<S, A, K> {
        // r (x − mean − shifted_mean) as one multiply-add: r · shifted_mean is constant along the row.
        let (rstd, shift) = (
            at.splat(self.rstd),
            at.splat(-self.shifted_mean * self.rstd),
        );
        (at.load(x) + at.splat(-self.mean)).mul_add(rstd, shift)
    }
}

impl<A: Accumulator> Scaler<A> {
    /// μ and r of a row.
    #[inline(always)]
    fn centre<S: Simd, T: Element<Acc = A>>(&self, simd: S, x: &[T]) -> RowStats<A> {
        let mut mean = NearMean::new(simd, x);
        loop {
            let [shifted_mean, squares] =
                sum_spans!(simd, 4, 0..x.len(), |at, shifted_mean, squares| {
                    let deviation = at.load(x) + at.splat(-mean.value);
                    shifted_mean = deviation.mul_add(at.splat(self.inv_len), shifted_mean);
                    squares = deviation.mul_add(deviation, squares);
                });
            let mean_square = squares * self.inv_len;
            if !mean.moves(x, shifted_mean, mean_square) {
                return self.row_stats(x, mean.value, shifted_mean, mean_square);
            }
        }
    }

    /// μ and r of a row, and the means of dx̃ and of dx̃ x̃, where `dx̃ = gain ⊙ dy`.
    #[inline(always)]
    fn centre_bwd<S: Simd, T: Element<Acc = A>>(
        &self,
        simd: S,
        [x, dy]: [&[T]; 2],
        gain: &[A],
    ) -> (RowStats<A>, [A; 2]) {
        let mut mean = NearMean::new(simd, x);
        loop {
            let sums = sum_spans!(
                simd,
                2,
                0..x.len(),
                |at, shifted_mean, squares, total, products| {
                    let deviation = at.load(x) + at.splat(-mean.value);
                    let dx = at.load(gain) * at.load(dy);
                    shifted_mean = deviation.mul_add(at.splat(self.inv_len), shifted_mean);
                    squares = deviation.mul_add(deviation, squares);
                    total = total + dx;
                    products = dx.mul_add(deviation, products);
                }
            );
            let [shifted_mean, squares, total, products] = sums;
            let mean_square = squares * self.inv_len;
            if mean.moves(x, shifted_mean, mean_square) {
                continue;
            }
            let stats = self.row_stats(x, mean.value, shifted_mean, mean_square);
            // Σ dx̃ x̃, because x̃ = r (x − mean − shifted_mean), from Σ dx̃ and Σ dx̃ (x − mean).
            let mut total_x = stats.rstd * (products - shifted_mean * total);
            if !total_x.is_finite() {
                total_x = total_of_huge(&stats, [x, dy], gain);
            }
            return (stats, [total * self.inv_len, total_x * self.inv_len]);
        }
    }

    /// The statistics of a row, from the means of the deviations from `mean` and of their squares.
    #[inline(always)]
    fn row_stats<T: Element<Acc = A>>(
        &self,
        x: &[T],
        mean: A,
        shifted_mean: A,
        mean_square: A,
    ) -> RowStats<A> {
        // Never negative:
        // - `shifted_mean²` is a quarter of the mean square at most, or
        // - the mean is from f64, and `shifted_mean` about half the distance to the next float at
        //   most. Then every value on that side is as far away as that float, which makes the mean
        //   square about twice `shifted_mean²` at least.
        let variance = mean_square - shifted_mean * shifted_mean;
        RowStats {
            mean,
            shifted_mean,
            rstd: self.inv_rms(x, [mean, shifted_mean], variance),
        }
    }
}

/// The number of columns whose mean is the first number that deviations are taken from.
const SAMPLE: usize = 64;

/// A number near the mean of a row, from which deviations are taken.
struct NearMean<A> {
    value: A,
    /// How often it has been replaced.
    moves: u8,
}

impl<A: Accumulator> NearMean<A> {
    /// The mean of the first columns. Terms are divided before they are added, so that no sum
    /// overflows.
    #[inline(always)]
    fn new<S: Simd, T: Element<Acc = A>>(simd: S, x: &[T]) -> Self {
        let sample = x.len().min(SAMPLE);
        let share = A::from_f64(sample as f64).recip();
        let [value] = sum_spans!(simd, 4, 0..sample, |at, mean| {
            mean = at.load(x).mul_add(at.splat(share), mean);
        });
        Self { value, moves: 0 }
    }

    /// Replaces the number if it is too far from the mean, or if the squares overflowed, perhaps
    /// only because it is. Returns whether the sums must be taken again, which happens twice at
    /// most.
    #[inline(always)]
    fn moves<T: Element<Acc = A>>(&mut self, x: &[T], shifted_mean: A, mean_square: A) -> bool {
        let moves = self.moves < 2 && is_far(shifted_mean, mean_square);
        if moves {
            self.value = match self.moves {
                0 => self.value + shifted_mean,
                _ => mean_from_first(x),
            };
            self.moves += 1;
        }
        moves
    }
}

/// `shifted_mean` is more than half the root of the mean square, or that has overflowed.
#[inline(always)]
fn is_far<A: Accumulator>(shifted_mean: A, mean_square: A) -> bool {
    let twice = shifted_mean + shifted_mean;
    twice * twice > mean_square || !mean_square.is_finite()
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

/// Σ dx̃ x̃ of a row for which a product with a deviation itself overflows.
#[cold]
fn total_of_huge<T: Element>(
    stats: &RowStats<T::Acc>,
    [x, dy]: [&[T]; 2],
    gain: &[T::Acc],
) -> T::Acc {
    let products = (0..x.len()).map(|i| {
        let deviation = x[i].widen() - stats.mean - stats.shifted_mean;
        gain[i] * dy[i].widen() * (stats.rstd * deviation)
    });
    T::Acc::from_f64(products.map(WithDType::to_f64).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::run::level::Level;
    use pulp::{Scalar, WithSimd};

    /// The statistics of a row in a forward, with ε = `eps`.
    struct Centre<'a, T> {
        x: &'a [T],
        eps: f64,
    }

    impl<T: Element> WithSimd for Centre<'_, T> {
        type Output = RowStats<T::Acc>;

        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            Scaler::new(self.x.len(), self.eps).centre(simd, self.x)
        }
    }

    /// The statistics of a row in a backward, without ε.
    struct CentreBwd<'a> {
        x: &'a [f32],
        dy: &'a [f32],
        gain: &'a [f32],
    }

    impl WithSimd for CentreBwd<'_> {
        type Output = (RowStats<f32>, [f32; 2]);

        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            Scaler::new(self.x.len(), 0.).centre_bwd(simd, [self.x, self.dy], self.gain)
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
            let stats = level.run(Centre { x: &x, eps: 0. });
            assert_eq!(stats.mean, 16_777_216.);
            assert_close(stats.shifted_mean, 2. / 3.);
            assert_close(stats.rstd, (9f32 / 8.).sqrt());
        }
    }

    /// Sums of 1000 terms are rounded, but r is 1/√ε, and x − μ is 0.
    #[test]
    fn equal_values_are_their_mean() {
        for value in [0.1f32, 1.64e7, -3e34, f32::MAX] {
            for level in Level::all() {
                let x = [value; 1000];
                let stats = level.run(Centre { x: &x, eps: 0.25 });
                assert_eq!(stats.mean, value);
                assert_eq!((stats.shifted_mean, stats.rstd), (0., 2.), "{value}");
            }
        }
    }

    #[test]
    fn a_first_mean() {
        assert_close(NearMean::new(Scalar, &[1f32, 2., 6.]).value, 3.);
        let mut x = [5f32; 2 * SAMPLE];
        x[SAMPLE..].fill(7.);
        assert_eq!(NearMean::new(Scalar, &x).value, 5.);
    }

    /// First by what the walk found, then to the mean in f64, and then no more.
    #[test]
    fn a_number_near_the_mean_moves_twice() {
        let x = [1f32, 2., 6.];
        let of = |value| NearMean { value, moves: 0 };
        let mut mean = of(1.);
        for (moves, value) in [(true, 5.), (true, 3.), (false, 3.)] {
            assert_eq!(mean.moves(&x, 4., 1.), moves);
            assert_eq!(mean.value, value);
        }
        let mut near = of(2.75);
        assert!(!near.moves(&x, 0.25, 1.));
        assert_eq!(near.value, 2.75);
    }

    /// The first columns lie a deviation or four away from μ, so that the second walk begins at μ.
    #[test]
    fn first_columns_that_lie_elsewhere() {
        for elsewhere in [512, 64] {
            let x: Vec<f32> = (0..1024)
                .map(|i| if i < elsewhere { 3. } else { 7. } + (i % 2) as f32)
                .collect();
            let dy: Vec<f32> = (0..1024).map(|i| x[i] - (i % 3) as f32).collect();
            let gain = [0.5; 1024];
            let mean_of = |f: &dyn Fn(usize) -> f64| (0..1024).map(f).sum::<f64>() / 1024.;
            let mean = mean_of(&|i| f64::from(x[i]));
            let variance = mean_of(&|i| (f64::from(x[i]) - mean).powi(2));
            let rstd = variance.sqrt().recip();
            let mean_dx = mean_of(&|i| 0.5 * f64::from(dy[i]));
            let mean_dx_x = mean_of(&|i| 0.5 * f64::from(dy[i]) * rstd * (f64::from(x[i]) - mean));
            for level in Level::all() {
                let forward = level.run(Centre { x: &x, eps: 0. });
                let (x, dy, gain) = (&x, &dy, &gain);
                let (backward, means) = level.run(CentreBwd { x, dy, gain });
                for stats in [forward, backward] {
                    assert_close(stats.mean, mean as f32);
                    assert!(stats.shifted_mean.abs() < 1e-6, "{:e}", stats.shifted_mean);
                    assert_close(stats.rstd, rstd as f32);
                }
                assert_close(means[0], mean_dx as f32);
                assert_close(means[1], mean_dx_x as f32);
            }
        }
    }

    #[test]
    fn a_mean_from_the_first_value() {
        assert_eq!(mean_from_first(&[1f32, 2., 3., 6.]), 3.);
        assert_eq!(mean_from_first(&[f32::MAX, -f32::MAX]), 0.);
        assert_eq!(mean_from_first(&[f64::MAX; 3]), f64::MAX);
        assert_eq!(mean_from_first(&[f64::MAX, -f64::MAX]), 0.);
    }

    #[test]
    fn half_a_deviation_is_far() {
        for (shifted_mean, mean_square, far) in [
            (0.49, 1., false),
            (0.51, 1., true),
            (-0.51, 1., true),
            (0.99, 4., false),
            (0., 0., false),
            (0., f32::INFINITY, true),
            (0., f32::NAN, true),
        ] {
            assert_eq!(
                is_far(shifted_mean, mean_square),
                far,
                "{shifted_mean} {mean_square}"
            );
        }
    }

    /// x̃ is [−1, 1], and dx̃ is [2, 6] times `of_dy`.
    fn backward(of_x: f32, of_dy: f32) -> [(RowStats<f32>, [f32; 2]); 3] {
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
        for (stats, means) in backward(1., 1.) {
            assert_eq!(stats.mean + stats.shifted_mean, 2.);
            assert_eq!(stats.rstd, 1.);
            assert_eq!(means, [4., 2.]);
        }
    }

    /// Squares of deviations overflow, and so do products of deviations and gradients.
    #[test]
    fn backward_of_huge_values() {
        for (stats, means) in backward(1e20, 1e30) {
            assert_close(stats.mean + stats.shifted_mean, 2e20);
            assert_close(stats.rstd, 1e-20);
            assert_close(means[0], 4e30);
            assert_close(means[1], 2e30);
        }
    }
}
