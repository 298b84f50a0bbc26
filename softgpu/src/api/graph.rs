//! The driver's captures and graphs.

use crate::abi::{Error, entries, put};
use crate::capture::*;
use crate::context;

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`, `.._UPLOAD`, `.._DEVICE_LAUNCH`,
/// `.._USE_NODE_PRIORITY`.
const AUTO_FREE: u64 = 1;

const DEVICE_LAUNCH: u64 = 4;

const KNOWN_FLAGS: u64 = 15;

entries! {
    fn cuStreamBeginCapture_v2(stream: u64, mode: u32) {
        let stream = context::stream(stream)?;
        let mode = Mode::new(mode)?;
        begin(stream, mode)
    }

    fn cuStreamEndCapture(stream: u64, graph: *mut u64) {
        let stream = context::stream(stream)?;
        // An end that fails gives no graph.
        put(graph, 0)?;
        let ended = end_capture(&stream)?;
        put(graph, GRAPHS.add(ended))
    }

    fn cuStreamIsCapturing(stream: u64, status: *mut u32) {
        let stream = context::stream(stream)?;
        put(status, status_of(&stream))
    }

    fn cuGraphInstantiateWithFlags(executable: *mut u64, graph: u64, flags: u64) {
        let graph = GRAPHS.get(graph)?;
        let both = AUTO_FREE | DEVICE_LAUNCH;
        if flags & !KNOWN_FLAGS != 0 || flags & both == both {
            return Err(Error::INVALID_VALUE);
        }
        if flags & DEVICE_LAUNCH != 0 {
            return Err(Error::NOT_SUPPORTED);
        }
        put(executable, EXECUTABLES.add(Executable { graph, frees: flags & AUTO_FREE != 0 }))
    }

    fn cuGraphLaunch(executable: u64, stream: u64) {
        EXECUTABLES.get(executable)?.launch(&context::stream(stream)?)
    }

    fn cuGraphExecDestroy(executable: u64) {
        EXECUTABLES.remove(executable)?;
        Ok(())
    }

    fn cuGraphDestroy(graph: u64) {
        GRAPHS.remove(graph)?;
        Ok(())
    }
}
