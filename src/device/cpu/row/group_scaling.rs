//! Rows that are divided by the root mean square of their groups, or that are not normalized by
//! themselves.
//!
//! A forward computes x̃ and `y = gain ⊙ x̃ + shift`, and its backward takes
//! `dx̃ = gain ⊙ dy − decay ⊙ x̃` back to dx, with `neg_decay = −decay`:
//!
//! ```text
//! x̃ = r x                                    with r = 1/√(mean(x²) + ε) of each group
//! dx = r (dx̃ − x̃ · mean(dx̃ x̃))
//! ```
//!
//! `step.rs` folds everything that a channel has into the two coefficients: γ/D and β in a forward,
//! and those of dx̃ in a backward. So a row needs two coefficients for each channel, whatever the
//! recipe, statistic and phase. The decay comes with its sign changed, so that dx̃ is a product and a
//! multiply-add. Rows of a PowerNorm without group scaling have r = 1, and are not walked for it.
//! RMSNorm and `GroupScaling` are these rows with D = 1.
//!
//! In a backward both r and the mean come from one walk over the group, although dx̃ and x̃ are made
//! with r. Because x̃ = r x,
//!
//! ```text
//! Σ dx̃ x̃ = Σ (gain dy − decay r x) r x = r (Σ gain dy x − r Σ decay x²)
//! ```
//!
//! so that the walk sums x², gain dy x and −decay x², and r comes in afterwards.
//!
//! Squares of finite values may overflow: those of f32 above 1.8e19. Then r and the mean are
//! computed once more, with values that are divided first. These functions are `#[cold]`: plain
//! loops, which add up in f64.

use super::output::{RowWriter, write_row};
use super::spans::{for_spans, sum_spans};
use super::vectors::{Lanes, Span};
use super::{ColumnSums, UNROLL};
use crate::device::cpu::convert::{Accumulator, Element};
use candle::WithDType;
use num_traits::Float;
use pulp::Simd;
use std::ops::Range;

/// Writes y of a row, with the gain and shift of each channel, and adds x̃² to `sums` if there are
/// any. The row is normalized by itself if there is a `scaler`.
#[inline(always)]
pub(crate) fn forward_row<S: Simd, T: Element>(
    simd: S,
    x: &[T],
    scaler: Option<&Scaler<T::Acc>>,
    groups: &mut Groups<T::Acc>,
    y: &mut RowWriter<T>,
    [gain, shift]: [&[T::Acc]; 2],
    mut sums: Option<&mut [T::Acc]>,
) {
    // Along the row: r.
    if let Some(scaler) = scaler {
        scaler.scale(simd, x, groups);
    }
    // Down the columns: Σ x̃², and y.
    let cols = x.len();
    let (gain, shift) = (&gain[..cols], &shift[..cols]);
    write_row!(T, y, cols, |row| {
        for (columns, &GroupStats { inv_rms, .. }) in groups.each(cols) {
            for_spans!(simd, UNROLL, columns, row, |at| {
                let x = at.load(x) * at.splat(inv_rms);
                add_square(at, x, &mut sums);
                let shift = at.load(shift);
                x.mul_add(at.load(gain), shift)
            });
        }
    });
}

/// Adds x̃² of a row to `sums`, and writes nothing.
#[inline(always)]
pub(crate) fn square_row<S: Simd, T: Element>(
    simd: S,
    x: &[T],
    scaler: Option<&Scaler<T::Acc>>,
    groups: &mut Groups<T::Acc>,
    mut sums: Option<&mut [T::Acc]>,
) {
    if let Some(scaler) = scaler {
        scaler.scale(simd, x, groups);
    }
    for (columns, &GroupStats { inv_rms, .. }) in groups.each(x.len()) {
        for_spans!(simd, UNROLL, columns, |at| {
            let x = at.load(x) * at.splat(inv_rms);
            add_square(at, x, &mut sums);
        });
    }
}

/// Adds x̃² of some columns to Σ x̃².
#[inline(always)]
fn add_square<S: Simd, A: Accumulator, const K: usize>(
    at: Span<S, A, K>,
    x: Lanes<S, A, K>,
    sums: &mut Option<&mut [A]>,
) {
    if let Some(sums) = sums {
        at.store(x.mul_add(x, at.load(sums)), sums);
    }
}

/// Writes dx of a row, with the gain and −decay of each channel, and adds dy x̃ and dy to `sums`. The
/// row is normalized by itself if there is a `scaler`.
#[inline(always)]
pub(crate) fn backward_row<S: Simd, T: Element>(
    simd: S,
    [x, dy]: [&[T]; 2],
    scaler: Option<&Scaler<T::Acc>>,
    groups: &mut Groups<T::Acc>,
    dx: &mut RowWriter<T>,
    [gain, neg_decay]: [&[T::Acc]; 2],
    mut sums: ColumnSums<T::Acc>,
) {
    let cols = x.len();
    let (dy, gain, neg_decay) = (&dy[..cols], &gain[..cols], &neg_decay[..cols]);
    // Along the row: r and mean(dx̃ x̃).
    if let Some(scaler) = scaler {
        scaler.scale_bwd(simd, [x, dy], [gain, neg_decay], groups);
    }
    // Down the columns: Σ dy x̃ and Σ dy, and dx.
    write_row!(T, dx, cols, |row| {
        for (columns, group) in groups.each(cols) {
            let &GroupStats { inv_rms, mean_dx_x } = group;
            for_spans!(simd, UNROLL, columns, row, |at| {
                let x = at.load(x) * at.splat(inv_rms);
                let dy = at.load(dy);
                sums.add(at, x, dy);
                let dx = dy.mul_add(at.load(gain), at.load(neg_decay) * x);
                x.mul_add(at.splat(-mean_dx_x), dx) * at.splat(inv_rms)
            });
        }
    });
}

/// Adds dy x̃ and dy of a row to `sums`, and writes nothing.
#[inline(always)]
pub(crate) fn sum_row<S: Simd, T: Element>(
    simd: S,
    [x, dy]: [&[T]; 2],
    scaler: Option<&Scaler<T::Acc>>,
    groups: &mut Groups<T::Acc>,
    mut sums: ColumnSums<T::Acc>,
) {
    if let Some(scaler) = scaler {
        scaler.scale(simd, x, groups);
    }
    let dy = &dy[..x.len()];
    for (columns, &GroupStats { inv_rms, .. }) in groups.each(x.len()) {
        for_spans!(simd, UNROLL, columns, |at| {
            let x = at.load(x) * at.splat(inv_rms);
            sums.add(at, x, at.load(dy));
        });
    }
}

/// The groups of a row, which make up its columns, in order.
pub(crate) struct Groups<A> {
    /// The number of columns in a group.
    len: usize,
    /// Of a row that is one group.
    one: [GroupStats<A>; 1],
    /// Of a row that has more, so that only such rows allocate.
    more: Vec<GroupStats<A>>,
}

/// Statistics of one group: r, and in a backward the mean of dx̃ x̃. Without a normalization of rows
/// they stay 1 and 0, which leaves x̃ = x and dx = dx̃.
#[derive(Clone, Copy)]
pub(crate) struct GroupStats<A> {
    /// r.
    pub inv_rms: A,
    /// The mean of dx̃ x̃.
    pub mean_dx_x: A,
}

impl<A: Accumulator> Groups<A> {
    /// `cols` columns in groups of `len`, not scaled.
    ///
    /// # Panics
    ///
    /// If some columns are in no group.
    #[inline(always)]
    pub fn new(cols: usize, len: usize) -> Self {
        assert!(
            cols.is_multiple_of(len),
            "{cols} columns in groups of {len}"
        );
        let none = GroupStats {
            inv_rms: A::one(),
            mean_dx_x: A::zero(),
        };
        let count = cols / len;
        Self {
            len,
            one: [none],
            more: if count == 1 {
                vec![]
            } else {
                vec![none; count]
            },
        }
    }

    /// The columns and the statistics of each group of a row, which has `cols` columns.
    ///
    /// # Panics
    ///
    /// If it has fewer. So the compiler knows that these columns are in the row's arrays.
    #[inline(always)]
    pub fn each(&self, cols: usize) -> impl Iterator<Item = (Range<usize>, &GroupStats<A>)> {
        let (len, mut end) = (self.len, 0);
        let stats = match self.more.is_empty() {
            true => &self.one[..],
            false => &self.more,
        };
        stats.iter().map(move |stats| {
            let start = end;
            end += len;
            assert!(end <= cols, "a group beyond the row");
            (start..end, stats)
        })
    }

    /// The same, to set the statistics.
    #[inline(always)]
    pub fn each_mut(
        &mut self,
        cols: usize,
    ) -> impl Iterator<Item = (Range<usize>, &mut GroupStats<A>)> {
        let (len, mut end) = (self.len, 0);
        let stats = match self.more.is_empty() {
            true => &mut self.one[..],
            false => &mut self.more,
        };
        stats.iter_mut().map(move |stats| {
            let start = end;
            end += len;
            assert!(end <= cols, "a group beyond the row");
            (start..end, stats)
        })
    }
}

/// Computes the statistics of groups of one length, and LayerNorm's of rows.
#[derive(Clone, Copy)]
pub(crate) struct Scaler<A> {
    /// 1 over the number of channels in a group.
    pub inv_len: A,
    eps: A,
}

impl<A: Accumulator> Scaler<A> {
    pub fn new(group_len: usize, eps: f64) -> Self {
        Self {
            inv_len: A::one() / A::from_f64(group_len as f64),
            eps: A::from_f64(eps),
        }
    }

    /// Sets r of each group of a row. They come before the row's output, so that their roots overlap.
    #[inline(always)]
    fn scale<S: Simd, T: Element<Acc = A>>(&self, simd: S, x: &[T], groups: &mut Groups<A>) {
        for (columns, group) in groups.each_mut(x.len()) {
            let [squares] = sum_spans!(simd, 4, columns.clone(), |at, squares| {
                let x = at.load(x);
                squares = x.mul_add(x, squares);
            });
            group.inv_rms = self.inv_rms(&x[columns], [A::zero(); 2], squares * self.inv_len);
        }
    }

    /// Sets r and mean(dx̃ x̃) of each group of a row.
    #[inline(always)]
    fn scale_bwd<S: Simd, T: Element<Acc = A>>(
        &self,
        simd: S,
        [x, dy]: [&[T]; 2],
        [gain, neg_decay]: [&[A]; 2],
        groups: &mut Groups<A>,
    ) {
        let cols = x.len();
        let (dy, gain, neg_decay) = (&dy[..cols], &gain[..cols], &neg_decay[..cols]);
        for (columns, group) in groups.each_mut(cols) {
            let sums = sum_spans!(
                simd,
                2,
                columns.clone(),
                |at, squares, gain_dy_x, neg_decay_x2| {
                    let x = at.load(x);
                    let gain_dy = at.load(gain) * at.load(dy);
                    let square = x * x;
                    squares = squares + square;
                    gain_dy_x = gain_dy.mul_add(x, gain_dy_x);
                    neg_decay_x2 = square.mul_add(at.load(neg_decay), neg_decay_x2);
                }
            );
            let [squares, gain_dy_x, neg_decay_x2] = sums;
            let inv_rms = self.inv_rms(&x[columns.clone()], [A::zero(); 2], squares * self.inv_len);
            let mut total = inv_rms * (gain_dy_x + inv_rms * neg_decay_x2);
            if !total.is_finite() {
                total = total_of_huge(inv_rms, [x, dy], [gain, neg_decay], columns);
            }
            group.inv_rms = inv_rms;
            group.mean_dx_x = total * self.inv_len;
        }
    }

    /// r of a group, from the mean of its squares.
    ///
    /// LayerNorm passes the mean of the squared deviations from the group's mean, which is the sum
    /// of both parts of `mean`. Elsewhere they are 0.
    #[inline(always)]
    pub fn inv_rms<T: Element<Acc = A>>(&self, x: &[T], mean: [A; 2], mean_square: A) -> A {
        let square = mean_square + self.eps;
        if square.is_finite() {
            square.sqrt().recip()
        } else {
            self.inv_rms_of_huge(x, mean)
        }
    }

    /// r of a group whose mean square overflows, with or without ε.
    ///
    /// x and √ε are divided by the largest |x| before they are squared. For x = [3e30, 4e30] in
    /// f32 the squares overflow, while those of [0.75, 1] have the mean 0.78, and
    /// r = 1/(4e30 · √0.78). If x is not finite, r is NaN: the output shows that, and recipe
    /// Paper's guard keeps the batch out of the statistics.
    #[cold]
    fn inv_rms_of_huge<T: Element<Acc = A>>(&self, x: &[T], [mean, shifted_mean]: [A; 2]) -> A {
        let x = || x.iter().map(|&x| x.widen() - mean - shifted_mean);
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

/// Σ dx̃ x̃ of a group for which a product with x itself overflows.
#[cold]
fn total_of_huge<T: Element>(
    inv_rms: T::Acc,
    [x, dy]: [&[T]; 2],
    [gain, neg_decay]: [&[T::Acc]; 2],
    group: Range<usize>,
) -> T::Acc {
    let products = group.map(|i| {
        let x = inv_rms * x[i].widen();
        (gain[i] * dy[i].widen() + neg_decay[i] * x) * x
    });
    T::Acc::from_f64(products.map(WithDType::to_f64).sum())
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
        rows: [&'a [T]; 2],
        coefficients: [&'a [T::Acc]; 2],
        group_len: usize,
    }

    impl<T: Element> WithSimd for ScaleBwd<'_, T> {
        type Output = Vec<[T::Acc; 2]>;

        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            let mut groups = Groups::new(self.rows[0].len(), self.group_len);
            let Self {
                rows, coefficients, ..
            } = self;
            self.scaler.scale_bwd(simd, rows, coefficients, &mut groups);
            let stats = groups.each(rows[0].len()).map(|(_, stats)| stats);
            stats.map(|s| [s.inv_rms, s.mean_dx_x]).collect()
        }
    }

    #[test]
    #[should_panic(expected = "7 columns in groups of 2")]
    fn groups_make_up_the_row() {
        Groups::<f32>::new(7, 2);
    }

    #[test]
    fn r_by_hand() {
        // The mean square of [3, 4] is 12.5, and 12.25 + 0.25 is a square.
        let scaler = Scaler::<f32>::new(2, 0.);
        assert_eq!(scaler.inv_len, 0.5);
        assert_eq!(scaler.inv_rms(&[3f32, 4.], [0., 0.], 12.25), 1. / 3.5);
        let scaler = Scaler::<f32>::new(2, 0.25);
        assert_eq!(scaler.inv_rms(&[0f32, 0.], [0., 0.], 0.), 2.);
        assert_eq!(scaler.inv_rms(&[3f32, 4.], [0., 0.], 12.), 1. / 3.5);
    }

    /// The rounding errors of a sum in f32 would change r by 3e-4.
    #[test]
    fn r_of_a_long_row_of_huge_values() {
        let x: Vec<f32> = (0..100_000).map(|i| [3e30, 1e30][i % 2]).collect();
        let r = Scaler::new(x.len(), 1e-5).inv_rms(&x, [0., 0.], f32::INFINITY);
        let exact = 1. / 5e60f64.sqrt();
        assert!((f64::from(r) / exact - 1.).abs() < 2e-7, "{r:e}");
    }

    /// Squares overflow, and the largest magnitude is negative.
    #[test]
    fn r_of_huge_values() {
        let scaler = Scaler::<f32>::new(2, 1e-5);
        let r = scaler.inv_rms(&[3e30f32, -4e30], [0., 0.], f32::INFINITY);
        let exact = 1. / (12.5e60f64).sqrt();
        assert!((f64::from(r) / exact - 1.).abs() < 1e-6, "{r:e}");
        // Distances to a mean of 2e30 are 1e30 and −1e30.
        let r = scaler.inv_rms(&[3e30f32, 1e30], [1.5e30, 0.5e30], f32::INFINITY);
        assert!((f64::from(r) / 1e-30 - 1.).abs() < 1e-6, "{r:e}");
        // ε alone takes the mean square beyond f32: √ε is 1e19, as x is.
        let scaler = Scaler::<f32>::new(1, 1e38);
        let r = scaler.inv_rms(&[1e19f32], [0., 0.], 3.4e38);
        assert!(
            (f64::from(r) / (1e-19 / 2f64.sqrt()) - 1.).abs() < 1e-6,
            "{r:e}"
        );
    }

    #[test]
    fn r_is_nan_if_a_value_is_not_finite() {
        let scaler = Scaler::<f32>::new(2, 1e-5);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(scaler.inv_rms(&[1., bad], [0., 0.], bad * bad).is_nan());
        }
    }

    /// Two groups of two columns, which are shorter than most vectors. With ε = 0, r of [1, 7] is
    /// 1/5, and r of [3, 3] is 1/3.
    #[test]
    fn backward_by_hand() {
        let (x, dy) = ([1., 7., 3., 3.], [5., 10., 1., 2.]);
        let (gain, neg_decay) = ([1., 2., 3., 3.], [0., -5., -9., 0.]);
        // dx̃ = gain dy − decay r x: [5, 20 − 5 · 1.4 = 13], [3 − 9 · 1 = −6, 6].
        // dx̃ x̃: [1, 18.2], [−6, 6].
        for level in Level::all() {
            let got = level.run(ScaleBwd::<f64> {
                scaler: Scaler::new(2, 0.),
                rows: [&x, &dy],
                coefficients: [&gain, &neg_decay],
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
                rows: [&x, &[1., -2., 4.]],
                coefficients: [&[0.5, 1., 2.], &[-1., -2., -1.]],
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
            rows: [&[smallest; 3], &[f16::ONE; 3]],
            coefficients: [&[1.; 3], &[0.; 3]],
            group_len: 3,
        })[..] else {
            panic!("one group")
        };
        assert!((r / 2f32.powi(24) - 1.).abs() < 1e-6, "{r}");
    }
}
