//! Several ranks that are threads of one GPU, each with a stream of its own; the host adds up.

use super::*;
use crate::common::distributed::{Rank, Same};
use candle::Result;
use candle_powernorm::{Communicator, Ranks, Recipe};
use std::sync::{Arc, Mutex};

macro_rules! tests {
    ($($case:ident),* $(,)?) => {
        $(#[test]
        fn $case() {
            on_threads(gpu, distributed::$case);
        })*
    };
}
distributed::cases!(tests);
distributed::cases_of_a_gpu!(tests);

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

/// Two ranks that bring the same, of which one is here. It keeps what was brought.
struct Recorder {
    same: Same,
    brought: Arc<Mutex<Vec<Vec<f64>>>>,
}

impl Communicator for Recorder {
    fn world_size(&self) -> usize {
        self.same.world_size()
    }

    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        self.brought.lock().unwrap().push(to_f64(tensor));
        self.same.all_reduce_sum(tensor)
    }
}

/// A step sends two messages of one length, which the guide gives. Each begins with four integers
/// of 16 bits and their squares. A step's messages are announced otherwise than another's.
#[test]
fn messages_begin_with_an_announcement() {
    const ANNOUNCED: usize = 8;
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        let brought = Arc::<Mutex<Vec<Vec<f64>>>>::default();
        let ranks = Ranks::new(Recorder {
            same: Same(gpu()),
            brought: brought.clone(),
        });
        let (cols, squares) = (48, if recipe == Recipe::Paper { 1 } else { 2 });
        let config = config(Some(4)).with_recipe(recipe);
        let twin = Twin::new(&mut Data::on(&gpu(), 50), cols, config, DType::F32);
        let layer = twin.layer.with_ranks(&ranks);
        let mut data = Data::on(&gpu(), 51);
        for _ in 0..3 {
            let batch = Batch::random(&mut data, &[9, cols], DType::F32, true);
            run(&layer, &batch, true);
        }
        let messages = std::mem::take(&mut *brought.lock().unwrap());
        // The first one compares the layers on the host.
        let [_, messages @ ..] = &messages[..] else {
            panic!("no message")
        };
        assert_eq!(messages.len(), 2 * 3);
        let mut announcements = vec![];
        for message in messages {
            assert_eq!(message.len(), ANNOUNCED + squares * (cols + 1));
            assert!(message.iter().all(|number| number.is_finite()));
            let (pieces, squares) = message[..ANNOUNCED].split_at(ANNOUNCED / 2);
            for (&piece, &square) in pieces.iter().zip(squares) {
                assert_eq!(piece, f64::from(piece as u16));
                assert_eq!(square, piece * piece);
            }
            assert!(!announcements.contains(&pieces), "{pieces:?}");
            announcements.push(pieces);
        }
    }
}

#[test]
fn a_communicator_that_gives_back_less_is_an_error() {
    distributed::a_communicator_that_gives_back_less(&gpu());
}
