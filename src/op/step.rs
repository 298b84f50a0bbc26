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

use super::probe;
use crate::config::PhiStep;
use crate::device::pass::Pass;
use crate::device::pick::DeviceKind;
use crate::device::{Announcement, Env, Evaluation, Gradients, Nu, Outputs, Saved};
use crate::loss_scale::LossScale;
use crate::mode::Purpose;
use crate::ranks::{Exchange, Member, Turn};
use crate::state::State;
use candle::{Result, Tensor, Var};
use std::sync::Arc;

/// A training forward: the state that it moves, and its turn among the ranks, if there are others.
pub(crate) struct Step<'a> {
    pub training: Training,
    pub turn: Option<Turn<'a>>,
}

/// The state that a training forward and its backward move.
#[derive(Clone)]
pub(crate) struct Training {
    pub state: Arc<State>,
    /// Training or recalibration.
    pub purpose: Purpose,
    pub loss_scale: LossScale,
    /// `None` if there is no other rank.
    pub ranks: Option<Member>,
    /// t before the step.
    pub step_count: usize,
}

/// Runs a training forward, which moves ψ² and t. What the backward needs is returned with the
/// outputs: the training only if the forward counted as a step.
pub(super) fn forward(
    device: &DeviceKind,
    mut pass: Pass,
    step: Step,
) -> Result<(Saved, Option<Training>, Outputs)> {
    let Step { training, turn } = step;
    probe::training_forward(&training.state, pass.has_exact_gradients())?;
    let mut env = StepEnv::new(&training, turn);
    let (record, outputs) = device.forward(&mut pass, &mut env)?;
    let counted = env.counted;
    drop(env);
    let saved = Saved::new(pass, record);
    Ok((saved, counted.then_some(training), outputs))
}

/// Runs a backward from `dy`, the gradient of the output. It moves ν if the forward counted as a
/// step.
pub(super) fn backward(
    saved: &Saved,
    training: Option<&Training>,
    dy: &Tensor,
) -> Result<Gradients> {
    let Some(training) = training else {
        return saved.backward(dy, &mut Evaluation);
    };
    // From here on a failure tells the other ranks.
    let turn = (training.ranks.as_ref()).map(|ranks| ranks.turn(Exchange::Backward));
    saved.backward(dy, &mut StepEnv::new(training, turn))
}

/// The [`Env`] of one training forward, or of its backward.
struct StepEnv<'a> {
    has_ranks: bool,
    /// The turn in the exchange of this call, until it is taken.
    turn: Option<Turn<'a>>,
    training: &'a Training,
    /// Read once, because another thread may set it meanwhile.
    loss_scale: f64,
    /// ψ² has moved.
    counted: bool,
}

impl<'a> StepEnv<'a> {
    fn new(training: &'a Training, turn: Option<Turn<'a>>) -> Self {
        Self {
            has_ranks: turn.is_some(),
            turn,
            training,
            loss_scale: training.loss_scale.get(),
            counted: false,
        }
    }

    /// ν, which the variable `ema_gz` keeps.
    fn nu_in<'v>(&self, ema_gz: &'v Var) -> Nu<'v> {
        Nu {
            ema_gz,
            share: 1. - self.training.state.config().alpha_bwd,
            loss_scale: self.loss_scale,
        }
    }
}

impl Env for StepEnv<'_> {
    fn has_ranks(&self) -> bool {
        self.has_ranks
    }

    fn announcement(&self) -> Option<Announcement> {
        let turn = self.turn.as_ref()?;
        Some(Announcement {
            numbers: turn.announced(self.training.step_count),
            ranks: turn.ranks(),
        })
    }

    fn exchange(&mut self, sums: Tensor) -> Result<Tensor> {
        match self.turn.take() {
            Some(turn) => turn.sum(&sums, self.training.step_count),
            None if self.has_ranks => unreachable!("a device exchanges sums once in a pass"),
            None => Ok(sums),
        }
    }

    fn move_phi(&mut self, update: &mut dyn FnMut(&Var, &PhiStep) -> Result<()>) -> Result<()> {
        let Training { state, purpose, .. } = self.training;
        state.update_phi(*purpose, |phi, step| update(phi, step))?;
        self.counted = true;
        Ok(())
    }

    fn nu(&self) -> Option<Nu<'_>> {
        Some(self.nu_in(self.training.state.nu_variable()))
    }

    fn move_nu(&mut self, update: &mut dyn FnMut(Option<&Nu>) -> Result<()>) -> Result<()> {
        let Training { state, purpose, .. } = self.training;
        match purpose {
            Purpose::Training => state.update_nu(|ema_gz| update(Some(&self.nu_in(ema_gz)))),
            // A recalibration leaves ν alone.
            Purpose::Recalibration(_) | Purpose::Evaluation => update(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ForwardKind, PowerNormConfig, Recipe};
    use crate::device::pass::Channels;
    use crate::ranks::{Communicator, Ranks};
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
            step_count: 4,
        }
    }

    fn env(training: &Training) -> StepEnv<'_> {
        StepEnv::new(training, None)
    }

    #[test]
    fn an_evaluation_moves_nothing() -> Result<()> {
        let mut env = Evaluation;
        assert!(!env.has_ranks() && env.announcement().is_none() && env.nu().is_none());
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
        let mut env = env(&training);
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
        let mut env = env(&training);
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
        let mut env = env(&training);
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
        let state = state(1e-5.into())?;
        let training = training(&state, Purpose::Training);
        let mut env = env(&training);
        assert!(!env.has_ranks());
        assert_eq!(env.exchange(sums)?.to_vec1::<f64>()?, [1., 2.]);
        Ok(())
    }

    /// Another rank that brings the same.
    struct Twin;

    impl Communicator for Twin {
        fn world_size(&self) -> usize {
            2
        }

        fn all_reduce_sum(&self, tensor: &Tensor) -> Result<Tensor> {
            tensor * 2.
        }
    }

    /// Before an exchange, which takes the turn.
    #[test]
    fn a_turn_is_announced() -> Result<()> {
        let state = state(1e-5.into())?;
        let training = training(&state, Purpose::Training);
        let member = Member::join(&Ranks::new(Twin), 2, &1e-5.into(), CPU.clone()).unwrap();
        let turn = || member.turn(Exchange::Forward);
        let mut env = StepEnv::new(&training, Some(turn()));
        let announcement = env.announcement().unwrap();
        assert_eq!(announcement.numbers, turn().announced(4));
        assert_eq!(announcement.ranks, 2);
        let sums = Tensor::new(&[1f64, 2., 3.], CPU)?;
        assert_eq!(env.exchange(sums)?.to_vec1::<f64>()?, [2., 4., 6.]);
        assert!(env.has_ranks() && env.announcement().is_none());
        Ok(())
    }

    /// An empty batch does not count.
    #[test]
    fn a_step_keeps_its_training_if_it_counted() -> Result<()> {
        let state = state(1e-5.into())?;
        for rows in [0, 3] {
            let xs = Tensor::ones((rows, 2), DType::F32, CPU)?;
            let channels = Channels {
                phi: state.running_phi()?,
                kind: ForwardKind::BatchStatistic,
                recipe: Recipe::Paper,
                eps: 1e-5,
                groups: None,
            };
            let pass = Pass::of_channels("test", &xs, None, channels)?;
            let training = training(&state, Purpose::Training);
            let turn = None;
            let (_, training, _) = forward(&DeviceKind::Cpu, pass, Step { training, turn })?;
            assert_eq!(training.is_some(), rows > 0);
        }
        assert_eq!(state.steps()?, 5);
        Ok(())
    }
}
