//! A step on a GPU.

use super::cut::Limits;
use super::launch::{BackwardBuffers, ForwardBuffers, LaunchPlan};
use super::params::Vector;
use super::{argument, argument_opt, dtype, reads_in_place, Gpu, InVariable, Kernels, Uses};
use crate::config::{ForwardKind, PhiStep, PowerNormConfig, Recipe};
use crate::device::{
    BackwardInputs, DeviceBackward, DeviceStep, ForwardInputs, Gradients, Outputs, Setting,
};
use crate::error::Error;
use candle::backend::BackendDevice;
use candle::op::BackpropOp;
use candle::{CudaDevice, CudaStorage, DType, Device, Result, Shape, Storage, Tensor, Var, D};
use cudarc::driver::CudaSlice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A forward, and what it leaves.
pub(crate) struct CudaStep {
    gpu: Gpu,
    plan: LaunchPlan,
    setting: Setting,
    /// Locked before the storage of ψ², and after that of ν.
    memory: Mutex<Memory>,
}

/// A forward's device memory beyond its outputs.
#[derive(Default)]
struct Memory {
    /// What the backward needs. `None` where there are no rows, or no backward was to follow.
    saved: Option<CudaSlice<u8>>,
    sums: ForwardSums,
}

/// The sums of a training forward, as long as ψ² needs them.
#[derive(Default)]
enum ForwardSums {
    #[default]
    None,
    /// Of this process's rows, chunk by chunk, in `saved`.
    Partial,
    /// The sums of this process's rows, to be handed out. Before them there is
    /// [room](LaunchPlan::totals_room) for the backward's sums.
    Own(CudaSlice<f64>),
    /// Of the whole batch.
    Total(Tensor),
}

impl CudaStep {
    pub fn new(x: &Tensor, setting: Setting, kernels: &Arc<Kernels>) -> Result<Self> {
        let cols = x.dim(D::Minus1)?;
        let gpu = Gpu::of(x, kernels)?;
        let rows = x.elem_count() / cols;
        // Other processes may have rows. If none has, a training step is an evaluation.
        let kind = match rows > 0 || setting.shared {
            true => setting.kind,
            false => ForwardKind::Evaluation,
        };
        let (dtype, limits) = (dtype(x.dtype())?, gpu.limits()?);
        Ok(Self {
            gpu,
            plan: LaunchPlan::new(dtype, [rows, cols], setting.config, kind, limits),
            setting,
            memory: Mutex::default(),
        })
    }

    fn device(&self) -> &CudaDevice {
        &self.gpu.device
    }

    fn kind(&self) -> ForwardKind {
        self.plan.kind()
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// ψ² or ν to read in a launch: the variable, or a copy of it.
    fn in_order(&self, variable: &Tensor) -> Result<Tensor> {
        let variable = variable.detach();
        let rows = Device::Cuda(self.device().clone());
        match reads_in_place(&rows, variable.device()) {
            true => Ok(variable),
            false => variable.copy(),
        }
    }

    /// A fresh tensor like `like`, which launches write where there are rows.
    fn output(&self, like: &Tensor) -> Result<CudaStorage> {
        match self.plan.rows() {
            0 => self.device().zeros_impl(like.shape(), like.dtype()),
            // SAFETY: the launches of the phase, or of the next, write all of it.
            _ => unsafe { self.device().alloc_uninit(like.shape(), like.dtype()) },
        }
    }

    /// Whether there is nothing to launch.
    fn is_empty(&self) -> bool {
        self.plan.rows() == 0 && !self.kind().is_training()
    }

    /// Runs `launch` with the arrays of a forward, but for its sums.
    fn with_forward_buffers(
        &self,
        inputs: &ForwardInputs,
        y: &mut CudaStorage,
        sum: Option<&mut CudaStorage>,
        saved: Option<&mut CudaSlice<u8>>,
        launch: impl FnOnce(ForwardBuffers) -> Result<()>,
    ) -> Result<()> {
        let x = inputs.x.storage_and_layout();
        let residual = inputs.residual.map(Tensor::storage_and_layout);
        let keep = inputs.keep.map(Tensor::storage_and_layout);
        let affine = inputs
            .affine
            .map(|affine| affine.map(Tensor::storage_and_layout));
        let phi = inputs.phi.storage_and_layout();
        let stream = self.device().cuda_stream();
        let mut uses = Uses::on(&stream);
        let mut buffers = ForwardBuffers {
            sum: uses.write_opt(sum)?.data,
            y: uses.write(y)?,
            phi: uses.read_vector(Some(argument(&phi)?))?,
            saved: uses.write_bytes(saved),
            ..Default::default()
        };
        if let Some([weight, bias]) = &affine {
            buffers.weight = uses.read_vector(Some(argument(weight)?))?;
            buffers.bias = uses.read_vector(Some(argument(bias)?))?;
        }
        if self.plan.rows() > 0 {
            buffers.x = uses.read_rows(argument(&x)?)?;
            buffers.residual = uses.read_rows_opt(argument_opt(&residual)?)?;
            buffers.keep = uses.read_opt(argument_opt(&keep)?)?;
        }
        launch(buffers)
    }

    /// Launches the kernel that makes the statistics of a training forward, and moves ψ² if there
    /// is a `step`.
    fn make_statistics(
        &self,
        memory: &mut Memory,
        phi: Vector,
        step: Option<&PhiStep>,
    ) -> Result<()> {
        let Memory {
            saved: Some(saved),
            sums,
        } = memory
        else {
            return Ok(());
        };
        let total = match sums {
            ForwardSums::Partial => None,
            ForwardSums::Total(total) => Some(total.storage_and_layout()),
            ForwardSums::None | ForwardSums::Own(_) => return Ok(()),
        };
        let stream = self.device().cuda_stream();
        let mut uses = Uses::on(&stream);
        let buffers = ForwardBuffers {
            phi,
            saved: uses.write_bytes(Some(saved)),
            totals: uses.read_totals(&total)?,
            ..Default::default()
        };
        let launch = self.plan.update_phi(&buffers, step);
        // SAFETY: as in `forward`; `saved` and the sums are those of this step, and the caller
        // holds ψ².
        unsafe { self.gpu.queue(&[launch]) }
    }
}

impl DeviceStep for CudaStep {
    fn forward(&mut self, inputs: &ForwardInputs) -> Result<Outputs> {
        self.plan.masked = inputs.keep.is_some();
        let plan = self.plan;
        let mut y = self.output(inputs.x)?;
        let mut sum = inputs.residual.map(|_| self.output(inputs.x)).transpose()?;
        let outputs = |y, sum: Option<CudaStorage>| Outputs {
            y: Some(Storage::Cuda(y)),
            sum: sum.map(Storage::Cuda),
        };
        if self.is_empty() {
            return Ok(outputs(y, sum));
        }
        let (device, shared) = (
            self.device(),
            self.kind().is_training() && self.setting.shared,
        );
        let mut saved = match self.setting.tracked || plan.needs_saved() {
            // SAFETY: the launches of the step write every part of it before it is read.
            true => Some(unsafe { device.alloc::<u8>(plan.saved_bytes()) }?),
            false => None,
        };
        let room = plan.totals_room();
        let mut totals = match shared {
            // SAFETY: the launches below write what comes after the room, and a backward fills the
            // room before it is read.
            true => Some(unsafe { device.alloc::<f64>(room + plan.forward_totals()) }?),
            false => None,
        };
        let launch = |mut buffers: ForwardBuffers| {
            let stream = device.cuda_stream();
            let mut uses = Uses::on(&stream);
            buffers.totals = uses.write_totals(totals.as_mut(), room);
            // SAFETY: `uses`, here and in the caller, holds every buffer, each of the size that
            // `LaunchPlan` asks for, until the launches are queued.
            unsafe { self.gpu.queue(&plan.forward(&buffers)) }
        };
        self.with_forward_buffers(inputs, &mut y, sum.as_mut(), saved.as_mut(), launch)?;
        let sums = match totals {
            Some(totals) => ForwardSums::Own(totals),
            None if self.kind().is_training() => ForwardSums::Partial,
            None => ForwardSums::None,
        };
        self.memory = Mutex::new(Memory { saved, sums });
        Ok(outputs(y, sum))
    }

    fn finish_forward(&mut self, inputs: &ForwardInputs, mut outputs: Outputs) -> Result<Outputs> {
        let plan = self.plan;
        let (Some(Storage::Cuda(y)), false) = (&mut outputs.y, self.is_empty()) else {
            return Ok(outputs);
        };
        let sum = match &mut outputs.sum {
            Some(Storage::Cuda(sum)) => Some(sum),
            _ => None,
        };
        let mut memory = self.memory();
        let Memory { saved, sums } = &mut *memory;
        let launch = |mut buffers: ForwardBuffers| {
            let total = match sums {
                ForwardSums::Partial => None,
                ForwardSums::Total(total) => Some(total.storage_and_layout()),
                ForwardSums::None | ForwardSums::Own(_) => return Ok(()),
            };
            let stream = self.device().cuda_stream();
            let mut uses = Uses::on(&stream);
            buffers.totals = uses.read_totals(&total)?;
            // SAFETY: as in `forward`.
            unsafe { self.gpu.queue(&plan.finish_forward(&buffers)) }
        };
        self.with_forward_buffers(inputs, y, sum, saved.as_mut(), launch)?;
        drop(memory);
        Ok(outputs)
    }

    fn sums(&self) -> Result<Tensor> {
        let mut memory = self.memory();
        match std::mem::take(&mut memory.sums) {
            ForwardSums::Own(totals) => {
                let room = self.plan.totals_room();
                let len = self.plan.forward_totals();
                tensor(totals, self.device()).narrow(0, room, len)
            }
            _ => candle::bail!("power_norm: expected the sums of a forward, got none"),
        }
    }

    fn take_sums(&self, total: &Tensor) -> Result<()> {
        self.memory().sums = ForwardSums::Total(total.clone());
        Ok(())
    }

    fn move_phi(&self, phi: &Var, step: Option<&PhiStep>) -> Result<bool> {
        if !self.kind().is_training() {
            return Ok(false);
        }
        let mut memory = self.memory();
        let stream = self.device().cuda_stream();
        match step {
            Some(_) => InVariable::run(phi, |phi, layout| {
                let mut uses = Uses::on(&stream);
                let phi = uses.write_vector(phi, layout)?;
                self.make_statistics(&mut memory, phi, step)
            })?,
            None => {
                let phi = self.in_order(phi)?;
                let phi = phi.storage_and_layout();
                let mut uses = Uses::on(&stream);
                let phi = uses.read_vector(Some(argument(&phi)?))?;
                self.make_statistics(&mut memory, phi, None)?;
            }
        }
        memory.sums = ForwardSums::None;
        Ok(true)
    }

    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>> {
        // Before `memory`: where ν moves, its storage is locked first too. Another thread may do so
        // for the same step.
        let ema_gz = self.in_order(inputs.ema_gz)?;
        let ema_gz = ema_gz.storage_and_layout();
        let mut memory = self.memory();
        let mut backward = CudaBackward::new(self, inputs, memory.saved.is_some())?;
        if memory.saved.is_none() {
            return Ok(Box::new(backward));
        }
        let has_sums = matches!(memory.sums, ForwardSums::Partial | ForwardSums::Total(_));
        if self.setting.config.recipe == Recipe::Fairseq && has_sums {
            // The divisor is the batch's. In a single process, ψ² has moved by now, and nothing is
            // left to do.
            let phi = self.in_order(inputs.phi)?;
            let phi = phi.storage_and_layout();
            let stream = self.device().cuda_stream();
            let mut uses = Uses::on(&stream);
            let phi = uses.read_vector(Some(argument(&phi)?))?;
            self.make_statistics(&mut memory, phi, None)?;
        }
        let Memory { saved, sums } = &mut *memory;
        let (device, plan) = (self.device(), &self.plan);
        // If the forward's sums still wait, their tensor has room for the backward's.
        let totals = match sums {
            ForwardSums::Own(both) => Some(both),
            _ if !self.kind().is_training() || !self.setting.shared => None,
            _ => {
                // SAFETY: the launches below write all of it.
                let own = unsafe { device.alloc::<f64>(plan.cols()) }?;
                Some(backward.own.insert(own))
            }
        };
        let stream = device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let ema_gz = uses.read_vector(Some(argument(&ema_gz)?))?;
        let totals = uses.write_totals(totals, 0);
        let loss_scale = inputs.loss_scale;
        backward
            .arrays
            .launch(saved.as_ref(), inputs, true, |mut buffers| {
                buffers.ema_gz = ema_gz;
                buffers.totals = totals;
                // SAFETY: as in `forward`.
                unsafe { (self.gpu).queue(&plan.backward(&buffers, loss_scale)) }
            })?;
        drop(uses);
        Ok(Box::new(backward))
    }
}

/// A backward.
struct CudaBackward<'a> {
    step: &'a CudaStep,
    inputs: BackwardInputs<'a>,
    arrays: BackwardArrays<'a>,
    /// Σ dy x̃ of this process's rows, `[cols]`, to be handed out without the forward's sums.
    own: Option<CudaSlice<f64>>,
    /// Σ dy x̃ of the whole batch, `[cols]`; `None` if nothing was handed out.
    total: Option<Tensor>,
}

/// What a backward writes.
struct BackwardArrays<'a> {
    step: &'a CudaStep,
    input: Option<CudaStorage>,
    weight: Option<CudaStorage>,
    bias: Option<CudaStorage>,
    /// `None` where there is nothing to launch.
    workspace: Option<CudaSlice<u8>>,
}

impl<'a> CudaBackward<'a> {
    /// Allocates what a backward writes; `launches` says whether anything will.
    fn new(step: &'a CudaStep, inputs: &BackwardInputs<'a>, launches: bool) -> Result<Self> {
        let device = step.device();
        let alloc = |shape: &Shape, dtype: Option<DType>| match dtype {
            // SAFETY: the launches of this backward write all of it.
            Some(dtype) if launches && shape.elem_count() > 0 => {
                unsafe { device.alloc_uninit(shape, dtype) }.map(Some)
            }
            Some(dtype) => device.zeros_impl(shape, dtype).map(Some),
            None => Ok(None),
        };
        let dtype = |param: &Tensor| param.track_op().then(|| param.dtype());
        let [weight, bias] = match inputs.affine {
            Some([weight, bias]) => [dtype(weight), dtype(bias)],
            None => [None, None],
        };
        let channels = Shape::from(step.plan.cols());
        let input = inputs.wants_input.then(|| inputs.x.dtype());
        Ok(Self {
            step,
            inputs: *inputs,
            arrays: BackwardArrays {
                step,
                input: alloc(inputs.x.shape(), input)?,
                weight: alloc(&channels, weight)?,
                bias: alloc(&channels, bias)?,
                workspace: match launches {
                    // SAFETY: the launches write every part of it before they read it.
                    true => {
                        Some(unsafe { device.alloc::<u8>(step.plan.backward_workspace_bytes()) }?)
                    }
                    false => None,
                },
            },
            own: None,
            total: None,
        })
    }
}

impl BackwardArrays<'_> {
    /// Runs `launch` with the arrays of a backward, except ν and the totals. Arrays of rows are
    /// among them only if `with_rows`.
    fn launch(
        &mut self,
        saved: Option<&CudaSlice<u8>>,
        inputs: &BackwardInputs,
        with_rows: bool,
        launch: impl FnOnce(BackwardBuffers) -> Result<()>,
    ) -> Result<()> {
        let (Some(saved), Some(workspace)) = (saved, &mut self.workspace) else {
            return Ok(());
        };
        let weight = inputs.affine.map(|[weight, _]| weight.storage_and_layout());
        let with_rows = with_rows && self.step.plan.rows() > 0;
        let row_tensors = with_rows.then(|| {
            let [x, dy] = [inputs.x, inputs.dy].map(Tensor::storage_and_layout);
            (
                x,
                dy,
                inputs.dsum.map(Tensor::storage_and_layout),
                inputs.keep.map(Tensor::storage_and_layout),
            )
        });
        let stream = self.step.device().cuda_stream();
        let mut uses = Uses::on(&stream);
        let mut buffers = BackwardBuffers {
            weight: uses.read_vector(argument_opt(&weight)?)?,
            dweight: uses.write_opt(self.weight.as_mut())?,
            dbias: uses.write_opt(self.bias.as_mut())?,
            saved: uses.read_bytes(saved),
            workspace: uses.write_bytes(Some(workspace)),
            ..Default::default()
        };
        if let Some((x, dy, dsum, keep)) = &row_tensors {
            buffers.x = uses.read_rows(argument(x)?)?;
            buffers.dy = uses.read_rows(argument(dy)?)?;
            buffers.dsum = uses.read_rows_opt(argument_opt(dsum)?)?;
            buffers.dx = uses.write_opt(self.input.as_mut())?.data;
            buffers.keep = uses.read_opt(argument_opt(keep)?)?;
        }
        launch(buffers)
    }
}

impl CudaBackward<'_> {
    /// Makes Λ and the parameters' gradients, and moves ν unless `ema_gz` is null.
    fn update_nu(&mut self, ema_gz: Vector) -> Result<()> {
        let (step, inputs) = (self.step, self.inputs);
        let memory = step.memory();
        let total = self.total.as_ref().map(Tensor::storage_and_layout);
        let stream = step.device().cuda_stream();
        let mut uses = Uses::on(&stream);
        let totals = uses.read_totals(&total)?;
        (self.arrays).launch(memory.saved.as_ref(), &inputs, false, |mut buffers| {
            buffers.ema_gz = ema_gz;
            buffers.totals = totals;
            let launch = (step.plan).update_nu(&buffers, inputs.loss_scale);
            // SAFETY: as in `CudaStep::forward`.
            unsafe { step.gpu.queue(launch.as_slice()) }
        })
    }
}

impl DeviceBackward for CudaBackward<'_> {
    fn sums(&mut self) -> Result<Option<Tensor>> {
        let mut memory = self.step.memory();
        let sums = match (&mut memory.sums, self.own.take()) {
            (sums @ ForwardSums::Own(_), _) => match std::mem::take(sums) {
                ForwardSums::Own(both) => Some(both),
                _ => None,
            },
            // Another thread goes back through the same graph, and took the forward's tensors.
            (_, None) if self.step.setting.shared && self.step.kind().is_training() => {
                return Err(Error::StepLost.into())
            }
            (_, own) => own,
        };
        Ok(sums.map(|sums| tensor(sums, self.step.device())))
    }

    fn take_sums(&mut self, total: &Tensor) -> Result<()> {
        let cols = self.step.plan.cols();
        self.total = Some(total.narrow(0, 0, cols)?);
        let more = total.elem_count() - cols;
        if more > 0 {
            self.step.take_sums(&total.narrow(0, cols, more)?)?;
        }
        Ok(())
    }

    fn finish(&mut self, moves_nu: bool) -> Result<()> {
        let step = self.step;
        let is_exact = step.setting.config.is_exact(step.kind());
        if is_exact || !moves_nu {
            self.update_nu(Vector::default())?;
        }
        if is_exact {
            let memory = step.memory();
            let inputs = self.inputs;
            (self.arrays).launch(memory.saved.as_ref(), &inputs, true, |buffers| {
                // SAFETY: as in `CudaStep::forward`.
                unsafe { (step.gpu).queue(&step.plan.finish_backward(&buffers)) }
            })?;
        }
        Ok(())
    }

    fn move_nu(&mut self, ema_gz: &Var) -> Result<()> {
        InVariable::run(ema_gz, |ema_gz, layout| {
            let stream = self.step.device().cuda_stream();
            let mut uses = Uses::on(&stream);
            let ema_gz = uses.write_vector(ema_gz, layout)?;
            self.update_nu(ema_gz)
        })
    }

    fn gradients(mut self: Box<Self>) -> Gradients {
        let (step, inputs) = (self.step, self.inputs);
        let tensor = |storage: Option<CudaStorage>, shape: &Shape| {
            storage.map(|storage| from_storage(storage, shape))
        };
        let channels = Shape::from(step.plan.cols());
        Gradients {
            input: tensor(self.arrays.input.take(), inputs.x.shape()),
            weight: tensor(self.arrays.weight.take(), &channels),
            bias: tensor(self.arrays.bias.take(), &channels),
        }
    }
}

fn from_storage(storage: CudaStorage, shape: &Shape) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

/// Totals as they are handed out.
fn tensor(totals: CudaSlice<f64>, device: &CudaDevice) -> Tensor {
    let len = Shape::from(totals.len());
    from_storage(CudaStorage::wrap_cuda_slice(totals, device.clone()), &len)
}

/// The layer-scale without a layer: X̃ of `x`.
pub(crate) fn scale_groups(
    x: &Tensor,
    groups: usize,
    eps: f64,
    kernels: &Arc<Kernels>,
) -> Result<Storage> {
    let gpu = Gpu::of(x, kernels)?;
    let plan = scale_plan(x, groups, eps, gpu.limits()?)?;
    let device = &gpu.device;
    if plan.rows() == 0 {
        return Ok(Storage::Cuda(device.zeros_impl(x.shape(), x.dtype())?));
    }
    // SAFETY: the launches below write all of `y`.
    let mut y = unsafe { device.alloc_uninit(x.shape(), x.dtype()) }?;
    let mut factors = match plan.scale_groups_bytes() {
        // SAFETY: the first of two launches writes all of it.
        Some(bytes) => Some(unsafe { device.alloc::<u8>(bytes) }?),
        None => None,
    };
    {
        let x = x.storage_and_layout();
        let stream = device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let launches = plan.scale_groups(
            uses.read_rows(argument(&x)?)?,
            uses.write(&mut y)?,
            uses.write_bytes(factors.as_mut()),
        );
        // SAFETY: as in `CudaStep::forward`.
        unsafe { gpu.queue(&launches) }?;
    }
    Ok(Storage::Cuda(y))
}

/// The gradient of [`scale_groups`] from `dy`, shaped as `x`.
pub(crate) fn scale_groups_bwd(
    x: &Tensor,
    dy: &Tensor,
    groups: usize,
    eps: f64,
    kernels: &Arc<Kernels>,
) -> Result<Tensor> {
    let gpu = Gpu::of(x, kernels)?;
    let plan = scale_plan(x, groups, eps, gpu.limits()?)?;
    let device = &gpu.device;
    if plan.rows() == 0 {
        return Ok(from_storage(
            device.zeros_impl(x.shape(), x.dtype())?,
            x.shape(),
        ));
    }
    // SAFETY: the launches below write all of `dx`, and of the workspace what they read.
    let mut dx = unsafe { device.alloc_uninit(x.shape(), x.dtype()) }?;
    // SAFETY: as above.
    let mut workspace = unsafe { device.alloc::<u8>(2 * plan.group_bytes()) }?;
    {
        let (x, dy) = (x.storage_and_layout(), dy.storage_and_layout());
        let stream = device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let rows = [
            uses.read_rows(argument(&x)?)?,
            uses.read_rows(argument(&dy)?)?,
            uses.write(&mut dx)?,
        ];
        let launches = plan.scale_groups_bwd(rows, uses.write_bytes(Some(&mut workspace)));
        // SAFETY: as in `CudaStep::forward`.
        unsafe { gpu.queue(&launches) }?;
    }
    Ok(from_storage(dx, x.shape()))
}

fn scale_plan(x: &Tensor, groups: usize, eps: f64, limits: Limits) -> Result<LaunchPlan> {
    let cols = x.dim(D::Minus1)?;
    let shape = [x.elem_count() / cols, cols];
    let config = PowerNormConfig {
        group_scaling: Some(groups),
        affine: false,
        ..eps.into()
    };
    let kind = ForwardKind::Evaluation;
    Ok(LaunchPlan::new(
        dtype(x.dtype())?,
        shape,
        config,
        kind,
        limits,
    ))
}
