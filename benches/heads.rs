//! The normalization of queries and keys by head, as Qwen3, Gemma 3 and OLMo 2 have it: an RMSNorm
//! over the 64 or 128 channels of each head, of rows that lie apart in the output of a fused
//! projection.
//!
//! ```text
//! MIMALLOC_PURGE_DELAY=-1 cargo bench --bench heads     # 2 minutes
//! cargo bench --bench heads -- --test                   # each once, in short texts
//! cargo bench --features cuda --bench heads -- '/cuda$' # on a GPU
//! ```
//!
//! The projection is `[8, 512, 3 · 16 · C]` for 8 texts of 512 tokens and 16 heads, and the queries
//! are its view `[8, 16, 512, C]`, whose rows are adjacent but far from each other.
//!
//! Ids are `pass/contender/dtype/rowsxcols/place`, as in `power_norm.rs`. `heads_forward` is a
//! forward of the queries. `heads_step` is a forward and `Tensor::backward` to the projection's
//! output. Throughput counts the bytes that the norm must move: two arrays of the queries' size in
//! a forward, and five in a step.
//!
//! - `rms_norm`: this crate's layer on the view.
//! - `rms_norm_packed`: the same on queries that were copied before the clock started, and in a step
//!   are the variable, so that there is no view to go back through.
//! - `rms_norm_slow`: candle's own, in its element-wise operations, on the view.
//! - `rms_norm_fused`: candle's fused one, which records no backward and takes packed rows, so the
//!   view is copied first.
//! - `none`: in a forward, a copy of the view by candle; in a step, that and its backward. What
//!   another takes longer in a step is its own.
//! - `copy`: the queries' bytes copied into memory that is already mapped.

#[path = "common/copies.rs"]
mod copies;
#[path = "common/places.rs"]
mod places;

use candle::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::ops;
use candle_powernorm::RmsNorm;
use criterion::{Criterion, Throughput};
use places::Place;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// As in `power_norm.rs`: glibc's allocator would give large blocks back.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BATCH: usize = 8;
const HEADS: usize = 16;
const TIME: usize = 512;
const TIME_OF_A_TEST: usize = 8;
/// Channels of a head.
const WIDTHS: [usize; 2] = [64, 128];
const EPS: f64 = 1e-6;

#[derive(Clone, Copy, PartialEq)]
enum Contender {
    RmsNorm,
    RmsNormPacked,
    RmsNormSlow,
    RmsNormFused,
    None,
    Copy,
}

impl Contender {
    const ALL: [(&'static str, Self); 6] = [
        ("rms_norm", Self::RmsNorm),
        ("rms_norm_packed", Self::RmsNormPacked),
        ("rms_norm_slow", Self::RmsNormSlow),
        ("rms_norm_fused", Self::RmsNormFused),
        ("none", Self::None),
        ("copy", Self::Copy),
    ];

    fn has_backward(self) -> bool {
        !matches!(self, Self::RmsNormFused | Self::Copy)
    }
}

/// The output of a fused projection, and the norm of its queries.
struct Arena {
    projected: Var,
    /// The queries, packed.
    packed: Var,
    weight: Var,
    norm: RmsNorm,
}

impl Arena {
    fn new(time: usize, width: usize, dtype: DType, device: &Device) -> Result<Self> {
        let projected = Tensor::randn(0f32, 1., (BATCH, time, 3 * HEADS * width), device)?;
        let projected = Var::from_tensor(&projected.to_dtype(dtype)?)?;
        let weight = Var::ones(width, dtype, device)?;
        let arena = Self {
            packed: Var::from_tensor(&queries(&projected, width)?.detach())?,
            norm: RmsNorm::new(weight.as_tensor().clone(), EPS),
            projected,
            weight,
        };
        arena.check()?;
        Ok(arena)
    }

    fn width(&self) -> usize {
        self.norm.size()
    }

    fn forward(&self, contender: Contender) -> Result<Tensor> {
        let queries = || queries(&self.projected, self.width());
        match contender {
            Contender::RmsNorm => self.norm.forward(&queries()?),
            Contender::RmsNormPacked => self.norm.forward(&self.packed),
            Contender::RmsNormSlow => ops::rms_norm_slow(&queries()?, &self.weight, EPS as f32),
            Contender::RmsNormFused => {
                ops::rms_norm(&queries()?.contiguous()?, &self.weight, EPS as f32)
            }
            Contender::None => queries()?.contiguous(),
            Contender::Copy => unreachable!("a copy has a clock of its own"),
        }
    }

    /// All contenders compute the same up to rounding. If not, their speed means nothing.
    fn check(&self) -> Result<()> {
        let expected = self.forward(Contender::RmsNormSlow)?.to_dtype(DType::F32)?;
        for (name, contender) in &Contender::ALL[..4] {
            let got = self.forward(*contender)?.to_dtype(DType::F32)?;
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
        let device = self.projected.device();
        if contender == Contender::Copy && device.is_cpu() {
            return Ok(copies::time(self.bytes(), iterations));
        }
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..iterations {
            if contender == Contender::Copy {
                black_box(self.packed.as_tensor().copy()?);
                continue;
            }
            let y = self.forward(contender)?;
            if step {
                black_box(y.backward()?);
            }
        }
        device.synchronize()?;
        Ok(start.elapsed())
    }

    /// Bytes of the queries.
    fn bytes(&self) -> usize {
        self.packed.elem_count() * self.packed.dtype().size_in_bytes()
    }
}

/// The queries in the output of a projection: `[batch, heads, time, width]`.
fn queries(projected: &Tensor, width: usize) -> Result<Tensor> {
    let (batch, time, _) = projected.dims3()?;
    let heads = projected.reshape((batch, time, 3 * HEADS, width))?;
    heads.transpose(1, 2)?.narrow(1, 0, HEADS)
}

fn bench(criterion: &mut Criterion, is_test: bool) -> Result<()> {
    let time = if is_test { TIME_OF_A_TEST } else { TIME };
    for place in Place::all() {
        for dtype in [DType::F32, DType::BF16] {
            for width in WIDTHS {
                let arena = Arena::new(time, width, dtype, &place.device)?;
                for (pass, arrays) in [("heads_forward", 2), ("heads_step", 5)] {
                    for (name, contender) in Contender::ALL {
                        let step = pass == "heads_step";
                        if step && !contender.has_backward() {
                            continue;
                        }
                        let rows = BATCH * HEADS * time;
                        let id = format!("{name}/{}/{rows}x{width}/{}", dtype.as_str(), place.name);
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
