//! The GPU of the benches: handles of it, its memory, and calls in a CUDA graph, which it times by
//! itself.
#![allow(dead_code)] // each bench uses its share

use candle::cuda_backend::WrapErr;
use candle::cuda_backend::cudarc::driver::{CudaGraph, result, sys};
use candle::{CudaDevice, Device, Result};
use std::sync::OnceLock;
use std::time::Duration;

/// GPU 0. All ids share a handle, for each one that is made loads kernels of its own.
pub fn queue() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    shared(&DEVICE, || Device::new_cuda(0))
}

/// The same on a stream that records events.
pub fn with_events() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    shared(&DEVICE, || Device::new_cuda_with_stream(0))
}

/// The same on a stream that can be recorded, so without events.
pub fn recordable() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    shared(&DEVICE, || {
        let device = CudaDevice::new_with_stream(0)?;
        // SAFETY: the benches use one stream only, whose order is all the order they need.
        unsafe { device.disable_event_tracking() };
        Ok(Device::Cuda(device))
    })
}

fn shared(device: &OnceLock<Device>, new: fn() -> Result<Device>) -> Device {
    let new = || {
        let device = new()?;
        keep_freed_memory(&device)?;
        Ok::<_, candle::Error>(device)
    };
    device.get_or_init(|| new().expect("a GPU")).clone()
}

/// Keeps what is freed on a GPU at hand for the next allocation. Else the driver takes it back
/// whenever the queue is waited for, and the clock would see it map memory.
fn keep_freed_memory(device: &Device) -> Result<()> {
    let mut threshold = u64::MAX;
    // SAFETY: the attribute's value is a u64.
    unsafe {
        result::mem_pool::set_attribute(
            pool(device)?,
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            (&raw mut threshold).cast(),
        )
        .w()
    }
}

/// The pool that candle's allocations on a GPU come from.
fn pool(device: &Device) -> Result<sys::CUmemoryPool> {
    let gpu = device.as_cuda_device()?.cuda_stream().context().cu_device();
    // SAFETY: the GPU is that of a live context.
    unsafe { result::device::get_mem_pool(gpu).w() }
}

/// Runs `work`, and returns the most bytes that were allocated on the GPU at once meanwhile, beyond
/// those that already were.
pub fn peak_of<T>(device: &Device, work: impl FnOnce() -> Result<T>) -> Result<(T, usize)> {
    use sys::CUmemPool_attribute::{
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT as NOW, CU_MEMPOOL_ATTR_USED_MEM_HIGH as HIGH,
    };
    let pool = pool(device)?;
    let bytes = |attribute| {
        let mut bytes = 0u64;
        // SAFETY: the pool is a device's own, and the attribute's value a u64.
        unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()).w()? };
        Ok::<_, candle::Error>(bytes as usize)
    };
    device.synchronize()?;
    let before = bytes(NOW)?;
    let mut reset = 0u64;
    // SAFETY: as above. A high mark takes 0 only, which sets it to what is allocated now.
    unsafe { result::mem_pool::set_attribute(pool, HIGH, (&raw mut reset).cast()).w()? };
    let result = work()?;
    device.synchronize()?;
    Ok((result, bytes(HIGH)?.saturating_sub(before)))
}

/// Recorded calls.
pub struct Recording {
    device: CudaDevice,
    graph: CudaGraph,
}

// SAFETY: any thread may launch a graph, as long as no two use it at the same time, which takes a
// shared reference: a Recording is Send, and not Sync.
unsafe impl Send for Recording {}

impl Recording {
    /// Records what `calls` queues on the GPU of [`recordable`]. What it allocates it must drop.
    pub fn new(device: &Device, calls: impl Fn() -> Result<()>) -> Result<Self> {
        let device = device.as_cuda_device()?.clone();
        // candle uploads the shapes that some of its kernels take. A recording finds them there.
        let _uploads = device.enable_cuda_graph_htod_cache();
        calls()?;
        let stream = device.cuda_stream();
        stream.synchronize().w()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).w()?;
        let recorded = calls();
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).w()?;
        recorded?;
        match graph {
            Some(graph) => Ok(Self { device, graph }),
            None => candle::bail!("expected calls that queue work on the GPU, got none"),
        }
    }

    /// The time of `replays` replays, from an event before the first to one after the last.
    pub fn time(&self, replays: usize) -> Result<Duration> {
        let stream = self.device.cuda_stream();
        let event = || stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        stream.synchronize().w()?;
        let start = event().w()?;
        for _ in 0..replays {
            self.graph.launch().w()?;
        }
        let end = event().w()?;
        let milliseconds = start.elapsed_ms(&end).w()?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds) / 1e3))
    }
}
