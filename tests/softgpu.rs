//! Tests that only softgpu can run:
//!
//! - Whatever call of the driver fails, a layer's state has moved by a whole step or not at all.
//! - The kernels need each of their barriers.
//! - Offsets have room for any batch.

mod common;

use candle::{CudaDevice, DType, Device, Module, Result, Tensor, Var};
use candle_powernorm::{GroupScaling, PowerNorm, Ranks, Recipe, Statistics};
use common::distributed::Same;
use common::softgpu::Softgpu;
use common::*;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

// Defines `POWER_NORM`, the kernels' PTX.
include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// One test at a time, because live objects are counted for the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A forward that waits for its backward.
struct Pass {
    x: Var,
    y: Tensor,
    loss: Tensor,
}

impl Pass {
    /// With a loss whose gradient the batch has.
    fn new(x: Var, outputs: Outputs, batch: &Batch) -> Self {
        let loss = loss_of(&outputs, &batch.dy, &batch.dy).unwrap();
        let (y, _) = outputs;
        Self { x, y, loss }
    }
}

fn backward(layer: &PowerNorm, pass: Pass) -> Result<Outcome> {
    let grads = pass.loss.backward()?;
    Ok(Outcome::of(layer, &pass.x, &pass.y, &grads))
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

    /// The layer's part of a forward. A residual is the gradient again.
    fn outputs(&self, layer: &PowerNorm, x: &Tensor) -> Result<Outputs> {
        let residual = self.with_residual.then_some(&self.batch.dy);
        outputs(layer, x, residual, self.batch.keep.as_ref())
    }

    /// A forward that nothing disturbs.
    fn forward(&self, layer: &PowerNorm) -> Pass {
        let x = self.input();
        let outputs = self.outputs(layer, &x).unwrap();
        Pass::new(x, outputs, &self.batch)
    }

    /// A step of both that nothing disturbs.
    fn step(&self, what: &str) {
        let [ours, theirs] =
            [&self.layer, &self.twin].map(|layer| backward(layer, self.forward(layer)).unwrap());
        same_bits(what, &ours, &theirs);
        same_state(what, &state(&self.layer), &state(&self.twin));
    }

    /// The launches of this crate's kernels since the last time.
    fn launches(&self) -> u64 {
        launches(self.softgpu, self.device)
    }

    /// Every call of a forward fails once.
    fn disturb_forwards(&self) {
        let x = self.input();
        let forward = || self.outputs(&self.twin, &x).unwrap();
        let (outputs, calls) = self.softgpu.counting(None, forward);
        backward(&self.twin, Pass::new(x, outputs, &self.batch)).unwrap();
        backward(&self.layer, self.forward(&self.layer)).unwrap();
        let device = Device::Cuda(self.device.clone());
        let live = self.softgpu.live(&device);
        let mut failures = 0;
        for n in 1..=calls {
            let what = format!("{}: call {n} of a forward", self.what);
            let before = state(&self.layer);
            let x = self.input();
            let disturbed = || self.outputs(&self.layer, &x);
            self.launches();
            match self.softgpu.failing(None, self.device, n, disturbed) {
                Err(_) if state(&self.layer) == before => {
                    drop(x);
                    failures += 1;
                }
                // ψ² has moved, in the second launch: t too, as in a forward that succeeds.
                Err(_) => {
                    drop(x);
                    assert!(self.launches() >= 2, "{what}");
                    self.forward(&self.twin);
                }
                // The call did not matter, or there was none.
                Ok(outputs) => {
                    let ours = Pass::new(x, outputs, &self.batch);
                    let ours = backward(&self.layer, ours).unwrap();
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
        self.launches();
        let (_, calls) = (self.softgpu).counting(None, || backward(&self.twin, pass).unwrap());
        let all_launches = self.launches();
        backward(&self.layer, self.forward(&self.layer)).unwrap();
        let device = Device::Cuda(self.device.clone());
        let live = self.softgpu.live(&device);
        let (mut failures, mut late) = (0, 0);
        for n in 1..=calls {
            let what = format!("{}: call {n} of a backward", self.what);
            let [ours, theirs] = [&self.layer, &self.twin].map(|layer| self.forward(layer));
            let before = state(&self.layer);
            let disturbed = || backward(&self.layer, ours);
            self.launches();
            match self.softgpu.failing(None, self.device, n, disturbed) {
                Err(_) if state(&self.layer) == before => {
                    drop(theirs);
                    failures += 1;
                }
                // ν has moved, in the second launch. A third may follow.
                Err(_) => {
                    let launches = self.launches();
                    assert!(launches >= 2, "{what}");
                    backward(&self.twin, theirs).unwrap();
                    late += usize::from(launches == all_launches);
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
                "{what}: of the calls that fail a backward {late} come after its last launch, but \
                 candle makes {after} there"
            );
        }
    }

    /// A forward and a backward allocate all that they need before their first launch.
    fn disturb_allocations(&self) {
        let allocate = Some(c"cuMemAllocAsync");
        let x = self.input();
        let forward = || self.outputs(&self.layer, &x);
        let (outputs, allocations) = self.softgpu.counting(allocate, || forward().unwrap());
        assert!(allocations > 0);
        let pass = Pass::new(x.clone(), outputs, &self.batch);
        self.launches();
        let back = |pass| backward(&self.layer, pass);
        let (_, more) = self.softgpu.counting(allocate, || back(pass).unwrap());
        let all_launches = self.launches();
        for n in 1..=allocations {
            let failed = (self.softgpu).failing(allocate, self.device, n, forward);
            assert!(failed.is_err());
            assert_eq!(self.launches(), 0, "{}: allocation {n}", self.what);
        }
        for n in 1..=more {
            let pass = self.forward(&self.layer);
            self.launches();
            let disturbed = || back(pass);
            let failed = (self.softgpu).failing(allocate, self.device, n, disturbed);
            assert!(failed.is_err());
            // candle allocates before and after the layer.
            let launches = self.launches();
            let what = format!("{}: allocation {n} of a backward", self.what);
            assert!(launches == 0 || launches == all_launches, "{what}");
        }
    }

    /// The number of calls that can fail between the end of the layer's backward and the end of
    /// candle's: candle adds each gradient to zeros.
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
        let (_, calls) = self.softgpu.counting(None, || add_all().unwrap());
        let failing = |n| self.softgpu.failing(None, self.device, n, add_all);
        (1..=calls).filter(|&n| failing(n).is_err()).count()
    }
}

/// The launches of this crate's kernels since the last time.
fn launches(softgpu: &Softgpu, device: &CudaDevice) -> u64 {
    Device::Cuda(device.clone()).synchronize().unwrap();
    let counts = softgpu.take_counts();
    let kernels = counts["kernels"].as_object().unwrap();
    let ours = |name: &str| POWER_NORM.contains(&format!(".entry {name}("));
    (kernels.iter().filter(|(name, _)| ours(name)))
        .map(|(_, counts)| counts["launches"].as_u64().unwrap())
        .sum()
}

/// Rows, channels, groups, whether there is a mask, and whether a residual.
const SHAPES: [(usize, usize, Option<usize>, bool, bool); 4] = [
    (9, 48, None, false, false),
    (9, 48, Some(4), true, false),
    (9, 48, Some(4), true, true),
    // The group scaling's factors take a launch of their own.
    (3, 1025, Some(1), false, false),
];

/// A call that fails makes the forward or the backward fail, if it matters. Before the launches,
/// the state is then as it was. After them it has taken the whole step. The next step is right, and
/// nothing leaks.
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
            let config = 1e-5
                .with_kind((recipe, statistics))
                .with_groups(group_scaling)
                .with_warm_up(warmup_steps);
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
            pair.disturb_allocations();
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

/// A call, and the tensors that it returns.
type Call<'a> = &'a dyn Fn() -> Result<Vec<Tensor>>;

/// A call that fails makes a forward or a backward of a LayerNorm or an RmsNorm fail, if it
/// matters. Memory comes before the first launch, the next step is right, and nothing leaks.
#[test]
fn any_call_of_a_row_norm_may_fail() {
    let _alone = alone();
    let softgpu = Softgpu::find().unwrap();
    let device = CudaDevice::new_with_stream(0).unwrap();
    // SAFETY: as in `any_call_may_fail`.
    unsafe { device.disable_event_tracking() };
    let gpu = Device::Cuda(device.clone());
    // The wide rows take a launch of their own for their statistics.
    for (rows, cols) in [(9, 48), (3, 16392)] {
        for row_norm in RowNorm::both(&mut Data::on(&gpu, 1), cols, DType::F32) {
            let batch = Batch::random(&mut Data::on(&gpu, 2), &[rows, cols], DType::F32, false);
            let x = Var::from_tensor(&batch.xs).unwrap();
            let forward = || row_norm.norm.forward(&x);
            let y = forward().unwrap();
            let backward = || row_norm.gradients(&x, &y, &batch.dy);
            let values = |tensors: &[Tensor]| tensors.iter().map(bits).collect::<Vec<_>>();
            let expected = [values(&[y.detach()]), values(&backward().unwrap())];
            let live = softgpu.live(&gpu);
            let passes: [(&str, Call); 2] = [
                ("forward", &|| Ok(vec![forward()?.detach()])),
                ("backward", &backward),
            ];
            for ((pass, work), expected) in passes.into_iter().zip(expected) {
                for function in [None, Some(c"cuMemAllocAsync")] {
                    launches(&softgpu, &device);
                    let (done, calls) = softgpu.counting(function, || work().unwrap());
                    drop(done);
                    let all_launches = launches(&softgpu, &device);
                    let mut failures = 0;
                    for n in 1..=calls {
                        let what = format!(
                            "{} of {cols}: call {n} of a {pass}, {function:?}",
                            row_norm.name
                        );
                        let result = softgpu.failing(function, &device, n, work);
                        let launched = launches(&softgpu, &device);
                        match result {
                            // candle allocates before and after the layer.
                            Err(_) => {
                                let whole = [0, all_launches].contains(&launched);
                                assert!(whole || function.is_none(), "{what}: {launched}");
                                failures += 1;
                            }
                            // The call did not matter.
                            Ok(tensors) => assert_eq!(values(&tensors), expected, "{what}"),
                        }
                        assert_eq!(values(&work().unwrap()), expected, "{what}, next");
                        assert_eq!(softgpu.live(&gpu), live, "{what}: leaks");
                        launches(&softgpu, &device);
                    }
                    assert!(failures > 0);
                }
            }
        }
    }
}

/// The numbers of launches in the guide's table.
#[test]
fn launches_are_those_of_the_guide() {
    let _alone = alone();
    let softgpu = Softgpu::find().unwrap();
    let device = CudaDevice::new_with_stream(0).unwrap();
    let gpu = Device::Cuda(device.clone());
    let guide = |call: &str| -> Vec<Option<u64>> {
        let guide = include_str!("../docs/guide/gpu.md");
        let start = format!("| {call} | ");
        let rows: Vec<_> = guide
            .lines()
            .filter_map(|line| line.strip_prefix(&start))
            .collect();
        let [row] = rows[..] else {
            panic!("the guide has {} rows of {call}", rows.len())
        };
        let digit = |cell: &str| cell.trim().chars().next().map(|digit| digit.to_string());
        let cells = row.trim_end_matches('|').split(" | ");
        cells
            .map(|cell| digit(cell).map(|digit| digit.parse().unwrap()))
            .collect()
    };
    let batch = Batch::random(&mut Data::on(&gpu, 2), &[9, 48], DType::F32, false);
    let x = Var::from_tensor(&batch.xs).unwrap();
    let check = |call: &str, what: &str, forward: &dyn Fn() -> Tensor| {
        // Over ranks, the first step compares the layers.
        forward();
        let [in_forward, in_backward] = guide(call)[..] else {
            panic!("a row of two cells")
        };
        launches(&softgpu, &device);
        let y = forward();
        assert_eq!(
            Some(launches(&softgpu, &device)),
            in_forward,
            "{call}, {what}: forward"
        );
        if in_backward.is_some() {
            y.apply_op1(Gradient(batch.dy.clone()))
                .unwrap()
                .backward()
                .unwrap();
            assert_eq!(
                Some(launches(&softgpu, &device)),
                in_backward,
                "{call}, {what}: backward"
            );
        }
    };
    let layer = |config| Twin::new(&mut Data::on(&gpu, 1), 48, config, DType::F32).layer;
    for groups in [None, Some(4)] {
        let groups = config(groups);
        let what = format!("{groups:?}");
        let [pn, warming_up] = [0, 1000].map(|steps| layer(groups.with_warm_up(steps)));
        let pn_v = layer(groups.with_statistics(Statistics::Batch));
        let trained = |layer: &PowerNorm| layer.forward_t(&x, true).unwrap();
        check("training after the warm-up (PN)", &what, &|| trained(&pn));
        for layer in [&warming_up, &pn_v] {
            let call = "training during the warm-up, and PN-V";
            check(call, &what, &|| trained(layer));
        }
        check("recalibration", &what, &|| {
            let _scope = pn.mode().recalibrate_scope();
            pn.forward(&x).unwrap()
        });
        check("evaluation", &what, &|| pn.forward_t(&x, false).unwrap());
        let ranks = Ranks::new(Same(gpu.clone()));
        let over = |layer: &PowerNorm| layer.clone().with_ranks(&ranks);
        let call = "over several ranks, after the warm-up";
        let sharded = over(&pn);
        check(call, &what, &|| trained(&sharded));
        for layer in [&warming_up, &pn_v] {
            let call = "over several ranks, during the warm-up, and PN-V";
            let sharded = over(layer);
            check(call, &what, &|| trained(&sharded));
        }
    }
    for row_norm in RowNorm::both(&mut Data::on(&gpu, 1), 48, DType::F32) {
        check("`LayerNorm` and `RmsNorm`", row_norm.name, &|| {
            row_norm.norm.forward(&x).unwrap()
        });
    }
}

/// Queries in the output of a fused projection, and other views that the guide names, are read where
/// they are: a forward and a backward of them launch what those of packed rows launch.
#[test]
fn views_are_read_where_they_are() {
    let _alone = alone();
    let softgpu = Softgpu::find().unwrap();
    let gpu = Device::new_cuda_with_stream(0).unwrap();
    let copied = [
        "heads before few tokens",
        "columns from within a piece",
        "rows of whole pieces, from within one",
    ];
    for (name, shape, view) in ROW_VIEWS {
        for dtype in [DType::F32, DType::BF16] {
            let mut data = Data::on(&gpu, 2);
            let base = data.normal(shape.iter().product());
            let rows = view(&data.tensor(&base, shape, dtype)).unwrap();
            let cols = rows.dims()[rows.rank() - 1];
            let dy = Batch::random(&mut data, rows.dims(), dtype, false).dy;
            for norm in RowNorm::both(&mut data, cols, dtype) {
                let launched = |rows: &Tensor| {
                    gpu.synchronize().unwrap();
                    softgpu.take_counts();
                    let y = norm.norm.forward(rows).unwrap();
                    y.apply_op1(Gradient(dy.clone()))
                        .unwrap()
                        .backward()
                        .unwrap();
                    gpu.synchronize().unwrap();
                    let counts = softgpu.take_counts();
                    let kernels = counts["kernels"].as_object().unwrap();
                    let launches = kernels.values().map(|of| of["launches"].as_u64().unwrap());
                    launches.sum::<u64>()
                };
                let [of_view, of_copy] =
                    [rows.clone(), rows.force_contiguous().unwrap()].map(|rows| launched(&rows));
                let expected = of_copy + u64::from(copied.contains(&name));
                assert_eq!(of_view, expected, "{}: {name}, {dtype:?}", norm.name);
            }
        }
    }
}

/// The gradients of weight and bias take one allocation, unless the second one would begin within a
/// sector.
#[test]
fn gradients_of_parameters_share_an_allocation() {
    let _alone = alone();
    let softgpu = Softgpu::find().unwrap();
    let gpu = Device::new_cuda_with_stream(0).unwrap();
    for (cols, dtype, own) in [
        (48, DType::F32, 0),
        (48, DType::BF16, 0),
        (50, DType::F32, 1),
    ] {
        let batch = Batch::random(&mut Data::on(&gpu, 2), &[9, cols], dtype, false);
        let x = Var::from_tensor(&batch.xs).unwrap();
        // LayerNorm has a bias, and RmsNorm none.
        let [with, without] = RowNorm::both(&mut Data::on(&gpu, 1), cols, dtype).map(|norm| {
            let y = norm.norm.forward(&x).unwrap();
            let backward = || norm.gradients(&x, &y, &batch.dy).unwrap();
            softgpu.counting(Some(c"cuMemAllocAsync"), backward).1
        });
        // candle adds the gradient to zeros.
        assert_eq!(with - without, 2 + own, "{cols} channels in {dtype:?}");
    }
}

/// Runs a test in a process of its own. Kernels stay loaded until a process ends, so a test that
/// counts what is loaded may not share its process with other tests.
fn in_a_new_process(name: &str, test: impl FnOnce()) {
    const VARIABLE: &str = "CANDLE_POWERNORM_TEST_OF_THIS_PROCESS";
    if std::env::var_os(VARIABLE).is_some_and(|running| running == name) {
        return test();
    }
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args([name, "--exact", "--nocapture"]);
    let run = process.env(VARIABLE, name).output().unwrap();
    let [out, err] = [run.stdout, run.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(run.status.success(), "{out}{err}");
    assert!(out.contains("1 passed"), "{out}{err}");
}

/// A call loads all kernels that it and its step of the state launch before the first launch. The
/// layers of a GPU load each kernel once.
#[test]
fn kernels_are_loaded_before_the_first_launch() {
    in_a_new_process("kernels_are_loaded_before_the_first_launch", || {
        let softgpu = Softgpu::find().unwrap();
        let device = CudaDevice::new_with_stream(0).unwrap();
        let gpu = Device::Cuda(device.clone());
        let load = Some(c"cuModuleGetFunction");
        // Warm-up, and a group wider than a block.
        let config = 1e-5.with_warm_up(1000);
        let new = || Twin::new(&mut Data::on(&gpu, 1), 16392, config, DType::F32).layer;
        let batch = Batch::random(&mut Data::on(&gpu, 2), &[3, 16392], DType::F32, false);
        let x = Var::from_tensor(&batch.xs).unwrap();
        let forward = |layer: &PowerNorm| layer.forward_t(&x, true);
        // Each of the three loads of a forward fails once. A load that came before it stays, so
        // from the second on, the load before the one that fails is the first of its call.
        for (load_number, n) in [(1, 1), (2, 2), (3, 2)] {
            let layer = new();
            launches(&softgpu, &device);
            let failed = softgpu.failing(load, &device, n, || forward(&layer).map(drop));
            assert!(failed.is_err(), "load {load_number}");
            let launched = launches(&softgpu, &device);
            assert_eq!(launched, 0, "load {load_number}");
        }
        let [first, second] = [(); 2].map(|()| {
            let layer = new();
            let (y, forward) = softgpu.counting(load, || forward(&layer).unwrap());
            let loss = y.apply_op1(Gradient(batch.dy.clone())).unwrap();
            let (grads, backward) = softgpu.counting(load, || loss.backward().unwrap());
            // The layer and all that it made are gone before the next layer. Its kernels are not.
            drop((layer, loss, grads));
            (forward, backward)
        });
        // Of three, two were loaded in the calls that failed.
        assert_eq!([first.0, second.0], [1, 0]);
        // candle looks its own kernels up each time.
        assert_eq!(first.1 - second.1, 3);
    });
}

/// A call that no layer stands behind finds its kernels loaded, too: a second one asks the driver
/// for nothing but memory and a launch. (Seen: it looked kernels up and asked for attributes.)
#[test]
fn a_second_group_scaling_only_launches() {
    in_a_new_process("a_second_group_scaling_only_launches", || {
        let softgpu = Softgpu::find().unwrap();
        let gpu = Device::new_cuda_with_stream(0).unwrap();
        let xs = Batch::random(&mut Data::on(&gpu, 1), &[3, 48], DType::F32, false).xs;
        let scaling = GroupScaling::new(4, 1e-5).unwrap();
        let first = to_f64(&scaling.forward(&xs).unwrap());
        gpu.synchronize().unwrap();
        softgpu.take_counts();
        let ys = scaling.forward(&xs).unwrap();
        let counts = softgpu.take_counts();
        let calls = counts["calls"].as_object().unwrap();
        let startup = |name: &str| name.contains("Module") || name.contains("Attribute");
        let needless: Vec<_> = calls.iter().filter(|(name, _)| startup(name)).collect();
        assert!(needless.is_empty(), "{needless:?}");
        assert_eq!(calls["cuLaunchKernel"], 1, "{calls:?}");
        assert_eq!(calls["cuMemAllocAsync"], 1, "{calls:?}");
        assert_eq!(to_f64(&ys), first);
    });
}

/// The driver compiles what it is handed, so a step hands it only the kernels that it launches: two
/// for a forward and two for its backward. Dtypes share the kernels of the sums.
#[test]
fn a_call_loads_only_what_it_launches() {
    in_a_new_process("a_call_loads_only_what_it_launches", || {
        let softgpu = Softgpu::find().unwrap();
        let gpu = Device::new_cuda_with_stream(0).unwrap();
        let mut loaded = vec![];
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let layer = Twin::new(&mut Data::on(&gpu, 1), 512, config(None), DType::F32).layer;
            let batch = Batch::random(&mut Data::on(&gpu, 2), &[70, 512], dtype, false);
            let x = Var::from_tensor(&batch.xs).unwrap();
            let before = softgpu.loaded();
            let y = layer.forward_t(&x, true).unwrap();
            y.apply_op1(Gradient(batch.dy)).unwrap().backward().unwrap();
            loaded.push(softgpu.loaded() - before);
        }
        // The first step also loads kernels of candle's.
        assert_eq!(loaded[1..], [4, 2]);
    });
}

/// An array of `rows` rows, of which the first and the last are those of `ends` and the rest zeros.
fn huge(ends: &Tensor, rows: usize) -> Tensor {
    let (few, cols) = ends.dims2().unwrap();
    let all = Tensor::zeros((rows, cols), ends.dtype(), ends.device()).unwrap();
    for (from, to) in [(0, 0), (few / 2, rows - few / 2)] {
        let half = ends.narrow(0, from, few / 2).unwrap();
        all.slice_set(&half.force_contiguous().unwrap(), 0, to)
            .unwrap();
    }
    all
}

/// The first and the last rows of a huge array.
fn ends(huge: &Tensor, few: usize) -> Tensor {
    let rows = huge.dims()[0];
    let half = |from: usize| {
        let rows = huge.narrow(0, from, few / 2).unwrap();
        rows.force_contiguous().unwrap()
    };
    Tensor::cat(&[half(0), half(rows - few / 2)], 0).unwrap()
}

/// A step on more than 2³² elements, in every dtype and by every kernel that walks rows. Only the
/// first and the last rows are there. They fare as by themselves, for under recipe Paper a row's
/// output and gradient depend on no other row of the batch.
#[test]
#[ignore = "offsets_have_room runs it"]
fn more_than_32_bits_of_elements() {
    let gpu = Device::new_cuda_with_stream(0).unwrap();
    let softgpu = Softgpu::find().unwrap();
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let (builder, two, wide) = match dtype {
            DType::F32 => (DType::F32, 8, 8200),
            DType::F64 => (DType::F64, 4, 2056),
            _ => (DType::F32, 16, 16392),
        };
        // One, two and four pieces a thread, as many groups as elements, and a group wider than a
        // block. With one channel the rows of a mask are beyond 2³² too.
        for (cols, groups, with_residual, masked) in [
            (1, None, false, true),
            (3, Some(1), false, false),
            (3, Some(3), true, false),
            (two, None, true, false),
            (64, None, false, false),
            (wide, Some(1), true, false),
        ] {
            // candle launches as many threads as there are elements, modulo 2³². Kernels of a block
            // a group take rows in turns, and so the last block has the last row.
            let rows = ((1usize << 32) + (1 << 20)).div_ceil(cols);
            let rows = rows.next_multiple_of(1 << 16);
            let few = 2 * EDGE.div_ceil(cols);
            let layer = || Twin::new(&mut Data::on(&gpu, 5), cols, config(groups), builder).layer;
            let (large, small) = (layer(), layer());
            let mut data = Data::on(&gpu, 6);
            let what = format!("{dtype:?}, {cols} by {groups:?}, residual: {with_residual}");
            for _ in 0..2 {
                let batch = Batch::random(&mut data, &[few, cols], dtype, masked);
                let [ours, theirs] =
                    [&large, &small].map(|layer| run(layer, &batch, with_residual).0);
                same_bits(&what, &ours, &theirs);
            }
            let batch = Batch::random(&mut data, &[few, cols], dtype, masked);
            let (expected, expected_sum) = run(&small, &batch, with_residual);
            softgpu.take_counts();
            let whole = Batch {
                xs: huge(&batch.xs, rows),
                dy: huge(&batch.dy, rows),
                keep: batch.keep.as_ref().map(|keep| {
                    let keep = huge(&keep.unsqueeze(1).unwrap(), rows);
                    keep.squeeze(1).unwrap()
                }),
            };
            let (outcome, sum) = run(&large, &whole, with_residual);
            let [mut actual, mut expected] = [&outcome, &expected].map(Outcome::tensors);
            actual.extend(sum.iter().map(|sum| ("sum", sum)));
            expected.extend(expected_sum.iter().map(|sum| ("sum", sum)));
            for ((name, actual), (_, expected)) in actual.into_iter().zip(expected) {
                let actual = match actual.rank() {
                    1 => actual.clone(),
                    _ => ends(actual, few),
                };
                let (actual, expected) = (to_f64(&actual), to_f64(expected));
                // Rows and lanes are cut otherwise, so sums are added in another order.
                let bound = 32. * ((few + cols) as f64).sqrt() * precision(dtype).0;
                let near = |at: usize| {
                    let magnitude = expected[at].abs().max(1.);
                    (actual[at] - expected[at]).abs() <= bound * magnitude
                };
                // Of wide rows not all tiles run.
                let edges = (0..EDGE).chain(expected.len().saturating_sub(EDGE)..expected.len());
                for at in edges.filter(|&at| at < expected.len()) {
                    assert!(
                        near(at) || actual.len() == cols && cols > EDGE,
                        "{what}: {name}, {at} of the ends: {} for {}",
                        actual[at],
                        expected[at]
                    );
                }
            }
            // The rows that are kept are those of the small batch.
            if masked {
                let states = [&large, &small].map(|layer| layer.running_phi().unwrap());
                let [actual, expected] = states.map(|phi| to_f64(&phi)[0]);
                let near = (actual / expected - 1.).abs() <= 1e-5;
                assert!(near, "{what}: ψ² is {actual}, not {expected}");
            }
            for kernel in softgpu.take_counts()["kernels"].as_object().unwrap().keys() {
                println!("launched {kernel}");
            }
        }
    }
}

/// Elements at each end of a huge array that are looked at.
const EDGE: usize = 1024;

/// A step whose upstream gradients candle hands through. With a residual, which is the gradient
/// again, it also gives the sum.
fn run(layer: &PowerNorm, batch: &Batch, with_residual: bool) -> (Outcome, Option<Tensor>) {
    let x = Var::from_tensor(&batch.xs).unwrap();
    let residual = with_residual.then_some(&batch.dy);
    let (y, sum) = outputs(layer, &x, residual, batch.keep.as_ref()).unwrap();
    let pass = Pass::new(x, (y, sum.clone()), batch);
    (backward(layer, pass).unwrap(), sum)
}

/// Kernels that replace candle's first addition to a gradient, which adds it to zeros: its loop
/// counts elements in 32 bits and would never end here. Each thread takes an element from the start
/// and one from the end.
fn additions() -> String {
    let mut text = ".version 8.0\n.target sm_80\n.address_size 64\n".to_owned();
    for (dtype, register, ty, bytes) in [
        ("f32", "%r9", "b32", 4),
        ("f64", "%rd9", "b64", 8),
        ("f16", "%h9", "b16", 2),
        ("bf16", "%h9", "b16", 2),
    ] {
        text += &format!(
            ".visible .entry badd_{dtype}(.param .u64 count, .param .u64 dims, .param .u64 info, \
             .param .u64 zeros, .param .u64 gradient, .param .u64 sum)\n{{\n\
             .reg .pred %p; .reg .b16 %h9; .reg .b32 %r<10>; .reg .b64 %rd<10>;\n\
             mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x;\n\
             mul.wide.u32 %rd0, %r0, %r1; cvt.u64.u32 %rd1, %r2; add.s64 %rd0, %rd0, %rd1;\n\
             ld.param.u64 %rd1, [count]; sub.s64 %rd1, %rd1, 1; sub.s64 %rd1, %rd1, %rd0;\n\
             ld.param.u64 %rd2, [gradient]; ld.param.u64 %rd3, [sum];\n\
             setp.lt.s64 %p, %rd1, %rd0; @%p exit;\n\
             mad.lo.s64 %rd4, %rd0, {bytes}, %rd2; ld.global.{ty} {register}, [%rd4];\n\
             mad.lo.s64 %rd5, %rd0, {bytes}, %rd3; st.global.{ty} [%rd5], {register};\n\
             mad.lo.s64 %rd4, %rd1, {bytes}, %rd2; ld.global.{ty} {register}, [%rd4];\n\
             mad.lo.s64 %rd5, %rd1, {bytes}, %rd3; st.global.{ty} [%rd5], {register};\n\
             ret;\n}}\n"
        );
    }
    text
}

/// No offset is cut off at 32 bits, in any kernel that walks rows.
#[test]
fn offsets_have_room() {
    let folder = tempfile::tempdir().unwrap();
    let ptx = folder.path().join("additions.ptx");
    std::fs::write(&ptx, additions()).unwrap();
    let mut steps = Command::new(std::env::current_exe().unwrap());
    let huge = "more_than_32_bits_of_elements";
    steps.args([huge, "--exact", "--ignored", "--nocapture"]);
    // With this many blocks, each has few elements.
    steps.env("SOFTGPU_SPARSE", "1").env("SOFTGPU_SMS", "16384");
    let run = steps.env("SOFTGPU_PTX", ptx).output().unwrap();
    let [out, err] = [run.stdout, run.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(run.status.success(), "{out}{err}");
    let entry = |line: &'static str| line.strip_prefix(".visible .entry ");
    for entry in POWER_NORM.lines().filter_map(entry) {
        let kernel = entry.trim_end_matches('(');
        let walks = kernel.starts_with("normalize") || kernel.starts_with("group");
        let launched = out.lines().any(|line| line == format!("launched {kernel}"));
        assert!(launched || !walks, "{kernel} was not launched:\n{out}");
    }
}

/// Steps of layers that walk the kernels in every way, with several chunks of rows.
fn walk_every_path() {
    let _alone = alone();
    let gpu = Device::new_cuda_with_stream(0).unwrap();
    // A group of several warps whose threads have a piece each, and two pieces without a group.
    let pieces = [(131, Some(1)), (12, None)];
    let recipes = [Recipe::Paper, Recipe::Fairseq].into_iter().cycle();
    for ((cols, groups), recipe) in PATHS.into_iter().chain(pieces).zip(recipes) {
        let config = config(groups).with_recipe(recipe);
        let mut twin = Twin::new(&mut Data::on(&gpu, 3), cols, config, DType::F32);
        let mut data = Data::on(&gpu, 4);
        for step in 0..3 {
            let batch = Batch::random(&mut data, &[70, cols], DType::F32, step != 1);
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
    // Threads of two pieces of f32 never share a group with another warp: they would have four.
    let unreached = ["normalize_f32_2", "normalize_bwd_f32_2"];
    let kernels: Vec<&str> = needless.iter().map(|&(kernel, _)| kernel).collect();
    assert_eq!(kernels, unreached, "nothing shows without {needless:?}");
}
