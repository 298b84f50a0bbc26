//! Arithmetic: from an instruction's name to a function that computes it for the 32 lanes of a
//! warp.
//!
//! Registers, constants and special registers are all slots of 32 values, so a function only knows
//! slots. Predicates are masks.

// A comparison says what it makes of NaN, so `a < b || a > b` is not `a != b`.
#![allow(clippy::double_comparisons, clippy::neg_cmp_op_on_partial_ord)]
// Lanes are numbered in PTX.
#![allow(clippy::needless_range_loop)]

use crate::isa::float;
use crate::isa::op::{Class, Exec, Lanes, Op, bits_of, lane_count};

use std::mem::MaybeUninit;

/// An arithmetic instruction, found by its name.
pub struct Arithmetic {
    pub exec: Exec,
    pub class: Class,
    /// Bits of the operands, destination first. A predicate has one.
    pub operands: Vec<u8>,
}

#[inline(always)]
unsafe fn blend<T: Copy>(to: *mut T, from: *const T, mask: u32) {
    for lane in 0..lane_count() {
        let (old, new) = (*to.add(lane), *from.add(lane));
        *to.add(lane) = if mask >> lane & 1 == 1 { new } else { old };
    }
}

#[inline(always)]
unsafe fn put<T: Copy>(lanes: &mut Lanes, slot: u16, from: *const T, mask: u32) {
    let to = lanes.slots.add(usize::from(slot)).cast::<T>();
    if mask == !0 {
        // In halves: all of it at once would be a call of memcpy.
        std::ptr::copy_nonoverlapping(from, to, 16);
        std::ptr::copy_nonoverlapping(from.add(16), to.add(16), 16);
    } else {
        blend(to, from, mask);
    }
}

/// Writes 32 results of 32 bits.
#[inline]
pub unsafe fn put_slot(lanes: &mut Lanes, slot: u16, results: [u32; 32], mask: u32) {
    put(lanes, slot, results.as_ptr(), mask);
}

/// Writes 32 results of 64 bits.
#[inline]
pub unsafe fn put_wide(lanes: &mut Lanes, slot: u16, results: [u64; 32], mask: u32) {
    put(lanes, slot, results.as_ptr(), mask);
}

#[inline(always)]
pub(crate) unsafe fn put_predicate(lanes: &mut Lanes, predicate: u16, bits: u32, mask: u32) {
    let to = lanes.predicates.add(usize::from(predicate));
    *to = (*to & !mask) | (bits & mask);
}

/// The processor has the instructions that `both` compiles for.
#[inline(always)]
pub(crate) fn is_wide() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("popcnt");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

fn choose(base: Exec, wide: Exec) -> Exec {
    if is_wide() { wide } else { base }
}

/// Compiles a body twice, the second time for a processor with AVX2 and fused multiply-add.
macro_rules! both {
    ($body:ident) => {{
        unsafe fn base(lanes: &mut Lanes, op: &Op, mask: u32) {
            $body(lanes, op, mask)
        }
        #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma"))]
        unsafe fn wide(lanes: &mut Lanes, op: &Op, mask: u32) {
            $body(lanes, op, mask)
        }
        choose(base, wide)
    }};
}

/// An expression of one to four operands, computed for 32 lanes.
macro_rules! each {
    (|$a:ident: $ta:ty| $r:ty: $e:expr) => {
        each!(@ [$a: $ta = a], $r, $e)
    };
    (|$a:ident: $ta:ty, $b:ident: $tb:ty| $r:ty: $e:expr) => {
        each!(@ [$a: $ta = a, $b: $tb = b], $r, $e)
    };
    (|$a:ident: $ta:ty, $b:ident: $tb:ty, $c:ident: $tc:ty| $r:ty: $e:expr) => {
        each!(@ [$a: $ta = a, $b: $tb = b, $c: $tc = c], $r, $e)
    };
    (|$a:ident: $ta:ty, $b:ident: $tb:ty, $c:ident: $tc:ty, $d:ident: $td:ty| $r:ty: $e:expr) => {
        each!(@ [$a: $ta = a, $b: $tb = b, $c: $tc = c, $d: $td = e], $r, $e)
    };
    (@ [$($x:ident: $t:ty = $field:ident),*], $r:ty, $e:expr) => {{
        #[inline(always)]
        unsafe fn body(lanes: &mut Lanes, op: &Op, mask: u32) {
            $(let $x = lanes.slots.add(usize::from(op.$field)).cast::<$t>();)*
            let mut results = MaybeUninit::<[$r; 32]>::uninit();
            let to = results.as_mut_ptr().cast::<$r>();
            for lane in 0..lane_count() {
                $(let $x = *$x.add(lane);)*
                *to.add(lane) = $e;
            }
            put::<$r>(lanes, op.d, to, mask);
        }
        both!(body)
    }};
}

/// A condition of two operands, computed for 32 lanes.
macro_rules! compare {
    (|$a:ident: $ta:ty, $b:ident: $tb:ty| $e:expr) => {{
        #[inline(always)]
        unsafe fn body(lanes: &mut Lanes, op: &Op, mask: u32) {
            let a = lanes.slots.add(usize::from(op.a)).cast::<$ta>();
            let b = lanes.slots.add(usize::from(op.b)).cast::<$tb>();
            let mut bits = 0;
            for lane in 0..32 {
                let ($a, $b) = (*a.add(lane), *b.add(lane));
                bits |= if $e { 1u32 << lane } else { 0 };
            }
            put_predicate(lanes, op.d, bits, mask);
        }
        both!(body)
    }};
}

/// One of two operands, as a predicate says, for 32 lanes.
macro_rules! choice {
    ($t:ty) => {{
        #[inline(always)]
        unsafe fn body(lanes: &mut Lanes, op: &Op, mask: u32) {
            let a = lanes.slots.add(usize::from(op.a)).cast::<$t>();
            let b = lanes.slots.add(usize::from(op.b)).cast::<$t>();
            let which = *lanes.predicates.add(usize::from(op.c));
            let mut results = [0; 32];
            for (lane, result) in results[..lane_count()].iter_mut().enumerate() {
                let (a, b) = (*a.add(lane), *b.add(lane));
                *result = if which >> lane & 1 == 1 { a } else { b };
            }
            put::<$t>(lanes, op.d, results.as_ptr(), mask);
        }
        both!(body)
    }};
}

/// An expression of predicates, which needs no loop.
macro_rules! logic {
    (|$a:ident, $b:ident| $e:expr) => {{
        unsafe fn body(lanes: &mut Lanes, op: &Op, mask: u32) {
            let $a = *lanes.predicates.add(usize::from(op.a));
            let $b = *lanes.predicates.add(usize::from(op.b));
            put_predicate(lanes, op.d, $e, mask);
        }
        body as Exec
    }};
}

/// An integer expression in each of the six types, which it calls `T`. 16-bit values live in 32-bit
/// slots.
macro_rules! integers {
    ($ty:expr, |$($x:ident),+| $e:expr) => {
        match $ty {
            "u16" | "b16" => integers!(@ u32, u16, u16, [$($x),+], $e),
            "s16" => integers!(@ u32, i16, u16, [$($x),+], $e),
            "u32" | "b32" => integers!(@ u32, u32, u32, [$($x),+], $e),
            "s32" => integers!(@ u32, i32, u32, [$($x),+], $e),
            "u64" | "b64" => integers!(@ u64, u64, u64, [$($x),+], $e),
            "s64" => integers!(@ u64, i64, u64, [$($x),+], $e),
            _ => return None,
        }
    };
    (@ $slot:ty, $t:ty, $unsigned:ty, [$($x:ident),+], $e:expr) => {{
        #[allow(dead_code)]
        type T = $t;
        each!(|$($x: $slot),+| $slot: {
            $(let $x = $x as T;)+
            ($e) as $unsigned as $slot
        })
    }};
}

macro_rules! integer_condition {
    ($ty:expr, |$a:ident, $b:ident| $e:expr) => {
        match $ty {
            "u16" | "b16" => compare!(|$a: u32, $b: u32| $e),
            "s16" => compare!(|$a: u32, $b: u32| {
                let ($a, $b) = ($a as i16, $b as i16);
                $e
            }),
            "u32" | "b32" => compare!(|$a: u32, $b: u32| $e),
            "s32" => compare!(|$a: i32, $b: i32| $e),
            "u64" | "b64" => compare!(|$a: u64, $b: u64| $e),
            "s64" => compare!(|$a: i64, $b: i64| $e),
            _ => return None,
        }
    };
}

macro_rules! float_condition {
    ($ty:expr, |$a:ident, $b:ident| $e:expr) => {
        match $ty {
            "f32" => compare!(|$a: f32, $b: f32| $e),
            "f64" => compare!(|$a: f64, $b: f64| $e),
            "f16" => compare!(|$a: u32, $b: u32| {
                let ($a, $b) = (float::of_f16($a), float::of_f16($b));
                $e
            }),
            "bf16" => compare!(|$a: u32, $b: u32| {
                let ($a, $b) = (float::of_bf16($a), float::of_bf16($b));
                $e
            }),
            _ => return None,
        }
    };
}

/// An f32 expression on f16 or bf16 values, alone or in pairs, rounded once to their format.
macro_rules! half_variants {
    ($ty:expr, |$($x:ident),+| $e:expr) => {
        match $ty {
            "f16" => each!(|$($x: u32),+| u32: half_variants!(@ of_f16, to_f16, [$($x),+], $e)),
            "bf16" => each!(|$($x: u32),+| u32: half_variants!(@ of_bf16, to_bf16, [$($x),+], $e)),
            "bf16x2" => each!(|$($x: u32),+| u32: {
                let low = {
                    $(let $x = $x & 0xffff;)+
                    half_variants!(@ of_bf16, to_bf16, [$($x),+], $e)
                };
                let high = {
                    $(let $x = $x >> 16;)+
                    half_variants!(@ of_bf16, to_bf16, [$($x),+], $e)
                };
                low | high << 16
            }),
            _ => return None,
        }
    };
    (@ $of:ident, $to:ident, [$($x:ident),+], $e:expr) => {{
        $(let $x = float::$of($x);)+
        float::$to($e)
    }};
}

/// Finds an arithmetic instruction by its parts, as in `cvt`, `rn`, `f32`, `f64`. None if there is
/// no such.
pub fn select(parts: &[&str]) -> Option<Arithmetic> {
    let (&opcode, rest) = parts.split_first()?;
    let (&ty, modifiers) = rest.split_last()?;
    let exec = match opcode {
        "setp" => condition(modifiers, ty),
        "cvt" => conversion(modifiers, ty),
        "add" | "sub" | "mul" | "fma" | "div" | "min" | "max" | "abs" | "neg" | "sqrt" | "rcp"
        | "rsqrt" | "ex2" | "lg2"
            if ty.contains('f') =>
        {
            floating(opcode, modifiers, ty)
        }
        _ if ty == "pred" => predicate(opcode, modifiers),
        _ => integer(opcode, modifiers, ty).or_else(|| bits(opcode, modifiers, ty)),
    }?;
    let types = types_of(opcode, modifiers, ty);
    let class = match opcode {
        "set" | "setp" | "selp" | "mov" | "copysign" => Class::Integer,
        _ if modifiers.contains(&"approx") => Class::Special,
        "cvt" if types.iter().any(|ty| ty.contains('f')) => Class::Convert,
        _ if ty == "f64" => Class::Double,
        _ if ty.contains('f') => Class::Float,
        _ => Class::Integer,
    };
    Some(Arithmetic {
        exec,
        class,
        operands: types.into_iter().map(bits_of).collect::<Option<_>>()?,
    })
}

/// The types of an instruction's operands, destination first.
fn types_of<'a>(opcode: &str, modifiers: &[&'a str], ty: &'a str) -> Vec<&'a str> {
    match (opcode, modifiers) {
        ("setp", _) => vec!["pred", ty, ty],
        ("selp", _) => vec![ty, ty, ty, "pred"],
        ("set", [.., to]) => vec![to, ty, ty],
        ("cvt", [.., to]) if to.ends_with("x2") => vec![to, ty, ty],
        ("cvt", [.., to]) => vec![to, ty],
        ("mul", ["wide"]) => vec!["u64", ty, ty],
        ("mad", ["wide"]) => vec!["u64", ty, ty, "u64"],
        ("shl" | "shr", _) => vec![ty, ty, "u32"],
        ("bfi", _) => vec![ty, ty, ty, "u32", "u32"],
        ("mad" | "fma" | "prmt" | "dp4a", _) => vec![ty; 4],
        ("neg" | "not" | "abs" | "mov" | "sqrt" | "rcp" | "rsqrt" | "ex2" | "lg2" | "popc", _) => {
            vec![ty; 2]
        }
        _ => vec![ty; 3],
    }
}

fn predicate(opcode: &str, modifiers: &[&str]) -> Option<Exec> {
    Some(match (opcode, modifiers) {
        ("and", []) => logic!(|a, b| a & b),
        ("or", []) => logic!(|a, b| a | b),
        ("xor", []) => logic!(|a, b| a ^ b),
        ("not", []) => logic!(|a, _b| !a),
        ("mov", []) => logic!(|a, _b| a),
        _ => return None,
    })
}

fn condition(modifiers: &[&str], ty: &str) -> Option<Exec> {
    let &[comparison] = modifiers else {
        return None;
    };
    Some(if ty.contains('f') {
        match comparison {
            "eq" => float_condition!(ty, |a, b| a == b),
            "lt" => float_condition!(ty, |a, b| a < b),
            "le" => float_condition!(ty, |a, b| a <= b),
            "gt" => float_condition!(ty, |a, b| a > b),
            "ge" => float_condition!(ty, |a, b| a >= b),
            "ne" => float_condition!(ty, |a, b| a < b || a > b),
            "equ" => float_condition!(ty, |a, b| !(a < b || a > b)),
            "num" => float_condition!(ty, |a, b| !a.is_nan() && !b.is_nan()),
            "nan" => float_condition!(ty, |a, b| a.is_nan() || b.is_nan()),
            "neu" => float_condition!(ty, |a, b| a != b),
            "ltu" => float_condition!(ty, |a, b| !(a >= b)),
            "leu" => float_condition!(ty, |a, b| !(a > b)),
            "gtu" => float_condition!(ty, |a, b| !(a <= b)),
            "geu" => float_condition!(ty, |a, b| !(a < b)),
            _ => return None,
        }
    } else {
        match comparison {
            "eq" => integer_condition!(ty, |a, b| a == b),
            "ne" => integer_condition!(ty, |a, b| a != b),
            "lt" => integer_condition!(ty, |a, b| a < b),
            "le" => integer_condition!(ty, |a, b| a <= b),
            "gt" => integer_condition!(ty, |a, b| a > b),
            "ge" => integer_condition!(ty, |a, b| a >= b),
            _ => return None,
        }
    })
}

fn integer(opcode: &str, modifiers: &[&str], ty: &str) -> Option<Exec> {
    // PTX leaves the quotient by zero to the machine. GPUs set all its bits.
    Some(match (opcode, modifiers) {
        ("add", []) => integers!(ty, |a, b| a.wrapping_add(b)),
        ("sub", []) => integers!(ty, |a, b| a.wrapping_sub(b)),
        ("mul", ["lo"]) => integers!(ty, |a, b| a.wrapping_mul(b)),
        ("mad", ["lo"]) => integers!(ty, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        ("div", []) => integers!(ty, |a, b| if b == 0 { !0 } else { a.wrapping_div(b) }),
        ("rem", []) => integers!(ty, |a, b| if b == 0 { a } else { a.wrapping_rem(b) }),
        ("min", []) => integers!(ty, |a, b| a.min(b)),
        ("max", []) => integers!(ty, |a, b| a.max(b)),
        ("neg", []) => integers!(ty, |a| (0 as T).wrapping_sub(a)),
        ("and", []) => integers!(ty, |a, b| a & b),
        ("or", []) => integers!(ty, |a, b| a | b),
        ("xor", []) => integers!(ty, |a, b| a ^ b),
        ("not", []) => integers!(ty, |a| !a),
        _ => return None,
    })
}

fn bits(opcode: &str, modifiers: &[&str], ty: &str) -> Option<Exec> {
    Some(match (opcode, modifiers, ty) {
        ("mov", [], _) if bits_of(ty)? == 64 => each!(|a: u64| u64: a),
        ("mov", [], _) => each!(|a: u32| u32: a),
        ("selp", [], _) if bits_of(ty)? == 64 => choice!(u64),
        ("selp", [], _) => choice!(u32),
        ("popc", [], "b32") => each!(|a: u32| u32: a.count_ones()),
        ("mul", ["wide"], "u32") => each!(|a: u32, b: u32| u64: u64::from(a) * u64::from(b)),
        ("mul", ["wide"], "s32") => each!(|a: i32, b: i32| i64: i64::from(a) * i64::from(b)),
        ("mad", ["wide"], "u32") => each!(|a: u32, b: u32, c: u64| u64: {
            (u64::from(a) * u64::from(b)).wrapping_add(c)
        }),
        ("shl", [], "b16") => each!(|a: u32, b: u32| u32: if b < 16 { a << b & 0xffff } else { 0 }),
        ("shl", [], "b32") => each!(|a: u32, b: u32| u32: a.checked_shl(b).unwrap_or(0)),
        ("shl", [], "b64") => each!(|a: u64, b: u32| u64: a.checked_shl(b).unwrap_or(0)),
        ("shr", [], "u16" | "b16" | "u32" | "b32") => {
            each!(|a: u32, b: u32| u32: a.checked_shr(b).unwrap_or(0))
        }
        ("shr", [], "s32") => each!(|a: i32, b: u32| i32: a >> b.min(31)),
        ("shr", [], "u64" | "b64") => each!(|a: u64, b: u32| u64: a.checked_shr(b).unwrap_or(0)),
        ("dp4a", ["s32"], "s32") => each!(|a: u32, b: u32, c: u32| u32: {
            let mut total = c;
            for byte in 0..4 {
                let (a, b) = ((a >> (8 * byte)) as i8, (b >> (8 * byte)) as i8);
                total = total.wrapping_add((i32::from(a) * i32::from(b)) as u32);
            }
            total
        }),
        ("prmt", [], "b32") => each!(|a: u32, b: u32, c: u32| u32: {
            let both = u64::from(b) << 32 | u64::from(a);
            byte(both, c) | byte(both, c >> 4) << 8 | byte(both, c >> 8) << 16
                | byte(both, c >> 12) << 24
        }),
        ("bfi", [], "b32") => each!(|a: u32, b: u32, c: u32, d: u32| u32: {
            insert(a.into(), b.into(), c, d) as u32
        }),
        ("bfi", [], "b64") => each!(|a: u64, b: u64, c: u32, d: u32| u64: insert(a, b, c, d)),
        // 1 or 0, in f16.
        ("set", ["eq", "f16"], "f16") => each!(|a: u32, b: u32| u32: {
            if float::of_f16(a) == float::of_f16(b) { 0x3c00 } else { 0 }
        }),
        ("copysign", [], "f32") => each!(|a: u32, b: u32| u32: a & 1 << 31 | b & !(1 << 31)),
        ("copysign", [], "f64") => each!(|a: u64, b: u64| u64: a & 1 << 63 | b & !(1 << 63)),
        _ => return None,
    })
}

/// The byte of eight that a selector names. With 8 added, it is its sign.
#[inline(always)]
fn byte(both: u64, selector: u32) -> u32 {
    let byte = (both >> (8 * (selector & 7))) as u8;
    u32::from(match selector & 8 {
        0 => byte,
        _ => ((byte as i8) >> 7) as u8,
    })
}

/// `into` with a field replaced by the low bits of `field`.
#[inline(always)]
fn insert(field: u64, into: u64, start: u32, length: u32) -> u64 {
    let (start, length) = (start & 255, length & 255);
    let ones = !u64::MAX.checked_shl(length).unwrap_or(0);
    let place = ones.checked_shl(start).unwrap_or(0);
    into & !place | field.checked_shl(start).unwrap_or(0) & place
}

/// One half of a register of 32 or 64 bits.
pub fn half_of(bits: u8, upper: bool) -> Option<Exec> {
    Some(match (bits, upper) {
        (32, false) => each!(|a: u32| u32: a & 0xffff),
        (32, true) => each!(|a: u32| u32: a >> 16),
        (64, false) => each!(|a: u64| u32: a as u32),
        (64, true) => each!(|a: u64| u32: (a >> 32) as u32),
        _ => return None,
    })
}

/// A move from slots that hold the same for all lanes, which is faster than any other.
pub fn spread(wide: bool) -> Exec {
    macro_rules! spread {
        ($t:ty) => {{
            #[inline(always)]
            unsafe fn body(lanes: &mut Lanes, op: &Op, mask: u32) {
                let value = *lanes.slots.add(usize::from(op.a)).cast::<$t>();
                put(lanes, op.d, [value; 32].as_ptr(), mask);
            }
            both!(body)
        }};
    }
    match wide {
        true => spread!(u64),
        false => spread!(u32),
    }
}

/// A register of 32 or 64 bits from its lower and its upper half.
pub fn joined(bits: u8) -> Option<Exec> {
    Some(match bits {
        32 => each!(|a: u32, b: u32| u32: a & 0xffff | b << 16),
        64 => each!(|a: u32, b: u32| u64: u64::from(a) | u64::from(b) << 32),
        _ => return None,
    })
}

fn floating(opcode: &str, modifiers: &[&str], ty: &str) -> Option<Exec> {
    match (opcode, modifiers, ty) {
        (_, [] | ["rn"], "f32") => single(opcode),
        (_, [] | ["rn"], "f64") => double(opcode),
        (_, [] | ["rn"], _) => half(opcode, ty),
        ("min", ["NaN"], "f16" | "bf16") => {
            Some(half_variants!(ty, |a, b| float::min_or_nan(a, b)))
        }
        ("max", ["NaN"], "f16" | "bf16") => {
            Some(half_variants!(ty, |a, b| -float::min_or_nan(-a, -b)))
        }
        ("add", ["rz"], "f32") => {
            Some(each!(|a: f32, b: f32| f32: float::sum_to_zero(a.into(), b.into())))
        }
        // The product of two f32 is exact in f64.
        ("fma", ["rm"], "f32") => Some(each!(|a: f32, b: f32, c: f32| f32: {
            float::sum_down(f64::from(a) * f64::from(b), c.into())
        })),
        (_, ["approx", flush @ ..], _) => approximate(opcode, flush, ty),
        _ => None,
    }
}

fn single(opcode: &str) -> Option<Exec> {
    macro_rules! rounded {
        (|$($x:ident),+| $e:expr) => { each!(|$($x: f32),+| f32: float::canonical32($e)) };
    }
    Some(match opcode {
        "add" => rounded!(|a, b| a + b),
        "sub" => rounded!(|a, b| a - b),
        "mul" => rounded!(|a, b| a * b),
        "fma" => rounded!(|a, b, c| a.mul_add(b, c)),
        "div" => rounded!(|a, b| a / b),
        "rcp" => rounded!(|a| 1.0 / a),
        "sqrt" => rounded!(|a| a.sqrt()),
        "min" => rounded!(|a, b| float::min32(a, b)),
        "max" => rounded!(|a, b| -float::min32(-a, -b)),
        // Signs change without a look at the rest.
        "abs" => each!(|a: u32| u32: a & 0x7fff_ffff),
        "neg" => each!(|a: u32| u32: a ^ 0x8000_0000),
        _ => return None,
    })
}

fn double(opcode: &str) -> Option<Exec> {
    Some(match opcode {
        "add" => each!(|a: f64, b: f64| f64: a + b),
        "sub" => each!(|a: f64, b: f64| f64: a - b),
        "mul" => each!(|a: f64, b: f64| f64: a * b),
        "fma" => each!(|a: f64, b: f64, c: f64| f64: a.mul_add(b, c)),
        "div" => each!(|a: f64, b: f64| f64: a / b),
        "rcp" => each!(|a: f64| f64: 1.0 / a),
        "sqrt" => each!(|a: f64| f64: a.sqrt()),
        "min" => each!(|a: f64, b: f64| f64: float::min64(a, b)),
        "max" => each!(|a: f64, b: f64| f64: -float::min64(-a, -b)),
        "abs" => each!(|a: u64| u64: a & !(1 << 63)),
        "neg" => each!(|a: u64| u64: a ^ 1 << 63),
        _ => return None,
    })
}

fn half(opcode: &str, ty: &str) -> Option<Exec> {
    // One rounding to f32 before the last does no harm: f32 has more than twice the digits, and two
    // more.
    Some(match opcode {
        "add" => half_variants!(ty, |a, b| a + b),
        "sub" => half_variants!(ty, |a, b| a - b),
        "mul" => half_variants!(ty, |a, b| a * b),
        // The product is exact in f64.
        "fma" if ty == "f16" => each!(|a: u32, b: u32, c: u32| u32: {
            let [a, b, c] = [a, b, c].map(|bits| f64::from(float::of_f16(bits)));
            float::to_f16(float::odd(float::sum_odd(a * b, c)))
        }),
        "abs" if !ty.ends_with("x2") => each!(|a: u32| u32: a & 0x7fff),
        "neg" if !ty.ends_with("x2") => each!(|a: u32| u32: a ^ 0x8000),
        _ => return None,
    })
}

/// A function that hardware only approximates, computed in f64. Where results are perturbed, they
/// move within the relative error that the manual allows.
fn approximate(opcode: &str, flush: &[&str], ty: &str) -> Option<Exec> {
    macro_rules! within {
        ($error:expr, |$a:ident: $t:ty| $value:expr, $round:expr) => {
            within!(@ $error, $t, [$a = a], $value, $round)
        };
        ($error:expr, |$a:ident, $b:ident: $t:ty| $value:expr, $round:expr) => {
            within!(@ $error, $t, [$a = a, $b = b], $value, $round)
        };
        (@ $error:expr, $t:ty, [$($x:ident = $field:ident),+], $value:expr, $round:expr) => {{
            #[inline(always)]
            unsafe fn body(lanes: &mut Lanes, op: &Op, mask: u32) {
                $(let $x = lanes.slots.add(usize::from(op.$field)).cast::<$t>();)+
                let mut results = [0 as $t; 32];
                for lane in 0..32 {
                    $(let $x = *$x.add(lane);)+
                    let value: f64 = $value;
                    let moved = match lanes.perturb {
                        // Results at zero and infinity are exact, and powers of two may be theirs.
                        Some(seed) if value.is_normal() && value != 1.0 => {
                            value * (1.0 + chance(seed, op.line, lane, value) * $error)
                        }
                        _ => value,
                    };
                    results[lane] = $round(moved as $t);
                }
                put(lanes, op.d, results.as_ptr(), mask);
            }
            both!(body)
        }};
    }
    fn flushed(value: f32) -> f32 {
        float::canonical32(float::flush32(value))
    }
    const ULP: f64 = 1.0 / (1 << 23) as f64;
    Some(match (opcode, flush, ty) {
        ("rcp", ["ftz"], "f32") => {
            within!(
                ULP / 2.0,
                |a: f32| f64::from(float::flush32(a)).recip(),
                flushed
            )
        }
        ("ex2", ["ftz"], "f32") => {
            within!(ULP, |a: f32| f64::from(float::flush32(a)).exp2(), flushed)
        }
        ("ex2", [], "f32") => within!(ULP, |a: f32| f64::from(a).exp2(), float::canonical32),
        ("div", [], "f32") => {
            within!(
                ULP / 2.0,
                |a, b: f32| float::quotient(a, b),
                float::canonical32
            )
        }
        ("sqrt", [], "f32") => {
            within!(ULP / 2.0, |a: f32| f64::from(a).sqrt(), float::canonical32)
        }
        ("sqrt", ["ftz"], "f32") => within!(
            ULP / 2.0,
            |a: f32| f64::from(float::flush32(a)).sqrt(),
            float::canonical32
        ),
        ("lg2", [], "f32") => within!(ULP, |a: f32| f64::from(a).log2(), float::canonical32),
        ("lg2", ["ftz"], "f32") => {
            within!(ULP, |a: f32| f64::from(float::flush32(a)).log2(), flushed)
        }
        // Of the operand and of the result, only the upper halves count.
        ("rcp", ["ftz"], "f64") => within!(
            2f64.powi(-21),
            |a: f64| float::upper_half(a).recip(),
            float::upper_half
        ),
        ("rsqrt", [], "f32") => {
            within!(
                2f64.powf(-22.9),
                |a: f32| f64::from(a).sqrt().recip(),
                float::canonical32
            )
        }
        // A GPU emulates it for `rsqrt`, which is off by one in the last place at most.
        ("rsqrt", [], "f64") => within!(
            f64::EPSILON,
            |a: f64| a.sqrt().recip(),
            std::convert::identity
        ),
        _ => return None,
    })
}

/// A number in [-1, 1] that looks drawn by chance.
fn chance(seed: u64, line: u32, lane: usize, value: f64) -> f64 {
    let input = value.to_bits().wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut state = seed ^ input ^ u64::from(line) << 32 ^ lane as u64;
    state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((state ^ state >> 31) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

fn conversion(parts: &[&str], from: &str) -> Option<Exec> {
    let (&to, modifiers) = parts.split_last()?;
    Some(match (modifiers, to, from) {
        ([], "u64" | "s64", "u32") => each!(|a: u32| u64: u64::from(a)),
        ([], "u64" | "s64", "s32") => each!(|a: i32| i64: i64::from(a)),
        ([], "u64" | "s64", "s16") => each!(|a: u32| i64: i64::from(a as i16)),
        ([], "u32" | "s32", "u64" | "s64") => each!(|a: u64| u32: a as u32),
        ([], "u32" | "s32", "u16") => each!(|a: u32| u32: a & 0xffff),
        ([], "u32" | "s32", "s16") => each!(|a: u32| i32: i32::from(a as i16)),
        ([], "u32" | "s32", "u8") => each!(|a: u32| u32: a & 0xff),
        ([], "u32" | "s32", "s8") => each!(|a: u32| i32: i32::from(a as i8)),
        ([], "u16" | "s16", "u32" | "s32") => each!(|a: u32| u32: a & 0xffff),
        ([], "s16", "s8") => each!(|a: u32| u32: u32::from(a as i8 as u16)),
        ([], "f64", "f32") => each!(|a: f32| f64: f64::from(a)),
        ([], "f32", "f16") => each!(|a: u32| f32: float::canonical32(float::of_f16(a))),
        ([], "f32", "bf16") => each!(|a: u32| f32: float::canonical32(float::of_bf16(a))),
        (["rn"], "f32", "f64") => each!(|a: f64| f32: float::canonical32(a as f32)),
        (["rn"], "f16", "f32") => each!(|a: f32| u32: float::to_f16(a)),
        (["rn"], "bf16", "f32") => each!(|a: f32| u32: float::to_bf16(a)),
        (["rn"], "f16", "f64") => each!(|a: f64| u32: float::to_f16(float::odd(a))),
        (["rn"], "bf16", "f64") => each!(|a: f64| u32: float::to_bf16(float::odd(a))),
        (["rn"], "f16", "u32") => each!(|a: u32| u32: float::to_f16(float::odd(a.into()))),
        (["rn"], "bf16", "u32") => each!(|a: u32| u32: float::to_bf16(float::odd(a.into()))),
        (["rn"], "f16", "s32") => each!(|a: i32| u32: float::to_f16(float::odd(a.into()))),
        (["rn"], "bf16", "s32") => each!(|a: i32| u32: float::to_bf16(float::odd(a.into()))),
        (["rn"], "f32", "u16") => each!(|a: u32| f32: f32::from(a as u16)),
        (["rn"], "f32", "s16") => each!(|a: u32| f32: f32::from(a as i16)),
        (["rn"], "f32", "u32") => each!(|a: u32| f32: a as f32),
        (["rn"], "f32", "s32") => each!(|a: i32| f32: a as f32),
        (["rn"], "f32", "s64") => each!(|a: i64| f32: a as f32),
        (["rn"], "f64", "u16") => each!(|a: u32| f64: f64::from(a as u16)),
        (["rn"], "f64", "u32") => each!(|a: u32| f64: f64::from(a)),
        (["rn"], "f64", "s32") => each!(|a: i32| f64: f64::from(a)),
        (["rn"], "f64", "u64") => each!(|a: u64| f64: a as f64),
        (["rn"], "f64", "s64") => each!(|a: i64| f64: a as f64),
        // Rust's casts saturate, and NaN becomes 0. From f64 or to 64 bits it becomes the
        // top bit.
        (["rzi"], "u32", "f16") => each!(|a: u32| u32: float::of_f16(a) as u32),
        (["rzi"], "u32", "bf16") => each!(|a: u32| u32: float::of_bf16(a) as u32),
        (["rzi"], "u32", "f32") => each!(|a: f32| u32: a as u32),
        (["rzi"], "s32", "f32") => each!(|a: f32| i32: a as i32),
        (["rni"], "s32", "f32") => each!(|a: f32| i32: a.round_ties_even() as i32),
        (["rzi"], "s64", "f32") => each!(|a: f32| i64: {
            if a.is_nan() { i64::MIN } else { a as i64 }
        }),
        (["rzi"], "u32", "f64") => each!(|a: f64| u32: if a.is_nan() { 1 << 31 } else { a as u32 }),
        (["rni"], "s32", "f64") => each!(|a: f64| i32: {
            if a.is_nan() { i32::MIN } else { a.round_ties_even() as i32 }
        }),
        (["rzi"], "u64", "f64") => each!(|a: f64| u64: if a.is_nan() { 1 << 63 } else { a as u64 }),
        (["rzi"], "s64", "f64") => each!(|a: f64| i64: {
            if a.is_nan() { i64::MIN } else { a as i64 }
        }),
        (["rni"], "f32", "f32") => each!(|a: f32| f32: float::canonical32(a.round_ties_even())),
        (["rzi"], "f32", "f32") => each!(|a: f32| f32: float::canonical32(a.trunc())),
        (["rmi"], "f32", "f32") => each!(|a: f32| f32: float::canonical32(a.floor())),
        (["rpi"], "f32", "f32") => each!(|a: f32| f32: float::canonical32(a.ceil())),
        (["rzi"], "f64", "f64") => each!(|a: f64| f64: a.trunc()),
        (["rpi"], "f64", "f64") => each!(|a: f64| f64: a.ceil()),
        (["rmi"], "f64", "f64") => each!(|a: f64| f64: a.floor()),
        // NaN becomes 0.
        (["sat"], "f32", "f32") => each!(|a: f32| f32: if a > 0.0 { a.min(1.0) } else { 0.0 }),
        (["sat"], "f64", "f64") => each!(|a: f64| f64: if a > 0.0 { a.min(1.0) } else { 0.0 }),
        // The first source becomes the upper half.
        (["rn"], "f16x2", "f32") => each!(|a: f32, b: f32| u32: {
            float::to_f16(a) << 16 | float::to_f16(b)
        }),
        (["rn"], "bf16x2", "f32") => each!(|a: f32, b: f32| u32: {
            float::to_bf16(a) << 16 | float::to_bf16(b)
        }),
        _ => return None,
    })
}
