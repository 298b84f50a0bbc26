//! Changes between a forward and its backward. `devices/mod.rs` tests which calls move the state.

use crate::common::*;
use candle::{DType, Module, Result, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::{layer_norm, rms_norm};

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

/// The rows may be a variable that is set between a forward and its backward. Then the gradient is
/// that of the new rows, as of candle's own operations, and a copy of the variable keeps the old
/// ones.
#[test]
fn a_backward_uses_the_rows_that_stand_when_it_runs() -> Result<()> {
    let mut data = Data::new(21);
    let [before, after] =
        [(); 2].map(|()| Batch::random(&mut data, &[10, 6], DType::F64, false).xs);
    let dy = tensor(&data.normal(60), &[10, 6], DType::F64);
    let norm = Twin::new(&mut data, 6, config(Some(2)), DType::F64).layer;
    norm.mode().set_training(false);
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F64, &CPU);
    let layers: [&dyn Module; 3] = [
        &norm,
        &layer_norm(6, 1e-5, vb.pp("layer_norm"))?,
        &rms_norm(6, 1e-5, vb.pp("rms_norm"))?,
    ];
    for layer in layers {
        // The gradient at `xs`, if they are `after` once the forward has run.
        let dx = |xs: &candle::Tensor, copies: bool| -> Result<candle::Tensor> {
            let xs = Var::from_tensor(xs)?;
            let rows = if copies {
                xs.copy()?
            } else {
                xs.as_tensor().clone()
            };
            let y = layer.forward(&rows)?;
            xs.set(&after)?;
            Ok(backward(&y, &dy).remove(&xs).expect("a gradient"))
        };
        let of_after = dx(&after, false)?;
        assert_same_bits("a variable", &dx(&before, false)?, &of_after);
        assert_ne!(to_f64(&dx(&before, true)?), to_f64(&of_after));
    }
    Ok(())
}
