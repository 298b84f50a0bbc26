//! A layer on several GPUs, whose sums NCCL takes: the cases of `distributed.rs`. They need two
//! GPUs, and run once more on four if there are four.

mod common;

use candle::backend::BackendDevice;
use candle::cuda_backend::cudarc::driver::CudaContext;
use candle::cuda_backend::cudarc::nccl::Id;
use candle::{CudaDevice, DType, Device, Result, Tensor};
use candle_powernorm::{Communicator, NcclCommunicator, Ranks};
use common::distributed::{self, Rank};
use common::{in_time, message};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

const MOST_RANKS: usize = 4;

/// Numbers of ranks, each with a GPU of its own.
fn worlds() -> impl Iterator<Item = usize> {
    let gpus = CudaContext::device_count().expect("GPUs");
    assert!(gpus >= 2, "expected two GPUs, got {gpus}");
    [2, MOST_RANKS]
        .into_iter()
        .filter(move |&ranks| ranks as i32 <= gpus)
}

/// One device for each GPU, with a stream that all threads share, as `NcclCommunicator` asks.
fn gpu(ordinal: usize) -> CudaDevice {
    static GPUS: [OnceLock<CudaDevice>; MOST_RANKS] = [const { OnceLock::new() }; MOST_RANKS];
    let new = || CudaDevice::new_with_stream(ordinal).expect("a GPU");
    GPUS[ordinal].get_or_init(new).clone()
}

/// One test at a time: two worlds on the same GPUs deadlock where a GPU's stream has a sum of one
/// world first, and another GPU's stream has one of the other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn on_gpus(case: fn(&Rank)) {
    let _alone = alone();
    for ranks in worlds() {
        in_time(move || {
            let id = Id::new().expect("NCCL");
            std::thread::scope(|scope| {
                for rank in 0..ranks {
                    scope.spawn(move || {
                        let device = gpu(rank);
                        let communicator = NcclCommunicator::new(&device, id, rank, ranks).unwrap();
                        let communicator = Arc::new(communicator);
                        case(&Rank {
                            rank,
                            device: Device::Cuda(device),
                            communicator: communicator.clone(),
                            over: Ranks::new(communicator),
                        });
                    });
                }
            });
        });
    }
}

macro_rules! tests {
    ($($case:ident),* $(,)?) => {
        $(#[test]
        fn $case() {
            on_gpus(distributed::$case);
        })*
    };
}
distributed::cases!(tests);
distributed::cases_of_a_gpu!(tests);

/// The program in the documentation of `NcclCommunicator`, on as many GPUs as there are.
#[test]
fn the_documented_program() {
    let _alone = alone();
    for gpus in worlds() {
        in_time(move || {
            let id = Id::new().expect("NCCL");
            let sum_of = |rank| -> Result<Vec<f32>> {
                let device = CudaDevice::new(rank)?;
                let ranks = NcclCommunicator::new(&device, id, rank, gpus)?;
                let own = Tensor::new(&[rank as f32], &Device::Cuda(device))?;
                ranks.all_reduce_sum(&own)?.to_vec1()
            };
            let sum_of = &sum_of;
            std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..gpus)
                    .map(|rank| scope.spawn(move || sum_of(rank)))
                    .collect();
                let expected = (0..gpus).sum::<usize>() as f32;
                for rank in ranks {
                    assert_eq!(rank.join().unwrap().unwrap(), [expected]);
                }
            });
        });
    }
}

/// Arguments on which NCCL would hang, or would sum wrongly, are rejected first.
#[test]
fn what_cannot_be_summed_is_rejected() {
    on_gpus(|rank| {
        let rejected = |tensor: &Tensor, expected: &str| {
            let text = message(rank.communicator.all_reduce_sum(tensor));
            assert!(text.contains(expected), "{text}");
        };
        let zeros = |dtype| Tensor::zeros(3, dtype, &rank.device).unwrap();
        rejected(&zeros(DType::BF16), "expected a tensor of F32 or F64");
        let other_stream = Device::new_cuda_with_stream(rank.rank).unwrap();
        let there = Tensor::zeros(3, DType::F32, &other_stream).unwrap();
        rejected(&there, "expected a tensor on stream");
        let columns = Tensor::zeros((3, 2), DType::F32, &rank.device).unwrap();
        let column = columns.narrow(1, 0, 1).unwrap();
        rejected(&column, "expected a contiguous tensor");
    });
    let _alone = alone();
    let id = Id::new().expect("NCCL");
    let text = message(NcclCommunicator::new(&gpu(0), id, 2, 2));
    assert!(text.contains("got 2 of 2"), "{text}");
}
