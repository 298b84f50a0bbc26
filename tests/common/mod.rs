//! Shared by the test files: seeded data, comparisons with computed tolerances, a layer and its
//! oracle stepped side by side.
#![allow(dead_code)] // every test file uses its share

mod data;
pub mod distributed;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod recording;
pub mod reference;
#[cfg(all(feature = "cuda", target_os = "linux"))]
pub mod softgpu;

use candle::backend::{BackendDevice, BackendStorage};
use candle::backprop::GradStore;
use candle::{
    CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Module, Result, Shape, Tensor, Var,
};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::{
    LayerNorm, Mode, PowerNorm, PowerNormConfig, Recipe, RmsNorm, Statistics, power_norm,
};
pub use data::*;
use reference::{Oracle, Quantity, Spec};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::mpsc;
use std::time::Duration;

// Comparisons

/// The values' bits. Every float dtype here, and a step count, is exact in `f64`.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    to_f64(tensor).iter().map(|value| value.to_bits()).collect()
}

/// The largest distance of a computed value from the exact one: `u(out)·|e| +
/// 8·√n·u(sums)·magnitude`.
///
/// The first term is the rounding of the result (below the normal numbers a constant). The second
/// is what `n` roundings of partial sums add up to, with 8 for safety.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Dtype of the result.
    pub out: DType,
    /// Dtype of the least precise sum or state that enters.
    pub sums: DType,
    /// Terms added up, times the steps of a trajectory.
    pub n: usize,
}

impl Bound {
    /// Of a result in the dtype of its sums.
    pub const fn of(dtype: DType, n: usize) -> Self {
        let (out, sums) = (dtype, dtype);
        Self { out, sums, n }
    }
}

/// Checks `actual` against the exact values, which must not be trivial.
#[track_caller]
pub fn assert_close(what: &str, actual: &Tensor, expected: &Quantity, bound: Bound) {
    assert_eq!(actual.dtype(), bound.out, "{what}: dtype");
    let (u_out, min_normal) = precision(bound.out);
    let sums = 8. * (bound.n as f64).sqrt() * precision(bound.sums).0 * expected.magnitude;
    assert!(sums.is_finite(), "{what}: a bound of {sums}");
    let bound_of = |e: f64| u_out * e.abs().max(min_normal) + sums;
    // A value that may be beyond the largest number may be infinite.
    let overflow = overflow(bound.out);
    let expected: Vec<f64> = (to_f64(actual).iter().zip(&expected.values))
        .map(|(&a, &e)| {
            let right = a.is_infinite() && a * e > 0. && e.abs() + bound_of(e) >= overflow;
            match right {
                true => a,
                false => e,
            }
        })
        .collect();
    assert_within(what, &to_f64(actual), &expected, bound_of);
}

/// Checks `actual` against values of which the largest sets the scale of the allowed error.
#[track_caller]
pub fn assert_relative(what: &str, actual: &Tensor, expected: &[f64], relative: f64) {
    let largest = expected.iter().fold(0., |max: f64, e| max.max(e.abs()));
    assert_within(what, &to_f64(actual), expected, |_| relative * largest);
}

#[track_caller]
fn assert_within(what: &str, actual: &[f64], expected: &[f64], bound: impl Fn(f64) -> f64) {
    assert_eq!(actual.len(), expected.len(), "{what}: length");
    let trivial = !expected.iter().any(|e| e.abs() > 0.);
    assert!(!trivial, "{what}: nothing but zeros expected");
    // A NaN in either place is the worst there is.
    let ratio = |k: usize| match (actual[k] - expected[k]).abs() / bound(expected[k]) {
        _ if actual[k] == expected[k] => 0.,
        ratio if ratio.is_nan() => f64::INFINITY,
        ratio => ratio,
    };
    let worst = (0..actual.len()).max_by(|&a, &b| ratio(a).total_cmp(&ratio(b)));
    let worst = worst.expect("values to compare");
    assert!(
        ratio(worst) <= 1.,
        "{what}[{worst}]: got {}, expected {}, {} times the bound of {:e}",
        actual[worst],
        expected[worst],
        ratio(worst),
        bound(expected[worst]),
    );
}

#[track_caller]
pub fn assert_zero(what: &str, actual: &Tensor) {
    let values = to_f64(actual);
    let stray = values.iter().position(|&v| v != 0.);
    assert!(stray.is_none(), "{what}: not zero at {stray:?}");
}

#[track_caller]
pub fn assert_finite(what: &str, actual: &Tensor) {
    let values = to_f64(actual);
    let stray = values.iter().position(|v| !v.is_finite());
    assert!(stray.is_none(), "{what}: not finite at {stray:?}");
}

/// ψ² and ν are finite.
#[track_caller]
pub fn assert_finite_state(what: &str, layer: &PowerNorm) {
    assert_finite(&format!("{what}, ψ²"), &layer.running_phi().unwrap());
    assert_finite(&format!("{what}, ν"), &layer.nu().unwrap());
}

#[track_caller]
pub fn assert_same_bits(what: &str, a: &Tensor, b: &Tensor) {
    assert_eq!(a.dims(), b.dims(), "{what}: shape");
    assert_eq!(a.dtype(), b.dtype(), "{what}: dtype");
    let (a, b) = (bits(a), bits(b));
    let first = (0..a.len()).find(|&k| a[k] != b[k]);
    assert!(first.is_none(), "{what}: differs from {first:?} on");
}

/// The derivative of `loss` in each element of `at`.
pub fn central_differences(at: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    // The cube root of the unit roundoff: truncation and rounding are about as large as each other.
    const H: f64 = 6e-6;
    let at_shifted = |k: usize, h: f64| {
        let mut shifted = at.to_vec();
        shifted[k] += h;
        loss(&shifted)
    };
    (0..at.len())
        .map(|k| (at_shifted(k, H) - at_shifted(k, -H)) / (2. * H))
        .collect()
}

/// The text of an error, without the backtrace that candle may have added.
pub fn message<T>(result: Result<T>) -> String {
    let mut error = result.err().expect("an error");
    while let candle::Error::WithBacktrace { inner, .. } = error {
        error = *inner;
    }
    error.to_string()
}

/// PowerNorm rejects this, with `text` after its name.
#[track_caller]
pub fn rejected<T>(result: Result<T>, text: &str) {
    rejected_by("power_norm", result, text);
}

/// This layer or function rejects this, with `text` after its name.
#[track_caller]
pub fn rejected_by<T>(name: &str, result: Result<T>, text: &str) {
    assert_eq!(message(result), format!("{name}: expected {text}"));
}

/// Runs tests of this program with an environment variable set, in a process of its own, because a
/// process reads the crate's switches and candle's once. Says whether they passed, and what they
/// printed.
pub fn run_with(switch: &str, value: &str, tests: &[&str]) -> (bool, String) {
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args(tests)
        .args(["--exact", "--nocapture"])
        .env_remove("CANDLE_POWERNORM_SIMD")
        .env_remove("CANDLE_POWERNORM_DEVICE")
        .env(switch, value)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&[run.stdout, run.stderr].concat()).into_owned();
    let passed = text.contains(&format!("{} passed", tests.len()));
    (run.status.success() && passed, text)
}

/// The layers of this process run as candle's own operations.
pub fn is_composed() -> bool {
    std::env::var_os("CANDLE_POWERNORM_DEVICE").is_some_and(|name| name == "composed")
}

/// A batch whose mask keeps no row counts as a step. Only on a CPU the host knows what a mask holds
/// without a wait for the device; candle's own operations are written for devices where it does
/// not.
pub fn counts_masked_batches(device: &Device) -> bool {
    !device.is_cpu() || is_composed()
}

/// A test that takes longer than this hangs. No test comes near it, whatever runs its kernels.
pub const LIMIT: Duration = Duration::from_secs(300);

/// Runs `work` in a thread of its own, and fails if it hangs.
pub fn in_time(work: impl FnOnce() + Send + 'static) {
    let (done, finished) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        work();
        done.send(()).ok();
    });
    match finished.recv_timeout(LIMIT) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("no end after {LIMIT:?}: a deadlock"),
        // A sender dropped without a word is a panic, which `join` hands on.
        _ => thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

/// With `CANDLE_POWERNORM_SWEEP=n` in the environment, every n-th case, or more often if less than
/// three cases would be left. Without it, all.
///
/// Cases are the points of a grid, with the last axis innermost. A step that shares a factor with
/// the length of an axis would leave out values of that axis, each time. So n is a prime, and a
/// list whose length it divides is rejected. (With 7, lists of 7 dtypes were f32 alone.)
pub fn thinned<T>(cases: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let cases: Vec<T> = cases.into_iter().collect();
    let step = step_through(cases.len(), sweep());
    cases.into_iter().step_by(step)
}

fn step_through(cases: usize, sweep: usize) -> usize {
    assert!(
        sweep == 1 || !cases.is_multiple_of(sweep),
        "{SWEEP}={sweep} divides {cases} cases, so that values of an axis could be left out: \
         choose another prime"
    );
    let leaves_three = 1..cases.div_ceil(2);
    let most = leaves_three.filter(|&step| coprime(step, cases)).max();
    sweep.min(most.unwrap_or(1))
}

/// Of the cases inside a loop over others, every n-th from another one on in each `turn`. Cases of
/// turns that follow each other are far apart.
pub fn thinned_in_turn<T>(
    turn: usize,
    cases: impl IntoIterator<Item = T>,
) -> impl Iterator<Item = T> {
    let cases: Vec<T> = cases.into_iter().collect();
    let step = sweep().min(cases.len()).max(1);
    // By the golden ratio, so that a few turns meet all values of an axis.
    let apart = (1..=step * 5 / 8)
        .filter(|&apart| coprime(apart, step))
        .max();
    let first = turn * apart.unwrap_or(1) % step;
    cases.into_iter().skip(first).step_by(step)
}

const SWEEP: &str = "CANDLE_POWERNORM_SWEEP";

fn sweep() -> usize {
    std::env::var(SWEEP).map_or(1, |step| {
        let step = step
            .parse()
            .ok()
            .filter(|&step| step == 1 || is_prime(step));
        step.unwrap_or_else(|| panic!("{SWEEP}: expected 1 or a prime"))
    })
}

fn is_prime(n: usize) -> bool {
    n > 1 && (2..n).all(|factor| !n.is_multiple_of(factor))
}

fn coprime(a: usize, b: usize) -> bool {
    (2..=a).all(|factor| !a.is_multiple_of(factor) || !b.is_multiple_of(factor))
}

// Layers

/// A layer on fresh variables of a new `VarMap`.
pub fn layer(size: usize, config: PowerNormConfig, dtype: DType) -> (PowerNorm, VarMap) {
    layer_on(&CPU, size, config, dtype)
}

pub fn layer_on(
    device: &Device,
    size: usize,
    config: PowerNormConfig,
    dtype: DType,
) -> (PowerNorm, VarMap) {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, dtype, device);
    (power_norm(size, config, vb).unwrap(), varmap)
}

/// A builder of variables on the CPU, to train.
pub fn trainable(varmap: &VarMap, dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_varmap(varmap, dtype, &CPU)
}

/// The variable called `name`.
pub fn var(varmap: &VarMap, name: &str) -> Var {
    varmap.data().lock().unwrap()[name].clone()
}

/// Makes `tensor` the variable called `name`, whatever was there.
pub fn insert(varmap: &VarMap, name: &str, tensor: &Tensor) {
    let var = Var::from_tensor(tensor).unwrap();
    varmap.data().lock().unwrap().insert(name.to_owned(), var);
}

/// The variables of these tensors.
pub fn variables(tensors: &HashMap<String, Tensor>) -> VarMap {
    let varmap = VarMap::new();
    for (name, tensor) in tensors {
        insert(&varmap, name, tensor);
    }
    varmap
}

/// The variables as tensors that are none.
pub fn frozen(varmap: &VarMap) -> HashMap<String, Tensor> {
    (varmap.data().lock().unwrap().iter())
        .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
        .collect()
}

/// A layer in `f64` of this weight and this bias, with a fresh state that is no variable and
/// trains.
pub fn layer_of([weight, bias]: [&Tensor; 2]) -> PowerNorm {
    let size = weight.elem_count();
    let (_, varmap) = layer(size, 1e-5.into(), DType::F64);
    let mut tensors = frozen(&varmap);
    tensors.insert("weight".to_owned(), weight.clone());
    tensors.insert("bias".to_owned(), bias.clone());
    let vb = VarBuilder::from_tensors(tensors, DType::F64, &CPU);
    let layer = power_norm(size, 1e-5, vb).unwrap();
    layer.with_unsaved_statistics()
}

/// One layer for each way to walk the kernels: width and groups.
pub const PATHS: [(usize, Option<usize>); 7] = [
    (33, None),
    (1024, None),
    (48, Some(4)),
    (130, Some(13)),
    (760, Some(1)),
    (8192, Some(1)),
    (8200, Some(4)),
];

/// A layer whose second step is the first by its running statistics.
pub fn config(groups: Option<usize>) -> PowerNormConfig {
    1e-5.with_groups(groups).with_warm_up(1)
}

/// Configurations that differ from another one in a setting or two.
pub trait With: Sized {
    /// For settings without a method of their own.
    fn with(self, change: impl FnOnce(&mut PowerNormConfig)) -> PowerNormConfig;

    fn with_recipe(self, recipe: Recipe) -> PowerNormConfig {
        self.with(|config| config.recipe = recipe)
    }

    fn with_statistics(self, statistics: Statistics) -> PowerNormConfig {
        self.with(|config| config.statistics = statistics)
    }

    fn with_warm_up(self, steps: usize) -> PowerNormConfig {
        self.with(|config| config.warmup_steps = steps)
    }

    fn with_groups(self, groups: Option<usize>) -> PowerNormConfig {
        self.with(|config| config.group_scaling = groups)
    }

    /// One of [`KINDS`].
    fn with_kind(self, (recipe, statistics): (Recipe, Statistics)) -> PowerNormConfig {
        self.with_recipe(recipe).with_statistics(statistics)
    }

    /// One of [`PARAMETERS`].
    fn with_parameters(self, (affine, bias): (bool, bool)) -> PowerNormConfig {
        self.with(|config| (config.affine, config.bias) = (affine, bias))
    }
}

impl<C: Into<PowerNormConfig>> With for C {
    fn with(self, change: impl FnOnce(&mut PowerNormConfig)) -> PowerNormConfig {
        let mut config = self.into();
        change(&mut config);
        config
    }
}

/// Every recipe with every statistic.
pub const KINDS: [(Recipe, Statistics); 4] = [
    (Recipe::Paper, Statistics::Running),
    (Recipe::Paper, Statistics::Batch),
    (Recipe::Fairseq, Statistics::Running),
    (Recipe::Fairseq, Statistics::Batch),
];

/// Weight and bias, a weight alone, and neither: `affine` and `bias`.
pub const PARAMETERS: [(bool, bool); 3] = [(true, true), (true, false), (false, true)];

#[track_caller]
pub fn same_bits(what: &str, a: &Outcome, b: &Outcome) {
    for ((name, a), (_, b)) in a.tensors().into_iter().zip(b.tensors()) {
        assert_same_bits(&format!("{what}, {name}"), a, b);
    }
}

/// The result of [`state`].
pub type State = (Vec<u64>, Vec<u64>, usize);

/// `assert_eq`, for layers too wide to print.
#[track_caller]
pub fn same_state(what: &str, a: &State, b: &State) {
    for (name, a, b) in [("ψ²", &a.0, &b.0), ("ν", &a.1, &b.1)] {
        let first = (0..a.len()).find(|&channel| a[channel] != b[channel]);
        assert!(first.is_none(), "{what}: {name} differs from {first:?} on");
    }
    assert_eq!(a.2, b.2, "{what}: t");
}

/// The bits of ψ² and ν, and t.
pub fn state(layer: &PowerNorm) -> State {
    let phi = layer.running_phi().unwrap();
    let nu = layer.nu().unwrap();
    (bits(&phi), bits(&nu), layer.steps().unwrap())
}

pub fn spec(config: &PowerNormConfig) -> Spec {
    Spec {
        eps: config.eps,
        alpha_fwd: config.alpha_fwd,
        alpha_bwd: config.alpha_bwd,
        warmup_steps: config.warmup_steps,
        groups: config.group_scaling,
        batch_statistics: config.statistics == Statistics::Batch,
        recipe: match config.recipe {
            Recipe::Paper => reference::Recipe::Paper,
            _ => reference::Recipe::Fairseq,
        },
    }
}

/// An input, the gradient of its output, and perhaps a mask.
#[derive(Clone)]
pub struct Batch {
    pub xs: Tensor,
    pub dy: Tensor,
    pub keep: Option<Tensor>,
}

impl Batch {
    /// Without a mask.
    pub fn new(xs: Tensor, dy: Tensor) -> Self {
        let keep = None;
        Self { xs, dy, keep }
    }

    /// Random values; channels differ in scale, so that a mix-up of columns shows.
    pub fn random(data: &mut Data, shape: &[usize], dtype: DType, padded: bool) -> Self {
        let len = shape.iter().product();
        let size = *shape.last().unwrap();
        let scales = data.uniform(size, 0.5, 2.);
        let mut x = data.normal(len);
        for row in x.chunks_mut(size) {
            row.iter_mut().zip(&scales).for_each(|(x, s)| *x *= s);
        }
        let dy = data.normal(len);
        let [xs, dy] = [x, dy].map(|values| data.tensor(&values, shape, dtype));
        let batch = Self::new(xs, dy);
        if !padded {
            return batch;
        }
        let mask = data.mask(len / size);
        batch.masked(&mask)
    }

    /// The same batch with only these rows kept.
    pub fn masked(self, mask: &[bool]) -> Self {
        let dims = self.xs.dims();
        let keep = data::keep(mask, &dims[..dims.len() - 1]);
        let keep = keep.to_device(self.xs.device()).unwrap();
        Self {
            keep: Some(keep),
            ..self
        }
    }

    /// The same batch on `device`.
    pub fn to(&self, device: &Device) -> Self {
        self.each(|tensor| tensor.to_device(device))
    }

    /// Some of the rows, `[rows, ..]`.
    pub fn rows(&self, rows: Range<usize>) -> Self {
        self.each(|tensor| tensor.narrow(0, rows.start, rows.len()))
    }

    fn each(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Self {
        let change = |tensor: &Tensor| change(tensor).unwrap();
        Self {
            xs: change(&self.xs),
            dy: change(&self.dy),
            keep: self.keep.as_ref().map(change),
        }
    }

    /// The same batch in another dtype.
    pub fn cast(&self, dtype: DType) -> Self {
        Self {
            keep: self.keep.clone(),
            ..self.each(|tensor| tensor.to_dtype(dtype))
        }
    }

    pub fn mask(&self) -> Option<Vec<bool>> {
        let keep = self.keep.as_ref()?;
        Some(to_f64(keep).iter().map(|&keep| keep != 0.).collect())
    }
}

/// The results of a layer's forward and backward.
pub struct Outcome {
    pub y: Tensor,
    pub dx: Tensor,
    /// Absent without a weight.
    pub dweight: Option<Tensor>,
    /// Absent without a bias.
    pub dbias: Option<Tensor>,
}

impl Outcome {
    /// Picks the gradients of `xs` and of the layer's parameters.
    pub fn of(layer: &PowerNorm, xs: &Tensor, y: &Tensor, grads: &GradStore) -> Self {
        let grad = |of: &Tensor| grads.get(of).unwrap().clone();
        Self {
            dx: grad(xs),
            dweight: layer.weight().map(grad),
            dbias: layer.bias().map(grad),
            y: y.detach(),
        }
    }

    /// All there is, named.
    pub fn tensors(&self) -> Vec<(&'static str, &Tensor)> {
        let affine = [("dweight", &self.dweight), ("dbias", &self.dbias)].into_iter();
        let affine = affine.filter_map(|(name, t)| Some((name, t.as_ref()?)));
        let rows = [("y", &self.y), ("dx", &self.dx)];
        rows.into_iter().chain(affine).collect()
    }
}

/// A forward of the batch, masked if it has a mask.
pub fn forward(layer: &PowerNorm, xs: &Tensor, keep: Option<&Tensor>, train: bool) -> Tensor {
    let mode = if train { Mode::train() } else { Mode::eval() };
    let layer = layer.clone().with_mode(&mode);
    layer.forward_masked(xs, keep).unwrap()
}

/// A forward's output, and the sum if there is a residual.
pub type Outputs = (Tensor, Option<Tensor>);

/// A forward in the layer's mode, perhaps with a residual.
pub fn outputs(
    layer: &PowerNorm,
    xs: &Tensor,
    residual: Option<&Tensor>,
    keep: Option<&Tensor>,
) -> Result<Outputs> {
    match residual {
        None => Ok((layer.forward_masked(xs, keep)?, None)),
        Some(residual) => {
            let (y, sum) = layer.forward_residual(xs, residual, keep)?;
            Ok((y, Some(sum)))
        }
    }
}

/// A loss whose gradients are `dy` and `dsum`, without a kernel of candle.
pub fn loss_of((y, sum): &Outputs, dy: &Tensor, dsum: &Tensor) -> Result<Tensor> {
    let loss = y.apply_op1(Gradient(dy.clone()))?;
    match sum {
        None => Ok(loss),
        Some(sum) => loss + sum.apply_op1(Gradient(dsum.clone()))?,
    }
}

/// `xs + residual`, rounded to nearest. candle's own sum of `BF16` is not rounded so on AArch64,
/// and its sum of `F16` flushes subnormals to 0 in vectors of 32.
pub fn add_rounded(xs: &Tensor, residual: &Tensor) -> Result<Tensor> {
    match xs.dtype() {
        dtype @ (DType::BF16 | DType::F16) => {
            (xs.to_dtype(DType::F32)? + residual.to_dtype(DType::F32)?)?.to_dtype(dtype)
        }
        _ => xs + residual,
    }
}

/// The gradients of Σ y·dy + Σ sum·dsum, without the term of an output that the loss does not use.
pub fn residual_gradients(
    (y, sum): &(Tensor, Tensor),
    [dy, dsum]: [&Tensor; 2],
    [uses_y, uses_sum]: [bool; 2],
) -> Result<GradStore> {
    let y = (y * dy)?.sum_all()?;
    let sum = (sum * dsum)?.sum_all()?;
    match (uses_y, uses_sum) {
        (true, true) => (y + sum)?.backward(),
        (true, false) => y.backward(),
        _ => sum.backward(),
    }
}

/// A forward and a backward of the loss Σ y·dy.
pub fn run(layer: &PowerNorm, batch: &Batch, train: bool) -> Outcome {
    let xs = Var::from_tensor(&batch.xs).unwrap();
    let y = forward(layer, &xs, batch.keep.as_ref(), train);
    Outcome::of(layer, &xs, &y, &backward(&y, &batch.dy))
}

/// The gradients of Σ y·dy.
pub fn backward(y: &Tensor, dy: &Tensor) -> GradStore {
    let loss = (y * dy).unwrap().sum_all().unwrap();
    loss.backward().unwrap()
}

/// A loss of 0 whose gradient is given. No kernel of candle has a part in it, and it takes a tensor
/// without elements, which candle's kernels do not.
pub struct Gradient(pub Tensor);

impl CustomOp1 for Gradient {
    fn name(&self) -> &'static str {
        "gradient"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.]), Shape::from(())))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let shape = Shape::from(());
        let loss = storage.device().zeros_impl(&shape, DType::F32)?;
        Ok((loss, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

/// LayerNorm or RmsNorm.
pub struct RowNorm {
    pub name: &'static str,
    pub norm: Box<dyn Module>,
    pub parameters: Vec<Var>,
}

impl RowNorm {
    /// Both, with random parameters.
    pub fn both(data: &mut Data, size: usize, dtype: DType) -> [Self; 2] {
        let mut parameter = || {
            let values = data.weight(size);
            Var::from_tensor(&data.tensor(&values, &[size], dtype)).unwrap()
        };
        let [weight, bias, alone] = [(); 3].map(|()| parameter());
        let [w, b, a] = [&weight, &bias, &alone].map(|var| var.as_tensor().clone());
        [
            Self {
                name: "LayerNorm",
                norm: Box::new(LayerNorm::new(w, b, 1e-5)),
                parameters: vec![weight, bias],
            },
            Self {
                name: "RmsNorm",
                norm: Box::new(RmsNorm::new(a, 1e-5)),
                parameters: vec![alone],
            },
        ]
    }

    /// The gradients of the input and the parameters. `dy` is the gradient of `y`.
    pub fn gradients(&self, x: &Var, y: &Tensor, dy: &Tensor) -> Result<Vec<Tensor>> {
        let grads = y.apply_op1(Gradient(dy.clone()))?.backward()?;
        let of = [x].into_iter().chain(&self.parameters);
        Ok(of.map(|of| grads.get(of).unwrap().clone()).collect())
    }

    /// y and the gradients.
    pub fn run(&self, batch: &Batch) -> Vec<Tensor> {
        let x = Var::from_tensor(&batch.xs).unwrap();
        let y = self.norm.forward(&x).unwrap();
        let mut all = self.gradients(&x, &y, &batch.dy).unwrap();
        all.insert(0, y.detach());
        all
    }
}

/// A view of a base.
pub type View = fn(&Tensor) -> Result<Tensor>;

/// Views for norms of rows by themselves, each with the shape of its base.
pub const ROW_VIEWS: [(&str, &[usize], View); 15] = [
    ("the heads of queries", &[3, 5, 2, 4, 64], |base| {
        base.narrow(2, 1, 1)?.squeeze(2)
    }),
    ("fewer heads of keys", &[3, 5, 6, 64], |base| {
        base.narrow(2, 4, 2)
    }),
    ("heads before tokens", &[3, 21, 6, 64], |base| {
        base.narrow(2, 1, 4)?.transpose(1, 2)
    }),
    (
        "heads before tokens, of one text",
        &[1, 40, 6, 64],
        |base| base.narrow(2, 1, 4)?.transpose(1, 2),
    ),
    ("heads of the first tokens", &[2, 40, 3, 4, 48], |base| {
        base.narrow(1, 0, 36)?.narrow(2, 1, 1)?.squeeze(2)
    }),
    ("heads before few tokens", &[3, 5, 6, 64], |base| {
        base.narrow(2, 1, 4)?.transpose(1, 2)
    }),
    ("some of many texts and tokens", &[4, 80, 48], |base| {
        base.narrow(0, 1, 2)?.narrow(1, 3, 70)
    }),
    ("columns of many", &[40, 64 + 16], |base| {
        base.narrow(1, 16, 64)
    }),
    ("columns from within a piece", &[40, 64 + 5], |base| {
        base.narrow(1, 3, 64)
    }),
    ("rows of whole pieces, from within one", &[40, 80], |base| {
        base.narrow(1, 1, 64)
    }),
    ("each second row", &[33, 2, 48], |base| {
        base.narrow(1, 1, 1)?.squeeze(1)
    }),
    ("the first tokens", &[3, 9, 32], |base| base.narrow(1, 0, 7)),
    ("the first tokens of one text", &[1, 9, 32], |base| {
        base.narrow(1, 0, 7)
    }),
    ("wide heads", &[4, 3, 2, 2056], |base| base.narrow(1, 1, 2)),
    ("one row for all", &[128], |base| {
        base.broadcast_as((40, 128))
    }),
];

/// A layer and its oracle, with the same random weight and bias.
pub struct Twin {
    pub layer: PowerNorm,
    pub varmap: VarMap,
    pub oracle: Oracle,
}

impl Twin {
    /// `dtype` is the builder's.
    pub fn new(data: &mut Data, size: usize, config: PowerNormConfig, dtype: DType) -> Self {
        let (layer, mut varmap) = layer_on(data.device(), size, config, dtype);
        let (mut weight, mut bias) = (vec![1.; size], vec![0.; size]);
        if config.affine {
            let values = data.weight(size);
            let values = data.tensor(&values, &[size], dtype);
            weight = to_f64(&values);
            varmap.set_one("weight", values).unwrap();
        }
        if config.affine && config.bias {
            let values = data.normal(size);
            let values = data.tensor(&values, &[size], dtype);
            bias = to_f64(&values);
            varmap.set_one("bias", values).unwrap();
        }
        Self {
            layer,
            varmap,
            oracle: Oracle::new(spec(&config), weight, bias),
        }
    }

    /// Runs `batch` through both, a forward and a backward, and compares all there is to see.
    #[track_caller]
    pub fn check(&mut self, what: &str, batch: &Batch, train: bool) {
        let outcome = run(&self.layer, batch, train);
        let (x, dy) = (to_f64(&batch.xs), to_f64(&batch.dy));
        let mask = batch.mask();
        let pass = match train {
            true => self.oracle.train(&x, mask.as_deref()),
            false => self.oracle.evaluate(&x, mask.as_deref()),
        };
        let grads = self.oracle.backward(&pass, &dy);

        let what = |name| format!("{what}, step {}, {name}", self.oracle.steps);
        let sums = sums_of(batch.xs.dtype());
        let phi = self.layer.running_phi().unwrap();
        let state = coarser(sums, phi.dtype());
        let spec = &self.oracle.spec;
        let by_batch = train && (spec.batch_statistics || self.oracle.steps <= spec.warmup_steps);
        let bound = |out: &Tensor, sums| Bound {
            out: out.dtype(),
            sums,
            n: (x.len() / self.oracle.phi.len() + self.oracle.phi.len()) * self.oracle.steps.max(1),
        };
        // Results without the running statistics are as precise as the input.
        let forward = if by_batch { sums } else { state };
        let backward = match spec.recipe {
            reference::Recipe::Paper => forward,
            reference::Recipe::Fairseq => state,
        };

        for (name, actual) in outcome.tensors() {
            let (expected, sums) = match name {
                "y" => (&pass.y, forward),
                "dx" => (&grads.dx, backward),
                "dweight" => (&grads.dweight, forward),
                _ => (&grads.dbias, sums),
            };
            assert_close(&what(name), actual, expected, bound(actual, sums));
        }
        self.check_state(&what("state"), bound(&phi, state));
    }

    /// Compares ψ², ν and t.
    #[track_caller]
    pub fn check_state(&self, what: &str, bound: Bound) {
        assert_eq!(self.layer.steps().unwrap(), self.oracle.steps, "{what}: t");
        let (phi, nu) = (self.layer.running_phi(), self.layer.nu());
        let (expected_phi, of_nu) = (self.oracle.phi.clone().into(), format!("{what}: ν"));
        assert_close(&format!("{what}: ψ²"), &phi.unwrap(), &expected_phi, bound);
        match self.oracle.nu.iter().all(|&nu| nu == 0.) {
            true => assert_zero(&of_nu, &nu.unwrap()),
            false => assert_close(&of_nu, &nu.unwrap(), &self.oracle.nu(), bound),
        }
    }
}
