//! Functions for tests beside a driver's functions: counts, failures on demand, leaks,
//! faults.

use crate::engine::stream::{Tally, engine, own_tally};
use crate::{api, capture, context, inject};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::fmt::Write;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

/// A C string that may be null.
///
/// # Safety
///
/// It is null or ends with a zero.
unsafe fn text(text: *const c_char) -> Option<String> {
    (!text.is_null()).then(|| {
        // SAFETY: as this function asks.
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softgpu_fail(name: *const c_char, n: u64) {
    // SAFETY: as this function asks.
    inject::fail(unsafe { text(name) }, n);
}

/// The number of calls of a function by this thread. Null: of all functions.
///
/// # Safety
///
/// `name` is null or ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softgpu_calls(name: *const c_char) -> u64 {
    // SAFETY: as this function asks.
    inject::calls(unsafe { text(name) }.as_deref())
}

/// The number of a kind that the process holds: "contexts", "streams", "events", "allocations",
/// "bytes", "graphs", "modules", "entries" of modules, "cublas", "curand", "nccl".
///
/// # Safety
///
/// `kind` is null or ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softgpu_live(kind: *const c_char) -> u64 {
    // SAFETY: as this function asks.
    let kind = unsafe { text(kind) };
    match kind.as_deref() {
        Some("allocations") => engine().memory.live().0,
        Some("bytes") => engine().memory.live().1,
        Some("contexts") => context::retained(),
        Some("streams") => context::STREAMS.count(),
        Some("events") => api::stream::EVENTS.count(),
        Some("modules") => api::module::MODULES.count(),
        Some("entries") => {
            api::module::MODULES.sum(|loaded| loaded.module.entries().count() as u64)
        }
        Some("graphs") => capture::live(),
        Some("cublas") => api::blas::HANDLES.count(),
        Some("curand") => api::rand::GENERATORS.count(),
        Some("nccl") => api::nccl::COMMUNICATORS.count(),
        _ => u64::MAX,
    }
}

/// Switches the execution of kernels and copies on or off, so that the host's time can be taken.
/// Work that is queued runs first.
#[unsafe(no_mangle)]
pub extern "C" fn softgpu_kernels(on: bool) {
    for device in 0..context::device_count() {
        // A device whose work faulted says so to whoever uses it next.
        let _ = engine().synchronize_device(device);
    }
    engine().kernels.store(on, Relaxed);
}

/// Work that faults is recorded for [`softgpu_take_fault`] instead of failing the process.
#[unsafe(no_mangle)]
pub extern "C" fn softgpu_expect_faults(expected: bool) {
    engine().expect_faults(expected);
}

/// Copies out the oldest fault that was not yet taken, as text, and clears it, so that the devices
/// work again. Returns the bytes of the text, or 0.
///
/// # Safety
///
/// `to` is null or has room for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softgpu_take_fault(to: *mut c_char, room: usize) -> usize {
    let fault = engine().take_fault();
    // SAFETY: as this function asks.
    fault.map_or(0, |fault| unsafe {
        copy_text(&fault.to_string(), to, room)
    })
}

/// The counts of this thread's submissions, as JSON: its calls by function, and by kernel its
/// launches and [`crate::engine::launch::Counts`]. `reset`: they count from 0 again. Returns the
/// bytes of the text.
///
/// # Safety
///
/// `to` is null or has room for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softgpu_counts(to: *mut c_char, room: usize, reset: bool) -> usize {
    let tally = own_tally();
    let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
    let text = counts_as_json(&inject::all_calls(), &tally);
    if reset {
        inject::forget_calls();
        tally.clear();
    }
    // SAFETY: as this function asks.
    unsafe { copy_text(&text, to, room) }
}

fn counts_as_json(calls: &BTreeMap<&'static str, u64>, tally: &Tally) -> String {
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
