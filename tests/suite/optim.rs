//! Masters in f32 of weights in half precision, and the optimizer whose state can be saved.

use crate::common::*;
use candle::backprop::GradStore;
use candle::{DType, Module, Result, Tensor, Var, safetensors};
use candle_nn::{
    AdamW, Linear, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap, linear, loss::mse,
};
use candle_powernorm::{Masters, SavedAdamW, layer_norm, power_norm, trainable_vars};
use std::path::PathBuf;
use tempfile::TempDir;

/// A map of variables with these values.
fn varmap(vars: &[(&str, &[f64], DType)]) -> VarMap {
    let varmap = VarMap::new();
    for (name, values, dtype) in vars {
        insert(&varmap, name, &tensor(values, &[values.len()], *dtype));
    }
    varmap
}

/// The gradients of Σ factor · var of every variable.
fn gradients(varmap: &VarMap, factor: f64) -> Result<GradStore> {
    let mut gradients = GradStore::default();
    // candle's optimizers do not move a variable without elements.
    let vars = trainable_vars(varmap).into_iter();
    for var in vars.filter(|var| var.elem_count() > 0) {
        gradients.insert(&var, var.ones_like()?.affine(factor, 0.)?);
    }
    Ok(gradients)
}

// Masters

/// A step of SGD at a rate of 1 with a gradient of `change`.
fn change(varmap: &VarMap, masters: &Masters, change: f64) -> Result<()> {
    let mut optimizer = SGD::new(trainable_vars(masters.varmap()), 1.)?;
    let mut gradients = gradients(varmap, -change)?;
    assert!(masters.unscale(&mut gradients, 1.)?);
    masters.step(&mut optimizer, &gradients)
}

/// 1000 updates of 2^-10 move a master by nearly 1. Each by itself is lost in half precision.
#[test]
fn small_updates_add_up() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let (u, _) = precision(dtype);
        let varmap = varmap(&[
            ("half", &[1.], dtype),
            ("single", &[1.], DType::F32),
            ("double", &[1.], DType::F64),
            ("empty", &[], dtype),
        ]);
        let masters = Masters::new(&varmap)?;
        let update = u / 4.;
        for _ in 0..1000 {
            change(&varmap, &masters, update)?;
        }
        // The update in half precision is exact, and so is each sum.
        let exact = 1. + 1000. * update;
        assert_eq!(to_f64(&var(masters.varmap(), "half")), [exact]);
        let rounded = tensor(&[exact], &[1], dtype);
        assert_eq!(to_f64(&var(&varmap, "half")), to_f64(&rounded));
        // Weights of f32 and f64 are their own masters.
        for name in ["single", "double"] {
            assert_eq!(to_f64(&var(&varmap, name)), [exact]);
            let ids = [&varmap, masters.varmap()].map(|map| var(map, name).id());
            assert_eq!(ids[0], ids[1]);
        }
        let dtypes = trainable_vars(masters.varmap())
            .iter()
            .map(|var| var.dtype())
            .collect::<Vec<_>>();
        assert_eq!(dtypes, [DType::F64, dtype, DType::F32, DType::F32]);
    }
    Ok(())
}

/// The statistics of a PowerNorm are not trained, so they have no masters.
#[test]
fn masters_are_of_the_variables_that_train() -> Result<()> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::BF16, &CPU);
    power_norm(4, 1e-5, vb.pp("norm"))?;
    let masters = Masters::new(&varmap)?;
    let mut names: Vec<_> = masters
        .varmap()
        .data()
        .lock()
        .unwrap()
        .keys()
        .cloned()
        .collect();
    names.sort();
    assert_eq!(names, ["norm.bias", "norm.weight"]);
    assert_eq!(format!("{masters:?}"), "Masters { weights: 2 }");
    Ok(())
}

/// A file that is loaded after the masters were made, and one that is loaded between two steps.
/// (Seen, with masters that keep their own values: the first step rounded them into the model, and
/// every weight in half precision had its value from before the file, while weights in f32 had the
/// file's.)
#[test]
fn a_file_that_is_loaded_later_counts() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let names = ["half", "single"];
        let map = |value: f64| {
            varmap(&[
                (names[0], &[value; 2], dtype),
                (names[1], &[value; 2], DType::F32),
            ])
        };
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("model.safetensors");
        map(8.).save(&file)?;
        let mut varmap = map(1.);
        let masters = Masters::new(&varmap)?;
        varmap.load(&file)?;
        for after in [8.5, 9.] {
            change(&varmap, &masters, 0.5)?;
            for name in names {
                assert_eq!(to_f64(&var(&varmap, name)), [after; 2], "{name}");
            }
        }
        varmap.load(&file)?;
        change(&varmap, &masters, 0.5)?;
        for name in names {
            assert_eq!(to_f64(&var(&varmap, name)), [8.5; 2], "{name}");
        }
    }
    Ok(())
}

/// A weight that is set in one element: the others keep the digits of their masters.
#[test]
fn elements_that_are_not_set_keep_their_digits() -> Result<()> {
    let varmap = varmap(&[("weight", &[1., 1.], DType::BF16)]);
    let masters = Masters::new(&varmap)?;
    let small = 2f64.powi(-10);
    change(&varmap, &masters, small)?;
    var(&varmap, "weight").set(&tensor(&[1., f64::NAN], &[2], DType::BF16))?;
    change(&varmap, &masters, small)?;
    let [first, second] = to_f64(&var(masters.varmap(), "weight"))[..] else {
        unreachable!()
    };
    assert_eq!(first, 1. + 2. * small);
    assert!(second.is_nan()); // as the weight would be without masters
    Ok(())
}

/// An optimizer that fails after it has moved a master.
struct Fails(Vec<Var>);

impl Optimizer for Fails {
    type Config = ();

    fn new(vars: Vec<Var>, _: ()) -> Result<Self> {
        Ok(Self(vars))
    }

    fn step(&mut self, _: &GradStore) -> Result<()> {
        self.0[0].set(&self.0[0].ones_like()?)?;
        candle::bail!("no step")
    }

    fn learning_rate(&self) -> f64 {
        0.
    }

    fn set_learning_rate(&mut self, _: f64) {}
}

#[test]
fn a_step_that_fails_is_forgotten() -> Result<()> {
    let varmap = varmap(&[("weight", &[4.], DType::BF16)]);
    let masters = Masters::new(&varmap)?;
    let mut optimizer = Fails::new(trainable_vars(masters.varmap()), ())?;
    let text = message(masters.step(&mut optimizer, &GradStore::default()));
    assert_eq!(text, "no step");
    change(&varmap, &masters, 2.)?;
    assert_eq!(to_f64(&var(&varmap, "weight")), [6.]);
    Ok(())
}

/// The gradients come to the masters in f32, and one that is not finite is noticed wherever it is.
#[test]
fn gradients_are_unscaled() -> Result<()> {
    let scale = 1024.;
    let varmap = varmap(&[
        ("a", &[0.; 3], DType::F16),
        ("b", &[0.; 3], DType::F32),
        ("c", &[0.; 3], DType::F64),
        ("unused", &[0.; 3], DType::F16),
    ]);
    let masters = Masters::new(&varmap)?;
    let unscaled = |name: &str, values: [f64; 3]| -> Result<(bool, GradStore)> {
        let mut gradients = GradStore::default();
        for other in ["a", "b", "c"] {
            let values = if other == name {
                values
            } else {
                [1024., 0., 1.]
            };
            let var = var(&varmap, other);
            gradients.insert(&var, tensor(&values, &[3], var.dtype()));
        }
        let finite = masters.unscale(&mut gradients, scale)?;
        Ok((finite, gradients))
    };
    for name in ["a", "b", "c"] {
        // Largest numbers, whose sum overflows.
        let largest = [("a", 65504.), ("b", 2e38), ("c", 1e308)];
        let (_, largest) = largest.into_iter().find(|(of, _)| *of == name).unwrap();
        let (finite, gradients) = unscaled(name, [largest; 3])?;
        assert!(finite, "{name}");
        let gradient = gradients.get(&var(masters.varmap(), name)).unwrap();
        assert_ne!(gradient.dtype(), DType::F16);
        assert!(
            to_f64(gradient)
                .iter()
                .all(|g| (g * scale / largest - 1.).abs() < 1e-6)
        );
        assert!(gradients.get(&var(masters.varmap(), "unused")).is_none());
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(!unscaled(name, [1., bad, 1.])?.0, "{name}: {bad}");
            assert!(!unscaled(name, [-bad, bad, 1.])?.0, "{name}: {bad}");
        }
    }
    // A half-precision gradient is unscaled after it has become f32: 1 / 2^24 is 0 in f16.
    let mut gradients = GradStore::default();
    gradients.insert(&var(&varmap, "a"), tensor(&[1.; 3], &[3], DType::F16));
    assert!(masters.unscale(&mut gradients, 2f64.powi(30))?);
    let gradient = gradients.get(&var(masters.varmap(), "a")).unwrap();
    assert_eq!(to_f64(gradient), [2f64.powi(-30); 3]);
    Ok(())
}

// The optimizer

/// A regression whose layers can be told apart.
struct Model {
    input: Linear,
    hidden: Linear,
    norm: candle_powernorm::LayerNorm,
    output: Linear,
}

impl Model {
    fn new(varmap: &VarMap, dtype: DType) -> Result<Self> {
        let vb = VarBuilder::from_varmap(varmap, dtype, &CPU);
        let model = Self {
            input: linear(8, 8, vb.pp("input"))?,
            hidden: linear(8, 8, vb.pp("hidden"))?,
            norm: layer_norm(8, 1e-5, vb.pp("norm"))?,
            output: linear(8, 1, vb.pp("output"))?,
        };
        let mut data = Data::new(1);
        for var in trainable_vars(varmap) {
            let values = data.uniform(var.elem_count(), -0.5, 0.5);
            var.set(&tensor(&values, var.dims(), dtype))?;
        }
        Ok(model)
    }

    fn gradients(&self, step: u64) -> Result<GradStore> {
        let dtype = self.norm.weight().dtype();
        let xs = tensor(&Data::new(step).normal(16 * 8), &[16, 8], DType::F64);
        let targets = xs.sum_keepdim(1)?;
        let xs = self
            .hidden
            .forward(&self.input.forward(&xs.to_dtype(dtype)?)?)?;
        let ys = self.output.forward(&self.norm.forward(&xs)?)?;
        mse(&ys.to_dtype(DType::F64)?, &targets)?.backward()
    }
}

const PARAMS: ParamsAdamW = ParamsAdamW {
    lr: 1e-2,
    beta1: 0.8,
    beta2: 0.95,
    eps: 1e-6,
    weight_decay: 0.05,
};

/// Bits of all weights.
fn weights(varmap: &VarMap) -> Vec<Vec<u64>> {
    trainable_vars(varmap).iter().map(|var| bits(var)).collect()
}

fn train(model: &Model, optimizer: &mut impl Optimizer, steps: std::ops::Range<u64>) -> Result<()> {
    for step in steps {
        optimizer.set_learning_rate(1e-2 / (1. + step as f64));
        optimizer.step(&model.gradients(step)?)?;
    }
    Ok(())
}

#[test]
fn it_takes_the_steps_of_candle_s_adamw() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let (ours, theirs) = (VarMap::new(), VarMap::new());
        let models = [Model::new(&ours, dtype)?, Model::new(&theirs, dtype)?];
        let start = weights(&ours);
        train(
            &models[0],
            &mut SavedAdamW::new(trainable_vars(&ours), PARAMS)?,
            0..12,
        )?;
        train(
            &models[1],
            &mut AdamW::new(trainable_vars(&theirs), PARAMS)?,
            0..12,
        )?;
        assert_eq!(weights(&ours), weights(&theirs), "{dtype:?}");
        assert!(
            weights(&ours)
                .iter()
                .zip(&start)
                .all(|(after, before)| after != before)
        );
    }
    // A tied weight, which `all_vars` lists twice, is moved once. Integers are left out.
    let varmap = varmap(&[("a", &[1.], DType::F32)]);
    let tied = var(&varmap, "a");
    varmap
        .data()
        .lock()
        .unwrap()
        .insert("b".to_owned(), tied.clone());
    insert(&varmap, "count", &Tensor::zeros(1, DType::I64, &CPU)?);
    let mut optimizer = SavedAdamW::new(varmap.all_vars(), PARAMS)?;
    optimizer.step(&gradients(&varmap, 1.)?)?;
    let expected = 1. * (1. - 1e-2 * 0.05) - 1e-2 / (1. + 1e-6);
    assert!((to_f64(&tied)[0] - expected).abs() < 1e-7);
    assert_eq!(optimizer.learning_rate(), 1e-2);
    Ok(())
}

/// Files of a model and its optimizer, after five steps.
struct Saved {
    _folder: TempDir,
    weights: PathBuf,
    averages: PathBuf,
    /// The weights after five more.
    expected: Vec<Vec<u64>>,
}

impl Saved {
    fn new() -> Result<Self> {
        let folder = TempDir::new().unwrap();
        let [file, averages] = ["weights", "averages"].map(|name| folder.path().join(name));
        let varmap = VarMap::new();
        let model = Model::new(&varmap, DType::F32)?;
        let mut optimizer = SavedAdamW::new(trainable_vars(&varmap), PARAMS)?;
        train(&model, &mut optimizer, 0..5)?;
        varmap.save(&file)?;
        optimizer.save(&varmap, &averages)?;
        train(&model, &mut optimizer, 5..10)?;
        Ok(Self {
            _folder: folder,
            weights: file,
            averages,
            expected: weights(&varmap),
        })
    }

    fn resume(&self) -> Result<(VarMap, Model)> {
        let mut varmap = VarMap::new();
        let model = Model::new(&varmap, DType::F32)?;
        varmap.load(&self.weights)?;
        Ok((varmap, model))
    }
}

#[test]
fn a_resumed_run_has_the_same_bits() -> Result<()> {
    let saved = Saved::new()?;
    let (varmap, model) = saved.resume()?;
    // In another order, which names are for.
    let vars = trainable_vars(&varmap).into_iter().rev().collect();
    let mut optimizer = SavedAdamW::new(vars, PARAMS)?;
    optimizer.load(&varmap, &saved.averages)?;
    train(&model, &mut optimizer, 5..10)?;
    assert_eq!(weights(&varmap), saved.expected);

    // A layer is frozen in the second run, as the documentation says: the others have their own
    // averages.
    let (varmap, model) = saved.resume()?;
    let before = weights(&varmap);
    let mut optimizer = SavedAdamW::new(trainable_vars(&varmap), PARAMS)?;
    optimizer.load(&varmap, &saved.averages)?;
    let mut gradients = model.gradients(5)?;
    for name in ["hidden.bias", "hidden.weight"] {
        gradients.remove(&var(&varmap, name));
    }
    optimizer.step(&gradients)?;
    let (moved, names) = (weights(&varmap), 0..before.len());
    let still: Vec<_> = names.filter(|&k| moved[k] == before[k]).collect();
    assert_eq!(still, [0, 1]);
    Ok(())
}

/// The second run freezes a layer by leaving it out of the optimizer's list. (Seen, with averages
/// that are named by their place in the list: `input.weight` got those of `hidden.weight`, which
/// has its shape, in silence.)
#[test]
fn a_list_of_other_variables_is_rejected() -> Result<()> {
    let saved = Saved::new()?;
    let (varmap, _) = saved.resume()?;
    let others = |frozen: &str| {
        let vars = trainable_vars(&varmap).into_iter();
        let frozen = var(&varmap, frozen).id();
        vars.filter(|var| var.id() != frozen).collect::<Vec<_>>()
    };
    let mut optimizer = SavedAdamW::new(others("hidden.weight"), PARAMS)?;
    let text = message(optimizer.load(&varmap, &saved.averages));
    let expected =
        "got none of [], and [\"hidden.weight.first\", \"hidden.weight.second\"] besides";
    assert!(text.contains(expected), "{text}");

    let fewer = saved.averages.with_file_name("fewer");
    optimizer.save(&varmap, &fewer)?;
    let mut optimizer = SavedAdamW::new(trainable_vars(&varmap), PARAMS)?;
    let text = message(optimizer.load(&varmap, &fewer));
    let expected =
        "got none of [\"hidden.weight.first\", \"hidden.weight.second\"], and [] besides";
    assert!(text.contains(expected), "{text}");
    Ok(())
}

#[test]
fn files_that_do_not_fit_change_nothing() -> Result<()> {
    let saved = Saved::new()?;
    let (varmap, model) = saved.resume()?;
    let mut optimizer = SavedAdamW::new(trainable_vars(&varmap), PARAMS)?;
    optimizer.load(&varmap, &saved.averages)?;
    let other = saved.averages.with_file_name("other");
    let tensors = || safetensors::load(&saved.averages, &CPU);
    let step = Tensor::new(&[7i64], &CPU)?;
    let (half, scalar) = (DType::BF16, Tensor::zeros((), DType::F32, &CPU)?);
    for (name, wrong, expected) in [
        (
            "output.weight.second",
            Some(scalar),
            "expected output.weight.second of ([1, 8], F32)",
        ),
        (
            "input.bias.first",
            Some(tensors()?["input.bias.first"].to_dtype(half)?),
            "got ([8], BF16)",
        ),
        ("step", None, "expected a step count"),
        ("step", Some((&step * -1.)?), "got [-7]"),
        ("step", Some(Tensor::cat(&[&step, &step], 0)?), "got [7, 7]"),
    ] {
        let mut tensors = tensors()?;
        tensors.remove(name);
        tensors.extend(wrong.map(|wrong| (name.to_owned(), wrong)));
        // The rest of the file has other values.
        for tensor in tensors
            .values_mut()
            .filter(|tensor| tensor.elem_count() == 64)
        {
            *tensor = tensor.ones_like()?;
        }
        safetensors::save(&tensors, &other)?;
        let text = message(optimizer.load(&varmap, &other));
        assert!(text.contains(expected), "{text}");
    }
    let text = message(optimizer.save(&VarMap::new(), &other));
    assert!(
        text.contains("expected the optimizer's variables in the map"),
        "{text}"
    );
    train(&model, &mut optimizer, 5..10)?;
    assert_eq!(weights(&varmap), saved.expected);
    Ok(())
}

/// A run in half precision goes on from its three files with the same bits.
#[test]
fn a_run_with_masters_is_resumed() -> Result<()> {
    let folder = TempDir::new().unwrap();
    let [file, precise, averages] = ["a", "b", "c"].map(|name| folder.path().join(name));
    let build = || -> Result<(VarMap, Model, Masters, SavedAdamW)> {
        let varmap = VarMap::new();
        let model = Model::new(&varmap, DType::BF16)?;
        let masters = Masters::new(&varmap)?;
        let optimizer = SavedAdamW::new(trainable_vars(masters.varmap()), PARAMS)?;
        Ok((varmap, model, masters, optimizer))
    };
    let train = |model: &Model, masters: &Masters, optimizer: &mut SavedAdamW| -> Result<()> {
        for step in 0..5 {
            let mut gradients = model.gradients(step)?;
            assert!(masters.unscale(&mut gradients, 1.)?);
            masters.step(optimizer, &gradients)?;
        }
        Ok(())
    };
    let (varmap, model, masters, mut optimizer) = build()?;
    train(&model, &masters, &mut optimizer)?;
    varmap.save(&file)?;
    masters.varmap().save(&precise)?;
    optimizer.save(masters.varmap(), &averages)?;
    train(&model, &masters, &mut optimizer)?;
    let expected = weights(masters.varmap());
    for masters_first in [false, true] {
        let (mut varmap, model, masters, mut optimizer) = build()?;
        if masters_first {
            masters.varmap().clone().load(&precise)?;
            varmap.load(&file)?;
        } else {
            varmap.load(&file)?;
            masters.varmap().clone().load(&precise)?;
        }
        optimizer.load(masters.varmap(), &averages)?;
        train(&model, &masters, &mut optimizer)?;
        assert_eq!(weights(masters.varmap()), expected);
    }
    Ok(())
}
