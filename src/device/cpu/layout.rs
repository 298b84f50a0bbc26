//! Reads candle's tensors as rows, and as values of channels.
//!
//! A tensor `[.., C]` is a [`Matrix`]: rows of C adjacent elements, wherever they lie in the
//! storage. Rows that follow each other without a gap make up a *block*, and all blocks have the
//! same number of rows. So a view costs no copy unless the elements of its rows are apart. Views of
//! a packed tensor `[3, 4, 6]`, for example:
//!
//! ```text
//! the tensor itself         1 block of 12 rows, from element 0
//! narrow(1, 1, 2)           3 blocks of 2 rows, from elements 6, 30 and 54
//! transpose(0, 1)           12 blocks of 1 row, from 0, 24, 48, 6, 30, 54, 12, ..
//! transpose(1, 2)           no matrix: elements of a row are 6 apart, so `readable` copies it
//! ```

use super::convert::Element;
use crate::device::{Pass, RowNorm};
use candle::backend::BackendStorage;
use candle::{CpuStorage, D, Layout, Result, Storage, Tensor, Var, WithDType};
use half::{bf16, f16};

/// `[rows, cols]`, where the elements of a row are adjacent in memory.
pub(super) struct Matrix<'a, T> {
    /// C, at least 1.
    pub cols: usize,
    pub rows: usize,
    /// All elements of the storage.
    pub values: &'a [T],
    /// The first elements of the blocks.
    pub blocks: Vec<usize>,
}

impl<T> Matrix<'_, T> {
    #[inline(always)]
    pub fn row(&self, row: usize) -> &[T] {
        let start = match self.blocks[..] {
            [start] => start + row * self.cols,
            _ => {
                let rows = self.rows / self.blocks.len();
                self.blocks[row / rows] + row % rows * self.cols
            }
        };
        &self.values[start..][..self.cols]
    }
}

/// The input's rows, and what is done to each.
pub(super) struct Rows<'a, T> {
    pub x: Matrix<'a, T>,
    /// Added to `x` before anything else. It has the shape of `x`.
    pub residual: Option<Matrix<'a, T>>,
    /// `[rows]`, 0 for a padded row.
    pub keep: Option<&'a [u8]>,
    pub norm: RowNorm,
    /// A forward's squares are summed over all rows too.
    pub sums_all: bool,
}

impl<'a, T: Element> Rows<'a, T> {
    pub fn len(&self) -> usize {
        self.x.rows
    }

    pub fn cols(&self) -> usize {
        self.x.cols
    }

    /// The bytes of the input, which are as many as those of an output.
    pub fn bytes(&self) -> usize {
        self.len() * self.cols() * size_of::<T>()
    }

    /// Channels of a group; all of them without group scaling.
    pub fn group_len(&self) -> usize {
        match self.norm {
            RowNorm::Groups { count, .. } => self.cols() / count,
            RowNorm::None | RowNorm::Centred { .. } => self.cols(),
        }
    }

    #[inline(always)]
    pub fn keeps(&self, row: usize) -> bool {
        self.keep.is_none_or(|keep| keep[row] != 0)
    }

    /// The number of rows that are not padding.
    pub fn kept(&self) -> usize {
        match self.keep {
            Some(keep) => keep.iter().filter(|&&keep| keep != 0).count(),
            None => self.len(),
        }
    }

    /// The same rows, read from the stream, which is `x + residual`.
    pub fn of_stream<'b>(&self, stream: &'b [T]) -> Rows<'b, T>
    where
        'a: 'b,
    {
        Rows {
            x: Matrix {
                cols: self.cols(),
                rows: self.len(),
                values: stream,
                blocks: vec![0],
            },
            residual: None,
            keep: self.keep,
            norm: self.norm,
            sums_all: self.sums_all,
        }
    }
}

/// Calls `run` with the rows of a pass, to which `residual` is added, and with the mask `keep`.
///
/// The tensors are locked for reading meanwhile, as in candle's own operations. A program that sets
/// a `Var` in one thread while rayon's threads read it can therefore deadlock.
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
        norm: pass.settings.norm,
        sums_all: !pass.settings.recipe.masks_backward(),
    })
}

/// The values of a tensor `[C]` in f64, whatever its dtype.
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

/// Sets a variable of the state to these values of channels, rounded to its dtype.
pub(super) fn set_channels(var: &Var, values: &[f64]) -> Result<()> {
    var.set(&Tensor::from_slice(values, var.shape(), var.device())?.to_dtype(var.dtype())?)
}

/// The storage of an output.
pub(super) fn storage<T: Element>(values: Vec<T>) -> Storage {
    Storage::Cpu(T::to_cpu_storage_owned(values))
}

/// The first elements of the blocks; `None` if the elements of a row are not adjacent.
///
/// Dimensions are taken from the last one forward while each one's stride is the number of elements
/// behind it. These make up a block, and each index into the dimensions before them begins one. For
/// `[3, 2, 6]` with strides `[24, 6, 1]`, the last two are packed (1, then 6), and 24 is not 2 · 6:
/// blocks of two rows begin at 0, 24 and 48. A dimension of 1 may have any stride.
fn row_blocks(layout: &Layout) -> Option<Vec<usize>> {
    let dims = || layout.dims().iter().zip(layout.stride());
    let (mut outer, mut packed) = (layout.dims().len(), 1);
    for (&dim, &stride) in dims().rev() {
        if dim != 1 && stride != packed {
            break;
        }
        packed *= dim;
        outer -= 1;
    }
    // A block that ends within a row has rows whose elements are apart.
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

    #[test]
    fn rows_of_blocks() {
        // Two blocks of two rows of three, with two elements between the blocks and one before.
        let values: Vec<i32> = (0..16).collect();
        let matrix = Matrix {
            cols: 3,
            rows: 4,
            values: &values,
            blocks: vec![1, 9],
        };
        let rows: Vec<_> = (0..4).map(|row| matrix.row(row)).collect();
        assert_eq!(rows, [[1, 2, 3], [4, 5, 6], [9, 10, 11], [12, 13, 14]]);
    }

    /// Four rows of six columns.
    fn rows<'a>(values: &'a [f32], keep: Option<&'a [u8]>, norm: RowNorm) -> Rows<'a, f32> {
        Rows {
            x: Matrix {
                cols: 6,
                rows: 4,
                values,
                blocks: vec![0],
            },
            residual: None,
            keep,
            norm,
            sums_all: true,
        }
    }

    #[test]
    fn kept_rows_and_groups() {
        let values = [0.; 24];
        let eps = 1e-5;
        let all = rows(&values, None, RowNorm::None);
        assert_eq!((all.kept(), all.keeps(3), all.group_len()), (4, true, 6));
        assert_eq!(all.bytes(), 4 * 6 * 4);
        // Any number but 0 keeps a row.
        let some = rows(
            &values,
            Some(&[0, 1, 7, 0]),
            RowNorm::Groups { count: 3, eps },
        );
        assert_eq!((some.kept(), some.group_len()), (2, 2));
        let keeps: Vec<_> = (0..4).map(|row| some.keeps(row)).collect();
        assert_eq!(keeps, [false, true, true, false]);
        let centred = rows(&values, Some(&[0; 4]), RowNorm::Centred { eps });
        assert_eq!((centred.kept(), centred.group_len()), (0, 6));
    }

    #[test]
    fn the_stream_is_read_in_place_of_the_input() {
        let (values, stream) = ([0.; 24], [1.; 24]);
        let norm = RowNorm::Groups {
            count: 2,
            eps: 1e-5,
        };
        let rows = rows(&values, Some(&[1, 0, 1, 1]), norm);
        let of_stream = rows.of_stream(&stream);
        assert_eq!(of_stream.x.row(3), [1.; 6]);
        assert!(of_stream.residual.is_none() && of_stream.sums_all);
        assert_eq!((of_stream.len(), of_stream.kept()), (4, 3));
        assert_eq!(of_stream.norm, norm);
    }

    #[test]
    fn channels_of_every_dtype() -> Result<()> {
        let values = [1., -0.5, 65504.];
        let tensor = Tensor::new(&values, &Device::Cpu)?;
        for dtype in [DType::F32, DType::F64, DType::F16] {
            assert_eq!(channels(&tensor.to_dtype(dtype)?)?, values);
        }
        let bf16 = channels(&tensor.to_dtype(DType::BF16)?)?;
        assert_eq!(bf16, [1., -0.5, 65536.]);
        // A part of a storage, and no part of one, which may begin past its end.
        assert_eq!(channels(&tensor.narrow(0, 1, 2)?)?, values[1..]);
        let nothing = Tensor::zeros((2, 3), DType::F64, &Device::Cpu)?;
        let nothing = nothing.narrow(0, 2, 0)?.narrow(1, 3, 0)?;
        assert_eq!(nothing.layout().start_offset(), 9);
        assert_eq!(channels(&nothing)?, [0.; 0]);
        let error = channels(&tensor.to_dtype(DType::U8)?).unwrap_err();
        assert!(error.to_string().contains("got U8"), "{error}");
        let column = Tensor::zeros((2, 2), DType::F64, &Device::Cpu)?.narrow(1, 0, 1)?;
        let error = channels(&column).unwrap_err();
        assert!(error.to_string().contains("contiguous"), "{error}");
        Ok(())
    }

    #[test]
    fn a_variable_is_set_in_its_dtype_and_shape() -> Result<()> {
        let var = Var::zeros((1, 2, 1, 1), DType::F32, &Device::Cpu)?;
        set_channels(&var, &[1. / 3., -2.])?;
        assert_eq!(var.flatten_all()?.to_vec1::<f32>()?, [1. / 3., -2.]);
        Ok(())
    }

    #[test]
    fn rows_whose_elements_are_apart_are_no_matrix() -> Result<()> {
        let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?.t()?;
        let (storage, layout) = tensor.storage_and_layout();
        let error = matrix::<f32>(&storage, layout).err().unwrap();
        assert!(error.to_string().contains("adjacent"), "{error}");
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
