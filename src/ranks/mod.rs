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

/// Adds up tensors over ranks: over processes or GPUs that train copies of one model, each on its
/// own shard of every batch.
///
/// Feature `mpi` has `MpiCommunicator`, for CPUs, and feature `nccl` has `NcclCommunicator`, for
/// GPUs. Another engine needs only these two methods. [`Ranks::new`] takes it for the layers of a
/// model. A program that also sums its gradients shares one communicator with them, in an [`Arc`].
///
/// # Example
///
/// Two threads that are two ranks, and send each other what they have:
///
/// ```
/// use candle::{DType, Device, Error, Module, Result, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_powernorm::{power_norm, Communicator, Ranks};
/// use std::sync::mpsc::{channel, Receiver, Sender};
/// use std::sync::Mutex;
///
/// #[derive(Debug)]
/// struct Pair {
///     to: Sender<Tensor>,
///     from: Mutex<Receiver<Tensor>>,
/// }
///
/// impl Communicator for Pair {
///     fn world_size(&self) -> usize {
///         2
///     }
///
///     fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
///         self.to.send(tensor.copy()?).map_err(Error::wrap)?;
///         tensor + self.from.lock().unwrap().recv().map_err(Error::wrap)?
///     }
/// }
///
/// /// ψ² after a step on a shard with this value everywhere.
/// fn train(rank: Pair, value: f32) -> Result<Vec<f32>> {
///     let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
///     let config = candle_powernorm::PowerNormConfig { group_scaling: None, ..1e-5.into() };
///     let norm = power_norm(3, config, vb)?.with_ranks(&Ranks::new(rank));
///     norm.forward(&Tensor::full(value, (5, 3), &Device::Cpu)?)?;
///     norm.running_phi()?.to_vec1()
/// }
///
/// # fn main() -> Result<()> {
/// let (to_second, from_first) = channel();
/// let (to_first, from_second) = channel();
/// let first = Pair { to: to_second, from: from_second.into() };
/// let second = Pair { to: to_first, from: from_first.into() };
/// let second = std::thread::spawn(|| train(second, 3.));
/// let phi = train(first, 1.)?;
/// assert_eq!(phi, [5.; 3]); // (1² + 3²)/2
/// assert_eq!(phi, second.join().unwrap()?);
/// # Ok(()) }
/// ```
pub trait Communicator: Debug + Send + Sync {
    /// The number of ranks, at least 1.
    fn world_size(&self) -> usize;

    /// Returns the sum of every rank's `tensor`, on the device of this rank's one. The sum has the
    /// same bits on every rank.
    ///
    /// All ranks call this in the same order, each time with tensors of one shape and dtype (`F32`
    /// or `F64`). Each rank waits for the others, or has its GPU wait. `tensor` is contiguous. It
    /// is on its layer's device if that is a CPU or an NVIDIA GPU, else on the CPU.
    ///
    /// # Errors
    ///
    /// Whatever the engine reports. If an engine cannot sum, it should fail on every rank: an error
    /// on one rank leaves the others waiting.
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

/// The ranks over which a model's layers take their statistics. One `Ranks` serves the whole model.
///
/// [`PowerNorm::with_ranks`](crate::PowerNorm::with_ranks) gives them to a layer. Ranks know the
/// layers by the order of these calls, so every rank builds its model in the same order. Clones are
/// the same ranks.
#[derive(Debug, Clone)]
pub struct Ranks(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    communicator: Box<dyn Communicator>,
    /// Layers that were given these ranks.
    layers: AtomicUsize,
    /// The number of sums to which a rank did not come, or for which ranks disagreed. Such a sum
    /// fails on all ranks at the same place in their order, and they all leave out the steps that
    /// wait by then. An error of the communicator itself does not count: it costs only the step
    /// whose sum it was.
    failures: AtomicUsize,
}

impl Ranks {
    /// The ranks over which `communicator` sums.
    pub fn new(communicator: impl Communicator + 'static) -> Self {
        Self(Arc::new(Shared {
            communicator: Box::new(communicator),
            layers: AtomicUsize::new(0),
            failures: AtomicUsize::new(0),
        }))
    }

    fn world_size(&self) -> usize {
        self.0.communicator.world_size()
    }
}

/// A layer's ranks; `None` in a single process.
#[derive(Debug, Clone, Default)]
pub(crate) struct LayerRanks(Option<Member>);

#[derive(Debug, Clone)]
struct Member {
    ranks: Ranks,
    /// The layer's number.
    layer: usize,
    /// Whether the ranks have compared their layers of this number. On a GPU they do so once.
    compared: Arc<AtomicBool>,
}

/// Which sums an exchange carries. It is the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exchange {
    /// The sums of a forward.
    Forward = 1,
    /// The sums of a backward.
    Backward = 2,
    /// The sums of a forward and of its backward.
    Both = 3,
}

/// Before a sum a rank announces two numbers: its layer, and which sums it brings.
const ANNOUNCED: usize = 2;

/// On a GPU ranks compare these two numbers, t, T, and one number for recipe and statistic.
const COMPARED: usize = ANNOUNCED + 3;

/// Numbers of steps are compared modulo this prime. Squares of numbers below it add up exactly over
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

    /// The number of sums so far to which a rank did not come, or for which ranks disagreed. If it
    /// grows while a step waits for other ranks, that step is left out.
    pub fn failures(&self) -> usize {
        let failures = |member: &Member| member.ranks.0.failures.load(Ordering::Acquire);
        self.0.as_ref().map_or(0, failures)
    }

    /// Adds up the `sums` of all ranks.
    ///
    /// On the CPU ranks announce their sums first, so that ranks that do not fit each other get an
    /// error. Engines do not promise one for vectors of different lengths. On a GPU nothing is
    /// announced, because the host would have to wait for the GPU to hear of it.
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

    /// Replaces announcements on a GPU. Once, before a layer's first sum, the ranks compare what
    /// they bring to it and what their later sums depend on, and the host waits for the outcome.
    /// `steps` is t before that sum.
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

    /// Tells the other ranks that this one does not come to their next sum. On a GPU they hear it
    /// only before they have compared their layers. `device` is the layer's.
    pub fn fail(&self, device: &Device) {
        if let Some(member) = &self.0 {
            if device.is_cpu() || !member.compared.load(Ordering::Acquire) {
                let brought = if device.is_cpu() { ANNOUNCED } else { COMPARED };
                let mut numbers = vec![0.; 1 + 2 * brought];
                numbers[0] = 1.;
                // The caller already gets the error that led here.
                let _ = Tensor::new(numbers, device).and_then(|numbers| member.sum(&numbers));
            }
            member.failed(Error::RankFailed);
        }
    }
}

impl Member {
    /// Tells the other ranks which sums this one brings, and the numbers that they must have in
    /// common `later`. Fails if the ranks differ.
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
        // A sum of numbers and a sum of their squares fit one rank's only if all numbers are equal:
        // their variance is then 0.
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
        let sums = self.ranks.0.communicator.all_reduce_sum(numbers)?;
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
        let sums = self
            .ranks
            .0
            .communicator
            .all_reduce_sum(numbers)?
            .contiguous()?;
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

    /// Counts a sum that failed for this reason.
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
