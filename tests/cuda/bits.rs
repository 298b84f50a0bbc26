//! What must come to the same bits.

use super::*;

#[test]
fn two_runs_agree_to_the_bit() {
    let gpu = gpu();
    for ((cols, groups), (input, builder)) in layers() {
        for padded in [false, true] {
            let trajectory = || {
                let mut data = Data::on(&gpu, 8);
                let twin = Twin::new(&mut data, cols, config(groups), builder);
                let mut step = || {
                    let batch = Batch::random(&mut data, &[300, cols], input, padded);
                    run(&twin.layer, &batch, true)
                };
                let outcomes = [step(), step(), step()];
                (outcomes, state(&twin.layer))
            };
            let (first, second) = (trajectory(), trajectory());
            let what = format!("{input:?}, {cols} by {groups:?}");
            for (a, b) in first.0.iter().zip(&second.0) {
                same_bits(&what, a, b);
            }
            same_state(&what, &first.1, &second.1);
            assert!(bits(&first.0[2].dx).iter().any(|&bits| bits != 0));
        }
    }
}

/// A part of what a backward can give is that part of the whole, and an output that nobody tracks
/// is the one that is tracked.
#[test]
fn gradients_that_are_not_wanted_change_nothing() {
    let gpu = gpu();
    for statistics in [Statistics::Running, Statistics::Batch] {
        for ((cols, groups), (input, builder)) in layers() {
            let config = PowerNormConfig {
                statistics,
                ..config(groups)
            };
            let twin = || Twin::new(&mut Data::on(&gpu, 9), cols, config, builder);
            let (whole, only_parameters, only_input) = (twin(), twin(), twin());
            let frozen = only_input.varmap.data().lock().unwrap().clone();
            let frozen = frozen
                .into_iter()
                .map(|(name, var)| (name, var.as_detached_tensor()));
            let vb = VarBuilder::from_tensors(frozen.collect(), builder, &gpu);
            let only_input = power_norm(cols, config, vb).unwrap();
            let mut data = Data::on(&gpu, 10);
            for train in [true, true, false] {
                let batch = Batch::random(&mut data, &[70, cols], input, true);
                let expected = run(&whole.layer, &batch, train);
                let what = format!("{input:?}, {cols} by {groups:?}, train {train}");
                let loss = |y: &Tensor| (y * &batch.dy).unwrap().sum_all().unwrap();

                let layer = &only_parameters.layer;
                let y = forward(layer, &batch.xs, batch.keep.as_ref(), train);
                assert_same_bits(&what, &y, &expected.y);
                let grads = loss(&y).backward().unwrap();
                for (parameter, expected) in [
                    (layer.weight(), &expected.dweight),
                    (layer.bias(), &expected.dbias),
                ] {
                    let gradient = grads.get(parameter.unwrap()).unwrap();
                    assert_same_bits(&what, gradient, expected.as_ref().unwrap());
                }
                same_state(&what, &state(layer), &state(&whole.layer));

                let xs = Var::from_tensor(&batch.xs).unwrap();
                let y = forward(&only_input, &xs, batch.keep.as_ref(), train);
                assert_same_bits(&what, &y, &expected.y);
                let grads = loss(&y).backward().unwrap();
                assert_same_bits(&what, grads.get(&xs).unwrap(), &expected.dx);
                assert!(grads.get(only_input.weight().unwrap()).is_none());
                same_state(&what, &state(&only_input), &state(&whole.layer));

                if !train {
                    let y = forward(&only_input, &batch.xs, batch.keep.as_ref(), train);
                    assert_same_bits(&what, &y, &expected.y);
                }
            }
        }
    }
}

/// Inputs that are views, aligned to 16 bytes or not, and the same numbers in memory of their own.
#[test]
fn views_are_what_their_copies_are() {
    const ROWS: usize = 40;
    const COLS: usize = 64;
    type View = fn(&Tensor) -> Result<Tensor>;
    let views: [(&str, &[usize], View); 6] = [
        ("one element in", &[1 + ROWS * COLS], |base| {
            base.narrow(0, 1, ROWS * COLS)?.reshape((ROWS, COLS))
        }),
        ("rows of many", &[ROWS + 3, COLS], |base| {
            base.narrow(0, 3, ROWS)
        }),
        ("columns of many", &[ROWS, COLS + 5], |base| {
            base.narrow(1, 3, COLS)
        }),
        ("transposed", &[COLS, ROWS], |base| base.t()),
        ("one row", &[COLS], |base| base.broadcast_as((ROWS, COLS))),
        ("one column", &[ROWS, 1], |base| {
            base.broadcast_as((ROWS, COLS))
        }),
    ];
    let gpu = gpu();
    for (name, shape, view) in views {
        for (input, builder) in DTYPES {
            let step = |copies: bool| {
                let mut data = Data::on(&gpu, 11);
                let twin = Twin::new(&mut data, COLS, config(Some(4)), builder);
                let dy = Batch::random(&mut data, &[ROWS, COLS], input, false).dy;
                let mask = data.mask(ROWS + 1);
                let mask: Vec<u8> = mask.into_iter().map(u8::from).collect();
                let keep = Tensor::new(mask, &gpu).unwrap().narrow(0, 1, ROWS).unwrap();
                let base = data.normal(shape.iter().product());
                let base = Var::from_tensor(&data.tensor(&base, shape, input)).unwrap();
                let (mut xs, mut keep) = (view(&base).unwrap(), keep);
                if copies {
                    xs = xs.force_contiguous().unwrap();
                    keep = keep.force_contiguous().unwrap();
                }
                let y = forward(&twin.layer, &xs, Some(&keep), true);
                let grads = (&y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
                let grad = |parameter: &Tensor| grads.get(parameter).unwrap().clone();
                let outcome = Outcome {
                    dx: grad(&base),
                    dweight: twin.layer.weight().map(grad),
                    dbias: twin.layer.bias().map(grad),
                    y,
                };
                (outcome, state(&twin.layer))
            };
            let (view, copy) = (step(false), step(true));
            let what = format!("{name}, {input:?}");
            same_bits(&what, &view.0, &copy.0);
            same_state(&what, &view.1, &copy.1);
        }
    }
}

/// Gradients that come back through a transposed and a narrowed output.
#[test]
fn upstream_gradients_may_come_through_views() {
    let gpu = gpu();
    for (input, builder) in DTYPES {
        let gradients = |loss: fn(&Tensor, &Tensor) -> Result<Tensor>| {
            let mut data = Data::on(&gpu, 12);
            let twin = Twin::new(&mut data, 64, config(Some(4)), builder);
            let batch = Batch::random(&mut data, &[40, 64], input, false);
            let xs = Var::from_tensor(&batch.xs).unwrap();
            let y = forward(&twin.layer, &xs, None, true);
            let grads = loss(&y, &batch.dy).unwrap().backward().unwrap();
            let grad = |parameter: &Tensor| grads.get(parameter).unwrap().clone();
            Outcome {
                dx: grad(&xs),
                dweight: twin.layer.weight().map(grad),
                dbias: twin.layer.bias().map(grad),
                y,
            }
        };
        let plain = gradients(|y, dy| (y * dy)?.sum_all());
        let transposed = gradients(|y, dy| (y.t()? * dy.t()?)?.sum_all());
        same_bits("transposed", &transposed, &plain);
        let halves = gradients(|y, dy| {
            let half = |from| (y.narrow(1, from, 32)? * dy.narrow(1, from, 32)?)?.sum_all();
            half(0)? + half(32)?
        });
        same_bits("halves", &halves, &plain);
    }
}
