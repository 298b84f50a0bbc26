//! Cuts a pass over the rows into blocks and threads.

use super::params::{FactorOrigin, Tiling};
use crate::device::sums_dtype;
use candle::DType;

/// The most threads of a block that walks rows. At 128 registers each, they fill a multiprocessor.
pub const BLOCK: usize = 512;

/// Threads that exchange values directly.
pub const WARP: usize = 32;

/// The most lanes of a block, unless a group of the group scaling needs more. With more columns a
/// block would have fewer rows. With fewer columns it would read shorter runs of bytes of each row.
const TILE_LANES: usize = 64;

/// The fewest rows of a chunk, so that its partial sums stay small beside its rows. An evaluation
/// has no sums, but with fewer rows a block would read as many coefficients as rows, or more.
const MIN_CHUNK_ROWS: usize = 4;

/// The fewest rows a thread should take, so that the next row loads while the thread works on one.
const MIN_THREAD_ROWS: usize = 2;

/// The most rows on their way: what hides the memory's latency from one block a multiprocessor.
pub const MAX_STAGES: usize = 3;

/// The most arrays of rows that a pass reads: x and a residual, or x and dy.
const MAX_ARRAYS: usize = 2;

/// Rows of an array that a block's rows are cut for: two rows of each array.
const MIN_STAGE_ARRAYS: usize = 2 * MAX_ARRAYS;

/// A block of half the rows is better where more than an eighth of a chunk's turns would be idle.
/// It keeps 256 threads, which took at most 2 % longer than 512 on a simulated GPU.
const IDLE: usize = 8;

/// The limits that launches are fitted to.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub multiprocessors: usize,
    /// The most shared memory that a block can have: 99 KiB or more if `copies`.
    pub shared_bytes: usize,
    /// The kernels have the GPU copy rows into shared memory by itself. Otherwise they load rows
    /// into registers.
    pub copies: bool,
}

/// The rows that passes walk over, and the GPU that they run on.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    /// Groups of group scaling; `None` without it.
    pub groups: Option<usize>,
    pub limits: Limits,
}

/// A walk over the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    Forward,
    Backward,
}

/// The blocks and threads of a pass.
#[derive(Debug, Clone, Copy)]
pub struct Cut {
    /// Without the stages, which [`Extent::shared`] chooses for each launch.
    pub tiling: Tiling,
    pub group_scaling: FactorOrigin,
    /// N of the kernels.
    pub pieces: usize,
    /// Blocks along x, and chunks of rows along y.
    pub tiles: usize,
    pub chunks: usize,
    /// Threads of a block along x, and along y.
    pub lanes: usize,
    pub rows: usize,
}

impl Cut {
    fn threads(&self) -> usize {
        self.lanes * self.rows
    }
}

impl Extent {
    /// Cuts a pass by shape, dtype and GPU only: two runs add the same terms in the same order.
    ///
    /// Rows are cut into as many chunks as give each multiprocessor at most one block. If there are
    /// more tiles than multiprocessors, there is one chunk. One block is enough, because its next
    /// rows are on their way while it works. Fewer blocks move fewer partial sums and coefficients.
    /// A pass takes as long as its longest chunk. So chunks are even, though a block's last turn
    /// may then lack rows.
    pub fn cut(&self, pass: Pass) -> Cut {
        let pieces = self.max_pieces(pass);
        let whole = self.groups.map(|_| self.whole_groups(pieces));
        let mut cut = whole
            .filter(|whole| self.has_room(whole, MAX_ARRAYS))
            .unwrap_or_else(|| self.parts_of_groups(pieces));
        let chunks = (self.limits.multiprocessors / cut.tiles).max(1);
        let chunk_rows = self.rows.div_ceil(chunks).max(MIN_CHUNK_ROWS);
        // Rows are a power of two, for the tree that adds sums of columns.
        while self.suits(&cut, 2 * cut.rows, chunk_rows) {
            cut.rows *= 2;
        }
        // Kernels count the elements from a thread's row to its next in 32 bits.
        let chunk_rows = match u32::try_from(cut.rows * self.cols) {
            Ok(_) => chunk_rows,
            Err(_) => cut.rows,
        };
        cut.tiling.chunk_rows = chunk_rows as i64;
        cut.chunks = self.rows.div_ceil(chunk_rows);
        cut
    }

    /// `true` if blocks of so many rows are better than blocks of half as many.
    fn suits(&self, cut: &Cut, rows: usize, chunk_rows: usize) -> bool {
        let cut = Cut { rows, ..*cut };
        let idle = chunk_rows.next_multiple_of(rows) - chunk_rows;
        let busy = idle * IDLE <= chunk_rows || cut.threads() <= BLOCK / 2;
        rows * MIN_THREAD_ROWS <= chunk_rows && busy && self.has_room(&cut, MIN_STAGE_ARRAYS)
    }

    /// The most 16-byte pieces a thread can own. Its registers must hold the pieces, widened, next
    /// to one sum for each value, or in a backward two. With more pieces they would spill. Without
    /// `copies` into shared memory, they also hold the next row.
    fn max_pieces(&self, pass: Pass) -> usize {
        let copies = self.limits.copies;
        match self.dtype {
            _ if !self.vectorized() => 1,
            DType::F32 if copies || pass == Pass::Forward => 4,
            DType::F16 | DType::BF16 if copies && pass == Pass::Forward => 4,
            _ => 2,
        }
    }

    /// Blocks that reduce their groups. The more pieces a thread has, the fewer instructions each
    /// takes: a row costs a thread about two pieces more, for the group's sum, pointers and tests.
    /// But a few lanes, an odd number, would read halves of 32-byte sectors.
    fn whole_groups(&self, most: usize) -> Cut {
        let span = |pieces: usize| self.group_pieces().div_ceil(pieces);
        let mut pieces = most;
        while pieces > 1 && !span(pieces).is_multiple_of(2) && span(pieces) <= WARP / 2 {
            pieces /= 2;
        }
        let span = span(pieces);
        if span > WARP {
            let lanes = span.next_multiple_of(WARP);
            return self.blocks(FactorOrigin::InTile, pieces, lanes, lanes);
        }
        // As many groups as fit a warp, or all of them and several rows.
        let lanes = WARP.min((span * self.groups.unwrap_or(1)).next_power_of_two());
        self.blocks(FactorOrigin::InTile, pieces, lanes, span)
    }

    /// Blocks of a part of a group. All parts have as many lanes, by which a block of whole warps
    /// has a power of two of rows. They are as few as give the busiest multiprocessor the least
    /// work.
    fn parts_of_groups(&self, most: usize) -> Cut {
        let pieces = most.min(1 << self.group_pieces().ilog2());
        let group_lanes = self.group_pieces().div_ceil(pieces);
        let lanes = |parts: usize| match group_lanes.div_ceil(parts) {
            few @ 0..4 => few.next_power_of_two(),
            lanes => lanes.next_multiple_of(4),
        };
        // Tiles in turn, or a chunk of one.
        let work = |&parts: &usize| {
            let tiles = self.groups.unwrap_or(1) * parts;
            let gpu = self.limits.multiprocessors;
            let (turns, chunks) = (tiles.div_ceil(gpu), (gpu / tiles).max(1));
            lanes(parts) as f64 * turns as f64 / chunks as f64
        };
        let fewest = group_lanes.div_ceil(TILE_LANES);
        let parts = (fewest..=2 * fewest).min_by(|a, b| work(a).total_cmp(&work(b)));
        let lanes = lanes(parts.unwrap_or(fewest));
        let group_scaling = match self.groups {
            Some(_) => FactorOrigin::Given,
            None => FactorOrigin::None,
        };
        self.blocks(group_scaling, pieces, lanes, lanes)
    }

    /// Blocks of one warp or one row, of so many lanes. A group in a block has `span` of them.
    fn blocks(&self, group_scaling: FactorOrigin, pieces: usize, lanes: usize, span: usize) -> Cut {
        let groups = self.groups.unwrap_or(1);
        let groups_per_tile = lanes / span;
        let tiles_per_group = self.group_pieces().div_ceil(pieces * span);
        Cut {
            tiling: Tiling {
                rows: self.rows as i64,
                cols: self.cols as i64,
                groups: groups as i32,
                group_len: self.group_len() as i32,
                span: span as i32,
                groups_per_tile: groups_per_tile as i32,
                tiles_per_group: tiles_per_group as i32,
                vectorized: self.vectorized().into(),
                ..Default::default()
            },
            group_scaling,
            pieces,
            tiles: groups.div_ceil(groups_per_tile) * tiles_per_group,
            chunks: 1,
            lanes,
            rows: WARP >> lanes.trailing_zeros().min(WARP.ilog2()),
        }
    }

    fn group_len(&self) -> usize {
        self.cols / self.groups.unwrap_or(1)
    }

    /// The 16-byte pieces of a group, the last of which may be a part of one.
    fn group_pieces(&self) -> usize {
        self.group_len().div_ceil(piece(self.dtype))
    }

    fn vectorized(&self) -> bool {
        self.group_len().is_multiple_of(piece(self.dtype))
    }

    /// `true` if rows come by way of shared memory.
    fn streams(&self) -> bool {
        self.limits.copies && self.vectorized()
    }

    /// `true` if such a block can be, with a row of `arrays` arrays on its way.
    fn has_room(&self, cut: &Cut, arrays: usize) -> bool {
        let row = match self.streams() {
            true => arrays * stage_bytes(cut.threads(), cut.pieces),
            false => 0,
        };
        cut.threads() <= BLOCK && self.fixed_bytes(cut) + row <= self.limits.shared_bytes
    }

    /// The number of rows of `arrays` arrays that are on their way, and the bytes of a block that
    /// takes `sums` sums of each column: `Shared` of the kernels.
    pub fn shared(&self, cut: &Cut, arrays: usize, sums: usize) -> (Tiling, u32) {
        // Half of the rows hand over sums, an odd number of values each, or an int64 count of rows.
        let values = (cut.pieces * piece(self.dtype) * sums) | 1;
        let thread_bytes = (values * sums_dtype(self.dtype).size_in_bytes()).max(8);
        let added = cut.rows / 2 * cut.lanes * thread_bytes;
        let warps = cut.threads() / WARP;
        let stage_bytes = arrays * stage_bytes(WARP, cut.pieces);
        let fixed = self.fixed_bytes(cut);
        let room = self.limits.shared_bytes.saturating_sub(fixed);
        let stages = match self.streams() {
            true => (room / (warps * stage_bytes)).min(MAX_STAGES),
            false => 0,
        };
        let ring_bytes = stages * stage_bytes;
        let bytes = (warps * ring_bytes + fixed).max(added);
        let tiling = Tiling {
            stages: stages as i32,
            ahead: (stages * cut.rows) as i32,
            stage_bytes: stage_bytes as i32,
            ring_bytes: ring_bytes as i32,
            ..cut.tiling
        };
        (tiling, bytes as u32)
    }

    /// Bytes of shared memory beside rows on their way: two numbers a column, in an odd number of
    /// 16-byte pieces for each lane, and what warps exchange if a group has several.
    fn fixed_bytes(&self, cut: &Cut) -> usize {
        let widening = sums_dtype(self.dtype).size_in_bytes() / self.dtype.size_in_bytes();
        let columns = 2 * cut.pieces * widening + 1;
        let exchanges = cut.group_scaling == FactorOrigin::InTile && cut.tiling.span > WARP as i32;
        let exchanged = match exchanges {
            true => self.exchanged_bytes(cut.rows),
            false => 0,
        };
        cut.lanes * columns * 16 + exchanged
    }

    /// Bytes by which the warps of each of a block's rows add numbers up: `LaneSum` of the kernels.
    pub fn exchanged_bytes(&self, rows: usize) -> usize {
        2 * rows * (BLOCK / WARP) * sums_dtype(self.dtype).size_in_bytes()
    }
}

/// V of the kernels: elements in a 16-byte access.
fn piece(dtype: DType) -> usize {
    16 / dtype.size_in_bytes()
}

/// Bytes of a row of one array that so many threads have on its way.
fn stage_bytes(threads: usize, pieces: usize) -> usize {
    threads * pieces * 16
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// An extent of `[rows, cols]` on a GPU whose blocks have so much shared memory.
    pub fn extent(
        dtype: DType,
        [rows, cols]: [usize; 2],
        multiprocessors: usize,
        kib: usize,
    ) -> Extent {
        Extent {
            dtype,
            rows,
            cols,
            groups: Some(1),
            limits: Limits {
                multiprocessors,
                shared_bytes: kib << 10,
                copies: true,
            },
        }
    }

    /// Whatever the shape and the GPU, all rows and columns have a block, blocks are whole warps
    /// that a multiprocessor holds, and no more than the multiprocessors.
    #[test]
    fn every_cut_fits() {
        let odd = [1, 3, 8, 96, 760, 4095, 65536];
        for cols in odd.into_iter().chain((64..=16384).step_by(64)) {
            for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
                for rows in [1, 7, 256, 2048, 100_000] {
                    for (multiprocessors, kib) in [(1, 99), (84, 99), (108, 163), (132, 227)] {
                        fits(extent(dtype, [rows, cols], multiprocessors, kib));
                    }
                    let mut old = extent(dtype, [rows, cols], 40, 64);
                    old.limits.copies = false;
                    fits(old);
                }
            }
        }
    }

    fn fits(mut extent: Extent) {
        for groups in [None, Some(1), Some(8), Some(extent.cols)] {
            if groups.is_none_or(|groups| extent.cols.is_multiple_of(groups)) {
                extent.groups = groups;
                cut_fits(&extent, Pass::Forward, [(1, 0), (2, 1)]);
                cut_fits(&extent, Pass::Backward, [(2, 0), (2, 2)]);
            }
        }
    }

    /// Checks a pass with so many arrays and sums, at least and at most.
    fn cut_fits(extent: &Extent, pass: Pass, launches: [(usize, usize); 2]) {
        let cut = extent.cut(pass);
        let check = |holds: bool, what: &str| assert!(holds, "{what}: {extent:?}, {cut:?}");
        let Cut { tiles, chunks, .. } = cut;
        let chunk_rows = cut.tiling.chunk_rows as usize;
        let tile_lanes = (cut.tiling.groups_per_tile * cut.tiling.span) as usize;
        let group_lanes = (cut.tiling.tiles_per_group * cut.tiling.span) as usize;
        let group_columns = group_lanes * cut.pieces * piece(extent.dtype);
        let most = extent.limits.multiprocessors.max(tiles);
        check(chunks * chunk_rows >= extent.rows, "all rows");
        check((chunks - 1) * chunk_rows < extent.rows, "empty chunks");
        check(chunks * tiles <= most, "blocks");
        check(cut.threads() <= BLOCK, "threads");
        check(cut.threads().is_multiple_of(WARP), "whole warps");
        check(cut.rows.is_power_of_two(), "rows of a block");
        check(tile_lanes <= cut.lanes, "lanes of the groups");
        check(group_columns >= extent.group_len(), "all columns");
        for (arrays, sums) in launches {
            let (tiling, bytes) = extent.shared(&cut, arrays, sums);
            let shared_bytes = extent.limits.shared_bytes;
            check(bytes as usize <= shared_bytes, "shared memory");
            check((tiling.stages > 0) == extent.streams(), "stages");
        }
    }

    /// A pass takes as long as its longest chunk. Where multiprocessors have 64 rows each or more,
    /// an even share is at least 0.89 of the longest chunk.
    #[test]
    fn multiprocessors_are_busy() {
        for multiprocessors in [30, 108, 132, 148] {
            for (cols, dtype) in [512, 768, 1024, 4096]
                .into_iter()
                .flat_map(|cols| [(cols, DType::F32), (cols, DType::BF16)])
            {
                for rows in (64 * multiprocessors).max(2000)..=100_000 {
                    let extent = extent(dtype, [rows, cols], multiprocessors, 227);
                    for pass in [Pass::Forward, Pass::Backward] {
                        let longest = extent.cut(pass).tiling.chunk_rows as usize;
                        let share = rows as f64 / (multiprocessors * longest) as f64;
                        assert!(share >= 0.89, "{extent:?}, {pass:?}: {share}");
                    }
                }
            }
        }
    }
}
