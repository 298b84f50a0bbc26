//! A function's text to instructions.

use super::source::{Entry, Source, declared, number};
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
            slots: 2,
            predicates: 2,
            dynamic_align: 16,
            ..Program::default()
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
        let bytes = self.module.text.as_bytes();
        let mut at = body.start;
        while at < body.end {
            match bytes[at] {
                b'\n' => self.line += 1,
                b'{' => self.open_scope(),
                b'}' => self.close_scope(),
                b';' => {}
                byte if byte.is_ascii_whitespace() => {}
                _ => {
                    at = self.statement_or_label(at..body.end)?;
                    continue;
                }
            }
            at += 1;
        }
        Ok(())
    }

    /// Takes what begins in a range of the text, and returns where it ends.
    fn statement_or_label(&mut self, range: Range<usize>) -> Result<usize, String> {
        let text: &'a str = &self.module.text[range.clone()];
        let location = text.strip_prefix(".loc");
        if location.is_some_and(|rest| rest.starts_with(char::is_whitespace)) {
            let line = text.lines().next().unwrap_or(text);
            let words = line.split_whitespace().skip(1);
            let mut numbers = words.map(|word| word.parse().unwrap_or(0));
            self.source = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
            return Ok(range.start + line.len());
        }
        let is_end = |&at: &usize| match text.as_bytes()[at] {
            b';' => true,
            // `::` is part of a modifier.
            b':' => !text[..at].ends_with(':') && !text[at + 1..].starts_with(':'),
            _ => false,
        };
        let length = (0..text.len()).find(is_end).unwrap_or(text.len());
        let statement = &text[..length];
        let end = range.start + length;
        if text[length..].starts_with(':') {
            let label = (statement.trim(), self.program.ops.len() as u32);
            self.labels.push(label);
        } else {
            self.text = range.start as u32..end as u32;
            self.statement(statement)?;
        }
        self.line += statement.bytes().filter(|byte| *byte == b'\n').count() as u32;
        Ok(end + 1)
    }

    fn statement(&mut self, text: &'a str) -> Result<(), String> {
        let line = self.line;
        let not_understood = || format!("line {line}: not understood: {}", text.trim());
        if text.starts_with('.') {
            return self.directive(text).ok_or_else(not_understood);
        }
        let text = self.guarded(text.trim()).ok_or_else(not_understood)?;
        let (mnemonic, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let before = self.program.ops.len();
        if self.instruction(mnemonic, &split(operands)).is_none() {
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

    /// Notes the guard of an instruction and gives what follows it.
    fn guarded(&mut self, text: &'a str) -> Option<&'a str> {
        self.guard = (ALWAYS, 0);
        let Some(guarded) = text.strip_prefix('@') else {
            return Some(text);
        };
        let (name, rest) = guarded.split_once(char::is_whitespace)?;
        let (name, flip) = match name.strip_prefix('!') {
            Some(name) => (name, !0),
            None => (name, 0),
        };
        self.guard = (self.register(name)?.number, flip);
        Some(rest.trim_start())
    }

    fn directive(&mut self, text: &'a str) -> Option<()> {
        match text.split_whitespace().next()?.split('.').nth(1)? {
            "reg" => {
                let rest = text[4..].trim_start();
                let (ty, names) = rest.split_once(char::is_whitespace)?;
                for name in names.split(',').map(str::trim) {
                    let (name, count) = match name.split_once('<') {
                        Some((name, count)) => {
                            (name, Some(count.trim_end_matches('>').trim().parse().ok()?))
                        }
                        None => (name, None),
                    };
                    let first = self.program.reserve(bits_of(ty)?, count.unwrap_or(1))?;
                    self.registers.push(Declaration { name, first, count });
                }
            }
            "local" | "param" => {
                let (name, align, bytes, _) = declared(text)?;
                let offset = reserve_bytes(&mut self.program.local_bytes, bytes, align);
                self.memory.push(Own { name, offset });
            }
            "shared" => {
                let (name, align, bytes, _) = declared(text)?;
                let offset = reserve_bytes(&mut self.program.shared_bytes, bytes, align);
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
            let mut register = declaration.first;
            match (declaration.count, number) {
                (None, _) if declaration.name == name => return Some(register),
                (Some(count), Some(number)) if declaration.name == prefix && number < count => {
                    let step = if register.bits == 64 { 2 } else { 1 };
                    register.number += number as u16 * step;
                    return Some(register);
                }
                _ => {}
            }
        }
        None
    }

    /// Adds an instruction, whose operands `set` fills in.
    fn push(&mut self, kind: Kind, class: Class, set: impl FnOnce(&mut Op)) {
        let mut op = Op {
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
        };
        set(&mut op);
        self.program.ops.push(op);
        self.program.texts.push(self.text.clone());
        self.program.sources.push(self.source);
    }

    fn message(&mut self, kind: Kind, message: String) {
        let target = self.program.messages.len() as u32;
        self.program.messages.push(message);
        self.push(kind, Class::Control, |op| op.target = target);
    }

    fn leave(&mut self) {
        self.push(Kind::Exit, Class::Control, |_| {});
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
                let total = &mut self.program.shared_bytes;
                let offset = reserve_bytes(total, variable.size, variable.align);
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

    /// The slot or predicate of a source operand of `bits` bits. With `fraction`, decimals are f64.
    fn source(&mut self, text: &str, bits: u8, fraction: bool) -> Option<u16> {
        let text = text.trim();
        if let Some(negated) = text.strip_prefix('!') {
            let a = self.source(negated, 1, false)?;
            let not = alu::select(&["not", "pred"])?;
            return self.computed(not.exec, 1, a);
        }
        if text == "_" {
            return Some(SINK_SLOT);
        }
        if let Some(register) = self.register(text) {
            return match (bits, register.bits) {
                // A conversion may take a part of its source.
                (8..=32, 64) => self.computed(alu::half_of(64, false)?, 32, register.number),
                _ => fits(register, bits),
            };
        }
        if bits == 1 {
            return match number(text, false)? {
                0 => self.source("!1", 1, false),
                _ => Some(ALWAYS),
            };
        }
        let value = match number(text, fraction) {
            Some(value) => Value::Bits(value & (u64::MAX >> (64 - bits))),
            None => special(text).or_else(|| self.symbol_value(text))?,
        };
        self.value(value, bits == 64)
    }

    /// A function of one operand, in a register of its own.
    fn computed(&mut self, exec: Exec, bits: u8, a: u16) -> Option<u16> {
        let d = self.program.reserve(bits, 1)?.number;
        self.push(Kind::Arithmetic, Class::Integer, |op| {
            (op.exec, op.d, op.a) = (exec, d, a);
        });
        Some(d)
    }

    fn destination(&self, text: &str, bits: u8) -> Option<u16> {
        match text.trim() {
            "_" if bits == 1 => Some(SINK),
            "_" => Some(SINK_SLOT),
            name => fits(self.register(name)?, bits),
        }
    }

    fn instruction(&mut self, mnemonic: &'a str, operands: &[&'a str]) -> Option<()> {
        let parts: Vec<&str> = mnemonic.split('.').collect();
        match parts[..] {
            ["bra", ..] => {
                self.jumps.push((operands.first()?, self.program.ops.len()));
                self.push(Kind::Branch, Class::Control, |_| {});
            }
            ["ret" | "exit", ..] => self.leave(),
            ["trap", ..] => self.message(Kind::Assert, "the kernel trapped".into()),
            // Functions are inlined, so that only failed assertions call one.
            ["call", ..] => match *operands.first()? {
                "__assertfail" | "__assert_fail" => {
                    self.message(Kind::Assert, "an assertion of the kernel failed".into());
                }
                _ => return None,
            },
            ["ld" | "ldu" | "st", ..] => return self.memory_access(&parts, operands),
            ["cp", ..] => return self.copy_async(&parts, operands),
            ["shfl", ..] => return self.shuffle(&parts, operands),
            ["bar", ..] => return self.barrier(&parts, operands),
            // Generic addresses of global memory are those of its own.
            ["cvta", "to", "global", "u64"] | ["cvta", "global", "u64"] => {
                return self.arithmetic(&["mov", "u64"], operands);
            }
            ["mov", ..] if operands.iter().any(|text| text.starts_with('{')) => {
                return self.pack(operands);
            }
            _ => return self.arithmetic(&parts, operands),
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
        if found.operands.len() != operands.len() {
            return None;
        }
        let fraction = parts.last() == Some(&"f64");
        let mut slots = [0; 4];
        let sources = found.operands.iter().zip(operands).skip(1);
        for (slot, (&bits, text)) in slots.iter_mut().zip(sources) {
            *slot = self.source(text, bits, fraction)?;
        }
        let d = self.destination(operands[0], found.operands[0])?;
        self.push(Kind::Arithmetic, found.class, |op| {
            (op.exec, op.d) = (found.exec, d);
            [op.a, op.b, op.c, op.e] = slots;
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
        if let Some((low, high)) = halves(to) {
            let whole = self.register(from)?;
            for (part, upper) in [(low, false), (high, true)] {
                let (d, exec) = (
                    self.destination(part, 32)?,
                    alu::half_of(whole.bits, upper)?,
                );
                self.push(Kind::Arithmetic, Class::Integer, |op| {
                    (op.exec, op.d, op.a) = (exec, d, whole.number);
                });
            }
            return Some(());
        }
        let whole = self.register(to)?;
        let (low, high) = halves(from)?;
        let exec = alu::joined(whole.bits)?;
        let a = self.source(low, whole.bits / 2, false)?;
        let b = self.source(high, whole.bits / 2, false)?;
        self.push(Kind::Arithmetic, Class::Integer, |op| {
            (op.exec, op.d, op.a, op.b) = (exec, whole.number, a, b);
        });
        Some(())
    }

    /// The operand in brackets.
    fn address(&mut self, space: Space, text: &str) -> Option<Address> {
        let inner = text.trim().strip_prefix('[')?.strip_suffix(']')?.trim();
        let (base, plus) = inner.split_once('+').unwrap_or((inner, "0"));
        let base = base.trim();
        let mut address = Address {
            space,
            bytes: 0,
            count: 1,
            signed: false,
            read_only: false,
            base: None,
            wide: true,
            offset: number(plus.trim(), true)?,
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
            let bits = if address.bytes == 8 { 64 } else { 32 };
            let register = match self.register(name) {
                Some(register) => register,
                None if load && name != "_" => return None,
                None => Register {
                    number: self.source(name, bits, *ty == "f64")?,
                    bits,
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
        if let Some((value, wide)) = self.parameter(&address).filter(|_| load) {
            let a = self.value(value, wide)?;
            self.push(Kind::Arithmetic, Class::Other, |op| {
                (op.exec, op.d, op.a) = (alu::spread(wide), address.registers[0], a);
            });
            return Some(());
        }
        let class = match address.space {
            Space::Global => Class::Global,
            Space::Shared => Class::Shared,
            _ => Class::Other,
        };
        let kind = if load { Kind::Load } else { Kind::Store };
        let target = self.program.addresses.len() as u32;
        self.program.addresses.push(address);
        self.push(kind, class, |op| op.target = target);
        Some(())
    }

    /// A parameter that fills a register is the same for the whole launch. The second part of the
    /// result says that it has 64 bits.
    fn parameter(&self, address: &Address) -> Option<(Value, bool)> {
        let end = address.offset.checked_add(address.bytes.into())?;
        let known = address.space == Space::Parameter
            && address.base.is_none()
            && address.count == 1
            && address.offset.is_multiple_of(address.bytes.into())
            && end <= self.module.parameter_bytes(self.entry) as u64;
        let wide = match (address.bytes, address.widths[0]) {
            (4, 32) => false,
            (8, 64) => true,
            _ => return None,
        };
        known.then_some((Value::Parameter(address.offset), wide))
    }

    /// `cp.async` from global to shared memory. The source may be shorter than the copy; the rest
    /// is zeros.
    fn copy_async(&mut self, parts: &[&str], operands: &[&'a str]) -> Option<()> {
        match parts {
            ["cp", "async", "commit_group"] => {
                self.push(Kind::CommitGroup, Class::Sync, |_| {});
            }
            ["cp", "async", "wait_all"] => {
                self.push(Kind::WaitGroup, Class::Sync, |op| op.immediate = u64::MAX);
            }
            ["cp", "async", "wait_group"] => {
                let left = number(operands.first()?, true)?;
                self.push(Kind::WaitGroup, Class::Sync, |op| op.immediate = left);
            }
            ["cp", "async", "ca" | "cg", to, from, ..]
                if to.starts_with("shared") && from.starts_with("global") =>
            {
                let mut address = self.address(Space::Global, operands.get(1)?)?;
                let to = self.address(Space::Shared, operands.first()?)?;
                address.bytes = number(operands.get(2)?, false)? as u32;
                if !matches!(address.bytes, 4 | 8 | 16) {
                    return None;
                }
                // A cache policy may stand where the size of the source does.
                let a = match operands.get(3) {
                    Some(size) => self.source(size, 32, false)?,
                    None => self.value(Value::Bits(u64::from(address.bytes)), false)?,
                };
                let next = self.program.addresses.len() as u32;
                self.program.addresses.extend([address, to]);
                self.push(Kind::CopyAsync, Class::Global, |op| {
                    (op.a, op.target, op.immediate) = (a, next, u64::from(next) + 1);
                });
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
            *slot = self.source(text, 32, false)?;
        }
        let (d, p) = (self.destination(d, 32)?, self.destination(p, 1)?);
        self.push(Kind::Shuffle, Class::Sync, |op| {
            (op.d, op.p, op.immediate) = (d, p, immediate);
            [op.a, op.b, op.c, op.e] = slots;
        });
        Some(())
    }

    fn barrier(&mut self, parts: &[&str], operands: &[&'a str]) -> Option<()> {
        let a = self.source(operands.first()?, 32, false)?;
        match parts {
            ["bar", "warp", "sync"] => {
                self.push(Kind::WarpBarrier, Class::Sync, |op| op.e = a);
            }
            ["bar", "sync"] => {
                let b = match operands.get(1) {
                    Some(threads) => self.source(threads, 32, false)?,
                    None => self.value(Value::Bits(0), false)?,
                };
                self.push(Kind::Barrier, Class::Sync, |op| (op.a, op.b) = (a, b));
            }
            _ => return None,
        }
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
}

/// The offset of the next variable behind `total` bytes, to which it is added.
fn reserve_bytes(total: &mut usize, bytes: usize, align: usize) -> u32 {
    let offset = total.next_multiple_of(align.max(1));
    *total = offset + bytes;
    offset as u32
}

/// The register's number, if it has room for `bits` bits and is of the right kind.
fn fits(register: Register, bits: u8) -> Option<u16> {
    let fits = match bits {
        1 | 64 => register.bits == bits,
        _ => matches!(register.bits, 8..=32),
    };
    fits.then_some(register.number)
}

/// The index of a thread or block, or the size of either, as in `%tid.x`, or the size of a warp.
fn special(name: &str) -> Option<Value> {
    if name == "WARP_SZ" {
        return Some(Value::Bits(32));
    }
    let (name, axis) = name.strip_prefix('%')?.split_once('.')?;
    let axis = ["x", "y", "z"].iter().position(|one| *one == axis)? as u8;
    Some(match name {
        "tid" => Value::Thread(axis),
        "ntid" => Value::Threads(axis),
        "ctaid" => Value::Block(axis),
        "nctaid" => Value::Blocks(axis),
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
