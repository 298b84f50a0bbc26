//! The text of a PTX module: its functions and variables.

use crate::isa::op::{Space, bits_of};
use std::collections::HashMap;
use std::ops::Range;

/// A module's text, and what is found in it before a function is decoded.
#[derive(Default)]
pub struct Source {
    pub(super) text: String,
    pub(super) files: HashMap<u32, String>,
    pub(super) entries: Vec<Entry>,
    pub(super) variables: Vec<Variable>,
    pub(super) globals: usize,
    /// The operand of `.target`, such as `sm_90`, and its line.
    pub(super) target: (String, u32),
}

impl Source {
    /// Parses PTX. An error names the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = without_comments(text);
        let mut source = Self::default();
        Scanner {
            text: &text,
            at: 0,
            line: 1,
        }
        .source(&mut source)?;
        source.text = text;
        if source.entries.is_empty() && source.variables.is_empty() {
            return Err("this PTX has no function and no variable".into());
        }
        let variables = source.variables.iter_mut();
        for variable in variables.filter(|variable| variable.space == Space::Global) {
            variable.offset = source.globals.next_multiple_of(variable.align);
            source.globals = variable.offset + variable.size;
        }
        Ok(source)
    }

    /// The architecture that it was compiled for, as in `sm_90`, and the line that says so.
    pub fn target(&self) -> (&str, u32) {
        (&self.target.0, self.target.1)
    }

    /// Bytes of the module's global and constant variables, which live in one allocation of a
    /// device.
    pub fn globals(&self) -> usize {
        self.globals
    }

    /// Their initial bytes, for a module loaded with its variables at `base`.
    pub fn initial_globals(&self, base: u64) -> Vec<u8> {
        let mut bytes = vec![0; self.globals];
        for variable in self.variables.iter().filter(|v| v.space == Space::Global) {
            bytes[variable.offset..][..variable.initial.len()].copy_from_slice(&variable.initial);
            for (at, name, plus) in &variable.pointers {
                let address = self
                    .global(name)
                    .map_or(0, |(offset, _)| base + offset as u64 + plus);
                bytes[variable.offset + at..][..8].copy_from_slice(&address.to_le_bytes());
            }
        }
        bytes
    }

    /// Offset and size of a global variable.
    pub fn global(&self, name: &str) -> Option<(usize, usize)> {
        self.variables
            .iter()
            .find(|variable| variable.space == Space::Global && variable.name == name)
            .map(|variable| (variable.offset, variable.size))
    }

    /// Number of an entry.
    pub fn entry(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.name == name)
    }

    /// Names of the entries, by number.
    pub fn entries(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.name.as_str())
    }

    /// Offsets and sizes of an entry's parameters, in order.
    pub fn parameters(&self, entry: usize) -> Vec<(usize, usize)> {
        let all = self.entries[entry].parameters.iter();
        all.map(|one| (one.offset, one.size)).collect()
    }

    /// Most threads that a block of an entry may have (`.maxntid`, else 1024).
    pub fn max_threads(&self, entry: usize) -> u32 {
        self.entries[entry].max_threads
    }

    /// An instruction's text on one line.
    pub(crate) fn text_of(&self, range: &Range<u32>) -> String {
        let text = &self.text[range.start as usize..range.end as usize];
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    pub(crate) fn source_of(&self, (file, line): (u32, u32)) -> Option<String> {
        let name = self.files.get(&file)?;
        Some(format!("{name}:{line}"))
    }

    pub(crate) fn name_of(&self, entry: usize) -> &str {
        &self.entries[entry].name
    }

    pub(crate) fn parameter_bytes(&self, entry: usize) -> usize {
        let all = self.entries[entry].parameters.iter();
        all.map(|one| one.offset + one.size).max().unwrap_or(0)
    }
}

/// A function that a host can launch.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) parameters: Vec<Parameter>,
    /// The text between its braces is here.
    pub(super) body: Range<usize>,
    /// Number of the body's first line.
    pub(super) line: u32,
    pub(super) max_threads: u32,
}

pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) offset: usize,
    pub(super) size: usize,
}

/// A variable of the module.
pub(super) struct Variable {
    pub(super) name: String,
    pub(super) space: Space,
    pub(super) align: usize,
    pub(super) size: usize,
    /// In the module's allocation.
    pub(super) offset: usize,
    pub(super) dynamic: bool,
    pub(super) initial: Vec<u8>,
    /// Places in its bytes for the address of another variable, and the distance behind its start.
    pub(super) pointers: Vec<(usize, String, u64)>,
}

/// Walks over the text outside of functions.
struct Scanner<'a> {
    text: &'a str,
    at: usize,
    line: u32,
}

impl<'a> Scanner<'a> {
    fn source(&mut self, source: &mut Source) -> Result<(), String> {
        loop {
            self.skip_space();
            let rest = &self.text[self.at..];
            if rest.is_empty() {
                return Ok(());
            }
            match rest.split_whitespace().next().unwrap_or("") {
                ".file" => {
                    let line = self.take_line();
                    let number = line.split_whitespace().nth(1).map(str::parse);
                    if let (Some(Ok(number)), Some(name)) = (number, line.split('"').nth(1)) {
                        source.files.insert(number, name.to_owned());
                    }
                }
                ".target" => {
                    let number = self.line;
                    let text = self.take_line().trim_start_matches(".target");
                    let first = text.split(',').next().unwrap_or("");
                    source.target = (first.trim().to_owned(), number);
                }
                ".version" | ".address_size" | ".loc" => {
                    self.take_line();
                }
                ".section" => {
                    self.take_until(b"{");
                    self.take_body()?;
                }
                word if word.starts_with('.') => self.declaration(source)?,
                _ => {
                    let (line, first) = (self.line, first_line(rest));
                    return Err(format!("line {line}: what is {first:?}?"));
                }
            }
        }
    }

    fn declaration(&mut self, source: &mut Source) -> Result<(), String> {
        let line = self.line;
        let keywords = self.text[self.at..].split(['{', ';', '(', '=']).next();
        let mut words = keywords.unwrap_or("").split_whitespace();
        if !words.any(|word| word == ".entry" || word == ".func") {
            let text = self.take_until(b";");
            if text.trim_start().starts_with(".pragma") {
                return Ok(());
            }
            let variable = variable(text).map_err(|what| format!("line {line}: {what}"))?;
            source.variables.push(variable);
            return Ok(());
        }
        let header = self.take_until(b"{;");
        if self.text.as_bytes()[self.at - 1] == b';' {
            return Ok(());
        }
        let first_line = self.line;
        let body = self.take_body()?;
        // Other functions are called where an assertion fails, or not at all.
        if header.contains(".entry") {
            let entry = entry_of(header, body, first_line)
                .ok_or_else(|| format!("line {line}: an entry's header is not understood"))?;
            source.entries.push(entry);
        }
        Ok(())
    }

    fn skip_space(&mut self) {
        let bytes = self.text.as_bytes();
        while let Some(&byte) = bytes.get(self.at) {
            if byte == b'\n' {
                self.line += 1;
                self.at += 1;
            } else if byte.is_ascii_whitespace() || byte == b';' {
                self.at += 1;
            } else {
                return;
            }
        }
    }

    fn move_to(&mut self, end: usize) -> &'a str {
        let text = &self.text[self.at..end];
        self.line += text.bytes().filter(|byte| *byte == b'\n').count() as u32;
        self.at = end;
        text
    }

    fn take_line(&mut self) -> &'a str {
        let end = self.text[self.at..]
            .find('\n')
            .map_or(self.text.len(), |end| self.at + end);
        self.move_to(end)
    }

    /// The text up to any of the bytes, which is passed over.
    fn take_until(&mut self, bytes: &[u8]) -> &'a str {
        let rest = &self.text.as_bytes()[self.at..];
        let length = rest
            .iter()
            .position(|byte| bytes.contains(byte))
            .unwrap_or(rest.len());
        let text = self.move_to(self.at + length);
        self.at = (self.at + 1).min(self.text.len());
        text
    }

    /// The text up to the brace that closes the one just passed.
    fn take_body(&mut self) -> Result<Range<usize>, String> {
        let bytes = self.text.as_bytes();
        let (start, line) = (self.at, self.line);
        let mut depth = 1;
        let mut at = start;
        while at < bytes.len() {
            match bytes[at] {
                b'{' => depth += 1,
                b'}' => depth -= 1,
                b'"' => at += 1 + self.text[at + 1..].find('"').unwrap_or(0),
                _ => {}
            }
            if depth == 0 {
                self.move_to(at + 1);
                return Ok(start..at);
            }
            at += 1;
        }
        Err(format!("line {line}: no brace closes what begins here"))
    }
}

/// The text with spaces in place of comments, on the same lines.
fn without_comments(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut left = text;
    while let Some(at) = left.find(['"', '/']) {
        let (before, rest) = left.split_at(at);
        let after = |from: usize, end: &str| rest[from..].find(end).map(|at| from + at);
        let (length, comment) = match rest.as_bytes() {
            [b'/', b'/', ..] => (after(2, "\n"), true),
            [b'/', b'*', ..] => (after(2, "*/").map(|end| end + 2), true),
            [b'"', ..] => (after(1, "\"").map(|end| end + 1), false),
            _ => (Some(1), false),
        };
        let (part, rest) = rest.split_at(length.unwrap_or(rest.len()));
        kept.push_str(before);
        match comment {
            true => kept.extend(part.chars().map(|c| if c == '\n' { c } else { ' ' })),
            false => kept.push_str(part),
        }
        left = rest;
    }
    kept + left
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or("")
}

/// Bytes of a type such as `.b32`.
fn type_bytes(ty: &str) -> Option<usize> {
    let bits = usize::from(bits_of(ty)?);
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// `.param .align 8 .b8 name[192]`, without what comes before the type: its name, alignment and
/// bytes.
pub(super) fn declared(text: &str) -> Option<(&str, usize, usize, usize)> {
    let mut align = None;
    let mut element = None;
    let mut words = text.split_whitespace().peekable();
    let mut name = "";
    while let Some(word) = words.next() {
        match word {
            ".align" => align = words.next()?.parse().ok(),
            ".ptr" => {}
            _ if !word.starts_with('.') => {
                name = word;
                break;
            }
            // `.param`, `.global` and the space a pointer points to have no number in them.
            _ => element = type_bytes(word).or(element),
        }
    }
    let rest: String = words.collect();
    let whole = format!("{name}{rest}");
    let bare = name.split('[').next()?;
    let element = element?;
    let mut count = 1;
    for length in whole.split('[').skip(1) {
        let length = length.split(']').next()?.trim();
        count *= if length.is_empty() {
            0
        } else {
            length.parse::<usize>().ok()?
        };
    }
    Some((bare, align.unwrap_or(element), element * count, element))
}

fn variable(text: &str) -> Result<Variable, String> {
    let bad = || format!("a variable is not understood: {}", first_line(text));
    let (left, right) = match text.split_once('=') {
        Some((left, right)) => (left, Some(right)),
        None => (text, None),
    };
    let (name, align, mut size, element) = declared(left).ok_or_else(bad)?;
    let shared = left
        .split_whitespace()
        .any(|word| word.starts_with(".shared"));
    let dynamic = shared && left.contains(".extern");
    let mut initial = vec![];
    let mut pointers = vec![];
    for item in right
        .unwrap_or("")
        .split(['{', '}', ','])
        .map(str::trim)
        .filter(|item| !item.is_empty())
    {
        let bits = match number(item, element == 8) {
            Some(bits) => bits,
            None => {
                let item = item.trim_start_matches("generic(").trim_end_matches(')');
                let (symbol, plus) = item.split_once('+').unwrap_or((item, "0"));
                pointers.push((
                    initial.len(),
                    symbol.trim().trim_end_matches(')').to_owned(),
                    plus.trim().parse().map_err(|_| bad())?,
                ));
                0
            }
        };
        initial.extend_from_slice(&bits.to_le_bytes()[..element]);
    }
    size = size.max(initial.len());
    Ok(Variable {
        name: name.to_owned(),
        space: if shared { Space::Shared } else { Space::Global },
        align,
        size,
        offset: 0,
        dynamic,
        initial,
        pointers,
    })
}

/// An immediate's bits; a decimal fraction becomes f64 if `wide` and f32 else.
pub(super) fn number(text: &str, wide: bool) -> Option<u64> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest.trim()),
        None => (false, text),
    };
    if !digits.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    let bare = digits.strip_suffix('U').unwrap_or(digits);
    let after_prefix = |radix| u64::from_str_radix(bare.get(2..)?, radix).ok();
    let sign = |top: u32| u64::from(negative) << top;
    let value = match bare.get(..2).unwrap_or("") {
        "0f" | "0F" => return Some(after_prefix(16)? ^ sign(31)),
        "0d" | "0D" => return Some(after_prefix(16)? ^ sign(63)),
        "0x" | "0X" => after_prefix(16),
        "0b" | "0B" => after_prefix(2),
        // An octal number, or zero.
        _ if bare.starts_with('0') && bare.bytes().all(|byte| byte.is_ascii_digit()) => {
            Some(u64::from_str_radix(bare, 8).ok()?)
        }
        _ => bare.parse().ok(),
    };
    Some(match value {
        Some(value) if negative => value.wrapping_neg(),
        Some(value) => value,
        None => {
            let value: f64 = text.parse().ok()?;
            match wide {
                true => value.to_bits(),
                false => u64::from((value as f32).to_bits()),
            }
        }
    })
}

fn entry_of(text: &str, body: Range<usize>, line: u32) -> Option<Entry> {
    let (_, rest) = text.split_once(".entry")?;
    let rest = rest.trim_start();
    let end = rest
        .find(|c: char| c == '(' || c.is_whitespace())
        .unwrap_or(rest.len());
    let name = rest[..end].to_owned();
    let mut after = rest[end..].trim_start();
    let mut own = vec![];
    if let Some(inner) = after.strip_prefix('(') {
        let (list, directives) = inner.split_once(')')?;
        own = parameters(list)?;
        after = directives;
    }
    let mut max_threads = 1024;
    for directive in [".maxntid", ".reqntid"] {
        if let Some((_, numbers)) = after.split_once(directive) {
            let numbers = numbers.split('.').next()?.trim();
            max_threads = numbers
                .split(',')
                .map(|n| n.trim().parse::<u32>().unwrap_or(1))
                .product();
        }
    }
    Some(Entry {
        name,
        parameters: own,
        body,
        line,
        max_threads,
    })
}

fn parameters(list: &str) -> Option<Vec<Parameter>> {
    let mut offset = 0;
    let mut all = vec![];
    for text in list
        .split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty())
    {
        let (name, align, size, element) = match text.split_once(".ptr") {
            // The alignment that follows is what the pointer points to has.
            Some((own, after)) => {
                let name = after.split_whitespace().last()?;
                let element = type_bytes(own.split_whitespace().last()?)?;
                (name, element, element, element)
            }
            None => declared(text)?,
        };
        let align = align.max(element);
        offset = usize::next_multiple_of(offset, align);
        all.push(Parameter {
            name: name.to_owned(),
            offset,
            size,
        });
        offset += size;
    }
    Some(all)
}
