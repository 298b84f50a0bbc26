//! Work on its way into streams: submissions, waits, copies.

use crate::abi::Outcome;
use crate::capture;
use crate::context::{current_device, legacy_stream, lock, Stream};
use crate::engine::memory::{Memory, View, Work};
use crate::engine::stream::{engine, Manner, Submission};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// Queues work in a stream, or adds it to the capture in which the stream is.
pub fn submit(stream: &Stream, submission: Submission) -> Outcome {
    if let Some(capture) = capture::of(stream) {
        return capture.add(stream, submission);
    }
    if stream.manner == Manner::Legacy {
        capture::legacy_call(stream.device)?;
    }
    Ok(engine().submit(stream.id, submission)?)
}

/// Waits for what is queued in a stream.
pub fn synchronize(stream: &Stream) -> Outcome {
    let position = engine().position(stream.id);
    Ok(engine().synchronize(&position, stream.device)?)
}

/// Waits for all streams of a device, as some calls do silently.
pub fn synchronize_device(device: i32) -> Outcome {
    capture::device_wide_call(device)?;
    Ok(engine().synchronize_device(device)?)
}

/// Does something that has no stream: after all that blocking streams hold, and before the call
/// returns.
pub fn at_once(submission: Submission) -> Outcome {
    capture::unsafe_call()?;
    let stream = legacy_stream(current_device()?);
    submit(&stream, submission)?;
    synchronize(&stream)
}

/// Page-locked host memory: addresses and sizes.
pub static PINNED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

pub fn is_pinned(address: usize) -> bool {
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
pub unsafe fn upload(name: &str, to: u64, from: *const c_void, bytes: usize) -> Submission {
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
pub unsafe fn download(name: &str, to: *mut c_void, from: u64, bytes: usize) -> Submission {
    let to = to as usize;
    Submission::new(name, move |memory, work| {
        let data = view(memory, work).download(from, bytes as u64)?;
        // SAFETY: the caller keeps room for it until the copy has run.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to as *mut u8, bytes) };
        Ok(())
    })
}

/// The way of work that is no kernel into the memory.
pub fn view(memory: &Arc<Memory>, work: &Arc<Work>) -> View {
    View::new(memory.clone(), work.clone(), 0)
}

pub fn copy(name: &str, to: u64, from: u64, bytes: usize) -> Submission {
    Submission::new(name, move |memory, work| {
        view(memory, work).copy(to, from, bytes as u64)
    })
}

pub fn fill(name: &str, to: u64, pattern: &[u8], count: usize) -> Submission {
    let pattern = pattern.to_vec();
    Submission::new(name, move |memory, work| {
        view(memory, work).fill(to, &pattern, count as u64)
    })
}

/// The end of an allocation, in the order of a stream.
pub fn free(address: u64) -> Submission {
    Submission::new("cuMemFreeAsync", move |memory, work| {
        memory.free(address, Some(work))
    })
    .always()
}
