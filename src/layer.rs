//! The layer: construction, the forward passes, the accessors.

use crate::config::PowerNormConfig;
use crate::device::pick::{Arguments, DeviceKind};
use crate::error::Error;
use crate::loss_scale::LossScale;
use crate::mode::{Mode, Purpose};
use crate::op;
use crate::op::residual::power_norm_residual;
use crate::op::step::{Call, Training};
use crate::ranks::{Exchange, Member, Ranks};
use crate::state::{same_device, State};
use candle::{DType, Device, Module, Result, Shape, Tensor};
use candle_nn::{Init, ModuleT, VarBuilder};
use std::fmt;
use std::sync::Arc;

/// Builds a [`PowerNorm`] layer over `size` channels from the tensors of `vb`.
///
/// The call `layer_norm(512, 1e-5, vb.pp("norm"))` becomes `power_norm(512, 1e-5, vb.pp("norm"))`.
/// [`PowerNorm::new`] builds a layer from tensors.
///
/// # Tensors
///
/// | name | shape | dtype | fresh value |
/// |---|---|---|---|
/// | `weight` or `gamma` (γ) | `[size]` | the builder's | 1 |
/// | `bias` or `beta` (β) | `[size]` | the builder's | 0 |
/// | `running_phi` (ψ²) | `[size]` or `[1, size, 1, 1]` | `F32` (`F64` for an `F64` builder) | 1 |
/// | `ema_gz` (ν/(1−α_b)) | `[size]` or `[1, size, 1, 1]` | as `running_phi` | 0 |
/// | `iters` (t) | `[1]` | `I64`, on the CPU | 0 |
/// | `groups` (G of the group scaling, −1 without it) | `[1]` | `I64`, on the CPU | 0 |
///
/// As in candle's LayerNorm, `gamma` and `beta` are read if the builder has no `weight` and `bias`.
/// With `affine: false` there is neither weight nor bias. The statistics are in the `VarMap`,
/// so they are saved and loaded with it. No gradient reaches them, so no optimizer moves them.
///
/// The first step of a training or recalibration writes `groups`, and a layer with another group
/// scaling refuses the statistics from then on. A frozen builder may lack it. A `VarMap` whose
/// statistics have PyTorch's shape, `[1, size, 1, 1]`, does not get it.
///
/// # State
///
/// A layer built on trainable variables (a `VarMap`) starts in training. A layer built on frozen
/// tensors (a safetensors `VarBuilder`) starts in evaluation, and its statistics are a copy.
/// Variables stay variables unless the builder converts or moves them. To freeze them, build from their detached tensors with
/// `VarBuilder::from_tensors`.
///
/// # Errors
///
/// - A configuration is out of range.
/// - The builder's dtype is not a float that the layer computes in.
/// - A tensor is missing, or has another shape or dtype.
/// - A tensor is on another device. `iters` and `groups` must be on the CPU, and the others
///   together.
/// - Some tensors of the state are variables, and some are not. A builder copies a variable if it
///   converts or moves it. candle's `rename` does so to `iters` on a GPU.
/// - The statistics are from a layer with another group scaling.
/// - A number in a frozen `running_phi` on a CPU is negative or not finite.
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Result};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_powernorm::{power_norm, Mode, PowerNormConfig};
///
/// # fn main() -> Result<()> {
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// // Four groups, as for four heads, and the learning rate's warm-up.
/// let config = PowerNormConfig { group_scaling: Some(4), warmup_steps: 4000, ..1e-6.into() };
/// let mode = Mode::train(); // one for all layers of a model
/// let first = power_norm(512, config, vb.pp("first"))?.with_mode(&mode);
/// let last = power_norm(512, config, vb.pp("last"))?.with_mode(&mode);
/// mode.set_training(false);
/// assert!(!first.mode().is_training() && !last.mode().is_training());
/// # Ok(()) }
/// ```
pub fn power_norm<C: Into<PowerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder,
) -> Result<PowerNorm> {
    let config = config.into();
    let dtype = state_dtype("a builder", vb.dtype())?;
    config.validate(size, dtype)?;
    let affine = match config.affine {
        true => Some((
            parameter(&vb, size, ["weight", "gamma"], 1.)?,
            parameter(&vb, size, ["bias", "beta"], 0.)?,
        )),
        false => None,
    };
    let (state, trainable) = State::from_builder(size, config, dtype, vb)?;
    PowerNorm::from_parts(affine, state, trainable)
}

/// γ or β, by the first of `names` that the builder has. Fresh ones get the first name.
fn parameter(vb: &VarBuilder, size: usize, names: [&str; 2], fresh: f64) -> Result<Tensor> {
    let found = names.into_iter().find(|name| vb.contains_tensor(name));
    vb.get_with_hints(size, found.unwrap_or(names[0]), Init::Const(fresh))
}

/// Returns the dtype of a layer's statistics. The layer is built from `name`, whose dtype is
/// `dtype`. Refuses a dtype that the layer does not compute in.
fn state_dtype(name: &'static str, dtype: DType) -> Result<DType> {
    match dtype {
        DType::F64 => Ok(DType::F64),
        DType::F32 | DType::F16 | DType::BF16 => Ok(DType::F32),
        got => Err(Error::LayerDType { name, got }.into()),
    }
}

/// PowerNorm: divides each channel by a running quadratic mean of its past.
///
/// `Y = γ ⊙ X̃ / sqrt(ψ² + ε) + β` (Shen et al., "PowerNorm: Rethinking Batch Normalization in
/// Transformers", ICML 2020, Eq. 8 and 9). ψ² is the running mean of `X̃²` over tokens. `X̃` is the
/// input after the group scaling, which divides each row by the root mean square of its groups
/// ([`PowerNormConfig::group_scaling`]). Without group scaling `X̃` is the input itself.
/// [`Recipe`](crate::Recipe) has the equations of a training step.
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
/// - A training forward updates ψ² and counts a step, whether or not a backward follows. A layer
///   that a model uses twice takes two steps.
/// - A backward through a training forward updates ν. A second `backward()` on the same graph
///   updates ν again. A backward uses the current ν and weight, and the statistics of its forward.
/// - A training forward without rows, or with every row masked, is an evaluation and updates
///   nothing. On an NVIDIA GPU the host does not know the mask, so a fully masked batch still
///   counts as a step ([what follows](crate::guide::gpu)).
/// - An evaluation changes nothing, and neither does a call that fails.
/// - Clones share parameters, state, mode, loss scale and ranks. They may be used from several
///   threads: a lock makes each update whole, and no forward waits while another forward computes
///   its rows. Each forward normalizes by the ψ² and `t` from when it began. On a GPU, candle gives
///   each thread its own stream, so synchronize the device between threads.
///
/// Share a layer by cloning it. Two layers built on one path of a `VarMap` share their variables
/// but not the lock.
///
/// ν has the units of the gradient, so it carries the scale of the loss. If mixed-precision
/// training changes that scale, give the layer a [`LossScale`].
///
/// # Gradients
///
/// The gradients of weight and bias are exact in every mode. The input's gradient is exact in
/// evaluation. Under [`Recipe::Paper`](crate::Recipe::Paper) it is also exact in training during
/// the warm-up, and with [`Statistics::Batch`](crate::Statistics::Batch). With PN after the warm-up
/// it is the paper's approximation, which replaces the batch mean Λ by its running estimate ν.
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
/// norm.mode().set_training(false);
/// norm.forward(&xs)?; // an evaluation: nothing moves
/// assert_eq!(norm.steps()?, 1);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PowerNorm {
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    state: Arc<State>,
    device: DeviceKind,
    mode: Mode,
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
        layer.finish_non_exhaustive()
    }
}

impl Module for PowerNorm {
    /// Normalizes `xs`, `[.., size]`. The layer's [`Mode`] says whether this is training or
    /// evaluation. It fails where [`PowerNorm::forward_t`] does.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.run(xs, None, self.mode.purpose())
    }
}

impl PowerNorm {
    /// Builds a layer from these tensors, as [`LayerNorm::new`](candle_nn::LayerNorm::new) does.
    ///
    /// `running_phi` is ψ². For a trained layer, take it from the checkpoint. For a fresh layer,
    /// pass `Tensor::ones`. ν and the step count start at 0, so training starts with the
    /// configuration's warm-up. Under `Recipe::Paper` the first step of a warm-up replaces
    /// `running_phi`.
    ///
    /// The layer starts in training if `weight` is a variable, else in evaluation. Training updates
    /// `running_phi` in place if it is a variable, else a copy.
    ///
    /// # Shapes
    ///
    /// All three are `[size]`.
    ///
    /// # Dtypes
    ///
    /// `weight` and `bias` have the dtype of the inputs or `F32`. `running_phi` is `F32`, or `F64`
    /// if `weight` is.
    ///
    /// # State
    ///
    /// ν and the step count are in no `VarMap`, so they are not saved. To resume training from a
    /// checkpoint, build the layer with [`power_norm`].
    ///
    /// # Errors
    ///
    /// A configuration is out of range or has `affine: false`. A tensor has another shape, dtype or
    /// device. A number in `running_phi` is negative or not finite; on a GPU the host waits for
    /// them.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{Device, Module, Tensor};
    /// use candle_powernorm::PowerNorm;
    ///
    /// # fn main() -> candle::Result<()> {
    /// let [weight, bias, running_phi] = [[2f32, 2.], [0., 1.], [4., 9.]];
    /// let tensor = |values: [f32; 2]| Tensor::new(&values, &Device::Cpu);
    /// let config = candle_powernorm::PowerNormConfig { group_scaling: None, ..1e-12.into() };
    /// let norm = PowerNorm::new(tensor(weight)?, tensor(bias)?, tensor(running_phi)?, config)?;
    /// let ys = norm.forward(&Tensor::new(&[[2f32, 3.]], &Device::Cpu)?)?;
    /// assert_eq!(ys.to_vec2::<f32>()?, [[2., 3.]]); // 2 · 2/√4 + 0, 2 · 3/√9 + 1
    /// # Ok(()) }
    /// ```
    pub fn new<C: Into<PowerNormConfig>>(
        weight: Tensor,
        bias: Tensor,
        running_phi: Tensor,
        config: C,
    ) -> Result<Self> {
        let config = config.into();
        if !config.affine {
            return Err(Error::NotAffine.into());
        }
        let &[size] = weight.dims() else {
            return Err(Error::WeightRank(weight.shape().clone()).into());
        };
        let dtype = state_dtype("weight", weight.dtype())?;
        config.validate(size, dtype)?;
        for (name, tensor) in [("bias", &bias), ("running_phi", &running_phi)] {
            if tensor.dims() != [size] {
                let got = tensor.shape().clone();
                return Err(Error::ChannelShape { name, size, got }.into());
            }
        }
        let ema_gz = running_phi.detach().zeros_like()?;
        let iters = Tensor::zeros(1, DType::I64, &Device::Cpu)?;
        let state = State::new(size, config, dtype, [&running_phi, &ema_gz, &iters], None)?;
        state.check_phi()?;
        let trainable = weight.is_variable();
        Self::from_parts(Some((weight, bias)), state, trainable)
    }

    fn from_parts(affine: Option<(Tensor, Tensor)>, state: State, trainable: bool) -> Result<Self> {
        if let Some((weight, bias)) = &affine {
            for (name, parameter) in [("weight", weight), ("bias", bias)] {
                same_device(name, parameter, state.device())?;
                state_dtype(name, parameter.dtype())?;
            }
            let (weight, got) = (weight.dtype(), bias.dtype());
            if got != weight && got != DType::F32 && weight != DType::F32 {
                return Err(Error::BiasDType { weight, got }.into());
            }
        }
        let (weight, bias) = affine.unzip();
        Ok(Self {
            weight,
            bias,
            device: DeviceKind::of(state.device())?,
            state: Arc::new(state),
            mode: match trainable {
                true => Mode::train(),
                false => Mode::eval(),
            },
            loss_scale: LossScale::default(),
            ranks: None,
        })
    }

    /// Normalizes `xs`, `[.., size]`, in training if `train`, else in evaluation. This method
    /// ignores the layer's [`Mode`].
    ///
    /// On a `PowerNorm`, `layer.forward_t(..)` calls this method. [`Tensor::apply_t`] and generic
    /// code that takes a [`ModuleT`] call candle's blanket implementation instead, which drops
    /// `train`. Hand them a [`PowerNormT`].
    ///
    /// # Errors
    ///
    /// The input is a scalar, its last dimension is not `size`, or its dtype or device does not
    /// fit. A loaded checkpoint has a negative step count, or the statistics of a layer with
    /// another group scaling. A refused call leaves the state as it was.
    pub fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.run(xs, None, Purpose::of(train))
    }

    /// Normalizes `xs` and leaves padding out. A row whose `keep` is 0 is padding.
    ///
    /// `keep` has the shape of `xs` without its last dimension. It is `U8`, `U32` or `I64`, as
    /// comparisons and tokenizers give it: 0 marks padding, and any other number a real token.
    /// fairseq's padding mask is the inverse. `None` keeps every row. A mask that is not `U8` is
    /// converted in each call, so convert it once if many layers take it. Pass a `&Tensor`: from
    /// another kind of reference, such as `&Var`, call `as_tensor()`.
    ///
    /// The layer's [`Mode`] says whether this is training or evaluation.
    ///
    /// A padded row's output is computed. Under [`Recipe::Paper`](crate::Recipe::Paper) a padded
    /// row enters no statistic and no parameter gradient, and its input gradient is 0. This holds
    /// for any values in the row, NaN included. The kept rows get what they would get without the
    /// padded ones. Under [`Recipe::Fairseq`](crate::Recipe::Fairseq) the mask changes only ψ_B².
    ///
    /// # Errors
    ///
    /// As in [`forward_t`](Self::forward_t), or `keep` has another dtype, shape or device.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{DType, Device, Result, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use candle_powernorm::power_norm;
    ///
    /// # fn main() -> Result<()> {
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let norm = power_norm(4, 1e-5, vb)?;
    /// // Two sentences of at most three tokens. The second one has two, and padding.
    /// let xs = Tensor::randn(0f32, 1., (2, 3, 4), &Device::Cpu)?;
    /// let keep = Tensor::new(&[[1u8, 1, 1], [1, 1, 0]], &Device::Cpu)?;
    /// let ys = norm.forward_masked(&xs, &keep)?;
    /// assert_eq!(ys.dims(), [2, 3, 4]);
    /// # Ok(()) }
    /// ```
    pub fn forward_masked<'a>(
        &self,
        xs: &Tensor,
        keep: impl Into<Option<&'a Tensor>>,
    ) -> Result<Tensor> {
        self.run(xs, keep.into(), self.mode.purpose())
    }

    /// Adds `residual` to `xs`, and returns the normalized sum and the sum. In a pre-norm
    /// transformer the next block reads the normalized sum, and the sum is the residual stream.
    ///
    /// Both inputs and both outputs are `[.., size]`, of one shape and dtype. `keep` is the mask of
    /// [`forward_masked`](Self::forward_masked), and `None` keeps every row. The sum of a padded
    /// row is computed too. The layer's [`Mode`] says whether this is training or evaluation.
    ///
    /// The outputs have the bits of an addition that rounds to nearest and a
    /// [`forward`](Module::forward). candle's own addition of half precision truncates or flushes
    /// subnormals on some processors. On an NVIDIA GPU, and on a CPU for inputs of up to 4 MiB, the
    /// addition takes no pass over memory of its own. Neither does the backward's addition of both
    /// outputs' gradients, whose sum is rounded once.
    ///
    /// After a backward that failed on an NVIDIA GPU, or inside another backward of the same graph,
    /// run the forward again: the next backward could use the gradients that it left.
    ///
    /// # Errors
    ///
    /// As in [`forward_masked`](Self::forward_masked), or `residual` has another dtype, shape or
    /// device.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{DType, Device, Module, Result, Tensor};
    /// use candle_nn::{linear, VarBuilder, VarMap};
    /// use candle_powernorm::power_norm;
    ///
    /// # fn main() -> Result<()> {
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let mlp = linear(4, 4, vb.pp("mlp"))?;
    /// let [norm, next] = ["norm", "next"].map(|name| power_norm(4, 1e-5, vb.pp(name)));
    /// let stream = Tensor::randn(0f32, 1., (3, 4), &Device::Cpu)?;
    /// let xs = norm?.forward(&stream)?;
    /// // The end of one block and the start of the next.
    /// let (xs, stream) = next?.forward_residual(&mlp.forward(&xs)?, &stream, None)?;
    /// assert_eq!(xs.shape(), stream.shape());
    /// # Ok(()) }
    /// ```
    pub fn forward_residual<'a>(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        keep: impl Into<Option<&'a Tensor>>,
    ) -> Result<(Tensor, Tensor)> {
        self.run_residual(xs, residual, keep.into(), self.mode.purpose())
    }

    /// The same layer, which follows `mode` from now on.
    #[must_use]
    pub fn with_mode(self, mode: &Mode) -> Self {
        Self {
            mode: mode.clone(),
            ..self
        }
    }

    /// The same layer, for a loss that is multiplied by the number in `loss_scale`. Without this
    /// call the number is 1.
    #[must_use]
    pub fn with_loss_scale(self, loss_scale: &LossScale) -> Self {
        Self {
            loss_scale: loss_scale.clone(),
            ..self
        }
    }

    /// The same layer, with statistics over the rows of all ranks.
    ///
    /// A rank is one of several processes or GPUs that train copies of one model, each on its own
    /// shard of every batch. ψ_B², Γ and Λ become means over the rows of all ranks. N ranks with
    /// B/N rows each then have the state and the gradients of one rank with B rows. Shards may
    /// differ in size, and on a CPU may be empty.
    ///
    /// All ranks make the same training forwards and backwards in the same order. A training
    /// forward adds its sums up over the ranks, and so does its backward. [The
    /// guide](crate::guide::ranks) has the other rules.
    ///
    /// # Gradients
    ///
    /// Each rank's loss is its part of one sum, and the gradients of parameters are each rank's
    /// part. The caller adds them up over the ranks, as for the model's other parameters.
    ///
    /// # Errors
    ///
    /// A layer's first training forward compares the ranks: the order of `with_ranks`, the step
    /// count, the size, and the configuration. If they differ, every rank gets an error that says
    /// in what.
    ///
    /// On a CPU, each later exchange compares the order of calls and the step count. If one rank's
    /// call fails, it fails on all ranks. They can go on with the next step. Layers that came first
    /// in the failed step have moved ψ², on all ranks.
    ///
    /// On a GPU nothing is compared later. If a rank's call then fails, for example because memory
    /// runs out, the other ranks wait in their sum. If ranks later make different calls, NCCL hangs
    /// or adds unrelated numbers.
    #[must_use]
    pub fn with_ranks(self, ranks: &Ranks) -> Self {
        let device = self.device.sums_device(self.state.device());
        Self {
            ranks: Member::join(ranks, self.state.size(), self.config(), device),
            ..self
        }
    }

    /// The switch that the layer follows in every forward except [`forward_t`](Self::forward_t).
    pub fn mode(&self) -> &Mode {
        &self.mode
    }

    /// γ, `[size]`; `None` without `affine`.
    pub fn weight(&self) -> Option<&Tensor> {
        self.weight.as_ref()
    }

    /// β, `[size]`; `None` without `affine`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// A copy of ψ², the running mean square of each channel, `[size]`.
    pub fn running_phi(&self) -> Result<Tensor> {
        self.state.running_phi()
    }

    /// A copy of ν, the running correction of each channel's gradient, `[size]`: (1−α_b) times the
    /// checkpoint's `ema_gz`.
    pub fn nu(&self) -> Result<Tensor> {
        self.state.nu()
    }

    /// t, the number of training steps so far.
    ///
    /// # Errors
    ///
    /// The count is negative, which only a checkpoint can bring.
    pub fn steps(&self) -> Result<usize> {
        self.state.steps()
    }

    /// Sets ψ² to 1, and ν and the step count to 0. The warm-up starts again. The record of the group
    /// scaling is cleared.
    ///
    /// Over ranks, reset on every rank at the same place in the order of their calls.
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

    fn run(&self, xs: &Tensor, keep: Option<&Tensor>, purpose: Purpose) -> Result<Tensor> {
        let call = self.call(xs, None, keep, purpose)?;
        op::power_norm(call)
    }

    fn run_residual(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        keep: Option<&Tensor>,
        purpose: Purpose,
    ) -> Result<(Tensor, Tensor)> {
        let call = self.call(xs, Some(residual), keep, purpose)?;
        power_norm_residual(call)
    }

    /// Takes the turn over ranks, checks the arguments, and gathers what a forward needs.
    fn call<'a>(
        &'a self,
        xs: &'a Tensor,
        residual: Option<&'a Tensor>,
        keep: Option<&'a Tensor>,
        purpose: Purpose,
    ) -> Result<Call<'a>> {
        // Before the checks: if one fails, dropping the turn tells the other ranks.
        let exchange = match purpose {
            Purpose::Evaluation => None,
            Purpose::Training => Some(Exchange::Forward),
            Purpose::Recalibration(_) => Some(Exchange::Recalibration),
        };
        let turn =
            (self.ranks.as_ref().zip(exchange)).map(|(ranks, exchange)| ranks.turn(exchange));
        self.check_input(xs)?;
        residual.map_or(Ok(()), |residual| self.check_residual(xs, residual))?;
        keep.map_or(Ok(()), |keep| self.check_keep(xs, keep))?;
        Ok(Call {
            device: &self.device,
            config: self.config(),
            arguments: Arguments {
                xs,
                residual,
                keep,
                affine: match (&self.weight, &self.bias) {
                    (Some(weight), Some(bias)) => Some([weight, bias]),
                    _ => None,
                },
            },
            state: Some(&self.state),
            training: (purpose != Purpose::Evaluation).then(|| Training {
                state: self.state.clone(),
                purpose,
                loss_scale: self.loss_scale.clone(),
                ranks: self.ranks.clone(),
            }),
            turn,
        })
    }

    fn check_input(&self, xs: &Tensor) -> Result<()> {
        match xs.dims().last() {
            None => return Err(Error::Scalar.into()),
            Some(&last) if last != self.state.size() => {
                return Err(Error::LastDim {
                    size: self.state.size(),
                    got: xs.shape().clone(),
                }
                .into())
            }
            Some(_) => {}
        }
        let input = xs.dtype();
        check_input_dtype(input)?;
        for (name, parameter) in [("weight", &self.weight), ("bias", &self.bias)] {
            if let Some(parameter) = parameter {
                let got = parameter.dtype();
                if got != input && got != DType::F32 {
                    return Err(Error::ParameterDType { name, input, got }.into());
                }
            }
        }
        self.check_device("xs", xs.device())
    }

    fn check_residual(&self, xs: &Tensor, residual: &Tensor) -> Result<()> {
        if residual.dtype() != xs.dtype() || residual.shape() != xs.shape() {
            return Err(Error::Residual {
                expected: xs.shape().clone(),
                dtype: xs.dtype(),
                got: residual.shape().clone(),
                got_dtype: residual.dtype(),
            }
            .into());
        }
        self.check_device("residual", residual.device())
    }

    fn check_keep(&self, xs: &Tensor, keep: &Tensor) -> Result<()> {
        if !matches!(keep.dtype(), DType::U8 | DType::U32 | DType::I64) {
            return Err(Error::KeepDType(keep.dtype()).into());
        }
        let expected = Shape::from(&xs.dims()[..xs.rank() - 1]);
        if keep.shape() != &expected {
            return Err(Error::KeepShape {
                expected,
                got: keep.shape().clone(),
            }
            .into());
        }
        self.check_device("keep", keep.device())
    }

    pub(crate) fn check_device(&self, name: &'static str, device: &Device) -> Result<()> {
        let own = self.state.device();
        // candle's `Device::same_device` would not do: it calls two handles of one GPU two devices.
        if device.location() == own.location() {
            return Ok(());
        }
        Err(Error::Device {
            name,
            expected: own.location(),
            got: device.location(),
        }
        .into())
    }
}

/// Checks the dtype of an input.
pub(crate) fn check_input_dtype(dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::F64 | DType::F16 | DType::BF16 => Ok(()),
        other => Err(Error::InputDType(other).into()),
    }
}

/// A [`PowerNorm`] for generic code that takes a [`ModuleT`]: it honours `train`.
///
/// candle implements [`ModuleT`] for every [`Module`] and drops `train` there. So the layer, which
/// is a [`Module`], cannot honour `train` itself. A `PowerNormT` ignores the layer's [`Mode`], but
/// the methods of the layer inside, such as [`forward_masked`](PowerNorm::forward_masked), follow
/// it.
///
/// ```
/// use candle::{DType, Device, Result, Tensor};
/// use candle_nn::{ModuleT, VarBuilder, VarMap};
/// use candle_powernorm::{power_norm, PowerNormT};
///
/// fn step(layer: &impl ModuleT, xs: &Tensor, train: bool) -> Result<Tensor> {
///     layer.forward_t(xs, train)
/// }
///
/// # fn main() -> Result<()> {
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let layer = PowerNormT(power_norm(4, 1e-5, vb)?);
/// let xs = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
/// step(&layer, &xs, false)?;
/// assert_eq!(layer.0.steps()?, 0);
/// step(&layer, &xs, true)?;
/// assert_eq!(layer.0.steps()?, 1);
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
