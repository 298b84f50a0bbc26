//! The CPU: rows on rayon's threads, in the vector instructions that the processor has.
//!
//! `rows.rs` reads candle's tensors, and computes with vectors of a number a channel. The passes in
//! `kernels.rs` walk over rows.

mod element;
mod half;
mod kernels;
mod lanes;
mod rows;
mod simd;
mod uninit;

pub(crate) use rows::CpuRows;
pub(crate) use simd::check_level;
