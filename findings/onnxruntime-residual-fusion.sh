#!/usr/bin/env bash
# ONNX Runtime 1.32.0 (2026-11-29): the default optimizations make a LayerNorm of a sum an order
# of magnitude less exact, and only if the tensor has three dimensions.
#
# Expected: x + r, then LayerNormalization, has the same digits with and without optimizations.
# Seen: at the default level, Add and LayerNormalization of [batch, tokens, channels] become a
# SkipLayerNormalization, whose variance is taken in one pass: at mean 1000 its error is ten times
# LayerNormalization's, and at mean 100 about thirty times. Of [tokens, channels] they stay two.
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

SIZE = 512
rng = np.random.default_rng(1)
weight, bias = (rng.normal(mean, 0.1, SIZE).astype(np.float32) for mean in (1, 0))


def run(x, r, level):
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name in ("x", "r", "y")
    ]
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x", "r"], ["s"]),
            helper.make_node("LayerNormalization", ["s", "weight", "bias"], ["y"], epsilon=1e-5),
        ],
        "norm",
        values[:2],
        values[2:],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = "optimized.onnx"
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    operators = [node.op_type for node in onnx.load("optimized.onnx").graph.node]
    y = session.run(None, {"x": x, "r": r})[0].astype(np.float64)
    s = (x + r).astype(np.float64)
    s -= s.mean(-1, keepdims=True)
    expected = s / np.sqrt((s * s).mean(-1, keepdims=True) + 1e-5) * weight + bias
    return operators, np.abs(y - expected).max()


level = ort.GraphOptimizationLevel
for mean in (100, 1000):
    x = rng.normal(mean, 1, (8, SIZE)).astype(np.float32)
    r = rng.normal(0, 1, (8, SIZE)).astype(np.float32)
    _, plain = run(x[None], r[None], level.ORT_DISABLE_ALL)
    operators, fused = run(x[None], r[None], level.ORT_ENABLE_ALL)
    flat_operators, flat = run(x, r, level.ORT_ENABLE_ALL)
    print(f"mean {mean}: {plain:.1e} without optimizations, {fused:.1e} with {operators}")
    print(f"  two dimensions: {flat:.1e} with {flat_operators}")
    assert operators == ["SkipLayerNormalization"] and len(flat_operators) == 2, "this has changed"
    assert fused > 4 * plain and flat < 2 * plain, "this has changed"
EOF
