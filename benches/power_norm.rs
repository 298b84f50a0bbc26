//! Throughput of the layer's passes beside candle's own normalizations and a plain copy.
//!
//! Ids are `pass/contender/dtype/rowsxcols/threads`; `cargo bench -- 'forward_train/.*/f32/4096x512/t1'`
//! runs some of them. Throughput counts the bytes that the pass must move, each input read once and
//! each output written once, for every contender alike.
//!
//! Passes: `forward_train` and `forward_eval` are one call; `backward` is `Tensor::backward` of a graph
//! that holds the layer alone; `train_step_through_autograd` is a forward and that backward. candle's
//! autograd makes passes of its own around any op: contender `autograd_alone` is an op that computes
//! nothing, and shows what they cost.

#[path = "../tests/common/reference.rs"]
mod reference;

use candle::{CpuStorage, CustomOp3, DType, Device, Layout, ModuleT, Result, Shape, Tensor, Var};
use candle_nn::{BatchNorm, BatchNormConfig, VarBuilder, VarMap};
use candle_powernorm::{power_norm, PowerNorm, PowerNormConfig};
use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use rayon::prelude::*;
use reference::{composed, Recipe, Spec};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Rows and channels: a small batch, a transformer's, a wide one, one beyond every cache.
const SHAPES: [(usize, usize); 4] = [(256, 512), (4096, 512), (4096, 4096), (32768, 1024)];
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const THREADS: [usize; 2] = [1, 2];
const EPS: f64 = 1e-5;

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

    /// The bytes a pass must move: x and y forward; x, dy and dx backward. What a channel needs is not
    /// counted.
    fn bytes_moved(self, rows: usize, cols: usize, dtype: DType) -> u64 {
        let tensors = match self {
            Self::ForwardTrain | Self::ForwardEval => 2,
            Self::Backward => 3,
            Self::TrainStep => 5,
        };
        (tensors * rows * cols * dtype.size_in_bytes()) as u64
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Contender {
    /// The layer after its warm-up, with this many groups.
    PowerNorm(Option<usize>),
    /// The layer in candle's own operations.
    Composed,
    LayerNormFused,
    LayerNormSlow,
    RmsNormFused,
    BatchNorm,
    /// An op whose forward and backward only hand out what is there.
    AutogradAlone,
    /// The rows copied into memory that is already mapped.
    Copy,
}

impl Contender {
    const ALL: [Self; 10] = [
        Self::PowerNorm(None),
        Self::PowerNorm(Some(1)),
        Self::PowerNorm(Some(8)),
        Self::Composed,
        Self::LayerNormFused,
        Self::LayerNormSlow,
        Self::RmsNormFused,
        Self::BatchNorm,
        Self::AutogradAlone,
        Self::Copy,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::PowerNorm(None) => "power_norm_g0",
            Self::PowerNorm(Some(1)) => "power_norm_g1",
            Self::PowerNorm(Some(_)) => "power_norm_g8",
            Self::Composed => "composed",
            Self::LayerNormFused => "layer_norm_fused",
            Self::LayerNormSlow => "layer_norm_slow",
            Self::RmsNormFused => "rms_norm_fused",
            Self::BatchNorm => "batch_norm",
            Self::AutogradAlone => "autograd_alone",
            Self::Copy => "copy",
        }
    }

    /// Whether the contender can do a pass at all: candle's fused norms record no backward.
    fn takes_part(self, pass: Pass) -> bool {
        match self {
            Self::PowerNorm(_) | Self::Composed | Self::BatchNorm => true,
            Self::LayerNormFused | Self::RmsNormFused | Self::Copy => {
                matches!(pass, Pass::ForwardTrain | Pass::ForwardEval)
            }
            Self::LayerNormSlow => pass != Pass::ForwardEval,
            Self::AutogradAlone => matches!(pass, Pass::Backward | Pass::TrainStep),
        }
    }
}

/// An op that computes nothing: its output is its input, its gradients are ready.
struct Nothing {
    grads: [Tensor; 3],
}

impl CustomOp3 for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((x.clone(), layout.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, dweight, dbias] = self.grads.clone();
        Ok((Some(dx), Some(dweight), Some(dbias)))
    }
}

/// A contender's data.
struct Arena {
    contender: Contender,
    x: Var,
    weight: Var,
    bias: Var,
    power_norm: PowerNorm,
    batch_norm: BatchNorm,
    spec: Spec,
}

impl Arena {
    fn new(contender: Contender, rows: usize, cols: usize, dtype: DType) -> Result<Self> {
        let device = &Device::Cpu;
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, dtype, device);
        let groups = match contender {
            Contender::PowerNorm(groups) => groups,
            _ => Some(1),
        };
        let config = PowerNormConfig {
            warmup_steps: 0,
            group_scaling: groups,
            ..EPS.into()
        };
        let arena = Self {
            contender,
            x: Var::from_tensor(&Tensor::randn(0f32, 1., (rows, cols), device)?.to_dtype(dtype)?)?,
            weight: Var::ones(cols, dtype, device)?,
            bias: Var::zeros(cols, dtype, device)?,
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
                groups,
                batch_statistics: false,
                recipe: Recipe::Paper,
            },
        };
        if let Contender::PowerNorm(_) = contender {
            arena.check()?;
        }
        Ok(arena)
    }

    /// The layer's output must be that of the composed form, or its speed means nothing.
    fn check(&self) -> Result<()> {
        let x = self.x.to_dtype(DType::F32)?;
        let phi = self.power_norm.running_phi()?;
        let expected = composed(&x, None, None, Some(&phi), &self.spec)?;
        let got = self
            .power_norm
            .forward_t(&self.x, false)?
            .to_dtype(DType::F32)?;
        let worst = (got - &expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        let unit = match self.x.dtype() {
            DType::BF16 => 2f32.powi(-8),
            DType::F16 => 2f32.powi(-11),
            _ => 2f32.powi(-20),
        };
        let bound = unit * expected.abs()?.max_all()?.to_scalar::<f32>()?;
        if worst <= bound {
            return Ok(());
        }
        candle::bail!("wrong by {worst}, more than {bound}: nothing to time")
    }

    fn forward(&self, train: bool) -> Result<Tensor> {
        let (x, weight, bias) = (self.x.as_tensor(), &self.weight, &self.bias);
        let eps = EPS as f32;
        match self.contender {
            Contender::PowerNorm(_) => self.power_norm.forward_t(x, train),
            Contender::Composed => {
                let phi = Tensor::ones(x.dim(1)?, x.dtype(), x.device())?;
                composed(x, Some((weight, bias)), None, Some(&phi), &self.spec)
            }
            Contender::LayerNormFused => candle_nn::ops::layer_norm(x, weight, bias, eps),
            Contender::LayerNormSlow => candle_nn::ops::layer_norm_slow(x, weight, bias, eps),
            Contender::RmsNormFused => candle_nn::ops::rms_norm(x, weight, eps),
            Contender::BatchNorm => self.batch_norm.forward_t(x, train),
            Contender::AutogradAlone => {
                let grads = [x, weight, bias].map(Tensor::detach);
                x.apply_op3(weight, bias, Nothing { grads })
            }
            Contender::Copy => x.copy(),
        }
    }

    /// The time of `iterations` passes, dropping their results included.
    fn time(&self, pass: Pass, iterations: u64) -> Result<Duration> {
        let mut total = Duration::ZERO;
        for _ in 0..iterations {
            match pass {
                Pass::ForwardTrain | Pass::ForwardEval => {
                    let start = Instant::now();
                    black_box(self.forward(pass == Pass::ForwardTrain)?);
                    total += start.elapsed();
                }
                Pass::Backward => {
                    let y = self.forward(true)?;
                    let start = Instant::now();
                    black_box(y.backward()?);
                    total += start.elapsed();
                }
                Pass::TrainStep => {
                    let start = Instant::now();
                    black_box(self.forward(true)?.backward()?);
                    total += start.elapsed();
                }
            }
        }
        Ok(total)
    }

    /// The time of `iterations` copies into memory that is already mapped.
    fn time_copies(&self, iterations: u64) -> Result<Duration> {
        const CHUNK: usize = 1 << 18;
        let bytes = self.x.elem_count() * self.x.dtype().size_in_bytes();
        let source = vec![1u8; bytes];
        let mut target = vec![2u8; bytes];
        let start = Instant::now();
        for _ in 0..iterations {
            target
                .par_chunks_mut(CHUNK)
                .zip(source.par_chunks(CHUNK))
                .for_each(|(target, source)| target.copy_from_slice(source));
            black_box(&target);
        }
        Ok(start.elapsed())
    }
}

fn bench(criterion: &mut Criterion) {
    for pass in Pass::ALL {
        let mut group = criterion.benchmark_group(pass.name());
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        for threads in THREADS {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let pool = pool.expect("a thread pool");
            for dtype in DTYPES {
                for (rows, cols) in SHAPES {
                    group.throughput(Throughput::Bytes(pass.bytes_moved(rows, cols, dtype)));
                    for contender in Contender::ALL {
                        if !contender.takes_part(pass) {
                            continue;
                        }
                        let id = format!(
                            "{}/{}/{rows}x{cols}/t{threads}",
                            contender.name(),
                            dtype.as_str()
                        );
                        group.bench_function(id, |bencher| {
                            pool.install(|| {
                                let arena = Arena::new(contender, rows, cols, dtype).unwrap();
                                bencher.iter_custom(|iterations| {
                                    match contender {
                                        Contender::Copy => arena.time_copies(iterations),
                                        _ => arena.time(pass, iterations),
                                    }
                                    .unwrap()
                                });
                            });
                        });
                    }
                }
            }
        }
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
