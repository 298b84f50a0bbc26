//! Text as numbers: the vocabulary, the split, the batches.

use super::random::fnv1a;
use anyhow::{ensure, Context, Result};
use candle::{Device, Tensor};
use rand::{rngs::StdRng, Rng};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

/// What a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Character,
    /// A run of letters and digits, another character, or the end of a line. Rare ones are all
    /// [`UNKNOWN`].
    Word,
}

/// The token of words that are rarer than [`MIN_COUNT`] in the part to train on.
const UNKNOWN: &str = "<unk>";
const MIN_COUNT: usize = 3;

/// A text split into its first nine tenths, to train on, and the rest, to validate on.
pub struct Corpus {
    pub unit: Unit,
    /// The tokens of the text in order; a token is an index into them.
    pub vocab: Vec<String>,
    pub train: Vec<u32>,
    pub val: Vec<u32>,
    /// A hash of the text and what it was cut into, so that a checkpoint can tell whether it saw
    /// this one.
    pub fingerprint: u64,
}

impl Corpus {
    /// Reads a UTF-8 file.
    pub fn read(path: &Path, unit: Unit, context: usize) -> Result<Self> {
        let bytes =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let text = String::from_utf8(bytes)
            .ok()
            .with_context(|| format!("{} is not UTF-8 text", path.display()))?;
        Self::new(&text, unit, context).with_context(|| format!("cannot use {}", path.display()))
    }

    /// The characters of the sample text.
    #[cfg(test)]
    pub fn sample(context: usize) -> Self {
        let text = include_str!("../../sample/train.en");
        Self::new(text, Unit::Character, context).unwrap()
    }

    /// `context` is the longest stretch that must fit in either part.
    pub fn new(text: &str, unit: Unit, context: usize) -> Result<Self> {
        ensure!(!text.is_empty(), "the text is empty");
        let tokens = match unit {
            Unit::Character => text.split("").filter(|token| !token.is_empty()).collect(),
            Unit::Word => words(text),
        };
        let (train, val) = tokens.split_at(tokens.len() * 9 / 10);
        ensure!(
            train.len().min(val.len()) > context,
            "the text has {} {unit}s, too few for a context of {context}: its last tenth has {}",
            tokens.len(),
            val.len(),
        );
        let known: BTreeSet<&str> = match unit {
            Unit::Character => tokens.iter().copied().collect(),
            Unit::Word => common(train),
        };
        let vocab: Vec<&str> = known.into_iter().collect();
        let unknown = vocab.binary_search(&UNKNOWN).unwrap_or_default();
        let number = |token: &&str| vocab.binary_search(token).unwrap_or(unknown) as u32;
        Ok(Self {
            unit,
            train: train.iter().map(number).collect(),
            val: val.iter().map(number).collect(),
            vocab: vocab.into_iter().map(String::from).collect(),
            fingerprint: match unit {
                Unit::Character => fnv1a(text.as_bytes()),
                Unit::Word => fnv1a(&[text.as_bytes(), b"words"].concat()),
            },
        })
    }

    pub fn decode(&self, tokens: &[u32]) -> String {
        let tokens: Vec<&str> = tokens.iter().map(|&t| &*self.vocab[t as usize]).collect();
        tokens.join(match self.unit {
            Unit::Character => "",
            Unit::Word => " ",
        })
    }
}

impl std::fmt::Display for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.pad(match self {
            Self::Character => "character",
            Self::Word => "word",
        })
    }
}

fn words(text: &str) -> Vec<&str> {
    let mut words = vec![];
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first.is_alphanumeric() {
            true => rest.find(|c: char| !c.is_alphanumeric()),
            false => Some(first.len_utf8()),
        };
        let (word, after) = rest.split_at(length.unwrap_or(rest.len()));
        if !first.is_whitespace() || first == '\n' {
            words.push(word);
        }
        rest = after;
    }
    words
}

/// The words that come [`MIN_COUNT`] times at least, and the token of the others.
fn common<'a>(words: &[&'a str]) -> BTreeSet<&'a str> {
    let mut counts = HashMap::new();
    for &word in words {
        *counts.entry(word).or_insert(0) += 1;
    }
    let common = (counts.iter()).filter(|&(_, &count)| count >= MIN_COUNT);
    (common.map(|(&word, _)| word)).chain([UNKNOWN]).collect()
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

    /// Batches of `size` stretches each, which divides this one's.
    pub fn parts(&self, size: usize) -> Result<Vec<Self>> {
        let (count, context) = self.inputs.dims2()?;
        let part = |start| {
            Ok(Self {
                inputs: self.inputs.narrow(0, start, size)?,
                targets: (self.targets).narrow(0, start * context, size * context)?,
            })
        };
        (0..count).step_by(size).map(part).collect()
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
    use super::super::random::{generator, Use};
    use super::*;

    const CONTEXT: usize = 4;

    fn corpus() -> Corpus {
        let text = "the quick brown fox, ünïcode. ".repeat(4);
        Corpus::new(&text, Unit::Character, CONTEXT).unwrap()
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
        let corpus = |text: &str| Corpus::new(text, Unit::Character, CONTEXT);
        assert_eq!(corpus("").err().unwrap().to_string(), "the text is empty");
        assert!(corpus(&"x".repeat(40)).is_err());
        assert!(corpus(&"x".repeat(50)).is_ok());
    }

    #[test]
    fn words_are_letters_marks_and_lines_and_rare_ones_are_unknown() {
        let text = "Zwei Hunde, müde.\n".repeat(10) + "Eine Katze , zwei Hunde.\n";
        let corpus = Corpus::new(&text, Unit::Word, CONTEXT).unwrap();
        let vocab = ["\n", ",", ".", "<unk>", "Hunde", "Zwei", "müde"];
        assert_eq!(corpus.vocab, vocab);
        assert_eq!(corpus.train.len() + corpus.val.len(), 67);
        assert_eq!(corpus.decode(&corpus.val), "<unk> <unk> , <unk> Hunde . \n");
        let characters = Corpus::new(&text, Unit::Character, CONTEXT).unwrap();
        assert_ne!(corpus.fingerprint, characters.fingerprint);
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
