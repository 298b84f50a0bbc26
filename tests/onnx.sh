#!/usr/bin/env bash
# Runs the Python program of docs/guide/runtimes.md on recorded PowerNorms and on a LayerNorm, and
# compares what ONNX Runtime, tract, rten, OpenVINO and onnx's reference evaluator make of the
# graphs. Needs Python, cargo and their registries; the weekly workflow runs it.
set -euo pipefail

cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" numpy==2.4.6 safetensors==0.8.0 \
  onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 tract==0.23.9

# rten has no Python package, so this builds a program that runs a model on standard input.
cargo init --quiet --vcs none --edition 2024 --name rten-run "$dir/rten"
cat >"$dir/rten/src/main.rs" <<'EOF'
use rten_tensor::prelude::*;
use std::io::{Read, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let shape = arguments[2..].iter().map(|n| n.parse()).collect::<Result<Vec<usize>, _>>()?;
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes)?;
    let numbers = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    let x = rten_tensor::Tensor::from_data(&shape, numbers.collect::<Vec<_>>());
    let y = rten::Model::load_file(&arguments[1])?.run_one(x.view().into(), None)?;
    let y: rten_tensor::Tensor<f32> = y.try_into()?;
    let bytes: Vec<u8> = y.iter().flat_map(|number| number.to_le_bytes()).collect();
    Ok(std::io::stdout().write_all(&bytes)?)
}
EOF
cd "$dir/rten"
cargo add --quiet rten@=0.27.0 rten-tensor@=0.27.0
CARGO_PROFILE_DEV_DEBUG=false cargo build --quiet --target-dir target
cd - >/dev/null

RTEN="$dir/rten/target/debug/rten-run" PYTHONPATH="$dir/lib" python3 - "$dir/model.onnx" <<'EOF'
import os
import re
import subprocess
import sys
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import openvino
import safetensors
import tract
from onnx import reference

PATH = sys.argv[1]
warnings.simplefilter("ignore")  # the reference evaluator's, about half
exec(re.search(r"```python\n(.*?)```", open("docs/guide/runtimes.md").read(), re.DOTALL).group(1))


def onnx_runtime(level):
    def run(x):
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.optimized_model_filepath = PATH + ".optimized"
        options.log_severity_level = 3
        session = ort.InferenceSession(PATH, options, providers=["CPUExecutionProvider"])
        return session.run(None, {"x": x})[0]

    return run


def open_vino(x):
    core = openvino.Core()
    return core.compile_model(core.read_model(PATH), "CPU")([x])[0]


def rten(x):
    """Models of half run in f32 in rten, with inputs and outputs of f32."""
    command = [os.environ["RTEN"], PATH, *map(str, x.shape)]
    numbers = x.astype(np.float32).tobytes()
    y = subprocess.run(command, input=numbers, check=True, stdout=subprocess.PIPE).stdout
    return np.frombuffer(y, np.float32).reshape(x.shape).astype(x.dtype)


LEVELS = ort.GraphOptimizationLevel
RUNTIMES = {
    "ONNX Runtime, not optimized": onnx_runtime(LEVELS.ORT_DISABLE_ALL),
    "OpenVINO": open_vino,
    "tract": lambda x: tract.onnx().load(PATH).into_model().into_runnable().run([x])[0].to_numpy(),
    "rten": rten,
    "reference": lambda x: reference.ReferenceEvaluator(PATH).run(None, {"x": x})[0],
    "ONNX Runtime": onnx_runtime(LEVELS.ORT_ENABLE_ALL),  # last: its graph is looked at
}
passed = failed = 0


def check(name, x, expected, tolerance, fused, **layer):
    """Both dtypes in every runtime; the last dimension is fixed, the others are symbols."""
    global passed, failed
    for dtype, half in ((np.float32, False), (np.float16, True)):
        proto = TensorProto.FLOAT16 if half else TensorProto.FLOAT
        nodes, constants = norm("norm", "x", "y", dtype=proto, **layer)
        shape = [f"d{i}" for i in range(x.ndim - 1)] + [x.shape[-1]]
        values = [helper.make_tensor_value_info(n, proto, shape) for n in ("x", "y")]
        graph = helper.make_graph(nodes, name, values[:1], values[1:], constants)
        opsets = [helper.make_opsetid("", 17)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, PATH)
        # Half rounds the input, relative to the largest number of its row, and the output.
        bound = tolerance + (4 * 2**-11 * np.abs(expected).max() if half else 0)
        for runtime, run in RUNTIMES.items():
            y = run(x.astype(dtype))
            error = np.abs(y.astype(np.float64) - expected).max()
            good = y.dtype == dtype and y.shape == x.shape and error <= bound
            passed, failed = passed + good, failed + (not good)
            if not good:
                print(f"{name}, {np.dtype(dtype)}, {runtime}: {error} > {bound}, or {y.dtype}")
        operators = {node.op_type for node in onnx.load(PATH + ".optimized").graph.node}
        # Half's LayerNorm is left alone: see the comment in the program.
        if fused and fused not in operators and not (half and "centre" in layer):
            print(f"{name}, {np.dtype(dtype)}: not fused, {operators}")
            failed += 1


for name in ("paper_g1", "paper_g3_padded", "paper_no_groups", "fairseq_g1"):
    with safetensors.safe_open(f"tests/fixtures/{name}.safetensors", "np") as file:
        facts, get = file.metadata(), file.get_tensor
        eps, groups = float(facts["eps"]), int(facts["groups"])
        weight = get("weight") / np.sqrt(get("running_phi." + facts["steps"]) + eps)
        x, y = get("eval_x"), get("eval_y")
        assert np.abs(y).max() > 0.5
        fused = "SimplifiedLayerNormalization" if groups == 1 else None
        check(name, x, y, 2e-6, fused, weight=weight, bias=get("bias"), eps=eps, groups=groups)

rng = np.random.default_rng(0)
weight, bias = rng.normal(1, 0.1, 64), rng.normal(0, 0.1, 64)
for name, mean, deviation, tolerance in (("wide", 0, 300, 2e-6), ("far", 2048, 4, 2e-3)):
    # Numbers that half can hold, so that both dtypes see the same rows.
    x = rng.normal(mean, deviation, (4, 64)).astype(np.float16).astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias
    layer = {"weight": weight, "bias": bias, "centre": True}
    check(f"LayerNorm, {name}", x, y, tolerance, "LayerNormalization", **layer)

print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
EOF
