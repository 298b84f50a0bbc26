//! Sums over processes: what a layer asks of them, and the engines that add up.

mod announcement;
mod gradients;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;

pub use self::gradients::sum_gradients;
#[cfg(feature = "mpi")]
pub use self::mpi::MpiCommunicator;
#[cfg(feature = "nccl")]
pub use self::nccl::NcclCommunicator;

use self::announcement::{ANNOUNCED, Announcement, all_equal, announced};
use crate::config::PowerNormConfig;
use candle::{DType, Device, Result, Tensor};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Adds up tensors over ranks: over processes or GPUs that train copies of one model, each on its
/// own shard of every batch.
///
/// Feature `mpi` has `MpiCommunicator`, for CPUs, and feature `nccl` has `NcclCommunicator`, for
/// GPUs. Another engine needs only these two methods. [`sum_gradients`] sums a model's gradients by
/// the same communicator.
///
/// # Example
///
/// Here two threads act as two ranks, and send each other their tensors:
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

    /// Returns the sum of every rank's `tensor`, on the same device as this rank's `tensor`. The
    /// sum has the same bits on every rank.
    ///
    /// All ranks call this in the same order, each time with tensors of one shape and dtype (`F32`
    /// or `F64`). Each rank waits for the others, or has its GPU wait. `tensor` is contiguous. A
    /// gradient is on its variable's device. A layer's sums are on the layer's device if that is a
    /// CPU or an NVIDIA GPU, else on the CPU.
    ///
    /// # Errors
    ///
    /// Whatever the engine reports. If an engine cannot sum, or if ranks that call their layers in
    /// different orders bring different shapes, it should fail on every rank. An error on one rank
    /// leaves the others waiting, and the ranks cannot go on from it: rebuild the layers.
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
/// [`PowerNorm::with_ranks`](crate::PowerNorm::with_ranks) gives them to a layer. Layers are
/// matched across ranks by the order of these calls, so every rank builds its model in the same
/// order. Clones stand for the same ranks.
#[derive(Clone)]
pub struct Ranks {
    communicator: Arc<dyn Communicator>,
    /// Layers that were given these ranks.
    layers: Arc<AtomicUsize>,
    /// Turns that layers on a GPU have taken.
    turns: Arc<AtomicUsize>,
}

impl Ranks {
    /// The ranks over which `communicator` sums.
    pub fn new(communicator: impl Communicator + 'static) -> Self {
        Self {
            communicator: Arc::new(communicator),
            layers: Arc::default(),
            turns: Arc::default(),
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
    /// The device of the sums that the layer exchanges.
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
#[must_use]
pub(crate) struct Turn<'a> {
    member: &'a Member,
    exchange: Exchange,
    /// See [`Announcement::turn`].
    number: Option<usize>,
    /// True until this rank's message is sent: the other ranks wait for it.
    is_awaited: bool,
}

/// Numbers at the head of a message, before the sums: the number of ranks whose call failed, and
/// the fingerprint.
const HEAD: usize = 1 + ANNOUNCED;

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
            number: (!self.device.is_cpu())
                .then(|| self.ranks.turns.fetch_add(1, Ordering::Relaxed)),
            is_awaited: true,
        }
    }

    /// The number of sums in a message. A backward has fewer sums than a forward and pads them, so
    /// that ranks in different calls can compare them.
    fn sums_len(&self) -> usize {
        self.config.recipe.square_sums() * (self.size + 1)
    }
}

impl Turn<'_> {
    /// The announcement of this rank. `step_count` is t before the step.
    fn announcement(&self, step_count: usize) -> Announcement {
        let member = self.member;
        let head = if member.device.is_cpu() {
            HEAD
        } else {
            ANNOUNCED
        };
        Announcement {
            layer: member.layer,
            exchange: self.exchange,
            step_count: match self.exchange {
                Exchange::Recalibration => None,
                Exchange::Forward | Exchange::Backward => Some(step_count),
            },
            size: member.size,
            config: member.config,
            message_len: head + member.sums_len(),
            turn: self.number,
        }
    }

    /// The numbers that a GPU sends ahead of its sums.
    pub fn announced(&self, step_count: usize) -> [f64; ANNOUNCED] {
        announced(self.announcement(step_count).fingerprint())
    }

    pub fn ranks(&self) -> usize {
        self.member.ranks.communicator.world_size()
    }

    /// Adds up the `sums` of all ranks. `step_count` is t before the step. On a GPU `sums` is a
    /// whole message, which begins with what is [`announced`](Self::announced).
    ///
    /// Before a layer's first sum, the ranks compare their announcements in a message that has one
    /// length for all layers. Layers of different sizes would send sums of different lengths, which
    /// an engine need not survive. Later sums come without that message, and each brings its
    /// announcement along. On a CPU, ranks that do not fit each other get an error. On a GPU the
    /// host would have to wait to read the announcement, so the kernels compare it, and turn sums
    /// that do not belong together into NaN.
    pub fn sum(mut self, sums: &Tensor, step_count: usize) -> Result<Tensor> {
        let member = self.member;
        let announcement = self.announcement(step_count);
        if !member.compared.load(Ordering::Acquire) {
            self.sum_announced(&announcement, &[])?;
            member.compared.store(true, Ordering::Release);
            // All ranks agree, so the others go on and wait for this rank's sums.
            self.is_awaited = true;
        }
        if !member.device.is_cpu() {
            debug_assert_eq!(sums.elem_count(), announcement.message_len);
            return self.sum_on_device(sums);
        }
        let len = sums.elem_count();
        let mut padded = sums.to_vec1::<f64>()?;
        padded.resize(member.sums_len(), 0.);
        let mut global = self.sum_announced(&announcement, &padded)?;
        global.truncate(len);
        Tensor::from_vec(global, len, &Device::Cpu)
    }

    /// Adds up `sums` over the ranks, in a message `[failed, fingerprint.., sums..]`. Fails on
    /// every rank if the ranks' announcements differ, or if a rank's call failed.
    fn sum_announced(&mut self, announcement: &Announcement, sums: &[f64]) -> Result<Vec<f64>> {
        let own = announced(announcement.fingerprint());
        let message = [&[0.], &own[..], sums].concat();
        let mut global = self.sum_on_host(&message)?;
        if global[0] > 0. {
            candle::bail!(
                "power_norm: expected every rank to take part in a sum, got a rank whose call \
                 failed: look for its error there, and go on with the next step on all ranks"
            )
        }
        if !all_equal(&own, &global[1..HEAD], self.ranks()) {
            candle::bail!(
                "power_norm: expected the same layer, call, step count and configuration on all \
                 ranks, got different ones, and on this rank {announcement}: compare this with \
                 the errors of the other ranks, and build and call the layers in one order on all \
                 ranks, with one configuration and from one checkpoint"
            )
        }
        Ok(global.split_off(HEAD))
    }

    /// Adds up numbers that the host waits for.
    fn sum_on_host(&mut self, numbers: &[f64]) -> Result<Vec<f64>> {
        let local = Tensor::new(numbers, &self.member.device)?;
        let global = self.send(&local)?;
        let global = global.to_dtype(DType::F64)?.to_vec1()?;
        let (expected, got) = (numbers.len(), global.len());
        if got != expected {
            candle::bail!("power_norm: expected {expected} sums of the communicator, got {got}")
        }
        Ok(global)
    }

    /// Adds up numbers where they are.
    fn sum_on_device(&mut self, local: &Tensor) -> Result<Tensor> {
        let global = self.send(local)?;
        let global = global.contiguous()?;
        let signature = |tensor: &Tensor| {
            (
                tensor.elem_count(),
                tensor.dtype(),
                tensor.device().location(),
            )
        };
        let (got, expected) = (signature(&global), signature(local));
        if got != expected {
            candle::bail!(
                "power_norm: expected sums of the communicator like {expected:?}, got {got:?}"
            )
        }
        global.flatten_all()
    }

    /// Sends this rank's message through the communicator. Until this call, dropping the turn reports
    /// an error to the other ranks. Afterwards the communicator must.
    fn send(&mut self, message: &Tensor) -> Result<Tensor> {
        self.is_awaited = false;
        self.member.ranks.communicator.all_reduce_sum(message)
    }
}

impl Drop for Turn<'_> {
    /// Tells the other ranks that this call failed. On a GPU the message is sent only before the
    /// layers were compared.
    fn drop(&mut self) {
        let member = self.member;
        let compared = member.compared.load(Ordering::Acquire);
        if !self.is_awaited || compared && !member.device.is_cpu() {
            return;
        }
        // As long as the message that the others send.
        let sums_len = if compared { member.sums_len() } else { 0 };
        let mut message = vec![0.; HEAD + sums_len];
        message[0] = 1.;
        // A panic that leaves `drop` while another one unwinds aborts the process. So a panic of
        // the communicator ends here, as its error does. The caller already gets the error or the
        // panic that led here.
        //
        // `AssertUnwindSafe` is right because a panic leaves nothing half-changed that is used
        // later. This turn ends here. `sum_on_host` changes nothing else, and the communicator is
        // borrowed as shared: like all that threads share, it has to stand the panic of a caller.
        let tell = AssertUnwindSafe(|| self.sum_on_host(&message));
        let _ = catch_unwind(tell);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    /// Far longer than a sum takes on a busy machine or under Miri.
    const LIMIT: Duration = Duration::from_secs(20);

    /// A rank that is a thread, with a channel to each rank and one from each.
    struct Thread {
        to: Vec<Sender<Tensor>>,
        from: Mutex<Vec<Receiver<Tensor>>>,
    }

    impl Communicator for Thread {
        fn world_size(&self) -> usize {
            self.to.len()
        }

        fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
            for to in &self.to {
                to.send(tensor.clone()).ok();
            }
            let from = self.from.lock().unwrap();
            let mut sum = tensor.zeros_like()?;
            for from in from.iter() {
                let brought = from.recv_timeout(LIMIT);
                sum = (sum + brought.map_err(|_| candle::Error::msg("a rank does not come"))?)?;
            }
            Ok(sum)
        }
    }

    /// Runs `work` once for each of `ranks` ranks, in a thread of its own, and returns the results.
    fn on_ranks<T: Send>(ranks: usize, work: impl Fn(usize, Ranks) -> T + Sync) -> Vec<T> {
        let (mut to, mut from) = (vec![vec![]; ranks], vec![]);
        for _ in 0..ranks {
            let (senders, receivers): (Vec<_>, Vec<_>) = (0..ranks).map(|_| channel()).unzip();
            for (to, sender) in to.iter_mut().zip(senders) {
                to.push(sender);
            }
            from.push(Mutex::new(receivers));
        }
        let work = &work;
        std::thread::scope(|scope| {
            let threads: Vec<_> = (to.into_iter().zip(from).enumerate())
                .map(|(rank, (to, from))| {
                    scope.spawn(move || work(rank, Ranks::new(Thread { to, from })))
                })
                .collect();
            (threads.into_iter().map(|thread| thread.join().unwrap())).collect()
        })
    }

    const SIZE: usize = 3;

    fn member(ranks: &Ranks) -> Member {
        Member::join(ranks, SIZE, &1e-5.into(), Device::Cpu).unwrap()
    }

    fn sums(dtype: DType) -> Tensor {
        Tensor::arange(0., (SIZE + 1) as f64, &Device::Cpu)
            .and_then(|sums| sums.to_dtype(dtype))
            .unwrap()
    }

    fn text<T>(result: Result<T>) -> String {
        result.err().expect("an error").to_string()
    }

    /// A rank that fails within `Turn::sum`, before it has sent its message, tells the others. All
    /// go on with the next sum.
    #[test]
    fn a_failure_within_a_sum_reaches_the_other_ranks() {
        for ranks in 2..=4 {
            on_ranks(ranks, |rank, over| {
                let member = member(&over);
                // In the first exchange, which compares the layers, and in a later one.
                for step_count in 0..2 {
                    for exchange in [Exchange::Forward, Exchange::Backward] {
                        // The sums of a CPU are of f64, so these cannot be read.
                        let dtype = if rank == 1 { DType::F32 } else { DType::F64 };
                        let failed = member.turn(exchange).sum(&sums(dtype), step_count);
                        let expected = match rank {
                            1 => "unexpected dtype",
                            _ => "got a rank whose call failed",
                        };
                        let text = text(failed);
                        assert!(text.contains(expected), "{exchange:?} {step_count}: {text}");
                        let sums = sums(DType::F64);
                        let sum = member.turn(exchange).sum(&sums, step_count).unwrap();
                        let expected: Vec<_> = (0..=SIZE).map(|k| (k * ranks) as f64).collect();
                        assert_eq!(sum.to_vec1::<f64>().unwrap(), expected);
                    }
                }
            });
        }
    }

    type Sum = fn(&Tensor) -> Result<Tensor>;

    /// Two ranks that bring the same, of which one is here. It keeps what was brought.
    #[derive(Clone)]
    struct Recorder {
        brought: Arc<Mutex<Vec<Vec<f64>>>>,
        /// Returns the sum.
        sum: Sum,
    }

    impl Recorder {
        fn new(sum: Sum) -> Self {
            let brought = Arc::default();
            Self { brought, sum }
        }

        /// The messages since the last call.
        fn take(&self) -> Vec<Vec<f64>> {
            std::mem::take(&mut *self.brought.lock().unwrap())
        }
    }

    impl Communicator for Recorder {
        fn world_size(&self) -> usize {
            2
        }

        fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
            let brought = tensor.to_vec1::<f64>()?;
            self.brought.lock().unwrap().push(brought);
            (self.sum)(tensor)
        }
    }

    /// The message of a rank whose call failed.
    fn failure(sums_len: usize) -> Vec<f64> {
        let mut message = vec![0.; HEAD + sums_len];
        message[0] = 1.;
        message
    }

    #[test]
    fn layers_are_numbered_and_a_rank_by_itself_has_no_member() {
        let ranks = Ranks::new(Recorder::new(|sums| sums * 2.));
        let clone = ranks.clone();
        let layers = [&ranks, &clone, &ranks].map(|ranks| member(ranks).layer);
        assert_eq!(layers, [0, 1, 2]);

        struct Alone;
        impl Communicator for Alone {
            fn world_size(&self) -> usize {
                1
            }

            fn all_reduce_sum(&self, _: &Tensor) -> Result<Tensor> {
                candle::bail!("a sum over one rank")
            }
        }
        let alone = Ranks::new(Alone);
        assert!(Member::join(&alone, SIZE, &1e-5.into(), Device::Cpu).is_none());
    }

    /// The first message has one length whatever the layer. All later ones bring sums.
    #[test]
    fn messages_of_a_turn() {
        let recorder = Recorder::new(|sums| sums * 2.);
        let fairseq = PowerNormConfig {
            recipe: crate::Recipe::Fairseq,
            ..1e-5.into()
        };
        let usual = 1e-5.into();
        for (size, config, sums_len) in [(3, usual, 4), (8, usual, 9), (3, fairseq, 8)] {
            let ranks = Ranks::new(recorder.clone());
            let member = Member::join(&ranks, size, &config, Device::Cpu).unwrap();
            // A backward's sums are fewer, and its message is as long.
            let own = Tensor::new(&[1., 2., 3.], &Device::Cpu).unwrap();
            for (exchange, step_count) in [(Exchange::Forward, 0), (Exchange::Backward, 1)] {
                let turn = member.turn(exchange);
                let announcement = turn.announcement(step_count);
                assert_eq!(announcement.message_len, HEAD + sums_len);
                let mut head = vec![0.];
                head.extend(announced(announcement.fingerprint()));
                let mut message = head.clone();
                message.extend([1., 2., 3.]);
                message.resize(HEAD + sums_len, 0.);

                let sum = turn.sum(&own, step_count).unwrap();
                assert_eq!(sum.to_vec1::<f64>().unwrap(), [2., 4., 6.]);
                match exchange {
                    Exchange::Forward => assert_eq!(recorder.take(), [head, message]),
                    _ => assert_eq!(recorder.take(), [message]),
                }
            }
        }
    }

    /// A turn without a sum brings one message, as long as the one that the others bring.
    #[test]
    fn a_turn_that_is_dropped_says_so_once() {
        let recorder = Recorder::new(|sums| sums * 2.);
        let member = member(&Ranks::new(recorder.clone()));
        drop(member.turn(Exchange::Forward));
        assert_eq!(recorder.take(), [failure(0)]);
        member
            .turn(Exchange::Forward)
            .sum(&sums(DType::F64), 0)
            .unwrap();
        recorder.take();
        for exchange in [
            Exchange::Forward,
            Exchange::Recalibration,
            Exchange::Backward,
        ] {
            drop(member.turn(exchange));
            assert_eq!(recorder.take(), [failure(SIZE + 1)]);
        }
        // A call that fails before its message counts as the first one did.
        let failed = member.turn(Exchange::Forward).sum(&sums(DType::F32), 0);
        assert!(failed.is_err());
        assert_eq!(recorder.take(), [failure(SIZE + 1)]);
    }

    /// Once a message is handed to a communicator, no other message follows: neither if it fails,
    /// nor if the ranks differ or another rank's call failed, nor if it returns nonsense.
    #[test]
    fn a_message_that_was_sent_is_the_last() {
        let troubles: [(Sum, &str); 4] = [
            (|_| candle::bail!("a broken engine"), "a broken engine"),
            (|sums| sums * 3., "got different ones"),
            (|sums| sums + 1., "got a rank whose call failed"),
            (
                |sums| sums.narrow(0, 1, 3),
                "sums of the communicator, got 3",
            ),
        ];
        for (trouble, expected) in troubles {
            let mut recorder = Recorder::new(trouble);
            let member = member(&Ranks::new(recorder.clone()));
            let failed = member.turn(Exchange::Forward).sum(&sums(DType::F64), 0);
            let text = text(failed);
            assert!(text.contains(expected), "{text}");
            let brought = recorder.take();
            assert_eq!(brought.len(), 1, "{text}: {brought:?}");
            assert_eq!(brought[0].len(), HEAD, "{text}");
            // No rank takes the layers for compared.
            assert!(!member.compared.load(Ordering::Acquire), "{text}");

            // Later there is one message too.
            let over = Ranks::new(Recorder::new(|sums| sums * 2.));
            let mut member = tests::member(&over);
            member
                .turn(Exchange::Forward)
                .sum(&sums(DType::F64), 0)
                .unwrap();
            recorder = Recorder::new(trouble);
            member.ranks = Ranks::new(recorder.clone());
            let failed = member.turn(Exchange::Forward).sum(&sums(DType::F64), 0);
            assert!(tests::text(failed).contains(expected), "{expected}");
            assert_eq!(recorder.take().len(), 1, "{expected}");
        }
    }

    /// The error of a call stands, whatever becomes of the message to the other ranks.
    #[test]
    fn a_communicator_that_fails_or_panics_in_a_drop() {
        let troubles: [Sum; 2] = [|_| candle::bail!("a broken engine"), |_| panic!("a panic")];
        for trouble in troubles {
            let recorder = Recorder::new(trouble);
            let member = member(&Ranks::new(recorder.clone()));
            drop(member.turn(Exchange::Forward));
            assert_eq!(recorder.take(), [failure(0)]);
        }
    }

    /// A recalibration does not depend on the step count. Forwards and backwards do.
    #[test]
    fn step_counts_that_differ() {
        on_ranks(2, |rank, over| {
            let member = member(&over);
            let sum = |exchange, step_count| {
                let sums = sums(DType::F64);
                member.turn(exchange).sum(&sums, step_count).map(drop)
            };
            sum(Exchange::Recalibration, rank).unwrap();
            for exchange in [Exchange::Forward, Exchange::Backward] {
                let text = text(sum(exchange, 5 + rank));
                assert!(
                    text.contains(&format!("step count {}, ", 5 + rank)),
                    "{text}"
                );
                sum(exchange, 5).unwrap();
            }
        });
    }

    /// The guide shows the error that ranks get if they differ.
    #[test]
    fn text_of_ranks_that_differ() {
        let ranks = Ranks::new(Recorder::new(|sums| sums * 3.));
        let member = Member::join(&ranks, 512, &1e-5.into(), Device::Cpu).unwrap();
        let own = Tensor::zeros(513, DType::F64, &Device::Cpu).unwrap();
        let text = text(member.turn(Exchange::Forward).sum(&own, 0));
        // A backtrace may follow.
        let text = text.lines().next().unwrap();
        let guide = include_str!("../../docs/guide/ranks.md");
        let guide: Vec<_> = guide.split_whitespace().collect();
        assert!(guide.join(" ").contains(text), "{text}");
    }
}
