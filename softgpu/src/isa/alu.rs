//! Arithmetic: from an instruction's name to a function that computes it for the 32 lanes of a
//! warp.
//!
//! Registers, constants and special registers are all slots of 32 values, so a function only knows
//! slots. Predicates are masks.

// A comparison says what it makes of NaN, so `a < b || a > b` is not `a != b`.
#![allow(clippy::double_comparisons, clippy::neg_cmp_op_on_partial_ord)]
// Lanes are numbered in PTX.
#![allow(clippy::needless_range_loop)]

use crate::isa::float::{self, Approximate, Format, Mode, BF16, E4M3, F16, F32, F64};
use crate::isa::op::{Class, Exec, Lanes, Op};

use std::mem::MaybeUninit;

/// An arithmetic instruction, found by its name.
#[derive(Clone, Copy)]
pub struct Arithmetic {
    pub exec: Exec,
    pub class: Class,
    /// What the operands are, destination first: `h`, `w` and `d` are slots with 16, 32 and 64
    /// bits, `p` is a predicate.
    pub operands: &'static str,
    /// The instruction's immediate, which the function alone understands.
    pub immediate: u64,
}

unsafe fn blend<T: Copy>(to: *mut T, from: *const T, mask: u32) {
    for lane in 0..32 {
        let chosen = if mask >> lane & 1 == 1 { from } else { to };
        *to.add(lane) = *chosen.add(lane);
    }
}

#[inline(always)]
unsafe fn put<T: Copy>(lanes: &mut Lanes, slot: u16, from: *const T, mask: u32) {
    let to = lanes.slots.add(usize::from(slot)).cast::<T>();
    if mask == !0 {
        std::ptr::copy_nonoverlapping(from, to, 32);
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

/// Whether the processor has what `both` compiles for.
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

/// An expression of one to three operands, computed for 32 lanes.
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
    (@ [$($x:ident: $t:ty = $field:ident),*], $r:ty, $e:expr) => {{
        #[inline(always)]
        unsafe fn body(lanes: &mut Lanes, op: &Op, mask: u32) {
            $(let $x = lanes.slots.add(usize::from(op.$field)).cast::<$t>();)*
            let mut results = MaybeUninit::<[$r; 32]>::uninit();
            let to = results.as_mut_ptr().cast::<$r>();
            for lane in 0..32 {
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
    ($ty:expr, $ftz:expr, |$a:ident, $b:ident| $e:expr) => {
        match ($ty, $ftz) {
            ("f32", false) => (compare!(|$a: f32, $b: f32| $e), "p:ww"),
            ("f32", true) => (
                compare!(|$a: f32, $b: f32| {
                    let ($a, $b) = (float::flush32($a), float::flush32($b));
                    $e
                }),
                "p:ww",
            ),
            ("f64", _) => (compare!(|$a: f64, $b: f64| $e), "p:dd"),
            ("f16", _) => (
                compare!(|$a: u32, $b: u32| {
                    let ($a, $b) = (float::of_f16($a), float::of_f16($b));
                    $e
                }),
                "p:hh",
            ),
            ("bf16", _) => (
                compare!(|$a: u32, $b: u32| {
                    let ($a, $b) = (float::of_bf16($a), float::of_bf16($b));
                    $e
                }),
                "p:hh",
            ),
            _ => return None,
        }
    };
}

/// An f32 expression with or without flushing and saturation.
macro_rules! f32_variants {
    ($flags:expr, |$($x:ident),+| $e:expr) => {
        match ($flags.flush, $flags.saturate) {
            (false, false) => each!(|$($x: f32),+| f32: float::canonical32($e)),
            (true, false) => each!(|$($x: f32),+| f32: {
                $(let $x = float::flush32($x);)+
                float::flush32(float::canonical32($e))
            }),
            (false, true) => each!(|$($x: f32),+| f32: saturate32($e)),
            (true, true) => each!(|$($x: f32),+| f32: {
                $(let $x = float::flush32($x);)+
                saturate32(float::flush32($e))
            }),
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
            "f16x2" => (each!(|$($x: u32),+| u32: {
                let low = {
                    $(let $x = $x & 0xffff;)+
                    half_variants!(@ of_f16, to_f16, [$($x),+], $e)
                };
                let high = {
                    $(let $x = $x >> 16;)+
                    half_variants!(@ of_f16, to_f16, [$($x),+], $e)
                };
                low | high << 16
            }), "w"),
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

#[inline(always)]
fn saturate32(value: f32) -> f32 {
    // A NaN is not greater than zero.
    if value > 0.0 {
        if value < 1.0 {
            value
        } else {
            1.0
        }
    } else {
        0.0
    }
}

fn width_of(ty: &str) -> Option<&'static str> {
    Some(match ty {
        "b8" | "u8" | "s8" | "b16" | "u16" | "s16" | "f16" | "bf16" | "e4m3x2" => "h",
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => "w",
        "b64" | "u64" | "s64" | "f64" => "d",
        "pred" => "p",
        _ => return None,
    })
}

/// What follows an opcode.
#[derive(Clone, Copy, Default)]
struct Flags {
    rounding: Option<Mode>,
    flush: bool,
    saturate: bool,
    approximate: bool,
    full: bool,
}

const FLUSH: u64 = 1 << 8;

const SATURATE: u64 = 1 << 9;

impl Flags {
    fn of(modifiers: &[&str]) -> Option<Self> {
        let mut flags = Self::default();
        for modifier in modifiers {
            match *modifier {
                "ftz" => flags.flush = true,
                "sat" => flags.saturate = true,
                "approx" => flags.approximate = true,
                "full" => flags.full = true,
                "noftz" => {}
                other => flags.rounding = Some(Mode::of_modifier(other)?),
            }
        }
        Some(flags)
    }

    fn nearest(self) -> bool {
        matches!(self.rounding, None | Some(Mode::Nearest))
    }

    fn bits(self) -> u64 {
        self.rounding.unwrap_or(Mode::Nearest) as u64
            | if self.flush { FLUSH } else { 0 }
            | if self.saturate { SATURATE } else { 0 }
    }
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
        | "rcp" | "rsqrt" | "ex2" | "lg2"
            if ty.contains('f') =>
        {
            floating(opcode, modifiers, ty)
        }
        "copysign" => sign(opcode, modifiers, ty),
        "add" | "sub" | "mad" | "addc" | "subc" | "madc"
            if opcode.len() == 4 || modifiers.contains(&"cc") =>
        {
            carrying(opcode, modifiers, ty)
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
        immediate: 0,
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
    let (&comparison, flags) = modifiers.split_first()?;
    let ftz = flags.contains(&"ftz");
    let (exec, operands) = if ty.starts_with('f') || ty == "bf16" {
        match comparison {
            "eq" => float_condition!(ty, ftz, |a, b| a == b),
            "ne" => float_condition!(ty, ftz, |a, b| a < b || a > b),
            "lt" => float_condition!(ty, ftz, |a, b| a < b),
            "le" => float_condition!(ty, ftz, |a, b| a <= b),
            "gt" => float_condition!(ty, ftz, |a, b| a > b),
            "ge" => float_condition!(ty, ftz, |a, b| a >= b),
            "equ" => float_condition!(ty, ftz, |a, b| !(a < b || a > b)),
            "neu" => float_condition!(ty, ftz, |a, b| a != b),
            "ltu" => float_condition!(ty, ftz, |a, b| !(a >= b)),
            "leu" => float_condition!(ty, ftz, |a, b| !(a > b)),
            "gtu" => float_condition!(ty, ftz, |a, b| !(a <= b)),
            "geu" => float_condition!(ty, ftz, |a, b| !(a < b)),
            "num" => float_condition!(ty, ftz, |a, b| !a.is_nan() && !b.is_nan()),
            "nan" => float_condition!(ty, ftz, |a, b| a.is_nan() || b.is_nan()),
            _ => return None,
        }
    } else {
        let unsigned = ty.replacen('s', "u", 1);
        let (comparison, ty) = match comparison {
            "lo" => ("lt", unsigned.as_str()),
            "ls" => ("le", unsigned.as_str()),
            "hi" => ("gt", unsigned.as_str()),
            "hs" => ("ge", unsigned.as_str()),
            _ => (comparison, ty),
        };
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
    // What division by zero gives is the machine's affair; all bits set is what it does.
    let ((exec, width), sources) = match (opcode, modifier) {
        ("add", "") => (integers!(ty, |a, b| a.wrapping_add(b)), 2),
        ("sub", "") => (integers!(ty, |a, b| a.wrapping_sub(b)), 2),
        ("mul", "lo") => (integers!(ty, |a, b| a.wrapping_mul(b)), 2),
        ("mul", "hi") => (
            integers!(ty, |a, b| (a as i128).wrapping_mul(b as i128) >> T::BITS),
            2,
        ),
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
        ("abs", "") => (
            integers!(ty, |a| if (a as i64) < 0 {
                (0 as T).wrapping_sub(a)
            } else {
                a
            }),
            1,
        ),
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
        ("mul", ["wide"], "u16") => (each!(|a: u32, b: u32| u32: a * b), "w:hh"),
        ("mul", ["wide"], "s16") => (
            each!(|a: u32, b: u32| u32: (i32::from(a as i16) * i32::from(b as i16)) as u32),
            "w:hh",
        ),
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
        ("mad", ["wide"], "s32") => (
            each!(|a: i32, b: i32, c: i64| i64: (i64::from(a) * i64::from(b)).wrapping_add(c)),
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
        ("shr", [], "s16") => (
            each!(|a: u32, b: u32| u32: ((a as i16) >> b.min(15)) as u16 as u32),
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
        ("shr", [], "s64") => (each!(|a: i64, b: u32| i64: a >> b.min(63)), "d:dw"),
        ("clz", [], "b64") => (each!(|a: u64| u32: a.leading_zeros()), "w:d"),
        ("clz", [], "b32") => (each!(|a: u32| u32: a.leading_zeros()), "w:w"),
        ("dp4a", [a], b) => return dot(a, b),
        ("prmt", _, "b32") => return permutation(modifiers),
        ("bfi", [], "b32") => (insert32 as Exec, "w:wwww"),
        ("bfi", [], "b64") => (insert64 as Exec, "d:ddww"),
        _ => return None,
    };
    made(exec, Class::Integer, operands)
}

unsafe fn insert32(lanes: &mut Lanes, op: &Op, mask: u32) {
    let [a, b, start, length] =
        [op.a, op.b, op.c, op.more[0]].map(|slot| (*lanes.slots.add(usize::from(slot))).0);
    let mut results = [0u32; 32];
    for lane in 0..32 {
        results[lane] = insert(
            u64::from(a[lane]),
            u64::from(b[lane]),
            start[lane],
            length[lane],
        ) as u32;
    }
    put(lanes, op.d, results.as_ptr(), mask);
}

unsafe fn insert64(lanes: &mut Lanes, op: &Op, mask: u32) {
    let [a, b] = [op.a, op.b].map(|slot| *lanes.slots.add(usize::from(slot)).cast::<[u64; 32]>());
    let [start, length] = [op.c, op.more[0]].map(|slot| (*lanes.slots.add(usize::from(slot))).0);
    let mut results = [0u64; 32];
    for lane in 0..32 {
        results[lane] = insert(a[lane], b[lane], start[lane], length[lane]);
    }
    put(lanes, op.d, results.as_ptr(), mask);
}

/// `into` with a field replaced by the low bits of `field`.
fn insert(field: u64, into: u64, start: u32, length: u32) -> u64 {
    let (start, length) = (start & 255, length & 255);
    if start >= 64 {
        return into;
    }
    let ones = if length >= 64 {
        !0
    } else {
        (1u64 << length) - 1
    };
    into & !(ones << start) | (field & ones) << start
}

fn permutation(modifiers: &[&str]) -> Option<Arithmetic> {
    #[inline(always)]
    fn pick(both: u64, selector: u32) -> u32 {
        let byte = (both >> (8 * (selector & 7))) as u8;
        u32::from(if selector & 8 == 0 {
            byte
        } else {
            ((byte as i8) >> 7) as u8
        })
    }
    macro_rules! selected {
        (|$n:ident, $i:ident| $e:expr) => {
            each!(|a: u32, b: u32, c: u32| u32: {
                let both = u64::from(b) << 32 | u64::from(a);
                let $n = c & 3;
                let mut result = 0;
                for $i in 0..4u32 {
                    result |= pick(both, $e) << (8 * $i);
                }
                result
            })
        };
    }
    let exec = match modifiers {
        [] => each!(|a: u32, b: u32, c: u32| u32: {
            let both = u64::from(b) << 32 | u64::from(a);
            pick(both, c)
                | pick(both, c >> 4) << 8
                | pick(both, c >> 8) << 16
                | pick(both, c >> 12) << 24
        }),
        ["f4e"] => selected!(|n, i| (n + i) & 7),
        ["b4e"] => selected!(|n, i| n.wrapping_sub(i) & 7),
        ["rc8"] => selected!(|n, _i| n),
        ["ecl"] => selected!(|n, i| n.max(i)),
        ["ecr"] => selected!(|n, i| n.min(i)),
        ["rc16"] => selected!(|n, i| (n & 1) * 2 + (i & 1)),
        _ => return None,
    };
    made(exec, Class::Integer, "w:www")
}

fn dot(a: &str, b: &str) -> Option<Arithmetic> {
    macro_rules! dot {
        ($a:ty, $b:ty) => {
            each!(|a: u32, b: u32, c: u32| u32: {
                let mut total = c;
                for byte in 0..4 {
                    let (a, b) = ((a >> (8 * byte)) as $a, (b >> (8 * byte)) as $b);
                    let product = i32::from(a) * i32::from(b);
                    total = total.wrapping_add(product as u32);
                }
                total
            })
        };
    }
    let exec = match (a, b) {
        ("s32", "s32") => dot!(i8, i8),
        ("s32", "u32") => dot!(i8, u8),
        ("u32", "s32") => dot!(u8, i8),
        ("u32", "u32") => dot!(u8, u8),
        _ => return None,
    };
    made(exec, Class::Integer, "w:www")
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
                for lane in 0..32 {
                    let (a, b) = (*a.add(lane), *b.add(lane));
                    results[lane] = if which >> lane & 1 == 1 { a } else { b };
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

fn sign(opcode: &str, modifiers: &[&str], ty: &str) -> Option<Arithmetic> {
    let (exec, operands) = match (opcode, modifiers, ty) {
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

const CARRY_OUT: u64 = 1;

const CARRY_IN: u64 = 2;

const BORROW: u64 = 4;

const MULTIPLY: u64 = 8;

const HIGH: u64 = 16;

const SIGNED: u64 = 32;

fn carrying(opcode: &str, modifiers: &[&str], ty: &str) -> Option<Arithmetic> {
    let mut immediate = 0;
    for (set, flag) in [
        (modifiers.contains(&"cc"), CARRY_OUT),
        (opcode.ends_with('c') && opcode.len() == 4, CARRY_IN),
        (opcode.starts_with("sub"), BORROW),
        (opcode.starts_with("mad"), MULTIPLY),
        (modifiers.contains(&"hi"), HIGH),
        (ty.starts_with('s'), SIGNED),
    ] {
        immediate |= if set { flag } else { 0 };
    }
    let multiply = immediate & MULTIPLY != 0;
    let (exec, operands): (Exec, _) = match (width_of(ty)?, multiply) {
        ("w", false) => (carry::<u32>, "w:ww"),
        ("w", true) => (carry::<u32>, "w:www"),
        ("d", false) => (carry::<u64>, "d:dd"),
        ("d", true) => (carry::<u64>, "d:ddd"),
        _ => return None,
    };
    Some(Arithmetic {
        exec,
        class: Class::Integer,
        operands,
        immediate,
    })
}

/// Sums and differences that read or write the carry flag.
unsafe fn carry<T: Copy + Into<u64> + TryFrom<u64> + Default>(
    lanes: &mut Lanes,
    op: &Op,
    mask: u32,
) {
    let width = 8 * size_of::<T>() as u32;
    let flags = op.immediate;
    let get = |slot: u16, lane: usize| -> u64 {
        (*lanes.slots.add(usize::from(slot)).cast::<T>().add(lane)).into()
    };
    let mut results = [T::default(); 32];
    let mut out = 0;
    for lane in 0..32 {
        let (mut a, mut b) = (get(op.a, lane), get(op.b, lane));
        if flags & MULTIPLY != 0 {
            let extend = |value: u64| match (flags & SIGNED != 0, width) {
                (true, 32) => i128::from(value as i32),
                (true, _) => i128::from(value as i64),
                _ => i128::from(value),
            };
            // Both products of 64-bit numbers fit, as their low 128 bits.
            let product = extend(a).wrapping_mul(extend(b)) as u128;
            let part = if flags & HIGH != 0 {
                product >> width
            } else {
                product
            };
            a = part as u64 & (!0 >> (64 - width));
            b = get(op.c, lane);
        }
        let carried = u128::from(flags & CARRY_IN != 0 && lanes.carry >> lane & 1 == 1);
        let total = if flags & BORROW != 0 {
            u128::from(a)
                .wrapping_sub(u128::from(b))
                .wrapping_sub(carried)
        } else {
            u128::from(a) + u128::from(b) + carried
        };
        out |= ((total >> width & 1) as u32) << lane;
        if let Ok(result) = T::try_from(total as u64 & (!0 >> (64 - width))) {
            results[lane] = result;
        }
    }
    put(lanes, op.d, results.as_ptr(), mask);
    if flags & CARRY_OUT != 0 {
        lanes.carry = lanes.carry & !mask | out & mask;
    }
}

fn floating(opcode: &str, modifiers: &[&str], ty: &str) -> Option<Arithmetic> {
    let lasting = modifiers.contains(&"NaN");
    let flags = Flags::of(
        &modifiers
            .iter()
            .copied()
            .filter(|one| *one != "NaN")
            .collect::<Vec<_>>(),
    )?;
    if lasting {
        return with_lasting_nans(opcode, flags, ty);
    }
    if let Some(arithmetic) = approximate(opcode, flags, ty) {
        return Some(arithmetic);
    }
    let exact = matches!(
        opcode,
        "add" | "sub" | "mul" | "fma" | "mad" | "div" | "sqrt" | "rcp"
    );
    let fast = flags.nearest() && !flags.approximate && !flags.full;
    let found = match ty {
        "f32" if fast => single(opcode, flags),
        "f64" if fast => double(opcode),
        "f16" | "bf16" | "f16x2" | "bf16x2" if fast && !flags.flush && !flags.saturate => {
            return half(opcode, ty);
        }
        _ => None,
    };
    if let Some((exec, sources)) = found {
        let (class, width) = if ty == "f64" {
            (Class::Double, "d")
        } else {
            (Class::Float, "w")
        };
        return made(exec, class, alike(width, sources));
    }
    if !exact || flags.approximate || flags.full {
        return None;
    }
    rounded(opcode, flags, ty)
}

/// `min.NaN` and `max.NaN`, where a NaN wins.
fn with_lasting_nans(opcode: &str, flags: Flags, ty: &str) -> Option<Arithmetic> {
    let (exec, width) = match (opcode, ty) {
        ("min", "f32") => (
            f32_variants!(flags, |a, b| float::lasting(a, b, float::min32(a, b))),
            "w",
        ),
        ("max", "f32") => (
            f32_variants!(flags, |a, b| float::lasting(a, b, float::max32(a, b))),
            "w",
        ),
        ("min", _) => half_variants!(ty, |a, b| float::lasting(a, b, float::min32(a, b))),
        ("max", _) => half_variants!(ty, |a, b| float::lasting(a, b, float::max32(a, b))),
        _ => return None,
    };
    made(exec, Class::Float, alike(width, 2))
}

fn single(opcode: &str, flags: Flags) -> Option<(Exec, usize)> {
    Some(match opcode {
        "add" => (f32_variants!(flags, |a, b| a + b), 2),
        "sub" => (f32_variants!(flags, |a, b| a - b), 2),
        "mul" => (f32_variants!(flags, |a, b| a * b), 2),
        "fma" | "mad" => (f32_variants!(flags, |a, b, c| a.mul_add(b, c)), 3),
        "div" => (f32_variants!(flags, |a, b| a / b), 2),
        "rcp" => (f32_variants!(flags, |a| 1.0 / a), 1),
        "sqrt" => (f32_variants!(flags, |a| a.sqrt()), 1),
        "min" => (f32_variants!(flags, |a, b| float::min32(a, b)), 2),
        "max" => (f32_variants!(flags, |a, b| float::max32(a, b)), 2),
        // Signs change without a look at the rest.
        "abs" if flags.flush => (each!(|a: f32| f32: float::flush32(a).abs()), 1),
        "neg" if flags.flush => (each!(|a: f32| f32: -float::flush32(a)), 1),
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
        "fma" | "mad" => (each!(|a: f64, b: f64, c: f64| f64: a.mul_add(b, c)), 3),
        "div" => (each!(|a: f64, b: f64| f64: a / b), 2),
        "rcp" => (each!(|a: f64| f64: 1.0 / a), 1),
        "sqrt" => (each!(|a: f64| f64: a.sqrt()), 1),
        "min" => (each!(|a: f64, b: f64| f64: float::min64(a, b)), 2),
        "max" => (each!(|a: f64, b: f64| f64: float::max64(a, b)), 2),
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
        "min" => (half_variants!(ty, |a, b| float::min32(a, b)), 2),
        "max" => (half_variants!(ty, |a, b| float::max32(a, b)), 2),
        "fma" => (fused_half(ty)?, 3),
        "abs" | "neg" => {
            let pair = ty.ends_with("x2");
            let exec = match (opcode, pair) {
                ("abs", false) => each!(|a: u32| u32: a & 0x7fff),
                ("abs", true) => each!(|a: u32| u32: a & 0x7fff_7fff),
                (_, false) => each!(|a: u32| u32: a ^ 0x8000),
                (_, true) => each!(|a: u32| u32: a ^ 0x8000_8000),
            };
            ((exec, if pair { "w" } else { "h" }), 1)
        }
        _ => return None,
    };
    made(exec, Class::Float, alike(width, sources))
}

fn fused_half(ty: &str) -> Option<(Exec, &'static str)> {
    macro_rules! fused {
        ($of:ident, $format:ident, $a:expr, $b:expr, $c:expr) => {
            float::fused(
                f64::from(float::$of($a)),
                f64::from(float::$of($b)),
                f64::from(float::$of($c)),
                Mode::Nearest,
                $format,
            ) as u32
        };
        ($of:ident, $format:ident) => {
            each!(|a: u32, b: u32, c: u32| u32: fused!($of, $format, a, b, c))
        };
        (pair $of:ident, $format:ident) => {
            each!(|a: u32, b: u32, c: u32| u32: {
                fused!($of, $format, a & 0xffff, b & 0xffff, c & 0xffff)
                    | fused!($of, $format, a >> 16, b >> 16, c >> 16) << 16
            })
        };
    }
    Some(match ty {
        "f16" => (fused!(of_f16, F16), "h"),
        "bf16" => (fused!(of_bf16, BF16), "h"),
        "f16x2" => (fused!(pair of_f16, F16), "w"),
        "bf16x2" => (fused!(pair of_bf16, BF16), "w"),
        _ => return None,
    })
}

const FORMATS: [Format; 5] = [F16, BF16, F32, F64, E4M3];

fn format_number(ty: &str) -> Option<u64> {
    ["f16", "bf16", "f32", "f64", "e4m3x2"]
        .iter()
        .position(|name| *name == ty)
        .map(|number| number as u64)
}

const EXACT: [&str; 7] = ["add", "sub", "mul", "fma", "div", "sqrt", "rcp"];

/// Arithmetic in any rounding mode, any format, flushed and saturated or not. It takes its time.
fn rounded(opcode: &str, flags: Flags, ty: &str) -> Option<Arithmetic> {
    let opcode = if opcode == "mad" { "fma" } else { opcode };
    let number = EXACT.iter().position(|name| *name == opcode)?;
    let sources = match opcode {
        "fma" => 3,
        "sqrt" | "rcp" => 1,
        _ => 2,
    };
    #[inline(always)]
    unsafe fn body(lanes: &mut Lanes, op: &Op, mask: u32) {
        exact(lanes, op, mask);
    }
    Some(Arithmetic {
        exec: both!(body),
        class: if ty == "f64" {
            Class::Double
        } else {
            Class::Float
        },
        operands: alike(width_of(ty)?, sources),
        immediate: flags.bits() | (number as u64) << 16 | format_number(ty)? << 24,
    })
}

#[inline(always)]
unsafe fn exact(lanes: &mut Lanes, op: &Op, mask: u32) {
    let format = FORMATS[(op.immediate >> 24 & 7) as usize];
    let mode = Mode::of_number(op.immediate as u8);
    let opcode = EXACT[(op.immediate >> 16 & 7) as usize];
    for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
        let get = |slot: u16| {
            let bits = read(lanes, slot, lane, format == F64);
            let bits = if op.immediate & FLUSH != 0 {
                float::flush(bits, format)
            } else {
                bits
            };
            float::widen(bits, format)
        };
        let (a, b) = (get(op.a), get(op.b));
        let mut bits = match opcode {
            "add" => float::add(a, b, mode, format),
            "sub" => float::add(a, -b, mode, format),
            "mul" => float::multiply(a, b, mode, format),
            "fma" => float::fused(a, b, get(op.c), mode, format),
            "div" => float::divide(a, b, mode, format),
            "sqrt" => float::root(a, mode, format),
            _ => float::divide(1.0, a, mode, format),
        };
        if op.immediate & FLUSH != 0 {
            bits = float::flush(bits, format);
        }
        if op.immediate & SATURATE != 0 {
            bits = saturated(bits, format);
        }
        write(lanes, op.d, lane, format == F64, bits);
    }
}

fn saturated(bits: u64, format: Format) -> u64 {
    let value = float::widen(bits, format);
    if value > 0.0 {
        if value < 1.0 {
            bits
        } else {
            float::narrow(1.0, Mode::Nearest, format)
        }
    } else {
        0
    }
}

unsafe fn read(lanes: &Lanes, slot: u16, lane: usize, wide: bool) -> u64 {
    let slot = lanes.slots.add(usize::from(slot));
    if wide {
        *slot.cast::<u64>().add(lane)
    } else {
        u64::from((*slot).0[lane])
    }
}

unsafe fn write(lanes: &mut Lanes, slot: u16, lane: usize, wide: bool, bits: u64) {
    let slot = lanes.slots.add(usize::from(slot));
    if wide {
        *slot.cast::<u64>().add(lane) = bits;
    } else {
        (*slot).0[lane] = bits as u32;
    }
}

/// The functions that hardware approximates.
fn approximate(opcode: &str, flags: Flags, ty: &str) -> Option<Arithmetic> {
    if !flags.approximate && !flags.full {
        return None;
    }
    let function = match opcode {
        "rcp" => Approximate::Reciprocal,
        "sqrt" => Approximate::Root,
        "rsqrt" => Approximate::InverseRoot,
        "ex2" => Approximate::Exponential,
        "lg2" => Approximate::Logarithm,
        "div" => Approximate::Quotient,
        _ => return None,
    };
    let width = width_of(ty)?;
    let (exec, sources): (Exec, _) = match (function, ty) {
        (Approximate::Quotient, "f32") => (approximated, 2),
        (Approximate::InverseRoot, "f32") if !flags.flush => {
            let fast = each!(|a: f32| f32: float::canonical32((1.0 / f64::from(a).sqrt()) as f32));
            return Some(Arithmetic {
                exec: fast,
                class: Class::Special,
                operands: "w:w",
                // The slow way, where results are to be moved.
                immediate: perturbed(function, flags, ty)?,
            });
        }
        (Approximate::Reciprocal | Approximate::InverseRoot, "f64") => (coarse, 1),
        (_, "f32") => (approximated, 1),
        _ => return None,
    };
    Some(Arithmetic {
        exec,
        class: Class::Special,
        operands: alike(width, sources),
        immediate: perturbed(function, flags, ty)?,
    })
}

fn perturbed(function: Approximate, flags: Flags, ty: &str) -> Option<u64> {
    Some(flags.bits() | (function as u64) << 16 | format_number(ty)? << 24 | PERTURBED)
}

/// Marks an instruction that [`Lanes::perturb`] turns into [`approximated`] or [`coarse`].
const PERTURBED: u64 = 1 << 32;

/// An instruction as it is where results are perturbed.
pub fn under_perturbation(op: &Op) -> Op {
    let approximates = op.class == Class::Special && op.immediate & PERTURBED != 0;
    let wide = FORMATS[(op.immediate >> 24 & 7) as usize % 6] == F64;
    match approximates && !wide {
        true => Op {
            exec: approximated,
            ..*op
        },
        false => *op,
    }
}

/// An approximate function, moved within its error if that is asked for.
unsafe fn approximated(lanes: &mut Lanes, op: &Op, mask: u32) {
    let format = FORMATS[(op.immediate >> 24 & 7) as usize];
    let function = Approximate::of_number((op.immediate >> 16) as u8);
    for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
        let get = |slot: u16| {
            let bits = read(lanes, slot, lane, false);
            let bits = if op.immediate & FLUSH != 0 {
                float::flush(bits, format)
            } else {
                bits
            };
            match format == F32 {
                true => f64::from(f32::from_bits(bits as u32)),
                false => float::widen(bits, format),
            }
        };
        let a = get(op.a);
        let b = if function == Approximate::Quotient {
            get(op.b)
        } else {
            0.0
        };
        let value = function.value(a, b);
        let value = match lanes.perturb {
            Some(seed) => function.moved(
                value,
                chance(
                    seed,
                    op.line,
                    lane,
                    a.to_bits() ^ b.to_bits().rotate_left(1),
                ),
            ),
            None => value,
        };
        let mut bits = if format == F32 {
            u64::from(float::canonical32(value as f32).to_bits())
        } else {
            float::narrow(value, Mode::Nearest, format)
        };
        if op.immediate & FLUSH != 0 {
            bits = float::flush(bits, format);
        }
        if op.immediate & SATURATE != 0 {
            bits = saturated(bits, format);
        }
        write(lanes, op.d, lane, false, bits);
    }
}

/// `rcp.approx.ftz.f64` and `rsqrt.approx.ftz.f64`: the upper half of a result, good to 20 bits,
/// which the compiler refines. `rsqrt.approx.f64` is emulated on a GPU: nvcc has it for `rsqrt`,
/// which CUDA's guide says is off by one in the last place at most.
unsafe fn coarse(lanes: &mut Lanes, op: &Op, mask: u32) {
    let function = Approximate::of_number((op.immediate >> 16) as u8);
    for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
        let bits = read(lanes, op.a, lane, true);
        let bits = if op.immediate & FLUSH != 0 {
            float::flush(bits, F64)
        } else {
            bits
        };
        let value = function.value(f64::from_bits(bits), 0.0);
        let result = match lanes.perturb {
            Some(seed) if value.is_finite() && value != 0.0 => {
                let chance = chance(seed, op.line, lane, bits);
                match function == Approximate::InverseRoot && op.immediate & FLUSH == 0 {
                    true => (value * (1.0 + chance * 2f64.powi(-52))).to_bits(),
                    false => (value * (1.0 + chance * 2f64.powi(-21))).to_bits() >> 32 << 32,
                }
            }
            _ if function == Approximate::Reciprocal => value.to_bits() >> 32 << 32,
            _ => value.to_bits(),
        };
        let result = if value.is_nan() { F64.nan() } else { result };
        write(
            lanes,
            op.d,
            lane,
            true,
            if op.immediate & FLUSH != 0 {
                float::flush(result, F64)
            } else {
                result
            },
        );
    }
}

/// A number in [-1, 1] that looks drawn by chance.
fn chance(seed: u64, line: u32, lane: usize, input: u64) -> f64 {
    let mut state =
        seed ^ input.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(line) << 32 ^ lane as u64;
    state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((state ^ state >> 31) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

fn conversion(parts: &[&str]) -> Option<Arithmetic> {
    let (&[to, from], modifiers) = parts
        .split_last_chunk::<2>()
        .map(|(rest, two)| (two, rest))?;
    if let Some(found) = pair_conversion(modifiers, to, from) {
        return Some(found);
    }
    let mut relevant = vec![];
    let mut satfinite = false;
    for modifier in modifiers {
        match *modifier {
            "satfinite" => satfinite = true,
            other => relevant.push(other),
        }
    }
    let flags = Flags::of(&relevant)?;
    if satfinite {
        return None;
    }
    if let Some((exec, operands, class)) = common_conversion(modifiers, to, from) {
        return made(exec, class, operands);
    }
    let immediate = flags.bits()
        | if flags.rounding.is_some() { ROUNDED } else { 0 }
        | type_number(from)? << 16
        | type_number(to)? << 24;
    let operands = match (width_of(to)?, width_of(from)?) {
        ("h", "h") => "h:h",
        ("h", "w") => "h:w",
        ("h", "d") => "h:d",
        ("w", "h") => "w:h",
        ("w", "w") => "w:w",
        ("w", "d") => "w:d",
        ("d", "h") => "d:h",
        ("d", "w") => "d:w",
        _ => "d:d",
    };
    Some(Arithmetic {
        exec: convert,
        class: if to.contains('f') || from.contains('f') {
            Class::Convert
        } else {
            Class::Integer
        },
        operands,
        immediate,
    })
}

/// The conversions that kernels are full of.
fn common_conversion(
    modifiers: &[&str],
    to: &str,
    from: &str,
) -> Option<(Exec, &'static str, Class)> {
    let integer = |exec, operands| Some((exec, operands, Class::Integer));
    let float = |exec, operands| Some((exec, operands, Class::Convert));
    match (modifiers, to, from) {
        ([], "u64" | "s64", "u32") => integer(each!(|a: u32| u64: u64::from(a)), "d:w"),
        ([], "u64" | "s64", "s32") => integer(each!(|a: i32| i64: i64::from(a)), "d:w"),
        ([], "u32" | "s32", "u64" | "s64") => integer(each!(|a: u64| u32: a as u32), "w:d"),
        ([], "u32" | "s32", "u16") => integer(each!(|a: u32| u32: a & 0xffff), "w:h"),
        ([], "u32" | "s32", "s16") => integer(each!(|a: u32| i32: i32::from(a as i16)), "w:h"),
        ([], "u16" | "s16", "u32" | "s32") => integer(each!(|a: u32| u32: a & 0xffff), "h:w"),
        ([], "f64", "f32") => float(each!(|a: f32| f64: f64::from(a)), "d:w"),
        (["rn"], "f32", "f64") => float(each!(|a: f64| f32: float::canonical32(a as f32)), "w:d"),
        ([], "f32", "f16") => float(
            each!(|a: u32| f32: float::canonical32(float::of_f16(a))),
            "w:h",
        ),
        ([], "f32", "bf16") => float(
            each!(|a: u32| f32: float::canonical32(float::of_bf16(a))),
            "w:h",
        ),
        (["rn"], "f16", "f32") => float(each!(|a: f32| u32: float::to_f16(a)), "h:w"),
        (["rn"], "bf16", "f32") => float(each!(|a: f32| u32: float::to_bf16(a)), "h:w"),
        (["rn"], "f32", "s32") => float(each!(|a: i32| f32: a as f32), "w:w"),
        (["rn"], "f32", "u32") => float(each!(|a: u32| f32: a as f32), "w:w"),
        (["rn"], "f64", "s32") | ([], "f64", "s32") => {
            float(each!(|a: i32| f64: f64::from(a)), "d:w")
        }
        (["rn"], "f64", "u32") | ([], "f64", "u32") => {
            float(each!(|a: u32| f64: f64::from(a)), "d:w")
        }
        (["rn"], "f64", "s64") => float(each!(|a: i64| f64: a as f64), "d:d"),
        (["rn"], "f64", "u64") => float(each!(|a: u64| f64: a as f64), "d:d"),
        _ => None,
    }
}

/// Conversions between pairs of numbers: the first source becomes the upper half.
fn pair_conversion(modifiers: &[&str], to: &str, from: &str) -> Option<Arithmetic> {
    macro_rules! pair {
        ($one:expr) => {
            each!(|a: f32, b: f32| u32: {
                let one = $one;
                one(a) << 16 | one(b)
            })
        };
    }
    macro_rules! eighths {
        ($format:ident) => {
            each!(|a: f32, b: f32| u32: finite_eighth(a, $format) << 8 | finite_eighth(b, $format))
        };
    }
    macro_rules! from_eighths {
        ($format:ident) => {
            each!(|a: u32| u32: {
                let one = |bits: u32| {
                    let value = float::widen(u64::from(bits & 255), $format);
                    float::narrow(value, Mode::Nearest, F16) as u32
                };
                one(a >> 8) << 16 | one(a)
            })
        };
    }
    let (exec, operands) = match (modifiers, to, from) {
        (["rn"], "f16x2", "f32") => (pair!(float::to_f16), "w:ww"),
        (["rn"], "bf16x2", "f32") => (pair!(float::to_bf16), "w:ww"),
        (["rn", "satfinite"], "e4m3x2", "f32") => (eighths!(E4M3), "h:ww"),
        (["rn"], "f16x2", "e4m3x2") => (from_eighths!(E4M3), "w:h"),
        _ => return None,
    };
    made(exec, Class::Convert, operands)
}

/// To 8 bits; what is too great becomes the greatest number.
fn finite_eighth(value: f32, format: Format) -> u32 {
    let value = f64::from(value);
    let largest = if format == E4M3 { 448.0 } else { 57344.0 };
    let clamped = if value.is_nan() {
        value
    } else {
        value.clamp(-largest, largest)
    };
    float::narrow(clamped, Mode::Nearest, format) as u32
}

const ROUNDED: u64 = 1 << 10;

const TYPES: [&str; 12] = [
    "u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64",
];

fn type_number(ty: &str) -> Option<u64> {
    TYPES
        .iter()
        .position(|name| *name == ty)
        .map(|number| number as u64)
}

/// A number on its way from one type to another.
enum Number {
    Integer(i128),
    Float(f64),
}

/// Any other conversion, lane by lane.
unsafe fn convert(lanes: &mut Lanes, op: &Op, mask: u32) {
    let from = TYPES[(op.immediate >> 16 & 15) as usize];
    let to = TYPES[(op.immediate >> 24 & 15) as usize];
    let (from_wide, to_wide) = (from.ends_with("64"), to.ends_with("64"));
    for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
        let bits = read(lanes, op.a, lane, from_wide);
        let bits = convert_one(bits, from, to, op.immediate);
        write(lanes, op.d, lane, to_wide, bits);
    }
}

fn convert_one(bits: u64, from: &str, to: &str, flags: u64) -> u64 {
    let mode = Mode::of_number(flags as u8);
    let number = match from {
        "u8" => Number::Integer(i128::from(bits as u8)),
        "s8" => Number::Integer(i128::from(bits as i8)),
        "u16" => Number::Integer(i128::from(bits as u16)),
        "s16" => Number::Integer(i128::from(bits as i16)),
        "u32" => Number::Integer(i128::from(bits as u32)),
        "s32" => Number::Integer(i128::from(bits as i32)),
        "u64" => Number::Integer(i128::from(bits)),
        "s64" => Number::Integer(i128::from(bits as i64)),
        _ => {
            let format = FORMATS[format_number(from).unwrap_or(2) as usize];
            let bits = if flags & FLUSH != 0 && format == F32 {
                float::flush(bits, format)
            } else {
                bits
            };
            Number::Float(float::widen(bits, format))
        }
    };
    let Some(format) = format_number(to) else {
        return to_integer(number, from, to, mode, flags & SATURATE != 0);
    };
    let format = FORMATS[format as usize];
    let bits = match number {
        Number::Integer(value) => float::of_integer(value, mode, format),
        // Between equal formats a mode means: to a whole number.
        Number::Float(value) if from == to && flags & ROUNDED != 0 => {
            float::narrow(float::whole(value, mode), Mode::Nearest, format)
        }
        Number::Float(value) => float::narrow(value, mode, format),
    };
    let bits = if flags & FLUSH != 0 && format == F32 {
        float::flush(bits, format)
    } else {
        bits
    };
    if flags & SATURATE != 0 {
        saturated(bits, format)
    } else {
        bits
    }
}

/// From a float it clamps always; from an integer only where that is asked for.
fn to_integer(number: Number, from: &str, to: &str, mode: Mode, saturate: bool) -> u64 {
    let width: u32 = to[1..].parse().unwrap_or(32);
    let (least, greatest) = if to.starts_with('s') {
        (-(1i128 << (width - 1)), (1i128 << (width - 1)) - 1)
    } else {
        (0, (1i128 << width) - 1)
    };
    let value = match number {
        // A NaN becomes 0, but from f64 to 64 bits, and to other widths, the top bit alone, as
        // hardware has it.
        Number::Float(value) if value.is_nan() => match (from, width) {
            ("f64", _) | (_, 64) => {
                return if width == 64 {
                    1 << 63
                } else {
                    1 << (width - 1)
                }
            }
            _ => 0,
        },
        Number::Float(value) => (float::whole(value, mode) as i128).clamp(least, greatest),
        Number::Integer(value) if saturate => value.clamp(least, greatest),
        Number::Integer(value) => value,
    };
    // A value of 8 bits fills a register of 16 or more with its sign; so does 16 in a slot, where
    // it ends.
    match to {
        "u8" => u64::from(value as u8),
        "s8" => u64::from(value as i8 as u16),
        "u16" | "s16" => u64::from(value as u16),
        "u32" | "s32" => u64::from(value as u32),
        _ => value as u64,
    }
}
