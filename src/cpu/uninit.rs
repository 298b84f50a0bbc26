//! Outputs that are written once, never zero-filled first. The only unsafe code of the CPU path.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// A fresh output of `len` elements in pieces of `piece` elements, which `fill` writes.
///
/// # Panics
///
/// If `fill` leaves a piece unfinished.
pub(super) fn written<T: Copy>(
    len: usize,
    piece: usize,
    fill: impl FnOnce(&mut [Piece<T>]),
) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    let mut pieces: Vec<Piece<T>> = out.spare_capacity_mut()[..len]
        .chunks_mut(piece.max(1))
        .map(|slots| Piece { slots, written: 0 })
        .collect();
    fill(&mut pieces);
    assert!(
        pieces
            .iter()
            .all(|piece| piece.written == piece.slots.len()),
        "a kernel left part of its output unwritten"
    );
    // SAFETY: the pieces cover the first `len` elements of the buffer, whose capacity is at least
    // `len`, and a piece counts an element as written only after it wrote it; all are, by the assert.
    unsafe { out.set_len(len) };
    out
}

/// A run of rows of an output, written from the front.
pub(crate) struct Piece<'a, T> {
    slots: &'a mut [MaybeUninit<T>],
    /// How many of the slots hold a value, from the front.
    written: usize,
}

impl<'a, T: Copy> Piece<'a, T> {
    /// The next `R` rows of `cols` elements, to be written side by side.
    #[inline(always)]
    pub fn rows<const R: usize>(&mut self, cols: usize) -> PieceRows<'_, 'a, T, R> {
        PieceRows {
            piece: self,
            cols,
            col: 0,
        }
    }

    /// Writes the next elements, `value` of each of `sources`.
    #[inline(always)]
    pub fn extend<S: Copy>(&mut self, sources: &[S], value: impl Fn(S) -> T) {
        let slots = &mut self.slots[self.written..][..sources.len()];
        for (slot, &source) in slots.iter_mut().zip(sources) {
            slot.write(value(source));
        }
        self.written += sources.len();
    }
}

/// The next rows of a [`Piece`], written from their first column on.
pub(crate) struct PieceRows<'p, 'a, T, const R: usize> {
    piece: &'p mut Piece<'a, T>,
    cols: usize,
    /// How many columns are written.
    col: usize,
}

impl<T: Copy, const R: usize> PieceRows<'_, '_, T, R> {
    /// Writes the next `W` columns of each row.
    #[inline(always)]
    pub fn put<const W: usize>(&mut self, values: &[[T; W]; R]) {
        let rows = &mut self.piece.slots[self.piece.written..][..R * self.cols];
        for r in 0..R {
            let slots = &mut rows[r * self.cols..][..self.cols][self.col..][..W];
            for lane in 0..W {
                slots[lane].write(values[r][lane]);
            }
        }
        self.col += W;
        if self.col == self.cols {
            self.piece.written += R * self.cols;
            self.col = 0;
        }
    }
}
