//! The layer: construction, the forward passes, the accessors.

use crate::config::{validate_input_dtype, PowerNormConfig};
use crate::error::Error;
use crate::loss_scale::LossScale;
use crate::mode::{Mode, Purpose};
use crate::op;
use crate::op::residual::power_norm_residual;
use crate::ranks::{LayerRanks, Ranks};
use crate::state::{same_device, State};
use candle::{DType, Device, Module, Result, Shape, Tensor};
use candle_nn::{Init, ModuleT, VarBuilder};
use std::sync::Arc;

/// Builds a [`PowerNorm`] layer over `size` channels from the tensors of `vb`.
///
/// A call like `layer_norm(512, 1e-5, vb.pp("norm"))` becomes `power_norm(512, 1e-5, vb.pp("norm"))`.
///
/// # Tensors
///
/// | name | shape | dtype | fresh value |
/// |---|---|---|---|
/// | `weight` (γ) | `[size]` | the builder's | 1 |
/// | `bias` (β) | `[size]` | the builder's | 0 |
/// | `running_phi` (ψ²) | `[size]` or `[1, size, 1, 1]` | `F32` (`F64` for an `F64` builder) | 1 |
/// | `ema_gz` (ν/(1−α_b)) | `[size]` or `[1, size, 1, 1]` | as `running_phi` | 0 |
/// | `iters` (t) | `[1]` | `I64`, on the CPU | 0 |
///
/// With `affine: false` there is no `weight` and no `bias`. The buffers are in the `VarMap`, so they
/// are saved and loaded with it; no gradient reaches them, so no optimizer moves them.
///
/// # State
///
/// A layer built on trainable variables (a `VarMap`) starts in training, one built on frozen tensors
/// (a safetensors `VarBuilder`) in evaluation, with a state of its own that starts from those tensors.
///
/// # Errors
///
/// A configuration out of range, a builder whose dtype is not a float the layer computes in, a
/// missing tensor or one of another shape, a buffer of another dtype, a tensor on another device than the layer needs it on
/// (`iters` on the CPU, the others together).
pub fn power_norm<C: Into<PowerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder,
) -> Result<PowerNorm> {
    let config = config.into();
    let state_dtype = match vb.dtype() {
        DType::F64 => DType::F64,
        DType::F32 | DType::F16 | DType::BF16 => DType::F32,
        other => return Err(Error::BuilderDType(other).into()),
    };
    config.validate(size, state_dtype)?;
    let (weight, bias) = if config.affine {
        (
            Some(vb.get_with_hints(size, "weight", Init::Const(1.))?),
            Some(vb.get_with_hints(size, "bias", Init::Const(0.))?),
        )
    } else {
        (None, None)
    };
    let (state, trainable) = State::new(size, config, state_dtype, vb)?;
    // A `VarMap` hands out what it holds, wherever that is.
    for (name, parameter) in [("weight", &weight), ("bias", &bias)] {
        if let Some(parameter) = parameter {
            same_device(name, parameter, state.device())?;
        }
    }
    Ok(PowerNorm {
        size,
        weight,
        bias,
        state: Arc::new(state),
        mode: if trainable {
            Mode::train()
        } else {
            Mode::eval()
        },
        loss_scale: LossScale::default(),
        ranks: LayerRanks::default(),
    })
}

/// PowerNorm: each channel divided by a running quadratic mean of its own past.
///
/// `Y = γ ⊙ X̃ / sqrt(ψ² + ε) + β` (Shen et al., "PowerNorm: Rethinking Batch Normalization in
/// Transformers", ICML 2020, Eq. 8 and 9), where `X̃` is the input, divided row by row by its groups'
/// root mean square if the layer has a layer-scale ([`PowerNormConfig::group_scaling`]), and ψ² is the
/// running mean of `X̃²` over tokens. [`Recipe`](crate::Recipe) has the equations of a training step.
///
/// # Shapes
///
/// Input and output are `[.., size]`, of any rank from 1, any strides, zero-sized included; all
/// dimensions but the last together are the rows (tokens) that statistics run over.
///
/// # Dtypes
///
/// Inputs are `F32`, `F64`, `F16` or `BF16`; weight and bias have the input's dtype or `F32`; the
/// output has the input's. Sums are taken in `F32` (`F64` for `F64` inputs) and rounded once on store.
///
/// # State
///
/// - A forward in training updates ψ² and counts a step, whether or not a backward follows. Two
///   forwards before a backward (a layer used twice in a model) are two steps.
/// - A backward through a training forward updates ν once for each time it runs: two calls of
///   `backward()` on one graph are two updates. It uses the ν and the weight that stand when it runs, and
///   the statistics of its own forward.
/// - A forward without rows, or with every row masked, updates nothing: it is an evaluation. On a GPU, whose
///   mask the host does not wait for, a forward with every row masked counts as a step all the same (and among
///   the first of a warm-up leaves the fresh ψ² = 1 a share in the mean).
/// - Evaluation changes nothing, and a call that fails changes nothing. (Over [ranks](Self::with_ranks) a training forward takes
///   the step that waits for it first.)
/// - The lock of the state makes each update whole, and none is lost. Concurrent forwards do not wait for
///   each other's rows: each normalizes by the ψ², and the `t`, that stand when it begins. (On a GPU candle
///   gives each thread a stream of its own, between which the device must be synchronized.)
///
/// Share a layer by cloning it: two layers built on one path of a `VarMap` share their variables, but
/// not the lock.
///
/// ν is in the units of the gradient, so it carries the scale of the loss. A run that changes that scale, as
/// mixed-precision training does, would change the meaning of the ν it has: give the layer a [`LossScale`].
///
/// # Gradients
///
/// Weight, bias and layer-scale gradients are exact in all modes. The input's gradient is exact in
/// evaluation, and in training while the batch's statistic normalizes
/// ([`Recipe::Paper`](crate::Recipe::Paper): warm-up, or
/// [`Statistics::Batch`](crate::Statistics::Batch)); afterwards it is the paper's approximation, which
/// replaces the batch mean Λ by its running estimate ν.
///
/// A clone shares parameters, state, mode, loss scale and ranks.
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
#[derive(Debug, Clone)]
pub struct PowerNorm {
    size: usize,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    state: Arc<State>,
    mode: Mode,
    loss_scale: LossScale,
    ranks: LayerRanks,
}

impl Module for PowerNorm {
    /// Normalizes `xs`, `[.., size]`, in training or evaluation as the layer's [`Mode`] says.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_for(xs, self.mode.purpose())
    }
}

impl PowerNorm {
    /// Normalizes `xs`, `[.., size]`, in training if `train`, else in evaluation. The layer's
    /// [`Mode`] is not consulted.
    ///
    /// On a `PowerNorm` this method is what `layer.forward_t(..)` calls. Generic code that takes a
    /// [`ModuleT`] gets candle's blanket implementation instead, which drops `train`: hand it a
    /// [`PowerNormT`].
    ///
    /// # Errors
    ///
    /// A scalar, a last dimension other than `size`, a dtype or device that does not fit: see
    /// [`Error`]. A refused call leaves the state as it was.
    pub fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        let purpose = if train {
            Purpose::Training
        } else {
            Purpose::Evaluation
        };
        self.forward_for(xs, purpose)
    }

    /// Normalizes `xs` with padding: rows whose `keep` is 0 are outside the layer.
    ///
    /// `keep` is `U8`, shaped as `xs` without its last dimension; 1 marks a real token (the inverse
    /// of fairseq's padding mask). Training or evaluation follows the layer's [`Mode`].
    ///
    /// A padded row's output is computed. Under [`Recipe::Paper`](crate::Recipe::Paper) the row enters no
    /// statistic and no parameter gradient, and its input gradient is 0: kept rows fare as if they had
    /// been gathered, normalized and scattered back, whatever the padding holds, NaN included. Under
    /// [`Recipe::Fairseq`](crate::Recipe::Fairseq) the mask reaches ψ_B² alone.
    ///
    /// # Errors
    ///
    /// Those of [`forward_t`](Self::forward_t), and a `keep` of another dtype, shape or device.
    pub fn forward_masked(&self, xs: &Tensor, keep: &Tensor) -> Result<Tensor> {
        let request = self.request(Some(keep), self.mode.purpose());
        op::power_norm(xs, &request, || {
            self.check_input(xs)?;
            self.check_keep(xs, keep)
        })
    }

    /// The normalization of `xs + residual`, and `xs + residual` itself: what the next layer of a transformer takes, and
    /// its residual stream.
    ///
    /// Both are `[.., size]`, of one shape and dtype. Training or evaluation follows the layer's [`Mode`].
    ///
    /// It is an addition and a [`forward`](Module::forward), with the same bits, in one pass over memory; and so is the
    /// backward, where both gradients meet: their sum is rounded once.
    ///
    /// On a GPU, a backward that fails halfway leaves its gradients with the graph: another one through the same outputs, in the
    /// same thread and from a loss that sees one of them alone, would take these for its own. Make a new forward after a failure.
    ///
    /// # Errors
    ///
    /// Those of [`forward_t`](Self::forward_t), and a `residual` of another dtype, shape or device.
    ///
    /// # Example
    ///
    /// ```
    /// use candle::{DType, Device, Module, Result, Tensor};
    /// use candle_nn::{linear, Linear, VarBuilder, VarMap};
    /// use candle_powernorm::{power_norm, PowerNorm};
    ///
    /// /// A block of a pre-norm transformer takes the normalized stream and the stream, and gives the next one's.
    /// fn block(xs: &Tensor, stream: &Tensor, mlp: &Linear, next: &PowerNorm) -> Result<(Tensor, Tensor)> {
    ///     next.forward_residual(&mlp.forward(xs)?, stream)
    /// }
    ///
    /// # fn main() -> Result<()> {
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let norm = power_norm(4, 1e-5, vb.pp("norm"))?;
    /// let stream = Tensor::randn(0f32, 1., (3, 4), &Device::Cpu)?;
    /// let xs = norm.forward(&stream)?;
    /// let (xs, stream) = block(&xs, &stream, &linear(4, 4, vb.pp("mlp"))?, &norm)?;
    /// assert_eq!(xs.shape(), stream.shape());
    /// # Ok(()) }
    /// ```
    pub fn forward_residual(&self, xs: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.run_residual(xs, residual, None)
    }

    /// [`forward_residual`](Self::forward_residual) with padding, as [`forward_masked`](Self::forward_masked) takes it. The
    /// sum of a padded row is that of any other.
    ///
    /// # Errors
    ///
    /// Those of both.
    pub fn forward_residual_masked(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        keep: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        self.run_residual(xs, residual, Some(keep))
    }

    /// The same layer, following `mode` from now on.
    pub fn with_mode(self, mode: &Mode) -> Self {
        Self {
            mode: mode.clone(),
            ..self
        }
    }

    /// The same layer, whose loss is multiplied by the number that `loss_scale` holds. Without it the number is 1.
    pub fn with_loss_scale(self, loss_scale: &LossScale) -> Self {
        Self {
            loss_scale: loss_scale.clone(),
            ..self
        }
    }

    /// The same layer, on one of several ranks: ψ_B², Γ, Λ and n are sums over the rows of all of them.
    ///
    /// So N ranks with B/N rows each have the state and the gradients of one rank with B rows, where each rank's loss is its
    /// part of a sum; gradients of parameters are this rank's part too, for the caller to add up with the model's others.
    /// (Where each rank's loss is a mean over its own rows, its gradients, Λ and ν are N times as large, and fit each other.)
    /// Shards may be of different sizes, and empty. A [`LossScale`] must have one value on all ranks.
    ///
    /// All ranks make the same training forwards and backwards in the same order. While the batch's statistic normalizes,
    /// a forward waits for the others before its output. After the warm-up none does: its sums go with Λ, in the one
    /// exchange of its backward ([`Recipe::Fairseq`](crate::Recipe::Fairseq)'s needs them before Λ, and makes two), or, where no
    /// backward came, before the next training forward. Until then
    /// [`running_phi`](Self::running_phi) and [`steps`](Self::steps) are those of before the step. So save after the backward; and
    /// load before the forward or after the backward, for what is loaded in between takes the step too if its t is the same.
    /// Evaluation and accessors never wait.
    ///
    /// # On a GPU
    ///
    /// The sums are made, handed to the communicator and used on the device: with `NcclCommunicator` the host queues them and waits
    /// for none, and "waits" above is of the GPU. Only in the first training forward of a layer does the host wait, to hear
    /// whether the ranks fit each other: in the layer's place among others, what they sum, t, T, recipe and statistic. The count of
    /// rows is on the GPU too, so every training forward over ranks counts as a step, one without a kept row on any rank included;
    /// its ψ² and ν stay. candle cannot launch its own operations, which a backward comes through, on an empty tensor there: under
    /// [`Recipe::Paper`](crate::Recipe::Paper) a rank without rows brings a padded one instead. (Under
    /// [`Recipe::Fairseq`](crate::Recipe::Fairseq) such a row counts, in the means Γ and Λ.)
    ///
    /// # Errors
    ///
    /// If one rank's training forward is refused, the step fails on all ranks and is skipped. Layers that already updated ψ²
    /// keep that update. After the warm-up it is the others' backward that fails; without backwards it is their next forward,
    /// and the ranks are then a step apart. Ranks that sum different numbers fail in the same way. A rank that stops elsewhere
    /// is for the engine to notice.
    ///
    /// On a GPU ranks are compared once, in a layer's first training forward. Later mismatches go unnoticed: the host would have
    /// to wait at each sum to hear of the others. A rank whose call fails otherwise, as for want of memory, leaves the others
    /// waiting in their sum. Of ranks that come to differ, the engine makes what it can: NCCL hangs or sums wrongly.
    pub fn with_ranks(self, ranks: &Ranks) -> Self {
        Self {
            ranks: LayerRanks::join(ranks),
            ..self
        }
    }

    /// The switch that every forward but [`forward_t`](Self::forward_t) follows.
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

    /// t, the training forwards that updated ψ² so far.
    pub fn steps(&self) -> Result<usize> {
        self.state.steps()
    }

    /// Sets ψ² to 1, ν and the step count to 0: the warm-up starts again.
    pub fn reset_running_stats(&self) -> Result<()> {
        self.state.reset()
    }

    /// What the layer was built with.
    pub fn config(&self) -> &PowerNormConfig {
        self.state.config()
    }

    fn forward_for(&self, xs: &Tensor, purpose: Purpose) -> Result<Tensor> {
        let request = self.request(None, purpose);
        op::power_norm(xs, &request, || self.check_input(xs))
    }

    fn run_residual(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        keep: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let request = self.request(keep, self.mode.purpose());
        power_norm_residual(xs, residual, &request, || {
            self.check_input(xs)?;
            self.check_residual(xs, residual)?;
            keep.map_or(Ok(()), |keep| self.check_keep(xs, keep))
        })
    }

    fn request<'a>(&'a self, keep: Option<&'a Tensor>, purpose: Purpose) -> op::Request<'a> {
        op::Request {
            affine: self.weight.as_ref().zip(self.bias.as_ref()),
            keep,
            state: &self.state,
            purpose,
            loss_scale: &self.loss_scale,
            ranks: &self.ranks,
        }
    }

    fn check_input(&self, xs: &Tensor) -> Result<()> {
        match xs.dims().last() {
            None => return Err(Error::Rank.into()),
            Some(&last) if last != self.size => {
                return Err(Error::LastDim {
                    size: self.size,
                    got: xs.shape().clone(),
                }
                .into())
            }
            Some(_) => {}
        }
        let input = xs.dtype();
        validate_input_dtype(input)?;
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
        if keep.dtype() != DType::U8 {
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
        // Not `same_device`, for which two handles of one GPU are two devices.
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

/// A [`PowerNorm`] that honours `train` where generic code takes a [`ModuleT`].
///
/// candle implements [`ModuleT`] for every [`Module`] and drops `train` there, so one type cannot
/// have both. The layer's [`Mode`] is not consulted.
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
