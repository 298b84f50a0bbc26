//! Runs the CUDA kernels of `candle-powernorm` on the host, and compares them with its CPU path.
//!
//! `device.cpp` compiles the kernels of `kernels/` as they are; `include/` makes a GPU's blocks, threads and
//! half dtypes of the host's. The launches come from the crate's own `src/cuda/launch.rs`, included by its
//! path, so that a wrong one is noticed too.

#[allow(dead_code)] // the layer's own checks
#[path = "../../src/config.rs"]
mod config;
#[allow(dead_code)] // comes with the config
#[path = "../../src/error.rs"]
mod error;
#[path = "../../src/cuda/launch.rs"]
mod launch;

#[cfg(test)]
mod beyond;
pub mod case;
mod compare;
#[path = "../../tests/common/data.rs"]
pub mod data;
mod device;
mod pass;

pub use compare::assert_close;
pub use device::{convert, emulate, Array, Order, Schedule};
pub use pass::{run_over_ranks, scale_groups, Arguments, Offsets, Results, Wanted};

use error::Error;
