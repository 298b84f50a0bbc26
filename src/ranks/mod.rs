//! Sums over processes: what a layer asks of them, and the engines that add up.

#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;

#[cfg(feature = "mpi")]
pub use self::mpi::MpiCommunicator;
#[cfg(feature = "nccl")]
pub use self::nccl::NcclCommunicator;

use crate::config::PowerNormConfig;
use crate::error::Error;
use candle::{DType, Device, Result, Tensor};
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;

/// Processes, or GPUs, that train copies of one model, each on its own shard of every batch: ranks.
///
/// A layer that is given [`Ranks`] of one ([`PowerNorm::with_ranks`](crate::PowerNorm::with_ranks))
/// takes its statistics over the rows of all ranks.
///
/// Feature `mpi` has `MpiCommunicator`, for CPUs, and feature `nccl` has `NcclCommunicator`, for
/// GPUs. Another engine needs no more than these two methods.
pub trait Communicator: Debug + Send + Sync {
    /// The number of ranks, at least 1.
    fn world_size(&self) -> usize;

    /// The sum of every rank's `tensor`, on the device of this one's: the same bits on every rank.
    ///
    /// All ranks call this in one order, each time with tensors of one shape and dtype (`F32` or
    /// `F64`), and each waits for the others, or has its GPU wait. `tensor` is contiguous. It is on
    /// its layer's device where that is a CPU or an NVIDIA GPU, and else on the CPU.
    ///
    /// # Errors
    ///
    /// Whatever the engine reports. One that cannot sum fails on every rank if it can: an error on
    /// one rank alone leaves the others waiting.
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
/// ([`PowerNorm::with_ranks`](crate::PowerNorm::with_ranks)), so every rank builds its model in one
/// order.
#[derive(Debug, Clone)]
pub struct Ranks(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    communicator: Box<dyn Communicator>,
    /// Layers that were given these ranks.
    layers: AtomicUsize,
    /// Sums that failed. All ranks see one fail at the same place in their order, and leave out the
    /// steps before it.
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

/// What a sum is announced by: the layer, and what it comes for.
const ANNOUNCED: usize = 2;

/// What ranks compare on a GPU: these, t, T, and recipe and statistic in one.
const COMPARED: usize = ANNOUNCED + 3;

/// Numbers of steps are compared modulo this prime: the squares of smaller ones add up exactly over
/// 2¹³ ranks.
const STEPS: usize = 1_048_573;

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

    /// The sums that failed so far. A step that waits for others is left out once there is one
    /// more.
    pub fn failures(&self) -> usize {
        let failures = |member: &Member| member.ranks.0.failures.load(Ordering::Acquire);
        self.0.as_ref().map_or(0, failures)
    }

    /// Adds up the `sums` of all ranks.
    ///
    /// On the CPU they are announced first, so that ranks that do not fit each other learn it from
    /// an error: a sum of vectors of different lengths is beyond what engines promise. On a GPU
    /// nothing is announced: to hear of it, the host would have to wait for the GPU.
    pub fn sum(&self, exchange: Exchange, sums: &Tensor) -> Result<Tensor> {
        match &self.0 {
            Some(member) if sums.device().is_cpu() => {
                member.announce(exchange, sums.elem_count(), &[], &Device::Cpu)?;
                let total = member.sum(sums)?;
                let len = total.len();
                Tensor::from_vec(total, len, &Device::Cpu)
            }
            Some(member) => member.sum_on_device(sums),
            None => Ok(sums.clone()),
        }
    }

    /// What stands in for announcements on a GPU: once, before the first sum of a layer, the ranks
    /// compare what they bring to it and what their later sums follow from, and wait to hear.
    /// `steps` are those before it, t.
    pub fn compare(
        &self,
        exchange: Exchange,
        numbers: usize,
        config: &PowerNormConfig,
        steps: usize,
        device: &Device,
    ) -> Result<()> {
        match &self.0 {
            Some(member) if !member.compared.load(Ordering::Acquire) => {
                let equations = config.recipe as usize * 2 + config.statistics as usize;
                let later = [steps % STEPS, config.warmup_steps % STEPS, equations];
                member.announce(exchange, numbers, &later, device)?;
                member.compared.store(true, Ordering::Release);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Tells the other ranks that this one, whose layer is on `device`, does not come to their next
    /// sum; on a GPU, while they listen.
    pub fn fail(&self, device: &Device) {
        if let Some(member) = &self.0 {
            if device.is_cpu() || !member.compared.load(Ordering::Acquire) {
                let brought = if device.is_cpu() { ANNOUNCED } else { COMPARED };
                let mut numbers = vec![0.; 1 + 2 * brought];
                numbers[0] = 1.;
                // What went wrong here is on its way to the caller already.
                let _ = Tensor::new(numbers, device).and_then(|numbers| member.sum(&numbers));
            }
            member.failed(Error::RankFailed);
        }
    }
}

impl Member {
    /// Tells the other ranks what this one comes for, and what it is to have in common with them
    /// `later`, and hears the same of them.
    fn announce(
        &self,
        exchange: Exchange,
        numbers: usize,
        later: &[usize],
        device: &Device,
    ) -> Result<()> {
        let mut own = vec![0.];
        let announced: [usize; ANNOUNCED] = [numbers * 4 + exchange as usize, self.layer];
        for &number in announced.iter().chain(later) {
            let number = number as f64;
            own.extend([number, number * number]);
        }
        let announced = self.sum(&Tensor::new(own.clone(), device)?)?;
        if announced[0] > 0. {
            return Err(self.failed(Error::RankFailed));
        }
        // Equal to every rank's own only where they all are: their variance is 0.
        let ranks = self.ranks.world_size() as f64;
        if own
            .iter()
            .zip(&announced)
            .any(|(own, sum)| *sum != ranks * own)
        {
            let exchange = exchange.name();
            return Err(self.failed(Error::RanksDisagree { exchange, numbers }));
        }
        Ok(())
    }

    /// Adds up numbers that the host waits for.
    fn sum(&self, numbers: &Tensor) -> Result<Vec<f64>> {
        let len = numbers.elem_count();
        let sums = self.ranks.all_reduce_sum(numbers)?;
        let sums = sums.to_dtype(DType::F64)?.to_vec1()?;
        if sums.len() == len {
            return Ok(sums);
        }
        candle::bail!(
            "power_norm: expected {len} sums of the communicator, got {}",
            sums.len()
        )
    }

    /// Adds up numbers where they are.
    fn sum_on_device(&self, numbers: &Tensor) -> Result<Tensor> {
        let sums = self.ranks.all_reduce_sum(numbers)?.contiguous()?;
        let likeness = |tensor: &Tensor| {
            (
                tensor.elem_count(),
                tensor.dtype(),
                tensor.device().location(),
            )
        };
        let (got, expected) = (likeness(&sums), likeness(numbers));
        if got != expected {
            candle::bail!(
                "power_norm: expected sums of the communicator like {expected:?}, got {got:?}"
            )
        }
        sums.flatten_all()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Recipe, Statistics};
    use std::sync::Mutex;

    /// Two ranks one after the other: what the second brings is added to what the first brought.
    #[derive(Debug, Default)]
    struct Turns(Mutex<Option<Tensor>>);

    impl Communicator for Turns {
        fn world_size(&self) -> usize {
            2
        }

        fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
            assert_eq!(tensor.dims(), [1 + 2 * COMPARED]);
            let first = self.0.lock().unwrap().replace(tensor.clone());
            tensor + first.as_ref().unwrap_or(tensor)
        }
    }

    #[test]
    fn ranks_compare_what_their_later_sums_follow_from() {
        let own = PowerNormConfig {
            warmup_steps: 5,
            ..1e-5.into()
        };
        let longer = PowerNormConfig {
            warmup_steps: usize::MAX,
            ..own
        };
        let fairseq = PowerNormConfig {
            recipe: Recipe::Fairseq,
            ..own
        };
        let batch = PowerNormConfig {
            statistics: Statistics::Batch,
            ..own
        };
        let joined = || {
            let turns = Arc::new(Turns::default());
            [(); 2].map(|()| LayerRanks::join(&Ranks::new(turns.clone())))
        };
        let compare = |ranks: &LayerRanks, config: &PowerNormConfig, steps| {
            ranks.compare(Exchange::Forward, 13, config, steps, &Device::Cpu)
        };
        for (of_first, config, steps, fits) in [
            (own, own, 2, true),
            (own, own, 3, false),
            (own, longer, 2, false),
            (own, fairseq, 2, false),
            (own, batch, 2, false),
            (fairseq, batch, 2, false),
        ] {
            let [first, second] = joined();
            compare(&first, &of_first, 2).unwrap();
            let compared = compare(&second, &config, steps);
            assert_eq!(compared.is_ok(), fits, "{config:?}, {steps}");
            // Ranks that fit do not compare again.
            assert_eq!(compare(&second, &config, steps + 9).is_ok(), fits);
        }
    }
}
