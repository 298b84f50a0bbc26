//! Layers on frozen tensors, as in a base model under adapters: a `Mode` in training does not train
//! statistics that no `VarMap` saves.

use crate::common::*;
use candle::{DType, Module, Result, Tensor, Var, safetensors};
use candle_nn::{AdamW, Init, ModuleT, Optimizer, VarBuilder, VarMap};
use candle_powernorm::{
    Communicator, Mode, PowerNorm, PowerNormBuilder, PowerNormConfig, PowerNormT, Ranks, power_norm,
};
use std::collections::HashMap;
use tempfile::TempDir;

const SIZE: usize = 8;

/// A warm-up that is over before the layer is frozen.
fn settings() -> PowerNormConfig {
    1e-5.with_groups(Some(2)).with_warm_up(2)
}

/// A layer after a few steps of training, and its variables.
fn trained(config: PowerNormConfig, dtype: DType) -> Twin {
    let mut data = Data::new(1);
    let twin = Twin::new(&mut data, SIZE, config, dtype);
    for _ in 0..3 {
        let batch = Batch::random(&mut data, &[6, SIZE], dtype, false);
        run(&twin.layer, &batch, true);
    }
    twin
}

/// The trained layer on frozen tensors, once for each way to build it.
fn frozen_layers(trained: &Twin, dtype: DType, mode: &Mode) -> Vec<(&'static str, PowerNorm)> {
    let config = *trained.layer.config();
    let tensors = frozen(&trained.varmap);
    let file = ::safetensors::serialize(&tensors, None).unwrap();
    let from_tensors = VarBuilder::from_tensors(tensors, dtype, &CPU);
    let from_file = VarBuilder::from_buffered_safetensors(file, dtype, &CPU).unwrap();
    let norms = PowerNormBuilder::new(config, mode);
    let mut layers = vec![
        ("tensors", norms.build(SIZE, from_tensors).unwrap()),
        ("a file", norms.build(SIZE, from_file).unwrap()),
    ];
    if let Some(weight) = trained.layer.weight() {
        let bias = trained.layer.bias().map(Tensor::detach);
        let phi = trained.layer.running_phi().unwrap();
        // A variable of ψ² beside a weight that is none would be saved without ν and t.
        for phi in [phi.clone(), Var::from_tensor(&phi).unwrap().into_inner()] {
            let layer = PowerNorm::new(weight.detach(), bias.clone(), phi, config).unwrap();
            layers.push(("`PowerNorm::new`", layer.with_mode(mode)));
        }
    }
    layers
}

const KEPT: [bool; 5] = [true, true, false, true, true];
const MASKED: &str = "forward_masked, with padding";

/// Every forward of a layer: of itself, and of generic code that passes `train: true`.
fn forwards(layer: &PowerNorm, xs: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
    let keep = keep(&KEPT, &[KEPT.len()]);
    let generic = PowerNormT(layer.clone());
    Ok(vec![
        ("forward", layer.forward(xs)?),
        ("forward_masked", layer.forward_masked(xs, None)?),
        (MASKED, layer.forward_masked(xs, &keep)?),
        (
            "forward_residual",
            layer.forward_residual(xs, &xs.zeros_like()?, None)?.0,
        ),
        ("forward_t", layer.forward_t(xs, true)?),
        ("PowerNormT", ModuleT::forward_t(&generic, xs, true)?),
        ("apply_t", xs.apply_t(layer, true)?),
    ])
}

/// Before, each of these calls trained a private copy of the statistics.
#[test]
fn a_frozen_layer_evaluates_in_training_too() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        for parameters in PARAMETERS {
            let trained = trained(settings().with_parameters(parameters), dtype);
            let batch = Batch::random(&mut Data::new(2), &[5, SIZE], dtype, false);
            let evaluation = run(&trained.layer, &batch, false);
            let padded = batch.clone().masked(&KEPT);
            let padded = run(&trained.layer, &padded, false);
            let mode = Mode::train();
            for (built_from, layer) in frozen_layers(&trained, dtype, &mode) {
                assert!(layer.mode().is_training());
                let before = state(&layer);
                let xs = Var::from_tensor(&batch.xs)?;
                for (call, y) in forwards(&layer, &xs)? {
                    let what = format!("{dtype:?}, {parameters:?}, {built_from}, {call}");
                    let dx = backward(&y, &batch.dy).remove(&xs).unwrap();
                    same_state(&what, &state(&layer), &before);
                    let expected = match call {
                        MASKED => &padded,
                        _ => &evaluation,
                    };
                    assert_same_bits(&what, &y, &expected.y);
                    assert_same_bits(&what, &dx, &expected.dx);
                }
            }
        }
    }
    Ok(())
}

/// As a trainable layer does, and without a word to the clones that were made before.
#[test]
fn a_frozen_layer_trains_if_it_is_told_so_by_name() -> Result<()> {
    let trained = trained(settings(), DType::F64);
    // Tensors of their own: the trained layer's variables move.
    let tensors: HashMap<_, _> = (frozen(&trained.varmap).into_iter())
        .map(|(name, tensor)| (name, tensor.copy().unwrap()))
        .collect();
    let phi = bits(&tensors["running_phi"]);
    let mode = Mode::train();
    let layer = power_norm(
        SIZE,
        settings(),
        VarBuilder::from_tensors(tensors.clone(), DType::F64, &CPU),
    )?;
    let clone = layer.clone().with_mode(&mode);
    let layer = layer.with_unsaved_statistics().with_mode(&mode);
    let mut data = Data::new(6);
    for _ in 0..3 {
        let batch = Batch::random(&mut data, &[5, SIZE], DType::F64, false);
        let xs = Var::from_tensor(&batch.xs)?;
        let y = layer.forward(&xs)?;
        let dx = backward(&y, &batch.dy).remove(&xs).unwrap();
        let expected = run(&trained.layer, &batch, true);
        assert_same_bits("y", &y, &expected.y);
        assert_same_bits("dx", &dx, &expected.dx);
        assert_eq!(state(&layer), state(&trained.layer));

        let before = state(&layer);
        clone.forward(&xs)?;
        {
            let _guard = mode.eval_scope();
            layer.forward(&xs)?;
        }
        layer.forward_t(&xs, false)?;
        assert_eq!(state(&layer), before);
    }
    assert_ne!(bits(&layer.running_phi()?), phi);
    assert_eq!(bits(&tensors["running_phi"]), phi, "the layer has a copy");
    Ok(())
}

/// An optimizer may move a frozen layer's neighbours, and a weight of its own that is a variable.
#[test]
fn a_variable_beside_frozen_statistics_gets_its_gradient() -> Result<()> {
    let trained = trained(settings(), DType::F64);
    let mut tensors = frozen(&trained.varmap);
    let weight = Var::from_tensor(&tensors["weight"])?;
    tensors.insert("weight".to_owned(), weight.as_tensor().clone());
    let vb = VarBuilder::from_tensors(tensors, DType::F64, &CPU);
    let layer = power_norm(SIZE, settings(), vb)?.with_mode(&Mode::train());
    let batch = Batch::random(&mut Data::new(3), &[5, SIZE], DType::F64, false);
    let expected = run(&trained.layer, &batch, false).dweight.unwrap();
    let gradients = backward(&layer.forward(&batch.xs)?, &batch.dy);
    assert_same_bits("dweight", gradients.get(&weight).unwrap(), &expected);
    assert_eq!(state(&layer), state(&trained.layer));
    Ok(())
}

/// Its statistics do not move, so there is nothing to reject.
#[test]
fn a_frozen_layer_folds_whatever_its_mode() -> Result<()> {
    let trained = trained(settings(), DType::F32);
    let next = candle_nn::Linear::new(Tensor::ones((2, SIZE), DType::F32, &CPU)?, None);
    let expected = {
        let _guard = trained.layer.mode().eval_scope();
        trained.layer.fold_into(&next)?
    };
    let mode = Mode::train();
    for (built_from, layer) in frozen_layers(&trained, DType::F32, &mode) {
        let folded = layer.fold_into(&next)?;
        assert_same_bits(built_from, folded.weight(), expected.weight());
        let _guard = mode.recalibrate_scope();
        let text = "a layer in evaluation to fold, got one whose statistic moves: \
                    call `mode.set_training(false)`, or end the recalibration, first";
        rejected(layer.fold_into(&next), text);
    }
    Ok(())
}

/// Ranks that fail in every sum.
struct Unreachable;

impl Communicator for Unreachable {
    fn world_size(&self) -> usize {
        2
    }

    fn all_reduce_sum(&self, _: &Tensor) -> Result<Tensor> {
        candle::bail!("a sum over ranks")
    }
}

/// An evaluation is local.
#[test]
fn a_frozen_layer_exchanges_nothing() -> Result<()> {
    let trained = trained(settings(), DType::F32);
    let ranks = Ranks::new(Unreachable);
    let xs = Tensor::ones((5, SIZE), DType::F32, &CPU)?;
    for (built_from, layer) in frozen_layers(&trained, DType::F32, &Mode::train()) {
        let y = layer.with_ranks(&ranks).forward(&xs)?;
        assert_same_bits(built_from, &y, &trained.layer.forward_t(&xs, false)?);
    }
    Ok(())
}

/// A recalibration is asked for by name, so it moves ψ² of frozen layers, and only ψ².
#[test]
fn a_recalibration_reaches_frozen_layers() -> Result<()> {
    let trained = trained(settings(), DType::F64);
    let mut data = Data::new(4);
    let batches = [(); 3].map(|()| Batch::random(&mut data, &[5, SIZE], DType::F64, false));
    let recalibrate = |layer: &PowerNorm| -> Result<()> {
        let _guard = layer.mode().recalibrate_scope();
        batches.iter().try_for_each(|batch| {
            layer.forward(&batch.xs)?;
            layer.forward_t(&batch.xs, true).map(drop)
        })
    };
    let layers = frozen_layers(&trained, DType::F64, &Mode::train());
    let before = state(&trained.layer);
    {
        let _guard = trained.layer.mode().recalibrate_scope();
        for batch in &batches {
            trained.layer.forward(&batch.xs)?;
        }
    }
    let expected = state(&trained.layer);
    assert_ne!(expected.0, before.0);
    for (built_from, layer) in layers {
        let (_, nu, t) = state(&layer);
        recalibrate(&layer)?;
        assert_eq!(state(&layer), (expected.0.clone(), nu, t), "{built_from}");
    }
    Ok(())
}

/// A frozen projection and a frozen normalization, with a low-rank adapter beside the projection.
struct Model {
    projection: Tensor,
    down: Tensor,
    up: Tensor,
    norm: PowerNorm,
}

impl Model {
    const RANK: usize = 2;

    fn new(norms: &PowerNormBuilder, base: VarBuilder, adapter: VarBuilder) -> Result<Self> {
        let small = Init::Randn {
            mean: 0.,
            stdev: 0.1,
        };
        Ok(Self {
            projection: base.get((SIZE, SIZE), "projection")?,
            norm: norms.build(SIZE, base.pp("norm"))?,
            down: adapter.get_with_hints((SIZE, Self::RANK), "down", small)?,
            up: adapter.get_with_hints((Self::RANK, SIZE), "up", Init::Const(0.))?,
        })
    }
}

impl Module for Model {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let change = xs.matmul(&self.down)?.matmul(&self.up)?;
        self.norm.forward(&(xs.matmul(&self.projection)? + change)?)
    }
}

/// Before, ψ² rose from 1 to 65 in such a run, and a reloaded model was 5 to 10 times off, without
/// an error.
#[test]
fn adapters_are_all_that_trains_and_all_that_is_saved() -> Result<()> {
    let folder = TempDir::new().unwrap();
    let [base, saved] = ["base", "adapter"].map(|name| folder.path().join(name));
    let mut data = Data::new(5);
    let (_, varmap) = layer(SIZE, 1e-5.with_groups(None), DType::F32);
    let mut tensors: HashMap<_, _> = (frozen(&varmap).into_iter())
        .map(|(name, tensor)| (format!("norm.{name}"), tensor))
        .collect();
    let projection = tensor(&data.normal(SIZE * SIZE), &[SIZE, SIZE], DType::F32);
    tensors.insert("projection".to_owned(), projection);
    safetensors::save(&tensors, &base)?;

    let mode = Mode::train();
    let norms = PowerNormBuilder::new(1e-5.with_groups(None), &mode);
    let build = || -> Result<(Model, VarMap)> {
        let file = std::fs::read(&base)?;
        let base = VarBuilder::from_buffered_safetensors(file, DType::F32, &CPU)?;
        let varmap = VarMap::new();
        let model = Model::new(&norms, base, trainable(&varmap, DType::F32))?;
        Ok((model, varmap))
    };
    let (model, varmap) = build()?;
    // Far from the mean square of 1 that the fresh statistics say.
    let xs = (tensor(&data.normal(64 * SIZE), &[64, SIZE], DType::F32) * 3.)?;
    let targets = xs.tanh()?;
    let loss = |model: &Model| candle_nn::loss::mse(&model.forward(&xs)?, &targets);
    let first = loss(&model)?.to_scalar::<f32>()?;
    let mut optimizer = AdamW::new_lr(varmap.all_vars(), 1e-2)?;
    for _ in 0..20 {
        optimizer.backward_step(&loss(&model)?)?;
    }
    assert!(loss(&model)?.to_scalar::<f32>()? < first);
    assert_eq!(to_f64(&model.norm.running_phi()?), [1.; SIZE]);
    assert_eq!(model.norm.steps()?, 0);

    varmap.save(&saved)?;
    let mut names: Vec<_> = safetensors::load(&saved, &CPU)?.into_keys().collect();
    names.sort();
    assert_eq!(names, ["down", "up"]);
    let (again, mut varmap) = build()?;
    varmap.load(&saved)?;
    mode.set_training(false);
    assert_same_bits("y", &again.forward(&xs)?, &model.forward(&xs)?);
    Ok(())
}
