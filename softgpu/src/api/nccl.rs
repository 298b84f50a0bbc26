//! The little of NCCL that a communicator of one process calls: ranks are threads, each with a
//! device, and sum tensors.
//!
//! A sum is work of a stream on each rank. It runs once it is the next work of all ranks' streams,
//! and adds in the order of the ranks.

use crate::abi::{entries, put, Error, Handles, Outcome};
use crate::context;
use crate::engine::fault::Fault;
use crate::engine::memory::{Kind, Memory, Work};
use crate::engine::stream::{engine, fault_of, Meeting, Step, Submission};
use crate::queue;
use half::{bf16, f16};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What ranks of one communicator are known by.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    pub bytes: [u8; 128],
}

/// The ranks of one id.
struct World {
    size: usize,
    joined: Mutex<Vec<bool>>,
    all_joined: Condvar,
    /// Sums to which not all ranks have come, by their number.
    rounds: Mutex<HashMap<u64, Round>>,
}

/// One sum.
#[derive(Clone)]
struct Round {
    meeting: Arc<Meeting>,
    parts: Arc<Mutex<Vec<Option<Part>>>>,
}

/// What a rank brings to a sum.
#[derive(Debug, Clone, Copy)]
struct Part {
    from: u64,
    to: u64,
    count: usize,
    element: u32,
    operation: u32,
}

pub struct Communicator {
    world: Arc<World>,
    rank: usize,
    device: i32,
    /// Sums that it has taken part in.
    rounds: AtomicU64,
}

pub static COMMUNICATORS: Handles<Arc<Communicator>> = Handles::new(11);
static WORLDS: Mutex<Option<HashMap<u64, Arc<World>>>> = Mutex::new(None);

thread_local! {
    /// How deep the thread is in groups, and the worlds that it joined there.
    static GROUP: RefCell<(u32, Vec<Arc<World>>)> = RefCell::default();
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    fn new(size: usize) -> Self {
        Self {
            size,
            joined: Mutex::new(vec![false; size]),
            all_joined: Condvar::new(),
            rounds: Mutex::default(),
        }
    }

    fn join(&self, rank: usize) -> Outcome {
        let mut joined = lock(&self.joined);
        match joined.get_mut(rank) {
            Some(joined) if !*joined => *joined = true,
            _ => return Err(Error::INVALID_VALUE),
        }
        self.all_joined.notify_all();
        Ok(())
    }

    fn wait(&self) {
        let mut joined = lock(&self.joined);
        while joined.contains(&false) {
            joined = self
                .all_joined
                .wait(joined)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A rank comes to its sum of that number.
    fn meet(&self, number: u64, rank: usize, part: Part) -> Arc<Meeting> {
        let mut rounds = lock(&self.rounds);
        let round = rounds.entry(number).or_insert_with(|| {
            let parts = Arc::new(Mutex::new(vec![None; self.size]));
            let all = parts.clone();
            Round {
                parts,
                meeting: Arc::new(Meeting {
                    size: self.size,
                    cancelled: AtomicBool::new(false),
                    action: Box::new(move |memory, works| reduce(memory, works, &lock(&all))),
                }),
            }
        });
        let meeting = round.meeting.clone();
        let complete = {
            let mut parts = lock(&round.parts);
            parts[rank] = Some(part);
            parts.iter().all(Option::is_some)
        };
        if complete {
            rounds.remove(&number);
        }
        meeting
    }
}

impl Communicator {
    /// Returns its handle.
    fn open(world: Arc<World>, rank: usize, device: i32) -> u64 {
        COMMUNICATORS.add(Arc::new(Self {
            world,
            rank,
            device,
            rounds: AtomicU64::new(0),
        }))
    }

    /// Gives up the sums to which others have not come.
    fn abort(&self) {
        for round in lock(&self.world.rounds).values() {
            if lock(&round.parts)[self.rank].is_some() {
                round.meeting.cancelled.store(true, Relaxed);
            }
        }
        engine().wake();
    }
}

/// Numbers that ranks sum.
trait Number: Copy {
    fn to_f64(self) -> f64;
    fn from_f64(value: f64) -> Self;
    fn add(self, other: Self) -> Self;
}

macro_rules! numbers {
    ($($type:ty, $wide:ty, $to:expr, $from:expr);*) => {$(
        impl Number for $type {
            fn to_f64(self) -> f64 {
                f64::from(self)
            }

            fn from_f64(value: f64) -> Self {
                $from(value as $wide)
            }

            fn add(self, other: Self) -> Self {
                $from($to(self) + $to(other))
            }
        }
    )*};
}

numbers!(
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32
);

/// NCCL's last operation.
const AVERAGE: u32 = 4;

/// Bytes of an element, by NCCL's number.
fn size_of(element: u32) -> Option<usize> {
    match element {
        6 | 9 => Some(2),
        7 => Some(4),
        8 => Some(8),
        _ => None,
    }
}

/// Reduces what the ranks bring, in their order, and gives each the same.
fn reduce(memory: &Arc<Memory>, works: &[Arc<Work>], parts: &[Option<Part>]) -> Result<(), Fault> {
    let ranks: Vec<_> = works.iter().zip(parts.iter().flatten()).collect();
    let Some(&(first_work, first)) = ranks.first() else {
        return Ok(());
    };
    for (rank, (work, part)) in ranks.iter().enumerate() {
        if (part.count, part.element, part.operation)
            != (first.count, first.element, first.operation)
        {
            let what = format!("rank {rank} brings {part:?}, and rank 0 {first:?}");
            return Err(fault_of(work, what));
        }
    }
    let result = match first.element {
        6 => reduce_as::<f16>(memory, &ranks),
        7 => reduce_as::<f32>(memory, &ranks),
        8 => reduce_as::<f64>(memory, &ranks),
        _ => reduce_as::<bf16>(memory, &ranks),
    };
    result.map_err(|what| fault_of(first_work, what))
}

fn reduce_as<T: Number>(memory: &Arc<Memory>, ranks: &[(&Arc<Work>, &Part)]) -> Result<(), String> {
    let mut sums: Vec<T> = vec![];
    for (rank, (work, part)) in ranks.iter().enumerate() {
        let size = std::mem::size_of::<T>() as u64;
        let mut view = queue::view(memory, work);
        view.touch(Kind::Load, part.from, part.count as u64 * size, size)?;
        for i in 0..part.count {
            // SAFETY: the range is checked to be an allocation's.
            let value = unsafe { (part.from as *const T).add(i).read() };
            if rank == 0 {
                sums.push(value);
                continue;
            }
            let (sum, both) = (sums[i], (sums[i].to_f64(), value.to_f64()));
            sums[i] = match part.operation {
                1 => T::from_f64(both.0 * both.1),
                2 => T::from_f64(both.0.max(both.1)),
                3 => T::from_f64(both.0.min(both.1)),
                _ => sum.add(value),
            };
        }
    }
    if ranks.iter().any(|(_, part)| part.operation == AVERAGE) {
        for sum in &mut sums {
            *sum = T::from_f64(sum.to_f64() / ranks.len() as f64);
        }
    }
    for (work, part) in ranks {
        let bytes = std::mem::size_of_val(&sums[..]);
        // SAFETY: `sums` has as many bytes, and its elements have no padding.
        let bytes = unsafe { std::slice::from_raw_parts(sums.as_ptr().cast::<u8>(), bytes) };
        queue::view(memory, work).upload(part.to, bytes)?;
    }
    Ok(())
}

entries! {
    fn ncclGetVersion(version: *mut i32) {
        put(version, 22800)
    }

    fn ncclGetUniqueId(id: *mut UniqueId) {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&NEXT.fetch_add(1, Relaxed).to_le_bytes());
        put(id, UniqueId { bytes })
    }

    /// Waits for the other ranks, but in a group.
    fn ncclCommInitRank(communicator: *mut u64, size: i32, id: UniqueId, rank: i32) {
        let device = context::current_device()?;
        let (Ok(size), Ok(rank)) = (usize::try_from(size), usize::try_from(rank)) else {
            return Err(Error::INVALID_VALUE);
        };
        let mut number = [0; 8];
        number.copy_from_slice(&id.bytes[..8]);
        let number = u64::from_le_bytes(number);
        let world = {
            let mut worlds = lock(&WORLDS);
            let worlds = worlds.get_or_insert_default();
            let world = worlds.entry(number).or_insert_with(|| Arc::new(World::new(size))).clone();
            if world.size != size {
                return Err(Error::INVALID_VALUE);
            }
            world.join(rank)?;
            if !lock(&world.joined).contains(&false) {
                // An id serves once.
                worlds.remove(&number);
            }
            world
        };
        let waits = GROUP.with(|group| {
            let (depth, joined) = &mut *group.borrow_mut();
            if *depth > 0 {
                joined.push(world.clone());
            }
            *depth == 0
        });
        if waits {
            world.wait();
        }
        put(communicator, Communicator::open(world, rank, device))
    }

    fn ncclCommInitAll(communicators: *mut u64, size: i32, devices: *const i32) {
        let size = usize::try_from(size).map_err(|_| Error::INVALID_VALUE)?;
        let world = Arc::new(World::new(size));
        for rank in 0..size {
            world.join(rank)?;
            let device = if devices.is_null() { rank as i32 } else { *devices.add(rank) };
            put(communicators.add(rank), Communicator::open(world.clone(), rank, device))?;
        }
        Ok(())
    }

    fn ncclGroupStart() {
        GROUP.with(|group| group.borrow_mut().0 += 1);
        Ok(())
    }

    fn ncclGroupEnd() {
        let joined = GROUP.with(|group| {
            let (depth, joined) = &mut *group.borrow_mut();
            *depth = depth.checked_sub(1).ok_or(Error::NOT_SUPPORTED)?;
            let ended = *depth == 0;
            Outcome::Ok(if ended { std::mem::take(joined) } else { vec![] })
        })?;
        joined.iter().for_each(|world| world.wait());
        Ok(())
    }

    fn ncclCommFinalize(communicator: u64) {
        COMMUNICATORS.get(communicator)?;
        Ok(())
    }

    fn ncclCommDestroy(communicator: u64) {
        COMMUNICATORS.remove(communicator)?;
        Ok(())
    }

    /// Gives up the sums to which others have not come.
    fn ncclCommAbort(communicator: u64) {
        COMMUNICATORS.remove(communicator)?.abort();
        Ok(())
    }

    fn ncclCommCount(communicator: u64, count: *mut i32) {
        put(count, COMMUNICATORS.get(communicator)?.world.size as i32)
    }

    fn ncclCommCuDevice(communicator: u64, device: *mut i32) {
        put(device, COMMUNICATORS.get(communicator)?.device)
    }

    fn ncclCommUserRank(communicator: u64, rank: *mut i32) {
        put(rank, COMMUNICATORS.get(communicator)?.rank as i32)
    }

    fn ncclAllReduce(
        from: u64, to: u64, count: usize, element: u32, operation: u32,
        communicator: u64, stream: u64,
    ) {
        let communicator = COMMUNICATORS.get(communicator)?;
        let stream = context::stream(stream)?;
        let known = size_of(element).is_some() && operation <= AVERAGE;
        if !known || stream.device != communicator.device {
            return Err(Error::INVALID_VALUE);
        }
        let part = Part { from, to, count, element, operation };
        queue::submit(&stream, Submission {
            name: "ncclAllReduce".into(),
            blocks: 1,
            launch: false,
            always: false,
            step: Step::Meet(Arc::new(move || {
                let number = communicator.rounds.fetch_add(1, Relaxed);
                let rank = communicator.rank;
                (communicator.world.meet(number, rank, part), rank)
            })),
        })
    }
}

/// What a number means, in words.
#[no_mangle]
#[allow(non_snake_case)]
pub extern "C" fn ncclGetErrorString(result: i32) -> *const c_char {
    match result {
        0 => c"no error",
        1 => c"unhandled cuda error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        _ => c"unknown result code",
    }
    .as_ptr()
}
