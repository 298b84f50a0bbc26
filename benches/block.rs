//! The cost of a normalization in a model: one transformer block, with the layer, with candle's
//! LayerNorm, and with no normalization at all.
//!
//! ```text
//! MIMALLOC_PURGE_DELAY=-1 cargo bench --bench block
//! ```
//!
//! Ids are `pass/contender/dtype/rowsxcols/place`, as in `power_norm.rs`. `block_train` is a
//! forward and `Tensor::backward` to all parameters and the input. `block_evaluate` is a forward.
//! Throughput counts tokens. `none` is the block without its two normalizations: what others take
//! longer than it is theirs.
//!
//! candle's fused LayerNorm records no backward, so a model that trains has `layer_norm_slow`.

use candle::{DType, Device, Module, Result, Tensor, Var, D};
use candle_nn::{linear_no_bias, ops, Activation, Linear, VarBuilder, VarMap};
use candle_powernorm::{power_norm, PowerNorm, PowerNormConfig};
use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use rayon::ThreadPoolBuilder;
use std::hint::black_box;
use std::time::Duration;

/// As in `power_norm.rs`: glibc's allocator would give large blocks back.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BATCH: usize = 8;
const TIME: usize = 128;
const WIDTH: usize = 512;
const HEADS: usize = 8;
const EPS: f64 = 1e-5;

type Norm = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

/// Attention and two linear layers, each after a normalization and added to what came in.
struct Block {
    norms: [Norm; 2],
    query_key_value: Linear,
    project: Linear,
    expand: Linear,
    contract: Linear,
}

impl Block {
    fn new(vb: VarBuilder, mut norm: impl FnMut(VarBuilder) -> Result<Norm>) -> Result<Self> {
        let linear = |from, to, name| linear_no_bias(from, to, vb.pp(name));
        Ok(Self {
            norms: [norm(vb.pp("norm_1"))?, norm(vb.pp("norm_2"))?],
            query_key_value: linear(WIDTH, 3 * WIDTH, "query_key_value")?,
            project: linear(WIDTH, WIDTH, "project")?,
            expand: linear(WIDTH, 4 * WIDTH, "expand")?,
            contract: linear(4 * WIDTH, WIDTH, "contract")?,
        })
    }

    /// A block in evaluation whose norms are folded into the linear layers that read them.
    fn folded(vb: VarBuilder, groups: Option<usize>) -> Result<Self> {
        let layers = [
            layer(vb.pp("norm_1"), groups)?,
            layer(vb.pp("norm_2"), groups)?,
        ];
        let mut rest = layers.iter().map(|layer| -> Norm {
            layer.mode().set_training(false);
            match layer.group_scaling() {
                Some(scaling) => Box::new(move |xs| scaling.forward(xs)),
                None => Box::new(|xs| Ok(xs.clone())),
            }
        });
        let mut block = Self::new(vb, |_| Ok(rest.next().expect("two norms")))?;
        block.query_key_value = layers[0].fold_into(&block.query_key_value)?;
        block.expand = layers[1].fold_into(&block.expand)?;
        Ok(block)
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let [norm_1, norm_2] = &self.norms;
        let xs = (xs + self.attention(&norm_1(xs)?)?)?;
        let hidden = self.expand.forward(&norm_2(&xs)?)?;
        &xs + self.contract.forward(&Activation::Gelu.forward(&hidden)?)?
    }

    fn attention(&self, xs: &Tensor) -> Result<Tensor> {
        let (batch, time, _) = xs.dims3()?;
        let head = WIDTH / HEADS;
        let all = self.query_key_value.forward(xs)?;
        let all = all
            .reshape((batch, time, 3 * HEADS, head))?
            .transpose(1, 2)?;
        let heads = |i| all.narrow(1, i * HEADS, HEADS)?.contiguous();
        let (query, key, value) = (heads(0)?, heads(1)?, heads(2)?);
        let scores = (query.matmul(&key.t()?)? * (head as f64).powf(-0.5))?;
        let weights = ops::softmax(&scores, D::Minus1)?;
        let mixed = weights.matmul(&value)?.transpose(1, 2)?;
        self.project.forward(&mixed.reshape((batch, time, WIDTH))?)
    }
}

/// The layer after its warm-up.
fn layer(vb: VarBuilder, groups: Option<usize>) -> Result<PowerNorm> {
    let config = PowerNormConfig {
        warmup_steps: 0,
        group_scaling: groups,
        ..EPS.into()
    };
    power_norm(WIDTH, config, vb)
}

fn powernorm(vb: VarBuilder, train: bool) -> Result<Norm> {
    let layer = layer(vb, Some(1))?;
    Ok(Box::new(move |xs| layer.forward_t(xs, train)))
}

fn layer_norm_slow(vb: VarBuilder) -> Result<Norm> {
    let norm = candle_nn::layer_norm(WIDTH, EPS, vb)?;
    Ok(Box::new(move |xs| {
        let bias = norm.bias().expect("it has one");
        ops::layer_norm_slow(xs, norm.weight(), bias, EPS as f32)
    }))
}

fn layer_norm_fused(vb: VarBuilder) -> Result<Norm> {
    let norm = candle_nn::layer_norm(WIDTH, EPS, vb)?;
    Ok(Box::new(move |xs| norm.forward(xs)))
}

fn none(_: VarBuilder) -> Result<Norm> {
    Ok(Box::new(|xs| Ok(xs.clone())))
}

fn bench(criterion: &mut Criterion) {
    // candle reads it when its pool starts.
    if std::env::var_os("CANDLE_NUM_THREADS").is_none() {
        std::env::set_var("CANDLE_NUM_THREADS", "1");
    }
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let block = |norm: &dyn Fn(VarBuilder) -> Result<Norm>| Block::new(vb.clone(), norm).unwrap();
    let trained = [
        ("power_norm", block(&|vb| powernorm(vb, true))),
        ("layer_norm_slow", block(&layer_norm_slow)),
        ("none", block(&none)),
    ];
    let evaluated = [
        ("power_norm", block(&|vb| powernorm(vb, false))),
        (
            "power_norm_folded",
            Block::folded(vb.clone(), Some(1)).unwrap(),
        ),
        (
            "power_norm_g0_folded",
            Block::folded(vb.clone(), None).unwrap(),
        ),
        ("layer_norm_fused", block(&layer_norm_fused)),
        ("none", block(&none)),
    ];
    let xs = Tensor::randn(0f32, 1., (BATCH, TIME, WIDTH), &Device::Cpu).unwrap();
    let xs = Var::from_tensor(&xs).unwrap();
    for threads in [1, 2] {
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
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
                black_box(block.forward(&xs)?.backward()?);
                Ok(())
            });
        }
        for (name, block) in &evaluated {
            let xs = xs.detach();
            run("block_evaluate", name, &|| {
                black_box(block.forward(&xs)?);
                Ok(())
            });
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    targets = bench
}
criterion_main!(benches);
