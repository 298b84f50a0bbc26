//! GroupNorm beside its definition and candle's layer.

use crate::common::*;
use candle::{DType, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::{GroupNorm, group_norm};

const EPS: f64 = 1e-5;

/// A layer of six channels, and an input of two samples, from these dtypes.
fn random(shape: &[usize], dtype: DType) -> Result<[Var; 3]> {
    let mut data = Data::new(70);
    let mut var = |shape: &[usize]| {
        let values = data.normal(shape.iter().product());
        Var::from_tensor(&data.tensor(&values, shape, dtype))
    };
    Ok([var(shape)?, var(&shape[1..2])?, var(&shape[1..2])?])
}

fn layer(weight: &Var, bias: &Var, groups: usize) -> Result<GroupNorm> {
    let (weight, bias) = (weight.as_tensor().clone(), bias.as_tensor().clone());
    let channels = weight.elem_count();
    GroupNorm::new(weight, bias, channels, groups, EPS)
}

/// PyTorch's definition: mean and biased variance over the channels of a group and all positions.
fn by_definition(shape: &[usize], groups: usize, values: [Vec<f64>; 3]) -> Vec<f64> {
    let [xs, weight, bias] = values;
    let channels = shape[1];
    let positions: usize = shape[2..].iter().product();
    let group_len = channels / groups * positions;
    let mut ys = vec![];
    for group in xs.chunks(group_len) {
        let mean = group.iter().sum::<f64>() / group_len as f64;
        let variance = group.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / group_len as f64;
        for x in group {
            let c = ys.len() / positions % channels;
            ys.push(weight[c] * (x - mean) / (variance + EPS).sqrt() + bias[c]);
        }
    }
    ys
}

fn in_f64(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()
}

#[track_caller]
fn assert_near(actual: &[f64], expected: &[f64], bound: f64) {
    assert_eq!(actual.len(), expected.len());
    for (a, e) in actual.iter().zip(expected) {
        assert!((a - e).abs() <= bound * (1. + e.abs()), "{a}, {e}");
    }
}

const SHAPES: [(&[usize], usize); 6] = [
    (&[2, 6, 4, 5], 3),
    (&[2, 6, 4, 5], 1),
    (&[2, 6, 7], 6),
    (&[3, 4], 2),
    (&[1, 8, 2, 3, 4], 4),
    (&[0, 6, 4], 2),
];

#[test]
fn group_norm_is_its_definition() -> Result<()> {
    for (shape, groups) in SHAPES {
        let [xs, weight, bias] = random(shape, DType::F64)?;
        let ys = layer(&weight, &bias, groups)?.forward(&xs)?;
        assert_eq!(ys.dims(), shape);
        let values = [in_f64(&xs)?, in_f64(&weight)?, in_f64(&bias)?];
        assert_near(&in_f64(&ys)?, &by_definition(shape, groups, values), 1e-13);
    }
    Ok(())
}

/// Output and gradients, in the input's dtype. candle's layer takes three dimensions, and its
/// backward finds no variable behind an empty batch. Its intermediate results are rounded in other
/// places: the bounds are 20 to 50 times the unit roundoff.
#[test]
fn group_norm_is_candle_s() -> Result<()> {
    for (dtype, bound) in [
        (DType::F64, 1e-14),
        (DType::F32, 3e-6),
        (DType::BF16, 0.1),
        (DType::F16, 0.02),
    ] {
        for (shape, groups) in SHAPES
            .into_iter()
            .filter(|(shape, _)| shape.len() > 2 && shape[0] > 0)
        {
            let vars = random(shape, dtype)?;
            let [xs, weight, bias] = &vars;
            let ours = layer(weight, bias, groups)?;
            let theirs = candle_nn::GroupNorm::new(
                weight.as_tensor().clone(),
                bias.as_tensor().clone(),
                shape[1],
                groups,
                EPS,
            )?;
            let dy = Tensor::randn(0f32, 1., shape, &CPU)?.to_dtype(dtype)?;
            // A view is copied.
            let view = xs.transpose(0, 1)?.contiguous()?.transpose(0, 1)?;
            let [ours, theirs] = [ours.forward(&view)?, theirs.forward(xs)?];
            assert_near(&in_f64(&ours)?, &in_f64(&theirs)?, bound);
            assert_eq!(ours.dtype(), dtype);
            let [ours, theirs] = [ours, theirs].map(|ys| (ys * &dy)?.sum_all()?.backward());
            let (ours, theirs) = (ours?, theirs?);
            for var in &vars {
                let gradients = [&ours, &theirs].map(|of| of.get(var).map(in_f64));
                let [Some(ours), Some(theirs)] = gradients else {
                    panic!("{dtype:?} {shape:?}: {gradients:?}")
                };
                assert_near(&ours?, &theirs?, bound * 4.);
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_of_group_norm_are_differences() -> Result<()> {
    let shape = [2, 6, 3];
    let vars = random(&shape, DType::F64)?;
    let dy = Tensor::randn(0f64, 1., &shape, &CPU)?;
    let loss = |[xs, weight, bias]: &[Var; 3]| -> Result<Tensor> {
        (layer(weight, bias, 3)?.forward(xs)? * &dy)?.sum_all()
    };
    let gradients = loss(&vars)?.backward()?;
    for (i, var) in vars.iter().enumerate() {
        let differences = central_differences(&in_f64(var)?, |values| {
            let mut moved = vars.clone();
            let moved_var = Tensor::from_slice(values, var.shape(), &CPU);
            moved[i] = Var::from_tensor(&moved_var.unwrap()).unwrap();
            loss(&moved).unwrap().to_scalar().unwrap()
        });
        assert_near(&in_f64(gradients.get(var).unwrap())?, &differences, 1e-7);
    }
    Ok(())
}

#[test]
fn group_norm_is_built_from_candle_s_tensors() -> Result<()> {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &CPU);
    let norm = group_norm(2, 6, EPS, vb.pp("norm"))?;
    let mut names: Vec<_> = map.data().lock().unwrap().keys().cloned().collect();
    names.sort();
    assert_eq!(names, ["norm.bias", "norm.weight"]);
    let xs = Tensor::randn(0f32, 1., (2, 6, 4), &CPU)?;
    let theirs = candle_nn::group_norm(2, 6, EPS, vb.pp("norm"))?.forward(&xs)?;
    let ours = norm.forward(&xs)?;
    assert_near(&in_f64(&ours)?, &in_f64(&theirs)?, 1e-5);

    let rejected = |result: Result<GroupNorm>, text: &str| {
        rejected_by("group_norm", result, text);
    };
    rejected(
        group_norm(4, 6, EPS, vb.pp("a")),
        "groups that divide 6 channels, got 4",
    );
    rejected(
        group_norm(0, 6, EPS, vb.pp("a")),
        "groups that divide 6 channels, got 0",
    );
    assert!(group_norm(2, 6, 0., vb.pp("a")).is_err());
    assert_eq!(map.data().lock().unwrap().len(), 2, "no variable is left");
    let rejected = |xs: &Tensor, text: &str| rejected_by("group_norm", norm.forward(xs), text);
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &CPU);
    rejected(&zeros(&[6], DType::F32)?, "an input [N, 6, ..], got [6]");
    rejected(
        &zeros(&[2, 4, 6], DType::F32)?,
        "an input [N, 6, ..], got [2, 4, 6]",
    );
    rejected(
        &zeros(&[2, 6, 4], DType::F16)?,
        "weight of shape [6] and dtype F16 (as the input), got [6] and F32",
    );
    rejected(
        &zeros(&[2, 6, 0], DType::F32)?,
        "a size of at least 1, got 0",
    );
    Ok(())
}
