//! What moves the state, and what does not: forwards without a backward, layers used twice, graphs
//! walked twice, batches without tokens, batches that overflowed.

mod common;

use candle::{DType, Tensor, Var};
use candle_powernorm::{PowerNormConfig, Recipe, Statistics};
use common::{
    assert_close, assert_finite, assert_same_bits, forward, run, state, tensor, to_f64, var, Batch,
    Bound, Data, Twin,
};

const SIZE: usize = 6;
const ROWS: usize = 10;

/// `warmup_steps` of batch statistics, no layer-scale: what happens in a channel stays in it.
fn config(recipe: Recipe, warmup_steps: usize) -> PowerNormConfig {
    PowerNormConfig {
        recipe,
        warmup_steps,
        group_scaling: None,
        ..1e-5.into()
    }
}

/// In the warm-up, and after it.
const WARM_UPS: [usize; 2] = [100, 1];

fn batch(data: &mut Data, dtype: DType) -> Batch {
    Batch::random(data, &[ROWS, SIZE], dtype, false)
}

/// A twin two steps into its training.
fn trained(recipe: Recipe, warmup_steps: usize, dtype: DType, data: &mut Data) -> Twin {
    let mut twin = Twin::new(data, SIZE, config(recipe, warmup_steps), dtype);
    for _ in 0..2 {
        twin.check("before", &batch(data, dtype), true);
    }
    twin
}

/// The bound of a few steps in `f64`.
const BOUND: Bound = Bound {
    out: DType::F64,
    sums: DType::F64,
    n: 8 * (ROWS + SIZE),
};

fn backward(y: &Tensor, dy: &Tensor) -> candle::backprop::GradStore {
    let loss = (y * dy).unwrap().sum_all().unwrap();
    loss.backward().unwrap()
}

/// An optimizer may set the weight between a forward and its backward. Then the backward uses the
/// new weight, as candle's own operations do.
#[test]
fn a_backward_uses_the_weight_that_stands_when_it_runs() {
    let mut data = Data::new(20);
    let twin = trained(Recipe::Paper, 1, DType::F64, &mut data);
    let batch = batch(&mut data, DType::F64);
    let xs = Var::from_tensor(&batch.xs).unwrap();
    let y = forward(&twin.layer, &xs, None, false);
    let before = run(&twin.layer, &batch, false).dx;
    let weight = var(&twin.varmap, "weight");
    weight.set(&(weight.as_tensor() * 3.).unwrap()).unwrap();
    let dx = backward(&y, &batch.dy).get(&xs).unwrap().clone();
    assert_same_bits("dx", &dx, &run(&twin.layer, &batch, false).dx);
    assert_ne!(to_f64(&dx), to_f64(&before));
}

#[test]
fn a_forward_alone_moves_the_statistic_but_not_the_correction() {
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        for warmup in WARM_UPS {
            let mut data = Data::new(1);
            let mut twin = trained(recipe, warmup, DType::F64, &mut data);
            let nu = state(&twin.layer).1;
            for _ in 0..2 {
                let batch = batch(&mut data, DType::F64);
                // Tracked, so that there is a graph to drop.
                let xs = Var::from_tensor(&batch.xs).unwrap();
                drop(forward(&twin.layer, &xs, None, true));
                twin.oracle.train(&to_f64(&batch.xs), None);
            }
            assert_eq!(state(&twin.layer).1, nu);
            twin.check_state("two forwards", BOUND);
            twin.check("and a whole step", &batch(&mut data, DType::F64), true);
        }
    }
}

/// A backward after later steps uses D, Γ and n of its own forward, and the current ν.
#[test]
fn a_late_backward_uses_its_own_statistics_and_the_standing_correction() {
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        for warmup in [100, 1, 3] {
            let mut data = Data::new(4);
            let mut twin = trained(recipe, warmup, DType::F64, &mut data);
            let late = batch(&mut data, DType::F64);
            let xs = Var::from_tensor(&late.xs).unwrap();
            let y = forward(&twin.layer, &xs, None, true);
            let pass = twin.oracle.train(&to_f64(&xs), None);
            let mut scaled = batch(&mut data, DType::F64);
            scaled.xs = (scaled.xs * 3.).unwrap();
            twin.check("in between", &scaled, true);
            twin.check("in between", &batch(&mut data, DType::F64), false);
            let grads = backward(&y, &late.dy);
            let expected = twin.oracle.backward(&pass, &to_f64(&late.dy));
            assert_close("late", grads.get(&xs).unwrap(), &expected.dx, BOUND);
            twin.check_state("late", BOUND);
        }
    }
}

#[test]
fn evaluation_moves_nothing() {
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        let mut data = Data::new(5);
        let mut twin = trained(recipe, 1, DType::F64, &mut data);
        let before = state(&twin.layer);
        twin.check("evaluation", &batch(&mut data, DType::F64), false);
        let padded = Batch::random(&mut data, &[ROWS, SIZE], DType::F64, true);
        twin.check("padded evaluation", &padded, false);
        assert_eq!(state(&twin.layer), before);
    }
}

/// Both recipes: a batch without a token moves nothing, t included.
#[test]
fn batches_without_tokens_move_nothing() {
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        for warmup in WARM_UPS {
            let mut data = Data::new(6);
            let mut twin = trained(recipe, warmup, DType::F64, &mut data);
            let before = state(&twin.layer);
            let padded = batch(&mut data, DType::F64).masked(&[false; ROWS]);
            run(&twin.layer, &padded, true);
            assert_eq!(state(&twin.layer), before, "{recipe:?}, padded");
            let empty = Var::zeros((0, SIZE), DType::F64, &common::CPU).unwrap();
            let y = forward(&twin.layer, &empty, None, true);
            y.backward().unwrap();
            assert_eq!(state(&twin.layer), before, "{recipe:?}, empty");
            twin.check("next", &batch(&mut data, DType::F64), true);
        }
    }
}

/// PN-V keeps the state up to date, though it does not use it in training.
#[test]
fn batch_statistics_keep_the_state() {
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        let mut data = Data::new(7);
        let config = PowerNormConfig {
            statistics: Statistics::Batch,
            ..config(recipe, 2)
        };
        let mut twin = Twin::new(&mut data, SIZE, config, DType::F64);
        for _ in 0..5 {
            twin.check("PN-V", &batch(&mut data, DType::F64), true);
        }
        twin.check("evaluation", &batch(&mut data, DType::F64), false);
    }
}

// Poisoned batches

/// The channels that the tests poison; the others must not notice.
const POISONED: [usize; 2] = [1, 4];

/// Which of a batch's tensors is poisoned.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Where {
    Input,
    Gradient,
}

/// `batch` with `value` in the poisoned channels of one row.
fn poison(batch: &Batch, value: f64, place: Where) -> Batch {
    let mut poisoned = batch.clone();
    let target = match place {
        Where::Input => &mut poisoned.xs,
        Where::Gradient => &mut poisoned.dy,
    };
    let mut values = to_f64(target);
    for channel in POISONED {
        values[3 * SIZE + channel] = value;
    }
    *target = tensor(&values, &[ROWS, SIZE], target.dtype());
    poisoned
}

/// Runs poisoned steps, and checks three things of each: it leaves no trace in the poisoned
/// channels, it is an ordinary step for the others, and later steps are as if it had not happened.
#[track_caller]
fn check_forgotten(
    what: &str,
    mut twin: Twin,
    batch: &Batch,
    poisons: impl IntoIterator<Item = (f64, Where)>,
    data: &mut Data,
) {
    let out = twin.layer.running_phi().unwrap().dtype();
    let bound = Bound {
        out,
        sums: out,
        ..BOUND
    };
    for (value, place) in poisons {
        let what = format!("{what}, {value} in the {place:?}");
        let before = (twin.oracle.phi.clone(), twin.oracle.nu.clone());
        run(&twin.layer, &poison(batch, value, place), true);
        // The oracle takes the clean batch, and leaves the poisoned channels as they were.
        let pass = twin.oracle.train(&to_f64(&batch.xs), None);
        twin.oracle.backward(&pass, &to_f64(&batch.dy));
        for channel in POISONED {
            if place == Where::Input {
                twin.oracle.phi[channel] = before.0[channel];
            }
            twin.oracle.nu[channel] = before.1[channel];
        }
        twin.check_state(&what, bound);
        let clean = Batch::random(data, &[ROWS, SIZE], batch.xs.dtype(), false);
        twin.check(&format!("{what}, next"), &clean, true);
    }
}

/// Every place that a value can poison.
fn everywhere(value: f64) -> [(f64, Where); 2] {
    [(value, Where::Input), (value, Where::Gradient)]
}

#[test]
fn a_batch_with_infinities_or_nan_is_forgotten() {
    for dtype in [DType::F32, DType::F64] {
        for warmup in WARM_UPS {
            for value in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
                let mut data = Data::new(8);
                let twin = trained(Recipe::Paper, warmup, dtype, &mut data);
                let batch = batch(&mut data, dtype);
                check_forgotten("a poison", twin, &batch, everywhere(value), &mut data);
            }
        }
    }
}

/// Mixed precision: what overflows `f16` upstream arrives as an infinity.
#[test]
fn an_overflow_of_half_precision_is_forgotten() {
    assert_eq!(to_f64(&tensor(&[1e6], &[1], DType::F16)), [f64::INFINITY]);
    for warmup in WARM_UPS {
        for parameters in [DType::F16, DType::F32] {
            let mut data = Data::new(9);
            let mut twin = Twin::new(&mut data, SIZE, config(Recipe::Paper, warmup), parameters);
            for _ in 0..2 {
                twin.check("before", &batch(&mut data, DType::F16), true);
            }
            let batch = batch(&mut data, DType::F16);
            check_forgotten("an overflow", twin, &batch, everywhere(1e6), &mut data);
        }
    }
}

/// Finite values whose squares are not: ψ_B² and Γ overflow, and the clamp on the factor of ν must
/// not hide that from the finite check. (By the equation alone ν would be 1e29.)
#[test]
fn an_overflow_of_squares_is_forgotten() {
    for (dtype, value) in [(DType::F32, 1e30), (DType::BF16, 1e30), (DType::F64, 1e200)] {
        for warmup in WARM_UPS {
            let mut data = Data::new(10);
            let twin = trained(Recipe::Paper, warmup, dtype, &mut data);
            let batch = batch(&mut data, dtype);
            check_forgotten(
                &format!("{dtype:?}"),
                twin,
                &batch,
                [(value, Where::Input)],
                &mut data,
            );
        }
    }
}

/// An `F64` batch in a layer whose state is `F32`: ψ_B² is finite in the dtype of the sums, and
/// overflows in the dtype of the state.
#[test]
fn a_statistic_beyond_the_state_s_dtype_is_forgotten() {
    for warmup in WARM_UPS {
        let mut data = Data::new(11);
        let mut twin = Twin::new(&mut data, SIZE, config(Recipe::Paper, warmup), DType::F32);
        for _ in 0..2 {
            twin.check("before", &batch(&mut data, DType::F64), true);
        }
        let before = to_f64(&twin.layer.running_phi().unwrap());
        let clean = batch(&mut data, DType::F64);
        run(&twin.layer, &poison(&clean, 1e60, Where::Input), true);
        let phi = to_f64(&twin.layer.running_phi().unwrap());
        for channel in 0..SIZE {
            let kept = phi[channel] == before[channel];
            assert_eq!(
                kept,
                POISONED.contains(&channel),
                "{channel}: {}",
                phi[channel]
            );
        }
        assert_finite("ν", &twin.layer.nu().unwrap());
        for (name, tensor) in run(&twin.layer, &clean, true).tensors() {
            assert_finite(name, tensor);
        }
    }
}

/// A model in f64 that gets batches in f32, whose sums are f32 too: a channel that keeps its
/// statistic keeps the bits that f32 lacks.
#[test]
fn a_refused_statistic_keeps_every_bit() {
    for warmup in WARM_UPS {
        let mut data = Data::new(13);
        let config = PowerNormConfig {
            affine: false,
            ..config(Recipe::Paper, warmup)
        };
        let layer = Twin::new(&mut data, SIZE, config, DType::F64).layer;
        for _ in 0..2 {
            run(&layer, &batch(&mut data, DType::F64), true);
        }
        let (phi, nu, _) = state(&layer);
        let poisoned = poison(&batch(&mut data, DType::F32), f64::NAN, Where::Input);
        run(&layer, &poisoned, true);
        let (phi_after, nu_after, _) = state(&layer);
        for channel in POISONED {
            assert_eq!(phi_after[channel], phi[channel], "{channel}");
            assert_eq!(nu_after[channel], nu[channel], "{channel}");
        }
    }
}

/// The released code has no such check: its poisoned channels, and only they, stay poisoned.
#[test]
fn the_released_recipe_does_not_forget() {
    let mut data = Data::new(12);
    let twin = trained(Recipe::Fairseq, 1, DType::F32, &mut data);
    let clean = batch(&mut data, DType::F32);
    run(&twin.layer, &poison(&clean, f64::NAN, Where::Input), true);
    run(&twin.layer, &clean, true);
    for statistic in [twin.layer.running_phi(), twin.layer.nu()] {
        for (channel, value) in to_f64(&statistic.unwrap()).into_iter().enumerate() {
            assert_eq!(value.is_finite(), !POISONED.contains(&channel), "{channel}");
        }
    }
}
