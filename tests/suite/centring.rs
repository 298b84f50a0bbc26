//! LayerNorm's weights in an RMSNorm and in a PowerNorm: the recipe of the guide's page on
//! checkpoints, on a small pre-norm transformer.

use crate::common::*;
use candle::{D, DType, Module, Result, Tensor};
use candle_nn::{Activation, Embedding, Linear, VarBuilder, linear, ops};
use candle_powernorm::{LayerNormConfig, PowerNorm, layer_norm};
use std::collections::HashMap;

const VOCAB: usize = 11;
const TIME: usize = 7;
const WIDTH: usize = 24;
const HEADS: usize = 3;
const BLOCKS: usize = 2;

type Norm = Box<dyn Module>;
type NewNorm<'a> = &'a dyn Fn(VarBuilder) -> Result<Norm>;

struct Block {
    norms: [Norm; 2],
    query_key_value: Linear,
    project: Linear,
    expand: Linear,
    contract: Linear,
}

/// Each part reads the residual stream through a normalization, and adds to it.
struct Model {
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: Norm,
    output: Linear,
}

impl Model {
    fn new(new_norm: NewNorm, vb: VarBuilder) -> Result<Self> {
        let block = |vb: VarBuilder| -> Result<_> {
            Ok(Block {
                norms: [new_norm(vb.pp("norm_1"))?, new_norm(vb.pp("norm_2"))?],
                query_key_value: linear(WIDTH, 3 * WIDTH, vb.pp("query_key_value"))?,
                project: linear(WIDTH, WIDTH, vb.pp("project"))?,
                expand: linear(WIDTH, 2 * WIDTH, vb.pp("expand"))?,
                contract: linear(2 * WIDTH, WIDTH, vb.pp("contract"))?,
            })
        };
        Ok(Self {
            tokens: Embedding::new(vb.get((VOCAB, WIDTH), "tokens.weight")?, WIDTH),
            positions: vb.get((TIME, WIDTH), "positions.weight")?,
            blocks: (0..BLOCKS)
                .map(|i| block(vb.pp(i)))
                .collect::<Result<_>>()?,
            norm: new_norm(vb.pp("norm"))?,
            output: linear(WIDTH, VOCAB, vb.pp("output"))?,
        })
    }

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut xs = self.tokens.forward(ids)?.broadcast_add(&self.positions)?;
        for block in &self.blocks {
            let [norm_1, norm_2] = &block.norms;
            xs = (&xs + block.attention(&norm_1.forward(&xs)?)?)?;
            let hidden = block.expand.forward(&norm_2.forward(&xs)?)?;
            xs = (&xs
                + block
                    .contract
                    .forward(&Activation::Gelu.forward(&hidden)?)?)?;
        }
        self.output.forward(&self.norm.forward(&xs)?)
    }
}

impl Block {
    fn attention(&self, xs: &Tensor) -> Result<Tensor> {
        let (batch, head) = (xs.dim(0)?, WIDTH / HEADS);
        let all = self.query_key_value.forward(xs)?;
        let all = all
            .reshape((batch, TIME, 3 * HEADS, head))?
            .transpose(1, 2)?;
        let [query, key, value] = [0, 1, 2].map(|i| all.narrow(1, i * HEADS, HEADS)?.contiguous());
        let scores = (query?.matmul(&key?.t()?)? * (head as f64).powf(-0.5))?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&value?)?;
        let mixed = mixed.transpose(1, 2)?.reshape((batch, TIME, WIDTH))?;
        self.project.forward(&mixed)
    }
}

/// As the guide has it.
fn centre(
    tensors: &mut HashMap<String, Tensor>,
    stream: impl Fn(&str) -> Option<usize>,
) -> Result<()> {
    for (name, tensor) in tensors {
        if let Some(channels) = stream(name) {
            let values = tensor.to_dtype(DType::F64)?;
            let centred = values.broadcast_sub(&values.mean_keepdim(channels)?)?;
            *tensor = centred.to_dtype(tensor.dtype())?;
        }
    }
    Ok(())
}

/// The dimension of the stream's channels in the tensors that write to it.
fn writes(name: &str) -> Option<usize> {
    match name {
        "tokens.weight" | "positions.weight" => Some(1),
        _ if name.contains("project.") || name.contains("contract.") => Some(0),
        _ => None,
    }
}

/// A LayerNorm's checkpoint, in which nothing is centred, and weights and biases are not fresh.
fn checkpoint() -> Result<HashMap<String, Tensor>> {
    let varmap = candle_nn::VarMap::new();
    let vb = trainable(&varmap, DType::F32);
    Model::new(&|vb| Ok(Box::new(layer_norm(WIDTH, 1e-5, vb)?)), vb)?;
    let mut tensors: Vec<_> = frozen(&varmap).into_iter().collect();
    tensors.sort_by(|(one, _), (other, _)| one.cmp(other));
    let mut data = Data::new(31);
    let random = |(name, old): (String, Tensor)| {
        // Deviations as of trained layers, and a mean to subtract.
        let deviation = match old.dims() {
            _ if name.starts_with("tokens") || name.starts_with("positions") => 1.,
            [_, inputs] => (*inputs as f64).powf(-0.5),
            _ => 0.3,
        };
        let mean = if name.contains("norm") && name.ends_with("weight") {
            1.
        } else {
            0.2
        };
        let values = data.normal(old.elem_count());
        let values: Vec<f64> = values.iter().map(|x| mean + deviation * x).collect();
        (name, tensor(&values, old.dims(), DType::F32))
    };
    Ok(tensors.into_iter().map(random).collect())
}

/// The logits of a model with these tensors and normalizations.
fn logits(tensors: &HashMap<String, Tensor>, new_norm: NewNorm) -> Result<Tensor> {
    let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &CPU);
    let ids: Vec<u32> = (0..3 * TIME).map(|i| (i * i % VOCAB) as u32).collect();
    Model::new(new_norm, vb)?.forward(&Tensor::from_vec(ids, (3, TIME), &CPU)?)
}

fn apart(one: &Tensor, other: &Tensor) -> f64 {
    let pairs = to_f64(one).into_iter().zip(to_f64(other));
    pairs.fold(0., |most, (one, other)| most.max((one - other).abs()))
}

#[test]
fn layer_norm_s_weights_move_to_rms_norm_and_power_norm() -> Result<()> {
    // At an ε of 0.1 each ε in the wrong place shows.
    for eps in [1e-5, 0.1] {
        let mut tensors = checkpoint()?;
        let new_layer_norm = |vb: VarBuilder| Ok(Box::new(layer_norm(WIDTH, eps, vb)?) as Norm);
        let rms = LayerNormConfig {
            remove_mean: false,
            ..eps.into()
        };
        let new_rms_norm = |vb: VarBuilder| Ok(Box::new(layer_norm(WIDTH, rms, vb)?) as Norm);
        let before = logits(&tensors, &new_layer_norm)?;
        let size = to_f64(&before)
            .iter()
            .fold(0., |most: f64, x| most.max(x.abs()));
        assert!((1. ..30.).contains(&size), "logits up to {size}");
        let uncentred = apart(&logits(&tensors, &new_rms_norm)?, &before);
        assert!(uncentred > 0.1, "without centring {uncentred}");

        centre(&mut tensors, writes)?;
        let centred = apart(&logits(&tensors, &new_layer_norm)?, &before);
        let by_rms_norm = apart(&logits(&tensors, &new_rms_norm)?, &before);

        // PowerNorm divides by √(ψ²+ε) too, where ψ² is 1.
        for (name, tensor) in &mut tensors {
            if name.contains("norm") && name.ends_with("weight") {
                *tensor = (&*tensor * (1. + eps).sqrt())?;
            }
        }
        let new_power_norm = |vb: VarBuilder| -> Result<Norm> {
            let [weight, bias] = ["weight", "bias"].map(|name| vb.get(WIDTH, name));
            let phi = Tensor::ones(WIDTH, DType::F32, &CPU)?;
            // Of no variables: the layer evaluates.
            Ok(Box::new(PowerNorm::new(weight?, bias?, phi, eps)?))
        };
        let by_power_norm = apart(&logits(&tensors, &new_power_norm)?, &before);
        println!(
            "ε {eps}, logits up to {size:.1}: without centring {uncentred:.1e}, LayerNorm \
             {centred:.1e}, RMSNorm {by_rms_norm:.1e}, PowerNorm {by_power_norm:.1e}"
        );
        for (name, apart) in [
            ("LayerNorm", centred),
            ("RMSNorm", by_rms_norm),
            ("PowerNorm", by_power_norm),
        ] {
            assert!(
                apart <= 1e-5,
                "{name} of the centred model, ε {eps}: {apart}"
            );
        }
    }
    Ok(())
}
