//! Conversions between rows of half precision and vectors of f32.

use super::element::Element;
use half::{bf16, f16};
use pulp::bytemuck::{cast_slice, cast_slice_mut};
use pulp::Simd;
use std::mem::MaybeUninit;

/// Implements [`Element`] by the conversions of vectors in `x86`, or else by conversions of one
/// element.
macro_rules! half {
    ($type:ident, $widen:ident, $narrow:ident, $widen_row:ident, $narrow_row:ident) => {
        impl Element for $type {
            type Acc = f32;

            #[inline(always)]
            #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
            fn load<S: Simd>(simd: S, row: &[Self], vectors: &mut [S::f32s]) {
                #[cfg(target_arch = "x86_64")]
                if x86::$widen(simd, row, vectors) {
                    return;
                }
                match cast_slice_mut(vectors) {
                    [lane] => *lane = $widen(row[0]),
                    lanes => $widen_row(row, lanes),
                }
            }

            #[inline(always)]
            #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
            fn store<S: Simd>(simd: S, vectors: &[S::f32s], row: &mut [MaybeUninit<Self>]) {
                #[cfg(target_arch = "x86_64")]
                if x86::$narrow(simd, vectors, row) {
                    return;
                }
                match cast_slice(vectors) {
                    &[lane] => row[0] = MaybeUninit::new($narrow(lane)),
                    lanes => $narrow_row(lanes, row),
                }
            }
        }
    };
}

half!(bf16, widen_bf16, narrow_bf16, widen_bf16s, narrow_bf16s);
half!(f16, widen_f16, narrow_f16, widen_f16s, narrow_f16s);

#[inline(always)]
fn widen_bf16s(row: &[bf16], lanes: &mut [f32]) {
    for (lane, &value) in lanes.iter_mut().zip(row) {
        *lane = widen_bf16(value);
    }
}

#[inline(always)]
fn narrow_bf16s(lanes: &[f32], row: &mut [MaybeUninit<bf16>]) {
    for (slot, &lane) in row.iter_mut().zip(lanes) {
        slot.write(narrow_bf16(lane));
    }
}

// On x86-64 only the baseline level comes here, where a conversion takes many instructions. Inlined
// into every kernel they took a seventh of the time to compile the crate, and twice as long to run.

#[cfg_attr(target_arch = "x86_64", inline(never))]
#[cfg_attr(not(target_arch = "x86_64"), inline(always))]
fn widen_f16s(row: &[f16], lanes: &mut [f32]) {
    for (lane, &value) in lanes.iter_mut().zip(row) {
        *lane = widen_f16(value);
    }
}

#[cfg_attr(target_arch = "x86_64", inline(never))]
#[cfg_attr(not(target_arch = "x86_64"), inline(always))]
fn narrow_f16s(lanes: &[f32], row: &mut [MaybeUninit<f16>]) {
    for (slot, &lane) in row.iter_mut().zip(lanes) {
        slot.write(narrow_f16(lane));
    }
}

#[inline(always)]
fn narrow_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // A NaN must not be rounded up to infinity: keep its sign and top bits, and make it quiet.
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}

/// 2⁻¹⁴, the smallest normal f16.
const F16_MIN_NORMAL: f32 = 6.103_515_6e-5;

#[inline(always)]
fn narrow_f16(value: f32) -> f16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    let absolute = f32::from_bits(magnitude);
    // Rounded in the integer, a carry out of the mantissa goes to the exponent, where it belongs;
    // past the largest f16 that gives infinity.
    let normal = magnitude.wrapping_sub((112 << 23) - 0xfff - ((magnitude >> 13) & 1)) >> 13;
    // Next to 0.5 an f32 counts in steps of 2⁻²⁴, as an f16 subnormal does.
    let subnormal = (absolute + 0.5).to_bits() - 0.5f32.to_bits();
    let narrowed = if absolute < F16_MIN_NORMAL {
        subnormal
    } else if absolute < 65520. {
        normal
    } else if value.is_nan() {
        0x7e00 | (magnitude >> 13)
    } else {
        0x7c00
    };
    f16::from_bits((sign | (narrowed & 0x7fff)) as u16)
}

#[inline(always)]
fn widen_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

#[inline(always)]
fn widen_f16(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    let sign = (bits & 0x8000) << 16;
    let magnitude = (bits & 0x7fff) << 13;
    let exponent = bits & 0x7c00;
    // f32's exponents have a bias of 127, f16's of 15.
    let normal = magnitude + (112 << 23);
    let non_finite = magnitude | 0x7f80_0000;
    // A subnormal m·2⁻²⁴ is the mantissa of 2⁻¹⁴ + m·2⁻²⁴.
    let subnormal =
        (f32::from_bits(F16_MIN_NORMAL.to_bits() | magnitude) - F16_MIN_NORMAL).to_bits();
    let magnitude = match exponent {
        0x7c00 => non_finite,
        0 => subnormal,
        _ => normal,
    };
    f32::from_bits(sign | magnitude)
}

/// Conversions that take an instruction or a few, at the levels that have them.
#[cfg(target_arch = "x86_64")]
mod x86 {
    #![allow(unsafe_code)]

    use half::slice::HalfFloatSliceExt;
    use half::{bf16, f16};
    use pulp::bytemuck::{bytes_of, pod_read_unaligned, AnyBitPattern, NoUninit};
    use pulp::x86::{V3, V4};
    use pulp::{cast, Simd};
    use std::any::Any;
    use std::arch::x86_64::{_mm256_cvtph_ps, _mm256_cvtps_ph, _CMP_UNORD_Q};
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
    fn bits<T, const N: usize>(row: &[T], i: usize) -> [u16; N]
    where
        [T]: HalfFloatSliceExt,
    {
        row.reinterpret_cast().as_chunks().0[i]
    }

    #[inline(always)]
    fn write<T, const N: usize>(
        row: &mut [MaybeUninit<T>],
        i: usize,
        bits: [u16; N],
        value: fn(u16) -> T,
    ) {
        let slots: &mut [_; N] = &mut row.as_chunks_mut().0[i];
        for (slot, bits) in slots.iter_mut().zip(bits) {
            slot.write(value(bits));
        }
    }

    // Each returns false if the level has no such conversion.

    #[inline(always)]
    pub fn widen_bf16<S: Simd>(simd: S, row: &[bf16], vectors: &mut [S::f32s]) -> bool {
        if let Some(V4 { avx512f, .. }) = level(simd) {
            for (i, vector) in vectors.iter_mut().enumerate() {
                let wide = avx512f._mm512_cvtepu16_epi32(cast(bits::<_, 16>(row, i)));
                *vector = same(avx512f._mm512_slli_epi32::<16>(wide));
            }
            return true;
        }
        let Some(V3 { avx2, .. }) = level(simd) else {
            return false;
        };
        for (i, vector) in vectors.iter_mut().enumerate() {
            let wide = avx2._mm256_cvtepu16_epi32(cast(bits::<_, 8>(row, i)));
            *vector = same(avx2._mm256_slli_epi32::<16>(wide));
        }
        true
    }

    /// [`super::narrow_bf16`], of vectors.
    #[inline(always)]
    pub fn narrow_bf16<S: Simd>(
        simd: S,
        vectors: &[S::f32s],
        row: &mut [MaybeUninit<bf16>],
    ) -> bool {
        const QUIET: i32 = 0x40_0000;
        if let Some(V4 { avx512f, .. }) = level(simd) {
            for (i, &vector) in vectors.iter().enumerate() {
                let (bits, values) = (same(vector), same(vector));
                let odd = avx512f._mm512_and_si512(
                    avx512f._mm512_srli_epi32::<16>(bits),
                    avx512f._mm512_set1_epi32(1),
                );
                let half = avx512f._mm512_add_epi32(odd, avx512f._mm512_set1_epi32(0x7fff));
                let rounded = avx512f._mm512_mask_or_epi32(
                    avx512f._mm512_add_epi32(bits, half),
                    avx512f._mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values),
                    bits,
                    avx512f._mm512_set1_epi32(QUIET),
                );
                let high = avx512f._mm512_cvtepi32_epi16(avx512f._mm512_srli_epi32::<16>(rounded));
                write::<_, 16>(row, i, cast(high), bf16::from_bits);
            }
            return true;
        }
        let Some(V3 { avx, avx2, .. }) = level(simd) else {
            return false;
        };
        for (i, &vector) in vectors.iter().enumerate() {
            let (bits, values) = (same(vector), same(vector));
            let odd =
                avx2._mm256_and_si256(avx2._mm256_srli_epi32::<16>(bits), avx._mm256_set1_epi32(1));
            let half = avx2._mm256_add_epi32(odd, avx._mm256_set1_epi32(0x7fff));
            let rounded = avx._mm256_blendv_ps(
                cast(avx2._mm256_add_epi32(bits, half)),
                cast(avx2._mm256_or_si256(bits, avx._mm256_set1_epi32(QUIET))),
                avx._mm256_cmp_ps::<_CMP_UNORD_Q>(values, values),
            );
            // Moves the high halves to the front of each 16 bytes, then to the front of all.
            const HIGH: [i8; 16] = [2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1];
            let high = avx2._mm256_shuffle_epi8(cast(rounded), cast([HIGH; 2]));
            let front = avx2._mm256_permute4x64_epi64::<0b1000>(high);
            let front = avx._mm256_castsi256_si128(front);
            write::<_, 8>(row, i, cast(front), bf16::from_bits);
        }
        true
    }

    #[inline(always)]
    pub fn widen_f16<S: Simd>(simd: S, row: &[f16], vectors: &mut [S::f32s]) -> bool {
        if let Some(V4 { avx512f, .. }) = level(simd) {
            for (i, vector) in vectors.iter_mut().enumerate() {
                *vector = same(avx512f._mm512_cvtph_ps(cast(bits::<_, 16>(row, i))));
            }
            return true;
        }
        if level::<V3>(simd).is_none() {
            return false;
        }
        for (i, vector) in vectors.iter_mut().enumerate() {
            // SAFETY: `Level::run` takes V3 only where the processor has F16C too.
            *vector = same(unsafe { _mm256_cvtph_ps(cast(bits::<_, 8>(row, i))) });
        }
        true
    }

    #[inline(always)]
    pub fn narrow_f16<S: Simd>(simd: S, vectors: &[S::f32s], row: &mut [MaybeUninit<f16>]) -> bool {
        // To nearest, ties to even.
        const NEAREST: i32 = 0;
        if let Some(V4 { avx512f, .. }) = level(simd) {
            for (i, &vector) in vectors.iter().enumerate() {
                let bits = avx512f._mm512_cvtps_ph::<NEAREST>(same(vector));
                write::<_, 16>(row, i, cast(bits), f16::from_bits);
            }
            return true;
        }
        if level::<V3>(simd).is_none() {
            return false;
        }
        for (i, &vector) in vectors.iter().enumerate() {
            // SAFETY: as in `widen_f16`.
            let bits = unsafe { _mm256_cvtps_ph::<NEAREST>(same(vector)) };
            write::<_, 8>(row, i, cast(bits), f16::from_bits);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    #![allow(unsafe_code)]

    use super::*;
    use crate::device::cpu::lanes::{sweep, Columns, Groups, Lanes, Scaling};
    use crate::device::cpu::simd::Level;
    use pulp::WithSimd;

    /// The f32 of `halves`, and the halves of `floats`.
    struct Conversions<T> {
        halves: Vec<T>,
        floats: Vec<f32>,
        widened: Vec<f32>,
        narrowed: Vec<MaybeUninit<T>>,
    }

    struct Convert<'a, T> {
        halves: &'a [T],
        floats: &'a [f32],
        widened: &'a mut [f32],
    }

    impl<T: Element<Acc = f32>> Columns<f32> for Convert<'_, T> {
        fn step<S: Simd, const K: usize>(
            &mut self,
            simd: S,
            at: usize,
            _: Scaling<f32>,
        ) -> Lanes<S, f32, K> {
            Lanes::<S, _, K>::load(simd, self.halves, at).store(self.widened, at);
            Lanes::load(simd, self.floats, at)
        }
    }

    impl<T: Element<Acc = f32>> WithSimd for &mut Conversions<T> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            let groups = Groups::new(self.halves.len(), self.halves.len());
            let mut convert = Convert {
                halves: &self.halves,
                floats: &self.floats,
                widened: &mut self.widened,
            };
            sweep::<4, _, _>(simd, &groups, &mut convert, &mut self.narrowed[..]);
        }
    }

    /// Compares with the `half` crate. It widens every pattern, and narrows every f32 whose low
    /// half is just below, at or just above a tie of either type.
    fn convert<T: Element<Acc = f32> + std::fmt::Debug>(
        from_bits: fn(u16) -> T,
        to_bits: fn(T) -> u16,
        to_f32: fn(T) -> f32,
        from_f32: fn(f32) -> T,
    ) {
        for level in Level::all() {
            for low in [
                0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x2fff, 0x3000, 0x3001,
                0x7fff, 0x8000, 0x8001, 0x9000, 0xffff,
            ] {
                // One more than a multiple of any width, so that there is a tail. Miri is slow and
                // takes fewer.
                const STEP: usize = if cfg!(miri) { 1 << 10 } else { 1 };
                let patterns = || (0..=u16::MAX).step_by(STEP).chain([0x3c01]);
                let len = patterns().count();
                let mut conversions = Conversions {
                    halves: patterns().map(from_bits).collect(),
                    floats: patterns()
                        .map(|high| f32::from_bits(u32::from(high) << 16 | low))
                        .collect(),
                    widened: vec![0.; len],
                    narrowed: vec![MaybeUninit::new(from_bits(0)); len],
                };
                level.run(&mut conversions);
                for k in 0..len {
                    let (ours, theirs) = (conversions.widened[k], to_f32(conversions.halves[k]));
                    assert!(
                        ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                        "{level:?}: {:?} became {ours:e}",
                        conversions.halves[k]
                    );
                    let value = conversions.floats[k];
                    // SAFETY: it held a value before the sweep.
                    let ours = unsafe { conversions.narrowed[k].assume_init() };
                    let theirs = from_f32(value);
                    assert!(
                        to_bits(ours) == to_bits(theirs)
                            || (to_f32(ours).is_nan() && to_f32(theirs).is_nan()),
                        "{level:?}: {value:e} became {ours:?}, expected {theirs:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn bf16_agrees_with_half_at_every_level() {
        convert(bf16::from_bits, bf16::to_bits, bf16::to_f32, bf16::from_f32);
    }

    #[test]
    fn f16_agrees_with_half_at_every_level() {
        convert(f16::from_bits, f16::to_bits, f16::to_f32, f16::from_f32);
    }
}
