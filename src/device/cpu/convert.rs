//! Converts between the dtype of rows and the dtype that the arithmetic runs in.
//!
//! Rows are f32, f64, bf16 or f16: an [`Element`]. Sums and products are f32, or f64 for f64 rows:
//! an [`Accumulator`]. So a row of half precision is widened as it is read and rounded once as it
//! is written, and nothing in between is rounded to half precision.
//!
//! A *vector* is a register full of accumulators: four, eight or sixteen f32, as wide as the
//! instructions that the processor has (`run/level.rs`). `S: pulp::Simd` stands for these
//! instructions, and `A::Vector<S>` for a vector. A conversion works on a few vectors at a time,
//! because half precision costs more in conversions than in arithmetic.
//!
//! | rows | widening | narrowing, to nearest, ties to even |
//! |---|---|---|
//! | f32, f64 | a load | a store |
//! | bf16 | a shift by 16 bits | integer arithmetic on the bits ([`narrow_bf16`]) |
//! | f16 | one instruction of F16C or AVX-512, else the `half` crate | the same |
//!
//! Values of a channel (statistics, coefficients) are f64 in `step.rs`. The last part of this file
//! converts them to the accumulators of a pass over rows, and back.
// For the `unsafe impl`s of `Element`, and for F16C.
#![allow(unsafe_code)]

use candle::{DType, WithDType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use num_traits::Float;
use pulp::Simd;
use pulp::bytemuck::{Pod, cast_slice, cast_slice_mut};
use std::mem::MaybeUninit;

/// The most elements that are converted at a time: four vectors of 512 bits.
pub(super) const MOST_COLUMNS: usize = 64;

/// A dtype that rows are stored in.
///
/// # Safety
///
/// [`store`](Self::store) must initialize every element of a `row` that has as many elements as
/// `vectors`. Outputs are allocated without values, and `row/output.rs` treats them as initialized
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

    /// One element, widened.
    fn widen(self) -> Self::Acc {
        Self::Acc::from_f64(self.to_f64())
    }
}

/// A dtype that sums are taken in, with pulp's operations on its vectors under one name for both.
pub(super) trait Accumulator: Element<Acc = Self> + Float + Pod {
    /// As many values as the instructions `S` work on at once.
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
    fn div_vectors<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// `then` in the lanes where `a < b`, and `otherwise` in the others, also where either is NaN.
    fn select_less_vectors<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        then: Self::Vector<S>,
        otherwise: Self::Vector<S>,
    ) -> Self::Vector<S>;
    /// `2ⁿ` of integers n, if these are exponents of normal numbers.
    fn powers_of_two<S: Simd>(simd: S, n: Self::Vector<S>) -> Self::Vector<S>;
    /// The sum of the values in a vector.
    fn total<S: Simd>(simd: S, vector: Self::Vector<S>) -> Self;
}

/// Implements both traits for f32 or f64 with the methods of `Simd` for that type.
macro_rules! accumulator {
    ($type:ident, $vector:ident, $as_simd:ident, $as_mut_simd:ident, $as_uninit_mut_simd:ident,
     $splat:ident, $add:ident, $sub:ident, $mul:ident, $mul_add:ident, $div:ident,
     $less_than:ident, $select:ident, $bits:ident, $total:ident) => {
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
            fn div_vectors<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$div(a, b)
            }

            #[inline(always)]
            fn select_less_vectors<S: Simd>(
                simd: S,
                a: S::$vector,
                b: S::$vector,
                then: S::$vector,
                otherwise: S::$vector,
            ) -> S::$vector {
                simd.$select(simd.$less_than(a, b), then, otherwise)
            }

            #[inline(always)]
            fn powers_of_two<S: Simd>(simd: S, n: S::$vector) -> S::$vector {
                // The exponent of 2ⁿ is n and a bias, and the other bits are 0. A number as large
                // as this one has an integer in its lowest bits.
                const MANTISSA: u32 = $type::MANTISSA_DIGITS - 1;
                const LARGE: $type = (3u64 << (MANTISSA - 1)) as $type;
                const BIAS: $type = ($type::MAX_EXP - 1) as $type;
                let mut powers = simd.$add(n, simd.$splat(LARGE + BIAS));
                for lane in cast_slice_mut::<_, $bits>(std::slice::from_mut(&mut powers)) {
                    *lane <<= MANTISSA;
                }
                powers
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
    div_f32s,
    less_than_f32s,
    select_f32s,
    u32,
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
    div_f64s,
    less_than_f64s,
    select_f64s,
    u64,
    reduce_sum_f64s
);

// The compiler vectorizes these loops at each level but AVX-512. There it takes the width of vectors
// from the processor that a program is built for, and `target-cpu=native` means 256 bits on Intel's.
// SAFETY: `x86::narrow_bf16` writes each vector whole, and they make up the row; the other path
// writes a slot for each lane, and the row has as many slots.
unsafe impl Element for bf16 {
    type Acc = f32;

    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn load<S: Simd>(simd: S, row: &[Self], vectors: &mut [S::f32s]) {
        #[cfg(target_arch = "x86_64")]
        if x86::widen_bf16(simd, row, vectors) {
            return;
        }
        for (lane, value) in cast_slice_mut(vectors).iter_mut().zip(row) {
            *lane = f32::from_bits(u32::from(value.to_bits()) << 16);
        }
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn store<S: Simd>(simd: S, vectors: &[S::f32s], row: &mut [MaybeUninit<Self>]) {
        #[cfg(target_arch = "x86_64")]
        if x86::narrow_bf16(simd, vectors, row) {
            return;
        }
        for (slot, &lane) in row.iter_mut().zip(cast_slice(vectors)) {
            slot.write(narrow_bf16(lane));
        }
    }
}

/// `bf16::from_f32` without branches, so that it vectorizes.
///
/// bf16 is the upper half of an f32. Adding 0x7fff carries into the upper half if the lower half is
/// above 0x8000, the tie. The upper half's lowest bit is added too, so that a tie carries exactly
/// if that bit is odd: ties go to even. For example
///
/// ```text
/// 0x3f80_8000 + 0x7fff + 0 = 0x3f80_ffff → 0x3f80    a tie, even: down
/// 0x3f81_8000 + 0x7fff + 1 = 0x3f82_0000 → 0x3f82    a tie, odd: up
/// 0x7f7f_ffff + 0x7fff + 1 = 0x7f80_7fff → 0x7f80    the largest f32: infinity
/// ```
#[inline(always)]
fn narrow_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // The carry would turn some NaNs into an infinity or a zero. A NaN keeps its sign and its upper
    // bits, and becomes quiet.
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}

// With the instructions of `x86`, else with the `half` crate.
// SAFETY: `x86::narrow` writes each vector whole, and they make up the row; the other path writes a
// row of its own and copies it over all of `row`.
unsafe impl Element for f16 {
    type Acc = f32;

    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn load<S: Simd>(simd: S, row: &[Self], vectors: &mut [S::f32s]) {
        #[cfg(target_arch = "x86_64")]
        if x86::widen(simd, row, vectors) {
            return;
        }
        widen_f16(row, cast_slice_mut(vectors));
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn store<S: Simd>(simd: S, vectors: &[S::f32s], row: &mut [MaybeUninit<Self>]) {
        #[cfg(target_arch = "x86_64")]
        if x86::narrow(simd, vectors, row) {
            return;
        }
        narrow_f16(cast_slice(vectors), row);
    }
}

/// Widens a row. On x86-64 only single columns get here: those of the baseline, and those after the
/// last vector. A copy of the `half` crate's code in each of their loops was a third of the code of
/// f16's rows.
#[cfg_attr(target_arch = "x86_64", inline(never))]
#[cfg_attr(not(target_arch = "x86_64"), inline(always))]
fn widen_f16(row: &[f16], widened: &mut [f32]) {
    row.convert_to_f32_slice(widened);
}

/// Narrows a row, all of which it writes.
#[cfg_attr(target_arch = "x86_64", inline(never))]
#[cfg_attr(not(target_arch = "x86_64"), inline(always))]
fn narrow_f16(values: &[f32], row: &mut [MaybeUninit<f16>]) {
    let mut narrowed = [f16::ZERO; MOST_COLUMNS];
    let narrowed = &mut narrowed[..row.len()];
    narrowed.convert_from_f32_slice(values);
    row.write_copy_of_slice(narrowed);
}

/// Conversions of f16 with one instruction a vector, at the levels that have it, and of bf16 at
/// 512 bits.
///
/// The functions return false at other levels. The level is a type, so the test costs nothing when
/// the program runs.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use half::slice::HalfFloatSliceExt;
    use half::{bf16, f16};
    use pulp::bytemuck::{AnyBitPattern, NoUninit, bytes_of, pod_read_unaligned};
    use pulp::x86::{V3, V4};
    use pulp::{Simd, cast};
    use std::any::Any;
    use std::arch::x86_64::{_CMP_UNORD_Q, _mm256_cvtph_ps, _mm256_cvtps_ph};
    use std::mem::MaybeUninit;

    /// `simd` as the level `L`; `None` if it is another level.
    #[inline(always)]
    fn level<L: Simd>(simd: impl Simd) -> Option<L> {
        (&simd as &dyn Any).downcast_ref().copied()
    }

    /// The bits of `value` in another type of that size.
    #[inline(always)]
    fn transmuted<A: NoUninit, B: AnyBitPattern>(value: A) -> B {
        pod_read_unaligned(bytes_of(&value))
    }

    /// The `i`-th `N` elements of a row.
    #[inline(always)]
    fn bits<const N: usize, T>(row: &[T], i: usize) -> [u16; N]
    where
        [T]: HalfFloatSliceExt,
    {
        row.reinterpret_cast().as_chunks().0[i]
    }

    /// Writes the `i`-th `N` elements of a row.
    #[inline(always)]
    fn write<const N: usize, T: Copy>(row: &mut [MaybeUninit<T>], i: usize, values: [T; N]) {
        row.as_chunks_mut::<N>().0[i].write_copy_of_slice(&values);
    }

    #[inline(always)]
    pub fn widen<S: Simd>(simd: S, row: &[f16], vectors: &mut [S::f32s]) -> bool {
        if let Some(V4 { avx512f, .. }) = level(simd) {
            for (i, vector) in vectors.iter_mut().enumerate() {
                *vector = transmuted(avx512f._mm512_cvtph_ps(cast(bits::<16, _>(row, i))));
            }
            return true;
        }
        if level::<V3>(simd).is_none() {
            return false;
        }
        for (i, vector) in vectors.iter_mut().enumerate() {
            // SAFETY: only `run/level.rs` takes a V3 from pulp, and only if the processor has F16C.
            *vector = transmuted(unsafe { _mm256_cvtph_ps(cast(bits::<8, _>(row, i))) });
        }
        true
    }

    /// The arithmetic of [`bf16::load`](super::Element::load).
    #[inline(always)]
    pub fn widen_bf16<S: Simd>(simd: S, row: &[bf16], vectors: &mut [S::f32s]) -> bool {
        let Some(V4 { avx512f, .. }) = level(simd) else {
            return false;
        };
        for (i, vector) in vectors.iter_mut().enumerate() {
            let bits = avx512f._mm512_cvtepu16_epi32(cast(bits::<16, _>(row, i)));
            *vector = transmuted(avx512f._mm512_slli_epi32::<16>(bits));
        }
        true
    }

    /// The arithmetic of [`narrow_bf16`](super::narrow_bf16).
    #[inline(always)]
    pub fn narrow_bf16<S: Simd>(
        simd: S,
        vectors: &[S::f32s],
        row: &mut [MaybeUninit<bf16>],
    ) -> bool {
        let Some(V4 { avx512f: f, .. }) = level(simd) else {
            return false;
        };
        let splat = |bits| f._mm512_set1_epi32(bits);
        for (i, &vector) in vectors.iter().enumerate() {
            let (value, bits) = (transmuted(vector), transmuted(vector));
            let upper = f._mm512_srli_epi32::<16>(bits);
            let tie = f._mm512_add_epi32(f._mm512_and_si512(upper, splat(1)), splat(0x7fff));
            let rounded = f._mm512_srli_epi32::<16>(f._mm512_add_epi32(bits, tie));
            let is_nan = f._mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            let narrowed = f._mm512_mask_or_epi32(rounded, is_nan, upper, splat(0x40));
            let bits: [u16; 16] = cast(f._mm512_cvtepi32_epi16(narrowed));
            write(row, i, bits.map(bf16::from_bits));
        }
        true
    }

    #[inline(always)]
    pub fn narrow<S: Simd>(simd: S, vectors: &[S::f32s], row: &mut [MaybeUninit<f16>]) -> bool {
        /// Rounds to nearest, ties to even.
        const NEAREST: i32 = 0;
        if let Some(V4 { avx512f, .. }) = level(simd) {
            for (i, &vector) in vectors.iter().enumerate() {
                let bits: [u16; 16] = cast(avx512f._mm512_cvtps_ph::<NEAREST>(transmuted(vector)));
                write(row, i, bits.map(f16::from_bits));
            }
            return true;
        }
        if level::<V3>(simd).is_none() {
            return false;
        }
        for (i, &vector) in vectors.iter().enumerate() {
            // SAFETY: only `run/level.rs` takes a V3 from pulp, and only if the processor has F16C.
            let bits = unsafe { _mm256_cvtps_ph::<NEAREST>(transmuted(vector)) };
            let bits: [u16; 8] = cast(bits);
            write(row, i, bits.map(f16::from_bits));
        }
        true
    }
}

/// A value for each channel, `[C]`, in the dtype of the sums over rows of `T`.
pub(super) type PerChannel<T> = Vec<<T as Element>::Acc>;

/// f64 values of channels in the dtype of the sums over rows of `T`.
pub(super) fn to_sums_dtype<T: Element>(values: &[f64]) -> PerChannel<T> {
    values
        .iter()
        .map(|&value| T::Acc::from_f64(value))
        .collect()
}

/// Values of channels in f64.
pub(super) fn to_f64<T: Element>(values: &[T::Acc]) -> Vec<f64> {
    values.iter().map(|value| value.to_f64()).collect()
}

/// Replaces values that `dtype`, which sums are taken in, cannot hold with infinity. A statistic is
/// computed here in f64 and kept in that dtype, and a value that only f64 can hold would be right in
/// this step and wrong in the next.
pub(super) fn overflowed(values: &[f64], dtype: DType) -> Vec<f64> {
    let most = match dtype {
        DType::F64 => f64::MAX,
        _ => f32::MAX.into(),
    };
    let overflow = |&value: &f64| if value > most { f64::INFINITY } else { value };
    values.iter().map(overflow).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::row::output::tests::convert;
    use crate::device::cpu::run::level::Level;
    use candle::WithDType;

    /// Both bits, or both NaN.
    fn assert_same<T: WithDType, U: WithDType>(level: Level, ours: &[T], expected: &[U]) {
        for (k, (ours, expected)) in ours.iter().zip(expected).enumerate() {
            let (ours, expected) = (ours.to_f64(), expected.to_f64());
            assert!(
                ours.to_bits() == expected.to_bits() || (ours.is_nan() && expected.is_nan()),
                "{level:?}: number {k} became {ours:e}, not {expected:e}"
            );
        }
    }

    /// Compares with the `half` crate. It widens every pattern, and narrows every f32 whose low
    /// half is just below, at or just above a tie of either type.
    fn agrees_with_half<T: Element<Acc = f32>>(from_bits: fn(u16) -> T, from_f32: fn(f32) -> T) {
        // One more than a multiple of any width, so that there is a tail. Miri is slow and takes
        // fewer.
        const STEP: usize = if cfg!(miri) { 1 << 10 } else { 1 };
        let patterns = || (0..=u16::MAX).step_by(STEP).chain([0x3c01]);
        let halves: Vec<_> = patterns().map(from_bits).collect();
        for level in Level::all() {
            let widened: Vec<f32> = convert(level, &halves);
            assert_same(level, &widened, &halves);
            for low in [
                0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x2fff, 0x3000, 0x3001,
                0x7fff, 0x8000, 0x8001, 0x9000, 0xffff,
            ] {
                let float = |high| f32::from_bits(u32::from(high) << 16 | low);
                let floats: Vec<_> = patterns().map(float).collect();
                let narrowed: Vec<T> = convert(level, &floats);
                let expected: Vec<_> = floats.iter().copied().map(from_f32).collect();
                assert_same(level, &narrowed, &expected);
            }
        }
    }

    #[test]
    fn bf16_agrees_with_half_at_every_level() {
        agrees_with_half(bf16::from_bits, bf16::from_f32);
    }

    #[test]
    fn f16_agrees_with_half_at_every_level() {
        agrees_with_half(f16::from_bits, f16::from_f32);
    }

    /// The bits of f32 values that become half precision, at every level. Each row is longer than a
    /// vector of any level, so that its first value is converted in a vector and its last alone.
    fn narrows_to<T: Element<Acc = f32>>(to_bits: fn(T) -> u16, cases: &[(f32, u16)]) {
        for level in Level::all() {
            for &(value, bits) in cases {
                let narrowed: Vec<T> = convert(level, &[value; 17]);
                for (k, half) in narrowed.into_iter().enumerate() {
                    let got = to_bits(half);
                    assert_eq!(got, bits, "{level:?}: {value:e} became {got:#06x}, at {k}");
                }
            }
        }
    }

    #[test]
    fn bf16_by_hand() {
        let between = |low: u32, high: u32| f32::from_bits((low + high) / 2);
        let cases = [
            (0., 0x0000),
            (-0., 0x8000),
            (-1.5, 0xbfc0),
            // Halfway between two neighbours: to the even one. The next f32 above goes up.
            (between(0x3f80_0000, 0x3f81_0000), 0x3f80),
            (between(0x3f81_0000, 0x3f82_0000), 0x3f82),
            (f32::from_bits(0x3f80_8001), 0x3f81),
            // Beyond the largest bf16.
            (f32::MAX, 0x7f80),
            (f32::NEG_INFINITY, 0xff80),
            // The smallest f32 is less than half of the smallest subnormal bf16.
            (f32::from_bits(1), 0x0000),
            (f32::from_bits(0x8001), 0x0001),
            (f32::from_bits(0x8001_0000), 0x8001),
        ];
        narrows_to(bf16::to_bits, &cases);
    }

    #[test]
    fn f16_by_hand() {
        let smallest = 2f32.powi(-24);
        let cases = [
            (0., 0x0000),
            (-0., 0x8000),
            (-1.5, 0xbe00),
            // Neighbours of 1 are 2⁻¹⁰ apart.
            (1. + 2f32.powi(-11), 0x3c00),
            (1. + 3. * 2f32.powi(-11), 0x3c02),
            // The largest f16, and the first f32 that is rounded beyond it.
            (65504., 0x7bff),
            (65519., 0x7bff),
            (65520., 0x7c00),
            (f32::NEG_INFINITY, 0xfc00),
            // Subnormal numbers are multiples of 2⁻²⁴: ties go to even multiples.
            (smallest, 0x0001),
            (-3. * smallest, 0x8003),
            (0.5 * smallest, 0x0000),
            (1.5 * smallest, 0x0002),
            (0.5000001 * smallest, 0x0001),
            (1023. * smallest, 0x03ff),
            (1024. * smallest, 0x0400),
        ];
        narrows_to(f16::to_bits, &cases);
    }

    /// A NaN whose payload is in the lower bits alone would be an infinity without them, and one of
    /// only ones would wrap around to 0.
    #[test]
    fn a_nan_stays_one() {
        for bits in [0x7f80_0001, 0xff80_0001, 0x7fff_ffff, 0xffff_ffff_u32] {
            let value = f32::from_bits(bits);
            let narrowed = narrow_bf16(value);
            assert!(narrowed.is_nan(), "{bits:#x}");
            assert_eq!(narrowed.is_sign_negative(), value.is_sign_negative());
            for level in Level::all() {
                assert!(
                    convert::<_, f16>(level, &[value; 17])
                        .iter()
                        .all(|half| half.is_nan())
                );
            }
        }
    }

    #[test]
    fn every_length_is_converted_whole() {
        for len in 1..70 {
            let row: Vec<f32> = (0..len).map(|k| k as f32 - 30.).collect();
            for level in Level::all() {
                let halves: Vec<f16> = convert(level, &row);
                assert_eq!(convert::<_, f32>(level, &halves), row, "{level:?}");
                let halves: Vec<bf16> = convert(level, &row);
                assert_eq!(convert::<_, f32>(level, &halves), row, "{level:?}");
            }
        }
    }

    #[test]
    fn channels_in_the_dtype_of_sums() {
        let third = 1. / 3.;
        assert_eq!(to_sums_dtype::<f64>(&[third]), [third]);
        assert_eq!(
            to_sums_dtype::<bf16>(&[third, 1e39]),
            [1f32 / 3., f32::INFINITY]
        );
        assert_eq!(to_f64::<f16>(&[0.5, -0.]), [0.5, -0.]);
    }

    #[test]
    fn a_statistic_overflows_in_the_dtype_of_sums() {
        let most = f64::from(f32::MAX);
        assert_eq!(
            overflowed(&[most, most * 1.0001, 1e-300], DType::F32),
            [most, f64::INFINITY, 1e-300]
        );
        assert_eq!(overflowed(&[1e300], DType::F64), [1e300]);
        assert!(overflowed(&[f64::NAN], DType::F32)[0].is_nan());
    }
}
