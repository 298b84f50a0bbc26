//! The emulated GPU: its memory, and launches on it.

use std::alloc::{alloc, dealloc, handle_alloc_error, Layout};
use std::ffi::{c_char, c_void, CStr, CString};
use std::ops::Range;

/// The order in which blocks run, or the threads of a block that can go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Order {
    /// By index.
    Forward = 0,
    /// By index, the last first.
    Reverse = 1,
    /// At random; threads anew each time round.
    Shuffled = 2,
}

/// How a launch is run. A GPU promises none of it, so no result may depend on it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Schedule {
    /// The order of blocks.
    pub blocks: Order,
    /// The order of threads.
    pub threads: Order,
    /// Of what is random.
    pub seed: u64,
}

/// `EmulatedLaunch` of `device.cpp`.
#[repr(C)]
struct EmulatedLaunch {
    kernel: *const c_char,
    params: *const c_void,
    params_size: usize,
    grid: [u32; 2],
    block: [u32; 2],
    shared_bytes: u32,
    first_row: u32,
    rows: u32,
    schedule: Schedule,
}

extern "C" {
    fn emulate_launch(launch: *const EmulatedLaunch) -> *const c_char;
    fn emulated_half_to_float(bits: u16) -> f32;
    fn emulated_float_to_half(value: f32) -> u16;
    fn emulated_bfloat16_to_float(bits: u16) -> f32;
    fn emulated_float_to_bfloat16(value: f32) -> u16;
}

/// What the kernels convert with.
pub mod convert {
    /// `__half2float`.
    pub fn from_half(bits: u16) -> f32 {
        // SAFETY: numbers in, a number out.
        unsafe { super::emulated_half_to_float(bits) }
    }

    /// `__float2half_rn`.
    pub fn to_half(value: f32) -> u16 {
        // SAFETY: as above.
        unsafe { super::emulated_float_to_half(value) }
    }

    /// `__bfloat162float`.
    pub fn from_bfloat16(bits: u16) -> f32 {
        // SAFETY: as above.
        unsafe { super::emulated_bfloat16_to_float(bits) }
    }

    /// `__float2bfloat16_rn`.
    pub fn to_bfloat16(value: f32) -> u16 {
        // SAFETY: as above.
        unsafe { super::emulated_float_to_bfloat16(value) }
    }
}

/// Runs the blocks of `grid` whose y is in `rows`. An error says why a GPU would refuse the launch; what it
/// would leave undefined ends the process.
///
/// # Safety
/// `params` is the kernel's argument, and each address in it that of as much memory as the kernel takes it
/// for, or guarded there.
pub unsafe fn emulate<P>(
    kernel: &str,
    grid: (u32, u32),
    block: (u32, u32),
    shared_bytes: u32,
    params: &P,
    schedule: Schedule,
    rows: Range<u32>,
) -> Result<(), String> {
    let name = CString::new(kernel).expect("a name");
    let launch = EmulatedLaunch {
        kernel: name.as_ptr(),
        params: std::ptr::from_ref(params).cast(),
        params_size: size_of::<P>(),
        grid: [grid.0, grid.1],
        block: [block.0, block.1],
        shared_bytes,
        first_row: rows.start,
        rows: rows.end - rows.start,
        schedule,
    };
    // SAFETY: `launch` mirrors the struct of device.cpp, the rest is the caller's promise.
    let refusal = unsafe { emulate_launch(&launch) };
    if refusal.is_null() {
        return Ok(());
    }
    // SAFETY: a text that stays until this thread's next launch.
    let refusal = unsafe { CStr::from_ptr(refusal) };
    Err(format!("{kernel}: {}", refusal.to_string_lossy()))
}

/// An array in the memory of the emulated GPU, exactly as long as asked for: AddressSanitizer guards its ends.
pub struct Array {
    allocation: *mut u8,
    layout: Layout,
    offset: usize,
    len: usize,
}

impl Array {
    /// What the driver aligns an allocation to.
    const ALIGN: usize = 256;

    /// `len` bytes that read as NaN in every dtype, `offset` bytes past an aligned address.
    pub fn unwritten(len: usize, offset: usize) -> Self {
        let size = (offset + len).max(1);
        let layout = Layout::from_size_align(size, Self::ALIGN).expect("a size that fits memory");
        // SAFETY: the size is not 0.
        let allocation = unsafe { alloc(layout) };
        if allocation.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: as long as that.
        unsafe { allocation.write_bytes(0xff, size) };
        Self {
            allocation,
            layout,
            offset,
            len,
        }
    }

    /// A copy of `bytes`, `offset` bytes past an aligned address.
    pub fn of(bytes: &[u8], offset: usize) -> Self {
        let array = Self::unwritten(bytes.len(), offset);
        // SAFETY: `unwritten` made it as long.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), array.start(), bytes.len());
        }
        array
    }

    /// Where it is, for kernels.
    pub fn address(&self) -> u64 {
        self.start() as u64
    }

    /// What it holds.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: all of it was written when it was made.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: the allocation is longer.
        unsafe { self.allocation.add(self.offset) }
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: from `alloc` with this layout.
        unsafe { dealloc(self.allocation, self.layout) };
    }
}
