//! The learning rate's schedule, and an AdamW whose moments can be saved.
//!
//! `candle_nn::AdamW` keeps its moments to itself, so a run that uses it cannot be continued as if
//! it had never stopped. It also decays every variable, where only matrices should.

use anyhow::{Context, Result};
use candle::{Tensor, Var, backprop::GradStore};
use std::f64::consts::PI;

pub const WARMUP_STEPS: usize = 100;
const BETA_1: f64 = 0.9;
const EPS: f64 = 1e-8;

/// The size of a run's steps. The learning rate rises linearly, and falls by half a cosine to a
/// tenth.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args)]
pub struct Schedule {
    /// The highest learning rate
    #[arg(long, value_name = "RATE", default_value_t = 1e-3)]
    pub rate: f64,

    /// Steps over which the learning rate rises, 0 for none
    #[arg(long, value_name = "STEPS", default_value_t = WARMUP_STEPS)]
    pub rate_warmup: usize,

    /// The largest norm of all gradients together, to which they are clipped, 0 for no limit
    #[arg(long, value_name = "NORM", default_value_t = 1.)]
    pub clip: f64,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            rate: 1e-3,
            rate_warmup: WARMUP_STEPS,
            clip: 1.,
        }
    }
}

impl Schedule {
    /// The learning rate of `step`, counted from 0, in a run of `steps`.
    pub fn rate(&self, step: usize, steps: usize) -> f64 {
        let (most, least, warmup) = (self.rate, self.least(), self.rate_warmup);
        if step < warmup {
            return most * (step + 1) as f64 / (warmup + 1) as f64;
        }
        if step >= steps {
            return least;
        }
        let progress = (step - warmup) as f64 / (steps - warmup) as f64;
        least + (most - least) * (1. + (PI * progress).cos()) / 2.
    }

    /// The last learning rate.
    pub fn least(&self) -> f64 {
        self.rate * 0.1
    }
}

/// The settings of an [`AdamW`] that each command chooses for itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    pub beta_2: f64,
    pub weight_decay: f64,
    /// 0 for no limit.
    pub max_grad_norm: f64,
}

/// AdamW with gradients clipped to a global norm, and weight decay on matrices only: embeddings
/// and linear layers, not the normalizations' weights and biases.
pub struct AdamW {
    config: AdamWConfig,
    pub slots: Vec<Slot>,
    /// Updates made so far.
    pub steps: usize,
}

/// A parameter and the running means of its gradient and of its gradient's square. All of them are
/// F32, as every variable of the lab: in half precision the means would stall.
pub struct Slot {
    pub name: String,
    pub var: Var,
    pub mean: Tensor,
    pub square: Tensor,
}

impl AdamW {
    pub fn new(
        parameters: impl IntoIterator<Item = (String, Var)>,
        config: AdamWConfig,
    ) -> Result<Self> {
        let slots = parameters
            .into_iter()
            .map(|(name, var)| {
                let zeros = var.zeros_like()?.detach();
                Ok(Slot {
                    name,
                    var,
                    mean: zeros.clone(),
                    square: zeros,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            config,
            slots,
            steps: 0,
        })
    }

    /// The gradient of every parameter, in the order of the slots. One without is an error: some
    /// operation upstream of the loss recorded no backward, and training on would only look like
    /// training.
    pub fn gradients(&self, store: &GradStore) -> Result<Vec<Tensor>> {
        let gradient = |slot: &Slot| {
            let gradient = store.get(&slot.var).cloned();
            gradient.with_context(|| format!("no gradient reaches {}", slot.name))
        };
        self.slots.iter().map(gradient).collect()
    }

    /// The gradient of the parameter called `name`, from `gradients` in the order of the slots.
    pub fn gradient<'a>(&self, gradients: &'a [Tensor], name: &str) -> Result<&'a Tensor> {
        let slot = self.slots.iter().position(|slot| slot.name == name);
        Ok(&gradients[slot.with_context(|| format!("there is no parameter {name}"))?])
    }

    /// Moves every parameter by its gradient, in the order of the slots.
    pub fn step(&mut self, grads: &[Tensor], rate: f64) -> Result<()> {
        let AdamWConfig {
            beta_2,
            weight_decay,
            max_grad_norm,
        } = self.config;
        let clip = match max_grad_norm > 0. {
            true => Some(clip_factor(grads, max_grad_norm)?),
            false => None,
        };
        self.steps += 1;
        let mean_bias = 1. - BETA_1.powf(self.steps as f64);
        let square_bias = 1. - beta_2.powf(self.steps as f64);
        for (slot, grad) in self.slots.iter_mut().zip(grads) {
            let grad = match &clip {
                Some(clip) => grad.broadcast_mul(clip)?,
                None => grad.clone(),
            };
            slot.mean = ((&slot.mean * BETA_1)? + (&grad * (1. - BETA_1))?)?;
            slot.square = ((&slot.square * beta_2)? + (grad.sqr()? * (1. - beta_2))?)?;
            let root = ((&slot.square / square_bias)?.sqrt()? + EPS)?;
            let update = ((&slot.mean * (rate / mean_bias))? / root)?;
            let decay = if slot.var.rank() > 1 {
                1. - rate * weight_decay
            } else {
                1.
            };
            let kept = (slot.var.as_detached_tensor() * decay)?;
            slot.var.set(&(kept - update)?)?;
        }
        Ok(())
    }
}

/// The factor of all gradients that makes their common norm at most `max`. A tensor, because
/// reading it would make every step wait for the device.
fn clip_factor(grads: &[Tensor], max: f64) -> Result<Tensor> {
    let squares = grads
        .iter()
        .map(|grad| grad.sqr()?.sum_all())
        .collect::<candle::Result<Vec<_>>>()?;
    let norm = Tensor::stack(&squares, 0)?.sum_all()?.sqrt()?;
    Ok(((norm + 1e-6)?.recip()? * max)?.minimum(1f64)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::Device;
    use candle_nn::Optimizer;

    const CONFIG: AdamWConfig = AdamWConfig {
        beta_2: 0.99,
        weight_decay: 0.1,
        max_grad_norm: 1.,
    };

    #[test]
    fn the_rate_rises_for_the_warmup_then_falls() {
        let schedule = Schedule::default();
        let rates: Vec<f64> = (0..2000).map(|step| schedule.rate(step, 2000)).collect();
        assert!(rates[0] > 0. && rates[..=WARMUP_STEPS].is_sorted());
        assert!((rates[WARMUP_STEPS] - 1e-3).abs() < 1e-12);
        assert!(rates[WARMUP_STEPS..].is_sorted_by(|a, b| a > b));
        assert!((rates[WARMUP_STEPS + 950] - (1e-3 + 1e-4) / 2.).abs() < 1e-12);
        assert!(rates[1999] < 1e-4 * 1.001);
        // A run shorter than the warm-up.
        assert!(schedule.rate(9, 10) < 1e-3);
        // None: the first step has the highest rate.
        let without = Schedule {
            rate: 4e-3,
            rate_warmup: 0,
            ..schedule
        };
        assert_eq!(without.rate(0, 10), 4e-3);
        assert!(without.rate(1, 10) < 4e-3 && without.rate(10, 10) == without.least());
    }

    /// Both from `values`, with `grad` as the gradient, for a few steps.
    fn ours_and_candles(values: &Tensor, grad: &Tensor, decay: f64) -> Result<[Tensor; 2]> {
        let (ours, candles) = (Var::from_tensor(values)?, Var::from_tensor(values)?);
        let mut adam = AdamW::new([("w".to_string(), ours.clone())], CONFIG)?;
        let mut candles_adam = candle_nn::AdamW::new(
            vec![candles.clone()],
            candle_nn::ParamsAdamW {
                lr: 1e-2,
                beta1: BETA_1,
                beta2: CONFIG.beta_2,
                eps: EPS,
                weight_decay: decay,
            },
        )?;
        for step in 1..5 {
            let grad = (grad * step as f64)?;
            let store = (ours.as_tensor() * &grad)?.sum_all()?.backward()?;
            adam.step(&adam.gradients(&store)?, 1e-2)?;
            candles_adam.backward_step(&(candles.as_tensor() * &grad)?.sum_all()?)?;
        }
        Ok([ours, candles].map(|var| var.as_detached_tensor()))
    }

    fn worst_difference([a, b]: [Tensor; 2]) -> Result<f32> {
        Ok((a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar()?)
    }

    #[test]
    fn is_candles_adamw_where_nothing_is_clipped() -> Result<()> {
        // Values of about 1 after four steps of a few roundings each.
        let bound = 32. * f32::EPSILON;
        let grad = Tensor::new(&[[0.01f32, -0.02], [0.03, 0.]], &Device::Cpu)?;
        let values = Tensor::new(&[[1f32, -1.], [0.5, 2.]], &Device::Cpu)?;
        assert!(worst_difference(ours_and_candles(&values, &grad, CONFIG.weight_decay)?)? < bound);
        // No decay of what is not a matrix.
        let (values, grad) = (values.get(0)?, grad.get(0)?);
        assert!(worst_difference(ours_and_candles(&values, &grad, 0.)?)? < bound);
        Ok(())
    }

    #[test]
    fn clips_the_norm_of_all_gradients() -> Result<()> {
        let large = Tensor::new(&[3f32, 0.], &Device::Cpu)?;
        let other = Tensor::new(&[[4f32]], &Device::Cpu)?;
        let factor = clip_factor(&[large.clone(), other], 1.)?.to_scalar::<f32>()?;
        assert!((factor - 0.2).abs() < 1e-6);
        let small = (large / 10.)?;
        assert_eq!(clip_factor(&[small], 1.)?.to_scalar::<f32>()?, 1.);

        // The size of Adam's first step depends on the gradient by ε only.
        let first_step = |max_grad_norm| -> Result<f32> {
            let var = Var::zeros(1, candle::DType::F32, &Device::Cpu)?;
            let config = AdamWConfig {
                max_grad_norm,
                ..CONFIG
            };
            let mut adam = AdamW::new([("w".into(), var.clone())], config)?;
            adam.step(&[Tensor::new(&[2f32], &Device::Cpu)?], 1.)?;
            Ok(adam.slots[0].mean.get(0)?.to_scalar()?)
        };
        let [clipped, free] = [first_step(1.)?, first_step(0.)?];
        assert!((clipped - 0.1).abs() < 1e-6 && (free - 0.2).abs() < 1e-6);
        Ok(())
    }

    #[test]
    fn names_the_parameter_that_no_gradient_reaches() -> Result<()> {
        let used = Var::ones(2, candle::DType::F32, &Device::Cpu)?;
        let unused = Var::ones(2, candle::DType::F32, &Device::Cpu)?;
        let slots = [("used".into(), used.clone()), ("unused".into(), unused)];
        let adam = AdamW::new(slots, CONFIG)?;
        let error = adam.gradients(&used.sum_all()?.backward()?).unwrap_err();
        assert_eq!(error.to_string(), "no gradient reaches unused");
        Ok(())
    }
}
