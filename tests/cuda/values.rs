//! Values and gradients that need a GPU, or a CPU beside it.

use super::*;

#[test]
fn recordings_replay() {
    replay(&gpu(), DType::F64, 1e-12);
    replay(&gpu(), DType::F32, 1e-5);
}

/// More elements than 31 bits count, all of them copies of one tile: copies do not change the
/// means, so each fares as the tile alone, and the parameters' gradients add up.
#[test]
#[ignore = "needs 45 GB of GPU memory"]
fn a_batch_beyond_31_bits() {
    const TILES: usize = 2200;
    const ROWS: usize = 1000;
    const COLS: usize = 1024;
    const { assert!(TILES * ROWS * COLS > 1 << 31) };
    let gpu = gpu();
    let mut data = Data::on(&gpu, 3);
    let mut twin = Twin::new(&mut data, COLS, config(Some(8)), DType::F32);
    let mut tile = || Batch::random(&mut data, &[ROWS, COLS], DType::F16, false).xs;
    let mut last = tile();
    twin.check(
        "before",
        &Batch {
            dy: tile(),
            xs: tile(),
            keep: None,
        },
        true,
    );
    for train in [true, false] {
        let xs = Tensor::cat(&vec![&last; TILES], 0).unwrap();
        let xs = Var::from_tensor(&xs).unwrap();
        let y = forward(&twin.layer, &xs, None, train);
        let pass = match train {
            true => twin.oracle.train(&to_f64(&last), None),
            false => twin.oracle.evaluate(&to_f64(&last), None),
        };
        // The upstream gradient of `y` itself is ones.
        let grads = y.backward().unwrap();
        let expected = twin.oracle.backward(&pass, &vec![1.; ROWS * COLS]);

        let bound = |out| Bound {
            out,
            sums: DType::F32,
            n: 2 * (TILES * ROWS + COLS),
        };
        // The first copy, the one that the 31 bits end in, and the last.
        for copy in [0, (1 << 31) / (ROWS * COLS), TILES - 1] {
            let of = |all: &Tensor| {
                let copy = all.narrow(0, copy * ROWS, ROWS).unwrap();
                copy.force_contiguous().unwrap()
            };
            let what = |name| format!("{name} of copy {copy}, train {train}");
            assert_close(&what("y"), &of(&y), &pass.y, bound(DType::F16));
            let dx = of(grads.get(&xs).unwrap());
            assert_close(&what("dx"), &dx, &expected.dx, bound(DType::F16));
        }
        let mut dweight = expected.dweight;
        dweight.values.iter_mut().for_each(|v| *v *= TILES as f64);
        dweight.magnitude *= TILES as f64;
        let weight = twin.layer.weight().unwrap();
        let actual = grads.get(weight).unwrap();
        assert_close("dweight", actual, &dweight, bound(DType::F32));
        // A count, which `f32` holds exactly.
        let count = to_f64(grads.get(twin.layer.bias().unwrap()).unwrap());
        assert_eq!(count, [(TILES * ROWS) as f64; COLS]);
        twin.check_state("state", bound(DType::F32));
        last = tile();
    }
}

#[test]
fn a_recalibration_is_that_of_the_cpu() -> Result<()> {
    let device = gpu();
    let mut data = Data::on(&device, 45);
    let (ours, varmap) = layer_on(&device, 130, config(Some(13)), DType::F32);
    let (theirs, _) = layer(130, config(Some(13)), DType::F32);
    // Whatever stood before.
    var(&varmap, "running_phi").set(&Tensor::full(f32::NAN, 130, &device)?)?;
    {
        let _guards = (
            ours.mode().recalibrate_scope(),
            theirs.mode().recalibrate_scope(),
        );
        for _ in 0..3 {
            let batch = Batch::random(&mut data, &[37, 130], DType::F32, false);
            ours.forward(&batch.xs)?;
            theirs.forward(&batch.xs.to_device(&CPU)?)?;
        }
    }
    assert_relative(
        "ψ²",
        &ours.running_phi()?,
        &to_f64(&theirs.running_phi()?),
        1e-5,
    );
    assert_eq!((ours.steps()?, theirs.steps()?), (0, 0));
    assert_zero("ν", &ours.nu()?);
    Ok(())
}

#[test]
fn group_scaling_is_that_of_the_cpu() -> Result<()> {
    let device = gpu();
    let mut data = Data::on(&device, 46);
    for (cols, groups) in PATHS {
        for (dtype, _) in DTYPES {
            let scaling = GroupScaling::new(groups.unwrap_or(1), 1e-5)?;
            let batch = Batch::random(&mut data, &[37, cols], dtype, false);
            let [ours, theirs] = [&batch, &batch.to(&CPU)].map(|batch| -> Result<_> {
                let xs = Var::from_tensor(&batch.xs)?;
                let y = scaling.forward(&xs)?;
                let dx = (&y * &batch.dy)?.sum_all()?.backward()?.remove(&xs);
                Ok((y, dx.unwrap()))
            });
            let (ours, theirs) = (ours?, theirs?);
            let relative = 32. * precision(dtype).0;
            assert_relative(
                &format!("{dtype:?} {cols}: y"),
                &ours.0,
                &to_f64(&theirs.0),
                relative,
            );
            assert_relative(
                &format!("{dtype:?} {cols}: dx"),
                &ours.1,
                &to_f64(&theirs.1),
                16. * relative,
            );
        }
    }
    Ok(())
}

/// A part of what a backward can give is that part of the whole, and an output that nobody tracks
/// is the one that is tracked.
#[test]
fn gradients_that_are_not_wanted_change_nothing() {
    let device = &gpu();
    for statistics in [Statistics::Running, Statistics::Batch] {
        for ((cols, groups), (input, builder)) in layers(device) {
            let config = PowerNormConfig {
                statistics,
                ..config(groups)
            };
            let twin = || Twin::new(&mut Data::on(device, 9), cols, config, builder);
            let (whole, only_parameters, only_input) = (twin(), twin(), twin());
            let frozen = only_input.varmap.data().lock().unwrap().clone();
            let frozen = frozen
                .into_iter()
                .map(|(name, var)| (name, var.as_detached_tensor()));
            let vb = VarBuilder::from_tensors(frozen.collect(), builder, device);
            let only_input = power_norm(cols, config, vb).unwrap();
            let mut data = Data::on(device, 10);
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

#[test]
fn two_runs_agree_to_the_bit() {
    let device = &gpu();
    for ((cols, groups), (input, builder)) in layers(device) {
        for padded in [false, true] {
            let trajectory = || {
                let mut data = Data::on(device, 8);
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
