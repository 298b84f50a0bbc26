// A Mamba language model in few operations: each block is a causal convolution and a selective scan
// (Gu and Dao, "Mamba", 2023, Algorithm 2) in a pre-norm residual. It is compiled three times, and
// `norms` is candle_nn, this crate or its slow form.
//
// The model predicts the token after the last one. So its last normalization reads a view, in which
// the rows are apart, and there candle's RmsNorm takes a form that records a backward. In the blocks
// it does not: the gradient then passes through the residual alone.

use self::norms::{rms_norm, RmsNorm};
use candle::{Module, Result, Tensor, D};
use candle_nn::{embedding, linear_no_bias, ops::silu};
use candle_nn::{Embedding, Init, Linear, VarBuilder};

/// Numbers that each inner channel remembers.
const STATE: usize = 4;
/// Of the convolution.
const TAPS: usize = 4;
/// Inner dimension of the matrix product that makes the steps.
const RANK: usize = 2;

struct Block {
    norm: RmsNorm,
    in_proj: Linear,
    taps: Tensor,
    taps_bias: Tensor,
    x_proj: Linear,
    dt_proj: Linear,
    a_log: Tensor,
    skip: Tensor,
    out_proj: Linear,
}

impl Block {
    fn load(width: usize, vb: VarBuilder) -> Result<Self> {
        let inner = 2 * width;
        let uniform = |up: f64| Init::Uniform { lo: -up, up };
        let mixer = vb.pp("mixer");
        Ok(Self {
            norm: rms_norm(width, 1e-5, vb.pp("norm"))?,
            in_proj: linear_no_bias(width, 2 * inner, mixer.pp("in_proj"))?,
            taps: mixer.get_with_hints((TAPS, inner), "conv1d.weight", uniform(0.5))?,
            taps_bias: mixer.get_with_hints(inner, "conv1d.bias", Init::Const(0.))?,
            x_proj: linear_no_bias(inner, RANK + 2 * STATE, mixer.pp("x_proj"))?,
            dt_proj: Linear::new(
                mixer.get_with_hints((inner, RANK), "dt_proj.weight", uniform(0.7))?,
                Some(mixer.get_with_hints(inner, "dt_proj.bias", Init::Const(0.))?),
            ),
            a_log: mixer.get_with_hints((inner, STATE), "A_log", uniform(1.))?,
            skip: mixer.get_with_hints(inner, "D", Init::Const(1.))?,
            out_proj: linear_no_bias(inner, width, mixer.pp("out_proj"))?,
        })
    }

    /// Sums each position's neighbours before it and itself, weighted per channel.
    fn convolve(&self, xs: &Tensor) -> Result<Tensor> {
        let time = xs.dim(1)?;
        let padded = xs.pad_with_zeros(1, TAPS - 1, 0)?;
        let mut sum = self.taps_bias.broadcast_as(xs.shape())?;
        for tap in 0..TAPS {
            let shifted = padded.narrow(1, tap, time)?;
            sum = (sum + shifted.broadcast_mul(&self.taps.get(tap)?)?)?;
        }
        Ok(sum)
    }

    /// h ← exp(Δ a) h + Δ b x for each position, and c · h as its output.
    fn scan(&self, xs: &Tensor) -> Result<Tensor> {
        let (batch, time, inner) = xs.dims3()?;
        let of_xs = self.x_proj.forward(xs)?;
        let part = |start, len| of_xs.narrow(2, start, len);
        let delta = self.dt_proj.forward(&part(0, RANK)?)?;
        let delta = (delta.exp()? + 1.)?.log()?.unsqueeze(3)?; // softplus
        let b = part(RANK, STATE)?.unsqueeze(2)?;
        let c = part(RANK + STATE, STATE)?.unsqueeze(2)?;
        let decay = delta.broadcast_mul(&self.a_log.exp()?.neg()?)?.exp()?;
        let input = delta.broadcast_mul(&b)?.broadcast_mul(&xs.unsqueeze(3)?)?;
        let mut state = Tensor::zeros((batch, inner, STATE), xs.dtype(), xs.device())?;
        let mut outputs = vec![];
        for i in 0..time {
            let at = |of: &Tensor| of.narrow(1, i, 1)?.squeeze(1);
            state = ((at(&decay)? * state)? + at(&input)?)?;
            outputs.push(state.broadcast_mul(&at(&c)?)?.sum(D::Minus1)?);
        }
        Tensor::stack(&outputs, 1)? + xs.broadcast_mul(&self.skip)?
    }
}

impl Module for Block {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let both = self.in_proj.forward(&self.norm.forward(xs)?)?;
        let inner = both.dim(2)? / 2;
        let ys = silu(&self.convolve(&both.narrow(2, 0, inner)?)?)?;
        let gate = silu(&both.narrow(2, inner, inner)?.contiguous()?)?;
        xs + self.out_proj.forward(&(self.scan(&ys)? * gate)?)?
    }
}

pub struct Model {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
}

impl Model {
    pub fn load(vocab: usize, blocks: usize, width: usize, vb: VarBuilder) -> Result<Self> {
        let block = |i| Block::load(width, vb.pp("layers").pp(i));
        Ok(Self {
            embedding: embedding(vocab, width, vb.pp("embedding"))?,
            blocks: (0..blocks).map(block).collect::<Result<_>>()?,
            norm: rms_norm(width, 1e-5, vb.pp("norm_f"))?,
        })
    }

    /// The logits of the token after the last one, `[batch, 1, vocab]`.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut xs = self.embedding.forward(ids)?;
        for block in &self.blocks {
            xs = block.forward(&xs)?;
        }
        let last = xs.narrow(1, ids.dim(1)? - 1, 1)?;
        let head = Linear::new(self.embedding.embeddings().clone(), None);
        head.forward(&self.norm.forward(&last)?)
    }
}
