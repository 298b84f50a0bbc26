//! PTX text to instructions.

/// A module as `cuModuleLoadData` takes it.
pub struct Module {}

impl Module {
    /// Parses PTX. An error names the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let _ = text;
        Err("not there yet".into())
    }

    /// Bytes and alignment of the module's global and constant variables, which live in one allocation of a device.
    pub fn globals(&self) -> (usize, usize) {
        (0, 1)
    }

    /// Their initial bytes, for a module loaded with its variables at `base`.
    pub fn initial_globals(&self, base: u64) -> Vec<u8> {
        let _ = base;
        vec![]
    }

    /// Offset and size of a global variable.
    pub fn global(&self, name: &str) -> Option<(usize, usize)> {
        let _ = name;
        None
    }

    /// Number of an entry.
    pub fn entry(&self, name: &str) -> Option<usize> {
        let _ = name;
        None
    }

    /// Sizes and offsets of an entry's parameters, in order.
    pub fn parameters(&self, entry: usize) -> Vec<(usize, usize)> {
        let _ = entry;
        vec![]
    }

    /// Bytes of static shared memory of an entry.
    pub fn static_shared(&self, entry: usize) -> usize {
        let _ = entry;
        0
    }

    /// Most threads that a block of an entry may have (`.maxntid`, else 1024).
    pub fn max_threads(&self, entry: usize) -> u32 {
        let _ = entry;
        1024
    }
}
