//! The CPU: rows on rayon's threads, in the vector instructions that the processor has.
//!
//! `step.rs` has the phases of a step: what a channel needs is computed there, what a row needs by
//! the passes of `kernels.rs`.

mod element;
mod half;
mod kernels;
mod lanes;
mod simd;
mod step;
mod uninit;

pub(crate) use kernels::Matrix;
pub(crate) use step::{scale_groups, scale_groups_bwd, CpuStep};
