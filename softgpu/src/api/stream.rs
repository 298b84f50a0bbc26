//! The driver's streams and events.

use crate::abi::{Error, Handles, Outcome, entries, put};
use crate::capture::{self, Capture};
use crate::context::{self, STREAMS, Stream, current_device, lock};
use crate::engine::memory::Clock;
use crate::engine::stream::{Manner, engine};
use crate::queue::synchronize;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The work that an event stands for.
#[derive(Clone, Default)]
enum Recorded {
    /// Nothing: whoever waits for it goes on.
    #[default]
    Never,
    /// A point in a stream's work.
    Point(Clock),
    /// Nodes of a capture.
    Nodes(Arc<Capture>, Vec<usize>),
}

pub struct Event {
    device: i32,
    /// Made without `CU_EVENT_DISABLE_TIMING`.
    timed: bool,
    recorded: Mutex<Recorded>,
    /// When it was recorded, by the host's clock: there is no GPU whose time would mean anything.
    at: Mutex<Option<Instant>>,
}

pub static EVENTS: Handles<Arc<Event>> = Handles::new(3);

fn new_stream(flags: u32) -> Outcome<u64> {
    let device = current_device()?;
    let manner = match flags {
        0 => Manner::Blocking,
        1 => Manner::NonBlocking,
        _ => return Err(Error::INVALID_VALUE),
    };
    let id = engine().new_stream(device, manner);
    Ok(STREAMS.add(Stream { id, device, manner }))
}

entries! {
    fn cuStreamCreate(handle: *mut u64, flags: u32) {
        put(handle, new_stream(flags)?)
    }

    fn cuStreamDestroy_v2(handle: u64) {
        let stream = STREAMS.remove(handle)?;
        if let Some(capture) = capture::of(&stream) {
            capture.invalidate();
        }
        engine().destroy_stream(stream.id);
        Ok(())
    }

    fn cuStreamSynchronize(handle: u64) {
        let stream = context::stream(handle)?;
        capture::stream_call(&stream)?;
        if stream.manner == Manner::Legacy {
            capture::legacy_call(stream.device)?;
        }
        synchronize(&stream)
    }

    fn cuStreamWaitEvent(handle: u64, event: u64, _flags: u32) {
        let stream = context::stream(handle)?;
        let recorded = lock(&EVENTS.get(event)?.recorded).clone();
        match (capture::of(&stream), recorded) {
            (_, Recorded::Never) => Ok(()),
            (None, Recorded::Point(clock)) => {
                engine().wait(stream.id, &clock);
                Ok(())
            }
            (Some(capture), Recorded::Point(_)) => {
                // The graph would depend on work outside of it.
                capture.invalidate();
                Err(Error::STREAM_CAPTURE_ISOLATION)
            }
            (_, Recorded::Nodes(theirs, _)) if !theirs.is_active() => Err(Error::CAPTURED_EVENT),
            (Some(capture), Recorded::Nodes(theirs, _)) if !Arc::ptr_eq(&capture, &theirs) => {
                capture.invalidate();
                theirs.invalidate();
                Err(Error::STREAM_CAPTURE_MERGE)
            }
            (None, Recorded::Nodes(..)) if stream.manner == Manner::Legacy => {
                Err(Error::STREAM_CAPTURE_IMPLICIT)
            }
            (_, Recorded::Nodes(theirs, nodes)) => theirs.wait(&stream, &nodes),
        }
    }

    fn cuEventCreate(handle: *mut u64, flags: u32) {
        const DISABLE_TIMING: u32 = 2;
        let event = Event {
            device: current_device()?,
            timed: flags & DISABLE_TIMING == 0,
            recorded: Mutex::default(),
            at: Mutex::default(),
        };
        put(handle, EVENTS.add(Arc::new(event)))
    }

    fn cuEventDestroy_v2(handle: u64) {
        EVENTS.remove(handle)?;
        Ok(())
    }

    fn cuEventRecord(handle: u64, stream_handle: u64) {
        let event = EVENTS.get(handle)?;
        let stream = context::stream(stream_handle)?;
        if event.device != stream.device {
            return Err(Error::INVALID_HANDLE);
        }
        let recorded = match capture::of(&stream) {
            Some(capture) => {
                let nodes = capture.position(&stream)?;
                Recorded::Nodes(capture, nodes)
            }
            None => {
                engine().check_device(stream.device)?;
                Recorded::Point(engine().position(stream.id))
            }
        };
        *lock(&event.recorded) = recorded;
        *lock(&event.at) = Some(Instant::now());
        Ok(())
    }

    fn cuEventSynchronize(handle: u64) {
        let event = EVENTS.get(handle)?;
        let recorded = lock(&event.recorded).clone();
        match recorded {
            Recorded::Never => Ok(()),
            Recorded::Point(clock) => Ok(engine().synchronize(&clock, event.device)?),
            Recorded::Nodes(..) => Err(Error::CAPTURED_EVENT),
        }
    }

    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: u64, end: u64) {
        let at = |handle| {
            let event = EVENTS.get(handle)?;
            let at = lock(&event.at).filter(|_| event.timed);
            at.ok_or(Error::INVALID_HANDLE)
        };
        let elapsed = at(end)?.saturating_duration_since(at(start)?);
        put(milliseconds, elapsed.as_secs_f32() * 1e3)
    }
}
