//! The small transformer that `char_lm` and `fold` train on the characters of a text.
#![allow(dead_code)] // each example uses its share

use candle::{D, DType, Device, Module, Result, Tensor, bail, safetensors};
use candle_nn::{
    Activation, AdamW, Embedding, Linear, Optimizer, ParamsAdamW, VarBuilder, VarMap, embedding,
    linear_no_bias, loss::cross_entropy, ops,
};
use candle_powernorm::{
    PowerNorm, PowerNormConfig, RmsNorm, power_norm_no_bias, rms_norm, trainable_vars,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;

pub const LAYERS: usize = 3;
pub const HEADS: usize = 4;
pub const WIDTH: usize = 96;
pub const CONTEXT: usize = 64;
pub const BATCH: usize = 8;
pub const EPS: f64 = 1e-5;

/// Characters of a piece of the text. The last tenth of each piece is for validation.
const PIECE: usize = 10 * (CONTEXT + 1);

/// The name of the characters in a saved model.
const VOCAB: &str = "vocab";

/// nanoGPT's, where a step has few characters.
const BETA_2: f64 = 0.99;

/// The text to learn without `--text`: the first acts of Shakespeare's Coriolanus, in the public
/// domain, from the start of Karpathy's tinyshakespeare.
const SHAKESPEARE: &str = include_str!("shakespeare.txt");

/// A text as numbers of its characters.
pub struct Text {
    /// The characters, by number.
    pub vocab: Vec<char>,
    pub train: Vec<u32>,
    /// Stretches of `CONTEXT + 1` characters.
    pub validation: Vec<Vec<u32>>,
    pub len: usize,
}

impl Text {
    /// The text in a file, or Shakespeare's.
    pub fn read(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else {
            return Self::new(SHAKESPEARE);
        };
        let name = path.display();
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) => bail!("cannot read {name}, --text takes a file of UTF-8 text: {error}"),
        };
        match str::from_utf8(&bytes) {
            Ok(text) => Self::new(text),
            Err(error) => bail!(
                "{name} is not UTF-8 at byte {}: convert it, for example by `iconv -f latin1 -t \
                 utf-8`",
                error.valid_up_to()
            ),
        }
    }

    fn new(text: &str) -> Result<Self> {
        let vocab: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        let token = |c| vocab.partition_point(|&known| known < c) as u32;
        let tokens: Vec<u32> = text.chars().map(token).collect();
        let (mut train, mut validation) = (vec![], vec![]);
        for (i, piece) in tokens.chunks(PIECE).enumerate() {
            match i % 10 {
                1 => validation.extend(piece.chunks_exact(CONTEXT + 1).map(<[u32]>::to_vec)),
                _ => train.extend_from_slice(piece),
            }
        }
        if validation.is_empty() {
            bail!(
                "expected a text of at least {} characters, got {}: give --text a longer one",
                PIECE + CONTEXT + 1,
                tokens.len()
            );
        }
        Ok(Self {
            vocab,
            train,
            validation,
            len: tokens.len(),
        })
    }

    /// At most `wanted` stretches for validation, from all of the text.
    pub fn validation(&self, wanted: usize) -> Vec<&[u32]> {
        let apart = self.validation.len().div_ceil(wanted);
        let stretches = self.validation.iter().step_by(apart);
        stretches.map(Vec::as_slice).collect()
    }
}

/// A normalization of the model.
#[allow(clippy::large_enum_variant)] // A model has few of them.
pub enum Norm {
    /// candle's, fused and without a backward.
    Candle(candle_nn::RmsNorm),
    /// The weight of candle's `ops::rms_norm_slow`, which differentiates by autograd.
    CandleSlow(Tensor),
    Rms(RmsNorm),
    Power(PowerNorm),
    /// Folded into the linear layer behind it: nothing is left.
    Folded,
}

impl Norm {
    fn fold_into(&self, next: &Linear) -> Result<Linear> {
        match self {
            Self::Power(norm) if norm.group_scaling().is_none() => norm.fold_into(next),
            _ => bail!("expected PowerNorm without group scaling"),
        }
    }
}

impl Module for Norm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Candle(norm) => norm.forward(xs),
            Self::CandleSlow(weight) => ops::rms_norm_slow(xs, weight, EPS as f32),
            Self::Rms(norm) => norm.forward(xs),
            Self::Power(norm) => norm.forward(xs),
            Self::Folded => Ok(xs.clone()),
        }
    }
}

type NewNorm<'a> = &'a dyn Fn(VarBuilder) -> Result<Norm>;

/// A decoder-only transformer: from tokens `[batch, time]` to logits `[batch, time, vocab]`.
pub struct Gpt {
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: Norm,
    output: Linear,
}

impl Gpt {
    pub fn new(vocab: usize, norm: NewNorm, vb: VarBuilder) -> Result<Self> {
        let blocks = (0..LAYERS).map(|i| Block::new(norm, vb.pp(i)));
        Ok(Self {
            tokens: embedding(vocab, WIDTH, vb.pp("tokens"))?,
            positions: vb.get((CONTEXT, WIDTH), "positions")?,
            blocks: blocks.collect::<Result<_>>()?,
            norm: norm(vb.pp("norm"))?,
            output: linear_no_bias(WIDTH, vocab, vb.pp("output"))?,
        })
    }

    /// A model that [`Training::save`] wrote, and the characters that it knows.
    pub fn load(path: &Path, device: &Device) -> Result<(Self, Vec<char>)> {
        let name = path.display();
        let mut tensors = match safetensors::load(path, device) {
            Ok(tensors) => tensors,
            Err(error) => bail!("{name} is no model that --save wrote: {error}"),
        };
        let Some(vocab) = tensors.remove(VOCAB) else {
            bail!("{name} is no model that --save wrote: it has no tensor {VOCAB:?}");
        };
        let vocab = vocab.to_vec1::<u32>()?;
        let vocab: Vec<char> = vocab.into_iter().filter_map(char::from_u32).collect();
        // Only PowerNorm has statistics. The others' weights mean the same to `rms_norm`.
        let norm = |vb: VarBuilder| match vb.contains_tensor("running_phi") {
            true => power_norm_no_bias(WIDTH, PowerNormConfig::default(), vb).map(Norm::Power),
            false => rms_norm(WIDTH, EPS, vb).map(Norm::Rms),
        };
        let vb = VarBuilder::from_tensors(tensors, DType::F32, device);
        Ok((Self::new(vocab.len(), &norm, vb)?, vocab))
    }

    /// The same model without normalizations, for inference.
    pub fn fold(&self) -> Result<Self> {
        let blocks = self.blocks.iter().map(Block::fold);
        Ok(Self {
            tokens: self.tokens.clone(),
            positions: self.positions.clone(),
            blocks: blocks.collect::<Result<_>>()?,
            norm: Norm::Folded,
            output: self.norm.fold_into(&self.output)?,
        })
    }

    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let positions = self.positions.narrow(0, 0, tokens.dim(1)?)?;
        let mut xs = self.tokens.forward(tokens)?.broadcast_add(&positions)?;
        for block in &self.blocks {
            xs = block.forward(&xs)?;
        }
        self.output.forward(&self.norm.forward(&xs)?)
    }

    pub fn loss(&self, [tokens, targets]: [Tensor; 2]) -> Result<Tensor> {
        let logits = self.forward(&tokens)?.flatten_to(1)?;
        cross_entropy(&logits, &targets.flatten_all()?)
    }

    /// The mean loss, over a few stretches at a time: their tensors live until the loss is known.
    pub fn validate(&self, stretches: &[&[u32]], device: &Device) -> Result<f32> {
        let mut sum = 0.;
        for few in stretches.chunks(BATCH) {
            let loss: f32 = self.loss(batch(few, device)?)?.to_scalar()?;
            sum += loss * few.len() as f32;
        }
        Ok(sum / stretches.len() as f32)
    }
}

/// Attention and two linear layers, each after a normalization and added to what came in.
struct Block {
    norm_1: Norm,
    query_key_value: Linear,
    project: Linear,
    norm_2: Norm,
    expand: Linear,
    contract: Linear,
}

impl Block {
    fn new(norm: NewNorm, vb: VarBuilder) -> Result<Self> {
        let linear = |from, to, name| linear_no_bias(from, to, vb.pp(name));
        Ok(Self {
            norm_1: norm(vb.pp("norm_1"))?,
            query_key_value: linear(WIDTH, 3 * WIDTH, "query_key_value")?,
            project: linear(WIDTH, WIDTH, "project")?,
            norm_2: norm(vb.pp("norm_2"))?,
            expand: linear(WIDTH, 4 * WIDTH, "expand")?,
            contract: linear(4 * WIDTH, WIDTH, "contract")?,
        })
    }

    fn fold(&self) -> Result<Self> {
        Ok(Self {
            norm_1: Norm::Folded,
            query_key_value: self.norm_1.fold_into(&self.query_key_value)?,
            project: self.project.clone(),
            norm_2: Norm::Folded,
            expand: self.norm_2.fold_into(&self.expand)?,
            contract: self.contract.clone(),
        })
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let xs = (xs + self.attention(&self.norm_1.forward(xs)?)?)?;
        let hidden = self.expand.forward(&self.norm_2.forward(&xs)?)?;
        &xs + self.contract.forward(&Activation::Gelu.forward(&hidden)?)?
    }

    fn attention(&self, xs: &Tensor) -> Result<Tensor> {
        let (batch, time, _) = xs.dims3()?;
        let head = WIDTH / HEADS;
        let all = self.query_key_value.forward(xs)?;
        let all = all.reshape((batch, time, 3 * HEADS, head))?;
        let all = all.transpose(1, 2)?;
        let heads = |i| all.narrow(1, i * HEADS, HEADS)?.contiguous();
        let (query, key, value) = (heads(0)?, heads(1)?, heads(2)?);
        let scores = (query.matmul(&key.t()?)? * (head as f64).powf(-0.5))?;
        // 0 where a position may look, -1e9 where it would see the future.
        let mask = ((Tensor::tril2(time, xs.dtype(), xs.device())? - 1.)? * 1e9)?;
        let weights = ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
        let mixed = weights.matmul(&value)?.transpose(1, 2)?;
        self.project.forward(&mixed.reshape((batch, time, WIDTH))?)
    }
}

/// A model that trains.
pub struct Training {
    pub model: Gpt,
    pub varmap: VarMap,
    rng: StdRng,
    optimizer: AdamW,
    /// The highest learning rate, the steps in which it rises, and all steps.
    rate: f64,
    warmup: usize,
    steps: usize,
    step: usize,
}

impl Training {
    pub fn new(
        vocab: usize,
        norm: NewNorm,
        (rate, warmup, steps): (f64, usize, usize),
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
        let model = Gpt::new(vocab, norm, vb)?;
        let mut rng = StdRng::seed_from_u64(seed);
        init(&varmap, &mut rng)?;
        let params = ParamsAdamW {
            beta2: BETA_2,
            ..Default::default()
        };
        Ok(Self {
            optimizer: AdamW::new(trainable_vars(&varmap), params)?,
            model,
            varmap,
            rng,
            rate,
            warmup,
            steps,
            step: 0,
        })
    }

    /// Takes a step on stretches of the text `train`, and returns its loss.
    pub fn step(&mut self, train: &[u32], device: &Device) -> Result<f64> {
        self.step += 1;
        let rise = self.step as f64 / (self.warmup + 1) as f64;
        let left = self.steps - self.step + 1;
        let fall = left as f64 / (self.steps - self.warmup).max(1) as f64;
        self.optimizer
            .set_learning_rate(self.rate * rise.min(fall).min(1.));
        let starts = (0..BATCH).map(|_| self.rng.random_range(..train.len() - CONTEXT));
        let stretches: Vec<_> = starts.map(|i| &train[i..=i + CONTEXT]).collect();
        let loss = self.model.loss(batch(&stretches, device)?)?;
        self.optimizer.backward_step(&loss)?;
        Ok(f64::from(loss.to_scalar::<f32>()?))
    }

    /// Writes the variables and the characters. A run that is interrupted meanwhile leaves the file
    /// as it was.
    pub fn save(&self, vocab: &[char], path: &Path) -> Result<()> {
        let vars = self.varmap.data().lock().unwrap();
        let vars = vars
            .iter()
            .map(|(name, var)| (name.clone(), var.as_tensor().clone()));
        let mut tensors: HashMap<_, _> = vars.collect();
        let vocab = Tensor::from_iter(vocab.iter().map(|&c| u32::from(c)), &Device::Cpu)?;
        tensors.insert(VOCAB.to_owned(), vocab);
        let unfinished = path.with_extension("unfinished");
        safetensors::save(&tensors, &unfinished)?;
        Ok(fs::rename(&unfinished, path)?)
    }
}

/// Draws every matrix, in the order of their names. candle's generator has no seed on a CPU.
fn init(varmap: &VarMap, rng: &mut StdRng) -> Result<()> {
    let data = varmap.data().lock().unwrap();
    let mut vars: Vec<_> = data.iter().filter(|(_, var)| var.rank() == 2).collect();
    vars.sort_by_key(|(name, _)| *name);
    for (_, var) in vars {
        let values = (0..var.elem_count()).map(|_| rng.random_range(-0.04f32..0.04));
        var.set(&Tensor::from_iter(values, var.device())?.reshape(var.shape())?)?;
    }
    Ok(())
}

/// Stretches of a text, and for each character the one after it.
pub fn batch(stretches: &[&[u32]], device: &Device) -> Result<[Tensor; 2]> {
    let (mut inputs, mut targets) = (vec![], vec![]);
    for stretch in stretches {
        inputs.extend_from_slice(&stretch[..CONTEXT]);
        targets.extend_from_slice(&stretch[1..]);
    }
    let tensor = |tokens| Tensor::from_vec(tokens, (stretches.len(), CONTEXT), device);
    Ok([tensor(inputs)?, tensor(targets)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_powernorm::Mode;
    use std::{env, path::PathBuf, process};

    fn file(name: &str) -> PathBuf {
        env::temp_dir().join(format!("char_lm-{}-{name}", process::id()))
    }

    /// The first line of an error: a backtrace may follow it.
    fn error<T>(result: Result<T>) -> String {
        let error = result.err().unwrap().to_string();
        error.lines().next().unwrap().to_owned()
    }

    #[test]
    fn texts_that_cannot_be_learned() {
        let path = file("text");
        let name = path.display();
        let missing = error(Text::read(Some(&path)));
        let expected = format!("cannot read {name}, --text takes a file of UTF-8 text: ");
        assert!(missing.starts_with(&expected), "{missing}");

        fs::write(&path, b"caf\xe9").unwrap();
        assert_eq!(
            error(Text::read(Some(&path))),
            format!(
                "{name} is not UTF-8 at byte 3: convert it, for example by `iconv -f latin1 -t utf-8`"
            )
        );
        for short in ["", &"é".repeat(714)] {
            fs::write(&path, short).unwrap();
            assert_eq!(
                error(Text::read(Some(&path))),
                format!(
                    "expected a text of at least 715 characters, got {}: give --text a longer one",
                    short.chars().count()
                )
            );
        }
        fs::write(&path, "é".repeat(715)).unwrap();
        assert_eq!(Text::read(Some(&path)).unwrap().validation.len(), 1);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_saved_model() {
        let (path, device, mode) = (file("model.safetensors"), &Device::Cpu, Mode::train());
        let unfinished = path.with_extension("unfinished");
        let text = Text::read(None).unwrap();
        let power = |vb: VarBuilder| {
            let norm = power_norm_no_bias(WIDTH, PowerNormConfig::default(), vb)?;
            Ok(Norm::Power(norm.with_mode(&mode)))
        };
        let rms = |vb: VarBuilder| rms_norm(WIDTH, EPS, vb).map(Norm::Rms);
        let norms: [NewNorm; 2] = [&power, &rms];
        for norm in norms {
            let schedule = (1e-3, 1, 4);
            let mut training = Training::new(text.vocab.len(), norm, schedule, 1, device).unwrap();
            training.step(&text.train, device).unwrap();
            training.save(&text.vocab, &path).unwrap();
            assert!(!unfinished.exists());
            // What a run leaves that is interrupted in its next save.
            fs::write(&unfinished, "half a model").unwrap();

            let (model, vocab) = Gpt::load(&path, device).unwrap();
            assert_eq!(vocab, text.vocab);
            let _evaluation = mode.eval_scope();
            let [saved, loaded] = [&training.model, &model]
                .map(|model| model.validate(&text.validation(2), device).unwrap());
            assert_eq!(saved, loaded);
        }

        let expected = |path: &Path| format!("{} is no model that --save wrote: ", path.display());
        let half = error(Gpt::load(&unfinished, device));
        assert!(half.starts_with(&expected(&unfinished)), "{half}");
        let vars = HashMap::from([("weight", Tensor::zeros(1, DType::F32, device).unwrap())]);
        safetensors::save(&vars, &path).unwrap();
        assert_eq!(
            error(Gpt::load(&path, device)),
            expected(&path) + "it has no tensor \"vocab\""
        );
        fs::remove_file(unfinished).unwrap();
        fs::remove_file(path).unwrap();
    }
}
