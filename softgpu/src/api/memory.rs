//! The driver's memory: allocations, copies, fills, pools.

use crate::abi::{Error, Outcome, entries, put};
use crate::capture;
use crate::context::{self, *};
use crate::engine::stream::{Submission, engine};
use crate::queue::*;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// The memory pool of a device, as its attributes describe it. An allocation counts from the call
/// that makes it to the call that frees it, whenever the stream comes to either.
#[derive(Default)]
struct Pool {
    /// Bytes of each allocation.
    sizes: HashMap<u64, u64>,
    used: u64,
    /// The most that was used since somebody set this mark back.
    high: u64,
}

impl Pool {
    fn take(&mut self, address: u64, bytes: u64) {
        self.sizes.insert(address, bytes);
        self.used += bytes;
        self.high = self.high.max(self.used);
    }
}

/// By device.
static POOLS: Mutex<BTreeMap<i32, Pool>> = Mutex::new(BTreeMap::new());

/// Returns an allocation to its pool, if it came from one.
fn give_back(address: u64) {
    for pool in lock(&POOLS).values_mut() {
        pool.used -= pool.sizes.remove(&address).unwrap_or(0);
    }
}

fn allocate(size: usize, stream: Option<&Stream>) -> Outcome<u64> {
    let size = size as u64;
    let memory = &engine().memory;
    let room = DEVICE_MEMORY * device_count() as u64;
    if memory.live().1 + size > room && !memory.sparse {
        return Err(Error::OUT_OF_MEMORY);
    }
    let (device, place) = match stream {
        Some(stream) => {
            if let Some(capture) = capture::of(stream) {
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
    let pooled = place.is_some();
    let address = memory
        .allocate(size, device, place)
        .ok_or(Error::OUT_OF_MEMORY)?;
    if pooled {
        lock(&POOLS).entry(device).or_default().take(address, size);
    }
    Ok(address)
}

entries! {
    fn cuMemAlloc_v2(address: *mut u64, size: usize) {
        capture::unsafe_call()?;
        if size == 0 {
            return Err(Error::INVALID_VALUE);
        }
        put(address, allocate(size, None)?)
    }

    fn cuMemAllocAsync(address: *mut u64, size: usize, handle: u64) {
        let stream = context::stream(handle)?;
        put(address, allocate(size, Some(&stream))?)
    }

    fn cuMemFree_v2(address: u64) {
        capture::unsafe_call()?;
        if address == 0 {
            return Ok(());
        }
        let device = engine().memory.device_of(address).ok_or(Error::INVALID_VALUE)?;
        synchronize_device(device)?;
        give_back(address);
        engine().memory.free(address, None).map_err(|_| Error::INVALID_VALUE)
    }

    fn cuMemFreeAsync(address: u64, handle: u64) {
        let stream = context::stream(handle)?;
        if address == 0 {
            return Ok(());
        }
        if let Some(capture) = capture::of(&stream) {
            return capture.free(&stream, address);
        }
        if capture::free_kept(&stream, address)? {
            return Ok(());
        }
        if engine().memory.device_of(address).is_none() {
            return Err(Error::INVALID_VALUE);
        }
        give_back(address);
        submit(&stream, free(address))
    }

    /// Allocations of all devices count.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        current_device()?;
        put(free, DEVICE_MEMORY.saturating_sub(engine().memory.live().1) as usize)?;
        put(total, DEVICE_MEMORY as usize)
    }

    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
        capture::unsafe_call()?;
        let stream = context::stream(0)?;
        submit(&stream, upload("cuMemcpyHtoD", to, from, bytes))?;
        synchronize(&stream)
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
        capture::unsafe_call()?;
        let stream = context::stream(0)?;
        submit(&stream, download("cuMemcpyDtoH", to, from, bytes))?;
        synchronize(&stream)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, handle: u64) {
        let stream = context::stream(handle)?;
        // The driver stages it while the call lasts, which a graph cannot repeat.
        capture::stream_call(&stream)?;
        submit(&stream, upload("cuMemcpyHtoDAsync", to, from, bytes))
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, handle: u64) {
        let stream = context::stream(handle)?;
        capture::stream_call(&stream)?;
        submit(&stream, download("cuMemcpyDtoHAsync", to, from, bytes))?;
        // The call returns when the host has its bytes.
        synchronize(&stream)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, handle: u64) {
        let stream = context::stream(handle)?;
        submit(&stream, copy("cuMemcpyDtoDAsync", to, from, bytes))
    }

    fn cuMemsetD8Async(to: u64, value: u8, count: usize, handle: u64) {
        let stream = context::stream(handle)?;
        submit(&stream, fill("cuMemsetD8Async", to, value, count))
    }

    fn cuDeviceGetMemPool(pool: *mut u64, device: i32) {
        check_device(device)?;
        put(pool, pool_of(device))
    }

    fn cuDeviceGetDefaultMemPool(pool: *mut u64, device: i32) {
        check_device(device)?;
        put(pool, pool_of(device))
    }

    /// Pools keep nothing back here, so their attributes change nothing, except for the high marks,
    /// which 0 sets back to what is used now.
    fn cuMemPoolSetAttribute(pool: u64, number: u32, value: *mut c_void) {
        let device = device_of_pool(pool)?;
        if value.is_null() || !(1..=8).contains(&number) {
            return Err(Error::INVALID_VALUE);
        }
        if let RESERVED_HIGH | USED_HIGH = number {
            if *value.cast::<u64>() != 0 {
                return Err(Error::INVALID_VALUE);
            }
            let mut pools = lock(&POOLS);
            let pool = pools.entry(device).or_default();
            pool.high = pool.used;
        }
        Ok(())
    }

    /// A pool reserves what is used.
    fn cuMemPoolGetAttribute(pool: u64, number: u32, value: *mut c_void) {
        let device = device_of_pool(pool)?;
        let mut pools = lock(&POOLS);
        let pool = pools.entry(device).or_default();
        let bytes = match number {
            RESERVED | USED => pool.used,
            RESERVED_HIGH | USED_HIGH => pool.high,
            _ => return Err(Error::NOT_SUPPORTED),
        };
        put(value.cast(), bytes)
    }

    fn cuMemcpyPeerAsync(
        to: u64, to_context: u64, from: u64, from_context: u64, bytes: usize, handle: u64,
    ) {
        let stream = context::stream(handle)?;
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

/// The driver's numbers for a pool's bytes.
const RESERVED: u32 = 5;
const RESERVED_HIGH: u32 = 6;
const USED: u32 = 7;
const USED_HIGH: u32 = 8;

fn device_of_pool(pool: u64) -> Outcome<i32> {
    (0..device_count())
        .find(|&device| pool == pool_of(device))
        .ok_or(Error::INVALID_VALUE)
}
