//! The recorded trajectories of both recipes, step by step. `fairseq_*` came out of the code that
//! the paper's authors released, `paper_*` out of a transcription of the paper in another language.

use crate::common::recording::{FIXTURES, RECORDINGS, Recording, replay};
use crate::common::reference::Oracle;
use crate::common::{CPU, assert_relative, spec, tensor, to_f64};
use candle::DType;
use candle_powernorm::Recipe;

#[test]
fn layers_replay_every_recording() {
    replay(&CPU, DType::F64, 1e-12);
    replay(&CPU, DType::F32, 1e-5);
}

/// The other tests believe the oracle because of this one.
#[test]
fn the_oracle_replays_every_recording() {
    for name in RECORDINGS {
        let recording = Recording::read(name);
        let (weight, bias) = (recording.values("weight"), recording.values("bias"));
        let mut oracle = Oracle::new(spec(&recording.config), weight, bias);
        let check = |what: &str, actual: &[f64], expected: &[f64]| {
            let actual = tensor(actual, &[actual.len()], DType::F64);
            assert_relative(&format!("{name}, {what}"), &actual, expected, 1e-12);
        };
        for t in 1..=recording.steps {
            let batch = recording.batch(t, DType::F64);
            let pass = oracle.train(&to_f64(&batch.xs), batch.mask().as_deref());
            let grads = oracle.backward(&pass, &to_f64(&batch.dy));
            for (what, actual) in [
                ("y", &pass.y.values),
                ("dx", &grads.dx.values),
                ("dweight", &grads.dweight.values),
                ("dbias", &grads.dbias.values),
                ("running_phi", &oracle.phi),
            ] {
                let what = format!("{what}.{t}");
                check(&what, actual, &recording.values(&what));
            }
            let (what, mut expected) = recording.backward_state(t);
            if recording.config.recipe == Recipe::Fairseq {
                let share = 1. - recording.config.alpha_bwd;
                expected.iter_mut().for_each(|ema_gz| *ema_gz *= share);
            }
            check(&format!("{what}.{t}"), &oracle.nu, &expected);
        }
        let pass = oracle.evaluate(&recording.values("eval_x"), None);
        check("eval_y", &pass.y.values, &recording.values("eval_y"));
    }
}

#[test]
fn every_recording_is_replayed() {
    let mut found: Vec<_> = std::fs::read_dir(FIXTURES)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "safetensors")
        })
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    found.sort();
    assert_eq!(found, RECORDINGS);
}
