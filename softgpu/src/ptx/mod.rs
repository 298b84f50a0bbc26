//! PTX text to instructions.
//!
//! [`Module::parse`] finds the functions and variables. A function is decoded when it is first
//! launched.

pub(crate) mod decode;

use crate::alu::Exec;
use crate::counts::Class;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// A module as `cuModuleLoadData` takes it.
pub struct Module {
    text: String,
    files: HashMap<u32, String>,
    functions: Vec<Function>,
    /// Numbers of the functions that a host can launch.
    entries: Vec<usize>,
    variables: Vec<Variable>,
    globals: (usize, usize),
    programs: Vec<OnceLock<Result<Arc<Program>, String>>>,
}

/// A function as its header declares it.
struct Function {
    name: String,
    parameters: Vec<Parameter>,
    returns: Vec<Parameter>,
    /// Where the text between its braces is, and the number of its first line. None: it is only
    /// declared.
    body: Option<(Range<usize>, u32)>,
    max_threads: u32,
}

struct Parameter {
    name: String,
    offset: usize,
    size: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Parameter,
}

/// A variable of the module.
struct Variable {
    name: String,
    space: Space,
    align: usize,
    size: usize,
    /// In the module's allocation.
    offset: usize,
    dynamic: bool,
    initial: Vec<u8>,
    /// Where in its bytes the address of another variable goes, and how far behind its start.
    pointers: Vec<(usize, String, u64)>,
}

/// What a warp has to do for an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Arithmetic,
    Branch,
    Call,
    Return,
    Exit,
    Load,
    Store,
    Atomic,
    CopyParameter,
    CopyAsync,
    CommitGroup,
    WaitGroup,
    Shuffle,
    Vote,
    Match,
    ActiveMask,
    WarpBarrier,
    Barrier,
    Clock,
    Nothing,
    Assert,
    Unknown,
}

/// A decoded instruction. Operands are numbers of slots or predicates.
#[derive(Clone, Copy)]
pub struct Op {
    pub(crate) exec: Exec,
    pub(crate) immediate: u64,
    pub(crate) kind: Kind,
    pub(crate) class: Class,
    /// A lane takes part where this predicate differs from `flip`.
    pub(crate) guard: u16,
    pub(crate) flip: u32,
    pub(crate) d: u16,
    pub(crate) a: u16,
    pub(crate) b: u16,
    pub(crate) c: u16,
    pub(crate) more: [u16; 2],
    /// The instruction to go to, or the number of an [`Address`] or [`Copy`].
    pub(crate) target: u32,
    /// In the PTX text.
    pub(crate) line: u32,
}

/// The memory operand of an instruction, and the registers that go there.
pub(crate) struct Address {
    pub space: Space,
    /// Of one element.
    pub bytes: u32,
    pub count: u32,
    pub signed: bool,
    pub read_only: bool,
    /// The slot of the address, if a register is part of it.
    pub base: Option<u16>,
    pub wide: bool,
    pub offset: u64,
    pub registers: [u16; 4],
    /// Bits of each register.
    pub widths: [u8; 4],
    pub atomic: Option<Atomic>,
}

/// What an atomic instruction does, and to what type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Atomic {
    pub operation: Operation,
    pub ty: Scalar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareAndSwap,
    Increment,
    Decrement,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scalar {
    Unsigned,
    Signed,
    F16,
    Bf16,
    F16x2,
    Bf16x2,
    F32,
    F64,
}

/// A call's argument or result: bytes of a thread's own memory.
pub(crate) struct Copy {
    pub from: u32,
    pub to: u32,
    pub bytes: u32,
}

/// A value that does not change while a block runs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Value {
    Bits(u64),
    /// An address in the module's variables.
    Global(u64),
    /// An address behind the start of dynamic shared memory.
    DynamicShared(u64),
    /// The index of a thread, a block, or the size of either; the second number is the axis.
    Thread(u8),
    Threads(u8),
    Block(u8),
    Blocks(u8),
    Lane,
    Warp,
    Warps,
    LaneMask(LaneMask),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum LaneMask {
    Equal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

/// An entry with all that it calls, decoded.
pub(crate) struct Program {
    pub ops: Vec<Op>,
    pub addresses: Vec<Address>,
    pub copies: Vec<Copy>,
    /// What an unknown instruction, or a failed assertion, is told as.
    pub messages: Vec<String>,
    /// Where each instruction's text is.
    pub texts: Vec<Range<u32>>,
    /// File and line of each instruction's source; 0 if unknown.
    pub sources: Vec<(u32, u32)>,
    pub slots: usize,
    pub predicates: usize,
    /// Slots that are filled before a block runs, and whether they hold 64 bits.
    pub values: Vec<(Value, bool, u16)>,
    pub local_bytes: usize,
    pub shared_bytes: usize,
    pub dynamic_align: usize,
}

impl Program {
    /// Where dynamic shared memory starts.
    pub fn dynamic_start(&self) -> usize {
        self.shared_bytes.next_multiple_of(self.dynamic_align)
    }
}

impl Module {
    /// Parses PTX. An error names the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut module = Self {
            text: text.to_owned(),
            files: HashMap::new(),
            functions: vec![],
            entries: vec![],
            variables: vec![],
            globals: (0, 1),
            programs: vec![],
        };
        Scanner {
            text,
            at: 0,
            line: 1,
        }
        .module(&mut module)?;
        if module.functions.is_empty() && module.variables.is_empty() {
            return Err("this PTX has no function and no variable".into());
        }
        for variable in module
            .variables
            .iter_mut()
            .filter(|v| v.space == Space::Global)
        {
            let (size, align) = &mut module.globals;
            variable.offset = size.next_multiple_of(variable.align);
            *size = variable.offset + variable.size;
            *align = variable.align.max(*align);
        }
        module.programs = module.entries.iter().map(|_| OnceLock::new()).collect();
        Ok(module)
    }

    /// Bytes and alignment of the module's global and constant variables, which live in one
    /// allocation of a device.
    pub fn globals(&self) -> (usize, usize) {
        self.globals
    }

    /// Their initial bytes, for a module loaded with its variables at `base`.
    pub fn initial_globals(&self, base: u64) -> Vec<u8> {
        let mut bytes = vec![0; self.globals.0];
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
        self.entries
            .iter()
            .position(|&function| self.functions[function].name == name)
    }

    /// Names of the entries, by number.
    pub fn entries(&self) -> impl Iterator<Item = &str> {
        self.entries
            .iter()
            .map(|&function| self.functions[function].name.as_str())
    }

    /// Offsets and sizes of an entry's parameters, in order.
    pub fn parameters(&self, entry: usize) -> Vec<(usize, usize)> {
        let parameters = &self.functions[self.entries[entry]].parameters;
        parameters
            .iter()
            .map(|one| (one.offset, one.size))
            .collect()
    }

    /// Bytes of static shared memory of an entry; none if the entry cannot be decoded.
    pub fn static_shared(&self, entry: usize) -> usize {
        self.program(entry)
            .map_or(0, |program| program.shared_bytes)
    }

    /// Most threads that a block of an entry may have (`.maxntid`, else 1024).
    pub fn max_threads(&self, entry: usize) -> u32 {
        self.functions[self.entries[entry]].max_threads
    }

    /// Instructions of an entry that this decoder does not know. Only who executes one gets a
    /// fault.
    pub fn unknown(&self, entry: usize) -> Result<Vec<String>, String> {
        let program = self.program(entry)?;
        let unknown = program
            .ops
            .iter()
            .zip(&program.texts)
            .filter(|(op, _)| op.kind == Kind::Unknown);
        Ok(unknown
            .map(|(op, text)| format!("line {}: {}", op.line, self.text_of(text)))
            .collect())
    }

    pub(crate) fn program(&self, entry: usize) -> Result<Arc<Program>, String> {
        self.programs[entry]
            .get_or_init(|| decode::program(self, self.entries[entry]).map(Arc::new))
            .clone()
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
        &self.functions[self.entries[entry]].name
    }

    pub(crate) fn parameter_bytes(&self, entry: usize) -> usize {
        let parameters = &self.functions[self.entries[entry]].parameters;
        parameters
            .iter()
            .map(|one| one.offset + one.size)
            .max()
            .unwrap_or(0)
    }
}

/// The text without the `k`-th statement, counted from 0, whose opcode starts with `opcode`
/// (`bar.sync`, `cp.async.wait_group`). Plants a fault.
pub fn without_statement(text: &str, opcode: &str, k: usize) -> Option<String> {
    let mut seen = 0;
    let mut at = 0;
    while let Some(found) = text[at..].find(opcode) {
        let start = at + found;
        let line = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let before = text[line..start].trim();
        let end = start + text[start..].find(';')? + 1;
        if before.is_empty() || before.starts_with('@') {
            if seen == k {
                let from = line + text[line..start].len() - text[line..start].trim_start().len();
                return Some(format!("{}{}", &text[..from], &text[end..]));
            }
            seen += 1;
        }
        at = end;
    }
    None
}

/// Walks over the text outside of functions.
struct Scanner<'a> {
    text: &'a str,
    at: usize,
    line: u32,
}

impl<'a> Scanner<'a> {
    fn module(&mut self, module: &mut Module) -> Result<(), String> {
        loop {
            self.skip_space();
            let rest = &self.text[self.at..];
            if rest.is_empty() {
                return Ok(());
            }
            if rest.starts_with(".file") {
                let line = self.take_line();
                let mut words = line.split_whitespace().skip(1);
                if let (Some(number), Some(_)) =
                    (words.next().and_then(|n| n.parse().ok()), words.next())
                {
                    let name = line.split('"').nth(1).unwrap_or("");
                    module.files.insert(number, name.to_owned());
                }
            } else if [".version", ".target", ".address_size", ".loc"]
                .iter()
                .any(|word| rest.starts_with(word))
            {
                self.take_line();
            } else if rest.starts_with(".section") {
                self.take_until(b"{");
                self.take_body()?;
            } else if rest.starts_with('.') {
                self.declaration(module)?;
            } else {
                return Err(format!(
                    "line {}: what is {:?}?",
                    self.line,
                    first_line(rest)
                ));
            }
        }
    }

    fn declaration(&mut self, module: &mut Module) -> Result<(), String> {
        let line = self.line;
        let keywords = &self.text[self.at..];
        let function = {
            let end = keywords
                .find(['{', ';', '(', '='])
                .unwrap_or(keywords.len());
            let words = &keywords[..end];
            words
                .split_whitespace()
                .any(|word| word == ".entry" || word == ".func")
        };
        if !function {
            let text = self.take_until(b";");
            if text.trim_start().starts_with(".pragma") {
                return Ok(());
            }
            let variable = variable(text).map_err(|what| format!("line {line}: {what}"))?;
            module.variables.push(variable);
            return Ok(());
        }
        let header = self.take_until_any(b"{;");
        let mut function = header_of(header)
            .ok_or_else(|| format!("line {line}: a function's header is not understood"))?;
        if self.text.as_bytes()[self.at - 1] == b'{' {
            let line = self.line;
            function.body = Some((self.take_body()?, line));
        }
        // A declaration may stand before its definition.
        if let Some(known) = module
            .functions
            .iter_mut()
            .find(|known| known.name == function.name)
        {
            if function.body.is_some() {
                *known = function;
            }
            return Ok(());
        }
        if header.contains(".entry") {
            module.entries.push(module.functions.len());
        }
        module.functions.push(function);
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
            } else if bytes[self.at..].starts_with(b"//") {
                self.take_line();
            } else if bytes[self.at..].starts_with(b"/*") {
                let end = self.text[self.at..]
                    .find("*/")
                    .map_or(bytes.len(), |end| self.at + end + 2);
                self.move_to(end);
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

    /// The text up to a byte, which is passed over.
    fn take_until(&mut self, byte: &[u8; 1]) -> &'a str {
        self.take_until_any(byte)
    }

    fn take_until_any(&mut self, bytes: &[u8]) -> &'a str {
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
                b'/' if bytes.get(at + 1) == Some(&b'/') => {
                    at += self.text[at..].find('\n').unwrap_or(bytes.len() - at);
                    continue;
                }
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

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or("")
}

/// Bytes of a type such as `.b32`.
fn type_bytes(ty: &str) -> Option<usize> {
    let digits = ty.trim_start_matches(|c: char| !c.is_ascii_digit());
    let bits: usize = digits.parse().ok()?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// `.param .align 8 .b8 name[192]`, without what comes before the type: its name, alignment and
/// bytes.
fn declared(text: &str) -> Option<(&str, usize, usize, usize)> {
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
fn number(text: &str, wide: bool) -> Option<u64> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest.trim()),
        None => (false, text),
    };
    let first = digits.as_bytes().first()?;
    if !first.is_ascii_digit() {
        return None;
    }
    let lower = digits.get(..2).unwrap_or("");
    let sign = |bits: u64, top: u32| if negative { bits ^ 1 << top } else { bits };
    match lower {
        "0f" | "0F" => {
            return Some(sign(
                u64::from(u32::from_str_radix(&digits[2..], 16).ok()?),
                31,
            ))
        }
        "0d" | "0D" => return Some(sign(u64::from_str_radix(&digits[2..], 16).ok()?, 63)),
        _ => {}
    }
    let bare = digits.strip_suffix('U').unwrap_or(digits);
    let value = match lower {
        "0x" | "0X" => u64::from_str_radix(&bare[2..], 16).ok(),
        "0b" | "0B" => u64::from_str_radix(&bare[2..], 2).ok(),
        _ => bare.parse().ok(),
    };
    match value {
        Some(value) => Some(if negative {
            value.wrapping_neg()
        } else {
            value
        }),
        None => {
            let value: f64 = text.parse().ok()?;
            Some(if wide {
                value.to_bits()
            } else {
                u64::from((value as f32).to_bits())
            })
        }
    }
}

fn header_of(text: &str) -> Option<Function> {
    let (_, rest) = text
        .split_once(".entry")
        .or_else(|| text.split_once(".func"))?;
    let mut rest = rest.trim_start();
    let mut returns = vec![];
    if let Some(inner) = rest.strip_prefix('(') {
        let (list, after) = inner.split_once(')')?;
        returns = parameters(list)?;
        rest = after.trim_start();
    }
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
    Some(Function {
        name,
        parameters: own,
        returns,
        body: None,
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
