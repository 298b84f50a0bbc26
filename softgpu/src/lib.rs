//! A CUDA driver in software.

pub mod alu;
pub mod blas;
pub mod control;
pub mod counts;
pub mod driver;
pub mod fault;
mod float;
pub mod graph;
pub mod grid;
pub mod memory;
pub mod nccl;
pub mod ptx;
pub mod rand;
mod shared;
pub mod stream;
mod warp;
