//! A CUDA driver in software.

pub mod alu;
pub mod counts;
pub mod fault;
mod float;
pub mod grid;
pub mod memory;
pub mod ptx;
mod shared;
mod warp;
