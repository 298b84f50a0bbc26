//! Outputs that are written once, never zero-filled first.
#![allow(unsafe_code)]

use super::element::Element;
use super::lanes::{sweep, Columns, Groups, Lanes, Sink, Span, MOST_COLUMNS};
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
/// The size is from a processor with 32 MiB of L3, where f32 gained most and a bf16 forward nothing
/// (`benches/results/2026-11-22-cpu.md`). At 32768x1024 in f32 a forward takes about 30 % less time
/// with them, and a whole step through candle about 15 % less on one thread, though none on two
/// (`2026-11-25-streamed.md`).
pub(super) const NON_TEMPORAL: usize = 16 << 20;

/// A fresh output of `len` elements in chunks of `chunk_len` elements, which `fill` writes. Without
/// `len` there is no output, and `fill` gets no chunk.
///
/// # Panics
///
/// If `fill` leaves a part of the output unwritten.
pub(super) fn fill_output<T: Copy>(
    len: Option<usize>,
    chunk_len: usize,
    stores: Stores,
    fill: impl FnOnce(Vec<Part<T>>),
) -> Option<Vec<T>> {
    let Some(len) = len else {
        fill(vec![]);
        return None;
    };
    let mut out = Vec::with_capacity(len);
    advise_huge_pages(out.spare_capacity_mut());
    let mut filled = vec![0; len.div_ceil(chunk_len)];
    let chunks = out.spare_capacity_mut()[..len].chunks_mut(chunk_len);
    fill(
        chunks
            .zip(&mut filled)
            .map(|(slots, filled)| Part {
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
    // filled: once a chunk, no more than the chunk has, and after its fence. It counts whole rows,
    // each of which `sweep` has written: `Groups` keeps its number of columns private, `sweep`
    // visits each of them, and by the contract of `Element` a store writes all it is given. So by
    // the assert every chunk is written.
    unsafe { out.set_len(len) };
    Some(out)
}

/// Outputs of at least this many bytes ask for huge pages. Allocators take them from the system
/// anew each time, and a fault for each page of 4 KiB then costs more than the arithmetic that
/// fills it.
///
/// Under glibc, a forward of 32 MiB then has 528 page faults instead of 8193, and a forward and
/// backward of 8 MiB 1046 instead of 4112. mimalloc keeps its pages, and has none either way.
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

/// A chunk's part of an output.
pub(super) struct Part<'a, T> {
    slots: &'a mut [MaybeUninit<T>],
    /// The number of slots that hold a value, from the front.
    filled: &'a mut usize,
    stores: Stores,
}

/// Writes a part from the front, row by row.
pub(super) struct RowWriter<'a, T> {
    part: Part<'a, T>,
    filled: usize,
    /// Only a fence on the thread that wrote makes non-temporal stores visible to others.
    stays: PhantomData<*mut ()>,
}

impl<'a, T: Element> RowWriter<'a, T> {
    pub fn new(part: Part<'a, T>) -> Self {
        Self {
            part,
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
        match self.part.stores {
            Stores::Cached => self.extend_cached::<K, _>(simd, groups, columns),
            #[cfg(target_arch = "x86_64")]
            Stores::NonTemporal => {
                let row = &mut self.part.slots[self.filled..][..groups.cols()];
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
        let row = &mut self.part.slots[self.filled..][..groups.cols()];
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
        assert_eq!(self.part.stores, Stores::Cached);
        // SAFETY: `extend` wrote all slots up to `filled`: `sweep` visits each column of a row, and
        // by the contract of `Element` its store writes each element that it is given.
        unsafe { self.part.slots[self.filled - n..self.filled].assume_init_ref() }
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
        if self.part.stores == Stores::NonTemporal {
            // SAFETY: every x86-64 processor has SSE.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
        *self.part.filled = self.filled;
    }
}

/// A row that is written past the caches.
#[cfg(target_arch = "x86_64")]
struct PastCaches<'a, T>(&'a mut [MaybeUninit<T>]);

#[cfg(target_arch = "x86_64")]
impl<T: Element> Sink<T> for PastCaches<'_, T> {
    #[inline(always)]
    fn write<S: Simd, const K: usize>(&mut self, columns: Lanes<S, T::Acc, K>, start: usize) {
        if !stream(columns, self.0, start) {
            columns.write(self.0, start);
        }
    }
}

/// Writes the columns of a row from column `start` past the caches, if they are aligned for it.
/// Nothing else may access them before a fence.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn stream<S: Simd, T: Element, const K: usize>(
    values: Lanes<S, T::Acc, K>,
    slots: &mut [MaybeUninit<T>],
    start: usize,
) -> bool {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128};

    const { assert!(Span::<S, T::Acc, K>::WIDTH <= MOST_COLUMNS) };
    // 16 bytes at a time at every level. Stores of 64 bytes are up to 5 % faster for 32768x1024,
    // but need an alignment that glibc does not give.
    let columns = &mut slots[start..][..Span::<S, T::Acc, K>::WIDTH];
    let to: *mut __m128i = columns.as_mut_ptr().cast();
    let size = size_of::<__m128i>();
    if !to.is_aligned() || !size_of_val(columns).is_multiple_of(size) {
        return false;
    }
    // It stays in registers.
    let mut buffer = [MaybeUninit::<T>::uninit(); MOST_COLUMNS];
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
pub(super) mod tests {
    use super::*;
    use crate::device::cpu::simd::Level;
    use half::{bf16, f16};
    use pulp::WithSimd;

    struct Extend<'a, 'b, T, U>(&'a mut RowWriter<'b, U>, &'a [T]);

    impl<T: Element, U: Element<Acc = T::Acc>> WithSimd for Extend<'_, '_, T, U> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            let Self(writer, mut source) = self;
            let groups = Groups::new(source.len(), source.len());
            writer.extend::<4, _>(simd, &groups, &mut source);
        }
    }

    /// The numbers of `source` in another dtype, as one row.
    pub fn convert<T: Element, U: Element<Acc = T::Acc>>(level: Level, source: &[T]) -> Vec<U> {
        let len = source.len();
        let out = fill_output(Some(len), len, Stores::Cached, |parts| {
            for part in parts {
                level.run(Extend(&mut RowWriter::new(part), source));
            }
        });
        out.unwrap()
    }

    /// Chunks of two rows, of which some are aligned for non-temporal stores and some are not.
    fn chunks_make_up_the_output_in<T: Element>() {
        let len = if cfg!(miri) { 3003 } else { 30_003 };
        let source: Vec<_> = (0..len).map(|i| T::from_f64((i % 1000) as f64)).collect();
        for level in Level::all() {
            for stores in [Stores::Cached, Stores::NonTemporal] {
                let out = fill_output(Some(len), 1000, stores, |parts| {
                    for (part, source) in parts.into_iter().zip(source.chunks(1000)) {
                        let (first, second) = source.split_at(source.len() / 3);
                        let mut writer = RowWriter::new(part);
                        for row in [first, second] {
                            level.run(Extend(&mut writer, row));
                        }
                    }
                });
                assert!(out.as_ref() == Some(&source), "{level:?}, {stores:?}");
            }
        }
    }

    #[test]
    fn chunks_make_up_the_output() {
        chunks_make_up_the_output_in::<f32>();
        chunks_make_up_the_output_in::<f64>();
        chunks_make_up_the_output_in::<f16>();
        chunks_make_up_the_output_in::<bf16>();
    }

    /// Writes `rows` rows of five to each part of an output of ten.
    fn fill_with(rows: [usize; 2], finish: impl Fn(RowWriter<f32>)) {
        fill_output(Some(10), 5, Stores::NonTemporal, |parts| {
            for (part, rows) in parts.into_iter().zip(rows) {
                let mut writer = RowWriter::new(part);
                for _ in 0..rows {
                    Level::Baseline.run(Extend(&mut writer, &[1f32; 5]));
                }
                finish(writer);
            }
        });
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn a_writer_without_its_fence_is_no_output() {
        fill_with([1, 1], |writer| std::mem::forget(writer));
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn an_unfinished_part_is_no_output() {
        fill_with([1, 0], |writer| drop(writer));
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn a_row_too_many_is_no_output() {
        fill_with([1, 2], |writer| drop(writer));
    }
}
