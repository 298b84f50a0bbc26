//! The launches of a call in plain numbers: each kernel's grid, block and shared memory, and the
//! layout of the memory that kernels hand each other.
//!
//! This file calls nothing of CUDA. `step.rs` fills the kernels' arguments.

use super::cut::{Cut, Extent, Pass, WARP};
use super::params::{when, Address, FactorOrigin, Tiling};
use crate::config::{ForwardKind, Recipe};
use crate::device::sums_dtype;
use crate::error::Error;
use candle::DType;
use std::fmt;

/// An entry point of `kernels/power_norm.cu`. It displays as its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// The name of its function there.
    pub body: &'static str,
    pub dtype: DType,
    /// N of the function, if it has one.
    pub pieces: Option<usize>,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}_{}", self.body, self.dtype.as_str())?;
        match self.pieces {
            Some(pieces) => write!(f, "_{pieces}"),
            None => Ok(()),
        }
    }
}

/// The blocks of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    pub kernel: Kernel,
    /// Blocks along x (columns) and y (rows).
    pub grid: (u32, u32),
    /// Threads along x (columns) and y (rows).
    pub block: (u32, u32),
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// For the kernels of channels: the most threads of a block, its lanes, and how many chunks a
/// thread adds while threads are left. A lane is a channel, and the block's rows add chunks side by
/// side. Few lanes make many blocks. Eight lanes read whole 32-byte sectors.
const CHANNEL_THREADS: u32 = 1024;
const CHANNEL_LANES: [u32; 2] = [8, 32];
const CHANNEL_CHUNKS: u32 = 4;

/// Threads of a block that reduces wide groups, and the most blocks; each takes further groups in
/// turn.
const GROUP_BLOCK: usize = 256;
const GROUP_BLOCKS: usize = 1 << 16;

/// The fewest bytes that a GPU's memory moves. Parts of an allocation begin at multiples of them.
const SECTOR: u64 = 32;

/// Hands out the parts of an allocation, one after another.
struct Parts {
    next: Address,
}

impl Parts {
    /// The address of a part of so many bytes, or 0 if the part is not there.
    fn take(&mut self, is_there: bool, bytes: u64) -> Address {
        let start = self.next;
        if is_there {
            self.next += bytes.next_multiple_of(SECTOR);
        }
        when(is_there, start)
    }
}

/// A forward, or its backward. There is at least one row, except in a training step whose batch is
/// shared with other processes.
#[derive(Debug, Clone, Copy)]
pub struct LaunchPlan {
    pub recipe: Recipe,
    pub kind: ForwardKind,
    /// The forward has a mask.
    pub masked: bool,
    /// The forward divides by D. If not, D is 1.
    pub divides: bool,
    pub extent: Extent,
    pub pass: Pass,
    pub cut: Cut,
}

/// Addresses inside a forward's `saved`. A part that is not there has address 0.
///
/// The parts up to the factors, of A each, are for the backward too. After those come the sums of a
/// training forward's chunks of rows. They are not needed after the step of ψ². An allocation of
/// their own would take the host a seventh of a forward, by softgpu's stopwatch. So they stay until
/// the backward: 256 KiB for 256x1024 in bf16, 2 MiB for 2048x4096.
#[derive(Debug, Clone, Copy, Default)]
pub struct Saved {
    /// There if the forward divides by D.
    pub inv_rms: Address,
    /// This, ψ_B² and the count are there in training.
    pub gamma: Address,
    pub batch_phi: Address,
    pub count: Address,
    /// There with group scaling.
    pub factors: Address,
    /// There with a mask, in training.
    pub kept: Address,
    /// There in training.
    pub partials: Address,
    /// There in training, if Γ runs over padded rows too.
    pub all_partials: Address,
    pub end: Address,
}

/// Addresses inside a backward's `workspace`.
#[derive(Debug, Clone, Copy)]
pub struct Workspace {
    pub lambda: Address,
    pub partials: Address,
    /// There if groups are wider than a block.
    pub dots: Address,
    pub end: Address,
}

impl LaunchPlan {
    /// The plan of a forward without a mask. Refuses a shape that the kernels' numbers have no room
    /// for.
    pub fn new(extent: Extent, recipe: Recipe, kind: ForwardKind) -> Result<Self, Error> {
        Ok(Self {
            recipe,
            kind,
            masked: false,
            divides: true,
            extent,
            pass: Pass::Forward,
            cut: checked_cut(&extent, Pass::Forward)?,
        })
    }

    /// The plan of the backward of this forward.
    pub fn of_backward(&self) -> Result<Self, Error> {
        Ok(Self {
            pass: Pass::Backward,
            cut: checked_cut(&self.extent, Pass::Backward)?,
            ..*self
        })
    }

    /// The input's gradient is exact, and is made at last, by Λ.
    pub fn is_exact(&self) -> bool {
        self.kind == ForwardKind::BatchStatistic && self.recipe == Recipe::Paper
    }

    /// Chunks of rows, each of which has sums of its own.
    pub fn chunks(&self) -> u32 {
        self.cut.chunks as u32
    }

    /// Groups are wider than a block. A launch of their own reduces them before the rows' launch.
    pub fn has_wide_groups(&self) -> bool {
        self.cut.group_scaling == FactorOrigin::Given
    }

    /// The sums that the pass hands out for one process.
    pub fn sums(&self) -> usize {
        match self.pass {
            Pass::Forward => self.recipe.square_sums() * (self.extent.cols + 1),
            Pass::Backward => self.extent.cols,
        }
    }

    /// The layout of a forward's `saved`. A backward has no chunks of the forward's rows.
    pub fn saved(&self, start: Address) -> Saved {
        let row = self.row_bytes();
        let chunks = u64::from(self.chunks());
        let trains = self.kind.is_training();
        let sums = trains && self.pass == Pass::Forward;
        let all_sums = sums && self.masked && self.recipe == Recipe::Fairseq;
        let mut parts = Parts { next: start };
        Saved {
            inv_rms: parts.take(self.divides, row),
            gamma: parts.take(trains, row),
            batch_phi: parts.take(trains, row),
            count: parts.take(trains, self.sum_bytes()),
            factors: parts.take(self.extent.groups.is_some(), self.group_bytes()),
            kept: parts.take(sums && self.masked, chunks * 8),
            partials: parts.take(sums, chunks * row),
            all_partials: parts.take(all_sums, chunks * row),
            end: parts.next,
        }
    }

    /// The layout of a backward's `workspace`.
    pub fn workspace(&self, start: Address) -> Workspace {
        let row = self.row_bytes();
        let mut parts = Parts { next: start };
        Workspace {
            lambda: parts.take(true, row),
            partials: parts.take(true, 2 * u64::from(self.chunks()) * row),
            dots: parts.take(self.has_wide_groups(), self.group_bytes()),
            end: parts.next,
        }
    }

    /// Bytes of a number for each channel.
    fn row_bytes(&self) -> u64 {
        self.extent.cols as u64 * self.sum_bytes()
    }

    /// Bytes of a number for each row and group.
    fn group_bytes(&self) -> u64 {
        (self.extent.groups.unwrap_or(0) * self.extent.rows) as u64 * self.sum_bytes()
    }

    fn sum_bytes(&self) -> u64 {
        self.sums_dtype().size_in_bytes() as u64
    }

    /// A of the kernels.
    pub fn sums_dtype(&self) -> DType {
        sums_dtype(self.extent.dtype)
    }

    /// Every kernel that the pass may launch, the step of the state included.
    pub fn kernels(&self, over_ranks: bool) -> Vec<Kernel> {
        let (update, updates) = match self.pass {
            Pass::Forward => ("update_phi", self.kind.is_training()),
            Pass::Backward => ("update_nu", true),
        };
        [
            (self.has_wide_groups(), self.groups_launch().0),
            (self.extent.rows > 0, self.rows_launch(1, 0).0),
            (over_ranks, self.channels_launch("sum_partials")),
            (updates, self.channels_launch(update)),
        ]
        .into_iter()
        .filter_map(|(launches, launch)| launches.then_some(launch.kernel))
        .collect()
    }

    /// The walk over the rows, which reads `arrays` arrays of rows and takes `sums` sums of each
    /// channel.
    pub fn rows_launch(&self, arrays: usize, sums: usize) -> (Launch, Tiling) {
        let (tiling, shared_bytes) = self.extent.shared(&self.cut, arrays, sums);
        let launch = Launch {
            kernel: Kernel {
                body: match self.pass {
                    Pass::Forward => "normalize",
                    Pass::Backward => "normalize_bwd",
                },
                dtype: self.extent.dtype,
                pieces: Some(self.cut.pieces),
            },
            grid: (self.cut.tiles as u32, self.cut.chunks as u32),
            block: (self.cut.lanes as u32, self.cut.rows as u32),
            shared_bytes,
        };
        (launch, tiling)
    }

    /// The reduction of wide groups, a block for each.
    pub fn groups_launch(&self) -> (Launch, Tiling) {
        let groups = self.extent.rows * self.extent.groups.unwrap_or(1);
        let launch = Launch {
            kernel: Kernel {
                body: match self.pass {
                    Pass::Forward => "group_factors",
                    Pass::Backward => "group_dots",
                },
                dtype: self.extent.dtype,
                pieces: None,
            },
            grid: (groups.min(GROUP_BLOCKS) as u32, 1),
            block: (GROUP_BLOCK as u32, 1),
            shared_bytes: self.extent.exchanged_bytes(1) as u32,
        };
        (launch, self.cut.tiling)
    }

    /// `body`, with a lane for each channel, which adds up the sums of chunks.
    pub fn channels_launch(&self, body: &'static str) -> Launch {
        let [few, many] = CHANNEL_LANES;
        let cols = self.extent.cols as u32;
        let wide = cols.div_ceil(many) as usize >= self.extent.limits.multiprocessors;
        let lanes = if wide { many } else { few };
        let side_by_side = (self.chunks() / CHANNEL_CHUNKS)
            .next_power_of_two()
            .clamp(WARP as u32 / few, CHANNEL_THREADS / lanes);
        Launch {
            kernel: Kernel {
                body,
                dtype: self.sums_dtype(),
                pieces: None,
            },
            grid: (cols.div_ceil(lanes), 1),
            block: (lanes, side_by_side),
            // Half of the threads hand over two sums of 8 bytes at most, in the room of three.
            shared_bytes: lanes * side_by_side / 2 * 24,
        }
    }
}

/// Cuts a pass. Kernels count channels, and the rows of a chunk, in 32 bits.
fn checked_cut(extent: &Extent, pass: Pass) -> Result<Cut, Error> {
    let Extent { rows, cols, .. } = *extent;
    let too_large = Error::TooLarge { rows, cols };
    if i32::try_from(cols).is_err() {
        return Err(too_large);
    }
    let cut = extent.cut(pass);
    match i32::try_from(cut.tiling.chunk_rows) {
        Ok(_) => Ok(cut),
        Err(_) => Err(too_large),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cut::tests::extent;
    use super::*;
    use std::collections::BTreeSet;

    fn plan(
        dtype: DType,
        shape: [usize; 2],
        groups: Option<usize>,
        multiprocessors: usize,
    ) -> Result<[LaunchPlan; 2], Error> {
        let extent = Extent {
            groups,
            ..extent(dtype, shape, multiprocessors, 227)
        };
        let kind = ForwardKind::RunningStatistic;
        let forward = LaunchPlan::new(extent, Recipe::Paper, kind)?;
        Ok([forward, forward.of_backward()?])
    }

    /// Plans launch the entry points of `kernels/power_norm.cu`, each of them, and nothing else.
    #[test]
    fn kernels_are_the_entry_points() {
        let mut launched = BTreeSet::new();
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            for cols in [1, 2, 4, 8, 16, 32, 64, 1024, 1 << 16] {
                for groups in [None, Some(1)] {
                    for plan in plan(dtype, [100, cols], groups, 132).unwrap() {
                        launched.extend(plan.kernels(true).iter().map(Kernel::to_string));
                    }
                }
            }
        }
        let source = include_str!("../../../kernels/power_norm.cu");
        let defined = source.lines().filter_map(|line| {
            let entry = line.trim().strip_prefix("DEFINE(")?;
            Some(entry.split(',').next()?.to_owned())
        });
        assert_eq!(launched, defined.collect());
    }

    #[test]
    fn kernels_for_8_0_and_later_copy() {
        let copies = |target: &str| super::super::kernels_copy(&format!(".target {target}\n"));
        assert!(!copies("sm_75") && copies("sm_80") && copies("sm_90a") && copies("sm_100a"));
    }

    /// Numbers that a kernel has no room for are refused, and the largest that fit are not.
    #[test]
    fn shapes_beyond_32_bits_are_refused() {
        let plan = |rows, cols| plan(DType::F32, [rows, cols], None, 1);
        plan(4, (1 << 31) - 1).unwrap();
        plan(1 << 30, 1).unwrap();
        for (rows, cols) in [(4, 1 << 31), (1 << 31, 1), (usize::MAX >> 8, 1)] {
            let error = plan(rows, cols).unwrap_err().to_string();
            let shape = format!("{rows} rows of {cols} channels");
            assert!(error.contains(&shape), "{error}");
        }
    }
}
