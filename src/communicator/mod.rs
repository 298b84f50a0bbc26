//! Sums over processes: the trait, and the engines that have it.

#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;

#[cfg(feature = "mpi")]
pub use self::mpi::MpiCommunicator;
#[cfg(feature = "nccl")]
pub use self::nccl::NcclCommunicator;

use candle::{Result, Tensor};
use std::fmt::Debug;

/// Processes, or GPUs, that train copies of one model on shards of each batch: ranks.
///
/// A layer that is given one takes its statistics
/// over the rows of all ranks. One communicator serves all layers of a model.
///
/// Feature `mpi` has `MpiCommunicator`, for CPUs, and feature `nccl` has `NcclCommunicator`, for GPUs. Another engine needs
/// no more than the two methods.
pub trait Communicator: Debug + Send + Sync {
    /// The number of ranks, at least 1.
    fn world_size(&self) -> usize;

    /// The sum of every rank's `tensor`, on this rank's device: the same bits on every rank.
    ///
    /// All ranks call this in one order, each time with tensors of one shape and dtype (`F32`, or `F64` on a CPU), and
    /// each waits for the others. `tensor` is contiguous.
    ///
    /// # Errors
    ///
    /// Whatever the engine reports. An engine that cannot sum should fail on every rank: one that fails on a single rank leaves
    /// the others waiting.
    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor>;
}
