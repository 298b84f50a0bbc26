//! The custom op: which device runs a pass, and the only place that sees both tensors and storage.

use crate::cpu::{self, Element, Rows, Saved, Wanted};
use crate::state::{read, Snapshot, State};
use crate::{Error, Recipe};
use candle::backend::BackendStorage;
use candle::{
    CpuStorage, CustomOp1, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, WithDType,
};
use half::{bf16, f16};
use std::sync::{Arc, OnceLock};

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
    // The kernels take packed rows.
    let xs = xs.contiguous()?;
    let saved = Arc::new(OnceLock::new());
    let op = PowerNormOp::<T> {
        keep: keep.map(Tensor::contiguous).transpose()?,
        before: state.snapshot()?,
        saved: saved.clone(),
        state: state.clone(),
        train,
    };
    let ys = match affine {
        Some((weight, bias)) => xs.apply_op3_arc(weight, bias, Arc::new(Box::new(op)))?,
        None => xs.apply_op1_arc(Arc::new(Box::new(op)))?,
    };
    // Not inside the op: candle holds the storage of its arguments there, and an argument may be the
    // variable to update.
    if let Some(step) = saved
        .get()
        .and_then(|forward| forward.statistics.step.as_ref())
    {
        state.update_phi(&step.batch_phi)?;
    }
    Ok(ys)
}

/// One forward of a layer, and the backward that belongs to it.
struct PowerNormOp<T: Element> {
    keep: Option<Tensor>,
    /// ψ² and t before the step.
    before: Snapshot,
    /// Set by the forward.
    saved: Arc<OnceLock<Forward<T::Acc>>>,
    state: Arc<State>,
    train: bool,
}

/// What a forward leaves to its backward.
struct Forward<A> {
    /// The layer as it was then.
    layer: cpu::Layer<A>,
    statistics: Saved<A>,
}

/// A tensor as a custom op's forward gets it.
type Argument<'a> = (&'a CpuStorage, &'a Layout);

impl<T: Element> PowerNormOp<T> {
    const NAME: &'static str = "power_norm";

    fn cpu_forward(
        &self,
        (storage, layout): Argument,
        affine: Option<[Argument; 2]>,
    ) -> Result<(CpuStorage, Shape)> {
        let config = self.state.config();
        let (weight, bias) = match affine {
            Some([weight, bias]) => (Some(widened(weight)?), Some(widened(bias)?)),
            None => (None, None),
        };
        let layer = cpu::Layer {
            weight,
            bias,
            eps: config.eps,
            recipe: config.recipe,
        };
        let keep = self.keep.as_ref().map(Tensor::storage_and_layout);
        let keep = match &keep {
            Some((storage, layout)) => Some(cpu_packed(storage, layout)?),
            None => None,
        };
        let rows = self.rows(packed(storage, layout)?, layout.shape(), keep)?;
        let statistics = config.statistics_at(self.before.steps + 1);
        let phi = read(&self.before.phi)?;
        let (y, statistics) = layer.forward(&rows, &phi, self.train.then_some(statistics));
        // candle runs a forward once; a second run would come to the same.
        let _ = self.saved.set(Forward { layer, statistics });
        Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
    }

    fn backward(
        &self,
        x: &Tensor,
        affine: Option<[&Tensor; 2]>,
        dy: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let Some(Forward { layer, statistics }) = self.saved.get() else {
            candle::bail!("{}: backward without a forward", Self::NAME)
        };
        let wanted = Wanted {
            input: x.track_op(),
            params: affine.is_some_and(|affine| affine.iter().any(|param| param.track_op())),
        };
        let dy = dy.contiguous()?;
        let nu = read(&self.state.nu()?)?;
        let gradients = {
            let (x_storage, x_layout) = x.storage_and_layout();
            let (dy_storage, dy_layout) = dy.storage_and_layout();
            // Under recipe Fairseq the backward does not know the mask.
            let keep = self.keep.as_ref().filter(|_| layer.recipe == Recipe::Paper);
            let keep = keep.map(Tensor::storage_and_layout);
            let keep = match &keep {
                Some((storage, layout)) => Some(cpu_packed::<u8>(storage, layout)?),
                None => None,
            };
            let rows = self.rows(cpu_packed(&x_storage, x_layout)?, x.shape(), keep)?;
            let dy = cpu_packed(&dy_storage, dy_layout)?;
            layer.backward(&rows, dy, statistics, &nu, wanted)
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

    fn rows<'a>(&self, x: &'a [T], shape: &Shape, keep: Option<&'a [u8]>) -> Result<Rows<'a, T>> {
        let config = self.state.config();
        Ok(Rows {
            x,
            cols: shape.dim(candle::D::Minus1)?,
            keep,
            groups: config.group_scaling.map(|groups| (groups, config.eps)),
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

/// The values of a `[C]` argument, whatever its stride and float dtype.
fn widened<A: WithDType>((storage, layout): Argument) -> Result<Vec<A>> {
    fn gather<S: WithDType, A: WithDType>(values: &[S], layout: &Layout) -> Vec<A> {
        let (len, stride) = (layout.dims()[0], layout.stride()[0]);
        let value = |i: usize| A::from_f64(values[layout.start_offset() + i * stride].to_f64());
        (0..len).map(value).collect()
    }
    match storage {
        CpuStorage::F32(values) => Ok(gather(values, layout)),
        CpuStorage::F64(values) => Ok(gather(values, layout)),
        CpuStorage::F16(values) => Ok(gather(values, layout)),
        CpuStorage::BF16(values) => Ok(gather(values, layout)),
        other => Err(Error::InputDType(other.dtype()).into()),
    }
}

/// The elements of a contiguous tensor.
fn packed<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle::bail!("power_norm: expected a contiguous tensor, got {layout:?}")
    };
    Ok(&storage.as_slice()?[start..end])
}

/// [`packed`], of a tensor that must be on the CPU.
fn cpu_packed<'a, T: WithDType>(storage: &'a Storage, layout: &Layout) -> Result<&'a [T]> {
    match storage {
        Storage::Cpu(storage) => packed(storage, layout),
        other => candle::bail!(
            "power_norm: expected a tensor on the CPU, got one on {:?}",
            other.device().location()
        ),
    }
}
