#!/usr/bin/env bash
# ONNX Runtime 1.32.0 (2026-11-29): the default optimizations turn a valid LayerNorm in primitives
# into a node that the session then rejects.
#
# Expected: a model that loads without optimizations loads with them.
# Seen: half input, cast to f32, a LayerNorm in f32 with f32 weights, cast back to half. The
# fusion takes the casts away and makes a LayerNormalization of a half input and f32 weights,
# which is a type error, "in node (/LayerNormFusion/)". With Mul(d, d) in place of Pow(d, 2)
# nothing is fused and the model runs.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

SIZE = 64
rng = np.random.default_rng(0)
x = rng.normal(0, 1, (4, SIZE)).astype(np.float16)
weight, bias = (rng.normal(mean, 0.1, SIZE).astype(np.float32) for mean in (1, 0))
wide = x.astype(np.float64)
centred = wide - wide.mean(-1, keepdims=True)
expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def build(square):
    constants = {"two": 2, "eps": 1e-5, "weight": weight, "bias": bias}
    constants = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in constants.items()]
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["wide"], ["mean"], axes=[-1]),
        helper.make_node("Sub", ["wide", "mean"], ["d"]),
        helper.make_node(square[0], square[1], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["variance"], axes=[-1]),
        helper.make_node("Add", ["variance", "eps"], ["sum"]),
        helper.make_node("Sqrt", ["sum"], ["root"]),
        helper.make_node("Div", ["d", "root"], ["normalized"]),
        helper.make_node("Mul", ["normalized", "weight"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias"], ["out"]),
        helper.make_node("Cast", ["out"], ["y"], to=TensorProto.FLOAT16),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, x.shape) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "norm", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def run(model, level):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        return str(error).strip()
    error = np.abs(session.run(None, {"x": x})[0] - expected).max()
    return "runs" if error < 4e-3 else f"is off by {error}"


level = ort.GraphOptimizationLevel
power, product = build(("Pow", ["d", "two"])), build(("Mul", ["d", "d"]))
results = [
    run(power, level.ORT_DISABLE_ALL),
    run(power, level.ORT_ENABLE_ALL),
    run(product, level.ORT_ENABLE_ALL),
]
for name, result in zip(("Pow, not optimized", "Pow, by default", "Mul, by default"), results):
    print(f"{name}: {result}")
assert results[0] == results[2] == "runs" and "LayerNormFusion" in results[1], "this has changed"
EOF
