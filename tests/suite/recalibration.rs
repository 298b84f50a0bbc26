//! ψ² recomputed from data.

use crate::common::*;
use candle::{DType, Module, Result, Tensor, safetensors};
use candle_nn::{AdamW, Linear, Optimizer, VarBuilder, VarMap, linear, loss};
use candle_powernorm::{Mode, PowerNorm, Recipe, power_norm};
use std::collections::HashMap;
use tempfile::TempDir;

const SIZE: usize = 6;

fn batches(data: &mut Data, count: usize) -> Vec<Batch> {
    (0..count)
        .map(|_| Batch::random(data, &[5, SIZE], DType::F64, false))
        .collect()
}

/// The mean over all rows, from the formula.
fn mean_square(batches: &[Batch], groups: usize) -> Result<Vec<f64>> {
    let xs: Vec<_> = batches.iter().map(|batch| &batch.xs).collect();
    let xs = Tensor::cat(&xs, 0)?.reshape(((), groups, SIZE / groups))?;
    let rms = (xs.sqr()?.mean_keepdim(2)? + 1e-5)?.sqrt()?;
    let scaled = xs.broadcast_div(&rms)?.reshape(((), SIZE))?;
    Ok(to_f64(&scaled.sqr()?.mean(0)?))
}

fn recalibrate(layer: &PowerNorm, batches: &[Batch]) -> Result<()> {
    let _guard = layer.mode().recalibrate_scope();
    for batch in batches {
        layer.forward(&batch.xs)?;
    }
    Ok(())
}

/// Layers of one mode are recalibrated together. A scope inside another ends alone, and a call that
/// says whether it trains does as it says.
#[test]
fn follows_the_mode() -> Result<()> {
    let mut data = Data::new(3);
    let mode = Mode::eval();
    let [(a, _), (b, _)] = [(); 2].map(|()| layer(SIZE, config(Some(2)), DType::F64));
    let (a, b) = (a.with_mode(&mode), b.with_mode(&mode));
    let pass = batches(&mut data, 3);
    {
        let _guard = mode.recalibrate_scope();
        assert!(!mode.is_training());
        for batch in &pass {
            let y = a.forward(&batch.xs)?;
            b.forward(&y)?;
            let _inner = mode.eval_scope();
            let before = state(&a);
            a.forward(&batch.xs)?;
            a.forward_t(&batch.xs, false)?;
            assert_eq!(state(&a), before);
        }
    }
    assert_relative("ψ²", &a.running_phi()?, &mean_square(&pass, 2)?, 1e-14);
    assert!(to_f64(&b.running_phi()?).iter().all(|&phi| phi != 1.));
    // Another pass starts over.
    recalibrate(&a, &pass[..1])?;
    assert_relative("ψ²", &a.running_phi()?, &mean_square(&pass[..1], 2)?, 1e-14);
    assert_eq!((a.steps()?, b.steps()?), (0, 0));
    Ok(())
}

/// Padding is not seen, and batches without a row do not count. On a CPU batches without a kept row
/// do not count either.
#[test]
fn padding_and_empty_batches_count_for_nothing() -> Result<()> {
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        let mut data = Data::new(5);
        let config = config(Some(2)).with_recipe(recipe);
        let [(whole, _), (masked, _)] = [(); 2].map(|()| layer(SIZE, config, DType::F64));
        let pass = batches(&mut data, 2);
        recalibrate(&whole, &pass)?;
        let _guard = masked.mode().recalibrate_scope();
        let none = Tensor::zeros(5, DType::U8, &CPU)?;
        for batch in &pass {
            if !counts_masked_batches(&CPU) {
                masked.forward_masked(&batch.xs, &none)?;
            }
            masked.forward(&batch.xs.narrow(0, 0, 0)?)?;
            let padded = Tensor::cat(&[&batch.xs, &(&batch.xs * 1e3)?], 0)?;
            let keep = Tensor::cat(&[&none.ones_like()?, &none], 0)?;
            masked.forward_masked(&padded, &keep)?;
        }
        let (actual, expected) = (masked.running_phi()?, whole.running_phi()?);
        assert_relative("ψ²", &actual, &to_f64(&expected), 1e-14);
    }
    Ok(())
}

/// A reset starts the mean over, and a value that would overflow leaves its channel as it is.
#[test]
fn resets_and_overflows() -> Result<()> {
    let (layer, _) = layer(2, config(None), DType::F64);
    let _guard = layer.mode().recalibrate_scope();
    layer.forward(&Tensor::new(&[[5f64, 5.]], &CPU)?)?;
    layer.reset_running_stats()?;
    layer.forward(&Tensor::new(&[[2f64, 2.]], &CPU)?)?;
    layer.forward(&Tensor::new(&[[f64::INFINITY, 4.]], &CPU)?)?;
    assert_eq!(to_f64(&layer.running_phi()?), [4., 10.]);
    Ok(())
}

/// A regression with a normalization inside.
struct Model {
    input: Linear,
    norm: PowerNorm,
    output: Linear,
    varmap: VarMap,
}

impl Model {
    const WIDTH: usize = 16;

    fn new() -> Result<Self> {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F64, &CPU);
        let model = Self {
            input: linear(SIZE, Self::WIDTH, vb.pp("input"))?,
            norm: power_norm(Self::WIDTH, config(None), vb.pp("norm"))?,
            output: linear(Self::WIDTH, 1, vb.pp("output"))?,
            varmap,
        };
        // candle's own start is not seeded.
        let mut data = Data::new(7);
        for name in ["input.weight", "input.bias", "output.weight", "output.bias"] {
            let var = var(&model.varmap, name);
            let values = data.uniform(var.elem_count(), -0.5, 0.5);
            var.set(&tensor(&values, var.dims(), DType::F64))?;
        }
        Ok(model)
    }

    fn loss(&self, xs: &Tensor) -> Result<Tensor> {
        let hidden = self.norm.forward(&self.input.forward(xs)?)?.gelu()?;
        let targets = (xs.narrow(1, 0, 1)? * xs.narrow(1, 1, 1)?)?;
        loss::mse(&self.output.forward(&hidden)?, &targets)
    }

    fn evaluate(&self, xs: &Tensor) -> Result<f64> {
        let _guard = self.norm.mode().eval_scope();
        self.loss(xs)?.to_scalar()
    }
}

/// The guide's average: the mean of all floats, and the last checkpoint's step count.
fn average(checkpoints: &[HashMap<String, Tensor>]) -> Result<HashMap<String, Tensor>> {
    let mut average = checkpoints.last().expect("a checkpoint").clone();
    for (name, tensor) in &mut average {
        if tensor.dtype().is_float() {
            let all: Vec<_> = checkpoints.iter().map(|tensors| &tensors[name]).collect();
            *tensor = Tensor::stack(&all, 0)?.mean(0)?;
        }
    }
    Ok(average)
}

/// The last ten checkpoints of a run: their mean ψ² is not the mean square under their mean
/// weights, and a recalibration makes it that. Training goes on from the last step's count.
#[test]
fn averaged_checkpoints_are_recalibrated() -> Result<()> {
    let mut model = Model::new()?;
    let mut data = Data::new(6);
    let mut batch = || tensor_of(&mut data, 64);
    // Large steps, so that the weights move from one checkpoint to the next.
    let mut optimizer = AdamW::new_lr(model.varmap.all_vars(), 5e-2)?;
    let folder = TempDir::new().expect("a folder");
    let mut checkpoints = vec![];
    for step in 1..=150 {
        optimizer.backward_step(&model.loss(&batch())?)?;
        if step > 100 && step % 5 == 0 {
            let file = folder.path().join(format!("{step}.safetensors"));
            model.varmap.save(&file)?;
            checkpoints.push(safetensors::load(&file, &CPU)?);
        }
    }
    let fresh = tensor_of(&mut Data::new(8), 4096);
    let last = model.evaluate(&fresh)?;

    let file = folder.path().join("average.safetensors");
    safetensors::save(&average(&checkpoints)?, &file)?;
    model.varmap.load(&file)?;
    assert_eq!(model.norm.steps()?, 150);
    let averaged = model.evaluate(&fresh)?;
    let seen = tensor_of(&mut Data::new(9), 4096);
    let hidden = model.input.forward(&seen)?.detach();
    let actual = to_f64(&hidden.sqr()?.mean(0)?);
    let distance = || -> Result<f64> {
        let phi = to_f64(&model.norm.running_phi()?);
        let squares = phi.iter().zip(&actual).map(|(a, b)| (a / b - 1.).powi(2));
        Ok((squares.sum::<f64>() / Model::WIDTH as f64).sqrt())
    };
    let off = distance()?;
    let nu = model.norm.nu()?;
    {
        let _guard = model.norm.mode().recalibrate_scope();
        for rows in seen.chunk(8, 0)? {
            model.loss(&rows)?;
        }
    }
    assert!(distance()? < 1e-12, "{}", distance()?);
    let recalibrated = model.evaluate(&fresh)?;
    println!(
        "ψ² off by {off:.3}; losses: last {last:.4}, averaged {averaged:.4}, recalibrated \
         {recalibrated:.4}"
    );
    assert!(off > 0.01, "{off}");
    assert!(recalibrated < last, "{recalibrated}, {last}");
    // ν and t are those of the average, and training goes on with them.
    assert_same_bits("ν", &model.norm.nu()?, &nu);
    optimizer.backward_step(&model.loss(&batch())?)?;
    assert_eq!(model.norm.steps()?, 151);
    Ok(())
}

fn tensor_of(data: &mut Data, rows: usize) -> Tensor {
    tensor(&data.normal(rows * SIZE), &[rows, SIZE], DType::F64)
}
