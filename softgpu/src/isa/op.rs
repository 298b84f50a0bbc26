//! Decoded instructions, and what they work on: the registers of a warp's 32 lanes.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// 32 values of 32 bits; two slots hold 32 values of 64 bits. A value of 16 bits is extended by
/// zeros.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub struct Slot(pub [u32; 32]);

/// The registers of a warp, as arithmetic sees them.
pub struct Lanes {
    pub slots: *mut Slot,
    pub predicates: *mut u32,
    /// The seed that moves approximate results, if they are to be moved.
    pub perturb: Option<u64>,
}

/// The number of lanes, 32, unknown to the compiler: it unrolls loops whose end it knows, and then
/// turns few of them into vectors.
#[inline(always)]
pub(crate) fn lane_count() -> usize {
    static COUNT: AtomicUsize = AtomicUsize::new(32);
    COUNT.load(Relaxed)
}

/// Computes an instruction for the lanes of a mask.
///
/// A caller proves that the slots and predicates named by the instruction are those of the function
/// it was decoded for.
pub type Exec = unsafe fn(&mut Lanes, &Op, u32);

/// The unit that a warp instruction occupies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Class {
    /// Integers, predicates, moves, conversions between integers.
    Integer,
    /// f32, f16 and bf16 arithmetic.
    Float,
    /// f64 arithmetic.
    Double,
    /// Conversions to or from a floating-point number.
    Convert,
    /// Roots, reciprocals, exponentials, logarithms.
    Special,
    /// Loads and stores of global memory.
    Global,
    /// Loads and stores of shared memory.
    Shared,
    /// Parameters, constants and local memory.
    Other,
    /// Branches and ends.
    Control,
    /// Shuffles, votes, barriers.
    Sync,
}

impl Class {
    /// The number of classes.
    pub const COUNT: usize = 10;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Space {
    Global,
    Shared,
    Local,
    Parameter,
}

/// The part of a warp that runs an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Arithmetic,
    Branch,
    Exit,
    Load,
    Store,
    CopyAsync,
    CommitGroup,
    WaitGroup,
    Shuffle,
    WarpBarrier,
    Barrier,
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
    /// A fourth source.
    pub(crate) e: u16,
    /// A second destination, which is a predicate.
    pub(crate) p: u16,
    /// The instruction to go to, or the number of an [`Address`].
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
}

/// Bits of a type, as in `f16x2` or `.b32`. A predicate has one.
pub(crate) fn bits_of(ty: &str) -> Option<u8> {
    match ty.trim_start_matches('.') {
        "pred" => Some(1),
        "f16x2" | "bf16x2" => Some(32),
        ty => ty
            .trim_start_matches(|c: char| !c.is_ascii_digit())
            .parse()
            .ok(),
    }
}

/// A value that does not change while a block runs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Value {
    Bits(u64),
    /// The bytes at this offset in the parameters.
    Parameter(u64),
    /// An address in the module's variables.
    Global(u64),
    /// An address behind the start of dynamic shared memory.
    DynamicShared(u64),
    /// The index of a thread, a block, or the size of either; the second number is the axis.
    Thread(u8),
    Threads(u8),
    Block(u8),
    Blocks(u8),
}

/// An entry, decoded.
#[derive(Default)]
pub(crate) struct Program {
    pub ops: Vec<Op>,
    pub addresses: Vec<Address>,
    /// Texts for unknown instructions and failed assertions.
    pub messages: Vec<String>,
    /// The place of each instruction's text.
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
    /// A thread may come from one instruction to another, which is not an end.
    pub fn reaches(&self, from: u32, to: u32) -> bool {
        let mut seen = vec![false; self.ops.len()];
        let mut left = vec![from];
        while let Some(at) = left.pop() {
            let op = &self.ops[at as usize];
            let ends = matches!(op.kind, Kind::Exit | Kind::Assert | Kind::Unknown);
            if at == to && op.kind != Kind::Exit {
                return true;
            }
            if std::mem::replace(&mut seen[at as usize], true) {
                continue;
            }
            if op.kind == Kind::Branch {
                left.push(op.target);
            }
            if op.guard != 0 || !(ends || op.kind == Kind::Branch) {
                left.push(at + 1);
            }
        }
        false
    }

    /// The start of dynamic shared memory.
    pub fn dynamic_start(&self) -> usize {
        self.shared_bytes.next_multiple_of(self.dynamic_align)
    }
}
