//! Changes between a forward and its backward. `devices/mod.rs` tests which calls move the state.

use crate::common::*;
use candle::{DType, Var};

/// An optimizer may set the weight between a forward and its backward. Then the backward uses the
/// new weight, as candle's own operations do.
#[test]
fn a_backward_uses_the_weight_that_stands_when_it_runs() {
    let mut data = Data::new(20);
    let twin = Twin::new(&mut data, 6, config(None), DType::F64);
    let batch = Batch::random(&mut data, &[10, 6], DType::F64, false);
    for _ in 0..2 {
        run(&twin.layer, &batch, true);
    }
    let xs = Var::from_tensor(&batch.xs).unwrap();
    let y = forward(&twin.layer, &xs, None, false);
    let before = run(&twin.layer, &batch, false).dx;
    let weight = var(&twin.varmap, "weight");
    weight.set(&(weight.as_tensor() * 3.).unwrap()).unwrap();
    let dx = backward(&y, &batch.dy).get(&xs).unwrap().clone();
    assert_same_bits("dx", &dx, &run(&twin.layer, &batch, false).dx);
    assert_ne!(to_f64(&dx), to_f64(&before));
}
