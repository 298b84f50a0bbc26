//! The driver's functions: devices, contexts, streams, events, memory, modules and launches.

use crate::control::{entries, is_planted, put, Error, Handles, Mistake, Outcome};
use crate::graph::{self, Capture};
use crate::grid::{self, Launch};
use crate::memory::Clock;
use crate::ptx::Module;
use crate::stream::{engine, number_from, Action, Manner, Step, Submission};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_char, c_void, CStr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

/// A stream, as a call names it.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    /// Its number in the engine.
    pub id: u32,
    pub device: i32,
    pub manner: Manner,
}

/// What an event stands for.
#[derive(Clone, Default)]
enum Recorded {
    /// Nothing: whoever waits for it goes on.
    #[default]
    Never,
    /// A point in a stream's work, and when the host put it there.
    Point(Clock, Instant),
    /// Nodes of a capture.
    Nodes(Arc<Capture>, Vec<usize>),
}

pub struct Event {
    device: i32,
    recorded: Mutex<Recorded>,
}

/// A module in a device's memory.
pub struct Loaded {
    module: Arc<Module>,
    device: i32,
    /// Where its variables are. 0: it has none.
    globals: u64,
    /// Handles of its functions.
    functions: Mutex<HashMap<String, u64>>,
}

/// An entry of a module.
pub struct Function {
    loaded: Arc<Loaded>,
    name: String,
    entry: usize,
    /// Offsets and sizes of its parameters, and their bytes in all.
    parameters: Vec<(usize, usize)>,
    parameter_bytes: usize,
    static_shared: usize,
    max_threads: u32,
    /// Bytes of dynamic shared memory that it may have.
    dynamic_shared: AtomicU32,
}

pub static STREAMS: Handles<Stream> = Handles::new(2);
pub static EVENTS: Handles<Arc<Event>> = Handles::new(3);
pub static MODULES: Handles<Arc<Loaded>> = Handles::new(4);
static FUNCTIONS: Handles<Arc<Function>> = Handles::new(7);
/// How often each device's context is retained.
static CONTEXTS: Mutex<BTreeMap<i32, u64>> = Mutex::new(BTreeMap::new());
/// Page-locked host memory: addresses and sizes.
static PINNED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());
static INITIALISED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static CURRENT: Cell<Option<i32>> = const { Cell::new(None) };
    static OWN_STREAMS: RefCell<OwnStreams> = RefCell::default();
}

/// A thread's default streams, by device.
#[derive(Default)]
struct OwnStreams(HashMap<i32, Stream>);

impl Drop for OwnStreams {
    fn drop(&mut self) {
        for stream in self.0.values() {
            engine().destroy_stream(stream.id);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Devices that there are: `SOFTGPU_DEVICES`, else one.
pub fn device_count() -> i32 {
    static COUNT: OnceLock<i32> = OnceLock::new();
    *COUNT.get_or_init(|| number_from("SOFTGPU_DEVICES").unwrap_or(1).clamp(1, 64) as i32)
}

/// Contexts that are retained.
pub fn contexts() -> u64 {
    lock(&CONTEXTS).len() as u64
}

fn check_device(device: i32) -> Outcome {
    if !INITIALISED.load(Relaxed) {
        return Err(Error::NOT_INITIALIZED);
    }
    match (0..device_count()).contains(&device) {
        true => Ok(()),
        false => Err(Error::INVALID_DEVICE),
    }
}

/// Contexts have handles of kind 1, which name the device.
fn context_handle(device: i32) -> u64 {
    1 << 40 | (device as u64 + 1) << 4
}

fn device_of_context(context: u64) -> Outcome<i32> {
    let device = (context >> 4 & 0xff) as i32 - 1;
    let known = lock(&CONTEXTS).contains_key(&device) && context == context_handle(device);
    known.then_some(device).ok_or(Error::INVALID_CONTEXT)
}

/// The device whose context is current.
pub fn current_device() -> Outcome<i32> {
    CURRENT.get().ok_or(Error::INVALID_CONTEXT)
}

fn legacy_stream(device: i32) -> Stream {
    static STREAMS: Mutex<BTreeMap<i32, Stream>> = Mutex::new(BTreeMap::new());
    *lock(&STREAMS).entry(device).or_insert_with(|| Stream {
        id: engine().new_stream(device, Manner::Legacy),
        device,
        manner: Manner::Legacy,
    })
}

/// The stream that a handle names. 0 and 1 are the legacy stream of the current device, 2 is the
/// thread's own.
pub fn stream(handle: u64) -> Outcome<Stream> {
    match handle {
        0 | 1 => Ok(legacy_stream(current_device()?)),
        2 => {
            let device = current_device()?;
            Ok(OWN_STREAMS.with(|own| {
                *own.borrow_mut().0.entry(device).or_insert_with(|| Stream {
                    id: engine().new_stream(device, Manner::Blocking),
                    device,
                    manner: Manner::Blocking,
                })
            }))
        }
        handle => STREAMS.get(handle),
    }
}

/// Queues work in a stream, or adds it to the capture in which the stream is.
pub fn submit(stream: &Stream, submission: Submission) -> Outcome {
    if let Some(capture) = graph::of(stream) {
        return capture.add(stream, submission);
    }
    if stream.manner == Manner::Legacy {
        graph::legacy_call(stream.device)?;
    }
    Ok(engine().submit(stream.id, submission)?)
}

/// Waits for what is queued in a stream.
fn synchronize(stream: &Stream) -> Outcome {
    let position = engine().position(stream.id);
    Ok(engine().synchronize(&position, stream.device)?)
}

/// Waits for all streams of a device, as some calls do silently.
pub fn synchronize_device(device: i32) -> Outcome {
    graph::device_wide_call(device)?;
    Ok(engine().synchronize_device(device)?)
}

/// Does something that has no stream: after all that blocking streams hold, and before the call
/// returns.
fn at_once(submission: Submission) -> Outcome {
    graph::unsafe_call()?;
    let stream = legacy_stream(current_device()?);
    submit(&stream, submission)?;
    synchronize(&stream)
}

fn is_pinned(address: usize) -> bool {
    let pinned = lock(&PINNED);
    let found = pinned.range(..=address).next_back();
    found.is_some_and(|(start, size)| address < start + size)
}

/// A copy from the host. Memory that is not page-locked is read now, other memory when the copy
/// runs.
///
/// # Safety
///
/// `from` has `bytes` bytes; until the copy has run, if it is page-locked.
unsafe fn upload(name: &str, to: u64, from: *const c_void, bytes: usize) -> Submission {
    if bytes > 0 && is_pinned(from as usize) {
        let from = from as usize;
        return Submission::new(name, move |memory, work| {
            // SAFETY: the caller keeps it until the copy has run.
            let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) };
            view(memory, work).upload(to, bytes)
        });
    }
    let staged: Arc<[u8]> = match bytes {
        0 => [].into(),
        // SAFETY: as this function asks.
        _ => unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.into(),
    };
    Submission::new(name, move |memory, work| {
        view(memory, work).upload(to, &staged)
    })
}

/// A copy to the host.
///
/// # Safety
///
/// `to` has room for `bytes` bytes until the copy has run.
unsafe fn download(name: &str, to: *mut c_void, from: u64, bytes: usize) -> Submission {
    let to = to as usize;
    Submission::new(name, move |memory, work| {
        let data = view(memory, work).download(from, bytes as u64)?;
        // SAFETY: the caller keeps room for it until the copy has run.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to as *mut u8, bytes) };
        Ok(())
    })
}

/// The way of work that is no kernel into the memory.
pub fn view(
    memory: &Arc<crate::memory::Memory>,
    work: &Arc<crate::memory::Work>,
) -> crate::memory::View {
    crate::memory::View::new(memory.clone(), work.clone(), 0)
}

fn copy(name: &str, to: u64, from: u64, bytes: usize) -> Submission {
    Submission::new(name, move |memory, work| {
        view(memory, work).copy(to, from, bytes as u64)
    })
}

fn fill(name: &str, to: u64, pattern: &[u8], count: usize) -> Submission {
    let pattern = pattern.to_vec();
    Submission::new(name, move |memory, work| {
        view(memory, work).fill(to, &pattern, count as u64)
    })
}

/// A device attribute of an H100, but for what the environment says.
fn attribute(number: u32) -> i32 {
    match number {
        // Threads of a block, its dimensions, and those of a grid.
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        // Shared memory of a block, constant memory, lanes, registers of a block.
        8 => SHARED as i32,
        9 => 65536,
        10 => 32,
        12 | 82 => 65536,
        // kHz of the multiprocessors and of the memory, and the bits of its bus.
        13 => 1_980_000,
        36 => 2_619_000,
        37 => 5120,
        16 => number_from("SOFTGPU_SMS").map_or(132, |sms| sms as i32),
        // Bytes of the L2 cache, threads of a multiprocessor, copy engines.
        38 => 50 << 20,
        39 => 2048,
        40 => 3,
        // Copies beside kernels, mapped host memory, kernels side by side, one address space,
        // priorities, cooperation.
        15 | 19 | 31 | 41 | 78 | 95 => 1,
        75 => 9,
        // Shared memory of a multiprocessor, of a block that asks, and what the driver keeps;
        // blocks.
        81 => (shared_on_request() + RESERVED) as i32,
        97 => shared_on_request() as i32,
        111 => RESERVED as i32,
        106 => 32,
        // Memory pools.
        115 => 1,
        _ => 0,
    }
}

/// Bytes of shared memory of a block, and what the driver keeps of a multiprocessor's for each.
const SHARED: u32 = 48 << 10;
const RESERVED: u32 = 1 << 10;

/// Bytes of shared memory of a block whose function asks for more.
fn shared_on_request() -> u32 {
    number_from("SOFTGPU_SHARED_KIB").map_or(227, |kib| kib as u32) << 10
}

/// Bytes that a device says it has.
const DEVICE_MEMORY: u64 = 80 << 30;

fn load(text: &str) -> Outcome<u64> {
    let device = current_device()?;
    let module = edited(parsed(text)?)?;
    let (size, _) = module.globals();
    let memory = &engine().memory;
    let mut globals = 0;
    if size > 0 {
        globals = memory
            .allocate(size as u64, device, None)
            .ok_or(Error::OUT_OF_MEMORY)?;
        let initial = module.initial_globals(globals);
        let loader = engine().new_stream(device, Manner::NonBlocking);
        let upload = Submission::new("cuModuleLoadData", move |memory, work| {
            view(memory, work).upload(globals, &initial)
        });
        let done = engine()
            .submit(loader, upload.always())
            .and_then(|()| engine().synchronize(&engine().position(loader), device));
        engine().destroy_stream(loader);
        done?;
    }
    Ok(MODULES.add(Arc::new(Loaded {
        module,
        device,
        globals,
        functions: Mutex::default(),
    })))
}

/// Parses PTX, or finds what it became before: each device of a program loads the same.
fn parsed(text: &str) -> Outcome<Arc<Module>> {
    static PARSED: Mutex<BTreeMap<String, Weak<Module>>> = Mutex::new(BTreeMap::new());
    let mut all = lock(&PARSED);
    if let Some(module) = all.get(text).and_then(Weak::upgrade) {
        return Ok(module);
    }
    all.retain(|_, module| module.strong_count() > 0);
    match Module::parse(text) {
        Ok(module) => {
            let module = Arc::new(module);
            all.insert(text.into(), Arc::downgrade(&module));
            Ok(module)
        }
        Err(error) => {
            eprintln!("softgpu: this PTX is not understood: {error}");
            Err(Error::INVALID_PTX)
        }
    }
}

/// The PTX in the file `SOFTGPU_PTX` instead of a module that defines all its entries: an edited
/// kernel runs without a rebuild.
fn edited(module: Arc<Module>) -> Outcome<Arc<Module>> {
    let Some(file) = std::env::var_os("SOFTGPU_PTX") else {
        return Ok(module);
    };
    let text = std::fs::read_to_string(&file).map_err(|error| {
        eprintln!("softgpu: SOFTGPU_PTX names {file:?}, which cannot be read: {error}");
        Error::FILE_NOT_FOUND
    })?;
    let edited = parsed(&text)?;
    let replaces = edited.entries().all(|name| module.entry(name).is_some());
    Ok(if replaces { edited } else { module })
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if self.globals != 0 {
            // The module's own memory; launches that are queued keep the module.
            let _ = engine().memory.free(self.globals, None);
        }
    }
}

/// The functions of a module go with it.
fn unload(handle: u64) -> Outcome {
    let loaded = MODULES.remove(handle)?;
    for function in lock(&loaded.functions).drain().map(|(_, handle)| handle) {
        FUNCTIONS.remove(function)?;
    }
    Ok(())
}

fn function_named(module: u64, name: &str) -> Outcome<u64> {
    let loaded = MODULES.get(module)?;
    if let Some(&handle) = lock(&loaded.functions).get(name) {
        return Ok(handle);
    }
    let entry = loaded.module.entry(name).ok_or(Error::NOT_FOUND)?;
    let parameters = loaded.module.parameters(entry);
    let handle = FUNCTIONS.add(Arc::new(Function {
        name: name.into(),
        entry,
        parameter_bytes: parameters
            .iter()
            .map(|(at, size)| at + size)
            .max()
            .unwrap_or(0),
        parameters,
        static_shared: loaded.module.static_shared(entry),
        max_threads: loaded.module.max_threads(entry),
        dynamic_shared: AtomicU32::new(
            SHARED.saturating_sub(loaded.module.static_shared(entry) as u32),
        ),
        loaded: loaded.clone(),
    }));
    lock(&loaded.functions).insert(name.into(), handle);
    Ok(handle)
}

/// Packs a launch's arguments as the entry takes them.
///
/// # Safety
///
/// `arguments` has a pointer for each parameter, to as many bytes as the parameter has.
unsafe fn pack(function: &Function, arguments: *const *const c_void) -> Outcome<Vec<u8>> {
    let mut packed = vec![0; function.parameter_bytes];
    if arguments.is_null() && !function.parameters.is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    for (i, &(at, size)) in function.parameters.iter().enumerate() {
        // SAFETY: as this function asks.
        let argument = unsafe { *arguments.add(i) };
        if argument.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: as this function asks; `packed` reaches to the end of the last parameter.
        unsafe {
            std::ptr::copy_nonoverlapping(argument.cast(), packed.as_mut_ptr().add(at), size);
        }
    }
    Ok(packed)
}

/// The size of a launch.
struct Shape {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
}

impl Shape {
    /// Whether a device has room for it.
    fn check(&self, function: &Function) -> Outcome {
        let threads: u64 = self.block.iter().map(|&n| u64::from(n)).product();
        let [x, y, z] = self.grid;
        let fits = x > 0
            && x <= i32::MAX as u32
            && (1..=65535).contains(&y)
            && (1..=65535).contains(&z)
            && threads > 0
            && self.block[2] <= 64
            && threads <= 1024
            && self.shared_bytes <= function.dynamic_shared.load(Relaxed);
        if !fits {
            return Err(Error::INVALID_VALUE);
        }
        // What `.maxntid` excludes lacks registers.
        match threads <= u64::from(function.max_threads) {
            true => Ok(()),
            false => Err(Error(701)),
        }
    }
}

fn launch(function: &Arc<Function>, shape: Shape, parameters: Vec<u8>) -> Submission {
    let Shape {
        mut grid,
        block,
        shared_bytes,
    } = shape;
    if is_planted(Mistake::ShortGrid) {
        if let Some(last) = grid.iter_mut().rev().find(|n| **n > 1) {
            *last -= 1;
        }
    }
    let mut parameters = parameters;
    if is_planted(Mistake::SwappedArguments) {
        swap_arguments(&function.parameters, &mut parameters);
    }
    let loaded = function.loaded.clone();
    let launch = Launch {
        module: loaded.module.clone(),
        entry: function.entry,
        globals: loaded.globals,
        grid,
        block,
        shared_bytes,
        parameters,
    };
    let action: Action = Arc::new(move |memory, work| {
        // The module's variables live until its last launch has run.
        let _ = &loaded;
        grid::run(&launch, memory, work, engine().conditions(work)).map(Some)
    });
    let blocks: u64 = grid.iter().map(|&n| u64::from(n)).product();
    Submission {
        name: function.name.clone(),
        blocks: blocks.min(u64::from(u32::MAX)) as u32,
        launch: true,
        always: false,
        step: Step::Run(action),
    }
}

fn swap_arguments(parameters: &[(usize, usize)], bytes: &mut [u8]) {
    for pair in parameters.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        if first.1 == second.1 {
            for i in 0..first.1 {
                bytes.swap(first.0 + i, second.0 + i);
            }
            return;
        }
    }
}

fn allocate(size: usize, stream: Option<&Stream>) -> Outcome<u64> {
    let mut size = size as u64;
    if is_planted(Mistake::ShortAllocation) {
        size = size.saturating_sub(4);
    }
    let memory = &engine().memory;
    let room = DEVICE_MEMORY * device_count() as u64;
    if memory.live().1 + size > room && !memory.is_sparse() {
        return Err(Error::OUT_OF_MEMORY);
    }
    let (device, place) = match stream {
        Some(stream) => {
            if let Some(capture) = graph::of(stream) {
                return capture.allocate(stream, size);
            }
            (stream.device, Some(engine().take_place(stream.id)?))
        }
        None => {
            let device = current_device()?;
            engine().check_device(device)?;
            (device, None)
        }
    };
    memory
        .allocate(size, device, place)
        .ok_or(Error::OUT_OF_MEMORY)
}

/// The end of an allocation, in the order of a stream.
fn free(address: u64) -> Submission {
    Submission::new("cuMemFreeAsync", move |memory, work| {
        memory.free(address, Some(work))
    })
    .always()
}

fn new_stream(flags: u32) -> Outcome<u64> {
    let device = current_device()?;
    let manner = match flags {
        0 => Manner::Blocking,
        1 => Manner::NonBlocking,
        _ => return Err(Error::INVALID_VALUE),
    };
    let id = engine().new_stream(device, manner);
    Ok(STREAMS.add(Stream { id, device, manner }))
}

/// A text in a C string.
///
/// # Safety
///
/// It is null or ends with a zero.
unsafe fn c_text<'a>(text: *const c_char) -> Outcome<&'a str> {
    if text.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: as this function asks.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Error::INVALID_PTX)
}

/// Blocks of a function that fit on a multiprocessor, by threads and shared memory; registers are
/// not known.
fn resident_blocks(function: &Function, threads: i32, dynamic: usize) -> i32 {
    if threads <= 0 || threads as u32 > function.max_threads {
        return 0;
    }
    let warps = (threads as u32).div_ceil(32);
    // A block takes another KiB of shared memory for the driver.
    let shared = function.static_shared + dynamic + 1024;
    (64 / warps).min(((228 << 10) / shared) as u32).min(32) as i32
}

entries! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        engine();
        INITIALISED.store(true, Relaxed);
        Ok(())
    }

    fn cuDriverGetVersion(version: *mut i32) {
        put(version, 13000)
    }

    fn cuGetErrorName(error: i32, name: *mut *const c_char) {
        put(name, Error(error).name().as_ptr())
    }

    fn cuGetErrorString(error: i32, text: *mut *const c_char) {
        put(text, Error(error).name().as_ptr())
    }

    fn cuDeviceGet(device: *mut i32, ordinal: i32) {
        check_device(ordinal)?;
        put(device, ordinal)
    }

    fn cuDeviceGetCount(count: *mut i32) {
        check_device(0)?;
        put(count, device_count())
    }

    fn cuDeviceGetAttribute(value: *mut i32, number: u32, device: i32) {
        check_device(device)?;
        put(value, attribute(number))
    }

    fn cuDeviceGetName(name: *mut c_char, room: i32, device: i32) {
        check_device(device)?;
        let text = b"softgpu H100\0";
        if name.is_null() || (room as usize) < text.len() {
            return Err(Error::INVALID_VALUE);
        }
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len());
        Ok(())
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) {
        check_device(device)?;
        put(bytes, DEVICE_MEMORY as usize)
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        current_device()?;
        let used = engine().memory.live().1;
        put(free, DEVICE_MEMORY.saturating_sub(used) as usize)?;
        put(total, DEVICE_MEMORY as usize)
    }

    fn cuDevicePrimaryCtxRetain(context: *mut u64, device: i32) {
        check_device(device)?;
        *lock(&CONTEXTS).entry(device).or_default() += 1;
        put(context, context_handle(device))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        check_device(device)?;
        let mut all = lock(&CONTEXTS);
        let Some(retained) = all.get_mut(&device) else {
            return Err(Error::INVALID_CONTEXT);
        };
        *retained -= 1;
        if *retained == 0 {
            all.remove(&device);
            drop(all);
            // Its end waits for the work; that work faulted is for who waited before.
            let _ = engine().synchronize_device(device);
        }
        Ok(())
    }

    /// No context but a device's primary one can be made, so there is none to destroy.
    fn cuCtxDestroy_v2(_context: u64) {
        Err(Error::INVALID_CONTEXT)
    }

    fn cuCtxGetCurrent(context: *mut u64) {
        put(context, CURRENT.get().map_or(0, context_handle))
    }

    fn cuCtxSetCurrent(context: u64) {
        CURRENT.set(match context {
            0 => None,
            context => Some(device_of_context(context)?),
        });
        Ok(())
    }

    fn cuCtxGetDevice(device: *mut i32) {
        put(device, current_device()?)
    }

    fn cuCtxSynchronize() {
        synchronize_device(current_device()?)
    }

    fn cuStreamCreate(handle: *mut u64, flags: u32) {
        put(handle, new_stream(flags)?)
    }

    fn cuStreamCreateWithPriority(handle: *mut u64, flags: u32, _priority: i32) {
        put(handle, new_stream(flags)?)
    }

    fn cuStreamDestroy_v2(handle: u64) {
        let stream = STREAMS.remove(handle)?;
        if let Some(capture) = graph::of(&stream) {
            capture.invalidate();
        }
        engine().destroy_stream(stream.id);
        Ok(())
    }

    fn cuStreamSynchronize(handle: u64) {
        let stream = stream(handle)?;
        graph::stream_call(&stream)?;
        if stream.manner == Manner::Legacy {
            graph::legacy_call(stream.device)?;
        }
        synchronize(&stream)
    }

    fn cuStreamQuery(handle: u64) {
        let stream = stream(handle)?;
        graph::stream_call(&stream)?;
        graph::unsafe_call()?;
        engine().check_device(stream.device)?;
        if engine().is_complete(&engine().position(stream.id)) {
            return Ok(());
        }
        engine().advance();
        Err(Error::NOT_READY)
    }

    fn cuStreamWaitEvent(handle: u64, event: u64, _flags: u32) {
        let stream = stream(handle)?;
        let recorded = lock(&EVENTS.get(event)?.recorded).clone();
        if is_planted(Mistake::MissingWait) {
            return Ok(());
        }
        match (graph::of(&stream), recorded) {
            (_, Recorded::Never) => Ok(()),
            (None, Recorded::Point(clock, _)) => {
                engine().wait(stream.id, &clock);
                Ok(())
            }
            (Some(capture), Recorded::Point(..)) => {
                // The graph would depend on work outside of it.
                capture.invalidate();
                Err(Error::CAPTURE_ISOLATION)
            }
            (_, Recorded::Nodes(theirs, _)) if !theirs.is_active() => Err(Error::CAPTURED_EVENT),
            (Some(capture), Recorded::Nodes(theirs, _)) if !Arc::ptr_eq(&capture, &theirs) => {
                capture.invalidate();
                theirs.invalidate();
                Err(Error::CAPTURE_MERGE)
            }
            (None, Recorded::Nodes(..)) if stream.manner == Manner::Legacy => {
                Err(Error::CAPTURE_IMPLICIT)
            }
            (_, Recorded::Nodes(theirs, nodes)) => theirs.wait(&stream, &nodes),
        }
    }

    fn cuEventCreate(handle: *mut u64, _flags: u32) {
        let device = current_device()?;
        put(handle, EVENTS.add(Arc::new(Event { device, recorded: Mutex::default() })))
    }

    fn cuEventDestroy_v2(handle: u64) {
        EVENTS.remove(handle)?;
        Ok(())
    }

    fn cuEventRecord(handle: u64, stream_handle: u64) {
        let event = EVENTS.get(handle)?;
        let stream = stream(stream_handle)?;
        if event.device != stream.device {
            return Err(Error::INVALID_HANDLE);
        }
        let recorded = match graph::of(&stream) {
            Some(capture) => {
                let nodes = capture.position(&stream)?;
                Recorded::Nodes(capture, nodes)
            }
            None => {
                engine().check_device(stream.device)?;
                Recorded::Point(engine().position(stream.id), Instant::now())
            }
        };
        *lock(&event.recorded) = recorded;
        Ok(())
    }

    fn cuEventSynchronize(handle: u64) {
        let event = EVENTS.get(handle)?;
        let recorded = lock(&event.recorded).clone();
        match recorded {
            Recorded::Never => Ok(()),
            Recorded::Point(clock, _) => {
                graph::unsafe_call()?;
                Ok(engine().synchronize(&clock, event.device)?)
            }
            Recorded::Nodes(capture, _) => {
                capture.invalidate();
                Err(Error::CAPTURED_EVENT)
            }
        }
    }

    fn cuEventQuery(handle: u64) {
        let event = EVENTS.get(handle)?;
        let recorded = lock(&event.recorded).clone();
        match recorded {
            Recorded::Never => Ok(()),
            Recorded::Point(clock, _) => {
                graph::unsafe_call()?;
                engine().check_device(event.device)?;
                if engine().is_complete(&clock) {
                    return Ok(());
                }
                engine().advance();
                Err(Error::NOT_READY)
            }
            Recorded::Nodes(capture, _) => {
                capture.invalidate();
                Err(Error::CAPTURED_EVENT)
            }
        }
    }

    /// The time of the host between the two records: nothing here knows how long a GPU would take.
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: u64, end: u64) {
        let (start, end) = (EVENTS.get(start)?, EVENTS.get(end)?);
        let (start, end) = (lock(&start.recorded).clone(), lock(&end.recorded).clone());
        match (start, end) {
            (Recorded::Point(_, start), Recorded::Point(clock, end)) => {
                if !engine().is_complete(&clock) {
                    return Err(Error::NOT_READY);
                }
                put(milliseconds, end.saturating_duration_since(start).as_secs_f32() * 1e3)
            }
            _ => Err(Error::INVALID_HANDLE),
        }
    }

    fn cuMemAlloc_v2(address: *mut u64, size: usize) {
        graph::unsafe_call()?;
        if size == 0 {
            return Err(Error::INVALID_VALUE);
        }
        put(address, allocate(size, None)?)
    }

    fn cuMemAllocAsync(address: *mut u64, size: usize, handle: u64) {
        let stream = stream(handle)?;
        put(address, allocate(size, Some(&stream))?)
    }

    fn cuMemFree_v2(address: u64) {
        graph::unsafe_call()?;
        if address == 0 {
            return Ok(());
        }
        let Some((device, _)) = engine().memory.allocation(address) else {
            return Err(Error::INVALID_VALUE);
        };
        synchronize_device(device)?;
        engine().memory.free(address, None).map_err(|_| Error::INVALID_VALUE)
    }

    fn cuMemFreeAsync(address: u64, handle: u64) {
        let stream = stream(handle)?;
        if address == 0 {
            return Ok(());
        }
        if let Some(capture) = graph::of(&stream) {
            return capture.free(&stream, address);
        }
        if graph::free_kept(&stream, address)? {
            return Ok(());
        }
        if engine().memory.allocation(address).is_none() {
            return Err(Error::INVALID_VALUE);
        }
        if is_planted(Mistake::EarlyFree) {
            return engine().memory.free(address, None).map_err(|_| Error::INVALID_VALUE);
        }
        submit(&stream, free(address))
    }

    fn cuMemHostAlloc(address: *mut *mut c_void, size: usize, _flags: u32) {
        graph::unsafe_call()?;
        current_device()?;
        let new = libc::aligned_alloc(4096, size.next_multiple_of(4096));
        if new.is_null() {
            return Err(Error::OUT_OF_MEMORY);
        }
        lock(&PINNED).insert(new as usize, size);
        put(address, new)
    }

    fn cuMemFreeHost(address: *mut c_void) {
        graph::unsafe_call()?;
        lock(&PINNED).remove(&(address as usize)).ok_or(Error::INVALID_VALUE)?;
        // Copies from it or to it may be queued.
        synchronize_device(current_device()?)?;
        libc::free(address);
        Ok(())
    }

    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
        at_once(upload("cuMemcpyHtoD", to, from, bytes))
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, handle: u64) {
        let stream = stream(handle)?;
        if !is_pinned(from as usize) {
            // The driver stages it while the call lasts, which a graph cannot repeat.
            graph::stream_call(&stream)?;
        }
        submit(&stream, upload("cuMemcpyHtoDAsync", to, from, bytes))
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
        at_once(download("cuMemcpyDtoH", to, from, bytes))
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, handle: u64) {
        let stream = stream(handle)?;
        if is_pinned(to as usize) {
            return submit(&stream, download("cuMemcpyDtoHAsync", to, from, bytes));
        }
        graph::stream_call(&stream)?;
        submit(&stream, download("cuMemcpyDtoHAsync", to, from, bytes))?;
        // The call returns when pageable memory has its bytes.
        synchronize(&stream)
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        at_once(copy("cuMemcpyDtoD", to, from, bytes))
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, handle: u64) {
        let stream = stream(handle)?;
        submit(&stream, copy("cuMemcpyDtoDAsync", to, from, bytes))
    }

    fn cuMemsetD8_v2(to: u64, value: u8, count: usize) {
        at_once(fill("cuMemsetD8", to, &[value], count))
    }

    fn cuMemsetD8Async(to: u64, value: u8, count: usize, handle: u64) {
        let stream = stream(handle)?;
        submit(&stream, fill("cuMemsetD8Async", to, &[value], count))
    }

    fn cuMemsetD16Async(to: u64, value: u16, count: usize, handle: u64) {
        let stream = stream(handle)?;
        submit(&stream, fill("cuMemsetD16Async", to, &value.to_le_bytes(), count))
    }

    fn cuMemsetD32Async(to: u64, value: u32, count: usize, handle: u64) {
        let stream = stream(handle)?;
        submit(&stream, fill("cuMemsetD32Async", to, &value.to_le_bytes(), count))
    }

    fn cuModuleLoadData(module: *mut u64, image: *const c_char) {
        put(module, load(c_text(image)?)?)
    }

    fn cuModuleLoad(module: *mut u64, path: *const c_char) {
        let text = std::fs::read_to_string(c_text(path)?).map_err(|_| Error::FILE_NOT_FOUND)?;
        put(module, load(&text)?)
    }

    fn cuModuleUnload(module: u64) {
        unload(module)
    }

    fn cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) {
        put(function, function_named(module, c_text(name)?)?)
    }

    fn cuModuleGetGlobal_v2(
        address: *mut u64, bytes: *mut usize, module: u64, name: *const c_char,
    ) {
        let loaded = MODULES.get(module)?;
        let (offset, size) = loaded.module.global(c_text(name)?).ok_or(Error::NOT_FOUND)?;
        if !address.is_null() {
            *address = loaded.globals + offset as u64;
        }
        if !bytes.is_null() {
            *bytes = size;
        }
        Ok(())
    }

    fn cuFuncGetAttribute(value: *mut i32, number: u32, function: u64) {
        let function = FUNCTIONS.get(function)?;
        put(value, match number {
            0 => function.max_threads as i32,
            1 => function.static_shared as i32,
            8 => function.dynamic_shared.load(Relaxed) as i32,
            // What the assembler would tell: constants, local memory, registers, versions.
            2..=7 => 0,
            _ => return Err(Error::INVALID_VALUE),
        })
    }

    fn cuFuncSetAttribute(function: u64, number: u32, value: i32) {
        let function = FUNCTIONS.get(function)?;
        match number {
            8 => {
                let most = (shared_on_request() as usize).saturating_sub(function.static_shared);
                if value < 0 || value as usize > most {
                    return Err(Error::INVALID_VALUE);
                }
                function.dynamic_shared.store(value as u32, Relaxed);
                Ok(())
            }
            // How shared memory and L1 divide their room changes no result.
            9 => Ok(()),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut i32, function: u64, threads: i32, dynamic: usize,
    ) {
        let function = FUNCTIONS.get(function)?;
        put(blocks, resident_blocks(&function, threads, dynamic))
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: *mut i32, function: u64, threads: i32, dynamic: usize, _flags: u32,
    ) {
        let function = FUNCTIONS.get(function)?;
        put(blocks, resident_blocks(&function, threads, dynamic))
    }

    fn cuLaunchKernel(
        function: u64,
        grid_x: u32, grid_y: u32, grid_z: u32,
        block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32,
        handle: u64,
        arguments: *const *const c_void,
        extra: *const *const c_void,
    ) {
        let function = FUNCTIONS.get(function)?;
        let stream = stream(handle)?;
        if !extra.is_null() {
            return Err(Error::NOT_SUPPORTED);
        }
        if function.loaded.device != stream.device {
            return Err(Error::INVALID_HANDLE);
        }
        let shape = Shape {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
        };
        shape.check(&function)?;
        let parameters = pack(&function, arguments)?;
        submit(&stream, launch(&function, shape, parameters))
    }

    fn cuPointerGetAttribute(to: *mut c_void, number: u32, address: u64) {
        let around = engine().memory.allocation_around(address);
        let (start, size, device) = around.ok_or(Error::INVALID_VALUE)?;
        match number {
            1 => put(to.cast(), context_handle(device)),
            // CU_MEMORYTYPE_DEVICE.
            2 => put(to.cast(), 2u32),
            3 => put(to.cast(), address),
            9 => put(to.cast(), device),
            11 => put(to.cast(), start),
            12 => put(to.cast(), size as usize),
            _ => Err(Error::NOT_SUPPORTED),
        }
    }

    fn cuDeviceGetMemPool(pool: *mut u64, device: i32) {
        check_device(device)?;
        put(pool, pool_of(device))
    }

    fn cuDeviceGetDefaultMemPool(pool: *mut u64, device: i32) {
        check_device(device)?;
        put(pool, pool_of(device))
    }

    /// How much a pool keeps back changes nothing here.
    fn cuMemPoolSetAttribute(pool: u64, number: u32, value: *mut c_void) {
        check_pool(pool)?;
        if value.is_null() || !(1..=8).contains(&number) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(())
    }

    fn cuMemPoolTrimTo(pool: u64, _bytes: usize) {
        check_pool(pool)
    }

    fn cuMemcpyPeerAsync(
        to: u64, to_context: u64, from: u64, from_context: u64, bytes: usize, handle: u64,
    ) {
        let stream = stream(handle)?;
        let (target, source) = (device_of_context(to_context)?, device_of_context(from_context)?);
        submit(&stream, Submission::new("cuMemcpyPeerAsync", move |memory, work| {
            // Each side is an access of its own device, in the order of the stream.
            let side = |device| Arc::new(work.on_device(device));
            let data = view(memory, &side(source)).download(from, bytes as u64)?;
            view(memory, &side(target)).upload(to, &data)
        }))
    }
}

fn pool_of(device: i32) -> u64 {
    8 << 40 | (device as u64 + 1) << 4
}

fn check_pool(pool: u64) -> Outcome {
    match (0..device_count()).any(|device| pool == pool_of(device)) {
        true => Ok(()),
        false => Err(Error::INVALID_VALUE),
    }
}
