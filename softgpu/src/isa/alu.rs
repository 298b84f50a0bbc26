//! Arithmetic: from an instruction's name to a function that computes it for the 32 lanes of a
//! warp.
//!
//! Registers, constants and special registers are all slots of 32 values, so a function only knows
//! slots. Predicates are masks.

// A comparison says what it makes of NaN, so `a < b || a > b` is not `a != b`.
#![allow(clippy::double_comparisons, clippy::neg_cmp_op_on_partial_ord)]
// Lanes are numbered in PTX.
#![allow(clippy::needless_range_loop)]

use crate::isa::float::{self, Approximate, Format, Mode, BF16, F16, F32, F64};
use crate::isa::op::{Class, Exec, Lanes, Op};

use std::mem::MaybeUninit;

/// An arithmetic instruction, found by its name.
#[derive(Clone, Copy)]
pub struct Arithmetic {
    pub exec: Exec,
    pub class: Class,
    /// The operands, destination first: `h`, `w` and `d` are slots with 16, 32 and 64
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

/// The modifiers of an opcode.
#[derive(Clone, Copy, Default)]
struct Flags {
    rounding: Option<Mode>,
    flush: bool,
    saturate: bool,
    approximate: bool,
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
    let &[comparison] = modifiers else {
        return None;
    };
    let (exec, operands) = if ty.starts_with('f') || ty == "bf16" {
        match comparison {
            "eq" => float_condition!(ty, |a, b| a == b),
            "ne" => float_condition!(ty, |a, b| a < b || a > b),
            "lt" => float_condition!(ty, |a, b| a < b),
            "le" => float_condition!(ty, |a, b| a <= b),
            "gt" => float_condition!(ty, |a, b| a > b),
            "ge" => float_condition!(ty, |a, b| a >= b),
            "equ" => float_condition!(ty, |a, b| !(a < b || a > b)),
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
        ("shr", [], "s64") => (each!(|a: i64, b: u32| i64: a >> b.min(63)), "d:dw"),
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
    let exec = match modifiers {
        [] => each!(|a: u32, b: u32, c: u32| u32: {
            let both = u64::from(b) << 32 | u64::from(a);
            pick(both, c)
                | pick(both, c >> 4) << 8
                | pick(both, c >> 8) << 16
                | pick(both, c >> 12) << 24
        }),
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

fn floating(opcode: &str, modifiers: &[&str], ty: &str) -> Option<Arithmetic> {
    let flags = Flags::of(modifiers)?;
    if let Some(arithmetic) = approximate(opcode, flags, ty) {
        return Some(arithmetic);
    }
    if flags.approximate || flags.flush || flags.saturate {
        return None;
    }
    let (found, class, width) = match (ty, flags.nearest()) {
        ("f32", true) => (single(opcode)?, Class::Float, "w"),
        ("f64", true) => (double(opcode)?, Class::Double, "d"),
        ("f32", false) => return directed(opcode, flags),
        (_, true) => return half(opcode, ty),
        _ => return None,
    };
    let (exec, sources) = found;
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
        "max" => (rounded!(|a, b| float::max32(a, b)), 2),
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
        _ => return None,
    };
    made(exec, Class::Float, alike(width, sources))
}

const FORMATS: [Format; 4] = [F16, BF16, F32, F64];

fn format_number(ty: &str) -> Option<u64> {
    ["f16", "bf16", "f32", "f64"]
        .iter()
        .position(|name| *name == ty)
        .map(|number| number as u64)
}

/// A sum of f32, alone or of a product, in a rounding mode that the host's processor does not have.
fn directed(opcode: &str, flags: Flags) -> Option<Arithmetic> {
    let (exec, operands): (Exec, _) = match opcode {
        "add" => (directed_sum, "w:ww"),
        "fma" => (directed_sum_of_product, "w:www"),
        _ => return None,
    };
    Some(Arithmetic {
        exec,
        class: Class::Float,
        operands,
        immediate: flags.bits(),
    })
}

unsafe fn directed_sum(lanes: &mut Lanes, op: &Op, mask: u32) {
    for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
        let [a, b] = [op.a, op.b].map(|slot| float::widen(read(lanes, slot, lane, false), F32));
        let bits = float::add(a, b, Mode::of_number(op.immediate as u8), F32);
        write(lanes, op.d, lane, false, bits);
    }
}

unsafe fn directed_sum_of_product(lanes: &mut Lanes, op: &Op, mask: u32) {
    for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
        let [a, b, c] =
            [op.a, op.b, op.c].map(|slot| float::widen(read(lanes, slot, lane, false), F32));
        // The product of two f32 is exact in f64.
        let bits = float::add(a * b, c, Mode::of_number(op.immediate as u8), F32);
        write(lanes, op.d, lane, false, bits);
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
    if !flags.approximate {
        return None;
    }
    let function = match opcode {
        "rcp" => Approximate::Reciprocal,
        "rsqrt" => Approximate::InverseRoot,
        "ex2" => Approximate::Exponential,
        _ => return None,
    };
    let width = width_of(ty)?;
    let exec: Exec = match (function, ty) {
        (Approximate::InverseRoot, "f32") if !flags.flush => {
            let fast = each!(|a: f32| f32: float::canonical32((1.0 / f64::from(a).sqrt()) as f32));
            return Some(Arithmetic {
                exec: fast,
                class: Class::Special,
                operands: "w:w",
                // The slow way, where results are to be moved.
                immediate: perturbed(function, flags),
            });
        }
        (Approximate::InverseRoot, "f64") if !flags.flush => inverse_root64,
        (_, "f32") => approximated,
        _ => return None,
    };
    Some(Arithmetic {
        exec,
        class: Class::Special,
        operands: alike(width, 1),
        immediate: match ty {
            "f64" => flags.bits(),
            _ => perturbed(function, flags),
        },
    })
}

fn perturbed(function: Approximate, flags: Flags) -> u64 {
    flags.bits() | (function as u64) << 16 | PERTURBED
}

/// Marks an instruction that [`Lanes::perturb`] turns into [`approximated`].
const PERTURBED: u64 = 1 << 32;

/// An instruction as it is where results are perturbed.
pub fn under_perturbation(op: &Op) -> Op {
    match op.class == Class::Special && op.immediate & PERTURBED != 0 {
        true => Op {
            exec: approximated,
            ..*op
        },
        false => *op,
    }
}

/// An approximate function of f32, moved within its error if that is asked for.
unsafe fn approximated(lanes: &mut Lanes, op: &Op, mask: u32) {
    let function = Approximate::of_number((op.immediate >> 16) as u8);
    let flushed = |value: f32| match op.immediate & FLUSH {
        0 => value,
        _ => float::flush32(value),
    };
    for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
        let bits = read(lanes, op.a, lane, false) as u32;
        let a = f64::from(flushed(f32::from_bits(bits)));
        let value = match lanes.perturb {
            Some(seed) => {
                function.moved(function.value(a), chance(seed, op.line, lane, a.to_bits()))
            }
            None => function.value(a),
        };
        let value = flushed(float::canonical32(value as f32));
        write(lanes, op.d, lane, false, value.to_bits().into());
    }
}

/// `rsqrt.approx.f64`, which is emulated on a GPU: nvcc has it for `rsqrt`, which CUDA's guide says
/// is off by one in the last place at most.
unsafe fn inverse_root64(lanes: &mut Lanes, op: &Op, mask: u32) {
    for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
        let bits = read(lanes, op.a, lane, true);
        let value = Approximate::InverseRoot.value(f64::from_bits(bits));
        let value = match lanes.perturb {
            Some(seed) if value.is_finite() => {
                value * (1.0 + chance(seed, op.line, lane, bits) * 2f64.powi(-52))
            }
            _ => value,
        };
        let bits = if value.is_nan() {
            F64.nan()
        } else {
            value.to_bits()
        };
        write(lanes, op.d, lane, true, bits);
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
    let flags = Flags::of(modifiers)?;
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
    let (exec, operands) = match (modifiers, to, from) {
        (["rn"], "f16x2", "f32") => (pair!(float::to_f16), "w:ww"),
        (["rn"], "bf16x2", "f32") => (pair!(float::to_bf16), "w:ww"),
        _ => return None,
    };
    made(exec, Class::Convert, operands)
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
