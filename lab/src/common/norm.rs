//! The normalization layers that the commands compare, behind one type.

use super::EPS;
use candle::{Device, Module, Result, Tensor};
use candle_nn::{BatchNorm, BatchNormConfig, GroupNorm, Init, Linear, ModuleT, VarBuilder};
use candle_powernorm::{
    GroupScaling, LayerNorm, Mode, PowerNorm, PowerNormConfig, RmsNorm, Statistics, layer_norm,
    power_norm, rms_norm,
};
use clap::ValueEnum;
use std::fmt;

/// BatchNorm's momentum, candle's default: the weight of the batch in the running statistics.
pub const MOMENTUM: f64 = 0.1;

/// Weight of the old value in PowerNorm's ψ² and in its ν, the crate's default.
pub const ALPHA: f64 = 0.9;

/// Variables that the layers keep for themselves. No gradient reaches them and no optimizer may
/// move them.
const BUFFERS: [&str; 6] = [
    "running_phi",
    "ema_gz",
    "iters",
    "groups",
    "running_mean",
    "running_var",
];

/// Tells a layer's running statistic from a parameter, by the variable's name.
pub fn is_buffer(name: &str) -> bool {
    BUFFERS.contains(&name.rsplit('.').next().unwrap_or(name))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
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
    /// Dynamic tanh, tanh(αx) in place of a normalization
    Dyt,
    /// Derf, erf(αx + s) in place of a normalization
    Derf,
}

impl Norm {
    /// This crate's layer.
    pub const fn is_power(self) -> bool {
        matches!(self, Self::Power | Self::PowerV)
    }

    /// A function of each number by itself, which takes a normalization's place.
    pub const fn is_pointwise(self) -> bool {
        matches!(self, Self::Dyt | Self::Derf)
    }
}

impl fmt::Display for Norm {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let value = self.to_possible_value();
        f.pad(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// The real rows of a padded batch.
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
            .filter(|&(_, &keep)| keep == 1)
            .map(|(row, _)| row)
            .collect();
        Ok(Self {
            rows: Tensor::new(rows, device)?,
            keep: Tensor::from_vec(keep, (lengths.len(), time), device)?,
        })
    }
}

/// The configuration of every normalization of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormConfig {
    pub norm: Norm,
    /// Channel groups of the layer-scale before the normalization, whichever it is, `None` for no
    /// layer-scale.
    pub groups: Option<usize>,
    /// Steps of PowerNorm's warm-up.
    pub warmup_steps: usize,
    /// Channel groups of GroupNorm.
    pub group_norm_groups: usize,
    /// BatchNorm's weight of the batch in the running statistics.
    pub momentum: f64,
}

#[cfg(test)]
impl NormConfig {
    /// For models small enough for a test.
    pub fn small(norm: Norm) -> Self {
        Self {
            norm,
            groups: Some(2),
            warmup_steps: 3,
            group_norm_groups: 2,
            momentum: MOMENTUM,
        }
    }
}

/// Parses a number from 0 to less than 1.
pub fn share(arg: &str) -> std::result::Result<f64, String> {
    super::number(
        arg,
        |share| (0. ..1.).contains(&share),
        "at least 0 and less than 1",
    )
}

/// One normalization layer over the last dimension.
#[derive(Debug)]
pub enum NormLayer {
    Power(Box<PowerNorm>),
    Batch {
        norm: BatchNorm,
        mode: Mode,
    },
    Layer(LayerNorm),
    Rms(RmsNorm),
    Group(GroupNorm),
    /// `γ ⊙ tanh(α x) + β`, arXiv 2503.10622.
    Dyt {
        alpha: Tensor,
        affine: Affine,
    },
    /// `γ ⊙ erf(α x + s) + β`, arXiv 2512.10938.
    Derf {
        alpha: Tensor,
        shift: Tensor,
        affine: Affine,
    },
    /// Any of these behind a layer-scale. PowerNorm has its own, in the same pass.
    Scaled {
        scale: GroupScaling,
        norm: Box<NormLayer>,
    },
    /// Nothing: the linear layers behind it do its work.
    Folded,
}

/// γ and β.
#[derive(Debug)]
pub struct Affine {
    weight: Tensor,
    bias: Tensor,
}

impl Affine {
    fn new(size: usize, vb: &VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: vb.get_with_hints(size, "weight", Init::Const(1.))?,
            bias: vb.get_with_hints(size, "bias", Init::Const(0.))?,
        })
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        xs.broadcast_mul(&self.weight)?.broadcast_add(&self.bias)
    }
}

/// The first α of [`Norm::Dyt`] and [`Norm::Derf`], which their papers recommend.
const POINTWISE_ALPHA: f64 = 0.5;

impl NormLayer {
    pub fn new(size: usize, config: &NormConfig, mode: &Mode, vb: VarBuilder) -> Result<Self> {
        if let Some(groups) = config.groups.filter(|_| !config.norm.is_power()) {
            let plain = NormConfig {
                groups: None,
                ..*config
            };
            return Ok(Self::Scaled {
                scale: GroupScaling::new(groups, EPS)?,
                norm: Box::new(Self::new(size, &plain, mode, vb)?),
            });
        }
        let number = |name, value| vb.get_with_hints(1, name, Init::Const(value));
        Ok(match config.norm {
            Norm::Power | Norm::PowerV => {
                let config = PowerNormConfig {
                    eps: EPS,
                    alpha_fwd: ALPHA,
                    alpha_bwd: ALPHA,
                    group_scaling: config.groups,
                    warmup_steps: config.warmup_steps,
                    statistics: match config.norm {
                        Norm::PowerV => Statistics::Batch,
                        _ => Statistics::Running,
                    },
                    ..Default::default()
                };
                Self::Power(Box::new(power_norm(size, config, vb)?.with_mode(mode)))
            }
            Norm::Batch => Self::Batch {
                norm: candle_nn::batch_norm(
                    size,
                    BatchNormConfig {
                        eps: EPS,
                        momentum: config.momentum,
                        ..Default::default()
                    },
                    vb,
                )?,
                mode: mode.clone(),
            },
            Norm::Layer => Self::Layer(layer_norm(size, EPS, vb)?),
            Norm::Rms => Self::Rms(rms_norm(size, EPS, vb)?),
            Norm::Dyt => Self::Dyt {
                alpha: number("alpha", POINTWISE_ALPHA)?,
                affine: Affine::new(size, &vb)?,
            },
            Norm::Derf => Self::Derf {
                alpha: number("alpha", POINTWISE_ALPHA)?,
                shift: number("shift", 0.)?,
                affine: Affine::new(size, &vb)?,
            },
            Norm::Group => Self::Group(candle_nn::group_norm(
                config.group_norm_groups,
                size,
                EPS,
                vb,
            )?),
        })
    }

    /// `true` if the linear layers behind it can do all of its work in evaluation.
    pub fn folds(&self) -> bool {
        matches!(self, Self::Power(norm) if norm.group_scaling().is_none())
    }

    /// `next`, with the evaluation of this layer before it.
    pub fn fold_into(&self, next: &Linear) -> Result<Linear> {
        match self {
            Self::Power(norm) if self.folds() => norm.fold_into(next),
            _ => candle::bail!("expected PowerNorm without a layer-scale"),
        }
    }

    /// `xs + residual`, normalized, and as it is.
    pub fn forward_residual(&self, xs: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Power(norm) => norm.forward_residual(xs, residual, None),
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
            Self::Batch { .. } => {
                let rows = xs.flatten_to(1)?;
                let real = rows.index_select(&padding.rows, 0)?;
                let real = self.forward(&real)?.contiguous()?;
                let zeros = rows.zeros_like()?.detach();
                zeros
                    .index_add(&padding.rows, &real, 0)?
                    .reshape(xs.shape())
            }
            Self::Scaled { scale, norm } => norm.forward_masked(&scale.forward(xs)?, padding),
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
            Self::Power(norm) => norm.forward_residual(xs, residual, &padding.keep),
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
            Self::Layer(norm) => norm.forward(xs),
            Self::Rms(norm) => norm.forward(xs),
            Self::Dyt { alpha, affine } => affine.forward(&xs.broadcast_mul(alpha)?.tanh()?),
            Self::Derf {
                alpha,
                shift,
                affine,
            } => {
                let inside = xs.broadcast_mul(alpha)?.broadcast_add(shift)?;
                affine.forward(&inside.erf()?)
            }
            // Over channels alone, not over the tokens of a sequence: those of the future are among
            // them.
            Self::Group(norm) => {
                let rows = xs.flatten_to(xs.rank() - 2)?.unsqueeze(2)?;
                norm.forward(&rows)?.reshape(xs.shape())
            }
            Self::Scaled { scale, norm } => norm.forward(&scale.forward(xs)?),
            Self::Folded => Ok(xs.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::{DType, Var};
    use candle_nn::VarMap;

    fn config(norm: Norm, groups: Option<usize>, group_norm_groups: usize) -> NormConfig {
        NormConfig {
            norm,
            groups,
            warmup_steps: 1,
            group_norm_groups,
            momentum: MOMENTUM,
        }
    }

    /// The real rows of a padded batch fare as they would by themselves, in training and in
    /// evaluation, whatever the padding holds, and no gradient reaches the padding.
    #[test]
    fn padding_is_outside_every_norm() -> Result<()> {
        let device = &Device::Cpu;
        let (batch, time, size) = (2, 3, 4);
        let padding = Padding::new(&[3, 1], time, device)?;
        assert_eq!(padding.keep.to_vec2::<u8>()?, [[1, 1, 1], [1, 0, 0]]);
        assert_eq!(padding.rows.to_vec1::<u32>()?, [0, 1, 2, 3]);
        for (filling, norm, groups) in [f32::NAN, 1e3].into_iter().flat_map(|filling| {
            let all = Norm::value_variants()
                .iter()
                .flat_map(|&norm| [None, Some(2)].map(|g| (norm, g)));
            all.map(move |(norm, groups)| (filling, norm, groups))
        }) {
            let values = (0..24).map(|i| match i < 16 {
                true => (i * i % 7) as f32 - 2.5,
                false => filling,
            });
            let xs = Tensor::from_iter(values, device)?.reshape((batch, time, size))?;
            // Groups of two channels become +1 and -1, whatever they are: without a gradient.
            let config = config(norm, groups, 1);
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
                // A scale or a normalization of each token by itself gives NaN a gradient of 0 · NaN.
                let by_itself = matches!(norm, Norm::Layer | Norm::Rms | Norm::Group);
                let by_itself = by_itself || norm.is_pointwise();
                let passes_nan = !norm.is_power() && (by_itself || groups.is_some());
                if filling.is_finite() || !passes_nan {
                    assert_eq!(of_padding, [0.; 8], "{norm}");
                }
            }
        }
        Ok(())
    }

    /// LN, RMS and GN normalize each token by itself. A layer-scale of one group divides a token by
    /// a number, which they divide out again, so it changes them by ε only.
    #[test]
    fn a_layer_scale_of_one_group_leaves_norms_of_tokens_as_they_are() -> Result<()> {
        let device = &Device::Cpu;
        let values: Vec<f32> = (0..80).map(|i| 30. * (i as f32 * 0.9).sin() + 7.).collect();
        let xs = Tensor::from_vec(values, (10, 8), device)?;
        for &norm in Norm::value_variants() {
            let outputs = |groups| -> Result<Vec<f32>> {
                let config = config(norm, groups, 2);
                let varmap = VarMap::new();
                let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
                let layer = NormLayer::new(8, &config, &Mode::train(), vb)?;
                layer.forward(&xs)?.flatten_all()?.to_vec1()
            };
            let (without, one) = (outputs(None)?, outputs(Some(1))?);
            let far = (without.iter().zip(&one)).fold(0f32, |far, (a, b)| far.max((a - b).abs()));
            let of_tokens = matches!(norm, Norm::Layer | Norm::Rms | Norm::Group);
            // ε is a part in 10⁷ of mean squares before, and in 10⁵ behind the scale: half of that
            // moves outputs of about 2.
            assert_eq!(far < 1e-4, of_tokens, "{norm}: {far}");
        }
        Ok(())
    }
}
