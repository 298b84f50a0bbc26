//! Copies files of candle and candle-transformers and changes them by the patches here: models, as
//! the guide tells its reader to do by hand, and candle's own tests of its normalizations.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    let models = source("candle-transformers").join("src/models");
    for model in [
        "bert",
        "chatglm",
        "csm",
        "gemma3",
        "llama",
        "llama2_c",
        "modernbert",
        "qwen3",
        "vit",
    ] {
        let ported = patched(&read(&models.join(format!("{model}.rs"))), model);
        write(model, &ported);
        if model == "bert" {
            // With PowerNorm. And with this crate's LayerNorm, for which an import changes.
            let imported = patched(&read(&models.join("bert.rs")), "bert_layer_norm");
            write("bert_layer_norm", &imported);
            write_slow("bert", &imported);
        }
        if ["gemma3", "llama", "modernbert", "qwen3"].contains(&model) {
            write_slow(model, &ported);
        }
        if model == "llama2_c" {
            // The same file with candle's layer, by the import alone, and with PowerNorm.
            let ours = "use candle_powernorm::{rms_norm, RmsNorm};";
            assert_eq!(ported.matches(ours).count(), 1, "the patch has this import");
            let candles = ported.replace(ours, "use candle_nn::{rms_norm, RmsNorm};");
            write("llama2_c_candle", &candles);
            write("llama2_c_power", &patched(&ported, "llama2_c_power"));
        }
    }
    let tests = source("candle-nn").join("tests");
    for test in ["layer_norm", "ops"] {
        // Nothing but paths differs.
        let test_of = format!("candle_{test}");
        let text = read(&tests.join(format!("{test}.rs")));
        write(&test_of, &patched(&text, &test_of));
    }
}

/// The folder of the source of a package that this one depends on.
fn source(package: &str) -> PathBuf {
    let cargo = env::var("CARGO").expect("cargo runs this");
    let metadata = Command::new(cargo)
        .args(["metadata", "--format-version", "1"])
        .output()
        .expect("cargo runs");
    let metadata: serde_json::Value =
        serde_json::from_slice(&metadata.stdout).expect("cargo metadata prints JSON");
    let packages = metadata["packages"].as_array().expect("there are packages");
    let manifest = packages
        .iter()
        .find(|known| known["name"] == package)
        .and_then(|found| found["manifest_path"].as_str())
        .unwrap_or_else(|| panic!("{package} is a dependency"));
    let folder = Path::new(manifest)
        .parent()
        .expect("a manifest in a folder");
    folder.to_owned()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The text after `name.patch`.
fn patched(original: &str, name: &str) -> String {
    let path = format!("{name}.patch");
    println!("cargo::rerun-if-changed={path}");
    let patch = read(Path::new(&path));
    let patch = diffy::Patch::from_str(&patch).expect("a unified diff");
    diffy::apply(original, &patch).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Writes a ported file on slow forms, to compare with: of everything, and of normalizations alone.
fn write_slow(model: &str, ported: &str) {
    for (form, path) in [
        ("slow", "crate::slow::"),
        ("slow_norms", "crate::slow::norms::"),
    ] {
        let text = ported.replace("candle_powernorm::", path);
        write(&format!("{model}_{form}"), &text);
    }
}

/// Writes `name.rs` for `include!`: a file that is included has no comments of its own.
fn write(name: &str, text: &str) {
    let text = text.replace("\n//!", "\n//").replacen("//!", "//", 1);
    let out = env::var("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&out).join(format!("{name}.rs")), text).expect("room for the file");
}
