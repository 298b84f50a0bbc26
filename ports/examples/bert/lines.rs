//! Stands for a tokenizer and a data set: lines of text files, as batches of bytes.

use candle::{bail, Device, Error, Result, Tensor};
use rand::{rngs::StdRng, Rng};
use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;

/// The tokens are bytes, after three marks that BERT's vocabulary has too.
const PAD: u32 = 0;
const CLS: u32 = 1;
const SEP: u32 = 2;
const MARKS: u32 = 3;

/// In a line, with two marks.
const MOST_TOKENS: usize = 64;

/// In a line. Shorter ones, such as a closing brace, are in many files.
const FEWEST_CHARACTERS: usize = 10;

#[derive(Clone)]
pub struct Line {
    pub ids: Vec<u32>,
    pub class: u32,
}

/// The lines of several files. Each file is a class.
pub struct Lines {
    pub classes: Vec<String>,
    pub training: Vec<Line>,
    /// A fifth of the lines. No line is in both parts, unless two long ones begin alike.
    pub held_out: Vec<Line>,
}

impl Lines {
    pub fn read(paths: &[PathBuf]) -> Result<Self> {
        let (mut classes, mut training, mut held_out) = (vec![], vec![], vec![]);
        let mut seen = HashSet::new();
        for (path, class) in paths.iter().zip(0..) {
            let text = fs::read_to_string(path).map_err(|e| Error::from(e).with_path(path))?;
            for line in text.lines().map(str::trim) {
                if line.len() < FEWEST_CHARACTERS || !seen.insert(line.to_owned()) {
                    continue;
                }
                let line = Line::new(line, class);
                match seen.len() % 5 {
                    0 => held_out.push(line),
                    _ => training.push(line),
                }
            }
            let name = path.file_name().unwrap_or(path.as_os_str());
            classes.push(name.to_string_lossy().into_owned());
        }
        if held_out.is_empty() {
            bail!("expected at least 5 lines of {FEWEST_CHARACTERS} characters")
        }
        Ok(Self {
            classes,
            training,
            held_out,
        })
    }

    /// Lines to train on.
    pub fn batch(&self, size: usize, rng: &mut StdRng) -> Result<Batch> {
        let line = |_| self.training[rng.random_range(..self.training.len())].clone();
        Batch::of(&(0..size).map(line).collect::<Vec<_>>())
    }

    /// The share of the commonest class in the lines that are held out.
    pub fn commonest(&self) -> f64 {
        let mut counts = vec![0; self.classes.len()];
        for line in &self.held_out {
            counts[line.class as usize] += 1;
        }
        let commonest = counts.into_iter().max().unwrap_or_default();
        f64::from(commonest) / self.held_out.len() as f64
    }
}

impl Line {
    pub fn new(text: &str, class: u32) -> Self {
        let bytes = text.bytes().take(MOST_TOKENS - 2);
        let bytes = bytes.map(|byte| MARKS + u32::from(byte));
        let ids = [CLS].into_iter().chain(bytes).chain([SEP]).collect();
        Self { ids, class }
    }
}

/// Lines, padded to the longest of them.
pub struct Batch {
    /// `[lines, tokens]`
    pub ids: Tensor,
    /// `[lines, tokens]`: 1 is a token, and 0 is padding.
    pub mask: Tensor,
    /// `[lines]`
    pub labels: Tensor,
}

impl Batch {
    pub fn of(lines: &[Line]) -> Result<Self> {
        let tokens = lines.iter().map(|line| line.ids.len()).max().unwrap_or(0);
        Self::padded(lines, tokens)
    }

    pub fn padded(lines: &[Line], tokens: usize) -> Result<Self> {
        let (mut ids, mut labels) = (vec![], vec![]);
        for line in lines {
            ids.extend(&line.ids);
            ids.extend(vec![PAD; tokens - line.ids.len()]);
            labels.push(line.class);
        }
        let ids = Tensor::from_vec(ids, (lines.len(), tokens), &Device::Cpu)?;
        Ok(Self {
            mask: ids.ne(PAD)?,
            ids,
            labels: Tensor::new(labels, &Device::Cpu)?,
        })
    }
}
