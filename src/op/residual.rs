//! Adds a residual and normalizes the sum, in one op.
//!
//! This pass has up to four arguments (input, residual, weight, bias) and two outputs (the
//! normalized rows and the sum). A custom op of candle has at most three arguments and one output.
//! So several ops share the [`Pass`], and tokens, which are tensors of one element, connect them in
//! the graph:
//!
//! 1. [`Params`] makes a token of weight and bias.
//! 2. [`ResidualOp`] makes a second token of the input, the residual and the first token.
//! 3. Two ops [`HandOut`] each make one of the outputs of the second token.
//!
//! In a backward candle visits them in the reverse order:
//!
//! 1. Each [`HandOut`] puts its output's gradient into a [`Slot`], and returns a gradient for the
//!    token.
//! 2. [`ResidualOp`] takes the gradients and runs the backward. It returns the gradient of input
//!    and residual, and puts the gradients of weight and bias into a slot.
//! 3. [`Params`] takes these and returns them.
//!
//! Another backward of the same graph may be under way meanwhile, or may have failed on the way:
//!
//! - In another thread: a slot keeps each thread's values apart.
//! - Inside this backward: a thread that waits in rayon may be given another backward to run. It
//!   ends before this one goes on, so the last value in a slot is the right one. An inner backward
//!   may reach fewer outputs than the outer one, so the token's gradient says which outputs have a
//!   gradient. On a CPU the op reads it. A GPU's host would have to wait for it, but rayon runs
//!   nothing there: only an op of the user's could run a backward inside a backward.
//! - A backward that failed: candle drops its gradients. An output's gradient is alive only as long
//!   as the token's gradient, and the slot has a weak reference. Gradients of weight and bias may
//!   stay in their slot. The next backward puts its own on top before it takes them.

use super::step::{Call, Step};
use super::{forwards, token, Computed, TypedStorage};
use candle::{CustomOp1, CustomOp2, CustomOp3, DType, Device, Result, Shape, Storage, Tensor};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{self, ThreadId};

/// Runs the layer on the sum of the call's input and residual. Returns the layer's output and the
/// sum.
pub(crate) fn power_norm_residual(call: Call) -> Result<(Tensor, Tensor)> {
    let Some(residual) = call.residual else {
        candle::bail!("power_norm_residual: expected a residual, got none")
    };
    let pass = Arc::new(Pass::default());
    // Tokens are allocated before the forward launches anything.
    let params = Params(pass.clone());
    let params = match (call.weight, call.bias) {
        (Some(weight), Some(bias)) => weight.apply_op2(bias, params)?,
        (Some(parameter), None) | (None, Some(parameter)) => parameter.apply_op1(params)?,
        (None, None) => Tensor::zeros(1, DType::F32, call.xs.device())?,
    };
    let token = (call.xs).apply_op3(residual, &params, ResidualOp(pass.clone()))?;
    let (step, inputs, outputs) = Step::forward(call)?;
    let hand_out = |storage: Option<Storage>, output| {
        token.apply_op1(HandOut {
            computed: Computed::new(storage, inputs.x.shape()),
            pass: pass.clone(),
            output,
        })
    };
    let (y, sum) = (hand_out(outputs.y, Y)?, hand_out(outputs.sum, SUM)?);
    // Detached, because the sum's graph holds the pass, and the pass would own itself.
    let _ = pass.forward.set((step, sum.detach()));
    Ok((y, sum))
}

/// What the ops share.
#[derive(Default)]
struct Pass {
    /// The forward, and `xs + residual`, which it normalized.
    forward: OnceLock<(Arc<Step>, Tensor)>,
    /// The gradients of the outputs, [`Y`] and [`SUM`].
    outputs: [Slot<Weak<Tensor>>; 2],
    /// The gradients of weight and bias.
    params: Slot<[Option<Tensor>; 2]>,
}

/// Places of the outputs in [`Pass::outputs`].
const Y: usize = 0;
const SUM: usize = 1;

impl Pass {
    /// The gradient that an output has in this thread's backward.
    fn output_gradient(&self, output: usize) -> Option<Tensor> {
        while let Some(gradient) = self.outputs[output].take() {
            if let Some(gradient) = gradient.upgrade() {
                return Some(gradient.as_ref().clone());
            }
        }
        None
    }

    /// Returns the gradient of `xs`, which is also the residual's, and puts those of weight and
    /// bias into their slot.
    fn backward(
        &self,
        wants_input: bool,
        wants_params: bool,
        token_gradient: &Tensor,
    ) -> Result<Option<Tensor>> {
        let came = match token_gradient.device() {
            Device::Cpu => token_gradient.to_vec1::<f32>()?[0] as u32,
            _ => mark(Y) | mark(SUM),
        };
        let [dy, dsum] = [Y, SUM].map(|output| match came & mark(output) {
            0 => None,
            _ => self.output_gradient(output),
        });
        let (dx, params) = match (dy, self.forward.get()) {
            (Some(dy), Some((step, sum))) => {
                let gradients = step.backward(sum, &dy, dsum.as_ref(), wants_input)?;
                (gradients.input, [gradients.weight, gradients.bias])
            }
            (None, Some(_)) if dsum.is_some() => (dsum.filter(|_| wants_input), [None, None]),
            _ => candle::bail!(
                "{}: expected a gradient of an output, got none",
                ResidualOp::NAME
            ),
        };
        if wants_params {
            self.params.put(params);
        }
        Ok(dx)
    }
}

/// Values that one op of a backward hands to another, apart for each thread that runs a backward.
struct Slot<T>(Mutex<Vec<(ThreadId, T)>>);

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Slot<T> {
    fn put(&self, value: T) {
        self.lock().push((thread::current().id(), value));
    }

    /// The last value that this thread put.
    fn take(&self) -> Option<T> {
        let mut values = self.lock();
        let own = thread::current().id();
        let last = values.iter().rposition(|(thread, _)| *thread == own)?;
        Some(values.remove(last).1)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(ThreadId, T)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives the pass its place in the graph.
#[derive(Clone)]
struct ResidualOp(Arc<Pass>);

impl ResidualOp {
    const NAME: &'static str = "power_norm_residual";
}

impl CustomOp3 for ResidualOp {
    fn name(&self) -> &'static str {
        Self::NAME
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
        let wants_input = xs.track_op() || residual.track_op();
        let dx = (self.0).backward(wants_input, params.track_op(), gradient)?;
        let of = |arg: &Tensor| dx.clone().filter(|_| arg.track_op());
        // Nobody reads the gradient of the parameters' token, and this tensor costs no launch.
        let params = params.track_op().then(|| params.detach());
        Ok((of(xs), of(residual), params))
    }
}

/// Hands one of the outputs out as a tensor.
#[derive(Clone)]
struct HandOut {
    computed: Computed,
    pass: Arc<Pass>,
    /// [`Y`] or [`SUM`].
    output: usize,
}

impl HandOut {
    fn hand_out<S: TypedStorage>(&self, first: &S) -> Result<(S, Shape)> {
        self.computed.hand_out(first)
    }
}

/// What an output with a gradient adds to the token's gradient. candle adds the marks up.
fn mark(output: usize) -> u32 {
    1 << output
}

impl CustomOp1 for HandOut {
    fn name(&self) -> &'static str {
        "power_norm_residual_output"
    }

    forwards!(1, Self::hand_out);

    fn bwd(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = Arc::new(gradient.clone());
        let weak = Arc::downgrade(&gradient);
        // Not detached: candle keeps what it was made of until the backward ends.
        let mut of_token = token.apply_op1(Owner { _owned: gradient })?;
        if of_token.device().is_cpu() {
            of_token = of_token.affine(1., mark(self.output).into())?;
        }
        self.pass.outputs[self.output].put(weak);
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
struct Params(Arc<Pass>);

impl Params {
    const NAME: &'static str = "power_norm_residual_params";

    fn gradients(&self) -> [Option<Tensor>; 2] {
        self.0.params.take().unwrap_or_default()
    }
}

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
        Self::NAME
    }

    forwards!(2, token);

    fn bwd(
        &self,
        weight: &Tensor,
        bias: &Tensor,
        _token: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [dweight, dbias] = self.gradients();
        Ok((or_zero(dweight, weight)?, or_zero(dbias, bias)?))
    }
}

/// A layer with a weight or a bias only.
impl CustomOp1 for Params {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    forwards!(1, token);

    fn bwd(&self, parameter: &Tensor, _token: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        let [dweight, dbias] = self.gradients();
        or_zero(dweight.or(dbias), parameter)
    }
}
