//! A call in the form in which devices take it, checked once.
//!
//! A [`Pass`] is one forward, and later the backward of that forward: its tensors and what is
//! computed from them. Only the constructors in this file make one, and devices rely on what these
//! check: the kernels' launches above all pass addresses without another look at shapes. Other files
//! only read the fields:
//!
//! - `x` is `[.., C]` with C ≥ 1, of `F32`, `F64`, `F16` or `BF16`.
//! - `residual` has the shape and dtype of `x`.
//! - `keep` has the shape of `x` without its last dimension, is contiguous and `U8`.
//! - γ, β and ψ² have C numbers. γ and β have the dtype of `x` or `F32`.
//! - All of them are on one device.
//! - C is a multiple of the number of groups. LayerNorm has neither a mask nor ψ².
//!
//! The tensors are the caller's, in any layout. A device first calls [`Pass::lay_out`], which copies
//! what the device does not read where it is, and then reads what that leaves.

use super::{Wanted, sums_dtype};
use crate::check::{StorageId, check_device, is_computed};
use crate::config::{ForwardKind, Recipe, validate_eps};
use candle::{DType, Device, Result, Shape, Tensor};
use std::borrow::Cow;

/// One forward of a layer, or the backward of that forward.
///
/// It borrows the caller's tensors, and [`into_owned`](Self::into_owned) keeps them for a backward.
pub(crate) struct Pass<'a> {
    /// The name of the layer or function that was called, for errors.
    pub(super) layer: &'static str,
    /// The rows to normalize, `[.., C]`. A forward with a residual adds it to them first, and in
    /// its backward `x` is the sum.
    pub(super) x: Cow<'a, Tensor>,
    /// Added to the rows before anything else. A backward has none.
    pub(super) residual: Option<Cow<'a, Tensor>>,
    /// The padding mask: `x` without its last dimension, 0 for a padded row.
    pub(super) keep: Option<Tensor>,
    pub(super) affine: Option<Cow<'a, Affine>>,
    /// ψ² before the step, in its variable's shape: `[C]` or `[1, C, 1, 1]`. Without it D is 1,
    /// and rows are only normalized by themselves. A backward has none.
    pub(super) phi: Option<Tensor>,
    pub(super) norm: RowNorm,
    pub(super) kind: ForwardKind,
    pub(super) recipe: Recipe,
    /// ε of D.
    pub(super) eps: f64,
    /// Rows in these storages are copied.
    pub(super) avoided: &'a [StorageId],
    /// The gradients of the backward. `input` is that of the sum, if there is a residual.
    pub(super) wanted: Wanted,
    /// Private, so that every other file has to call a constructor.
    _checked: (),
}

/// γ and β, `[C]` each.
#[derive(Clone)]
pub(crate) struct Affine {
    pub weight: Tensor,
    /// Added to the weight in the dtype of the sums: γ is `offset + weight`.
    pub offset: f64,
    pub bias: Option<Tensor>,
    /// The storages of weight and bias, found once, because that takes a lock each time.
    storages: [Option<StorageId>; 2],
}

impl Affine {
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self {
            storages: [Some(&weight), bias.as_ref()].map(|tensor| tensor.map(StorageId::of)),
            weight,
            offset: 0.,
            bias,
        }
    }

    pub fn with_offset(self, offset: f64) -> Self {
        Self { offset, ..self }
    }

    pub fn is_tracked(&self) -> bool {
        self.weight.track_op() || self.bias.as_ref().is_some_and(Tensor::track_op)
    }

    /// Both are contiguous, and neither is in a storage with the other or with rows in `x`.
    fn is_readable_beside(&self, x: StorageId) -> bool {
        let [weight, bias] = self.storages;
        let is_apart = weight != Some(x) && bias != Some(x) && bias != weight;
        is_apart
            && self.weight.is_contiguous()
            && self.bias.as_ref().is_none_or(Tensor::is_contiguous)
    }

    /// The same parameters, each of them `map`ped.
    fn map(&self, map: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let bias = self.bias.as_ref().map(&map).transpose()?;
        Ok(Self::new(map(&self.weight)?, bias).with_offset(self.offset))
    }
}

/// The normalization of a row by itself, before the statistics of channels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RowNorm {
    None,
    /// Group scaling: each group is divided by its root mean square.
    Groups {
        /// G.
        count: usize,
        eps: f64,
    },
    /// LayerNorm: the row's mean is subtracted, and the row divided by its standard deviation.
    Centred {
        eps: f64,
    },
}

impl RowNorm {
    /// Group scaling with this number of groups, if there is one.
    pub fn of_groups(groups: Option<usize>, eps: f64) -> Self {
        groups.map_or(Self::None, |count| Self::Groups { count, eps })
    }
}

/// The statistics of channels in a forward of PowerNorm.
pub(crate) struct Channels {
    /// ψ² before the step, [`phi`](Pass::phi).
    pub phi: Tensor,
    pub kind: ForwardKind,
    pub recipe: Recipe,
    /// ε of D, and of the group scaling.
    pub eps: f64,
    /// The number of groups of the group scaling, if there is one.
    pub groups: Option<usize>,
}

impl<'a> Pass<'a> {
    /// A normalization of rows by themselves: LayerNorm, RMSNorm or group scaling.
    #[inline]
    pub fn of_rows(
        layer: &'static str,
        x: &'a Tensor,
        norm: RowNorm,
        affine: Option<&'a Affine>,
    ) -> Result<Self> {
        let (size, own) = match affine {
            Some(Affine { weight, .. }) => (weight.elem_count(), weight.device()),
            None => (x.dims().last().copied().unwrap_or_default(), x.device()),
        };
        check(layer, x, size, own, norm, affine)?;
        Ok(Self::checked(layer, x, norm, affine))
    }

    /// A forward of PowerNorm, which divides each channel by D.
    pub fn of_channels(
        layer: &'static str,
        x: &'a Tensor,
        affine: Option<&'a Affine>,
        channels: Channels,
    ) -> Result<Self> {
        let Channels { phi, eps, .. } = channels;
        let norm = RowNorm::of_groups(channels.groups, eps);
        let (size, own) = (phi.elem_count(), phi.device());
        check(layer, x, size, own, norm, affine)?;
        Ok(Self {
            phi: Some(phi),
            kind: channels.kind,
            recipe: channels.recipe,
            eps,
            ..Self::checked(layer, x, norm, affine)
        })
    }

    /// The pass of arguments that [`check`] has let through.
    #[inline]
    fn checked(
        layer: &'static str,
        x: &'a Tensor,
        norm: RowNorm,
        affine: Option<&'a Affine>,
    ) -> Self {
        let bias = affine.and_then(|affine| affine.bias.as_ref());
        let wanted = Wanted {
            input: x.track_op(),
            weight: affine.is_some_and(|affine| affine.weight.track_op()),
            bias: bias.is_some_and(Tensor::track_op),
        };
        Self {
            layer,
            x: Cow::Borrowed(x),
            residual: None,
            keep: None,
            affine: affine.map(Cow::Borrowed),
            phi: None,
            norm,
            kind: ForwardKind::Evaluation,
            recipe: Recipe::default(),
            eps: 0.,
            avoided: &[],
            wanted,
            _checked: (),
        }
    }

    /// The same pass of the sum of the input and `residual`.
    pub fn with_residual(mut self, residual: &'a Tensor) -> Result<Self> {
        let (layer, x) = (self.layer, &self.x);
        if residual.dtype() != x.dtype() || residual.shape() != x.shape() {
            candle::bail!(
                "{layer}: expected a residual of shape {:?} and dtype {:?} (as the input), \
                 got {:?} and {:?}: give it the input's shape and dtype",
                x.shape(),
                x.dtype(),
                residual.shape(),
                residual.dtype()
            )
        }
        check_device(layer, "residual", residual.device(), x.device())?;
        self.wanted.input |= residual.track_op();
        self.residual = Some(Cow::Borrowed(residual));
        Ok(self)
    }

    /// The same pass of PowerNorm with this padding mask, for which 0 is padding.
    pub fn with_keep(mut self, keep: &Tensor) -> Result<Self> {
        let (layer, x) = (self.layer, &self.x);
        if self.phi.is_none() {
            candle::bail!("{layer}: expected no mask: rows do not depend on each other")
        }
        if !matches!(keep.dtype(), DType::U8 | DType::U32 | DType::I64) {
            candle::bail!(
                "{layer}: expected keep of dtype U8, U32 or I64, got {:?}: make it 0 for padding, \
                 by `ne(0f64)` from a mask of 1 and 0, or by `eq(0f64)` from an additive mask",
                keep.dtype()
            )
        }
        let expected = Shape::from(&x.dims()[..x.rank() - 1]);
        if keep.shape() != &expected {
            candle::bail!(
                "{layer}: expected keep of shape {expected:?} (xs without its last dimension), \
                 got {:?}: give it one number for each row of xs",
                keep.shape()
            )
        }
        check_device(layer, "keep", keep.device(), x.device())?;
        self.keep = Some(as_bytes(keep)?);
        Ok(self)
    }

    /// The same pass of rows that are copied if they are in one of these storages.
    pub fn apart_from(self, avoided: &'a [StorageId]) -> Self {
        Self { avoided, ..self }
    }

    /// The backward of a forward with a residual, whose sum with the input is `sum`.
    pub(super) fn of_sum(self, sum: Tensor) -> Result<Self> {
        if sum.shape() != self.x.shape() || sum.dtype() != self.x.dtype() {
            candle::bail!("{}: expected a sum like the input", self.layer)
        }
        let x = Cow::Owned(sum);
        Ok(Self { x, ..self })
    }

    /// The same pass with tensors of its own, which a backward may keep: without ψ² and the
    /// residual, because a backward needs neither.
    pub(super) fn into_owned(self) -> Pass<'static> {
        Pass {
            layer: self.layer,
            x: Cow::Owned(self.x.into_owned()),
            residual: None,
            keep: self.keep,
            affine: self.affine.map(|affine| Cow::Owned(affine.into_owned())),
            phi: None,
            norm: self.norm,
            kind: self.kind,
            recipe: self.recipe,
            eps: self.eps,
            avoided: &[],
            wanted: self.wanted,
            _checked: (),
        }
    }

    /// Brings the tensors into layouts and storages in which a device reads them. The first thing
    /// that a device's forward does.
    ///
    /// `copied` returns a copy of rows that the device does not read where they are. Afterwards
    /// weight and bias are contiguous, and x, the residual, weight and bias are in different
    /// storages. The device locks them all for reading, and candle's lock is fair, so a second read
    /// lock in one thread deadlocks once a writer is waiting.
    ///
    /// Copies are without a graph: gradients go straight to the caller's tensors.
    #[inline]
    pub(crate) fn lay_out(
        &mut self,
        copied: impl Fn(&Tensor) -> Result<Option<Tensor>>,
    ) -> Result<()> {
        let avoided = self.avoided;
        let x = place(&mut self.x, &copied, |storage| avoided.contains(&storage))?;
        if let Some(affine) = &mut self.affine
            && !affine.is_readable_beside(x)
        {
            *affine = Cow::Owned(affine.map(copy)?);
        }
        let of_parameters = self.of_parameters();
        if let Some(residual) = &mut self.residual {
            place(residual, &copied, |storage| {
                avoided.contains(&storage) || storage == x || of_parameters.contains(&Some(storage))
            })?;
        }
        Ok(())
    }

    /// The gradient of the output in a layout and a storage as [`lay_out`](Self::lay_out) has left
    /// the forward's tensors.
    pub(super) fn lay_out_dy<'g>(
        &self,
        dy: &'g Tensor,
        copied: impl Fn(&Tensor) -> Result<Option<Tensor>>,
    ) -> Result<Cow<'g, Tensor>> {
        let mut dy = Cow::Borrowed(dy);
        let (x, of_parameters) = (StorageId::of(&self.x), self.of_parameters());
        place(&mut dy, &copied, |storage| {
            storage == x || of_parameters.contains(&Some(storage))
        })?;
        Ok(dy)
    }

    /// The storages of weight and bias.
    fn of_parameters(&self) -> [Option<StorageId>; 2] {
        self.affine().map_or([None; 2], |affine| affine.storages)
    }

    pub fn layer(&self) -> &'static str {
        self.layer
    }

    /// The gradient of the rows is that of the output. PowerNorm's is the paper's approximation once
    /// its steps divide by the running statistic, and always under [`Recipe::Fairseq`].
    pub fn has_exact_gradients(&self) -> bool {
        !self.kind.is_training() || self.recipe.is_exact(self.kind)
    }

    /// A backward may follow.
    pub fn is_tracked(&self) -> bool {
        let Wanted {
            input,
            weight,
            bias,
        } = self.wanted;
        input || weight || bias
    }

    /// The rows.
    pub fn x(&self) -> &Tensor {
        &self.x
    }

    pub fn residual(&self) -> Option<&Tensor> {
        self.residual.as_deref()
    }

    pub fn affine(&self) -> Option<&Affine> {
        self.affine.as_deref()
    }

    #[cfg(test)]
    pub fn kind(&self) -> ForwardKind {
        self.kind
    }

    pub(super) fn weight(&self) -> Option<&Tensor> {
        self.affine().map(|affine| &affine.weight)
    }

    /// What γ is more than the weight.
    #[cfg(feature = "cuda")]
    pub(super) fn weight_offset(&self) -> f32 {
        self.affine().map_or(0., |affine| affine.offset as f32)
    }

    pub(super) fn bias(&self) -> Option<&Tensor> {
        self.affine()?.bias.as_ref()
    }

    /// C.
    pub(super) fn cols(&self) -> usize {
        // A pass has at least one dimension.
        self.x.dims().last().copied().unwrap_or_default()
    }

    /// The mask that a backward takes.
    pub(super) fn backward_keep(&self) -> Option<&Tensor> {
        (self.keep.as_ref()).filter(|_| self.recipe.masks_backward())
    }

    /// Checks the gradient of the output.
    pub(super) fn check_dy(&self, dy: &Tensor) -> Result<()> {
        let (layer, x) = (self.layer, &self.x);
        if dy.shape() != x.shape() || dy.dtype() != x.dtype() {
            candle::bail!(
                "{layer}: expected a gradient of shape {:?} and dtype {:?} (as the output), \
                 got {:?} and {:?}",
                x.shape(),
                x.dtype(),
                dy.shape(),
                dy.dtype()
            )
        }
        check_device(layer, "the gradient", dy.device(), x.device())
    }
}

/// Checks the input and the parameters of a layer of `size` channels on `own`, and its row
/// normalization.
fn check(
    layer: &str,
    x: &Tensor,
    size: usize,
    own: &Device,
    norm: RowNorm,
    affine: Option<&Affine>,
) -> Result<()> {
    if let Some(affine) = affine {
        check_affine(layer, affine)?;
        let got = affine.weight.elem_count();
        if got != size {
            candle::bail!("{layer}: expected a weight of {size} numbers, got {got}")
        }
        check_device(layer, "weight", affine.weight.device(), own)?;
    }
    check_input(layer, x, size, affine, own)?;
    if let RowNorm::Groups { eps, .. } | RowNorm::Centred { eps } = norm {
        validate_eps(layer, eps, sums_dtype(x.dtype()))?;
    }
    if let RowNorm::Groups { count, .. } = norm
        && !size.is_multiple_of(count)
    {
        candle::bail!(
            "{layer}: expected {count} groups to divide the {size} channels of the input: \
             choose another number of groups"
        )
    }
    Ok(())
}

/// Checks the input of a layer of `size` channels on `own`.
fn check_input(
    layer: &str,
    xs: &Tensor,
    size: usize,
    affine: Option<&Affine>,
    own: &Device,
) -> Result<()> {
    match xs.dims().last() {
        None => candle::bail!(
            "{layer}: expected an input of rank 1 or more, got a scalar: \
             give it a last dimension of channels"
        ),
        Some(_) if size == 0 => candle::bail!("{layer}: expected a size of at least 1, got 0"),
        Some(&last) if last != size => candle::bail!(
            "{layer}: expected a last dimension of {size}, got shape {:?}: \
             move the channels last, or build a layer of another size",
            xs.shape()
        ),
        Some(_) => {}
    }
    let input = xs.dtype();
    if !is_computed(input) {
        candle::bail!(
            "{layer}: expected an input of dtype F32, F64, F16 or BF16, got {input:?}: \
             convert it by `to_dtype`"
        )
    }
    if let Some(Affine { weight, bias, .. }) = affine {
        for (name, parameter) in [("weight", Some(weight)), ("bias", bias.as_ref())] {
            match parameter.map(Tensor::dtype) {
                Some(got) if got != input && got != DType::F32 => {
                    let or_f32 = if input == DType::F32 { "" } else { " or F32" };
                    let input_to = match is_computed(got) {
                        true => format!("the input to {got:?}, or "),
                        false => String::new(),
                    };
                    candle::bail!(
                        "{layer}: expected {name} of dtype {input:?} (as the input){or_f32}, \
                         got {got:?}: convert {input_to}the parameters to F32"
                    )
                }
                _ => {}
            }
        }
    }
    check_device(layer, "xs", xs.device(), own)
}

/// Checks a weight and a bias that no constructor has checked, because candle's constructors of
/// LayerNorm and RMSNorm return no `Result`.
#[inline]
pub(crate) fn check_affine(layer: &str, affine: &Affine) -> Result<()> {
    let Affine { weight, bias, .. } = affine;
    let size = match weight.dims() {
        [0] => candle::bail!("{layer}: expected a size of at least 1, got 0"),
        [size] => size,
        _ => candle::bail!(
            "{layer}: expected a weight of rank 1, got shape {:?}: \
             flatten it, to one number a channel",
            weight.shape()
        ),
    };
    if let Some(bias) = bias {
        if bias.dims() != [*size] {
            candle::bail!(
                "{layer}: expected a bias of shape [{size}] (as the weight), got {:?}: reshape it",
                bias.shape()
            )
        }
        check_device(layer, "bias", bias.device(), weight.device())?;
    }
    if !is_computed(weight.dtype()) {
        candle::bail!(
            "{layer}: expected weight of dtype F32, F64, F16 or BF16, got {:?}",
            weight.dtype()
        )
    }
    Ok(())
}

/// The mask in the form in which devices read it: contiguous, of `U8`.
fn as_bytes(keep: &Tensor) -> Result<Tensor> {
    match keep.dtype() {
        DType::U8 => keep.contiguous(),
        // A GPU rejects a launch over no elements.
        _ if keep.elem_count() == 0 => Tensor::zeros(keep.shape(), DType::U8, keep.device()),
        _ => keep.ne(0u8),
    }
}

/// Replaces rows by a copy, unless the device reads them where they are and their storage is not
/// taken. Returns their storage.
#[inline]
fn place(
    rows: &mut Cow<Tensor>,
    copied: &impl Fn(&Tensor) -> Result<Option<Tensor>>,
    is_taken: impl Fn(StorageId) -> bool,
) -> Result<StorageId> {
    if let Some(copy) = copied(rows)? {
        *rows = Cow::Owned(copy);
    }
    let storage = StorageId::of(rows);
    if !is_taken(storage) {
        return Ok(storage);
    }
    *rows = Cow::Owned(copy(rows)?);
    Ok(StorageId::of(rows))
}

/// A copy without a graph, in a storage of its own.
fn copy(tensor: &Tensor) -> Result<Tensor> {
    tensor.detach().force_contiguous()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: &Device = &Device::Cpu;
    const CENTRED: RowNorm = RowNorm::Centred { eps: 1e-5 };

    fn zeros(shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::zeros(shape, dtype, CPU)
    }

    fn of_rows<'a>(x: &'a Tensor, norm: RowNorm, affine: Option<&'a Affine>) -> Result<Pass<'a>> {
        Pass::of_rows("test", x, norm, affine)
    }

    /// A pass of PowerNorm over three sequences of five rows of two channels.
    fn of_channels(x: &Tensor) -> Result<Pass<'_>> {
        let channels = Channels {
            phi: Tensor::ones(2, DType::F32, CPU)?,
            kind: ForwardKind::RunningStatistic,
            recipe: Recipe::Paper,
            eps: 1e-5,
            groups: Some(2),
        };
        Pass::of_channels("test", x, None, channels)
    }

    #[track_caller]
    fn text<T>(result: Result<T>) -> String {
        match result {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn inputs_that_fit_and_others() -> Result<()> {
        let f32s = zeros(&[2], DType::F32)?;
        let f16s = zeros(&[2], DType::F16)?;
        let check = |xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>| {
            let affine = Affine::new(weight.clone(), bias.cloned());
            text(of_rows(xs, CENTRED, Some(&affine)))
        };
        for shape in [&[2][..], &[3, 2], &[0, 2], &[1, 1, 1, 2]] {
            assert_eq!(check(&zeros(shape, DType::F16)?, &f32s, None), "");
        }
        let halves = zeros(&[3, 2], DType::F16)?;
        assert_eq!(check(&halves, &f32s, Some(&f16s)), "");
        for (xs, weight, bias, expected) in [
            (zeros(&[], DType::F32)?, &f32s, None, "scalar"),
            (zeros(&[2, 3], DType::F32)?, &f32s, None, "[2, 3]"),
            (zeros(&[3, 2], DType::U8)?, &f32s, None, "U8"),
            (
                zeros(&[3, 2], DType::F32)?,
                &f32s,
                Some(&f16s),
                "bias of dtype F32 (as the input), got F16",
            ),
            (
                zeros(&[3, 2], DType::BF16)?,
                &f16s,
                None,
                "weight of dtype BF16 (as the input) or F32, got F16",
            ),
            (
                zeros(&[3, 2], DType::F32)?,
                &zeros(&[1, 2], DType::F32)?,
                None,
                "weight of rank 1",
            ),
            (
                zeros(&[3, 2], DType::F32)?,
                &f32s,
                Some(&zeros(&[3], DType::F32)?),
                "bias of shape [2] (as the weight)",
            ),
            (
                zeros(&[3, 0], DType::F32)?,
                &zeros(&[0], DType::F32)?,
                None,
                "size of at least 1",
            ),
        ] {
            let error = check(&xs, weight, bias);
            assert!(
                error.starts_with("test: ") && error.contains(expected),
                "{error:?}"
            );
        }
        Ok(())
    }

    /// Without a weight any width fits that the groups divide.
    #[test]
    fn groups_divide_the_channels() -> Result<()> {
        let eps = 1e-5;
        let xs = zeros(&[3, 6], DType::F32)?;
        for (count, fits) in [(1, true), (3, true), (6, true), (4, false), (12, false)] {
            let pass = of_rows(&xs, RowNorm::Groups { count, eps }, None);
            assert_eq!(pass.is_ok(), fits, "{count}");
        }
        assert!(text(of_rows(&zeros(&[3, 0], DType::F32)?, CENTRED, None)).contains("at least 1"));
        // 1e-46 is 0 in f32, the dtype of the sums.
        assert!(text(of_rows(&xs, RowNorm::Centred { eps: 1e-46 }, None)).contains("eps"));
        Ok(())
    }

    #[test]
    fn a_mask_has_a_number_for_each_row() -> Result<()> {
        let xs = zeros(&[3, 5, 2], DType::F32)?;
        let check =
            |shape: &[usize], dtype| of_channels(&xs)?.with_keep(&zeros(shape, dtype)?).map(drop);
        for dtype in [DType::U8, DType::U32, DType::I64] {
            check(&[3, 5], dtype)?;
        }
        assert!(check(&[3, 5], DType::F32).is_err());
        for shape in [&[15][..], &[5, 3], &[3, 5, 1], &[3, 5, 2], &[]] {
            assert!(check(shape, DType::U8).is_err(), "{shape:?}");
        }
        // A row by itself has a scalar for its mask.
        let row = zeros(&[2], DType::F32)?;
        of_channels(&row)?.with_keep(&Tensor::new(1u8, CPU)?)?;
        // No device computes LayerNorm with a mask.
        let keep = zeros(&[3, 5], DType::U8)?;
        assert!(text(of_rows(&xs, CENTRED, None)?.with_keep(&keep)).contains("no mask"));
        Ok(())
    }

    #[test]
    fn a_residual_is_as_the_input() -> Result<()> {
        let xs = zeros(&[3, 2], DType::F32)?;
        let with = |residual: &Tensor| {
            of_rows(&xs, CENTRED, None)?
                .with_residual(residual)
                .map(drop)
        };
        with(&Tensor::ones((3, 2), DType::F32, CPU)?)?;
        for (shape, dtype) in [
            ([3, 2], DType::F16),
            ([2, 3], DType::F32),
            ([1, 2], DType::F32),
        ] {
            let error = text(with(&zeros(&shape, dtype)?));
            assert!(error.contains("(as the input)"), "{error}");
        }
        Ok(())
    }

    /// A backward reads as many numbers of the sum as the input had.
    #[test]
    fn a_sum_is_as_the_input() -> Result<()> {
        let xs = zeros(&[3, 2], DType::F32)?;
        let pass = || of_rows(&xs, CENTRED, None);
        pass()?.of_sum(Tensor::ones((3, 2), DType::F32, CPU)?)?;
        for (shape, dtype) in [([3, 2], DType::F64), ([2, 3], DType::F32)] {
            let error = text(pass()?.of_sum(zeros(&shape, dtype)?));
            assert!(error.contains("a sum like the input"), "{error}");
        }
        Ok(())
    }

    /// Devices trust this check: a GPU would read beyond the end of a smaller gradient.
    #[test]
    fn a_gradient_is_as_the_output() -> Result<()> {
        let xs = zeros(&[3, 2], DType::F32)?;
        let pass = of_rows(&xs, CENTRED, None)?;
        pass.check_dy(&Tensor::ones((3, 2), DType::F32, CPU)?)?;
        for (shape, dtype) in [
            ([3, 2], DType::F64),
            ([2, 2], DType::F32),
            ([2, 3], DType::F32),
        ] {
            let error = text(pass.check_dy(&zeros(&shape, dtype)?));
            assert!(error.contains("(as the output)"), "{error}");
        }
        Ok(())
    }

    /// A GPU reads as many numbers of γ as a row has.
    #[test]
    fn a_weight_is_as_long_as_the_statistics() -> Result<()> {
        let channels = || -> Result<_> {
            Ok(Channels {
                phi: Tensor::ones(2, DType::F32, CPU)?,
                kind: ForwardKind::Evaluation,
                recipe: Recipe::Paper,
                eps: 1e-5,
                groups: None,
            })
        };
        let x = zeros(&[3, 2], DType::F32)?;
        let of = |len: usize| {
            let affine = Affine::new(zeros(&[len], DType::F32)?, None);
            Pass::of_channels("test", &x, Some(&affine), channels()?).map(drop)
        };
        of(2)?;
        assert!(text(of(1)).contains("a weight of 2 numbers, got 1"));
        Ok(())
    }

    #[test]
    fn no_storage_is_locked_twice() -> Result<()> {
        let all = Tensor::arange(0f32, 12., CPU)?;
        let rows = |start| all.narrow(0, start, 4)?.reshape((2, 2));
        let affine = Affine::new(all.narrow(0, 8, 2)?, Some(all.narrow(0, 10, 2)?));
        // The parameters share a storage with the residual alone, or with the rows too.
        let (own, of_all, residual) = (rows(0)?.force_contiguous()?, rows(0)?, rows(4)?);
        let laid_out = |x, avoided| -> Result<_> {
            let pass = of_rows(x, CENTRED, Some(&affine))?.with_residual(&residual)?;
            let mut pass = pass.apart_from(avoided);
            pass.lay_out(|_| Ok(None))?;
            Ok(pass)
        };
        let of_dy = |pass: &Pass, dy: &Tensor| -> Result<_> {
            Ok(StorageId::of(&*pass.lay_out_dy(dy, |_| Ok(None))?))
        };
        let pass = laid_out(&own, &[])?;
        let of_weight = StorageId::of(pass.weight().unwrap());
        assert!(StorageId::of(pass.residual().unwrap()) != of_weight);
        assert!(of_dy(&pass, &rows(4)?)? != of_weight);
        assert!(of_dy(&pass, &own)? != StorageId::of(pass.x()));
        // A layer's own state is avoided.
        let of_own = [StorageId::of(&own)];
        let pass = laid_out(&own, &of_own)?;
        assert!(StorageId::of(pass.x()) != of_own[0]);
        let pass = laid_out(&of_all, &[])?;
        let residual = pass.residual().unwrap();
        assert_eq!(residual.to_vec2::<f32>()?, [[4., 5.], [6., 7.]]);
        assert_eq!(pass.bias().unwrap().to_vec1::<f32>()?, [10., 11.]);
        let tensors = [
            pass.x(),
            residual,
            pass.weight().unwrap(),
            pass.bias().unwrap(),
        ];
        let storages = tensors.map(StorageId::of);
        for (i, own) in storages.iter().enumerate() {
            assert!(!storages[..i].contains(own), "{storages:?}");
        }
        assert!(of_dy(&pass, &rows(2)?)? != StorageId::of(pass.x()));
        Ok(())
    }

    /// Of two tensors in one storage one is copied, whichever they are, while the others stay.
    #[test]
    fn each_pair_of_storages_is_told_apart() -> Result<()> {
        let both = || Tensor::arange(0f32, 8., CPU);
        let part = |of: &Tensor, start, len| of.narrow(0, start, len);
        let apart = |len| Tensor::ones(len, DType::F32, CPU);
        let shared = both()?;
        for (x, weight, bias) in [
            (part(&shared, 0, 4)?, part(&shared, 4, 2)?, apart(2)?),
            (part(&shared, 0, 4)?, apart(2)?, part(&shared, 4, 2)?),
            (apart(4)?, part(&shared, 0, 2)?, part(&shared, 2, 2)?),
        ] {
            let (x, affine) = (x.reshape((2, 2))?, Affine::new(weight, Some(bias)));
            let mut pass = of_rows(&x, CENTRED, Some(&affine))?;
            pass.lay_out(|_| Ok(None))?;
            let [x, weight, bias] =
                [pass.x(), pass.weight().unwrap(), pass.bias().unwrap()].map(StorageId::of);
            assert!(x != weight && x != bias && weight != bias);
        }

        // A weight alone beside a residual, and beside the gradient of the output.
        let x = apart(4)?.reshape((2, 2))?;
        let (rows, weight) = (part(&shared, 0, 4)?.reshape((2, 2))?, part(&shared, 4, 2)?);
        let affine = Affine::new(weight, None);
        let mut pass = of_rows(&x, CENTRED, Some(&affine))?.with_residual(&rows)?;
        pass.lay_out(|_| Ok(None))?;
        let of_weight = StorageId::of(pass.weight().unwrap());
        assert!(of_weight == StorageId::of(&shared));
        assert!(StorageId::of(pass.residual().unwrap()) != of_weight);
        assert!(StorageId::of(&*pass.lay_out_dy(&rows, |_| Ok(None))?) != of_weight);

        // A residual in the layer's own state.
        let own = [StorageId::of(&shared)];
        let mut pass = of_rows(&x, CENTRED, None)?
            .with_residual(&rows)?
            .apart_from(&own);
        pass.lay_out(|_| Ok(None))?;
        assert!(StorageId::of(pass.residual().unwrap()) != own[0]);
        Ok(())
    }

    /// The graph has the caller's tensors, so a copy in it would be two more passes over the rows.
    #[test]
    fn copies_are_without_a_graph() -> Result<()> {
        let all = candle::Var::ones((6, 3), DType::F32, CPU)?;
        let (x, residual) = (all.narrow(0, 0, 3)?.t()?, all.narrow(0, 3, 3)?.t()?);
        let column = || -> Result<_> { all.narrow(0, 0, 3)?.narrow(1, 0, 1)?.squeeze(1) };
        let affine = Affine::new(column()?, Some(column()?));
        let mut pass = of_rows(&x, CENTRED, Some(&affine))?.with_residual(&residual)?;
        pass.lay_out(|rows| rows.detach().contiguous().map(Some))?;
        let laid_out = [Some(pass.x()), pass.residual(), pass.weight(), pass.bias()];
        for tensor in laid_out.into_iter().flatten() {
            assert!(tensor.is_contiguous() && !tensor.track_op());
        }
        let Wanted {
            input,
            weight,
            bias,
        } = pass.wanted;
        assert!(input && weight && bias);
        Ok(())
    }

    #[test]
    fn a_gradient_of_any_argument_is_tracked() -> Result<()> {
        let xs = zeros(&[3, 2], DType::F32)?;
        let var = |shape: &[usize]| candle::Var::zeros(shape, DType::F32, CPU);
        let (weight, bias, residual) = (zeros(&[2], DType::F32)?, var(&[2])?, var(&[3, 2])?);
        let affine = Affine::new(weight.clone(), None);
        let with_bias = Affine::new(weight, Some(bias.as_tensor().clone()));
        let tracked = |affine, residual: Option<&Tensor>| -> Result<_> {
            let pass = of_rows(&xs, CENTRED, Some(affine))?;
            Ok(match residual {
                Some(residual) => pass.with_residual(residual)?.is_tracked(),
                None => pass.is_tracked(),
            })
        };
        assert!(!tracked(&affine, None)?);
        assert!(tracked(&with_bias, None)?);
        assert!(tracked(&affine, Some(&residual))?);
        assert!(tracked(&with_bias, Some(&residual))?);
        Ok(())
    }

    #[test]
    fn a_mask_becomes_bytes() -> Result<()> {
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let keep = Tensor::new(&[[0u8, 1, 0], [7, 0, 1]], CPU)?.to_dtype(dtype)?;
            let bytes = as_bytes(&keep.t()?)?;
            assert!(bytes.dtype() == DType::U8 && bytes.is_contiguous());
            let kept = bytes.flatten_all()?.to_vec1::<u8>()?;
            let kept: Vec<_> = kept.into_iter().map(|keep| keep != 0).collect();
            assert_eq!(kept, [false, true, true, false, false, true], "{dtype:?}");
            let none = as_bytes(&keep.narrow(0, 2, 0)?)?;
            assert_eq!((none.dtype(), none.dims()), (DType::U8, &[0, 3][..]));
        }
        // −1 is no padding either, and 256 is not 0.
        let keep = Tensor::new(&[-1i64, 256, 0], CPU)?;
        let bytes = as_bytes(&keep)?.to_vec1::<u8>()?;
        assert!(bytes[0] != 0 && bytes[1] != 0 && bytes[2] == 0);
        Ok(())
    }
}
