//! What the examples that train share.
#![allow(dead_code)] // No example uses all of it.

pub mod checkpoint;
pub mod data;
pub mod model;
pub mod norm;
pub mod optim;
pub mod plot;
pub mod random;
pub mod train;

use anyhow::{ensure, Context, Result};
use candle::{Device, Tensor};
use clap::ValueEnum;

/// What trains a model.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Place {
    Cpu,
    /// The first NVIDIA GPU
    Cuda,
}

impl Place {
    pub fn device(self, example: &str) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda => {
                ensure!(
                    cfg!(feature = "cuda"),
                    "--device cuda needs a build with CUDA: \
                     cargo run --release --features cuda --example {example} -- --device cuda"
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
