//! The layer among others: optimizers, a transformer, frozen parameters, inputs nobody tracks.

use crate::common::*;
use candle::{D, DType, Module, Result, Tensor, Var};
use candle_nn::{AdamW, Linear, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap};
use candle_powernorm::{PowerNorm, PowerNormConfig, power_norm};

const BUFFERS: [&str; 4] = ["running_phi", "ema_gz", "iters", "groups"];

#[test]
fn optimizers_leave_the_buffers_alone() {
    // A decay that would show in one step.
    leaves_the_buffers_alone::<AdamW>(ParamsAdamW {
        lr: 0.1,
        weight_decay: 0.5,
        ..ParamsAdamW::default()
    });
    leaves_the_buffers_alone::<SGD>(0.1);
}

fn leaves_the_buffers_alone<O: Optimizer>(config: O::Config) {
    let (layer, varmap) = layer(8, 1e-5.into(), DType::F32);
    let mut optimizer = O::new(varmap.all_vars(), config).unwrap();
    let mut data = Data::new(1);
    for _ in 0..3 {
        let batch = Batch::random(&mut data, &[5, 8], DType::F32, false);
        let grads = backward(&layer.forward(&batch.xs).unwrap(), &batch.dy);
        for name in BUFFERS {
            assert!(grads.get(&var(&varmap, name)).is_none(), "{name}");
        }
        let buffers = || BUFFERS.map(|name| bits(&var(&varmap, name)));
        let (before, weight) = (buffers(), bits(layer.weight().unwrap()));
        assert_ne!(before[1], [0; 8], "ν to decay");
        optimizer.step(&grads).unwrap();
        assert_eq!(buffers(), before);
        assert_ne!(bits(layer.weight().unwrap()), weight);
    }
}

/// A pre-norm transformer block of candle's own layers, with two heads.
struct Block {
    norms: [PowerNorm; 2],
    queries: Linear,
    keys: Linear,
    values: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    const HEADS: usize = 2;

    fn new(width: usize, config: PowerNormConfig, vb: VarBuilder) -> Result<Self> {
        let linear = |a, b, name: &str| candle_nn::linear(a, b, vb.pp(name));
        Ok(Self {
            norms: [
                power_norm(width, config, vb.pp("norm_attention"))?,
                power_norm(width, config, vb.pp("norm_mlp"))?,
            ],
            queries: linear(width, width, "queries")?,
            // A bias of the keys shifts all scores of a query alike: softmax does not see it.
            keys: candle_nn::linear_no_bias(width, width, vb.pp("keys"))?,
            values: linear(width, width, "values")?,
            out: linear(width, width, "out")?,
            up: linear(width, 2 * width, "up")?,
            down: linear(2 * width, width, "down")?,
        })
    }
}

impl Module for Block {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let (batch, tokens, width) = xs.dims3()?;
        let heads = |ys: Tensor| {
            ys.reshape((batch, tokens, Self::HEADS, width / Self::HEADS))?
                .transpose(1, 2)?
                .contiguous()
        };
        let ys = self.norms[0].forward(xs)?;
        let queries = heads(self.queries.forward(&ys)?)?;
        let keys = heads(self.keys.forward(&ys)?)?;
        let values = heads(self.values.forward(&ys)?)?;
        let scores = queries.matmul(&keys.t()?)?;
        let mixed = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&values)?;
        let mixed = mixed.transpose(1, 2)?.reshape(xs.shape())?;
        let xs = (xs + self.out.forward(&mixed)?)?;
        let ys = self.up.forward(&self.norms[1].forward(&xs)?)?;
        xs + self.down.forward(&ys.gelu()?)?
    }
}

/// candle's own LayerNorm fails this: its fused path records no backward, so that everything
/// upstream of it stops training without a word.
#[test]
fn every_parameter_of_a_transformer_gets_a_gradient() {
    for warmup_steps in [100, 0] {
        let config = 1e-5
            .with_groups(Some(Block::HEADS))
            .with_warm_up(warmup_steps);
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
        let (vocabulary, width) = (11, 8);
        let embedding = candle_nn::embedding(vocabulary, width, vb.pp("embedding")).unwrap();
        let blocks = [0, 1].map(|i| Block::new(width, config, vb.pp(i)).unwrap());
        let last = power_norm(width, config, vb.pp("norm")).unwrap();
        let head = candle_nn::linear(width, vocabulary, vb.pp("head")).unwrap();

        let ids = |map: fn(u32) -> u32| {
            Tensor::from_vec((0..22).map(map).collect(), (2, 11), &CPU).unwrap()
        };
        let (tokens, targets) = (ids(|i| i % 11), ids(|i| (7 * i + 3) % 11));
        let mut xs = embedding.forward(&tokens).unwrap();
        for block in &blocks {
            xs = block.forward(&xs).unwrap();
        }
        let logits = head.forward(&last.forward(&xs).unwrap()).unwrap();
        let logits = logits.flatten_to(1).unwrap();
        let targets = targets.flatten_all().unwrap();
        let loss = candle_nn::loss::cross_entropy(&logits, &targets).unwrap();
        let grads = loss.backward().unwrap();
        let mut parameters = 0;
        for (name, var) in varmap.data().lock().unwrap().iter() {
            if BUFFERS.iter().any(|buffer| name.ends_with(buffer)) {
                assert!(grads.get(var).is_none(), "{name} is no parameter");
                continue;
            }
            parameters += 1;
            let grad = grads.get(var);
            let grad = grad.unwrap_or_else(|| panic!("{name} gets no gradient"));
            assert!(to_f64(grad).iter().any(|&g| g != 0.), "{name} gets zeros");
            assert_finite(name, grad);
        }
        // The embedding, the head, two blocks of 11 tensors and two norms, and the last norm.
        assert_eq!(parameters, 1 + 2 + 2 * (11 + 4) + 2);
    }
}

/// Frozen parameters get no gradient, and neither does data; all else gets the same as ever.
#[test]
fn frozen_parameters_get_no_gradient() {
    let mut data = Data::new(2);
    let twin = Twin::new(&mut data, 8, 1e-5.into(), DType::F64);
    let batch = Batch::random(&mut data, &[6, 8], DType::F64, false);
    let expected = run(&twin.layer, &batch, true);
    let expected = expected.tensors();
    let given = |var: Var, trainable: bool| match trainable {
        true => var.into_inner(),
        false => var.as_detached_tensor(),
    };
    for trainable in [[false, false], [true, false], [false, true], [true, true]] {
        let weight = given(var(&twin.varmap, "weight"), trainable[0]);
        let bias = given(var(&twin.varmap, "bias"), trainable[1]);
        let layer = layer_of([&weight, &bias]);
        for tracked in [true, false] {
            let xs = given(Var::from_tensor(&batch.xs).unwrap(), tracked);
            layer.reset_running_stats().unwrap();
            let y = layer.forward_t(&xs, true).unwrap();
            let has_backward = tracked || trainable.contains(&true);
            assert_eq!(y.track_op(), has_backward);
            let grads = backward(&y, &batch.dy);
            let gradients = [
                (None, &y),
                (Some(tracked), &xs),
                (Some(trainable[0]), &weight),
                (Some(trainable[1]), &bias),
            ];
            for ((tracked, tensor), (name, expected)) in gradients.into_iter().zip(&expected) {
                let actual = match tracked {
                    None => Some(tensor),
                    Some(tracked) => {
                        let grad = grads.get(tensor);
                        assert_eq!(grad.is_some(), tracked, "{name}, {trainable:?}");
                        grad
                    }
                };
                if let Some(actual) = actual {
                    assert_same_bits(name, actual, expected);
                }
            }
            let (phi, nu, _) = state(&twin.layer);
            let nu = if has_backward { nu } else { vec![0; 8] };
            assert_eq!(state(&layer), (phi, nu, 1), "{trainable:?}, {tracked}");
        }
    }
}
