//! A step on a GPU: a forward and its backward from top to bottom, and one function for each
//! launch.
//!
//! A forward allocates and loads all that it and its step of ψ² need before its first launch, and
//! so does a backward. A call that fails before its launches changes nothing.
#![allow(unsafe_code)] // launches kernels, and allocates what they fill

use super::gpu::{Gpu, Kernels, Loaded, Locks, Uses, copied, copied_x, reads_in_place};
use super::params::{
    ANNOUNCED, Address, Announcement, NormalizeBwdParams, NormalizeParams, SumPartialsParams,
    Tiling, UpdateNuParams, UpdatePhiParams, Vector, when,
};
use super::plan::{LaunchPlan, SavedLayout, Workspace, is_whole_sectors};
use crate::config::{ForwardKind, PhiStep};
use crate::device::pass::Pass;
use crate::device::{self, Env, Gradients, Nu, Outputs, Record};
use candle::backend::BackendDevice;
use candle::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle::op::BackpropOp;
use candle::{CudaStorage, DType, Result, Shape, Storage, Tensor};
use std::sync::Arc;

/// Bytes of a total.
const TOTAL_BYTES: u64 = size_of::<f64>() as u64;

/// Runs a forward.
pub(in crate::device) fn forward(
    kernels: &Arc<Kernels>,
    pass: &mut Pass,
    env: &mut dyn Env,
) -> Result<(Box<dyn Record>, Outputs)> {
    let (norm, is_alone) = (pass.norm, pass.phi.is_none() && pass.residual.is_none());
    pass.lay_out(|rows| match is_alone {
        true => copied_x(kernels, rows, norm),
        false => copied(rows),
    })?;
    let pass = &*pass;
    let gpu = Gpu::of(pass.x.device(), kernels)?;
    let plan = plan_of(pass, kernels, env.has_ranks())?;
    let trains = plan.kind.is_training();
    let by_batch = plan.kind == ForwardKind::BatchStatistic;
    let has_rows = plan.extent.rows > 0;

    // All memory and all kernels, before the first launch.
    // SAFETY: without rows there is nothing to write. With rows, `launch_rows` writes all of the
    // sum if there is a residual, and all of y, unless the batch's statistic normalizes:
    // `launch_output` then writes y.
    let output = || unsafe { gpu.storage(pass.x.shape(), pass.x.dtype()) };
    let mut y = output()?;
    let mut residual_out = pass.residual.is_some().then(output).transpose()?;
    let saves = trains || has_rows && (pass.is_tracked() || plan.has_wide_groups());
    // SAFETY: each part of the layout is written by the launch that makes it, which comes before
    // the launches that read it: `launch_rows` (or `launch_inv_d`), `update_phi`.
    let saved = saves.then(|| unsafe { gpu.room(plan.saved(0).end) });
    let mut saved = saved.transpose()?;
    let announcement = env.announcement().filter(|_| trains);
    // SAFETY: `launch_totals` writes all of it.
    let message = || unsafe { gpu.storage(&plan.message_len().into(), DType::F64) };
    let message = match announcement {
        Some(announcement) => Some((message()?, announcement)),
        None => None,
    };
    let loaded = gpu.load(&plan.entries(message.is_some()))?;
    let forward = Forward {
        loaded: &loaded,
        plan: &plan,
        pass,
    };

    // x + residual, Σ x̃², and y unless the batch's statistic normalizes.
    if has_rows {
        forward.launch_rows(&mut y, residual_out.as_mut(), saved.as_mut())?;
    } else if plan.kind == ForwardKind::RunningStatistic {
        forward.launch_inv_d(saved.as_mut())?;
    }
    // The sums over all ranks. In a single process `update_phi` adds the chunks' sums up itself.
    let mut totals = None;
    if let Some((mut message, announcement)) = message {
        forward.launch_totals(saved.as_mut(), &mut message, &announcement)?;
        let message = env.exchange(from_storage(message, &plan.message_len().into()))?;
        totals = Some((message, announcement));
    }
    // ψ_B², Γ, ψ², and 1/D if it is the batch's.
    if trains {
        forward.launch_update_phi(saved.as_mut(), totals.as_ref(), env)?;
    }
    if by_batch && has_rows {
        forward.launch_output(&mut y, residual_out.as_mut(), saved.as_mut())?;
    }
    let outputs = Outputs {
        y: Storage::Cuda(y),
        residual_out: residual_out.map(Storage::Cuda),
    };
    Ok((Box::new(Forwarded { gpu, plan, saved }), outputs))
}

/// Kept from a forward for its backward.
struct Forwarded {
    gpu: Gpu,
    plan: LaunchPlan,
    /// Device memory in the layout of [`LaunchPlan::saved`]. `None` where there are no rows, or no
    /// backward was to follow.
    saved: Option<CudaSlice<u8>>,
}

impl Record for Forwarded {
    fn backward(&self, pass: &Pass, dy: &Tensor, env: &mut dyn Env) -> Result<Gradients> {
        let (dy, wanted) = (&*pass.lay_out_dy(dy, copied)?, pass.wanted);
        let gpu = &self.gpu;
        let plan = self.plan.of_backward()?;
        let trains = plan.kind.is_training();
        let exact = plan.is_exact();
        let has_rows = plan.extent.rows > 0;
        let nu = env.nu().map(|nu| RunningNu::of(&nu, pass)).transpose()?;

        // All memory and all kernels, before the first launch.
        let gradient = |shape: &Shape, dtype: DType| match self.saved {
            // SAFETY: with `saved` there are rows, of this process or of others. The launches over
            // the rows write all of dx, and `update_nu` all of the parameters' gradients. An empty
            // dx has nothing to write.
            Some(_) => unsafe { gpu.storage(shape, dtype) },
            None => gpu.device.zeros_impl(shape, dtype),
        };
        let dx = wanted
            .input
            .then(|| gradient(pass.x.shape(), pass.x.dtype()));
        let mut dx = dx.transpose()?;
        let parameters = [
            pass.weight().filter(|_| wanted.weight),
            pass.bias().filter(|_| wanted.bias),
        ];
        let channels = plan.extent.channels();
        let mut parameter_gradients = ParameterGradients::new(parameters, channels, gradient)?;
        if let Some(saved) = &self.saved {
            let announcement = env.announcement();
            // SAFETY: `Backward::launch_rows` writes the partial sums, `Backward::launch_update_nu`
            // writes `lambda`, and the walk that writes dx writes `dots` first, before anything
            // reads them. Without rows no launch reads partial sums.
            let mut workspace = unsafe { gpu.room(plan.workspace(0).end) }?;
            let message = || {
                let len = plan.message_len().into();
                match plan.recipe.square_sums() {
                    // SAFETY: `Backward::launch_totals` writes all of it.
                    1 => unsafe { gpu.storage(&len, DType::F64) },
                    // The padding that a forward's second sums leave.
                    _ => gpu.device.zeros_impl(&len, DType::F64),
                }
            };
            let message = match announcement {
                Some(announcement) => Some((message()?, announcement)),
                None => None,
            };
            let loaded = gpu.load(&plan.entries(message.is_some()))?;
            let backward = Backward {
                loaded: &loaded,
                plan: &plan,
                pass,
                dy,
                saved,
            };

            // Σ dy x̃, Σ dy, and dx unless it is exact.
            let takes_sums = trains || parameter_gradients.any();
            let first_dx = dx.as_mut().filter(|_| !exact);
            if has_rows && (takes_sums || first_dx.is_some()) {
                backward.launch_rows(&mut workspace, nu.as_ref(), first_dx, takes_sums)?;
            }
            let mut totals = None;
            if let Some((mut message, announcement)) = message {
                backward.launch_totals(&mut workspace, &mut message, &announcement)?;
                let message = env.exchange(from_storage(message, &plan.message_len().into()))?;
                totals = Some((message, announcement));
            }
            // Λ, ν and the parameters' gradients.
            if takes_sums {
                let totals = totals.as_ref();
                backward.launch_update_nu(&mut workspace, totals, &mut parameter_gradients, env)?;
            }
            // An exact dx, with Λ.
            if let Some(dx) = dx.as_mut().filter(|_| exact && has_rows) {
                backward.launch_exact(&mut workspace, dx)?;
            }
        }
        let [weight, bias] = parameter_gradients.tensors(channels)?;
        Ok(Gradients {
            input: dx.map(|dx| from_storage(dx, pass.x.shape())),
            weight,
            bias,
        })
    }
}

/// The gradients of weight and bias.
///
/// They share an allocation where they can, which saves some twenty calls of the driver, with events
/// on. A candle that stores first gradients as they are copies one of the two.
///
/// The workspace has an allocation of its own, because it is larger than both gradients. As a part
/// of their storage it would live as long as they do, and candle would copy it to the host whenever
/// it copies one of them.
enum ParameterGradients {
    /// `[2, C]`.
    Joined(CudaStorage),
    /// `[C]` each, of the parameters that have a gradient.
    Apart([Option<CudaStorage>; 2]),
}

impl ParameterGradients {
    /// Memory for the gradients of `parameters`, weight and bias, allocated by `gradient`.
    fn new(
        parameters: [Option<&Tensor>; 2],
        cols: usize,
        gradient: impl Fn(&Shape, DType) -> Result<CudaStorage>,
    ) -> Result<Self> {
        if let [Some(weight), Some(bias)] = parameters {
            let dtype = weight.dtype();
            // Without a gap, because nothing would write it, and each begins with a sector.
            let aligned = is_whole_sectors(cols * dtype.size_in_bytes());
            if bias.dtype() == dtype && aligned {
                return Ok(Self::Joined(gradient(&(2, cols).into(), dtype)?));
            }
        }
        let [weight, bias] = parameters.map(|parameter| {
            let of = parameter.map(|parameter| gradient(&cols.into(), parameter.dtype()));
            of.transpose()
        });
        Ok(Self::Apart([weight?, bias?]))
    }

    fn any(&self) -> bool {
        match self {
            Self::Joined(_) => true,
            Self::Apart(gradients) => gradients.iter().any(Option::is_some),
        }
    }

    /// The addresses of both, for a launch that writes them.
    fn write<'u>(&'u mut self, cols: usize, uses: &mut Uses<'u, '_>) -> Result<[Vector; 2]> {
        match self {
            Self::Joined(both) => {
                let weight = uses.write(both)?;
                let row_bytes = (cols * weight.dtype.bytes()) as Address;
                let bias = Vector {
                    data: weight.data + row_bytes,
                    ..weight
                };
                Ok([weight, bias])
            }
            Self::Apart([weight, bias]) => {
                Ok([uses.write(weight.as_mut())?, uses.write(bias.as_mut())?])
            }
        }
    }

    fn tensors(self, cols: usize) -> Result<[Option<Tensor>; 2]> {
        match self {
            Self::Joined(both) => {
                let both = from_storage(both, &(2, cols).into());
                Ok([Some(both.get(0)?), Some(both.get(1)?)])
            }
            Self::Apart(gradients) => {
                Ok(gradients.map(|of| of.map(|of| from_storage(of, &cols.into()))))
            }
        }
    }
}

/// The sums over all ranks: the message that they have added up, and this rank's part of its head.
type Totals = (Tensor, device::Announcement);

/// The announcement at the head of the sums over all ranks, or none.
fn announcement_of<'u, 't: 'u>(
    totals: Option<&'t Totals>,
    uses: &mut Uses<'u, 't>,
) -> Result<Announcement> {
    match totals {
        Some((message, announcement)) => {
            Ok(announcement_in(uses.read(Some(message))?, announcement))
        }
        None => Ok(Announcement::default()),
    }
}

/// The announcement at the head of a message, as the kernels take it.
fn announcement_in(message: Address, announcement: &device::Announcement) -> Announcement {
    Announcement {
        message,
        own: announcement.numbers,
        ranks: announcement.ranks as i64,
    }
}

/// The address of the sums in a message.
fn totals_in(message: Address) -> Address {
    when(message != 0, message + ANNOUNCED as u64 * TOTAL_BYTES)
}

/// ν times the loss scale: `scale · ema_gz`, which is the variable of ν or a copy.
struct RunningNu {
    ema_gz: Tensor,
    scale: f64,
}

impl RunningNu {
    fn of(nu: &Nu, pass: &Pass) -> Result<Self> {
        let in_place = reads_in_place(pass.x.device(), nu.ema_gz.device());
        Ok(Self {
            ema_gz: match in_place {
                true => nu.ema_gz.detach(),
                false => nu.ema_gz.as_detached_tensor().copy()?,
            },
            scale: nu.scale(),
        })
    }
}

/// The plan of a forward.
fn plan_of(pass: &Pass, kernels: &Kernels, has_ranks: bool) -> Result<LaunchPlan> {
    let extent = kernels.extent(&pass.x, pass.norm)?;
    // Other processes may have rows. If none has, a training step is an evaluation.
    let kind = match extent.rows > 0 || has_ranks {
        true => pass.kind,
        false => ForwardKind::Evaluation,
    };
    Ok(LaunchPlan {
        masked: pass.keep.is_some(),
        divides: pass.phi.is_some(),
        ..LaunchPlan::new(extent, pass.recipe, kind)?
    })
}

/// The launches of a forward. Each method holds every buffer whose address it passes, in `uses`,
/// until its launches are queued. Buffers are as large as kernels/params.cuh says: what a `Pass`
/// has by the checks of its constructors, and parts of `saved` by `LaunchPlan::saved`.
struct Forward<'a> {
    loaded: &'a Loaded<'a>,
    plan: &'a LaunchPlan,
    pass: &'a Pass<'a>,
}

impl Forward<'_> {
    /// Launches `Y = γ ⊙ X̃/D + β`, the sum of the input and its residual, and the sums that move
    /// ψ². Writes no output yet if the batch's statistic normalizes.
    fn launch_rows(
        &self,
        y: &mut CudaStorage,
        residual_out: Option<&mut CudaStorage>,
        saved: Option<&mut CudaSlice<u8>>,
    ) -> Result<()> {
        let (loaded, plan, pass) = (self.loaded, self.plan, self.pass);
        let locks = Locks::default();
        let mut uses = Uses::on(loaded.stream, &locks);
        let saved = self.saved_parts(saved, &mut uses);
        let y = uses.write(y)?.data;
        let residual_out = uses.write(residual_out)?.data;
        let x = uses.read_x(&pass.x, &plan.extent)?;
        let residual = uses.read_rows(pass.residual())?;
        let keep = uses.read(pass.keep.as_ref())?;
        let (eps, group_eps) = (pass.eps, plan.extent.group_eps());
        // The first launch adds the residual and writes the sum, which later ones read.
        let summed = if residual != 0 { residual_out } else { x };
        let wide = plan.has_wide_groups();

        // r of groups that are wider than a block.
        if wide {
            let params = NormalizeParams {
                x,
                residual,
                residual_out,
                group_rms_inv: saved.group_rms_inv,
                group_eps: group_eps.into(),
                ..Default::default()
            };
            // SAFETY: x, the residual and the sum have the plan's rows and columns, packed because
            // groups are wide, and x and the residual hold values. The sum is an allocation of its
            // own, and `group_rms_inv` a part of `saved` with room for each group.
            unsafe { loaded.reduce_groups(plan, params) }?;
        }

        // y, and the sums over the kept rows.
        let params = NormalizeParams {
            x: if wide { summed } else { x },
            residual: when(!wide, residual),
            residual_out: when(!wide, residual_out),
            y: when(plan.kind != ForwardKind::BatchStatistic, y),
            keep,
            weight: uses.read_vector(pass.weight())?,
            weight_offset: pass.weight_offset(),
            bias: uses.read_vector(pass.bias())?,
            phi: uses.read_vector(pass.phi.as_ref())?,
            // 1/D and r are also written, for the backward.
            inv_d: saved.inv_d,
            group_rms_inv: saved.group_rms_inv,
            partials: saved.partials,
            kept: saved.kept,
            group_scaling: plan.cut.group_scaling,
            eps: eps.into(),
            group_eps: group_eps.into(),
            ..Default::default()
        };
        // SAFETY: x, the residual, the sum and y have the plan's rows and columns, x where the plan
        // has them and the others packed, the mask its rows, weight, bias and ψ² its channels. With
        // wide groups or a residual x is packed. All that is read holds values: with wide groups
        // the launch above has written r, and the sum if it is read in place of x. y, and the sum
        // where it is written, are allocations of their own. `partials`, `kept`, 1/D and r are
        // parts of `saved`, or null where it has none.
        unsafe { loaded.normalize(plan, params) }?;

        // The sums over all rows, if Γ is a mean over all: without y and a mask.
        if saved.all_partials != 0 {
            let params = NormalizeParams {
                x: summed,
                group_rms_inv: saved.group_rms_inv,
                partials: saved.all_partials,
                group_scaling: plan.cut.group_scaling,
                group_eps: group_eps.into(),
                ..Default::default()
            };
            // SAFETY: x, or the sum, which an earlier launch has written, has the plan's rows and
            // columns. r and `all_partials` are parts of `saved`. r of wide groups, which is read,
            // was written by the first launch, and other r is written here once more.
            unsafe { loaded.normalize(plan, params) }?;
        }
        Ok(())
    }

    /// Computes 1/D from ψ² on a rank without rows, by `update_phi` without a step. Elsewhere
    /// [`launch_rows`](Self::launch_rows) writes 1/D, or
    /// [`launch_update_phi`](Self::launch_update_phi) from the batch's statistic.
    fn launch_inv_d(&self, saved: Option<&mut CudaSlice<u8>>) -> Result<()> {
        let locks = Locks::default();
        let mut uses = Uses::on(self.loaded.stream, &locks);
        let saved = self.saved_parts(saved, &mut uses);
        let phi = uses.read_vector(self.pass.phi.as_ref())?;
        let no_step = PhiStep {
            cumulative: None,
            moving: None,
        };
        let no_totals = Announcement::default();
        let params = self.update_phi_params(&saved, no_totals, phi, no_step, true);
        // SAFETY: ψ² holds values and has the plan's columns. The rest are parts of `saved`, which
        // are only written: there are no chunks to read. The launch is the plan's, and the kernel
        // has no tiling.
        unsafe { self.loaded.launch(&self.plan.update_phi(), &params) }
    }

    /// Adds up the sums over the rows of this process, and writes the message of the exchange.
    fn launch_totals(
        &self,
        saved: Option<&mut CudaSlice<u8>>,
        message: &mut CudaStorage,
        announcement: &device::Announcement,
    ) -> Result<()> {
        let (loaded, plan) = (self.loaded, self.plan);
        let locks = Locks::default();
        let mut uses = Uses::on(loaded.stream, &locks);
        let saved = self.saved_parts(saved, &mut uses);
        let message = uses.write(message)?.data;
        let mut totals = totals_in(message);
        let mut announcement = announcement_in(message, announcement);
        let all_partials = match saved.all_partials {
            0 => saved.partials,
            all_partials => all_partials,
        };
        // Of kept rows, then of all rows.
        let partials = [(saved.partials, saved.kept), (all_partials, 0)];
        for (partials, kept) in partials.into_iter().take(plan.recipe.square_sums()) {
            let count = totals + plan.extent.cols as u64 * TOTAL_BYTES;
            let params = SumPartialsParams {
                partials,
                kept,
                stride: plan.extent.cols as i64,
                totals,
                count,
                rows: plan.extent.rows as i64,
                cols: plan.extent.cols as i64,
                chunks: plan.chunks() as i64,
                announcement,
            };
            // SAFETY: `message`, an allocation of its own, has the announcement's numbers, and a
            // total a column and a count for each of the recipe's sums. The chunks are parts of
            // `saved`, which `launch_rows` has written, and there are none without rows. The launch
            // is the plan's, and the kernel has no tiling.
            unsafe { loaded.launch(&plan.sum_partials(), &params) }?;
            totals = count + TOTAL_BYTES;
            // Written once.
            announcement = Announcement::default();
        }
        Ok(())
    }

    /// Makes ψ_B² and Γ, and 1/D if the batch's statistic normalizes, and moves ψ².
    fn launch_update_phi(
        &self,
        saved: Option<&mut CudaSlice<u8>>,
        totals: Option<&Totals>,
        env: &mut dyn Env,
    ) -> Result<()> {
        let (loaded, plan) = (self.loaded, self.plan);
        let locks = Locks::default();
        let mut uses = Uses::on(loaded.stream, &locks);
        let saved = self.saved_parts(saved, &mut uses);
        let announcement = announcement_of(totals, &mut uses)?;
        let by_batch = plan.kind == ForwardKind::BatchStatistic;
        env.move_phi(&mut |phi, step| {
            loaded.in_place(phi, |phi| {
                let params = self.update_phi_params(&saved, announcement, phi, *step, by_batch);
                // SAFETY: ψ², which `in_place` holds, has the plan's columns. The message has the
                // length of `LaunchPlan::message_len`. The rest are parts of `saved`, whose chunks
                // `launch_rows` has written and whose 1/D it or `launch_inv_d` has; without rows
                // there are no chunks, and totals are there. All are allocations or parts of their
                // own. The launch is the plan's, and the kernel has no tiling.
                unsafe { loaded.launch(&plan.update_phi(), &params) }
            })
        })
    }

    /// Launches the output from the batch's statistic, of which `update_phi` has left 1/D.
    fn launch_output(
        &self,
        y: &mut CudaStorage,
        residual_out: Option<&mut CudaStorage>,
        saved: Option<&mut CudaSlice<u8>>,
    ) -> Result<()> {
        let (loaded, plan, pass) = (self.loaded, self.plan, self.pass);
        let locks = Locks::default();
        let mut uses = Uses::on(loaded.stream, &locks);
        let saved = self.saved_parts(saved, &mut uses);
        let params = NormalizeParams {
            x: match residual_out {
                // `launch_rows` has written it.
                Some(sum) => uses.write(sum)?.data,
                None => uses.read_rows(pass.x())?,
            },
            y: uses.write(y)?.data,
            weight: uses.read_vector(pass.weight())?,
            weight_offset: pass.weight_offset(),
            bias: uses.read_vector(pass.bias())?,
            inv_d: saved.inv_d,
            group_rms_inv: saved.group_rms_inv,
            group_scaling: plan.cut.group_scaling,
            group_eps: plan.extent.group_eps().into(),
            ..Default::default()
        };
        // SAFETY: x and y have the plan's rows and columns, weight and bias its columns, and y is
        // an allocation of its own. 1/D and r are parts of `saved`, which `update_phi` and
        // `launch_rows` have written; r of groups that a block owns is written once more.
        unsafe { loaded.normalize(plan, params) }
    }

    /// The addresses in `saved`, which an evaluation may do without.
    fn saved_parts<'u>(
        &self,
        saved: Option<&'u mut CudaSlice<u8>>,
        uses: &mut Uses<'u, '_>,
    ) -> SavedLayout {
        match saved {
            Some(saved) => (self.plan).saved(uses.hold(saved.device_ptr_mut(uses.stream))),
            None => {
                debug_assert!(
                    !self.plan.kind.is_training(),
                    "a training forward saves its sums"
                );
                SavedLayout::default()
            }
        }
    }

    /// Arguments of `update_phi`. If `by_batch`, 1/D is made from ψ_B², or from ψ² if no row is
    /// kept.
    fn update_phi_params(
        &self,
        saved: &SavedLayout,
        announcement: Announcement,
        phi: Vector,
        step: PhiStep,
        by_batch: bool,
    ) -> UpdatePhiParams {
        let plan = self.plan;
        let totals = totals_in(announcement.message);
        let has_all_totals = totals != 0 && plan.recipe.square_sums() > 1;
        let all_totals = totals + (plan.extent.cols as u64 + 1) * TOTAL_BYTES;
        UpdatePhiParams {
            totals,
            all_totals: when(has_all_totals, all_totals),
            // Read only without totals.
            partials: saved.partials,
            all_partials: saved.all_partials,
            kept: saved.kept,
            rows: plan.extent.rows as i64,
            cols: plan.extent.cols as i64,
            chunks: plan.chunks() as i64,
            phi,
            batch_phi: saved.batch_phi,
            inv_d: saved.inv_d,
            gamma: saved.gamma,
            count: saved.count,
            eps: self.pass.eps.into(),
            by_batch: by_batch.into(),
            guard: plan.recipe.is_guarded().into(),
            cumulative: step.cumulative.is_some().into(),
            moving: step.moving.is_some().into(),
            old_share: step.cumulative.map_or(0., |shares| shares.old),
            new_share: step.cumulative.map_or(0., |shares| shares.new),
            alpha: step.moving.map_or(0., |shares| shares.old),
            beta: step.moving.map_or(0., |shares| shares.new),
            announcement,
        }
    }
}

/// The correction term of a backward.
enum Correction<'a> {
    /// ν, or nothing.
    Nu(Option<&'a RunningNu>),
    /// Λ of this batch, for an exact gradient.
    Lambda,
}

/// The launches of a backward, which hold buffers as a forward's launches do. `dy` has the shape and
/// dtype of `x` of the pass, by the promise of [`Record`], and is packed: `copied` has seen to it.
struct Backward<'a> {
    loaded: &'a Loaded<'a>,
    plan: &'a LaunchPlan,
    pass: &'a Pass<'a>,
    dy: &'a Tensor,
    saved: &'a CudaSlice<u8>,
}

impl Backward<'_> {
    /// Launches dx with ν, if there is a `dx` to write, and the sums over the rows if they are
    /// wanted.
    ///
    /// With `g = γ ⊙ dy` every `∂L/∂X̃` has the form `gain ⊙ dy − decay ⊙ X̃`. The cases are the
    /// same as in the CPU's backward.
    fn launch_rows(
        &self,
        workspace: &mut CudaSlice<u8>,
        nu: Option<&RunningNu>,
        dx: Option<&mut CudaStorage>,
        takes_sums: bool,
    ) -> Result<()> {
        let locks = Locks::default();
        let mut uses = Uses::on(self.loaded.stream, &locks);
        let dx = uses.write(dx)?.data;
        let workspace = self.workspace(workspace, &mut uses);
        let partials = when(takes_sums, workspace.partials);
        let params = self.rows_params(dx, partials, &workspace, Correction::Nu(nu), &mut uses)?;
        // SAFETY: x and dy have the plan's rows and columns, x where the plan has them, the mask
        // its rows, the weight and ν its channels, and all of them hold values. x is packed if
        // groups are wide. dx is an allocation of its own, with the shape of x. The rest are parts
        // of `saved`, which the forward has written, and of the workspace.
        unsafe { self.loaded.normalize_bwd(self.plan, params) }
    }

    /// Adds Σ dy x̃ up over the rows of this process, and writes the message of the exchange.
    fn launch_totals(
        &self,
        workspace: &mut CudaSlice<u8>,
        message: &mut CudaStorage,
        announcement: &device::Announcement,
    ) -> Result<()> {
        let (plan, locks) = (self.plan, Locks::default());
        let mut uses = Uses::on(self.loaded.stream, &locks);
        let workspace = self.workspace(workspace, &mut uses);
        let message = uses.write(message)?.data;
        let totals = totals_in(message);
        let params = SumPartialsParams {
            partials: workspace.partials,
            kept: 0,
            stride: 2 * plan.extent.cols as i64,
            totals,
            // Not read. It fills the place that a forward's count has.
            count: totals + plan.extent.cols as u64 * TOTAL_BYTES,
            rows: plan.extent.rows as i64,
            cols: plan.extent.cols as i64,
            chunks: plan.chunks() as i64,
            announcement: announcement_in(message, announcement),
        };
        // SAFETY: `message`, an allocation of its own, has the announcement's numbers, a total a
        // column and a count. The chunks are a part of the workspace, which `launch_rows` has
        // written, and there are none without rows. The launch is the plan's, and the kernel has no
        // tiling.
        unsafe { self.loaded.launch(&plan.sum_partials(), &params) }
    }

    /// Makes Λ and the gradients of weight and bias, and moves ν if this backward does.
    fn launch_update_nu(
        &self,
        workspace: &mut CudaSlice<u8>,
        totals: Option<&Totals>,
        parameter_gradients: &mut ParameterGradients,
        env: &mut dyn Env,
    ) -> Result<()> {
        let (loaded, plan, locks) = (self.loaded, self.plan, Locks::default());
        let mut uses = Uses::on(loaded.stream, &locks);
        let saved = plan.saved(uses.hold(self.saved.device_ptr(loaded.stream)));
        let workspace = self.workspace(workspace, &mut uses);
        let announcement = announcement_of(totals, &mut uses)?;
        let [dweight, dbias] = parameter_gradients.write(plan.extent.channels(), &mut uses)?;
        let params = UpdateNuParams {
            partials: workspace.partials,
            totals: totals_in(announcement.message),
            cols: plan.extent.channels() as i64,
            chunks: plan.partials() as i64,
            weight: uses.read_vector(self.pass.weight())?,
            weight_offset: self.pass.weight_offset(),
            inv_d: saved.inv_d,
            gamma: saved.gamma,
            count: saved.count,
            lambda: workspace.lambda,
            dweight,
            dbias,
            guard: plan.recipe.is_guarded().into(),
            announcement,
            ..Default::default()
        };
        let launch = |params: &UpdateNuParams| {
            // SAFETY: the weight, the gradients and ν, which `in_place` holds, have the plan's
            // channels, and the message the length of `LaunchPlan::message_len`. The rest are parts
            // of `saved`, which the forward has written, and of the workspace, whose chunks
            // `launch_rows` has written; without rows there are no chunks. All are allocations or
            // parts of their own. The launch is the plan's, and the kernel has no tiling.
            unsafe { loaded.launch(&plan.update_nu(), params) }
        };
        env.move_nu(&mut |nu| match nu {
            Some(nu) => loaded.in_place(nu.ema_gz, |ema_gz| {
                launch(&UpdateNuParams {
                    ema_gz,
                    beta: nu.share,
                    unscale: nu.loss_scale.recip(),
                    ..params
                })
            }),
            None => launch(&params),
        })
    }

    /// Launches an exact dx, with Λ.
    fn launch_exact(&self, workspace: &mut CudaSlice<u8>, dx: &mut CudaStorage) -> Result<()> {
        let locks = Locks::default();
        let mut uses = Uses::on(self.loaded.stream, &locks);
        let dx = uses.write(dx)?.data;
        let workspace = self.workspace(workspace, &mut uses);
        let params = self.rows_params(dx, 0, &workspace, Correction::Lambda, &mut uses)?;
        // SAFETY: x and dy have the plan's rows and columns, x where the plan has them, the mask
        // its rows, the weight its channels, and all of them hold values. x is packed if groups are
        // wide. Λ is a part of the workspace, in which `update_nu` has written a number a column in
        // the dtype of the sums. dx is an allocation of its own, with the shape of x. The rest are
        // parts of `saved`, which the forward has written, and of the workspace.
        unsafe { self.loaded.normalize_bwd(self.plan, params) }
    }

    /// The arguments of a walk over the rows that writes `dx` and `partials`, each unless null.
    fn rows_params<'u, 't>(
        &'t self,
        dx: Address,
        partials: Address,
        workspace: &Workspace,
        correction: Correction<'t>,
        uses: &mut Uses<'u, 't>,
    ) -> Result<NormalizeBwdParams>
    where
        't: 'u,
    {
        let (plan, pass) = (self.plan, self.pass);
        // In the order of `Locks`: rows, the weight, and last ν.
        let x = uses.read_x(&pass.x, &plan.extent)?;
        let dy = uses.read_rows(self.dy)?;
        let keep = uses.read(pass.backward_keep())?;
        let weight = uses.read_vector(pass.weight())?;
        let (correction, scale) = match correction {
            Correction::Nu(Some(nu)) => (uses.read_vector(Some(&nu.ema_gz))?, nu.scale),
            Correction::Nu(None) => (Vector::default(), 0.),
            Correction::Lambda => {
                let (data, dtype) = (workspace.lambda, plan.sums_dtype());
                (Vector { data, dtype }, 1.)
            }
        };
        let saved = plan.saved(uses.hold(self.saved.device_ptr(uses.stream)));
        // A backward without the forward's mask reads the count. Otherwise the mask shows a batch
        // without a kept row, and the count need not be known yet.
        let reads_count = !plan.recipe.masks_backward() && plan.kind.is_training();
        Ok(NormalizeBwdParams {
            tiling: Tiling::default(), // by `Loaded::normalize_bwd`
            x,
            dy,
            dx,
            keep,
            weight,
            correction,
            inv_d: saved.inv_d,
            batch_phi: when(reads_count, saved.batch_phi),
            count: when(reads_count, saved.count),
            group_rms_inv: saved.group_rms_inv,
            dots: workspace.dots,
            partials,
            group_scaling: plan.cut.group_scaling,
            weight_offset: pass.weight_offset(),
            correction_scale: scale.into(),
            eps: pass.eps.into(),
        })
    }

    fn workspace<'u>(
        &self,
        workspace: &'u mut CudaSlice<u8>,
        uses: &mut Uses<'u, '_>,
    ) -> Workspace {
        self.plan
            .workspace(uses.hold(workspace.device_ptr_mut(uses.stream)))
    }
}

/// Memory of a plan.
impl Gpu {
    /// A storage for launches to write.
    ///
    /// # Safety
    ///
    /// It holds no values yet: launches must write all of it before anything reads it.
    unsafe fn storage(&self, shape: &Shape, dtype: DType) -> Result<CudaStorage> {
        // SAFETY: by this function's contract, which is that of `alloc_uninit`.
        unsafe { self.device.alloc_uninit(shape, dtype) }
    }

    /// Memory for a layout of a plan.
    ///
    /// # Safety
    ///
    /// As for [`storage`](Self::storage).
    unsafe fn room(&self, bytes: u64) -> Result<CudaSlice<u8>> {
        // SAFETY: by this function's contract, which is that of `alloc`.
        unsafe { self.device.alloc::<u8>(bytes as usize) }
    }
}

/// Launches of a plan.
impl Loaded<'_> {
    /// Walks the rows of a forward.
    ///
    /// # Safety
    ///
    /// 1 to 4 of [`launch`](Self::launch) hold for `params` as arguments of `normalize` or
    /// `layer_norm`, and the plan has the shape of its arrays. `params.tiling` is overwritten.
    unsafe fn normalize(&self, plan: &LaunchPlan, mut params: NormalizeParams) -> Result<()> {
        let arrays = 1 + usize::from(params.residual != 0);
        let sums = usize::from(params.partials != 0);
        let (launch, tiling) = plan.normalize(arrays, sums);
        params.tiling = tiling;
        // SAFETY: 1 to 4 by this function's contract. 5: launch and tiling are the plan's, for the
        // arrays and sums that `params` has.
        unsafe { self.launch(&launch, &params) }
    }

    /// Reduces the wide groups of a forward.
    ///
    /// # Safety
    ///
    /// As for [`normalize`](Self::normalize), of `group_rms_inv` or `layer_norm_statistics`.
    unsafe fn reduce_groups(&self, plan: &LaunchPlan, mut params: NormalizeParams) -> Result<()> {
        let (launch, tiling) = plan.reduce_groups();
        params.tiling = tiling;
        // SAFETY: 1 to 4 by this function's contract. 5: launch and tiling are the plan's.
        unsafe { self.launch(&launch, &params) }
    }

    /// Reduces wide groups if there is a gradient to write, and walks the rows of a backward.
    ///
    /// # Safety
    ///
    /// As for [`normalize`](Self::normalize), of `normalize_bwd` or `layer_norm_bwd`, except that
    /// the dots need not be written yet.
    unsafe fn normalize_bwd(
        &self,
        plan: &LaunchPlan,
        mut params: NormalizeBwdParams,
    ) -> Result<()> {
        if params.dx != 0 && plan.has_wide_groups() {
            let (launch, tiling) = plan.reduce_groups_bwd();
            params.tiling = tiling;
            // SAFETY: 1 to 4 by this function's contract: the dots are what this launch writes. 5:
            // launch and tiling are the plan's.
            unsafe { self.launch(&launch, &params) }?;
        }
        let sums = 2 * usize::from(params.partials != 0);
        let (launch, tiling) = plan.normalize_bwd(sums);
        params.tiling = tiling;
        // SAFETY: 1 to 4 by this function's contract, and the launch above has written the dots if
        // dx depends on them. 5: launch and tiling are the plan's, for x, dy and the sums that
        // `params` has.
        unsafe { self.launch(&launch, &params) }
    }
}

fn from_storage(storage: CudaStorage, shape: &Shape) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}
