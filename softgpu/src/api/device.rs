//! The driver's devices and contexts.

use crate::abi::{Error, Outcome, entries, put};
use crate::context::*;
use crate::engine::stream::{engine, number_from};
use crate::queue::synchronize_device;
use std::ffi::c_char;
use std::sync::atomic::Ordering::Relaxed;

/// A device attribute: an H100's, unless the architecture or the environment sets another.
fn attribute(number: u32) -> Outcome<i32> {
    let of = architecture_of_devices()?;
    let reserved = of.reserved_kib << 10;
    let known = match number {
        // Threads of a block, its dimensions, and those of a grid.
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX as u32,
        6 | 7 => 65535,
        // Shared memory of a block, constant memory, lanes, registers of a block.
        8 => SHARED,
        9 => 65536,
        10 => 32,
        12 | 82 => 65536,
        // kHz of the multiprocessors and of the memory, and the bits of its bus.
        13 => 1_980_000,
        36 => 2_619_000,
        37 => 5120,
        16 => number_from("SOFTGPU_SMS").map_or(of.multiprocessors, |sms| sms as u32),
        // Bytes of the L2 cache, threads of a multiprocessor, copy engines.
        38 => 50 << 20,
        39 => of.threads,
        40 => 3,
        // Copies beside kernels, mapped host memory, kernels side by side, one address space,
        // priorities, cooperation.
        15 | 19 | 31 | 41 | 78 | 95 => 1,
        75 => of.capability / 10,
        76 => of.capability % 10,
        // Shared memory of a multiprocessor, of a block that asks, and what the driver keeps;
        // blocks.
        81 => shared_on_request()? + reserved,
        97 => shared_on_request()?,
        111 => reserved,
        106 => of.blocks,
        // Memory pools.
        115 => 1,
        _ => 0,
    };
    Ok(known as i32)
}

/// Counts one more use of a device's primary context.
fn retain(device: i32) -> Outcome<u64> {
    check_device(device)?;
    *lock(&CONTEXTS).entry(device).or_default() += 1;
    Ok(context_handle(device))
}

fn release(device: i32) -> Outcome {
    let mut all = lock(&CONTEXTS);
    let retained = all.get_mut(&device).ok_or(Error::INVALID_CONTEXT)?;
    *retained -= 1;
    if *retained == 0 {
        all.remove(&device);
        drop(all);
        // Its end waits for the work; that work faulted is for who waited before.
        let _ = engine().synchronize_device(device);
    }
    Ok(())
}

entries! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        architecture_of_devices()?;
        engine();
        INITIALISED.store(true, Relaxed);
        Ok(())
    }

    /// CUDA 13.0, whose PTX it interprets.
    fn cuDriverGetVersion(version: *mut i32) {
        put(version, 13_000)
    }

    fn cuGetErrorString(error: i32, text: *mut *const c_char) {
        put(text, Error(error).name().as_ptr().cast())
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
        put(value, attribute(number)?)
    }

    fn cuDevicePrimaryCtxRetain(context: *mut u64, device: i32) {
        put(context, retain(device)?)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        check_device(device)?;
        release(device)
    }

    /// A device has its primary context only, so this is one more use of it.
    fn cuCtxCreate_v2(context: *mut u64, _flags: u32, device: i32) {
        put(context, retain(device)?)?;
        CURRENT.set(Some(device));
        Ok(())
    }

    fn cuCtxDestroy_v2(context: u64) {
        release(device_of_context(context)?)
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

    fn cuCtxSynchronize() {
        synchronize_device(current_device()?)
    }
}
