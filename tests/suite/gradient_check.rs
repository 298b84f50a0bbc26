//! The check of gradients: what it finds, what it does not blame, and what it leaves as it was.

use crate::common::*;
use candle::{D, DType, Module, ModuleT, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap, batch_norm, embedding, layer_norm, linear, loss, rms_norm};
use candle_powernorm::{
    Mode, PowerNormBuilder, PowerNormConfig, Statistics, WrongGradient, check_gradients, ops,
    power_norm, untrained,
};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn names(wrong: &[WrongGradient]) -> Vec<&str> {
    wrong.iter().map(|entry| entry.name()).collect()
}

/// A batch of `[rows, 8]`.
fn rows(seed: u64, rows: usize, dtype: DType) -> Tensor {
    tensor(&Data::new(seed).normal(rows * 8), &[rows, 8], dtype)
}

/// Sets the linear layers `a` and `b` to numbers that are the same in every run, since whether a
/// gradient is far enough from the right one depends on them.
fn fix_weights(varmap: &VarMap) -> Result<()> {
    let vars = varmap.data().lock().unwrap();
    let mut data = Data::new(5);
    for name in ["a.weight", "a.bias", "b.weight", "b.bias"] {
        let var = &vars[name];
        let values: Vec<_> = (data.normal(var.elem_count()).iter())
            .map(|value| value / 2.)
            .collect();
        var.set(&tensor(&values, var.dims(), var.dtype()))?;
    }
    Ok(())
}

/// Every variable's bits.
fn snapshot(varmap: &VarMap) -> BTreeMap<String, Vec<u64>> {
    let vars = varmap.data().lock().unwrap();
    vars.iter()
        .map(|(name, var)| (name.clone(), bits(var)))
        .collect()
}

/// Checks the gradients, and that all variables are as before.
fn checked(varmap: &VarMap, loss: impl FnMut() -> Result<Tensor>) -> Result<Vec<WrongGradient>> {
    let before = snapshot(varmap);
    let result = check_gradients(varmap, loss);
    assert!(snapshot(varmap) == before, "a variable has changed");
    result
}

/// A residual block `h + b(norm(h))` of `h = a(x)`: with candle's norm the branch is cut, and the
/// skip connection still carries a gradient. (Seen: `untrained` lists the norm's weight alone, and
/// the gradient of `a.weight` is off by 0.71 of its norm.)
#[test]
fn a_residual_branch_that_is_cut() -> Result<()> {
    for seed in 0..20 {
        for dtype in [DType::F32, DType::F64] {
            let varmap = VarMap::new();
            let vb = trainable(&varmap, dtype);
            let (a, b) = (linear(8, 8, vb.pp("a"))?, linear(8, 8, vb.pp("b"))?);
            let candles = rms_norm(8, 1e-5, vb.pp("norm"))?;
            let ours = candle_powernorm::rms_norm(8, 1e-5, vb.pp("norm"))?;
            let xs = rows(seed, 16, dtype);
            let block = |norm: &dyn Module| {
                let hidden = a.forward(&xs)?;
                (&hidden + b.forward(&norm.forward(&hidden)?)?)?
                    .sqr()?
                    .mean_all()
            };
            assert_eq!(checked(&varmap, || block(&ours))?, [], "{seed}");
            if dtype == DType::F64 {
                continue; // candle's has none
            }
            let unnoticed = untrained(&varmap, &block(&candles)?.backward()?)?;
            let lines: Vec<_> = unnoticed.iter().map(ToString::to_string).collect();
            assert_eq!(lines, ["norm.weight: no gradient"]);
            let wrong = checked(&varmap, || block(&candles))?;
            assert_eq!(
                names(&wrong),
                ["a.bias", "a.weight", "norm.weight"],
                "{seed}"
            );
            assert_eq!(wrong[2].gradient(), 0.);
        }
    }
    Ok(())
}

#[test]
fn an_entry_has_both_numbers() -> Result<()> {
    let varmap = VarMap::new();
    insert(&varmap, "w", &Tensor::new(&[2f32], &CPU)?);
    let w = var(&varmap, "w");
    // 3 w, of which the gradient sees 1 w.
    let loss = || (w.as_tensor() + w.as_detached_tensor() * 2.)?.sum_all();
    let wrong = checked(&varmap, loss)?;
    let [entry] = &wrong[..] else {
        panic!("{wrong:?}")
    };
    assert_eq!(entry.name(), "w");
    assert!((entry.gradient().abs() - 1.).abs() < 1e-3, "{entry:?}");
    assert!((entry.measured().abs() - 3.).abs() < 1e-3, "{entry:?}");
    assert_eq!(entry.gradient() > 0., entry.measured() > 0.);
    assert!(!entry.is_approximation());
    let text = entry.to_string();
    assert!(text.starts_with("w: gradient "), "{text}");
    assert!(text.contains(" along one direction, measured "), "{text}");
    Ok(())
}

/// What else drops or distorts gradients. Each is right without its fault.
#[test]
fn each_kind_of_fault() -> Result<()> {
    // The biases' gradients are so small beside the loss that in F32 its rounding would hide 5 % of
    // some of them.
    for (dtype, factor) in [(DType::F32, 0.5), (DType::F64, 0.05)] {
        let varmap = VarMap::new();
        let vb = trainable(&varmap, dtype);
        let (a, b) = (linear(8, 8, vb.pp("a"))?, linear(8, 8, vb.pp("b"))?);
        let scale = vb.get_with_hints(8, "scale", candle_nn::Init::Const(0.5))?;
        let computed_once = (&scale + 1.)?;
        let xs = rows(1, 16, dtype);
        let norm = candle_powernorm::layer_norm(8, 1e-5, vb.pp("norm"))?;
        fix_weights(&varmap)?;
        let hidden = || norm.forward(&a.forward(&xs)?);
        let right = |hidden: Tensor| {
            let scaled = hidden.broadcast_mul(&(&scale + 1.)?)?;
            (scaled + b.forward(&hidden)?.tanh()?)?.sqr()?.mean_all()
        };
        assert_eq!(checked(&varmap, || right(hidden()?))?, []);

        // A weight from a constructor: its gradient is there, and the loss does not follow it.
        let wrong = checked(&varmap, || {
            let hidden = hidden()?;
            let scaled = hidden.broadcast_mul(&computed_once)?;
            (scaled + b.forward(&hidden)?.tanh()?)?.sqr()?.mean_all()
        })?;
        assert_eq!(names(&wrong), ["scale"]);
        assert_eq!(wrong[0].measured(), 0.);

        // A detach in one branch.
        let wrong = checked(&varmap, || {
            let hidden = hidden()?;
            let scaled = hidden.broadcast_mul(&(&scale + 1.)?)?;
            (scaled + b.forward(&hidden.detach())?.tanh()?)?
                .sqr()?
                .mean_all()
        })?;
        assert_eq!(
            names(&wrong),
            ["a.bias", "a.weight", "norm.bias", "norm.weight"]
        );

        // A loss that was rebuilt from its number: no gradient is left.
        let wrong = checked(&varmap, || {
            let number = right(hidden()?)?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            Tensor::new(number, &CPU)?.to_dtype(dtype)
        })?;
        assert_eq!(wrong.len(), varmap.all_vars().len());
        assert!(wrong.iter().all(|entry| entry.gradient() == 0.));

        // A loss that is not what is differentiated: a factor.
        let wrong = checked(&varmap, || {
            let loss = right(hidden()?)?;
            &loss + (loss.detach() * factor)?
        })?;
        assert_eq!(wrong.len(), varmap.all_vars().len(), "{wrong:?}");
    }
    Ok(())
}

/// Attention with candle's fused softmax and rotation, and with ours.
#[test]
fn attention_of_fused_functions() -> Result<()> {
    type Attend = (
        fn(&Tensor) -> Result<Tensor>,
        fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    );
    let candles: Attend = (
        candle_nn::ops::softmax_last_dim,
        candle_nn::rotary_emb::rope,
    );
    let ours: Attend = (ops::softmax_last_dim, ops::rope);
    for seed in 0..10 {
        let varmap = VarMap::new();
        let vb = trainable(&varmap, DType::F32);
        let embed = embedding(11, 8, vb.pp("embed"))?;
        let qkv = linear(8, 24, vb.pp("qkv"))?;
        let [norm, last] =
            ["norm", "last"].map(|name| candle_powernorm::rms_norm(8, 1e-5, vb.pp(name)).unwrap());
        let head = linear(8, 11, vb.pp("head"))?;
        let angles = tensor(&Data::new(seed).normal(6 * 2), &[6, 2], DType::F32);
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let ids: Vec<u32> = (0..12).map(|k| (k * 7 + seed as u32) % 11).collect();
        let ids = Tensor::from_vec(ids, (2, 6), &CPU)?;
        let loss = |(softmax, rope): Attend| -> Result<Tensor> {
            let hidden = embed.forward(&ids)?;
            let qkv = qkv
                .forward(&norm.forward(&hidden)?)?
                .reshape((2, 6, 3, 2, 4))?;
            let part = |k| {
                qkv.narrow(2, k, 1)?
                    .squeeze(2)?
                    .transpose(1, 2)?
                    .contiguous()
            };
            let (q, k) = (rope(&part(0)?, &cos, &sin)?, rope(&part(1)?, &cos, &sin)?);
            let scores = softmax(&(q.matmul(&k.t()?)? / 2.)?)?;
            let ys = scores
                .matmul(&part(2)?)?
                .transpose(1, 2)?
                .reshape((2, 6, 8))?;
            let logits = head.forward(&last.forward(&(hidden + ys)?)?)?;
            loss::cross_entropy(&logits.flatten_to(1)?, &ids.flatten_all()?)
        };
        assert_eq!(checked(&varmap, || loss(ours))?, [], "{seed}");
        let wrong = checked(&varmap, || loss(candles))?;
        assert!(names(&wrong).contains(&"qkv.weight"), "{seed}: {wrong:?}");
    }
    Ok(())
}

/// Kinks, dead units, a kink at the very point, and gradients that are 0 or rounding errors are
/// right.
#[test]
fn what_is_right_is_not_listed() -> Result<()> {
    for seed in 0..20 {
        let varmap = VarMap::new();
        let vb = trainable(&varmap, DType::F32);
        let (a, b) = (linear(8, 64, vb.pp("a"))?, linear(64, 64, vb.pp("b"))?);
        let head = linear(64, 4, vb.pp("head"))?;
        vb.get((3, 8), "unused")?;
        vb.get((0, 8), "empty")?;
        // The first half never fires.
        let dead = Tensor::cat(
            &[
                Tensor::full(-50f32, 32, &CPU)?,
                Tensor::zeros(32, DType::F32, &CPU)?,
            ],
            0,
        )?;
        let xs = rows(seed, 4, DType::F32);
        let ids = Tensor::new(&[0u32, 1, 2, 3], &CPU)?;
        let wrong = checked(&varmap, || {
            let hidden = a.forward(&xs)?.broadcast_add(&dead)?.relu()?;
            let hidden = b.forward(&hidden)?.relu()?;
            // A bias that the softmax cancels.
            let logits = head.forward(&hidden)?;
            loss::cross_entropy(&logits, &ids)
        })?;
        assert_eq!(wrong, [], "{seed}");

        // |w| at 0: each slope from −1 to 1 is a gradient.
        let kink = VarMap::new();
        insert(&kink, "w", &Tensor::zeros(3, DType::F32, &CPU)?);
        let w = var(&kink, "w");
        assert_eq!(checked(&kink, || w.abs()?.sum_all())?, []);
    }
    Ok(())
}

/// A gradient that is off by a tenth is found, whatever the scale of the loss or of the variables,
/// and one that is right is not blamed.
#[test]
fn scales_do_not_matter() -> Result<()> {
    for dtype in [DType::F32, DType::F64] {
        for (loss_scale, var_scale) in [(1., 1.), (1e6, 1.), (1e-6, 1.), (1., 1e3), (1., 1e-3)] {
            let varmap = VarMap::new();
            let mut data = Data::new(3);
            for name in ["a", "b"] {
                let values: Vec<_> = data.normal(64).iter().map(|w| w * var_scale).collect();
                insert(&varmap, name, &tensor(&values, &[8, 8], dtype));
            }
            let (a, b) = (var(&varmap, "a"), var(&varmap, "b"));
            let xs = rows(4, 16, dtype);
            let loss = |wrong: f64| {
                let hidden = (xs.matmul(&a)? / var_scale)?.tanh()?;
                let hidden = ((&hidden * (1. - wrong))? + (hidden.detach() * wrong)?)?;
                let ys = (hidden.matmul(&b)? / var_scale)?;
                (ys - &xs)?.sqr()?.mean_all()? * loss_scale
            };
            let what = format!("{dtype:?} {loss_scale} {var_scale}");
            assert_eq!(checked(&varmap, || loss(0.))?, [], "{what}");
            assert_eq!(names(&checked(&varmap, || loss(0.1))?), ["a"], "{what}");
        }
    }
    Ok(())
}

/// One wrong variable among many that are right, large and small.
#[test]
fn one_among_many() -> Result<()> {
    for seed in 0..10 {
        let varmap = VarMap::new();
        let mut data = Data::new(seed);
        for k in 0..40 {
            let len = 1 + (k * 37) % 200;
            insert(
                &varmap,
                &format!("w{k:02}"),
                &tensor(&data.normal(len), &[len], DType::F32),
            );
        }
        let culprit = (seed * 11 % 40) as usize;
        let loss = |factor: f64| {
            let mut total = Tensor::zeros((), DType::F32, &CPU)?;
            for k in 0..40 {
                let w = var(&varmap, &format!("w{k:02}"));
                let mut term = (w.sin()?.mean_all()? * (1. + k as f64))?;
                if k == culprit {
                    term = ((&term * factor)? + (term.detach() * (1. - factor))?)?;
                }
                total = (total + term)?;
            }
            (total * 0.01)?.exp()
        };
        assert_eq!(checked(&varmap, || loss(1.))?, [], "{seed}");
        let wrong = checked(&varmap, || loss(0.9))?;
        assert_eq!(names(&wrong), [format!("w{culprit:02}")], "{seed}");
    }
    Ok(())
}

/// PowerNorm in training: exact in its warm-up, as PN-V, and in evaluation. After the warm-up the
/// entries say that it approximates. Its statistics are as before, in the map or not.
#[test]
fn power_norm_in_training() -> Result<()> {
    for (statistics, warmup_steps, evaluate, exact) in [
        (Statistics::Running, 100, false, true),
        (Statistics::Batch, 0, false, true),
        (Statistics::Running, 0, true, true),
        (Statistics::Running, 0, false, false),
    ] {
        let varmap = VarMap::new();
        let vb = trainable(&varmap, DType::F32);
        let config = PowerNormConfig {
            statistics,
            warmup_steps,
            ..1e-5.into()
        };
        let mode = Mode::train();
        let norms = PowerNormBuilder::new(config, &mode);
        let (a, b) = (linear(8, 8, vb.pp("a"))?, linear(8, 8, vb.pp("b"))?);
        let norm = norms.build(8, vb.pp("norm"))?;
        fix_weights(&varmap)?;
        let xs = rows(9, 32, DType::F32);
        let loss = || {
            let ys = b.forward(&norm.forward(&a.forward(&xs)?)?)?;
            (ys - &xs)?.sqr()?.mean_all()
        };
        for _ in 0..5 {
            loss()?.backward()?;
        }
        mode.set_training(!evaluate);
        let state = (norm.steps()?, bits(&norm.nu()?));
        let wrong = checked(&varmap, loss)?;
        assert_eq!((norm.steps()?, bits(&norm.nu()?)), state);
        match exact {
            true => assert_eq!(wrong, [], "{statistics:?} {warmup_steps} {evaluate}"),
            false => {
                assert_eq!(names(&wrong), ["a.bias", "a.weight"]);
                assert!(wrong.iter().all(WrongGradient::is_approximation));
                assert!(wrong[0].to_string().contains("PowerNorm approximates"));
            }
        }

        // Behind the layer, what is wrong is wrong.
        let wrong = checked(&varmap, || {
            let ys = b.forward(&norm.forward(&a.forward(&xs)?)?)?;
            let ys = ((&ys * 0.5)? + (ys.detach() * 0.5)?)?;
            (ys - &xs)?.sqr()?.mean_all()
        })?;
        let of_b = wrong.iter().filter(|entry| entry.name().starts_with("b."));
        assert_eq!(of_b.filter(|entry| !entry.is_approximation()).count(), 2);

        // A map of the other variables alone.
        let some = VarMap::new();
        for name in ["a.weight", "a.bias"] {
            (some.data().lock().unwrap()).insert(name.into(), var(&varmap, name));
        }
        let before = snapshot(&varmap);
        check_gradients(&some, loss)?;
        assert!(snapshot(&varmap) == before, "a statistic has changed");
    }
    Ok(())
}

/// Statistics of other layers are variables of the map, too.
#[test]
fn batch_norm_s_statistics_are_restored() -> Result<()> {
    let varmap = VarMap::new();
    let vb = trainable(&varmap, DType::F32);
    let (a, norm) = (
        linear(8, 8, vb.pp("a"))?,
        batch_norm(8, 1e-5, vb.pp("norm"))?,
    );
    let xs = rows(10, 32, DType::F32);
    let wrong = checked(&varmap, || {
        let ys = norm
            .forward_t(&a.forward(&xs)?.unsqueeze(2)?, true)?
            .squeeze(2)?;
        (ys.tanh()? - &xs)?.sqr()?.mean_all()
    })?;
    assert_eq!(wrong, []);
    Ok(())
}

#[test]
fn a_tied_weight_is_one_variable() -> Result<()> {
    let varmap = VarMap::new();
    let vb = trainable(&varmap, DType::F32);
    let embed = embedding(11, 8, vb.pp("embed"))?;
    let tied = var(&varmap, "embed.weight");
    (varmap.data().lock().unwrap()).insert("head.weight".into(), tied.clone());
    let ids = Tensor::new(&[1u32, 4, 9, 4], &CPU)?;
    let loss = |output: &Tensor| {
        let hidden = embed.forward(&ids)?.tanh()?;
        loss::cross_entropy(&hidden.matmul(&output.t()?)?, &ids)
    };
    assert_eq!(checked(&varmap, || loss(&tied))?, []);
    let wrong = checked(&varmap, || loss(&tied.as_detached_tensor()))?;
    assert_eq!(names(&wrong), ["embed.weight"]);
    Ok(())
}

#[track_caller]
fn is_rejected(varmap: &VarMap, loss: impl FnMut() -> Result<Tensor>, text: &str) {
    let error = message(checked(varmap, loss));
    let start = format!("check_gradients: expected {text}");
    assert!(error.starts_with(&start), "{error}");
}

#[test]
fn what_cannot_be_checked_is_rejected() -> Result<()> {
    let varmap = VarMap::new();
    let vb = trainable(&varmap, DType::F32);
    let a = linear(8, 8, vb.pp("a"))?;
    let norm = power_norm(8, 1e-5, vb.pp("norm"))?;
    let xs = rows(11, 16, DType::F32);
    let ys = || norm.forward(&a.forward(&xs)?);
    is_rejected(
        &varmap,
        || ys()?.sum(1),
        "a loss that is a scalar, got [16]",
    );
    is_rejected(
        &varmap,
        || ys()?.sum_all()? * f64::NAN,
        "a finite loss, got NaN",
    );
    is_rejected(
        &varmap,
        || ys()?.sum_all()?.to_dtype(DType::BF16),
        "a loss of F32 or F64, got BF16",
    );
    // Dropout, a random batch, a cache that grows.
    is_rejected(
        &varmap,
        || candle_nn::ops::dropout(&ys()?, 0.5)?.sqr()?.sum_all(),
        "a loss that depends on the variables alone, got ",
    );
    let calls = Cell::new(0.);
    let cached = || {
        calls.set(calls.get() + 1.);
        ys()?.sqr()?.sum_all()? * calls.get()
    };
    is_rejected(
        &varmap,
        cached,
        "a loss that depends on the variables alone, got ",
    );
    // Errors and panics of the loss, in a call in which the variables have moved.
    for panics in [false, true] {
        let calls = Cell::new(0);
        let fails = || {
            calls.set(calls.get() + 1);
            let loss = ys()?.sqr()?.sum_all()?;
            match calls.get() {
                6 if panics => panic!("a loss that panics"),
                6 => candle::bail!("a loss that fails"),
                _ => Ok(loss),
            }
        };
        let before = snapshot(&varmap);
        let result = catch_unwind(AssertUnwindSafe(|| check_gradients(&varmap, fails)));
        assert!(snapshot(&varmap) == before, "a variable has changed");
        match result {
            Ok(result) => assert_eq!(message(result), "a loss that fails"),
            Err(_) => assert!(panics),
        }
    }

    is_rejected(
        &VarMap::new(),
        || ys()?.sum_all(),
        "variables to check, got a VarMap without any",
    );
    let half = VarMap::new();
    VarBuilder::from_varmap(&half, DType::BF16, &CPU).get(4, "w")?;
    is_rejected(
        &half,
        || ys()?.sum_all(),
        "variables of F32 or F64, got w of BF16",
    );
    let guard = varmap.data().lock().unwrap();
    let error = message(check_gradients(&varmap, || ys()?.sum_all()));
    assert!(error.contains("expected the lock of a VarMap"), "{error}");
    drop(guard);
    // A check inside a check.
    let inner = || {
        let wrong = check_gradients(&varmap, || ys()?.sum_all())?;
        Tensor::new(wrong.len() as f32, &CPU)
    };
    is_rejected(
        &varmap,
        inner,
        "a loss that computes, got one that calls check_gradients",
    );
    // And nothing of it stays.
    assert_eq!(checked(&varmap, || ys()?.powf(2.)?.mean_all())?, []);
    Ok(())
}

/// candle's LayerNorm with a bias drops gradients, and without one it does not.
#[test]
fn layers_of_candle() -> Result<()> {
    let varmap = VarMap::new();
    let vb = trainable(&varmap, DType::F32);
    let a = linear(8, 8, vb.pp("a"))?;
    let norm = layer_norm(8, 1e-5, vb.pp("norm"))?;
    let xs = rows(12, 16, DType::F32);
    let hidden = || a.forward(&xs);
    let wrong = checked(&varmap, || norm.forward(&hidden()?)?.powf(3.)?.mean_all())?;
    assert_eq!(
        names(&wrong),
        ["a.bias", "a.weight", "norm.bias", "norm.weight"]
    );
    let slow = checked(&varmap, || {
        let ys =
            candle_nn::ops::layer_norm_slow(&hidden()?, norm.weight(), norm.bias().unwrap(), 1e-5)?;
        ys.powf(3.)?.mean_all()
    })?;
    assert_eq!(slow, []);
    let _: Var = var(&varmap, "norm.weight");
    let softmax =
        |f: fn(&Tensor) -> Result<Tensor>| checked(&varmap, || f(&hidden()?)?.sqr()?.mean_all());
    assert_eq!(softmax(|xs| candle_nn::ops::softmax(xs, D::Minus1))?, []);
    assert_eq!(softmax(ops::softmax_last_dim)?, []);
    assert_eq!(softmax(candle_nn::ops::softmax_last_dim)?.len(), 2);
    Ok(())
}
