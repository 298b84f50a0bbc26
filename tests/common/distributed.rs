//! Cases that a layer on several ranks must pass, with any communicator. Every rank runs each
//! case.

use super::*;
use candle::{CpuStorage, DType, Device, Error, InplaceOp1, Layout, Module, Result, Tensor, Var};
use candle_nn::{Linear, VarBuilder, VarMap, linear};
use candle_powernorm::{
    Communicator, LossScale, Mode, PowerNorm, PowerNormConfig, Ranks, Recipe, Statistics,
    power_norm, sum_gradients, trainable_vars,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// One of the ranks.
pub struct Rank {
    pub rank: usize,
    /// The device of its layers.
    pub device: Device,
    pub communicator: Arc<dyn Communicator>,
    /// By the same communicator, for layers.
    pub over: Ranks,
}

/// Hands the names of the cases for any device to the macro `$run`.
#[allow(unused_macros)] // but by the tests of ranks
macro_rules! cases {
    ($run:ident) => {
        $run! {
            trajectories,
            a_sum_is_one_on_every_rank,
            a_forward_moves_phi_and_a_backward_nu,
            a_layer_used_twice,
            an_evaluation_is_local,
            gradients_of_a_model,
            gradients_in_half_precision,
            residuals_scales_recalibration,
            nan_rows_and_empty_shards,
            a_state_that_is_replaced,
            settings_that_differ,
            a_rank_whose_first_call_fails,
            sums_that_fail,
        }
    };
}
#[allow(unused_imports)]
pub(crate) use cases;

/// Cases for a CPU, where each exchange says which call it belongs to.
#[allow(unused_macros)]
macro_rules! cases_of_a_cpu {
    ($run:ident) => {
        $run! {
            a_rank_whose_call_fails,
            a_model_in_which_calls_fail,
            a_step_count_that_comes_to_differ,
            calls_that_differ,
            whatever_fails,
        }
    };
}
#[allow(unused_imports)]
pub(crate) use cases_of_a_cpu;

/// Cases for a GPU, where sums of different calls become NaN.
#[allow(unused_macros)]
macro_rules! cases_of_a_gpu {
    ($run:ident) => {
        $run! {
            a_rank_that_goes_on_after_a_rejected_forward,
            a_rank_that_skips_a_backward,
            calls_that_differ_on_a_gpu,
        }
    };
}
#[allow(unused_imports)]
pub(crate) use cases_of_a_gpu;

const SIZE: usize = 12;

/// Steps of a trajectory, of which `WARM_UP` are warm-up: every pattern of shards comes before its
/// end, and twice after it.
const STEPS: usize = 20;
const WARM_UP: usize = 7;

/// In a batch, of four ranks.
const MOST_ROWS: usize = 42;

impl Rank {
    fn ranks(&self) -> usize {
        self.communicator.world_size()
    }

    fn is_last(&self) -> bool {
        self.rank + 1 == self.ranks()
    }

    fn data(&self, seed: u64) -> Data {
        Data::on(&self.device, seed)
    }

    /// The sum over all ranks.
    fn sum(&self, tensor: &Tensor) -> Tensor {
        self.communicator.all_reduce_sum(tensor).unwrap()
    }

    /// `true` if a batch is left out: on a GPU candle's own operations cannot be launched on an
    /// empty tensor.
    fn misses(&self, spread: Spread, masked: bool) -> bool {
        let has_empty_shards = match spread {
            Spread::OneEmpty | Spread::OneAlone => true,
            // Ranks count it and a process by itself does not.
            Spread::Nothing if is_composed() => return !masked,
            Spread::Nothing => !masked,
            _ => false,
        };
        has_empty_shards && !self.device.is_cpu()
    }

    /// Waits for all ranks.
    fn meet(&self) {
        self.sum(&Tensor::zeros(1, DType::F64, &self.device).unwrap());
    }

    /// Compares a tensor with the first rank's.
    #[track_caller]
    pub fn assert_same_on_all(&self, what: &str, tensor: &Tensor) {
        let of_first = match self.rank {
            0 => tensor.clone(),
            _ => tensor.zeros_like().unwrap(),
        };
        assert_same_bits(what, tensor, &self.sum(&of_first));
    }

    /// Compares `actual` with a part of `expected`, to the precision that its dtype leaves sums
    /// whose terms come in another order.
    #[track_caller]
    fn assert_close(&self, what: &str, actual: &Tensor, expected: &Tensor, part: Range<usize>) {
        let relative = match actual.dtype() {
            DType::F64 => 1e-12,
            _ if self.device.is_cpu() => 1e-6,
            // The suite's bound for n terms, 8·sqrt(n)·u: rows of a step, times the steps.
            dtype => 8. * ((MOST_ROWS * STEPS) as f64).sqrt() * precision(dtype).0,
        };
        let (actual, expected) = (to_f64(actual), to_f64(expected));
        let largest = expected.iter().fold(0., |max: f64, e| max.max(e.abs()));
        let (expected, bound) = (&expected[part], relative * largest);
        assert_eq!(actual.len(), expected.len(), "{what}: length");
        for (k, (a, e)) in actual.iter().zip(expected).enumerate() {
            let off = (a - e).abs();
            assert!(
                off <= bound,
                "{what}[{k}]: got {a}, expected {e}, off by {off:e}, at most {bound:e}"
            );
        }
    }
}

/// A layer over all ranks, and its twin in one process, which gets the whole batch.
struct Twins<'a> {
    rank: &'a Rank,
    dtype: DType,
    sharded: PowerNorm,
    /// Of the layer over all ranks.
    varmap: VarMap,
    whole: PowerNorm,
    data: Data,
}

/// Rows of each rank in the batches of [`Twins::next`].
const ROWS: usize = 5;

impl<'a> Twins<'a> {
    fn new(rank: &'a Rank, config: PowerNormConfig) -> Self {
        Self::over(rank, &rank.over, config, DType::F64)
    }

    /// Twins whose every step is of the warm-up, and twins whose every step comes after it.
    fn in_both_phases(rank: &'a Rank) -> impl Iterator<Item = Self> {
        let configs = before_and_after_the_warm_up().into_iter();
        configs.map(|config| Self::new(rank, config))
    }

    /// With the same random parameters.
    fn over(rank: &'a Rank, over: &Ranks, config: PowerNormConfig, dtype: DType) -> Self {
        let twin = || Twin::new(&mut rank.data(11), SIZE, config, dtype);
        let sharded = twin();
        Self {
            rank,
            dtype,
            sharded: sharded.layer.with_ranks(over),
            varmap: sharded.varmap,
            whole: twin().layer,
            data: rank.data(13),
        }
    }

    /// A random batch.
    fn batch(&mut self, rows: usize) -> Batch {
        Batch::random(&mut self.data, &[rows, SIZE], self.dtype, false)
    }

    /// A batch: this rank's share of it, and all of it.
    fn next(&mut self) -> (Batch, Batch) {
        let whole = self.batch(ROWS * self.rank.ranks());
        (whole.rows(self.share()), whole)
    }

    /// The rows of this rank in such a batch.
    fn share(&self) -> Range<usize> {
        ROWS * self.rank.rank..ROWS * (self.rank.rank + 1)
    }

    /// A training forward of both layers.
    #[track_caller]
    fn forward(&mut self) -> Forward {
        let (share, whole) = self.next();
        Forward {
            ours: loss(&self.sharded, &share).unwrap(),
            theirs: loss(&self.whole, &whole).unwrap(),
        }
    }

    /// A training step of both layers, which have one state after it.
    #[track_caller]
    fn step(&mut self, what: &str) {
        let (share, whole) = self.next();
        run(&self.sharded, &share, true);
        run(&self.whole, &whole, true);
        self.compare(what);
    }

    /// A recalibration of both layers, by one batch.
    fn recalibrate(&mut self) {
        let (share, whole) = self.next();
        for (layer, batch) in [(&self.sharded, share), (&self.whole, whole)] {
            let _guard = layer.mode().recalibrate_scope();
            layer.forward(&batch.xs).unwrap();
        }
    }

    /// Compares ψ², ν and t, which are one on all ranks.
    #[track_caller]
    fn compare(&self, what: &str) {
        let (ours, theirs) = (&self.sharded, &self.whole);
        let steps = [ours, theirs].map(|layer| layer.steps().unwrap());
        assert_eq!(steps[0], steps[1], "{what}: t");
        for (name, actual, expected) in [
            ("ψ²", ours.running_phi(), theirs.running_phi()),
            ("ν", ours.nu(), theirs.nu()),
        ] {
            let (name, actual) = (format!("{what}: {name}"), actual.unwrap());
            (self.rank).assert_close(&name, &actual, &expected.unwrap(), 0..SIZE);
            self.rank.assert_same_on_all(&name, &actual);
        }
    }

    /// Sets t of the layer over all ranks, on this rank.
    fn set_steps(&self, t: i64) {
        let t = Tensor::new(&[t], &CPU).unwrap();
        var(&self.varmap, "iters").set(&t).unwrap();
    }
}

/// The losses of a forward of both layers.
struct Forward {
    ours: Tensor,
    theirs: Tensor,
}

impl Forward {
    #[track_caller]
    fn backward(&self) {
        self.ours.backward().unwrap();
        self.theirs.backward().unwrap();
    }
}

/// The loss Σ y·dy of a training forward.
fn loss(layer: &PowerNorm, batch: &Batch) -> Result<Tensor> {
    let xs = Var::from_tensor(&batch.xs)?;
    (layer.forward(&xs)? * &batch.dy)?.sum_all()
}

/// This rank's call has an error with `expected` in it, and leaves the state as it was.
#[track_caller]
fn rejected<T>(layer: &PowerNorm, expected: &str, call: impl FnOnce() -> Result<T>) {
    let before = state(layer);
    let text = message(call());
    assert!(text.contains(expected), "{text}");
    assert_eq!(state(layer), before, "{text}");
}

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
        assert!(tensor.is_contiguous());
        // Two devices that are one GPU do not take each other's tensors.
        let own = tensor.to_device(&CPU)?.copy()?;
        for to in &self.to {
            // A rank that has left brings nothing either, which is an error below.
            to.send(own.clone()).ok();
        }
        let from = self.from.lock().unwrap();
        let brought = from.iter().map(|from| from.recv_timeout(LIMIT));
        let brought: Vec<Tensor> = (brought.collect::<std::result::Result<_, _>>())
            .map_err(|_| Error::msg("a rank has left, or does not come"))?;
        let zeros = Ok(brought[0].zeros_like()?);
        let sum = brought.iter().fold(zeros, |sum, other| sum? + other)?;
        sum.to_device(tensor.device())
    }
}

/// Runs a case on two to four ranks that are threads.
pub fn on_threads(device: fn() -> Device, case: fn(&Rank)) {
    for ranks in 2..=4 {
        in_time(move || {
            on_ranks(ranks, device, case);
        });
    }
}

/// Runs a case on ranks that are threads, each with a device of its own making. Gives what each
/// of them gave.
pub fn on_ranks<T: Send>(
    ranks: usize,
    device: impl Fn() -> Device + Sync,
    case: impl Fn(&Rank) -> T + Sync,
) -> Vec<T> {
    let (mut to, mut from) = (vec![vec![]; ranks], vec![]);
    for _ in 0..ranks {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..ranks).map(|_| channel()).unzip();
        to.iter_mut()
            .zip(senders)
            .for_each(|(to, sender)| to.push(sender));
        from.push(Mutex::new(receivers));
    }
    let run = |rank, to, from| {
        let communicator = Arc::new(Thread { to, from });
        case(&Rank {
            rank,
            device: device(),
            communicator: communicator.clone(),
            over: Ranks::new(communicator),
        })
    };
    let run = &run;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (to.into_iter().zip(from).enumerate())
            .map(|(rank, (to, from))| scope.spawn(move || run(rank, to, from)))
            .collect();
        // All are joined before the first panic goes on, or the scope would hide its message.
        let joined: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        (joined.into_iter())
            .map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// The shares of a batch: consecutive rows, `counts[rank]` for each rank.
fn shares(counts: &[usize]) -> Vec<Range<usize>> {
    let share = |end: &mut usize, count: &usize| {
        *end += count;
        Some(*end - count..*end)
    };
    counts.iter().scan(0, share).collect()
}

/// The spread of a step's batch over the ranks.
#[derive(Clone, Copy, Debug)]
enum Spread {
    Evenly,
    Unevenly,
    /// One rank has no row.
    OneEmpty,
    /// One rank has rows, and all are padding.
    OnePadded,
    /// One rank has them all.
    OneAlone,
    /// No rank has a row that counts: none at all, or padding.
    Nothing,
}

const SPREADS: [Spread; 6] = {
    use Spread::*;
    [Evenly, Unevenly, OneEmpty, OnePadded, Nothing, OneAlone]
};

impl Spread {
    /// Rows of each rank; `who` is the one rank.
    fn counts(self, ranks: usize, who: usize, masked: bool) -> Vec<usize> {
        let each = |count: &dyn Fn(usize) -> usize| (0..ranks).map(count).collect();
        match self {
            Self::Evenly | Self::OnePadded => each(&|_| 8),
            Self::Unevenly => each(&|rank| 3 + 5 * rank),
            Self::OneEmpty => each(&|rank| if rank == who { 0 } else { 7 }),
            Self::OneAlone => each(&|rank| if rank == who { 20 } else { 0 }),
            Self::Nothing => each(&|_| if masked { 4 } else { 0 }),
        }
    }

    /// The rows that are kept.
    fn mask(self, data: &mut Data, shares: &[Range<usize>], who: usize) -> Vec<bool> {
        let rows = shares.last().unwrap().end;
        match self {
            Self::Nothing => vec![false; rows],
            Self::OnePadded => (data.mask(rows).into_iter().enumerate())
                .map(|(row, keep)| keep && !shares[who].contains(&row))
                .collect(),
            _ => data.mask(rows),
        }
    }
}

/// N ranks with their shares of a batch have the state, outputs and gradients of one rank with the
/// whole.
pub fn trajectories(rank: &Rank) {
    for dtype in [DType::F64, DType::F32] {
        for (config, masked) in thinned(settings()) {
            trajectory(rank, config, dtype, masked);
        }
    }
}

fn settings() -> impl Iterator<Item = (PowerNormConfig, bool)> {
    (0..16 * PARAMETERS.len()).map(|setting| {
        let bit = |k: usize| setting >> k & 1 == 1;
        let config = 1e-5
            .with_kind(KINDS[setting % 4])
            .with_groups(bit(2).then_some(2))
            .with_parameters(PARAMETERS[setting / 16])
            .with_warm_up(WARM_UP);
        (config, bit(3))
    })
}

fn trajectory(rank: &Rank, config: PowerNormConfig, dtype: DType, masked: bool) {
    let mut twins = Twins::over(rank, &rank.over, config, dtype);
    for step in 0..STEPS {
        let spread = SPREADS[step % SPREADS.len()];
        if rank.misses(spread, masked) {
            continue;
        }
        let who = step % rank.ranks();
        let shares = shares(&spread.counts(rank.ranks(), who, masked));
        let mut batch = twins.batch(shares.last().unwrap().end);
        if masked {
            let mask = spread.mask(&mut twins.data, &shares, who);
            batch = batch.masked(&mask);
        }
        let share = shares[rank.rank].clone();
        let expected = run(&twins.whole, &batch, true);
        let actual = run(&twins.sharded, &batch.rows(share.clone()), true);

        let what = format!("{config:?}, {dtype:?}, masked: {masked}, step {step}, {spread:?}");
        let part = share.start * SIZE..share.end * SIZE;
        let pairs = actual.tensors().into_iter().zip(expected.tensors());
        for ((name, actual), (_, expected)) in pairs {
            let what = format!("{what}: {name}");
            match name {
                "y" | "dx" => rank.assert_close(&what, actual, expected, part.clone()),
                // Each rank has its part.
                _ => rank.assert_close(&what, &rank.sum(actual), expected, 0..SIZE),
            }
        }
        twins.compare(&what);
    }
    // The comparisons above saw steps.
    let counts = |spread: Spread| match spread {
        // On a GPU a batch whose rows are all padding is counted.
        Spread::Nothing => counts_masked_batches(&rank.device) && masked,
        _ => !rank.misses(spread, masked),
    };
    let taken = (0..STEPS).filter(|step| counts(SPREADS[step % SPREADS.len()]));
    assert_eq!(twins.whole.steps().unwrap(), taken.count());
    let nu = to_f64(&twins.whole.nu().unwrap());
    assert!(nu.iter().all(|&nu| nu != 0.));
}

/// The trait's promises about a communicator.
pub fn a_sum_is_one_on_every_rank(rank: &Rank) {
    for dtype in [DType::F32, DType::F64] {
        // Every rank knows what every other brings. Sums of these depend on the order of their
        // terms.
        let brought = |other: usize| {
            let mut data = rank.data(20 + other as u64);
            Batch::random(&mut data, &[3, 5], dtype, false).xs
        };
        let sum = rank.sum(&brought(rank.rank));
        assert_eq!((sum.dims(), sum.dtype()), (&[3, 5][..], dtype));
        let in_f64 = |other: usize| tensor(&to_f64(&brought(other)), &[3, 5], DType::F64);
        let add = |sum: Tensor, other: usize| (sum + in_f64(other)).unwrap();
        let expected = (1..rank.ranks()).fold(in_f64(0), add);
        rank.assert_close("a sum", &sum, &expected, 0..3 * 5);
        rank.assert_same_on_all("a sum", &sum);
    }
}

fn before_and_after_the_warm_up() -> [PowerNormConfig; 2] {
    [100, 0].map(|warmup_steps| 1e-5.with_warm_up(warmup_steps))
}

/// Nothing waits for a later call: each has moved its part of the state when it returns.
pub fn a_forward_moves_phi_and_a_backward_nu(rank: &Rank) {
    for mut twins in Twins::in_both_phases(rank) {
        for t in 1..4 {
            let forward = twins.forward();
            assert_eq!(twins.sharded.steps().unwrap(), t);
            twins.compare("a forward");
            // A second backward of one forward is another update of ν.
            for what in ["a backward", "a second backward"] {
                let before = twins.sharded.nu().unwrap();
                forward.backward();
                twins.compare(what);
                let moved = (twins.sharded.nu().unwrap() - before).unwrap();
                assert!(to_f64(&moved).iter().all(|&nu| nu != 0.));
            }
        }
    }
}

/// Forwards with and without a backward, whose graphs go in each rank's own order.
pub fn a_layer_used_twice(rank: &Rank) {
    for mut twins in Twins::in_both_phases(rank) {
        let mut graphs = vec![];
        for what in ["a forward", "another one"] {
            let (share, whole) = twins.next();
            graphs.push(loss(&twins.sharded, &share).unwrap());
            twins.whole.forward(&whole.xs).unwrap();
            twins.compare(what);
        }
        graphs.swap_remove(rank.rank % 2);
        twins.step("with an old graph alive");
        drop(graphs);

        let (first, second) = (twins.next(), twins.next());
        let twice = |layer: &PowerNorm, [a, b]: [&Batch; 2]| {
            let both = (loss(layer, a).unwrap() + loss(layer, b).unwrap()).unwrap();
            both.backward().unwrap();
        };
        twice(&twins.sharded, [&first.0, &second.0]);
        twice(&twins.whole, [&first.1, &second.1]);
        twins.compare("used twice");
        assert_eq!(twins.sharded.steps().unwrap(), 5);

        // A clone's step.
        let (share, whole) = twins.next();
        run(&twins.sharded.clone(), &share, true);
        run(&twins.whole, &whole, true);
        twins.compare("by a clone");
    }
}

/// One rank evaluates alone in the midst of a step, and the others are not waited for.
pub fn an_evaluation_is_local(rank: &Rank) {
    for mut twins in Twins::in_both_phases(rank) {
        let forward = twins.forward();
        if rank.is_last() {
            let (share, _) = twins.next();
            let before = state(&twins.sharded);
            let [evaluated, expected] =
                [&twins.sharded, &twins.whole].map(|layer| run(layer, &share, false));
            for ((name, actual), (_, e)) in evaluated.tensors().iter().zip(expected.tensors()) {
                assert_relative(name, actual, &to_f64(e), 1e-12);
            }
            assert_eq!(state(&twins.sharded), before);
        }
        rank.meet();
        forward.backward();
        twins.compare("afterwards");
    }
}

/// A model with a branch that not every rank uses.
struct Branched {
    input: Linear,
    norm: PowerNorm,
    output: Linear,
    branch: Linear,
    varmap: VarMap,
}

impl Branched {
    /// With the same random parameters whenever it is built.
    fn new(rank: &Rank) -> Result<Self> {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F64, &rank.device);
        let model = Self {
            input: linear(SIZE, SIZE, vb.pp("input"))?,
            norm: power_norm(SIZE, 1e-5.with_warm_up(2), vb.pp("norm"))?,
            output: linear(SIZE, SIZE, vb.pp("output"))?,
            branch: linear(SIZE, SIZE, vb.pp("branch"))?,
            varmap,
        };
        let mut data = rank.data(14);
        for var in trainable_vars(&model.varmap) {
            let values = data.normal(var.elem_count());
            var.set(&data.tensor(&values, var.dims(), DType::F64))?;
        }
        Ok(model)
    }

    /// The loss Σ y·dy, to which the branch adds its output in the first rows.
    fn loss(&self, batch: &Batch, branched: usize) -> Result<Tensor> {
        let hidden = self.norm.forward(&self.input.forward(&batch.xs)?)?;
        let loss = (self.output.forward(&hidden)? * &batch.dy)?.sum_all()?;
        if branched == 0 {
            return Ok(loss);
        }
        let [hidden, dy] = [&hidden, &batch.dy].map(|rows| rows.narrow(0, 0, branched));
        loss + (self.branch.forward(&hidden?)? * dy?)?.sum_all()?
    }
}

/// The ranks' sums are the gradients of the whole batch in one process, although one rank does not
/// use the branch and, on a CPU, another one has no rows: candle then makes no gradient for the
/// variables of the branch, and none for a bias. (Seen, with a sum for each gradient that there is:
/// the ranks' calls fell out of step, so that tensors of other variables were added, or a rank
/// waited forever.)
pub fn gradients_of_a_model(rank: &Rank) {
    let (sharded, whole) = (Branched::new(rank).unwrap(), Branched::new(rank).unwrap());
    let sharded = Branched {
        norm: sharded.norm.with_ranks(&rank.over),
        ..sharded
    };
    let mut data = rank.data(15);
    for step in 0..2 * rank.ranks() {
        let mut counts = vec![ROWS; rank.ranks()];
        if rank.device.is_cpu() {
            counts[step % rank.ranks()] = 0;
        }
        let shares = shares(&counts);
        let share = shares[rank.rank].clone();
        let branched = shares[rank.ranks() - 1].start;
        let batch = Batch::random(
            &mut data,
            &[shares.last().unwrap().end, SIZE],
            DType::F64,
            false,
        );
        let of_share = if rank.is_last() { 0 } else { share.len() };
        let loss = sharded.loss(&batch.rows(share.clone()), of_share).unwrap();
        let mut sums = loss.backward().unwrap();
        if step == 0 {
            // What the sums below are for.
            let lacks = |name: &str| sums.get(&var(&sharded.varmap, name)).is_none();
            assert_eq!(lacks("branch.weight"), of_share == 0);
            assert_eq!(lacks("output.bias"), share.is_empty());
        }
        sum_gradients(&*rank.communicator, &sharded.varmap, &mut sums).unwrap();
        let expected = whole.loss(&batch, branched).unwrap().backward().unwrap();
        for name in [
            "branch.bias",
            "branch.weight",
            "input.bias",
            "input.weight",
            "norm.bias",
            "norm.weight",
            "output.bias",
            "output.weight",
        ] {
            let what = format!("step {step}: {name}");
            let own = var(&whole.varmap, name);
            let sum = sums.get(&var(&sharded.varmap, name)).unwrap();
            rank.assert_same_on_all(&what, sum);
            // The branch has no rows if the others' shares are empty.
            match expected.get(&own) {
                Some(e) => rank.assert_close(&what, sum, e, 0..own.elem_count()),
                None => assert!(to_f64(sum).iter().all(|&sum| sum == 0.), "{what}"),
            }
        }
    }
}

/// Gradients of half precision are added up in f32, and the sum is rounded once.
pub fn gradients_in_half_precision(rank: &Rank) {
    for dtype in [DType::BF16, DType::F16] {
        let (u, _) = precision(dtype);
        let varmap = VarMap::new();
        let weight = Var::from_tensor(&rank.data(0).tensor(&[0.; 3], &[3], dtype)).unwrap();
        (varmap.data().lock().unwrap()).insert("weight".to_owned(), weight.clone());
        // 1 + u is a tie, which a sum in half precision rounds to 1 each time.
        let own = if rank.rank == 0 { 1. } else { u };
        let own = rank.data(0).tensor(&[own, -own, 0.], &[3], dtype);
        let mut gradients = (weight.as_tensor() * own).unwrap().backward().unwrap();
        sum_gradients(&*rank.communicator, &varmap, &mut gradients).unwrap();
        let sum = gradients.get(&weight).unwrap();
        assert_eq!(sum.dtype(), dtype);
        let exact = 1. + u * (rank.ranks() - 1) as f64;
        let expected = tensor(&[exact, -exact, 0.], &[3], dtype);
        assert_eq!(to_f64(sum), to_f64(&expected), "{dtype:?}");
    }
}

/// All at once: a residual, a scale that changes from step to step, and a recalibration between two
/// of them.
pub fn residuals_scales_recalibration(rank: &Rank) {
    for mut twins in Twins::in_both_phases(rank) {
        let scale = LossScale::default();
        twins.sharded = twins.sharded.with_loss_scale(&scale);
        twins.whole = twins.whole.with_loss_scale(&scale);
        for t in 0..6 {
            scale.set([1., 256., 0.5][t % 3]).unwrap();
            let (xs, other) = (twins.next(), twins.next());
            let step = |layer: &PowerNorm, xs: &Batch, other: &Batch| -> Result<Tensor> {
                let var = Var::from_tensor(&xs.xs)?;
                let (y, sum) = layer.forward_residual(&var, &other.xs, None)?;
                let loss = ((y * &xs.dy)?.sum_all()? + (sum * &other.dy)?.sum_all()?)?;
                Ok((loss * scale.get())?.backward()?.remove(&var).unwrap())
            };
            let ours = step(&twins.sharded, &xs.0, &other.0).unwrap();
            let theirs = step(&twins.whole, &xs.1, &other.1).unwrap();
            let expected = theirs.narrow(0, twins.share().start, ROWS).unwrap();
            assert_relative("dx", &ours, &to_f64(&expected), 1e-12);
            if t == 3 {
                twins.recalibrate();
            }
            twins.compare(&format!("step {t}"));
        }
    }
}

/// One rank has values that are not finite, and another one has no row that counts. All ranks keep
/// one finite state.
pub fn nan_rows_and_empty_shards(rank: &Rank) {
    let configs = (before_and_after_the_warm_up().into_iter())
        .flat_map(|config| {
            [Statistics::Running, Statistics::Batch].map(|s| config.with_statistics(s))
        })
        .flat_map(|config| [None, Some(1)].map(|groups| config.with_groups(groups)));
    for config in configs {
        let mut twins = Twins::new(rank, config);
        for step in 0..6 {
            let (poisoned, empty) = (step % rank.ranks(), (step + 1) % rank.ranks());
            let mut counts = vec![ROWS; rank.ranks()];
            if rank.device.is_cpu() {
                counts[empty] = 0;
            }
            let shares = shares(&counts);
            let rows = shares.last().unwrap().end;
            let mut batch = twins.batch(rows);
            let at = |row: usize, channel: usize| (shares[poisoned].start + row) * SIZE + channel;
            let poison = |tensor: &Tensor, poison: &[(usize, f64)]| {
                let mut values = to_f64(tensor);
                poison.iter().for_each(|&(k, value)| values[k] = value);
                twins.data.tensor(&values, tensor.dims(), DType::F64)
            };
            if step % 2 == 1 {
                let infinite = [(at(0, 3), f64::NAN), (at(1, 5), f64::INFINITY)];
                batch.xs = poison(&batch.xs, &infinite);
                batch.dy = poison(&batch.dy, &[(at(2, 7), f64::NAN)]);
            }
            let of_empty = |row: usize| shares[empty].contains(&row);
            let mask: Vec<_> = (0..rows).map(|row| !of_empty(row)).collect();
            let batch = batch.masked(&mask);

            run(&twins.sharded, &batch.rows(shares[rank.rank].clone()), true);
            run(&twins.whole, &batch, true);
            let what = format!("{config:?}, step {step}");
            twins.compare(&what);
            assert_finite_state(&what, &twins.sharded);
        }
        assert_eq!(twins.sharded.steps().unwrap(), 6);
    }
}

/// A reset, a load and a save between a forward and its backward: the backward moves the ν that
/// stands when it runs, and nothing else lands on a state that was replaced.
pub fn a_state_that_is_replaced(rank: &Rank) {
    for mut twins in Twins::in_both_phases(rank) {
        twins.step("a step");
        let mut between = |what: &str, replace: &dyn Fn(&Twins)| {
            let forward = twins.forward();
            replace(&twins);
            let (phi, _, steps) = state(&twins.sharded);
            forward.backward();
            twins.compare(what);
            let (phi_after, _, steps_after) = state(&twins.sharded);
            assert_eq!((phi_after, steps_after), (phi, steps), "{what}");
            twins.step("the step after");
        };
        between("a reset", &|twins| {
            twins.sharded.reset_running_stats().unwrap();
            twins.whole.reset_running_stats().unwrap();
        });
        between("a save and its load", &|twins| {
            let file = tempfile::NamedTempFile::new().unwrap();
            twins.varmap.save(file.path()).unwrap();
            let saved = state(&twins.sharded);
            twins.sharded.reset_running_stats().unwrap();
            twins.varmap.clone().load(file.path()).unwrap();
            assert_eq!(state(&twins.sharded), saved);
        });
    }
}

/// Ranks whose layers differ get an error each in the layer's first forward. Each prints its own
/// values. Every state stays as it was.
pub fn settings_that_differ(rank: &Rank) {
    for warmup_steps in [0, 2, 10] {
        let usual = Settings {
            config: 1e-5.with_warm_up(warmup_steps).with_groups(Some(2)),
            size: SIZE,
            steps: 0,
        };
        let (groups, running) = ("group_scaling Some(2)", "statistics Running");
        let warm_up = format!("warmup_steps {warmup_steps}");
        let longer = format!("warmup_steps {}", warmup_steps + 1);
        type Change = fn(&mut Settings);
        // One rank has these. The others have the usual ones.
        #[rustfmt::skip]
        let changes: [(Change, [&str; 2]); 15] = [
            (|one| one.config.eps = 1e-6, ["eps 1e-5", "eps 1e-6"]),
            (|one| one.config.alpha_fwd = 0.99, ["alpha_fwd 0.9", "alpha_fwd 0.99"]),
            (|one| one.config.alpha_bwd = 0.5, ["alpha_bwd 0.9", "alpha_bwd 0.5"]),
            (|one| one.config.group_scaling = Some(4), [groups, "group_scaling Some(4)"]),
            (|one| one.config.group_scaling = None, [groups, "group_scaling None"]),
            (|one| one.config.statistics = Statistics::Batch, [running, "statistics Batch"]),
            (|one| one.config.recipe = Recipe::Fairseq, ["recipe Paper", "recipe Fairseq"]),
            (|one| one.config.warmup_steps += 1, [&warm_up, &longer]),
            (|one| one.config.affine = false, ["affine true", "affine false"]),
            (|one| one.config.bias = false, ["bias true", "bias false"]),
            (|one| one.size = SIZE + 2, ["size 12", "size 14"]),
            (|one| one.size = 2, ["size 12", "size 2"]),
            // A checkpoint that one rank alone has loaded.
            (|one| one.steps = 1, ["step count 0", "step count 1"]),
            (|one| one.steps = 100, ["step count 0", "step count 100"]),
            (|one| one.steps = i64::MAX, ["step count 0", "step count 9223372036854775807"]),
        ];
        for (k, (change, values)) in changes.into_iter().enumerate() {
            let mut own = usual;
            let is_other = k % rank.ranks() == rank.rank;
            if is_other {
                change(&mut own);
            }
            first_forward_is_rejected(rank, own, values[usize::from(is_other)]);
        }
        // Every rank has its own.
        let mut own = usual;
        own.config.eps *= rank.rank as f64 + 1.;
        first_forward_is_rejected(rank, own, &format!("eps {:?}", own.config.eps));
        // Of three ranks the second one has the mean of all.
        let mut own = usual;
        own.steps = rank.rank as i64;
        first_forward_is_rejected(rank, own, &format!("step count {}", rank.rank));
        // Numbers that f64 does not tell apart.
        let mut own = usual;
        own.steps = (1 << 53) + i64::from(rank.is_last());
        first_forward_is_rejected(rank, own, &format!("step count {}", own.steps));
    }
}

/// Settings that the ranks' layers have in common.
#[derive(Clone, Copy)]
struct Settings {
    config: PowerNormConfig,
    size: usize,
    steps: i64,
}

/// The beginning of the error that each rank gets if ranks differ. This rank's announcement
/// follows.
const DIFFER: &str = "got different ones, and on this rank layer ";

/// The first forward of a layer with these settings is an error on this rank, with all of this
/// rank's values in it: with `value` among them.
fn first_forward_is_rejected(rank: &Rank, own: Settings, value: &str) {
    let (layer, varmap) = layer_on(&rank.device, own.size, own.config, DType::F32);
    let steps = Tensor::new(&[own.steps], &CPU).unwrap();
    var(&varmap, "iters").set(&steps).unwrap();
    // The first layer of these ranks.
    let layer = layer.with_ranks(&Ranks::new(rank.communicator.clone()));
    let xs = Tensor::ones((3, own.size), DType::F32, &rank.device).unwrap();
    let config = own.config;
    let has_bias = config.affine && config.bias;
    let announced = format!(
        "{DIFFER}0 in a training forward, step count {}, size {}, group_scaling {:?}, \
         recipe {:?}, statistics {:?}, warmup_steps {}, affine {}, bias {has_bias}, eps {:?}, \
         alpha_fwd {:?}, alpha_bwd {:?}, and sums in a message of ",
        own.steps,
        own.size,
        config.group_scaling,
        config.recipe,
        config.statistics,
        config.warmup_steps,
        config.affine,
        config.eps,
        config.alpha_fwd,
        config.alpha_bwd,
    );
    assert!(
        announced.contains(&format!(" {value}, ")),
        "{value}: {announced}"
    );
    rejected(&layer, &announced, || layer.forward(&xs));
}

/// A rank whose very first call is rejected, or that rejects its own state, fails the step on all
/// ranks, which then go on without it.
pub fn a_rank_whose_first_call_fails(rank: &Rank) {
    for mut twins in Twins::in_both_phases(rank) {
        // The second time no rank has heard of the others yet.
        reject_last(rank, &twins.sharded);
        reject_last(rank, &twins.sharded);
        if rank.is_last() {
            twins.set_steps(-1);
        }
        let (share, _) = twins.next();
        let text = message(twins.sharded.forward(&share.xs));
        assert!(text.contains(of_last(rank, "got -1")), "{text}");
        twins.set_steps(0);
        twins.step("first step");
        twins.step("second step");
    }
}

/// This rank's error, if the last rank has `error` and every other rank hears of it.
fn of_last<'a>(rank: &Rank, error: &'a str) -> &'a str {
    match rank.is_last() {
        true => error,
        false => "got a rank whose call failed",
    }
}

/// A forward that the last rank's layer rejects.
fn reject_last(rank: &Rank, sharded: &PowerNorm) {
    let width = SIZE + rank.is_last() as usize;
    let xs = Tensor::ones((2, width), DType::F64, &rank.device).unwrap();
    let text = "expected a last dimension of 12";
    rejected(sharded, of_last(rank, text), || sharded.forward(&xs));
}

/// Puts other values into a tensor's storage, which are not what its layout says. Called again, it
/// puts the values back.
pub struct Swap(pub Mutex<CpuStorage>);

impl Swap {
    pub fn with(values: CpuStorage) -> Self {
        Self(Mutex::new(values))
    }
}

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "swap"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        std::mem::swap(storage, &mut *self.0.lock().unwrap());
        Ok(())
    }
}

/// A rank whose forward is rejected, or whose backward fails, tells the others. The forward before
/// has moved ψ² on all ranks, and ν moves on none. Its backward can be called again, or skipped.
pub fn a_rank_whose_call_fails(rank: &Rank) {
    for mut twins in Twins::in_both_phases(rank) {
        for is_skipped in [false, true, false] {
            let (share, whole) = twins.next();
            let xs = Var::from_tensor(&share.xs).unwrap();
            let ours = (twins.sharded.forward(&xs).unwrap() * &share.dy).unwrap();
            let theirs = loss(&twins.whole, &whole).unwrap();
            twins.compare("a forward");
            reject_last(rank, &twins.sharded);
            twins.compare("a forward that is rejected");
            let other_dtype = Swap::with(CpuStorage::F32(vec![0.; ROWS * SIZE]));
            if rank.is_last() {
                xs.inplace_op1(&other_dtype).unwrap();
            }
            rejected(&twins.sharded, of_last(rank, "dtype"), || ours.backward());
            twins.compare("a backward that failed");
            if rank.is_last() {
                xs.inplace_op1(&other_dtype).unwrap();
            }
            if !is_skipped {
                ours.backward().unwrap();
                theirs.backward().unwrap();
                twins.compare("called again");
            }
            twins.step("afterwards");
        }
    }
}

const LAYERS: usize = 3;

/// A training step of a model, which rejects its input to one of the layers.
fn model_step<'a>(
    layers: impl Iterator<Item = &'a PowerNorm>,
    batch: &Batch,
    rejected: Option<usize>,
) -> Result<()> {
    let mut xs = Var::from_tensor(&batch.xs)?.as_tensor().clone();
    for (k, layer) in layers.enumerate() {
        if rejected == Some(k) {
            xs = xs.narrow(1, 0, SIZE - 1)?;
        }
        xs = layer.forward(&xs)?.gelu()?;
    }
    (xs * &batch.dy)?.sum_all()?.backward()?;
    Ok(())
}

/// Wherever ranks are rejected in a model of several layers, in one step perhaps at different
/// layers, the ranks stay together. The layers that came first have taken the forward's step, as in
/// one process.
pub fn a_model_in_which_calls_fail(rank: &Rank) {
    let places = [Some(0), Some(1), Some(2), None];
    for config in before_and_after_the_warm_up() {
        let mut twins = [(); LAYERS].map(|()| Twins::new(rank, config));
        for [first, last] in places.into_iter().flat_map(|a| places.map(|b| [a, b])) {
            let (share, whole) = twins[0].next();
            let here = match rank.rank {
                0 => first,
                _ if rank.is_last() => last,
                _ => None,
            };
            let earliest = first.into_iter().chain(last).min();
            let ours = model_step(twins.iter().map(|twins| &twins.sharded), &share, here);
            let theirs = model_step(twins.iter().map(|twins| &twins.whole), &whole, earliest);
            let what = format!("rejected at {first:?} and {last:?}");
            assert_eq!(ours.is_err(), earliest.is_some(), "{what}: {ours:?}");
            assert_eq!(theirs.is_err(), earliest.is_some(), "{what}: {theirs:?}");
            for (k, twins) in twins.iter().enumerate() {
                twins.compare(&format!("{what}: layer {k}"));
            }
        }
    }
}

/// A step count that comes to differ after the layer's first step is an error on every rank in the
/// next exchange. Once it is mended, the ranks go on.
pub fn a_step_count_that_comes_to_differ(rank: &Rank) {
    for mut twins in Twins::in_both_phases(rank) {
        twins.step("before");
        let forward = twins.forward();
        if rank.rank == 0 {
            twins.set_steps(7);
        }
        // A backward goes by its forward's t.
        forward.backward();
        for _ in 0..2 {
            let (share, _) = twins.next();
            let own = if rank.rank == 0 { 7 } else { 2 };
            let expected = format!("in a training forward, step count {own}, ");
            rejected_as_ranks_differ(&twins.sharded, &expected, || loss(&twins.sharded, &share));
        }
        // A recalibration does not depend on t.
        twins.recalibrate();
        twins.set_steps(2);
        twins.compare("mended");
        twins.step("afterwards");

        // Now a rank goes back through another forward.
        let [old, new] = [(); 2].map(|()| twins.forward());
        let (own, t) = if rank.rank == 0 { (&old, 3) } else { (&new, 4) };
        let expected = format!("in a backward, step count {t}, ");
        rejected_as_ranks_differ(&twins.sharded, &expected, || own.ours.backward());
        new.backward();
        twins.compare("backwards of two forwards");
    }
}

/// This rank's call has an error because the ranks differ, with `own` in this rank's announcement.
#[track_caller]
fn rejected_as_ranks_differ<T>(layer: &PowerNorm, own: &str, call: impl FnOnce() -> Result<T>) {
    rejected(layer, own, || {
        let result = call();
        if let Err(error) = &result {
            let text = error.to_string();
            assert!(text.contains(DIFFER), "{text}");
        }
        result
    });
}

/// Ranks that make different calls get an error each, in which each rank prints its own call.
pub fn calls_that_differ(rank: &Rank) {
    for config in before_and_after_the_warm_up() {
        // Their layers have the numbers 0 and 1.
        let over = Ranks::new(rank.communicator.clone());
        let [mut twins, mut second] =
            [(); 2].map(|()| Twins::over(rank, &over, config, DType::F64));
        let recalibrated = |twins: &mut Twins, t: usize| {
            let (share, _) = twins.next();
            let mode = twins.sharded.mode().clone();
            let _guard = rank.is_last().then(|| mode.recalibrate_scope());
            let expected = match rank.is_last() {
                true => "layer 0 in a recalibration, step count not compared, ".to_string(),
                false => format!("layer 0 in a training forward, step count {t}, "),
            };
            rejected_as_ranks_differ(&twins.sharded, &expected, || {
                twins.sharded.forward(&share.xs)
            });
        };
        // In a layer's first call, and later.
        recalibrated(&mut twins, 0);
        twins.step("the first step");
        second.step("the first step of another layer");
        recalibrated(&mut twins, 1);
        twins.step("the second step");
        second.step("the second step of another layer");

        // Layers in another order. Nothing else differs.
        let (share, _) = twins.next();
        let (own, number) = match rank.is_last() {
            true => (&twins, 0),
            false => (&second, 1),
        };
        let layer = &own.sharded;
        let expected = format!("layer {number} in a training forward, step count 2, ");
        rejected_as_ranks_differ(layer, &expected, || layer.forward(&share.xs));
        twins.step("the third step");
        second.step("the third step of another layer");

        // The last rank has left its step after the forward, and begins the next one.
        let forward = twins.forward();
        let expected = match rank.is_last() {
            true => "layer 0 in a training forward, step count 4, ",
            false => "layer 0 in a backward, step count 3, ",
        };
        rejected_as_ranks_differ(&twins.sharded, expected, || match rank.is_last() {
            true => twins.sharded.forward(&share.xs).map(drop),
            false => forward.ours.backward().map(drop),
        });
        forward.backward();
        twins.compare("the backward after all");
    }
}

/// Every recipe and statistic, during the warm-up and after it.
fn every_kind() -> impl Iterator<Item = PowerNormConfig> {
    use {Recipe::*, Statistics::*};
    let kinds = [(Paper, Running), (Paper, Batch), (Fairseq, Running)];
    (kinds.into_iter())
        .flat_map(|kind| [0, 100].map(|steps| 1e-5.with_kind(kind).with_warm_up(steps)))
}

/// Twins that have made two steps, of ranks of their own, so that ranks that fall out of step do
/// not spoil other cases.
fn twins_in_step(rank: &Rank, config: PowerNormConfig) -> Twins<'_> {
    let over = Ranks::new(rank.communicator.clone());
    let mut twins = Twins::over(rank, &over, config, DType::F64);
    for what in ["the first step", "the second step"] {
        twins.step(what);
    }
    twins
}

#[track_caller]
fn assert_nan(what: &str, tensor: &Tensor) {
    let values = to_f64(tensor);
    assert!(
        values.iter().all(|value| value.is_nan()),
        "{what}: {values:?}"
    );
}

/// ψ² and ν are NaN, and so is all that they enter from now on. Unless the ranks stay out of step,
/// an exact gradient has no part of them.
#[track_caller]
fn assert_spoiled(what: &str, twins: &mut Twins, in_step_again: bool) {
    let config = *twins.sharded.config();
    let by_batch = config.statistics == Statistics::Batch || config.warmup_steps > 0;
    let is_exact = by_batch && config.recipe == Recipe::Paper;
    for step in 0..2 {
        let layer = &twins.sharded;
        assert_nan(&format!("{what}: ψ² {step}"), &layer.running_phi().unwrap());
        assert_nan(&format!("{what}: ν {step}"), &layer.nu().unwrap());
        let (share, _) = twins.next();
        let evaluated = forward(&twins.sharded, &share.xs, None, false);
        assert_nan(&format!("{what}: an evaluation {step}"), &evaluated);
        let next = run(&twins.sharded, &share, true);
        if !(in_step_again && is_exact) {
            assert_nan(&format!("{what}: dx {step}"), &next.dx);
        }
    }
}

/// A rank whose forward is rejected, and that goes on with its next batch, meets the others' batch
/// before. Every rank comes to see it.
pub fn a_rank_that_goes_on_after_a_rejected_forward(rank: &Rank) {
    for config in every_kind() {
        let what = format!("{config:?}");
        let mut twins = twins_in_step(rank, config);
        if rank.is_last() {
            let wide = Tensor::ones((2, SIZE + 1), DType::F64, &rank.device).unwrap();
            let text = "expected a last dimension of 12";
            rejected(&twins.sharded, text, || twins.sharded.forward(&wide));
            twins.next();
        }
        let (share, _) = twins.next();
        let outcome = run(&twins.sharded, &share, true);
        if config.statistics == Statistics::Batch || config.warmup_steps > 0 {
            assert_nan(&format!("{what}: y"), &outcome.y);
        }
        assert_spoiled(&what, &mut twins, false);
    }
}

/// A rank that leaves out a backward comes to its next forward while the others are in their
/// backward, whose sums are fewer.
pub fn a_rank_that_skips_a_backward(rank: &Rank) {
    for config in every_kind() {
        let what = format!("{config:?}");
        let mut twins = twins_in_step(rank, config);
        let [(first, _), (second, _)] = [(); 2].map(|()| twins.next());
        let first = loss(&twins.sharded, &first).unwrap();
        if !rank.is_last() {
            first.backward().unwrap();
            assert_nan(&format!("{what}: ν"), &twins.sharded.nu().unwrap());
        }
        let second = loss(&twins.sharded, &second).unwrap();
        assert_nan(
            &format!("{what}: ψ²"),
            &twins.sharded.running_phi().unwrap(),
        );
        if rank.is_last() {
            second.backward().unwrap();
        }
        // Each rank has made three calls again.
        assert_spoiled(&what, &mut twins, true);
    }
}

/// Step counts, layers or calls differ after the first step.
pub fn calls_that_differ_on_a_gpu(rank: &Rank) {
    for config in every_kind() {
        let what = format!("{config:?}");
        // A checkpoint that one rank alone has loaded.
        let mut twins = twins_in_step(rank, config);
        if rank.rank == 0 {
            twins.set_steps(7);
        }
        let (share, _) = twins.next();
        run(&twins.sharded, &share, true);
        assert_spoiled(&format!("{what}: step counts"), &mut twins, false);

        // Two layers in another order.
        let over = Ranks::new(rank.communicator.clone());
        let mut layers = [(); 2].map(|()| Twins::over(rank, &over, config, DType::F64));
        for twins in &mut layers {
            twins.step("in order");
        }
        for k in [0, 1] {
            let (share, _) = layers[0].next();
            let other = (k + usize::from(rank.is_last())) % 2;
            run(&layers[other].sharded, &share, true);
        }
        for twins in &mut layers {
            assert_spoiled(&format!("{what}: layers"), twins, true);
        }

        // One rank recalibrates.
        let mut twins = twins_in_step(rank, config);
        let (share, _) = twins.next();
        let mode = twins.sharded.mode().clone();
        let scope = rank.is_last().then(|| mode.recalibrate_scope());
        twins.sharded.forward(&share.xs).unwrap();
        drop(scope);
        assert_nan(
            &format!("{what}: a recalibration"),
            &twins.sharded.running_phi().unwrap(),
        );
    }
}

const BROKEN: &str = "the engine is broken";

/// An engine that sums `sums_left` times more, and then does something else.
struct Breaks {
    engine: Arc<dyn Communicator>,
    sums_left: AtomicUsize,
    then: fn(&Tensor) -> Result<Tensor>,
}

impl Breaks {
    /// Fails, once it is about to break.
    fn new(rank: &Rank) -> Arc<Self> {
        Arc::new(Self {
            engine: rank.communicator.clone(),
            sums_left: AtomicUsize::new(usize::MAX),
            then: |_| Err(Error::msg(BROKEN)),
        })
    }

    /// Makes a call while the engine is about to break.
    fn after<T>(&self, sums: usize, call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.sums_left.store(sums, Ordering::Relaxed);
        let result = call();
        self.sums_left.store(usize::MAX, Ordering::Relaxed);
        result
    }

    /// Makes a call until the engine lasts: after no sum, after one, and so on. As long as the call
    /// fails, it leaves the layer's state as it was. Gives the number of sums too.
    #[track_caller]
    fn until_it_lasts<T>(&self, layer: &PowerNorm, call: impl Fn() -> Result<T>) -> (T, usize) {
        let mut sums = 0;
        loop {
            let before = state(layer);
            match self.after(sums, &call) {
                Ok(value) => return (value, sums),
                failed => assert!(message(failed).contains(BROKEN)),
            }
            assert_eq!(state(layer), before);
            sums += 1;
        }
    }
}

impl Communicator for Breaks {
    fn world_size(&self) -> usize {
        self.engine.world_size()
    }

    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        let one_less = |left: usize| left.checked_sub(1);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        match self.sums_left.fetch_update(set, fetch, one_less) {
            Ok(_) => self.engine.all_reduce_sum(tensor),
            Err(_) => (self.then)(tensor),
        }
    }
}

/// Sums that fail on all ranks, of a forward or of a backward. A forward leaves the state as it
/// was. A backward leaves ν as it was, and its forward has moved ψ² on all ranks. Each can be
/// called again, or skipped.
pub fn sums_that_fail(rank: &Rank) {
    let engine = Breaks::new(rank);
    let over = Ranks::new(engine.clone());
    let [warming_up, paper] = before_and_after_the_warm_up();
    for config in [warming_up, paper, paper.with_recipe(Recipe::Fairseq)] {
        let mut twins = Twins::over(rank, &over, config, DType::F64);
        // The ranks compare their layers in the first.
        for what in ["the first step", "the second step"] {
            let (share, whole) = twins.next();
            let (ours, sums) =
                engine.until_it_lasts(&twins.sharded, || loss(&twins.sharded, &share));
            // The comparison is a sum of its own.
            let compared = usize::from(what == "the first step");
            assert_eq!(sums, 1 + compared, "{what}: sums of a forward");
            let theirs = loss(&twins.whole, &whole).unwrap();
            twins.compare(&format!("{what}: a forward"));
            let (_, sums) = engine.until_it_lasts(&twins.sharded, || ours.backward());
            assert_eq!(sums, 1, "{what}: sums of a backward");
            theirs.backward().unwrap();
            twins.compare(&format!("{what}: a backward"));
        }
        // Skipped: a forward and its backward, and a backward alone.
        let (share, whole) = twins.next();
        let forward = || loss(&twins.sharded, &share);
        rejected(&twins.sharded, BROKEN, || engine.after(0, forward));
        let ours = forward().unwrap();
        twins.whole.forward(&whole.xs).unwrap();
        rejected(&twins.sharded, BROKEN, || {
            engine.after(0, || ours.backward())
        });
        twins.compare("a backward that is skipped");
        twins.step("afterwards");
    }
}

/// The trouble in a step of [`whatever_fails`].
#[derive(Debug)]
enum Trouble {
    Nothing,
    /// A rank is rejected at a layer, and perhaps another one at another layer.
    Rejected([(usize, usize); 2]),
    /// A rank recalibrates.
    Recalibrates(usize),
    /// A rank has another step count in a layer.
    Differs(usize, usize),
    /// The engine breaks on all ranks, after this number of sums.
    Breaks(usize),
    /// A rank has a row that is not finite.
    Poison(usize),
}

/// Random troubles of random ranks in a model. A call gives an error on every rank or on none, and
/// all ranks keep one finite state.
pub fn whatever_fails(rank: &Rank) {
    const STEPS: usize = 60;
    let engine = Breaks::new(rank);
    let over = Ranks::new(engine.clone());
    let config = 1e-5.with_warm_up(STEPS / 4);
    let mut twins = [(); LAYERS].map(|()| Twins::over(rank, &over, config, DType::F64));
    let mode = Mode::train();
    let layers = twins
        .each_ref()
        .map(|twins| twins.sharded.clone().with_mode(&mode));
    let (mut rng, mut failed) = (StdRng::seed_from_u64(24), 0);
    for step in 0..STEPS {
        let (mut batch, _) = twins[0].next();
        let mut who = || rng.random_range(0..rank.ranks());
        let ranks = [who(), who()];
        let mut layer = || rng.random_range(0..LAYERS);
        let at = [layer(), layer()];
        let trouble = match rng.random_range(0..8) {
            0 | 1 => Trouble::Rejected([(ranks[0], at[0]), (ranks[1], at[1])]),
            2 => Trouble::Recalibrates(ranks[0]),
            3 => Trouble::Differs(ranks[0], at[0]),
            4 => Trouble::Breaks(rng.random_range(0..3 * LAYERS)),
            5 => Trouble::Poison(ranks[0]),
            _ => Trouble::Nothing,
        };
        let (mut here, mut sums, mut scope, mut mended) = (None, usize::MAX, None, None);
        match &trouble {
            Trouble::Rejected(places) => {
                let mine = places.iter().filter(|(who, _)| *who == rank.rank);
                here = mine.map(|&(_, layer)| layer).min();
            }
            Trouble::Recalibrates(who) => {
                scope = (*who == rank.rank).then(|| mode.recalibrate_scope());
            }
            Trouble::Differs(who, layer) if *who == rank.rank => {
                let t = layers[*layer].steps().unwrap() as i64;
                twins[*layer].set_steps(t + 1);
                mended = Some((*layer, t));
            }
            Trouble::Breaks(after) => sums = *after,
            Trouble::Poison(who) if *who == rank.rank => {
                let mut values = to_f64(&batch.xs);
                values[SIZE] = f64::NAN;
                batch.xs = tensor(&values, batch.xs.dims(), DType::F64);
            }
            _ => {}
        }
        let result = engine.after(sums, || model_step(layers.iter(), &batch, here));
        drop(scope);
        if let Some((layer, t)) = mended {
            twins[layer].set_steps(t);
        }
        let what = format!("step {step}: {trouble:?}: {result:?}");
        let failed_here = f64::from(u8::from(result.is_err()));
        let failures = rank.sum(&Tensor::new(&[failed_here], &CPU).unwrap());
        let failures = to_f64(&failures)[0] as usize;
        assert!(failures == 0 || failures == rank.ranks(), "{what}");
        match trouble {
            Trouble::Nothing | Trouble::Poison(_) => assert_eq!(failures, 0, "{what}"),
            Trouble::Breaks(_) => {}
            _ => assert_ne!(failures, 0, "{what}"),
        }
        failed += usize::from(failures > 0);
        for layer in &layers {
            let (phi, nu) = (layer.running_phi().unwrap(), layer.nu().unwrap());
            for tensor in [&phi, &nu] {
                assert_finite(&what, tensor);
                rank.assert_same_on_all(&what, tensor);
            }
            let t = Tensor::new(&[layer.steps().unwrap() as f64], &CPU).unwrap();
            rank.assert_same_on_all(&what, &t);
        }
    }
    assert!(failed > STEPS / 4 && failed < STEPS, "{failed} failed");
}

/// Two ranks on this device that bring the same, of which one is here.
pub struct Same(pub Device);

impl Communicator for Same {
    fn world_size(&self) -> usize {
        2
    }

    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        assert!(tensor.device().same_device(&self.0));
        tensor * 2.
    }
}

/// Whichever sum of a step comes back shorter, the layer says so, and keeps its state.
#[allow(dead_code)] // where no device is by itself
pub fn a_communicator_that_gives_back_less(device: &Device) {
    let engine = Arc::new(Breaks {
        engine: Arc::new(Same(device.clone())),
        sums_left: AtomicUsize::new(0),
        then: |tensor| tensor.narrow(0, 0, tensor.elem_count() - 1),
    });
    let over = Ranks::new(engine.clone());
    let batch = Batch::random(&mut Data::on(device, 25), &[3, 6], DType::F64, false);
    let mut calls_that_failed = [0, 0];
    for sums in 0.. {
        let (layer, _varmap) = layer_on(device, 6, 1e-5.into(), DType::F64);
        let layer = layer.with_ranks(&over);
        engine.sums_left.store(sums, Ordering::Relaxed);
        let mut moved = state(&layer);
        let result = loss(&layer, &batch).and_then(|loss| {
            moved = state(&layer);
            loss.backward()
        });
        if result.is_ok() {
            break;
        }
        let text = message(result);
        assert!(text.contains("sums of the communicator"), "{text}");
        assert_eq!(state(&layer), moved);
        calls_that_failed[moved.2] += 1;
    }
    let [forwards, backwards] = calls_that_failed;
    assert!(forwards > 0 && backwards > 0, "{calls_that_failed:?}");
}
