//! The custom op: candle's side of a forward and its backward.
//!
//! A call passes through here once in each direction:
//!
//! 1. The layer checks its arguments and calls [`power_norm`], or
//!    [`power_norm_residual`](residual::power_norm_residual).
//! 2. [`Step::forward`] runs the forward on the tensors' [device](crate::device).
//! 3. candle runs the custom op, which hands out the output that exists already and gives it a
//!    place in the graph.
//! 4. [`Step::commit_forward`] moves ψ² and t, now that nothing can fail any more.
//! 5. A backward comes back through the op to [`Step::backward`], which moves ν.

pub(crate) mod residual;
pub(crate) mod step;

use self::step::{Call, Step};
use candle::backend::{BackendDevice, BackendStorage};
use candle::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp3, DType, MetalStorage, Result, Shape, Storage,
    Tensor,
};
use std::sync::{Arc, Mutex, PoisonError};

/// Runs the layer.
pub(crate) fn power_norm(call: Call) -> Result<Tensor> {
    let (step, inputs, outputs) = Step::forward(call)?;
    let xs = inputs.x;
    let op = PowerNormOp {
        output: Output::new(outputs.y, xs.shape()),
        step: step.clone(),
    };
    let ys = match &inputs.affine {
        Some([weight, bias]) => xs.apply_op3_arc(weight, bias, Arc::new(Box::new(op)))?,
        None => xs.apply_op1_arc(Arc::new(Box::new(op)))?,
    };
    step.commit_forward()?;
    Ok(ys)
}

/// An output that was computed before candle runs the op that hands it out.
struct Output {
    storage: Mutex<Option<Storage>>,
    shape: Shape,
}

impl Output {
    fn new(storage: Option<Storage>, shape: &Shape) -> Self {
        Self {
            storage: Mutex::new(storage),
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

/// A tensor of one element, which stands for others in the graph.
fn token<S: TypedStorage>(like: &S) -> Result<(S, Shape)> {
    let shape = Shape::from(1);
    Ok((like.device().zeros_impl(&shape, DType::F32)?, shape))
}

/// Defines the forwards of a custom op with one, two or three arguments. Each calls the op's method
/// `output` with the storage of the first argument.
macro_rules! forwards {
    (1) => { $crate::op::forwards! { @ (first, l1) } };
    (2) => { $crate::op::forwards! { @ (first, l1) (_s2, _l2) } };
    (3) => { $crate::op::forwards! { @ (first, l1) (_s2, _l2) (_s3, _l3) } };
    (@ $($arguments:tt)*) => {
        $crate::op::forwards! { cpu_fwd candle::CpuStorage, $($arguments)* }
        $crate::op::forwards! { cuda_fwd candle::CudaStorage, $($arguments)* }
        $crate::op::forwards! { metal_fwd candle::MetalStorage, $($arguments)* }
    };
    ($forward:ident $storage:ty, ($first:ident, $l1:ident) $(($more:ident, $layout:ident))*) => {
        fn $forward(
            &self,
            $first: &$storage,
            _: &candle::Layout,
            $($more: &$storage, $layout: &candle::Layout),*
        ) -> candle::Result<($storage, candle::Shape)> {
            self.output($first)
        }
    };
}
pub(crate) use forwards;

/// A layer's place in the graph.
struct PowerNormOp {
    output: Output,
    step: Arc<Step>,
}

impl PowerNormOp {
    fn output<S: TypedStorage>(&self, first: &S) -> Result<(S, Shape)> {
        self.output.hand_out(first)
    }
}

impl CustomOp3 for PowerNormOp {
    fn name(&self) -> &'static str {
        "power_norm"
    }

    forwards!(3);

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let affine = Some([weight, bias]);
        let gradients = (self.step).backward(x, affine, dy, None, x.track_op())?;
        Ok((gradients.input, gradients.weight, gradients.bias))
    }
}

impl CustomOp1 for PowerNormOp {
    fn name(&self) -> &'static str {
        "power_norm"
    }

    forwards!(1);

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let gradients = (self.step).backward(x, None, dy, None, x.track_op())?;
        Ok(gradients.input)
    }
}
