//! Which of candle's wrong values and gradients, as `docs/guide/traps.md` lists them for a CPU, a GPU
//! has too. As on a CPU (`tests/suite/candle_traps.rs`), these hold candle to what it does now.

use crate::common::gpu::gpu;
use crate::common::*;
use candle::{DType, Device, Result, Tensor, Var};

type Operation = fn(&Tensor) -> Result<Tensor>;

/// The same numbers on every device, in f32.
fn random(seed: u64, shape: &[usize], device: &Device) -> Result<Tensor> {
    let values = Data::new(seed).normal(shape.iter().product());
    tensor(&values, shape, DType::F32).to_device(device)
}

/// The gradient of Σ k y_k / n at random numbers of `shape`.
fn gradient(shape: &[usize], device: &Device, f: Operation) -> Result<Vec<f64>> {
    let xs = Var::from_tensor(&random(70, shape, device)?)?;
    let y = f(&xs)?;
    let n = y.elem_count();
    let weights = (Tensor::arange(1f32, n as f32 + 1., device)? / n as f64)?;
    let loss = (y.flatten_all()? * weights)?.sum_all()?;
    Ok(to_f64(loss.backward()?.get(&xs).unwrap()))
}

fn differ(a: &[f64], b: &[f64]) -> bool {
    let largest = b.iter().fold(0f64, |most, b| most.max(b.abs()));
    assert!(largest > 0. && a.len() == b.len());
    // NaN is no agreement.
    let agree = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-4 * largest;
    !a.iter().zip(b).all(agree)
}

fn rows(xs: &Tensor) -> Result<Tensor> {
    Tensor::new(&[[0u32, 1, 1], [0, 0, 1]], xs.device())
}

fn row(xs: &Tensor) -> Result<Tensor> {
    Tensor::new(&[[0u32, 1, 1]], xs.device())
}

/// Each operation beside one that the page advises.
#[test]
fn gradients_of_a_gpu() -> Result<()> {
    let cases: [(&str, &[usize], Operation, Operation); 7] = [
        (
            "conv1d",
            &[2, 4, 9],
            |xs| xs.conv1d(&random(71, &[6, 4, 3], xs.device())?, 0, 1, 1, 1),
            |xs| {
                let kernel = random(71, &[6, 4, 1, 3], xs.device())?;
                xs.unsqueeze(2)?.conv2d(&kernel, 0, 1, 1, 1)?.squeeze(2)
            },
        ),
        (
            "max_pool2d",
            &[2, 3, 4, 4],
            |xs| xs.max_pool2d(2),
            |xs| xs.reshape((2, 3, 2, 2, 2, 2))?.max(5)?.max(3),
        ),
        (
            "avg_pool2d",
            &[2, 3, 5, 5],
            |xs| xs.avg_pool2d(2),
            |xs| xs.narrow(2, 0, 4)?.narrow(3, 0, 4)?.avg_pool2d(2),
        ),
        (
            "scatter_add",
            &[2, 3],
            |xs| xs.scatter_add(&rows(xs)?, &random(72, &[2, 3], xs.device())?, 0),
            |xs| {
                let source = random(72, &[2, 3], xs.device())?;
                xs + xs.zeros_like()?.scatter_add(&rows(xs)?, &source, 0)?
            },
        ),
        (
            "scatter",
            &[2, 3],
            |xs| xs.scatter(&row(xs)?, &random(72, &[1, 3], xs.device())?, 0),
            |xs| {
                let source = random(72, &[1, 3], xs.device())?;
                let zeros = xs.zeros_like()?;
                let written = zeros.scatter(&row(xs)?, &source.ones_like()?, 0)?;
                (xs * (1. - written)?)? + zeros.scatter(&row(xs)?, &source, 0)?
            },
        ),
        (
            "upsample_nearest2d beside a skip",
            &[1, 2, 3, 3],
            |xs| xs.upsample_nearest2d(6, 6)? + xs.repeat((1, 1, 2, 2))?,
            |xs| xs.affine(1., 0.)?.upsample_nearest2d(6, 6)? + xs.repeat((1, 1, 2, 2))?,
        ),
        (
            "unfold",
            &[4, 3],
            |xs| xs.unfold(0, 2, 2)?.contiguous(),
            |xs| xs.reshape((2, 2, 3))?.transpose(1, 2)?.contiguous(),
        ),
    ];
    let gpu = gpu();
    let mut wrong = vec![];
    for (name, shape, operation, right) in cases {
        // What the page advises is right on a GPU too.
        let expected = gradient(shape, &CPU, right)?;
        assert!(!differ(&gradient(shape, &gpu, right)?, &expected), "{name}");
        if differ(&gradient(shape, &gpu, operation)?, &expected) {
            wrong.push(name);
        }
    }
    // All except conv1d, whose gradient is wrong on a CPU alone.
    let names = cases.map(|(name, ..)| name);
    assert_eq!(names[0], "conv1d");
    assert_eq!(wrong, names[1..]);
    Ok(())
}

/// gelu's gradient in f16 has a cube that overflows.
#[test]
fn gelu_of_a_gpu() -> Result<()> {
    let xs = Var::from_tensor(&tensor(&[30., 45.], &[2], DType::F16).to_device(&gpu())?)?;
    let y = xs.gelu()?;
    assert_eq!(to_f64(&y), [30., 45.]);
    let gradient = to_f64(y.sum_all()?.backward()?.get(&xs).unwrap());
    assert_eq!(gradient[0], 1.);
    assert!(gradient[1].is_nan());
    Ok(())
}
