//! The layer's passes on a GPU: memory, addresses and launches. [`launch`] says what is launched, `kernels/` what
//! runs.
//!
//! Storage and numbers only; tensors stay in `op`, but for the totals that ranks add up. Nothing here waits for the GPU but the
//! ranks' comparison before the first sum of a layer, and a communicator that does.
#![allow(unsafe_code)]

pub(crate) mod launch;

use crate::communicator::{Exchange, LayerRanks};
use crate::config::PhiStep;
use crate::{Error, PowerNormConfig, Statistics};
use candle::backend::{BackendDevice, BackendStorage};
use candle::cuda_backend::{cudarc as candle_cudarc, CudaStorageSlice, WrapErr};
use candle::op::BackpropOp;
use candle::{CudaDevice, CudaStorage, DType, Device, Layout, Result, Shape, Storage, Tensor};
use cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig,
    PushKernelArg, SyncOnDrop,
};
use launch::{
    Address, BackwardBuffers, Dtype, ForwardBuffers, Kernel, Launch, NormalizeBwdParams,
    NormalizeParams, Params, Pass, SumPartialsParams, UpdateNuParams, UpdatePhiParams, Vector,
};
use std::mem;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The key of this crate's kernels among the modules of a device, where other crates keep theirs, and other versions
/// of this one.
const MODULE: &str = concat!("candle_powernorm-", env!("CARGO_PKG_VERSION"));

/// A type of the cudarc that candle is built with. The assertion below fails where that is another version than the one
/// this crate's manifest names, before the types of the two meet elsewhere.
#[diagnostic::on_unimplemented(
    message = "candle-core and candle-powernorm are built with two versions of cudarc",
    note = "give `cudarc` in candle-powernorm's Cargo.toml the version range that candle-core's has"
)]
trait CudarcOfCandle {}

impl CudarcOfCandle for candle_cudarc::driver::CudaStream {}

const _: () = {
    const fn assert_one_version<T: CudarcOfCandle>() {}
    assert_one_version::<cudarc::driver::CudaStream>()
};

/// The kernels of a GPU that were launched before: to look one up by its name again costs more than to launch it.
///
/// Whoever launches owns them, and with them the module and the context that they are of: both go when the last
/// owner does. All handles of a GPU have one context, its primary one, so they share kernels.
#[derive(Debug)]
pub(crate) struct Kernels([OnceLock<CudaFunction>; Kernel::COUNT]);

impl Default for Kernels {
    fn default() -> Self {
        Self([const { OnceLock::new() }; Kernel::COUNT])
    }
}

impl Kernels {
    fn get(&self, device: &CudaDevice, kernel: Kernel) -> Result<&CudaFunction> {
        let place = &self.0[kernel.index()];
        if let Some(function) = place.get() {
            return Ok(function);
        }
        let name = kernel.to_string();
        let function = device
            .get_or_load_custom_func(&name, MODULE, POWER_NORM)
            .map_err(|error| unloadable(device, name, &error))?;
        Ok(place.get_or_init(|| function.into_cuda_function()))
    }
}

/// Where a call is queued: on the stream of its input's handle of the GPU. Another handle, as the layer's may be, can have
/// another stream, and with cudarc's events off nothing would order the two.
#[derive(Clone)]
pub(crate) struct Gpu {
    device: CudaDevice,
    kernels: Arc<Kernels>,
}

impl Gpu {
    pub fn of(x: Argument, kernels: &Arc<Kernels>) -> Self {
        Self {
            device: x.0.device().clone(),
            kernels: kernels.clone(),
        }
    }

    /// Queues `launches` in order on the device's stream, on which nothing else comes between them. Once queued, the
    /// stream's order keeps their buffers, which are freed in that order too; across streams cudarc's events and the
    /// user keep order, as for every tensor of candle.
    ///
    /// # Safety
    /// Until the call returns, every address in them is that of a live buffer on this device, as large as [`Pass`] asks.
    unsafe fn queue(&self, launches: &[Launch]) -> Result<()> {
        // All are loaded before one is launched: a step of the state may be among them. What the pass queued before, and a
        // sum over ranks in between, stands.
        for launch in launches {
            self.kernels.get(&self.device, launch.kernel)?;
        }
        let stream = self.device.cuda_stream();
        for launch in launches {
            let kernel = self.kernels.get(&self.device, launch.kernel)?;
            let config = LaunchConfig {
                grid_dim: (launch.grid.0, launch.grid.1, 1),
                block_dim: (launch.block.0, launch.block.1, 1),
                shared_mem_bytes: launch.shared_bytes,
            };
            let mut builder = stream.launch_builder(kernel);
            match &launch.params {
                Params::Normalize(params) => builder.arg(params),
                Params::SumPartials(params) => builder.arg(params),
                Params::UpdatePhi(params) => builder.arg(params),
                Params::NormalizeBwd(params) => builder.arg(params),
                Params::UpdateNu(params) => builder.arg(params),
            };
            // SAFETY: by the caller's promise about buffers. The one argument is the struct that this kernel takes, field by
            // field as `kernels/params.cuh` has it, and `Pass` cuts grid, block and shared memory to it: softgpu and the
            // tests check them. The kernel is of the stream's context, which is the GPU's primary one.
            unsafe { builder.launch(config) }.w()?;
        }
        Ok(())
    }
}

/// A tensor's storage and layout; contiguous.
pub(crate) type Argument<'a> = (&'a CudaStorage, &'a Layout);

/// What a forward reads.
pub(crate) struct ForwardInputs<'a> {
    /// `[.., cols]`, from a 16-byte boundary on.
    pub x: Argument<'a>,
    /// As `x`: added to it first.
    pub residual: Option<Argument<'a>>,
    /// `[..]` u8.
    pub keep: Option<Argument<'a>>,
    /// γ, `[cols]`.
    pub weight: Option<Argument<'a>>,
    /// β, `[cols]`.
    pub bias: Option<Argument<'a>>,
    /// ψ², `[cols]`.
    pub phi: Argument<'a>,
}

/// What a backward reads.
pub(crate) struct BackwardInputs<'a> {
    /// What the forward normalized.
    pub x: Argument<'a>,
    /// As `x`.
    pub dy: Argument<'a>,
    /// As `x`: the gradient of the sum with a residual.
    pub dsum: Option<Argument<'a>>,
    /// As in the forward.
    pub keep: Option<Argument<'a>>,
    /// As in the forward.
    pub weight: Option<Argument<'a>>,
}

/// The gradients to compute, those of parameters in a dtype of their own.
pub(crate) struct Wanted {
    pub input: bool,
    pub weight: Option<DType>,
    pub bias: Option<DType>,
    /// What the loss was multiplied by.
    pub loss_scale: f64,
}

/// What a forward writes, shaped as its input.
pub(crate) struct Outputs {
    pub y: CudaStorage,
    /// `x + residual`, if there is a residual.
    pub sum: Option<CudaStorage>,
}

/// ∂L/∂X, and ∂L/∂γ and ∂L/∂β, `[cols]`, where they were wanted.
pub(crate) struct Gradients {
    pub input: Option<CudaStorage>,
    pub weight: Option<CudaStorage>,
    pub bias: Option<CudaStorage>,
}

/// What a forward leaves to its backward and to the state.
pub(crate) struct Forward {
    gpu: Gpu,
    pass: Pass,
    /// The statistic of a training step; `None` for an evaluation.
    train: Option<Statistics>,
    memory: Mutex<Memory>,
}

/// A forward's device memory beyond its output.
struct Memory {
    /// What the backward needs. `None` where there are no rows, or no backward was to follow.
    saved: Option<CudaSlice<u8>>,
    sums: Sums,
}

/// The sums that the step of ψ² takes.
enum Sums {
    /// They are not, or no more: no step waits for them.
    None,
    /// Of this rank's rows, which are all there are, chunk by chunk.
    Partial(CudaSlice<u8>),
    /// Of this rank's rows, after [room](Pass::totals_room) for what its backward sums. Those of other ranks are still to come.
    Local(CudaSlice<f64>),
    /// Of all ranks' rows.
    Total(Tensor),
    /// Their exchange was tried, and failed.
    Lost,
}

/// A backward that has its sums, of all ranks.
pub(crate) struct Backward {
    gradients: Gradients,
    /// `None` where there is nothing left to do.
    workspace: Option<CudaSlice<u8>>,
    /// Σ dy x̃ of all ranks, `[cols]`; `None` without other ranks.
    totals: Option<Tensor>,
}

/// `Y = γ ⊙ X̃/D + β`, and the sum of the input and its residual. `train` names the statistic of a training step, over the
/// rows of all ranks; `tracked` says that a backward may follow; `steps` are those before it, t.
pub(crate) fn forward(
    inputs: &ForwardInputs,
    config: &PowerNormConfig,
    train: Option<Statistics>,
    tracked: bool,
    steps: usize,
    ranks: &LayerRanks,
    kernels: &Arc<Kernels>,
) -> Result<(Outputs, Forward)> {
    let (x, layout) = inputs.x;
    let gpu = Gpu::of(inputs.x, kernels);
    let device = &gpu.device;
    let pass = pass(inputs.x, inputs.keep.is_some(), config)?;
    // Other ranks may have rows.
    let train = train.filter(|_| pass.rows > 0 || !ranks.is_alone());
    let over_ranks = train.is_some() && !ranks.is_alone();
    let empty = || device.zeros_impl(layout.shape(), x.dtype());
    if pass.rows == 0 && train.is_none() {
        let outputs = Outputs {
            y: empty()?,
            sum: inputs.residual.map(|_| empty()).transpose()?,
        };
        return Ok((outputs, Forward::new(gpu, pass, train, None, Sums::None)));
    }
    let room = pass.totals_room(train);
    let exchange = match room {
        0 => Exchange::Forward,
        _ => Exchange::Both,
    };
    let totals_len = room + pass.forward_totals();
    if over_ranks {
        let device = Device::Cuda(device.clone());
        ranks.compare(exchange, totals_len, config, steps, &device)?;
    }
    let output = || match pass.rows {
        0 => empty(),
        // SAFETY: the launches below write all of it.
        _ => unsafe { device.alloc_uninit(layout.shape(), x.dtype()) },
    };
    let mut y = output()?;
    let mut sum = inputs.residual.map(|_| output()).transpose()?;
    let mut saved = match tracked || pass.needs_saved(train) {
        // SAFETY: the launches below write every part of it before it is read.
        true => Some(unsafe { device.alloc::<u8>(pass.saved_bytes()) }?),
        false => None,
    };
    let mut workspace = match train {
        // SAFETY: as for `saved`. An allocation is of one byte at least.
        Some(_) => Some(unsafe { device.alloc::<u8>(pass.forward_workspace_bytes().max(1)) }?),
        None => None,
    };
    let mut totals = match over_ranks {
        // SAFETY: the launches below write what comes after the room, and a backward fills the room before it is read.
        true => Some(unsafe { device.alloc::<f64>(totals_len) }?),
        false => None,
    };

    let stream = device.cuda_stream();
    let mut uses = Uses::on(&stream);
    let mut buffers = ForwardBuffers {
        sum: uses.write_opt(sum.as_mut())?.data,
        y: uses.write(&mut y)?,
        weight: uses.read_vector(inputs.weight)?,
        bias: uses.read_vector(inputs.bias)?,
        phi: uses.read_vector(Some(inputs.phi))?,
        saved: uses.write_bytes(saved.as_mut()),
        workspace: uses.write_bytes(workspace.as_mut()),
        ..Default::default()
    };
    if pass.rows > 0 {
        buffers.x = uses.read_rows(inputs.x)?;
        buffers.residual = uses.read_rows_opt(inputs.residual)?;
        buffers.keep = uses.read_opt(inputs.keep)?;
    }
    let mut own = Uses::on(&stream);
    buffers.totals = own.write_totals(totals.as_mut(), room);
    // SAFETY: `uses` and `own` hold every buffer, each of the size that `Pass` asks for, until the launches are queued.
    unsafe { gpu.queue(&pass.forward(&buffers, train)) }?;
    drop(own);
    // The output needs those of the batch; others wait.
    let (total, local) = match totals {
        Some(totals) if train == Some(Statistics::Batch) => {
            (Some(ranks.sum_on_device(&tensor(totals, device))?), None)
        }
        waiting => (None, waiting),
    };
    {
        let total = total.as_ref().map(Tensor::storage_and_layout);
        let mut all = Uses::on(&stream);
        buffers.totals = all.read_totals(total.as_ref())?;
        // SAFETY: as above.
        unsafe { gpu.queue(&pass.finish_forward(&buffers, train)) }?;
    }
    drop(uses);
    let sums = match (total, local, workspace) {
        (Some(total), ..) => Sums::Total(total),
        (None, Some(local), _) => Sums::Local(local),
        (None, None, Some(workspace)) => Sums::Partial(workspace),
        (None, None, None) => Sums::None,
    };
    let forward = Forward::new(gpu, pass, train, saved, sums);
    Ok((Outputs { y, sum }, forward))
}

impl Forward {
    fn new(
        gpu: Gpu,
        pass: Pass,
        train: Option<Statistics>,
        saved: Option<CudaSlice<u8>>,
        sums: Sums,
    ) -> Self {
        let memory = Mutex::new(Memory { saved, sums });
        Self {
            gpu,
            pass,
            train,
            memory,
        }
    }

    /// Whether this was a training step, of which the state has yet to hear.
    pub fn is_step(&self) -> bool {
        self.train.is_some()
    }

    /// Whether it waits for other ranks' sums.
    pub fn is_unsettled(&self) -> bool {
        matches!(self.memory().sums, Sums::Local(_))
    }

    /// Adds the sums of other ranks to the step, if they are still to come.
    pub fn settle(&self, ranks: &LayerRanks) -> Result<()> {
        let mut memory = self.memory();
        if let Some(totals) = memory.sums.take_local()? {
            let room = self.pass.totals_room(self.train);
            let own =
                tensor(totals, &self.gpu.device).narrow(0, room, self.pass.forward_totals())?;
            memory.sums = Sums::Total(ranks.sum_on_device(&own)?);
        }
        Ok(())
    }

    /// ψ², `[cols]`, takes in the batch of the forward. Once: a second call does nothing.
    pub fn update_phi(&self, phi: &mut CudaStorage, layout: &Layout, step: &PhiStep) -> Result<()> {
        let stream = self.gpu.device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let phi = uses.write_vector(phi, layout)?;
        self.take_step(phi, Some(step))
    }

    /// The statistics of a step that ψ², `[cols]`, leaves out.
    pub fn leave_out(&self, phi: Argument) -> Result<()> {
        let stream = self.gpu.device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let phi = uses.read_vector(Some(phi))?;
        self.take_step(phi, None)
    }

    fn take_step(&self, phi: Vector, step: Option<&PhiStep>) -> Result<()> {
        let mut memory = self.memory();
        let Memory { saved, sums } = &mut *memory;
        let (Some(train), Some(saved)) = (self.train, saved) else {
            return Ok(());
        };
        let (workspace, total) = match sums {
            Sums::Partial(workspace) => (Some(workspace), None),
            Sums::Total(total) => (None, Some(&*total)),
            Sums::None | Sums::Local(_) | Sums::Lost => return Ok(()),
        };
        let total = total.map(Tensor::storage_and_layout);
        let stream = self.gpu.device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let buffers = ForwardBuffers {
            phi,
            saved: uses.write_bytes(Some(saved)),
            workspace: uses.write_bytes(workspace),
            totals: uses.read_totals(total.as_ref())?,
            ..Default::default()
        };
        let launch = self.pass.update_phi(&buffers, train, step);
        // SAFETY: as in `forward`; `saved` and the sums are those of this pass, and the caller holds ψ².
        unsafe { self.gpu.queue(&[launch]) }?;
        drop(uses);
        drop(total);
        *sums = Sums::None;
        Ok(())
    }

    /// The gradients of the forward by ν, which `ema_gz` keeps, `[cols]`, and the sums of all ranks: those of the forward too,
    /// if they are still to come. The state takes these next, and [`update_nu`](Self::update_nu) the others.
    pub fn backward(
        &self,
        inputs: &BackwardInputs,
        ema_gz: Argument,
        wanted: &Wanted,
        ranks: &LayerRanks,
    ) -> Result<Backward> {
        let mut memory = self.memory();
        let Memory { saved, sums } = &mut *memory;
        let (x, layout) = inputs.x;
        let device = &self.gpu.device;
        let channels = Shape::from(self.pass.cols);
        let alloc = |shape: &Shape, dtype: Option<DType>| match dtype {
            // SAFETY: the launches of this backward write all of it.
            Some(dtype) if saved.is_some() && shape.elem_count() > 0 => {
                unsafe { device.alloc_uninit(shape, dtype) }.map(Some)
            }
            Some(dtype) => device.zeros_impl(shape, dtype).map(Some),
            None => Ok(None),
        };
        let mut backward = Backward {
            gradients: Gradients {
                input: alloc(layout.shape(), wanted.input.then(|| x.dtype()))?,
                weight: alloc(&channels, wanted.weight)?,
                bias: alloc(&channels, wanted.bias)?,
            },
            workspace: None,
            totals: None,
        };
        let Some(saved) = saved else {
            return Ok(backward);
        };
        // SAFETY: the launches below write every part of it before they read it.
        let workspace = unsafe { device.alloc::<u8>(self.pass.backward_workspace_bytes()) }?;
        backward.workspace = Some(workspace);
        let cols = self.pass.cols;
        // Those of a forward that waits have room for these.
        let mut alone = match sums {
            Sums::Lost => return Err(Error::RankFailed.into()),
            Sums::Local(_) => None,
            _ if self.train.is_none() || ranks.is_alone() => None,
            // SAFETY: as above.
            _ => Some(unsafe { device.alloc::<f64>(cols) }?),
        };

        let stream = device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let mut buffers =
            self.buffers(&mut uses, inputs.weight, Some(inputs), saved, &mut backward)?;
        buffers.ema_gz = uses.read_vector(Some(ema_gz))?;
        let totals = match sums {
            Sums::Local(both) => Some(both),
            _ => alone.as_mut(),
        };
        buffers.totals = uses.write_totals(totals, 0);
        let launches = (self.pass).backward(&buffers, self.train, wanted.loss_scale);
        // SAFETY: as in `forward`; `saved` is that of this pass.
        unsafe { self.gpu.queue(&launches) }?;
        drop(uses);
        let both = sums.take_local()?;
        let with_forward = both.is_some();
        if let Some(totals) = both.or(alone) {
            let total = ranks.sum_on_device(&tensor(totals, device))?;
            backward.totals = Some(total.narrow(0, 0, cols)?);
            if with_forward {
                *sums = Sums::Total(total.narrow(0, cols, self.pass.forward_totals())?);
            }
        }
        Ok(backward)
    }

    /// The parameters' gradients and Λ of a [`backward`](Self::backward) with the same `weight`, whose forward is settled. ν,
    /// which `ema_gz` keeps, `[cols]`, takes the step where it is given, after a training step.
    pub fn update_nu(
        &self,
        backward: &mut Backward,
        weight: Option<Argument>,
        ema_gz: Option<(&mut CudaStorage, &Layout)>,
        loss_scale: f64,
    ) -> Result<()> {
        let memory = self.memory();
        let (Some(saved), Some(_)) = (&memory.saved, &backward.workspace) else {
            return Ok(());
        };
        let total = backward.totals.take();
        let total = total.as_ref().map(Tensor::storage_and_layout);
        let stream = self.gpu.device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let mut buffers = self.buffers(&mut uses, weight, None, saved, backward)?;
        if let Some((storage, layout)) = ema_gz {
            buffers.ema_gz = uses.write_vector(storage, layout)?;
        }
        buffers.totals = uses.read_totals(total.as_ref())?;
        let launches = self.pass.update_nu(&buffers, self.train, loss_scale);
        // SAFETY: as in `backward`.
        unsafe { self.gpu.queue(launches.as_slice()) }
    }

    /// The gradients of a [`backward`](Self::backward) with the same `inputs`, after [`update_nu`](Self::update_nu).
    pub fn finish_backward(
        &self,
        mut backward: Backward,
        inputs: &BackwardInputs,
    ) -> Result<Gradients> {
        let memory = self.memory();
        let waits_for_lambda = self.pass.is_exact(self.train);
        if let (Some(saved), Some(_), true) = (&memory.saved, &backward.workspace, waits_for_lambda)
        {
            let stream = self.gpu.device.cuda_stream();
            let mut uses = Uses::on(&stream);
            let buffers =
                self.buffers(&mut uses, inputs.weight, Some(inputs), saved, &mut backward)?;
            // SAFETY: as in `backward`.
            unsafe { (self.gpu).queue(&self.pass.finish_backward(&buffers, self.train)) }?;
        }
        Ok(backward.gradients)
    }

    /// The arrays of a backward, but for ν and the totals; those of rows where `rows` are given.
    fn buffers<'a>(
        &self,
        uses: &mut Uses<'a>,
        weight: Option<Argument<'a>>,
        rows: Option<&BackwardInputs<'a>>,
        saved: &'a CudaSlice<u8>,
        backward: &'a mut Backward,
    ) -> Result<BackwardBuffers> {
        let Backward {
            gradients,
            workspace,
            ..
        } = backward;
        let mut buffers = BackwardBuffers {
            weight: uses.read_vector(weight)?,
            dweight: uses.write_opt(gradients.weight.as_mut())?,
            dbias: uses.write_opt(gradients.bias.as_mut())?,
            saved: uses.read_bytes(saved),
            workspace: uses.write_bytes(workspace.as_mut()),
            ..Default::default()
        };
        if let Some(rows) = rows.filter(|_| self.pass.rows > 0) {
            buffers.x = uses.read_rows(rows.x)?;
            buffers.dy = uses.read_rows(rows.dy)?;
            buffers.dsum = uses.read_rows_opt(rows.dsum)?;
            buffers.dx = uses.write_opt(gradients.input.as_mut())?.data;
            buffers.keep = uses.read_opt(rows.keep)?;
        }
        Ok(buffers)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sums {
    /// Those that wait for other ranks', if any, for the sum that comes next. They are [`Lost`](Self::Lost) until what came of it
    /// is put here.
    fn take_local(&mut self) -> Result<Option<CudaSlice<f64>>> {
        match mem::replace(self, Self::Lost) {
            Self::Local(totals) => Ok(Some(totals)),
            Self::Lost => Err(Error::RankFailed.into()),
            settled => {
                *self = settled;
                Ok(None)
            }
        }
    }
}

/// Totals as ranks hand them to a communicator.
fn tensor(totals: CudaSlice<f64>, device: &CudaDevice) -> Tensor {
    let len = totals.len();
    let storage = CudaStorage::wrap_cuda_slice(totals, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), len, BackpropOp::none(), false)
}

/// The layer-scale by itself: X̃.
pub(crate) fn scale_groups(
    x: Argument,
    groups: usize,
    eps: f64,
    kernels: &Arc<Kernels>,
) -> Result<CudaStorage> {
    let pass = scale_pass(x, groups, eps)?;
    let gpu = Gpu::of(x, kernels);
    let device = &gpu.device;
    if pass.rows == 0 {
        return device.zeros_impl(x.1.shape(), x.0.dtype());
    }
    // SAFETY: the launches below write all of `y`, and of `factors` what they read.
    let mut y = unsafe { device.alloc_uninit(x.1.shape(), x.0.dtype()) }?;
    // SAFETY: as above.
    let mut factors = unsafe { device.alloc::<u8>(pass.group_bytes()) }?;
    let stream = device.cuda_stream();
    let mut uses = Uses::on(&stream);
    let launches = pass.scale_groups(
        uses.read_rows(x)?,
        uses.write(&mut y)?,
        uses.write_bytes(Some(&mut factors)),
    );
    // SAFETY: as in `forward`.
    unsafe { gpu.queue(&launches) }?;
    drop(uses);
    Ok(y)
}

/// The gradient of [`scale_groups`] from `dy`, shaped as `x`.
pub(crate) fn scale_groups_bwd(
    x: Argument,
    dy: Argument,
    groups: usize,
    eps: f64,
    kernels: &Arc<Kernels>,
) -> Result<CudaStorage> {
    let pass = scale_pass(x, groups, eps)?;
    let gpu = Gpu::of(x, kernels);
    let device = &gpu.device;
    if pass.rows == 0 {
        return device.zeros_impl(x.1.shape(), x.0.dtype());
    }
    // SAFETY: the launches below write all of `dx`, and of the others what they read.
    let mut dx = unsafe { device.alloc_uninit(x.1.shape(), x.0.dtype()) }?;
    // SAFETY: as above.
    let [mut factors, mut dots] = [
        unsafe { device.alloc::<u8>(pass.group_bytes()) }?,
        // SAFETY: as above.
        unsafe { device.alloc::<u8>(pass.group_bytes()) }?,
    ];
    let stream = device.cuda_stream();
    let mut uses = Uses::on(&stream);
    let rows = [
        uses.read_rows(x)?,
        uses.read_rows(dy)?,
        uses.write(&mut dx)?,
    ];
    let factors = uses.write_bytes(Some(&mut factors));
    let launches = pass.scale_groups_bwd(rows, factors, uses.write_bytes(Some(&mut dots)));
    // SAFETY: as in `forward`.
    unsafe { gpu.queue(&launches) }?;
    drop(uses);
    Ok(dx)
}

fn scale_pass(x: Argument, groups: usize, eps: f64) -> Result<Pass> {
    let config = PowerNormConfig {
        group_scaling: Some(groups),
        affine: false,
        ..eps.into()
    };
    pass(x, false, &config)
}

fn pass((x, layout): Argument, masked: bool, config: &PowerNormConfig) -> Result<Pass> {
    let cols = layout.shape().dim(candle::D::Minus1)?;
    Ok(Pass {
        dtype: dtype(x.dtype())?,
        rows: layout.shape().elem_count() / cols,
        cols,
        masked,
        config: *config,
    })
}

fn dtype(dtype: DType) -> Result<Dtype> {
    match dtype {
        DType::F32 => Ok(Dtype::F32),
        DType::F64 => Ok(Dtype::F64),
        DType::F16 => Ok(Dtype::F16),
        DType::BF16 => Ok(Dtype::BF16),
        other => Err(Error::InputDType(other).into()),
    }
}

fn unloadable(device: &CudaDevice, kernel: String, error: &candle::Error) -> candle::Error {
    let (major, minor) = device
        .cuda_stream()
        .context()
        .compute_capability()
        .unwrap_or_default();
    Error::Kernel {
        kernel,
        compute_capability: format!("{major}.{minor}"),
        reason: error.to_string(),
    }
    .into()
}

// SAFETY: plain numbers in the layout of C, those of `struct NormalizeParams` in `kernels/params.cuh`.
unsafe impl DeviceRepr for NormalizeParams {}
// SAFETY: likewise those of `struct SumPartialsParams`.
unsafe impl DeviceRepr for SumPartialsParams {}
// SAFETY: likewise those of `struct UpdatePhiParams`.
unsafe impl DeviceRepr for UpdatePhiParams {}
// SAFETY: likewise those of `struct NormalizeBwdParams`.
unsafe impl DeviceRepr for NormalizeBwdParams {}
// SAFETY: likewise those of `struct UpdateNuParams`.
unsafe impl DeviceRepr for UpdateNuParams {}

/// The buffers that launches on a stream use. Another stream waits for what it records when it is dropped, after
/// the launches.
struct Uses<'a> {
    stream: &'a CudaStream,
    held: Vec<SyncOnDrop<'a>>,
}

/// Evaluates `$body` with `$slice` the typed slice of a storage.
macro_rules! with_slice {
    ($storage:expr, $slice:ident => $body:expr) => {
        match $storage {
            CudaStorageSlice::U8($slice) => $body,
            CudaStorageSlice::F32($slice) => $body,
            CudaStorageSlice::F64($slice) => $body,
            CudaStorageSlice::F16($slice) => $body,
            CudaStorageSlice::BF16($slice) => $body,
            _ => candle::bail!("power_norm: expected a storage of U8, F32, F64, F16 or BF16"),
        }
    };
}

impl<'a> Uses<'a> {
    fn on(stream: &'a CudaStream) -> Self {
        Self {
            stream,
            held: vec![],
        }
    }

    /// Where a contiguous tensor begins.
    fn read(&mut self, (storage, layout): Argument<'a>) -> Result<Address> {
        let start = with_slice!(&storage.slice, slice => self.hold(slice.device_ptr(self.stream)));
        Ok(start + offset(layout, storage.dtype())?)
    }

    /// [`read`](Self::read), of rows that kernels take 16 bytes at a time.
    fn read_rows(&mut self, argument: Argument<'a>) -> Result<Address> {
        let start = self.read(argument)?;
        if !start.is_multiple_of(16) {
            candle::bail!("power_norm: expected rows from a 16-byte boundary on, got {start:#x}")
        }
        Ok(start)
    }

    fn read_rows_opt(&mut self, argument: Option<Argument<'a>>) -> Result<Address> {
        argument.map_or(Ok(0), |argument| self.read_rows(argument))
    }

    fn read_opt(&mut self, argument: Option<Argument<'a>>) -> Result<Address> {
        argument.map_or(Ok(0), |argument| self.read(argument))
    }

    fn read_vector(&mut self, argument: Option<Argument<'a>>) -> Result<Vector> {
        let Some(argument) = argument else {
            return Ok(Vector::default());
        };
        Ok(Vector {
            dtype: dtype(argument.0.dtype())?,
            data: self.read(argument)?,
        })
    }

    fn read_bytes(&mut self, slice: &'a CudaSlice<u8>) -> Address {
        self.hold(slice.device_ptr(self.stream))
    }

    /// Where a fresh storage begins.
    fn write(&mut self, storage: &'a mut CudaStorage) -> Result<Address> {
        Ok(with_slice!(&mut storage.slice, slice => self.hold(slice.device_ptr_mut(self.stream))))
    }

    fn write_opt(&mut self, storage: Option<&'a mut CudaStorage>) -> Result<Vector> {
        let Some(storage) = storage else {
            return Ok(Vector::default());
        };
        Ok(Vector {
            dtype: dtype(storage.dtype())?,
            data: self.write(storage)?,
        })
    }

    fn write_vector(&mut self, storage: &'a mut CudaStorage, layout: &Layout) -> Result<Vector> {
        let offset = offset(layout, storage.dtype())?;
        let mut vector = self.write_opt(Some(storage))?;
        vector.data += offset;
        Ok(vector)
    }

    fn write_bytes(&mut self, slice: Option<&'a mut CudaSlice<u8>>) -> Address {
        slice.map_or(0, |slice| self.hold(slice.device_ptr_mut(self.stream)))
    }

    /// Where totals begin after `room` of them.
    fn write_totals(&mut self, totals: Option<&'a mut CudaSlice<f64>>, room: usize) -> Address {
        totals.map_or(0, |totals| {
            let start = self.hold(totals.device_ptr_mut(self.stream));
            start + (room * size_of::<f64>()) as Address
        })
    }

    fn read_totals<S: Deref<Target = Storage>>(
        &mut self,
        totals: Option<&'a (S, &'a Layout)>,
    ) -> Result<Address> {
        match totals {
            Some((storage, layout)) => match &**storage {
                Storage::Cuda(storage) => self.read((storage, layout)),
                _ => candle::bail!("power_norm: expected totals on a GPU"),
            },
            None => Ok(0),
        }
    }

    fn hold(&mut self, (address, guard): (Address, SyncOnDrop<'a>)) -> Address {
        self.held.push(guard);
        address
    }
}

/// Bytes from the start of its storage to a contiguous tensor.
fn offset(layout: &Layout, dtype: DType) -> Result<Address> {
    match layout.contiguous_offsets() {
        Some((start, _)) => Ok((start * dtype.size_in_bytes()) as Address),
        None => candle::bail!("power_norm: expected a contiguous tensor, got {layout:?}"),
    }
}
