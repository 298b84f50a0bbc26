//! Floating-point numbers as PTX defines them: formats, rounding modes, NaNs, approximate
//! functions.

use std::cmp::Ordering;

/// Rounding of a result that a format cannot hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// To the nearest, ties to even.
    Nearest,
    Zero,
    /// Toward minus infinity.
    Down,
    /// Toward plus infinity.
    Up,
    /// To the nearest, ties away from zero.
    Away,
}

impl Mode {
    pub fn of_number(number: u8) -> Self {
        match number {
            1 => Self::Zero,
            2 => Self::Down,
            3 => Self::Up,
            4 => Self::Away,
            _ => Self::Nearest,
        }
    }

    /// The mode that a modifier (`rn`, `rzi`) names.
    pub fn of_modifier(text: &str) -> Option<Self> {
        Some(match text {
            "rn" | "rni" => Self::Nearest,
            "rz" | "rzi" => Self::Zero,
            "rm" | "rmi" => Self::Down,
            "rp" | "rpi" => Self::Up,
            "rna" => Self::Away,
            _ => return None,
        })
    }
}

/// A binary format of at most 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    pub mantissa: u32,
    pub exponent: u32,
}

pub const F64: Format = format(52, 11);
pub const F32: Format = format(23, 8);
pub const F16: Format = format(10, 5);
pub const BF16: Format = format(7, 8);
const fn format(mantissa: u32, exponent: u32) -> Format {
    Format { mantissa, exponent }
}

impl Format {
    fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    fn sign_bit(self) -> u64 {
        1 << (self.mantissa + self.exponent)
    }

    /// The bits of infinity.
    fn infinity(self) -> u64 {
        ((1 << self.exponent) - 1) << self.mantissa
    }

    fn largest(self) -> u64 {
        self.infinity() - 1
    }

    /// The NaN that instructions return: all bits set but the sign, except in f64.
    pub fn nan(self) -> u64 {
        if self == F64 {
            0x7ff8_0000_0000_0000
        } else {
            self.sign_bit() - 1
        }
    }

    fn smallest_normal(self) -> u64 {
        1 << self.mantissa
    }
}

/// The bits of `±magnitude * 2^exponent`, rounded. `sticky` says that the true magnitude is a
/// little larger.
fn encode(
    negative: bool,
    magnitude: u64,
    exponent: i32,
    sticky: bool,
    mode: Mode,
    format: Format,
) -> u64 {
    let sign = if negative { format.sign_bit() } else { 0 };
    if magnitude == 0 {
        return sign;
    }
    let top = 63 - magnitude.leading_zeros() as i32 + exponent;
    let least = 1 - format.bias();
    let unit = top.max(least) - format.mantissa as i32;
    let shift = unit - exponent;
    let wide = u128::from(magnitude) << 1 | u128::from(sticky);
    // `kept` counts units, `rest` is what is left of one, in steps that `half` is half of.
    let (kept, rest, half) = if shift <= 0 {
        ((u128::from(magnitude) << -shift), u128::from(sticky), 2)
    } else if shift > 100 {
        (0, 1, 2)
    } else {
        let width = shift as u32 + 1;
        (
            wide >> width,
            wide & ((1 << width) - 1),
            1u128 << (width - 1),
        )
    };
    let mut kept = kept as u64;
    let up = match mode {
        Mode::Nearest => match rest.cmp(&half) {
            Ordering::Greater => true,
            Ordering::Equal => kept & 1 == 1,
            Ordering::Less => false,
        },
        Mode::Away => rest >= half,
        Mode::Zero => false,
        Mode::Down => rest > 0 && negative,
        Mode::Up => rest > 0 && !negative,
    };
    kept += u64::from(up);
    // A subnormal's exponent field is 0, and the units of the lowest normal are the same.
    let field = (top.max(least) - least) as u64;
    let bits = (field << format.mantissa) + kept;
    if bits < format.infinity() {
        return sign | bits;
    }
    let outward = match mode {
        Mode::Nearest | Mode::Away => true,
        Mode::Zero => false,
        Mode::Down => negative,
        Mode::Up => !negative,
    };
    sign | if outward {
        format.infinity()
    } else {
        format.largest()
    }
}

/// Rounds to a format and gives its bits.
pub fn narrow(value: f64, mode: Mode, format: Format) -> u64 {
    let bits = value.to_bits();
    let negative = value.is_sign_negative();
    let sign = if negative { format.sign_bit() } else { 0 };
    let mantissa = bits & ((1 << 52) - 1);
    match bits >> 52 & 0x7ff {
        0x7ff if mantissa != 0 => format.nan(),
        0x7ff => sign | format.infinity(),
        0 => encode(negative, mantissa, -1074, false, mode, format),
        field => encode(
            negative,
            mantissa | 1 << 52,
            field as i32 - 1075,
            false,
            mode,
            format,
        ),
    }
}

/// Rounds an integer to a format and gives its bits.
pub fn of_integer(value: i128, mode: Mode, format: Format) -> u64 {
    encode(
        value < 0,
        value.unsigned_abs() as u64,
        0,
        false,
        mode,
        format,
    )
}

/// The number that bits of a format stand for. Every format here fits in f64.
pub fn widen(bits: u64, format: Format) -> f64 {
    if format == F64 {
        return f64::from_bits(bits);
    }
    let sign = if bits & format.sign_bit() != 0 {
        -1.0
    } else {
        1.0
    };
    let magnitude = bits & (format.sign_bit() - 1);
    if magnitude > format.infinity() {
        return f64::NAN;
    }
    if magnitude == format.infinity() {
        return sign * f64::INFINITY;
    }
    let field = (magnitude >> format.mantissa) as i32;
    let mantissa = magnitude & ((1 << format.mantissa) - 1);
    let (units, field) = if field == 0 {
        (mantissa, 1)
    } else {
        (mantissa | 1 << format.mantissa, field)
    };
    let exponent = field - format.bias() - format.mantissa as i32;
    sign * units as f64 * f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Rounds to a whole number.
pub fn whole(value: f64, mode: Mode) -> f64 {
    match mode {
        Mode::Nearest => value.round_ties_even(),
        Mode::Away => value.round(),
        Mode::Zero => value.trunc(),
        Mode::Down => value.floor(),
        Mode::Up => value.ceil(),
    }
}

/// A subnormal number of a format becomes a zero of its sign.
pub fn flush(bits: u64, format: Format) -> u64 {
    if bits & (format.sign_bit() - 1) < format.smallest_normal() {
        bits & format.sign_bit()
    } else {
        bits
    }
}

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

/// A number with more bits than f64 has: `high + low`, where `high` is the sum rounded.
#[derive(Clone, Copy)]
struct Exact {
    high: f64,
    low: f64,
}

fn sum(a: f64, b: f64) -> Exact {
    let high = a + b;
    let part = high - a;
    let low = (a - (high - part)) + (b - part);
    Exact {
        high,
        low: if low.is_finite() { low } else { 0.0 },
    }
}

/// Rounds to f64 so that a second rounding, to a format half as wide, is as if there were no first:
/// an inexact number gets an odd last bit.
fn odd(number: Exact) -> f64 {
    let Exact { high, low } = number;
    if low == 0.0 || !high.is_finite() || high.to_bits() & 1 == 1 {
        high
    } else if low > 0.0 {
        high.next_up()
    } else {
        high.next_down()
    }
}

/// The sum of zeros of both signs is negative only when rounded down.
fn zero_sum(result: f64, mode: Mode, operands: [f64; 2]) -> f64 {
    if result != 0.0 {
        result
    } else if operands[0] == 0.0 && operands[0].to_bits() == operands[1].to_bits() {
        operands[0]
    } else if mode == Mode::Down {
        -0.0
    } else {
        0.0
    }
}

/// `a + b` in a format that has at most half the digits of f64.
pub fn add(a: f64, b: f64, mode: Mode, format: Format) -> u64 {
    let exact = sum(a, b);
    let value = match exact.low == 0.0 {
        true => zero_sum(exact.high, mode, [a, b]),
        false => odd(exact),
    };
    narrow(value, mode, format)
}

/// The lesser number; a NaN loses, and -0 is less than +0.
#[inline(always)]
pub fn min32(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        canonical32(b)
    } else if b.is_nan() {
        a
    } else if a == b {
        f32::from_bits(a.to_bits() | b.to_bits())
    } else if a < b {
        a
    } else {
        b
    }
}

/// The greater number; a NaN loses, and +0 is greater than -0.
#[inline(always)]
pub fn max32(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        canonical32(b)
    } else if b.is_nan() {
        a
    } else if a == b {
        f32::from_bits(a.to_bits() & b.to_bits())
    } else if a > b {
        a
    } else {
        b
    }
}

#[inline(always)]
pub fn min64(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else if a == b {
        f64::from_bits(a.to_bits() | b.to_bits())
    } else if a < b {
        a
    } else {
        b
    }
}

#[inline(always)]
pub fn max64(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else if a == b {
        f64::from_bits(a.to_bits() & b.to_bits())
    } else if a > b {
        a
    } else {
        b
    }
}

/// A function that the hardware only approximates, with the relative error that the manual allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Approximate {
    Reciprocal,
    InverseRoot,
    Exponential,
}

impl Approximate {
    pub fn of_number(number: u8) -> Self {
        [Self::Reciprocal, Self::InverseRoot, Self::Exponential][usize::from(number)]
    }

    /// The function of a number, before it is rounded.
    pub fn value(self, a: f64) -> f64 {
        match self {
            Self::Reciprocal => a.recip(),
            Self::InverseRoot => a.sqrt().recip(),
            Self::Exponential => a.exp2(),
        }
    }

    /// Moves an f32 result within its documented error, to where `chance` in [-1, 1] says.
    pub fn moved(self, value: f64, chance: f64) -> f64 {
        // Results at the special inputs (0, infinities) are exact, and powers of two may be theirs.
        if !value.is_finite() || value == 0.0 {
            return value;
        }
        let ulp = 2f64.powi(-23);
        match self {
            Self::Reciprocal => value * (1.0 + chance * ulp / 2.0),
            Self::InverseRoot => value * (1.0 + chance * 2f64.powf(-22.9)),
            Self::Exponential if value == 1.0 => value,
            Self::Exponential => value * (1.0 + chance * ulp),
        }
    }
}
