//! Outputs that are written once, never zero-filled first. The only unsafe code of the CPU path.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// A fresh output of `len` elements, written in pieces of `piece` elements by whoever `fill` hands the
/// pieces to.
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
pub(super) struct Piece<'a, T> {
    slots: &'a mut [MaybeUninit<T>],
    /// How many of the slots hold a value, from the front.
    written: usize,
}

impl<'a, T: Copy> Piece<'a, T> {
    /// The next `R` rows of `cols` elements.
    #[inline(always)]
    pub fn block<const R: usize>(&mut self, cols: usize) -> Block<'_, 'a, T, R> {
        Block {
            piece: self,
            cols,
            col: 0,
        }
    }
}

/// `R` rows of a [`Piece`], written side by side from their first column on.
pub(super) struct Block<'b, 'a, T, const R: usize> {
    piece: &'b mut Piece<'a, T>,
    cols: usize,
    col: usize,
}

impl<T: Copy, const R: usize> Block<'_, '_, T, R> {
    /// Writes the next `W` columns of each row.
    #[inline(always)]
    pub fn put<const W: usize>(&mut self, values: [[T; W]; R]) {
        let rows = &mut self.piece.slots[self.piece.written..][..R * self.cols];
        for (r, values) in values.into_iter().enumerate() {
            let row = &mut rows[r * self.cols..][..self.cols][self.col..][..W];
            for (slot, value) in row.iter_mut().zip(values) {
                slot.write(value);
            }
        }
        self.col += W;
        if self.col == self.cols {
            self.piece.written += R * self.cols;
            self.col = 0;
        }
    }
}
