//! Vectors of adjacent columns, in the instructions of one SIMD level.

use super::element::{Accumulator, Element};
use pulp::{Scalar, Scalar128b, Simd};
use std::any::TypeId;
use std::mem::MaybeUninit;
use std::ops::{Add, Mul, Range, Sub};

/// Adjacent columns in the dtype of the sums, as many as `K` vectors of `S` hold.
#[derive(Clone, Copy)]
pub(super) struct Lanes<S: Simd, A: Accumulator, const K: usize> {
    simd: S,
    vectors: [A::Vector<S>; K],
}

impl<S: Simd, A: Accumulator, const K: usize> Lanes<S, A, K> {
    /// The number of columns.
    pub const WIDTH: usize = K * size_of::<A::Vector<S>>() / size_of::<A>();

    #[inline(always)]
    pub fn splat(simd: S, value: A) -> Self {
        let vectors = [A::splat(simd, value); K];
        Self { simd, vectors }
    }

    /// The columns of a row of any dtype from column `at`.
    #[inline(always)]
    pub fn load<T: Element<Acc = A>>(simd: S, row: &[T], at: usize) -> Self {
        let columns = &row[at..][..Self::WIDTH];
        let mut lanes = Self::splat(simd, A::ZERO);
        T::load(simd, columns, &mut lanes.vectors);
        lanes
    }

    /// Writes the columns of a row from column `at`.
    #[inline(always)]
    pub fn store(self, row: &mut [A], at: usize) {
        let columns = &mut row[at..][..Self::WIDTH];
        for k in 0..K {
            A::vectors_mut::<S>(columns)[k] = self.vectors[k];
        }
    }

    /// Writes the columns of an output from column `at`, rounded to its dtype.
    #[inline(always)]
    pub fn write<T: Element<Acc = A>>(self, row: &mut [MaybeUninit<T>], at: usize) {
        let columns = &mut row[at..][..Self::WIDTH];
        T::store(self.simd, &self.vectors, columns);
    }

    /// `self * factor + term`, rounded once where the level has an instruction for it.
    #[inline(always)]
    pub fn mul_add(mut self, factor: Self, term: Self) -> Self {
        // Without one, pulp would call a function for each lane.
        if TypeId::of::<S>() == TypeId::of::<Scalar128b>() {
            return self * factor + term;
        }
        for k in 0..K {
            self.vectors[k] = A::mul_add_vectors(
                self.simd,
                self.vectors[k],
                factor.vectors[k],
                term.vectors[k],
            );
        }
        self
    }

    /// The sum of the vectors.
    #[inline(always)]
    fn sum(self) -> Lanes<S, A, 1> {
        let mut sum = self.vectors[0];
        for k in 1..K {
            sum = A::add_vectors(self.simd, sum, self.vectors[k]);
        }
        Lanes {
            simd: self.simd,
            vectors: [sum],
        }
    }

    /// The sum of all lanes.
    #[inline(always)]
    pub fn total(self) -> A {
        A::total(self.simd, self.sum().vectors[0])
    }
}

impl<S: Simd, A: Accumulator, const K: usize> Add for Lanes<S, A, K> {
    type Output = Self;

    #[inline(always)]
    fn add(mut self, other: Self) -> Self {
        for k in 0..K {
            self.vectors[k] = A::add_vectors(self.simd, self.vectors[k], other.vectors[k]);
        }
        self
    }
}

impl<S: Simd, A: Accumulator, const K: usize> Sub for Lanes<S, A, K> {
    type Output = Self;

    #[inline(always)]
    fn sub(mut self, other: Self) -> Self {
        for k in 0..K {
            self.vectors[k] = A::sub_vectors(self.simd, self.vectors[k], other.vectors[k]);
        }
        self
    }
}

impl<S: Simd, A: Accumulator, const K: usize> Mul for Lanes<S, A, K> {
    type Output = Self;

    #[inline(always)]
    fn mul(mut self, other: Self) -> Self {
        for k in 0..K {
            self.vectors[k] = A::mul_vectors(self.simd, self.vectors[k], other.vectors[k]);
        }
        self
    }
}

/// The group scaling of a group: `x̃ = r x` forward, `dx = r (dx̃ − x̃ · mean(dx̃ x̃))` backward.
#[derive(Clone, Copy)]
pub(super) struct Scaling<A> {
    /// r.
    pub factor: A,
    /// The mean of dx̃ x̃; 0 in a forward.
    pub mean: A,
}

impl<A: Accumulator> Scaling<A> {
    /// Changes nothing.
    pub const NONE: Self = Self {
        factor: A::ONE,
        mean: A::ZERO,
    };
}

/// The groups of a row, which make up its columns, in order.
pub(super) struct Groups<A> {
    cols: usize,
    len: usize,
    scalings: Vec<Scaling<A>>,
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
        Self {
            cols,
            len,
            scalings: vec![Scaling::NONE; cols / len],
        }
    }

    #[inline(always)]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Columns of each group.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    pub fn scalings_mut(&mut self) -> &mut [Scaling<A>] {
        &mut self.scalings
    }
}

/// The equations of a pass on adjacent columns. Implementations are `#[inline(always)]`, so that
/// they are compiled for each level.
pub(super) trait Columns<A: Accumulator> {
    /// The output in the columns of `K` vectors, from column `at` of a row.
    fn step<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        scaling: Scaling<A>,
    ) -> Lanes<S, A, K>;
}

/// The output of a row. Implementations are `#[inline(always)]`.
pub(super) trait RowOutput<T: Element> {
    /// Writes the columns from column `at`.
    fn write<S: Simd, const K: usize>(&mut self, columns: Lanes<S, T::Acc, K>, at: usize);
}

/// No output.
impl<T: Element> RowOutput<T> for () {
    #[inline(always)]
    fn write<S: Simd, const K: usize>(&mut self, _: Lanes<S, T::Acc, K>, _: usize) {}
}

impl<T: Element> RowOutput<T> for &mut [MaybeUninit<T>] {
    #[inline(always)]
    fn write<S: Simd, const K: usize>(&mut self, columns: Lanes<S, T::Acc, K>, at: usize) {
        columns.write(self, at);
    }
}

/// Steps over a row in order, and writes what each step gives to `row`. A step takes `K` vectors
/// where as many are left of a group.
#[inline(always)]
pub(super) fn sweep<const K: usize, S: Simd, T: Element>(
    simd: S,
    groups: &Groups<T::Acc>,
    columns: &mut impl Columns<T::Acc>,
    mut row: impl RowOutput<T>,
) {
    let block = Lanes::<S, T::Acc, K>::WIDTH;
    let vector = Lanes::<S, T::Acc, 1>::WIDTH;
    let mut at = 0;
    for &scaling in &groups.scalings {
        let end = at + groups.len;
        while at + block <= end {
            let output: Lanes<S, _, K> = columns.step(simd, at, scaling);
            row.write(output, at);
            at += block;
        }
        while at + vector <= end {
            let output: Lanes<S, _, 1> = columns.step(simd, at, scaling);
            row.write(output, at);
            at += vector;
        }
        while at < end {
            let output: Lanes<Scalar, _, 1> = columns.step(Scalar, at, scaling);
            row.write(output, at);
            at += 1;
        }
    }
}

/// `N` values of each column, to be summed. Implementations are `#[inline(always)]`.
pub(super) trait Terms<A: Accumulator, const N: usize> {
    /// Adds the values of the columns of `K` vectors, from column `at`, to `sums`.
    fn add<S: Simd, const K: usize>(&self, simd: S, at: usize, sums: &mut [Lanes<S, A, K>; N]);
}

/// The sums of `terms` over `columns`.
///
/// Sums of `K` vectors take turns, because an addition waits several cycles for the one before it.
/// More sums than registers would cost more than they save.
#[inline(always)]
pub(super) fn sum_terms<const K: usize, const N: usize, S: Simd, A: Accumulator>(
    simd: S,
    columns: Range<usize>,
    terms: &impl Terms<A, N>,
) -> [A; N] {
    let (block, vector) = (Lanes::<S, A, K>::WIDTH, Lanes::<S, A, 1>::WIDTH);
    let Range { start: mut at, end } = columns;
    let mut blocks = [Lanes::<S, A, K>::splat(simd, A::ZERO); N];
    while at + block <= end {
        terms.add(simd, at, &mut blocks);
        at += block;
    }
    let mut vectors = [Lanes::<S, A, 1>::splat(simd, A::ZERO); N];
    for n in 0..N {
        vectors[n] = blocks[n].sum();
    }
    while at + vector <= end {
        terms.add(simd, at, &mut vectors);
        at += vector;
    }
    let mut lanes = [Lanes::<Scalar, A, 1>::splat(Scalar, A::ZERO); N];
    for n in 0..N {
        lanes[n] = Lanes::splat(Scalar, vectors[n].total());
    }
    while at < end {
        terms.add(Scalar, at, &mut lanes);
        at += 1;
    }
    let mut totals = [A::ZERO; N];
    for n in 0..N {
        totals[n] = lanes[n].total();
    }
    totals
}

#[cfg(test)]
mod tests {
    #![allow(unsafe_code)]

    use super::*;
    use crate::device::cpu::simd::Level;
    use approx::assert_relative_eq;
    use pulp::WithSimd;

    struct Products<'a>(&'a [f64], &'a [f64]);

    impl Terms<f64, 2> for Products<'_> {
        fn add<S: Simd, const K: usize>(
            &self,
            simd: S,
            at: usize,
            [products, sums]: &mut [Lanes<S, f64, K>; 2],
        ) {
            let (a, b) = (Lanes::load(simd, self.0, at), Lanes::load(simd, self.1, at));
            *products = a.mul_add(b, *products);
            *sums = *sums + (a + b);
        }
    }

    struct Sums<'a>(Products<'a>);

    impl WithSimd for Sums<'_> {
        type Output = [f64; 2];

        fn with_simd<S: Simd>(self, simd: S) -> [f64; 2] {
            sum_terms::<3, 2, S, f64>(simd, 0..self.0 .0.len(), &self.0)
        }
    }

    /// Widths below, at and above multiples of a vector, and of `K` vectors.
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

    struct Visits<'a>(&'a mut Vec<(usize, f32)>);

    impl Columns<f32> for Visits<'_> {
        fn step<S: Simd, const K: usize>(
            &mut self,
            simd: S,
            at: usize,
            scaling: Scaling<f32>,
        ) -> Lanes<S, f32, K> {
            let columns = at..at + Lanes::<S, f32, K>::WIDTH;
            self.0
                .extend(columns.map(|column| (column, scaling.factor)));
            Lanes::splat(simd, scaling.factor)
        }
    }

    struct Sweep<'a> {
        groups: &'a Groups<f32>,
        visited: &'a mut Vec<(usize, f32)>,
        row: &'a mut [MaybeUninit<f32>],
    }

    impl WithSimd for Sweep<'_> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            let mut visits = Visits(self.visited);
            sweep::<4, _, f32>(simd, self.groups, &mut visits, self.row);
        }
    }

    #[test]
    fn a_sweep_visits_and_writes_every_column_once_in_order_with_its_group() {
        for len in 1..140 {
            let mut groups = Groups::new(3 * len, len);
            for (scaling, factor) in groups.scalings_mut().iter_mut().zip([0., 1., 2.]) {
                scaling.factor = factor;
            }
            let expected: Vec<_> = (0..3 * len).map(|i| (i, (i / len) as f32)).collect();
            for level in Level::all() {
                let mut row = vec![MaybeUninit::new(-1.); 3 * len];
                let mut visited = vec![];
                level.run(Sweep {
                    groups: &groups,
                    visited: &mut visited,
                    row: &mut row,
                });
                assert_eq!(visited, expected);
                for (slot, &(_, factor)) in row.iter().zip(&expected) {
                    // SAFETY: it held a value before the sweep.
                    assert_eq!(unsafe { slot.assume_init() }, factor);
                }
            }
        }
    }
}
