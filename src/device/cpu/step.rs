//! A step on the CPU. The equations are those of [`Recipe`], per channel.

use super::element::{Accumulator, Element};
use super::kernels::{self, GradSums, RowGradients, Rows, SquareSums};
use super::tensors::{matrix, on_cpu, packed, read_channels, widened, write_channels};
use crate::config::{ForwardKind, PhiStep, PowerNormConfig, Recipe};
use crate::device::{
    BackwardInputs, DeviceBackward, DeviceStep, ForwardInputs, Gradients, Outputs, Setting,
};
use candle::{DType, Device, Result, Storage, Tensor, Var, WithDType};
use num_traits::Float;
use std::sync::OnceLock;

/// A forward on rows of `T`, and what its backward needs.
pub(crate) struct CpuStep<T: Element> {
    setting: Setting,
    /// 1/D by ψ² before the step, `[C]`.
    running_inv_rms: Vec<T::Acc>,
    /// The sums over this process's rows, in training, if other processes have rows too.
    own: Option<ForwardSums<T::Acc>>,
    /// The statistics of the whole batch, in training, once they are known; `None` without a kept
    /// row.
    statistics: OnceLock<Option<BatchStatistics<T::Acc>>>,
}

/// The sums over the rows of a training forward.
struct ForwardSums<A> {
    /// Over kept rows, for ψ_B², and for Γ unless `all` is there.
    kept: RowSum<A>,
    /// Over all rows, padded ones included, for Γ under recipe Fairseq.
    all: Option<RowSum<A>>,
}

/// A sum over rows.
struct RowSum<A> {
    /// Σ x̃², `[C]`.
    squares: Vec<A>,
    rows: usize,
}

/// The statistics of a batch, `[C]` each.
struct BatchStatistics<A> {
    /// ψ_B².
    batch_phi: Vec<A>,
    /// 1/D by ψ_B².
    inv_rms: Vec<A>,
    /// Γ, the mean of X̂².
    gamma: Vec<A>,
    /// The rows that Γ and Λ are means over.
    rows: usize,
}

impl<T: Element> CpuStep<T> {
    pub fn new(setting: Setting) -> Self {
        Self {
            setting,
            running_inv_rms: vec![],
            own: None,
            statistics: OnceLock::new(),
        }
    }

    fn config(&self) -> &PowerNormConfig {
        &self.setting.config
    }

    /// The statistics of a training step, unless sums are still to come or no row was kept.
    fn batch(&self) -> Option<&BatchStatistics<T::Acc>> {
        self.statistics.get()?.as_ref()
    }

    /// Whether this is a training step with a kept row, or may turn out to be one.
    fn may_be_step(&self) -> bool {
        self.setting.kind.is_training() && self.statistics.get().is_none_or(Option::is_some)
    }

    /// 1/D of the forward.
    fn inv_rms(&self) -> &[T::Acc] {
        match self.batch() {
            Some(batch) if self.setting.kind == ForwardKind::BatchStatistic => &batch.inv_rms,
            _ => &self.running_inv_rms,
        }
    }

    /// 1/D from D².
    fn inv_rms_of(&self, phi: &[T::Acc]) -> Vec<T::Acc> {
        let eps = T::Acc::from_f64(self.config().eps);
        phi.iter().map(|&phi| (phi + eps).sqrt().recip()).collect()
    }

    /// Makes the statistics of the whole batch from its sums.
    fn settle(&self, sums: ForwardSums<T::Acc>) {
        let statistics = (sums.kept.rows > 0).then(|| {
            let batch_phi = mean(&sums.kept.squares, sums.kept.rows);
            let batch_inv_rms = self.inv_rms_of(&batch_phi);
            let inv_rms = match self.setting.kind {
                ForwardKind::BatchStatistic => &batch_inv_rms,
                _ => &self.running_inv_rms,
            };
            let over = sums.all.as_ref().unwrap_or(&sums.kept);
            let square = mean(&over.squares, over.rows);
            BatchStatistics {
                gamma: zip(&square, inv_rms, |square, inv_rms| {
                    square * inv_rms * inv_rms
                }),
                rows: over.rows,
                batch_phi,
                inv_rms: batch_inv_rms,
            }
        });
        // If another backward was faster, it set the same values.
        let _ = self.statistics.set(statistics);
    }

    /// Keeps this process's sums. Unless they are shared, they are the sums of the whole batch.
    fn keep_sums(&mut self, sums: SquareSums<T::Acc>, rows: usize, kept: usize) {
        let all = self.sums_all_rows().then(|| RowSum {
            squares: match &sums.padded {
                Some(padded) => zip(&sums.kept, padded, |kept, padded| kept + padded),
                None => sums.kept.clone(),
            },
            rows,
        });
        let kept = RowSum {
            squares: sums.kept,
            rows: kept,
        };
        let own = ForwardSums { kept, all };
        match self.setting.shared {
            true => self.own = Some(own),
            false => self.settle(own),
        }
    }

    /// Fairseq's Γ runs over padded rows too.
    fn sums_all_rows(&self) -> bool {
        self.config().recipe == Recipe::Fairseq
    }

    /// Reads tensors as rows, for `run`.
    fn with_rows<R>(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
        keep: Option<&Tensor>,
        run: impl FnOnce(&Rows<T>) -> Result<R>,
    ) -> Result<R> {
        let x = x.storage_and_layout();
        let residual = residual.map(Tensor::storage_and_layout);
        let keep = keep.map(Tensor::storage_and_layout);
        let residual = match &residual {
            Some((storage, layout)) => Some(matrix(storage, layout)?),
            None => None,
        };
        let keep = match &keep {
            Some((storage, layout)) => Some(packed(on_cpu(storage)?, layout)?),
            None => None,
        };
        let config = self.config();
        run(&Rows {
            x: matrix(&x.0, x.1)?,
            residual,
            keep,
            groups: config.group_scaling.map(|groups| (groups, config.eps)),
        })
    }

    /// `Y = gain ⊙ X̃ + shift`: γ/D and β.
    fn gain_and_shift(&self, inputs: &ForwardInputs) -> Result<[Vec<T::Acc>; 2]> {
        let inv_rms = self.inv_rms();
        match inputs.affine {
            Some([weight, bias]) => Ok([times(&widened(weight)?, inv_rms), widened(bias)?]),
            None => Ok([inv_rms.to_vec(), vec![T::Acc::ZERO; inv_rms.len()]]),
        }
    }
}

impl<T: Element> DeviceStep for CpuStep<T> {
    fn forward(&mut self, inputs: &ForwardInputs) -> Result<Outputs> {
        self.running_inv_rms = self.inv_rms_of(&read_channels(inputs.phi)?);
        let with_padded = self.sums_all_rows();
        let kind = self.setting.kind;
        let [gain, shift] = match kind {
            ForwardKind::BatchStatistic => Default::default(),
            _ => self.gain_and_shift(inputs)?,
        };
        let mut sums = None;
        let outputs = self.with_rows(inputs.x, inputs.residual, inputs.keep, |rows| {
            let (y, sum) = match kind {
                ForwardKind::Evaluation => {
                    let outputs = kernels::normalize(rows, &gain, &shift);
                    (Some(outputs.y), outputs.sum)
                }
                ForwardKind::RunningStatistic => {
                    let (outputs, squares) =
                        kernels::normalize_and_sum(rows, &gain, &shift, with_padded);
                    sums = Some((squares, rows.kept()));
                    (Some(outputs.y), outputs.sum)
                }
                ForwardKind::BatchStatistic => {
                    let (sum, squares) = kernels::square_sum_cols(rows, with_padded);
                    sums = Some((squares, rows.kept()));
                    (None, sum)
                }
            };
            Ok(Outputs {
                y: y.map(storage),
                sum: sum.map(storage),
            })
        })?;
        if let Some((squares, kept)) = sums {
            let rows = inputs.x.elem_count() / self.running_inv_rms.len();
            self.keep_sums(squares, rows, kept);
        }
        Ok(outputs)
    }

    fn finish_forward(&mut self, inputs: &ForwardInputs, outputs: Outputs) -> Result<Outputs> {
        let [gain, shift] = self.gain_and_shift(inputs)?;
        let y = self.with_rows(inputs.x, None, inputs.keep, |rows| {
            Ok(match &outputs.sum {
                Some(sum) => {
                    let sum = T::cpu_storage_as_slice(on_cpu(sum)?)?;
                    kernels::normalize(&rows.summed(sum), &gain, &shift).y
                }
                None => kernels::normalize(rows, &gain, &shift).y,
            })
        })?;
        Ok(Outputs {
            y: Some(storage(y)),
            ..outputs
        })
    }

    fn sums(&self) -> Result<Tensor> {
        let numbers = self.own.as_ref().map_or(vec![], ForwardSums::numbers);
        let len = numbers.len();
        Tensor::from_vec(numbers, len, &Device::Cpu)
    }

    fn take_sums(&self, total: &Tensor) -> Result<()> {
        let cols = self.running_inv_rms.len();
        self.settle(ForwardSums::of_numbers(&total.to_vec1()?, cols));
        Ok(())
    }

    fn move_phi(&self, phi: &Var, step: Option<&PhiStep>) -> Result<bool> {
        let Some(batch) = self.batch() else {
            return Ok(false);
        };
        if let Some(step) = step {
            // In f64, so that a channel that keeps its value keeps every bit of it.
            let mut values = read_channels::<f64>(phi)?;
            for (old, &batch) in values.iter_mut().zip(&batch.batch_phi) {
                let mut new = T::Acc::from_f64(*old);
                for shares in [step.cumulative, step.moving].into_iter().flatten() {
                    // The old ψ² does not count here, and may be NaN.
                    let kept = match shares.old {
                        0. => T::Acc::ZERO,
                        share => T::Acc::from_f64(share) * new,
                    };
                    new = kept + T::Acc::from_f64(shares.new) * batch;
                }
                if accepts(self.config(), phi, new) {
                    *old = new.to_f64();
                }
            }
            write_channels(phi, values)?;
        }
        Ok(true)
    }

    /// With `g = γ ⊙ dy` every `∂L/∂X̃` has the form `gain ⊙ dy − decay ⊙ X̃`:
    ///
    /// - an evaluation: `g/D`;
    /// - PN-V, Eq. 6: `(g − Λ X̂)/D`, which needs the sums of the whole batch first;
    /// - PN, Eq. 12: `(g − ν X̂)/D`; under recipe Fairseq the divisor is the batch's, and this is
    ///   the gradient at every step.
    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>> {
        let config = self.config();
        let weight = match inputs.affine {
            Some([weight, _]) => Some(widened(weight)?),
            None => None,
        };
        let mut backward = CpuBackward {
            step: self,
            inputs: *inputs,
            weight,
            sums: None,
            total: None,
            lambda: None,
            dx: None,
            gradients: Gradients::default(),
        };
        let is_step = self.may_be_step();
        let affine = inputs.affine.into_iter().flatten();
        let wants_sums = is_step || affine.into_iter().any(Tensor::track_op);
        let waits = is_step && config.is_exact(self.setting.kind);
        if waits || !inputs.wants_input {
            backward.sums = Some(backward.with_rows(kernels::grad_sum_cols)?);
            return Ok(Box::new(backward));
        }
        let decay = match is_step {
            true => {
                let beta = 1. - config.alpha_bwd;
                let nu = inputs.ema_gz.detach().affine(beta, 0.)?;
                backward.decay(&read_channels(&nu.affine(inputs.loss_scale, 0.)?)?)
            }
            false => vec![T::Acc::ZERO; self.running_inv_rms.len()],
        };
        let gain = backward.gain();
        if wants_sums {
            let (dx, sums) = backward.with_rows(|rows, gradients| {
                kernels::normalize_bwd_and_sum(rows, gradients, &gain, &decay)
            })?;
            (backward.dx, backward.sums) = (Some(dx), Some(sums));
        } else {
            let dx = backward.with_rows(|rows, gradients| {
                kernels::normalize_bwd(rows, gradients, &gain, &decay)
            })?;
            backward.dx = Some(dx);
        }
        Ok(Box::new(backward))
    }
}

/// A backward on rows of `T`.
struct CpuBackward<'a, T: Element> {
    step: &'a CpuStep<T>,
    inputs: BackwardInputs<'a>,
    /// γ, `[C]`.
    weight: Option<Vec<T::Acc>>,
    /// The sums over this process's rows.
    sums: Option<GradSums<T::Acc>>,
    /// Σ dy x̃ of the whole batch, `[C]`, if it was handed in.
    total: Option<Vec<T::Acc>>,
    /// Λ, `[C]`, after a training step.
    lambda: Option<Vec<T::Acc>>,
    dx: Option<Vec<T>>,
    gradients: Gradients,
}

impl<T: Element> CpuBackward<'_, T> {
    fn with_rows<R>(&self, run: impl FnOnce(&Rows<T>, &RowGradients<T>) -> R) -> Result<R> {
        let inputs = &self.inputs;
        // Under recipe Fairseq the backward does not know the mask.
        let keep = (inputs.keep).filter(|_| self.step.config().recipe == Recipe::Paper);
        self.step.with_rows(inputs.x, None, keep, |rows| {
            let dy = inputs.dy.storage_and_layout();
            let dsum = inputs.dsum.map(Tensor::storage_and_layout);
            let dsum = match &dsum {
                Some((storage, layout)) => Some(matrix(storage, layout)?),
                None => None,
            };
            let gradients = RowGradients {
                dy: &matrix(&dy.0, dy.1)?,
                dsum: dsum.as_ref(),
            };
            Ok(run(rows, &gradients))
        })
    }

    /// Σ dy x̃ of the whole batch, as far as it is known.
    fn total(&self) -> Option<&[T::Acc]> {
        let own = self.sums.as_ref().map(|sums| &sums.dy_x);
        self.total.as_ref().or(own).map(Vec::as_slice)
    }

    /// 1/D of the gradient.
    fn divisor(&self) -> &[T::Acc] {
        match self.step.batch() {
            Some(batch) if self.step.config().recipe == Recipe::Fairseq => &batch.inv_rms,
            _ => self.step.inv_rms(),
        }
    }

    /// The factor of dy in `∂L/∂X̃`: γ/D.
    fn gain(&self) -> Vec<T::Acc> {
        match &self.weight {
            Some(weight) => times(weight, self.divisor()),
            None => self.divisor().to_vec(),
        }
    }

    /// The factor of X̃ in `∂L/∂X̃`. `correction` is Λ or ν.
    fn decay(&self, correction: &[T::Acc]) -> Vec<T::Acc> {
        times(&times(correction, self.divisor()), self.step.inv_rms())
    }
}

impl<T: Element> DeviceBackward for CpuBackward<'_, T> {
    fn sums(&mut self) -> Result<Option<Tensor>> {
        let (Some(total), true) = (self.total(), self.step.may_be_step()) else {
            return Ok(None);
        };
        let mut numbers = to_f64(total);
        if let (Some(own), None) = (&self.step.own, self.step.statistics.get()) {
            numbers.extend(own.numbers());
        }
        let len = numbers.len();
        Tensor::from_vec(numbers, len, &Device::Cpu).map(Some)
    }

    fn take_sums(&mut self, total: &Tensor) -> Result<()> {
        let numbers = total.to_vec1()?;
        let cols = self.step.running_inv_rms.len();
        let (of_backward, of_forward) = numbers.split_at(cols);
        self.total = Some(from_f64(of_backward));
        if !of_forward.is_empty() {
            (self.step).settle(ForwardSums::of_numbers(of_forward, cols));
        }
        Ok(())
    }

    fn finish(&mut self, _moves_nu: bool) -> Result<()> {
        if let (Some(batch), Some(total)) = (self.step.batch(), self.total()) {
            let g_x_hat = times(total, self.step.inv_rms());
            let g_x_hat = match &self.weight {
                Some(weight) => times(&g_x_hat, weight),
                None => g_x_hat,
            };
            self.lambda = Some(mean(&g_x_hat, batch.rows));
        }
        let inputs = self.inputs;
        if inputs.wants_input && self.dx.is_none() {
            let gain = self.gain();
            let decay = match &self.lambda {
                Some(lambda) => self.decay(lambda),
                None => vec![T::Acc::ZERO; gain.len()],
            };
            self.dx = Some(self.with_rows(|rows, gradients| {
                kernels::normalize_bwd(rows, gradients, &gain, &decay)
            })?);
        }
        let (x, dx) = (inputs.x, self.dx.take());
        let input = dx.map(|dx| Tensor::from_vec(dx, x.shape(), x.device()));
        self.gradients.input = input.transpose()?;
        if let (Some([weight, bias]), Some(sums)) = (inputs.affine, self.sums.take()) {
            let dweight = times(&sums.dy_x, self.step.inv_rms());
            self.gradients.weight = param_gradient(weight, dweight)?;
            self.gradients.bias = param_gradient(bias, sums.dy)?;
        }
        Ok(())
    }

    fn move_nu(&mut self, ema_gz: &Var) -> Result<()> {
        let (Some(batch), Some(lambda)) = (self.step.batch(), &self.lambda) else {
            return Ok(());
        };
        let (config, loss_scale) = (self.step.config(), self.inputs.loss_scale);
        update_nu(config, ema_gz, &batch.gamma, lambda, loss_scale)
    }

    fn gradients(self: Box<Self>) -> Gradients {
        self.gradients
    }
}

/// Moves ν by a training backward. `gamma` is Γ, and `lambda` is Λ of the scaled loss, `[C]` each.
///
/// Eq. 13 divided by 1−α_b, in the variable a checkpoint stores:
/// `ema_gz ← (1 − (1−α_b)Γ) ema_gz + Λ`.
fn update_nu<A: Accumulator>(
    config: &PowerNormConfig,
    ema_gz: &Var,
    gamma: &[A],
    lambda: &[A],
    loss_scale: f64,
) -> Result<()> {
    let beta = A::from_f64(1. - config.alpha_bwd);
    let unscale = A::from_f64(loss_scale.recip());
    let mut values = read_channels::<f64>(ema_gz)?;
    for ((ema, &gamma), &lambda) in values.iter_mut().zip(gamma).zip(lambda) {
        let mut decay = A::ONE - beta * gamma;
        if config.recipe == Recipe::Paper && decay < A::ZERO {
            decay = A::ZERO;
        }
        let new = decay * A::from_f64(*ema) + unscale * lambda;
        // Γ is checked too: the clamp would turn an infinite Γ into a finite factor.
        if accepts(config, ema_gz, gamma) && accepts(config, ema_gz, new) {
            *ema = new.to_f64();
        }
    }
    write_channels(ema_gz, values)
}

/// The finite check of recipe Paper, in the dtype of the state: an overflowed batch must not
/// outlive its step.
fn accepts(config: &PowerNormConfig, state: &Tensor, new: impl WithDType) -> bool {
    let finite = match state.dtype() {
        DType::F64 => new.to_f64().is_finite(),
        _ => (new.to_f64() as f32).is_finite(),
    };
    finite || config.recipe == Recipe::Fairseq
}

impl<A: Accumulator> ForwardSums<A> {
    /// The sums in the form in which they are handed out.
    fn numbers(&self) -> Vec<f64> {
        let mut numbers = vec![];
        for sum in [&self.kept].into_iter().chain(&self.all) {
            numbers.extend(to_f64(&sum.squares));
            numbers.push(sum.rows as f64);
        }
        numbers
    }

    fn of_numbers(numbers: &[f64], cols: usize) -> Self {
        let sum = |numbers: &[f64]| RowSum {
            squares: from_f64(&numbers[..cols]),
            rows: numbers[cols] as usize,
        };
        let (kept, all) = numbers.split_at(cols + 1);
        Self {
            kept: sum(kept),
            all: (!all.is_empty()).then(|| sum(all)),
        }
    }
}

/// The layer-scale without a layer: X̃ of `x`.
pub(crate) fn scale_groups<T: Element>(x: &Tensor, groups: usize, eps: f64) -> Result<Storage> {
    let x = x.storage_and_layout();
    let rows = scaled_rows::<T>(&x.0, x.1, groups, eps)?;
    let (ones, zeros) = ones_and_zeros(rows.cols());
    Ok(storage(kernels::normalize(&rows, &ones, &zeros).y))
}

/// The gradient of [`scale_groups`] from `dy`.
pub(crate) fn scale_groups_bwd<T: Element>(
    x: &Tensor,
    dy: &Tensor,
    groups: usize,
    eps: f64,
) -> Result<Tensor> {
    let dx = {
        let (x, dy) = (x.storage_and_layout(), dy.storage_and_layout());
        let rows = scaled_rows::<T>(&x.0, x.1, groups, eps)?;
        let gradients = RowGradients {
            dy: &matrix(&dy.0, dy.1)?,
            dsum: None,
        };
        let (ones, zeros) = ones_and_zeros(rows.cols());
        kernels::normalize_bwd(&rows, &gradients, &ones, &zeros)
    };
    Tensor::from_vec(dx, x.shape(), x.device())
}

fn scaled_rows<'a, T: Element>(
    x: &'a Storage,
    layout: &candle::Layout,
    groups: usize,
    eps: f64,
) -> Result<Rows<'a, T>> {
    Ok(Rows {
        x: matrix(x, layout)?,
        residual: None,
        keep: None,
        groups: Some((groups, eps)),
    })
}

/// A gain and a shift that change nothing.
fn ones_and_zeros<A: Accumulator>(cols: usize) -> (Vec<A>, Vec<A>) {
    (vec![A::ONE; cols], vec![A::ZERO; cols])
}

/// A parameter's gradient in its dtype; `None` if the parameter is not trained.
fn param_gradient<A: WithDType>(param: &Tensor, gradient: Vec<A>) -> Result<Option<Tensor>> {
    if !param.track_op() {
        return Ok(None);
    }
    let gradient = Tensor::from_vec(gradient, param.shape(), param.device())?;
    gradient.to_dtype(param.dtype()).map(Some)
}

fn storage<T: Element>(values: Vec<T>) -> Storage {
    Storage::Cpu(T::to_cpu_storage_owned(values))
}

fn to_f64<A: Accumulator>(numbers: &[A]) -> Vec<f64> {
    numbers
        .iter()
        .map(|&number| WithDType::to_f64(number))
        .collect()
}

fn from_f64<A: Accumulator>(numbers: &[f64]) -> Vec<A> {
    numbers.iter().map(|&number| A::from_f64(number)).collect()
}

fn mean<A: Accumulator>(sums: &[A], rows: usize) -> Vec<A> {
    let rows = A::from_count(rows);
    sums.iter().map(|&sum| sum / rows).collect()
}

fn times<A: Accumulator>(left: &[A], right: &[A]) -> Vec<A> {
    zip(left, right, |left, right| left * right)
}

fn zip<A: Copy>(left: &[A], right: &[A], f: impl Fn(A, A) -> A) -> Vec<A> {
    left.iter().zip(right).map(|(&l, &r)| f(l, r)).collect()
}
