//! A layer's passes through the emulated kernels, launched as the crate's `src/cuda/mod.rs` launches them.

use crate::config;
use crate::device::{emulate, Array, Schedule};
use crate::launch::{BackwardBuffers, Dtype, ForwardBuffers, Launch, Params, Pass, Vector};
use candle::{DType, Device, Result, Tensor};
use candle_powernorm::{PowerNormConfig, Recipe, Statistics};
use std::ops::Range;

/// A forward of a layer and perhaps its backward: all that they read. Tensors are packed, on the CPU.
#[derive(Clone)]
pub struct Arguments {
    /// The layer's.
    pub config: PowerNormConfig,
    /// Training steps taken before.
    pub steps: usize,
    /// Whether this is one.
    pub train: bool,
    /// Whether it is the first of a recalibration instead.
    pub recalibrate: bool,
    /// What the loss is multiplied by.
    pub loss_scale: f64,
    /// `[rows, cols]`.
    pub x: Tensor,
    /// As `x`: added to it first.
    pub residual: Option<Tensor>,
    /// As `x`: the gradient of the output.
    pub dy: Tensor,
    /// As `x`: the gradient of the sum with the residual.
    pub dsum: Tensor,
    /// `[rows]`, u8.
    pub keep: Option<Tensor>,
    /// γ and β, `[cols]`.
    pub affine: Option<[Tensor; 2]>,
    /// ψ², `[cols]`.
    pub running_phi: Tensor,
    /// ν/(1−α_b), `[cols]`.
    pub ema_gz: Tensor,
}

/// The gradients to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// ∂L/∂X.
    pub input: bool,
    /// ∂L/∂γ.
    pub weight: bool,
    /// ∂L/∂β.
    pub bias: bool,
}

impl Wanted {
    /// Whether there is a backward.
    pub fn any(&self) -> bool {
        self.input || self.weight || self.bias
    }
}

/// Where arrays begin that a caller may cut out of larger ones: mask, parameters and state. (The others are
/// the layer's own, or copied where they begin off a 16-byte boundary.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offsets {
    /// On a boundary.
    Aligned,
    /// An element past one.
    AnElement,
}

/// What the passes leave.
pub struct Results {
    /// `[rows, cols]`.
    pub y: Tensor,
    /// As `y`: the sum with the residual.
    pub sum: Option<Tensor>,
    /// As `y`.
    pub dx: Option<Tensor>,
    /// `[cols]`.
    pub dweight: Option<Tensor>,
    /// `[cols]`.
    pub dbias: Option<Tensor>,
    /// `[cols]`.
    pub running_phi: Tensor,
    /// `[cols]`.
    pub ema_gz: Tensor,
}

/// A tensor's elements on the emulated device.
struct DeviceTensor {
    array: Array,
    dtype: DType,
    shape: Vec<usize>,
}

impl DeviceTensor {
    fn of(tensor: &Tensor, offsets: Offsets) -> Result<Self> {
        let dtype = tensor.dtype();
        let offset = match offsets {
            Offsets::Aligned => 0,
            Offsets::AnElement => dtype.size_in_bytes(),
        };
        Ok(Self {
            array: Array::of(&bytes(tensor)?, offset),
            dtype,
            shape: tensor.dims().to_vec(),
        })
    }

    fn unwritten(shape: &[usize], dtype: DType) -> Self {
        let len = shape.iter().product::<usize>() * dtype.size_in_bytes();
        Self {
            array: Array::unwritten(len, 0),
            dtype,
            shape: shape.to_vec(),
        }
    }

    fn vector(&self) -> Vector {
        Vector {
            data: self.array.address(),
            dtype: dtype(self.dtype),
        }
    }

    fn to_host(&self) -> Result<Tensor> {
        Tensor::from_raw_buffer(self.array.bytes(), self.dtype, &self.shape, &Device::Cpu)
    }
}

impl Arguments {
    /// Runs the forward, the step of ψ² and, if anything is wanted of it, the backward, which takes the step
    /// of ν. Panics where a GPU would refuse a launch, or where an input was written to.
    pub fn run(&self, wanted: Wanted, offsets: Offsets, schedule: Schedule) -> Result<Results> {
        let mut results = run_over_ranks(std::slice::from_ref(self), wanted, offsets, schedule)?;
        Ok(results.pop().expect("one rank"))
    }

    /// The arguments of ranks that share the rows out by weight.
    pub fn shards(&self, weights: &[usize]) -> Result<Vec<Self>> {
        let (rows, _) = self.x.dims2()?;
        let total: usize = weights.iter().sum();
        let (mut before, mut shards) = (0, vec![]);
        for weight in weights {
            let start = rows * before / total;
            before += weight;
            let len = rows * before / total - start;
            let part = |tensor: &Tensor| tensor.narrow(0, start, len)?.force_contiguous();
            shards.push(Self {
                x: part(&self.x)?,
                residual: self.residual.as_ref().map(part).transpose()?,
                dy: part(&self.dy)?,
                dsum: part(&self.dsum)?,
                keep: self.keep.as_ref().map(part).transpose()?,
                ..self.clone()
            });
        }
        Ok(shards)
    }
}

/// [`Arguments::run`] on each of several ranks, whose sums are added up where the layer adds them up. A rank is alone if it
/// is the only one; else it may have no rows.
pub fn run_over_ranks(
    ranks: &[Arguments],
    wanted: Wanted,
    offsets: Offsets,
    schedule: Schedule,
) -> Result<Vec<Results>> {
    let over_ranks = ranks.len() > 1;
    let mut ranks = (ranks.iter())
        .map(|arguments| Rank::new(arguments, over_ranks, wanted, offsets, schedule))
        .collect::<Result<Vec<_>>>()?;
    let first = &ranks[0];
    let by_batch = first.train == Some(config::Statistics::Batch);
    let of_forward = first.of_forward();
    let room = first.pass.totals_room(first.train);
    // The totals of a backward lie before those of its forward.
    let of_backward = 0..of_forward.start;
    let of_both = 0..of_forward.end;

    for rank in &ranks {
        rank.forward();
    }
    if by_batch {
        exchange(&mut ranks, &of_forward);
    }
    for rank in &mut ranks {
        rank.finish_forward()?;
    }
    let deferred = over_ranks && room > 0 && wanted.any();
    if !by_batch && !deferred {
        exchange(&mut ranks, &of_forward);
    }
    if !deferred {
        ranks.iter_mut().for_each(Rank::update_phi);
    }
    if wanted.any() {
        ranks.iter_mut().for_each(Rank::backward);
        if deferred {
            exchange(&mut ranks, &of_both);
            ranks.iter_mut().for_each(Rank::update_phi);
        } else {
            exchange(&mut ranks, &of_backward);
        }
        ranks.iter_mut().for_each(Rank::finish_backward);
    }
    ranks.into_iter().map(Rank::results).collect()
}

/// Adds up some of the ranks' totals, and hands each the sums.
fn exchange(ranks: &mut [Rank], numbers: &Range<usize>) {
    let mut sums = vec![0.; numbers.len()];
    for rank in ranks.iter() {
        for (sum, own) in sums.iter_mut().zip(rank.totals(numbers)) {
            *sum += own;
        }
    }
    for rank in ranks {
        rank.take(numbers, &sums);
    }
}

/// One rank's passes and its part of the device's memory.
struct Rank<'a> {
    arguments: &'a Arguments,
    pass: Pass,
    train: Option<config::Statistics>,
    schedule: Schedule,
    x: DeviceTensor,
    dy: DeviceTensor,
    dsum: DeviceTensor,
    residual: Option<DeviceTensor>,
    sum: Option<DeviceTensor>,
    keep: Option<DeviceTensor>,
    weight: Option<DeviceTensor>,
    bias: Option<DeviceTensor>,
    running_phi: DeviceTensor,
    ema_gz: DeviceTensor,
    y: DeviceTensor,
    dx: Option<DeviceTensor>,
    dweight: Option<DeviceTensor>,
    dbias: Option<DeviceTensor>,
    saved: Option<Array>,
    forward_workspace: Option<Array>,
    backward_workspace: Option<Array>,
    /// What other ranks add to: of the backward, then of the forward.
    totals: Option<Array>,
}

impl<'a> Rank<'a> {
    fn new(
        arguments: &'a Arguments,
        over_ranks: bool,
        wanted: Wanted,
        offsets: Offsets,
        schedule: Schedule,
    ) -> Result<Self> {
        let (rows, cols) = arguments.x.dims2()?;
        let pass = Pass {
            dtype: dtype(arguments.x.dtype()),
            rows,
            cols,
            masked: arguments.keep.is_some(),
            config: mirrored(&arguments.config),
        };
        let train = match arguments.recalibrate {
            true => Some(config::Statistics::Batch),
            false => (arguments.train).then(|| pass.config.statistics_at(arguments.steps + 1)),
        };
        let aligned = |tensor: &Tensor| DeviceTensor::of(tensor, Offsets::Aligned);
        let part = |tensor: &Tensor| DeviceTensor::of(tensor, offsets);
        let [weight, bias] = match &arguments.affine {
            Some([weight, bias]) => [Some(part(weight)?), Some(part(bias)?)],
            None => [None, None],
        };
        let gradient = |of: &Option<DeviceTensor>, wanted: bool| {
            let of = of.as_ref().filter(|_| wanted)?;
            Some(DeviceTensor::unwritten(&of.shape, of.dtype))
        };
        let output = || DeviceTensor::unwritten(&[rows, cols], arguments.x.dtype());
        let needs_saved = wanted.any() || pass.needs_saved(train);
        let totals = 8 * (cols + pass.forward_totals());
        Ok(Self {
            arguments,
            pass,
            train,
            schedule,
            x: aligned(&arguments.x)?,
            dy: aligned(&arguments.dy)?,
            dsum: aligned(&arguments.dsum)?,
            residual: arguments.residual.as_ref().map(aligned).transpose()?,
            sum: arguments.residual.as_ref().map(|_| output()),
            keep: arguments.keep.as_ref().map(part).transpose()?,
            running_phi: part(&arguments.running_phi)?,
            ema_gz: part(&arguments.ema_gz)?,
            y: output(),
            dx: wanted.input.then(output),
            dweight: gradient(&weight, wanted.weight),
            dbias: gradient(&bias, wanted.bias),
            weight,
            bias,
            saved: needs_saved.then(|| Array::unwritten(pass.saved_bytes(), 0)),
            forward_workspace: train.map(|_| Array::unwritten(pass.forward_workspace_bytes(), 0)),
            backward_workspace: None,
            totals: (over_ranks && train.is_some()).then(|| Array::unwritten(totals, 0)),
        })
    }

    fn forward(&self) {
        self.run(&self.pass.forward(&self.forward_buffers(), self.train));
    }

    fn finish_forward(&mut self) -> Result<()> {
        let launches = (self.pass).finish_forward(&self.forward_buffers(), self.train);
        self.run(&launches);
        if self.totals.is_some() {
            self.forward_workspace = None;
        }
        unwritten_to("ψ²", &self.arguments.running_phi, &self.running_phi)
    }

    fn update_phi(&mut self) {
        let Some(train) = self.train else { return };
        let t = self.arguments.steps + 1;
        let step = match self.arguments.recalibrate {
            true => config::PhiStep {
                cumulative: Some(config::Shares::of_mean(1)),
                moving: None,
            },
            false => self.pass.config.phi_step(t),
        };
        // The forward's other arrays may be gone by then.
        let all = self.forward_buffers();
        let buffers = ForwardBuffers {
            phi: all.phi,
            saved: all.saved,
            workspace: all.workspace,
            totals: all.totals,
            ..Default::default()
        };
        self.run(&[self.pass.update_phi(&buffers, train, Some(&step))]);
        self.forward_workspace = None;
    }

    fn backward(&mut self) {
        let bytes = self.pass.backward_workspace_bytes();
        self.backward_workspace = Some(Array::unwritten(bytes, 0));
        let scale = self.arguments.loss_scale;
        let buffers = self.backward_buffers();
        self.run(&self.pass.backward(&buffers, self.train, scale));
    }

    fn finish_backward(&mut self) {
        let all = self.backward_buffers();
        // Rows may be locked by then, or be ν.
        let buffers = BackwardBuffers {
            x: 0,
            dy: 0,
            dsum: 0,
            dx: 0,
            keep: 0,
            ema_gz: match self.arguments.recalibrate {
                true => Default::default(),
                false => all.ema_gz,
            },
            ..all
        };
        let launch = (self.pass).update_nu(&buffers, self.train, self.arguments.loss_scale);
        self.run(launch.as_slice());
        let buffers = BackwardBuffers {
            ema_gz: Default::default(),
            totals: 0,
            ..all
        };
        self.run(&self.pass.finish_backward(&buffers, self.train));
    }

    fn run(&self, launches: &[Launch]) {
        for launch in launches {
            run(launch, self.schedule, 0..launch.grid.1);
        }
    }

    fn forward_buffers(&self) -> ForwardBuffers {
        ForwardBuffers {
            x: self.x.array.address(),
            residual: address(&self.residual),
            sum: address(&self.sum),
            y: self.y.array.address(),
            keep: address(&self.keep),
            weight: vector(&self.weight),
            bias: vector(&self.bias),
            phi: self.running_phi.vector(),
            saved: start(&self.saved),
            workspace: start(&self.forward_workspace),
            totals: match &self.totals {
                Some(totals) => totals.address() + 8 * self.of_forward().start as u64,
                None => 0,
            },
        }
    }

    fn backward_buffers(&self) -> BackwardBuffers {
        BackwardBuffers {
            x: self.sum.as_ref().unwrap_or(&self.x).array.address(),
            dy: self.dy.array.address(),
            dsum: match &self.sum {
                Some(_) => self.dsum.array.address(),
                None => 0,
            },
            dx: address(&self.dx),
            keep: address(&self.keep),
            weight: vector(&self.weight),
            ema_gz: self.ema_gz.vector(),
            dweight: vector(&self.dweight),
            dbias: vector(&self.dbias),
            saved: start(&self.saved),
            workspace: start(&self.backward_workspace),
            totals: start(&self.totals),
        }
    }

    /// The totals of a forward, by their place among all.
    fn of_forward(&self) -> Range<usize> {
        self.pass.cols..self.pass.cols + self.pass.forward_totals()
    }

    /// What this rank brings to a sum.
    fn totals(&self, numbers: &Range<usize>) -> Vec<f64> {
        let Some(totals) = &self.totals else {
            return vec![];
        };
        let totals = totals.bytes()[8 * numbers.start..8 * numbers.end].chunks_exact(8);
        totals
            .map(|total| f64::from_ne_bytes(total.try_into().expect("8 bytes")))
            .collect()
    }

    /// Has the sums of all ranks in place of its own, in an array of their own as an engine may give them.
    fn take(&mut self, numbers: &Range<usize>, sums: &[f64]) {
        let Some(totals) = &self.totals else { return };
        let mut bytes = totals.bytes().to_vec();
        let sums: Vec<u8> = sums.iter().flat_map(|sum| sum.to_ne_bytes()).collect();
        bytes[8 * numbers.start..8 * numbers.end].copy_from_slice(&sums);
        self.totals = Some(Array::of(&bytes, 0));
    }

    fn results(self) -> Result<Results> {
        let arguments = self.arguments;
        unwritten_to("x", &arguments.x, &self.x)?;
        unwritten_to("dy", &arguments.dy, &self.dy)?;
        unwritten_to("dsum", &arguments.dsum, &self.dsum)?;
        for (name, host, device) in [
            ("residual", arguments.residual.as_ref(), &self.residual),
            ("keep", arguments.keep.as_ref(), &self.keep),
            (
                "weight",
                arguments.affine.as_ref().map(|[w, _]| w),
                &self.weight,
            ),
            (
                "bias",
                arguments.affine.as_ref().map(|[_, b]| b),
                &self.bias,
            ),
        ] {
            if let (Some(host), Some(device)) = (host, device) {
                unwritten_to(name, host, device)?;
            }
        }
        let to_host = |part: Option<DeviceTensor>| part.map(|part| part.to_host()).transpose();
        Ok(Results {
            y: self.y.to_host()?,
            sum: to_host(self.sum)?,
            dx: to_host(self.dx)?,
            dweight: to_host(self.dweight)?,
            dbias: to_host(self.dbias)?,
            running_phi: self.running_phi.to_host()?,
            ema_gz: self.ema_gz.to_host()?,
        })
    }
}

fn address(part: &Option<DeviceTensor>) -> u64 {
    part.as_ref().map_or(0, |part| part.array.address())
}

fn vector(part: &Option<DeviceTensor>) -> Vector {
    part.as_ref()
        .map_or(Vector::default(), DeviceTensor::vector)
}

fn start(array: &Option<Array>) -> u64 {
    array.as_ref().map_or(0, Array::address)
}

/// The layer-scale by itself, of `groups` groups, and its gradient from `dy`; packed rows on the CPU.
pub fn scale_groups(
    x: &Tensor,
    dy: &Tensor,
    groups: usize,
    eps: f64,
    schedule: Schedule,
) -> Result<[Tensor; 2]> {
    let (rows, cols) = x.dims2()?;
    let pass = Pass {
        dtype: dtype(x.dtype()),
        rows,
        cols,
        masked: false,
        config: mirrored(&PowerNormConfig {
            group_scaling: Some(groups),
            affine: false,
            ..eps.into()
        }),
    };
    let [x, dy] = [x, dy].map(|tensor| DeviceTensor::of(tensor, Offsets::Aligned));
    let (x, dy) = (x?, dy?);
    let [y, dx] = [(); 2].map(|()| DeviceTensor::unwritten(&[rows, cols], x.dtype));
    let [factors, dots] = [(); 2].map(|()| Array::unwritten(pass.group_bytes(), 0));
    let (x, dy) = (x.array.address(), dy.array.address());
    let launches = pass.scale_groups(x, y.array.address(), factors.address());
    run_all(&launches, schedule);
    // The backward keeps nothing of the forward.
    let factors = Array::unwritten(factors.bytes().len(), 0);
    let rows = [x, dy, dx.array.address()];
    run_all(
        &pass.scale_groups_bwd(rows, factors.address(), dots.address()),
        schedule,
    );
    Ok([y.to_host()?, dx.to_host()?])
}

impl Results {
    /// All there is, named.
    pub fn tensors(&self) -> Vec<(&'static str, &Tensor)> {
        let wanted = [
            ("sum", self.sum.as_ref()),
            ("dx", self.dx.as_ref()),
            ("dweight", self.dweight.as_ref()),
            ("dbias", self.dbias.as_ref()),
        ];
        let wanted = wanted.into_iter().filter_map(|(name, t)| Some((name, t?)));
        [
            ("y", &self.y),
            ("running_phi", &self.running_phi),
            ("ema_gz", &self.ema_gz),
        ]
        .into_iter()
        .chain(wanted)
        .collect()
    }
}

/// The bytes of a tensor's elements.
pub fn bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![];
    tensor.write_bytes(&mut bytes)?;
    Ok(bytes)
}

#[track_caller]
fn unwritten_to(name: &str, host: &Tensor, device: &DeviceTensor) -> Result<()> {
    let same = bytes(host)? == device.array.bytes();
    assert!(same, "{name} is read only, and was written to");
    Ok(())
}

fn run_all(launches: &[Launch], schedule: Schedule) {
    for launch in launches {
        run(launch, schedule, 0..launch.grid.1);
    }
}

/// Runs the blocks of a launch whose y is in `rows`.
pub(crate) fn run(launch: &Launch, schedule: Schedule, rows: Range<u32>) {
    /// Whatever the parameters, the call is the same.
    macro_rules! emulate_with {
        ($params:expr) => {
            // SAFETY: addresses of `Array`s, which AddressSanitizer guards.
            unsafe {
                emulate(
                    &launch.kernel,
                    launch.grid,
                    launch.block,
                    launch.shared_bytes,
                    $params,
                    schedule,
                    rows,
                )
            }
        };
    }
    let result = match &launch.params {
        Params::Normalize(params) => emulate_with!(params),
        Params::SumPartials(params) => emulate_with!(params),
        Params::UpdatePhi(params) => emulate_with!(params),
        Params::NormalizeBwd(params) => emulate_with!(params),
        Params::UpdateNu(params) => emulate_with!(params),
    };
    if let Err(refusal) = result {
        panic!("{refusal}");
    }
}

fn dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        // The mask, whose dtype the kernels know.
        _ => Dtype::default(),
    }
}

/// The configuration as the launches' own copy of its type.
pub(crate) fn mirrored(config: &PowerNormConfig) -> config::PowerNormConfig {
    config::PowerNormConfig {
        eps: config.eps,
        alpha_fwd: config.alpha_fwd,
        alpha_bwd: config.alpha_bwd,
        warmup_steps: config.warmup_steps,
        group_scaling: config.group_scaling,
        statistics: match config.statistics {
            Statistics::Running => config::Statistics::Running,
            Statistics::Batch => config::Statistics::Batch,
        },
        recipe: match config.recipe {
            Recipe::Paper => config::Recipe::Paper,
            Recipe::Fairseq => config::Recipe::Fairseq,
        },
        affine: config.affine,
    }
}
