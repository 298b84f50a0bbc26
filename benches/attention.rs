//! The softmax and the rotary embeddings of an attention, with a backward, beside candle_nn's.
//!
//! ```text
//! MIMALLOC_PURGE_DELAY=-1 cargo bench --bench attention       # 3 minutes
//! cargo bench --bench attention -- --test                     # each once, of short texts
//! cargo bench --features cuda --bench attention -- '/cuda$'   # on a GPU
//! ```
//!
//! 8 texts of 512 tokens, and 16 heads of 64 channels: scores are `[8, 16, 512, 512]`, queries
//! `[8, 16, 512, 64]`.
//!
//! Ids are `pass/contender/function/dtype/place`. `attention_forward` is a forward of variables, and
//! `attention_step` a forward and `Tensor::backward`. Throughput counts the bytes that must move: two
//! arrays of the input's size in a forward, and five in a step.
//!
//! - `ours`: `ops::softmax_last_dim` and `ops::rope` of this crate.
//! - `fused`: candle_nn's functions of these names, which record no backward.
//! - `slow`: candle_nn's `ops::softmax` and `rotary_emb::rope_slow`.

#[path = "common/places.rs"]
mod places;

use candle::{D, DType, Device, Result, Tensor, Var};
use candle_nn::rotary_emb;
use candle_powernorm::ops;
use criterion::{Criterion, Throughput};
use places::Place;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// As in `power_norm.rs`: glibc's allocator would give large blocks back.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BATCH: usize = 8;
const HEADS: usize = 16;
const WIDTH: usize = 64;
const TIME: usize = 512;
const TIME_OF_A_TEST: usize = 8;

#[derive(Clone, Copy, PartialEq)]
enum Contender {
    Ours,
    Fused,
    Slow,
}

impl Contender {
    const ALL: [(&'static str, Self); 3] = [
        ("ours", Self::Ours),
        ("fused", Self::Fused),
        ("slow", Self::Slow),
    ];
}

#[derive(Clone, Copy)]
enum Function {
    Softmax,
    Rope,
}

/// The input of a function.
struct Arena {
    function: Function,
    xs: Var,
    /// A row for each position.
    cos: Tensor,
    sin: Tensor,
}

impl Arena {
    fn new(function: Function, time: usize, dtype: DType, device: &Device) -> Result<Self> {
        let width = match function {
            Function::Softmax => time,
            Function::Rope => WIDTH,
        };
        let xs = Tensor::randn(0f32, 1., (BATCH, HEADS, time, width), device)?;
        let angles = Tensor::rand(0f32, 3., (time, WIDTH / 2), device)?;
        let arena = Self {
            function,
            xs: Var::from_tensor(&xs.to_dtype(dtype)?)?,
            cos: angles.cos()?.to_dtype(dtype)?,
            sin: angles.sin()?.to_dtype(dtype)?,
        };
        arena.check()?;
        Ok(arena)
    }

    fn forward(&self, contender: Contender) -> Result<Tensor> {
        let Self { xs, cos, sin, .. } = self;
        match (self.function, contender) {
            (Function::Softmax, Contender::Ours) => ops::softmax_last_dim(xs),
            (Function::Softmax, Contender::Fused) => candle_nn::ops::softmax_last_dim(xs),
            (Function::Softmax, Contender::Slow) => candle_nn::ops::softmax(xs, D::Minus1),
            (Function::Rope, Contender::Ours) => ops::rope(xs, cos, sin),
            (Function::Rope, Contender::Fused) => rotary_emb::rope(xs, cos, sin),
            (Function::Rope, Contender::Slow) => rotary_emb::rope_slow(xs, cos, sin),
        }
    }

    /// All contenders compute the same up to rounding. If not, their speed means nothing.
    fn check(&self) -> Result<()> {
        let expected = self.forward(Contender::Slow)?.to_dtype(DType::F32)?;
        for (name, contender) in Contender::ALL {
            let got = self.forward(contender)?.to_dtype(DType::F32)?;
            let error = (got - &expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
            // Two roundings of values up to 8, in bf16.
            if error > 0.0625 {
                candle::bail!("{name} is off by {error}: nothing to time")
            }
        }
        Ok(())
    }

    /// The time of `iterations` passes, dropping their results included.
    fn time(&self, contender: Contender, step: bool, iterations: u64) -> Result<Duration> {
        let device = self.xs.device();
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..iterations {
            let y = self.forward(contender)?;
            if step {
                black_box(y.backward()?);
            }
        }
        device.synchronize()?;
        Ok(start.elapsed())
    }

    fn bytes(&self) -> usize {
        self.xs.elem_count() * self.xs.dtype().size_in_bytes()
    }
}

fn bench(criterion: &mut Criterion, is_test: bool) -> Result<()> {
    let time = if is_test { TIME_OF_A_TEST } else { TIME };
    let functions = [("softmax", Function::Softmax), ("rope", Function::Rope)];
    for place in Place::all() {
        for dtype in [DType::F32, DType::BF16] {
            for (function_name, function) in functions {
                let arena = Arena::new(function, time, dtype, &place.device)?;
                for (pass, arrays) in [("attention_forward", 2), ("attention_step", 5)] {
                    for (name, contender) in Contender::ALL {
                        let step = pass == "attention_step";
                        if step && contender == Contender::Fused {
                            continue;
                        }
                        let id =
                            format!("{name}/{function_name}/{}/{}", dtype.as_str(), place.name);
                        let mut group = criterion.benchmark_group(pass);
                        group.throughput(Throughput::Bytes((arrays * arena.bytes()) as u64));
                        group.bench_function(id, |bencher| {
                            let passes = |n| arena.time(contender, step, n).unwrap();
                            place.run(bencher, passes);
                        });
                        group.finish();
                    }
                }
            }
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    places::main(bench)
}
