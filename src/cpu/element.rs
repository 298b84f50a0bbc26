//! The element types of rows, and the arithmetic their sums are taken in.

use super::uninit::Piece;
use candle::WithDType;
use half::{bf16, f16};
use num_traits::Float;

/// The type sums are taken in: `f32`, or `f64` for `f64` rows.
pub(crate) trait Accumulator: Element<Acc = Self> + Float {
    const ZERO: Self;
    const ONE: Self;

    fn from_count(n: usize) -> Self {
        Self::from_f64(n as f64)
    }
}

impl Accumulator for f32 {
    const ZERO: Self = 0.;
    const ONE: Self = 1.;
}

impl Accumulator for f64 {
    const ZERO: Self = 0.;
    const ONE: Self = 1.;
}

/// A type rows are stored in. Conversions are free of branches and calls, so that loops over them
/// become vector code on every processor.
pub(crate) trait Element: WithDType {
    type Acc: Accumulator;

    /// Rounds to nearest, ties to even.
    fn narrow(value: Self::Acc) -> Self;

    /// The same values in the dtype of the sums, in `scratch` unless they are so already.
    fn widened<'a>(values: &'a [Self], scratch: &'a mut Vec<Self::Acc>) -> &'a [Self::Acc];

    /// The output itself, where values of the sums' dtype can go there unconverted.
    fn direct<'p, 'a>(
        piece: &'p mut Piece<'a, Self>,
    ) -> Result<&'p mut Piece<'a, Self::Acc>, &'p mut Piece<'a, Self>>;
}

impl Element for f32 {
    type Acc = f32;

    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn widened<'a>(values: &'a [f32], _: &'a mut Vec<f32>) -> &'a [f32] {
        values
    }

    #[inline(always)]
    fn direct<'p, 'a>(
        piece: &'p mut Piece<'a, f32>,
    ) -> Result<&'p mut Piece<'a, f32>, &'p mut Piece<'a, f32>> {
        Ok(piece)
    }
}

impl Element for f64 {
    type Acc = f64;

    #[inline(always)]
    fn narrow(value: f64) -> f64 {
        value
    }

    #[inline(always)]
    fn widened<'a>(values: &'a [f64], _: &'a mut Vec<f64>) -> &'a [f64] {
        values
    }

    #[inline(always)]
    fn direct<'p, 'a>(
        piece: &'p mut Piece<'a, f64>,
    ) -> Result<&'p mut Piece<'a, f64>, &'p mut Piece<'a, f64>> {
        Ok(piece)
    }
}

impl Element for bf16 {
    type Acc = f32;

    #[inline(always)]
    fn widened<'a>(values: &'a [bf16], scratch: &'a mut Vec<f32>) -> &'a [f32] {
        scratch.resize(values.len(), 0.);
        for (wide, value) in scratch.iter_mut().zip(values) {
            *wide = widen_bf16(*value);
        }
        scratch
    }

    #[inline(always)]
    fn direct<'p, 'a>(
        piece: &'p mut Piece<'a, bf16>,
    ) -> Result<&'p mut Piece<'a, f32>, &'p mut Piece<'a, bf16>> {
        Err(piece)
    }

    #[inline(always)]
    fn narrow(value: f32) -> bf16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // A NaN must not be rounded up to infinity: keep its sign and top bits, and make it quiet.
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
    }
}

/// 2⁻¹⁴, the smallest normal f16.
const F16_MIN_NORMAL: f32 = 6.103_515_6e-5;

impl Element for f16 {
    type Acc = f32;

    #[inline(always)]
    fn widened<'a>(values: &'a [f16], scratch: &'a mut Vec<f32>) -> &'a [f32] {
        scratch.resize(values.len(), 0.);
        for (wide, value) in scratch.iter_mut().zip(values) {
            *wide = widen_f16(*value);
        }
        scratch
    }

    #[inline(always)]
    fn direct<'p, 'a>(
        piece: &'p mut Piece<'a, f16>,
    ) -> Result<&'p mut Piece<'a, f32>, &'p mut Piece<'a, f16>> {
        Err(piece)
    }

    #[inline(always)]
    fn narrow(value: f32) -> f16 {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_agrees_with_half_on_every_pattern() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (
                widen_f16(f16::from_bits(bits)),
                f16::from_bits(bits).to_f32(),
            );
            assert!(
                ours == theirs || (ours.is_nan() && theirs.is_nan()),
                "f16 {bits:#06x}"
            );
            let (ours, theirs) = (
                widen_bf16(bf16::from_bits(bits)),
                bf16::from_bits(bits).to_f32(),
            );
            assert!(
                ours == theirs || (ours.is_nan() && theirs.is_nan()),
                "bf16 {bits:#06x}"
            );
        }
    }

    /// Every f32 whose low half is one of those where rounding turns: just below, at and just above a
    /// tie of either type.
    #[test]
    fn narrowing_agrees_with_half_around_every_tie() {
        for high in 0..=u16::MAX {
            for low in [
                0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x2fff, 0x3000, 0x3001,
                0x7fff, 0x8000, 0x8001, 0x9000, 0xffff,
            ] {
                let value = f32::from_bits((u32::from(high) << 16) | low);
                let (ours, theirs) = (<f16 as Element>::narrow(value), f16::from_f32(value));
                assert!(
                    ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                    "f16 of {value:e}: {ours:?}, expected {theirs:?}"
                );
                let (ours, theirs) = (<bf16 as Element>::narrow(value), bf16::from_f32(value));
                assert!(
                    ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                    "bf16 of {value:e}: {ours:?}, expected {theirs:?}"
                );
            }
        }
    }
}
