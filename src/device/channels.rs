//! The equations of a step on channels, for devices whose host computes them. They are those of
//! [`Recipe`], on `[C]`. What is computed on rows is each device's own.

use super::{BackwardInputs, Gradients, Setting};
use crate::config::{ForwardKind, PhiStep, PowerNormConfig, Recipe};
use candle::{Device, Result, Tensor, Var};

/// One number for each channel, `[C]`, in the dtype of the sums.
pub(super) trait Channels: Clone + Send + Sync + Sized {
    /// Reads a tensor of any float dtype, as numbers like `like`.
    fn read(tensor: &Tensor, like: &Self) -> Result<Self>;

    /// Reads ν: `ema_gz` times (1−α_b) and the loss scale. A CPU rounds after each factor, other
    /// devices once.
    fn read_nu(ema_gz: &Tensor, factors: [f64; 2], like: &Self) -> Result<Self>;

    /// Sets a variable of the state. A channel keeps its value where one of `guards` is not finite
    /// in the dtype of the variable.
    fn store(&self, var: &Var, guards: &[&Self]) -> Result<()>;

    /// A tensor in the shape, the dtype and on the device of `like`.
    fn to_tensor(&self, like: &Tensor) -> Result<Tensor>;

    fn to_numbers(&self) -> Result<Vec<f64>>;

    fn of_numbers(numbers: &[f64], like: &Self) -> Result<Self>;

    fn plus(&self, other: &Self) -> Result<Self>;

    fn times(&self, other: &Self) -> Result<Self>;

    /// `factor · self`.
    fn scaled(&self, factor: f64) -> Result<Self>;

    /// `factor · self + shift`.
    fn affine(&self, factor: f64, shift: f64) -> Result<Self>;

    /// The mean over `rows` rows, from the sum.
    fn mean(&self, rows: usize) -> Result<Self>;

    /// `1/sqrt(self + ε)`.
    fn inverse_root(&self, eps: f64) -> Result<Self>;

    /// 0 in place of negative numbers.
    fn clamp_at_0(&self) -> Result<Self>;
}

/// A forward's statistics.
pub(super) struct ForwardChannels<V> {
    setting: Setting,
    /// 1/D by ψ² before the step.
    running_inv_rms: V,
    /// The sums over this process's rows, in training, if other processes have rows too.
    local: Option<ForwardSums<V>>,
    /// The statistics of the whole batch, in a training step with a kept row.
    batch: Option<BatchStatistics<V>>,
}

/// The sums over the rows of a training forward.
pub(super) struct ForwardSums<V> {
    /// Over kept rows, for ψ_B², and for Γ unless `all` is there.
    pub kept: RowSum<V>,
    /// Over all rows, padded ones included, for Γ under recipe Fairseq.
    pub all: Option<RowSum<V>>,
}

/// A sum over rows.
pub(super) struct RowSum<V> {
    /// Σ x̃².
    pub squares: V,
    pub rows: usize,
}

/// The statistics of a batch.
struct BatchStatistics<V> {
    /// ψ_B².
    batch_phi: V,
    /// 1/D by ψ_B².
    inv_rms: V,
    /// Γ, the mean of X̂².
    gamma: V,
    /// The rows that Γ and Λ are means over.
    rows: usize,
}

impl<V: Channels> ForwardChannels<V> {
    /// `phi` is ψ² before the step. Without it D is 1.
    pub fn new(setting: Setting, phi: Option<&Tensor>, ones: V) -> Result<Self> {
        Ok(Self {
            setting,
            running_inv_rms: match phi {
                Some(phi) => V::read(phi, &ones)?.inverse_root(setting.config.eps)?,
                None => ones,
            },
            local: None,
            batch: None,
        })
    }

    pub fn config(&self) -> &PowerNormConfig {
        &self.setting.config
    }

    pub fn kind(&self) -> ForwardKind {
        self.setting.kind
    }

    /// `true` if Γ runs over padded rows too.
    pub fn sums_all_rows(&self) -> bool {
        self.config().recipe == Recipe::Fairseq
    }

    /// Stores the sums over this process's rows.
    pub fn store_sums(&mut self, sums: ForwardSums<V>) -> Result<()> {
        match self.setting.over_ranks {
            true => self.local = Some(sums),
            false => self.make_statistics(&sums)?,
        }
        Ok(())
    }

    /// The sums over this process's rows, as they are handed out.
    pub fn local_sums(&self) -> Result<Tensor> {
        let Some(local) = &self.local else {
            candle::bail!("power_norm: expected the sums of a forward, got none")
        };
        let mut numbers = vec![];
        for sum in [&local.kept].into_iter().chain(&local.all) {
            numbers.extend(sum.squares.to_numbers()?);
            numbers.push(sum.rows as f64);
        }
        Tensor::new(numbers, &Device::Cpu)
    }

    /// Takes in the sums over the rows of all processes.
    pub fn set_global_sums(&mut self, global: &Tensor) -> Result<()> {
        let numbers = global.to_vec1::<f64>()?;
        let like = &self.running_inv_rms;
        let sum = |numbers: &[f64]| match numbers.split_last() {
            Some((&rows, squares)) => Ok(RowSum {
                squares: V::of_numbers(squares, like)?,
                rows: rows as usize,
            }),
            None => candle::bail!("power_norm: expected the sums of a forward, got none"),
        };
        let sums = match self.sums_all_rows() {
            true => {
                let (kept, all) = numbers.split_at(numbers.len() / 2);
                let all = Some(sum(all)?);
                ForwardSums {
                    kept: sum(kept)?,
                    all,
                }
            }
            false => ForwardSums {
                kept: sum(&numbers)?,
                all: None,
            },
        };
        self.make_statistics(&sums)
    }

    fn make_statistics(&mut self, sums: &ForwardSums<V>) -> Result<()> {
        if sums.kept.rows == 0 {
            return Ok(());
        }
        let batch_phi = sums.kept.squares.mean(sums.kept.rows)?;
        let batch_inv_rms = batch_phi.inverse_root(self.config().eps)?;
        let inv_rms = match self.kind() {
            ForwardKind::BatchStatistic => &batch_inv_rms,
            _ => &self.running_inv_rms,
        };
        let over = sums.all.as_ref().unwrap_or(&sums.kept);
        let square = over.squares.mean(over.rows)?;
        self.batch = Some(BatchStatistics {
            gamma: square.times(inv_rms)?.times(inv_rms)?,
            rows: over.rows,
            batch_phi,
            inv_rms: batch_inv_rms,
        });
        Ok(())
    }

    /// `true` for a training step with a kept row, of whatever process.
    pub fn is_step(&self) -> bool {
        self.batch.is_some()
    }

    /// 1/D of the forward.
    pub fn inv_rms(&self) -> &V {
        match &self.batch {
            Some(batch) if self.kind() == ForwardKind::BatchStatistic => &batch.inv_rms,
            _ => &self.running_inv_rms,
        }
    }

    /// Moves ψ² by Eq. 10, or by the mean of the warm-up.
    pub fn update_phi(&self, phi: &Var, step: &PhiStep) -> Result<()> {
        let Some(batch) = &self.batch else {
            return Ok(());
        };
        let mut new = V::read(phi, &batch.batch_phi)?;
        for shares in [step.cumulative, step.moving].into_iter().flatten() {
            let of_batch = batch.batch_phi.scaled(shares.new)?;
            new = match shares.old {
                // The old ψ² does not count here, and may be NaN.
                0. => of_batch,
                share => new.scaled(share)?.plus(&of_batch)?,
            };
        }
        new.store(phi, self.guards(&[&new]))
    }

    /// Recipe Paper's guard: an overflowed batch must not outlive its step.
    fn guards<'a>(&self, guards: &'a [&'a V]) -> &'a [&'a V] {
        match self.config().recipe {
            Recipe::Paper => guards,
            Recipe::Fairseq => &[],
        }
    }
}

/// A backward's sums and what follows from them.
///
/// With `g = γ ⊙ dy` every `∂L/∂X̃` has the form `gain ⊙ dy − decay ⊙ X̃`:
///
/// - an evaluation: `g/D`;
/// - PN-V, Eq. 6: `(g − Λ X̂)/D`, which needs the sums of the whole batch first;
/// - PN, Eq. 12: `(g − ν X̂)/D`; under recipe Fairseq the divisor is the batch's, and this is the
///   gradient at every step.
pub(super) struct BackwardChannels<'a, V> {
    pub forward: &'a ForwardChannels<V>,
    inputs: BackwardInputs<'a>,
    /// γ.
    weight: Option<V>,
    /// The sums over this process's rows.
    local: Option<GradientSums<V>>,
    /// Σ dy x̃ over the rows of all processes, if it was handed in.
    global: Option<V>,
    /// Λ, after a training step.
    lambda: Option<V>,
}

/// The sums over the rows of a backward.
pub(super) struct GradientSums<V> {
    /// Σ dy x̃.
    pub dy_x: V,
    /// Σ dy.
    pub dy: V,
}

impl<'a, V: Channels> BackwardChannels<'a, V> {
    pub fn new(forward: &'a ForwardChannels<V>, inputs: &BackwardInputs<'a>) -> Result<Self> {
        let weight = inputs.affine.map(|[weight, _]| weight);
        let like = &forward.running_inv_rms;
        Ok(Self {
            forward,
            inputs: *inputs,
            weight: weight.map(|weight| V::read(weight, like)).transpose()?,
            local: None,
            global: None,
            lambda: None,
        })
    }

    /// `true` if the input's gradient needs Λ, and so the sums over all rows.
    pub fn needs_lambda(&self) -> bool {
        let forward = self.forward;
        forward.is_step() && forward.config().is_exact(forward.kind())
    }

    /// `true` if the step or a gradient needs the sums.
    pub fn wants_sums(&self) -> bool {
        let affine = self.inputs.affine.into_iter().flatten();
        self.forward.is_step() || affine.into_iter().any(Tensor::track_op)
    }

    pub fn store_sums(&mut self, sums: GradientSums<V>) {
        self.local = Some(sums);
    }

    /// The sums over this process's rows, as they are handed out.
    pub fn local_sums(&self) -> Result<Tensor> {
        match &self.local {
            Some(local) => Tensor::new(local.dy_x.to_numbers()?, &Device::Cpu),
            None => candle::bail!("power_norm: expected the sums of a backward, got none"),
        }
    }

    /// Takes in the sums over the rows of all processes.
    pub fn set_global_sums(&mut self, global: &Tensor) -> Result<()> {
        let numbers = global.to_vec1()?;
        self.global = Some(V::of_numbers(&numbers, &self.forward.running_inv_rms)?);
        Ok(())
    }

    /// Makes Λ from the sums.
    pub fn make_lambda(&mut self) -> Result<()> {
        let local = self.local.as_ref().map(|sums| &sums.dy_x);
        let dy_x = self.global.as_ref().or(local);
        if let (Some(batch), Some(dy_x)) = (&self.forward.batch, dy_x) {
            let g_x_hat = dy_x.times(self.forward.inv_rms())?;
            let g_x_hat = match &self.weight {
                Some(weight) => g_x_hat.times(weight)?,
                None => g_x_hat,
            };
            self.lambda = Some(g_x_hat.mean(batch.rows)?);
        }
        Ok(())
    }

    /// Λ of the batch, or else the running ν, for [`decay`](Self::decay); `None` in evaluation.
    pub fn correction(&self) -> Result<Option<V>> {
        if !self.forward.is_step() {
            return Ok(None);
        }
        if self.needs_lambda() {
            return Ok(self.lambda.clone());
        }
        let Some(running) = &self.inputs.running else {
            return Ok(None);
        };
        let factors = [1. - self.forward.config().alpha_bwd, running.loss_scale];
        V::read_nu(running.ema_gz, factors, &self.forward.running_inv_rms).map(Some)
    }

    /// The factor of dy in `∂L/∂X̃`: γ/D.
    pub fn gain(&self) -> Result<V> {
        match &self.weight {
            Some(weight) => weight.times(self.divisor()),
            None => Ok(self.divisor().clone()),
        }
    }

    /// The factor of X̃ in `∂L/∂X̃`.
    pub fn decay(&self, correction: &V) -> Result<V> {
        correction
            .times(self.divisor())?
            .times(self.forward.inv_rms())
    }

    /// 1/D of the gradient.
    fn divisor(&self) -> &V {
        match &self.forward.batch {
            Some(batch) if self.forward.config().recipe == Recipe::Fairseq => &batch.inv_rms,
            _ => self.forward.inv_rms(),
        }
    }

    /// Hands out the gradients: `input`, and those of the parameters that are trained.
    pub fn gradients(&self, input: Option<Tensor>) -> Result<Gradients> {
        let [mut weight, mut bias] = [None, None];
        if let (Some(affine), Some(local)) = (self.inputs.affine, &self.local) {
            let [of_weight, of_bias] = affine.map(Tensor::track_op);
            if of_weight {
                let dweight = local.dy_x.times(self.forward.inv_rms())?;
                weight = Some(dweight.to_tensor(affine[0])?);
            }
            if of_bias {
                bias = Some(local.dy.to_tensor(affine[1])?);
            }
        }
        Ok(Gradients {
            input,
            weight,
            bias,
        })
    }

    /// Moves ν by Eq. 13 divided by 1−α_b, in the variable that a checkpoint stores:
    /// `ema_gz ← (1 − (1−α_b)Γ) ema_gz + Λ`.
    pub fn update_nu(&self, ema_gz: &Var) -> Result<()> {
        let (Some(batch), Some(lambda), Some(running)) =
            (&self.forward.batch, &self.lambda, &self.inputs.running)
        else {
            return Ok(());
        };
        let config = self.forward.config();
        let decay = batch.gamma.affine(config.alpha_bwd - 1., 1.)?;
        let decay = match config.recipe {
            Recipe::Paper => decay.clamp_at_0()?,
            Recipe::Fairseq => decay,
        };
        let old = decay.times(&V::read(ema_gz, &decay)?)?;
        let new = old.plus(&lambda.scaled(running.loss_scale.recip())?)?;
        // Γ is checked too: the clamp would turn an infinite Γ into a finite factor.
        new.store(ema_gz, self.forward.guards(&[&new, &batch.gamma]))
    }
}
