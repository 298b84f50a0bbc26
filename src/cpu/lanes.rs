//! Short vectors of adjacent columns, written so that the compiler turns each operation into vector
//! instructions of whatever level the calling code is compiled for.
//!
//! Plain loops throughout, no closures over rows and no `array::from_fn`: those become functions of
//! their own, which the compiler leaves standing, and compiled for the lowest level.

use super::element::Accumulator;
use std::hint::black_box;
use std::ops::{Add, AddAssign, Mul, Sub};

/// Columns worked on at once: one AVX-512 register of f32, two of AVX2, four of NEON.
pub(super) const LANES: usize = 16;

/// `W` adjacent columns.
#[derive(Clone, Copy)]
pub(super) struct Lanes<A, const W: usize>(pub [A; W]);

impl<A: Accumulator, const W: usize> Lanes<A, W> {
    pub const ZERO: Self = Self([A::ZERO; W]);

    /// Columns `start..start + W`.
    #[inline(always)]
    pub fn load(row: &[A], start: usize) -> Self {
        let mut lanes = Self::ZERO;
        lanes.0.copy_from_slice(&row[start..][..W]);
        lanes
    }

    #[inline(always)]
    pub fn store(self, row: &mut [A], start: usize) {
        row[start..][..W].copy_from_slice(&self.0);
    }

    /// The sum of all lanes, as a tree.
    #[inline(always)]
    pub fn total(self) -> A {
        let Self(mut lanes) = self;
        let mut n = W;
        while n > 1 {
            n /= 2;
            for lane in 0..n {
                let other = lanes[lane + n];
                lanes[lane] += other;
            }
        }
        lanes[0]
    }
}

impl<A: Accumulator, const W: usize> Add for Lanes<A, W> {
    type Output = Self;

    #[inline(always)]
    fn add(mut self, other: Self) -> Self {
        for lane in 0..W {
            self.0[lane] += other.0[lane];
        }
        self
    }
}

impl<A: Accumulator, const W: usize> AddAssign for Lanes<A, W> {
    #[inline(always)]
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl<A: Accumulator, const W: usize> Sub for Lanes<A, W> {
    type Output = Self;

    #[inline(always)]
    fn sub(mut self, other: Self) -> Self {
        for lane in 0..W {
            self.0[lane] -= other.0[lane];
        }
        self
    }
}

impl<A: Accumulator, const W: usize> Mul for Lanes<A, W> {
    type Output = Self;

    #[inline(always)]
    fn mul(mut self, other: Self) -> Self {
        for lane in 0..W {
            self.0[lane] *= other.0[lane];
        }
        self
    }
}

impl<A: Accumulator, const W: usize> Mul<A> for Lanes<A, W> {
    type Output = Self;

    #[inline(always)]
    fn mul(mut self, factor: A) -> Self {
        for lane in 0..W {
            self.0[lane] *= factor;
        }
        self
    }
}

/// What is done to `W` adjacent columns. Implementations are `#[inline(always)]`.
pub(super) trait Columns {
    /// Works on columns `start..start + W`.
    fn step<const W: usize>(&mut self, start: usize);
}

/// Steps over columns `0..n`, in order.
#[inline(always)]
pub(super) fn sweep(n: usize, columns: &mut impl Columns) {
    let whole = n - n % LANES;
    for start in (0..whole).step_by(LANES) {
        columns.step::<LANES>(start);
    }
    for start in whole..n {
        columns.step::<1>(start);
    }
}

/// `N` values of each column, to be summed. Implementations are `#[inline(always)]`.
pub(super) trait Terms<A, const N: usize> {
    /// The values at columns `start..start + W`.
    fn at<const W: usize>(&self, start: usize) -> [Lanes<A, W>; N];
}

/// The sums of `terms` over columns `0..n`.
#[inline(always)]
pub(super) fn sum<A: Accumulator, const N: usize>(n: usize, terms: &impl Terms<A, N>) -> [A; N] {
    // Two sums in turn: an addition takes several cycles, and waits only for its own predecessor.
    let mut even = [Lanes::<A, LANES>::ZERO; N];
    let mut odd = [Lanes::<A, LANES>::ZERO; N];
    let whole = n - n % LANES;
    let paired = n - n % (2 * LANES);
    for start in (0..paired).step_by(2 * LANES) {
        add(&mut even, terms.at::<LANES>(start));
        add(&mut odd, terms.at::<LANES>(start + LANES));
    }
    if paired < whole {
        add(&mut even, terms.at::<LANES>(paired));
    }
    add(&mut even, odd);
    // Seen together with the loop, the additions across lanes below make the compiler split the loop's
    // registers into pairs of lanes: a backward took four times as long.
    let even = black_box(even);
    let mut total = [Lanes::<A, 1>::ZERO; N];
    for k in 0..N {
        total[k] = Lanes([even[k].total()]);
    }
    for start in whole..n {
        add(&mut total, terms.at::<1>(start));
    }
    let mut sums = [A::ZERO; N];
    for k in 0..N {
        sums[k] = total[k].0[0];
    }
    sums
}

#[inline(always)]
fn add<A: Accumulator, const W: usize, const N: usize>(
    sums: &mut [Lanes<A, W>; N],
    terms: [Lanes<A, W>; N],
) {
    for k in 0..N {
        sums[k] += terms[k];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    struct Products<'a>(&'a [f64], &'a [f64]);

    impl Terms<f64, 2> for Products<'_> {
        fn at<const W: usize>(&self, start: usize) -> [Lanes<f64, W>; 2] {
            let (a, b) = (Lanes::load(self.0, start), Lanes::load(self.1, start));
            [a * b, a + b]
        }
    }

    /// Widths on every side of whole vectors and of pairs of them.
    #[test]
    fn sums_of_every_width() {
        let a: Vec<f64> = (0..100).map(|i| 1. + (i as f64).sin()).collect();
        let b: Vec<f64> = (0..100).map(|i| 2. + (i as f64).cos()).collect();
        for n in 0..=a.len() {
            let [products, sums] = sum(n, &Products(&a[..n], &b[..n]));
            let pairs = || a[..n].iter().zip(&b[..n]);
            let expected: f64 = pairs().map(|(a, b)| a * b).sum();
            assert_relative_eq!(products, expected, max_relative = 1e-14);
            let expected: f64 = pairs().map(|(a, b)| a + b).sum();
            assert_relative_eq!(sums, expected, max_relative = 1e-14);
        }
    }

    struct Visits<'a>(&'a mut Vec<usize>);

    impl Columns for Visits<'_> {
        fn step<const W: usize>(&mut self, start: usize) {
            self.0.extend(start..start + W);
        }
    }

    #[test]
    fn a_sweep_visits_every_column_once_in_order() {
        for n in 0..70 {
            let mut visited = vec![];
            sweep(n, &mut Visits(&mut visited));
            assert_eq!(visited, (0..n).collect::<Vec<_>>());
        }
    }
}
