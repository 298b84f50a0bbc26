//! Short vectors of adjacent columns, written so that the compiler turns each operation into vector
//! instructions of whatever level the calling code is compiled for.

use super::element::{Accumulator, Element};
use std::ops::{Add, AddAssign, Mul, Sub};

/// Columns worked on at once: one AVX-512 register of f32, two of AVX2, four of NEON.
pub(super) const LANES: usize = 16;

/// `W` adjacent columns.
#[derive(Clone, Copy)]
pub(super) struct Lanes<A, const W: usize>([A; W]);

impl<A: Accumulator, const W: usize> Lanes<A, W> {
    pub const ZERO: Self = Self([A::ZERO; W]);

    /// Columns `start..start + W`.
    #[inline(always)]
    pub fn load<T: Element<Acc = A>>(row: &[T], start: usize) -> Self {
        let row: &[T] = &row[start..][..W];
        Self(each(A::ZERO, |lane| row[lane].widen()))
    }

    #[inline(always)]
    pub fn store(self, row: &mut [A], start: usize) {
        row[start..][..W].copy_from_slice(&self.0);
    }

    #[inline(always)]
    pub fn narrow<T: Element<Acc = A>>(self) -> [T; W] {
        each(T::zero(), |lane| T::narrow(self.0[lane]))
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
    fn add(self, other: Self) -> Self {
        Self(each(A::ZERO, |lane| self.0[lane] + other.0[lane]))
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
    fn sub(self, other: Self) -> Self {
        Self(each(A::ZERO, |lane| self.0[lane] - other.0[lane]))
    }
}

impl<A: Accumulator, const W: usize> Mul for Lanes<A, W> {
    type Output = Self;

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(each(A::ZERO, |lane| self.0[lane] * other.0[lane]))
    }
}

impl<A: Accumulator, const W: usize> Mul<A> for Lanes<A, W> {
    type Output = Self;

    #[inline(always)]
    fn mul(self, factor: A) -> Self {
        Self(each(A::ZERO, |lane| self.0[lane] * factor))
    }
}

/// `[value(0), value(1), …]`, as `array::from_fn`, whose calls the compiler leaves standing in code
/// that is compiled for another SIMD level. `blank` is overwritten.
#[inline(always)]
pub(super) fn each<V: Copy, const N: usize>(blank: V, value: impl Fn(usize) -> V) -> [V; N] {
    let mut values = [blank; N];
    for (i, slot) in values.iter_mut().enumerate() {
        *slot = value(i);
    }
    values
}

/// What is done to `W` adjacent columns of some rows.
pub(super) trait Columns {
    /// Works on columns `start..start + W`. Implementations are `#[inline(always)]`.
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

/// The sums over columns `0..n` of `N` values that `value` computes together.
#[inline(always)]
pub(super) fn reduce<A: Accumulator, const N: usize>(
    n: usize,
    value: impl Reduction<A, N>,
) -> [A; N] {
    // Two sums in turn, for an addition takes several cycles and only waits for its own.
    let mut even = [Lanes::<A, LANES>::ZERO; N];
    let mut odd = even;
    let whole = n - n % LANES;
    let pairs = n - n % (2 * LANES);
    for start in (0..pairs).step_by(2 * LANES) {
        let values = value.at::<LANES>(start);
        (0..N).for_each(|k| even[k] += values[k]);
        let values = value.at::<LANES>(start + LANES);
        (0..N).for_each(|k| odd[k] += values[k]);
    }
    if pairs < whole {
        let values = value.at::<LANES>(pairs);
        (0..N).for_each(|k| even[k] += values[k]);
    }
    let mut total: [A; N] = each(A::ZERO, |k| (even[k] + odd[k]).total());
    for start in whole..n {
        let values = value.at::<1>(start);
        (0..N).for_each(|k| total[k] += values[k].total());
    }
    total
}

/// `N` values to be summed over columns.
pub(super) trait Reduction<A, const N: usize> {
    /// The values at columns `start..start + W`. Implementations are `#[inline(always)]`.
    fn at<const W: usize>(&self, start: usize) -> [Lanes<A, W>; N];
}
