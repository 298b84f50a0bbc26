//! By default, a selection of settings in which every pair of values meets. With
//! `CANDLE_POWERNORM_PAIRS=full` in the environment, the whole grid, cut into shards: each shard is
//! a test that can be run by its name.

use crate::arguments::{Arguments, Offsets, Purpose, Wanted};
use crate::common::{DTYPES, Data, PARAMETERS, With, keep, tensor};
use candle::{DType, Result};
use candle_powernorm::{Recipe, Statistics};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::collections::HashSet;

const COLS: [usize; 11] = [1, 3, 31, 32, 33, 130, 512, 760, 1024, 4096, 8200];
/// Without rows nothing is launched.
const ROWS: [usize; 4] = [1, 2, 37, 1000];
const RECIPES: [Recipe; 2] = [Recipe::Paper, Recipe::Fairseq];

/// Rows that are padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Padding {
    NoMask,
    NoRow,
    SomeRows,
    AllRows,
    /// Some rows, and all of the last rank.
    ARank,
}
const PADDINGS: [Padding; 5] = {
    use Padding::*;
    [NoMask, NoRow, SomeRows, AllRows, ARank]
};

/// Groups of group scaling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Groups {
    None,
    One,
    /// As few as possible, but one.
    Few,
    /// Of as few channels as possible, but one.
    Narrow,
    /// Of the largest odd number of channels.
    Odd,
    /// One for each channel.
    All,
}
const GROUPS: [Groups; 6] = {
    use Groups::*;
    [None, One, Few, Narrow, Odd, All]
};

/// The phase of a layer's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    WarmUp,
    /// The step in which the recipes differ about the cumulative mean.
    WarmUpEnds,
    Running,
    /// PN-V, after the warm-up.
    Batch,
    Evaluation,
    Recalibration,
}
const PHASES: [Phase; 6] = {
    use Phase::*;
    [
        WarmUp,
        WarmUpEnds,
        Running,
        Batch,
        Evaluation,
        Recalibration,
    ]
};

const fn wanted(input: bool, weight: bool, bias: bool) -> Wanted {
    Wanted {
        input,
        weight,
        bias,
    }
}
const WANTED: [Wanted; 5] = [
    wanted(true, true, true),
    wanted(true, false, false),
    wanted(false, true, true),
    wanted(false, true, false),
    wanted(false, false, false),
];
const OFFSETS: [Offsets; 2] = [Offsets::AtTheStart, Offsets::AnElementIn];

/// A residual is added.
const RESIDUAL: [bool; 2] = [false, true];
const LOSS_SCALES: [f64; 2] = [1., 64.];

/// The shares of ranks in a batch; with few rows more of them are empty.
const RANKS: [&[usize]; 4] = [ONE_RANK, &[1, 1], &[3, 0, 1], &[0, 5, 1, 2]];
const ONE_RANK: &[usize] = &[1];

/// Defines a combination of a value on each axis.
macro_rules! axes {
    ($($axis:ident: $type:ty = $values:ident,)*) => {
        /// One combination.
        #[derive(Debug, Clone, Copy)]
        struct Case {
            $($axis: $type,)*
        }

        /// Values on each axis.
        const SIZES: [usize; [$(stringify!($axis)),*].len()] = [$($values.len()),*];

        impl Case {
            /// The case at a point of the grid.
            fn at([$($axis),*]: Point) -> Self {
                Self { $($axis: $values[$axis],)* }
            }
        }

        /// The values of each axis, by their indices, in kinds that stand for one another.
        struct Kinds {
            $($axis: Vec<Vec<usize>>,)*
        }

        impl Kinds {
            /// In the order of a point.
            fn in_order(self) -> [Vec<Vec<usize>>; SIZES.len()] {
                [$(self.$axis),*]
            }
        }
    };
}

axes! {
    dtypes: (DType, DType) = DTYPES,
    cols: usize = COLS,
    rows: usize = ROWS,
    padding: Padding = PADDINGS,
    groups: Groups = GROUPS,
    recipe: Recipe = RECIPES,
    phase: Phase = PHASES,
    parameters: (bool, bool) = PARAMETERS,
    wanted: Wanted = WANTED,
    offsets: Offsets = OFFSETS,
    residual: bool = RESIDUAL,
    loss_scale: f64 = LOSS_SCALES,
    ranks: &'static [usize] = RANKS,
}

/// A value on each axis, by its index among the values of that axis.
type Point = [usize; SIZES.len()];

/// Two values that meet, on an axis and on a later one.
//
// The order of the fields is the order in which `pairwise` looks for pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Pair {
    axis: usize,
    value: usize,
    later_axis: usize,
    later_value: usize,
}

/// The pairs of values in a point.
fn pairs(point: &Point) -> impl Iterator<Item = Pair> + '_ {
    let later = move |axis| (axis + 1..point.len()).map(move |later_axis| (axis, later_axis));
    let axes = (0..point.len()).flat_map(later);
    axes.map(|(axis, later_axis)| Pair {
        axis,
        value: point[axis],
        later_axis,
        later_value: point[later_axis],
    })
}

/// All pairs there are.
fn all_pairs() -> HashSet<Pair> {
    let mut pairs = HashSet::new();
    for (axis, &size) in SIZES.iter().enumerate() {
        for (later_axis, &later_size) in SIZES.iter().enumerate().skip(axis + 1) {
            for value in 0..size {
                for later_value in 0..later_size {
                    pairs.insert(Pair {
                        axis,
                        value,
                        later_axis,
                        later_value,
                    });
                }
            }
        }
    }
    pairs
}

/// The values of an axis, by their indices, in kinds: values with the same key are of one kind.
fn kinds_by<T, K: PartialEq>(values: &[T], key: impl Fn(&T) -> K) -> Vec<Vec<usize>> {
    let mut kinds: Vec<(K, Vec<usize>)> = vec![];
    for (index, value) in values.iter().enumerate() {
        let key = key(value);
        match kinds.iter_mut().find(|(of_kind, _)| *of_kind == key) {
            Some((_, indices)) => indices.push(index),
            None => kinds.push((key, vec![index])),
        }
    }
    kinds.into_iter().map(|(_, indices)| indices).collect()
}

/// Each value is a kind of its own.
fn apart<T>(values: &[T]) -> Vec<Vec<usize>> {
    (0..values.len()).map(|index| vec![index]).collect()
}

/// All values are of one kind.
fn alike<T>(values: &[T]) -> Vec<Vec<usize>> {
    kinds_by(values, |_| ())
}

/// Every combination of dtype, width, rows, mask, group scaling, recipe, statistics and parameters,
/// in random order, so that a part of them is a fair one. Where an axis is finer than that, a
/// random value of its kind stands for the others.
fn whole_grid() -> Vec<Point> {
    let kinds = Kinds {
        dtypes: kinds_by(&DTYPES, |&(input, _parameters)| input),
        cols: apart(&COLS),
        rows: apart(&ROWS),
        padding: kinds_by(&PADDINGS, |padding| match padding {
            Padding::NoMask | Padding::NoRow => "no row",
            Padding::SomeRows | Padding::ARank => "some rows",
            Padding::AllRows => "all rows",
        }),
        groups: kinds_by(&GROUPS, |groups| match groups {
            Groups::None => "none",
            Groups::One => "one",
            Groups::Few | Groups::Narrow | Groups::Odd | Groups::All => "several",
        }),
        recipe: apart(&RECIPES),
        phase: kinds_by(&PHASES, |phase| match phase {
            Phase::WarmUp | Phase::WarmUpEnds | Phase::Batch | Phase::Recalibration => "ψ_B²",
            Phase::Running | Phase::Evaluation => "ψ²",
        }),
        parameters: apart(&PARAMETERS),
        wanted: alike(&WANTED),
        offsets: alike(&OFFSETS),
        residual: alike(&RESIDUAL),
        loss_scale: alike(&LOSS_SCALES),
        ranks: alike(&RANKS),
    }
    .in_order();
    let mut rng = StdRng::seed_from_u64(2);
    let combinations = kinds.iter().map(Vec::len).product::<usize>();
    let mut points: Vec<Point> = (0..combinations)
        .map(|combination| {
            // The digits of `combination`, where an axis has as many digits as kinds.
            let mut digits = combination;
            std::array::from_fn(|axis| {
                let kinds_of_axis = &kinds[axis];
                let kind = &kinds_of_axis[digits % kinds_of_axis.len()];
                digits /= kinds_of_axis.len();
                kind[rng.random_range(0..kind.len())]
            })
        })
        .collect();
    points.shuffle(&mut rng);
    points
}

/// A random point with the pair `seed`. Axis by axis, it takes the value that adds the most of the
/// `missing` pairs.
fn candidate(rng: &mut StdRng, seed: Pair, missing: &HashSet<Pair>) -> Point {
    let mut point: Point = SIZES.map(|size| rng.random_range(0..size));
    point[seed.axis] = seed.value;
    point[seed.later_axis] = seed.later_value;
    for axis in 0..SIZES.len() {
        if axis == seed.axis || axis == seed.later_axis {
            continue;
        }
        // From a random one on, so that ties are broken at random.
        let start = rng.random_range(0..SIZES[axis]);
        let values = (0..SIZES[axis]).map(|k| (start + k) % SIZES[axis]);
        let gain = |&value: &usize| {
            let mut point = point;
            point[axis] = value;
            new_pairs(&point, missing)
        };
        point[axis] = values.max_by_key(gain).expect("an axis has values");
    }
    point
}

/// The number of missing pairs that are in a point.
fn new_pairs(point: &Point, missing: &HashSet<Pair>) -> usize {
    pairs(point).filter(|pair| missing.contains(pair)).count()
}

/// Points in which every pair of values meets: greedily, of random candidates the one with the most
/// new pairs.
fn pairwise() -> Vec<Point> {
    const CANDIDATES: usize = 30;
    let mut rng = StdRng::seed_from_u64(1);
    let mut missing = all_pairs();
    let mut points = vec![];
    while let Some(&seed) = missing.iter().min() {
        let candidates: Vec<Point> = (0..CANDIDATES)
            .map(|_| candidate(&mut rng, seed, &missing))
            .collect();
        let best = candidates
            .into_iter()
            .max_by_key(|point| new_pairs(point, &missing));
        let best = best.expect("there are candidates");
        for pair in pairs(&best) {
            missing.remove(&pair);
        }
        points.push(best);
    }
    points
}

impl Case {
    fn check(&self, twice: bool) -> Result<()> {
        let (affine, bias) = self.parameters;
        let wanted = Wanted {
            weight: self.wanted.weight && affine,
            bias: self.wanted.bias && affine && bias,
            ..self.wanted
        };
        // An evaluation is each rank's own.
        let ranks = match self.phase {
            Phase::Evaluation => ONE_RANK,
            _ => self.ranks,
        };
        let what = format!("{self:?}");
        let (_input, builder) = self.dtypes;
        self.arguments()
            .check(&what, builder, wanted, self.offsets, ranks, twice)?;
        Ok(())
    }

    fn arguments(&self) -> Arguments {
        let &Self {
            rows,
            cols,
            dtypes: (input, builder),
            ..
        } = self;
        let mut data = Data::new((rows * cols) as u64);
        let groups = match self.groups {
            Groups::None => None,
            Groups::One => Some(1),
            Groups::Few => Some(smallest_factor(cols)),
            Groups::Narrow => Some(cols / smallest_factor(cols)),
            Groups::Odd => Some(1 << cols.trailing_zeros()),
            Groups::All => Some(cols),
        };
        const WARM_UP: usize = 4;
        let statistics = match self.phase {
            Phase::Batch => Statistics::Batch,
            _ => Statistics::Running,
        };
        let config = (1e-5.with(|config| config.alpha_fwd = 0.8))
            .with_kind((self.recipe, statistics))
            .with_groups(groups)
            .with_parameters(self.parameters)
            .with_warm_up(WARM_UP);
        let mut mask = match self.padding {
            Padding::NoMask => None,
            Padding::NoRow => Some(vec![true; rows]),
            Padding::SomeRows | Padding::ARank => Some(data.mask(rows)),
            Padding::AllRows => Some(vec![false; rows]),
        };
        let mut arguments = Arguments::random(&mut data, config, rows, input, builder, cols);
        arguments.steps = match self.phase {
            Phase::WarmUp => 1,
            Phase::WarmUpEnds => WARM_UP - 1,
            _ => WARM_UP + 3,
        };
        arguments.purpose = match self.phase {
            Phase::Evaluation => Purpose::Evaluation,
            Phase::Recalibration => Purpose::Recalibration,
            _ => Purpose::Training,
        };
        arguments.loss_scale = self.loss_scale;
        if self.residual {
            arguments.residual = Some(tensor(&data.normal(rows * cols), &[rows, cols], input));
        }
        if self.padding == Padding::ARank && self.ranks.len() > 1 {
            let mask = mask.as_mut().expect("padding has a mask");
            let last_rank = self.ranks.len() - 1;
            mask[arguments.rows_of(self.ranks, last_rank)].fill(false);
        }
        arguments.keep = mask.map(|mask| keep(&mask, &[rows]));
        arguments
    }
}

fn smallest_factor(n: usize) -> usize {
    (2..=n)
        .find(|&factor| n.is_multiple_of(factor))
        .unwrap_or(1)
}

/// Shards of the cases, for the threads of the test harness and for parts of the whole grid.
const SHARDS: usize = 16;

fn check_shard(shard: usize) -> Result<()> {
    let full = std::env::var("CANDLE_POWERNORM_PAIRS").is_ok_and(|selection| selection == "full");
    let cases = match full {
        true => whole_grid(),
        false => pairwise(),
    };
    let mut compared = 0;
    for point in cases.into_iter().skip(shard).step_by(SHARDS) {
        Case::at(point).check(!full)?;
        compared += 1;
    }
    assert!(compared > 0);
    Ok(())
}

#[test]
fn every_pair_is_selected() {
    let mut missing = all_pairs();
    for point in pairwise() {
        for pair in pairs(&point) {
            missing.remove(&pair);
        }
    }
    assert!(missing.is_empty(), "{missing:?}");
}

macro_rules! shards {
    ($($name:ident = $shard:expr;)*) => {
        $(#[test]
        fn $name() -> Result<()> {
            check_shard($shard)
        })*
    };
}

shards! {
    shard_00 = 0; shard_01 = 1; shard_02 = 2; shard_03 = 3;
    shard_04 = 4; shard_05 = 5; shard_06 = 6; shard_07 = 7;
    shard_08 = 8; shard_09 = 9; shard_10 = 10; shard_11 = 11;
    shard_12 = 12; shard_13 = 13; shard_14 = 14; shard_15 = 15;
}
