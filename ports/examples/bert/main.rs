//! Fine-tunes BERT from a checkpoint to recognize which of several files a line is from: with
//! candle-transformers' model as it is, with this crate's LayerNorm, and with PowerNorm.
//!
//! ```text
//! cargo run --release -p ports --example bert
//! cargo run --release -p ports --example bert -- --steps 1000 english.txt german.txt
//! ```
//!
//! docs/guide/coming-from.md walks through it ("BERT, from a checkpoint to an evaluation"). To make
//! it a program of your own, put a patched copy of candle-transformers' bert.rs beside this file,
//! and write `mod bert;` for the two modules included below. `checkpoint.rs` stands for the
//! download of a trained model, and `lines.rs` for a tokenizer and a data set.

mod checkpoint;
mod lines;
#[cfg(test)]
mod tests;
#[path = "../../../benches/common/threads.rs"]
mod threads;

use candle::backprop::GradStore;
use candle::{bail, DType, Device, Error, Result, Tensor, Var};
use candle_nn::{linear, loss::cross_entropy, AdamW, Dropout, Linear, Module, Optimizer};
use candle_nn::{Init, ParamsAdamW, VarBuilder, VarMap};
use candle_powernorm::{trainable_vars, untrained, Untrained};
use candle_powernorm::{Mode, PowerNormBuilder, PowerNormConfig};
use candle_transformers::models::bert;
use lines::{Batch, Line, Lines};
use rand::{rngs::StdRng, SeedableRng};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::{env, fs, time::Instant};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `bert.rs` after `ports/bert_layer_norm.patch`.
#[allow(dead_code, clippy::all)]
mod bert_layer_norm {
    include!(concat!(env!("OUT_DIR"), "/bert_layer_norm.rs"));
}
/// `bert.rs` after `ports/bert.patch`.
#[allow(dead_code, clippy::all)]
mod bert_power_norm {
    include!(concat!(env!("OUT_DIR"), "/bert.rs"));
}

const BATCH: usize = 32;

/// For random weights. A trained model takes 2e-5 to 5e-5.
const RATE: f64 = 2e-3;

// The checkpoint

fn config<C: DeserializeOwned>(folder: &Path) -> Result<C> {
    let text = fs::read_to_string(folder.join("config.json"))?;
    serde_json::from_str(&text).map_err(Error::wrap)
}

/// The variables of `model.safetensors`, for `VarBuilder::from_varmap` in f32 on a CPU.
fn load(folder: &Path) -> Result<VarMap> {
    let varmap = VarMap::new();
    let tensors = candle::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
    for (name, tensor) in tensors {
        if name.starts_with("cls.") {
            continue; // a head of the pretraining
        }
        let name = name.replace("LayerNorm.gamma", "LayerNorm.weight");
        let name = name.replace("LayerNorm.beta", "LayerNorm.bias");
        let var = Var::from_tensor(&tensor.to_dtype(DType::F32)?)?;
        varmap.data().lock().unwrap().insert(name, var);
    }
    Ok(varmap)
}

fn names(varmap: &VarMap) -> HashSet<String> {
    varmap.data().lock().unwrap().keys().cloned().collect()
}

// The model

/// From tokens, their types and the mask to the output of the last layer.
type Bert = Box<dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>>;
type Build = fn(&Path, VarBuilder, &PowerNormBuilder) -> Result<Bert>;

fn untouched(folder: &Path, vb: VarBuilder, _: &PowerNormBuilder) -> Result<Bert> {
    let bert = bert::BertModel::load(vb.pp("bert"), &config(folder)?)?;
    Ok(Box::new(move |ids, types, mask| {
        bert.forward(ids, types, Some(mask))
    }))
}

fn with_layer_norm(folder: &Path, vb: VarBuilder, _: &PowerNormBuilder) -> Result<Bert> {
    let bert = bert_layer_norm::BertModel::load(vb.pp("bert"), &config(folder)?)?;
    Ok(Box::new(move |ids, types, mask| {
        bert.forward(ids, types, Some(mask))
    }))
}

fn with_power_norm(folder: &Path, vb: VarBuilder, norms: &PowerNormBuilder) -> Result<Bert> {
    let mut config: bert_power_norm::Config = config(folder)?;
    config.norms = norms.clone();
    let bert = bert_power_norm::BertModel::load(vb.pp("bert"), &config)?;
    Ok(Box::new(move |ids, types, mask| {
        bert.forward(ids, types, Some(mask))
    }))
}

/// BERT with its pooler and a new head, as transformers' `BertForSequenceClassification`.
struct Classifier {
    bert: Bert,
    pooler: Linear,
    dropout: Dropout,
    head: Linear,
    mode: Mode,
}

impl Classifier {
    fn new(
        build: Build,
        folder: &Path,
        vb: VarBuilder,
        norms: &PowerNormBuilder,
        classes: usize,
    ) -> Result<Self> {
        let config: bert::Config = config(folder)?;
        let width = config.hidden_size;
        let head = vb.pp("classifier");
        let normal = Init::Randn {
            mean: 0.,
            stdev: config.initializer_range,
        };
        let weight = head.get_with_hints((classes, width), "weight", normal)?;
        let bias = head.get_with_hints(classes, "bias", Init::Const(0.))?;
        Ok(Self {
            bert: build(folder, vb.clone(), norms)?,
            pooler: linear(width, width, vb.pp("bert.pooler.dense"))?,
            dropout: Dropout::new(config.hidden_dropout_prob as f32),
            head: Linear::new(weight, Some(bias)),
            mode: norms.mode().clone(),
        })
    }

    /// The logits of the classes.
    fn forward(&self, batch: &Batch) -> Result<Tensor> {
        let types = batch.ids.zeros_like()?;
        let hidden = (self.bert)(&batch.ids, &types, &batch.mask)?;
        let first = hidden.narrow(1, 0, 1)?.squeeze(1)?; // of [CLS]
        let pooled = self.pooler.forward(&first)?.tanh()?;
        let pooled = self.dropout.forward(&pooled, self.mode.is_training())?;
        self.head.forward(&pooled)
    }

    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        cross_entropy(&self.forward(batch)?, &batch.labels)
    }

    /// The share of the lines whose class the model recognizes.
    fn accuracy(&self, lines: &[Line]) -> Result<f64> {
        let _guard = self.mode.eval_scope(); // evaluation until the function returns
        let mut right = 0.;
        for lines in lines.chunks(BATCH) {
            let batch = Batch::of(lines)?;
            let found = self.forward(&batch)?.argmax(1)?.eq(&batch.labels)?;
            right += found.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?;
        }
        Ok(right / lines.len() as f64)
    }
}

// Fine-tuning

/// A fine-tuned model, and how it went.
struct Tuned {
    varmap: VarMap,
    /// The variables that the checkpoint did not have.
    new: Vec<String>,
    /// The number of all variables for the optimizer, and those that the first backward does not
    /// train.
    variables: usize,
    untrained: Vec<Untrained>,
    /// Of the first batch, and the means of the last ten batches of the warm-up and of all.
    losses: [f32; 3],
    /// On the lines that are held out, after the warm-up and after all steps.
    accuracies: [f64; 2],
}

fn fine_tune(build: Build, folder: &Path, lines: &Lines, steps: usize) -> Result<Tuned> {
    let warm_up = steps / 4; // of the learning rate, and of PowerNorm's statistics
    let mode = Mode::train();
    let config = PowerNormConfig {
        warmup_steps: warm_up,
        ..1e-5.into()
    };
    let norms = PowerNormBuilder::new(config, &mode);

    let varmap = load(folder)?;
    let loaded = names(&varmap);
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let model = Classifier::new(build, folder, vb, &norms, lines.classes.len())?;
    let mut new: Vec<_> = names(&varmap).difference(&loaded).cloned().collect();
    new.sort();

    let vars = trainable_vars(&varmap);
    let variables = vars.len();
    let params = ParamsAdamW {
        weight_decay: 0.01,
        ..Default::default()
    };
    let mut optimizer = AdamW::new(vars, params)?;
    let mut rng = StdRng::seed_from_u64(1);
    let (mut untrained, mut losses, mut accuracies) = (vec![], vec![], vec![]);
    for step in 0..steps {
        let rise = (step + 1) as f64 / warm_up as f64;
        let fall = (steps - step) as f64 / (steps - warm_up) as f64;
        optimizer.set_learning_rate(RATE * rise.min(fall));

        let loss = model.loss(&lines.batch(BATCH, &mut rng)?)?;
        let gradients = loss.backward()?;
        if step == 0 {
            untrained = not_trained(&varmap, &gradients)?;
        }
        optimizer.step(&gradients)?;
        losses.push(loss.to_scalar::<f32>()?);
        if step + 1 == warm_up || step + 1 == steps {
            accuracies.push(model.accuracy(&lines.held_out)?);
        }
    }
    let last_ten = |end: usize| losses[end - 10..end].iter().sum::<f32>() / 10.;
    Ok(Tuned {
        varmap,
        new,
        variables,
        untrained,
        losses: [losses[0], last_ten(warm_up), last_ten(steps)],
        accuracies: [accuracies[0], accuracies[1]],
    })
}

/// The variables that a backward does not train. Gradients of 0 are right for the rows of tokens
/// and positions that are not in the batch, and for the keys' bias, which the softmax cancels.
fn not_trained(varmap: &VarMap, gradients: &GradStore) -> Result<Vec<Untrained>> {
    let mut found = untrained(varmap, gradients)?;
    found.retain(|variable| match variable {
        Untrained::NoGradient { .. } => true,
        _ => !variable.name().contains("_embeddings") && !variable.name().ends_with("key.bias"),
    });
    Ok(found)
}

impl Tuned {
    fn print(&self) {
        let new = |of: &str| self.new.iter().filter(|name| name.contains(of)).count();
        let trained = self.variables - self.untrained.len();
        println!(
            "  trained by a backward: {trained} of {} variables",
            self.variables
        );
        let mut parts = BTreeMap::<_, usize>::new();
        for variable in &self.untrained {
            let part: Vec<_> = variable.name().split('.').take(2).collect();
            *parts.entry(part.join(".")).or_default() += 1;
        }
        for (part, count) in parts {
            println!("    not trained: {count} of {part}");
        }
        println!(
            "  not in the checkpoint: {} of the classifier, statistics of {} PowerNorms",
            new("classifier"),
            new("running_phi")
        );
        let [first, warm, last] = self.losses;
        let [after_warm_up, accuracy] = self.accuracies.map(|share| 100. * share);
        println!("  first batch      loss {first:.3}");
        println!("  after warm-up    loss {warm:.3}, {after_warm_up:.0} % of the held-out lines");
        println!("  after all steps  loss {last:.3}, {accuracy:.0} % of the held-out lines");
    }

    /// Fails unless everything trains and the loss falls.
    fn check(&self) -> Result<()> {
        if !self.untrained.is_empty() {
            bail!("a backward does not train {:?}", self.untrained);
        }
        let [first, _, last] = self.losses;
        if last.is_nan() || last >= first {
            bail!("the loss was {first}, and after all steps {last}");
        }
        Ok(())
    }

    /// The training forwards of each PowerNorm, by the name of its variable.
    fn steps(&self) -> Result<BTreeMap<String, i64>> {
        let vars = self.varmap.data().lock().unwrap();
        let counters = vars.iter().filter(|(name, _)| name.ends_with("iters"));
        counters
            .map(|(name, var)| Ok((name.clone(), var.to_vec1()?[0])))
            .collect()
    }
}

/// Evaluates the PowerNorm model from a file, without variables.
fn evaluate(file: &Path, folder: &Path, lines: &Lines) -> Result<f64> {
    let tensors = candle::safetensors::load(file, &Device::Cpu)?;
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let norms = PowerNormBuilder::new(1e-5, &Mode::eval());
    let model = Classifier::new(with_power_norm, folder, vb, &norms, lines.classes.len())?;
    model.accuracy(&lines.held_out)
}

const USAGE: &str = "usage: bert [--steps 300] [FILE FILE ...], at least 40 steps";

fn args(mut words: impl Iterator<Item = String>) -> Result<(usize, Vec<PathBuf>)> {
    let (mut steps, mut files) = (300, vec![]);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--steps" => match words.next().and_then(|steps| steps.parse().ok()) {
                Some(given) if given >= 40 => steps = given,
                _ => bail!("{USAGE}"),
            },
            _ if word.starts_with('-') => bail!("{USAGE}"),
            _ => files.push(PathBuf::from(word)),
        }
    }
    if files.is_empty() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let own = ["README.md", "src/power_norm.rs", "docs/paper/results.py"];
        files.extend(own.map(|file| root.join(file)));
    }
    Ok((steps, files))
}

fn main() -> Result<()> {
    threads::set_threads();
    let start = Instant::now();
    let (steps, files) = args(env::args().skip(1))?;
    let lines = Lines::read(&files)?;
    println!(
        "{} lines to train on, and {} held out, of {}; the commonest has {:.0} %",
        lines.training.len(),
        lines.held_out.len(),
        lines.classes.join(", "),
        100. * lines.commonest()
    );
    let folder = tempfile::tempdir()?;
    checkpoint::write(folder.path())?;

    println!("\ncandle-transformers' bert.rs as it is");
    fine_tune(untouched, folder.path(), &lines, steps)?.print();

    println!("\nLayerNorm of this crate: an import");
    let tuned = fine_tune(with_layer_norm, folder.path(), &lines, steps)?;
    tuned.print();
    tuned.check()?;

    println!("\nPowerNorm, with masks, a mode and dropout");
    let tuned = fine_tune(with_power_norm, folder.path(), &lines, steps)?;
    tuned.print();
    tuned.check()?;
    if tuned.steps()?.values().any(|&taken| taken != steps as i64) {
        bail!("an evaluation moved statistics: {:?}", tuned.steps()?);
    }
    let file = folder.path().join("fine-tuned.safetensors");
    tuned.varmap.save(&file)?;
    let accuracy = 100. * evaluate(&file, folder.path(), &lines)?;
    println!("  from its file    {accuracy:.0} % of the held-out lines");

    println!("\n{:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}
