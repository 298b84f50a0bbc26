//! NVIDIA GPUs: memory, addresses and launches. [`launch`] says what is launched, `kernels/` what
//! runs.
//!
//! `step.rs` has the phases of a step. This file has what the phases queue their launches with.
//! Nothing here waits for the GPU.
#![allow(unsafe_code)]

mod cut;
mod launch;
mod params;
mod step;

pub(crate) use step::CudaStep;

use crate::error::Error;
use candle::backend::BackendStorage;
use candle::cuda_backend::{cudarc as candle_cudarc, CudaStorageSlice, WrapErr};
use candle::{
    CpuStorage, CudaDevice, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor,
};
use cudarc::driver::sys::{CUdevice_attribute, CUfunction_attribute};
use cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig,
    PushKernelArg, SyncOnDrop,
};
use cut::Limits;
use launch::{Kernel, Launch};
use params::{
    Address, Dtype, NormalizeBwdParams, NormalizeParams, Params, SumPartialsParams, UpdateNuParams,
    UpdatePhiParams, Vector,
};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock, Weak};

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The key of this crate's kernels among the modules of a device, where other crates and other
/// builds of this crate keep their modules too. So it tells kernels apart by their PTX.
static MODULE: LazyLock<String> = LazyLock::new(|| {
    let mut hasher = DefaultHasher::new();
    POWER_NORM.hash(&mut hasher);
    format!("candle_powernorm-{:016x}", hasher.finish())
});

/// A type of the cudarc that candle is built with. The assertion below fails if candle's cudarc has
/// another version than this crate's manifest names. Otherwise the error would come where the types
/// of both versions meet.
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

/// The loaded kernels of a GPU and its limits, which all layers on the GPU share. To look a kernel
/// up by its name again would cost more than to launch it.
///
/// Layers own the kernels, and so own their module and their context. Both are released when the
/// last layer is dropped. All handles of a GPU have one context, its primary one, so they share
/// kernels.
#[derive(Debug)]
pub(crate) struct Kernels {
    functions: RwLock<HashMap<Kernel, CudaFunction>>,
    limits: Limits,
}

impl Kernels {
    /// The kernels of the GPU that `device` is a handle of.
    pub fn of(device: &Device) -> Result<Arc<Self>> {
        static GPUS: Mutex<BTreeMap<usize, Weak<Kernels>>> = Mutex::new(BTreeMap::new());
        use CUdevice_attribute::*;
        let stream = device.as_cuda_device()?.cuda_stream();
        let context = stream.context();
        let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        let place = gpus.entry(context.ordinal()).or_default();
        if let Some(kernels) = place.upgrade() {
            return Ok(kernels);
        }
        let number = |attribute| context.attribute(attribute).w();
        let limits = Limits {
            multiprocessors: number(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
            shared_bytes: number(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            copies: number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? >= 8,
        };
        let kernels = Arc::new(Self {
            functions: RwLock::default(),
            limits,
        });
        *place = Arc::downgrade(&kernels);
        Ok(kernels)
    }

    fn get(&self, device: &CudaDevice, kernel: Kernel) -> Result<CudaFunction> {
        let functions = self
            .functions
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(&kernel) {
            return Ok(function.clone());
        }
        drop(functions);
        let name = kernel.to_string();
        // A sum over ranks may have left another GPU's context in this thread.
        device.cuda_stream().context().bind_to_thread().w()?;
        let function = device
            .get_or_load_custom_func(&name, &MODULE, POWER_NORM)
            .map_err(|error| unloadable(device, name, &error))?
            .into_cuda_function();
        // A block has 48 KiB of shared memory unless more is allowed.
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let most = self.limits.shared_bytes as i32;
        function.set_attribute(attribute, most).w()?;
        let mut functions = self
            .functions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        Ok(functions.entry(kernel).or_insert(function).clone())
    }
}

/// The stream that a call is queued on: that of its input's handle of the GPU. Another handle, as
/// the layer's may be, can have another stream, and with cudarc's events off nothing would order
/// the two.
#[derive(Clone)]
struct Gpu {
    device: CudaDevice,
    kernels: Arc<Kernels>,
}

impl Gpu {
    fn of(x: &Tensor, kernels: &Arc<Kernels>) -> Result<Self> {
        Ok(Self {
            device: x.device().as_cuda_device()?.clone(),
            kernels: kernels.clone(),
        })
    }

    /// Queues `launches` in order on the device's stream. Once launches are queued, their buffers
    /// are safe: they are freed in the stream's order or, if another stream frees them, after the
    /// events that [`Uses`] records. With events off, the user keeps the order across streams, as
    /// for every tensor of candle.
    ///
    /// # Safety
    /// Until the call returns, every address in `launches` is the address of a live buffer on this
    /// device, as large as [`LaunchPlan`](launch::LaunchPlan) asks.
    unsafe fn queue(&self, launches: &[Launch]) -> Result<()> {
        // All kernels are loaded before one is launched, because a step of the state may be among
        // them. A failure here does not undo what earlier phases queued.
        let kernels = (launches.iter())
            .map(|launch| self.kernels.get(&self.device, launch.kernel))
            .collect::<Result<Vec<_>>>()?;
        let stream = self.device.cuda_stream();
        for (launch, kernel) in launches.iter().zip(&kernels) {
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
            // The kernel belongs to the stream's context, which is the GPU's primary context.
            // SAFETY: by the caller's promise about buffers. The one argument is the struct that
            // this kernel takes, as a test in `params` checks field by field, and `LaunchPlan` cuts
            // grid, block and shared memory to it, as the tests on softgpu check.
            unsafe { builder.launch(config) }.w()?;
        }
        Ok(())
    }
}

/// `true` if a call with rows on `rows` reads a variable on `state` in place, and not from a copy.
///
/// With two streams, cudarc's events keep the order. Events remember only the last reader, so each
/// call copies the variable on its own stream. Without events the user keeps the order, and could
/// not order a copy that is made in the call.
pub(crate) fn reads_in_place(rows: &Device, state: &Device) -> bool {
    let (Ok(rows), Ok(state)) = (rows.as_cuda_device(), state.as_cuda_device()) else {
        return false;
    };
    let (rows, state) = (rows.cuda_stream(), state.cuda_stream());
    let has_events = |stream: &CudaStream| stream.context().is_managing_stream_synchronization();
    rows.cu_stream() == state.cu_stream() || !has_events(&rows) || !has_events(&state)
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

// SAFETY: plain numbers in the layout of C, those of `struct NormalizeParams` in
// `kernels/params.cuh`.
unsafe impl DeviceRepr for NormalizeParams {}
// SAFETY: likewise those of `struct SumPartialsParams`.
unsafe impl DeviceRepr for SumPartialsParams {}
// SAFETY: likewise those of `struct UpdatePhiParams`.
unsafe impl DeviceRepr for UpdatePhiParams {}
// SAFETY: likewise those of `struct NormalizeBwdParams`.
unsafe impl DeviceRepr for NormalizeBwdParams {}
// SAFETY: likewise those of `struct UpdateNuParams`.
unsafe impl DeviceRepr for UpdateNuParams {}

/// A contiguous tensor's storage and layout.
type Argument<'a> = (&'a CudaStorage, &'a Layout);

/// The storage and layout of a tensor that must be on a GPU.
fn argument<'a, S: Deref<Target = Storage>>(
    (storage, layout): &'a (S, &Layout),
) -> Result<Argument<'a>> {
    match &**storage {
        Storage::Cuda(storage) => Ok((storage, layout)),
        other => candle::bail!(
            "power_norm: expected a tensor on a GPU, got one on {:?}",
            other.device().location()
        ),
    }
}

fn argument_opt<'a, S: Deref<Target = Storage>>(
    tensor: &'a Option<(S, &Layout)>,
) -> Result<Option<Argument<'a>>> {
    tensor.as_ref().map(argument).transpose()
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

/// The buffers that launches on a stream use. When this is dropped, after the launches, it records
/// an event that other streams wait for.
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

    /// The address of a contiguous tensor.
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

    /// The address of a fresh storage.
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

    fn write_slice<T>(&mut self, slice: Option<&'a mut CudaSlice<T>>) -> Address {
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

/// Runs a launch that writes a variable's storage.
struct InVariable<F>(Cell<Option<F>>);

impl<F: FnOnce(&mut CudaStorage, &Layout) -> Result<()>> InVariable<F> {
    fn run(variable: &Tensor, launch: F) -> Result<()> {
        variable.inplace_op1(&Self(Cell::new(Some(launch))))
    }
}

impl<F: FnOnce(&mut CudaStorage, &Layout) -> Result<()>> InplaceOp1 for InVariable<F> {
    fn name(&self) -> &'static str {
        "power_norm"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        candle::bail!("power_norm: expected a variable on a GPU, got one on the CPU")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        match self.0.take() {
            Some(launch) => launch(storage, layout),
            None => candle::bail!("power_norm: a step that runs twice"),
        }
    }
}
