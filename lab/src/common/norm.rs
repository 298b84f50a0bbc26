//! The normalization layers that the commands compare, behind one type.

use candle::{Device, Module, Result, Tensor};
use candle_nn::{BatchNorm, GroupNorm, Init, ModuleT, VarBuilder};
use candle_powernorm::{
    power_norm, GroupScaling, Mode, PowerNorm, PowerNormConfig, Recipe, Statistics,
};
use std::fmt;

pub const EPS: f64 = 1e-5;

/// Variables that the layers keep for themselves. No gradient reaches them and no optimizer may
/// move them.
const BUFFERS: [&str; 5] = [
    "running_phi",
    "ema_gz",
    "iters",
    "running_mean",
    "running_var",
];

/// Whether the variable called `name` is a layer's running statistic and not a parameter.
pub fn is_buffer(name: &str) -> bool {
    BUFFERS.contains(&name.rsplit('.').next().unwrap_or(name))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Norm {
    /// PowerNorm, by its running quadratic mean
    Power,
    /// PN-V, PowerNorm by the batch's quadratic mean, with the exact gradient
    PowerV,
    /// Batch normalization over all tokens of a batch
    Batch,
    /// Layer normalization
    Layer,
    /// Root mean square normalization
    Rms,
    /// Group normalization of each token by itself
    Group,
}

impl Norm {
    /// Whether it is this crate's layer: it may have a layer-scale, and its multiply-add folds into
    /// the linear layers after it.
    pub const fn is_power(self) -> bool {
        matches!(self, Self::Power | Self::PowerV)
    }
}

impl fmt::Display for Norm {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Self::Power => "power",
            Self::PowerV => "power-v",
            Self::Batch => "batch",
            Self::Layer => "layer",
            Self::Rms => "rms",
            Self::Group => "group",
        })
    }
}

/// Which rows of a padded batch are real.
#[derive(Debug)]
pub struct Padding {
    /// `[batch, time]`, 1 for a real token.
    pub keep: Tensor,
    /// The real ones' positions in the flattened batch.
    pub rows: Tensor,
}

impl Padding {
    /// Of sequences that begin with `lengths` real tokens each, `time` tokens long with their
    /// padding.
    pub fn new(lengths: &[usize], time: usize, device: &Device) -> Result<Self> {
        let keep: Vec<u8> = (lengths.iter())
            .flat_map(|&length| (0..time).map(move |i| u8::from(i < length)))
            .collect();
        let rows: Vec<u32> = (0..)
            .zip(&keep)
            .filter(|(_, &keep)| keep == 1)
            .map(|(row, _)| row)
            .collect();
        Ok(Self {
            rows: Tensor::new(rows, device)?,
            keep: Tensor::from_vec(keep, (lengths.len(), time), device)?,
        })
    }
}

/// What to build, the same for every normalization of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormConfig {
    pub norm: Norm,
    /// Channel groups of PowerNorm's layer-scale, `None` for no layer-scale.
    pub groups: Option<usize>,
    /// Steps before PowerNorm trusts its running statistic.
    pub warmup_steps: usize,
    /// The equations PowerNorm runs.
    pub recipe: Recipe,
    /// Channel groups of GroupNorm.
    pub group_norm_groups: usize,
}

/// One normalization layer over the last dimension.
#[derive(Debug)]
pub enum NormLayer {
    Power(PowerNorm),
    Batch {
        norm: BatchNorm,
        mode: Mode,
    },
    Layer {
        weight: Tensor,
        bias: Tensor,
    },
    Rms {
        weight: Tensor,
    },
    Group(GroupNorm),
    /// What is left of a [`Power`](Self::Power) whose multiply-add is in the linear layers after
    /// it: the layer-scale, if there is one.
    Folded(Option<GroupScaling>),
}

impl NormLayer {
    pub fn new(size: usize, config: &NormConfig, mode: &Mode, vb: VarBuilder) -> Result<Self> {
        let weight = || vb.get_with_hints(size, "weight", Init::Const(1.));
        Ok(match config.norm {
            Norm::Power | Norm::PowerV => {
                let config = PowerNormConfig {
                    eps: EPS,
                    group_scaling: config.groups,
                    warmup_steps: config.warmup_steps,
                    recipe: config.recipe,
                    statistics: match config.norm {
                        Norm::PowerV => Statistics::Batch,
                        _ => Statistics::Running,
                    },
                    ..Default::default()
                };
                Self::Power(power_norm(size, config, vb)?.with_mode(mode))
            }
            Norm::Batch => Self::Batch {
                norm: candle_nn::batch_norm(size, EPS, vb)?,
                mode: mode.clone(),
            },
            Norm::Layer => Self::Layer {
                weight: weight()?,
                bias: vb.get_with_hints(size, "bias", Init::Const(0.))?,
            },
            Norm::Rms => Self::Rms { weight: weight()? },
            Norm::Group => Self::Group(candle_nn::group_norm(
                config.group_norm_groups,
                size,
                EPS,
                vb,
            )?),
        })
    }

    /// The layer to fold into every linear layer that reads it, and what then takes its place.
    pub fn to_fold(&self) -> Result<(&PowerNorm, Self)> {
        match self {
            Self::Power(norm) => Ok((norm, Self::Folded(norm.layer_scale()))),
            _ => candle::bail!("only PowerNorm folds into linear layers"),
        }
    }

    /// `xs + residual`, normalized, and as it is.
    pub fn forward_residual(&self, xs: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Power(norm) => norm.forward_residual(xs, residual),
            _ => {
                let sum = (xs + residual)?;
                Ok((self.forward(&sum)?, sum))
            }
        }
    }

    /// [`forward`](Module::forward) of a padded batch `[batch, time, channels]`. Padding enters no
    /// statistic.
    pub fn forward_masked(&self, xs: &Tensor, padding: &Padding) -> Result<Tensor> {
        match self {
            Self::Power(norm) => norm.forward_masked(xs, &padding.keep),
            Self::Batch { norm, mode } => {
                let rows = xs.flatten_to(1)?;
                let real = rows.index_select(&padding.rows, 0)?;
                let real = norm.forward_t(&real, mode.is_training())?.contiguous()?;
                let zeros = rows.zeros_like()?.detach();
                zeros
                    .index_add(&padding.rows, &real, 0)?
                    .reshape(xs.shape())
            }
            // The others see each token by itself.
            _ => self.forward(xs),
        }
    }

    /// [`forward_residual`](Self::forward_residual) of padded batches.
    pub fn forward_residual_masked(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        padding: &Padding,
    ) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Power(norm) => norm.forward_residual_masked(xs, residual, &padding.keep),
            _ => {
                let sum = (xs + residual)?;
                Ok((self.forward_masked(&sum, padding)?, sum))
            }
        }
    }
}

impl Module for NormLayer {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Power(norm) => norm.forward(xs),
            // candle's BatchNorm wants channels second: the tokens become one long batch.
            Self::Batch { norm, mode } => {
                let rows = xs.flatten_to(xs.rank() - 2)?;
                norm.forward_t(&rows, mode.is_training())?
                    .reshape(xs.shape())
            }
            // The `_slow` functions, because `candle_nn::LayerNorm` and `RmsNorm` take a fused
            // path that records no backward: all that lies upstream would silently stop training.
            Self::Layer { weight, bias } => {
                candle_nn::ops::layer_norm_slow(xs, weight, bias, EPS as f32)
            }
            Self::Rms { weight } => candle_nn::ops::rms_norm_slow(xs, weight, EPS as f32),
            // Over channels alone, not over the tokens of a sequence: those of the future are among
            // them.
            Self::Group(norm) => {
                let rows = xs.flatten_to(xs.rank() - 2)?.unsqueeze(2)?;
                norm.forward(&rows)?.reshape(xs.shape())
            }
            Self::Folded(Some(scaling)) => scaling.forward(xs),
            Self::Folded(None) => Ok(xs.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::{DType, Var};
    use candle_nn::VarMap;
    use clap::ValueEnum;

    /// The real rows of a padded batch fare as they would by themselves, in training and in
    /// evaluation, whatever the padding holds, and no gradient reaches the padding.
    #[test]
    fn padding_is_outside_every_norm() -> Result<()> {
        let device = &Device::Cpu;
        let (batch, time, size) = (2, 3, 4);
        let padding = Padding::new(&[3, 1], time, device)?;
        assert_eq!(padding.keep.to_vec2::<u8>()?, [[1, 1, 1], [1, 0, 0]]);
        assert_eq!(padding.rows.to_vec1::<u32>()?, [0, 1, 2, 3]);
        for (filling, &norm) in [f32::NAN, 1e3]
            .iter()
            .flat_map(|filling| Norm::value_variants().iter().map(move |n| (*filling, n)))
        {
            let values = (0..24).map(|i| match i < 16 {
                true => (i * i % 7) as f32 - 2.5,
                false => filling,
            });
            let xs = Tensor::from_iter(values, device)?.reshape((batch, time, size))?;
            let config = NormConfig {
                norm,
                groups: Some(2),
                warmup_steps: 1,
                recipe: Recipe::Paper,
                // Groups of two channels become +1 and -1, whatever they are: without a gradient.
                group_norm_groups: 1,
            };
            let layer = |mode: &Mode| {
                let varmap = VarMap::new();
                let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
                NormLayer::new(size, &config, mode, vb)
            };
            let mode = Mode::train();
            let (masked, gathered) = (layer(&mode)?, layer(&mode)?);
            // Warm-up, after it, evaluation.
            for step in 0..3 {
                mode.set_training(step < 2);
                let xs = Var::from_tensor(&xs)?;
                let rows = |ys: &Tensor| ys.flatten_to(1)?.index_select(&padding.rows, 0);
                let alone = Var::from_tensor(&rows(&xs)?)?;
                let weights = alone.sin()?.detach();
                let ours = rows(&masked.forward_masked(&xs, &padding)?)?;
                let theirs = gathered.forward(&alone)?;
                assert_eq!(ours.to_vec2::<f32>()?, theirs.to_vec2::<f32>()?, "{norm}");
                let ours = (ours * &weights)?.sum_all()?.backward()?;
                let theirs = (theirs * &weights)?.sum_all()?.backward()?;
                let values = |gradient: Option<&Tensor>| -> Result<Vec<f32>> {
                    gradient.unwrap().flatten_all()?.to_vec1()
                };
                let (ours, theirs) = (values(ours.get(&xs))?, values(theirs.get(&alone))?);
                let (ours, of_padding) = ours.split_at(theirs.len());
                let largest = theirs.iter().fold(0f32, |max, value| max.max(value.abs()));
                assert!(largest > 0.1, "{norm}: nothing but zeros");
                // The roundings of sums over the real rows, in each step until this one, in two
                // computations: they grow as the root of their number; 8 is for safety.
                let terms = (4 * (step + 1)) as f32;
                let bound = 8. * terms.sqrt() * f32::EPSILON * largest;
                for (ours, theirs) in ours.iter().zip(&theirs) {
                    let close = (ours - theirs).abs() <= bound;
                    assert!(close, "{norm}: {ours} and {theirs}");
                }
                // What normalizes each token by itself gives NaN a gradient of 0 · NaN.
                if filling.is_finite() || matches!(norm, Norm::Power | Norm::PowerV | Norm::Batch) {
                    assert_eq!(of_padding, [0.; 8], "{norm}");
                }
            }
        }
        Ok(())
    }
}
