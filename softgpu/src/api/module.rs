//! The driver's modules, functions and launches.

use crate::abi::{Error, Handles, Outcome, entries, put};
use crate::context::{
    self, SHARED, architecture_of_devices, current_device, lock, shared_on_request,
};
use crate::engine::grid;
use crate::engine::launch::Launch;
use crate::engine::stream::{Action, Manner, Step, Submission, engine};
use crate::isa::ptx::Module;
use crate::queue::{submit, view};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Once, Weak};

/// A module in a device's memory.
pub struct Loaded {
    pub module: Arc<Module>,
    device: i32,
    /// The address of its variables. 0: it has none.
    globals: u64,
    /// Handles of its functions.
    functions: Mutex<HashMap<String, u64>>,
}

/// An entry of a module.
pub struct Function {
    loaded: Arc<Loaded>,
    entry: usize,
    /// Offsets and sizes of its parameters.
    parameters: Vec<(usize, usize)>,
    /// Bytes of dynamic shared memory that it may have.
    dynamic_shared: AtomicU32,
}

pub static MODULES: Handles<Arc<Loaded>> = Handles::new(4);

static FUNCTIONS: Handles<Arc<Function>> = Handles::new(7);

fn load(text: &str) -> Outcome<u64> {
    let device = current_device()?;
    let module = edited(parsed(text)?)?;
    let size = module.globals();
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

/// The PTX in the file `SOFTGPU_PTX` instead of a module that defines one of its entries: an edited
/// kernel runs without a rebuild, and so does one for another architecture. Other modules are then
/// those of the build, and may be for a newer architecture than the device's.
fn edited(module: Arc<Module>) -> Outcome<Arc<Module>> {
    let Some(file) = std::env::var_os("SOFTGPU_PTX") else {
        return fitting(module);
    };
    let text = std::fs::read_to_string(&file).map_err(|error| {
        eprintln!("softgpu: SOFTGPU_PTX names {file:?}, which cannot be read: {error}");
        Error::FILE_NOT_FOUND
    })?;
    let edited = parsed(&text)?;
    let replaces = edited.entries().any(|name| module.entry(name).is_some());
    if !replaces {
        return Ok(module);
    }
    static SAID: Once = Once::new();
    SAID.call_once(|| eprintln!("softgpu: {file:?} replaces a module"));
    fitting(edited)
}

/// Rejects PTX that the device cannot run.
fn fitting(module: Arc<Module>) -> Outcome<Arc<Module>> {
    let device = architecture_of_devices()?;
    let (target, line) = module.target();
    if device.runs(target) {
        return Ok(module);
    }
    let entry = module.entries().next().unwrap_or("");
    eprintln!(
        "softgpu: line {line}: the PTX with {entry} is for {target}, \
         which compute capability {device} cannot run"
    );
    Err(Error::INVALID_PTX)
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
    // An instruction that is never reached does no harm, so the kernel may run.
    for unknown in loaded.module.unknown(entry) {
        eprintln!("softgpu: {name}, {unknown}");
    }
    let static_shared = loaded.module.static_shared(entry) as u32;
    let handle = FUNCTIONS.add(Arc::new(Function {
        entry,
        parameters: loaded.module.parameters(entry),
        dynamic_shared: AtomicU32::new(SHARED.saturating_sub(static_shared)),
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
    let mut packed = vec![0; function.loaded.module.parameter_bytes(function.entry)];
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

/// Rejects a launch that a device has no room for.
fn check(launch: &Launch, function: &Function) -> Outcome {
    let threads: u64 = launch.block.iter().map(|&n| u64::from(n)).product();
    let [x, y, z] = launch.grid;
    let fits = x > 0
        && x <= i32::MAX as u32
        && (1..=65535).contains(&y)
        && (1..=65535).contains(&z)
        && threads > 0
        && launch.block[2] <= 64
        && threads <= 1024
        && launch.shared_bytes <= function.dynamic_shared.load(Relaxed);
    if !fits {
        return Err(Error::INVALID_VALUE);
    }
    // A GPU lacks registers for more threads than `.maxntid`.
    match threads <= u64::from(launch.module.max_threads(launch.entry)) {
        true => Ok(()),
        false => Err(Error(701)),
    }
}

/// The work of a launch. The module's variables live until it has run.
fn work_of(launch: Launch, loaded: Arc<Loaded>) -> Submission {
    let blocks: u64 = launch.grid.iter().map(|&n| u64::from(n)).product();
    let name = launch.module.name_of(launch.entry).to_owned();
    let action: Action = Arc::new(move |memory, work| {
        let _ = &loaded;
        grid::run(&launch, memory, work, engine().conditions(work)).map(Some)
    });
    Submission {
        name,
        blocks: blocks.min(u64::from(u32::MAX)) as u32,
        launch: true,
        always: false,
        step: Step::Run(action),
    }
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

entries! {
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

    fn cuFuncSetAttribute(function: u64, number: u32, value: i32) {
        let function = FUNCTIONS.get(function)?;
        match number {
            8 => {
                let own = function.loaded.module.static_shared(function.entry) as u32;
                let bytes = u32::try_from(value).map_err(|_| Error::INVALID_VALUE)?;
                if bytes > shared_on_request()?.saturating_sub(own) {
                    return Err(Error::INVALID_VALUE);
                }
                function.dynamic_shared.store(bytes, Relaxed);
                Ok(())
            }
            // The division of room between shared memory and L1 changes no result.
            9 => Ok(()),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    fn cuFuncGetAttribute(value: *mut i32, number: u32, function: u64) {
        let function = FUNCTIONS.get(function)?;
        let (module, entry) = (&function.loaded.module, function.entry);
        let known = match number {
            0 => module.max_threads(entry),
            1 => module.static_shared(entry) as u32,
            3 => module.local_bytes(entry) as u32,
            // Constants are not counted, and an interpreter allocates no registers.
            2 | 4 => 0,
            // The architecture that the PTX is for, and the one that runs it.
            5 => {
                let digits = |c: char| !c.is_ascii_digit();
                module.target().0.split(digits).find_map(|n| n.parse().ok()).unwrap_or(0)
            }
            6 => architecture_of_devices()?.capability,
            8 => function.dynamic_shared.load(Relaxed),
            _ => return Err(Error::INVALID_VALUE),
        };
        put(value, known as i32)
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
        let stream = context::stream(handle)?;
        if !extra.is_null() {
            return Err(Error::NOT_SUPPORTED);
        }
        let loaded = function.loaded.clone();
        if loaded.device != stream.device {
            return Err(Error::INVALID_HANDLE);
        }
        let launch = Launch {
            module: loaded.module.clone(),
            entry: function.entry,
            globals: loaded.globals,
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
            parameters: pack(&function, arguments)?,
        };
        check(&launch, &function)?;
        submit(&stream, work_of(launch, loaded))
    }
}
