//! Throughput of the layer's passes beside candle's own normalizations and a plain copy.
//!
//! ```text
//! cargo bench --bench power_norm                    # 4096x512 on the CPU: 5 min on two cores
//! CANDLE_POWERNORM_BENCH=full cargo bench            # every shape and dtype: about an hour
//! cargo bench --bench power_norm -- --test           # each of the full set once: half a minute
//! cargo bench --bench power_norm -- 'forward.*/t1'   # what the regular expression matches
//! cargo bench --features cuda --bench power_norm -- '/cuda$'   # on a GPU
//! ```
//!
//! Ids are `pass/contender/dtype/rowsxcols/place`. Throughput counts the bytes that the pass must
//! move: each input read once and each output written once, for every contender.
//!
//! Passes: `forward_train` and `forward_eval` are one call. `backward` is `Tensor::backward` of a
//! graph that holds only the layer. `train_step_through_autograd` is a forward and that backward.
//! candle's autograd makes passes of its own around any op. Contender `autograd_alone` shows what
//! they cost: its forward copies the input, and its gradients are ready. So `backward` less
//! `autograd_alone` is the time of the layer's kernels. Both begin with a tensor of ones as large as
//! the output, because the graph has no loss. A model fills a single one, so there candle's share is
//! smaller.
//!
//! `--test` runs each benchmark once, on a sixteenth of the rows that its id says.
//!
//! With `MIMALLOC_PURGE_DELAY=-1`, freed memory stays at hand. Set it for figures to compare.
//!
//! Places: `t1` and `t2` are threads of the CPU. Feature `cuda` adds a GPU's:
//!
//! - `cuda_graph`: calls are recorded in a CUDA graph and replayed, between two events. The CPU has
//!   no part in it, so this is the time of the kernels. Of `backward`, it is theirs and that of
//!   candle's autograd, as elsewhere.
//! - `cuda`: calls queue up, and the clock stops when the GPU is done with the last.
//! - `cuda_call`: the clock waits for each call.
//! - `cuda_events`: the same on a handle of `Device::new_cuda_with_stream`, which records events.
//!
//! candle's element-wise operations have a thread pool of their own for the whole process, and its
//! threads spin while they wait. The benches give it one thread, in `t2` too. To time contenders
//! made of candle's operations with two, run `CANDLE_NUM_THREADS=2 cargo bench -- '/t2$'`.

#[path = "common/copies.rs"]
mod copies;
#[cfg(feature = "cuda")]
#[path = "common/gpu.rs"]
mod gpu;
#[path = "common/ready.rs"]
mod ready;
#[path = "../tests/common/reference.rs"]
mod reference;
#[path = "common/threads.rs"]
mod threads;
#[path = "common/unused.rs"]
mod unused;

use candle::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use candle_nn::{BatchNorm, BatchNormConfig, VarBuilder, VarMap};
use candle_powernorm::{LayerNorm, PowerNorm, PowerNormConfig, RmsNorm, Statistics, power_norm};
use criterion::{Criterion, Throughput};
use rayon::{ThreadPool, ThreadPoolBuilder};
use ready::Ready;
use reference::{Recipe, Spec, composed};
#[cfg(feature = "cuda")]
use std::cell::OnceCell;
use std::hint::black_box;
use std::ops::Range;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Keeps freed memory at hand; with `MIMALLOC_PURGE_DELAY=-1` in the environment, all of it.
/// glibc's allocator gives large blocks back, so that a pass may or may not wait for the system to
/// map and clear its output: times differed by a factor of three from run to run.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const EPS: f64 = 1e-5;

/// The time that criterion gives a benchmark. A slow pass takes longer: ten samples of one pass
/// each.
const WARM_UP: Duration = Duration::from_millis(300);
const MEASUREMENT: Duration = Duration::from_secs(1);

/// The rows of a check, where rows do not depend on each other.
const CHECKED_ROWS: usize = 256;

/// Chooses the set; see the head of this file.
const SET: &str = "CANDLE_POWERNORM_BENCH";

/// The benchmarks that `cargo bench` runs.
#[derive(Clone, Copy, PartialEq)]
enum Set {
    /// The CPU's benchmarks of one shape and two dtypes, and all of a GPU's.
    Short,
    Full,
}

impl Set {
    /// The set that the arguments and the environment ask for. A test takes all, since it is quick.
    fn chosen(test: bool) -> Self {
        match std::env::var(SET).as_deref() {
            Ok("full") => Self::Full,
            Ok(other) => panic!("expected {SET}=full or no {SET}, got {SET}={other}"),
            Err(_) if test => Self::Full,
            Err(_) => Self::Short,
        }
    }

    /// Wall time of a benchmark, the mean of the CPU's on two cores of a Zen 4: the time that
    /// criterion takes, the data, the check, and passes so slow that ten of them take longer.
    fn seconds_each(self) -> f64 {
        match self {
            Self::Short => 1.7,
            Self::Full => 3.,
        }
    }

    fn dtypes(self, place: Place) -> &'static [DType] {
        match self {
            Self::Short if place.is_cpu() => &[DType::F32, DType::BF16],
            _ => &[DType::F32, DType::BF16, DType::F16],
        }
    }

    /// Rows and channels: a small batch, a transformer's, wide ones, some beyond every cache, and
    /// one that no vector divides.
    fn shapes(self, place: Place) -> &'static [(usize, usize)] {
        match (place, self) {
            (Place::Threads(_), Self::Short) => &[(4096, 512)],
            (Place::Threads(_), Self::Full) => &[
                (256, 512),
                (1000, 300),
                (1024, 512),
                (4096, 512),
                (4096, 4096),
                (32768, 1024),
            ],
            (Place::CudaGraph | Place::Cuda, _) => &[
                (256, 1024),
                (4096, 1024),
                (4096, 4096),
                (32768, 1024),
                (32768, 4096),
                (32768, 8192),
            ],
            (Place::CudaCall | Place::CudaEvents, _) => &[(256, 1024)],
        }
    }

    fn cases(self, test: bool) -> Vec<Case> {
        let mut cases = vec![];
        for place in Place::all() {
            for &dtype in self.dtypes(place) {
                for &shape in self.shapes(place) {
                    cases.push(Case {
                        place,
                        dtype,
                        shape,
                        test,
                    });
                }
            }
        }
        cases
    }
}

/// Bytes of the inputs that calls on a GPU read in turn, so that they come from memory and not from
/// the L2.
const GPU_INPUT_BYTES: usize = 256 << 20;

/// On a GPU, graphs are built before their backwards are timed: about this many bytes of outputs,
/// and at most `GPU_GRAPHS` graphs.
const GPU_GRAPH_BYTES: usize = 2 << 30;
const GPU_GRAPHS: usize = 64;

#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// The CPU, with this number of threads.
    Threads(usize),
    /// A GPU that replays recorded calls.
    CudaGraph,
    /// A GPU whose queue is kept full.
    Cuda,
    /// A GPU that is waited for after each call.
    CudaCall,
    /// The same, and each call records events.
    CudaEvents,
}

impl Place {
    const CPU: [Self; 2] = [Self::Threads(1), Self::Threads(2)];
    const GPU: [Self; 4] = [
        Self::CudaGraph,
        Self::Cuda,
        Self::CudaCall,
        Self::CudaEvents,
    ];

    fn all() -> Vec<Self> {
        let gpu: &[Self] = if cfg!(feature = "cuda") {
            &Self::GPU
        } else {
            &[]
        };
        [&Self::CPU, gpu].concat()
    }

    fn name(self) -> String {
        match self {
            Self::Threads(threads) => format!("t{threads}"),
            Self::CudaGraph => "cuda_graph".into(),
            Self::Cuda => "cuda".into(),
            Self::CudaCall => "cuda_call".into(),
            Self::CudaEvents => "cuda_events".into(),
        }
    }

    fn is_cpu(self) -> bool {
        matches!(self, Self::Threads(_))
    }

    fn device(self) -> Device {
        match self {
            Self::Threads(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Self::CudaGraph => gpu::recordable(),
            #[cfg(feature = "cuda")]
            Self::Cuda | Self::CudaCall => gpu::queue(),
            #[cfg(feature = "cuda")]
            Self::CudaEvents => gpu::with_events(),
            #[cfg(not(feature = "cuda"))]
            _ => unreachable!("a place of feature cuda"),
        }
    }

    /// The threads of the CPU.
    fn pool(self) -> Option<ThreadPool> {
        let Self::Threads(threads) = self else {
            return None;
        };
        let pool = ThreadPoolBuilder::new().num_threads(threads).build();
        Some(pool.expect("a thread pool"))
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Pass {
    ForwardTrain,
    ForwardEval,
    Backward,
    TrainStep,
}

impl Pass {
    const ALL: [Self; 4] = [
        Self::ForwardTrain,
        Self::ForwardEval,
        Self::Backward,
        Self::TrainStep,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::ForwardTrain => "forward_train",
            Self::ForwardEval => "forward_eval",
            Self::Backward => "backward",
            Self::TrainStep => "train_step_through_autograd",
        }
    }

    /// The bytes a pass must move: x and y forward; x, dy and dx backward; and with a residual it,
    /// the sum and the sum's gradient. What a channel needs is not counted.
    fn bytes_moved(self, residual: bool, rows: usize, cols: usize, dtype: DType) -> u64 {
        let (forward, backward) = if residual { (4, 4) } else { (2, 3) };
        let tensors = match self {
            Self::ForwardTrain | Self::ForwardEval => forward,
            Self::Backward => backward,
            Self::TrainStep => forward + backward,
        };
        (tensors * rows * cols * dtype.size_in_bytes()) as u64
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Contender {
    /// The layer after its warm-up, with this many groups.
    PowerNorm(Option<usize>),
    /// The layer with the batch's statistic (PN-V) and one group.
    PowerNormV,
    /// The layer with one group, of the sum with a residual. Both outputs are added up for a
    /// backward.
    Residual,
    /// The same by an addition and a forward.
    ResidualApart,
    /// The layer with one group and a mask, which keeps all rows.
    Masked,
    /// The layer in candle's own operations.
    Composed,
    /// This crate's.
    LayerNorm,
    /// The same of the sum with a residual, as `Residual`.
    LayerNormResidual,
    LayerNormFused,
    LayerNormSlow,
    /// This crate's.
    RmsNorm,
    /// The same of the sum with a residual, as `Residual`.
    RmsNormResidual,
    RmsNormFused,
    RmsNormSlow,
    BatchNorm,
    /// An op whose forward copies its input, and whose backward returns gradients that exist already.
    AutogradAlone,
    /// The rows copied into memory that is already mapped.
    Copy,
}

impl Contender {
    const ALL: [Self; 19] = [
        Self::PowerNorm(None),
        Self::PowerNorm(Some(1)),
        Self::PowerNorm(Some(8)),
        Self::PowerNormV,
        Self::Residual,
        Self::ResidualApart,
        Self::Masked,
        Self::Composed,
        Self::LayerNorm,
        Self::LayerNormResidual,
        Self::LayerNormFused,
        Self::LayerNormSlow,
        Self::RmsNorm,
        Self::RmsNormResidual,
        Self::RmsNormFused,
        Self::RmsNormSlow,
        Self::BatchNorm,
        Self::AutogradAlone,
        Self::Copy,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::PowerNorm(None) => "power_norm_g0",
            Self::PowerNorm(Some(1)) => "power_norm_g1",
            Self::PowerNorm(Some(_)) => "power_norm_g8",
            Self::PowerNormV => "power_norm_v",
            Self::Residual => "residual",
            Self::ResidualApart => "residual_apart",
            Self::Masked => "power_norm_masked",
            Self::Composed => "composed",
            Self::LayerNorm => "layer_norm",
            Self::LayerNormResidual => "layer_norm_residual",
            Self::LayerNormFused => "layer_norm_fused",
            Self::LayerNormSlow => "layer_norm_slow",
            Self::RmsNorm => "rms_norm",
            Self::RmsNormResidual => "rms_norm_residual",
            Self::RmsNormFused => "rms_norm_fused",
            Self::RmsNormSlow => "rms_norm_slow",
            Self::BatchNorm => "batch_norm",
            Self::AutogradAlone => "autograd_alone",
            Self::Copy => "copy",
        }
    }

    /// `true` if there is a benchmark of the contender.
    fn takes_part(self, pass: Pass, case: Case) -> bool {
        self.can(pass, case) && self.is_wanted(pass, case.place)
    }

    /// `false` for what a contender cannot do.
    fn can(self, pass: Pass, Case { dtype, shape, .. }: Case) -> bool {
        match self {
            Self::PowerNorm(groups) => shape.1.is_multiple_of(groups.unwrap_or(1)),
            // They record no backward.
            Self::LayerNormFused | Self::RmsNormFused | Self::Copy => {
                matches!(pass, Pass::ForwardTrain | Pass::ForwardEval)
            }
            // In training it adds statistics in f32 to running ones in the input's dtype, and
            // fails.
            Self::BatchNorm => pass == Pass::ForwardEval || dtype == DType::F32,
            _ => true,
        }
    }

    /// `true` if a comparison with the contender tells something.
    fn is_wanted(self, pass: Pass, place: Place) -> bool {
        match self {
            Self::PowerNorm(_) | Self::RmsNorm | Self::LayerNorm => true,
            Self::LayerNormFused | Self::RmsNormFused | Self::Copy => true,
            Self::PowerNormV | Self::Masked => !place.is_cpu() && pass != Pass::ForwardEval,
            Self::Residual | Self::ResidualApart => pass != Pass::ForwardEval,
            // In training and in evaluation they are the same.
            Self::LayerNormResidual | Self::RmsNormResidual => pass != Pass::ForwardEval,
            Self::Composed | Self::BatchNorm => place.is_cpu(),
            Self::LayerNormSlow | Self::RmsNormSlow => pass != Pass::ForwardEval,
            Self::AutogradAlone => matches!(pass, Pass::Backward | Pass::TrainStep),
        }
    }

    fn has_residual(self) -> bool {
        matches!(
            self,
            Self::Residual | Self::ResidualApart | Self::LayerNormResidual | Self::RmsNormResidual
        )
    }

    /// `true` for this crate's own.
    fn is_ours(self) -> bool {
        matches!(
            self,
            Self::PowerNorm(_)
                | Self::PowerNormV
                | Self::Residual
                | Self::Masked
                | Self::LayerNorm
                | Self::LayerNormResidual
                | Self::RmsNorm
                | Self::RmsNormResidual
        )
    }
}

/// The inputs of some benchmarks, and their place.
#[derive(Clone, Copy)]
struct Case {
    place: Place,
    dtype: DType,
    /// Rows and channels.
    shape: (usize, usize),
    /// It runs once, and is not timed.
    test: bool,
}

impl Case {
    /// The rows of its tensors: a sixteenth in a test, which only has to run.
    fn rows(self) -> usize {
        match self.test {
            true => self.shape.0.div_ceil(16),
            false => self.shape.0,
        }
    }

    fn benchmarks(self) -> Vec<(Pass, Contender)> {
        let pairs = Pass::ALL
            .iter()
            .flat_map(|&pass| Contender::ALL.map(|contender| (pass, contender)));
        pairs
            .filter(|(pass, contender)| contender.takes_part(*pass, self))
            .collect()
    }
}

/// The inputs of a case, which its benchmarks share: random numbers take longer than most passes.
struct Inputs {
    case: Case,
    /// Taken in turn.
    xs: Vec<Var>,
    residual: OnceLock<Var>,
}

impl Inputs {
    fn new(case: Case) -> Result<Self> {
        let bytes = case.rows() * case.shape.1 * case.dtype.size_in_bytes();
        let count = match case.place {
            Place::Threads(_) => 1,
            _ if case.test => 1,
            _ => GPU_INPUT_BYTES.div_ceil(bytes),
        };
        Ok(Self {
            case,
            xs: (0..count)
                .map(|_| Self::random(case))
                .collect::<Result<_>>()?,
            residual: OnceLock::new(),
        })
    }

    fn random(case: Case) -> Result<Var> {
        let shape = (case.rows(), case.shape.1);
        let x = Tensor::randn(0f32, 1., shape, &case.place.device())?;
        Var::from_tensor(&x.to_dtype(case.dtype)?)
    }

    fn residual(&self) -> &Var {
        self.residual
            .get_or_init(|| Self::random(self.case).unwrap())
    }
}

/// The needs of one id.
struct Arena<'a> {
    pass: Pass,
    contender: Contender,
    place: Place,
    xs: &'a [Var],
    /// Of a contender that has one.
    residual: Option<&'a Var>,
    /// 1 for each row.
    mask: Tensor,
    weight: Var,
    bias: Var,
    power_norm: PowerNorm,
    layer_norm: LayerNorm,
    rms_norm: RmsNorm,
    batch_norm: BatchNorm,
    spec: Spec,
    #[cfg(feature = "cuda")]
    recording: OnceCell<Recorded>,
}

/// Recorded passes of one id.
#[cfg(feature = "cuda")]
struct Recorded {
    recording: gpu::Recording,
    passes: usize,
    /// The graphs whose backward was recorded. They own what it reads.
    _graphs: Vec<Tensor>,
}

/// Weights from 0.5 to 1.5.
fn ramp(cols: usize, device: &Device) -> Result<Tensor> {
    Tensor::arange(0, cols as u32, device)?
        .to_dtype(DType::F32)?
        .affine(1. / cols as f64, 0.5)
}

impl<'a> Arena<'a> {
    fn new(pass: Pass, contender: Contender, inputs: &'a Inputs) -> Result<Self> {
        let Case {
            place,
            dtype,
            shape: (_, cols),
            ..
        } = inputs.case;
        let device = &place.device();
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, dtype, device);
        let config = PowerNormConfig {
            warmup_steps: 0,
            group_scaling: match contender {
                Contender::PowerNorm(groups) => groups,
                _ => Some(1),
            },
            statistics: match contender {
                Contender::PowerNormV => Statistics::Batch,
                _ => Statistics::Running,
            },
            ..EPS.into()
        };
        let weight = match contender {
            // Σ y is the same for every x where all weights are equal, and dx is 0.
            Contender::LayerNorm | Contender::LayerNormResidual => {
                Var::from_tensor(&ramp(cols, device)?.to_dtype(dtype)?)?
            }
            _ => Var::ones(cols, dtype, device)?,
        };
        let bias = Var::zeros(cols, dtype, device)?;
        let arena = Self {
            pass,
            contender,
            place,
            xs: &inputs.xs,
            residual: contender.has_residual().then(|| inputs.residual()),
            rms_norm: RmsNorm::new(weight.as_tensor().clone(), EPS),
            layer_norm: LayerNorm::new(weight.as_tensor().clone(), bias.as_tensor().clone(), EPS),
            mask: Tensor::ones(inputs.case.rows(), DType::U8, device)?,
            weight,
            bias,
            power_norm: power_norm(cols, config, vb.pp("power_norm"))?,
            batch_norm: candle_nn::batch_norm(
                cols,
                BatchNormConfig::from(EPS),
                vb.pp("batch_norm"),
            )?,
            spec: Spec {
                eps: EPS,
                alpha_fwd: config.alpha_fwd,
                alpha_bwd: config.alpha_bwd,
                warmup_steps: 0,
                groups: config.group_scaling,
                batch_statistics: config.statistics == Statistics::Batch,
                recipe: Recipe::Paper,
            },
            #[cfg(feature = "cuda")]
            recording: OnceCell::new(),
        };
        if contender.is_ours() {
            arena.check()?;
        }
        Ok(arena)
    }

    /// The fresh layer must compute what its composed form does, or its speed means nothing.
    ///
    /// Its first backward has ν = 0, the gradient that autograd finds while ψ² is held. The
    /// composed form takes seconds for the largest inputs, so it only computes the last rows,
    /// unless the batch's statistic needs all.
    fn check(&self) -> Result<()> {
        let rows = self.xs[0].dim(0)?;
        let (phi, checked) = match self.spec.batch_statistics {
            true => (None, rows),
            false => (Some(self.power_norm.running_phi()?), rows.min(CHECKED_ROWS)),
        };
        let phi = match (phi, self.contender) {
            // Its D is 1.
            (Some(phi), Contender::RmsNorm | Contender::RmsNormResidual) => Some((phi - EPS)?),
            (phi, _) => phi,
        };
        let last = |tensor: &Tensor| tensor.narrow(0, rows - checked, checked);
        let mut input = last(&self.xs[0])?;
        if let Some(residual) = self.residual {
            input = (input + last(residual)?)?;
        }
        let x = Var::from_tensor(&input.to_dtype(DType::F32)?)?;
        let mut expected = match self.contender {
            Contender::LayerNorm | Contender::LayerNormResidual => {
                let (weight, bias) = (
                    self.weight.to_dtype(DType::F32)?,
                    self.bias.to_dtype(DType::F32)?,
                );
                candle_nn::ops::layer_norm_slow(&x, &weight, &bias, EPS as f32)?
            }
            _ => composed(&x, None, None, phi.as_ref(), &self.spec)?,
        };
        if self.residual.is_some() && self.has_backward() {
            expected = (expected + x.as_tensor())?;
        }
        let got = self.forward(0, self.pass != Pass::ForwardEval)?;
        // A sum with the residual has two roundings: its own, and those of the two outputs, which
        // have one sign, so that together they are as large as the sum's.
        let roundings = if self.residual.is_some() { 2. } else { 1. };
        compare("y", &last(&got)?, &expected, roundings)?;
        if !self.has_backward() {
            return Ok(());
        }
        let (got, expected) = (got.backward()?, expected.backward()?);
        match (got.get(&self.xs[0]), expected.get(&x)) {
            (Some(got), Some(expected)) => compare("dx", &last(got)?, expected, roundings),
            _ => candle::bail!("no dx: nothing to time"),
        }
    }

    fn has_backward(&self) -> bool {
        matches!(self.pass, Pass::Backward | Pass::TrainStep)
    }

    fn forward(&self, call: usize, train: bool) -> Result<Tensor> {
        let x = self.xs[call % self.xs.len()].as_tensor();
        let (weight, bias) = (&self.weight, &self.bias);
        let eps = EPS as f32;
        if let Some(residual) = self.residual {
            let residual = residual.as_tensor();
            let (y, sum) = match self.contender {
                Contender::Residual => self.power_norm.forward_residual(x, residual, None)?,
                Contender::LayerNormResidual => self.layer_norm.forward_residual(x, residual)?,
                Contender::RmsNormResidual => self.rms_norm.forward_residual(x, residual)?,
                _ => {
                    let sum = (x + residual)?;
                    (self.power_norm.forward_t(&sum, train)?, sum)
                }
            };
            return if self.has_backward() { y + sum } else { Ok(y) };
        }
        match self.contender {
            Contender::PowerNorm(_) | Contender::PowerNormV => self.power_norm.forward_t(x, train),
            Contender::Masked => self.power_norm.forward_masked(x, &self.mask),
            Contender::Composed => {
                let phi = Tensor::ones(x.dim(1)?, x.dtype(), x.device())?;
                composed(x, Some((weight, bias)), None, Some(&phi), &self.spec)
            }
            Contender::LayerNorm => self.layer_norm.forward(x),
            Contender::LayerNormFused => candle_nn::ops::layer_norm(x, weight, bias, eps),
            Contender::LayerNormSlow => candle_nn::ops::layer_norm_slow(x, weight, bias, eps),
            Contender::RmsNorm => self.rms_norm.forward(x),
            Contender::RmsNormFused => candle_nn::ops::rms_norm(x, weight, eps),
            Contender::RmsNormSlow => candle_nn::ops::rms_norm_slow(x, weight, eps),
            Contender::BatchNorm => self.batch_norm.forward_t(x, train),
            Contender::AutogradAlone => {
                let grads = [x, weight, bias].map(Tensor::detach);
                x.apply_op3(weight, bias, Ready(grads))
            }
            Contender::Copy => x.copy(),
            Contender::Residual
            | Contender::ResidualApart
            | Contender::LayerNormResidual
            | Contender::RmsNormResidual => unreachable!("they have a residual"),
        }
    }

    /// The time of `iterations` passes, dropping their results included.
    fn time(&self, iterations: u64) -> Result<Duration> {
        match self.place {
            #[cfg(feature = "cuda")]
            Place::CudaGraph => return self.time_replays(iterations),
            Place::Threads(_) if self.contender == Contender::Copy => {
                return Ok(copies::time(self.bytes(), iterations));
            }
            _ => {}
        }
        let device = self.xs[0].device();
        let iterations = iterations as usize;
        let batch = self.calls_per_wait(iterations);
        let mut total = Duration::ZERO;
        for first in (0..iterations).step_by(batch) {
            let calls = first..iterations.min(first + batch);
            let graphs = self.graphs(calls.clone())?;
            device.synchronize()?;
            let start = Instant::now();
            self.run(calls, &graphs)?;
            device.synchronize()?;
            total += start.elapsed();
        }
        Ok(total)
    }

    /// The graphs that these calls of a backward begin with. Building them is not timed.
    fn graphs(&self, calls: Range<usize>) -> Result<Vec<Tensor>> {
        match self.pass {
            Pass::Backward => calls.map(|call| self.forward(call, true)).collect(),
            _ => Ok(vec![]),
        }
    }

    fn run(&self, calls: Range<usize>, graphs: &[Tensor]) -> Result<()> {
        match self.pass {
            Pass::ForwardTrain | Pass::ForwardEval => {
                for call in calls {
                    black_box(self.forward(call, self.pass == Pass::ForwardTrain)?);
                }
            }
            Pass::Backward => {
                for y in graphs {
                    black_box(y.backward()?);
                }
            }
            Pass::TrainStep => {
                for call in calls {
                    black_box(self.forward(call, true)?.backward()?);
                }
            }
        }
        Ok(())
    }

    /// The time of `iterations` passes as a part of recorded ones.
    #[cfg(feature = "cuda")]
    fn time_replays(&self, iterations: u64) -> Result<Duration> {
        if self.recording.get().is_none() {
            let passes = self.calls_per_wait(GPU_GRAPHS);
            let graphs = self.graphs(0..passes)?;
            let calls = || self.run(0..passes, &graphs);
            let recorded = Recorded {
                recording: gpu::Recording::new(self.xs[0].device(), calls)?,
                passes,
                _graphs: graphs,
            };
            self.recording.get_or_init(|| recorded);
        }
        let recorded = self.recording.get().expect("what was just recorded");
        let replays = (iterations as usize).div_ceil(recorded.passes);
        let time = recorded.recording.time(replays)?;
        Ok(time.mul_f64(iterations as f64 / (replays * recorded.passes) as f64))
    }

    /// Calls from one wait for the device to the next.
    fn calls_per_wait(&self, iterations: usize) -> usize {
        match (self.place, self.pass) {
            (Place::CudaGraph, _) | (Place::Cuda, Pass::Backward) => {
                (GPU_GRAPH_BYTES / self.bytes()).clamp(1, GPU_GRAPHS)
            }
            (Place::Cuda, _) => iterations,
            _ => 1,
        }
    }

    /// Bytes of an input, and of an output.
    fn bytes(&self) -> usize {
        self.xs[0].elem_count() * self.xs[0].dtype().size_in_bytes()
    }
}

fn compare(what: &str, got: &Tensor, expected: &Tensor, roundings: f32) -> Result<()> {
    let unit = match got.dtype() {
        DType::BF16 => 2f32.powi(-8),
        DType::F16 => 2f32.powi(-11),
        // Of PN-V's sums over rows, each form has an order of its own.
        _ => 2f32.powi(-16),
    };
    let bound = roundings * unit * expected.abs()?.max_all()?.to_scalar::<f32>()?;
    let error = (got.to_dtype(DType::F32)? - expected)?.abs()?;
    // A maximum of candle's may pass over a NaN; a comparison does not.
    let within = error.le(bound)?.to_dtype(DType::F32)?;
    if within.min_all()?.to_scalar::<f32>()? == 1. {
        return Ok(());
    }
    let worst = error.max_all()?.to_scalar::<f32>()?;
    candle::bail!("{what} is wrong by {worst}, more than {bound}: nothing to time")
}

fn bench(criterion: &mut Criterion, case: Case) {
    let Case {
        place,
        dtype,
        shape: (rows, cols),
        ..
    } = case;
    let pool = place.pool();
    // Made for the first sample of a benchmark, if it is run at all.
    let inputs = OnceLock::new();
    for (pass, contender) in case.benchmarks() {
        let mut group = criterion.benchmark_group(pass.name());
        let bytes = pass.bytes_moved(contender.has_residual(), rows, cols, dtype);
        group.throughput(Throughput::Bytes(bytes));
        let id = format!(
            "{}/{}/{rows}x{cols}/{}",
            contender.name(),
            dtype.as_str(),
            place.name()
        );
        let mut arena = None;
        group.bench_function(id, |bencher| {
            let mut sample = || {
                let arena = arena.get_or_insert_with(|| {
                    let inputs = inputs.get_or_init(|| Inputs::new(case).unwrap());
                    Arena::new(pass, contender, inputs).unwrap()
                });
                bencher.iter_custom(|iterations| arena.time(iterations).unwrap());
            };
            match &pool {
                Some(pool) => pool.install(sample),
                None => sample(),
            }
        });
        group.finish();
    }
}

fn main() {
    threads::set_threads();
    unused::warn_of_unused(true);
    let has = |flag: &str| std::env::args().any(|arg| arg == flag);
    let set = Set::chosen(has("--test"));
    let cases = set.cases(has("--test"));
    let count: usize = cases.iter().map(|case| case.benchmarks().len()).sum();
    if has("--test") {
        eprintln!("{count} benchmarks without a filter, once each");
    } else if !has("--list") {
        let each = set.seconds_each();
        let minutes = count as f64 * each / 60.;
        eprintln!("{count} benchmarks without a filter, {each} s each: {minutes:.0} minutes");
    }
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(WARM_UP)
        .measurement_time(MEASUREMENT)
        .configure_from_args();
    for case in cases {
        bench(&mut criterion, case);
    }
    criterion.final_summary();
}
