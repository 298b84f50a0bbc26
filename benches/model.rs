//! A whole model with each normalization: a GPT that learns a text with AdamW. Its steps show what
//! a user gains who changes the layer.
//!
//! ```text
//! cargo bench --bench model                                        # 4 x 256 on a CPU, in f32
//! cargo bench --bench model -- --dtype bf16 --threads 2
//! cargo bench --bench model -- --our-gelu                          # and this crate's `ops::gelu`
//! cargo bench --bench model -- --activation gelu_erf               # or silu, relu
//! cargo bench --bench model -- --dtype bf16 --masters              # f32 masters of the weights
//! cargo bench --bench model -- --norms layer_norm_slow,layer_norm --layers 12 --width 768
//! cargo bench --bench model -- --norms layer_norm --profile        # parts of a step
//! cargo bench --features cuda --bench model -- --device cuda       # on a GPU
//! cargo bench --bench model -- --test                              # a tiny model, once
//! ```
//!
//! For each normalization it prints a row of Markdown:
//!
//! - *step*: milliseconds of a forward, a backward and a step of the optimizer.
//! - *evaluation*: milliseconds of a forward in evaluation.
//! - *peak*: the most MiB that a step allocates at once, besides the weights, their masters, the
//!   optimizer's moments and the batch. Most of it are activations that wait for their backward, and
//!   gradients.
//! - *trained*: how many of the model's variables get a gradient.
//! - *loss*: in the first step and in the last.
//!
//! The normalizations take turns, so that whatever else happens on the machine slows them all
//! alike. They start from the same weights, so those that compute the same have the same losses.
//!
//! `--profile` adds a table for each normalization that trains: what products of matrices,
//! activations and others take of a step. Each part is timed alone, forward and backward, where it
//! may find more in the caches than in a step. *The rest* is the step's median minus these: the
//! layout of heads, the embedding, and gradients that are added up.
//!
//! `layer_norm`, `rms_norm` and `power_norm` are this crate's. With `_residual` they also add the
//! branch to the residual stream, which candle does for the others. `..._slow` are candle's
//! functions with a backward. `..._fused` are candle's layers without one. They only evaluate, and
//! *trained* says what a step would train. `none` is the model without normalizations: no layer can
//! make a step shorter.
//!
//! On softgpu, no time means anything. There the bench counts what a step asks of a GPU:
//!
//! ```text
//! softgpu/run cargo test --features cuda --bench model -- --device cuda --norms layer_norm
//! ```
//!
//! The first table has a row for each normalization:
//!
//! - *launches* of kernels, to which *fills* with zeros, *copies* and *products* of matrices are to
//!   be added.
//! - *allocations*.
//! - MiB that the threads of all kernels *read* and *write*.
//! - MiB *of sectors*, the units of 32 bytes that warps touch. This is closer to what reaches the
//!   memory: candle's kernels on strided tensors read the shape in each thread, which the caches
//!   serve. Sectors *of this crate's* kernels are among them.
//! - *peak*, as above.
//!
//! The second table has the MiB of sectors and the launches of each kind of kernel, under candle's
//! name for it. Kinds with less than 1 % of the MiB are added up as others.
//!
//! `benches/model_torch.py` is the same model in PyTorch and takes the same arguments, except those
//! of activations, `--masters` and `--profile`.

#[path = "common/counting.rs"]
mod counting;
#[cfg(feature = "cuda")]
#[path = "common/counts.rs"]
mod counts;
#[cfg(feature = "cuda")]
#[path = "common/gpu.rs"]
mod gpu;
#[cfg(feature = "cuda")]
#[path = "../tests/common/softgpu.rs"]
mod softgpu;
#[path = "common/unused.rs"]
mod unused;

use candle::backprop::GradStore;
use candle::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::{
    AdamW, Embedding, Init, Linear, Optimizer, ParamsAdamW, VarBuilder, VarMap, embedding,
    linear_no_bias, loss::cross_entropy, ops,
};
use candle_powernorm::{
    Masters, Mode, PowerNormConfig, Untrained, layer_norm, power_norm, rms_norm, trainable_vars,
    untrained,
};
use clap::{Parser, ValueEnum, builder::RangedU64ValueParser};
use counting::Counting;
use mimalloc::MiMalloc;
use rayon::ThreadPoolBuilder;
use std::fmt;
use std::time::Instant;
#[cfg(feature = "cuda")]
use {counts::Counts, softgpu::Softgpu};

/// With glibc's allocator, page faults on large blocks take much of a step.
#[global_allocator]
static ALLOCATOR: Counting<MiMalloc> = Counting(MiMalloc);

/// Channels of a head.
const HEAD: usize = 64;
const EPS: f64 = 1e-5;
const LEARNING_RATE: f64 = 3e-4;

/// A normalization, with or without the addition before it.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Kind {
    LayerNormSlow,
    RmsNormSlow,
    LayerNormFused,
    RmsNormFused,
    LayerNorm,
    RmsNorm,
    PowerNorm,
    LayerNormResidual,
    RmsNormResidual,
    PowerNormResidual,
    None,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// Adds a branch to the residual stream. Returns the normalized sum, and the sum.
type Norm = Box<dyn Fn(&Tensor, &Tensor) -> Result<(Tensor, Tensor)>>;

/// A normalization after candle's own addition.
fn after_sum(norm: impl Fn(&Tensor) -> Result<Tensor> + 'static) -> Norm {
    Box::new(move |branch, stream| {
        let sum = (stream + branch)?;
        Ok((norm(&sum)?, sum))
    })
}

impl Kind {
    /// candle's own layers have no backward.
    fn trains(self) -> bool {
        !matches!(self, Self::LayerNormFused | Self::RmsNormFused)
    }

    fn build(self, width: usize, mode: &Mode, vb: VarBuilder) -> Result<Norm> {
        let warmed_up = |vb: VarBuilder| {
            // The layer is past its warm-up for most of a training.
            let config = PowerNormConfig {
                warmup_steps: 0,
                ..EPS.into()
            };
            Ok::<_, candle::Error>(power_norm(width, config, vb)?.with_mode(mode))
        };
        Ok(match self {
            Self::LayerNormSlow => {
                let weight = vb.get_with_hints(width, "weight", Init::Const(1.))?;
                let bias = vb.get_with_hints(width, "bias", Init::Const(0.))?;
                after_sum(move |xs| ops::layer_norm_slow(xs, &weight, &bias, EPS as f32))
            }
            Self::RmsNormSlow => {
                let weight = vb.get_with_hints(width, "weight", Init::Const(1.))?;
                after_sum(move |xs| ops::rms_norm_slow(xs, &weight, EPS as f32))
            }
            Self::LayerNormFused => {
                let norm = candle_nn::layer_norm(width, EPS, vb)?;
                after_sum(move |xs| norm.forward(xs))
            }
            Self::RmsNormFused => {
                let norm = candle_nn::rms_norm(width, EPS, vb)?;
                after_sum(move |xs| norm.forward(xs))
            }
            Self::LayerNorm => {
                let norm = layer_norm(width, EPS, vb)?;
                after_sum(move |xs| norm.forward(xs))
            }
            Self::RmsNorm => {
                let norm = rms_norm(width, EPS, vb)?;
                after_sum(move |xs| norm.forward(xs))
            }
            Self::PowerNorm => {
                let norm = warmed_up(vb)?;
                after_sum(move |xs| norm.forward(xs))
            }
            Self::LayerNormResidual => {
                let norm = layer_norm(width, EPS, vb)?;
                Box::new(move |branch, stream| norm.forward_residual(branch, stream))
            }
            Self::RmsNormResidual => {
                let norm = rms_norm(width, EPS, vb)?;
                Box::new(move |branch, stream| norm.forward_residual(branch, stream))
            }
            Self::PowerNormResidual => {
                let norm = warmed_up(vb)?;
                Box::new(move |branch, stream| norm.forward_residual(branch, stream, None))
            }
            Self::None => after_sum(|xs| Ok(xs.clone())),
        })
    }
}

/// Attention and two linear layers, each of which reads the normalized residual stream.
struct Block {
    norms: [Norm; 2],
    query_key_value: Linear,
    project: Linear,
    expand: Linear,
    activation: fn(&Tensor) -> Result<Tensor>,
    contract: Linear,
}

impl Block {
    fn new(args: &Args, norm: impl Fn(VarBuilder) -> Result<Norm>, vb: VarBuilder) -> Result<Self> {
        let width = args.width;
        let linear = |from, to, name| linear_no_bias(from, to, vb.pp(name));
        Ok(Self {
            norms: [norm(vb.pp("norm_1"))?, norm(vb.pp("norm_2"))?],
            query_key_value: linear(width, 3 * width, "query_key_value")?,
            project: linear(width, width, "project")?,
            expand: linear(width, 4 * width, "expand")?,
            activation: match (args.activation, args.our_gelu) {
                (Activation::Gelu, false) => Tensor::gelu,
                (Activation::Gelu, true) => candle_powernorm::ops::gelu,
                (Activation::GeluErf, false) => Tensor::gelu_erf,
                (Activation::GeluErf, true) => candle_powernorm::ops::gelu_erf,
                (Activation::Silu, _) => Tensor::silu,
                (Activation::Relu, _) => Tensor::relu,
            },
            contract: linear(4 * width, width, "contract")?,
        })
    }

    /// Takes the residual stream, and the branch that the next normalization adds to it. Returns
    /// the same for the next block.
    fn forward(&self, branch: &Tensor, stream: &Tensor, mask: &Tensor) -> Result<(Tensor, Tensor)> {
        let [norm_1, norm_2] = &self.norms;
        let (xs, stream) = norm_1(branch, stream)?;
        let branch = self.attention(&xs, mask)?;
        let (xs, stream) = norm_2(&branch, &stream)?;
        let hidden = (self.activation)(&self.expand.forward(&xs)?)?;
        Ok((self.contract.forward(&hidden)?, stream))
    }

    fn attention(&self, xs: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (batch, time, width) = xs.dims3()?;
        let count = width / HEAD;
        let all = self.query_key_value.forward(xs)?;
        let all = all.reshape((batch, time, 3 * count, HEAD))?;
        let all = all.transpose(1, 2)?;
        let heads = |i| all.narrow(1, i * count, count)?.contiguous();
        let (query, key, value) = (heads(0)?, heads(1)?, heads(2)?);
        let weights = attention_weights(&query.matmul(&key.t()?)?, mask)?;
        let mixed = weights.matmul(&value)?.transpose(1, 2)?;
        self.project.forward(&mixed.reshape((batch, time, width))?)
    }
}

fn attention_weights(scores: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let scores = (scores * (HEAD as f64).powf(-0.5))?;
    ops::softmax(&scores.broadcast_add(mask)?, D::Minus1)
}

/// From tokens `[batch, time]` to logits of the next ones, `[batch, time, vocabulary]`.
struct Gpt {
    tokens: Embedding,
    positions: Tensor,
    /// A large negative number where a token would see a later one.
    mask: Tensor,
    blocks: Vec<Block>,
    norm: Norm,
    output: Linear,
}

impl Gpt {
    fn new(args: &Args, kind: Kind, mode: &Mode, vb: VarBuilder) -> Result<Self> {
        let (width, time) = (args.width, args.context);
        let norm = |vb: VarBuilder| kind.build(width, mode, vb);
        let mask = Tensor::tril2(time, DType::F32, vb.device())?.affine(1e9, -1e9)?;
        let blocks = (0..args.layers).map(|i| Block::new(args, norm, vb.pp(i)));
        Ok(Self {
            tokens: embedding(args.vocabulary, width, vb.pp("tokens"))?,
            positions: vb.get((time, width), "positions")?,
            mask: mask.to_dtype(vb.dtype())?,
            blocks: blocks.collect::<Result<_>>()?,
            norm: norm(vb.pp("norm"))?,
            output: linear_no_bias(width, args.vocabulary, vb.pp("output"))?,
        })
    }

    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut stream = self.tokens.forward(tokens)?;
        // The first normalization adds the positions.
        let mut branch = self.positions.broadcast_as(stream.shape())?;
        for block in &self.blocks {
            (branch, stream) = block.forward(&branch, &stream, &self.mask)?;
        }
        let (xs, _) = (self.norm)(&branch, &stream)?;
        self.output.forward(&xs)
    }
}

/// Tokens `[batch, time]`, and for each the next one, `[batch * time]`.
struct Batch {
    tokens: Tensor,
    next: Tensor,
}

impl Batch {
    /// Takes a text that looks random, and that is the same in each step: the model memorizes it.
    fn new(args: &Args, device: &Device) -> Result<Self> {
        let (batch, time) = (args.batch, args.context);
        let token = |i| ((i * 2_654_435_761 % (1 << 32)) >> 7) % args.vocabulary as u64;
        let text: Vec<u32> = (0..=(batch * time) as u64)
            .map(|i| token(i) as u32)
            .collect();
        Ok(Self {
            tokens: Tensor::from_slice(&text[..batch * time], (batch, time), device)?,
            next: Tensor::from_slice(&text[1..], batch * time, device)?,
        })
    }

    fn loss(&self, logits: &Tensor) -> Result<Tensor> {
        // Sums of half precision would be too coarse.
        let logits = logits.flatten_to(1)?.to_dtype(DType::F32)?;
        cross_entropy(&logits, &self.next)
    }
}

/// A model in training, and its measurements.
struct Contender {
    kind: Kind,
    model: Gpt,
    mode: Mode,
    varmap: VarMap,
    optimizer: AdamW,
    /// What the optimizer moves in place of the weights.
    masters: Option<Masters>,
    /// Milliseconds.
    steps: Vec<f64>,
    evaluations: Vec<f64>,
    /// Bytes.
    peak: usize,
    trained: String,
    losses: Vec<f32>,
}

impl Contender {
    /// Copies the weights of the `first` contender, if there is one.
    fn new(args: &Args, device: &Device, kind: Kind, first: Option<&Self>) -> Result<Self> {
        let (mode, varmap) = (Mode::train(), VarMap::new());
        let vb = VarBuilder::from_varmap(&varmap, args.dtype, device);
        let model = Gpt::new(args, kind, &mode, vb)?;
        if let Some(first) = first {
            let weights = first.varmap.data().lock().unwrap();
            for (name, var) in varmap.data().lock().unwrap().iter() {
                weights.get(name).map_or(Ok(()), |weight| var.set(weight))?;
            }
        }
        let params = ParamsAdamW {
            lr: LEARNING_RATE,
            eps: match (args.dtype, args.masters) {
                // A smaller one is 0 in F16, where moments underflow too.
                (DType::F16, false) => 1e-4,
                _ => ParamsAdamW::default().eps,
            },
            ..ParamsAdamW::default()
        };
        let masters = args.masters.then(|| Masters::new(&varmap)).transpose()?;
        let moved = masters.as_ref().map_or(&varmap, Masters::varmap);
        Ok(Self {
            kind,
            model,
            mode,
            optimizer: AdamW::new(trainable_vars(moved), params)?,
            masters,
            varmap,
            steps: vec![],
            evaluations: vec![],
            peak: 0,
            trained: String::new(),
            losses: vec![],
        })
    }

    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        batch.loss(&self.model.forward(&batch.tokens)?)
    }

    /// Returns the loss, without the graph that leads to it.
    fn step(&mut self, batch: &Batch) -> Result<Tensor> {
        let loss = self.loss(batch)?;
        let gradients = loss.backward()?;
        self.update(gradients)?;
        Ok(loss.detach())
    }

    fn update(&mut self, mut gradients: GradStore) -> Result<()> {
        let Some(masters) = &self.masters else {
            return self.optimizer.step(&gradients);
        };
        if !masters.unscale(&mut gradients, 1.)? {
            candle::bail!("a gradient is not finite");
        }
        masters.step(&mut self.optimizer, &gradients)
    }

    fn evaluate(&self, batch: &Batch) -> Result<()> {
        let _scope = self.mode.eval_scope();
        self.model.forward(&batch.tokens).map(drop)
    }

    /// Finds the variables that a backward reaches, and takes two steps: first ones allocate more,
    /// and load kernels.
    fn warm_up(&mut self, batch: &Batch) -> Result<()> {
        let gradients = self.loss(batch)?.backward()?;
        let missed = untrained(&self.varmap, &gradients)?;
        // The text does not contain every token, so rows of the embedding get no gradient.
        let missed = missed
            .iter()
            .filter(|one| !matches!(one, Untrained::ZeroRows { .. }));
        let (missed, all) = (missed.count(), trainable_vars(&self.varmap).len());
        self.trained = format!("{} of {all}", all - missed);
        drop(gradients);
        if self.kind.trains() {
            let first = self.step(batch)?;
            self.losses.push(first.to_scalar()?);
            let (_, peak) = peak_of(&first.device().clone(), || self.step(batch))?;
            self.peak = peak;
        }
        self.evaluate(batch)
    }

    fn time(&mut self, batch: &Batch) -> Result<()> {
        let device = batch.tokens.device();
        if self.kind.trains() {
            let (loss, time) = timed(device, || self.step(batch))?;
            self.steps.push(time);
            self.losses.push(loss.to_scalar()?);
        }
        let ((), time) = timed(device, || self.evaluate(batch))?;
        self.evaluations.push(time);
        Ok(())
    }

    /// Prints what its parts take of a step. Each is timed alone, forward and backward, and counts as
    /// often as a step has it.
    fn print_profile(&mut self, args: &Args, batch: &Batch) -> Result<()> {
        let device = batch.tokens.device();
        let noise = |shape: &[usize]| {
            Var::from_tensor(&Tensor::randn(0f32, 1., shape, device)?.to_dtype(args.dtype)?)
        };
        let rows = |width| noise(&[args.batch, args.context, width]);
        let heads = |width| noise(&[args.batch, args.width / HEAD, args.context, width]);
        let (xs, branch) = (rows(args.width)?, rows(args.width)?);
        let (hidden, logits) = (rows(4 * args.width)?, rows(args.vocabulary)?);
        let (query, key, scores) = (heads(HEAD)?, heads(HEAD)?, heads(args.context)?);
        let (model, block) = (&self.model, &self.model.blocks[0]);

        let median_of = |work: &mut dyn FnMut() -> Result<()>| {
            let mut times = vec![];
            for _ in 0..args.rounds {
                times.push(timed(device, &mut *work)?.1);
            }
            Ok::<_, candle::Error>(median(&mut times))
        };
        let part = |count: usize, forward: &dyn Fn() -> Result<Tensor>| {
            let output = Var::from_tensor(&forward()?.detach())?;
            let whole = median_of(&mut || forward()?.backward().map(drop))?;
            // Within a model, the gradient of the output is there already.
            let start = median_of(&mut || output.backward().map(drop))?;
            Ok::<_, candle::Error>(count as f64 * (whole - start))
        };
        let products = part(1, &|| model.output.forward(&xs))?
            + part(args.layers, &|| block.query_key_value.forward(&xs))?
            + part(args.layers, &|| query.matmul(&key.t()?))?
            + part(args.layers, &|| scores.matmul(&key))?
            + part(args.layers, &|| block.project.forward(&xs))?
            + part(args.layers, &|| block.expand.forward(&xs))?
            + part(args.layers, &|| block.contract.forward(&hidden))?;
        let mut parts = vec![
            ("products of matrices", products),
            (
                "activations",
                part(args.layers, &|| (block.activation)(&hidden))?,
            ),
            (
                "softmax, with scale and mask",
                part(args.layers, &|| attention_weights(&scores, &model.mask))?,
            ),
            (
                "normalizations, each with an addition",
                part(2 * args.layers + 1, &|| Ok((model.norm)(&branch, &xs)?.0))?,
            ),
            ("cross entropy", part(1, &|| batch.loss(&logits))?),
        ];
        let mut updates = vec![];
        for _ in 0..args.rounds {
            let gradients = self.loss(batch)?.backward()?;
            updates.push(timed(device, || self.update(gradients))?.1);
        }
        parts.push(("AdamW", median(&mut updates)));
        let step = median(&mut self.steps);
        let rest = step - parts.iter().map(|(_, time)| time).sum::<f64>();
        parts.extend([("the rest", rest), ("step", step)]);

        println!("\n| a step with `{}` | ms | share |", self.kind);
        println!("|---|--:|--:|");
        for (part, time) in parts {
            println!("| {part} | {time:.2} | {:.1} % |", time / step * 100.);
        }
        Ok(())
    }

    fn print(&mut self) {
        let kind = self.kind;
        let step = least_and_median(&mut self.steps);
        let evaluation = least_and_median(&mut self.evaluations);
        let (peak, loss) = match self.losses[..] {
            [first, .., last] => (
                format!("{:.1}", mib(self.peak)),
                format!("{first:.3} → {last:.3}"),
            ),
            _ => ("–".into(), "–".into()),
        };
        let trained = &self.trained;
        println!("| `{kind}` | {step} | {evaluation} | {peak} | {trained} | {loss} |");
    }
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The result of `work`, and the milliseconds that it took.
fn timed<T>(device: &Device, work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    device.synchronize()?;
    let start = Instant::now();
    let result = work()?;
    device.synchronize()?;
    Ok((result, start.elapsed().as_secs_f64() * 1e3))
}

/// Sorts `times`, of which there is at least one.
fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    let (below, above) = ((times.len() - 1) / 2, times.len() / 2);
    f64::midpoint(times[below], times[above])
}

/// Two cells of a table.
fn least_and_median(times: &mut [f64]) -> String {
    match times {
        [] => "– | –".to_owned(),
        _ => {
            let median = median(times);
            format!("{:.2} | {median:.2}", times[0])
        }
    }
}

/// Runs `work`, and returns the most bytes that were allocated on the device at once meanwhile,
/// beyond those that already were.
fn peak_of<T>(device: &Device, work: impl FnOnce() -> Result<T>) -> Result<(T, usize)> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return gpu::peak_of(device, work);
    }
    let (result, peak) = counting::peak_of(|| {
        let result = work()?;
        device.synchronize()?;
        Ok::<_, candle::Error>(result)
    });
    Ok((result?, peak))
}

/// Prints what a step of each contender asks of a GPU.
#[cfg(feature = "cuda")]
fn print_counts(softgpu: &Softgpu, contenders: &mut [Contender], batch: &Batch) -> Result<()> {
    let device = batch.tokens.device();
    let mut steps = vec![];
    for contender in contenders.iter_mut().filter(|one| one.kind.trains()) {
        let step = Counts::of(softgpu, device, || contender.step(batch).map(drop))?;
        steps.push((contender.kind.to_string(), step, contender.peak));
    }
    println!(
        "| normalization | launches | fills | copies | products | allocations | MiB read | written \
         | of sectors | of this crate's | peak |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    for (name, step, peak) in &steps {
        let all = step.sum();
        println!(
            "| `{name}` | {} | {} | {} | {} | {} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} |",
            all.launches,
            step.calls_of("cuMemsetD8Async"),
            step.calls_of("cuMemcpyDtoDAsync_v2"),
            step.calls_of("cublasGemmStridedBatchedEx"),
            step.calls_of("cuMemAllocAsync"),
            mib(all.bytes_read as usize),
            mib(all.bytes_written as usize),
            mib(all.sector_bytes() as usize),
            mib(step.ours().sector_bytes() as usize),
            mib(*peak),
        );
    }
    println!();
    counts::print_kinds(steps.iter().map(|(name, step, _)| (name.as_str(), step)));
    Ok(())
}

#[derive(Parser)]
struct Args {
    /// The CPU, or the first NVIDIA GPU.
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,
    /// Threads of the CPU. candle's element-wise operations take `CANDLE_NUM_THREADS`, if it is set.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Of weights and activations: f32, bf16 or f16.
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// The normalizations [default: all]
    #[arg(long, value_delimiter = ',')]
    norms: Vec<Kind>,
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Channels, a multiple of 64.
    #[arg(long, default_value_t = 256)]
    width: usize,
    /// Texts in a batch.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Tokens of a text.
    #[arg(long, default_value_t = 128)]
    context: usize,
    #[arg(long, default_value_t = 1024)]
    vocabulary: usize,
    /// Steps and evaluations to time, after two that warm up.
    #[arg(long, default_value_t = 10, value_parser = at_least_one())]
    rounds: usize,
    /// Of the feed-forward layers.
    #[arg(long, value_enum, default_value_t = Activation::Gelu)]
    activation: Activation,
    /// Takes GELU from this crate, and not from candle.
    #[arg(long)]
    our_gelu: bool,
    /// Lets AdamW move f32 masters of weights in half precision.
    #[arg(long)]
    masters: bool,
    /// Also prints where the time of a step goes.
    #[arg(long)]
    profile: bool,
    /// Takes one round of a tiny model.
    #[arg(long)]
    test: bool,
    /// `cargo bench` passes this.
    #[arg(long, hide = true)]
    bench: bool,
}

fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

impl Args {
    fn chosen() -> Self {
        let mut args = Self::parse();
        if args.norms.is_empty() {
            args.norms = Kind::value_variants().to_vec();
        }
        if args.test {
            (args.layers, args.width, args.rounds, args.profile) = (1, HEAD, 1, true);
            (args.batch, args.context, args.vocabulary) = (2, 8, 16);
        }
        args
    }
}

#[derive(Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Activation {
    Gelu,
    GeluErf,
    Silu,
    Relu,
}

#[derive(Clone, Copy, ValueEnum)]
enum Place {
    Cpu,
    Cuda,
}

impl Place {
    fn device(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            #[cfg(feature = "cuda")]
            Self::Cuda => Ok(gpu::queue()),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => candle::bail!("--device cuda needs --features cuda"),
        }
    }
}

/// Sets the threads of this crate and of candle's products of matrices, and those of candle's
/// element-wise operations unless the user has.
fn use_threads(count: usize) -> Result<()> {
    for variable in ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"] {
        if variable == "CANDLE_NUM_THREADS" && std::env::var_os(variable).is_some() {
            continue;
        }
        // SAFETY: no other thread runs yet that could read the environment.
        unsafe { std::env::set_var(variable, count.to_string()) };
    }
    let pool = ThreadPoolBuilder::new().num_threads(count);
    pool.build_global().map_err(candle::Error::wrap)
}

fn main() -> Result<()> {
    #[cfg(feature = "cuda")]
    if std::env::var_os("SOFTGPU_CHECKS").is_none() {
        // The checks change no count, and take most of the time.
        // SAFETY: no other thread runs yet that could read the environment.
        unsafe { std::env::set_var("SOFTGPU_CHECKS", "off") };
    }
    let args = Args::chosen();
    use_threads(args.threads)?;
    let device = args.device.device()?;
    println!(
        "GPT of {} x {}, {} x {} tokens of {}, {}, {}\n",
        args.layers,
        args.width,
        args.batch,
        args.context,
        args.vocabulary,
        args.dtype.as_str(),
        match args.device {
            Place::Cpu => format!("threads of the CPU: {}", args.threads),
            Place::Cuda => "GPU".to_owned(),
        },
    );
    if device.is_cpu() {
        unused::warn_of_unused(args.dtype != DType::F32);
    }
    let batch = Batch::new(&args, &device)?;
    let mut contenders: Vec<Contender> = vec![];
    for &kind in &args.norms {
        contenders.push(Contender::new(&args, &device, kind, contenders.first())?);
    }
    for contender in &mut contenders {
        contender.warm_up(&batch)?;
    }
    #[cfg(feature = "cuda")]
    if device.is_cuda()
        && let Ok(softgpu) = Softgpu::find()
    {
        return print_counts(&softgpu, &mut contenders, &batch);
    }
    for _ in 0..args.rounds {
        for contender in &mut contenders {
            contender.time(&batch)?;
        }
    }
    println!(
        "| normalization | step, ms: least | median | evaluation, ms: least | median | peak, MiB \
         | trained | loss |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|");
    contenders.iter_mut().for_each(Contender::print);
    if args.profile {
        for contender in contenders.iter_mut().filter(|one| one.kind.trains()) {
            contender.print_profile(&args, &batch)?;
        }
    }
    Ok(())
}
