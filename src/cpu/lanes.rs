//! Vectors of adjacent columns, in the instructions of one SIMD level.

use super::element::{Accumulator, Element};
use pulp::{Scalar, Scalar128b, Simd};
use std::any::TypeId;
use std::ops::{Add, Mul, Sub};

/// Adjacent columns in the dtype of the sums, as many as a vector of `S` holds.
#[derive(Clone, Copy)]
pub(super) struct Lanes<S: Simd, A: Accumulator> {
    pub simd: S,
    pub vector: A::Vector<S>,
}

impl<S: Simd, A: Accumulator> Lanes<S, A> {
    /// Columns in a vector.
    pub const WIDTH: usize = size_of::<A::Vector<S>>() / size_of::<A>();

    #[inline(always)]
    pub fn splat(simd: S, value: A) -> Self {
        let vector = A::splat(simd, value);
        Self { simd, vector }
    }

    /// The `i`-th vector of a row of any dtype.
    #[inline(always)]
    pub fn load<T: Element<Acc = A>>(simd: S, row: &[T], i: usize) -> Self {
        let vector = T::load(simd, row, i);
        Self { simd, vector }
    }

    /// Writes the `i`-th vector of a row.
    #[inline(always)]
    pub fn store(self, row: &mut [A], i: usize) {
        A::vectors_mut::<S>(row)[i] = self.vector;
    }

    /// `self * factor + term`, rounded once where the level has an instruction for it.
    #[inline(always)]
    pub fn mul_add(self, factor: Self, term: Self) -> Self {
        // Without one, pulp would call a function for each lane.
        if TypeId::of::<S>() == TypeId::of::<Scalar128b>() {
            return self * factor + term;
        }
        let vector = A::mul_add_vectors(self.simd, self.vector, factor.vector, term.vector);
        Self { vector, ..self }
    }

    /// The sum of all lanes.
    #[inline(always)]
    pub fn total(self) -> A {
        A::total(self.simd, self.vector)
    }
}

impl<S: Simd, A: Accumulator> Add for Lanes<S, A> {
    type Output = Self;

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        let vector = A::add_vectors(self.simd, self.vector, other.vector);
        Self { vector, ..self }
    }
}

impl<S: Simd, A: Accumulator> Sub for Lanes<S, A> {
    type Output = Self;

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        let vector = A::sub_vectors(self.simd, self.vector, other.vector);
        Self { vector, ..self }
    }
}

impl<S: Simd, A: Accumulator> Mul for Lanes<S, A> {
    type Output = Self;

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        let vector = A::mul_vectors(self.simd, self.vector, other.vector);
        Self { vector, ..self }
    }
}

/// The work of a pass on one vector of columns. Implementations are `#[inline(always)]`, so that
/// they are compiled for each level.
//
// The loops below count vectors, not elements. So for slices of one length the compiler knows that
// each index is in bounds.
pub(super) trait Columns<A: Accumulator> {
    /// Works on the `i`-th vector of a row's columns.
    fn step<S: Simd>(&mut self, simd: S, i: usize);
}

/// Steps over columns `0..n`, in order.
#[inline(always)]
pub(super) fn sweep<S: Simd, A: Accumulator>(simd: S, n: usize, columns: &mut impl Columns<A>) {
    let vectors = n / Lanes::<S, A>::WIDTH;
    for i in 0..vectors {
        columns.step(simd, i);
    }
    for i in vectors * Lanes::<S, A>::WIDTH..n {
        columns.step(Scalar, i);
    }
}

/// `N` values of each column, to be summed. Implementations are `#[inline(always)]`.
pub(super) trait Terms<A: Accumulator, const N: usize> {
    /// The values at the `i`-th vector of columns.
    fn at<S: Simd>(&self, simd: S, i: usize) -> [Lanes<S, A>; N];
}

/// The sums of `terms` over columns `0..n`.
///
/// `SETS` sums take turns, because an addition waits several cycles for the one before it. More
/// sums than registers would cost more than they save.
#[inline(always)]
pub(super) fn sum_terms<const SETS: usize, const N: usize, S: Simd, A: Accumulator>(
    simd: S,
    n: usize,
    terms: &impl Terms<A, N>,
) -> [A; N] {
    let count = n / Lanes::<S, A>::WIDTH;
    let mut sums = [[Lanes::<S, A>::splat(simd, A::ZERO); N]; SETS];
    let mut i = 0;
    while i + SETS <= count {
        for (set, sums) in sums.iter_mut().enumerate() {
            add(sums, terms.at(simd, i + set));
        }
        i += SETS;
    }
    while i < count {
        add(&mut sums[0], terms.at(simd, i));
        i += 1;
    }
    let mut vectors = sums[0];
    for more in &sums[1..] {
        add(&mut vectors, *more);
    }
    let mut total = [A::ZERO; N];
    for k in 0..N {
        total[k] = vectors[k].total();
    }
    for i in count * Lanes::<S, A>::WIDTH..n {
        let terms = terms.at(Scalar, i);
        for k in 0..N {
            total[k] += terms[k].total();
        }
    }
    total
}

#[inline(always)]
fn add<S: Simd, A: Accumulator, const N: usize>(
    sums: &mut [Lanes<S, A>; N],
    terms: [Lanes<S, A>; N],
) {
    for k in 0..N {
        sums[k] = sums[k] + terms[k];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::Level;
    use approx::assert_relative_eq;
    use pulp::WithSimd;

    struct Products<'a>(&'a [f64], &'a [f64]);

    impl Terms<f64, 2> for Products<'_> {
        fn at<S: Simd>(&self, simd: S, i: usize) -> [Lanes<S, f64>; 2] {
            let (a, b) = (Lanes::load(simd, self.0, i), Lanes::load(simd, self.1, i));
            [a * b, a + b]
        }
    }

    struct Sums<'a>(Products<'a>);

    impl WithSimd for Sums<'_> {
        type Output = [f64; 2];

        fn with_simd<S: Simd>(self, simd: S) -> [f64; 2] {
            sum_terms::<3, 2, S, f64>(simd, self.0 .0.len(), &self.0)
        }
    }

    /// Widths below, at and above multiples of a vector, and of a round of `SETS` vectors.
    #[test]
    fn sums_of_every_width() {
        let a: Vec<f64> = (0..100).map(|i| 1. + (i as f64).sin()).collect();
        let b: Vec<f64> = (0..100).map(|i| 2. + (i as f64).cos()).collect();
        for n in 0..=a.len() {
            for level in Level::all() {
                let [products, sums] = level.run(Sums(Products(&a[..n], &b[..n])));
                let pairs = || a[..n].iter().zip(&b[..n]);
                let expected: f64 = pairs().map(|(a, b)| a * b).sum();
                assert_relative_eq!(products, expected, max_relative = 1e-14);
                let expected: f64 = pairs().map(|(a, b)| a + b).sum();
                assert_relative_eq!(sums, expected, max_relative = 1e-14);
            }
        }
    }

    struct Visits<'a>(&'a mut Vec<usize>, usize);

    impl Columns<f32> for Visits<'_> {
        fn step<S: Simd>(&mut self, _: S, i: usize) {
            let width = Lanes::<S, f32>::WIDTH;
            self.0.extend(i * width..(i + 1) * width);
        }
    }

    impl WithSimd for Visits<'_> {
        type Output = ();

        fn with_simd<S: Simd>(mut self, simd: S) {
            sweep(simd, self.1, &mut self);
        }
    }

    #[test]
    fn a_sweep_visits_every_column_once_in_order() {
        for n in 0..70 {
            for level in Level::all() {
                let mut visited = vec![];
                level.run(Visits(&mut visited, n));
                assert_eq!(visited, (0..n).collect::<Vec<_>>());
            }
        }
    }
}
