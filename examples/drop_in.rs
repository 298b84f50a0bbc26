//! The one-line swap. This program builds the same model with candle's LayerNorm, with this crate's
//! and with PowerNorm, and prints which of their variables get a gradient. candle's fused LayerNorm
//! records no backward, so nothing upstream of it trains, and no error says so.

use candle::{DType, Device, Module, Result, Tensor};
use candle_nn::{Activation, Sequential, VarBuilder, VarMap, linear, loss, seq};

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

/// The names of the variables that a backward leaves without and with a gradient.
fn gradients(model: fn(VarBuilder) -> Result<Sequential>) -> Result<[Vec<String>; 2]> {
    let varmap = VarMap::new();
    let model = model(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
    let xs = Tensor::randn(0f32, 1., (32, 8), &Device::Cpu)?;
    let labels = Tensor::zeros(32, DType::U32, &Device::Cpu)?;
    let grads = loss::cross_entropy(&model.forward(&xs)?, &labels)?.backward()?;

    let mut names = [Vec::new(), Vec::new()];
    for (name, var) in varmap.data().lock().unwrap().iter() {
        names[usize::from(grads.get(var).is_some())].push(name.clone());
    }
    names.iter_mut().for_each(|names| names.sort());
    Ok(names)
}

fn main() -> Result<()> {
    let upstream = ["input.bias", "input.weight", "norm.bias", "norm.weight"];
    let downstream = ["output.bias", "output.weight"];
    let statistics = [
        "norm.ema_gz",
        "norm.groups",
        "norm.iters",
        "norm.running_phi",
    ];

    let [without, with] = gradients(before::model)?;
    println!("candle's LayerNorm: {with:?} train, {without:?} silently do not");
    assert_eq!(with, downstream);
    assert_eq!(without, upstream);

    let [without, with] = gradients(trains::model)?;
    println!("This crate's LayerNorm: {with:?} train");
    assert_eq!(with, [&upstream[..], &downstream].concat());
    assert!(without.is_empty());

    let [without, with] = gradients(after::model)?;
    println!("PowerNorm: {with:?} train; its running statistics {without:?} are no parameters");
    assert_eq!(with, [&upstream[..], &downstream].concat());
    assert_eq!(without, statistics);
    Ok(())
}
