//! Random accesses of shared memory with random barriers: the records must find the first race, and
//! no other, as a model does that remembers each access.

use softgpu::engine::shared::{Shared, Touch, Who};
use std::collections::HashSet;

const WARPS: usize = 5;
const WORDS: u64 = 4;

/// xorshift64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

struct Access {
    warp: usize,
    lane: u32,
    serial: u32,
    writes: bool,
    bytes: std::ops::Range<u64>,
}

/// All accesses of a block, and for each warp those that are ordered before its next.
#[derive(Default)]
struct Model {
    accesses: Vec<Access>,
    before: [HashSet<usize>; WARPS],
}

impl Model {
    /// Orders the accesses so far of warps, and all before them, before what follows in these.
    fn meet(&mut self, warps: &[usize]) {
        let mut all: HashSet<usize> = (self.accesses.iter().enumerate())
            .filter(|(_, access)| warps.contains(&access.warp))
            .map(|(index, _)| index)
            .collect();
        for warp in warps {
            all.extend(&self.before[*warp]);
        }
        for warp in warps {
            self.before[*warp].clone_from(&all);
        }
    }

    /// Adds an access. False: it races with an earlier one.
    fn add(&mut self, new: Access) -> bool {
        let ordered = self.accesses.iter().enumerate().all(|(index, old)| {
            let apart = old.bytes.end <= new.bytes.start || new.bytes.end <= old.bytes.start;
            // Two lanes may write in the same instruction, if they write the same value.
            let together = old.serial == new.serial || old.lane == new.lane;
            !(old.writes || new.writes)
                || apart
                || (old.warp == new.warp && together)
                || self.before[new.warp].contains(&index)
        });
        self.accesses.push(new);
        ordered
    }
}

/// Runs a block to its first race. Gives the number of accesses, and whether there was a race.
fn run(shared: &mut Shared, random: &mut Random, times: &mut [u32; WARPS], next: &mut u32) -> bool {
    let mut model = Model::default();
    shared.restart();
    times.iter_mut().for_each(|time| *time += 1);
    for step in 0..80 {
        let warp = random.below(WARPS as u64) as usize;
        let chosen = match step {
            // The first access writes all, so that nothing is unwritten.
            0 => 100,
            1 => 0,
            _ => random.below(100),
        };
        match chosen {
            0..3 => {
                model.meet(&[0, 1, 2, 3, 4]);
                shared.barrier();
                times.iter_mut().for_each(|time| *time += 1);
                continue;
            }
            3..60 => {
                let met: Vec<usize> = (0..WARPS).filter(|_| random.below(2) == 1).collect();
                model.meet(&met);
                shared.barrier_of(met.iter().fold(0, |mask, warp| mask | 1 << warp));
                met.iter().for_each(|warp| times[*warp] += 1);
                continue;
            }
            60..64 => {
                model.meet(&[warp]);
                times[warp] += 1;
                continue;
            }
            _ => {}
        }
        *next += 1;
        let who = Who {
            warp: warp as u8,
            time: times[warp],
            serial: *next,
            line: 1,
        };
        let lane = random.below(3) as u32;
        let address = 4 * random.below(WORDS);
        let mut expect = |lane, bytes, writes| {
            model.add(Access {
                warp,
                lane,
                serial: *next,
                writes,
                bytes,
            })
        };
        let touch = match random.below(4) {
            0 => Touch::Write,
            _ => Touch::Read,
        };
        let (expected, found) = match chosen {
            100 => {
                let row = 4 * WORDS;
                let settled = shared.touch_row(&who, (1 << WORDS) - 1, 0, 4, Touch::Write);
                assert!(settled);
                let lanes = (0..row).step_by(4).enumerate();
                let expected: Vec<bool> = lanes
                    .map(|(lane, at)| expect(lane as u32, at..at + 4, true))
                    .collect();
                (expected.into_iter().all(|ordered| ordered), true)
            }
            // One word for several lanes.
            64..74 => {
                let mask = 1 + random.below(7) as u32;
                let lanes: Vec<u32> = (0..3).filter(|lane| mask >> lane & 1 == 1).collect();
                let found = shared.read_same(&who, mask, address, 4)
                    || (lanes.iter())
                        .all(|lane| shared.touch(&who, *lane, address, 4, Touch::Read).is_ok());
                let all = lanes.iter();
                let expected = all
                    .map(|lane| expect(*lane, address..address + 4, false))
                    .fold(true, |all, ordered| all & ordered);
                (expected, found)
            }
            // A byte, so that the bytes of the word have different histories from here on.
            74..77 => {
                let address = address + random.below(4);
                let expected = expect(lane, address..address + 1, touch == Touch::Write);
                let found = shared.touch(&who, lane, address, 1, touch).is_ok();
                (expected, found)
            }
            _ => {
                let expected = expect(lane, address..address + 4, touch == Touch::Write);
                let found = shared.touch(&who, lane, address, 4, touch).is_ok();
                (expected, found)
            }
        };
        assert_eq!(found, expected, "step {step} of warp {warp}");
        if !found {
            return true;
        }
    }
    false
}

#[test]
fn the_first_race_is_found_and_no_other() {
    let mut shared = Shared::default();
    shared.resize(4 * WORDS as usize);
    shared.check(true);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut times, mut next) = ([0; WARPS], 0);
    let mut races = 0;
    for _ in 0..30_000 {
        races += u32::from(run(&mut shared, &mut random, &mut times, &mut next));
    }
    assert!((10_000..28_000).contains(&races), "{races}");
}
