//! A step on a CPU: a forward and its backward from top to bottom, and the equations of [`Recipe`]
//! on channels as plain loops.
//!
//! One number for each channel, `[C]`, is a `Vec<f64>` here whatever the dtype of the rows. The
//! passes over the rows, in `kernels.rs`, take and give them in the dtype of their sums.

use super::element::{Element, Numbers};
use super::kernels::{self, BackwardSums, Rows};
use super::layout::{channels, matrix, on_cpu, set_channels, storage, with_rows};
use crate::config::{ForwardKind, PhiStep, Recipe};
use crate::device::{Env, Gradients, Nu, Outputs, Pass, Saved, Wanted};
use crate::error::Error;
use candle::{DType, Device, Result, Tensor, Var, D};
use half::{bf16, f16};

/// Runs a forward.
pub(crate) fn forward(pass: &Pass, env: &mut dyn Env) -> Result<(Box<dyn Saved>, Outputs)> {
    match pass.x.dtype() {
        DType::F32 => forward_of::<f32>(pass, env),
        DType::F64 => forward_of::<f64>(pass, env),
        DType::F16 => forward_of::<f16>(pass, env),
        DType::BF16 => forward_of::<bf16>(pass, env),
        other => Err(Error::InputDType(other).into()),
    }
}

/// What a backward needs of its forward.
struct Forwarded {
    /// 1/D.
    inv_rms: Vec<f64>,
    /// The batch's statistics, if the forward was a step with a kept row.
    batch: Option<BatchStatistics>,
}

/// The statistics of a batch, over the rows of all ranks.
struct BatchStatistics {
    /// 1/sqrt(ψ_B² + ε).
    inv_rms: Vec<f64>,
    /// Γ, the mean of X̂².
    gamma: Vec<f64>,
    /// The rows that Γ and Λ are means over.
    rows: f64,
}

/// Sums of x̃² over rows, and their means.
struct MeanSquares {
    sums: Vec<f64>,
    means: Vec<f64>,
    rows: usize,
}

impl MeanSquares {
    fn new(sums: Vec<f64>, rows: usize) -> Self {
        let means = sums.iter().map(|sum| sum / rows as f64).collect();
        Self { sums, means, rows }
    }
}

fn forward_of<T: Element>(pass: &Pass, env: &mut dyn Env) -> Result<(Box<dyn Saved>, Outputs)> {
    let trains = pass.kind.is_training();
    let by_batch = pass.kind == ForwardKind::BatchStatistic;
    let running_inv_rms = match &pass.phi {
        Some(phi) => inverse_roots(&channels(phi)?, pass.eps),
        None => vec![1.; pass.x.dim(D::Minus1)?],
    };
    let (keep, residual) = (pass.keep.as_ref(), pass.residual.as_ref());

    // x + residual, Σ x̃², and y by ψ². The batch's own statistic is known only after the sums.
    let coefficients = (!by_batch).then(|| output_coefficients::<T>(pass, &running_inv_rms));
    let coefficients = coefficients.transpose()?;
    let (y, stream, squares) = with_rows::<T, _>(pass, residual, keep, |rows| {
        let (written, sums) = kernels::forward(rows, coefficients.as_ref(), trains);
        let squares = match &written.stream {
            Some(stream) => rescued(&rows.of_stream(stream), sums),
            None => rescued(rows, sums),
        };
        Ok((written.y, written.stream.map(storage), squares))
    })?;

    let mut forwarded = Forwarded {
        inv_rms: running_inv_rms,
        batch: None,
    };
    if trains {
        let squares = match env.has_ranks() {
            true => exchange_squares(squares, env)?,
            false => squares,
        };
        // Sums over kept rows come first, and the sums that Γ is made of come last.
        if let (Some(kept), Some(over)) = (squares.first(), squares.last()) {
            if kept.rows > 0 {
                let batch_phi = in_range_of::<T>(&kept.means);
                let inv_rms = inverse_roots(&batch_phi, pass.eps);
                env.move_phi(&mut |phi, step| update_phi(pass, phi, step, &batch_phi))?;
                if by_batch {
                    forwarded.inv_rms.clone_from(&inv_rms);
                }
                let gamma = in_range_of::<T>(&over.means)
                    .into_iter()
                    .zip(&forwarded.inv_rms);
                forwarded.batch = Some(BatchStatistics {
                    inv_rms,
                    gamma: gamma.map(|(square, d)| square * d * d).collect(),
                    rows: over.rows as f64,
                });
            }
        }
    }

    // y by the batch's statistic, or by ψ² if no row is kept.
    let y = match y {
        Some(y) => y,
        None => {
            let coefficients = output_coefficients::<T>(pass, &forwarded.inv_rms)?;
            with_rows::<T, _>(pass, None, keep, |rows| match &stream {
                Some(stream) => {
                    let stream = T::cpu_storage_as_slice(on_cpu(stream)?)?;
                    Ok(kernels::normalize(&rows.of_stream(stream), &coefficients))
                }
                None => Ok(kernels::normalize(rows, &coefficients)),
            })?
        }
    };
    let outputs = Outputs {
        y: storage(y),
        stream,
    };
    Ok((Box::new(forwarded), outputs))
}

impl Saved for Forwarded {
    fn backward(
        &self,
        pass: &Pass,
        dy: &Tensor,
        wanted: Wanted,
        env: &mut dyn Env,
    ) -> Result<Gradients> {
        match pass.x.dtype() {
            DType::F32 => self.backward_of::<f32>(pass, dy, wanted, env),
            DType::F64 => self.backward_of::<f64>(pass, dy, wanted, env),
            DType::F16 => self.backward_of::<f16>(pass, dy, wanted, env),
            DType::BF16 => self.backward_of::<bf16>(pass, dy, wanted, env),
            other => Err(Error::InputDType(other).into()),
        }
    }
}

impl Forwarded {
    fn backward_of<T: Element>(
        &self,
        pass: &Pass,
        dy: &Tensor,
        wanted: Wanted,
        env: &mut dyn Env,
    ) -> Result<Gradients> {
        let exact = self.batch.is_some() && pass.is_exact();
        let weight = pass.weight.as_ref().map(channels).transpose()?;
        let weight = weight.as_deref();
        let walk = |coefficients: Option<&[Numbers<T>; 2]>, sums| {
            with_rows::<T, _>(pass, None, pass.backward_keep(), |rows| {
                let (storage, layout) = dy.storage_and_layout();
                Ok(kernels::backward(
                    rows,
                    &matrix(&storage, layout)?,
                    coefficients,
                    sums,
                ))
            })
        };

        // Σ dy x̃, Σ dy, and dx by ν: Eq. 12, or without a correction in evaluation. Under recipe
        // Fairseq ν is the correction of every step. An exact gradient waits for Λ.
        // The factor of the loss is read once: another thread may set it.
        let nu = env.nu();
        let step = nu.map(|nu| (nu.share, nu.loss_scale));
        let coefficients = match wanted.input && !exact {
            true => {
                let nu = nu.map(|nu| running_nu(&nu)).transpose()?;
                Some(self.input_coefficients::<T>(pass, weight, nu.as_deref()))
            }
            false => None,
        };
        let needs_dy_x = self.batch.is_some() || wanted.weight;
        let sums = match (wanted.bias, needs_dy_x) {
            (true, _) => BackwardSums::DyXAndDy,
            (false, true) => BackwardSums::DyX,
            (false, false) => BackwardSums::None,
        };
        let (mut dx, mut dy_x) = match coefficients.is_some() || sums != BackwardSums::None {
            true => walk(coefficients.as_ref(), sums)?,
            false => (None, vec![]),
        };
        let cols = self.inv_rms.len();
        let dbias = dy_x.split_off(dy_x.len().min(cols));
        let dy_x = widened::<T>(&dy_x);

        let mut lambda = None;
        if let Some(batch) = &self.batch {
            let global = match env.has_ranks() {
                true => {
                    let sums = Tensor::from_slice(&dy_x, cols, &Device::Cpu)?;
                    Some(env.exchange(sums)?.to_vec1::<f64>()?)
                }
                false => None,
            };
            let new = self.lambda(global.as_ref().unwrap_or(&dy_x), weight, batch.rows);
            env.move_nu(&mut |ema_gz| match (ema_gz, step) {
                (Some(ema_gz), Some((share, loss_scale))) => {
                    update_nu(pass, ema_gz, batch, &new, share, loss_scale)
                }
                _ => Ok(()),
            })?;
            lambda = Some(new);
        }

        // dx by Λ: Eq. 6.
        if wanted.input && exact {
            let coefficients = self.input_coefficients::<T>(pass, weight, lambda.as_deref());
            (dx, _) = walk(Some(&coefficients), BackwardSums::None)?;
        }
        let dx = dx.map(|dx| Tensor::from_vec(dx, pass.x.shape(), pass.x.device()));
        let gradient = |values: &[f64], of: &Option<Tensor>, wanted: bool| match of {
            Some(of) if wanted => {
                let values = Tensor::from_slice(values, cols, of.device())?;
                values.to_dtype(of.dtype()).map(Some)
            }
            _ => Ok(None),
        };
        let dweight = dy_x.iter().zip(&self.inv_rms).map(|(dy_x, d)| dy_x * d);
        Ok(Gradients {
            input: dx.transpose()?,
            weight: gradient(&dweight.collect::<Vec<_>>(), &pass.weight, wanted.weight)?,
            bias: gradient(&widened::<T>(&dbias), &pass.bias, wanted.bias)?,
        })
    }

    /// Λ, the mean of g X̂, from Σ dy x̃ over the rows of all ranks.
    fn lambda(&self, dy_x: &[f64], weight: Option<&[f64]>, rows: f64) -> Vec<f64> {
        (0..dy_x.len())
            .map(|c| dy_x[c] * self.inv_rms[c] * weight.map_or(1., |weight| weight[c]) / rows)
            .collect()
    }

    /// Gain and decay of `∂L/∂X̃ = gain ⊙ dy − decay ⊙ X̃`. With `g = γ ⊙ dy` each gradient has
    /// this form:
    ///
    /// - an evaluation: `g/D`;
    /// - PN-V, Eq. 6: `(g − Λ X̂)/D`;
    /// - PN, Eq. 12: `(g − ν X̂)/D`. Under recipe Fairseq the divisor is always the batch's, while
    ///   X̂ stays X̃/D.
    fn input_coefficients<T: Element>(
        &self,
        pass: &Pass,
        weight: Option<&[f64]>,
        correction: Option<&[f64]>,
    ) -> [Numbers<T>; 2] {
        let divisor = match &self.batch {
            Some(batch) if pass.recipe == Recipe::Fairseq => &batch.inv_rms,
            _ => &self.inv_rms,
        };
        let (mut gain, mut decay) = (vec![], vec![]);
        for (c, divisor) in divisor.iter().enumerate() {
            let correction = correction.map_or(0., |correction| correction[c]);
            gain.push(divisor * weight.map_or(1., |weight| weight[c]));
            decay.push(correction * divisor * self.inv_rms[c]);
        }
        [gain, decay].map(|coefficients| narrowed::<T>(&coefficients))
    }
}

/// The squares of a forward. A column whose sum overflowed gets a new one that does not, as far as
/// f64 has one.
fn rescued<T: Element>(rows: &Rows<T>, sums: Vec<kernels::SquareSums<T>>) -> Vec<MeanSquares> {
    let mut squares = vec![];
    for (k, sums) in sums.into_iter().enumerate() {
        let mut over = MeanSquares::new(widened::<T>(&sums.squares), sums.rows);
        if over.sums.contains(&f64::INFINITY) {
            let columns: Vec<usize> = (0..over.sums.len())
                .filter(|&c| over.sums[c] == f64::INFINITY)
                .collect();
            // The sums after the first are over all rows.
            let means = kernels::means_of_huge(rows, &columns, |row| k > 0 || rows.keeps(row));
            for (c, mean) in columns.into_iter().zip(means) {
                over.means[c] = mean;
                over.sums[c] = mean * over.rows as f64;
            }
        }
        squares.push(over);
    }
    squares
}

/// Adds the sums of a forward up over the ranks.
fn exchange_squares(local: Vec<MeanSquares>, env: &mut dyn Env) -> Result<Vec<MeanSquares>> {
    let mut message = vec![];
    for squares in &local {
        message.extend(&squares.sums);
        message.push(squares.rows as f64);
    }
    let cols = message.len() / local.len() - 1;
    let count = message.len();
    let global = env.exchange(Tensor::from_vec(message, count, &Device::Cpu)?)?;
    let global = global.to_vec1::<f64>()?;
    Ok((global.chunks(cols + 1))
        .map(|sums| MeanSquares::new(sums[..cols].to_vec(), sums[cols] as usize))
        .collect())
}

/// Gain and shift of `y = gain ⊙ X̃ + shift`: γ/D and β.
fn output_coefficients<T: Element>(pass: &Pass, inv_rms: &[f64]) -> Result<[Numbers<T>; 2]> {
    let mut gain = inv_rms.to_vec();
    if let Some(weight) = &pass.weight {
        for (gain, weight) in gain.iter_mut().zip(channels(weight)?) {
            *gain *= weight;
        }
    }
    let shift = match &pass.bias {
        Some(bias) => channels(bias)?,
        None => vec![0.; gain.len()],
    };
    Ok([gain, shift].map(|coefficients| narrowed::<T>(&coefficients)))
}

/// 1/D = 1/sqrt(ψ² + ε). Where ψ² has overflowed it is NaN: 0 would make an output of 0, which
/// nobody would notice.
fn inverse_roots(phi: &[f64], eps: f64) -> Vec<f64> {
    let inverse_root = |phi: &f64| match phi + eps {
        square if square.is_finite() => square.sqrt().recip(),
        _ => f64::NAN,
    };
    phi.iter().map(inverse_root).collect()
}

/// Moves ψ² by Eq. 10, or by the cumulative mean of the warm-up.
fn update_phi(pass: &Pass, phi: &Var, step: &PhiStep, batch_phi: &[f64]) -> Result<()> {
    let mut values = channels(phi)?;
    for (phi_c, batch) in values.iter_mut().zip(batch_phi) {
        let mut next = *phi_c;
        if let Some(shares) = step.cumulative {
            // A value that is left out may be anything.
            let old = if shares.old == 0. {
                0.
            } else {
                shares.old * next
            };
            next = old + shares.new * batch;
        }
        if let Some(shares) = step.moving {
            next = shares.old * next + shares.new * batch;
        }
        if holds(phi, next) || !pass.has_guard() {
            *phi_c = next;
        }
    }
    set_channels(phi, &values)
}

/// Moves ν by Eq. 13 divided by 1−α_b, in the variable that a checkpoint stores:
/// `ema_gz ← (1 − (1−α_b)Γ) ema_gz + Λ`.
fn update_nu(
    pass: &Pass,
    ema_gz: &Var,
    batch: &BatchStatistics,
    lambda: &[f64],
    share: f64,
    loss_scale: f64,
) -> Result<()> {
    let unscale = loss_scale.recip();
    let mut values = channels(ema_gz)?;
    for (c, nu) in values.iter_mut().enumerate() {
        let gamma = batch.gamma[c];
        let mut decay = 1. - share * gamma;
        // A negative factor would turn ν's sign at each step: it is clamped.
        if pass.has_guard() && decay < 0. {
            decay = 0.;
        }
        let next = decay * *nu + unscale * lambda[c];
        // Γ is checked too: the clamp would turn an infinite Γ into a finite factor.
        if holds(ema_gz, gamma) && holds(ema_gz, next) || !pass.has_guard() {
            *nu = next;
        }
    }
    set_channels(ema_gz, &values)
}

/// ν, times the factor of the loss.
fn running_nu(nu: &Nu) -> Result<Vec<f64>> {
    let scale = nu.share * nu.loss_scale;
    Ok((channels(nu.ema_gz)?.into_iter())
        .map(|ema_gz| ema_gz * scale)
        .collect())
}

/// `true` if `value` is finite in the dtype of a variable of the state.
fn holds(var: &Var, value: f64) -> bool {
    match var.dtype() {
        DType::F64 => value.is_finite(),
        _ => (value as f32).is_finite(),
    }
}

/// Numbers of channels in the dtype of the sums of `T`.
fn narrowed<T: Element>(values: &[f64]) -> Numbers<T> {
    values
        .iter()
        .map(|&value| candle::WithDType::from_f64(value))
        .collect()
}

/// Numbers of channels in f64.
fn widened<T: Element>(values: &[T::Acc]) -> Vec<f64> {
    values
        .iter()
        .map(|&value| candle::WithDType::to_f64(value))
        .collect()
}

/// Infinity in place of a number beyond the dtype of the sums of `T`. On every device a statistic
/// is as large as that dtype allows.
fn in_range_of<T: Element>(values: &[f64]) -> Vec<f64> {
    let most: f64 = candle::WithDType::to_f64(<T::Acc as num_traits::Float>::max_value());
    let in_range = |&value: &f64| if value > most { f64::INFINITY } else { value };
    values.iter().map(in_range).collect()
}
