//! A step on a device whose host computes the numbers of channels: the phases of a step, and the
//! equations of [`Recipe`] on `[C]`. What is computed on rows is each device's own, behind
//! [`HostRows`].

use super::{
    BackwardInputs, DeviceBackward, DeviceStep, ForwardInputs, Gradients, Outputs, Setting,
};
use crate::config::{ForwardKind, PhiStep, PowerNormConfig, Recipe};
use candle::{DType, Device, Result, Storage, Tensor, Var};

/// Rows to normalize: a forward's input. In a backward: the tensor that its forward normalized.
pub(super) trait HostRows: Sized {
    type Channels: Channels;

    /// 1 for each channel of `x`.
    fn ones(x: &Tensor) -> Result<Self::Channels>;

    /// The rows of `x + residual`. Padded rows have a 0 in `keep`.
    fn new(
        x: &Tensor,
        residual: Option<&Tensor>,
        keep: Option<&Tensor>,
        config: &PowerNormConfig,
    ) -> Result<Self>;

    /// Adds the residual. Writes y if its `factors` are given. Takes the sums of squares if they
    /// are wanted: over the kept rows, and under [`Recipe::Fairseq`] over all rows as well.
    fn forward(
        &self,
        factors: Option<OutputFactors<Self::Channels>>,
        sums: bool,
    ) -> Result<(Outputs, Vec<RowSum<Self::Channels>>)>;

    /// Writes y. `sum` is `x + residual`, if there is a residual.
    fn normalize(
        &self,
        factors: OutputFactors<Self::Channels>,
        sum: Option<&Storage>,
    ) -> Result<Option<Storage>>;

    /// Writes `∂L/∂x` if its factors are given, and takes the sums if they are wanted. Reads only
    /// dy and dsum of `inputs`: `new` has the rest.
    fn backward(
        &self,
        inputs: &BackwardInputs,
        factors: Option<InputFactors<Self::Channels>>,
        sums: bool,
    ) -> Result<GradientOutputs<Self::Channels>>;
}

/// `∂L/∂x` and the sums over the rows, as far as they were wanted.
pub(super) type GradientOutputs<V> = (Option<Tensor>, Option<GradientSums<V>>);

/// `Y = γ ⊙ X̃/D + β`.
pub(super) struct OutputFactors<'a, V> {
    /// 1/D.
    pub inv_rms: &'a V,
    /// γ.
    pub weight: Option<&'a Tensor>,
    /// β.
    pub bias: Option<&'a Tensor>,
}

/// `∂L/∂X̃ = gain ⊙ dy − decay ⊙ X̃`.
pub(super) struct InputFactors<V> {
    pub gain: V,
    /// `None` stands for 0.
    pub decay: Option<V>,
}

/// One number for each channel, `[C]`, in the dtype of the sums.
pub(super) trait Channels: Clone + Send + Sync + Sized {
    /// Reads a tensor of any float dtype, into the dtype and onto the device of `like`.
    fn read(tensor: &Tensor, like: &Self) -> Result<Self>;

    /// Sets a variable of the state. A channel keeps its value where one of `guards` is not finite
    /// in the dtype of the variable.
    fn store(&self, var: &Var, guards: &[&Self]) -> Result<()>;

    /// A tensor `[C]`.
    fn to_tensor(&self, dtype: DType, device: &Device) -> Result<Tensor>;

    fn plus(&self, other: &Self) -> Result<Self>;

    fn times(&self, other: &Self) -> Result<Self>;

    /// `factor · self`.
    fn scaled(&self, factor: f64) -> Result<Self>;

    /// `factor · self + shift`.
    fn scaled_plus(&self, factor: f64, shift: f64) -> Result<Self>;

    /// The mean over `rows` rows, from the sum.
    fn mean(&self, rows: usize) -> Result<Self>;

    /// `1/sqrt(self + ε)`.
    fn inverse_root(&self, eps: f64) -> Result<Self>;

    /// 0 in place of negative numbers.
    fn clamp_at_0(&self) -> Result<Self>;
}

/// A forward, and what its backward needs.
pub(super) struct HostStep<R: HostRows> {
    setting: Setting,
    /// 1/D by ψ² before the step.
    running_inv_rms: R::Channels,
    /// The local sums of a training forward. Empty in a single process.
    local: Vec<RowSum<R::Channels>>,
    /// The statistics of the whole batch, in a training step with a kept row.
    batch: Option<BatchStatistics<R::Channels>>,
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

impl<R: HostRows + 'static> HostStep<R> {
    /// Adds the residual, sums the squares and writes the output. If the batch's statistic
    /// normalizes, the output is left to [`normalize_by_batch`](DeviceStep::normalize_by_batch).
    pub fn forward(
        setting: Setting,
        inputs: &ForwardInputs,
    ) -> Result<(Box<dyn DeviceStep>, Outputs)> {
        let ones = R::ones(&inputs.x)?;
        let running_inv_rms = match &inputs.phi {
            Some(phi) => R::Channels::read(phi, &ones)?.inverse_root(setting.config.eps)?,
            None => ones,
        };
        let mut step = Self {
            setting,
            running_inv_rms,
            local: vec![],
            batch: None,
        };
        let normalizes = setting.kind != ForwardKind::BatchStatistic;
        let factors = normalizes.then(|| step.output_factors(inputs));
        let rows = step.rows(inputs)?;
        let (outputs, sums) = rows.forward(factors, setting.kind.is_training())?;
        match setting.over_ranks {
            true => step.local = sums,
            false => step.make_statistics(&sums)?,
        }
        Ok((Box::new(step), outputs))
    }
}

impl<R: HostRows> HostStep<R> {
    fn rows(&self, inputs: &ForwardInputs) -> Result<R> {
        let (residual, keep) = (inputs.residual.as_ref(), inputs.keep.as_ref());
        R::new(&inputs.x, residual, keep, self.config())
    }

    fn output_factors<'a>(&'a self, inputs: &'a ForwardInputs) -> OutputFactors<'a, R::Channels> {
        OutputFactors {
            inv_rms: self.inv_rms(),
            weight: inputs.weight.as_ref(),
            bias: inputs.bias.as_ref(),
        }
    }

    fn config(&self) -> &PowerNormConfig {
        &self.setting.config
    }

    /// Makes the batch's statistics from the sums over kept rows, which come first, and the sums
    /// that Γ is made of, which come last. Without a kept row there are none.
    fn make_statistics(&mut self, sums: &[RowSum<R::Channels>]) -> Result<()> {
        let (Some(kept), Some(over)) = (sums.first(), sums.last()) else {
            return Ok(());
        };
        if kept.rows == 0 {
            return Ok(());
        }
        let batch_phi = kept.squares.mean(kept.rows)?;
        let batch_inv_rms = batch_phi.inverse_root(self.config().eps)?;
        let inv_rms = match self.setting.kind {
            ForwardKind::BatchStatistic => &batch_inv_rms,
            _ => &self.running_inv_rms,
        };
        let square = over.squares.mean(over.rows)?;
        self.batch = Some(BatchStatistics {
            gamma: square.times(inv_rms)?.times(inv_rms)?,
            rows: over.rows,
            batch_phi,
            inv_rms: batch_inv_rms,
        });
        Ok(())
    }

    /// 1/D of the forward.
    fn inv_rms(&self) -> &R::Channels {
        match &self.batch {
            Some(batch) if self.setting.kind == ForwardKind::BatchStatistic => &batch.inv_rms,
            _ => &self.running_inv_rms,
        }
    }

    /// `true` if the input's gradient needs Λ, and so the sums over all rows.
    fn needs_lambda(&self) -> bool {
        self.is_step() && self.config().is_exact(self.setting.kind)
    }

    /// Recipe Paper's guard: an overflowed batch must not outlive its step.
    fn guards<'a>(&self, guards: &'a [&'a R::Channels]) -> &'a [&'a R::Channels] {
        match self.config().recipe {
            Recipe::Paper => guards,
            Recipe::Fairseq => &[],
        }
    }
}

impl<R: HostRows> DeviceStep for HostStep<R> {
    fn local_sums(&self) -> Result<Tensor> {
        let mut sums = vec![];
        for sum in &self.local {
            sums.push(sum.squares.to_tensor(DType::F64, &Device::Cpu)?);
            sums.push(Tensor::new(&[sum.rows as f64], &Device::Cpu)?);
        }
        Tensor::cat(&sums, 0)
    }

    fn set_global_sums(&mut self, global: &Tensor) -> Result<()> {
        let mut sums = vec![];
        for sum in global.chunk(self.config().square_sums(), 0)? {
            let cols = sum.elem_count() - 1;
            sums.push(RowSum {
                squares: R::Channels::read(&sum.narrow(0, 0, cols)?, &self.running_inv_rms)?,
                rows: sum.get(cols)?.to_scalar::<f64>()? as usize,
            });
        }
        self.make_statistics(&sums)
    }

    fn is_step(&self) -> bool {
        self.batch.is_some()
    }

    /// Moves ψ² by Eq. 10, or by the mean of the warm-up.
    fn update_phi(&mut self, phi: &Var, step: &PhiStep) -> Result<()> {
        let Some(batch) = &self.batch else {
            return Ok(());
        };
        let mut new = R::Channels::read(phi, &batch.batch_phi)?;
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

    fn normalize_by_batch(&mut self, inputs: &ForwardInputs, outputs: Outputs) -> Result<Outputs> {
        let factors = self.output_factors(inputs);
        let y = self
            .rows(inputs)?
            .normalize(factors, outputs.sum.as_ref())?;
        Ok(Outputs { y, ..outputs })
    }

    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>> {
        // Under recipe Fairseq the backward does not know the mask.
        let knows_mask = self.config().recipe == Recipe::Paper;
        let keep = inputs.keep.filter(|_| knows_mask);
        let weight = |weight| R::Channels::read(weight, &self.running_inv_rms);
        let mut backward = HostBackward {
            forward: self,
            inputs: *inputs,
            rows: R::new(inputs.x, None, keep, self.config())?,
            weight: inputs.weight.map(weight).transpose()?,
            local: None,
            lambda: None,
            gradients: Gradients::default(),
        };
        let makes_dx = inputs.wants_input && !self.needs_lambda();
        let factors = makes_dx.then(|| backward.input_factors()).transpose()?;
        let mut parameters = [inputs.weight, inputs.bias].into_iter().flatten();
        // The pass over the rows has to have something to make.
        let wants_sums = !makes_dx || self.is_step() || parameters.any(Tensor::track_op);
        let (dx, sums) = backward.rows.backward(inputs, factors, wants_sums)?;
        if let (Some(sums), false) = (&sums, self.setting.over_ranks) {
            backward.make_lambda(&sums.dy_x)?;
        }
        backward.gradients.input = dx;
        backward.local = sums;
        Ok(Box::new(backward))
    }
}

/// A backward.
///
/// With `g = γ ⊙ dy` every `∂L/∂X̃` has the form `gain ⊙ dy − decay ⊙ X̃`:
///
/// - an evaluation: `g/D`;
/// - PN-V, Eq. 6: `(g − Λ X̂)/D`, which needs the sums of the whole batch first;
/// - PN, Eq. 12: `(g − ν X̂)/D`; under recipe Fairseq the divisor is the batch's, and this is the
///   gradient at every step.
struct HostBackward<'a, R: HostRows> {
    forward: &'a HostStep<R>,
    inputs: BackwardInputs<'a>,
    rows: R,
    /// γ.
    weight: Option<R::Channels>,
    /// The sums over this process's rows.
    local: Option<GradientSums<R::Channels>>,
    /// Λ, once the sums over the rows of all processes are known.
    lambda: Option<R::Channels>,
    gradients: Gradients,
}

/// The sums over the rows of a backward.
pub(super) struct GradientSums<V> {
    /// Σ dy x̃.
    pub dy_x: V,
    /// Σ dy.
    pub dy: V,
}

impl<R: HostRows> HostBackward<'_, R> {
    /// Makes Λ from Σ dy x̃ over all rows.
    fn make_lambda(&mut self, dy_x: &R::Channels) -> Result<()> {
        if let Some(batch) = &self.forward.batch {
            let g_x_hat = self.times_weight(dy_x.times(self.forward.inv_rms())?)?;
            self.lambda = Some(g_x_hat.mean(batch.rows)?);
        }
        Ok(())
    }

    /// The factors of dy and X̃ in `∂L/∂X̃`: γ/D, and the correction's.
    fn input_factors(&self) -> Result<InputFactors<R::Channels>> {
        let forward = self.forward;
        let divisor = match &forward.batch {
            Some(batch) if forward.config().recipe == Recipe::Fairseq => &batch.inv_rms,
            _ => forward.inv_rms(),
        };
        let decay = |correction: R::Channels| correction.times(divisor)?.times(forward.inv_rms());
        Ok(InputFactors {
            gain: self.times_weight(divisor.clone())?,
            decay: self.correction()?.map(decay).transpose()?,
        })
    }

    fn times_weight(&self, channels: R::Channels) -> Result<R::Channels> {
        match &self.weight {
            Some(weight) => channels.times(weight),
            None => Ok(channels),
        }
    }

    /// Λ of the batch, or else the running ν; `None` in evaluation.
    fn correction(&self) -> Result<Option<R::Channels>> {
        if self.forward.needs_lambda() {
            return Ok(self.lambda.clone());
        }
        let Some(running) = &self.inputs.running else {
            return Ok(None);
        };
        let ema_gz = R::Channels::read(running.ema_gz, &self.forward.running_inv_rms)?;
        let factor = (1. - self.forward.config().alpha_bwd) * running.loss_scale;
        ema_gz.scaled(factor).map(Some)
    }

    /// Moves ν by Eq. 13 divided by 1−α_b, in the variable that a checkpoint stores:
    /// `ema_gz ← (1 − (1−α_b)Γ) ema_gz + Λ`.
    fn move_nu(&self, ema_gz: &Var) -> Result<()> {
        let (Some(batch), Some(lambda), Some(running)) =
            (&self.forward.batch, &self.lambda, &self.inputs.running)
        else {
            return Ok(());
        };
        let config = self.forward.config();
        let decay = batch.gamma.scaled_plus(config.alpha_bwd - 1., 1.)?;
        let decay = match config.recipe {
            Recipe::Paper => decay.clamp_at_0()?,
            Recipe::Fairseq => decay,
        };
        let old = decay.times(&R::Channels::read(ema_gz, &decay)?)?;
        let new = old.plus(&lambda.scaled(running.loss_scale.recip())?)?;
        // Γ is checked too: the clamp would turn an infinite Γ into a finite factor.
        new.store(ema_gz, self.forward.guards(&[&new, &batch.gamma]))
    }
}

impl<R: HostRows> DeviceBackward for HostBackward<'_, R> {
    fn local_sums(&self) -> Result<Tensor> {
        match &self.local {
            Some(local) => local.dy_x.to_tensor(DType::F64, &Device::Cpu),
            None => candle::bail!("power_norm: expected the sums of a backward, got none"),
        }
    }

    fn set_global_sums(&mut self, global: &Tensor) -> Result<()> {
        self.make_lambda(&R::Channels::read(global, &self.forward.running_inv_rms)?)
    }

    fn update_nu(&mut self, ema_gz: Option<&Var>) -> Result<()> {
        let is_tracked = |parameter: &&Tensor| parameter.track_op();
        if let Some(local) = &self.local {
            if let Some(weight) = self.inputs.weight.filter(is_tracked) {
                let dweight = local.dy_x.times(self.forward.inv_rms())?;
                self.gradients.weight = Some(dweight.to_tensor(weight.dtype(), weight.device())?);
            }
            if let Some(bias) = self.inputs.bias.filter(is_tracked) {
                self.gradients.bias = Some(local.dy.to_tensor(bias.dtype(), bias.device())?);
            }
        }
        match ema_gz {
            Some(ema_gz) => self.move_nu(ema_gz),
            None => Ok(()),
        }
    }

    fn gradients(mut self: Box<Self>) -> Result<Gradients> {
        if self.inputs.wants_input && self.gradients.input.is_none() {
            let factors = Some(self.input_factors()?);
            (self.gradients.input, _) = self.rows.backward(&self.inputs, factors, false)?;
        }
        Ok(self.gradients)
    }
}
