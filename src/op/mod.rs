//! The custom op: candle's side of a forward and its backward.
//!
//! What passes through here, once in each direction:
//!
//! 1. The layer calls [`power_norm`] with a tensor and a [`Request`], or `power_norm_residual` with
//!    two tensors.
//! 2. [`step::begin`] applies the step that still waits, if there is one. Then it runs the layer's
//!    checks and makes the arguments readable.
//! 3. [`Step::forward`] runs the forward on the tensors' [`device`](crate::device).
//! 4. candle runs the custom op. The output exists already, and the op hands it out. The op gives
//!    the output a place in the graph.
//! 5. [`Step::finish_forward`] moves ψ² and t, now that nothing can fail any more.
//! 6. A backward comes back through the op to [`Step::backward`], which moves ν.

pub(crate) mod residual;
pub(crate) mod step;

use crate::device::pick::{readable, DeviceKind};
use crate::device::{BackwardInputs, ForwardInputs, Gradients, Outputs};
use crate::loss_scale::LossScale;
use crate::mode::Purpose;
use crate::op::step::Step;
use crate::ranks::LayerRanks;
use crate::state::{State, Version};
use candle::backend::{BackendDevice, BackendStorage};
use candle::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp3, DType, Device, MetalStorage, Result, Shape,
    Storage, Tensor,
};
use std::sync::{Arc, Mutex, PoisonError};

/// What one forward needs besides its input.
pub(crate) struct Request<'a> {
    /// γ and β, `[C]`.
    pub affine: Option<(&'a Tensor, &'a Tensor)>,
    /// The padding mask: the input without its last dimension.
    pub keep: Option<&'a Tensor>,
    pub state: &'a Arc<State>,
    pub purpose: Purpose,
    pub loss_scale: &'a LossScale,
    pub ranks: &'a LayerRanks,
}

/// Runs the layer on `xs`, `[.., C]`, if it passes `check`.
pub(crate) fn power_norm(
    xs: &Tensor,
    request: &Request,
    check: impl FnOnce() -> Result<()>,
) -> Result<Tensor> {
    let prepare = || {
        check()?;
        let (xs, arguments) = (readable(xs)?, request.arguments(xs.device())?);
        Ok((xs, arguments))
    };
    let (xs, arguments) = step::begin(request, prepare)?;
    let affine = arguments.affine();
    let tracked = xs.track_op() || affine.is_some_and(|affine| affine.iter().any(|t| t.track_op()));
    let (backprop, outputs) = request.forward(&xs, None, &arguments, tracked)?;
    let step = backprop.step.clone();
    let op = PowerNormOp {
        output: Output::new(outputs.y, xs.shape()),
        backprop,
    };
    let ys = match affine {
        Some([weight, bias]) => xs.apply_op3_arc(weight, bias, Arc::new(Box::new(op)))?,
        None => xs.apply_op1_arc(Arc::new(Box::new(op)))?,
    };
    step.finish_forward(request.state)?;
    Ok(ys)
}

/// The layer-scale without a layer, on checked arguments: `xs` `[.., C]`, with C a multiple of
/// `groups`.
pub(crate) fn group_scaling(xs: &Tensor, groups: usize, eps: f64) -> Result<Tensor> {
    let device = DeviceKind::without_layer(xs.device());
    let xs = readable(xs)?;
    let output = Output::new(Some(device.scale_groups(&xs, groups, eps)?), xs.shape());
    xs.apply_op1(GroupScalingOp {
        device,
        groups,
        eps,
        output,
    })
}

/// The arguments of a forward besides its rows, ready for a device.
struct Arguments {
    affine: Option<(Tensor, Tensor)>,
    keep: Option<Tensor>,
    /// ψ² before the step, and the version of the state that it was read from.
    before: (Tensor, Version),
}

impl Arguments {
    fn affine(&self) -> Option<[&Tensor; 2]> {
        (self.affine.as_ref()).map(|(weight, bias)| [weight, bias])
    }
}

impl Request<'_> {
    /// The arguments besides the rows, which are on `device`.
    fn arguments(&self, device: &Device) -> Result<Arguments> {
        Ok(Arguments {
            affine: match self.affine {
                Some((weight, bias)) => Some((weight.contiguous()?, bias.contiguous()?)),
                None => None,
            },
            keep: self.keep.map(Tensor::contiguous).transpose()?,
            before: self.state.phi_for_forward(device)?,
        })
    }

    /// Runs the forward on its device, and returns what its backward needs.
    fn forward(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
        arguments: &Arguments,
        tracked: bool,
    ) -> Result<(Backprop, Outputs)> {
        let (phi, version) = &arguments.before;
        let inputs = ForwardInputs {
            x,
            residual,
            keep: arguments.keep.as_ref(),
            affine: arguments.affine(),
            phi,
        };
        let (step, outputs) = Step::forward(self, &inputs, tracked, *version)?;
        let backprop = Backprop {
            step: Arc::new(step),
            state: self.state.clone(),
            keep: arguments.keep.clone(),
            loss_scale: self.loss_scale.clone(),
        };
        Ok((backprop, outputs))
    }
}

/// Leads a backward from the graph to the step of its forward.
struct Backprop {
    step: Arc<Step>,
    state: Arc<State>,
    keep: Option<Tensor>,
    loss_scale: LossScale,
}

impl Backprop {
    /// Returns the gradients. `x` is what was normalized, `dy` the gradient of the output, and
    /// `dsum` the gradient of the sum with a residual.
    fn run(
        &self,
        x: &Tensor,
        wants_input: bool,
        affine: Option<[&Tensor; 2]>,
        dy: &Tensor,
        dsum: Option<&Tensor>,
    ) -> Result<Gradients> {
        let rows = || Ok((readable(dy)?, dsum.map(readable).transpose()?));
        let rows = rows().inspect_err(|_: &candle::Error| self.step.leave_out(&self.state));
        let (dy, dsum) = rows?;
        let inputs = BackwardInputs {
            x,
            dy: &dy,
            dsum: dsum.as_ref(),
            keep: self.keep.as_ref(),
            affine,
            phi: self.state.phi_variable(),
            ema_gz: self.state.nu_variable(),
            loss_scale: self.loss_scale.get(),
            wants_input,
        };
        self.step.backward(&self.state, &inputs)
    }
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
    backprop: Backprop,
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
        let gradients = self.backprop.run(x, x.track_op(), affine, dy, None)?;
        Ok((gradients.input, gradients.weight, gradients.bias))
    }
}

impl CustomOp1 for PowerNormOp {
    fn name(&self) -> &'static str {
        "power_norm"
    }

    forwards!(1);

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let gradients = self.backprop.run(x, x.track_op(), None, dy, None)?;
        Ok(gradients.input)
    }
}

/// The layer-scale's place in the graph.
struct GroupScalingOp {
    device: DeviceKind,
    groups: usize,
    eps: f64,
    output: Output,
}

impl GroupScalingOp {
    fn output<S: TypedStorage>(&self, first: &S) -> Result<(S, Shape)> {
        self.output.hand_out(first)
    }
}

impl CustomOp1 for GroupScalingOp {
    fn name(&self) -> &'static str {
        "group_scaling"
    }

    forwards!(1);

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dx = (self.device).scale_groups_bwd(x, &readable(dy)?, self.groups, self.eps)?;
        Ok(Some(dx))
    }
}
