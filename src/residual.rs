//! A residual's sum and its normalization in one pass, each way.
//!
//! A custom op of candle has one output, and this pass two. So the op that runs it gives a token, of one element, and two
//! more ops on the token hand the outputs out. Backward, each of the two stores its output's gradient and returns one for the
//! token. candle visits the token after both, and its op takes what they stored. Weight and bias reach the op as a token too,
//! since an op has three arguments at most.

use crate::cpu::Element;
#[cfg(feature = "cuda")]
use crate::cuda;
#[cfg(feature = "cuda")]
use crate::op::cuda_argument;
use crate::op::{on_cpu, readable, with_element, Argument, Call, OutputGradients, PowerNormOp};
#[cfg(feature = "cuda")]
use candle::backend::{BackendDevice, BackendStorage};
#[cfg(feature = "cuda")]
use candle::CudaStorage;
use candle::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, Device, Layout, Result, Shape, Storage, Tensor,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

/// Runs the layer on `xs + residual`, each `[.., C]`: its output, and the sum.
pub(crate) fn power_norm_residual(
    xs: &Tensor,
    residual: &Tensor,
    call: &Call,
) -> Result<(Tensor, Tensor)> {
    with_element!(xs.dtype(), T => apply::<T>(xs, residual, call))
}

fn apply<T: Element>(xs: &Tensor, residual: &Tensor, call: &Call) -> Result<(Tensor, Tensor)> {
    let params = Arc::new(Stored::default());
    let prepared = || {
        let (xs, residual) = (readable(xs)?, readable(residual)?);
        let affine = call.contiguous_affine()?;
        let affine_token = match &affine {
            Some((weight, bias)) => Some(weight.apply_op2(bias, Params(params.clone()))?),
            None => None,
        };
        let op = match &affine_token {
            Some(token) => PowerNormOp::<T>::new(call, &[&xs, &residual, token])?,
            None => PowerNormOp::<T>::new(call, &[&xs, &residual])?,
        };
        Ok((xs, residual, affine, affine_token, op))
    };
    let (xs, residual, affine, affine_token, (op, saved)) = call.begin(prepared)?;
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
    let hand_out = |slot, mark| {
        let shape = shape.clone();
        token.apply_op1(HandOut { slot, mark, shape })
    };
    let (y, sum) = (hand_out(y, Y)?, hand_out(sum, SUM)?);
    // Detached: with its graph, the op would own itself.
    let _ = input.set(sum.detach());
    saved.finish(call)?;
    Ok((y, sum))
}

/// An output and its gradient, on their ways.
#[derive(Default)]
struct Slot {
    output: Mutex<Option<Storage>>,
    gradient: Stored<Tensor>,
}

/// What one op stores for another, in each thread that goes back through the graph.
struct Stored<T>(Mutex<HashMap<ThreadId, T>>);

impl<T> Default for Stored<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Stored<T> {
    fn put(&self, value: T) {
        lock(&self.0).insert(thread::current().id(), value);
    }

    fn take(&self) -> Option<T> {
        lock(&self.0).remove(&thread::current().id())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the pass.
struct ResidualOp<T: Element> {
    op: PowerNormOp<T>,
    affine: Option<(Tensor, Tensor)>,
    params: Arc<Stored<[Option<Tensor>; 2]>>,
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
        *lock(&self.y.output) = y;
        *lock(&self.sum.output) = sum;
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
        *lock(&self.y.output) = Some(Storage::Cuda(outputs.y));
        *lock(&self.sum.output) = outputs.sum.map(Storage::Cuda);
        cuda_token(xs.0)
    }

    /// The gradient of `xs` and `residual` alike.
    fn backward(&self, input: bool, token_gradient: &Tensor) -> Result<Option<Tensor>> {
        let (dy, dsum) = (self.y.gradient.take(), self.sum.gradient.take());
        // What a backward that failed left behind is not of this one. (A GPU is not waited for to tell.)
        let came = match token_gradient.device() {
            Device::Cpu => token_gradient.to_vec1::<f32>()?[0],
            _ => Y + SUM,
        };
        let dy = dy.filter(|_| came != SUM);
        let dsum = dsum.filter(|_| came != Y);
        let Some(dy) = dy else {
            self.params.take();
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
        self.params.put([dweight, dbias]);
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
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dx = self.backward(xs.track_op() || residual.track_op(), gradient)?;
        let params = params.track_op().then(|| params.detach());
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
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dx = self.backward(xs.track_op() || residual.track_op(), gradient)?;
        Ok((of(xs, &dx), of(residual, &dx)))
    }
}

/// A gradient for an argument that has one.
fn of(arg: &Tensor, gradient: &Option<Tensor>) -> Option<Tensor> {
    gradient.clone().filter(|_| arg.track_op())
}

/// The gradients that the outputs give the token: their sum tells which of them have one.
const Y: f32 = 1.;
const SUM: f32 = 2.;

/// Makes a tensor of an output.
struct HandOut {
    slot: Arc<Slot>,
    mark: f32,
    shape: Shape,
}

impl CustomOp1 for HandOut {
    fn name(&self) -> &'static str {
        "power_norm_residual_output"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match lock(&self.slot.output).take() {
            Some(Storage::Cpu(storage)) => Ok((storage, self.shape.clone())),
            _ => candle::bail!("{}: no output to hand out", self.name()),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match lock(&self.slot.output).take() {
            Some(Storage::Cuda(storage)) => Ok((storage, self.shape.clone())),
            _ => candle::bail!("{}: no output to hand out", self.name()),
        }
    }

    fn bwd(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.slot.gradient.put(gradient.clone());
        Ok(Some(match token.device() {
            Device::Cpu => Tensor::new(&[self.mark], token.device())?,
            // Any that costs no launch.
            _ => token.detach(),
        }))
    }
}

/// Stands for weight and bias.
struct Params(Arc<Stored<[Option<Tensor>; 2]>>);

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
        weight: &Tensor,
        bias: &Tensor,
        _token: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        // candle panics where a computed tensor on a backward's way has no gradient.
        let zero = |param: &Tensor| match param.track_op() && !param.is_variable() {
            true => param.zeros_like().map(Some),
            false => Ok(None),
        };
        match self.0.take() {
            Some(gradients) => Ok(gradients.into()),
            None => Ok((zero(weight)?, zero(bias)?)),
        }
    }
}

fn cpu_token() -> (CpuStorage, Shape) {
    (CpuStorage::F32(vec![0.]), Shape::from(1))
}

#[cfg(feature = "cuda")]
fn cuda_token(like: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    let shape = Shape::from(1);
    Ok((like.device().zeros_impl(&shape, candle::DType::F32)?, shape))
}
