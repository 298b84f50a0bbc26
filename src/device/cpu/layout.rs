//! candle's tensors as rows and as numbers of channels.
//!
//! Rows are read anywhere in a storage, if the elements of each row are adjacent. [`matrix`] lists
//! the blocks of packed rows and where each begins. So leading dimensions that are transposed or
//! narrowed cost no copy.

use super::element::Element;
use super::kernels::{Matrix, Rows};
use crate::config::Recipe;
use crate::device::Pass;
use candle::backend::BackendStorage;
use candle::{CpuStorage, Layout, Result, Storage, Tensor, Var, WithDType, D};
use half::{bf16, f16};

/// Runs `run` on the rows of a pass, to which `residual` is added. `keep` is the mask. The tensors
/// are locked meanwhile.
pub(super) fn with_rows<T: Element, R>(
    pass: &Pass,
    residual: Option<&Tensor>,
    keep: Option<&Tensor>,
    run: impl FnOnce(&Rows<T>) -> Result<R>,
) -> Result<R> {
    let x = pass.x.storage_and_layout();
    let residual = residual.map(Tensor::storage_and_layout);
    let residual = (residual.as_ref()).map(|(storage, layout)| matrix(storage, layout));
    let keep = keep.map(Tensor::storage_and_layout);
    let keep = (keep.as_ref()).map(|(storage, layout)| packed(on_cpu(storage)?, layout));
    run(&Rows {
        x: matrix(&x.0, x.1)?,
        residual: residual.transpose()?,
        keep: keep.transpose()?,
        groups: pass.groups.map(|groups| (groups, pass.eps)),
        sums_all: pass.recipe == Recipe::Fairseq,
    })
}

/// The numbers of a tensor, one for each channel.
pub(super) fn channels(tensor: &Tensor) -> Result<Vec<f64>> {
    fn widen<T: WithDType>(storage: &CpuStorage, layout: &Layout) -> Result<Vec<f64>> {
        let values = packed::<T>(storage, layout)?.iter();
        Ok(values.map(|value| value.to_f64()).collect())
    }
    let (storage, layout) = tensor.storage_and_layout();
    let storage = on_cpu(&storage)?;
    match storage {
        CpuStorage::F32(_) => widen::<f32>(storage, layout),
        CpuStorage::F64(_) => widen::<f64>(storage, layout),
        CpuStorage::F16(_) => widen::<f16>(storage, layout),
        CpuStorage::BF16(_) => widen::<bf16>(storage, layout),
        other => candle::bail!(
            "power_norm: expected parameters and state of dtype F32, F64, F16 or BF16, got {:?}",
            other.dtype()
        ),
    }
}

/// Sets a variable of the state to one number for each channel.
pub(super) fn set_channels(var: &Var, values: &[f64]) -> Result<()> {
    var.set(&Tensor::from_slice(values, var.shape(), var.device())?.to_dtype(var.dtype())?)
}

/// A storage of elements that a pass wrote.
pub(super) fn storage<T: Element>(values: Vec<T>) -> Storage {
    Storage::Cpu(T::to_cpu_storage_owned(values))
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

/// The rows of a tensor that is [`readable`](crate::op::readable).
pub(super) fn matrix<'a, T: WithDType>(
    storage: &'a Storage,
    layout: &Layout,
) -> Result<Matrix<'a, T>> {
    let Some(blocks) = row_blocks(layout) else {
        candle::bail!("power_norm: expected rows of adjacent elements, got {layout:?}")
    };
    let cols = layout.shape().dim(D::Minus1)?;
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
pub(super) fn on_cpu(storage: &Storage) -> Result<&CpuStorage> {
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
    use candle::{DType, Device};

    /// The starts of rows, by hand.
    #[test]
    fn views_are_blocks_of_rows() -> Result<()> {
        let base = Tensor::zeros((3, 4, 6), DType::F32, &Device::Cpu)?;
        let blocks = |view: &Tensor| row_blocks(view.layout());
        assert_eq!(blocks(&base), Some(vec![0]));
        assert_eq!(blocks(&base.narrow(0, 1, 2)?), Some(vec![24]));
        assert_eq!(blocks(&base.narrow(1, 1, 2)?), Some(vec![6, 30, 54]));
        assert_eq!(
            blocks(&base.transpose(0, 1)?),
            Some((0..12).map(|i| i % 3 * 24 + i / 3 * 6).collect())
        );
        let narrowed = base.narrow(2, 2, 3)?.narrow(0, 0, 1)?;
        assert_eq!(blocks(&narrowed), Some(vec![2, 8, 14, 20]));
        let row = base.narrow(0, 2, 1)?.narrow(1, 3, 1)?;
        assert_eq!(blocks(&row.broadcast_as((2, 1, 6))?), Some(vec![66, 66]));
        assert_eq!(blocks(&base.narrow(2, 4, 1)?).map(|b| b.len()), Some(12));
        assert_eq!(blocks(&base.transpose(1, 2)?), None);
        // Three blocks of no rows.
        assert_eq!(blocks(&base.narrow(1, 0, 0)?), Some(vec![0, 24, 48]));
        Ok(())
    }

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
