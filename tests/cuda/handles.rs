//! A layer among tensors of other devices, and in a model that trains.

use super::*;
use candle_powernorm::LayerNorm;
use common::in_time;
use std::collections::HashMap;
use std::sync::Barrier;

/// Two handles of a GPU are one device to candle, each with a stream of its own. A layer that was
/// built on one takes rows of the other, and its state moves as if there were one.
///
/// Both are made with a stream: cudarc then orders their work by events, which it leaves out for a
/// handle of `Device::new_cuda`.
#[test]
fn two_handles_of_one_gpu_are_one_device() {
    let [own, other] = [(); 2].map(|()| Device::new_cuda_with_stream(0).unwrap());
    for statistics in [Statistics::Running, Statistics::Batch] {
        let config = config(Some(4)).with_statistics(statistics);
        let mut twin = Twin::new(&mut Data::on(&own, 21), 48, config, DType::F32);
        let mut data = Data::on(&other, 22);
        for step in 0..3 {
            let batch = Batch::random(&mut data, &[5, 48], DType::F32, step == 1);
            twin.check(&format!("{statistics:?}, step {step}"), &batch, true);
        }
    }
}

/// A step that begins on one handle waits for the evaluation that another still runs: both read ψ²,
/// and the step moves it. (Seen: softgpu's report of a race.)
#[test]
fn a_step_on_one_handle_waits_for_an_evaluation_on_another() {
    let handles = [(); 2].map(|()| Device::new_cuda_with_stream(0).unwrap());
    let (layer, _varmap) = layer_on(&handles[0], 48, config(Some(4)), DType::F32);
    let xs = (handles.each_ref())
        .map(|device| Batch::random(&mut Data::on(device, 23), &[5, 48], DType::F32, false).xs);
    for (evaluated, trained) in [(0, 1), (1, 0), (1, 1), (0, 1)] {
        let expected = to_f64(&layer.forward_t(&xs[evaluated], false).unwrap());
        let ys = layer.forward_t(&xs[evaluated], false).unwrap();
        layer.forward_t(&xs[trained], true).unwrap();
        assert_eq!(to_f64(&ys), expected);
    }
}

/// The same of ν, which a copy for the user reads and a backward moves.
#[test]
fn a_backward_on_one_handle_waits_for_a_reader_of_nu_on_another() {
    let [own, other] = [(); 2].map(|()| Device::new_cuda_with_stream(0).unwrap());
    let (layer, _varmap) = layer_on(&own, 48, config(Some(4)), DType::F32);
    let xs = Var::randn(0f32, 1., (5, 48), &other).unwrap();
    for _ in 0..3 {
        let expected = to_f64(&layer.nu().unwrap());
        let loss = layer.forward(&xs).unwrap().sum_all().unwrap();
        let nu = layer.nu().unwrap();
        loss.backward().unwrap();
        assert_eq!(to_f64(&nu), expected);
    }
}

/// Without events, the user keeps the order of two handles' work, by waiting between calls. So
/// nothing in a forward may depend on events. (Seen: reads of a copy of ψ² that was not written
/// yet.) In a backward, candle itself adds gradients of both handles.
#[test]
fn two_handles_without_events() {
    let with_stream = || {
        let device = Device::new_cuda_with_stream(0).unwrap();
        // SAFETY: the two streams wait for each other between calls, below.
        unsafe { device.as_cuda_device().unwrap().disable_event_tracking() };
        device
    };
    let plain = || Device::new_cuda(0).unwrap();
    for handles in [[with_stream(), with_stream()], [plain(), with_stream()]] {
        let wait = || (handles.iter()).for_each(|device| device.synchronize().unwrap());
        let (layer, _varmap) = layer_on(&handles[0], 48, config(Some(4)), DType::F32);
        for device in handles.iter().chain(&handles) {
            let xs = Tensor::ones((5, 48), DType::F32, device).unwrap();
            wait();
            let evaluated = layer.forward_t(&xs, false).unwrap();
            wait();
            layer.forward_t(&xs, true).unwrap();
            wait();
            assert!(to_f64(&evaluated).iter().all(|y| y.is_finite()));
        }
        assert_eq!(layer.steps().unwrap(), 4);
    }
}

/// Two threads go back through one graph. (Seen: each waited for a lock that the other held.)
#[test]
fn two_threads_go_back_through_one_graph() {
    let device = Device::new_cuda_with_stream(0).unwrap();
    in_time(move || {
        let step = |threads: bool| {
            let (layer, _varmap) = layer_on(&device, 8, config(None), DType::F32);
            let xs = Var::ones((4, 8), DType::F32, &device).unwrap();
            let loss = layer.forward(&xs).unwrap().sum_all().unwrap();
            if threads {
                let start = Barrier::new(2);
                std::thread::scope(|scope| {
                    for _ in 0..2 {
                        scope.spawn(|| {
                            start.wait();
                            loss.backward().unwrap();
                        });
                    }
                });
            } else {
                loss.backward().unwrap();
                loss.backward().unwrap();
            }
            state(&layer)
        };
        let expected = step(false);
        for _ in 0..200 {
            assert_eq!(step(true), expected);
        }
    });
}

/// A `VarMap` may hold tensors that are spread over devices, as a checkpoint loaded in one go is.
#[test]
fn tensors_in_the_wrong_place_are_rejected() {
    let gpu = gpu();
    for (name, place, expected) in [
        ("ema_gz", &CPU, &gpu),
        ("weight", &CPU, &gpu),
        ("bias", &CPU, &gpu),
    ] {
        let (_, varmap) = layer_on(&gpu, 8, config(None), DType::F32);
        let moved = var(&varmap, name).to_device(place).unwrap();
        insert(&varmap, name, &moved);
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &gpu);
        let (expected, got) = (expected.location(), place.location());
        let text =
            format!("{name} on {expected:?}, got it on {got:?}: move it before the layer is built");
        rejected(power_norm(8, config(None), vb), &text);
    }
}

#[test]
fn tensors_of_another_device_are_rejected() {
    let gpu = gpu();
    let (on_gpu, _gpu_varmap) = layer_on(&gpu, 8, config(None), DType::F32);
    let (on_cpu, _cpu_varmap) = layer(8, config(None), DType::F32);
    for (layer, own, other) in [(on_gpu, &gpu, &CPU), (on_cpu, &CPU, &gpu)] {
        let xs = |device| Tensor::ones((5, 8), DType::F32, device).unwrap();
        let keep = |device| Tensor::ones(5, DType::U8, device).unwrap();
        run(&layer, &Batch::new(xs(own), xs(own)), true);
        let before = state(&layer);
        let (place, got) = (own.location(), other.location());
        let text = format!("on the layer's device {place:?}, got {got:?}: move it by `to_device`");
        let (of_xs, of_keep) = (format!("xs {text}"), format!("keep {text}"));
        for train in [true, false] {
            layer.mode().set_training(train);
            rejected(layer.forward(&xs(other)), &of_xs);
            rejected(layer.forward_masked(&xs(other), &keep(own)), &of_xs);
            rejected(layer.forward_masked(&xs(own), &keep(other)), &of_keep);
        }
        assert_eq!(state(&layer), before);
    }
}

/// LayerNorm's constructors take any tensors, so each forward compares their devices. A bias on
/// another GPU was an address that a kernel read.
#[test]
fn a_bias_of_another_device_is_rejected() {
    let ones = |shape: &[usize], device| Tensor::ones(shape, DType::F32, device).unwrap();
    let mut pairs = vec![(gpu(), CPU.clone()), (CPU.clone(), gpu())];
    // One GPU may be all that there is.
    if let Ok(second) = Device::new_cuda_with_stream(1) {
        let first = Device::new_cuda_with_stream(0).unwrap();
        pairs.push((first, second));
    }
    for (own, other) in &pairs {
        let layer = LayerNorm::new(ones(&[8], own), ones(&[8], other), 1e-5);
        let text = format!(
            "bias on the layer's device {:?}, got {:?}: move it by `to_device`",
            own.location(),
            other.location()
        );
        rejected_by("layer_norm", layer.forward(&ones(&[5, 8], own)), &text);
    }
}

/// Two linear layers, PowerNorm between them.
fn model(device: &Device) -> (Sequential, PowerNorm, VarMap) {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
    let norm = power_norm(32, config(Some(4)), vb.pp("norm")).unwrap();
    let model = candle_nn::seq()
        .add(candle_nn::linear(4, 32, vb.pp("up")).unwrap())
        .add(norm.clone())
        .add(candle_nn::Activation::Relu)
        .add(candle_nn::linear(32, 1, vb.pp("down")).unwrap());
    (model, norm, varmap)
}

#[test]
fn a_model_trains_and_its_checkpoint_loads_on_the_cpu() {
    let gpu = gpu();
    let (trained, norm, varmap) = model(&gpu);
    for (name, var) in varmap.data().lock().unwrap().iter() {
        // No step waits for the GPU to learn its number.
        let on_cpu = ["norm.iters", "norm.groups"].contains(&name.as_str());
        let expected = if on_cpu { &CPU } else { &gpu };
        assert!(var.device().same_device(expected), "{name}");
    }
    let mut data = Data::on(&gpu, 16);
    let values = data.normal(256 * 4);
    let targets: Vec<f64> = values.chunks(4).map(|x| x[0] * x[1] + x[2].sin()).collect();
    let xs = data.tensor(&values, &[256, 4], DType::F32);
    let targets = data.tensor(&targets, &[256, 1], DType::F32);
    let mut optimizer = AdamW::new_lr(varmap.all_vars(), 0.01).unwrap();
    let mut losses = vec![];
    for _ in 0..200 {
        let loss = candle_nn::loss::mse(&trained.forward(&xs).unwrap(), &targets).unwrap();
        optimizer.backward_step(&loss).unwrap();
        losses.push(loss.to_scalar::<f32>().unwrap());
    }
    assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    assert!(losses[199] < 0.3 * losses[0], "{losses:?}");
    assert_eq!(norm.steps().unwrap(), 200);

    let file = tempfile::NamedTempFile::new().unwrap();
    varmap.save(file.path()).unwrap();
    let (loaded, loaded_norm, mut loaded_varmap) = model(&CPU);
    loaded_varmap.load(file.path()).unwrap();
    assert_eq!(state(&loaded_norm), state(&norm));
    for (name, loaded) in loaded_varmap.data().lock().unwrap().iter() {
        assert_same_bits(name, loaded, &var(&varmap, name));
    }
    for norm in [&norm, &loaded_norm] {
        norm.mode().set_training(false);
    }
    // Sums of at most 32 terms on either side: 16·sqrt(32)·u is half of this.
    let expected = to_f64(&trained.forward(&xs).unwrap());
    let actual = loaded.forward(&xs.to_device(&CPU).unwrap()).unwrap();
    assert_relative("on the CPU", &actual, &expected, 1e-5);
}

/// candle copies the step count to the CPU there, so no `VarMap` would have it.
#[test]
fn a_builder_that_renames_is_rejected() {
    let device = Device::new_cuda_with_stream(0).unwrap();
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &device);
    let vb = vb.rename_f(|name| name.replace("LayerNorm", "norm"));
    let error = message(power_norm(4, 1e-5, vb.pp("LayerNorm")));
    assert!(error.contains("got a copy of iters: "), "{error}");
}

/// The tensors of a trained layer's checkpoint, all on the GPU.
fn trained_tensors(gpu: &Device) -> HashMap<String, Tensor> {
    let (layer, varmap) = layer_on(gpu, 4, config(None), DType::F32);
    let xs = Data::on(gpu, 24).tensor(&[1.; 8], &[2, 4], DType::F32);
    layer.forward(&xs).unwrap();
    let tensors = frozen(&varmap).into_iter();
    tensors
        .map(|(name, tensor)| (name, tensor.to_device(gpu).unwrap()))
        .collect()
}

/// A loop that programs write when names differ puts the whole file on the GPU. (Seen: "move it
/// before the layer is built", of one count and then of the other.)
#[test]
fn counts_in_a_varmap_on_a_gpu_are_rejected_with_what_to_do() {
    let gpu = gpu();
    let varmap = variables(&trained_tensors(&gpu));
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &gpu);
    let error = message(power_norm(4, config(None), vb.clone()));
    assert!(
        error.contains("keep iters and groups on the CPU"),
        "{error}"
    );
    for name in ["iters", "groups"] {
        let on_cpu = var(&varmap, name).to_device(&CPU).unwrap();
        insert(&varmap, name, &on_cpu);
    }
    assert_eq!(power_norm(4, config(None), vb).unwrap().steps().unwrap(), 1);
}

/// Tensors as they are, whatever device a builder asks for.
struct AsTheyAre(HashMap<String, Tensor>);

impl candle_nn::var_builder::SimpleBackend for AsTheyAre {
    fn get(
        &self,
        _: candle::Shape,
        name: &str,
        _: candle_nn::Init,
        _: DType,
        _: &Device,
    ) -> candle::Result<Tensor> {
        self.get_unchecked(name, DType::F32, &CPU)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle::Result<Tensor> {
        let found = self.0.get(name).cloned();
        found.ok_or_else(|| candle::Error::msg(format!("no {name}")))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

/// A frozen layer has copies of its counts, so they are read from wherever they are.
#[test]
fn counts_of_a_frozen_layer_may_be_on_a_gpu() {
    let gpu = gpu();
    let backend = Box::new(AsTheyAre(trained_tensors(&gpu)));
    let vb = VarBuilder::from_backend(backend, DType::F32, gpu);
    let layer = power_norm(4, config(None), vb.clone()).unwrap();
    assert_eq!(layer.steps().unwrap(), 1);
    let error = message(power_norm(4, config(Some(2)), vb));
    assert!(error.contains("got group_scaling None"), "{error}");
}
