//! Outputs that are written once, never zero-filled first.
#![allow(unsafe_code)]

use super::element::Element;
use super::lanes::{sweep, Columns, Groups};
use pulp::Simd;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// The instructions that write an output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Stores {
    Cached,
    /// They bypass the caches, which would lose most values before anyone reads them.
    NonTemporal,
}

/// Outputs of at least this many bytes are written by non-temporal stores. `x + residual` is not,
/// because it is read at once.
///
/// The size is from a processor with 32 MiB of L3. `benches/results/2026-11-22-cpu.md` has what it
/// gains there: most in f32, and nothing in a bf16 forward.
pub(super) const NON_TEMPORAL: usize = 16 << 20;

/// A fresh output of `len` elements in chunks of `chunk_len` elements, which `fill` writes.
///
/// # Panics
///
/// If `fill` leaves a part of the output unwritten.
pub(super) fn fill_output<T: Copy>(
    len: usize,
    chunk_len: usize,
    stores: Stores,
    fill: impl FnOnce(Vec<OutputChunk<T>>),
) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    advise_huge_pages(out.spare_capacity_mut());
    let mut filled = vec![0; len.div_ceil(chunk_len)];
    let chunks = out.spare_capacity_mut()[..len].chunks_mut(chunk_len);
    fill(
        chunks
            .zip(&mut filled)
            .map(|(slots, filled)| OutputChunk {
                slots,
                filled,
                stores,
            })
            .collect(),
    );
    assert_eq!(
        filled.into_iter().sum::<usize>(),
        len,
        "a kernel left part of its output unwritten"
    );
    // SAFETY: there is room for `len` elements. Only the drop of a `RowWriter` counts what is
    // filled: once a chunk, no more than the chunk has, and after its fence. So by the assert
    // every chunk is written.
    unsafe { out.set_len(len) };
    out
}

/// Outputs of at least this many bytes ask for huge pages. Allocators take them from the system
/// anew each time, and a fault for each page of 4 KiB then costs more than the arithmetic that
/// fills it.
#[cfg(target_os = "linux")]
const HUGE: usize = 4 << 20;

/// Asks for huge pages under a large buffer.
#[cfg(target_os = "linux")]
fn advise_huge_pages<T>(buffer: &mut [MaybeUninit<T>]) {
    const PAGE: usize = 4096;
    let bytes = size_of_val(buffer);
    if bytes < HUGE {
        return;
    }
    let start = buffer.as_mut_ptr() as usize;
    let aligned = start.next_multiple_of(PAGE);
    let len = (start + bytes - aligned) / PAGE * PAGE;
    // SAFETY: the range lies within the buffer, which is ours alone, and the advice changes no
    // contents. It is only advice: where the kernel has no huge pages, it fails without
    // consequence.
    unsafe { libc::madvise(aligned as *mut libc::c_void, len, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages<T>(_: &mut [MaybeUninit<T>]) {}

/// A run of rows of an output.
pub(super) struct OutputChunk<'a, T> {
    slots: &'a mut [MaybeUninit<T>],
    /// How many of the slots hold a value, from the front.
    filled: &'a mut usize,
    stores: Stores,
}

/// Writes a chunk from the front, row by row.
pub(super) struct RowWriter<'a, T> {
    chunk: OutputChunk<'a, T>,
    filled: usize,
    /// The row that non-temporal stores take to memory next.
    scratch: Option<Vec<MaybeUninit<T>>>,
    /// Only a fence on the thread that wrote makes non-temporal stores visible to others.
    stays: PhantomData<*mut ()>,
}

impl<'a, T: Element> RowWriter<'a, T> {
    pub fn new(chunk: OutputChunk<'a, T>) -> Self {
        Self {
            scratch: (chunk.stores == Stores::NonTemporal).then(Vec::new),
            chunk,
            filled: 0,
            stays: PhantomData,
        }
    }

    /// Sweeps `columns` over the next row, `K` vectors at a time, writes their output and returns
    /// it.
    #[inline(always)]
    pub fn extend<const K: usize, S: Simd>(
        &mut self,
        simd: S,
        groups: &Groups<T::Acc>,
        columns: &mut impl Columns<T::Acc>,
    ) -> &[T] {
        let cols = groups.cols();
        let slots = &mut self.chunk.slots[self.filled..][..cols];
        let (row, memory) = match &mut self.scratch {
            Some(scratch) => {
                scratch.resize(cols, MaybeUninit::uninit());
                (&mut scratch[..cols], Some(slots))
            }
            None => (slots, None),
        };
        sweep::<K, _, _>(simd, groups, columns, Some(row));
        if let Some(memory) = memory {
            copy_past_caches(row, memory);
        }
        self.filled += cols;
        // SAFETY: `sweep` visits and writes each of the `cols` columns.
        unsafe { &*(row as *const [MaybeUninit<T>] as *const [T]) }
    }
}

impl<T> Drop for RowWriter<'_, T> {
    /// Waits for non-temporal stores, then counts what was written.
    ///
    /// A fence after each row would cost 85 ns, as much as a whole forward of 512 columns.
    #[inline(always)]
    fn drop(&mut self) {
        // Miri has no such fence, and needs none: see `copy_past_caches`.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.scratch.is_some() {
            // SAFETY: every x86-64 processor has SSE.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
        *self.chunk.filled = self.filled;
    }
}

/// Copies `row` to `memory` past the caches, if `memory` is aligned for that. Nothing else may
/// access `memory` before a fence on this thread.
///
/// Not inlined: the instructions of SSE here must not mix with AVX, which takes some older
/// processors 70 cycles.
#[inline(never)]
fn copy_past_caches<T: Copy>(row: &[MaybeUninit<T>], memory: &mut [MaybeUninit<T>]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

        let (from, to): (*const __m128i, *mut __m128i) =
            (row.as_ptr().cast(), memory.as_mut_ptr().cast());
        let bytes = size_of_val(row);
        // 16 bytes at a time. Stores of 64 bytes are up to 5 % faster for 32768x1024, but need an
        // alignment that glibc does not give.
        if to.is_aligned() && bytes.is_multiple_of(16) && bytes == size_of_val(memory) {
            for i in 0..bytes / 16 {
                // SAFETY: both have the same number of bytes, a multiple of 16, which `i` is
                // within, and `to` is aligned. Every x86-64 processor has SSE2.
                unsafe { _mm_stream_si128(to.add(i), _mm_loadu_si128(from.add(i))) };
            }
            return;
        }
    }
    memory.copy_from_slice(row);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::lanes::{Lanes, Scaling};
    use crate::device::cpu::simd::Level;
    use pulp::{Scalar128b, WithSimd};

    struct Negatives<'a>(&'a [f32]);

    impl Columns<f32> for Negatives<'_> {
        fn step<S: Simd, const K: usize>(
            &mut self,
            simd: S,
            at: usize,
            _: Scaling<f32>,
        ) -> Lanes<S, f32, K> {
            Lanes::splat(simd, 0.) - Lanes::load(simd, self.0, at)
        }
    }

    struct Extend<'a, 'b>(&'a mut RowWriter<'b, f32>, &'a [f32]);

    impl WithSimd for Extend<'_, '_> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            let Self(writer, source) = self;
            let groups = Groups::new(source.len(), source.len());
            let row = writer.extend::<4, _>(simd, &groups, &mut Negatives(source));
            assert!(row.iter().zip(source).all(|(row, source)| *row == -source));
        }
    }

    fn extend(writer: &mut RowWriter<f32>, source: &[f32]) {
        Extend(writer, source).with_simd(Scalar128b);
    }

    /// Chunks of rows, of which some are aligned for non-temporal stores and some are not.
    #[test]
    fn chunks_make_up_the_output() {
        let len = if cfg!(miri) { 3003 } else { 300_003 };
        let source: Vec<f32> = (0..len).map(|i| i as f32).collect();
        for level in Level::all() {
            for stores in [Stores::Cached, Stores::NonTemporal] {
                let out = fill_output(len, 1000, stores, |chunks| {
                    for (chunk, source) in chunks.into_iter().zip(source.chunks(1000)) {
                        let (first, second) = source.split_at(source.len() / 3);
                        let mut writer = RowWriter::new(chunk);
                        for part in [first, second] {
                            level.run(Extend(&mut writer, part));
                        }
                    }
                });
                assert!(out.iter().zip(&source).all(|(out, source)| *out == -source));
                assert_eq!(out.len(), len);
            }
        }
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn a_writer_without_its_fence_is_no_output() {
        fill_output(10, 10, Stores::NonTemporal, |chunks| {
            for chunk in chunks {
                let mut writer = RowWriter::new(chunk);
                extend(&mut writer, &[1.; 10]);
                std::mem::forget(writer);
            }
        });
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn an_unfinished_chunk_is_no_output() {
        fill_output(10, 5, Stores::Cached, |chunks| {
            for (chunk, len) in chunks.into_iter().zip([5, 4]) {
                extend(&mut RowWriter::new(chunk), &vec![1.; len]);
            }
        });
    }

    #[test]
    #[should_panic]
    fn a_row_too_many_is_no_output() {
        fill_output(10, 5, Stores::Cached, |chunks| {
            for chunk in chunks {
                let mut writer = RowWriter::new(chunk);
                extend(&mut writer, &[1.; 5]);
                extend(&mut writer, &[1.; 5]);
            }
        });
    }
}
