//! The variables of a model that an optimizer moves, and those that a backward does not reach.

use candle::backprop::GradStore;
use candle::{DType, Device, Result, Tensor, TensorId, Var};
use candle_nn::VarMap;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// The variables of a PowerNorm layer that are its state. No gradient reaches them.
const STATISTICS: [&str; 4] = ["running_phi", "ema_gz", "iters", "groups"];

/// The variables of `varmap` for an optimizer: all floats except the statistics of PowerNorm
/// layers, sorted by name.
///
/// `VarMap::all_vars` contains the statistics too. candle's own optimizers skip a variable without
/// a gradient, so they leave the statistics alone. Another optimizer may not:
///
/// - An optimizer that decays every variable of its list shrinks ψ² and ν.
/// - An optimizer that joins all variables into one tensor fails at the counters `iters` and
///   `groups`, which are `I64`: "dtype mismatch in cat".
///
/// # Order
///
/// `all_vars` returns the variables in the order of a `HashMap`, which differs from run to run.
/// This function sorts them by the bytes of their names (`blocks.10` precedes `blocks.2`). So a
/// model that is built again has the same list, and an optimizer's state that was saved by position
/// belongs to the same variables. A norm of all gradients is then summed in one order, too.
///
/// # Which variables are left out
///
/// A variable is a statistic if the last part of its name is `running_phi`, `ema_gz`, `iters` or
/// `groups`, and there is a `running_phi` beside it. So a weight that is called `router.groups`
/// stays in the list. Statistics of other layers stay too, such as the `running_mean` of candle's
/// BatchNorm.
///
/// A variable with several names, such as a weight that an embedding and an output layer share, is
/// listed once, under the first of its names. `all_vars` lists it under each, and an optimizer then
/// moves it several times a step.
///
/// # The lock of the map
///
/// Every function that reads a `VarMap` waits for its lock, and candle does so when a layer is
/// built. A call in a thread that holds the guard of `varmap.data().lock()` would wait for itself,
/// so drop the guard first.
///
/// After ten seconds this function says so on the standard error, and waits on, because another
/// thread may be saving the map. This crate's functions that return a `Result`, such as
/// [`untrained`], return an error then.
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{linear, AdamW, Optimizer, VarBuilder, VarMap};
/// use candle_powernorm::{power_norm, trainable_vars};
///
/// # fn main() -> Result<()> {
/// let varmap = VarMap::new();
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let linear = linear(8, 4, vb.pp("linear"))?;
/// let norm = power_norm(4, 1e-5, vb.pp("norm"))?;
///
/// let vars = trainable_vars(&varmap); // linear.bias, linear.weight, norm.bias, norm.weight
/// assert_eq!(vars.len(), 4);
/// let mut optimizer = AdamW::new_lr(vars, 1e-2)?;
/// let xs = Tensor::randn(0f32, 1., (16, 8), &Device::Cpu)?;
/// let ys = norm.forward(&linear.forward(&xs)?)?;
/// optimizer.backward_step(&ys.sqr()?.mean_all()?)?;
/// # Ok(()) }
/// ```
pub fn trainable_vars(varmap: &VarMap) -> Vec<Var> {
    let vars = lock(varmap).unwrap_or_else(|error| {
        eprintln!("{error}");
        varmap.data().lock().unwrap_or_else(PoisonError::into_inner)
    });
    let named = named_trainable(&vars);
    named.into_iter().map(|(_, var)| var).collect()
}

/// Lists the variables of `varmap` that a backward does not train: those without a gradient, and
/// those whose gradient is 0 in all or some of their rows.
///
/// Run it once on the `gradients` of a training step, before you look at the loss. candle records
/// no backward for several fused operations and reports no error, and the loss falls anyway,
/// because whatever comes after the last such operation does train.
///
/// **An entry for the weight of a normalization means that every gradient before it is wrong, listed
/// or not:** in a residual block `x + f(norm(x))`, the skip connection still carries a gradient to
/// what comes before, and the branch's part is missing from it.
/// [`check_gradients`](crate::check_gradients) measures which gradients are right.
///
/// The list has the variables that [`trainable_vars`] returns, in the same order, so it never
/// contains PowerNorm's statistics, and names a tied weight once.
///
/// # What an entry means
///
/// - [`NoGradient`](Untrained::NoGradient): no path leads from the loss to the variable. The model
///   does not use it, or every path passes through an operation without a backward, a `detach`, or
///   a copy that is not a variable.
/// - [`ZeroGradient`](Untrained::ZeroGradient) and [`ZeroRows`](Untrained::ZeroRows): there is a
///   path, but what it carries is 0. In rows of a weight that is split, such as a fused query, key
///   and value, this is an operation without a backward again. It is right for rows of an embedding
///   whose tokens are not in the batch, and for weights whose output is multiplied by 0.
///   [Porting](crate::guide::coming_from#find-what-does-not-train) lists these exceptions.
///
/// A gradient of NaN or infinity is no entry, because an optimizer moves its variable. Nor is a
/// variable without elements.
///
/// An empty list does not prove that the gradients are right, nor that the model's output follows
/// its variables: a weight that was computed once, in a constructor, has a gradient in every step,
/// while the model keeps the first value ([`RmsNorm::new`](crate::RmsNorm::new)).
/// [`check_gradients`](crate::check_gradients) finds both.
///
/// # Cost
///
/// Each gradient is read once, and the host waits for a GPU once for each variable. So call it in
/// the first step of a run, or in a test, and not in every step.
///
/// # Errors
///
/// - candle's error if a gradient cannot be read, for example because memory runs out.
/// - The map [stays locked](trainable_vars#the-lock-of-the-map).
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{linear, loss, VarBuilder, VarMap};
/// use candle_powernorm::untrained;
///
/// # fn main() -> Result<()> {
/// let varmap = VarMap::new();
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let input = linear(8, 4, vb.pp("input"))?;
/// let norm = candle_nn::layer_norm(4, 1e-5, vb.pp("norm"))?; // candle's
/// let output = linear(4, 1, vb.pp("output"))?;
///
/// let xs = Tensor::randn(0f32, 1., (16, 8), &Device::Cpu)?;
/// let ys = output.forward(&norm.forward(&input.forward(&xs)?)?)?;
/// let gradients = loss::mse(&ys, &xs.sum_keepdim(1)?)?.backward()?;
///
/// let lines: Vec<_> = untrained(&varmap, &gradients)?.iter().map(ToString::to_string).collect();
/// assert_eq!(
///     lines,
///     [
///         "input.bias: no gradient",
///         "input.weight: no gradient",
///         "norm.bias: no gradient",
///         "norm.weight: no gradient",
///     ]
/// );
/// # Ok(()) }
/// ```
///
/// Variables that are in no `VarMap` can be put into one for this:
/// `varmap.data().lock().unwrap().insert("w".to_owned(), var.clone())`.
pub fn untrained(varmap: &VarMap, gradients: &GradStore) -> Result<Vec<Untrained>> {
    let mut found = vec![];
    for (name, var) in named_trainable_vars(varmap)? {
        if var.elem_count() == 0 {
            continue;
        }
        let Some(gradient) = gradients.get(&var) else {
            found.push(Untrained::NoGradient { name });
            continue;
        };
        let of = var.dims().first().copied().unwrap_or(1);
        match zero_rows(gradient, of)? {
            0 => {}
            rows if rows == of => found.push(Untrained::ZeroGradient { name }),
            rows => found.push(Untrained::ZeroRows { name, rows, of }),
        }
    }
    Ok(found)
}

/// A variable that a backward does not train, as [`untrained`] lists it.
///
/// Its printed form is a line such as `norm.weight: no gradient` or `qkv.weight: gradient 0 in 128
/// of 192 rows`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Untrained {
    /// The backward has no gradient for the variable.
    NoGradient {
        /// The variable's name in the `VarMap`: the first one in sorted order if it has several.
        name: String,
    },
    /// Every element of the gradient is 0.
    ZeroGradient {
        /// As in [`NoGradient`](Self::NoGradient).
        name: String,
    },
    /// Every element of some rows of the gradient is 0, while the other rows have some that are not 0. The
    /// rows of a tensor are its parts along the first dimension, so those of a vector are its
    /// elements.
    ZeroRows {
        /// As in [`NoGradient`](Self::NoGradient).
        name: String,
        /// The number of rows of zeros, at least 1 and below `of`.
        rows: usize,
        /// The number of all rows of the variable.
        of: usize,
    },
}

impl Untrained {
    /// The variable's name in the `VarMap`.
    pub fn name(&self) -> &str {
        match self {
            Self::NoGradient { name }
            | Self::ZeroGradient { name }
            | Self::ZeroRows { name, .. } => name,
        }
    }
}

impl fmt::Display for Untrained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoGradient { name } => write!(f, "{name}: no gradient"),
            Self::ZeroGradient { name } => write!(f, "{name}: gradient 0"),
            Self::ZeroRows { name, rows, of } => {
                write!(f, "{name}: gradient 0 in {rows} of {of} rows")
            }
        }
    }
}

/// The number of rows of `gradient`, out of `of`, whose elements are all 0.
fn zero_rows(gradient: &Tensor, of: usize) -> Result<usize> {
    // f32 holds every number of f16 and bf16. A sum of magnitudes is 0 only if each of them is.
    let gradient = match gradient.dtype() {
        DType::F64 => gradient.clone(),
        _ => gradient.to_dtype(DType::F32)?,
    };
    let sums = gradient.abs()?.reshape((of, ()))?.sum(1)?;
    // On the CPU: Metal has no f64.
    let sums = sums.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    let zeros = sums.to_vec1::<f64>()?.into_iter().filter(|sum| *sum == 0.);
    Ok(zeros.count())
}

/// The variables that [`trainable_vars`] returns, each with its first name.
///
/// # Errors
///
/// The map [stays locked](trainable_vars#the-lock-of-the-map).
pub(crate) fn named_trainable_vars(varmap: &VarMap) -> Result<Vec<(String, Var)>> {
    Ok(named_trainable(&*lock(varmap)?))
}

/// All variables of `varmap`, the statistics too, once each.
///
/// # Errors
///
/// The map [stays locked](trainable_vars#the-lock-of-the-map).
pub(crate) fn distinct_vars(varmap: &VarMap) -> Result<Vec<Var>> {
    let mut listed = HashSet::new();
    let vars = lock(varmap)?;
    let distinct = vars.values().filter(|var| listed.insert(var.id()));
    Ok(distinct.cloned().collect())
}

/// The first name, in sorted order, of each variable of `varmap`.
pub(crate) fn first_names(varmap: &VarMap) -> Result<HashMap<TensorId, String>> {
    let mut names = HashMap::<TensorId, String>::new();
    for (name, var) in lock(varmap)?.iter() {
        let first = names.entry(var.id()).or_insert_with(|| name.clone());
        if name < first {
            first.clone_from(name);
        }
    }
    Ok(names)
}

type Vars = HashMap<String, Var>;

/// How long a call waits for the lock of a map. A thread holds it while it saves or loads a file.
const LIMIT: Duration = Duration::from_secs(10);

/// The variables of a map. A thread that holds the lock already would wait for itself, and a lock
/// does not tell who holds it, so the wait is bounded.
fn lock(varmap: &VarMap) -> Result<MutexGuard<'_, Vars>> {
    let mut start = None;
    loop {
        match varmap.data().try_lock() {
            Ok(vars) => return Ok(vars),
            // A panic elsewhere leaves the map whole: it only ever gains variables.
            Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        if start.get_or_insert_with(Instant::now).elapsed() > LIMIT {
            candle::bail!(
                "candle_powernorm: expected the lock of a VarMap, got it held for {LIMIT:?}: drop \
                 the guard of `varmap.data().lock()` before this call; if another thread saves or \
                 loads the map, wait for it"
            )
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn named_trainable(vars: &Vars) -> Vec<(String, Var)> {
    let mut trainable: Vec<_> = vars
        .iter()
        .filter(|(name, var)| var.dtype().is_float() && !is_statistic(name, vars))
        .collect();
    trainable.sort_by_key(|(name, _)| *name);
    let mut listed = HashSet::<TensorId>::new();
    trainable.retain(|(_, var)| listed.insert(var.id()));
    (trainable.into_iter())
        .map(|(name, var)| (name.clone(), var.clone()))
        .collect()
}

/// `true` if `name` is a statistic of a PowerNorm layer in `vars`. The layer's `running_phi` is the
/// proof that there is a layer: a model may use the other names for weights of its own.
fn is_statistic(name: &str, vars: &Vars) -> bool {
    let start = name.rfind('.').map_or(0, |dot| dot + 1);
    let (path, last) = name.split_at(start);
    STATISTICS.contains(&last) && vars.contains_key(&format!("{path}running_phi"))
}
