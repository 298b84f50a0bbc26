//! The layer written twice more, from the paper's equations alone.
//!
//! - [`Oracle`]: plain `f64` loops, a line an equation, both recipes with their state. It judges
//!   values.
//! - [`composed`]: one forward in candle's own differentiable operations. Its autograd judges
//!   gradients where they are exact, and its speed is what a fused layer has to beat.
//!
//! Self-contained, so that a bench can include the file by its path.
#![allow(dead_code)] // every includer uses its share

use candle::{D, DType, Result, Tensor};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Recipe {
    Paper,
    Fairseq,
}

/// Settings of the equations.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub eps: f64,
    pub alpha_fwd: f64,
    pub alpha_bwd: f64,
    pub warmup_steps: usize,
    /// Groups of group scaling, if there is one.
    pub groups: Option<usize>,
    /// PN-V: the batch's statistic at every step.
    pub batch_statistics: bool,
    pub recipe: Recipe,
}

/// Values, and the size of the largest terms that were added up to them: rounding errors are
/// proportional to the terms, which exceed the values where they cancel.
#[derive(Clone, Debug)]
pub struct Quantity {
    pub values: Vec<f64>,
    pub magnitude: f64,
}

impl Quantity {
    fn new(values: Vec<f64>, terms: impl IntoIterator<Item = f64>) -> Self {
        let magnitude = terms.into_iter().fold(0., f64::max);
        Self { values, magnitude }
    }
}

impl From<Vec<f64>> for Quantity {
    /// Values without cancellation.
    fn from(values: Vec<f64>) -> Self {
        let terms: Vec<f64> = values.iter().map(|v| v.abs()).collect();
        Self::new(values, terms)
    }
}

/// The layer and its state.
#[derive(Clone, Debug)]
pub struct Oracle {
    pub spec: Spec,
    pub weight: Vec<f64>,
    pub bias: Vec<f64>,
    /// ψ²
    pub phi: Vec<f64>,
    /// ν
    pub nu: Vec<f64>,
    /// t
    pub steps: usize,
    /// Size of the terms that ν was summed from.
    nu_terms: Vec<f64>,
}

/// A forward, and what its backward needs of it.
#[derive(Clone, Debug)]
pub struct Pass {
    pub y: Quantity,
    /// ψ_B² of a training forward with a kept row.
    pub batch_phi: Option<Vec<f64>>,
    kind: Kind,
    /// X̃, the input after the group scaling, and 1/rms of its row and group.
    x_tilde: Vec<f64>,
    inv_scale: Vec<f64>,
    x_hat: Vec<f64>,
    /// The divisor of the backward, a channel.
    backward_rms: Vec<f64>,
    /// The rows that enter Γ, Λ and the gradients.
    counted: Vec<bool>,
}

/// The statistic that normalized a forward.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Evaluation,
    BatchStatistic,
    RunningStatistic,
}

pub struct Gradients {
    pub dx: Quantity,
    pub dweight: Quantity,
    pub dbias: Quantity,
    /// Γ
    pub gamma: Vec<f64>,
    /// Λ
    pub lambda: Vec<f64>,
}

impl Oracle {
    /// A fresh layer: ψ² = 1, ν = 0, t = 0.
    pub fn new(spec: Spec, weight: Vec<f64>, bias: Vec<f64>) -> Self {
        let size = weight.len();
        Self {
            spec,
            weight,
            bias,
            phi: vec![1.; size],
            nu: vec![0.; size],
            steps: 0,
            nu_terms: vec![0.; size],
        }
    }

    /// ν with the size of its terms.
    pub fn nu(&self) -> Quantity {
        Quantity::new(self.nu.clone(), self.nu_terms.clone())
    }

    pub fn evaluate(&self, x: &[f64], keep: Option<&[bool]>) -> Pass {
        let rms = self.root(&self.phi);
        self.forward(x, keep, Kind::Evaluation, &rms, rms.clone())
    }

    /// A training forward: moves ψ² and t.
    pub fn train(&mut self, x: &[f64], keep: Option<&[bool]>) -> Pass {
        let kept = self.kept(x, keep);
        let n = kept.iter().filter(|&&keep| keep).count();
        if n == 0 {
            return self.evaluate(x, keep);
        }
        let (x_tilde, _) = self.layer_scale(x);
        // ψ_B² = (1/n) Σ m x̃²
        let batch_phi: Vec<f64> = self
            .sum_columns(&kept, |k| x_tilde[k] * x_tilde[k])
            .iter()
            .map(|sum| sum / n as f64)
            .collect();
        let t = self.steps + 1;
        let by_batch = self.spec.batch_statistics || t <= self.spec.warmup_steps;
        let (kind, rms) = if by_batch {
            (Kind::BatchStatistic, self.root(&batch_phi))
        } else {
            (Kind::RunningStatistic, self.root(&self.phi))
        };
        let backward_rms = match self.spec.recipe {
            Recipe::Paper => rms.clone(),
            Recipe::Fairseq => self.root(&batch_phi),
        };
        let pass = self.forward(x, keep, kind, &rms, backward_rms);
        self.steps = t;
        self.phi = (self.phi.iter().zip(&batch_phi))
            .map(|(&phi, &batch_phi)| self.next_phi(t, phi, batch_phi))
            .collect();
        Pass {
            batch_phi: Some(batch_phi),
            ..pass
        }
    }

    /// The gradients of Σ y·dy. Moves ν if `pass` was a training forward.
    pub fn backward(&mut self, pass: &Pass, dy: &[f64]) -> Gradients {
        let Pass {
            kind,
            x_tilde,
            inv_scale,
            x_hat,
            backward_rms: rms,
            counted,
            ..
        } = pass;
        let size = self.weight.len();
        let rows = counted.iter().filter(|&&counts| counts).count() as f64;
        let mean = |sums: Vec<f64>| sums.iter().map(|sum| sum / rows).collect::<Vec<_>>();
        let g: Vec<f64> = (0..dy.len())
            .map(|k| self.weight[k % size] * dy[k])
            .collect();

        // Γ = mean X̂², Λ = mean g X̂
        let gamma = mean(self.sum_columns(counted, |k| x_hat[k] * x_hat[k]));
        let lambda = mean(self.sum_columns(counted, |k| g[k] * x_hat[k]));
        let lambda_terms = mean(self.rss_columns(counted, |k| g[k] * x_hat[k]));

        // The factor of X̂ in ∂L/∂X̃, and the size of its terms.
        let (correction, correction_terms) = match (kind, self.spec.recipe) {
            (Kind::Evaluation, _) => (vec![0.; size], vec![0.; size]),
            (Kind::BatchStatistic, Recipe::Paper) => {
                let terms = (0..size).map(|c| lambda[c].abs() + lambda_terms[c]);
                (lambda.clone(), terms.collect())
            }
            _ => (self.nu.clone(), self.nu_terms.clone()),
        };

        let mut dx = vec![0.; dy.len()];
        let mut dx_terms = vec![0.; dy.len()];
        let width = size / self.spec.groups.unwrap_or(size);
        for start in (0..dy.len()).step_by(width) {
            if !counted[start / size] {
                continue;
            }
            let group = start..start + width;
            // ∂L/∂X̃ = (g − correction X̂) / D
            let dx_tilde = |k: usize| (g[k] - correction[k % size] * x_hat[k]) / rms[k % size];
            let terms = |k: usize| {
                (g[k].abs() + correction_terms[k % size] * x_hat[k].abs()) / rms[k % size]
            };
            if self.spec.groups.is_none() {
                dx[start] = dx_tilde(start);
                dx_terms[start] = terms(start);
                continue;
            }
            // ∂L/∂x = r (∂L/∂x̃ − x̃ mean_group(∂L/∂x̃ ⊙ x̃))
            let mean =
                |term: &dyn Fn(usize) -> f64| group.clone().map(term).sum::<f64>() / width as f64;
            let m = mean(&|k| dx_tilde(k) * x_tilde[k]);
            let m_terms = mean(&|k| terms(k) * x_tilde[k].abs());
            for k in group {
                dx[k] = inv_scale[k] * (dx_tilde(k) - x_tilde[k] * m);
                dx_terms[k] = inv_scale[k] * (terms(k) + x_tilde[k].abs() * m_terms);
            }
        }

        let gradients = Gradients {
            dx: Quantity::new(dx, dx_terms),
            dweight: Quantity::new(
                self.sum_columns(counted, |k| dy[k] * x_hat[k]),
                self.rss_columns(counted, |k| dy[k] * x_hat[k]),
            ),
            dbias: Quantity::new(
                self.sum_columns(counted, |k| dy[k]),
                self.rss_columns(counted, |k| dy[k]),
            ),
            gamma,
            lambda,
        };
        if *kind != Kind::Evaluation {
            for (c, terms) in lambda_terms.into_iter().enumerate() {
                self.update_nu(c, gradients.gamma[c], gradients.lambda[c], terms);
            }
        }
        gradients
    }

    fn forward(
        &self,
        x: &[f64],
        keep: Option<&[bool]>,
        kind: Kind,
        rms: &[f64],
        backward_rms: Vec<f64>,
    ) -> Pass {
        let size = self.weight.len();
        let kept = self.kept(x, keep);
        let (x_tilde, inv_scale) = self.layer_scale(x);
        // X̂ = X̃/D, Y = γ X̂ + β
        let x_hat: Vec<f64> = (0..x.len()).map(|k| x_tilde[k] / rms[k % size]).collect();
        let scaled = |k: usize| self.weight[k % size] * x_hat[k];
        let y = (0..x.len()).map(|k| scaled(k) + self.bias[k % size]);
        let terms = (0..x.len()).map(|k| scaled(k).abs() + self.bias[k % size].abs());
        Pass {
            y: Quantity::new(y.collect(), terms),
            batch_phi: None,
            kind,
            counted: match self.spec.recipe {
                Recipe::Paper => kept.clone(),
                Recipe::Fairseq => vec![true; kept.len()],
            },
            x_tilde,
            inv_scale,
            x_hat,
            backward_rms,
        }
    }

    fn next_phi(&self, t: usize, phi: f64, batch_phi: f64) -> f64 {
        let Spec {
            alpha_fwd: alpha,
            warmup_steps,
            ..
        } = self.spec;
        let t_f64 = t as f64;
        let cumulative = phi * (t_f64 - 1.) / t_f64 + batch_phi / t_f64;
        let average = |phi: f64| alpha * phi + (1. - alpha) * batch_phi;
        let if_finite = |new: f64| if new.is_finite() { new } else { phi };
        match self.spec.recipe {
            Recipe::Paper if t <= warmup_steps => if_finite(cumulative),
            Recipe::Paper => if_finite(average(phi)),
            Recipe::Fairseq if t < warmup_steps => average(cumulative),
            Recipe::Fairseq => average(phi),
        }
    }

    /// ν of channel `c` after a backward: Eq. 13, under `Paper` with the guard on its factor.
    fn update_nu(&mut self, c: usize, gamma: f64, lambda: f64, lambda_terms: f64) {
        let share = 1. - self.spec.alpha_bwd;
        let mut factor = 1. - share * gamma;
        // An error of Γ moves the factor by as much, however little is left of the factor.
        let mut cancelled = share * gamma * self.nu[c].abs();
        if self.spec.recipe == Recipe::Paper {
            // An infinite Γ is an overflowed batch, though its clamped factor is a number.
            if !gamma.is_finite() {
                return;
            }
            // Far beyond the clamp no rounding matters.
            if factor < -0.01 {
                cancelled = 0.;
            }
            factor = factor.max(0.);
            if !(factor * self.nu[c] + share * lambda).is_finite() {
                return;
            }
        }
        self.nu[c] = factor * self.nu[c] + share * lambda;
        self.nu_terms[c] = factor.abs() * self.nu_terms[c] + cancelled + share * lambda_terms;
    }

    /// X̃ and 1/sqrt(mean of x² over the group + ε), both for each element.
    fn layer_scale(&self, x: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let Some(groups) = self.spec.groups else {
            return (x.to_vec(), vec![1.; x.len()]);
        };
        let width = self.weight.len() / groups;
        let inv_scale: Vec<f64> = x
            .chunks(width)
            .flat_map(|group| {
                let mean_square = group.iter().map(|x| x * x).sum::<f64>() / width as f64;
                std::iter::repeat_n(1. / (mean_square + self.spec.eps).sqrt(), width)
            })
            .collect();
        let x_tilde = x.iter().zip(&inv_scale).map(|(x, r)| x * r).collect();
        (x_tilde, inv_scale)
    }

    fn root(&self, phi: &[f64]) -> Vec<f64> {
        phi.iter().map(|phi| (phi + self.spec.eps).sqrt()).collect()
    }

    fn kept(&self, x: &[f64], keep: Option<&[bool]>) -> Vec<bool> {
        let rows = x.len() / self.weight.len();
        keep.map_or(vec![true; rows], <[bool]>::to_vec)
    }

    /// Each column's sum of `term(index)` over the rows that count; the others are not looked at.
    fn sum_columns(&self, counted: &[bool], term: impl Fn(usize) -> f64) -> Vec<f64> {
        let mut sums = vec![0.; self.weight.len()];
        let size = sums.len();
        for (row, _) in counted.iter().enumerate().filter(|&(_, &counts)| counts) {
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum += term(row * size + c);
            }
        }
        sums
    }

    /// The root of the sum of squares: the size of the partial sums of terms of random sign.
    fn rss_columns(&self, counted: &[bool], term: impl Fn(usize) -> f64) -> Vec<f64> {
        let squares = self.sum_columns(counted, |k| term(k).powi(2));
        squares.iter().map(|square| square.sqrt()).collect()
    }
}

/// A forward in candle's operations: normalized by the given ψ² (`[C]`), or by the ψ_B² of the kept
/// rows of `xs` (PN-V, a warm-up step) where there is none.
///
/// `keep` is `U8`, shaped as `xs` without its last dimension. The gradient that autograd finds is
/// the layer's if the upstream gradient of padded rows is 0.
pub fn composed(
    xs: &Tensor,
    affine: Option<(&Tensor, &Tensor)>,
    keep: Option<&Tensor>,
    phi: Option<&Tensor>,
    spec: &Spec,
) -> Result<Tensor> {
    let size = xs.dim(D::Minus1)?;
    let rows = xs.reshape(((), size))?;
    let x_tilde = match spec.groups {
        None => rows,
        Some(groups) => {
            let grouped = rows.reshape(((), groups, size / groups))?;
            let rms = (grouped.sqr()?.mean_keepdim(D::Minus1)? + spec.eps)?.sqrt()?;
            grouped.broadcast_div(&rms)?.reshape(((), size))?
        }
    };
    let phi = match (phi, keep) {
        (Some(phi), _) => phi.clone(),
        (None, None) => x_tilde.sqr()?.mean(0)?,
        (None, Some(keep)) => {
            let keep = keep.to_dtype(DType::F64)?.flatten_all()?;
            let share = (&keep / keep.sum_all()?.to_scalar::<f64>()?)?;
            let share = share.to_dtype(xs.dtype())?.unsqueeze(1)?;
            x_tilde.sqr()?.broadcast_mul(&share)?.sum(0)?
        }
    };
    let ys = x_tilde.broadcast_div(&(phi + spec.eps)?.sqrt()?)?;
    let ys = match affine {
        None => ys,
        Some((weight, bias)) => ys.broadcast_mul(weight)?.broadcast_add(bias)?,
    };
    ys.reshape(xs.shape())
}

/// A value of GELU.
pub struct Gelu {
    /// Of the exponential in it: 2 √(2/π) (x + 0.044715 x³), or x²/2 by the error function.
    pub v: f64,
    pub y: f64,
    pub slope: f64,
    /// The slope's terms with one sign. Its own cancel near x = −0.752.
    pub terms: f64,
}

/// GELU by its tanh approximation, with the logistic function in place of `(1 + tanh)/2`, whose
/// digits cancel for negative x.
pub fn gelu(x: f64) -> Gelu {
    let alpha = 2. * (2. / std::f64::consts::PI).sqrt();
    let v = alpha * x * (1. + 0.044715 * x * x);
    let (sigma, other) = (1. / (1. + (-v).exp()), 1. / (1. + v.exp()));
    let of_v = x * alpha * (1. + 3. * 0.044715 * x * x) * other;
    Gelu {
        v,
        y: x * sigma,
        slope: sigma * (1. + of_v),
        terms: sigma * (1. + of_v.abs()),
    }
}

/// GELU by the error function, with `erfc(-x/√2)` in place of `1 + erf(x/√2)`.
pub fn gelu_erf(x: f64) -> Gelu {
    let v = x * x / 2.;
    let below = candle::cpu::erf::erfc_f64(-x * 0.5f64.sqrt()) / 2.;
    let of_density = x * (-v).exp() / (2. * std::f64::consts::PI).sqrt();
    Gelu {
        v,
        y: x * below,
        slope: below + of_density,
        terms: below + of_density.abs(),
    }
}
