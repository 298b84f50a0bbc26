//! The little of NCCL that a communicator of one process calls: ranks are threads, each with a
//! device, and sum tensors.
//!
//! A sum is work of a stream on each rank. It runs once it is the next work of all ranks' streams,
//! and adds in the order of the ranks.

use crate::abi::{Error, Handles, Outcome, entries, put};
use crate::context::{self, lock};
use crate::engine::fault::Fault;
use crate::engine::memory::{Kind, Memory, Work};
use crate::engine::stream::{Meeting, Step, Submission, engine, fault_of};
use crate::queue;
use std::collections::{BTreeMap, HashMap};
use std::ops::AddAssign;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// The name that the ranks of one communicator share.
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

/// A rank's part of a sum.
#[derive(Debug, Clone, Copy)]
struct Part {
    from: u64,
    to: u64,
    count: usize,
    element: u32,
}

pub struct Communicator {
    world: Arc<World>,
    rank: usize,
    device: i32,
    /// Sums that it has taken part in.
    rounds: AtomicU64,
}

pub static COMMUNICATORS: Handles<Arc<Communicator>> = Handles::new(11);
static WORLDS: Mutex<BTreeMap<u64, Arc<World>>> = Mutex::new(BTreeMap::new());

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

/// NCCL's numbers of the element types and of the operation that a communicator calls it with.
const F32: u32 = 7;
const F64: u32 = 8;
const SUM: u32 = 0;

/// Sums what the ranks bring, in their order, and gives each the same.
fn reduce(memory: &Arc<Memory>, works: &[Arc<Work>], parts: &[Option<Part>]) -> Result<(), Fault> {
    let ranks: Vec<_> = works.iter().zip(parts.iter().flatten()).collect();
    let Some(&(first_work, first)) = ranks.first() else {
        return Ok(());
    };
    for (rank, (work, part)) in ranks.iter().enumerate() {
        if (part.count, part.element) != (first.count, first.element) {
            let what = format!("rank {rank} brings {part:?}, and rank 0 {first:?}");
            return Err(fault_of(work, what));
        }
    }
    let result = match first.element {
        F32 => sum::<f32>(memory, &ranks),
        _ => sum::<f64>(memory, &ranks),
    };
    result.map_err(|what| fault_of(first_work, what))
}

fn sum<T: Copy + AddAssign>(
    memory: &Arc<Memory>,
    ranks: &[(&Arc<Work>, &Part)],
) -> Result<(), String> {
    let mut sums: Vec<T> = vec![];
    for (rank, (work, part)) in ranks.iter().enumerate() {
        let size = std::mem::size_of::<T>() as u64;
        let mut view = queue::view(memory, work);
        view.touch(Kind::Load, part.from, part.count as u64 * size, size)?;
        for i in 0..part.count {
            // SAFETY: the range is checked to be an allocation's.
            let value = unsafe { (part.from as *const T).add(i).read() };
            match rank {
                0 => sums.push(value),
                _ => sums[i] += value,
            }
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
        world.wait();
        let rounds = AtomicU64::new(0);
        put(communicator, COMMUNICATORS.add(Arc::new(Communicator { world, rank, device, rounds })))
    }

    /// Gives up the sums to which others have not come.
    fn ncclCommAbort(communicator: u64) {
        let own = COMMUNICATORS.remove(communicator)?;
        for round in lock(&own.world.rounds).values() {
            if lock(&round.parts)[own.rank].is_some() {
                round.meeting.cancelled.store(true, Relaxed);
            }
        }
        engine().wake();
        Ok(())
    }

    fn ncclAllReduce(
        from: u64, to: u64, count: usize, element: u32, operation: u32,
        communicator: u64, stream: u64,
    ) {
        let communicator = COMMUNICATORS.get(communicator)?;
        let stream = context::stream(stream)?;
        if ![F32, F64].contains(&element) || operation != SUM {
            return Err(Error::NOT_SUPPORTED);
        }
        if stream.device != communicator.device {
            return Err(Error::INVALID_VALUE);
        }
        let part = Part { from, to, count, element };
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
