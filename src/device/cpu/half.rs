//! Conversions between rows of half precision and vectors of f32.

use super::element::Element;
use super::lanes::MOST_COLUMNS;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::bytemuck::{cast_slice, cast_slice_mut};
use pulp::Simd;
use std::mem::MaybeUninit;

/// The compiler turns these loops into the vectors of each level. Beside them, intrinsics took up
/// to 4 % less time at 256 bits, and up to 4 % more at 512.
// SAFETY: `store` writes a slot for each lane, and the row has as many slots.
#[allow(unsafe_code)]
unsafe impl Element for bf16 {
    type Acc = f32;

    #[inline(always)]
    fn load<S: Simd>(_: S, row: &[Self], vectors: &mut [S::f32s]) {
        for (lane, value) in cast_slice_mut(vectors).iter_mut().zip(row) {
            *lane = f32::from_bits(u32::from(value.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn store<S: Simd>(_: S, vectors: &[S::f32s], row: &mut [MaybeUninit<Self>]) {
        for (slot, &lane) in row.iter_mut().zip(cast_slice(vectors)) {
            slot.write(narrow_bf16(lane));
        }
    }
}

/// `bf16::from_f32` without branches.
#[inline(always)]
fn narrow_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // A NaN must not be rounded up to infinity: keep its sign and top bits, and make it quiet.
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}

/// By the conversions of vectors in `x86`, or else by those of the `half` crate.
// SAFETY: `x86::narrow` writes each vector whole, and they make up the row; the other path writes a
// row of its own and copies it over all of `row`.
#[allow(unsafe_code)]
unsafe impl Element for f16 {
    type Acc = f32;

    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn load<S: Simd>(simd: S, row: &[Self], vectors: &mut [S::f32s]) {
        #[cfg(target_arch = "x86_64")]
        if x86::widen(simd, row, vectors) {
            return;
        }
        row.convert_to_f32_slice(cast_slice_mut(vectors));
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn store<S: Simd>(simd: S, vectors: &[S::f32s], row: &mut [MaybeUninit<Self>]) {
        #[cfg(target_arch = "x86_64")]
        if x86::narrow(simd, vectors, row) {
            return;
        }
        let mut narrowed = [f16::ZERO; MOST_COLUMNS];
        let narrowed = &mut narrowed[..row.len()];
        narrowed.convert_from_f32_slice(cast_slice(vectors));
        row.write_copy_of_slice(narrowed);
    }
}

/// Conversions by one instruction, at the levels that have one.
#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(unsafe_code)]

    use half::f16;
    use half::slice::HalfFloatSliceExt;
    use pulp::bytemuck::{bytes_of, pod_read_unaligned, AnyBitPattern, NoUninit};
    use pulp::x86::{V3, V4};
    use pulp::{cast, Simd};
    use std::any::Any;
    use std::arch::x86_64::{_mm256_cvtph_ps, _mm256_cvtps_ph};
    use std::mem::MaybeUninit;

    /// The level `L`, if that is what `simd` is. Known when this is compiled.
    #[inline(always)]
    fn level<L: Simd>(simd: impl Simd) -> Option<L> {
        (&simd as &dyn Any).downcast_ref().copied()
    }

    /// The same bits in another type of that size.
    #[inline(always)]
    fn same<A: NoUninit, B: AnyBitPattern>(value: A) -> B {
        pod_read_unaligned(bytes_of(&value))
    }

    /// The `i`-th `N` elements of a row.
    #[inline(always)]
    fn bits<const N: usize>(row: &[f16], i: usize) -> [u16; N] {
        row.reinterpret_cast().as_chunks().0[i]
    }

    /// Writes them.
    #[inline(always)]
    fn write<const N: usize>(row: &mut [MaybeUninit<f16>], i: usize, bits: [u16; N]) {
        let slots: &mut [_; N] = &mut row.as_chunks_mut().0[i];
        for (slot, bits) in slots.iter_mut().zip(bits) {
            slot.write(f16::from_bits(bits));
        }
    }

    // Both return false if the level has no such instruction.

    #[inline(always)]
    pub fn widen<S: Simd>(simd: S, row: &[f16], vectors: &mut [S::f32s]) -> bool {
        if let Some(V4 { avx512f, .. }) = level(simd) {
            for (i, vector) in vectors.iter_mut().enumerate() {
                *vector = same(avx512f._mm512_cvtph_ps(cast(bits::<16>(row, i))));
            }
            return true;
        }
        if level::<V3>(simd).is_none() {
            return false;
        }
        for (i, vector) in vectors.iter_mut().enumerate() {
            // SAFETY: `Level::run` takes V3 only where the processor has F16C too.
            *vector = same(unsafe { _mm256_cvtph_ps(cast(bits::<8>(row, i))) });
        }
        true
    }

    #[inline(always)]
    pub fn narrow<S: Simd>(simd: S, vectors: &[S::f32s], row: &mut [MaybeUninit<f16>]) -> bool {
        // To nearest, ties to even.
        const NEAREST: i32 = 0;
        if let Some(V4 { avx512f, .. }) = level(simd) {
            for (i, &vector) in vectors.iter().enumerate() {
                let bits = avx512f._mm512_cvtps_ph::<NEAREST>(same(vector));
                write::<16>(row, i, cast(bits));
            }
            return true;
        }
        if level::<V3>(simd).is_none() {
            return false;
        }
        for (i, &vector) in vectors.iter().enumerate() {
            // SAFETY: as in `widen`.
            let bits = unsafe { _mm256_cvtps_ph::<NEAREST>(same(vector)) };
            write::<8>(row, i, cast(bits));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::simd::Level;
    use crate::device::cpu::uninit::tests::convert;
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
}
