//! The variables of a model that an optimizer moves.

use candle::Var;
use candle_nn::VarMap;
use std::collections::HashMap;
use std::sync::PoisonError;

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
    // A panic elsewhere leaves the map whole: it only ever gains variables.
    let vars = varmap.data().lock().unwrap_or_else(PoisonError::into_inner);
    let mut trainable: Vec<_> = vars
        .iter()
        .filter(|(name, var)| var.dtype().is_float() && !is_statistic(name, &vars))
        .collect();
    trainable.sort_by_key(|(name, _)| *name);
    trainable.into_iter().map(|(_, var)| var.clone()).collect()
}

/// `true` if `name` is a statistic of a PowerNorm layer in `vars`. The layer's `running_phi` is the
/// proof that there is a layer: a model may use the other names for weights of its own.
fn is_statistic(name: &str, vars: &HashMap<String, Var>) -> bool {
    let start = name.rfind('.').map_or(0, |dot| dot + 1);
    let (path, last) = name.split_at(start);
    STATISTICS.contains(&last) && vars.contains_key(&format!("{path}running_phi"))
}
