//! Floating-point numbers as PTX defines them, where Rust differs: half precision, NaNs, modes of
//! rounding.

/// A subnormal number becomes a zero of its sign.
#[inline(always)]
pub fn flush32(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits(if bits & 0x7f80_0000 == 0 {
        bits & 0x8000_0000
    } else {
        bits
    })
}

/// Any NaN becomes the one that f32 instructions return.
#[inline(always)]
pub fn canonical32(value: f32) -> f32 {
    // By its bits: a compiler may take any NaN for any other.
    let bits = value.to_bits();
    f32::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 {
        0x7fff_ffff
    } else {
        bits
    })
}

#[inline(always)]
pub fn of_f16(bits: u32) -> f32 {
    // The exponent is moved by a multiplication, which also gives subnormals theirs.
    let magnitude = (bits & 0x7fff) << 13;
    let sign = (bits & 0x8000) << 16;
    let scaled = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let special = f32::from_bits(magnitude | 0x7f80_0000);
    let value = if bits & 0x7c00 == 0x7c00 {
        special
    } else {
        scaled
    };
    f32::from_bits(value.to_bits() | sign)
}

#[inline(always)]
pub fn of_bf16(bits: u32) -> f32 {
    f32::from_bits(bits << 16)
}

/// To the nearest f16, as its bits.
#[inline(always)]
pub fn to_f16(value: f32) -> u32 {
    let bits = value.to_bits();
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    let odd = magnitude >> 13 & 1;
    let normal = magnitude
        .wrapping_sub(112 << 23)
        .wrapping_add(0xfff)
        .wrapping_add(odd)
        >> 13;
    // One half has the unit 2^-24, in which f16 counts its subnormal numbers.
    let subnormal = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0x3f00_0000);
    let result = if magnitude > 0x7f80_0000 {
        return 0x7fff;
    } else if magnitude >= 0x477f_f000 {
        0x7c00
    } else if magnitude < 113 << 23 {
        subnormal
    } else {
        normal
    };
    result | sign
}

/// To the nearest bf16, as its bits.
#[inline(always)]
pub fn to_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let odd = bits >> 16 & 1;
    if value.is_nan() {
        0x7fff
    } else {
        bits.wrapping_add(0x7fff).wrapping_add(odd) >> 16
    }
}

/// Rounds to f32 so that a second rounding, to a format half as wide, is as if there were no first:
/// an inexact number gets an odd last bit.
#[inline(always)]
pub fn odd(value: f64) -> f32 {
    let near = value as f32;
    let exact = f64::from(near) == value || near.is_nan();
    if exact || near.to_bits() & 1 == 1 {
        near
    } else if f64::from(near) < value {
        near.next_up()
    } else {
        near.next_down()
    }
}

/// The greatest f32 that is not above `a + b`.
#[inline(always)]
pub fn sum_down(a: f64, b: f64) -> f32 {
    let sum = a + b;
    // The part of the sum that f64 has no digits for.
    let own = sum - a;
    let rest = (a - (sum - own)) + (b - own);
    let near = sum as f32;
    let above = f64::from(near) > sum || f64::from(near) == sum && rest < 0.0;
    if above {
        near.next_down()
    } else if sum == 0.0 && a.to_bits() != b.to_bits() {
        -0.0
    } else {
        canonical32(near)
    }
}

/// The f32 next to `a + b` on the side of zero.
#[inline(always)]
pub fn sum_to_zero(a: f64, b: f64) -> f32 {
    match a + b {
        sum if sum < 0.0 => -sum_down(-a, -b),
        sum if sum > 0.0 => sum_down(a, b),
        // Exact, or not a number.
        sum => canonical32(sum as f32),
    }
}

/// `a + b`, rounded so that a second rounding, to a format of half the digits or fewer, is as if
/// there were no first: an inexact sum gets an odd last bit.
#[inline(always)]
pub fn sum_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    // The part of the sum that f64 has no digits for.
    let own = sum - a;
    let rest = (a - (sum - own)) + (b - own);
    if !sum.is_finite() || rest == 0.0 || sum.to_bits() & 1 == 1 {
        sum
    } else if rest > 0.0 {
        sum.next_up()
    } else {
        sum.next_down()
    }
}

/// The quotient as `div.approx.f32` has it, which multiplies by a reciprocal. That of a divisor
/// above 2^126 is too small, and becomes zero.
#[inline(always)]
pub fn quotient(a: f32, b: f32) -> f64 {
    let (a, b) = (f64::from(a), f64::from(b));
    match b.abs() > 2f64.powi(126) {
        true => a * 0f64.copysign(b),
        false => a / b,
    }
}

/// A number with the lower 32 of its bits zero. A subnormal number becomes a zero of its sign.
#[inline(always)]
pub fn upper_half(value: f64) -> f64 {
    if value.is_nan() {
        return f64::NAN;
    }
    let upper = f64::from_bits(value.to_bits() >> 32 << 32);
    match upper.is_subnormal() {
        true => 0f64.copysign(upper),
        false => upper,
    }
}

/// The lesser number, or NaN if one of the two is. -0 is less than +0.
#[inline(always)]
pub fn min_or_nan(a: f32, b: f32) -> f32 {
    match a.is_nan() || b.is_nan() {
        true => f32::NAN,
        false => min32(a, b),
    }
}

/// The lesser number; a NaN loses, and -0 is less than +0.
#[inline(always)]
pub fn min32(a: f32, b: f32) -> f32 {
    match a == b {
        true => f32::from_bits(a.to_bits() | b.to_bits()),
        false => a.min(b),
    }
}

#[inline(always)]
pub fn min64(a: f64, b: f64) -> f64 {
    match a == b {
        true => f64::from_bits(a.to_bits() | b.to_bits()),
        false => a.min(b),
    }
}
