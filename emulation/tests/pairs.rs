//! The kernels against the CPU path: a selection in which every pair of values meets, or, with
//! `CANDLE_POWERNORM_EMULATION=full` in the environment, the whole grid. A shard is a test, to be run by its name.

use candle::Result;
use candle_powernorm_emulation::case::{all_pairs, pairs, pairwise, whole_grid, Case};
use candle_powernorm_emulation::Schedule;

/// Shards of the cases, for the threads of the test harness and for parts of the whole grid.
const SHARDS: usize = 16;

fn full() -> bool {
    std::env::var("CANDLE_POWERNORM_EMULATION").is_ok_and(|selection| selection == "full")
}

fn check_shard(shard: usize) -> Result<()> {
    let cases = match full() {
        true => whole_grid(),
        false => pairwise(),
    };
    for (index, point) in cases.into_iter().enumerate().skip(shard).step_by(SHARDS) {
        let schedules = Schedule::several(index as u64);
        // Of the whole grid each case runs by one of them.
        let schedules = match full() {
            true => &schedules[index / SHARDS % schedules.len()..][..1],
            false => &schedules[..],
        };
        Case::at(point).check(schedules)?;
    }
    Ok(())
}

#[test]
fn every_pair_is_selected() {
    let mut missing = all_pairs();
    for point in pairwise() {
        for pair in pairs(&point) {
            missing.remove(&pair);
        }
    }
    assert!(missing.is_empty(), "{missing:?}");
}

macro_rules! shards {
    ($($name:ident = $shard:expr;)*) => {
        $(#[test]
        fn $name() -> Result<()> {
            check_shard($shard)
        })*
    };
}

shards! {
    shard_00 = 0;
    shard_01 = 1;
    shard_02 = 2;
    shard_03 = 3;
    shard_04 = 4;
    shard_05 = 5;
    shard_06 = 6;
    shard_07 = 7;
    shard_08 = 8;
    shard_09 = 9;
    shard_10 = 10;
    shard_11 = 11;
    shard_12 = 12;
    shard_13 = 13;
    shard_14 = 14;
    shard_15 = 15;
}
