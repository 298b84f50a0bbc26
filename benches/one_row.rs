//! One row, as in decoding, and a few, beside candle's fused layers.
//!
//! ```text
//! RAYON_NUM_THREADS=1 cargo bench --bench one_row              # some seconds
//! RAYON_NUM_THREADS=1 cargo bench --bench one_row -- rms f32   # contenders and dtypes by name
//! cargo bench --bench one_row -- --test                        # each forward once
//! ```
//!
//! A row takes a microsecond or less, of which a share is candle's: a tensor, its storage, its
//! shape. All layers are on frozen tensors, and inputs are contiguous. Contenders take turns, a
//! batch of calls each, so that what else the machine does meets all of them. The least of the
//! batches counts.
//!
//! Prints nanoseconds a call and, for this crate's layers, the ratio to candle's layer; below 1 is
//! faster. PowerNorm, which candle does not have, is beside this crate's RMSNorm.

use candle::{DType, Device, Module, Result, Tensor};
use candle_powernorm::{LayerNorm, PowerNorm, RmsNorm};
use std::hint::black_box;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const SHAPES: [(usize, usize); 8] = [
    (1, 64),
    (1, 256),
    (1, 1024),
    (1, 4096),
    (8, 128),
    (16, 1024),
    (64, 4096),
    (1024, 512),
];
const DTYPES: [DType; 2] = [DType::F32, DType::BF16];
const EPS: f64 = 1e-5;

const BATCHES: usize = 60;
/// Long enough for the clock, and short enough that most batches are not interrupted.
const BATCH: Duration = Duration::from_micros(200);

type Forward = Box<dyn Fn() -> Result<Tensor>>;

/// Names of layers, each with the one that it is compared with.
const LAYERS: [[&str; 2]; 5] = [
    ["candle rms_norm", ""],
    ["rms_norm", "candle rms_norm"],
    ["candle layer_norm", ""],
    ["layer_norm", "candle layer_norm"],
    ["power_norm", "rms_norm"],
];

/// These layers on frozen tensors of one shape.
fn layers(dtype: DType, (rows, cols): (usize, usize)) -> Result<[Forward; 5]> {
    let random = |mean, deviation, shape: &[usize]| {
        Tensor::randn(mean, deviation, shape, &Device::Cpu)?.to_dtype(dtype)
    };
    let weight = random(1f32, 0.1, &[cols])?;
    let bias = random(0f32, 0.1, &[cols])?;
    let phi = Tensor::rand(0.5f32, 1.5, cols, &Device::Cpu)?;
    let xs = random(0f32, 1., &[rows, cols])?;
    fn forward(layer: impl Module + 'static, xs: &Tensor) -> Forward {
        let xs = xs.clone();
        Box::new(move || layer.forward(&xs))
    }
    let (of, eps) = (|tensor: &Tensor| tensor.clone(), EPS);
    let candle_rms = candle_nn::RmsNorm::new(of(&weight), eps);
    let candle_layer = candle_nn::LayerNorm::new(of(&weight), of(&bias), eps);
    let rms = RmsNorm::new(of(&weight), eps);
    let layer = LayerNorm::new(of(&weight), of(&bias), eps);
    let power = PowerNorm::new(of(&weight), Some(of(&bias)), phi, eps)?;
    Ok([
        forward(candle_rms, &xs),
        forward(rms, &xs),
        forward(candle_layer, &xs),
        forward(layer, &xs),
        forward(power, &xs),
    ])
}

/// The time of `calls` calls.
fn time(forward: &Forward, calls: u32) -> Result<Duration> {
    let start = Instant::now();
    for _ in 0..calls {
        black_box(forward()?);
    }
    Ok(start.elapsed())
}

/// The least time of a call of each contender, in nanoseconds.
fn least(forwards: &[&Forward]) -> Result<Vec<f64>> {
    let mut calls = vec![];
    for forward in forwards {
        let mut count = 1;
        while time(forward, count)? < BATCH {
            count *= 2;
        }
        calls.push(count);
    }
    let mut least = vec![f64::INFINITY; forwards.len()];
    for _ in 0..BATCHES {
        for ((forward, &calls), least) in forwards.iter().zip(&calls).zip(&mut least) {
            let nanoseconds = time(forward, calls)?.as_secs_f64() * 1e9;
            *least = least.min(nanoseconds / f64::from(calls));
        }
    }
    Ok(least)
}

fn main() -> Result<()> {
    let arguments: Vec<_> = (std::env::args().skip(1))
        .filter(|argument| argument != "--bench")
        .collect();
    let tests = arguments.iter().any(|argument| argument == "--test");
    let names: Vec<_> = arguments.iter().filter(|name| *name != "--test").collect();
    println!("| shape | dtype | layer | ns a call | ratio | to |\n|---|---|---|--:|--:|---|");
    for dtype in DTYPES {
        for shape @ (rows, cols) in SHAPES {
            let id = format!("{rows}x{cols} | {}", dtype.as_str());
            let is_asked = |layer: &str| {
                let id = format!("{id} {layer}");
                names.iter().all(|&name| id.contains(name))
            };
            if !LAYERS.iter().any(|[layer, _]| is_asked(layer)) {
                continue;
            }
            let layers = layers(dtype, shape)?;
            let (asked, forwards): (Vec<&[&str; 2]>, Vec<_>) = (LAYERS.iter().zip(&layers))
                .filter(|([layer, _], _)| is_asked(layer))
                .unzip();
            if tests {
                forwards
                    .iter()
                    .try_for_each(|forward| forward().map(drop))?;
                continue;
            }
            let times = least(&forwards)?;
            for ([layer, to], &time) in asked.iter().zip(&times) {
                let beside = asked.iter().zip(&times).find(|([layer, _], _)| layer == to);
                let ratio =
                    beside.map_or(String::new(), |(_, beside)| format!("{:.2}", time / beside));
                println!("| {id} | {layer} | {time:.0} | {ratio} | {to} |");
            }
        }
    }
    Ok(())
}
