//! A step on a GPU.
//!
//! A forward allocates and loads all that it and its step of ψ² need before its first launch, and
//! so does a backward. A call that fails before its launches changes nothing.

use super::cut::Extent;
use super::launch::{LaunchPlan, Saved, Workspace};
use super::params::{
    when, Address, NormalizeBwdParams, NormalizeParams, SumPartialsParams, UpdateNuParams,
    UpdatePhiParams, Vector,
};
use super::{held, number, reads_in_place, Gpu, InPlace, Kernels, Uses};
use crate::config::{ForwardKind, PhiStep, Recipe};
use crate::device::{
    BackwardInputs, DeviceBackward, DeviceStep, ForwardInputs, Gradients, Outputs, Setting,
};
use candle::backend::BackendDevice;
use candle::op::BackpropOp;
use candle::{CudaStorage, DType, Device, Result, Shape, Storage, Tensor, Var, D};
use cudarc::driver::{CudaSlice, DevicePtr};
use std::sync::Arc;

/// Bytes of a total.
const TOTAL_BYTES: u64 = size_of::<f64>() as u64;

/// A forward, and what it leaves.
pub(crate) struct CudaStep {
    gpu: Gpu,
    plan: LaunchPlan,
    /// Device memory that the backward needs. `None` where there are no rows, or no backward was to
    /// follow.
    saved: Option<CudaSlice<u8>>,
    /// The sums of a training forward over ranks: local ones, and later global ones. In a single
    /// process the sums are in `saved`, chunk by chunk.
    sums: Option<Tensor>,
}

impl CudaStep {
    /// Adds the residual, sums the squares and writes the output. If the batch's statistic
    /// normalizes, the output is left to [`normalize_by_batch`](DeviceStep::normalize_by_batch).
    pub fn forward(
        setting: Setting,
        inputs: &ForwardInputs,
        kernels: &Arc<Kernels>,
    ) -> Result<(Box<dyn DeviceStep>, Outputs)> {
        let mut step = Self::new(setting, inputs, kernels)?;
        let plan = step.plan;
        let output = |like: &Tensor| {
            let storage = step.gpu.storage(like, plan.rows() > 0);
            storage.map(Storage::Cuda)
        };
        let mut outputs = Outputs {
            y: Some(output(&inputs.x)?),
            sum: inputs.residual.as_ref().map(output).transpose()?,
        };
        if plan.rows() == 0 && !plan.kind.is_training() {
            return Ok((Box::new(step), outputs));
        }
        if setting.tracked || plan.kind.is_training() || plan.has_wide_groups() {
            step.saved = Some(step.gpu.room(plan.saved(0).end)?);
        }
        if setting.over_ranks {
            step.sums = Some(step.gpu.sums(plan.forward_sums() * (plan.cols() + 1))?);
        }
        step.gpu.load(&plan.kernels(setting.over_ranks))?;
        step.launch_rows(inputs, &mut outputs)?;
        if let Some(sums) = step.sums.clone() {
            InPlace::run(&sums, |sums, _| step.launch_totals(sums))?;
        }
        Ok((Box::new(step), outputs))
    }

    fn new(setting: Setting, inputs: &ForwardInputs, kernels: &Arc<Kernels>) -> Result<Self> {
        let x = &inputs.x;
        let cols = x.dim(D::Minus1)?;
        let rows = x.elem_count() / cols;
        // The kernels have no others.
        number(x.dtype())?;
        let extent = Extent {
            dtype: x.dtype(),
            rows,
            cols,
            groups: setting.config.group_scaling,
            limits: kernels.limits,
        };
        // Other processes may have rows. If none has, a training step is an evaluation.
        let kind = match rows > 0 || setting.over_ranks {
            true => setting.kind,
            false => ForwardKind::Evaluation,
        };
        Ok(Self {
            gpu: Gpu {
                device: x.device().as_cuda_device()?.clone(),
                kernels: kernels.clone(),
            },
            plan: LaunchPlan {
                masked: inputs.keep.is_some(),
                divides: inputs.phi.is_some(),
                ..LaunchPlan::new(extent, setting.config, kind)?
            },
            saved: None,
            sums: None,
        })
    }

    /// Runs `launch` with the arguments of a forward's pass over the rows, as if it made all
    /// results.
    fn with_rows(
        &mut self,
        inputs: &ForwardInputs,
        outputs: &mut Outputs,
        launch: impl FnOnce(&Gpu, &LaunchPlan, NormalizeParams, &Saved) -> Result<()>,
    ) -> Result<()> {
        let (gpu, plan) = (&self.gpu, &self.plan);
        let tensors = held([
            Some(&inputs.x),
            inputs.residual.as_ref(),
            inputs.keep.as_ref(),
            inputs.weight.as_ref(),
            inputs.bias.as_ref(),
            inputs.phi.as_ref(),
        ]);
        let [x, residual, keep, weight, bias, phi] = &tensors;
        let sum = match residual {
            Some(_) => Some(on_gpu(&mut outputs.sum)?),
            None => None,
        };
        let stream = gpu.device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let saved = match &mut self.saved {
            Some(saved) => plan.saved(uses.slice(saved)),
            None => Saved::default(),
        };
        let params = NormalizeParams {
            x: uses.read_rows(x)?,
            residual: uses.read_rows(residual)?,
            sum: uses.write(sum, 0)?.data,
            y: uses.write(Some(on_gpu(&mut outputs.y)?), 0)?.data,
            keep: uses.read(keep)?,
            weight: uses.read_vector(weight)?,
            bias: uses.read_vector(bias)?,
            phi: uses.read_vector(phi)?,
            inv_rms: saved.inv_rms,
            factors: saved.factors,
            partials: saved.partials,
            kept: saved.kept,
            group_scaling: plan.cut.group_scaling,
            eps: plan.config.eps,
            group_eps: plan.config.eps,
            ..Default::default()
        };
        launch(gpu, plan, params, &saved)
    }

    /// Launches a forward: `Y = γ ⊙ X̃/D + β`, the sum of the input and its residual, and the sums
    /// that move ψ². By the batch's statistic, no output yet.
    fn launch_rows(&mut self, inputs: &ForwardInputs, outputs: &mut Outputs) -> Result<()> {
        self.with_rows(inputs, outputs, |gpu, plan, mut params, saved| {
            if plan.rows() == 0 {
                // 1/D by ψ², as for any batch without a kept row. Elsewhere the launch of the
                // output writes it.
                let params = statistics(plan, saved, 0, params.phi, true);
                return match plan.kind {
                    // SAFETY: `with_rows` holds every buffer until the launches are queued, each
                    // of the size that `LaunchPlan` asks for.
                    ForwardKind::RunningStatistic => unsafe {
                        gpu.launch(&plan.channels_launch("update_phi"), &params)
                    },
                    _ => Ok(()),
                };
            }
            if plan.has_wide_groups() {
                let (launch, tiling) = plan.groups_launch();
                // SAFETY: as above.
                unsafe { gpu.launch(&launch, &NormalizeParams { tiling, ..params }) }?;
                params = added(params);
            }
            if plan.kind == ForwardKind::BatchStatistic {
                params.y = 0;
            }
            // SAFETY: as above.
            unsafe { gpu.normalize(plan, params) }?;
            if saved.all_partials == 0 {
                return Ok(());
            }
            let all_rows = NormalizeParams {
                y: 0,
                keep: 0,
                kept: 0,
                partials: saved.all_partials,
                ..added(params)
            };
            // SAFETY: as above.
            unsafe { gpu.normalize(plan, all_rows) }
        })
    }

    /// Sums over the rows of this process, to be handed out.
    fn launch_totals(&mut self, sums: &mut CudaStorage) -> Result<()> {
        let (gpu, plan) = (&self.gpu, &self.plan);
        let Some(saved) = &mut self.saved else {
            candle::bail!("power_norm: expected sums of chunks, got none")
        };
        let stream = gpu.device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let saved = plan.saved(uses.slice(saved));
        let mut totals = uses.write(Some(sums), 0)?.data;
        let all_partials = match saved.all_partials {
            0 => saved.partials,
            all_partials => all_partials,
        };
        // Of kept rows, then of all rows.
        let partials = [(saved.partials, saved.kept), (all_partials, 0)];
        for (partials, kept) in partials.into_iter().take(plan.forward_sums()) {
            let count = totals + plan.cols() as u64 * TOTAL_BYTES;
            let params = SumPartialsParams {
                partials,
                kept,
                stride: plan.cols() as i64,
                totals,
                count,
                ..Default::default()
            };
            // SAFETY: as in `launch_rows`.
            unsafe { gpu.sum_partials(plan, params) }?;
            totals = count + TOTAL_BYTES;
        }
        Ok(())
    }
}

impl DeviceStep for CudaStep {
    fn local_sums(&self) -> Result<Tensor> {
        match &self.sums {
            Some(sums) => Ok(sums.clone()),
            None => candle::bail!("power_norm: expected the sums of a forward, got none"),
        }
    }

    fn set_global_sums(&mut self, global: &Tensor) -> Result<()> {
        self.sums = Some(global.clone());
        Ok(())
    }

    fn is_step(&self) -> bool {
        self.plan.kind.is_training()
    }

    fn update_phi(&mut self, phi: &Var, step: &PhiStep) -> Result<()> {
        let (gpu, plan) = (&self.gpu, &self.plan);
        let Some(saved) = &mut self.saved else {
            candle::bail!("power_norm: expected sums of chunks, got none")
        };
        let [global] = &held([self.sums.as_ref()]);
        InPlace::run(phi, |phi, offset| {
            let stream = gpu.device.cuda_stream();
            let mut uses = Uses::on(&stream);
            let phi = uses.write(Some(phi), offset)?;
            let saved = plan.saved(uses.slice(saved));
            let by_batch = plan.kind == ForwardKind::BatchStatistic;
            let totals = uses.read(global)?;
            let params = UpdatePhiParams {
                cumulative: step.cumulative.is_some().into(),
                moving: step.moving.is_some().into(),
                old_share: step.cumulative.map_or(0., |shares| shares.old),
                new_share: step.cumulative.map_or(0., |shares| shares.new),
                alpha: step.moving.map_or(0., |shares| shares.old),
                beta: step.moving.map_or(0., |shares| shares.new),
                ..statistics(plan, &saved, totals, phi, by_batch)
            };
            // SAFETY: as in `launch_rows`; `saved` and the sums are those of this step, and the
            // caller holds ψ².
            unsafe { gpu.launch(&plan.channels_launch("update_phi"), &params) }
        })
    }

    fn normalize_by_batch(
        &mut self,
        inputs: &ForwardInputs,
        mut outputs: Outputs,
    ) -> Result<Outputs> {
        if self.plan.rows() == 0 {
            return Ok(outputs);
        }
        self.with_rows(inputs, &mut outputs, |gpu, plan, params, _| {
            let output = NormalizeParams {
                // `update_phi` left 1/D in `inv_rms`.
                phi: Vector::default(),
                partials: 0,
                kept: 0,
                ..added(params)
            };
            // SAFETY: as in `launch_rows`.
            unsafe { gpu.normalize(plan, output) }
        })?;
        Ok(outputs)
    }

    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>> {
        let rows = Device::Cuda(self.gpu.device.clone());
        let ema_gz = match inputs.running.map(|nu| nu.ema_gz.detach()) {
            Some(nu) if !reads_in_place(&rows, nu.device()) => Some(nu.copy()?),
            nu => nu,
        };
        let mut backward = CudaBackward::new(self, inputs)?;
        backward.launch_rows(ema_gz.as_ref())?;
        if let Some(sums) = backward.sums.clone() {
            InPlace::run(&sums, |sums, _| backward.launch_totals(sums))?;
        }
        Ok(Box::new(backward))
    }
}

/// A backward.
struct CudaBackward<'a> {
    step: &'a CudaStep,
    plan: LaunchPlan,
    inputs: BackwardInputs<'a>,
    input: Option<CudaStorage>,
    weight: Option<CudaStorage>,
    bias: Option<CudaStorage>,
    /// `None` where there is nothing to launch.
    workspace: Option<CudaSlice<u8>>,
    /// Σ dy x̃ over ranks, `[cols]`: local sums, and later global ones. `None` in a single process.
    sums: Option<Tensor>,
}

impl<'a> CudaBackward<'a> {
    /// Allocates what a backward writes, and loads its kernels.
    fn new(step: &'a CudaStep, inputs: &BackwardInputs<'a>) -> Result<Self> {
        let gpu = &step.gpu;
        let plan = step.plan.of_backward()?;
        let (launches, over_ranks) = (step.saved.is_some(), step.sums.is_some());
        let gradient = |of: Option<&Tensor>| {
            let storage = of.map(|of| gpu.storage(of, launches && of.elem_count() > 0));
            storage.transpose()
        };
        let tracked = |param: Option<&'a Tensor>| param.filter(|param| param.track_op());
        let workspace = match launches {
            true => Some(gpu.room(plan.workspace(0).end)?),
            false => None,
        };
        let sums = match over_ranks {
            true => Some(gpu.sums(plan.cols())?),
            false => None,
        };
        if launches {
            gpu.load(&plan.kernels(over_ranks))?;
        }
        Ok(Self {
            step,
            plan,
            inputs: *inputs,
            input: gradient(inputs.wants_input.then_some(inputs.x))?,
            weight: gradient(tracked(inputs.weight))?,
            bias: gradient(tracked(inputs.bias))?,
            workspace,
            sums,
        })
    }

    /// The gradients need sums over the rows.
    fn wants_sums(&self) -> bool {
        self.plan.kind.is_training() || self.weight.is_some() || self.bias.is_some()
    }

    /// Runs `launch` with the arguments of a pass over the rows that takes no sums. Does nothing
    /// without rows.
    fn with_rows(
        &mut self,
        ema_gz: Option<&Tensor>,
        launch: impl FnOnce(&Gpu, &LaunchPlan, NormalizeBwdParams, &Workspace) -> Result<()>,
    ) -> Result<()> {
        let (plan, inputs, gpu) = (&self.plan, &self.inputs, &self.step.gpu);
        let (Some(saved), Some(workspace), 1..) =
            (&self.step.saved, &mut self.workspace, plan.rows())
        else {
            return Ok(());
        };
        let tensors = held([
            Some(inputs.x),
            Some(inputs.dy),
            inputs.dsum,
            inputs.keep,
            inputs.weight,
            ema_gz,
        ]);
        let [x, dy, dsum, keep, weight, ema_gz] = &tensors;
        let stream = gpu.device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let saved = plan.saved(uses.hold(saved.device_ptr(&stream)));
        let workspace = plan.workspace(uses.slice(workspace));
        // Under recipe Fairseq the backward does not know the mask, so it reads the count.
        // Elsewhere the mask shows a batch without a kept row, and the count need not be known yet.
        let fairseq = plan.config.recipe == Recipe::Fairseq;
        let reads_count = fairseq && plan.kind.is_training();
        let params = NormalizeBwdParams {
            x: uses.read_rows(x)?,
            dy: uses.read_rows(dy)?,
            dsum: uses.read_rows(dsum)?,
            dx: uses.write(self.input.as_mut(), 0)?.data,
            keep: when(!fairseq, uses.read(keep)?),
            weight: uses.read_vector(weight)?,
            correction: uses.read_vector(ema_gz)?,
            inv_rms: saved.inv_rms,
            batch_phi: when(reads_count, saved.batch_phi),
            count: when(reads_count, saved.count),
            factors: saved.factors,
            dots: workspace.dots,
            group_scaling: plan.cut.group_scaling,
            eps: plan.config.eps,
            ..Default::default()
        };
        launch(gpu, plan, params, &workspace)
    }

    /// Makes the gradients that do not depend on the sums of the whole batch, and the sums.
    ///
    /// With `g = γ ⊙ dy` every `∂L/∂X̃` has the form `gain ⊙ dy − decay ⊙ X̃`. The cases are the
    /// same as in the CPU's backward.
    fn launch_rows(&mut self, ema_gz: Option<&Tensor>) -> Result<()> {
        let loss_scale = self.loss_scale();
        let wants_sums = self.wants_sums();
        self.with_rows(ema_gz, |gpu, plan, mut params, workspace| {
            if plan.config.is_exact(plan.kind) {
                // Made at last, by Λ.
                params.dx = 0;
            }
            params.correction_scale = (1. - plan.config.alpha_bwd) * loss_scale;
            if wants_sums {
                params.partials = workspace.partials;
            }
            match params.dx != 0 || wants_sums {
                // SAFETY: `with_rows` holds every buffer until the launches are queued, each of
                // the size that `LaunchPlan` asks for.
                true => unsafe { gpu.normalize_bwd(plan, params) },
                false => Ok(()),
            }
        })
    }

    /// Sums Σ dy x̃ over the rows of this process, to be handed out.
    fn launch_totals(&mut self, sums: &mut CudaStorage) -> Result<()> {
        let (plan, gpu) = (&self.plan, &self.step.gpu);
        let Some(workspace) = &mut self.workspace else {
            candle::bail!("power_norm: expected sums of chunks, got none")
        };
        let stream = gpu.device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let params = SumPartialsParams {
            partials: plan.workspace(uses.slice(workspace)).partials,
            stride: 2 * plan.cols() as i64,
            totals: uses.write(Some(sums), 0)?.data,
            ..Default::default()
        };
        // SAFETY: as in `launch_rows`.
        unsafe { gpu.sum_partials(plan, params) }
    }

    /// Makes Λ and the parameters' gradients. Moves ν, if it is given: its storage, and the bytes
    /// from there to ν.
    fn launch_update(&mut self, ema_gz: Option<(&mut CudaStorage, Address)>) -> Result<()> {
        let (wants_sums, loss_scale) = (self.wants_sums(), self.loss_scale());
        let (plan, gpu) = (&self.plan, &self.step.gpu);
        let (Some(saved), Some(workspace), true) =
            (&self.step.saved, &mut self.workspace, wants_sums)
        else {
            return Ok(());
        };
        let tensors = held([self.inputs.weight, self.sums.as_ref()]);
        let [weight, global] = &tensors;
        let stream = gpu.device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let (ema_gz, offset) = ema_gz.unzip();
        let ema_gz = uses.write(ema_gz, offset.unwrap_or_default())?;
        let saved = plan.saved(uses.hold(saved.device_ptr(&stream)));
        let workspace = plan.workspace(uses.slice(workspace));
        let params = UpdateNuParams {
            partials: workspace.partials,
            totals: uses.read(global)?,
            cols: plan.cols() as i64,
            chunks: plan.chunks().into(),
            weight: uses.read_vector(weight)?,
            inv_rms: saved.inv_rms,
            gamma: saved.gamma,
            count: saved.count,
            lambda: workspace.lambda,
            ema_gz,
            dweight: uses.write(self.weight.as_mut(), 0)?,
            dbias: uses.write(self.bias.as_mut(), 0)?,
            beta: 1. - plan.config.alpha_bwd,
            unscale: loss_scale.recip(),
            guard: (plan.config.recipe == Recipe::Paper).into(),
        };
        // SAFETY: as in `launch_rows`; the caller holds ν.
        unsafe { gpu.launch(&plan.channels_launch("update_nu"), &params) }
    }

    fn loss_scale(&self) -> f64 {
        self.inputs.running.map_or(1., |nu| nu.loss_scale)
    }
}

impl DeviceBackward for CudaBackward<'_> {
    fn local_sums(&self) -> Result<Tensor> {
        match &self.sums {
            Some(sums) => Ok(sums.clone()),
            None => candle::bail!("power_norm: expected the sums of a backward, got none"),
        }
    }

    fn set_global_sums(&mut self, global: &Tensor) -> Result<()> {
        self.sums = Some(global.clone());
        Ok(())
    }

    fn update_nu(&mut self, ema_gz: Option<&Var>) -> Result<()> {
        match ema_gz {
            Some(ema_gz) => InPlace::run(ema_gz, |ema_gz, offset| {
                self.launch_update(Some((ema_gz, offset)))
            }),
            None => self.launch_update(None),
        }
    }

    fn gradients(mut self: Box<Self>) -> Result<Gradients> {
        if self.plan.config.is_exact(self.plan.kind) && self.input.is_some() {
            self.with_rows(None, |gpu, plan, mut params, workspace| {
                params.correction = Vector {
                    data: workspace.lambda,
                    dtype: number(plan.sums_dtype())?,
                };
                params.correction_scale = 1.;
                // SAFETY: as in `launch_rows`.
                unsafe { gpu.normalize_bwd(plan, params) }
            })?;
        }
        let (x, channels) = (self.inputs.x.shape(), Shape::from(self.plan.cols()));
        let tensor = |storage: Option<CudaStorage>, shape: &Shape| {
            storage.map(|storage| from_storage(storage, shape))
        };
        Ok(Gradients {
            input: tensor(self.input, x),
            weight: tensor(self.weight, &channels),
            bias: tensor(self.bias, &channels),
        })
    }
}

/// The storage of an output.
fn on_gpu(output: &mut Option<Storage>) -> Result<&mut CudaStorage> {
    match output {
        Some(Storage::Cuda(storage)) => Ok(storage),
        _ => candle::bail!("power_norm: expected an output on a GPU, got none to write"),
    }
}

/// The arguments of a later pass, which reads the sum with the residual that the first wrote.
fn added(params: NormalizeParams) -> NormalizeParams {
    match params.residual {
        0 => params,
        _ => NormalizeParams {
            x: params.sum,
            residual: 0,
            sum: 0,
            ..params
        },
    }
}

/// The arguments for the statistics of a training forward, by which ψ² stays. If `by_batch`, 1/D is
/// made from ψ_B², or from ψ² if no row is kept.
fn statistics(
    plan: &LaunchPlan,
    saved: &Saved,
    totals: Address,
    phi: Vector,
    by_batch: bool,
) -> UpdatePhiParams {
    let (over_ranks, fairseq) = (totals != 0, plan.config.recipe == Recipe::Fairseq);
    let all_totals = totals + (plan.cols() as u64 + 1) * TOTAL_BYTES;
    UpdatePhiParams {
        totals,
        all_totals: when(over_ranks && fairseq, all_totals),
        partials: when(!over_ranks, saved.partials),
        all_partials: when(!over_ranks, saved.all_partials),
        kept: when(!over_ranks, saved.kept),
        rows: plan.rows() as i64,
        cols: plan.cols() as i64,
        chunks: plan.chunks().into(),
        phi,
        batch_phi: saved.batch_phi,
        inv_rms: saved.inv_rms,
        gamma: saved.gamma,
        count: saved.count,
        eps: plan.config.eps,
        by_batch: by_batch.into(),
        guard: (plan.config.recipe == Recipe::Paper).into(),
        ..Default::default()
    }
}

/// Launches of a plan. The promise of [`Gpu::launch`] about addresses holds for each of them.
impl Gpu {
    /// A storage like `like`: zeros, unless launches write all of it.
    fn storage(&self, like: &Tensor, written: bool) -> Result<CudaStorage> {
        match written {
            // SAFETY: the launches of the phase, or of the next, write all of it.
            true => unsafe { self.device.alloc_uninit(like.shape(), like.dtype()) },
            false => self.device.zeros_impl(like.shape(), like.dtype()),
        }
    }

    /// Sums to hand out.
    fn sums(&self, count: usize) -> Result<Tensor> {
        let shape = Shape::from(count);
        // SAFETY: the launches of the phase write all of it.
        let sums = unsafe { self.device.alloc_uninit(&shape, DType::F64) }?;
        Ok(from_storage(sums, &shape))
    }

    /// Memory for a layout of a plan.
    fn room(&self, bytes: u64) -> Result<CudaSlice<u8>> {
        // SAFETY: the launches of the step write every part of it before they read it.
        unsafe { self.device.alloc::<u8>(bytes as usize) }
    }

    unsafe fn normalize(&self, plan: &LaunchPlan, params: NormalizeParams) -> Result<()> {
        let arrays = 1 + usize::from(params.residual != 0);
        let sums = usize::from(params.partials != 0);
        let (launch, tiling) = plan.rows_launch(arrays, sums);
        // SAFETY: by the caller's promise.
        unsafe { self.launch(&launch, &NormalizeParams { tiling, ..params }) }
    }

    unsafe fn sum_partials(&self, plan: &LaunchPlan, params: SumPartialsParams) -> Result<()> {
        let params = SumPartialsParams {
            rows: plan.rows() as i64,
            cols: plan.cols() as i64,
            chunks: plan.chunks().into(),
            ..params
        };
        // SAFETY: by the caller's promise.
        unsafe { self.launch(&plan.channels_launch("sum_partials"), &params) }
    }

    unsafe fn normalize_bwd(&self, plan: &LaunchPlan, params: NormalizeBwdParams) -> Result<()> {
        let writes = params.dx != 0;
        let dsum = when(writes, params.dsum);
        let params = NormalizeBwdParams { dsum, ..params };
        if writes && plan.has_wide_groups() {
            let (launch, tiling) = plan.groups_launch();
            // SAFETY: by the caller's promise.
            unsafe { self.launch(&launch, &NormalizeBwdParams { tiling, ..params }) }?;
        }
        let arrays = 2 + usize::from(params.dsum != 0);
        let sums = 2 * usize::from(params.partials != 0);
        let (launch, tiling) = plan.rows_launch(arrays, sums);
        // SAFETY: as above.
        unsafe { self.launch(&launch, &NormalizeBwdParams { tiling, ..params }) }
    }
}

fn from_storage(storage: CudaStorage, shape: &Shape) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}
