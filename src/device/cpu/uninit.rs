//! Outputs that are written once, never zero-filled first.
#![allow(unsafe_code)]

use super::element::{Accumulator, Element};
use super::lanes::{sweep, Columns, Lanes};
use pulp::Simd;
use std::mem::MaybeUninit;

/// A fresh output of `len` elements in pieces of `piece` elements, which `fill` writes.
///
/// # Panics
///
/// If `fill` leaves a piece unfinished, or puts another in its place.
pub(super) fn fill_output<T: Copy, const STREAMS: bool>(
    len: usize,
    piece: usize,
    fill: impl FnOnce(&mut [Piece<T, STREAMS>]),
) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    advise_huge_pages(out.spare_capacity_mut());
    let (start, piece) = (out.as_ptr(), piece.max(1));
    let mut pieces: Vec<Piece<T, STREAMS>> = out.spare_capacity_mut()[..len]
        .chunks_mut(piece)
        .map(|slots| Piece {
            slots,
            filled: 0,
            is_fenced: true,
        })
        .collect();
    fill(&mut pieces);
    let is_written = |(i, written): (usize, &Piece<T, STREAMS>)| {
        let first = i * piece;
        written.slots.as_ptr().cast() == start.wrapping_add(first)
            && written.filled == piece.min(len - first)
            && written.is_fenced
    };
    assert!(
        pieces.iter().enumerate().all(is_written),
        "a kernel left part of its output unwritten"
    );
    // Only `extend` counts what is filled: it asserts that the groups make up the row, of which
    // `sweep` takes each column once, and `Write::step` writes it.
    // SAFETY: there is room for `len` elements. By the assert, each piece of them is in its place,
    // counted as filled and fenced.
    unsafe { out.set_len(len) };
    out
}

/// Outputs of at least this many bytes are streamed: their stores bypass the caches, which would
/// lose most values before anyone reads them. `x + residual` is not, because it is read at once.
///
/// The size is from a processor with 32 MiB of L3. `benches/results/2026-11-22-cpu.md` has what it
/// gains there: most in f32, and nothing in a bf16 forward.
pub(super) const STREAMED: usize = 16 << 20;

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

/// A run of rows of an output, written from the front, by stores that bypass the caches if
/// `STREAMS`.
pub(crate) struct Piece<'a, T, const STREAMS: bool> {
    slots: &'a mut [MaybeUninit<T>],
    /// How many of the slots hold a value, from the front.
    filled: usize,
    /// False while streamed values may be on their way to memory.
    is_fenced: bool,
}

impl<T, const STREAMS: bool> Default for Piece<'_, T, STREAMS> {
    /// Has room for nothing.
    fn default() -> Self {
        Self {
            slots: &mut [],
            filled: 0,
            is_fenced: true,
        }
    }
}

/// Values of a row. Implementations are `#[inline(always)]`.
pub(super) trait Values<A: Accumulator> {
    /// What the columns of a group share.
    type Group: Copy;

    /// The values in the columns of `K` vectors, from column `at`.
    fn at<S: Simd, const K: usize>(
        &mut self,
        simd: S,
        at: usize,
        group: Self::Group,
    ) -> Lanes<S, A, K>;
}

impl<T: Element, const STREAMS: bool> Piece<'_, T, STREAMS> {
    /// Writes `values` of the next row, `K` vectors at a time. Its `cols` columns are `groups` of
    /// `len` columns each.
    ///
    /// # Panics
    ///
    /// If they are not.
    #[inline(always)]
    pub fn extend<const K: usize, S: Simd, V: Values<T::Acc>>(
        &mut self,
        simd: S,
        cols: usize,
        groups: &[V::Group],
        len: usize,
        values: V,
    ) {
        assert_eq!(groups.len() * len, cols, "groups that make up no row");
        let slots = &mut self.slots[self.filled..][..cols];
        let mut write = Write::<STREAMS, _, _> { slots, values };
        sweep::<K, _, _, _>(simd, groups, len, &mut write);
        self.filled += cols;
        self.is_fenced = !STREAMS;
    }

    /// Waits for streamed values, on the thread that wrote them. Nothing else may access their
    /// memory before.
    ///
    /// A fence after each row would cost 85 ns, as much as a whole forward of 512 columns.
    #[inline(always)]
    pub fn fence(&mut self) {
        // Miri has no such fence, and needs none: see `stream`.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if !self.is_fenced {
            // SAFETY: every x86-64 processor has SSE.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
        self.is_fenced = true;
    }
}

impl<T: Element> Piece<'_, T, false> {
    /// The last `n` values.
    #[inline(always)]
    pub fn last(&self, n: usize) -> &[T] {
        let slots = &self.slots[self.filled - n..self.filled];
        // SAFETY: `extend` wrote all slots up to `filled`.
        unsafe { &*(slots as *const [MaybeUninit<T>] as *const [T]) }
    }
}

struct Write<'a, const STREAMS: bool, T, V> {
    slots: &'a mut [MaybeUninit<T>],
    values: V,
}

impl<const STREAMS: bool, T: Element, V: Values<T::Acc>> Columns<T::Acc>
    for Write<'_, STREAMS, T, V>
{
    type Group = V::Group;

    #[inline(always)]
    fn step<S: Simd, const K: usize>(&mut self, simd: S, at: usize, group: V::Group) {
        let values: Lanes<S, _, K> = self.values.at(simd, at, group);
        #[cfg(target_arch = "x86_64")]
        if STREAMS && stream(values, self.slots, at) {
            return;
        }
        values.write(self.slots, at);
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
/// `_mm_stream_si128` always has the old one. Some older processors take 70 cycles to switch between
/// that and AVX.
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
    use crate::device::cpu::simd::Level;
    use pulp::{Scalar128b, WithSimd};

    struct Negatives<'a>(&'a [f32]);

    impl Values<f32> for Negatives<'_> {
        type Group = ();

        fn at<S: Simd, const K: usize>(&mut self, simd: S, at: usize, _: ()) -> Lanes<S, f32, K> {
            Lanes::splat(simd, 0.) - Lanes::load(simd, self.0, at)
        }
    }

    struct Extend<'a, 'b>(&'a mut Piece<'b, f32, true>, &'a [f32]);

    impl WithSimd for Extend<'_, '_> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            let Self(piece, source) = self;
            piece.extend::<4, _, _>(simd, source.len(), &[()], source.len(), Negatives(source));
        }
    }

    /// Large enough to be streamed, with parts that are aligned for it and parts that are not. Miri
    /// takes its time, so there it is small.
    #[test]
    fn pieces_make_up_the_output() {
        let bytes = if cfg!(miri) { 6 << 11 } else { STREAMED };
        let len = bytes / size_of::<f32>() + 3;
        let source: Vec<f32> = (0..len).map(|i| i as f32).collect();
        for level in Level::all() {
            let out = fill_output(len, 1000, |pieces: &mut [Piece<f32, true>]| {
                for (piece, source) in pieces.iter_mut().zip(source.chunks(1000)) {
                    let (first, second) = source.split_at(source.len() / 3);
                    for part in [first, second] {
                        level.run(Extend(piece, part));
                    }
                    piece.fence();
                }
            });
            assert!(out.iter().zip(&source).all(|(out, source)| *out == -source));
            assert_eq!(out.len(), len);
        }
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn a_piece_without_a_fence_is_no_output() {
        let source = [1.; 10];
        fill_output(10, 10, |pieces: &mut [Piece<f32, true>]| {
            Level::Baseline.run(Extend(&mut pieces[0], &source));
        });
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn another_piece_is_no_output() {
        fill_output(10, 5, |pieces: &mut [Piece<f32, true>]| {
            pieces
                .iter_mut()
                .for_each(|piece| *piece = Piece::default())
        });
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn an_unfinished_piece_is_no_output() {
        fill_output(10, 5, |pieces: &mut [Piece<f32, true>]| {
            pieces[0].extend::<1, _, _>(Scalar128b, 5, &[()], 5, Negatives(&[1.; 5]));
            pieces[0].fence();
        });
    }
}
