#!/usr/bin/env bash
# candle-onnx runs none of ONNX's three normalization operators, and takes ReduceMean over the wrong
# axes from opset 18 on.
#
# Expected: LayerNormalization (opset 17), GroupNormalization (21) and RMSNormalization (23) run; or
# else an exporter that writes them as ReduceMean, Sub, Mul, Sqrt and Div is understood. Seen: each
# is an error, "unsupported op_type". ReduceMean gets its axes as a second input from opset 18 on,
# which candle-onnx does not read: the mean of the last axis is then the mean of everything, in
# silence, so each row's output depends on the other rows. ReduceMax, ReduceMin and ReduceSum read
# that input.
#
# candle-onnx 0.11.1, on a CPU, 2026-11-29. Exits non-zero if this changes.
# Needs pip, for the protocol compiler that candle-onnx is built with.
# FINDINGS_TARGET_DIR may name a folder for builds that several of these scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.76.0
cat >protoc <<'END'
#!/bin/sh
exec "$(dirname "$0")/venv/bin/python" -m grpc_tools.protoc "$@"
END
chmod +x protoc
export PROTOC=$project/protoc
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1 candle-onnx@=0.11.1
cat >src/main.rs <<'END'
use candle_core::{Device::Cpu, Result, Tensor};
use candle_onnx::onnx::{GraphProto, ModelProto, NodeProto, OperatorSetIdProto, ValueInfoProto};
use std::collections::HashMap;

/// Runs one operator on named inputs.
fn run(operator: &str, opset: i64, inputs: Vec<(&str, Tensor)>) -> Result<Tensor> {
    let node = NodeProto {
        op_type: operator.to_owned(),
        input: inputs.iter().map(|(name, _)| (*name).to_owned()).collect(),
        output: vec!["y".to_owned()],
        ..Default::default()
    };
    let output = ValueInfoProto { name: "y".to_owned(), ..Default::default() };
    let graph = GraphProto { node: vec![node], output: vec![output], ..Default::default() };
    let model = ModelProto {
        graph: Some(graph),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: opset }],
        ..Default::default()
    };
    let inputs: HashMap<_, _> = inputs.into_iter().map(|(n, t)| (n.to_owned(), t)).collect();
    Ok(candle_onnx::simple_eval(&model, inputs)?.remove("y").expect("an output"))
}

fn main() -> Result<()> {
    let x = Tensor::new(&[[1f32, 3.], [5., 7.]], &Cpu)?;
    let weight = Tensor::new(&[1f32, 1.], &Cpu)?;
    for (operator, opset, inputs) in [
        ("LayerNormalization", 17, vec![("x", &x), ("weight", &weight)]),
        ("GroupNormalization", 21, vec![("x", &x), ("weight", &weight), ("bias", &weight)]),
        ("RMSNormalization", 23, vec![("x", &x), ("weight", &weight)]),
    ] {
        let inputs = inputs.into_iter().map(|(name, tensor)| (name, tensor.clone())).collect();
        let error = run(operator, opset, inputs).expect_err("an error").to_string();
        let error = error.lines().next().unwrap_or_default();
        println!("{operator}: {error}");
        assert!(error.contains("unsupported op_type"));
    }

    let axes = Tensor::new(&[-1i64], &Cpu)?;
    let mean = run("ReduceMean", 18, vec![("x", x.clone()), ("axes", axes.clone())])?;
    let max = run("ReduceMax", 18, vec![("x", x), ("axes", axes)])?;
    println!("ReduceMean of [[1, 3], [5, 7]] over axis -1: {:?}", mean.to_vec2::<f32>()?);
    println!("ReduceMax over axis -1: {:?}", max.to_vec2::<f32>()?);
    assert_eq!(mean.to_vec2::<f32>()?, [[4.]]);
    assert_eq!(max.to_vec2::<f32>()?, [[3.], [7.]]);
    Ok(())
}
END
cargo run --quiet
