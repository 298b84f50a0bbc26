//! Several ranks that are threads of one GPU, each with a stream of its own; the host adds up.

use super::*;
use std::sync::atomic::Ordering;

macro_rules! tests {
    ($($case:ident),* $(,)?) => {
        $(#[test]
        fn $case() {
            on_threads(gpu, distributed::$case);
        })*
    };
}
distributed::cases!(tests);

/// A rank without rows takes part in the sums of the others' forwards. (Its backward is not asked
/// for, as in `empty_batches_pass_through`.) Where no rank has one, the step is counted, for the
/// host does not know.
#[test]
fn shards_without_rows() {
    fn case(rank: &Rank) {
        for warmup_steps in [0, 100] {
            for recipe in [Recipe::Paper, Recipe::Fairseq] {
                let config = PowerNormConfig {
                    warmup_steps,
                    recipe,
                    ..config(Some(4))
                };
                let twin = || Twin::new(&mut Data::on(&rank.device, 50), 48, config, DType::F64);
                let (sharded, whole) = (twin().layer.with_ranks(&rank.over), twin().layer);
                let mut data = Data::on(&rank.device, 51);
                let empty = Tensor::zeros((0, 48), DType::F64, &rank.device).unwrap();
                let mut batch = || Batch::random(&mut data, &[9, 48], DType::F64, false).xs;
                let (first, second) = (batch(), batch());
                for xs in [first, second] {
                    sharded
                        .forward(if rank.rank == 0 { &xs } else { &empty })
                        .unwrap();
                    whole.forward(&xs).unwrap();
                }
                let expected = whole.running_phi().unwrap();
                let what = format!("{config:?}");
                let actual = sharded.running_phi().unwrap();
                assert_relative(&what, &actual, &to_f64(&expected), 1e-12);
                sharded.forward(&empty).unwrap();
                assert_same_bits(&what, &sharded.running_phi().unwrap(), &actual);
                assert_eq!(sharded.steps().unwrap(), 3, "{what}");
            }
        }
    }
    on_threads(gpu, case);
}

/// Two ranks that bring the same are as a layer that has its rows twice.
#[test]
fn two_that_bring_the_same() {
    const ROWS: usize = 19;
    const STEPS: usize = 3;
    for (k, ((cols, groups), (input, builder))) in layers(&gpu()).enumerate() {
        let variants = variants().into_iter().skip(k % 2).step_by(2);
        for (config, padded) in thinned_in_turn(k, variants) {
            let config = PowerNormConfig {
                group_scaling: groups,
                ..config
            };
            let device = gpu();
            let twin = || Twin::new(&mut Data::on(&device, 52), cols, config, builder);
            let (half, whole) = (twin().layer, twin().layer);
            let echo = Echo::default();
            let half = half.with_ranks(&Ranks::new(echo.clone()));
            let mut data = Data::on(&device, 53);
            for step in 0..STEPS {
                let batch = Batch::random(&mut data, &[ROWS, cols], input, padded);
                let twice = |t: &Tensor| Tensor::cat(&[t, t], 0).unwrap();
                let doubled = Batch {
                    xs: twice(&batch.xs),
                    dy: twice(&batch.dy),
                    keep: batch.keep.as_ref().map(twice),
                };
                let ours = run(&half, &batch, true);
                let theirs = run(&whole, &doubled, true);
                let what = format!("{input:?}, {cols}, {config:?}, padded {padded}, step {step}");
                // One in the forward and one in the backward, after the comparison.
                let summed = echo.0.swap(0, Ordering::Relaxed);
                assert_eq!(summed, 2 + usize::from(step == 0), "{what}: sums");
                let n = ((2 * ROWS + cols) * STEPS) as f64;
                let sums = if input == DType::F64 {
                    builder
                } else {
                    DType::F32
                };
                let relative = 8. * n.sqrt() * precision(sums).0;
                let close = |name: &str, ours: &Tensor, theirs: Vec<f64>, rounded: f64| {
                    let what = format!("{what}: {name}");
                    assert_relative(&what, ours, &theirs, relative + rounded);
                };
                let rounded = 4. * precision(input).0;
                let part = |t: &Tensor| to_f64(t)[..ROWS * cols].to_vec();
                close("y", &ours.y, part(&theirs.y), rounded);
                close("dx", &ours.dx, part(&theirs.dx), rounded);
                for (name, ours, theirs) in [
                    ("dweight", &ours.dweight, &theirs.dweight),
                    ("dbias", &ours.dbias, &theirs.dbias),
                ] {
                    if let (Some(ours), Some(theirs)) = (ours, theirs) {
                        let theirs = to_f64(theirs).iter().map(|sum| sum / 2.).collect();
                        close(name, ours, theirs, 4. * precision(builder).0);
                    }
                }
                close(
                    "ψ²",
                    &half.running_phi().unwrap(),
                    to_f64(&whole.running_phi().unwrap()),
                    0.,
                );
                close("ν", &half.nu().unwrap(), to_f64(&whole.nu().unwrap()), 0.);
                assert_eq!(half.steps().unwrap(), whole.steps().unwrap());
            }
        }
    }
}

#[test]
fn a_communicator_that_gives_back_less_is_an_error() {
    distributed::a_communicator_that_gives_back_less(&gpu());
}
