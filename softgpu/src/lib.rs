//! A CUDA driver in software.

pub mod blas;
pub mod control;
pub mod counts;
pub mod driver;
pub mod fault;
pub mod graph;
pub mod grid;
pub mod memory;
pub mod nccl;
pub mod ptx;
pub mod rand;
pub mod stream;
