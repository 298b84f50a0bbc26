//! Parallel text: the files, the subwords, the padded batches.

use crate::common::norm::Padding;
use crate::common::random::{Use, fnv1a, generator};
use anyhow::{Context, Result, anyhow, bail, ensure};
use candle::{Device, Tensor};
use clap::ValueEnum;
use flate2::read::GzDecoder;
use rand::seq::SliceRandom;
use std::fmt;
use std::io::Read;
use std::path::Path;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{NormalizerWrapper, TokenizerBuilder, TokenizerImpl};

/// Tokens that are no text. Subwords are numbered after them, so that no text can spell one.
pub const PAD: u32 = 0;
pub const BEGIN: u32 = 1;
pub const END: u32 = 2;
const SPECIAL: u32 = 3;

/// The languages' names in files, from which and to which.
pub const LANGUAGES: [&str; 2] = ["de", "en"];

/// Sentences whose lengths differ by less than this may share a batch: little padding, and room for
/// chance.
const BUCKET: usize = 4;

/// Reversible subwords of both languages: byte pairs of byte-level text, merged within words.
pub struct Subwords(TokenizerImpl<BPE, NormalizerWrapper, ByteLevel, ByteLevel, ByteLevel>);

impl Subwords {
    /// As many as `count` subwords, the 256 bytes among them, learned from `lines`. They follow
    /// from the lines alone.
    pub fn learn<'a>(lines: impl Iterator<Item = &'a str> + Send, count: usize) -> Result<Self> {
        // A first word gets the space that others have before them: it is the same subword there.
        let bytes = ByteLevel::default().add_prefix_space(true);
        let mut tokenizer = TokenizerBuilder::default()
            .with_model(BPE::default())
            .with_normalizer(None)
            .with_pre_tokenizer(Some(bytes))
            .with_post_processor(Some(bytes))
            .with_decoder(Some(bytes))
            .build()
            .map_err(|error| anyhow!(error))?;
        let mut trainer = BpeTrainer::builder()
            .vocab_size(count)
            .min_frequency(2)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .show_progress(false)
            .build();
        tokenizer
            .train(&mut trainer, lines)
            .map_err(|error| anyhow!(error))?;
        Ok(Self(tokenizer))
    }

    /// The number of tokens, with those that are no text.
    pub fn count(&self) -> usize {
        self.0.get_vocab_size(false) + SPECIAL as usize
    }

    /// The tokens of a line without spaces around it.
    pub fn encode(&self, line: &str) -> Result<Vec<u32>> {
        let encoding = self.0.encode_fast(line, false);
        let encoding = encoding.map_err(|error| anyhow!(error))?;
        Ok(encoding.get_ids().iter().map(|id| id + SPECIAL).collect())
    }

    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let ids: Vec<u32> =
            (tokens.iter().filter_map(|token| token.checked_sub(SPECIAL))).collect();
        let line = self.0.decode(&ids, false).map_err(|error| anyhow!(error))?;
        // A model may spell a line's end, which would shift all lines after it.
        Ok(line.trim().replace(['\n', '\r'], " "))
    }

    pub fn save(&self, path: &Path) -> Result<()> {
        (self.0.save(path, true))
            .map_err(|error| anyhow!(error))
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

/// A sentence and its translation, each ended by [`END`].
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    pub source: Vec<u32>,
    pub target: Vec<u32>,
}

/// A split to translate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Split {
    Val,
    Test,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// Parallel text, as tokens.
pub struct Corpus {
    pub subwords: Subwords,
    pub train: Vec<Pair>,
    pub val: Vec<Pair>,
    pub test: Vec<Pair>,
    /// The validation and the test split's translations, as they are in the files.
    references: [Vec<String>; 2],
    /// A hash of the text, so that a checkpoint can tell whether it saw this one.
    pub fingerprint: u64,
}

impl Corpus {
    /// Reads the folder, and learns `subwords` subwords from its training split.
    pub fn read(folder: &Path, subwords: usize) -> Result<Self> {
        let read = |split| -> Result<[Vec<String>; 2]> {
            let [source, target] = LANGUAGES.map(|language| read_lines(folder, split, language));
            let (source, target) = (source?, target?);
            ensure!(
                source.len() == target.len(),
                "the {split} split has {} lines of {}, but {} of {}",
                source.len(),
                LANGUAGES[0],
                target.len(),
                LANGUAGES[1],
            );
            ensure!(!source.is_empty(), "the {split} split is empty");
            Ok([source, target])
        };
        Self::new([read("train")?, read("val")?, read("test")?], subwords)
    }

    /// A split's pairs, and their translations as they are in the file.
    pub fn split(&self, split: Split) -> (&[Pair], &[String]) {
        let [val, test] = &self.references;
        match split {
            Split::Val => (&self.val, val),
            Split::Test => (&self.test, test),
        }
    }

    /// Of the lines of the train, val and test splits.
    pub fn new(splits: [[Vec<String>; 2]; 3], subwords: usize) -> Result<Self> {
        let fingerprint = fnv1a(lines(&splits).join("\n").as_bytes());
        let subwords = Subwords::learn(lines(&splits[..1]).into_iter(), subwords)?;
        let ended = |line: &String| -> Result<Vec<u32>> {
            let mut tokens = subwords.encode(line)?;
            tokens.push(END);
            Ok(tokens)
        };
        let pairs = |[sources, targets]: &[Vec<String>; 2]| -> Result<Vec<Pair>> {
            let pair = |(source, target)| {
                Ok(Pair {
                    source: ended(source)?,
                    target: ended(target)?,
                })
            };
            sources.iter().zip(targets).map(pair).collect()
        };
        let [train, val, test] = [pairs(&splits[0])?, pairs(&splits[1])?, pairs(&splits[2])?];
        let [_, [_, val_lines], [_, test_lines]] = splits;
        Ok(Self {
            subwords,
            train,
            val,
            test,
            references: [val_lines, test_lines],
            fingerprint,
        })
    }
}

fn lines(splits: &[[Vec<String>; 2]]) -> Vec<&str> {
    let lines = splits.iter().flatten().flatten();
    lines.map(String::as_str).collect()
}

/// The names under which a split's file is looked for, in this order.
fn names(split: &str, language: &str) -> Vec<String> {
    let splits = match split {
        "test" => vec!["test", "test_2016_flickr"],
        _ => vec![split],
    };
    let names = splits
        .into_iter()
        .flat_map(|split| ["", "multi30k."].map(|prefix| format!("{prefix}{split}.{language}")));
    names
        .flat_map(|name| [name.clone(), name + ".gz"])
        .collect()
}

/// The lines of a split, plain or compressed.
fn read_lines(folder: &Path, split: &str, language: &str) -> Result<Vec<String>> {
    let names = names(split, language);
    let Some(path) = (names.iter().map(|name| folder.join(name))).find(|path| path.is_file())
    else {
        bail!("{} has none of {}", folder.display(), names.join(", "));
    };
    let read = || -> std::io::Result<String> {
        let bytes = std::fs::read(&path)?;
        let mut text = String::new();
        match path.extension().is_some_and(|extension| extension == "gz") {
            true => GzDecoder::new(&*bytes).read_to_string(&mut text)?,
            false => (&*bytes).read_to_string(&mut text)?,
        };
        Ok(text)
    };
    let text = read().with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.lines().map(|line| line.trim().to_string()).collect())
}

/// Sentences, padded to one length.
pub struct Sources {
    /// `[batch, time]`
    pub tokens: Tensor,
    pub padding: Padding,
    /// 0 where a token may be looked at, minus infinity where it is padding: `[batch, 1, 1, time]`
    pub mask: Tensor,
}

impl Sources {
    pub fn new(sentences: &[&[u32]], device: &Device) -> Result<Self> {
        Self::padded(sentences, longest(sentences), device)
    }

    /// Padded to `time` tokens, which is no fewer than the longest has.
    pub fn padded(sentences: &[&[u32]], time: usize, device: &Device) -> Result<Self> {
        let lengths: Vec<_> = sentences.iter().map(|sentence| sentence.len()).collect();
        let mask: Vec<f32> = (lengths.iter())
            .flat_map(|&length| {
                (0..time).map(move |i| if i < length { 0. } else { f32::NEG_INFINITY })
            })
            .collect();
        Ok(Self {
            tokens: padded(sentences, time, device)?,
            padding: Padding::new(&lengths, time, device)?,
            mask: Tensor::from_vec(mask, (sentences.len(), 1, 1, time), device)?,
        })
    }
}

/// Sentences and what a model is to say of their translations.
pub struct Batch {
    pub sources: Sources,
    /// The translations, each token one place later: `[batch, time]`
    pub inputs: Tensor,
    /// The places of `inputs` whose next token is no padding, in the flattened batch: `[count]`
    pub places: Tensor,
    /// The tokens after them: `[count]`
    pub targets: Tensor,
}

impl Batch {
    pub fn new<'a>(pairs: impl IntoIterator<Item = &'a Pair>, device: &Device) -> Result<Self> {
        let pairs: Vec<_> = pairs.into_iter().collect();
        let sources: Vec<_> = pairs.iter().map(|pair| &*pair.source).collect();
        let inputs: Vec<Vec<u32>> = (pairs.iter())
            .map(|pair| [&[BEGIN], &pair.target[..pair.target.len() - 1]].concat())
            .collect();
        let inputs: Vec<_> = inputs.iter().map(Vec::as_slice).collect();
        let lengths: Vec<_> = inputs.iter().map(|input| input.len()).collect();
        let targets: Vec<_> = (pairs.iter())
            .flat_map(|pair| pair.target.clone())
            .collect();
        Ok(Self {
            sources: Sources::new(&sources, device)?,
            places: Padding::new(&lengths, longest(&inputs), device)?.rows,
            inputs: padded(&inputs, longest(&inputs), device)?,
            targets: Tensor::new(targets, device)?,
        })
    }

    /// The number of tokens to predict.
    pub fn count(&self) -> usize {
        self.targets.elem_count()
    }
}

fn longest(sentences: &[&[u32]]) -> usize {
    let lengths = sentences.iter().map(|sentence| sentence.len());
    lengths.max().unwrap_or(0)
}

fn padded(sentences: &[&[u32]], time: usize, device: &Device) -> Result<Tensor> {
    let tokens: Vec<u32> = (sentences.iter())
        .flat_map(|tokens| {
            let padding = std::iter::repeat_n(PAD, time - tokens.len());
            tokens.iter().copied().chain(padding)
        })
        .collect();
    Ok(Tensor::from_vec(tokens, (sentences.len(), time), device)?)
}

/// Cuts `pairs`, in the order of `indices`, into batches of at most `tokens` tokens on either side,
/// padding included (or of one pair).
pub fn cut(pairs: &[Pair], indices: &[usize], tokens: usize) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = vec![];
    let mut longest = 0;
    for &i in indices {
        let length = pairs[i].source.len().max(pairs[i].target.len());
        match batches.last_mut() {
            Some(batch) if (batch.len() + 1) * longest.max(length) <= tokens => {
                longest = longest.max(length);
                batch.push(i);
            }
            _ => {
                longest = length;
                batches.push(vec![i]);
            }
        }
    }
    batches
}

/// The share of padding among the source tokens of these batches.
pub fn padding_share(pairs: &[Pair], batches: &[Vec<usize>]) -> f64 {
    let (mut real, mut all) = (0, 0);
    for batch in batches {
        let lengths = batch.iter().map(|&i| pairs[i].source.len());
        real += lengths.clone().sum::<usize>();
        all += batch.len() * lengths.max().unwrap_or(0);
    }
    1. - real as f64 / all as f64
}

/// The order of `pairs` by length, long ones first: a batch that does not fit in memory fails at
/// once.
pub fn by_length(pairs: &[Pair]) -> Vec<usize> {
    let mut indices: Vec<_> = (0..pairs.len()).collect();
    indices.sort_by_key(|&i| std::cmp::Reverse((pairs[i].source.len(), pairs[i].target.len())));
    indices
}

/// The batches of an epoch, each pair in one: they follow from the seed and the epoch.
pub fn epoch(pairs: &[Pair], tokens: usize, seed: u64, epoch: usize) -> Vec<Vec<usize>> {
    let mut rng = generator(seed, Use::Batch, epoch);
    let mut indices: Vec<_> = (0..pairs.len()).collect();
    indices.shuffle(&mut rng);
    indices.sort_by_key(|&i| {
        (
            pairs[i].target.len() / BUCKET,
            pairs[i].source.len() / BUCKET,
        )
    });
    let mut batches = cut(pairs, &indices, tokens);
    batches.shuffle(&mut rng);
    batches
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Sentences of a small language and of another with other words in another order.
    pub fn corpus() -> Corpus {
        let [subjects, verbs, objects] = [
            [
                ("der Hund", "the dog"),
                ("die Katze", "the cat"),
                ("ein Mädchen", "a girl"),
            ],
            [
                ("sieht", "sees"),
                ("sucht", "is looking for"),
                ("malt", "paints"),
            ],
            [
                ("einen Baum", "a tree"),
                ("das große alte Haus", "the big old house"),
                ("mich", "me"),
            ],
        ];
        let mut lines = [vec![], vec![]];
        for subject in subjects {
            for verb in verbs {
                for object in objects {
                    lines[0].push(format!("Heute {} {} {}.", verb.0, subject.0, object.0));
                    lines[1].push(format!("Today {} {} {}.", subject.1, verb.1, object.1));
                }
            }
        }
        let part =
            |range: std::ops::Range<usize>| lines.each_ref().map(|l| l[range.clone()].to_vec());
        Corpus::new([part(0..27), part(3..9), part(20..24)], 300).unwrap()
    }

    #[test]
    fn subwords_are_reversible_and_follow_from_the_lines() -> Result<()> {
        let subwords = corpus().subwords;
        for line in [
            "Heute sieht der Hund mich.",
            "naïve  <pad> 日本\t!",
            "the dog's",
            "x",
        ] {
            assert_eq!(subwords.decode(&subwords.encode(line)?)?, line);
        }
        let folder = tempfile::tempdir()?;
        let saved = |name| -> Result<String> {
            let path = folder.path().join(name);
            corpus().subwords.save(&path)?;
            Ok(std::fs::read_to_string(path)?)
        };
        assert_eq!(saved("one")?, saved("other")?);
        // A subword is the same at the beginning and later on.
        assert_eq!(subwords.encode("dog")?, subwords.encode("the dog")?[1..]);
        assert!(
            subwords
                .encode("the dog sees me.")?
                .iter()
                .all(|&t| t >= SPECIAL)
        );
        // A model may say anything.
        assert_eq!(
            subwords
                .decode(&[PAD, BEGIN, 3 + 0x41, END])?
                .lines()
                .count(),
            1
        );
        Ok(())
    }

    #[test]
    fn an_epoch_has_each_pair_once_in_batches_of_its_own_order() {
        let pairs = corpus().train;
        let batches = epoch(&pairs, 60, 1, 0);
        let mut all = batches.concat();
        all.sort();
        assert_eq!(all, (0..pairs.len()).collect::<Vec<_>>());
        for batch in &batches {
            let longest = |side: fn(&Pair) -> usize| batch.iter().map(|&i| side(&pairs[i])).max();
            let longest = longest(|p| p.source.len()).max(longest(|p| p.target.len()));
            assert!(batch.len() == 1 || batch.len() * longest.unwrap() <= 60);
        }
        assert_eq!(batches, epoch(&pairs, 60, 1, 0));
        assert_ne!(batches, epoch(&pairs, 60, 1, 1));
        assert_ne!(batches, epoch(&pairs, 60, 2, 0));
    }

    #[test]
    fn a_batch_predicts_each_real_token_from_those_before_it() -> Result<()> {
        let pair = |source: &[u32], target: &[u32]| Pair {
            source: source.to_vec(),
            target: target.to_vec(),
        };
        let pairs = [pair(&[7, END], &[8, 9, END]), pair(&[7, 8, END], &[END])];
        let batch = Batch::new(&pairs, &Device::Cpu)?;
        assert_eq!(
            batch.sources.tokens.to_vec2::<u32>()?,
            [[7, END, PAD], [7, 8, END]]
        );
        assert_eq!(
            batch.sources.padding.keep.to_vec2::<u8>()?,
            [[1, 1, 0], [1, 1, 1]]
        );
        assert!((padding_share(&pairs, &[vec![0, 1]]) - 1. / 6.).abs() < 1e-12);
        assert_eq!(padding_share(&pairs, &[vec![0], vec![1]]), 0.);
        assert_eq!(
            batch.inputs.to_vec2::<u32>()?,
            [[BEGIN, 8, 9], [BEGIN, PAD, PAD]]
        );
        assert_eq!(batch.places.to_vec1::<u32>()?, [0, 1, 2, 3]);
        assert_eq!(batch.targets.to_vec1::<u32>()?, [8, 9, END, END]);
        Ok(())
    }

    #[test]
    fn reads_files_plain_and_compressed_and_names_those_that_lack() -> Result<()> {
        use std::io::Write;
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("val.de"), "Ein Hund. \nZwei.\n")?;
        let file = std::fs::File::create(folder.path().join("multi30k.test_2016_flickr.de.gz"))?;
        let mut gz = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
        gz.write_all("Drei Hunde.\n".as_bytes())?;
        gz.finish()?;
        assert_eq!(
            read_lines(folder.path(), "val", "de")?,
            ["Ein Hund.", "Zwei."]
        );
        assert_eq!(read_lines(folder.path(), "test", "de")?, ["Drei Hunde."]);
        let error = read_lines(folder.path(), "val", "en")
            .unwrap_err()
            .to_string();
        assert!(
            error.ends_with("has none of val.en, val.en.gz, multi30k.val.en, multi30k.val.en.gz"),
            "{error}"
        );
        Ok(())
    }
}
