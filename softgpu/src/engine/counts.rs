//! Counts of the work of a launch.

use crate::isa::op::Class;

/// Counts of a launch, or of many.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks that ran.
    pub blocks: u64,
    /// Warp instructions, by class.
    pub instructions: [u64; Class::COUNT],
    /// Instructions of all active threads.
    pub thread_instructions: u64,
    /// Bytes that threads asked global memory for.
    pub bytes_loaded: u64,
    /// Bytes that threads gave global memory.
    pub bytes_stored: u64,
    /// 32-byte sectors of global memory that loads of a warp touched.
    pub sectors_loaded: u64,
    /// 32-byte sectors of global memory that stores of a warp touched.
    pub sectors_stored: u64,
    /// Passes of shared memory beyond the first of a warp's access.
    pub bank_conflicts: u64,
    /// Barriers of a block that warps arrived at.
    pub barriers: u64,
}

impl Counts {
    /// Adds those of another launch.
    pub fn add(&mut self, other: &Self) {
        self.blocks += other.blocks;
        for (own, other) in self.instructions.iter_mut().zip(other.instructions) {
            *own += other;
        }
        self.thread_instructions += other.thread_instructions;
        self.bytes_loaded += other.bytes_loaded;
        self.bytes_stored += other.bytes_stored;
        self.sectors_loaded += other.sectors_loaded;
        self.sectors_stored += other.sectors_stored;
        self.bank_conflicts += other.bank_conflicts;
        self.barriers += other.barriers;
    }
}
