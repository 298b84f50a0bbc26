//! The CPU: rows on rayon's threads, in the vector instructions that the processor has.
//!
//! The rooms, in the order in which a forward passes through them:
//!
//! - `step.rs`: a forward and its backward from top to bottom, and the equations on channels.
//! - `rows.rs`: the walks of a step, in the dtype of its rows.
//! - `folded.rs`: what an evaluation keeps for the next.
//! - `layout.rs`: candle's tensors as rows.
//! - `run/`: the walk over all rows in chunks, on threads, at a level of vector instructions; the
//!   outputs that it writes.
//! - `row/`: the arithmetic of a row.
//! - `convert.rs`: dtypes of rows and of sums.
//!
//! `gelu.rs` has an activation, which has elements instead of rows.
//!
//! Terms:
//!
//! - A *row* has C adjacent elements, one for each *channel* or *column*.
//! - A *group* is a part of a row that group scaling divides by its root mean square.
//! - A *vector* is a register of adjacent columns. A *level* is a set of vector instructions.
//! - A *chunk* is the rows that a thread takes at a time. It has column sums of its own.

mod convert;
mod folded;
mod gelu;
mod layout;
mod row;
mod rows;
mod run;
mod step;

pub(crate) use folded::Folded;
pub(crate) use gelu::Curve;
pub(super) use gelu::gelu;
pub(super) use step::{evaluate, forward, normalize};

/// Rejects unknown values of the environment variables that a CPU reads.
pub(super) fn check_environment() -> candle::Result<()> {
    run::level::check_level()?;
    row::output::check_switch()
}
