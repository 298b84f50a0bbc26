//! ψ², ν and t: where they live, how they are read, how a step moves them.

use crate::config::{PhiStep, Shares};
#[cfg(feature = "cuda")]
use crate::cuda::Kernels;
use crate::mode::Purpose;
use crate::{Error, PowerNormConfig, Recipe};
#[cfg(feature = "cuda")]
use candle::{CudaStorage, Layout};
use candle::{DType, Device, Result, Tensor, Var, WithDType};
use candle_nn::{Init, VarBuilder};
use num_traits::Float;
#[cfg(feature = "cuda")]
use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The running statistics of a layer, in variables that a `VarMap` shares.
///
/// Nothing is cached outside the variables, so a `VarMap::load` after construction takes effect at
/// the next call.
#[derive(Debug)]
pub(crate) struct State {
    size: usize,
    config: PowerNormConfig,
    /// ψ², `[C]`, or `[1, C, 1, 1]` where the builder held it so.
    running_phi: Var,
    /// ν/(1−α_b), shaped as `running_phi`.
    ema_gz: Var,
    /// t, `[1]`, on the CPU: a step must not wait for a GPU to learn its number.
    iters: Var,
    /// Makes a read-modify-write of the variables whole. Held for channel-sized work only, never
    /// while rows are processed: a rayon worker that waits for its rows may pick up another forward of
    /// the same layer, which would then wait for a lock held further up its own stack.
    lock: Mutex<Recalibration>,
    /// How often the statistics were reset.
    resets: AtomicUsize,
    deferred: Mutex<Option<Deferred>>,
    #[cfg(feature = "cuda")]
    kernels: Arc<Kernels>,
}

/// How far the last recalibration came.
#[derive(Debug, Default)]
struct Recalibration {
    pass: u64,
    batches: usize,
}

/// A step of ψ² that waits for the sums of other ranks.
struct Deferred {
    /// Whose it is.
    forward: usize,
    step: Box<DeferredStep>,
}

type DeferredStep = dyn FnOnce(&State) -> Result<()> + Send;

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Deferred")
    }
}

/// The running statistics at the start of a step.
pub(crate) struct Snapshot<A> {
    /// ψ², `[C]`, a copy. Empty on a GPU, whose kernels read the variable in the order of its stream.
    pub phi: Vec<A>,
    pub version: Version,
}

/// Tells whether the state was replaced since it was read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version {
    resets: usize,
    /// t, the steps taken so far.
    pub steps: usize,
}

impl State {
    /// The state named by `vb`, and whether it is made of trainable variables.
    pub fn new(
        size: usize,
        config: PowerNormConfig,
        dtype: DType,
        vb: VarBuilder,
    ) -> Result<(Self, bool)> {
        let buffer = |name: &'static str, fresh: f64| {
            let get =
                |shape: &[usize]| vb.get_with_hints_dtype(shape, name, Init::Const(fresh), dtype);
            // Our shape first: a builder that makes what it lacks must make this one.
            get(&[size]).or_else(|err| get(&[1, size, 1, 1]).map_err(|_| err))
        };
        let running_phi = buffer("running_phi", 1.)?;
        let ema_gz = buffer("ema_gz", 0.)?;
        let iters = vb.clone().set_device(Device::Cpu).get_with_hints_dtype(
            1,
            "iters",
            Init::Const(0.),
            DType::I64,
        )?;
        // A `VarMap` hands out what it holds, wherever that is.
        for (name, buffer, expected) in [
            ("ema_gz", &ema_gz, running_phi.device()),
            ("iters", &iters, &Device::Cpu),
        ] {
            same_device(name, buffer, expected)?;
        }
        let trainable = running_phi.is_variable();
        let state = Self {
            size,
            config,
            running_phi: as_var("running_phi", &running_phi, dtype)?,
            ema_gz: as_var("ema_gz", &ema_gz, dtype)?,
            iters: as_var("iters", &iters, DType::I64)?,
            lock: Mutex::default(),
            resets: AtomicUsize::new(0),
            deferred: Mutex::default(),
            #[cfg(feature = "cuda")]
            kernels: Arc::default(),
        };
        Ok((state, trainable))
    }

    pub fn config(&self) -> &PowerNormConfig {
        &self.config
    }

    pub fn device(&self) -> &Device {
        self.running_phi.device()
    }

    /// A copy of ψ², `[C]`.
    pub fn running_phi(&self) -> Result<Tensor> {
        let _guard = self.lock();
        self.copy(&self.running_phi)
    }

    /// A copy of ν, `[C]`.
    pub fn nu(&self) -> Result<Tensor> {
        let _guard = self.lock();
        self.copy(&self.ema_gz)?
            .affine(1. - self.config.alpha_bwd, 0.)
    }

    pub fn steps(&self) -> Result<usize> {
        let got = self.iters.as_detached_tensor().to_vec1::<i64>()?[0];
        usize::try_from(got).map_err(|_| Error::Steps(got).into())
    }

    pub fn reset(&self) -> Result<()> {
        self.take_deferred();
        let mut recalibration = self.lock();
        *recalibration = Recalibration::default();
        self.resets.fetch_add(1, Ordering::Relaxed);
        self.running_phi.set(&self.running_phi.ones_like()?)?;
        self.ema_gz.set(&self.ema_gz.zeros_like()?)?;
        self.iters.set(&self.iters.zeros_like()?)
    }

    pub fn snapshot<A: WithDType>(&self) -> Result<Snapshot<A>> {
        let _guard = self.lock();
        Ok(Snapshot {
            phi: match self.device() {
                Device::Cuda(_) => vec![],
                _ => read(&self.running_phi)?,
            },
            version: self.version()?,
        })
    }

    pub fn version(&self) -> Result<Version> {
        Ok(Version {
            resets: self.resets.load(Ordering::Relaxed),
            steps: self.steps()?,
        })
    }

    /// The step of a forward: ψ² takes in `batch_phi`, ψ_B² of shape `[C]`, and t counts up if it trains.
    pub fn update_phi<A: Float + WithDType>(
        &self,
        batch_phi: &[A],
        purpose: Purpose,
    ) -> Result<()> {
        let mut recalibration = self.lock();
        let step = self.phi_step(purpose, &recalibration)?;
        let mut phi = read::<A>(&self.running_phi)?;
        for (phi, &batch) in phi.iter_mut().zip(batch_phi) {
            let mut new = *phi;
            for shares in [step.cumulative, step.moving].into_iter().flatten() {
                // What is left out may be anything.
                let old = if shares.old == 0. {
                    A::zero()
                } else {
                    A::from_f64(shares.old) * new
                };
                new = old + A::from_f64(shares.new) * batch;
            }
            if self.accepts(new) {
                *phi = new;
            }
        }
        write(&self.running_phi, phi)?;
        self.count(purpose, &mut recalibration)
    }

    /// A training backward's update of ν from `gamma`, Γ, and `lambda`, Λ of a loss times `loss_scale`, each `[C]`.
    ///
    /// Eq. 13 divided by 1−α_b, in the variable a checkpoint stores:
    /// `ema_gz ← (1 − (1−α_b)Γ) ema_gz + Λ`.
    pub fn update_nu<A: Float + WithDType>(
        &self,
        gamma: &[A],
        lambda: &[A],
        loss_scale: f64,
    ) -> Result<()> {
        let beta = A::from_f64(1. - self.config.alpha_bwd);
        let unscale = A::from_f64(loss_scale.recip());
        let _guard = self.lock();
        let mut ema_gz = read::<A>(&self.ema_gz)?;
        for ((ema, &gamma), &lambda) in ema_gz.iter_mut().zip(gamma).zip(lambda) {
            let mut decay = A::one() - beta * gamma;
            if self.config.recipe == Recipe::Paper && decay < A::zero() {
                decay = A::zero();
            }
            let new = decay * *ema + unscale * lambda;
            // Γ too: the clamp would turn an infinite one into a finite factor.
            if self.accepts(gamma) && self.accepts(new) {
                *ema = new;
            }
        }
        write(&self.ema_gz, ema_gz)
    }

    /// [`update_phi`](Self::update_phi) by a kernel: `launch` is given ψ² and how it moves.
    #[cfg(feature = "cuda")]
    pub fn update_phi_on_gpu(
        &self,
        purpose: Purpose,
        launch: impl FnOnce(&mut CudaStorage, &Layout, &PhiStep) -> Result<()>,
    ) -> Result<()> {
        let mut recalibration = self.lock();
        let step = self.phi_step(purpose, &recalibration)?;
        let launch = |phi: &mut CudaStorage, layout: &Layout| launch(phi, layout, &step);
        self.running_phi.inplace_op1(&OnGpu::new(launch))?;
        self.count(purpose, &mut recalibration)
    }

    /// [`update_nu`](Self::update_nu) by a kernel: `launch` is given the variable that keeps ν.
    #[cfg(feature = "cuda")]
    pub fn update_nu_on_gpu(
        &self,
        launch: impl FnOnce(&mut CudaStorage, &Layout) -> Result<()>,
    ) -> Result<()> {
        let _guard = self.lock();
        self.ema_gz.inplace_op1(&OnGpu::new(launch))
    }

    /// The variable that keeps ψ², for kernels that read it.
    #[cfg(feature = "cuda")]
    pub fn phi_variable(&self) -> &Tensor {
        &self.running_phi
    }

    /// The one that keeps ν.
    #[cfg(feature = "cuda")]
    pub fn nu_variable(&self) -> &Tensor {
        &self.ema_gz
    }

    /// The kernels that the layer launched before.
    #[cfg(feature = "cuda")]
    pub fn kernels(&self) -> &Arc<Kernels> {
        &self.kernels
    }

    /// Leaves the step of this forward to its backward, or to [`settle`](Self::settle).
    pub fn defer(&self, forward: usize, step: impl FnOnce(&Self) -> Result<()> + Send + 'static) {
        let step = Box::new(step);
        *self.deferred() = Some(Deferred { forward, step });
    }

    /// Takes the step that was left, if it still is.
    pub fn settle(&self) -> Result<()> {
        match self.take_deferred() {
            Some(Deferred { step, .. }) => step(self),
            None => Ok(()),
        }
    }

    /// Forgets the step that was left, if it is that of this forward.
    pub fn forget_deferred(&self, forward: usize) {
        self.deferred()
            .take_if(|deferred| deferred.forward == forward);
    }

    fn take_deferred(&self) -> Option<Deferred> {
        self.deferred().take()
    }

    fn deferred(&self) -> MutexGuard<'_, Option<Deferred>> {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How ψ² moves in the step that comes.
    fn phi_step(&self, purpose: Purpose, recalibration: &Recalibration) -> Result<PhiStep> {
        let Purpose::Recalibration(pass) = purpose else {
            return Ok(self.config.phi_step(self.steps()? + 1));
        };
        let done = recalibration.batches_of(pass);
        Ok(PhiStep {
            cumulative: Some(Shares::of_mean(done + 1)),
            moving: None,
        })
    }

    /// Counts the step that was taken.
    fn count(&self, purpose: Purpose, recalibration: &mut Recalibration) -> Result<()> {
        if let Purpose::Recalibration(pass) = purpose {
            *recalibration = Recalibration {
                pass,
                batches: recalibration.batches_of(pass) + 1,
            };
            return Ok(());
        }
        let t = self.steps()? + 1;
        self.iters.set(&Tensor::new(&[t as i64], &Device::Cpu)?)
    }

    /// The finite check of recipe Paper, in the state's dtype: an overflowed batch must not outlive its
    /// step.
    fn accepts(&self, new: impl WithDType) -> bool {
        let finite = match self.running_phi.dtype() {
            DType::F64 => new.to_f64().is_finite(),
            _ => (new.to_f64() as f32).is_finite(),
        };
        finite || self.config.recipe == Recipe::Fairseq
    }

    fn copy(&self, var: &Var) -> Result<Tensor> {
        var.as_detached_tensor().copy()?.reshape(self.size)
    }

    fn lock(&self) -> MutexGuard<'_, Recalibration> {
        // A panic elsewhere leaves the variables whole: each is set by one call.
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recalibration {
    fn batches_of(&self, pass: u64) -> usize {
        if self.pass == pass {
            self.batches
        } else {
            0
        }
    }
}

/// Launches that write a variable's storage.
#[cfg(feature = "cuda")]
struct OnGpu<F>(Cell<Option<F>>);

#[cfg(feature = "cuda")]
impl<F: FnOnce(&mut CudaStorage, &Layout) -> Result<()>> OnGpu<F> {
    fn new(launch: F) -> Self {
        Self(Cell::new(Some(launch)))
    }
}

#[cfg(feature = "cuda")]
impl<F: FnOnce(&mut CudaStorage, &Layout) -> Result<()>> candle::InplaceOp1 for OnGpu<F> {
    fn name(&self) -> &'static str {
        "power_norm"
    }

    fn cpu_fwd(&self, _: &mut candle::CpuStorage, _: &Layout) -> Result<()> {
        candle::bail!("power_norm: expected a variable on a GPU, got one on the CPU")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        match self.0.take() {
            Some(launch) => launch(storage, layout),
            None => candle::bail!("power_norm: a step that runs twice"),
        }
    }
}

/// Refuses a tensor of the builder that is not on the device where the layer needs it.
pub(crate) fn same_device(name: &'static str, tensor: &Tensor, expected: &Device) -> Result<()> {
    let (expected, got) = (expected.location(), tensor.device().location());
    if got != expected {
        return Err(Error::StateDevice {
            name,
            expected,
            got,
        }
        .into());
    }
    Ok(())
}

fn as_var(name: &'static str, tensor: &Tensor, expected: DType) -> Result<Var> {
    let got = tensor.dtype();
    if got != expected {
        return Err(Error::StateDType {
            name,
            expected,
            got,
        }
        .into());
    }
    Var::from_tensor(tensor)
}

/// The values of a channel-sized tensor of any float dtype.
pub(crate) fn read<A: WithDType>(tensor: &Tensor) -> Result<Vec<A>> {
    tensor
        .detach()
        .to_dtype(A::DTYPE)?
        .flatten_all()?
        .to_vec1::<A>()
}

fn write<A: WithDType>(var: &Var, values: Vec<A>) -> Result<()> {
    let values = Tensor::from_vec(values, var.shape(), var.device())?;
    var.set(&values.to_dtype(var.dtype())?)
}
