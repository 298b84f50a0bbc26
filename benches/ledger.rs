//! The cost of each pass of the layer on a GPU, counted by softgpu. It needs no GPU.
//!
//! ```text
//! softgpu/run cargo test --features cuda --bench ledger                 # small inputs
//! softgpu/run cargo test --features cuda --bench ledger -- --shapes 8192x4096 --dtypes bf16
//! softgpu/run cargo test --features cuda --bench ledger -- --stopwatch  # the host's time
//! ```
//!
//! (`cargo bench` works too, but compiles candle once more, optimized.)
//!
//! The rows of the ledger are Markdown. They count this crate's kernels only. A column each:
//!
//! - *traffic*: bytes that threads ask global memory for, over the bytes that the pass must move:
//!   each input read once and each output written once.
//! - *sectors*: bytes of the 32-byte sectors that warps touch, over the same.
//! - *instructions*: of all threads, for an element of the input.
//! - *per piece*: warp instructions for 512 bytes of input, which is 16 bytes a lane. An input with
//!   a residual is x only.
//! - *conflicts*: passes of shared memory beyond the first of a warp's access.
//! - *barriers*: arrivals of a warp at a barrier of its block.
//! - *launches*, and *calls* of the driver. A backward is the whole `Tensor::backward`, so its
//!   calls include the calls of candle's own operations.
//!
//! The stopwatch takes both of candle's handles of a GPU. `Device::new_cuda` has the calling
//! thread's stream. `Device::new_cuda_with_stream` has a stream of its own, so cudarc orders
//! streams by events, two for each array. *Candle's part* is the backward of an operation that has
//! its gradients ready.
//!
//! The checks change no count and take most of the time: they are off unless `SOFTGPU_CHECKS=on`.

#[path = "common/counts.rs"]
mod counts;
#[path = "common/ready.rs"]
mod ready;
#[path = "../tests/common/softgpu.rs"]
mod softgpu;

use candle::{CustomOp3, DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::{LayerNorm, PowerNorm, PowerNormConfig, RmsNorm, power_norm};
use clap::Parser;
use counts::Counts;
use ready::Ready;
use softgpu::Softgpu;
use std::fmt;
use std::hint::black_box;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The input of the stopwatch's passes, and their number.
const TIMED: Shape = Shape {
    rows: 256,
    cols: 1024,
};
const REPEATS: usize = 2000;

#[derive(Parser)]
struct Args {
    /// Rows and channels.
    #[arg(long, value_delimiter = ',', default_value = "256x1024,1024x768")]
    shapes: Vec<Shape>,
    #[arg(long, value_delimiter = ',', default_value = "f32,bf16")]
    dtypes: Vec<DType>,
    /// PowerNorm's groups of group scaling or `none`, or another layer: `layer_norm`, `rms_norm`.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "none,8,layer_norm,rms_norm"
    )]
    groups: Vec<Kind>,
    /// Takes the host's time for 256x1024 instead, with kernels switched off.
    #[arg(long)]
    stopwatch: bool,
    /// `cargo bench` passes this.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    cols: usize,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let sizes = text.split_once('x').map(|(r, c)| (r.parse(), c.parse()));
        match sizes {
            Some((Ok(rows), Ok(cols))) if rows > 0 && cols > 0 => Ok(Self { rows, cols }),
            _ => Err(format!("expected ROWSxCHANNELS, got {text}")),
        }
    }
}

#[derive(Clone, Copy)]
enum Kind {
    /// With so many groups of group scaling.
    Power(Option<usize>),
    Layer,
    Rms,
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match (text, text.parse()) {
            ("none", _) => Ok(Self::Power(None)),
            ("layer_norm", _) => Ok(Self::Layer),
            ("rms_norm", _) => Ok(Self::Rms),
            (_, Ok(groups)) => Ok(Self::Power(Some(groups))),
            _ => Err(format!(
                "expected a number, none, layer_norm or rms_norm, got {text}"
            )),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Power(Some(groups)) => write!(f, "{groups}"),
            Self::Power(None) => f.write_str("none"),
            Self::Layer => f.write_str("layer_norm"),
            Self::Rms => f.write_str("rms_norm"),
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Pass {
    Training,
    Evaluation,
    Backward,
}

impl Pass {
    fn name(self) -> &'static str {
        match self {
            Self::Training => "training",
            Self::Evaluation => "evaluation",
            Self::Backward => "backward",
        }
    }

    /// Tensors that the pass must move: x and y forward, with a residual also the residual and the
    /// sum; x, dy and dx backward. candle adds the gradients of the sum.
    fn tensors(self, with_residual: bool) -> usize {
        match (self, with_residual) {
            (Self::Backward, _) => 3,
            (_, false) => 2,
            (_, true) => 4,
        }
    }
}

/// A layer with parameters.
enum Norm {
    Power(Box<PowerNorm>),
    Layer(LayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    fn new(kind: Kind, size: usize, dtype: DType, device: &Device) -> Result<Self> {
        // Variables, so that a backward has their gradients.
        let one = || Var::ones(size, dtype, device).map(|var| var.as_tensor().clone());
        Ok(match kind {
            Kind::Power(groups) => {
                let config = PowerNormConfig {
                    warmup_steps: 0,
                    group_scaling: groups,
                    ..1e-5.into()
                };
                let varmap = VarMap::new();
                let vb = VarBuilder::from_varmap(&varmap, dtype, device);
                Self::Power(Box::new(power_norm(size, config, vb)?))
            }
            Kind::Layer => Self::Layer(LayerNorm::new(one()?, one()?, 1e-5)),
            Kind::Rms => Self::Rms(RmsNorm::new(one()?, 1e-5)),
        })
    }
}

/// A layer and its inputs.
struct Case {
    layer: Norm,
    x: Var,
    residual: Option<Var>,
}

impl Case {
    fn new(shape: Shape, dtype: DType, kind: Kind, device: &Device) -> Result<Self> {
        // Equal rows: no kernel's path depends on values.
        let row = Tensor::randn(0f32, 1., (1, shape.cols), &Device::Cpu)?.to_dtype(dtype)?;
        let x = row.broadcast_as((shape.rows, shape.cols))?.contiguous()?;
        Ok(Self {
            layer: Norm::new(kind, shape.cols, dtype, device)?,
            x: Var::from_tensor(&x.to_device(device)?)?,
            residual: None,
        })
    }

    fn forward(&self, train: bool) -> Result<Tensor> {
        let Some(residual) = &self.residual else {
            return match &self.layer {
                Norm::Power(layer) => layer.forward_t(&self.x, train),
                Norm::Layer(layer) => layer.forward(&self.x),
                Norm::Rms(layer) => layer.forward(&self.x),
            };
        };
        let (y, sum) = match &self.layer {
            Norm::Power(layer) => {
                let _scope = (!train).then(|| layer.mode().eval_scope());
                layer.forward_residual(&self.x, residual, None)?
            }
            Norm::Layer(layer) => layer.forward_residual(&self.x, residual)?,
            Norm::Rms(layer) => layer.forward_residual(&self.x, residual)?,
        };
        match train {
            // A backward then reaches both.
            true => y + sum,
            false => Ok(y),
        }
    }

    /// The counts of one pass, alone.
    fn count(&self, softgpu: &Softgpu, pass: Pass) -> Result<Counts> {
        let graph = match pass {
            Pass::Backward => Some(self.forward(true)?),
            _ => None,
        };
        Counts::of(softgpu, self.x.device(), || match &graph {
            Some(y) => y.backward().map(drop),
            None => self.forward(pass == Pass::Training).map(drop),
        })
    }
}

/// A row of the ledger: this crate's kernels in a pass that moves `tensors` tensors, and the calls
/// of the whole pass.
struct Row<'a> {
    shape: Shape,
    dtype: DType,
    layer: Kind,
    pass: &'a str,
    tensors: usize,
}

impl Row<'_> {
    fn print(&self, counts: &Counts) {
        let Self { layer, pass, .. } = self;
        let Shape { rows, cols } = self.shape;
        let elements = (rows * cols) as f64;
        let input = elements * self.dtype.size_in_bytes() as f64;
        let least = input * self.tensors as f64;
        let ours = counts.ours();
        print!(
            "| {rows}x{cols} | {} | {layer} | {pass} ",
            self.dtype.as_str()
        );
        println!(
            "| {:.3} | {:.3} | {:.1} | {:.1} | {} | {} | {} | {} |",
            ours.bytes() as f64 / least,
            ours.sector_bytes() as f64 / least,
            ours.thread_instructions as f64 / elements,
            ours.warp_instructions as f64 / (input / 512.),
            ours.conflicts,
            ours.barriers,
            ours.launches,
            counts.calls,
        );
    }
}

fn ledger(softgpu: &Softgpu, args: &Args, device: &Device) -> Result<()> {
    println!(
        "| shape | dtype | layer | pass | traffic | sectors | instructions | per piece \
         | conflicts | barriers | launches | calls |"
    );
    println!("|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    for &shape in &args.shapes {
        for &dtype in &args.dtypes {
            for &kind in &args.groups {
                let mut case = Case::new(shape, dtype, kind, device)?;
                for with_residual in [false, true] {
                    if with_residual {
                        case.residual = Some(Var::from_tensor(&case.x.copy()?)?);
                    }
                    // A first step does some things once.
                    case.forward(true)?.backward()?;
                    for pass in [Pass::Training, Pass::Evaluation, Pass::Backward] {
                        let counts = case.count(softgpu, pass)?;
                        let residual = if with_residual { ", residual" } else { "" };
                        let row = Row {
                            shape,
                            dtype,
                            layer: kind,
                            pass: &format!("{}{residual}", pass.name()),
                            tensors: pass.tensors(with_residual),
                        };
                        row.print(&counts);
                    }
                }
            }
        }
    }
    Ok(())
}

/// The median time of `work` on what `prepare` makes.
fn median<T>(prepare: impl Fn() -> Result<T>, work: impl Fn(T) -> Result<()>) -> Result<Duration> {
    let mut times = vec![];
    for _ in 0..REPEATS {
        let input = prepare()?;
        let start = Instant::now();
        work(input)?;
        times.push(start.elapsed());
    }
    times.sort();
    Ok(times[REPEATS / 2])
}

fn stopwatch(softgpu: &Softgpu) -> Result<()> {
    println!("| stream | the host's microseconds | power_norm | candle's part | affine | ratio |");
    println!("|---|---|--:|--:|--:|--:|");
    timed_on(softgpu, "the thread's", &Device::new_cuda(0)?)?;
    timed_on(softgpu, "its own", &Device::new_cuda_with_stream(0)?)
}

fn timed_on(softgpu: &Softgpu, stream: &str, device: &Device) -> Result<()> {
    let case = Case::new(TIMED, DType::F32, Kind::Power(Some(1)), device)?;
    let Norm::Power(layer) = &case.layer else {
        candle::bail!("another layer")
    };
    let (Some(weight), Some(bias)) = (layer.weight(), layer.bias()) else {
        candle::bail!("a layer without parameters")
    };
    let gradients = [&case.x, weight, bias].map(Tensor::zeros_like);
    let [x, dweight, dbias] = gradients;
    let ready =
        Arc::new(Box::new(Ready([x?, dweight?, dbias?])) as Box<dyn CustomOp3 + Send + Sync>);
    let layer = || case.forward(true);
    let without = || case.x.apply_op3_arc(weight, bias, ready.clone());
    let affine = || case.x.affine(2., 1.);
    // Kernels are compiled and looked up at their first use.
    layer()?.backward()?;
    without()?.backward()?;
    affine()?.backward()?;
    softgpu.run_kernels(false);
    let row = |name: &str, ours: Duration, without: Option<Duration>, affine: Duration| {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let without = without.map_or("".into(), |time| format!("{:.1}", micros(time)));
        let (ours, affine) = (micros(ours), micros(affine));
        println!(
            "| {stream} | {name} | {ours:.1} | {without} | {affine:.1} | {:.2} |",
            ours / affine
        );
    };
    let drop = |y: Tensor| {
        black_box(y);
        Ok(())
    };
    row(
        "forward",
        median(|| Ok(()), |()| layer().and_then(drop))?,
        None,
        median(|| Ok(()), |()| affine().and_then(drop))?,
    );
    let backward = |y: Tensor| y.backward().map(|grads| std::mem::drop(black_box(grads)));
    row(
        "backward",
        median(layer, backward)?,
        Some(median(without, backward)?),
        median(affine, backward)?,
    );
    softgpu.run_kernels(true);
    Ok(())
}

fn main() -> Result<()> {
    let args = Args::parse();
    let softgpu = Softgpu::find().unwrap_or_else(|error| {
        eprintln!("{error} cargo test --features cuda --bench ledger");
        std::process::exit(1);
    });
    if std::env::var_os("SOFTGPU_CHECKS").is_none() {
        // SAFETY: no other thread runs yet that could read the environment.
        unsafe { std::env::set_var("SOFTGPU_CHECKS", "off") };
    }
    match args.stopwatch {
        true => stopwatch(&softgpu),
        false => ledger(&softgpu, &args, &Device::new_cuda_with_stream(0)?),
    }
}
