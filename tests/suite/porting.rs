//! The guide's advice on candle's files that are written for inference. `ports` compiles the files
//! themselves.

use crate::common::*;
use candle::{DType, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap, linear_no_bias};
use candle_powernorm::{RmsNorm, rms_norm};

/// A norm's output, and the gradients of its input and of its weight if there are any.
fn gradients(norm: &impl Module, varmap: &VarMap) -> Result<(Tensor, [Option<Tensor>; 2])> {
    let mut data = Data::new(1);
    let xs = Var::from_tensor(&tensor(&data.normal(5 * 8), &[5, 8], DType::F32))?;
    let dy = tensor(&data.normal(5 * 8), &[5, 8], DType::F32);
    let ys = norm.forward(&xs)?;
    let gradients = (&ys * dy)?.sum_all()?.backward()?;
    let weight = var(varmap, "weight");
    Ok((ys, [&xs, &weight].map(|var| gradients.get(var).cloned())))
}

/// chatglm.rs has candle's `RmsNorm` in a field for its `LayerNorm`. That one trains, and this
/// crate's has the same gradients. Without `into_inner` candle's has none.
#[test]
fn an_rms_norm_inside_a_layer_norm_trains() -> Result<()> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
    let candles = candle_nn::rms_norm(8, 1e-5, vb.clone())?;
    let ours = rms_norm(8, 1e-5, vb)?;
    let weight = tensor(&Data::new(2).weight(8), &[8], DType::F32);
    var(&varmap, "weight").set(&weight)?;

    let (expected, none) = gradients(&candles, &varmap)?;
    assert!(none.iter().all(Option::is_none));
    let (ys, of_inner) = gradients(&candles.into_inner(), &varmap)?;
    let (got, of_ours) = gradients(&ours, &varmap)?;
    assert_relative("candle's", &ys, &to_f64(&expected), 1e-6);
    assert_relative("ours", &got, &to_f64(&expected), 1e-6);
    for (ours, inner) in of_ours.iter().zip(&of_inner) {
        assert_relative(
            "gradient",
            ours.as_ref().unwrap(),
            &to_f64(inner.as_ref().unwrap()),
            1e-5,
        );
    }
    Ok(())
}

/// csm.rs's function, with the guide's edit.
fn rms_norm_by_its_scale(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    let weight = vb.get_with_hints((size,), "scale", candle_nn::Init::Const(1.))?;
    Ok(RmsNorm::new(weight, eps))
}

#[test]
fn a_layer_of_a_weight_that_the_file_reads_itself() -> Result<()> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
    let norm = rms_norm_by_its_scale(8, 1e-5, vb)?;
    assert_eq!(to_f64(norm.weight()), [1.; 8]);
    assert!(norm.weight().is_variable());
    Ok(())
}

const TIME: usize = 6;
const HEAD: usize = 4;

/// The gradients of the queries' and of the keys' weight, in an attention whose rotary tables are
/// read as in llama2_c.rs if `from_file`, and else computed.
fn query_and_key_gradients(from_file: bool) -> Result<[Vec<f64>; 2]> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
    let mut data = Data::new(3);
    let mut linear = |name: &str| -> Result<_> {
        let linear = linear_no_bias(HEAD, HEAD, vb.pp(name))?;
        let weight = tensor(&data.normal(HEAD * HEAD), &[HEAD, HEAD], DType::F32);
        var(&varmap, &format!("{name}.weight")).set(&weight)?;
        Ok(linear)
    };
    let (query, key, value) = (linear("query")?, linear("key")?, linear("value")?);
    let angles: Vec<_> = (0..TIME * HEAD / 2).map(|i| i as f64 / 3.).collect();
    let angles = tensor(&angles, &[TIME, HEAD / 2], DType::F32);
    let [cos, sin] = [angles.cos()?, angles.sin()?];
    let table = |computed: Tensor, name| match from_file {
        true => vb.get((TIME, HEAD / 2), name).unwrap_or(computed),
        false => computed,
    };
    let cos = table(cos, "freq_cis_real").unsqueeze(2)?;
    let sin = table(sin, "freq_cis_imag").unsqueeze(2)?;
    let rotate = |xs: Tensor| -> Result<Tensor> {
        let xs = xs.reshape((TIME, HEAD / 2, 2))?;
        let (x0, x1) = (xs.narrow(2, 0, 1)?, xs.narrow(2, 1, 1)?);
        let first = ((&x0 * &cos)? - (&x1 * &sin)?)?;
        let second = ((&x0 * &sin)? + (&x1 * &cos)?)?;
        Tensor::cat(&[first, second], 2)?.reshape((TIME, HEAD))
    };
    let xs = tensor(&data.normal(TIME * HEAD), &[TIME, HEAD], DType::F32);
    let scores = rotate(query.forward(&xs)?)?.matmul(&rotate(key.forward(&xs)?)?.t()?)?;
    let mixed = candle_nn::ops::softmax(&scores, 1)?.matmul(&value.forward(&xs)?)?;
    let gradients = mixed.sqr()?.sum_all()?.backward()?;
    let of_value = gradients.get(&var(&varmap, "value.weight"));
    assert!(
        to_f64(of_value.expect("a gradient"))
            .iter()
            .all(|&g| g != 0.)
    );
    let of = |name| to_f64(gradients.get(&var(&varmap, name)).expect("a gradient"));
    Ok([of("query.weight"), of("key.weight")])
}

#[test]
fn rotary_tables_that_a_varmap_makes_stop_queries_and_keys() -> Result<()> {
    for gradient in query_and_key_gradients(true)? {
        assert!(gradient.iter().all(|&g| g == 0.), "{gradient:?}");
    }
    for gradient in query_and_key_gradients(false)? {
        assert!(gradient.iter().all(|&g| g != 0.), "{gradient:?}");
    }
    Ok(())
}
