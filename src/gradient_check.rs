//! A check of a model's gradients against differences of its loss.
//!
//! The derivative of the loss along a direction d is computed twice: as `g · d` from a backward's
//! gradients g, and as `(L(w + h d) − L(w − h d)) / 2h` from two forwards, which need no backward.
//! Where the two differ, the backward is wrong.
//!
//! A difference has errors of its own. Its truncation error shrinks with h (as h² where the loss is
//! smooth, as h where it has kinks), and its rounding error grows with 1/h. So h runs down a ladder:
//! the change from step to step bounds the truncation error, and second differences, of which little
//! but rounding is left at the smallest h, measure the rounding error. A step is accepted once both
//! are small beside the gradient.

use crate::op::probe::Probe;
use crate::vars::{distinct_vars, named_trainable_vars};
use candle::backprop::GradStore;
use candle::{DType, Device, Result, Tensor, Var};
use candle_nn::VarMap;
use std::fmt;

/// Variables that are tried at once. A wrong gradient among them shows by about a third of what it
/// shows by itself.
const GROUP: usize = 8;

/// Directions for each group, and for each variable by itself.
const DRAWS: u64 = 3;
const DRAWS_ALONE: u64 = 4;

/// The ladder of h: variables move by about this fraction of their root mean square. Where kinks or
/// curvature spoil the first difference, h falls by the factor.
const FIRST_STEP: f64 = 1. / 64.;
const STEP_FACTOR: f64 = 4.;
const STEPS: usize = 10;

/// Below this h, second differences are mostly rounding.
const ROUNDING_STEP: f64 = 1. / 1000.;

/// A step of the ladder is accepted if its error is at most this fraction of the gradient.
const ACCEPTED: f64 = 0.002;

/// A group whose derivatives differ by more than this fraction of its gradient is looked at one
/// variable at a time.
const SUSPECT: f64 = 0.004;

/// A variable's gradient is wrong if the derivatives differ by more than this fraction, beyond what
/// the error of the differences explains. Gradients that are right differ by 1e-5 to 5e-3, those of
/// models that an operation without a backward breaks by 0.04 to 3 (benches/results/ports.md).
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
/// Along a random direction d the loss changes at the rate `g · d` if g is its gradient, and at the
/// rate `(L(w + h d) − L(w − h d)) / 2h` as measured, with an error that h² bounds. The variables are
/// first tried in groups of eight, and those of a group that differs one by one. h begins at 1/64 of
/// each variable's root mean square and falls until truncation and rounding are small. A gradient
/// counts as wrong if it differs from what is measured by more than 2 %, in root mean square over
/// the directions, beyond the measurement's own error. The directions are the same in every call.
///
/// A variable whose gradient and measured derivative are both 0 within rounding is right, such as
/// one that the loss does not use, or the bias of an attention's keys. The variables are those of
/// [`trainable_vars`](crate::trainable_vars).
///
/// # State
///
/// Afterwards every variable of the map has the bits that it had before, and so have PowerNorm's
/// statistics and step count, in the map or not; also after an error. Other variables that the loss
/// changes stay changed. While the function runs, nothing else may use the model.
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
/// build the model for the check from a `VarBuilder` in `F32`. A gradient that is too small for the
/// precision of the loss cannot be told from 0.
///
/// # Cost
///
/// Two forwards and a backward, then 12 or more forwards for each 8 variables if all is right, and
/// some 16 to 50 for each variable of a group in which one is wrong. A copy of all variables is kept.
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
    let mut model = Model::new(varmap, loss)?;
    let result = check(&mut model, vars);
    // Also after an error, which then comes first.
    let restored = model.restore();
    let wrong = result?;
    restored?;
    Ok(wrong)
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
    /// All variables of the map, once each, with the values to restore.
    kept: Vec<(Var, Tensor)>,
    probe: Probe,
    /// The loss at these values.
    center: f64,
    /// Rounding errors of the loss that have been seen: the sum of their squares, and their number.
    rounding: (f64, f64),
}

impl<F: FnMut() -> Result<Tensor>> Model<F> {
    fn new(varmap: &VarMap, loss: F) -> Result<Self> {
        let with_copy = |var: Var| {
            let copy = var.as_detached_tensor().copy()?;
            Ok((var, copy))
        };
        let vars = distinct_vars(varmap)?.into_iter();
        Ok(Self {
            loss,
            kept: vars.map(with_copy).collect::<Result<_>>()?,
            probe: Probe::begin()?,
            center: 0.,
            rounding: (0., 0.),
        })
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

    /// The gradients at the values to restore, of which the loss must be a function.
    fn gradients(&mut self) -> Result<GradStore> {
        self.restore()?;
        let (_, first) = self.loss()?;
        self.restore()?;
        let (loss, second) = self.loss()?;
        if !first.is_finite() {
            candle::bail!("check_gradients: expected a finite loss, got {first}")
        }
        // Some operations on a GPU add in any order.
        let difference = (first - second).abs();
        if difference > 64. * unit(loss.dtype()) * first.abs() || second.is_nan() {
            candle::bail!(
                "check_gradients: expected a loss that depends on the variables alone, got {first} \
                 and then {second}: take the batch outside of the closure, turn dropout off, and \
                 clear caches, such as those of keys and values, in each call"
            )
        }
        self.center = second;
        let rounding = difference + unit(loss.dtype()) * second.abs();
        self.rounding = (rounding * rounding, 1.);
        loss.backward()
    }

    /// The derivative along `directions`, of which each of `group` has its own.
    fn derivative(&mut self, group: &[Candidate], directions: &[Vec<f64>]) -> Result<Derivative> {
        let magnitude = root_of_squares(group.iter().map(Candidate::magnitude));
        let length = root_of_squares(directions.iter().map(|direction| norm(direction)));
        let mut best: Option<Derivative> = None;
        let mut last: Option<Step> = None;
        // Two steps may agree by chance, so it does not fall faster than this.
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
            truncation = Step::truncation(before, step).max(truncation / 8.);
            let error = truncation + self.rounding(before, step) / step.h;
            if best.is_none_or(|best| error < best.error) {
                best = Some(Derivative {
                    gradient: step.gradient,
                    measured: step.measured,
                    error,
                    length,
                });
            }
            let best = best.map_or(f64::INFINITY, |best| best.error);
            let accepted = ACCEPTED * magnitude.max(step.measured.abs());
            // A difference is worth a closer look.
            let agrees = (step.gradient - step.measured).abs() <= accepted;
            if best <= accepted && agrees || error > 2. * best {
                break;
            }
        }
        match best {
            Some(best) => Ok(best),
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
            self.restore()?;
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
        })
    }

    /// The rounding error of a loss, from all that was seen of it so far.
    fn rounding(&mut self, before: Step, step: Step) -> f64 {
        if step.h < ROUNDING_STEP {
            // Of a smooth loss the sixteenth part is left.
            let rounding = step.second - before.second / (STEP_FACTOR * STEP_FACTOR);
            self.rounding.0 += rounding * rounding;
            self.rounding.1 += 1.;
        }
        (self.rounding.0 / self.rounding.1).sqrt()
    }
}

impl<F> Model<F> {
    fn restore(&self) -> Result<()> {
        let mut result = self.probe.restore();
        for (var, value) in &self.kept {
            // Each is tried, whatever became of the others.
            result = result.and(var.set(value));
        }
        result
    }
}

impl<F> Drop for Model<F> {
    /// For a loss that panics.
    fn drop(&mut self) {
        let _ = self.restore();
    }
}

fn check<F>(model: &mut Model<F>, vars: Vec<(String, Var)>) -> Result<Vec<WrongGradient>>
where
    F: FnMut() -> Result<Tensor>,
{
    let gradients = model.gradients()?;
    let mut candidates = candidates(vars, &gradients)?;
    drop(gradients);
    // Of one magnitude in a group, so that none hides the others.
    candidates.sort_by(|a, b| a.magnitude().total_cmp(&b.magnitude()));
    let with_gradient = candidates.partition_point(|one| one.magnitude() == 0.);
    let (without, with) = candidates.split_at(with_gradient);

    let mut wrong = vec![];
    for group in without.chunks(GROUP).chain(with.chunks(GROUP)) {
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

fn candidates(vars: Vec<(String, Var)>, gradients: &GradStore) -> Result<Vec<Candidate>> {
    let mut candidates = vec![];
    for (name, var) in vars.into_iter().filter(|(_, var)| var.elem_count() > 0) {
        let values = to_f64(&var)?;
        let gradient = match gradients.get(&var) {
            Some(gradient) => to_f64(gradient)?,
            None => vec![],
        };
        if gradient.iter().any(|g| !g.is_finite()) {
            candle::bail!(
                "check_gradients: expected finite gradients of a finite loss, got NaN or infinity \
                 in that of {name}"
            )
        }
        let scale = norm(&values) / (values.len() as f64).sqrt();
        candidates.push(Candidate {
            name,
            var,
            values,
            gradient,
            scale,
        });
    }
    // Variables of zeros, such as a fresh bias, move as far as the others do.
    let mut scales: Vec<_> = candidates.iter().map(|one| one.scale).collect();
    scales.retain(|scale| *scale > 0.);
    scales.sort_by(f64::total_cmp);
    let median = scales.get(scales.len() / 2).copied().unwrap_or(1.);
    for one in candidates.iter_mut().filter(|one| one.scale == 0.) {
        one.scale = median;
    }
    Ok(candidates)
}

/// `true` if a variable of `group` may have a wrong gradient.
fn is_suspect<F>(model: &mut Model<F>, group: &[Candidate]) -> Result<bool>
where
    F: FnMut() -> Result<Tensor>,
{
    let magnitude = root_of_squares(group.iter().map(Candidate::magnitude));
    for draw in 0..DRAWS {
        let directions: Vec<_> = group.iter().map(|one| one.direction(draw)).collect();
        let derivative = model.derivative(group, &directions)?;
        if derivative.difference() > SUSPECT * magnitude + derivative.error
            || derivative.error > WRONG * magnitude && magnitude > 0.
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
    let group = std::slice::from_ref(one);
    let mut along = |direction| model.derivative(group, &[direction]);
    // Along random directions, whatever the error of the gradient is, and along the gradient itself,
    // where its length shows best.
    let mut tries = vec![];
    for draw in 0..DRAWS_ALONE {
        tries.push(along(one.direction(DRAWS + draw))?);
    }
    let mut wrong = differ(&tries, one.magnitude());
    if one.magnitude() > 0. {
        let ascent = along(one.ascent())?;
        wrong |= differ(&[ascent], 0.);
        tries.push(ascent);
    }
    let by_difference = |a: &&Derivative, b: &&Derivative| {
        let [a, b] = [a, b].map(|one| one.difference() / one.length);
        a.total_cmp(&b)
    };
    let worst = tries.iter().max_by(by_difference).filter(|_| wrong);
    Ok(worst.map(|worst| WrongGradient {
        name: one.name.clone(),
        gradient: worst.gradient / worst.length,
        measured: worst.measured / worst.length,
        approximation: false,
    }))
}

/// `true` if the derivatives differ by more than their errors explain, in root mean square.
/// `expected` is how large such derivatives are.
fn differ(derivatives: &[Derivative], expected: f64) -> bool {
    let mean = |of: fn(&Derivative) -> f64| {
        root_of_squares(derivatives.iter().map(of)) / (derivatives.len() as f64).sqrt()
    };
    let size = mean(|one| one.measured)
        .max(mean(|one| one.gradient))
        .max(expected / 2.);
    mean(Derivative::difference) > WRONG * size + 3. * mean(|one| one.error)
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
    model.restore()?;
    let (loss, _) = model.loss()?;
    let exact = model.probe.without_approximations(|| loss.backward())?;
    for entry in wrong {
        let Some(one) = candidates.iter().find(|one| one.name == entry.name) else {
            continue;
        };
        let gradient = exact.get(&one.var).map(to_f64).transpose()?;
        entry.approximation = gradient.unwrap_or_default() != one.gradient;
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
