//! The driver through its C interface, with copies, fills and products as work.

use softgpu::api::{
    blas::*, device::*, graph::*, memory::*, module::*, nccl::*, rand::*, stream::*,
};
use softgpu::engine::memory::{Kind, Memory, Pattern, View, Work};
use softgpu::engine::stream::engine;
use softgpu::testing::*;
use std::ffi::{c_void, CString};
use std::ptr::null;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const NON_BLOCKING: u32 = 1;
const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

/// The process's GPU, for one test at a time, whose faults are looked at.
struct Gpu {
    _alone: MutexGuard<'static, ()>,
}

fn ok(status: i32) {
    assert_eq!(status, 0);
}

impl Gpu {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        std::env::set_var("SOFTGPU_DEVICES", "2");
        use_device(0);
        softgpu_expect_faults(true);
        Self { _alone: alone }
    }

    /// The fault of what was queued since the last one.
    fn fault(&self) -> Option<String> {
        for device in 0..2 {
            let _ = engine().synchronize_device(device);
        }
        let mut text = vec![0u8; 4096];
        // SAFETY: the buffer has the room that is named.
        let bytes = unsafe { softgpu_take_fault(text.as_mut_ptr().cast(), text.len()) };
        (bytes > 0).then(|| String::from_utf8_lossy(&text[..bytes]).into_owned())
    }

    fn assert_fault(&self, parts: &[&str]) {
        let fault = self.fault().expect("a fault");
        for part in parts {
            assert!(fault.contains(part), "expected {part:?} in {fault:?}");
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        while let Some(fault) = self.fault() {
            assert!(std::thread::panicking(), "not looked at: {fault}");
        }
    }
}

/// Makes a device's context current in this thread.
fn use_device(device: i32) {
    let mut context = 0;
    // SAFETY: the pointer is to a local variable.
    unsafe {
        ok(cuInit(0));
        ok(cuDevicePrimaryCtxRetain(&mut context, device));
        ok(cuCtxSetCurrent(context));
    }
}

/// A stream that is destroyed at the end.
struct Queue(u64);

impl Queue {
    fn new() -> Self {
        let mut stream = 0;
        // SAFETY: the pointer is to a local variable.
        ok(unsafe { cuStreamCreate(&mut stream, NON_BLOCKING) });
        Self(stream)
    }

    fn alloc(&self, bytes: usize) -> u64 {
        let mut address = 0;
        // SAFETY: the pointer is to a local variable.
        ok(unsafe { cuMemAllocAsync(&mut address, bytes, self.0) });
        address
    }

    fn free(&self, address: u64) {
        // SAFETY: handles and addresses are numbers that the driver checks.
        ok(unsafe { cuMemFreeAsync(address, self.0) });
    }

    fn fill(&self, address: u64, value: u8, bytes: usize) -> i32 {
        // SAFETY: handles and addresses are numbers that the driver checks.
        unsafe { cuMemsetD8Async(address, value, bytes, self.0) }
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) -> i32 {
        // SAFETY: handles and addresses are numbers that the driver checks.
        unsafe { cuMemcpyDtoDAsync_v2(to, from, bytes, self.0) }
    }

    fn put<T: Copy>(&self, address: u64, values: &[T]) {
        let bytes = std::mem::size_of_val(values);
        // SAFETY: the host's side is a slice of as many bytes.
        ok(unsafe { cuMemcpyHtoDAsync_v2(address, values.as_ptr().cast(), bytes, self.0) });
    }

    fn get<T: Copy + Default>(&self, address: u64, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        assert_eq!(self.try_get(address, &mut values), 0);
        values
    }

    fn try_get<T: Copy>(&self, address: u64, values: &mut [T]) -> i32 {
        let bytes = std::mem::size_of_val(values);
        // SAFETY: the host's side is a slice of as many bytes.
        unsafe { cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), address, bytes, self.0) }
    }

    fn sync(&self) -> i32 {
        // SAFETY: handles are numbers that the driver checks.
        unsafe { cuStreamSynchronize(self.0) }
    }

    fn begin(&self, mode: u32) -> i32 {
        // SAFETY: handles are numbers that the driver checks.
        unsafe { cuStreamBeginCapture_v2(self.0, mode) }
    }

    fn end(&self) -> Result<u64, i32> {
        let mut graph = 0;
        // SAFETY: the pointer is to a local variable.
        match unsafe { cuStreamEndCapture(self.0, &mut graph) } {
            0 => Ok(graph),
            error => Err(error),
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: handles are numbers that the driver checks.
        unsafe { cuStreamDestroy_v2(self.0) };
    }
}

struct Mark(u64);

impl Mark {
    fn new() -> Self {
        let mut event = 0;
        // SAFETY: the pointer is to a local variable.
        ok(unsafe { cuEventCreate(&mut event, 2) });
        Self(event)
    }

    fn on(queue: &Queue) -> Self {
        let mark = Self::new();
        // SAFETY: handles are numbers that the driver checks.
        ok(unsafe { cuEventRecord(mark.0, queue.0) });
        mark
    }

    fn hold(&self, queue: &Queue) -> i32 {
        // SAFETY: handles are numbers that the driver checks.
        unsafe { cuStreamWaitEvent(queue.0, self.0, 0) }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: handles are numbers that the driver checks.
        unsafe { cuEventDestroy_v2(self.0) };
    }
}

fn live(kind: &str) -> u64 {
    let kind = CString::new(kind).unwrap();
    // SAFETY: the text ends with a zero.
    unsafe { softgpu_live(kind.as_ptr()) }
}

fn fail(name: Option<&str>, n: u64) {
    let name = name.map(|name| CString::new(name).unwrap());
    // SAFETY: the text ends with a zero.
    unsafe { softgpu_fail(name.as_ref().map_or(null(), |name| name.as_ptr()), n) }
}

#[test]
fn a_stream_keeps_its_order() {
    let gpu = Gpu::new();
    let queue = Queue::new();
    let (a, b) = (queue.alloc(64), queue.alloc(64));
    ok(queue.fill(a, 1, 64));
    ok(queue.copy(b, a, 64));
    ok(queue.fill(a, 2, 64));
    assert_eq!(queue.get::<u8>(b, 64), [1; 64]);
    assert_eq!(queue.get::<u8>(a, 64), [2; 64]);
    queue.free(a);
    queue.free(b);
    assert_eq!(gpu.fault(), None);
}

#[test]
fn a_missing_wait_is_a_race() {
    let gpu = Gpu::new();
    let (one, two) = (Queue::new(), Queue::new());
    let a = one.alloc(256);
    ok(one.sync());
    ok(one.fill(a, 1, 256));
    ok(two.fill(a, 2, 256));
    gpu.assert_fault(&[
        "race",
        "cuMemsetD8Async",
        "byte 0 of allocation",
        "256 bytes",
    ]);
    // With the wait it is none.
    ok(one.fill(a, 1, 256));
    ok(Mark::on(&one).hold(&two));
    ok(two.fill(a, 2, 256));
    ok(two.sync());
    assert_eq!(two.get::<u8>(a, 4), [2; 4]);
    // A wait for something else does not order them.
    let early = Mark::on(&one);
    ok(one.fill(a, 3, 256));
    ok(early.hold(&two));
    ok(two.copy(a + 128, a, 64));
    gpu.assert_fault(&["race"]);
    two.free(a);
}

#[test]
fn readers_on_two_streams_are_both_waited_for() {
    let gpu = Gpu::new();
    let (one, two, three) = (Queue::new(), Queue::new(), Queue::new());
    let (a, b, c) = (one.alloc(64), one.alloc(64), one.alloc(64));
    ok(one.fill(a, 1, 64));
    ok(one.sync());
    ok(one.copy(b, a, 64));
    ok(two.copy(c, a, 64));
    // `three` waits for one of the two readers.
    ok(Mark::on(&two).hold(&three));
    ok(three.fill(a, 2, 64));
    gpu.assert_fault(&["race", "writes", "reads"]);
}

#[test]
fn an_allocation_belongs_to_its_stream_until_others_wait() {
    let gpu = Gpu::new();
    let (one, two) = (Queue::new(), Queue::new());
    let a = one.alloc(64);
    ok(two.fill(a, 1, 64));
    gpu.assert_fault(&["after the allocation"]);
    one.free(a);
    assert_eq!(gpu.fault(), None);
}

#[test]
fn the_legacy_stream_waits_for_blocking_ones() {
    let gpu = Gpu::new();
    let mut stream = 0;
    // SAFETY: the pointer is to a local variable.
    ok(unsafe { cuStreamCreate(&mut stream, 0) });
    let (blocking, legacy, other) = (Queue(stream), Queue(0), Queue::new());
    let a = blocking.alloc(64);
    ok(blocking.fill(a, 1, 64));
    ok(legacy.fill(a, 2, 64));
    ok(blocking.fill(a, 3, 64));
    assert_eq!(blocking.get::<u8>(a, 1), [3]);
    assert_eq!(gpu.fault(), None);
    // One that does not block is on its own.
    ok(legacy.fill(a, 4, 64));
    ok(other.fill(a, 5, 64));
    gpu.assert_fault(&["race"]);
    std::mem::forget(legacy);
}

#[test]
fn freed_memory_is_not_used() {
    let gpu = Gpu::new();
    let (one, two) = (Queue::new(), Queue::new());
    let a = one.alloc(64);
    ok(one.fill(a, 1, 64));
    one.free(a);
    ok(one.fill(a, 2, 64));
    gpu.assert_fault(&["freed", "byte 0 of allocation"]);
    // A free that a reader on another stream does not come before.
    let a = one.alloc(64);
    let b = one.alloc(64);
    ok(one.fill(a, 1, 64));
    ok(one.sync());
    ok(two.copy(b, a, 64));
    one.free(a);
    gpu.assert_fault(&["a"]);
    // Twice.
    let a = one.alloc(64);
    one.free(a);
    one.free(a);
    gpu.assert_fault(&["second time"]);
}

#[test]
fn what_nothing_wrote_is_poison() {
    let gpu = Gpu::new();
    let queue = Queue::new();
    let (a, b) = (queue.alloc(12), queue.alloc(12));
    ok(queue.fill(a + 5, 0, 2));
    // A copy and a download may have it.
    ok(queue.copy(b, a, 12));
    let expected = [
        0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff,
    ];
    assert_eq!(queue.get::<u8>(b, 12), expected);
    assert_eq!(gpu.fault(), None);
    // A kernel may not.
    let memory = Arc::new(Memory::default());
    let address = memory.allocate(8, 0, None).unwrap();
    let mut view = View::new(memory, work("k", 1, 1, 1), 0);
    view.touch(Kind::Store, address, 6, 2).unwrap();
    view.touch(Kind::Load, address, 6, 2).unwrap();
    let refused = view.touch(Kind::Load, address, 8, 8).unwrap_err();
    assert!(refused.contains("byte 6 of"), "{refused}");
}

#[test]
fn one_element_too_many_is_out_of_bounds() {
    let gpu = Gpu::new();
    let queue = Queue::new();
    let a = queue.alloc(1000);
    ok(queue.fill(a, 0, 1000));
    ok(queue.sync());
    ok(queue.fill(a, 0, 1001));
    gpu.assert_fault(&["out of bounds", "first byte after the end", "1000 bytes"]);
    ok(queue.fill(a + 1016, 0, 4));
    gpu.assert_fault(&["16 bytes after the end"]);
    let mut local = 0u32;
    ok(queue.fill(&raw mut local as u64, 0, 4));
    gpu.assert_fault(&["no memory of a device"]);
}

#[test]
fn a_device_has_its_own_memory() {
    let gpu = Gpu::new();
    let queue = Queue::new();
    let a = queue.alloc(64);
    ok(queue.sync());
    use_device(1);
    let other = Queue::new();
    ok(other.fill(a, 0, 64));
    gpu.assert_fault(&["device 1", "of device 0"]);
}

fn work(name: &str, stream: u32, number: u64, blocks: u32) -> Arc<Work> {
    Arc::new(Work::new(name.into(), 0, stream, number, blocks))
}

fn access(
    view: &mut View,
    kind: Kind,
    size: u32,
    address: impl Fn(u64) -> u64,
) -> Result<(), String> {
    access_of(view, kind, size, u32::MAX, address)
}

fn access_of(
    view: &mut View,
    kind: Kind,
    size: u32,
    mask: u32,
    address: impl Fn(u64) -> u64,
) -> Result<(), String> {
    let addresses = std::array::from_fn(|lane| address(lane as u64));
    let pattern = Pattern::of(&addresses, mask, size);
    view.check(kind, size, mask, &addresses, pattern)
        .map_err(|(lane, what)| format!("lane {lane}: {what}"))
}

#[test]
fn blocks_do_not_touch_what_others_write() {
    let memory = Arc::new(Memory::default());
    let a = memory.allocate(4096, 0, None).unwrap();
    let launch = work("kernel", 1, 1, 4);
    let block = |block| View::new(memory.clone(), launch.clone(), block);
    let (mut zero, mut one) = (block(0), block(1));
    // Neighbouring elements of any size are apart.
    for size in [1, 2, 4, 8, 16] {
        let apart = u64::from(size);
        access(&mut zero, Kind::Store, size, |lane| a + lane * 2 * apart).unwrap();
        access(&mut one, Kind::Store, size, |lane| {
            a + (lane * 2 + 1) * apart
        })
        .unwrap();
        access(&mut zero, Kind::Load, size, |lane| a + lane * 2 * apart).unwrap();
        access(&mut one, Kind::Load, size, |lane| {
            a + (lane * 2 + 1) * apart
        })
        .unwrap();
        let (wide, next) = (work("wide", 1, 2 * apart, 2), size * 2);
        let mut wide = View::new(memory.clone(), wide, 0);
        if next <= 16 {
            // A later launch reads both at once.
            access(&mut wide, Kind::Load, next, |lane| a + lane * apart * 2).unwrap();
        }
        let later = work("kernel", 1, 2 * apart + 1, 4);
        zero = View::new(memory.clone(), later.clone(), 0);
        one = View::new(memory.clone(), later, 1);
    }
    // The same is not.
    access(&mut zero, Kind::Store, 2, |lane| a + lane * 2).unwrap();
    let refused = access(&mut one, Kind::Store, 2, |lane| a + 62 + lane * 2).unwrap_err();
    assert!(refused.starts_with("lane 0: race: writes"), "{refused}");
    assert!(refused.contains("block 0 of kernel"), "{refused}");
    let refused = access(&mut one, Kind::Load, 4, |lane| a + 60 + lane % 2 * 4).unwrap_err();
    assert!(refused.starts_with("lane 0: race: reads"), "{refused}");
    // Many may read, but then none of them may write.
    let last = work("last", 1, 100, 4);
    let block = |block| View::new(memory.clone(), last.clone(), block);
    for reader in 0..3 {
        access(&mut block(reader), Kind::Load, 4, |lane| a + lane * 4).unwrap();
    }
    let refused = access(&mut block(0), Kind::Store, 4, |lane| a + lane * 4).unwrap_err();
    assert!(refused.contains("several blocks of last"), "{refused}");
}

#[test]
fn a_fault_names_the_first_lane_whatever_the_lanes_have_in_common() {
    let memory = Arc::new(Memory::default());
    let a = memory.allocate(100, 0, None).unwrap();
    let mut view = View::new(memory, work("k", 1, 1, 1), 0);
    // Neighbouring lanes, and some with gaps between them. Lane 25 is the first beyond the end.
    for mask in [u32::MAX << 4, 0x0ff0_fff0, 0x0202_2220] {
        let refused = access_of(&mut view, Kind::Store, 4, mask, |lane| a + lane * 4);
        let refused = refused.unwrap_err();
        assert!(refused.starts_with("lane 25: out of bounds"), "{refused}");
    }
    // One operand for all.
    let refused = access_of(&mut view, Kind::Store, 4, 0xfff0, |_| a + 100).unwrap_err();
    assert!(refused.starts_with("lane 4: out of bounds"), "{refused}");
    // Lanes 4 to 20 write what 4 to 24 read; lane 21 finds nothing.
    for size in [1, 2, 4] {
        let memory = Arc::new(Memory::default());
        let a = memory.allocate(200, 0, None).unwrap();
        let mut view = View::new(memory, work("k", 1, 1, 1), 0);
        let place = |lane| a + lane * u64::from(size);
        access_of(&mut view, Kind::Store, size, 0x001f_fff0, place).unwrap();
        access_of(&mut view, Kind::Load, size, 0x001f_fff0, place).unwrap();
        let refused = access_of(&mut view, Kind::Load, size, 0x01ff_fff0, place).unwrap_err();
        assert!(refused.starts_with("lane 21: reads"), "{refused}");
        access_of(&mut view, Kind::Load, size, 0x01ff_fff0, |_| place(20)).unwrap();
        let refused = access_of(&mut view, Kind::Load, size, 0x01ff_fff0, |_| place(21));
        assert!(refused.unwrap_err().starts_with("lane 4: reads"));
    }
}

#[test]
fn a_view_that_moves_to_another_block_is_that_block() {
    let memory = Arc::new(Memory::default());
    let a = memory.allocate(128, 0, None).unwrap();
    let mut view = View::new(memory, work("k", 1, 1, 2), 0);
    access(&mut view, Kind::Store, 4, |lane| a + lane * 4).unwrap();
    view.move_to(1);
    let refused = access(&mut view, Kind::Load, 4, |lane| a + lane * 4).unwrap_err();
    assert!(refused.contains("block 0 of k"), "{refused}");
    view.move_to(0);
    access(&mut view, Kind::Load, 4, |lane| a + lane * 4).unwrap();
}

#[test]
fn the_read_only_cache_is_for_what_the_launch_does_not_write() {
    let memory = Arc::new(Memory::default());
    let a = memory.allocate(128, 0, None).unwrap();
    let mut writer = View::new(memory.clone(), work("writer", 1, 1, 1), 0);
    access(&mut writer, Kind::Store, 4, |lane| a + lane * 4).unwrap();
    access(&mut writer, Kind::Load, 4, |lane| a + lane * 4).unwrap();
    let refused = access(&mut writer, Kind::LoadReadOnly, 4, |lane| a + lane * 4).unwrap_err();
    assert!(refused.contains("memory that nothing writes"), "{refused}");
    let mut reader = View::new(memory, work("reader", 1, 2, 1), 0);
    access(&mut reader, Kind::LoadReadOnly, 4, |lane| a + lane * 4).unwrap();
}

#[test]
fn addresses_are_multiples_of_the_size() {
    let memory = Arc::new(Memory::default());
    let a = memory.allocate(4096, 0, None).unwrap();
    let mut view = View::new(memory, work("k", 1, 1, 1), 0);
    let refused = access(&mut view, Kind::Store, 4, |lane| a + 2 + lane * 4).unwrap_err();
    assert!(refused.starts_with("lane 0: misaligned"), "{refused}");
    let refused = access(&mut view, Kind::Store, 8, |lane| {
        a + lane * 16 + lane / 31 * 4
    })
    .unwrap_err();
    assert!(refused.starts_with("lane 31: misaligned"), "{refused}");
    let refused = access(&mut view, Kind::Store, 4, |lane| a + 4096 - 64 + lane * 4).unwrap_err();
    assert!(refused.starts_with("lane 16: out of bounds"), "{refused}");
}

/// Captures `body` and gives the graph in a form that can be launched.
fn capture(queue: &Queue, body: impl FnOnce()) -> (u64, u64) {
    ok(queue.begin(THREAD_LOCAL));
    body();
    let graph = queue.end().expect("a graph");
    let mut executable = 0;
    // SAFETY: the pointer is to a local variable.
    ok(unsafe { cuGraphInstantiateWithFlags(&mut executable, graph, 0) });
    (graph, executable)
}

fn launch(executable: u64, queue: &Queue) -> i32 {
    // SAFETY: handles are numbers that the driver checks.
    unsafe { cuGraphLaunch(executable, queue.0) }
}

fn destroy((graph, executable): (u64, u64)) {
    // SAFETY: handles are numbers that the driver checks.
    unsafe {
        ok(cuGraphExecDestroy(executable));
        ok(cuGraphDestroy(graph));
    }
}

#[test]
fn a_graph_replays() {
    let gpu = Gpu::new();
    let (one, two) = (Queue::new(), Queue::new());
    let before = live("allocations");
    let (a, b) = (one.alloc(64), one.alloc(64));
    ok(one.fill(a, 1, 64));
    ok(one.fill(b, 9, 64));
    ok(one.sync());
    let mut inner = 0;
    // Two branches, and memory of the graph's own.
    let graph = capture(&one, || {
        inner = one.alloc(64);
        ok(one.copy(inner, a, 64));
        ok(Mark::on(&one).hold(&two));
        ok(two.copy(b, inner, 64));
        ok(Mark::on(&two).hold(&one));
        one.free(inner);
    });
    assert_eq!(one.get::<u8>(b, 1), [9], "a capture runs nothing");
    for value in 3..6 {
        ok(one.fill(a, value, 64));
        ok(launch(graph.1, &one));
        assert_eq!(one.get::<u8>(b, 64), [value; 64]);
    }
    // Its memory is not there between the launches.
    ok(one.copy(b, inner, 64));
    gpu.assert_fault(&["memory of a graph that is not alive"]);
    destroy(graph);
    one.free(a);
    one.free(b);
    ok(one.sync());
    assert_eq!(live("allocations"), before);
}

#[test]
fn branches_of_a_graph_race_as_streams_do() {
    let gpu = Gpu::new();
    let (one, two) = (Queue::new(), Queue::new());
    let a = one.alloc(64);
    ok(one.fill(a, 1, 64));
    ok(one.sync());
    let graph = capture(&one, || {
        ok(Mark::on(&one).hold(&two));
        ok(two.fill(a, 2, 64));
        ok(one.fill(a, 3, 64));
        ok(Mark::on(&two).hold(&one));
    });
    ok(launch(graph.1, &one));
    gpu.assert_fault(&["race"]);
    destroy(graph);
}

#[test]
fn memory_that_a_graph_leaves_is_freed_outside() {
    let gpu = Gpu::new();
    let queue = Queue::new();
    let mut left = 0;
    let graph = capture(&queue, || {
        left = queue.alloc(16);
        ok(queue.fill(left, 4, 16));
    });
    ok(launch(graph.1, &queue));
    assert_eq!(queue.get::<u8>(left, 16), [4; 16]);
    assert_eq!(launch(graph.1, &queue), 1, "it is still there");
    queue.free(left);
    ok(launch(graph.1, &queue));
    queue.free(left);
    ok(queue.sync());
    assert_eq!(gpu.fault(), None);
    destroy(graph);
}

/// Errors of a call in a capture: the call's, then the end's.
fn breaks(mode: u32, call: impl FnOnce(&Queue) -> i32) -> (i32, i32) {
    let queue = Queue::new();
    ok(queue.begin(mode));
    let error = call(&queue);
    let end = match queue.end() {
        Ok(graph) => {
            // SAFETY: handles are numbers that the driver checks.
            ok(unsafe { cuGraphDestroy(graph) });
            0
        }
        Err(end) => end,
    };
    (error, end)
}

const UNSUPPORTED: (i32, i32) = (900, 901);

/// In another thread with the same device.
fn elsewhere(call: impl FnOnce() -> i32 + Send) -> i32 {
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                use_device(0);
                call()
            })
            .join()
            .unwrap()
    })
}

#[test]
fn captures_follow_the_drivers_rules() {
    let _gpu = Gpu::new();
    let outside = Queue::new();
    let a = outside.alloc(64);
    ok(outside.fill(a, 0, 64));
    ok(outside.sync());
    let mut host = [0u8; 4];
    // SAFETY: handles and addresses are numbers that the driver checks, and other pointers are to
    // local variables.
    unsafe {
        let allocate = || {
            let mut address = 0;
            let error = cuMemAlloc_v2(&mut address, 64);
            cuMemFree_v2(address);
            error
        };
        // The stream itself.
        assert_eq!(breaks(RELAXED, |queue| queue.sync()), UNSUPPORTED);
        assert_eq!(
            breaks(RELAXED, |queue| queue.try_get(a, &mut host)),
            UNSUPPORTED
        );
        // All streams, from any thread and in any mode.
        for mode in [GLOBAL, THREAD_LOCAL, RELAXED] {
            assert_eq!(breaks(mode, |_| cuCtxSynchronize()), UNSUPPORTED);
            assert_eq!(
                breaks(mode, |_| elsewhere(|| cuCtxSynchronize())),
                UNSUPPORTED
            );
            let mut blas = 0;
            ok(cublasCreate_v2(&mut blas));
            let not_executed = 13;
            assert_eq!(
                breaks(mode, |_| elsewhere(|| cublasDestroy_v2(blas))),
                (not_executed, 901)
            );
        }
        // Calls that no stream sees: by mode.
        assert_eq!(breaks(GLOBAL, |_| allocate()), UNSUPPORTED);
        assert_eq!(breaks(THREAD_LOCAL, |_| allocate()), UNSUPPORTED);
        assert_eq!(breaks(GLOBAL, |_| elsewhere(allocate)), UNSUPPORTED);
        assert_eq!(breaks(THREAD_LOCAL, |_| elsewhere(allocate_only)), (0, 0));
        assert_eq!(breaks(RELAXED, |_| allocate_only()), (0, 0));
        // Events.
        let before = Mark::on(&outside);
        assert_eq!(breaks(THREAD_LOCAL, |queue| before.hold(queue)), (905, 901));
        assert_eq!(
            breaks(THREAD_LOCAL, |queue| Mark::new().hold(queue)),
            (0, 0)
        );
        let within = Mark::new();
        let record = |queue: &Queue| cuEventRecord(within.0, queue.0);
        assert_eq!(breaks(RELAXED, record), (0, 0));
        let later = Queue::new();
        assert_eq!(within.hold(&later), 907);
        // A branch that does not come back, and one that does.
        let fork = |queue: &Queue| record(queue) + within.hold(&later) + later.fill(a, 1, 64);
        assert_eq!(breaks(THREAD_LOCAL, fork), (0, 904));
        assert_eq!(
            breaks(THREAD_LOCAL, |queue| fork(queue)
                + Mark::on(&later).hold(queue)),
            (0, 0)
        );
        // Memory from outside.
        assert_eq!(
            breaks(THREAD_LOCAL, |queue| cuMemFreeAsync(a, queue.0)),
            (1, 901)
        );
        // Who begins ends.
        assert_eq!(
            breaks(THREAD_LOCAL, |queue| elsewhere(|| queue.end().unwrap_err())),
            (908, 0)
        );
        assert_eq!(Queue(0).begin(GLOBAL), 900);
        // The legacy stream would wait for a blocking one.
        let mut stream = 0;
        ok(cuStreamCreate(&mut stream, 0));
        let blocking = Queue(stream);
        ok(blocking.begin(RELAXED));
        assert_eq!(cuMemsetD8Async(a, 0, 64, 0), 906);
        assert_eq!(blocking.end(), Err(901));
    }
    outside.free(a);
}

/// Allocates and leaves the free to another call, which waits for the device.
fn allocate_only() -> i32 {
    let mut address = 0;
    // SAFETY: the pointer is to a local variable.
    let error = unsafe { cuMemAlloc_v2(&mut address, 64) };
    LEFT.lock().unwrap().push(address);
    error
}

static LEFT: Mutex<Vec<u64>> = Mutex::new(vec![]);

#[test]
fn the_nth_call_fails_and_does_nothing() {
    let _gpu = Gpu::new();
    let queue = Queue::new();
    let a = queue.alloc(4);
    fail(Some("cuMemAllocAsync"), 2);
    let second = queue.alloc(4);
    let before = live("allocations");
    let mut address = 0;
    // SAFETY: the pointer is to a local variable.
    unsafe {
        assert_eq!(cuMemAllocAsync(&mut address, 4, queue.0), 2);
        assert_eq!((address, live("allocations")), (0, before));
        ok(queue.fill(a, 1, 4));
        fail(None, 1);
        // A free is not concerned.
        queue.free(second);
        assert_eq!(queue.fill(a, 2, 4), 719);
    }
    assert_eq!(queue.get::<u8>(a, 4), [1; 4]);
    queue.free(a);
}

#[test]
fn handles_that_are_not_given_back_show() {
    let _gpu = Gpu::new();
    let before = [live("streams"), live("events"), live("allocations")];
    let queue = Queue::new();
    let mark = Mark::on(&queue);
    let a = queue.alloc(4);
    let now = [live("streams"), live("events"), live("allocations")];
    assert_eq!(now, before.map(|n| n + 1));
    queue.free(a);
    ok(queue.sync());
    drop((mark, queue));
    assert_eq!(
        [live("streams"), live("events"), live("allocations")],
        before
    );
}

#[test]
fn products_are_those_of_plain_loops() {
    let gpu = Gpu::new();
    let queue = Queue::new();
    let mut blas = 0;
    let (m, n, k, batch) = (37, 21, 19, 2);
    let number = |i: usize| ((i * 37 + 11) % 17) as f32 / 8. - 1.;
    // SAFETY: handles and addresses are numbers that the driver checks, and other pointers are to
    // local variables.
    unsafe {
        ok(cublasCreate_v2(&mut blas));
        ok(cublasSetStream_v2(blas, queue.0));
        for (transpose_a, transpose_b, beta) in [(0, 0, 0f32), (1, 0, 0.5), (0, 1, 0.), (1, 1, 2.)]
        {
            let left: Vec<f32> = (0..m * k * batch).map(number).collect();
            let right: Vec<f32> = (0..k * n * batch).map(|i| number(i + 5)).collect();
            let start: Vec<f32> = (0..m * n * batch).map(|i| number(i + 3)).collect();
            let (a, b, c) = (
                queue.alloc(left.len() * 4),
                queue.alloc(right.len() * 4),
                queue.alloc(start.len() * 4),
            );
            queue.put(a, &left);
            queue.put(b, &right);
            queue.put(c, &start);
            let (lda, ldb) = (
                if transpose_a == 1 { k } else { m },
                if transpose_b == 1 { n } else { k },
            );
            let alpha = 1.5f32;
            ok(cublasGemmStridedBatchedEx(
                blas,
                transpose_a,
                transpose_b,
                m as i32,
                n as i32,
                k as i32,
                (&raw const alpha).cast(),
                a,
                0,
                lda as i32,
                (m * k) as i64,
                b,
                0,
                ldb as i32,
                (k * n) as i64,
                (&raw const beta).cast(),
                c,
                0,
                m as i32,
                (m * n) as i64,
                batch as i32,
                68,
                99,
            ));
            let got = queue.get::<f32>(c, start.len());
            for (i, &got) in got.iter().enumerate() {
                let (of, row, column) = (i / (m * n), i % m, i / m % n);
                let mut sum = 0f64;
                for p in 0..k {
                    let l = if transpose_a == 1 {
                        row * k + p
                    } else {
                        p * m + row
                    };
                    let r = if transpose_b == 1 {
                        p * n + column
                    } else {
                        column * k + p
                    };
                    sum += f64::from(left[of * m * k + l]) * f64::from(right[of * k * n + r]);
                }
                let expected = 1.5 * sum + f64::from(beta * start[i]);
                // Multiples of 1/64 below 2^12: every step is exact in f32.
                assert_eq!(f64::from(got), expected, "{i}");
            }
            for address in [a, b, c] {
                queue.free(address);
            }
        }
        ok(cublasDestroy_v2(blas));
    }
    assert_eq!(gpu.fault(), None);
}

#[test]
fn random_numbers_follow_from_the_seed() {
    let _gpu = Gpu::new();
    let queue = Queue::new();
    let count = 10_000;
    let a = queue.alloc(count * 4);
    let draw = |seed, normal: bool| {
        let mut generator = 0;
        // SAFETY: handles and addresses are numbers that the driver checks.
        unsafe {
            ok(curandCreateGenerator(&mut generator, 100));
            ok(curandSetStream(generator, queue.0));
            ok(curandSetPseudoRandomGeneratorSeed(generator, seed));
            match normal {
                true => ok(curandGenerateNormal(generator, a, count, 3., 2.)),
                false => ok(curandGenerateUniform(generator, a, count)),
            }
            let values = queue.get::<f32>(a, count);
            ok(curandDestroyGenerator(generator));
            values
        }
    };
    let uniform = draw(1, false);
    assert_eq!(uniform, draw(1, false));
    assert_ne!(uniform, draw(2, false));
    assert!(uniform.iter().all(|&x| x > 0. && x <= 1.));
    let moments = |values: &[f32]| {
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / count as f64;
        let square = values
            .iter()
            .map(|&x| (f64::from(x) - mean).powi(2))
            .sum::<f64>();
        (mean, (square / count as f64).sqrt())
    };
    // Within five standard errors of the mean, and of the deviation.
    let error = |deviation: f64| 5. * deviation / (count as f64).sqrt();
    let (mean, deviation) = moments(&uniform);
    let expected = 1. / 12f64.sqrt();
    assert!((mean - 0.5).abs() < error(expected) && (deviation - expected).abs() < error(expected));
    let (mean, deviation) = moments(&draw(1, true));
    assert!((mean - 3.).abs() < error(2.) && (deviation - 2.).abs() < error(2.));
    queue.free(a);
}

#[test]
fn ranks_sum_over_threads() {
    let _gpu = Gpu::new();
    let mut id = UniqueId { bytes: [0; 128] };
    const RANKS: i32 = 4;
    // SAFETY: the pointer is to a local variable.
    ok(unsafe { ncclGetUniqueId(&mut id) });
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            scope.spawn(move || {
                use_device(rank % 2);
                let queue = Queue::new();
                let mut communicator = 0;
                // SAFETY: handles and addresses are numbers that the library checks.
                unsafe {
                    ok(ncclCommInitRank(&mut communicator, RANKS, id, rank));
                    let (a, b) = (queue.alloc(12), queue.alloc(12));
                    for round in 0..20 {
                        let own = [rank as f32, 1., round as f32];
                        queue.put(a, &own);
                        ok(ncclAllReduce(a, b, 3, 7, 0, communicator, queue.0));
                        assert_eq!(queue.get::<f32>(b, 3), [6., 4., 4. * round as f32]);
                    }
                    queue.free(a);
                    queue.free(b);
                    ok(queue.sync());
                    ok(ncclCommAbort(communicator));
                }
            });
        }
    });
}

#[test]
fn a_fault_breaks_the_context_until_it_is_taken() {
    let gpu = Gpu::new();
    let queue = Queue::new();
    let a = queue.alloc(4);
    ok(queue.fill(a, 0, 8));
    assert_eq!(queue.sync(), 700);
    assert_eq!(queue.fill(a, 0, 4), 700);
    let mut address = 0;
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuMemAllocAsync(&mut address, 4, queue.0) }, 700);
    gpu.assert_fault(&["cuMemsetD8Async"]);
    ok(queue.fill(a, 0, 4));
    ok(queue.sync());
}

/// Launches the one kernel of a module, whose parameters are addresses, with blocks of a thread.
fn run_kernel(queue: &Queue, ptx: &str, name: &str, blocks: u32, addresses: &[u64]) {
    let (mut module, mut function) = (0, 0);
    let [ptx, name] = [ptx, name].map(|text| CString::new(text).unwrap());
    let arguments: Vec<_> = (addresses.iter())
        .map(|address| (&raw const *address).cast::<c_void>())
        .collect();
    // SAFETY: pointers are to local variables and to texts that end with a zero. The kernel has as
    // many parameters as there are addresses.
    unsafe {
        ok(cuModuleLoadData(&mut module, ptx.as_ptr().cast()));
        ok(cuModuleGetFunction(&mut function, module, name.as_ptr()));
        let (arguments, none) = (arguments.as_ptr(), null());
        ok(cuLaunchKernel(
            function, blocks, 1, 1, 1, 1, 1, 0, queue.0, arguments, none,
        ));
        ok(cuModuleUnload(module));
    }
}

/// PTX of a kernel of which each block copies a number.
const COPY: &str = "
    .version 9.0
    .target sm_90
    .address_size 64
    .visible .entry copy(.param .u64 to, .param .u64 from)
    {
        .reg .b32 %r<3>;
        .reg .b64 %rd<6>;
        ld.param.u64 %rd1, [to];
        ld.param.u64 %rd2, [from];
        mov.u32 %r1, %ctaid.x;
        mul.wide.u32 %rd3, %r1, 4;
        add.s64 %rd4, %rd1, %rd3;
        add.s64 %rd5, %rd2, %rd3;
        ld.global.u32 %r2, [%rd5];
        st.global.u32 [%rd4], %r2;
        ret;
    }";

#[test]
fn plain_copies_and_generic_addresses_reach_the_memory_of_a_context() {
    let gpu = Gpu::new();
    let (mut context, mut address) = (0, 0);
    let (mut free, mut total) = (0, 0);
    let mut words = [5u32, 6];
    // SAFETY: handles and addresses are numbers that the driver checks, and pointers are to local
    // variables.
    unsafe {
        ok(cuCtxCreate_v2(&mut context, 0, 1));
        ok(cuMemAlloc_v2(&mut address, 8));
        ok(cuMemGetInfo_v2(&mut free, &mut total));
        ok(cuMemcpyHtoD_v2(address, words.as_ptr().cast(), 8));
        let generic = COPY.replace(".global", "");
        run_kernel(&Queue(0), &generic, "copy", 1, &[address, address + 4]);
        ok(cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), address, 8));
        ok(cuMemFree_v2(address));
        ok(cuCtxDestroy_v2(context));
    }
    assert_eq!(words, [6, 6]);
    assert!((8..1 << 30).contains(&(total - free)));
    assert_eq!(gpu.fault(), None);
}

#[test]
fn a_launch_that_is_wrong_shows() {
    const UNWRITTEN: u32 = u32::MAX;
    let gpu = Gpu::new();
    let queue = Queue::new();
    let from = queue.alloc(12);
    queue.put(from, &[1u32, 2, 3]);
    let copied = |blocks: u32, swapped: bool| {
        let to = queue.alloc(12);
        let arguments = if swapped { [from, to] } else { [to, from] };
        run_kernel(&queue, COPY, "copy", blocks, &arguments);
        let mut copied = [0u32; 3];
        (queue.try_get(to, &mut copied), copied)
    };
    assert_eq!(copied(3, false), (0, [1, 2, 3]));
    // All blocks write one word, and the same to it.
    queue.put(from, &[7u32, 7, 7]);
    let to = queue.alloc(4);
    run_kernel(
        &queue,
        &COPY.replace("%rd1, %rd3", "%rd1, 0"),
        "copy",
        3,
        &[to, from],
    );
    gpu.assert_fault(&["race", "both write the same value"]);
    queue.put(from, &[1u32, 2, 3]);
    // The last block is missing.
    assert_eq!(copied(2, false), (0, [1, 2, UNWRITTEN]));
    // The kernel reads what it should write.
    assert_ne!(copied(3, true).0, 0);
    gpu.assert_fault(&["copy, block [0, 0, 0]", "which nothing has written"]);
    queue.free(from);
}

/// PTX of one kernel that stores a number.
fn storing(kernel: &str, number: u32) -> String {
    format!(
        ".version 9.0\n.target sm_90\n.address_size 64\n\
         .visible .entry {kernel}(.param .u64 to)\n\
         {{\n.reg .b64 %rd<3>;\nld.param.u64 %rd1, [to];\ncvta.to.global.u64 %rd2, %rd1;\n\
         st.global.u32 [%rd2], {number};\nret;\n}}\n"
    )
}

#[test]
fn edited_ptx_replaces_a_module_of_its_entries() {
    let _gpu = Gpu::new();
    let queue = Queue::new();
    let to = queue.alloc(4);
    let stored = |kernel: &str| {
        run_kernel(&queue, &storing(kernel, 1), kernel, 1, &[to]);
        queue.get::<u32>(to, 1)[0]
    };
    let file = std::env::temp_dir().join(format!("softgpu-{}.ptx", std::process::id()));
    std::fs::write(&file, storing("edited", 2)).unwrap();
    std::env::set_var("SOFTGPU_PTX", &file);
    let with = [stored("edited"), stored("other")];
    std::env::remove_var("SOFTGPU_PTX");
    std::fs::remove_file(&file).unwrap();
    assert_eq!(with, [2, 1]);
    assert_eq!(stored("edited"), 1);
    queue.free(to);
}

/// A program that looks at no error, and waits for nothing, fails all the same: its work runs at
/// its exit.
#[test]
fn a_fault_that_nobody_looks_at_fails_the_process() {
    const CHILD: &str = "SOFTGPU_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        use_device(0);
        let queue = Queue::new();
        let a = queue.alloc(4);
        let _ = queue.fill(a, 0, 8);
        return;
    }
    let name = "a_fault_that_nobody_looks_at_fails_the_process";
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(99), "{errors}");
    assert!(errors.contains("softgpu: cuMemsetD8Async"), "{errors}");
}

/// The numbers of an architecture, and what is refused there, in a process of its own.
#[test]
fn a_device_has_the_capability_that_is_asked_for() {
    const NAME: &str = "a_device_has_the_capability_that_is_asked_for";
    const CHILD: &str = "SOFTGPU_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        // SAFETY: each pointer has room for what is written there, and the texts end with a zero.
        unsafe {
            let (mut number, mut module, mut function) = (0, 0, 0);
            println!("initialised: {}", cuInit(0));
            use_device(0);
            for attribute in [75, 76, 16, 81, 97, 111, 39, 106] {
                cuDeviceGetAttribute(&mut number, attribute, 0);
                print!("{number} ");
            }
            for target in ["sm_75", "sm_80", "sm_90a", "sm_120f"] {
                let text = storing(target, 1).replace("ret;", "frobnicate;\nret;");
                let text = CString::new(text.replace("target sm_90", &format!("target {target}")));
                let loaded = cuModuleLoadData(&mut module, text.unwrap().as_ptr());
                print!("{target}:{loaded} ");
                if loaded == 0 {
                    let name = CString::new(target).unwrap();
                    ok(cuModuleGetFunction(&mut function, module, name.as_ptr()));
                }
            }
        }
        return;
    }
    let run = |capability: &str| {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([NAME, "--exact", "--nocapture"])
            .env(CHILD, "1")
            .env("SOFTGPU_COMPUTE_CAPABILITY", capability)
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (text(&output.stdout), text(&output.stderr))
    };
    for (capability, seen) in [
        (
            "7.5",
            "7 5 40 65536 65536 0 1024 16 sm_75:0 sm_80:218 sm_90a:218 sm_120f:218",
        ),
        (
            "8.9",
            "8 9 128 102400 101376 1024 1536 24 sm_75:0 sm_80:0 sm_90a:218 sm_120f:218",
        ),
        (
            "9.0",
            "9 0 132 233472 232448 1024 2048 32 sm_75:0 sm_80:0 sm_90a:0 sm_120f:218",
        ),
        (
            "12.0",
            "12 0 170 102400 101376 1024 1536 24 sm_75:0 sm_80:0 sm_90a:218 sm_120f:0",
        ),
    ] {
        let (output, errors) = run(capability);
        assert!(output.contains(seen), "{capability}: {output}{errors}");
        let refused = format!(
            "line 2: the PTX with sm_80 is for sm_80, which compute capability {capability}"
        );
        assert_eq!(errors.contains(&refused), capability == "7.5", "{errors}");
        let unknown = "softgpu: sm_75, line 10: frobnicate is unknown";
        assert!(errors.contains(unknown), "{errors}");
    }
    let (output, errors) = run("7.7");
    assert!(output.contains("initialised: 1"), "{output}");
    assert!(
        errors.contains("is \"7.7\", which is none of 7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0"),
        "{errors}"
    );
}

#[test]
fn calls_are_cheap_when_kernels_are_off() {
    let _gpu = Gpu::new();
    let queue = Queue::new();
    let a = queue.alloc(4);
    ok(queue.fill(a, 1, 4));
    softgpu_kernels(false);
    // None of these runs, not even the one that would fault.
    ok(queue.fill(a, 2, 4));
    ok(queue.fill(a, 2, 8));
    ok(queue.sync());
    softgpu_kernels(true);
    assert_eq!(queue.get::<u8>(a, 4), [1; 4]);
    queue.free(a);
}
