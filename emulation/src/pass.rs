//! A layer's passes through the emulated kernels, launched as the crate's `src/cuda/mod.rs` launches them.

use crate::config;
use crate::device::{emulate, Array, Schedule};
use crate::launch::{BackwardBuffers, Dtype, ForwardBuffers, Launch, Params, Pass, Vector};
use candle::{DType, Device, Result, Tensor};
use candle_powernorm::{PowerNormConfig, Recipe, Statistics};

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
        let (rows, cols) = self.x.dims2()?;
        let pass = Pass {
            dtype: dtype(self.x.dtype()),
            rows,
            cols,
            masked: self.keep.is_some(),
            config: mirrored(&self.config),
        };
        let t = self.steps + 1;
        let train = match self.recalibrate {
            true => Some(config::Statistics::Batch),
            false => self.train.then(|| pass.config.statistics_at(t)),
        };
        let backward = wanted.any();

        let x = DeviceTensor::of(&self.x, Offsets::Aligned)?;
        let dy = DeviceTensor::of(&self.dy, Offsets::Aligned)?;
        let dsum = DeviceTensor::of(&self.dsum, Offsets::Aligned)?;
        let residual = (self.residual.as_ref())
            .map(|residual| DeviceTensor::of(residual, Offsets::Aligned))
            .transpose()?;
        let sum = (residual.as_ref()).map(|_| DeviceTensor::unwritten(&[rows, cols], x.dtype));
        let part = |tensor: &Tensor| DeviceTensor::of(tensor, offsets);
        let keep = self.keep.as_ref().map(part).transpose()?;
        let [weight, bias] = match &self.affine {
            Some([weight, bias]) => [Some(part(weight)?), Some(part(bias)?)],
            None => [None, None],
        };
        let running_phi = part(&self.running_phi)?;
        let ema_gz = part(&self.ema_gz)?;
        let y = DeviceTensor::unwritten(&[rows, cols], x.dtype);

        let address = |part: &Option<DeviceTensor>| part.as_ref().map_or(0, |p| p.array.address());
        let vector = |part: &Option<DeviceTensor>| part.as_ref().map(DeviceTensor::vector);
        let vector = |part| vector(part).unwrap_or_default();
        let saved =
            (backward || pass.needs_saved(train)).then(|| Array::unwritten(pass.saved_bytes(), 0));
        let saved_address = saved.as_ref().map_or(0, Array::address);
        let workspace = train.map(|_| Array::unwritten(pass.forward_workspace_bytes(), 0));
        let buffers = ForwardBuffers {
            x: x.array.address(),
            residual: address(&residual),
            sum: address(&sum),
            y: y.array.address(),
            keep: address(&keep),
            weight: vector(&weight),
            bias: vector(&bias),
            phi: running_phi.vector(),
            saved: saved_address,
            workspace: workspace.as_ref().map_or(0, Array::address),
        };
        run_all(&pass.forward(&buffers, train), schedule);
        unwritten_to("ψ²", &self.running_phi, &running_phi)?;
        if let Some(train) = train {
            // The forward's other arrays may be gone by then.
            let buffers = ForwardBuffers {
                phi: buffers.phi,
                saved: buffers.saved,
                workspace: buffers.workspace,
                ..Default::default()
            };
            let step = match self.recalibrate {
                true => config::PhiStep {
                    cumulative: Some(config::Shares::of_mean(1)),
                    moving: None,
                },
                false => pass.config.phi_step(t),
            };
            run_all(&[pass.update_phi(&buffers, train, &step)], schedule);
        }

        let gradient = |of: &Option<DeviceTensor>, wanted: bool| {
            let of = of.as_ref().filter(|_| wanted)?;
            Some(DeviceTensor::unwritten(&of.shape, of.dtype))
        };
        let dx = wanted
            .input
            .then(|| DeviceTensor::unwritten(&[rows, cols], x.dtype));
        let dweight = gradient(&weight, wanted.weight);
        let dbias = gradient(&bias, wanted.bias);
        if backward {
            drop(workspace);
            let workspace = Array::unwritten(pass.backward_workspace_bytes(), 0);
            let buffers = BackwardBuffers {
                x: sum.as_ref().unwrap_or(&x).array.address(),
                dy: dy.array.address(),
                dsum: match &sum {
                    Some(_) => dsum.array.address(),
                    None => 0,
                },
                dx: address(&dx),
                keep: address(&keep),
                weight: vector(&weight),
                ema_gz: ema_gz.vector(),
                dweight: vector(&dweight),
                dbias: vector(&dbias),
                saved: saved_address,
                workspace: workspace.address(),
            };
            let launches = pass.backward(&buffers, train, self.loss_scale, !self.recalibrate);
            run_all(&launches, schedule);
        }

        unwritten_to("x", &self.x, &x)?;
        unwritten_to("dy", &self.dy, &dy)?;
        for (name, host, device) in [
            ("residual", self.residual.as_ref(), &residual),
            ("keep", self.keep.as_ref(), &keep),
            ("weight", self.affine.as_ref().map(|[w, _]| w), &weight),
            ("bias", self.affine.as_ref().map(|[_, b]| b), &bias),
        ] {
            if let (Some(host), Some(device)) = (host, device) {
                unwritten_to(name, host, device)?;
            }
        }
        let to_host = |part: Option<DeviceTensor>| part.map(|part| part.to_host()).transpose();
        Ok(Results {
            y: y.to_host()?,
            sum: to_host(sum)?,
            dx: to_host(dx)?,
            dweight: to_host(dweight)?,
            dbias: to_host(dbias)?,
            running_phi: running_phi.to_host()?,
            ema_gz: ema_gz.to_host()?,
        })
    }
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
pub(crate) fn run(launch: &Launch, schedule: Schedule, rows: std::ops::Range<u32>) {
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
