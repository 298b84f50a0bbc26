//! Sums over processes: what a layer asks of them, and the engines that add up.

#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;

#[cfg(feature = "mpi")]
pub use self::mpi::MpiCommunicator;
#[cfg(feature = "nccl")]
pub use self::nccl::NcclCommunicator;

use crate::Error;
use candle::{DType, Device, Result, Tensor};
use std::fmt::Debug;
use std::sync::Arc;

/// Processes, or GPUs, that train copies of one model, each on its own shard of every batch: ranks.
///
/// A layer that is given one ([`PowerNorm::with_communicator`](crate::PowerNorm::with_communicator)) takes its
/// statistics over the rows of all ranks. One communicator serves all layers of a model.
///
/// Feature `mpi` has `MpiCommunicator`, for CPUs, and feature `nccl` has `NcclCommunicator`, for GPUs, where no layer takes one
/// so far. Another engine needs no more than these two methods.
pub trait Communicator: Debug + Send + Sync {
    /// The number of ranks, at least 1.
    fn world_size(&self) -> usize;

    /// The sum of every rank's `tensor`, on the device of this one's: the same bits on every rank.
    ///
    /// All ranks call this in one order, each time with tensors of one shape and dtype (`F32` or `F64`), and each waits
    /// for the others. `tensor` is contiguous.
    ///
    /// # Errors
    ///
    /// Whatever the engine reports. One that cannot sum fails on every rank if it can: an error on one rank alone leaves the
    /// others waiting.
    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor>;
}

/// The ranks that a layer sums over: those of a communicator, or this process alone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ranks(Option<Arc<dyn Communicator>>);

/// Why ranks meet. All must mean the same.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Exchange {
    /// The sums of a forward.
    Forward = 1,
    /// Those of a backward.
    Backward = 2,
    /// Those of a forward and its backward.
    Both = 3,
}

impl Ranks {
    pub fn of(communicator: Arc<dyn Communicator>) -> Self {
        Self(Some(communicator).filter(|communicator| communicator.world_size() > 1))
    }

    /// Whether there is no other rank.
    pub fn is_alone(&self) -> bool {
        self.0.is_none()
    }

    /// Adds up the `numbers` of all ranks.
    ///
    /// They are announced first, so that ranks that do not fit each other learn it from an error: a sum of vectors of
    /// different lengths is beyond what engines promise.
    pub fn sum(&self, exchange: Exchange, numbers: Vec<f64>) -> Result<Vec<f64>> {
        let Some(communicator) = &self.0 else {
            return Ok(numbers);
        };
        let tag = (numbers.len() * 4 + exchange as usize) as f64;
        let ranks = communicator.world_size() as f64;
        let [failed, tags, squares] = announce(&**communicator, 0., tag)?;
        if failed > 0. {
            return Err(Error::RankFailed.into());
        }
        // Equal to every rank's own only where they all are: their variance is 0.
        if tags != ranks * tag || squares != ranks * tag * tag {
            return Err(Error::RanksDisagree {
                exchange: exchange.name(),
                numbers: numbers.len(),
            }
            .into());
        }
        let sums = communicator.all_reduce_sum(&Tensor::new(numbers, &Device::Cpu)?)?;
        sums.to_dtype(DType::F64)?.to_vec1()
    }

    /// Tells the other ranks that this one does not come to their next sum.
    pub fn fail(&self) {
        if let Some(communicator) = &self.0 {
            // What went wrong here is on its way to the caller already.
            let _ = announce(&**communicator, 1., 0.);
        }
    }
}

/// The number of ranks that failed, and the sums of the others' tags and of their squares.
fn announce(communicator: &dyn Communicator, failed: f64, tag: f64) -> Result<[f64; 3]> {
    let announced = Tensor::new(&[failed, tag, tag * tag], &Device::Cpu)?;
    let sums = communicator.all_reduce_sum(&announced)?.to_vec1()?;
    sums.try_into().map_err(|sums: Vec<f64>| {
        candle::Error::msg(format!("power_norm: expected 3 sums, got {}", sums.len()))
    })
}

impl Exchange {
    fn name(self) -> &'static str {
        match self {
            Self::Forward => "a forward",
            Self::Backward => "a backward",
            Self::Both => "a forward and its backward",
        }
    }
}
