//! A step on a GPU.
//!
//! A forward allocates and loads all that it and its step of ψ² need before its first launch, and
//! so does a backward. A call that fails before its launches changes nothing.
#![allow(unsafe_code)] // launches kernels

use super::gpu::{reads_in_place, Gpu, Kernels, Locks, Uses};
use super::params::{
    when, Address, Dtype, GroupDots, GroupFactors, Normalize, NormalizeBwd, NormalizeBwdParams,
    NormalizeParams, SumPartials, SumPartialsParams, UpdateNu, UpdateNuParams, UpdatePhi,
    UpdatePhiParams, Vector,
};
use super::plan::{Extent, LaunchPlan, Saved, Workspace};
use crate::config::{ForwardKind, PhiStep, PowerNormConfig, Recipe};
use crate::device::{
    BackwardInputs, DeviceBackward, DeviceStep, ForwardInputs, Gradients, Outputs, Setting,
};
use candle::backend::BackendDevice;
use candle::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle::op::BackpropOp;
use candle::{CudaStorage, DType, Result, Shape, Storage, Tensor, Var, D};
use std::sync::Arc;

/// Bytes of a total.
const TOTAL_BYTES: u64 = size_of::<f64>() as u64;

/// A forward, and what it leaves.
pub(crate) struct CudaStep {
    gpu: Gpu,
    config: PowerNormConfig,
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
        let (gpu, plan) = (&step.gpu, &step.plan);
        let has_rows = plan.extent.rows > 0;
        let output = |like: &Tensor| gpu.storage(like.shape(), like.dtype()).map(Storage::Cuda);
        let mut outputs = Outputs {
            y: Some(output(&inputs.x)?),
            sum: inputs.residual.as_ref().map(output).transpose()?,
        };
        if !has_rows && !plan.kind.is_training() {
            return Ok((Box::new(step), outputs));
        }
        if setting.tracked || plan.kind.is_training() || plan.has_wide_groups() {
            step.saved = Some(gpu.room(plan.saved(0).end)?);
        }
        let sums = setting.over_ranks.then(|| gpu.sums(plan)).transpose()?;
        gpu.load(&plan.entries(setting.over_ranks))?;
        if has_rows {
            step.launch_rows(inputs, &mut outputs)?;
        } else if plan.kind == ForwardKind::RunningStatistic {
            step.launch_inv_rms(inputs)?;
        }
        if let Some(sums) = sums {
            step.launch_totals(sums)?;
        }
        Ok((Box::new(step), outputs))
    }

    fn new(setting: Setting, inputs: &ForwardInputs, kernels: &Arc<Kernels>) -> Result<Self> {
        let x = &inputs.x;
        let cols = x.dim(D::Minus1)?;
        let rows = x.elem_count() / cols;
        // The kernels have no others.
        Dtype::of(x.dtype())?;
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
            gpu: Gpu::of(x.device(), kernels)?,
            config: setting.config,
            plan: LaunchPlan {
                masked: inputs.keep.is_some(),
                divides: inputs.phi.is_some(),
                ..LaunchPlan::new(extent, setting.config.recipe, kind)?
            },
            saved: None,
            sums: None,
        })
    }

    /// Launches a forward: `Y = γ ⊙ X̃/D + β`, the sum of the input and its residual, and the sums
    /// that move ψ². By the batch's statistic, no output yet.
    fn launch_rows(&mut self, inputs: &ForwardInputs, outputs: &mut Outputs) -> Result<()> {
        let (gpu, plan, locks) = (&self.gpu, &self.plan, Locks::default());
        let mut uses = Uses::on(&gpu.stream, &locks);
        let saved = saved_parts(plan, &mut self.saved, &mut uses)?;
        let y = uses.write(on_gpu(&mut outputs.y)?)?.data;
        let eps = self.config.eps;
        let [adding, added] =
            forward_params(plan, eps, inputs, &mut outputs.sum, &saved, &mut uses)?;
        let mut first = adding;
        if plan.has_wide_groups() {
            let (launch, tiling) = plan.groups_launch::<GroupFactors>();
            // SAFETY: `uses` holds every buffer until the launches are queued, each of the size
            // that `LaunchPlan` asks for.
            unsafe { gpu.launch(&launch, &NormalizeParams { tiling, ..adding }) }?;
            first = added;
        }
        let kept_rows = NormalizeParams {
            keep: uses.read(inputs.keep.as_ref())?,
            y: when(plan.kind != ForwardKind::BatchStatistic, y),
            partials: saved.partials,
            kept: saved.kept,
            ..first
        };
        // SAFETY: as above.
        unsafe { gpu.normalize(plan, kept_rows) }?;
        if saved.all_partials == 0 {
            return Ok(());
        }
        let all_rows = NormalizeParams {
            partials: saved.all_partials,
            ..added
        };
        // SAFETY: as above.
        unsafe { gpu.normalize(plan, all_rows) }
    }

    /// Makes 1/D by ψ² where other processes have all rows. Elsewhere the launch of the output
    /// writes it, or by the batch's statistic the step of ψ².
    fn launch_inv_rms(&mut self, inputs: &ForwardInputs) -> Result<()> {
        let (gpu, plan, locks) = (&self.gpu, &self.plan, Locks::default());
        let mut uses = Uses::on(&gpu.stream, &locks);
        let saved = saved_parts(plan, &mut self.saved, &mut uses)?;
        let phi = uses.read_vector(inputs.phi.as_ref())?;
        let params = statistics(plan, self.config.eps, &saved, 0, phi, true);
        // SAFETY: as in `launch_rows`.
        unsafe { gpu.launch(&plan.channels_launch::<UpdatePhi>(), &params) }
    }

    /// Sums over the rows of this process, to be handed out.
    fn launch_totals(&mut self, mut sums: CudaStorage) -> Result<()> {
        let (gpu, plan, locks) = (&self.gpu, &self.plan, Locks::default());
        let mut uses = Uses::on(&gpu.stream, &locks);
        let saved = saved_parts(plan, &mut self.saved, &mut uses)?;
        let mut totals = uses.write(&mut sums)?.data;
        let all_partials = match saved.all_partials {
            0 => saved.partials,
            all_partials => all_partials,
        };
        // Of kept rows, then of all rows.
        let partials = [(saved.partials, saved.kept), (all_partials, 0)];
        for (partials, kept) in partials.into_iter().take(self.config.square_sums()) {
            let count = totals + plan.extent.cols as u64 * TOTAL_BYTES;
            let params = SumPartialsParams {
                partials,
                kept,
                stride: plan.extent.cols as i64,
                totals,
                count,
                ..Default::default()
            };
            // SAFETY: as in `launch_rows`.
            unsafe { gpu.sum_partials(plan, params) }?;
            totals = count + TOTAL_BYTES;
        }
        drop(uses);
        self.sums = Some(from_storage(sums, &plan.sums().into()));
        Ok(())
    }

    /// Launches the output by the batch's statistic, of which `update_phi` has left 1/D.
    fn launch_output(&mut self, inputs: &ForwardInputs, outputs: &mut Outputs) -> Result<()> {
        let (gpu, plan, locks) = (&self.gpu, &self.plan, Locks::default());
        let mut uses = Uses::on(&gpu.stream, &locks);
        let saved = saved_parts(plan, &mut self.saved, &mut uses)?;
        let params = NormalizeParams {
            x: match inputs.residual {
                // `launch_rows` has written it.
                Some(_) => uses.write(on_gpu(&mut outputs.sum)?)?.data,
                None => uses.read_rows(&inputs.x)?,
            },
            y: uses.write(on_gpu(&mut outputs.y)?)?.data,
            weight: uses.read_vector(inputs.weight.as_ref())?,
            bias: uses.read_vector(inputs.bias.as_ref())?,
            inv_rms: saved.inv_rms,
            group_rms_inv: saved.group_rms_inv,
            group_scaling: plan.cut.group_scaling,
            group_eps: self.config.eps,
            ..Default::default()
        };
        // SAFETY: as in `launch_rows`.
        unsafe { gpu.normalize(plan, params) }
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
        let (gpu, plan, locks) = (&self.gpu, &self.plan, Locks::default());
        let mut uses = Uses::on(&gpu.stream, &locks);
        let saved = saved_parts(plan, &mut self.saved, &mut uses)?;
        let totals = uses.read(self.sums.as_ref())?;
        let by_batch = plan.kind == ForwardKind::BatchStatistic;
        let eps = self.config.eps;
        gpu.in_place(phi, |phi| {
            let params = UpdatePhiParams {
                cumulative: step.cumulative.is_some().into(),
                moving: step.moving.is_some().into(),
                old_share: step.cumulative.map_or(0., |shares| shares.old),
                new_share: step.cumulative.map_or(0., |shares| shares.new),
                alpha: step.moving.map_or(0., |shares| shares.old),
                beta: step.moving.map_or(0., |shares| shares.new),
                ..statistics(plan, eps, &saved, totals, phi, by_batch)
            };
            // SAFETY: as in `launch_rows`; `saved` and the sums are those of this step, and
            // `in_place` holds ψ².
            unsafe { gpu.launch(&plan.channels_launch::<UpdatePhi>(), &params) }
        })
    }

    fn normalize_by_batch(
        &mut self,
        inputs: &ForwardInputs,
        mut outputs: Outputs,
    ) -> Result<Outputs> {
        if self.plan.extent.rows > 0 {
            self.launch_output(inputs, &mut outputs)?;
        }
        Ok(outputs)
    }

    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>> {
        let ema_gz = match inputs.running.map(|nu| nu.ema_gz.detach()) {
            Some(nu) if !reads_in_place(inputs.x.device(), nu.device()) => Some(nu.copy()?),
            nu => nu,
        };
        let mut backward = CudaBackward::new(self, inputs)?;
        let over_ranks = self.sums.is_some();
        let sums = over_ranks
            .then(|| self.gpu.sums(&backward.plan))
            .transpose()?;
        if backward.plan.extent.rows > 0 {
            backward.launch_rows(ema_gz.as_ref())?;
        }
        if let Some(sums) = sums {
            backward.launch_totals(sums)?;
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
    /// What the forward saved, and the workspace. `None` where there is nothing to launch.
    memory: Option<(&'a CudaSlice<u8>, CudaSlice<u8>)>,
    /// Σ dy x̃ over ranks, `[cols]`: local sums, and later global ones. `None` in a single process.
    sums: Option<Tensor>,
}

impl<'a> CudaBackward<'a> {
    /// Allocates what a backward writes, and loads its kernels.
    fn new(step: &'a CudaStep, inputs: &BackwardInputs<'a>) -> Result<Self> {
        let gpu = &step.gpu;
        let plan = step.plan.of_backward()?;
        let memory = match &step.saved {
            Some(saved) => Some((saved, gpu.room(plan.workspace(0).end)?)),
            None => None,
        };
        let gradient = |of: &Tensor| match memory {
            Some(_) => gpu.storage(of.shape(), of.dtype()),
            None => gpu.device.zeros_impl(of.shape(), of.dtype()),
        };
        let of_parameter = |parameter: Option<&Tensor>| {
            let tracked = parameter.filter(|parameter| parameter.track_op());
            tracked.map(gradient).transpose()
        };
        let input = inputs.wants_input.then(|| gradient(inputs.x)).transpose()?;
        let weight = of_parameter(inputs.weight)?;
        let bias = of_parameter(inputs.bias)?;
        if memory.is_some() {
            gpu.load(&plan.entries(step.sums.is_some()))?;
        }
        Ok(Self {
            step,
            plan,
            inputs: *inputs,
            input,
            weight,
            bias,
            memory,
            sums: None,
        })
    }

    /// The gradients need sums over the rows.
    fn wants_sums(&self) -> bool {
        self.plan.kind.is_training() || self.weight.is_some() || self.bias.is_some()
    }

    /// The input's gradient is made at last, by Λ.
    fn is_exact(&self) -> bool {
        self.step.config.is_exact(self.plan.kind)
    }

    fn loss_scale(&self) -> f64 {
        self.inputs.running.map_or(1., |nu| nu.loss_scale)
    }

    /// Makes the gradients that do not depend on the sums of the whole batch, and the sums.
    ///
    /// With `g = γ ⊙ dy` every `∂L/∂X̃` has the form `gain ⊙ dy − decay ⊙ X̃`. The cases are the
    /// same as in the CPU's backward.
    fn launch_rows(&mut self, ema_gz: Option<&Tensor>) -> Result<()> {
        let writes = self.input.is_some() && !self.is_exact();
        let sums = self.wants_sums();
        let correction_scale = (1. - self.step.config.alpha_bwd) * self.loss_scale();
        let eps = self.step.config.eps;
        let (plan, gpu, locks) = (&self.plan, &self.step.gpu, Locks::default());
        let (Some((saved, workspace)), true) = (&mut self.memory, writes || sums) else {
            return Ok(());
        };
        let mut uses = Uses::on(&gpu.stream, &locks);
        let dx = uses.write(self.input.as_mut().filter(|_| writes))?.data;
        let workspace = plan.workspace(uses.hold(workspace.device_ptr_mut(&gpu.stream)));
        // The weight is locked before ν, as in `update_nu`.
        let params = backward_params(plan, eps, &self.inputs, dx, saved, &workspace, &mut uses)?;
        let params = NormalizeBwdParams {
            correction: uses.read_vector(ema_gz)?,
            correction_scale,
            partials: when(sums, workspace.partials),
            ..params
        };
        // SAFETY: as in a forward's `launch_rows`.
        unsafe { gpu.normalize_bwd(plan, params) }
    }

    /// Sums Σ dy x̃ over the rows of this process, to be handed out.
    fn launch_totals(&mut self, mut sums: CudaStorage) -> Result<()> {
        let (plan, gpu, locks) = (&self.plan, &self.step.gpu, Locks::default());
        let Some((_, workspace)) = &mut self.memory else {
            candle::bail!("power_norm: expected sums of chunks, got none")
        };
        let mut uses = Uses::on(&gpu.stream, &locks);
        let workspace = plan.workspace(uses.hold(workspace.device_ptr_mut(&gpu.stream)));
        let params = SumPartialsParams {
            partials: workspace.partials,
            stride: 2 * plan.extent.cols as i64,
            totals: uses.write(&mut sums)?.data,
            ..Default::default()
        };
        // SAFETY: as in `launch_rows`.
        unsafe { gpu.sum_partials(plan, params) }?;
        drop(uses);
        self.sums = Some(from_storage(sums, &plan.sums().into()));
        Ok(())
    }

    /// Launches an exact gradient of the input, by Λ.
    fn launch_exact(&mut self) -> Result<()> {
        let eps = self.step.config.eps;
        let (plan, gpu, locks) = (&self.plan, &self.step.gpu, Locks::default());
        let Some((saved, workspace)) = &mut self.memory else {
            candle::bail!("power_norm: expected sums of chunks, got none")
        };
        let mut uses = Uses::on(&gpu.stream, &locks);
        let dx = uses.write(self.input.as_mut())?.data;
        let workspace = plan.workspace(uses.hold(workspace.device_ptr_mut(&gpu.stream)));
        let params = NormalizeBwdParams {
            correction: Vector {
                data: workspace.lambda,
                dtype: Dtype::of(plan.sums_dtype())?,
            },
            correction_scale: 1.,
            ..backward_params(plan, eps, &self.inputs, dx, saved, &workspace, &mut uses)?
        };
        // SAFETY: as in `launch_rows`.
        unsafe { gpu.normalize_bwd(plan, params) }
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
        let (wants_sums, loss_scale) = (self.wants_sums(), self.loss_scale());
        let (plan, gpu, locks) = (&self.plan, &self.step.gpu, Locks::default());
        let (Some((saved, workspace)), true) = (&mut self.memory, wants_sums) else {
            return Ok(());
        };
        let mut uses = Uses::on(&gpu.stream, &locks);
        let saved = plan.saved(uses.hold(saved.device_ptr(&gpu.stream)));
        let workspace = plan.workspace(uses.hold(workspace.device_ptr_mut(&gpu.stream)));
        let params = UpdateNuParams {
            partials: workspace.partials,
            totals: uses.read(self.sums.as_ref())?,
            cols: plan.extent.cols as i64,
            chunks: plan.chunks() as i64,
            weight: uses.read_vector(self.inputs.weight)?,
            inv_rms: saved.inv_rms,
            gamma: saved.gamma,
            count: saved.count,
            lambda: workspace.lambda,
            dweight: uses.write(self.weight.as_mut())?,
            dbias: uses.write(self.bias.as_mut())?,
            beta: 1. - self.step.config.alpha_bwd,
            unscale: loss_scale.recip(),
            guard: (plan.recipe == Recipe::Paper).into(),
            ..Default::default()
        };
        let launch = |ema_gz| {
            let params = UpdateNuParams { ema_gz, ..params };
            // SAFETY: as in `launch_rows`, and `in_place` holds ν.
            unsafe { gpu.launch(&plan.channels_launch::<UpdateNu>(), &params) }
        };
        match ema_gz {
            Some(ema_gz) => gpu.in_place(ema_gz, launch),
            None => launch(Vector::default()),
        }
    }

    fn gradients(mut self: Box<Self>) -> Result<Gradients> {
        if self.is_exact() && self.input.is_some() && self.plan.extent.rows > 0 {
            self.launch_exact()?;
        }
        let (x, channels) = (self.inputs.x.shape(), Shape::from(self.plan.extent.cols));
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

/// The addresses in `saved`, which an evaluation may do without.
fn saved_parts<'u>(
    plan: &LaunchPlan,
    saved: &'u mut Option<CudaSlice<u8>>,
    uses: &mut Uses<'u, '_>,
) -> Result<Saved> {
    match saved {
        Some(saved) => Ok(plan.saved(uses.hold(saved.device_ptr_mut(uses.stream)))),
        None if plan.kind.is_training() => {
            candle::bail!("power_norm: expected sums of chunks, got none")
        }
        None => Ok(Saved::default()),
    }
}

/// The arguments of a forward's launches over the rows, but for their outputs. The first launch
/// adds the residual and writes the sum. Later ones read the sum.
fn forward_params<'t, 'u>(
    plan: &LaunchPlan,
    eps: f64,
    inputs: &'t ForwardInputs,
    sum: &'u mut Option<Storage>,
    saved: &Saved,
    uses: &mut Uses<'u, 't>,
) -> Result<[NormalizeParams; 2]> {
    let reads = NormalizeParams {
        x: uses.read_rows(&inputs.x)?,
        weight: uses.read_vector(inputs.weight.as_ref())?,
        bias: uses.read_vector(inputs.bias.as_ref())?,
        phi: uses.read_vector(inputs.phi.as_ref())?,
        // 1/D and r are also written, for the backward.
        inv_rms: saved.inv_rms,
        group_rms_inv: saved.group_rms_inv,
        group_scaling: plan.cut.group_scaling,
        eps,
        group_eps: eps,
        ..Default::default()
    };
    let Some(residual) = &inputs.residual else {
        return Ok([reads; 2]);
    };
    let sum = uses.write(on_gpu(sum)?)?.data;
    let adding = NormalizeParams {
        residual: uses.read_rows(residual)?,
        stream: sum,
        ..reads
    };
    Ok([adding, NormalizeParams { x: sum, ..reads }])
}

/// The arguments of a backward's pass over the rows, but for its correction and its sums.
fn backward_params<'t, 'u>(
    plan: &LaunchPlan,
    eps: f64,
    inputs: &BackwardInputs<'t>,
    dx: Address,
    saved: &'u CudaSlice<u8>,
    workspace: &Workspace,
    uses: &mut Uses<'u, 't>,
) -> Result<NormalizeBwdParams> {
    let saved = plan.saved(uses.hold(saved.device_ptr(uses.stream)));
    // Under recipe Fairseq the backward does not know the mask, so it reads the count. Elsewhere
    // the mask shows a batch without a kept row, and the count need not be known yet.
    let fairseq = plan.recipe == Recipe::Fairseq;
    let reads_count = fairseq && plan.kind.is_training();
    Ok(NormalizeBwdParams {
        x: uses.read_rows(inputs.x)?,
        dy: uses.read_rows(inputs.dy)?,
        dsum: uses.read_rows(inputs.dsum.filter(|_| dx != 0))?,
        dx,
        keep: uses.read(inputs.keep.filter(|_| !fairseq))?,
        weight: uses.read_vector(inputs.weight)?,
        inv_rms: saved.inv_rms,
        batch_phi: when(reads_count, saved.batch_phi),
        count: when(reads_count, saved.count),
        group_rms_inv: saved.group_rms_inv,
        dots: workspace.dots,
        group_scaling: plan.cut.group_scaling,
        eps,
        ..Default::default()
    })
}

/// The arguments for the statistics of a training forward, by which ψ² stays. If `by_batch`, 1/D is
/// made from ψ_B², or from ψ² if no row is kept.
fn statistics(
    plan: &LaunchPlan,
    eps: f64,
    saved: &Saved,
    totals: Address,
    phi: Vector,
    by_batch: bool,
) -> UpdatePhiParams {
    let has_all_totals = totals != 0 && plan.recipe == Recipe::Fairseq;
    let all_totals = totals + (plan.extent.cols as u64 + 1) * TOTAL_BYTES;
    UpdatePhiParams {
        totals,
        all_totals: when(has_all_totals, all_totals),
        // Read only without totals.
        partials: saved.partials,
        all_partials: saved.all_partials,
        kept: saved.kept,
        rows: plan.extent.rows as i64,
        cols: plan.extent.cols as i64,
        chunks: plan.chunks() as i64,
        phi,
        batch_phi: saved.batch_phi,
        inv_rms: saved.inv_rms,
        gamma: saved.gamma,
        count: saved.count,
        eps,
        by_batch: by_batch.into(),
        guard: (plan.recipe == Recipe::Paper).into(),
        ..Default::default()
    }
}

/// Launches of a plan. The promise of [`Gpu::launch`] about addresses holds for each of them.
impl Gpu {
    /// A storage for launches to write.
    fn storage(&self, shape: &Shape, dtype: DType) -> Result<CudaStorage> {
        // SAFETY: the launches of the phase, or of the next, write all of it.
        unsafe { self.device.alloc_uninit(shape, dtype) }
    }

    /// Sums for a pass to hand out.
    fn sums(&self, plan: &LaunchPlan) -> Result<CudaStorage> {
        self.storage(&plan.sums().into(), DType::F64)
    }

    /// Memory for a layout of a plan.
    fn room(&self, bytes: u64) -> Result<CudaSlice<u8>> {
        // SAFETY: the launches of the step write every part of it before they read it.
        unsafe { self.device.alloc::<u8>(bytes as usize) }
    }

    unsafe fn normalize(&self, plan: &LaunchPlan, params: NormalizeParams) -> Result<()> {
        let arrays = 1 + usize::from(params.residual != 0);
        let sums = usize::from(params.partials != 0);
        let (launch, tiling) = plan.rows_launch::<Normalize>(arrays, sums);
        // SAFETY: by the caller's promise.
        unsafe { self.launch(&launch, &NormalizeParams { tiling, ..params }) }
    }

    unsafe fn sum_partials(&self, plan: &LaunchPlan, params: SumPartialsParams) -> Result<()> {
        let params = SumPartialsParams {
            rows: plan.extent.rows as i64,
            cols: plan.extent.cols as i64,
            chunks: plan.chunks() as i64,
            ..params
        };
        // SAFETY: by the caller's promise.
        unsafe { self.launch(&plan.channels_launch::<SumPartials>(), &params) }
    }

    /// Reduces wide groups if there is a gradient to write, and walks the rows.
    unsafe fn normalize_bwd(&self, plan: &LaunchPlan, params: NormalizeBwdParams) -> Result<()> {
        if params.dx != 0 && plan.has_wide_groups() {
            let (launch, tiling) = plan.groups_launch::<GroupDots>();
            // SAFETY: by the caller's promise.
            unsafe { self.launch(&launch, &NormalizeBwdParams { tiling, ..params }) }?;
        }
        let arrays = 2 + usize::from(params.dsum != 0);
        let sums = 2 * usize::from(params.partials != 0);
        let (launch, tiling) = plan.rows_launch::<NormalizeBwd>(arrays, sums);
        // SAFETY: as above.
        unsafe { self.launch(&launch, &NormalizeBwdParams { tiling, ..params }) }
    }
}

fn from_storage(storage: CudaStorage, shape: &Shape) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}
