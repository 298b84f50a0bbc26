//! A residual's sum and its normalization in one pass, each way.
//!
//! A custom op of candle has one output, and this pass two. So the op that runs it gives a token,
//! of one element, and two more ops on the token hand the outputs out. Backward, each of the two
//! stores its output's gradient and returns one for the token. candle visits the token after both,
//! and its op takes what they stored. Weight and bias reach the op as a token too, since an op has
//! three arguments at most.

use super::{forwards, token, Backprop, Output, Request, TypedStorage};
use crate::op::rows::readable;
use crate::op::step;
use candle::{CustomOp1, CustomOp2, CustomOp3, Device, Result, Shape, Tensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

/// Runs the layer on `xs + residual`, each `[.., C]`, if they pass `check`: its output, and the
/// sum.
pub(crate) fn power_norm_residual(
    xs: &Tensor,
    residual: &Tensor,
    request: &Request,
    check: impl FnOnce() -> Result<()>,
) -> Result<(Tensor, Tensor)> {
    let params = Arc::new(Stored::default());
    let prepare = || {
        check()?;
        let (xs, residual, arguments) = (readable(xs)?, readable(residual)?, request.arguments()?);
        let affine_token = match arguments.affine() {
            Some([weight, bias]) => Some(weight.apply_op2(bias, Params(params.clone()))?),
            None => None,
        };
        Ok((xs, residual, arguments, affine_token))
    };
    let (xs, residual, arguments, affine_token) = step::begin(request, prepare)?;
    let tracked = [Some(&xs), Some(&residual), affine_token.as_ref()];
    let tracked = tracked.into_iter().flatten().any(Tensor::track_op);
    let (backprop, outputs) = request.forward(&xs, Some(&residual), &arguments, tracked)?;
    let step = backprop.step.clone();
    let [y, sum] = [(); 2].map(|()| Arc::new(Stored::default()));
    let input = Arc::new(OnceLock::new());
    let op = ResidualOp {
        backprop,
        affine: arguments.affine,
        params,
        y: y.clone(),
        sum: sum.clone(),
        input: input.clone(),
    };
    let token = match &affine_token {
        Some(affine) => xs.apply_op3_arc(&residual, affine, Arc::new(Box::new(op)))?,
        None => xs.apply_op2_arc(&residual, Arc::new(Box::new(op)))?,
    };
    let hand_out = |output, gradient, mark| {
        token.apply_op1(HandOut {
            output: Output::new(output, xs.shape()),
            gradient,
            mark,
        })
    };
    let (y, sum) = (hand_out(outputs.y, y, Y)?, hand_out(outputs.sum, sum, SUM)?);
    // Detached: with its graph, the op would own itself.
    let _ = input.set(sum.detach());
    step.finish_forward(request.state)?;
    Ok((y, sum))
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

/// The pass's place in the graph.
struct ResidualOp {
    backprop: Backprop,
    affine: Option<(Tensor, Tensor)>,
    params: Arc<Stored<[Option<Tensor>; 2]>>,
    /// The gradients of the outputs.
    y: Arc<Stored<Tensor>>,
    sum: Arc<Stored<Tensor>>,
    /// `xs + residual`, which is what the layer normalizes.
    input: Arc<OnceLock<Tensor>>,
}

impl ResidualOp {
    const NAME: &'static str = "power_norm_residual";

    fn output<S: TypedStorage>(&self, first: &S) -> Result<(S, Shape)> {
        token(first)
    }

    /// The gradient of `xs` and `residual` alike.
    fn backward(&self, input: bool, token_gradient: &Tensor) -> Result<Option<Tensor>> {
        let (dy, dsum) = (self.y.take(), self.sum.take());
        // What a backward that failed left behind is not of this one. (A GPU is not waited for to
        // tell.)
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
        let gradients = (self.backprop).run(sum, input, affine, &dy, dsum.as_ref())?;
        self.params.put([gradients.weight, gradients.bias]);
        Ok(gradients.input)
    }
}

impl CustomOp3 for ResidualOp {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    forwards!(3);

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
        Ok((if_tracked(xs, &dx), if_tracked(residual, &dx), params))
    }
}

impl CustomOp2 for ResidualOp {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    forwards!(2);

    fn bwd(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        _token: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dx = self.backward(xs.track_op() || residual.track_op(), gradient)?;
        Ok((if_tracked(xs, &dx), if_tracked(residual, &dx)))
    }
}

/// A gradient for an argument that has one.
fn if_tracked(arg: &Tensor, gradient: &Option<Tensor>) -> Option<Tensor> {
    gradient.clone().filter(|_| arg.track_op())
}

/// The gradients that the outputs give the token: their sum tells which of them have one.
const Y: f32 = 1.;
const SUM: f32 = 2.;

/// Makes a tensor of an output.
struct HandOut {
    output: Output,
    /// Where the output's gradient goes.
    gradient: Arc<Stored<Tensor>>,
    mark: f32,
}

impl HandOut {
    fn output<S: TypedStorage>(&self, first: &S) -> Result<(S, Shape)> {
        self.output.hand_out(first)
    }
}

impl CustomOp1 for HandOut {
    fn name(&self) -> &'static str {
        "power_norm_residual_output"
    }

    forwards!(1);

    fn bwd(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.gradient.put(gradient.clone());
        Ok(Some(match token.device() {
            Device::Cpu => Tensor::new(&[self.mark], token.device())?,
            // Any that costs no launch.
            _ => token.detach(),
        }))
    }
}

/// Stands for weight and bias.
struct Params(Arc<Stored<[Option<Tensor>; 2]>>);

impl Params {
    fn output<S: TypedStorage>(&self, first: &S) -> Result<(S, Shape)> {
        token(first)
    }
}

impl CustomOp2 for Params {
    fn name(&self) -> &'static str {
        "power_norm_residual_params"
    }

    forwards!(2);

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
