//! A pre-norm transformer, encoder and decoder: sinusoidal positions, dropout on embeddings and
//! branches, one embedding for both languages and for the output.

use super::data::{Batch, Sources};
use crate::common::causal_mask;
use crate::common::checkpoint::variables;
use crate::common::norm::{Norm, NormConfig, NormLayer};
use crate::common::random::Dropout;
use candle::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{Embedding, Linear, VarBuilder, VarMap, embedding, linear};
use candle_powernorm::Mode;
use rand::{Rng, rngs::StdRng};
use rand_distr::Normal;

/// The sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    /// Of the encoder, and of the decoder.
    pub layers: usize,
    pub heads: usize,
    pub width: usize,
    pub hidden: usize,
    pub vocab: usize,
}

/// The transformer.
pub struct Transformer {
    tokens: Embedding,
    width: usize,
    encoder: Vec<EncoderBlock>,
    encoder_norm: NormLayer,
    decoder: Vec<DecoderBlock>,
    decoder_norm: NormLayer,
    output: Linear,
}

/// The source sentences, as the decoder reads them.
pub struct Memory {
    /// Keys and values of each of its layers: `[batch, heads, time, width / heads]`
    layers: Vec<(Tensor, Tensor)>,
    mask: Tensor,
}

impl Memory {
    /// That of the sentences with these numbers.
    pub fn select(&self, sentences: &Tensor) -> Result<Self> {
        let select = |tensor: &Tensor| tensor.index_select(sentences, 0);
        let layers = self.layers.iter();
        Ok(Self {
            layers: layers
                .map(|(keys, values)| Ok((select(keys)?, select(values)?)))
                .collect::<Result<_>>()?,
            mask: select(&self.mask)?,
        })
    }
}

impl Transformer {
    /// The encoder's normalizations are `norm` and follow `mode`; the decoder's are LayerNorm, as
    /// in the paper, without layer-scale.
    pub fn new(size: Size, norm: &NormConfig, mode: &Mode, vb: VarBuilder) -> Result<Self> {
        let width = size.width;
        let layer_norm = NormConfig {
            norm: Norm::Layer,
            groups: None,
            ..*norm
        };
        let tokens = embedding(size.vocab, width, vb.pp("tokens"))?;
        let (encoder, decoder) = (vb.pp("encoder"), vb.pp("decoder"));
        Ok(Self {
            output: Linear::new(tokens.embeddings().clone(), None),
            tokens,
            width,
            encoder: (0..size.layers)
                .map(|i| EncoderBlock::new(&size, norm, mode, encoder.pp(i)))
                .collect::<Result<_>>()?,
            encoder_norm: NormLayer::new(width, norm, mode, encoder.pp("norm"))?,
            decoder: (0..size.layers)
                .map(|i| DecoderBlock::new(&size, &layer_norm, mode, decoder.pp(i)))
                .collect::<Result<_>>()?,
            decoder_norm: NormLayer::new(width, &layer_norm, mode, decoder.pp("norm"))?,
        })
    }

    /// The loss over a batch's targets, with its gradient.
    pub fn objective(&self, batch: &Batch, smoothing: f64, dropout: &Dropout) -> Result<Objective> {
        let hidden = self.hidden(batch, dropout)?;
        Objective::new(&hidden, self.tokens.embeddings(), &batch.targets, smoothing)
    }

    /// The loss alone, without smoothing and dropout: the cross entropy, summed over the batch's
    /// targets.
    pub fn loss(&self, batch: &Batch) -> Result<Tensor> {
        let hidden = self.hidden(batch, &Dropout::none())?;
        let embedding = self.tokens.embeddings();
        cross_entropy(&hidden, embedding, &batch.targets, 0., |_| Ok(()))
    }

    /// The decoder's output before each of a batch's targets: `[count, width]`.
    fn hidden(&self, batch: &Batch, dropout: &Dropout) -> Result<Tensor> {
        let memory = self.encode(&batch.sources, dropout)?;
        self.decode(&batch.inputs, &memory, dropout)?
            .flatten_to(1)?
            .index_select(&batch.places, 0)
    }

    pub fn encode(&self, sources: &Sources, dropout: &Dropout) -> Result<Memory> {
        let padding = &sources.padding;
        let embedded = self.embed(&sources.tokens)?;
        // Nothing that the token of padding learns, or becomes, gets any further.
        let keep = padding.keep.unsqueeze(2)?.broadcast_as(embedded.shape())?;
        let embedded = keep.where_cond(&embedded, &embedded.zeros_like()?.detach())?;
        let mut stream = dropout.forward(&embedded)?;
        let mut xs = self.encoder_norm_of(0).forward_masked(&stream, padding)?;
        for (i, block) in self.encoder.iter().enumerate() {
            let (keys, values) = block.attention.keys_values(&xs)?;
            let branch = block
                .attention
                .forward(&xs, &keys, &values, &sources.mask)?;
            let branch = dropout.forward(&branch)?;
            (xs, stream) = (block.norm_2).forward_residual_masked(&branch, &stream, padding)?;
            let branch = dropout.forward(&block.mlp.forward(&xs)?)?;
            let norm = self.encoder_norm_of(i + 1);
            (xs, stream) = norm.forward_residual_masked(&branch, &stream, padding)?;
        }
        let layers = self.decoder.iter();
        Ok(Memory {
            layers: layers
                .map(|block| block.cross.keys_values(&xs))
                .collect::<Result<_>>()?,
            mask: sources.mask.clone(),
        })
    }

    /// The decoder's output of `tokens`, `[batch, time]`, before the logits.
    pub fn decode(&self, tokens: &Tensor, memory: &Memory, dropout: &Dropout) -> Result<Tensor> {
        // Padding comes after all that is real, in a translation: the future's mask is enough.
        let mask = causal_mask(tokens.dim(1)?, tokens.device())?;
        let mut stream = dropout.forward(&self.embed(tokens)?)?;
        let mut xs = self.decoder_norm_of(0).forward(&stream)?;
        for (i, (block, (keys, values))) in self.decoder.iter().zip(&memory.layers).enumerate() {
            let (own_keys, own_values) = block.attention.keys_values(&xs)?;
            let branch = (block.attention).forward(&xs, &own_keys, &own_values, &mask)?;
            (xs, stream) = (block.norm_2).forward_residual(&dropout.forward(&branch)?, &stream)?;
            let branch = block.cross.forward(&xs, keys, values, &memory.mask)?;
            (xs, stream) = (block.norm_3).forward_residual(&dropout.forward(&branch)?, &stream)?;
            let branch = dropout.forward(&block.mlp.forward(&xs)?)?;
            (xs, stream) = (self.decoder_norm_of(i + 1)).forward_residual(&branch, &stream)?;
        }
        Ok(xs)
    }

    /// The logits of the tokens after `hidden`, `[rows, width]`.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.output.forward(hidden)
    }

    fn embed(&self, tokens: &Tensor) -> Result<Tensor> {
        // The embedding is the output's too, and that small: scaled, it is as large as the
        // positions.
        let embedded = (self.tokens.forward(tokens)? * (self.width as f64).sqrt())?;
        embedded.broadcast_add(&positions(tokens.dim(1)?, self.width, tokens.device())?)
    }

    /// The normalization of the residual stream before block `i`, or of the output.
    fn encoder_norm_of(&self, i: usize) -> &NormLayer {
        let block = self.encoder.get(i);
        block.map_or(&self.encoder_norm, |block| &block.norm_1)
    }

    fn decoder_norm_of(&self, i: usize) -> &NormLayer {
        let block = self.decoder.get(i);
        block.map_or(&self.decoder_norm, |block| &block.norm_1)
    }
}

/// Sines in the first half of the channels, cosines in the second.
fn positions(time: usize, width: usize, device: &Device) -> Result<Tensor> {
    let half = width / 2;
    let angle = |t: usize, i: usize| t as f32 * 1e4f32.powf(-(i as f32) / half as f32);
    let values: Vec<f32> = (0..time)
        .flat_map(|t| {
            (0..width).map(move |i| match i < half {
                true => angle(t, i).sin(),
                false => angle(t, i - half).cos(),
            })
        })
        .collect();
    Tensor::from_vec(values, (time, width), device)
}

struct EncoderBlock {
    norm_1: NormLayer,
    attention: Attention,
    norm_2: NormLayer,
    mlp: Mlp,
}

impl EncoderBlock {
    fn new(size: &Size, norm: &NormConfig, mode: &Mode, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            norm_1: NormLayer::new(size.width, norm, mode, vb.pp("norm_1"))?,
            attention: Attention::new(size, vb.pp("attention"))?,
            norm_2: NormLayer::new(size.width, norm, mode, vb.pp("norm_2"))?,
            mlp: Mlp::new(size, vb.pp("mlp"))?,
        })
    }
}

struct DecoderBlock {
    norm_1: NormLayer,
    attention: Attention,
    norm_2: NormLayer,
    cross: Attention,
    norm_3: NormLayer,
    mlp: Mlp,
}

impl DecoderBlock {
    fn new(size: &Size, norm: &NormConfig, mode: &Mode, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            norm_1: NormLayer::new(size.width, norm, mode, vb.pp("norm_1"))?,
            attention: Attention::new(size, vb.pp("attention"))?,
            norm_2: NormLayer::new(size.width, norm, mode, vb.pp("norm_2"))?,
            cross: Attention::new(size, vb.pp("cross"))?,
            norm_3: NormLayer::new(size.width, norm, mode, vb.pp("norm_3"))?,
            mlp: Mlp::new(size, vb.pp("mlp"))?,
        })
    }
}

struct Mlp {
    expand: Linear,
    project: Linear,
}

impl Mlp {
    fn new(size: &Size, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            expand: linear(size.width, size.hidden, vb.pp("expand"))?,
            project: linear(size.hidden, size.width, vb.pp("project"))?,
        })
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.project.forward(&self.expand.forward(xs)?.relu()?)
    }
}

struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    project: Linear,
    heads: usize,
}

impl Attention {
    fn new(size: &Size, vb: VarBuilder) -> Result<Self> {
        let linear = |name| linear(size.width, size.width, vb.pp(name));
        Ok(Self {
            query: linear("query")?,
            key: linear("key")?,
            value: linear("value")?,
            project: linear("project")?,
            heads: size.heads,
        })
    }

    fn keys_values(&self, xs: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok((
            self.split(&self.key.forward(xs)?)?,
            self.split(&self.value.forward(xs)?)?,
        ))
    }

    fn forward(
        &self,
        xs: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        mask: &Tensor,
    ) -> Result<Tensor> {
        let (batch, time, width) = xs.dims3()?;
        // Scaling the query is the same as scaling the scores, which are more.
        let scale = ((width / self.heads) as f64).powf(-0.5);
        let query = (self.split(&self.query.forward(xs)?)? * scale)?;
        let scores = query.matmul(&keys.t()?)?.broadcast_add(mask)?;
        let mixed = softmax(&scores)?.matmul(values)?;
        let mixed = mixed.transpose(1, 2)?.reshape((batch, time, width))?;
        self.project.forward(&mixed)
    }

    /// `[batch, time, width]` to `[batch, heads, time, width / heads]`.
    fn split(&self, xs: &Tensor) -> Result<Tensor> {
        let (batch, time, width) = xs.dims3()?;
        xs.reshape((batch, time, self.heads, width / self.heads))?
            .transpose(1, 2)?
            .contiguous()
    }
}

/// Not `softmax_last_dim`, which records no backward; nor `softmax`, whose backward goes through
/// the maximum, which changes nothing.
fn softmax(xs: &Tensor) -> Result<Tensor> {
    let exp = xs
        .broadcast_sub(&xs.detach().max_keepdim(D::Minus1)?)?
        .exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

/// Draws every matrix of `varmap` from `rng`, and zeroes the biases of linear layers: matrices by
/// Glorot's normal distribution, the embedding so that logits start at about 1.
///
/// candle's own generator cannot be seeded on a CPU, so the values that the layers were built with
/// are replaced. Variables are visited by name, and normalizations have no matrices: a seed means
/// the same start whatever the normalization.
pub fn init_weights(varmap: &VarMap, rng: &mut StdRng) -> Result<()> {
    for (name, var) in variables(varmap) {
        if let [rows, columns] = *var.dims() {
            let std = match name.starts_with("tokens") {
                true => (columns as f32).powf(-0.5),
                false => (2. / (rows + columns) as f32).sqrt(),
            };
            let normal = Normal::new(0f32, std).map_err(candle::Error::wrap)?;
            let values: Vec<f32> = rng.sample_iter(normal).take(var.elem_count()).collect();
            var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?;
        } else if name.ends_with(".bias") {
            var.set(&var.zeros_like()?)?;
        }
    }
    Ok(())
}

/// Rows of logits that are in the cache together, in [`cross_entropy`].
const ROWS: usize = 256;

/// Some rows of a model's output, and the softmax of their logits, `exp / sum`.
struct Stretch {
    rows: Tensor,
    targets: Tensor,
    exp: Tensor,
    sum: Tensor,
}

/// The cross entropy with label smoothing of the logits `hidden · embeddingᵀ`, `[count, width]` and
/// `[vocab, width]`, for `targets`, `[count]`, summed over them. The target has all but `smoothing`
/// of the probability, and each token an equal share of that.
///
/// The logits are the largest tensor by far: they are taken by stretches of rows, in the cache, and
/// autograd sees none of them. `each` is given each stretch for what else depends on it.
fn cross_entropy(
    hidden: &Tensor,
    embedding: &Tensor,
    targets: &Tensor,
    smoothing: f64,
    mut each: impl FnMut(Stretch) -> Result<()>,
) -> Result<Tensor> {
    let (hidden, weight) = (hidden.detach(), embedding.detach());
    let (count, vocab) = (hidden.dim(0)?, weight.dim(0)?);
    let mut loss = Tensor::zeros((), DType::F32, weight.device())?;
    for start in (0..count).step_by(ROWS) {
        let count = ROWS.min(count - start);
        let rows = hidden.narrow(0, start, count)?;
        let targets = targets
            .narrow(0, start, count)?
            .unsqueeze(1)?
            .contiguous()?;
        let logits = rows.matmul(&weight.t()?)?;
        let max = logits.max_keepdim(1)?;
        let exp = logits.broadcast_sub(&max)?.exp()?;
        let sum = exp.sum_keepdim(1)?;
        let log_sum = (sum.log()? + max)?.sum_all()?;
        let of_targets = logits.gather(&targets, 1)?.sum_all()?;
        let asked =
            ((of_targets * (1. - smoothing))? + (logits.sum_all()? * (smoothing / vocab as f64))?)?;
        loss = (loss + (log_sum - asked)?)?;
        each(Stretch {
            rows,
            targets,
            exp,
            sum,
        })?;
    }
    Ok(loss)
}

/// The loss of a model's output, and a tensor that has its gradient.
pub struct Objective {
    /// The [`cross_entropy`].
    pub loss: Tensor,
    /// Not the loss, but its gradient is the loss's.
    pub gradient: Tensor,
}

impl Objective {
    /// Through autograd a dozen tensors of the logits' size would live until the backward. But
    /// their gradient, softmax less the probabilities asked for, is known in the forward: the two
    /// products that take it further are made there.
    fn new(hidden: &Tensor, embedding: &Tensor, targets: &Tensor, smoothing: f64) -> Result<Self> {
        let weight = embedding.detach();
        let vocab = weight.dim(0)?;
        let mut parts = vec![];
        let mut d_weight = weight.zeros_like()?;
        let loss = cross_entropy(hidden, embedding, targets, smoothing, |stretch| {
            let Stretch {
                rows,
                targets,
                exp,
                sum,
            } = stretch;
            let share = Tensor::full(-(1. - smoothing) as f32, targets.shape(), targets.device())?;
            let d_logits = exp
                .broadcast_div(&sum)?
                .affine(1., -smoothing / vocab as f64)?
                .scatter_add(&targets, &share, 1)?;
            d_weight = (&d_weight + d_logits.t()?.matmul(&rows)?)?;
            parts.push(d_logits.matmul(&weight)?);
            Ok(())
        })?;
        let d_rows = Tensor::cat(&parts, 0)?;
        let gradient = ((hidden * d_rows)?.sum_all()? + (embedding * d_weight)?.sum_all()?)?;
        Ok(Self { loss, gradient })
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::common::norm::is_buffer;
    use crate::common::random::{Use, generator};
    use crate::translate::data::{BEGIN, END, PAD, Pair};
    use candle::Var;
    use clap::ValueEnum;

    pub const VOCAB: usize = 12;

    pub fn size(vocab: usize) -> Size {
        Size {
            layers: 2,
            heads: 2,
            width: 8,
            hidden: 16,
            vocab,
        }
    }

    /// A model whose normalizations have seen some batches, in evaluation mode.
    pub fn model(norm: Norm, vocab: usize, varmap: &VarMap) -> Result<Transformer> {
        let mode = Mode::train();
        let vb = VarBuilder::from_varmap(varmap, DType::F32, &Device::Cpu);
        let model = Transformer::new(size(vocab), &NormConfig::small(norm), &mode, vb)?;
        init_weights(varmap, &mut generator(5, Use::Weights, 0))?;
        for _ in 0..4 {
            model.encode(&sources(&[&[5, 4, END], &[3, END]]), &Dropout::none())?;
        }
        mode.set_training(false);
        Ok(model)
    }

    pub fn sources(sentences: &[&[u32]]) -> Sources {
        Sources::new(sentences, &Device::Cpu).unwrap()
    }

    /// The logits of what follows each of the first `count` tokens of `target`, the translation of
    /// the first of `sentences`.
    fn logits(model: &Transformer, sentences: &[&[u32]], target: &[u32], count: usize) -> Vec<f32> {
        let memory = model.encode(&sources(sentences), &Dropout::none()).unwrap();
        let targets = Tensor::new(target, &Device::Cpu).unwrap();
        let targets = targets.broadcast_left(sentences.len()).unwrap();
        let hidden = model.decode(&targets, &memory, &Dropout::none()).unwrap();
        let hidden = hidden.get(0).unwrap().narrow(0, 0, count).unwrap();
        let logits = model.logits(&hidden).unwrap();
        logits.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Terms summed on the way through a [`model`], one sum after another: in either half two
    /// blocks of at most eight sums of at most 16, its hidden size.
    const FORWARD: usize = 2 * 2 * 8 * 16;

    /// The largest distance of two computations of a value of `size`, each with sums of `terms` terms
    /// in all: their roundings are independent, so that they grow as the root of their number; 8 is
    /// for safety, and for what cancels.
    fn bound(terms: usize, size: f32) -> f32 {
        8. * (terms as f32).sqrt() * f32::EPSILON * size
    }

    fn largest(values: &[f32]) -> f32 {
        values.iter().fold(0., |max, value| max.max(value.abs()))
    }

    fn assert_close(ours: &[f32], theirs: &[f32], terms: usize, what: impl std::fmt::Display) {
        let largest = largest(theirs);
        assert!(largest > 0.1, "{what}: nothing but zeros");
        assert_eq!(ours.len(), theirs.len());
        for (i, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
            let close = (ours - theirs).abs() <= bound(terms, largest);
            assert!(close, "{what}, {i}: {ours} and {theirs}");
        }
    }

    #[test]
    fn neither_other_sentences_nor_their_padding_change_a_translation() -> Result<()> {
        for &norm in Norm::value_variants() {
            let varmap = VarMap::new();
            let model = model(norm, VOCAB, &varmap)?;
            let (short, long): (&[u32], &[u32]) = (&[4, 7, END], &[9, 3, 3, 8, 5, 6, END]);
            let target = [BEGIN, 5, 6, 7];
            let alone = logits(&model, &[short], &target, 4);
            let beside = logits(&model, &[short, long], &target, 4);
            assert_close(&beside, &alone, FORWARD, norm);
            // Later tokens of the translation, padding for example, are not seen.
            let padded = [BEGIN, 5, PAD, PAD];
            let begun = logits(&model, &[short], &padded, 2);
            assert_close(&begun, &alone[..2 * VOCAB], FORWARD, norm);
            assert_ne!(logits(&model, &[short], &padded, 3), alone[..3 * VOCAB]);
        }
        Ok(())
    }

    #[test]
    fn padding_changes_no_training_step_whatever_its_token_has_become() -> Result<()> {
        let pairs = [[&[4, 7, END][..], &[5, END]], [&[9, 3, 8, END], &[6, END]]];
        let pairs = pairs.map(|[source, target]| Pair {
            source: source.to_vec(),
            target: target.to_vec(),
        });
        for &norm in Norm::value_variants() {
            // The gradient of a matrix of the encoder, and the statistics afterwards.
            let step = |poison: bool, padding: usize| -> Result<(Vec<f32>, Vec<Vec<f32>>)> {
                let varmap = VarMap::new();
                let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
                let (config, mode) = (NormConfig::small(norm), Mode::train());
                let model = Transformer::new(size(VOCAB), &config, &mode, vb)?;
                init_weights(&varmap, &mut generator(5, Use::Weights, 0))?;
                let vars = variables(&varmap);
                let mut batch = Batch::new(&pairs, &Device::Cpu).unwrap();
                let sources = pairs.each_ref().map(|pair| &*pair.source);
                batch.sources = Sources::padded(&sources, 4 + padding, &Device::Cpu).unwrap();
                if poison {
                    let table = vars["tokens.weight"].as_detached_tensor();
                    let nan = (table.narrow(0, PAD as usize, 1)?.ones_like()? * f64::NAN)?;
                    vars["tokens.weight"]
                        .set(&Tensor::cat(&[&nan, &table.narrow(0, 1, VOCAB - 1)?], 0)?)?;
                }
                let memory = model.encode(&batch.sources, &Dropout::none())?;
                let hidden = model.decode(&batch.inputs, &memory, &Dropout::none())?;
                let weights = Tensor::arange(0f32, 32., &Device::Cpu)?.reshape(hidden.shape())?;
                let store = (hidden * weights)?.sum_all()?.backward()?;
                let gradient = store.get(&vars["encoder.0.mlp.expand.weight"]);
                let gradient = gradient.unwrap().flatten_all()?.to_vec1()?;
                let buffers = vars.iter().filter(|(name, var)| {
                    is_buffer(name) && !name.ends_with("iters") && var.dtype().is_float()
                });
                let buffers = buffers.map(|(_, var)| var.flatten_all()?.to_vec1());
                Ok((gradient, buffers.collect::<Result<_>>()?))
            };
            let (gradient, buffers) = step(false, 0)?;
            for (poison, padding) in [(false, 3), (true, 0), (true, 3)] {
                let (other_gradient, other_buffers) = step(poison, padding)?;
                // There and back.
                assert_close(&other_gradient, &gradient, 2 * FORWARD, norm);
                for (other, buffer) in other_buffers.iter().zip(&buffers) {
                    // A mean may be near 0, of values of about 1.
                    let bound = bound(2 * FORWARD, largest(buffer).max(1.));
                    for (other, value) in other.iter().zip(buffer) {
                        let close = (other - value).abs() <= bound;
                        assert!(close, "{norm}: {other} and {value}");
                    }
                }
            }
        }
        Ok(())
    }

    /// By hand: logits 0, ln 2 and ln 5 have the probabilities 1/8, 2/8 and 5/8.
    #[test]
    fn smoothing_gives_each_token_a_share() -> Result<()> {
        let logits = Tensor::new(&[[0f32, 2f32.ln(), 5f32.ln()]], &Device::Cpu)?;
        let targets = Tensor::new(&[2u32], &Device::Cpu)?;
        let identity = Tensor::eye(3, DType::F32, &Device::Cpu)?;
        let mean = -(0.125f64.ln() + 0.25f64.ln() + 0.625f64.ln()) / 3.;
        let smoothed = 0.9 * -(0.625f64.ln()) + 0.1 * mean;
        // A dozen roundings, of values of at most ln 10.
        let bound = 12. * f64::from(f32::EPSILON) * 10f64.ln();
        for (smoothing, expected) in [(0.1, smoothed), (0., -(0.625f64.ln()))] {
            let value = cross_entropy(&logits, &identity, &targets, smoothing, |_| Ok(()))?;
            let value = f64::from(value.to_scalar::<f32>()?);
            assert!((value - expected).abs() <= bound, "{value} and {expected}");
        }
        Ok(())
    }

    #[test]
    fn the_objective_has_the_gradient_that_autograd_finds() -> Result<()> {
        // More rows than one stretch has.
        let (count, vocab, width) = (ROWS + 9, 7, 3);
        let mut rng = generator(1, Use::Weights, 0);
        let mut random = |rows| -> Result<Var> {
            let values: Vec<f32> = (0..rows * width)
                .map(|_| rng.random_range(-1f32..1.))
                .collect();
            Var::from_vec(values, (rows, width), &Device::Cpu)
        };
        let (hidden, embedding) = (random(count)?, random(vocab)?);
        let targets: Vec<u32> = (0..count).map(|i| (i * i % vocab) as u32).collect();
        let targets = Tensor::new(targets, &Device::Cpu)?;

        let log = candle_nn::ops::log_softmax(&hidden.matmul(&embedding.t()?)?, 1)?;
        let plain = log.gather(&targets.unsqueeze(1)?, 1)?.sum_all()?.neg()?;
        let uniform = (log.sum_all()?.neg()? / vocab as f64)?;
        let smoothed = ((&plain * 0.8)? + (uniform * 0.2)?)?;

        let objective = Objective::new(&hidden, &embedding, &targets, 0.2)?;
        let alone = cross_entropy(&hidden, &embedding, &targets, 0., |_| Ok(()))?;
        let scalar = |tensor: &Tensor| tensor.to_scalar::<f32>();
        // A logit's, a softmax's, all rows'.
        let terms = width + vocab + count;
        assert_close(&[scalar(&alone)?], &[scalar(&plain)?], terms, "plain");
        let [ours, theirs] = [&objective.loss, &smoothed].map(scalar);
        assert_close(&[ours?], &[theirs?], terms, "smoothed");
        let (ours, theirs) = (objective.gradient.backward()?, smoothed.backward()?);
        for var in [&hidden, &embedding] {
            let [ours, theirs] =
                [&ours, &theirs].map(|store| store.get(var).unwrap().flatten_all());
            assert_close(&ours?.to_vec1()?, &theirs?.to_vec1()?, terms, "gradient");
        }
        Ok(())
    }
}
