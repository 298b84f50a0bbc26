//! A residual's sum and its normalization in one pass, each way.
//!
//! A custom op of candle has one output, and this pass two. So the op that runs it gives a token, of one element, and two
//! more ops on the token hand the outputs out. Going back, they keep the gradients that they get and give the token one of
//! its own, upon which its op, which candle comes to after both, takes what they kept. The parameters reach the op by a
//! token as well, since an op has three arguments at most.

use crate::cpu::Element;
#[cfg(feature = "cuda")]
use crate::cuda;
#[cfg(feature = "cuda")]
use crate::op::cuda_argument;
use crate::op::{on_cpu, readable, Argument, Call, OutputGradients, PowerNormOp};
use crate::Error;
#[cfg(feature = "cuda")]
use candle::backend::{BackendDevice, BackendStorage};
#[cfg(feature = "cuda")]
use candle::CudaStorage;
use candle::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor,
};
use half::{bf16, f16};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Runs the layer on `xs + residual`, each `[.., C]`: its output, and the sum.
pub(crate) fn power_norm_residual(
    xs: &Tensor,
    residual: &Tensor,
    call: &Call,
) -> Result<(Tensor, Tensor)> {
    match xs.dtype() {
        DType::F32 => apply::<f32>(xs, residual, call),
        DType::F64 => apply::<f64>(xs, residual, call),
        DType::F16 => apply::<f16>(xs, residual, call),
        DType::BF16 => apply::<bf16>(xs, residual, call),
        other => Err(Error::InputDType(other).into()),
    }
}

fn apply<T: Element>(xs: &Tensor, residual: &Tensor, call: &Call) -> Result<(Tensor, Tensor)> {
    let (xs, residual) = (readable(xs)?, readable(residual)?);
    let affine = call.contiguous_affine()?;
    let params = Arc::new(Slot::default());
    let affine_token = match &affine {
        Some((weight, bias)) => Some(weight.apply_op2(bias, Params(params.clone()))?),
        None => None,
    };
    let (op, saved) = match &affine_token {
        Some(token) => PowerNormOp::<T>::new(call, &[&xs, &residual, token])?,
        None => PowerNormOp::<T>::new(call, &[&xs, &residual])?,
    };
    let [y, sum] = [(); 2].map(|()| Arc::new(Slot::default()));
    let input = Arc::new(OnceLock::new());
    let op = ResidualOp {
        op,
        affine,
        params,
        y: y.clone(),
        sum: sum.clone(),
        input: input.clone(),
    };
    let token = match &affine_token {
        Some(affine) => xs.apply_op3_arc(&residual, affine, Arc::new(Box::new(op)))?,
        None => xs.apply_op2_arc(&residual, Arc::new(Box::new(op)))?,
    };
    let shape = xs.shape();
    let hand_out = |slot| {
        let shape = shape.clone();
        token.apply_op1(HandOut { slot, shape })
    };
    let (y, sum) = (hand_out(y)?, hand_out(sum)?);
    // The storage alone: with the graph before it, it would keep itself alive.
    let _ = input.set(sum.detach());
    saved.step(call)?;
    Ok((y, sum))
}

/// What ops hand each other.
#[derive(Default)]
struct Slot {
    /// An output, on its way to its tensor.
    output: Mutex<Option<Storage>>,
    /// Gradients, on their way back.
    gradients: Mutex<[Option<Tensor>; 2]>,
}

impl Slot {
    fn output(&self) -> MutexGuard<'_, Option<Storage>> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_gradients(&self) -> [Option<Tensor>; 2] {
        self.keep_gradients([None, None])
    }

    fn keep_gradients(&self, gradients: [Option<Tensor>; 2]) -> [Option<Tensor>; 2] {
        let mut kept = self
            .gradients
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut kept, gradients)
    }
}

/// Runs the pass.
struct ResidualOp<T: Element> {
    op: PowerNormOp<T>,
    affine: Option<(Tensor, Tensor)>,
    params: Arc<Slot>,
    y: Arc<Slot>,
    sum: Arc<Slot>,
    /// `xs + residual`, which is what the layer normalizes.
    input: Arc<OnceLock<Tensor>>,
}

impl<T: Element> ResidualOp<T> {
    const NAME: &'static str = "power_norm_residual";

    fn cpu_forward(&self, xs: Argument, residual: Argument) -> Result<(CpuStorage, Shape)> {
        let params = (self.affine.as_ref())
            .map(|(weight, bias)| [weight.storage_and_layout(), bias.storage_and_layout()]);
        let affine = match &params {
            Some([weight, bias]) => {
                Some([(on_cpu(&weight.0)?, weight.1), (on_cpu(&bias.0)?, bias.1)])
            }
            None => None,
        };
        let outputs = self.op.cpu_forward(xs, Some(residual), affine)?;
        let [y, sum] = [Some(outputs.y), outputs.sum]
            .map(|values| values.map(|values| Storage::Cpu(T::to_cpu_storage_owned(values))));
        (*self.y.output(), *self.sum.output()) = (y, sum);
        Ok(cpu_token())
    }

    #[cfg(feature = "cuda")]
    fn cuda_forward(
        &self,
        xs: cuda::Argument,
        residual: cuda::Argument,
    ) -> Result<(CudaStorage, Shape)> {
        let params = (self.affine.as_ref())
            .map(|(weight, bias)| [weight.storage_and_layout(), bias.storage_and_layout()]);
        let affine = match &params {
            Some([weight, bias]) => Some([cuda_argument(weight)?, cuda_argument(bias)?]),
            None => None,
        };
        let outputs = self.op.cuda_forward(xs, Some(residual), affine)?;
        *self.y.output() = Some(Storage::Cuda(outputs.y));
        *self.sum.output() = outputs.sum.map(Storage::Cuda);
        cuda_token(xs.0)
    }

    /// The gradient of `xs` and `residual` alike.
    fn backward(&self, input: bool) -> Result<Option<Tensor>> {
        let ([dy, _], [dsum, _]) = (self.y.take_gradients(), self.sum.take_gradients());
        let Some(dy) = dy else {
            return Ok(dsum.filter(|_| input));
        };
        let Some(sum) = self.input.get() else {
            candle::bail!("{}: backward without a forward", Self::NAME)
        };
        let affine = (self.affine.as_ref()).map(|(weight, bias)| [weight, bias]);
        let outputs = OutputGradients {
            dy: &dy,
            dsum: dsum.as_ref(),
        };
        let [dx, dweight, dbias] = self.op.backward(sum, input, affine, outputs)?;
        self.params.keep_gradients([dweight, dbias]);
        Ok(dx)
    }
}

impl<T: Element> CustomOp3 for ResidualOp<T> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.cpu_forward((s1, l1), (s2, l2))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.cuda_forward((s1, l1), (s2, l2))
    }

    fn bwd(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        params: &Tensor,
        _token: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dx = self.backward(xs.track_op() || residual.track_op())?;
        let params = params.track_op().then(|| params.zeros_like()).transpose()?;
        Ok((of(xs, &dx), of(residual, &dx), params))
    }
}

impl<T: Element> CustomOp2 for ResidualOp<T> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.cpu_forward((s1, l1), (s2, l2))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.cuda_forward((s1, l1), (s2, l2))
    }

    fn bwd(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        _token: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dx = self.backward(xs.track_op() || residual.track_op())?;
        Ok((of(xs, &dx), of(residual, &dx)))
    }
}

/// A gradient for an argument that has one.
fn of(arg: &Tensor, gradient: &Option<Tensor>) -> Option<Tensor> {
    gradient.clone().filter(|_| arg.track_op())
}

/// Makes a tensor of an output.
struct HandOut {
    slot: Arc<Slot>,
    shape: Shape,
}

impl CustomOp1 for HandOut {
    fn name(&self) -> &'static str {
        "power_norm_residual_output"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.slot.output().take() {
            Some(Storage::Cpu(storage)) => Ok((storage, self.shape.clone())),
            _ => candle::bail!("{}: no output to hand out", self.name()),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.slot.output().take() {
            Some(Storage::Cuda(storage)) => Ok((storage, self.shape.clone())),
            _ => candle::bail!("{}: no output to hand out", self.name()),
        }
    }

    fn bwd(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.slot.keep_gradients([Some(gradient.clone()), None]);
        token.zeros_like().map(Some)
    }
}

/// Stands for weight and bias.
struct Params(Arc<Slot>);

impl CustomOp2 for Params {
    fn name(&self) -> &'static str {
        "power_norm_residual_params"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok(cpu_token())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        weight: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        cuda_token(weight)
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _token: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok(self.0.take_gradients().into())
    }
}

fn cpu_token() -> (CpuStorage, Shape) {
    (CpuStorage::F32(vec![0.]), Shape::from(1))
}

#[cfg(feature = "cuda")]
fn cuda_token(like: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    let shape = Shape::from(1);
    Ok((like.device().zeros_impl(&shape, DType::F32)?, shape))
}
