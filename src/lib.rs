#![doc = include_str!("../README.md")]
#![deny(missing_docs, unsafe_code)]

mod communicator;
mod config;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod fold;
mod group_scaling;
mod layer;
mod mode;
mod op;
mod state;

pub use communicator::Communicator;
pub use config::{PowerNormConfig, Recipe, Statistics};
pub use error::Error;
pub use group_scaling::GroupScaling;
pub use layer::{power_norm, PowerNorm, PowerNormT};
pub use mode::{EvalScope, Mode};
