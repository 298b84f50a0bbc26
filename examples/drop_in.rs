//! The one-line swap. This program builds the same residual model with candle's LayerNorm, with this
//! crate's and with PowerNorm, and prints which of their variables get a gradient, and which
//! gradients are right. candle's fused LayerNorm records no backward. The skip connection around it
//! still carries a gradient, so most variables get one, but whatever comes before the block gets a
//! wrong one, and no error says so.

use candle::{DType, Device, Module, Result, Tensor};
use candle_nn::{Func, VarBuilder, VarMap, func, linear, loss};
use candle_powernorm::{check_gradients, trainable_vars, untrained};

mod before {
    use super::*;
    use candle_nn::layer_norm;

    pub fn model(vb: VarBuilder) -> Result<Func<'static>> {
        let input = linear(8, 16, vb.pp("input"))?;
        let norm = layer_norm(16, 1e-5, vb.pp("norm"))?;
        let inner = linear(16, 16, vb.pp("inner"))?;
        let output = linear(16, 4, vb.pp("output"))?;
        Ok(func(move |xs| {
            let hidden = input.forward(xs)?;
            let branch = inner.forward(&norm.forward(&hidden)?)?;
            output.forward(&(hidden + branch.gelu()?)?)
        }))
    }
}

/// The import is the only difference.
mod trains {
    use super::*;
    use candle_powernorm::layer_norm;

    pub fn model(vb: VarBuilder) -> Result<Func<'static>> {
        let input = linear(8, 16, vb.pp("input"))?;
        let norm = layer_norm(16, 1e-5, vb.pp("norm"))?;
        let inner = linear(16, 16, vb.pp("inner"))?;
        let output = linear(16, 4, vb.pp("output"))?;
        Ok(func(move |xs| {
            let hidden = input.forward(xs)?;
            let branch = inner.forward(&norm.forward(&hidden)?)?;
            output.forward(&(hidden + branch.gelu()?)?)
        }))
    }
}

mod after {
    use super::*;
    use candle_powernorm::power_norm;

    pub fn model(vb: VarBuilder) -> Result<Func<'static>> {
        let input = linear(8, 16, vb.pp("input"))?;
        let norm = power_norm(16, 1e-5, vb.pp("norm"))?;
        let inner = linear(16, 16, vb.pp("inner"))?;
        let output = linear(16, 4, vb.pp("output"))?;
        Ok(func(move |xs| {
            let hidden = input.forward(xs)?;
            let branch = inner.forward(&norm.forward(&hidden)?)?;
            output.forward(&(hidden + branch.gelu()?)?)
        }))
    }
}

/// Prints the variables of the model that get no gradient, and those whose gradient is wrong, and
/// returns the names of both.
fn check(what: &str, model: fn(VarBuilder) -> Result<Func<'static>>) -> Result<[Vec<String>; 2]> {
    let varmap = VarMap::new();
    let model = model(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
    let xs = Tensor::randn(0f32, 1., (64, 8), &Device::Cpu)?;
    let labels = Tensor::arange(0u32, 64, &Device::Cpu)?;
    let labels = (labels.to_dtype(DType::F32)? / 16.)?.to_dtype(DType::U32)?; // 16 rows of each
    let loss = || loss::cross_entropy(&model.forward(&xs)?, &labels);

    let untrained = untrained(&varmap, &loss()?.backward()?)?;
    let wrong = check_gradients(&varmap, loss)?;
    let all = trainable_vars(&varmap).len(); // without PowerNorm's statistics
    println!(
        "{what}: {} of {all} variables get a gradient, {} of {all} gradients are right",
        all - untrained.len(),
        all - wrong.len()
    );
    for variable in &wrong {
        println!("  {variable}");
    }
    let untrained = untrained.iter().map(|variable| variable.name().to_owned());
    let wrong = wrong.iter().map(|gradient| gradient.name().to_owned());
    Ok([untrained.collect(), wrong.collect()])
}

fn main() -> Result<()> {
    let [untrained, wrong] = check("candle's LayerNorm", before::model)?;
    assert_eq!(untrained, ["norm.bias", "norm.weight"]);
    assert_eq!(
        wrong,
        ["input.bias", "input.weight", "norm.bias", "norm.weight"]
    );
    for (what, model) in [
        (
            "this crate's LayerNorm",
            trains::model as fn(VarBuilder) -> _,
        ),
        ("PowerNorm", after::model),
    ] {
        let [untrained, wrong] = check(what, model)?;
        assert!(untrained.is_empty() && wrong.is_empty(), "{what}");
    }
    Ok(())
}
