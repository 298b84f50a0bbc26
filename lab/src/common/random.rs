//! Random numbers that follow from a seed.

use candle::{Result, Tensor};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::cell::RefCell;

/// A use of random numbers. Its number is part of the seed: recorded runs have these.
#[derive(Debug, Clone, Copy)]
pub enum Use {
    Weights = 0,
    Batch = 1,
    Dropout = 3,
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

/// Zeroes a share of the elements, in training. candle's own draws from a generator that cannot be
/// seeded on a CPU.
pub struct Dropout(Option<(f64, RefCell<StdRng>)>);

impl Dropout {
    pub fn new(share: f64, rng: StdRng) -> Self {
        Self((share > 0.).then(|| (share, RefCell::new(rng))))
    }

    /// For evaluation.
    pub fn none() -> Self {
        Self(None)
    }

    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let Some((share, rng)) = &self.0 else {
            return Ok(xs.clone());
        };
        // 16 random bits an element: a share in 65536ths.
        let mut random = vec![0u16; xs.elem_count()];
        rng.borrow_mut().fill(&mut random[..]);
        let dropped = (share * 65536.) as u16;
        let scale = 65536. / (65536. - f32::from(dropped));
        let factors: Vec<f32> = (random.into_iter())
            .map(|bits| if bits < dropped { 0. } else { scale })
            .collect();
        xs * Tensor::from_vec(factors, xs.shape(), xs.device())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::{DType, Device};

    #[test]
    fn dropout_drops_its_share_and_keeps_the_mean() -> Result<()> {
        let ones = Tensor::ones((100, 100), DType::F32, &Device::Cpu)?;
        let dropout = |step| Dropout::new(0.25, generator(1, Use::Dropout, step));
        let drawn = |dropout: Dropout| dropout.forward(&ones)?.flatten_all()?.to_vec1::<f32>();
        let values = drawn(dropout(0))?;
        let zeros = values.iter().filter(|&&value| value == 0.).count();
        // Of 10,000 draws: five standard deviations are 217.
        assert!((2283..2717).contains(&zeros), "{zeros}");
        assert!(values.iter().all(|&value| value == 0. || value == 4. / 3.));
        assert_eq!(values, drawn(dropout(0))?);
        assert_ne!(values, drawn(dropout(1))?);
        assert!(drawn(Dropout::none())?.iter().all(|&value| value == 1.));
        Ok(())
    }
}
