//! Queues launches: loaded kernels, streams, and the addresses of buffers. Nothing here waits for
//! the GPU.
#![allow(unsafe_code)] // launches kernels

use super::params::{Address, Dtype, PIECE_BYTES, Vector};
use super::plan::{Entry, Extent, Launch, Limits};
use super::ptx::{Modules, kernels_copy};
use crate::device::pass::RowNorm;
use crate::error::Error;
use candle::backend::BackendStorage;
use candle::cuda_backend::cudarc::driver::sys::{CUdevice_attribute, CUfunction_attribute};
use candle::cuda_backend::cudarc::driver::{
    CudaFunction, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg,
    SyncOnDrop,
};
use candle::cuda_backend::{CudaStorageSlice, WrapErr};
use candle::{
    CpuStorage, CudaDevice, CudaStorage, DType, Device, DeviceLocation, InplaceOp1, Layout, Result,
    Storage, StorageRef, Tensor,
};
use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

/// The loaded kernels of a GPU and its limits, shared by all calls on that GPU. Looking a kernel up
/// by its name would take the host longer than launching it.
///
/// Kernels stay loaded until the process ends, even if no layer is left on the GPU, because some
/// calls have no layer that could own them: [`GroupScaling`](crate::GroupScaling) is a plain value,
/// and a folded model may contain nothing else of this crate. The price is at most one module for
/// each kernel, and that the GPU's primary context outlives candle's handles of it, because a
/// module belongs to its context. All handles of a GPU share the primary context, so the kernels
/// stay valid while handles come and go. Rust does not drop statics, so nothing calls the driver
/// when the process exits; the driver destroys the contexts of a process by itself.
#[derive(Debug)]
pub(crate) struct Kernels {
    functions: Mutex<HashMap<Entry, CudaFunction>>,
    pub limits: Limits,
}

impl Kernels {
    /// The kernels of the GPU that `device` is a handle of.
    pub fn of(device: &Device) -> Result<Arc<Self>> {
        static GPUS: Mutex<BTreeMap<usize, Arc<Kernels>>> = Mutex::new(BTreeMap::new());
        use CUdevice_attribute::*;
        let stream = device.as_cuda_device()?.cuda_stream();
        let context = stream.context();
        let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = gpus.get(&context.ordinal()) {
            return Ok(kernels.clone());
        }
        let attribute = |attribute| context.attribute(attribute).w();
        let major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let shared_bytes = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let limits = Limits {
            multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
            shared_bytes: shared_bytes as usize,
            copies: major >= 8 && kernels_copy(),
        };
        // Threads of several pieces prefetch rows into shared memory only, so at least one stage of
        // them must fit.
        if limits.copies && limits.shared_bytes < 99 << 10 {
            candle::bail!(
                "candle_powernorm: expected a GPU with 99 KiB of shared memory a block, got {} bytes: \
                 build with CUDA_COMPUTE_CAP=75",
                limits.shared_bytes
            )
        }
        let kernels = Arc::new(Self {
            functions: Mutex::default(),
            limits,
        });
        gpus.insert(context.ordinal(), kernels.clone());
        Ok(kernels)
    }

    /// The extent of a pass over x. An error for a view that kernels do not read.
    pub fn extent(&self, x: &Tensor, norm: RowNorm) -> Result<Extent> {
        // The kernels have no others.
        let dtype = Dtype::of(x.dtype())?;
        if x.is_contiguous() {
            // A pass has at least one dimension, of at least one channel.
            let cols = x.dims().last().copied().unwrap_or(1);
            let rows = x.elem_count() / cols;
            return Ok(Extent::packed(dtype, rows, cols, norm, self.limits));
        }
        match Extent::of_view(dtype, (x.dims(), x.stride()), norm, self.limits) {
            Some(extent) => Ok(extent),
            None => candle::bail!(
                "candle_powernorm: expected rows that kernels read, got {:?}",
                x.layout()
            ),
        }
    }

    /// The functions of kernels, each of which is loaded on its first use.
    fn load(&self, device: &CudaDevice, entries: &[Entry]) -> Result<Vec<(Entry, CudaFunction)>> {
        let functions = self.functions.lock();
        let mut functions = functions.unwrap_or_else(PoisonError::into_inner);
        let mut loaded = Vec::with_capacity(entries.len());
        for &entry in entries {
            let function = match functions.get(&entry) {
                Some(function) => function.clone(),
                None => {
                    let function = self.load_first(device, entry)?;
                    functions.insert(entry, function.clone());
                    function
                }
            };
            loaded.push((entry, function));
        }
        Ok(loaded)
    }

    fn load_first(&self, device: &CudaDevice, entry: Entry) -> Result<CudaFunction> {
        let name = entry.to_string();
        let Some(module) = Modules::compiled().of(&name) else {
            candle::bail!(
                "candle_powernorm: expected kernel {name} in the compiled PTX, got no such entry point: \
                 compile with another version of nvcc, and report this"
            )
        };
        // A sum over ranks may have left another GPU's context in this thread.
        device.cuda_stream().context().bind_to_thread().w()?;
        // Other crates, and other builds of this crate, keep their modules of the device in the
        // same table of candle's. The hash tells them apart.
        let mut hasher = DefaultHasher::new();
        module.hash(&mut hasher);
        let key = format!("candle_powernorm-{name}-{:016x}", hasher.finish());
        let function = device
            .get_or_load_custom_func(&name, &key, &module)
            .map_err(|error| unloadable(device, name, &error))?
            .into_cuda_function();
        // A block has 48 KiB of shared memory unless more is allowed.
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let most = self.limits.shared_bytes as i32;
        function.set_attribute(attribute, most).w()?;
        Ok(function)
    }
}

/// A GPU as one call uses it, with the stream that the call's launches are queued on.
///
/// That is the stream of the input's handle of the GPU. The layer may have been built on another
/// handle, with another stream, and nothing would order the two streams if cudarc's events are off.
pub struct Gpu {
    pub device: CudaDevice,
    pub stream: Arc<CudaStream>,
    kernels: Arc<Kernels>,
}

impl Gpu {
    pub fn of(device: &Device, kernels: &Arc<Kernels>) -> Result<Self> {
        let device = device.as_cuda_device()?.clone();
        Ok(Self {
            stream: device.cuda_stream(),
            device,
            kernels: kernels.clone(),
        })
    }

    /// Loads kernels. After that only the driver's launch itself can fail a launch of one of them.
    pub fn load(&self, entries: &[Entry]) -> Result<Loaded<'_>> {
        Ok(Loaded {
            stream: &self.stream,
            functions: self.kernels.load(&self.device, entries)?,
        })
    }
}

/// The kernels that a call launches, and the stream on which it does. A launch finds its function
/// here, without the lock of [`Kernels`].
pub struct Loaded<'a> {
    pub stream: &'a Arc<CudaStream>,
    functions: Vec<(Entry, CudaFunction)>,
}

impl Loaded<'_> {
    /// Queues a launch on the stream.
    ///
    /// Buffers may be dropped as soon as the launch is queued: they are freed in the stream's order
    /// or, if another stream frees them, after the events that [`Uses`] records. With events off,
    /// the user keeps the order of streams, as for every tensor of candle.
    ///
    /// # Safety
    ///
    /// 1. Each address in `params` is null, where `kernels/params.cuh` allows null at that field,
    ///    or the address of a buffer on this device of at least the size that is stated there.
    /// 2. Each buffer is live until this function returns. If another stream uses it too, then the
    ///    [`Uses`] that gave its address is on [`Loaded::stream`] and is dropped after this function
    ///    returns.
    /// 3. A buffer that the kernel writes overlaps no other buffer of `params`, except where
    ///    `kernels/params.cuh` says that a field is both read and written.
    /// 4. Each buffer that the kernel reads was written before, by launches on this stream or ones
    ///    that this stream waits for.
    /// 5. `launch` and the `tiling` in `params`, if the kernel has one, come from one call of a
    ///    [`LaunchPlan`](super::plan::LaunchPlan), for the number of arrays and of sums that the
    ///    addresses in `params` imply. The plan has the shape of those arrays, and x lies as in its
    ///    extent.
    pub unsafe fn launch<P: DeviceRepr>(&self, launch: &Launch<P>, params: &P) -> Result<()> {
        let entry = launch.entry();
        let Some((_, function)) = self.functions.iter().find(|(loaded, _)| *loaded == entry) else {
            candle::bail!(
                "candle_powernorm: expected kernel {entry} to be loaded, got a launch of it"
            )
        };
        let config = LaunchConfig {
            grid_dim: (launch.grid.0, launch.grid.1, 1),
            block_dim: (launch.block.0, launch.block.1, 1),
            shared_mem_bytes: launch.shared_bytes,
        };
        let mut builder = self.stream.launch_builder(function);
        builder.arg(params);
        // SAFETY: a `Launch<P>` is of a kernel whose `Params` is P. `Kernel` promises that its
        // entry points take that as their one argument, and build.rs writes the struct with the
        // layout that nvcc gives it. What the addresses must be is the caller's promise. The kernel
        // was loaded into the primary context of the GPU, which is the context of the stream.
        unsafe { builder.launch(config) }.w()?;
        Ok(())
    }

    /// Calls `launch` with the address of a tensor, which is locked so that the launch may write
    /// it.
    pub fn in_place(&self, tensor: &Tensor, launch: impl Fn(Vector) -> Result<()>) -> Result<()> {
        let stream = self.stream;
        tensor.inplace_op1(&InPlace { stream, launch })
    }
}

/// A copy of rows that kernels do not read where they are: packed, from a 16-byte boundary.
pub fn copied(rows: &Tensor) -> Result<Option<Tensor>> {
    match rows.is_contiguous() && begins_on_boundary(rows) {
        true => Ok(None),
        false => rows.detach().force_contiguous().map(Some),
    }
}

/// The same of the x of a pass that normalizes rows by themselves and has no residual. Kernels read
/// some views of it.
pub fn copied_x(kernels: &Kernels, x: &Tensor, norm: RowNorm) -> Result<Option<Tensor>> {
    let has_rows = x.elem_count() > 0;
    match has_rows && begins_on_boundary(x) && kernels.extent(x, norm).is_ok() {
        true => Ok(None),
        false => copied(x),
    }
}

/// Kernels access rows 16 bytes at a time.
fn begins_on_boundary(rows: &Tensor) -> bool {
    (rows.layout().start_offset() * rows.dtype().size_in_bytes()).is_multiple_of(PIECE_BYTES)
}

/// `true` if a call with rows on `rows` reads a variable on `state` in place instead of copying it
/// first.
///
/// One stream orders the read before a later update of the variable. With two streams cudarc's
/// events order them, but events remember only the last reader, so each call copies the variable on
/// the variable's stream, which orders all these reads. Without events the user orders the calls,
/// and could not order a copy that is made inside of one.
pub(crate) fn reads_in_place(rows: &Device, state: &Device) -> bool {
    let (Ok(rows), Ok(state)) = (rows.as_cuda_device(), state.as_cuda_device()) else {
        return false;
    };
    let (rows, state) = (rows.cuda_stream(), state.cuda_stream());
    let has_events = |stream: &CudaStream| stream.context().is_managing_stream_synchronization();
    rows.cu_stream() == state.cu_stream() || !has_events(&rows) || !has_events(&state)
}

fn unloadable(device: &CudaDevice, kernel: String, error: &candle::Error) -> candle::Error {
    let stream = device.cuda_stream();
    let (major, minor) = stream.context().compute_capability().unwrap_or_default();
    Error::Kernel {
        kernel,
        compute_capability: format!("{major}.{minor}"),
        reason: error.to_string(),
    }
    .into()
}

/// Storages that launches read, locked until the launches are queued.
///
/// candle's lock is fair: once a writer waits, such as an optimizer in `Var::set`, new readers block.
/// So that threads cannot wait for each other in a circle, every call locks in one order: arrays of
/// rows, weight, bias, and last ψ² or ν, which a step locks for writing. No call locks a storage
/// twice, because [`Pass::lay_out`](crate::device::pass::Pass::lay_out) leaves none twice.
///
/// A [`Uses`] borrows from the storages while it locks further ones. So each storage has a cell of
/// its own: a cell is filled through a shared reference, and never moves.
#[derive(Default)]
pub struct Locks<'t>([OnceCell<StorageRef<'t>>; 8]);

impl<'t> Locks<'t> {
    fn lock(&self, tensor: &'t Tensor) -> Result<&StorageRef<'t>> {
        match self.0.iter().find(|lock| lock.get().is_none()) {
            Some(lock) => Ok(lock.get_or_init(|| tensor.storage_and_layout().0)),
            None => candle::bail!("candle_powernorm: expected at most 8 tensors to read"),
        }
    }
}

/// The buffers that launches on a stream use. Drop it after the launches: it then records events,
/// for which other streams wait before they write or free the buffers.
pub struct Uses<'u, 't> {
    pub stream: &'u CudaStream,
    locks: &'u Locks<'t>,
    held: Vec<SyncOnDrop<'u>>,
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
            _ => candle::bail!("candle_powernorm: expected a storage of U8, F32, F64, F16 or BF16"),
        }
    };
}

impl<'u, 't> Uses<'u, 't> {
    pub fn on(stream: &'u CudaStream, locks: &'u Locks<'t>) -> Self {
        Self {
            stream,
            locks,
            held: vec![],
        }
    }

    /// The address of a contiguous tensor, or 0 for `None`.
    pub fn read(&mut self, tensor: Option<&'t Tensor>) -> Result<Address> {
        match tensor {
            Some(tensor) => {
                Ok(self.read_storage(tensor)? + offset(tensor.layout(), tensor.dtype())?)
            }
            None => Ok(0),
        }
    }

    /// The address of a tensor's storage.
    fn read_storage(&mut self, tensor: &'t Tensor) -> Result<Address> {
        let (own, got) = (self.stream.context().ordinal(), tensor.device().location());
        let storage = match &**self.locks.lock(tensor)? {
            Storage::Cuda(storage) if got == (DeviceLocation::Cuda { gpu_id: own }) => storage,
            _ => candle::bail!(
                "candle_powernorm: expected a tensor on GPU {own}, got one on {got:?}"
            ),
        };
        Ok(with_slice!(&storage.slice, slice => self.hold(slice.device_ptr(self.stream))))
    }

    /// The address of packed rows, or 0 for `None`.
    pub fn read_rows(&mut self, tensor: impl Into<Option<&'t Tensor>>) -> Result<Address> {
        on_boundary(self.read(tensor.into())?)
    }

    /// The address of the x of a pass, which lies as in `extent`.
    pub fn read_x(&mut self, x: &'t Tensor, extent: &Extent) -> Result<Address> {
        if extent.is_packed() {
            return self.read_rows(x);
        }
        debug_assert!(!x.is_contiguous(), "packed rows are no view");
        on_boundary(self.read_storage(x)? + start(x.layout(), x.dtype()))
    }

    /// The address and dtype of a number for each channel; or null for `None`.
    pub fn read_vector(&mut self, tensor: Option<&'t Tensor>) -> Result<Vector> {
        match tensor {
            Some(vector) => Ok(Vector {
                dtype: Dtype::of(vector.dtype())?,
                data: self.read(tensor)?,
            }),
            None => Ok(Vector::default()),
        }
    }

    /// The address and dtype of a storage that launches write; or null for `None`.
    pub fn write(&mut self, storage: impl Into<Option<&'u mut CudaStorage>>) -> Result<Vector> {
        let Some(storage) = storage.into() else {
            return Ok(Vector::default());
        };
        let (dtype, stream) = (Dtype::of(storage.dtype())?, self.stream);
        let data =
            with_slice!(&mut storage.slice, slice => self.hold(slice.device_ptr_mut(stream)));
        Ok(Vector { data, dtype })
    }

    /// Keeps a guard of cudarc's until the launches are queued.
    pub fn hold(&mut self, (address, guard): (Address, SyncOnDrop<'u>)) -> Address {
        self.held.push(guard);
        address
    }
}

/// An address that kernels access 16 bytes at a time.
fn on_boundary(rows: Address) -> Result<Address> {
    if !rows.is_multiple_of(PIECE_BYTES as Address) {
        candle::bail!(
            "candle_powernorm: expected rows that begin at a 16-byte boundary, got {rows:#x}"
        )
    }
    Ok(rows)
}

/// Bytes from the start of its storage to a tensor.
fn start(layout: &Layout, dtype: DType) -> Address {
    (layout.start_offset() * dtype.size_in_bytes()) as Address
}

/// Bytes from the start of its storage to a contiguous tensor.
fn offset(layout: &Layout, dtype: DType) -> Result<Address> {
    match layout.contiguous_offsets() {
        Some(_) => Ok(start(layout, dtype)),
        None => candle::bail!("candle_powernorm: expected a contiguous tensor, got {layout:?}"),
    }
}

/// A launch that writes a tensor in place, as an op of candle's, which locks the tensor for
/// writing.
struct InPlace<'a, F> {
    stream: &'a CudaStream,
    launch: F,
}

impl<F: Fn(Vector) -> Result<()>> InplaceOp1 for InPlace<'_, F> {
    fn name(&self) -> &'static str {
        "norm_state"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        candle::bail!("candle_powernorm: expected a tensor on a GPU, got one on the CPU")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let (offset, dtype) = (
            offset(layout, storage.dtype())?,
            Dtype::of(storage.dtype())?,
        );
        with_slice!(&mut storage.slice, slice => {
            let (start, _held) = slice.device_ptr_mut(self.stream);
            (self.launch)(Vector { data: start + offset, dtype })
        })
    }
}
