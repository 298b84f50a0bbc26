//! A layer on several ranks that are processes of an MPI job: the cases of `distributed.rs`, and
//! what the engine promises besides.
//!
//! Started as any test it runs itself under `mpirun`, with two ranks and with four; started by
//! `mpirun` it is a rank.

mod common;

use candle::{DType, Tensor};
use candle_powernorm::{Communicator, MpiCommunicator, Ranks};
use common::distributed::{self, Rank};
use common::{message, CPU, LIMIT};
use mpi::topology::SimpleCommunicator;
use mpi::traits::Communicator as _;
use mpi::Threading;
use std::process::{abort, Command};
use std::sync::Arc;

fn main() {
    // What Open MPI, and what MPICH tells a rank.
    let is_rank = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].map(std::env::var_os);
    if is_rank.iter().any(Option::is_some) {
        return as_rank();
    }
    for ranks in ["2", "4"] {
        let status = Command::new("mpirun")
            .args(["--allow-run-as-root", "--oversubscribe", "-n", ranks])
            .arg(std::env::current_exe().unwrap())
            .status();
        let status = status.expect("mpirun, of Open MPI");
        assert!(status.success(), "mpirun -n {ranks}: {status}");
    }
}

fn as_rank() {
    // mpirun ends the job when a rank dies. One that unwound would wait in MPI_Finalize for those
    // that wait for it.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        abort();
    }));
    std::thread::spawn(|| {
        std::thread::sleep(LIMIT);
        eprintln!("no end after {LIMIT:?}: a deadlock");
        abort();
    });

    let (universe, provided) = mpi::initialize_with_threading(Threading::Multiple).unwrap();
    assert_eq!(provided, Threading::Multiple);
    let world = universe.world();
    let communicator = Arc::new(MpiCommunicator::new(&world).unwrap());
    assert_eq!(communicator.world_size(), world.size() as usize);
    assert!(
        communicator.world_size() > 1,
        "a world of more than one rank"
    );

    let rank = Rank {
        rank: world.rank() as usize,
        device: CPU,
        communicator: communicator.clone(),
        over: Ranks::new(communicator.clone()),
    };
    macro_rules! run {
        ($($case:ident),* $(,)?) => {
            $(
                distributed::$case(&rank);
                report_from_first(&world, &stringify!($case).replace('_', " "));
            )*
        };
    }
    distributed::cases!(run);
    distributed::cases_of_a_cpu!(run);
    what_cannot_be_summed_fails_on_every_rank(&world, &*communicator);
    report_from_first(&world, "what cannot be summed fails on every rank");
    sums_of_other_threads_and_communicators(&world, &communicator);
    report_from_first(&world, "sums of other threads and communicators");
}

fn report_from_first(world: &SimpleCommunicator, name: &str) {
    if world.rank() == 0 {
        println!("{} ranks: {name} ... ok", world.size());
    }
}

fn what_cannot_be_summed_fails_on_every_rank(world: &SimpleCommunicator, ranks: &dyn Communicator) {
    let zeros = |len: usize, dtype| Tensor::zeros(len, dtype, &CPU).unwrap();
    let is_last = world.rank() + 1 == world.size();
    let odd_ones = [
        (zeros(6, DType::F32), "got 6 of F32 on this one"),
        (zeros(100_000, DType::F32), "got 100000 of F32 on this one"),
        (zeros(5, DType::F64), "got 5 of F64 on this one"),
        (
            zeros(5, DType::BF16),
            "expected a tensor of F32 or F64, got BF16",
        ),
    ];
    for (odd_one, expected) in odd_ones {
        let (tensor, expected) = match is_last {
            true => (odd_one, expected),
            false => (zeros(5, DType::F32), "got 5 of F32 on this one"),
        };
        let text = message(ranks.all_reduce_sum(&tensor));
        assert!(text.contains(expected), "{text}");
    }
}

/// A communicator keeps to itself, and may be handed to a thread.
fn sums_of_other_threads_and_communicators(
    world: &SimpleCommunicator,
    first: &Arc<MpiCommunicator>,
) {
    let second = Arc::new(MpiCommunicator::new(world).unwrap());
    std::thread::scope(|scope| {
        for (factor, ranks) in [(1., first), (100., &second)] {
            scope.spawn(move || {
                for k in 0..200 {
                    let own = Tensor::new(&[factor * k as f64], &CPU).unwrap();
                    let sum = ranks
                        .all_reduce_sum(&own)
                        .unwrap()
                        .to_vec1::<f64>()
                        .unwrap();
                    assert_eq!(sum, [factor * k as f64 * world_size(ranks)]);
                }
            });
        }
    });
}

fn world_size(ranks: &Arc<MpiCommunicator>) -> f64 {
    ranks.world_size() as f64
}
