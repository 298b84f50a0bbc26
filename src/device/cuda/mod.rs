//! NVIDIA GPUs: memory, addresses and launches.
//!
//! `step.rs` has the phases of a step, `launch.rs` what they launch, in numbers, and `kernels/`
//! what runs. This file has what the phases queue their launches with. Nothing here waits for the
//! GPU.
#![allow(unsafe_code)]

mod cut;
mod launch;
mod params;
mod step;

pub(crate) use step::forward;

use crate::error::Error;
use candle::backend::BackendStorage;
use candle::cuda_backend::cudarc::driver::sys::{CUdevice_attribute, CUfunction_attribute};
use candle::cuda_backend::cudarc::driver::{
    CudaFunction, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg,
    SyncOnDrop,
};
use candle::cuda_backend::{CudaStorageSlice, WrapErr};
use candle::{
    CpuStorage, CudaDevice, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Storage,
    StorageRef, Tensor,
};
use cut::Limits;
use launch::{Kernel, Launch};
use params::{number, Address, Vector};
use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The kernels' PTX, cut up so that each kernel can be loaded as a module of its own. The driver
/// compiles all of a module when it loads one, and a training step launches four of the kernels.
struct Modules {
    /// Everything outside the entry points: version, target, and the declaration of shared memory.
    shared: String,
    /// The text of each entry point, by its name.
    entries: HashMap<&'static str, &'static str>,
}

impl Modules {
    /// The modules of the PTX that `build.rs` compiled, which is cut up on the first use.
    fn compiled() -> &'static Self {
        static MODULES: OnceLock<Modules> = OnceLock::new();
        MODULES.get_or_init(|| Modules::cut(POWER_NORM))
    }

    fn cut(ptx: &'static str) -> Self {
        const ENTRY: &str = ".visible .entry ";
        let (mut shared, mut entries) = (String::new(), HashMap::new());
        let mut rest = ptx;
        while let Some(start) = rest.find(ENTRY) {
            let (before, from_entry) = rest.split_at(start);
            let (entry, after) = from_entry.split_at(end_of_body(from_entry));
            let name = entry[ENTRY.len()..].split('(').next().unwrap_or_default();
            entries.insert(name.trim_end(), entry);
            shared += before;
            rest = after;
        }
        shared += rest;
        Self { shared, entries }
    }

    /// The PTX of a module that has this kernel and no other, if there is such a kernel.
    fn of(&self, kernel: &str) -> Option<String> {
        let entry = self.entries.get(kernel)?;
        Some(format!("{}\n{entry}\n", self.shared))
    }
}

/// Bytes of PTX up to and including the brace that closes the first body. Braces are counted,
/// because those of a vector of registers stand inside a body.
fn end_of_body(ptx: &str) -> usize {
    let (mut depth, mut line_start) = (0, 0);
    for line in ptx.split_inclusive('\n') {
        let code = line.split("//").next().unwrap_or_default();
        for (at, letter) in code.char_indices() {
            match letter {
                '{' => depth += 1,
                '}' if depth == 1 => return line_start + at + 1,
                '}' => depth -= 1,
                _ => {}
            }
        }
        line_start += line.len();
    }
    ptx.len()
}

/// The loaded kernels of a GPU, which all calls on that GPU share, and the limits that launches are
/// fitted to. Looking a kernel up by its name would take the host longer than launching it.
///
/// Kernels stay loaded until the process ends, also when no layer is left on the GPU. Some calls
/// have no layer that could own the kernels: [`GroupScaling`](crate::GroupScaling) is a plain
/// value, and in a folded model often the only thing of this crate. The price is a few modules, at
/// most one for each kernel, and that the GPU's primary context stays too, because each module
/// belongs to it. All handles of a GPU have this one context, so handles of candle that come and go
/// find the kernels still valid. Nothing is unloaded when the process exits, as Rust drops no
/// statics. The driver frees a process's contexts itself.
#[derive(Debug)]
pub(crate) struct Kernels {
    functions: Mutex<HashMap<Kernel, CudaFunction>>,
    limits: Limits,
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
        let number = |attribute| context.attribute(attribute).w();
        let limits = Limits {
            multiprocessors: number(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
            shared_bytes: number(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            copies: number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? >= 8
                && kernels_copy(POWER_NORM),
        };
        // Rows of several pieces a thread are copied into it, at least one stage of them.
        if limits.copies && limits.shared_bytes < 99 << 10 {
            candle::bail!(
                "power_norm: expected a GPU with 99 KiB of shared memory a block, got {} bytes: \
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

    fn get(&self, device: &CudaDevice, kernel: Kernel) -> Result<CudaFunction> {
        let functions = self.functions.lock();
        let mut functions = functions.unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(&kernel) {
            return Ok(function.clone());
        }
        let name = kernel.to_string();
        // A sum over ranks may have left another GPU's context in this thread.
        device.cuda_stream().context().bind_to_thread().w()?;
        // Other crates, and other builds of this crate, keep modules of the device there too.
        let Some(module) = Modules::compiled().of(&name) else {
            candle::bail!("power_norm: expected {name} among the compiled kernels, got none of it")
        };
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
        functions.insert(kernel, function.clone());
        Ok(function)
    }
}

/// The stream that a call is queued on: that of its input's handle of the GPU. Another handle, as
/// the layer's may be, can have another stream, and with cudarc's events off nothing would order
/// the two.
struct Gpu {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    kernels: Arc<Kernels>,
}

impl Gpu {
    fn of(device: &Device, kernels: &Arc<Kernels>) -> Result<Self> {
        let device = device.as_cuda_device()?.clone();
        Ok(Self {
            stream: device.cuda_stream(),
            device,
            kernels: kernels.clone(),
        })
    }

    /// Loads kernels. Nothing but the driver's launch can fail a launch of one after that.
    fn load(&self, kernels: &[Kernel]) -> Result<()> {
        for kernel in kernels {
            self.kernels.get(&self.device, *kernel)?;
        }
        Ok(())
    }

    /// Queues a launch on the device's stream. Once it is queued, its buffers are safe: they are
    /// freed in the stream's order or, if another stream frees them, after the events that [`Uses`]
    /// records. With events off, the user keeps the order across streams, as for every tensor of
    /// candle.
    ///
    /// # Safety
    /// `params` is the struct that the kernel takes. Until the call returns, each address in it is
    /// 0 where `kernels/params.cuh` allows null, or the address of a live buffer on this device.
    /// The buffer is as large as it says there.
    unsafe fn launch<P: DeviceRepr>(&self, launch: &Launch, params: &P) -> Result<()> {
        let kernel = self.kernels.get(&self.device, launch.kernel)?;
        let config = LaunchConfig {
            grid_dim: (launch.grid.0, launch.grid.1, 1),
            block_dim: (launch.block.0, launch.block.1, 1),
            shared_mem_bytes: launch.shared_bytes,
        };
        let mut builder = self.stream.launch_builder(&kernel);
        builder.arg(params);
        // The kernel belongs to the stream's context, which is the GPU's primary context.
        // SAFETY: by the caller's promise. Rust and nvcc lay the struct out as one, as build.rs
        // writes it from the header, and `LaunchPlan` cuts grid, block and shared memory to it, as
        // the tests on softgpu check.
        unsafe { builder.launch(config) }.w()?;
        Ok(())
    }

    /// Runs `launch` on a tensor that it writes in place.
    fn in_place(&self, tensor: &Tensor, launch: impl FnMut(Vector) -> Result<()>) -> Result<()> {
        tensor.inplace_op1(&InPlace {
            stream: &self.stream,
            launch: RefCell::new(launch),
        })
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

/// `true` for kernels of GPUs that copy into shared memory. A later GPU may run older kernels.
fn kernels_copy(ptx: &str) -> bool {
    let target = ptx.split(".target sm_").nth(1).unwrap_or_default();
    let digits = target.split(|c: char| !c.is_ascii_digit()).next();
    digits.and_then(|digits| digits.parse().ok()) >= Some(80)
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

/// The tensors that launches read, locked until the launches are queued. A tensor has a cell, so
/// that it can be locked while others are in use.
#[derive(Default)]
struct Locks<'t>([OnceCell<StorageRef<'t>>; 8]);

impl<'t> Locks<'t> {
    fn lock(&self, tensor: &'t Tensor) -> Result<&StorageRef<'t>> {
        match self.0.iter().find(|lock| lock.get().is_none()) {
            Some(lock) => Ok(lock.get_or_init(|| tensor.storage_and_layout().0)),
            None => candle::bail!("power_norm: expected at most 8 tensors to read"),
        }
    }
}

/// The buffers that launches on a stream use. When this is dropped, after the launches, it records
/// an event that other streams wait for.
struct Uses<'u, 't> {
    stream: &'u CudaStream,
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
            _ => candle::bail!("power_norm: expected a storage of U8, F32, F64, F16 or BF16"),
        }
    };
}

impl<'u, 't> Uses<'u, 't> {
    fn on(stream: &'u CudaStream, locks: &'u Locks<'t>) -> Self {
        Self {
            stream,
            locks,
            held: vec![],
        }
    }

    /// The address of a contiguous tensor, or 0.
    fn read(&mut self, tensor: Option<&'t Tensor>) -> Result<Address> {
        let Some(tensor) = tensor else {
            return Ok(0);
        };
        let Storage::Cuda(storage) = &**self.locks.lock(tensor)? else {
            let location = tensor.device().location();
            candle::bail!("power_norm: expected a tensor on a GPU, got one on {location:?}")
        };
        let start = with_slice!(&storage.slice, slice => self.hold(slice.device_ptr(self.stream)));
        Ok(start + offset(tensor.layout(), tensor.dtype())?)
    }

    /// [`read`](Self::read), of rows that kernels take 16 bytes at a time.
    fn read_rows(&mut self, tensor: impl Into<Option<&'t Tensor>>) -> Result<Address> {
        let start = self.read(tensor.into())?;
        if !start.is_multiple_of(16) {
            candle::bail!("power_norm: expected rows from a 16-byte boundary on, got {start:#x}")
        }
        Ok(start)
    }

    /// [`read`](Self::read), of numbers of channels, which may have any dtype.
    fn read_vector(&mut self, tensor: Option<&'t Tensor>) -> Result<Vector> {
        match tensor {
            Some(numbers) => Ok(Vector {
                dtype: number(numbers.dtype())?,
                data: self.read(tensor)?,
            }),
            None => Ok(Vector::default()),
        }
    }

    /// The address of a storage that launches write, or 0.
    fn write(&mut self, storage: impl Into<Option<&'u mut CudaStorage>>) -> Result<Vector> {
        let Some(storage) = storage.into() else {
            return Ok(Vector::default());
        };
        let (dtype, stream) = (number(storage.dtype())?, self.stream);
        let data =
            with_slice!(&mut storage.slice, slice => self.hold(slice.device_ptr_mut(stream)));
        Ok(Vector { data, dtype })
    }

    fn hold(&mut self, (address, guard): (Address, SyncOnDrop<'u>)) -> Address {
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

/// A launch that writes a tensor in place. It is given the tensor's address. candle calls an op once
/// and by a shared reference.
struct InPlace<'a, F> {
    stream: &'a CudaStream,
    launch: RefCell<F>,
}

impl<F: FnMut(Vector) -> Result<()>> InplaceOp1 for InPlace<'_, F> {
    fn name(&self) -> &'static str {
        "power_norm"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        candle::bail!("power_norm: expected a tensor on a GPU, got one on the CPU")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let (offset, dtype) = (offset(layout, storage.dtype())?, number(storage.dtype())?);
        with_slice!(&mut storage.slice, slice => {
            let (start, _held) = slice.device_ptr_mut(self.stream);
            (self.launch.borrow_mut())(Vector { data: start + offset, dtype })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const ENTRY: &str = ".entry ";

    /// Every entry point of `kernels/power_norm.cu` has a module, and the module has no other.
    #[test]
    fn every_kernel_has_a_module_of_its_own() {
        let source = include_str!("../../../kernels/power_norm.cu");
        let defined: BTreeSet<&str> = source
            .lines()
            .filter_map(|line| line.trim().strip_prefix("DEFINE(")?.split(',').next())
            .collect();
        assert!(!defined.is_empty());
        let modules = Modules::compiled();
        assert_eq!(
            modules.entries.keys().copied().collect::<BTreeSet<_>>(),
            defined
        );
        for kernel in defined {
            let module = modules.of(kernel).unwrap();
            let entries: Vec<&str> = module.split(ENTRY).skip(1).collect();
            assert_eq!(entries.len(), 1, "{kernel}");
            let name = entries[0].split('(').next();
            assert_eq!(name, Some(kernel));
            assert!(module.trim_start().starts_with("//") && module.contains(".version"));
            // Its body is whole.
            assert!(entries[0].contains("ret;"), "{kernel}");
            let count = |brace| module.matches(brace).count();
            assert_eq!(count('{'), count('}'), "{kernel}");
        }
        assert_eq!(modules.of("normalize_f32"), None);
    }

    /// Where braces stand does not matter, and what is between entry points is for all of them.
    #[test]
    fn ptx_is_cut_by_its_braces() {
        let ptx = ".version 8.0\n.visible .entry one()\n{ { mov.v2 {%r1, %r2}, x; // }\n } }\n\
            .global .b32 number;\n.visible .entry two (.param .u64 p)\n{ ret; }";
        let modules = Modules::cut(ptx);
        assert_eq!(modules.shared, ".version 8.0\n\n.global .b32 number;\n");
        let [one, two] = ["one", "two"].map(|name| modules.entries[name]);
        assert!(
            one.starts_with(".visible .entry one()") && one.ends_with("// }\n } }"),
            "{one}"
        );
        assert!(two.ends_with("{ ret; }"), "{two}");
        assert_eq!(modules.entries.len(), 2);
    }
}
