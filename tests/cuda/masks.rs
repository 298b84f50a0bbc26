//! Rows that do not count, and batches without a row.

use super::*;

/// What padded rows hold is nobody's business, NaN included.
#[test]
fn padding_may_hold_anything() {
    let gpu = gpu();
    for statistics in [Statistics::Running, Statistics::Batch] {
        for ((cols, groups), (input, builder)) in layers() {
            let config = PowerNormConfig {
                statistics,
                ..config(groups)
            };
            let twin = || Twin::new(&mut Data::on(&gpu, 4), cols, config, builder).layer;
            let (padded, poisoned) = (twin(), twin());
            let mut data = Data::on(&gpu, 5);
            for step in 1..=3 {
                let batch = Batch::random(&mut data, &[37, cols], input, true);
                let mask = batch.mask().unwrap();
                let poison = |t: &Tensor| {
                    let mut values = to_f64(t);
                    for (row, &keep) in values.chunks_mut(cols).zip(&mask) {
                        if !keep {
                            row.fill(f64::NAN);
                        }
                    }
                    data.tensor(&values, t.dims(), input)
                };
                let nan = Batch {
                    xs: poison(&batch.xs),
                    dy: poison(&batch.dy),
                    ..batch.clone()
                };
                let mut expected = run(&padded, &batch, true);
                let mut outcome = run(&poisoned, &nan, true);
                let what = format!("{input:?}, {cols} by {groups:?}, step {step}");
                for (y, dx) in [
                    (&mut expected.y, &expected.dx),
                    (&mut outcome.y, &outcome.dx),
                ] {
                    let rows = |t: &Tensor, kept: bool| {
                        let rows = (0u32..).zip(&mask).filter(|(_, &keep)| keep == kept);
                        let rows: Vec<_> = rows.map(|(row, _)| row).collect();
                        let t = t.to_device(&CPU).unwrap();
                        t.index_select(&Tensor::new(rows, &CPU).unwrap(), 0)
                            .unwrap()
                    };
                    *y = rows(y, true);
                    assert_zero(&format!("{what}, dx of padding"), &rows(dx, false));
                }
                same_bits(&what, &outcome, &expected);
                same_state(&what, &state(&poisoned), &state(&padded));
            }
        }
    }
}

/// Only the GPU knows what a mask holds, and no step waits to hear it: a batch without a kept row
/// is counted as a step, unlike on the CPU. Its pass is an evaluation all the same, which moves
/// neither ψ² nor ν.
#[test]
fn a_batch_without_a_kept_row_is_counted_and_evaluated() {
    let gpu = gpu();
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        for statistics in [Statistics::Running, Statistics::Batch] {
            for warmup_steps in [100, 1] {
                for ((cols, groups), (input, builder)) in layers() {
                    let config = PowerNormConfig {
                        recipe,
                        statistics,
                        warmup_steps,
                        ..config(groups)
                    };
                    let mut data = Data::on(&gpu, 6);
                    let mut twin = Twin::new(&mut data, cols, config, builder);
                    let what = format!("{input:?}, {cols}, {config:?}");
                    let mut batch = || Batch::random(&mut data, &[9, cols], input, false);
                    for _ in 0..2 {
                        twin.check(&what, &batch(), true);
                    }
                    let (phi, nu, t) = state(&twin.layer);
                    let masked = batch().masked(&[false; 9]);
                    let expected = run(&twin.layer, &masked, false);
                    let outcome = run(&twin.layer, &masked, true);
                    same_bits(&what, &outcome, &expected);
                    same_state(&what, &state(&twin.layer), &(phi, nu, t + 1));
                    twin.oracle.steps += 1;
                    twin.check(&format!("{what}, next"), &batch(), true);
                }
            }
        }
    }
}

/// The shape is known without the GPU: a batch of no rows is not counted. (Its backward is not
/// asked for: candle's own operations cannot be launched on an empty tensor there.)
#[test]
fn empty_batches_pass_through() {
    let gpu = gpu();
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        for (input, builder) in DTYPES {
            let config = PowerNormConfig {
                recipe,
                ..config(Some(1))
            };
            let mut data = Data::on(&gpu, 7);
            let twin = Twin::new(&mut data, 7, config, builder);
            let batch = Batch::random(&mut data, &[4, 7], input, false);
            run(&twin.layer, &batch, true);
            let before = state(&twin.layer);
            for shape in [&[0, 7][..], &[2, 0, 7]] {
                let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &gpu).unwrap();
                let mask = zeros(&shape[..shape.len() - 1], DType::U8);
                for keep in [None, Some(&mask)] {
                    for train in [true, false] {
                        let y = forward(&twin.layer, &zeros(shape, input), keep, train);
                        assert_eq!((y.dims(), y.dtype()), (shape, input));
                        assert_eq!(state(&twin.layer), before, "{shape:?}, train {train}");
                    }
                }
            }
        }
    }
}
