//! ψ², ν and t: where they live, how they are read, and how a step moves them.

use crate::check::StorageId;
use crate::config::{AverageWeights, PhiStep, PowerNormConfig};
use crate::error::Error;
use crate::mode::Purpose;
use candle::{DType, Device, Result, Storage, Tensor, Var};
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
    /// t, `[1]`, on the CPU, so that reading it never waits for a GPU.
    iters: Var,
    /// The group scaling of the steps so far, `[1]`, on the CPU, as [`recorded`] writes it.
    groups: Var,
    /// The storages of ψ² and ν.
    storages: [StorageId; 2],
    /// Makes a read-modify-write of the variables whole. Never held while rows run: rayon may start
    /// this layer again on the same stack and deadlock.
    lock: Mutex<Recalibration>,
}

/// `groups` of a fresh layer, and of a checkpoint without a record of its group scaling.
const UNKNOWN: i64 = 0;

/// The group scaling as `groups` records it: G, or −1 without.
fn recorded(group_scaling: Option<usize>) -> i64 {
    group_scaling.map_or(-1, |groups| groups as i64)
}

/// The state of one moment: ψ², ν/(1−α_b), t, the record of the group scaling, and the progress of
/// a recalibration.
pub(crate) struct Snapshot {
    variables: [Tensor; 4],
    recalibration: Recalibration,
}

/// The progress of the last recalibration.
#[derive(Debug, Default, Clone, Copy)]
struct Recalibration {
    pass: u64,
    batches: usize,
}

impl State {
    /// Builds the state from the tensors of `vb`. Also returns `true` if they are trainable
    /// variables. A frozen builder may lack everything except ψ².
    pub fn from_builder(
        size: usize,
        config: PowerNormConfig,
        dtype: DType,
        vb: VarBuilder,
    ) -> Result<(Self, bool)> {
        let running_phi = running_phi_of(&vb, size, dtype)?;
        let trainable = running_phi.is_variable();
        let ema_gz = ema_gz_of(&vb, &running_phi, size, dtype)?;
        let iters = iters_of(&vb, trainable)?;
        let groups = groups_of(&vb, &running_phi)?;
        for (name, tensor) in [
            ("ema_gz", Some(&ema_gz)),
            ("iters", Some(&iters)),
            ("groups", groups.as_ref()),
        ] {
            // Steps would move the copy, and the builder's own tensor would keep its old value.
            match tensor.map(Tensor::is_variable) {
                Some(false) if trainable => return Err(Error::CopiedState(name).into()),
                Some(true) if !trainable => return Err(Error::CopiedState("running_phi").into()),
                _ => {}
            }
        }
        let tensors = [&running_phi, &ema_gz, &iters];
        let state = Self::new(size, config, dtype, tensors, groups)?;
        state.check_groups()?;
        // Only on a CPU, because on a GPU the host would wait for ψ².
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
        // A `VarMap` returns a tensor as it is, on whatever device that is.
        same_device("ema_gz", ema_gz, running_phi.device())?;
        let running_phi = as_var("running_phi", running_phi, dtype)?;
        let ema_gz = as_var("ema_gz", ema_gz, dtype)?;
        Ok(Self {
            size,
            config,
            storages: [&running_phi, &ema_gz].map(|var| StorageId::of(var)),
            running_phi,
            ema_gz,
            iters: as_var("iters", &on_cpu("iters", iters)?, DType::I64)?,
            groups: as_var("groups", &on_cpu("groups", &groups)?, DType::I64)?,
            lock: Mutex::default(),
        })
    }

    /// Rejects a ψ² that no training can have left. On a GPU the host waits for it.
    pub fn check_phi(&self) -> Result<()> {
        // On the CPU: Metal has no f64.
        let phi = self.running_phi()?.to_device(&Device::Cpu)?;
        let phi = phi.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        match phi.iter().find(|phi| !(phi.is_finite() && **phi >= 0.)) {
            Some(&got) => Err(Error::RunningPhi(got).into()),
            None => Ok(()),
        }
    }

    /// Rejects the state of a layer with another group scaling, under which ψ² and ν mean something
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
        self.storages.contains(&StorageId::of(tensor))
    }

    /// The storages of ψ² and ν. A step moves these before it has read the rows for the last time,
    /// and no call locks the storage of ψ² twice.
    pub fn storages(&self) -> &[StorageId] {
        &self.storages
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

    /// A copy of everything that a step moves.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let recalibration = self.lock();
        let copy = |var: &Var| var.as_detached_tensor().copy();
        Ok(Snapshot {
            variables: [
                copy(&self.running_phi)?,
                copy(&self.ema_gz)?,
                copy(&self.iters)?,
                copy(&self.groups)?,
            ],
            recalibration: *recalibration,
        })
    }

    pub fn restore(&self, snapshot: &Snapshot) -> Result<()> {
        let mut recalibration = self.lock();
        let variables = [&self.running_phi, &self.ema_gz, &self.iters, &self.groups];
        for (var, copy) in variables.into_iter().zip(&snapshot.variables) {
            var.set(copy)?;
        }
        *recalibration = snapshot.recalibration;
        Ok(())
    }

    pub fn reset(&self) -> Result<()> {
        let mut recalibration = self.lock();
        // All are allocated before the first is set, so that a lack of memory changes nothing.
        let fresh = [
            (&self.running_phi, self.running_phi.ones_like()?),
            (&self.ema_gz, self.ema_gz.zeros_like()?),
            (&self.iters, self.iters.zeros_like()?),
            (&self.groups, Tensor::full(UNKNOWN, 1, &Device::Cpu)?),
        ];
        *recalibration = Recalibration::default();
        for (var, fresh) in fresh {
            var.set(&fresh)?;
        }
        Ok(())
    }

    /// ψ² and t for a forward that begins now: ψ² itself if `in_place`, else a copy. Rejects what
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

    /// ψ² in its variable, for an evaluation that reads it at once. Rejects what [`begin`](Self::begin)
    /// does, without the lock: each count is whole, and no step leaves one that is rejected.
    pub fn evaluated(&self) -> Result<&Var> {
        self.check_groups()?;
        self.steps()?;
        Ok(&self.running_phi)
    }

    /// Moves ψ² with `update`, under the lock. Then counts the step, and records its group scaling.
    pub fn update_phi(
        &self,
        purpose: Purpose,
        update: impl FnOnce(&Var, &PhiStep) -> Result<()>,
    ) -> Result<()> {
        let mut recalibration = self.lock();
        match purpose {
            Purpose::Recalibration(pass) => {
                let batches = recalibration.batches_of(pass) + 1;
                let step = PhiStep {
                    cumulative: Some(AverageWeights::of_mean(batches)),
                    moving: None,
                };
                update(&self.running_phi, &step)?;
                *recalibration = Recalibration { pass, batches };
            }
            Purpose::Training | Purpose::Evaluation => {
                let t = self.steps()? + 1;
                update(&self.running_phi, &self.config.phi_step(t))?;
                self.iters.set(&Tensor::new(&[t as i64], &Device::Cpu)?)?;
            }
        }
        if first(&self.groups)? == UNKNOWN {
            let groups = recorded(self.config.group_scaling);
            self.groups.set(&Tensor::full(groups, 1, &Device::Cpu)?)?;
        }
        Ok(())
    }

    /// Moves ν with `update`, under the lock, in [its variable](Self::nu_variable).
    pub fn update_nu(&self, update: impl FnOnce(&Var) -> Result<()>) -> Result<()> {
        let _guard = self.lock();
        update(&self.ema_gz)
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
        if self.pass == pass { self.batches } else { 0 }
    }
}

/// ψ² from the builder, or a fresh 1. A frozen builder must have it.
fn running_phi_of(vb: &VarBuilder, size: usize, dtype: DType) -> Result<Tensor> {
    per_channel(vb, "running_phi", size, 1., dtype).map_err(|err| {
        match vb.contains_tensor("running_phi") {
            true => err,
            false => Error::NoStatistics(vb.pp("running_phi").prefix()).into(),
        }
    })
}

/// ν/(1−α_b) from the builder, or 0. An evaluation needs no ν, so a frozen builder may lack it.
fn ema_gz_of(vb: &VarBuilder, running_phi: &Tensor, size: usize, dtype: DType) -> Result<Tensor> {
    match per_channel(vb, "ema_gz", size, 0., dtype) {
        Err(_) if may_lack(vb, "ema_gz", running_phi.is_variable()) => running_phi.zeros_like(),
        got => got,
    }
}

/// t from the builder, or 0. An evaluation does not count, so a frozen builder may lack it.
fn iters_of(vb: &VarBuilder, trainable: bool) -> Result<Tensor> {
    match count(vb, "iters") {
        Err(_) if may_lack(vb, "iters", trainable) => Tensor::zeros(1, DType::I64, &Device::Cpu),
        got => got,
    }
}

/// The record of the group scaling from the builder, if it has one or makes one beside
/// `running_phi`.
fn groups_of(vb: &VarBuilder, running_phi: &Tensor) -> Result<Option<Tensor>> {
    match vb.contains_tensor("groups") {
        true => count(vb, "groups").map(Some),
        // PyTorch's layer has no such tensor, so a checkpoint of its shapes gets none.
        false if running_phi.rank() > 1 => Ok(None),
        // A `VarMap` makes it. Another builder may lack it, or make a constant.
        false => {
            let made = count(vb, "groups").ok();
            Ok(made.filter(|made| made.is_variable() == running_phi.is_variable()))
        }
    }
}

/// A number for each channel, `[C]` or `[1, C, 1, 1]`. Asks for our shape first, because a builder
/// that makes missing tensors must make this shape.
fn per_channel(
    vb: &VarBuilder,
    name: &'static str,
    size: usize,
    fresh: f64,
    dtype: DType,
) -> Result<Tensor> {
    let get = |shape: &[usize]| vb.get_with_hints_dtype(shape, name, Init::Const(fresh), dtype);
    get(&[size]).or_else(|err| get(&[1, size, 1, 1]).map_err(|_| err))
}

/// A count of the state, `[1]`, on the CPU if the builder moves or makes it.
fn count(vb: &VarBuilder, name: &'static str) -> Result<Tensor> {
    let on_cpu = vb.clone().set_device(Device::Cpu);
    on_cpu.get_with_hints_dtype(1, name, Init::Const(0.), DType::I64)
}

/// `true` if a builder that did not give `name` simply lacks it, and may. Asked after the builder,
/// which may make what is missing. A tensor that is there but does not fit stays an error.
fn may_lack(vb: &VarBuilder, name: &'static str, trainable: bool) -> bool {
    !trainable && !vb.contains_tensor(name)
}

/// `count` on the CPU, where the host reads it in every step without a wait for a GPU. A variable
/// cannot be moved, because the builder's own would keep its old value.
fn on_cpu(name: &'static str, count: &Tensor) -> Result<Tensor> {
    match count.is_variable() && !count.device().is_cpu() {
        true => Err(Error::CountDevice {
            name,
            got: count.device().location(),
        }
        .into()),
        false => count.to_device(&Device::Cpu),
    }
}

/// Rejects a tensor of the builder that is not on the device where the layer needs it.
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
    // In place, because a copy would take as long as half of an evaluation of one row.
    let (storage, layout) = count.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(storage.as_slice::<i64>()?[layout.start_offset()]),
        _ => unreachable!("counts are on the CPU"),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: &Device = &Device::Cpu;

    fn numbers(tensor: &Tensor) -> Vec<f64> {
        let tensor = tensor.to_dtype(DType::F64).unwrap();
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// The state of two channels after `t` steps, with ψ² = [4, 9] and ν/(1−α_b) = [10, −20].
    fn state(config: PowerNormConfig, t: i64, groups: i64) -> Result<State> {
        let phi = Tensor::new(&[4f32, 9.], CPU)?;
        let ema_gz = Tensor::new(&[10f32, -20.], CPU)?;
        let tensors = [&phi, &ema_gz, &Tensor::new(&[t], CPU)?];
        let groups = Tensor::new(&[groups], CPU)?;
        State::new(2, config, DType::F32, tensors, Some(groups))
    }

    /// Makes a step that doubles ψ², and returns its shares.
    fn step(state: &State, purpose: Purpose) -> Result<PhiStep> {
        let mut shares = None;
        state.update_phi(purpose, |phi, step| {
            shares = Some(*step);
            phi.set(&(phi.as_tensor() * 2.)?)
        })?;
        Ok(shares.unwrap())
    }

    #[test]
    fn a_training_step_counts_and_records_its_groups() -> Result<()> {
        let config = PowerNormConfig {
            warmup_steps: 3,
            group_scaling: None,
            ..Default::default()
        };
        let state = state(config, 2, UNKNOWN)?;
        // Step 3 is the last of the warm-up: a mean of three values.
        let last = step(&state, Purpose::Training)?;
        let mean = last.cumulative.unwrap();
        assert_eq!((mean.old, mean.new), (2. / 3., 1. / 3.));
        assert!(last.moving.is_none());
        assert_eq!(state.steps()?, 3);
        assert_eq!(first(&state.groups)?, -1);
        assert_eq!(numbers(&state.running_phi()?), [8., 18.]);
        let moving = step(&state, Purpose::Training)?;
        assert!(moving.cumulative.is_none());
        assert_eq!(moving.moving.unwrap().old, 0.9);
        assert_eq!(state.steps()?, 4);
        Ok(())
    }

    #[test]
    fn a_recalibration_is_a_mean_of_its_own_batches() -> Result<()> {
        let state = state(1e-5.into(), 7, UNKNOWN)?;
        for (pass, old) in [(1, 0.), (1, 0.5), (1, 2. / 3.), (2, 0.), (1, 0.)] {
            let shares = step(&state, Purpose::Recalibration(pass))?;
            assert_eq!(shares.cumulative.unwrap().old, old, "pass {pass}");
            assert!(shares.moving.is_none());
        }
        // It is no training step, but it records the group scaling.
        assert_eq!(state.steps()?, 7);
        assert_eq!(first(&state.groups)?, 1);
        Ok(())
    }

    #[test]
    fn an_update_that_fails_counts_nothing() -> Result<()> {
        let state = state(1e-5.into(), 7, UNKNOWN)?;
        for purpose in [Purpose::Training, Purpose::Recalibration(1)] {
            let result = state.update_phi(purpose, |_, _| candle::bail!("no memory"));
            assert!(result.is_err());
        }
        assert_eq!((state.steps()?, first(&state.groups)?), (7, UNKNOWN));
        let shares = step(&state, Purpose::Recalibration(1))?;
        assert_eq!(shares.cumulative.unwrap().old, 0.);
        Ok(())
    }

    #[test]
    fn nu_is_its_share_of_the_variable() -> Result<()> {
        let config = PowerNormConfig {
            alpha_bwd: 0.75,
            ..Default::default()
        };
        let state = state(config, 0, UNKNOWN)?;
        assert_eq!(numbers(&state.nu()?), [2.5, -5.]);
        state.update_nu(|ema_gz| ema_gz.set(&Tensor::new(&[4f32, 8.], CPU)?))?;
        assert_eq!(numbers(&state.nu()?), [1., 2.]);
        assert_eq!(numbers(state.nu_variable()), [4., 8.]);
        Ok(())
    }

    #[test]
    fn a_reset_is_a_fresh_layer() -> Result<()> {
        let state = state(1e-5.into(), 7, 1)?;
        step(&state, Purpose::Recalibration(1))?;
        state.reset()?;
        assert_eq!(numbers(&state.running_phi()?), [1., 1.]);
        assert_eq!(numbers(&state.nu()?), [0., 0.]);
        assert_eq!((state.steps()?, first(&state.groups)?), (0, UNKNOWN));
        let shares = step(&state, Purpose::Recalibration(1))?;
        assert_eq!(shares.cumulative.unwrap().old, 0.);
        Ok(())
    }

    /// A forward reads ψ² of before a step that another thread takes meanwhile, unless it reads in
    /// place.
    #[test]
    fn a_forward_begins_with_a_copy_or_in_place() -> Result<()> {
        let state = state(1e-5.into(), 7, UNKNOWN)?;
        let (copy, t) = state.begin(false)?;
        let (in_place, _) = state.begin(true)?;
        assert_eq!(t, 7);
        assert!(state.owns(&in_place) && !state.owns(&copy));
        step(&state, Purpose::Training)?;
        assert_eq!(numbers(&copy), [4., 9.]);
        assert_eq!(numbers(&in_place), [8., 18.]);
        Ok(())
    }

    #[test]
    fn a_view_of_the_state_is_its_own() -> Result<()> {
        let state = state(1e-5.into(), 7, UNKNOWN)?;
        assert!(state.owns(&state.running_phi.narrow(0, 1, 1)?));
        assert!(state.owns(&state.ema_gz.reshape((2, 1))?));
        assert!(!state.owns(&state.running_phi()?));
        Ok(())
    }

    /// PyTorch's `[1, C, 1, 1]` is kept, and read as `[C]`.
    #[test]
    fn the_shape_of_a_checkpoint_is_kept() -> Result<()> {
        let phi = Tensor::new(&[4f64, 9.], CPU)?.reshape((1, 2, 1, 1))?;
        let iters = Tensor::new(&[0i64], CPU)?;
        let tensors = [&phi, &phi, &iters];
        let state = State::new(2, 1e-5.into(), DType::F64, tensors, None)?;
        assert_eq!(state.running_phi()?.dims(), [2]);
        assert_eq!(state.nu()?.dims(), [2]);
        state.reset()?;
        assert_eq!(state.running_phi.dims(), [1, 2, 1, 1]);
        assert_eq!(numbers(&state.running_phi()?), [1., 1.]);
        Ok(())
    }

    #[test]
    fn counts_and_groups_that_no_step_leaves() -> Result<()> {
        let text = |result: Result<()>| result.unwrap_err().to_string();
        let negative = state(1e-5.into(), -3, UNKNOWN)?;
        assert!(text(negative.steps().map(drop)).contains("-3"));
        assert!(text(negative.begin(false).map(drop)).contains("-3"));

        let config = |group_scaling| PowerNormConfig {
            group_scaling,
            ..Default::default()
        };
        for (group_scaling, groups, got) in [
            (Some(2), UNKNOWN, None),
            (Some(2), 2, None),
            (None, -1, None),
            (Some(2), 1, Some("Some(1)")),
            (Some(2), -1, Some("None")),
            (None, 1, Some("Some(1)")),
        ] {
            let state = state(config(group_scaling), 0, groups)?;
            match got {
                None => state.check_groups()?,
                Some(got) => assert!(text(state.check_groups()).contains(got)),
            }
            assert_eq!(state.begin(true).is_err(), got.is_some());
        }
        Ok(())
    }

    #[test]
    fn a_mean_of_squares_is_finite_and_not_negative() -> Result<()> {
        let state = state(1e-5.into(), 0, UNKNOWN)?;
        for (phi, expected) in [
            ([0., -0.], None),
            ([f32::MAX, 1e-45], None),
            ([1., -1e-45], Some("-1")),
            ([f32::NAN, 1.], Some("NaN")),
            ([f32::INFINITY, -1.], Some("inf")),
        ] {
            state.running_phi.set(&Tensor::new(&phi, CPU)?)?;
            match (expected, state.check_phi()) {
                (None, result) => result?,
                (Some(got), result) => {
                    let error = result.unwrap_err().to_string();
                    assert!(error.contains(got), "{error}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_tensor_of_another_dtype_is_no_state() -> Result<()> {
        let error = as_var("iters", &Tensor::new(&[0u32], CPU)?, DType::I64).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("iters") && error.contains("U32"), "{error}");
        // A variable is shared, and a tensor is copied.
        let var = Var::zeros(1, DType::F32, CPU)?;
        let shared = as_var("ema_gz", &var, DType::F32)?;
        let copied = as_var("ema_gz", &var.as_detached_tensor(), DType::F32)?;
        var.set(&Tensor::new(&[3f32], CPU)?)?;
        assert_eq!((numbers(&shared), numbers(&copied)), (vec![3.], vec![0.]));
        Ok(())
    }
}
