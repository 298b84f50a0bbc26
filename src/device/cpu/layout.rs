//! Reads candle's tensors as rows, and as values of channels.
//!
//! A tensor `[.., C]` is a [`Matrix`]: rows of C adjacent elements, wherever they lie in the
//! storage. Rows that are a fixed number of elements apart, the *stride*, make up a *block*, and
//! all blocks have the same number of rows. So a view costs no copy unless the elements of its rows
//! are apart. Views of a packed tensor `[3, 4, 6]`, for example:
//!
//! ```text
//! the tensor itself         1 block of 12 rows, 6 apart, from element 0
//! narrow(2, 2, 2)           1 block of 12 rows, 6 apart, from element 2
//! narrow(1, 1, 2)           3 blocks of 2 rows, 6 apart, from elements 6, 30 and 54
//! transpose(0, 1)           4 blocks of 3 rows, 24 apart, from elements 0, 6, 12 and 18
//! transpose(1, 2)           no matrix: elements of a row are 6 apart, so it is copied
//! ```
//!
//! The queries of a packed projection, `[tokens, 3 C]`, are one block like the second of these, and
//! its heads, `[batch, heads, tokens, C/heads]`, one for each head of each sequence.
#![allow(unsafe_code)] // for `prefetch`

use super::convert::Element;
use crate::device::pass::{Pass, RowNorm};
use candle::backend::BackendStorage;
use candle::{CpuStorage, Layout, Result, Storage, Tensor, Var, WithDType};
use half::{bf16, f16};

/// `[rows, cols]`, where the elements of a row are adjacent in memory.
pub(super) struct Matrix<'a, T> {
    /// C, at least 1.
    pub cols: usize,
    pub rows: usize,
    /// All elements of the storage.
    pub values: &'a [T],
    /// Elements from the start of a row to the start of the next one in its block.
    pub stride: usize,
    /// Rows of a block.
    pub block_rows: usize,
    /// The first element of the first block.
    pub start: usize,
    /// The first elements of all blocks; empty if there is one, so that a few rows allocate nothing.
    pub blocks: Vec<usize>,
}

impl<'a, T> Matrix<'a, T> {
    /// Rows that follow each other without a gap.
    #[inline]
    pub fn packed(rows: usize, cols: usize, values: &'a [T]) -> Self {
        Self {
            cols,
            rows,
            values,
            stride: cols,
            block_rows: rows,
            start: 0,
            blocks: vec![],
        }
    }

    #[inline(always)]
    pub fn row(&self, row: usize) -> &[T] {
        match self.stride == self.cols && self.blocks.is_empty() {
            true => &self.values[self.start + row * self.cols..][..self.cols],
            false => self.row_apart(row),
        }
    }

    /// A row of other matrices. As part of each chunk's function it was a tenth of their code.
    #[inline(never)]
    fn row_apart(&self, row: usize) -> &[T] {
        let start = match self.blocks.is_empty() {
            true => self.start + row * self.stride,
            false => self.blocks[row / self.block_rows] + row % self.block_rows * self.stride,
        };
        if self.stride > self.cols {
            // Past the end of a block this prefetches something else: harmless, but wasted.
            prefetch(self.values, start + ROWS_AHEAD * self.stride, self.cols);
        }
        &self.values[start..][..self.cols]
    }
}

/// How far rows that lie apart are read ahead. A processor sees by itself that adjacent rows follow
/// each other, but not that the next head of 64 channels is a page further on, so that each row
/// would wait for memory.
const ROWS_AHEAD: usize = 8;

/// Has the processor load the first lines of `values[start..][..len]`, if they are there.
#[inline(always)]
#[cfg_attr(any(miri, not(target_arch = "x86_64")), allow(unused_variables))]
fn prefetch<T>(values: &[T], start: usize, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(row) = values.get(start..start + len) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        /// Of a wide row, the processor sees by itself that lines follow each other.
        const MOST_LINES: usize = 8;
        let line = 64 / size_of::<T>();
        for i in (0..len).step_by(line).take(MOST_LINES) {
            // SAFETY: the element is in bounds, and every x86-64 processor has SSE.
            unsafe { _mm_prefetch::<_MM_HINT_T0>((&raw const row[i]).cast()) };
        }
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

    /// The same rows, read from `sum`, which is `x + residual`.
    pub fn of_sum<'b>(&self, sum: &'b [T]) -> Rows<'b, T>
    where
        'a: 'b,
    {
        Rows {
            x: Matrix::packed(self.len(), self.cols(), sum),
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
#[inline]
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
        norm: pass.norm,
        sums_all: !pass.recipe.masks_backward(),
    })
}

/// The values of a tensor `[C]` in f64, whatever its dtype.
pub(super) fn channels(tensor: &Tensor) -> Result<Vec<f64>> {
    let (storage, layout) = tensor.storage_and_layout();
    channels_of(on_cpu(&storage)?, layout)
}

/// The same of the tensor's storage.
pub(super) fn channels_of(storage: &CpuStorage, layout: &Layout) -> Result<Vec<f64>> {
    fn widen<T: WithDType>(storage: &CpuStorage, layout: &Layout) -> Result<Vec<f64>> {
        let values = packed::<T>(storage, layout)?.iter();
        Ok(values.map(|value| value.to_f64()).collect())
    }
    match storage {
        CpuStorage::F32(_) => widen::<f32>(storage, layout),
        CpuStorage::F64(_) => widen::<f64>(storage, layout),
        CpuStorage::F16(_) => widen::<f16>(storage, layout),
        CpuStorage::BF16(_) => widen::<bf16>(storage, layout),
        other => candle::bail!(
            "candle_powernorm: expected parameters and state of dtype F32, F64, F16 or BF16, got {:?}",
            other.dtype()
        ),
    }
}

/// Sets a variable of the state to these values of channels, rounded to its dtype.
pub(super) fn set_channels(var: &Var, values: &[f64]) -> Result<()> {
    var.set(&Tensor::from_slice(values, var.shape(), var.device())?.to_dtype(var.dtype())?)
}

/// The storage of an output.
#[inline]
pub(super) fn storage<T: Element>(values: Vec<T>) -> Storage {
    Storage::Cpu(T::to_cpu_storage_owned(values))
}

/// A copy of rows that [`matrix`] does not read where they are.
pub(super) fn copied(rows: &Tensor) -> Result<Option<Tensor>> {
    match has_adjacent_elements(rows.layout()) {
        true => Ok(None),
        false => rows.detach().contiguous().map(Some),
    }
}

/// The elements of a row are adjacent. A row of one element may have any stride.
fn has_adjacent_elements(layout: &Layout) -> bool {
    layout.dims().last() == Some(&1) || layout.stride().last() == Some(&1)
}

/// Where rows begin, as in a [`Matrix`].
#[derive(Debug, PartialEq)]
struct Blocks {
    stride: usize,
    rows: usize,
    /// Empty if the only block begins with the tensor.
    starts: Vec<usize>,
}

/// The blocks of rows; `None` if the elements of a row are not adjacent.
///
/// The dimensions before the last are taken from the back. The first of them that is not 1 gives
/// the stride, and the ones before it join its block while their own stride continues it. Each
/// index into what is left begins a block. For `[3, 2, 6]` with strides `[24, 6, 1]` rows are 6
/// apart, and 24 is not 2 · 6: blocks of two rows begin at 0, 24 and 48.
fn row_blocks(layout: &Layout) -> Option<Blocks> {
    if !has_adjacent_elements(layout) {
        return None;
    }
    let (&cols, outer) = layout.dims().split_last()?;
    let dims: Vec<_> = (outer.iter().copied().zip(layout.stride().iter().copied()))
        .filter(|&(dim, _)| dim != 1)
        .collect();
    let stride = dims.last().map_or(cols, |&(_, stride)| stride);
    let (mut rows, mut left) = (1, dims.len());
    for &(dim, next) in dims.iter().rev() {
        if next != stride * rows {
            break;
        }
        rows *= dim;
        left -= 1;
    }
    let mut starts = vec![];
    if left > 0 {
        starts.push(layout.start_offset());
    }
    for &(dim, stride) in &dims[..left] {
        let shifts = || (0..dim).map(|i| i * stride);
        starts = (starts.iter())
            .flat_map(|start| shifts().map(move |shift| start + shift))
            .collect();
    }
    Some(Blocks {
        stride,
        rows,
        starts,
    })
}

/// The rows of a tensor that [`copied`] leaves where it is.
#[inline]
pub(super) fn matrix<'a, T: WithDType>(
    storage: &'a Storage,
    layout: &Layout,
) -> Result<Matrix<'a, T>> {
    let Some((&cols, outer)) = layout.dims().split_last() else {
        candle::bail!("candle_powernorm: expected rows, got a scalar")
    };
    let (rows, values) = (outer.iter().product(), on_cpu(storage)?.as_slice()?);
    if layout.is_contiguous() {
        let packed = Matrix::packed(rows, cols, values);
        let start = layout.start_offset();
        return Ok(Matrix { start, ..packed });
    }
    let Some(blocks) = row_blocks(layout) else {
        candle::bail!("candle_powernorm: expected rows of adjacent elements, got {layout:?}")
    };
    Ok(Matrix {
        cols,
        rows,
        values,
        stride: blocks.stride,
        block_rows: blocks.rows,
        start: layout.start_offset(),
        blocks: blocks.starts,
    })
}

/// The elements of a contiguous tensor.
#[inline]
pub(super) fn packed<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<&'a [T]> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle::bail!("candle_powernorm: expected a contiguous tensor, got {layout:?}")
    };
    // A view of nothing may begin past the end of its storage.
    let elements = if start < end { start..end } else { 0..0 };
    Ok(&storage.as_slice()?[elements])
}

/// The storage of a tensor that must be on the CPU.
#[inline]
pub(super) fn on_cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        other => candle::bail!(
            "candle_powernorm: expected a tensor on the CPU, got one on {:?}",
            other.device().location()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::{DType, Device};

    /// Strides, rows of a block and starts, by hand.
    #[test]
    fn views_are_blocks_of_rows() -> Result<()> {
        let base = Tensor::zeros((3, 4, 6), DType::F32, &Device::Cpu)?;
        let check = |view: &Tensor, stride, rows, starts: &[usize]| {
            assert_eq!(view.layout().start_offset(), starts[0]);
            let starts = if starts.len() > 1 {
                starts.to_vec()
            } else {
                vec![]
            };
            let expected = Blocks {
                stride,
                rows,
                starts,
            };
            assert_eq!(row_blocks(view.layout()), Some(expected), "{view:?}");
        };
        check(&base, 6, 12, &[0]);
        check(&base.narrow(0, 1, 2)?, 6, 8, &[24]);
        check(&base.narrow(1, 1, 2)?, 6, 2, &[6, 30, 54]);
        check(&base.transpose(0, 1)?, 24, 3, &[0, 6, 12, 18]);
        check(&base.narrow(2, 2, 3)?, 6, 12, &[2]);
        check(&base.narrow(2, 2, 3)?.narrow(0, 0, 1)?, 6, 4, &[2]);
        let row = base.narrow(0, 2, 1)?.narrow(1, 3, 1)?;
        check(&row, 6, 1, &[66]);
        check(&row.broadcast_as((2, 1, 6))?, 0, 2, &[66]);
        check(&base.narrow(2, 4, 1)?, 6, 12, &[4]);
        // One row, from which no other is any distance away.
        check(&row.narrow(2, 1, 2)?, 2, 1, &[67]);
        // Two heads of three channels, cut from rows of six.
        let heads = base.reshape((3, 4, 2, 3))?.transpose(1, 2)?;
        check(&heads, 6, 4, &[0, 3, 24, 27, 48, 51]);
        // A column of a transposed tensor is rows of one element.
        check(&base.transpose(1, 2)?.narrow(2, 1, 1)?, 1, 6, &[6, 30, 54]);
        assert_eq!(row_blocks(base.transpose(1, 2)?.layout()), None);
        // Three blocks of no rows, and no blocks.
        check(&base.narrow(1, 0, 0)?, 6, 0, &[0, 24, 48]);
        check(&base.narrow(0, 0, 0)?, 6, 0, &[0]);
        Ok(())
    }

    #[test]
    fn rows_of_blocks() {
        // Two blocks of two rows of three, one element apart, with another between the blocks.
        let values: Vec<i32> = (0..17).collect();
        let matrix = Matrix {
            cols: 3,
            rows: 4,
            values: &values,
            stride: 4,
            block_rows: 2,
            start: 1,
            blocks: vec![1, 10],
        };
        let rows: Vec<_> = (0..4).map(|row| matrix.row(row)).collect();
        assert_eq!(rows, [[1, 2, 3], [5, 6, 7], [10, 11, 12], [14, 15, 16]]);
        let packed = Matrix::packed(2, 4, &values);
        assert_eq!(packed.row(1), [4, 5, 6, 7]);
    }

    /// Four rows of six columns.
    fn rows<'a>(values: &'a [f32], keep: Option<&'a [u8]>, norm: RowNorm) -> Rows<'a, f32> {
        Rows {
            x: Matrix::packed(4, 6, values),
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
    fn the_sum_is_read_in_place_of_the_input() {
        let (values, sum) = ([0.; 24], [1.; 24]);
        let norm = RowNorm::Groups {
            count: 2,
            eps: 1e-5,
        };
        let rows = rows(&values, Some(&[1, 0, 1, 1]), norm);
        let of_sum = rows.of_sum(&sum);
        assert_eq!(of_sum.x.row(3), [1.; 6]);
        assert!(of_sum.residual.is_none() && of_sum.sums_all);
        assert_eq!((of_sum.len(), of_sum.kept()), (4, 3));
        assert_eq!(of_sum.norm, norm);
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

    /// The views whose rows cannot be read where they are are copied, and no others.
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
            let read = copied(&view)?.unwrap_or_else(|| view.clone());
            assert!(row_blocks(read.layout()).is_some(), "{read:?}");
            let in_place = row_blocks(view.layout()).is_some();
            assert_eq!(read.stride() == view.stride(), in_place, "{view:?}");
        }
        Ok(())
    }

    /// Views of `[3, 4]`, and whether a CPU reads them where they are.
    #[test]
    fn a_cpu_reads_rows_of_adjacent_elements() -> Result<()> {
        let base = Tensor::arange(0f32, 12., &Device::Cpu)?.reshape((3, 4))?;
        for (view, in_place) in [
            (base.clone(), true),
            (base.narrow(1, 1, 2)?, true),
            (base.narrow(0, 1, 2)?, true),
            (base.narrow(1, 2, 1)?, true), // rows of one element, 4 apart
            (base.t()?, false),
            (base.t()?.narrow(1, 1, 1)?, true),
            (base.narrow(0, 0, 0)?, true),
            (base.narrow(0, 1, 1)?.broadcast_as((5, 4))?, true),
            (base.narrow(1, 1, 1)?.broadcast_as((3, 5))?, false),
        ] {
            let read = copied(&view)?.unwrap_or_else(|| view.clone());
            let is_same = read.stride() == view.stride()
                && read.layout().start_offset() == view.layout().start_offset();
            assert_eq!(is_same, in_place, "{:?}", view.layout());
            assert_eq!(read.to_vec2::<f32>()?, view.to_vec2::<f32>()?);
            assert!(in_place || read.is_contiguous());
        }
        Ok(())
    }
}
