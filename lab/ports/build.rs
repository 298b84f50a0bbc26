//! Copies models of candle-transformers and changes them by the patches here, as the guide tells
//! its reader to do by hand.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

fn main() {
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
        .find(|package| package["name"] == "candle-transformers")
        .and_then(|package| package["manifest_path"].as_str())
        .expect("candle-transformers is a dependency");
    let models = Path::new(manifest).with_file_name("src/models");
    let out = env::var("OUT_DIR").expect("cargo sets it");
    for model in ["bert", "chatglm", "csm", "llama", "llama2_c", "vit"] {
        let name = format!("{model}.patch");
        println!("cargo::rerun-if-changed={name}");
        let original = fs::read_to_string(models.join(format!("{model}.rs"))).expect("the model");
        let patch = fs::read_to_string(&name).expect("the patch");
        let patch = diffy::Patch::from_str(&patch).expect("a unified diff");
        let ported = diffy::apply(&original, &patch).expect("the patch fits this version");
        // A file that is included has no comments of its own.
        let ported = ported.replace("\n//!", "\n//").replacen("//!", "//", 1);
        fs::write(Path::new(&out).join(format!("{model}.rs")), ported).expect("room for the port");
    }
}
