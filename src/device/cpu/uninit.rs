//! Outputs that are written once, never zero-filled first.
#![allow(unsafe_code)]

use super::element::Element;
use super::lanes::{sweep, Columns, Groups, Lanes, RowOutput};
use pulp::Simd;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// The instructions that write an output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Stores {
    Cached,
    /// They bypass the caches, which would lose most values before anyone reads them.
    #[cfg(target_arch = "x86_64")]
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
    /// The number of slots that hold a value, from the front.
    filled: &'a mut usize,
    stores: Stores,
}

/// Writes a chunk from the front, row by row.
pub(super) struct RowWriter<'a, T> {
    chunk: OutputChunk<'a, T>,
    filled: usize,
    /// Only a fence on the thread that wrote makes non-temporal stores visible to others.
    stays: PhantomData<*mut ()>,
}

impl<'a, T: Element> RowWriter<'a, T> {
    pub fn new(chunk: OutputChunk<'a, T>) -> Self {
        Self {
            chunk,
            filled: 0,
            stays: PhantomData,
        }
    }

    /// Sweeps `columns` over the next row, `K` vectors at a time, and writes their output.
    #[inline(always)]
    pub fn extend<const K: usize, S: Simd>(
        &mut self,
        simd: S,
        groups: &Groups<T::Acc>,
        columns: &mut impl Columns<T::Acc>,
    ) {
        // A test in each step would cost a tenth.
        match self.chunk.stores {
            Stores::Cached => self.extend_cached::<K, _>(simd, groups, columns),
            #[cfg(target_arch = "x86_64")]
            Stores::NonTemporal => {
                let row = &mut self.chunk.slots[self.filled..][..groups.cols()];
                sweep::<K, _, T>(simd, groups, columns, PastCaches(row));
                self.filled += groups.cols();
            }
        }
    }

    /// [`extend`](Self::extend), always by cached stores.
    #[inline(always)]
    pub fn extend_cached<const K: usize, S: Simd>(
        &mut self,
        simd: S,
        groups: &Groups<T::Acc>,
        columns: &mut impl Columns<T::Acc>,
    ) {
        let row = &mut self.chunk.slots[self.filled..][..groups.cols()];
        sweep::<K, _, T>(simd, groups, columns, row);
        self.filled += groups.cols();
    }

    /// The last `n` values.
    ///
    /// # Panics
    ///
    /// If the stores are not cached: these values may be on their way to memory.
    #[inline(always)]
    pub fn last(&self, n: usize) -> &[T] {
        assert_eq!(self.chunk.stores, Stores::Cached);
        let slots = &self.chunk.slots[self.filled - n..self.filled];
        // SAFETY: `extend` wrote all slots up to `filled`, because `sweep` visits and writes each
        // column of a row.
        unsafe { &*(slots as *const [MaybeUninit<T>] as *const [T]) }
    }
}

impl<T> Drop for RowWriter<'_, T> {
    /// Waits for non-temporal stores, then counts what was written.
    ///
    /// A fence after each row would cost 85 ns, as much as a whole forward of 512 columns.
    #[inline(always)]
    fn drop(&mut self) {
        // Miri has no such fence, and needs none: see `store`.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.chunk.stores == Stores::NonTemporal {
            // SAFETY: every x86-64 processor has SSE.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
        *self.chunk.filled = self.filled;
    }
}

/// A row that is written past the caches.
#[cfg(target_arch = "x86_64")]
struct PastCaches<'a, T>(&'a mut [MaybeUninit<T>]);

#[cfg(target_arch = "x86_64")]
impl<T: Element> RowOutput<T> for PastCaches<'_, T> {
    #[inline(always)]
    fn write<S: Simd, const K: usize>(&mut self, columns: Lanes<S, T::Acc, K>, at: usize) {
        if !stream(columns, self.0, at) {
            columns.write(self.0, at);
        }
    }
}

/// Writes the columns of a row from column `at` past the caches, if they are aligned for it.
/// Nothing else may access them before a fence.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn stream<S: Simd, T: Element, const K: usize>(
    values: Lanes<S, T::Acc, K>,
    slots: &mut [MaybeUninit<T>],
    at: usize,
) -> bool {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128};

    /// Columns of four vectors of 512 bits. They stay in registers.
    const MOST: usize = 64;
    const { assert!(Lanes::<S, T::Acc, K>::WIDTH <= MOST) };
    // 16 bytes at a time at every level. Stores of 64 bytes are up to 5 % faster for 32768x1024,
    // but need an alignment that glibc does not give.
    let columns = &mut slots[at..][..Lanes::<S, T::Acc, K>::WIDTH];
    let to: *mut __m128i = columns.as_mut_ptr().cast();
    let size = size_of::<__m128i>();
    if !to.is_aligned() || !size_of_val(columns).is_multiple_of(size) {
        return false;
    }
    let mut buffer = [MaybeUninit::<T>::uninit(); MOST];
    let buffer = &mut buffer[..columns.len()];
    values.write(buffer, 0);
    let from: *const __m128i = buffer.as_ptr().cast();
    for i in 0..size_of_val(columns) / size {
        // `write` wrote all of `buffer`, and floating-point numbers have no padding.
        // SAFETY: `buffer` and `columns` have the same length, a multiple of 16 bytes, which `i` is
        // within, and `to` is aligned. A fence follows before anything reads.
        unsafe { store::<S>(to.add(i), _mm_loadu_si128(from.add(i))) };
    }
    true
}

/// A streamed store of 16 bytes in the encoding of the level's other instructions.
/// `_mm_stream_si128` always has the old one. Some older processors take 70 cycles to switch
/// between that and AVX.
///
/// # Safety
///
/// `to` must be valid for a write and aligned, and `S` a level of this processor. Nothing else may
/// access the value before a fence.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn store<S: Simd>(to: *mut std::arch::x86_64::__m128i, value: std::arch::x86_64::__m128i) {
    if cfg!(miri) {
        // Miri has no streamed stores. It checks a plain one.
        // SAFETY: by this function's contract.
        unsafe { to.write(value) };
    } else if size_of::<S::f32s>() > size_of_val(&value) {
        // SAFETY: by this function's contract; levels of wider vectors have AVX.
        unsafe {
            std::arch::asm!(
                "vmovntdq [{to}], {value}",
                to = in(reg) to,
                value = in(xmm_reg) value,
                options(nostack, preserves_flags),
            )
        };
    } else {
        // SAFETY: by this function's contract; every x86-64 processor has SSE2.
        unsafe { std::arch::x86_64::_mm_stream_si128(to, value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::lanes::Scaling;
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
            writer.extend::<4, _>(simd, &groups, &mut Negatives(source));
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
