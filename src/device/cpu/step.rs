//! A step on a CPU: a forward and its backward from top to bottom, and the equations of `Recipe`
//! on channels.
//!
//! [`update_phi`] and [`update_nu`] are loops over channels, to be read beside the functions of the
//! same names in `kernels/power_norm.cu`. Everything that a row needs of a channel is folded into
//! two coefficients ([`output_coefficients`], [`Forwarded::input_coefficients`]). LayerNorm, RMSNorm and
//! group scaling have no statistics of channels: D is 1, and no value of a channel passes through here.
//!
//! With C = 1, ψ² = 4, γ = 3, β = 1 and no group scaling, D is 2 if ε is ignored, so the output of
//! x = 6 is γ x/D + β = 1.5 · 6 + 1 = 10. A batch [6, 2] has ψ_B² = 20, and with α_f = 0.9 moves ψ²
//! to 0.9 · 4 + 0.1 · 20 = 5.6. Γ, the mean of X̂², is 20/4 = 5.
//!
//! A value for each channel, `[C]`, is a `Vec<f64>` here whatever the dtype of the rows, which only
//! `rows.rs` knows.

use super::convert::overflowed;
use super::layout::{channels, copied, set_channels};
use super::row::BackwardSums;
use super::rows::{self, BatchSquares, Coefficients, MeanSquares};
use crate::config::{ForwardKind, PhiStep};
use crate::device::pass::{Affine, Pass, RowNorm};
use crate::device::{Env, Gradients, Nu, Outputs, Record, sums_dtype};
use candle::op::BackpropOp;
use candle::{DType, Device, Result, Storage, Tensor, Var};

/// Kept from a forward of PowerNorm for its backward.
struct Forwarded {
    /// 1/D.
    inv_d: Vec<f64>,
    /// The batch's statistics; `None` unless the forward was a step with a kept row.
    batch: Option<BatchStatistics>,
}

/// The statistics of a batch, over the rows of all ranks.
struct BatchStatistics {
    /// 1/sqrt(ψ_B² + ε).
    inv_batch_rms: Vec<f64>,
    /// Γ, the mean of X̂².
    gamma: Vec<f64>,
    /// The number of rows that Γ and Λ are means over.
    rows: f64,
}

/// The outputs of a forward that moves nothing.
pub(in crate::device) fn normalize(pass: &mut Pass) -> Result<Outputs> {
    if pass.phi.is_some() {
        return Ok(by_statistic(pass)?.1);
    }
    pass.lay_out(copied)?;
    rows::normalize(pass, None, &Coefficients::Parameters)
}

/// The same, and what a backward needs.
pub(in crate::device) fn evaluate(pass: &mut Pass) -> Result<(Box<dyn Record>, Outputs)> {
    if pass.phi.is_none() {
        return Ok((Box::new(Alone), normalize(pass)?));
    }
    let (forwarded, outputs) = by_statistic(pass)?;
    Ok((Box::new(forwarded), outputs))
}

/// An evaluation of PowerNorm.
fn by_statistic(pass: &mut Pass) -> Result<(Forwarded, Outputs)> {
    pass.lay_out(copied)?;
    let Some(phi) = &pass.phi else {
        unreachable!("an evaluation of PowerNorm has ψ²")
    };
    let inv_d = inverse_roots(&channels(phi)?, pass.eps);
    let coefficients = output_coefficients(pass, &inv_d)?;
    let outputs = rows::normalize(pass, None, &coefficients)?;
    Ok((Forwarded { inv_d, batch: None }, outputs))
}

/// The record of rows that are normalized by themselves alone: D is 1.
struct Alone;

impl Record for Alone {
    fn backward(&self, pass: &Pass, dy: &Tensor, _: &mut dyn Env) -> Result<Gradients> {
        let (dy, wanted) = (&*pass.lay_out_dy(dy, copied)?, pass.wanted);
        let sums = sums_for(wanted.weight, wanted.bias);
        // LayerNorm's rows have no sums without dx.
        let is_centred = matches!(pass.norm, RowNorm::Centred { .. });
        let needs_dx = wanted.input || (is_centred && sums != BackwardSums::None);
        let coefficients = needs_dx.then_some(&Coefficients::Parameters);
        let (dx, parameter_gradients) = rows::backward(pass, dy, coefficients, sums)?;
        gradients(pass, dx, parameter_gradients)
    }
}

/// The sums of a backward that needs Σ dy x̃ if `dy_x`, and Σ dy if `dy`.
fn sums_for(dy_x: bool, dy: bool) -> BackwardSums {
    match (dy, dy_x) {
        (true, _) => BackwardSums::DyXAndDy,
        (false, true) => BackwardSums::DyX,
        (false, false) => BackwardSums::None,
    }
}

/// Gradients that are wanted, from those of the rows, the weight and the bias.
fn gradients(
    pass: &Pass,
    dx: Option<Storage>,
    [dweight, dbias]: [Vec<f64>; 2],
) -> Result<Gradients> {
    let wanted = pass.wanted;
    let gradient = |values: &[f64], of: Option<&Tensor>, wanted: bool| match of {
        Some(of) if wanted => {
            let values = Tensor::from_slice(values, pass.cols(), of.device())?;
            // From f64 to half precision at once, candle drops bits that decide a tie.
            let values = values.to_dtype(sums_dtype(pass.x.dtype()))?;
            values.to_dtype(of.dtype()).map(Some)
        }
        _ => Ok(None),
    };
    let dx = dx.filter(|_| wanted.input);
    Ok(Gradients {
        input: dx.map(|dx| Tensor::from_storage(dx, pass.x.shape(), BackpropOp::none(), false)),
        weight: gradient(&dweight, pass.weight(), wanted.weight)?,
        bias: gradient(&dbias, pass.bias(), wanted.bias)?,
    })
}

/// Runs a training forward.
pub(in crate::device) fn forward(
    pass: &mut Pass,
    env: &mut dyn Env,
) -> Result<(Box<dyn Record>, Outputs)> {
    pass.lay_out(copied)?;
    let by_batch = pass.kind == ForwardKind::BatchStatistic;
    let Some(phi) = &pass.phi else {
        unreachable!("a training forward has ψ²")
    };
    let mut forwarded = Forwarded {
        inv_d: inverse_roots(&channels(phi)?, pass.eps),
        batch: None,
    };

    // x + residual, Σ x̃², and y if ψ² normalizes. The batch's own statistic is known only after
    // the sums, so y has to wait for it.
    let coefficients = match by_batch {
        true => None,
        false => Some(output_coefficients(pass, &forwarded.inv_d)?),
    };
    let walked = rows::forward(pass, coefficients.as_ref())?;

    // ψ_B², 1/D and Γ, over the rows of all ranks.
    let mut batch_phi = None;
    if let Some(squares) = walked.squares {
        let squares = match env.has_ranks() {
            true => exchange_squares(squares, env)?,
            false => squares,
        };
        if squares.kept.rows > 0 {
            let dtype = sums_dtype(pass.x.dtype());
            let phi = overflowed(&squares.kept.means, dtype);
            let inv_batch_rms = inverse_roots(&phi, pass.eps);
            if by_batch {
                forwarded.inv_d.clone_from(&inv_batch_rms);
            }
            let mut gamma = overflowed(&squares.for_gamma().means, dtype);
            for (gamma, d) in gamma.iter_mut().zip(&forwarded.inv_d) {
                *gamma = *gamma * d * d;
            }
            forwarded.batch = Some(BatchStatistics {
                inv_batch_rms,
                gamma,
                rows: squares.for_gamma().rows as f64,
            });
            batch_phi = Some(phi);
        }
    }

    // y with the batch's statistic, or with ψ² if no row is kept.
    let residual_out = walked.residual_out;
    let y = match walked.y {
        Some(y) => y,
        None => {
            let coefficients = output_coefficients(pass, &forwarded.inv_d)?;
            rows::normalize(pass, residual_out.as_ref(), &coefficients)?.y
        }
    };

    // ψ² moves last, because what comes before it can fail.
    if let Some(batch_phi) = batch_phi {
        env.move_phi(&mut |phi, step| update_phi(pass, phi, step, &batch_phi))?;
    }
    Ok((Box::new(forwarded), Outputs { y, residual_out }))
}

impl Record for Forwarded {
    fn backward(&self, pass: &Pass, dy: &Tensor, env: &mut dyn Env) -> Result<Gradients> {
        let (dy, wanted) = (&*pass.lay_out_dy(dy, copied)?, pass.wanted);
        let exact = self.batch.is_some() && pass.recipe.is_exact(pass.kind);
        let weight = pass.affine().map(weights).transpose()?;
        let weight = weight.as_deref();

        // Σ dy x̃, Σ dy, and dx with ν (Eq. 12), or without a correction in evaluation. Under
        // recipe Fairseq every step is corrected with ν. An exact gradient has to wait for Λ.
        let sums = sums_for(self.batch.is_some() || wanted.weight, wanted.bias);
        let coefficients = match wanted.input && !exact {
            true => {
                let nu = env.nu().map(|nu| running_nu(&nu)).transpose()?;
                Some(self.input_coefficients(pass, weight, nu.as_deref()))
            }
            false => None,
        };
        let (mut dx, [mut dy_x, dbias]) = rows::backward(pass, dy, coefficients.as_ref(), sums)?;

        let mut lambda = None;
        if let Some(batch) = &self.batch {
            let global = match env.has_ranks() {
                true => {
                    let sums = Tensor::from_slice(&dy_x, pass.cols(), &Device::Cpu)?;
                    Some(env.exchange(sums)?.to_vec1::<f64>()?)
                }
                false => None,
            };
            let new = self.lambda(global.as_ref().unwrap_or(&dy_x), weight, batch.rows);
            env.move_nu(&mut |nu| match nu {
                Some(nu) => update_nu(pass, nu, batch, &new),
                None => Ok(()),
            })?;
            lambda = Some(new);
        }

        // dx with Λ (Eq. 6).
        if wanted.input && exact {
            let coefficients = self.input_coefficients(pass, weight, lambda.as_deref());
            (dx, _) = rows::backward(pass, dy, Some(&coefficients), BackwardSums::None)?;
        }
        for (dy_x, d) in dy_x.iter_mut().zip(&self.inv_d) {
            *dy_x *= d;
        }
        gradients(pass, dx, [dy_x, dbias])
    }
}

impl Forwarded {
    /// Λ, the mean of g X̂, from Σ dy x̃ over the rows of all ranks: X̂ = X̃/D and g = γ ⊙ dy.
    fn lambda(&self, dy_x: &[f64], weight: Option<&[f64]>, rows: f64) -> Vec<f64> {
        let mut lambda = dy_x.to_vec();
        for (c, lambda) in lambda.iter_mut().enumerate() {
            *lambda = *lambda * self.inv_d[c] * weight.map_or(1., |weight| weight[c]) / rows;
        }
        lambda
    }

    /// Gain and −decay of `∂L/∂X̃ = gain ⊙ dy − decay ⊙ X̃`. With `g = γ ⊙ dy` and `X̂ = X̃/D`, the
    /// gradient of every kind of forward has this form:
    ///
    /// - evaluation: `g/D`, so the gain is γ/D and the decay 0;
    /// - PN-V, Eq. 6: `(g − Λ X̂)/D`, so the decay is Λ/D²;
    /// - PN, Eq. 12: `(g − ν X̂)/D`, so the decay is ν/D². Under recipe Fairseq the divisor is
    ///   always the batch's, while X̂ stays X̃/D.
    fn input_coefficients(
        &self,
        pass: &Pass,
        weight: Option<&[f64]>,
        correction: Option<&[f64]>,
    ) -> Coefficients {
        let divisor = match &self.batch {
            Some(batch) if pass.recipe.divides_by_batch() => &batch.inv_batch_rms,
            _ => &self.inv_d,
        };
        let (mut gain, mut neg_decay) = (vec![], vec![]);
        for (c, divisor) in divisor.iter().enumerate() {
            let correction = correction.map_or(0., |correction| correction[c]);
            gain.push(divisor * weight.map_or(1., |weight| weight[c]));
            neg_decay.push(-correction * divisor * self.inv_d[c]);
        }
        Coefficients::Values([gain, neg_decay])
    }
}

/// Adds up the squares of a batch over the ranks. The message is Σ x̃² and the number of rows, for
/// the kept rows and then, if Γ is a mean over all rows, for all.
fn exchange_squares(local: BatchSquares, env: &mut dyn Env) -> Result<BatchSquares> {
    let mut message = vec![];
    for squares in [Some(&local.kept), local.all.as_ref()]
        .into_iter()
        .flatten()
    {
        message.extend(&squares.sums);
        message.push(squares.rows as f64);
    }
    let (cols, count) = (local.kept.sums.len(), message.len());
    let global = env.exchange(Tensor::from_vec(message, count, &Device::Cpu)?)?;
    let global = global.to_vec1::<f64>()?;
    let read = |sums: &[f64]| MeanSquares::new(sums[..cols].to_vec(), sums[cols] as usize);
    let (kept, all) = global.split_at(cols + 1);
    Ok(BatchSquares {
        kept: read(kept),
        all: local.all.map(|_| read(all)),
    })
}

/// Gain and shift of `y = gain ⊙ X̃ + shift`: γ/D and β.
fn output_coefficients(pass: &Pass, inv_d: &[f64]) -> Result<Coefficients> {
    let gain = output_gain(pass.affine(), inv_d)?;
    let shift = match pass.bias() {
        Some(bias) => channels(bias)?,
        None => vec![0.; gain.len()],
    };
    Ok(Coefficients::Values([gain, shift]))
}

/// γ/D.
pub(super) fn output_gain(affine: Option<&Affine>, inv_d: &[f64]) -> Result<Vec<f64>> {
    let mut gain = inv_d.to_vec();
    if let Some(affine) = affine {
        for (gain, weight) in gain.iter_mut().zip(weights(affine)?) {
            *gain *= weight;
        }
    }
    Ok(gain)
}

/// γ in f64.
fn weights(affine: &Affine) -> Result<Vec<f64>> {
    let mut weights = channels(&affine.weight)?;
    for weight in &mut weights {
        *weight += affine.offset;
    }
    Ok(weights)
}

/// 1/D = 1/sqrt(ψ² + ε). If ψ² has overflowed, 1/D is NaN: with 0 the output would be 0, which
/// nobody would notice.
pub(super) fn inverse_roots(phi: &[f64], eps: f64) -> Vec<f64> {
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
            // An old ψ² that is left out may be anything, and 0 times NaN would be NaN.
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
        if holds(phi, next) || !pass.recipe.is_guarded() {
            *phi_c = next;
        }
    }
    set_channels(phi, &values)
}

/// Moves ν by Eq. 13 divided by 1−α_b, in the variable that a checkpoint stores:
/// `ema_gz ← (1 − (1−α_b)Γ) ema_gz + Λ`.
fn update_nu(pass: &Pass, nu: &Nu, batch: &BatchStatistics, lambda: &[f64]) -> Result<()> {
    let unscale = nu.loss_scale.recip();
    let mut values = channels(nu.ema_gz)?;
    for (c, ema_gz) in values.iter_mut().enumerate() {
        let gamma = batch.gamma[c];
        let mut decay = 1. - nu.share * gamma;
        // A negative decay would change the sign of ν at each step, so it is clamped.
        if pass.recipe.is_guarded() && decay < 0. {
            decay = 0.;
        }
        let next = decay * *ema_gz + unscale * lambda[c];
        // Γ is checked too, because the clamp would turn an infinite Γ into a finite decay.
        let is_finite = holds(nu.ema_gz, gamma) && holds(nu.ema_gz, next);
        if is_finite || !pass.recipe.is_guarded() {
            *ema_gz = next;
        }
    }
    set_channels(nu.ema_gz, &values)
}

/// ν times the loss scale.
fn running_nu(nu: &Nu) -> Result<Vec<f64>> {
    Ok((channels(nu.ema_gz)?.into_iter())
        .map(|ema_gz| ema_gz * nu.scale())
        .collect())
}

/// `true` if `value` is finite in the variable's dtype.
fn holds(var: &Var, value: f64) -> bool {
    match var.dtype() {
        DType::F64 => value.is_finite(),
        DType::F32 => (value as f32).is_finite(),
        other => unreachable!("no statistic is kept in {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{AverageWeights, Recipe};
    use crate::device::cpu::layout::on_cpu;
    use crate::device::pass::Channels;
    use crate::device::{Announcement, Wanted};
    use candle::WithDType;
    use std::borrow::Cow;

    /// The state and the other ranks of a pass.
    struct Outside {
        phi: Var,
        ema_gz: Var,
        /// Other ranks have this many times the sums of this one.
        others: Option<f64>,
        messages: Vec<Vec<f64>>,
        trains: bool,
    }

    impl Outside {
        fn new(phi: f64, ema_gz: f64) -> Result<Self> {
            let var = |value| Var::from_slice(&[value], 1, &Device::Cpu);
            Ok(Self {
                phi: var(phi)?,
                ema_gz: var(ema_gz)?,
                others: None,
                messages: vec![],
                trains: true,
            })
        }
    }

    const ALPHA: f64 = 0.9;
    const SHARE: f64 = 0.1;
    const MOVING: PhiStep = PhiStep {
        cumulative: None,
        moving: Some(AverageWeights {
            old: ALPHA,
            new: SHARE,
        }),
    };

    impl Env for Outside {
        fn has_ranks(&self) -> bool {
            self.others.is_some()
        }

        fn announcement(&self) -> Option<Announcement> {
            unreachable!("sums of a CPU are compared on the host")
        }

        fn exchange(&mut self, sums: Tensor) -> Result<Tensor> {
            self.messages.push(sums.to_vec1()?);
            sums.affine(1. + self.others.unwrap(), 0.)
        }

        fn move_phi(&mut self, update: &mut dyn FnMut(&Var, &PhiStep) -> Result<()>) -> Result<()> {
            update(&self.phi, &MOVING)
        }

        fn nu(&self) -> Option<Nu<'_>> {
            self.trains.then_some(Nu {
                ema_gz: &self.ema_gz,
                share: SHARE,
                loss_scale: 1.,
            })
        }

        fn move_nu(&mut self, update: &mut dyn FnMut(Option<&Nu>) -> Result<()>) -> Result<()> {
            update(self.nu().as_ref())
        }
    }

    /// A pass over rows of one channel, with γ = 3 and β = 1, and an ε that no result shows.
    fn pass(x: &[f64], kind: ForwardKind, recipe: Recipe) -> Result<Pass<'static>> {
        let tensor = |values: &[f64]| Tensor::from_slice(values, values.len(), &Device::Cpu);
        let affine = Affine::new(tensor(&[3.])?, Some(tensor(&[1.])?));
        let channels = Channels {
            phi: tensor(&[f64::NAN])?,
            kind,
            recipe,
            eps: 1e-200,
            groups: None,
        };
        let x = tensor(x)?.unsqueeze(1)?;
        let pass = Pass::of_channels("test", &x, Some(&affine), channels)?;
        let phi = pass.phi.clone();
        let mut pass = pass.into_owned();
        (pass.phi, pass.wanted) = (phi, ALL);
        Ok(pass)
    }

    /// A forward by ψ² of `outside`.
    fn run_forward(pass: &mut Pass, outside: &mut Outside) -> Result<(Box<dyn Record>, Outputs)> {
        pass.phi = Some(outside.phi.as_detached_tensor().copy()?);
        match pass.kind.is_training() {
            true => forward(pass, outside),
            false => evaluate(pass),
        }
    }

    const ALL: Wanted = Wanted {
        input: true,
        weight: true,
        bias: true,
    };

    fn values(tensor: &Tensor) -> Vec<f64> {
        channels(&tensor.flatten_all().unwrap()).unwrap()
    }

    #[track_caller]
    fn assert_close(actual: &[f64], expected: &[f64]) {
        assert_eq!(actual.len(), expected.len());
        for (a, e) in actual.iter().zip(expected) {
            assert!((a - e).abs() <= 1e-14 * e.abs(), "{actual:?}, {expected:?}");
        }
    }

    fn output(outputs: &Outputs) -> Result<Vec<f64>> {
        Ok(f64::cpu_storage_as_slice(on_cpu(&outputs.y)?)?.to_vec())
    }

    /// The example at the head of this file, and its backward. D = 2, X̂ = [3, 1], and with dy =
    /// [1, 1] g = 3. ν = 0.1 · 5, so dx = ([3, 3] − 0.5 · [3, 1]) / 2. Λ = mean([9, 3]) = 6, and
    /// ν moves in its variable to (1 − 0.1 · 5) · 5 + 6.
    #[test]
    fn a_step_by_the_running_statistic() -> Result<()> {
        let mut pass = pass(&[6., 2.], ForwardKind::RunningStatistic, Recipe::Paper)?;
        let mut outside = Outside::new(4., 5.)?;
        let (saved, outputs) = run_forward(&mut pass, &mut outside)?;
        assert_close(&output(&outputs)?, &[10., 4.]);
        assert_close(&values(&outside.phi), &[5.6]);

        let dy = Tensor::new(&[[1.], [1.]], &Device::Cpu)?;
        let gradients = saved.backward(&pass, &dy, &mut outside)?;
        assert_close(&values(&gradients.input.unwrap()), &[0.75, 1.25]);
        assert_close(&values(&gradients.weight.unwrap()), &[4.]);
        assert_close(&values(&gradients.bias.unwrap()), &[2.]);
        assert_close(&values(&outside.ema_gz), &[8.5]);
        Ok(())
    }

    #[test]
    fn a_step_of_one_row() -> Result<()> {
        let mut pass = pass(&[6.], ForwardKind::RunningStatistic, Recipe::Paper)?;
        let mut outside = Outside::new(4., 5.)?;
        run_forward(&mut pass, &mut outside)?;
        assert_close(&values(&outside.phi), &[0.9 * 4. + 0.1 * 36.]);
        Ok(())
    }

    /// The same by the batch's statistic. D = √20, X̂ = [6, 2]/√20, and Γ = 1. With dy = [1, 0],
    /// Λ = 9/√20 and dx = ([3, 0] − Λ X̂)/√20.
    #[test]
    fn a_step_by_the_batch_statistic() -> Result<()> {
        let mut pass = pass(&[6., 2.], ForwardKind::BatchStatistic, Recipe::Paper)?;
        let mut outside = Outside::new(4., 5.)?;
        let (saved, outputs) = run_forward(&mut pass, &mut outside)?;
        let d = 20f64.sqrt();
        assert_close(&output(&outputs)?, &[18. / d + 1., 6. / d + 1.]);
        assert_close(&values(&outside.phi), &[5.6]);

        let dy = Tensor::new(&[[1.], [0.]], &Device::Cpu)?;
        let gradients = saved.backward(&pass, &dy, &mut outside)?;
        let dx = [(3. - 54. / 20.) / d, -18. / 20. / d];
        assert_close(&values(&gradients.input.unwrap()), &dx);
        assert_close(&values(&outside.ema_gz), &[0.9 * 5. + 9. / d]);
        Ok(())
    }

    /// Another rank has three times the sums. So ψ_B² and Λ are those of 8 rows, while the
    /// gradients of parameters are this rank's.
    #[test]
    fn a_step_over_ranks() -> Result<()> {
        let mut pass = pass(&[6., 2.], ForwardKind::RunningStatistic, Recipe::Paper)?;
        let mut outside = Outside::new(4., 5.)?;
        outside.others = Some(3.);
        let (saved, _) = run_forward(&mut pass, &mut outside)?;
        assert_close(&values(&outside.phi), &[5.6]);
        let dy = Tensor::new(&[[1.], [1.]], &Device::Cpu)?;
        let gradients = saved.backward(&pass, &dy, &mut outside)?;
        assert_close(&values(&gradients.weight.unwrap()), &[4.]);
        assert_close(&values(&outside.ema_gz), &[8.5]);
        // Σ x² and the rows, then Σ dy x.
        assert_eq!(outside.messages, [vec![40., 2.], vec![8.]]);
        Ok(())
    }

    /// Evaluation, and a batch whose every row is padding: dx = g/D, and nothing moves.
    #[test]
    fn calls_that_are_no_step() -> Result<()> {
        let dy = Tensor::new(&[[1.], [1.]], &Device::Cpu)?;
        for kind in [ForwardKind::Evaluation, ForwardKind::BatchStatistic] {
            let mut pass = pass(&[6., 2.], kind, Recipe::Paper)?;
            let mut outside = Outside::new(4., 5.)?;
            outside.trains = false;
            if kind.is_training() {
                pass.keep = Some(Tensor::zeros(2, DType::U8, &Device::Cpu)?);
            }
            let (saved, outputs) = run_forward(&mut pass, &mut outside)?;
            assert_close(&output(&outputs)?, &[10., 4.]);
            let gradients = saved.backward(&pass, &dy, &mut outside)?;
            let dx = if kind.is_training() { 0. } else { 1.5 };
            assert_close(&values(&gradients.input.unwrap()), &[dx; 2]);
            assert_eq!(values(&outside.phi), [4.]);
            assert_eq!(values(&outside.ema_gz), [5.]);
        }
        Ok(())
    }

    /// A weight that no constructor lets through: the output fails, and ψ² has not moved.
    #[test]
    fn phi_moves_after_what_can_fail() -> Result<()> {
        for kind in [ForwardKind::BatchStatistic, ForwardKind::RunningStatistic] {
            let mut pass = pass(&[6., 2.], kind, Recipe::Paper)?;
            let affine = Affine::new(Tensor::new(&[3u8], &Device::Cpu)?, None);
            pass.affine = Some(Cow::Owned(affine));
            let mut outside = Outside::new(4., 5.)?;
            let Err(error) = run_forward(&mut pass, &mut outside) else {
                panic!("a forward with a weight of U8")
            };
            assert!(error.to_string().contains("got U8"), "{error}");
            assert_eq!(values(&outside.phi), [4.]);
        }
        Ok(())
    }

    #[test]
    fn no_gradient_that_is_not_wanted() -> Result<()> {
        let mut pass = pass(&[6., 2.], ForwardKind::RunningStatistic, Recipe::Paper)?;
        let dy = Tensor::new(&[[1.], [1.]], &Device::Cpu)?;
        let mut outside = Outside::new(4., 5.)?;
        pass.wanted = Wanted {
            input: false,
            weight: false,
            bias: false,
        };
        let (saved, _) = run_forward(&mut pass, &mut outside)?;
        let gradients = saved.backward(&pass, &dy, &mut outside)?;
        assert!(gradients.input.is_none());
        assert!(gradients.weight.is_none() && gradients.bias.is_none());
        // ν moves all the same.
        assert_close(&values(&outside.ema_gz), &[8.5]);
        Ok(())
    }

    /// ψ² after a step from `old`.
    fn moved_phi(recipe: Recipe, dtype: DType, old: f64, step: PhiStep, batch: f64) -> Result<f64> {
        let pass = pass(&[1.], ForwardKind::RunningStatistic, recipe)?;
        let phi = Var::from_tensor(&Tensor::new(&[old], &Device::Cpu)?.to_dtype(dtype)?)?;
        update_phi(&pass, &phi, &step, &[batch])?;
        Ok(channels(&phi)?[0])
    }

    #[test]
    fn phi_by_hand() -> Result<()> {
        let mean_of = |count| PhiStep {
            cumulative: Some(AverageWeights::of_mean(count)),
            moving: None,
        };
        for recipe in [Recipe::Paper, Recipe::Fairseq] {
            let moved = |old, step, batch| moved_phi(recipe, DType::F64, old, step, batch);
            assert_close(&[moved(4., MOVING, 20.)?], &[5.6]);
            assert_close(&[moved(4., mean_of(4), 20.)?], &[8.]);
            // The first batch of a mean leaves nothing of the old value, whatever that is.
            assert_eq!(moved(f64::NAN, mean_of(1), 20.)?, 20.);
            // First the mean, 12, and then the moving average.
            let both = PhiStep {
                moving: MOVING.moving,
                ..mean_of(2)
            };
            assert_close(&[moved(4., both, 20.)?], &[0.9 * 12. + 2.]);
            let neither = PhiStep {
                cumulative: None,
                moving: None,
            };
            assert_eq!(moved(4., neither, 20.)?, 4.);
        }
        Ok(())
    }

    #[test]
    fn only_recipe_paper_guards_phi() -> Result<()> {
        for (dtype, batch) in [
            (DType::F32, f64::INFINITY),
            (DType::F32, f64::NAN),
            (DType::F64, f64::INFINITY),
            (DType::F32, 1e40), // finite in f64 alone
        ] {
            assert_eq!(moved_phi(Recipe::Paper, dtype, 4., MOVING, batch)?, 4.);
            let moved = moved_phi(Recipe::Fairseq, dtype, 4., MOVING, batch)?;
            assert!(!moved.is_finite(), "{moved}");
        }
        let moved = moved_phi(Recipe::Paper, DType::F64, 4., MOVING, 1e40)?;
        assert_close(&[moved], &[1e39]);
        Ok(())
    }

    /// ν/(1−α_b) after a step from 2, with a loss scale of 4.
    fn moved_nu(recipe: Recipe, gamma: f64, lambda: f64) -> Result<f64> {
        let pass = pass(&[1.], ForwardKind::RunningStatistic, recipe)?;
        let ema_gz = Var::from_slice(&[2f32], 1, &Device::Cpu)?;
        let batch = BatchStatistics {
            inv_batch_rms: vec![1.],
            gamma: vec![gamma],
            rows: 1.,
        };
        let nu = Nu {
            ema_gz: &ema_gz,
            share: SHARE,
            loss_scale: 4.,
        };
        update_nu(&pass, &nu, &batch, &[lambda])?;
        Ok(channels(&ema_gz)?[0])
    }

    #[test]
    fn nu_by_hand() -> Result<()> {
        for (gamma, lambda, paper, fairseq) in [
            (5., 3., 1.75, 1.75), // 0.5 · 2 + 3/4
            (10., 3., 0.75, 0.75),
            (20., 3., 0.75, -1.25), // a decay of −1
            (f64::INFINITY, 3., 2., f64::NEG_INFINITY),
            (5., f64::INFINITY, 2., f64::INFINITY),
            (1e40, 3., 2., f64::NEG_INFINITY), // finite in f64 alone
        ] {
            assert_eq!(moved_nu(Recipe::Paper, gamma, lambda)?, paper, "{gamma}");
            assert_eq!(moved_nu(Recipe::Fairseq, gamma, lambda)?, fairseq);
        }
        assert_eq!(moved_nu(Recipe::Paper, 5., f64::NAN)?, 2.);
        assert!(moved_nu(Recipe::Fairseq, 5., f64::NAN)?.is_nan());
        Ok(())
    }

    #[test]
    fn a_statistic_that_overflowed_has_no_inverse_root() {
        let roots = inverse_roots(&[0.25, 0., f64::INFINITY, f64::NAN], 0.25);
        assert_eq!(roots[..2], [0.5f64.sqrt().recip(), 2.]);
        assert!(roots[2].is_nan() && roots[3].is_nan());
    }

    /// Gain and −decay of the three kinds of gradient, with 1/D = 2, and 1/D of the batch 4.
    #[test]
    fn input_coefficients_by_hand() -> Result<()> {
        let forwarded = |batch: bool| Forwarded {
            inv_d: vec![2.],
            batch: batch.then_some(BatchStatistics {
                inv_batch_rms: vec![4.],
                gamma: vec![1.],
                rows: 1.,
            }),
        };
        let coefficients = |recipe, step, weight, correction| {
            let pass = pass(&[1.], ForwardKind::RunningStatistic, recipe).unwrap();
            let coefficients = forwarded(step).input_coefficients(&pass, weight, correction);
            in_f64(coefficients).map(|values| values[0])
        };
        let (weight, nu) = (Some(&[3.][..]), Some(&[0.5][..]));
        use Recipe::{Fairseq, Paper};
        assert_eq!(coefficients(Paper, false, weight, None), [6., 0.]);
        assert_eq!(coefficients(Paper, false, None, None), [2., 0.]);
        assert_eq!(coefficients(Paper, true, weight, nu), [6., -2.]);
        assert_eq!(coefficients(Fairseq, true, weight, nu), [12., -4.]);
        assert_eq!(coefficients(Fairseq, false, weight, None), [6., 0.]);
        assert_eq!(forwarded(true).lambda(&[8.], weight, 4.), [12.]);
        assert_eq!(forwarded(true).lambda(&[8.], None, 4.), [4.]);
        Ok(())
    }

    #[track_caller]
    fn in_f64(coefficients: Coefficients) -> [Vec<f64>; 2] {
        match coefficients {
            Coefficients::Values(values) => values,
            Coefficients::Parameters => panic!("expected coefficients of a D"),
        }
    }

    #[test]
    fn output_coefficients_by_hand() -> Result<()> {
        let mut pass = pass(&[1.], ForwardKind::Evaluation, Recipe::Paper)?;
        let coefficients = |pass: &Pass| output_coefficients(pass, &[2.]).map(in_f64);
        assert_eq!(coefficients(&pass)?, [[6.], [1.]]);
        if let Some(affine) = &mut pass.affine {
            *affine.to_mut() = Affine::new(affine.weight.clone(), None).with_offset(0.5);
        }
        assert_eq!(coefficients(&pass)?, [[7.], [0.]]);
        pass.affine = None;
        assert_eq!(coefficients(&pass)?, [[2.], [0.]]);
        Ok(())
    }

    /// Squares of 2e19 are 4e38, beyond f32. In f64 they have a mean.
    #[test]
    fn sums_that_overflowed_are_taken_again() -> Result<()> {
        let mut pass = pass(&[], ForwardKind::RunningStatistic, Recipe::Fairseq)?;
        let x = [[2e19f32, 1.], [2e19, 2.], [6e19, 3.]];
        pass.x = Cow::Owned(Tensor::new(&x, &Device::Cpu)?);
        let keep = Tensor::new(&[1u8, 1, 0], &Device::Cpu)?;
        pass.keep = Some(keep);
        let squares = rows::forward(&pass, None)?.squares.unwrap();
        let bound = |a: f64, e: f64| assert!((a / e - 1.).abs() < 1e-6, "{a} {e}");
        let (kept, all) = (&squares.kept, squares.for_gamma());
        assert_eq!((kept.rows, all.rows), (2, 3));
        bound(kept.means[0], 4e38);
        bound(kept.sums[0], 8e38);
        bound(all.means[0], 44e38 / 3.);
        assert_eq!((kept.sums[1], kept.means[1]), (5., 2.5));
        assert_eq!(all.sums[1], 14.);
        Ok(())
    }
}
