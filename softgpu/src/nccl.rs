//! The little of NCCL that a communicator calls.
use crate::control::Handles;
pub static COMMUNICATORS: Handles<u64> = Handles::new(11);
