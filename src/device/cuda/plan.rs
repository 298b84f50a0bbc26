//! The launches of a forward and of a backward, in plain numbers: blocks, threads, shared memory,
//! and the layout of the memory that kernels share. Nothing here calls CUDA. `step.rs` queues what
//! this file plans.
//!
//! # How a pass over the rows is cut
//!
//! A pass reads an array of rows by columns, `[rows, cols]`, and does two things at once. It writes
//! an array of the same shape, and for each column it adds up a number over the rows. If there is
//! group scaling, it first needs a sum over each group of adjacent columns in each row.
//!
//! The words, from small to large:
//!
//! - **Piece**: 16 bytes of adjacent columns, which is the most that a thread can read at once. It
//!   has V elements: 8 of bf16 or f16, 4 of f32, 2 of f64.
//! - **Lane**: a thread's place along x in its block (`threadIdx.x`), and the columns that go with
//!   it. A lane owns N pieces, all in one group. N is 1, 2 or 4. Each N has entry points of its
//!   own, so that a thread keeps its pieces, and a sum for each of their elements, in registers.
//! - **Span**: the number of adjacent lanes that share a group. A group's pieces are dealt to them
//!   round-robin, so that lanes read adjacent pieces at the same time. If the span is at most a
//!   warp, the lanes add up their group with shuffles, otherwise in shared memory.
//! - **Tile**: all columns of a block. A tile has several groups, one group, or, if a group is
//!   wider than a block, a part of one. In the last case a launch of its own reduces the groups
//!   first.
//! - **Row of threads**: the threads of a block that have the same `threadIdx.y`. They work on the
//!   same row. A block has a power of two of them, because it adds up their sums in a tree.
//! - **Chunk**: the adjacent rows of a block. They are dealt to the rows of threads round-robin:
//!   one row each is an iteration of the kernel's loop. A chunk leaves one partial sum for each
//!   column, and a second launch adds up the partial sums of all chunks.
//! - **Stage** and **ring**: the memory of an SM answers after hundreds of cycles, so a thread
//!   prefetches. From compute capability 8.0 on, the GPU copies rows into shared memory by itself
//!   (`cp.async`). A stage is the shared memory of a warp for one row of each array that the launch
//!   reads, and the stages of a warp form a ring: as soon as a row has been read, the row that
//!   comes that many iterations later is copied into its stage. A thread copies only what it reads
//!   itself, so it waits for its own copies and for no barrier. Older GPUs, and groups whose length
//!   is no multiple of V, have no ring: threads load the next row into registers.
//!
//! A block (x, y) of the grid owns tile x and chunk y.
//!
//! # Why there is one block per multiprocessor
//!
//! Usually several blocks per multiprocessor (SM) hide the latency of memory: while one waits,
//! another works. Here the ring does that, so one block is enough, and it may use all registers:
//! 512 threads of 128. More blocks would only mean more traffic, because each chunk has a row of
//! partial sums, which is written and read again, and each block reads its columns' coefficients.
//! So there are as many chunks as give each SM one block, or one chunk if there are more tiles than
//! SMs. All blocks run at the same time, and a pass takes as long as its longest chunk. That is why
//! all chunks except the last have the same number of rows.
//!
//! # Views
//!
//! A pass that normalizes rows by themselves, without a residual, reads some views of x in place
//! ([`Extent::of_view`]). It takes two more words:
//!
//! - **Head**: C adjacent columns of a row that has several times C, which are normalized by
//!   themselves. To the kernels heads are groups of one row. Each head leaves partial sums of its
//!   own, and the second launch adds them up over chunks and heads.
//! - **Run**: rows that follow each other in one stride, where not all rows do. A chunk is a part of
//!   one run, so that a thread comes to its next row by one addition.
//!
//! # An example
//!
//! A forward of 5000×768 in bf16 with one group, on an H100: 132 SMs, 227 KiB of shared memory.
//!
//! - A row has 768 / 8 = 96 pieces. With N = 4 the group spans 24 lanes. That fits into a warp, so
//!   a row of threads is one warp, of which 8 lanes have nothing to do. There is one tile.
//! - 132 SMs for one tile make 132 chunks, of ⌈5000 / 132⌉ = 38 rows. The last has the 22 rows that
//!   are left.
//! - A block has 8 rows of threads, that is 256 threads, which need 5 iterations: 8 + 8 + 8 + 8 + 6
//!   rows. With 16 rows of threads there would be 3 iterations, the last of which would leave 10 of
//!   16 idle. That is more than an eighth of the chunk ([`IDLE_SHARE`]).
//! - A stage is 32 lanes × 4 pieces × 16 bytes = 2048 bytes. A ring has 3 stages, 6144 bytes, and
//!   8 warps have 49,152 bytes of rings.
//! - Each lane has two coefficients for each of its columns, γ/D and β, in f32: 16 pieces. One more
//!   piece, never used, makes the number odd, so that neighbouring lanes use different banks of
//!   shared memory. 32 lanes × 17 × 16 bytes = 8704 bytes, so a block has 57,856 bytes in all.
//! - The launch is `normalize_bf16_4`, grid 1×132, blocks of 32×8. Then `update_phi_f32` adds up
//!   132 partial sums for each channel, in 96 blocks of 8 channels × 64 rows of threads.
//!
//! The backward keeps two sums for each element, of dy x̃ and of dy, so N = 2 and the group spans
//! 48 lanes, which are rounded up to whole warps: 64. Its chunks are the same.
//! `normalize_bwd_bf16_2` has grid 1×132 and blocks of 64×8 with 108,544 bytes of shared memory:
//! rings of 16 warps × 3 stages × 2 arrays × 1024 bytes, 9216 bytes of coefficients, and 1024 bytes
//! in which the two warps of each row of threads exchange their sums.

use super::params::{
    ANNOUNCED, Address, CHANNEL_THREADS, Dtype, GROUP_THREADS, GroupDots, GroupRmsInv,
    GroupRmsOrigin, HELD_PIECES_BWD, HELD_VALUES, Kernel, LAYER_NORM_MEANS_BWD,
    LAYER_NORM_STATISTICS, LayerNorm, LayerNormBwd, LayerNormDots, LayerNormStatistics, MAX_STAGES,
    Normalize, NormalizeBwd, NormalizeBwdParams, NormalizeParams, PIECE_BYTES, ROW_THREADS,
    SumPartials, SumPartialsParams, Tiling, UpdateNu, UpdateNuParams, UpdatePhi, UpdatePhiParams,
    WARP, coefficients_bytes, exchanged_bytes, lane_coefficients, padded_sums, rings_bytes,
    sums_bytes, when,
};
use crate::config::{ForwardKind, Recipe};
use crate::device::pass::RowNorm;
use crate::error::Error;
use std::fmt;
use std::marker::PhantomData;

/// The most lanes of a block, unless a group of the group scaling needs more. With more lanes a
/// block would have fewer rows, and with fewer lanes it would read shorter runs of each row.
const TILE_LANES: usize = 64;

/// The fewest rows of a chunk, and of a thread in a block that has several rows of threads.
#[derive(Debug, Clone, Copy)]
struct Fewest {
    chunk_rows: usize,
    thread_rows: usize,
}

/// In a pass that takes sums. Beside so many rows, the sums of a chunk are little traffic. A thread
/// prefetches one row while it works on another.
const FEWEST: Fewest = Fewest {
    chunk_rows: 4,
    thread_rows: 2,
};

/// Without sums, as in an evaluation's forward, smaller chunks pay off: a small input fills more
/// multiprocessors. Two rows, because each block also reads the coefficients of its columns, and a
/// chunk of one row would read more of those than of data. Both rows are prefetched while the block
/// computes its coefficients, and each has a thread of its own, which ends sooner.
const FEWEST_OF_EVALUATION: Fewest = Fewest {
    chunk_rows: 2,
    thread_rows: 1,
};

/// The most arrays of rows that a pass reads: x and a residual, or x and dy.
///
/// A forward without a residual leaves room for one too. So it is cut as the forward with a
/// residual is, and an addition followed by a forward gives the bits of the fused call.
const MAX_ARRAYS: usize = 2;

/// A block gets no more rows of threads than leave room for this many prefetched rows of an array:
/// two rows of each array.
const MIN_PREFETCHED: usize = 2 * MAX_ARRAYS;

/// The fewest rows of a run, because each run has blocks of its own.
const MIN_RUN_ROWS: usize = 16;

/// The most blocks along y.
const MAX_CHUNKS: usize = u16::MAX as usize;

/// In the last iteration over a chunk some threads may have no row. A block gets twice the rows of
/// threads only if at most one in this many thread iterations is idle, or while it has at most half
/// of [`ROW_THREADS`]: 256 threads took at most 2 % longer than 512 on a simulated GPU.
const IDLE_SHARE: usize = 8;

/// Lanes of a block that adds up the sums of chunks, one channel each: few lanes make more blocks,
/// and eight lanes of 4 bytes read a whole 32-byte sector. The second number is for wide layers,
/// which have blocks enough.
const CHANNEL_LANES: [usize; 2] = [8, 32];

/// Chunks that a thread adds up, while a block can have more threads.
const CHANNEL_CHUNKS: usize = 4;

/// Bytes that a thread of such a block hands over: up to two sums of 8 bytes.
const CHANNEL_SUMS_BYTES: usize = padded_sums(2) * size_of::<f64>();

/// The most blocks of a launch that reduces wide groups. A block reduces further groups in turn.
const GROUP_BLOCKS: usize = 1 << 16;

/// The parts of an allocation begin at multiples of this number of bytes, the smallest unit that a
/// GPU's memory reads or writes.
const SECTOR: u64 = 32;

/// A part of `bytes` bytes ends where the next one may begin.
pub fn is_whole_sectors(bytes: usize) -> bool {
    (bytes as u64).is_multiple_of(SECTOR)
}

/// The limits of a GPU that launches are fitted to.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub multiprocessors: usize,
    /// The most shared memory of a block: at least 99 KiB if `copies`.
    pub shared_bytes: usize,
    /// The kernels copy rows into shared memory asynchronously, by `cp.async`. If not, they load
    /// rows into registers.
    pub copies: bool,
}

/// Where the rows of x lie, in elements. Packed rows have one head, one run, and the columns as
/// their stride.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XLayout {
    /// Heads of a row: adjacent parts that are normalized by themselves.
    pub heads: usize,
    /// From a row to the next one in its run.
    pub stride: usize,
    /// Runs of equally many rows.
    pub runs: usize,
    /// Runs that follow each other in the stride `inner`. The next so many begin `outer` further.
    pub inner_runs: usize,
    pub inner: usize,
    pub outer: usize,
}

/// The rows of a pass, and the GPU that runs it.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    pub dtype: Dtype,
    pub rows: usize,
    /// Of all heads.
    pub cols: usize,
    pub x: XLayout,
    pub norm: RowNorm,
    pub limits: Limits,
}

impl Extent {
    /// The extent of packed rows.
    pub fn packed(dtype: Dtype, rows: usize, cols: usize, norm: RowNorm, limits: Limits) -> Self {
        let x = XLayout {
            heads: 1,
            stride: cols,
            runs: 1,
            inner_runs: 1,
            inner: 0,
            outer: 0,
        };
        Self {
            dtype,
            rows,
            cols,
            x,
            norm,
            limits,
        }
    }

    /// The extent of a view of these dimensions and strides, in elements, if the kernels read it
    /// where it is. The last dimension has the channels.
    ///
    /// Take the queries in the output of a projection to queries, keys and values of 4 heads each,
    /// `[2, 50, 4, 64]` with strides `[38400, 768, 64, 1]`. The heads are adjacent, and the other
    /// dimensions have one stride between them: 100 rows of 4 heads, 768 elements apart. With the
    /// heads before the tokens, `[2, 4, 50, 64]`, rows of one head come in 8 runs of 50: 4 inner
    /// runs, 64 elements apart, in each of 2 outer ones.
    pub fn of_view(
        dtype: Dtype,
        (dims, strides): (&[usize], &[usize]),
        norm: RowNorm,
        limits: Limits,
    ) -> Option<Self> {
        let (&channels, outer) = dims.split_last()?;
        if channels > 1 && strides.last() != Some(&1) {
            return None;
        }
        // How many rows lie in one stride, and which, from the back.
        let mut levels: Vec<(usize, usize)> = vec![];
        for (&dim, &stride) in outer
            .iter()
            .zip(strides)
            .rev()
            .filter(|(dim, _)| **dim != 1)
        {
            match levels.last_mut() {
                Some((rows, step)) if stride == *rows * *step => *rows *= dim,
                _ => levels.push((dim, stride)),
            }
        }
        let all: usize = levels.iter().map(|(rows, _)| rows).product();
        let of = |heads: usize, levels: &[(usize, usize)]| {
            let [rows, inner, outer] = [0, 1, 2].map(|k| levels.get(k).copied().unwrap_or((1, 0)));
            let x = XLayout {
                heads,
                stride: rows.1,
                runs: inner.0 * outer.0,
                inner_runs: inner.0,
                inner: inner.1,
                outer: outer.1,
            };
            let extent = Self {
                x,
                ..Self::packed(dtype, all / heads, heads * channels, norm, limits)
            };
            (levels.len() <= 3 && extent.is_read_in_place()).then_some(extent)
        };
        let by_rows = || of(1, &levels);
        match levels[..] {
            [(heads, stride), ref rest @ ..] if stride == channels => {
                let by_heads = || of(heads, rest);
                // Each head of a row has sums of its own.
                match heads <= all / heads {
                    true => by_heads().or_else(by_rows),
                    false => by_rows().or_else(by_heads),
                }
            }
            _ => by_rows(),
        }
    }

    /// x is packed.
    pub fn is_packed(&self) -> bool {
        self.x.heads == 1 && self.x.runs == 1 && self.x.stride == self.cols
    }

    /// The kernels can read x where it is: all pieces are whole, blocks own whole groups, and runs are
    /// long enough.
    fn is_read_in_place(&self) -> bool {
        let XLayout {
            stride,
            inner,
            outer,
            ..
        } = self.x;
        let whole = |elements: usize| elements.is_multiple_of(piece_len(self.dtype));
        let owns_groups = |direction, takes_sums| {
            Cut::new(self, direction, takes_sums)
                .is_ok_and(|cut| cut.group_scaling == GroupRmsOrigin::InTile)
        };
        let is_long = self.x.runs == 1 || self.rows / self.x.runs >= MIN_RUN_ROWS;
        self.is_vectorized()
            && is_long
            && [stride, inner, outer].into_iter().all(whole)
            && owns_groups(Direction::Forward, false)
            && owns_groups(Direction::Backward, true)
    }

    /// C.
    pub fn channels(&self) -> usize {
        self.cols / self.x.heads
    }

    /// Groups of group scaling, of all heads; `None` without it. In LayerNorm a head is one group.
    fn groups(&self) -> Option<usize> {
        match self.norm {
            RowNorm::None => None,
            RowNorm::Groups { count, .. } => Some(self.x.heads * count),
            RowNorm::Centred { .. } => Some(self.x.heads),
        }
    }

    /// The pass is LayerNorm's, which subtracts each row's mean.
    pub fn is_centred(&self) -> bool {
        matches!(self.norm, RowNorm::Centred { .. })
    }

    /// ε of r.
    pub fn group_eps(&self) -> f64 {
        match self.norm {
            RowNorm::None => 0.,
            RowNorm::Groups { eps, .. } | RowNorm::Centred { eps } => eps,
        }
    }

    fn group_len(&self) -> usize {
        self.cols / self.groups().unwrap_or(1)
    }

    /// Pieces of a group. The last one may not be whole.
    fn group_pieces(&self) -> usize {
        self.group_len().div_ceil(piece_len(self.dtype))
    }

    /// All pieces are whole.
    fn is_vectorized(&self) -> bool {
        self.group_len().is_multiple_of(piece_len(self.dtype))
    }

    /// Rows are prefetched into shared memory.
    fn has_ring(&self) -> bool {
        self.limits.copies && self.is_vectorized()
    }

    fn sum_bytes(&self) -> usize {
        self.dtype.sums().bytes()
    }
}

/// Which of the two passes over the rows: a forward's or a backward's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Forward,
    Backward,
}

/// The blocks and threads of a pass.
#[derive(Debug, Clone, Copy)]
pub struct Cut {
    extent: Extent,
    pub group_scaling: GroupRmsOrigin,
    /// N of the kernels: pieces of a thread.
    pub pieces: usize,
    /// Lanes that share a group's part of a tile.
    pub span: usize,
    /// One of these two is 1.
    pub groups_per_tile: usize,
    pub tiles_per_group: usize,
    /// Blocks along x.
    pub tiles: usize,
    /// Blocks along y.
    pub chunks: usize,
    pub chunk_rows: usize,
    /// Threads of a block along x.
    pub lanes: usize,
    /// Threads of a block along y.
    pub rows: usize,
}

impl Cut {
    /// Cuts a pass, which `takes_sums` of its columns or not. The cut depends on nothing else but
    /// shape, strides, dtype and GPU, so that two runs add the same terms in the same order.
    ///
    /// Returns an error for a shape that the kernels cannot count: they count channels, the rows of
    /// a chunk, and the elements from a thread's row to its next, in 32 bits, and chunks in 16.
    pub fn new(extent: &Extent, direction: Direction, takes_sums: bool) -> Result<Self, Error> {
        let Extent { rows, cols, .. } = *extent;
        let too_large = Error::TooLarge { rows, cols };
        if i32::try_from(cols).is_err() {
            return Err(too_large);
        }
        let fewest = match takes_sums {
            true => FEWEST,
            false => FEWEST_OF_EVALUATION,
        };
        let cut = Self::of_countable(extent, direction, fewest);
        let counts = i32::try_from(cut.chunk_rows).is_ok() && cut.chunks <= MAX_CHUNKS;
        match counts && cut.has_short_steps() {
            true => Ok(cut),
            false => Err(too_large),
        }
    }

    fn of_countable(extent: &Extent, direction: Direction, fewest: Fewest) -> Self {
        let pieces = max_pieces(extent, direction);
        let whole = extent.groups().map(|_| Self::whole_groups(extent, pieces));
        let mut cut = whole
            .filter(|whole| whole.has_room(MAX_ARRAYS))
            .unwrap_or_else(|| Self::parts_of_groups(extent, pieces));
        let chunks = (extent.limits.multiprocessors / cut.tiles).max(1);
        let chunk_rows = extent.rows.div_ceil(chunks).max(fewest.chunk_rows);
        // Equal parts of each run, so that the multiprocessors, in turns, have the fewest rows. A
        // block also prepares its coefficients, in the time of a few rows.
        let run_rows = extent.rows / extent.x.runs;
        let chunk_rows = match extent.x.runs {
            1 => chunk_rows,
            runs => {
                let work = |&parts: &usize| {
                    let turns = (runs * parts).div_ceil(chunks);
                    turns * (run_rows.div_ceil(parts) + fewest.chunk_rows)
                };
                let most = (run_rows / fewest.chunk_rows)
                    .min(chunks)
                    .min(MAX_CHUNKS / runs);
                let parts = (1..=most).min_by_key(work);
                run_rows.div_ceil(parts.unwrap_or(1))
            }
        };
        // Rows of threads stay a power of two, for the tree that adds up their sums.
        while cut.gains_by_doubling(chunk_rows, fewest.thread_rows) {
            cut.rows *= 2;
        }
        cut.chunk_rows = chunk_rows;
        cut.chunks = extent.x.runs * run_rows.div_ceil(cut.chunk_rows);
        cut
    }

    /// Blocks that own whole groups.
    ///
    /// With more pieces a thread takes fewer instructions for each: a row costs it about two pieces
    /// more, for the group's sum, pointers and tests. But an odd number of a few lanes would read
    /// halves of 32-byte sectors.
    fn whole_groups(extent: &Extent, max_pieces: usize) -> Self {
        let span = |pieces: usize| extent.group_pieces().div_ceil(pieces);
        let mut pieces = max_pieces;
        while pieces > 1 && !span(pieces).is_multiple_of(2) && span(pieces) <= WARP / 2 {
            pieces /= 2;
        }
        let span = span(pieces);
        if span > WARP {
            let lanes = span.next_multiple_of(WARP);
            return Self::of_one_chunk(extent, GroupRmsOrigin::InTile, pieces, lanes, lanes);
        }
        // As many groups as fit into a warp, or all groups in a part of a warp.
        let lanes = WARP.min((span * extent.groups().unwrap_or(1)).next_power_of_two());
        Self::of_one_chunk(extent, GroupRmsOrigin::InTile, pieces, lanes, span)
    }

    /// Blocks that own a part of a group, or of a row without group scaling.
    ///
    /// All parts have the same number of lanes, chosen so that whole warps have a power of two of
    /// rows of threads. There are as few parts as give the busiest multiprocessor the least work.
    fn parts_of_groups(extent: &Extent, max_pieces: usize) -> Self {
        let pieces = max_pieces.min(1 << extent.group_pieces().ilog2());
        let group_lanes = extent.group_pieces().div_ceil(pieces);
        // Eight rows of threads fill warps of a multiple of four lanes. Kernels could not count from
        // a row to the eighth after it where rows are this wide. So blocks begin with one.
        let is_huge = extent.cols > i32::MAX as usize / 8;
        let lanes = |parts: usize| match group_lanes.div_ceil(parts) {
            few if few < 4 => few.next_power_of_two(),
            lanes => lanes.next_multiple_of(if is_huge { WARP } else { 4 }),
        };
        // Lanes for each row on the busiest multiprocessor. It has several tiles in turn, or a part
        // of the rows of one tile.
        let work = |&parts: &usize| {
            let tiles = extent.groups().unwrap_or(1) * parts;
            let gpu = extent.limits.multiprocessors;
            let (tiles_in_turn, chunks) = (tiles.div_ceil(gpu), (gpu / tiles).max(1));
            lanes(parts) as f64 * tiles_in_turn as f64 / chunks as f64
        };
        let fewest = group_lanes.div_ceil(TILE_LANES);
        let parts = (fewest..=2 * fewest).min_by(|a, b| work(a).total_cmp(&work(b)));
        let lanes = lanes(parts.unwrap_or(fewest));
        let group_scaling = match extent.groups() {
            Some(_) => GroupRmsOrigin::Given,
            None => GroupRmsOrigin::NoGroups,
        };
        Self::of_one_chunk(extent, group_scaling, pieces, lanes, lanes)
    }

    /// Blocks of one warp, or of one row of threads if that takes more warps. All rows are one
    /// chunk.
    fn of_one_chunk(
        extent: &Extent,
        group_scaling: GroupRmsOrigin,
        pieces: usize,
        lanes: usize,
        span: usize,
    ) -> Self {
        let groups_per_tile = lanes / span;
        let tiles_per_group = extent.group_pieces().div_ceil(pieces * span);
        Self {
            extent: *extent,
            group_scaling,
            pieces,
            span,
            groups_per_tile,
            tiles_per_group,
            tiles: extent.groups().unwrap_or(1).div_ceil(groups_per_tile) * tiles_per_group,
            chunks: 1,
            chunk_rows: extent.rows,
            lanes,
            // The lanes of a block are whole warps, or a power of two of them fills a warp.
            rows: WARP >> lanes.trailing_zeros().min(WARP.ilog2()),
        }
    }

    /// Blocks with twice the rows of threads are better for chunks of `chunk_rows` rows, where a
    /// thread gets at least `thread_rows`.
    fn gains_by_doubling(&self, chunk_rows: usize, thread_rows: usize) -> bool {
        let doubled = Self {
            rows: 2 * self.rows,
            ..*self
        };
        let idle = chunk_rows.next_multiple_of(doubled.rows) - chunk_rows;
        let is_busy = idle * IDLE_SHARE <= chunk_rows || doubled.threads() <= ROW_THREADS / 2;
        doubled.rows * thread_rows <= chunk_rows
            && is_busy
            && doubled.has_room(MIN_PREFETCHED)
            && doubled.has_short_steps()
    }

    /// Kernels can count the elements from a thread's row to its next row.
    fn has_short_steps(&self) -> bool {
        let stride = self.extent.cols.max(self.extent.x.stride);
        i32::try_from(self.rows.saturating_mul(stride)).is_ok()
    }

    /// A multiprocessor has room for such a block and `arrays` prefetched rows.
    fn has_room(&self, arrays: usize) -> bool {
        let prefetched = match self.extent.has_ring() {
            true => arrays * self.row_bytes(self.threads()),
            false => 0,
        };
        let bytes = self.fixed_bytes() + prefetched;
        self.threads() <= ROW_THREADS && bytes <= self.extent.limits.shared_bytes
    }

    fn threads(&self) -> usize {
        self.lanes * self.rows
    }

    /// The tiling of a launch that reads `arrays` arrays of rows.
    pub fn tiling(&self, arrays: usize) -> Tiling {
        let stages = self.stages(arrays);
        Tiling {
            rows: self.extent.rows as i64,
            cols: self.extent.cols as i64,
            x_stride: self.extent.x.stride as i64,
            x_outer: self.extent.x.outer as i64,
            x_inner: self.extent.x.inner as i64,
            run_rows: (self.extent.rows / self.extent.x.runs) as i64,
            chunk_rows: self.chunk_rows as i64,
            inner_runs: self.extent.x.inner_runs as i32,
            run_chunks: (self.chunks / self.extent.x.runs) as i32,
            x_step: (self.rows * self.extent.x.stride) as i32,
            channels: self.extent.channels() as i32,
            groups: self.extent.groups().unwrap_or(1) as i32,
            group_len: self.extent.group_len() as i32,
            span: self.span as i32,
            groups_per_tile: self.groups_per_tile as i32,
            tiles_per_group: self.tiles_per_group as i32,
            vectorized: self.extent.is_vectorized().into(),
            stages: stages as i32,
            reversed: 0,
            ahead: (stages * self.rows) as i32,
            stage_bytes: self.stage_bytes(arrays) as i32,
            ring_bytes: self.ring_bytes(arrays) as i32,
        }
    }

    /// Shared memory of a block of a launch that reads `arrays` arrays of rows and takes `sums`
    /// sums of each column: `Shared` of the kernels. While the sums of the block's rows are added
    /// up, they reuse all of that memory, or need more.
    pub fn shared_bytes(&self, arrays: usize, sums: usize) -> usize {
        let rings = rings_bytes(self.warps(), self.ring_bytes(arrays));
        // Threads hand over their sums, or a count of rows.
        let values = padded_sums(self.pieces * piece_len(self.extent.dtype) * sums);
        let thread_bytes = (values * self.extent.sum_bytes()).max(size_of::<i64>());
        (rings + self.fixed_bytes()).max(sums_bytes(self.lanes, self.rows, thread_bytes))
    }

    /// Stages of a warp's ring. A launch that walks over no array of rows has no ring.
    fn stages(&self, arrays: usize) -> usize {
        if !self.extent.has_ring() || arrays == 0 {
            return 0;
        }
        let room = self.extent.limits.shared_bytes;
        let room = room.saturating_sub(self.fixed_bytes());
        (room / (self.warps() * self.stage_bytes(arrays))).min(MAX_STAGES)
    }

    /// Bytes of a warp's ring.
    fn ring_bytes(&self, arrays: usize) -> usize {
        self.stages(arrays) * self.stage_bytes(arrays)
    }

    /// Bytes of a stage of a warp: a row of each array.
    fn stage_bytes(&self, arrays: usize) -> usize {
        arrays * self.row_bytes(WARP)
    }

    /// Bytes of a row of one array that `threads` threads prefetch.
    fn row_bytes(&self, threads: usize) -> usize {
        threads * self.pieces * PIECE_BYTES
    }

    fn warps(&self) -> usize {
        self.threads() / WARP
    }

    /// Bytes of shared memory besides the rings: two coefficients a column, and the values that
    /// warps exchange if a block's groups span several warps.
    fn fixed_bytes(&self) -> usize {
        let widening = self.extent.sum_bytes() / self.extent.dtype.bytes();
        let lane_pieces = lane_coefficients(self.pieces, widening);
        let exchanges = self.group_scaling == GroupRmsOrigin::InTile && self.span > WARP;
        let exchanged = match exchanges {
            true => exchanged_bytes(self.rows, self.extent.sum_bytes()),
            false => 0,
        };
        coefficients_bytes(self.lanes, lane_pieces) + exchanged
    }
}

/// The most pieces that a thread can own. Its registers must hold the pieces, widened, beside one
/// sum for each value in a forward and two in a backward: with more pieces they would spill.
/// Without a ring in shared memory they also hold the next row.
fn max_pieces(extent: &Extent, direction: Direction) -> usize {
    if !extent.is_vectorized() {
        return 1;
    }
    let most = match (extent.dtype, direction) {
        (Dtype::F32, Direction::Forward | Direction::Backward) => 4,
        (Dtype::F16 | Dtype::Bf16, Direction::Forward) => 4,
        (Dtype::F16 | Dtype::Bf16, Direction::Backward) => 2,
        (Dtype::F64, Direction::Forward | Direction::Backward) => 2,
    };
    let held = match direction {
        Direction::Forward => HELD_VALUES / piece_len(extent.dtype),
        Direction::Backward => HELD_PIECES_BWD,
    };
    match extent.limits.copies {
        true => most,
        false => most.min(held),
    }
}

/// V of the kernels: elements of a piece.
fn piece_len(dtype: Dtype) -> usize {
    PIECE_BYTES / dtype.bytes()
}

/// An entry point of `kernels/power_norm.cu`. It displays as its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Entry {
    /// [`Kernel::BODY`].
    pub body: &'static str,
    pub dtype: Dtype,
    /// N of the kernel, if it has one.
    pub pieces: Option<usize>,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}_{}", self.body, self.dtype.name())?;
        match self.pieces {
            Some(pieces) => write!(f, "_{pieces}"),
            None => Ok(()),
        }
    }
}

/// An entry point of a kernel whose argument is a `P`.
#[derive(Debug, Clone, Copy)]
struct EntryOf<P> {
    entry: Entry,
    max_threads: usize,
    params: PhantomData<P>,
}

impl<P> EntryOf<P> {
    /// An entry point of kernel `K`. This is the only place that pairs an entry point with the type
    /// of its argument.
    fn new<K: Kernel<Params = P>>(dtype: Dtype, pieces: Option<usize>) -> Self {
        Self {
            entry: Entry {
                body: K::BODY,
                dtype,
                pieces,
            },
            max_threads: K::MAX_THREADS,
            params: PhantomData,
        }
    }
}

/// A launch of a kernel whose argument is a `P`: its entry point and its blocks.
#[derive(Debug, Clone, Copy)]
pub struct Launch<P> {
    entry: EntryOf<P>,
    /// Blocks along x (columns) and y (rows).
    pub grid: (u32, u32),
    /// Threads of a block along x (columns) and y (rows).
    pub block: (u32, u32),
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

impl<P> Launch<P> {
    fn new(
        entry: EntryOf<P>,
        grid: (usize, usize),
        block: (usize, usize),
        shared_bytes: usize,
    ) -> Self {
        debug_assert!(block.0 * block.1 <= entry.max_threads, "{}", entry.entry);
        Self {
            entry,
            grid: (grid.0 as u32, grid.1 as u32),
            block: (block.0 as u32, block.1 as u32),
            shared_bytes: shared_bytes as u32,
        }
    }

    pub fn entry(&self) -> Entry {
        self.entry.entry
    }
}

/// The launches of a forward or of its backward. There is at least one row, except in a training
/// step whose batch is shared with other processes.
#[derive(Debug, Clone, Copy)]
pub struct LaunchPlan {
    pub direction: Direction,
    pub extent: Extent,
    pub recipe: Recipe,
    pub kind: ForwardKind,
    /// The forward has a mask.
    pub masked: bool,
    /// The forward divides by D. If not, D is 1.
    pub divides: bool,
    pub cut: Cut,
}

/// Addresses inside `saved`, the memory that a forward leaves for its backward. A part that does
/// not exist has address 0.
///
/// A forward and its backward agree on the parts up to `group_rms_inv`, which are numbers of type
/// A. The parts after it belong to the forward alone: the sums of its chunks, which nothing reads
/// after the step of ψ². They stay allocated until the backward (256 KiB for 256x1024 in bf16, 2
/// MiB for 2048x4096), because an allocation of their own would take the host a seventh of a
/// forward, by softgpu's stopwatch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SavedLayout {
    /// 1/D, `[C]`. Exists if the forward divides by D.
    pub inv_d: Address,
    /// Γ, `[C]`. This part, `batch_phi` and `count` exist in training.
    pub gamma: Address,
    /// ψ_B², `[C]`.
    pub batch_phi: Address,
    /// The number of rows that Γ and Λ are means over.
    pub count: Address,
    /// For each row and group r, or in a pass of LayerNorm r, a number near the mean and the mean of what is shifted by it.
    /// Exists if rows are normalized by themselves.
    pub group_rms_inv: Address,
    /// Kept rows of each chunk. Exists with a mask, in training.
    pub kept: Address,
    /// Sums over kept rows. Exists in training.
    pub partials: Address,
    /// Sums over all rows. Exists in training, if Γ is a mean over padded rows too.
    pub all_partials: Address,
    pub end: Address,
}

/// Addresses inside `workspace`, the memory that only a backward needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Workspace {
    /// Λ, `[C]`.
    pub lambda: Address,
    /// Sums of dy x̃ and of dy, chunk by chunk and head by head.
    pub partials: Address,
    /// Means over each row and group, one or in a pass of LayerNorm two. Exists if groups are wider
    /// than a block.
    pub dots: Address,
    pub end: Address,
}

/// Divides an allocation into parts, one after another.
struct Parts {
    next: Address,
}

impl Parts {
    /// The address of a part of `bytes` bytes, or 0 if the part does not exist.
    fn take(&mut self, exists: bool, bytes: u64) -> Address {
        let start = self.next;
        if exists {
            self.next += bytes.next_multiple_of(SECTOR);
        }
        when(exists, start)
    }
}

impl LaunchPlan {
    /// The plan of a forward that divides by D and has no mask. Returns an error for a shape that
    /// the kernels cannot count.
    pub fn new(extent: Extent, recipe: Recipe, kind: ForwardKind) -> Result<Self, Error> {
        Ok(Self {
            direction: Direction::Forward,
            extent,
            recipe,
            kind,
            masked: false,
            divides: true,
            cut: Cut::new(&extent, Direction::Forward, kind.is_training())?,
        })
    }

    /// The plan of the backward of this forward.
    pub fn of_backward(&self) -> Result<Self, Error> {
        Ok(Self {
            direction: Direction::Backward,
            cut: Cut::new(&self.extent, Direction::Backward, true)?,
            ..*self
        })
    }

    /// The input's gradient is exact, so its walk over the rows comes last, by Λ.
    pub fn is_exact(&self) -> bool {
        self.recipe.is_exact(self.kind)
    }

    /// Chunks of rows, each of which has sums of its own.
    pub fn chunks(&self) -> usize {
        self.cut.chunks
    }

    /// Partial sums of a channel: one for each chunk and head.
    pub fn partials(&self) -> usize {
        self.cut.chunks * self.extent.x.heads
    }

    /// Groups are wider than a block, so a launch of its own reduces them before the rows' launch.
    pub fn has_wide_groups(&self) -> bool {
        self.cut.group_scaling == GroupRmsOrigin::Given
    }

    /// The length of the message in which ranks exchange the sums of the pass: the announcement's
    /// numbers, then the sums. A backward has fewer sums than its forward, but its message is as
    /// long, so that ranks in different calls can compare them.
    pub fn message_len(&self) -> usize {
        ANNOUNCED + self.recipe.square_sums() * (self.extent.cols + 1)
    }

    /// The layout of `saved`, from address `start` on.
    pub fn saved(&self, start: Address) -> SavedLayout {
        let (row, chunks) = (self.row_bytes(), self.chunks() as u64);
        let trains = self.kind.is_training();
        let sums = trains && self.direction == Direction::Forward;
        let all_sums = sums && self.masked && !self.recipe.masks_backward();
        let mut parts = Parts { next: start };
        // The backward finds these parts at the same offsets.
        let inv_d = parts.take(self.divides, row);
        let gamma = parts.take(trains, row);
        let batch_phi = parts.take(trains, row);
        let count = parts.take(trains, self.sum_bytes());
        let group_rms_inv = parts.take(
            self.extent.groups().is_some(),
            self.group_bytes(LAYER_NORM_STATISTICS),
        );
        // The backward has chunks of its own, and does not have these parts.
        let kept = parts.take(sums && self.masked, chunks * size_of::<i64>() as u64);
        let partials = parts.take(sums, chunks * row);
        let all_partials = parts.take(all_sums, chunks * row);
        SavedLayout {
            inv_d,
            gamma,
            batch_phi,
            count,
            group_rms_inv,
            kept,
            partials,
            all_partials,
            end: parts.next,
        }
    }

    /// The layout of a backward's `workspace`, from address `start` on.
    pub fn workspace(&self, start: Address) -> Workspace {
        let (row, chunks) = (self.row_bytes(), self.chunks() as u64);
        let mut parts = Parts { next: start };
        let lambda = parts.take(true, row);
        let partials = parts.take(true, 2 * chunks * row);
        let dots = parts.take(
            self.has_wide_groups(),
            self.group_bytes(LAYER_NORM_MEANS_BWD),
        );
        Workspace {
            lambda,
            partials,
            dots,
            end: parts.next,
        }
    }

    /// Bytes of a number for each column.
    fn row_bytes(&self) -> u64 {
        self.extent.cols as u64 * self.sum_bytes()
    }

    /// Bytes of a number for each row and group, or in a pass of LayerNorm of `of_layer_norm`.
    fn group_bytes(&self, of_layer_norm: usize) -> u64 {
        let numbers = if self.extent.is_centred() {
            of_layer_norm
        } else {
            1
        };
        (self.extent.groups().unwrap_or(0) * self.extent.rows * numbers) as u64 * self.sum_bytes()
    }

    fn sum_bytes(&self) -> u64 {
        self.extent.sum_bytes() as u64
    }

    /// A of the kernels.
    pub fn sums_dtype(&self) -> Dtype {
        self.extent.dtype.sums()
    }

    /// Every entry point that the pass may launch, the step of the state included.
    pub fn entries(&self, over_ranks: bool) -> Vec<Entry> {
        let (groups, rows, update, updates) = match self.direction {
            Direction::Forward => (
                self.reduce_groups_entry().entry,
                self.normalize_entry().entry,
                self.channels_entry::<UpdatePhi>().entry,
                self.kind.is_training(),
            ),
            Direction::Backward => (
                self.reduce_groups_bwd_entry().entry,
                self.normalize_bwd_entry().entry,
                self.channels_entry::<UpdateNu>().entry,
                true,
            ),
        };
        let sum_partials = self.channels_entry::<SumPartials>().entry;
        [
            (self.has_wide_groups(), groups),
            (self.extent.rows > 0, rows),
            (over_ranks, sum_partials),
            (updates, update),
        ]
        .into_iter()
        .filter_map(|(launches, entry)| launches.then_some(entry))
        .collect()
    }

    fn reduce_groups_entry(&self) -> EntryOf<NormalizeParams> {
        let dtype = self.extent.dtype;
        match self.extent.is_centred() {
            true => EntryOf::new::<LayerNormStatistics>(dtype, None),
            false => EntryOf::new::<GroupRmsInv>(dtype, None),
        }
    }

    fn normalize_entry(&self) -> EntryOf<NormalizeParams> {
        let (dtype, pieces) = (self.extent.dtype, Some(self.cut.pieces));
        match self.extent.is_centred() {
            true => EntryOf::new::<LayerNorm>(dtype, pieces),
            false => EntryOf::new::<Normalize>(dtype, pieces),
        }
    }

    fn reduce_groups_bwd_entry(&self) -> EntryOf<NormalizeBwdParams> {
        let dtype = self.extent.dtype;
        match self.extent.is_centred() {
            true => EntryOf::new::<LayerNormDots>(dtype, None),
            false => EntryOf::new::<GroupDots>(dtype, None),
        }
    }

    fn normalize_bwd_entry(&self) -> EntryOf<NormalizeBwdParams> {
        let (dtype, pieces) = (self.extent.dtype, Some(self.cut.pieces));
        match self.extent.is_centred() {
            true => EntryOf::new::<LayerNormBwd>(dtype, pieces),
            false => EntryOf::new::<NormalizeBwd>(dtype, pieces),
        }
    }

    /// A kernel that adds up the sums of chunks.
    fn channels_entry<K: Kernel>(&self) -> EntryOf<K::Params> {
        EntryOf::new::<K>(self.sums_dtype(), None)
    }

    /// The reduction of a forward's wide groups, and its tiling.
    pub fn reduce_groups(&self) -> (Launch<NormalizeParams>, Tiling) {
        debug_assert_eq!(self.direction, Direction::Forward);
        let launch = self.groups_launch(self.reduce_groups_entry());
        (launch, self.cut.tiling(0))
    }

    /// A forward's walk over the rows, which reads `arrays` arrays of rows and takes `sums` sums of
    /// each channel, and its tiling.
    pub fn normalize(&self, arrays: usize, sums: usize) -> (Launch<NormalizeParams>, Tiling) {
        debug_assert_eq!(self.direction, Direction::Forward);
        let launch = self.rows_launch(self.normalize_entry(), arrays, sums);
        (launch, self.rows_tiling(arrays, sums))
    }

    /// The reduction of a backward's wide groups, and its tiling.
    pub fn reduce_groups_bwd(&self) -> (Launch<NormalizeBwdParams>, Tiling) {
        debug_assert_eq!(self.direction, Direction::Backward);
        let launch = self.groups_launch(self.reduce_groups_bwd_entry());
        (launch, self.cut.tiling(0))
    }

    /// A backward's walk over the rows, which reads x and dy and takes `sums` sums of each channel,
    /// and its tiling.
    pub fn normalize_bwd(&self, sums: usize) -> (Launch<NormalizeBwdParams>, Tiling) {
        debug_assert_eq!(self.direction, Direction::Backward);
        let launch = self.rows_launch(self.normalize_bwd_entry(), 2, sums);
        (launch, self.rows_tiling(2, sums))
    }

    /// The addition of the chunks' sums ahead of an exchange.
    pub fn sum_partials(&self) -> Launch<SumPartialsParams> {
        self.channels_launch::<SumPartials>()
    }

    /// The step of ψ².
    pub fn update_phi(&self) -> Launch<UpdatePhiParams> {
        self.channels_launch::<UpdatePhi>()
    }

    /// The step of ν.
    pub fn update_nu(&self) -> Launch<UpdateNuParams> {
        self.channels_launch::<UpdateNu>()
    }

    fn rows_launch<P>(&self, entry: EntryOf<P>, arrays: usize, sums: usize) -> Launch<P> {
        let cut = &self.cut;
        Launch::new(
            entry,
            (cut.tiles, cut.chunks),
            (cut.lanes, cut.rows),
            cut.shared_bytes(arrays, sums),
        )
    }

    fn rows_tiling(&self, arrays: usize, sums: usize) -> Tiling {
        let mut tiling = self.cut.tiling(arrays);
        if self.is_second_walk(sums) {
            tiling.reversed = 1;
            tiling.x_step = -tiling.x_step;
        }
        tiling
    }

    /// A walk over rows that an earlier launch of the step has walked over, for sums that this walk
    /// needs: the output of a batch that is divided by its own statistic, and the exact gradient.
    ///
    /// The second walk goes backwards. The last rows of the first walk are then still in L2, and
    /// with equal directions they would have been evicted before the second walk came to them.
    fn is_second_walk(&self, sums: usize) -> bool {
        self.kind.is_training() && sums == 0
    }

    /// A launch over wide groups, a block for each.
    fn groups_launch<P>(&self, entry: EntryOf<P>) -> Launch<P> {
        let groups = self.extent.rows * self.extent.groups().unwrap_or(1);
        Launch::new(
            entry,
            (groups.min(GROUP_BLOCKS), 1),
            (GROUP_THREADS, 1),
            exchanged_bytes(1, self.extent.sum_bytes()),
        )
    }

    /// A launch that adds up the sums of chunks, with a lane for each channel. The rows of a block
    /// add up different chunks.
    fn channels_launch<K: Kernel>(&self) -> Launch<K::Params> {
        let [few, many] = CHANNEL_LANES;
        let cols = self.extent.channels();
        let is_wide = cols.div_ceil(many) >= self.extent.limits.multiprocessors;
        let lanes = if is_wide { many } else { few };
        let rows = (self.partials() / CHANNEL_CHUNKS)
            .next_power_of_two()
            .clamp(WARP / few, CHANNEL_THREADS / lanes);
        Launch::new(
            self.channels_entry::<K>(),
            (cols.div_ceil(lanes), 1),
            (lanes, rows),
            sums_bytes(lanes, rows, CHANNEL_SUMS_BYTES),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const DTYPES: [Dtype; 4] = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16];

    const H100: Limits = Limits {
        multiprocessors: 132,
        shared_bytes: 227 << 10,
        copies: true,
    };

    /// A GPU of compute capability 8.6 or 8.9, which has the least shared memory.
    const RTX: Limits = Limits {
        multiprocessors: 84,
        shared_bytes: 99 << 10,
        copies: true,
    };

    /// A GPU of compute capability 7.5, without asynchronous copies.
    const T4: Limits = Limits {
        multiprocessors: 40,
        shared_bytes: 64 << 10,
        copies: false,
    };

    type Shape = (Dtype, usize, usize, Option<usize>);

    fn extent((dtype, rows, cols, groups): Shape, limits: Limits) -> Extent {
        Extent::packed(dtype, rows, cols, RowNorm::of_groups(groups, 1e-5), limits)
    }

    /// The plans of a forward and of its backward.
    fn plans(shape: Shape, limits: Limits) -> Result<[LaunchPlan; 2], Error> {
        let kind = ForwardKind::RunningStatistic;
        let forward = LaunchPlan::new(extent(shape, limits), Recipe::Paper, kind)?;
        Ok([forward, forward.of_backward()?])
    }

    /// Entry point, grid, block and shared memory, in the form in which the tests list them.
    fn text<P>(launch: &Launch<P>) -> String {
        let (grid, block) = (launch.grid, launch.block);
        format!(
            "{} {}x{} {}x{} {}",
            launch.entry(),
            grid.0,
            grid.1,
            block.0,
            block.1,
            launch.shared_bytes
        )
    }

    /// Which views are read where they are, and as what.
    #[test]
    fn views_are_read_in_place() {
        let of = |dims: &[usize], strides: &[usize]| {
            let norm = RowNorm::Centred { eps: 1e-5 };
            let extent = Extent::of_view(Dtype::Bf16, (dims, strides), norm, H100)?;
            let XLayout {
                heads,
                stride,
                runs,
                inner_runs,
                inner,
                outer,
            } = extent.x;
            assert_eq!(extent.groups(), Some(heads));
            assert_eq!(extent.channels(), dims[dims.len() - 1]);
            Some((
                (extent.rows, heads, stride),
                (runs, inner_runs, inner, outer),
            ))
        };
        let in_one_run = (1, 1, 0, 0);
        // The heads of queries; those of one token, or of one head.
        let projection = [50 * 768, 768, 64, 1];
        let queries = of(&[2, 50, 4, 64], &projection);
        assert_eq!(queries, Some(((100, 4, 768), in_one_run)));
        let one_token = of(&[2, 1, 4, 64], &projection);
        assert_eq!(one_token, Some(((2, 4, 38400), in_one_run)));
        let one_head = of(&[2, 50, 1, 64], &projection);
        assert_eq!(one_head, Some(((100, 1, 768), in_one_run)));
        // Heads before the tokens, of several texts, of one, and too few tokens.
        let swapped = [50 * 768, 64, 768, 1];
        let before = of(&[2, 4, 50, 64], &swapped);
        assert_eq!(before, Some(((400, 1, 768), (8, 4, 64, 38400))));
        let of_one_text = of(&[1, 4, 50, 64], &swapped);
        assert_eq!(of_one_text, Some(((200, 1, 768), (4, 4, 64, 0))));
        assert_eq!(of(&[2, 4, 15, 64], &swapped), None);
        // The first tokens of texts of 90, and the first four.
        let tokens = of(&[3, 70, 64], &[90 * 64, 64, 1]);
        assert_eq!(tokens, Some(((210, 1, 64), (3, 3, 5760, 0))));
        let four = of(&[9, 4, 64], &[90 * 64, 64, 1]);
        assert_eq!(four, Some(((9, 4, 5760), in_one_run)));
        // Columns of many, from whole pieces on or not; one row for all.
        assert_eq!(of(&[7, 64], &[72, 1]), Some(((7, 1, 72), in_one_run)));
        assert_eq!(of(&[7, 64], &[70, 1]), None);
        assert_eq!(of(&[7, 60], &[72, 1]), None);
        assert_eq!(of(&[7, 64], &[0, 1]), Some(((7, 1, 0), in_one_run)));
        // Elements of a row are apart; rows wider than a block; too many dimensions.
        assert_eq!(of(&[7, 64], &[128, 2]), None);
        assert_eq!(of(&[7, 64], &[1, 7]), None);
        assert_eq!(of(&[7, 1 << 14], &[1 << 15, 1]), None);
        assert_eq!(
            of(&[2, 2, 2, 99, 64], &[1 << 20, 1 << 18, 1 << 16, 128, 1]),
            None
        );
        // As many runs as blocks, and more.
        let many = of(&[40_000, 2500, 8], &[8, 8 * 120_000, 1]);
        assert_eq!(
            many,
            Some(((100_000_000, 1, 960_000), (40_000, 40_000, 8, 0)))
        );
        assert_eq!(of(&[1 << 16, 16, 64], &[1 << 12, 128, 1]), None);
    }

    /// The first walk has sums, and the second one none. An evaluation's only walk has none either.
    #[test]
    fn second_walks_go_backwards() {
        let shape = (Dtype::F32, 5000, 768, Some(1));
        let reversed = |kind, sums| {
            let forward = LaunchPlan::new(extent(shape, H100), Recipe::Paper, kind).unwrap();
            let backward = forward.of_backward().unwrap();
            [
                forward.normalize(1, sums).1.reversed,
                backward.normalize_bwd(2 * sums).1.reversed,
            ]
        };
        assert_eq!(reversed(ForwardKind::BatchStatistic, 1), [0, 0]);
        assert_eq!(reversed(ForwardKind::BatchStatistic, 0), [1, 1]);
        assert_eq!(reversed(ForwardKind::RunningStatistic, 1), [0, 0]);
        assert_eq!(reversed(ForwardKind::Evaluation, 0), [0, 0]);
    }

    /// The numbers of the example at the top of this file.
    #[test]
    fn the_example_is_what_the_plan_computes() {
        let [forward, backward] = plans((Dtype::Bf16, 5000, 768, Some(1)), H100).unwrap();
        let cut = forward.cut;
        assert_eq!(forward.extent.group_pieces(), 96);
        assert_eq!((cut.pieces, cut.span, cut.lanes, cut.tiles), (4, 24, 32, 1));
        assert_eq!((cut.chunks, cut.chunk_rows), (132, 38));
        assert_eq!(5000 - 131 * cut.chunk_rows, 22);
        assert_eq!((cut.rows, cut.threads()), (8, 256));
        assert_eq!(cut.chunk_rows.div_ceil(cut.rows), 5);
        assert!((48 - 38) * IDLE_SHARE > 38 && !cut.gains_by_doubling(38, FEWEST.thread_rows));
        let (launch, tiling) = forward.normalize(1, 1);
        assert_eq!((tiling.stage_bytes, tiling.stages), (2048, 3));
        assert_eq!(tiling.ring_bytes, 6144);
        assert_eq!(cut.warps() * 6144, 49_152);
        assert_eq!(lane_coefficients(4, 2), 17);
        assert_eq!(cut.fixed_bytes(), 8704);
        assert_eq!(text(&launch), "normalize_bf16_4 1x132 32x8 57856");
        let update = forward.update_phi();
        assert_eq!(text(&update), "update_phi_f32 96x1 8x64 6144");

        let cut = backward.cut;
        assert_eq!(backward.extent.group_pieces().div_ceil(cut.pieces), 48);
        assert_eq!((cut.pieces, cut.span, cut.chunk_rows), (2, 64, 38));
        let (launch, tiling) = backward.normalize_bwd(2);
        assert_eq!(text(&launch), "normalize_bwd_bf16_2 1x132 64x8 108544");
        assert_eq!((cut.warps(), tiling.stages), (16, 3));
        assert_eq!(tiling.stage_bytes, 2 * 1024);
        let exchanged = exchanged_bytes(cut.rows, backward.extent.sum_bytes());
        assert_eq!((cut.fixed_bytes() - exchanged, exchanged), (9216, 1024));
        assert_eq!(108_544, 16 * 3 * 2 * 1024 + 9216 + 1024);
    }

    /// A small evaluation has twice the chunks of a training forward, and a thread for each row.
    #[test]
    fn small_evaluations_have_small_chunks() {
        let launch = |shape, kind| {
            let plan = LaunchPlan::new(extent(shape, H100), Recipe::Paper, kind).unwrap();
            let (launch, tiling) = plan.normalize(1, plan.kind.is_training().into());
            (launch.grid.1, launch.block, tiling.chunk_rows)
        };
        let group = Some(1);
        for (shape, in_training, in_evaluation) in [
            (
                (Dtype::Bf16, 256, 1024, group),
                (64, (32, 2), 4),
                (128, (32, 2), 2),
            ),
            (
                (Dtype::F32, 256, 1024, group),
                (64, (64, 2), 4),
                (128, (64, 2), 2),
            ),
            (
                (Dtype::Bf16, 1, 4096, group),
                (1, (128, 2), 4),
                (1, (128, 2), 2),
            ),
            // Chunks enough, so only the rows of threads differ.
            (
                (Dtype::Bf16, 1000, 1024, group),
                (125, (32, 4), 8),
                (125, (32, 8), 8),
            ),
            // Rows enough.
            (
                (Dtype::Bf16, 5000, 768, group),
                (132, (32, 8), 38),
                (132, (32, 8), 38),
            ),
        ] {
            let launches = [
                launch(shape, ForwardKind::RunningStatistic),
                launch(shape, ForwardKind::Evaluation),
            ];
            assert_eq!(launches, [in_training, in_evaluation], "{shape:?}");
        }
    }

    /// The plans of some shapes are those of `tests/fixtures/plans.txt`, where a change of the planner
    /// shows. Whether it makes launches faster, only a measurement can tell. This writes the file:
    ///
    /// ```text
    /// CANDLE_POWERNORM_RENEW=1 softgpu/run cargo test --features cuda --lib plans_are_as_recorded
    /// ```
    #[test]
    fn plans_are_as_recorded() {
        let plans: String = [
            ("H100", H100, (Dtype::Bf16, 5000, 768, Some(1))),
            ("H100", H100, (Dtype::Bf16, 5000, 768, None)),
            ("H100", H100, (Dtype::F32, 4096, 512, Some(8))),
            ("H100", H100, (Dtype::F16, 32768, 4096, Some(1))),
            ("H100", H100, (Dtype::Bf16, 2048, 16392, Some(1))),
            ("H100", H100, (Dtype::F64, 100, 760, Some(10))),
            ("H100", H100, (Dtype::F32, 7, 3, Some(3))),
            ("H100", H100, (Dtype::Bf16, 5000, 1024, Some(1))),
            ("H100", H100, (Dtype::Bf16, 1000, 1024, Some(64))),
            ("H100", H100, (Dtype::Bf16, 130, 16384, None)),
            ("H100", H100, (Dtype::F64, 5000, 40000, None)),
            ("RTX", RTX, (Dtype::F32, 300, 4672, Some(1))),
            ("RTX", RTX, (Dtype::Bf16, 1055, 1920, None)),
            ("T4", T4, (Dtype::F32, 1024, 1024, Some(1))),
            ("T4", T4, (Dtype::F16, 1000, 1000, Some(8))),
            ("T4", T4, (Dtype::F64, 1073741824, 1, None)),
        ]
        .map(|(gpu, limits, shape)| format!("{gpu} {}", described(shape, limits)))
        .join("\n");
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/plans.txt");
        if std::env::var_os("CANDLE_POWERNORM_RENEW").is_some_and(|renew| renew == "1") {
            std::fs::write(path, &plans).unwrap();
        }
        let recorded = std::fs::read_to_string(path).unwrap();
        for (plan, recorded) in plans.split("\n\n").zip(recorded.split("\n\n")) {
            assert_eq!(plan, recorded);
        }
        assert_eq!(plans, recorded);
    }

    /// A shape and its plan. A walk over rows has the rows of a chunk, the span, groups per tile /
    /// tiles per group, and stages after its launch. Of memory there are the offsets and the end.
    fn described(shape: Shape, limits: Limits) -> String {
        let extent = extent(shape, limits);
        let kind = ForwardKind::RunningStatistic;
        let forward = LaunchPlan {
            masked: true,
            ..LaunchPlan::new(extent, Recipe::Fairseq, kind).unwrap()
        };
        let backward = forward.of_backward().unwrap();
        let walk = |launch: String, tiling: Tiling| {
            format!(
                "{launch}, {} {} {}/{} {}",
                tiling.chunk_rows,
                tiling.span,
                tiling.groups_per_tile,
                tiling.tiles_per_group,
                tiling.stages
            )
        };
        let (rows, tiling) = forward.normalize(1, 1);
        let (rows_bwd, tiling_bwd) = backward.normalize_bwd(2);
        let launches = [
            walk(text(&rows), tiling),
            walk(text(&rows_bwd), tiling_bwd),
            text(&backward.reduce_groups_bwd().0),
            text(&forward.update_phi()),
        ]
        .join("\n");
        let (dtype, rows, cols, groups) = shape;
        let saved = forward.saved(0);
        let workspace = backward.workspace(0);
        assert_eq!(workspace.lambda, 0);
        format!(
            "{dtype:?} {rows}x{cols}, groups: {groups:?}\n\
             {launches}\n\
             saved: gamma {}, batch_phi {}, count {}, group_rms_inv {}, kept {}, partials {}, \
             all_partials {}, end {}\n\
             workspace: partials {}, dots {}, end {}\n",
            saved.gamma,
            saved.batch_phi,
            saved.count,
            saved.group_rms_inv,
            saved.kept,
            saved.partials,
            saved.all_partials,
            saved.end,
            workspace.partials,
            workspace.dots,
            workspace.end,
        )
    }

    /// Whatever the shape and the GPU, all rows and columns have a block, blocks are whole warps
    /// that a multiprocessor has room for, and there is at most one block for each multiprocessor
    /// or tile.
    #[test]
    fn every_cut_fits() {
        let odd = [1, 3, 8, 96, 760, 4095, 65536];
        for cols in odd.into_iter().chain((64..=16384).step_by(64)) {
            for dtype in DTYPES {
                for rows in [1, 7, 256, 2048, 100_000] {
                    for (multiprocessors, kib) in [(1, 99), (84, 99), (108, 163), (132, 227)] {
                        let limits = Limits {
                            multiprocessors,
                            shared_bytes: kib << 10,
                            copies: true,
                        };
                        fits((dtype, rows, cols, None), limits);
                    }
                    fits((dtype, rows, cols, None), T4);
                }
            }
        }
    }

    fn fits((dtype, rows, cols, _): Shape, limits: Limits) {
        for groups in [None, Some(1), Some(8), Some(cols)] {
            if groups.is_none_or(|groups| cols.is_multiple_of(groups)) {
                let extent = extent((dtype, rows, cols, groups), limits);
                cut_fits(&extent, Direction::Forward, false, [(1, 0), (2, 0)]);
                cut_fits(&extent, Direction::Forward, true, [(1, 0), (2, 1)]);
                cut_fits(&extent, Direction::Backward, true, [(2, 0), (2, 2)]);
            }
        }
    }

    /// Checks a pass whose launches have at least the first and at most the second numbers of
    /// arrays and sums.
    fn cut_fits(
        extent: &Extent,
        direction: Direction,
        takes_sums: bool,
        launches: [(usize, usize); 2],
    ) {
        let cut = Cut::new(extent, direction, takes_sums).unwrap();
        let check = |holds: bool, what: &str| assert!(holds, "{what}: {cut:?}");
        let tile_lanes = cut.groups_per_tile * cut.span;
        let group_columns = cut.tiles_per_group * cut.span * cut.pieces * piece_len(extent.dtype);
        let most = extent.limits.multiprocessors.max(cut.tiles);
        check(cut.chunks * cut.chunk_rows >= extent.rows, "all rows");
        check(
            (cut.chunks - 1) * cut.chunk_rows < extent.rows,
            "no empty chunk",
        );
        check(cut.chunks * cut.tiles <= most, "blocks");
        check(cut.threads() <= ROW_THREADS, "threads");
        check(cut.threads().is_multiple_of(WARP), "whole warps");
        check(cut.rows.is_power_of_two(), "rows of threads");
        check(tile_lanes <= cut.lanes, "lanes of the groups");
        check(group_columns >= extent.group_len(), "all columns");
        check(
            cut.groups_per_tile == 1 || cut.tiles_per_group == 1,
            "several groups or parts of one",
        );
        for (arrays, sums) in launches {
            let bytes = cut.shared_bytes(arrays, sums);
            check(bytes <= extent.limits.shared_bytes, "shared memory");
            check(
                (cut.tiling(arrays).stages > 0) == extent.has_ring(),
                "stages",
            );
        }
    }

    /// A pass takes as long as its longest chunk. Where multiprocessors have 64 rows each or more,
    /// an even share is at least 0.89 of the longest chunk.
    #[test]
    fn multiprocessors_are_busy() {
        for multiprocessors in [30, 108, 132, 148] {
            let limits = Limits {
                multiprocessors,
                ..H100
            };
            for cols in [512, 768, 1024, 4096] {
                for dtype in [Dtype::F32, Dtype::Bf16] {
                    for rows in (64 * multiprocessors).max(2000)..=100_000 {
                        let extent = extent((dtype, rows, cols, Some(1)), limits);
                        for direction in [Direction::Forward, Direction::Backward] {
                            let longest = Cut::new(&extent, direction, true).unwrap().chunk_rows;
                            let share = rows as f64 / (multiprocessors * longest) as f64;
                            assert!(share >= 0.89, "{extent:?}, {direction:?}: {share}");
                        }
                    }
                }
            }
        }
    }

    /// On a GPU without asynchronous copies, an entry point with more pieces than its registers can
    /// hold twice is a trap (`normalize` and `normalize_bwd` in the .cu).
    #[test]
    fn no_plan_launches_a_trap() {
        for dtype in DTYPES {
            for cols in [1, 2, 4, 8, 64, 96, 1024, 4096, 65536] {
                for groups in [None, Some(1)] {
                    let [forward, backward] = plans((dtype, 100, cols, groups), T4).unwrap();
                    assert!(forward.cut.pieces * piece_len(dtype) <= HELD_VALUES);
                    assert!(backward.cut.pieces <= HELD_PIECES_BWD);
                }
            }
        }
    }

    /// Plans launch the entry points of `kernels/power_norm.cu`, each of them, and nothing else.
    #[test]
    fn entries_are_those_of_the_kernels() {
        let mut launched = BTreeSet::new();
        for dtype in DTYPES {
            for cols in [1, 2, 4, 8, 16, 32, 64, 1024, 1 << 16] {
                let one = RowNorm::of_groups(Some(1), 1e-5);
                for norm in [RowNorm::None, one, RowNorm::Centred { eps: 1e-5 }] {
                    let extent = Extent {
                        norm,
                        ..extent((dtype, 100, cols, None), H100)
                    };
                    let kind = ForwardKind::RunningStatistic;
                    let forward = LaunchPlan::new(extent, Recipe::Paper, kind).unwrap();
                    for plan in [forward, forward.of_backward().unwrap()] {
                        launched.extend(plan.entries(true).iter().map(Entry::to_string));
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

    /// A backward reads what its forward saved, so both must find a part at the same offset. (The
    /// two have layouts of their own: the backward does not have the forward's chunks.)
    #[test]
    fn a_backward_finds_what_its_forward_saved() {
        use ForwardKind::{BatchStatistic, Evaluation, RunningStatistic};
        let mut layouts = BTreeSet::new();
        for dtype in DTYPES {
            for (rows, cols, groups) in [
                (100, 64, None),
                (100, 64, Some(1)),
                (100, 64, Some(8)),
                (7, 33, Some(3)),
                (5, 65536, Some(1)),
                (0, 64, Some(8)),
            ] {
                for kind in [Evaluation, BatchStatistic, RunningStatistic] {
                    for recipe in [Recipe::Paper, Recipe::Fairseq] {
                        for (masked, divides) in
                            [(false, false), (false, true), (true, false), (true, true)]
                        {
                            let extent = Extent {
                                // LayerNorm has no statistic of channels.
                                norm: match groups == Some(1) && !divides {
                                    true => RowNorm::Centred { eps: 1e-5 },
                                    false => RowNorm::of_groups(groups, 1e-5),
                                },
                                ..extent((dtype, rows, cols, groups), H100)
                            };
                            let forward = LaunchPlan {
                                masked,
                                divides,
                                ..LaunchPlan::new(extent, recipe, kind).unwrap()
                            };
                            let backward = forward.of_backward().unwrap();
                            let start = 1 << 20;
                            let (ours, theirs) = (backward.saved(start), forward.saved(start));
                            let shared = |saved: &SavedLayout| {
                                let SavedLayout {
                                    inv_d,
                                    gamma,
                                    batch_phi,
                                    count,
                                    group_rms_inv,
                                    ..
                                } = *saved;
                                [inv_d, gamma, batch_phi, count, group_rms_inv]
                            };
                            let what = format!("{forward:?}");
                            assert_eq!(shared(&ours), shared(&theirs), "{what}");
                            // The forward alone has the rest, after those parts.
                            let own = [ours.kept, ours.partials, ours.all_partials];
                            assert_eq!(own, [0; 3], "{what}");
                            assert!(theirs.end >= ours.end, "{what}");
                            let rest = [theirs.kept, theirs.partials, theirs.all_partials];
                            let after = rest.iter().all(|&part| part == 0 || part >= ours.end);
                            assert!(after, "{what}");
                            layouts.insert(shared(&theirs));
                        }
                    }
                }
            }
        }
        assert!(layouts.len() > 20, "{layouts:?}");
    }

    /// Parts of an allocation begin at sectors, follow each other without overlap, and are as large
    /// as their arrays.
    #[test]
    fn parts_have_room() {
        let [forward, backward] = plans((Dtype::F64, 100, 33, Some(3)), H100).unwrap();
        let forward = LaunchPlan {
            masked: true,
            recipe: Recipe::Fairseq,
            ..forward
        };
        let (row, chunks) = (33 * 8, forward.chunks() as u64);
        let saved = forward.saved(0);
        let parts = [
            (saved.inv_d, row),
            (saved.gamma, row),
            (saved.batch_phi, row),
            (saved.count, 8),
            (saved.group_rms_inv, 100 * 3 * 8),
            (saved.kept, chunks * 8),
            (saved.partials, chunks * row),
            (saved.all_partials, chunks * row),
            (saved.end, 0),
        ];
        let workspace = backward.workspace(0);
        let backward_chunks = backward.chunks() as u64;
        let more = [
            (workspace.lambda, row),
            (workspace.partials, 2 * backward_chunks * row),
            (workspace.end, 0),
        ];
        // Rows of LayerNorm that are wider than a block.
        let extent = Extent {
            norm: RowNorm::Centred { eps: 1e-5 },
            ..extent((Dtype::F32, 100, 65536, None), H100)
        };
        let mut centred = LaunchPlan::new(extent, Recipe::Paper, ForwardKind::Evaluation).unwrap();
        centred.divides = false;
        let (saved, workspace) = (
            centred.saved(0),
            centred.of_backward().unwrap().workspace(0),
        );
        let of_layer_norm = [(saved.group_rms_inv, 100 * 3 * 4), (saved.end, 0)];
        let dots = [(workspace.dots, 100 * 2 * 4), (workspace.end, 0)];
        for parts in [&parts[..], &more[..], &of_layer_norm[..], &dots[..]] {
            for pair in parts.windows(2) {
                let [(start, bytes), (next, _)] = [pair[0], pair[1]];
                assert!(start.is_multiple_of(SECTOR), "{parts:?}");
                assert!(
                    next >= start + bytes && next < start + bytes + SECTOR,
                    "{parts:?}"
                );
            }
        }
    }

    /// A call without rows, as a rank of several may have, launches only the update of the state.
    #[test]
    fn a_call_without_rows_walks_over_none() {
        for (rows, expected) in [
            (0, ["update_phi_f32"].as_slice()),
            (1, ["normalize_bf16_4", "update_phi_f32"].as_slice()),
        ] {
            let [forward, _] = plans((Dtype::Bf16, rows, 1024, Some(1)), H100).unwrap();
            let entries: Vec<_> = (forward.entries(false).iter().map(Entry::to_string)).collect();
            assert_eq!(entries, expected);
        }
    }

    /// A GPU of 800 multiprocessors leaves 800 chunks, enough for all threads of a block.
    #[test]
    fn a_block_of_channels_has_its_most_threads() {
        let limits = Limits {
            multiprocessors: 800,
            ..H100
        };
        let [forward, _] = plans((Dtype::F32, 32768, 64, None), limits).unwrap();
        assert_eq!(forward.chunks(), 800);
        let launch = forward.update_phi();
        assert_eq!(launch.block, (8, (CHANNEL_THREADS / 8) as u32));
    }

    /// From a row of a thread to its next row a kernel counts elements in 32 bits. Where there would
    /// be more, a block has fewer rows of threads; a view with too long a stride is copied.
    #[test]
    fn steps_fit_in_32_bits() {
        for (cols, rows) in [
            (1 << 20, 8),
            (1 << 27, 8),
            (1 << 29, 2),
            (1 << 30, 1),
            (i32::MAX as usize, 1),
        ] {
            let [forward, _] = plans((Dtype::F32, 100_000, cols, None), H100).unwrap();
            assert_eq!(forward.cut.rows, rows, "{:?}", forward.cut);
        }
        for (bits, is_read_in_place) in [(26, true), (27, false)] {
            let norm = RowNorm::Centred { eps: 1e-5 };
            let strides = [1 << bits, 1];
            let extent = Extent::of_view(Dtype::Bf16, (&[32, 64], &strides), norm, H100);
            assert_eq!(extent.is_some(), is_read_in_place, "{extent:?}");
        }
    }

    /// Parts of runs leave no multiprocessor idle for long.
    #[test]
    fn runs_are_cut_evenly() {
        for (runs, run_rows, parts, part_rows) in [
            (20, 4096, 13, 316),
            (128, 512, 1, 512),
            (4, 100, 25, 4),
            (200, 256, 5, 52),
        ] {
            let norm = RowNorm::Centred { eps: 1e-5 };
            let (dims, strides) = ([runs, run_rows, 128], [128, 128 * runs * 3, 1]);
            let extent = Extent::of_view(Dtype::Bf16, (&dims, &strides), norm, H100).unwrap();
            let cut = Cut::new(&extent, Direction::Backward, true).unwrap();
            assert_eq!((cut.chunks, cut.chunk_rows), (runs * parts, part_rows));
        }
    }

    /// Numbers that a kernel has no room for are rejected, and the largest that fit are not.
    #[test]
    fn shapes_beyond_32_bits_are_rejected() {
        let limits = Limits {
            multiprocessors: 1,
            ..H100
        };
        let plan = |rows, cols| plans((Dtype::F32, rows, cols, None), limits);
        plan(4, (1 << 31) - 1).unwrap();
        plan(1 << 30, 1).unwrap();
        for (rows, cols) in [(4, 1 << 31), (1 << 31, 1), (usize::MAX >> 8, 1)] {
            let error = plan(rows, cols).unwrap_err().to_string();
            let shape = format!("{rows} rows of {cols} channels");
            assert!(error.contains(&shape), "{error}");
        }
    }
}
