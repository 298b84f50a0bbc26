//! The little of cuRAND that candle calls.
use crate::control::Handles;
pub static GENERATORS: Handles<u64> = Handles::new(10);
