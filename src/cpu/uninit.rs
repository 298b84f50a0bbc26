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
/// If `fill` leaves a piece unfinished.
pub(super) fn fill_output<T: Copy>(
    len: usize,
    piece: usize,
    fill: impl FnOnce(&mut [Piece<T>]),
) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    advise_huge_pages(out.spare_capacity_mut());
    let mut pieces: Vec<Piece<T>> = out.spare_capacity_mut()[..len]
        .chunks_mut(piece.max(1))
        .map(|slots| Piece { slots, filled: 0 })
        .collect();
    fill(&mut pieces);
    assert!(
        pieces.iter().all(|piece| piece.filled == piece.slots.len()),
        "a kernel left part of its output unwritten"
    );
    // SAFETY: the pieces cover the first `len` elements of the buffer, which has room for them. A
    // piece counts an element as filled only after `Element::store` wrote it, and by the assert all
    // are.
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

/// A run of rows of an output, written from the front.
pub(crate) struct Piece<'a, T> {
    slots: &'a mut [MaybeUninit<T>],
    /// How many of the slots hold a value, from the front.
    filled: usize,
}

impl<T> Default for Piece<'_, T> {
    /// Has room for nothing.
    fn default() -> Self {
        Self {
            slots: &mut [],
            filled: 0,
        }
    }
}

/// Values of adjacent columns. Implementations are `#[inline(always)]`.
pub(super) trait Values<A: Accumulator> {
    /// The values in the `i`-th vector of columns.
    fn at<S: Simd>(&mut self, simd: S, i: usize) -> Lanes<S, A>;
}

impl<T: Element> Piece<'_, T> {
    /// Writes the next `n` elements: `values` of columns `0..n`.
    #[inline(always)]
    pub fn extend<S: Simd>(&mut self, simd: S, n: usize, values: impl Values<T::Acc>) {
        let slots = &mut self.slots[self.filled..][..n];
        sweep(simd, n, &mut Write { slots, values });
        self.filled += n;
    }

    /// The values so far.
    pub fn as_slice(&self) -> &[T] {
        let slots = &self.slots[..self.filled];
        // SAFETY: `extend` wrote them.
        unsafe { &*(slots as *const [MaybeUninit<T>] as *const [T]) }
    }
}

struct Write<'a, T, V> {
    slots: &'a mut [MaybeUninit<T>],
    values: V,
}

impl<T: Element, V: Values<T::Acc>> Columns<T::Acc> for Write<'_, T, V> {
    #[inline(always)]
    fn step<S: Simd>(&mut self, simd: S, i: usize) {
        let values = self.values.at(simd, i);
        T::store(simd, values.vector, self.slots, i);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::Scalar128b;

    struct Negatives<'a>(&'a [f32]);

    impl Values<f32> for Negatives<'_> {
        fn at<S: Simd>(&mut self, simd: S, i: usize) -> Lanes<S, f32> {
            Lanes::splat(simd, 0.) - Lanes::load(simd, self.0, i)
        }
    }

    /// Larger than [`HUGE`], so that the advice is given too; but not under Miri, which takes its
    /// time.
    #[test]
    fn pieces_make_up_the_output() {
        let bytes = if cfg!(miri) { 6 << 11 } else { 6 << 20 };
        let len = bytes / size_of::<f32>() + 3;
        let source: Vec<f32> = (0..len).map(|i| i as f32).collect();
        let out = fill_output(len, 1000, |pieces: &mut [Piece<f32>]| {
            for (piece, source) in pieces.iter_mut().zip(source.chunks(1000)) {
                let (first, second) = source.split_at(source.len() / 3);
                for part in [first, second] {
                    piece.extend(Scalar128b, part.len(), Negatives(part));
                }
            }
        });
        assert!(out.iter().zip(&source).all(|(out, source)| *out == -source));
        assert_eq!(out.len(), len);
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn an_unfinished_piece_is_no_output() {
        fill_output(10, 5, |pieces: &mut [Piece<f32>]| {
            pieces[0].extend(Scalar128b, 5, Negatives(&[1.; 5]))
        });
    }
}
