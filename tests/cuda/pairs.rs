//! By default, a selection of settings in which every pair of values meets. With
//! `CANDLE_POWERNORM_PAIRS=full` in the environment, the whole grid, cut into shards: each shard is
//! a test that can be run by its name.

use crate::arguments::{Arguments, Offsets, Purpose, Wanted};
use crate::common::{keep, tensor, Data, With, DTYPES, PARAMETERS};
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
const RANKS: [&[usize]; 4] = [&[1], &[1, 1], &[3, 0, 1], &[0, 5, 1, 2]];

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

/// A value on each axis, by its index.
type Point = [usize; SIZES.len()];

/// A pair of values: the first axis and its value, the second and its.
type Pair = (usize, usize, usize, usize);

/// The pairs of values in a point.
fn pairs(point: &Point) -> impl Iterator<Item = Pair> + '_ {
    (0..point.len())
        .flat_map(move |a| (a + 1..point.len()).map(move |b| (a, point[a], b, point[b])))
}

/// All pairs there are.
fn all_pairs() -> HashSet<Pair> {
    let axes = 0..SIZES.len();
    axes.clone()
        .flat_map(|a| axes.clone().filter(move |&b| b > a).map(move |b| (a, b)))
        .flat_map(|(a, b)| {
            (0..SIZES[a]).flat_map(move |i| (0..SIZES[b]).map(move |j| (a, i, b, j)))
        })
        .collect()
}

/// Every combination of dtype, width, rows, mask, group scaling, recipe, statistics and parameters,
/// in random order, so that a part of them is a fair one. Where an axis is finer than that, a
/// random value of its kind stands for the others.
fn whole_grid() -> Vec<Point> {
    fn apart<T>(values: &[T]) -> Vec<Vec<usize>> {
        (0..values.len()).map(|value| vec![value]).collect()
    }
    fn alike<T>(values: &[T]) -> Vec<Vec<usize>> {
        vec![(0..values.len()).collect()]
    }
    let kinds = Kinds {
        // By the input's dtype, whatever the parameters'.
        dtypes: vec![vec![0], vec![1, 2], vec![3, 4], vec![5, 6]],
        cols: apart(&COLS),
        rows: apart(&ROWS),
        padding: vec![vec![0, 1], vec![2, 4], vec![3]],
        // None, one, several.
        groups: vec![vec![0], vec![1], vec![2, 3, 4, 5]],
        recipe: apart(&RECIPES),
        phase: vec![vec![0, 1, 3, 5], vec![2, 4]],
        parameters: apart(&PARAMETERS),
        wanted: alike(&WANTED),
        offsets: alike(&OFFSETS),
        residual: alike(&RESIDUAL),
        loss_scale: alike(&LOSS_SCALES),
        ranks: alike(&RANKS),
    }
    .in_order();
    let mut rng = StdRng::seed_from_u64(2);
    let len = kinds.iter().map(Vec::len).product::<usize>();
    let mut points: Vec<Point> = (0..len)
        .map(|index| {
            let mut rest = index;
            std::array::from_fn(|axis| {
                let kind = &kinds[axis][rest % kinds[axis].len()];
                rest /= kinds[axis].len();
                kind[rng.random_range(0..kind.len())]
            })
        })
        .collect();
    points.shuffle(&mut rng);
    points
}

/// Points in which every pair of values meets: greedily, of random candidates the one with the most
/// new pairs.
fn pairwise() -> Vec<Point> {
    const CANDIDATES: usize = 30;
    let mut rng = StdRng::seed_from_u64(1);
    let mut missing = all_pairs();
    let mut points = vec![];
    while let Some(&seed) = missing.iter().min() {
        let candidate = |rng: &mut StdRng| {
            let mut point: Point = SIZES.map(|size| rng.random_range(0..size));
            let (a, i, b, j) = seed;
            (point[a], point[b]) = (i, j);
            // Axis by axis, the value that adds the most.
            for axis in (0..SIZES.len()).filter(|&axis| axis != a && axis != b) {
                let start = rng.random_range(0..SIZES[axis]);
                let values = (0..SIZES[axis]).map(|k| (start + k) % SIZES[axis]);
                let gain = |value: usize| {
                    let mut point = point;
                    point[axis] = value;
                    let new = pairs(&point).filter(|pair| missing.contains(pair));
                    new.count()
                };
                point[axis] = values.max_by_key(|&value| gain(value)).expect("a value");
            }
            point
        };
        let candidates: Vec<Point> = (0..CANDIDATES).map(|_| candidate(&mut rng)).collect();
        let gain = |point: &Point| pairs(point).filter(|pair| missing.contains(pair)).count();
        let best = candidates.into_iter().max_by_key(gain).expect("one");
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
            Phase::Evaluation => RANKS[0],
            _ => self.ranks,
        };
        let (what, (_, builder)) = (format!("{self:?}"), self.dtypes);
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
        if let (Padding::ARank, [_, .., _], Some(mask)) = (self.padding, self.ranks, &mut mask) {
            mask[arguments.rows_of(self.ranks, self.ranks.len() - 1)].fill(false);
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
