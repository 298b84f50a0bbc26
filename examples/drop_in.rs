//! The one-line swap. This program builds the same model with candle's LayerNorm, with this crate's
//! and with PowerNorm, and prints which of their variables a backward does not train. candle's fused
//! LayerNorm records no backward, so nothing upstream of it trains, and no error says so.

use candle::{DType, Device, Module, Result, Tensor};
use candle_nn::{Activation, Sequential, VarBuilder, VarMap, linear, loss, seq};
use candle_powernorm::{trainable_vars, untrained};

mod before {
    use super::*;
    use candle_nn::layer_norm;

    pub fn model(vb: VarBuilder) -> Result<Sequential> {
        Ok(seq()
            .add(linear(8, 16, vb.pp("input"))?)
            .add(layer_norm(16, 1e-5, vb.pp("norm"))?)
            .add(Activation::Relu)
            .add(linear(16, 4, vb.pp("output"))?))
    }
}

/// The import is the only difference.
mod trains {
    use super::*;
    use candle_powernorm::layer_norm;

    pub fn model(vb: VarBuilder) -> Result<Sequential> {
        Ok(seq()
            .add(linear(8, 16, vb.pp("input"))?)
            .add(layer_norm(16, 1e-5, vb.pp("norm"))?)
            .add(Activation::Relu)
            .add(linear(16, 4, vb.pp("output"))?))
    }
}

mod after {
    use super::*;
    use candle_powernorm::power_norm;

    pub fn model(vb: VarBuilder) -> Result<Sequential> {
        Ok(seq()
            .add(linear(8, 16, vb.pp("input"))?)
            .add(power_norm(16, 1e-5, vb.pp("norm"))?)
            .add(Activation::Relu)
            .add(linear(16, 4, vb.pp("output"))?))
    }
}

/// Runs a backward of the model, prints the variables that it does not train, and returns their
/// names.
fn check(what: &str, model: fn(VarBuilder) -> Result<Sequential>) -> Result<Vec<String>> {
    let varmap = VarMap::new();
    let model = model(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
    let xs = Tensor::randn(0f32, 1., (64, 8), &Device::Cpu)?;
    let labels = Tensor::arange(0u32, 64, &Device::Cpu)?;
    let labels = (labels.to_dtype(DType::F32)? / 16.)?.to_dtype(DType::U32)?; // 16 rows of each
    let gradients = loss::cross_entropy(&model.forward(&xs)?, &labels)?.backward()?;

    let all = trainable_vars(&varmap).len(); // without PowerNorm's statistics
    let untrained = untrained(&varmap, &gradients)?;
    println!("{what}: {} of {all} variables train", all - untrained.len());
    for variable in &untrained {
        println!("  {variable}");
    }
    Ok(untrained
        .iter()
        .map(|variable| variable.name().to_owned())
        .collect())
}

fn main() -> Result<()> {
    let upstream = ["input.bias", "input.weight", "norm.bias", "norm.weight"];
    assert_eq!(check("candle's LayerNorm", before::model)?, upstream);
    assert!(check("this crate's LayerNorm", trains::model)?.is_empty());
    assert!(check("PowerNorm", after::model)?.is_empty());
    Ok(())
}
