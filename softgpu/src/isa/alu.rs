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
use crate::isa::op::{lane_count, Class, Exec, Lanes, Op};

use std::mem::MaybeUninit;

/// An arithmetic instruction, found by its name.
#[derive(Clone, Copy)]
pub struct Arithmetic {
    pub exec: Exec,
    pub class: Class,
    /// The operands, destination first: `h`, `w` and `d` are slots with 16, 32 and 64
    /// bits, `p` is a predicate.
    pub operands: &'static str,
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
    if is_wide() {
        wide
    } else {
        base
    }
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
            "u16" | "b16" => (integers!(@ u32, u16, u16, [$($x),+], $e), "h"),
            "s16" => (integers!(@ u32, i16, u16, [$($x),+], $e), "h"),
            "u32" | "b32" => (integers!(@ u32, u32, u32, [$($x),+], $e), "w"),
            "s32" => (integers!(@ u32, i32, u32, [$($x),+], $e), "w"),
            "u64" | "b64" => (integers!(@ u64, u64, u64, [$($x),+], $e), "d"),
            "s64" => (integers!(@ u64, i64, u64, [$($x),+], $e), "d"),
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
            "u16" | "b16" => (compare!(|$a: u32, $b: u32| $e), "p:hh"),
            "s16" => (
                compare!(|$a: u32, $b: u32| {
                    let ($a, $b) = ($a as i16, $b as i16);
                    $e
                }),
                "p:hh",
            ),
            "u32" | "b32" => (compare!(|$a: u32, $b: u32| $e), "p:ww"),
            "s32" => (compare!(|$a: i32, $b: i32| $e), "p:ww"),
            "u64" | "b64" => (compare!(|$a: u64, $b: u64| $e), "p:dd"),
            "s64" => (compare!(|$a: i64, $b: i64| $e), "p:dd"),
            _ => return None,
        }
    };
}

macro_rules! float_condition {
    ($ty:expr, |$a:ident, $b:ident| $e:expr) => {
        match $ty {
            "f32" => (compare!(|$a: f32, $b: f32| $e), "p:ww"),
            "f64" => (compare!(|$a: f64, $b: f64| $e), "p:dd"),
            _ => return None,
        }
    };
}

/// An f32 expression on f16 or bf16 values, alone or in pairs, rounded once to their format.
macro_rules! half_variants {
    ($ty:expr, |$($x:ident),+| $e:expr) => {
        match $ty {
            "f16" => (
                each!(|$($x: u32),+| u32: half_variants!(@ of_f16, to_f16, [$($x),+], $e)),
                "h",
            ),
            "bf16" => (
                each!(|$($x: u32),+| u32: half_variants!(@ of_bf16, to_bf16, [$($x),+], $e)),
                "h",
            ),
            "bf16x2" => (each!(|$($x: u32),+| u32: {
                let low = {
                    $(let $x = $x & 0xffff;)+
                    half_variants!(@ of_bf16, to_bf16, [$($x),+], $e)
                };
                let high = {
                    $(let $x = $x >> 16;)+
                    half_variants!(@ of_bf16, to_bf16, [$($x),+], $e)
                };
                low | high << 16
            }), "w"),
            _ => return None,
        }
    };
    (@ $of:ident, $to:ident, [$($x:ident),+], $e:expr) => {{
        $(let $x = float::$of($x);)+
        float::$to($e)
    }};
}

/// Operands of one width each: destination and `sources` times the same.
fn alike(width: &str, sources: usize) -> &'static str {
    let all: &[&'static str] = match width {
        "h" => &["h:h", "h:hh", "h:hhh"],
        "w" => &["w:w", "w:ww", "w:www"],
        _ => &["d:d", "d:dd", "d:ddd"],
    };
    all[sources - 1]
}

fn width_of(ty: &str) -> Option<&'static str> {
    Some(match ty {
        "b8" | "u8" | "s8" | "b16" | "u16" | "s16" | "f16" | "bf16" => "h",
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => "w",
        "b64" | "u64" | "s64" | "f64" => "d",
        "pred" => "p",
        _ => return None,
    })
}

/// Finds an arithmetic instruction by its parts, as in `cvt`, `rn`, `f32`, `f64`. None if there is
/// no such.
pub fn select(parts: &[&str]) -> Option<Arithmetic> {
    let (&opcode, rest) = parts.split_first()?;
    let (&ty, modifiers) = rest.split_last()?;
    match opcode {
        "setp" => condition(modifiers, ty),
        "cvt" => conversion(rest),
        "add" | "sub" | "mul" | "mad" | "fma" | "div" | "min" | "max" | "abs" | "neg" | "sqrt"
        | "rcp" | "rsqrt" | "ex2"
            if ty.contains('f') =>
        {
            floating(opcode, modifiers, ty)
        }
        _ => match ty {
            "pred" => predicate(opcode, modifiers),
            _ => integer(opcode, modifiers, ty).or_else(|| bits(opcode, modifiers, ty)),
        },
    }
}

fn made(exec: Exec, class: Class, operands: &'static str) -> Option<Arithmetic> {
    Some(Arithmetic {
        exec,
        class,
        operands,
    })
}

fn predicate(opcode: &str, modifiers: &[&str]) -> Option<Arithmetic> {
    if !modifiers.is_empty() {
        return None;
    }
    let (exec, operands) = match opcode {
        "and" => (logic!(|a, b| a & b), "p:pp"),
        "or" => (logic!(|a, b| a | b), "p:pp"),
        "xor" => (logic!(|a, b| a ^ b), "p:pp"),
        "not" => (logic!(|a, _b| !a), "p:p"),
        "mov" => (logic!(|a, _b| a), "p:p"),
        _ => return None,
    };
    made(exec, Class::Integer, operands)
}

fn condition(modifiers: &[&str], ty: &str) -> Option<Arithmetic> {
    let &[comparison] = modifiers else {
        return None;
    };
    let (exec, operands) = if ty.starts_with('f') {
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
    };
    made(exec, Class::Integer, operands)
}

fn integer(opcode: &str, modifiers: &[&str], ty: &str) -> Option<Arithmetic> {
    let modifier = match modifiers {
        [] => "",
        [one] => one,
        _ => return None,
    };
    // PTX leaves the quotient by zero to the machine. GPUs set all its bits.
    let ((exec, width), sources) = match (opcode, modifier) {
        ("add", "") => (integers!(ty, |a, b| a.wrapping_add(b)), 2),
        ("sub", "") => (integers!(ty, |a, b| a.wrapping_sub(b)), 2),
        ("mul", "lo") => (integers!(ty, |a, b| a.wrapping_mul(b)), 2),
        ("mad", "lo") => (
            integers!(ty, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
            3,
        ),
        ("div", "") => (
            integers!(ty, |a, b| if b == 0 { !0 } else { a.wrapping_div(b) }),
            2,
        ),
        ("rem", "") => (
            integers!(ty, |a, b| if b == 0 { a } else { a.wrapping_rem(b) }),
            2,
        ),
        ("min", "") => (integers!(ty, |a, b| a.min(b)), 2),
        ("max", "") => (integers!(ty, |a, b| a.max(b)), 2),
        ("neg", "") => (integers!(ty, |a| (0 as T).wrapping_sub(a)), 1),
        ("and", "") => (integers!(ty, |a, b| a & b), 2),
        ("or", "") => (integers!(ty, |a, b| a | b), 2),
        ("xor", "") => (integers!(ty, |a, b| a ^ b), 2),
        ("not", "") => (integers!(ty, |a| !a), 1),
        _ => return None,
    };
    made(exec, Class::Integer, alike(width, sources))
}

fn bits(opcode: &str, modifiers: &[&str], ty: &str) -> Option<Arithmetic> {
    let (exec, operands) = match (opcode, modifiers, ty) {
        ("mov", [], _) => match width_of(ty)? {
            "d" => (each!(|a: u64| u64: a), "d:d"),
            width => (each!(|a: u32| u32: a), alike(width, 1)),
        },
        ("selp", [], _) => return choice(ty),
        ("popc", [], "b32") => (each!(|a: u32| u32: a.count_ones()), "w:w"),
        ("mul", ["wide"], "u32") => (
            each!(|a: u32, b: u32| u64: u64::from(a) * u64::from(b)),
            "d:ww",
        ),
        ("mul", ["wide"], "s32") => (
            each!(|a: i32, b: i32| i64: i64::from(a) * i64::from(b)),
            "d:ww",
        ),
        ("mad", ["wide"], "u32") => (
            each!(|a: u32, b: u32, c: u64| u64: (u64::from(a) * u64::from(b)).wrapping_add(c)),
            "d:wwd",
        ),
        ("shl", [], "b16") => (
            each!(|a: u32, b: u32| u32: if b < 16 { a << b & 0xffff } else { 0 }),
            "h:hw",
        ),
        ("shl", [], "b32") => (
            each!(|a: u32, b: u32| u32: if b < 32 { a << (b & 31) } else { 0 }),
            "w:ww",
        ),
        ("shl", [], "b64") => (
            each!(|a: u64, b: u32| u64: if b < 64 { a << (b & 63) } else { 0 }),
            "d:dw",
        ),
        ("shr", [], "u16" | "b16") => (
            each!(|a: u32, b: u32| u32: if b < 16 { a >> b } else { 0 }),
            "h:hw",
        ),
        ("shr", [], "u32" | "b32") => (
            each!(|a: u32, b: u32| u32: if b < 32 { a >> (b & 31) } else { 0 }),
            "w:ww",
        ),
        ("shr", [], "s32") => (each!(|a: i32, b: u32| i32: a >> b.min(31)), "w:ww"),
        ("shr", [], "u64" | "b64") => (
            each!(|a: u64, b: u32| u64: if b < 64 { a >> (b & 63) } else { 0 }),
            "d:dw",
        ),
        ("dp4a", ["s32"], "s32") => (
            each!(|a: u32, b: u32, c: u32| u32: {
                let mut total = c;
                for byte in 0..4 {
                    let (a, b) = ((a >> (8 * byte)) as i8, (b >> (8 * byte)) as i8);
                    total = total.wrapping_add((i32::from(a) * i32::from(b)) as u32);
                }
                total
            }),
            "w:www",
        ),
        ("prmt", [], "b32") => (
            each!(|a: u32, b: u32, c: u32| u32: {
                let both = u64::from(b) << 32 | u64::from(a);
                byte(both, c)
                    | byte(both, c >> 4) << 8
                    | byte(both, c >> 8) << 16
                    | byte(both, c >> 12) << 24
            }),
            "w:www",
        ),
        ("bfi", [], "b32") => (
            each!(|a: u32, b: u32, c: u32, d: u32| u32: insert(a.into(), b.into(), c, d) as u32),
            "w:wwww",
        ),
        ("bfi", [], "b64") => (
            each!(|a: u64, b: u64, c: u32, d: u32| u64: insert(a, b, c, d)),
            "d:ddww",
        ),
        ("copysign", [], "f32") => (
            each!(|a: u32, b: u32| u32: a & 0x8000_0000 | b & 0x7fff_ffff),
            "w:ww",
        ),
        ("copysign", [], "f64") => (
            each!(|a: u64, b: u64| u64: a & 1 << 63 | b & !(1 << 63)),
            "d:dd",
        ),
        _ => return None,
    };
    made(exec, Class::Integer, operands)
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

/// A register of 32 or 64 bits from its lower and its upper half.
pub fn joined(bits: u8) -> Option<Exec> {
    Some(match bits {
        32 => each!(|a: u32, b: u32| u32: a & 0xffff | b << 16),
        64 => each!(|a: u32, b: u32| u64: u64::from(a) | u64::from(b) << 32),
        _ => return None,
    })
}

fn choice(ty: &str) -> Option<Arithmetic> {
    macro_rules! select {
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
    match width_of(ty)? {
        "h" => made(select!(u32), Class::Integer, "h:hhp"),
        "w" => made(select!(u32), Class::Integer, "w:wwp"),
        "d" => made(select!(u64), Class::Integer, "d:ddp"),
        _ => None,
    }
}

fn floating(opcode: &str, modifiers: &[&str], ty: &str) -> Option<Arithmetic> {
    let ((exec, sources), class, width) = match (opcode, modifiers, ty) {
        (_, [] | ["rn"], "f32") => (single(opcode)?, Class::Float, "w"),
        (_, [] | ["rn"], "f64") => (double(opcode)?, Class::Double, "d"),
        (_, [] | ["rn"], _) => return half(opcode, ty),
        ("add", ["rz"], "f32") => {
            let sum = each!(|a: f32, b: f32| f32: float::sum_to_zero(a.into(), b.into()));
            ((sum, 2), Class::Float, "w")
        }
        // The product of two f32 is exact in f64.
        ("fma", ["rm"], "f32") => {
            let sum = each!(|a: f32, b: f32, c: f32| f32: {
                float::sum_down(f64::from(a) * f64::from(b), c.into())
            });
            ((sum, 3), Class::Float, "w")
        }
        (_, ["approx", flush @ ..], _) => {
            let width = width_of(ty)?;
            ((approximate(opcode, flush, ty)?, 1), Class::Special, width)
        }
        _ => return None,
    };
    made(exec, class, alike(width, sources))
}

fn single(opcode: &str) -> Option<(Exec, usize)> {
    macro_rules! rounded {
        (|$($x:ident),+| $e:expr) => { each!(|$($x: f32),+| f32: float::canonical32($e)) };
    }
    Some(match opcode {
        "add" => (rounded!(|a, b| a + b), 2),
        "sub" => (rounded!(|a, b| a - b), 2),
        "mul" => (rounded!(|a, b| a * b), 2),
        "fma" => (rounded!(|a, b, c| a.mul_add(b, c)), 3),
        "div" => (rounded!(|a, b| a / b), 2),
        "rcp" => (rounded!(|a| 1.0 / a), 1),
        "sqrt" => (rounded!(|a| a.sqrt()), 1),
        "min" => (rounded!(|a, b| float::min32(a, b)), 2),
        "max" => (rounded!(|a, b| -float::min32(-a, -b)), 2),
        // Signs change without a look at the rest.
        "abs" => (each!(|a: u32| u32: a & 0x7fff_ffff), 1),
        "neg" => (each!(|a: u32| u32: a ^ 0x8000_0000), 1),
        _ => return None,
    })
}

fn double(opcode: &str) -> Option<(Exec, usize)> {
    Some(match opcode {
        "add" => (each!(|a: f64, b: f64| f64: a + b), 2),
        "sub" => (each!(|a: f64, b: f64| f64: a - b), 2),
        "mul" => (each!(|a: f64, b: f64| f64: a * b), 2),
        "fma" => (each!(|a: f64, b: f64, c: f64| f64: a.mul_add(b, c)), 3),
        "div" => (each!(|a: f64, b: f64| f64: a / b), 2),
        "rcp" => (each!(|a: f64| f64: 1.0 / a), 1),
        "sqrt" => (each!(|a: f64| f64: a.sqrt()), 1),
        "min" => (each!(|a: f64, b: f64| f64: float::min64(a, b)), 2),
        "max" => (each!(|a: f64, b: f64| f64: -float::min64(-a, -b)), 2),
        "abs" => (each!(|a: u64| u64: a & !(1 << 63)), 1),
        "neg" => (each!(|a: u64| u64: a ^ 1 << 63), 1),
        _ => return None,
    })
}

fn half(opcode: &str, ty: &str) -> Option<Arithmetic> {
    // One rounding to f32 before the last does no harm: f32 has more than twice the digits, and two
    // more.
    let ((exec, width), sources) = match opcode {
        "add" => (half_variants!(ty, |a, b| a + b), 2),
        "sub" => (half_variants!(ty, |a, b| a - b), 2),
        "mul" => (half_variants!(ty, |a, b| a * b), 2),
        _ => return None,
    };
    made(exec, Class::Float, alike(width, sources))
}

/// A function that hardware only approximates, computed in f64. Where results are perturbed, they
/// move within the relative error that the manual allows.
fn approximate(opcode: &str, flush: &[&str], ty: &str) -> Option<Exec> {
    macro_rules! within {
        ($error:expr, |$a:ident: $t:ty| $value:expr, $round:expr) => {{
            #[inline(always)]
            unsafe fn body(lanes: &mut Lanes, op: &Op, mask: u32) {
                let from = lanes.slots.add(usize::from(op.a)).cast::<$t>();
                let mut results = [0 as $t; 32];
                for lane in 0..32 {
                    let $a = *from.add(lane);
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

fn conversion(parts: &[&str]) -> Option<Arithmetic> {
    let (modifiers, &[to, from]) = parts.split_last_chunk::<2>()?;
    let (exec, operands) = match (modifiers, to, from) {
        ([], "u64" | "s64", "u32") => (each!(|a: u32| u64: u64::from(a)), "d:w"),
        ([], "u64" | "s64", "s32") => (each!(|a: i32| i64: i64::from(a)), "d:w"),
        ([], "u64" | "s64", "s16") => (each!(|a: u32| i64: i64::from(a as i16)), "d:h"),
        ([], "u32" | "s32", "u64" | "s64") => (each!(|a: u64| u32: a as u32), "w:d"),
        ([], "u32" | "s32", "u16") => (each!(|a: u32| u32: a & 0xffff), "w:h"),
        ([], "u32" | "s32", "s16") => (each!(|a: u32| i32: i32::from(a as i16)), "w:h"),
        ([], "u32" | "s32", "u8") => (each!(|a: u32| u32: a & 0xff), "w:h"),
        ([], "u32" | "s32", "s8") => (each!(|a: u32| i32: i32::from(a as i8)), "w:h"),
        ([], "u16" | "s16", "u32" | "s32") => (each!(|a: u32| u32: a & 0xffff), "h:w"),
        ([], "s16", "s8") => (each!(|a: u32| u32: u32::from(a as i8 as u16)), "h:h"),
        ([], "f64", "f32") => (each!(|a: f32| f64: f64::from(a)), "d:w"),
        ([], "f32", "f16") => (
            each!(|a: u32| f32: float::canonical32(float::of_f16(a))),
            "w:h",
        ),
        ([], "f32", "bf16") => (
            each!(|a: u32| f32: float::canonical32(float::of_bf16(a))),
            "w:h",
        ),
        (["rn"], "f32", "f64") => (each!(|a: f64| f32: float::canonical32(a as f32)), "w:d"),
        (["rn"], "f16", "f32") => (each!(|a: f32| u32: float::to_f16(a)), "h:w"),
        (["rn"], "bf16", "f32") => (each!(|a: f32| u32: float::to_bf16(a)), "h:w"),
        (["rn"], "f16", "f64") => (each!(|a: f64| u32: float::to_f16(float::odd(a))), "h:d"),
        (["rn"], "bf16", "f64") => (each!(|a: f64| u32: float::to_bf16(float::odd(a))), "h:d"),
        (["rn"], "f16", "u32") => (
            each!(|a: u32| u32: float::to_f16(float::odd(a.into()))),
            "h:w",
        ),
        (["rn"], "bf16", "u32") => (
            each!(|a: u32| u32: float::to_bf16(float::odd(a.into()))),
            "h:w",
        ),
        (["rn"], "f16", "s32") => (
            each!(|a: i32| u32: float::to_f16(float::odd(a.into()))),
            "h:w",
        ),
        (["rn"], "bf16", "s32") => (
            each!(|a: i32| u32: float::to_bf16(float::odd(a.into()))),
            "h:w",
        ),
        (["rn"], "f32", "u16") => (each!(|a: u32| f32: f32::from(a as u16)), "w:h"),
        (["rn"], "f32", "s16") => (each!(|a: u32| f32: f32::from(a as i16)), "w:h"),
        (["rn"], "f32", "u32") => (each!(|a: u32| f32: a as f32), "w:w"),
        (["rn"], "f32", "s32") => (each!(|a: i32| f32: a as f32), "w:w"),
        (["rn"], "f32", "s64") => (each!(|a: i64| f32: a as f32), "w:d"),
        (["rn"], "f64", "u16") => (each!(|a: u32| f64: f64::from(a as u16)), "d:h"),
        (["rn"], "f64", "u32") => (each!(|a: u32| f64: f64::from(a)), "d:w"),
        (["rn"], "f64", "s32") => (each!(|a: i32| f64: f64::from(a)), "d:w"),
        (["rn"], "f64", "u64") => (each!(|a: u64| f64: a as f64), "d:d"),
        (["rn"], "f64", "s64") => (each!(|a: i64| f64: a as f64), "d:d"),
        // Rust's casts saturate, and NaN becomes 0. From f64 or to 64 bits it becomes the
        // top bit.
        (["rzi"], "u32", "f16") => (each!(|a: u32| u32: float::of_f16(a) as u32), "w:h"),
        (["rzi"], "u32", "bf16") => (each!(|a: u32| u32: float::of_bf16(a) as u32), "w:h"),
        (["rzi"], "u32", "f32") => (each!(|a: f32| u32: a as u32), "w:w"),
        (["rzi"], "s32", "f32") => (each!(|a: f32| i32: a as i32), "w:w"),
        (["rni"], "s32", "f32") => (each!(|a: f32| i32: a.round_ties_even() as i32), "w:w"),
        (["rzi"], "s64", "f32") => (
            each!(|a: f32| i64: if a.is_nan() { i64::MIN } else { a as i64 }),
            "d:w",
        ),
        (["rzi"], "u32", "f64") => (
            each!(|a: f64| u32: if a.is_nan() { 1 << 31 } else { a as u32 }),
            "w:d",
        ),
        (["rni"], "s32", "f64") => (
            each!(|a: f64| i32: if a.is_nan() { i32::MIN } else { a.round_ties_even() as i32 }),
            "w:d",
        ),
        (["rzi"], "u64", "f64") => (
            each!(|a: f64| u64: if a.is_nan() { 1 << 63 } else { a as u64 }),
            "d:d",
        ),
        (["rzi"], "s64", "f64") => (
            each!(|a: f64| i64: if a.is_nan() { i64::MIN } else { a as i64 }),
            "d:d",
        ),
        ([mode @ ("rni" | "rzi" | "rmi" | "rpi")], "f32", "f32") => (
            match *mode {
                "rni" => each!(|a: f32| f32: float::canonical32(a.round_ties_even())),
                "rzi" => each!(|a: f32| f32: float::canonical32(a.trunc())),
                "rmi" => each!(|a: f32| f32: float::canonical32(a.floor())),
                _ => each!(|a: f32| f32: float::canonical32(a.ceil())),
            },
            "w:w",
        ),
        (["rzi"], "f64", "f64") => (each!(|a: f64| f64: a.trunc()), "d:d"),
        (["rpi"], "f64", "f64") => (each!(|a: f64| f64: a.ceil()), "d:d"),
        (["rmi"], "f64", "f64") => (each!(|a: f64| f64: a.floor()), "d:d"),
        // NaN becomes 0.
        (["sat"], "f32", "f32") => (
            each!(|a: f32| f32: if a > 0.0 { a.min(1.0) } else { 0.0 }),
            "w:w",
        ),
        (["sat"], "f64", "f64") => (
            each!(|a: f64| f64: if a > 0.0 { a.min(1.0) } else { 0.0 }),
            "d:d",
        ),
        // The first source becomes the upper half.
        (["rn"], "f16x2", "f32") => (
            each!(|a: f32, b: f32| u32: float::to_f16(a) << 16 | float::to_f16(b)),
            "w:ww",
        ),
        (["rn"], "bf16x2", "f32") => (
            each!(|a: f32, b: f32| u32: float::to_bf16(a) << 16 | float::to_bf16(b)),
            "w:ww",
        ),
        _ => return None,
    };
    let class = match to.contains('f') || from.contains('f') {
        true => Class::Convert,
        false => Class::Integer,
    };
    made(exec, class, operands)
}
