//! The driver's memory: allocations, copies, fills, pools.

use crate::abi::{Error, Outcome, entries, put};
use crate::capture;
use crate::context::{self, *};
use crate::engine::stream::{Submission, engine};
use crate::queue::*;
use std::ffi::c_void;
use std::sync::Arc;

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
    memory
        .allocate(size, device, place)
        .ok_or(Error::OUT_OF_MEMORY)
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

    /// Pools keep nothing back here, so their attributes change nothing.
    fn cuMemPoolSetAttribute(pool: u64, number: u32, value: *mut c_void) {
        check_pool(pool)?;
        if value.is_null() || !(1..=8).contains(&number) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(())
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

fn check_pool(pool: u64) -> Outcome {
    match (0..device_count()).any(|device| pool == pool_of(device)) {
        true => Ok(()),
        false => Err(Error::INVALID_VALUE),
    }
}
