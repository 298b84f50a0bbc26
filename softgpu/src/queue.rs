//! Work on its way into streams: submissions, waits, copies.

use crate::abi::Outcome;
use crate::capture;
use crate::context::Stream;
use crate::engine::memory::{Memory, View, Work};
use crate::engine::stream::{Manner, Submission, engine};
use std::ffi::c_void;
use std::sync::Arc;

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

/// A copy from the host, whose memory is read now: none of it is page-locked.
///
/// # Safety
///
/// `from` has `bytes` bytes.
pub unsafe fn upload(name: &str, to: u64, from: *const c_void, bytes: usize) -> Submission {
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

pub fn fill(name: &str, to: u64, value: u8, bytes: usize) -> Submission {
    Submission::new(name, move |memory, work| {
        view(memory, work).fill(to, value, bytes as u64)
    })
}

/// The end of an allocation, in the order of a stream.
pub fn free(address: u64) -> Submission {
    Submission::new("cuMemFreeAsync", move |memory, work| {
        memory.free(address, Some(work))
    })
    .always()
}
