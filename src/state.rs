//! ψ², ν and t: where they live, how they are read, and how a step moves them.

use crate::config::{PhiStep, PowerNormConfig, Shares};
use crate::error::Error;
use crate::mode::Purpose;
use candle::{DType, Device, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The running statistics of a layer, in variables that a `VarMap` shares.
///
/// Nothing is cached outside the variables, so a `VarMap::load` after construction takes effect at
/// the next call.
pub(crate) struct State {
    size: usize,
    config: PowerNormConfig,
    /// ψ², `[C]`, or `[1, C, 1, 1]` if the builder holds it in that shape.
    running_phi: Var,
    /// ν/(1−α_b), shaped as `running_phi`.
    ema_gz: Var,
    /// t, `[1]`, on the CPU: a step must not wait for a GPU to learn its number.
    iters: Var,
    /// The group scaling of the steps so far, `[1]`, on the CPU, as [`recorded`] writes it.
    groups: Var,
    /// Makes a read-modify-write of the variables whole. Never held while rows run: rayon may start
    /// this layer again on the same stack and deadlock.
    lock: Mutex<Recalibration>,
}

/// `groups` of a fresh layer, and of a checkpoint that does not say its group scaling.
const UNKNOWN: i64 = 0;

/// The group scaling as `groups` records it: G, or −1 without.
fn recorded(group_scaling: Option<usize>) -> i64 {
    group_scaling.map_or(-1, |groups| groups as i64)
}

/// The progress of the last recalibration.
#[derive(Debug, Default)]
struct Recalibration {
    pass: u64,
    batches: usize,
}

impl State {
    /// The state named by `vb`, and whether it is made of trainable variables. A frozen builder may
    /// lack everything except ψ².
    pub fn from_builder(
        size: usize,
        config: PowerNormConfig,
        dtype: DType,
        vb: VarBuilder,
    ) -> Result<(Self, bool)> {
        let buffer = |name: &'static str, fresh: f64| {
            let get =
                |shape: &[usize]| vb.get_with_hints_dtype(shape, name, Init::Const(fresh), dtype);
            // Asks for our shape first, because a builder that makes missing tensors must make this
            // shape.
            get(&[size]).or_else(|err| get(&[1, size, 1, 1]).map_err(|_| err))
        };
        let running_phi = buffer("running_phi", 1.).map_err(|err| {
            if vb.contains_tensor("running_phi") {
                return err;
            }
            Error::NoStatistics(vb.pp("running_phi").prefix()).into()
        })?;
        let trainable = running_phi.is_variable();
        // An evaluation reads neither ν nor t, so a file for inference may lack both. Each is asked
        // for first, because a builder may make what is missing. A tensor that is there but does
        // not fit stays an error.
        let ema_gz = match buffer("ema_gz", 0.) {
            Err(_) if !trainable && !vb.contains_tensor("ema_gz") => running_phi.zeros_like()?,
            got => got?,
        };
        let has_groups = vb.contains_tensor("groups");
        let on_cpu = vb.set_device(Device::Cpu);
        let count = |name| on_cpu.get_with_hints_dtype(1, name, Init::Const(0.), DType::I64);
        let iters = match count("iters") {
            Err(_) if !trainable && !on_cpu.contains_tensor("iters") => {
                Tensor::zeros(1, DType::I64, &Device::Cpu)?
            }
            got => got?,
        };
        let groups = match has_groups {
            true => Some(count("groups")?),
            // PyTorch's layer has no such tensor, and takes back only what it gave.
            false if running_phi.rank() > 1 => None,
            // A `VarMap` makes it. Another builder may lack it, or make a constant.
            false => (count("groups").ok()).filter(|made| made.is_variable() == trainable),
        };
        for (name, tensor) in [
            ("ema_gz", Some(&ema_gz)),
            ("iters", Some(&iters)),
            ("groups", groups.as_ref()),
        ] {
            // A copy moves, and what the builder has stays as it is.
            match tensor.map(Tensor::is_variable) {
                Some(false) if trainable => return Err(Error::CopiedState(name).into()),
                Some(true) if !trainable => return Err(Error::CopiedState("running_phi").into()),
                _ => {}
            }
        }
        let tensors = [&running_phi, &ema_gz, &iters];
        let state = Self::new(size, config, dtype, tensors, groups)?;
        state.check_groups()?;
        // On a GPU the host would wait for ψ².
        if !trainable && state.device().is_cpu() {
            state.check_phi()?;
        }
        Ok((state, trainable))
    }

    /// The state in these tensors: ψ², ν/(1−α_b) and t, and the group scaling of the steps so far
    /// if it is recorded. Variables are shared, others copied.
    pub fn new(
        size: usize,
        config: PowerNormConfig,
        dtype: DType,
        [running_phi, ema_gz, iters]: [&Tensor; 3],
        groups: Option<Tensor>,
    ) -> Result<Self> {
        let groups = match groups {
            Some(groups) => groups,
            None => Tensor::full(UNKNOWN, 1, &Device::Cpu)?,
        };
        // A `VarMap` hands out what it holds, on whatever device that is.
        for (name, buffer, expected) in [
            ("ema_gz", ema_gz, running_phi.device()),
            ("iters", iters, &Device::Cpu),
            ("groups", &groups, &Device::Cpu),
        ] {
            same_device(name, buffer, expected)?;
        }
        Ok(Self {
            size,
            config,
            running_phi: as_var("running_phi", running_phi, dtype)?,
            ema_gz: as_var("ema_gz", ema_gz, dtype)?,
            iters: as_var("iters", iters, DType::I64)?,
            groups: as_var("groups", &groups, DType::I64)?,
            lock: Mutex::default(),
        })
    }

    /// Refuses a ψ² that no training can have left. On a GPU the host waits for it.
    pub fn check_phi(&self) -> Result<()> {
        // On the CPU: Metal has no f64.
        let phi = self.running_phi()?.to_device(&Device::Cpu)?;
        let phi = phi.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        match phi.iter().find(|phi| !(phi.is_finite() && **phi >= 0.)) {
            Some(&got) => Err(Error::RunningPhi(got).into()),
            None => Ok(()),
        }
    }

    /// Refuses the state of a layer with another group scaling, under which ψ² and ν mean something
    /// else.
    pub fn check_groups(&self) -> Result<()> {
        let groups = first(&self.groups)?;
        let expected = self.config.group_scaling;
        if groups == UNKNOWN || groups == recorded(expected) {
            return Ok(());
        }
        let got = match groups {
            -1 => "None".to_owned(),
            groups => format!("Some({groups})"),
        };
        Err(Error::StateGroups { expected, got }.into())
    }

    pub fn size(&self) -> usize {
        self.size
    }

    pub fn config(&self) -> &PowerNormConfig {
        &self.config
    }

    /// The variable that keeps ν, `[C]` or in the builder's shape.
    pub fn nu_variable(&self) -> &Var {
        &self.ema_gz
    }

    /// `true` if `tensor` is a view of the variable of ψ² or ν.
    pub fn owns(&self, tensor: &Tensor) -> bool {
        let storage = |tensor: &Tensor| std::ptr::from_ref(&*tensor.storage_and_layout().0);
        let of_tensor = storage(tensor);
        [&self.running_phi, &self.ema_gz]
            .map(|var| storage(var))
            .contains(&of_tensor)
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
        let got = first(&self.iters)?;
        usize::try_from(got).map_err(|_| Error::Steps(got).into())
    }

    pub fn reset(&self) -> Result<()> {
        let mut recalibration = self.lock();
        *recalibration = Recalibration::default();
        self.running_phi.set(&self.running_phi.ones_like()?)?;
        self.ema_gz.set(&self.ema_gz.zeros_like()?)?;
        self.iters.set(&self.iters.zeros_like()?)?;
        self.groups.set(&Tensor::full(UNKNOWN, 1, &Device::Cpu)?)
    }

    /// ψ² and t for a forward that begins now: ψ² itself if `in_place`, else a copy. Refuses what
    /// a checkpoint may have brought: a negative t, or another group scaling.
    pub fn begin(&self, in_place: bool) -> Result<(Tensor, usize)> {
        let _guard = self.lock();
        self.check_groups()?;
        let phi = self.running_phi.as_detached_tensor();
        let phi = match in_place {
            true => phi,
            false => phi.copy()?,
        };
        Ok((phi, self.steps()?))
    }

    /// Takes the step of a forward: `update` moves ψ², and t counts up in training.
    pub fn update_phi(
        &self,
        purpose: Purpose,
        update: impl FnOnce(&Var, &PhiStep) -> Result<()>,
    ) -> Result<()> {
        let mut recalibration = self.lock();
        update(&self.running_phi, &self.phi_step(purpose, &recalibration)?)?;
        self.count(purpose, &mut recalibration)
    }

    /// Takes the step of a backward: `update` moves ν, in [its variable](Self::nu_variable).
    pub fn update_nu(&self, update: impl FnOnce(&Var) -> Result<()>) -> Result<()> {
        let _guard = self.lock();
        update(&self.ema_gz)
    }

    /// The shares by which ψ² moves in the next step.
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

    /// Counts the step that was taken, and records its group scaling.
    fn count(&self, purpose: Purpose, recalibration: &mut Recalibration) -> Result<()> {
        if first(&self.groups)? == UNKNOWN {
            let groups = recorded(self.config.group_scaling);
            self.groups.set(&Tensor::full(groups, 1, &Device::Cpu)?)?;
        }
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

/// The number in a variable of one, which is on the CPU.
fn first(count: &Var) -> Result<i64> {
    Ok(count.as_detached_tensor().to_vec1::<i64>()?[0])
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
