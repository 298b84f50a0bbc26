//! Inputs at the ends of f32's range: what is finite in the layer's equations stays finite, and
//! what is not is forgotten.

mod common;

use candle::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::{power_norm, PowerNorm, PowerNormConfig};
use common::{assert_finite, to_f64, Data};

const SIZE: usize = 48;

fn config(groups: Option<usize>, warmup_steps: usize) -> PowerNormConfig {
    PowerNormConfig {
        group_scaling: groups,
        warmup_steps,
        ..Default::default()
    }
}

fn layer(config: PowerNormConfig, dtype: DType) -> Result<(PowerNorm, VarMap)> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, dtype, &Device::Cpu);
    Ok((power_norm(SIZE, config, vb)?, varmap))
}

/// A channel that has long been silent has a tiny ψ², so its part of dx̃ is large. Squaring a large
/// input there must not overflow. (Seen: infinity in the whole group.)
#[test]
fn a_silent_channel_does_not_overflow_the_gradient() -> Result<()> {
    let mut data = Data::new(2);
    let dy = Tensor::from_vec(data.normal(4 * SIZE), (4, SIZE), &Device::Cpu)?;
    let x = Tensor::from_vec(data.normal(4 * SIZE), (4, SIZE), &Device::Cpu)?;
    let x = (x * 1e17)?.to_dtype(DType::F32)?;
    let silent = |value: f64, other: f64, dtype| {
        let values: Vec<f64> = (0..SIZE)
            .map(|c| if c == 3 { value } else { other })
            .collect();
        Tensor::from_vec(values, SIZE, &Device::Cpu)?.to_dtype(dtype)
    };
    let gradient = |dtype| -> Result<Vec<f64>> {
        let (layer, mut varmap) = layer(config(Some(1), 0), dtype)?;
        varmap.set_one("running_phi", silent(0., 1., dtype)?)?;
        varmap.set_one("ema_gz", silent(10., 0., dtype)?)?;
        let x = Var::from_tensor(&x.to_dtype(dtype)?)?;
        let y = layer.forward_t(&x, true)?;
        let grads = (&y * &dy.to_dtype(dtype)?)?.sum_all()?.backward()?;
        Ok(to_f64(grads.get(&x).expect("a gradient")))
    };
    let (ours, expected) = (gradient(DType::F32)?, gradient(DType::F64)?);
    let largest = expected.iter().fold(0f64, |max, e| max.max(e.abs()));
    assert!(largest > 0.);
    for (ours, expected) in ours.iter().zip(&expected) {
        assert!(
            (ours - expected).abs() <= 1e-5 * largest,
            "{ours:e} {expected:e}"
        );
    }
    Ok(())
}

/// An infinity or a NaN in a row makes its groups' outputs NaN, so that the statistics see it and
/// forget the batch in those groups' channels; the other groups step.
#[test]
fn a_non_finite_row_is_forgotten_under_the_layer_scale() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        for warmup in [0, 100] {
            for poison in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
                let mut data = Data::new(3);
                let (layer, _varmap) = layer(config(Some(4), warmup), dtype)?;
                let clean = Tensor::from_vec(data.normal(8 * SIZE), (8, SIZE), &Device::Cpu)?;
                let mut values = data.normal(8 * SIZE);
                values[2 * SIZE + 1] = poison;
                let poisoned = Tensor::from_vec(values, (8, SIZE), &Device::Cpu)?;
                let step = |x: &Tensor| layer.forward_t(&x.to_dtype(dtype)?, true)?.backward();
                step(&clean)?;
                let before = to_f64(&layer.running_phi()?);
                let x = Var::from_tensor(&poisoned.to_dtype(dtype)?)?;
                layer.forward_t(&x, true)?.backward()?;
                let after = to_f64(&layer.running_phi()?);
                for (channel, (before, after)) in before.iter().zip(&after).enumerate() {
                    let hit = channel < SIZE / 4;
                    assert_eq!(
                        before == after,
                        hit,
                        "{dtype:?} {poison}: channel {channel}"
                    );
                }
                step(&clean)?;
                assert_finite("ψ²", &layer.running_phi()?);
                assert_finite("ν", &layer.nu()?);
                assert_finite("y", &layer.forward_t(&clean.to_dtype(dtype)?, true)?);
            }
        }
    }
    Ok(())
}
