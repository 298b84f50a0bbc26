//! Whatever call of the driver fails, a layer stays whole. The driver is softgpu, which fails on
//! demand.

mod common;

use candle::{CudaDevice, DType, Device, Result, Tensor, Var};
use candle_powernorm::{PowerNorm, PowerNormConfig, Recipe, Statistics};
use common::gpu::{same_bits, same_state, Gradient};
use common::{state, Batch, Data, Outcome, Twin};
use std::ffi::{c_char, c_void, CStr};
use std::mem::transmute;

/// What softgpu lets a test do.
struct Softgpu {
    fail: unsafe extern "C" fn(*const c_char, u64),
    calls: unsafe extern "C" fn(*const c_char) -> u64,
    live: unsafe extern "C" fn(*const c_char) -> u64,
}

impl Softgpu {
    fn find() -> Self {
        let function = |name: &CStr| -> *mut c_void {
            // SAFETY: the name ends with a zero.
            let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            assert!(
                !function.is_null(),
                "the driver is not softgpu, which these tests need: it has no {name:?}"
            );
            function
        };
        // SAFETY: softgpu defines the three with these signatures, in `control.rs`.
        unsafe {
            Self {
                fail: transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, u64)>(function(
                    c"softgpu_fail",
                )),
                calls: transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> u64>(
                    function(c"softgpu_calls"),
                ),
                live: transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> u64>(
                    function(c"softgpu_live"),
                ),
            }
        }
    }

    /// Runs `work`, whose n-th call of the driver fails. (Calls that give something back do not.)
    fn failing<T>(&self, device: &CudaDevice, n: u64, work: impl FnOnce() -> T) -> T {
        // SAFETY: null is for any function.
        unsafe { (self.fail)(std::ptr::null(), n) };
        let result = work();
        // SAFETY: as above.
        unsafe { (self.fail)(std::ptr::null(), 0) };
        // cudarc keeps what fails while it drops something, for the next call to report.
        let _ = device.cuda_stream().context().check_err();
        result
    }

    /// Runs `work`, and counts its calls of the driver.
    fn counting<T>(&self, work: impl FnOnce() -> T) -> (T, u64) {
        // SAFETY: null is for all functions.
        let calls = || unsafe { (self.calls)(std::ptr::null()) };
        let before = calls();
        let result = work();
        (result, calls() - before)
    }

    /// How many there are of what the driver hands out.
    fn live(&self, device: &Device) -> Vec<(&'static CStr, u64)> {
        // What is freed in the order of a stream is there until then.
        device.synchronize().unwrap();
        [c"allocations", c"bytes", c"events", c"streams", c"modules"]
            // SAFETY: the names end with a zero.
            .map(|kind| (kind, unsafe { (self.live)(kind.as_ptr()) }))
            .to_vec()
    }
}

/// A forward that waits for its backward.
struct Pass {
    x: Var,
    y: Tensor,
    loss: Tensor,
}

fn forward(layer: &PowerNorm, batch: &Batch, with_residual: bool) -> Result<Pass> {
    let x = Var::from_tensor(&batch.xs)?;
    let gradient = || Gradient(batch.dy.clone());
    let y = match (with_residual, &batch.keep) {
        (false, None) => layer.forward_t(&x, true)?,
        (false, Some(keep)) => layer.forward_masked(&x, keep)?,
        (true, keep) => {
            let (y, sum) = match keep {
                None => layer.forward_residual(&x, &batch.dy)?,
                Some(keep) => layer.forward_residual_masked(&x, &batch.dy, keep)?,
            };
            let loss = (y.apply_op1(gradient())? + sum.apply_op1(gradient())?)?;
            return Ok(Pass { x, y, loss });
        }
    };
    let loss = y.apply_op1(gradient())?;
    Ok(Pass { x, y, loss })
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
    fn forward(&self, layer: &PowerNorm) -> Result<Pass> {
        forward(layer, &self.batch, self.with_residual)
    }

    /// A step of both that nothing disturbs.
    fn step(&self, what: &str) {
        let [ours, theirs] = [&self.layer, &self.twin].map(|layer| {
            let pass = self.forward(layer).unwrap();
            backward(layer, pass).unwrap()
        });
        same_bits(what, &ours, &theirs);
        same_state(what, &state(&self.layer), &state(&self.twin));
    }

    /// Every call of a forward fails once.
    fn disturb_forwards(&self) {
        let (pass, calls) = self.softgpu.counting(|| self.forward(&self.twin).unwrap());
        backward(&self.twin, pass).unwrap();
        let pass = self.forward(&self.layer).unwrap();
        backward(&self.layer, pass).unwrap();
        let device = Device::Cuda(self.device.clone());
        let live = self.softgpu.live(&device);
        let mut failures = 0;
        for n in 1..=calls {
            let what = format!("{}: call {n} of a forward", self.what);
            let before = state(&self.layer);
            let disturbed = || self.forward(&self.layer);
            match self.softgpu.failing(self.device, n, disturbed) {
                Err(_) => {
                    same_state(&what, &state(&self.layer), &before);
                    failures += 1;
                }
                // The call did not matter, or there was none.
                Ok(pass) => {
                    let ours = backward(&self.layer, pass).unwrap();
                    let theirs = self.forward(&self.twin).unwrap();
                    same_bits(&what, &ours, &backward(&self.twin, theirs).unwrap());
                }
            }
            self.step(&format!("{what}, next"));
            assert_eq!(self.softgpu.live(&device), live, "{what}: leaks");
        }
        assert!(failures > 0);
    }

    /// Every call of a backward fails once.
    fn disturb_backwards(&self) {
        let pass = self.forward(&self.twin).unwrap();
        let (_, calls) = (self.softgpu).counting(|| backward(&self.twin, pass).unwrap());
        let pass = self.forward(&self.layer).unwrap();
        backward(&self.layer, pass).unwrap();
        let device = Device::Cuda(self.device.clone());
        let live = self.softgpu.live(&device);
        let (mut failures, mut late) = (0, 0);
        for n in 1..=calls {
            let what = format!("{}: call {n} of a backward", self.what);
            let [ours, theirs] =
                [&self.layer, &self.twin].map(|layer| self.forward(layer).unwrap());
            let before = state(&self.layer);
            let disturbed = || backward(&self.layer, ours);
            match self.softgpu.failing(self.device, n, disturbed) {
                Err(_) if state(&self.layer) == before => failures += 1,
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
                "{what}: of the calls that fail a backward {late} come after ν has moved, but candle makes {after} there"
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

/// Where in its life a layer is.
const PHASES: [(Statistics, usize); 3] = [
    (Statistics::Running, 1),
    (Statistics::Batch, 1),
    (Statistics::Running, 1000),
];

/// Rows, channels, groups, whether there is a mask, and whether a residual.
const SHAPES: [(usize, usize, Option<usize>, bool, bool); 4] = [
    (9, 48, None, false, false),
    (9, 48, Some(4), true, false),
    (9, 48, Some(4), true, true),
    // The layer-scale's factors take a launch of their own.
    (3, 8200, Some(1), false, false),
];

/// A call that fails makes the forward or the backward fail, if it matters. The state is then as it
/// was before the call of the layer, the next step is right, and nothing leaks.
#[test]
fn any_call_may_fail() {
    let softgpu = Softgpu::find();
    let device = CudaDevice::new_with_stream(0).unwrap();
    // SAFETY: all work is on one stream. (With events, cudarc forgets an allocation for which it
    // cannot make them.)
    unsafe { device.disable_event_tracking() };
    let gpu = Device::Cuda(device.clone());
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        for (statistics, warmup_steps) in PHASES {
            for (rows, cols, group_scaling, padded, with_residual) in SHAPES {
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
}
