//! A step on a GPU.

use super::launch::{BackwardBuffers, ForwardBuffers, LaunchPlan};
use super::params::Vector;
use super::{argument, argument_opt, dtype, reads_in_place, Gpu, InVariable, Kernels, Uses};
use crate::config::{ForwardKind, PhiStep};
use crate::device::{
    BackwardInputs, DeviceBackward, DeviceStep, ForwardInputs, Gradients, Outputs, RunningNu,
    Setting,
};
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
    /// Device memory that the backward needs. `None` where there are no rows, or no backward was to
    /// follow. Locked before the storage of ψ², and after that of ν.
    saved: Mutex<Option<CudaSlice<u8>>>,
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
        let mut y = step.output(&inputs.x)?;
        let mut sum = match inputs.residual {
            Some(_) => Some(step.output(&inputs.x)?),
            None => None,
        };
        if !step.is_empty() {
            let device = step.device();
            let mut saved = match setting.tracked || plan.needs_saved() {
                // SAFETY: the launches of the step write every part of it before it is read.
                true => Some(unsafe { device.alloc::<u8>(plan.saved_bytes()) }?),
                false => None,
            };
            let mut totals = match setting.over_ranks {
                // SAFETY: the launches below write all of it.
                true => Some(unsafe { device.alloc::<f64>(plan.forward_totals()) }?),
                false => None,
            };
            let launch = |mut buffers: ForwardBuffers| {
                let stream = device.cuda_stream();
                let mut uses = Uses::on(&stream);
                buffers.totals = uses.write_slice(totals.as_mut());
                // SAFETY: `uses`, here and in the caller, holds every buffer, each of the size that
                // `LaunchPlan` asks for, until the launches are queued.
                unsafe { step.gpu.queue(&plan.forward(&buffers)) }
            };
            step.with_forward_buffers(inputs, &mut y, sum.as_mut(), saved.as_mut(), launch)?;
            step.sums = totals.map(|totals| tensor(totals, step.device()));
            step.saved = Mutex::new(saved);
        }
        let outputs = Outputs {
            y: Some(Storage::Cuda(y)),
            sum: sum.map(Storage::Cuda),
        };
        Ok((Box::new(step), outputs))
    }

    fn new(setting: Setting, inputs: &ForwardInputs, kernels: &Arc<Kernels>) -> Result<Self> {
        let x = &inputs.x;
        let cols = x.dim(D::Minus1)?;
        let gpu = Gpu::of(x, kernels)?;
        let rows = x.elem_count() / cols;
        // Other processes may have rows. If none has, a training step is an evaluation.
        let kind = match rows > 0 || setting.over_ranks {
            true => setting.kind,
            false => ForwardKind::Evaluation,
        };
        let (dtype, limits) = (dtype(x.dtype())?, gpu.kernels.limits);
        let mut plan = LaunchPlan::new(dtype, [rows, cols], setting.config, kind, limits)?;
        plan.masked = inputs.keep.is_some();
        plan.divides = inputs.phi.is_some();
        Ok(Self {
            gpu,
            plan,
            setting,
            saved: Mutex::default(),
            sums: None,
        })
    }

    fn device(&self) -> &CudaDevice {
        &self.gpu.device
    }

    fn kind(&self) -> ForwardKind {
        self.plan.kind()
    }

    fn saved(&self) -> MutexGuard<'_, Option<CudaSlice<u8>>> {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// ν to read in a launch: the variable, or a copy of it.
    fn in_order(&self, nu: RunningNu) -> Result<Tensor> {
        let variable = nu.ema_gz.detach();
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

    /// `true` if there is nothing to launch.
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
        let [residual, keep, phi] = [&inputs.residual, &inputs.keep, &inputs.phi]
            .map(|tensor| tensor.as_ref().map(Tensor::storage_and_layout));
        let affine = (inputs.affine.as_ref())
            .map(|affine| affine.each_ref().map(Tensor::storage_and_layout));
        let stream = self.device().cuda_stream();
        let mut uses = Uses::on(&stream);
        let mut buffers = ForwardBuffers {
            sum: uses.write_opt(sum)?.data,
            y: uses.write(y)?,
            phi: uses.read_vector(argument_opt(&phi)?)?,
            saved: uses.write_slice(saved),
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

    fn normalize_by_batch(
        &mut self,
        inputs: &ForwardInputs,
        mut outputs: Outputs,
    ) -> Result<Outputs> {
        if self.is_empty() {
            return Ok(outputs);
        }
        let Some(Storage::Cuda(y)) = &mut outputs.y else {
            candle::bail!("power_norm: expected an output on a GPU to write, got none")
        };
        let sum = match &mut outputs.sum {
            Some(Storage::Cuda(sum)) => Some(sum),
            _ => None,
        };
        let global = self.sums.as_ref().map(Tensor::storage_and_layout);
        let mut saved = self.saved();
        let launch = |mut buffers: ForwardBuffers| {
            let stream = self.device().cuda_stream();
            let mut uses = Uses::on(&stream);
            buffers.totals = uses.read_opt(argument_opt(&global)?)?;
            // SAFETY: as in `forward`.
            unsafe { self.gpu.queue(&self.plan.normalize_by_batch(&buffers)) }
        };
        self.with_forward_buffers(inputs, y, sum, saved.as_mut(), launch)?;
        Ok(outputs)
    }

    fn is_step(&self) -> bool {
        self.kind().is_training()
    }

    fn update_phi(&self, phi: &Var, step: &PhiStep) -> Result<()> {
        let mut saved = self.saved();
        let global = self.sums.as_ref().map(Tensor::storage_and_layout);
        InVariable::run(phi, |phi, layout| {
            let stream = self.device().cuda_stream();
            let mut uses = Uses::on(&stream);
            let buffers = ForwardBuffers {
                phi: uses.write_vector(phi, layout)?,
                saved: uses.write_slice(saved.as_mut()),
                totals: uses.read_opt(argument_opt(&global)?)?,
                ..Default::default()
            };
            // SAFETY: as in `forward`; `saved` and the sums are those of this step, and the caller
            // holds ψ².
            unsafe { self.gpu.queue(&[self.plan.update_phi(&buffers, step)]) }
        })
    }

    fn backward<'a>(&'a self, inputs: &BackwardInputs<'a>) -> Result<Box<dyn DeviceBackward + 'a>> {
        // Before `saved`: where ν moves, its storage is locked first too. Another thread may do so
        // for the same step.
        let ema_gz = inputs.running.map(|nu| self.in_order(nu)).transpose()?;
        let ema_gz = ema_gz.as_ref().map(Tensor::storage_and_layout);
        let saved = self.saved();
        let mut backward = CudaBackward::new(self, inputs, saved.is_some())?;
        let plan = backward.plan;
        let mut totals = match self.setting.over_ranks && saved.is_some() {
            // SAFETY: the launches below write all of it.
            true => Some(unsafe { self.device().alloc::<f64>(self.plan.cols()) }?),
            false => None,
        };
        {
            let stream = self.device().cuda_stream();
            let mut uses = Uses::on(&stream);
            let ema_gz = uses.read_vector(argument_opt(&ema_gz)?)?;
            let address = uses.write_slice(totals.as_mut());
            let loss_scale = inputs.running.map_or(1., |nu| nu.loss_scale);
            backward
                .arrays
                .launch(saved.as_ref(), inputs, true, |mut buffers| {
                    buffers.ema_gz = ema_gz;
                    buffers.totals = address;
                    // SAFETY: as in `forward`.
                    unsafe { (self.gpu).queue(&plan.backward(&buffers, loss_scale)) }
                })?;
        }
        backward.sums = totals.map(|totals| tensor(totals, self.device()));
        Ok(Box::new(backward))
    }
}

/// A backward.
struct CudaBackward<'a> {
    step: &'a CudaStep,
    plan: LaunchPlan,
    inputs: BackwardInputs<'a>,
    arrays: BackwardArrays<'a>,
    /// Σ dy x̃ over ranks, `[cols]`: local sums, and later global ones. `None` in a single process.
    sums: Option<Tensor>,
}

/// Outputs of a backward.
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
        let plan = step.plan.of_backward()?;
        let alloc = |shape: &Shape, dtype: Option<DType>| match dtype {
            Some(dtype) if launches && shape.elem_count() > 0 => {
                // SAFETY: the launches of this backward write all of it.
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
            plan,
            inputs: *inputs,
            arrays: BackwardArrays {
                step,
                input: alloc(inputs.x.shape(), input)?,
                weight: alloc(&channels, weight)?,
                bias: alloc(&channels, bias)?,
                workspace: match launches {
                    true => {
                        let bytes = plan.backward_workspace_bytes();
                        // SAFETY: the launches write every part of it before they read it.
                        Some(unsafe { device.alloc::<u8>(bytes) }?)
                    }
                    false => None,
                },
            },
            sums: None,
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
            workspace: uses.write_slice(Some(workspace)),
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
    /// Makes Λ and the parameters' gradients, and moves ν if `ema_gz` is there.
    fn launch_update(&mut self, ema_gz: Option<Vector>) -> Result<()> {
        let (step, plan, inputs) = (self.step, self.plan, self.inputs);
        let saved = step.saved();
        let global = self.sums.as_ref().map(Tensor::storage_and_layout);
        let stream = step.device().cuda_stream();
        let mut uses = Uses::on(&stream);
        let totals = uses.read_opt(argument_opt(&global)?)?;
        let loss_scale = inputs.running.map_or(1., |nu| nu.loss_scale);
        (self.arrays).launch(saved.as_ref(), &inputs, false, |mut buffers| {
            buffers.ema_gz = ema_gz.unwrap_or_default();
            buffers.totals = totals;
            let launch = plan.update_nu(&buffers, loss_scale);
            // SAFETY: as in `CudaStep::forward`.
            unsafe { step.gpu.queue(launch.as_slice()) }
        })
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

    fn finish(&mut self, nu_follows: bool) -> Result<()> {
        let (step, plan) = (self.step, self.plan);
        let is_exact = step.setting.config.is_exact(step.kind());
        if is_exact || !nu_follows {
            self.launch_update(None)?;
        }
        if is_exact {
            let saved = step.saved();
            let inputs = self.inputs;
            (self.arrays).launch(saved.as_ref(), &inputs, true, |buffers| {
                // SAFETY: as in `CudaStep::forward`.
                unsafe { (step.gpu).queue(&plan.finish_backward(&buffers)) }
            })?;
        }
        Ok(())
    }

    fn update_nu(&mut self, ema_gz: &Var) -> Result<()> {
        InVariable::run(ema_gz, |ema_gz, layout| {
            let stream = self.step.device().cuda_stream();
            let mut uses = Uses::on(&stream);
            let ema_gz = uses.write_vector(ema_gz, layout)?;
            self.launch_update(Some(ema_gz))
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

/// Sums as they are handed out.
fn tensor(totals: CudaSlice<f64>, device: &CudaDevice) -> Tensor {
    let len = Shape::from(totals.len());
    from_storage(CudaStorage::wrap_cuda_slice(totals, device.clone()), &len)
}
