//! The parts of a launch.

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
