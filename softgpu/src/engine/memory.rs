//! The device's memory: allocations, what is written in them, and who touched what last.
//!
//! A device address is the host address of the same byte, so whoever has had an access checked may
//! make it.
//!
//! Each word of four bytes has a shadow: which of its bytes are written, and who wrote and who read
//! it last. "Who" is an *agent*, a block of a launch. A launch takes a run of consecutive agents
//! when it starts, so agents of older work are smaller, and one comparison settles most accesses.
//! Where several agents share a word (neighbouring f16 elements, readers on several streams), the
//! shadow names a *group* of them. Whether older work happened before an access follows from vector
//! clocks.

use crate::isa::op::lane_count;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A point in the work of streams: of each stream, the number of the last piece of work.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Clock(Vec<(u32, u64)>);

impl Clock {
    pub fn get(&self, stream: u32) -> u64 {
        match self.0.binary_search_by_key(&stream, |&(stream, _)| stream) {
            Ok(at) => self.0[at].1,
            Err(_) => 0,
        }
    }

    /// Moves on to `number` of a stream.
    pub fn reach(&mut self, stream: u32, number: u64) {
        match self.0.binary_search_by_key(&stream, |&(stream, _)| stream) {
            Ok(at) => self.0[at].1 = self.0[at].1.max(number),
            Err(at) => self.0.insert(at, (stream, number)),
        }
    }

    pub fn join(&mut self, other: &Self) {
        for &(stream, number) in &other.0 {
            self.reach(stream, number);
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.0.iter().copied()
    }
}

/// One launch or copy, as the memory knows it: what it is ordered after.
#[derive(Clone, Default)]
pub struct Work {
    /// The kernel, or the driver's function.
    pub name: String,
    pub device: i32,
    pub stream: u32,
    /// Counts the work of its stream, from 1.
    pub number: u64,
    /// The work that its stream had waited for when it was queued.
    pub after: Arc<Clock>,
    /// The work that the host had seen complete by then.
    pub seen: Arc<Clock>,
    /// Blocks of the launch. 0: unknown.
    pub blocks: u32,
    agents: OnceLock<Agents>,
}

impl Work {
    pub fn new(name: String, device: i32, stream: u32, number: u64, blocks: u32) -> Self {
        Self {
            name,
            device,
            stream,
            number,
            blocks,
            ..Self::default()
        }
    }

    /// The same work, at another device's memory.
    pub fn on_device(&self, device: i32) -> Self {
        Self {
            device,
            agents: OnceLock::new(),
            ..self.clone()
        }
    }

    /// It starts after that piece of work has ended.
    fn is_after(&self, stream: u32, number: u64) -> bool {
        if stream == self.stream {
            return number < self.number;
        }
        self.seen.get(stream) >= number || self.after.get(stream) >= number
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, stream) = (self.number, self.stream);
        write!(f, "{} (work {number} of stream {stream})", self.name)
    }
}

/// The agents of a work: its blocks, then one that stands for several of them.
#[derive(Debug, Clone, Copy)]
struct Agents {
    first: u32,
    blocks: u32,
    /// Agents below it are of work that happened before.
    floor: u32,
}

impl Agents {
    /// Several blocks, as readers of one word.
    fn several(self) -> u32 {
        self.first + self.blocks
    }

    fn end(self) -> u32 {
        self.first + self.blocks + 1
    }
}

/// Most blocks of a launch that are told apart.
const MOST_BLOCKS: u32 = 1 << 20;
/// Agents from here on are groups.
const GROUPS: u32 = 0x0c00_0000;
/// Agents have 28 bits; the other four of half a shadow are the bytes of the word.
const MOST_AGENTS: u32 = 1 << 28;
/// Work that is followed by this many others counts as before everything.
const REMEMBERED: usize = 8192;
/// Groups that are remembered.
const MOST_GROUPS: usize = 1 << 20;

/// Who is who among the agents.
struct History {
    next: u32,
    works: VecDeque<(Agents, Arc<Work>)>,
    /// Works that are no longer in `works`.
    forgotten: usize,
    /// Of each stream, up to where `works` (and those forgotten) happened before its last work.
    settled: HashMap<u32, usize>,
    next_group: u32,
    groups: HashMap<u32, Arc<[Member]>>,
    numbers: HashMap<Arc<[Member]>, u32>,
}

/// An agent and the bytes of the word that it touched.
type Member = (u32, u32);

impl Default for History {
    fn default() -> Self {
        Self {
            next: 1,
            works: VecDeque::new(),
            forgotten: 0,
            settled: HashMap::new(),
            next_group: GROUPS,
            groups: HashMap::new(),
            numbers: HashMap::new(),
        }
    }
}

impl History {
    fn work_of(&self, agent: u32) -> Option<&(Agents, Arc<Work>)> {
        let after = self
            .works
            .partition_point(|(agents, _)| agents.first <= agent);
        let found = self.works.get(after.checked_sub(1)?)?;
        (agent < found.0.end()).then_some(found)
    }

    fn group(&mut self, members: Vec<Member>) -> u32 {
        let members: Arc<[Member]> = members.into();
        if let Some(&number) = self.numbers.get(&members) {
            return number;
        }
        if self.groups.len() >= MOST_GROUPS || self.next_group + 1 >= MOST_AGENTS {
            self.groups.clear();
            self.numbers.clear();
        }
        if self.next_group + 1 >= MOST_AGENTS {
            self.next_group = GROUPS;
        }
        let number = self.next_group;
        self.next_group += 1;
        self.groups.insert(number, members.clone());
        self.numbers.insert(members, number);
        number
    }
}

/// A place in the streams' work.
#[derive(Debug, Clone, Copy, Default)]
pub struct Position {
    pub stream: u32,
    pub number: u64,
}

const LIVE: u8 = 0;
const FREED: u8 = 1;
/// Memory of a graph that does not run.
const DORMANT: u8 = 2;

/// One allocation.
struct Allocation {
    number: u64,
    start: u64,
    size: u64,
    device: i32,
    state: AtomicU8,
    /// Agents below it touched what was here before.
    first_agent: AtomicU32,
    /// None: the host waited for it.
    born: Mutex<Option<Position>>,
    /// The last work of each stream that touched it.
    users: Mutex<Vec<Arc<Work>>>,
    /// Address of the work that was entered in `users` last.
    last_user: AtomicU64,
}

impl fmt::Display for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, device) = (self.size, self.device);
        write!(
            f,
            "allocation {} ({size} bytes of device {device}, made",
            self.number
        )?;
        match *lock(&self.born) {
            Some(Position { stream, number }) => {
                write!(f, " as work {number} of stream {stream})")
            }
            None => write!(f, " by the host)"),
        }
    }
}

/// Addresses of the device with their shadows beside them, all reserved and backed by memory once
/// touched.
struct Arena {
    base: u64,
    size: u64,
    /// For each word, the writer (low half) and the reader.
    agents: u64,
    /// For each word, a bit for each byte that is written.
    written: u64,
}

/// Bytes that an arena holds. What was freed is used again, so a program needs little more than it
/// holds at once.
const ARENA: u64 = 1 << 41;
/// Allocations are aligned so, as the driver aligns them.
const ALIGNMENT: u64 = 512;
/// Bytes after each allocation that belong to none.
const GAP: u64 = 256;
/// Freed blocks of one size that wait before one of them is used again, so that a late access meets
/// freed memory.
const QUARANTINE: usize = 16;
/// Larger ones give their pages back when they are freed.
const LARGE: u64 = 16 << 20;
/// In sparse memory, a copy or fill of more than `SPARSE` bytes touches only `SPARSE_END` bytes at
/// each end.
const SPARSE: u64 = 1 << 28;
const SPARSE_END: u64 = 1 << 20;

impl Default for Arena {
    fn default() -> Self {
        let mut size = ARENA;
        loop {
            // Data, then 8 bytes a word, then one byte a word.
            let all = size + size * 2 + size / 4;
            // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no other
            // memory.
            let base = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    all as usize,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            if base != libc::MAP_FAILED {
                let base = base as u64;
                return Self {
                    base,
                    size,
                    agents: base + size,
                    written: base + size * 3,
                };
            }
            size /= 2;
            assert!(size > 1 << 24, "no address space for a device's memory");
        }
    }
}

impl Arena {
    /// The shadow of the word at an address in the arena.
    fn agents(&self, address: u64) -> &AtomicU64 {
        &self.words(address, 1).0[0]
    }

    fn written(&self, address: u64) -> &AtomicU8 {
        &self.words(address, 1).1[0]
    }

    /// The shadows of whole words from an address in the arena on.
    #[inline(always)]
    fn words(&self, address: u64, count: usize) -> (&[AtomicU64], &[AtomicU8]) {
        debug_assert!(address - self.base + count as u64 * 4 <= self.size);
        let word = (address - self.base) >> 2;
        // SAFETY: each word of the arena has eight bytes and one byte there, mapped as long as the
        // arena lives, and used as atomics alone.
        unsafe {
            (
                std::slice::from_raw_parts((self.agents + word * 8) as *const AtomicU64, count),
                std::slice::from_raw_parts((self.written + word) as *const AtomicU8, count),
            )
        }
    }

    /// Gives back the pages of a range, which reads as zeros from then on.
    fn discard(start: u64, bytes: u64) {
        let (from, to) = (start.next_multiple_of(4096), (start + bytes) & !4095);
        if from < to {
            // SAFETY: the pages lie within the arena's private mapping, and no reference to plain
            // memory in it exists.
            unsafe { libc::madvise(from as *mut _, (to - from) as usize, libc::MADV_DONTNEED) };
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let all = self.size + self.size * 2 + self.size / 4;
        // SAFETY: the mapping is this arena's own, and nothing outlives the arena in it.
        unsafe { libc::munmap(self.base as *mut _, all as usize) };
    }
}

/// Room for the next allocations.
#[derive(Default)]
struct Room {
    /// Bytes of the arena that were used once.
    used: u64,
    /// Freed blocks by their size, the oldest first.
    freed: HashMap<u64, VecDeque<u64>>,
    numbers: u64,
    live: u64,
    live_bytes: u64,
}

/// All memory of the devices.
#[derive(Default)]
pub struct Memory {
    /// No access is checked, and nothing is recorded.
    pub unchecked: bool,
    /// The memory is as large as the address space: of large copies and fills only the ends are
    /// done, and what nothing wrote may be read.
    pub sparse: bool,
    arena: Arena,
    allocations: Mutex<BTreeMap<u64, Arc<Allocation>>>,
    room: Mutex<Room>,
    history: Mutex<History>,
}

/// A lock whose holder panicked guards what it guarded before: each change here is whole or is only
/// a counter.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of a block for an allocation: quarters of powers of two, so that blocks fit again.
fn block_size(size: u64) -> u64 {
    let size = size + GAP;
    let step = (size.next_power_of_two() / 8).max(ALIGNMENT);
    size.next_multiple_of(step)
}

impl Memory {
    /// Offsets and lengths of the parts that a copy or fill of `bytes` bytes touches.
    fn parts(&self, bytes: u64) -> Vec<(u64, u64)> {
        match self.sparse && bytes > SPARSE {
            true => vec![(0, SPARSE_END), (bytes - SPARSE_END, SPARSE_END)],
            false => vec![(0, bytes)],
        }
    }

    /// Makes an allocation. Its bytes are not written. None: it does not fit.
    pub fn allocate(&self, size: u64, device: i32, born: Option<Position>) -> Option<u64> {
        if size > self.arena.size {
            return None;
        }
        let block = block_size(size);
        let mut room = lock(&self.room);
        let start = match room.freed.get_mut(&block) {
            Some(freed) if freed.len() > QUARANTINE || block >= LARGE && !freed.is_empty() => {
                freed.pop_front().unwrap_or_default()
            }
            _ => {
                let start = self.arena.base + room.used;
                if room.used + block > self.arena.size {
                    return None;
                }
                room.used += block;
                start
            }
        };
        room.numbers += 1;
        room.live += 1;
        room.live_bytes += size;
        let number = room.numbers;
        drop(room);
        if !self.unchecked {
            self.forget_written(start, block);
        }
        let allocation = Arc::new(Allocation {
            number,
            start,
            size,
            device,
            state: AtomicU8::new(LIVE),
            first_agent: AtomicU32::new(lock(&self.history).next),
            born: Mutex::new(born),
            users: Mutex::default(),
            last_user: AtomicU64::new(0),
        });
        lock(&self.allocations).insert(start, allocation);
        Some(start)
    }

    fn forget_written(&self, start: u64, bytes: u64) {
        let (_, written) = self.arena.words(start, bytes as usize / 4);
        // Pages are discarded whole; what is left at either end is less than one.
        let (head, tail) = match bytes >= LARGE {
            true => {
                Arena::discard(written.as_ptr() as u64, bytes / 4);
                (4096, written.len() - 4096)
            }
            false => (written.len(), written.len()),
        };
        for byte in written[..head].iter().chain(&written[tail..]) {
            // Pages that were never touched stay so.
            if byte.load(Relaxed) != 0 {
                byte.store(0, Relaxed);
            }
        }
    }

    fn find(&self, address: u64) -> Option<Arc<Allocation>> {
        let allocations = lock(&self.allocations);
        let (_, allocation) = allocations.range(..=address).next_back()?;
        Some(allocation.clone())
    }

    /// The allocation that starts at an address.
    fn starting_at(&self, start: u64) -> Option<Arc<Allocation>> {
        self.find(start).filter(|found| found.start == start)
    }

    fn of_graph(&self, start: u64) -> Result<Arc<Allocation>, String> {
        self.starting_at(start)
            .ok_or_else(|| format!("{start:#x} is no memory of a graph"))
    }

    /// The device of the allocation that starts at an address and is not freed.
    pub fn device_of(&self, start: u64) -> Option<i32> {
        let found = self.starting_at(start)?;
        (found.state.load(Relaxed) != FREED).then_some(found.device)
    }

    /// Allocations that are not freed, and their bytes.
    pub fn live(&self) -> (u64, u64) {
        let room = lock(&self.room);
        (room.live, room.live_bytes)
    }

    /// Ends an allocation. `work` is when, if the host did not wait for all before.
    pub fn free(&self, start: u64, work: Option<&Arc<Work>>) -> Result<(), String> {
        let allocation = self
            .starting_at(start)
            .ok_or_else(|| format!("{start:#x}, which is freed, was never allocated"))?;
        if allocation.state.swap(FREED, Relaxed) == FREED {
            return Err(format!("{allocation} is freed a second time"));
        }
        let users = std::mem::take(&mut *lock(&allocation.users));
        let block = block_size(allocation.size);
        if block >= LARGE {
            let word = (start - self.arena.base) >> 2;
            Arena::discard(start, block);
            Arena::discard(self.arena.agents + word * 8, block * 2);
            Arena::discard(self.arena.written + word, block / 4);
        }
        let mut room = lock(&self.room);
        room.live -= 1;
        room.live_bytes -= allocation.size;
        room.freed.entry(block).or_default().push_back(start);
        drop(room);
        match work {
            Some(work) if !self.unchecked => self.unordered(&allocation, &users, work),
            _ => Ok(()),
        }
    }

    /// Rejects a free, or a second life of a graph's memory, that does not come after all uses.
    fn unordered(
        &self,
        allocation: &Allocation,
        users: &[Arc<Work>],
        work: &Work,
    ) -> Result<(), String> {
        let other = users
            .iter()
            .find(|user| !work.is_after(user.stream, user.number));
        if let Some(other) = other {
            return Err(format!(
                "{allocation} is freed by {work}, and nothing orders that \
                 after {other}, which uses it"
            ));
        }
        let born = *lock(&allocation.born);
        match born {
            Some(born) if !work.is_after(born.stream, born.number) => Err(format!(
                "{allocation} is freed by {work}, and nothing orders that after the allocation"
            )),
            _ => Ok(()),
        }
    }

    /// Makes an allocation memory of a graph: it is there from [`Memory::wake`] to
    /// [`Memory::sleep`].
    pub fn make_dormant(&self, start: u64) {
        if let Some(found) = self.starting_at(start) {
            found.state.store(DORMANT, Relaxed);
        }
    }

    /// A graph's allocation comes to life, with nothing written in it.
    pub fn wake(&self, start: u64, work: &Arc<Work>) -> Result<(), String> {
        let allocation = self.of_graph(start)?;
        let users = std::mem::take(&mut *lock(&allocation.users));
        self.unordered(&allocation, &users, work)?;
        if !self.unchecked {
            self.forget_written(start, block_size(allocation.size));
        }
        *lock(&allocation.born) = Some(Position {
            stream: work.stream,
            number: work.number,
        });
        allocation.last_user.store(0, Relaxed);
        allocation.state.store(LIVE, Relaxed);
        Ok(())
    }

    /// A graph's allocation ends until the graph runs again.
    pub fn sleep(&self, start: u64, work: &Arc<Work>) -> Result<(), String> {
        let allocation = self.of_graph(start)?;
        if allocation.state.swap(DORMANT, Relaxed) != LIVE {
            return Err(format!("{allocation} is freed a second time"));
        }
        // The users stay: the next run comes after them too.
        let users = lock(&allocation.users).clone();
        self.unordered(&allocation, &users, work)
    }

    /// Gives a work its agents, at its first access.
    fn enlist(&self, work: &Arc<Work>) -> Agents {
        let mut history = lock(&self.history);
        let history = &mut *history;
        let blocks = match work.blocks {
            0 => 1 << 16,
            blocks => blocks.min(MOST_BLOCKS),
        };
        if history.next + blocks + 1 > GROUPS {
            // Numbers begin again. All shadows become those of words that nobody touched. Work that
            // runs meanwhile keeps its numbers, which nobody finds any more and which count as
            // earlier.
            *history = History::default();
            Arena::discard(self.arena.agents, self.arena.size * 2);
            for allocation in lock(&self.allocations).values() {
                allocation.first_agent.store(0, Relaxed);
            }
        }
        if history.works.len() > REMEMBERED {
            history.works.drain(..REMEMBERED / 2);
            history.forgotten += REMEMBERED / 2;
        }
        let first = history.next;
        history.next += blocks + 1;
        // A stream's later work is after all that its earlier work was after.
        let settled = history.settled.entry(work.stream).or_default();
        *settled = (*settled).max(history.forgotten);
        while let Some((_, other)) = history.works.get(*settled - history.forgotten) {
            if !work.is_after(other.stream, other.number) {
                break;
            }
            *settled += 1;
        }
        let floor = history
            .works
            .get(*settled - history.forgotten)
            .map_or(first, |(agents, _)| agents.first);
        let agents = Agents {
            first,
            blocks,
            floor,
        };
        history.works.push_back((agents, work.clone()));
        agents
    }
}

/// A block's way into the memory. It remembers the allocations that it used last.
pub struct View {
    pub memory: Arc<Memory>,
    pub work: Arc<Work>,
    /// Index of the block in its launch.
    pub block: u32,
    agents: Agents,
    /// The agent of this block.
    own: u32,
    recent: [Option<Recent>; 4],
    oldest: usize,
    /// Ranges of agents, and whether they happened before.
    known: [(u32, u32, bool); 4],
    oldest_known: usize,
}

/// An allocation that a view has used.
#[derive(Clone)]
struct Recent {
    start: u64,
    end: u64,
    /// Agents below it happened before, or touched what was there earlier.
    floor: u32,
    allocation: Arc<Allocation>,
}

/// The access of a warp to global memory in one instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Load,
    /// Through the read-only cache (`ld.global.nc`): nothing may write there while the kernel runs.
    LoadReadOnly,
    Store,
}

/// Layout of the operands of a warp's active lanes. Most accesses are a row or the same for all. One
/// look at the whole warp settles those.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// The active lanes are neighbours, and each operand follows the one before without a gap.
    Row,
    /// All lanes want one operand.
    Same,
    Scattered,
}

impl Pattern {
    #[inline(always)]
    pub fn of(addresses: &[u64; 32], mask: u32, size: u32) -> Self {
        let lowest = mask.trailing_zeros() % 32;
        let (first, step) = (addresses[lowest as usize], u64::from(size));
        let start = first.wrapping_sub(u64::from(lowest) * step);
        let (mut astray, mut other) = (0, 0);
        for (lane, &at) in addresses[..lane_count()].iter().enumerate() {
            let active = u64::from(mask >> lane & 1).wrapping_neg();
            astray |= (at ^ start.wrapping_add(lane as u64 * step)) & active;
            other |= (at ^ first) & active;
        }
        let neighbours = mask >> lowest & (mask >> lowest).wrapping_add(1) == 0;
        match (astray, other) {
            (0, _) if neighbours => Self::Row,
            (_, 0) => Self::Same,
            _ => Self::Scattered,
        }
    }
}

/// The reason why a range is rejected: the first byte at fault, and a description.
type Rejection = (u64, String);

/// All bytes of a word.
const WHOLE: u32 = 15;

/// An agent with the bytes of a word that it touched, as a shadow holds it.
fn mark(agent: u32, bytes: u32) -> u32 {
    agent << 4 | bytes
}

/// The mark of readers that is left when these bytes are written.
fn left_of(reader: u32, bytes: u32) -> u32 {
    match reader & WHOLE & !bytes {
        0 => 0,
        _ => reader,
    }
}

/// The words of a range, and which of their bytes are in it.
fn words_of(start: u64, bytes: u64) -> impl Iterator<Item = (u64, u32)> {
    let end = start + bytes;
    (start & !3..end).step_by(4).map(move |word| {
        let head = start.saturating_sub(word) as u32;
        let tail = (end - word).min(4) as u32;
        (word, ((1 << tail) - 1) & !((1 << head) - 1))
    })
}

impl View {
    pub fn new(memory: Arc<Memory>, work: Arc<Work>, block: u32) -> Self {
        let agents = *work.agents.get_or_init(|| memory.enlist(&work));
        Self {
            memory,
            work,
            block,
            agents,
            own: agents.first + block % agents.blocks,
            recent: [const { None }; 4],
            oldest: 0,
            known: [(0, 0, true); 4],
            oldest_known: 0,
        }
    }

    /// Goes on as another block of the same launch. What is known of allocations and of older work
    /// holds for every block.
    pub fn move_to(&mut self, block: u32) {
        self.block = block;
        self.own = self.agents.first + block % self.agents.blocks;
    }

    /// Checks an access of a warp and records it. If it stands, each active lane may read or write
    /// `size` bytes at its address, which is a multiple of `size`. Else returns the first lane at
    /// fault, and why.
    #[inline(always)]
    pub fn check(
        &mut self,
        kind: Kind,
        size: u32,
        mask: u32,
        addresses: &[u64; 32],
        pattern: Pattern,
    ) -> Result<(), (u32, String)> {
        if self.memory.unchecked {
            return Ok(());
        }
        let step = u64::from(size);
        let lowest = mask.trailing_zeros() % 32;
        let first = addresses[lowest as usize];
        let bytes = match pattern {
            Pattern::Row => u64::from(mask.count_ones()) * step,
            Pattern::Same => step,
            Pattern::Scattered => return self.check_runs(kind, step, mask, addresses),
        };
        self.range(kind, first, bytes, step).map_err(|(at, what)| {
            let lane = lowest + (at.wrapping_sub(first) / step) as u32;
            (lane, what)
        })
    }

    /// Checks runs of lanes whose bytes follow each other, or are the same.
    fn check_runs(
        &mut self,
        kind: Kind,
        step: u64,
        mask: u32,
        addresses: &[u64; 32],
    ) -> Result<(), (u32, String)> {
        let mut left = mask;
        while left != 0 {
            let first_lane = left.trailing_zeros();
            let first = addresses[first_lane as usize];
            let mut end = first.wrapping_add(step);
            left &= left - 1;
            while left != 0 {
                let next = addresses[left.trailing_zeros() as usize];
                if next == end {
                    end = end.wrapping_add(step);
                } else if next.wrapping_add(step) != end {
                    break;
                }
                left &= left - 1;
            }
            self.range(kind, first, end.wrapping_sub(first), step)
                .map_err(|(at, what)| {
                    let at_fault = |lane: &u32| {
                        mask >> lane & 1 == 1 && at.wrapping_sub(addresses[*lane as usize]) < step
                    };
                    ((0..32).find(at_fault).unwrap_or(first_lane), what)
                })?;
        }
        Ok(())
    }

    /// Checks and records an access of consecutive bytes whose elements have `step` bytes.
    #[inline(always)]
    fn range(&mut self, kind: Kind, start: u64, bytes: u64, step: u64) -> Result<(), Rejection> {
        if bytes == 0 {
            return Ok(());
        }
        if !start.is_multiple_of(step) {
            let what = format!("misaligned: {start:#x} is no multiple of {step}");
            return Err((start, what));
        }
        let floor = self.enter(kind, start, bytes)?;
        if (start | bytes) & 3 == 0 {
            return self.whole_words(kind, start, bytes, floor);
        }
        for (word, mask) in words_of(start, bytes) {
            self.word(kind, word, mask, floor)?;
        }
        Ok(())
    }

    /// Finds the allocation of a range, which must be this device's, alive, and ordered before this
    /// work. Returns the agent from which on the order must be looked up.
    #[inline(always)]
    fn enter(&mut self, kind: Kind, start: u64, bytes: u64) -> Result<u32, Rejection> {
        for recent in self.recent.iter().flatten() {
            // No sum of addresses: it could pass the end of all there are.
            if start.wrapping_sub(recent.start) < recent.end - recent.start
                && bytes <= recent.end - start
                && recent.allocation.state.load(Relaxed) == LIVE
            {
                return Ok(recent.floor);
            }
        }
        self.look_up_and_enter(kind, start, bytes)
    }

    #[cold]
    fn look_up_and_enter(&mut self, kind: Kind, start: u64, bytes: u64) -> Result<u32, Rejection> {
        let does = if kind == Kind::Store {
            "writes"
        } else {
            "reads"
        };
        let reject = |at, what| Err((at, what));
        let inside = start.wrapping_sub(self.memory.arena.base) < self.memory.arena.size;
        let Some(allocation) = self.memory.find(start).filter(|_| inside) else {
            let what = format!("{does} {start:#x}, where no memory of a device is");
            return reject(start, what);
        };
        let end = allocation.start + allocation.size;
        if start >= end {
            let beyond = start - end;
            let what = format!(
                "out of bounds: {does} {start:#x}, {beyond} bytes after the end of {allocation}"
            );
            return reject(start, what);
        }
        let offset = start - allocation.start;
        let place = || format!("{start:#x}, byte {offset} of {allocation}");
        match allocation.state.load(Relaxed) {
            FREED => return reject(start, format!("{does} {}, which is freed", place())),
            DORMANT => {
                let what = format!("{does} {}, memory of a graph that is not alive", place());
                return reject(start, what);
            }
            _ => {}
        }
        if start + bytes > end {
            let what = format!(
                "out of bounds: {does} {end:#x}, the first byte after the end of {allocation}"
            );
            return reject(end, what);
        }
        let device = self.work.device;
        if allocation.device != device {
            return reject(start, format!("device {device} {does} {}", place()));
        }
        let born = *lock(&allocation.born);
        if born.is_some_and(|born| !self.work.is_after(born.stream, born.number)) {
            let work = &self.work;
            let what = format!(
                "{does} {}, and nothing orders {work} after the allocation",
                place()
            );
            return reject(start, what);
        }
        let name = Arc::as_ptr(&self.work) as u64;
        if allocation.last_user.swap(name, Relaxed) != name {
            let mut users = lock(&allocation.users);
            match users
                .iter_mut()
                .find(|user| user.stream == self.work.stream)
            {
                // Work of one stream is ordered, but that of a graph's branches may end in any
                // order.
                Some(user) if user.number < self.work.number => *user = self.work.clone(),
                Some(_) => {}
                None => users.push(self.work.clone()),
            }
        }
        let floor = self
            .agents
            .floor
            .max(allocation.first_agent.load(Relaxed).min(self.agents.first));
        self.recent[self.oldest] = Some(Recent {
            start: allocation.start,
            end,
            floor,
            allocation,
        });
        self.oldest = (self.oldest + 1) % self.recent.len();
        Ok(floor)
    }

    /// Words of which all bytes are touched.
    #[inline(always)]
    fn whole_words(
        &mut self,
        kind: Kind,
        start: u64,
        bytes: u64,
        floor: u32,
    ) -> Result<(), Rejection> {
        let end = start + bytes;
        let mut at = start;
        while at < end {
            at = match kind {
                Kind::Load => self.plain_loads::<false>(at, end, floor),
                Kind::LoadReadOnly => self.plain_loads::<true>(at, end, floor),
                Kind::Store => self.plain_stores(at, end, floor),
            };
            if at < end {
                self.word(kind, at, WHOLE, floor)?;
                at += 4;
            }
        }
        Ok(())
    }

    /// Reads words while they are written, and by older work or (if it may be) by this block: all
    /// that is left is to enter the reader. Returns where it stopped.
    #[inline(always)]
    fn plain_loads<const READ_ONLY: bool>(&self, start: u64, end: u64, floor: u32) -> u64 {
        let (agents, written) = self.memory.arena.words(start, ((end - start) / 4) as usize);
        let floor = mark(floor, 0);
        let own = mark(self.own, WHOLE);
        let several = mark(self.agents.several(), WHOLE);
        for (i, (agents, written)) in agents.iter().zip(written).enumerate() {
            let old = agents.load(Relaxed);
            let (writer, reader) = (old as u32, (old >> 32) as u32);
            let known = writer < floor || !READ_ONLY && writer | WHOLE == own;
            if written.load(Relaxed) != WHOLE as u8 && !self.memory.sparse || !known {
                return start + i as u64 * 4;
            }
            if reader == own || reader == several {
                continue;
            }
            let reader = if reader < floor {
                own
            } else if self.is_sibling(reader) {
                several
            } else {
                return start + i as u64 * 4;
            };
            agents.store(u64::from(reader) << 32 | u64::from(writer), Relaxed);
        }
        end
    }

    /// Writes words while nobody but older work or this block touched them. Returns where it
    /// stopped.
    #[inline(always)]
    fn plain_stores(&self, start: u64, end: u64, floor: u32) -> u64 {
        let (agents, written) = self.memory.arena.words(start, ((end - start) / 4) as usize);
        let floor = mark(floor, 0);
        let own = mark(self.own, WHOLE);
        let settled = |other: u32| other < floor || other | WHOLE == own;
        for (i, (agents, written)) in agents.iter().zip(written).enumerate() {
            let old = agents.load(Relaxed);
            if !settled(old as u32) || !settled((old >> 32) as u32) {
                return start + i as u64 * 4;
            }
            if old != u64::from(own) {
                agents.store(u64::from(own), Relaxed);
            }
            written.store(WHOLE as u8, Relaxed);
        }
        end
    }

    /// A mark is that of another block of this launch, for a whole word.
    #[inline]
    fn is_sibling(&self, other: u32) -> bool {
        let agent = other >> 4;
        other & WHOLE == WHOLE && agent >= self.agents.first && agent < self.agents.several()
    }

    /// Bytes of one word.
    #[inline]
    fn word(&mut self, kind: Kind, address: u64, bytes: u32, floor: u32) -> Result<(), Rejection> {
        match self.plain_word(kind, address, bytes, floor) {
            true => Ok(()),
            false => self.any_word(kind, address, bytes, floor),
        }
    }

    /// Accesses bytes of a word that nobody but older work or this block touched. False: it is not
    /// such a word, and nothing is recorded.
    #[inline]
    fn plain_word(&self, kind: Kind, address: u64, bytes: u32, floor: u32) -> bool {
        let arena = &self.memory.arena;
        let (agents, written) = (arena.agents(address), arena.written(address));
        let old = agents.load(Relaxed);
        let (writer, reader) = (old as u32, (old >> 32) as u32);
        let older = |other: u32| other < mark(floor, 0);
        let own = |other: u32| other >> 4 == self.own;
        let settled = |other: u32| older(other) || own(other);
        let joined =
            |other: u32| mark(self.own, bytes) | if own(other) { other & WHOLE } else { 0 };
        match kind {
            Kind::Load | Kind::LoadReadOnly => {
                let known = older(writer) || kind == Kind::Load && own(writer);
                if bytes & !u32::from(written.load(Relaxed)) != 0 || !known || !settled(reader) {
                    return false;
                }
                agents.store(u64::from(joined(reader)) << 32 | u64::from(writer), Relaxed);
            }
            Kind::Store => {
                if !settled(writer) || !settled(reader) {
                    return false;
                }
                let left = left_of(reader, bytes);
                agents.store(u64::from(left) << 32 | u64::from(joined(writer)), Relaxed);
                written.fetch_or(bytes as u8, Relaxed);
            }
        }
        true
    }

    /// Bytes of one word, with everything that can be in its shadow.
    #[inline(never)]
    fn any_word(
        &mut self,
        kind: Kind,
        address: u64,
        bytes: u32,
        floor: u32,
    ) -> Result<(), Rejection> {
        let memory = self.memory.clone();
        let (agents, written) = (memory.arena.agents(address), memory.arena.written(address));
        if kind != Kind::Store {
            let missing = bytes & !u32::from(written.load(Relaxed));
            if missing != 0 && !self.memory.sparse {
                let at = address + u64::from(missing.trailing_zeros());
                return Err((
                    at,
                    format!("reads {}, which nothing has written", self.place(at)),
                ));
            }
        }
        let old = agents.load(Relaxed);
        let (writer, reader) = (old as u32, (old >> 32) as u32);
        let conflict = |view: &Self, at: u32, other: u32, did: &str| -> Rejection {
            let address = address + u64::from(at.trailing_zeros());
            let does = match kind {
                Kind::Load => "reads",
                Kind::LoadReadOnly => "reads, as memory that nothing writes,",
                Kind::Store => "writes",
            };
            (
                address,
                format!(
                    "race: {does} {}, which {} {did}; nothing orders the two",
                    view.place(address),
                    view.name(other)
                ),
            )
        };
        for (other, theirs) in self.members(writer) {
            let both = bytes & theirs;
            let own = other == self.own && kind != Kind::LoadReadOnly;
            if both != 0 && !own && !self.is_before(other, floor) {
                return Err(conflict(self, both, other, "writes"));
            }
        }
        if kind == Kind::Store {
            for (other, theirs) in self.members(reader) {
                let both = bytes & theirs;
                if both != 0 && other != self.own && !self.is_before(other, floor) {
                    return Err(conflict(self, both, other, "reads"));
                }
            }
        }
        let (writer, reader) = match kind {
            Kind::Load | Kind::LoadReadOnly => (writer, self.merge(reader, bytes, floor, true)),
            Kind::Store => {
                let writer = self.merge(writer, bytes, floor, false);
                (writer, left_of(reader, bytes))
            }
        };
        agents.store(u64::from(reader) << 32 | u64::from(writer), Relaxed);
        if kind == Kind::Store {
            written.fetch_or(bytes as u8, Relaxed);
        }
        Ok(())
    }

    /// Who a mark stands for.
    fn members(&self, mark: u32) -> Vec<Member> {
        match mark >> 4 {
            0 => vec![],
            group if group >= GROUPS => {
                let history = lock(&self.memory.history);
                (history.groups.get(&group)).map_or(vec![], |members| members.to_vec())
            }
            agent => vec![(agent, mark & WHOLE)],
        }
    }

    /// The mark of those in `old` that are still of interest, and of this block.
    fn merge(&mut self, old: u32, bytes: u32, floor: u32, reads: bool) -> u32 {
        let mut members = self.members(old);
        let own = members.iter().filter(|(other, _)| *other == self.own);
        let own = own.fold(bytes, |all, &(_, theirs)| all | theirs);
        members.retain(|&(other, theirs)| {
            other != self.own && !self.is_before(other, floor) && (reads || theirs & !bytes != 0)
        });
        if members.is_empty() {
            return mark(self.own, own);
        }
        if reads && members.iter().all(|&(_, theirs)| theirs == bytes) {
            let several = self.agents.several();
            let siblings = self.agents.first..=several;
            if members.iter().all(|(other, _)| siblings.contains(other)) {
                return mark(several, bytes);
            }
        }
        members.push((self.own, own));
        members.sort_unstable();
        let all = members.iter().fold(0, |all, &(_, theirs)| all | theirs);
        mark(lock(&self.memory.history).group(members), all)
    }

    /// An agent's work ended before this one began.
    fn is_before(&mut self, agent: u32, floor: u32) -> bool {
        if agent < floor {
            return true;
        }
        let known = |&&(from, to, _): &&(u32, u32, bool)| from <= agent && agent < to;
        if let Some(&(_, _, before)) = self.known.iter().find(known) {
            return before;
        }
        let found = match lock(&self.memory.history).work_of(agent) {
            // Long ago.
            None => return true,
            Some((agents, other)) => {
                let before = self.work.is_after(other.stream, other.number);
                (agents.first, agents.end(), before)
            }
        };
        self.known[self.oldest_known] = found;
        self.oldest_known = (self.oldest_known + 1) % self.known.len();
        found.2
    }

    fn place(&self, address: u64) -> String {
        match self.memory.find(address) {
            Some(allocation) => format!(
                "{address:#x}, byte {} of {allocation}",
                address - allocation.start
            ),
            None => format!("{address:#x}"),
        }
    }

    fn name(&self, agent: u32) -> String {
        match lock(&self.memory.history).work_of(agent) {
            Some((agents, work)) if agent == agents.several() => {
                format!("several blocks of {work}")
            }
            Some((agents, work)) if agents.blocks > 1 => {
                format!("block {} of {work}", agent - agents.first)
            }
            Some((_, work)) => work.to_string(),
            None => "work of long ago".into(),
        }
    }

    /// Checks that a range may be read whole, written or not, and records that it is.
    fn read_any(&mut self, start: u64, bytes: u64) -> Result<(), Rejection> {
        if bytes == 0 {
            return Ok(());
        }
        let floor = self.enter(Kind::Load, start, bytes)?;
        for (word, mask) in words_of(start, bytes) {
            let mask = mask & u32::from(self.memory.arena.written(word).load(Relaxed));
            if mask != 0 {
                self.word_of_copy(word, mask, floor)?;
            }
        }
        Ok(())
    }

    #[inline]
    fn word_of_copy(&mut self, word: u64, bytes: u32, floor: u32) -> Result<(), Rejection> {
        let agents = self.memory.arena.agents(word);
        let old = agents.load(Relaxed);
        let (writer, reader) = (old as u32, (old >> 32) as u32);
        if writer < mark(floor, 0) && reader < mark(floor, 0) {
            let own = mark(self.own, bytes);
            agents.store(u64::from(own) << 32 | u64::from(writer), Relaxed);
            return Ok(());
        }
        self.word(Kind::Load, word, bytes, floor)
    }

    /// Checks and records an access of consecutive elements, by a whole work.
    pub fn touch(&mut self, kind: Kind, start: u64, bytes: u64, step: u64) -> Result<(), String> {
        if self.memory.unchecked {
            return Ok(());
        }
        self.range(kind, start, bytes, step)
            .map_err(|(_, what)| what)
    }

    /// Writes host memory to the device.
    pub fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), String> {
        self.touch(Kind::Store, to, bytes.len() as u64, 1)?;
        // SAFETY: the range is checked to be an allocation's; the device's memory is apart from
        // what Rust owns.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        Ok(())
    }

    /// Reads the device's memory. What nothing has written comes as bytes of ones, which are NaN.
    pub fn download(&mut self, from: u64, bytes: u64) -> Result<Vec<u8>, String> {
        let checks = !self.memory.unchecked;
        if checks {
            self.read_any(from, bytes).map_err(|(_, what)| what)?;
        }
        let mut out = vec![0; bytes as usize];
        // SAFETY: the range is checked to be an allocation's, and `out` has as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, out.as_mut_ptr(), out.len()) };
        if checks {
            for (i, byte) in out.iter_mut().enumerate() {
                let address = from + i as u64;
                let written = self.memory.arena.written(address & !3).load(Relaxed);
                if written != WHOLE as u8 && written >> (address & 3) & 1 == 0 {
                    *byte = 0xff;
                }
            }
        }
        Ok(out)
    }

    /// Copies within the device. What is not written there is not written here.
    pub fn copy(&mut self, to: u64, from: u64, bytes: u64) -> Result<(), String> {
        for (start, bytes) in self.memory.parts(bytes) {
            self.copy_part(to + start, from + start, bytes)?;
        }
        Ok(())
    }

    fn copy_part(&mut self, to: u64, from: u64, bytes: u64) -> Result<(), String> {
        let checks = !self.memory.unchecked;
        if checks {
            self.read_any(from, bytes).map_err(|(_, what)| what)?;
            self.touch(Kind::Store, to, bytes, 1)?;
            let arena = &self.memory.arena;
            let mut i = 0;
            while i < bytes {
                let (source, target) = (from + i, to + i);
                let whole = (source | target) & 3 == 0 && bytes - i >= 4;
                let written = arena.written(source & !3).load(Relaxed);
                if whole {
                    arena.written(target).store(written, Relaxed);
                    i += 4;
                } else {
                    if written >> (source & 3) & 1 == 0 {
                        arena
                            .written(target & !3)
                            .fetch_and(!(1 << (target & 3)), Relaxed);
                    }
                    i += 1;
                }
            }
        }
        // SAFETY: both ranges are checked to be allocations', and `copy` lets them overlap.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
        Ok(())
    }

    /// Fills memory with a byte.
    pub fn fill(&mut self, to: u64, value: u8, bytes: u64) -> Result<(), String> {
        for (start, bytes) in self.memory.parts(bytes) {
            let to = to + start;
            self.touch(Kind::Store, to, bytes, 1)?;
            // SAFETY: the range is checked to be an allocation's.
            unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes as usize) };
        }
        Ok(())
    }
}
