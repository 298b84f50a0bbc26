//! Rows and channels on a CPU. The passes over rows are in `kernels.rs`.
//!
//! Rows are read anywhere in a storage, if the elements of each row are adjacent. [`matrix`] lists
//! the blocks of packed rows and where each begins. So leading dimensions that are transposed or
//! narrowed cost no copy.

use super::element::{Accumulator, Element, Numbers};
use super::kernels::{self, Matrix, RowGradients, Rows};
use crate::config::{PowerNormConfig, Recipe};
use crate::device::host::{
    Channels, GradientOutputs, HostRows, InputFactors, OutputFactors, RowSum,
};
use crate::device::{BackwardInputs, Outputs};
use crate::error::Error;
use candle::backend::BackendStorage;
use candle::{CpuStorage, DType, Device, Layout, Result, Storage, Tensor, Var, WithDType, D};
use half::{bf16, f16};
use std::marker::PhantomData;

/// Rows of elements `T`.
pub(crate) struct CpuRows<T> {
    x: Tensor,
    residual: Option<Tensor>,
    keep: Option<Tensor>,
    config: PowerNormConfig,
    element: PhantomData<T>,
}

impl<T: Element> CpuRows<T> {
    /// Runs `run` on the rows, to which `residual` is added.
    fn read<R>(
        &self,
        residual: Option<&Tensor>,
        run: impl FnOnce(&Rows<T>) -> Result<R>,
    ) -> Result<R> {
        let x = self.x.storage_and_layout();
        let residual = residual.map(Tensor::storage_and_layout);
        let keep = self.keep.as_ref().map(Tensor::storage_and_layout);
        let residual = (residual.as_ref()).map(|(storage, layout)| matrix(storage, layout));
        let keep = (keep.as_ref()).map(|(storage, layout)| packed(on_cpu(storage)?, layout));
        run(&Rows {
            x: matrix(&x.0, x.1)?,
            residual: residual.transpose()?,
            keep: keep.transpose()?,
            groups: (self.config.group_scaling).map(|groups| (groups, self.config.eps)),
            sums_all: self.config.recipe == Recipe::Fairseq,
        })
    }
}

impl<T: Element> HostRows for CpuRows<T> {
    type Channels = Numbers<T>;

    fn ones(x: &Tensor) -> Result<Self::Channels> {
        Ok(vec![T::Acc::ONE; x.dim(D::Minus1)?])
    }

    fn new(
        x: &Tensor,
        residual: Option<&Tensor>,
        keep: Option<&Tensor>,
        config: &PowerNormConfig,
    ) -> Result<Self> {
        Ok(Self {
            x: x.clone(),
            residual: residual.cloned(),
            keep: keep.cloned(),
            config: *config,
            element: PhantomData,
        })
    }

    fn forward(
        &self,
        factors: Option<OutputFactors<Self::Channels>>,
        sums: bool,
    ) -> Result<(Outputs, Vec<RowSum<Self::Channels>>)> {
        let factors = factors.map(gain_and_shift).transpose()?;
        self.read(self.residual.as_ref(), |rows| {
            let (outputs, sums) = kernels::forward(rows, factors.as_ref(), sums);
            let outputs = Outputs {
                y: outputs.y.map(storage),
                sum: outputs.sum.map(storage),
            };
            Ok((outputs, sums))
        })
    }

    fn normalize(
        &self,
        factors: OutputFactors<Self::Channels>,
        sum: Option<&Storage>,
    ) -> Result<Option<Storage>> {
        let factors = gain_and_shift(factors)?;
        self.read(None, |rows| {
            let run = |rows: &Rows<T>| kernels::forward(rows, Some(&factors), false).0;
            let outputs = match sum {
                Some(sum) => run(&rows.summed(T::cpu_storage_as_slice(on_cpu(sum)?)?)),
                None => run(rows),
            };
            Ok(outputs.y.map(storage))
        })
    }

    fn backward(
        &self,
        inputs: &BackwardInputs,
        factors: Option<InputFactors<Self::Channels>>,
        sums: bool,
    ) -> Result<GradientOutputs<Self::Channels>> {
        let factors = factors.map(|InputFactors { gain, decay }| {
            let decay = decay.unwrap_or_else(|| vec![T::Acc::ZERO; gain.len()]);
            [gain, decay]
        });
        let (outputs, sums) = self.read(None, |rows| {
            let dy = inputs.dy.storage_and_layout();
            let dsum = inputs.dsum.map(Tensor::storage_and_layout);
            let dsum = (dsum.as_ref()).map(|(storage, layout)| matrix(storage, layout));
            let gradients = RowGradients {
                dy: matrix(&dy.0, dy.1)?,
                dsum: dsum.transpose()?,
            };
            Ok(kernels::backward(rows, &gradients, factors.as_ref(), sums))
        })?;
        let tensor = |dx| Tensor::from_vec(dx, self.x.shape(), self.x.device());
        Ok((outputs.y.map(tensor).transpose()?, sums))
    }
}

/// γ/D and β: `Y = gain ⊙ X̃ + shift`.
fn gain_and_shift<A: Accumulator>(factors: OutputFactors<Vec<A>>) -> Result<[Vec<A>; 2]> {
    let inv_rms = factors.inv_rms;
    let gain = match factors.weight {
        Some(weight) => numbers(weight)?.times(inv_rms)?,
        None => inv_rms.clone(),
    };
    let shift = match factors.bias {
        Some(bias) => numbers(bias)?,
        None => vec![A::ZERO; inv_rms.len()],
    };
    Ok([gain, shift])
}

fn storage<T: Element>(values: Vec<T>) -> Storage {
    Storage::Cpu(T::to_cpu_storage_owned(values))
}

impl<A: Accumulator> Channels for Vec<A> {
    fn read(tensor: &Tensor, _like: &Self) -> Result<Self> {
        numbers(tensor)
    }

    fn store(&self, var: &Var, guards: &[&Self]) -> Result<()> {
        // In f64, so that a channel that keeps its value keeps every bit of it.
        let mut values = numbers::<f64>(var)?;
        let is_finite = |value: A| match var.dtype() {
            DType::F64 => WithDType::to_f64(value).is_finite(),
            _ => (WithDType::to_f64(value) as f32).is_finite(),
        };
        for (k, value) in values.iter_mut().enumerate() {
            if guards.iter().all(|guard| is_finite(guard[k])) {
                *value = WithDType::to_f64(self[k]);
            }
        }
        let values = Tensor::from_vec(values, var.shape(), var.device())?;
        var.set(&values.to_dtype(var.dtype())?)
    }

    fn to_tensor(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        Tensor::from_slice(self, self.len(), device)?.to_dtype(dtype)
    }

    fn plus(&self, other: &Self) -> Result<Self> {
        let pairs = self.iter().zip(other);
        Ok(pairs.map(|(&left, &right)| left + right).collect())
    }

    fn times(&self, other: &Self) -> Result<Self> {
        let pairs = self.iter().zip(other);
        Ok(pairs.map(|(&left, &right)| left * right).collect())
    }

    fn scaled(&self, factor: f64) -> Result<Self> {
        let factor = A::from_f64(factor);
        Ok(self.iter().map(|&value| factor * value).collect())
    }

    fn scaled_plus(&self, factor: f64, shift: f64) -> Result<Self> {
        let [factor, shift] = [factor, shift].map(A::from_f64);
        Ok(self.iter().map(|&value| factor * value + shift).collect())
    }

    fn mean(&self, rows: usize) -> Result<Self> {
        let rows = A::from_f64(rows as f64);
        Ok(self.iter().map(|&sum| sum / rows).collect())
    }

    fn inverse_root(&self, eps: f64) -> Result<Self> {
        let eps = A::from_f64(eps);
        let inverse_root = |&value: &A| (value + eps).sqrt().recip();
        Ok(self.iter().map(inverse_root).collect())
    }

    fn clamp_at_0(&self) -> Result<Self> {
        let clamp = |&value| if value < A::ZERO { A::ZERO } else { value };
        Ok(self.iter().map(clamp).collect())
    }
}

/// The starts of the blocks of packed rows; `None` if the elements of a row are not adjacent.
fn row_blocks(layout: &Layout) -> Option<Vec<usize>> {
    let dims = || layout.dims().iter().zip(layout.stride());
    // Trailing dimensions make up a block.
    let (mut outer, mut packed) = (layout.dims().len(), 1);
    for (&dim, &stride) in dims().rev() {
        if dim != 1 && stride != packed {
            break;
        }
        packed *= dim;
        outer -= 1;
    }
    if !packed.is_multiple_of(*layout.dims().last()?) {
        return None;
    }
    let mut blocks = vec![layout.start_offset()];
    for (&dim, &stride) in dims().take(outer) {
        let shifts = || (0..dim).map(|i| i * stride);
        blocks = (blocks.iter())
            .flat_map(|block| shifts().map(move |shift| block + shift))
            .collect();
    }
    Some(blocks)
}

/// The numbers of a contiguous tensor of any float dtype on the CPU.
fn numbers<A: WithDType>(tensor: &Tensor) -> Result<Vec<A>> {
    fn widen<S: WithDType, A: WithDType>(storage: &CpuStorage, layout: &Layout) -> Result<Vec<A>> {
        let values = packed::<S>(storage, layout)?.iter();
        Ok(values.map(|value| A::from_f64(value.to_f64())).collect())
    }
    let (storage, layout) = tensor.storage_and_layout();
    let storage = on_cpu(&storage)?;
    match storage {
        CpuStorage::F32(_) => widen::<f32, A>(storage, layout),
        CpuStorage::F64(_) => widen::<f64, A>(storage, layout),
        CpuStorage::F16(_) => widen::<f16, A>(storage, layout),
        CpuStorage::BF16(_) => widen::<bf16, A>(storage, layout),
        other => Err(Error::InputDType(other.dtype()).into()),
    }
}

/// The rows of a tensor that is [`readable`](crate::op::readable).
fn matrix<'a, T: WithDType>(storage: &'a Storage, layout: &Layout) -> Result<Matrix<'a, T>> {
    let Some(blocks) = row_blocks(layout) else {
        candle::bail!("power_norm: expected rows of adjacent elements, got {layout:?}")
    };
    let cols = layout.shape().dim(candle::D::Minus1)?;
    Ok(Matrix {
        cols,
        rows: layout.shape().elem_count() / cols,
        values: on_cpu(storage)?.as_slice()?,
        blocks,
    })
}

/// The elements of a contiguous tensor.
fn packed<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle::bail!("power_norm: expected a contiguous tensor, got {layout:?}")
    };
    // A view of nothing may begin past the end of its storage.
    let elements = if start < end { start..end } else { 0..0 };
    Ok(&storage.as_slice()?[elements])
}

/// The storage of a tensor that must be on the CPU.
fn on_cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        other => candle::bail!(
            "power_norm: expected a tensor on the CPU, got one on {:?}",
            other.device().location()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `readable` copies the views whose rows cannot be read where they are, and no others.
    #[test]
    fn readable_views_have_adjacent_elements() -> Result<()> {
        let base = Tensor::zeros((3, 4, 1, 6), DType::F32, &Device::Cpu)?;
        let mut views = vec![
            base.narrow(3, 1, 1)?,
            base.narrow(3, 1, 3)?,
            base.narrow(1, 0, 0)?,
        ];
        for last in 0..3 {
            views.push(base.transpose(last, 3)?);
            views.push(base.transpose(last, 3)?.transpose(0, 1)?.narrow(0, 0, 1)?);
        }
        views.push(base.narrow(3, 2, 1)?.broadcast_as((2, 3, 4, 1, 6))?);
        for view in views {
            let read = crate::op::readable(&view)?;
            assert!(row_blocks(read.layout()).is_some(), "{read:?}");
            let in_place = row_blocks(view.layout()).is_some();
            assert_eq!(read.stride() == view.stride(), in_place, "{view:?}");
        }
        Ok(())
    }
}
