//! The instructions: PTX text, what is decoded from it, and what it computes.

pub(crate) mod alu;
pub(crate) mod float;
pub mod op;
pub mod ptx;
