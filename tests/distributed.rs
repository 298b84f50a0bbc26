//! A layer on several ranks that are threads of this process. `mpi.rs` runs the same cases on processes.

mod common;

use candle::{DType, Error, Module, Result, Tensor};
use candle_powernorm::{Communicator, Ranks};
use common::distributed::{self, Rank};
use common::within_a_minute;
use std::sync::{Arc, Condvar, Mutex};

/// Threads that add up tensors.
#[derive(Debug)]
struct World {
    ranks: usize,
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    number: usize,
    brought: Vec<Option<Tensor>>,
    /// Of the last round. The next one cannot end before all ranks have taken it.
    sum: Option<Tensor>,
    /// Whether a rank will not come any more.
    left: bool,
}

#[derive(Debug)]
struct Thread {
    world: Arc<World>,
    rank: usize,
}

impl Communicator for Thread {
    fn world_size(&self) -> usize {
        self.world.ranks
    }

    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        assert!(tensor.is_contiguous());
        let mut round = self.world.round.lock().unwrap();
        let number = round.number;
        round.brought[self.rank] = Some(tensor.copy()?);
        if round.brought.iter().all(Option::is_some) {
            let brought: Vec<Tensor> = (round.brought.iter_mut())
                .filter_map(Option::take)
                .collect();
            let sum = |sum: Result<Tensor>, other: &Tensor| sum? + other;
            round.sum = brought[1..].iter().fold(Ok(brought[0].clone()), sum).ok();
            round.number += 1;
            self.world.changed.notify_all();
        }
        let waits = |round: &mut Round| round.number == number && !round.left;
        let round = self.world.changed.wait_while(round, waits).unwrap();
        if round.number == number {
            return Err(Error::msg("a rank has left"));
        }
        let sum = round.sum.as_ref();
        sum.ok_or_else(|| Error::msg("ranks brought tensors of different shapes"))?
            .copy()
    }
}

impl Drop for Thread {
    /// A rank that panics must not leave the others waiting.
    fn drop(&mut self) {
        if let Ok(mut round) = self.world.round.lock() {
            round.left = true;
        }
        self.world.changed.notify_all();
    }
}

/// Runs a case on two to four ranks.
fn on_threads(case: fn(&Rank)) {
    within_a_minute(move || {
        for ranks in 2..=4 {
            let world = Arc::new(World {
                ranks,
                round: Mutex::new(Round {
                    brought: vec![None; ranks],
                    ..Round::default()
                }),
                changed: Condvar::new(),
            });
            std::thread::scope(|scope| {
                for rank in 0..ranks {
                    let world = world.clone();
                    let communicator = Arc::new(Thread { world, rank });
                    let over = Ranks::new(communicator.clone());
                    let rank = Rank {
                        rank,
                        communicator,
                        over,
                    };
                    scope.spawn(move || case(&rank));
                }
            });
        }
    });
}

macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        $(#[test]
        fn $case() {
            on_threads(distributed::$case);
        })*
    };
}

cases![
    trajectories,
    a_sum_is_one_on_every_rank,
    sums_after_the_warm_up_wait,
    forwards_without_a_backward,
    an_evaluation_is_local,
    layers_of_different_sizes,
    a_rank_whose_call_fails,
    a_model_of_which_a_call_fails,
    residuals_scales_recalibration,
    a_state_that_is_replaced,
];

/// Sums of another length than was asked for.
#[derive(Debug)]
struct Short;

impl Communicator for Short {
    fn world_size(&self) -> usize {
        2
    }

    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        match tensor.elem_count() {
            // What ranks announce.
            5 => tensor * 2.,
            _ => tensor.narrow(0, 0, 2),
        }
    }
}

#[test]
fn a_communicator_that_gives_back_less_is_an_error() -> Result<()> {
    let layer = common::layer(6, 1e-5.into(), DType::F64).0;
    let layer = layer.with_ranks(&Ranks::new(Short));
    let xs = Tensor::ones((3, 6), DType::F64, &common::CPU)?;
    assert!(
        common::message(layer.forward(&xs)).contains("expected 7 sums of the communicator, got 2")
    );
    assert_eq!(layer.steps()?, 0);
    Ok(())
}
