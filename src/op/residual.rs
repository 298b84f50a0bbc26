//! Adds a residual and normalizes the sum, in one op.
//!
//! The layer has up to four arguments here (input, residual, weight, bias) and two outputs (the
//! normalized rows and the sum). A custom op of candle has at most three arguments and one output.
//! So there are several ops. They have one [`Shared`], and tokens, which are tensors of one
//! element, connect them in the graph:
//!
//! 1. [`Params`] makes a token of weight and bias.
//! 2. [`ResidualOp`] makes a second token of the input, the residual and the first token.
//! 3. Two ops [`HandOut`] each make one of the outputs of the second token.
//!
//! In a backward candle visits them in the reverse order:
//!
//! 1. Each [`HandOut`] leaves its output's gradient in [`Shared`], and returns a gradient for the
//!    token.
//! 2. [`ResidualOp`] takes the gradients and runs the backward. It returns the gradient of input
//!    and residual, and leaves the gradients of weight and bias in [`Shared`].
//! 3. [`Params`] takes these and returns them. candle visits it right after [`ResidualOp`].
//!
//! Other backwards may leave gradients in the same [`Shared`]:
//!
//! - In another thread: each gradient is left together with its thread.
//! - A backward that failed: candle drops its gradients. An output's gradient is alive only as long
//!   as the token's gradient, and [`Shared`] has a weak reference.
//! - Inside this backward: a thread that waits in rayon may be given another backward to run. It
//!   ends before this one goes on, so the last gradient left is the right one. An inner backward
//!   may reach fewer outputs than the outer one, so the token's gradient says which [`OutputKind`]s
//!   have a gradient. On a CPU the op reads it. A GPU's host would have to wait for it, but rayon
//!   runs nothing there: only an op of the user's could run a backward inside a backward.

use super::step::{Call, Step};
use super::{forwards, token, Computed, TypedStorage};
use crate::device::Gradients;
use candle::{CustomOp1, CustomOp2, CustomOp3, Device, Result, Shape, Storage, Tensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{self, ThreadId};

/// Runs the layer on the sum of the call's input and residual. Returns the layer's output and the
/// sum.
pub(crate) fn power_norm_residual(call: Call) -> Result<(Tensor, Tensor)> {
    let Some(residual) = call.residual else {
        candle::bail!("power_norm: expected a residual, got none")
    };
    let shared = Arc::new(Shared::default());
    // In place of a parameter that the layer lacks, the op has a constant.
    let constant = call.xs.detach();
    let [weight, bias] = [call.weight, call.bias].map(|param| param.unwrap_or(&constant));
    // Tokens are allocated before the forward launches anything.
    let params = weight.apply_op2(bias, Params(shared.clone()))?;
    let token = (call.xs).apply_op3(residual, &params, ResidualOp(shared.clone()))?;
    let (step, inputs, outputs) = Step::forward(call)?;
    let hand_out = |storage: Option<Storage>, output| {
        token.apply_op1(HandOut {
            computed: Computed::new(storage, inputs.x.shape()),
            shared: shared.clone(),
            output,
        })
    };
    let y = hand_out(outputs.y, OutputKind::Y)?;
    let sum = hand_out(outputs.sum, OutputKind::Sum)?;
    // Detached, because the sum's graph holds `shared`, which would own itself.
    let _ = shared.forward.set((step, sum.detach()));
    Ok((y, sum))
}

/// What the ops share.
#[derive(Default)]
struct Shared {
    /// The forward, and `xs + residual`, which it normalized.
    forward: OnceLock<(Arc<Step>, Tensor)>,
    /// Gradients of outputs, for [`ResidualOp`].
    outputs: Mutex<Vec<OutputGradient>>,
    /// The gradients of weight and bias, for [`Params`], by the thread of their backward. A
    /// backward that fails in between leaves some, which the thread's next one replaces.
    params: Mutex<HashMap<ThreadId, [Option<Tensor>; 2]>>,
}

/// The outputs. The numbers are what an output with a gradient adds to the token's gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
enum OutputKind {
    Y = 1,
    Sum = 2,
}

/// An output's gradient, and the thread of its backward.
struct OutputGradient {
    thread: ThreadId,
    output: OutputKind,
    gradient: Weak<Tensor>,
}

impl Shared {
    /// Takes the last gradient of `output` that this thread left, of a backward that still runs.
    fn take(&self, output: OutputKind) -> Option<Tensor> {
        let thread = thread::current().id();
        let mut outputs = lock(&self.outputs);
        outputs.retain(|left| left.gradient.strong_count() > 0);
        let last =
            (outputs.iter()).rposition(|left| left.thread == thread && left.output == output)?;
        let gradient = outputs.remove(last).gradient.upgrade()?;
        Some(gradient.as_ref().clone())
    }
}

fn lock<T>(values: &Mutex<T>) -> MutexGuard<'_, T> {
    values.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives the layer its place in the graph.
#[derive(Clone)]
struct ResidualOp(Arc<Shared>);

impl CustomOp3 for ResidualOp {
    fn name(&self) -> &'static str {
        "power_norm_residual"
    }

    forwards!(3, token);

    fn bwd(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        params: &Tensor,
        _token: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let shared = &self.0;
        let reached = match gradient.device() {
            Device::Cpu => gradient.to_vec1::<f32>()?[0] as u32,
            _ => OutputKind::Y as u32 | OutputKind::Sum as u32,
        };
        let [dy, dsum] =
            [OutputKind::Y, OutputKind::Sum].map(|output| match reached & output as u32 {
                0 => None,
                _ => shared.take(output),
            });
        let wants_input = xs.track_op() || residual.track_op();
        let gradients = match (shared.forward.get(), dy, dsum) {
            (Some((step, sum)), Some(dy), dsum) => {
                step.backward(sum, &dy, dsum.as_ref(), wants_input)?
            }
            (Some(_), None, Some(dsum)) => Gradients {
                input: Some(dsum),
                ..Gradients::default()
            },
            _ => candle::bail!("power_norm: expected a gradient of an output, got none"),
        };
        if params.track_op() {
            let of_params = [gradients.weight, gradients.bias];
            lock(&shared.params).insert(thread::current().id(), of_params);
        }
        let input = |arg: &Tensor| gradients.input.clone().filter(|_| arg.track_op());
        // Nobody reads the gradient of the parameters' token, and this tensor costs no launch.
        let params = params.track_op().then(|| params.detach());
        Ok((input(xs), input(residual), params))
    }
}

/// Hands one of the outputs out as a tensor.
#[derive(Clone)]
struct HandOut {
    computed: Computed,
    shared: Arc<Shared>,
    output: OutputKind,
}

impl HandOut {
    fn hand_out<S: TypedStorage>(&self, first: &S) -> Result<(S, Shape)> {
        self.computed.hand_out(first)
    }
}

impl CustomOp1 for HandOut {
    fn name(&self) -> &'static str {
        "power_norm_residual_output"
    }

    forwards!(1, Self::hand_out);

    fn bwd(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = Arc::new(gradient.clone());
        let left = OutputGradient {
            thread: thread::current().id(),
            output: self.output,
            gradient: Arc::downgrade(&gradient),
        };
        // Not detached: candle keeps what it was made of until the backward ends.
        let mut of_token = token.apply_op1(Owner { _owned: gradient })?;
        if of_token.device().is_cpu() {
            of_token = of_token.affine(1., f64::from(self.output as u32))?;
        }
        lock(&self.shared.outputs).push(left);
        Ok(Some(of_token))
    }
}

/// Owns an output's gradient, as part of the graph of the token's gradient.
#[derive(Clone)]
struct Owner {
    _owned: Arc<Tensor>,
}

impl CustomOp1 for Owner {
    fn name(&self) -> &'static str {
        "power_norm_residual_gradient"
    }

    forwards!(1, token);
}

/// Makes a token of weight and bias.
#[derive(Clone)]
struct Params(Arc<Shared>);

/// The gradient of a parameter, or 0: candle panics if a computed tensor that a backward reaches
/// has no gradient.
fn or_zero(gradient: Option<Tensor>, parameter: &Tensor) -> Result<Option<Tensor>> {
    match gradient {
        None if parameter.track_op() && !parameter.is_variable() => {
            parameter.zeros_like().map(Some)
        }
        gradient => Ok(gradient),
    }
}

impl CustomOp2 for Params {
    fn name(&self) -> &'static str {
        "power_norm_residual_params"
    }

    forwards!(2, token);

    fn bwd(
        &self,
        weight: &Tensor,
        bias: &Tensor,
        _token: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradients = lock(&self.0.params).remove(&thread::current().id());
        let Some([dweight, dbias]) = gradients else {
            candle::bail!("power_norm: expected the gradients of weight and bias, got none")
        };
        Ok((or_zero(dweight, weight)?, or_zero(dbias, bias)?))
    }
}
