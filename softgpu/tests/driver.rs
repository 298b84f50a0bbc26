//! The driver through its C interface, with copies, fills and products as work.

// Arguments are numbers, and pointers that are valid.
#![allow(clippy::macro_metavars_in_unsafe)]

use softgpu::api::{
    blas::*, device::*, graph::*, memory::*, module::*, nccl::*, rand::*, stream::*,
};
use softgpu::engine::memory::{Kind, Memory, Pattern, View, Work};
use softgpu::engine::stream::engine;
use softgpu::testing::*;
use std::ffi::{CString, c_void};
use std::ptr::null;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Calls a function of the library.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: handles and addresses are numbers that the library checks. Pointers are to local
        // variables, to slices of as many bytes as are named, and to texts that end with a zero.
        unsafe { $function($($argument),*) }
    };
}

/// The value that a function writes through its first argument.
macro_rules! made {
    ($function:ident($($argument:expr),*)) => {{
        let mut made = 0;
        ok(call!($function(&mut made, $($argument),*)));
        made
    }};
}

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
        // SAFETY: this program reads the environment through `std` alone, which locks it.
        unsafe { std::env::set_var("SOFTGPU_DEVICES", "2") };
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
        let bytes = call!(softgpu_take_fault(text.as_mut_ptr().cast(), text.len()));
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
    ok(call!(cuInit(0)));
    let context = made!(cuDevicePrimaryCtxRetain(device));
    ok(call!(cuCtxSetCurrent(context)));
}

/// The status of `cuMemAlloc` or `cuMemAllocAsync`, and the address.
fn try_alloc(stream: Option<u64>) -> (i32, u64) {
    let mut address = 0;
    let status = match stream {
        Some(stream) => call!(cuMemAllocAsync(&mut address, 64, stream)),
        None => call!(cuMemAlloc_v2(&mut address, 64)),
    };
    (status, address)
}

/// A stream that is destroyed at the end.
struct Queue(u64);

impl Queue {
    fn new() -> Self {
        Self(made!(cuStreamCreate(NON_BLOCKING)))
    }

    fn alloc(&self, bytes: usize) -> u64 {
        made!(cuMemAllocAsync(bytes, self.0))
    }

    fn free(&self, address: u64) {
        ok(call!(cuMemFreeAsync(address, self.0)));
    }

    fn fill(&self, address: u64, value: u8, bytes: usize) -> i32 {
        call!(cuMemsetD8Async(address, value, bytes, self.0))
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) -> i32 {
        call!(cuMemcpyDtoDAsync_v2(to, from, bytes, self.0))
    }

    fn put<T: Copy>(&self, address: u64, values: &[T]) {
        let bytes = std::mem::size_of_val(values);
        ok(call!(cuMemcpyHtoDAsync_v2(
            address,
            values.as_ptr().cast(),
            bytes,
            self.0
        )));
    }

    /// An allocation with these contents.
    fn holding<T: Copy>(&self, values: &[T]) -> u64 {
        let address = self.alloc(std::mem::size_of_val(values));
        self.put(address, values);
        address
    }

    fn get<T: Copy + Default>(&self, address: u64, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        assert_eq!(self.try_get(address, &mut values), 0);
        values
    }

    fn try_get<T: Copy>(&self, address: u64, values: &mut [T]) -> i32 {
        let bytes = std::mem::size_of_val(values);
        call!(cuMemcpyDtoHAsync_v2(
            values.as_mut_ptr().cast(),
            address,
            bytes,
            self.0
        ))
    }

    fn sync(&self) -> i32 {
        call!(cuStreamSynchronize(self.0))
    }

    fn begin(&self, mode: u32) -> i32 {
        call!(cuStreamBeginCapture_v2(self.0, mode))
    }

    fn end(&self) -> Result<u64, i32> {
        let mut graph = 0;
        match call!(cuStreamEndCapture(self.0, &mut graph)) {
            0 => Ok(graph),
            error => Err(error),
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        call!(cuStreamDestroy_v2(self.0));
    }
}

/// The GPU for one test, and a stream.
fn alone() -> (Gpu, Queue) {
    (Gpu::new(), Queue::new())
}

struct Mark(u64);

impl Mark {
    fn new() -> Self {
        Self(made!(cuEventCreate(2)))
    }

    fn on(queue: &Queue) -> Self {
        let mark = Self::new();
        ok(call!(cuEventRecord(mark.0, queue.0)));
        mark
    }

    fn hold(&self, queue: &Queue) -> i32 {
        call!(cuStreamWaitEvent(queue.0, self.0, 0))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        call!(cuEventDestroy_v2(self.0));
    }
}

fn live(kind: &str) -> u64 {
    let kind = CString::new(kind).unwrap();
    call!(softgpu_live(kind.as_ptr()))
}

fn fail(name: Option<&str>, n: u64) {
    let name = name.map(|name| CString::new(name).unwrap());
    call!(softgpu_fail(
        name.as_ref().map_or(null(), |name| name.as_ptr()),
        n
    ))
}

#[test]
fn a_stream_keeps_its_order() {
    let (gpu, queue) = alone();
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
fn the_host_waits_for_an_event() {
    let gpu = Gpu::new();
    let (one, two) = (Queue::new(), Queue::new());
    let wait = |event: &Mark| call!(cuEventSynchronize(event.0));
    let a = one.alloc(64);
    // The host orders the streams, up to where the event was recorded.
    ok(one.fill(a, 1, 64));
    ok(wait(&Mark::on(&one)));
    ok(two.fill(a, 2, 64));
    ok(wait(&Mark::on(&two)));
    let early = Mark::on(&one);
    ok(one.fill(a, 3, 64));
    ok(wait(&early));
    ok(two.fill(a, 4, 64));
    gpu.assert_fault(&["race", "cuMemsetD8Async"]);
    // There is nothing to wait for, or no such event.
    ok(wait(&Mark::new()));
    assert_eq!(call!(cuEventSynchronize(0)), 400);
    // An event of a capture stands for no work.
    let within = Mark::new();
    breaks(RELAXED, (0, 0), |queue| {
        call!(cuEventRecord(within.0, queue.0))
    });
    assert_eq!(wait(&within), 907);
    // The wait reports a fault of the work before it.
    ok(one.fill(a + 32, 1, 64));
    assert_eq!(wait(&Mark::on(&one)), 700);
    gpu.assert_fault(&["cuMemsetD8Async"]);
    one.free(a);
}

#[test]
fn events_give_the_time_between_them() {
    let (_gpu, queue) = alone();
    let elapsed = |start: &Mark, end: &Mark| {
        let mut milliseconds = -1.0;
        let status = call!(cuEventElapsedTime_v2(&mut milliseconds, start.0, end.0));
        (status, milliseconds)
    };
    let timed = || Mark(made!(cuEventCreate(0)));
    let record = |event: &Mark| ok(call!(cuEventRecord(event.0, queue.0)));
    let (start, end) = (timed(), timed());
    // Nothing is written if there is no time.
    let none = (400, -1.0);
    assert_eq!(elapsed(&start, &end), none);
    record(&start);
    assert_eq!(elapsed(&start, &end), none);
    assert_eq!(elapsed(&end, &start), none);
    let pause = std::time::Duration::from_millis(5);
    std::thread::sleep(pause);
    record(&end);
    ok(call!(cuEventSynchronize(end.0)));
    let (status, milliseconds) = elapsed(&start, &end);
    ok(status);
    assert!((5.0..5e3).contains(&milliseconds), "{milliseconds}");
    assert_eq!(elapsed(&start, &start), (0, 0.0));
    // The latest record counts.
    record(&start);
    record(&end);
    let (status, later) = elapsed(&start, &end);
    ok(status);
    assert!(later >= 0.0, "{later}");
    // Events without times, and one that is no more.
    let untimed = Mark::on(&queue);
    assert_eq!(elapsed(&untimed, &end), none);
    assert_eq!(elapsed(&start, &untimed), none);
    let gone = timed();
    record(&gone);
    ok(call!(cuEventDestroy_v2(gone.0)));
    assert_eq!(elapsed(&start, &gone), none);
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
    let stream = made!(cuStreamCreate(0));
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
    let (gpu, queue) = alone();
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
    let rejected = view.touch(Kind::Load, address, 8, 8).unwrap_err();
    assert!(rejected.contains("byte 6 of"), "{rejected}");
}

#[test]
fn one_element_too_many_is_out_of_bounds() {
    let (gpu, queue) = alone();
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
    let (gpu, queue) = alone();
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
    let rejected = access(&mut one, Kind::Store, 2, |lane| a + 62 + lane * 2).unwrap_err();
    assert!(rejected.starts_with("lane 0: race: writes"), "{rejected}");
    assert!(rejected.contains("block 0 of kernel"), "{rejected}");
    let rejected = access(&mut one, Kind::Load, 4, |lane| a + 60 + lane % 2 * 4).unwrap_err();
    assert!(rejected.starts_with("lane 0: race: reads"), "{rejected}");
    // Many may read, but then none of them may write.
    let last = work("last", 1, 100, 4);
    let block = |block| View::new(memory.clone(), last.clone(), block);
    for reader in 0..3 {
        access(&mut block(reader), Kind::Load, 4, |lane| a + lane * 4).unwrap();
    }
    let rejected = access(&mut block(0), Kind::Store, 4, |lane| a + lane * 4).unwrap_err();
    assert!(rejected.contains("several blocks of last"), "{rejected}");
}

#[test]
fn a_fault_names_the_first_lane_whatever_the_lanes_have_in_common() {
    let memory = Arc::new(Memory::default());
    let a = memory.allocate(100, 0, None).unwrap();
    let mut view = View::new(memory, work("k", 1, 1, 1), 0);
    // Neighbouring lanes, and some with gaps between them. Lane 25 is the first beyond the end.
    for mask in [u32::MAX << 4, 0x0ff0_fff0, 0x0202_2220] {
        let rejected = access_of(&mut view, Kind::Store, 4, mask, |lane| a + lane * 4);
        let rejected = rejected.unwrap_err();
        assert!(rejected.starts_with("lane 25: out of bounds"), "{rejected}");
    }
    // One operand for all.
    let rejected = access_of(&mut view, Kind::Store, 4, 0xfff0, |_| a + 100).unwrap_err();
    assert!(rejected.starts_with("lane 4: out of bounds"), "{rejected}");
    // Lanes 4 to 20 write what 4 to 24 read; lane 21 finds nothing.
    for size in [1, 2, 4] {
        let memory = Arc::new(Memory::default());
        let a = memory.allocate(200, 0, None).unwrap();
        let mut view = View::new(memory, work("k", 1, 1, 1), 0);
        let place = |lane| a + lane * u64::from(size);
        access_of(&mut view, Kind::Store, size, 0x001f_fff0, place).unwrap();
        access_of(&mut view, Kind::Load, size, 0x001f_fff0, place).unwrap();
        let rejected = access_of(&mut view, Kind::Load, size, 0x01ff_fff0, place).unwrap_err();
        assert!(rejected.starts_with("lane 21: reads"), "{rejected}");
        access_of(&mut view, Kind::Load, size, 0x01ff_fff0, |_| place(20)).unwrap();
        let rejected = access_of(&mut view, Kind::Load, size, 0x01ff_fff0, |_| place(21));
        assert!(rejected.unwrap_err().starts_with("lane 4: reads"));
    }
}

#[test]
fn a_view_that_moves_to_another_block_is_that_block() {
    let memory = Arc::new(Memory::default());
    let a = memory.allocate(128, 0, None).unwrap();
    let mut view = View::new(memory, work("k", 1, 1, 2), 0);
    access(&mut view, Kind::Store, 4, |lane| a + lane * 4).unwrap();
    view.move_to(1);
    let rejected = access(&mut view, Kind::Load, 4, |lane| a + lane * 4).unwrap_err();
    assert!(rejected.contains("block 0 of k"), "{rejected}");
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
    let rejected = access(&mut writer, Kind::LoadReadOnly, 4, |lane| a + lane * 4).unwrap_err();
    assert!(
        rejected.contains("memory that nothing writes"),
        "{rejected}"
    );
    let mut reader = View::new(memory, work("reader", 1, 2, 1), 0);
    access(&mut reader, Kind::LoadReadOnly, 4, |lane| a + lane * 4).unwrap();
}

#[test]
fn addresses_are_multiples_of_the_size() {
    let memory = Arc::new(Memory::default());
    let a = memory.allocate(4096, 0, None).unwrap();
    let mut view = View::new(memory, work("k", 1, 1, 1), 0);
    let rejected = access(&mut view, Kind::Store, 4, |lane| a + 2 + lane * 4).unwrap_err();
    assert!(rejected.starts_with("lane 0: misaligned"), "{rejected}");
    let rejected = access(&mut view, Kind::Store, 8, |lane| {
        a + lane * 16 + lane / 31 * 4
    })
    .unwrap_err();
    assert!(rejected.starts_with("lane 31: misaligned"), "{rejected}");
    let rejected = access(&mut view, Kind::Store, 4, |lane| a + 4096 - 64 + lane * 4).unwrap_err();
    assert!(rejected.starts_with("lane 16: out of bounds"), "{rejected}");
}

/// Captures `body` and gives the graph in a form that can be launched.
fn capture(queue: &Queue, body: impl FnOnce()) -> (u64, u64) {
    ok(queue.begin(THREAD_LOCAL));
    body();
    let graph = queue.end().expect("a graph");
    let executable = made!(cuGraphInstantiateWithFlags(graph, 0));
    (graph, executable)
}

fn launch(executable: u64, queue: &Queue) -> i32 {
    call!(cuGraphLaunch(executable, queue.0))
}

fn destroy((graph, executable): (u64, u64)) {
    ok(call!(cuGraphExecDestroy(executable)));
    ok(call!(cuGraphDestroy(graph)));
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
    let (gpu, queue) = alone();
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

/// A call in a capture has these errors: its own, then that of the capture's end.
#[track_caller]
fn breaks(mode: u32, errors: (i32, i32), call: impl FnOnce(&Queue) -> i32) {
    let queue = Queue::new();
    ok(queue.begin(mode));
    let error = call(&queue);
    let end = match queue.end() {
        Ok(graph) => call!(cuGraphDestroy(graph)),
        Err(end) => end,
    };
    assert_eq!((error, end), errors);
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
    let allocate = || {
        let (error, address) = try_alloc(None);
        call!(cuMemFree_v2(address));
        error
    };
    // The free, which waits for the device, is left out.
    let allocate_only = || try_alloc(None).0;
    // The stream itself.
    breaks(RELAXED, UNSUPPORTED, |queue| queue.sync());
    breaks(RELAXED, UNSUPPORTED, |queue| queue.try_get(a, &mut host));
    // All streams, from any thread and in any mode.
    for mode in [GLOBAL, THREAD_LOCAL, RELAXED] {
        breaks(mode, UNSUPPORTED, |_| call!(cuCtxSynchronize()));
        breaks(mode, UNSUPPORTED, |_| {
            elsewhere(|| call!(cuCtxSynchronize()))
        });
        let blas = made!(cublasCreate_v2());
        let not_executed = 13;
        breaks(mode, (not_executed, 901), |_| {
            elsewhere(|| call!(cublasDestroy_v2(blas)))
        });
    }
    // Calls that no stream sees: by mode.
    breaks(GLOBAL, UNSUPPORTED, |_| allocate());
    breaks(THREAD_LOCAL, UNSUPPORTED, |_| allocate());
    breaks(GLOBAL, UNSUPPORTED, |_| elsewhere(allocate));
    breaks(THREAD_LOCAL, (0, 0), |_| elsewhere(allocate_only));
    breaks(RELAXED, (0, 0), |_| allocate_only());
    // Events.
    let before = Mark::on(&outside);
    breaks(THREAD_LOCAL, (905, 901), |queue| before.hold(queue));
    breaks(THREAD_LOCAL, (0, 0), |queue| Mark::new().hold(queue));
    let within = Mark::new();
    let record = |queue: &Queue| call!(cuEventRecord(within.0, queue.0));
    breaks(RELAXED, (0, 0), record);
    let later = Queue::new();
    assert_eq!(within.hold(&later), 907);
    // A branch that does not come back, and one that does.
    let fork = |queue: &Queue| record(queue) + within.hold(&later) + later.fill(a, 1, 64);
    breaks(THREAD_LOCAL, (0, 904), fork);
    breaks(THREAD_LOCAL, (0, 0), |queue| {
        fork(queue) + Mark::on(&later).hold(queue)
    });
    // Memory from outside.
    breaks(THREAD_LOCAL, (1, 901), |queue| {
        call!(cuMemFreeAsync(a, queue.0))
    });
    // Who begins ends.
    breaks(THREAD_LOCAL, (908, 0), |queue| {
        elsewhere(|| queue.end().unwrap_err())
    });
    assert_eq!(Queue(0).begin(GLOBAL), 900);
    // The legacy stream would wait for a blocking one.
    let blocking = Queue(made!(cuStreamCreate(0)));
    ok(blocking.begin(RELAXED));
    assert_eq!(Queue(0).fill(a, 0, 64), 906);
    assert_eq!(blocking.end(), Err(901));
    outside.free(a);
}

#[test]
fn the_nth_call_fails_and_does_nothing() {
    let (_gpu, queue) = alone();
    let a = queue.alloc(4);
    fail(Some("cuMemAllocAsync"), 2);
    let second = queue.alloc(4);
    let before = live("allocations");
    assert_eq!(
        (try_alloc(Some(queue.0)), live("allocations")),
        ((2, 0), before)
    );
    ok(queue.fill(a, 1, 4));
    fail(None, 1);
    // A free is not concerned.
    queue.free(second);
    assert_eq!(queue.fill(a, 2, 4), 719);
    assert_eq!(queue.get::<u8>(a, 4), [1; 4]);
    queue.free(a);
}

#[test]
fn handles_that_are_not_given_back_show() {
    let _gpu = Gpu::new();
    let count = || ["streams", "events", "allocations"].map(live);
    let before = count();
    let queue = Queue::new();
    let mark = Mark::on(&queue);
    let a = queue.alloc(4);
    assert_eq!(count(), before.map(|n| n + 1));
    queue.free(a);
    ok(queue.sync());
    drop((mark, queue));
    assert_eq!(count(), before);
}

#[test]
fn products_are_those_of_plain_loops() {
    let (gpu, queue) = alone();
    let (m, n, k, batch) = (37, 21, 19, 2);
    let numbers = |count: usize, first: usize| -> Vec<f32> {
        let number = |i| ((i * 37 + 11) % 17) as f32 / 8. - 1.;
        (first..first + count * batch).map(number).collect()
    };
    let (left, right, start) = (numbers(m * k, 0), numbers(k * n, 5), numbers(m * n, 3));
    let blas = made!(cublasCreate_v2());
    ok(call!(cublasSetStream_v2(blas, queue.0)));
    for (transpose_a, transpose_b, beta) in [(0, 0, 0f32), (1, 0, 0.5), (0, 1, 0.), (1, 1, 2.)] {
        let [a, b, c] = [&left, &right, &start].map(|values| queue.holding(values));
        let lda = if transpose_a == 1 { k } else { m };
        let ldb = if transpose_b == 1 { n } else { k };
        let alpha = 1.5f32;
        ok(call!(cublasGemmStridedBatchedEx(
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
        )));
        let at = |transpose, rows, columns, row, column| match transpose {
            1 => row * columns + column,
            _ => column * rows + row,
        };
        for (i, &got) in queue.get::<f32>(c, start.len()).iter().enumerate() {
            let (of, row, column) = (i / (m * n), i % m, i / m % n);
            let mut sum = 0f64;
            for p in 0..k {
                let l = left[of * m * k + at(transpose_a, m, k, row, p)];
                let r = right[of * k * n + at(transpose_b, k, n, p, column)];
                sum += f64::from(l) * f64::from(r);
            }
            let expected = 1.5 * sum + f64::from(beta * start[i]);
            // Multiples of 1/64 below 2^12: every step is exact in f32.
            assert_eq!(f64::from(got), expected, "{i}");
        }
        for address in [a, b, c] {
            queue.free(address);
        }
    }
    ok(call!(cublasDestroy_v2(blas)));
    assert_eq!(gpu.fault(), None);
}

#[test]
fn random_numbers_follow_from_the_seed() {
    let (_gpu, queue) = alone();
    let count = 10_000;
    let a = queue.alloc(count * 4);
    let draw = |seed, normal: bool| {
        let generator = made!(curandCreateGenerator(100));
        ok(call!(curandSetStream(generator, queue.0)));
        ok(call!(curandSetPseudoRandomGeneratorSeed(generator, seed)));
        ok(match normal {
            true => call!(curandGenerateNormal(generator, a, count, 3., 2.)),
            false => call!(curandGenerateUniform(generator, a, count)),
        });
        let values = queue.get::<f32>(a, count);
        ok(call!(curandDestroyGenerator(generator)));
        values
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
    ok(call!(ncclGetUniqueId(&mut id)));
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            scope.spawn(move || {
                use_device(rank % 2);
                let queue = Queue::new();
                let communicator = made!(ncclCommInitRank(RANKS, id, rank));
                let (a, b) = (queue.alloc(12), queue.alloc(12));
                for round in 0..20 {
                    queue.put(a, &[rank as f32, 1., round as f32]);
                    ok(call!(ncclAllReduce(a, b, 3, 7, 0, communicator, queue.0)));
                    assert_eq!(queue.get::<f32>(b, 3), [6., 4., 4. * round as f32]);
                }
                queue.free(a);
                queue.free(b);
                ok(queue.sync());
                ok(call!(ncclCommAbort(communicator)));
            });
        }
    });
}

#[test]
fn a_fault_breaks_the_context_until_it_is_taken() {
    let (gpu, queue) = alone();
    let a = queue.alloc(4);
    ok(queue.fill(a, 0, 8));
    assert_eq!(queue.sync(), 700);
    assert_eq!(queue.fill(a, 0, 4), 700);
    assert_eq!(try_alloc(Some(queue.0)).0, 700);
    gpu.assert_fault(&["cuMemsetD8Async"]);
    ok(queue.fill(a, 0, 4));
    ok(queue.sync());
}

/// Launches the one kernel of a module, whose parameters are addresses, with blocks of a thread.
fn run_kernel(queue: &Queue, ptx: &str, name: &str, blocks: u32, addresses: &[u64]) {
    let [ptx, name] = [ptx, name].map(|text| CString::new(text).unwrap());
    let arguments: Vec<_> = (addresses.iter())
        .map(|address| (&raw const *address).cast::<c_void>())
        .collect();
    let module = made!(cuModuleLoadData(ptx.as_ptr()));
    let function = made!(cuModuleGetFunction(module, name.as_ptr()));
    let (arguments, none) = (arguments.as_ptr(), null());
    ok(call!(cuLaunchKernel(
        function, blocks, 1, 1, 1, 1, 1, 0, queue.0, arguments, none
    )));
    ok(call!(cuModuleUnload(module)));
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
fn a_pool_counts_what_is_used_and_the_most_that_was() {
    let (_gpu, queue) = alone();
    let pool: u64 = made!(cuDeviceGetDefaultMemPool(0));
    let own: u64 = made!(cuDeviceGetMemPool(0));
    assert_eq!(pool, own);
    let bytes = |number| {
        let mut bytes = 0u64;
        ok(call!(cuMemPoolGetAttribute(
            pool,
            number,
            (&raw mut bytes).cast()
        )));
        bytes
    };
    let set_back = |mut to: u64| call!(cuMemPoolSetAttribute(pool, 8, (&raw mut to).cast()));
    let before = bytes(7);
    let first = queue.alloc(1 << 20);
    let second = queue.alloc(1 << 10);
    assert_eq!(bytes(7) - before, (1 << 20) + (1 << 10));
    queue.free(first);
    assert_eq!(bytes(7) - before, 1 << 10);
    assert_eq!(bytes(8) - before, (1 << 20) + (1 << 10));
    assert_ne!(set_back(1), 0);
    ok(set_back(0));
    assert_eq!(bytes(8) - before, 1 << 10);
    queue.free(second);
    assert_eq!(bytes(7), before);
    let mut threshold = 0u64;
    let status = call!(cuMemPoolGetAttribute(pool, 4, (&raw mut threshold).cast()));
    assert_ne!(status, 0, "it keeps no threshold");
}

#[test]
fn plain_copies_and_generic_addresses_reach_the_memory_of_a_context() {
    let gpu = Gpu::new();
    let mut total = 0;
    let mut words = [5u32, 6];
    let context = made!(cuCtxCreate_v2(0, 1));
    let address = made!(cuMemAlloc_v2(8));
    let free: usize = made!(cuMemGetInfo_v2(&mut total));
    ok(call!(cuMemcpyHtoD_v2(address, words.as_ptr().cast(), 8)));
    let generic = COPY.replace(".global", "");
    run_kernel(&Queue(0), &generic, "copy", 1, &[address, address + 4]);
    ok(call!(cuMemcpyDtoH_v2(
        words.as_mut_ptr().cast(),
        address,
        8
    )));
    ok(call!(cuMemFree_v2(address)));
    ok(call!(cuCtxDestroy_v2(context)));
    assert_eq!(words, [6, 6]);
    assert!((8..1 << 30).contains(&(total - free)));
    assert_eq!(gpu.fault(), None);
}

#[test]
fn a_launch_that_is_wrong_shows() {
    const UNWRITTEN: u32 = u32::MAX;
    let (gpu, queue) = alone();
    let from = queue.holding(&[1u32, 2, 3]);
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
    let into_one = COPY.replace("%rd1, %rd3", "%rd1, 0");
    run_kernel(&queue, &into_one, "copy", 3, &[to, from]);
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
fn edited_ptx_replaces_modules_that_have_its_entries() {
    let (_gpu, queue) = alone();
    let to = queue.alloc(4);
    let stored = |kernel: &str| {
        run_kernel(&queue, &storing(kernel, 1), kernel, 1, &[to]);
        queue.get::<u32>(to, 1)[0]
    };
    let file = std::env::temp_dir().join(format!("softgpu-{}.ptx", std::process::id()));
    let too = storing("too", 3);
    let (_, too) = too.split_once(".address_size 64\n").unwrap();
    std::fs::write(&file, storing("edited", 2) + too).unwrap();
    // SAFETY: as in `Gpu::new`.
    unsafe { std::env::set_var("SOFTGPU_PTX", &file) };
    let with = [stored("edited"), stored("too"), stored("other")];
    // SAFETY: as in `Gpu::new`.
    unsafe { std::env::remove_var("SOFTGPU_PTX") };
    std::fs::remove_file(&file).unwrap();
    assert_eq!(with, [2, 3, 1]);
    assert_eq!(stored("edited"), 1);
    queue.free(to);
}

/// Set in a process that runs one test for another.
const CHILD: &str = "SOFTGPU_TEST_CHILD";

/// Status, output and errors of a test in a process of its own, on a device of a capability.
fn child(test: &str, capability: &str) -> (Option<i32>, String, String) {
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .env("SOFTGPU_COMPUTE_CAPABILITY", capability)
        .output()
        .unwrap();
    let [output, errors] = [run.stdout, run.stderr].map(|text| String::from_utf8(text).unwrap());
    (run.status.code(), output, errors)
}

/// A program that looks at no error, and waits for nothing, fails all the same: its work runs at
/// its exit.
#[test]
fn a_fault_that_nobody_looks_at_fails_the_process() {
    if std::env::var_os(CHILD).is_some() {
        use_device(0);
        let queue = Queue::new();
        let a = queue.alloc(4);
        let _ = queue.fill(a, 0, 8);
        return;
    }
    let (status, _, errors) = child("a_fault_that_nobody_looks_at_fails_the_process", "9.0");
    assert_eq!(status, Some(99), "{errors}");
    assert!(errors.contains("softgpu: cuMemsetD8Async"), "{errors}");
}

/// The numbers of an architecture, and what is rejected there, in a process of its own.
#[test]
fn a_device_has_the_capability_that_is_asked_for() {
    if std::env::var_os(CHILD).is_some() {
        println!("initialised: {}", call!(cuInit(0)));
        use_device(0);
        for attribute in [75, 76, 16, 81, 97, 111, 39, 106] {
            let number: i32 = made!(cuDeviceGetAttribute(attribute, 0));
            print!("{number} ");
        }
        for target in ["sm_75", "sm_80", "sm_90a", "sm_120f"] {
            let text = storing(target, 1).replace("ret;", "frobnicate;\nret;");
            let text = text.replace("target sm_90", &format!("target {target}"));
            let [text, name] = [&text, target].map(|text| CString::new(text).unwrap());
            let mut module = 0;
            let loaded = call!(cuModuleLoadData(&mut module, text.as_ptr()));
            print!("{target}:{loaded} ");
            if loaded == 0 {
                let _: u64 = made!(cuModuleGetFunction(module, name.as_ptr()));
            }
        }
        return;
    }
    let run = |capability: &str| {
        let (_, output, errors) =
            child("a_device_has_the_capability_that_is_asked_for", capability);
        (output, errors)
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
        let rejected = format!(
            "line 2: the PTX with sm_80 is for sm_80, which compute capability {capability}"
        );
        assert_eq!(errors.contains(&rejected), capability == "7.5", "{errors}");
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
    let (_gpu, queue) = alone();
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
