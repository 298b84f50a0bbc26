//! Builds all layers of a model alike.

use crate::config::PowerNormConfig;
use crate::layer::{power_norm, PowerNorm};
use crate::loss_scale::LossScale;
use crate::mode::Mode;
use crate::ranks::Ranks;
use candle::Result;
use candle_nn::VarBuilder;

/// Builds the layers of a model, which share a configuration, a [`Mode`] and, if need be, a
/// [`LossScale`] and [`Ranks`].
///
/// Hand it down through the model's constructors, as the `VarBuilder` is.
///
/// ```
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{linear, Linear, VarBuilder, VarMap};
/// use candle_powernorm::{Mode, PowerNorm, PowerNormBuilder};
///
/// struct Block {
///     norm: PowerNorm,
///     mlp: Linear,
/// }
///
/// impl Block {
///     fn new(size: usize, norms: &PowerNormBuilder, vb: VarBuilder) -> Result<Self> {
///         let norm = norms.build(size, vb.pp("norm"))?;
///         Ok(Self { norm, mlp: linear(size, size, vb.pp("mlp"))? })
///     }
///
///     fn forward(&self, xs: &Tensor) -> Result<Tensor> {
///         xs + self.mlp.forward(&self.norm.forward(xs)?)?
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let mode = Mode::train();
/// let norms = PowerNormBuilder::new(1e-5, &mode);
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let blocks = ["first", "second"].map(|name| Block::new(8, &norms, vb.pp(name)));
/// let mut xs = Tensor::randn(0f32, 1., (16, 8), &Device::Cpu)?;
/// for block in blocks {
///     let block = block?;
///     xs = block.forward(&xs)?; // a step of training
///     assert_eq!(block.norm.steps()?, 1);
/// }
/// mode.set_training(false); // all layers evaluate from now on
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PowerNormBuilder {
    config: PowerNormConfig,
    mode: Mode,
    loss_scale: LossScale,
    ranks: Option<Ranks>,
}

impl PowerNormBuilder {
    /// Layers of this configuration that follow `mode`.
    pub fn new<C: Into<PowerNormConfig>>(config: C, mode: &Mode) -> Self {
        Self {
            config: config.into(),
            mode: mode.clone(),
            loss_scale: LossScale::default(),
            ranks: None,
        }
    }

    /// The same builder, whose layers serve a loss that is multiplied by the number in
    /// `loss_scale`. See [`PowerNorm::with_loss_scale`].
    #[must_use]
    pub fn with_loss_scale(self, loss_scale: &LossScale) -> Self {
        Self {
            loss_scale: loss_scale.clone(),
            ..self
        }
    }

    /// The same builder, whose layers take statistics over the rows of all ranks. See
    /// [`PowerNorm::with_ranks`].
    #[must_use]
    pub fn with_ranks(self, ranks: &Ranks) -> Self {
        Self {
            ranks: Some(ranks.clone()),
            ..self
        }
    }

    /// Builds a layer over `size` channels from the tensors of `vb`, as [`power_norm`] does.
    ///
    /// The layer follows the builder's [`Mode`], whether its tensors are variables or frozen.
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
