//! LayerNorm and RMSNorm: candle's calls with another import, and rows whose mean is large.

use crate::common::*;
use candle::backprop::GradStore;
use candle::{DType, Module, ModuleT, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use std::collections::HashMap;
use std::fmt::Debug;

/// Everything that `candle_nn` has of these layers, by each crate's own items: if it compiles with
/// both, a changed import is the whole change. Gives the outputs of all layers it builds.
macro_rules! everything_of {
    ($module:ident, $crate_name:ident) => {
        mod $module {
            use super::*;
            use $crate_name::{
                LayerNorm, LayerNormConfig, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm,
            };

            fn is_public_as_in_candle<T: Module + Clone + Debug + Send + Sync + 'static>() {}

            pub fn everything(vb: VarBuilder, xs: &Tensor) -> Result<(Vec<Tensor>, Vec<String>)> {
                is_public_as_in_candle::<LayerNorm>();
                is_public_as_in_candle::<RmsNorm>();
                // The exact types, so that a function passed by name fits too.
                type Build<C, L> = fn(usize, C, VarBuilder) -> Result<L>;
                let with_eps: Build<f64, LayerNorm> = layer_norm;
                let with_config: Build<LayerNormConfig, LayerNorm> = layer_norm;
                let no_bias: Build<f64, LayerNorm> = layer_norm_no_bias;
                let rms: Build<f64, RmsNorm> = rms_norm;
                let new: fn(Tensor, Tensor, f64) -> LayerNorm = LayerNorm::new;
                let new_no_bias: fn(Tensor, f64) -> LayerNorm = LayerNorm::new_no_bias;
                let new_rms_norm: fn(Tensor, f64) -> LayerNorm = LayerNorm::rms_norm;
                let new_rms: fn(Tensor, f64) -> RmsNorm = RmsNorm::new;
                let weight: fn(&LayerNorm) -> &Tensor = LayerNorm::weight;
                let bias: fn(&LayerNorm) -> Option<&Tensor> = LayerNorm::bias;
                let eps: fn(&LayerNorm) -> f64 = LayerNorm::eps;
                let remove_mean: fn(&LayerNorm) -> bool = LayerNorm::remove_mean;
                let rms_weight: fn(&RmsNorm) -> &Tensor = RmsNorm::weight;
                let rms_eps: fn(&RmsNorm) -> f64 = RmsNorm::eps;
                let into_inner: fn(RmsNorm) -> LayerNorm = RmsNorm::into_inner;
                let forward_diff: fn(&RmsNorm, &Tensor) -> Result<Tensor> = RmsNorm::forward_diff;

                let config = LayerNormConfig {
                    eps: 1e-5,
                    remove_mean: true,
                    affine: true,
                };
                assert_eq!(config, LayerNormConfig::default());
                let copied = config;
                assert_eq!(copied, 1e-5.into());
                let rms_with_bias = LayerNormConfig {
                    remove_mean: false,
                    ..config
                };

                let layers = [
                    with_eps(8, 1e-5, vb.pp("a"))?,
                    with_config(8, copied, vb.pp("a"))?,
                    with_config(8, rms_with_bias, vb.pp("a"))?,
                    with_config(
                        8,
                        LayerNormConfig {
                            affine: false,
                            ..config
                        },
                        vb.pp("a"),
                    )?,
                    no_bias(8, 1e-4, vb.pp("a"))?,
                    // The names of older checkpoints.
                    with_eps(8, 1e-5, vb.pp("b"))?,
                ];
                let [gamma, beta] = [vb.pp("a").get(8, "weight")?, vb.pp("a").get(8, "bias")?];
                let built = [
                    new(gamma.clone(), beta, 1e-3),
                    new_no_bias(gamma.clone(), 1e-3),
                    new_rms_norm(gamma.clone(), 1e-3),
                ];
                let norms = [rms(8, 1e-6, vb.pp("a"))?, new_rms(gamma, 1e-6)];

                let mut outputs = vec![];
                let mut texts = vec![];
                for norm in &norms {
                    texts.push(format!("{norm:?} {}", rms_eps(norm)));
                    outputs.push(rms_weight(norm).clone());
                    outputs.push(norm.forward(xs)?);
                    outputs.push(forward_diff(norm, xs)?);
                    outputs.push(xs.apply(norm)?);
                    outputs.push(norm.forward_t(xs, true)?);
                }
                let inner = norms.map(into_inner);
                for norm in layers.iter().chain(&built).chain(&inner) {
                    texts.push(format!("{norm:?} {} {}", eps(norm), remove_mean(norm)));
                    outputs.push(weight(norm).clone());
                    outputs.extend(bias(norm).cloned());
                    outputs.push(norm.forward(xs)?);
                }
                let [first, second, ..] = layers;
                outputs.push(candle_nn::seq().add(first).add(second).forward(xs)?);
                Ok((outputs, texts))
            }
        }
    };
}
everything_of!(candles, candle_nn);
everything_of!(ours, candle_powernorm);

#[test]
fn everything_of_candle_s_layers_is_here_and_computes_the_same() -> Result<()> {
    let mut data = Data::new(1);
    let names = ["a.weight", "a.bias", "b.gamma", "b.beta"];
    let tensors: HashMap<String, Tensor> = names
        .map(|name| (name.to_owned(), data.weight(8)))
        .map(|(name, values)| (name, tensor(&values, &[8], DType::F32)))
        .into();
    let xs = tensor(&data.normal(3 * 5 * 8), &[3, 5, 8], DType::F32);
    // As of a file, in a map, and fresh.
    let varmap = variables(&tensors);
    for vb in [
        VarBuilder::from_tensors(tensors, DType::F32, &CPU),
        trainable(&varmap, DType::F32),
        trainable(&VarMap::new(), DType::F32),
    ] {
        let (expected, texts) = candles::everything(vb.clone(), &xs)?;
        let (outputs, ours) = ours::everything(vb, &xs)?;
        assert_eq!(ours, texts);
        assert_eq!(outputs.len(), expected.len());
        for (i, (output, expected)) in outputs.iter().zip(&expected).enumerate() {
            assert_eq!(output.dims(), expected.dims(), "{i}");
            match to_f64(expected).iter().all(|&value| value == 0.) {
                true => assert_zero(&format!("{i}"), output), // a fresh bias
                false => assert_relative(&format!("{i}"), output, &to_f64(expected), 1e-6),
            }
        }
    }
    Ok(())
}

/// A `bias` in a checkpoint of a layer without one stays unread, whatever it holds.
#[test]
fn a_bias_that_is_not_the_layer_s_stays_unread() -> Result<()> {
    let tensors = HashMap::from([
        ("weight".to_owned(), Tensor::ones(8, DType::F32, &CPU)?),
        ("bias".to_owned(), Tensor::ones(3, DType::U8, &CPU)?),
    ]);
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
    let norm = candle_powernorm::layer_norm_no_bias(8, 1e-5, vb.clone())?;
    assert!(norm.bias().is_none() && norm.remove_mean());
    let xs = tensor(&Data::new(2).normal(16), &[2, 8], DType::F32);
    assert!(norm.forward(&xs).is_ok());
    assert!(candle_powernorm::layer_norm(8, 1e-5, vb).is_err());
    Ok(())
}

/// The functions of both crates, by one set of types: if this compiles, a changed import is the
/// whole change there too.
#[test]
fn functions_are_candle_s_and_have_gradients() -> Result<()> {
    type Layer = fn(&Tensor, &Tensor, &Tensor, f32) -> Result<Tensor>;
    type Rms = fn(&Tensor, &Tensor, f32) -> Result<Tensor>;
    let ours: (Layer, Rms) = (
        candle_powernorm::ops::layer_norm,
        candle_powernorm::ops::rms_norm,
    );
    let candles: (Layer, Rms) = (candle_nn::ops::layer_norm, candle_nn::ops::rms_norm);
    let slow: (Layer, Rms) = (
        candle_nn::ops::layer_norm_slow,
        candle_nn::ops::rms_norm_slow,
    );
    let mut data = Data::new(3);
    let (weight, bias) = (data.weight(8), data.weight(8));
    let var =
        |values: &[f64], shape: &[usize]| Var::from_tensor(&tensor(values, shape, DType::F32));
    let (alpha, beta) = (var(&weight, &[8])?, var(&bias, &[8])?);
    let xs = var(&data.normal(15 * 8), &[3, 5, 8])?;
    let run = |(layer, rms): (Layer, Rms)| {
        Ok([layer(&xs, &alpha, &beta, 1e-3)?, rms(&xs, &alpha, 1e-3)?])
    };
    let run: &dyn Fn(_) -> Result<[Tensor; 2]> = &run;
    let (ours, fused, slow) = (run(ours)?, run(candles)?, run(slow)?);
    for ((ours, fused), slow) in ours.iter().zip(&fused).zip(&slow) {
        assert_relative("y", ours, &to_f64(fused), 1e-6);
        let [ours, slow] = [ours, slow].map(|y| y.sqr()?.sum_all()?.backward());
        let (ours, slow) = (ours?, slow?);
        for of in [&xs, &alpha, &beta] {
            match (ours.get(of), slow.get(of)) {
                (Some(ours), Some(slow)) => assert_relative("gradient", ours, &to_f64(slow), 1e-5),
                (ours, slow) => assert!(ours.is_none() && slow.is_none()),
            }
        }
    }
    Ok(())
}

/// The first layer of a model whose embedding is not trained. Sums of the row that were taken in
/// another order, without the input's gradient, once gave other last bits.
#[test]
fn an_input_that_wants_no_gradient_changes_no_bit_of_the_parameters() -> Result<()> {
    for cols in [45, 512] {
        let mut data = Data::new(4);
        let vb = trainable(&VarMap::new(), DType::F32);
        let norm = candle_powernorm::layer_norm(cols, 1e-5, vb)?;
        let xs = tensor(&data.normal(7 * cols), &[7, cols], DType::F32);
        let dy = tensor(&data.normal(7 * cols), &[7, cols], DType::F32);
        let gradients = |xs: &Tensor| (norm.forward(xs)? * &dy)?.sum_all()?.backward();
        let input = Var::from_tensor(&xs)?;
        let (with, without) = (gradients(&input)?, gradients(&xs)?);
        assert!(with.get(&input).is_some());
        for of in [norm.weight(), norm.bias().unwrap()] {
            let bits = |gradients: &GradStore| to_f64(gradients.get(of).unwrap());
            assert_eq!(bits(&with), bits(&without));
        }
    }
    Ok(())
}

/// Fresh weights of 1 + w are zeros, so that the layer starts as one of ones does; a checkpoint
/// stores w.
#[test]
fn a_unit_offset_starts_at_zero() -> Result<()> {
    let varmap = VarMap::new();
    let vb = trainable(&varmap, DType::BF16);
    let layer = candle_powernorm::layer_norm_1p(8, 1e-5, vb.pp("a"))?;
    let rms = candle_powernorm::rms_norm_1p(8, 1e-5, vb.pp("b"))?;
    assert!(layer.unit_offset() && rms.unit_offset() && layer.bias().is_some());
    assert_zero("weight", layer.weight());
    assert_zero("weight", rms.weight());
    let xs = tensor(&Data::new(4).normal(16), &[2, 8], DType::BF16);
    let ones = Tensor::ones(8, DType::BF16, &CPU)?;
    let plain = candle_powernorm::RmsNorm::new(ones, 1e-5);
    assert_same_bits("y", &rms.forward(&xs)?, &plain.forward(&xs)?);
    assert!(!plain.unit_offset());
    Ok(())
}

const ROWS: usize = 100;

/// Rows of mean 10⁴ and deviation 1, times `scale`, by a formula that a program in another language
/// repeats: benches/results has PyTorch's errors on them.
fn far_rows(cols: usize, scale: f64) -> Vec<f64> {
    let value = |k: usize| 1e4 + 2f64.sqrt() * ((k * k) as f64).sin();
    let values = (0..ROWS * cols).map(|k| f64::from(value(k) as f32) * scale);
    values.collect()
}

/// The exact output of a LayerNorm of weight 1, and the greatest error of `actual`, as a multiple
/// of the bound of each value and by itself.
///
/// The bound, in units u of the roundoff of f32 and deviations of the row: a value x is near the
/// first mean, so their difference d is exact. The second mean, of n values d that add up to
/// partial sums of about √n with a rounding each, is off by about u, and the error of the first
/// mean, u·√n·10⁴, enters it only by a further factor u·√n; 8u covers both. The variance, of n
/// positive terms, is off by √n·u at most in the mean of random roundings, and its root by half of
/// that. A difference, a square, a root, a reciprocal and two products round once each.
fn errors(actual: &Tensor, values: &[f64], cols: usize) -> (f64, f64) {
    let u = precision(DType::F32).0;
    let (mut worst, mut largest) = (0f64, 0f64);
    for (row, actual) in values.chunks(cols).zip(to_f64(actual).chunks(cols)) {
        let mean = row.iter().sum::<f64>() / cols as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64;
        for (x, actual) in row.iter().zip(actual) {
            let y = (x - mean) / (variance + 1e-5).sqrt();
            let error = match (actual - y).abs() {
                error if error.is_nan() => f64::INFINITY,
                error => error,
            };
            let bound = u * ((6. + (cols as f64).sqrt() / 2.) * y.abs() + 8.);
            worst = worst.max(error / bound);
            largest = largest.max(error);
        }
    }
    (worst, largest)
}

/// At a mean of 10⁴ deviations the layer is as exact as beside none, also where squares of the
/// values overflow. candle's two forms are not.
#[test]
fn a_mean_of_ten_thousand_deviations_costs_no_digit() -> Result<()> {
    println!("columns  scale      ours  candle's fused  candle's slow");
    for cols in [3, 64, 512, 4096] {
        for scale in [1., 2f64.powi(100)] {
            let values = far_rows(cols, scale);
            let xs = tensor(&values, &[ROWS, cols], DType::F32);
            let [ones, zeros] = [Tensor::ones, Tensor::zeros].map(|f| f(cols, DType::F32, &CPU));
            let (ones, zeros) = (ones?, zeros?);
            let norm = candle_powernorm::LayerNorm::new(ones.clone(), zeros.clone(), 1e-5);
            let (worst, ours) = errors(&norm.forward(&xs)?, &values, cols);
            let fused = candle_nn::ops::layer_norm(&xs, &ones, &zeros, 1e-5)?;
            let slow = candle_nn::ops::layer_norm_slow(&xs, &ones, &zeros, 1e-5)?;
            let [fused, slow] = [fused, slow].map(|ys| errors(&ys, &values, cols).1);
            println!("{cols:7} {scale:6.0e} {ours:9.1e} {fused:15.1e} {slow:14.1e}");
            assert!(
                worst <= 1.,
                "{cols} columns, scale {scale:e}: {worst} of the bound, {ours:e}"
            );
            assert!(ours <= fused.min(slow), "{cols} columns, scale {scale:e}");
        }
    }
    Ok(())
}

/// A forward that no variable leads to leaves nothing in the graph, and one that a variable leads to
/// has the same bits and all gradients. Each argument by itself is such a variable, and so is the
/// residual.
#[test]
fn only_a_tracked_forward_has_an_op() -> Result<()> {
    let mut data = Data::new(31);
    let mut random = |shape: &[usize]| {
        let values = data.normal(shape.iter().product());
        tensor(&values, shape, DType::F32)
    };
    let tensors = [random(&[3, 8]), random(&[3, 8]), random(&[8]), random(&[8])];
    let phi = Tensor::full(0.5f32, 8, &CPU)?;
    let outputs = |[xs, residual, weight, bias]: &[Tensor; 4]| -> Result<Vec<Tensor>> {
        let layer = candle_powernorm::LayerNorm::new(weight.clone(), bias.clone(), 1e-5);
        let rms = candle_powernorm::RmsNorm::new(weight.clone(), 1e-5);
        let (weight, bias) = (weight.clone(), Some(bias.clone()));
        // A weight that is a variable would make it train.
        let power = candle_powernorm::PowerNorm::new(weight, bias, phi.clone(), 1e-5)?;
        let power = power.with_mode(&candle_powernorm::Mode::eval());
        let (y, sum) = layer.forward_residual(xs, residual)?;
        let (power_y, power_sum) = power.forward_residual(xs, residual, None)?;
        let norms = [layer.forward(xs)?, rms.forward(xs)?, power.forward(xs)?];
        Ok(norms
            .into_iter()
            .chain([y, sum, power_y, power_sum])
            .collect())
    };
    let untracked = outputs(&tensors)?;
    assert!(untracked.iter().all(|output| !output.track_op()));
    for tracked in 0..4 {
        let mut tensors = tensors.clone();
        let var = Var::from_tensor(&tensors[tracked])?;
        tensors[tracked] = var.as_tensor().clone();
        for (k, (y, same)) in outputs(&tensors)?.iter().zip(&untracked).enumerate() {
            assert_eq!(bits(y), bits(same), "output {k}, argument {tracked}");
            // x leads to all outputs, the residual to those of `forward_residual`, weight and bias
            // to those that are normalized, except that RMSNorm has no bias.
            let expected = match tracked {
                0 => true,
                1 => k >= 3,
                2 => k != 4 && k != 6,
                _ => ![1, 4, 6].contains(&k),
            };
            assert_eq!(y.track_op(), expected, "output {k}, argument {tracked}");
            if expected {
                let gradients = y.sqr()?.sum_all()?.backward()?;
                assert_finite("gradient", gradients.get(&var).unwrap());
            }
        }
    }
    Ok(())
}

/// Parameters in the input's dtype, in f32, with an offset, and strided ones all are the same γ and
/// β: the outputs' bits do not depend on how they are stored. Few rows read them in place, and many a
/// copy.
#[test]
fn parameters_are_read_in_their_own_dtype() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for (rows, cols) in [(1, 1), (1, 37), (1, 64), (3, 130), (1, 4096), (700, 130)] {
            let mut data = Data::new(32);
            let xs = tensor(&data.normal(rows * cols), &[rows, cols], dtype);
            // Whole eighths, which each dtype holds, also minus 1.
            let mut eighths = || {
                let values = data.normal(cols).into_iter();
                // Without −0, which an offset of 1 would lose.
                let eighths: Vec<_> = values.map(|value| (value * 8.).round() / 8. + 0.).collect();
                tensor(&eighths, &[cols], dtype)
            };
            let (weight, bias) = (eighths(), eighths());
            let new = |weight: &Tensor, bias: &Tensor| {
                candle_powernorm::LayerNorm::new(weight.clone(), bias.clone(), 1e-5)
            };
            let expected = bits(&new(&weight, &bias).forward(&xs)?);
            let strided = |tensor: &Tensor| Tensor::stack(&[tensor, tensor], 1)?.get_on_dim(1, 1);
            let minus_one = |tensor: &Tensor| tensor.affine(1., -1.);
            let f32s = |tensor: &Tensor| tensor.to_dtype(DType::F32);
            for layer in [
                new(&f32s(&weight)?, &f32s(&bias)?),
                new(&f32s(&weight)?, &bias),
                new(&strided(&weight)?, &strided(&bias)?),
                new(&strided(&weight)?, &bias),
                new(&weight, &strided(&bias)?),
                new(&minus_one(&weight)?, &bias).with_unit_offset(),
                new(&minus_one(&f32s(&weight)?)?, &bias).with_unit_offset(),
                new(&strided(&minus_one(&weight)?)?, &bias).with_unit_offset(),
            ] {
                let ys = layer.forward(&xs)?;
                assert_eq!(bits(&ys), expected, "{dtype:?}, {rows}x{cols}, {layer:?}");
            }
        }
    }
    Ok(())
}

/// PowerNorm keeps γ/D in an evaluation. Whoever sets ψ², γ or β meanwhile changes the next output.
#[test]
fn an_evaluation_follows_its_variables() -> Result<()> {
    let mut data = Data::new(33);
    let xs = tensor(&data.normal(64), &[1, 64], DType::F32);
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
    let trained = candle_powernorm::power_norm(64, 1e-5, vb)?;
    // Tensors that share the variables' values and track nothing.
    let vars = varmap.data().lock().unwrap().clone();
    let of = |name: &str| vars[name].as_detached_tensor();
    let evaluate = || trained.forward_t(&xs, false);
    let fresh = |phi: Tensor| -> Result<Tensor> {
        let (weight, bias) = (of("weight").copy()?, of("bias").copy()?);
        candle_powernorm::PowerNorm::new(weight, Some(bias), phi, 1e-5)?.forward(&xs)
    };
    let phi = Tensor::rand(0.5f32, 2., 64, &CPU)?;
    let frozen =
        candle_powernorm::PowerNorm::new(of("weight"), Some(of("bias")), phi.clone(), 1e-5)?;
    for name in ["weight", "running_phi", "bias"] {
        for _ in 0..2 {
            assert_eq!(
                bits(&evaluate()?),
                bits(&fresh(of("running_phi").copy()?)?),
                "{name}"
            );
            assert_eq!(
                bits(&frozen.forward(&xs)?),
                bits(&fresh(phi.clone())?),
                "{name}"
            );
        }
        vars[name].set(&Tensor::rand(0.5f32, 2., 64, &CPU)?)?;
    }
    assert_eq!(bits(&evaluate()?), bits(&fresh(of("running_phi").copy()?)?));
    assert_eq!(bits(&frozen.forward(&xs)?), bits(&fresh(phi)?));
    Ok(())
}

/// A β of −0 stays one in every dtype, with γ/D kept or computed.
#[test]
fn negative_zeros_are_kept() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let xs = tensor(&[-0., -0., 1.], &[1, 3], dtype);
        let (weight, bias) = (
            tensor(&[1.; 3], &[3], dtype),
            tensor(&[-0., 0., 1.], &[3], dtype),
        );
        let state = if dtype == DType::F64 {
            dtype
        } else {
            DType::F32
        };
        let phi = Tensor::ones(3, state, &CPU)?;
        let layer = candle_powernorm::PowerNorm::new(weight, Some(bias), phi, 1e-5)?;
        let keep = Tensor::ones(1, DType::U8, &CPU)?;
        let ys = bits(&layer.forward(&xs)?);
        assert_eq!(ys, bits(&layer.forward_masked(&xs, &keep)?), "{dtype:?}");
        assert_eq!(ys[..2], [(-0f64).to_bits(), 0], "{dtype:?}");
    }
    Ok(())
}

/// A view without elements may begin past the end of its storage, where candle's own operations
/// panic. (Seen: LayerNorm on candle's operations did.)
#[test]
fn views_without_rows_have_no_place() -> Result<()> {
    let empty = Var::zeros((0, 3, 4), DType::F32, &CPU)?;
    let xs = empty.narrow(1, 1, 1)?;
    let ones = || Tensor::ones(4, DType::F32, &CPU);
    let layer = candle_powernorm::LayerNorm::new_no_bias(ones()?, 1e-5);
    let rms = candle_powernorm::RmsNorm::new(ones()?, 1e-5);
    for xs in [&xs, &xs.detach()] {
        let (y, sum) = layer.forward_residual(xs, xs)?;
        for y in [layer.forward(xs)?, rms.forward(xs)?, y, sum] {
            assert_eq!(y.dims(), [0, 1, 4]);
        }
    }
    Ok(())
}
