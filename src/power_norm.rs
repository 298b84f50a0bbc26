//! PowerNorm: the forward passes and the accessors.

use crate::check::is_computed;
use crate::config::{ForwardKind, PowerNormConfig, state_dtype};
use crate::device::pass::{Affine, Channels, Pass, RowNorm};
use crate::device::pick::{DeviceKind, Folded};
use crate::device::sums_dtype;
use crate::loss_scale::LossScale;
use crate::mode::{Mode, Purpose};
use crate::op;
use crate::op::step::{Step, Training};
use crate::ranks::{Exchange, Member, Ranks};
use crate::state::{State, same_device};
use candle::{DType, Module, Result, Tensor};
use candle_nn::ModuleT;
use std::fmt;
use std::sync::Arc;

/// The name of the layer in errors.
const LAYER: &str = "power_norm";

/// PowerNorm: divides each channel by its running root mean square.
///
/// It takes LayerNorm's place in a transformer. Build it with [`power_norm`](crate::power_norm), or
/// all layers of a model with a [`PowerNormBuilder`](crate::PowerNormBuilder), and give all of them
/// one [`Mode`], the switch between training and evaluation.
///
/// `Y = γ ⊙ X̃ / sqrt(ψ² + ε) + β` (Shen et al., "PowerNorm: Rethinking Batch Normalization in
/// Transformers", ICML 2020, Eq. 8 and 9). ψ² is the running mean of `X̃²` over tokens. `X̃` is the
/// input after group scaling, which divides each row by the root mean square of its groups
/// ([`PowerNormConfig::group_scaling`]). In evaluation ψ² is fixed, so with the default group
/// scaling the layer is an RMSNorm with a bias. [`Recipe`](crate::Recipe) has the equations of a
/// training step.
///
/// **`xs.apply_t(&norm, false)` trains** if the `Mode` is in training, because candle's `ModuleT`
/// for a `Module` ignores `train`. Call [`forward_t`](Self::forward_t), or pass generic code a
/// [`PowerNormT`].
///
/// # Shapes
///
/// Input and output are `[.., size]`, of any rank from 1 and any strides. They may be empty. All
/// dimensions but the last are rows (tokens), and statistics run over rows.
///
/// # Dtypes
///
/// Inputs are `F32`, `F64`, `F16` or `BF16`, and outputs have the input's dtype. Weight and bias
/// have the input's dtype or `F32`. Sums are taken in `F32` (`F64` for `F64` inputs), and results
/// are rounded once on store.
///
/// # State
///
/// A training forward with at least one row that is not padding updates ψ² and counts a step,
/// whether or not a backward follows. Its backward updates ν, each time that it runs. An evaluation
/// changes nothing, and neither does a call that is rejected.
///
/// A layer on frozen tensors, such as the base model under adapters, evaluates in training too,
/// because no `VarMap` would save what a step moves.
/// [`with_unsaved_statistics`](Self::with_unsaved_statistics) trains it nevertheless.
///
/// To use a layer in several places, clone it: clones share parameters, state, mode, loss scale and
/// ranks. [Training](crate::guide::training) has more on steps and on clones.
///
/// # Gradients
///
/// The gradients of weight and bias are always exact. The input's gradient is exact in evaluation,
/// and under [`Recipe::Paper`](crate::Recipe::Paper) also during the warm-up and with
/// [`Statistics::Batch`](crate::Statistics::Batch). With PN after the warm-up it is the paper's
/// approximation, which replaces the batch mean Λ with its running estimate ν. ν has the scale of
/// the loss, so see [`LossScale`] if that is scaled.
///
/// The gradients cannot be differentiated again: where candle keeps their graph
/// (`CANDLE_GRAD_DO_NOT_DETACH=1`), a backward through one of them is an error.
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_powernorm::power_norm;
///
/// # fn main() -> candle::Result<()> {
/// let varmap = VarMap::new();
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let norm = power_norm(4, 1e-5, vb.pp("norm"))?;
///
/// let xs = Tensor::randn(0f32, 1., (2, 3, 4), &Device::Cpu)?;
/// let ys = norm.forward(&xs)?; // a training step: ψ² moves
/// assert_eq!(ys.dims(), &[2, 3, 4]);
/// assert_eq!(norm.steps()?, 1);
///
/// let keep = Tensor::new(&[[1u8, 1, 1], [1, 1, 0]], &Device::Cpu)?; // the last token is padding
/// norm.forward_masked(&xs, &keep)?;
/// norm.forward_residual(&ys, &xs, &keep)?; // the normalized sum, and the sum
/// assert_eq!(norm.steps()?, 3);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PowerNorm {
    affine: Option<Affine>,
    state: Arc<State>,
    /// γ/D of the last evaluation on a CPU.
    folded: Arc<Folded>,
    device: DeviceKind,
    mode: Mode,
    /// Built on tensors that are no variables, so that a training forward evaluates: no `VarMap`
    /// would save what it moves.
    frozen: bool,
    loss_scale: LossScale,
    /// The layer's place among its ranks; `None` in a single process.
    ranks: Option<Member>,
}

impl fmt::Debug for PowerNorm {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut layer = f.debug_struct("PowerNorm");
        layer.field("size", &self.state.size());
        layer.field("config", self.config());
        match self.steps() {
            Ok(steps) => layer.field("steps", &steps),
            Err(error) => layer.field("steps", &error.to_string()),
        };
        layer.field("frozen", &self.frozen);
        layer.finish_non_exhaustive()
    }
}

impl Module for PowerNorm {
    /// Normalizes `xs`, `[.., size]`, in training or in evaluation, following the layer's [`Mode`].
    ///
    /// # Errors
    ///
    /// As in [`PowerNorm::forward_t`].
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.run(xs, None, None, self.mode.purpose(), op::normalize)
    }
}

impl PowerNorm {
    /// A layer of this γ and β, which starts in training if `trainable`, and is frozen otherwise.
    pub(crate) fn from_parts(
        weight: Option<Tensor>,
        bias: Option<Tensor>,
        state: State,
        trainable: bool,
    ) -> Result<Self> {
        for (name, parameter) in [("weight", &weight), ("bias", &bias)] {
            if let Some(parameter) = parameter {
                same_device(name, parameter, state.device())?;
                state_dtype(LAYER, name, parameter.dtype())?;
                if state.owns(parameter) {
                    candle::bail!(
                        "power_norm: expected {name} apart from the statistics, got their \
                         variable: a training step would overwrite it, so give it one of its own"
                    )
                }
            }
        }
        if let (Some(weight), Some(bias)) = (&weight, &bias) {
            let (weight, got) = (weight.dtype(), bias.dtype());
            // No input would fit both.
            if got != weight && got != DType::F32 && weight != DType::F32 {
                candle::bail!(
                    "power_norm: expected bias of dtype {weight:?} (as the weight) or F32, \
                     got {got:?}: convert one of them"
                )
            }
        }
        Ok(Self {
            affine: weight.map(|weight| Affine::new(weight, bias)),
            device: DeviceKind::of(state.device())?,
            state: Arc::new(state),
            folded: Arc::default(),
            mode: match trainable {
                true => Mode::train(),
                false => Mode::eval(),
            },
            frozen: !trainable,
            loss_scale: LossScale::default(),
            ranks: None,
        })
    }

    /// Normalizes `xs`, `[.., size]`, in training if `train`, else in evaluation. This method
    /// ignores the layer's [`Mode`].
    ///
    /// A layer on frozen tensors evaluates even if `train` is true, because generic trainers pass
    /// `true` to every layer of a model, the frozen ones included.
    /// [`with_unsaved_statistics`](Self::with_unsaved_statistics) trains such a layer.
    ///
    /// `Tensor::apply_t` and generic code that takes a `ModuleT` call `ModuleT::forward_t` instead,
    /// which ignores `train`. Wrap the layer in [`PowerNormT`] there.
    ///
    /// # Errors
    ///
    /// - The input is a scalar, its last dimension is not `size`, or its dtype or device does not
    ///   fit.
    /// - A loaded checkpoint has a negative step count, or the statistics of a layer with another
    ///   group scaling.
    ///
    /// A call that is rejected leaves the state as it was.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{DType, Device, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use candle_powernorm::power_norm;
    ///
    /// # fn main() -> candle::Result<()> {
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let norm = power_norm(4, 1e-5, vb.pp("norm"))?;
    /// let xs = Tensor::randn(0f32, 1., (8, 4), &Device::Cpu)?;
    /// norm.forward_t(&xs, true)?;
    /// norm.forward_t(&xs, false)?;
    /// assert_eq!(norm.steps()?, 1); // only the first call was a training step
    /// # Ok(()) }
    /// ```
    pub fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.run(xs, None, None, Purpose::of(train), op::normalize)
    }

    /// Normalizes `xs`, `[.., size]`, and leaves padding out of the statistics. The layer's
    /// [`Mode`] decides between training and evaluation.
    ///
    /// `keep` has the shape of `xs` without its last dimension. It is `U8`, `U32` or `I64`: 0 marks
    /// padding, and any other number a real token. `None` keeps every row. **Some models' masks are
    /// the inverse**: [inputs](crate::guide::padding) has a table and an example.
    ///
    /// A padded row's output is computed. The row enters no statistic and no parameter gradient,
    /// and its input gradient is 0. Under [`Recipe::Fairseq`](crate::Recipe::Fairseq) the mask
    /// changes only ψ_B².
    ///
    /// A batch in which every row is padding moves neither ψ² nor ν. On a CPU it is no step either.
    /// Elsewhere it counts as one, because the host does not wait to see what the mask contains.
    ///
    /// # Errors
    ///
    /// As in [`forward_t`](Self::forward_t), or `keep` has another dtype, shape or device.
    pub fn forward_masked<'a>(
        &self,
        xs: &Tensor,
        keep: impl Into<Option<&'a Tensor>>,
    ) -> Result<Tensor> {
        self.run(xs, None, keep.into(), self.mode.purpose(), op::normalize)
    }

    /// Adds `residual` to `xs`, and returns the normalized sum and the sum. In a pre-norm
    /// transformer the next block reads the normalized sum, and the sum is the residual stream.
    ///
    /// Both inputs and both outputs are `[.., size]`, of one shape and dtype. `keep` is the mask of
    /// [`forward_masked`](Self::forward_masked), and `None` keeps every row. The sum of a padded
    /// row is computed too. The layer's [`Mode`] decides between training and evaluation.
    ///
    /// [Inputs](crate::guide::padding#residuals) has an example, and the time that this saves.
    ///
    /// # Errors
    ///
    /// As in [`forward_masked`](Self::forward_masked), or `residual` has another dtype, shape or
    /// device.
    pub fn forward_residual<'a>(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        keep: impl Into<Option<&'a Tensor>>,
    ) -> Result<(Tensor, Tensor)> {
        let (residual, purpose) = (Some(residual), self.mode.purpose());
        self.run(xs, residual, keep.into(), purpose, op::add_and_normalize)
    }

    /// The same layer, which follows `mode` from now on. Give one `Mode` to all layers of a model.
    ///
    /// A layer on frozen tensors evaluates while `mode` is in training, and follows
    /// [`recalibrate_scope`](Mode::recalibrate_scope).
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{DType, Device, Module, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use candle_powernorm::{power_norm, Mode};
    ///
    /// # fn main() -> candle::Result<()> {
    /// let mode = Mode::train();
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let norm = power_norm(4, 1e-5, vb.pp("norm"))?.with_mode(&mode);
    /// let xs = Tensor::randn(0f32, 1., (8, 4), &Device::Cpu)?;
    /// norm.forward(&xs)?; // a training step
    /// {
    ///     let _guard = mode.eval_scope();
    ///     norm.forward(&xs)?; // an evaluation
    /// }
    /// assert_eq!(norm.steps()?, 1);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn with_mode(mut self, mode: &Mode) -> Self {
        self.mode = mode.clone();
        self
    }

    /// The same layer, which trains its statistics even if it was built on frozen tensors.
    ///
    /// Without this call a layer on frozen tensors evaluates, whatever its [`Mode`] or `train` is.
    /// With it, the layer follows them as any other layer does, and begins with the statistics of
    /// the tensors that it was built on. The call changes nothing in a layer on variables, and it
    /// does not reach clones that were made before.
    ///
    /// # State
    ///
    /// The statistics of such a layer are a copy that no `VarMap` saves, so a model that is saved
    /// and loaded again begins with the old ones, and its outputs differ. Save
    /// [`running_phi`](Self::running_phi) yourself, and build the layer from it. ν and the step
    /// count start again in any case.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{DType, Device, Module, Tensor};
    /// use candle_powernorm::{Mode, PowerNorm};
    ///
    /// # fn main() -> candle::Result<()> {
    /// let ones = Tensor::ones(4, DType::F32, &Device::Cpu)?;
    /// let xs = Tensor::full(2f32, (8, 4), &Device::Cpu)?;
    /// let norm = PowerNorm::new(ones.clone(), None, ones, 1e-5)?.with_mode(&Mode::train());
    /// norm.forward(&xs)?;
    /// assert_eq!(norm.steps()?, 0); // an evaluation
    ///
    /// let norm = norm.with_unsaved_statistics();
    /// norm.forward(&xs)?;
    /// assert_eq!(norm.steps()?, 1);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn with_unsaved_statistics(mut self) -> Self {
        self.frozen = false;
        self
    }

    /// The same layer, for a loss that is multiplied by the number in `loss_scale`. Without this
    /// call the number is 1.
    #[must_use]
    pub fn with_loss_scale(mut self, loss_scale: &LossScale) -> Self {
        self.loss_scale = loss_scale.clone();
        self
    }

    /// The same layer, with statistics over the rows of all ranks.
    ///
    /// N ranks with B/N rows each then have the state and the gradients of one rank with B rows.
    /// All ranks make the same training forwards and backwards in the same order. The ranks' losses
    /// add up to the loss of the whole batch. Each rank gets its part of the parameters' gradients,
    /// and the caller sums them. [Distributed training](crate::guide::ranks) has the other rules,
    /// and the consequences of a rank that fails.
    ///
    /// # Later errors
    ///
    /// Before a layer's first sum, the ranks are compared. If they differ, every rank gets an error
    /// with its own values. On a CPU that holds for every later sum too. On a GPU, ranks that later
    /// make different calls hang, or ψ² or ν becomes NaN on all of them, and so does every later
    /// output or gradient that depends on them.
    #[must_use]
    pub fn with_ranks(mut self, ranks: &Ranks) -> Self {
        let device = self.device.sums_device(self.state.device());
        self.ranks = Member::join(ranks, self.size(), self.config(), device);
        self
    }

    /// The switch that the layer follows in every forward except [`forward_t`](Self::forward_t).
    pub fn mode(&self) -> &Mode {
        &self.mode
    }

    /// γ, `[size]`; `None` without `affine`.
    pub fn weight(&self) -> Option<&Tensor> {
        self.affine.as_ref().map(|affine| &affine.weight)
    }

    /// β, `[size]`; `None` without `affine` or `bias`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.affine.as_ref()?.bias.as_ref()
    }

    /// A copy of ψ², the running mean square of each channel, `[size]`. The method is named like
    /// its tensor in a checkpoint, and that name is the released code's.
    ///
    /// # Errors
    ///
    /// The device fails, for example because it is out of memory.
    pub fn running_phi(&self) -> Result<Tensor> {
        self.state.running_phi()
    }

    /// A copy of ν, the running correction of each channel's gradient, `[size]`: (1−α_b) times the
    /// checkpoint's `ema_gz`.
    ///
    /// # Errors
    ///
    /// The device fails, for example because it is out of memory.
    pub fn nu(&self) -> Result<Tensor> {
        self.state.nu()
    }

    /// t, the number of training steps so far.
    ///
    /// A batch without rows is no step. A batch in which every row is padding is no step on a CPU,
    /// and counts as one on other devices ([`forward_masked`](Self::forward_masked)). There, every
    /// training forward over ranks counts.
    ///
    /// # Errors
    ///
    /// The count is negative, which only a loaded checkpoint can cause.
    pub fn steps(&self) -> Result<usize> {
        self.state.steps()
    }

    /// Starts the statistics over, with a new warm-up: ψ² is 1, and ν and the step count are 0. The
    /// record of the group scaling is cleared, so that a layer with another one can use the
    /// weights.
    ///
    /// Over ranks, reset on every rank at the same place in the order of their calls.
    ///
    /// # Errors
    ///
    /// The device fails, for example because it is out of memory.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{DType, Device, Module, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use candle_powernorm::power_norm;
    ///
    /// # fn main() -> candle::Result<()> {
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let norm = power_norm(4, 1e-5, vb.pp("norm"))?;
    /// norm.forward(&Tensor::randn(0f32, 1., (8, 4), &Device::Cpu)?)?;
    /// norm.reset_running_stats()?;
    /// assert_eq!(norm.steps()?, 0);
    /// assert_eq!(norm.running_phi()?.to_vec1::<f32>()?, [1.; 4]);
    /// # Ok(()) }
    /// ```
    pub fn reset_running_stats(&self) -> Result<()> {
        self.state.reset()
    }

    /// The number of channels.
    pub fn size(&self) -> usize {
        self.state.size()
    }

    /// The configuration that the layer was built with.
    pub fn config(&self) -> &PowerNormConfig {
        self.state.config()
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    /// The purpose of a forward whose mode or `train` asks for `asked`. Every forward passes here.
    pub(crate) fn purpose(&self, asked: Purpose) -> Purpose {
        match asked {
            Purpose::Training if self.frozen => Purpose::Evaluation,
            // Only `recalibrate_scope` asks for a recalibration, so no generic trainer starts one.
            Purpose::Training | Purpose::Evaluation | Purpose::Recalibration(_) => asked,
        }
    }

    /// γ/D and β, with which an evaluation is a normalization of rows by themselves. `None` if a
    /// gradient is tracked, which would be that of γ/D, or if the device or the dtype does not fit.
    fn folded_affine(&self, xs: &Tensor, residual: Option<&Tensor>) -> Result<Option<Arc<Affine>>> {
        let affine = self.affine.as_ref();
        let is_tracked = xs.track_op()
            || residual.is_some_and(Tensor::track_op)
            || affine.is_some_and(Affine::is_tracked);
        let weight = affine.map(|affine| &affine.weight);
        let fits = weight.is_none_or(|weight| {
            weight.is_contiguous() && [xs.dtype(), DType::F32].contains(&weight.dtype())
        });
        if is_tracked || !fits || !self.device.folds() || !is_computed(xs.dtype()) {
            return Ok(None);
        }
        let (phi, dtype) = (self.state.evaluated()?, sums_dtype(xs.dtype()));
        (self.folded.affine(phi, affine, self.config().eps, dtype)).map(Some)
    }

    /// Calls `run` with the checked pass of a forward and, unless it is an evaluation, its step. The
    /// step has the turn among the ranks: a turn that is dropped tells the other ranks that this call
    /// failed.
    fn run<R>(
        &self,
        xs: &Tensor,
        residual: Option<&Tensor>,
        keep: Option<&Tensor>,
        asked: Purpose,
        run: impl FnOnce(Pass, Option<Step>) -> Result<R>,
    ) -> Result<R> {
        let (purpose, config) = (self.purpose(asked), self.config());
        let exchange = match purpose {
            Purpose::Evaluation => None,
            Purpose::Training => Some(Exchange::Forward),
            Purpose::Recalibration(_) => Some(Exchange::Recalibration),
        };
        let trains = exchange.is_some();
        // Before the checks: if one fails, dropping the turn tells the other ranks.
        let turn = (self.ranks.as_ref().zip(exchange)).map(|(ranks, of)| ranks.turn(of));

        if purpose == Purpose::Evaluation
            && keep.is_none()
            && let Some(affine) = self.folded_affine(xs, residual)?
        {
            let norm = RowNorm::of_groups(config.group_scaling, config.eps);
            let mut pass = Pass::of_rows(LAYER, xs, norm, Some(&affine))?;
            if let Some(residual) = residual {
                pass = pass.with_residual(residual)?;
            }
            return run(pass.apart_from(self.state.storages()), None);
        }
        let in_place = (self.device).reads_phi_in_place(xs.device(), self.state.device());
        let (phi, step_count) = self.state.begin(in_place)?;
        let channels = Channels {
            phi,
            kind: match purpose {
                Purpose::Evaluation => ForwardKind::Evaluation,
                Purpose::Training => config.kind_at(step_count + 1),
                Purpose::Recalibration(_) => ForwardKind::BatchStatistic,
            },
            recipe: config.recipe,
            eps: config.eps,
            groups: config.group_scaling,
        };
        let mut pass = Pass::of_channels(LAYER, xs, self.affine.as_ref(), channels)?;
        if let Some(residual) = residual {
            pass = pass.with_residual(residual)?;
        }
        if let Some(keep) = keep {
            check_rank(keep, pass.x())?;
            pass = pass.with_keep(keep)?;
        }

        let step = trains.then(|| Step {
            training: Training {
                state: self.state.clone(),
                purpose,
                loss_scale: self.loss_scale.clone(),
                ranks: self.ranks.clone(),
                step_count,
            },
            turn,
        });
        run(pass.apart_from(self.state.storages()), step)
    }
}

/// Rejects a mask that differs from the rows' shape only by more dimensions of 1, as masks for an
/// attention do. [`Pass::with_keep`] rejects every other shape.
fn check_rank(keep: &Tensor, xs: &Tensor) -> Result<()> {
    let rows = &xs.dims()[..xs.rank() - 1];
    let without_ones = |dims: &[usize]| -> Vec<usize> {
        let dims = dims.iter().copied();
        dims.filter(|&dim| dim != 1).collect()
    };
    if keep.rank() > rows.len() && without_ones(keep.dims()) == without_ones(rows) {
        candle::bail!(
            "{LAYER}: expected keep of shape {rows:?} (xs without its last dimension), got {:?}: \
             remove its dimensions of 1 by `squeeze`",
            keep.shape()
        )
    }
    Ok(())
}

/// A [`PowerNorm`] for generic code that takes a `ModuleT`: it honours `train` and ignores the
/// layer's [`Mode`]. A layer on frozen tensors evaluates whatever `train` is, as in
/// [`PowerNorm::forward_t`].
///
/// The layer cannot honour `train` itself, because candle implements `ModuleT` for every `Module`,
/// and that implementation ignores `train`.
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_powernorm::{power_norm, PowerNormT};
///
/// # fn main() -> candle::Result<()> {
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let layer = PowerNormT(power_norm(4, 1e-5, vb.pp("norm"))?);
/// let xs = Tensor::randn(0f32, 1., (8, 4), &Device::Cpu)?;
/// xs.apply_t(&layer, false)?; // an evaluation, although the layer's `Mode` is in training
/// assert_eq!(layer.0.steps()?, 0);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PowerNormT(
    /// The layer.
    pub PowerNorm,
);

impl ModuleT for PowerNormT {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.0.forward_t(xs, train)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::Device;

    const CPU: &Device = &Device::Cpu;

    /// A layer of two channels, on variables or frozen.
    fn layer(trainable: bool) -> Result<PowerNorm> {
        layer_of(1e-5.into(), trainable)
    }

    fn layer_of(config: PowerNormConfig, trainable: bool) -> Result<PowerNorm> {
        let ones = Tensor::ones(2, DType::F32, CPU)?;
        let iters = Tensor::new(&[4i64], CPU)?;
        let tensors = [&ones, &ones, &iters];
        let state = State::new(2, config, DType::F32, tensors, None)?;
        PowerNorm::from_parts(Some(ones), None, state, trainable)
    }

    #[test]
    fn a_frozen_layer_evaluates_unless_it_recalibrates() -> Result<()> {
        use Purpose::{Evaluation, Recalibration, Training};
        let recalibration = Recalibration(3);
        for (layer, of_training) in [
            (layer(true)?, Training),
            (layer(false)?, Evaluation),
            (layer(false)?.with_unsaved_statistics(), Training),
        ] {
            assert_eq!(layer.purpose(Training), of_training);
            assert_eq!(layer.purpose(Evaluation), Evaluation);
            assert_eq!(layer.purpose(recalibration), recalibration);
        }
        Ok(())
    }

    /// The training of a forward, and what `get` gets of its pass.
    fn of_pass<R>(
        layer: &PowerNorm,
        xs: &Tensor,
        purpose: Purpose,
        get: impl FnOnce(Pass) -> R,
    ) -> Result<(R, Option<Training>)> {
        layer.run(xs, None, None, purpose, |pass, step| {
            assert!(step.as_ref().is_none_or(|step| step.turn.is_none()));
            Ok((get(pass), step.map(|step| step.training)))
        })
    }

    #[test]
    fn a_step_has_the_layers_state() -> Result<()> {
        let layer = layer(true)?;
        let xs = Tensor::ones((3, 2), DType::F32, CPU)?;
        let (_, training) = of_pass(&layer, &xs, Purpose::Training, |_| ())?;
        let training = training.unwrap();
        assert!(Arc::ptr_eq(&training.state, &layer.state));
        assert_eq!(training.step_count, 4);
        let (_, training) = of_pass(&layer, &xs, Purpose::Evaluation, |_| ())?;
        assert!(training.is_none());
        Ok(())
    }

    /// t is 4: the next step is the last of a warm-up of 5, and comes after one of 4.
    #[test]
    fn the_kind_of_a_forward() -> Result<()> {
        use ForwardKind::{BatchStatistic, Evaluation, RunningStatistic};
        let xs = Tensor::ones((3, 2), DType::F32, CPU)?;
        for (warmup_steps, purpose, expected) in [
            (5, Purpose::Evaluation, Evaluation),
            (5, Purpose::Training, BatchStatistic),
            (4, Purpose::Training, RunningStatistic),
            (4, Purpose::Recalibration(1), BatchStatistic),
        ] {
            let config = PowerNormConfig {
                warmup_steps,
                ..Default::default()
            };
            let layer = layer_of(config, true)?;
            let (kind, _) = of_pass(&layer, &xs, purpose, |pass| pass.kind())?;
            assert_eq!(kind, expected, "{purpose:?}");
        }
        Ok(())
    }

    /// A layer may normalize its own ψ², of which it reads a copy: rayon may start the layer again
    /// while rows are locked, and a step waits for ψ².
    #[test]
    fn rows_of_the_layers_own_state_are_copied() -> Result<()> {
        let layer = layer(true)?;
        let (own, _) = layer.state.begin(true)?;
        let rows = own.reshape((1, 2))?;
        for purpose in [Purpose::Evaluation, Purpose::Training] {
            let (owns, _) = of_pass(&layer, &rows, purpose, |mut pass| -> Result<_> {
                pass.lay_out(|_| Ok(None))?;
                Ok(layer.state.owns(pass.x()))
            })?;
            assert!(!owns?, "{purpose:?}");
        }
        Ok(())
    }

    /// Weight and bias may differ in dtype only if an input fits both.
    #[test]
    fn dtypes_of_parameters() -> Result<()> {
        use DType::{BF16, F16, F32, F64, U8};
        let layer = |weight: DType, bias: DType| {
            let ones = Tensor::ones(2, F32, CPU)?;
            let iters = Tensor::new(&[0i64], CPU)?;
            let state = State::new(2, 1e-5.into(), F32, [&ones, &ones, &iters], None)?;
            let [weight, bias] = [weight, bias].map(|dtype| ones.to_dtype(dtype));
            PowerNorm::from_parts(Some(weight?), Some(bias?), state, true)
        };
        for (weight, bias, fits) in [
            (F32, F32, true),
            (F32, BF16, true),
            (F64, F32, true),
            (F16, F16, true),
            (F16, BF16, false),
            (F64, BF16, false),
            (F32, U8, false),
        ] {
            assert_eq!(layer(weight, bias).is_ok(), fits, "{weight:?}, {bias:?}");
        }
        Ok(())
    }
}
