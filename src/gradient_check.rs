//! A check of a model's gradients against differences of its loss.
//!
//! The derivative of the loss along a direction d is computed twice: as `g · d` from a backward's
//! gradients g, and as `(L(w + h d) − L(w − h d)) / 2h` from two forwards, which need no backward.
//! Where the two differ, the backward is wrong.
//!
//! A difference has errors of its own. Its truncation error shrinks with h, as h² where the loss is
//! smooth and as h where it has kinks, and its rounding error grows with 1/h. So h runs down a
//! ladder: the change from step to step bounds the truncation error, and the rounding error of a loss
//! is measured once, so close to w that nothing else is left. The step with the least error counts.
//!
//! The point itself may be a bad one: on a kink, as a ReLU of zero biases and padded rows is, or at a
//! minimum, or where a variable is 0 that the gradients of others are multiplied by. So the check is
//! made at a point close by, where none of this holds.

use crate::op::probe::Probe;
use crate::vars::{distinct_vars, named_trainable_vars};
use candle::backprop::GradStore;
use candle::{DType, Device, Result, Tensor, Var};
use candle_nn::VarMap;
use std::collections::HashMap;
use std::fmt;

/// Variables that are tried at once, if their gradients are of similar magnitude.
const GROUP: usize = 8;
const SIMILAR: f64 = 8.;

/// Directions for each group, and for each variable by itself, along which it is tried twice.
const DRAWS: u64 = 3;
const DRAWS_ALONE: u64 = 4;

/// Draws of the directions of everything else.
const DRAW_NEARBY: u64 = 1 << 20;
const DRAW_ROUNDING: u64 = 1 << 21;

/// How far the point of the check is from the variables' values, in their scales.
const NEARBY: f64 = 1. / 32.;

/// The ladder of h: variables move by about this fraction of their root mean square. Where kinks or
/// curvature spoil the first difference, h falls by the factor.
const FIRST_STEP: f64 = 1. / 64.;
const STEP_FACTOR: f64 = 4.;
const STEPS: usize = 10;

/// A step of the ladder is accepted if its error is at most this fraction of the gradient, and one
/// resolves the gradient if its rounding error is at most the second.
const ACCEPTED: f64 = 0.002;
const RESOLVED: f64 = 0.01;

/// A group whose derivatives differ by more than this fraction of its gradient is looked at one
/// variable at a time.
const SUSPECT: f64 = 0.004;

/// A variable's gradient is wrong if the derivatives differ by more than this fraction, beyond what
/// the error of the differences explains. Public models with candle's operations were off by 4 % and
/// more; the kinks of a ReLU network that is right leave up to 1 %.
const WRONG: f64 = 0.02;

/// Compares the gradients of a model with differences of its loss, and lists the variables whose
/// gradients are wrong. The list is empty if all are right.
///
/// [`untrained`](crate::untrained) finds the variables that get no gradient. That is only a part of
/// what an operation without a backward does: in a residual block, `x + f(norm(x))`, a norm that
/// drops gradients cuts the branch, and the skip connection still carries a gradient to everything
/// before the block, which is wrong. This function finds it, and whatever else makes a gradient
/// wrong: a `detach` too many, a weight that was computed once in a constructor, a loss that was
/// rebuilt from a number, a faulty backward.
///
/// `loss` computes the loss, a scalar, of one fixed batch, from the variables of `varmap`. It is
/// called many times, and each call has to return the same number for the same variables, so take
/// the batch outside of the closure, and turn dropout off. A gradient is a property of the program
/// and not of the size of the model, so check a small one.
///
/// # Method
///
/// Along a direction d the loss changes at the rate `g · d` if g is its gradient, and at the rate
/// `(L(w + h d) − L(w − h d)) / 2h` as measured, with an error of the order of h². The variables
/// are first tried in groups of up to eight, along random directions and along their gradients, and
/// those of a group that differs one by one, along random directions and along the gradient. h
/// begins at 1/64 of each variable's root mean square and falls until truncation and rounding are
/// small. A gradient counts as wrong if it differs from what is measured by more than 2 %, in root
/// mean square over the directions, beyond the measurement's own error, and does so along a second
/// set of directions too. The directions are the same in every call.
///
/// The check is made close to the present values, at a distance of 1/32 of each variable's root mean
/// square. The present values may be special: on the kink of a ReLU, or at a minimum of the loss. Or
/// they are 0, as LoRA's B is at first, which hides what is wrong before it. If the loss is not
/// finite close by, the present values are used.
///
/// The variables are those of [`trainable_vars`](crate::trainable_vars). One whose gradient and
/// measured derivative are both 0 within rounding is right, such as one that the loss does not use,
/// or the bias of an attention's keys.
///
/// # What it cannot tell
///
/// - A gradient that is not the derivative on purpose is listed: a straight-through estimator, a
///   gradient that is clipped or reversed inside the model, a target that is detached.
/// - A loss of many kinks close to each other, as of a ReLU network that was trained for long, may
///   have an entry that is right, a few per cent off. What candle's operations without a backward
///   do is rarely less than 4 %, and lists several variables.
/// - A fault in a few rows of a weight shows only if it makes some 2 % of the weight's gradient, and
///   a variable without a gradient only if the loss follows it by more than its rounding.
///
/// # State
///
/// Afterwards every variable of the map has the bits that it had before, also after an error. So
/// have the statistics and step counts of the PowerNorm layers that `loss` runs in the thread of the
/// call, in the map or not. Other variables that the loss changes stay changed. While the function
/// runs, nothing else may use the model.
///
/// # PowerNorm in training
///
/// After its warm-up, PowerNorm's gradient of its input is the paper's approximation, which is not
/// the derivative of the loss. Entries that depend on it say so
/// ([`is_approximation`](WrongGradient::is_approximation)), and their numbers prove nothing. To check
/// such a model, evaluate it (`mode.eval_scope()`) or use
/// [`Statistics::Batch`](crate::Statistics::Batch): the gradients of both are exact, and pass through
/// the same code outside of the layer.
///
/// # Precision
///
/// Variables and loss are `F32` or `F64`. In half precision the differences drown in rounding, so
/// build the model for the check from a `VarBuilder` in `F32`, and let it compute in `F32`.
///
/// # Cost
///
/// A backward and some 12 forwards, then 16 or more forwards for each group of variables if all is
/// right, and 20 to 100 for each variable of a group in which one is wrong. Beside two copies of all
/// variables, their values and gradients are held in `F64` on the host.
///
/// # Errors
///
/// - `varmap` has no trainable variable, one of them is not `F32` or `F64`, or the map [stays
///   locked](crate::trainable_vars#the-lock-of-the-map).
/// - `loss` fails, or its result is not a scalar, not `F32` or `F64`, or not finite.
/// - Two calls of `loss` return different numbers.
///
/// # Example
///
/// ```
/// use candle::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{linear, rms_norm, VarBuilder, VarMap};
/// use candle_powernorm::{check_gradients, untrained};
///
/// # fn main() -> Result<()> {
/// let varmap = VarMap::new();
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let (a, b) = (linear(8, 8, vb.pp("a"))?, linear(8, 8, vb.pp("b"))?);
/// let norm = rms_norm(8, 1e-5, vb.pp("norm"))?; // candle's
/// let xs = Tensor::randn(0f32, 1., (16, 8), &Device::Cpu)?;
/// let loss = || {
///     let hidden = a.forward(&xs)?;
///     let ys = (&hidden + b.forward(&norm.forward(&hidden)?)?)?; // a residual block
///     ys.sqr()?.mean_all()
/// };
///
/// // Only the norm's own weight gets no gradient.
/// assert_eq!(untrained(&varmap, &loss()?.backward()?)?.len(), 1);
///
/// // But each gradient before the norm is wrong.
/// let wrong = check_gradients(&varmap, loss)?;
/// for gradient in &wrong {
///     println!("{gradient}"); // a.bias: gradient 0.0123 along one direction, measured 0.0456
/// }
/// let names: Vec<_> = wrong.iter().map(|gradient| gradient.name()).collect();
/// assert_eq!(names, ["a.bias", "a.weight", "norm.weight"]);
/// # Ok(()) }
/// ```
pub fn check_gradients(
    varmap: &VarMap,
    loss: impl FnMut() -> Result<Tensor>,
) -> Result<Vec<WrongGradient>> {
    let mut model = Model::new(varmap, loss)?;
    let result = check(&mut model, varmap);
    // Also after an error, which then comes first.
    let restored = model.restore();
    let wrong = result?;
    restored?;
    Ok(wrong)
}

/// The variables to check, each with its name.
fn variables(varmap: &VarMap) -> Result<Vec<(String, Var)>> {
    let vars = named_trainable_vars(varmap)?;
    if vars.is_empty() {
        candle::bail!(
            "check_gradients: expected variables to check, got a VarMap without any: build the \
             model from `VarBuilder::from_varmap` of this map"
        )
    }
    for (name, var) in &vars {
        if !matches!(var.dtype(), DType::F32 | DType::F64) {
            candle::bail!(
                "check_gradients: expected variables of F32 or F64, got {name} of {:?}: a check in \
                 half precision would compare rounding errors, so build the model for it in F32",
                var.dtype()
            )
        }
    }
    Ok(vars)
}

/// A variable whose gradient is not the derivative of the loss, as [`check_gradients`] lists it.
///
/// Its printed form is a line such as `a.weight: gradient 0.0123 along one direction, measured
/// 0.0456`.
#[derive(Debug, Clone, PartialEq)]
pub struct WrongGradient {
    name: String,
    gradient: f64,
    measured: f64,
    approximation: bool,
}

impl WrongGradient {
    /// The variable's name in the `VarMap`: the first one in sorted order if it has several.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The derivative of the loss along a random direction of length 1, by the variable's gradient:
    /// 0 if it has none.
    pub fn gradient(&self) -> f64 {
        self.gradient
    }

    /// The same derivative, measured.
    pub fn measured(&self) -> f64 {
        self.measured
    }

    /// `true` if the gradient depends on one that [PowerNorm approximates](check_gradients#powernorm-in-training),
    /// so that it is not known whether it is wrong.
    pub fn is_approximation(&self) -> bool {
        self.approximation
    }
}

impl fmt::Display for WrongGradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            gradient,
            measured,
            approximation,
        } = self;
        write!(
            f,
            "{name}: gradient {gradient:.3e} along one direction, measured {measured:.3e}"
        )?;
        match approximation {
            true => f.write_str(
                " (PowerNorm approximates this gradient in training: check it in evaluation)",
            ),
            false => Ok(()),
        }
    }
}

/// A variable, its values, and its gradient.
struct Candidate {
    name: String,
    var: Var,
    values: Vec<f64>,
    /// Empty if it has none, or zeros.
    gradient: Vec<f64>,
    /// What its elements move by for an h of 1: their root mean square.
    scale: f64,
}

impl Candidate {
    /// The expected magnitude of the derivative along a direction.
    fn magnitude(&self) -> f64 {
        norm(&self.gradient) * self.scale
    }

    /// The direction of the gradient, with this scale.
    fn ascent(&self) -> Vec<f64> {
        let factor = self.scale * (self.values.len() as f64).sqrt() / norm(&self.gradient);
        self.gradient.iter().map(|g| g * factor).collect()
    }

    /// A direction of independent elements with this scale. The same for the same `draw`.
    fn direction(&self, draw: u64) -> Vec<f64> {
        // FNV-1a of the name, and SplitMix64.
        let hash = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        let mut state = self.name.bytes().fold(0xcbf2_9ce4_8422_2325, hash) ^ (draw << 32);
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            // In [-1, 1).
            ((z ^ (z >> 31)) as i64 as f64) / (1u64 << 63) as f64
        };
        let uniform = self.scale * 3f64.sqrt();
        self.values.iter().map(|_| uniform * next()).collect()
    }

    /// Sets the variable to its values moved by `h` along `direction`. Returns the values that it
    /// has then, in its dtype.
    fn move_by(&self, h: f64, direction: &[f64]) -> Result<Vec<f64>> {
        let moved = self.values.iter().zip(direction).map(|(w, d)| w + h * d);
        let moved = Tensor::from_iter(moved, &Device::Cpu)?.to_dtype(self.var.dtype())?;
        let moved = moved.reshape(self.var.shape())?;
        self.var.set(&moved.to_device(self.var.device())?)?;
        to_f64(&moved)
    }
}

/// The derivative of the loss along a direction.
#[derive(Debug, Clone, Copy)]
struct Derivative {
    gradient: f64,
    measured: f64,
    /// What `measured` may be off by.
    error: f64,
    /// The least difference between gradient and measurement of all steps that resolve it.
    least: f64,
    /// The length of the direction.
    length: f64,
}

impl Derivative {
    fn difference(&self) -> f64 {
        (self.gradient - self.measured).abs()
    }
}

/// One step of the ladder.
#[derive(Debug, Clone, Copy)]
struct Step {
    h: f64,
    gradient: f64,
    measured: f64,
    /// `(L(w + h d) + L(w − h d)) / 2 − L(w)`: falls as h² unless w is on a kink, down to rounding.
    second: f64,
    /// The rounding error of `measured`.
    rounding: f64,
}

impl Step {
    /// A bound of the truncation error of `step`, which is one down the ladder from `before`.
    fn truncation(before: Self, step: Self) -> f64 {
        // Near kinks it falls by the factor, elsewhere by its square.
        let truncation = (step.measured - before.measured).abs() / (STEP_FACTOR - 1.);
        // On a kink the slopes to both sides differ however small h is, and each number between
        // them is a gradient.
        let [wide, narrow] = [before, step].map(|step| step.second.abs() / step.h);
        truncation + (2. * narrow - wide).max(0.)
    }
}

/// A model whose loss can be computed at other values of its variables.
struct Model<F> {
    loss: F,
    /// All variables of the map, once each, with their values from before.
    originals: Vec<(Var, Tensor)>,
    /// The values at the point of the check.
    point: Vec<(Var, Tensor)>,
    probe: Probe,
    /// The loss at the point.
    center: f64,
    /// The rounding error of the loss, and of a number of its dtype.
    rounding: f64,
    unit: f64,
}

impl<F: FnMut() -> Result<Tensor>> Model<F> {
    fn new(varmap: &VarMap, loss: F) -> Result<Self> {
        let mut model = Self {
            loss,
            originals: vec![],
            point: vec![],
            probe: Probe::begin()?,
            center: 0.,
            rounding: 0.,
            unit: 0.,
        };
        model.keep(varmap)?;
        Ok(model)
    }

    /// Keeps the values of variables that are new in the map.
    fn keep(&mut self, varmap: &VarMap) -> Result<()> {
        for var in distinct_vars(varmap)? {
            if !self
                .originals
                .iter()
                .any(|(known, _)| known.id() == var.id())
            {
                let value = var.as_detached_tensor().copy()?;
                self.originals.push((var, value));
            }
        }
        self.point = self.originals.clone();
        Ok(())
    }

    /// The loss at the present values, and its number. Moves statistics.
    fn loss(&mut self) -> Result<(Tensor, f64)> {
        let loss = (self.loss)()?;
        if loss.elem_count() != 1 {
            candle::bail!(
                "check_gradients: expected a loss that is a scalar, got {:?}: take its mean or sum",
                loss.shape()
            )
        }
        if !matches!(loss.dtype(), DType::F32 | DType::F64) {
            candle::bail!(
                "check_gradients: expected a loss of F32 or F64, got {:?}: convert the model's \
                 output by `to_dtype` before the loss",
                loss.dtype()
            )
        }
        let number = to_f64(&loss)?[0];
        Ok((loss, number))
    }

    /// Checks that the loss is finite, and a function of the variables alone.
    fn check_loss(&mut self) -> Result<()> {
        let [first, second] = [(); 2].map(|()| {
            self.return_to_point()?;
            self.loss()
        });
        let ((loss, first), (_, second)) = (first?, second?);
        if !first.is_finite() {
            candle::bail!("check_gradients: expected a finite loss, got {first}")
        }
        self.unit = unit(loss.dtype());
        // Some operations on a GPU add in any order.
        if (first - second).abs() > 64. * self.unit * first.abs() || second.is_nan() {
            candle::bail!(
                "check_gradients: expected a loss that depends on the variables alone, got {first} \
                 and then {second}: take the batch outside of the closure, turn dropout off, and \
                 clear caches, such as those of keys and values, in each call"
            )
        }
        Ok(())
    }

    /// Makes a point close by the point of the check, unless the loss is not finite there.
    fn move_point(&mut self, candidates: &[Candidate]) -> Result<()> {
        self.return_to_point()?;
        for one in candidates {
            one.move_by(NEARBY, &one.direction(DRAW_NEARBY))?;
        }
        let copies = (candidates.iter())
            .map(|one| Ok((one.var.id(), one.var.as_detached_tensor().copy()?)))
            .collect::<Result<HashMap<_, _>>>()?;
        if self.loss().is_ok_and(|(_, loss)| loss.is_finite()) {
            for (var, value) in &mut self.point {
                if let Some(copy) = copies.get(&var.id()) {
                    *value = copy.clone();
                }
            }
        }
        self.return_to_point()
    }

    /// The gradients at the point.
    fn gradients(&mut self) -> Result<GradStore> {
        self.return_to_point()?;
        let (loss, center) = self.loss()?;
        self.center = center;
        loss.backward()
    }

    /// Measures the rounding error of the loss: its second differences so close to the point that
    /// nothing else is left of them.
    fn measure_rounding(&mut self, candidates: &[Candidate]) -> Result<()> {
        let mut h = FIRST_STEP / STEP_FACTOR.powi(STEPS as i32 - 1);
        let mut seconds = [0.; 4];
        // The least by which the loss moves, which is more than its dtype's unit if it was rounded
        // on the way.
        let mut least = f64::INFINITY;
        let mut moves = |loss: f64, center: f64| {
            let moved = (loss - center).abs();
            least = if moved > 0. { least.min(moved) } else { least };
            moved > 0.
        };
        for (draw, second) in (DRAW_ROUNDING..).zip(&mut seconds) {
            let [up, down] = [h, -h].map(|h| self.loss_at(candidates, h, draw));
            let (up, down) = (up?, down?);
            moves(up, self.center);
            moves(down, self.center);
            *second = (up + down) / 2. - self.center;
            h *= STEP_FACTOR;
        }
        while h < 4. && !moves(self.loss_at(candidates, h, DRAW_ROUNDING)?, self.center) {
            h *= STEP_FACTOR;
        }
        let seen = norm(&seconds) / (seconds.len() as f64).sqrt();
        self.rounding = match least.is_finite() {
            true => seen.max(least / 2.),
            false => seen.max(self.unit),
        };
        Ok(())
    }

    /// The loss where all candidates have moved along the directions of `draw`.
    fn loss_at(&mut self, candidates: &[Candidate], h: f64, draw: u64) -> Result<f64> {
        self.return_to_point()?;
        for one in candidates {
            one.move_by(h, &one.direction(draw))?;
        }
        Ok(self.loss()?.1)
    }

    /// The derivative along `directions`, of which each of `group` has its own.
    fn derivative(&mut self, group: &[Candidate], directions: &[Vec<f64>]) -> Result<Derivative> {
        let magnitude = root_of_squares(group.iter().map(Candidate::magnitude));
        let length = root_of_squares(directions.iter().map(|direction| norm(direction)));
        let mut best: Option<Derivative> = None;
        let mut least = f64::INFINITY;
        let mut last: Option<Step> = None;
        // Two steps may agree by chance, so it does not fall faster than near kinks.
        let mut truncation = 0f64;
        let mut h = FIRST_STEP;
        for _ in 0..STEPS {
            let step = self.step(group, directions, h)?;
            h /= STEP_FACTOR;
            if !(step.measured.is_finite() && step.second.is_finite()) {
                last = None;
                continue;
            }
            let Some(before) = last.replace(step) else {
                continue;
            };
            truncation = Step::truncation(before, step).max(truncation / STEP_FACTOR);
            let found = Derivative {
                gradient: step.gradient,
                measured: step.measured,
                error: truncation + step.rounding,
                least,
                length,
            };
            let size = magnitude.max(step.measured.abs());
            if step.rounding <= RESOLVED * size {
                least = least.min(found.difference());
            }
            let best = best.insert(match best {
                Some(best) if best.error <= found.error => best,
                _ => found,
            });
            // A difference is worth a closer look, as far as rounding allows.
            let agrees = found.difference() <= ACCEPTED * size;
            if best.error <= ACCEPTED * size && agrees
                || step.rounding > best.error.max(RESOLVED * size)
            {
                break;
            }
        }
        match best {
            Some(best) => Ok(Derivative {
                least: least.min(best.difference()),
                ..best
            }),
            None => candle::bail!(
                "check_gradients: expected a loss that is finite near the variables' values, got \
                 NaN or infinity where {} and {} others move",
                group[0].name,
                group.len() - 1
            ),
        }
    }

    fn step(&mut self, group: &[Candidate], directions: &[Vec<f64>], h: f64) -> Result<Step> {
        let mut gradient = 0.;
        let mut losses = [0.; 2];
        // The variables round, so their gradients are multiplied by how far they went.
        for (loss, sign) in losses.iter_mut().zip([1., -1.]) {
            self.return_to_point()?;
            for (one, direction) in group.iter().zip(directions) {
                let moved = one.move_by(sign * h, direction)?;
                let terms = one.gradient.iter().zip(&moved).zip(&one.values);
                gradient += sign * terms.map(|((g, to), from)| g * (to - from)).sum::<f64>();
            }
            *loss = self.loss()?.1;
        }
        let [up, down] = losses;
        Ok(Step {
            h,
            gradient: gradient / (2. * h),
            measured: (up - down) / (2. * h),
            second: (up + down) / 2. - self.center,
            rounding: self.rounding.max(self.unit * up.abs().max(down.abs())) / h,
        })
    }
}

impl<F> Model<F> {
    /// Sets all variables to the point, and the statistics to those from before.
    fn return_to_point(&self) -> Result<()> {
        set_all(&self.point).and(self.probe.restore())
    }

    /// Sets everything to what it was before.
    fn restore(&self) -> Result<()> {
        set_all(&self.originals).and(self.probe.restore())
    }
}

impl<F> Drop for Model<F> {
    /// For a loss that panics.
    fn drop(&mut self) {
        let _ = self.restore();
    }
}

/// Sets each variable, whatever becomes of the others.
fn set_all(values: &[(Var, Tensor)]) -> Result<()> {
    let set = values.iter().map(|(var, value)| var.set(value));
    set.fold(Ok(()), Result::and)
}

fn check<F>(model: &mut Model<F>, varmap: &VarMap) -> Result<Vec<WrongGradient>>
where
    F: FnMut() -> Result<Tensor>,
{
    // The first call may make variables.
    model.loss()?;
    model.keep(varmap)?;
    let vars = variables(varmap)?;
    model.check_loss()?;
    let unmoved = candidates(&vars, None)?;
    model.move_point(&unmoved)?;
    drop(unmoved);

    let gradients = model.gradients()?;
    let mut candidates = candidates(&vars, Some(&gradients))?;
    drop(gradients);
    model.measure_rounding(&candidates)?;

    candidates.sort_by(|a, b| a.magnitude().total_cmp(&b.magnitude()));
    let mut wrong = vec![];
    for group in groups(&candidates) {
        if !is_suspect(model, group)? {
            continue;
        }
        for one in group {
            wrong.extend(wrong_gradient(model, one)?);
        }
    }
    mark_approximations(model, &mut wrong, &candidates)?;
    wrong.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(wrong)
}

/// Groups of candidates, which are sorted by magnitude, of similar ones, so that none hides another.
fn groups(mut candidates: &[Candidate]) -> Vec<&[Candidate]> {
    let mut groups = vec![];
    while let Some(first) = candidates.first() {
        let similar =
            candidates.partition_point(|one| one.magnitude() <= SIMILAR * first.magnitude());
        let (group, rest) = candidates.split_at(similar.min(GROUP));
        groups.push(group);
        candidates = rest;
    }
    groups
}

/// The variables at their present values. Without `gradients` none has one.
fn candidates(vars: &[(String, Var)], gradients: Option<&GradStore>) -> Result<Vec<Candidate>> {
    let mut candidates = vec![];
    for (name, var) in vars.iter().filter(|(_, var)| var.elem_count() > 0) {
        let values = to_f64(var)?;
        let gradient = gradients.and_then(|gradients| gradients.get(var));
        let gradient = gradient.map(to_f64).transpose()?.unwrap_or_default();
        if gradient.iter().any(|g| !g.is_finite()) {
            candle::bail!(
                "check_gradients: expected finite gradients of a finite loss, got NaN or infinity \
                 in that of {name}"
            )
        }
        let scale = norm(&values) / (values.len() as f64).sqrt();
        candidates.push(Candidate {
            name: name.clone(),
            var: var.clone(),
            values,
            gradient,
            scale,
        });
    }
    // Variables of zeros or of tiny numbers, such as a bias after a step, move nearly as far as the
    // others do.
    let mut scales: Vec<_> = candidates.iter().map(|one| one.scale).collect();
    scales.retain(|scale| *scale > 0.);
    scales.sort_by(f64::total_cmp);
    let median = scales.get(scales.len() / 2).copied().unwrap_or(1.);
    for one in &mut candidates {
        one.scale = match one.scale {
            0. => median,
            scale => scale.max(median / 10.),
        };
    }
    Ok(candidates)
}

/// `true` if a variable of `group` may have a wrong gradient.
///
/// The random directions show whatever the error of the gradients is. But they may all lie across
/// the gradients, where a wrong factor does not show, so the last one goes along them.
fn is_suspect<F>(model: &mut Model<F>, group: &[Candidate]) -> Result<bool>
where
    F: FnMut() -> Result<Tensor>,
{
    let magnitude = root_of_squares(group.iter().map(Candidate::magnitude));
    let along = (magnitude > 0.).then(|| group.iter().map(Candidate::ascent).collect());
    let random = |draw| group.iter().map(|one| one.direction(draw)).collect();
    for directions in (0..DRAWS).map(random).chain(along) {
        let directions: Vec<_> = directions;
        let derivative = model.derivative(group, &directions)?;
        let size = magnitude.max(derivative.gradient.abs());
        if derivative.difference() > SUSPECT * size + derivative.error
            || derivative.error > WRONG * size && magnitude > 0.
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The entry of a variable whose gradient is wrong.
fn wrong_gradient<F>(model: &mut Model<F>, one: &Candidate) -> Result<Option<WrongGradient>>
where
    F: FnMut() -> Result<Tensor>,
{
    let mut tries = try_alone(model, one, 0)?;
    if !differ(&tries, one.magnitude(), Derivative::difference) {
        return Ok(None);
    }
    // Kinks may look like a fault along some directions and at some h. A fault is one along all
    // others, and at every h.
    let again = try_alone(model, one, 1)?;
    if !differ(&again, one.magnitude(), |one| one.least) {
        return Ok(None);
    }
    tries.extend(again);
    let by_difference = |a: &&Derivative, b: &&Derivative| {
        let [a, b] = [a, b].map(|one| one.difference() / one.length);
        a.total_cmp(&b)
    };
    let worst = tries.iter().max_by(by_difference);
    Ok(worst.map(|worst| WrongGradient {
        name: one.name.clone(),
        gradient: worst.gradient / worst.length,
        measured: worst.measured / worst.length,
        approximation: false,
    }))
}

/// The derivatives along random directions, which show whatever the error of the gradient is, and
/// last along the gradient, where its length shows best; in round 1 along others.
fn try_alone<F>(model: &mut Model<F>, one: &Candidate, round: u64) -> Result<Vec<Derivative>>
where
    F: FnMut() -> Result<Tensor>,
{
    let draw = DRAWS + round * DRAWS_ALONE;
    let mut directions: Vec<_> = (draw..draw + DRAWS_ALONE)
        .map(|draw| one.direction(draw))
        .collect();
    if one.magnitude() > 0. {
        let mut ascent = one.ascent();
        if round > 0 {
            let aside = ascent.iter_mut().zip(&directions[0]);
            aside.for_each(|(along, aside)| *along = (*along + aside) / 2.);
        }
        directions.push(ascent);
    }
    let group = std::slice::from_ref(one);
    (directions.into_iter())
        .map(|direction| model.derivative(group, &[direction]))
        .collect()
}

/// `true` if the derivatives that [`try_alone`] found differ by more than their errors explain: those
/// along random directions in root mean square, or the one along the gradient. `magnitude` is what
/// is expected of the former.
fn differ(tries: &[Derivative], magnitude: f64, difference: fn(&Derivative) -> f64) -> bool {
    let (random, ascent) = tries.split_at(tries.len().min(DRAWS_ALONE as usize));
    let differ = |derivatives: &[Derivative], expected: f64| {
        let mean = |of: fn(&Derivative) -> f64| {
            root_of_squares(derivatives.iter().map(of)) / (derivatives.len() as f64).sqrt()
        };
        let size = mean(|one| one.measured).max(mean(|one| one.gradient));
        mean(difference) > WRONG * size.max(expected) + 3. * mean(|one| one.error)
    };
    differ(random, magnitude / 2.) || (!ascent.is_empty() && differ(ascent, 0.))
}

/// Finds the entries whose gradients depend on an approximation of PowerNorm: they are others if
/// nothing passes through it.
fn mark_approximations<F>(
    model: &mut Model<F>,
    wrong: &mut [WrongGradient],
    candidates: &[Candidate],
) -> Result<()>
where
    F: FnMut() -> Result<Tensor>,
{
    if wrong.is_empty() || !model.probe.has_approximated() {
        return Ok(());
    }
    model.return_to_point()?;
    let (loss, _) = model.loss()?;
    let exact = model.probe.without_approximations(|| loss.backward())?;
    for entry in wrong {
        let Some(one) = candidates.iter().find(|one| one.name == entry.name) else {
            continue;
        };
        let gradient = exact.get(&one.var).map(to_f64).transpose()?;
        let others = gradient.unwrap_or_default();
        let difference = one.gradient.iter().zip(&others).map(|(a, b)| a - b);
        // Two backwards on a GPU may add in another order.
        entry.approximation = root_of_squares(difference) > 1e-4 * norm(&one.gradient);
    }
    Ok(())
}

/// Half the distance from 1 to the next number.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON / 2.,
        _ => f64::from(f32::EPSILON) / 2.,
    }
}

fn to_f64(tensor: &Tensor) -> Result<Vec<f64>> {
    // On the CPU: Metal has no f64.
    let tensor = tensor.detach().to_device(&Device::Cpu)?;
    tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

fn norm(values: &[f64]) -> f64 {
    root_of_squares(values.iter().copied())
}

fn root_of_squares(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}
