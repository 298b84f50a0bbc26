//! The recorded trajectories of both recipes, and a layer that replays them.

use super::*;
use std::path::Path;

/// The folder of the recordings, from the root of the crate, in which cargo runs tests.
pub const FIXTURES: &str = "tests/fixtures";

pub const RECORDINGS: [&str; 7] = [
    "fairseq_g1",
    "fairseq_g3_padded",
    "fairseq_no_groups",
    "paper_batch_statistics",
    "paper_g1",
    "paper_g3_padded",
    "paper_no_groups",
];

pub struct Recording {
    name: &'static str,
    pub config: PowerNormConfig,
    pub steps: usize,
    size: usize,
    padded: bool,
    tensors: HashMap<String, Tensor>,
}

impl Recording {
    pub fn read(name: &'static str) -> Self {
        let path = Path::new(FIXTURES).join(format!("{name}.safetensors"));
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
            ..Default::default()
        };
        Self {
            name,
            config,
            size: number(&metadata, "size"),
            steps: number(&metadata, "steps"),
            // Python's True or False.
            padded: metadata["padded"].to_lowercase().parse().unwrap(),
            tensors: candle::safetensors::load_buffer(&bytes, &CPU).unwrap(),
        }
    }

    fn tensor(&self, name: &str) -> &Tensor {
        let tensor = self.tensors.get(name);
        tensor.unwrap_or_else(|| panic!("{name} is not in the recording"))
    }

    pub fn values(&self, name: &str) -> Vec<f64> {
        to_f64(self.tensor(name))
    }

    /// The input and upstream gradient of step `t`, cast to `dtype`.
    pub fn batch(&self, t: usize, dtype: DType) -> Batch {
        let cast = |name: &str| self.tensor(name).to_dtype(dtype).unwrap();
        Batch {
            xs: cast(&format!("x.{t}")),
            dy: cast(&format!("dy.{t}")),
            keep: (self.padded).then(|| self.tensor(&format!("keep.{t}")).clone()),
        }
    }

    /// Name and values of the backward state after step `t`: each recipe recorded its own form.
    pub fn backward_state(&self, t: usize) -> (&'static str, Vec<f64>) {
        match self.config.recipe {
            Recipe::Paper => ("nu", self.values(&format!("nu.{t}"))),
            _ => ("ema_gz", self.values(&format!("ema_gz.{t}"))),
        }
    }

    /// Compares step `t` of a layer, and its state after it, with all that was recorded of them.
    #[track_caller]
    pub fn check(
        &self,
        t: usize,
        outcome: &Outcome,
        layer: &PowerNorm,
        ema_gz: &Tensor,
        relative: f64,
    ) {
        let check = |what: &str, actual: &Tensor, expected: &[f64]| {
            let what = format!("{}, step {t}, {what}", self.name);
            assert_relative(&what, actual, expected, relative);
        };
        for (what, actual) in outcome.tensors() {
            check(what, actual, &self.values(&format!("{what}.{t}")));
        }
        let phi = self.values(&format!("running_phi.{t}"));
        check("ψ²", &layer.running_phi().unwrap(), &phi);
        match self.backward_state(t) {
            ("nu", expected) => check("ν", &layer.nu().unwrap(), &expected),
            (what, expected) => check(what, ema_gz, &expected),
        }
        assert_eq!(layer.steps().unwrap(), t, "{}", self.name);
    }
}

/// Replays every recording on `device`, in `dtype`, and compares all that was recorded of each
/// step.
pub fn replay(device: &Device, dtype: DType, relative: f64) {
    let on_device = |t: &Tensor| t.to_dtype(dtype).unwrap().to_device(device).unwrap();
    for name in RECORDINGS {
        let recording = Recording::read(name);
        let (layer, mut varmap) = layer_on(device, recording.size, recording.config, dtype);
        for parameter in ["weight", "bias"] {
            let value = on_device(recording.tensor(parameter));
            varmap.set_one(parameter, value).unwrap();
        }
        for t in 1..=recording.steps {
            let outcome = run(&layer, &recording.batch(t, dtype).to(device), true);
            recording.check(t, &outcome, &layer, &var(&varmap, "ema_gz"), relative);
        }
        let xs = on_device(recording.tensor("eval_x"));
        let y = forward(&layer, &xs, None, false);
        let expected = recording.values("eval_y");
        assert_relative(&format!("{name}, eval_y"), &y, &expected, relative);
    }
}
