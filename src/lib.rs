#![doc = include_str!("../README.md")]
#![deny(missing_docs, unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod communicator;
mod config;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod fold;
mod group_scaling;
mod layer;
mod loss_scale;
mod mode;
mod op;
mod residual;
mod state;

#[cfg(feature = "mpi")]
pub use communicator::MpiCommunicator;
#[cfg(feature = "nccl")]
pub use communicator::NcclCommunicator;
pub use communicator::{Communicator, Ranks};
pub use config::{PowerNormConfig, Recipe, Statistics};
pub use error::Error;
pub use group_scaling::GroupScaling;
pub use layer::{power_norm, PowerNorm, PowerNormT};
pub use loss_scale::LossScale;
pub use mode::{Mode, ModeScope};
