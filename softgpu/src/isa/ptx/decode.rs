//! A function's text to instructions.

use super::source::{declared, number, type_bytes, Entry, Source};
use crate::isa::alu;
use crate::isa::op::*;
use std::collections::HashMap;
use std::ops::Range;

/// A predicate that holds in every lane, and one that nobody reads.
const ALWAYS: u16 = 0;

const SINK: u16 = 1;

/// Slots that nobody reads; two, for 64 bits.
const SINK_SLOT: u16 = 0;

/// Decodes an entry.
pub(super) fn program(source: &Source, entry: usize) -> Result<Program, String> {
    let mut decoder = Decoder {
        module: source,
        program: Program {
            ops: vec![],
            addresses: vec![],
            messages: vec![],
            texts: vec![],
            sources: vec![],
            slots: 2,
            predicates: 2,
            values: vec![],
            local_bytes: 0,
            shared_bytes: 0,
            dynamic_align: 16,
        },
        known_values: HashMap::new(),
        shared: HashMap::new(),
        registers: vec![],
        memory: vec![],
        scopes: vec![],
        labels: vec![],
        jumps: vec![],
        guard: (ALWAYS, 0),
        source: (0, 0),
        line: 0,
        text: 0..0,
        entry,
    };
    decoder.entry()?;
    let program = decoder.program;
    if program.slots >= 0xffff || program.predicates >= 0xffff {
        return Err(format!(
            "{} has too many registers",
            source.entries[entry].name
        ));
    }
    Ok(program)
}

#[derive(Clone, Copy)]
struct Register {
    number: u16,
    /// 1 for a predicate.
    bits: u8,
}

struct Declaration<'a> {
    name: &'a str,
    first: Register,
    /// `%r<8>` declares `%r0` to `%r7`.
    count: Option<u32>,
}

/// A variable of a thread's own memory: `.local`, or a parameter of a call.
struct Own<'a> {
    name: &'a str,
    offset: u32,
}

/// Declarations from here on end with the scope.
struct Scope {
    registers: usize,
    memory: usize,
    labels: usize,
    jumps: usize,
}

struct Decoder<'a> {
    module: &'a Source,
    program: Program,
    known_values: HashMap<(Value, bool), u16>,
    shared: HashMap<&'a str, u32>,
    registers: Vec<Declaration<'a>>,
    memory: Vec<Own<'a>>,
    scopes: Vec<Scope>,
    labels: Vec<(&'a str, u32)>,
    jumps: Vec<(&'a str, usize)>,
    guard: (u16, u32),
    source: (u32, u32),
    line: u32,
    text: Range<u32>,
    entry: usize,
}

/// The meaning of a symbol.
enum Symbol {
    Value(Value),
    Offset(Space, u64),
}

unsafe fn no_arithmetic(_: &mut Lanes, _: &Op, _: u32) {}

impl<'a> Decoder<'a> {
    fn entry(&mut self) -> Result<(), String> {
        let module = self.module;
        let Entry {
            name, body, line, ..
        } = &module.entries[self.entry];
        self.line = *line;
        self.open_scope();
        self.statements(body.clone())?;
        self.close_scope();
        if let Some((label, _)) = self.jumps.pop() {
            return Err(format!("{name}: there is no label {label}"));
        }
        // A body may end without `ret`.
        self.guard = (ALWAYS, 0);
        self.leave();
        Ok(())
    }

    fn open_scope(&mut self) {
        self.scopes.push(Scope {
            registers: self.registers.len(),
            memory: self.memory.len(),
            labels: self.labels.len(),
            jumps: self.jumps.len(),
        });
    }

    fn close_scope(&mut self) {
        let Some(scope) = self.scopes.pop() else {
            return;
        };
        self.registers.truncate(scope.registers);
        self.memory.truncate(scope.memory);
        let labels: HashMap<&str, u32> = self.labels.drain(scope.labels..).collect();
        let ops = &mut self.program.ops;
        let mut kept = scope.jumps;
        for index in scope.jumps..self.jumps.len() {
            let (label, op) = self.jumps[index];
            match labels.get(label) {
                Some(&target) => ops[op].target = target,
                None => {
                    self.jumps[kept] = (label, op);
                    kept += 1;
                }
            }
        }
        self.jumps.truncate(kept);
    }

    fn statements(&mut self, body: Range<usize>) -> Result<(), String> {
        let text: &'a str = &self.module.text;
        let bytes = text.as_bytes();
        let mut at = body.start;
        while at < body.end {
            let byte = bytes[at];
            match byte {
                b'\n' => {
                    self.line += 1;
                    at += 1;
                }
                b'{' => {
                    self.open_scope();
                    at += 1;
                }
                b'}' => {
                    self.close_scope();
                    at += 1;
                }
                b';' => at += 1,
                _ if byte.is_ascii_whitespace() => at += 1,
                _ if bytes[at..].starts_with(b".loc")
                    && bytes.get(at + 4).is_some_and(u8::is_ascii_whitespace) =>
                {
                    let end = text[at..body.end]
                        .find('\n')
                        .map_or(body.end, |end| at + end);
                    let mut words = text[at..end]
                        .split_whitespace()
                        .skip(1)
                        .map(|word| word.parse().unwrap_or(0));
                    self.source = (words.next().unwrap_or(0), words.next().unwrap_or(0));
                    at = end;
                }
                _ => {
                    let length = bytes[at..body.end]
                        .iter()
                        .position(|byte| *byte == b';' || *byte == b':')
                        .unwrap_or(body.end - at);
                    let mut end = at + length;
                    // `::` is part of a modifier.
                    while bytes.get(end) == Some(&b':') && bytes.get(end + 1) == Some(&b':') {
                        let more = bytes[end + 2..body.end]
                            .iter()
                            .position(|byte| *byte == b';' || *byte == b':');
                        end = end + 2 + more.unwrap_or(body.end - end - 2);
                    }
                    let statement = &text[at..end];
                    if bytes.get(end) == Some(&b':') {
                        self.labels
                            .push((statement.trim(), self.program.ops.len() as u32));
                    } else {
                        self.text = at as u32..end as u32;
                        self.statement(statement)?;
                    }
                    self.line += statement.bytes().filter(|byte| *byte == b'\n').count() as u32;
                    at = end + 1;
                }
            }
        }
        Ok(())
    }

    fn statement(&mut self, text: &'a str) -> Result<(), String> {
        if text.starts_with('.') {
            return self
                .directive(text)
                .ok_or_else(|| self.not_understood(text));
        }
        let mut rest = text.trim();
        self.guard = (ALWAYS, 0);
        if let Some(guarded) = rest.strip_prefix('@') {
            let (name, after) = guarded
                .split_once(char::is_whitespace)
                .ok_or_else(|| self.not_understood(text))?;
            let (name, flip) = match name.strip_prefix('!') {
                Some(name) => (name, !0),
                None => (name, 0),
            };
            let register = self
                .register(name)
                .ok_or_else(|| self.not_understood(text))?;
            self.guard = (register.number, flip);
            rest = after.trim_start();
        }
        let (mnemonic, operands) = rest
            .split_once(|c: char| c.is_whitespace())
            .unwrap_or((rest, ""));
        let operands = split(operands);
        let before = self.program.ops.len();
        if self.instruction(mnemonic, &operands).is_none() {
            self.program.ops.truncate(before);
            self.program.texts.truncate(before);
            self.program.sources.truncate(before);
            self.jumps.retain(|(_, op)| *op < before);
            self.message(
                Kind::Unknown,
                format!("softgpu does not know the instruction {mnemonic}"),
            );
        }
        Ok(())
    }

    fn not_understood(&self, text: &str) -> String {
        format!("line {}: not understood: {}", self.line, text.trim())
    }

    fn directive(&mut self, text: &'a str) -> Option<()> {
        let word = text.split_whitespace().next()?;
        let word = word.split('.').nth(1).map_or(word, |first| first);
        match word {
            "reg" => {
                let rest = text[4..].trim_start();
                let (ty, names) = rest.split_once(char::is_whitespace)?;
                let bits = match ty {
                    ".pred" => 1,
                    _ => (type_bytes(ty)? * 8) as u8,
                };
                for name in names.split(',').map(str::trim) {
                    let (name, count) = match name.split_once('<') {
                        Some((name, count)) => {
                            (name, Some(count.trim_end_matches('>').trim().parse().ok()?))
                        }
                        None => (name, None),
                    };
                    let first = self.program.reserve(bits, count.unwrap_or(1))?;
                    self.registers.push(Declaration { name, first, count });
                }
            }
            "local" | "param" => {
                let (name, align, bytes, _) = declared(text)?;
                let offset = self.program.reserve_local(bytes, align);
                self.memory.push(Own { name, offset });
            }
            "shared" => {
                let (name, align, bytes, _) = declared(text)?;
                let offset = self.program.reserve_shared(bytes, align);
                self.shared.insert(name, offset);
            }
            "pragma" => {}
            _ => return None,
        }
        Some(())
    }

    fn register(&self, name: &str) -> Option<Register> {
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let (prefix, number) = name.split_at(name.len() - digits);
        let number: Option<u32> = number.parse().ok();
        for declaration in self.registers.iter().rev() {
            match (declaration.count, number) {
                (None, _) if declaration.name == name => return Some(declaration.first),
                (Some(count), Some(number)) if declaration.name == prefix && number < count => {
                    let Register {
                        number: first,
                        bits,
                    } = declaration.first;
                    let step = if bits == 64 { 2 } else { 1 };
                    return Some(Register {
                        number: first + number as u16 * step,
                        bits,
                    });
                }
                _ => {}
            }
        }
        None
    }

    fn push(&mut self, op: Op) {
        self.program.ops.push(op);
        self.program.texts.push(self.text.clone());
        self.program.sources.push(self.source);
    }

    /// An instruction without operands yet.
    fn op(&self, kind: Kind, class: Class) -> Op {
        Op {
            exec: no_arithmetic,
            immediate: 0,
            kind,
            class,
            guard: self.guard.0,
            flip: self.guard.1,
            d: SINK_SLOT,
            a: 0,
            b: 0,
            c: 0,
            e: 0,
            p: SINK,
            target: 0,
            line: self.line,
        }
    }

    fn message(&mut self, kind: Kind, message: String) {
        let target = self.program.messages.len() as u32;
        self.program.messages.push(message);
        let op = self.op(kind, Class::Control);
        self.push(Op { target, ..op });
    }

    fn leave(&mut self) {
        let op = self.op(Kind::Exit, Class::Control);
        self.push(op);
    }

    /// A slot with a value that lasts a block.
    fn value(&mut self, value: Value, wide: bool) -> Option<u16> {
        if let Some(&slot) = self.known_values.get(&(value, wide)) {
            return Some(slot);
        }
        let slot = self.program.reserve(if wide { 64 } else { 32 }, 1)?.number;
        self.known_values.insert((value, wide), slot);
        self.program.values.push((value, wide, slot));
        Some(slot)
    }

    fn symbol(&mut self, name: &str) -> Option<Symbol> {
        if let Some(own) = self.memory.iter().rev().find(|own| own.name == name) {
            return Some(Symbol::Offset(Space::Local, u64::from(own.offset)));
        }
        let module = self.module;
        let parameters = &module.entries[self.entry].parameters;
        if let Some(parameter) = parameters.iter().find(|parameter| parameter.name == name) {
            return Some(Symbol::Offset(Space::Parameter, parameter.offset as u64));
        }
        if let Some(&offset) = self.shared.get(name) {
            return Some(Symbol::Offset(Space::Shared, u64::from(offset)));
        }
        let variable = module
            .variables
            .iter()
            .find(|variable| variable.name == name)?;
        Some(match variable.space {
            Space::Shared if variable.dynamic => {
                let align = &mut self.program.dynamic_align;
                *align = variable.align.max(*align);
                Symbol::Value(Value::DynamicShared(0))
            }
            Space::Shared => {
                let offset = self.program.reserve_shared(variable.size, variable.align);
                self.shared.insert(&variable.name, offset);
                Symbol::Offset(Space::Shared, u64::from(offset))
            }
            _ => Symbol::Value(Value::Global(variable.offset as u64)),
        })
    }

    /// A symbol's address as a value, `name` or `name+4`.
    fn symbol_value(&mut self, text: &str) -> Option<Value> {
        let (name, plus) = text.split_once('+').unwrap_or((text, "0"));
        let plus = number(plus.trim(), true)?;
        Some(match self.symbol(name.trim())? {
            Symbol::Offset(_, offset) => Value::Bits(offset.wrapping_add(plus)),
            Symbol::Value(Value::Global(offset)) => Value::Global(offset.wrapping_add(plus)),
            Symbol::Value(_) => Value::DynamicShared(plus),
        })
    }

    /// The slot or predicate of a source operand. `width` is `h`, `w`, `d` or `p`; `fraction` says
    /// that decimals are f64.
    fn source(&mut self, text: &str, width: u8, fraction: bool) -> Option<u16> {
        let text = text.trim();
        if let Some(negated) = text.strip_prefix('!') {
            let a = self.source(negated, b'p', false)?;
            let not = alu::select(&["not", "pred"])?;
            return self.computed(not.exec, 1, a);
        }
        if text == "_" {
            return Some(SINK_SLOT);
        }
        if let Some(register) = self.register(text) {
            return match (width, register.bits) {
                (b'p', 1) | (b'h' | b'w', 8..=32) | (b'd', 64) => Some(register.number),
                // A conversion may take a part of its source.
                (b'h' | b'w', 64) => {
                    let lower = alu::half_of(64, false)?;
                    self.computed(lower, 32, register.number)
                }
                _ => None,
            };
        }
        if width == b'p' {
            let truth = number(text, false)?;
            return if truth != 0 {
                Some(ALWAYS)
            } else {
                self.source("!1", b'p', false)
            };
        }
        let value = match number(text, fraction) {
            Some(bits) => Value::Bits(match width {
                b'h' => bits & 0xffff,
                b'w' => bits & 0xffff_ffff,
                _ => bits,
            }),
            None => match special(text) {
                Some(value) => value,
                None => self.symbol_value(text)?,
            },
        };
        self.value(value, width == b'd')
    }

    /// A function of one operand, in a register of its own.
    fn computed(&mut self, exec: Exec, bits: u8, a: u16) -> Option<u16> {
        let d = self.program.reserve(bits, 1)?.number;
        let op = self.op(Kind::Arithmetic, Class::Integer);
        self.push(Op { exec, d, a, ..op });
        Some(d)
    }

    fn destination(&self, text: &str, width: u8) -> Option<u16> {
        if text.trim() == "_" {
            return Some(if width == b'p' { SINK } else { SINK_SLOT });
        }
        let register = self.register(text.trim())?;
        let fits = match width {
            b'p' => register.bits == 1,
            b'd' => register.bits == 64,
            _ => matches!(register.bits, 8..=32),
        };
        fits.then_some(register.number)
    }

    fn instruction(&mut self, mnemonic: &'a str, operands: &[&'a str]) -> Option<()> {
        let mut parts = [""; 16];
        let mut count = 0;
        for part in mnemonic.split('.') {
            *parts.get_mut(count)? = part;
            count += 1;
        }
        let parts = &parts[..count];
        match parts[0] {
            "bra" => {
                let op = self.op(Kind::Branch, Class::Control);
                self.jumps.push((operands.first()?, self.program.ops.len()));
                self.push(op);
            }
            "ret" | "exit" => self.leave(),
            "trap" => self.message(Kind::Assert, "the kernel trapped".into()),
            "call" => return self.call(operands),
            "ld" | "ldu" | "st" => return self.memory_access(parts, operands),
            "cp" => return self.copy_async(parts, operands),
            "shfl" => return self.shuffle(parts, operands),
            "bar" => return self.barrier(parts, operands),
            "cvta" => return self.convert_address(parts, operands),
            "mov" if operands.iter().any(|text| text.starts_with('{')) => {
                return self.pack(operands)
            }
            _ => return self.arithmetic(parts, operands),
        }
        Some(())
    }

    fn arithmetic(&mut self, parts: &[&str], operands: &[&str]) -> Option<()> {
        let narrow = self.register(operands.first()?).is_none_or(|d| d.bits < 32);
        let found = match parts {
            // A register of more bits is filled with the sign.
            ["cvt", "s16", "s8"] if !narrow => alu::select(&["cvt", "s32", "s8"]),
            ["cvt", "s16", "s32" | "u32"] if !narrow => alu::select(&["cvt", "s32", "s16"]),
            _ => alu::select(parts),
        }?;
        let shape = found.operands.as_bytes();
        let sources = &shape[2..];
        if sources.len() + 1 != operands.len() {
            return None;
        }
        let fraction = parts.last() == Some(&"f64");
        let mut slots = [0; 4];
        for ((slot, &width), text) in slots.iter_mut().zip(sources).zip(&operands[1..]) {
            *slot = self.source(text, width, fraction)?;
        }
        let op = self.op(Kind::Arithmetic, found.class);
        let d = self.destination(operands[0], shape[0])?;
        self.push(Op {
            exec: found.exec,
            d,
            a: slots[0],
            b: slots[1],
            c: slots[2],
            e: slots[3],
            ..op
        });
        Some(())
    }

    /// `mov` between a register and its two halves in braces.
    fn pack(&mut self, operands: &[&'a str]) -> Option<()> {
        let halves = |text: &'a str| {
            let inner = text.strip_prefix('{')?.strip_suffix('}')?;
            inner.split_once(',')
        };
        let &[to, from] = operands else { return None };
        let op = self.op(Kind::Arithmetic, Class::Integer);
        if let Some((low, high)) = halves(to) {
            let whole = self.register(from)?;
            for (part, upper) in [(low, false), (high, true)] {
                let d = self.destination(part, b'w')?;
                self.push(Op {
                    exec: alu::half_of(whole.bits, upper)?,
                    d,
                    a: whole.number,
                    ..op
                });
            }
            return Some(());
        }
        let whole = self.register(to)?;
        let (low, high) = halves(from)?;
        let width = if whole.bits == 32 { b'h' } else { b'w' };
        let a = self.source(low, width, false)?;
        let b = self.source(high, width, false)?;
        self.push(Op {
            exec: alu::joined(whole.bits)?,
            d: whole.number,
            a,
            b,
            ..op
        });
        Some(())
    }

    /// The operand in brackets.
    fn address(&mut self, space: Space, text: &str) -> Option<Address> {
        let inner = text.trim().strip_prefix('[')?.strip_suffix(']')?.trim();
        let (base, plus) = match inner.find(['+']) {
            Some(at) => (inner[..at].trim(), inner[at + 1..].trim()),
            None => (inner, "0"),
        };
        let mut address = Address {
            space,
            bytes: 0,
            count: 1,
            signed: false,
            read_only: false,
            base: None,
            wide: true,
            offset: number(plus, true)?,
            registers: [SINK_SLOT; 4],
            widths: [32; 4],
        };
        if let Some(register) = self.register(base) {
            address.base = Some(register.number);
            address.wide = register.bits == 64;
        } else if let Some(absolute) = number(base, true) {
            address.offset = address.offset.wrapping_add(absolute);
        } else {
            match self.symbol(base)? {
                Symbol::Offset(actual, offset) => {
                    // A call's parameters live in a thread's own memory.
                    address.space = actual;
                    address.offset = address.offset.wrapping_add(offset);
                }
                Symbol::Value(value) => {
                    if matches!(value, Value::DynamicShared(_)) {
                        address.space = Space::Shared;
                    }
                    address.base = Some(self.value(value, true)?);
                }
            }
        }
        Some(address)
    }

    fn memory_access(&mut self, parts: &[&str], operands: &[&'a str]) -> Option<()> {
        let load = parts[0] != "st";
        let mut space = None;
        let mut count = 1;
        let mut read_only = parts[0] == "ldu";
        let (ty, modifiers) = parts[1..].split_last()?;
        for modifier in modifiers {
            match modifier
                .split_once("::")
                .map_or(*modifier, |(first, _)| first)
            {
                "global" | "const" => space = Some(Space::Global),
                "shared" => space = Some(Space::Shared),
                "local" => space = Some(Space::Local),
                "param" => space = Some(Space::Parameter),
                "v2" => count = 2,
                "v4" => count = 4,
                "nc" => read_only = true,
                "volatile" | "relaxed" | "acquire" | "release" | "weak" | "gpu" | "sys" | "cta"
                | "cluster" | "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" | "L1" | "L2" => {}
                _ => return None,
            }
        }
        let (values, place) = if load {
            (operands.first()?, operands.get(1)?)
        } else {
            (operands.get(1)?, operands.first()?)
        };
        // A generic address is that of global memory: `cvta` knows no other.
        let mut address = self.address(space.unwrap_or(Space::Global), place)?;
        address.bytes = u32::from(bits_of(ty)?) / 8;
        address.count = count;
        address.signed = ty.starts_with('s');
        address.read_only = read_only;
        let list = values.trim().trim_matches(['{', '}']);
        let mut seen = 0;
        for (index, name) in list.split(',').map(str::trim).enumerate() {
            let wide = address.bytes == 8;
            let width = if wide { b'd' } else { b'w' };
            let register = match self.register(name) {
                Some(register) => register,
                None if load && name == "_" => Register {
                    number: SINK_SLOT,
                    bits: if wide { 64 } else { 32 },
                },
                None if load => return None,
                None => Register {
                    number: self.source(name, width, *ty == "f64")?,
                    bits: if wide { 64 } else { 32 },
                },
            };
            if u32::from(register.bits) < address.bytes * 8 || register.bits == 1 {
                return None;
            }
            *address.registers.get_mut(index)? = register.number;
            address.widths[index] = register.bits;
            seen += 1;
        }
        if seen != count {
            return None;
        }
        let class = match address.space {
            Space::Global => Class::Global,
            Space::Shared => Class::Shared,
            _ => Class::Other,
        };
        let op = self.op(if load { Kind::Load } else { Kind::Store }, class);
        self.push_with_address(op, address);
        Some(())
    }

    fn push_with_address(&mut self, op: Op, address: Address) {
        let target = self.program.addresses.len() as u32;
        self.program.addresses.push(address);
        self.push(Op { target, ..op });
    }

    /// `cp.async` from global to shared memory. The source may be shorter than the copy; the rest
    /// is zeros.
    fn copy_async(&mut self, parts: &[&str], operands: &[&'a str]) -> Option<()> {
        match parts {
            ["cp", "async", "commit_group"] => {
                let op = self.op(Kind::CommitGroup, Class::Sync);
                self.push(op);
            }
            ["cp", "async", "wait_all"] => {
                let op = self.op(Kind::WaitGroup, Class::Sync);
                self.push(Op {
                    immediate: u64::MAX,
                    ..op
                });
            }
            ["cp", "async", "wait_group"] => {
                let immediate = number(operands.first()?.trim(), true)?;
                let op = self.op(Kind::WaitGroup, Class::Sync);
                self.push(Op { immediate, ..op });
            }
            ["cp", "async", "ca" | "cg", to, from, ..]
                if to.starts_with("shared") && from.starts_with("global") =>
            {
                let mut address = self.address(Space::Global, operands.get(1)?)?;
                let to = self.address(Space::Shared, operands.first()?)?;
                address.bytes = number(operands.get(2)?.trim(), false)? as u32;
                if !matches!(address.bytes, 4 | 8 | 16) {
                    return None;
                }
                // A cache policy may stand where the size of the source does.
                let a = match operands.get(3) {
                    Some(size) => self.source(size, b'w', false)?,
                    None => self.value(Value::Bits(u64::from(address.bytes)), false)?,
                };
                let immediate = self.program.addresses.len() as u64;
                self.program.addresses.push(to);
                let op = self.op(Kind::CopyAsync, Class::Global);
                self.push_with_address(Op { a, immediate, ..op }, address);
            }
            _ => return None,
        }
        Some(())
    }

    fn shuffle(&mut self, parts: &[&str], operands: &[&'a str]) -> Option<()> {
        let ["shfl", "sync", mode, "b32"] = parts else {
            return None;
        };
        let immediate = ["up", "down", "bfly", "idx"]
            .iter()
            .position(|name| name == mode)? as u64;
        let (d, p) = operands
            .first()?
            .split_once('|')
            .map_or((operands[0], "_"), |two| two);
        let mut slots = [0; 4];
        for (slot, text) in slots.iter_mut().zip(operands.get(1..5)?) {
            *slot = self.source(text, b'w', false)?;
        }
        let [a, b, c, members] = slots;
        let (d, p) = (self.destination(d, b'w')?, self.destination(p, b'p')?);
        let op = self.op(Kind::Shuffle, Class::Sync);
        self.push(Op {
            d,
            a,
            b,
            c,
            e: members,
            p,
            immediate,
            ..op
        });
        Some(())
    }

    fn barrier(&mut self, parts: &[&str], operands: &[&'a str]) -> Option<()> {
        if parts == ["bar", "warp", "sync"] {
            let e = self.source(operands.first()?, b'w', false)?;
            let op = self.op(Kind::WarpBarrier, Class::Sync);
            self.push(Op { e, ..op });
            return Some(());
        }
        if parts != ["bar", "sync"] {
            return None;
        }
        let a = self.source(operands.first()?, b'w', false)?;
        let b = match operands.get(1) {
            Some(threads) => self.source(threads, b'w', false)?,
            None => self.value(Value::Bits(0), false)?,
        };
        let op = self.op(Kind::Barrier, Class::Sync);
        self.push(Op { a, b, ..op });
        Some(())
    }

    /// Generic addresses of global memory are those of its own.
    fn convert_address(&mut self, parts: &[&str], operands: &[&'a str]) -> Option<()> {
        match parts {
            ["cvta", "to", "global", "u64"] | ["cvta", "global", "u64"] => {
                self.arithmetic(&["mov", "u64"], operands)
            }
            _ => None,
        }
    }

    /// Functions are inlined, so that only failed assertions call one.
    fn call(&mut self, operands: &[&str]) -> Option<()> {
        if !matches!(*operands.first()?, "__assertfail" | "__assert_fail") {
            return None;
        }
        self.message(Kind::Assert, "an assertion of the kernel failed".into());
        Some(())
    }
}

impl Program {
    /// Registers that follow each other.
    fn reserve(&mut self, bits: u8, count: u32) -> Option<Register> {
        let (next, step) = match bits {
            1 => (&mut self.predicates, 1),
            8 | 16 | 32 => (&mut self.slots, 1),
            64 => (&mut self.slots, 2),
            _ => return None,
        };
        let number = u16::try_from(*next).ok()?;
        *next += step * count as usize;
        u16::try_from(*next).ok()?;
        Some(Register { number, bits })
    }

    fn reserve_local(&mut self, bytes: usize, align: usize) -> u32 {
        let offset = self.local_bytes.next_multiple_of(align.max(1));
        self.local_bytes = offset + bytes;
        offset as u32
    }

    fn reserve_shared(&mut self, bytes: usize, align: usize) -> u32 {
        let offset = self.shared_bytes.next_multiple_of(align.max(1));
        self.shared_bytes = offset + bytes;
        offset as u32
    }
}

/// Bits of a type's name without its dot.
fn bits_of(ty: &str) -> Option<u8> {
    match ty {
        "f16x2" | "bf16x2" => Some(32),
        _ => Some((type_bytes(ty)? * 8) as u8),
    }
}

fn special(name: &str) -> Option<Value> {
    let axis = |name: &str| match name.as_bytes().last() {
        Some(b'x') => Some(0),
        Some(b'y') => Some(1),
        Some(b'z') => Some(2),
        _ => None,
    };
    let (first, _) = name
        .strip_prefix('%')?
        .split_once('.')
        .unwrap_or((&name[1..], ""));
    Some(match first {
        "tid" => Value::Thread(axis(name)?),
        "ntid" => Value::Threads(axis(name)?),
        "ctaid" => Value::Block(axis(name)?),
        "nctaid" => Value::Blocks(axis(name)?),
        _ => return None,
    })
}

/// Splits at the commas that are not inside of brackets.
fn split(text: &str) -> Vec<&str> {
    let mut all = Vec::with_capacity(4);
    let mut depth = 0;
    let mut start = 0;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' | b'[' | b'(' => depth += 1,
            b'}' | b']' | b')' => depth -= 1,
            b',' if depth == 0 => {
                all.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    let last = text[start..].trim();
    if !last.is_empty() {
        all.push(last);
    }
    all
}
