//! An allocator that counts the bytes which are allocated and not freed.
#![allow(dead_code)] // each bench uses its share

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Another allocator, whose bytes it counts.
pub struct Counting<A>(pub A);

/// Bytes that are allocated and not freed, and the most that they have been.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Bytes that are allocated and not freed.
pub fn live() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// Runs `work`, and returns the most bytes that were allocated at once meanwhile, beyond those that
/// already were.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = live();
    PEAK.store(before, Ordering::Relaxed);
    let result = work();
    (result, PEAK.load(Ordering::Relaxed) - before)
}

fn add(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(live, Ordering::Relaxed);
}

fn subtract(bytes: usize) {
    LIVE.fetch_sub(bytes, Ordering::Relaxed);
}

// SAFETY: every call goes to the other allocator as it came, and `realloc` is `GlobalAlloc`'s own,
// which calls `alloc` and `dealloc`.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counting<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: by the contract of this function, which is the same.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as above.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        subtract(layout.size());
        // SAFETY: as above; `pointer` came from the other allocator.
        unsafe { self.0.dealloc(pointer, layout) }
    }
}
