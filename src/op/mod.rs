//! The custom op: candle's side of a forward and its backward.
//!
//! A call passes through here once in each direction:
//!
//! 1. The layer checks its arguments and calls [`power_norm`] or [`power_norm_residual`].
//! 2. [`Step::forward`] runs the forward on the tensors' [device](crate::device), and moves ψ² and
//!    t.
//! 3. candle runs the custom op. Its output exists already, and the op gives it a place in the
//!    graph.
//! 4. A backward comes back through the op to [`Step::backward`], which moves ν.

mod residual;
pub(crate) mod step;

use self::step::{Call, Step};
use candle::{CustomOp1, CustomOp2, CustomOp3, DType, Result, Shape, Storage, Tensor};
use std::sync::{Mutex, PoisonError};

/// Runs the layer.
pub(crate) fn power_norm(call: Call) -> Result<Tensor> {
    let (step, y, _) = Step::forward(call)?;
    PowerNormOp::apply(step, y)
}

/// Runs the layer on the sum of the input and the residual. Returns the layer's output and the sum.
pub(crate) fn power_norm_residual(call: Call) -> Result<(Tensor, Tensor)> {
    let (step, y, Some(stream)) = Step::forward(call)? else {
        unreachable!("a forward with a residual writes the sum")
    };
    Ok((PowerNormOp::apply(step, y)?, stream))
}

/// Returns the rows in a layout that their device reads, copied if need be. A CPU reads rows
/// anywhere, if their elements are adjacent. Other devices read packed rows, and on an NVIDIA GPU
/// they begin on a 16-byte boundary.
pub(crate) fn readable(xs: &Tensor) -> Result<Tensor> {
    // A row of one element may have any stride.
    let is_adjacent = xs.dims().last() == Some(&1) || xs.stride().last() == Some(&1);
    if xs.device().is_cpu() && is_adjacent {
        return Ok(xs.clone());
    }
    let xs = xs.contiguous()?;
    let start = xs.layout().start_offset() * xs.dtype().size_in_bytes();
    if xs.device().is_cuda() && !start.is_multiple_of(16) {
        return xs.force_contiguous();
    }
    Ok(xs)
}

/// The mask in the form in which devices read it: contiguous, of `U8`.
fn as_bytes(keep: &Tensor) -> Result<Tensor> {
    match keep.dtype() {
        DType::U8 => keep.contiguous(),
        // A GPU rejects a launch over no elements.
        _ if keep.elem_count() == 0 => Tensor::zeros(keep.shape(), DType::U8, keep.device()),
        _ => keep.ne(0u8),
    }
}

/// An output that waits for candle to run its op. candle has a custom op compute its output, but
/// ours is computed earlier, together with the statistics.
struct Computed {
    storage: Mutex<Option<Storage>>,
    shape: Shape,
}

impl Computed {
    fn new(storage: Storage, shape: &Shape) -> Self {
        Self {
            storage: Mutex::new(Some(storage)),
            shape: shape.clone(),
        }
    }

    /// The output, for the one forward of its op.
    fn take(&self) -> Option<Storage> {
        (self.storage.lock().unwrap_or_else(PoisonError::into_inner)).take()
    }
}

/// Defines the forwards of a custom op with one, two or three arguments, on each of candle's
/// devices. The op has its output already, in a field `output`.
macro_rules! forwards {
    (1) => { $crate::op::forwards! { @ (_s1, _l1) } };
    (2) => { $crate::op::forwards! { @ (_s1, _l1) (_s2, _l2) } };
    (3) => { $crate::op::forwards! { @ (_s1, _l1) (_s2, _l2) (_s3, _l3) } };
    (@ $($arguments:tt)*) => {
        $crate::op::forwards! { cpu_fwd Cpu candle::CpuStorage, $($arguments)* }
        $crate::op::forwards! { cuda_fwd Cuda candle::CudaStorage, $($arguments)* }
        $crate::op::forwards! { metal_fwd Metal candle::MetalStorage, $($arguments)* }
    };
    (
        $forward:ident $device:ident $storage:ty,
        $(($argument:ident, $layout:ident))*
    ) => {
        fn $forward(
            &self,
            $($argument: &$storage, $layout: &candle::Layout),*
        ) -> candle::Result<($storage, candle::Shape)> {
            match self.output.take() {
                // The arguments are on the device on which the output was computed.
                Some(candle::Storage::$device(y)) => Ok((y, self.output.shape.clone())),
                _ => candle::bail!("power_norm: expected an output that was computed, got none"),
            }
        }
    };
}
use forwards;

/// A layer's place in the graph. Its arguments are the rows and, if the layer has them, weight and
/// bias.
struct PowerNormOp {
    output: Computed,
    step: Step,
}

impl PowerNormOp {
    const NAME: &'static str = "power_norm";

    /// The output tensor of a step whose output is `y`.
    fn apply(step: Step, y: Storage) -> Result<Tensor> {
        let x = step.pass.x.clone();
        let (weight, bias) = (step.pass.weight.clone(), step.pass.bias.clone());
        let output = Computed::new(y, x.shape());
        let op = Self { output, step };
        match (weight, bias) {
            (Some(weight), Some(bias)) => x.apply_op3(&weight, &bias, op),
            (Some(weight), None) => x.apply_op2(&weight, op),
            (None, _) => x.apply_op1(op),
        }
    }

    /// The gradients of the rows, the weight and the bias.
    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let gradients = self.step.backward(dy)?;
        let gradients = [gradients.input, gradients.weight, gradients.bias];
        match KEEPS_GRAPH_OF_GRADIENTS.with(|keeps| *keeps) {
            false => Ok(gradients),
            true => {
                let [input, weight, bias] = gradients.map(|gradient| {
                    gradient
                        .map(|of| FirstDerivative::apply(of, x, dy))
                        .transpose()
                });
                Ok([input?, weight?, bias?])
            }
        }
    }
}

impl CustomOp1 for PowerNormOp {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    forwards!(1);

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let [dx, _, _] = self.backward(x, dy)?;
        Ok(dx)
    }
}

impl CustomOp2 for PowerNormOp {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    forwards!(2);

    fn bwd(
        &self,
        x: &Tensor,
        _weight: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, dweight, _] = self.backward(x, dy)?;
        Ok((dx, dweight))
    }
}

impl CustomOp3 for PowerNormOp {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    forwards!(3);

    fn bwd(
        &self,
        x: &Tensor,
        _weight: &Tensor,
        _bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, dweight, dbias] = self.backward(x, dy)?;
        Ok((dx, dweight, dbias))
    }
}

thread_local! {
    /// candle's switch for derivatives of gradients: with it a backward keeps the graph of the
    /// gradients that it makes. candle too reads the variable once in each thread.
    static KEEPS_GRAPH_OF_GRADIENTS: bool = {
        let value = std::env::var("CANDLE_GRAD_DO_NOT_DETACH");
        value.is_ok_and(|value| !value.is_empty() && value != "0")
    };
}

/// A gradient in a graph that candle keeps. The kernels make gradients without a graph, so a
/// derivative of one would miss all that passes through this layer. A backward through it is an
/// error.
struct FirstDerivative {
    output: Computed,
}

impl FirstDerivative {
    /// `gradient` as a function of the rows and the gradient of the output.
    fn apply(gradient: Tensor, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let (storage, layout) = gradient.storage_and_layout();
        let output = Computed::new(storage.try_clone(layout)?, layout.shape());
        x.apply_op2(dy, Self { output })
    }
}

impl CustomOp2 for FirstDerivative {
    fn name(&self) -> &'static str {
        "power_norm_gradient"
    }

    forwards!(2);

    fn bwd(
        &self,
        _x: &Tensor,
        _dy: &Tensor,
        _gradient: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        candle::bail!(
            "power_norm: expected a backward from a loss, got one through the gradients of another \
             backward: the layer's gradients cannot be differentiated again, so compute a penalty \
             on gradients with layers of candle's own operations, such as \
             `candle_nn::ops::layer_norm_slow`"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::{CpuStorage, Device};

    const CPU: &Device = &Device::Cpu;

    /// Views of `[3, 4]`, and whether a CPU reads them where they are.
    #[test]
    fn a_cpu_reads_rows_of_adjacent_elements() -> Result<()> {
        let base = Tensor::arange(0f32, 12., CPU)?.reshape((3, 4))?;
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
            let read = readable(&view)?;
            let is_same = read.stride() == view.stride()
                && read.layout().start_offset() == view.layout().start_offset();
            assert_eq!(is_same, in_place, "{:?}", view.layout());
            assert_eq!(read.to_vec2::<f32>()?, view.to_vec2::<f32>()?);
            assert!(in_place || read.is_contiguous());
        }
        Ok(())
    }

    #[test]
    fn a_mask_becomes_bytes() -> Result<()> {
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let keep = Tensor::new(&[[0u8, 1, 0], [7, 0, 1]], CPU)?.to_dtype(dtype)?;
            let bytes = as_bytes(&keep.t()?)?;
            assert!(bytes.dtype() == DType::U8 && bytes.is_contiguous());
            let kept = bytes.flatten_all()?.to_vec1::<u8>()?;
            let kept: Vec<_> = kept.into_iter().map(|keep| keep != 0).collect();
            assert_eq!(kept, [false, true, true, false, false, true], "{dtype:?}");
            let none = as_bytes(&keep.narrow(0, 2, 0)?)?;
            assert_eq!((none.dtype(), none.dims()), (DType::U8, &[0, 3][..]));
        }
        // −1 is no padding either, and 256 is not 0.
        let keep = Tensor::new(&[-1i64, 256, 0], CPU)?;
        let bytes = as_bytes(&keep)?.to_vec1::<u8>()?;
        assert!(bytes[0] != 0 && bytes[1] != 0 && bytes[2] == 0);
        Ok(())
    }

    #[test]
    fn a_computed_output_is_taken_once() -> Result<()> {
        let shape = Shape::from((1, 2));
        let storage = || Storage::Cpu(CpuStorage::F32(vec![1., 2.]));
        let op = FirstDerivative {
            output: Computed::new(storage(), &shape),
        };
        let argument = Tensor::zeros(&shape, DType::F32, CPU)?;
        let taken = argument.apply_op2_no_bwd(&argument, &op)?;
        assert_eq!(taken.to_vec2::<f32>()?, [[1., 2.]]);
        let error = argument.apply_op2_no_bwd(&argument, &op).unwrap_err();
        assert!(error.to_string().contains("got none"), "{error}");
        // A panic elsewhere leaves the storage as it was.
        let computed = Computed::new(storage(), &shape);
        std::thread::scope(|scope| {
            let panics = || {
                let _guard = computed.storage.lock();
                std::panic::resume_unwind(Box::new(()));
            };
            assert!(scope.spawn(panics).join().is_err());
        });
        assert!(computed.take().is_some());
        Ok(())
    }

    /// The gradient of a stream goes to each argument that wants one, whole.
    #[test]
    fn the_stream_passes_its_gradient_on() -> Result<()> {
        let xs = candle::Var::new(&[1f32, 2.], CPU)?;
        let residual = Tensor::new(&[10f32, 20.], CPU)?;
        let sum = || Storage::Cpu(CpuStorage::F32(vec![11., 22.]));
        let stream = residual::stream(&xs, &residual, sum())?;
        assert_eq!(stream.to_vec1::<f32>()?, [11., 22.]);
        let weights = Tensor::new(&[3f32, -4.], CPU)?;
        let gradients = (&stream * &weights)?.backward()?;
        assert_eq!(gradients.get(&xs).unwrap().to_vec1::<f32>()?, [3., -4.]);
        assert!(gradients.get(&residual).is_none());
        // The same tensor twice gets both.
        let stream = residual::stream(&xs, &xs, sum())?;
        let gradients = (&stream * &weights)?.backward()?;
        assert_eq!(gradients.get(&xs).unwrap().to_vec1::<f32>()?, [6., -8.]);
        Ok(())
    }
}
