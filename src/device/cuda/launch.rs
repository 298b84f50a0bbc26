//! The launches of every pass: each kernel's grid, block, shared memory and arguments.
//!
//! This file deals only with numbers and device addresses. It calls nothing of CUDA.

use super::cut::{Cut, Extent, Limits, Pass, WARP};
use super::params::{
    Address, Dtype, GroupScaling, NormalizeBwdParams, NormalizeParams, Params, SumPartialsParams,
    Tiling, UpdateNuParams, UpdatePhiParams, Vector,
};
use crate::config::{ForwardKind, PhiStep, PowerNormConfig, Recipe};
use crate::error::Error;
use std::fmt;

/// An entry point of `kernels/power_norm.cu`. It displays as its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel {
    body: Body,
    dtype: Dtype,
    /// N of the body; 1 for a body that has none.
    pieces: usize,
}

/// The function that an entry point runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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

    /// `true` if there is one entry point for each number of pieces.
    fn has_pieces(self) -> bool {
        matches!(self, Body::Normalize | Body::NormalizeBwd)
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

/// One call of a layer. There is at least one row, except in a training step whose batch is shared
/// with other processes.
#[derive(Debug, Clone, Copy)]
pub struct LaunchPlan {
    extent: Extent,
    kind: ForwardKind,
    config: PowerNormConfig,
    /// The forward has a mask.
    pub masked: bool,
    /// The forward divides by D. If not, it is the group scaling alone.
    pub divides: bool,
    /// Of the forward, or of the backward.
    cut: Cut,
}

/// Addresses of a forward's arrays, which begin on 16-byte boundaries.
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

/// Addresses of a backward's arrays, which begin on 16-byte boundaries.
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
    /// The forward's `saved`.
    pub saved: Address,
    /// [`LaunchPlan::backward_workspace_bytes`].
    pub workspace: Address,
    /// `[cols]` f64, Σ dy x̃: `backward` writes this process's sums here, and later the whole
    /// batch's replace them. 0 where no other process shares the batch, and for an evaluation.
    pub totals: Address,
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
    /// The plan of a forward for `rows` rows of `cols` channels, without a mask.
    pub fn new(
        dtype: Dtype,
        [rows, cols]: [usize; 2],
        config: PowerNormConfig,
        kind: ForwardKind,
        limits: Limits,
    ) -> Result<Self, Error> {
        let extent = Extent {
            dtype,
            rows,
            cols,
            groups: config.group_scaling,
            limits,
        };
        Ok(Self {
            extent,
            kind,
            config,
            masked: false,
            divides: true,
            cut: checked_cut(&extent, Pass::Forward)?,
        })
    }

    /// The plan of the backward of this forward.
    pub fn of_backward(&self) -> Result<Self, Error> {
        let cut = checked_cut(&self.extent, Pass::Backward)?;
        Ok(Self { cut, ..*self })
    }

    pub fn rows(&self) -> usize {
        self.extent.rows
    }

    pub fn cols(&self) -> usize {
        self.extent.cols
    }

    pub fn kind(&self) -> ForwardKind {
        self.kind
    }

    /// Bytes that a forward works in and leaves to its backward. Sums of chunks are not needed
    /// after [`update_phi`](Self::update_phi). An allocation of their own would take the host a
    /// seventh of a forward, by softgpu's stopwatch. So they stay until the backward: 256 KiB for
    /// 256x1024 in bf16, 2 MiB for 2048x4096.
    pub fn saved_bytes(&self) -> usize {
        match self.kind.is_training() {
            true => self.chunk_sums(0).end as usize,
            false => self.statistics_bytes(),
        }
    }

    /// Bytes of [`Saved`].
    fn statistics_bytes(&self) -> usize {
        (3 * self.cols() + 1) * self.sum_bytes() + self.group_bytes()
    }

    /// `true` if a forward needs `saved` even if no backward follows.
    pub fn needs_saved(&self) -> bool {
        self.kind.is_training() || self.cut.group_scaling == GroupScaling::Given
    }

    /// Bytes that a backward works in.
    pub fn backward_workspace_bytes(&self) -> usize {
        self.backward_workspace(0).end as usize
    }

    /// The f64 numbers of a training forward that are handed out: Σ x̃² over kept rows and the
    /// number of kept rows. Under recipe Fairseq the same two follow for all rows.
    pub fn forward_totals(&self) -> usize {
        match self.config.recipe {
            Recipe::Paper => self.cols() + 1,
            Recipe::Fairseq => 2 * (self.cols() + 1),
        }
    }

    /// A forward: `Y = γ ⊙ X̃/D + β`, and the sum of the input and its residual. Without a kept row
    /// a training step is an evaluation. With batch statistics only the sums are taken here;
    /// [`normalize_by_batch`](Self::normalize_by_batch) writes the output.
    ///
    /// ψ² stays; [`update_phi`](Self::update_phi) comes after a training step.
    pub fn forward(&self, buffers: &ForwardBuffers) -> Vec<Launch> {
        let mut launches = match self.rows() {
            0 => self.without_rows(buffers),
            _ => self.forward_rows(buffers),
        };
        if self.kind.is_training() && buffers.totals != 0 {
            launches.extend(self.totals(buffers));
        }
        launches
    }

    fn without_rows(&self, buffers: &ForwardBuffers) -> Vec<Launch> {
        if self.kind != ForwardKind::RunningStatistic {
            return vec![];
        }
        // 1/D by ψ², as for any batch without a kept row. Elsewhere the launch of the output writes
        // it.
        let alone = ForwardBuffers {
            totals: 0,
            ..*buffers
        };
        vec![self.statistics(&alone, true, None)]
    }

    fn forward_rows(&self, buffers: &ForwardBuffers) -> Vec<Launch> {
        let chunk_sums = self.chunk_sums(buffers.saved);
        let base = self.normalized(buffers);
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
        if self.cut.group_scaling == GroupScaling::Given {
            launches.push(self.group_factors(added(base)));
        }
        let pass = match self.kind {
            ForwardKind::Evaluation => output,
            ForwardKind::RunningStatistic => sums(output),
            ForwardKind::BatchStatistic => sums(base),
        };
        launches.push(self.normalize(added(pass)));
        if self.kind.is_training() && self.sums_all_rows() {
            let all = NormalizeParams {
                keep: 0,
                partials: chunk_sums.all_partials,
                ..base
            };
            launches.push(self.normalize(added(all)));
        }
        launches
    }

    /// The rest of a [`forward`](Self::forward), whose buffers are still there.
    pub fn normalize_by_batch(&self, buffers: &ForwardBuffers) -> Vec<Launch> {
        if self.kind != ForwardKind::BatchStatistic {
            return vec![];
        }
        let statistics = self.statistics(buffers, true, None);
        if self.rows() == 0 {
            return vec![statistics];
        }
        let base = self.normalized(buffers);
        let output = NormalizeParams {
            x: match buffers.residual {
                0 => buffers.x,
                _ => buffers.sum,
            },
            // D stands in inv_rms.
            phi: Vector::default(),
            ..self.output(base, buffers)
        };
        vec![statistics, self.normalize(output)]
    }

    /// The group scaling of a forward, without an output.
    fn normalized(&self, buffers: &ForwardBuffers) -> NormalizeParams {
        let saved = self.saved(buffers.saved);
        NormalizeParams {
            tiling: self.cut.tiling,
            x: buffers.x,
            keep: buffers.keep,
            factors: match self.cut.group_scaling {
                GroupScaling::None => 0,
                _ => saved.factors,
            },
            group_scaling: self.cut.group_scaling,
            eps: self.config.eps,
            group_eps: self.config.eps,
            ..Default::default()
        }
    }

    /// The group scaling of a forward, with its output.
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
        let count = buffers.totals + self.cols() as u64 * TOTAL_BYTES;
        let kept = SumPartialsParams {
            partials: chunk_sums.partials,
            kept: if self.masked { chunk_sums.kept } else { 0 },
            rows: self.rows() as i64,
            cols: self.cols() as i64,
            chunks: self.cut.grid.1.into(),
            stride: self.cols() as i64,
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
                count: count + TOTAL_BYTES + self.cols() as u64 * TOTAL_BYTES,
                ..kept
            };
            launches.push(self.sum_partials(all));
        }
        launches
    }

    /// The statistics of a training [`forward`](Self::forward), and its step of ψ². Its `saved`
    /// must still be there, and its `totals` if it has them.
    pub fn update_phi(&self, buffers: &ForwardBuffers, step: &PhiStep) -> Launch {
        let by_batch = self.kind == ForwardKind::BatchStatistic;
        self.statistics(buffers, by_batch, Some(step))
    }

    /// The statistics of a training forward. If `by_batch`, this computes 1/D from ψ_B², or from ψ²
    /// if no row is kept. Without a `step` ψ² stays.
    fn statistics(
        &self,
        buffers: &ForwardBuffers,
        by_batch: bool,
        step: Option<&PhiStep>,
    ) -> Launch {
        let saved = self.saved(buffers.saved);
        let chunk_sums = self.chunk_sums(buffers.saved);
        let when = |yes: bool, address| if yes { address } else { 0 };
        let over_ranks = buffers.totals != 0;
        let fairseq = self.config.recipe == Recipe::Fairseq;
        let all_totals = buffers.totals + (self.cols() as u64 + 1) * TOTAL_BYTES;
        let cumulative = step.and_then(|step| step.cumulative);
        let moving = step.and_then(|step| step.moving);
        let params = UpdatePhiParams {
            totals: buffers.totals,
            all_totals: when(over_ranks && fairseq, all_totals),
            partials: when(!over_ranks, chunk_sums.partials),
            all_partials: when(!over_ranks && self.sums_all_rows(), chunk_sums.all_partials),
            kept: when(!over_ranks && self.masked, chunk_sums.kept),
            rows: self.rows() as i64,
            cols: self.cols() as i64,
            chunks: self.cut.grid.1.into(),
            phi: buffers.phi,
            batch_phi: saved.batch_phi,
            inv_rms: saved.inv_rms,
            gamma: saved.gamma,
            count: saved.count,
            eps: self.config.eps,
            by_batch: by_batch.into(),
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

    /// The gradients of a [`forward`](Self::forward), for a loss times `loss_scale`. This makes
    /// what does not need the sums of the whole batch. [`update_nu`](Self::update_nu) and then
    /// [`finish_backward`](Self::finish_backward) make the rest.
    ///
    /// With `g = γ ⊙ dy` every `∂L/∂X̃` has the form `gain ⊙ dy − decay ⊙ X̃`. The cases are the
    /// same as in the CPU's backward.
    pub fn backward(&self, buffers: &BackwardBuffers, loss_scale: f64) -> Vec<Launch> {
        let mut launches = match self.rows() {
            0 => vec![],
            _ => self.backward_rows(buffers, loss_scale),
        };
        if buffers.totals != 0 {
            launches.push(self.sum_partials(SumPartialsParams {
                partials: self.backward_workspace(buffers.workspace).partials,
                cols: self.cols() as i64,
                chunks: self.cut.grid.1.into(),
                stride: 2 * self.cols() as i64,
                totals: buffers.totals,
                ..Default::default()
            }));
        }
        launches
    }

    fn backward_rows(&self, buffers: &BackwardBuffers, loss_scale: f64) -> Vec<Launch> {
        let workspace = self.backward_workspace(buffers.workspace);
        let base = self.gradient(buffers);
        let sums = NormalizeBwdParams {
            partials: workspace.partials,
            ..base
        };
        let nu = NormalizeBwdParams {
            correction: buffers.ema_gz,
            correction_scale: (1. - self.config.alpha_bwd) * loss_scale,
            ..base
        };
        let correction = match self.kind {
            ForwardKind::Evaluation => base,
            _ => nu,
        };
        let input = buffers.dx != 0;
        let wants_sums = self.wants_sums(buffers);
        let mut launches = vec![];
        if self.config.is_exact(self.kind) || !input {
            if wants_sums {
                launches.push(self.normalize_bwd(sums));
            }
        } else if wants_sums {
            let with_sums = NormalizeBwdParams {
                partials: workspace.partials,
                ..correction
            };
            launches.extend(self.input_gradient(buffers, with_sums));
        } else {
            launches.extend(self.input_gradient(buffers, correction));
        }
        launches
    }

    /// Makes from the sums of a [`backward`](Self::backward) the parameters' gradients and Λ, and
    /// the step of ν unless ν's array is 0. The arrays of rows may have been freed.
    pub fn update_nu(&self, buffers: &BackwardBuffers, loss_scale: f64) -> Option<Launch> {
        if !self.wants_sums(buffers) {
            return None;
        }
        let saved = self.saved(buffers.saved);
        let workspace = self.backward_workspace(buffers.workspace);
        let params = UpdateNuParams {
            partials: workspace.partials,
            totals: buffers.totals,
            cols: self.cols() as i64,
            chunks: self.cut.grid.1.into(),
            weight: buffers.weight,
            inv_rms: saved.inv_rms,
            gamma: saved.gamma,
            count: if self.kind.is_training() {
                saved.count
            } else {
                0
            },
            lambda: workspace.lambda,
            ema_gz: match self.kind {
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
    pub fn finish_backward(&self, buffers: &BackwardBuffers) -> Vec<Launch> {
        if !self.config.is_exact(self.kind) || buffers.dx == 0 || self.rows() == 0 {
            return vec![];
        }
        let lambda = NormalizeBwdParams {
            correction: Vector {
                data: self.backward_workspace(buffers.workspace).lambda,
                dtype: self.extent.dtype.sums(),
            },
            correction_scale: 1.,
            ..self.gradient(buffers)
        };
        self.input_gradient(buffers, lambda)
    }

    /// A pass over the rows of a backward, without a correction and without results.
    fn gradient(&self, buffers: &BackwardBuffers) -> NormalizeBwdParams {
        let saved = self.saved(buffers.saved);
        // Under recipe Fairseq the backward does not know the mask, so it reads the count.
        // Elsewhere the mask shows a batch without a kept row, and the count need not be known yet.
        let fairseq = self.config.recipe == Recipe::Fairseq;
        let of_fairseq = |address| if fairseq { address } else { 0 };
        let of_training = |address| if self.kind.is_training() { address } else { 0 };
        NormalizeBwdParams {
            tiling: self.cut.tiling,
            x: buffers.x,
            dy: buffers.dy,
            keep: if fairseq { 0 } else { buffers.keep },
            weight: buffers.weight,
            inv_rms: saved.inv_rms,
            batch_phi: of_training(of_fairseq(saved.batch_phi)),
            count: of_training(of_fairseq(saved.count)),
            factors: saved.factors,
            dots: self.backward_workspace(buffers.workspace).dots,
            group_scaling: self.cut.group_scaling,
            eps: self.config.eps,
            ..Default::default()
        }
    }

    /// The launches that write the input's gradient.
    fn input_gradient(&self, buffers: &BackwardBuffers, params: NormalizeBwdParams) -> Vec<Launch> {
        let output = NormalizeBwdParams {
            dsum: buffers.dsum,
            dx: buffers.dx,
            ..params
        };
        let output = self.normalize_bwd(output);
        match self.cut.group_scaling {
            GroupScaling::Given => vec![self.group_dots(params), output],
            _ => vec![output],
        }
    }

    /// Bytes of a number for each row and group.
    fn group_bytes(&self) -> usize {
        self.extent.groups.unwrap_or(0) * self.rows() * self.sum_bytes()
    }

    /// Fairseq's Γ runs over padded rows too.
    fn sums_all_rows(&self) -> bool {
        self.config.recipe == Recipe::Fairseq && self.masked
    }

    /// `true` if a backward sums over rows.
    fn wants_sums(&self, buffers: &BackwardBuffers) -> bool {
        self.kind.is_training() || buffers.dweight.data != 0 || buffers.dbias.data != 0
    }

    fn normalize(&self, params: NormalizeParams) -> Launch {
        let arrays = 1 + usize::from(params.residual != 0);
        let sums = usize::from(params.partials != 0);
        let (tiling, shared_bytes) = self.extent.shared(&self.cut, arrays, sums);
        let params = Params::Normalize(NormalizeParams { tiling, ..params });
        self.tiled(Body::Normalize, &self.cut, shared_bytes, params)
    }

    fn normalize_bwd(&self, params: NormalizeBwdParams) -> Launch {
        let arrays = 2 + usize::from(params.dsum != 0);
        let sums = 2 * usize::from(params.partials != 0);
        let (tiling, shared_bytes) = self.extent.shared(&self.cut, arrays, sums);
        let params = Params::NormalizeBwd(NormalizeBwdParams { tiling, ..params });
        self.tiled(Body::NormalizeBwd, &self.cut, shared_bytes, params)
    }

    /// A launch over the tiles of `cut`.
    fn tiled(&self, body: Body, cut: &Cut, shared_bytes: u32, params: Params) -> Launch {
        Launch {
            kernel: Kernel {
                body,
                dtype: self.extent.dtype,
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
        let cols = self.cols() as u32;
        let wide = cols.div_ceil(many) as usize >= self.extent.limits.multiprocessors;
        let lanes = if wide { many } else { few };
        let side_by_side = (chunks as u32 / UPDATE_CHUNKS)
            .next_power_of_two()
            .clamp(WARP as u32 / few, UPDATE_THREADS / lanes);
        Launch {
            kernel: Kernel {
                body,
                dtype: self.extent.dtype.sums(),
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
        let groups = self.rows() * tiling.groups as usize;
        Launch {
            kernel: Kernel {
                body,
                dtype: self.extent.dtype,
                pieces: 1,
            },
            grid: (groups.min(FACTOR_BLOCKS) as u32, 1),
            block: (FACTOR_BLOCK as u32, 1),
            shared_bytes: self.extent.exchanged_bytes(1) as u32,
            params,
        }
    }

    fn sum_bytes(&self) -> usize {
        self.extent.dtype.sums().size()
    }

    fn saved(&self, start: Address) -> Saved {
        let row = |i: usize| match start {
            0 => 0,
            _ => start + (i * self.cols() * self.sum_bytes()) as u64,
        };
        let count = row(3);
        Saved {
            inv_rms: if self.divides { row(0) } else { 0 },
            gamma: row(1),
            batch_phi: row(2),
            count,
            factors: match (start, self.extent.groups) {
                (0, _) | (_, None) => 0,
                _ => count + self.sum_bytes() as u64,
            },
        }
    }

    fn chunk_sums(&self, saved: Address) -> ChunkSums {
        let chunks = u64::from(self.cut.grid.1);
        let sums = chunks * (self.cols() * self.sum_bytes()) as u64;
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
        let row = (self.cols() * self.sum_bytes()) as u64;
        let partials = start + row;
        let dots = partials + 2 * u64::from(self.cut.grid.1) * row;
        let dots_bytes = match self.cut.group_scaling {
            GroupScaling::Given => self.group_bytes(),
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
    use super::*;
    use std::collections::HashSet;

    /// Numbers that a kernel has no room for are refused, and numbers just below are not.
    #[test]
    fn shapes_beyond_32_bits_are_refused() {
        let plan = |rows: usize, cols: usize| {
            let limits = Limits {
                multiprocessors: 1,
                shared_bytes: 99 << 10,
                copies: true,
            };
            let config = PowerNormConfig {
                group_scaling: None,
                ..1e-5.into()
            };
            let kind = ForwardKind::Evaluation;
            let plan = LaunchPlan::new(Dtype::F32, [rows, cols], config, kind, limits);
            plan.and_then(|plan| plan.of_backward()).map(drop)
        };
        plan(4, (1 << 31) - 1).unwrap();
        plan(1 << 30, 1).unwrap();
        for (rows, cols) in [(4, 1 << 31), (1 << 31, 1), (usize::MAX >> 8, 1)] {
            let error = plan(rows, cols).unwrap_err().to_string();
            assert!(
                error.contains(&format!("{rows} rows of {cols} channels")),
                "{error}"
            );
        }
    }

    /// Each entry point that `kernels/power_norm.cu` defines is a kernel.
    #[test]
    fn kernels_have_the_names_of_entry_points() {
        let bodies = [
            Body::GroupFactors,
            Body::Normalize,
            Body::SumPartials,
            Body::UpdatePhi,
            Body::GroupDots,
            Body::NormalizeBwd,
            Body::UpdateNu,
        ];
        let mut names = HashSet::new();
        for body in bodies {
            for dtype in [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::BF16] {
                for pieces in [1, 2, 4] {
                    let kernel = Kernel {
                        body,
                        dtype,
                        pieces,
                    };
                    names.insert(kernel.to_string());
                }
            }
        }
        let source = include_str!("../../../kernels/power_norm.cu");
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
}
