//! The element types of rows, and the vector arithmetic of their sums.
// For `unsafe impl Element` alone.
#![allow(unsafe_code)]

use candle::WithDType;
use num_traits::Float;
use pulp::Simd;
use std::mem::MaybeUninit;

/// A type rows are stored in. Vectors come from code that [`Level::run`](super::simd::Level::run)
/// runs.
///
/// # Safety
///
/// [`store`](Self::store) must initialize every element of a `row` that has as many elements as
/// `vectors`. Outputs are allocated without values, and `uninit.rs` hands them out as initialized
/// because of this.
pub(super) unsafe trait Element: WithDType {
    type Acc: Accumulator;

    /// Reads `vectors` from a row, which has as many elements.
    fn load<S: Simd>(simd: S, row: &[Self], vectors: &mut [<Self::Acc as Accumulator>::Vector<S>]);

    /// Writes `vectors` to a row, which has as many elements. Each element is rounded to nearest,
    /// ties to even.
    fn store<S: Simd>(
        simd: S,
        vectors: &[<Self::Acc as Accumulator>::Vector<S>],
        row: &mut [MaybeUninit<Self>],
    );
}

/// The type sums are taken in: `f32`, or `f64` for `f64` rows.
pub(super) trait Accumulator: Element<Acc = Self> + Float {
    const ZERO: Self;
    const ONE: Self;

    /// Elements that the instructions of a level work on at once.
    type Vector<S: Simd>: Copy;

    /// The vectors that `row` is made of.
    fn vectors_mut<S: Simd>(row: &mut [Self]) -> &mut [Self::Vector<S>];
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;
    fn add_vectors<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    fn sub_vectors<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    fn mul_vectors<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// `a * b + c`.
    fn mul_add_vectors<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;
    fn total<S: Simd>(simd: S, vector: Self::Vector<S>) -> Self;
}

/// A number for each channel, in the type that sums over `T` are taken in.
pub(super) type Numbers<T> = Vec<<T as Element>::Acc>;

/// Implements the traits by the methods of `Simd` for a type.
macro_rules! accumulator {
    ($type:ident, $vector:ident, $as_simd:ident, $as_mut_simd:ident, $as_uninit_mut_simd:ident,
     $splat:ident, $add:ident, $sub:ident, $mul:ident, $mul_add:ident, $total:ident) => {
        // SAFETY: `store` writes each vector whole, and they make up the row.
        unsafe impl Element for $type {
            type Acc = Self;

            #[inline(always)]
            fn load<S: Simd>(_: S, row: &[Self], vectors: &mut [S::$vector]) {
                for k in 0..vectors.len() {
                    vectors[k] = S::$as_simd(row).0[k];
                }
            }

            #[inline(always)]
            fn store<S: Simd>(_: S, vectors: &[S::$vector], row: &mut [MaybeUninit<Self>]) {
                let (slots, _rest) = S::$as_uninit_mut_simd(row);
                debug_assert!(slots.len() == vectors.len() && _rest.is_empty());
                for k in 0..vectors.len() {
                    slots[k].write(vectors[k]);
                }
            }
        }

        impl Accumulator for $type {
            const ZERO: Self = 0.;
            const ONE: Self = 1.;

            type Vector<S: Simd> = S::$vector;

            #[inline(always)]
            fn vectors_mut<S: Simd>(row: &mut [Self]) -> &mut [S::$vector] {
                S::$as_mut_simd(row).0
            }

            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: Self) -> S::$vector {
                simd.$splat(value)
            }

            #[inline(always)]
            fn add_vectors<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$add(a, b)
            }

            #[inline(always)]
            fn sub_vectors<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$sub(a, b)
            }

            #[inline(always)]
            fn mul_vectors<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$mul(a, b)
            }

            #[inline(always)]
            fn mul_add_vectors<S: Simd>(
                simd: S,
                a: S::$vector,
                b: S::$vector,
                c: S::$vector,
            ) -> S::$vector {
                simd.$mul_add(a, b, c)
            }

            #[inline(always)]
            fn total<S: Simd>(simd: S, vector: S::$vector) -> Self {
                simd.$total(vector)
            }
        }
    };
}

accumulator!(
    f32,
    f32s,
    as_simd_f32s,
    as_mut_simd_f32s,
    as_uninit_mut_simd_f32s,
    splat_f32s,
    add_f32s,
    sub_f32s,
    mul_f32s,
    mul_add_e_f32s,
    reduce_sum_f32s
);
accumulator!(
    f64,
    f64s,
    as_simd_f64s,
    as_mut_simd_f64s,
    as_uninit_mut_simd_f64s,
    splat_f64s,
    add_f64s,
    sub_f64s,
    mul_f64s,
    mul_add_e_f64s,
    reduce_sum_f64s
);
