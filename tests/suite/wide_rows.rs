//! Rows of up to four million columns: an error does not grow with the width.

use crate::common::*;
use candle::{DType, Module, Result, Tensor, Var};
use candle_powernorm::{GroupScaling, LayerNorm, RmsNorm, Statistics};

const EPS: f64 = 1e-5;

/// The most by which y and dx may be off, as a multiple of the largest of them.
const BOUND: f64 = 1e-6;

/// Values of a row of one size, and its name. If all terms of a sum are equal, each addition may be
/// rounded to the same side, so that the errors add up.
fn rows(cols: usize, dtype: DType) -> Vec<(String, Vec<f64>)> {
    let rounded = |values: &[f64]| to_f64(&tensor(values, &[values.len()], dtype));
    let mut rows = vec![];
    for value in rounded(&[1.9375, 1.3]) {
        let alternating = |i: usize| if i.is_multiple_of(2) { value } else { -value };
        rows.push((format!("±{value}"), (0..cols).map(alternating).collect()));
        rows.push((format!("{value}"), vec![value; cols]));
    }
    let values = Data::new(cols as u64).normal(cols);
    rows.push(("random".into(), rounded(&values)));
    let far: Vec<f64> = values.iter().map(|x| x + 100.).collect();
    rows.push(("random, around 100".into(), rounded(&far)));
    if cols > 1 << 20 {
        rows.truncate(1); // which takes as long as all rows of 2²⁰
    }
    rows
}

/// y and dx of rows that are normalized in groups of `len` columns; if `centred`, as by LayerNorm.
fn exact(x: &[f64], dy: &[f64], len: usize, centred: bool) -> [Vec<f64>; 2] {
    let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / len as f64;
    let (mut y, mut dx) = (vec![], vec![]);
    for (x, dy) in x.chunks(len).zip(dy.chunks(len)) {
        let (mut mu, mut mean_dy) = (0., 0.);
        if centred {
            mu = mean(&mut x.iter().copied());
            mean_dy = mean(&mut dy.iter().copied());
        }
        let r = mean(&mut x.iter().map(|x| (x - mu).powi(2))) + EPS;
        let r = r.sqrt().recip();
        let product = mean(&mut x.iter().zip(dy).map(|(x, dy)| r * (x - mu) * dy));
        for (x, dy) in x.iter().zip(dy) {
            let x_hat = r * (x - mu);
            y.push(x_hat);
            dx.push(r * (dy - mean_dy - x_hat * product));
        }
    }
    [y, dx]
}

/// Compares values, apart from the rounding of each to its dtype.
#[track_caller]
fn assert_exact(what: &str, actual: &Tensor, exact: &[f64]) {
    let rounding = match actual.dtype() {
        DType::F16 | DType::BF16 => precision(actual.dtype()).0,
        _ => 0.,
    };
    let largest = exact.iter().fold(0., |most: f64, x| most.max(x.abs()));
    assert!(largest > 0., "{what}: nothing but zeros expected");
    let actual = to_f64(actual);
    assert_eq!(actual.len(), exact.len());
    let errors = (actual.iter().zip(exact))
        .map(|(actual, exact)| (actual - exact).abs() - rounding * exact.abs() * 1.001);
    // A NaN is the greatest error.
    let worst = errors.max_by(f64::total_cmp).unwrap() / largest;
    println!("{what}: {worst:.1e}");
    assert!(worst <= BOUND, "{what}: off by {worst:.2e}");
}

fn check(cols: usize, dtype: DType) -> Result<()> {
    let weight = Var::ones(cols, DType::F32, &CPU)?;
    let one = weight.as_tensor();
    let layers: [(&str, Box<dyn Module>, usize); 3] = [
        (
            "LayerNorm",
            Box::new(LayerNorm::new(one.clone(), one.zeros_like()?, EPS)),
            cols,
        ),
        ("RmsNorm", Box::new(RmsNorm::new(one.clone(), EPS)), cols),
        (
            "GroupScaling",
            Box::new(GroupScaling::new(2, EPS)?),
            cols / 2,
        ),
    ];
    for (of, x) in rows(cols, dtype) {
        let xs = Var::from_tensor(&tensor(&x, &[1, cols], dtype))?;
        // Along x̃ and along 1 in part, but not so much that dx is a small difference.
        let largest = x.iter().fold(0., |most: f64, x| most.max(x.abs()));
        let noise = Data::new(3).normal(cols);
        let dy = noise
            .iter()
            .zip(&x)
            .map(|(n, x)| n + 0.5 * x / largest + 0.3);
        let dy: Vec<f64> = dy.collect();
        let dy = tensor(&dy, &[1, cols], dtype);
        for (name, layer, len) in &layers {
            let centred = *name == "LayerNorm";
            if centred && x.iter().all(|&other| other == x[0]) {
                continue; // `layer_norm_of_equal_values_is_zero`
            }
            let what = |of_what| format!("{name}, {dtype:?}, {cols} columns, {of}: {of_what}");
            let ys = layer.forward(&xs)?;
            let gradients = backward(&ys, &dy);
            let [y, dx] = exact(&x, &to_f64(&dy), *len, centred);
            assert_exact(&what("y"), &ys, &y);
            assert_exact(&what("dx"), gradients.get(&xs).unwrap(), &dx);
            // In f32 whatever the rows are, so that the rounding of half precision hides no error.
            if let Some(dweight) = gradients.get(&weight) {
                let exact: Vec<f64> = (to_f64(&dy).iter().zip(&y)).map(|(dy, y)| dy * y).collect();
                assert_exact(&what("dweight"), dweight, &exact);
            }
        }
    }
    Ok(())
}

/// At 2²⁰ columns of ±1.9375, RMSNorm's y was off by 2.4e-4 with AVX2 and by 3.8e-4 without vector
/// instructions, and dx by 5.9e-4 and 6.9e-4. At 2²² columns of 1.3 y was off by up to 6e-4.
#[test]
fn errors_do_not_grow_with_the_width() -> Result<()> {
    for cols in [4096, 65_536, 200_704, 1 << 20, 1 << 22] {
        check(cols, DType::F32)?;
    }
    Ok(())
}

/// Their sums are in f32 too.
#[test]
fn wide_rows_of_half_precision() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        check(200_704, dtype)?;
    }
    Ok(())
}

/// PowerNorm's group scaling, also with a decay: the batch's statistic has an exact gradient.
#[test]
fn wide_groups_of_power_norm() -> Result<()> {
    let cols = 1 << 20;
    for groups in [1, 4] {
        let config = config(Some(groups)).with_statistics(Statistics::Batch);
        let mut data = Data::new(4);
        let mut twin = Twin::new(&mut data, cols, config, DType::F32);
        // The scale of a row is that of all its values.
        let x = (0..3 * cols).map(|i| [1.9375, -1.9375, 1.3][i / cols] * [1., -1.][i / 7 % 2]);
        let xs = tensor(&x.collect::<Vec<_>>(), &[3, cols], DType::F32);
        let dy = tensor(&data.normal(3 * cols), &[3, cols], DType::F32);
        for train in [true, false] {
            let outcome = run(&twin.layer, &Batch::new(xs.clone(), dy.clone()), train);
            let pass = match train {
                true => twin.oracle.train(&to_f64(&xs), None),
                false => twin.oracle.evaluate(&to_f64(&xs), None),
            };
            let gradients = twin.oracle.backward(&pass, &to_f64(&dy));
            let what = |of| format!("{groups} groups, train {train}: {of}");
            assert_exact(&what("y"), &outcome.y, &pass.y.values);
            assert_exact(&what("dx"), &outcome.dx, &gradients.dx.values);
        }
    }
    Ok(())
}

/// The levels of vector instructions add up in other orders, and candle's operations in theirs.
#[test]
fn every_level_and_candle_s_operations() {
    let tests = [
        "wide_rows::errors_do_not_grow_with_the_width",
        "wide_rows::wide_rows_of_half_precision",
        "wide_rows::wide_groups_of_power_norm",
    ];
    for (switch, value) in [
        ("CANDLE_POWERNORM_SIMD", "scalar"),
        ("CANDLE_POWERNORM_SIMD", "avx2"),
        ("CANDLE_POWERNORM_DEVICE", "composed"),
    ] {
        let (passed, text) = run_with(switch, value, &tests);
        assert!(passed, "{value}: {text}");
    }
}
