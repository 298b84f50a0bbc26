//! A step on the CPU. The equations are those of [`Recipe`](crate::Recipe), on vectors of a number
//! a channel.

use super::channels::zip;
use super::element::{Accumulator, Element};
use super::kernels::{self, RowGradients, Rows};
use super::tensors::{matrix, on_cpu, packed, widened};
use crate::config::{ForwardKind, PhiStep, Recipe};
use crate::device::channels::{
    BackwardChannels, ForwardChannels, ForwardSums, GradientSums, RowSum,
};
use crate::device::{
    BackwardInputs, DeviceBackward, DeviceStep, ForwardInputs, Gradients, Outputs, Setting,
};
use candle::{Result, Storage, Tensor, Var, D};

/// A forward on rows of `T`, and what its backward needs.
pub(crate) struct CpuStep<T: Element> {
    channels: ForwardChannels<Vec<T::Acc>>,
}

impl<T: Element> CpuStep<T> {
    /// Adds the residual, sums the squares and writes the output. If the batch's statistic
    /// normalizes, the output is left to [`normalize_by_batch`](DeviceStep::normalize_by_batch).
    pub fn forward(setting: Setting, inputs: &ForwardInputs) -> Result<(Self, Outputs)> {
        let ones = vec![T::Acc::ONE; inputs.x.dim(D::Minus1)?];
        let mut step = Self {
            channels: ForwardChannels::new(setting, inputs.phi, ones)?,
        };
        let all = step.channels.sums_all_rows();
        let [gain, shift] = match setting.kind {
            ForwardKind::BatchStatistic => Default::default(),
            _ => step.gain_and_shift(inputs)?,
        };
        let (y, sum, sums) = step.with_rows(inputs.x, inputs.residual, inputs.keep, |rows| {
            let (y, sum, squares) = match setting.kind {
                ForwardKind::Evaluation => {
                    let outputs = kernels::normalize(rows, &gain, &shift);
                    (Some(outputs.y), outputs.sum, None)
                }
                ForwardKind::RunningStatistic => {
                    let (outputs, squares) = kernels::normalize_and_sum(rows, &gain, &shift, all);
                    (Some(outputs.y), outputs.sum, Some(squares))
                }
                ForwardKind::BatchStatistic => {
                    let (sum, squares) = kernels::square_sum_cols(rows, all);
                    (None, sum, Some(squares))
                }
            };
            let sums = squares.map(|squares| ForwardSums {
                all: all.then(|| RowSum {
                    squares: match &squares.padded {
                        Some(padded) => zip(&squares.kept, padded, |kept, padded| kept + padded),
                        None => squares.kept.clone(),
                    },
                    rows: rows.len(),
                }),
                kept: RowSum {
                    squares: squares.kept,
                    rows: rows.kept(),
                },
            });
            Ok((y, sum, sums))
        })?;
        if let Some(sums) = sums {
            step.channels.store_sums(sums)?;
        }
        let outputs = Outputs {
            y: y.map(storage),
            sum: sum.map(storage),
        };
        Ok((step, outputs))
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
        let config = self.channels.config();
        run(&Rows {
            x: matrix(&x.0, x.1)?,
            residual,
            keep,
            groups: config.group_scaling.map(|groups| (groups, config.eps)),
        })
    }

    /// `Y = gain ⊙ X̃ + shift`: γ/D and β.
    fn gain_and_shift(&self, inputs: &ForwardInputs) -> Result<[Vec<T::Acc>; 2]> {
        let inv_rms = self.channels.inv_rms();
        match inputs.affine {
            Some([weight, bias]) => Ok([
                zip(&widened(weight)?, inv_rms, |weight, inv_rms| {
                    weight * inv_rms
                }),
                widened(bias)?,
            ]),
            None => Ok([inv_rms.clone(), vec![T::Acc::ZERO; inv_rms.len()]]),
        }
    }
}

impl<T: Element> DeviceStep for CpuStep<T> {
    fn local_sums(&self) -> Result<Tensor> {
        self.channels.local_sums()
    }

    fn set_global_sums(&mut self, global: &Tensor) -> Result<()> {
        self.channels.set_global_sums(global)
    }

    fn normalize_by_batch(&mut self, inputs: &ForwardInputs, outputs: Outputs) -> Result<Outputs> {
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

    fn is_step(&self) -> bool {
        self.channels.is_step()
    }

    fn update_phi(&self, phi: &Var, step: &PhiStep) -> Result<()> {
        self.channels.update_phi(phi, step)
    }

    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>> {
        let mut backward = CpuBackward {
            step: self,
            inputs: *inputs,
            channels: BackwardChannels::new(&self.channels, inputs)?,
            dx: None,
            gradients: Gradients::default(),
        };
        let needs_lambda = backward.channels.needs_lambda();
        let dx_now = inputs.wants_input && !needs_lambda;
        let sums_now = backward.channels.wants_sums() || !dx_now;
        if dx_now {
            let [gain, decay] = backward.gain_and_decay()?;
            if sums_now {
                let (dx, sums) = backward.with_rows(|rows, gradients| {
                    kernels::normalize_bwd_and_sum(rows, gradients, &gain, &decay)
                })?;
                backward.dx = Some(dx);
                backward.store_sums(sums);
            } else {
                backward.dx = Some(backward.normalize_bwd(&gain, &decay)?);
            }
        } else {
            let sums = backward.with_rows(kernels::grad_sum_cols)?;
            backward.store_sums(sums);
        }
        Ok(Box::new(backward))
    }
}

/// A backward on rows of `T`.
struct CpuBackward<'a, T: Element> {
    step: &'a CpuStep<T>,
    inputs: BackwardInputs<'a>,
    channels: BackwardChannels<'a, Vec<T::Acc>>,
    dx: Option<Vec<T>>,
    gradients: Gradients,
}

impl<T: Element> CpuBackward<'_, T> {
    fn with_rows<R>(&self, run: impl FnOnce(&Rows<T>, &RowGradients<T>) -> R) -> Result<R> {
        let inputs = &self.inputs;
        // Under recipe Fairseq the backward does not know the mask.
        let recipe = self.step.channels.config().recipe;
        let keep = inputs.keep.filter(|_| recipe == Recipe::Paper);
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

    fn store_sums(&mut self, sums: kernels::GradSums<T::Acc>) {
        let kernels::GradSums { dy_x, dy } = sums;
        self.channels.store_sums(GradientSums { dy_x, dy });
    }

    /// The factors of dy and X̃ in `∂L/∂X̃`.
    fn gain_and_decay(&self) -> Result<[Vec<T::Acc>; 2]> {
        let gain = self.channels.gain()?;
        let decay = match self.channels.correction()? {
            Some(correction) => self.channels.decay(&correction)?,
            None => vec![T::Acc::ZERO; gain.len()],
        };
        Ok([gain, decay])
    }

    fn normalize_bwd(&self, gain: &[T::Acc], decay: &[T::Acc]) -> Result<Vec<T>> {
        self.with_rows(|rows, gradients| kernels::normalize_bwd(rows, gradients, gain, decay))
    }
}

impl<T: Element> DeviceBackward for CpuBackward<'_, T> {
    fn local_sums(&self) -> Result<Tensor> {
        self.channels.local_sums()
    }

    fn set_global_sums(&mut self, global: &Tensor) -> Result<()> {
        self.channels.set_global_sums(global)
    }

    fn finish(&mut self, _nu_follows: bool) -> Result<()> {
        self.channels.make_lambda()?;
        if self.inputs.wants_input && self.dx.is_none() {
            let [gain, decay] = self.gain_and_decay()?;
            self.dx = Some(self.normalize_bwd(&gain, &decay)?);
        }
        let (x, dx) = (self.inputs.x, self.dx.take());
        let dx = dx.map(|dx| Tensor::from_vec(dx, x.shape(), x.device()));
        self.gradients = self.channels.gradients(dx.transpose()?)?;
        Ok(())
    }

    fn update_nu(&mut self, ema_gz: &Var) -> Result<()> {
        self.channels.update_nu(ema_gz)
    }

    fn gradients(self: Box<Self>) -> Gradients {
        self.gradients
    }
}

fn storage<T: Element>(values: Vec<T>) -> Storage {
    Storage::Cpu(T::to_cpu_storage_owned(values))
}
