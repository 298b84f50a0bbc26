//! The custom op: candle's side of a forward and its backward.
//!
//! A call passes through here once in each direction:
//!
//! 1. The layer makes a [`Pass`], which checks the arguments, and calls [`normalize`] or
//!    [`add_and_normalize`] with it. In training PowerNorm passes a [`Step`] too.
//! 2. The tensors' [device](crate::device) runs the forward, in [`step::forward`] if it is a step,
//!    which moves ψ² and t.
//! 3. If a gradient is tracked, candle runs the custom op. Its output exists already, and the op
//!    gives it a place in the graph. Otherwise the output is a tensor without a graph.
//! 4. A backward comes back through the op to [`step::backward`], which moves ν.

pub(crate) mod fused;
pub(crate) mod gelu;
pub(crate) mod probe;
mod residual;
pub(crate) mod step;

use self::step::{Step, Training};
use crate::device::pass::{Affine, Pass};
use crate::device::pick::DeviceKind;
use crate::device::{Outputs, Saved};
use candle::op::BackpropOp;
use candle::{CustomOp1, CustomOp2, CustomOp3, Result, Shape, Storage, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// Returns the normalized rows of a pass without a residual.
pub(crate) fn normalize(mut pass: Pass, step: Option<Step>) -> Result<Tensor> {
    if step.is_none() && !pass.is_tracked() {
        let outputs = DeviceKind::of(pass.x().device())?.normalize(&mut pass)?;
        return Ok(untracked(outputs.y, pass.x().shape()));
    }
    // The graph has the caller's tensors, and the device may read copies of them.
    let (x, affine) = (pass.x().clone(), pass.affine().cloned());
    let (saved, training, outputs) = forward(pass, step)?;
    NormOp::apply(x, affine, saved, training, outputs.y)
}

/// Returns the normalized sum of the rows and the residual of a pass, and the sum.
pub(crate) fn add_and_normalize(pass: Pass, step: Option<Step>) -> Result<(Tensor, Tensor)> {
    let (x, residual) = (pass.x().clone(), pass.residual().cloned());
    let affine = pass.affine().cloned();
    let (saved, training, outputs) = forward(pass, step)?;
    let (Some(residual), Some(computed)) = (residual, outputs.residual_out) else {
        unreachable!("a forward with a residual writes the sum")
    };
    let sum = residual::sum(&x, &residual, computed)?;
    let saved = saved.of_sum(sum.clone())?;
    let y = NormOp::apply(sum.clone(), affine, saved, training, outputs.y)?;
    Ok((y, sum))
}

/// Runs a forward. The training is returned only if the forward counted as a step.
fn forward(mut pass: Pass, step: Option<Step>) -> Result<(Saved, Option<Training>, Outputs)> {
    let device = DeviceKind::of(pass.x().device())?;
    if let Some(step) = step {
        return step::forward(&device, pass, step);
    }
    let (record, outputs) = device.evaluate(&mut pass)?;
    Ok((Saved::new(pass, record), None, outputs))
}

/// The tensor of an output without a place in the graph.
fn untracked(output: Storage, shape: &Shape) -> Tensor {
    Tensor::from_storage(output, shape, BackpropOp::none(), false)
}

/// An output that waits for candle to run its op. candle has a custom op compute its output, but
/// ours is computed earlier, together with the statistics.
#[derive(Clone)]
struct Computed {
    /// Clones of an op share it.
    storage: Arc<Mutex<Option<Storage>>>,
    shape: Shape,
}

impl Computed {
    fn new(storage: Storage, shape: &Shape) -> Self {
        Self {
            storage: Arc::new(Mutex::new(Some(storage))),
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
                _ => candle::bail!("candle_powernorm: expected an output that was computed, got none"),
            }
        }
    };
}
use forwards;

/// A layer's place in the graph. Its arguments are the rows and, if the layer has them, weight and
/// bias.
#[derive(Clone)]
struct NormOp {
    output: Computed,
    saved: Arc<Saved>,
    /// `None` unless the forward counted as a step.
    training: Option<Training>,
}

impl NormOp {
    /// The output tensor of a forward of `x` whose output is `y`.
    fn apply(
        x: Tensor,
        affine: Option<Affine>,
        saved: Saved,
        training: Option<Training>,
        y: Storage,
    ) -> Result<Tensor> {
        if !saved.pass().is_tracked() {
            return Ok(untracked(y, x.shape()));
        }
        let op = Self {
            output: Computed::new(y, x.shape()),
            saved: Arc::new(saved),
            training,
        };
        match affine {
            Some(Affine {
                weight,
                bias: Some(bias),
                ..
            }) => x.apply_op3(&weight, &bias, op),
            Some(Affine { weight, .. }) => x.apply_op2(&weight, op),
            None => x.apply_op1(op),
        }
    }

    /// The layer's name, which candle's errors show.
    fn layer(&self) -> &'static str {
        self.saved.pass().layer()
    }

    /// The gradients of the rows, the weight and the bias.
    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let gradients = step::backward(&self.saved, self.training.as_ref(), dy)?;
        let exact = self.saved.pass().has_exact_gradients();
        let input = match exact || probe::approximates() {
            true => gradients.input,
            // candle panics where a gradient that it waits for is missing.
            false => gradients.input.map(|dx| dx.zeros_like()).transpose()?,
        };
        let gradients = [input, gradients.weight, gradients.bias];
        match KEEPS_GRAPH_OF_GRADIENTS.with(|keeps| *keeps) {
            false => Ok(gradients),
            true => {
                let [input, weight, bias] = gradients.map(|gradient| {
                    gradient
                        .map(|of| FirstDerivative::apply(self.layer(), of, x, dy))
                        .transpose()
                });
                Ok([input?, weight?, bias?])
            }
        }
    }
}

impl CustomOp1 for NormOp {
    fn name(&self) -> &'static str {
        self.layer()
    }

    forwards!(1);

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let [dx, _, _] = self.backward(x, dy)?;
        Ok(dx)
    }
}

impl CustomOp2 for NormOp {
    fn name(&self) -> &'static str {
        self.layer()
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

impl CustomOp3 for NormOp {
    fn name(&self) -> &'static str {
        self.layer()
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
#[derive(Clone)]
struct FirstDerivative {
    layer: &'static str,
    output: Computed,
}

impl FirstDerivative {
    /// `gradient` as a function of the rows and the gradient of the output.
    fn apply(layer: &'static str, gradient: Tensor, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        // The gradients of weight and bias may be parts of one storage, and `try_clone` begins at
        // its start.
        let gradient = match gradient.layout().start_offset() {
            0 => gradient,
            _ => gradient.force_contiguous()?,
        };
        let (storage, layout) = gradient.storage_and_layout();
        let output = Computed::new(storage.try_clone(layout)?, layout.shape());
        x.apply_op2(dy, Self { layer, output })
    }
}

impl CustomOp2 for FirstDerivative {
    fn name(&self) -> &'static str {
        "norm_gradient"
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
            "{}: expected a backward from a loss, got one through the gradients of another \
             backward: the layer's gradients cannot be differentiated again, so compute a penalty \
             on gradients with layers of candle's own operations, such as \
             `candle_nn::ops::layer_norm_slow`",
            self.layer
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::{CpuStorage, DType, Device};

    const CPU: &Device = &Device::Cpu;

    #[test]
    fn a_computed_output_is_taken_once() -> Result<()> {
        let shape = Shape::from((1, 2));
        let storage = || Storage::Cpu(CpuStorage::F32(vec![1., 2.]));
        let op = FirstDerivative {
            layer: "test",
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

    /// The gradient of a sum goes to each argument that wants one, whole.
    #[test]
    fn the_sum_passes_its_gradient_on() -> Result<()> {
        let xs = candle::Var::new(&[1f32, 2.], CPU)?;
        let residual = Tensor::new(&[10f32, 20.], CPU)?;
        let computed = || Storage::Cpu(CpuStorage::F32(vec![11., 22.]));
        let sum = residual::sum(&xs, &residual, computed())?;
        assert_eq!(sum.to_vec1::<f32>()?, [11., 22.]);
        let weights = Tensor::new(&[3f32, -4.], CPU)?;
        let gradients = (&sum * &weights)?.backward()?;
        assert_eq!(gradients.get(&xs).unwrap().to_vec1::<f32>()?, [3., -4.]);
        assert!(gradients.get(&residual).is_none());
        // The same tensor twice gets both.
        let sum = residual::sum(&xs, &xs, computed())?;
        let gradients = (&sum * &weights)?.backward()?;
        assert_eq!(gradients.get(&xs).unwrap().to_vec1::<f32>()?, [6., -8.]);
        Ok(())
    }
}
