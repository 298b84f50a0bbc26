//! Captures and graphs, with the driver's rules for what may happen during a capture.
//!
//! The rules are those of the CUDA programming guide ("Prohibited and Unhandled Operations" under
//! stream capture) and of `cuThreadExchangeStreamCaptureMode`, for threads that keep the default
//! mode. What breaks one invalidates the capture; its end then fails too.

use crate::abi::{Error, Handles, Outcome};
use crate::context::{Stream, lock};
use crate::engine::stream::{Manner, Node, Submission, engine};
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

/// Whom a capture keeps from calls that it cannot see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// All threads.
    Global,
    /// The thread that began it.
    ThreadLocal,
    Relaxed,
}

impl Mode {
    pub fn new(number: u32) -> Outcome<Self> {
        match number {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(Error::INVALID_VALUE),
        }
    }
}

/// Streams whose work becomes a graph's instead of running.
pub struct Capture {
    origin: Stream,
    mode: Mode,
    thread: ThreadId,
    state: Mutex<Captured>,
}

#[derive(Default)]
struct Captured {
    invalid: bool,
    ended: bool,
    nodes: Vec<Node>,
    /// Of each stream that takes part, the nodes that its next one comes after.
    last: HashMap<u32, Vec<usize>>,
    /// A blocking stream takes part, so the legacy stream would have to wait for it.
    blocking: bool,
    /// Memory of the graph, and whether the graph frees it.
    allocations: HashMap<u64, bool>,
}

static CAPTURES: Mutex<Vec<Arc<Capture>>> = Mutex::new(vec![]);

/// Its length, for those who would not take the lock for nothing.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

impl Capture {
    fn state(&self) -> MutexGuard<'_, Captured> {
        lock(&self.state)
    }

    /// The state of a capture that nothing has broken.
    fn valid(&self) -> Outcome<MutexGuard<'_, Captured>> {
        let state = self.state();
        match state.invalid {
            true => Err(Error::STREAM_CAPTURE_INVALIDATED),
            false => Ok(state),
        }
    }

    pub fn invalidate(&self) {
        self.state().invalid = true;
    }

    /// Events recorded in it still stand for its nodes.
    pub fn is_active(&self) -> bool {
        !self.state().ended
    }

    /// Adds a node to a stream's.
    pub fn add(&self, stream: &Stream, submission: Submission) -> Outcome {
        let mut state = self.valid()?;
        let node = state.nodes.len();
        let after = state.last.insert(stream.id, vec![node]).unwrap_or_default();
        state.nodes.push(Node {
            submission,
            after,
            branch: stream.id,
        });
        Ok(())
    }

    /// The nodes that an event recorded now stands for.
    pub fn position(&self, stream: &Stream) -> Outcome<Vec<usize>> {
        let state = self.valid()?;
        Ok(state.last.get(&stream.id).cloned().unwrap_or_default())
    }

    /// A stream, which joins if it does not take part yet, waits for nodes.
    pub fn wait(&self, stream: &Stream, nodes: &[usize]) -> Outcome {
        let mut state = self.valid()?;
        state.blocking |= stream.manner == Manner::Blocking;
        let last = state.last.entry(stream.id).or_default();
        for &node in nodes {
            if !last.contains(&node) {
                last.push(node);
            }
        }
        Ok(())
    }

    /// Memory that lives from one node to another, or to a free after the graph.
    pub fn allocate(&self, stream: &Stream, size: u64) -> Outcome<u64> {
        let memory = &engine().memory;
        let address = memory
            .allocate(size, stream.device, None)
            .ok_or(Error::OUT_OF_MEMORY)?;
        memory.make_dormant(address);
        let node = Submission::new("cuMemAllocAsync", move |memory, work| {
            memory.wake(address, work)
        });
        self.add(stream, node.always())?;
        self.state().allocations.insert(address, false);
        Ok(address)
    }

    pub fn free(&self, stream: &Stream, address: u64) -> Outcome {
        {
            let mut state = self.state();
            match state.allocations.get_mut(&address) {
                Some(freed) if !*freed => *freed = true,
                // Outside memory, or a second free.
                _ => {
                    state.invalid = true;
                    return Err(Error::INVALID_VALUE);
                }
            }
        }
        self.add(stream, free_node(address))
    }
}

pub fn free_node(address: u64) -> Submission {
    Submission::new("cuMemFreeAsync", move |memory, work| {
        memory.sleep(address, work)
    })
    .always()
}

/// The capture that a stream takes part in.
pub fn of(stream: &Stream) -> Option<Arc<Capture>> {
    if ACTIVE.load(Relaxed) == 0 {
        return None;
    }
    lock(&CAPTURES)
        .iter()
        .find(|capture| capture.state().last.contains_key(&stream.id))
        .cloned()
}

fn forbid(error: Error, concerns: impl Fn(&Capture) -> bool) -> Outcome {
    if ACTIVE.load(Relaxed) == 0 {
        return Ok(());
    }
    let mut outcome = Ok(());
    for capture in lock(&CAPTURES).iter().filter(|capture| concerns(capture)) {
        capture.invalidate();
        outcome = Err(error);
    }
    outcome
}

/// A call that no stream's queue sees, such as `cuMemAlloc`: unsafe while the thread captures, and
/// in the mode GLOBAL while any does.
pub fn unsafe_call() -> Outcome {
    let here = std::thread::current().id();
    forbid(Error::STREAM_CAPTURE_UNSUPPORTED, |capture| {
        if capture.thread == here {
            capture.mode != Mode::Relaxed
        } else {
            capture.mode == Mode::Global
        }
    })
}

/// A call that waits for all streams of a device. It would have to wait for those in capture,
/// whatever their mode and thread.
pub fn device_wide_call(device: i32) -> Outcome {
    forbid(Error::STREAM_CAPTURE_UNSUPPORTED, |capture| {
        capture.origin.device == device
    })
}

/// Use of the legacy stream, which would wait for blocking streams in capture.
pub fn legacy_call(device: i32) -> Outcome {
    forbid(Error::STREAM_CAPTURE_IMPLICIT, |capture| {
        capture.origin.device == device && capture.state().blocking
    })
}

/// A wait for one stream, or a question about it.
pub fn stream_call(stream: &Stream) -> Outcome {
    match of(stream) {
        Some(capture) => {
            capture.invalidate();
            Err(Error::STREAM_CAPTURE_UNSUPPORTED)
        }
        None => Ok(()),
    }
}

/// The result of a capture.
pub struct Graph {
    nodes: Vec<Node>,
    /// Memory, and whether the graph frees it.
    allocations: HashMap<u64, bool>,
    /// Memory that a launch made, and that nobody freed.
    kept: Mutex<HashSet<u64>>,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let kept = lock(&self.kept);
        for &address in self.allocations.keys() {
            if !kept.contains(&address) {
                // It is the graph's own, and its last work has run: work in the queues keeps the
                // graph.
                let _ = engine().memory.free(address, None);
            }
        }
    }
}

/// A graph that can be launched.
#[derive(Clone)]
pub struct Executable {
    pub graph: Arc<Graph>,
    /// A launch frees what the launch before it left.
    pub frees: bool,
}

impl Executable {
    pub fn launch(&self, stream: &Stream) -> Outcome {
        let Self { graph, frees } = self;
        stream_call(stream)?;
        if stream.manner == Manner::Legacy {
            legacy_call(stream.device)?;
        }
        {
            let mut kept = lock(&graph.kept);
            if !kept.is_empty() && !*frees {
                return Err(Error::INVALID_VALUE);
            }
            for address in kept.drain() {
                engine().submit(stream.id, free_node(address))?;
            }
            let left = graph.allocations.iter().filter(|(_, freed)| !**freed);
            kept.extend(left.map(|(address, _)| address));
        }
        let keep: Arc<dyn Any + Send + Sync> = graph.clone();
        engine().submit_graph(stream.id, &graph.nodes, &keep)?;
        Ok(())
    }
}

pub static GRAPHS: Handles<Arc<Graph>> = Handles::new(5);

pub static EXECUTABLES: Handles<Executable> = Handles::new(6);

/// Graphs and executable graphs that the program holds.
pub fn live() -> u64 {
    GRAPHS.count() + EXECUTABLES.count()
}

/// Frees memory that a graph left, in the order of a stream. False: no graph left it.
pub fn free_kept(stream: &Stream, address: u64) -> Outcome<bool> {
    let holds = |executable: &Executable| lock(&executable.graph.kept).contains(&address);
    let Some(executable) = EXECUTABLES.find(holds) else {
        return Ok(false);
    };
    lock(&executable.graph.kept).remove(&address);
    engine().submit(stream.id, free_node(address))?;
    Ok(true)
}

/// Begins a capture with a stream.
pub fn begin(stream: Stream, mode: Mode) -> Outcome {
    if stream.manner == Manner::Legacy {
        return Err(Error::STREAM_CAPTURE_UNSUPPORTED);
    }
    if of(&stream).is_some() {
        return Err(Error::INVALID_VALUE);
    }
    let capture = Capture {
        mode,
        thread: std::thread::current().id(),
        state: Mutex::new(Captured {
            last: HashMap::from([(stream.id, vec![])]),
            blocking: stream.manner == Manner::Blocking,
            ..Captured::default()
        }),
        origin: stream,
    };
    let mut all = lock(&CAPTURES);
    all.push(Arc::new(capture));
    ACTIVE.store(all.len(), Relaxed);
    Ok(())
}

/// 0: a stream is not captured. 1: it is. 2: it is, in vain.
pub fn status_of(stream: &Stream) -> u32 {
    match of(stream) {
        None => 0,
        Some(capture) if capture.state().invalid => 2,
        Some(_) => 1,
    }
}

pub fn end_capture(stream: &Stream) -> Outcome<Arc<Graph>> {
    let capture = of(stream).ok_or(Error::INVALID_VALUE)?;
    if capture.origin.id != stream.id {
        capture.invalidate();
        return Err(Error::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != Mode::Relaxed && capture.thread != std::thread::current().id() {
        return Err(Error::STREAM_CAPTURE_WRONG_THREAD);
    }
    {
        let mut all = lock(&CAPTURES);
        all.retain(|other| !Arc::ptr_eq(other, &capture));
        ACTIVE.store(all.len(), Relaxed);
    }
    let ended = Captured {
        ended: true,
        ..Captured::default()
    };
    let captured = std::mem::replace(&mut *capture.state(), ended);
    captured.into_graph(stream)
}

impl Captured {
    fn into_graph(self, stream: &Stream) -> Outcome<Arc<Graph>> {
        let graph = Arc::new(Graph {
            nodes: self.nodes,
            allocations: self.allocations,
            kept: Mutex::default(),
        });
        if self.invalid {
            return Err(Error::STREAM_CAPTURE_INVALIDATED);
        }
        // Each node must come before the end of the stream that began.
        let mut joined = vec![false; graph.nodes.len()];
        let mut left = self.last.get(&stream.id).cloned().unwrap_or_default();
        while let Some(node) = left.pop() {
            if !std::mem::replace(&mut joined[node], true) {
                left.extend(&graph.nodes[node].after);
            }
        }
        match joined.iter().all(|&joined| joined) {
            true => Ok(graph),
            false => Err(Error::STREAM_CAPTURE_UNJOINED),
        }
    }
}
