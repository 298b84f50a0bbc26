//! The list of variables for an optimizer, and of those that a backward does not train.

use crate::common::*;
use candle::backprop::GradStore;
use candle::{DType, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap, linear};
use candle_powernorm::{Masters, PowerNorm, RmsNorm, Untrained, layer_norm, power_norm};
use candle_powernorm::{trainable_vars, untrained};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc;
use std::time::Duration;

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

/// Tied weights: one variable under several names. (Seen: it was listed under each, so an optimizer
/// moved it twice a step, decayed it twice, and a norm of the gradients counted it twice.)
#[test]
fn a_variable_under_two_names_is_listed_once() -> Result<()> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
    vb.get((6, 4), "wte.weight")?;
    vb.get(4, "norm.weight")?;
    let tied = var(&varmap, "wte.weight");
    for name in ["lm_head.weight", "z.weight"] {
        (varmap.data().lock().unwrap()).insert(name.into(), tied.clone());
    }
    let vars = trainable_vars(&varmap);
    // `lm_head.weight`, its first name, sorts before `norm.weight`.
    let ids: Vec<_> = vars.iter().map(|var| var.id()).collect();
    assert_eq!(ids, [tied.id(), var(&varmap, "norm.weight").id()]);

    // The same values in two variables are two.
    let copy = Var::from_tensor(&tied.as_detached_tensor().copy()?)?;
    (varmap.data().lock().unwrap()).insert("other.weight".into(), copy);
    assert_eq!(trainable_vars(&varmap).len(), 3);
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

/// A thread that holds the lock of a map would wait for itself. Functions that return a `Result`
/// give up, and the list of variables says why it waits. (Seen: neither said a word, forever.)
#[test]
fn a_lock_that_is_held_is_reported() -> Result<()> {
    let (varmap, _) = trained(DType::F32)?;
    let held = "expected the lock of a VarMap, got it held for 10s: drop the guard";
    let gradients = GradStore::default();
    let guard = varmap.data().lock().unwrap();
    // Each waits ten seconds, side by side.
    std::thread::scope(|scope| {
        // What this prints goes past the harness, so a process of its own is read.
        let list = scope.spawn(|| run_with(HOLDS, "1", &["vars::a_list_waits_for_the_lock"]));
        let masters = scope.spawn(|| message(Masters::new(&varmap)));
        let text = message(untrained(&varmap, &gradients));
        assert!(text.contains(held), "{text}");
        let text = masters.join().unwrap();
        assert!(text.contains(held), "{text}");
        let (passed, text) = list.join().unwrap();
        assert!(passed, "{text}");
        assert!(text.contains(held), "{text}");
    });
    drop(guard);
    assert!(!untrained(&varmap, &gradients)?.is_empty());
    Ok(())
}

/// Set in the process that [`a_lock_that_is_held_is_reported`] starts.
const HOLDS: &str = "CANDLE_POWERNORM_TEST_HOLDS";

/// Another thread holds the lock for longer than the limit, as one that saves a large file may. The
/// list is complete nevertheless.
#[test]
fn a_list_waits_for_the_lock() -> Result<()> {
    let time = match std::env::var_os(HOLDS) {
        Some(_) => Duration::from_secs(11),
        None => Duration::from_millis(50),
    };
    let (varmap, _) = trained(DType::F32)?;
    let (locked, is_locked) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _guard = varmap.data().lock();
            locked.send(()).unwrap();
            std::thread::sleep(time);
        });
        is_locked.recv().unwrap();
        assert_eq!(trainable_vars(&varmap).len(), 2 * 11 + 2 * 2);
    });
    Ok(())
}

// Variables that a backward does not train

/// The printed list, after a backward of `loss`.
fn lines(varmap: &VarMap, loss: &Tensor) -> Result<Vec<String>> {
    let found = untrained(varmap, &loss.backward()?)?;
    Ok(found.iter().map(ToString::to_string).collect())
}

#[test]
fn variables_without_a_gradient_or_with_zeros_are_listed() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let varmap = VarMap::new();
        let vb = trainable(&varmap, dtype);
        let xs = tensor(&Data::new(2).normal(20), &[5, 4], dtype);
        let trained = linear(4, 6, vb.pp("trained"))?;
        // In half precision, terms of a random layer's gradient may cancel.
        let mut data = Data::new(4);
        for (name, shape) in [("trained.weight", &[6, 4][..]), ("trained.bias", &[6])] {
            let values = data.normal(shape.iter().product());
            var(&varmap, name).set(&tensor(&values, shape, dtype))?;
        }
        let norm = power_norm(6, 1e-5, vb.pp("norm"))?;
        let unused = linear(6, 2, vb.pp("b_unused"))?;
        let constant = vb.get(6, "a_constant")?;
        let embedding = vb.get((4, 6), "embedding")?;
        let scalar = vb.get((), "scalar")?;
        vb.get((0, 6), "empty")?;

        let ids = Tensor::new(&[1u32, 3, 1], &CPU)?;
        let ys = norm.forward(&trained.forward(&xs)?)?;
        let dy = tensor(&Data::new(3).normal(30), &[5, 6], dtype);
        let unused = unused.forward(&ys)?.detach().sum_all()?;
        let ys = ((ys * dy)?.sum_all()? + unused)?;
        let rows = embedding.embedding(&ids)?.sum_all()?;
        // candle drops the gradient of a product with a number 0, and keeps that with a tensor.
        let zeros = |xs: Tensor| (&xs * xs.zeros_like()?)?.sum_all();
        let loss = ((ys + rows)? + (zeros(constant)? + zeros(scalar)?)?)?;

        let found = untrained(&varmap, &loss.backward()?)?;
        let name = |name: &str| name.to_owned();
        assert_eq!(
            found,
            [
                Untrained::ZeroGradient {
                    name: name("a_constant")
                },
                Untrained::NoGradient {
                    name: name("b_unused.bias")
                },
                Untrained::NoGradient {
                    name: name("b_unused.weight")
                },
                Untrained::ZeroRows {
                    name: name("embedding"),
                    rows: 2,
                    of: 4
                },
                Untrained::ZeroGradient {
                    name: name("scalar")
                },
            ]
        );
        assert_eq!(found[2].name(), "b_unused.weight");
        assert_eq!(
            lines(&varmap, &loss)?,
            [
                "a_constant: gradient 0",
                "b_unused.bias: no gradient",
                "b_unused.weight: no gradient",
                "embedding: gradient 0 in 2 of 4 rows",
                "scalar: gradient 0",
            ]
        );
    }
    Ok(())
}

/// A gradient is 0 only if each element is: not by underflow, and not if it is NaN or infinite.
#[test]
fn gradients_that_move_a_variable_are_not_listed() -> Result<()> {
    for (dtype, tiny) in [
        (DType::F32, 1e-45),
        (DType::F64, 5e-324),
        (DType::BF16, 1e-40),
        (DType::F16, 6e-8),
    ] {
        for value in [tiny, -tiny, f64::NAN, f64::INFINITY] {
            let varmap = VarMap::new();
            let weight = trainable(&varmap, dtype).get(2, "weight")?;
            let mut gradients = weight.sum_all()?.backward()?;
            gradients.insert(&weight, tensor(&[value, value], &[2], dtype));
            assert_eq!(untrained(&varmap, &gradients)?, [], "{dtype:?}, {value}");
            gradients.insert(&weight, tensor(&[0., value], &[2], dtype));
            let found = untrained(&varmap, &gradients)?;
            assert_eq!(found[0].to_string(), "weight: gradient 0 in 1 of 2 rows");
            // The sum of a row's magnitudes counts, so that values do not cancel.
            let [row, zeros] = [[value, -value], [0., -0.]].map(|row| tensor(&row, &[2], dtype));
            let matrix = trainable(&varmap, dtype).get((2, 2), "matrix")?;
            gradients.insert(&matrix, Tensor::stack(&[&row, &zeros], 0)?);
            let found = untrained(&varmap, &gradients)?;
            assert_eq!(found[0].to_string(), "matrix: gradient 0 in 1 of 2 rows");
        }
    }
    Ok(())
}

#[test]
fn a_tied_variable_and_a_variable_of_integers() -> Result<()> {
    let varmap = VarMap::new();
    let vb = trainable(&varmap, DType::F32);
    let tied = vb.get((2, 2), "wte.weight")?;
    let other = vb.get(2, "other")?;
    insert(&varmap, "positions", &Tensor::new(&[0u32, 1], &CPU)?);
    let named = var(&varmap, "wte.weight");
    (varmap.data().lock().unwrap()).insert("lm_head.weight".into(), named);
    assert_eq!(
        lines(&varmap, &other.sum_all()?)?,
        ["lm_head.weight: no gradient"]
    );
    assert_eq!(lines(&varmap, &tied.sum_all()?)?, ["other: no gradient"]);
    Ok(())
}

/// The sum of a LayerNorm's output with equal weights is that of its bias, whatever its input. A
/// loss of random weights is not.
#[test]
fn a_sum_of_normalized_values_trains_nothing_before_them() -> Result<()> {
    let varmap = VarMap::new();
    let vb = trainable(&varmap, DType::F32);
    let linear = linear(4, 8, vb.pp("linear"))?;
    let norm = layer_norm(8, 1e-5, vb.pp("norm"))?;
    let mut data = Data::new(3);
    let xs = tensor(&data.normal(20), &[5, 4], DType::F32);
    let ys = norm.forward(&linear.forward(&xs)?)?;
    let gradients = ys.sum_all()?.backward()?;
    let size = |gradients: &candle::backprop::GradStore| -> Result<f64> {
        let gradient = gradients.get(&var(&varmap, "linear.weight")).unwrap();
        Ok(to_f64(gradient).iter().fold(0., |sum, g| sum + g.abs()))
    };
    let constant = size(&gradients)?;
    let dy = tensor(&data.normal(40), &[5, 8], DType::F32);
    let gradients = (&ys * dy)?.sum_all()?.backward()?;
    assert_eq!(untrained(&varmap, &gradients)?, []);
    let random = size(&gradients)?;
    println!("constant {constant:e}, random {random:e}");
    assert!(constant < 1e-5 * random, "{constant:e} of {random:e}");
    Ok(())
}

/// What `untrained` cannot see: a weight that was computed once, before the first step. Its variable
/// has a gradient in each step, and the layer keeps the first value. Computed in each forward, it
/// follows.
#[test]
fn a_weight_that_is_computed_once_stays() -> Result<()> {
    let varmap = VarMap::new();
    let stored = trainable(&varmap, DType::F32).get(4, "weight")?; // 0, as γ − 1
    let once = RmsNorm::new((&stored + 1.)?, 1e-5);
    let again = |xs: &Tensor| RmsNorm::new((&stored + 1.)?, 1e-5).forward(xs);
    let offset = RmsNorm::new(stored.clone(), 1e-5).with_unit_offset();
    let xs = tensor(&[1., 2., 3., 4.], &[1, 4], DType::F32);
    let before = once.forward(&xs)?;
    assert_same_bits("before", &again(&xs)?, &before);
    for ys in [once.forward(&xs)?, again(&xs)?] {
        assert!(lines(&varmap, &ys.sum_all()?)?.is_empty());
    }
    var(&varmap, "weight").set(&stored.ones_like()?)?;
    assert_same_bits("computed once", &once.forward(&xs)?, &before);
    assert_same_bits("computed again", &again(&xs)?, &(&before * 2.)?);
    assert_same_bits("with an offset", &offset.forward(&xs)?, &(before * 2.)?);
    Ok(())
}

/// A view of a variable shares its values, so it follows although it is no variable itself: the
/// reason why `RmsNorm::new` accepts a weight with an operation behind it.
#[test]
fn a_flattened_weight_trains() -> Result<()> {
    let varmap = VarMap::new();
    let stored = trainable(&varmap, DType::F32).get((2, 2), "weight")?;
    let norm = RmsNorm::new(stored.flatten_all()?, 1e-5);
    assert!(!norm.weight().is_variable() && norm.weight().track_op());
    let xs = tensor(&[1., 2., 3., 4.], &[1, 4], DType::F32);
    assert!(lines(&varmap, &norm.forward(&xs)?.sum_all()?)?.is_empty());
    assert_eq!(to_f64(&norm.forward(&xs)?), [0.; 4]);
    var(&varmap, "weight").set(&stored.ones_like()?)?;
    assert!(to_f64(&norm.forward(&xs)?).iter().all(|y| *y > 0.));
    Ok(())
}
