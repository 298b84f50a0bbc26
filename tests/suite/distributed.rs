//! A layer on several ranks that are threads of this process. `mpi.rs` runs the same cases on
//! processes. Last come ranks that share their gradients and not their statistics.

use crate::common::distributed::{self, Rank, Swap};
use crate::common::*;
use candle::{CpuStorage, DType, Module, Result, Tensor, Var};
use candle_nn::VarMap;
use candle_powernorm::{Communicator, PowerNorm, PowerNormConfig, Ranks};
use std::panic::{AssertUnwindSafe, catch_unwind};

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

#[test]
fn a_communicator_that_gives_back_less_is_an_error() {
    distributed::a_communicator_that_gives_back_less(&CPU);
}

/// A job of one process needs no sum.
#[test]
fn a_rank_by_itself_sums_nothing() {
    struct Alone;
    impl Communicator for Alone {
        fn world_size(&self) -> usize {
            1
        }

        fn all_reduce_sum(&self, _: &Tensor) -> Result<Tensor> {
            candle::bail!("a sum over one rank")
        }
    }
    let ranks = Ranks::new(Alone);
    assert_eq!(format!("{ranks:?}"), "Ranks { world_size: 1 }");
    let layer = layer(SIZE, config(None), DType::F64).0.with_ranks(&ranks);
    let batch = Batch::random(&mut Data::new(42), &[5, SIZE], DType::F64, false);
    run(&layer, &batch, true);
    assert_eq!(layer.steps().unwrap(), 1);
}

/// A rank that panics in its layer tells the others. It may catch the panic, and the ranks go on
/// together.
#[test]
fn a_rank_that_panics() {
    fn case(rank: &Rank) {
        for config in [0, 100].map(|warmup_steps| 1e-5.with_warm_up(warmup_steps)) {
            let layer = layer(SIZE, config, DType::F64).0.with_ranks(&rank.over);
            let mut data = Data::new(40 + rank.rank as u64);
            let panics = |xs: &Tensor, call: &dyn Fn() -> Result<()>| {
                let before = state(&layer);
                if rank.rank == 1 {
                    let too_few = Swap::with(CpuStorage::F64(vec![]));
                    xs.inplace_op1(&too_few).unwrap();
                    assert!(catch_unwind(AssertUnwindSafe(call)).is_err());
                } else {
                    let text = message(call());
                    assert!(text.contains("got a rank whose call failed"), "{text}");
                }
                assert_eq!(state(&layer), before);
            };
            let mut batch = || Batch::random(&mut data, &[5, SIZE], DType::F64, false);
            // Before the ranks have compared their layers, and after.
            for t in 0..2 {
                let xs = Var::from_tensor(&batch().xs).unwrap();
                panics(&xs, &|| layer.forward(&xs).map(drop));
                let xs = Var::from_tensor(&batch().xs).unwrap();
                let ys = layer.forward(&xs).unwrap();
                panics(&xs, &|| ys.backward().map(drop));
                assert_eq!(layer.steps().unwrap(), 2 * t + 1);
                run(&layer, &batch(), true);
                rank.assert_same_on_all("ψ²", &layer.running_phi().unwrap());
                rank.assert_same_on_all("ν", &layer.nu().unwrap());
            }
        }
    }
    on_threads(case);
}

/// Two ranks, of which the other one is lost: a sum panics.
struct Lost;

impl Communicator for Lost {
    fn world_size(&self) -> usize {
        2
    }

    fn all_reduce_sum(&self, _: &Tensor) -> Result<Tensor> {
        panic!("the communicator panics")
    }
}

/// Set in the process that [`a_communicator_that_panics_while_a_panic_unwinds`] starts.
const IN_CHILD: &str = "CANDLE_POWERNORM_TEST_CHILD";

/// A layer call that panics tells the other ranks while it unwinds. If the communicator panics too,
/// the caller gets the first panic. A panic that left the turn's `drop` would abort the process, so
/// the calls are made in a process of their own.
#[test]
fn a_communicator_that_panics_while_a_panic_unwinds() {
    if std::env::var_os(IN_CHILD).is_some() {
        return calls_of_which_both_panic();
    }
    let test = "distributed::a_communicator_that_panics_while_a_panic_unwinds";
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(IN_CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&[child.stdout, child.stderr].concat()).into_owned();
    assert!(child.status.success(), "{}: {text}", child.status);
    assert!(text.contains("1 passed"), "{text}");
    // Both panics came.
    assert_eq!(text.matches("the communicator panics").count(), 2, "{text}");
}

fn calls_of_which_both_panic() {
    let new = || layer(SIZE, config(None), DType::F64).0;
    let sharded = new().with_ranks(&Ranks::new(Lost));
    let before = state(&sharded);
    let panics = |xs: &Tensor| {
        let call = AssertUnwindSafe(|| sharded.forward(xs).map(drop));
        *catch_unwind(call)
            .unwrap_err()
            .downcast::<String>()
            .unwrap()
    };
    let ones = || Tensor::ones((5, SIZE), DType::F64, &CPU).unwrap();
    let too_few = ones();
    let nothing = Swap::with(CpuStorage::F64(vec![]));
    too_few.inplace_op1(&nothing).unwrap();
    let text = panics(&too_few);
    // The panic of a layer by itself.
    let alone = AssertUnwindSafe(|| new().forward(&too_few).map(drop));
    let expected = catch_unwind(alone).unwrap_err().downcast::<String>();
    assert_eq!(text, *expected.unwrap());

    // A call that fails without a panic gives its own error.
    let narrow = ones().narrow(1, 0, SIZE - 1).unwrap();
    let text = message(sharded.forward(&narrow));
    assert!(text.contains("expected a last dimension of 6"), "{text}");
    assert_eq!(state(&sharded), before);
}

/// Ranks without a communicator: each keeps its own statistics, and only the gradients of
/// parameters are averaged.
struct Apart {
    layers: [(PowerNorm, VarMap); RANKS],
}

const SIZE: usize = 6;
const RANKS: usize = 2;
const ROWS: usize = 40;

fn apart_config() -> PowerNormConfig {
    config(Some(2)).with_warm_up(4)
}

impl Apart {
    fn new() -> Self {
        let layers = [(); RANKS].map(|()| layer(SIZE, apart_config(), DType::F64));
        Self { layers }
    }

    /// A step in which every rank has its share of the batch.
    fn step(&self, batch: &Batch) -> Result<()> {
        let rows = ROWS / RANKS;
        let mut gradient = Tensor::zeros(SIZE, DType::F64, &CPU)?;
        for (rank, (layer, _)) in self.layers.iter().enumerate() {
            let share = batch.rows(rank * rows..(rank + 1) * rows);
            let dweight = run(layer, &share, true).dweight.expect("a weight");
            gradient = (gradient + (dweight / RANKS as f64)?)?;
        }
        for (_, varmap) in &self.layers {
            let weight = var(varmap, "weight");
            weight.set(&(weight.as_tensor() - (&gradient * 1e-2)?)?)?;
        }
        Ok(())
    }

    /// The mean of the ranks' `read`.
    fn mean(&self, read: impl Fn(&PowerNorm) -> Result<Tensor>) -> Result<Tensor> {
        let all: Result<Vec<_>> = self.layers.iter().map(|(layer, _)| read(layer)).collect();
        Tensor::stack(&all?, 0)?.mean(0)
    }
}

/// The guide says which rank's statistics to save. Any rank's will do, and the mean of all ranks'
/// ψ² is the ψ² of the whole batch.
#[test]
fn ranks_that_do_not_share_statistics() -> Result<()> {
    let apart = Apart::new();
    let (whole, _) = layer(SIZE, apart_config(), DType::F64);
    let mut data = Data::new(31);
    for _ in 0..30 {
        let batch = Batch::random(&mut data, &[ROWS, SIZE], DType::F64, false);
        apart.step(&batch)?;
        run(&whole, &batch, true);
        // Eq. 10 and the cumulative mean are linear.
        let mean = apart.mean(PowerNorm::running_phi)?;
        assert_relative("ψ²", &mean, &to_f64(&whole.running_phi()?), 1e-13);
    }
    let weights = apart
        .layers
        .each_ref()
        .map(|(_, varmap)| var(varmap, "weight"));
    assert_same_bits("weight", &weights[0], &weights[1]);
    for (layer, _) in &apart.layers {
        assert_eq!(layer.steps()?, 30);
        let (own, of_all) = (to_f64(&layer.running_phi()?), to_f64(&whole.running_phi()?));
        // Each rank is off by sampling only. ψ² averages some (1+α)/(1−α) = 19 shards of 20 rows,
        // and the squares of a row deviate by about their mean. Six deviations are allowed.
        let noise = 6. / (19f64 * (ROWS / RANKS) as f64).sqrt();
        for (own, of_all) in own.iter().zip(&of_all) {
            assert!(own != of_all && (own - of_all).abs() < noise * of_all);
        }
    }

    // One rank's file resumes all: from there they start alike.
    let file = tempfile::NamedTempFile::new().expect("a file");
    apart.layers[0].1.save(file.path())?;
    let resumed = Apart::new();
    for (layer, varmap) in &resumed.layers {
        varmap.clone().load(file.path())?;
        assert_eq!(state(layer), state(&apart.layers[0].0));
    }
    resumed.step(&Batch::random(&mut data, &[ROWS, SIZE], DType::F64, false))?;
    assert_eq!(resumed.layers[1].0.steps()?, 31);
    Ok(())
}
