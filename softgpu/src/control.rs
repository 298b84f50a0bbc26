//! What every entry of the library goes through, and what a test asks of it: counts, failures on
//! demand, planted mistakes, leaks.
//!
//! Counts, failures and planted mistakes are a thread's own, since tests share a process.

use crate::stream::{engine, own_tally, Tally};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_char, CStr};
use std::fmt::Write;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// A call's failure, as the driver numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Error(pub i32);

/// What a call of the driver returns.
pub type Outcome<T = ()> = Result<T, Error>;

impl Error {
    pub const INVALID_VALUE: Self = Self(1);
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const NOT_INITIALIZED: Self = Self(3);
    pub const INVALID_DEVICE: Self = Self(101);
    pub const INVALID_CONTEXT: Self = Self(201);
    pub const INVALID_PTX: Self = Self(218);
    pub const FILE_NOT_FOUND: Self = Self(301);
    pub const INVALID_HANDLE: Self = Self(400);
    pub const NOT_FOUND: Self = Self(500);
    pub const NOT_READY: Self = Self(600);
    pub const ILLEGAL_ADDRESS: Self = Self(700);
    pub const LAUNCH_FAILED: Self = Self(719);
    pub const NOT_SUPPORTED: Self = Self(801);
    pub const CAPTURE_UNSUPPORTED: Self = Self(900);
    pub const CAPTURE_INVALIDATED: Self = Self(901);
    pub const CAPTURE_MERGE: Self = Self(902);
    pub const CAPTURE_UNMATCHED: Self = Self(903);
    pub const CAPTURE_UNJOINED: Self = Self(904);
    pub const CAPTURE_ISOLATION: Self = Self(905);
    pub const CAPTURE_IMPLICIT: Self = Self(906);
    pub const CAPTURED_EVENT: Self = Self(907);
    pub const CAPTURE_WRONG_THREAD: Self = Self(908);
    pub const UNKNOWN: Self = Self(999);
    /// cuRAND's alone.
    pub const ODD_LENGTH: Self = Self(-105);

    /// Its name, with the end that C asks for.
    pub fn name(self) -> &'static CStr {
        match self.0 {
            0 => c"CUDA_SUCCESS",
            1 => c"CUDA_ERROR_INVALID_VALUE",
            2 => c"CUDA_ERROR_OUT_OF_MEMORY",
            3 => c"CUDA_ERROR_NOT_INITIALIZED",
            101 => c"CUDA_ERROR_INVALID_DEVICE",
            201 => c"CUDA_ERROR_INVALID_CONTEXT",
            218 => c"CUDA_ERROR_INVALID_PTX",
            301 => c"CUDA_ERROR_FILE_NOT_FOUND",
            400 => c"CUDA_ERROR_INVALID_HANDLE",
            500 => c"CUDA_ERROR_NOT_FOUND",
            600 => c"CUDA_ERROR_NOT_READY",
            700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            719 => c"CUDA_ERROR_LAUNCH_FAILED",
            801 => c"CUDA_ERROR_NOT_SUPPORTED",
            900 => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            901 => c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            902 => c"CUDA_ERROR_STREAM_CAPTURE_MERGE",
            903 => c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
            904 => c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
            905 => c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            906 => c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
            907 => c"CUDA_ERROR_CAPTURED_EVENT",
            908 => c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
            _ => c"CUDA_ERROR_UNKNOWN",
        }
    }

    /// The number by which the library that has a function knows it.
    fn number_for(self, function: &str) -> i32 {
        if function.starts_with("cublas") {
            match self {
                Self::INVALID_VALUE => 7,
                Self::OUT_OF_MEMORY => 3,
                Self::INVALID_HANDLE | Self::INVALID_CONTEXT => 1,
                Self::NOT_SUPPORTED => 15,
                _ => 13,
            }
        } else if function.starts_with("curand") {
            match self {
                Self::OUT_OF_MEMORY => 102,
                Self::INVALID_HANDLE | Self::INVALID_CONTEXT => 101,
                Self::INVALID_VALUE => 104,
                Self::ODD_LENGTH => 105,
                _ => 201,
            }
        } else if function.starts_with("nccl") {
            match self {
                Self::INVALID_VALUE | Self::INVALID_HANDLE => 4,
                Self::NOT_SUPPORTED => 5,
                _ => 1,
            }
        } else {
            self.0
        }
    }
}

impl From<crate::stream::Broken> for Error {
    fn from(_: crate::stream::Broken) -> Self {
        Self::ILLEGAL_ADDRESS
    }
}

/// What a thread counts and awaits.
#[derive(Default)]
struct Thread {
    calls: HashMap<&'static str, u64>,
    all_calls: u64,
    /// A function, or any that acquires or does something, and how many calls from now fails.
    failure: Option<(Option<String>, u64)>,
    /// Planted mistakes, and how many occasions from now they are made.
    planted: HashMap<u32, u64>,
}

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::default();
}

/// Functions that only give back or explain. They fail on demand by name alone: where one fails,
/// something must leak.
fn is_release(function: &str) -> bool {
    ["Free", "Destroy", "Release", "Unload", "GetError", "Abort"]
        .iter()
        .any(|part| function.contains(part))
}

/// Enters a function of the library: counts the call, fails if that is asked for, and keeps panics
/// from the caller.
pub fn enter(function: &'static str, body: impl FnOnce() -> Outcome) -> i32 {
    let fails = THREAD.try_with(|thread| thread.borrow_mut().count(function));
    let outcome = match fails {
        Ok(true) if function.contains("Alloc") || function.contains("Create") => {
            Err(Error::OUT_OF_MEMORY)
        }
        Ok(true) => Err(Error::LAUNCH_FAILED),
        _ => std::panic::catch_unwind(std::panic::AssertUnwindSafe(body))
            .unwrap_or(Err(Error::UNKNOWN)),
    };
    match outcome {
        Ok(()) => 0,
        Err(error) => error.number_for(function),
    }
}

impl Thread {
    /// Returns whether the call is to fail.
    fn count(&mut self, function: &'static str) -> bool {
        *self.calls.entry(function).or_default() += 1;
        self.all_calls += 1;
        let Some((name, left)) = &mut self.failure else {
            return false;
        };
        let concerned = match name {
            Some(name) => name == function,
            None => !is_release(function),
        };
        if concerned {
            *left -= 1;
        }
        let fails = concerned && *left == 0;
        if fails {
            self.failure = None;
        }
        fails
    }
}

/// Defines functions of the C interface.
macro_rules! entries {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        /// # Safety
        ///
        /// What CUDA documents: handles are valid, and pointers have room for what is written
        /// there.
        #[no_mangle]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> i32 {
            $crate::control::enter(stringify!($name), || $body)
        }
    )*};
}
pub(crate) use entries;

/// Hands a result to a C caller.
///
/// # Safety
///
/// `to` is null, or has room for a `T`.
pub unsafe fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: as this function asks.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Handles of one kind, which are numbers that no other kind has.
pub struct Handles<T> {
    kind: u64,
    all: Mutex<Option<HashMap<u64, T>>>,
}

impl<T: Clone> Handles<T> {
    pub const fn new(kind: u64) -> Self {
        Self {
            kind,
            all: Mutex::new(None),
        }
    }

    fn with<R>(&self, f: impl FnOnce(&mut HashMap<u64, T>) -> R) -> R {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        f(all.get_or_insert_default())
    }

    pub fn add(&self, value: T) -> u64 {
        static NEXT: AtomicI64 = AtomicI64::new(1);
        let handle = self.kind << 40 | (NEXT.fetch_add(1, Relaxed) as u64) << 4;
        self.with(|all| all.insert(handle, value));
        handle
    }

    pub fn get(&self, handle: u64) -> Outcome<T> {
        self.with(|all| all.get(&handle).cloned())
            .ok_or(Error::INVALID_HANDLE)
    }

    pub fn remove(&self, handle: u64) -> Outcome<T> {
        self.with(|all| all.remove(&handle))
            .ok_or(Error::INVALID_HANDLE)
    }

    pub fn find(&self, matches: impl Fn(&T) -> bool) -> Option<T> {
        self.with(|all| all.values().find(|value| matches(value)).cloned())
    }

    pub fn count(&self) -> u64 {
        self.with(|all| all.len() as u64)
    }
}

/// A mistake of the host, made on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Mistake {
    /// An allocation is four bytes short.
    ShortAllocation = 1,
    /// A stream does not wait for an event.
    MissingWait = 2,
    /// A launch lacks the last layer of its grid.
    ShortGrid = 3,
    /// Memory is freed at once, not in the order of the stream.
    EarlyFree = 4,
    /// A launch has its first two parameters of one size exchanged.
    SwappedArguments = 5,
}

/// Whether this occasion is the one for a planted mistake.
pub fn is_planted(mistake: Mistake) -> bool {
    THREAD.with(|thread| {
        let mut thread = thread.borrow_mut();
        let Some(left) = thread.planted.get_mut(&(mistake as u32)) else {
            return false;
        };
        *left -= 1;
        let now = *left == 0;
        if now {
            thread.planted.remove(&(mistake as u32));
        }
        now
    })
}

/// A C string that may be null.
///
/// # Safety
///
/// It is null or ends with a zero.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: as this function asks.
    (!text.is_null()).then(|| {
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    })
}

/// Copies text to a caller's buffer, with a zero behind it, as far as it fits. Returns the bytes
/// that it has.
///
/// # Safety
///
/// `to` is null or has room for `room` bytes.
unsafe fn copy_text(text: &str, to: *mut c_char, room: usize) -> usize {
    if !to.is_null() && room > 0 {
        let bytes = text.len().min(room - 1);
        // SAFETY: `bytes` and the zero fit into `room`, and `text` has at least as many.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, bytes);
            to.add(bytes).write(0);
        }
    }
    text.len()
}

/// Has this thread's `n`-th call from now of a function fail, without doing anything. Null: of any
/// function but those that give something back. `n` of 0: none.
///
/// # Safety
///
/// `name` is null or ends with a zero.
#[no_mangle]
pub unsafe extern "C" fn softgpu_fail(name: *const c_char, n: u64) {
    // SAFETY: as this function asks.
    let name = unsafe { text(name) };
    THREAD.with(|thread| thread.borrow_mut().failure = (n > 0).then_some((name, n)));
}

/// How often this thread has called a function. Null: all of them.
///
/// # Safety
///
/// `name` is null or ends with a zero.
#[no_mangle]
pub unsafe extern "C" fn softgpu_calls(name: *const c_char) -> u64 {
    // SAFETY: as this function asks.
    let name = unsafe { text(name) };
    THREAD.with(|thread| {
        let thread = thread.borrow();
        match name {
            Some(name) => thread.calls.get(name.as_str()).copied().unwrap_or(0),
            None => thread.all_calls,
        }
    })
}

/// Has this thread make a [`Mistake`] on the `k`-th occasion from now. `k` of 0: not at all.
#[no_mangle]
pub extern "C" fn softgpu_plant(mistake: u32, k: u64) {
    THREAD.with(|thread| {
        let planted = &mut thread.borrow_mut().planted;
        match k {
            0 => planted.remove(&mistake),
            k => planted.insert(mistake, k),
        }
    });
}

/// How many of a kind the process holds: "contexts", "streams", "events", "allocations", "bytes",
/// "graphs", "modules", "cublas", "curand", "nccl".
///
/// # Safety
///
/// `kind` is null or ends with a zero.
#[no_mangle]
pub unsafe extern "C" fn softgpu_live(kind: *const c_char) -> u64 {
    // SAFETY: as this function asks.
    let kind = unsafe { text(kind) };
    match kind.as_deref() {
        Some("allocations") => engine().memory.live().0,
        Some("bytes") => engine().memory.live().1,
        Some("contexts") => crate::driver::contexts(),
        Some("streams") => crate::driver::STREAMS.count(),
        Some("events") => crate::driver::EVENTS.count(),
        Some("modules") => crate::driver::MODULES.count(),
        Some("graphs") => crate::graph::live(),
        Some("cublas") => crate::blas::HANDLES.count(),
        Some("curand") => crate::rand::GENERATORS.count(),
        Some("nccl") => crate::nccl::COMMUNICATORS.count(),
        _ => u64::MAX,
    }
}

/// Switches the execution of kernels and copies on or off, so that the host's time can be taken.
/// Work that is queued runs first.
#[no_mangle]
pub extern "C" fn softgpu_kernels(on: bool) {
    for device in 0..crate::driver::device_count() {
        // A device whose work faulted says so to whoever uses it next.
        let _ = engine().synchronize_device(device);
    }
    engine().kernels.store(on, Relaxed);
}

/// Work that faults is recorded for [`softgpu_take_fault`] instead of failing the process.
#[no_mangle]
pub extern "C" fn softgpu_expect_faults(expected: bool) {
    engine().expect_faults(expected);
}

/// Hands out the oldest fault that nobody took, as text, and has the devices work again. Returns
/// the bytes of the text, or 0.
///
/// # Safety
///
/// `to` is null or has room for `room` bytes.
#[no_mangle]
pub unsafe extern "C" fn softgpu_take_fault(to: *mut c_char, room: usize) -> usize {
    let fault = engine().take_fault();
    // SAFETY: as this function asks.
    fault.map_or(0, |fault| unsafe {
        copy_text(&fault.to_string(), to, room)
    })
}

/// What this thread's submissions did, as JSON: its calls by function, and by kernel its launches
/// and [`crate::counts::Counts`]. `reset`: they count from 0 again. Returns the bytes of the text.
///
/// # Safety
///
/// `to` is null or has room for `room` bytes.
#[no_mangle]
pub unsafe extern "C" fn softgpu_counts(to: *mut c_char, room: usize, reset: bool) -> usize {
    let tally = own_tally();
    let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
    let text = THREAD.with(|thread| {
        let mut thread = thread.borrow_mut();
        let text = counts_as_json(&thread.calls, &tally);
        if reset {
            thread.calls.clear();
            thread.all_calls = 0;
        }
        text
    });
    if reset {
        tally.clear();
    }
    // SAFETY: as this function asks.
    unsafe { copy_text(&text, to, room) }
}

fn counts_as_json(calls: &HashMap<&'static str, u64>, tally: &Tally) -> String {
    let calls: BTreeMap<_, _> = calls.iter().collect();
    let calls: Vec<_> = calls
        .iter()
        .map(|(function, calls)| format!("\"{function}\":{calls}"))
        .collect();
    let mut text = format!("{{\"calls\":{{{}}},\"kernels\":{{", calls.join(","));
    for (i, (kernel, (launches, counts))) in tally.iter().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "{comma}\"{kernel}\":{{\"launches\":{launches},\"blocks\":{}\
             ,\"instructions\":{:?},\"thread_instructions\":{}\
             ,\"bytes_loaded\":{},\"bytes_stored\":{}\
             ,\"sectors_loaded\":{},\"sectors_stored\":{}\
             ,\"bank_conflicts\":{},\"barriers\":{}}}",
            counts.blocks,
            counts.instructions,
            counts.thread_instructions,
            counts.bytes_loaded,
            counts.bytes_stored,
            counts.sectors_loaded,
            counts.sectors_stored,
            counts.bank_conflicts,
            counts.barriers
        );
    }
    text.push_str("}}");
    text
}
