//! The parts that the commands share, and the language model of `study`.

pub mod checkpoint;
pub mod convert;
pub mod data;
pub mod language;
pub mod measure;
pub mod model;
pub mod norm;
pub mod optim;
pub mod random;
pub mod train;

use anyhow::{Context, Result, ensure};
use candle::{Device, Tensor};
use clap::ValueEnum;

/// ε of every normalization.
pub const EPS: f64 = 1e-5;

/// The device that trains a model.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Place {
    Cpu,
    /// The first NVIDIA GPU
    Cuda,
}

impl Place {
    pub fn device(self, command: &str) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda => {
                ensure!(
                    cfg!(feature = "cuda"),
                    "--device cuda needs a build with CUDA: \
                     cargo run --release --manifest-path lab/Cargo.toml --features cuda -- \
                     {command} --device cuda"
                );
                Device::new_cuda(0).context("cannot use the GPU")
            }
        }
    }
}

/// `[time, time]`: 0 where a position may look, minus infinity where it would see the future.
pub fn causal_mask(time: usize, device: &Device) -> candle::Result<Tensor> {
    let mask: Vec<f32> = (0..time * time)
        .map(|i| {
            if i % time > i / time {
                f32::NEG_INFINITY
            } else {
                0.
            }
        })
        .collect();
    Tensor::from_vec(mask, (time, time), device)
}

/// Parses a count.
pub fn positive(arg: &str) -> Result<usize, String> {
    match arg.parse() {
        Ok(0) => Err("it must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses a number that `holds`, which `rule` says in words.
pub fn number(arg: &str, holds: impl Fn(f64) -> bool, rule: &str) -> Result<f64, String> {
    match arg.parse() {
        Ok(number) if holds(number) => Ok(number),
        Ok(_) => Err(format!("it must be {rule}")),
        Err(error) => Err(error.to_string()),
    }
}
