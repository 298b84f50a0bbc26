//! Runs a step in candle's own operations, on devices that have no kernels here: Metal above all.
//!
//! Rows are `[rows, C]` and channels `[C]`, in the dtype of the sums, without a graph. Each
//! equation takes a few of candle's operations, so this device is many times slower than kernels.
//! The host waits for the device only where it needs a number: to count the rows of a mask, and to
//! hand sums out.

use super::host::{
    Channels, GradientOutputs, GradientSums, HostRows, InputFactors, OutputFactors, RowSum,
};
use super::{sums_dtype, BackwardInputs, Outputs};
use crate::config::{PowerNormConfig, Recipe};
use candle::{DType, Device, Result, Storage, Tensor, Var, D};

/// Rows after the group scaling.
pub(crate) struct ComposedRows {
    /// The input, or its sum with a residual, `[.., C]`.
    x: Tensor,
    adds_residual: bool,
    /// X̃, `[rows, C]`.
    x_tilde: Tensor,
    /// r = x̃/x of each group, `[rows, G, 1]`; `None` without group scaling.
    factors: Option<Tensor>,
    /// The mask, `[rows, C]`; `None` without a mask or without rows.
    keep: Option<Tensor>,
    /// Squares are summed over all rows too.
    sums_all: bool,
}

impl ComposedRows {
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
        let groups = factors.dim(1)?;
        let (dx_tilde, x_tilde) = (grouped(&dx_tilde, groups)?, grouped(&self.x_tilde, groups)?);
        let mean = (&dx_tilde * &x_tilde)?.mean_keepdim(D::Minus1)?;
        let dx = (dx_tilde - x_tilde.broadcast_mul(&mean)?)?;
        dx.broadcast_mul(factors)?.flatten_from(1)
    }

    /// `∂L/∂x`, by way of `∂L/∂X̃`.
    fn input_gradient(
        &self,
        dy: &Tensor,
        dsum: Option<&Tensor>,
        factors: &InputFactors<Tensor>,
    ) -> Result<Tensor> {
        let mut dx_tilde = dy.broadcast_mul(&factors.gain)?;
        if let Some(decay) = &factors.decay {
            dx_tilde = (dx_tilde - self.x_tilde.broadcast_mul(decay)?)?;
        }
        let mut dx = self.masked(self.through_factors(dx_tilde)?)?;
        if let Some(dsum) = dsum {
            dx = (dx + as_rows(dsum)?)?;
        }
        shaped(dx, &self.x)
    }
}

/// `[.., C]` as `[rows, C]` in the dtype of the sums.
fn as_rows(x: &Tensor) -> Result<Tensor> {
    let cols = x.dim(D::Minus1)?;
    let x = x.detach().to_dtype(sums_dtype(x.dtype()))?;
    x.reshape((x.elem_count() / cols, cols))
}

/// Rows as groups, `[rows, G, C/G]`.
fn grouped(rows: &Tensor, groups: usize) -> Result<Tensor> {
    let (count, cols) = rows.dims2()?;
    rows.reshape((count, groups, cols / groups))
}

/// r of each group of rows, `[rows, G, 1]`.
fn factors(x: &Tensor, eps: f64) -> Result<Tensor> {
    let (rows, groups, _) = x.dims3()?;
    if rows == 0 {
        return Tensor::zeros((0, groups, 1), x.dtype(), x.device());
    }
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

/// `x + residual`, in the dtype of `x`.
fn sum_with_residual(x: &Tensor, residual: &Tensor) -> Result<Tensor> {
    // Rounded once, as kernels do: candle's own sum may flush the smallest halves to 0.
    let sums = sums_dtype(x.dtype());
    let [wide, residual] = [x, residual].map(|rows| rows.detach().to_dtype(sums));
    (wide? + residual?)?.to_dtype(x.dtype())
}

impl HostRows for ComposedRows {
    type Channels = Tensor;

    fn ones(x: &Tensor) -> Result<Tensor> {
        Tensor::ones(x.dim(D::Minus1)?, sums_dtype(x.dtype()), x.device())
    }

    fn new(
        x: &Tensor,
        residual: Option<&Tensor>,
        keep: Option<&Tensor>,
        config: &PowerNormConfig,
    ) -> Result<Self> {
        let x = match residual {
            Some(residual) => sum_with_residual(x, residual)?,
            None => x.detach(),
        };
        let rows = as_rows(&x)?;
        let keep = match keep {
            // candle cannot read an empty view that begins past the end of its storage.
            Some(keep) if rows.dims()[0] > 0 => {
                Some(keep.reshape(((), 1))?.broadcast_as(rows.shape())?)
            }
            _ => None,
        };
        let (x_tilde, factors) = match config.group_scaling {
            Some(groups) => {
                let rows = grouped(&rows, groups)?;
                let factors = factors(&rows, config.eps)?;
                let x_tilde = rows.broadcast_mul(&factors)?.flatten_from(1)?;
                (x_tilde, Some(factors))
            }
            None => (rows, None),
        };
        Ok(Self {
            x,
            adds_residual: residual.is_some(),
            x_tilde,
            factors,
            keep,
            sums_all: config.recipe == Recipe::Fairseq,
        })
    }

    fn forward(
        &self,
        factors: Option<OutputFactors<Tensor>>,
        sums: bool,
    ) -> Result<(Outputs, Vec<RowSum<Tensor>>)> {
        let mut of_squares = vec![];
        if sums {
            let squares = self.x_tilde.sqr()?;
            of_squares.push(RowSum {
                squares: sum_rows(&self.masked(squares.clone())?)?,
                rows: self.kept()?,
            });
            if self.sums_all {
                of_squares.push(RowSum {
                    squares: sum_rows(&squares)?,
                    rows: self.len(),
                });
            }
        }
        let outputs = Outputs {
            y: factors.map_or(Ok(None), |factors| self.normalize(factors, None))?,
            sum: self.adds_residual.then(|| storage(&self.x)).transpose()?,
        };
        Ok((outputs, of_squares))
    }

    fn normalize(
        &self,
        factors: OutputFactors<Tensor>,
        _: Option<&Storage>,
    ) -> Result<Option<Storage>> {
        let mut rows = self.x_tilde.broadcast_mul(factors.inv_rms)?;
        if let Some(weight) = factors.weight {
            rows = rows.broadcast_mul(&Channels::read(weight, &rows)?)?;
        }
        if let Some(bias) = factors.bias {
            rows = rows.broadcast_add(&Channels::read(bias, &rows)?)?;
        }
        storage(&shaped(rows, &self.x)?).map(Some)
    }

    fn backward(
        &self,
        inputs: &BackwardInputs,
        factors: Option<InputFactors<Tensor>>,
        sums: bool,
    ) -> Result<GradientOutputs<Tensor>> {
        let dy = as_rows(inputs.dy)?;
        let sums = match sums {
            true => Some(GradientSums {
                dy: sum_rows(&self.masked(dy.clone())?)?,
                dy_x: sum_rows(&self.masked((&dy * &self.x_tilde)?)?)?,
            }),
            false => None,
        };
        let dx = factors.map(|factors| self.input_gradient(&dy, inputs.dsum, &factors));
        Ok((dx.transpose()?, sums))
    }
}

impl Channels for Tensor {
    fn read(tensor: &Tensor, like: &Self) -> Result<Self> {
        let tensor = tensor.detach().to_dtype(like.dtype())?.flatten_all()?;
        tensor.to_device(like.device())
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

    fn to_tensor(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        // On `device`, because not every one has f64.
        self.to_device(device)?.to_dtype(dtype)
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

    fn scaled_plus(&self, factor: f64, shift: f64) -> Result<Self> {
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
    let by_subtotal = (values.narrow(0, 0, head)?).reshape((subtotals, SUBTOTAL_ROWS, cols))?;
    let total = sum_rows(&by_subtotal.sum(1)?)?;
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
