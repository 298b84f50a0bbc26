//! The custom op: which device runs a pass, and the only place that sees both tensors and storage.

use crate::cpu::{self, Element, Matrix, Rows};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::state::{read, Snapshot, State};
use crate::{Error, Recipe};
use candle::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle::{op::BackpropOp, CudaStorage};
use candle::{
    CpuStorage, CustomOp1, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, WithDType,
};
use half::{bf16, f16};
use std::sync::{Arc, OnceLock};
#[cfg(feature = "cuda")]
use std::{cell::OnceCell, ops::Deref};

/// Runs the layer on checked arguments: `xs` `[.., C]`, weight and bias `[C]`, `keep` `[..]`.
///
/// In training, ψ² and t are updated once the output stands.
pub(crate) fn power_norm(
    xs: &Tensor,
    affine: Option<(&Tensor, &Tensor)>,
    keep: Option<&Tensor>,
    state: &Arc<State>,
    train: bool,
) -> Result<Tensor> {
    match xs.dtype() {
        DType::F32 => apply::<f32>(xs, affine, keep, state, train),
        DType::F64 => apply::<f64>(xs, affine, keep, state, train),
        DType::F16 => apply::<f16>(xs, affine, keep, state, train),
        DType::BF16 => apply::<bf16>(xs, affine, keep, state, train),
        other => Err(Error::InputDType(other).into()),
    }
}

fn apply<T: Element>(
    xs: &Tensor,
    affine: Option<(&Tensor, &Tensor)>,
    keep: Option<&Tensor>,
    state: &Arc<State>,
    train: bool,
) -> Result<Tensor> {
    let xs = readable(xs)?;
    let affine = match affine {
        Some((weight, bias)) => Some((weight.contiguous()?, bias.contiguous()?)),
        None => None,
    };
    let saved = Arc::new(OnceLock::new());
    let op = PowerNormOp::<T> {
        keep: keep.map(Tensor::contiguous).transpose()?,
        before: state.snapshot()?,
        saved: saved.clone(),
        state: state.clone(),
        train,
        #[cfg(feature = "cuda")]
        tracked: match &affine {
            Some((weight, bias)) => [&xs, weight, bias].iter().any(|arg| arg.track_op()),
            None => xs.track_op(),
        },
    };
    let ys = match &affine {
        Some((weight, bias)) => xs.apply_op3_arc(weight, bias, Arc::new(Box::new(op)))?,
        None => xs.apply_op1_arc(Arc::new(Box::new(op)))?,
    };
    // Not inside the op: candle holds the storage of its arguments there, and an argument may be the
    // variable to update.
    if let Some(forward) = saved.get() {
        forward.commit(state)?;
    }
    Ok(ys)
}

/// The tensor as the kernels take it, copied if need be. Those of the CPU take rows anywhere, of adjacent elements; those
/// of a GPU packed rows, which begin on a 16-byte boundary.
fn readable(xs: &Tensor) -> Result<Tensor> {
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
struct PowerNormOp<T: Element> {
    keep: Option<Tensor>,
    /// ψ² and t before the step.
    before: Snapshot<T::Acc>,
    /// Set by the forward.
    saved: Arc<OnceLock<Forward<T::Acc>>>,
    state: Arc<State>,
    train: bool,
    /// Whether a backward may follow.
    #[cfg(feature = "cuda")]
    tracked: bool,
}

/// What a forward leaves to its backward and to the state.
enum Forward<A> {
    Cpu(cpu::Saved<A>),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Forward),
}

impl<A: cpu::Accumulator + WithDType> Forward<A> {
    /// The step of ψ² and t, once the output stands.
    fn commit(&self, state: &State) -> Result<()> {
        match self {
            Forward::Cpu(statistics) => match &statistics.step {
                Some(step) => state.update_phi(&step.batch_phi),
                None => Ok(()),
            },
            #[cfg(feature = "cuda")]
            Forward::Cuda(forward) if forward.is_step() => {
                state.update_phi_on_gpu(|phi, layout, step| forward.update_phi(phi, layout, step))
            }
            #[cfg(feature = "cuda")]
            Forward::Cuda(_) => Ok(()),
        }
    }
}

/// A tensor as a custom op's forward gets it.
type Argument<'a> = (&'a CpuStorage, &'a Layout);

/// The gradients of an op's arguments.
type Gradients = [Option<Tensor>; 3];

impl<T: Element> PowerNormOp<T> {
    const NAME: &'static str = "power_norm";

    fn cpu_forward(
        &self,
        (storage, layout): Argument,
        affine: Option<[Argument; 2]>,
    ) -> Result<(CpuStorage, Shape)> {
        let config = self.state.config();
        let [weight, bias] = affine.map_or([None, None], |affine| affine.map(Some));
        let layer = self.layer(weight, bias)?;
        let keep = self.keep.as_ref().map(Tensor::storage_and_layout);
        let keep = match &keep {
            Some((storage, layout)) => Some(cpu_packed(storage, layout)?),
            None => None,
        };
        let rows = self.rows(matrix(storage, layout)?, keep);
        let statistics = config.statistics_at(self.before.steps + 1);
        let train = self.train.then_some(statistics);
        let (y, statistics) = layer.forward(&rows, &self.before.phi, train);
        // candle runs a forward once; a second run would come to the same.
        let _ = self.saved.set(Forward::Cpu(statistics));
        Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
    }

    fn backward(&self, x: &Tensor, affine: Option<[&Tensor; 2]>, dy: &Tensor) -> Result<Gradients> {
        let dy = readable(dy)?;
        match self.saved.get() {
            Some(Forward::Cpu(statistics)) => self.cpu_backward(statistics, x, affine, &dy),
            #[cfg(feature = "cuda")]
            Some(Forward::Cuda(forward)) => self.cuda_backward(forward, x, affine, &dy),
            None => candle::bail!("{}: backward without a forward", Self::NAME),
        }
    }

    fn cpu_backward(
        &self,
        statistics: &cpu::Saved<T::Acc>,
        x: &Tensor,
        affine: Option<[&Tensor; 2]>,
        dy: &Tensor,
    ) -> Result<Gradients> {
        let wanted = cpu::Wanted {
            input: x.track_op(),
            params: affine.is_some_and(|affine| affine.iter().any(|param| param.track_op())),
        };
        let nu = read(&self.state.nu()?)?;
        let gradients = {
            let (x_storage, x_layout) = x.storage_and_layout();
            let (dy_storage, dy_layout) = dy.storage_and_layout();
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
            layer.backward(&rows, &dy, statistics, &nu, wanted)
        };
        if let (Some(step), Some(lambda)) = (&statistics.step, &gradients.lambda) {
            self.state.update_nu(&step.gamma, lambda)?;
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
        })
    }

    fn rows<'a>(&self, x: Matrix<'a, T>, keep: Option<&'a [u8]>) -> Rows<'a, T> {
        let config = self.state.config();
        Rows {
            x,
            keep,
            groups: config.group_scaling.map(|groups| (groups, config.eps)),
        }
    }
}

#[cfg(feature = "cuda")]
impl<T: Element> PowerNormOp<T> {
    fn cuda_forward(
        &self,
        x: cuda::Argument,
        affine: Option<[cuda::Argument; 2]>,
    ) -> Result<(CudaStorage, Shape)> {
        let config = self.state.config();
        let keep = self.keep.as_ref().map(Tensor::storage_and_layout);
        let phi = self.state.phi_variable().storage_and_layout();
        let inputs = cuda::ForwardInputs {
            x,
            keep: keep.as_ref().map(cuda_argument).transpose()?,
            weight: affine.map(|[weight, _]| weight),
            bias: affine.map(|[_, bias]| bias),
            phi: cuda_argument(&phi)?,
        };
        let statistics = config.statistics_at(self.before.steps + 1);
        let train = self.train.then_some(statistics);
        let (y, forward) = cuda::forward(&inputs, config, train, self.tracked)?;
        // candle runs a forward once.
        let _ = self.saved.set(Forward::Cuda(forward));
        Ok((y, x.1.shape().clone()))
    }

    fn cuda_backward(
        &self,
        forward: &cuda::Forward,
        x: &Tensor,
        affine: Option<[&Tensor; 2]>,
        dy: &Tensor,
    ) -> Result<Gradients> {
        let dtype = |param: &Tensor| param.track_op().then(|| param.dtype());
        let wanted = cuda::Wanted {
            input: x.track_op(),
            weight: affine.and_then(|[weight, _]| dtype(weight)),
            bias: affine.and_then(|[_, bias]| dtype(bias)),
        };
        let weight = affine.map(|[weight, _]| weight.storage_and_layout());
        let keep = self.keep.as_ref().map(Tensor::storage_and_layout);
        let (x_storage, dy_storage) = (x.storage_and_layout(), dy.storage_and_layout());
        let inputs = cuda::BackwardInputs {
            x: cuda_argument(&x_storage)?,
            dy: cuda_argument(&dy_storage)?,
            keep: keep.as_ref().map(cuda_argument).transpose()?,
            weight: weight.as_ref().map(cuda_argument).transpose()?,
        };
        let gradients = OnceCell::new();
        self.state.update_nu_on_gpu(|ema_gz, layout| {
            // candle runs an op in place once.
            let _ = gradients.set(forward.backward(&inputs, ema_gz, layout, &wanted)?);
            Ok(())
        })?;
        let Some(gradients) = gradients.into_inner() else {
            candle::bail!("{}: a backward that did not run", Self::NAME)
        };
        let tensor = |storage: Option<CudaStorage>, like: &Tensor| {
            storage.map(|storage| {
                let storage = Storage::Cuda(storage);
                Tensor::from_storage(storage, like.shape(), BackpropOp::none(), false)
            })
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
        self.cpu_forward((s1, l1), Some([(s2, l2), (s3, l3)]))
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
        self.cuda_forward((s1, l1), Some([(s2, l2), (s3, l3)]))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok(self.backward(x, Some([weight, bias]), dy)?.into())
    }
}

impl<T: Element> CustomOp1 for PowerNormOp<T> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.cpu_forward((storage, layout), None)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.cuda_forward((storage, layout), None)
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let [dx, _, _] = self.backward(x, None, dy)?;
        Ok(dx)
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
fn on_cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        other => candle::bail!(
            "power_norm: expected a tensor on the CPU, got one on {:?}",
            other.device().location()
        ),
    }
}

/// A tensor's storage and layout, of a tensor that must be on a GPU.
#[cfg(feature = "cuda")]
fn cuda_argument<'a, S: Deref<Target = Storage>>(
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
    use candle::Device;

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
