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
pub(super) fn fill_output<T: Copy>(
    len: usize,
    piece: usize,
    fill: impl FnOnce(&mut [Piece<T>]),
) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    advise_huge_pages(out.spare_capacity_mut());
    let (start, piece) = (out.as_ptr(), piece.max(1));
    let mut pieces: Vec<Piece<T>> = out.spare_capacity_mut()[..len]
        .chunks_mut(piece)
        .map(|slots| Piece { slots, filled: 0 })
        .collect();
    fill(&mut pieces);
    let is_written = |(i, written): (usize, &Piece<T>)| {
        let first = i * piece;
        written.slots.as_ptr().cast() == start.wrapping_add(first)
            && written.filled == piece.min(len - first)
    };
    assert!(
        pieces.iter().enumerate().all(is_written),
        "a kernel left part of its output unwritten"
    );
    // SAFETY: there is room for `len` elements. By the assert, each piece of them is in its place
    // and counted as filled. Only `extend` counts: it asserts that the groups make up the row, of
    // which `sweep` takes each column once, and `Element::store` writes it.
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

impl<T: Element> Piece<'_, T> {
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
        sweep::<K, _, _, _>(simd, groups, len, &mut Write { slots, values });
        self.filled += cols;
    }

    /// The last `n` values.
    #[inline(always)]
    pub fn last(&self, n: usize) -> &[T] {
        let slots = &self.slots[self.filled - n..self.filled];
        // SAFETY: `extend` wrote all slots up to `filled`.
        unsafe { &*(slots as *const [MaybeUninit<T>] as *const [T]) }
    }
}

struct Write<'a, T, V> {
    slots: &'a mut [MaybeUninit<T>],
    values: V,
}

impl<T: Element, V: Values<T::Acc>> Columns<T::Acc> for Write<'_, T, V> {
    type Group = V::Group;

    #[inline(always)]
    fn step<S: Simd, const K: usize>(&mut self, simd: S, at: usize, group: V::Group) {
        let values: Lanes<S, _, K> = self.values.at(simd, at, group);
        values.write(self.slots, at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::Scalar128b;

    struct Negatives<'a>(&'a [f32]);

    impl Values<f32> for Negatives<'_> {
        type Group = ();

        fn at<S: Simd, const K: usize>(&mut self, simd: S, at: usize, _: ()) -> Lanes<S, f32, K> {
            Lanes::splat(simd, 0.) - Lanes::load(simd, self.0, at)
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
                    piece.extend::<1, _, _>(
                        Scalar128b,
                        part.len(),
                        &[()],
                        part.len(),
                        Negatives(part),
                    );
                }
            }
        });
        assert!(out.iter().zip(&source).all(|(out, source)| *out == -source));
        assert_eq!(out.len(), len);
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn another_piece_is_no_output() {
        fill_output(10, 5, |pieces: &mut [Piece<f32>]| {
            pieces
                .iter_mut()
                .for_each(|piece| *piece = Piece::default())
        });
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn an_unfinished_piece_is_no_output() {
        fill_output(10, 5, |pieces: &mut [Piece<f32>]| {
            pieces[0].extend::<1, _, _>(Scalar128b, 5, &[()], 5, Negatives(&[1.; 5]))
        });
    }
}
