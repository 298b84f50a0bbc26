//! The recorded trajectories of both recipes, step by step. `fairseq_*` came out of the code that the
//! paper's authors released, `paper_*` out of a transcription of the paper in another language.

mod common;

use candle::{DType, Tensor};
use candle_powernorm::{PowerNormConfig, Recipe, Statistics};
use common::reference::Oracle;
use common::{assert_relative, forward, layer, run, spec, tensor, to_f64, var, Batch, CPU};
use std::collections::HashMap;
use std::path::PathBuf;

const RECORDINGS: [&str; 7] = [
    "fairseq_g1",
    "fairseq_g3_padded",
    "fairseq_no_groups",
    "paper_batch_statistics",
    "paper_g1",
    "paper_g3_padded",
    "paper_no_groups",
];

struct Recording {
    config: PowerNormConfig,
    size: usize,
    steps: usize,
    padded: bool,
    tensors: HashMap<String, Tensor>,
}

impl Recording {
    fn read(name: &str) -> Self {
        let path = fixtures().join(format!("{name}.safetensors"));
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().clone().unwrap();
        fn number<T: std::str::FromStr>(metadata: &HashMap<String, String>, key: &str) -> T {
            let value = metadata[key].parse().ok();
            value.unwrap_or_else(|| panic!("{key}: {}", metadata[key]))
        }
        let config = PowerNormConfig {
            eps: number(&metadata, "eps"),
            alpha_fwd: number(&metadata, "alpha_fwd"),
            alpha_bwd: number(&metadata, "alpha_bwd"),
            warmup_steps: number(&metadata, "warmup_steps"),
            group_scaling: match number(&metadata, "groups") {
                0 => None,
                groups => Some(groups),
            },
            statistics: match metadata["statistics"].as_str() {
                "running" => Statistics::Running,
                "batch" => Statistics::Batch,
                other => panic!("statistics: {other}"),
            },
            recipe: match metadata["recipe"].as_str() {
                "paper" => Recipe::Paper,
                "fairseq" => Recipe::Fairseq,
                other => panic!("recipe: {other}"),
            },
            affine: true,
        };
        Self {
            config,
            size: number(&metadata, "size"),
            steps: number(&metadata, "steps"),
            padded: match metadata["padded"].as_str() {
                "True" => true,
                "False" => false,
                other => panic!("padded: {other}"),
            },
            tensors: candle::safetensors::load_buffer(&bytes, &CPU).unwrap(),
        }
    }

    fn tensor(&self, name: &str) -> &Tensor {
        let tensor = self.tensors.get(name);
        tensor.unwrap_or_else(|| panic!("{name} is not in the recording"))
    }

    fn values(&self, name: &str) -> Vec<f64> {
        to_f64(self.tensor(name))
    }

    /// The input and upstream gradient of step `t`, cast to `dtype`.
    fn batch(&self, t: usize, dtype: DType) -> Batch {
        let cast = |name: &str| self.tensor(name).to_dtype(dtype).unwrap();
        Batch {
            xs: cast(&format!("x.{t}")),
            dy: cast(&format!("dy.{t}")),
            keep: self
                .padded
                .then(|| self.tensor(&format!("keep.{t}")).clone()),
        }
    }

    /// Name and values of the backward state after step `t`: each recipe recorded its own form.
    fn backward_state(&self, t: usize) -> (&'static str, Vec<f64>) {
        match self.config.recipe {
            Recipe::Paper => ("nu", self.values(&format!("nu.{t}"))),
            Recipe::Fairseq => ("ema_gz", self.values(&format!("ema_gz.{t}"))),
        }
    }
}

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn replay(dtype: DType, relative: f64) {
    for name in RECORDINGS {
        let recording = Recording::read(name);
        let (layer, mut varmap) = layer(recording.size, recording.config, dtype);
        for parameter in ["weight", "bias"] {
            let value = recording.tensor(parameter).to_dtype(dtype).unwrap();
            varmap.set_one(parameter, value).unwrap();
        }
        for t in 1..=recording.steps {
            let check = |what: &str, actual: &Tensor, expected: &[f64]| {
                let what = format!("{name}, step {t}, {what}");
                assert_relative(&what, actual, expected, relative);
            };
            let outcome = run(&layer, &recording.batch(t, dtype), true);
            for (what, actual) in outcome.tensors() {
                check(what, actual, &recording.values(&format!("{what}.{t}")));
            }
            let phi = layer.running_phi().unwrap();
            check(
                "running_phi",
                &phi,
                &recording.values(&format!("running_phi.{t}")),
            );
            let (what, expected) = recording.backward_state(t);
            let actual = match recording.config.recipe {
                Recipe::Paper => layer.nu().unwrap(),
                Recipe::Fairseq => var(&varmap, "ema_gz").as_detached_tensor(),
            };
            check(what, &actual, &expected);
            assert_eq!(layer.steps().unwrap(), t, "{name}");
        }
        let xs = recording.tensor("eval_x").to_dtype(dtype).unwrap();
        let y = forward(&layer, &xs, None, false);
        assert_relative(
            &format!("{name}, eval_y"),
            &y,
            &recording.values("eval_y"),
            relative,
        );
    }
}

#[test]
fn f64_layers_replay_every_recording() {
    replay(DType::F64, 1e-12);
}

#[test]
fn f32_layers_replay_every_recording() {
    replay(DType::F32, 1e-5);
}

/// What makes the other tests' oracle worth believing.
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
    let mut found: Vec<_> = std::fs::read_dir(fixtures())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    found.sort();
    assert_eq!(found, RECORDINGS);
}
