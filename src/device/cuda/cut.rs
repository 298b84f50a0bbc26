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

/// Fixed cost of a row, in 16-byte pieces: the sum of a group, pointers, tests.
const PIECES_A_ROW: usize = 2;

/// Rows of an array that a block's rows are cut for: two rows of two arrays, or one of three.
const MIN_STAGE_ARRAYS: usize = 4;

/// The limits that launches are fitted to.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub multiprocessors: usize,
    /// The most shared memory that a block can have.
    pub shared_bytes: usize,
    /// The GPU copies into shared memory by itself. Kernels that were compiled for an older
    /// one load rows into registers even there.
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

impl Pass {
    /// The most arrays of rows that it reads: x and a residual, or x, dy and dsum.
    fn arrays(self) -> usize {
        match self {
            Pass::Forward => 2,
            Pass::Backward => 3,
        }
    }

    /// The most 16-byte pieces a thread can own. Its registers must hold the pieces, widened, next
    /// to one sum for each value, or in a backward two. With more pieces they would spill. Without
    /// `copies` into shared memory, they also hold the next row of a forward.
    fn max_pieces(self, dtype: DType, copies: bool) -> usize {
        match (dtype, self) {
            (DType::F32, _) => 4,
            (DType::F16 | DType::BF16, Pass::Forward) if copies => 4,
            _ => 2,
        }
    }
}

/// The columns of a block: several groups, one, or a part of one.
struct Tile {
    /// Threads along the columns.
    lanes: usize,
    /// Threads along the columns that share a group.
    span: usize,
    /// N of the kernels.
    pieces: usize,
    /// Groups in a tile.
    groups: usize,
    /// Tiles in a group.
    per_group: usize,
    group_scaling: FactorOrigin,
}

/// The blocks and threads of a pass.
#[derive(Debug, Clone, Copy)]
pub struct Cut {
    /// Without the stages, which [`Extent::shared`] chooses for each launch.
    pub tiling: Tiling,
    pub group_scaling: FactorOrigin,
    /// N of the kernels.
    pub pieces: usize,
    /// Tiles along x and chunks of rows along y.
    pub grid: (u32, u32),
    /// Lanes along x and rows along y.
    pub block: (u32, u32),
}

impl Extent {
    /// Cuts a pass by shape, dtype and GPU only: two runs add the same terms in the same
    /// order.
    ///
    /// Rows are cut into as many chunks as give each multiprocessor at most one block. If there are
    /// more tiles than multiprocessors, there is one chunk. One block is enough, because its next
    /// rows are on their way while it works. Fewer blocks move fewer partial sums and coefficients.
    pub fn cut(&self, pass: Pass) -> Cut {
        let most = pass.max_pieces(self.dtype, self.limits.copies);
        let cut = self.cut_by(pass, most);
        let streams = self.streams(cut.tiling.vectorized != 0);
        // Threads of several pieces take rows only from shared memory.
        match streams && self.shared(&cut, pass.arrays(), 0).0.stages == 0 {
            true => self.cut_by(pass, 1),
            false => cut,
        }
    }

    /// A [`cut`](Self::cut) with at most `most` pieces a thread.
    fn cut_by(&self, pass: Pass, most: usize) -> Cut {
        let groups = self.groups.unwrap_or(1);
        let group_len = self.cols / groups;
        let vectorized = group_len.is_multiple_of(piece(self.dtype));
        let most_pieces = if vectorized { most } else { 1 };
        let group_pieces = group_len.div_ceil(piece(self.dtype));
        let tile = self.tile(pass, groups, group_pieces, most_pieces, vectorized);
        let tiles = groups.div_ceil(tile.groups) * tile.per_group;
        let chunks = (self.limits.multiprocessors / tiles).max(1);
        let chunk_rows = self.rows.div_ceil(chunks).max(MIN_CHUNK_ROWS);
        // The block is whole warps, and its rows are a power of two. There are no more than the
        // chunk has rows for and shared memory has room for.
        let least = WARP >> tile.lanes.trailing_zeros().min(WARP.ilog2());
        let mut most = 1 << (BLOCK / tile.lanes).ilog2();
        let has_room = |rows| {
            let exchanges = exchanges(tile.group_scaling, tile.span);
            let fixed = self.fixed_bytes(tile.lanes, rows, exchanges, tile.pieces);
            let stages = MIN_STAGE_ARRAYS * stage_bytes(tile.lanes * rows, tile.pieces);
            !self.streams(vectorized) || fixed + stages <= self.limits.shared_bytes
        };
        while most > least && !has_room(most) {
            most /= 2;
        }
        let wanted = 1 << (chunk_rows / MIN_THREAD_ROWS).ilog2();
        let block_rows = wanted.clamp(least, most);
        // Kernels count the elements from a thread's row to its next in 32 bits.
        let chunk_rows = match u32::try_from(block_rows * self.cols) {
            Ok(_) => self.spared(chunk_rows.next_multiple_of(block_rows), block_rows),
            Err(_) => block_rows,
        };
        Cut {
            tiling: Tiling {
                rows: self.rows as i64,
                cols: self.cols as i64,
                chunk_rows: chunk_rows as i64,
                groups: groups as i32,
                group_len: group_len as i32,
                span: tile.span as i32,
                groups_per_tile: tile.groups as i32,
                tiles_per_group: tile.per_group as i32,
                vectorized: vectorized.into(),
                ..Default::default()
            },
            group_scaling: tile.group_scaling,
            pieces: tile.pieces,
            grid: (tiles as u32, self.rows.div_ceil(chunk_rows) as u32),
            block: (tile.lanes as u32, block_rows as u32),
        }
    }

    /// The rows of a chunk, at least `chunk_rows` and a multiple of `block_rows`. There are up to
    /// an eighth more where a backward's partial sums would move more than 15 % of what it must
    /// move. With an eighth of the multiprocessors idle, rows in flight still keep the memory busy.
    fn spared(&self, chunk_rows: usize, block_rows: usize) -> usize {
        // Two sums of a column are written and read again, beside x, dy and dx.
        let sums = 2 * 2 * sums_dtype(self.dtype).size_in_bytes();
        let enough = (100 * sums).div_ceil(15 * 3 * self.dtype.size_in_bytes());
        let longest = chunk_rows + chunk_rows / 8;
        let wanted = enough.clamp(chunk_rows, longest);
        match wanted.next_multiple_of(block_rows) {
            rows if rows <= longest => rows,
            _ => chunk_rows,
        }
    }

    /// The columns of a block, for groups of so many pieces, with at most `most` a thread.
    fn tile(
        &self,
        pass: Pass,
        groups: usize,
        group_pieces: usize,
        most: usize,
        vectorized: bool,
    ) -> Tile {
        let reduces = self.groups.is_some();
        // The shared memory of a block that has one row of such a group.
        let lanes = group_pieces.div_ceil(most).next_multiple_of(WARP);
        let stages = match self.streams(vectorized) {
            true => pass.arrays() * stage_bytes(lanes, most),
            false => 0,
        };
        let needed = self.fixed_bytes(lanes, 1, lanes > WARP, most) + stages;
        if reduces && lanes <= BLOCK && needed <= self.limits.shared_bytes {
            self.whole_groups(groups, group_pieces, most)
        } else {
            let pieces = most.min(1 << group_pieces.ilog2());
            let (per_group, lanes) = self.parts(groups, group_pieces.div_ceil(pieces));
            Tile {
                lanes,
                span: lanes,
                pieces,
                groups: 1,
                per_group,
                group_scaling: match reduces {
                    true => FactorOrigin::Given,
                    false => FactorOrigin::None,
                },
            }
        }
    }

    /// The tiles that a group of so many lanes is cut into, and the lanes of each tile. There are
    /// as few tiles as possible, unless more of them keep an eighth more multiprocessors busy.
    fn parts(&self, groups: usize, group_lanes: usize) -> (usize, usize) {
        let multiprocessors = self.limits.multiprocessors;
        let fewest = group_lanes.div_ceil(TILE_LANES);
        // All tiles have as many lanes, by which a block of whole warps has a power of two of rows.
        let lanes_of = |per_group: usize| match group_lanes.div_ceil(per_group) {
            few @ 0..4 => few.next_power_of_two(),
            lanes => lanes.next_multiple_of(4),
        };
        // The work of the last multiprocessor: tiles in turn, or a chunk of one.
        let work = |per_group: usize| {
            let tiles = groups * per_group;
            let turns = tiles.div_ceil(multiprocessors) as f64;
            let chunks = (multiprocessors / tiles).max(1) as f64;
            lanes_of(per_group) as f64 * turns / chunks
        };
        let per_group = (fewest..=group_lanes.div_ceil(TILE_LANES / 2))
            .take_while(|&more| more == fewest || groups * more <= multiprocessors)
            .filter(|&more| 1.125 * work(more) <= work(fewest))
            .min_by(|&a, &b| work(a).total_cmp(&work(b)))
            .unwrap_or(fewest);
        (per_group, lanes_of(per_group))
    }

    /// The columns of a block that reduces its groups, with at most `most` pieces a thread: as many
    /// as cost the fewest instructions, idle lanes included. A thread's row costs about what its
    /// pieces and [`PIECES_A_ROW`] more cost, as the SASS of the row loops shows. Where two numbers
    /// cost the same, the smaller leaves fewer lanes idle.
    fn whole_groups(&self, groups: usize, group_pieces: usize, most: usize) -> Tile {
        let cut = |pieces: usize| {
            let span = group_pieces.div_ceil(pieces);
            match span <= WARP {
                // As many groups as fit a warp, or all of them and several rows.
                true => {
                    let lanes = WARP.min((span * groups).next_power_of_two());
                    (lanes, span, lanes / span)
                }
                false => {
                    let lanes = span.next_multiple_of(WARP);
                    (lanes, lanes, 1)
                }
            }
        };
        let cost = |pieces: usize| {
            let (lanes, _, tile_groups) = cut(pieces);
            groups.div_ceil(tile_groups) * lanes * (pieces + PIECES_A_ROW)
        };
        let pieces = [1, 2, 4]
            .into_iter()
            .filter(|&pieces| pieces <= most && cut(pieces).0 <= BLOCK)
            // A few lanes, an odd number, would read halves of 32-byte sectors.
            .filter(|&pieces| {
                let span = cut(pieces).1;
                pieces == 1 || span.is_multiple_of(2) || span > WARP / 2
            })
            .min_by_key(|&pieces| cost(pieces))
            .unwrap_or(most);
        let (lanes, span, groups) = cut(pieces);
        Tile {
            lanes,
            span,
            pieces,
            groups,
            per_group: 1,
            group_scaling: FactorOrigin::InTile,
        }
    }

    /// The number of rows of `arrays` arrays that are on their way, and the bytes of a block that
    /// takes `sums` sums of each column: `Shared` of the kernels.
    pub fn shared(&self, cut: &Cut, arrays: usize, sums: usize) -> (Tiling, u32) {
        let (lanes, rows) = (cut.block.0 as usize, cut.block.1 as usize);
        let values = cut.pieces * piece(self.dtype);
        let exchanges = exchanges(cut.group_scaling, cut.tiling.span as usize);
        let fixed = self.fixed_bytes(lanes, rows, exchanges, cut.pieces);
        // Half of the rows hand over sums, an odd number of values each, or an int64 count of rows.
        let added = rows / 2
            * lanes
            * (((values * sums) | 1) * sums_dtype(self.dtype).size_in_bytes()).max(8);
        let warps = lanes * rows / WARP;
        let stage_bytes = arrays * stage_bytes(WARP, cut.pieces);
        let room = self.limits.shared_bytes.saturating_sub(fixed);
        let stages = match self.streams(cut.tiling.vectorized != 0) {
            true => (room / (warps * stage_bytes)).min(MAX_STAGES),
            false => 0,
        };
        let ring_bytes = stages * stage_bytes;
        let bytes = (warps * ring_bytes + fixed).max(added);
        let tiling = Tiling {
            stages: stages as i32,
            ahead: (stages * rows) as i32,
            stage_bytes: stage_bytes as i32,
            ring_bytes: ring_bytes as i32,
            ..cut.tiling
        };
        (tiling, bytes as u32)
    }

    /// `true` if rows come by way of shared memory.
    fn streams(&self, vectorized: bool) -> bool {
        self.limits.copies && vectorized
    }

    /// Bytes of shared memory beside rows on their way: two numbers a column, in an odd number of
    /// 16-byte pieces for each lane, and what warps exchange if they do.
    fn fixed_bytes(&self, lanes: usize, rows: usize, exchanges: bool, pieces: usize) -> usize {
        let columns =
            2 * pieces * sums_dtype(self.dtype).size_in_bytes() / self.dtype.size_in_bytes() + 1;
        let exchanged = match exchanges {
            true => self.exchanged_bytes(rows),
            false => 0,
        };
        lanes * columns * 16 + exchanged
    }

    /// Bytes by which the warps of each of a block's rows add numbers up: `RowSum` of the kernels.
    pub fn exchanged_bytes(&self, rows: usize) -> usize {
        2 * rows * (BLOCK / WARP) * sums_dtype(self.dtype).size_in_bytes()
    }
}

/// V of the kernels: elements in a 16-byte access.
fn piece(dtype: DType) -> usize {
    16 / dtype.size_in_bytes()
}

/// `true` if a block's warps exchange sums, for groups of so many lanes.
fn exchanges(group_scaling: FactorOrigin, span: usize) -> bool {
    group_scaling == FactorOrigin::InTile && span > WARP
}

/// Bytes of a row of one array that so many threads have on its way.
fn stage_bytes(threads: usize, pieces: usize) -> usize {
    threads * pieces * 16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the shape and the GPU, all rows and columns have a block, blocks are whole warps
    /// that a multiprocessor holds, and no more than the multiprocessors.
    #[test]
    fn every_cut_fits() {
        let gpus = [
            (132, 227 << 10, true),
            (108, 163 << 10, true),
            (84, 99 << 10, true),
            // No such GPU is known. Where a row has no room, threads have a piece each.
            (84, 64 << 10, true),
        ];
        for (multiprocessors, shared_bytes, copies) in [(40, 64 << 10, false), (1, 99 << 10, true)]
            .into_iter()
            .chain(gpus)
        {
            for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
                let odd = [1, 3, 8, 96, 760, 4095, 65536];
                for cols in odd.into_iter().chain((64..=16384).step_by(64)) {
                    for groups in [None, Some(1), Some(8), Some(cols)] {
                        let divides = groups.is_none_or(|groups| cols % groups == 0);
                        for rows in [1, 7, 256, 2048, 100_000] {
                            if divides {
                                let extent = Extent {
                                    dtype,
                                    rows,
                                    cols,
                                    groups,
                                    limits: Limits {
                                        multiprocessors,
                                        shared_bytes,
                                        copies,
                                    },
                                };
                                fits(&extent, Pass::Forward);
                                fits(&extent, Pass::Backward);
                            }
                        }
                    }
                }
            }
        }
    }

    fn fits(extent: &Extent, pass: Pass) {
        let Limits {
            multiprocessors,
            shared_bytes,
            copies,
        } = extent.limits;
        let cut = extent.cut(pass);
        // `Stream::HOLDS` of the kernels: else no row would be on its way.
        let holds = cut.pieces == 1 || cut.pieces * piece(extent.dtype) <= 16;
        assert!(
            copies || pass == Pass::Backward || holds,
            "{extent:?}, {cut:?}"
        );
        let [tiles, chunks, lanes, block_rows] =
            [cut.grid.0, cut.grid.1, cut.block.0, cut.block.1].map(|n| n as usize);
        let chunk_rows = cut.tiling.chunk_rows as usize;
        assert!(chunks * chunk_rows >= extent.rows, "{extent:?}, {cut:?}");
        assert!(
            (chunks - 1) * chunk_rows < extent.rows,
            "{extent:?}, {cut:?}"
        );
        assert!(
            chunks * tiles <= multiprocessors.max(tiles),
            "{extent:?}, {cut:?}"
        );
        assert!(lanes * block_rows <= BLOCK, "{extent:?}, {cut:?}");
        assert!(
            (lanes * block_rows).is_multiple_of(WARP),
            "{extent:?}, {cut:?}"
        );
        assert!(block_rows.is_power_of_two(), "{extent:?}, {cut:?}");
        let slots = cut.tiling.groups_per_tile as usize;
        let span = cut.tiling.span as usize;
        assert!(slots * span <= lanes, "{extent:?}, {cut:?}");
        let pieces = cut.tiling.tiles_per_group as usize * span * cut.pieces;
        let group_len = cut.tiling.group_len as usize;
        assert!(
            pieces * piece(extent.dtype) >= group_len,
            "{extent:?}, {cut:?}"
        );
        for (arrays, sums) in match pass {
            Pass::Forward => [(1, 0), (2, 1)],
            Pass::Backward => [(2, 0), (3, 2)],
        } {
            let (tiling, bytes) = extent.shared(&cut, arrays, sums);
            assert!(
                bytes as usize <= shared_bytes,
                "{bytes}: {extent:?}, {cut:?}"
            );
            let streams = extent.limits.copies && cut.tiling.vectorized != 0;
            let must = streams && (cut.pieces > 1 || shared_bytes >= 99 << 10);
            assert!(
                tiling.stages > 0 || !must,
                "{tiling:?}: {extent:?}, {cut:?}"
            );
            assert!(
                tiling.stages == 0 || streams,
                "{tiling:?}: {extent:?}, {cut:?}"
            );
        }
    }

    /// Sums of a backward on an H100 move at most 15 % of what it must move, where few rows a chunk
    /// would move more, if an eighth of the multiprocessors can be spared.
    #[test]
    fn partial_sums_stay_small() {
        let share = |rows, cols, dtype| {
            let extent = Extent {
                dtype,
                rows,
                cols,
                groups: Some(1),
                limits: Limits {
                    multiprocessors: 132,
                    shared_bytes: 227 << 10,
                    copies: true,
                },
            };
            let cut = extent.cut(Pass::Backward);
            let moved = 2 * 2 * cut.grid.1 as usize * sums_dtype(dtype).size_in_bytes();
            let share = moved as f64 / (3 * rows * dtype.size_in_bytes()) as f64;
            (cut.grid.1, share)
        };
        for (rows, cols, dtype) in [
            (2048, 4096, DType::BF16),
            (2048, 8192, DType::F16),
            (8192, 1024, DType::BF16),
        ] {
            let (chunks, share) = share(rows, cols, dtype);
            assert!(share <= 0.15, "{rows}x{cols}: {chunks} chunks, {share}");
            assert!(chunks >= 132 * 6 / 7, "{rows}x{cols}: {chunks} chunks");
        }
        // Few rows are shared out all the same.
        assert_eq!(share(256, 1024, DType::BF16).0, 64);
    }
}
