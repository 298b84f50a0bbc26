//! A decoder-only transformer: pre-norm blocks, learned positions, dropout on embeddings and
//! branches, no bias in the linear layers, the embedding tied to the output.

use super::causal_mask;
use super::checkpoint::variables;
use super::norm::{NormConfig, NormLayer};
use super::random::Dropout;
use candle::{D, Module, Result, Tensor};
use candle_nn::{Embedding, Init, Linear, VarBuilder, VarMap, embedding, linear_no_bias, ops};
use candle_powernorm::Mode;
use rand::{Rng, rngs::StdRng};
use rand_distr::Normal;

/// The model that `study` trains, which is nanoGPT's for a CPU.
pub const LAYERS: usize = 4;
pub const HEADS: usize = 4;
pub const WIDTH: usize = 128;
pub const CONTEXT: usize = 64;

/// The sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    pub layers: usize,
    pub heads: usize,
    pub width: usize,
    pub context: usize,
    pub vocab: usize,
}

impl Size {
    /// The sizes of the model that `study` trains.
    pub fn small(vocab: usize) -> Self {
        Self {
            layers: LAYERS,
            heads: HEADS,
            width: WIDTH,
            context: CONTEXT,
            vocab,
        }
    }
}

/// The transformer. `forward` takes tokens `[batch, time]` and gives logits `[batch, time, vocab]`.
pub struct Gpt {
    tokens: Embedding,
    positions: Tensor,
    /// A number that the embeddings are multiplied by, if pointwise functions take the place of
    /// normalizations. It is sqrt(width) at first, as in the Llama of DyT's authors. Without it
    /// what is as small as the embeddings, 0.02, stays small, and the model hardly learns.
    scale: Option<Tensor>,
    /// The embeddings' mean over the channels is subtracted from them.
    centred: bool,
    blocks: Vec<Block>,
    norm: NormLayer,
    /// On the variable of `tokens`.
    output: Linear,
    mask: Tensor,
    context: usize,
}

impl Gpt {
    /// Every normalization of the model follows `mode`.
    pub fn new(size: Size, norm: &NormConfig, mode: &Mode, vb: VarBuilder) -> Result<Self> {
        let Size { width, context, .. } = size;
        let blocks = (0..size.layers)
            .map(|i| Block::new(&size, norm, mode, vb.pp(format!("blocks.{i}"))))
            .collect::<Result<_>>()?;
        let tokens = embedding(size.vocab, width, vb.pp("tokens"))?;
        let at_first = Init::Const((width as f64).sqrt());
        let scale = || vb.get_with_hints(1, "scale", at_first);
        Ok(Self {
            scale: norm.norm.is_pointwise().then(scale).transpose()?,
            output: Linear::new(tokens.embeddings().clone(), None),
            tokens,
            centred: false,
            positions: vb.get((context, width), "positions.weight")?,
            blocks,
            norm: NormLayer::new(width, norm, mode, vb.pp("norm"))?,
            mask: causal_mask(context, vb.device())?,
            context,
        })
    }

    /// The same model, in which the mean of each embedding is subtracted from it.
    ///
    /// LayerNorm removes that mean wherever it reads the residual stream, so a model that was
    /// trained with it can leave it out. It cannot be subtracted from the embedding's weights,
    /// because they are the output's weights too.
    pub fn with_centred_embeddings(self) -> Self {
        Self {
            centred: true,
            ..self
        }
    }

    pub fn forward(&self, tokens: &Tensor, dropout: &Dropout) -> Result<Tensor> {
        self.forward_seen(tokens, dropout, |_| ())
    }

    /// [`forward`](Self::forward), in which `see` gets the residual stream that each normalization
    /// reads, in the order of [`norm_names`].
    pub fn forward_seen(
        &self,
        tokens: &Tensor,
        dropout: &Dropout,
        mut see: impl FnMut(&Tensor),
    ) -> Result<Tensor> {
        let (_, time) = tokens.dims2()?;
        if time > self.context {
            candle::bail!("{time} tokens, the context is {}", self.context)
        }
        let mask = self.mask.narrow(0, 0, time)?.narrow(1, 0, time)?;
        let positions = self.positions.narrow(0, 0, time)?;
        let mut embedded = self.tokens.forward(tokens)?.broadcast_add(&positions)?;
        if let Some(scale) = &self.scale {
            embedded = embedded.broadcast_mul(scale)?;
        }
        if self.centred {
            embedded = embedded.broadcast_sub(&embedded.mean_keepdim(D::Minus1)?)?;
        }
        let mut stream = dropout.forward(&embedded)?;
        see(&stream);
        let mut xs = self.first_norm(0).forward(&stream)?;
        for (i, block) in self.blocks.iter().enumerate() {
            let branch = dropout.forward(&block.attention.forward(&xs, &mask)?)?;
            (xs, stream) = block.norm_2.forward_residual(&branch, &stream)?;
            see(&stream);
            let branch = dropout.forward(&block.mlp(&xs)?)?;
            (xs, stream) = self.first_norm(i + 1).forward_residual(&branch, &stream)?;
            see(&stream);
        }
        self.output.forward(&xs)
    }

    /// The model without normalizations, for inference: the linear layers behind each do its work.
    /// `None` if a normalization does not fold.
    pub fn folded(&self) -> Result<Option<Self>> {
        if !self.norm.folds() {
            return Ok(None);
        }
        let blocks = self.blocks.iter().map(Block::folded);
        Ok(Some(Self {
            tokens: self.tokens.clone(),
            scale: self.scale.clone(),
            centred: self.centred,
            positions: self.positions.clone(),
            blocks: blocks.collect::<Result<_>>()?,
            norm: NormLayer::Folded,
            output: self.norm.fold_into(&self.output)?,
            mask: self.mask.clone(),
            context: self.context,
        }))
    }

    /// The normalizations, in the order of [`norm_names`].
    pub fn norms(&self) -> Vec<&NormLayer> {
        let blocks = self.blocks.iter();
        let blocks = blocks.flat_map(|block| [&block.norm_1, &block.norm_2]);
        blocks.chain([&self.norm]).collect()
    }

    /// The normalization of the residual stream before block `i`, or of the output.
    fn first_norm(&self, i: usize) -> &NormLayer {
        self.blocks.get(i).map_or(&self.norm, |block| &block.norm_1)
    }
}

/// The names of a model's normalizations, in the order in which the residual stream meets them.
pub fn norm_names(layers: usize) -> Vec<String> {
    let of_block = |i| [1, 2].map(|n| format!("blocks.{i}.norm_{n}"));
    let blocks = (0..layers).flat_map(of_block);
    blocks.chain(["norm".to_string()]).collect()
}

struct Block {
    norm_1: NormLayer,
    attention: Attention,
    norm_2: NormLayer,
    expand: Linear,
    project: Linear,
}

impl Block {
    fn new(size: &Size, norm: &NormConfig, mode: &Mode, vb: VarBuilder) -> Result<Self> {
        let width = size.width;
        Ok(Self {
            norm_1: NormLayer::new(width, norm, mode, vb.pp("norm_1"))?,
            attention: Attention::new(width, size.heads, vb.pp("attention"))?,
            norm_2: NormLayer::new(width, norm, mode, vb.pp("norm_2"))?,
            expand: linear_no_bias(width, 4 * width, vb.pp("mlp.expand"))?,
            project: linear_no_bias(4 * width, width, vb.pp("mlp.project"))?,
        })
    }

    fn folded(&self) -> Result<Self> {
        let Attention { heads, .. } = self.attention;
        let into = |linear| self.norm_1.fold_into(linear);
        Ok(Self {
            norm_1: NormLayer::Folded,
            attention: Attention {
                query: into(&self.attention.query)?,
                key: into(&self.attention.key)?,
                value: into(&self.attention.value)?,
                project: self.attention.project.clone(),
                heads,
            },
            norm_2: NormLayer::Folded,
            expand: self.norm_2.fold_into(&self.expand)?,
            project: self.project.clone(),
        })
    }

    fn mlp(&self, xs: &Tensor) -> Result<Tensor> {
        self.project.forward(&self.expand.forward(xs)?.gelu_erf()?)
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
    fn new(width: usize, heads: usize, vb: VarBuilder) -> Result<Self> {
        let linear = |name| linear_no_bias(width, width, vb.pp(name));
        Ok(Self {
            query: linear("query")?,
            key: linear("key")?,
            value: linear("value")?,
            project: linear("project")?,
            heads,
        })
    }

    fn forward(&self, xs: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (batch, time, width) = xs.dims3()?;
        let head = width / self.heads;
        let heads = |linear: &Linear| {
            linear
                .forward(xs)?
                .reshape((batch, time, self.heads, head))?
                .transpose(1, 2)?
                .contiguous()
        };
        // Scaling the query is the same as scaling the scores, which are more.
        let query = (heads(&self.query)? * (head as f64).powf(-0.5))?;
        let scores = query.matmul(&heads(&self.key)?.t()?)?.broadcast_add(mask)?;
        // Not `softmax_last_dim`: it records no backward.
        let weights = ops::softmax(&scores, D::Minus1)?;
        let mixed = weights.matmul(&heads(&self.value)?)?;
        self.project
            .forward(&mixed.transpose(1, 2)?.reshape((batch, time, width))?)
    }
}

/// Draws every matrix of `varmap` from `rng`: a normal distribution of standard deviation 0.02,
/// divided by sqrt(2 · layers) where a matrix writes to the residual stream, as in GPT-2.
///
/// candle's own generator cannot be seeded on a CPU, so the values that the layers were built with
/// are replaced. Matrices are visited by name, and normalizations have none: a seed means the same
/// start whatever the normalization.
pub fn init_weights(varmap: &VarMap, layers: usize, rng: &mut StdRng) -> Result<()> {
    for (name, var) in variables(varmap) {
        if var.rank() != 2 {
            continue;
        }
        let residual = name.ends_with("project.weight");
        let std = if residual {
            0.02 / (2. * layers as f32).sqrt()
        } else {
            0.02
        };
        let normal = Normal::new(0f32, std).map_err(candle::Error::wrap)?;
        let values: Vec<f32> = rng.sample_iter(normal).take(var.elem_count()).collect();
        var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::norm::Norm;
    use super::*;
    use candle::{DType, Device};
    use clap::ValueEnum;

    /// [`init_weights`] leaves the scale as it is, because it is no matrix.
    #[test]
    fn only_models_of_pointwise_functions_scale_their_embeddings() -> Result<()> {
        for &norm in Norm::value_variants() {
            let varmap = VarMap::new();
            let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
            let config = NormConfig {
                norm,
                groups: None,
                warmup_steps: 0,
                group_norm_groups: 4,
                momentum: 0.1,
            };
            Gpt::new(Size::small(5), &config, &Mode::train(), vb)?;
            init_weights(&varmap, LAYERS, &mut rand::SeedableRng::seed_from_u64(1))?;
            let scale = variables(&varmap)
                .get("scale")
                .map(|var| var.to_vec1::<f32>());
            let expected = norm.is_pointwise().then(|| vec![(WIDTH as f32).sqrt()]);
            assert_eq!(scale.transpose()?, expected, "{norm}");
        }
        Ok(())
    }
}
