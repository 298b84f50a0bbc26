//! The devices: their memory, their streams, and what runs a launch.

pub mod fault;
pub mod grid;
pub mod launch;
pub mod memory;
pub mod shared;
pub mod stream;
mod warp;
