//! The cost of a normalization in a model: one transformer block with this crate's layers, with
//! candle's LayerNorm, and with no normalization at all, and an inference with four such blocks.
//!
//! ```text
//! MIMALLOC_PURGE_DELAY=-1 cargo bench --bench block     # one block
//! CANDLE_POWERNORM_BENCH=full cargo bench --bench block # inferences too, as below
//! cargo bench --bench block -- --test                   # each of both once, in short contexts
//! ```
//!
//! Ids are `pass/contender/dtype/rowsxcols/place`, as in `power_norm.rs`. `block_train` is a
//! forward and `Tensor::backward` to all parameters and the input. `block_evaluate` is a forward.
//! Throughput counts tokens. `none` is the block without its two normalizations: what others take
//! longer than it is theirs.
//!
//! `layer_norm` and `rms_norm` are this crate's. candle's fused LayerNorm records no backward, so
//! its model that trains has `layer_norm_slow`.
//!
//! `decode` is an inference of one token for each text of a batch, whose keys and values of 511
//! earlier tokens are kept. Its ids have the batch in place of the rows. `prompt` reads a text of
//! 512 tokens. Both have four blocks of frozen weights, and candle's fused softmax. There `none` is
//! also what folding leaves of layers without group scaling and bias. For ratios of rates, run it
//! several times with `--save-baseline`, and then
//! `python3 benches/table.py --runs .. --against layer_norm_fused`.
//!
//! `softgpu/run cargo test --features cuda --bench block -- launches` counts the kernels that a
//! decoded token launches on a GPU.

#[cfg(feature = "cuda")]
#[path = "../tests/common/softgpu.rs"]
mod softgpu;
#[path = "common/threads.rs"]
mod threads;
#[path = "common/unused.rs"]
mod unused;

use candle::{D, DType, Device, Module, Result, Tensor, Var, bail};
use candle_nn::{Activation, Linear, VarBuilder, VarMap, linear_no_bias, ops};
use candle_powernorm::{PowerNorm, PowerNormConfig, layer_norm, power_norm, rms_norm};
use criterion::{Criterion, Throughput, criterion_group};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::hint::black_box;
use std::time::Duration;

/// As in `power_norm.rs`: glibc's allocator would give large blocks back.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BATCH: usize = 8;
const TIME: usize = 128;
const WIDTH: usize = 512;
/// Channels of a head.
const HEAD: usize = 64;
const EPS: f64 = 1e-5;

/// Of an inference.
const BLOCKS: usize = 4;
const WIDTHS: [usize; 3] = [128, 512, 1024];
const BATCHES: [usize; 2] = [1, 16];
const CONTEXT: usize = 512;
const CONTEXT_OF_A_TEST: usize = 32;

type Norm = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

/// Keys and values of all tokens of a context. A forward replaces the last of them by its own.
struct Cache {
    keys: Tensor,
    values: Tensor,
    /// −∞ where a token would see a later one; `None` for the last token by itself.
    mask: Option<Tensor>,
}

impl Cache {
    /// For `batch` texts of `context` tokens, of which a forward reads the last `time`.
    fn new(
        batch: usize,
        context: usize,
        time: usize,
        width: usize,
        of: &VarBuilder,
    ) -> Result<Self> {
        let (dtype, device) = (of.dtype(), of.device());
        let shape = (batch, width / HEAD, context, HEAD);
        let kept = || Tensor::randn(0f32, 1., shape, device)?.to_dtype(dtype);
        let mask = || {
            let later = Tensor::tril2(time, DType::U8, device)?.eq(0u8)?;
            let hidden = Tensor::new(f32::NEG_INFINITY, device)?.broadcast_as((time, time))?;
            later
                .where_cond(&hidden, &hidden.zeros_like()?)?
                .to_dtype(dtype)
        };
        Ok(Self {
            keys: kept()?,
            values: kept()?,
            mask: (time > 1).then(mask).transpose()?,
        })
    }

    /// Replaces the last of `all`, and returns all.
    fn replace(all: &Tensor, last: &Tensor) -> Result<Tensor> {
        all.slice_set(last, 2, all.dim(2)? - last.dim(2)?)?;
        Ok(all.clone())
    }

    /// The weights of the heads' values.
    fn weights(&self, scores: Tensor) -> Result<Tensor> {
        ops::softmax_last_dim(&match &self.mask {
            Some(mask) => scores.broadcast_add(mask)?,
            None => scores,
        })
    }
}

/// Attention and two linear layers, each after a normalization and added to what came in.
struct Block {
    norms: [Norm; 2],
    query_key_value: Linear,
    project: Linear,
    expand: Linear,
    contract: Linear,
}

impl Block {
    fn new(
        width: usize,
        vb: VarBuilder,
        mut norm: impl FnMut(usize, VarBuilder) -> Result<Norm>,
    ) -> Result<Self> {
        let linear = |from, to, name| linear_no_bias(from, to, vb.pp(name));
        Ok(Self {
            norms: [norm(width, vb.pp("norm_1"))?, norm(width, vb.pp("norm_2"))?],
            query_key_value: linear(width, 3 * width, "query_key_value")?,
            project: linear(width, width, "project")?,
            expand: linear(width, 4 * width, "expand")?,
            contract: linear(4 * width, width, "contract")?,
        })
    }

    /// A block in evaluation whose norms are folded into the linear layers that read them.
    fn folded(width: usize, vb: VarBuilder, groups: Option<usize>) -> Result<Self> {
        let layers = [
            layer(width, vb.pp("norm_1"), groups)?,
            layer(width, vb.pp("norm_2"), groups)?,
        ];
        let mut rest = layers.iter().map(|layer| -> Norm {
            layer.mode().set_training(false);
            match layer.group_scaling() {
                Some(scaling) => Box::new(move |xs| scaling.forward(xs)),
                None => Box::new(|xs| Ok(xs.clone())),
            }
        });
        let mut block = Self::new(width, vb, |_, _| Ok(rest.next().expect("two norms")))?;
        block.query_key_value = layers[0].fold_into(&block.query_key_value)?;
        block.expand = layers[1].fold_into(&block.expand)?;
        Ok(block)
    }

    /// With a cache it is an inference.
    fn forward(&self, xs: &Tensor, cache: Option<&Cache>) -> Result<Tensor> {
        let [norm_1, norm_2] = &self.norms;
        let xs = (xs + self.attention(&norm_1(xs)?, cache)?)?;
        let hidden = self.expand.forward(&norm_2(&xs)?)?;
        &xs + self.contract.forward(&Activation::Gelu.forward(&hidden)?)?
    }

    fn attention(&self, xs: &Tensor, cache: Option<&Cache>) -> Result<Tensor> {
        let (batch, time, width) = xs.dims3()?;
        let count = width / HEAD;
        let all = self.query_key_value.forward(xs)?;
        let all = all
            .reshape((batch, time, 3 * count, HEAD))?
            .transpose(1, 2)?;
        let heads = |i| all.narrow(1, i * count, count)?.contiguous();
        let (query, mut key, mut value) = (heads(0)?, heads(1)?, heads(2)?);
        if let Some(cache) = cache {
            key = Cache::replace(&cache.keys, &key)?;
            value = Cache::replace(&cache.values, &value)?;
        }
        let scores = (query.matmul(&key.t()?)? * (HEAD as f64).powf(-0.5))?;
        let weights = match cache {
            Some(cache) => cache.weights(scores)?,
            None => ops::softmax(&scores, D::Minus1)?,
        };
        let mixed = weights.matmul(&value)?.transpose(1, 2)?;
        self.project.forward(&mixed.reshape((batch, time, width))?)
    }
}

/// The layer after its warm-up.
fn layer(width: usize, vb: VarBuilder, groups: Option<usize>) -> Result<PowerNorm> {
    let config = PowerNormConfig {
        warmup_steps: 0,
        group_scaling: groups,
        ..EPS.into()
    };
    power_norm(width, config, vb)
}

fn powernorm(width: usize, vb: VarBuilder, groups: Option<usize>, train: bool) -> Result<Norm> {
    let layer = layer(width, vb, groups)?;
    Ok(Box::new(move |xs| layer.forward_t(xs, train)))
}

fn layer_norm_slow(width: usize, vb: VarBuilder) -> Result<Norm> {
    let norm = candle_nn::layer_norm(width, EPS, vb)?;
    Ok(Box::new(move |xs| {
        let bias = norm.bias().expect("it has one");
        ops::layer_norm_slow(xs, norm.weight(), bias, EPS as f32)
    }))
}

fn layer_norm_fused(width: usize, vb: VarBuilder) -> Result<Norm> {
    let norm = candle_nn::layer_norm(width, EPS, vb)?;
    Ok(Box::new(move |xs| norm.forward(xs)))
}

fn rms_norm_fused(width: usize, vb: VarBuilder) -> Result<Norm> {
    let norm = candle_nn::rms_norm(width, EPS, vb)?;
    Ok(Box::new(move |xs| norm.forward(xs)))
}

/// This crate's.
fn layer_norm_ours(width: usize, vb: VarBuilder) -> Result<Norm> {
    let norm = layer_norm(width, EPS, vb)?;
    Ok(Box::new(move |xs| norm.forward(xs)))
}

/// This crate's.
fn rms_norm_ours(width: usize, vb: VarBuilder) -> Result<Norm> {
    let norm = rms_norm(width, EPS, vb)?;
    Ok(Box::new(move |xs| norm.forward(xs)))
}

fn none(_: usize, _: VarBuilder) -> Result<Norm> {
    Ok(Box::new(|xs| Ok(xs.clone())))
}

fn pools() -> impl Iterator<Item = (usize, ThreadPool)> {
    [1, 2].into_iter().map(|threads| {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build();
        (threads, pool.expect("a thread pool"))
    })
}

fn bench(criterion: &mut Criterion) {
    threads::set_threads();
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let block = |norm: &dyn Fn(usize, VarBuilder) -> Result<Norm>| {
        Block::new(WIDTH, vb.clone(), norm).unwrap()
    };
    let folded = |groups| Block::folded(WIDTH, vb.clone(), groups).unwrap();
    let trained = [
        (
            "power_norm",
            block(&|width, vb| powernorm(width, vb, Some(1), true)),
        ),
        ("layer_norm", block(&layer_norm_ours)),
        ("rms_norm", block(&rms_norm_ours)),
        ("layer_norm_slow", block(&layer_norm_slow)),
        ("none", block(&none)),
    ];
    let evaluated = [
        (
            "power_norm",
            block(&|width, vb| powernorm(width, vb, Some(1), false)),
        ),
        ("power_norm_folded", folded(Some(1))),
        ("power_norm_g0_folded", folded(None)),
        ("layer_norm", block(&layer_norm_ours)),
        ("rms_norm", block(&rms_norm_ours)),
        ("layer_norm_fused", block(&layer_norm_fused)),
        ("none", block(&none)),
    ];
    let xs = Tensor::randn(0f32, 1., (BATCH, TIME, WIDTH), &Device::Cpu).unwrap();
    let xs = Var::from_tensor(&xs).unwrap();
    for (threads, pool) in pools() {
        let mut run = |pass: &str, name: &str, call: &(dyn Fn() -> Result<()> + Sync)| {
            let mut group = criterion.benchmark_group(pass);
            group.throughput(Throughput::Elements((BATCH * TIME) as u64));
            group.bench_function(
                format!("{name}/f32/{}x{WIDTH}/t{threads}", BATCH * TIME),
                |bencher| pool.install(|| bencher.iter(|| call().unwrap())),
            );
            group.finish();
        };
        for (name, block) in &trained {
            run("block_train", name, &|| {
                black_box(block.forward(&xs, None)?.backward()?);
                Ok(())
            });
        }
        for (name, block) in &evaluated {
            let xs = xs.detach();
            run("block_evaluate", name, &|| {
                black_box(block.forward(&xs, None)?);
                Ok(())
            });
        }
    }
}

type NewBlock = fn(usize, VarBuilder) -> Result<Block>;
type Contender = (&'static str, NewBlock);

const CONTENDERS: [Contender; 7] = [
    ("layer_norm_fused", |width, vb| {
        Block::new(width, vb, layer_norm_fused)
    }),
    ("rms_norm_fused", RMS_NORM_FUSED),
    ("rms_norm", RMS_NORM),
    ("power_norm", EVALUATED),
    ("power_norm_folded", FOLDED),
    ("power_norm_g0_folded", FOLDED_WITHOUT_GROUPS),
    ("none", |width, vb| Block::new(width, vb, none)),
];

const RMS_NORM_FUSED: NewBlock = |width, vb| Block::new(width, vb, rms_norm_fused);
const RMS_NORM: NewBlock = |width, vb| Block::new(width, vb, rms_norm_ours);
const EVALUATED: NewBlock =
    |width, vb| Block::new(width, vb, |width, vb| powernorm(width, vb, Some(1), false));
const EVALUATED_WITHOUT_GROUPS: NewBlock =
    |width, vb| Block::new(width, vb, |width, vb| powernorm(width, vb, None, false));
const FOLDED: NewBlock = |width, vb| Block::folded(width, vb, Some(1));
const FOLDED_WITHOUT_GROUPS: NewBlock = |width, vb| Block::folded(width, vb, None);

/// Of candle's fresh weights. Without a normalization between blocks larger ones grow, until a
/// softmax picks one value, and a rounding may decide which.
const WEIGHTS: f64 = 0.3;

/// The tensors of all contenders. Frozen, so that no forward keeps anything for a backward.
fn frozen(width: usize, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, dtype, device);
    for i in 0..BLOCKS {
        EVALUATED(width, vb.pp(i))?;
    }
    let vars = varmap.data().lock().unwrap();
    let tensors = vars.iter().map(|(name, var)| {
        let tensor = match (name.ends_with("running_phi"), var.rank()) {
            (true, _) => Tensor::rand(0.5f32, 2., width, device)?,
            (false, 2) => (var.as_detached_tensor() * WEIGHTS)?,
            (false, _) => var.as_detached_tensor(),
        };
        Ok((name.clone(), tensor))
    });
    let tensors = tensors.collect::<Result<_>>()?;
    Ok(VarBuilder::from_tensors(tensors, dtype, device))
}

/// An inference of all blocks on `batch` texts, each of which reads `time` tokens.
struct Inference {
    pass: &'static str,
    id: String,
    xs: Tensor,
    caches: Vec<Cache>,
}

impl Inference {
    /// All inferences of a model of these tensors.
    fn all(width: usize, vb: &VarBuilder, context: usize) -> Result<Vec<Self>> {
        let new = |pass, batch: usize, time, rows| {
            let xs = Tensor::randn(0f32, 1., (batch, time, width), vb.device())?;
            let cache = |_| Cache::new(batch, context, time, width, vb);
            Ok(Self {
                pass,
                id: format!("{}/{rows}x{width}", vb.dtype().as_str()),
                xs: xs.to_dtype(vb.dtype())?,
                caches: (0..BLOCKS).map(cache).collect::<Result<_>>()?,
            })
        };
        let decodings = BATCHES.map(|batch| new("decode", batch, 1, batch));
        let prompt = new("prompt", 1, context, CONTEXT);
        decodings.into_iter().chain([prompt]).collect()
    }

    fn tokens(&self) -> usize {
        self.xs.elem_count() / self.xs.dims()[2]
    }

    fn run(&self, blocks: &[Block]) -> Result<Tensor> {
        let mut steps = blocks.iter().zip(&self.caches);
        steps.try_fold(self.xs.clone(), |xs, (block, cache)| {
            block.forward(&xs, Some(cache))
        })
    }
}

fn blocks(width: usize, vb: &VarBuilder, new: NewBlock) -> Result<Vec<Block>> {
    (0..BLOCKS).map(|i| new(width, vb.pp(i))).collect()
}

/// Blocks that compute the same, up to rounding. If they do not, their speed means nothing.
const SAME: [[NewBlock; 2]; 3] = [
    [RMS_NORM, RMS_NORM_FUSED],
    [FOLDED, EVALUATED],
    [FOLDED_WITHOUT_GROUPS, EVALUATED_WITHOUT_GROUPS],
];

fn check() -> Result<()> {
    let width = WIDTHS[0];
    let vb = frozen(width, DType::F32, &Device::Cpu)?;
    for inference in Inference::all(width, &vb, CONTEXT_OF_A_TEST)? {
        for (i, pair) in SAME.into_iter().enumerate() {
            let [got, expected] = pair.map(|new| inference.run(&blocks(width, &vb, new)?));
            let (got, expected) = (got?, expected?);
            let largest = expected.abs()?.max_all()?.to_scalar::<f32>()?;
            let within = (got - expected)?.abs()?.le(1e-3 * largest)?;
            if within.min_all()?.to_scalar::<u8>()? != 1 {
                bail!("pair {i} differs in {}: nothing to time", inference.pass);
            }
        }
    }
    Ok(())
}

fn bench_inference(criterion: &mut Criterion) {
    let is_test = std::env::args().any(|arg| arg == "--test");
    if !is_test && std::env::var("CANDLE_POWERNORM_BENCH").as_deref() != Ok("full") {
        return;
    }
    threads::set_threads();
    check().unwrap();
    let context = if is_test { CONTEXT_OF_A_TEST } else { CONTEXT };
    for width in WIDTHS {
        for dtype in [DType::F32, DType::BF16] {
            let vb = frozen(width, dtype, &Device::Cpu).unwrap();
            let inferences = Inference::all(width, &vb, context).unwrap();
            for (name, new) in CONTENDERS {
                let blocks = blocks(width, &vb, new).unwrap();
                for (threads, pool) in pools() {
                    for inference in &inferences {
                        let mut group = criterion.benchmark_group(inference.pass);
                        group.throughput(Throughput::Elements(inference.tokens() as u64));
                        let id = format!("{name}/{}/t{threads}", inference.id);
                        group.bench_function(id, |bencher| {
                            pool.install(|| {
                                bencher.iter(|| black_box(inference.run(&blocks).unwrap()))
                            })
                        });
                        group.finish();
                    }
                }
            }
        }
    }
}

/// Prints the kernels that a decoded token launches, by contender. softgpu multiplies matrices
/// without kernels, so these are all others.
#[cfg(feature = "cuda")]
fn count_launches() -> Result<()> {
    let softgpu = softgpu::Softgpu::find().map_err(candle::Error::msg)?;
    let width = WIDTHS[0];
    let vb = frozen(width, DType::F32, &Device::new_cuda(0)?)?;
    let inferences = Inference::all(width, &vb, CONTEXT_OF_A_TEST)?;
    for (name, new) in CONTENDERS {
        let blocks = blocks(width, &vb, new)?;
        let (decoded, launches) =
            softgpu.counting(Some(c"cuLaunchKernel"), || inferences[0].run(&blocks));
        decoded?;
        println!("{name}: {launches} launches");
    }
    Ok(())
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    targets = bench, bench_inference
}

fn main() {
    #[cfg(feature = "cuda")]
    if std::env::args().any(|arg| arg == "launches") {
        return count_launches().unwrap();
    }
    unused::warn_of_unused(true);
    benches();
    Criterion::default().configure_from_args().final_summary();
}
