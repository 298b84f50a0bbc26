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
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;

/// Processes, or GPUs, that train copies of one model, each on its own shard of every batch: ranks.
///
/// A layer that is given [`Ranks`] of one ([`PowerNorm::with_ranks`](crate::PowerNorm::with_ranks)) takes its statistics over
/// the rows of all ranks.
///
/// Feature `mpi` has `MpiCommunicator`, for CPUs, and feature `nccl` has `NcclCommunicator`, for GPUs. Another engine needs no
/// more than these two methods.
pub trait Communicator: Debug + Send + Sync {
    /// The number of ranks, at least 1.
    fn world_size(&self) -> usize;

    /// The sum of every rank's `tensor`, on the device of this one's: the same bits on every rank.
    ///
    /// All ranks call this in one order, each time with tensors of one shape and dtype (`F32` or `F64`), and each waits
    /// for the others, or has its GPU wait. `tensor` is contiguous, and on its layer's device.
    ///
    /// # Errors
    ///
    /// Whatever the engine reports. One that cannot sum fails on every rank if it can: an error on one rank alone leaves the
    /// others waiting.
    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor>;
}

impl<C: Communicator + ?Sized> Communicator for Arc<C> {
    fn world_size(&self) -> usize {
        (**self).world_size()
    }

    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        (**self).all_reduce_sum(tensor)
    }
}

/// The ranks of a model, by a [`Communicator`]: one for all its layers.
///
/// Clones are the same ranks. Layers are told apart by the order in which they are given them
/// ([`PowerNorm::with_ranks`](crate::PowerNorm::with_ranks)), so every rank builds its model in one order.
#[derive(Debug, Clone)]
pub struct Ranks(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    communicator: Box<dyn Communicator>,
    /// Layers that were given these ranks.
    layers: AtomicUsize,
    /// Sums that failed. All ranks see one fail at the same place in their order, and leave out the steps before it.
    failures: AtomicUsize,
}

impl Ranks {
    /// The ranks that `communicator` joins.
    pub fn new(communicator: impl Communicator + 'static) -> Self {
        Self(Arc::new(Shared {
            communicator: Box::new(communicator),
            layers: AtomicUsize::new(0),
            failures: AtomicUsize::new(0),
        }))
    }
}

impl Communicator for Ranks {
    fn world_size(&self) -> usize {
        self.0.communicator.world_size()
    }

    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        self.0.communicator.all_reduce_sum(tensor)
    }
}

/// What a layer sums over: ranks, of which there is another, or this process alone.
#[derive(Debug, Clone, Default)]
pub(crate) struct LayerRanks(Option<Member>);

#[derive(Debug, Clone)]
struct Member {
    ranks: Ranks,
    /// The layer's number.
    layer: usize,
    /// Whether the ranks have compared their layers of this number, which those on a GPU do once.
    compared: Arc<AtomicBool>,
}

/// Why ranks meet. All must mean the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exchange {
    /// The sums of a forward.
    Forward = 1,
    /// Those of a backward.
    Backward = 2,
    /// Those of a forward and its backward.
    Both = 3,
}

impl LayerRanks {
    /// A layer's place among others of these ranks.
    pub fn join(ranks: &Ranks) -> Self {
        let layer = ranks.0.layers.fetch_add(1, Ordering::Relaxed);
        let member = Member {
            ranks: ranks.clone(),
            layer,
            compared: Arc::default(),
        };
        Self(Some(member).filter(|member| member.ranks.world_size() > 1))
    }

    /// Whether there is no other rank.
    pub fn is_alone(&self) -> bool {
        self.0.is_none()
    }

    /// The sums that failed so far. A step that waits for others is left out once there is one more.
    pub fn failures(&self) -> usize {
        let failures = |member: &Member| member.ranks.0.failures.load(Ordering::Acquire);
        self.0.as_ref().map_or(0, failures)
    }

    /// Adds up the `numbers` of all ranks.
    ///
    /// They are announced first, so that ranks that do not fit each other learn it from an error: a sum of vectors of
    /// different lengths is beyond what engines promise.
    pub fn sum(&self, exchange: Exchange, numbers: Vec<f64>) -> Result<Vec<f64>> {
        let Some(member) = &self.0 else {
            return Ok(numbers);
        };
        member.announce(exchange, numbers.len(), &Device::Cpu)?;
        member.sum(numbers, &Device::Cpu)
    }

    /// Adds up the `totals` of all ranks where they are, on a GPU. Nothing is announced: to hear of it, the host would have to
    /// wait for the GPU.
    #[cfg(feature = "cuda")]
    pub fn sum_on_device(&self, totals: &Tensor) -> Result<Tensor> {
        let Some(member) = &self.0 else {
            return Ok(totals.clone());
        };
        let sums = member.ranks.all_reduce_sum(totals)?.contiguous()?;
        let got = (sums.elem_count(), sums.dtype(), sums.device().location());
        let expected = (
            totals.elem_count(),
            totals.dtype(),
            totals.device().location(),
        );
        if got != expected {
            candle::bail!(
                "power_norm: expected sums of the communicator like {expected:?}, got {got:?}"
            )
        }
        sums.flatten_all()
    }

    /// What stands in for announcements on a GPU: once, before the first sum of a layer, the ranks compare what they bring to
    /// it, and wait to hear.
    #[cfg(feature = "cuda")]
    pub fn compare(&self, exchange: Exchange, numbers: usize, device: &Device) -> Result<()> {
        match &self.0 {
            Some(member) if !member.compared.load(Ordering::Acquire) => {
                member.announce(exchange, numbers, device)?;
                member.compared.store(true, Ordering::Release);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Tells the other ranks that this one, whose layer is on `device`, does not come to their next sum; on a GPU, while they
    /// listen.
    pub fn fail(&self, device: &Device) {
        if let Some(member) = &self.0 {
            if device.is_cpu() || !member.compared.load(Ordering::Acquire) {
                // What went wrong here is on its way to the caller already.
                let _ = member.sum(vec![1., 0., 0., 0., 0.], device);
            }
            member.failed(Error::RankFailed);
        }
    }
}

impl Member {
    /// Tells the other ranks what this one comes for, and hears the same of them.
    fn announce(&self, exchange: Exchange, numbers: usize, device: &Device) -> Result<()> {
        let tag = (numbers * 4 + exchange as usize) as f64;
        let layer = self.layer as f64;
        let own = [0., tag, tag * tag, layer, layer * layer];
        let announced = self.sum(own.into(), device)?;
        if announced[0] > 0. {
            return Err(self.failed(Error::RankFailed));
        }
        // Equal to every rank's own only where they all are: their variance is 0.
        let ranks = self.ranks.world_size() as f64;
        if announced != own.map(|own| ranks * own) {
            let exchange = exchange.name();
            return Err(self.failed(Error::RanksDisagree { exchange, numbers }));
        }
        Ok(())
    }

    fn sum(&self, numbers: Vec<f64>, device: &Device) -> Result<Vec<f64>> {
        let len = numbers.len();
        let sums = (self.ranks).all_reduce_sum(&Tensor::new(numbers, device)?)?;
        let sums = sums.to_dtype(DType::F64)?.to_vec1()?;
        if sums.len() == len {
            return Ok(sums);
        }
        candle::bail!(
            "power_norm: expected {len} sums of the communicator, got {}",
            sums.len()
        )
    }

    /// Counts a sum that failed, for this reason.
    fn failed(&self, reason: Error) -> candle::Error {
        self.ranks.0.failures.fetch_add(1, Ordering::AcqRel);
        reason.into()
    }
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
