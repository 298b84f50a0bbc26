//! The level of vector instructions that passes run in, chosen when the program runs.
//!
//! A program is built for the oldest processor that it should run on, and a *level* is the set of
//! instructions of a newer one: AVX2 or AVX-512 on x86-64. pulp compiles the code of a chunk once
//! for each level. A chunk's code is a [`WithSimd`], whose one function gets the level as a type.
//! That is the only call whose target is chosen at run time, and it is made once a chunk.
//!
//! | level | vectors | fused multiply-add | f16 |
//! |---|---|---|---|
//! | `Baseline` | none: one column at a time | no | the `half` crate |
//! | `Avx2` | 8 × f32 | yes | F16C |
//! | `Avx512` | 16 × f32 | yes | AVX-512 |
//!
//! A fused multiply-add rounds once, except in the columns after the last vector, and wider vectors
//! have more accumulators, so levels may differ in the last bits of a result. At one level the bits
//! do not depend on threads.
//!
//! `Baseline` is for processors from before AVX2 and for comparisons. It takes no vectors, because
//! in vectors of four it was the largest level: 300 of the 730 KB of all rows.

use crate::device::cpu::convert::Element;
use crate::error::Error;
use pulp::WithSimd;
use std::sync::LazyLock;

#[cfg(target_arch = "x86_64")]
pulp::simd_type! {
    /// The features of every processor with AVX2: those of [`V3`](pulp::x86::V3), and F16C, which
    /// rows of f16 need.
    pub(crate) struct Avx2 {
        avx2: "avx2",
        fma: "fma",
        f16c: "f16c",
        bmi1: "bmi1",
        bmi2: "bmi2",
        lzcnt: "lzcnt",
        popcnt: "popcnt",
    }
}

/// A level that this processor has: each but the first holds a value that proves it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Level {
    /// The instructions of every processor that the program is built for.
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2, pulp::x86::V3),
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
    #[cfg(not(target_arch = "x86_64"))]
    Best(pulp::Arch),
}

/// The environment variable that names the level: `scalar`, `avx2` or `best`, so that each can be
/// tested on one machine.
const VARIABLE: &str = "CANDLE_POWERNORM_SIMD";

/// The best level with vectors of at most 256 bits, and the best with 512; both are the level that
/// [`VARIABLE`] names, if there is one. `None` if its value is not the name of a level.
static LEVELS: LazyLock<Option<(Level, Level)>> = LazyLock::new(|| {
    let name = std::env::var_os(VARIABLE).unwrap_or_default();
    match name.to_str() {
        Some("scalar") => Some((Level::Baseline, Level::Baseline)),
        Some("avx2") => Some((avx2(), avx2())),
        Some("best" | "") => Some(best()),
        _ => None,
    }
});

/// Rejects an unknown level: if a typo were ignored, tests would silently run at another level.
pub(crate) fn check_level() -> candle::Result<()> {
    if LEVELS.is_some() {
        return Ok(());
    }
    Err(Error::Environment {
        variable: VARIABLE,
        expected: "scalar, avx2 or best",
        got: std::env::var_os(VARIABLE).unwrap_or_default(),
    }
    .into())
}

#[cfg(target_arch = "x86_64")]
fn best() -> (Level, Level) {
    let avx512 = pulp::x86::V4::try_new().map(Level::Avx512);
    (avx2(), avx512.unwrap_or_else(avx2))
}

#[cfg(target_arch = "x86_64")]
fn avx2() -> Level {
    match (Avx2::try_new(), pulp::x86::V3::try_new()) {
        (Some(avx2), Some(v3)) => Level::Avx2(avx2, v3),
        _ => Level::Baseline,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn best() -> (Level, Level) {
    let best = Level::Best(pulp::Arch::new());
    (best, best)
}

#[cfg(not(target_arch = "x86_64"))]
fn avx2() -> Level {
    Level::Baseline
}

/// Runs `op` at the best level for rows of `T` in groups of `group_len` columns.
///
/// 512 bits take 15 to 20 % less time for f32 rows in the caches, and up to 9 % more for rows from
/// memory. Half precision is limited by conversion, which is faster at 512 bits. Measured at
/// 1024x512 and 4096x512 on an AMD EPYC (`benches/results/cpu-choices.md`).
#[inline]
pub(crate) fn vectorize<T: Element, Op: WithSimd>(group_len: usize, op: Op) -> Op::Output {
    // The columns after a group's last whole vector are computed one by one, so wider vectors would
    // leave more of them.
    let widest = 64 / size_of::<T::Acc>();
    let (narrow, wide) = LEVELS.unwrap_or_else(best);
    let level = match group_len.is_multiple_of(widest) {
        true => wide,
        false => narrow,
    };
    level.run(op)
}

impl Level {
    #[inline]
    pub(crate) fn run<Op: WithSimd>(self, op: Op) -> Op::Output {
        match self {
            Level::Baseline => op.with_simd(pulp::Scalar),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(avx2, v3) => avx2.vectorize(
                #[inline(always)]
                || op.with_simd(v3),
            ),
            #[cfg(target_arch = "x86_64")]
            // Not with `pulp::Arch`, which would compile `op` for its lower levels once more.
            Level::Avx512(v4) => pulp::Simd::vectorize(v4, op),
            #[cfg(not(target_arch = "x86_64"))]
            Level::Best(arch) => arch.dispatch(op),
        }
    }

    /// Every level of this processor.
    #[cfg(test)]
    pub(crate) fn all() -> [Self; 3] {
        let (_, best) = best();
        [Level::Baseline, avx2(), best]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::Simd;

    /// The bytes of a vector.
    struct Width;

    impl WithSimd for Width {
        type Output = usize;

        fn with_simd<S: Simd>(self, _: S) -> usize {
            size_of::<S::f32s>()
        }
    }

    #[test]
    fn the_widest_vectors_are_for_groups_that_fill_them() {
        let (narrow, wide) = LEVELS.unwrap_or_else(best);
        for (group_len, level) in [(16, wide), (48, wide), (24, narrow)] {
            assert_eq!(vectorize::<f32, _>(group_len, Width), level.run(Width));
            assert_eq!(vectorize::<f64, _>(group_len / 2, Width), level.run(Width));
        }
    }
}
