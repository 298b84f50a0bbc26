//! A CUDA driver in software: it runs programs that were built for an NVIDIA GPU, and checks each
//! access of their kernels.
//!
//! A call enters one of the functions of [`api`] through [`abi`], where [`inject`] counts it and may
//! let it fail. [`context`] knows devices and streams by their handles. Work goes through [`queue`]
//! into a stream of the [`engine`], or to a [`capture`]. The engine picks work that nothing holds
//! back, and runs a kernel block by block. [`isa`] has the instructions. [`testing`] has what tests
//! call.
//!
//! No file uses one that uses it: below are `isa` and in it `op`, then `engine`, `inject`, `abi`,
//! `context`, `capture`, `queue` and `api`, and `testing` is on top.

// The functions of the driver's interface and those for each instruction are unsafe as a whole: a
// block in each would say nothing new.
#![allow(unsafe_op_in_unsafe_fn)]

pub mod abi;
pub mod api;
pub mod capture;
pub mod context;
pub mod engine;
pub mod inject;
pub mod isa;
pub mod queue;
pub mod testing;
