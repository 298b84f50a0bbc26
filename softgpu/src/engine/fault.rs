//! Faults: acts of a kernel that a GPU would leave undefined.

use std::fmt;

/// A fault of a kernel, complete enough to be acted on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The entry's name.
    pub kernel: String,
    /// Index of the block in the grid.
    pub block: [u32; 3],
    /// Index of the thread in the block; of the first of those at fault.
    pub thread: [u32; 3],
    /// `file:line` of the source, if the module was compiled with `-lineinfo`.
    pub source: Option<String>,
    /// The PTX instruction.
    pub instruction: String,
    /// The event, with address, allocation and the other side of a race where there is one.
    pub what: String,
}

impl Fault {
    /// A fault that is no thread's.
    pub fn outside(kernel: &str, instruction: String, what: String) -> Self {
        Self {
            kernel: kernel.to_owned(),
            block: [0; 3],
            thread: [0; 3],
            source: None,
            instruction,
            what,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (block, thread) = (self.block, self.thread);
        write!(f, "{}, block {block:?}, thread {thread:?}: ", self.kernel)?;
        write!(f, "{}\n  at {}", self.what, self.instruction)?;
        match &self.source {
            Some(source) => write!(f, "\n  of {source}"),
            None => Ok(()),
        }
    }
}
