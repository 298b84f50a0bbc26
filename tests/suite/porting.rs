//! The guide's advice on candle's files that are written for inference. `ports` compiles the files
//! themselves.

use crate::common::*;
use candle::{D, DType, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap, linear_no_bias, ops, rotary_emb};
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

/// The page that lists candle's fused operations without a backward.
const PAGE: &str = include_str!("../../docs/guide/coming-from.md");

/// The page's table of them.
fn table_of_functions() -> &'static str {
    let (_, rest) = PAGE
        .split_once("### Functions without a backward")
        .expect("the table");
    let (table, _) = rest.split_once("\n###").expect("its end");
    table
}

/// An operation on a variable, and the same by the operations that the page puts in its place.
type Operation = fn(&Tensor) -> Result<Tensor>;

/// Ones of a shape for `rope`'s tables: six positions, and half a head's width.
fn table() -> Tensor {
    Tensor::ones((6, 2), DType::F32, &CPU).unwrap()
}

/// If this fails after an update of candle, an operation has got a backward, or lost its name:
/// change the page's list, and what it says to write instead.
#[test]
fn the_fused_operations_that_the_page_lists_have_no_backward() -> Result<()> {
    // [batch, heads, positions, width], and for `rope_thd` [batch, positions, heads, width].
    let xs = tensor(&Data::new(4).normal(6 * 6 * 4), &[1, 6, 6, 4], DType::F32);
    let fused: [(&str, Operation); 6] = [
        ("softmax_last_dim", ops::softmax_last_dim),
        ("layer_norm", |xs| {
            let ones = Tensor::ones(4, DType::F32, &CPU)?;
            ops::layer_norm(xs, &ones, &ones, 1e-5)
        }),
        ("rms_norm", |xs| {
            ops::rms_norm(xs, &Tensor::ones(4, DType::F32, &CPU)?, 1e-5)
        }),
        ("rope", |xs| rotary_emb::rope(xs, &table(), &table())),
        ("rope_i", |xs| rotary_emb::rope_i(xs, &table(), &table())),
        ("rope_thd", |xs| {
            rotary_emb::rope_thd(xs, &table(), &table())
        }),
    ];
    let plain: [(&str, Operation); 9] = [
        (
            "our softmax_last_dim",
            candle_powernorm::ops::softmax_last_dim,
        ),
        ("our rope", |xs| {
            candle_powernorm::ops::rope(xs, &table(), &table())
        }),
        ("our rope_i", |xs| {
            candle_powernorm::ops::rope_i(xs, &table(), &table())
        }),
        ("our rope_thd", |xs| {
            candle_powernorm::ops::rope_thd(xs, &table(), &table())
        }),
        ("softmax", |xs| ops::softmax(xs, D::Minus1)),
        ("layer_norm_slow", |xs| {
            let ones = Tensor::ones(4, DType::F32, &CPU)?;
            ops::layer_norm_slow(xs, &ones, &ones, 1e-5)
        }),
        ("rms_norm_slow", |xs| {
            ops::rms_norm_slow(xs, &Tensor::ones(4, DType::F32, &CPU)?, 1e-5)
        }),
        ("rope_slow", |xs| {
            rotary_emb::rope_slow(xs, &table(), &table())
        }),
        ("rope_i_slow", |xs| {
            rotary_emb::rope_i_slow(xs, &table(), &table())
        }),
    ];
    let has_gradient = |operation: Operation| -> Result<bool> {
        let var = Var::from_tensor(&xs)?;
        let gradients = operation(&var)?.sqr()?.sum_all()?.backward()?;
        Ok(gradients.get(&var).is_some())
    };
    for (name, operation) in fused {
        assert!(!has_gradient(operation)?, "{name} has a backward");
    }
    for (name, operation) in plain {
        assert!(has_gradient(operation)?, "{name} has no backward");
    }

    // A cache writes in place.
    let (cache, keys) = (xs.zeros_like()?, Var::from_tensor(&xs)?);
    cache.slice_set(&keys, 2, 0)?;
    let gradients = cache.sqr()?.sum_all()?.backward()?;
    assert!(gradients.get(&keys).is_none(), "slice_set has a backward");

    // `sdpa` needs Metal, and `flash_attn` of GPUs is in a crate of its own.
    for name in fused
        .map(|(name, _)| name)
        .into_iter()
        .chain(["slice_set", "sdpa"])
    {
        assert!(
            table_of_functions().contains(&format!("{name}`")),
            "the page does not list {name}"
        );
    }
    Ok(())
}
