//! Arithmetic on adjacent columns of a row, in vectors.
//!
//! A [`Span`] is a run of adjacent columns, `K` vectors of them. It loads these columns from
//! any of the arrays of a row (x, dy, a weight, the sums), whatever the dtype, as [`Lanes`]. Lanes
//! have `+`, `-`, `*`, `/` and [`mul_add`](Lanes::mul_add), so an equation of the paper is one line:
//!
//! ```text
//! let x = at.load(x) * at.splat(group.inv_rms);     x̃ = r x
//! ```
//!
//! `K` is a constant, so that the vectors stay in registers and the loops over them are unrolled.
//! Everything here is `#[inline(always)]`: a function that is not inlined into code that was
//! compiled for a level runs in the instructions of the baseline.

use crate::device::cpu::convert::{Accumulator, Element, MOST_COLUMNS};
use pulp::Simd;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Add, Div, Mul, Sub};

/// Adjacent columns of a row, as many as `K` vectors of `S` hold, to be computed with in dtype `A`.
#[derive(Clone, Copy)]
pub(crate) struct Span<S, A, const K: usize> {
    simd: S,
    /// The first column.
    start: usize,
    dtype: PhantomData<A>,
}

impl<S: Simd, A: Accumulator, const K: usize> Span<S, A, K> {
    /// The number of columns.
    pub const WIDTH: usize = K * size_of::<A::Vector<S>>() / size_of::<A>();

    #[inline(always)]
    pub fn new(simd: S, start: usize) -> Self {
        const { assert!(Self::WIDTH <= MOST_COLUMNS) };
        Self {
            simd,
            start,
            dtype: PhantomData,
        }
    }

    /// The number of columns.
    #[inline(always)]
    pub fn width(self) -> usize {
        Self::WIDTH
    }

    /// The first column.
    #[inline(always)]
    pub fn start(self) -> usize {
        self.start
    }

    /// The column after the last.
    #[inline(always)]
    fn end(self) -> usize {
        self.start + Self::WIDTH
    }

    /// Whether all of these are among the first `len` columns.
    ///
    /// [`load`](Self::load) and [`store`](Self::store) test the same of an array. From this form of
    /// the test the compiler knows that theirs is true too, of each array that has `len` columns or
    /// more. So in a loop with this condition they test nothing.
    #[inline(always)]
    pub fn fits(self, len: usize) -> bool {
        Self::WIDTH <= len && self.start <= len - Self::WIDTH
    }

    /// The same, of columns that begin among the first `len` or right after them. After a loop of
    /// blocks it takes three instructions less.
    #[inline(always)]
    pub fn is_left(self, len: usize) -> bool {
        len - self.start >= Self::WIDTH
    }

    /// The span after this one, as wide.
    #[inline(always)]
    pub fn next(self) -> Self {
        Self::new(self.simd, self.end())
    }

    /// 0 in every column.
    #[inline(always)]
    pub fn zero(self) -> Lanes<S, A, K> {
        self.splat(A::zero())
    }

    /// `value` in every column.
    #[inline(always)]
    pub fn splat(self, value: A) -> Lanes<S, A, K> {
        Lanes {
            simd: self.simd,
            vectors: [A::splat(self.simd, value); K],
        }
    }

    /// These columns of an array of a row.
    #[inline(always)]
    pub fn load<T: Element<Acc = A>>(self, row: &[T]) -> Lanes<S, A, K> {
        let mut lanes = self.zero();
        let columns = &row[self.start..][..Self::WIDTH];
        T::load(self.simd, columns, &mut lanes.vectors);
        lanes
    }

    /// Writes these columns of an array in the dtype of the sums.
    #[inline(always)]
    pub fn store(self, lanes: Lanes<S, A, K>, row: &mut [A]) {
        let columns = &mut row[self.start..][..Self::WIDTH];
        for k in 0..K {
            A::vectors_mut::<S>(columns)[k] = lanes.vectors[k];
        }
    }
}

/// The values of a [`Span`], in the dtype of the sums.
#[derive(Clone, Copy)]
pub(crate) struct Lanes<S: Simd, A: Accumulator, const K: usize> {
    simd: S,
    vectors: [A::Vector<S>; K],
}

impl<S: Simd, A: Accumulator, const K: usize> Lanes<S, A, K> {
    /// Writes as many columns of an output, rounded to its dtype.
    #[inline(always)]
    pub fn write<T: Element<Acc = A>>(self, columns: &mut [MaybeUninit<T>]) {
        T::store(self.simd, &self.vectors, columns);
    }

    /// `self * factor + term`, rounded once if the level has an instruction for that and the
    /// columns fill a vector. pulp multiplies and adds columns after the last vector one by one.
    #[inline(always)]
    pub fn mul_add(mut self, factor: Self, term: Self) -> Self {
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

    /// `then` where `self < bound`, else `otherwise`. A NaN is not less.
    #[inline(always)]
    pub fn select_less(mut self, bound: Self, then: Self, otherwise: Self) -> Self {
        for k in 0..K {
            self.vectors[k] = A::select_less_vectors(
                self.simd,
                self.vectors[k],
                bound.vectors[k],
                then.vectors[k],
                otherwise.vectors[k],
            );
        }
        self
    }

    /// `2ⁿ` of lanes that are integers n.
    #[inline(always)]
    pub fn power_of_two(mut self) -> Self {
        for k in 0..K {
            self.vectors[k] = A::powers_of_two(self.simd, self.vectors[k]);
        }
        self
    }

    /// The sum of the `K` vectors.
    #[inline(always)]
    pub fn sum(self) -> Lanes<S, A, 1> {
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
operator!(Div, div, div_vectors);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::run::level::Level;
    use pulp::WithSimd;

    /// (1 + 2⁻¹²)² − (1 + 2⁻¹¹): 2⁻²⁴ in each lane, or 0 if `f32` rounds the square.
    struct Square;

    impl WithSimd for Square {
        type Output = f32;

        fn with_simd<S: Simd>(self, simd: S) -> f32 {
            let at = Span::<S, f32, 1>::new(simd, 0);
            let [x, rounded] = [12, 11].map(|bits| at.splat(1. + 0.5f32.powi(bits)));
            x.mul_add(x, rounded * at.splat(-1.)).total()
        }
    }

    #[test]
    fn a_product_is_rounded_once_where_an_instruction_does_so() {
        for level in Level::all() {
            let once = !matches!(level, Level::Baseline);
            assert_eq!(level.run(Square) > 0., once, "{level:?}");
        }
    }
}
