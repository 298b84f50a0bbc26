//! Saving and loading: our own checkpoints. `interchange.rs` has PyTorch's files, in the shapes of
//! the released code.

use crate::common::*;
use candle::{DType, Module, Result, Tensor, Var, safetensors};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::{PowerNorm, PowerNormConfig, power_norm, power_norm_no_bias};
use std::collections::HashMap;
use std::path::Path;
use tempfile::NamedTempFile;

const SIZE: usize = 12;

/// A warm-up that ends while the tests run, so that t matters.
fn config() -> PowerNormConfig {
    1e-5.with_groups(Some(3)).with_warm_up(4)
}

fn batches(seed: u64, dtype: DType, count: usize) -> Vec<Batch> {
    let mut data = Data::new(seed);
    (0..count)
        .map(|_| Batch::random(&mut data, &[7, SIZE], dtype, true))
        .collect()
}

fn save(varmap: &VarMap) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    varmap.save(file.path()).unwrap();
    file
}

/// The tensors of a file.
fn load(file: &NamedTempFile) -> HashMap<String, Tensor> {
    safetensors::load(file.path(), &CPU).unwrap()
}

/// A builder of what is in a file, to evaluate.
fn builder(file: &NamedTempFile, dtype: DType) -> VarBuilder<'static> {
    let bytes = std::fs::read(file.path()).unwrap();
    VarBuilder::from_buffered_safetensors(bytes, dtype, &CPU).unwrap()
}

/// Both layers take the same steps from here on, bit for bit.
#[track_caller]
fn assert_same_future(a: &PowerNorm, b: &PowerNorm, dtype: DType) {
    for batch in batches(2, dtype, 4) {
        same_bits("future", &run(a, &batch, true), &run(b, &batch, true));
        assert_eq!(state(a), state(b));
    }
}

#[test]
fn a_loaded_layer_continues_as_if_never_stopped() {
    use DType::{BF16, F16, F32, F64};
    for (dtype, bias) in [
        (F32, true),
        (F32, false),
        (F64, true),
        (BF16, false),
        (F16, true),
    ] {
        let config = PowerNormConfig { bias, ..config() };
        // Stopped in the warm-up, at its last step, and after it.
        for stop in [2, 4, 6] {
            let twin = Twin::new(&mut Data::new(1), SIZE, config, dtype);
            for batch in batches(1, dtype, stop) {
                run(&twin.layer, &batch, true);
            }
            let file = save(&twin.varmap);
            let (loaded, mut varmap) = layer(SIZE, config, dtype);
            // After construction: what a layer was built with is not what counts.
            varmap.load(file.path()).unwrap();
            assert_eq!(state(&loaded), state(&twin.layer), "{dtype:?}, {stop}");
            assert_same_future(&twin.layer, &loaded, dtype);
        }
    }
}

/// A frozen layer starts from the file's state, at the precision of the file whatever the builder's
/// dtype. If it is told to train, its training is its own affair.
#[test]
fn a_frozen_builder_keeps_the_state_s_precision() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let twin = Twin::new(&mut Data::new(1), SIZE, config(), dtype);
        for batch in batches(1, dtype, 5) {
            run(&twin.layer, &batch, true);
        }
        let phi = twin.layer.running_phi().unwrap();
        let rounded = phi.to_dtype(DType::BF16).unwrap();
        assert_ne!(to_f64(&phi), to_f64(&rounded), "nothing to lose");
        let vb = builder(&save(&twin.varmap), dtype);
        let frozen = power_norm(SIZE, config(), vb).unwrap();
        assert_eq!(state(&frozen), state(&twin.layer), "{dtype:?}");
        assert_eq!(frozen.weight().unwrap().dtype(), dtype);

        let before = state(&twin.layer);
        frozen.mode().set_training(true);
        let frozen = frozen.with_unsaved_statistics();
        let batch = &batches(3, dtype, 1)[0];
        frozen.forward(&batch.xs).unwrap();
        assert_eq!(frozen.steps().unwrap(), 6);
        assert_eq!(state(&twin.layer), before);
    }
}

/// A step count that no training can have left is named, not counted from.
#[test]
fn a_negative_step_count_is_rejected() {
    let (layer, mut varmap) = layer(4, Default::default(), DType::F32);
    let xs = Tensor::ones((2, 4), DType::F32, &CPU).unwrap();
    let negative = Tensor::new(&[-5i64], &CPU).unwrap();
    varmap.set_one("iters", negative).unwrap();
    let text = "iters of at least 0, got -5: \
                load another checkpoint, or call `reset_running_stats`";
    rejected(layer.steps(), text);
    rejected(layer.forward_t(&xs, true), text);
    assert_eq!(to_f64(&layer.running_phi().unwrap()), [1.; 4]);
    layer.reset_running_stats().unwrap();
    assert_eq!(layer.steps().unwrap(), 0);
}

/// A layer that was trained with this group scaling, its variables, and their file.
fn trained_with(group_scaling: Option<usize>) -> (PowerNorm, VarMap, NamedTempFile) {
    let (layer, varmap) = layer(SIZE, config().with_groups(group_scaling), DType::F32);
    run(&layer, &batches(6, DType::F32, 1)[0], true);
    let file = save(&varmap);
    (layer, varmap, file)
}

/// The error of a layer with group scaling `expected` whose statistics are from `got`.
fn rejection(expected: Option<usize>, got: Option<usize>) -> String {
    format!(
        "statistics with group_scaling {expected:?}, \
         got group_scaling {got:?}: set it as it was in training, \
         or begin new statistics, by `reset_running_stats` or from a checkpoint without \
         running_phi, ema_gz, iters and groups"
    )
}

/// Settings, and what a checkpoint records of them.
const GROUP_SCALINGS: [(Option<usize>, i64); 3] = [(None, -1), (Some(1), 1), (Some(3), 3)];

/// Before there was a record, another group scaling gave wrong outputs without an error.
#[test]
fn statistics_of_another_group_scaling_are_rejected() {
    let xs = &batches(7, DType::F32, 1)[0].xs;
    let next = candle_nn::Linear::new(Tensor::ones((2, SIZE), DType::F32, &CPU).unwrap(), None);
    for (theirs, _) in GROUP_SCALINGS {
        let (_, _, file) = trained_with(theirs);
        for (ours, expected) in GROUP_SCALINGS {
            let (layer, mut varmap, _) = trained_with(ours);
            let clone = layer.clone();
            varmap.load(file.path()).unwrap();
            let before = state(&layer);
            let frozen = power_norm(SIZE, *layer.config(), builder(&file, DType::F32));
            let again = power_norm(SIZE, *layer.config(), trainable(&varmap, DType::F32));
            let _guard = layer.mode().eval_scope();
            let folded = layer.fold_into(&next);
            let recalibrated = {
                let _guard = layer.mode().recalibrate_scope();
                layer.forward(xs)
            };
            if ours == theirs {
                assert!(frozen.is_ok() && again.is_ok());
                assert!(folded.is_ok() && recalibrated.is_ok());
                assert!(layer.forward_t(xs, true).is_ok());
                continue;
            }
            let text = rejection(ours, theirs);
            // Clones share the record.
            for output in [layer.forward_t(xs, true), clone.forward(xs), recalibrated] {
                rejected(output, &text);
            }
            rejected(layer.forward_residual(xs, xs, None), &text);
            rejected(folded, &text);
            rejected(frozen, &text);
            rejected(again, &text);
            assert_eq!(state(&layer), before);

            clone.reset_running_stats().unwrap();
            assert!(layer.forward_t(xs, true).is_ok());
            assert_eq!(to_f64(&var(&varmap, "groups")), [expected as f64]);
        }
    }
}

/// A file of another program does not say which group scaling it is of.
#[test]
fn statistics_without_a_record_are_taken() {
    let (layer, _, file) = trained_with(Some(3));
    let mut tensors = load(&file);
    tensors.remove("groups").unwrap();
    let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &CPU);
    let frozen = power_norm(SIZE, *layer.config(), vb).unwrap();
    assert_eq!(state(&frozen), state(&layer));

    let varmap = variables(&tensors);
    let filled = power_norm(SIZE, *layer.config(), trainable(&varmap, DType::F32)).unwrap();
    assert_eq!(to_f64(&var(&varmap, "groups")), [0.]);
    assert_same_future(&filled, &layer, DType::F32);
    assert_eq!(to_f64(&var(&varmap, "groups")), [3.]);

    // Zeros for all tensors, as candle's tests of shapes have them.
    let zeros = VarBuilder::zeros(DType::F32, &CPU);
    assert!(power_norm(SIZE, *layer.config(), zeros).is_ok());
}

/// A checkpoint from before the first step goes with every group scaling, also if it comes between
/// two steps.
#[test]
fn statistics_before_the_first_step_are_taken() {
    let (_, untrained) = layer(SIZE, config(), DType::F32);
    let file = save(&untrained);
    for (ours, recorded) in GROUP_SCALINGS {
        let (layer, mut varmap, _) = trained_with(ours);
        varmap.load(file.path()).unwrap();
        assert_eq!(layer.steps().unwrap(), 0);
        // An evaluation records nothing, so what is saved after it is as open.
        let batch = &batches(8, DType::F32, 1)[0];
        for (train, expected) in [(false, 0.), (true, recorded as f64)] {
            run(&layer, batch, train);
            assert_eq!(to_f64(&load(&save(&varmap))["groups"]), [expected]);
        }
    }
}

/// To change the group scaling, take the weights over and leave the statistics out.
#[test]
fn weights_go_on_with_another_group_scaling() {
    let (trained, _, file) = trained_with(Some(3));
    let mut tensors = load(&file);
    tensors.retain(|name, _| name == "weight" || name == "bias");
    let varmap = variables(&tensors);
    let config = config().with_groups(Some(4));
    let layer = power_norm(SIZE, config, trainable(&varmap, DType::F32)).unwrap();
    assert_same_bits("weight", layer.weight().unwrap(), trained.weight().unwrap());
    run(&layer, &batches(10, DType::F32, 1)[0], true);
    assert_eq!(layer.steps().unwrap(), 1);
    assert_eq!(to_f64(&var(&varmap, "groups")), [4.]);
}

#[test]
fn frozen_statistics_that_no_training_leaves_are_rejected() {
    let (layer, _, file) = trained_with(Some(3));
    for got in [-1e-3f32, f32::NAN, f32::INFINITY] {
        let mut tensors = load(&file);
        let mut phi = tensors["running_phi"].to_vec1::<f32>().unwrap();
        phi[5] = got;
        let phi = Tensor::new(phi, &CPU).unwrap();
        tensors.insert("running_phi".to_owned(), phi);
        let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &CPU);
        let text = format!(
            "a running_phi of finite numbers of at least 0, got {:?}: \
             pass the mean squares of a checkpoint, or ones for a fresh layer",
            f64::from(got)
        );
        rejected(power_norm(SIZE, *layer.config(), vb), &text);
        // A recalibration may replace them.
        let vb = trainable(&variables(&tensors), DType::F32);
        assert!(power_norm(SIZE, *layer.config(), vb).is_ok());
    }
}

/// A layer that trains on a copy would not be saved.
#[test]
fn a_state_of_which_only_a_part_is_variables_is_rejected() {
    let (_, varmap, _) = trained_with(Some(3));
    let tensors: HashMap<String, Tensor> = (varmap.data().lock().unwrap().iter())
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()))
        .collect();
    let build = |copied: Option<&str>| {
        let mut tensors = tensors.clone();
        if let Some(copied) = copied {
            let copy = tensors[copied].detach();
            tensors.insert(copied.to_owned(), copy);
        }
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
        power_norm(SIZE, config(), vb)
    };
    assert!(build(None).unwrap().mode().is_training());
    for copied in ["running_phi", "ema_gz", "iters", "groups"] {
        let error = message(build(Some(copied)));
        assert!(
            error.contains(&format!("got a copy of {copied}: ")),
            "{error}"
        );
    }
}

/// A file for inference may have only what an evaluation reads. Before, a layer on one failed with
/// candle's "cannot find tensor ema_gz".
#[test]
fn a_frozen_file_needs_only_what_an_evaluation_reads() {
    let (trained, _, file) = trained_with(Some(3));
    let xs = &batches(12, DType::F32, 1)[0].xs;
    let expected = trained.forward_t(xs, false).unwrap();
    let (all_phi, all_nu, all_steps) = state(&trained);
    for left_out in [
        &["ema_gz"][..],
        &["iters"],
        &["ema_gz", "iters"],
        &["ema_gz", "iters", "groups"],
    ] {
        let mut tensors = load(&file);
        tensors.retain(|name, _| !left_out.contains(&&**name));
        let has = |name| !left_out.contains(&name);
        let bytes = ::safetensors::serialize(&tensors, None).unwrap();
        for vb in [
            VarBuilder::from_tensors(tensors.clone(), DType::F32, &CPU),
            VarBuilder::from_buffered_safetensors(bytes, DType::F32, &CPU).unwrap(),
        ] {
            let layer = power_norm(SIZE, *trained.config(), vb).unwrap();
            assert_same_bits("y", &layer.forward(xs).unwrap(), &expected);
            let (phi, nu, steps) = state(&layer);
            assert_eq!(phi, all_phi);
            let zeros = vec![0; SIZE];
            assert_eq!(nu, if has("ema_gz") { &all_nu } else { &zeros }[..]);
            assert_eq!(steps, if has("iters") { all_steps } else { 0 });
        }
        // As before, a tensor in another shape is an error that names it.
        for &name in left_out {
            let mut tensors = tensors.clone();
            let wrong = Tensor::ones((2, 2), DType::F32, &CPU).unwrap();
            tensors.insert(name.to_owned(), wrong);
            let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
            let text = message(power_norm(SIZE, *trained.config(), vb));
            assert!(text.contains(name), "{text}");
        }
        // A recorded group scaling is checked, whatever else is missing.
        if has("groups") {
            let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &CPU);
            let other = trained.config().with_groups(Some(4));
            rejected(power_norm(SIZE, other, vb), &rejection(Some(4), Some(3)));
        }
        // Variables are for training, which needs all of the state.
        let vars = tensors.iter().map(|(name, tensor)| {
            let var = Var::from_tensor(tensor).unwrap();
            (name.clone(), var.into_inner())
        });
        let vb = VarBuilder::from_tensors(vars.collect(), DType::F32, &CPU);
        let trainable = power_norm(SIZE, *trained.config(), vb);
        if has("ema_gz") && has("iters") {
            assert!(trainable.is_ok());
        } else {
            assert!(message(trainable).contains(left_out[0]));
        }
    }
    // A builder that makes what is missing is asked first.
    let zeros = VarBuilder::zeros(DType::F32, &CPU);
    let layer = power_norm(SIZE, config(), zeros).unwrap();
    assert_eq!(to_f64(&layer.running_phi().unwrap()), [0.; SIZE]);
}

#[test]
fn frozen_parameters_of_a_layer_norm_are_rejected() {
    let ones = Tensor::ones(SIZE, DType::F32, &CPU).unwrap();
    let names = ["weight", "bias"].map(|name| (format!("block.norm.{name}"), ones.clone()));
    let vb = VarBuilder::from_tensors(HashMap::from(names), DType::F32, &CPU);
    let text = "a tensor block.norm.running_phi, got none: \
                a checkpoint of LayerNorm has no statistics, \
                so put its tensors into a `VarMap` and train on";
    rejected(power_norm(SIZE, 1e-5, vb.pp("block").pp("norm")), text);
}

/// A LayerNorm's parameters in the `VarMap`: the layer takes them and makes its statistics.
#[test]
fn parameters_of_a_layer_norm_are_taken_over() {
    // The second names are those of older checkpoints, which candle's LayerNorm reads too.
    for names in [["norm.weight", "norm.bias"], ["norm.gamma", "norm.beta"]] {
        let varmap = VarMap::new();
        let [weight, bias] = [[1., 2., 3.], [4., 5., 6.]].map(|t| tensor(&t, &[3], DType::F32));
        insert(&varmap, names[0], &weight);
        insert(&varmap, names[1], &bias);
        let vb = || trainable(&varmap, DType::F32).pp("norm");
        let layer = power_norm(3, 1e-5, vb()).unwrap();
        assert_same_bits("weight", layer.weight().unwrap(), &weight);
        assert_same_bits("bias", layer.bias().unwrap(), &bias);
        assert!(layer.mode().is_training());
        assert_eq!(varmap.all_vars().len(), 6);
        let peer = candle_nn::layer_norm(3, 1e-5, vb()).unwrap();
        assert_same_bits("LayerNorm's", peer.weight(), &weight);
    }
}

/// Sets every variable of a fresh model from a checkpoint, where
/// `VarMap::load` fails because of a name or a dtype.
fn load_anyway(varmap: &VarMap, checkpoint: &Path) -> Result<()> {
    let tensors = safetensors::load(checkpoint, &CPU)?;
    let other_names = [
        (".weight", ".gamma"),
        (".bias", ".beta"),
        (".gamma", ".weight"),
        (".beta", ".bias"),
    ];
    for (name, var) in varmap.data().lock().unwrap().iter() {
        let other_name = other_names.iter().find_map(|(ours, theirs)| {
            let stem = name.strip_suffix(ours)?;
            Some(format!("{stem}{theirs}"))
        });
        let found = tensors.get(name).or_else(|| tensors.get(&other_name?));
        let Some(tensor) = found else {
            candle::bail!("{} has no tensor {name}", checkpoint.display())
        };
        var.set(&tensor.to_device(var.device())?.to_dtype(var.dtype())?)?;
    }
    Ok(())
}

/// A model with a LayerNorm's names, trained from a file of bert-base-uncased's names: gamma and
/// beta. Its own file has them too, and `VarMap::load` asks for weight and bias.
#[test]
fn older_names_survive_a_round_trip() -> Result<()> {
    let twin = Twin::new(&mut Data::new(13), SIZE, config(), DType::F32);
    let older = ["gamma", "beta"].map(|name| format!("LayerNorm.{name}"));
    let build = |varmap: &VarMap| {
        let vb = trainable(varmap, DType::F32).pp("LayerNorm");
        power_norm(SIZE, config(), vb).unwrap()
    };
    let varmap = VarMap::new();
    for (name, of) in older.iter().zip(["weight", "bias"]) {
        insert(&varmap, name, &var(&twin.varmap, of));
    }
    let trained = build(&varmap);
    for batch in batches(13, DType::F32, 3) {
        run(&trained, &batch, true);
    }
    let file = save(&varmap);
    for name in &older {
        assert!(load(&file).contains_key(name));
    }

    // candle's words, which the guide quotes.
    let mut varmap = VarMap::new();
    build(&varmap);
    let failure = message(varmap.load(file.path()));
    let quoted = ["weight", "bias"].map(|name| format!("tensor `LayerNorm.{name}` not found"));
    assert!(quoted.contains(&failure), "{failure}");

    let varmap = VarMap::new();
    let loaded = build(&varmap);
    load_anyway(&varmap, file.path())?;
    assert_eq!(state(&loaded), state(&trained));
    assert_same_future(&loaded, &trained, DType::F32);
    // From now on the names are today's.
    let file = save(&varmap);
    let mut varmap = VarMap::new();
    let again = build(&varmap);
    varmap.load(file.path())?;
    assert_same_future(&again, &loaded, DType::F32);
    Ok(())
}

/// Renamed while the map is filled, as the guide does, the names are today's from the start.
#[test]
fn names_that_are_renamed_at_first_load_into_a_fresh_model() -> Result<()> {
    let twin = Twin::new(&mut Data::new(14), SIZE, config(), DType::F32);
    let varmap = VarMap::new();
    for (older, of) in [("LayerNorm.gamma", "weight"), ("LayerNorm.beta", "bias")] {
        let name = older
            .replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias");
        insert(&varmap, &name, &var(&twin.varmap, of));
    }
    let build = |varmap: &VarMap| {
        let vb = trainable(varmap, DType::F32).pp("LayerNorm");
        power_norm(SIZE, config(), vb).unwrap()
    };
    let trained = build(&varmap);
    assert_eq!(varmap.all_vars().len(), 6);
    assert_same_future(&trained, &twin.layer, DType::F32);
    let file = save(&varmap);
    let mut varmap = VarMap::new();
    let loaded = build(&varmap);
    varmap.load(file.path())?;
    assert_same_future(&loaded, &trained, DType::F32);
    Ok(())
}

/// A file in half precision, statistics and all, and a model in any dtype.
#[test]
fn a_halved_file_is_loaded() -> Result<()> {
    let (trained, varmap, _) = trained_with(Some(3));
    for half in [DType::F16, DType::BF16] {
        let mut tensors = frozen(&varmap);
        for tensor in tensors
            .values_mut()
            .filter(|tensor| tensor.dtype().is_float())
        {
            *tensor = tensor.to_dtype(half)?;
        }
        let file = save(&variables(&tensors));
        for dtype in [DType::F32, half] {
            let (loaded, mut varmap) = layer(SIZE, *trained.config(), dtype);
            // candle's words, which the guide quotes. Which variable is first is random.
            let failure = message(varmap.load(file.path()));
            let quoted = format!("dtype mismatch in copy_strided, lhs: {half:?}, rhs: F32");
            assert!(failure.contains(&quoted), "{failure}");

            load_anyway(&varmap, file.path())?;
            let expected = power_norm(SIZE, *trained.config(), builder(&file, dtype))?;
            assert_eq!(state(&loaded), state(&expected));
            assert_eq!(loaded.steps()?, 1);
            assert_same_bits(
                "weight",
                loaded.weight().unwrap(),
                expected.weight().unwrap(),
            );
            let batch = &batches(14, dtype, 1)[0];
            run(&loaded, batch, true);
        }
    }
    Ok(())
}

/// A layer without a bias saves none, and leaves one in a checkpoint unread, as candle does.
#[test]
fn a_bias_that_is_not_asked_for_stays_unread() {
    let (with_bias, varmap, file) = trained_with(Some(3));
    let vb = builder(&file, DType::F32);
    let loaded = power_norm_no_bias(SIZE, *with_bias.config(), vb).unwrap();
    assert!(loaded.bias().is_none() && !loaded.config().bias);
    assert_eq!(state(&loaded), state(&with_bias));
    // The other layer's fresh bias is 0.
    let xs = &batches(11, DType::F32, 1)[0].xs;
    let [ours, theirs] = [&loaded, &with_bias].map(|layer| layer.forward_t(xs, false).unwrap());
    assert_same_bits("y", &ours, &theirs);

    let without = VarMap::new();
    power_norm_no_bias(SIZE, 1e-5, trainable(&without, DType::F32)).unwrap();
    let (mut all, ours) = (frozen(&varmap), frozen(&without));
    all.retain(|name, _| !ours.contains_key(name));
    assert_eq!(all.keys().collect::<Vec<_>>(), ["bias"]);
    // A layer with a bias does not load what has none.
    let vb = builder(&save(&without), DType::F32);
    assert!(message(power_norm(SIZE, 1e-5, vb)).contains("bias"));
}
