//! Runs a launch: its blocks and warps in some order.

use crate::engine::fault::Fault;
use crate::engine::launch::{Conditions, Counts, Launch};
use crate::engine::memory::{Memory, View, Work};
use crate::engine::shared::Shared;
use crate::engine::warp::{Block, State, Warp};
use crate::isa::op::Slot;
use std::cell::Cell;
use std::sync::Arc;

/// A launch of more blocks is a large one, if only the ends of those run.
const LARGE: u64 = 1 << 12;

/// Blocks of a large launch that run at each end.
fn end_of([x, y, z]: [u64; 3]) -> u64 {
    match (y, z) {
        (1, 1) => 17,
        (_, 1) => x,
        _ => x * y,
    }
}

/// Branches that a warp may take before it is another's turn. Somebody may wait for what the other
/// does.
const PATIENCE: u64 = 1 << 16;

/// Buffers that a launch leaves for the next one of its thread. Allocating them takes longer than
/// most launches run.
#[derive(Default)]
struct Spare {
    shared: Shared,
    /// The registers of each warp.
    slots: Vec<Vec<Slot>>,
}

thread_local! {
    static SPARE: Cell<Spare> = Cell::default();
}

/// Runs a launch to its end, or to its first fault.
pub fn run(
    launch: &Launch,
    memory: &Arc<Memory>,
    work: &Arc<Work>,
    conditions: Conditions,
) -> Result<Counts, Fault> {
    let kernel = launch.module.name_of(launch.entry);
    let rejected = |what| Fault::outside(kernel, "the launch".into(), what);
    let program = launch.module.program(launch.entry).map_err(rejected)?;
    let threads: u64 = launch.block.iter().map(|size| u64::from(*size)).product();
    let blocks: u64 = launch.grid.iter().map(|size| u64::from(*size)).product();
    if threads == 0 || threads > u64::from(launch.module.max_threads(launch.entry)) || blocks == 0 {
        return Err(rejected(format!(
            "blocks of {threads} threads, {blocks} of them, cannot run"
        )));
    }
    if launch.parameters.len() < launch.module.parameter_bytes(launch.entry) {
        return Err(rejected(format!(
            "{} bytes of arguments are too few",
            launch.parameters.len()
        )));
    }
    let Spare {
        mut shared,
        mut slots,
    } = SPARE.try_with(Cell::take).unwrap_or_default();
    shared.resize(program.dynamic_start() + launch.shared_bytes as usize);
    shared.check(!conditions.unchecked);
    let mut block = Block {
        launch,
        program: &program,
        index: [0; 3],
        shared,
        view: View::new(memory.clone(), work.clone(), 0),
        counts: Counts::default(),
    };
    let perturb = conditions.perturb.then_some(conditions.seed);
    let mut warps: Vec<Warp> = (0..threads.div_ceil(32) as u32)
        .map(|number| Warp::new(&block, number, perturb, slots.pop().unwrap_or_default()))
        .collect();
    let mut chance = Chance(conditions.seed);
    let grid = launch.grid.map(u64::from);
    let ([x, y, _], end) = (grid, end_of(grid));
    let left_out = match conditions.sparse && blocks > LARGE {
        true => blocks.saturating_sub(2 * end),
        false => 0,
    };
    for place in order(blocks - left_out, &mut chance) {
        let index = match left_out > 0 && place >= end {
            true => place + left_out,
            false => place,
        };
        block.index = [index % x, index / x % y, index / (x * y)].map(|axis| axis as u32);
        block.view.move_to(index as u32);
        block.shared.restart();
        block.counts.blocks += 1;
        for warp in &mut warps {
            warp.restart(&block);
        }
        run_block(&mut block, &mut warps, &mut chance).map_err(|fault| *fault)?;
    }
    slots.extend(warps.into_iter().rev().map(Warp::into_slots));
    let spare = Spare {
        shared: block.shared,
        slots,
    };
    // At the end of a thread there is none.
    let _ = SPARE.try_with(|kept| kept.set(spare));
    Ok(block.counts)
}

/// Numbers that look drawn by chance; none do if the seed is 0.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        if self.0 == 0 {
            return 0;
        }
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % bound.max(1)
    }
}

/// Blocks or warps in the order that they run: by index, backwards, or shuffled.
fn order(count: u64, chance: &mut Chance) -> Vec<u64> {
    let mut all: Vec<u64> = (0..count).collect();
    if chance.0 == 0 {
        return all;
    }
    if chance.below(3) == 0 {
        all.reverse();
        return all;
    }
    for end in (1..all.len()).rev() {
        all.swap(end, chance.below(end as u64 + 1) as usize);
    }
    all
}

/// Runs each warp until it waits, in turns, and lets them go when a barrier is complete.
fn run_block(block: &mut Block, warps: &mut [Warp], chance: &mut Chance) -> Result<(), Box<Fault>> {
    loop {
        for number in order(warps.len() as u64, chance) {
            let warp = &mut warps[number as usize];
            if warp.state == State::Ready {
                let patience = if chance.0 == 0 {
                    PATIENCE
                } else {
                    1 + chance.below(64) * chance.below(64)
                };
                warp.run(block, patience)?;
            }
        }
        if warps.iter().all(|warp| warp.state == State::Done) {
            return Ok(());
        }
        if pass_barriers(block, warps) || warps.iter().any(|warp| warp.state == State::Ready) {
            continue;
        }
        let Some(warp) = warps
            .iter()
            .find(|warp| matches!(warp.state, State::Waiting { .. }))
        else {
            return Ok(());
        };
        let others: Vec<String> = warps
            .iter()
            .enumerate()
            .map(|(number, warp)| match warp.state {
                State::Waiting { barrier, .. } => format!("warp {number} at barrier {barrier}"),
                _ => format!("warp {number} has exited"),
            })
            .collect();
        let what = format!("a barrier that cannot complete: {}", others.join(", "));
        return Err(warp.stuck(block, what));
    }
}

/// Lets warps go whose barrier is complete: all threads that it is for have arrived. Threads that
/// exited are not waited for.
fn pass_barriers(block: &mut Block, warps: &mut [Warp]) -> bool {
    let mut passed = false;
    let used = warps.iter().fold(0, |used, warp| match warp.state {
        State::Waiting { barrier, .. } => used | 1 << barrier,
        _ => used,
    });
    for number in (0..16).filter(|number| used >> number & 1 == 1) {
        let (mut here, mut expected) = (vec![], 0);
        for (index, warp) in warps.iter().enumerate() {
            match warp.state {
                State::Waiting { barrier, threads } if barrier == number => {
                    here.push(index);
                    expected = expected.max(threads as usize / 32);
                }
                _ => {}
            }
        }
        let done = || warps.iter().filter(|warp| warp.state == State::Done);
        let complete = match expected {
            0 => here.len() + done().count() == warps.len(),
            _ => here.len() >= expected,
        };
        if !complete {
            continue;
        }
        if expected > 0 {
            // The others wait for the barrier's next time.
            here.truncate(expected);
        }
        if expected == 0 || here.len() == warps.len() {
            block.shared.barrier();
        } else {
            (block.shared).barrier_of(here.iter().fold(0, |mask, index| mask | 1 << index));
        }
        here.into_iter().for_each(|index| warps[index].pass());
        passed = true;
    }
    passed
}
