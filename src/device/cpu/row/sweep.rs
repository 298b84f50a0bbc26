//! Walks along a row, in vectors: over the whole row to write an output, or over a group to sum.
//!
//! A row is cut into *groups* of adjacent channels ([`Groups`]), all of one length. Without group
//! scaling there is one group. Each group is walked in three runs: in blocks of `K` vectors, then
//! in single vectors, then column by column. A group of 45 columns at K = 4 and eight f32 a vector:
//!
//! ```text
//! columns  0 .. 32         32 .. 40      40, 41, 42, 43, 44
//!          one block       one vector    five scalars (a "vector" of one lane)
//! ```
//!
//! So an equation has to be compiled for three widths. A closure cannot be generic over a width,
//! which is why an equation is a type: [`Columns`] if [`sweep`] writes its values, and [`Terms`] if
//! [`sum_terms`] adds them up. Their one function gets a [`Span`] and works at any width.

#[cfg(target_arch = "x86_64")]
use super::non_temporal::NonTemporalRow;
use super::vectors::{Lanes, Span};
use crate::device::cpu::convert::{Accumulator, Element};
use pulp::{Scalar, Simd};
use std::mem::MaybeUninit;
use std::ops::Range;

/// What one group of a row is normalized by, in a forward and in a backward:
///
/// ```text
/// x̃ = r (x − μ)
/// dx = r (dx̃ − mean(dx̃) − x̃ · mean(dx̃ x̃))
/// ```
///
/// LayerNorm has all of these. Group scaling has neither μ nor the mean of dx̃, and a forward has
/// no means of gradients; these stay 0. Rows that are not normalized keep [`Scaling::none`].
#[derive(Clone, Copy)]
pub(crate) struct Scaling<A> {
    /// μ, as `mean + rest`: the mean, rounded, and the mean of the distances to it.
    pub mean: A,
    pub rest: A,
    /// r.
    pub rms_inv: A,
    /// The mean of dx̃.
    pub mean_dx: A,
    /// The mean of dx̃ x̃.
    pub mean_dx_x: A,
}

impl<A: Accumulator> Scaling<A> {
    /// Leaves x̃ = x and dx = dx̃.
    #[inline(always)]
    pub fn none() -> Self {
        Self {
            mean: A::zero(),
            rest: A::zero(),
            rms_inv: A::one(),
            mean_dx: A::zero(),
            mean_dx_x: A::zero(),
        }
    }
}

/// The groups of a row, which make up its columns, in order.
pub(crate) struct Groups<A> {
    /// Private, with `len`: `output.rs` relies on it that [`sweep`] visits as many columns.
    cols: usize,
    len: usize,
    scalings: Vec<Scaling<A>>,
}

impl<A: Accumulator> Groups<A> {
    /// `cols` columns in groups of `len`, not scaled.
    ///
    /// # Panics
    ///
    /// If some columns are in no group.
    #[inline(always)]
    pub fn new(cols: usize, len: usize) -> Self {
        assert!(
            cols.is_multiple_of(len),
            "{cols} columns in groups of {len}"
        );
        Self {
            cols,
            len,
            scalings: vec![Scaling::none(); cols / len],
        }
    }

    /// The number of columns, which are all in some group.
    #[inline(always)]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The scaling of a row that is one group.
    #[inline(always)]
    pub fn only_mut(&mut self) -> &mut Scaling<A> {
        debug_assert_eq!(self.scalings.len(), 1);
        &mut self.scalings[0]
    }

    /// The columns and the scaling of each group.
    #[inline(always)]
    pub fn each_mut(&mut self) -> impl Iterator<Item = (Range<usize>, &mut Scaling<A>)> {
        let len = self.len;
        let columns = move |group| group * len..(group + 1) * len;
        let scalings = self.scalings.iter_mut().enumerate();
        scalings.map(move |(group, scaling)| (columns(group), scaling))
    }
}

/// The equations of an output on adjacent columns. Implementations are `#[inline(always)]`.
pub(crate) trait Columns<A: Accumulator> {
    /// Returns the output in these columns of one group, which has this scaling. Columns come in
    /// order, each of them once.
    fn apply<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, A, K>,
        scaling: Scaling<A>,
    ) -> Lanes<S, A, K>;
}

/// The destination of the output that [`sweep`] writes for a row.
pub(crate) enum Target<'a, T> {
    /// Nowhere, because only the sums that the columns add to are wanted.
    Nowhere,
    /// To memory, through the caches.
    Cached(&'a mut [MaybeUninit<T>]),
    /// To memory, past the caches.
    #[cfg(target_arch = "x86_64")]
    NonTemporal(NonTemporalRow<'a, T>),
}

impl<T: Element> Target<'_, T> {
    /// Writes the columns that begin at `start`.
    //
    // Callers of `sweep` pass one variant by name, so that the compiler drops the test. A test in
    // each block would cost a tenth of a pass.
    #[inline(always)]
    fn write<S: Simd, const K: usize>(&mut self, columns: Lanes<S, T::Acc, K>, start: usize) {
        match self {
            Self::Nowhere => {}
            Self::Cached(row) => columns.write(row, start),
            #[cfg(target_arch = "x86_64")]
            Self::NonTemporal(row) => row.write(columns, start),
        }
    }
}

/// Applies `columns` to a row from front to back, and writes the output.
///
/// Every column from 0 to `groups.cols()` is visited once, and so written once unless the target is
/// nowhere. `output.rs` relies on it.
#[inline(always)]
pub(crate) fn sweep<const K: usize, S: Simd, T: Element>(
    simd: S,
    groups: &Groups<T::Acc>,
    columns: &mut impl Columns<T::Acc>,
    mut target: Target<T>,
) {
    let (block, vector) = (Span::<S, T::Acc, K>::WIDTH, Span::<S, T::Acc, 1>::WIDTH);
    let mut start = 0;
    for &scaling in &groups.scalings {
        let end = start + groups.len;
        while start + block <= end {
            let at: Span<S, _, K> = Span::new(simd, start);
            target.write(columns.apply(at, scaling), start);
            start += block;
        }
        while start + vector <= end {
            let at: Span<S, _, 1> = Span::new(simd, start);
            target.write(columns.apply(at, scaling), start);
            start += vector;
        }
        while start < end {
            let at: Span<_, _, 1> = Span::new(Scalar, start);
            target.write(columns.apply(at, scaling), start);
            start += 1;
        }
    }
}

/// `N` values of each column, to be summed over columns. Implementations are `#[inline(always)]`.
pub(crate) trait Terms<A: Accumulator, const N: usize> {
    /// Adds the values of these columns to `sums`, lane by lane.
    fn add<S: Simd, const K: usize>(&self, at: Span<S, A, K>, sums: &mut [Lanes<S, A, K>; N]);
}

/// The sums of `terms` over `columns`.
///
/// Each sum has `K` vectors of accumulators, because an addition has to wait several cycles for the
/// one before it in the same register. More accumulators than registers would cost more than they
/// save, so `K` is smaller where `N` is larger. The lanes are added up at the end:
///
/// ```text
/// blocks       a0 += x[0..8]   a1 += x[8..16]   a2 += x[16..24]   a3 += x[24..32], and so on
/// vectors      a = a0 + a1 + a2 + a3, then a += the vectors that are left
/// scalars      the total of a's lanes, then the columns that are left
/// ```
#[inline(always)]
pub(crate) fn sum_terms<const K: usize, const N: usize, S: Simd, A: Accumulator>(
    simd: S,
    columns: Range<usize>,
    terms: &impl Terms<A, N>,
) -> [A; N] {
    let (block, vector) = (Span::<S, A, K>::WIDTH, Span::<S, A, 1>::WIDTH);
    let Range { mut start, end } = columns;
    let mut blocks = [Lanes::<S, A, K>::splat(simd, A::zero()); N];
    while start + block <= end {
        terms.add(Span::new(simd, start), &mut blocks);
        start += block;
    }
    let mut vectors = [Lanes::<S, A, 1>::splat(simd, A::zero()); N];
    for n in 0..N {
        vectors[n] = blocks[n].sum();
    }
    while start + vector <= end {
        terms.add(Span::new(simd, start), &mut vectors);
        start += vector;
    }
    let mut lanes = [Lanes::<Scalar, A, 1>::splat(Scalar, A::zero()); N];
    for n in 0..N {
        lanes[n] = Lanes::splat(Scalar, vectors[n].total());
    }
    while start < end {
        terms.add(Span::new(Scalar, start), &mut lanes);
        start += 1;
    }
    let mut totals = [A::zero(); N];
    for n in 0..N {
        totals[n] = lanes[n].total();
    }
    totals
}

#[cfg(test)]
mod tests {
    #![allow(unsafe_code)]

    use super::*;
    use crate::device::cpu::run::level::Level;
    use pulp::WithSimd;

    /// r of each column's group.
    struct RmsInverses;

    impl Columns<f32> for RmsInverses {
        fn apply<S: Simd, const K: usize>(
            &mut self,
            at: Span<S, f32, K>,
            scaling: Scaling<f32>,
        ) -> Lanes<S, f32, K> {
            at.splat(scaling.rms_inv)
        }
    }

    struct Sweep<'a>(&'a Groups<f32>, &'a mut [MaybeUninit<f32>]);

    impl WithSimd for Sweep<'_> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            sweep::<4, _, f32>(simd, self.0, &mut RmsInverses, Target::Cached(self.1));
        }
    }

    #[test]
    fn a_sweep_writes_every_column_with_its_group() {
        for len in 1..140 {
            let mut groups = Groups::new(3 * len, len);
            for ((_, scaling), rms_inv) in groups.each_mut().zip([0., 1., 2.]) {
                scaling.rms_inv = rms_inv;
            }
            for level in Level::all() {
                let mut row = vec![MaybeUninit::new(-1.); 3 * len];
                level.run(Sweep(&groups, &mut row));
                for (i, slot) in row.iter().enumerate() {
                    // SAFETY: the slot had a value before the sweep.
                    assert_eq!(unsafe { slot.assume_init() }, (i / len) as f32);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "7 columns in groups of 2")]
    fn groups_make_up_the_row() {
        Groups::<f32>::new(7, 2);
    }

    /// Σ x and Σ x² over some columns.
    struct Powers<'a>(&'a [f64]);

    impl Terms<f64, 2> for Powers<'_> {
        fn add<S: Simd, const K: usize>(
            &self,
            at: Span<S, f64, K>,
            [sum, squares]: &mut [Lanes<S, f64, K>; 2],
        ) {
            let x = at.load(self.0);
            *sum = *sum + x;
            *squares = x.mul_add(x, *squares);
        }
    }

    struct SumPowers<'a>(&'a [f64], Range<usize>);

    impl WithSimd for SumPowers<'_> {
        type Output = [[f64; 2]; 2];

        /// With four accumulators and with one.
        fn with_simd<S: Simd>(self, simd: S) -> [[f64; 2]; 2] {
            let terms = Powers(self.0);
            [
                sum_terms::<4, 2, S, f64>(simd, self.1.clone(), &terms),
                sum_terms::<1, 2, S, f64>(simd, self.1, &terms),
            ]
        }
    }

    /// 1 + 2 + … + n and 1² + 2² + … + n², which are exact in f64, of columns 2 to n + 1.
    #[test]
    fn sums_have_every_column_once() {
        for n in 0..140 {
            let mut row = vec![1e300; 2];
            row.extend((1..=n).map(f64::from));
            row.push(1e300);
            let expected = [
                f64::from(n * (n + 1) / 2),
                f64::from(n * (n + 1) * (2 * n + 1) / 6),
            ];
            for level in Level::all() {
                let sums = level.run(SumPowers(&row, 2..2 + n as usize));
                assert_eq!(sums, [expected; 2], "{n} columns, {level:?}");
            }
        }
    }
}
