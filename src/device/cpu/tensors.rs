//! Reads tensors on a CPU.
//!
//! Rows are read anywhere in a storage, if the elements of each row are adjacent. [`matrix`] lists
//! the blocks of packed rows and where each begins. So leading dimensions that are transposed or
//! narrowed cost no copy. Masks are read with [`packed`], and weights and biases with [`widened`].

use super::kernels::Matrix;
use crate::error::Error;
use candle::backend::BackendStorage;
use candle::{CpuStorage, Layout, Result, Storage, Tensor, WithDType};
use half::{bf16, f16};

/// The number of trailing dimensions that make a block of packed rows; `None` if the elements of a
/// row are not adjacent.
fn packed_dims(layout: &Layout) -> Option<usize> {
    let (mut dims, mut packed) = (0, 1);
    for (&dim, &stride) in layout.dims().iter().zip(layout.stride()).rev() {
        if dim != 1 && stride != packed {
            break;
        }
        packed *= dim;
        dims += 1;
    }
    let whole = packed.is_multiple_of(*layout.dims().last()?);
    whole.then_some(dims)
}

/// `true` if the elements of each row are adjacent.
pub(crate) fn has_packed_rows(layout: &Layout) -> bool {
    packed_dims(layout).is_some()
}

/// The starts of the blocks of packed rows; `None` if the elements of a row are not adjacent.
fn row_blocks(layout: &Layout) -> Option<Vec<usize>> {
    let outer = layout.dims().len() - packed_dims(layout)?;
    let mut blocks = vec![layout.start_offset()];
    for (&dim, &stride) in layout.dims().iter().zip(layout.stride()).take(outer) {
        let shifts = || (0..dim).map(|i| i * stride);
        blocks = (blocks.iter())
            .flat_map(|block| shifts().map(move |shift| block + shift))
            .collect();
    }
    Some(blocks)
}

/// The values of a contiguous tensor of any float dtype on the CPU.
pub(super) fn widened<A: WithDType>(tensor: &Tensor) -> Result<Vec<A>> {
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

/// The rows of a tensor that is [`readable`](crate::device::pick::readable).
pub(super) fn matrix<'a, T: WithDType>(
    storage: &'a Storage,
    layout: &Layout,
) -> Result<Matrix<'a, T>> {
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
pub(super) fn packed<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<&'a [T]> {
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
}
