//! Non-temporal stores: an output that bypasses the caches.
//!
//! A store normally reads its cache line from memory first, and the line then stays in the caches
//! until it is evicted. For an output larger than the caches both are waste, because every line is
//! overwritten whole, and evicted before anyone reads it. A *non-temporal* store avoids both. Its
//! price is an alignment of 16 bytes, and a fence before another thread may read.
//!
//! `output.rs` chooses the outputs that are written so, with the measurement behind the choice, and
//! executes the fence.
#![allow(unsafe_code)]

use super::vectors::Lanes;
use crate::device::cpu::convert::{Element, MOST_COLUMNS};
use pulp::Simd;
use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
use std::mem::MaybeUninit;

/// Writes `values` to as many `columns` of an output, with cached stores if the columns are not
/// aligned.
///
/// # Safety
///
/// This thread executes a fence before anything accesses the elements of `columns`.
#[inline(always)]
pub(super) unsafe fn write<S: Simd, T: Element, const K: usize>(
    values: Lanes<S, T::Acc, K>,
    columns: &mut [MaybeUninit<T>],
) {
    // 16 bytes at a time at every level. Stores of 64 bytes are up to 5 % faster for 32768x1024,
    // but need an alignment that glibc's allocator does not give.
    let to: *mut __m128i = columns.as_mut_ptr().cast();
    let size = size_of::<__m128i>();
    if !to.is_aligned() || !size_of_val(columns).is_multiple_of(size) {
        return values.write(columns);
    }
    // The compiler keeps the buffer in registers.
    let mut buffer = [MaybeUninit::<T>::uninit(); MOST_COLUMNS];
    let buffer = &mut buffer[..columns.len()];
    values.write(buffer);
    let from: *const __m128i = buffer.as_ptr().cast();
    for i in 0..size_of_val(columns) / size {
        // SAFETY: `buffer` and `columns` have one length, a multiple of 16 bytes, which `i` is
        // within, so both addresses are in bounds. `write` initialized all of `buffer`, and floats
        // have no padding. `to` is aligned, `columns` is borrowed mutably, and by this function's
        // contract a fence precedes any other access.
        unsafe { store::<S>(to.add(i), _mm_loadu_si128(from.add(i))) };
    }
}

/// A non-temporal store of 16 bytes, in the encoding of the level's other instructions.
///
/// `_mm_stream_si128` always has the encoding from before AVX. Some older processors take 70 cycles
/// to switch between that and AVX's, hence the assembly.
///
/// # Safety
///
/// 1. `to` is valid for a write of 16 bytes, and aligned to 16.
/// 2. `S` is a level of this processor.
/// 3. Nothing else accesses the bytes before a fence.
#[inline(always)]
unsafe fn store<S: Simd>(to: *mut __m128i, value: __m128i) {
    if cfg!(miri) {
        // Miri has no non-temporal stores, so it checks a plain one.
        // SAFETY: by 1.
        unsafe { to.write(value) };
    } else if size_of::<S::f32s>() > size_of_val(&value) {
        // SAFETY: by 1 and 3; levels of vectors wider than 16 bytes have AVX, and by 2 so has the
        // processor.
        unsafe {
            std::arch::asm!(
                "vmovntdq [{to}], {value}",
                to = in(reg) to,
                value = in(xmm_reg) value,
                options(nostack, preserves_flags),
            )
        };
    } else {
        // SAFETY: by 1 and 3; every x86-64 processor has SSE2.
        unsafe { _mm_stream_si128(to, value) };
    }
}
