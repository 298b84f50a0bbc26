//! A residual, a loss scale, a recalibration, the layer-scale by itself.

use super::*;

/// Outputs, state and the parameters' gradients of a fused residual are those of an addition and a
/// forward, to the bit; the input's, to a rounding.
#[test]
fn a_residual_is_an_addition_and_a_forward() -> Result<()> {
    for (k, ((cols, groups), (dtype, builder))) in layers().enumerate() {
        let (config, padded) = variants()[(cols + 3 * k) % 16];
        let config = PowerNormConfig {
            group_scaling: groups,
            ..config
        };
        let what = format!("{dtype:?} {cols} {config:?} padded {padded}");
        let [fused, plain] =
            [(); 2].map(|()| Twin::new(&mut Data::on(&gpu(), 41), cols, config, builder).layer);
        let mut data = Data::on(fused.running_phi()?.device(), 42);
        for _ in 0..3 {
            let batch = Batch::random(&mut data, &[5, 7, cols], dtype, padded);
            let other = Batch::random(&mut data, &[5, 7, cols], dtype, false);
            let xs = Var::from_tensor(&batch.xs)?;
            let residual = Var::from_tensor(&other.xs)?;
            let ours = match &batch.keep {
                Some(keep) => fused.forward_residual_masked(&xs, &residual, keep)?,
                None => fused.forward_residual(&xs, &residual)?,
            };
            let sum = (xs.as_tensor() + residual.as_tensor())?;
            let y = forward(&plain, &sum, batch.keep.as_ref(), true);
            let theirs = (y, sum);
            assert_same_bits(&format!("{what}: y"), &ours.0, &theirs.0);
            assert_same_bits(&format!("{what}: sum"), &ours.1, &theirs.1);
            let gradients = |(y, sum): &(Tensor, Tensor)| {
                let loss = ((y * &batch.dy)?.sum_all()? + (sum * &other.dy)?.sum_all()?)?;
                loss.backward()
            };
            let (ours, theirs) = (gradients(&ours)?, gradients(&theirs)?);
            for input in [&xs, &residual] {
                let (ours, theirs) = (ours.get(input).unwrap(), theirs.get(input).unwrap());
                let relative = 4. * precision(dtype).0;
                assert_relative(&what, ours, &to_f64(theirs), relative);
            }
            for (a, b) in [
                (fused.weight(), plain.weight()),
                (fused.bias(), plain.bias()),
            ] {
                if let (Some(a), Some(b)) = (a, b) {
                    assert_same_bits(&what, ours.get(a).unwrap(), theirs.get(b).unwrap());
                }
            }
            same_state(&what, &state(&fused), &state(&plain));
        }
    }
    Ok(())
}

/// A bias that is computed has a gradient where the loss sees the sum alone, for candle asks for
/// one: of nothing.
#[test]
fn a_sum_by_itself_gives_a_computed_bias_zeros() -> Result<()> {
    let gpu = gpu();
    let master = Var::ones(8, DType::F32, &gpu)?;
    let (_, varmap) = layer_on(&gpu, 8, config(None), DType::F32);
    let mut tensors: HashMap<String, Tensor> = (varmap.data().lock().unwrap().iter())
        .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
        .collect();
    tensors.insert("bias".to_owned(), master.affine(2., 0.)?);
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &gpu);
    let layer = power_norm(8, config(None), vb)?;
    let xs = Var::ones((3, 8), DType::F32, &gpu)?;
    let (_, sum) = layer.forward_residual(&xs, &xs)?;
    let gradients = sum.sum_all()?.backward()?;
    assert_zero("bias", gradients.get(&master).unwrap());
    assert_relative("xs", gradients.get(&xs).unwrap(), &[2.; 24], 0.);
    Ok(())
}

/// Powers of two cancel to the bit.
#[test]
fn a_loss_scale_that_changes_changes_nothing() -> Result<()> {
    for statistics in [Statistics::Running, Statistics::Batch] {
        let config = PowerNormConfig {
            statistics,
            ..config(Some(1))
        };
        let scale = LossScale::default();
        let device = gpu();
        let build = || Twin::new(&mut Data::on(&device, 43), 48, config, DType::F32).layer;
        let (plain, scaled) = (build(), build().with_loss_scale(&scale));
        let mut data = Data::on(&device, 44);
        for factor in [1., 1024., 1024., 0.25, 65536.] {
            scale.set(factor)?;
            let mut batch = Batch::random(&mut data, &[37, 48], DType::F32, false);
            run(&plain, &batch, true);
            batch.dy = (&batch.dy * factor)?;
            run(&scaled, &batch, true);
            same_state(
                &format!("{statistics:?} {factor}"),
                &state(&scaled),
                &state(&plain),
            );
        }
    }
    Ok(())
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
