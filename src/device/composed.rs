//! Runs a step in candle's own operations, on devices that have no kernels here: Metal above all.
//!
//! Rows are `[rows, C]` and channels `[C]`, in the dtype of the sums, without a graph. Each
//! equation takes a few of candle's operations, so this device is many times slower than kernels.
//! The host waits for the device only where it needs a number: to count the rows of a mask, and to
//! hand sums out.

use super::channels::{
    BackwardChannels, Channels, ForwardChannels, ForwardSums, GradientSums, RowSum,
};
use super::{
    sums_dtype, BackwardInputs, DeviceBackward, DeviceStep, ForwardInputs, Gradients, Outputs,
    Setting,
};
use crate::config::{ForwardKind, PhiStep, PowerNormConfig, Recipe};
use candle::{DType, Device, Result, Storage, Tensor, Var, D};

/// A forward, and what its backward needs.
pub(crate) struct ComposedStep {
    channels: ForwardChannels<Tensor>,
}

/// Rows that are ready to be computed with.
struct Rows {
    /// X̃, `[rows, C]`.
    x_tilde: Tensor,
    /// r = x̃/x of each group, `[rows, G, 1]`; `None` without group scaling.
    factors: Option<Tensor>,
    /// The mask, `[rows, C]`; `None` without a mask or without rows.
    keep: Option<Tensor>,
}

impl Rows {
    fn new(x: &Tensor, keep: Option<&Tensor>, config: &PowerNormConfig) -> Result<Self> {
        let x = as_rows(x)?;
        let keep = match keep {
            // candle cannot read an empty view that begins past the end of its storage.
            Some(keep) if x.dims()[0] > 0 => Some(keep.reshape(((), 1))?.broadcast_as(x.shape())?),
            _ => None,
        };
        let factors = |groups| factors(&x, groups, config.eps);
        let factors = config.group_scaling.map(factors).transpose()?;
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
    let factors = squares.inverse_root(eps)?;
    // If squares overflow, or do with ε, x and √ε are first divided by the largest magnitude of x.
    let largest = x.abs()?.max_keepdim(D::Minus1)?;
    let ratios = x.broadcast_div(&largest)?.sqr()?.mean_keepdim(D::Minus1)?;
    let ratio = (largest.recip()? * eps.sqrt())?;
    let of_huge = ((ratios + ratio.sqr()?)?.sqrt()? * largest)?.recip()?;
    is_finite(&(squares + eps)?)?.where_cond(&factors, &of_huge)
}

/// 1 where a value is finite, else 0.
fn is_finite(values: &Tensor) -> Result<Tensor> {
    (values * 0.)?.eq(0f64)
}

impl ComposedStep {
    /// Adds the residual, sums the squares and writes the output. If the batch's statistic
    /// normalizes, the output is left to [`normalize_by_batch`](DeviceStep::normalize_by_batch).
    pub fn forward(setting: Setting, inputs: &ForwardInputs) -> Result<(Self, Outputs)> {
        let x = sum_with_residual(inputs)?;
        let rows = Rows::new(&x, inputs.keep, &setting.config)?;
        let ones = Tensor::ones(x.dim(D::Minus1)?, rows.x_tilde.dtype(), x.device())?;
        let mut step = Self {
            channels: ForwardChannels::new(setting, inputs.phi, ones)?,
        };
        if setting.kind.is_training() {
            let squares = rows.x_tilde.sqr()?;
            let all = match step.channels.sums_all_rows() {
                true => Some(RowSum {
                    squares: sum_rows(&squares)?,
                    rows: rows.len(),
                }),
                false => None,
            };
            let kept = RowSum {
                squares: sum_rows(&rows.masked(squares)?)?,
                rows: rows.kept()?,
            };
            step.channels.store_sums(ForwardSums { kept, all })?;
        }
        let y = match setting.kind {
            ForwardKind::BatchStatistic => None,
            _ => Some(step.output(inputs, &rows)?),
        };
        let sum = inputs.residual.map(|_| storage(&x)).transpose()?;
        Ok((step, Outputs { y, sum }))
    }

    /// `Y = γ ⊙ X̃/D + β`, shaped as the input and in its dtype.
    fn output(&self, inputs: &ForwardInputs, rows: &Rows) -> Result<Storage> {
        let y = rows.x_tilde.broadcast_mul(self.channels.inv_rms())?;
        let y = match inputs.affine {
            Some(affine) => {
                let [weight, bias] = affine.map(|parameter| Channels::read(parameter, &y));
                y.broadcast_mul(&weight?)?.broadcast_add(&bias?)?
            }
            None => y,
        };
        storage(&shaped(y, inputs.x)?)
    }
}

/// The input of the normalization, in the dtype of the forward's input.
fn sum_with_residual(inputs: &ForwardInputs) -> Result<Tensor> {
    let Some(residual) = inputs.residual else {
        return Ok(inputs.x.detach());
    };
    // Rounded once, as kernels do: candle's own sum may flush the smallest halves to 0.
    let sums = sums_dtype(inputs.x.dtype());
    let [x, residual] = [inputs.x, residual].map(|rows| rows.detach().to_dtype(sums));
    (x? + residual?)?.to_dtype(inputs.x.dtype())
}

impl DeviceStep for ComposedStep {
    fn local_sums(&self) -> Result<Tensor> {
        self.channels.local_sums()
    }

    fn set_global_sums(&mut self, global: &Tensor) -> Result<()> {
        self.channels.set_global_sums(global)
    }

    fn normalize_by_batch(&mut self, inputs: &ForwardInputs, outputs: Outputs) -> Result<Outputs> {
        let x = sum_with_residual(inputs)?;
        let rows = Rows::new(&x, inputs.keep, self.channels.config())?;
        Ok(Outputs {
            y: Some(self.output(inputs, &rows)?),
            ..outputs
        })
    }

    fn is_step(&self) -> bool {
        self.channels.is_step()
    }

    fn update_phi(&self, phi: &Var, step: &PhiStep) -> Result<()> {
        self.channels.update_phi(phi, step)
    }

    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>> {
        let config = self.channels.config();
        // Under recipe Fairseq the backward does not know the mask.
        let keep = inputs.keep.filter(|_| config.recipe == Recipe::Paper);
        let rows = Rows::new(inputs.x, keep, config)?;
        let dy = as_rows(inputs.dy)?;
        let mut channels = BackwardChannels::new(&self.channels, inputs)?;
        channels.store_sums(GradientSums {
            dy: sum_rows(&rows.masked(dy.clone())?)?,
            dy_x: sum_rows(&rows.masked((&dy * &rows.x_tilde)?)?)?,
        });
        let mut backward = ComposedBackward {
            inputs: *inputs,
            rows,
            dy,
            channels,
            dx: None,
            gradients: Gradients::default(),
        };
        if inputs.wants_input && !backward.channels.needs_lambda() {
            backward.dx = Some(backward.input_gradient()?);
        }
        Ok(Box::new(backward))
    }
}

/// A backward.
struct ComposedBackward<'a> {
    inputs: BackwardInputs<'a>,
    rows: Rows,
    /// `[rows, C]`.
    dy: Tensor,
    channels: BackwardChannels<'a, Tensor>,
    dx: Option<Tensor>,
    gradients: Gradients,
}

impl ComposedBackward<'_> {
    /// `∂L/∂x`, by way of `∂L/∂X̃ = gain ⊙ dy − decay ⊙ X̃`.
    fn input_gradient(&self) -> Result<Tensor> {
        let mut dx_tilde = self.dy.broadcast_mul(&self.channels.gain()?)?;
        if let Some(correction) = self.channels.correction()? {
            let decay = self.channels.decay(&correction)?;
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
    fn local_sums(&self) -> Result<Tensor> {
        self.channels.local_sums()
    }

    fn set_global_sums(&mut self, global: &Tensor) -> Result<()> {
        self.channels.set_global_sums(global)
    }

    fn finish(&mut self, _nu_follows: bool) -> Result<()> {
        self.channels.make_lambda()?;
        if self.inputs.wants_input && self.dx.is_none() {
            self.dx = Some(self.input_gradient()?);
        }
        self.gradients = self.channels.gradients(self.dx.take())?;
        Ok(())
    }

    fn update_nu(&mut self, ema_gz: &Var) -> Result<()> {
        self.channels.update_nu(ema_gz)
    }

    fn gradients(self: Box<Self>) -> Gradients {
        self.gradients
    }
}

impl Channels for Tensor {
    fn read(tensor: &Tensor, like: &Self) -> Result<Self> {
        tensor.detach().to_dtype(like.dtype())?.flatten_all()
    }

    fn read_nu(ema_gz: &Tensor, [first, second]: [f64; 2], like: &Self) -> Result<Self> {
        <Self as Channels>::read(ema_gz, like)? * (first * second)
    }

    fn store(&self, var: &Var, guards: &[&Self]) -> Result<()> {
        let old = var.as_detached_tensor().flatten_all()?;
        let mut new = self.to_dtype(var.dtype())?;
        for guard in guards {
            let is_finite = is_finite(&guard.to_dtype(var.dtype())?)?;
            new = is_finite.where_cond(&new, &old)?;
        }
        var.set(&new.reshape(var.shape())?)
    }

    fn to_tensor(&self, like: &Tensor) -> Result<Tensor> {
        self.to_dtype(like.dtype())
    }

    /// The host waits for the numbers. Not every device has f64, so they become f64 on the CPU.
    fn to_numbers(&self) -> Result<Vec<f64>> {
        let numbers = self.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
        numbers.to_vec1()
    }

    fn of_numbers(numbers: &[f64], like: &Self) -> Result<Self> {
        let numbers = Tensor::new(numbers, &Device::Cpu)?.to_dtype(like.dtype())?;
        numbers.to_device(like.device())
    }

    fn plus(&self, other: &Self) -> Result<Self> {
        self + other
    }

    fn times(&self, other: &Self) -> Result<Self> {
        self * other
    }

    fn scaled(&self, factor: f64) -> Result<Self> {
        self * factor
    }

    fn affine(&self, factor: f64, shift: f64) -> Result<Self> {
        Tensor::affine(self, factor, shift)
    }

    fn mean(&self, rows: usize) -> Result<Self> {
        self / rows as f64
    }

    fn inverse_root(&self, eps: f64) -> Result<Self> {
        Tensor::affine(self, 1., eps)?.sqrt()?.recip()
    }

    fn clamp_at_0(&self) -> Result<Self> {
        self.relu()
    }
}

/// Rows that are added up before they join a longer sum. In f32 the rounding error of a sum
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
