//! A block's shared memory, and what is known of each of its bytes: written or not, by whom, and
//! who has read it since.

use crate::engine::launch::Counts;

/// More warps than one, in the records of who touched a word.
const MANY: u16 = u16::MAX;

/// The history of four bytes that are always accessed together, or of one byte. Blocks, epochs,
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
    writer: u16,
    reader: u16,
    write_lane: u8,
    write_epoch: u32,
    write_time: u32,
    /// Tells whether two lanes wrote in the same instruction.
    write_serial: u32,
    write_line: u32,
    read_epoch: u32,
    read_time: u32,
    read_lanes: u32,
    read_line: u32,
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
    /// Counts the barriers of the block.
    epoch: u32,
}

/// Who accesses shared memory.
#[derive(Clone, Copy)]
pub struct Who {
    pub warp: u16,
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
        self.epoch += 1;
        self.split.clear();
    }

    /// All warps have waited for each other.
    pub fn barrier(&mut self) {
        self.epoch += 1;
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
        let epoch = self.epoch;
        let mut at = start;
        while at < start + size as usize {
            let count = (4 - at % 4).min(start + size as usize - at);
            for record in self.records(at, count) {
                touched(record, epoch, who, lane, touch)
                    .map_err(|what| format!("{what} (shared memory, at {at:#x})"))?;
            }
            at += count;
        }
        Ok(())
    }

    /// The records of bytes of one word: one of a whole word, or one for each byte.
    fn records(&mut self, at: usize, count: usize) -> &mut [Record] {
        let word = &mut self.words[at / 4];
        if word.block != self.block {
            *word = Record {
                block: self.block,
                ..Record::default()
            };
        }
        if word.split == 0 {
            if count == 4 {
                return std::slice::from_mut(word);
            }
            self.split.push([*word; 4]);
            word.split = self.split.len() as u32;
        }
        &mut self.split[word.split as usize - 1][at % 4..][..count]
    }

    /// The bytes are inside, and elements of so many bytes are aligned whole words.
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
        let (block, epoch) = (self.block, self.epoch);
        let words = &mut self.words[address as usize / 4..][..bytes as usize / 4];
        // A size is a power of two.
        let lane_of = |word: usize| lowest + (word >> (size / 4).trailing_zeros()) as u32;
        for (at, word) in words.iter().enumerate() {
            let settled = match word.block == block {
                true => word.split == 0 && obstacle(word, epoch, who, lane_of(at), touch).is_none(),
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
                read(word, epoch, who, 1 << lane_of(at));
            } else {
                write(word, epoch, who, lane_of(at), touch);
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
        let (block, epoch) = (self.block, self.epoch);
        let words = &mut self.words[address as usize / 4..][..size as usize / 4];
        // Such as no lane needs a further look at, whichever wrote them.
        let known = |word: &Record| {
            let written = word.writer == who.warp && word.write_time < who.time;
            word.block == block
                && word.split == 0
                && !word.in_flight
                && word.written
                && (word.write_epoch != epoch || written)
        };
        let known = words.iter().all(known);
        if known {
            for word in words {
                read(word, epoch, who, mask);
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
    epoch: u32,
    who: &Who,
    lane: u32,
    touch: Touch,
) -> Result<(), String> {
    if let Some(obstacle) = obstacle(word, epoch, who, lane, touch) {
        return Err(obstacle.of(word));
    }
    match touch {
        Touch::Read => read(word, epoch, who, 1 << lane),
        _ => write(word, epoch, who, lane, touch),
    }
    Ok(())
}

/// Why an access is refused.
enum Obstacle {
    InFlight,
    Unwritten,
    /// The last write.
    Written,
    /// Reads since the last barrier.
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
            Self::Read if word.reader == MANY => ("several warps read".into(), word.read_line),
            Self::Read => (format!("warp {} read", word.reader), word.read_line),
        };
        format!("a race: {does} these bytes (line {line}), and nothing orders the two")
    }
}

/// What forbids an access, mostly nothing.
#[inline(always)]
fn obstacle(word: &Record, epoch: u32, who: &Who, lane: u32, touch: Touch) -> Option<Obstacle> {
    let after_writes = word.write_epoch != epoch
        || word.writer == who.warp
            && (u32::from(word.write_lane) == lane
                || word.write_time != who.time
                || word.write_serial == who.serial);
    let after_reads = touch == Touch::Read
        || word.read_epoch != epoch
        || word.reader == who.warp && (word.read_lanes == 1 << lane || word.read_time != who.time);
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
fn write(word: &mut Record, epoch: u32, who: &Who, lane: u32, touch: Touch) {
    word.written = touch != Touch::Fly;
    word.in_flight = touch == Touch::Fly;
    word.writer = who.warp;
    word.write_lane = lane as u8;
    word.write_epoch = epoch;
    word.write_time = who.time;
    word.write_serial = who.serial;
    word.write_line = who.line;
}

#[inline(always)]
fn read(word: &mut Record, epoch: u32, who: &Who, lanes: u32) {
    if word.read_epoch != epoch {
        word.reader = who.warp;
        word.read_lanes = 0;
        word.read_epoch = epoch;
    } else if word.reader != who.warp {
        word.reader = MANY;
    }
    if word.read_time < who.time {
        word.read_lanes = 0;
    }
    word.read_time = who.time;
    word.read_lanes |= lanes;
    word.read_line = who.line;
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
