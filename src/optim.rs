//! Beside candle's optimizers: f32 masters of weights in half precision, and an AdamW whose state
//! can be saved.

use crate::vars::{first_names, named_trainable_vars};
use candle::backprop::GradStore;
use candle::{DType, Device, Result, Tensor, Var, safetensors};
use candle_nn::{Optimizer, ParamsAdamW, VarMap};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::PoisonError;

/// Lets an optimizer move the weights of a model in half precision in `F32`.
///
/// Small updates vanish in half precision: adding 0.001 to a weight of 1 in `BF16` leaves it at 1.
/// So each weight in half precision gets a *master*, an `F32` variable that the optimizer moves in
/// its place, and the model computes with the master rounded to the weight's dtype. A weight in
/// `F32` or `F64` is its own master.
///
/// Make the optimizer of `trainable_vars(masters.varmap())`. Its own averages then are in `F32`
/// too. In each step, pass the gradients to [`unscale`](Self::unscale), and what it leaves to
/// [`step`](Self::step).
///
/// # Weights that are set
///
/// You may set a weight at any time, for example by `VarMap::load`: in the next step its master
/// takes the new value, before the optimizer moves it. This is done element by element, without a
/// wait for a GPU. An element that is set to what its master rounds to keeps the master's digits.
///
/// To resume a run exactly, save [`varmap`](Self::varmap) beside the model, and load both files.
/// If you load the masters alone, they take the model's values in the next step.
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{linear, loss::mse, AdamW, Optimizer, VarBuilder, VarMap};
/// use candle_powernorm::{trainable_vars, Masters};
///
/// # fn main() -> Result<()> {
/// let varmap = VarMap::new();
/// let model = linear(8, 1, VarBuilder::from_varmap(&varmap, DType::BF16, &Device::Cpu))?;
/// let masters = Masters::new(&varmap)?;
/// let mut optimizer = AdamW::new_lr(trainable_vars(masters.varmap()), 1e-4)?;
///
/// let xs = Tensor::randn(0f32, 1., (64, 8), &Device::Cpu)?;
/// let loss = || {
///     let ys = model.forward(&xs.to_dtype(DType::BF16)?)?;
///     mse(&ys.to_dtype(DType::F32)?, &xs.sum_keepdim(1)?)
/// };
/// let first = loss()?.to_scalar::<f32>()?;
/// for _ in 0..100 {
///     let mut gradients = loss()?.backward()?;
///     if masters.unscale(&mut gradients, 1.)? {
///         masters.step(&mut optimizer, &gradients)?;
///     }
/// }
/// assert!(loss()?.to_scalar::<f32>()? < first);
/// # Ok(()) }
/// ```
///
/// [Techniques](crate::guide::recipes#mixed-precision) has a loop with a loss scale.
#[derive(Clone)]
pub struct Masters {
    /// Each weight with its master, in the order of [`trainable_vars`](crate::trainable_vars).
    pairs: Vec<(Var, Var)>,
    /// The masters.
    varmap: VarMap,
}

impl std::fmt::Debug for Masters {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let mut masters = f.debug_struct("Masters");
        masters.field("weights", &self.pairs.len()).finish()
    }
}

impl Masters {
    /// Masters of the variables of `varmap` that [`trainable_vars`](crate::trainable_vars) lists.
    ///
    /// # Errors
    ///
    /// - Memory runs out.
    /// - The map [stays locked](crate::trainable_vars#the-lock-of-the-map).
    pub fn new(varmap: &VarMap) -> Result<Self> {
        let (mut pairs, masters) = (vec![], VarMap::new());
        for (name, var) in named_trainable_vars(varmap)? {
            let master = match is_half(&var) {
                true => Var::from_tensor(&var.as_detached_tensor().to_dtype(DType::F32)?)?,
                false => var.clone(),
            };
            let mut named = masters
                .data()
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            named.insert(name, master.clone());
            pairs.push((var, master));
        }
        let varmap = masters;
        Ok(Self { pairs, varmap })
    }

    /// The masters, under the names of their weights.
    pub fn varmap(&self) -> &VarMap {
        &self.varmap
    }

    /// Moves the gradients of weights to their masters, divided by `scale`, the factor of the loss.
    /// Returns `false` if an element is not finite: then leave out the step.
    ///
    /// Without a loss scale, as in `BF16`, pass 1. On a GPU the host waits for the gradients.
    ///
    /// # Errors
    ///
    /// candle's error, for example if memory runs out. The gradients are then useless.
    pub fn unscale(&self, gradients: &mut GradStore, scale: f64) -> Result<bool> {
        let mut checks = vec![];
        for (var, master) in &self.pairs {
            if let Some(gradient) = gradients.remove(var) {
                let gradient = (gradient.to_dtype(master.dtype())? / scale)?;
                // A finite number times 0 is 0, and any other is NaN.
                checks.push((&gradient * 0.)?.sum_all()?.to_dtype(DType::F32)?);
                gradients.insert(master, gradient);
            }
        }
        // Read once all are queued.
        let mut finite = true;
        for check in checks {
            finite &= check.to_scalar::<f32>()? == 0.;
        }
        Ok(finite)
    }

    /// Takes a step of the optimizer, and rounds the masters into the model.
    ///
    /// `gradients` are those that [`unscale`](Self::unscale) left, or sums of them.
    ///
    /// # Errors
    ///
    /// The optimizer's error, or candle's. The weights of a step that failed count as
    /// [set](Self#weights-that-are-set): the next step begins with them.
    pub fn step<O: Optimizer>(&self, optimizer: &mut O, gradients: &GradStore) -> Result<()> {
        let halves = || self.pairs.iter().filter(|(var, _)| is_half(var));
        for (var, master) in halves() {
            let (weight, value) = (var.as_detached_tensor(), master.as_detached_tensor());
            let unchanged = value.to_dtype(var.dtype())?.eq(&weight)?;
            master.set(&unchanged.where_cond(&value, &weight.to_dtype(DType::F32)?)?)?;
        }
        optimizer.step(gradients)?;
        for (var, master) in halves() {
            var.set(&master.as_detached_tensor().to_dtype(var.dtype())?)?;
        }
        Ok(())
    }
}

/// The variable needs a master. One without elements does not, and candle compares none.
fn is_half(var: &Var) -> bool {
    matches!(var.dtype(), DType::F16 | DType::BF16) && var.elem_count() > 0
}

/// AdamW with a state that can be saved.
///
/// It takes the same steps as `candle_nn::AdamW`, whose averages start from zero in each run
/// because nothing can read them. This one writes its averages and its step count to a file, under
/// the names that the variables have in a `VarMap`, so that a resumed run continues with the same
/// bits.
///
/// The averages have the dtype of their variable, so in half precision use it with [`Masters`].
/// The learning rate is not saved: restore the rate of your schedule with `set_learning_rate`.
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{linear, Linear, Optimizer, ParamsAdamW, VarBuilder, VarMap};
/// use candle_powernorm::{trainable_vars, SavedAdamW};
///
/// fn build(varmap: &VarMap) -> Result<(Linear, SavedAdamW)> {
///     let model = linear(8, 1, VarBuilder::from_varmap(varmap, DType::F32, &Device::Cpu))?;
///     Ok((model, SavedAdamW::new(trainable_vars(varmap), ParamsAdamW::default())?))
/// }
///
/// # fn main() -> Result<()> {
/// let folder = tempfile::tempdir()?;
/// let [weights, averages] = ["weights", "averages"].map(|name| folder.path().join(name));
/// let xs = Tensor::randn(0f32, 1., (64, 8), &Device::Cpu)?;
///
/// let varmap = VarMap::new();
/// let (model, mut optimizer) = build(&varmap)?;
/// optimizer.backward_step(&model.forward(&xs)?.sqr()?.mean_all()?)?;
/// varmap.save(&weights)?;
/// optimizer.save(&varmap, &averages)?;
///
/// let mut varmap = VarMap::new();
/// let (model, mut optimizer) = build(&varmap)?;
/// varmap.load(&weights)?;
/// optimizer.load(&varmap, &averages)?; // and goes on with the second step
/// optimizer.backward_step(&model.forward(&xs)?.sqr()?.mean_all()?)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct SavedAdamW {
    moments: Vec<Moments>,
    /// Steps taken.
    step: usize,
    params: ParamsAdamW,
}

/// A variable, and the moving averages of its gradient and of the gradient's square.
#[derive(Debug)]
struct Moments {
    var: Var,
    first: Var,
    second: Var,
}

/// The step count's name in a file. An average has the name of its variable and one of [`ENDINGS`],
/// both of which have a dot.
const STEP: &str = "step";
const ENDINGS: [&str; 2] = [".first", ".second"];

impl Optimizer for SavedAdamW {
    type Config = ParamsAdamW;

    /// An optimizer of the floats among `vars`. One that is listed twice is moved once.
    fn new(vars: Vec<Var>, params: ParamsAdamW) -> Result<Self> {
        let mut listed = HashSet::new();
        let vars = vars.into_iter().filter(|var| var.dtype().is_float());
        let moments = vars
            .filter(|var| listed.insert(var.id()))
            .map(|var| {
                let zeros = || Var::zeros(var.shape(), var.dtype(), var.device());
                let (first, second) = (zeros()?, zeros()?);
                Ok(Moments { var, first, second })
            })
            .collect::<Result<_>>()?;
        let step = 0;
        Ok(Self {
            moments,
            step,
            params,
        })
    }

    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.step += 1;
        let ParamsAdamW {
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
        } = self.params;
        let scale = |beta: f64| 1. / (1. - beta.powi(self.step as i32));
        // The operations of candle's AdamW in its order, which makes the same bits.
        for Moments { var, first, second } in &self.moments {
            let Some(gradient) = gradients.get(var) else {
                continue;
            };
            let m = ((first.as_detached_tensor() * beta1)? + (gradient * (1. - beta1))?)?;
            let square = (gradient.sqr()? * (1. - beta2))?;
            let v = ((second.as_detached_tensor() * beta2)? + square)?;
            let root = (&v * scale(beta2))?.sqrt()?;
            let update = ((&m * scale(beta1))? / (root + eps)?)?;
            let decayed = (var.as_detached_tensor() * (1. - lr * weight_decay))?;
            let moved = (decayed - (update * lr)?)?;
            first.set(&m)?;
            second.set(&v)?;
            var.set(&moved)?;
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.params.lr = lr;
    }
}

impl SavedAdamW {
    /// Saves the averages and the step count in the safetensors format. `varmap` has the names of
    /// the optimizer's variables. One with several names is saved under the first in sorted order.
    ///
    /// # Errors
    ///
    /// - A variable of the optimizer is not in `varmap`.
    /// - The map [stays locked](crate::trainable_vars#the-lock-of-the-map).
    /// - The file cannot be written.
    pub fn save<P: AsRef<Path>>(&self, varmap: &VarMap, path: P) -> Result<()> {
        let step = Tensor::new(&[self.step as i64], &Device::Cpu)?;
        let mut tensors = HashMap::from([(STEP.to_owned(), step)]);
        for (name, average) in self.named_averages(varmap)? {
            tensors.insert(name, average.as_detached_tensor());
        }
        safetensors::save(&tensors, path)
    }

    /// Loads what [`save`](Self::save) wrote.
    ///
    /// The file must have the averages of the optimizer's variables, by their names in `varmap`,
    /// and no others. So give the optimizer the same variables in each run. To freeze one, remove
    /// its gradient before each step: a variable without a gradient stays as it is.
    ///
    /// # Errors
    ///
    /// As in [`save`](Self::save), and if the file lacks a name, has another one, or has another
    /// shape or dtype. The optimizer is then unchanged.
    pub fn load<P: AsRef<Path>>(&mut self, varmap: &VarMap, path: P) -> Result<()> {
        let path = path.as_ref();
        let mut tensors = safetensors::load(path, &Device::Cpu)?;
        let step = match tensors.remove(STEP) {
            Some(step) => step.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?,
            None => vec![],
        };
        let &[step @ 0..=i64::MAX] = &step[..] else {
            candle::bail!("candle_powernorm: expected a step count in {path:?}, got {step:?}")
        };
        let averages = self.named_averages(varmap)?;
        let missing = averages.keys().filter(|name| !tensors.contains_key(*name));
        let missing: Vec<_> = missing.collect();
        let mut others: Vec<_> = (tensors.keys())
            .filter(|name| !averages.contains_key(*name))
            .collect();
        if !missing.is_empty() || !others.is_empty() {
            others.sort();
            candle::bail!(
                "candle_powernorm: expected the averages of the optimizer's variables in {path:?}, \
                 got none of {missing:?}, and {others:?} besides: give the optimizer the variables \
                 of the run that saved them; to freeze one, remove its gradient before each step"
            )
        }
        for (name, average) in &averages {
            let signature = |tensor: &Tensor| (tensor.shape().clone(), tensor.dtype());
            let (expected, got) = (signature(average), signature(&tensors[name]));
            if got != expected {
                candle::bail!(
                    "candle_powernorm: expected {name} of {expected:?} in {path:?}, got {got:?}: \
                     load the averages of this model"
                )
            }
        }
        for (name, average) in &averages {
            average.set(&tensors[name].to_device(average.device())?)?;
        }
        self.step = step as usize;
        Ok(())
    }

    /// The averages by their names in a file.
    fn named_averages(&self, varmap: &VarMap) -> Result<BTreeMap<String, Var>> {
        let names = first_names(varmap)?;
        let mut averages = BTreeMap::new();
        for Moments { var, first, second } in &self.moments {
            let Some(name) = names.get(&var.id()) else {
                candle::bail!(
                    "candle_powernorm: expected the optimizer's variables in the map, got none of \
                     shape {:?}: pass the map whose variables the optimizer moves",
                    var.shape()
                )
            };
            for (ending, average) in ENDINGS.into_iter().zip([first, second]) {
                averages.insert(format!("{name}{ending}"), average.clone());
            }
        }
        Ok(averages)
    }
}
