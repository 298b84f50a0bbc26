//! A call in the form in which devices take it, checked once.
//!
//! A [`Pass`] is one forward, and later the backward of that forward: its tensors and what is
//! computed from them. Only the constructors in this file make one, and what they check is what the
//! devices rely on: other files read its fields, and write none but to leave a tensor out. The
//! kernels' launches above all pass addresses without another look at shapes:
//!
//! - `x` is `[.., C]` with C ≥ 1, of `F32`, `F64`, `F16` or `BF16`.
//! - `residual` has the shape and dtype of `x`.
//! - `keep` has the shape of `x` without its last dimension, is contiguous and `U8`.
//! - γ, β and ψ² have C numbers and are contiguous. γ and β have the dtype of `x` or `F32`.
//! - All of them are on one device, and the device reads the rows in their layout
//!   ([`DeviceKind::readable`]). The `x` of a pass with neither residual nor ψ² may be a view of
//!   more kinds ([`DeviceKind::readable_x`]). Rows, residual, γ and β are in different storages,
//!   and so are the gradient of the output, γ and β. That rows are no view of ψ² or ν is
//!   PowerNorm's to see to, which knows its state (`power_norm.rs`).
//! - C is a multiple of the number of groups. LayerNorm has neither a mask nor ψ².

use super::pick::DeviceKind;
use super::sums_dtype;
use crate::config::{ForwardKind, Recipe, validate_eps};
use candle::{DType, Device, Result, Shape, Storage, Tensor};

/// One forward of a layer, or the backward of that forward.
pub(crate) struct Pass {
    pub(super) device: DeviceKind,
    /// The name of the layer or function that was called, for errors.
    pub(super) layer: &'static str,
    /// The rows to normalize, `[.., C]`. A forward with a residual adds it to them first, and in
    /// its backward `x` is the sum.
    pub(super) x: Tensor,
    /// Added to the rows before anything else. A backward has none.
    pub(super) residual: Option<Tensor>,
    /// The padding mask: `x` without its last dimension, 0 for a padded row.
    pub(super) keep: Option<Tensor>,
    pub(super) affine: Option<Affine>,
    /// ψ² before the step, in its variable's shape: `[C]` or `[1, C, 1, 1]`. Without it D is 1,
    /// and rows are only normalized by themselves. A backward has none.
    pub(super) phi: Option<Tensor>,
    pub(super) norm: RowNorm,
    pub(super) kind: ForwardKind,
    pub(super) recipe: Recipe,
    /// ε of D.
    pub(super) eps: f64,
    /// A backward may follow.
    pub(super) tracked: bool,
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
}

impl Affine {
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        let offset = 0.;
        Self {
            weight,
            offset,
            bias,
        }
    }

    pub fn is_tracked(&self) -> bool {
        self.weight.track_op() || self.bias.as_ref().is_some_and(Tensor::track_op)
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

impl Pass {
    /// A normalization of rows by themselves: LayerNorm, RMSNorm or group scaling.
    pub fn of_rows(
        layer: &'static str,
        x: &Tensor,
        norm: RowNorm,
        affine: Option<Affine>,
    ) -> Result<Self> {
        let (size, own) = match &affine {
            Some(Affine { weight, .. }) => (weight.elem_count(), weight.device()),
            None => (x.dims().last().copied().unwrap_or_default(), x.device()),
        };
        let shape = (size, own.clone());
        let device = DeviceKind::of(x.device())?;
        Self::checked(
            device,
            layer,
            x,
            shape,
            norm,
            affine,
            DeviceKind::readable_x,
        )
    }

    /// A forward of PowerNorm, which divides each channel by D.
    pub fn of_channels(
        device: &DeviceKind,
        layer: &'static str,
        x: &Tensor,
        affine: Option<Affine>,
        channels: Channels,
    ) -> Result<Self> {
        let Channels { phi, eps, .. } = channels;
        let norm = RowNorm::of_groups(channels.groups, eps);
        let shape = (phi.elem_count(), phi.device().clone());
        let readable = |device: &DeviceKind, x: &Tensor, _| device.readable(x);
        let pass = Self::checked(device.clone(), layer, x, shape, norm, affine, readable)?;
        Ok(Self {
            phi: Some(phi),
            kind: channels.kind,
            recipe: channels.recipe,
            eps,
            ..pass
        })
    }

    /// The pass of one device and row normalization, for an input and parameters of `size` channels
    /// on `own`. `readable` brings `x` into a layout that the device reads.
    fn checked(
        device: DeviceKind,
        layer: &'static str,
        x: &Tensor,
        (size, own): (usize, Device),
        norm: RowNorm,
        affine: Option<Affine>,
        readable: impl FnOnce(&DeviceKind, &Tensor, RowNorm) -> Result<Tensor>,
    ) -> Result<Self> {
        if let Some(affine) = &affine {
            check_affine(layer, affine)?;
            let (weight, got) = (&affine.weight, affine.weight.elem_count());
            if got != size {
                candle::bail!("{layer}: expected a weight of {size} numbers, got {got}")
            }
            check_device(layer, "weight", weight.device(), &own)?;
        }
        check_input(layer, x, size, affine.as_ref(), &own)?;
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
        let tracked = x.track_op() || affine.as_ref().is_some_and(Affine::is_tracked);
        let checked = |affine: Affine| -> Result<_> {
            let of_x = storage_of(x);
            let weight = apart(packed(affine.weight)?, &[of_x])?;
            let of_weight = storage_of(&weight);
            let bias = (affine.bias).map(|bias| apart(packed(bias)?, &[of_x, of_weight]));
            Ok(Affine {
                bias: bias.transpose()?,
                weight,
                ..affine
            })
        };
        Ok(Self {
            affine: affine.map(checked).transpose()?,
            x: readable(&device, x, norm)?,
            residual: None,
            keep: None,
            phi: None,
            norm,
            kind: ForwardKind::Evaluation,
            recipe: Recipe::default(),
            eps: 0.,
            tracked,
            device,
            layer,
            _checked: (),
        })
    }

    /// The same pass of the sum of the input and `residual`.
    pub fn with_residual(mut self, residual: &Tensor) -> Result<Self> {
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
        self.tracked |= residual.track_op();
        self.x = self.device.readable(x)?;
        self.residual = Some(apart(self.device.readable(residual)?, &self.storages())?);
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

    /// The backward of a forward with a residual, whose sum with the input is `sum`.
    pub(super) fn of_sum(self, sum: Tensor) -> Result<Self> {
        if sum.shape() != self.x.shape() || sum.dtype() != self.x.dtype() {
            candle::bail!("{}: expected a sum like the input", self.layer)
        }
        Ok(Self { x: sum, ..self })
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
        self.tracked
    }

    /// The rows, in a layout that the device reads.
    pub fn x(&self) -> &Tensor {
        &self.x
    }

    pub fn residual(&self) -> Option<&Tensor> {
        self.residual.as_ref()
    }

    pub fn affine(&self) -> Option<&Affine> {
        self.affine.as_ref()
    }

    #[cfg(test)]
    pub fn kind(&self) -> ForwardKind {
        self.kind
    }

    pub(super) fn weight(&self) -> Option<&Tensor> {
        self.affine.as_ref().map(|affine| &affine.weight)
    }

    /// What γ is more than the weight.
    #[cfg(feature = "cuda")]
    pub(super) fn weight_offset(&self) -> f32 {
        self.affine
            .as_ref()
            .map_or(0., |affine| affine.offset as f32)
    }

    pub(super) fn bias(&self) -> Option<&Tensor> {
        self.affine.as_ref()?.bias.as_ref()
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

    /// Checks the gradient of the output, and brings it into a layout that the device reads.
    pub(super) fn check_dy(&self, dy: &Tensor) -> Result<Tensor> {
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
        check_device(layer, "the gradient", dy.device(), x.device())?;
        apart(self.device.readable(dy)?, &self.storages())
    }

    /// The storages of the rows and the parameters.
    fn storages(&self) -> Vec<*const Storage> {
        let tensors = [Some(&self.x), self.weight(), self.bias()];
        tensors.into_iter().flatten().map(storage_of).collect()
    }
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

/// Checks that `name` is on the device of a layer, `own`.
#[inline]
pub(crate) fn check_device(layer: &str, name: &str, device: &Device, own: &Device) -> Result<()> {
    // candle's `Device::same_device` would not do: it calls two handles of one GPU two devices.
    let (expected, got) = (own.location(), device.location());
    if got != expected {
        candle::bail!(
            "{layer}: expected {name} on the layer's device {expected:?}, got {got:?}: \
             move it by `to_device`"
        )
    }
    Ok(())
}

/// `true` if devices compute rows of this dtype.
pub(crate) fn is_computed(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
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

/// The tensor itself if it is contiguous, else a copy.
#[inline]
fn packed(tensor: Tensor) -> Result<Tensor> {
    match tensor.is_contiguous() {
        true => Ok(tensor),
        false => tensor.contiguous(),
    }
}

/// Returns the tensor, copied if its storage is one of `others`.
///
/// A device locks them all for reading. Once another thread waits to write a storage, a thread that
/// has locked it and locks it again waits for that writer, which waits for it.
#[inline]
fn apart(tensor: Tensor, others: &[*const Storage]) -> Result<Tensor> {
    match others.contains(&storage_of(&tensor)) {
        true => tensor.force_contiguous(),
        false => Ok(tensor),
    }
}

/// Identifies the storage that a tensor is a view of.
#[inline]
pub(crate) fn storage_of(tensor: &Tensor) -> *const Storage {
    &raw const *tensor.storage_and_layout().0
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: &Device = &Device::Cpu;
    const CENTRED: RowNorm = RowNorm::Centred { eps: 1e-5 };

    fn zeros(shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::zeros(shape, dtype, CPU)
    }

    fn of_rows(x: &Tensor, norm: RowNorm) -> Result<Pass> {
        Pass::of_rows("test", x, norm, None)
    }

    /// A pass of PowerNorm over three sequences of five rows of two channels.
    fn of_channels(x: &Tensor) -> Result<Pass> {
        let channels = Channels {
            phi: Tensor::ones(2, DType::F32, CPU)?,
            kind: ForwardKind::RunningStatistic,
            recipe: Recipe::Paper,
            eps: 1e-5,
            groups: Some(2),
        };
        Pass::of_channels(&DeviceKind::Cpu, "test", x, None, channels)
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
            text(Pass::of_rows(
                "test",
                xs,
                CENTRED,
                Some(Affine::new(weight.clone(), bias.cloned())),
            ))
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
            let pass = of_rows(&xs, RowNorm::Groups { count, eps });
            assert_eq!(pass.is_ok(), fits, "{count}");
        }
        assert!(text(of_rows(&zeros(&[3, 0], DType::F32)?, CENTRED)).contains("at least 1"));
        // 1e-46 is 0 in f32, the dtype of the sums.
        assert!(text(of_rows(&xs, RowNorm::Centred { eps: 1e-46 })).contains("eps"));
        Ok(())
    }

    #[test]
    fn a_mask_has_a_number_for_each_row() -> Result<()> {
        let xs = zeros(&[3, 5, 2], DType::F32)?;
        let check = |shape: &[usize], dtype| of_channels(&xs)?.with_keep(&zeros(shape, dtype)?);
        for dtype in [DType::U8, DType::U32, DType::I64] {
            check(&[3, 5], dtype)?;
        }
        assert!(check(&[3, 5], DType::F32).is_err());
        for shape in [&[15][..], &[5, 3], &[3, 5, 1], &[3, 5, 2], &[]] {
            assert!(check(shape, DType::U8).is_err(), "{shape:?}");
        }
        // A row by itself has a scalar for its mask.
        let row = of_channels(&zeros(&[2], DType::F32)?)?;
        row.with_keep(&Tensor::new(1u8, CPU)?)?;
        // No device computes LayerNorm with a mask.
        let keep = zeros(&[3, 5], DType::U8)?;
        assert!(text(of_rows(&xs, CENTRED)?.with_keep(&keep)).contains("no mask"));
        Ok(())
    }

    #[test]
    fn a_residual_is_as_the_input() -> Result<()> {
        let pass = || of_rows(&zeros(&[3, 2], DType::F32)?, CENTRED);
        pass()?.with_residual(&Tensor::ones((3, 2), DType::F32, CPU)?)?;
        for (shape, dtype) in [
            ([3, 2], DType::F16),
            ([2, 3], DType::F32),
            ([1, 2], DType::F32),
        ] {
            let error = text(pass()?.with_residual(&zeros(&shape, dtype)?));
            assert!(error.contains("(as the input)"), "{error}");
        }
        Ok(())
    }

    /// A backward reads as many numbers of the sum as the input had.
    #[test]
    fn a_sum_is_as_the_input() -> Result<()> {
        let pass = || of_rows(&zeros(&[3, 2], DType::F32)?, CENTRED);
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
        let pass = of_rows(&zeros(&[3, 2], DType::F32)?, CENTRED)?;
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
            Pass::of_channels(&DeviceKind::Cpu, "test", &x, Some(affine), channels()?)
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
        let own = rows(0)?.force_contiguous()?;
        let pass = Pass::of_rows("test", &own, CENTRED, Some(affine.clone()))?;
        let pass = pass.with_residual(&rows(4)?)?;
        assert!(storage_of(pass.residual().unwrap()) != storage_of(pass.weight().unwrap()));
        assert!(storage_of(&pass.check_dy(&rows(4)?)?) != storage_of(pass.weight().unwrap()));
        let pass = Pass::of_rows("test", &rows(0)?, CENTRED, Some(affine))?;
        let pass = pass.with_residual(&rows(4)?)?;
        let residual = pass.residual().unwrap();
        assert_eq!(residual.to_vec2::<f32>()?, [[4., 5.], [6., 7.]]);
        assert_eq!(pass.bias().unwrap().to_vec1::<f32>()?, [10., 11.]);
        let tensors = [
            pass.x(),
            residual,
            pass.weight().unwrap(),
            pass.bias().unwrap(),
        ];
        let mut storages = tensors.map(storage_of).to_vec();
        storages.sort();
        storages.dedup();
        assert_eq!(storages.len(), 4);
        assert!(storage_of(&pass.check_dy(&rows(2)?)?) != storage_of(pass.x()));
        Ok(())
    }

    #[test]
    fn a_gradient_of_any_argument_is_tracked() -> Result<()> {
        let xs = zeros(&[3, 2], DType::F32)?;
        let var = |shape: &[usize]| candle::Var::zeros(shape, DType::F32, CPU);
        let (weight, bias, residual) = (zeros(&[2], DType::F32)?, var(&[2])?, var(&[3, 2])?);
        let tracked = |bias: Option<&Tensor>| {
            let affine = Affine::new(weight.clone(), bias.cloned());
            Pass::of_rows("test", &xs, CENTRED, Some(affine))
        };
        assert!(!tracked(None)?.tracked);
        assert!(tracked(Some(&bias))?.tracked);
        assert!(tracked(None)?.with_residual(&residual)?.tracked);
        assert!(tracked(Some(&bias))?.with_residual(&residual)?.tracked);
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
