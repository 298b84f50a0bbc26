//! The paper's theory, as properties of random cases, in `f64`.

use crate::cases;
use crate::common::*;
use candle::DType;
use candle_powernorm::{PowerNormConfig, Recipe, Statistics};
use proptest::prelude::*;

/// 8·√n·u, of `f64` sums.
fn rounding(n: usize) -> f64 {
    8. * (n as f64).sqrt() * precision(DType::F64).0
}

/// The column `c` of a matrix of `size` columns.
fn column(values: &[f64], size: usize, c: usize) -> Vec<f64> {
    values.iter().skip(c).step_by(size).copied().collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn pn_v(eps: f64) -> PowerNormConfig {
    eps.with_groups(None).with_statistics(Statistics::Batch)
}

/// Running statistics from the first step on.
fn running(eps: f64, alpha_bwd: f64) -> PowerNormConfig {
    eps.with_groups(None)
        .with_warm_up(0)
        .with(|config| config.alpha_bwd = alpha_bwd)
}

proptest! {
    #![proptest_config(cases(64))]

    /// Lemma 2: ‖∂L/∂X‖² = (1/ψ_B²) (‖g‖² − ⟨g, X̂/√n⟩²) a channel, with g = γ ∂L/∂Y.
    ///
    /// With ε, from ∂L/∂X = (g − Λ X̂)/D, nΛ = ⟨g, X̂⟩ and nΓ = ‖X̂‖²:
    /// D² ‖∂L/∂X‖² = ‖g‖² − 2Λ·nΛ + Λ²·nΓ = ‖g‖² − nΛ² (2 − Γ),
    /// where nΛ² = ⟨g, X̂/√n⟩², and Γ = ψ_B²/D² is the lemma's 1 as ε goes to 0.
    #[test]
    fn lemma_2(seed: u64, rows in 1..40usize, size in 1..12usize, log_eps in -12.0..0.0) {
        let eps = 10f64.powf(log_eps);
        let mut data = Data::new(seed);
        let twin = Twin::new(&mut data, size, pn_v(eps), DType::F64);
        let batch = Batch::random(&mut data, &[rows, size], DType::F64, false);
        let dx = to_f64(&run(&twin.layer, &batch, true).dx);
        let (x, dy) = (to_f64(&batch.xs), to_f64(&batch.dy));
        for c in 0..size {
            let [x, dy, dx] = [&x, &dy, &dx].map(|values| column(values, size, c));
            let n = rows as f64;
            let square = dot(&x, &x) / n + eps;
            let x_hat: Vec<f64> = x.iter().map(|x| x / square.sqrt()).collect();
            let g: Vec<f64> = dy.iter().map(|dy| twin.oracle.weight[c] * dy).collect();
            let (lambda, gamma) = (dot(&g, &x_hat) / n, dot(&x_hat, &x_hat) / n);
            let (norm, part) = (dot(&g, &g), n * lambda * lambda);
            let expected = norm - part * (2. - gamma);
            let actual = square * dot(&dx, &dx);
            // Each element of dx·D errs by at most δ times its terms |g| + (|Λ| + Λ')|X̂|, where Λ'
            // is the root of the sum of squares behind Λ, and n Λ'² ≤ ‖g‖². By Cauchy-Schwarz nΛ² ≤
            // ‖g‖² too, so that the squares of the terms add up to less than 12 ‖g‖², and the sum
            // of squares errs by twice δ times that.
            let error = 24. * rounding(rows) * norm;
            prop_assert!((actual - expected).abs() <= error,
                "channel {c}: {actual} is not {expected}");
            // Hence the gradient is no longer than the one that reaches X̂.
            prop_assert!(actual <= norm + error);
        }
    }

    /// A positive factor on a channel does not change PN-V's Y, and divides its ∂L/∂X.
    ///
    /// Up to ε: a factor s turns D into s·sqrt(ψ_B² + ε/s²), so that X̂ changes by the relative
    /// δ = |sqrt((ψ_B² + ε)/(ψ_B² + ε/s²)) − 1| ≤ ε |1 − 1/s²| / 2 min(..), and in
    /// s ∂L/∂X = (g − Λ X̂) s/D that factor enters 3 times (Λ, X̂, 1/D).
    #[test]
    fn pn_v_is_invariant_to_the_scale_of_a_channel(
        seed: u64, rows in 2..30usize, size in 1..10usize, log_scale in -3.0..3.0,
    ) {
        let eps = 1e-10;
        let mut data = Data::new(seed);
        let twin = Twin::new(&mut data, size, pn_v(eps), DType::F64);
        let batch = Batch::random(&mut data, &[rows, size], DType::F64, false);
        let channel = seed as usize % size;
        let scale = 10f64.powf(log_scale);
        let factor = |k: usize| if k % size == channel { scale } else { 1. };
        let x = to_f64(&batch.xs);
        let scaled: Vec<f64> = (0..x.len()).map(|k| factor(k) * x[k]).collect();
        let scaled = Batch { xs: tensor(&scaled, batch.xs.dims(), DType::F64), ..batch.clone() };
        let (plain, scaled) = (run(&twin.layer, &batch, true), run(&twin.layer, &scaled, true));

        let x = column(&x, size, channel);
        let square = dot(&x, &x) / rows as f64;
        let delta = eps * (1. - scale.powi(-2)).abs() / 2. / square;
        let allowed = 3.1 * delta + 2. * rounding(rows);
        let mut oracle = twin.oracle.clone();
        let pass = oracle.train(&to_f64(&batch.xs), None);
        let terms = oracle.backward(&pass, &to_f64(&batch.dy));
        let pairs = [
            ("y", &plain.y, &scaled.y, pass.y.magnitude, false),
            ("dx", &plain.dx, &scaled.dx, terms.dx.magnitude, true),
        ];
        for (name, plain, scaled, magnitude, divided) in pairs {
            let (plain, scaled) = (to_f64(plain), to_f64(scaled));
            for k in 0..plain.len() {
                let scaled = if divided { factor(k) * scaled[k] } else { scaled[k] };
                prop_assert!((scaled - plain[k]).abs() <= allowed * magnitude,
                    "{name}[{k}]: {scaled} is not {}", plain[k]);
            }
        }
    }
}

/// Γ and Λ of each channel in the next step, from the current state and the equations.
fn gamma_lambda(twin: &Twin, batch: &Batch) -> Vec<(f64, f64)> {
    let size = twin.oracle.weight.len();
    let (x, dy) = (to_f64(&batch.xs), to_f64(&batch.dy));
    let phi = to_f64(&twin.layer.running_phi().unwrap());
    (0..size)
        .map(|c| {
            let (x, dy) = (column(&x, size, c), column(&dy, size, c));
            let square = phi[c] + twin.oracle.spec.eps;
            let n = x.len() as f64;
            let gamma = dot(&x, &x) / n / square;
            let lambda = twin.oracle.weight[c] * dot(&dy, &x) / n / square.sqrt();
            (gamma, lambda)
        })
        .collect()
}

/// A batch whose entries lie between `low` and `high` in size.
fn bounded_batch(data: &mut Data, rows: usize, size: usize, low: f64, high: f64) -> Batch {
    let mut x = data.normal(rows * size);
    let sizes = data.uniform(rows * size, low, high);
    x.iter_mut()
        .zip(sizes)
        .for_each(|(x, size)| *x = size.copysign(*x));
    let dy = data.normal(rows * size);
    let [xs, dy] = [x, dy].map(|values| tensor(&values, &[rows, size], DType::F64));
    Batch::new(xs, dy)
}

/// The bounds of Assumption 10 and Lemma 11, over the steps of a run: ‖x̂_i‖ and ‖g_i‖ of every
/// token,
/// |ν| by max|Λ|/min Γ, and ψ from below.
struct Bounds {
    c_0: f64,
    c_1: f64,
    c_2: f64,
    min_gamma: f64,
    max_lambda: f64,
}

impl Bounds {
    fn new() -> Self {
        Self {
            c_0: f64::INFINITY,
            c_1: 0.,
            c_2: 0.,
            min_gamma: f64::INFINITY,
            max_lambda: 0.,
        }
    }

    /// Makes a step, and gives the longest of its tokens' X̃' (Eq. 11) and of their ∂L/∂X (Eq. 12),
    /// taken from the gradient that the layer gave.
    fn step(&mut self, twin: &Twin, batch: &Batch) -> [f64; 2] {
        for (gamma, lambda) in gamma_lambda(twin, batch) {
            self.min_gamma = self.min_gamma.min(gamma);
            self.max_lambda = self.max_lambda.max(lambda.abs());
        }
        let weight = &twin.oracle.weight;
        let phi = to_f64(&twin.layer.running_phi().unwrap());
        let psi: Vec<f64> = phi
            .iter()
            .map(|phi| (phi + twin.oracle.spec.eps).sqrt())
            .collect();
        self.c_0 = psi.iter().fold(self.c_0, |least, &psi| least.min(psi));
        let dx = to_f64(&run(&twin.layer, batch, true).dx);
        let (x, dy) = (to_f64(&batch.xs), to_f64(&batch.dy));
        // The longest token of a matrix whose elements are those of `values` times `factors`.
        let longest = |values: &[f64], factor: &dyn Fn(usize) -> f64| {
            let token = |row: &[f64]| {
                let square = |(c, value): (usize, &f64)| (value * factor(c)).powi(2);
                row.iter().enumerate().map(square).sum::<f64>().sqrt()
            };
            values.chunks(weight.len()).map(token).fold(0., f64::max)
        };
        self.c_1 = self.c_1.max(longest(&x, &|c| 1. / psi[c]));
        self.c_2 = self.c_2.max(longest(&dy, &|c| weight[c]));
        [longest(&dx, &|c| psi[c]), longest(&dx, &|_| 1.)]
    }

    /// C₂ + C₁C₄.
    fn theorem_4(&self) -> f64 {
        self.c_2 + self.c_1 * self.max_lambda / self.min_gamma
    }
}

proptest! {
    #![proptest_config(cases(12))]

    /// Theorem 4: where Assumption 10 holds, ‖X̃'_i‖ ≤ C₂ + C₁C₄ for every token. If ψ is also
    /// above C₀ (Eq. 28), ‖∂L/∂X_i‖ ≤ (C₂ + C₁C₄)/C₀.
    ///
    /// C₁ and C₂ bound each token, so C₁² < 1/(1−α_b) demands more than Γ < 1/(1−α_b).
    #[test]
    fn theorem_4(
        seed: u64,
        rows in 1..20usize,
        size in 1..6usize,
        alpha_bwd in 0.94..0.99f64,
        eps in 1e-8..1e-2f64,
    ) {
        let mut data = Data::new(seed);
        let twin = Twin::new(&mut data, size, running(eps, alpha_bwd), DType::F64);
        let mut bounds = Bounds::new();
        for _ in 0..100 {
            // ψ² stays in [0.64, 1.5625], hence ‖x̂_i‖² < 5 · 2.45 < 1/(1−0.94).
            let batch = bounded_batch(&mut data, rows, size, 0.8, 1.25);
            let [before_division, dx] = bounds.step(&twin, &batch);
            prop_assert!(bounds.c_1.powi(2) < 1. / (1. - alpha_bwd));
            prop_assert!(bounds.c_0 >= 0.8);
            let bound = bounds.theorem_4() * (1. + 1e-12);
            prop_assert!(before_division <= bound, "{before_division} is above {bound}");
            prop_assert!(dx <= bound / bounds.c_0, "{dx} is above {bound}/C₀");
        }
    }

    /// No smaller constant bounds ‖X̃'_i‖: a run attains the bound if every token's gradient
    /// changes its sign after ν has learned the gradient.
    #[test]
    fn theorem_4_is_sharp(
        seed: u64, rows in 1..20usize, size in 1..6usize, alpha_bwd in 0.85..0.95f64,
    ) {
        let mut data = Data::new(seed);
        let twin = Twin::new(&mut data, size, running(1e-9, alpha_bwd), DType::F64);
        let mut batch = bounded_batch(&mut data, rows, size, 1., 1f64.next_up());
        let weight = &twin.oracle.weight;
        let x = to_f64(&batch.xs);
        let mut dy: Vec<f64> = (x.iter().enumerate()).map(|(i, x)| x / weight[i % size]).collect();
        let mut bounds = Bounds::new();
        for _ in 0..400 {
            batch.dy = tensor(&dy, &[rows, size], DType::F64);
            bounds.step(&twin, &batch);
        }
        dy.iter_mut().for_each(|dy| *dy = -*dy);
        batch.dy = tensor(&dy, &[rows, size], DType::F64);
        let [before_division, _] = bounds.step(&twin, &batch);
        // ‖x̂_i‖² is `size`, which is below 1/(1−0.85).
        prop_assert!(bounds.c_1.powi(2) < 1. / (1. - alpha_bwd), "Assumption 10 does not hold");
        let bound = bounds.theorem_4();
        prop_assert!(before_division <= bound * (1. + 1e-12));
        // ν has learned all but a share of 0.95⁴⁰⁰, and ε moves the rest by the share ε/2.
        prop_assert!(before_division >= bound * (1. - 1e-7), "{before_division} is below {bound}");
    }

    /// Lemma 11: ν stays bounded where Γ < 1/(1−α_b) and Eq. 26 holds: an exponential average of Γ
    /// is at least c, which leaves single steps free to have a Γ of almost 0.
    ///
    /// With a = (1−α_b)Γ, which is below 1, that average is Σ α_b^k a over the steps k before. All
    /// but the last K of them add at most α_b^K/(1−α_b), which is c/2 for the K below. So the last
    /// K steps have Σ a ≥ c/2, and |ν| ≤ (1−α_b) max|Λ| Σ_j exp(−⌊j/K⌋ c/2), a geometric sum.
    #[test]
    fn lemma_11(
        seed: u64,
        rows in 1..20usize,
        size in 1..6usize,
        alpha_bwd in 0.9..0.99f64,
        eps in 1e-8..1e-6f64,
    ) {
        let mut data = Data::new(seed);
        let mut twin = Twin::new(&mut data, size, running(eps, alpha_bwd), DType::F64);
        let share = 1. - alpha_bwd;
        let mut averages = vec![0.; size];
        let (mut least, mut min_gamma) = (f64::INFINITY, f64::INFINITY);
        let (mut max_lambda, mut largest) = (0f64, 0f64);
        // Two steps of three are quiet. Over three of them ψ² becomes 0.729 ψ² + 0.081 ψ_B² or
        // more, ψ_B² being 0.64 at least, so it stays above 0.19, and Γ < 1.5625/0.19 < 1/(1−0.9).
        for step in 0..300 {
            let [low, high] = if step % 3 == 0 { [0.8, 1.25] } else { [1e-3, 2e-3] };
            let batch = bounded_batch(&mut data, rows, size, low, high);
            for (average, (gamma, lambda)) in averages.iter_mut().zip(gamma_lambda(&twin, &batch)) {
                prop_assert!(share * gamma < 1., "Eq. 27 does not hold");
                *average = alpha_bwd * *average + share * gamma;
                least = least.min(*average);
                min_gamma = min_gamma.min(gamma);
                max_lambda = max_lambda.max(lambda.abs());
            }
            // The oracle runs without the guard here: inside the assumption the layer is Eq. 13.
            twin.check("under Eq. 26", &batch, true);
            let nu = to_f64(&twin.layer.nu().unwrap());
            largest = nu.iter().fold(largest, |max, nu| max.max(nu.abs()));
        }
        prop_assert!(min_gamma < 1e-3 * least, "each Γ is bounded: {min_gamma}, {least}");
        let window = ((least * share / 2.).ln() / alpha_bwd.ln()).ceil();
        let bound = share * max_lambda * window / (1. - (-least / 2.).exp());
        prop_assert!(largest > 0. && largest <= bound, "{largest} is above {bound}");
    }

    /// Under a stronger premise, that each step's Γ is at least c, |ν| is at most max|Λ|/c.
    ///
    /// There |ν'| ≤ (1−(1−α_b)Γ)|ν| + (1−α_b)|Λ| ≤ (1−(1−α_b)c)|ν| + (1−α_b) max|Λ|, which keeps
    /// |ν| ≤ max|Λ|/c once it holds, and it holds at ν = 0.
    #[test]
    fn lemma_11_where_each_gamma_is_bounded(
        seed: u64,
        rows in 1..20usize,
        size in 1..6usize,
        alpha_bwd in 0.7..0.99f64,
        eps in 1e-8..1e-2f64,
    ) {
        let mut data = Data::new(seed);
        let mut twin = Twin::new(&mut data, size, running(eps, alpha_bwd), DType::F64);
        let (mut min_gamma, mut max_lambda) = (f64::INFINITY, 0f64);
        // ψ² starts at 1 and ψ_B² is in [0.64, 1.5625], so ψ² stays in it, and Γ < 2.45 <
        // 1/(1−0.7).
        for _ in 0..100 {
            let batch = bounded_batch(&mut data, rows, size, 0.8, 1.25);
            for (gamma, lambda) in gamma_lambda(&twin, &batch) {
                prop_assert!(gamma < 1. / (1. - alpha_bwd), "Assumption 10 does not hold");
                min_gamma = min_gamma.min(gamma);
                max_lambda = max_lambda.max(lambda.abs());
            }
            // The oracle runs without the guard here: inside the assumption the layer is Eq. 13.
            twin.check("inside Assumption 10", &batch, true);
            let nu = to_f64(&twin.layer.nu().unwrap());
            let largest = nu.iter().fold(0f64, |max, nu| max.max(nu.abs()));
            prop_assert!(largest > 0.);
            prop_assert!(largest <= max_lambda / min_gamma * (1. + 1e-12));
        }
    }

    /// Outside Assumption 10 the guard keeps ν bounded, where the released recipe's ν diverges.
    ///
    /// With Γ ≥ c the guarded factor is at most 1 − min(1, (1−α_b)c), so that
    /// |ν| ≤ (1−α_b) max|Λ| / min(1, (1−α_b)c).
    #[test]
    fn the_guard_holds_outside_assumption_10(
        seed: u64,
        rows in 1..20usize,
        size in 1..6usize,
        alpha_bwd in 0.5..0.95f64,
        far in 1.5..100f64,
    ) {
        // ψ² hardly moves from 1, so that Γ stays at ψ_B², this far beyond twice the assumption's
        // limit: each unguarded step multiplies ν by less than −2.
        let amplitude = (2. * far / (1. - alpha_bwd)).sqrt();
        let config = running(1e-5, alpha_bwd).with(|config| config.alpha_fwd = 1. - 1e-9);
        let [mut twin, released] = [Recipe::Paper, Recipe::Fairseq].map(|recipe| {
            Twin::new(&mut Data::new(seed), size, config.with_recipe(recipe), DType::F64)
        });
        let share = 1. - alpha_bwd;
        let mut max_lambda = 0f64;
        let mut data = Data::new(!seed);
        for _ in 0..300 {
            let batch = bounded_batch(&mut data, rows, size, amplitude, 1.1 * amplitude);
            for (gamma, lambda) in gamma_lambda(&twin, &batch) {
                prop_assert!(share * gamma > 2., "not that far outside: Γ = {gamma}");
                max_lambda = max_lambda.max(lambda.abs());
            }
            twin.check("outside Assumption 10", &batch, true);
            run(&released.layer, &batch, true);
            for nu in to_f64(&twin.layer.nu().unwrap()) {
                prop_assert!(nu.abs() <= share * max_lambda * (1. + 1e-12));
            }
        }
        for nu in to_f64(&released.layer.nu().unwrap()) {
            prop_assert!(nu.is_nan() || nu.abs() > 2f64.powi(250), "the unguarded ν is only {nu}");
        }
    }
}
