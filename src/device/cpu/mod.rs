//! The CPU: rows on rayon's threads, in the vector instructions that the processor has.
//!
//! - `step.rs` has a forward and its backward from top to bottom, and the equations on channels.
//! - `layout.rs` reads candle's tensors as rows.
//! - `kernels.rs` walks over rows, in chunks and threads.
//! - `lanes.rs`, `element.rs`, `half.rs` and `simd.rs` are the vector arithmetic of a row.
//! - `uninit.rs` hands the kernels outputs that are written once, never zero-filled first.

mod element;
mod half;
mod kernels;
mod lanes;
mod layout;
mod simd;
mod step;
mod uninit;

pub(crate) use simd::check_level;
pub(crate) use step::forward;
