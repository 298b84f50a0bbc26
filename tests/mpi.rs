//! A layer on several ranks that are processes of an MPI job: the cases of `distributed.rs`, and
//! what the engine promises besides.
//!
//! Started as any test it runs itself under `mpirun`, with two ranks and with four; started by
//! `mpirun` it is a rank. In some jobs a rank dies, which must end the job.

mod common;

use candle::{DType, Module, Tensor};
use candle_powernorm::{Communicator, MpiCommunicator, Ranks};
use common::distributed::{self, Rank};
use common::{CPU, LIMIT, layer, message, to_f64};
use mpi::Threading;
use mpi::topology::SimpleCommunicator;
use mpi::traits::Communicator as _;
use std::io::Write;
use std::process::{Command, Stdio, abort, exit};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The environment variable that says how the last rank dies.
const DEATH: &str = "CANDLE_POWERNORM_DEATH";

const DEATHS: [&str; 4] = ["killed", "aborted", "left", "world.abort"];

/// A job whose rank dies ends within this time, and within [`LIMIT`] it would end by itself.
const END: Duration = Duration::from_secs(60);

fn main() {
    // Variables that Open MPI and MPICH set for a rank.
    let is_rank = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].map(std::env::var_os);
    if is_rank.iter().any(Option::is_some) {
        return as_rank();
    }
    for ranks in ["2", "4"] {
        let status = job(ranks).status();
        let status = status.expect("mpirun, of Open MPI");
        assert!(status.success(), "mpirun -n {ranks}: {status}");
        for death in DEATHS {
            ends_with_a_rank(ranks, death);
        }
    }
}

fn job(ranks: &str) -> Command {
    let mut job = Command::new("mpirun");
    job.args(["--allow-run-as-root", "--oversubscribe", "-n", ranks])
        .arg(std::env::current_exe().unwrap())
        // A rank that waits lets others run. Where processors are busy, ranks that spin take
        // minutes in place of seconds.
        .env("OMPI_MCA_mpi_yield_when_idle", "1");
    job
}

/// A job in which a rank dies while the others wait for it. It ends, and `mpirun` says that it
/// failed.
fn ends_with_a_rank(ranks: &str, death: &str) {
    let mut job = job(ranks)
        .env(DEATH, death)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("mpirun, of Open MPI");
    let start = Instant::now();
    let status = loop {
        match job.try_wait().unwrap() {
            Some(status) => break status,
            None if start.elapsed() > END => {
                job.kill().unwrap();
                panic!("{ranks} ranks, one {death}: the job goes on");
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    let output = std::io::read_to_string(job.stdout.take().unwrap()).unwrap();
    assert_eq!(output, "a rank dies\n", "{ranks} ranks, one {death}");
    assert!(!status.success(), "{ranks} ranks, one {death}: {status}");
    println!("{ranks} ranks: one {death}, and the job ends ... ok");
}

/// Trains without end. In its third step the last rank dies, and the others wait for it in their
/// backward.
fn die(world: &SimpleCommunicator, ranks: &Ranks, death: &str) {
    let (norm, _varmap) = layer(8, 1e-5.into(), DType::F32);
    let norm = norm.with_ranks(ranks);
    let xs = Tensor::ones((4, 8), DType::F32, &CPU).unwrap();
    loop {
        let ys = norm.forward(&xs).unwrap();
        if norm.steps().unwrap() == 3 && world.rank() + 1 == world.size() {
            println!("a rank dies");
            std::io::stdout().flush().unwrap();
            match death {
                "killed" => {
                    let pid = std::process::id().to_string();
                    Command::new("kill").args(["-9", &pid]).status().unwrap();
                }
                "aborted" => abort(),
                "left" => exit(0),
                _ => world.abort(1),
            }
        }
        ys.backward().unwrap();
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
    assert!(world.size() > 1, "a world of more than one rank");

    let rank = Rank {
        rank: world.rank() as usize,
        device: CPU,
        communicator: communicator.clone(),
        over: Ranks::new(communicator.clone()),
    };
    if let Ok(death) = std::env::var(DEATH) {
        return die(&world, &rank.over, &death);
    }
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
        (zeros(5, DType::BF16), "a tensor of F32 or F64, got BF16"),
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
                    let sum = to_f64(&ranks.all_reduce_sum(&own).unwrap());
                    let size = ranks.world_size() as f64;
                    assert_eq!(sum, [factor * k as f64 * size]);
                }
            });
        }
    });
}
