//! The life of a step: a forward and its backward, on one rank or on many.
//!
//! A training forward sums over the rows of a batch, and these sums move ψ². Its backward sums too,
//! and these sums move ν. If several ranks have rows of one batch, each call first adds its sums up
//! over the ranks, in an exchange. All ranks come to the same exchanges in the same order. A rank
//! whose call fails before its exchange tells the others, when its [`Turn`] is dropped.
//!
//! The [device](crate::device) computes a step, in its order. Through [`StepEnv`] it exchanges
//! sums, moves ψ² and ν under the state's lock, and counts the step. Nothing is pending between
//! calls.

use super::{as_bytes, readable, residual};
use crate::config::{ForwardKind, PhiStep};
use crate::device::pick::DeviceKind;
use crate::device::{Env, Gradients, Inputs, Nu, Pass, RowNorm, Saved, Settings, Wanted};
use crate::loss_scale::LossScale;
use crate::mode::Purpose;
use crate::ranks::{Exchange, Member, Turn};
use crate::state::State;
use candle::{Result, Storage, Tensor, Var};
use std::sync::Arc;

/// A forward that is about to run, on arguments that the layer has checked.
pub(crate) struct Call<'a> {
    pub device: &'a DeviceKind,
    /// `[.., C]`.
    pub xs: &'a Tensor,
    /// Added to `xs` first.
    pub residual: Option<&'a Tensor>,
    /// The padding mask: `xs` without its last dimension.
    pub keep: Option<&'a Tensor>,
    /// γ, `[C]`.
    pub weight: Option<&'a Tensor>,
    /// β, `[C]`.
    pub bias: Option<&'a Tensor>,
    pub settings: Settings,
    pub role: Role<'a>,
}

/// The part of the layer's state in a call.
#[allow(clippy::large_enum_variant)] // One exists for each call, on the stack.
pub(crate) enum Role<'a> {
    /// There is no state, and D is 1: rows are normalized by themselves.
    Stateless,
    Evaluation(&'a State),
    /// Training or recalibration. Without other ranks there is no turn.
    Training(Training, Option<Turn<'a>>),
}

/// The state that a training forward and its backward move.
pub(crate) struct Training {
    pub state: Arc<State>,
    /// Training or recalibration.
    pub purpose: Purpose,
    pub loss_scale: LossScale,
    /// `None` if there is no other rank.
    pub ranks: Option<Member>,
}

impl<'a> Call<'a> {
    /// A normalization of the rows of `xs` by themselves.
    pub fn of_rows(device: &'a DeviceKind, xs: &'a Tensor, norm: RowNorm) -> Self {
        Self {
            device,
            xs,
            residual: None,
            keep: None,
            weight: None,
            bias: None,
            settings: Settings::of_rows(norm),
            role: Role::Stateless,
        }
    }

    /// Reads ψ² and t, and brings the arguments into a layout that their device reads. Returns t
    /// last.
    fn pass(&self) -> Result<(Pass, Inputs, usize)> {
        let (state, purpose) = match &self.role {
            Role::Stateless => (None, Purpose::Evaluation),
            Role::Evaluation(state) => (Some(*state), Purpose::Evaluation),
            Role::Training(training, _) => (Some(&*training.state), training.purpose),
        };
        let (mut phi, mut step_count, mut kind) = (None, 0, ForwardKind::Evaluation);
        if let Some(state) = state {
            let rows = self.xs.device();
            let in_place = self.device.reads_phi_in_place(rows, state.device());
            let (before, t) = state.begin(in_place)?;
            (phi, step_count) = (Some(before), t);
            kind = match purpose {
                Purpose::Evaluation => ForwardKind::Evaluation,
                Purpose::Training => state.config().kind_at(t + 1),
                Purpose::Recalibration(_) => ForwardKind::BatchStatistic,
            };
        }
        let is_own = |rows: &Tensor| state.is_some_and(|state| state.owns(rows));
        let readable = |rows: &Tensor| match kind.is_training() && is_own(rows) {
            // ψ² and ν move before these rows are read for the last time.
            true => rows.force_contiguous(),
            false => readable(rows),
        };
        let arguments = [Some(self.xs), self.residual, self.weight, self.bias];
        let pass = Pass {
            x: readable(self.xs)?,
            keep: self.keep.map(as_bytes).transpose()?,
            weight: self.weight.map(Tensor::contiguous).transpose()?,
            bias: self.bias.map(Tensor::contiguous).transpose()?,
            kind,
            settings: self.settings,
        };
        let inputs = Inputs {
            residual: self.residual.map(readable).transpose()?,
            phi,
            tracked: arguments.into_iter().flatten().any(Tensor::track_op),
        };
        Ok((pass, inputs, step_count))
    }
}

/// A forward that ran, and what its backward needs.
pub(crate) struct Step {
    /// The forward's. After a forward with a residual, `x` is the sum that it normalized.
    pub pass: Pass,
    saved: Box<dyn Saved>,
    /// `None` unless the forward counted as a step.
    training: Option<Training>,
    /// t before the step.
    step_count: usize,
}

impl Step {
    /// Runs a forward, which moves ψ² and t if it is a training step. Returns y too, and the sum of
    /// the input and its residual if there is one.
    pub fn forward(call: Call) -> Result<(Self, Storage, Option<Tensor>)> {
        let (mut pass, inputs, step_count) = call.pass()?;
        let (training, turn) = match call.role {
            Role::Stateless | Role::Evaluation(_) => (None, None),
            Role::Training(training, turn) => (Some(training), turn),
        };
        let mut env = StepEnv::new(training.as_ref(), turn, step_count);
        let (saved, outputs) = call.device.forward(&pass, &inputs, &mut env)?;
        let counted = env.counted;
        drop(env);
        let stream = match (outputs.stream, call.residual) {
            (Some(sum), Some(residual)) => Some(residual::stream(call.xs, residual, sum)?),
            _ => None,
        };
        if let Some(stream) = &stream {
            pass.x = stream.clone();
        }
        let step = Self {
            pass,
            saved,
            training: training.filter(|_| counted),
            step_count,
        };
        Ok((step, outputs.y, stream))
    }

    /// Runs a backward from `dy`, the gradient of the output. It moves ν if the forward counted as
    /// a step.
    pub fn backward(&self, dy: &Tensor) -> Result<Gradients> {
        let training = self.training.as_ref();
        let ranks = training.and_then(|training| training.ranks.as_ref());
        // From here on a failure tells the other ranks.
        let turn = ranks.map(|ranks| ranks.turn(Exchange::Backward));
        let is_tracked =
            |parameter: &Option<Tensor>| parameter.as_ref().is_some_and(Tensor::track_op);
        let wanted = Wanted {
            input: self.pass.x.track_op(),
            weight: is_tracked(&self.pass.weight),
            bias: is_tracked(&self.pass.bias),
        };
        let mut env = StepEnv::new(training, turn, self.step_count);
        let dy = readable(dy)?;
        self.saved.backward(&self.pass, &dy, wanted, &mut env)
    }
}

/// The [`Env`] of one forward or one backward.
struct StepEnv<'a> {
    has_ranks: bool,
    /// The turn in the exchange of this call, until it is taken.
    turn: Option<Turn<'a>>,
    /// `None` in an evaluation.
    training: Option<&'a Training>,
    /// Read once, because another thread may set it meanwhile.
    loss_scale: f64,
    step_count: usize,
    /// ψ² has moved.
    counted: bool,
}

impl<'a> StepEnv<'a> {
    fn new(training: Option<&'a Training>, turn: Option<Turn<'a>>, step_count: usize) -> Self {
        Self {
            has_ranks: turn.is_some(),
            turn,
            training,
            loss_scale: training.map_or(1., |training| training.loss_scale.get()),
            step_count,
            counted: false,
        }
    }

    /// ν, which the variable `ema_gz` keeps.
    fn nu_in<'v>(&self, ema_gz: &'v Var, training: &Training) -> Nu<'v> {
        Nu {
            ema_gz,
            share: 1. - training.state.config().alpha_bwd,
            loss_scale: self.loss_scale,
        }
    }
}

impl Env for StepEnv<'_> {
    fn has_ranks(&self) -> bool {
        self.has_ranks
    }

    fn exchange(&mut self, sums: Tensor) -> Result<Tensor> {
        match self.turn.take() {
            Some(turn) => turn.sum(&sums, self.step_count),
            None if self.has_ranks => unreachable!("a device exchanges sums once in a pass"),
            None => Ok(sums),
        }
    }

    fn move_phi(&mut self, update: &mut dyn FnMut(&Var, &PhiStep) -> Result<()>) -> Result<()> {
        if let Some(training) = self.training {
            (training.state).update_phi(training.purpose, |phi, step| update(phi, step))?;
            self.counted = true;
        }
        Ok(())
    }

    fn nu(&self) -> Option<Nu<'_>> {
        let training = self.training?;
        Some(self.nu_in(training.state.nu_variable(), training))
    }

    fn move_nu(&mut self, update: &mut dyn FnMut(Option<&Nu>) -> Result<()>) -> Result<()> {
        match self.training {
            // A recalibration leaves ν alone.
            Some(training) if training.purpose == Purpose::Training => {
                (training.state).update_nu(|ema_gz| update(Some(&self.nu_in(ema_gz, training))))
            }
            _ => update(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PowerNormConfig;
    use candle::{DType, Device};

    const CPU: &Device = &Device::Cpu;

    fn state(config: PowerNormConfig) -> Result<Arc<State>> {
        let ones = Tensor::ones(2, DType::F32, CPU)?;
        let iters = Tensor::new(&[4i64], CPU)?;
        State::new(2, config, DType::F32, [&ones, &ones, &iters], None).map(Arc::new)
    }

    fn training(state: &Arc<State>, purpose: Purpose) -> Training {
        Training {
            state: state.clone(),
            purpose,
            loss_scale: LossScale::default(),
            ranks: None,
        }
    }

    fn env(training: Option<&Training>) -> StepEnv<'_> {
        StepEnv::new(training, None, 4)
    }

    fn call<'a>(xs: &'a Tensor, role: Role<'a>) -> Call<'a> {
        let settings = Settings {
            eps: 1e-5,
            ..Settings::of_rows(RowNorm::None)
        };
        Call {
            role,
            settings,
            ..Call::of_rows(&DeviceKind::Cpu, xs, RowNorm::None)
        }
    }

    #[test]
    fn an_evaluation_moves_nothing() -> Result<()> {
        let mut env = env(None);
        env.move_phi(&mut |_, _| panic!("an evaluation moves no ψ²"))?;
        assert!(!env.counted && env.nu().is_none());
        let mut variable = None;
        env.move_nu(&mut |nu| {
            variable = Some(nu.is_some());
            Ok(())
        })?;
        assert_eq!(variable, Some(false));
        Ok(())
    }

    #[test]
    fn a_training_step_moves_both() -> Result<()> {
        let config = PowerNormConfig {
            alpha_bwd: 0.75,
            ..Default::default()
        };
        let state = state(config)?;
        let training = training(&state, Purpose::Training);
        training.loss_scale.set(8.)?;
        let mut env = env(Some(&training));
        env.move_phi(&mut |phi, _| phi.set(&Tensor::new(&[2f32, 3.], CPU)?))?;
        assert!(env.counted);
        assert_eq!(state.steps()?, 5);
        assert_eq!(state.running_phi()?.to_vec1::<f32>()?, [2., 3.]);
        // A loss scale that is set during a backward is for the next one.
        training.loss_scale.set(2.)?;
        let nu = env.nu().unwrap();
        assert_eq!((nu.share, nu.loss_scale), (0.25, 8.));
        env.move_nu(&mut |nu| {
            let nu = nu.unwrap();
            assert_eq!((nu.share, nu.loss_scale), (0.25, 8.));
            nu.ema_gz.set(&Tensor::new(&[4f32, 8.], CPU)?)
        })?;
        assert_eq!(state.nu()?.to_vec1::<f32>()?, [1., 2.]);
        Ok(())
    }

    #[test]
    fn a_recalibration_leaves_nu_alone() -> Result<()> {
        let state = state(1e-5.into())?;
        let training = training(&state, Purpose::Recalibration(1));
        let mut env = env(Some(&training));
        env.move_phi(&mut |_, _| Ok(()))?;
        assert!(env.counted);
        assert_eq!(state.steps()?, 4);
        env.move_nu(&mut |nu| {
            assert!(nu.is_none());
            Ok(())
        })
    }

    #[test]
    fn an_update_that_fails_is_no_step() -> Result<()> {
        let state = state(1e-5.into())?;
        let training = training(&state, Purpose::Training);
        let mut env = env(Some(&training));
        assert!(
            env.move_phi(&mut |_, _| candle::bail!("no memory"))
                .is_err()
        );
        assert!(!env.counted);
        assert_eq!(state.steps()?, 4);
        Ok(())
    }

    #[test]
    fn sums_of_one_process_are_those_of_all() -> Result<()> {
        let sums = Tensor::new(&[1f64, 2.], CPU)?;
        let mut env = env(None);
        assert!(!env.has_ranks());
        assert_eq!(env.exchange(sums)?.to_vec1::<f64>()?, [1., 2.]);
        Ok(())
    }

    #[test]
    fn the_kind_of_a_pass() -> Result<()> {
        let config = PowerNormConfig {
            warmup_steps: 5,
            ..Default::default()
        };
        let xs = Tensor::ones((3, 2), DType::F32, CPU)?;
        // t is 4: the next step is the last of a warm-up of 5, and comes after one of 4.
        let over = PowerNormConfig {
            warmup_steps: 4,
            ..config
        };
        for (config, purpose, kind) in [
            (config, None, ForwardKind::Evaluation),
            (config, Some(Purpose::Training), ForwardKind::BatchStatistic),
            (over, Some(Purpose::Training), ForwardKind::RunningStatistic),
            (
                over,
                Some(Purpose::Recalibration(1)),
                ForwardKind::BatchStatistic,
            ),
        ] {
            let state = state(config)?;
            let role = match purpose {
                None => Role::Evaluation(&state),
                Some(purpose) => Role::Training(training(&state, purpose), None),
            };
            let (pass, inputs, t) = call(&xs, role).pass()?;
            assert_eq!((pass.kind, t), (kind, 4));
            assert!(inputs.phi.is_some() && !inputs.tracked);
        }
        // Group scaling alone has neither ψ² nor t.
        let (pass, inputs, t) = call(&xs, Role::Stateless).pass()?;
        assert_eq!((pass.kind, t), (ForwardKind::Evaluation, 0));
        assert!(inputs.phi.is_none());
        Ok(())
    }

    /// A layer may normalize its own ψ². A training step moves ψ² before it has read the rows for
    /// the last time, so it reads a copy.
    #[test]
    fn a_training_step_copies_rows_of_its_own_state() -> Result<()> {
        let state = state(1e-5.into())?;
        let (own, _) = state.begin(true)?;
        let rows = own.reshape((1, 2))?;
        let (pass, ..) = call(&rows, Role::Evaluation(&state)).pass()?;
        assert!(state.owns(&pass.x));
        let training = training(&state, Purpose::Training);
        let (pass, ..) = call(&rows, Role::Training(training, None)).pass()?;
        assert!(!state.owns(&pass.x));
        Ok(())
    }

    #[test]
    fn a_gradient_of_any_argument_is_tracked() -> Result<()> {
        let xs = Tensor::ones((3, 2), DType::F32, CPU)?;
        let bias = Var::zeros(2, DType::F32, CPU)?;
        let residual = Var::zeros((3, 2), DType::F32, CPU)?;
        let mut call = call(&xs, Role::Stateless);
        assert!(!call.pass()?.1.tracked);
        call.bias = Some(&bias);
        assert!(call.pass()?.1.tracked);
        call.bias = None;
        call.residual = Some(&residual);
        assert!(call.pass()?.1.tracked);
        Ok(())
    }

    /// An empty batch does not count.
    #[test]
    fn a_step_keeps_its_training_if_it_counted() -> Result<()> {
        let state = state(1e-5.into())?;
        for rows in [0, 3] {
            let xs = Tensor::ones((rows, 2), DType::F32, CPU)?;
            let training = training(&state, Purpose::Training);
            let (step, ..) = Step::forward(call(&xs, Role::Training(training, None)))?;
            assert_eq!(step.training.is_some(), rows > 0);
        }
        assert_eq!(state.steps()?, 5);
        Ok(())
    }
}
