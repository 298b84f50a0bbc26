//! The results that PTX's manual gives for instructions, in arithmetic without rounding and one
//! rounding at the end.

use num_bigint::{BigInt, BigUint, Sign};
use std::cmp::Ordering;

/// An instruction's form, as in `cvt.rn.f32.f64`.
pub struct Form<'a> {
    pub name: &'a str,
    opcode: &'a str,
    /// The second part of the name: where there is a mode of rounding or a comparison, it is this.
    mode: &'a str,
    /// The types of the result and of the operands.
    pub to: &'a str,
    pub from: Vec<&'a str>,
}

impl<'a> Form<'a> {
    /// None: it moves bytes, or orders threads.
    pub fn new(name: &'a str) -> Option<Self> {
        let instruction = name.split(' ').next()?;
        let parts: Vec<&str> = instruction.split('.').collect();
        let (opcode, mode, ty) = (parts[0], *parts.get(1)?, *parts.last()?);
        let wide = if ty == "s32" { "s64" } else { "u64" };
        let last_but_one = parts[parts.len().saturating_sub(2)];
        let (to, from) = match opcode {
            "ld" | "st" | "cp" | "bra" | "bar" | "shfl" => return None,
            "setp" => ("pred", vec![ty; 2]),
            "set" => (last_but_one, vec![ty; 2]),
            "selp" => (ty, vec![ty, ty, "pred"]),
            "cvt" if last_but_one.ends_with("x2") => (last_but_one, vec![ty; 2]),
            "cvt" => (last_but_one, vec![ty]),
            "mov" if name == "mov.b32 packs" => (ty, vec!["b16"; 2]),
            "mov" if name == "mov.b64 packs" => (ty, vec!["b32"; 2]),
            "mul" if mode == "wide" => (wide, vec![ty; 2]),
            "mad" if mode == "wide" => (wide, vec![ty, ty, wide]),
            "shl" | "shr" => (ty, vec![ty, "u32"]),
            "bfi" => (ty, vec![ty, ty, "u32", "u32"]),
            "mad" | "fma" | "prmt" | "dp4a" => (ty, vec![ty; 3]),
            "neg" | "not" | "abs" | "mov" | "sqrt" | "rcp" | "rsqrt" | "ex2" | "lg2" | "popc"
            | "cvta" => (ty, vec![ty]),
            _ => (ty, vec![ty; 2]),
        };
        Some(Self {
            name,
            opcode,
            mode,
            to,
            from,
        })
    }

    /// The result's bits: `got`, if the manual leaves a choice and `got` is within it.
    pub fn expected(&self, operands: &[u64], got: u64) -> u64 {
        let moves = ["mov", "selp", "cvta", "copysign"].contains(&self.opcode);
        let floats = is_float(self.to) || is_float(self.from[0]);
        let bits = match () {
            () if moves || !floats => self.integer(operands).map_or(got, |value| value as u64),
            () if self.to.ends_with("x2") => self.pair(operands, got),
            () if self.opcode == "setp" => u64::from(self.comparison(operands)),
            () if self.opcode == "set" && !self.comparison(operands) => 0,
            () if self.opcode == "set" => finite(false, 1u8.into(), 0).rounded(self.to, ""),
            () if self.mode == "approx" => self.approximation(operands, got),
            () if is_float(self.to) => self.float(operands, got),
            () => self.whole(operands[0]),
        };
        bits & ones(bits_of(self.to))
    }

    /// The result as a number, of which the lower bits count. None: any.
    fn integer(&self, bits: &[u64]) -> Option<i128> {
        let values = bits
            .iter()
            .zip(&self.from)
            .map(|(&bits, ty)| integer_of(ty, bits));
        let values: Vec<i128> = values.collect();
        let (a, b) = (values[0], *values.get(1).unwrap_or(&0));
        let (c, d) = (*values.get(2).unwrap_or(&0), *values.get(3).unwrap_or(&0));
        let width = i128::from(bits_of(self.to));
        Some(match self.opcode {
            "add" => a + b,
            "sub" => a - b,
            "mul" => a.wrapping_mul(b),
            "mad" => a.wrapping_mul(b).wrapping_add(c),
            "div" if b != 0 => a / b,
            "rem" if b != 0 => a % b,
            "div" | "rem" => return None,
            "min" => a.min(b),
            "max" => a.max(b),
            "neg" => -a,
            "not" => !a,
            "and" => a & b,
            "or" => a | b,
            "xor" => a ^ b,
            "shl" if b < width => a << b,
            "shl" => 0,
            "shr" => a >> b.min(127),
            "popc" => a.count_ones().into(),
            "bfi" => {
                let (start, length) = (c & 255, d & 255);
                let places = start..(start + length).min(width);
                places.fold(b, |bits, at| {
                    bits & !(1 << at) | (a >> (at - start) & 1) << at
                })
            }
            "prmt" => (0..4).fold(0, |bits, at| {
                let selector = c >> (4 * at);
                let byte = (a | b << 32) >> (8 * (selector & 7)) & 255;
                let sign = if byte > 127 { 255 } else { 0 };
                bits | (if selector & 8 == 0 { byte } else { sign }) << (8 * at)
            }),
            "dp4a" => {
                let byte = |of: i128, at| integer_of("s8", (of >> (8 * at)) as u64);
                (0..4).fold(c, |sum, at| sum + byte(a, at) * byte(b, at))
            }
            "setp" => {
                let order = match self.mode {
                    "eq" => a == b,
                    "ne" => a != b,
                    "lt" => a < b,
                    "le" => a <= b,
                    "gt" => a > b,
                    _ => a >= b,
                };
                order.into()
            }
            "selp" => [b, a][c as usize],
            "copysign" => a >> (width - 1) << (width - 1) | b & !(1 << (width - 1)),
            "mov" if self.name.ends_with(" packs") => a | b << (width / 2),
            // The test puts the halves together again, the other way around.
            "mov" if self.name.ends_with("unpacks") => a >> (width / 2) | a << (width / 2),
            "mov" | "cvta" | "cvt" => a,
            _ => panic!("{} has no reference", self.name),
        })
    }

    /// Two results in one register. A conversion's first operand becomes the upper.
    fn pair(&self, operands: &[u64], got: u64) -> u64 {
        let to = &self.to[..self.to.len() - 2];
        let conversion = self.opcode == "cvt";
        let from = vec![if conversion { self.from[0] } else { to }; if conversion { 1 } else { 2 }];
        let one = Form { to, from, ..*self };
        [0, 16].into_iter().fold(0, |bits, at| {
            let halves: Vec<u64> = match conversion {
                true => vec![operands[usize::from(at == 0)]],
                false => operands.iter().map(|both| both >> at & 0xffff).collect(),
            };
            bits | one.expected(&halves, got >> at & 0xffff) << at
        })
    }

    fn comparison(&self, operands: &[u64]) -> bool {
        let ty = self.from[0];
        let nan = operands.iter().any(|&bits| Number::new(ty, bits).is_nan());
        // Zeros are equal.
        let [a, b] = [operands[0], operands[1]].map(|bits| (place(ty, bits) + 1) / 2);
        match self.mode {
            "num" => !nan,
            "nan" => nan,
            "eq" => !nan && a == b,
            "ne" => !nan && a != b,
            "lt" => !nan && a < b,
            "le" => !nan && a <= b,
            "gt" => !nan && a > b,
            "ge" => !nan && a >= b,
            "equ" => nan || a == b,
            "neu" => nan || a != b,
            "ltu" => nan || a < b,
            "leu" => nan || a <= b,
            "gtu" => nan || a > b,
            "geu" => nan || a >= b,
            _ => panic!("{} has no reference", self.name),
        }
    }

    fn float(&self, operands: &[u64], got: u64) -> u64 {
        let values = operands.iter().zip(&self.from);
        let values: Vec<Number> = values.map(|(&bits, ty)| Number::new(ty, bits)).collect();
        let sign = 1 << (bits_of(self.to) - 1);
        let digits = Format::of(self.to).digits;
        let one = finite(false, 1u8.into(), 0);
        let result = match (self.opcode, self.mode) {
            ("abs", _) if !values[0].is_nan() => return operands[0] & !sign,
            ("neg", _) if !values[0].is_nan() => return operands[0] ^ sign,
            ("abs" | "neg", _) => Nan,
            ("min" | "max", _) => return self.extreme(operands, got),
            ("add", _) => values[0].plus(&values[1], self.mode),
            ("sub", _) => values[0].plus(&values[1].negated(), self.mode),
            ("mul", _) => values[0].times(&values[1]),
            ("fma", _) => values[0].times(&values[1]).plus(&values[2], self.mode),
            ("div", _) => values[0].over(&values[1], digits),
            ("rcp", _) => one.over(&values[0], digits),
            ("sqrt", _) => values[0].root(digits),
            ("cvt", "sat") => match &values[0] {
                number if number.is_nan() || number.is_negative() => {
                    finite(false, BigUint::ZERO, 0)
                }
                _ if place(self.to, operands[0]) > place(self.to, one.rounded(self.to, "")) => one,
                number => number.clone(),
            },
            ("cvt", "rni" | "rzi" | "rmi" | "rpi") => values[0].integral(self.mode),
            ("cvt", _) => values[0].clone(),
            _ => panic!("{} has no reference", self.name),
        };
        // Instructions on f32 and halves return one NaN, those on f64 any.
        let any = ["abs", "neg"].contains(&self.opcode) || self.to == "f64";
        match result {
            Nan if any && Number::new(self.to, got).is_nan() => got,
            _ => result.rounded(self.to, self.mode),
        }
    }

    /// The lesser or the greater number. A NaN loses, and -0 is less than 0.
    fn extreme(&self, operands: &[u64], got: u64) -> u64 {
        let numbers = operands.iter().copied();
        let numbers = numbers.filter(|&bits| !Number::new(self.to, bits).is_nan());
        let by = |bits: &u64| place(self.to, *bits);
        let all = numbers.clone().count() == operands.len();
        if self.mode == "NaN" && !all {
            return Nan.rounded(self.to, "");
        }
        let found = match self.opcode {
            "min" => numbers.min_by_key(by),
            _ => numbers.max_by_key(by),
        };
        let any = self.to == "f64" && Number::new(self.to, got).is_nan();
        found.unwrap_or(if any { got } else { Nan.rounded(self.to, "") })
    }

    /// `got`, if it is within the error that the manual allows.
    fn approximation(&self, operands: &[u64], got: u64) -> u64 {
        let flush = |bits: u64| match Number::new(self.to, bits) {
            Number::Finite(one) if self.name.contains(".ftz.") && one.is_subnormal(self.to) => {
                finite(one.negative, BigUint::ZERO, 0)
            }
            other => other,
        };
        let a = flush(operands[0]);
        let digits = Format::of(self.to).digits;
        let exact = match self.opcode {
            "rsqrt" => return self.reciprocal_root(operands[0], got),
            "ex2" => return self.power_of_two(&a, got),
            "lg2" => return self.logarithm(&a, got),
            "rcp" if self.to == "f64" => return self.gross_reciprocal(operands[0], got),
            "rcp" => finite(false, 1u8.into(), 0).over(&a, digits),
            "sqrt" => a.root(digits),
            // The reciprocal of a divisor above 2^126 is 0.
            "div" if place("f32", operands[1] & 0x7fff_ffff) > place("f32", 0x7e80_0000) => {
                let b = Number::new(self.to, operands[1]);
                match b {
                    Nan => Nan,
                    b => a.times(&finite(b.is_negative(), BigUint::ZERO, 0)),
                }
            }
            "div" => a.over(&Number::new(self.to, operands[1]), digits),
            _ => panic!("{} has no reference", self.name),
        };
        // In last places of the result: 2 for a quotient. Roots and reciprocals are within 2^-23.
        let error = if self.opcode == "div" { 2 } else { 1 };
        let nearest = flush(exact.rounded(self.to, "")).rounded(self.to, "");
        match exact {
            Number::Finite(_) if nearest << 33 != 0 && nearest.abs_diff(got) <= error => got,
            _ => nearest,
        }
    }

    /// An upper half, within its last place: it is the reciprocal of the operand's upper half.
    fn gross_reciprocal(&self, operand: u64, got: u64) -> u64 {
        let subnormal = |bits: u64| bits << 1 >> 53 == 0;
        let upper = match Number::new(self.to, operand) {
            Nan => operand,
            _ if subnormal(operand) => operand >> 63 << 63,
            _ => operand >> 32 << 32,
        };
        let exact = finite(false, 1u8.into(), 0).over(&Number::new(self.to, upper), 53);
        let nearest = exact.rounded(self.to, "rz") >> 32 << 32;
        match exact {
            Nan if Number::new(self.to, got).is_nan() => got,
            _ if subnormal(nearest) => nearest >> 63 << 63,
            Number::Finite(_) if nearest.abs_diff(got) <= 1 << 32 && got << 32 == 0 => got,
            _ => nearest,
        }
    }

    /// `got`, if it is 2 to the operand within 2^-22 of it, and half a last place of subnormal
    /// numbers.
    fn power_of_two(&self, operand: &Number, got: u64) -> u64 {
        let result = Number::new(self.to, got);
        let one = match operand {
            Number::Finite(one) => one,
            Infinite(true) => return 0,
            other => return other.rounded(self.to, ""),
        };
        let at = place("f32", operand.rounded("f32", ""));
        let above = |number: f32| at >= place("f32", number.to_bits().into());
        let least = if self.name.contains(".ftz.") {
            -126f32
        } else {
            -149f32
        };
        match result {
            _ if above(128f32) => Infinite(false).rounded(self.to, ""),
            Number::Finite(zero) if zero.magnitude == BigUint::ZERO && !above(least) => 0,
            _ if !above(least - 1.0) => 0,
            Number::Finite(result) if !result.negative && result.magnitude != BigUint::ZERO => {
                let unit = 2f64.powi(result.exponent as i32 + result.magnitude.bits() as i32 - 1);
                let error = 2f64.powi(-22) + 2f64.powi(-150) / unit;
                let error = (-(1.0 - error).log2() * POINT as f64) as i128;
                let far = result.logarithm().abs_diff(one.fixed()) > error as u128;
                if far { !got } else { got }
            }
            _ => !got,
        }
    }

    /// `got`, if it is within 2^-22 of the logarithm, or of its size where the operand is no number
    /// between 1/2 and 2.
    fn logarithm(&self, operand: &Number, got: u64) -> u64 {
        let one = match operand {
            Number::Finite(one) if one.magnitude == BigUint::ZERO => {
                return Infinite(true).rounded(self.to, "");
            }
            Number::Finite(one) if !one.negative => one,
            Infinite(false) => return Infinite(false).rounded(self.to, ""),
            _ => return Nan.rounded(self.to, ""),
        };
        let exact = one.logarithm();
        let error = exact.unsigned_abs().max(POINT as u128) >> 22;
        match Number::new(self.to, got) {
            Number::Finite(result) if result.fixed().abs_diff(exact) <= error => got,
            _ => !got,
        }
    }

    /// `got`, if it is within the error that the manual allows: 2^-22.9 of the result for f32, one
    /// in the last place for f64.
    fn reciprocal_root(&self, operand: u64, got: u64) -> u64 {
        let (value, result) = (Number::new(self.to, operand), Number::new(self.to, got));
        let special = match &value {
            Number::Finite(one) if one.magnitude == BigUint::ZERO => Infinite(one.negative),
            Infinite(false) => finite(false, BigUint::ZERO, 0),
            Number::Finite(one) if !one.negative => {
                // With y for 1/√x, y²x is between (1 - error)² and (1 + error)².
                let Number::Finite(product) = result.times(&result).times(&value) else {
                    return !got;
                };
                let product = product.rounded(-120 - product.exponent, "rz");
                let error = 2f64.powf(if self.to == "f32" { 60.0 - 22.9 } else { 8.0 }) as i64;
                let near = |error| BigUint::from((1u64 << 60).wrapping_add_signed(error)).pow(2);
                let within = near(-error) <= product && product < near(error);
                return if within && !result.is_negative() {
                    got
                } else {
                    !got
                };
            }
            _ if result.is_nan() => return got,
            _ => Nan,
        };
        special.rounded(self.to, "")
    }

    /// To an integer. The manual says what NaN becomes.
    fn whole(&self, operand: u64) -> u64 {
        let (width, ty) = (bits_of(self.to), self.from[0]);
        let (least, most) = match self.to.starts_with('s') {
            true => (-(1i128 << (width - 1)), (1i128 << (width - 1)) - 1),
            false => (0, (1i128 << width) - 1),
        };
        let value = match Number::new(ty, operand).integral(self.mode) {
            Nan if width == 64 || ty == "f64" => 1 << (width - 1),
            Nan => 0,
            Infinite(negative) => {
                if negative {
                    least
                } else {
                    most
                }
            }
            Number::Finite(one) => {
                let magnitude = i128::try_from(one.magnitude).unwrap_or(i128::MAX);
                (if one.negative { -magnitude } else { magnitude }).clamp(least, most)
            }
        };
        value as u64
    }
}

pub fn is_float(ty: &str) -> bool {
    ty.contains('f')
}

/// Bits of a type's value.
pub fn bits_of(ty: &str) -> u32 {
    match ty {
        "pred" => 1,
        "f16x2" | "bf16x2" => 32,
        _ => ty.trim_start_matches(char::is_alphabetic).parse().unwrap(),
    }
}

pub fn ones(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

fn integer_of(ty: &str, bits: u64) -> i128 {
    let width = bits_of(ty);
    let value = i128::from(bits & ones(width));
    let negative = ty.starts_with('s') && value >> (width - 1) == 1;
    if negative {
        value - (1 << width)
    } else {
        value
    }
}

/// The place of a number that is no NaN among those of its format; -0 is the place before 0.
fn place(ty: &str, bits: u64) -> i128 {
    let sign = 1 << (bits_of(ty) - 1);
    let magnitude = i128::from(bits & (sign - 1));
    if bits & sign == 0 {
        2 * magnitude
    } else {
        -2 * magnitude - 1
    }
}

/// A binary format: its digits, with the one that is not stored, and the exponent of its least
/// number.
pub struct Format {
    pub digits: u32,
    least: i64,
}

impl Format {
    pub fn of(ty: &str) -> Self {
        let (digits, least) = match ty {
            "f16" => (11, -24),
            "bf16" => (8, -133),
            "f32" => (24, -149),
            _ => (53, -1074),
        };
        Self { digits, least }
    }
}

/// A number without rounding.
#[derive(Clone)]
enum Number {
    Nan,
    /// Negative, or not.
    Infinite(bool),
    Finite(Finite),
}

use Number::{Infinite, Nan};

#[derive(Clone)]
struct Finite {
    negative: bool,
    /// Times 2 to the exponent.
    magnitude: BigUint,
    exponent: i64,
    /// More digits follow, and not all are zeros.
    more: bool,
}

fn finite(negative: bool, magnitude: BigUint, exponent: i64) -> Number {
    Number::Finite(Finite {
        negative,
        magnitude,
        exponent,
        more: false,
    })
}

impl Number {
    fn new(ty: &str, bits: u64) -> Self {
        let width = bits_of(ty);
        if !is_float(ty) {
            let value = integer_of(ty, bits);
            return finite(value < 0, value.unsigned_abs().into(), 0);
        }
        let Format { digits, least } = Format::of(ty);
        let negative = bits >> (width - 1) & 1 == 1;
        let fraction = bits & ones(digits - 1);
        let exponent = bits >> (digits - 1) & ones(width - digits);
        match exponent {
            0 => finite(negative, fraction.into(), least),
            _ if exponent < ones(width - digits) => {
                let magnitude = fraction | 1 << (digits - 1);
                finite(negative, magnitude.into(), least + exponent as i64 - 1)
            }
            _ if fraction == 0 => Infinite(negative),
            _ => Nan,
        }
    }

    fn is_nan(&self) -> bool {
        matches!(self, Nan)
    }

    fn negated(&self) -> Self {
        match self.clone() {
            Nan => Nan,
            Infinite(negative) => Infinite(!negative),
            Number::Finite(one) => finite(!one.negative, one.magnitude, one.exponent),
        }
    }

    fn plus(&self, other: &Self, mode: &str) -> Self {
        let (a, b) = match (self, other) {
            (Nan, _) | (_, Nan) => return Nan,
            (Infinite(a), Infinite(b)) if a != b => return Nan,
            (Infinite(negative), _) | (_, Infinite(negative)) => return Infinite(*negative),
            (Number::Finite(a), Number::Finite(b)) => (a, b),
        };
        let exponent = a.exponent.min(b.exponent);
        let [left, right] = [a, b].map(|one| {
            let sign = if one.negative {
                Sign::Minus
            } else {
                Sign::Plus
            };
            let magnitude = &one.magnitude << (one.exponent - exponent) as u64;
            BigInt::from_biguint(sign, magnitude)
        });
        let (sign, magnitude) = (left + right).into_parts();
        let negative = match sign {
            // A zero is negative if both are, or if it is rounded down.
            Sign::NoSign if a.negative == b.negative => a.negative,
            Sign::NoSign => mode == "rm",
            sign => sign == Sign::Minus,
        };
        finite(negative, magnitude, exponent)
    }

    fn times(&self, other: &Self) -> Self {
        let negative = self.is_negative() != other.is_negative();
        match (self, other) {
            (Nan, _) | (_, Nan) => Nan,
            (Infinite(_), other) | (other, Infinite(_)) if other.is_zero() => Nan,
            (Infinite(_), _) | (_, Infinite(_)) => Infinite(negative),
            (Number::Finite(a), Number::Finite(b)) => {
                let magnitude = &a.magnitude * &b.magnitude;
                finite(negative, magnitude, a.exponent + b.exponent)
            }
        }
    }

    /// The quotient, with a digit and more than are asked for.
    fn over(&self, other: &Self, digits: u32) -> Self {
        let negative = self.is_negative() != other.is_negative();
        let (a, b) = match (self, other) {
            (Nan, _) | (_, Nan) | (Infinite(_), Infinite(_)) => return Nan,
            _ if self.is_zero() && other.is_zero() => return Nan,
            (Infinite(_), _) => return Infinite(negative),
            _ if other.is_zero() => return Infinite(negative),
            (_, Infinite(_)) => return finite(negative, BigUint::ZERO, 0),
            (Number::Finite(a), Number::Finite(b)) => (a, b),
        };
        let up = u64::from(digits) + 2 + b.magnitude.bits();
        let left = &a.magnitude << up;
        let magnitude = &left / &b.magnitude;
        Number::Finite(Finite {
            negative,
            more: &magnitude * &b.magnitude != left,
            magnitude,
            exponent: a.exponent - b.exponent - up as i64,
        })
    }

    fn root(&self, digits: u32) -> Self {
        let one = match self {
            Number::Finite(one) if one.magnitude == BigUint::ZERO => return self.clone(),
            Number::Finite(one) if !one.negative => one,
            Infinite(false) => return Infinite(false),
            _ => return Nan,
        };
        let up = 2 * i64::from(digits) + 4 + (one.exponent & 1);
        let square = &one.magnitude << up as u64;
        let magnitude = square.sqrt();
        Number::Finite(Finite {
            negative: false,
            more: &magnitude * &magnitude != square,
            magnitude,
            exponent: (one.exponent - up) / 2,
        })
    }

    fn is_negative(&self) -> bool {
        match self {
            Nan => false,
            Infinite(negative) => *negative,
            Number::Finite(one) => one.negative,
        }
    }

    fn is_zero(&self) -> bool {
        matches!(self, Number::Finite(one) if one.magnitude == BigUint::ZERO)
    }

    /// The integer that a mode rounds to.
    fn integral(&self, mode: &str) -> Self {
        match self {
            Number::Finite(one) => finite(one.negative, one.rounded(-one.exponent, mode), 0),
            other => other.clone(),
        }
    }

    /// In a format, by one rounding.
    fn rounded(&self, ty: &str, mode: &str) -> u64 {
        let Format { digits, least } = Format::of(ty);
        let width = bits_of(ty);
        let infinite = ones(width - digits) << (digits - 1);
        let magnitude = match self {
            Nan if ty == "f64" => return infinite | 1 << (digits - 2),
            Nan => return ones(width - 1),
            Infinite(_) => infinite,
            Number::Finite(one) if one.magnitude == BigUint::ZERO => 0,
            Number::Finite(one) => {
                let bits = one.magnitude.bits() as i64;
                let unit = least.max(one.exponent + bits - i64::from(digits));
                let kept = one.rounded(unit - one.exponent, mode);
                let kept = u64::try_from(kept).unwrap();
                // The digit that is not stored counts as one more in the exponent.
                let found = ((unit - least) as u64).saturating_mul(1 << (digits - 1));
                let to_zero = mode == "rz" || mode == "rm" && !one.negative;
                let most = if to_zero { infinite - 1 } else { infinite };
                found.saturating_add(kept).min(most)
            }
        };
        magnitude | u64::from(self.is_negative()) << (width - 1)
    }
}

/// 1 as a number with a fixed point.
const POINT: i128 = 1 << 60;

impl Finite {
    /// Of a format; zeros are, too.
    fn is_subnormal(&self, ty: &str) -> bool {
        let Format { digits, least } = Format::of(ty);
        let top = self.exponent + self.magnitude.bits() as i64;
        top < least + i64::from(digits)
    }

    /// With a fixed point; further digits are left out.
    fn fixed(&self) -> i128 {
        let magnitude = self.rounded(-60 - self.exponent, "rz");
        let magnitude = i128::try_from(magnitude).unwrap();
        if self.negative { -magnitude } else { magnitude }
    }

    /// The logarithm to base 2 of a positive number of up to 64 digits, with a fixed point: a
    /// square has twice the logarithm, so each squaring moves one more of its digits before the
    /// point. Off by less than 2^-54.
    fn logarithm(&self) -> i128 {
        let bits = self.magnitude.bits();
        let mut one = u64::try_from(&self.magnitude << (64 - bits)).unwrap();
        let mut result = i128::from(self.exponent + bits as i64 - 1);
        for _ in 0..60 {
            let square = (u128::from(one) * u128::from(one)) >> 63;
            let digit = square >> 64;
            one = (square >> digit) as u64;
            result = 2 * result + digit as i128;
        }
        result
    }

    /// Without this number of binary digits, rounded.
    fn rounded(&self, digits: i64, mode: &str) -> BigUint {
        if digits <= 0 {
            return &self.magnitude << -digits as u64;
        }
        let kept = &self.magnitude >> digits as u64;
        let rest = &self.magnitude - (&kept << digits as u64);
        let half = BigUint::from(1u8) << (digits - 1) as u64;
        let up = match mode {
            "rz" | "rzi" => false,
            "rm" | "rmi" => self.negative && (self.more || rest != BigUint::ZERO),
            "rpi" => !self.negative && (self.more || rest != BigUint::ZERO),
            _ => match rest.cmp(&half) {
                Ordering::Less => false,
                Ordering::Equal => self.more || kept.bit(0),
                Ordering::Greater => true,
            },
        };
        kept + u8::from(up)
    }
}
