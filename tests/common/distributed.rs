//! What must hold of a layer on several ranks, whatever sums for them: each case is run by every
//! rank.

use super::{
    assert_relative, assert_same_bits, in_time, layer_on, message, precision, run, state, thinned,
    to_f64, var, Batch, Data, Outcome, Twin, CPU, LIMIT,
};
use candle::{DType, Device, Error, Module, Result, Tensor, Var};
use candle_powernorm::{
    Communicator, LossScale, PowerNorm, PowerNormConfig, Ranks, Recipe, Statistics,
};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// One of the ranks.
pub struct Rank {
    pub rank: usize,
    /// Where its layers are.
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
            sums_after_the_warm_up_wait,
            forwards_without_a_backward,
            an_evaluation_is_local,
            layers_of_different_sizes,
            a_rank_whose_first_call_fails,
            a_rank_that_cannot_read_its_state,
            residuals_scales_recalibration,
            a_state_that_is_replaced,
            a_step_that_fails_is_tried_again,
            sums_that_fail,
        }
    };
}
#[allow(unused_imports)]
pub(crate) use cases;

/// Those for a CPU, where ranks announce what they bring to every sum.
#[allow(unused_macros)]
macro_rules! cases_of_a_cpu {
    ($run:ident) => {
        $run! {
            a_rank_whose_call_fails,
            a_model_of_which_a_call_fails,
        }
    };
}
#[allow(unused_imports)]
pub(crate) use cases_of_a_cpu;

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

    fn join(&self, layer: PowerNorm) -> PowerNorm {
        layer.with_ranks(&self.over)
    }

    /// A layer over all ranks and its twin for the whole batch, with the same random parameters.
    fn layers(&self, config: PowerNormConfig, dtype: DType) -> (PowerNorm, PowerNorm) {
        let twin = || Twin::new(&mut self.data(11), SIZE, config, dtype).layer;
        (self.join(twin()), twin())
    }

    fn data(&self, seed: u64) -> Data {
        Data::on(&self.device, seed)
    }

    /// This rank's rows of `batch`, which the ranks share out evenly.
    fn share(&self, batch: &Batch) -> Batch {
        let rows = batch.xs.dims()[0];
        assert_eq!(rows % self.ranks(), 0);
        rows_of(
            batch,
            &shares(&vec![rows / self.ranks(); self.ranks()])[self.rank],
        )
    }

    /// The sum over all ranks.
    fn sum(&self, tensor: &Tensor) -> Tensor {
        self.communicator.all_reduce_sum(tensor).unwrap()
    }

    /// Whether a batch is left out: on a GPU candle's own operations cannot be launched on an empty
    /// tensor.
    fn misses(&self, spread: Spread, masked: bool) -> bool {
        let has_empty_shards = match spread {
            Spread::OneEmpty | Spread::OneAlone => true,
            Spread::Nothing => !masked,
            _ => false,
        };
        has_empty_shards && !self.device.is_cpu()
    }

    /// Waits for all ranks.
    fn meet(&self) {
        self.sum(&Tensor::zeros(1, DType::F64, &self.device).unwrap());
    }
}

/// Threads that add up tensors.
#[derive(Debug)]
struct World {
    ranks: usize,
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    number: usize,
    brought: Vec<Option<Tensor>>,
    /// Of the last round. The next one cannot end before all ranks have taken it.
    sum: Option<Tensor>,
    /// Whether a rank will not come any more.
    left: bool,
}

#[derive(Debug)]
struct Thread {
    world: Arc<World>,
    rank: usize,
}

impl Communicator for Thread {
    fn world_size(&self) -> usize {
        self.world.ranks
    }

    fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
        assert!(tensor.is_contiguous());
        // Two devices that are one GPU do not take each other's tensors.
        let own = tensor.to_device(&CPU)?.copy()?;
        let mut round = self.world.round.lock().unwrap();
        let number = round.number;
        round.brought[self.rank] = Some(own);
        if round.brought.iter().all(Option::is_some) {
            let brought: Vec<Tensor> = (round.brought.iter_mut())
                .filter_map(Option::take)
                .collect();
            let sum = |sum: Result<Tensor>, other: &Tensor| sum? + other;
            round.sum = brought[1..].iter().fold(Ok(brought[0].clone()), sum).ok();
            round.number += 1;
            self.world.changed.notify_all();
        }
        let waits = |round: &mut Round| round.number == number && !round.left;
        let waited = self.world.changed.wait_timeout_while(round, LIMIT, waits);
        let (round, _) = waited.unwrap();
        if round.number == number {
            return Err(Error::msg("a rank has left, or does not come"));
        }
        let sum = round.sum.as_ref();
        sum.ok_or_else(|| Error::msg("ranks brought tensors of different shapes"))?
            .copy()?
            .to_device(tensor.device())
    }
}

impl Drop for Thread {
    /// A rank that panics must not leave the others waiting.
    fn drop(&mut self) {
        if let Ok(mut round) = self.world.round.lock() {
            round.left = true;
        }
        self.world.changed.notify_all();
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
    let world = Arc::new(World {
        ranks,
        round: Mutex::new(Round {
            brought: vec![None; ranks],
            ..Round::default()
        }),
        changed: Condvar::new(),
    });
    let run = |rank| {
        let world = world.clone();
        let communicator = Arc::new(Thread { world, rank });
        case(&Rank {
            rank,
            device: device(),
            communicator: communicator.clone(),
            over: Ranks::new(communicator),
        })
    };
    let run = &run;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| scope.spawn(move || run(rank)))
            .collect();
        let results = threads.into_iter().map(|thread| thread.join());
        // All are joined before the first panic goes on, or the scope would hide its message.
        let results: Vec<_> = results.collect();
        let results = results
            .into_iter()
            .map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        results.collect()
    })
}

/// The shares of a batch: consecutive rows, so many for each rank.
fn shares(counts: &[usize]) -> Vec<Range<usize>> {
    let mut start = 0;
    counts
        .iter()
        .map(|count| {
            start += count;
            start - count..start
        })
        .collect()
}

fn rows_of(batch: &Batch, rows: &Range<usize>) -> Batch {
    let narrow = |tensor: &Tensor| tensor.narrow(0, rows.start, rows.len()).unwrap();
    Batch {
        xs: narrow(&batch.xs),
        dy: narrow(&batch.dy),
        keep: batch.keep.as_ref().map(narrow),
    }
}

fn batch(data: &mut Data, rows: usize, dtype: DType) -> Batch {
    Batch::random(data, &[rows, SIZE], dtype, false)
}

/// How a step's batch is spread over the ranks.
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

const SPREADS: [Spread; 6] = [
    Spread::Evenly,
    Spread::Unevenly,
    Spread::OneEmpty,
    Spread::OnePadded,
    Spread::Nothing,
    Spread::OneAlone,
];

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
        for (recipe, statistics, group_scaling, affine, masked) in thinned(settings()) {
            let config = PowerNormConfig {
                recipe,
                statistics,
                group_scaling,
                affine,
                warmup_steps: WARM_UP,
                ..1e-5.into()
            };
            trajectory(rank, config, dtype, masked);
        }
    }
}

type Setting = (Recipe, Statistics, Option<usize>, bool, bool);

fn settings() -> impl Iterator<Item = Setting> {
    (0..32).map(|bits: usize| {
        let bit = |k: usize| bits >> k & 1 == 1;
        (
            [Recipe::Paper, Recipe::Fairseq][bit(0) as usize],
            [Statistics::Running, Statistics::Batch][bit(1) as usize],
            bit(2).then_some(2),
            bit(3),
            bit(4),
        )
    })
}

fn trajectory(rank: &Rank, config: PowerNormConfig, dtype: DType, masked: bool) {
    let close = Close::of(rank, dtype);
    let (sharded, whole) = rank.layers(config, dtype);
    let mut data = rank.data(12);
    for step in 0..STEPS {
        let spread = SPREADS[step % SPREADS.len()];
        if rank.misses(spread, masked) {
            continue;
        }
        let who = step % rank.ranks();
        let shares = shares(&spread.counts(rank.ranks(), who, masked));
        let mut batch = batch(&mut data, shares.last().unwrap().end, dtype);
        if masked {
            let mask = spread.mask(&mut data, &shares, who);
            batch = batch.masked(&mask);
        }
        let expected = run(&whole, &batch, true);
        let actual = run(&sharded, &rows_of(&batch, &shares[rank.rank]), true);

        let what = format!("{config:?}, {dtype:?}, masked: {masked}, step {step}, {spread:?}");
        close.outcome(&what, rank, &actual, &expected, &shares[rank.rank]);
        close.state(&what, rank, &sharded, &whole);
    }
    // What all this compared was not nothing.
    let counts = |spread: Spread| match spread {
        // On a GPU a batch whose rows are all padding is counted.
        Spread::Nothing => !rank.device.is_cpu() && masked,
        _ => !rank.misses(spread, masked),
    };
    let taken = (0..STEPS).filter(|step| counts(SPREADS[step % SPREADS.len()]));
    assert_eq!(whole.steps().unwrap(), taken.count());
    assert!(to_f64(&whole.nu().unwrap()).iter().all(|&nu| nu != 0.));
}

/// Comparisons, to the precision that a dtype leaves sums whose terms come in another order.
struct Close {
    /// Of the largest value.
    relative: f64,
}

impl Close {
    fn of(rank: &Rank, dtype: DType) -> Self {
        let relative = match dtype {
            DType::F64 => 1e-12,
            _ if rank.device.is_cpu() => 1e-6,
            // The suite's bound for n terms, 8·sqrt(n)·u: rows of a step, times the steps.
            _ => 8. * ((MOST_ROWS * STEPS) as f64).sqrt() * precision(dtype).0,
        };
        Self { relative }
    }

    #[track_caller]
    fn outcome(
        &self,
        what: &str,
        rank: &Rank,
        actual: &Outcome,
        expected: &Outcome,
        share: &Range<usize>,
    ) {
        let of_share = share.start * SIZE..share.end * SIZE;
        self.values(
            &format!("{what}: y"),
            &actual.y,
            &expected.y,
            of_share.clone(),
        );
        self.values(&format!("{what}: dx"), &actual.dx, &expected.dx, of_share);
        for (name, actual, expected) in [
            ("dweight", &actual.dweight, &expected.dweight),
            ("dbias", &actual.dbias, &expected.dbias),
        ] {
            if let (Some(actual), Some(expected)) = (actual, expected) {
                self.values(
                    &format!("{what}: {name}"),
                    &rank.sum(actual),
                    expected,
                    0..SIZE,
                );
            }
        }
    }

    /// ψ², ν and t; on all ranks the same bits.
    #[track_caller]
    fn state(&self, what: &str, rank: &Rank, actual: &PowerNorm, expected: &PowerNorm) {
        assert_eq!(
            actual.steps().unwrap(),
            expected.steps().unwrap(),
            "{what}: t"
        );
        for (name, actual, expected) in [
            ("ψ²", actual.running_phi(), expected.running_phi()),
            ("ν", actual.nu(), expected.nu()),
        ] {
            let (name, actual) = (format!("{what}: {name}"), actual.unwrap());
            self.values(&name, &actual, &expected.unwrap(), 0..SIZE);
            let of_first = match rank.rank {
                0 => actual.clone(),
                _ => actual.zeros_like().unwrap(),
            };
            assert_same_bits(&name, &actual, &rank.sum(&of_first));
        }
    }

    /// Compares `actual` with a part of `expected`.
    #[track_caller]
    fn values(&self, what: &str, actual: &Tensor, expected: &Tensor, part: Range<usize>) {
        let (actual, expected) = (to_f64(actual), to_f64(expected));
        let largest = expected.iter().fold(0., |max: f64, e| max.max(e.abs()));
        let expected = &expected[part];
        assert_eq!(actual.len(), expected.len(), "{what}: length");
        for (k, (a, e)) in actual.iter().zip(expected).enumerate() {
            let (off, bound) = ((a - e).abs(), self.relative * largest);
            assert!(
                off <= bound,
                "{what}[{k}]: got {a}, expected {e}, off by {off:e}, at most {bound:e}"
            );
        }
    }
}

/// What the trait promises of a communicator.
pub fn a_sum_is_one_on_every_rank(rank: &Rank) {
    for dtype in [DType::F32, DType::F64] {
        // Every rank knows what every other brings. Sums of these depend on the order of their
        // terms.
        let brought = |other: usize| {
            let mut data = rank.data(20 + other as u64);
            let values = data.normal(3 * 5);
            data.tensor(&values, &[3, 5], dtype)
        };
        let sum = rank.sum(&brought(rank.rank));
        assert_eq!((sum.dims(), sum.dtype()), (&[3, 5][..], dtype));
        let mut expected = vec![0.; 3 * 5];
        for other in 0..rank.ranks() {
            let values = to_f64(&brought(other));
            expected
                .iter_mut()
                .zip(values)
                .for_each(|(sum, value)| *sum += value);
        }
        let expected = Tensor::from_vec(expected, (3, 5), &CPU).unwrap();
        Close::of(rank, dtype).values("a sum", &sum, &expected, 0..3 * 5);
        let of_first = match rank.rank {
            0 => sum.clone(),
            _ => sum.zeros_like().unwrap(),
        };
        assert_same_bits("a sum", &sum, &rank.sum(&of_first));
    }
}

/// A layer whose steps are all after the warm-up.
fn warm() -> PowerNormConfig {
    PowerNormConfig {
        warmup_steps: 0,
        ..1e-5.into()
    }
}

/// After the warm-up a forward does not wait for the other ranks: ranks that take turns would not
/// come through it.
pub fn sums_after_the_warm_up_wait(rank: &Rank) {
    let (sharded, whole) = rank.layers(warm(), DType::F64);
    let batch = batch(&mut rank.data(13), 3 * rank.ranks(), DType::F64);
    let share = rank.share(&batch);
    // In the first the ranks of a GPU compare their layers.
    run(&whole, &batch, true);
    run(&sharded, &share, true);
    let expected = run(&whole, &batch, true);
    let xs = Var::from_tensor(&share.xs).unwrap();
    let mut ys = None;
    for turn in 0..rank.ranks() {
        if turn == rank.rank {
            ys = Some(sharded.forward(&xs).unwrap());
        }
        rank.meet();
    }
    assert_eq!(sharded.steps().unwrap(), 1);
    let loss = (ys.unwrap() * &share.dy).unwrap().sum_all().unwrap();
    let grads = loss.backward().unwrap();
    let dx = grads.get(&xs).unwrap();
    let first = rank.rank * 3 * SIZE;
    let close = Close::of(rank, DType::F64);
    close.values("dx", dx, &expected.dx, first..first + 3 * SIZE);
    close.state("two steps", rank, &sharded, &whole);
    assert_eq!(sharded.steps().unwrap(), 2);

    // A second backward of one forward is another update of ν.
    let steps = |layer: &PowerNorm, batch: &Batch| {
        let ys = layer
            .forward(&Var::from_tensor(&batch.xs).unwrap())
            .unwrap();
        let loss = (ys * &batch.dy).unwrap().sum_all().unwrap();
        loss.backward().unwrap();
        loss.backward().unwrap();
    };
    steps(&sharded, &share);
    steps(&whole, &batch);
    close.state("two backwards", rank, &sharded, &whole);
}

/// What no backward settled, the next training forward does.
pub fn forwards_without_a_backward(rank: &Rank) {
    let (sharded, whole) = rank.layers(warm(), DType::F64);
    let mut data = rank.data(14);
    let mut batches = (0..4).map(|_| batch(&mut data, 5 * rank.ranks(), DType::F64));
    let close = Close::of(rank, DType::F64);

    let first = batches.next().unwrap();
    sharded.forward(&rank.share(&first).xs).unwrap();
    let second = batches.next().unwrap();
    sharded.forward(&rank.share(&second).xs).unwrap();
    whole.forward(&first.xs).unwrap();
    close.state("two forwards", rank, &sharded, &whole);
    assert_eq!(sharded.steps().unwrap(), 1);

    // A layer used twice in a model.
    let twice = |layer: &PowerNorm, a: &Batch, b: &Batch| {
        let ys = |batch: &Batch| {
            let ys = layer
                .forward(&Var::from_tensor(&batch.xs).unwrap())
                .unwrap();
            (ys * &batch.dy).unwrap().sum_all().unwrap()
        };
        (ys(a) + ys(b)).unwrap().backward().unwrap();
    };
    whole.forward(&second.xs).unwrap();
    let (third, fourth) = (batches.next().unwrap(), batches.next().unwrap());
    twice(&sharded, &rank.share(&third), &rank.share(&fourth));
    twice(&whole, &third, &fourth);
    close.state("used twice", rank, &sharded, &whole);
    assert_eq!(sharded.steps().unwrap(), 4);
}

/// One rank alone evaluates, with a step unsettled: the others are not waited for.
pub fn an_evaluation_is_local(rank: &Rank) {
    let (sharded, whole) = rank.layers(warm(), DType::F64);
    let batch = batch(&mut rank.data(15), 4 * rank.ranks(), DType::F64);
    let share = rank.share(&batch);
    sharded.forward(&share.xs).unwrap();
    if rank.is_last() {
        let evaluated = run(&sharded, &share, false);
        let expected = run(&whole, &share, false);
        for ((name, actual), (_, expected)) in
            evaluated.tensors().into_iter().zip(expected.tensors())
        {
            assert_same_bits(name, actual, expected);
        }
    }
    rank.meet();
}

/// A forward of an input, and its backward.
fn step(layer: &PowerNorm, xs: &Tensor) -> Result<()> {
    let xs = Var::from_tensor(xs)?;
    layer.forward(&xs)?.sqr()?.sum_all()?.backward()?;
    Ok(())
}

/// The warm-up, whose forwards wait for the other ranks, and what comes after, where backwards do.
fn before_and_after_the_warm_up() -> [PowerNormConfig; 2] {
    let warming_up = PowerNormConfig {
        warmup_steps: 100,
        ..1e-5.into()
    };
    [warming_up, warm()]
}

/// Ranks that disagree on C have an error each, and none hangs: on a GPU too, which compares them
/// once.
pub fn layers_of_different_sizes(rank: &Rank) {
    for config in before_and_after_the_warm_up() {
        let size = SIZE + rank.is_last() as usize;
        let layer = rank.join(layer_on(&rank.device, size, config, DType::F32).0);
        let before = state(&layer);
        let xs = Tensor::ones((3, size), DType::F32, &rank.device).unwrap();
        let text = message(step(&layer, &xs));
        assert!(text.contains("got ranks that differ"), "{text}");
        assert_eq!(state(&layer), before);
    }
}

/// A rank whose very first call is refused fails the step on all ranks, which then go on without
/// it.
pub fn a_rank_whose_first_call_fails(rank: &Rank) {
    for config in before_and_after_the_warm_up() {
        let (sharded, whole) = rank.layers(config, DType::F64);
        // The second time no rank has heard of the others yet.
        refuse_last(rank, &sharded);
        refuse_last(rank, &sharded);
        let mut data = rank.data(21);
        for what in ["first step", "second step"] {
            let batch = batch(&mut data, 6 * rank.ranks(), DType::F64);
            run(&whole, &batch, true);
            run(&sharded, &rank.share(&batch), true);
            Close::of(rank, DType::F64).state(what, rank, &sharded, &whole);
        }
    }
}

/// What a rank finds wrong with its own state fails the first step on all ranks, and the next one
/// is right.
pub fn a_rank_that_cannot_read_its_state(rank: &Rank) {
    for config in before_and_after_the_warm_up() {
        let [(sharded, varmap), (whole, _whole_varmap)] =
            [(); 2].map(|()| layer_on(&rank.device, SIZE, config, DType::F64));
        let sharded = rank.join(sharded);
        let set_iters_of_last = |t: i64| {
            if rank.is_last() {
                let t = Tensor::new(&[t], &CPU).unwrap();
                var(&varmap, "iters").set(&t).unwrap();
            }
        };
        let batch = batch(&mut rank.data(23), 5 * rank.ranks(), DType::F64);
        let share = rank.share(&batch);
        set_iters_of_last(-1);
        let text = message(step(&sharded, &share.xs));
        let expected = match rank.is_last() {
            true => "got -1",
            false => "got a rank whose call failed",
        };
        assert!(text.contains(expected), "{text}");
        set_iters_of_last(0);
        run(&whole, &batch, true);
        run(&sharded, &share, true);
        Close::of(rank, DType::F64).state("one step", rank, &sharded, &whole);
    }
}

/// A step that the last rank's layer refuses.
fn refuse_last(rank: &Rank, sharded: &PowerNorm) {
    let width = SIZE + rank.is_last() as usize;
    let refused = Tensor::ones((2, width), DType::F64, &rank.device).unwrap();
    let text = message(step(sharded, &refused));
    let expected = match rank.is_last() {
        true => "expected a last dimension of 12",
        false => "got a rank whose call failed",
    };
    assert!(text.contains(expected), "{text}");
}

/// A rank whose call is refused fails the step on all ranks, which then go on without it.
pub fn a_rank_whose_call_fails(rank: &Rank) {
    for config in before_and_after_the_warm_up() {
        let (sharded, whole) = rank.layers(config, DType::F64);
        let mut data = rank.data(16);
        let mut both = |what: &str| {
            let batch = batch(&mut data, 6 * rank.ranks(), DType::F64);
            run(&whole, &batch, true);
            run(&sharded, &rank.share(&batch), true);
            Close::of(rank, DType::F64).state(what, rank, &sharded, &whole);
        };
        both("before");
        // With a step that no backward has settled, which is not lost.
        let batch = batch(&mut rank.data(17), 2 * rank.ranks(), DType::F64);
        whole.forward(&batch.xs).unwrap();
        sharded.forward(&rank.share(&batch).xs).unwrap();
        refuse_last(rank, &sharded);
        Close::of(rank, DType::F64).state("without it", rank, &sharded, &whole);
        both("afterwards");
    }
}

/// Wherever in a model of several layers a rank is refused, the ranks stay together: after the
/// warm-up no layer takes the step; in it, those that came before do, as in one process.
pub fn a_model_of_which_a_call_fails(rank: &Rank) {
    const LAYERS: usize = 3;
    for (config, refused) in before_and_after_the_warm_up()
        .into_iter()
        .flat_map(|config| (0..LAYERS).map(move |k| (config, k)))
    {
        let layers: Vec<_> = (0..LAYERS)
            .map(|_| rank.layers(config, DType::F64))
            .collect();
        let (sharded, whole): (Vec<_>, Vec<_>) = layers.into_iter().unzip();
        let step = |layers: &[PowerNorm], batch: &Batch, refused: Option<usize>| -> Result<()> {
            let mut xs = Var::from_tensor(&batch.xs)?.as_tensor().clone();
            for (k, layer) in layers.iter().enumerate() {
                if refused == Some(k) {
                    xs = xs.narrow(1, 0, SIZE - 1)?;
                }
                xs = layer.forward(&xs)?.gelu()?;
            }
            (xs * &batch.dy)?.sum_all()?.backward()?;
            Ok(())
        };
        let mut data = rank.data(18);
        for t in 0..8 {
            let batch = batch(&mut data, 4 * rank.ranks(), DType::F64);
            let share = rank.share(&batch);
            if [2, 3, 5].contains(&t) {
                let here = rank.is_last().then_some(refused);
                assert!(step(&sharded, &share, here).is_err());
                if config.warmup_steps > t {
                    assert!(step(&whole, &batch, Some(refused)).is_err());
                }
                continue;
            }
            step(&sharded, &share, None).unwrap();
            step(&whole, &batch, None).unwrap();
            for (k, (sharded, whole)) in sharded.iter().zip(&whole).enumerate() {
                let what = format!("refused at {refused}: layer {k}, step {t}");
                Close::of(rank, DType::F64).state(&what, rank, sharded, whole);
            }
        }
    }
}

/// All at once: a residual, a scale that changes from step to step, and a recalibration between two
/// of them.
pub fn residuals_scales_recalibration(rank: &Rank) {
    for config in before_and_after_the_warm_up() {
        let scale = LossScale::default();
        let (sharded, whole) = rank.layers(config, DType::F64);
        let [sharded, whole] = [sharded, whole].map(|layer| layer.with_loss_scale(&scale));
        let mut data = rank.data(19);
        for t in 0..6 {
            scale.set([1., 256., 0.5][t % 3]).unwrap();
            let rows = 5 * rank.ranks();
            let [xs, other] = [(); 2].map(|()| batch(&mut data, rows, DType::F64));
            let step = |layer: &PowerNorm, xs: &Batch, other: &Batch| -> Result<Tensor> {
                let var = Var::from_tensor(&xs.xs)?;
                let (y, sum) = layer.forward_residual(&var, &other.xs)?;
                let loss = ((y * &xs.dy)?.sum_all()? + (sum * &other.dy)?.sum_all()?)?;
                Ok((loss * scale.get())?.backward()?.remove(&var).unwrap())
            };
            let ours = step(&sharded, &rank.share(&xs), &rank.share(&other)).unwrap();
            let theirs = step(&whole, &xs, &other).unwrap();
            let expected = theirs.narrow(0, rank.rank * 5, 5).unwrap();
            assert_relative("dx", &ours, &to_f64(&expected), 1e-12);
            if t == 3 {
                let _guards = [&sharded, &whole].map(|layer| layer.mode().recalibrate_scope());
                sharded.forward(&rank.share(&other).xs).unwrap();
                whole.forward(&other.xs).unwrap();
            }
            Close::of(rank, DType::F64).state(&format!("step {t}"), rank, &sharded, &whole);
        }
    }
}

/// A step that waits does not land on a state that was reset, or loaded, since its forward.
pub fn a_state_that_is_replaced(rank: &Rank) {
    let (sharded, whole) = rank.layers(warm(), DType::F64);
    let xs = Var::from_tensor(&batch(&mut rank.data(20), 5, DType::F64).xs).unwrap();
    let y = sharded.forward(&xs).unwrap();
    sharded.reset_running_stats().unwrap();
    y.sum_all().unwrap().backward().unwrap();
    assert_eq!(sharded.steps().unwrap(), 0);
    // ν takes the backward's: Λ, by the statistics of the forward. Every rank has the same rows.
    let y = whole.forward(&xs).unwrap();
    y.sum_all().unwrap().backward().unwrap();
    let (nu, expected) = (sharded.nu().unwrap(), whole.nu().unwrap());
    assert!(to_f64(&expected).iter().all(|&nu| nu != 0.));
    Close::of(rank, DType::F64).values("ν", &nu, &expected, 0..SIZE);

    let (sharded, varmap) = layer_on(&rank.device, SIZE, warm(), DType::F64);
    let sharded = rank.join(sharded);
    sharded.forward(&xs).unwrap();
    let loaded = Tensor::full(9., SIZE, &rank.device).unwrap();
    var(&varmap, "running_phi").set(&loaded).unwrap();
    var(&varmap, "iters")
        .set(&Tensor::new(&[100i64], &CPU).unwrap())
        .unwrap();
    sharded.forward(&xs).unwrap();
    assert_eq!(sharded.steps().unwrap(), 100);
    assert_same_bits("ψ²", &sharded.running_phi().unwrap(), &loaded);
}

/// A backward whose step the state could not take takes it when it is called again.
pub fn a_step_that_fails_is_tried_again(rank: &Rank) {
    let [(sharded, varmap), (whole, _whole_varmap)] =
        [(); 2].map(|()| layer_on(&rank.device, SIZE, warm(), DType::F64));
    let sharded = rank.join(sharded);
    let batch = batch(&mut rank.data(22), 5 * rank.ranks(), DType::F64);
    let share = rank.share(&batch);
    let xs = Var::from_tensor(&share.xs).unwrap();
    let ys = sharded.forward(&xs).unwrap();
    let loss = (ys * &share.dy).unwrap().sum_all().unwrap();
    let iters = |t: i64| {
        let t = Tensor::new(&[t], &CPU).unwrap();
        var(&varmap, "iters").set(&t).unwrap();
    };
    iters(-1);
    let text = message(loss.backward());
    assert!(text.contains("got -1"), "{text}");
    iters(0);
    loss.backward().unwrap();
    run(&whole, &batch, true);
    Close::of(rank, DType::F64).state("one step", rank, &sharded, &whole);
}

/// An engine that sums so many times more, and then fails.
struct Breaks {
    engine: Arc<dyn Communicator>,
    sums_left: AtomicUsize,
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
            Err(_) => Err(Error::msg("the engine is broken")),
        }
    }
}

/// Sums that fail on all ranks, of a forward, of a backward, and of a step that waited: the state
/// stays, and training goes on. What failed can be called again, but for the backward of a GPU
/// whose forward waited for it.
pub fn sums_that_fail(rank: &Rank) {
    let engine = Arc::new(Breaks {
        engine: rank.communicator.clone(),
        sums_left: AtomicUsize::new(usize::MAX),
    });
    let over = Ranks::new(engine.clone());
    let [warming_up, paper] = before_and_after_the_warm_up();
    let fairseq = PowerNormConfig {
        recipe: Recipe::Fairseq,
        ..paper
    };
    let on_cpu = rank.device.is_cpu();
    // The engine's sums in a backward, of which each but the announcements ends an exchange.
    for (config, sums_of_a_backward) in [(warming_up, 2), (paper, 2), (fairseq, 4)] {
        let (sharded, whole) = rank.layers(config, DType::F64);
        let sharded = sharded.with_ranks(&over);
        let close = Close::of(rank, DType::F64);
        let mut data = rank.data(23);
        let mut next = || batch(&mut data, 4 * rank.ranks(), DType::F64);
        let step = |batch: &Batch| {
            run(&whole, batch, true);
            run(&sharded, &rank.share(batch), true);
            close.state("a step", rank, &sharded, &whole);
        };
        let loss = |share: &Batch| -> Result<Tensor> {
            let xs = Var::from_tensor(&share.xs)?;
            (sharded.forward(&xs)? * &share.dy)?.sum_all()
        };
        let breaks_after = |sums: usize, call: &dyn Fn() -> String| {
            let before = state(&sharded);
            engine.sums_left.store(sums, Ordering::Relaxed);
            let text = call();
            engine.sums_left.store(usize::MAX, Ordering::Relaxed);
            assert!(text.contains("the engine is broken"), "{text}");
            assert_eq!(state(&sharded), before);
        };
        // The ranks of a GPU compare in their first.
        step(&next());

        let waits = config.warmup_steps == 0;
        for sums in 0..(if on_cpu { sums_of_a_backward } else { 1 }) {
            let batch = next();
            let share = rank.share(&batch);
            if !waits {
                breaks_after(sums, &|| message(loss(&share)));
            }
            let loss_of_share = loss(&share).unwrap();
            breaks_after(sums, &|| message(loss_of_share.backward()));
            if waits && !on_cpu {
                let before = state(&sharded);
                let text = message(loss_of_share.backward());
                assert!(
                    text.contains("expected a step that still has its sums"),
                    "{text}"
                );
                assert_eq!(state(&sharded), before);
            } else {
                loss_of_share.backward().unwrap();
                run(&whole, &batch, true);
            }
            step(&next());
        }

        if waits {
            // The next forward's beginning.
            let share = rank.share(&next());
            loss(&share).unwrap();
            breaks_after(0, &|| message(loss(&share)));
            step(&next());

            // A backward of another forward leaves the step that waits alone.
            let [first, second] = [next(), next()];
            let loss_of_first = loss(&rank.share(&first)).unwrap();
            whole.forward(&first.xs).unwrap();
            loss(&rank.share(&second)).unwrap();
            whole.forward(&second.xs).unwrap();
            breaks_after(0, &|| message(loss_of_first.backward()));
            step(&next());
        }
    }
}
