//! Builds layers: from a `VarBuilder`, from tensors, or all layers of a model alike.

use crate::config::{PowerNormConfig, state_dtype};
use crate::error::Error;
use crate::loss_scale::LossScale;
use crate::mode::Mode;
use crate::power_norm::PowerNorm;
use crate::ranks::Ranks;
use crate::state::State;
use candle::{DType, Device, Result, Tensor};
use candle_nn::{Init, VarBuilder};

/// Builds a [`PowerNorm`] layer over `size` channels from the tensors of `vb`.
///
/// The call `layer_norm(512, 1e-5, vb.pp("norm"))` becomes `power_norm(512, 1e-5,
/// vb.pp("norm"))?.with_mode(&mode)`, with the [`Mode`] of the model. To build all layers of a
/// model, use a [`PowerNormBuilder`](crate::PowerNormBuilder).
///
/// # Tensors
///
/// `weight` (γ) and `bias` (β), `[size]`, have the builder's dtype. If the builder has `gamma` and
/// `beta` instead, those are read, as in candle's LayerNorm. With `affine: false` there is neither,
/// and with `bias: false` no bias. The layer reads only the tensors that it has. Others in the
/// builder are ignored.
///
/// The statistics are `running_phi` (ψ²), `ema_gz` (ν/(1−α_b)), `iters` (t) and `groups`. No
/// optimizer moves them. [Checkpoints](crate::guide::checkpoints) has the shapes, dtypes and fresh
/// values of all tensors.
///
/// # State
///
/// A layer built on trainable variables (a `VarMap`) starts in training.
///
/// A layer is frozen if `running_phi` is not a variable, as in a safetensors `VarBuilder`. It
/// starts in evaluation, and evaluates even if it is given a [`Mode`] in training. The reason is
/// that its statistics are a copy that no `VarMap` saves, so a reloaded model would have the old
/// ones. [`PowerNorm::with_unsaved_statistics`] trains the copy nevertheless, and
/// [`Mode::recalibrate_scope`] recomputes its ψ².
///
/// A frozen builder may lack `ema_gz`, `iters` and `groups`. No evaluation needs them: without
/// them ν and t are 0, and any group scaling fits.
///
/// # Errors
///
/// - A configuration is out of range.
/// - The builder's dtype is not a float that the layer computes in.
/// - A tensor is missing, or has another shape, dtype or device. (A `VarMap` makes what is missing,
///   and a frozen builder may lack the tensors named above.)
/// - Only some tensors of the state are variables. This happens when a `VarBuilder` converts or
///   moves a tensor, which makes a copy. candle's `rename` does so to `iters` on a GPU.
/// - The statistics are from a layer with another group scaling.
/// - A number in a frozen `running_phi` on a CPU is negative or not finite.
pub fn power_norm<C: Into<PowerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder,
) -> Result<PowerNorm> {
    let config = config.into();
    let dtype = state_dtype("power_norm", "a builder", vb.dtype())?;
    config.validate(size, dtype)?;
    let weight = match config.affine {
        true => Some(parameter(&vb, size, ["weight", "gamma"], 1.)?),
        false => None,
    };
    let bias = match config.has_bias() {
        true => Some(parameter(&vb, size, ["bias", "beta"], 0.)?),
        false => None,
    };
    let (state, trainable) = State::from_builder(size, config, dtype, vb)?;
    PowerNorm::from_parts(weight, bias, state, trainable)
}

/// Builds a [`PowerNorm`] layer with a weight and no bias, as candle's `layer_norm_no_bias` does:
/// [`power_norm`] with [`bias: false`](PowerNormConfig::bias).
///
/// A bias in the checkpoint stays unread, as in candle. A configuration with `affine: false` has no
/// weight here either.
///
/// # Errors
///
/// As in [`power_norm`].
pub fn power_norm_no_bias<C: Into<PowerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder,
) -> Result<PowerNorm> {
    let config = PowerNormConfig {
        bias: false,
        ..config.into()
    };
    power_norm(size, config, vb)
}

/// γ or β, by the first of `names` that the builder has. Fresh ones get the first name.
pub(crate) fn parameter(
    vb: &VarBuilder,
    size: usize,
    names: [&str; 2],
    fresh: f64,
) -> Result<Tensor> {
    let found = names.into_iter().find(|name| vb.contains_tensor(name));
    vb.get_with_hints(size, found.unwrap_or(names[0]), Init::Const(fresh))
}

impl PowerNorm {
    /// Builds a layer from these tensors, as candle's `LayerNorm::new` and `new_no_bias` do.
    ///
    /// `bias` is a tensor or `None`. The configuration of a layer without one has `bias: false`.
    ///
    /// `running_phi` is ψ²: a trained layer's, or `Tensor::ones` for a fresh layer. ν and the step
    /// count start at 0, and no `VarMap` saves them. To resume training from a checkpoint, build
    /// the layer with [`power_norm`].
    ///
    /// # State
    ///
    /// If `weight` is a variable, the layer starts in training. Training updates `running_phi` in
    /// place if that is a variable too, else a copy, which no `VarMap` saves either.
    ///
    /// If `weight` is not a variable, the layer is frozen: it starts in evaluation, and evaluates
    /// even if it is given a [`Mode`] in training.
    /// [`with_unsaved_statistics`](Self::with_unsaved_statistics) trains its statistics
    /// nevertheless, and [`Mode::recalibrate_scope`] recomputes its ψ².
    ///
    /// # Shapes and dtypes
    ///
    /// All three are `[size]`. `weight` and `bias` have the dtype of the inputs or `F32`.
    /// `running_phi` is `F32`, or `F64` if `weight` is.
    ///
    /// # Errors
    ///
    /// - A configuration is out of range, has `affine: false`, or has `bias: false` although a bias
    ///   is given.
    /// - A tensor has another shape, dtype or device.
    /// - `weight` or `bias` is the same variable as `running_phi`, so a step would overwrite it.
    /// - A number in `running_phi` is negative or not finite. On a GPU the host waits for them.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{Device, Module, Tensor};
    /// use candle_powernorm::{PowerNorm, PowerNormConfig};
    ///
    /// # fn main() -> candle::Result<()> {
    /// let [weight, bias, running_phi] = [[2f32, 2.], [0., 1.], [4., 9.]];
    /// let tensor = |values: [f32; 2]| Tensor::new(&values, &Device::Cpu);
    /// let config = PowerNormConfig { group_scaling: None, ..1e-12.into() };
    /// let norm = PowerNorm::new(tensor(weight)?, tensor(bias)?, tensor(running_phi)?, config)?;
    /// let ys = norm.forward(&Tensor::new(&[[2f32, 3.]], &Device::Cpu)?)?;
    /// assert_eq!(ys.to_vec2::<f32>()?, [[2., 3.]]); // 2 · 2/√4 + 0, 2 · 3/√9 + 1
    /// # Ok(()) }
    /// ```
    pub fn new<C: Into<PowerNormConfig>>(
        weight: Tensor,
        bias: impl Into<Option<Tensor>>,
        running_phi: Tensor,
        config: C,
    ) -> Result<Self> {
        let (bias, mut config) = (bias.into(), config.into());
        if !config.affine {
            candle::bail!(
                "power_norm: expected affine: true beside a weight and a bias, got false: \
                 build a layer without them by `power_norm`"
            )
        }
        if bias.is_some() && !config.bias {
            candle::bail!(
                "power_norm: expected bias: true beside a bias, got false: \
                 pass `None` in place of the bias"
            )
        }
        config.bias = bias.is_some();
        let &[size] = weight.dims() else {
            return Err(Error::WeightRank(weight.shape().clone()).into());
        };
        let dtype = state_dtype("power_norm", "weight", weight.dtype())?;
        config.validate(size, dtype)?;
        for (name, tensor) in [("bias", bias.as_ref()), ("running_phi", Some(&running_phi))] {
            let shape = tensor.map(Tensor::shape);
            if let Some(got) = shape.filter(|shape| shape.dims() != [size]) {
                candle::bail!(
                    "power_norm: expected {name} of shape [{size}] (as the weight), got {got:?}"
                )
            }
        }
        let ema_gz = running_phi.detach().zeros_like()?;
        let iters = Tensor::zeros(1, DType::I64, &Device::Cpu)?;
        let state = State::new(size, config, dtype, [&running_phi, &ema_gz, &iters], None)?;
        state.check_phi()?;
        let trainable = weight.is_variable();
        Self::from_parts(Some(weight), bias, state, trainable)
    }
}

/// Builds the layers of a model, which share a configuration, a [`Mode`] and, if need be, a
/// [`LossScale`] and [`Ranks`].
///
/// Pass it down through the model's constructors, beside the `VarBuilder`.
///
/// ```
/// use candle::{DType, Device, Result};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_powernorm::{Mode, PowerNormBuilder};
///
/// # fn main() -> Result<()> {
/// let mode = Mode::train();
/// let norms = PowerNormBuilder::new(1e-5, &mode);
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let [first, second] = ["first", "second"].map(|name| norms.build(8, vb.pp(name)));
/// mode.set_training(false); // both layers evaluate from now on
/// # assert!(!first?.mode().is_training() && !second?.mode().is_training());
/// # Ok(()) }
/// ```
///
/// [Training](crate::guide::training) has a whole model.
#[derive(Debug, Clone)]
pub struct PowerNormBuilder {
    config: PowerNormConfig,
    mode: Mode,
    loss_scale: LossScale,
    ranks: Option<Ranks>,
}

impl PowerNormBuilder {
    /// A builder of layers with this configuration, which follow `mode`.
    pub fn new<C: Into<PowerNormConfig>>(config: C, mode: &Mode) -> Self {
        Self {
            config: config.into(),
            mode: mode.clone(),
            loss_scale: LossScale::default(),
            ranks: None,
        }
    }

    /// The same builder, for layers of a model whose loss is multiplied by the number in
    /// `loss_scale`. See [`PowerNorm::with_loss_scale`].
    #[must_use]
    pub fn with_loss_scale(mut self, loss_scale: &LossScale) -> Self {
        self.loss_scale = loss_scale.clone();
        self
    }

    /// The same builder, whose layers take statistics over the rows of all ranks. See
    /// [`PowerNorm::with_ranks`].
    #[must_use]
    pub fn with_ranks(mut self, ranks: &Ranks) -> Self {
        self.ranks = Some(ranks.clone());
        self
    }

    /// Builds a layer over `size` channels from the tensors of `vb`, as [`power_norm`] does.
    ///
    /// The layer follows the builder's [`Mode`]. A layer on frozen tensors evaluates while that
    /// `Mode` is in training, so a frozen base model under adapters can be built with the
    /// `Mode::train()` of the whole model, and keeps its statistics.
    /// [`PowerNorm::with_unsaved_statistics`] trains such a layer nevertheless. The guide's section
    /// on [adapters] has a whole program.
    ///
    /// [adapters]: crate::guide::recipes#adapters-over-a-frozen-base-lora
    ///
    /// # Errors
    ///
    /// As in [`power_norm`].
    pub fn build(&self, size: usize, vb: VarBuilder) -> Result<PowerNorm> {
        let layer = power_norm(size, self.config, vb)?
            .with_mode(&self.mode)
            .with_loss_scale(&self.loss_scale);
        Ok(match &self.ranks {
            Some(ranks) => layer.with_ranks(ranks),
            None => layer,
        })
    }

    /// The configuration of the layers.
    pub fn config(&self) -> &PowerNormConfig {
        &self.config
    }

    /// The switch that the layers follow.
    pub fn mode(&self) -> &Mode {
        &self.mode
    }
}
