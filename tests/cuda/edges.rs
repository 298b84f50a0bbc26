//! Cases that the grid leaves out: values at the ends of their range, groups wider than a block,
//! odd ones.

use crate::arguments::{Arguments, Offsets, Wanted};
use crate::common::gpu::gpu;
use crate::common::{
    Batch, CPU, DTYPES, Data, KINDS, With, add_rounded, assert_same_bits, backward, keep, layer_on,
    run_with, tensor, to_f64,
};
use candle::DType::{self, BF16, F16, F32, F64};
use candle::{Device, Module, Result, Tensor, Var};
use candle_powernorm::{LayerNorm, PowerNormConfig, Recipe, RmsNorm, Statistics};

fn config(groups: Option<usize>, kind: (Recipe, Statistics)) -> PowerNormConfig {
    1e-5.with_groups(groups).with_kind(kind).with_warm_up(2)
}

/// Of the input as it is, and of its sum with a residual.
fn check(what: &str, arguments: &Arguments, builder: DType) -> Result<()> {
    check_once(what, arguments, builder, Offsets::AnElementIn)?;
    let (shape, dtype) = (arguments.x.dims(), arguments.x.dtype());
    let residual = Data::new(8).normal(arguments.x.elem_count());
    let arguments = Arguments {
        residual: Some(tensor(&residual, shape, dtype)),
        loss_scale: 8.,
        ..arguments.clone()
    };
    let what = format!("{what}, residual");
    check_once(&what, &arguments, builder, Offsets::AtTheStart)
}

/// With all gradients.
fn check_once(what: &str, arguments: &Arguments, builder: DType, offsets: Offsets) -> Result<()> {
    arguments.check(what, builder, Wanted::ALL, offsets, &[1], true)?;
    Ok(())
}

/// The same arguments with other values in some elements of x.
fn with_x(arguments: &Arguments, change: impl Fn(usize, &mut f64)) -> Arguments {
    let mut x = to_f64(&arguments.x);
    for (k, x) in x.iter_mut().enumerate() {
        change(k, x);
    }
    Arguments {
        x: tensor(&x, arguments.x.dims(), arguments.x.dtype()),
        ..arguments.clone()
    }
}

/// Groups whose lanes are no power of two, in all places of a warp; and those that end in part of a
/// piece.
#[test]
fn odd_groups() -> Result<()> {
    let mut data = Data::new(1);
    let dtypes = [(F32, F32), (BF16, F32), (F64, F64)];
    let shapes = [
        (760, 10),
        (130, 13),
        (33, 3),
        (96, 8),
        (6, 2),
        (2400, 24),
        (1290, 2),
    ];
    for (i, (cols, groups)) in shapes.into_iter().enumerate() {
        for (j, (input, builder)) in dtypes.into_iter().enumerate() {
            let config = config(Some(groups), KINDS[(i + j) % 4]);
            let arguments = Arguments::random(&mut data, config, 19, input, builder, cols);
            let what = format!("{cols}, {input:?}, {config:?}");
            check(&what, &arguments, builder)?;
        }
    }
    Ok(())
}

/// Either side of the widths at which a thread takes more pieces, and at which a group outgrows a
/// block.
#[test]
fn wide_groups() -> Result<()> {
    let mut data = Data::new(2);
    for (input, builder, widths) in [
        (F32, F32, [2048, 2052, 4096, 4100, 8192, 8196, 8197]),
        (F64, F64, [1024, 1026, 2048, 2050, 2051, 4096, 4097]),
        (BF16, BF16, [4096, 4104, 8192, 8200, 8201, 16384, 16392]),
        (F16, F32, [4095, 4097, 8191, 8193, 8208, 16384, 65536]),
    ] {
        for (i, cols) in widths.into_iter().enumerate() {
            let groups = if cols % 2 == 0 && i % 3 == 2 { 2 } else { 1 };
            let config = config(Some(groups), KINDS[i % 4]);
            let mut arguments = Arguments::random(&mut data, config, 5, input, builder, cols);
            if i % 2 == 0 {
                arguments.keep = Some(keep(&[true, false, true, true, false], &[5]));
            }
            let what = format!("{cols}, {input:?}, {config:?}");
            check_once(&what, &arguments, builder, Offsets::AtTheStart)?;
        }
    }
    Ok(())
}

/// An error does not grow with the width. (Seen at 2^20 columns, where a thread added up its 2^12
/// values one by one: LayerNorm's y off by 7.4e-6.)
#[test]
fn the_widest_rows_keep_their_digits() -> Result<()> {
    const COLS: usize = 1 << 20;
    let x = |i: usize| if i.is_multiple_of(3) { -1.9375 } else { 1.9375 };
    // With a part of x and a mean, so that both means of a backward matter.
    let dy = |i: usize| 0.25 * x(i) + [0.5, 0.25, -0.5, 0.75, 0.][i % 5];
    let row = |of: &dyn Fn(usize) -> f64| (0..COLS).map(of).collect::<Vec<_>>();
    let rows = [row(&x), row(&dy)];
    let pass = |device: &Device, dtype, centred| -> Result<[Tensor; 2]> {
        let on_device = |row: &[f64]| tensor(row, &[1, COLS], dtype).to_device(device);
        let xs = Var::from_tensor(&on_device(&rows[0])?)?;
        let weight = Tensor::ones(COLS, dtype, device)?;
        let y = match centred {
            true => LayerNorm::new_no_bias(weight, 1e-5).forward(&xs)?,
            false => RmsNorm::new(weight, 1e-5).forward(&xs)?,
        };
        let grads = backward(&y, &on_device(&rows[1])?);
        Ok([y.detach(), grads.get(&xs).expect("a gradient").clone()])
    };
    for centred in [false, true] {
        let ours = pass(&gpu(), F32, centred)?;
        let exact = pass(&CPU, F64, centred)?;
        for (name, (ours, exact)) in ["y", "dx"].iter().zip(ours.iter().zip(&exact)) {
            let (ours, exact) = (to_f64(ours), to_f64(exact));
            let most = exact.iter().fold(0., |most: f64, e| most.max(e.abs()));
            let errors = ours.iter().zip(&exact).map(|(a, e)| (a - e).abs() / most);
            let error = errors.fold(0., f64::max);
            assert!(error < 1e-6, "{name}, centred {centred}: {error:e}");
        }
    }
    Ok(())
}

/// LayerNorm of a sum has the bits of an addition and a forward: rows of part of a warp, of several
/// warps, wider than a block, and of pieces that are not whole. So has its gradient.
#[test]
fn layer_norm_of_a_sum() -> Result<()> {
    let gpu = gpu();
    let mut data = Data::on(&gpu, 16);
    for (rows, cols) in [
        (5, 3),
        (300, 96),
        (37, 1024),
        (9, 4096),
        (3, 8200),
        (2, 16_392),
        (2, 8193),
    ] {
        for dtype in [F32, F64, F16, BF16] {
            let what = format!("{rows}x{cols}, {dtype:?}");
            let mut random = || Batch::random(&mut data, &[rows, cols], dtype, false);
            // The first values, which a kernel takes for a first mean, are far from the others.
            let (xs, residual, dy) = (random().xs, (random().xs + 3.)?, random().dy);
            let weight = data.weight(cols);
            let weight = data.tensor(&weight, &[cols], dtype);
            let norm = LayerNorm::new_no_bias(weight, 1e-5);
            let [xs, residual] = [Var::from_tensor(&xs)?, Var::from_tensor(&residual)?];
            let (y, sum) = norm.forward_residual(&xs, &residual)?;
            let plain = Var::from_tensor(&add_rounded(&xs, &residual)?)?;
            let expected = norm.forward(&plain)?;
            assert_same_bits(&format!("{what}: y"), &y, &expected);
            assert_same_bits(&format!("{what}: sum"), &sum, &plain);
            let (ours, expected) = (backward(&y, &dy), backward(&expected, &dy));
            let expected = expected.get(&plain).expect("a gradient");
            for input in [&xs, &residual] {
                assert_same_bits(&what, ours.get(input).expect("a gradient"), expected);
            }
        }
    }
    Ok(())
}

/// Rows of a block that take the most shared memory there is: tiles of 60 lanes of four pieces. On
/// a GPU with 99 KiB a block (`SOFTGPU_SHARED_KIB`), the least that copies into shared memory, one
/// row of a backward with a residual fits.
#[test]
fn rows_that_fill_shared_memory() -> Result<()> {
    let mut data = Data::new(9);
    let shapes = [(960, None), (1920, None), (4672, Some(1))];
    for (i, (cols, groups)) in shapes.into_iter().enumerate() {
        let config = config(groups, KINDS[i]);
        let arguments = Arguments::random(&mut data, config, 300, F32, F32, cols);
        check(&format!("{cols}, {config:?}"), &arguments, F32)?;
    }
    Ok(())
}

/// The least that says whether a GPU computes as the CPU does.
#[test]
fn each_dtype() -> Result<()> {
    let mut data = Data::new(13);
    for (input, builder) in DTYPES {
        let config = config(Some(4), KINDS[0]);
        let arguments = Arguments::random(&mut data, config, 37, input, builder, 256);
        let what = format!("{input:?}, {builder:?}");
        check_once(&what, &arguments, builder, Offsets::AtTheStart)?;
    }
    Ok(())
}

/// An odd number of rows, in blocks of threads of one piece that need more than the 48 KiB of
/// shared memory which a block gets unasked. On 132 multiprocessors, the launches of these
/// backwards ask for 50,688 and for 51,712 bytes.
#[test]
fn many_rows_of_narrow_groups() -> Result<()> {
    let mut data = Data::new(12);
    let cases = [(F32, 1055, 128), (BF16, 2111, 64)];
    for (i, (input, rows, groups)) in cases.into_iter().enumerate() {
        let config = config(Some(groups), KINDS[i]);
        let arguments = Arguments::random(&mut data, config, rows, input, F32, 512);
        let what = format!("{rows}x512, {input:?}, {config:?}");
        check_once(&what, &arguments, F32, Offsets::AtTheStart)?;
    }
    Ok(())
}

/// Groups whose sums span several warps, in blocks that iterate over their rows: the warps exchange
/// their sums behind a barrier in each iteration, and reuse the memory in the one after the next.
/// On 132 multiprocessors, a block of the forward has 4 warps for each of 2 rows and takes 3
/// iterations, and a block of the backward has 8 warps for one row and takes 5.
#[test]
fn many_rows_of_groups_across_warps() -> Result<()> {
    let mut data = Data::new(14);
    let rows = 530;
    let config = config(Some(1), KINDS[0]);
    let mut arguments = Arguments::random(&mut data, config, rows, BF16, F32, 4096);
    arguments.keep = Some(keep(&data.mask(rows), &[rows]));
    check_once("4096, BF16", &arguments, F32, Offsets::AtTheStart)
}

/// Without group scaling: the widest row, and rows enough for many chunks of sums.
#[test]
fn wide_and_tall_without_groups() -> Result<()> {
    let mut data = Data::new(3);
    let shapes = [(65536, 3), (65535, 2), (1, 40_000), (5, 30_000)];
    for (i, (cols, rows)) in shapes.into_iter().enumerate() {
        let config = config(None, KINDS[i]);
        let mut arguments = Arguments::random(&mut data, config, rows, BF16, F32, cols);
        arguments.keep = Some(keep(&data.mask(rows), &[rows]));
        let what = format!("{rows}x{cols}, {config:?}");
        check_once(&what, &arguments, F32, Offsets::AnElementIn)?;
    }
    Ok(())
}

/// Sums in f32, parameters absent, and a state in f64.
#[test]
fn a_state_wider_than_the_sums() -> Result<()> {
    let mut data = Data::new(9);
    for kind in KINDS {
        for input in [F32, F16, BF16] {
            let config = config(Some(2), kind).with(|config| config.affine = false);
            let arguments = Arguments::random(&mut data, config, 37, input, F64, 66);
            check(&format!("{input:?}, {config:?}"), &arguments, F64)?;
        }
    }
    Ok(())
}

/// An infinity or a NaN in a row that counts: its groups' channels forget the batch (recipe Paper)
/// or take it in.
#[test]
fn rows_that_are_not_finite() -> Result<()> {
    let mut data = Data::new(5);
    let (rows, cols) = (9, 96);
    for (input, builder) in [(F32, F32), (BF16, F32), (F64, F32)] {
        for groups in [None, Some(1), Some(4)] {
            for kind in KINDS {
                for value in [f64::NAN, f64::INFINITY] {
                    let config = config(groups, kind);
                    let arguments =
                        Arguments::random(&mut data, config, rows, input, builder, cols);
                    let arguments = with_x(&arguments, |k, x| {
                        if k == 2 * cols + 1 {
                            *x = value;
                        }
                    });
                    let what = format!("{value} in {input:?}, {config:?}");
                    check(&what, &arguments, builder)?;
                }
            }
        }
    }
    Ok(())
}

/// Groups whose squares overflow, beside others that do not: inside a warp, across warps, wider
/// than a block.
#[test]
fn huge_groups() -> Result<()> {
    let mut data = Data::new(6);
    for (cols, groups) in [(48, 1), (48, 4), (1024, 2), (8200, 1)] {
        for (i, kind) in KINDS.into_iter().enumerate() {
            let dtypes = [(F32, F32, 1e25), (BF16, F32, 1e25), (F64, F64, 1e200)];
            let (input, builder, magnitude) = dtypes[(i + groups) % 3];
            if cols > 1000 && i % 2 == 1 {
                continue;
            }
            let config = config(Some(groups), kind);
            let arguments = Arguments::random(&mut data, config, 6, input, builder, cols);
            let arguments = with_x(&arguments, |k, x| {
                if k / cols == 4 && k % cols < cols / groups {
                    *x *= magnitude;
                }
            });
            let what = format!("{magnitude:e} in {cols}, {input:?}, {config:?}");
            check(&what, &arguments, builder)?;
            // An infinity too, in a group whose squares overflow for it.
            let arguments = with_x(&arguments, |k, x| {
                if k == 2 * cols + 3 {
                    *x = f64::INFINITY;
                }
            });
            check(&format!("{what}, infinity"), &arguments, builder)?;
        }
    }
    Ok(())
}

/// By the batch's statistic, a channel has no output if its sum of squares overflows: y and dx are
/// NaN there, and ψ² keeps its value. The channel beside it is right. (Seen: an output and a
/// gradient of 0, which a loss scaler takes for values.)
#[test]
fn a_channel_whose_squares_overflow_is_nan() -> Result<()> {
    let gpu = gpu();
    let config = config(None, (Recipe::Paper, Statistics::Batch));
    let (layer, _varmap) = layer_on(&gpu, 2, config, F32);
    let phi = to_f64(&layer.running_phi()?);
    let (x, dy) = ([1., -2., 3.], [0.5, -1., 0.25]);
    let beside = |column: [f32; 3]| [[1e20, column[0]], [0.5, column[1]], [0.25, column[2]]];
    let xs = Var::from_tensor(&Tensor::new(&beside(x), &gpu)?)?;
    let dys = Tensor::new(&beside(dy).map(|[_, dy]| [1., dy]), &gpu)?;
    let ys = layer.forward_t(&xs, true)?;
    let grads = (&ys * dys)?.sum_all()?.backward()?;

    let batch_phi = x.map(|x| f64::from(x * x)).iter().sum::<f64>() / 3.;
    let inv_d = 1. / (batch_phi + 1e-5).sqrt();
    let x_hat = x.map(|x| f64::from(x) * inv_d);
    let dy = dy.map(f64::from);
    let lambda = (0..3).map(|row| dy[row] * x_hat[row]).sum::<f64>() / 3.;
    let dxs = grads.get(&xs).expect("a gradient of the input");
    let (ys, dxs) = (to_f64(&ys), to_f64(dxs));
    for row in 0..3 {
        let [huge, normal] = [2 * row, 2 * row + 1];
        assert!(
            ys[huge].is_nan() && dxs[huge].is_nan(),
            "y {ys:?}, dx {dxs:?}"
        );
        let dx = (dy[row] - lambda * x_hat[row]) * inv_d;
        // γ is 1 and β is 0. Rounding errors of a few terms.
        for (actual, expected) in [(ys[normal], x_hat[row]), (dxs[normal], dx)] {
            assert!((actual - expected).abs() <= 1e-6, "{actual} for {expected}");
        }
    }
    let new = to_f64(&layer.running_phi()?);
    assert_eq!(new[0], phi[0]);
    assert!((new[1] / batch_phi - 1.).abs() <= 1e-6, "{new:?}");
    Ok(())
}

/// candle's switch for derivatives of gradients.
const KEEP_GRAPHS: &str = "CANDLE_GRAD_DO_NOT_DETACH";

/// The gradients of weight and bias, which are parts of one storage. [`run_with`] runs this with
/// candle's switch on.
#[test]
fn a_bias_has_its_own_gradient() -> Result<()> {
    // 32 bytes in f32, so that the bias's gradient begins at a sector.
    let (rows, cols) = (3, 8);
    let values = |modulus: usize| (0..rows * cols).map(move |i| (i * i % modulus) as f32);
    let (x, dy): (Vec<f32>, Vec<f32>) = (values(7).collect(), values(5).collect());
    let gradients = |device: &Device| {
        let of = |values: &[f32]| Tensor::from_slice(values, (rows, cols), device);
        let [weight, bias] = [
            Var::ones(cols, F32, device)?,
            Var::zeros(cols, F32, device)?,
        ];
        let (w, b) = (weight.as_tensor().clone(), bias.as_tensor().clone());
        let y = LayerNorm::new(w, b, 1e-5).forward(&of(&x)?)?;
        let grads = (y * of(&dy)?)?.sum_all()?.backward()?;
        let of = |var: &Var| grads.get(var).expect("a gradient").to_vec1::<f32>();
        Ok::<_, candle::Error>((of(&weight)?, of(&bias)?))
    };
    let (dweight, dbias) = gradients(&gpu())?;
    let (expected, exact) = gradients(&CPU)?;
    assert_eq!(dbias, exact);
    for (actual, expected) in dweight.iter().zip(expected) {
        assert!((actual - expected).abs() <= 1e-5, "{actual} for {expected}");
    }
    Ok(())
}

/// (Seen: the gradient of the bias was the weight's, because candle clones a storage from its start.)
#[test]
fn a_bias_has_its_own_gradient_where_candle_keeps_graphs() {
    let test = "edges::a_bias_has_its_own_gradient";
    let (passed, text) = run_with(KEEP_GRAPHS, "1", &[test]);
    assert!(passed, "{text}");
}
