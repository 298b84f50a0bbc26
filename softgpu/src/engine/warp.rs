//! A warp: 32 lanes, each with a program counter of its own. Lanes at the same instruction run
//! together.

use crate::engine::fault::Fault;
use crate::engine::launch::{Counts, Launch};
use crate::engine::memory::{Kind as Global, Pattern, View};
use crate::engine::shared::{Shared, Touch, Who, count_conflicts};
use crate::isa::alu::{self, put_predicate, put_slot, put_wide};
use crate::isa::op::*;
use std::collections::VecDeque;

/// State that a block's warps share.
pub(crate) struct Block<'a> {
    pub launch: &'a Launch,
    pub program: &'a Program,
    pub index: [u32; 3],
    pub shared: Shared,
    pub view: View,
    pub counts: Counts,
}

/// The state of a warp that stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Ready,
    /// At a block's barrier: its number, and the threads it is for (0: all).
    Waiting {
        barrier: u32,
        threads: u32,
    },
    Done,
}

/// Lanes wait for others at instructions of one kind with one mask of members.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Meeting {
    kind: Kind,
    immediate: u64,
    members: u32,
}

/// Copies in flight, of one instruction.
struct Flight {
    /// Lanes whose copies have not landed.
    lanes: u32,
    groups: [u32; 32],
    addresses: [u64; 32],
    bytes: u32,
    data: [[u8; 16]; 32],
}

pub(crate) struct Warp {
    slots: Vec<Slot>,
    predicates: Vec<u32>,
    lanes: Lanes,
    number: u16,
    /// Lanes that have a thread.
    exist: u32,
    exited: u32,
    /// Lanes that wait for others of their warp, and where.
    parked: u32,
    meetings: [Option<Meeting>; 32],
    /// Lanes that wait for the block.
    blocked: u32,
    /// Lanes that passed by a barrier where others wait.
    skipped: u32,
    /// Of lanes that do not run just now.
    counters: [u32; 32],
    local: Vec<u8>,
    /// Counts the synchronizations of its lanes.
    time: u32,
    serial: u32,
    flights: VecDeque<Flight>,
    groups: [u32; 32],
    /// The lanes that run, and where they are.
    active: u32,
    at: u32,
    /// The nearest instruction where another group may be met.
    meet: u32,
    pub state: State,
}

type Done<T> = Result<T, Box<Fault>>;

impl Warp {
    /// A register that nothing writes holds what earlier blocks, or users of `slots`, left.
    pub fn new(block: &Block, number: u32, perturb: Option<u64>, mut slots: Vec<Slot>) -> Self {
        let program = block.program;
        slots.resize(program.slots.max(slots.len()), Slot([0; 32]));
        let mut predicates = vec![0; program.predicates];
        predicates[0] = !0;
        let [x, y, z] = block.launch.block;
        let threads = x * y * z;
        let left = threads - number * 32;
        let lanes = Lanes {
            slots: slots.as_mut_ptr(),
            predicates: predicates.as_mut_ptr(),
            perturb,
        };
        let mut warp = Self {
            slots,
            predicates,
            lanes,
            number: number as u16,
            exist: if left >= 32 { !0 } else { (1 << left) - 1 },
            exited: 0,
            parked: 0,
            meetings: [None; 32],
            blocked: 0,
            skipped: 0,
            counters: [0; 32],
            local: vec![0; program.local_bytes * 32],
            time: 1,
            serial: 0,
            flights: VecDeque::new(),
            groups: [0; 32],
            active: 0,
            at: 0,
            meet: u32::MAX,
            state: State::Ready,
        };
        for (value, wide, slot) in &program.values {
            warp.fill(block, *value, *wide, *slot);
        }
        warp
    }

    /// Gives back the room of the registers.
    pub fn into_slots(self) -> Vec<Slot> {
        self.slots
    }

    /// Makes the warp ready for the block, whose index may be another.
    pub fn restart(&mut self, block: &Block) {
        for (value, wide, slot) in &block.program.values {
            if matches!(value, Value::Block(_)) {
                self.fill(block, *value, *wide, *slot);
            }
        }
        self.exited = !self.exist;
        self.parked = 0;
        self.blocked = 0;
        self.skipped = 0;
        self.counters = [0; 32];
        self.flights.clear();
        self.time += 1;
        self.active = 0;
        self.state = State::Ready;
    }

    /// Fills a slot whose values last a block.
    fn fill(&mut self, block: &Block, value: Value, wide: bool, slot: u16) {
        let Launch {
            grid, block: size, ..
        } = block.launch;
        let values = match value {
            Value::Bits(bits) => [bits; 32],
            Value::Parameter(offset) => {
                let parameter = &block.launch.parameters[offset as usize..];
                let mut bytes = [0; 8];
                let filled = &mut bytes[..if wide { 8 } else { 4 }];
                filled.copy_from_slice(&parameter[..filled.len()]);
                [u64::from_le_bytes(bytes); 32]
            }
            Value::Global(offset) => [block.launch.globals.wrapping_add(offset); 32],
            Value::DynamicShared(offset) => [block.program.dynamic_start() as u64 + offset; 32],
            Value::Threads(axis) => [size[usize::from(axis)].into(); 32],
            Value::Block(axis) => [block.index[usize::from(axis)].into(); 32],
            Value::Blocks(axis) => [grid[usize::from(axis)].into(); 32],
            Value::Thread(axis) => std::array::from_fn(|lane| {
                self.thread(block, lane as u32)[usize::from(axis)].into()
            }),
        };
        // SAFETY: the decoder reserved the slot, or two for 64 bits, and the warp has all that the
        // program reserved.
        unsafe {
            match wide {
                true => put_wide(&mut self.lanes, slot, values, !0),
                false => put_slot(&mut self.lanes, slot, values.map(|bits| bits as u32), !0),
            }
        }
    }

    /// A lane's index in the block.
    fn thread(&self, block: &Block, lane: u32) -> [u32; 3] {
        let [x, y, _] = block.launch.block;
        let thread = u32::from(self.number) * 32 + lane;
        [thread % x, thread / x % y, thread / (x * y)]
    }

    fn get32(&self, slot: u16, lane: u32) -> u32 {
        self.slots[usize::from(slot)].0[lane as usize]
    }

    fn get64(&self, slot: u16, lane: u32) -> u64 {
        // Two slots hold 32 values of 64 bits, one after the other.
        let (half, index) = (lane as usize / 16, lane as usize % 16 * 2);
        let words = &self.slots[usize::from(slot) + half].0;
        u64::from(words[index]) | u64::from(words[index + 1]) << 32
    }

    fn live(&self) -> u32 {
        !self.exited
    }

    #[cold]
    #[inline(never)]
    fn fault(&self, block: &Block, at: u32, lane: u32, what: String) -> Box<Fault> {
        let program = block.program;
        let module = &block.launch.module;
        let at = at as usize;
        Box::new(Fault {
            kernel: module.name_of(block.launch.entry).to_owned(),
            block: block.index,
            thread: self.thread(block, lane),
            source: module.source_of(program.sources[at]),
            instruction: format!(
                "{} (line {})",
                module.text_of(&program.texts[at]),
                program.ops[at].line
            ),
            what,
        })
    }

    fn fault_here(&self, block: &Block, mask: u32, what: impl Into<String>) -> Box<Fault> {
        self.fault(block, self.at, mask.trailing_zeros() % 32, what.into())
    }

    /// Notes where lanes of the running group are.
    #[inline(always)]
    fn lay_aside(&mut self, lanes: u32) {
        for (lane, counter) in self.counters[..lane_count()].iter_mut().enumerate() {
            *counter = if lanes >> lane & 1 == 1 {
                self.at
            } else {
                *counter
            };
        }
    }

    /// Lays the running group aside and takes up the one that is furthest behind, or, to be fair,
    /// any other. False: none can run.
    #[inline(always)]
    fn pick(&mut self, fair: bool) -> bool {
        self.lay_aside(self.active);
        let runnable = self.live() & !self.parked & !self.blocked;
        if runnable == 0 {
            self.active = 0;
            return false;
        }
        let mut candidates = runnable;
        if fair && runnable & !self.active != 0 {
            candidates = runnable & !self.active;
        }
        let mut at = u32::MAX;
        let counters = &self.counters[..lane_count()];
        for (lane, &counter) in counters.iter().enumerate() {
            at = at.min(if candidates >> lane & 1 == 1 {
                counter
            } else {
                u32::MAX
            });
        }
        let (mut here, mut meet) = (0, u32::MAX);
        for (lane, &counter) in counters.iter().enumerate() {
            here |= u32::from(counter == at) << lane;
            let ahead = runnable >> lane & 1 == 1 && counter > at;
            meet = meet.min(if ahead { counter } else { u32::MAX });
        }
        self.active = here & runnable;
        self.at = at;
        self.meet = meet;
        // Groups behind this one are met only by going back, which a fair turn sees to.
        true
    }

    /// Runs until the warp waits for its block, is done, or has run about `budget` branches.
    pub fn run(&mut self, block: &mut Block, budget: u64) -> Done<()> {
        if alu::is_wide() {
            // SAFETY: the processor has these features.
            unsafe { self.run_wide(block, budget) }
        } else {
            self.run_lanes(block, budget)
        }
    }

    /// Whatever is inlined here loops over lanes with wide vectors.
    #[cfg_attr(
        target_arch = "x86_64",
        target_feature(enable = "avx2,fma,bmi1,popcnt")
    )]
    unsafe fn run_wide(&mut self, block: &mut Block, budget: u64) -> Done<()> {
        self.run_lanes(block, budget)
    }

    #[inline(always)]
    fn run_lanes(&mut self, block: &mut Block, budget: u64) -> Done<()> {
        let mut left = budget;
        // After a fair turn the group that was picked goes on.
        if self.active == 0 && !self.pick(false) {
            return self.stopped(block);
        }
        let ops: &[Op] = &block.program.ops;
        loop {
            if self.at >= self.meet && !self.pick(false) {
                return self.stopped(block);
            }
            let op = &ops[self.at as usize];
            // The slots and predicates were reserved by the program that this instruction is of.
            let mask = self.active & (self.predicates[usize::from(op.guard)] ^ op.flip);
            block.counts.instructions[op.class as usize] += 1;
            block.counts.thread_instructions += match mask {
                u32::MAX => 32,
                _ => u64::from(mask.count_ones()),
            };
            if op.kind == Kind::Arithmetic {
                if mask != 0 {
                    // SAFETY: the decoder reserved every slot and predicate that it gave to an
                    // instruction, the warp has as many as the program reserved, and none of its
                    // vectors grows.
                    unsafe { (op.exec)(&mut self.lanes, op, mask) };
                }
                self.at += 1;
                continue;
            }
            if op.kind == Kind::Branch {
                left = left.wrapping_sub(1);
                self.branch(op, mask);
                if left == 0 {
                    if self.active != self.live() {
                        self.pick(true);
                    }
                    self.lay_aside(self.active);
                    return Ok(());
                }
                continue;
            }
            if mask == 0 {
                self.at += 1;
                continue;
            }
            if !self.other(block, op, mask)? {
                return self.stopped(block);
            }
        }
    }

    #[inline(always)]
    fn branch(&mut self, op: &Op, mask: u32) {
        if mask == self.active {
            self.at = op.target;
        } else if mask == 0 {
            self.at += 1;
        } else {
            self.at += 1;
            self.lay_aside(self.active & !mask);
            self.at = op.target;
            self.lay_aside(mask);
            // Both sides are laid aside, and the one behind is taken up.
            self.active = 0;
            self.pick(false);
        }
    }

    /// Lays part of the running group aside, or all of it, and sends the rest on.
    #[inline(never)]
    fn leave(&mut self, mask: u32) -> bool {
        self.lay_aside(mask);
        self.at += 1;
        self.active &= !mask;
        self.pick(false)
    }

    /// All instructions that are neither arithmetic nor branches. False: no lane can run.
    #[inline(always)]
    fn other(&mut self, block: &mut Block, op: &Op, mask: u32) -> Done<bool> {
        match op.kind {
            Kind::Load => self.load(block, op, mask)?,
            Kind::Store => self.store(block, op, mask)?,
            Kind::CopyAsync => self.copy_async(block, op, mask)?,
            Kind::CommitGroup => lanes_of(mask).for_each(|lane| self.groups[lane as usize] += 1),
            Kind::WaitGroup => self.wait_group(block, op, mask)?,
            Kind::Shuffle | Kind::WarpBarrier => return self.meet(block, op, mask),
            Kind::Barrier => {
                block.counts.barriers += 1;
                return Ok(self.block_at(block.program, mask));
            }
            Kind::Exit => {
                if mask & self.skipped != 0 && self.blocked != 0 {
                    let what = "the thread bypassed the barrier at which lanes of its warp wait";
                    return Err(self.fault_here(block, mask & self.skipped, what));
                }
                self.exited |= mask;
                let runs = self.leave(mask);
                return Ok(self.release(block)? || runs);
            }
            Kind::Assert | Kind::Unknown => {
                let message = block.program.messages[op.target as usize].clone();
                return Err(self.fault_here(block, mask, message));
            }
            Kind::Arithmetic | Kind::Branch => unreachable!("the loop of a warp runs these itself"),
        }
        self.at += 1;
        Ok(true)
    }

    /// No lane can run: all have exited, or wait for the block, or for lanes that will not come.
    #[inline(never)]
    fn stopped(&mut self, block: &Block) -> Done<()> {
        let live = self.live();
        if live == 0 {
            self.state = State::Done;
            return Ok(());
        }
        if self.parked != 0 {
            let lane = self.parked.trailing_zeros();
            let members = self.meetings[lane as usize].map_or(0, |meeting| meeting.members);
            let what = format!(
                "a deadlock within the warp: lanes {:#010x} wait here for the lanes \
                 {members:#010x}; {:#010x} have exited and {:#010x} wait for the block",
                self.parked,
                self.exited & self.exist,
                self.blocked
            );
            return Err(self.fault(block, self.counters[lane as usize], lane, what));
        }
        let lane = live.trailing_zeros();
        let at = self.counters[lane as usize];
        let op = &block.program.ops[at as usize];
        let (barrier, threads) = (self.get32(op.a, lane), self.get32(op.b, lane));
        let alike = |&other: &u32| {
            self.counters[other as usize] == at
                && self.get32(op.a, other) == barrier
                && self.get32(op.b, other) == threads
        };
        if let Some(other) = lanes_of(live).find(|other| !alike(other)) {
            let what = format!(
                "the warp has diverged: lane {lane} waits at line {}",
                op.line
            );
            return Err(self.fault(block, self.counters[other as usize], other, what));
        }
        if barrier >= 16 || threads % 32 != 0 {
            return Err(self.fault(
                block,
                at,
                lane,
                format!("there is no barrier {barrier} of {threads} threads"),
            ));
        }
        self.state = State::Waiting { barrier, threads };
        Ok(())
    }

    /// The lanes of a mask wait for the block.
    fn block_at(&mut self, program: &Program, mask: u32) -> bool {
        self.blocked |= mask;
        let barrier = self.at;
        let runs = self.leave(mask);
        self.skipped &= !mask;
        for lane in lanes_of(self.live() & !self.blocked) {
            let at = match self.active >> lane & 1 {
                1 => self.at,
                _ => self.counters[lane as usize],
            };
            // Who runs what only those run that do not wait has left early.
            if at > barrier && program.reaches(barrier + 1, at) {
                self.skipped |= 1 << lane;
            }
        }
        runs
    }

    /// The barrier that the warp waited at is complete.
    pub fn pass(&mut self) {
        for lane in lanes_of(self.blocked) {
            self.counters[lane as usize] += 1;
        }
        self.blocked = 0;
        self.skipped = 0;
        self.time += 1;
        self.state = State::Ready;
    }

    /// The fault of a warp that waits at a barrier which cannot complete.
    pub fn stuck(&self, block: &Block, what: String) -> Box<Fault> {
        let lane = self.live().trailing_zeros() % 32;
        self.fault(block, self.counters[lane as usize], lane, what)
    }

    /// Lanes come to where they wait for others of their warp.
    #[inline(always)]
    fn meet(&mut self, block: &mut Block, op: &Op, mask: u32) -> Done<bool> {
        let first = self.get32(op.e, mask.trailing_zeros());
        let uniform = lanes_of(mask).all(|lane| self.get32(op.e, lane) == first);
        // A barrier that is not for the whole warp comes to its fault below.
        let whole = op.kind == Kind::Shuffle || mask == self.live();
        if uniform && whole && first & self.live() == mask {
            self.exchange(block, self.at, mask, mask)?;
            self.at += 1;
            return Ok(true);
        }
        for lane in lanes_of(mask) {
            let members = self.get32(op.e, lane);
            if members >> lane & 1 == 0 {
                return Err(self.fault(
                    block,
                    self.at,
                    lane,
                    format!("the lane is not in its own mask {members:#010x}"),
                ));
            }
            if op.kind == Kind::WarpBarrier && self.live() & !members != 0 {
                let what = format!("softgpu knows no barrier of the lanes {members:#010x} alone");
                return Err(self.fault(block, self.at, lane, what));
            }
            self.meetings[lane as usize] = Some(Meeting {
                kind: op.kind,
                immediate: op.immediate,
                members,
            });
        }
        self.parked |= mask;
        let runs = self.leave(mask);
        Ok(self.release(block)? || runs)
    }

    /// Lets lanes go whose partners have all arrived or exited. False: there are none.
    #[inline(never)]
    fn release(&mut self, block: &mut Block) -> Done<bool> {
        let mut seen = 0;
        let mut any = false;
        while let Some(lane) = lanes_of(self.parked & !seen).next() {
            let meeting = self.meetings[lane as usize];
            let mine = |other: &u32| self.meetings[*other as usize] == meeting;
            let here = mask_of(lanes_of(self.parked).filter(mine));
            seen |= here;
            let Some(meeting) = meeting else { continue };
            if meeting.members & self.live() & !here != 0 {
                continue;
            }
            let mut left = here;
            while left != 0 {
                let at = self.counters[left.trailing_zeros() as usize];
                let there = |other: &u32| self.counters[*other as usize] == at;
                let group = mask_of(lanes_of(left).filter(there));
                self.exchange(block, at, group, here)?;
                left &= !group;
            }
            for other in lanes_of(here) {
                self.counters[other as usize] += 1;
            }
            self.parked &= !here;
            any = true;
        }
        if any {
            self.pick(false);
        }
        Ok(any)
    }

    /// Runs an exchange for the lanes of `group`, which came with all of `present`.
    #[inline(always)]
    fn exchange(&mut self, block: &Block, at: u32, group: u32, present: u32) -> Done<()> {
        let op = &block.program.ops[at as usize];
        // CUDA promises an order of accesses to memory only for `bar.warp.sync`: shuffles exchange
        // registers.
        if op.kind == Kind::WarpBarrier {
            self.time += 1;
            return Ok(());
        }
        let mut values = self.slots[usize::from(op.a)].0;
        for lane in lanes_of(present & !group) {
            let theirs = &block.program.ops[self.counters[lane as usize] as usize];
            values[lane as usize] = self.get32(theirs.a, lane);
        }
        let mut results = [0; 32];
        let mut inside = 0;
        for lane in lanes_of(group) {
            let (b, c) = (self.get32(op.b, lane) & 31, self.get32(op.c, lane));
            let (clamp, segment) = (c & 31, c >> 8 & 31);
            let most = lane & segment | clamp & !segment;
            let source = match op.immediate {
                0 => lane.wrapping_sub(b),
                1 => lane + b,
                2 => lane ^ b,
                _ => lane & segment | b & !segment,
            };
            let within = match op.immediate {
                0 => lane as i32 - b as i32 >= most as i32,
                _ => source <= most,
            };
            let source = if within { source } else { lane };
            if present >> source & 1 == 0 {
                let what = format!("the lane reads from lane {source}, which does not take part");
                return Err(self.fault(block, at, lane, what));
            }
            results[lane as usize] = values[source as usize];
            inside |= u32::from(within) << lane;
        }
        // SAFETY: the decoder reserved the slot and the predicate, and the warp has all that the
        // program reserved.
        unsafe {
            put_slot(&mut self.lanes, op.d, results, group);
            put_predicate(&mut self.lanes, op.p, inside, group);
        }
        Ok(())
    }

    /// Each lane's address in the space of an operand.
    #[inline(always)]
    fn addresses(&self, address: &Address) -> [u64; 32] {
        let Some(base) = address.base else {
            return [address.offset; 32];
        };
        let mut all = [0; 32];
        if address.wide {
            // SAFETY: a wide register is two slots, aligned to more than a u64, and all were
            // reserved.
            let values = unsafe {
                &*self
                    .slots
                    .as_ptr()
                    .add(usize::from(base))
                    .cast::<[u64; 32]>()
            };
            for (at, value) in all.iter_mut().zip(values) {
                *at = value.wrapping_add(address.offset);
            }
        } else {
            let values = &self.slots[usize::from(base)].0;
            for (at, value) in all.iter_mut().zip(values) {
                *at = u64::from(value.wrapping_add(address.offset as u32));
            }
        }
        all
    }

    #[inline(always)]
    fn load(&mut self, block: &mut Block, op: &Op, mask: u32) -> Done<()> {
        let address = &block.program.addresses[op.target as usize];
        let addresses = &self.addresses(address);
        let size = address.bytes * address.count;
        let pattern = Pattern::of(addresses, mask, size);
        match address.space {
            Space::Global => {
                let kind = if address.read_only {
                    Global::LoadReadOnly
                } else {
                    Global::Load
                };
                self.check_global(block, kind, mask, addresses, size, pattern)?;
                // SAFETY: the check says that each lane's bytes are there and may be read.
                unsafe {
                    self.gather(address, mask, pattern, |lane| {
                        addresses[lane as usize] as *const u8
                    })
                };
            }
            Space::Shared => {
                self.check_shared(block, mask, addresses, size, pattern, Touch::Read)?;
                let base = block.shared.at(0, 0).as_ptr();
                // SAFETY: the check says that each lane's bytes are inside.
                unsafe {
                    self.gather(address, mask, pattern, |lane| {
                        base.add(addresses[lane as usize] as usize)
                    })
                };
            }
            Space::Local | Space::Parameter => {
                let (base, stride) = self.own_bytes(block, address, mask, addresses)?;
                let pattern = match stride {
                    0 => pattern,
                    _ => Pattern::Scattered,
                };
                // SAFETY: the check says that each lane's bytes are inside of its part.
                unsafe {
                    self.gather(address, mask, pattern, |lane| {
                        base.add(lane as usize * stride + addresses[lane as usize] as usize)
                    })
                };
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn store(&mut self, block: &mut Block, op: &Op, mask: u32) -> Done<()> {
        let address = &block.program.addresses[op.target as usize];
        let addresses = &self.addresses(address);
        let size = address.bytes * address.count;
        let pattern = Pattern::of(addresses, mask, size);
        match address.space {
            Space::Global => {
                if let Err(fault) =
                    self.check_global(block, Global::Store, mask, addresses, size, pattern)
                {
                    let place = |lane: u32| addresses[lane as usize] as *const u8;
                    // SAFETY: a race is about bytes of an allocation, and whole operands lie in it.
                    return Err(unsafe { self.classed(block, fault, address, place) });
                }
                // SAFETY: the check says that each lane's bytes are there and may be
                // written.
                unsafe {
                    self.scatter(address, mask, pattern, |lane| {
                        addresses[lane as usize] as *mut u8
                    })
                };
            }
            Space::Shared => self.store_shared(block, address, mask, addresses, pattern)?,
            Space::Local => {
                let (base, stride) = self.own_bytes(block, address, mask, addresses)?;
                // SAFETY: the check says that each lane's bytes are inside of its part.
                unsafe {
                    self.scatter(address, mask, Pattern::Scattered, |lane| {
                        base.add(lane as usize * stride + addresses[lane as usize] as usize)
                    })
                };
            }
            Space::Parameter => {
                return Err(self.fault_here(block, mask, "a kernel cannot write its parameters"));
            }
        }
        Ok(())
    }

    /// At once if no two lanes write to the same place; else lane by lane.
    #[inline(always)]
    fn store_shared(
        &mut self,
        block: &mut Block,
        address: &Address,
        mask: u32,
        addresses: &[u64; 32],
        pattern: Pattern,
    ) -> Done<()> {
        let size = address.bytes * address.count;
        let apart = match pattern {
            Pattern::Row => true,
            Pattern::Same => false,
            Pattern::Scattered => count_conflicts(&mut block.counts, addresses, mask, size),
        };
        if !apart {
            return self.store_in_turn(block, address, mask, addresses);
        }
        let checked = self.check_shared(block, mask, addresses, size, pattern, Touch::Write);
        let base = block.shared.at(0, 0).as_mut_ptr();
        // SAFETY: the check says that each lane's bytes are inside. So are those of a race.
        unsafe {
            let place = |lane: u32| base.add(addresses[lane as usize] as usize);
            if let Err(fault) = checked {
                return Err(self.classed(block, fault, address, |lane| place(lane).cast_const()));
            }
            self.scatter(address, mask, pattern, place);
        }
        Ok(())
    }

    #[inline(never)]
    fn store_in_turn(
        &mut self,
        block: &mut Block,
        address: &Address,
        mask: u32,
        addresses: &[u64; 32],
    ) -> Done<()> {
        let size = address.bytes * address.count;
        self.serial += 1;
        for lane in lanes_of(mask) {
            let value = self.stored(address, lane);
            let value = &value[..size as usize];
            let at = addresses[lane as usize];
            let who = self.who(block);
            if let Some(other) = block.shared.collides(&who, lane, at, value) {
                let what = format!(
                    "lanes {other} and {lane} store different values at {at:#x} of shared memory"
                );
                return Err(self.fault(block, self.at, lane, what));
            }
            if let Err(what) = block.shared.touch(&who, lane, at, size, Touch::Write) {
                let fault = self.fault(block, self.at, lane, what);
                let place = block.shared.at(0, 0).as_ptr().wrapping_add(at as usize);
                // SAFETY: a race is about bytes that are inside.
                return Err(unsafe { self.classed(block, fault, address, |_| place) });
            }
            block.shared.at(at, size).copy_from_slice(value);
        }
        Ok(())
    }

    /// Tells a race of two writes of one value from others: whoever comes last, the bytes are the
    /// same.
    ///
    /// # Safety
    /// If the fault is a race of writes, `place` points to the bytes of a lane's operand.
    #[cold]
    unsafe fn classed(
        &self,
        block: &Block,
        mut fault: Box<Fault>,
        address: &Address,
        place: impl FnOnce(u32) -> *const u8,
    ) -> Box<Fault> {
        let what = &mut fault.what;
        if what.contains("race: ") && (what.contains(" wrote ") || what.contains(" writes;")) {
            let [x, y, _] = block.launch.block;
            let [tx, ty, tz] = fault.thread;
            let lane = (tx + x * (ty + y * tz)) % 32;
            let value = &self.stored(address, lane)[..(address.bytes * address.count) as usize];
            if std::slice::from_raw_parts(place(lane), value.len()) == value {
                what.push_str(" (both write the same value)");
            }
        }
        fault
    }

    /// The bytes that a lane stores.
    fn stored(&self, address: &Address, lane: u32) -> [u8; 32] {
        let mut value = [0; 32];
        for index in 0..address.count as usize {
            let bits = if address.bytes == 8 || address.widths[index] == 64 {
                self.get64(address.registers[index], lane)
            } else {
                u64::from(self.get32(address.registers[index], lane))
            };
            // Too many bytes: the next element overwrites them, or nobody looks at them.
            value[index * address.bytes as usize..][..8].copy_from_slice(&bits.to_le_bytes());
        }
        value
    }

    #[inline(always)]
    fn who(&self, block: &Block) -> Who {
        self.who_at(block.program.ops[self.at as usize].line)
    }

    #[inline(always)]
    fn who_at(&self, line: u32) -> Who {
        Who {
            warp: self.number as u8,
            time: self.time,
            serial: self.serial,
            line,
        }
    }

    #[inline(always)]
    fn check_shared(
        &mut self,
        block: &mut Block,
        mask: u32,
        addresses: &[u64; 32],
        size: u32,
        pattern: Pattern,
        touch: Touch,
    ) -> Done<()> {
        self.serial += 1;
        let who = self.who(block);
        let first = addresses[mask.trailing_zeros() as usize % 32];
        let settled = match pattern {
            Pattern::Row => block.shared.touch_row(&who, mask, first, size, touch),
            Pattern::Same if touch == Touch::Read => {
                block.shared.read_same(&who, mask, first, size)
            }
            _ => false,
        };
        if settled {
            return Ok(());
        }
        if pattern == Pattern::Scattered && touch == Touch::Read {
            count_conflicts(&mut block.counts, addresses, mask, size);
        }
        for lane in lanes_of(mask) {
            let touched = (block.shared).touch(&who, lane, addresses[lane as usize], size, touch);
            touched.map_err(|what| self.fault(block, self.at, lane, what))?;
        }
        Ok(())
    }

    /// The start of lane 0's local memory, or of the parameters, and the distance to the next
    /// lane's. The operands of all lanes are inside.
    fn own_bytes(
        &mut self,
        block: &Block,
        address: &Address,
        mask: u32,
        addresses: &[u64; 32],
    ) -> Done<(*mut u8, usize)> {
        let own = block.program.local_bytes;
        let parameters = &block.launch.parameters;
        let start = parameters.as_ptr().cast_mut();
        let (place, base, bytes, stride) = match address.space {
            Space::Local => ("local memory", self.local.as_mut_ptr(), own, own),
            _ => ("the parameters", start, parameters.len(), 0),
        };
        let size = u64::from(address.bytes * address.count);
        let distinct = match address.base {
            Some(_) => mask,
            None => mask & mask.wrapping_neg(),
        };
        for lane in lanes_of(distinct) {
            let at = addresses[lane as usize];
            let what = if at.checked_add(size).is_none_or(|end| end > bytes as u64) {
                format!("{size} bytes at {at:#x} of {place} are out of bounds: there are {bytes}")
            } else if !at.is_multiple_of(size) {
                format!("{size} bytes at {at:#x} of {place} are misaligned")
            } else {
                continue;
            };
            return Err(self.fault(block, self.at, lane, what));
        }
        Ok((base, stride))
    }

    #[inline(always)]
    fn check_global(
        &mut self,
        block: &mut Block,
        kind: Global,
        mask: u32,
        addresses: &[u64; 32],
        size: u32,
        pattern: Pattern,
    ) -> Done<()> {
        let checked = (block.view).check(kind, size, mask, addresses, pattern);
        checked.map_err(|(lane, what)| self.fault(block, self.at, lane, what))?;
        let bytes = u64::from(mask.count_ones() * size);
        let sectors = sectors(addresses, mask, size, pattern);
        let counts = &mut block.counts;
        if matches!(kind, Global::Load | Global::LoadReadOnly) {
            counts.bytes_loaded += bytes;
            counts.sectors_loaded += sectors;
        } else {
            counts.bytes_stored += bytes;
            counts.sectors_stored += sectors;
        }
        Ok(())
    }

    /// Reads each lane's bytes into its registers.
    ///
    /// # Safety
    /// `place` points to all bytes of the operand for each lane of the mask, and the places are as
    /// the pattern says.
    #[inline(always)]
    unsafe fn gather(
        &mut self,
        address: &Address,
        mask: u32,
        pattern: Pattern,
        place: impl Fn(u32) -> *const u8,
    ) {
        let size = (address.bytes * address.count) as usize;
        let first = place(mask.trailing_zeros());
        for index in 0..address.count as usize {
            let slot = self
                .slots
                .as_mut_ptr()
                .add(usize::from(address.registers[index]));
            let plus = index * address.bytes as usize;
            let first = first.add(plus);
            macro_rules! each_lane {
                ($from:ty, $register:ty, $mask:expr) => {{
                    let slot = slot.cast::<$register>();
                    let value = |from: *const u8| {
                        (from.cast::<$from>().read_unaligned() as $register) & $mask
                    };
                    if pattern == Pattern::Row && mask == !0 && address.count == 1 {
                        for lane in 0..32 {
                            *slot.add(lane) = value(first.add(lane * size_of::<$from>()));
                        }
                    } else if pattern == Pattern::Row && mask == !0 {
                        for lane in 0..32 {
                            *slot.add(lane) = value(first.add(lane * size));
                        }
                    } else if pattern == Pattern::Same {
                        let value = value(first);
                        for lane in 0..32 {
                            let to = slot.add(lane);
                            *to = if mask >> lane & 1 == 1 { value } else { *to };
                        }
                    } else {
                        for lane in lanes_of(mask) {
                            *slot.add(lane as usize) = value(place(lane).add(plus));
                        }
                    }
                }};
            }
            match (address.bytes, address.signed, address.widths[index]) {
                (4, _, 32) => each_lane!(u32, u32, !0),
                (8, _, _) => each_lane!(u64, u64, !0),
                (4, true, _) => each_lane!(i32, u64, !0),
                (4, false, _) => each_lane!(u32, u64, !0),
                (2, false, 64) => each_lane!(u16, u64, !0),
                (2, true, 64) => each_lane!(i16, u64, !0),
                (2, true, 32) => each_lane!(i16, u32, !0),
                (2, _, _) => each_lane!(u16, u32, !0),
                (1, false, 64) => each_lane!(u8, u64, !0),
                (1, true, 64) => each_lane!(i8, u64, !0),
                (1, true, 32) => each_lane!(i8, u32, !0),
                (1, true, _) => each_lane!(i8, u32, 0xffff),
                _ => each_lane!(u8, u32, !0),
            }
        }
    }

    /// Writes each lane's registers to its bytes.
    ///
    /// # Safety
    /// `place` points to all bytes of the operand for each lane of the mask, and the places are as
    /// the pattern says.
    #[inline(always)]
    unsafe fn scatter(
        &mut self,
        address: &Address,
        mask: u32,
        pattern: Pattern,
        place: impl Fn(u32) -> *mut u8,
    ) {
        let first = place(mask.trailing_zeros());
        for index in 0..address.count as usize {
            let slot = self
                .slots
                .as_ptr()
                .add(usize::from(address.registers[index]));
            let plus = index * address.bytes as usize;
            macro_rules! each_lane {
                ($to:ty, $register:ty) => {{
                    let slot = slot.cast::<$register>();
                    let put = |to: *mut u8, value| to.cast::<$to>().write_unaligned(value);
                    if pattern == Pattern::Row && mask == !0 && address.count == 1 {
                        for lane in 0..32 {
                            put(first.add(lane * size_of::<$to>()), *slot.add(lane) as $to);
                        }
                    } else {
                        for lane in lanes_of(mask) {
                            put(place(lane).add(plus), *slot.add(lane as usize) as $to);
                        }
                    }
                }};
            }
            match (address.bytes, address.widths[index]) {
                (4, 32) => each_lane!(u32, u32),
                (8, _) => each_lane!(u64, u64),
                (4, _) => each_lane!(u32, u64),
                (2, 64) => each_lane!(u16, u64),
                (2, _) => each_lane!(u16, u32),
                (1, 64) => each_lane!(u8, u64),
                _ => each_lane!(u8, u32),
            }
        }
    }

    /// The source is read now, the destination written when somebody waits: a kernel may count on
    /// neither.
    #[inline(never)]
    fn copy_async(&mut self, block: &mut Block, op: &Op, mask: u32) -> Done<()> {
        let program = block.program;
        let from = &program.addresses[op.target as usize];
        let to = &program.addresses[op.immediate as usize];
        let (sources, places) = (self.addresses(from), self.addresses(to));
        let bytes = from.bytes;
        let whole = mask_of(lanes_of(mask).filter(|lane| self.get32(op.a, *lane) >= bytes));
        if whole != 0 {
            let pattern = Pattern::of(&sources, whole, bytes);
            self.check_global(block, Global::Load, whole, &sources, bytes, pattern)?;
        }
        let mut flight = Flight {
            lanes: mask,
            groups: self.groups,
            addresses: places,
            bytes,
            data: [[0; 16]; 32],
        };
        for lane in lanes_of(mask) {
            let wanted = self.get32(op.a, lane).min(bytes);
            let source = sources[lane as usize];
            if whole >> lane & 1 == 0 {
                // A copy shorter than its destination is checked byte by byte.
                for byte in 0..u64::from(wanted) {
                    let mut one = sources;
                    one[lane as usize] = source + byte;
                    self.check_global(block, Global::Load, 1 << lane, &one, 1, Pattern::Same)?;
                }
            }
            let data = &mut flight.data[lane as usize];
            // SAFETY: the check says that the bytes are there and may be read.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    source as *const u8,
                    data.as_mut_ptr(),
                    wanted as usize,
                )
            };
        }
        let pattern = Pattern::of(&places, mask, bytes);
        self.check_shared(block, mask, &places, bytes, pattern, Touch::Fly)?;
        self.flights.push_back(flight);
        Ok(())
    }

    /// Lands the copies of all groups but the latest few.
    #[inline(never)]
    fn wait_group(&mut self, block: &mut Block, op: &Op, mask: u32) -> Done<()> {
        // Groups from these on stay in flight.
        let mut ends = [0; 32];
        for lane in lanes_of(mask) {
            let group = &mut self.groups[lane as usize];
            ends[lane as usize] = if op.immediate == u64::MAX {
                *group += 1;
                *group
            } else {
                group.saturating_sub(op.immediate.min(u64::from(u32::MAX)) as u32)
            };
        }
        let mut flights = std::mem::take(&mut self.flights);
        for flight in &mut flights {
            let mut landing = 0;
            for (lane, (group, end)) in flight.groups.iter().zip(&ends).enumerate() {
                landing |= u32::from(group < end) << lane;
            }
            landing &= flight.lanes;
            if landing != 0 {
                flight.lanes &= !landing;
                self.land(block, flight, landing)?;
            }
        }
        while flights.front().is_some_and(|flight| flight.lanes == 0) {
            flights.pop_front();
        }
        self.flights = flights;
        Ok(())
    }

    fn land(&mut self, block: &mut Block, flight: &Flight, lanes: u32) -> Done<()> {
        let (addresses, data, bytes) = (&flight.addresses, &flight.data, flight.bytes);
        let pattern = Pattern::of(addresses, lanes, bytes);
        self.check_shared(block, lanes, addresses, bytes, pattern, Touch::Land)?;
        if pattern == Pattern::Row && bytes == 16 {
            let (start, count) = (lanes.trailing_zeros() as usize, lanes.count_ones());
            let row = data[start..start + count as usize].as_flattened();
            (block.shared.at(addresses[start], 16 * count)).copy_from_slice(row);
            return Ok(());
        }
        for lane in lanes_of(lanes).map(|lane| lane as usize) {
            let to = block.shared.at(addresses[lane], bytes);
            to.copy_from_slice(&data[lane][..bytes as usize]);
        }
        Ok(())
    }
}

fn lanes_of(mask: u32) -> impl Iterator<Item = u32> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let lane = (left != 0).then(|| left.trailing_zeros())?;
        left &= left - 1;
        Some(lane)
    })
}

fn mask_of(lanes: impl Iterator<Item = u32>) -> u32 {
    lanes.fold(0, |mask, lane| mask | 1 << lane)
}

/// The number of 32-byte sectors that the lanes touch.
#[inline(always)]
fn sectors(addresses: &[u64; 32], mask: u32, size: u32, pattern: Pattern) -> u64 {
    let first = addresses[mask.trailing_zeros() as usize % 32];
    let bytes = match pattern {
        Pattern::Row => mask.count_ones() * size,
        Pattern::Same => size,
        Pattern::Scattered => return scattered_sectors(addresses, mask),
    };
    ((first + u64::from(bytes) - 1) >> 5) - (first >> 5) + 1
}

#[inline(never)]
fn scattered_sectors(addresses: &[u64; 32], mask: u32) -> u64 {
    // Operands are aligned and at most 16 bytes, so one lies in one sector.
    let sectors = || lanes_of(mask).map(|lane| addresses[lane as usize] >> 5);
    let least = sectors().min().unwrap_or(0);
    if sectors().all(|sector| sector - least < 64) {
        let touched = sectors().fold(0u64, |touched, sector| touched | 1 << (sector - least));
        return u64::from(touched.count_ones());
    }
    let mut all: Vec<u64> = sectors().collect();
    all.sort_unstable();
    all.dedup();
    all.len() as u64
}
