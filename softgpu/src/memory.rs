//! The device's memory: allocations, what is written in them, and who touched what last.
//!
//! A device address is the host address of the same byte, so whoever has had an access checked may make it.

use std::sync::Arc;

/// All memory of the devices.
#[derive(Default)]
pub struct Memory {}

/// One launch, as the memory knows it: what it is ordered after.
#[derive(Default)]
pub struct Work {}

/// A block's way into the memory. It remembers the allocations that it used last.
pub struct View {
    pub memory: Arc<Memory>,
    pub work: Arc<Work>,
    /// Index of the block in its launch.
    pub block: u32,
}

/// What a warp does to global memory in one instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Load,
    /// Through the read-only cache (`ld.global.nc`): nothing may write there while the kernel runs.
    LoadReadOnly,
    Store,
    /// Reads and writes at once; no race with its like.
    Atomic,
}

/// One access of a warp.
pub struct Access<'a> {
    pub kind: Kind,
    /// Bytes of a lane, of all elements of a vector together; addresses must be multiples of it.
    pub size: u32,
    /// Active lanes.
    pub mask: u32,
    pub addresses: &'a [u64; 32],
}

/// Why an access is refused.
#[derive(Debug, Clone)]
pub struct Violation {
    /// Of the first lane at fault.
    pub lane: u32,
    pub what: String,
}

impl View {
    pub fn new(memory: Arc<Memory>, work: Arc<Work>, block: u32) -> Self {
        Self {
            memory,
            work,
            block,
        }
    }

    /// Checks an access and records it. If it stands, each active lane may read or write `size` bytes at its address.
    pub fn check(&mut self, access: &Access) -> Result<(), Violation> {
        let _ = access;
        Ok(())
    }
}
