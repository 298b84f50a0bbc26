//! Trains the Llama of llama2.c on the characters of a text in three forms: candle-transformers'
//! own, with rotary tables that are computed first; with this crate's `rms_norm`, which is a changed
//! import; and with PowerNorm. All start from the same weights and read the same batches.
//!
//! The optimizer and its rate are those of candle's training example for this model.

use crate::{llama2_c, llama2_c_candle, llama2_c_power, untrained};
use candle::{bail, DType, Device, Error, Result, Tensor};
use candle_nn::{loss::cross_entropy, AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use candle_powernorm::{check_gradients, trainable_vars};
use candle_powernorm::{Mode, PowerNormBuilder, PowerNormConfig};
use rand::{rngs::StdRng, Rng, SeedableRng};
use std::collections::BTreeSet;
use std::path::Path;

const WIDTH: usize = 96;
const LAYERS: usize = 3;
const HEADS: usize = 4;
const CONTEXT: usize = 64;
const BATCH: usize = 16;
const RATE: f64 = 1e-3;

/// Batches of the text's last tenth that a validation takes the mean over.
const VALIDATIONS: usize = 50;

type Logits = Box<dyn FnMut(&Tensor) -> Result<Tensor>>;
type NewModel = fn(usize, &Mode, VarBuilder) -> Result<Logits>;

/// Builds the model of a module. The three files have the same names, but types of their own.
macro_rules! model {
    ($module:ident, $vocab:expr, $vb:expr $(, $field:ident: $value:expr)?) => {{
        let config = $module::Config {
            $($field: $value,)?
            dim: WIDTH,
            hidden_dim: 4 * WIDTH,
            vocab_size: $vocab,
            n_layers: LAYERS,
            n_heads: HEADS,
            n_kv_heads: HEADS,
            seq_len: CONTEXT,
            norm_eps: 1e-5,
        };
        let mut cache = $module::Cache::new(false, &config, $vb.pp("rot"))?;
        let model = $module::Llama::load($vb, config)?;
        Ok(Box::new(move |ids: &Tensor| model.forward(ids, 0, &mut cache)))
    }};
}

const MODELS: [(&str, NewModel); 3] = [
    ("candle's rms_norm", |vocab, _, vb| {
        model!(llama2_c_candle, vocab, vb)
    }),
    ("this crate's rms_norm", |vocab, _, vb| {
        model!(llama2_c, vocab, vb)
    }),
    ("PowerNorm without a bias", |vocab, mode, vb| {
        let config = PowerNormConfig {
            bias: false,
            ..1e-5.into()
        };
        model!(llama2_c_power, vocab, vb, norms: PowerNormBuilder::new(config, mode))
    }),
];

/// A text as numbers of its characters.
struct Text {
    vocab: usize,
    train: Vec<u32>,
    validation: Vec<u32>,
}

impl Text {
    fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::from(e).with_path(path))?;
        let vocab: BTreeSet<char> = text.chars().collect();
        let vocab: Vec<char> = vocab.into_iter().collect();
        let token = |c| vocab.partition_point(|&known| known < c) as u32;
        let mut train: Vec<u32> = text.chars().map(token).collect();
        let validation = train.split_off(train.len() / 10 * 9);
        if validation.len() <= CONTEXT {
            bail!("the text must have more than {} characters", 10 * CONTEXT);
        }
        Ok(Self {
            vocab: vocab.len(),
            train,
            validation,
        })
    }
}

/// Stretches of a text that begin at random, and for each character the one after it.
fn batch(text: &[u32], rng: &mut StdRng) -> Result<[Tensor; 2]> {
    let mut ids = vec![];
    for _ in 0..BATCH {
        let start = rng.random_range(..text.len() - CONTEXT);
        ids.extend_from_slice(&text[start..=start + CONTEXT]);
    }
    let ids = Tensor::from_vec(ids, (BATCH, CONTEXT + 1), &Device::Cpu)?;
    let [inputs, targets] = [0, 1].map(|first| ids.narrow(1, first, CONTEXT));
    Ok([inputs?.contiguous()?, targets?.flatten_all()?])
}

/// Draws every matrix from candle's own distributions, in the order of their names: candle's
/// generator has no seed on a CPU.
fn init(varmap: &VarMap, rng: &mut StdRng) -> Result<()> {
    let data = varmap.data().lock().unwrap();
    let mut vars: Vec<_> = data.iter().filter(|(_, var)| var.rank() == 2).collect();
    vars.sort_by_key(|(name, _)| *name);
    for (name, var) in vars {
        let deviation = match name.contains("embed") {
            true => 1.,
            false => (2. / var.dim(1)? as f64).sqrt(),
        };
        // Box-Muller
        let mut normal = || {
            let radius = (-2. * (1. - rng.random::<f64>()).ln()).sqrt();
            radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()
        };
        let values = (0..var.elem_count()).map(|_| (deviation * normal()) as f32);
        let values: Vec<f32> = values.collect();
        var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
    }
    Ok(())
}

/// The result of a training.
struct Outcome {
    /// Variables that the first backward trains, and those whose gradient is right, out of
    /// `variables`.
    trained: usize,
    right: usize,
    variables: usize,
    validation: f64,
}

fn train(new_model: NewModel, text: &Text, steps: usize, seed: u64) -> Result<Outcome> {
    let (varmap, mode) = (VarMap::new(), Mode::train());
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let mut logits = new_model(text.vocab, &mode, vb)?;
    let mut loss_of =
        |[inputs, targets]: [Tensor; 2]| cross_entropy(&logits(&inputs)?.flatten_to(1)?, &targets);
    let mut rng = StdRng::seed_from_u64(seed);
    init(&varmap, &mut rng)?;
    let params = ParamsAdamW {
        lr: RATE,
        ..Default::default()
    };
    let vars = trainable_vars(&varmap);
    let variables = vars.len();
    let mut optimizer = AdamW::new(vars, params)?;
    let mut first = None;
    for _ in 0..steps {
        let batch = batch(&text.train, &mut rng)?;
        let gradients = loss_of(batch.clone())?.backward()?;
        if first.is_none() {
            let untrained = untrained(&varmap, &gradients)?.len();
            let wrong = check_gradients(&varmap, || loss_of(batch.clone()))?.len();
            first = Some([variables - untrained, variables - wrong]);
        }
        optimizer.step(&gradients)?;
    }
    let [trained, right] = first.unwrap_or_default();
    let _evaluation = mode.eval_scope();
    let mut rng = StdRng::seed_from_u64(0);
    let mut sum = 0.;
    for _ in 0..VALIDATIONS {
        let loss = loss_of(batch(&text.validation, &mut rng)?)?;
        sum += f64::from(loss.to_scalar::<f32>()?);
    }
    Ok(Outcome {
        trained,
        right,
        variables,
        validation: sum / VALIDATIONS as f64,
    })
}

/// Trains each model with each seed, and prints a table. Fails if with this crate's layers a variable
/// has no gradient or a wrong one.
pub fn compare(text: &Path, steps: usize, seeds: &[u64]) -> Result<()> {
    let text = Text::read(text)?;
    println!(
        "llama2.c, {LAYERS} layers of {WIDTH}, {} different characters, {steps} steps of {BATCH} x \
         {CONTEXT} characters\n",
        text.vocab
    );
    print!("{:26}{:>10}{:>10}", "normalization", "trained", "right");
    seeds
        .iter()
        .for_each(|seed| print!("{:>10}", format!("seed {seed}")));
    println!();
    for (name, new_model) in MODELS {
        let mut line = String::new();
        let mut first = None;
        for &seed in seeds {
            let outcome = train(new_model, &text, steps, seed)?;
            line += &format!("{:10.3}", outcome.validation);
            first.get_or_insert(outcome);
        }
        let Some(Outcome {
            trained,
            right,
            variables,
            ..
        }) = first
        else {
            continue; // no seeds
        };
        let of = |count| format!("{count} of {variables}");
        println!("{name:26}{:>10}{:>10}{line}", of(trained), of(right));
        if !name.starts_with("candle's") && (trained, right) != (variables, variables) {
            bail!("{name}: {trained} of {variables} variables train, {right} of them rightly");
        }
    }
    println!("\nThe mean loss of {VALIDATIONS} batches of the text's last tenth, in nats.");
    Ok(())
}
