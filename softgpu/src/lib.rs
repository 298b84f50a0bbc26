//! A CUDA driver in software: it runs programs that were built for an NVIDIA GPU, and checks each
//! access of their kernels.
//!
//! A call enters through [`control`], which counts it and may let it fail. [`driver`], [`blas`],
//! [`rand`] and [`nccl`] have the functions. They turn work into submissions to a [`stream`], or
//! hand them to a capture of [`graph`].
//!
//! The engine in [`stream`] picks work that nothing holds back. A kernel runs in [`grid`], block by
//! block. `warp` executes its instructions, which [`ptx`] decoded and `alu` and `float` compute.
//! Accesses go through `shared` and [`memory`], which check them and can return a [`fault`].
//! [`counts`] has what a launch did.

mod alu;
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
