//! Text as numbers: the vocabulary, the split, the batches.

use super::random::fnv1a;
use anyhow::{Context, Result, ensure};
use candle::{Device, Tensor};
use rand::{Rng, rngs::StdRng};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// The kind of a token.
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

/// A text to train on, and others to score on.
pub struct Corpus {
    pub unit: Unit,
    /// The tokens of the text in order; a token is an index into them.
    pub vocab: Vec<String>,
    pub train: Vec<u32>,
    pub val: Vec<u32>,
    /// Scored once. No choice has seen it.
    pub test: Option<Vec<u32>>,
    /// A hash of the texts and what it was cut into, so that a checkpoint can tell whether it saw
    /// this one.
    pub fingerprint: u64,
}

/// Texts that a model does not train on.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct HeldOut {
    /// UTF-8 text to validate on [default: the last tenth of the text, which the model then does
    /// not train on]
    #[arg(long, value_name = "FILE")]
    val: Option<PathBuf>,

    /// UTF-8 text to score a finished run on, once. Nothing is chosen by it
    #[arg(long, value_name = "FILE", requires = "val")]
    test: Option<PathBuf>,
}

impl Corpus {
    /// Reads UTF-8 files.
    pub fn read(path: &Path, held_out: &HeldOut, unit: Unit, context: usize) -> Result<Self> {
        let HeldOut { val, test } = held_out;
        let read = |path: &Path| {
            let bytes =
                std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            (String::from_utf8(bytes).ok())
                .with_context(|| format!("{} is not UTF-8 text", path.display()))
        };
        let text = read(path)?;
        let val = val.as_deref().map(read).transpose()?;
        let test = test.as_deref().map(read).transpose()?;
        Self::of(&text, val.as_deref(), test.as_deref(), unit, context)
            .with_context(|| format!("cannot use {}", path.display()))
    }

    /// The characters of the sample text.
    #[cfg(test)]
    pub fn sample(context: usize) -> Self {
        let text = include_str!("../../sample/train.en");
        Self::new(text, Unit::Character, context).unwrap()
    }

    /// A text of which the last tenth is to validate on. `context` is the longest stretch that must
    /// fit in either part.
    #[cfg(test)]
    pub fn new(text: &str, unit: Unit, context: usize) -> Result<Self> {
        Self::of(text, None, None, unit, context)
    }

    fn of(
        text: &str,
        val_text: Option<&str>,
        test_text: Option<&str>,
        unit: Unit,
        context: usize,
    ) -> Result<Self> {
        ensure!(!text.is_empty(), "the text is empty");
        let tokens = unit.cut(text);
        let val = val_text.map(|text| unit.cut(text));
        let test = test_text.map(|text| unit.cut(text));
        let (train, val) = match &val {
            None => tokens.split_at(tokens.len() * 9 / 10),
            Some(val) => (&*tokens, &**val),
        };
        ensure!(
            train.len().min(val.len()) > context,
            "the text has {} {unit}s to train on and {} to validate on, too few for a context of \
             {context}",
            train.len(),
            val.len(),
        );
        if let Some(test) = &test {
            ensure!(
                test.len() > context,
                "the test text has {} {unit}s, too few for a context of {context}",
                test.len()
            );
        }
        let known: BTreeSet<&str> = match unit {
            Unit::Character => {
                let held_out = val.iter().chain(test.iter().flatten());
                train.iter().chain(held_out).copied().collect()
            }
            Unit::Word => common(train),
        };
        let vocab: Vec<&str> = known.into_iter().collect();
        let unknown = vocab.binary_search(&UNKNOWN).unwrap_or_default();
        let number = |token: &&str| vocab.binary_search(token).unwrap_or(unknown) as u32;
        let mut hashed = text.as_bytes().to_vec();
        if unit == Unit::Word {
            hashed.extend(b"words");
        }
        for other in [val_text, test_text].into_iter().flatten() {
            hashed.push(0);
            hashed.extend(other.as_bytes());
        }
        Ok(Self {
            unit,
            train: train.iter().map(number).collect(),
            val: val.iter().map(number).collect(),
            test: test.map(|test| test.iter().map(number).collect()),
            fingerprint: fnv1a(&hashed),
            vocab: vocab.into_iter().map(String::from).collect(),
        })
    }
}

impl Unit {
    fn cut(self, text: &str) -> Vec<&str> {
        match self {
            Self::Character => text.split("").filter(|token| !token.is_empty()).collect(),
            Self::Word => words(text),
        }
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
    use super::super::random::{Use, generator};
    use super::*;

    const CONTEXT: usize = 4;

    fn decode(corpus: &Corpus, tokens: &[u32]) -> Vec<String> {
        let token = |&token: &u32| corpus.vocab[token as usize].clone();
        tokens.iter().map(token).collect()
    }

    fn corpus() -> Corpus {
        let text = "the quick brown fox, ünïcode. ".repeat(4);
        Corpus::new(&text, Unit::Character, CONTEXT).unwrap()
    }

    #[test]
    fn splits_off_the_last_tenth_of_the_text() {
        let corpus = corpus();
        assert_eq!((corpus.train.len(), corpus.val.len()), (108, 12));
        let tokens = [&*corpus.train, &*corpus.val].concat();
        let text = "the quick brown fox, ünïcode. ".repeat(4);
        assert_eq!(decode(&corpus, &tokens).concat(), text);
        assert!(corpus.vocab.is_sorted());
    }

    #[test]
    fn rejects_a_text_without_room_for_a_context() {
        let corpus = |text: &str| Corpus::new(text, Unit::Character, CONTEXT);
        assert_eq!(corpus("").err().unwrap().to_string(), "the text is empty");
        assert!(corpus(&"x".repeat(40)).is_err());
        assert!(corpus(&"x".repeat(50)).is_ok());
    }

    /// Texts of their own to validate and to test on leave the whole text to train on, which alone
    /// decides the words. Each of them changes the fingerprint.
    #[test]
    fn held_out_texts_are_not_trained_on() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let file = |name: &str, line: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, line.repeat(10)).map(|()| path)
        };
        let text = file("text", "a dog runs .\n")?;
        let val = Some(file("val", "a cat runs .\n")?);
        let test = Some(file("test", "a dog and a dog .\n")?);
        let read = |val: &Option<PathBuf>, test: &Option<PathBuf>| {
            let (val, test) = (val.clone(), test.clone());
            Corpus::read(&text, &HeldOut { val, test }, Unit::Word, CONTEXT)
        };
        let corpus = read(&val, &test)?;
        assert_eq!(corpus.vocab, ["\n", ".", "<unk>", "a", "dog", "runs"]);
        assert_eq!((corpus.train.len(), corpus.val.len()), (50, 50));
        let words = ["a", "<unk>", "runs", ".", "\n"];
        assert_eq!(decode(&corpus, &corpus.val[..5]), words);
        let tested = corpus.test.as_deref().context("no test split")?;
        let words = ["a", "dog", "<unk>", "a"];
        assert_eq!(decode(&corpus, &tested[..4]), words);
        let prints: BTreeSet<u64> = [(&None, &None), (&val, &None), (&val, &test), (&test, &None)]
            .into_iter()
            .map(|(val, test)| anyhow::Ok(read(val, test)?.fingerprint))
            .collect::<Result<_>>()?;
        assert_eq!(prints.len(), 4);
        assert!(read(&None, &None)?.test.is_none());
        let short = Some(file("short", "")?);
        assert!(read(&val, &short).is_err() && read(&short, &None).is_err());
        Ok(())
    }

    #[test]
    fn words_are_letters_marks_and_lines_and_rare_ones_are_unknown() {
        let text = "Zwei Hunde, müde.\n".repeat(10) + "Eine Katze , zwei Hunde.\n";
        let corpus = Corpus::new(&text, Unit::Word, CONTEXT).unwrap();
        let vocab = ["\n", ",", ".", "<unk>", "Hunde", "Zwei", "müde"];
        assert_eq!(corpus.vocab, vocab);
        assert_eq!(corpus.train.len() + corpus.val.len(), 67);
        let words = ["<unk>", "<unk>", ",", "<unk>", "Hunde", ".", "\n"];
        assert_eq!(decode(&corpus, &corpus.val), words);
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
        assert!(
            inputs
                .iter()
                .zip(&targets)
                .all(|(input, target)| input + 1 == *target)
        );
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
