//! Walks along a row, in vectors: [`for_spans!`] visits columns, and [`sum_spans!`] adds them up.
//!
//! Both walk over adjacent columns in three runs: in blocks of `K` vectors, then in single vectors,
//! then column by column. 45 columns at K = 4 and eight f32 a vector:
//!
//! ```text
//! columns  0 .. 32         32 .. 40      40, 41, 42, 43, 44
//!          one block       one vector    five scalars (a "vector" of one lane)
//! ```
//!
//! So an equation has to be compiled for three widths. A closure cannot be generic over a width,
//! but the body of a macro can: it is compiled once for each, with a [`Span`] of that width. For
//! example, y = 2 x and Σ x² of a row:
//!
//! ```text
//! write_row!(T, writer, x.len(), |row| {
//!     for_spans!(simd, 4, 0..x.len(), row, |at| at.load(x) + at.load(x));
//! });
//! let [squares] = sum_spans!(simd, 4, 0..x.len(), |at, squares| {
//!     let x = at.load(x);
//!     squares = x.mul_add(x, squares);
//! });
//! ```
//!
//! Each sum has `K` vectors of accumulators, because an addition has to wait several cycles for the
//! one before it in the same register. More accumulators than registers would cost more than they
//! save, so `K` is smaller where there are more sums. The lanes are added up at the end:
//!
//! ```text
//! blocks       a0 += x[0..8]   a1 += x[8..16]   a2 += x[16..24]   a3 += x[24..32], and so on
//! vectors      a = a0 + a1 + a2 + a3, then a += the vectors that are left
//! scalars      the total of a's lanes, then the columns that are left
//! ```
//!
//! In f32 the rounding error of a sum grows with the number of its terms, and if all terms are equal
//! each addition may be rounded to the same side. So an accumulator takes [`TERMS`] terms at most.
//! A row of more columns is cut into parts of `TERMS` blocks, whose sums are added in f64. At K = 4
//! and eight f32 a vector, 100,000 columns have 48 parts of 2048 columns and one of 1696.
//!
//! [`Span`]: super::vectors::Span

use crate::device::cpu::convert::Accumulator;

/// The most terms that one lane adds up in the dtype of the sums.
///
/// Each addition is off by half a unit in the last place at most, so n terms of one sign are off by
/// n/2 · 2⁻²⁴ of their sum at most in f32: 2e-6. r, from the root of such a sum, is off by half of
/// that.
pub(super) const TERMS: usize = 64;

/// Runs a body for each span of some columns, front to back.
///
/// - `for_spans!(simd, K, columns, |at| body)` visits `columns`, a range, `K` vectors at a time.
/// - `for_spans!(simd, K, columns, row, |at| body)` also appends the value of each body to `row`,
///   of which all columns before these must have been written.
///
/// If the compiler sees that the range ends within an array, as with `0..x.len()`, no step tests the
/// bounds of this array: see [`fits`](super::vectors::Span::fits).
macro_rules! for_spans {
    ($simd:expr, $vectors:expr, $columns:expr, |$at:ident| $body:expr) => {{
        let std::ops::Range { start, end } = $columns;
        let mut span = Span::<_, _, { $vectors }>::new($simd, start);
        while span.fits(end) {
            let $at = span;
            $body;
            span = span.next();
        }
        let mut span = Span::<_, _, 1>::new($simd, span.start());
        while span.is_left(end) {
            let $at = span;
            $body;
            span = span.next();
        }
        // Vectors of one column leave none. The width is a constant, so that no loop is compiled.
        let width = span.width();
        let mut span = Span::<_, _, 1>::new(pulp::Scalar, span.start());
        while width > 1 && span.start() < end {
            let $at = span;
            $body;
            span = span.next();
        }
    }};
    // The row's length is the position, so that one bounds check serves the row and the arrays.
    ($simd:expr, $vectors:expr, $columns:expr, $row:ident, |$at:ident| $body:expr) => {{
        let std::ops::Range { start, end } = $columns;
        debug_assert_eq!($row.len(), start);
        loop {
            let $at = Span::<_, _, { $vectors }>::new($simd, $row.len());
            if !$at.fits(end) {
                break;
            }
            $row.push($body);
        }
        let width = loop {
            let $at = Span::<_, _, 1>::new($simd, $row.len());
            if !$at.is_left(end) {
                break $at.width();
            }
            $row.push($body);
        };
        while width > 1 && $row.len() < end {
            let $at = Span::<_, _, 1>::new(pulp::Scalar, $row.len());
            $row.push($body);
        }
    }};
}

/// `sum_spans!(simd, K, columns, |at, a, b| body)` is the array `[a, b]` of sums over `columns`.
/// The body adds the columns of each span to them lane by lane.
macro_rules! sum_spans {
    ($simd:expr, $vectors:expr, $columns:expr, |$at:ident, $($sum:ident),+| $body:expr) => {{
        let (simd, columns): (_, std::ops::Range<usize>) = ($simd, $columns);
        let end = columns.end;
        let first = Span::<_, _, { $vectors }>::new(simd, columns.start);
        let part = first.width() * $crate::device::cpu::row::spans::TERMS;
        // Most rows have one part. Its end is that of the columns, so that no step tests bounds.
        if end - columns.start <= part {
            sum_spans!(@ simd, first, end, $at, [$($sum),+], $body)
        } else {
            let (mut part_end, mut total) = (columns.start, Default::default());
            while part_end < end {
                let next = Span::<_, _, { $vectors }>::new(simd, part_end);
                part_end = end.min(part_end + part);
                let sums = sum_spans!(@ simd, next, part_end, $at, [$($sum),+], $body);
                total = $crate::device::cpu::row::spans::add_part(total, sums);
            }
            $crate::device::cpu::row::spans::narrow(total)
        }
    }};
    // One part, which begins with this block.
    (@ $simd:ident, $block:ident, $end:ident, $at:ident, [$($sum:ident),+], $body:expr) => {{
        let mut span = $block;
        $(let mut $sum = span.zero();)+
        while span.fits($end) {
            let $at = span;
            $body;
            span = span.next();
        }
        let mut span = Span::<_, _, 1>::new($simd, span.start());
        $(let mut $sum = $sum.sum();)+
        while span.is_left($end) {
            let $at = span;
            $body;
            span = span.next();
        }
        let width = span.width();
        let mut span = Span::<_, _, 1>::new(pulp::Scalar, span.start());
        $(let mut $sum = span.splat($sum.total());)+
        while width > 1 && span.start() < $end {
            let $at = span;
            $body;
            span = span.next();
        }
        [$($sum.total()),+]
    }};
}

pub(super) use {for_spans, sum_spans};

/// The sums of the parts so far, and those of another part.
#[cold]
#[inline(never)]
pub(super) fn add_part<A: Accumulator, const N: usize>(
    mut total: [f64; N],
    sums: [A; N],
) -> [f64; N] {
    for (total, sum) in total.iter_mut().zip(sums) {
        *total += sum.to_f64();
    }
    total
}

/// The sums of all parts, in their dtype.
pub(super) fn narrow<A: Accumulator, const N: usize>(total: [f64; N]) -> [A; N] {
    // `map` of an array is much code for the compiler, in each function of a chunk.
    let mut narrow = [A::zero(); N];
    for (narrow, total) in narrow.iter_mut().zip(total) {
        *narrow = A::from_f64(total);
    }
    narrow
}

#[cfg(test)]
mod tests {
    use super::super::group_scaling::Groups;
    use super::super::output::{Output, RowWriter, Stores, write_row};
    use super::super::vectors::Span;
    use crate::device::cpu::run::level::Level;
    use pulp::{Simd, WithSimd};
    use std::ops::Range;

    /// r of each column's group.
    struct WriteInverses<'a, 'b>(&'a Groups<f32>, &'a mut RowWriter<'b, f32>, usize);

    impl WithSimd for WriteInverses<'_, '_> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            let Self(groups, writer, cols) = self;
            write_row!(f32, writer, cols, |row| {
                for (columns, group) in groups.each(cols) {
                    for_spans!(simd, 4, columns, row, |at| at.splat(group.inv_rms));
                }
            });
        }
    }

    #[test]
    fn a_walk_writes_every_column_with_its_group() {
        for len in 1..140 {
            let mut groups = Groups::new(3 * len, len);
            for ((_, group), inv_rms) in groups.each_mut(3 * len).zip([0., 1., 2.]) {
                group.inv_rms = inv_rms;
            }
            for level in Level::all() {
                let mut output = Output::new(3 * len, 3 * len, Stores::Cached);
                for part in output.parts() {
                    level.run(WriteInverses(&groups, &mut RowWriter::new(part), 3 * len));
                }
                for (i, value) in output.finish().into_iter().enumerate() {
                    assert_eq!(value, (i / len) as f32);
                }
            }
        }
    }

    /// Adds each column to its place in an array of zeros.
    struct Visit<'a>(&'a mut [f32], Range<usize>);

    impl WithSimd for Visit<'_> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            for_spans!(simd, 4, self.1, |at| {
                at.store(at.load(self.0) + at.splat(1f32), self.0);
            });
        }
    }

    #[test]
    fn a_walk_visits_its_columns_once() {
        for len in 0..140 {
            for level in Level::all() {
                let mut visits = vec![0.; len + 3];
                level.run(Visit(&mut visits, 2..2 + len));
                let expected = (0..len + 3).map(|i| f32::from(u8::from((2..2 + len).contains(&i))));
                assert_eq!(visits, expected.collect::<Vec<_>>());
            }
        }
    }

    /// Σ x and Σ x² over some columns.
    struct SumPowers<'a>(&'a [f64], Range<usize>);

    impl WithSimd for SumPowers<'_> {
        type Output = [[f64; 2]; 2];

        /// With four accumulators and with one.
        fn with_simd<S: Simd>(self, simd: S) -> [[f64; 2]; 2] {
            let Self(x, columns) = self;
            let four = sum_spans!(simd, 4, columns.clone(), |at, sum, squares| {
                let x = at.load(x);
                sum = sum + x;
                squares = x.mul_add(x, squares);
            });
            let one = sum_spans!(simd, 1, columns, |at, sum, squares| {
                let x = at.load(x);
                sum = sum + x;
                squares = x.mul_add(x, squares);
            });
            [four, one]
        }
    }

    /// 1 + 2 + … + n and 1² + 2² + … + n², which are exact in f64, of columns 2 to n + 1. The wider
    /// rows have parts.
    #[test]
    fn sums_have_every_column_once() {
        for n in (0..140).chain([511, 512, 513, 1024, 1025, 1500, 2048, 2049, 5000]) {
            let mut row = vec![1e300; 2];
            row.extend((1..=n).map(|i| i as f64));
            row.push(1e300);
            let expected = [
                (n * (n + 1) / 2) as f64,
                (n * (n + 1) * (2 * n + 1) / 6) as f64,
            ];
            for level in Level::all() {
                let sums = level.run(SumPowers(&row, 2..2 + n));
                assert_eq!(sums, [expected; 2], "{n} columns, {level:?}");
            }
        }
    }

    /// Σ x.
    struct Sum<'a>(&'a [f32]);

    impl WithSimd for Sum<'_> {
        type Output = f32;

        fn with_simd<S: Simd>(self, simd: S) -> f32 {
            let x = self.0;
            let [sum] = sum_spans!(simd, 4, 0..x.len(), |at, sum| sum = sum + at.load(x));
            sum
        }
    }

    /// With one part a sum of 2²⁰ terms was off by up to 3e-4, because of its equal terms each is
    /// rounded as the one before it. `TERMS` says why 2e-6 is the most.
    #[test]
    fn long_sums_have_parts() {
        for x in [0.1f32, 1.1, 1.3, 1.7] {
            for level in Level::all() {
                for cols in [1 << 12, if cfg!(miri) { 1 << 13 } else { 1 << 20 }] {
                    let sum = level.run(Sum(&vec![x; cols]));
                    let error = f64::from(sum) / (f64::from(x) * cols as f64) - 1.;
                    assert!(error.abs() < 2e-6, "{cols} times {x}, {level:?}: {error:e}");
                }
            }
        }
    }

    /// The sum of the parts fits although that of the first ones does not.
    #[test]
    fn parts_do_not_overflow() {
        let mut row = vec![3e38 / 4096f32; 8192];
        row.extend([-3e38 / 4096.; 4096]);
        for level in Level::all() {
            let sum = level.run(Sum(&row));
            assert!((sum / 3e38 - 1.).abs() < 1e-6, "{level:?}: {sum:e}");
        }
    }
}
