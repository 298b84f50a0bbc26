//! The list of variables for an optimizer.

use crate::common::*;
use candle::{DType, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap, linear};
use candle_powernorm::{PowerNorm, power_norm, trainable_vars};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The names of variables, in the order of the list.
fn names(varmap: &VarMap, vars: &[Var]) -> Vec<String> {
    let data = varmap.data().lock().unwrap();
    vars.iter()
        .map(|var| {
            let (name, _) = data
                .iter()
                .find(|(_, other)| other.id() == var.id())
                .unwrap();
            name.clone()
        })
        .collect()
}

/// A model with two normalizations, one of them at the root of the map, and a step of training.
fn trained(dtype: DType) -> Result<(VarMap, PowerNorm)> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, dtype, &CPU);
    for i in 0..11 {
        linear(2, 4, vb.pp("blocks").pp(i))?;
    }
    let norm = power_norm(4, 1e-5, vb.pp("norm"))?;
    power_norm(4, 1e-5, vb)?;
    let xs = tensor(&Data::new(1).normal(20), &[5, 4], dtype);
    norm.forward(&xs)?.sqr()?.sum_all()?.backward()?;
    Ok((varmap, norm))
}

#[test]
fn parameters_are_listed_by_name_and_statistics_are_not() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let (varmap, _) = trained(dtype)?;
        let vars = trainable_vars(&varmap);
        let listed = names(&varmap, &vars);
        assert!(listed.is_sorted(), "{listed:?}");
        assert!(vars.iter().all(|var| var.dtype() == dtype));
        // Eleven linear layers, and the normalization at the root.
        assert_eq!(listed[0], "bias");
        assert_eq!(
            listed[1..5],
            [
                "blocks.0.bias",
                "blocks.0.weight",
                "blocks.1.bias",
                "blocks.1.weight"
            ]
        );
        assert_eq!(listed[5], "blocks.10.bias");
        assert_eq!(listed[23..], ["norm.bias", "norm.weight", "weight"]);
        assert_eq!(varmap.all_vars().len(), listed.len() + 2 * 4);
        // The list has the map's variables, and no copies.
        vars[0].set(&vars[0].ones_like()?)?;
        assert_eq!(to_f64(&var(&varmap, "bias")), [1.; 4]);
        // Each map has a hasher of its own.
        let (again, _) = trained(dtype)?;
        assert_eq!(names(&again, &trainable_vars(&again)), listed);
    }
    assert!(trainable_vars(&VarMap::new()).is_empty());
    Ok(())
}

/// Only beside a `running_phi` are these the names of statistics.
#[test]
fn a_weight_that_is_named_as_a_statistic_trains() -> Result<()> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
    vb.pp("router").get(4, "groups")?;
    vb.pp("solver").get(4, "iters")?;
    vb.get(4, "not_running_phi")?;
    vb.pp("running_phi").get(4, "weight")?;
    power_norm(4, 1e-5, vb.pp("router").pp("norm"))?;
    let listed = names(&varmap, &trainable_vars(&varmap));
    assert_eq!(
        listed,
        [
            "not_running_phi",
            "router.groups",
            "router.norm.bias",
            "router.norm.weight",
            "running_phi.weight",
            "solver.iters"
        ]
    );
    // A checkpoint may have brought a count as a float.
    let count = Var::zeros(1, DType::F32, &CPU)?;
    (varmap.data().lock().unwrap()).insert("router.norm.iters".into(), count);
    assert_eq!(names(&varmap, &trainable_vars(&varmap)), listed);
    Ok(())
}

/// Weight decay on every variable of the list, as an optimizer that does not ask for gradients.
fn decay(vars: &[Var]) -> Result<()> {
    for var in vars.iter().filter(|var| var.dtype().is_float()) {
        var.set(&(var.as_detached_tensor() * 0.5)?)?;
    }
    Ok(())
}

fn flatten(vars: &[Var]) -> Result<Tensor> {
    let flat: Vec<_> = vars
        .iter()
        .map(|var| var.flatten_all())
        .collect::<Result<_>>()?;
    Tensor::cat(&flat, 0)
}

/// With `all_vars`, ψ² was halved and the joined tensor was rejected.
#[test]
fn an_optimizer_that_takes_every_variable_leaves_the_statistics_alone() -> Result<()> {
    let (varmap, norm) = trained(DType::F32)?;
    let before = state(&norm);
    decay(&trainable_vars(&varmap))?;
    assert_eq!(state(&norm), before);
    assert_eq!(to_f64(norm.weight().unwrap()), [0.5; 4]);
    assert_eq!(flatten(&trainable_vars(&varmap))?.dims(), [11 * 12 + 2 * 8]);

    let phi = to_f64(&norm.running_phi()?);
    decay(&varmap.all_vars())?;
    let half: Vec<_> = phi.iter().map(|phi| phi / 2.).collect();
    assert_eq!(to_f64(&norm.running_phi()?), half);
    let error = message(flatten(&varmap.all_vars()));
    assert!(error.starts_with("dtype mismatch in cat"), "{error}");
    Ok(())
}

#[test]
fn a_panic_under_the_lock_of_the_map_does_not_matter() -> Result<()> {
    let (varmap, _) = trained(DType::F32)?;
    let poison = || {
        let _guard = varmap.data().lock();
        resume_unwind(Box::new(()));
    };
    catch_unwind(AssertUnwindSafe(poison)).unwrap_err();
    assert!(varmap.data().is_poisoned());
    assert_eq!(trainable_vars(&varmap).len(), 2 * 11 + 2 * 2);
    Ok(())
}
