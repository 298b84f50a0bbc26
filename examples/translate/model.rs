//! A pre-norm transformer, encoder and decoder: sinusoidal positions, dropout on embeddings and branches, one embedding for
//! both languages and for the output.

use crate::common::checkpoint::variables;
use crate::common::norm::{Norm, NormConfig, NormLayer};
use crate::data::{Batch, Sources};
use candle::{Device, Module, Result, Tensor, D};
use candle_nn::{embedding, linear, Embedding, Linear, VarBuilder, VarMap};
use candle_powernorm::Mode;
use rand::{rngs::StdRng, Rng};
use rand_distr::Normal;
use std::cell::RefCell;

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

/// Zeroes a share of the elements, in training. candle's own draws from a generator that cannot be seeded on a CPU.
pub struct Dropout(Option<(f64, RefCell<StdRng>)>);

impl Dropout {
    pub fn new(share: f64, rng: StdRng) -> Self {
        Self((share > 0.).then(|| (share, RefCell::new(rng))))
    }

    /// For evaluation.
    pub fn none() -> Self {
        Self(None)
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let Some((share, rng)) = &self.0 else {
            return Ok(xs.clone());
        };
        // 16 random bits an element: a share in 65536ths.
        let mut random = vec![0u16; xs.elem_count()];
        rng.borrow_mut().fill(&mut random[..]);
        let dropped = (share * 65536.) as u16;
        let scale = 65536. / (65536. - f32::from(dropped));
        let factors: Vec<f32> = (random.into_iter())
            .map(|bits| if bits < dropped { 0. } else { scale })
            .collect();
        xs * Tensor::from_vec(factors, xs.shape(), xs.device())?
    }
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

/// What the decoder knows of the source sentences.
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
    /// The encoder's normalizations are `norm` and follow `mode`; the decoder's are LayerNorm, as in the paper.
    pub fn new(size: Size, norm: &NormConfig, mode: &Mode, vb: VarBuilder) -> Result<Self> {
        let width = size.width;
        let layer_norm = NormConfig {
            norm: Norm::Layer,
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

    /// The logits of a batch's targets, `[count, vocab]`.
    pub fn forward(&self, batch: &Batch, dropout: &Dropout) -> Result<Tensor> {
        let memory = self.encode(&batch.sources, dropout)?;
        let hidden = self
            .decode(&batch.inputs, &memory, dropout)?
            .flatten_to(1)?;
        self.logits(&hidden.index_select(&batch.places, 0)?)
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
        // The embedding is the output's too, and that small: scaled, it is as large as the positions.
        let embedded = (self.tokens.forward(tokens)? * (self.width as f64).sqrt())?;
        embedded.broadcast_add(&positions(tokens.dim(1)?, self.width, tokens.device())?)
    }

    /// What normalizes the residual stream where block `i` takes it up, or the output.
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

/// 0 where a position may look, minus infinity where it would see the future.
fn causal_mask(time: usize, device: &Device) -> Result<Tensor> {
    let mask: Vec<f32> = (0..time * time)
        .map(|i| {
            if i % time > i / time {
                f32::NEG_INFINITY
            } else {
                0.
            }
        })
        .collect();
    Tensor::from_vec(mask, (1, 1, time, time), device)
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

/// Not `softmax_last_dim`, which records no backward; nor `softmax`, whose backward goes through the maximum, which
/// changes nothing.
fn softmax(xs: &Tensor) -> Result<Tensor> {
    let exp = xs
        .broadcast_sub(&xs.detach().max_keepdim(D::Minus1)?)?
        .exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

/// Draws every matrix of `varmap` from `rng`, and zeroes the biases of linear layers: matrices by Glorot's normal
/// distribution, the embedding so that logits start at about 1.
///
/// candle's own generator cannot be seeded on a CPU, so the values that the layers were built with are replaced.
/// Variables are visited by name, and normalizations have no matrices: a seed means the same start whatever the
/// normalization.
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

/// The sum over `targets` of the cross entropy of `logits`, `[count, vocab]`: with label smoothing, where the target
/// has all but `smoothing` of the probability and each token an equal share of that; and, without a gradient, as it is.
pub fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let max = logits.detach().max_keepdim(1)?;
    let shifted = logits.broadcast_sub(&max)?;
    let log_sum = shifted.exp()?.sum(1)?.log()?.sum_all()?;
    let of_target = shifted.gather(&targets.unsqueeze(1)?, 1)?.sum_all()?;
    let plain = (&log_sum - &of_target)?.detach();
    let mean = (shifted.sum_all()? / logits.dim(1)? as f64)?;
    let smoothed = ((log_sum - (of_target * (1. - smoothing))?)? - (mean * smoothing)?)?;
    Ok((smoothed, plain))
}
