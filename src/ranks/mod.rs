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
use candle::{DType, Device, Result, Tensor};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;

/// Adds up tensors over ranks: over processes or GPUs that train copies of one model, each on its
/// own shard of every batch.
///
/// Feature `mpi` has `MpiCommunicator`, for CPUs, and feature `nccl` has `NcclCommunicator`, for
/// GPUs. Another engine needs only these two methods. [Ranks](crate::guide::ranks) says how a
/// program sums its gradients by the same communicator.
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
pub trait Communicator: Send + Sync {
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
    /// Whatever the engine reports. If an engine cannot sum, or if ranks that call their layers in
    /// different orders bring different shapes, it should fail on every rank: an error on one rank
    /// leaves the others waiting.
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
#[derive(Clone)]
pub struct Ranks {
    communicator: Arc<dyn Communicator>,
    /// Layers that were given these ranks.
    layers: Arc<AtomicUsize>,
}

impl Ranks {
    /// The ranks over which `communicator` sums.
    pub fn new(communicator: impl Communicator + 'static) -> Self {
        Self {
            communicator: Arc::new(communicator),
            layers: Arc::default(),
        }
    }
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut ranks = f.debug_struct("Ranks");
        ranks.field("world_size", &self.communicator.world_size());
        ranks.finish()
    }
}

/// A layer's place among the layers of its ranks.
///
/// Ranks meet twice in a training step: a forward adds its sums up over the ranks, and so does a
/// backward. Each of these exchanges takes a [`Turn`].
#[derive(Debug, Clone)]
pub(crate) struct Member {
    ranks: Ranks,
    /// The layer's number.
    layer: usize,
    size: usize,
    config: PowerNormConfig,
    /// The device on which the layer hands its sums out.
    device: Device,
    /// The ranks have compared their layers of this number.
    compared: Arc<AtomicBool>,
}

/// Which call of a layer an exchange belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exchange {
    Forward,
    Recalibration,
    Backward,
}

/// A rank's turn in an exchange. A turn that ends without a [`sum`](Self::sum), because the call
/// failed or panicked, tells the other ranks so.
pub(crate) struct Turn<'a> {
    member: &'a Member,
    exchange: Exchange,
    /// Set before the first sum: from then on `drop` must not send a second message.
    arrived: bool,
}

/// Something that all ranks must have in common.
struct Common {
    name: &'static str,
    /// Equal keys mean equal values, and a larger key means a larger value.
    key: u64,
    values: Values,
}

/// The values that keys stand for.
enum Values {
    /// The keys themselves.
    Integers,
    /// Positive numbers, whose bits have their order.
    Floats,
    /// Choices, by their number.
    Names(&'static [&'static str]),
}

/// Keys are compared in pieces of so many bits. The squares of pieces add up exactly, over 2²¹
/// ranks.
const PIECE_BITS: u32 = 16;

/// Numbers that announce one key: each of its pieces, and the square of each piece.
const ANNOUNCED: usize = 2 * (u64::BITS / PIECE_BITS) as usize;

impl Member {
    /// The place of a layer of `size` channels; `None` if there is no other rank.
    pub fn join(
        ranks: &Ranks,
        size: usize,
        config: &PowerNormConfig,
        device: Device,
    ) -> Option<Self> {
        let layer = ranks.layers.fetch_add(1, Ordering::Relaxed);
        (ranks.communicator.world_size() > 1).then(|| Self {
            ranks: ranks.clone(),
            layer,
            size,
            config: *config,
            device,
            compared: Arc::default(),
        })
    }

    /// This rank's turn in the next exchange.
    pub fn turn(&self, exchange: Exchange) -> Turn<'_> {
        Turn {
            member: self,
            exchange,
            arrived: false,
        }
    }

    /// The room for sums in a message. A forward fills it. A backward has fewer sums, but its
    /// message is as long, so that ranks in different calls compare what they announce.
    fn room(&self) -> usize {
        self.config.recipe.square_sums() * (self.size + 1)
    }

    /// The announcement that comes with a rank's sums on a CPU.
    fn announcement(&self, exchange: Exchange, steps: usize) -> Vec<Common> {
        let calls = &["a training forward", "a recalibration", "a backward"];
        let steps = match exchange {
            // It does not depend on them.
            Exchange::Recalibration => 0,
            Exchange::Forward | Exchange::Backward => steps,
        };
        vec![
            Common::integer("layer (counted by calls of `with_ranks`)", self.layer),
            Common::choice("call", exchange as u64, calls),
            Common::integer("step count", steps),
        ]
    }

    /// The settings that layers of one number have in common.
    fn settings(&self) -> Vec<Common> {
        let config = &self.config;
        let statistics = config.statistics as u64;
        // A layer does not accept 0 groups.
        let groups = config.group_scaling.unwrap_or(0);
        vec![
            Common::integer("size", self.size),
            Common::integer("group_scaling (0 for None)", groups),
            Common::choice("recipe", config.recipe as u64, &["Paper", "Fairseq"]),
            Common::choice("statistics", statistics, &["Running", "Batch"]),
            Common::integer("warmup_steps", config.warmup_steps),
            Common::choice("affine", config.affine.into(), &["false", "true"]),
            Common::choice("bias", config.has_bias().into(), &["false", "true"]),
            Common::float("eps", config.eps),
            Common::float("alpha_fwd", config.alpha_fwd),
            Common::float("alpha_bwd", config.alpha_bwd),
        ]
    }

    /// Adds up `sums` over the ranks, in a message with `common`: `[failed, keys and squares..,
    /// sums..]`. Fails on every rank if the ranks differ in `common`, or if a rank's call failed.
    fn sum_in_common(&self, common: &[Common], sums: &[f64]) -> Result<Vec<f64>> {
        let mut message = vec![0.];
        message.extend(common.iter().flat_map(Common::announced));
        let announced = message.len();
        message.extend(sums);
        let mut global = self.sum(&message)?;
        if global[0] > 0. {
            candle::bail!(
                "power_norm: expected every rank to take part in a sum, got a rank whose call \
                 failed: look for its error there, and go on with the next step on all ranks"
            )
        }
        let ranks = self.ranks.communicator.world_size() as f64;
        let mut pairs = message[1..].iter().zip(&global[1..announced]);
        // If a sum and the sum of squares are this rank's times the number of ranks, the variance
        // is 0, so all are equal. Hence every rank finds the same difference.
        if let Some(differs) = pairs.position(|(own, sum)| *sum != ranks * own) {
            let common = &common[differs / ANNOUNCED];
            let [least, most] = self.range(common.key)?.map(|key| common.show(key));
            candle::bail!(
                "power_norm: expected one {} on all ranks, got {least} on one and {most} on \
                 another: build and call the layers in one order on all ranks, with one \
                 configuration and from one checkpoint",
                common.name
            )
        }
        Ok(global.split_off(announced))
    }

    /// The least and the largest of all ranks' keys, found bit by bit from the highest. Only ranks
    /// whose key agrees with the bits found so far report the next one.
    fn range(&self, key: u64) -> Result<[u64; 2]> {
        let keys = [!key, key];
        let (mut seeks, mut found) = ([true; 2], [0; 2]);
        for bit in (0..u64::BITS).rev() {
            let set = [0, 1].map(|k| seeks[k] && keys[k] >> bit & 1 == 1);
            let ones = self.sum(&set.map(f64::from))?;
            for k in [0, 1] {
                if ones[k] > 0. {
                    found[k] |= 1 << bit;
                    seeks[k] = set[k];
                }
            }
        }
        Ok([!found[0], found[1]])
    }

    /// Adds up numbers that the host waits for.
    fn sum(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        let local = Tensor::new(numbers, &self.device)?;
        let global = self.ranks.communicator.all_reduce_sum(&local)?;
        let global = global.to_dtype(DType::F64)?.to_vec1()?;
        let (expected, got) = (numbers.len(), global.len());
        if got != expected {
            candle::bail!("power_norm: expected {expected} sums of the communicator, got {got}")
        }
        Ok(global)
    }

    /// Adds up numbers where they are.
    fn sum_on_device(&self, local: &Tensor) -> Result<Tensor> {
        let global = self.ranks.communicator.all_reduce_sum(local)?;
        let global = global.contiguous()?;
        let likeness = |tensor: &Tensor| {
            (
                tensor.elem_count(),
                tensor.dtype(),
                tensor.device().location(),
            )
        };
        let (got, expected) = (likeness(&global), likeness(local));
        if got != expected {
            candle::bail!(
                "power_norm: expected sums of the communicator like {expected:?}, got {got:?}"
            )
        }
        global.flatten_all()
    }
}

impl Turn<'_> {
    /// Adds up the `sums` of all ranks. `steps` is t before the step.
    ///
    /// Before a layer's first sum, the ranks compare their layers. On a CPU they also announce each
    /// sum, so that ranks that do not fit each other get an error. On a GPU the host would have to
    /// wait to hear of it.
    pub fn sum(mut self, sums: &Tensor, steps: usize) -> Result<Tensor> {
        self.arrived = true;
        let member = self.member;
        let announcement = || member.announcement(self.exchange, steps);
        if !member.compared.load(Ordering::Acquire) {
            let mut common = announcement();
            common.extend(member.settings());
            member.sum_in_common(&common, &[])?;
            member.compared.store(true, Ordering::Release);
        }
        if !member.device.is_cpu() {
            return member.sum_on_device(sums);
        }
        let len = sums.elem_count();
        let mut padded = sums.to_vec1::<f64>()?;
        padded.resize(member.room(), 0.);
        let mut global = member.sum_in_common(&announcement(), &padded)?;
        global.truncate(len);
        Tensor::from_vec(global, len, &Device::Cpu)
    }
}

impl Drop for Turn<'_> {
    /// Tells the other ranks that this one does not come. On a GPU they hear it only before they
    /// have compared their layers.
    fn drop(&mut self) {
        let member = self.member;
        let compared = member.compared.load(Ordering::Acquire);
        if self.arrived || compared && !member.device.is_cpu() {
            return;
        }
        let announced = member.announcement(self.exchange, 0).len();
        let (common, sums) = match compared {
            true => (announced, member.room()),
            false => (announced + member.settings().len(), 0),
        };
        let mut message = vec![0.; 1 + common * ANNOUNCED + sums];
        message[0] = 1.;
        // The caller already gets the error that led here.
        let _ = member.sum(&message);
    }
}

impl Common {
    fn integer(name: &'static str, value: usize) -> Self {
        let (key, values) = (value as u64, Values::Integers);
        Self { name, key, values }
    }

    fn float(name: &'static str, value: f64) -> Self {
        let (key, values) = (value.to_bits(), Values::Floats);
        Self { name, key, values }
    }

    fn choice(name: &'static str, key: u64, names: &'static [&'static str]) -> Self {
        let values = Values::Names(names);
        Self { name, key, values }
    }

    /// The value of a rank's `key`, as an error shows it.
    fn show(&self, key: u64) -> String {
        match self.values {
            Values::Integers => key.to_string(),
            Values::Floats => format!("{:?}", f64::from_bits(key)),
            Values::Names(names) => match names.get(key as usize) {
                Some(name) => (*name).to_owned(),
                // Another version of this crate may have more choices.
                None => key.to_string(),
            },
        }
    }

    /// The key's pieces and their squares.
    fn announced(&self) -> impl Iterator<Item = f64> + '_ {
        let pieces = (0..u64::BITS).step_by(PIECE_BITS as usize);
        pieces.flat_map(|start| {
            let piece = (self.key >> start & ((1 << PIECE_BITS) - 1)) as f64;
            [piece, piece * piece]
        })
    }
}
