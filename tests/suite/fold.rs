//! Folding into linear layers, and the group scaling that is left.

use crate::common::reference::Quantity;
use crate::common::*;
use candle::{DType, Module, Result, Tensor, Var};
use candle_nn::Linear;
use candle_powernorm::{GroupScaling, LayerNorm, Recipe, RmsNorm};

const SIZE: usize = 12;
const OUT: usize = 5;

/// A layer in evaluation whose channels all differ, beside its oracle.
fn trained(data: &mut Data, groups: Option<usize>, parameters: (bool, bool), dtype: DType) -> Twin {
    let config = 1e-5.with_groups(groups).with_parameters(parameters);
    let mut twin = Twin::new(data, SIZE, config, dtype);
    let phi = var(&twin.varmap, "running_phi");
    let values = data.uniform(SIZE, 0.05, 20.);
    phi.set(&data.tensor(&values, &[SIZE], phi.dtype()))
        .unwrap();
    twin.oracle.phi = to_f64(&phi);
    twin.layer.mode().set_training(false);
    twin
}

/// A random linear layer on variables.
fn linear(data: &mut Data, from: usize, to: usize, bias: bool, dtype: DType) -> Linear {
    let mut random = |shape: &[usize]| {
        let values = data.normal(shape.iter().product());
        let var = Var::from_tensor(&data.tensor(&values, shape, dtype)).unwrap();
        var.into_inner()
    };
    Linear::new(random(&[to, from]), bias.then(|| random(&[to])))
}

/// A linear layer in `f64`: `[to, from]` and `[to]`.
struct Exact {
    weight: Vec<f64>,
    bias: Vec<f64>,
}

impl Exact {
    fn of(linear: &Linear) -> Self {
        Self {
            weight: to_f64(linear.weight()),
            bias: (linear.bias()).map_or_else(|| vec![0.; linear.weight().dims()[0]], to_f64),
        }
    }

    fn apply(&self, xs: &[f64]) -> Quantity {
        let from = self.weight.len() / self.bias.len();
        let (mut values, mut magnitude) = (vec![], 0f64);
        for row in xs.chunks(from) {
            for (weight, &bias) in self.weight.chunks(from).zip(&self.bias) {
                let terms = || weight.iter().zip(row).map(|(w, x)| w * x).chain([bias]);
                values.push(terms().sum());
                magnitude = terms().fold(magnitude, |max, term| max.max(term.abs()));
            }
        }
        Quantity { values, magnitude }
    }
}

/// Checks the numbers of a folded layer: computed in `f64`, rounded once to `dtype`.
fn check_numbers(what: &str, folded: &Linear, weight: Vec<f64>, bias: Quantity, dtype: DType) {
    let bound = Bound {
        out: dtype,
        sums: DType::F64,
        n: SIZE,
    };
    let what = |name| format!("{what}, {name}");
    assert_close(&what("W'"), folded.weight(), &weight.into(), bound);
    match folded.bias() {
        Some(folded) => assert_close(&what("b'"), folded, &bias, bound),
        None => assert!(bias.values.iter().all(|&b| b == 0.), "{}", what("no b'")),
    }
}

/// Checks a forward in which numbers of its dtype were multiplied and added up.
fn check_output(what: &str, actual: &Tensor, expected: &Quantity) {
    assert_close(what, actual, expected, Bound::of(actual.dtype(), SIZE));
}

/// γ/√(ψ²+ε).
fn scale(twin: &Twin) -> Vec<f64> {
    let oracle = &twin.oracle;
    (oracle.weight.iter().zip(&oracle.phi))
        .map(|(weight, phi)| weight / (phi + oracle.spec.eps).sqrt())
        .collect()
}

/// Every dtype, groups and parameters, with or without a bias of the linear layer.
fn for_all_cases(
    groups: &[Option<usize>],
    mut check: impl FnMut(&str, &mut Data, Twin, DType, bool),
) {
    for (dtype, builder) in DTYPES {
        for &groups in groups {
            for parameters in PARAMETERS {
                for bias in [true, false] {
                    let what = format!(
                        "{dtype:?} in {builder:?}, groups {groups:?}, affine and bias \
                         {parameters:?}, linear layer's bias {bias}"
                    );
                    let mut data = Data::new(11);
                    let twin = trained(&mut data, groups, parameters, builder);
                    check(&what, &mut data, twin, dtype, bias);
                }
            }
        }
    }
}

#[test]
fn folds_into_the_next_linear_layer() {
    for_all_cases(
        &[None, Some(1), Some(4)],
        |what, data, twin, dtype, bias| {
            let Twin { layer, oracle, .. } = &twin;
            let next = linear(data, SIZE, OUT, bias, dtype);
            let folded = layer.fold_into(&next).unwrap();

            let exact = Exact::of(&next);
            let scale = scale(&twin);
            let weights = exact.weight.iter().zip(scale.iter().cycle());
            let weights = weights.map(|(w, s)| w * s).collect();
            check_numbers(what, &folded, weights, exact.apply(&oracle.bias), dtype);
            let biased = bias || layer.bias().is_some();
            assert_eq!(folded.bias().is_some(), biased, "{what}");

            let xs = Batch::random(data, &[2, 3, SIZE], dtype, false).xs;
            let rest = match layer.group_scaling() {
                Some(scaling) => scaling.forward(&xs).unwrap(),
                None => xs.clone(),
            };
            let expected = exact.apply(&oracle.evaluate(&to_f64(&xs), None).y.values);
            check_output(what, &folded.forward(&rest).unwrap(), &expected);
            let unfolded = next.forward(&layer.forward_t(&xs, false).unwrap());
            check_output(&format!("{what}, unfolded"), &unfolded.unwrap(), &expected);
        },
    );
}

/// A layer packs the rows of several sequences for the linear layer behind it. A folded layer
/// leaves that to its caller (`candle_traps.rs` shows what happens otherwise).
#[test]
fn rows_of_two_sequences_that_are_not_packed() {
    for_all_cases(
        &[None, Some(1), Some(4)],
        |what, data, twin, dtype, bias| {
            let Twin { layer, oracle, .. } = &twin;
            let next = linear(data, SIZE, OUT, bias, dtype);
            let folded = layer.fold_into(&next).unwrap();

            let xs = Batch::random(data, &[2, SIZE, 3], dtype, false).xs;
            let xs = xs.transpose(1, 2).unwrap();
            let exact = Exact::of(&next);
            let expected = exact.apply(&oracle.evaluate(&to_f64(&xs), None).y.values);
            let unfolded = next.forward(&layer.forward_t(&xs, false).unwrap());
            check_output(&format!("{what}, unfolded"), &unfolded.unwrap(), &expected);
            let rest = match layer.group_scaling() {
                Some(scaling) => scaling.forward(&xs).unwrap(),
                None => xs.contiguous().unwrap(),
            };
            check_output(what, &folded.forward(&rest).unwrap(), &expected);
        },
    );
}

/// Folding changes nothing, and what it gives does not follow what it was made of.
#[test]
fn a_folded_layer_stands_by_itself() {
    for_all_cases(&[None], |what, data, twin, dtype, bias| {
        let layer = &twin.layer;
        let before = state(layer);
        let next = linear(data, SIZE, OUT, bias, dtype);
        let folded = layer.fold_into(&next).unwrap();
        assert_eq!(state(layer), before, "{what}");

        let numbers = || {
            let tensors = [Some(folded.weight()), folded.bias()];
            tensors.into_iter().flatten().collect::<Vec<_>>()
        };
        assert!(numbers().iter().all(|tensor| !tensor.track_op()), "{what}");
        let bits_of = || numbers().into_iter().map(bits).collect::<Vec<_>>();
        let before = bits_of();
        let of_linear = [Some(next.weight()), next.bias()].into_iter().flatten();
        let vars = of_linear.map(|tensor| Var::from_tensor(tensor).unwrap());
        for var in vars.chain(twin.varmap.all_vars()) {
            var.set(&var.ones_like().unwrap()).unwrap();
        }
        assert_eq!(bits_of(), before, "{what}");
    });
}

#[test]
fn folds_that_would_be_wrong_are_rejected() {
    let mut data = Data::new(5);
    let layer = trained(&mut data, None, (true, true), DType::F32).layer;
    let other_size = linear(&mut data, OUT, SIZE, true, DType::F32);
    let text = "a linear layer of 12 input features, got 5";
    rejected(layer.fold_into(&other_size), text);

    // Before, W' was cut to whole numbers.
    for dtype in [DType::U8, DType::I64] {
        let next = Linear::new(Tensor::ones((OUT, SIZE), dtype, &CPU).unwrap(), None);
        let text = format!(
            "the weight of `next` in a float dtype, got {dtype:?}: \
             convert the linear layer by `to_dtype` first"
        );
        rejected(layer.fold_into(&next), &text);
    }

    layer.mode().set_training(true);
    let text = "a layer in evaluation to fold, got one whose statistic moves: \
                call `mode.set_training(false)`, or end the recalibration, first";
    let next = linear(&mut data, SIZE, OUT, true, DType::F32);
    rejected(layer.fold_into(&next), text);
}

// RMSNorm and LayerNorm

/// Rows divided by their root mean square, or by their deviation once the mean is subtracted.
fn normalized(xs: &[f64], centred: bool, eps: f64) -> Vec<f64> {
    let mean_of = |row: &[f64]| row.iter().sum::<f64>() / SIZE as f64;
    let rows = xs.chunks(SIZE).flat_map(|row| {
        let mean = if centred { mean_of(row) } else { 0. };
        let row: Vec<f64> = row.iter().map(|x| x - mean).collect();
        let squares: Vec<f64> = row.iter().map(|x| x * x).collect();
        let rms = (mean_of(&squares) + eps).sqrt();
        row.into_iter().map(move |x| x / rms)
    });
    rows.collect()
}

/// Folds a layer of `weight` and perhaps `bias`, and checks the numbers of the result, its output
/// on `xs` behind what is left of the layer, and the output of the unfolded layer.
fn check_fold(
    what: &str,
    [weight, bias]: [&Tensor; 2],
    next: &Linear,
    xs: &Tensor,
    (layer, rest, folded): (&dyn Module, &dyn Module, &Linear),
    (centred, biased): (bool, bool),
) -> Result<()> {
    let exact = Exact::of(next);
    let (weight, mut shift) = (to_f64(weight), to_f64(bias));
    if !biased {
        shift.fill(0.);
    }
    let weights = exact.weight.iter().zip(weight.iter().cycle());
    let weights = weights.map(|(w, s)| w * s).collect();
    check_numbers(what, folded, weights, exact.apply(&shift), xs.dtype());
    assert_eq!(
        folded.bias().is_some(),
        biased || next.bias().is_some(),
        "{what}"
    );
    assert!(!folded.weight().track_op(), "{what}");

    let ys: Vec<f64> = (normalized(&to_f64(xs), centred, 1e-5).into_iter())
        .zip(weight.iter().zip(&shift).cycle())
        .map(|(x, (weight, shift))| weight * x + shift)
        .collect();
    let expected = exact.apply(&ys);
    check_output(what, &folded.forward(&rest.forward(xs)?)?, &expected);
    let unfolded = next.forward(&layer.forward(xs)?)?;
    check_output(&format!("{what}, unfolded"), &unfolded, &expected);
    Ok(())
}

#[test]
fn row_normalizations_fold_into_the_next_linear_layer() -> Result<()> {
    for (dtype, builder) in DTYPES {
        for linear_bias in [true, false] {
            let mut data = Data::new(12);
            let next = linear(&mut data, SIZE, OUT, linear_bias, dtype);
            let weight = data.weight(SIZE);
            let weight = Var::from_tensor(&data.tensor(&weight, &[SIZE], builder))?.into_inner();
            let bias = data.normal(SIZE);
            let bias = Var::from_tensor(&data.tensor(&bias, &[SIZE], builder))?.into_inner();
            let xs = Batch::random(&mut data, &[2, 3, SIZE], dtype, false).xs;
            // A mean, which only LayerNorm subtracts.
            let xs = (xs + 0.75)?;
            let tensors = [&weight, &bias];
            let what = |name| {
                format!("{name}, {dtype:?} in {builder:?}, linear layer's bias {linear_bias}")
            };

            let norm = RmsNorm::new(weight.clone(), 1e-5);
            let (rest, folded) = (norm.group_scaling(), norm.fold_into(&next)?);
            let layers = (&norm as _, &rest as _, &folded);
            check_fold(
                &what("RMSNorm"),
                tensors,
                &next,
                &xs,
                layers,
                (false, false),
            )?;

            for norm in [
                LayerNorm::new(weight.clone(), bias.clone(), 1e-5),
                LayerNorm::new_no_bias(weight.clone(), 1e-5),
                LayerNorm::rms_norm(weight.clone(), 1e-5),
            ] {
                let (rest, folded) = (norm.without_affine()?, norm.fold_into(&next)?);
                assert_eq!(to_f64(rest.weight()), [1.; SIZE]);
                assert!(rest.bias().is_none() && rest.remove_mean() == norm.remove_mean());
                let layers = (&norm as _, &rest as _, &folded);
                let kind = (norm.remove_mean(), norm.bias().is_some());
                check_fold(&what("LayerNorm"), tensors, &next, &xs, layers, kind)?;
            }
        }
    }
    Ok(())
}

/// A fold that would be wrong, and layers whose tensors do not fit.
#[test]
fn folds_of_row_normalizations_that_would_be_wrong_are_rejected() -> Result<()> {
    let mut data = Data::new(5);
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &CPU);
    let norm = RmsNorm::new(ones(&[SIZE])?, 1e-5);
    assert_eq!(norm.group_scaling(), GroupScaling::new(1, 1e-5)?);
    let other_size = linear(&mut data, OUT, SIZE, true, DType::F32);
    let text = "a linear layer of 12 input features, got 5";
    rejected_by("rms_norm", norm.fold_into(&other_size), text);
    let whole = Linear::new(Tensor::ones((OUT, SIZE), DType::I64, &CPU)?, None);
    let text = "the weight of `next` in a float dtype, got I64: \
                convert the linear layer by `to_dtype` first";
    rejected_by("rms_norm", norm.fold_into(&whole), text);

    let next = linear(&mut data, SIZE, OUT, true, DType::F32);
    let text = "a weight of rank 1, got shape [3, 4]: flatten it, to one number a channel";
    rejected_by(
        "rms_norm",
        RmsNorm::new(ones(&[3, 4])?, 1e-5).fold_into(&next),
        text,
    );
    rejected_by(
        "layer_norm",
        LayerNorm::rms_norm(ones(&[3, 4])?, 1e-5).fold_into(&next),
        text,
    );
    let norm = LayerNorm::new_no_bias(ones(&[0])?, 1e-5);
    let text = "a size of at least 1, got 0";
    rejected_by("layer_norm", norm.fold_into(&next), text);
    let norm = LayerNorm::new(ones(&[SIZE])?, ones(&[OUT])?, 1e-5);
    let text = "a bias of shape [12] (as the weight), got [5]: reshape it";
    rejected_by("layer_norm", norm.fold_into(&next), text);
    Ok(())
}

// The group scaling

#[test]
fn a_layer_gives_its_own_group_scaling() {
    let of = |groups| {
        let (layer, _) = layer(SIZE, 1e-3.with_groups(groups), DType::F32);
        layer.group_scaling()
    };
    assert_eq!(of(None), None);
    let scaling = of(Some(4)).unwrap();
    assert_eq!(scaling, GroupScaling::new(4, 1e-3).unwrap());
    assert_eq!((scaling.groups(), scaling.eps()), (4, 1e-3));
}

/// Recipe Fairseq keeps a ψ² that has overflowed. An evaluation of it is NaN, and so is what it folds
/// into: a silent 0 would look like a channel that is off.
#[test]
fn a_statistic_that_overflowed_folds_into_nan() -> Result<()> {
    let (norm, varmap) = layer(2, config(None).with_recipe(Recipe::Fairseq), DType::F32);
    let phi = var(&varmap, "running_phi");
    phi.set(&Tensor::new(&[f32::INFINITY, 1.], &CPU)?)?;
    norm.mode().set_training(false);
    let xs = Tensor::ones((1, 2), DType::F32, &CPU)?;
    let [evaluated, beside] = norm.forward(&xs)?.to_vec2::<f32>()?[0][..] else {
        unreachable!()
    };
    assert!(evaluated.is_nan() && (beside - 1.).abs() < 1e-3);
    let next = Linear::new(Tensor::ones((3, 2), DType::F32, &CPU)?, None);
    for row in norm.fold_into(&next)?.weight().to_vec2::<f32>()? {
        assert!(row[0].is_nan() && (row[1] - 1.).abs() < 1e-3, "{row:?}");
    }
    Ok(())
}
