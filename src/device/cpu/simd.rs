//! The vector instructions that the kernels run in: chosen when the program runs, from what the
//! processor has.

use super::element::Element;
use crate::error::Error;
use pulp::{Scalar128b, WithSimd};
use std::sync::LazyLock;

#[cfg(target_arch = "x86_64")]
pulp::simd_type! {
    /// The features of every processor with AVX2: those of [`V3`](pulp::x86::V3), and F16C, which
    /// rows of f16 need.
    pub(super) struct Avx2 {
        avx2: "avx2",
        fma: "fma",
        f16c: "f16c",
        bmi1: "bmi1",
        bmi2: "bmi2",
        lzcnt: "lzcnt",
        popcnt: "popcnt",
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Level {
    /// Features that all processors of the target have.
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

/// Levels of 256 bits at most, and of 512: the best of this processor, or the level that
/// [`VARIABLE`] names. `None` if it names no level.
static LEVELS: LazyLock<Option<(Level, Level)>> = LazyLock::new(|| {
    let name = std::env::var_os(VARIABLE).unwrap_or_default();
    match name.to_str() {
        Some("scalar") => Some((Level::Baseline, Level::Baseline)),
        Some("avx2") => Some((avx2(), avx2())),
        Some("best" | "") => Some(best()),
        _ => None,
    }
});

/// Refuses the name of a level that there is not: a test that ignored it would test something else.
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

/// Runs `op` at the level for rows of `T` in groups of `group_len` columns.
///
/// 512 bits take 15 to 20 % less time for f32 rows that caches hold, and up to 9 % more for rows
/// that come from memory. Half precision is limited by conversion, which is faster at 512 bits.
/// Measured at 1024x512 and 4096x512 on an AMD EPYC; see `benches/results`.
pub(super) fn vectorize<T: Element, Op: WithSimd>(group_len: usize, op: Op) -> Op::Output {
    // The columns after a group's last whole vector go one by one.
    let widest = 64 / size_of::<T::Acc>();
    let (narrow, wide) = LEVELS.unwrap_or_else(best);
    let level = match group_len.is_multiple_of(widest) {
        true => wide,
        false => narrow,
    };
    level.run(op)
}

impl Level {
    pub(super) fn run<Op: WithSimd>(self, op: Op) -> Op::Output {
        match self {
            // Four lanes, which the compiler turns into the vectors that every processor of the
            // target has.
            Level::Baseline => op.with_simd(Scalar128b),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(avx2, v3) => avx2.vectorize(
                #[inline(always)]
                || op.with_simd(v3),
            ),
            #[cfg(target_arch = "x86_64")]
            // Not by `pulp::Arch`, which would compile `op` at its lower levels a second time.
            Level::Avx512(v4) => pulp::Simd::vectorize(v4, op),
            #[cfg(not(target_arch = "x86_64"))]
            Level::Best(arch) => arch.dispatch(op),
        }
    }

    /// Every level of this processor.
    #[cfg(test)]
    pub(super) fn all() -> [Self; 3] {
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
