//! Turns a tensor of any strides into rows, which is how devices read it.

use candle::{Layout, Result, Tensor};

/// Evaluates `$body` with `$element` the type of an input of dtype `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            candle::DType::F32 => {
                type $element = f32;
                $body
            }
            candle::DType::F64 => {
                type $element = f64;
                $body
            }
            candle::DType::F16 => {
                type $element = half::f16;
                $body
            }
            candle::DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            other => Err($crate::error::Error::InputDType(other).into()),
        }
    };
}
pub(crate) use with_element;

/// Returns the tensor in a layout that its device reads, copied if need be. A CPU reads rows
/// anywhere, if their elements are adjacent. Other devices read packed rows, and on an NVIDIA GPU
/// they begin on a 16-byte boundary.
pub(crate) fn readable(xs: &Tensor) -> Result<Tensor> {
    if xs.device().is_cpu() && packed_dims(xs.layout()).is_some() {
        return Ok(xs.clone());
    }
    let xs = xs.contiguous()?;
    let start = xs.layout().start_offset() * xs.dtype().size_in_bytes();
    if xs.device().is_cuda() && !start.is_multiple_of(16) {
        return xs.force_contiguous();
    }
    Ok(xs)
}

/// How many trailing dimensions make a block of packed rows; `None` if the elements of a row are
/// not adjacent.
pub(crate) fn packed_dims(layout: &Layout) -> Option<usize> {
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
