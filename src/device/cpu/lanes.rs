//! Vectors of adjacent columns, in the instructions of one SIMD level.

use super::element::{Accumulator, Element};
use pulp::{Scalar, Scalar128b, Simd};
use std::any::TypeId;
use std::mem::MaybeUninit;
use std::ops::{Add, Mul, Range, Sub};

/// The most columns of a [`Span`]: four vectors of 512 bits.
pub(super) const MOST_COLUMNS: usize = 64;

/// Adjacent columns of a row, as many as `K` vectors of `S` hold.
#[derive(Clone, Copy)]
pub(super) struct Span<S, A, const K: usize> {
    simd: S,
    /// The first of them.
    start: usize,
    /// The scaling of their group.
    pub scaling: Scaling<A>,
}

impl<S: Simd, A: Accumulator, const K: usize> Span<S, A, K> {
    /// The number of columns.
    pub const WIDTH: usize = K * size_of::<A::Vector<S>>() / size_of::<A>();

    #[inline(always)]
    fn new(simd: S, start: usize, scaling: Scaling<A>) -> Self {
        Self {
            simd,
            start,
            scaling,
        }
    }

    #[inline(always)]
    pub fn splat(self, value: A) -> Lanes<S, A, K> {
        Lanes::splat(self.simd, value)
    }

    /// These columns of a row of any dtype.
    #[inline(always)]
    pub fn load<T: Element<Acc = A>>(self, row: &[T]) -> Lanes<S, A, K> {
        let mut lanes = self.splat(A::ZERO);
        let columns = &row[self.start..][..Self::WIDTH];
        T::load(self.simd, columns, &mut lanes.vectors);
        lanes
    }

    /// Writes these columns of a row.
    #[inline(always)]
    pub fn store(self, lanes: Lanes<S, A, K>, row: &mut [A]) {
        let columns = &mut row[self.start..][..Self::WIDTH];
        for k in 0..K {
            A::vectors_mut::<S>(columns)[k] = lanes.vectors[k];
        }
    }
}

/// The numbers of a [`Span`], in the dtype of the sums.
#[derive(Clone, Copy)]
pub(super) struct Lanes<S: Simd, A: Accumulator, const K: usize> {
    simd: S,
    vectors: [A::Vector<S>; K],
}

impl<S: Simd, A: Accumulator, const K: usize> Lanes<S, A, K> {
    #[inline(always)]
    fn splat(simd: S, value: A) -> Self {
        let vectors = [A::splat(simd, value); K];
        Self { simd, vectors }
    }

    /// Writes the columns of an output from column `start`, rounded to its dtype.
    #[inline(always)]
    pub fn write<T: Element<Acc = A>>(self, row: &mut [MaybeUninit<T>], start: usize) {
        let columns = &mut row[start..][..Span::<S, A, K>::WIDTH];
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
    fn total(self) -> A {
        A::total(self.simd, self.sum().vectors[0])
    }
}

macro_rules! operator {
    ($operator:ident, $method:ident, $of_vectors:ident) => {
        impl<S: Simd, A: Accumulator, const K: usize> $operator for Lanes<S, A, K> {
            type Output = Self;

            #[inline(always)]
            fn $method(mut self, other: Self) -> Self {
                for k in 0..K {
                    self.vectors[k] = A::$of_vectors(self.simd, self.vectors[k], other.vectors[k]);
                }
                self
            }
        }
    };
}

operator!(Add, add, add_vectors);
operator!(Sub, sub, sub_vectors);
operator!(Mul, mul, mul_vectors);

/// The group scaling of a group: `x̃ = r x` forward, `dx = r (dx̃ − x̃ · mean(dx̃ x̃))` backward.
#[derive(Clone, Copy)]
pub(super) struct Scaling<A> {
    /// r.
    pub rms_inv: A,
    /// The mean of dx̃ x̃; 0 in a forward.
    pub mean: A,
}

impl<A: Accumulator> Scaling<A> {
    /// Changes nothing.
    pub const NONE: Self = Self {
        rms_inv: A::ONE,
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

    /// The number of columns, which are all in some group.
    #[inline(always)]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The columns and the scaling of each group.
    #[inline(always)]
    pub fn each_mut(&mut self) -> impl Iterator<Item = (Range<usize>, &mut Scaling<A>)> {
        let len = self.len;
        let columns = move |group| group * len..(group + 1) * len;
        let scalings = self.scalings.iter_mut().enumerate();
        scalings.map(move |(group, scaling)| (columns(group), scaling))
    }
}

/// The equations of a pass on adjacent columns. Implementations are `#[inline(always)]`, so that
/// they are compiled for each level.
pub(super) trait Columns<A: Accumulator> {
    /// The output in the columns of a row that are next in order.
    fn apply<S: Simd, const K: usize>(&mut self, at: Span<S, A, K>) -> Lanes<S, A, K>;
}

/// A row as it is.
impl<T: Element> Columns<T::Acc> for &[T] {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(&mut self, at: Span<S, T::Acc, K>) -> Lanes<S, T::Acc, K> {
        at.load(self)
    }
}

/// Where the output of a row goes. Implementations are `#[inline(always)]`.
pub(super) trait Sink<T: Element> {
    /// Writes the columns from column `start`.
    fn write<S: Simd, const K: usize>(&mut self, columns: Lanes<S, T::Acc, K>, start: usize);
}

/// Nowhere.
impl<T: Element> Sink<T> for () {
    #[inline(always)]
    fn write<S: Simd, const K: usize>(&mut self, _: Lanes<S, T::Acc, K>, _: usize) {}
}

impl<T: Element> Sink<T> for &mut [MaybeUninit<T>] {
    #[inline(always)]
    fn write<S: Simd, const K: usize>(&mut self, columns: Lanes<S, T::Acc, K>, start: usize) {
        columns.write(self, start);
    }
}

/// Steps over a row in order, and writes what each step gives to `row`. A step takes `K` vectors
/// where as many are left of a group.
///
/// Every column from 0 to `groups.cols()` is visited once, and so written once if `row` writes.
/// `uninit.rs` relies on it.
#[inline(always)]
pub(super) fn sweep<const K: usize, S: Simd, T: Element>(
    simd: S,
    groups: &Groups<T::Acc>,
    columns: &mut impl Columns<T::Acc>,
    mut row: impl Sink<T>,
) {
    let (block, vector) = (Span::<S, T::Acc, K>::WIDTH, Span::<S, T::Acc, 1>::WIDTH);
    let mut start = 0;
    for &scaling in &groups.scalings {
        let end = start + groups.len;
        while start + block <= end {
            let at: Span<S, _, K> = Span::new(simd, start, scaling);
            row.write(columns.apply(at), start);
            start += block;
        }
        while start + vector <= end {
            let at: Span<S, _, 1> = Span::new(simd, start, scaling);
            row.write(columns.apply(at), start);
            start += vector;
        }
        while start < end {
            let at: Span<_, _, 1> = Span::new(Scalar, start, scaling);
            row.write(columns.apply(at), start);
            start += 1;
        }
    }
}

/// `N` values of each column, to be summed. Implementations are `#[inline(always)]`.
pub(super) trait Terms<A: Accumulator, const N: usize> {
    /// Adds the values of the columns to `sums`.
    fn add<S: Simd, const K: usize>(&self, at: Span<S, A, K>, sums: &mut [Lanes<S, A, K>; N]);
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
    let (block, vector) = (Span::<S, A, K>::WIDTH, Span::<S, A, 1>::WIDTH);
    let Range { mut start, end } = columns;
    let mut blocks = [Lanes::<S, A, K>::splat(simd, A::ZERO); N];
    while start + block <= end {
        terms.add(Span::new(simd, start, Scaling::NONE), &mut blocks);
        start += block;
    }
    let mut vectors = [Lanes::<S, A, 1>::splat(simd, A::ZERO); N];
    for n in 0..N {
        vectors[n] = blocks[n].sum();
    }
    while start + vector <= end {
        terms.add(Span::new(simd, start, Scaling::NONE), &mut vectors);
        start += vector;
    }
    let mut lanes = [Lanes::<Scalar, A, 1>::splat(Scalar, A::ZERO); N];
    for n in 0..N {
        lanes[n] = Lanes::splat(Scalar, vectors[n].total());
    }
    while start < end {
        terms.add(Span::new(Scalar, start, Scaling::NONE), &mut lanes);
        start += 1;
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
    use pulp::WithSimd;

    /// r of each column's group.
    struct RmsInverses;

    impl Columns<f32> for RmsInverses {
        fn apply<S: Simd, const K: usize>(&mut self, at: Span<S, f32, K>) -> Lanes<S, f32, K> {
            at.splat(at.scaling.rms_inv)
        }
    }

    struct Sweep<'a>(&'a Groups<f32>, &'a mut [MaybeUninit<f32>]);

    impl WithSimd for Sweep<'_> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            sweep::<4, _, f32>(simd, self.0, &mut RmsInverses, self.1);
        }
    }

    /// (1 + 2⁻¹²)² − (1 + 2⁻¹¹): 2⁻²⁴ in each lane, or 0 if `f32` rounds the square.
    struct Square;

    impl WithSimd for Square {
        type Output = f32;

        fn with_simd<S: Simd>(self, simd: S) -> f32 {
            let [x, rounded] =
                [12, 11].map(|bits| Lanes::<S, f32, 1>::splat(simd, 1. + 0.5f32.powi(bits)));
            (x.mul_add(x, rounded * Lanes::splat(simd, -1.))).total()
        }
    }

    #[test]
    fn a_product_is_rounded_once_where_an_instruction_does_so() {
        for level in Level::all() {
            let once = !matches!(level, Level::Baseline);
            assert_eq!(level.run(Square) > 0., once, "{level:?}");
        }
    }

    #[test]
    fn a_sweep_writes_every_column_with_its_group() {
        for len in 1..140 {
            let mut groups = Groups::new(3 * len, len);
            for ((_, scaling), rms_inv) in groups.each_mut().zip([0., 1., 2.]) {
                scaling.rms_inv = rms_inv;
            }
            for level in Level::all() {
                let mut row = vec![MaybeUninit::new(-1.); 3 * len];
                level.run(Sweep(&groups, &mut row));
                for (i, slot) in row.iter().enumerate() {
                    // SAFETY: it held a value before the sweep.
                    assert_eq!(unsafe { slot.assume_init() }, (i / len) as f32);
                }
            }
        }
    }
}
