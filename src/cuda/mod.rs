//! The layer's passes on a GPU: memory, addresses and launches. [`launch`] says what is launched, `kernels/` what
//! runs.
//!
//! Storage and numbers only; tensors stay in `op`. Nothing here waits for the GPU.
#![allow(unsafe_code)]

pub(crate) mod launch;

use crate::config::PhiStep;
use crate::{Error, PowerNormConfig, Statistics};
use candle::backend::{BackendDevice, BackendStorage};
use candle::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg,
    SyncOnDrop,
};
use candle::cuda_backend::{CudaStorageSlice, WrapErr};
use candle::{CudaDevice, CudaStorage, DType, Layout, Result, Shape};
use launch::{
    Address, BackwardBuffers, Dtype, ForwardBuffers, Launch, NormalizeBwdParams, NormalizeParams,
    Params, Pass, UpdateNuParams, UpdatePhiParams, Vector,
};
use std::sync::{Mutex, MutexGuard, PoisonError};

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The key of this crate's kernels among the modules of a device, where other crates keep theirs, and other versions
/// of this one.
const MODULE: &str = concat!("candle_powernorm-", env!("CARGO_PKG_VERSION"));

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

/// The gradients to compute, those of parameters in a dtype of their own, and what becomes of ν.
pub(crate) struct Wanted {
    pub input: bool,
    pub weight: Option<DType>,
    pub bias: Option<DType>,
    /// What the loss was multiplied by.
    pub loss_scale: f64,
    /// Whether ν takes the step.
    pub moves_nu: bool,
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
    pass: Pass,
    /// The statistic of a training step; `None` for an evaluation.
    train: Option<Statistics>,
    memory: Mutex<Memory>,
}

/// A forward's device memory beyond its output.
struct Memory {
    /// What the backward needs. `None` where there are no rows, or no backward was to follow.
    saved: Option<CudaSlice<u8>>,
    /// The sums that the step of ψ² takes, until it took them.
    sums: Option<CudaSlice<u8>>,
}

/// `Y = γ ⊙ X̃/D + β`, and the sum of the input and its residual. `train` names the statistic of a training step;
/// `tracked` says that a backward may follow.
pub(crate) fn forward(
    inputs: &ForwardInputs,
    config: &PowerNormConfig,
    train: Option<Statistics>,
    tracked: bool,
) -> Result<(Outputs, Forward)> {
    let (x, layout) = inputs.x;
    let device = x.device();
    let pass = pass(inputs.x, inputs.keep.is_some(), config)?;
    let train = train.filter(|_| pass.rows > 0);
    if pass.rows == 0 {
        let (saved, sums) = (None, None);
        let memory = Mutex::new(Memory { saved, sums });
        let forward = Forward {
            pass,
            train,
            memory,
        };
        let empty = || device.zeros_impl(layout.shape(), x.dtype());
        let outputs = Outputs {
            y: empty()?,
            sum: inputs.residual.map(|_| empty()).transpose()?,
        };
        return Ok((outputs, forward));
    }
    // SAFETY: the launches below write all of `y` and `sum`, and every part of `saved` and `sums` before it is read.
    let output = || unsafe { device.alloc_uninit(layout.shape(), x.dtype()) };
    let mut y = output()?;
    let mut sum = inputs.residual.map(|_| output()).transpose()?;
    let alloc = |wanted: bool, bytes| match wanted {
        // SAFETY: as for `y`.
        true => unsafe { device.alloc::<u8>(bytes) }.map(Some),
        false => Ok(None),
    };
    let mut saved = alloc(tracked || pass.needs_saved(train), pass.saved_bytes())?;
    let mut sums = alloc(train.is_some(), pass.forward_workspace_bytes())?;

    let stream = device.cuda_stream();
    let mut uses = Uses::on(&stream);
    let buffers = ForwardBuffers {
        x: uses.read_rows(inputs.x)?,
        residual: uses.read_rows_opt(inputs.residual)?,
        sum: uses.write_opt(sum.as_mut())?.data,
        y: uses.write(&mut y)?,
        keep: uses.read_opt(inputs.keep)?,
        weight: uses.read_vector(inputs.weight)?,
        bias: uses.read_vector(inputs.bias)?,
        phi: uses.read_vector(Some(inputs.phi))?,
        saved: uses.write_bytes(saved.as_mut()),
        workspace: uses.write_bytes(sums.as_mut()),
    };
    // SAFETY: `uses` holds every buffer, each of the size that `Pass` asks for, until the launches are queued.
    unsafe { queue(device, &pass.forward(&buffers, train)) }?;
    drop(uses);
    let memory = Mutex::new(Memory { saved, sums });
    let forward = Forward {
        pass,
        train,
        memory,
    };
    Ok((Outputs { y, sum }, forward))
}

impl Forward {
    /// Whether this was a training step, of which the state has yet to hear.
    pub fn is_step(&self) -> bool {
        self.train.is_some()
    }

    /// ψ², `[cols]`, takes in the batch of the forward. Once: a second call does nothing.
    pub fn update_phi(&self, phi: &mut CudaStorage, layout: &Layout, step: &PhiStep) -> Result<()> {
        let mut memory = self.memory();
        let sums = memory.sums.take();
        let (Some(train), Some(mut sums), Some(saved)) = (self.train, sums, &mut memory.saved)
        else {
            return Ok(());
        };
        let device = phi.device().clone();
        let stream = device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let buffers = ForwardBuffers {
            phi: uses.write_vector(phi, layout)?,
            saved: uses.write_bytes(Some(saved)),
            workspace: uses.write_bytes(Some(&mut sums)),
            ..Default::default()
        };
        let launch = self.pass.update_phi(&buffers, train, step);
        // SAFETY: as in `forward`; `saved` and the sums are those of this pass.
        unsafe { queue(&device, &[launch]) }
    }

    /// The gradients of the forward. After a training step ν, which `ema_gz` keeps, `[cols]`, takes its own.
    pub fn backward(
        &self,
        inputs: &BackwardInputs,
        ema_gz: &mut CudaStorage,
        ema_gz_layout: &Layout,
        wanted: &Wanted,
    ) -> Result<Gradients> {
        let memory = self.memory();
        let (x, layout) = inputs.x;
        let device = x.device();
        let channels = Shape::from(self.pass.cols);
        let alloc = |shape: &Shape, dtype: Option<DType>| match dtype {
            // SAFETY: the launches below write all of it.
            Some(dtype) if memory.saved.is_some() => {
                unsafe { device.alloc_uninit(shape, dtype) }.map(Some)
            }
            Some(dtype) => device.zeros_impl(shape, dtype).map(Some),
            None => Ok(None),
        };
        let mut gradients = Gradients {
            input: alloc(layout.shape(), wanted.input.then(|| x.dtype()))?,
            weight: alloc(&channels, wanted.weight)?,
            bias: alloc(&channels, wanted.bias)?,
        };
        let Some(saved) = &memory.saved else {
            return Ok(gradients);
        };
        // SAFETY: the launches below write every part of it before they read it.
        let mut workspace = unsafe { device.alloc::<u8>(self.pass.backward_workspace_bytes()) }?;

        let stream = device.cuda_stream();
        let mut uses = Uses::on(&stream);
        let buffers = BackwardBuffers {
            x: uses.read_rows(inputs.x)?,
            dy: uses.read_rows(inputs.dy)?,
            dsum: uses.read_rows_opt(inputs.dsum)?,
            dx: uses.write_opt(gradients.input.as_mut())?.data,
            keep: uses.read_opt(inputs.keep)?,
            weight: uses.read_vector(inputs.weight)?,
            ema_gz: uses.write_vector(ema_gz, ema_gz_layout)?,
            dweight: uses.write_opt(gradients.weight.as_mut())?,
            dbias: uses.write_opt(gradients.bias.as_mut())?,
            saved: uses.read_bytes(saved),
            workspace: uses.write_bytes(Some(&mut workspace)),
        };
        let launches =
            (self.pass).backward(&buffers, self.train, wanted.loss_scale, wanted.moves_nu);
        // SAFETY: as in `forward`; `saved` is that of this pass.
        unsafe { queue(device, &launches) }?;
        drop(uses);
        Ok(gradients)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The layer-scale by itself: X̃.
pub(crate) fn scale_groups(x: Argument, groups: usize, eps: f64) -> Result<CudaStorage> {
    let pass = scale_pass(x, groups, eps)?;
    let device = x.0.device();
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
    unsafe { queue(device, &launches) }?;
    drop(uses);
    Ok(y)
}

/// The gradient of [`scale_groups`] from `dy`, shaped as `x`.
pub(crate) fn scale_groups_bwd(
    x: Argument,
    dy: Argument,
    groups: usize,
    eps: f64,
) -> Result<CudaStorage> {
    let pass = scale_pass(x, groups, eps)?;
    let device = x.0.device();
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
    unsafe { queue(device, &launches) }?;
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

/// Queues `launches` in order on the device's stream, on which nothing else comes between them. Once queued, the
/// stream's order keeps their buffers, which are freed in that order too; across streams cudarc's events and the
/// user keep order, as for every tensor of candle.
///
/// # Safety
/// Until the call returns, every address in them is that of a live buffer on this device, as large as [`Pass`] asks.
unsafe fn queue(device: &CudaDevice, launches: &[Launch]) -> Result<()> {
    // All or none: a step of the state may be among them.
    let load = |launch: &Launch| {
        device
            .get_or_load_custom_func(&launch.kernel, MODULE, POWER_NORM)
            .map_err(|error| unloadable(device, &launch.kernel, &error))
    };
    let kernels: Vec<_> = launches.iter().map(load).collect::<Result<_>>()?;
    for (launch, kernel) in launches.iter().zip(&kernels) {
        let config = LaunchConfig {
            grid_dim: (launch.grid.0, launch.grid.1, 1),
            block_dim: (launch.block.0, launch.block.1, 1),
            shared_mem_bytes: launch.shared_bytes,
        };
        let mut builder = kernel.builder();
        match &launch.params {
            Params::Normalize(params) => builder.arg(params),
            Params::UpdatePhi(params) => builder.arg(params),
            Params::NormalizeBwd(params) => builder.arg(params),
            Params::UpdateNu(params) => builder.arg(params),
        };
        // SAFETY: by the caller's promise about buffers. The one argument is the struct that the kernel of this name
        // takes, field by field as `kernels/params.cuh` has it, and `Pass` cuts grid, block and shared memory to it:
        // the emulation runs these very launches under an address sanitizer.
        unsafe { builder.launch(config) }.w()?;
    }
    Ok(())
}

fn unloadable(device: &CudaDevice, kernel: &str, error: &candle::Error) -> candle::Error {
    let (major, minor) = device
        .cuda_stream()
        .context()
        .compute_capability()
        .unwrap_or_default();
    Error::Kernel {
        kernel: kernel.to_owned(),
        compute_capability: format!("{major}.{minor}"),
        reason: error.to_string(),
    }
    .into()
}

// SAFETY: plain numbers in the layout of C, those of `struct NormalizeParams` in `kernels/params.cuh`.
unsafe impl DeviceRepr for NormalizeParams {}
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
