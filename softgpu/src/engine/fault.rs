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

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kernel,
            block,
            thread,
            instruction,
            what,
            ..
        } = self;
        write!(
            f,
            "{kernel}, block {block:?}, thread {thread:?}: {what}\n  at {instruction}"
        )?;
        match &self.source {
            Some(source) => write!(f, "\n  of {source}"),
            None => Ok(()),
        }
    }
}
