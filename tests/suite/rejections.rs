//! What layers and functions say of arguments that do not fit: each text once, and every call that
//! gives it. What only PowerNorm rejects is in `layer.rs`: its settings, its state, masks. Folds are
//! in `fold.rs`, and functions that do not normalize in `fused.rs`.

use super::layer::trained;
use crate::common::*;
use DType::{BF16, F16, F32, F64, I64, U8, U32};
use candle::{DType, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::{
    GroupScaling, LayerNorm, PowerNorm, RmsNorm, layer_norm, layer_norm_1p, layer_norm_no_bias,
    ops, power_norm, rms_norm, rms_norm_1p,
};
use std::collections::HashMap;

fn ones(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::ones(shape, dtype, &CPU).unwrap()
}

/// The name of a layer or function, and a call of it.
type Call<'a, A> = (&'static str, Box<dyn Fn(&A) -> Result<()> + 'a>);

fn call<'a, A, T>(name: &'static str, call: impl Fn(&A) -> Result<T> + 'a) -> Call<'a, A> {
    (name, Box::new(move |argument| call(argument).map(drop)))
}

/// All calls reject `argument` with `text`.
#[track_caller]
fn all_reject<A>(calls: &[Call<A>], argument: &A, text: &str) {
    for (name, call) in calls {
        rejected_by(name, call(argument), text);
    }
}

/// Every call of layers of eight channels that takes an input. One that PowerNorm rejects leaves its
/// state as it was.
fn calls(parameters: DType) -> Vec<Call<'static, Tensor>> {
    let one = || ones(&[8], parameters);
    let layer = || LayerNorm::new(one(), one(), 1e-5);
    let rms = || RmsNorm::new(one(), 1e-5);
    let (first, second, third) = (layer(), layer(), rms().into_inner());
    let (fourth, fifth, sixth) = (rms(), rms(), rms());
    let mut calls = vec![
        call("layer_norm", move |xs| first.forward(xs)),
        call("layer_norm", move |xs| second.forward_residual(xs, xs)),
        call("layer_norm", move |xs| third.forward(xs)),
        call("rms_norm", move |xs| fourth.forward(xs)),
        call("rms_norm", move |xs| fifth.forward_diff(xs)),
        call("rms_norm", move |xs| sixth.forward_residual(xs, xs)),
    ];
    let forwards: [fn(&PowerNorm, &Tensor) -> Result<Tensor>; 5] = [
        |layer, xs| layer.forward_t(xs, true),
        |layer, xs| layer.forward_t(xs, false),
        |layer, xs| layer.forward(xs),
        |layer, xs| layer.forward_masked(xs, &ones(&[xs.elem_count() / 8], U8)),
        |layer, xs| Ok(layer.forward_residual(xs, xs, None)?.0),
    ];
    for forward in forwards {
        for train in [true, false] {
            let (layer, _) = trained(8, parameters);
            layer.mode().set_training(train);
            calls.push(call("power_norm", move |xs| {
                let before = state(&layer);
                let result = forward(&layer, xs);
                assert_eq!(state(&layer), before);
                result
            }));
        }
    }
    calls
}

#[test]
fn inputs() {
    const SCALAR: &str =
        "an input of rank 1 or more, got a scalar: give it a last dimension of channels";
    let dtype = |dtype: DType| {
        format!("an input of dtype F32, F64, F16 or BF16, got {dtype:?}: convert it by `to_dtype`")
    };
    let calls = calls(F32);
    all_reject(&calls, &ones(&[], F32), SCALAR);
    for shape in [&[8, 7][..], &[2, 9], &[16]] {
        let text = format!(
            "a last dimension of 8, got shape {shape:?}: \
             move the channels last, or build a layer of another size"
        );
        all_reject(&calls, &ones(shape, F32), &text);
    }
    for got in [U8, U32, I64] {
        all_reject(&calls, &ones(&[5, 8], got), &dtype(got));
    }

    let scaling = [call("group_scaling", |xs| {
        GroupScaling::new(5, 1e-5)?.forward(xs)
    })];
    all_reject(&scaling, &ones(&[], F32), SCALAR);
    all_reject(&scaling, &ones(&[2, 5], U32), &dtype(U32));
    all_reject(&scaling, &ones(&[2, 0], F32), "a size of at least 1, got 0");
    let text = "5 groups to divide the 12 channels of the input: choose another number of groups";
    all_reject(&scaling, &ones(&[2, 12], F32), text);
}

#[test]
fn inputs_of_no_rows_fit() -> Result<()> {
    let weight = ones(&[8], F32);
    let xs = ones(&[0, 8], F32);
    let layer = LayerNorm::new(weight.clone(), weight.clone(), 1e-5);
    assert_eq!(layer.forward(&xs)?.dims(), [0, 8]);
    assert_eq!(RmsNorm::new(weight, 1e-5).forward(&xs)?.dims(), [0, 8]);
    assert_eq!(GroupScaling::new(4, 1e-5)?.forward(&xs)?.dims(), [0, 8]);
    assert_eq!(trained(8, F32).0.forward(&xs)?.dims(), [0, 8]);
    Ok(())
}

#[test]
fn inputs_of_another_dtype_than_the_parameters() {
    for (parameters, input) in [(F16, F32), (BF16, F16), (F64, F32), (F16, F64)] {
        let or_f32 = if input == F32 { "" } else { " or F32" };
        let text = format!(
            "weight of dtype {input:?} (as the input){or_f32}, got {parameters:?}: \
             convert the input to {parameters:?}, or the parameters to F32"
        );
        all_reject(&calls(parameters), &ones(&[5, 8], input), &text);
    }
    // A bias apart from its weight.
    let varmap = VarMap::new();
    insert(&varmap, "bias", &ones(&[8], F16));
    let power = power_norm(8, 1e-5, trainable(&varmap, F32)).unwrap();
    let layer = LayerNorm::new(ones(&[8], F32), ones(&[8], F16), 1e-5);
    let calls = [
        call("power_norm", |xs| power.forward(xs)),
        call("layer_norm", |xs| layer.forward(xs)),
    ];
    let text = "bias of dtype BF16 (as the input) or F32, got F16: \
                convert the input to F16, or the parameters to F32";
    all_reject(&calls, &ones(&[5, 8], BF16), text);
}

#[test]
fn residuals() {
    let (xs, weight) = (ones(&[2, 8], F32), ones(&[8], F32));
    let (layer, rms) = (
        LayerNorm::new(weight.clone(), weight.clone(), 1e-5),
        RmsNorm::new(weight.clone(), 1e-5),
    );
    let (power, _) = trained(8, F32);
    let before = state(&power);
    let calls = [
        call("power_norm", |residual| {
            power.forward_residual(&xs, residual, None)
        }),
        call("layer_norm", |residual| {
            layer.forward_residual(&xs, residual)
        }),
        call("rms_norm", |residual| rms.forward_residual(&xs, residual)),
        call("add_layer_norm", |residual| {
            ops::add_layer_norm(&xs, residual, &weight, &weight, 1e-5)
        }),
        call("add_rms_norm", |residual| {
            ops::add_rms_norm(&xs, residual, &weight, 1e-5)
        }),
    ];
    for (shape, dtype) in [([1, 8], F32), ([2, 9], F32), ([2, 8], F64)] {
        let text = format!(
            "a residual of shape [2, 8] and dtype F32 (as the input), got {shape:?} and {dtype:?}: \
             give it the input's shape and dtype"
        );
        all_reject(&calls, &ones(&shape, dtype), &text);
    }
    assert_eq!(state(&power), before);
}

/// What a builder builds a layer of.
struct Settings {
    size: usize,
    eps: f64,
    dtype: DType,
}

/// A constructor, which leaves no variable behind if it fails.
fn built<T>(
    name: &'static str,
    build: impl Fn(usize, f64, VarBuilder) -> Result<T> + 'static,
) -> Call<'static, Settings> {
    call(name, move |&Settings { size, eps, dtype }| {
        let varmap = VarMap::new();
        let layer = build(size, eps, trainable(&varmap, dtype));
        assert_eq!(layer.is_err(), varmap.all_vars().is_empty());
        layer
    })
}

#[test]
fn settings_of_builders() {
    let calls = [
        built("power_norm", power_norm::<f64>),
        built("layer_norm", layer_norm::<f64>),
        built("layer_norm", layer_norm_1p::<f64>),
        built("layer_norm", layer_norm_no_bias),
        built("rms_norm", rms_norm),
        built("rms_norm", rms_norm_1p),
    ];
    let all_reject = |size, eps, dtype, text: &str| {
        all_reject(&calls, &Settings { size, eps, dtype }, text);
    };
    all_reject(0, 1e-5, F32, "a size of at least 1, got 0");
    for dtype in [U8, U32, I64] {
        let text = format!("a builder of dtype F32, F64, F16 or BF16, got {dtype:?}");
        all_reject(8, 1e-5, dtype, &text);
    }
    for (eps, dtype, text) in [
        (0., F32, "F32, got 0.0"),
        (-1e-5, F32, "F32, got -1e-5"),
        (f64::NAN, F64, "F64, got NaN"),
        (f64::INFINITY, F64, "F64, got inf"),
        // Fine in f64, 0 or infinite in the layer's sums.
        (1e-60, BF16, "F32, got 1e-60"),
        (1e60, BF16, "F32, got 1e60"),
    ] {
        let text = format!(
            "eps positive and finite after rounding to {text}: choose a number such as 1e-5"
        );
        all_reject(8, eps, dtype, &text);
    }
    for (name, call) in &calls {
        let (size, eps, dtype) = (8, 1e-60, F64);
        assert!(call(&Settings { size, eps, dtype }).is_ok(), "{name}");
    }
}

/// Of a layer made of tensors: PowerNorm rejects them at once, the others in their first call.
#[test]
fn epsilons_beside_tensors() -> Result<()> {
    let (weight, xs) = (ones(&[8], F32), ones(&[3, 8], BF16));
    let (one, f32s) = (|| weight.clone(), ones(&[3, 8], F32));
    let layers = [
        call("power_norm", |&eps| {
            PowerNorm::new(one(), one(), one(), eps)
        }),
        call("layer_norm", |&eps| {
            LayerNorm::new(one(), one(), eps).forward(&xs)
        }),
        call("rms_norm", |&eps| RmsNorm::new(one(), eps).forward(&xs)),
    ];
    // In f32 themselves.
    let functions = [
        call("layer_norm", |&eps: &f64| {
            ops::layer_norm(&f32s, &weight, &weight, eps as f32)
        }),
        call("rms_norm", |&eps: &f64| {
            ops::rms_norm(&f32s, &weight, eps as f32)
        }),
        call("add_layer_norm", |&eps: &f64| {
            ops::add_layer_norm(&f32s, &f32s, &weight, &weight, eps as f32)
        }),
        call("add_rms_norm", |&eps: &f64| {
            ops::add_rms_norm(&f32s, &f32s, &weight, eps as f32)
        }),
    ];
    let scaling = [call("group_scaling", |&eps| GroupScaling::new(1, eps))];
    let text = |dtype: &str, eps: f64| {
        format!(
            "eps positive and finite after rounding to {dtype}, got {eps:?}: \
             choose a number such as 1e-5"
        )
    };
    for eps in [0., -1., f64::NAN, f64::INFINITY] {
        all_reject(&layers, &eps, &text("F32", eps));
        all_reject(&functions, &eps, &text("F32", eps));
        all_reject(&scaling, &eps, &text("F64", eps));
    }
    // Positive in f64, 0 in the sums of an input of half precision.
    all_reject(&layers, &1e-60, &text("F32", 1e-60));
    let tiny = GroupScaling::new(1, 1e-60)?;
    assert!(tiny.forward(&ones(&[2, 5], F64)).is_ok());
    let scaling = [call("group_scaling", |xs| tiny.forward(xs))];
    all_reject(&scaling, &ones(&[2, 5], BF16), &text("F32", 1e-60));
    let text = "at least 1 group, got 0: pass 1 to scale whole rows";
    rejected_by("group_scaling", GroupScaling::new(0, 1e-5), text);
    Ok(())
}

#[test]
fn weights() -> Result<()> {
    let f32s = |weight: &Tensor| ones(weight.dims(), F32);
    let xs = |weight: &Tensor| ones(&[3, weight.elem_count()], BF16);
    let calls = [
        call("power_norm", |weight: &Tensor| {
            PowerNorm::new(weight.clone(), f32s(weight), f32s(weight), 1e-5)
        }),
        call("layer_norm", |weight: &Tensor| {
            LayerNorm::new(weight.clone(), f32s(weight), 1e-5).forward(&xs(weight))
        }),
        call("rms_norm", |weight: &Tensor| {
            RmsNorm::new(weight.clone(), 1e-5).forward(&xs(weight))
        }),
    ];
    all_reject(&calls, &ones(&[0], F32), "a size of at least 1, got 0");
    let text = "a weight of rank 1, got shape [2, 4]: flatten it, to one number a channel";
    all_reject(&calls, &ones(&[2, 4], F32), text);
    for dtype in [U8, I64] {
        let text = format!("weight of dtype F32, F64, F16 or BF16, got {dtype:?}");
        all_reject(&calls, &ones(&[8], dtype), &text);
    }
    // In a checkpoint: of another size, or none.
    let frozen = |name: &str, size| {
        let weight = HashMap::from([(name.to_owned(), ones(&[size], F32))]);
        rms_norm(8, 1e-5, VarBuilder::from_tensors(weight, F32, &CPU))
    };
    assert!(message(frozen("weight", 7)).contains("weight"));
    assert!(message(frozen("other", 8)).contains("weight"));
    let layer = frozen("gamma", 8)?;
    assert_eq!((layer.size(), layer.eps()), (8, 1e-5));
    assert_eq!(layer.weight().dims(), [8]);
    Ok(())
}

/// The functions have no weight and no bias: their arguments are alpha and beta.
#[test]
fn arguments_of_functions() {
    /// An input, alpha and beta.
    type Arguments = [Tensor; 3];
    let with_beta = || {
        [
            call("layer_norm", |[xs, a, b]: &Arguments| {
                ops::layer_norm(xs, a, b, 1e-5)
            }),
            call("add_layer_norm", |[xs, a, b]: &Arguments| {
                ops::add_layer_norm(xs, xs, a, b, 1e-5)
            }),
        ]
    };
    let without_beta = [
        call("rms_norm", |[xs, a, _]: &Arguments| {
            ops::rms_norm(xs, a, 1e-5)
        }),
        call("add_rms_norm", |[xs, a, _]: &Arguments| {
            ops::add_rms_norm(xs, xs, a, 1e-5)
        }),
    ];
    let all: Vec<_> = with_beta().into_iter().chain(without_beta).collect();
    let (xs, eight, nine, none) = (
        ones(&[2, 8], F32),
        ones(&[8], F32),
        ones(&[9], F32),
        ones(&[0], F32),
    );
    let alphas = |xs: &Tensor, alpha: &Tensor, text: &str| {
        all_reject(&all, &[xs, alpha, &eight].map(Tensor::clone), text);
    };
    let text = "xs of rank 1 or more, got a scalar: give it a last dimension of channels";
    alphas(&ones(&[], F32), &eight, text);
    let text = "xs of dtype F32, F64, F16 or BF16, got U8";
    alphas(&ones(&[2, 8], U8), &eight, text);
    let text = "alpha of shape [8] (xs's last dimension), got [9]";
    alphas(&xs, &nine, text);
    let text = "alpha of shape [8] (xs's last dimension), got [1, 8]";
    alphas(&xs, &ones(&[1, 8], F32), text);
    let text = "alpha of dtype F32 (as xs), got F64: convert it by `to_dtype`";
    alphas(&xs, &ones(&[8], F64), text);
    let text = "alpha of dtype BF16 (as xs) or F32, got F64: convert it by `to_dtype`";
    alphas(&ones(&[2, 8], BF16), &ones(&[8], F64), text);
    let text = "a size of at least 1, got 0";
    all_reject(&all, &[ones(&[2, 0], F32), none.clone(), none], text);

    let with_beta = with_beta();
    let betas = |beta: &Tensor, text: &str| {
        all_reject(&with_beta, &[&xs, &eight, beta].map(Tensor::clone), text);
    };
    betas(&nine, "beta of shape [8] (xs's last dimension), got [9]");
    let text = "beta of dtype F32 (as xs), got F16: convert it by `to_dtype`";
    betas(&ones(&[8], F16), text);
}
