//! candle's fused softmax and rotations with a backward, and its GELU with a faster one:
//! derivatives, second derivatives, and what they reject. `devices` has their values.

use crate::common::*;
use candle::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap, linear};
use candle_powernorm::{check_gradients, ops, untrained};

/// `sum(f(x) ⊙ weights)` and the gradient of x, against central differences.
fn follows_differences(shape: &[usize], f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<()> {
    let mut data = Data::new(5);
    let len = shape.iter().product();
    let at = data.normal(len);
    let weights = tensor(&data.normal(len), shape, DType::F64);
    let loss = |xs: &Tensor| (f(xs)? * &weights)?.sum_all();
    let xs = Var::from_tensor(&tensor(&at, shape, DType::F64))?;
    let dx = loss(&xs)?.backward()?.remove(&xs).unwrap();
    let measured = central_differences(&at, |at| {
        let loss = loss(&tensor(at, shape, DType::F64)).unwrap();
        loss.to_scalar::<f64>().unwrap()
    });
    assert_relative("dx", &dx, &measured, 1e-8);
    Ok(())
}

#[test]
fn gradients_are_the_derivatives() -> Result<()> {
    follows_differences(&[3, 7], ops::softmax_last_dim)?;
    follows_differences(&[3, 7], ops::gelu)?;
    follows_differences(&[3, 7], ops::gelu_erf)?;
    let angles = tensor(&Data::new(6).normal(4 * 3), &[4, 3], DType::F64);
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    follows_differences(&[2, 2, 4, 6], |xs| ops::rope(xs, &cos, &sin))?;
    follows_differences(&[2, 2, 4, 6], |xs| ops::rope_i(xs, &cos, &sin))?;
    follows_differences(&[2, 4, 2, 6], |xs| ops::rope_thd(xs, &cos, &sin))?;
    // Of the tables, by learned angles.
    let xs = tensor(
        &Data::new(7).normal(2 * 3 * 4 * 6),
        &[2, 3, 4, 6],
        DType::F64,
    );
    follows_differences(&[4, 3], |angles| {
        // The weights of the loss have the shape of the angles.
        let ys = ops::rope(&xs, &angles.cos()?, &angles.sin()?)?
            .sqr()?
            .powf(1.5)?;
        ys.sum(1)?.sum(0)?.narrow(1, 0, 3)
    })
}

/// With `CANDLE_GRAD_DO_NOT_DETACH=1`, run by the test below: the gradient of a gradient.
#[test]
fn a_gradient_can_be_differentiated_again() -> Result<()> {
    if std::env::var_os("CANDLE_GRAD_DO_NOT_DETACH").is_none() {
        return Ok(());
    }
    let mut data = Data::new(8);
    let angles = tensor(&data.normal(2 * 2), &[2, 2], DType::F64);
    let weights = tensor(&data.normal(8), &[1, 1, 2, 4], DType::F64);
    let penalty = |xs: &Var| -> Result<Tensor> {
        let ys = ops::rope(xs, &angles.cos()?, &angles.sin()?)?;
        let ys = ops::softmax_last_dim(&ys)?;
        let ys = ((ys + ops::gelu(xs)?)? + ops::gelu_erf(xs)?)?;
        let gradients = (ys * &weights)?.sum_all()?.backward()?;
        gradients.get(xs).unwrap().sqr()?.sum_all()
    };
    let mut at = data.normal(8);
    at[3] = 0.;
    let var = |at: &[f64]| Var::from_tensor(&tensor(at, &[1, 1, 2, 4], DType::F64)).unwrap();
    let xs = var(&at);
    let gradient = penalty(&xs)?.backward()?.remove(&xs).unwrap();
    let measured = central_differences(&at, |at| {
        penalty(&var(at)).unwrap().to_scalar::<f64>().unwrap()
    });
    assert_relative("second derivative", &gradient, &measured, 1e-7);
    Ok(())
}

#[test]
fn gradients_of_gradients() {
    let test = "fused::a_gradient_can_be_differentiated_again";
    let (passed, text) = run_with("CANDLE_GRAD_DO_NOT_DETACH", "1", &[test]);
    assert!(passed, "{text}");
}

/// In a small network with a normalization, from GELUs of whole rows and of views.
#[test]
fn a_network_with_gelu_has_right_gradients() -> Result<()> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F64, &CPU);
    let [expand, project] = [
        linear(6, 24, vb.pp("expand"))?,
        linear(24, 6, vb.pp("project"))?,
    ];
    let norm = candle_powernorm::layer_norm(6, 1e-5, vb.pp("norm"))?;
    let xs = tensor(&Data::new(9).normal(60), &[10, 6], DType::F64);
    let loss = || {
        let hidden = expand.forward(&xs)?;
        let first = ops::gelu(&hidden.narrow(1, 0, 7)?)?;
        let rest = ops::gelu_erf(&hidden.narrow(1, 7, 17)?)?;
        let ys = project.forward(&Tensor::cat(&[first, rest], 1)?)?;
        norm.forward(&(&xs + ys)?)?.powf(3.)?.mean_all()
    };
    assert!(check_gradients(&varmap, loss)?.is_empty());
    assert!(untrained(&varmap, &loss()?.backward()?)?.is_empty());
    Ok(())
}

/// The output of candle's function is moved into the graph, and nothing keeps it elsewhere.
#[test]
fn an_output_outlives_its_graph() -> Result<()> {
    let xs = Var::new(&[[0f32, 0.], [0., 0.]], &CPU)?;
    let y = ops::softmax_last_dim(&xs)?;
    let detached = y.detach();
    drop((y, xs));
    assert_eq!(detached.to_vec2::<f32>()?, [[0.5; 2]; 2]);
    Ok(())
}

#[test]
fn what_does_not_fit_is_rejected() -> Result<()> {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &CPU);
    let f32 = |shape: &[usize]| zeros(shape, DType::F32);
    rejected_by(
        "softmax_last_dim",
        ops::softmax_last_dim(&f32(&[])?),
        "xs of rank 1 or more, got a scalar",
    );
    rejected_by(
        "softmax_last_dim",
        ops::softmax_last_dim(&zeros(&[2, 2], DType::U32)?),
        "xs of dtype F32, F64, F16 or BF16, got U32",
    );

    for (name, gelu) in [
        ("gelu", ops::gelu as fn(&Tensor) -> _),
        ("gelu_erf", ops::gelu_erf),
    ] {
        rejected_by(
            name,
            gelu(&zeros(&[2, 2], DType::U32)?),
            "xs of dtype F32, F64, F16 or BF16, got U32",
        );
    }

    let xs = f32(&[2, 3, 5, 8])?;
    let table = f32(&[5, 4])?;
    rejected_by(
        "rope",
        ops::rope(&f32(&[3, 5, 8])?, &table, &table),
        "xs [batch, heads, positions, width of a head], got [3, 5, 8]",
    );
    rejected_by(
        "rope_thd",
        ops::rope_thd(&f32(&[3, 5, 8])?, &table, &table),
        "xs [batch, positions, heads, width of a head], got [3, 5, 8]",
    );
    let tables = "cos and sin of [positions, 8 / 2], or one such table for each of 2 sequences, \
                  with at least the 5 positions of xs";
    for (cos, sin, got) in [
        (f32(&[4, 4])?, f32(&[4, 4])?, "cos [4, 4]"),
        (f32(&[5, 4])?, f32(&[5, 8])?, "sin [5, 8]"),
        (f32(&[3, 5, 4])?, f32(&[3, 5, 4])?, "cos [3, 5, 4]"),
        // candle's function would give both sequences the first table's sines.
        (f32(&[5, 4])?, f32(&[2, 5, 4])?, "sin [2, 5, 4]"),
        (f32(&[20])?, f32(&[20])?, "cos [20]"),
    ] {
        let text = format!("{tables}, got {got} for xs [2, 3, 5, 8]");
        for rope in [ops::rope, ops::rope_i] {
            let error = message(rope(&xs, &cos, &sin));
            assert!(error.ends_with(&format!("expected {text}")), "{error}");
        }
    }
    rejected_by(
        "rope",
        ops::rope(&zeros(&[2, 3, 5, 8], DType::BF16)?, &table, &table),
        "cos of dtype BF16 (as xs), got F32: convert it by `to_dtype`",
    );
    // An odd width has no pairs.
    assert!(ops::rope(&f32(&[2, 3, 5, 7])?, &f32(&[5, 3])?, &f32(&[5, 3])?).is_err());
    Ok(())
}

/// Each rotation by its own function of candle, with what a wrong choice would change.
#[test]
fn rotations_by_hand() -> Result<()> {
    let table = |value: f32| Tensor::full(value, (2, 2), &Device::Cpu);
    let (cos, sin) = (table(0.)?, table(1.)?); // a quarter turn: (x₁, x₂) → (−x₂, x₁)
    let xs = Tensor::arange(1f32, 9., &CPU)?.reshape((1, 1, 2, 4))?;
    let flat = |ys: Tensor| ys.flatten_all()?.to_vec1::<f32>();
    let halves = [-3., -4., 1., 2., -7., -8., 5., 6.];
    assert_eq!(flat(ops::rope(&xs, &cos, &sin)?)?, halves);
    let neighbours = [-2., 1., -4., 3., -6., 5., -8., 7.];
    assert_eq!(flat(ops::rope_i(&xs, &cos, &sin)?)?, neighbours);
    assert_eq!(
        flat(ops::rope_thd(&xs.transpose(1, 2)?, &cos, &sin)?)?,
        halves
    );
    Ok(())
}
