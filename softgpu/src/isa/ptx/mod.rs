//! PTX text to instructions.
//!
//! [`Module::parse`] finds the entries and variables. An entry is decoded when it is first
//! launched.

mod decode;
mod source;

use crate::isa::op::{Kind, Program};
use source::Source;
use std::ops::{Deref, Range};
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

    /// Bytes of local memory of a thread that an entry declares; none if the entry cannot be
    /// decoded.
    pub fn local_bytes(&self, entry: usize) -> usize {
        self.program(entry).map_or(0, |program| program.local_bytes)
    }

    /// The instructions of an entry that are not known, each with its line, or why the entry cannot
    /// be decoded.
    pub fn unknown(&self, entry: usize) -> Vec<String> {
        let program = match self.program(entry) {
            Ok(program) => program,
            Err(error) => return vec![error],
        };
        let all = program.ops.iter().zip(&program.texts);
        all.filter(|(op, _)| op.kind == Kind::Unknown)
            .map(|(op, text)| format!("line {}: {} is unknown", op.line, self.text_of(text)))
            .collect()
    }

    /// The forms of an entry's instructions, in order, as in `add.f32`. A `mov` of halves is
    /// `mov.b64 packs` or `mov.b64 unpacks`.
    pub fn forms(&self, entry: usize) -> Vec<String> {
        let Ok(program) = self.program(entry) else {
            return vec![];
        };
        let mut texts = program.texts.clone();
        // One instruction may have become several.
        texts.dedup();
        texts.iter().map(|range| self.form_of(range)).collect()
    }

    fn form_of(&self, range: &Range<u32>) -> String {
        let text = self.text_of(range);
        let unguarded = match text.strip_prefix('@') {
            Some(guarded) => guarded.split_once(' ').map_or("", |(_, rest)| rest),
            None => &text,
        };
        let (name, operands) = unguarded.split_once(' ').unwrap_or((unguarded, ""));
        match (name.starts_with("mov."), operands.find('{')) {
            (true, Some(0)) => format!("{name} unpacks"),
            (true, Some(_)) => format!("{name} packs"),
            _ => name.to_owned(),
        }
    }

    pub(crate) fn program(&self, entry: usize) -> Result<Arc<Program>, String> {
        self.programs[entry]
            .get_or_init(|| decode::program(&self.source, entry).map(Arc::new))
            .clone()
    }
}
