//! The custom op: which device runs a pass, and the only place that sees both tensors and storage.

use crate::communicator::LayerRanks;
use crate::cpu::{self, Element, Matrix, Rows};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::mode::Purpose;
use crate::state::{read, Snapshot, State, Version};
use crate::{Error, LossScale, Recipe, Statistics};
use candle::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle::{op::BackpropOp, CudaStorage};
use candle::{CpuStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Storage, Tensor, WithDType};
use half::{bf16, f16};
use std::marker::PhantomData;
#[cfg(feature = "cuda")]
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A call of a layer, of checked arguments.
pub(crate) struct Call<'a> {
    /// γ and β, `[C]`.
    pub affine: Option<(&'a Tensor, &'a Tensor)>,
    /// `[..]`, as the input without its last dimension.
    pub keep: Option<&'a Tensor>,
    pub state: &'a Arc<State>,
    pub purpose: Purpose,
    pub loss_scale: &'a LossScale,
    pub ranks: &'a LayerRanks,
}

/// Runs the layer on `xs`, `[.., C]`.
///
/// In training, ψ² and t are updated once the output stands.
pub(crate) fn power_norm(xs: &Tensor, call: &Call) -> Result<Tensor> {
    with_element!(xs.dtype(), T => apply::<T>(xs, call))
}

/// Evaluates `$body` with `$element` the type of an input of dtype `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            candle::DType::F32 => {
                type $element = f32;
                $body
            }
            candle::DType::F64 => {
                type $element = f64;
                $body
            }
            candle::DType::F16 => {
                type $element = half::f16;
                $body
            }
            candle::DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            other => Err($crate::Error::InputDType(other).into()),
        }
    };
}
pub(crate) use with_element;

fn apply<T: Element>(xs: &Tensor, call: &Call) -> Result<Tensor> {
    let prepared = || {
        let xs = readable(xs)?;
        let affine = call.contiguous_affine()?;
        let op = match &affine {
            Some((weight, bias)) => PowerNormOp::<T>::new(call, &[&xs, weight, bias])?,
            None => PowerNormOp::<T>::new(call, &[&xs])?,
        };
        Ok((xs, affine, op))
    };
    let (xs, affine, (op, saved)) = call.begin(prepared)?;
    let ys = match &affine {
        Some((weight, bias)) => xs.apply_op3_arc(weight, bias, Arc::new(Box::new(op)))?,
        None => xs.apply_op1_arc(Arc::new(Box::new(op)))?,
    };
    // Not inside the op: candle holds the storage of its arguments there, and an argument may be the
    // variable to update.
    saved.finish(call)?;
    Ok(ys)
}

impl Call<'_> {
    /// What `prepare` gives. If a training forward ends here, the other ranks learn of it.
    pub fn begin<R>(&self, prepare: impl FnOnce() -> Result<R>) -> Result<R> {
        if self.purpose == Purpose::Evaluation {
            return prepare();
        }
        // The other ranks do so too, before they come to a sum of this forward.
        self.state.settle()?;
        let prepared = prepare();
        if prepared.is_err() {
            self.ranks.fail(self.state.device());
        }
        prepared
    }

    pub fn contiguous_affine(&self) -> Result<Option<(Tensor, Tensor)>> {
        let contiguous =
            |(weight, bias): (&Tensor, &Tensor)| Ok((weight.contiguous()?, bias.contiguous()?));
        self.affine.map(contiguous).transpose()
    }
}

/// The layer-scale by itself, on checked arguments: `xs` `[.., C]`, with C a multiple of `groups`.
pub(crate) fn group_scaling(xs: &Tensor, groups: usize, eps: f64) -> Result<Tensor> {
    fn apply<T: Element>(xs: &Tensor, groups: usize, eps: f64) -> Result<Tensor> {
        readable(xs)?.apply_op1(GroupScalingOp::<T> {
            groups,
            eps,
            element: PhantomData,
            #[cfg(feature = "cuda")]
            kernels: Arc::default(),
        })
    }
    with_element!(xs.dtype(), T => apply::<T>(xs, groups, eps))
}

/// The tensor as the kernels take it, copied if need be. Those of the CPU take rows anywhere, of adjacent elements; those
/// of a GPU packed rows, which begin on a 16-byte boundary.
pub(crate) fn readable(xs: &Tensor) -> Result<Tensor> {
    if xs.device().is_cpu() && packed_dims(xs.layout()).is_some() {
        return Ok(xs.clone());
    }
    let xs = xs.contiguous()?;
    let start = xs.layout().start_offset() * xs.dtype().size_in_bytes();
    if xs.device().is_cuda() && !start.is_multiple_of(16) {
        return xs.force_contiguous();
    }
    Ok(xs)
}

/// The trailing dimensions that make blocks of packed rows, unless the elements of a row lie apart.
fn packed_dims(layout: &Layout) -> Option<usize> {
    let (mut dims, mut packed) = (0, 1);
    for (&dim, &stride) in layout.dims().iter().zip(layout.stride()).rev() {
        if dim != 1 && stride != packed {
            break;
        }
        packed *= dim;
        dims += 1;
    }
    let whole = packed.is_multiple_of(*layout.dims().last()?);
    whole.then_some(dims)
}

/// Where blocks of packed rows begin, unless the elements of a row lie apart.
fn row_blocks(layout: &Layout) -> Option<Vec<usize>> {
    let outer = layout.dims().len() - packed_dims(layout)?;
    let mut blocks = vec![layout.start_offset()];
    for (&dim, &stride) in layout.dims().iter().zip(layout.stride()).take(outer) {
        let shifts = || (0..dim).map(|i| i * stride);
        blocks = (blocks.iter())
            .flat_map(|block| shifts().map(move |shift| block + shift))
            .collect();
    }
    Some(blocks)
}

/// One forward of a layer, and the backward that belongs to it.
pub(crate) struct PowerNormOp<T: Element> {
    keep: Option<Tensor>,
    /// ψ² and t before the step.
    before: Snapshot<T::Acc>,
    saved: SavedForward<T::Acc>,
    state: Arc<State>,
    purpose: Purpose,
    loss_scale: LossScale,
    ranks: LayerRanks,
    /// Whether a backward may follow.
    #[cfg(feature = "cuda")]
    tracked: bool,
}

/// What the forward of an op leaves to the state and to its backward, once it ran.
pub(crate) struct SavedForward<A>(Arc<OnceLock<Forward<A>>>);

impl<A> Clone for SavedForward<A> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<A: cpu::Accumulator + WithDType> SavedForward<A> {
    /// The state takes the step of a forward whose output stands, or keeps it until other ranks' sums come.
    pub fn finish(self, call: &Call) -> Result<()> {
        let Some(forward) = self.0.get() else {
            return Ok(());
        };
        if !forward.is_unsettled() {
            return forward.commit(call.state);
        }
        let (saved, ranks) = (self.0.clone(), call.ranks.clone());
        let failures = ranks.failures();
        call.state.defer(self.id(), move |state| match saved.get() {
            // A sum that failed since then left this step out, on all ranks.
            Some(forward) if ranks.failures() == failures => forward.settle(&ranks, state),
            _ => Ok(()),
        });
        Ok(())
    }

    /// Tells this forward from every other one that there is.
    fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }
}

/// What a forward leaves to its backward and to the state.
struct Forward<A> {
    saved: Saved<A>,
    purpose: Purpose,
    /// Of the state before it, where the step may come late: one that was loaded or reset meanwhile does not take it.
    version: Option<Version>,
    /// Whether ψ² took the step. Locked while it does: what comes after a commit finds it done.
    committed: Mutex<bool>,
}

/// The part of it that belongs to the device.
enum Saved<A> {
    Cpu(cpu::Saved<A>),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Forward),
}

impl<A: cpu::Accumulator + WithDType> Forward<A> {
    fn new(saved: Saved<A>, op: &PowerNormOp<impl Element<Acc = A>>) -> Self {
        Self {
            saved,
            purpose: op.purpose,
            version: (!op.ranks.is_alone()).then_some(op.before.version),
            committed: Mutex::default(),
        }
    }

    /// Whether the step waits for other ranks' sums.
    fn is_unsettled(&self) -> bool {
        match &self.saved {
            Saved::Cpu(saved) => saved.is_unsettled(),
            #[cfg(feature = "cuda")]
            Saved::Cuda(saved) => saved.is_unsettled(),
        }
    }

    fn settle(&self, ranks: &LayerRanks, state: &State) -> Result<()> {
        match &self.saved {
            Saved::Cpu(saved) => saved.settle(ranks)?,
            #[cfg(feature = "cuda")]
            Saved::Cuda(saved) => saved.settle(ranks)?,
        }
        self.commit(state)
    }

    /// The step of ψ² and t, once its sums are known. Once: a second call does nothing.
    fn commit(&self, state: &State) -> Result<()> {
        if self.is_unsettled() {
            return Ok(());
        }
        let lock = self.committed.lock();
        let mut committed = lock.unwrap_or_else(PoisonError::into_inner);
        if *committed {
            return Ok(());
        }
        let replaced = match self.version {
            Some(version) => state.version()? != version,
            None => false,
        };
        match &self.saved {
            Saved::Cpu(_) if replaced => Ok(()),
            Saved::Cpu(saved) => match saved.step() {
                Some(step) => state.update_phi(&step.batch_phi, self.purpose),
                None => Ok(()),
            },
            // The backward is owed its statistics all the same.
            #[cfg(feature = "cuda")]
            Saved::Cuda(forward) if replaced => {
                forward.leave_out(cuda_argument(&state.phi_variable().storage_and_layout())?)
            }
            #[cfg(feature = "cuda")]
            Saved::Cuda(forward) if forward.is_step() => state
                .update_phi_on_gpu(self.purpose, |phi, layout, step| {
                    forward.update_phi(phi, layout, step)
                }),
            #[cfg(feature = "cuda")]
            Saved::Cuda(_) => Ok(()),
        }?;
        *committed = true;
        Ok(())
    }
}

/// A tensor as a custom op's forward gets it.
pub(crate) type Argument<'a> = (&'a CpuStorage, &'a Layout);

/// The gradients of an op's arguments.
type Gradients = [Option<Tensor>; 3];

/// The gradients of a forward's outputs.
#[derive(Clone, Copy)]
pub(crate) struct OutputGradients<'a> {
    pub dy: &'a Tensor,
    /// That of `xs + residual`, where it is an output with a gradient.
    pub dsum: Option<&'a Tensor>,
}

impl<T: Element> PowerNormOp<T> {
    pub const NAME: &'static str = "power_norm";

    /// An op for one forward on `args`, and where it leaves what the state needs.
    pub fn new(call: &Call, args: &[&Tensor]) -> Result<(Self, SavedForward<T::Acc>)> {
        let saved = SavedForward(Arc::new(OnceLock::new()));
        #[cfg(not(feature = "cuda"))]
        let _ = args;
        let op = Self {
            keep: call.keep.map(Tensor::contiguous).transpose()?,
            before: call.state.snapshot()?,
            saved: saved.clone(),
            state: call.state.clone(),
            purpose: call.purpose,
            loss_scale: call.loss_scale.clone(),
            ranks: call.ranks.clone(),
            #[cfg(feature = "cuda")]
            tracked: args.iter().any(|arg| arg.track_op()),
        };
        Ok((op, saved))
    }

    pub fn cpu_forward(
        &self,
        (storage, layout): Argument,
        residual: Option<Argument>,
        affine: Option<[Argument; 2]>,
    ) -> Result<cpu::Outputs<T>> {
        let [weight, bias] = affine.map_or([None, None], |affine| affine.map(Some));
        let layer = self.layer(weight, bias)?;
        let keep = self.keep.as_ref().map(Tensor::storage_and_layout);
        let keep = match &keep {
            Some((storage, layout)) => Some(cpu_packed(storage, layout)?),
            None => None,
        };
        let residual = residual.map(|(storage, layout)| matrix(storage, layout));
        let rows = Rows {
            residual: residual.transpose()?,
            ..self.rows(matrix(storage, layout)?, keep)
        };
        let (outputs, saved) = layer.forward(&rows, &self.before.phi, self.statistics())?;
        // candle runs a forward once; a second run would come to the same.
        let _ = (self.saved.0).set(Forward::new(Saved::Cpu(saved), self));
        Ok(outputs)
    }

    /// The gradients of what was normalized (or of `xs` and `residual` alike), if `input` says so, and of the parameters.
    pub fn backward(
        &self,
        x: &Tensor,
        input: bool,
        affine: Option<[&Tensor; 2]>,
        outputs: OutputGradients,
    ) -> Result<Gradients> {
        let Some(forward) = self.saved.0.get() else {
            candle::bail!("{}: backward without a forward", Self::NAME)
        };
        let gradients = || {
            let dy = readable(outputs.dy)?;
            let dsum = outputs.dsum.map(readable).transpose()?;
            let outputs = OutputGradients {
                dy: &dy,
                dsum: dsum.as_ref(),
            };
            match &forward.saved {
                Saved::Cpu(saved) => self.cpu_backward(forward, saved, x, input, affine, outputs),
                #[cfg(feature = "cuda")]
                Saved::Cuda(saved) => self.cuda_backward(forward, saved, x, input, affine, outputs),
            }
        };
        let gradients = gradients();
        // The step is taken, and what the forward kept for it can go; or this failed, and it is left out unless called again.
        self.state.forget_deferred(self.saved.id());
        gradients
    }

    /// The statistic of a training step.
    fn statistics(&self) -> Option<Statistics> {
        match self.purpose {
            Purpose::Evaluation => None,
            Purpose::Training => {
                let config = self.state.config();
                Some(config.statistics_at(self.before.version.steps + 1))
            }
            Purpose::Recalibration(_) => Some(Statistics::Batch),
        }
    }

    fn cpu_backward(
        &self,
        forward: &Forward<T::Acc>,
        saved: &cpu::Saved<T::Acc>,
        x: &Tensor,
        input: bool,
        affine: Option<[&Tensor; 2]>,
        outputs: OutputGradients,
    ) -> Result<Gradients> {
        let wanted = cpu::Wanted {
            input,
            params: affine.is_some_and(|affine| affine.iter().any(|param| param.track_op())),
        };
        let loss_scale = self.loss_scale.get();
        let nu = read(&self.state.nu()?.affine(loss_scale, 0.)?)?;
        let gradients = {
            let (x_storage, x_layout) = x.storage_and_layout();
            let (dy_storage, dy_layout) = outputs.dy.storage_and_layout();
            let dsum = outputs.dsum.map(Tensor::storage_and_layout);
            let weight = affine.map(|[weight, _]| weight.storage_and_layout());
            let weight = match &weight {
                Some((storage, layout)) => Some((on_cpu(storage)?, *layout)),
                None => None,
            };
            let layer = self.layer(weight, None)?;
            // Under recipe Fairseq the backward does not know the mask.
            let keep = self.keep.as_ref().filter(|_| layer.recipe == Recipe::Paper);
            let keep = keep.map(Tensor::storage_and_layout);
            let keep = match &keep {
                Some((storage, layout)) => Some(cpu_packed::<u8>(storage, layout)?),
                None => None,
            };
            let rows = self.rows(matrix(on_cpu(&x_storage)?, x_layout)?, keep);
            let dy = matrix(on_cpu(&dy_storage)?, dy_layout)?;
            let dsum = match &dsum {
                Some((storage, layout)) => Some(matrix(on_cpu(storage)?, layout)?),
                None => None,
            };
            let outputs = cpu::OutputGradients {
                dy: &dy,
                dsum: dsum.as_ref(),
            };
            layer.backward(&rows, &outputs, saved, &nu, wanted)?
        };
        forward.commit(&self.state)?;
        if let (Some(step), Some(lambda), Purpose::Training) =
            (saved.step(), &gradients.lambda, self.purpose)
        {
            self.state.update_nu(&step.gamma, lambda, loss_scale)?;
        }
        let dx = gradients
            .input
            .map(|dx| Tensor::from_vec(dx, x.shape(), x.device()))
            .transpose()?;
        let Some(([weight, bias], gradients)) = affine.zip(gradients.params) else {
            return Ok([dx, None, None]);
        };
        Ok([
            dx,
            param_gradient(weight, gradients.weight)?,
            param_gradient(bias, gradients.bias)?,
        ])
    }

    /// What the CPU's passes know of the layer; a backward has no use for β.
    fn layer(
        &self,
        weight: Option<Argument>,
        bias: Option<Argument>,
    ) -> Result<cpu::Layer<T::Acc>> {
        let config = self.state.config();
        Ok(cpu::Layer {
            weight: weight.map(widened).transpose()?,
            bias: bias.map(widened).transpose()?,
            eps: config.eps,
            recipe: config.recipe,
            ranks: self.ranks.clone(),
        })
    }

    fn rows<'a>(&self, x: Matrix<'a, T>, keep: Option<&'a [u8]>) -> Rows<'a, T> {
        let config = self.state.config();
        Rows {
            x,
            residual: None,
            keep,
            groups: config.group_scaling.map(|groups| (groups, config.eps)),
        }
    }
}

#[cfg(feature = "cuda")]
impl<T: Element> PowerNormOp<T> {
    pub fn cuda_forward(
        &self,
        x: cuda::Argument,
        residual: Option<cuda::Argument>,
        affine: Option<[cuda::Argument; 2]>,
    ) -> Result<cuda::Outputs> {
        let config = self.state.config();
        let keep = self.keep.as_ref().map(Tensor::storage_and_layout);
        let phi = self.state.phi_variable().storage_and_layout();
        let inputs = cuda::ForwardInputs {
            x,
            residual,
            keep: keep.as_ref().map(cuda_argument).transpose()?,
            weight: affine.map(|[weight, _]| weight),
            bias: affine.map(|[_, bias]| bias),
            phi: cuda_argument(&phi)?,
        };
        let (outputs, saved) = cuda::forward(
            &inputs,
            config,
            self.statistics(),
            self.tracked,
            self.before.version.steps,
            &self.ranks,
            self.state.kernels(),
        )?;
        // candle runs a forward once.
        let _ = (self.saved.0).set(Forward::new(Saved::Cuda(saved), self));
        Ok(outputs)
    }

    fn cuda_backward(
        &self,
        forward: &Forward<T::Acc>,
        saved: &cuda::Forward,
        x: &Tensor,
        input: bool,
        affine: Option<[&Tensor; 2]>,
        outputs: OutputGradients,
    ) -> Result<Gradients> {
        if self.state.config().recipe == Recipe::Fairseq {
            // Its divisor is the batch's.
            forward.settle(&self.ranks, &self.state)?;
        }
        let dtype = |param: &Tensor| param.track_op().then(|| param.dtype());
        let wanted = cuda::Wanted {
            input,
            weight: affine.and_then(|[weight, _]| dtype(weight)),
            bias: affine.and_then(|[_, bias]| dtype(bias)),
            loss_scale: self.loss_scale.get(),
        };
        let mut backward = self.with_inputs(x, affine, outputs, |inputs| {
            let ema_gz = self.state.nu_variable().storage_and_layout();
            saved.backward(inputs, cuda_argument(&ema_gz)?, &wanted, &self.ranks)
        })?;
        // The state's lock is not held while ranks wait for each other.
        forward.commit(&self.state)?;
        let mut update_nu = |ema_gz: Option<(&mut CudaStorage, &Layout)>| {
            let weight = affine.map(|[weight, _]| weight.storage_and_layout());
            let weight = weight.as_ref().map(cuda_argument).transpose()?;
            saved.update_nu(&mut backward, weight, ema_gz, wanted.loss_scale)
        };
        match self.purpose {
            Purpose::Training => self
                .state
                .update_nu_on_gpu(|storage, layout| update_nu(Some((storage, layout))))?,
            Purpose::Evaluation | Purpose::Recalibration(_) => update_nu(None)?,
        }
        let gradients = self.with_inputs(x, affine, outputs, |inputs| {
            saved.finish_backward(backward, inputs)
        })?;
        let tensor = |storage: Option<CudaStorage>, like: &Tensor| {
            storage.map(|storage| cuda_tensor(storage, like.shape()))
        };
        let dx = tensor(gradients.input, x);
        Ok(match affine {
            Some([weight, bias]) => [
                dx,
                tensor(gradients.weight, weight),
                tensor(gradients.bias, bias),
            ],
            None => [dx, None, None],
        })
    }

    /// Runs what reads a backward's arguments. Their storage is locked meanwhile, and one may be a variable of the state: nothing
    /// that moves the state may run within.
    fn with_inputs<R>(
        &self,
        x: &Tensor,
        affine: Option<[&Tensor; 2]>,
        outputs: OutputGradients,
        run: impl FnOnce(&cuda::BackwardInputs) -> Result<R>,
    ) -> Result<R> {
        let weight = affine.map(|[weight, _]| weight.storage_and_layout());
        let keep = self.keep.as_ref().map(Tensor::storage_and_layout);
        let (x, dy) = (x.storage_and_layout(), outputs.dy.storage_and_layout());
        let dsum = outputs.dsum.map(Tensor::storage_and_layout);
        run(&cuda::BackwardInputs {
            x: cuda_argument(&x)?,
            dy: cuda_argument(&dy)?,
            dsum: dsum.as_ref().map(cuda_argument).transpose()?,
            keep: keep.as_ref().map(cuda_argument).transpose()?,
            weight: weight.as_ref().map(cuda_argument).transpose()?,
        })
    }
}

impl<T: Element> CustomOp3 for PowerNormOp<T> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let outputs = self.cpu_forward((s1, l1), None, Some([(s2, l2), (s3, l3)]))?;
        Ok((T::to_cpu_storage_owned(outputs.y), l1.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
        s3: &CudaStorage,
        l3: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let outputs = self.cuda_forward((s1, l1), None, Some([(s2, l2), (s3, l3)]))?;
        Ok((outputs.y, l1.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let outputs = OutputGradients { dy, dsum: None };
        Ok(self
            .backward(x, x.track_op(), Some([weight, bias]), outputs)?
            .into())
    }
}

impl<T: Element> CustomOp1 for PowerNormOp<T> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let outputs = self.cpu_forward((storage, layout), None, None)?;
        Ok((T::to_cpu_storage_owned(outputs.y), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let outputs = self.cuda_forward((storage, layout), None, None)?;
        Ok((outputs.y, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let outputs = OutputGradients { dy, dsum: None };
        let [dx, _, _] = self.backward(x, x.track_op(), None, outputs)?;
        Ok(dx)
    }
}

/// The layer-scale without a layer.
struct GroupScalingOp<T> {
    groups: usize,
    eps: f64,
    element: PhantomData<T>,
    #[cfg(feature = "cuda")]
    kernels: Arc<cuda::Kernels>,
}

impl<T: Element> GroupScalingOp<T> {
    fn rows<'a>(&self, (storage, layout): Argument<'a>) -> Result<Rows<'a, T>> {
        Ok(Rows {
            x: matrix(storage, layout)?,
            residual: None,
            keep: None,
            groups: Some((self.groups, self.eps)),
        })
    }

    fn cpu_backward(&self, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let (x_storage, x_layout) = x.storage_and_layout();
        let (dy_storage, dy_layout) = dy.storage_and_layout();
        let rows = self.rows((on_cpu(&x_storage)?, x_layout))?;
        let dy = matrix(on_cpu(&dy_storage)?, dy_layout)?;
        Tensor::from_vec(cpu::scale_groups_bwd(&rows, &dy), x.shape(), x.device())
    }

    #[cfg(feature = "cuda")]
    fn cuda_backward(&self, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let (x_storage, dy_storage) = (x.storage_and_layout(), dy.storage_and_layout());
        let (x_argument, dy_argument) = (cuda_argument(&x_storage)?, cuda_argument(&dy_storage)?);
        let dx = cuda::scale_groups_bwd(
            x_argument,
            dy_argument,
            self.groups,
            self.eps,
            &self.kernels,
        )?;
        Ok(cuda_tensor(dx, x.shape()))
    }
}

impl<T: Element> CustomOp1 for GroupScalingOp<T> {
    fn name(&self) -> &'static str {
        "group_scaling"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let y = cpu::scale_groups(&self.rows((storage, layout))?);
        Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let y = cuda::scale_groups((storage, layout), self.groups, self.eps, &self.kernels)?;
        Ok((y, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dy = readable(dy)?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return self.cuda_backward(x, &dy).map(Some);
        }
        self.cpu_backward(x, &dy).map(Some)
    }
}

/// A parameter's gradient in its own dtype; none for one that is not trained.
fn param_gradient<A: WithDType>(param: &Tensor, gradient: Vec<A>) -> Result<Option<Tensor>> {
    if !param.track_op() {
        return Ok(None);
    }
    let gradient = Tensor::from_vec(gradient, param.shape(), param.device())?;
    gradient.to_dtype(param.dtype()).map(Some)
}

/// The values of a contiguous argument of any float dtype.
fn widened<A: WithDType>((storage, layout): Argument) -> Result<Vec<A>> {
    fn widen<S: WithDType, A: WithDType>(storage: &CpuStorage, layout: &Layout) -> Result<Vec<A>> {
        let values = packed::<S>(storage, layout)?.iter();
        Ok(values.map(|value| A::from_f64(value.to_f64())).collect())
    }
    match storage {
        CpuStorage::F32(_) => widen::<f32, A>(storage, layout),
        CpuStorage::F64(_) => widen::<f64, A>(storage, layout),
        CpuStorage::F16(_) => widen::<f16, A>(storage, layout),
        CpuStorage::BF16(_) => widen::<bf16, A>(storage, layout),
        other => Err(Error::InputDType(other.dtype()).into()),
    }
}

/// The rows of a [`readable`] tensor.
fn matrix<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<Matrix<'a, T>> {
    let Some(blocks) = row_blocks(layout) else {
        candle::bail!("power_norm: expected rows of adjacent elements, got {layout:?}")
    };
    let cols = layout.shape().dim(candle::D::Minus1)?;
    Ok(Matrix {
        cols,
        rows: layout.shape().elem_count() / cols,
        values: storage.as_slice()?,
        blocks,
    })
}

/// The elements of a contiguous tensor.
fn packed<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle::bail!("power_norm: expected a contiguous tensor, got {layout:?}")
    };
    // A view of nothing may begin past the end of its storage.
    let elements = if start < end { start..end } else { 0..0 };
    Ok(&storage.as_slice()?[elements])
}

/// [`packed`], of a tensor that must be on the CPU.
fn cpu_packed<'a, T: WithDType>(storage: &'a Storage, layout: &Layout) -> Result<&'a [T]> {
    packed(on_cpu(storage)?, layout)
}

/// The storage of a tensor that must be on the CPU.
pub(crate) fn on_cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        other => candle::bail!(
            "power_norm: expected a tensor on the CPU, got one on {:?}",
            other.device().location()
        ),
    }
}

#[cfg(feature = "cuda")]
fn cuda_tensor(storage: CudaStorage, shape: &Shape) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

/// A tensor's storage and layout, of a tensor that must be on a GPU.
#[cfg(feature = "cuda")]
pub(crate) fn cuda_argument<'a, S: Deref<Target = Storage>>(
    (storage, layout): &'a (S, &Layout),
) -> Result<cuda::Argument<'a>> {
    match &**storage {
        Storage::Cuda(storage) => Ok((storage, layout)),
        other => candle::bail!(
            "power_norm: expected a tensor on a GPU, got one on {:?}",
            other.device().location()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::{DType, Device};

    /// Where rows begin, by hand.
    #[test]
    fn views_are_blocks_of_rows() -> Result<()> {
        let base = Tensor::zeros((3, 4, 6), DType::F32, &Device::Cpu)?;
        let blocks = |view: &Tensor| row_blocks(view.layout());
        assert_eq!(blocks(&base), Some(vec![0]));
        assert_eq!(blocks(&base.narrow(0, 1, 2)?), Some(vec![24]));
        assert_eq!(blocks(&base.narrow(1, 1, 2)?), Some(vec![6, 30, 54]));
        assert_eq!(
            blocks(&base.transpose(0, 1)?),
            Some((0..12).map(|i| i % 3 * 24 + i / 3 * 6).collect())
        );
        let narrowed = base.narrow(2, 2, 3)?.narrow(0, 0, 1)?;
        assert_eq!(blocks(&narrowed), Some(vec![2, 8, 14, 20]));
        let row = base.narrow(0, 2, 1)?.narrow(1, 3, 1)?;
        assert_eq!(blocks(&row.broadcast_as((2, 1, 6))?), Some(vec![66, 66]));
        assert_eq!(blocks(&base.narrow(2, 4, 1)?).map(|b| b.len()), Some(12));
        assert_eq!(blocks(&base.transpose(1, 2)?), None);
        // Three blocks of no rows.
        assert_eq!(blocks(&base.narrow(1, 0, 0)?), Some(vec![0, 24, 48]));
        Ok(())
    }
}
