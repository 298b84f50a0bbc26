//! A block's shared memory, and what is known of each of its bytes: written or not, by whom, and
//! who has read it since.

use crate::engine::launch::Counts;

/// Most warps of a block.
const WARPS: usize = 32;

/// Stands in for the clock of a word's reads where warps have read it at different clocks. No clock
/// is as great.
const APART: u32 = u32::MAX;

/// The history of four bytes that are always accessed together, or of one byte. Blocks, clocks,
/// times and serial numbers begin at 1, so those of an access that never was are 0.
#[derive(Clone, Copy, Default)]
struct Record {
    /// The block this record is of.
    block: u32,
    /// Number of the records of the four bytes, from 1 on, if they are not accessed together.
    split: u32,
    written: bool,
    /// A copy in flight will overwrite them.
    in_flight: bool,
    writer: u8,
    write_lane: u8,
    write_clock: u32,
    write_time: u32,
    /// Tells whether two lanes wrote in the same instruction.
    write_serial: u32,
    write_line: u32,
    /// A bit for each warp that has read since all earlier reads were ordered before a reader's.
    readers: u32,
    /// The clock of these reads, or `APART`.
    read_clock: u32,
    read_time: u32,
    /// Lanes of the only reader that read at `read_time`. If the reads are `APART`, the index of
    /// their clocks in `Order::reads`.
    read_lanes: u32,
    read_line: u32,
}

/// Tells which accesses of other warps are ordered before the next access of a warp, by vector
/// clocks as in race detectors for threads.
///
/// Each warp has a clock, and a record holds the clock that the warp had at the access.
/// `seen[v][u]` is the clock up to which accesses of warp u are ordered before the next access of
/// warp v. A barrier joins the rows `seen[v]` of the warps v that meet at it. Then it sets their
/// clocks to one value, which is greater than each of them was. An example with `bar.sync 1, 64`:
///
/// 1. Warps 0, 1 and 2 write at clock 5.
/// 2. Warps 0 and 1 pass the barrier. `seen[0][1]` and `seen[1][0]` become 5, and both clocks 6.
/// 3. Warp 0 may read what warp 1 wrote, because `seen[0][1]` is at least the 5 of that write. For
///    warp 0 to read what warp 2 wrote is a race, because `seen[0][2]` is less than 5.
///
/// Whatever is ordered before a warp's next access has a lower clock than that warp. So of reads at
/// the same clock none is ordered before another, and a mask of their warps records them all. A
/// barrier of the whole block changes no `seen`, but raises `base`. Kernels with no other barriers
/// need nothing else: their warps always have equal clocks.
#[derive(Default)]
struct Order {
    /// The clock of all warps after the last barrier of the whole block. Accesses at lower clocks
    /// are ordered before all that follow.
    base: u32,
    clocks: [u32; WARPS],
    /// Empty until the first barrier of some warps.
    seen: Vec<[u32; WARPS]>,
    /// The clock of each warp's read, 0 if there is none, for words whose reads are `APART`.
    reads: Vec<[u32; WARPS]>,
    /// Indices in `reads` that are not in use.
    free: Vec<u32>,
}

impl Order {
    fn clock(&self, warp: u8) -> u32 {
        self.clocks[usize::from(warp)]
    }

    /// Orders all accesses so far before all that follow.
    fn meet_all(&mut self) {
        let latest = self.clocks.iter().fold(self.base, |a, b| a.max(*b));
        self.base = latest + 1;
        self.clocks = [self.base; WARPS];
    }

    /// Orders the accesses so far of some warps, and all that were ordered before them, before what
    /// follows in these warps.
    fn meet(&mut self, warps: u32) {
        let met = || (0..WARPS).filter(|warp| warps >> warp & 1 == 1);
        self.seen.resize(WARPS, [0; WARPS]);
        let (mut joined, mut latest) = ([0; WARPS], 0);
        for warp in met() {
            for (all, seen) in joined.iter_mut().zip(self.seen[warp]) {
                *all = seen.max(*all);
            }
            joined[warp] = self.clocks[warp];
            latest = latest.max(self.clocks[warp]);
        }
        for warp in met() {
            self.seen[warp] = joined;
            self.clocks[warp] = latest + 1;
        }
    }

    /// Tells whether an access of warp `other` at this clock is ordered before the next of `warp`.
    #[inline(always)]
    fn is_before(&self, clock: u32, other: u8, warp: u8) -> bool {
        let seen = || self.seen.get(usize::from(warp));
        clock < self.base || seen().is_some_and(|seen| seen[usize::from(other)] >= clock)
    }

    /// Tells whether the reads of all other warps are ordered before the next access of `warp`. If
    /// there are other readers, the reads of `warp` itself are too: at its last read not all others
    /// were ordered before it, so it has since passed a barrier.
    #[inline(never)]
    fn are_reads_before(&self, word: &Record, warp: u8) -> bool {
        let mut others = word.readers & !(1 << warp);
        while others != 0 {
            let other = others.trailing_zeros() as u8;
            let clock = match word.read_clock {
                APART => self.reads[word.read_lanes as usize][usize::from(other)],
                clock => clock,
            };
            if !self.is_before(clock, other, warp) {
                return false;
            }
            others &= others - 1;
        }
        true
    }

    /// Records a read whose clock is not that of the earlier reads. If all of those are ordered
    /// before it, they are dropped, because a write that is ordered after this read is ordered
    /// after them.
    #[inline(never)]
    fn read_apart(&mut self, word: &mut Record, who: &Who, lanes: u32) {
        let (clock, me) = (self.clock(who.warp), 1 << who.warp);
        if self.are_reads_before(word, who.warp) {
            if word.read_clock == APART {
                self.free.push(word.read_lanes);
            }
            word.readers = me;
            word.read_clock = clock;
            word.read_time = who.time;
            word.read_lanes = lanes;
            return;
        }
        if word.read_clock != APART {
            let readers = word.readers;
            let clocks = std::array::from_fn(|warp| word.read_clock * (readers >> warp & 1));
            word.read_lanes = self.keep(clocks);
            word.read_clock = APART;
        }
        word.readers |= me;
        self.reads[word.read_lanes as usize][usize::from(who.warp)] = clock;
    }

    /// Stores the clocks of reads that are `APART`. Returns their index.
    fn keep(&mut self, clocks: [u32; WARPS]) -> u32 {
        if let Some(free) = self.free.pop() {
            self.reads[free as usize] = clocks;
            return free;
        }
        self.reads.push(clocks);
        self.reads.len() as u32 - 1
    }
}

/// A block's shared memory.
#[derive(Default)]
pub struct Shared {
    bytes: Vec<u8>,
    /// Only bounds are checked, and nothing is recorded.
    unchecked: bool,
    words: Vec<Record>,
    /// The records of words whose bytes are accessed apart.
    split: Vec<[Record; 4]>,
    block: u32,
    order: Order,
}

/// Who accesses shared memory.
#[derive(Clone, Copy)]
pub struct Who {
    pub warp: u8,
    /// Counts the synchronizations of the warp: it has seen what it did before the last.
    pub time: u32,
    /// Counts the instructions of the warp that access shared memory.
    pub serial: u32,
    pub line: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    Read,
    Write,
    /// A copy to these bytes begins.
    Fly,
    /// A copy has come to its end: only now its bytes are there.
    Land,
}

impl Shared {
    /// Takes another size. Records stay, of blocks that are over.
    pub fn resize(&mut self, bytes: usize) {
        self.bytes.resize(bytes, 0);
        if self.words.len() < bytes.div_ceil(4) {
            self.words.resize(bytes.div_ceil(4), Record::default());
        }
    }

    pub fn check(&mut self, on: bool) {
        self.unchecked = !on;
    }

    /// Forgets all, for the next block.
    pub fn restart(&mut self) {
        self.block += 1;
        self.order.meet_all();
        self.order.reads.clear();
        self.order.free.clear();
        self.split.clear();
    }

    /// All warps have waited for each other.
    pub fn barrier(&mut self) {
        self.order.meet_all();
    }

    /// The warps of a mask have waited for each other, and for no others.
    pub fn barrier_of(&mut self, warps: u32) {
        self.order.meet(warps);
    }

    /// The place of an access that is inside and aligned.
    fn place(&self, address: u64, size: u32) -> Result<usize, String> {
        let end = address.checked_add(u64::from(size));
        if end.is_none_or(|end| end > self.bytes.len() as u64) {
            return Err(format!(
                "{size} bytes at {address:#x} of shared memory are out of bounds: the block has \
                 {} bytes",
                self.bytes.len()
            ));
        }
        if !address.is_multiple_of(u64::from(size)) {
            return Err(format!(
                "{size} bytes at {address:#x} of shared memory are misaligned"
            ));
        }
        Ok(address as usize)
    }

    /// The bytes at an address that has been checked.
    pub fn at(&mut self, address: u64, size: u32) -> &mut [u8] {
        &mut self.bytes[address as usize..][..size as usize]
    }

    /// Checks a lane's access and records it.
    #[inline(never)]
    pub fn touch(
        &mut self,
        who: &Who,
        lane: u32,
        address: u64,
        size: u32,
        touch: Touch,
    ) -> Result<(), String> {
        if self.touch_row(who, 1 << lane, address, size, touch) {
            return Ok(());
        }
        let start = self.place(address, size)?;
        if self.unchecked {
            return Ok(());
        }
        let mut at = start;
        while at < start + size as usize {
            let count = (4 - at % 4).min(start + size as usize - at);
            let (records, order) = self.records(at, count);
            for record in records {
                touched(record, order, who, lane, touch)
                    .map_err(|what| format!("{what} (shared memory, at {at:#x})"))?;
            }
            at += count;
        }
        Ok(())
    }

    /// The records of bytes of one word: one of a whole word, or one for each byte. Also
    /// returns the order, which the caller needs beside them.
    fn records(&mut self, at: usize, count: usize) -> (&mut [Record], &mut Order) {
        let word = &mut self.words[at / 4];
        if word.block != self.block {
            *word = Record {
                block: self.block,
                ..Record::default()
            };
        }
        if word.split == 0 {
            if count == 4 {
                return (std::slice::from_mut(word), &mut self.order);
            }
            let mut bytes = [*word; 4];
            if word.read_clock == APART {
                // From here on the reads of each byte are recorded separately.
                for byte in &mut bytes[1..] {
                    let clocks = self.order.reads[byte.read_lanes as usize];
                    byte.read_lanes = self.order.keep(clocks);
                }
            }
            self.split.push(bytes);
            word.split = self.split.len() as u32;
        }
        let bytes = &mut self.split[word.split as usize - 1];
        (&mut bytes[at % 4..][..count], &mut self.order)
    }

    /// The bytes are inside, and elements of `bytes` bytes are aligned whole words.
    #[inline(always)]
    fn is_plain(&self, address: u64, size: u32, bytes: u32) -> bool {
        let end = address.checked_add(u64::from(bytes));
        let inside = end.is_some_and(|end| end <= self.bytes.len() as u64);
        size >= 4 && address.is_multiple_of(u64::from(size)) && inside
    }

    /// Checks and records an access of a warp's neighbouring lanes to bytes in a row, `size` for
    /// each from the lowest lane of `mask` on, if it needs no further look. False: it does, and
    /// nothing is recorded.
    #[inline(always)]
    pub fn touch_row(
        &mut self,
        who: &Who,
        mask: u32,
        address: u64,
        size: u32,
        touch: Touch,
    ) -> bool {
        let bytes = mask.count_ones() * size;
        if !self.is_plain(address, size, bytes) {
            return false;
        }
        if self.unchecked {
            return true;
        }
        let lowest = mask.trailing_zeros();
        let (block, order) = (self.block, &mut self.order);
        let words = &mut self.words[address as usize / 4..][..bytes as usize / 4];
        // A size is a power of two.
        let lane_of = |word: usize| lowest + (word >> (size / 4).trailing_zeros()) as u32;
        for (at, word) in words.iter().enumerate() {
            let settled = match word.block == block {
                true => word.split == 0 && obstacle(word, order, who, lane_of(at), touch).is_none(),
                false => touch != Touch::Read,
            };
            if !settled {
                return false;
            }
        }
        for (at, word) in words.iter_mut().enumerate() {
            if word.block != block {
                *word = Record {
                    block,
                    ..Record::default()
                };
            }
            if touch == Touch::Read {
                read(word, order, who, 1 << lane_of(at));
            } else {
                write(word, order, who, lane_of(at), touch);
            }
        }
        true
    }

    /// Checks and records a read of the same words by all lanes of `mask`, if it needs no further
    /// look. False: it does, and nothing is recorded.
    #[inline(always)]
    pub fn read_same(&mut self, who: &Who, mask: u32, address: u64, size: u32) -> bool {
        if !self.is_plain(address, size, size) {
            return false;
        }
        if self.unchecked {
            return true;
        }
        let (block, order) = (self.block, &mut self.order);
        let words = &mut self.words[address as usize / 4..][..size as usize / 4];
        // Such as no lane needs a further look at, whichever wrote them.
        let known = |word: &Record| {
            let before = match word.writer == who.warp {
                true => word.write_time < who.time,
                false => order.is_before(word.write_clock, word.writer, who.warp),
            };
            word.block == block
                && word.split == 0
                && !word.in_flight
                && word.written
                && (word.write_clock < order.base || before)
        };
        let known = words.iter().all(known);
        if known {
            for word in words {
                read(word, order, who, mask);
            }
        }
        known
    }

    /// The lane that stores another value to these bytes in the same instruction, if one does.
    pub fn collides(&self, who: &Who, lane: u32, address: u64, value: &[u8]) -> Option<u32> {
        if self.unchecked {
            return None;
        }
        let start = address as usize;
        let old = self.bytes.get(start..start + value.len())?;
        (start..start + value.len()).find_map(|at| {
            // Records of an earlier block say nothing, and its split records are gone.
            let word = Some(&self.words[at / 4]).filter(|word| word.block == self.block)?;
            let record = match word.split {
                0 => word,
                split => &self.split[split as usize - 1][at % 4],
            };
            let same = record.writer == who.warp
                && record.write_serial == who.serial
                && u32::from(record.write_lane) != lane;
            (same && old != value).then_some(u32::from(record.write_lane))
        })
    }
}

/// Checks an access to bytes that share a record, and records it.
fn touched(
    word: &mut Record,
    order: &mut Order,
    who: &Who,
    lane: u32,
    touch: Touch,
) -> Result<(), String> {
    if let Some(obstacle) = obstacle(word, order, who, lane, touch) {
        return Err(obstacle.of(word));
    }
    match touch {
        Touch::Read => read(word, order, who, 1 << lane),
        _ => write(word, order, who, lane, touch),
    }
    Ok(())
}

/// The reason why an access is rejected.
enum Obstacle {
    InFlight,
    Unwritten,
    /// The last write.
    Written,
    /// Reads that no barrier orders before.
    Read,
}

impl Obstacle {
    #[cold]
    fn of(self, word: &Record) -> String {
        let (does, line) = match self {
            Self::InFlight => return "a cp.async to these bytes is still in flight".into(),
            Self::Unwritten => return "these bytes were never written".into(),
            Self::Written => {
                let (lane, warp) = (word.write_lane, word.writer);
                (format!("lane {lane} of warp {warp} wrote"), word.write_line)
            }
            Self::Read if word.readers.is_power_of_two() => {
                let warp = word.readers.trailing_zeros();
                (format!("warp {warp} read"), word.read_line)
            }
            Self::Read => ("several warps read".into(), word.read_line),
        };
        format!("a race: {does} these bytes (line {line}), and nothing orders the two")
    }
}

/// The obstacle to an access; mostly there is none.
#[inline(always)]
fn obstacle(word: &Record, order: &Order, who: &Who, lane: u32, touch: Touch) -> Option<Obstacle> {
    let after_writes = word.write_clock < order.base
        || match word.writer == who.warp {
            true => {
                u32::from(word.write_lane) == lane
                    || word.write_time != who.time
                    || word.write_serial == who.serial
            }
            false => order.is_before(word.write_clock, word.writer, who.warp),
        };
    let after_reads = touch == Touch::Read
        || word.read_clock < order.base
        || match word.readers == 1 << who.warp {
            true => word.read_lanes == 1 << lane || word.read_time != who.time,
            false => order.are_reads_before(word, who.warp),
        };
    if word.in_flight && touch != Touch::Land {
        Some(Obstacle::InFlight)
    } else if touch == Touch::Read && !word.written {
        Some(Obstacle::Unwritten)
    } else if !after_writes {
        Some(Obstacle::Written)
    } else if !after_reads {
        Some(Obstacle::Read)
    } else {
        None
    }
}

#[inline(always)]
fn write(word: &mut Record, order: &Order, who: &Who, lane: u32, touch: Touch) {
    word.written = touch != Touch::Fly;
    word.in_flight = touch == Touch::Fly;
    word.writer = who.warp;
    word.write_lane = lane as u8;
    word.write_clock = order.clock(who.warp);
    word.write_time = who.time;
    word.write_serial = who.serial;
    word.write_line = who.line;
}

#[inline(always)]
fn read(word: &mut Record, order: &mut Order, who: &Who, lanes: u32) {
    let (clock, me) = (order.clock(who.warp), 1 << who.warp);
    word.read_line = who.line;
    if word.read_clock < order.base {
        word.readers = me;
        word.read_lanes = 0;
    } else if word.read_clock == clock {
        word.readers |= me;
    } else if word.readers != me {
        return order.read_apart(word, who, lanes);
    }
    if word.read_time < who.time {
        word.read_lanes = 0;
    }
    word.read_clock = clock;
    word.read_time = who.time;
    word.read_lanes |= lanes;
}

/// Counts the passes beyond the first that an access of a warp takes: 32 banks of 4 bytes, whole
/// warps for up to 4 bytes, halves for 8, quarters for 16. Lanes that want the same word share it,
/// so a row and a word for all take one pass. True: each lane has a word of its own, in a bank of
/// its own.
pub fn count_conflicts(counts: &mut Counts, addresses: &[u64; 32], mask: u32, size: u32) -> bool {
    // Mostly each lane has a bank of its own.
    let bank_of = |lane: usize| 1u32 << (addresses[lane] / 4 % 32);
    let lanes = (0..32).filter(|lane| mask >> lane & 1 == 1);
    let banks = lanes.fold(0, |banks, lane| banks | bank_of(lane));
    if size <= 4 && banks.count_ones() == mask.count_ones() {
        return true;
    }
    let group = match size {
        0..=4 => 32,
        8 => 16,
        _ => 8,
    };
    for start in (0..32).step_by(group) {
        let lanes = (start..start + group).filter(|lane| mask >> lane & 1 == 1);
        let words = lanes.flat_map(|lane| {
            let first = addresses[lane] / 4;
            first..first + u64::from(size).div_ceil(4)
        });
        // Of each bank, the words that it has to give, the first beside the others.
        let mut firsts = [u64::MAX; 32];
        let mut others: Vec<u64> = vec![];
        for word in words {
            let first = &mut firsts[word as usize % 32];
            if *first == u64::MAX {
                *first = word;
            } else if *first != word && !others.contains(&word) {
                others.push(word);
            }
        }
        let mut more = [0u64; 32];
        for word in others {
            more[word as usize % 32] += 1;
        }
        counts.bank_conflicts += more.into_iter().max().unwrap_or(0);
    }
    false
}
