//! What moves the state, and what does not: forwards without a backward, layers used twice, graphs
//! walked twice. `devices/mod.rs` has batches without tokens, and poisoned ones.

use crate::common::{
    assert_close, assert_same_bits, forward, run, state, to_f64, var, Batch, Bound, Data, Twin,
};
use candle::{DType, Tensor, Var};
use candle_powernorm::{PowerNormConfig, Recipe};

const SIZE: usize = 6;
const ROWS: usize = 10;

/// `warmup_steps` of batch statistics, no group scaling: what happens in a channel stays in it.
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

fn batch(data: &mut Data) -> Batch {
    Batch::random(data, &[ROWS, SIZE], DType::F64, false)
}

/// A twin two steps into its training.
fn trained(recipe: Recipe, warmup_steps: usize, data: &mut Data) -> Twin {
    let mut twin = Twin::new(data, SIZE, config(recipe, warmup_steps), DType::F64);
    for _ in 0..2 {
        twin.check("before", &batch(data), true);
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
    let twin = trained(Recipe::Paper, 1, &mut data);
    let batch = batch(&mut data);
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
            let mut twin = trained(recipe, warmup, &mut data);
            let nu = state(&twin.layer).1;
            for _ in 0..2 {
                let batch = batch(&mut data);
                // Tracked, so that there is a graph to drop.
                let xs = Var::from_tensor(&batch.xs).unwrap();
                drop(forward(&twin.layer, &xs, None, true));
                twin.oracle.train(&to_f64(&batch.xs), None);
            }
            assert_eq!(state(&twin.layer).1, nu);
            twin.check_state("two forwards", BOUND);
            twin.check("and a whole step", &batch(&mut data), true);
        }
    }
}

/// A backward after later steps uses D, Γ and n of its own forward, and the current ν.
#[test]
fn a_late_backward_uses_its_own_statistics_and_the_standing_correction() {
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        for warmup in [100, 1, 3] {
            let mut data = Data::new(4);
            let mut twin = trained(recipe, warmup, &mut data);
            let late = batch(&mut data);
            let xs = Var::from_tensor(&late.xs).unwrap();
            let y = forward(&twin.layer, &xs, None, true);
            let pass = twin.oracle.train(&to_f64(&xs), None);
            let mut scaled = batch(&mut data);
            scaled.xs = (scaled.xs * 3.).unwrap();
            twin.check("in between", &scaled, true);
            twin.check("in between", &batch(&mut data), false);
            let grads = backward(&y, &late.dy);
            let expected = twin.oracle.backward(&pass, &to_f64(&late.dy));
            assert_close("late", grads.get(&xs).unwrap(), &expected.dx, BOUND);
            twin.check_state("late", BOUND);
        }
    }
}
