#!/usr/bin/env bash
# tract 0.23.9 (2026-11-29): the norms of an f64 model have f32's digits.
#
# Expected: an f64 LayerNormalization or RMSNormalization is exact to 1e-15, as in ONNX Runtime.
# Seen: errors of 1e-6 in f64 outputs. The operators' default, `stash_type=1`, means statistics in
# f32, and tract honours it in f64 too, where it takes precision away; ONNX Runtime does not.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  tract==0.23.9 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import numpy as np
import onnx
import onnxruntime as ort
import tract
from onnx import TensorProto, helper

SIZE = 512
x = np.random.default_rng(0).normal(0, 1, (8, SIZE))
for operator in ("LayerNormalization", "RMSNormalization"):
    inputs = ["x", "weight"]
    graph = helper.make_graph(
        [helper.make_node(operator, inputs, ["y"], epsilon=1e-5)],
        "norm",
        [helper.make_tensor_value_info("x", TensorProto.DOUBLE, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.DOUBLE, x.shape)],
        [helper.make_tensor("weight", TensorProto.DOUBLE, [SIZE], np.ones(SIZE))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    onnx.save(model, "model.onnx")
    rows = x - x.mean(-1, keepdims=True) if operator == "LayerNormalization" else x
    expected = rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + np.float32(1e-5))
    y = tract.onnx().load("model.onnx").into_model().into_runnable().run([x])[0].to_numpy()
    session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    errors = [np.abs(out - expected).max() for out in (y, session.run(None, {"x": x})[0])]
    print(f"{operator}: tract {y.dtype} {errors[0]:.1e}, ONNX Runtime {errors[1]:.1e}")
    assert y.dtype == np.float64 and errors[0] > 1e-8 and errors[1] < 1e-13, "this has changed"
EOF
