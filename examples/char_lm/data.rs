//! Text as numbers: the vocabulary, the split, the batches.

use anyhow::{ensure, Context, Result};
use candle::{Device, Tensor};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::path::Path;

/// A text split into its first nine tenths, to train on, and the rest, to validate on.
pub struct Corpus {
    /// The characters of the text in order; a token is an index into them.
    pub vocab: Vec<char>,
    pub train: Vec<u32>,
    pub val: Vec<u32>,
    /// A hash of the text, so that a checkpoint can tell whether it saw this one.
    pub fingerprint: u64,
}

impl Corpus {
    /// Reads a UTF-8 file.
    pub fn read(path: &Path, context: usize) -> Result<Self> {
        let bytes =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let text = String::from_utf8(bytes)
            .ok()
            .with_context(|| format!("{} is not UTF-8 text", path.display()))?;
        Self::new(&text, context).with_context(|| format!("cannot use {}", path.display()))
    }

    /// `context` is the longest stretch that must fit in either part.
    pub fn new(text: &str, context: usize) -> Result<Self> {
        ensure!(!text.is_empty(), "the text is empty");
        let mut vocab: Vec<char> = text.chars().collect();
        vocab.sort_unstable();
        vocab.dedup();
        let mut train: Vec<u32> = text
            .chars()
            .map(|c| vocab.partition_point(|&v| v < c) as u32)
            .collect();
        let val = train.split_off(train.len() * 9 / 10);
        ensure!(
            train.len().min(val.len()) > context,
            "the text has {} characters, too few for a context of {context}: its last tenth has {}",
            train.len() + val.len(),
            val.len(),
        );
        Ok(Self {
            vocab,
            train,
            val,
            fingerprint: fnv1a(text.as_bytes()),
        })
    }

    pub fn decode(&self, tokens: &[u32]) -> String {
        tokens.iter().map(|&t| self.vocab[t as usize]).collect()
    }
}

/// FNV-1a: unlike the standard library's hasher, the same on every platform and release.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
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

/// What random numbers are for.
#[derive(Debug, Clone, Copy)]
pub enum Use {
    Weights,
    Batch,
    Sample,
}

/// Stretches of `context` tokens, `[batch, context]`, and for each token the one that follows it,
/// `[batch * context]`.
pub struct Batch {
    pub inputs: Tensor,
    pub targets: Tensor,
}

impl Batch {
    fn new(tokens: &[u32], starts: &[usize], context: usize, device: &Device) -> Result<Self> {
        let stretch = |offset| {
            let stretches = starts
                .iter()
                .map(|&start| &tokens[start + offset..][..context]);
            stretches.flatten().copied().collect::<Vec<_>>()
        };
        let inputs = Tensor::from_vec(stretch(0), (starts.len(), context), device)?;
        let targets = Tensor::from_vec(stretch(1), starts.len() * context, device)?;
        Ok(Self { inputs, targets })
    }

    /// Stretches drawn from `tokens`.
    pub fn random(
        tokens: &[u32],
        size: usize,
        context: usize,
        rng: &mut StdRng,
        device: &Device,
    ) -> Result<Self> {
        let starts: Vec<usize> = (0..size)
            .map(|_| rng.random_range(..tokens.len() - context))
            .collect();
        Self::new(tokens, &starts, context, device)
    }

    /// `count` batches spread evenly over all of `tokens`: the same ones at every evaluation, of
    /// every run.
    pub fn spread<'a>(
        tokens: &'a [u32],
        count: usize,
        size: usize,
        context: usize,
        device: &'a Device,
    ) -> impl Iterator<Item = Result<Self>> + 'a {
        let last = tokens.len() - context - 1;
        let stretches = count * size;
        (0..count).map(move |batch| {
            let starts: Vec<usize> = (batch * size..(batch + 1) * size)
                .map(|i| last * i / (stretches - 1).max(1))
                .collect();
            Self::new(tokens, &starts, context, device)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: usize = 4;

    fn corpus() -> Corpus {
        Corpus::new(&"the quick brown fox, ünïcode. ".repeat(4), CONTEXT).unwrap()
    }

    #[test]
    fn splits_off_the_last_tenth_and_decodes_to_the_text() {
        let corpus = corpus();
        assert_eq!((corpus.train.len(), corpus.val.len()), (108, 12));
        let tokens = [&*corpus.train, &*corpus.val].concat();
        assert_eq!(
            corpus.decode(&tokens),
            "the quick brown fox, ünïcode. ".repeat(4)
        );
        assert!(corpus.vocab.is_sorted());
    }

    #[test]
    fn refuses_a_text_without_room_for_a_context() {
        assert_eq!(
            Corpus::new("", CONTEXT).err().unwrap().to_string(),
            "the text is empty"
        );
        assert!(Corpus::new(&"x".repeat(40), CONTEXT).is_err());
        assert!(Corpus::new(&"x".repeat(50), CONTEXT).is_ok());
    }

    #[test]
    fn a_target_is_the_token_after_its_input() -> Result<()> {
        let tokens: Vec<u32> = (0..30).collect();
        let mut rng = generator(7, Use::Batch, 3);
        let batch = Batch::random(&tokens, 5, CONTEXT, &mut rng, &Device::Cpu)?;
        let inputs = batch.inputs.flatten_all()?.to_vec1::<u32>()?;
        let targets = batch.targets.to_vec1::<u32>()?;
        assert_eq!(inputs.len(), 5 * CONTEXT);
        assert!(inputs
            .iter()
            .zip(&targets)
            .all(|(input, target)| input + 1 == *target));
        Ok(())
    }

    #[test]
    fn a_batch_follows_from_seed_and_step() -> Result<()> {
        let corpus = corpus();
        let inputs = |seed, step| -> Result<Vec<Vec<u32>>> {
            let mut rng = generator(seed, Use::Batch, step);
            let batch = Batch::random(&corpus.train, 8, CONTEXT, &mut rng, &Device::Cpu)?;
            Ok(batch.inputs.to_vec2()?)
        };
        assert_eq!(inputs(1, 2)?, inputs(1, 2)?);
        assert_ne!(inputs(1, 2)?, inputs(1, 3)?);
        assert_ne!(inputs(1, 2)?, inputs(2, 2)?);
        Ok(())
    }

    #[test]
    fn an_evaluation_spreads_from_the_first_token_to_the_last() -> Result<()> {
        let tokens: Vec<u32> = (0..50).collect();
        let batches =
            Batch::spread(&tokens, 3, 2, CONTEXT, &Device::Cpu).collect::<Result<Vec<_>>>()?;
        assert_eq!(batches.len(), 3);
        assert_eq!(batches[0].inputs.to_vec2::<u32>()?[0], [0, 1, 2, 3]);
        assert_eq!(batches[2].targets.to_vec1::<u32>()?[4..], [46, 47, 48, 49]);
        // Just one stretch, and a text that has room for no other.
        let one = Batch::spread(&tokens[..5], 1, 1, CONTEXT, &Device::Cpu).next();
        assert_eq!(
            one.context("no batch")??.targets.to_vec1::<u32>()?,
            [1, 2, 3, 4]
        );
        Ok(())
    }
}
