//! A plain copy, which others are held against.

use rayon::prelude::*;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// The time of `iterations` copies of so many bytes into memory that is already mapped, on rayon's
/// threads.
pub fn time(bytes: usize, iterations: u64) -> Duration {
    const CHUNK: usize = 1 << 18;
    let source = vec![1u8; bytes];
    let mut target = vec![2u8; bytes];
    let start = Instant::now();
    for _ in 0..iterations {
        target
            .par_chunks_mut(CHUNK)
            .zip(source.par_chunks(CHUNK))
            .for_each(|(target, source)| target.copy_from_slice(source));
        black_box(&target);
    }
    start.elapsed()
}
