//! Random numbers that follow from a seed.

use rand::{rngs::StdRng, SeedableRng};

/// What random numbers are for.
#[derive(Debug, Clone, Copy)]
pub enum Use {
    Weights,
    Batch,
    Sample,
    Dropout,
}

/// The generator for one `use_` of one `step` of the run with this `seed`. Nothing carries over
/// from step to step, so a resumed run draws what it would have drawn.
pub fn generator(seed: u64, use_: Use, step: usize) -> StdRng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&(step as u64).to_le_bytes());
    key[16] = use_ as u8;
    StdRng::from_seed(key)
}

/// FNV-1a: unlike the standard library's hasher, the same on every platform and release.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
