//! The passes over rows: `y = gain ⊙ x̃ + shift`, and back.
//!
//! x̃ is the row after its own normalization: group scaling, LayerNorm's, or none. `step.rs` folds
//! everything that a channel has into two coefficients: γ/D and β in a forward, and those of
//! `dx̃ = gain ⊙ dy − decay ⊙ x̃` in a backward. So a row needs two coefficients for each channel,
//! whatever the recipe, statistic and phase.
//!
//! PowerNorm, LayerNorm, RMSNorm and `GroupScaling` all take these passes, the last three with
//! D = 1.

use super::group_scaling::{BackwardTerms, Scaler};
use super::output::RowWriter;
use super::sweep::{Columns, Groups, Scaling, Target, sweep};
use super::vectors::{Lanes, Span};
use super::{BackwardSums, ColumnSums, Row, RowPass, UNROLL};
use crate::device::cpu::convert::{Accumulator, Element, PerChannel};
use crate::device::cpu::layout::Matrix;
use pulp::Simd;

/// Sets the scaling of a row's groups for a forward.
#[inline(always)]
fn scale<const CENTRED: bool, S: Simd, T: Element>(
    simd: S,
    scaler: &Option<Scaler<T::Acc>>,
    x: &[T],
    groups: &mut Groups<T::Acc>,
) {
    match (scaler, CENTRED) {
        (Some(scaler), true) => scaler.centre(simd, x, groups),
        (Some(scaler), false) => scaler.scale(simd, x, groups),
        (None, _) => {}
    }
}

/// x̃ in some columns of one group.
#[inline(always)]
fn normalized<const CENTRED: bool, S: Simd, T: Element, const K: usize>(
    at: Span<S, T::Acc, K>,
    x: &[T],
    scaling: Scaling<T::Acc>,
) -> Lanes<S, T::Acc, K> {
    let (x, rms_inv) = (at.load(x), at.splat(scaling.rms_inv));
    if !CENTRED {
        return x * rms_inv;
    }
    // r (x − mean − rest) as one multiply-add: r · rest is constant along the row.
    let shift = at.splat(-scaling.rest * scaling.rms_inv);
    (x - at.splat(scaling.mean)).mul_add(rms_inv, shift)
}

/// Σ x̃² and `y = gain x̃ + shift`.
pub(crate) struct Forward<'a, T: Element> {
    /// `None` if rows are not normalized by themselves.
    pub scaler: Option<Scaler<T::Acc>>,
    /// Gain and shift, `[C]` each. `None` if only sums are wanted.
    pub coefficients: Option<&'a [PerChannel<T>; 2]>,
    /// Σ x̃² in each column: none, 1 over the kept rows, or 2, over the kept and the padded rows.
    /// LayerNorm takes none.
    pub sums_per_column: usize,
}

impl<T: Element> RowPass<T> for Forward<'_, T> {
    const ADDS_RESIDUAL: bool = true;

    fn writes(&self) -> bool {
        self.coefficients.is_some()
    }

    fn sums_per_column(&self) -> usize {
        self.sums_per_column
    }

    #[inline(always)]
    fn row<S: Simd, const CENTRED: bool>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &mut Groups<T::Acc>,
        y: Option<&mut RowWriter<T>>,
        sums: &mut [T::Acc],
    ) {
        let (x, cols) = (row.x, row.x.len());
        scale::<CENTRED, _, _>(simd, &self.scaler, x, groups);
        // Padded rows have the second sums, if there are any.
        let start = if row.keeps { 0 } else { cols };
        let takes_sums = !CENTRED && start < sums.len();
        let sums = takes_sums.then(|| &mut sums[start..][..cols]);
        let mut squares = AddSquares::<_, CENTRED> { x, sums };
        let (Some(y), Some([gain, shift])) = (y, self.coefficients) else {
            return sweep::<UNROLL, _, T>(simd, groups, &mut squares, Target::Nowhere);
        };
        let mut columns = Affine {
            squares,
            gain: &gain[..cols],
            shift: &shift[..cols],
        };
        y.extend::<UNROLL, _>(simd, groups, &mut columns);
    }
}

/// x̃, whose squares are added to Σ x̃².
struct AddSquares<'a, T: Element, const CENTRED: bool> {
    x: &'a [T],
    sums: Option<&'a mut [T::Acc]>,
}

impl<T: Element, const CENTRED: bool> Columns<T::Acc> for AddSquares<'_, T, CENTRED> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, T::Acc, K>,
        scaling: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let x = normalized::<CENTRED, _, _, K>(at, self.x, scaling);
        if let Some(sums) = &mut self.sums {
            at.store(x.mul_add(x, at.load(sums)), sums);
        }
        x
    }
}

/// y.
struct Affine<'a, T: Element, const CENTRED: bool> {
    squares: AddSquares<'a, T, CENTRED>,
    gain: &'a [T::Acc],
    shift: &'a [T::Acc],
}

impl<T: Element, const CENTRED: bool> Columns<T::Acc> for Affine<'_, T, CENTRED> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, T::Acc, K>,
        scaling: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let x = self.squares.apply(at, scaling);
        let shift = at.load(self.shift);
        x.mul_add(at.load(self.gain), shift)
    }
}

/// Σ dy x̃, Σ dy, and dx from `dx̃ = gain dy − decay x̃`. LayerNorm has no decay.
pub(crate) struct Backward<'a, T: Element> {
    pub dy: &'a Matrix<'a, T>,
    /// `None` if rows are not normalized by themselves.
    pub scaler: Option<Scaler<T::Acc>>,
    /// Gain and decay, `[C]` each. `None` if only sums are wanted.
    pub coefficients: Option<&'a [PerChannel<T>; 2]>,
    pub sums: BackwardSums,
}

impl<T: Element> RowPass<T> for Backward<'_, T> {
    fn writes(&self) -> bool {
        self.coefficients.is_some()
    }

    fn sums_per_column(&self) -> usize {
        self.sums.per_column()
    }

    #[inline(always)]
    fn row<S: Simd, const CENTRED: bool>(
        &self,
        simd: S,
        row: Row<T>,
        groups: &mut Groups<T::Acc>,
        dx: Option<&mut RowWriter<T>>,
        sums: &mut [T::Acc],
    ) {
        let (x, cols) = (row.x, row.x.len());
        let dy = &self.dy.row(row.index)[..cols];
        if !row.keeps {
            if let Some(dx) = dx {
                dx.extend::<1, _>(simd, groups, &mut Zeros);
            }
            return;
        }
        let sums = ColumnSums::of(sums, cols);
        let mut products = AddProducts::<_, CENTRED> { x, dy, sums };
        let (Some(dx), Some([gain, decay])) = (dx, self.coefficients) else {
            scale::<CENTRED, _, _>(simd, &self.scaler, x, groups);
            return sweep::<UNROLL, _, T>(simd, groups, &mut products, Target::Nowhere);
        };
        let (gain, decay) = (&gain[..cols], &decay[..cols]);
        match (&self.scaler, CENTRED) {
            (Some(scaler), true) => scaler.centre_bwd(simd, [x, dy], gain, groups),
            (Some(scaler), false) => {
                scaler.scale_bwd(simd, &BackwardTerms { x, dy, gain, decay }, groups);
            }
            (None, _) => {}
        }
        let mut columns = InputGradient {
            products,
            gain,
            decay,
        };
        dx.extend::<UNROLL, _>(simd, groups, &mut columns);
    }
}

/// x̃, whose products with dy are added to Σ dy x̃, as dy is to Σ dy.
struct AddProducts<'a, T: Element, const CENTRED: bool> {
    x: &'a [T],
    dy: &'a [T],
    sums: ColumnSums<'a, T::Acc>,
}

impl<T: Element, const CENTRED: bool> AddProducts<'_, T, CENTRED> {
    /// Returns x̃ and dy, whose products are then in the column sums.
    #[inline(always)]
    fn add<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, T::Acc, K>,
        scaling: Scaling<T::Acc>,
    ) -> [Lanes<S, T::Acc, K>; 2] {
        let x = normalized::<CENTRED, _, _, K>(at, self.x, scaling);
        let dy = at.load(self.dy);
        self.sums.add(at, x, dy);
        [x, dy]
    }
}

impl<T: Element, const CENTRED: bool> Columns<T::Acc> for AddProducts<'_, T, CENTRED> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, T::Acc, K>,
        scaling: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let [x, _] = self.add(at, scaling);
        x
    }
}

/// dx.
struct InputGradient<'a, T: Element, const CENTRED: bool> {
    products: AddProducts<'a, T, CENTRED>,
    gain: &'a [T::Acc],
    decay: &'a [T::Acc],
}

impl<T: Element, const CENTRED: bool> Columns<T::Acc> for InputGradient<'_, T, CENTRED> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, T::Acc, K>,
        scaling: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        let [x, dy] = self.products.add(at, scaling);
        let mut dx = at.load(self.gain) * dy;
        if CENTRED {
            dx = dx - at.splat(scaling.mean_dx);
        } else {
            dx = dx - at.load(self.decay) * x;
        }
        (dx - x * at.splat(scaling.mean_dx_x)) * at.splat(scaling.rms_inv)
    }
}

/// dx of a padded row.
struct Zeros;

impl<A: Accumulator> Columns<A> for Zeros {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, A, K>,
        _: Scaling<A>,
    ) -> Lanes<S, A, K> {
        at.splat(A::zero())
    }
}

/// `x + residual`.
pub(crate) struct Stream<'a, T> {
    pub x: &'a [T],
    pub residual: &'a [T],
}

impl<T: Element> Columns<T::Acc> for Stream<'_, T> {
    #[inline(always)]
    fn apply<S: Simd, const K: usize>(
        &mut self,
        at: Span<S, T::Acc, K>,
        _: Scaling<T::Acc>,
    ) -> Lanes<S, T::Acc, K> {
        at.load(self.x) + at.load(self.residual)
    }
}
