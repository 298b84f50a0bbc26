//! Several ranks that are threads of one GPU, each with a stream of its own; the host adds up.

use super::*;
use crate::common::distributed::Rank;
use candle_powernorm::Recipe;

macro_rules! tests {
    ($($case:ident),* $(,)?) => {
        $(#[test]
        fn $case() {
            on_threads(gpu, distributed::$case);
        })*
    };
}
distributed::cases!(tests);

/// A rank without rows takes part in the sums of the others' forwards. (Its backward is not asked
/// for, as in `empty_batches_pass_through`.) Where no rank has one, the step is counted, for the
/// host does not know.
#[test]
fn shards_without_rows() {
    fn case(rank: &Rank) {
        for warmup_steps in [0, 100] {
            for recipe in [Recipe::Paper, Recipe::Fairseq] {
                let config = config(Some(4))
                    .with_warm_up(warmup_steps)
                    .with_recipe(recipe);
                let twin = || Twin::new(&mut Data::on(&rank.device, 50), 48, config, DType::F64);
                let (sharded, whole) = (twin().layer.with_ranks(&rank.over), twin().layer);
                let mut data = Data::on(&rank.device, 51);
                let empty = Tensor::zeros((0, 48), DType::F64, &rank.device).unwrap();
                for _ in 0..2 {
                    let xs = Batch::random(&mut data, &[9, 48], DType::F64, false).xs;
                    let share = if rank.rank == 0 { &xs } else { &empty };
                    sharded.forward(share).unwrap();
                    whole.forward(&xs).unwrap();
                }
                let expected = whole.running_phi().unwrap();
                let what = format!("{config:?}");
                let actual = sharded.running_phi().unwrap();
                assert_relative(&what, &actual, &to_f64(&expected), 1e-12);
                sharded.forward(&empty).unwrap();
                assert_same_bits(&what, &sharded.running_phi().unwrap(), &actual);
                assert_eq!(sharded.steps().unwrap(), 3, "{what}");
            }
        }
    }
    on_threads(gpu, case);
}

#[test]
fn a_communicator_that_gives_back_less_is_an_error() {
    distributed::a_communicator_that_gives_back_less(&gpu());
}
