//! What only softgpu can show: that a layer stays whole whatever call of the driver fails, and that
//! the kernels need each of their barriers.

mod common;

use candle::{CudaDevice, DType, Device, Result, Tensor, Var};
use candle_powernorm::{PowerNorm, PowerNormConfig, Recipe, Statistics};
use common::gpu::Gradient;
use common::softgpu::Softgpu;
use common::{config, same_bits, same_state, state, thinned, Batch, Data, Outcome, Twin, PATHS};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

// Defines `POWER_NORM`, the kernels' PTX.
include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// One test at a time: what the driver hands out is counted for the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Outputs of a layer: of its input, and the sum with a residual.
type Outputs = (Tensor, Option<Tensor>);

/// A forward that waits for its backward.
struct Pass {
    x: Var,
    y: Tensor,
    loss: Tensor,
}

fn backward(layer: &PowerNorm, pass: Pass) -> Result<Outcome> {
    let grads = pass.loss.backward()?;
    let grad = |of: &Tensor| grads.get(of).unwrap().clone();
    Ok(Outcome {
        dx: grad(&pass.x),
        dweight: layer.weight().map(grad),
        dbias: layer.bias().map(grad),
        y: pass.y.detach(),
    })
}

/// A layer whose calls fail one by one, and its twin, of which none does.
struct Pair<'a> {
    softgpu: &'a Softgpu,
    device: &'a CudaDevice,
    layer: PowerNorm,
    twin: PowerNorm,
    batch: Batch,
    with_residual: bool,
    what: String,
}

impl Pair<'_> {
    fn input(&self) -> Var {
        Var::from_tensor(&self.batch.xs).unwrap()
    }

    /// The layer's part of a forward.
    fn outputs(&self, layer: &PowerNorm, x: &Tensor) -> Result<Outputs> {
        let residual = &self.batch.dy;
        match (self.with_residual, &self.batch.keep) {
            (false, None) => Ok((layer.forward_t(x, true)?, None)),
            (false, Some(keep)) => Ok((layer.forward_masked(x, keep)?, None)),
            (true, None) => {
                let (y, sum) = layer.forward_residual(x, residual)?;
                Ok((y, Some(sum)))
            }
            (true, Some(keep)) => {
                let (y, sum) = layer.forward_residual_masked(x, residual, keep)?;
                Ok((y, Some(sum)))
            }
        }
    }

    /// With a loss whose gradient the batch has.
    fn pass(&self, x: Var, (y, sum): Outputs) -> Pass {
        let of = |output: &Tensor| output.apply_op1(Gradient(self.batch.dy.clone()));
        let mut loss = of(&y).unwrap();
        if let Some(sum) = &sum {
            loss = (loss + of(sum).unwrap()).unwrap();
        }
        Pass { x, y, loss }
    }

    /// A forward that nothing disturbs.
    fn forward(&self, layer: &PowerNorm) -> Pass {
        let x = self.input();
        let outputs = self.outputs(layer, &x).unwrap();
        self.pass(x, outputs)
    }

    /// A step of both that nothing disturbs.
    fn step(&self, what: &str) {
        let [ours, theirs] =
            [&self.layer, &self.twin].map(|layer| backward(layer, self.forward(layer)).unwrap());
        same_bits(what, &ours, &theirs);
        same_state(what, &state(&self.layer), &state(&self.twin));
    }

    /// Every call of a forward fails once.
    fn disturb_forwards(&self) {
        let x = self.input();
        let (outputs, calls) = (self.softgpu).counting(|| self.outputs(&self.twin, &x).unwrap());
        backward(&self.twin, self.pass(x, outputs)).unwrap();
        backward(&self.layer, self.forward(&self.layer)).unwrap();
        let device = Device::Cuda(self.device.clone());
        let live = self.softgpu.live(&device);
        let mut failures = 0;
        for n in 1..=calls {
            let what = format!("{}: call {n} of a forward", self.what);
            let before = state(&self.layer);
            let x = self.input();
            let disturbed = || self.outputs(&self.layer, &x);
            match self.softgpu.failing(self.device, n, disturbed) {
                Err(_) => {
                    drop(x);
                    same_state(&what, &state(&self.layer), &before);
                    failures += 1;
                }
                // The call did not matter, or there was none.
                Ok(outputs) => {
                    let ours = backward(&self.layer, self.pass(x, outputs)).unwrap();
                    let theirs = backward(&self.twin, self.forward(&self.twin)).unwrap();
                    same_bits(&what, &ours, &theirs);
                }
            }
            self.step(&format!("{what}, next"));
            assert_eq!(self.softgpu.live(&device), live, "{what}: leaks");
        }
        assert!(failures > 0);
    }

    /// Every call of a backward fails once.
    fn disturb_backwards(&self) {
        let pass = self.forward(&self.twin);
        let (_, calls) = (self.softgpu).counting(|| backward(&self.twin, pass).unwrap());
        backward(&self.layer, self.forward(&self.layer)).unwrap();
        let device = Device::Cuda(self.device.clone());
        let live = self.softgpu.live(&device);
        let (mut failures, mut late) = (0, 0);
        for n in 1..=calls {
            let what = format!("{}: call {n} of a backward", self.what);
            let [ours, theirs] = [&self.layer, &self.twin].map(|layer| self.forward(layer));
            let before = state(&self.layer);
            let disturbed = || backward(&self.layer, ours);
            match self.softgpu.failing(self.device, n, disturbed) {
                Err(_) if state(&self.layer) == before => {
                    drop(theirs);
                    failures += 1;
                }
                // The layer's own part was done.
                Err(_) => {
                    backward(&self.twin, theirs).unwrap();
                    late += 1;
                }
                Ok(ours) => same_bits(&what, &ours, &backward(&self.twin, theirs).unwrap()),
            }
            same_state(&what, &state(&self.layer), &state(&self.twin));
            self.step(&format!("{what}, next"));
            assert_eq!(self.softgpu.live(&device), live, "{what}: leaks");
        }
        assert!(failures > 0);
        if !self.with_residual {
            let after = self.calls_after_the_layer();
            let what = &self.what;
            assert!(
                late <= after,
                "{what}: of the calls that fail a backward {late} come after ν has moved, but \
                 candle makes {after} there"
            );
        }
    }

    /// How many calls can fail of those that candle makes between the layer's backward and its end:
    /// it adds each gradient to zeros.
    fn calls_after_the_layer(&self) -> usize {
        let layer = &self.layer;
        let gradients = [Some(&self.batch.xs), layer.weight(), layer.bias()];
        let gradients: Vec<Tensor> = (gradients.into_iter().flatten())
            .map(|tensor| tensor.detach())
            .collect();
        let add_all = || -> Result<Vec<Tensor>> {
            let add = |gradient: &Tensor| gradient.zeros_like()? + gradient;
            gradients.iter().map(add).collect()
        };
        let (_, calls) = self.softgpu.counting(|| add_all().unwrap());
        let fails = |n: &u64| self.softgpu.failing(self.device, *n, add_all).is_err();
        (1..=calls).filter(fails).count()
    }
}

/// Rows, channels, groups, whether there is a mask, and whether a residual.
const SHAPES: [(usize, usize, Option<usize>, bool, bool); 4] = [
    (9, 48, None, false, false),
    (9, 48, Some(4), true, false),
    (9, 48, Some(4), true, true),
    // The group scaling's factors take a launch of their own.
    (3, 1025, Some(1), false, false),
];

/// A call that fails makes the forward or the backward fail, if it matters. The state is then as it
/// was before, the next step is right, and nothing leaks.
fn any_call_may_fail(statistics: Statistics, warmup_steps: usize) {
    let _alone = alone();
    let softgpu = Softgpu::find().unwrap();
    let device = CudaDevice::new_with_stream(0).unwrap();
    // SAFETY: all work is on one stream. (With events, cudarc forgets an allocation for which it
    // cannot make them.)
    unsafe { device.disable_event_tracking() };
    let gpu = Device::Cuda(device.clone());
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        for (rows, cols, group_scaling, padded, with_residual) in thinned(SHAPES) {
            let config = PowerNormConfig {
                recipe,
                statistics,
                warmup_steps,
                group_scaling,
                ..1e-5.into()
            };
            let new = || Twin::new(&mut Data::on(&gpu, 1), cols, config, DType::F32).layer;
            let mut data = Data::on(&gpu, 2);
            let pair = Pair {
                softgpu: &softgpu,
                device: &device,
                layer: new(),
                twin: new(),
                batch: Batch::random(&mut data, &[rows, cols], DType::F32, padded),
                with_residual,
                what: format!("{config:?}, padded {padded}, residual {with_residual}"),
            };
            for _ in 0..2 {
                pair.step(&pair.what);
            }
            pair.disturb_forwards();
            pair.disturb_backwards();
        }
    }
}

#[test]
fn any_call_may_fail_in_the_warm_up() {
    any_call_may_fail(Statistics::Running, 1000);
}

#[test]
fn any_call_may_fail_after_the_warm_up() {
    any_call_may_fail(Statistics::Running, 1);
}

#[test]
fn any_call_may_fail_by_the_statistics_of_the_batch() {
    any_call_may_fail(Statistics::Batch, 1);
}

/// Steps of layers that walk the kernels in every way, with several chunks of rows.
fn walk_every_path() {
    let _alone = alone();
    let gpu = Device::new_cuda_with_stream(0).unwrap();
    // A group of several warps whose threads have a piece each. Two pieces without a group, and so
    // many rows that with `SOFTGPU_SMS=4` a block has two warps: lanes of one are in order without
    // a barrier.
    let pieces = [(131, Some(1), 70), (12, None, 300)];
    let paths = PATHS.map(|(cols, groups)| (cols, groups, 70));
    let recipes = [Recipe::Paper, Recipe::Fairseq].into_iter().cycle();
    for ((cols, groups, rows), recipe) in paths.into_iter().chain(pieces).zip(recipes) {
        let config = PowerNormConfig {
            recipe,
            ..config(groups)
        };
        let mut twin = Twin::new(&mut Data::on(&gpu, 3), cols, config, DType::F32);
        let mut data = Data::on(&gpu, 4);
        for step in 0..3 {
            let batch = Batch::random(&mut data, &[rows, cols], DType::F32, step != 1);
            let what = format!("{cols} channels, groups {groups:?}, step {step}");
            twin.check(&what, &batch, true);
        }
    }
}

#[test]
fn every_path() {
    walk_every_path();
}

/// Without any one of their barriers, kernels race or compute wrong values.
#[test]
fn every_barrier_is_needed() {
    let softgpu = Softgpu::find().unwrap();
    softgpu.take_counts();
    walk_every_path();
    let launched = softgpu.take_counts()["kernels"].clone();
    let lines: Vec<&str> = POWER_NORM.lines().collect();
    let (mut kernel, mut barriers) = ("", vec![]);
    for (number, line) in lines.iter().enumerate() {
        if let Some(entry) = line.strip_prefix(".visible .entry ") {
            kernel = entry.trim_end_matches('(');
        }
        if line.trim_start().starts_with("bar.sync") && launched.get(kernel).is_some() {
            barriers.push((kernel, number));
        }
    }
    assert!(barriers.len() > 20, "{barriers:?}");
    let folder = tempfile::tempdir().unwrap();
    let edited = folder.path().join("edited.ptx");
    let walk_with = |lines: &[&str]| {
        std::fs::write(&edited, lines.join("\n")).unwrap();
        let mut walk = Command::new(std::env::current_exe().unwrap());
        // On a GPU so small that its blocks have several rows each.
        walk.args(["every_path", "--exact"]).env("SOFTGPU_SMS", "4");
        let run = walk.env("SOFTGPU_PTX", &edited).output().unwrap();
        let text = [run.stdout, run.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (run.status.success(), text.concat())
    };
    let (succeeds, text) = walk_with(&lines);
    assert!(succeeds, "{text}");
    let needless: Vec<_> = (barriers.into_iter())
        .filter(|&(_, number)| {
            let mut without = lines.clone();
            without.remove(number);
            let (succeeds, text) = walk_with(&without);
            assert!(!text.contains("INVALID_PTX"), "{text}");
            succeeds
        })
        .collect();
    assert!(needless.is_empty(), "nothing shows without {needless:?}");
}
