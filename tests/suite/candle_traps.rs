//! What candle 0.11 does that its user would not expect: a test for each row of
//! `docs/guide/traps.md`, and of what the row advises instead.
//!
//! They hold candle to what it does now, right or wrong, so each fails once candle changes. Then
//! run the row by hand, take it off the page or rewrite it, and do the same to the test and to its
//! script in `findings/`. Where more depends on the row, a comment says what.

use crate::common::*;
use candle::quantized::{GgmlDType, QMatMul, QTensor};
use candle::{DType, Module, ModuleT, Result, Tensor, Var};
use candle_nn::rnn::Direction;
use candle_nn::{
    AdamW, LSTMConfig, Linear, Optimizer, ParamsAdamW, RNN, VarBuilder, VarMap, kv_cache::KvCache,
    loss, ops,
};

/// Random numbers in f64.
fn random(shape: &[usize]) -> Tensor {
    let values = Data::new(70).normal(shape.iter().product());
    tensor(&values, shape, DType::F64)
}

/// Σ k y_k / n, so that each element of y has a gradient of its own.
fn weighted(y: &Tensor) -> Result<Tensor> {
    let n = y.elem_count() as f64;
    let weights = (Tensor::arange(1., n + 1., &CPU)? / n)?;
    (y.flatten_all()? * weights.to_dtype(y.dtype())?)?.sum_all()
}

/// Whether candle's gradient of `f` at `x`, in f64, is that of central differences.
fn is_right(x: &Tensor, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<bool> {
    let var = Var::from_tensor(x)?;
    let candles = to_f64(weighted(&f(&var)?)?.backward()?.get(&var).unwrap());
    let exact = central_differences(&to_f64(x), |at| {
        let y = f(&tensor(at, x.dims(), DType::F64)).unwrap();
        weighted(&y).unwrap().to_scalar().unwrap()
    });
    let largest = exact.iter().fold(0f64, |most, d| most.max(d.abs()));
    assert!(largest > 0.);
    Ok(distance(&candles, &exact) < 1e-6 * largest)
}

/// The gradient of Σ f(x) at numbers of a dtype.
fn slope(x: &[f64], dtype: DType, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Vec<f64>> {
    let x = Var::from_tensor(&tensor(x, &[x.len()], dtype))?;
    Ok(to_f64(f(&x)?.sum_all()?.backward()?.get(&x).unwrap()))
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let distances = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    distances.fold(0., |most, d| if d > most || d.is_nan() { d } else { most })
}

fn fresh() -> VarBuilder<'static> {
    VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU)
}

// Wrong values

/// candle issue 3744: the CPU's product takes the rows of all sequences for one matrix, whatever
/// their strides. Also to change: `fold_into` in `src/fold.rs`, and `docs/guide/inference.md`.
#[test]
fn linear_of_a_transposed_view_is_wrong_from_two_sequences_on() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for sequences in [1, 2] {
            let xs = random(&[sequences, 8, 5])
                .to_dtype(dtype)?
                .transpose(1, 2)?;
            let linear = Linear::new(random(&[4, 8]).to_dtype(dtype)?, None);
            let expected = to_f64(&linear.forward(&xs.contiguous()?)?);
            let wrong = distance(&to_f64(&linear.forward(&xs)?), &expected);
            assert_eq!(
                wrong > 0.3,
                sequences > 1,
                "{dtype:?}, {sequences}: {wrong}"
            );

            let product = xs.broadcast_matmul(&linear.weight().t()?)?;
            assert!(distance(&to_f64(&product), &expected) < 0.05);
        }
    }
    Ok(())
}

/// The same product, inside of `conv_transpose1d` without padding and dilation.
#[test]
fn conv_transpose1d_is_wrong_from_two_sequences_on() -> Result<()> {
    let (xs, kernel) = (random(&[2, 4, 5]), random(&[4, 3, 2]));
    let both = xs.conv_transpose1d(&kernel, 0, 0, 1, 1, 1)?;
    let each: Result<Vec<_>> = (0..2)
        .map(|k| xs.narrow(0, k, 1)?.conv_transpose1d(&kernel, 0, 0, 1, 1, 1))
        .collect();
    let expected = to_f64(&Tensor::cat(&each?, 0)?);
    assert!(distance(&to_f64(&both), &expected) > 0.3);

    let in_two = |xs: &Tensor| {
        let kernel = kernel.unsqueeze(2)?;
        (xs.unsqueeze(2)?.conv_transpose2d(&kernel, 0, 0, 1, 1))?.squeeze(2)
    };
    assert!(distance(&to_f64(&in_two(&xs)?), &expected) < 1e-12);
    assert!(is_right(&xs, in_two)?);
    Ok(())
}

#[test]
fn sums_of_half_precision_stop_growing() -> Result<()> {
    // Where one more 1 is lost: 2^8 and 2^11.
    for (dtype, most) in [(DType::BF16, 256.), (DType::F16, 2048.)] {
        // Scores of equal size, as those of fresh attention nearly are.
        let scores = Tensor::zeros((1, 4096), dtype, &CPU)?;
        for weights in [ops::softmax(&scores, 1)?, ops::softmax_last_dim(&scores)?] {
            assert_eq!(to_f64(&weights).iter().sum::<f64>(), 4096. / most);
        }
        let right = candle_powernorm::ops::softmax_last_dim(&scores)?;
        assert_eq!(to_f64(&right).iter().sum::<f64>(), 1.);
        let logits = Tensor::zeros((1, 32_000), dtype, &CPU)?;
        let label = Tensor::new(&[3u32], &CPU)?;
        let of = |logits: &Tensor| {
            Ok::<_, candle::Error>(to_f64(&loss::cross_entropy(logits, &label)?)[0])
        };
        assert!((of(&logits)? - most.ln()).abs() < 0.02);
        assert!((of(&logits.to_dtype(DType::F32)?)? - 32_000f64.ln()).abs() < 1e-4);
    }
    Ok(())
}

#[test]
fn means_over_many_rows_lose_digits_in_f32() -> Result<()> {
    let xs = Tensor::full(0.1f32, (1 << 20, 2), &CPU)?;
    let error = |mean: Tensor| (to_f64(&mean)[0] / f64::from(0.1f32) - 1.).abs();
    let down = error(xs.mean(0)?);
    assert!(down > 5e-3, "{down}");
    let in_parts = error(xs.reshape((1 << 10, 1 << 10, 2))?.mean(0)?.mean(0)?);
    assert!(in_parts < 1e-4, "{in_parts}");
    Ok(())
}

/// Also to change: the advice on the mean of a mask in `docs/guide/troubleshooting.md`.
#[test]
fn integers_turn_a_number_into_their_dtype() -> Result<()> {
    let mask = Tensor::new(&[1u8, 0, 1, 1], &CPU)?;
    let ids = Tensor::new(&[5u32, 6, 7], &CPU)?;
    // −1 becomes 0 in an unsigned dtype, and 1/n becomes 0 in every integer.
    assert_eq!((1. - &mask)?.to_vec1::<u8>()?, [1, 1, 1, 1]);
    assert_eq!((&ids - 1.)?.to_vec1::<u32>()?, [5, 6, 7]);
    assert_eq!((&ids / 2.)?.to_vec1::<u32>()?, [0, 0, 0]);
    assert_eq!((&ids * 1.5)?.to_vec1::<u32>()?, [5, 6, 7]);
    assert_eq!(mask.mean(0)?.to_scalar::<u8>()?, 0);
    assert_eq!(mask.gt(-1.)?.to_vec1::<u8>()?, [1, 0, 1, 1]);
    assert_eq!(ids.eq(5.5)?.to_vec1::<u8>()?, [1, 0, 0]);

    assert_eq!(mask.eq(0u8)?.to_vec1::<u8>()?, [0, 1, 0, 0]);
    let mean = mask.to_dtype(DType::F32)?.mean(0)?;
    assert_eq!(mean.to_scalar::<f32>()?, 0.75);
    let one = Tensor::ones_like(&ids)?;
    assert_eq!((&ids - one)?.to_vec1::<u32>()?, [4, 5, 6]);
    Ok(())
}

#[test]
fn the_largest_index_of_a_dtype_is_none() -> Result<()> {
    let ids = Tensor::new(&[254u8, 255], &CPU)?;
    let embeddings = Var::ones((256, 1), DType::F32, &CPU)?;
    let of = |ids: &Tensor| -> Result<_> {
        let ys = embeddings.embedding(ids)?;
        let gradients = ys.sum_all()?.backward()?;
        let gradient = gradients.get(&embeddings).unwrap().narrow(0, 254, 2)?;
        Ok((to_f64(&ys), to_f64(&gradient)))
    };
    assert_eq!(of(&ids)?, (vec![1., 0.], vec![1., 0.]));
    assert_eq!(
        of(&ids.to_dtype(DType::U32)?)?,
        (vec![1., 1.], vec![1., 1.])
    );

    let logits = Tensor::zeros((2, 256), DType::F32, &CPU)?;
    let of = |ids: &Tensor| Ok::<_, candle::Error>(to_f64(&loss::cross_entropy(&logits, ids)?)[0]);
    let whole = of(&ids.to_dtype(DType::U32)?)?;
    assert!((whole - 256f64.ln()).abs() < 1e-5);
    assert!((of(&ids)? - whole / 2.).abs() < 1e-5);
    // A label that is to be ignored counts in the mean all the same.
    let labels = Tensor::new(&[254, u32::MAX], &CPU)?;
    assert!((of(&labels)? - whole / 2.).abs() < 1e-5);
    Ok(())
}

/// Also to change: where `docs/guide/troubleshooting.md` looks for the first NaN.
#[test]
fn relu_and_max_hide_nan() -> Result<()> {
    let xs = Tensor::new(&[1f32, f32::NAN, -1.], &CPU)?;
    assert_eq!(xs.relu()?.to_vec1::<f32>()?, [1., 0., 0.]);
    assert_eq!(xs.max(0)?.to_scalar::<f32>()?, 1.);
    assert_eq!(xs.min(0)?.to_scalar::<f32>()?, -1.);
    assert_eq!(xs.argmax(0)?.to_scalar::<u32>()?, 0);
    // Not these.
    let shows = |ys: Tensor| ys.to_vec1::<f32>().unwrap()[1].is_nan();
    assert!(shows(xs.gelu_erf()?) && shows(xs.silu()?) && shows(xs.maximum(0f32)?));
    assert!(xs.sum(0)?.to_scalar::<f32>()?.is_nan());
    Ok(())
}

#[test]
fn arange_step_adds_up() -> Result<()> {
    let len = |tensor: Tensor| tensor.elem_count();
    assert_eq!(len(Tensor::arange_step(0f32, 1., 0.01, &CPU)?), 101);
    assert_eq!(len(Tensor::arange_step(0f64, 1., 0.01, &CPU)?), 100);
    assert_eq!(len(Tensor::arange_step(0f32, 1., 0.1, &CPU)?), 10);
    assert_eq!(len(Tensor::arange_step(0f64, 1., 0.1, &CPU)?), 11);
    assert_eq!(len((Tensor::arange(0f32, 100., &CPU)? * 0.01)?), 100);
    Ok(())
}

#[test]
fn cumsum_is_a_product_with_zeros() -> Result<()> {
    let xs = Tensor::new(&[1f32, 2., f32::NEG_INFINITY, 3.], &CPU)?;
    let sums = xs.cumsum(0)?.to_vec1::<f32>()?;
    assert!(sums[0].is_nan() && sums[1].is_nan());
    assert_eq!(sums[2..], [f32::NEG_INFINITY; 2]);
    Ok(())
}

#[test]
fn pow_of_a_tensor_is_of_positive_numbers() -> Result<()> {
    let two = Tensor::new(&[2f32, 2.], &CPU)?;
    let xs = Tensor::new(&[-2f32, 0.], &CPU)?;
    assert!(xs.pow(&two)?.to_vec1::<f32>()?[0].is_nan());
    assert!(slope(&[0.], DType::F32, |x| x.pow(&two.narrow(0, 0, 1)?))?[0].is_nan());
    assert_eq!(xs.powf(2.)?.to_vec1::<f32>()?, [4., 0.]);
    Ok(())
}

#[test]
fn random_numbers_of_half_precision_reach_their_upper_bound() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let numbers = Tensor::zeros(1 << 18, dtype, &CPU)?.rand_like(0., 1.)?;
        assert!(to_f64(&numbers).contains(&1.), "{dtype:?}");
    }
    Ok(())
}

// Wrong gradients

#[test]
fn conv1d_has_wrong_gradients() -> Result<()> {
    let in_two = |xs: &Tensor, kernel: &Tensor| {
        let ys = xs.unsqueeze(2)?.conv2d(&kernel.unsqueeze(2)?, 0, 1, 1, 1)?;
        ys.squeeze(2)
    };
    for sequences in [1, 2] {
        let (xs, kernel) = (random(&[sequences, 4, 9]), random(&[6, 4, 3]));
        let one = |xs: &Tensor, kernel: &Tensor| xs.conv1d(kernel, 0, 1, 1, 1);
        assert_eq!(is_right(&xs, |xs| one(xs, &kernel))?, sequences == 1);
        assert_eq!(
            is_right(&kernel, |kernel| one(&xs, kernel))?,
            sequences == 1
        );
        assert!(is_right(&xs, |xs| in_two(xs, &kernel))?);
        assert!(is_right(&kernel, |kernel| in_two(&xs, kernel))?);
    }
    // Nor does the forward read a kernel that is a view, even for one sequence.
    let (xs, kernel) = (random(&[1, 4, 9]), random(&[4, 6, 3]).transpose(0, 1)?);
    let expected = to_f64(&xs.conv1d(&kernel.contiguous()?, 0, 1, 1, 1)?);
    assert!(distance(&to_f64(&xs.conv1d(&kernel, 0, 1, 1, 1)?), &expected) > 0.3);
    assert!(distance(&to_f64(&in_two(&xs, &kernel)?), &expected) < 1e-12);
    Ok(())
}

#[test]
fn pooling_has_wrong_gradients() -> Result<()> {
    let xs = random(&[2, 3, 4, 4]);
    assert!(!is_right(&xs, |xs| xs.max_pool2d(2))?);
    let quarter = slope(&[1., 2., 3., 4.], DType::F64, |xs| {
        xs.reshape((1, 1, 2, 2))?.max_pool2d(2)
    })?;
    assert_eq!(quarter, [0., 0., 0., 0.25]);
    let in_windows = |xs: &Tensor| xs.reshape((2, 3, 2, 2, 2, 2))?.max(5)?.max(3);
    let expected = to_f64(&xs.max_pool2d(2)?);
    assert_eq!(to_f64(&in_windows(&xs)?), expected);
    assert!(is_right(&xs, in_windows)?);

    assert!(is_right(&xs, |xs| xs.avg_pool2d(2))?);
    let odd = random(&[2, 3, 5, 5]);
    assert!(!is_right(&odd, |xs| xs.avg_pool2d(2))?);
    let cut = |xs: &Tensor| xs.narrow(2, 0, 4)?.narrow(3, 0, 4)?.avg_pool2d(2);
    assert_eq!(to_f64(&cut(&odd)?), to_f64(&odd.avg_pool2d(2)?));
    assert!(is_right(&odd, cut)?);
    Ok(())
}

#[test]
fn scatter_and_scatter_add_have_each_other_s_gradient() -> Result<()> {
    let xs = random(&[2, 3]);
    let zeros = xs.zeros_like()?;
    let same = |a: Tensor, b: Tensor| distance(&to_f64(&a), &to_f64(&b)) < 1e-12;

    // If the indices have another shape than the target, the backward is an error instead.
    let (source, rows) = (
        random(&[2, 3]),
        Tensor::new(&[[0u32, 1, 1], [0, 0, 1]], &CPU)?,
    );
    assert!(!is_right(&xs, |xs| xs.scatter_add(&rows, &source, 0))?);
    // A constant as the target makes it right.
    let add = |xs: &Tensor| xs + zeros.scatter_add(&rows, &source, 0)?;
    assert!(same(add(&xs)?, xs.scatter_add(&rows, &source, 0)?));
    assert!(is_right(&xs, add)?);
    assert!(is_right(&source, |s| zeros.scatter_add(&rows, s, 0))?);

    let (source, rows) = (random(&[1, 3]), Tensor::new(&[[0u32, 1, 1]], &CPU)?);
    assert!(!is_right(&xs, |xs| xs.scatter(&rows, &source, 0))?);
    let written = zeros.scatter(&rows, &source.ones_like()?, 0)?;
    let set = |xs: &Tensor| (xs * (1. - &written)?)? + zeros.scatter(&rows, &source, 0)?;
    assert!(same(set(&xs)?, xs.scatter(&rows, &source, 0)?));
    assert!(is_right(&xs, set)?);
    assert!(is_right(&source, |s| zeros.scatter(&rows, s, 0))?);
    Ok(())
}

#[test]
fn upsample_nearest_overwrites_the_gradient_of_a_skip() -> Result<()> {
    let xs = random(&[1, 2, 3, 3]);
    let skip = |xs: &Tensor, up: Tensor| up + xs.repeat((1, 1, 2, 2))?;
    assert!(is_right(&xs, |xs| xs.upsample_nearest2d(6, 6))?);
    assert!(!is_right(&xs, |xs| skip(xs, xs.upsample_nearest2d(6, 6)?))?);
    let own = |xs: &Tensor| xs.affine(1., 0.)?.upsample_nearest2d(6, 6);
    assert!(is_right(&xs, |xs| skip(xs, own(xs)?))?);

    let xs = random(&[1, 2, 3]);
    let skip = |xs: &Tensor, up: Tensor| up + xs.repeat((1, 1, 2))?;
    assert!(!is_right(&xs, |xs| skip(xs, xs.upsample_nearest1d(6)?))?);
    let own = |xs: &Tensor| xs.affine(1., 0.)?.upsample_nearest1d(6);
    assert!(is_right(&xs, |xs| skip(xs, own(xs)?))?);
    Ok(())
}

#[test]
fn unfold_puts_gradients_in_other_places() -> Result<()> {
    let xs = random(&[4, 3]);
    // Windows that overlap are an error.
    assert!(!is_right(&xs, |xs| xs.unfold(0, 2, 2)?.contiguous())?);
    let in_windows = |xs: &Tensor| xs.reshape((2, 2, 3))?.transpose(1, 2)?.contiguous();
    let expected = to_f64(&xs.unfold(0, 2, 2)?);
    assert_eq!(to_f64(&in_windows(&xs)?), expected);
    assert!(is_right(&xs, in_windows)?);
    Ok(())
}

#[test]
fn kinks_have_other_gradients_than_pytorch_s() -> Result<()> {
    // PyTorch: a third each; 0; 0; 1 at both ends.
    let f32 = DType::F32;
    assert_eq!(slope(&[2., 2., 2.], f32, |x| x.max(0))?, [1., 1., 1.]);
    assert_eq!(slope(&[0.], f32, Tensor::relu)?, [1.]);
    assert_eq!(slope(&[0.], f32, Tensor::abs)?, [1.]);
    assert_eq!(slope(&[0., 1.], f32, |x| x.clamp(0f32, 1f32))?, [0.5, 0.5]);
    Ok(())
}

// Gradients that are not finite, or lost

/// The cube overflows in F16; in f64 the constants have six digits.
#[test]
fn gelu_has_a_gradient_of_nan_in_f16() -> Result<()> {
    let at = [40., 41., -41.];
    let gradient = slope(&at, DType::F16, Tensor::gelu)?;
    assert!(gradient[0] == 1. && gradient[1].is_nan() && gradient[2].is_nan());
    let y = to_f64(&tensor(&at, &[3], DType::F16).gelu()?);
    assert_eq!(y, [40., 41., 0.]);
    use candle_powernorm::ops;
    for right in [ops::gelu, ops::gelu_erf, Tensor::gelu_erf, Tensor::silu] {
        assert_eq!(slope(&at, DType::F16, right)?, [1., 1., 0.]);
    }
    assert_eq!(slope(&at, DType::BF16, Tensor::gelu)?, [1., 1., 0.]);

    let at = random(&[20]);
    let exact = central_differences(&to_f64(&at), |at| {
        to_f64(&tensor(at, &[20], DType::F64).gelu().unwrap())
            .iter()
            .sum()
    });
    let error = distance(&slope(&to_f64(&at), DType::F64, Tensor::gelu)?, &exact);
    assert!((1e-8..1e-5).contains(&error), "{error}");
    Ok(())
}

/// exp overflows, and its gradient is infinity times 0.
#[test]
fn mish_and_selu_have_gradients_of_nan() -> Result<()> {
    let overflows = [
        (DType::F16, 11., 12.),
        (DType::F32, 88., 89.),
        (DType::BF16, 88., 89.),
    ];
    for (dtype, last, first) in overflows {
        let gradient = slope(&[last, first], dtype, ops::mish)?;
        assert!(
            gradient[0] == 1. && gradient[1].is_nan(),
            "{dtype:?}: {gradient:?}"
        );
        assert_eq!(to_f64(&ops::mish(&tensor(&[first], &[1], dtype))?), [first]);
    }
    let selu = |x: &Tensor| ops::selu(x, 1.6732632, 1.050701);
    let gradient = slope(&[88., 89.], DType::F32, selu)?;
    assert!(gradient[0].is_finite() && gradient[1].is_nan());
    Ok(())
}

/// The gradient of a quotient divides by the square of the divisor, which overflows at 256, and
/// each of several maxima gets the whole gradient of the maximum.
#[test]
fn softmax_of_many_scores_has_a_wrong_gradient_in_f16() -> Result<()> {
    let scores = (random(&[1, 512]) * 0.1)?;
    let dy = Tensor::arange(0f32, 512., &CPU)?.reshape((1, 512))?;
    let dy = (dy / 512.)?;
    let gradient = |dtype, softmax: fn(&Tensor) -> Result<Tensor>| -> Result<Vec<f64>> {
        let xs = Var::from_tensor(&scores.to_dtype(dtype)?)?;
        let loss = (softmax(&xs)? * dy.to_dtype(dtype)?)?.sum_all()?;
        Ok(to_f64(loss.backward()?.get(&xs).unwrap()))
    };
    let candles = |xs: &Tensor| ops::softmax(xs, 1);
    let in_f32 = |xs: &Tensor| ops::softmax(&xs.to_dtype(DType::F32)?, 1)?.to_dtype(xs.dtype());
    let exact = gradient(DType::F32, candles)?;
    let largest = exact.iter().fold(0f64, |most, d| most.max(d.abs()));
    assert!(distance(&gradient(DType::F16, candles)?, &exact) > 10. * largest);
    for right in [in_f32, candle_powernorm::ops::softmax_last_dim] {
        assert!(distance(&gradient(DType::F16, right)?, &exact) < 0.02 * largest);
    }

    let inverse = slope(&[200., 256.], DType::F16, Tensor::recip)?;
    assert!(inverse[0] < 0. && inverse[1] == 0., "{inverse:?}");
    Ok(())
}

#[test]
fn binary_cross_entropy_is_not_finite_from_a_logit_of_17_on() -> Result<()> {
    let loss = |logit: f32, target: f32| -> Result<f32> {
        let [logit, target] = [logit, target].map(|x| Tensor::new(&[[x]], &CPU));
        loss::binary_cross_entropy_with_logit(&logit?, &target?)?.to_scalar()
    };
    assert!(loss(16., 0.)?.is_finite() && loss(16., 1.)?.is_finite());
    assert!(loss(17., 0.)? == f32::INFINITY && loss(17., 1.)?.is_nan());

    // max(x, 0) − x t + ln(1 + exp(−|x|))
    let stable = |xs: &Tensor, targets: &Tensor| {
        let log = (xs.abs()?.neg()?.exp()? + 1.)?.log()?;
        ((xs.relu()? - (xs * targets)?)? + log)?.mean_all()
    };
    for target in [0., 1.] {
        let gradient = slope(&[40.], DType::F32, |x| {
            let target = Tensor::full(target as f32, 1, &CPU)?;
            stable(x, &target)
        })?;
        assert!((gradient[0] - (1. - target)).abs() < 1e-6, "{gradient:?}");
    }
    Ok(())
}

#[test]
fn batch_norm_of_one_row_is_nan_for_good() -> Result<()> {
    let norm = candle_nn::batch_norm(2, 1e-5, fresh())?;
    norm.forward_t(&Tensor::ones((1, 2), DType::F32, &CPU)?, true)?;
    for _ in 0..3 {
        norm.forward_t(&random(&[8, 2]).to_dtype(DType::F32)?, true)?;
    }
    let variance = norm.running_var().to_vec1::<f32>()?;
    assert!(variance.iter().all(|variance| variance.is_nan()));
    Ok(())
}

#[test]
fn what_is_for_inference_passes_no_gradient() -> Result<()> {
    let weight = QTensor::quantize(&random(&[4, 256]).to_dtype(DType::F32)?, GgmlDType::Q8_0)?;
    let xs = Var::from_tensor(&random(&[2, 256]).to_dtype(DType::F32)?)?;
    let has_gradient =
        |ys: Tensor| Ok::<_, candle::Error>(ys.sum_all()?.backward()?.get(&xs).is_some());
    let dequantized = weight.dequantize(&CPU)?;
    assert!(!has_gradient(QMatMul::from_qtensor(weight)?.forward(&xs)?)?);
    assert!(has_gradient(Linear::new(dequantized, None).forward(&xs)?)?);

    let (keys, _) = KvCache::new(0, 8).append(&xs, &xs)?;
    assert!(!has_gradient(keys)?);
    assert!(has_gradient(Tensor::cat(&[xs.as_tensor(); 2], 0)?)?);
    Ok(())
}

// Starts, steps and layers

/// Kaiming's normal distribution for a ReLU, where PyTorch draws from ±1/√n. Also to change:
/// `docs/guide/inference.md` and `lab/README.md`, which say which start a model had.
#[test]
fn a_fresh_linear_layer_is_2_45_times_as_wide_as_pytorch_s() -> Result<()> {
    const SIZE: usize = 256;
    let deviation = |linear: Linear| -> Result<f64> {
        let square = linear.weight().sqr()?.mean_all()?.to_scalar::<f32>()?;
        Ok(f64::from(square).sqrt() * (3. * SIZE as f64).sqrt())
    };
    let candles = deviation(candle_nn::linear(SIZE, SIZE, fresh())?)?;
    assert!((candles - 6f64.sqrt()).abs() < 0.05, "{candles}");

    let bound = 1. / (SIZE as f64).sqrt();
    let uniform = candle_nn::Init::Uniform {
        lo: -bound,
        up: bound,
    };
    let weight = fresh().get_with_hints((SIZE, SIZE), "weight", uniform)?;
    let pytorchs = deviation(Linear::new(weight, None))?;
    assert!((pytorchs - 1.).abs() < 0.02, "{pytorchs}");
    Ok(())
}

/// The bias correction counts the optimizer's steps, not the variable's.
#[test]
fn adamw_s_first_step_of_a_late_variable_is_long() -> Result<()> {
    let [early, late] = [Var::new(0f32, &CPU)?, Var::new(0f32, &CPU)?];
    let params = ParamsAdamW {
        lr: 1.,
        weight_decay: 0.,
        ..Default::default()
    };
    let first = |optimizer: &mut AdamW| -> Result<f32> {
        let before = late.to_scalar::<f32>()?;
        optimizer.backward_step(&(early.as_tensor() + late.as_tensor())?)?;
        Ok(before - late.to_scalar::<f32>()?)
    };
    let mut optimizer = AdamW::new(vec![early.clone(), late.clone()], params.clone())?;
    for _ in 0..1000 {
        optimizer.backward_step(early.as_tensor())?;
    }
    // (1 − β₁) g / √((1 − β₂) g²) = √10 after many steps, where the first step of all is 1.
    let step = first(&mut optimizer)?;
    assert!((2.4..3.2).contains(&step), "{step}");
    let mut own = AdamW::new(vec![late.clone()], params)?;
    let step = first(&mut own)?;
    assert!((step - 1.).abs() < 1e-3, "{step}");
    Ok(())
}

#[test]
fn a_backward_lstm_reads_forwards() -> Result<()> {
    let config = LSTMConfig {
        direction: Direction::Backward,
        ..Default::default()
    };
    let lstm = candle_nn::lstm(2, 3, config, fresh())?;
    let xs = random(&[1, 4, 2]).to_dtype(DType::F32)?;
    let first = |xs: &Tensor| Ok::<_, candle::Error>(to_f64(lstm.seq(xs)?[0].h()));
    // The state beside the first token should depend on all tokens.
    assert_eq!(first(&xs)?, first(&xs.narrow(1, 0, 1)?)?);
    let reversed = xs.flip(&[1])?;
    assert_eq!(first(&reversed)?, first(&xs.narrow(1, 3, 1)?)?);
    Ok(())
}

#[test]
fn k_quants_turn_a_constant_into_zeros() -> Result<()> {
    let quantized = |xs: &Tensor, dtype| -> Result<_> {
        Ok(to_f64(&QTensor::quantize(xs, dtype)?.dequantize(&CPU)?))
    };
    let ones = Tensor::ones((1, 256), DType::F32, &CPU)?;
    for dtype in [GgmlDType::Q2K, GgmlDType::Q4K, GgmlDType::Q5K] {
        assert_eq!(quantized(&ones, dtype)?, [0.; 256], "{dtype:?}");
    }
    for dtype in [
        GgmlDType::Q3K,
        GgmlDType::Q6K,
        GgmlDType::Q8_0,
        GgmlDType::Q4_0,
    ] {
        let error = distance(&quantized(&ones, dtype)?, &[1.; 256]);
        assert!(error < 1e-3, "{dtype:?}: {error}");
    }
    Ok(())
}
