#!/usr/bin/env bash
# onnx 1.23.2, onnxruntime 1.32.0 (2026-11-29): onnx's reference evaluator has a wrong LRN and a
# wrong LpNormalization.
#
# Expected: the outputs of the operators' definitions, as in ONNX Runtime.
# Seen: LRN loops over as many channels as the batch has images. With 2 images of 6 channels, four
# channels are not normalized, and are off by up to 0.8. LpNormalization with p=1 divides by the sum
# of the numbers instead of their magnitudes. A row of 3, −1 and −1 becomes 3, −1, −1 rather than
# 0.6, −0.2, −0.2. So a test of an exporter against the reference can fail for a right export.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def run(operator, x, **attributes):
    """The reference evaluator's output and ONNX Runtime's."""
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], **attributes)],
        "norm",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    data = model.SerializeToString()
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    return ReferenceEvaluator(model).run(None, {"x": x})[0], session.run(None, {"x": x})[0]


x = np.random.default_rng(0).normal(1, 0.5, (2, 6, 3, 4)).astype(np.float32)
reference, runtime = run("LRN", x, size=3, alpha=0.5, beta=0.75, bias=1.0)
square = np.pad(x.astype(np.float64) ** 2, ((0, 0), (1, 1), (0, 0), (0, 0)))
expected = x / (1 + 0.5 / 3 * (square[:, :-2] + square[:, 1:-1] + square[:, 2:])) ** 0.75
errors = np.abs(reference - expected).max((0, 2, 3))
print("LRN's errors by channel:", errors.round(2), "ONNX Runtime", np.abs(runtime - expected).max())
assert np.abs(runtime - expected).max() < 1e-5, "ONNX Runtime has changed"
assert errors[:2].max() < 1e-5 and errors[2:].min() > 0.1, "this has changed"
assert (reference[:, 2:] == x[:, 2:]).all(), "this has changed"

x = np.array([[3, -1, -1]], np.float32)
reference, runtime = run("LpNormalization", x, axis=-1, p=1)
print("LpNormalization of 3, -1, -1:", reference[0], "ONNX Runtime", runtime[0])
assert np.abs(runtime - x / 5).max() < 1e-6, "ONNX Runtime has changed"
assert (reference == x).all(), "this has changed"
EOF
