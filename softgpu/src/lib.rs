//! A CUDA driver in software.

pub mod counts;
pub mod fault;
pub mod grid;
pub mod memory;
pub mod ptx;
