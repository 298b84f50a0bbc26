//! The CPU: rows on rayon's threads, in the vector instructions that the processor has.
//!
//! `step.rs` has the phases of a step. The passes in `kernels.rs` walk over rows, and `channels.rs`
//! computes with vectors of a number a channel. `tensors.rs` reads candle's tensors.

mod channels;
mod element;
mod half;
mod kernels;
mod lanes;
mod simd;
mod step;
mod tensors;
mod uninit;

pub(crate) use element::with_element;
pub(crate) use simd::check_level;
pub(crate) use step::CpuStep;
pub(crate) use tensors::has_packed_rows;
