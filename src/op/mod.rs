//! The custom op: candle's side of a forward and its backward.
//!
//! A call passes through here once in each direction:
//!
//! 1. The layer checks its arguments and calls [`power_norm`], or
//!    [`power_norm_residual`](residual::power_norm_residual).
//! 2. [`Step::forward`] runs the forward on the tensors' [device](crate::device), and moves ψ² and
//!    t.
//! 3. candle runs the custom op, which hands out the output that exists already and gives it a
//!    place in the graph.
//! 4. A backward comes back through the op to [`Step::backward`], which moves ν.

pub(crate) mod residual;
pub(crate) mod step;

use self::step::{Call, Step};
use candle::backend::{BackendDevice, BackendStorage};
use candle::{
    CpuStorage, CudaStorage, CustomOp3, DType, MetalStorage, Result, Shape, Storage, Tensor,
};
use std::sync::{Arc, Mutex, PoisonError};

/// Runs the layer.
pub(crate) fn power_norm(call: Call) -> Result<Tensor> {
    let (step, inputs, outputs) = Step::forward(call)?;
    let xs = inputs.x;
    let op = PowerNormOp {
        y: Computed::new(outputs.y, xs.shape()),
        step,
    };
    // In place of a parameter that the layer lacks, the op has the input a second time.
    let parameter = |parameter: Option<Tensor>| parameter.unwrap_or_else(|| xs.clone());
    xs.apply_op3(&parameter(inputs.weight), &parameter(inputs.bias), op)
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
        // A GPU cannot launch an operation on nothing.
        _ if keep.elem_count() == 0 => Tensor::zeros(keep.shape(), DType::U8, keep.device()),
        _ => keep.ne(0u8),
    }
}

/// An output that was computed before candle runs the op that hands it out.
#[derive(Clone)]
struct Computed {
    storage: Arc<Mutex<Option<Storage>>>,
    shape: Shape,
}

impl Computed {
    fn new(storage: Option<Storage>, shape: &Shape) -> Self {
        Self {
            storage: Arc::new(Mutex::new(storage)),
            shape: shape.clone(),
        }
    }

    /// Hands the output out. The caller passes the storage of an argument of the op, which is on
    /// the same device and so has the same type.
    fn hand_out<S: TypedStorage>(&self, _: &S) -> Result<(S, Shape)> {
        let storage = (self.storage.lock().unwrap_or_else(PoisonError::into_inner)).take();
        match storage.and_then(S::of) {
            Some(storage) => Ok((storage, self.shape.clone())),
            None => candle::bail!("power_norm: expected an output to hand out, got none"),
        }
    }
}

/// The storage of one of candle's devices.
trait TypedStorage: BackendStorage<Device: BackendDevice<Storage = Self>> {
    fn of(storage: Storage) -> Option<Self>;
}

macro_rules! typed_storage {
    ($($device:ident => $storage:ty),*) => {
        $(impl TypedStorage for $storage {
            fn of(storage: Storage) -> Option<Self> {
                match storage {
                    Storage::$device(storage) => Some(storage),
                    _ => None,
                }
            }
        })*
    };
}
typed_storage!(Cpu => CpuStorage, Cuda => CudaStorage, Metal => MetalStorage);

/// A token, the output of an op that computes nothing: a tensor of one element, which stands for
/// others in the graph.
fn token<S: TypedStorage>(_op: &impl Sized, like: &S) -> Result<(S, Shape)> {
    let shape = Shape::from(1);
    Ok((like.device().zeros_impl(&shape, DType::F32)?, shape))
}

/// Defines the forwards of a custom op with one, two or three arguments. Each calls `$output` with
/// the op and the storage of the first argument.
macro_rules! forwards {
    (1, $output:path) => { $crate::op::forwards! { @ $output, (first, l1) } };
    (2, $output:path) => { $crate::op::forwards! { @ $output, (first, l1) (_s2, _l2) } };
    (3, $output:path) => { $crate::op::forwards! { @ $output, (first, l1) (_s2, _l2) (_s3, _l3) } };
    (@ $output:path, $($arguments:tt)*) => {
        $crate::op::forwards! { cpu_fwd candle::CpuStorage, $output, $($arguments)* }
        $crate::op::forwards! { cuda_fwd candle::CudaStorage, $output, $($arguments)* }
        $crate::op::forwards! { metal_fwd candle::MetalStorage, $output, $($arguments)* }
    };
    (
        $forward:ident $storage:ty, $output:path,
        ($first:ident, $l1:ident) $(($more:ident, $layout:ident))*
    ) => {
        fn $forward(
            &self,
            $first: &$storage,
            _: &candle::Layout,
            $($more: &$storage, $layout: &candle::Layout),*
        ) -> candle::Result<($storage, candle::Shape)> {
            $output(self, $first)
        }
    };
}
pub(crate) use forwards;

/// A layer's place in the graph.
#[derive(Clone)]
struct PowerNormOp {
    y: Computed,
    step: Arc<Step>,
}

impl PowerNormOp {
    fn hand_out<S: TypedStorage>(&self, first: &S) -> Result<(S, Shape)> {
        self.y.hand_out(first)
    }
}

impl CustomOp3 for PowerNormOp {
    fn name(&self) -> &'static str {
        "power_norm"
    }

    forwards!(3, Self::hand_out);

    fn bwd(
        &self,
        x: &Tensor,
        _weight: &Tensor,
        _bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradients = self.step.backward(x, dy, None, x.track_op())?;
        Ok((gradients.input, gradients.weight, gradients.bias))
    }
}
