//! Memory that the graph of a forward keeps for its backward, beside candle's own normalizations.
//!
//! ```text
//! cargo bench --bench memory
//! ```
//!
//! A layer is called on an input that the program holds, and the bytes that are allocated afterwards
//! and not freed are counted. The outputs are subtracted, because the layers after this one keep them
//! anyway. Prints bytes and, for each layer, how many tensors of the input's size they would fill.
//! Nothing is timed.

#[path = "common/counting.rs"]
mod counting;

use candle::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap, ops};
use candle_powernorm::{PowerNormConfig, layer_norm, ops as ours, power_norm, rms_norm};
use counting::Counting;
use std::alloc::System;

/// Rows and channels.
const SHAPE: (usize, usize) = (4096, 512);
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const EPS: f64 = 1e-5;

#[global_allocator]
static ALLOCATOR: Counting<System> = Counting(System);

/// Bytes that the output of `forward` and its graph hold.
fn held_by(forward: impl Fn() -> Result<Tensor>) -> Result<usize> {
    // The first call may make what stays, such as threads and a layer's own statistics.
    forward()?;
    let before = counting::live();
    let ys = forward()?;
    let held = counting::live() - before;
    drop(ys);
    Ok(held)
}

type Forward<'a> = &'a dyn Fn() -> Result<Tensor>;

fn main() -> Result<()> {
    println!("| layer | dtype | bytes kept besides inputs and outputs | in tensors of that size |");
    println!("|---|---|--:|--:|");
    for dtype in DTYPES {
        let (rows, channels) = SHAPE;
        let vb = VarBuilder::from_varmap(&VarMap::new(), dtype, &Device::Cpu);
        let xs = Tensor::randn(0f32, 1., (rows, channels), &Device::Cpu)?.to_dtype(dtype)?;
        let xs = Var::from_tensor(&xs)?;
        let config = |warmup_steps| PowerNormConfig {
            warmup_steps,
            ..EPS.into()
        };
        let running = power_norm(channels, config(0), vb.pp("running"))?;
        let warming_up = power_norm(channels, config(1000), vb.pp("warming_up"))?;
        let layer = layer_norm(channels, EPS, vb.pp("layer"))?;
        let rms = rms_norm(channels, EPS, vb.pp("rms"))?;
        let weight = vb.get(channels, "weight")?;
        let bias = vb.get(channels, "bias")?;
        let eps = EPS as f32;
        let residual = xs.as_tensor().copy()?;
        // y keeps the sum, which is its input. It is an output too.
        let forwards: [(&str, usize, Forward); 9] = [
            ("`power_norm`", 1, &|| running.forward(&xs)),
            ("`power_norm`, in its warm-up", 1, &|| {
                warming_up.forward(&xs)
            }),
            ("`layer_norm`", 1, &|| layer.forward(&xs)),
            ("`rms_norm`", 1, &|| rms.forward(&xs)),
            ("`power_norm`, `forward_residual`", 2, &|| {
                Ok(running.forward_residual(&xs, &residual, None)?.0)
            }),
            ("`layer_norm`, `forward_residual`", 2, &|| {
                Ok(layer.forward_residual(&xs, &residual)?.0)
            }),
            ("`rms_norm`, `forward_residual`", 2, &|| {
                Ok(rms.forward_residual(&xs, &residual)?.0)
            }),
            ("candle `layer_norm_slow`", 1, &|| {
                ops::layer_norm_slow(&xs, &weight, &bias, eps)
            }),
            ("candle `rms_norm_slow`", 1, &|| {
                ops::rms_norm_slow(&xs, &weight, eps)
            }),
        ];
        // Rows as scores of a head, and as heads of 64 channels.
        let (positions, width) = (rows / 8, 64);
        let scores = xs.as_tensor();
        let heads = scores.reshape((8, positions, channels / width, width))?;
        let heads = Var::from_tensor(&heads.transpose(1, 2)?.contiguous()?.detach())?;
        let angles = Tensor::rand(0f32, 3., (8192, width / 2), &Device::Cpu)?.to_dtype(dtype)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let fused: [(&str, usize, Forward); 6] = [
            ("`gelu`", 1, &|| ours::gelu(&xs)),
            ("candle `gelu`", 1, &|| xs.gelu()),
            ("`softmax_last_dim`", 1, &|| ours::softmax_last_dim(scores)),
            ("candle `softmax`", 1, &|| ops::softmax(scores, 1)),
            ("`rope`, tables of 8192 positions", 1, &|| {
                ours::rope(&heads, &cos, &sin)
            }),
            ("candle `rope_slow`, the same tables", 1, &|| {
                candle_nn::rotary_emb::rope_slow(&heads, &cos, &sin)
            }),
        ];
        let size = rows * channels * dtype.size_in_bytes();
        for (name, outputs, forward) in forwards.into_iter().chain(fused) {
            let kept = held_by(forward)? - outputs * size;
            let tensors = kept as f64 / size as f64;
            println!("| {name} | {dtype:?} | {kept} | {tensors:.2} |");
        }
    }
    Ok(())
}
