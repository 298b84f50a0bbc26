//! A step in candle's own operations, on devices that have no kernels here: Metal above all.
//!
//! Rows are `[rows, C]`, channels `[C]` and counts of rows `[1]`, in the dtype of the sums and
//! without a graph. Each equation takes a few of candle's operations, so this device is many times
//! slower than kernels. The host waits for the device only to exchange sums with other ranks. It
//! does not wait for the contents of a mask, so a batch without a kept row counts as a step, as on
//! a GPU.
//!
//! So the equations on channels are written here once more, though `cpu/step.rs` has them as loops.
//! To share those, Σ x̃² and Σ dy x̃ would have to come to the host in each training forward and
//! backward. On Metal each such read ends the queue of commands and waits for it, 48 times a step in
//! a model of 24 normalizations.

use super::pass::{Pass, RowNorm};
use super::{Env, Gradients, Nu, Outputs, Record, sums_dtype};
use crate::config::{AverageWeights, ForwardKind, PhiStep};
use candle::{D, DType, Device, Result, Storage, Tensor, Var};

/// Runs a forward.
pub(super) fn forward(pass: &mut Pass, env: &mut dyn Env) -> Result<(Box<dyn Record>, Outputs)> {
    pass.lay_out(copied)?;
    let pass = &*pass;
    // x + residual, and X̃.
    let sum = match pass.residual() {
        Some(residual) => Some(add_rounded(&pass.x, residual)?),
        None => None,
    };
    let residual_out = sum.as_ref().map(storage).transpose()?;
    let x = sum.as_ref().unwrap_or(pass.x());
    let rows = Rows::new(x, pass, pass.keep.as_ref())?;
    let running_inv_d = match &pass.phi {
        Some(phi) => inverse_root(&rows.channels(phi)?, pass.eps)?,
        None => Tensor::ones(rows.cols(), rows.x_tilde.dtype(), rows.x_tilde.device())?,
    };

    let mut forwarded = Forwarded {
        inv_d: running_inv_d,
        batch: None,
    };

    // Y by ψ² comes before ψ² moves, because it can fail. The batch's own statistic is known only
    // after the sums.
    let by_batch = pass.kind == ForwardKind::BatchStatistic;
    let mut y = match by_batch {
        false => Some(rows.output(pass, &forwarded.inv_d)?),
        true => None,
    };
    let squares = match pass.kind.is_training() {
        true => batch_squares(&rows, pass, env)?,
        false => None,
    };
    if let Some(squares) = squares {
        // ψ_B², 1/D and Γ. Without a kept row, ψ² takes the place of ψ_B², and Γ is 0.
        let has_rows = squares.kept.rows.gt(0f64)?.broadcast_as(rows.cols())?;
        let batch_phi = squares.kept.mean()?;
        let batch_phi = match &pass.phi {
            Some(phi) => has_rows.where_cond(&batch_phi, &rows.channels(phi)?)?,
            None => batch_phi,
        };
        let inv_batch_rms = inverse_root(&batch_phi, pass.eps)?;
        if by_batch {
            forwarded.inv_d = inv_batch_rms.clone();
            y = Some(rows.output(pass, &forwarded.inv_d)?);
        }
        let of_gamma = squares.all.unwrap_or(squares.kept);
        let gamma = ((of_gamma.mean()? * &forwarded.inv_d)? * &forwarded.inv_d)?;
        let batch = BatchStatistics {
            inv_batch_rms,
            gamma: has_rows.where_cond(&gamma, &gamma.zeros_like()?)?,
            rows: of_gamma.rows,
            has_rows,
        };
        env.move_phi(&mut |phi, step| update_phi(pass, phi, step, &batch_phi, &batch.has_rows))?;
        forwarded.batch = Some(batch);
    }
    let y = match y {
        Some(y) => y,
        // There is no row at all.
        None => rows.output(pass, &forwarded.inv_d)?,
    };
    Ok((Box::new(forwarded), Outputs { y, residual_out }))
}

/// Kept from a forward for its backward.
struct Forwarded {
    /// 1/D, `[C]`.
    inv_d: Tensor,
    /// The batch's statistics in a training step.
    batch: Option<BatchStatistics>,
}

/// The statistics of a batch, over the rows of all ranks.
struct BatchStatistics {
    /// 1/sqrt(ψ_B² + ε), `[C]`.
    inv_batch_rms: Tensor,
    /// Γ, the mean of X̂², `[C]`.
    gamma: Tensor,
    /// The rows that Γ and Λ are means over, `[1]`.
    rows: Tensor,
    /// 1 if the batch has a kept row, else 0, `[C]`.
    has_rows: Tensor,
}

impl Record for Forwarded {
    fn backward(&self, pass: &Pass, dy: &Tensor, env: &mut dyn Env) -> Result<Gradients> {
        let (dy, wanted) = (&*pass.lay_out_dy(dy, copied)?, pass.wanted);
        let rows = Rows::new(&pass.x, pass, pass.backward_keep())?;
        let weight = rows.weight(pass)?;
        let exact = self.batch.is_some() && pass.recipe.is_exact(pass.kind);
        let dy = as_rows(dy)?;

        // Σ dy x̃ over this rank's rows, and Λ over all.
        let dy_x = match self.batch.is_some() || wanted.weight {
            true => Some(sum_rows(&rows.masked((&dy * &rows.x_tilde)?)?)?),
            false => None,
        };
        let like = |of: Option<&Tensor>, gradient: Tensor| match of {
            Some(of) => gradient.to_dtype(of.dtype()).map(Some),
            None => Ok(None),
        };
        let dweight = match &dy_x {
            Some(dy_x) if wanted.weight => like(pass.weight(), (dy_x * &self.inv_d)?)?,
            _ => None,
        };
        let dbias = match wanted.bias {
            true => like(pass.bias(), sum_rows(&rows.masked(dy.clone())?)?)?,
            false => None,
        };
        // ∂L/∂x by ν, or in an evaluation without a correction. An exact gradient waits for Λ. All
        // gradients come before ν moves, because they can fail.
        let mut input = match wanted.input && !exact {
            true => {
                let nu = env.nu().map(|nu| running_nu(&rows, &nu)).transpose()?;
                Some(self.input_gradient(pass, &rows, &dy, weight.as_ref(), nu)?)
            }
            false => None,
        };
        if let (Some(batch), Some(dy_x)) = (&self.batch, &dy_x) {
            let mut global = dy_x.clone();
            if env.has_ranks() {
                let sums = to_host(dy_x)?;
                global = rows.read_sums(&env.exchange(sums)?)?;
            }
            let mut lambda = (global * &self.inv_d)?;
            if let Some(weight) = &weight {
                lambda = (lambda * weight)?;
            }
            let lambda = lambda.broadcast_div(&batch.rows)?;
            if wanted.input && exact {
                let weight = weight.as_ref();
                let lambda = Some(lambda.clone());
                input = Some(self.input_gradient(pass, &rows, &dy, weight, lambda)?);
            }
            env.move_nu(&mut |nu| match nu {
                Some(nu) => update_nu(pass, nu, batch, &lambda),
                None => Ok(()),
            })?;
        }
        Ok(Gradients {
            input,
            weight: dweight,
            bias: dbias,
        })
    }
}

impl Forwarded {
    /// `∂L/∂X̃ = gain ⊙ dy − decay ⊙ X̃`, and ∂L/∂x from it. With g = γ ⊙ dy it is g/D in an
    /// evaluation, (g − Λ X̂)/D in PN-V (Eq. 6), and (g − ν X̂)/D in PN (Eq. 12). Under recipe
    /// Fairseq the divisor is always the batch's, while X̂ stays X̃/D.
    fn input_gradient(
        &self,
        pass: &Pass,
        rows: &Rows,
        dy: &Tensor,
        weight: Option<&Tensor>,
        correction: Option<Tensor>,
    ) -> Result<Tensor> {
        let divisor = match &self.batch {
            Some(batch) if pass.recipe.divides_by_batch() => &batch.inv_batch_rms,
            _ => &self.inv_d,
        };
        let gain = match weight {
            Some(weight) => (divisor * weight)?,
            None => divisor.clone(),
        };
        let mut dx_tilde = dy.broadcast_mul(&gain)?;
        if let (Some(batch), Some(correction)) = (&self.batch, correction) {
            // Without a kept row the forward was an evaluation.
            let correction = (batch.has_rows).where_cond(&correction, &correction.zeros_like()?)?;
            let decay = ((correction * divisor)? * &self.inv_d)?;
            dx_tilde = (dx_tilde - rows.x_tilde.broadcast_mul(&decay)?)?;
        }
        shaped(
            rows.masked(rows.through_group_scaling(pass, dx_tilde)?)?,
            &pass.x,
        )
    }
}

/// Moves ψ² by Eq. 10, or by the cumulative mean of the warm-up.
fn update_phi(
    pass: &Pass,
    phi: &Var,
    step: &PhiStep,
    batch_phi: &Tensor,
    has_rows: &Tensor,
) -> Result<()> {
    let mut next = phi.as_detached_tensor().flatten_all()?;
    next = next.to_dtype(batch_phi.dtype())?;
    for shares in [step.cumulative, step.moving].into_iter().flatten() {
        next = average(&next, batch_phi, shares)?;
    }
    store(pass, phi, &next, &[&next], has_rows)
}

/// The average of ψ² and ψ_B², by the distance from the one with the larger share. The two shares
/// rounded to f32 would have a sum beside 1, and with α near 1 they would move ψ² away from a
/// constant ψ_B².
fn average(old: &Tensor, new: &Tensor, shares: AverageWeights) -> Result<Tensor> {
    if shares.old == 0. {
        // A value that is left out may be anything.
        return Ok(new.clone());
    }
    let (near, far, share) = match shares.old < shares.new {
        true => (new, old, shares.old),
        false => (old, new, shares.new),
    };
    near + ((far - near)? * share)?
}

/// Moves ν by Eq. 13 divided by 1−α_b, in the variable that a checkpoint stores:
/// `ema_gz ← (1 − (1−α_b)Γ) ema_gz + Λ`.
fn update_nu(pass: &Pass, nu: &Nu, batch: &BatchStatistics, lambda: &Tensor) -> Result<()> {
    let mut fading = (&batch.gamma * nu.share)?;
    if pass.recipe.is_guarded() {
        // Clamped to 1: beyond it ν would change its sign at each step.
        // `Tensor::minimum` is generic over its argument, so that candle's loops over two tensors
        // would be compiled into this crate for each dtype.
        fading = fading.gt(1f64)?.where_cond(&fading.ones_like()?, &fading)?;
    }
    let old = nu.ema_gz.as_detached_tensor().flatten_all()?;
    let old = old.to_dtype(fading.dtype())?;
    // `(1 − f) old` would round `1 − f` once for all steps, which biases ν. This does not.
    let kept = (&old - (fading * &old)?)?;
    let next = (kept + (lambda * nu.loss_scale.recip())?)?;
    // Γ is checked too: the clamp would turn an infinite Γ into a finite factor.
    let guards = [&next, &batch.gamma];
    store(pass, nu.ema_gz, &next, &guards, &batch.has_rows)
}

/// Sets a variable of the state to `next`. A channel keeps its value if the batch has no row, and
/// with recipe Paper's guard where one of `guards` is not finite in the dtype of the variable.
fn store(
    pass: &Pass,
    var: &Var,
    next: &Tensor,
    guards: &[&Tensor],
    has_rows: &Tensor,
) -> Result<()> {
    let old = var.as_detached_tensor().flatten_all()?;
    let mut new = has_rows.where_cond(&next.to_dtype(var.dtype())?, &old)?;
    for guard in guards.iter().filter(|_| pass.recipe.is_guarded()) {
        new = is_finite(&guard.to_dtype(var.dtype())?)?.where_cond(&new, &old)?;
    }
    var.set(&new.reshape(var.shape())?)
}

/// ν, times the factor of the loss.
fn running_nu(rows: &Rows, nu: &Nu) -> Result<Tensor> {
    rows.channels(nu.ema_gz)? * nu.scale()
}

/// Sums over rows.
struct SquareSums {
    /// Σ x̃², `[C]`.
    squares: Tensor,
    /// The number of rows, `[1]`.
    rows: Tensor,
}

impl SquareSums {
    fn mean(&self) -> Result<Tensor> {
        self.squares.broadcast_div(&self.rows)
    }
}

/// The sums of a batch, over the rows of all ranks.
struct BatchSquares {
    /// Over the kept rows: ψ_B² is their mean.
    kept: SquareSums,
    /// Over all rows, if Γ is a mean over these.
    all: Option<SquareSums>,
}

/// The sums of a batch; `None` without rows, unless other ranks may have some.
fn batch_squares(rows: &Rows, pass: &Pass, env: &mut dyn Env) -> Result<Option<BatchSquares>> {
    if rows.len() == 0 && !env.has_ranks() {
        return Ok(None);
    }
    let squares = rows.x_tilde.sqr()?;
    let mut kept = SquareSums {
        squares: sum_rows(&rows.masked(squares.clone())?)?,
        rows: rows.kept()?,
    };
    let mut all = match pass.recipe.square_sums() > 1 {
        true => Some(SquareSums {
            squares: sum_rows(&squares)?,
            rows: rows.count()?,
        }),
        false => None,
    };
    if env.has_ranks() {
        let mut sums: Vec<_> = [Some(&mut kept), all.as_mut()]
            .into_iter()
            .flatten()
            .collect();
        let mut message = vec![];
        for sums in &sums {
            message.extend([to_host(&sums.squares)?, to_host(&sums.rows)?]);
        }
        let global = env.exchange(Tensor::cat(&message, 0)?)?;
        let global = global.reshape((sums.len(), rows.cols() + 1))?;
        for (k, sums) in sums.iter_mut().enumerate() {
            let global = global.get(k)?;
            sums.squares = rows.read_sums(&global.narrow(0, 0, rows.cols())?)?;
            sums.rows = rows.read_sums(&global.narrow(0, rows.cols(), 1)?)?;
        }
    }
    Ok(Some(BatchSquares { kept, all }))
}

/// Sums in f64 on the host.
fn to_host(sums: &Tensor) -> Result<Tensor> {
    sums.to_device(&Device::Cpu)?.to_dtype(DType::F64)
}

/// Rows after the group scaling.
struct Rows {
    /// X̃, `[rows, C]`.
    x_tilde: Tensor,
    /// r = x̃/x of each group, `[rows, G, 1]`; `None` without group scaling.
    group_rms_inv: Option<Tensor>,
    /// The mask, `[rows, C]`; `None` without a mask or without rows.
    keep: Option<Tensor>,
}

impl Rows {
    fn new(x: &Tensor, pass: &Pass, keep: Option<&Tensor>) -> Result<Self> {
        let rows = as_rows(x)?;
        let keep = match keep {
            // candle cannot read an empty view that begins past the end of its storage.
            Some(keep) if rows.dims()[0] > 0 => {
                Some(keep.reshape(((), 1))?.broadcast_as(rows.shape())?)
            }
            _ => None,
        };
        let scaled = |groups: Tensor, eps| -> Result<_> {
            let group_rms_inv = group_rms_inv(&groups, eps)?;
            let x_tilde = groups.broadcast_mul(&group_rms_inv)?.flatten_from(1)?;
            Ok((x_tilde, Some(group_rms_inv)))
        };
        let (x_tilde, group_rms_inv) = match pass.norm {
            RowNorm::None => (rows, None),
            RowNorm::Groups { count, eps } => scaled(grouped(&rows, count)?, eps)?,
            RowNorm::Centred { eps } => scaled(centred(&grouped(&rows, 1)?)?, eps)?,
        };
        Ok(Self {
            x_tilde,
            group_rms_inv,
            keep,
        })
    }

    fn len(&self) -> usize {
        self.x_tilde.dims()[0]
    }

    fn cols(&self) -> usize {
        self.x_tilde.dims()[1]
    }

    /// The number of rows, `[1]`.
    fn count(&self) -> Result<Tensor> {
        let count = Tensor::new(&[self.len() as f64], &Device::Cpu)?;
        let count = count.to_dtype(self.x_tilde.dtype())?;
        count.to_device(self.x_tilde.device())
    }

    /// The number of rows that are not padding, `[1]`.
    fn kept(&self) -> Result<Tensor> {
        match &self.keep {
            Some(keep) => {
                // Counted in integers, because f32 is exact only up to 2²⁴.
                let keep = keep.narrow(1, 0, 1)?.ne(0u8)?.to_dtype(DType::U32)?;
                keep.sum_all()?.reshape(1)?.to_dtype(self.x_tilde.dtype())
            }
            None => self.count(),
        }
    }

    /// `Y = γ ⊙ X̃/D + β`, in the shape and dtype of the input.
    fn output(&self, pass: &Pass, inv_d: &Tensor) -> Result<Storage> {
        let mut y = self.x_tilde.broadcast_mul(inv_d)?;
        if let Some(weight) = self.weight(pass)? {
            y = y.broadcast_mul(&weight)?;
        }
        if let Some(bias) = pass.bias() {
            y = y.broadcast_add(&self.channels(bias)?)?;
        }
        storage(&shaped(y, &pass.x)?)
    }

    /// `values`, `[rows, C]`, with 0 in padded rows, whatever they hold.
    fn masked(&self, values: Tensor) -> Result<Tensor> {
        match &self.keep {
            Some(keep) => keep.where_cond(&values, &values.zeros_like()?),
            None => Ok(values),
        }
    }

    /// A parameter or a variable of the state, `[C]`, in the dtype of the sums on the device of the
    /// rows.
    fn channels(&self, tensor: &Tensor) -> Result<Tensor> {
        let tensor = tensor.detach().to_dtype(self.x_tilde.dtype())?;
        tensor.flatten_all()?.to_device(self.x_tilde.device())
    }

    /// γ, `[C]`.
    fn weight(&self, pass: &Pass) -> Result<Option<Tensor>> {
        match pass.affine() {
            Some(affine) if affine.offset == 0. => Ok(Some(self.channels(&affine.weight)?)),
            Some(affine) => (self.channels(&affine.weight)? + affine.offset).map(Some),
            None => Ok(None),
        }
    }

    /// Sums on the host, in f64, as the dtype of the sums on the device of the rows.
    fn read_sums(&self, sums: &Tensor) -> Result<Tensor> {
        // Converted on the host, because not every device has f64.
        let sums = sums.to_dtype(self.x_tilde.dtype())?;
        sums.to_device(self.x_tilde.device())
    }

    /// `∂L/∂x` from `∂L/∂X̃`: `r (∂L/∂x̃ − x̃ · mean_group(∂L/∂x̃ ⊙ x̃))`, in LayerNorm minus
    /// `r · mean_group(∂L/∂x̃)`.
    fn through_group_scaling(&self, pass: &Pass, dx_tilde: Tensor) -> Result<Tensor> {
        let Some(group_rms_inv) = &self.group_rms_inv else {
            return Ok(dx_tilde);
        };
        let groups = group_rms_inv.dim(1)?;
        let (mut dx_tilde, x_tilde) =
            (grouped(&dx_tilde, groups)?, grouped(&self.x_tilde, groups)?);
        let mean = mean_of_groups(&(&dx_tilde * &x_tilde)?)?;
        if let RowNorm::Centred { .. } = pass.norm {
            dx_tilde = dx_tilde.broadcast_sub(&mean_of_groups(&dx_tilde)?)?;
        }
        let dx = (dx_tilde - x_tilde.broadcast_mul(&mean)?)?;
        dx.broadcast_mul(group_rms_inv)?.flatten_from(1)
    }
}

/// A copy of rows that are not contiguous, or that are none. candle panics in an operation on a view
/// without elements that begins past the end of its storage.
fn copied(rows: &Tensor) -> Result<Option<Tensor>> {
    match rows.is_contiguous() {
        _ if rows.elem_count() == 0 => {
            Tensor::zeros(rows.shape(), rows.dtype(), rows.device()).map(Some)
        }
        true => Ok(None),
        false => rows.detach().contiguous().map(Some),
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

/// Subtracts the mean from each group.
///
/// The first mean is the group's first value plus the mean of the distances to it, so that equal
/// values leave zeros. A second mean, of the deviations, corrects its rounding.
/// Distances are halved and terms divided before they are added, so that nothing overflows
/// unless a distance to the mean does.
fn centred(groups: &Tensor) -> Result<Tensor> {
    let share = 1. / groups.dim(D::Minus1)? as f64;
    let mean = |x: &Tensor, share: f64| sum_of_groups(&(x * share)?);
    let first = groups.narrow(D::Minus1, 0, 1)?;
    let half_distances = (groups * 0.5)?.broadcast_sub(&(&first * 0.5)?)?;
    let distances = groups.broadcast_sub(&(first + mean(&half_distances, 2. * share)?)?)?;
    distances.broadcast_sub(&mean(&distances, share)?)
}

/// r of each group of rows, `[rows, G, 1]`.
fn group_rms_inv(x: &Tensor, eps: f64) -> Result<Tensor> {
    let (rows, groups, _) = x.dims3()?;
    if rows == 0 {
        return Tensor::zeros((0, groups, 1), x.dtype(), x.device());
    }
    let squares = mean_of_groups(&x.sqr()?)?;
    let usual = squares.affine(1., eps)?.sqrt()?.recip()?;
    // If squares overflow, or do with ε, x and √ε are first divided by the largest magnitude of x.
    let largest = x.abs()?.max_keepdim(D::Minus1)?;
    let ratios = mean_of_groups(&x.broadcast_div(&largest)?.sqr()?)?;
    let ratio = (largest.recip()? * eps.sqrt())?;
    let scaled = ((ratios + ratio.sqr()?)?.sqrt()? * largest)?.recip()?;
    is_finite(&(squares + eps)?)?.where_cond(&usual, &scaled)
}

/// The mean of each group, `[rows, G, 1]`.
fn mean_of_groups(values: &Tensor) -> Result<Tensor> {
    sum_of_groups(values)? / values.dim(D::Minus1)? as f64
}

/// Columns that are added up before they join a longer sum, which on a CPU is a sum of 32 terms for
/// each lane of candle's vectors.
const SUBTOTAL_COLUMNS: usize = 1024;

/// The sum of each group, `[rows, G, 1]`.
fn sum_of_groups(values: &Tensor) -> Result<Tensor> {
    let (rows, groups, cols) = values.dims3()?;
    if cols <= SUBTOTAL_COLUMNS {
        return values.sum_keepdim(D::Minus1);
    }
    let (subtotals, tail) = (cols / SUBTOTAL_COLUMNS, cols % SUBTOTAL_COLUMNS);
    let head = values.narrow(D::Minus1, 0, cols - tail)?;
    let by_subtotal = head.reshape((rows, groups, subtotals, SUBTOTAL_COLUMNS))?;
    let total = sum_of_groups(&by_subtotal.sum(D::Minus1)?)?;
    match tail {
        0 => Ok(total),
        _ => total + sum_of_groups(&values.narrow(D::Minus1, cols - tail, tail)?)?,
    }
}

/// `1/sqrt(phi + ε)`. Where phi has overflowed it is NaN: 0 would make an output of 0, which nobody
/// would notice.
fn inverse_root(phi: &Tensor, eps: f64) -> Result<Tensor> {
    let square = phi.affine(1., eps)?;
    // 0 where the square is finite, and NaN elsewhere.
    let check = (&square * 0.)?;
    square.sqrt()?.recip()? + check
}

/// 1 where a value is finite, else 0.
fn is_finite(values: &Tensor) -> Result<Tensor> {
    (values * 0.)?.eq(0f64)
}

/// `x + residual`, in the dtype of `x`.
fn add_rounded(x: &Tensor, residual: &Tensor) -> Result<Tensor> {
    // Rounded once, as kernels do: candle's own sum may flush the smallest halves to 0.
    let sums = sums_dtype(x.dtype());
    let [wide, residual] = [x, residual].map(|rows| rows.detach().to_dtype(sums));
    (wide? + residual?)?.to_dtype(x.dtype())
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
