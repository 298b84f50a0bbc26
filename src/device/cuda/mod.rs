//! NVIDIA GPUs.
//!
//! - `step.rs` is a step from top to bottom: it allocates, and has one function for each launch,
//!   which fills the kernel's arguments and queues it.
//! - `plan.rs` decides in plain numbers what is launched: blocks, threads, shared memory, and the
//!   layout of the memory that kernels share. It explains the words for all of these.
//! - `params.rs` has the kernels' arguments, as `build.rs` reads them in `kernels/params.cuh`.
//! - `gpu.rs` loads and launches kernels, and gives the addresses of buffers.
//! - `ptx.rs` cuts the compiled PTX into a module for each kernel.
//!
//! `unsafe` is confined to `gpu.rs` and `step.rs`, and to the generated part of `params.rs`.

mod gpu;
mod params;
mod plan;
mod ptx;
mod step;

pub(crate) use gpu::Kernels;
pub(super) use gpu::reads_in_place;
pub(super) use step::forward;
