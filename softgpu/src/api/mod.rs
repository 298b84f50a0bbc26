//! The functions of the libraries that this one stands for.

pub mod blas;
pub mod device;
pub mod graph;
pub mod memory;
pub mod module;
pub mod nccl;
pub mod rand;
pub mod stream;
