//! Group scaling: r of each group of a row, and the mean that its backward subtracts.
//!
//! A forward computes `x̃ = r x` with `r = 1/√(mean(x²) + ε)` over a group. Its backward takes
//! `dx̃ = gain ⊙ dy − decay ⊙ x̃` back to `dx = r (dx̃ − x̃ · mean(dx̃ x̃))`. Both r and the mean
//! come from one walk over the group, although dx̃ and x̃ are made with r. Because x̃ = r x,
//!
//! ```text
//! Σ dx̃ x̃ = Σ (gain dy − decay r x) r x = r (Σ gain dy x − r Σ decay x²)
//! ```
//!
//! so that the walk sums x², gain dy x and decay x², and r comes in afterwards.
//!
//! Squares of finite values may overflow: those of f32 above 1.8e19. Then r and the mean are
//! computed once more, with values that are divided first. These functions are `#[cold]`: plain
//! loops in the dtype of the sums.

use super::sweep::{Groups, Terms, sum_terms};
use super::vectors::{Lanes, Span};
use crate::device::cpu::convert::{Accumulator, Element};
use candle::WithDType;
use num_traits::{Float, Zero};
use pulp::Simd;
use std::ops::Range;

/// Computes the scaling of groups of one length.
#[derive(Clone, Copy)]
pub(crate) struct Scaler<A> {
    /// 1 over the number of channels in a group.
    pub share: A,
    eps: A,
}

impl<A: Accumulator> Scaler<A> {
    pub fn new(group_len: usize, eps: f64) -> Self {
        Self {
            share: A::one() / A::from_f64(group_len as f64),
            eps: A::from_f64(eps),
        }
    }

    /// Sets r of each group of a row.
    #[inline(always)]
    pub fn scale<S: Simd, T: Element<Acc = A>>(&self, simd: S, x: &[T], groups: &mut Groups<A>) {
        for (group, scaling) in groups.each_mut() {
            let [squares] = sum_terms::<4, 1, S, A>(simd, group.clone(), &Squares { x });
            scaling.rms_inv = self.rms_inv(&x[group], [A::zero(); 2], squares * self.share);
        }
    }

    /// Sets r and mean(dx̃ x̃) of each group of a row.
    #[inline(always)]
    pub fn scale_bwd<S: Simd, T: Element<Acc = A>>(
        &self,
        simd: S,
        terms: &BackwardTerms<T>,
        groups: &mut Groups<A>,
    ) {
        for (group, scaling) in groups.each_mut() {
            let [squares, gain_dy_x, decay_x2] =
                sum_terms::<2, 3, S, A>(simd, group.clone(), terms);
            let x = &terms.x[group.clone()];
            let rms_inv = self.rms_inv(x, [A::zero(); 2], squares * self.share);
            let total = rms_inv * (gain_dy_x - rms_inv * decay_x2);
            let total = if total.is_finite() {
                total
            } else {
                terms.total_of_huge(rms_inv, group)
            };
            scaling.rms_inv = rms_inv;
            scaling.mean_dx_x = total * self.share;
        }
    }

    /// r of a group, from the mean of its squares.
    ///
    /// LayerNorm passes the mean of the squared distances to the group's mean, which is the sum of
    /// both parts of `mean`. Elsewhere they are 0.
    #[inline(always)]
    pub fn rms_inv<T: Element<Acc = A>>(&self, x: &[T], mean: [A; 2], mean_square: A) -> A {
        let square = mean_square + self.eps;
        if square.is_finite() {
            square.sqrt().recip()
        } else {
            self.rms_inv_of_huge(x, mean)
        }
    }

    /// r of a group whose mean square overflows, with or without ε.
    ///
    /// x and √ε are divided by the largest |x| before they are squared. For x = [3e30, 4e30] in
    /// f32 the squares overflow, while those of [0.75, 1] have the mean 0.78, and
    /// r = 1/(4e30 · √0.78). If x is not finite, r is NaN: the output shows that, and recipe
    /// Paper's guard keeps the batch out of the statistics.
    #[cold]
    fn rms_inv_of_huge<T: Element<Acc = A>>(&self, x: &[T], [mean, rest]: [A; 2]) -> A {
        let x = || x.iter().map(|&x| x.widen() - mean - rest);
        if !x().all(Float::is_finite) {
            return A::nan();
        }
        let largest = x().map(Float::abs).fold(A::zero(), Float::max);
        // In f64, because the rounding errors of a long sum in f32 would add up.
        let wide = |x: A| WithDType::to_f64(x);
        let squares: f64 = x().map(|x| wide(x / largest).powi(2)).sum();
        let square = squares / x().len() as f64 + wide(self.eps / largest / largest);
        A::from_f64((wide(largest) * square.sqrt()).recip())
    }
}

/// Σ x² of a group.
struct Squares<'a, T> {
    x: &'a [T],
}

impl<T: Element> Terms<T::Acc, 1> for Squares<'_, T> {
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

/// Σ x², Σ gain dy x and Σ decay x² of a group.
pub(crate) struct BackwardTerms<'a, T: Element> {
    pub x: &'a [T],
    pub dy: &'a [T],
    pub gain: &'a [T::Acc],
    pub decay: &'a [T::Acc],
}

impl<T: Element> Terms<T::Acc, 3> for BackwardTerms<'_, T> {
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

impl<T: Element> BackwardTerms<'_, T> {
    /// Σ dx̃ x̃ of a group for which a product with x itself overflows.
    #[cold]
    fn total_of_huge(&self, rms_inv: T::Acc, group: Range<usize>) -> T::Acc {
        let mut total = T::Acc::zero();
        for i in group {
            let x = rms_inv * self.x[i].widen();
            total += (self.gain[i] * self.dy[i].widen() - self.decay[i] * x) * x;
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::run::level::Level;
    use half::f16;
    use pulp::WithSimd;

    /// r and the mean of each group of a row.
    struct ScaleBwd<'a, T: Element> {
        scaler: Scaler<T::Acc>,
        terms: BackwardTerms<'a, T>,
        group_len: usize,
    }

    impl<T: Element> WithSimd for ScaleBwd<'_, T> {
        type Output = Vec<[T::Acc; 2]>;

        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            let mut groups = Groups::new(self.terms.x.len(), self.group_len);
            self.scaler.scale_bwd(simd, &self.terms, &mut groups);
            let scalings = groups.each_mut().map(|(_, scaling)| *scaling);
            scalings.map(|s| [s.rms_inv, s.mean_dx_x]).collect()
        }
    }

    #[test]
    fn r_by_hand() {
        // The mean square of [3, 4] is 12.5, and 12.25 + 0.25 is a square.
        let scaler = Scaler::<f32>::new(2, 0.);
        assert_eq!(scaler.share, 0.5);
        assert_eq!(scaler.rms_inv(&[3f32, 4.], [0., 0.], 12.25), 1. / 3.5);
        let scaler = Scaler::<f32>::new(2, 0.25);
        assert_eq!(scaler.rms_inv(&[0f32, 0.], [0., 0.], 0.), 2.);
        assert_eq!(scaler.rms_inv(&[3f32, 4.], [0., 0.], 12.), 1. / 3.5);
    }

    /// The rounding errors of a sum in f32 would change r by 3e-4.
    #[test]
    fn r_of_a_long_row_of_huge_values() {
        let x: Vec<f32> = (0..100_000).map(|i| [3e30, 1e30][i % 2]).collect();
        let r = Scaler::new(x.len(), 1e-5).rms_inv(&x, [0., 0.], f32::INFINITY);
        let exact = 1. / 5e60f64.sqrt();
        assert!((f64::from(r) / exact - 1.).abs() < 2e-7, "{r:e}");
    }

    /// Squares overflow, and the largest magnitude is negative.
    #[test]
    fn r_of_huge_values() {
        let scaler = Scaler::<f32>::new(2, 1e-5);
        let r = scaler.rms_inv(&[3e30f32, -4e30], [0., 0.], f32::INFINITY);
        let exact = 1. / (12.5e60f64).sqrt();
        assert!((f64::from(r) / exact - 1.).abs() < 1e-6, "{r:e}");
        // Distances to a mean of 2e30 are 1e30 and −1e30.
        let r = scaler.rms_inv(&[3e30f32, 1e30], [1.5e30, 0.5e30], f32::INFINITY);
        assert!((f64::from(r) / 1e-30 - 1.).abs() < 1e-6, "{r:e}");
        // ε alone takes the mean square beyond f32: √ε is 1e19, as x is.
        let scaler = Scaler::<f32>::new(1, 1e38);
        let r = scaler.rms_inv(&[1e19f32], [0., 0.], 3.4e38);
        assert!(
            (f64::from(r) / (1e-19 / 2f64.sqrt()) - 1.).abs() < 1e-6,
            "{r:e}"
        );
    }

    #[test]
    fn r_is_nan_if_a_value_is_not_finite() {
        let scaler = Scaler::<f32>::new(2, 1e-5);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(scaler.rms_inv(&[1., bad], [0., 0.], bad * bad).is_nan());
        }
    }

    /// Two groups of two columns, which are shorter than most vectors. With ε = 0, r of [1, 7] is
    /// 1/5, and r of [3, 3] is 1/3.
    #[test]
    fn backward_by_hand() {
        let (x, dy) = ([1., 7., 3., 3.], [5., 10., 1., 2.]);
        let (gain, decay) = ([1., 2., 3., 3.], [0., 5., 9., 0.]);
        // dx̃ = gain dy − decay r x: [5, 20 − 5 · 1.4 = 13], [3 − 9 · 1 = −6, 6].
        // dx̃ x̃: [1, 18.2], [−6, 6].
        for level in Level::all() {
            let got = level.run(ScaleBwd::<f64> {
                scaler: Scaler::new(2, 0.),
                terms: BackwardTerms {
                    x: &x,
                    dy: &dy,
                    gain: &gain,
                    decay: &decay,
                },
                group_len: 2,
            });
            for (got, expected) in got.iter().zip([[0.2, 9.6], [1. / 3., 0.]]) {
                for (got, expected) in got.iter().zip(expected) {
                    assert!(
                        (got - expected).abs() < 1e-14,
                        "{level:?}: {got} {expected}"
                    );
                }
            }
        }
    }

    /// The mean is that of the same group when it is scaled down, where nothing overflows.
    #[test]
    fn backward_of_huge_values() {
        let scale = 2f32.powi(100);
        let of = |x: [f32; 3]| {
            Level::Baseline.run(ScaleBwd::<f32> {
                scaler: Scaler::new(3, 1e-30),
                terms: BackwardTerms {
                    x: &x,
                    dy: &[1., -2., 4.],
                    gain: &[0.5, 1., 2.],
                    decay: &[1., 2., 1.],
                },
                group_len: 3,
            })[0]
        };
        let [r, mean] = of([1., 2., -3.]);
        let [huge_r, huge_mean] = of([scale, 2. * scale, -3. * scale]);
        assert!((huge_r * scale / r - 1.).abs() < 1e-6, "{huge_r} {r}");
        assert!((huge_mean / mean - 1.).abs() < 1e-6, "{huge_mean} {mean}");
    }

    /// The smallest subnormal f16 has a square far below f16, but not below the sums' f32.
    #[test]
    fn subnormal_rows_are_scaled() {
        let smallest = f16::from_bits(1);
        let [[r, _]] = Level::Baseline.run(ScaleBwd::<f16> {
            scaler: Scaler::new(3, 1e-30),
            terms: BackwardTerms {
                x: &[smallest; 3],
                dy: &[f16::ONE; 3],
                gain: &[1.; 3],
                decay: &[0.; 3],
            },
            group_len: 3,
        })[..] else {
            panic!("one group")
        };
        assert!((r / 2f32.powi(24) - 1.).abs() < 1e-6, "{r}");
    }
}
