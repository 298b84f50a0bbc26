//! `forward_residual` beside an addition and a forward.

use crate::common::*;
use crate::devices::NoBackward;
use candle::backprop::GradStore;
use candle::{CpuStorage, CustomOp1, DType, Layout, Module, Result, Shape, Tensor, Var};
use candle_powernorm::Statistics;

/// Which outputs the loss sees.
const USES: [[bool; 2]; 3] = [[true, true], [true, false], [false, true]];

/// xs, residual, and the gradients of both outputs.
struct Case {
    xs: Var,
    residual: Var,
    dy: Tensor,
    dsum: Tensor,
}

impl Case {
    fn random(data: &mut Data, shape: &[usize], dtype: DType) -> Result<Self> {
        let [a, b] = [(); 2].map(|()| Batch::random(data, shape, dtype, false));
        Ok(Self {
            xs: Var::from_tensor(&a.xs)?,
            residual: Var::from_tensor(&b.xs)?,
            dy: a.dy,
            dsum: b.dy,
        })
    }

    fn gradients(&self, outputs: &(Tensor, Tensor), uses: [bool; 2]) -> Result<GradStore> {
        residual_gradients(outputs, [&self.dy, &self.dsum], uses)
    }
}

/// A CPU first writes all sums of inputs of more than 4 MiB, in a pass of their own.
#[test]
fn a_large_residual_is_an_addition_and_a_forward() -> Result<()> {
    for (dtype, shape, statistics, train) in [
        (DType::F32, [1030, 1024], Statistics::Running, true),
        (DType::F32, [1030, 1030], Statistics::Batch, true),
        (DType::BF16, [2050, 1024], Statistics::Running, true),
        (DType::F16, [2050, 1024], Statistics::Running, false),
    ] {
        let mut data = Data::new(10);
        let config = 1e-5.with_statistics(statistics).with_groups(Some(2));
        let layer = || {
            let layer = Twin::new(&mut Data::new(11), shape[1], config, DType::F32).layer;
            layer.mode().set_training(train);
            layer
        };
        let case = Case::random(&mut data, &shape, dtype)?;
        let (fused, plain) = (layer(), layer());
        // A view whose rows are not packed, and a row in three that is padding.
        let xs = Tensor::cat(&[case.xs.as_tensor(), case.residual.as_tensor()], 1)?;
        let xs = xs.narrow(1, 0, shape[1])?;
        let keep: Vec<u8> = (0..shape[0]).map(|row| u8::from(row % 3 > 0)).collect();
        let keep = Tensor::new(keep, &CPU)?;
        let ours = fused.forward_residual(&xs, &case.residual, &keep)?;
        let sum = add_rounded(&xs, &case.residual)?;
        let theirs = plain.forward_masked(&sum, &keep)?;
        assert_same_bits("y", &ours.0, &theirs);
        assert_same_bits("sum", &ours.1, &sum);
        assert_eq!(state(&fused), state(&plain));
    }
    Ok(())
}

/// Only what is trained gets a gradient, and a graph can be gone back through twice.
#[test]
fn gradients_go_where_they_are_wanted() -> Result<()> {
    let mut data = Data::new(7);
    let case = Case::random(&mut data, &[4, 6], DType::F64)?;
    let layer = Twin::new(&mut data, 6, 1e-5.into(), DType::F64).layer;
    let outputs = layer.forward_residual(&case.xs, &case.residual.detach(), None)?;
    let first = case.gradients(&outputs, [true, true])?;
    let second = case.gradients(&outputs, [true, true])?;
    // candle goes back through the outputs in the order of the loss's terms.
    let [of_y, of_sum] = [&outputs.0 * &case.dy, &outputs.1 * &case.dsum];
    let swapped = (of_sum?.sum_all()? + of_y?.sum_all()?)?.backward()?;
    for (what, again) in [("twice", second), ("the sum first", swapped)] {
        let (first, again) = (first.get(&case.xs).unwrap(), again.get(&case.xs).unwrap());
        assert_same_bits(what, first, again);
    }
    let sum_alone = case.gradients(&outputs, [false, true])?;
    assert_same_bits("the sum's", sum_alone.get(&case.xs).unwrap(), &case.dsum);
    assert!(first.get(&case.residual).is_none());

    let outputs = layer.forward_residual(&case.xs.detach(), &case.residual.detach(), None)?;
    let gradients = case.gradients(&outputs, [true, true])?;
    assert!(gradients.get(layer.weight().unwrap()).is_some());
    assert!(gradients.get(&case.xs).is_none());
    Ok(())
}

/// A weight that is computed, from a master copy say, gets a gradient whichever outputs the loss
/// sees.
#[test]
fn gradients_go_through_a_computed_weight() -> Result<()> {
    let mut data = Data::new(13);
    let case = Case::random(&mut data, &[4, 6], DType::F64)?;
    let values = data.normal(6);
    let master = Var::from_tensor(&data.tensor(&values, &[6], DType::F64))?;
    let weight = master.affine(2., 0.)?;
    for bias in [master.affine(1., 1.)?, Tensor::zeros(6, DType::F64, &CPU)?] {
        for uses in USES {
            let [fused, plain] = [(); 2].map(|()| layer_of([&weight, &bias]));
            let ours = fused.forward_residual(&case.xs, &case.residual, None)?;
            let sum = (case.xs.as_tensor() + case.residual.as_tensor())?;
            let theirs = (plain.forward(&sum)?, sum);
            let (ours, theirs) = (case.gradients(&ours, uses)?, case.gradients(&theirs, uses)?);
            let zeros = master.zeros_like()?;
            let gradient = |of: &GradStore| of.get(&master).unwrap_or(&zeros).clone();
            assert_same_bits("master", &gradient(&ours), &gradient(&theirs));
        }
    }
    Ok(())
}

/// Each layer's output and sum go into the next.
#[test]
fn a_stack_of_layers_has_the_gradients_of_its_composition() -> Result<()> {
    let case = Case::random(&mut Data::new(8), &[7, 6], DType::F64)?;
    let gradients = |fused: bool| -> Result<Vec<Tensor>> {
        let mut data = Data::new(9);
        let mut of = vec![
            case.xs.as_tensor().clone(),
            case.residual.as_tensor().clone(),
        ];
        let mut stream = (of[0].clone(), of[1].clone());
        for _ in 0..3 {
            let layer = Twin::new(&mut data, 6, 1e-5.into(), DType::F64).layer;
            let xs = stream.0.gelu()?;
            stream = match fused {
                true => layer.forward_residual(&xs, &stream.1, None)?,
                false => {
                    let sum = add_rounded(&xs, &stream.1)?;
                    (layer.forward(&sum)?, sum)
                }
            };
            of.extend(layer.weight().into_iter().chain(layer.bias()).cloned());
        }
        let grads = case.gradients(&stream, [true, true])?;
        Ok(of.iter().map(|of| grads.get(of).unwrap().clone()).collect())
    };
    let (ours, theirs) = (gradients(true)?, gradients(false)?);
    for (k, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        assert_relative(&format!("gradient {k}"), ours, &to_f64(theirs), 1e-14);
    }
    Ok(())
}

#[test]
fn no_rows_have_outputs_of_no_rows() -> Result<()> {
    let layer = Twin::new(&mut Data::new(10), 6, 1e-5.into(), DType::F32).layer;
    let before = state(&layer);
    let empty = Tensor::ones((0, 6), DType::F32, &CPU)?;
    let (y, sum) = layer.forward_residual(&empty, &empty, None)?;
    assert_eq!((y.dims(), sum.dims()), (&[0, 6][..], &[0, 6][..]));
    assert_eq!(state(&layer), before);
    Ok(())
}

/// Threads that go back through one graph, each from a loss of its own.
#[test]
fn threads_may_share_a_graph() -> Result<()> {
    let mut data = Data::new(12);
    let case = Case::random(&mut data, &[40, 6], DType::F64)?;
    let layer = Twin::new(&mut data, 6, 1e-5.into(), DType::F64).layer;
    layer.mode().set_training(false);
    let outputs = layer.forward_residual(&case.xs, &case.residual, None)?;
    let gradient =
        |uses| -> Result<Tensor> { Ok(case.gradients(&outputs, uses)?.remove(&case.xs).unwrap()) };
    let alone = USES.map(|uses| gradient(uses).unwrap());
    std::thread::scope(|scope| {
        for (uses, alone) in USES.into_iter().zip(&alone) {
            let gradient = &gradient;
            scope.spawn(move || {
                for _ in 0..200 {
                    assert_same_bits("dx", &gradient(uses).unwrap(), alone);
                }
            });
        }
    });
    for (uses, alone) in USES.into_iter().zip(&alone) {
        assert_same_bits("dx", &gradient(uses)?, alone);
    }
    Ok(())
}

/// The identity. Its backward runs another backward first, as a rayon worker may that waits for
/// rows. Says whether that one succeeds.
struct Nested(Tensor, bool);

impl CustomOp1 for Nested {
    fn name(&self) -> &'static str {
        "nested"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        assert_eq!(self.0.backward().is_ok(), self.1);
        Ok(Some(gradient.clone()))
    }
}

#[test]
fn a_backward_may_run_inside_another_of_the_same_graph() -> Result<()> {
    let mut data = Data::new(13);
    let case = Case::random(&mut data, &[40, 6], DType::F64)?;
    let layer = Twin::new(&mut data, 6, 1e-5.into(), DType::F64).layer;
    layer.mode().set_training(false);
    let (y, sum) = layer.forward_residual(&case.xs, &case.residual, None)?;
    let vars = [&case.xs, &case.residual];
    let gradients = |y: &Tensor| -> Result<Vec<Tensor>> {
        let outputs = (y.clone(), sum.clone());
        let store = case.gradients(&outputs, [true, true])?;
        let params = [layer.weight(), layer.bias()].map(|param| param.unwrap().clone());
        let vars = vars.into_iter().map(|var| var.as_tensor().clone());
        Ok((vars.chain(params))
            .map(|var| store.get(&var).unwrap().clone())
            .collect())
    };
    let alone = gradients(&y)?;
    let [of_y, of_sum] = [&y, &sum].map(|output| output.affine(3., 0.)?.sum_all());
    let (of_y, of_sum) = (of_y?, of_sum?);
    // One of the last two leaves a gradient of the sum that nobody takes.
    let fails = y.apply_op1(NoBackward)?.sum_all()?;
    for (inner, succeeds) in [
        ((&of_y + &of_sum)?, true),
        (of_y, true),
        (of_sum.clone(), true),
        ((&fails + &of_sum)?, false),
        ((&of_sum + &fails)?, false),
    ] {
        let nested = gradients(&y.apply_op1(Nested(inner, succeeds))?)?;
        for (nested, alone) in nested.iter().zip(&alone) {
            assert_same_bits("gradient", nested, alone);
        }
    }
    Ok(())
}
