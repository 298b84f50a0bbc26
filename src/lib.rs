#![doc = include_str!("../README.md")]
#![deny(missing_docs, unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod composed;
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
mod ranks;
mod state;

pub use config::{PowerNormConfig, Recipe, Statistics};
pub use error::Error;
pub use group_scaling::GroupScaling;
pub use layer::{power_norm, PowerNorm, PowerNormT};
pub use loss_scale::LossScale;
pub use mode::{Mode, ModeScope};
#[cfg(feature = "mpi")]
pub use ranks::MpiCommunicator;
#[cfg(feature = "nccl")]
pub use ranks::NcclCommunicator;
pub use ranks::{Communicator, Ranks};
