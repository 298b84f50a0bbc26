//! Devices, their contexts, and streams by their handles.

use crate::abi::{Error, Handles, Outcome};
pub use crate::engine::memory::lock;
use crate::engine::stream::{Manner, engine, number_from};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
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

/// Bytes of shared memory of a block.
pub const SHARED: u32 = 48 << 10;

/// A GPU as kernels and those who launch them see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Architecture {
    /// Compute capability 7.5 is 75.
    pub capability: u32,
    pub multiprocessors: u32,
    /// KiB of shared memory of a multiprocessor, and what the driver keeps of it for each block.
    pub shared_kib: u32,
    pub reserved_kib: u32,
    /// The most threads and blocks of a multiprocessor.
    pub threads: u32,
    pub blocks: u32,
}

/// T4, A100, RTX 3090, RTX 4090, H100, B200 and RTX 5090. `README.md` names the sources.
pub const ARCHITECTURES: [Architecture; 7] = [
    architecture(75, 40, 64, 0, 1024, 16),
    architecture(80, 108, 164, 1, 2048, 32),
    architecture(86, 82, 100, 1, 1536, 16),
    architecture(89, 128, 100, 1, 1536, 24),
    architecture(90, 132, 228, 1, 2048, 32),
    architecture(100, 148, 228, 1, 2048, 32),
    architecture(120, 170, 100, 1, 1536, 24),
];

const fn architecture(
    capability: u32,
    multiprocessors: u32,
    shared_kib: u32,
    reserved_kib: u32,
    threads: u32,
    blocks: u32,
) -> Architecture {
    Architecture {
        capability,
        multiprocessors,
        shared_kib,
        reserved_kib,
        threads,
        blocks,
    }
}

impl Architecture {
    /// The one of a compute capability, as in `7.5`.
    pub fn named(text: &str) -> Option<Self> {
        let named = |one: &Self| one.to_string() == text;
        ARCHITECTURES.into_iter().find(named)
    }

    /// PTX with this `.target` runs here. A suffix `a` is for one capability alone, and `f` for
    /// those of one family.
    pub fn runs(&self, target: &str) -> bool {
        let Some(number) = target.strip_prefix("sm_") else {
            return false;
        };
        let Ok(least) = number.trim_end_matches(['a', 'f']).parse::<u32>() else {
            return false;
        };
        match number.as_bytes().last() {
            Some(b'a') => self.capability == least,
            Some(b'f') => self.capability >= least && self.capability / 10 == least / 10,
            _ => self.capability >= least,
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.capability / 10, self.capability % 10)
    }
}

/// The devices' architecture: that of `SOFTGPU_COMPUTE_CAPABILITY`, else 9.0.
pub fn architecture_of_devices() -> Outcome<Architecture> {
    static CHOSEN: OnceLock<Option<Architecture>> = OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| {
        let text = std::env::var("SOFTGPU_COMPUTE_CAPABILITY").unwrap_or_else(|_| "9.0".into());
        let found = Architecture::named(text.trim());
        if found.is_none() {
            let all = ARCHITECTURES.map(|one| one.to_string()).join(", ");
            eprintln!("softgpu: SOFTGPU_COMPUTE_CAPABILITY is {text:?}, which is none of {all}");
        }
        found
    });
    chosen.ok_or(Error::INVALID_VALUE)
}

/// Bytes of shared memory of a block whose function asks for more.
pub fn shared_on_request() -> Outcome<u32> {
    let of = architecture_of_devices()?;
    let own = u64::from(of.shared_kib - of.reserved_kib);
    Ok((number_from("SOFTGPU_SHARED_KIB").unwrap_or(own) as u32) << 10)
}

/// Bytes that a device says it has.
pub const DEVICE_MEMORY: u64 = 80 << 30;
