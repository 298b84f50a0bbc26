//! Activations of a feed-forward layer: this crate's GELUs beside candle's, and candle's others.
//!
//! ```text
//! MIMALLOC_PURGE_DELAY=-1 cargo bench --bench activation       # a minute
//! cargo bench --bench activation -- --test                     # each once, of a small layer
//! cargo bench --features cuda --bench activation -- '/cuda$'   # on a GPU
//! ```
//!
//! 1024 tokens of 1024 features, as the hidden layer of a model of 256 channels has.
//!
//! Ids are `pass/contender/activation/dtype/place`. `activation_forward` is a forward of a variable, and
//! `activation_step` a forward and `Tensor::backward`. Throughput counts the bytes that must move:
//! two arrays of the input's size in a forward, and five in a step.
//!
//! - `ours`: `ops::gelu` and `ops::gelu_erf` of this crate.
//! - `candle`: `Tensor::gelu`, `gelu_erf`, `silu` and `relu`.

#[path = "common/places.rs"]
mod places;

use candle::{DType, Device, Result, Tensor, Var};
use candle_powernorm::ops;
use criterion::{Criterion, Throughput};
use places::Place;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// As in `power_norm.rs`: glibc's allocator would give large blocks back.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const TOKENS: usize = 1024;
const TOKENS_OF_A_TEST: usize = 3;
const FEATURES: usize = 1024;

type Forward = fn(&Tensor) -> Result<Tensor>;

const CONTENDERS: [(&str, Forward); 6] = [
    ("ours/gelu", ops::gelu),
    ("candle/gelu", Tensor::gelu),
    ("ours/gelu_erf", ops::gelu_erf),
    ("candle/gelu_erf", Tensor::gelu_erf),
    ("candle/silu", Tensor::silu),
    ("candle/relu", Tensor::relu),
];

fn input(tokens: usize, dtype: DType, device: &Device) -> Result<Var> {
    let xs = Tensor::randn(0f32, 2., (tokens, FEATURES), device)?.to_dtype(dtype)?;
    // This crate's compute what candle's do, up to rounding. If not, their speed means nothing.
    for (ours, candle) in [
        (ops::gelu as Forward, Tensor::gelu as Forward),
        (ops::gelu_erf, Tensor::gelu_erf),
    ] {
        let [ours, candle] = [ours, candle].map(|gelu| gelu(&xs)?.to_dtype(DType::F32));
        let error = (ours? - candle?)?.abs()?.max_all()?.to_scalar::<f32>()?;
        // A few roundings of values up to 10, in bf16.
        if error > 0.125 {
            candle::bail!("a difference of {error}: nothing to time")
        }
    }
    Var::from_tensor(&xs)
}

/// The time of `iterations` passes, dropping their results included.
fn time(forward: Forward, xs: &Tensor, step: bool, iterations: u64) -> Result<Duration> {
    let device = xs.device();
    device.synchronize()?;
    let start = Instant::now();
    for _ in 0..iterations {
        let y = forward(xs)?;
        if step {
            black_box(y.backward()?);
        }
    }
    device.synchronize()?;
    Ok(start.elapsed())
}

fn bench(criterion: &mut Criterion, is_test: bool) -> Result<()> {
    let tokens = if is_test { TOKENS_OF_A_TEST } else { TOKENS };
    for place in Place::all() {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let xs = input(tokens, dtype, &place.device)?;
            let bytes = xs.elem_count() * dtype.size_in_bytes();
            for (pass, step, arrays) in [
                ("activation_forward", false, 2),
                ("activation_step", true, 5),
            ] {
                for (name, forward) in CONTENDERS {
                    let id = format!("{name}/{}/{}", dtype.as_str(), place.name);
                    let mut group = criterion.benchmark_group(pass);
                    group.throughput(Throughput::Bytes((arrays * bytes) as u64));
                    group.bench_function(id, |bencher| {
                        place.run(bencher, |n| time(forward, &xs, step, n).unwrap());
                    });
                    group.finish();
                }
            }
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    places::main(bench)
}
