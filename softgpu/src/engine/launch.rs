//! A launch: its parts, and counts of its work.

use crate::isa::op::Class;
use crate::isa::ptx::Module;
use std::sync::Arc;

/// A kernel's launch, its arguments copied.
pub struct Launch {
    pub module: Arc<Module>,
    pub entry: usize,
    /// The address of the module's variables.
    pub globals: u64,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The arguments, laid out as [`Module::parameters`] says.
    pub parameters: Vec<u8>,
}

/// Choices that a GPU leaves open.
#[derive(Debug, Clone, Copy, Default)]
pub struct Conditions {
    /// Orders blocks, and the warps of a block. 0: by index.
    pub seed: u64,
    /// Moves results of approximate functions within their documented error.
    pub perturb: bool,
    /// Runs only the first and the last blocks of a large launch.
    pub sparse: bool,
    /// Of accesses to shared memory only the bounds are checked.
    pub unchecked: bool,
}

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
