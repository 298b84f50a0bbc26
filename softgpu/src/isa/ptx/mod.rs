//! PTX text to instructions.
//!
//! [`Module::parse`] finds the entries and variables. An entry is decoded when it is first
//! launched.

mod decode;
mod source;

use crate::isa::op::{Kind, Program};
use source::Source;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

/// A module as `cuModuleLoadData` takes it.
pub struct Module {
    source: Source,
    programs: Vec<OnceLock<Result<Arc<Program>, String>>>,
}

impl Deref for Module {
    type Target = Source;

    fn deref(&self) -> &Source {
        &self.source
    }
}

impl Module {
    /// Parses PTX. An error names the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let source = Source::parse(text)?;
        let programs = source.entries.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { source, programs })
    }

    /// Bytes of static shared memory of an entry; none if the entry cannot be decoded.
    pub fn static_shared(&self, entry: usize) -> usize {
        self.program(entry)
            .map_or(0, |program| program.shared_bytes)
    }

    /// Each instruction that is not known, with its entry and line, or why an entry has none.
    pub fn unknown(&self) -> Vec<String> {
        let mut all = vec![];
        for (entry, name) in self.entries().enumerate() {
            let program = match self.program(entry) {
                Ok(program) => program,
                Err(error) => return vec![error],
            };
            for (op, text) in program.ops.iter().zip(&program.texts) {
                if op.kind == Kind::Unknown {
                    all.push(format!("{name}, line {}: {}", op.line, self.text_of(text)));
                }
            }
        }
        all
    }

    pub(crate) fn program(&self, entry: usize) -> Result<Arc<Program>, String> {
        self.programs[entry]
            .get_or_init(|| decode::program(&self.source, entry).map(Arc::new))
            .clone()
    }
}
