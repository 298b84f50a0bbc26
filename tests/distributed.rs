//! A layer on several ranks that are threads of this process. `mpi.rs` runs the same cases on processes.

mod common;

use candle::{DType, Module, Result, Tensor};
use candle_powernorm::{Communicator, Ranks};
use common::distributed::{self, Rank};
use common::CPU;

/// Runs a case on two to four ranks.
fn on_threads(case: fn(&Rank)) {
    distributed::on_threads(|| CPU, case);
}

macro_rules! tests {
    ($($case:ident),* $(,)?) => {
        $(#[test]
        fn $case() {
            on_threads(distributed::$case);
        })*
    };
}
distributed::cases!(tests);
distributed::cases_of_a_cpu!(tests);

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
    let xs = Tensor::ones((3, 6), DType::F64, &CPU)?;
    assert!(
        common::message(layer.forward(&xs)).contains("expected 7 sums of the communicator, got 2")
    );
    assert_eq!(layer.steps()?, 0);
    Ok(())
}
