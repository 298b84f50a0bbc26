//! Runs a step in candle's own operations, on devices that have no kernels here: Metal above all.
//!
//! Rows are `[rows, C]` and channels `[C]`, in the dtype of the sums, without a graph. Each
//! equation takes a few of candle's operations, so this device is many times slower than kernels.
//! The host waits for the device only where it needs a number: to count the rows of a mask, and to
//! hand sums out.

use crate::config::{ForwardKind, PhiStep, PowerNormConfig, Recipe};
use crate::device::{
    sums_dtype, BackwardInputs, DeviceBackward, DeviceStep, ForwardInputs, Gradients, Outputs,
    Setting,
};
use candle::{DType, Device, Result, Storage, Tensor, Var, D};
use std::sync::OnceLock;

/// A forward, and what its backward needs.
pub(crate) struct ComposedStep {
    setting: Setting,
    /// 1/D by ψ² before the step, `[C]`. The forward sets it.
    running_inv_rms: Option<Tensor>,
    /// The sums over this process's rows, in training, if other processes have rows too.
    own: Option<ForwardSums>,
    /// The statistics of the whole batch, in training, once they are known; `None` without a kept
    /// row.
    statistics: OnceLock<Option<BatchStatistics>>,
}

/// The sums over the rows of a training forward.
struct ForwardSums {
    /// Over kept rows, for ψ_B², and for Γ unless `all` is there.
    kept: RowSum,
    /// Over all rows, padded ones included, for Γ under recipe Fairseq.
    all: Option<RowSum>,
}

/// A sum over rows.
struct RowSum {
    /// Σ x̃², `[C]`.
    squares: Tensor,
    rows: usize,
}

/// The statistics of a batch, `[C]` each.
struct BatchStatistics {
    /// ψ_B².
    batch_phi: Tensor,
    /// 1/D by ψ_B².
    inv_rms: Tensor,
    /// Γ, the mean of X̂².
    gamma: Tensor,
    /// The rows that Γ and Λ are means over.
    rows: usize,
}

/// Rows that are ready to be computed with.
struct Rows {
    /// X̃, `[rows, C]`.
    x_tilde: Tensor,
    /// r = x̃/x of each group, `[rows, G, 1]`; `None` without a layer-scale.
    factors: Option<Tensor>,
    /// The mask, `[rows, C]`; `None` without a mask or without rows.
    keep: Option<Tensor>,
}

impl Rows {
    fn new(x: &Tensor, keep: Option<&Tensor>, groups: Option<usize>, eps: f64) -> Result<Self> {
        let x = as_rows(x)?;
        let keep = match keep {
            // candle cannot read an empty view that begins past the end of its storage.
            Some(keep) if x.dims()[0] > 0 => Some(keep.reshape(((), 1))?.broadcast_as(x.shape())?),
            _ => None,
        };
        let factors = groups.map(|groups| factors(&x, groups, eps)).transpose()?;
        let x_tilde = match &factors {
            Some(factors) => by_group(&x, factors, |x, factors| x.broadcast_mul(factors))?,
            None => x,
        };
        Ok(Self {
            x_tilde,
            factors,
            keep,
        })
    }

    fn len(&self) -> usize {
        self.x_tilde.dims()[0]
    }

    /// The number of rows that are not padding.
    fn kept(&self) -> Result<usize> {
        match &self.keep {
            Some(keep) => {
                let keep = keep.narrow(1, 0, 1)?.ne(0u8)?.to_dtype(DType::U32)?;
                Ok(keep.sum_all()?.to_scalar::<u32>()? as usize)
            }
            None => Ok(self.len()),
        }
    }

    /// `values`, `[rows, C]`, with 0 in padded rows, whatever they hold.
    fn masked(&self, values: Tensor) -> Result<Tensor> {
        match &self.keep {
            Some(keep) => keep.where_cond(&values, &values.zeros_like()?),
            None => Ok(values),
        }
    }

    /// `∂L/∂x` from `dx_tilde`, `∂L/∂x̃`: `r (∂L/∂x̃ − x̃ · mean_group(∂L/∂x̃ ⊙ x̃))`.
    fn through_factors(&self, dx_tilde: Tensor) -> Result<Tensor> {
        let Some(factors) = &self.factors else {
            return Ok(dx_tilde);
        };
        let products = (&dx_tilde * &self.x_tilde)?;
        let mean = by_group(&products, factors, |products, _| {
            let mean = products.mean_keepdim(D::Minus1)?;
            mean.broadcast_as(products.shape())
        })?;
        let dx = (dx_tilde - (&self.x_tilde * mean)?)?;
        by_group(&dx, factors, |dx, factors| dx.broadcast_mul(factors))
    }
}

/// `[.., C]` as `[rows, C]` in the dtype of the sums.
fn as_rows(x: &Tensor) -> Result<Tensor> {
    let cols = x.dim(D::Minus1)?;
    let x = x.detach().to_dtype(sums_dtype(x.dtype()))?;
    x.reshape((x.elem_count() / cols, cols))
}

/// Runs `run` on rows as groups, `[rows, G, C/G]`, and gives the rows back.
fn by_group(
    rows: &Tensor,
    factors: &Tensor,
    run: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let (count, groups, _) = factors.dims3()?;
    let cols = rows.dim(1)?;
    run(&rows.reshape((count, groups, cols / groups))?, factors)?.reshape(rows.shape())
}

/// r of each group of the rows `x`, `[rows, G, 1]`.
fn factors(x: &Tensor, groups: usize, eps: f64) -> Result<Tensor> {
    let (rows, cols) = x.dims2()?;
    if rows == 0 {
        return Tensor::zeros((0, groups, 1), x.dtype(), x.device());
    }
    let x = x.reshape((rows, groups, cols / groups))?;
    let squares = x.sqr()?.mean_keepdim(D::Minus1)?;
    let factors = inverse_root(&squares, eps)?;
    // If squares overflow, or do with ε, x and √ε are first divided by the largest magnitude of x.
    let largest = x.abs()?.max_keepdim(D::Minus1)?;
    let ratios = x.broadcast_div(&largest)?.sqr()?.mean_keepdim(D::Minus1)?;
    let ratio = (largest.recip()? * eps.sqrt())?;
    let of_huge = ((ratios + ratio.sqr()?)?.sqrt()? * largest)?.recip()?;
    is_finite(&(squares + eps)?)?.where_cond(&factors, &of_huge)
}

/// 1/sqrt(squares + ε).
fn inverse_root(squares: &Tensor, eps: f64) -> Result<Tensor> {
    squares.affine(1., eps)?.sqrt()?.recip()
}

/// 1 where a value is finite, else 0.
fn is_finite(values: &Tensor) -> Result<Tensor> {
    (values * 0.)?.eq(0f64)
}

impl ComposedStep {
    pub fn new(setting: Setting) -> Self {
        Self {
            setting,
            running_inv_rms: None,
            own: None,
            statistics: OnceLock::new(),
        }
    }

    fn config(&self) -> &PowerNormConfig {
        &self.setting.config
    }

    fn rows(&self, x: &Tensor, keep: Option<&Tensor>) -> Result<Rows> {
        let config = self.config();
        Rows::new(x, keep, config.group_scaling, config.eps)
    }

    /// The statistics of a training step, unless sums are still to come or no row was kept.
    fn batch(&self) -> Option<&BatchStatistics> {
        self.statistics.get()?.as_ref()
    }

    /// Whether this is a training step with a kept row, or may turn out to be one.
    fn may_be_step(&self) -> bool {
        self.setting.kind.is_training() && self.statistics.get().is_none_or(Option::is_some)
    }

    fn running_inv_rms(&self) -> Result<&Tensor> {
        let inv_rms = self.running_inv_rms.as_ref();
        inv_rms.ok_or_else(|| candle::Error::msg("power_norm: expected a forward, got none"))
    }

    /// 1/D of the forward.
    fn inv_rms(&self) -> Result<&Tensor> {
        match self.batch() {
            Some(batch) if self.setting.kind == ForwardKind::BatchStatistic => Ok(&batch.inv_rms),
            _ => self.running_inv_rms(),
        }
    }

    /// Makes the statistics of the whole batch from its sums.
    fn settle(&self, sums: &ForwardSums) -> Result<()> {
        let statistics = match sums.kept.rows {
            0 => None,
            rows => {
                let batch_phi = (&sums.kept.squares / rows as f64)?;
                let batch_inv_rms = inverse_root(&batch_phi, self.config().eps)?;
                let inv_rms = match self.setting.kind {
                    ForwardKind::BatchStatistic => &batch_inv_rms,
                    _ => self.running_inv_rms()?,
                };
                let over = sums.all.as_ref().unwrap_or(&sums.kept);
                let square = (&over.squares / over.rows as f64)?;
                Some(BatchStatistics {
                    gamma: ((square * inv_rms)? * inv_rms)?,
                    rows: over.rows,
                    batch_phi,
                    inv_rms: batch_inv_rms,
                })
            }
        };
        // If another backward was faster, it set the same values.
        let _ = self.statistics.set(statistics);
        Ok(())
    }

    /// Sums the squares of a training forward.
    fn sum_squares(&mut self, rows: &Rows) -> Result<()> {
        let squares = rows.x_tilde.sqr()?;
        // Fairseq's Γ runs over padded rows too.
        let all = match self.config().recipe {
            Recipe::Paper => None,
            Recipe::Fairseq => Some(RowSum {
                squares: sum_rows(&squares)?,
                rows: rows.len(),
            }),
        };
        let kept = RowSum {
            squares: sum_rows(&rows.masked(squares)?)?,
            rows: rows.kept()?,
        };
        let own = ForwardSums { kept, all };
        match self.setting.shared {
            true => self.own = Some(own),
            false => self.settle(&own)?,
        }
        Ok(())
    }

    /// `Y = γ ⊙ X̃/D + β`, shaped as the input and in its dtype.
    fn output(&self, inputs: &ForwardInputs, rows: &Rows) -> Result<Storage> {
        let y = rows.x_tilde.broadcast_mul(self.inv_rms()?)?;
        let y = match inputs.affine {
            Some([weight, bias]) => {
                let [weight, bias] = [channels(weight, &y)?, channels(bias, &y)?];
                y.broadcast_mul(&weight)?.broadcast_add(&bias)?
            }
            None => y,
        };
        storage(&shaped(y, inputs.x)?)
    }

    /// What is normalized, in the dtype of the input.
    fn input(inputs: &ForwardInputs) -> Result<Tensor> {
        match inputs.residual {
            Some(residual) => {
                // Rounded once, as kernels do: candle's own sum may flush the smallest halves to 0.
                let sums = sums_dtype(inputs.x.dtype());
                let [x, residual] = [inputs.x, residual].map(|rows| rows.detach().to_dtype(sums));
                (x? + residual?)?.to_dtype(inputs.x.dtype())
            }
            None => Ok(inputs.x.detach()),
        }
    }
}

impl DeviceStep for ComposedStep {
    fn forward(&mut self, inputs: &ForwardInputs) -> Result<Outputs> {
        let x = Self::input(inputs)?;
        let rows = self.rows(&x, inputs.keep)?;
        let phi = channels(inputs.phi, &rows.x_tilde)?;
        self.running_inv_rms = Some(inverse_root(&phi, self.config().eps)?);
        if self.setting.kind.is_training() {
            self.sum_squares(&rows)?;
        }
        let y = match self.setting.kind {
            ForwardKind::BatchStatistic => None,
            _ => Some(self.output(inputs, &rows)?),
        };
        let sum = inputs.residual.map(|_| storage(&x)).transpose()?;
        Ok(Outputs { y, sum })
    }

    fn finish_forward(&mut self, inputs: &ForwardInputs, outputs: Outputs) -> Result<Outputs> {
        let rows = self.rows(&Self::input(inputs)?, inputs.keep)?;
        Ok(Outputs {
            y: Some(self.output(inputs, &rows)?),
            ..outputs
        })
    }

    fn sums(&self) -> Result<Tensor> {
        match &self.own {
            Some(own) => own.numbers(),
            None => candle::bail!("power_norm: expected the sums of a forward, got none"),
        }
    }

    fn take_sums(&self, total: &Tensor) -> Result<()> {
        self.settle(&ForwardSums::of_numbers(total, self.running_inv_rms()?)?)
    }

    fn move_phi(&self, phi: &Var, step: Option<&PhiStep>) -> Result<bool> {
        let Some(batch) = self.batch() else {
            return Ok(false);
        };
        if let Some(step) = step {
            let mut new = channels(phi, &batch.batch_phi)?;
            for shares in [step.cumulative, step.moving].into_iter().flatten() {
                let of_batch = (&batch.batch_phi * shares.new)?;
                new = match shares.old {
                    // The old ψ² does not count here, and may be NaN.
                    0. => of_batch,
                    share => ((new * share)? + of_batch)?,
                };
            }
            self.set(phi, &new, None)?;
        }
        Ok(true)
    }

    /// The cases are those of the CPU's backward.
    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>> {
        let config = self.config();
        // Under recipe Fairseq the backward does not know the mask.
        let keep = inputs.keep.filter(|_| config.recipe == Recipe::Paper);
        let rows = self.rows(inputs.x, keep)?;
        let dy = as_rows(inputs.dy)?;
        let dbias = sum_rows(&rows.masked(dy.clone())?)?;
        let dy_x = sum_rows(&rows.masked((&dy * &rows.x_tilde)?)?)?;
        let weight = match inputs.affine {
            Some([weight, _]) => Some(channels(weight, &dy)?),
            None => None,
        };
        let mut backward = ComposedBackward {
            step: self,
            inputs: *inputs,
            rows,
            dy,
            weight,
            total: dy_x.clone(),
            dy_x,
            dbias,
            lambda: None,
            dx: None,
            gradients: Gradients::default(),
        };
        let is_step = self.may_be_step();
        let waits = is_step && config.is_exact(self.setting.kind);
        if inputs.wants_input && !waits {
            let nu = match is_step {
                true => {
                    let ema_gz = channels(inputs.ema_gz, &backward.dy)?;
                    Some((ema_gz * ((1. - config.alpha_bwd) * inputs.loss_scale))?)
                }
                false => None,
            };
            backward.dx = Some(backward.input_gradient(nu.as_ref())?);
        }
        Ok(Box::new(backward))
    }
}

impl ComposedStep {
    /// Sets a variable of the state. Under recipe Paper a channel keeps its value where the new
    /// one, or `also`, is not finite in the dtype of the state.
    fn set(&self, var: &Var, new: &Tensor, also: Option<&Tensor>) -> Result<()> {
        let old = var.as_detached_tensor().flatten_all()?;
        let mut new = new.to_dtype(var.dtype())?;
        if self.config().recipe == Recipe::Paper {
            for checked in [Some(&new.clone()), also].into_iter().flatten() {
                let checked = checked.to_dtype(var.dtype())?;
                new = is_finite(&checked)?.where_cond(&new, &old)?;
            }
        }
        var.set(&new.reshape(var.shape())?)
    }
}

/// A backward.
struct ComposedBackward<'a> {
    step: &'a ComposedStep,
    inputs: BackwardInputs<'a>,
    rows: Rows,
    /// `[rows, C]`.
    dy: Tensor,
    /// γ, `[C]`.
    weight: Option<Tensor>,
    /// Σ dy x̃ of this process's rows, `[C]`.
    dy_x: Tensor,
    /// Σ dy of this process's rows, `[C]`.
    dbias: Tensor,
    /// Σ dy x̃ of the whole batch, `[C]`.
    total: Tensor,
    /// Λ, `[C]`, after a training step.
    lambda: Option<Tensor>,
    dx: Option<Tensor>,
    gradients: Gradients,
}

impl ComposedBackward<'_> {
    /// `∂L/∂x` by `correction`, Λ or ν, `[C]`: `∂L/∂X̃ = (g − correction ⊙ X̂)/D` with `g = γ ⊙
    /// dy`.
    fn input_gradient(&self, correction: Option<&Tensor>) -> Result<Tensor> {
        let divisor = match self.step.batch() {
            Some(batch) if self.step.config().recipe == Recipe::Fairseq => &batch.inv_rms,
            _ => self.step.inv_rms()?,
        };
        let gain = match &self.weight {
            Some(weight) => (weight * divisor)?,
            None => divisor.clone(),
        };
        let mut dx_tilde = self.dy.broadcast_mul(&gain)?;
        if let Some(correction) = correction {
            let decay = ((correction * divisor)? * self.step.inv_rms()?)?;
            dx_tilde = (dx_tilde - self.rows.x_tilde.broadcast_mul(&decay)?)?;
        }
        let mut dx = self.rows.masked(self.rows.through_factors(dx_tilde)?)?;
        if let Some(dsum) = self.inputs.dsum {
            dx = (dx + as_rows(dsum)?)?;
        }
        shaped(dx, self.inputs.x)
    }
}

impl DeviceBackward for ComposedBackward<'_> {
    fn sums(&mut self) -> Result<Option<Tensor>> {
        if !self.step.may_be_step() {
            return Ok(None);
        }
        let numbers = on_host(&self.total)?;
        match (&self.step.own, self.step.statistics.get()) {
            (Some(own), None) => Tensor::cat(&[numbers, own.numbers()?], 0).map(Some),
            _ => Ok(Some(numbers)),
        }
    }

    fn take_sums(&mut self, total: &Tensor) -> Result<()> {
        let cols = self.total.elem_count();
        self.total = from_host(&total.narrow(0, 0, cols)?, &self.total)?;
        let more = total.elem_count() - cols;
        if more > 0 {
            self.step.take_sums(&total.narrow(0, cols, more)?)?;
        }
        Ok(())
    }

    fn finish(&mut self, _moves_nu: bool) -> Result<()> {
        if let Some(batch) = self.step.batch() {
            let g_x_hat = (&self.total * self.step.inv_rms()?)?;
            let g_x_hat = match &self.weight {
                Some(weight) => (g_x_hat * weight)?,
                None => g_x_hat,
            };
            self.lambda = Some((g_x_hat / batch.rows as f64)?);
        }
        let inputs = self.inputs;
        if inputs.wants_input && self.dx.is_none() {
            self.dx = Some(self.input_gradient(self.lambda.as_ref())?);
        }
        self.gradients.input = self.dx.take();
        if let Some([weight, bias]) = inputs.affine {
            let gradient = |param: &Tensor, gradient: &Tensor| match param.track_op() {
                true => gradient.to_dtype(param.dtype()).map(Some),
                false => Ok(None),
            };
            let dweight = (&self.dy_x * self.step.inv_rms()?)?;
            self.gradients.weight = gradient(weight, &dweight)?;
            self.gradients.bias = gradient(bias, &self.dbias)?;
        }
        Ok(())
    }

    fn move_nu(&mut self, ema_gz: &Var) -> Result<()> {
        let (Some(batch), Some(lambda)) = (self.step.batch(), &self.lambda) else {
            return Ok(());
        };
        // Eq. 13 divided by 1−α_b: ema_gz ← (1 − (1−α_b)Γ) ema_gz + Λ.
        let config = self.step.config();
        let decay = batch.gamma.affine(config.alpha_bwd - 1., 1.)?;
        let decay = match config.recipe {
            Recipe::Paper => decay.relu()?,
            Recipe::Fairseq => decay,
        };
        let old = channels(ema_gz, &decay)?;
        let new = ((decay * old)? + (lambda * self.inputs.loss_scale.recip())?)?;
        // Γ is checked too: the clamp would turn an infinite Γ into a finite factor.
        self.step.set(ema_gz, &new, Some(&batch.gamma))
    }

    fn gradients(self: Box<Self>) -> Gradients {
        self.gradients
    }
}

impl ForwardSums {
    /// The sums in the form in which they are handed out.
    fn numbers(&self) -> Result<Tensor> {
        let mut numbers = vec![];
        for sum in [&self.kept].into_iter().chain(&self.all) {
            numbers.push(on_host(&sum.squares)?);
            numbers.push(Tensor::new(&[sum.rows as f64], &Device::Cpu)?);
        }
        Tensor::cat(&numbers, 0)
    }

    /// Reads sums that were taken in. Channels get the dtype and device of `like`.
    fn of_numbers(numbers: &Tensor, like: &Tensor) -> Result<Self> {
        let cols = like.elem_count();
        let sum = |start| -> Result<RowSum> {
            let rows = numbers.narrow(0, start + cols, 1)?.squeeze(0)?;
            Ok(RowSum {
                squares: from_host(&numbers.narrow(0, start, cols)?, like)?,
                rows: rows.to_scalar::<f64>()? as usize,
            })
        };
        Ok(Self {
            kept: sum(0)?,
            all: match numbers.elem_count() > cols + 1 {
                true => Some(sum(cols + 1)?),
                false => None,
            },
        })
    }
}

/// The layer-scale without a layer: X̃ of `x`.
pub(crate) fn scale_groups(x: &Tensor, groups: usize, eps: f64) -> Result<Storage> {
    let rows = Rows::new(x, None, Some(groups), eps)?;
    storage(&shaped(rows.x_tilde, x)?)
}

/// The gradient of [`scale_groups`] from `dy`.
pub(crate) fn scale_groups_bwd(x: &Tensor, dy: &Tensor, groups: usize, eps: f64) -> Result<Tensor> {
    let rows = Rows::new(x, None, Some(groups), eps)?;
    shaped(rows.through_factors(as_rows(dy)?)?, x)
}

/// How many rows are added up before they join a longer sum. In f32 the rounding error of a sum
/// grows with the number of its terms.
const SUBTOTAL_ROWS: usize = 512;

/// The sums of columns, `[C]`.
fn sum_rows(values: &Tensor) -> Result<Tensor> {
    let (rows, cols) = values.dims2()?;
    if rows == 0 {
        return Tensor::zeros(cols, values.dtype(), values.device());
    }
    let subtotals = rows / SUBTOTAL_ROWS;
    if subtotals < 2 {
        return values.sum(0);
    }
    let (head, tail) = (subtotals * SUBTOTAL_ROWS, rows % SUBTOTAL_ROWS);
    let by_subtotal = values.narrow(0, 0, head)?;
    let total = sum_rows(
        &by_subtotal
            .reshape((subtotals, SUBTOTAL_ROWS, cols))?
            .sum(1)?,
    )?;
    match tail {
        0 => Ok(total),
        _ => total + values.narrow(0, head, tail)?.sum(0)?,
    }
}

/// One number for each channel, `[C]`, in the dtype of `like` and without a graph.
fn channels(values: &Tensor, like: &Tensor) -> Result<Tensor> {
    values.detach().to_dtype(like.dtype())?.flatten_all()
}

/// Rows in the shape and dtype of `like`.
fn shaped(rows: Tensor, like: &Tensor) -> Result<Tensor> {
    rows.to_dtype(like.dtype())?.reshape(like.shape())
}

/// The storage of a tensor that an operation made.
fn storage(tensor: &Tensor) -> Result<Storage> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    storage.try_clone(layout)
}

/// Sums in the form in which they are handed out. Not every device has f64, so they go to the CPU.
fn on_host(sums: &Tensor) -> Result<Tensor> {
    sums.to_device(&Device::Cpu)?.to_dtype(DType::F64)
}

fn from_host(sums: &Tensor, like: &Tensor) -> Result<Tensor> {
    (sums.to_dtype(like.dtype())?.contiguous()?).to_device(like.device())
}
