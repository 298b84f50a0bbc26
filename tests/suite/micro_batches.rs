//! Gradients accumulated over k micro-batches: with α^(1/k) for α, and k·T warm-up steps for T, a
//! layer has the statistics of one step on the whole batch, to first order in 1−α. Each micro-batch
//! brings the gradient that it has in the whole batch's loss: its own mean loss, divided by k.
//!
//! Let a = 1−α, a' = 1−α^(1/k) and S = k·a', so that a ≤ S ≤ a/α. A window is the k steps.
//!
//! **ψ².** In the warm-up both are the mean of the same squares. After it, a window weighs the
//! micro-batches' ψ_b² by a'·α^(i/k), i = k−1..0. These weights add up to a, and are within a
//! factor α of each other. So each differs from the whole batch's a/k by at most a²/(αk). Hence a
//! window moves the two ψ² apart by at most (a²/α)·δ. Here δ is the mean distance of the ψ_b² from
//! their mean. Of an earlier distance a window leaves the share α. So the distance is at most
//! (a/α)·δ.
//!
//! **ν.** Let Γ ≤ G and |Λ| ≤ L in every step, and let ψ²+ε in each micro-step be within a share r
//! of what the whole batch's step has. Three things hold in a window:
//!
//! - The factors 1−a'Γ_i multiply to 1−aΓ, up to E = (SG)²/2 + SGr + (a²/α)G.
//! - The terms a'Λ_i, times the factors after them, add up to aΛ, up to F = S²GL + SLr + (a²/α)L.
//! - An earlier distance shrinks by q = exp(−Sg) or more. Here g is the least mean of a window's Γ.
//!
//! So the distance is at most (E·N + F)/(1−q) if |ν| ≤ N, and what is left of that after the
//! warm-up. E and F are O(a²), because r is O(a), and 1−q is O(a): the distance is O(a).

use crate::common::*;
use candle::DType;
use candle_powernorm::PowerNormConfig;

const SIZE: usize = 6;
const MICRO_ROWS: usize = 8;
const K: usize = 4;
const WARM_UP: usize = 20;

/// The statistics of a step in each channel, and ψ² before it.
struct Step {
    phi: Vec<f64>,
    batch_phi: Vec<f64>,
    gamma: Vec<f64>,
    lambda: Vec<f64>,
}

fn step(twin: &mut Twin, batch: &Batch) -> Step {
    run(&twin.layer, batch, true);
    let phi = twin.oracle.phi.clone();
    let pass = twin.oracle.train(&to_f64(&batch.xs), None);
    let gradients = twin.oracle.backward(&pass, &to_f64(&batch.dy));
    Step {
        phi,
        batch_phi: pass.batch_phi.expect("a training step"),
        gamma: gradients.gamma,
        lambda: gradients.lambda,
    }
}

/// ψ² and ν of a channel.
fn statistics(twin: &Twin, c: usize) -> [f64; 2] {
    let [phi, nu] = [twin.layer.running_phi(), twin.layer.nu()];
    [phi, nu].map(|values| to_f64(&values.unwrap())[c])
}

/// The quantities in a channel's bounds, over all windows after the warm-up.
#[derive(Default)]
struct Channel {
    delta: f64,
    /// G, L, r, g and N.
    most_gamma: f64,
    most_lambda: f64,
    most_off: f64,
    least_mean_gamma: Option<f64>,
    most_nu: f64,
    /// The distances of ψ² and of ν, by window.
    apart: Vec<[f64; 2]>,
}

impl Channel {
    fn take(&mut self, c: usize, eps: f64, whole: &Step, parts: &[Step]) {
        let mean = |of: &dyn Fn(&Step) -> f64| parts.iter().map(of).sum::<f64>() / K as f64;
        let deviation = mean(&|part| (part.batch_phi[c] - whole.batch_phi[c]).abs());
        self.delta = self.delta.max(deviation);
        for step in parts.iter().chain([whole]) {
            self.most_gamma = self.most_gamma.max(step.gamma[c]);
            self.most_lambda = self.most_lambda.max(step.lambda[c].abs());
            let off = ((step.phi[c] + eps) / (whole.phi[c] + eps) - 1.).abs();
            self.most_off = self.most_off.max(off);
        }
        let mean_gamma = mean(&|part| part.gamma[c]);
        let least = self.least_mean_gamma.get_or_insert(mean_gamma);
        *least = least.min(mean_gamma);
    }

    /// The bounds of both distances after `windows` windows.
    fn bounds(&self, alpha: f64, windows: usize) -> [f64; 2] {
        let a = 1. - alpha;
        let s = K as f64 * (1. - alpha.powf(1. / K as f64));
        let (g, l, r) = (self.most_gamma, self.most_lambda, self.most_off);
        assert!(s * g < 1., "ν's factor is clamped");
        let e = (s * g).powi(2) / 2. + s * g * r + a * a / alpha * g;
        let f = s * s * g * l + s * l * r + a * a / alpha * l;
        let q = (-s * self.least_mean_gamma.expect("a window")).exp();
        let [_, after_warm_up] = self.apart[0];
        let left = q.powi(windows as i32) * after_warm_up;
        let nu = (e * self.most_nu + f) / (1. - q) + left;
        [a / alpha * self.delta, nu]
    }
}

fn config(alpha: f64, warmup_steps: usize) -> PowerNormConfig {
    let config = 1e-5.with(|config| (config.alpha_fwd, config.alpha_bwd) = (alpha, alpha));
    config.with_groups(None).with_warm_up(warmup_steps)
}

/// The largest distances of ψ² and ν.
#[derive(Debug, Default)]
struct Largest {
    /// As shares of their bounds.
    shares: [f64; 2],
    /// As shares of the whole batch's ψ², and of its largest ν, once the warm-up is forgotten.
    relative: [f64; 2],
    /// ψ²'s share, if α and T stay as they are for whole batches.
    unchanged: f64,
}

fn largest_distances(alpha: f64) -> Largest {
    let twin = |config| Twin::new(&mut Data::new(30), SIZE, config, DType::F64);
    let mut whole = twin(config(alpha, WARM_UP));
    let mut micro = twin(config(alpha.powf(1. / K as f64), K * WARM_UP));
    let unchanged = twin(config(alpha, WARM_UP));
    let mut data = Data::new(31);
    let mut channels = [(); SIZE].map(|()| Channel::default());
    let mut unchanged_apart = [0f64; SIZE];
    // ν has forgotten the warm-up in the second half.
    let all = (16. / (1. - alpha)) as usize;
    for window in 0..WARM_UP + all {
        let batch = Batch::random(&mut data, &[K * MICRO_ROWS, SIZE], DType::F64, false);
        let of_whole = step(&mut whole, &batch);
        let of_parts: Vec<_> = (0..K)
            .map(|part| {
                let part = batch.rows(part * MICRO_ROWS..(part + 1) * MICRO_ROWS);
                run(&unchanged.layer, &part, true);
                step(&mut micro, &part)
            })
            .collect();
        for (c, channel) in channels.iter_mut().enumerate() {
            let [of_whole_phi, of_whole_nu] = statistics(&whole, c);
            let [of_micro_phi, of_micro_nu] = statistics(&micro, c);
            let apart = [of_micro_phi - of_whole_phi, of_micro_nu - of_whole_nu].map(f64::abs);
            if window < WARM_UP {
                let [phi, _] = apart;
                assert!(phi <= 1e-13 * of_whole_phi, "{phi} in the warm-up");
                channel.apart = vec![apart];
            } else {
                channel.take(c, whole.oracle.spec.eps, &of_whole, &of_parts);
                channel.apart.push(apart);
                let [phi, _] = statistics(&unchanged, c);
                unchanged_apart[c] = unchanged_apart[c].max((phi - of_whole_phi).abs());
            }
            channel.most_nu = channel.most_nu.max(of_whole_nu.abs());
        }
    }
    assert_eq!(micro.layer.steps().unwrap(), K * (WARM_UP + all));
    for twin in [&whole, &micro] {
        let n = (K * MICRO_ROWS + SIZE) * twin.oracle.steps;
        twin.check_state("all steps", Bound::of(DType::F64, n));
    }
    let mut largest = Largest::default();
    for (c, (channel, unchanged)) in channels.iter().zip(unchanged_apart).enumerate() {
        let [phi, _] = statistics(&whole, c);
        for (windows, apart) in channel.apart.iter().enumerate() {
            let bounds = channel.bounds(alpha, windows);
            for (k, size) in [phi, channel.most_nu].into_iter().enumerate() {
                let share = apart[k] / (bounds[k] + 1e-13 * size);
                largest.shares[k] = largest.shares[k].max(share);
                if windows > all / 2 {
                    largest.relative[k] = largest.relative[k].max(apart[k] / size);
                }
            }
            largest.unchanged = largest.unchanged.max(unchanged / bounds[0]);
        }
    }
    largest
}

#[test]
fn they_have_the_statistics_of_the_whole_batch() {
    for alpha in [0.9, 0.97, 0.99] {
        let largest = largest_distances(alpha);
        println!("α {alpha}: {largest:?}");
        let [phi, nu] = largest.shares;
        assert!(phi <= 1. && nu <= 1., "α {alpha}: {largest:?}");
        // The bound tells the recipe from none.
        assert!(largest.unchanged > 1., "α {alpha}: {largest:?}");
    }
}
