//! Adds a residual and normalizes the sum, in one op.
//!
//! This pass has four arguments (input, residual, weight, bias) and two outputs (the normalized
//! rows and the sum). A custom op of candle has at most three arguments and one output. So several
//! ops share the pass, and tokens, which are tensors of one element, connect them in the graph:
//!
//! 1. [`Params`] makes a token of weight and bias.
//! 2. [`ResidualOp`] makes a second token of the input, the residual and the first token.
//! 3. Two ops [`HandOut`] each make one of the outputs of the second token.
//!
//! In a backward candle visits them in the reverse order:
//!
//! 1. Each [`HandOut`] stores its output's gradient, and returns some gradient for the token.
//! 2. [`ResidualOp`] takes the stored gradients and runs the backward. It returns the gradients of
//!    input and residual, and stores those of weight and bias.
//! 3. [`Params`] takes these and returns them.

use super::step::{Call, Step};
use super::{forwards, token, Output, TypedStorage};
use candle::{CustomOp1, CustomOp2, CustomOp3, DType, Device, Result, Shape, Tensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

/// Runs the layer on the sum of the call's input and residual. Returns the layer's output and the
/// sum.
pub(crate) fn power_norm_residual(call: Call) -> Result<(Tensor, Tensor)> {
    let (step, inputs, outputs) = Step::forward(call)?;
    let (xs, weight, bias) = (inputs.x, inputs.weight, inputs.bias);
    let Some(residual) = inputs.residual else {
        candle::bail!("power_norm_residual: expected a residual, got none")
    };
    let params = Arc::new(Stored::default());
    let op = Params {
        gradients: params.clone(),
        has_weight: weight.is_some(),
    };
    let params_token = match (&weight, &bias) {
        (Some(weight), Some(bias)) => weight.apply_op2(bias, op)?,
        (Some(parameter), None) | (None, Some(parameter)) => parameter.apply_op1(op)?,
        (None, None) => Tensor::zeros(1, DType::F32, xs.device())?,
    };
    let [y, sum] = [(); 2].map(|()| Arc::new(Stored::default()));
    let input = Arc::new(OnceLock::new());
    let op = ResidualOp {
        step,
        weight,
        bias,
        params,
        y: y.clone(),
        sum: sum.clone(),
        input: input.clone(),
    };
    let token = xs.apply_op3(&residual, &params_token, op)?;
    let hand_out = |output, gradient, mark| {
        token.apply_op1(HandOut {
            output: Output::new(output, xs.shape()),
            gradient,
            mark,
        })
    };
    let (y, sum) = (hand_out(outputs.y, y, Y)?, hand_out(outputs.sum, sum, SUM)?);
    // Detached, because the sum's graph holds the op, and the op would own itself.
    let _ = input.set(sum.detach());
    Ok((y, sum))
}

/// Hands values from one op to another, for each thread that runs a backward. The last comes first:
/// a thread that waits in rayon may be given a backward of the same graph to run inside its own.
struct Stored<T>(Mutex<HashMap<ThreadId, Vec<T>>>);

impl<T> Default for Stored<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Stored<T> {
    fn put(&self, value: T) {
        let mut threads = lock(&self.0);
        threads
            .entry(thread::current().id())
            .or_default()
            .push(value);
    }

    fn take(&self) -> Option<T> {
        let mut threads = lock(&self.0);
        let values = threads.get_mut(&thread::current().id())?;
        let value = values.pop();
        if values.is_empty() {
            threads.remove(&thread::current().id());
        }
        value
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives the pass its place in the graph.
struct ResidualOp {
    step: Arc<Step>,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
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

    /// Returns the gradient of `xs`, which is also the residual's, and stores those of weight and
    /// bias.
    fn backward(
        &self,
        input: bool,
        params: bool,
        token_gradient: &Tensor,
    ) -> Result<Option<Tensor>> {
        // A backward that failed may have left gradients below. The marks tell which outputs have
        // one in this backward. On a GPU the host would have to wait to read them.
        let came = match token_gradient.device() {
            Device::Cpu => token_gradient.to_vec1::<f32>()?[0],
            _ => Y + SUM,
        };
        let dy = if came == SUM { None } else { self.y.take() };
        let dsum = if came == Y { None } else { self.sum.take() };
        let Some(dy) = dy else {
            if params {
                self.params.put([None, None]);
            }
            return Ok(dsum.filter(|_| input));
        };
        let Some(sum) = self.input.get() else {
            candle::bail!("{}: backward without a forward", Self::NAME)
        };
        let parameters = [self.weight.as_ref(), self.bias.as_ref()];
        let gradients = (self.step).backward(sum, parameters, &dy, dsum.as_ref(), input)?;
        if params {
            self.params.put([gradients.weight, gradients.bias]);
        }
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
        let input = xs.track_op() || residual.track_op();
        let dx = self.backward(input, params.track_op(), gradient)?;
        let params = params.track_op().then(|| params.detach());
        Ok((if_tracked(xs, &dx), if_tracked(residual, &dx), params))
    }
}

/// A gradient for an argument that has one.
fn if_tracked(arg: &Tensor, gradient: &Option<Tensor>) -> Option<Tensor> {
    gradient.clone().filter(|_| arg.track_op())
}

/// The mark that each output with a gradient returns as the token's gradient. candle adds the marks
/// up, and their sum tells which outputs had one.
const Y: f32 = 1.;
const SUM: f32 = 2.;

/// Hands one of the outputs out as a tensor.
struct HandOut {
    output: Output,
    /// Receives the output's gradient.
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
            // Nobody reads this gradient, and this tensor costs no launch.
            _ => token.detach(),
        }))
    }
}

/// Makes a token of weight and bias.
struct Params {
    gradients: Arc<Stored<[Option<Tensor>; 2]>>,
    /// The one parameter of a layer with one is the weight.
    has_weight: bool,
}

impl Params {
    fn output<S: TypedStorage>(&self, first: &S) -> Result<(S, Shape)> {
        token(first)
    }

    /// The gradients that the backward stored, of those parameters that there are.
    fn take(&self, parameters: [Option<&Tensor>; 2]) -> Result<[Option<Tensor>; 2]> {
        // candle panics if a computed tensor that a backward reaches has no gradient.
        let zero = |parameter: Option<&Tensor>| match parameter {
            Some(it) if it.track_op() && !it.is_variable() => it.zeros_like().map(Some),
            _ => Ok(None),
        };
        match self.gradients.take() {
            Some([None, None]) | None => {
                let [weight, bias] = parameters.map(zero);
                Ok([weight?, bias?])
            }
            Some(gradients) => Ok(gradients),
        }
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
        Ok(self.take([Some(weight), Some(bias)])?.into())
    }
}

impl CustomOp1 for Params {
    fn name(&self) -> &'static str {
        "power_norm_residual_params"
    }

    forwards!(1);

    fn bwd(&self, parameter: &Tensor, _token: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        let [weight, bias] = match self.has_weight {
            true => self.take([Some(parameter), None])?,
            false => self.take([None, Some(parameter)])?,
        };
        Ok(weight.or(bias))
    }
}
