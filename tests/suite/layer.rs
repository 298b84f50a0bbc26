//! PowerNorm's construction, masks that do not fit, the mode switch and the accessors.

use crate::common::*;
use candle::{DType, Module, Result, Tensor, Var};
use candle_nn::{ModuleT, VarBuilder, VarMap};
use candle_powernorm::{
    LossScale, Mode, PowerNorm, PowerNormBuilder, PowerNormConfig, PowerNormT, power_norm,
};
use std::collections::HashMap;

/// A builder of `f32` to evaluate.
fn constant(tensors: HashMap<String, Tensor>) -> VarBuilder<'static> {
    VarBuilder::from_tensors(tensors, DType::F32, &CPU)
}

/// A layer on fresh variables. If it is rejected, it leaves none behind.
fn build(size: usize, config: PowerNormConfig, dtype: DType) -> Result<PowerNorm> {
    let varmap = VarMap::new();
    let layer = power_norm(size, config, trainable(&varmap, dtype));
    assert_eq!(layer.is_err(), varmap.all_vars().is_empty());
    layer
}

/// A tensor of ones, on the CPU.
fn ones(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::ones(shape, dtype, &CPU).unwrap()
}

/// A layer after a few steps of training.
pub fn trained(size: usize, dtype: DType) -> (PowerNorm, VarMap) {
    let (layer, varmap) = layer(size, 1e-5.into(), dtype);
    let mut data = Data::new(1);
    for _ in 0..3 {
        let batch = Batch::random(&mut data, &[6, size], dtype, false);
        run(&layer, &batch, true);
    }
    (layer, varmap)
}

fn input(size: usize) -> Tensor {
    tensor(&Data::new(2).normal(5 * size), &[5, size], DType::F32)
}

// Construction

#[test]
fn configurations_out_of_range_are_rejected() {
    let default = PowerNormConfig::default();
    let in_f32 = |config| build(8, config, DType::F32);
    let tiny = build(8, 1e-60.into(), DType::F64).unwrap();
    assert_eq!(tiny.config().eps, 1e-60);
    // The last two are 1 and 0 where the sums are f32.
    for alpha in [0., 1., -0.1, 1.1, f64::NAN, 1. - 1e-9, 1e-60] {
        let range = format!(
            "between 0 and 1, both excluded, after rounding to F32, got {alpha:?}: \
             choose a number such as 0.9"
        );
        let is_in_f64 = alpha > 0. && alpha < 1.;
        for (name, config) in [
            ("alpha_fwd", default.with(|config| config.alpha_fwd = alpha)),
            ("alpha_bwd", default.with(|config| config.alpha_bwd = alpha)),
        ] {
            rejected(in_f32(config), &format!("{name} {range}"));
            assert_eq!(build(8, config, DType::F64).is_ok(), is_in_f64, "{alpha}");
        }
    }
    // Without parameters nothing has the builder's dtype, and sums are f32.
    for (config, text) in [
        (
            PowerNormConfig::from(1e-60),
            "eps positive and finite after rounding to F32",
        ),
        (
            1e-5.with(|config| config.alpha_fwd = 1. - 1e-9),
            "alpha_fwd between 0 and 1",
        ),
    ] {
        let error = message(build(8, config.with_parameters((false, true)), DType::F64));
        assert!(error.contains(text), "{error}");
    }
    // Values just inside the limits work.
    let config = 1e-45.with_warm_up(usize::MAX);
    let least = build(8, config, DType::F32).unwrap();
    for train in [true, false] {
        run(
            &least,
            &Batch::random(&mut Data::new(6), &[4, 8], DType::F32, true),
            train,
        );
        assert_finite_state("the least eps", &least);
    }
    for groups in [0, 3, 16] {
        let text = format!(
            "group_scaling to divide the size 8, got {groups}: choose `None`, 1 or another divisor"
        );
        rejected(in_f32(default.with_groups(Some(groups))), &text);
    }
}

#[test]
fn tensors_of_another_dtype_are_rejected() {
    for (name, wrong, expected) in [
        ("running_phi", DType::F16, DType::F32),
        ("ema_gz", DType::F64, DType::F32),
        ("iters", DType::F32, DType::I64),
        ("groups", DType::U32, DType::I64),
    ] {
        let varmap = VarMap::new();
        let size = if expected == DType::I64 { 1 } else { 8 };
        insert(&varmap, name, &ones(&[size], wrong));
        let text = format!(
            "{name} of dtype {expected:?}, got {wrong:?}: convert it before the layer is built"
        );
        rejected(power_norm(8, 1e-5, trainable(&varmap, DType::F32)), &text);
    }
    // And so are parameters, each by its name.
    for name in ["weight", "bias", "gamma", "beta"] {
        let varmap = VarMap::new();
        insert(&varmap, name, &ones(&[8], DType::I64));
        let subject = match name {
            "weight" | "gamma" => "weight",
            _ => "bias",
        };
        let text = format!("{subject} of dtype F32, F64, F16 or BF16, got I64");
        rejected(power_norm(8, 1e-5, trainable(&varmap, DType::F32)), &text);
    }
}

#[test]
fn missing_and_misshapen_tensors_are_rejected() {
    let complete = frozen(&layer(8, 1e-5.into(), DType::F32).1);
    let build = |tensors| power_norm(8, 1e-5, constant(tensors));
    assert!(build(complete.clone()).is_ok());
    for name in ["weight", "bias", "running_phi", "ema_gz", "iters", "groups"] {
        let mut tensors = complete.clone();
        tensors.remove(name);
        let without = build(tensors.clone());
        // No evaluation reads the others: `checkpoint.rs`.
        if ["weight", "bias", "running_phi"].contains(&name) {
            let text = message(without);
            assert!(text.contains(name), "{name} is missing: {text}");
        } else {
            assert!(without.is_ok(), "{name} is missing");
        }
        tensors.insert(name.into(), ones(&[2, 2], DType::F32));
        let text = message(build(tensors));
        assert!(text.contains(name), "{name} is 2x2: {text}");
    }
}

#[test]
fn fresh_layers_hold_the_documented_tensors() {
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        let state_dtype = sums_of(dtype);
        let (layer, varmap) = layer(8, 1e-5.into(), dtype);
        let documented = [
            ("weight", 8, dtype, 1.),
            ("bias", 8, dtype, 0.),
            ("running_phi", 8, state_dtype, 1.),
            ("ema_gz", 8, state_dtype, 0.),
            ("iters", 1, DType::I64, 0.),
            ("groups", 1, DType::I64, 0.),
        ];
        assert_eq!(varmap.all_vars().len(), documented.len());
        for (name, len, dtype, fresh) in documented {
            let var = var(&varmap, name);
            assert_eq!((var.dims(), var.dtype()), (&[len][..], dtype), "{name}");
            assert!(var.device().is_cpu());
            assert_eq!(to_f64(&var), vec![fresh; len], "{name}");
        }
        let (phi, nu) = (layer.running_phi().unwrap(), layer.nu().unwrap());
        for (accessor, fresh) in [(phi, 1.), (nu, 0.)] {
            assert_eq!((accessor.dims(), accessor.dtype()), (&[8][..], state_dtype));
            assert_eq!(to_f64(&accessor), [fresh; 8]);
        }
        assert_eq!(layer.steps().unwrap(), 0);
        let weight = layer.weight().unwrap();
        assert_eq!(weight.id(), var(&varmap, "weight").id());
        assert_eq!(layer.bias().unwrap().id(), var(&varmap, "bias").id());
    }
    for (affine, bias) in PARAMETERS {
        let config = 1e-5.with_parameters((affine, bias));
        let (layer, varmap) = layer(8, config, DType::F32);
        assert_eq!((layer.size(), layer.weight().is_some()), (8, affine));
        assert_eq!(layer.bias().is_some(), affine && bias);
        let parameters = usize::from(affine) + usize::from(affine && bias);
        assert_eq!(varmap.all_vars().len(), 4 + parameters);
    }
}

/// The accessors return copies, which later steps do not change.
#[test]
fn accessors_follow_the_state() {
    let (layer, varmap) = trained(8, DType::F32);
    let (phi, nu) = (layer.running_phi().unwrap(), layer.nu().unwrap());
    assert_same_bits("ψ²", &phi, &var(&varmap, "running_phi"));
    let ema_gz = to_f64(&var(&varmap, "ema_gz"));
    // ν = (1−α_b)·ema_gz, in f32.
    let share = 1. - layer.config().alpha_bwd;
    let expected: Vec<f64> = ema_gz.iter().map(|ema_gz| share * ema_gz).collect();
    assert_relative("ν", &nu, &expected, 2f64.powi(-22));
    assert_eq!(to_f64(&var(&varmap, "iters")), [3.]);
    let before = (to_f64(&phi), to_f64(&nu));
    let batch = Batch::random(&mut Data::new(3), &[6, 8], DType::F32, false);
    run(&layer, &batch, true);
    assert_eq!((to_f64(&phi), to_f64(&nu)), before);
    assert_ne!(to_f64(&layer.running_phi().unwrap()), before.0);
    assert_ne!(to_f64(&layer.nu().unwrap()), before.1);
}

/// A layer made of tensors evaluates as the layer that they come from, and trains as a fresh one.
#[test]
fn tensors_make_a_layer() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let (trained, _) = trained(8, dtype);
        let parameter = |tensor: Option<&Tensor>| tensor.unwrap().detach();
        let (weight, bias) = (parameter(trained.weight()), parameter(trained.bias()));
        let phi = trained.running_phi().unwrap();
        let config = *trained.config();
        let frozen = PowerNorm::new(weight.clone(), bias.clone(), phi.clone(), config).unwrap();
        assert!(!frozen.mode().is_training());
        let xs = input(8).to_dtype(dtype).unwrap();
        let expected = trained.forward_t(&xs, false).unwrap();
        assert_same_bits("y", &frozen.forward(&xs).unwrap(), &expected);

        // A variable is shared: training moves it, and gradients reach it.
        let (weight, phi) = (Var::from_tensor(&weight), Var::from_tensor(&phi));
        let (weight, phi) = (weight.unwrap(), phi.unwrap());
        let new = |phi: &Tensor| {
            PowerNorm::new(weight.as_tensor().clone(), bias.clone(), phi.clone(), 1e-5).unwrap()
        };
        let made = new(&phi);
        assert!(made.mode().is_training());
        let (fresh, mut varmap) = layer(8, 1e-5.into(), dtype);
        varmap.set_one("weight", weight.as_tensor()).unwrap();
        varmap.set_one("bias", &bias).unwrap();
        let batch = Batch::random(&mut Data::new(5), &[6, 8], dtype, false);
        let copied = new(&phi.detach());
        let outcome = run(&fresh, &batch, true);
        for layer in [&made, &copied] {
            let y = layer.forward(&batch.xs).unwrap();
            assert_same_bits("y", &y, &outcome.y);
            let dweight = backward(&y, &batch.dy).remove(&weight).unwrap();
            assert_same_bits("dweight", &dweight, &outcome.dweight.clone().unwrap());
            assert_eq!(state(layer), state(&fresh));
        }
        assert_same_bits("ψ²", &phi, &fresh.running_phi().unwrap());
    }
}

#[test]
fn tensors_that_do_not_fit_make_no_layer() {
    let new = |[weight, bias, phi]: [Tensor; 3]| PowerNorm::new(weight, bias, phi, 1e-5);
    let of_sizes = |sizes: [usize; 3]| sizes.map(|size| ones(&[size], DType::F32));
    let of_dtypes = |dtypes: [DType; 3]| dtypes.map(|dtype| ones(&[8], dtype));
    use DType::{BF16, F16, F32, I64};
    let text = "bias of shape [8] (as the weight), got [7]";
    rejected(new(of_sizes([8, 7, 8])), text);
    let text = "running_phi of shape [8] (as the weight), got [1]";
    rejected(new(of_sizes([8, 8, 1])), text);
    let text = "bias of dtype F32, F64, F16 or BF16, got I64";
    rejected(new(of_dtypes([F32, I64, F32])), text);
    let text = "bias of dtype F16 (as the weight) or F32, got BF16: convert one of them";
    rejected(new(of_dtypes([F16, BF16, F32])), text);
    let text = "running_phi of dtype F32, got F16: convert it before the layer is built";
    rejected(new(of_dtypes([F16, F16, F16])), text);
    let shared = || Var::ones(8, F32, &CPU).unwrap().into_inner();
    let (weight, own) = (shared(), shared());
    let text = |name: &str| {
        format!(
            "{name} apart from the statistics, got their variable: \
             a training step would overwrite it, so give it one of its own"
        )
    };
    rejected(
        new([weight.clone(), own.clone(), weight.clone()]),
        &text("weight"),
    );
    rejected(new([own, weight.clone(), weight]), &text("bias"));
    for odd in [-1e-30, f64::NAN, f64::INFINITY] {
        let mut phi = vec![1.; 8];
        phi[5] = odd;
        let phi = Tensor::new(phi, &CPU).unwrap();
        let text = format!(
            "a running_phi of finite numbers of at least 0, got {odd:?}: \
             pass the mean squares of a checkpoint, or ones for a fresh layer"
        );
        let ones = || ones(&[8], DType::F64);
        rejected(new([ones(), ones(), phi]), &text);
    }
    let [weight, bias, phi] = of_sizes([8; 3]);
    let new = |bias: Option<&Tensor>, config: PowerNormConfig| {
        PowerNorm::new(weight.clone(), bias.cloned(), phi.clone(), config)
    };
    let without = 1e-5.with(|config| config.affine = false);
    let text = "affine: true beside a weight and a bias, got false: \
                build a layer without them by `power_norm`";
    rejected(new(Some(&bias), without), text);
    let without = 1e-5.with(|config| config.bias = false);
    let text = "bias: true beside a bias, got false: pass `None` in place of the bias";
    rejected(new(Some(&bias), without), text);
    // `None` is a layer without a bias, whatever the configuration says of it.
    for config in [without, 1e-5.into()] {
        let layer = new(None, config).unwrap();
        assert!(layer.bias().is_none() && !layer.config().bias);
    }
}

// Rejected inputs

#[test]
fn masks_that_do_not_fit_are_rejected() {
    let (layer, _) = trained(8, DType::F32);
    let xs = ones(&[2, 5, 8], DType::F32);
    let before = state(&layer);
    for train in [true, false] {
        layer.mode().set_training(train);
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let text = format!(
                "keep of dtype U8, U32 or I64, got {dtype:?}: \
                 make it 0 for padding, by `ne(0f64)` from a mask of 1 and 0, \
                 or by `eq(0f64)` from an additive mask"
            );
            rejected(layer.forward_masked(&xs, &ones(&[2, 5], dtype)), &text);
        }
        let one_each = "give it one number for each row of xs";
        let squeeze = "remove its dimensions of 1 by `squeeze`";
        for (shape, advice) in [
            (&[5, 2][..], one_each),
            (&[10], one_each),
            (&[2, 5, 8], one_each),
            (&[2, 1, 5, 5], one_each),
            (&[], one_each),
            (&[2, 5, 1], squeeze),
            (&[2, 1, 1, 5], squeeze), // the shape of an attention's mask
        ] {
            let text = format!(
                "keep of shape [2, 5] (xs without its last dimension), got {shape:?}: {advice}"
            );
            rejected(layer.forward_masked(&xs, &ones(shape, DType::U8)), &text);
        }
    }
    assert_eq!(state(&layer), before);
}

/// A mask of any integer dtype, and the conversions that the rejection of floats names, mean the
/// same.
#[test]
fn masks_of_any_integers() -> Result<()> {
    let xs = Data::new(70).normal(2 * 5 * 8);
    let xs = Tensor::from_vec(xs, (2, 5, 8), &CPU)?;
    let ones = [[1u32, 1, 1, 0, 0], [1, 1, 1, 1, 1]];
    let bytes = Tensor::new(&ones, &CPU)?.to_dtype(DType::U8)?;
    let step = |keep: Option<&Tensor>| -> Result<_> {
        let (layer, _) = trained(8, DType::F64);
        let ys = layer.forward_masked(&xs, keep)?;
        Ok((to_f64(&ys), state(&layer)))
    };
    let expected = step(Some(&bytes))?;
    let floats = bytes.to_dtype(DType::F32)?;
    let additive = ((floats.clone() - 1.)? * 1e9)?;
    for keep in [
        bytes.to_dtype(DType::U32)?,
        (bytes.to_dtype(DType::I64)? * 7.)?,
        floats.ne(0f64)?,
        additive.eq(0f64)?,
    ] {
        assert_eq!(step(Some(&keep))?, expected, "{keep}");
    }
    // Without a mask every row counts.
    let all = step(None)?;
    assert_eq!(all, step(Some(&bytes.ones_like()?))?);
    assert_ne!(all, expected);
    Ok(())
}

/// Layers of one builder have its settings, and share its mode even if they are frozen.
#[test]
fn a_builder_builds_layers_alike() -> Result<()> {
    let (mode, scale) = (Mode::train(), LossScale::default());
    let config = 1e-6.with_warm_up(3);
    let norms = PowerNormBuilder::new(config, &mode).with_loss_scale(&scale);
    assert_eq!(*norms.config(), config);
    let varmap = VarMap::new();
    let vb = trainable(&varmap, DType::F32);
    let (first, second) = (vb.pp("a"), vb.pp("b"));
    let layers = [norms.build(8, first)?, norms.clone().build(8, second)?];
    let frozen = norms.build(8, constant(frozen(&varmap)).pp("a"))?;
    for training in [false, true] {
        mode.set_training(training);
        for layer in layers.iter().chain([&frozen]) {
            assert_eq!(layer.mode().is_training(), training);
            assert_eq!(*layer.config(), config);
        }
    }
    // ν is in the units of the loss without its scale.
    let xs = Var::from_tensor(&input(8))?;
    for (layer, factor) in layers.iter().zip([1., 1024.]) {
        scale.set(factor)?;
        (layer.forward(&xs)?.sqr()?.sum_all()? * factor)?.backward()?;
    }
    assert_same_bits("ν", &layers[0].nu()?, &layers[1].nu()?);
    assert!(message(norms.build(0, vb.pp("c"))).contains("expected a size"));
    Ok(())
}

/// A layer prints while another thread has its state, too.
#[test]
fn a_layer_prints_its_size_settings_and_steps() {
    let (layer, varmap) = trained(8, DType::F32);
    let expected = format!(
        "PowerNorm {{ size: 8, config: {:?}, steps: 3, frozen: false, .. }}",
        layer.config()
    );
    assert_eq!(format!("{layer:?}"), expected);
    let frozen = power_norm(8, 1e-5, constant(frozen(&varmap))).unwrap();
    assert_eq!(
        format!("{frozen:?}"),
        expected.replace("frozen: false", "frozen: true")
    );
}

// Mode

#[test]
fn a_scope_decides_until_it_ends() {
    for before in [true, false] {
        let mode = Mode::train();
        mode.set_training(before);
        let outer = mode.eval_scope();
        drop(mode.eval_scope());
        assert!(!mode.is_training(), "the inner scope restores the outer");
        drop(outer);
        assert_eq!(mode.is_training(), before);
    }
    // A mode that is set within a scope holds after the scope.
    let mode = Mode::eval();
    let scope = mode.eval_scope();
    mode.set_training(true);
    assert!(!mode.is_training());
    drop(scope);
    assert!(mode.is_training());
    // A panic ends it too.
    let shared = mode.clone();
    let panicked = std::panic::catch_unwind(move || {
        let _guard = shared.eval_scope();
        panic!("on purpose");
    });
    assert!(panicked.is_err() && mode.is_training());
    // A pattern that binds no name drops the guard at once, as the guide warns.
    let _ = mode.eval_scope();
    assert!(mode.is_training());
}

/// As when two threads evaluate one model.
#[test]
fn scopes_may_end_in_any_order() {
    let mode = Mode::train();
    let [first, second] = [mode.eval_scope(), mode.eval_scope()];
    drop(first);
    assert!(!mode.is_training());
    drop(second);
    assert!(mode.is_training());

    let (layer, _) = layer(8, 1e-5.into(), DType::F32);
    let forward = || layer.forward(&input(8)).unwrap();
    let phi = || layer.running_phi().unwrap().to_vec1::<f32>().unwrap();
    let evaluation = layer.mode().eval_scope();
    let recalibration = layer.mode().recalibrate_scope();
    let before = phi();
    drop(evaluation);
    forward();
    assert_ne!(phi(), before);
    assert_eq!(layer.steps().unwrap(), 0, "the recalibration goes on");
    drop(recalibration);
    forward();
    assert_eq!(layer.steps().unwrap(), 1);
}

/// A call of generic code.
fn generic(layer: &impl ModuleT, xs: &Tensor, train: bool) -> Tensor {
    layer.forward_t(xs, train).unwrap()
}

#[test]
fn forward_t_does_not_ask_the_mode_and_neither_does_the_newtype() {
    let (layer, _) = layer(8, 1e-5.into(), DType::F32);
    let honours = PowerNormT(layer.clone());
    for (training, train) in [(false, true), (true, false), (true, true), (false, false)] {
        layer.mode().set_training(training);
        let steps = || layer.steps().unwrap();
        let before = steps();
        let y = layer.forward_t(&input(8), train).unwrap();
        assert_eq!(steps(), before + usize::from(train));
        let in_generic_code = generic(&honours, &input(8), train);
        assert_eq!(steps(), before + 2 * usize::from(train));
        if !train {
            assert_same_bits("y", &in_generic_code, &y);
        }
        // This is why `PowerNormT` exists: the layer itself follows its mode there.
        let before = steps();
        generic(&layer, &input(8), train);
        assert_eq!(steps(), before + usize::from(training));
        assert_eq!(layer.mode().is_training(), training);
    }
}

#[test]
fn clones_share_parameters_state_and_mode() {
    let (layer, varmap) = layer(8, 1e-5.into(), DType::F32);
    let clone = layer.clone();
    clone.mode().set_training(false);
    assert!(!layer.mode().is_training());
    clone.forward_t(&input(8), true).unwrap();
    assert_eq!(layer.steps().unwrap(), 1);
    assert_eq!(state(&layer), state(&clone));
    let weight = tensor(&Data::new(4).normal(8), &[8], DType::F32);
    var(&varmap, "weight").set(&weight).unwrap();
    assert_same_bits("weight", clone.weight().unwrap(), &weight);
    let y = layer.forward_t(&input(8), false).unwrap();
    assert_same_bits("y", &clone.forward_t(&input(8), false).unwrap(), &y);
    // `with_mode` separates only the modes.
    let parted = clone.with_mode(&Mode::train());
    parted.forward(&input(8)).unwrap();
    assert!(!layer.mode().is_training());
    assert_eq!(layer.steps().unwrap(), 2);
}

#[test]
fn layers_are_send_and_sync() {
    fn check<T: Send + Sync + Clone + std::fmt::Debug>() {}
    check::<PowerNorm>();
    check::<PowerNormT>();
    check::<Mode>();
}
