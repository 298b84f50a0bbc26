//! What is launched, and with what: every kernel's grid, block, shared memory and arguments.
//!
//! This file deals only with numbers and device addresses. It calls nothing of CUDA.

use crate::config::{ForwardKind, PhiStep, PowerNormConfig, Recipe};
use std::fmt;

/// An address in device memory; 0 for an array that is not there.
pub type Address = u64;

/// A dtype the kernels know, by its number in `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(i64)]
pub enum Dtype {
    #[default]
    F32 = 0,
    F64 = 1,
    F16 = 2,
    BF16 = 3,
}

impl Dtype {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
        }
    }

    /// The dtype its sums are taken in: A of the kernels.
    pub fn sums(self) -> Self {
        match self {
            Dtype::F64 => Dtype::F64,
            _ => Dtype::F32,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F64 => "f64",
            Dtype::F16 => "f16",
            Dtype::BF16 => "bf16",
        }
    }

    /// V of the kernels: elements in a 16-byte access.
    fn piece(self) -> usize {
        16 / self.size()
    }

    /// The most 16-byte pieces a thread can own. Its registers must hold the pieces, widened, next
    /// to one sum for each value, or in a backward two. With more pieces they would spill. Without
    /// `copies` into shared memory, they also hold the next row of a forward.
    fn max_pieces(self, pass: Pass, copies: bool) -> usize {
        match (self, pass) {
            (Dtype::F32, _) => 4,
            (Dtype::F16 | Dtype::BF16, Pass::Forward) if copies => 4,
            _ => 2,
        }
    }
}

/// `Vector` of `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Vector {
    pub data: Address,
    pub dtype: Dtype,
}

/// `Tiling` of `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Tiling {
    rows: i64,
    cols: i64,
    chunk_rows: i64,
    groups: i32,
    group_len: i32,
    span: i32,
    groups_per_tile: i32,
    tiles_per_group: i32,
    vectorized: i32,
    stages: i32,
    ahead: i32,
    stage_bytes: i32,
    ring_bytes: i32,
}

/// `LayerScale` of `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(i32)]
pub enum LayerScale {
    #[default]
    None = 0,
    InTile = 1,
    Given = 2,
}

/// `NormalizeParams` of `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct NormalizeParams {
    tiling: Tiling,
    x: Address,
    residual: Address,
    sum: Address,
    y: Address,
    keep: Address,
    weight: Vector,
    bias: Vector,
    phi: Vector,
    inv_rms: Address,
    factors: Address,
    partials: Address,
    kept: Address,
    layer_scale: LayerScale,
    eps: f64,
    group_eps: f64,
}

/// `SumPartialsParams` of `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct SumPartialsParams {
    partials: Address,
    kept: Address,
    rows: i64,
    cols: i64,
    chunks: i64,
    stride: i64,
    totals: Address,
    count: Address,
}

/// `UpdatePhiParams` of `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct UpdatePhiParams {
    totals: Address,
    all_totals: Address,
    partials: Address,
    all_partials: Address,
    kept: Address,
    rows: i64,
    cols: i64,
    chunks: i64,
    phi: Vector,
    batch_phi: Address,
    inv_rms: Address,
    gamma: Address,
    count: Address,
    eps: f64,
    by_batch: i64,
    update: i64,
    guard: i64,
    cumulative: i64,
    moving: i64,
    old_share: f64,
    new_share: f64,
    alpha: f64,
    beta: f64,
}

/// `NormalizeBwdParams` of `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct NormalizeBwdParams {
    tiling: Tiling,
    x: Address,
    dy: Address,
    dsum: Address,
    dx: Address,
    keep: Address,
    weight: Vector,
    correction: Vector,
    inv_rms: Address,
    batch_phi: Address,
    count: Address,
    factors: Address,
    dots: Address,
    partials: Address,
    layer_scale: LayerScale,
    correction_scale: f64,
    eps: f64,
}

/// `UpdateNuParams` of `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct UpdateNuParams {
    partials: Address,
    totals: Address,
    cols: i64,
    chunks: i64,
    weight: Vector,
    inv_rms: Address,
    gamma: Address,
    count: Address,
    lambda: Address,
    ema_gz: Vector,
    dweight: Vector,
    dbias: Vector,
    beta: f64,
    unscale: f64,
    guard: i64,
}

/// The one argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Params {
    Normalize(NormalizeParams),
    SumPartials(SumPartialsParams),
    UpdatePhi(UpdatePhiParams),
    NormalizeBwd(NormalizeBwdParams),
    UpdateNu(UpdateNuParams),
}

/// An entry point of `kernels/power_norm.cu`. It displays as its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    body: Body,
    dtype: Dtype,
    /// N of the body; 1 for a body that has none.
    pieces: usize,
}

/// The function that an entry point runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body {
    GroupFactors,
    Normalize,
    SumPartials,
    UpdatePhi,
    GroupDots,
    NormalizeBwd,
    UpdateNu,
}

impl Body {
    const COUNT: usize = Body::UpdateNu as usize + 1;

    fn name(self) -> &'static str {
        match self {
            Body::GroupFactors => "group_factors",
            Body::Normalize => "normalize",
            Body::SumPartials => "sum_partials",
            Body::UpdatePhi => "update_phi",
            Body::GroupDots => "group_dots",
            Body::NormalizeBwd => "normalize_bwd",
            Body::UpdateNu => "update_nu",
        }
    }

    /// Whether there is one entry point for each number of pieces.
    fn has_pieces(self) -> bool {
        matches!(self, Body::Normalize | Body::NormalizeBwd)
    }
}

impl Kernel {
    /// One more than the largest [`index`](Self::index).
    pub const COUNT: usize = Body::COUNT * Self::DTYPES * Self::PIECES;

    const DTYPES: usize = 4;

    /// How many numbers of pieces there are: 1, 2 and 4.
    const PIECES: usize = 3;

    /// The place of this kernel in a table of all kernels.
    pub fn index(self) -> usize {
        let of_body = self.body as usize * Self::DTYPES + self.dtype as usize;
        of_body * Self::PIECES + self.pieces.ilog2() as usize
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}_{}", self.body.name(), self.dtype.name())?;
        if self.body.has_pieces() {
            write!(f, "_{}", self.pieces)?;
        }
        Ok(())
    }
}

/// A kernel launch.
#[derive(Debug, Clone)]
pub struct Launch {
    pub kernel: Kernel,
    /// Blocks along x (columns) and y (rows).
    pub grid: (u32, u32),
    /// Threads along x (columns) and y (rows).
    pub block: (u32, u32),
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// The argument.
    pub params: Params,
}

/// The most threads of a block that walks rows. At 128 registers each, they fill a multiprocessor.
const BLOCK: usize = 512;

/// Threads that exchange values directly.
const WARP: usize = 32;

/// The most lanes of a block, unless a group of the layer-scale needs more. With more columns a
/// block would have fewer rows. With fewer columns it would read shorter runs of bytes of each row.
const TILE_LANES: usize = 64;

/// The fewest rows of a chunk, so that its partial sums stay small beside its rows.
const MIN_CHUNK_ROWS: usize = 4;

/// The fewest rows a thread should take, so that the next row loads while the thread works on one.
const MIN_THREAD_ROWS: usize = 2;

/// The most rows on their way: what hides the memory's latency from one block a multiprocessor.
const MAX_STAGES: usize = 3;

/// What a row costs a thread beside its pieces, in pieces: the sum of a group, pointers, tests.
const PIECES_A_ROW: usize = 2;

/// How many rows of an array a block's rows are cut for: two rows of two arrays, or one of three.
const MIN_STAGE_ARRAYS: usize = 4;

/// For the update kernels: the most threads of a block, its lanes, and how many chunks a thread
/// adds while threads are left. A lane is a channel, and the block's rows add chunks side by side.
/// Few lanes make many blocks. Eight lanes read whole 32-byte sectors.
const UPDATE_THREADS: u32 = 1024;
const UPDATE_LANES: [u32; 2] = [8, 32];
const UPDATE_CHUNKS: u32 = 4;

/// Threads of a block that reduces wide groups, and the most blocks; each takes further rows in
/// turn.
const FACTOR_BLOCK: usize = 256;
const FACTOR_BLOCKS: usize = 1 << 16;

/// The fewest bytes that a GPU's memory moves. Rows of sums that a forward writes begin at
/// multiples of them.
const SECTOR: usize = 32;

/// Bytes of a total.
const TOTAL_BYTES: u64 = size_of::<f64>() as u64;

/// What launches are fitted to.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub multiprocessors: usize,
    /// The most shared memory that a block can have.
    pub shared_bytes: usize,
    /// Whether the GPU copies into shared memory by itself. Kernels that were compiled for an older
    /// one load rows into registers even there.
    pub copies: bool,
}

/// One call of a layer on `rows` rows. There is at least one row, except in a training step whose
/// batch is shared with other processes.
#[derive(Debug, Clone, Copy)]
pub struct LaunchPlan {
    pub dtype: Dtype,
    pub rows: usize,
    pub cols: usize,
    /// Whether the forward has a mask.
    pub masked: bool,
    pub config: PowerNormConfig,
    pub limits: Limits,
}

/// Where a forward's arrays are, from 16-byte boundaries on.
#[derive(Debug, Clone, Copy, Default)]
pub struct ForwardBuffers {
    /// `[rows, cols]` of the pass's dtype.
    pub x: Address,
    /// As `x`: added to it first. Or 0.
    pub residual: Address,
    /// As `x`: `x + residual`. 0 without a residual.
    pub sum: Address,
    /// As `x`.
    pub y: Address,
    /// `[rows]` bytes, or 0.
    pub keep: Address,
    /// γ, `[cols]`, or 0.
    pub weight: Vector,
    /// β, `[cols]`, or 0.
    pub bias: Vector,
    /// ψ², `[cols]`.
    pub phi: Vector,
    /// [`LaunchPlan::saved_bytes`]; 0 only where no backward follows and
    /// [`LaunchPlan::needs_saved`] is false.
    pub saved: Address,
    /// [`LaunchPlan::forward_totals`]: `forward` writes this process's totals here, and later the
    /// whole batch's replace them. 0 where no other process shares the batch.
    pub totals: Address,
}

/// Where a backward's arrays are, from 16-byte boundaries on.
#[derive(Debug, Clone, Copy, Default)]
pub struct BackwardBuffers {
    /// `[rows, cols]` of the pass's dtype: what was normalized.
    pub x: Address,
    /// As `x`.
    pub dy: Address,
    /// As `x`: the gradient of the sum with a residual, added to `dx`. Or 0.
    pub dsum: Address,
    /// As `x`, or 0 if it is not wanted.
    pub dx: Address,
    /// `[rows]` bytes, or 0.
    pub keep: Address,
    /// γ, `[cols]`, or 0.
    pub weight: Vector,
    /// ν/(1−α_b), `[cols]`.
    pub ema_gz: Vector,
    /// ∂L/∂γ, `[cols]`, or 0 if it is not wanted.
    pub dweight: Vector,
    /// ∂L/∂β, `[cols]`, or 0 if it is not wanted.
    pub dbias: Vector,
    /// What the forward left.
    pub saved: Address,
    /// [`LaunchPlan::backward_workspace_bytes`].
    pub workspace: Address,
    /// `[cols]` f64, Σ dy x̃: `backward` writes this process's sums here, and later the whole
    /// batch's replace them. 0 where no other process shares the batch, and for an evaluation.
    pub totals: Address,
}

/// A walk over the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
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
    layer_scale: LayerScale,
}

/// How a pass is cut into blocks and threads.
#[derive(Debug)]
struct Cut {
    tiling: Tiling,
    layer_scale: LayerScale,
    /// N of the kernels.
    pieces: usize,
    grid: (u32, u32),
    block: (u32, u32),
}

/// Addresses inside a forward's `saved`: three rows, a count and the factors, of A each.
struct Saved {
    inv_rms: Address,
    gamma: Address,
    batch_phi: Address,
    count: Address,
    factors: Address,
}

/// Addresses after those: what a training forward sums in each chunk of rows.
struct ChunkSums {
    kept: Address,
    partials: Address,
    all_partials: Address,
    end: Address,
}

/// Addresses inside a backward's `workspace`.
struct BackwardWorkspace {
    lambda: Address,
    partials: Address,
    dots: Address,
    end: Address,
}

impl LaunchPlan {
    /// Bytes that a forward works in and leaves to its backward. Sums of chunks are not needed
    /// after [`update_phi`](Self::update_phi). An allocation of their own would take the host a
    /// seventh of a forward, by softgpu's stopwatch. So they stay until the backward: 256 KiB for
    /// 256x1024 in bf16, 2 MiB for 2048x4096.
    pub fn saved_bytes(&self, kind: ForwardKind) -> usize {
        match kind.is_training() {
            true => self.chunk_sums(0).end as usize,
            false => self.statistics_bytes(),
        }
    }

    /// Bytes of [`Saved`].
    fn statistics_bytes(&self) -> usize {
        (3 * self.cols + 1) * self.sum_bytes() + self.group_bytes()
    }

    /// Whether a forward needs `saved` even if no backward follows.
    pub fn needs_saved(&self, kind: ForwardKind) -> bool {
        kind.is_training() || self.cut(Pass::Forward).layer_scale == LayerScale::Given
    }

    /// Bytes that a backward works in.
    pub fn backward_workspace_bytes(&self) -> usize {
        self.backward_workspace(0).end as usize
    }

    /// The f64 numbers of a training forward that are handed out: Σ x̃² over kept rows and the
    /// number of kept rows. Under recipe Fairseq the same two follow for all rows.
    pub fn forward_totals(&self) -> usize {
        match self.config.recipe {
            Recipe::Paper => self.cols + 1,
            Recipe::Fairseq => 2 * (self.cols + 1),
        }
    }

    /// Slots before the forward's totals, so that the backward's are handed out with them; 0 if the
    /// forward's go separately.
    pub fn totals_room(&self, kind: ForwardKind) -> usize {
        match (kind, self.config.recipe) {
            (ForwardKind::RunningStatistic, Recipe::Paper) => self.cols,
            _ => 0,
        }
    }

    /// A forward: `Y = γ ⊙ X̃/D + β`, and the sum of the input and its residual. Without a kept row
    /// a training step is an evaluation. With the batch's statistic only the sums are taken here,
    /// and [`finish_forward`](Self::finish_forward) writes the output.
    ///
    /// ψ² stays; [`update_phi`](Self::update_phi) comes after a training step.
    pub fn forward(&self, buffers: &ForwardBuffers, kind: ForwardKind) -> Vec<Launch> {
        let mut launches = match self.rows {
            0 => self.without_rows(buffers, kind),
            _ => self.forward_rows(buffers, kind),
        };
        if kind.is_training() && buffers.totals != 0 {
            launches.extend(self.totals(buffers));
        }
        launches
    }

    fn without_rows(&self, buffers: &ForwardBuffers, kind: ForwardKind) -> Vec<Launch> {
        if kind != ForwardKind::RunningStatistic {
            return vec![];
        }
        // 1/D by ψ², as for any batch without a kept row. Elsewhere the launch of the output writes
        // it.
        let alone = ForwardBuffers {
            totals: 0,
            ..*buffers
        };
        vec![self.update_phi(&alone, ForwardKind::BatchStatistic, None)]
    }

    fn forward_rows(&self, buffers: &ForwardBuffers, kind: ForwardKind) -> Vec<Launch> {
        let cut = self.cut(Pass::Forward);
        let chunk_sums = self.chunk_sums(buffers.saved);
        let base = self.normalized(&cut, buffers);
        let output = self.output(base, buffers);
        let kept = if self.masked { chunk_sums.kept } else { 0 };
        let sums = |to: NormalizeParams| NormalizeParams {
            partials: chunk_sums.partials,
            kept,
            ..to
        };

        // The first launch adds the residual, the others read what it wrote.
        let mut adds = buffers.residual != 0;
        let mut added =
            |params: NormalizeParams| match (buffers.residual, std::mem::take(&mut adds)) {
                (0, _) => params,
                (residual, true) => NormalizeParams {
                    residual,
                    sum: buffers.sum,
                    ..params
                },
                (_, false) => NormalizeParams {
                    x: buffers.sum,
                    ..params
                },
            };

        let mut launches = vec![];
        if cut.layer_scale == LayerScale::Given {
            launches.push(self.group_factors(added(base)));
        }
        let pass = match kind {
            ForwardKind::Evaluation => output,
            ForwardKind::RunningStatistic => sums(output),
            ForwardKind::BatchStatistic => sums(base),
        };
        launches.push(self.normalize(&cut, added(pass)));
        if kind.is_training() && self.sums_all_rows() {
            let all = NormalizeParams {
                keep: 0,
                partials: chunk_sums.all_partials,
                ..base
            };
            launches.push(self.normalize(&cut, added(all)));
        }
        launches
    }

    /// The rest of a [`forward`](Self::forward), whose buffers are still there.
    pub fn finish_forward(&self, buffers: &ForwardBuffers, kind: ForwardKind) -> Vec<Launch> {
        if kind != ForwardKind::BatchStatistic {
            return vec![];
        }
        let statistics = self.update_phi(buffers, ForwardKind::BatchStatistic, None);
        if self.rows == 0 {
            return vec![statistics];
        }
        let cut = self.cut(Pass::Forward);
        let base = self.normalized(&cut, buffers);
        let output = NormalizeParams {
            x: match buffers.residual {
                0 => buffers.x,
                _ => buffers.sum,
            },
            // D stands in inv_rms.
            phi: Vector::default(),
            ..self.output(base, buffers)
        };
        vec![statistics, self.normalize(&cut, output)]
    }

    /// The layer-scale of a forward, without an output.
    fn normalized(&self, cut: &Cut, buffers: &ForwardBuffers) -> NormalizeParams {
        let saved = self.saved(buffers.saved);
        NormalizeParams {
            tiling: cut.tiling,
            x: buffers.x,
            keep: buffers.keep,
            factors: match cut.layer_scale {
                LayerScale::None => 0,
                _ => saved.factors,
            },
            layer_scale: cut.layer_scale,
            eps: self.config.eps,
            group_eps: self.config.eps,
            ..Default::default()
        }
    }

    /// The layer-scale of a forward, with its output.
    fn output(&self, base: NormalizeParams, buffers: &ForwardBuffers) -> NormalizeParams {
        NormalizeParams {
            y: buffers.y,
            weight: buffers.weight,
            bias: buffers.bias,
            phi: buffers.phi,
            inv_rms: self.saved(buffers.saved).inv_rms,
            ..base
        }
    }

    /// The sums over the rows of a training forward, to be handed out.
    fn totals(&self, buffers: &ForwardBuffers) -> Vec<Launch> {
        let chunk_sums = self.chunk_sums(buffers.saved);
        let count = buffers.totals + self.cols as u64 * TOTAL_BYTES;
        let kept = SumPartialsParams {
            partials: chunk_sums.partials,
            kept: if self.masked { chunk_sums.kept } else { 0 },
            rows: self.rows as i64,
            cols: self.cols as i64,
            chunks: i64::from(self.cut(Pass::Forward).grid.1),
            stride: self.cols as i64,
            totals: buffers.totals,
            count,
        };
        let mut launches = vec![self.sum_partials(kept)];
        if self.config.recipe == Recipe::Fairseq {
            let all = SumPartialsParams {
                partials: match self.sums_all_rows() {
                    true => chunk_sums.all_partials,
                    false => chunk_sums.partials,
                },
                kept: 0,
                totals: count + TOTAL_BYTES,
                count: count + TOTAL_BYTES + self.cols as u64 * TOTAL_BYTES,
                ..kept
            };
            launches.push(self.sum_partials(all));
        }
        launches
    }

    /// The statistics of a training [`forward`](Self::forward). Its ψ² and `saved` must still be
    /// there, and its `totals` if it has them. If there is a step, this applies it to ψ².
    pub fn update_phi(
        &self,
        buffers: &ForwardBuffers,
        kind: ForwardKind,
        step: Option<&PhiStep>,
    ) -> Launch {
        let saved = self.saved(buffers.saved);
        let chunk_sums = self.chunk_sums(buffers.saved);
        let when = |yes: bool, address| if yes { address } else { 0 };
        let shared = buffers.totals != 0;
        let fairseq = self.config.recipe == Recipe::Fairseq;
        let all_totals = buffers.totals + (self.cols as u64 + 1) * TOTAL_BYTES;
        let cumulative = step.and_then(|step| step.cumulative);
        let moving = step.and_then(|step| step.moving);
        let params = UpdatePhiParams {
            totals: buffers.totals,
            all_totals: when(shared && fairseq, all_totals),
            partials: when(!shared, chunk_sums.partials),
            all_partials: when(!shared && self.sums_all_rows(), chunk_sums.all_partials),
            kept: when(!shared && self.masked, chunk_sums.kept),
            rows: self.rows as i64,
            cols: self.cols as i64,
            chunks: i64::from(self.cut(Pass::Forward).grid.1),
            phi: buffers.phi,
            batch_phi: saved.batch_phi,
            inv_rms: saved.inv_rms,
            gamma: saved.gamma,
            count: saved.count,
            eps: self.config.eps,
            by_batch: (kind == ForwardKind::BatchStatistic).into(),
            update: step.is_some().into(),
            guard: (self.config.recipe == Recipe::Paper).into(),
            cumulative: cumulative.is_some().into(),
            moving: moving.is_some().into(),
            old_share: cumulative.map_or(0., |shares| shares.old),
            new_share: cumulative.map_or(0., |shares| shares.new),
            alpha: moving.map_or(0., |shares| shares.old),
            beta: moving.map_or(0., |shares| shares.new),
        };
        self.update(Body::UpdatePhi, params.chunks, Params::UpdatePhi(params))
    }

    /// The gradients of a [`forward`](Self::forward) of the same `kind`, for a loss times
    /// `loss_scale`. This makes what does not need the sums of the whole batch.
    /// [`update_nu`](Self::update_nu) and then [`finish_backward`](Self::finish_backward) make the
    /// rest.
    ///
    /// With `g = γ ⊙ dy` every `∂L/∂X̃` has the form `gain ⊙ dy − decay ⊙ X̃`. The cases are the
    /// same as in the CPU's backward.
    pub fn backward(
        &self,
        buffers: &BackwardBuffers,
        kind: ForwardKind,
        loss_scale: f64,
    ) -> Vec<Launch> {
        let mut launches = match self.rows {
            0 => vec![],
            _ => self.backward_rows(buffers, kind, loss_scale),
        };
        if buffers.totals != 0 {
            launches.push(self.sum_partials(SumPartialsParams {
                partials: self.backward_workspace(buffers.workspace).partials,
                cols: self.cols as i64,
                chunks: i64::from(self.cut(Pass::Backward).grid.1),
                stride: 2 * self.cols as i64,
                totals: buffers.totals,
                ..Default::default()
            }));
        }
        launches
    }

    fn backward_rows(
        &self,
        buffers: &BackwardBuffers,
        kind: ForwardKind,
        loss_scale: f64,
    ) -> Vec<Launch> {
        let cut = self.cut(Pass::Backward);
        let workspace = self.backward_workspace(buffers.workspace);
        let base = self.gradient(&cut, buffers, kind);
        let sums = NormalizeBwdParams {
            partials: workspace.partials,
            ..base
        };
        let nu = NormalizeBwdParams {
            correction: buffers.ema_gz,
            correction_scale: (1. - self.config.alpha_bwd) * loss_scale,
            ..base
        };
        let correction = match kind {
            ForwardKind::Evaluation => base,
            _ => nu,
        };
        let input = buffers.dx != 0;
        let wants_sums = wants_sums(buffers, kind);
        let mut launches = vec![];
        if self.config.is_exact(kind) || !input {
            if wants_sums {
                launches.push(self.normalize_bwd(&cut, sums));
            }
        } else if wants_sums {
            let with_sums = NormalizeBwdParams {
                partials: workspace.partials,
                ..correction
            };
            launches.extend(self.input_gradient(&cut, buffers, with_sums));
        } else {
            launches.extend(self.input_gradient(&cut, buffers, correction));
        }
        launches
    }

    /// Makes from the sums of a [`backward`](Self::backward) the parameters' gradients and Λ, and
    /// the step of ν unless ν's array is 0. The arrays of rows may have been freed.
    pub fn update_nu(
        &self,
        buffers: &BackwardBuffers,
        kind: ForwardKind,
        loss_scale: f64,
    ) -> Option<Launch> {
        if !wants_sums(buffers, kind) {
            return None;
        }
        let saved = self.saved(buffers.saved);
        let workspace = self.backward_workspace(buffers.workspace);
        let params = UpdateNuParams {
            partials: workspace.partials,
            totals: buffers.totals,
            cols: self.cols as i64,
            chunks: i64::from(self.cut(Pass::Backward).grid.1),
            weight: buffers.weight,
            inv_rms: saved.inv_rms,
            gamma: saved.gamma,
            count: if kind.is_training() { saved.count } else { 0 },
            lambda: workspace.lambda,
            ema_gz: match kind {
                ForwardKind::Evaluation => Vector::default(),
                _ => buffers.ema_gz,
            },
            dweight: buffers.dweight,
            dbias: buffers.dbias,
            beta: 1. - self.config.alpha_bwd,
            unscale: loss_scale.recip(),
            guard: (self.config.recipe == Recipe::Paper).into(),
        };
        Some(self.update(Body::UpdateNu, params.chunks, Params::UpdateNu(params)))
    }

    /// The rest of a [`backward`](Self::backward) after its [`update_nu`](Self::update_nu): the
    /// input's gradient, if it depends on Λ.
    pub fn finish_backward(&self, buffers: &BackwardBuffers, kind: ForwardKind) -> Vec<Launch> {
        if !self.config.is_exact(kind) || buffers.dx == 0 || self.rows == 0 {
            return vec![];
        }
        let cut = self.cut(Pass::Backward);
        let lambda = NormalizeBwdParams {
            correction: Vector {
                data: self.backward_workspace(buffers.workspace).lambda,
                dtype: self.dtype.sums(),
            },
            correction_scale: 1.,
            ..self.gradient(&cut, buffers, kind)
        };
        self.input_gradient(&cut, buffers, lambda)
    }

    /// A pass over the rows of a backward, without a correction and without results.
    fn gradient(
        &self,
        cut: &Cut,
        buffers: &BackwardBuffers,
        kind: ForwardKind,
    ) -> NormalizeBwdParams {
        let saved = self.saved(buffers.saved);
        // Under recipe Fairseq the backward does not know the mask, so it reads the count.
        // Elsewhere the mask shows a batch without a kept row, and the count need not be known yet.
        let fairseq = self.config.recipe == Recipe::Fairseq;
        let of_fairseq = |address| if fairseq { address } else { 0 };
        let of_training = |address| if kind.is_training() { address } else { 0 };
        NormalizeBwdParams {
            tiling: cut.tiling,
            x: buffers.x,
            dy: buffers.dy,
            keep: if fairseq { 0 } else { buffers.keep },
            weight: buffers.weight,
            inv_rms: saved.inv_rms,
            batch_phi: of_training(of_fairseq(saved.batch_phi)),
            count: of_training(of_fairseq(saved.count)),
            factors: saved.factors,
            dots: self.backward_workspace(buffers.workspace).dots,
            layer_scale: cut.layer_scale,
            eps: self.config.eps,
            ..Default::default()
        }
    }

    /// The launches that write the input's gradient.
    fn input_gradient(
        &self,
        cut: &Cut,
        buffers: &BackwardBuffers,
        params: NormalizeBwdParams,
    ) -> Vec<Launch> {
        let output = NormalizeBwdParams {
            dsum: buffers.dsum,
            dx: buffers.dx,
            ..params
        };
        let output = self.normalize_bwd(cut, output);
        match cut.layer_scale {
            LayerScale::Given => vec![self.group_dots(params), output],
            _ => vec![output],
        }
    }

    /// Bytes of the factors that [`scale_groups`](Self::scale_groups) keeps between its launches;
    /// `None` if it has one launch.
    pub fn scale_groups_bytes(&self) -> Option<usize> {
        let given = self.cut(Pass::Forward).layer_scale == LayerScale::Given;
        given.then(|| self.group_bytes())
    }

    /// The layer-scale without a layer: X̃ of `x`, into `y`. `factors` is as in
    /// [`scale_groups_bytes`](Self::scale_groups_bytes).
    pub fn scale_groups(&self, x: Address, y: Address, factors: Address) -> Vec<Launch> {
        let cut = self.cut(Pass::Forward);
        let given = cut.layer_scale == LayerScale::Given;
        let base = NormalizeParams {
            tiling: cut.tiling,
            x,
            factors,
            layer_scale: cut.layer_scale,
            group_eps: self.config.eps,
            ..Default::default()
        };
        let output = self.normalize(&cut, NormalizeParams { y, ..base });
        match given {
            true => vec![self.group_factors(base), output],
            false => vec![output],
        }
    }

    /// The gradient of [`scale_groups`](Self::scale_groups) from `dy`, into `dx`. `workspace` is
    /// twice as in [`group_bytes`](Self::group_bytes).
    pub fn scale_groups_bwd(&self, [x, dy, dx]: [Address; 3], workspace: Address) -> Vec<Launch> {
        let (factors, dots) = (workspace, workspace + self.group_bytes() as u64);
        let forward = self.cut(Pass::Forward);
        let scale = NormalizeParams {
            tiling: forward.tiling,
            x,
            factors,
            layer_scale: forward.layer_scale,
            group_eps: self.config.eps,
            ..Default::default()
        };
        let mut launches = vec![match forward.layer_scale {
            LayerScale::Given => self.group_factors(scale),
            // Without an output it writes nothing but the factors.
            _ => self.normalize(&forward, scale),
        }];
        let cut = self.cut(Pass::Backward);
        let base = NormalizeBwdParams {
            tiling: cut.tiling,
            x,
            dy,
            factors,
            dots,
            layer_scale: cut.layer_scale,
            ..Default::default()
        };
        if cut.layer_scale == LayerScale::Given {
            launches.push(self.group_dots(base));
        }
        launches.push(self.normalize_bwd(&cut, NormalizeBwdParams { dx, ..base }));
        launches
    }

    /// Bytes of a number for each row and group.
    pub fn group_bytes(&self) -> usize {
        self.config.group_scaling.unwrap_or(0) * self.rows * self.sum_bytes()
    }

    /// Fairseq's Γ runs over padded rows too.
    fn sums_all_rows(&self) -> bool {
        self.config.recipe == Recipe::Fairseq && self.masked
    }

    fn normalize(&self, cut: &Cut, params: NormalizeParams) -> Launch {
        let arrays = 1 + usize::from(params.residual != 0);
        let sums = usize::from(params.partials != 0);
        let (tiling, shared_bytes) = self.shared(cut, arrays, sums);
        let params = Params::Normalize(NormalizeParams { tiling, ..params });
        self.tiled(Body::Normalize, cut, shared_bytes, params)
    }

    fn normalize_bwd(&self, cut: &Cut, params: NormalizeBwdParams) -> Launch {
        let arrays = 2 + usize::from(params.dsum != 0);
        let sums = 2 * usize::from(params.partials != 0);
        let (tiling, shared_bytes) = self.shared(cut, arrays, sums);
        let params = Params::NormalizeBwd(NormalizeBwdParams { tiling, ..params });
        self.tiled(Body::NormalizeBwd, cut, shared_bytes, params)
    }

    /// How many rows of `arrays` arrays are on their way, and the bytes of a block that takes
    /// `sums` sums of each column: `Shared` of the kernels.
    fn shared(&self, cut: &Cut, arrays: usize, sums: usize) -> (Tiling, u32) {
        let (lanes, rows) = (cut.block.0 as usize, cut.block.1 as usize);
        let values = cut.pieces * self.dtype.piece();
        let exchanges = exchanges(cut.layer_scale, cut.tiling.span as usize);
        let fixed = self.fixed_bytes(lanes, rows, exchanges, cut.pieces);
        // Half of the rows hand over sums, an odd number of values each, or an int64 count of rows.
        let added = rows / 2 * lanes * (((values * sums) | 1) * self.sum_bytes()).max(8);
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

    /// Whether rows come by way of shared memory.
    fn streams(&self, vectorized: bool) -> bool {
        self.limits.copies && vectorized
    }

    /// Bytes of shared memory beside rows on their way: two numbers a column, in an odd number of
    /// 16-byte pieces for each lane, and what warps exchange if they do.
    fn fixed_bytes(&self, lanes: usize, rows: usize, exchanges: bool, pieces: usize) -> usize {
        let columns = 2 * pieces * self.sum_bytes() / self.dtype.size() + 1;
        let exchanged = match exchanges {
            true => self.exchanged_bytes(rows),
            false => 0,
        };
        lanes * columns * 16 + exchanged
    }

    /// Bytes by which the warps of each of a block's rows add numbers up: `RowSum` of the kernels.
    fn exchanged_bytes(&self, rows: usize) -> usize {
        2 * rows * (BLOCK / WARP) * self.sum_bytes()
    }

    /// A launch over the tiles of `cut`.
    fn tiled(&self, body: Body, cut: &Cut, shared_bytes: u32, params: Params) -> Launch {
        Launch {
            kernel: Kernel {
                body,
                dtype: self.dtype,
                pieces: cut.pieces,
            },
            grid: cut.grid,
            block: cut.block,
            shared_bytes,
            params,
        }
    }

    /// A launch of one lane a channel, which adds so many chunks.
    fn update(&self, body: Body, chunks: i64, params: Params) -> Launch {
        let [few, many] = UPDATE_LANES;
        let cols = self.cols as u32;
        let wide = cols.div_ceil(many) as usize >= self.limits.multiprocessors;
        let lanes = if wide { many } else { few };
        let side_by_side = (chunks as u32 / UPDATE_CHUNKS)
            .next_power_of_two()
            .clamp(WARP as u32 / few, UPDATE_THREADS / lanes);
        Launch {
            kernel: Kernel {
                body,
                dtype: self.dtype.sums(),
                pieces: 1,
            },
            grid: (cols.div_ceil(lanes), 1),
            block: (lanes, side_by_side),
            // Half of the threads hand over two sums of 8 bytes at most, in the room of three.
            shared_bytes: lanes * side_by_side / 2 * 24,
            params,
        }
    }

    fn sum_partials(&self, params: SumPartialsParams) -> Launch {
        self.update(
            Body::SumPartials,
            params.chunks,
            Params::SumPartials(params),
        )
    }

    fn group_factors(&self, params: NormalizeParams) -> Launch {
        self.by_group(Body::GroupFactors, params.tiling, Params::Normalize(params))
    }

    fn group_dots(&self, params: NormalizeBwdParams) -> Launch {
        self.by_group(Body::GroupDots, params.tiling, Params::NormalizeBwd(params))
    }

    /// A launch of a block a group.
    fn by_group(&self, body: Body, tiling: Tiling, params: Params) -> Launch {
        let groups = self.rows * tiling.groups as usize;
        Launch {
            kernel: Kernel {
                body,
                dtype: self.dtype,
                pieces: 1,
            },
            grid: (groups.min(FACTOR_BLOCKS) as u32, 1),
            block: (FACTOR_BLOCK as u32, 1),
            shared_bytes: self.exchanged_bytes(1) as u32,
            params,
        }
    }

    /// How a pass is cut, from shape, dtype and GPU alone: two runs add the same terms in the same
    /// order.
    ///
    /// Rows are cut into as many chunks as give each multiprocessor at most one block. If there are
    /// more tiles than multiprocessors, there is one chunk. One block is enough, because its next
    /// rows are on their way while it works. Fewer blocks move fewer partial sums and coefficients.
    fn cut(&self, pass: Pass) -> Cut {
        let most = self.dtype.max_pieces(pass, self.limits.copies);
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
        let groups = self.config.group_scaling.unwrap_or(1);
        let group_len = self.cols / groups;
        let vectorized = group_len.is_multiple_of(self.dtype.piece());
        let most_pieces = if vectorized { most } else { 1 };
        let group_pieces = group_len.div_ceil(self.dtype.piece());
        let tile = self.tile(pass, groups, group_pieces, most_pieces, vectorized);
        let tiles = groups.div_ceil(tile.groups) * tile.per_group;
        let chunks = (self.limits.multiprocessors / tiles).max(1);
        let chunk_rows = self.rows.div_ceil(chunks).max(MIN_CHUNK_ROWS);
        // The block is whole warps, and its rows are a power of two. There are no more than the
        // chunk has rows for and shared memory has room for.
        let least = WARP >> tile.lanes.trailing_zeros().min(WARP.ilog2());
        let mut most = 1 << (BLOCK / tile.lanes).ilog2();
        let has_room = |rows| {
            let exchanges = exchanges(tile.layer_scale, tile.span);
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
            layer_scale: tile.layer_scale,
            pieces: tile.pieces,
            grid: (tiles as u32, self.rows.div_ceil(chunk_rows) as u32),
            block: (tile.lanes as u32, block_rows as u32),
        }
    }

    /// The rows of a chunk, at least `chunk_rows` and a multiple of `block_rows`. There are up to
    /// an eighth more where a backward's partial sums would move more than 15 % of what it must
    /// move. Rows in flight still fill the memory's time with an eighth of the multiprocessors idle.
    fn spared(&self, chunk_rows: usize, block_rows: usize) -> usize {
        // Two sums of a column are written and read again, beside x, dy and dx.
        let sums = 2 * 2 * self.sum_bytes();
        let enough = (100 * sums).div_ceil(15 * 3 * self.dtype.size());
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
        let reduces = self.config.group_scaling.is_some();
        // What a block needs if it has one row of such a group.
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
                layer_scale: match reduces {
                    true => LayerScale::Given,
                    false => LayerScale::None,
                },
            }
        }
    }

    /// How many tiles a group of so many lanes is cut into, and the lanes of each tile. There are
    /// as few tiles as possible, unless more of them keep an eighth more multiprocessors busy.
    fn parts(&self, groups: usize, group_lanes: usize) -> (usize, usize) {
        let multiprocessors = self.limits.multiprocessors;
        let fewest = group_lanes.div_ceil(TILE_LANES);
        // All tiles have as many lanes, by which a block of whole warps has a power of two of rows.
        let lanes_of = |per_group: usize| match group_lanes.div_ceil(per_group) {
            few @ 0..4 => few.next_power_of_two(),
            lanes => lanes.next_multiple_of(4),
        };
        // What the last multiprocessor has to do: tiles in turn, or a chunk of one.
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
            layer_scale: LayerScale::InTile,
        }
    }

    fn sum_bytes(&self) -> usize {
        self.dtype.sums().size()
    }

    fn saved(&self, start: Address) -> Saved {
        let row = |i: usize| match start {
            0 => 0,
            _ => start + (i * self.cols * self.sum_bytes()) as u64,
        };
        let count = row(3);
        Saved {
            inv_rms: row(0),
            gamma: row(1),
            batch_phi: row(2),
            count,
            factors: match (start, self.config.group_scaling) {
                (0, _) | (_, None) => 0,
                _ => count + self.sum_bytes() as u64,
            },
        }
    }

    fn chunk_sums(&self, saved: Address) -> ChunkSums {
        let chunks = u64::from(self.cut(Pass::Forward).grid.1);
        let sums = chunks * (self.cols * self.sum_bytes()) as u64;
        let start = saved + self.statistics_bytes().next_multiple_of(SECTOR) as u64;
        let partials = start + (chunks * 8).next_multiple_of(SECTOR as u64);
        let all_partials = partials + sums;
        ChunkSums {
            kept: start,
            partials,
            all_partials,
            end: match self.sums_all_rows() {
                true => all_partials + sums,
                false => all_partials,
            },
        }
    }

    fn backward_workspace(&self, start: Address) -> BackwardWorkspace {
        let cut = self.cut(Pass::Backward);
        let row = (self.cols * self.sum_bytes()) as u64;
        let partials = start + row;
        let dots = partials + 2 * u64::from(cut.grid.1) * row;
        let dots_bytes = match cut.layer_scale {
            LayerScale::Given => self.group_bytes(),
            _ => 0,
        };
        BackwardWorkspace {
            lambda: start,
            partials,
            dots,
            end: dots + dots_bytes as u64,
        }
    }
}

/// Whether a block's warps exchange sums, for groups of so many lanes.
fn exchanges(layer_scale: LayerScale, span: usize) -> bool {
    layer_scale == LayerScale::InTile && span > WARP
}

/// Bytes of a row of one array that so many threads have on its way.
fn stage_bytes(threads: usize, pieces: usize) -> usize {
    threads * pieces * 16
}

/// Whether a backward sums over rows.
fn wants_sums(buffers: &BackwardBuffers, kind: ForwardKind) -> bool {
    kind.is_training() || buffers.dweight.data != 0 || buffers.dbias.data != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::mem::offset_of;
    use std::process::Command;

    /// Each entry point that `kernels/power_norm.cu` defines is a kernel with a place of its own.
    #[test]
    fn kernels_have_names_and_places_of_their_own() {
        let bodies = [
            Body::GroupFactors,
            Body::Normalize,
            Body::SumPartials,
            Body::UpdatePhi,
            Body::GroupDots,
            Body::NormalizeBwd,
            Body::UpdateNu,
        ];
        let dtypes = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::BF16];
        let (mut names, mut places) = (HashSet::new(), HashSet::new());
        for body in bodies {
            for dtype in dtypes {
                for pieces in [1, 2, 4] {
                    let kernel = Kernel {
                        body,
                        dtype,
                        pieces,
                    };
                    assert!(kernel.index() < Kernel::COUNT);
                    assert!(places.insert(kernel.index()), "{kernel}");
                    names.insert(kernel.to_string());
                }
            }
        }
        let source = include_str!("../../kernels/power_norm.cu");
        let defined = source.lines().filter_map(|line| {
            let entry = line.trim().strip_prefix("DEFINE(")?;
            entry.split(',').next()
        });
        let mut count = 0;
        for name in defined {
            assert!(names.contains(name), "{name}");
            count += 1;
        }
        assert!(count > 0);
    }

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
            for dtype in [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::BF16] {
                let odd = [1, 3, 8, 96, 760, 4095, 65536];
                for cols in odd.into_iter().chain((64..=16384).step_by(64)) {
                    for group_scaling in [None, Some(1), Some(8), Some(cols)] {
                        let divides = group_scaling.is_none_or(|groups| cols % groups == 0);
                        for rows in [1, 7, 256, 2048, 100_000] {
                            if divides {
                                let plan = LaunchPlan {
                                    dtype,
                                    rows,
                                    cols,
                                    masked: false,
                                    config: PowerNormConfig {
                                        group_scaling,
                                        ..1e-5.into()
                                    },
                                    limits: Limits {
                                        multiprocessors,
                                        shared_bytes,
                                        copies,
                                    },
                                };
                                fits(&plan, Pass::Forward);
                                fits(&plan, Pass::Backward);
                            }
                        }
                    }
                }
            }
        }
    }

    fn fits(plan: &LaunchPlan, pass: Pass) {
        let Limits {
            multiprocessors,
            shared_bytes,
            copies,
        } = plan.limits;
        let cut = plan.cut(pass);
        // `Stream::HOLDS` of the kernels: else no row would be on its way.
        let holds = cut.pieces == 1 || cut.pieces * plan.dtype.piece() <= 16;
        assert!(
            copies || pass == Pass::Backward || holds,
            "{plan:?}, {cut:?}"
        );
        let [tiles, chunks, lanes, block_rows] =
            [cut.grid.0, cut.grid.1, cut.block.0, cut.block.1].map(|n| n as usize);
        let chunk_rows = cut.tiling.chunk_rows as usize;
        assert!(chunks * chunk_rows >= plan.rows, "{plan:?}, {cut:?}");
        assert!((chunks - 1) * chunk_rows < plan.rows, "{plan:?}, {cut:?}");
        assert!(
            chunks * tiles <= multiprocessors.max(tiles),
            "{plan:?}, {cut:?}"
        );
        assert!(lanes * block_rows <= BLOCK, "{plan:?}, {cut:?}");
        assert!(
            (lanes * block_rows).is_multiple_of(WARP),
            "{plan:?}, {cut:?}"
        );
        assert!(block_rows.is_power_of_two(), "{plan:?}, {cut:?}");
        let slots = cut.tiling.groups_per_tile as usize;
        let span = cut.tiling.span as usize;
        assert!(slots * span <= lanes, "{plan:?}, {cut:?}");
        let pieces = cut.tiling.tiles_per_group as usize * span * cut.pieces;
        let group_len = cut.tiling.group_len as usize;
        assert!(
            pieces * plan.dtype.piece() >= group_len,
            "{plan:?}, {cut:?}"
        );
        for (arrays, sums) in match pass {
            Pass::Forward => [(1, 0), (2, 1)],
            Pass::Backward => [(2, 0), (3, 2)],
        } {
            let (tiling, bytes) = plan.shared(&cut, arrays, sums);
            assert!(bytes as usize <= shared_bytes, "{bytes}: {plan:?}, {cut:?}");
            let streams = plan.limits.copies && cut.tiling.vectorized != 0;
            let must = streams && (cut.pieces > 1 || shared_bytes >= 99 << 10);
            assert!(tiling.stages > 0 || !must, "{tiling:?}: {plan:?}, {cut:?}");
            assert!(
                tiling.stages == 0 || streams,
                "{tiling:?}: {plan:?}, {cut:?}"
            );
        }
    }

    /// Sums of a backward on an H100 move at most 15 % of what it must move, where few rows a chunk
    /// would move more, if an eighth of the multiprocessors can be spared.
    #[test]
    fn partial_sums_stay_small() {
        let share = |rows, cols, dtype| {
            let plan = LaunchPlan {
                dtype,
                rows,
                cols,
                masked: false,
                config: 1e-5.into(),
                limits: Limits {
                    multiprocessors: 132,
                    shared_bytes: 227 << 10,
                    copies: true,
                },
            };
            let cut = plan.cut(Pass::Backward);
            let moved = 2 * 2 * cut.grid.1 as usize * plan.sum_bytes();
            let share = moved as f64 / (3 * rows * dtype.size()) as f64;
            (cut.grid.1, share)
        };
        for (rows, cols, dtype) in [
            (2048, 4096, Dtype::BF16),
            (2048, 8192, Dtype::F16),
            (8192, 1024, Dtype::BF16),
        ] {
            let (chunks, share) = share(rows, cols, dtype);
            assert!(share <= 0.15, "{rows}x{cols}: {chunks} chunks, {share}");
            assert!(chunks >= 132 * 6 / 7, "{rows}x{cols}: {chunks} chunks");
        }
        // Few rows are shared out all the same.
        assert_eq!(share(256, 1024, Dtype::BF16).0, 64);
    }

    /// A `static_assert` for the size of a struct and for the offset of each field, by its name.
    macro_rules! layout {
        ($name:ident { $($field:ident),* $(,)? }) => {{
            // This compiles only where all fields are named.
            let _ = |$name { $($field: _),* }: $name| ();
            let mut asserts = vec![assertion(
                concat!("sizeof(", stringify!($name), ")"),
                size_of::<$name>(),
            )];
            $(asserts.push(assertion(
                concat!("offsetof(", stringify!($name), ", ", stringify!($field), ")"),
                offset_of!($name, $field),
            ));)*
            asserts
        }};
    }

    fn assertion(expression: &str, value: usize) -> String {
        format!("static_assert({expression} == {value}, \"{value} in src/cuda/launch.rs\");\n")
    }

    fn layouts() -> Vec<String> {
        [
            layout!(Vector { data, dtype }),
            layout!(Tiling {
                rows,
                cols,
                chunk_rows,
                groups,
                group_len,
                span,
                groups_per_tile,
                tiles_per_group,
                vectorized,
                stages,
                ahead,
                stage_bytes,
                ring_bytes,
            }),
            layout!(NormalizeParams {
                tiling,
                x,
                residual,
                sum,
                y,
                keep,
                weight,
                bias,
                phi,
                inv_rms,
                factors,
                partials,
                kept,
                layer_scale,
                eps,
                group_eps,
            }),
            layout!(SumPartialsParams {
                partials,
                kept,
                rows,
                cols,
                chunks,
                stride,
                totals,
                count,
            }),
            layout!(UpdatePhiParams {
                totals,
                all_totals,
                partials,
                all_partials,
                kept,
                rows,
                cols,
                chunks,
                phi,
                batch_phi,
                inv_rms,
                gamma,
                count,
                eps,
                by_batch,
                update,
                guard,
                cumulative,
                moving,
                old_share,
                new_share,
                alpha,
                beta,
            }),
            layout!(NormalizeBwdParams {
                tiling,
                x,
                dy,
                dsum,
                dx,
                keep,
                weight,
                correction,
                inv_rms,
                batch_phi,
                count,
                factors,
                dots,
                partials,
                layer_scale,
                correction_scale,
                eps,
            }),
            layout!(UpdateNuParams {
                partials,
                totals,
                cols,
                chunks,
                weight,
                inv_rms,
                gamma,
                count,
                lambda,
                ema_gz,
                dweight,
                dbias,
                beta,
                unscale,
                guard,
            }),
            vec![
                assertion("F32", Dtype::F32 as usize),
                assertion("F64", Dtype::F64 as usize),
                assertion("F16", Dtype::F16 as usize),
                assertion("BF16", Dtype::BF16 as usize),
                assertion("MAX_STAGES", MAX_STAGES),
                assertion("MAX_WARPS", BLOCK / WARP),
                assertion("NO_SCALE", LayerScale::None as usize),
                assertion("IN_TILE", LayerScale::InTile as usize),
                assertion("GIVEN", LayerScale::Given as usize),
            ],
        ]
        .concat()
    }

    /// Compiles assertions about `kernels/params.cuh`. Gives what nvcc said where it refused.
    fn nvcc(asserts: &[String]) -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("layout.cu");
        let text = format!(
            "#include <cstddef>\n#include \"params.cuh\"\n{}",
            asserts.concat()
        );
        std::fs::write(&source, text).unwrap();
        let kernels = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        let output = Command::new("nvcc")
            .args(["-std=c++17", "-ptx", "-I", kernels, "-o"])
            .arg(folder.path().join("layout.ptx"))
            .arg(source)
            .output()
            .expect("nvcc, which compiled the kernels, on the PATH");
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    /// nvcc lays the arguments of the kernels out as Rust does.
    #[test]
    fn arguments_are_laid_out_as_nvcc_has_them() {
        nvcc(&layouts()).unwrap();
        // A field elsewhere would be noticed.
        let elsewhere = assertion("offsetof(Tiling, span)", offset_of!(Tiling, span) + 4);
        let refusal = nvcc(&[elsewhere]).unwrap_err();
        assert!(refusal.contains("in src/cuda/launch.rs"), "{refusal}");
    }
}
