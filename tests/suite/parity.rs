//! Every dtype and shape against the `f64` oracle, which sees what the layer sees: inputs and
//! parameters after rounding. And the same bits from run to run, whatever the number of threads.

use crate::common::*;
use crate::devices;
use candle::{DType, Result, Tensor};
use candle_powernorm::{PowerNorm, PowerNormConfig, ops};
use std::io::Write;

macro_rules! on_the_cpu {
    ($($case:ident),* $(,)?) => {
        $(#[test]
        fn $case() -> impl std::process::Termination {
            devices::$case(&CPU)
        })*
    };
}
devices::cases!(on_the_cpu);

/// Steps of a trajectory: one by the batch's statistic, one by the running one, with ν in use.
const STEPS: usize = 2;

/// Follows a layer through training and an evaluation.
fn follow(data: &mut Data, config: PowerNormConfig, shape: &[usize], padded: bool) {
    for (input, builder) in DTYPES {
        let size = *shape.last().unwrap();
        let mut twin = Twin::new(data, size, config, builder);
        let what = format!(
            "{input:?} with {builder:?} parameters, {shape:?}, groups {:?}, padded {padded}",
            config.group_scaling
        );
        for _ in 0..STEPS {
            twin.check(&what, &Batch::random(data, shape, input, padded), true);
        }
        let batch = Batch::random(data, shape, input, padded);
        twin.check(&format!("{what}, evaluation"), &batch, false);
    }
}

/// Rows are worked on in pieces: heights on either side of what may be a cut, for wide and narrow
/// rows.
#[test]
fn heights_around_a_cut() {
    let mut data = Data::new(10);
    let around = |cols: usize| (1 << 16) / cols - 5..(1 << 16) / cols + 6;
    let shapes = [512, 33]
        .into_iter()
        .flat_map(|cols| around(cols).map(move |rows| (rows, cols)));
    for (rows, cols) in shapes {
        let padded = rows % 2 == 0;
        let mut twin = Twin::new(&mut data, cols, config(Some(1)), DType::F32);
        for _ in 0..2 {
            let batch = Batch::random(&mut data, &[rows, cols], DType::F32, padded);
            twin.check(&format!("{rows}x{cols}"), &batch, true);
        }
    }
}

/// A batch of 65 MiB, which is cut into chunks of more rows and stored past the caches. It is made
/// of copies of a small one: each fares as the small batch alone, and sums over rows add up.
#[test]
fn a_tiled_batch_is_its_tile_many_times() {
    const TILES: usize = 65;
    let config = config(Some(8)).with_warm_up(0);
    let layer = || Twin::new(&mut Data::new(11), 2048, config, DType::F32).layer;
    let (small, large) = (layer(), layer());
    let tile = Batch::random(&mut Data::new(12), &[129, 2048], DType::F32, false);
    let tiled = |tensor: &Tensor| tensor.repeat((TILES, 1)).unwrap();
    let alone = run(&small, &tile, true);
    let outcome = run(&large, &Batch::new(tiled(&tile.xs), tiled(&tile.dy)), true);
    assert_same_bits("y", &outcome.y, &tiled(&alone.y));
    assert_same_bits("dx", &outcome.dx, &tiled(&alone.dx));
    for (name, sum, of_tile, times) in [
        ("dweight", outcome.dweight, alone.dweight, TILES),
        ("dbias", outcome.dbias, alone.dbias, TILES),
        ("ψ²", large.running_phi().ok(), small.running_phi().ok(), 1),
        ("ν", large.nu().ok(), small.nu().ok(), 1),
    ] {
        let expected = to_f64(&(of_tile.unwrap() * times as f64).unwrap());
        assert_relative(name, &sum.unwrap(), &expected, 1e-5);
    }
}

#[test]
fn every_rank() {
    let mut data = Data::new(2);
    let shape = [1, 2, 2, 3, 48];
    for rank in 1..=shape.len() {
        let shape = &shape[shape.len() - rank..];
        for padded in [false, true] {
            follow(&mut data, config(Some(4)), shape, padded);
        }
    }
}

/// A few steps of a fresh layer, and the state they leave.
fn trajectory(builder: DType, batches: &[Batch], threads: usize) -> (PowerNorm, Vec<Outcome>) {
    let size = batches[0].xs.dims()[1];
    let config = config(Some(1));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.unwrap().install(|| {
        let twin = Twin::new(&mut Data::new(8), size, config, builder);
        let outcomes = batches.iter().map(|batch| run(&twin.layer, batch, true));
        let outcomes = outcomes.collect();
        (twin.layer, outcomes)
    })
}

/// Shapes that no single thread would be given whole: many rows, and many narrow rows.
#[test]
fn the_same_bits_on_any_number_of_threads() {
    let mut data = Data::new(9);
    for shape in [[4096, 512], [70_000, 3]] {
        let padded: Vec<_> = (0..2)
            .map(|step| Batch::random(&mut data, &shape, DType::F64, step == 1))
            .collect();
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let batches: Vec<_> = padded.iter().map(|batch| batch.cast(dtype)).collect();
            let (first, expected) = trajectory(dtype, &batches, 1);
            assert!(bits(&expected[1].dx).iter().any(|&bits| bits != 0));
            // Once more the same, then with more threads than this machine may have.
            for threads in [1, 2, 5] {
                let (layer, outcomes) = trajectory(dtype, &batches, threads);
                let what = format!("{dtype:?}, {shape:?}, {threads} threads");
                for (outcome, expected) in outcomes.iter().zip(&expected) {
                    same_bits(&what, outcome, expected);
                }
                same_state(&what, &state(&layer), &state(&first));
            }
        }
    }
}

/// Several chunks, and a last one that no vector divides.
#[test]
fn gelu_has_the_same_bits_on_any_number_of_threads() -> Result<()> {
    let len = 300_007;
    let mut data = Data::new(14);
    let (xs, dy) = (data.normal(len), data.normal(len));
    let gelus: [fn(&Tensor) -> Result<Tensor>; 2] = [ops::gelu, ops::gelu_erf];
    let dtypes = [DType::F32, DType::F64, DType::F16, DType::BF16];
    for (dtype, gelu) in dtypes
        .into_iter()
        .flat_map(|dtype| gelus.map(|gelu| (dtype, gelu)))
    {
        let xs = candle::Var::from_tensor(&tensor(&xs, &[len], dtype))?;
        let dy = tensor(&dy, &[len], dtype);
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.unwrap().install(|| {
                let y = gelu(&xs)?;
                let dx = (&y * &dy)?.sum_all()?.backward()?.remove(&xs);
                Ok::<_, candle::Error>((y.detach(), dx.unwrap()))
            })
        };
        let (y, dx) = run(1)?;
        for threads in [1, 2, 5] {
            let what = format!("{dtype:?}, {threads} threads");
            let (again, dx_again) = run(threads)?;
            assert_same_bits(&what, &again, &y);
            assert_same_bits(&what, &dx_again, &dx);
        }
        // Of the last elements alone.
        let last = xs.narrow(0, len - 9, 9)?.copy()?;
        assert_same_bits("the end", &gelu(&last)?, &y.narrow(0, len - 9, 9)?);
    }
    Ok(())
}

/// The bits of a layer's output and state, which differ between levels of vector instructions: they
/// add up a wide group in other orders.
#[test]
fn fingerprint() {
    let mut data = Data::new(13);
    let layer = Twin::new(&mut data, 1000, config(Some(1)), DType::F32).layer;
    let batch = Batch::random(&mut data, &[64, 1000], DType::F32, false);
    let y = bits(&run(&layer, &batch, true).y);
    let (phi, nu, _) = state(&layer);
    assert!(y.iter().any(|&bits| bits != 0));
    let mix = |hash: u64, bits: &u64| (hash ^ bits).wrapping_mul(0x100_0000_01b3);
    let hash = [y, phi, nu].iter().flatten().fold(0, mix);
    println!("{FINGERPRINT}{hash:016x}");
}

const FINGERPRINT: &str = "fingerprint: ";

/// Every level of vector instructions that this processor has, and that each level is one of its
/// own.
#[test]
fn every_simd_level() {
    let level = |name| {
        let tests = [
            "parity::every_rank",
            "parity::heights_around_a_cut",
            "parity::gelu_is_candle_s_with_a_gradient",
            "parity::gelu_of_values_at_the_ends",
            "parity::gelu_of_any_layout",
            "parity::fingerprint",
        ];
        let (passed, text) = run_with("CANDLE_POWERNORM_SIMD", name, &tests);
        assert!(passed, "{name}: {text}");
        let (_, fingerprint) = text.split_once(FINGERPRINT).expect("a fingerprint");
        fingerprint[..16].to_owned()
    };
    let scalar = level("scalar");
    if has_avx2() {
        assert_ne!(level("avx2"), scalar, "avx2 has the bits of scalar");
        return;
    }
    // `.ci/run` sets it where the system says that the processor has AVX2.
    assert!(std::env::var_os("CANDLE_POWERNORM_HAS_AVX2").is_none());
    // Not `eprintln`, which the harness keeps to itself.
    writeln!(std::io::stderr(), "skipped: avx2, not in this processor").unwrap();
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    std::is_x86_feature_detected!("avx2")
        && std::is_x86_feature_detected!("fma")
        && std::is_x86_feature_detected!("f16c")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

/// candle's own operations, which run the layer on devices without kernels. They have branches of
/// their own for squares that overflow, long sums, masks, empty batches, residuals and ranks.
#[test]
fn composed_of_candle_s_operations() {
    let tests = [
        "parity::every_rank",
        "parity::heights_around_a_cut",
        "parity::rows_of_any_magnitude_are_scaled",
        "parity::long_sums_of_one_value_keep_their_precision",
        "parity::a_slow_moving_average_has_no_bias",
        "parity::poisoned_batches_are_forgotten",
        "parity::a_statistic_beyond_the_state_s_dtype_is_forgotten",
        "parity::a_rejected_statistic_keeps_every_bit",
        "parity::the_released_recipe_does_not_forget",
        "parity::a_batch_without_a_kept_row_is_evaluated",
        "parity::empty_batches_pass_through",
        "parity::outputs_are_contiguous",
        "parity::a_residual_is_an_addition_and_a_forward",
        "parity::a_sum_by_itself_does_not_reach_the_parameters",
        "parity::a_channel_whose_squares_overflow_is_never_zero",
        "parity::a_loss_scale_that_changes_changes_nothing",
        "parity::gelu_is_candle_s_with_a_gradient",
        "parity::gelu_of_values_at_the_ends",
        "parity::gelu_of_any_layout",
        "golden::layers_replay_every_recording",
        "row_norms::a_mean_of_ten_thousand_deviations_costs_no_digit",
        "training::frozen_parameters_get_no_gradient",
        "distributed::trajectories",
        "row_norms::views_without_rows_have_no_place",
        "rejections::inputs",
    ];
    let (passed, text) = run_with("CANDLE_POWERNORM_DEVICE", "composed", &tests);
    assert!(passed, "{text}");
}

/// So the tests above ran what they name.
#[test]
fn switches_are_read() {
    for (switch, values) in [
        ("CANDLE_POWERNORM_SIMD", "scalar, avx2 or best"),
        ("CANDLE_POWERNORM_DEVICE", "composed"),
        ("CANDLE_POWERNORM_HUGE_PAGES", "0 or 1"),
    ] {
        let (passed, text) = run_with(switch, "fast", &["parity::every_rank"]);
        let expected = format!("expected {switch} to be {values}, got");
        assert!(!passed && text.contains(&expected), "{switch}: {text}");
    }
    let (passed, text) = run_with("CANDLE_POWERNORM_HUGE_PAGES", "0", &["parity::every_rank"]);
    assert!(passed, "{text}");
}
