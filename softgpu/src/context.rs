//! Devices, their contexts, and streams by their handles.

use crate::abi::{Error, Handles, Outcome};
pub use crate::engine::memory::lock;
use crate::engine::stream::{engine, number_from, Manner};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

/// A stream, as a call names it.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    /// Its number in the engine.
    pub id: u32,
    pub device: i32,
    pub manner: Manner,
}

pub static STREAMS: Handles<Stream> = Handles::new(2);

/// The number of times that each device's context is retained.
pub static CONTEXTS: Mutex<BTreeMap<i32, u64>> = Mutex::new(BTreeMap::new());

pub static INITIALISED: AtomicBool = AtomicBool::new(false);

thread_local! {
    pub static CURRENT: Cell<Option<i32>> = const { Cell::new(None) };
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

/// Devices that there are: `SOFTGPU_DEVICES`, else one.
pub fn device_count() -> i32 {
    static COUNT: OnceLock<i32> = OnceLock::new();
    *COUNT.get_or_init(|| number_from("SOFTGPU_DEVICES").unwrap_or(1).clamp(1, 64) as i32)
}

/// Contexts that are retained.
pub fn retained() -> u64 {
    lock(&CONTEXTS).len() as u64
}

pub fn check_device(device: i32) -> Outcome {
    if !INITIALISED.load(Relaxed) {
        return Err(Error::NOT_INITIALIZED);
    }
    match (0..device_count()).contains(&device) {
        true => Ok(()),
        false => Err(Error::INVALID_DEVICE),
    }
}

/// Contexts have handles of kind 1, which name the device.
pub fn context_handle(device: i32) -> u64 {
    1 << 40 | (device as u64 + 1) << 4
}

pub fn device_of_context(context: u64) -> Outcome<i32> {
    let device = (context >> 4 & 0xff) as i32 - 1;
    let known = lock(&CONTEXTS).contains_key(&device) && context == context_handle(device);
    known.then_some(device).ok_or(Error::INVALID_CONTEXT)
}

/// The device whose context is current.
pub fn current_device() -> Outcome<i32> {
    CURRENT.get().ok_or(Error::INVALID_CONTEXT)
}

pub fn legacy_stream(device: i32) -> Stream {
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

/// Bytes of shared memory of a block, and what the driver keeps of a multiprocessor's for each.
pub const SHARED: u32 = 48 << 10;

pub const RESERVED: u32 = 1 << 10;

/// Bytes of shared memory of a block whose function asks for more.
pub fn shared_on_request() -> u32 {
    number_from("SOFTGPU_SHARED_KIB").map_or(227, |kib| kib as u32) << 10
}

/// Bytes that a device says it has.
pub const DEVICE_MEMORY: u64 = 80 << 30;
