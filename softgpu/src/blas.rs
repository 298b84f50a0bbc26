//! The little of cuBLAS that candle calls.
use crate::control::Handles;
pub static HANDLES: Handles<u64> = Handles::new(9);
