//! Checkpoints of the code that the paper's authors released, as PyTorch writes them: read, trained
//! on, written back. `tests/torch/make.py` made them, out of states in the recordings of that code.

use crate::common::recording::Recording;
use crate::common::*;
use candle::{DType, Module, Shape, Tensor, pickle};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::{PowerNorm, power_norm};
use std::collections::BTreeMap;
use std::process::Command;

const FAIRSEQ: &str = "tests/torch/fairseq.pt";
const LEGACY: &str = "tests/torch/legacy.pt";
const HALF: &str = "tests/torch/half.pt";

const SCRIPT: &str = "scripts/torch_checkpoint.py";
const CHECK: &str = "tests/torch/make.py";

/// A layer of the checkpoints, the recording that it is part of, and the step it stopped at.
struct Stored {
    name: &'static str,
    recording: &'static str,
    size: usize,
    step: usize,
}

const ENCODER: Stored = Stored {
    name: "encoder.norm",
    recording: "fairseq_g3_padded",
    size: 12,
    step: 3,
};

const DECODER: Stored = Stored {
    name: "decoder.norm",
    recording: "fairseq_g1",
    size: 8,
    step: 12,
};

impl Stored {
    fn recording(&self) -> Recording {
        Recording::read(self.recording)
    }

    fn build(&self, vb: &VarBuilder) -> PowerNorm {
        power_norm(self.size, self.recording().config, vb.pp(self.name)).unwrap()
    }

    /// `layer` holds the state of the recording, rounded to `dtype` once.
    #[track_caller]
    fn assert_loaded(&self, layer: &PowerNorm, dtype: DType) {
        let recording = self.recording();
        let state_dtype = layer.running_phi().unwrap().dtype();
        let rounded = |what: &str| {
            let values = tensor(&recording.values(what), &[self.size], dtype);
            values.to_dtype(state_dtype).unwrap()
        };
        let phi = rounded(&format!("running_phi.{}", self.step));
        let ema_gz = rounded(&format!("ema_gz.{}", self.step));
        let nu = (ema_gz * (1. - recording.config.alpha_bwd)).unwrap();
        for (what, actual, expected) in [
            ("weight", layer.weight().unwrap(), &rounded("weight")),
            ("bias", layer.bias().unwrap(), &rounded("bias")),
            ("ψ²", &layer.running_phi().unwrap(), &phi),
            ("ν", &layer.nu().unwrap(), &nu),
        ] {
            let what = format!("{}: {what}", self.name);
            assert_same_bits(&what, &actual.to_dtype(state_dtype).unwrap(), expected);
        }
        assert_eq!(layer.steps().unwrap(), self.step, "{}", self.name);
    }

    /// Trains `layer` from where the checkpoint stopped to the end of the recording, and evaluates
    /// it.
    #[track_caller]
    fn continue_to_the_end(&self, layer: &PowerNorm, varmap: &VarMap) {
        let recording = self.recording();
        for t in self.step + 1..=recording.steps {
            let outcome = run(layer, &recording.batch(t, DType::F32), true);
            let ema_gz = var(varmap, &format!("{}.ema_gz", self.name));
            recording.check(t, &outcome, layer, &ema_gz, 1e-5);
        }
        layer.mode().set_training(false);
        let y = layer.forward(&self.evaluation_input()).unwrap();
        assert_relative("evaluation", &y, &recording.values("eval_y"), 1e-5);
    }

    fn evaluation_input(&self) -> Tensor {
        let recording = self.recording();
        let rows = recording.values("eval_x");
        tensor(&rows, &[rows.len() / self.size, self.size], DType::F32)
    }
}

/// Shape and dtype by name.
type Contents = BTreeMap<String, (Shape, DType)>;

fn contents(tensors: impl IntoIterator<Item = (String, Tensor)>) -> Contents {
    let entry = |(name, tensor): (String, Tensor)| (name, (tensor.shape().clone(), tensor.dtype()));
    tensors.into_iter().map(entry).collect()
}

/// A checkpoint's tensors as variables to train on, in single precision.
fn variables(path: &str, key: Option<&str>) -> VarMap {
    let varmap = VarMap::new();
    for (name, mut tensor) in pickle::read_all_with_key(path, key).unwrap() {
        if tensor.dtype().is_float() {
            tensor = tensor.to_dtype(DType::F32).unwrap();
        }
        insert(&varmap, &name, &tensor);
    }
    varmap
}

#[test]
fn a_builder_over_a_checkpoint_evaluates() {
    let fairseq = VarBuilder::from_pth_with_state(FAIRSEQ, DType::F32, "model", &CPU).unwrap();
    let half = VarBuilder::from_pth(HALF, DType::F32, &CPU).unwrap();
    // And as safetensors, into a model in double precision.
    let tensors = pickle::read_all_with_key(FAIRSEQ, Some("model")).unwrap();
    let file = safetensors::serialize(tensors, None).unwrap();
    let double = VarBuilder::from_buffered_safetensors(file, DType::F64, &CPU).unwrap();
    let stored = [
        (fairseq, DType::F32),
        (half, DType::F16),
        (double, DType::F32),
    ];
    for (vb, stored_as) in stored {
        ENCODER.assert_loaded(&ENCODER.build(&vb), stored_as);
        let layer = DECODER.build(&vb);
        assert!(!layer.mode().is_training());
        DECODER.assert_loaded(&layer, stored_as);
        let xs = DECODER.evaluation_input().to_dtype(vb.dtype()).unwrap();
        let y = layer.forward(&xs).unwrap();
        // γ, β and the root of ψ² are off by u, u and u/2 of themselves: 1.5 u |γX̂| + u |β|, which
        // is at most 2.5 u of the largest output as long as that is 2.5 times the largest |β|.
        let relative = match stored_as {
            DType::F16 => 2.5 * 2f64.powi(-11),
            _ => 1e-5,
        };
        let expected = DECODER.recording().values("eval_y");
        assert_relative("evaluation", &y, &expected, relative);
    }
}

/// And what is saved after it has every tensor of the checkpoint, as PyTorch had it.
#[test]
fn training_continues_from_a_checkpoint() {
    let varmap = variables(FAIRSEQ, Some("model"));
    let vb = trainable(&varmap, DType::F32);
    let layer = ENCODER.build(&vb);
    assert!(layer.mode().is_training());
    ENCODER.continue_to_the_end(&layer, &varmap);

    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("model.safetensors");
    varmap.save(&file).unwrap();
    // A state of PyTorch's shapes is reset and loaded like any other.
    let before = state(&layer);
    layer.reset_running_stats().unwrap();
    assert_eq!(to_f64(&var(&varmap, "encoder.norm.running_phi")), [1.; 12]);
    varmap.clone().load(&file).unwrap();
    assert_eq!(state(&layer), before);
    let saved = candle::safetensors::load(file, &CPU).unwrap();
    assert_eq!(to_f64(&saved["encoder.norm.iters"]), [12.]);
    let original = pickle::read_all_with_key(FAIRSEQ, Some("model")).unwrap();
    assert_eq!(contents(saved), contents(original));
}

fn python(args: &[&str]) {
    let python = std::env::var("PYTHON").unwrap_or("python3".into());
    let status = Command::new(python).args(args).status().unwrap();
    assert!(status.success(), "{args:?}: {status}");
}

#[test]
#[ignore = "needs Python with torch, numpy and safetensors (PYTHON says which)"]
fn pytorch_loads_what_such_training_saves() {
    let varmap = variables(FAIRSEQ, Some("model"));
    let vb = trainable(&varmap, DType::F32);
    ENCODER.continue_to_the_end(&ENCODER.build(&vb), &varmap);
    let out = tempfile::tempdir().unwrap();
    let saved = out.path().join("model.safetensors");
    varmap.save(&saved).unwrap();
    python(&[CHECK, "--check", saved.to_str().unwrap()]);
}

/// A new model loads what the script makes of PyTorch's checkpoint, and PyTorch loads what it makes
/// of ours.
#[test]
#[ignore = "needs Python with torch, numpy and safetensors (PYTHON says which)"]
fn the_script_goes_both_ways() {
    let out = tempfile::tempdir().unwrap();
    let file = |name: &str| out.path().join(name).to_str().unwrap().to_owned();
    let (ours, theirs) = (file("model.safetensors"), file("model.pt"));
    let dtypes = [DType::F16, DType::F32, DType::F32];
    for (checkpoint, dtype) in [HALF, LEGACY, FAIRSEQ].into_iter().zip(dtypes) {
        python(&[SCRIPT, "to-candle", checkpoint, &ours]);
        let mut varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, dtype, &CPU);
        let layers = [ENCODER, DECODER].map(|stored| (stored.build(&vb), stored));
        varmap.load(&ours).unwrap();
        for (layer, stored) in &layers {
            stored.assert_loaded(layer, dtype);
        }
        if checkpoint == FAIRSEQ {
            ENCODER.continue_to_the_end(&layers[0].0, &varmap);
            varmap.save(&ours).unwrap();
        }
    }
    python(&[SCRIPT, "to-torch", &ours, &theirs]);
    let original = pickle::read_all_with_key(FAIRSEQ, Some("model")).unwrap();
    let written = pickle::read_all(&theirs).unwrap();
    assert_eq!(contents(written), contents(original));
    python(&[CHECK, "--check", &theirs]);
}
