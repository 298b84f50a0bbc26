#!/usr/bin/env bash
# ONNX Runtime 1.32.0 (2026-11-29): on a CPU LayerNormalization runs in bf16, and RMSNormalization
# does not.
#
# Expected: both or neither.
# Seen: LayerNormalization has a bf16 kernel. RMSNormalization is expanded into its primitives, of
# which Mul has no bf16 kernel: NOT_IMPLEMENTED when the model is loaded. In half both run.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper


def run(operator, dtype):
    """The operator between two casts, so that NumPy need not know bf16."""
    inputs = ["half", "weight"] + (["bias"] if operator == "LayerNormalization" else [])
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 8]) for n in ("x", "y")]
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["half"], to=dtype),
            helper.make_node(operator, inputs, ["normalized"], epsilon=1e-5),
            helper.make_node("Cast", ["normalized"], ["y"], to=TensorProto.FLOAT),
        ],
        "norm",
        values[:1],
        values[1:],
        [
            helper.make_tensor("weight", dtype, [8], [1.0] * 8),
            helper.make_tensor("bias", dtype, [8], [0.0] * 8),
        ][: len(inputs) - 1],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    x = np.array([[1, -1] * 4] * 2, np.float32)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return bool(np.abs(session.run(None, {"x": x})[0] - x).max() < 0.01)
    except Exception as error:
        print("   ", type(error).__name__, str(error).strip()[:100])
        return type(error).__name__


results = {
    (operator, name): run(operator, dtype)
    for operator in ("LayerNormalization", "RMSNormalization")
    for name, dtype in (("half", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16))
}
print(results)
assert list(results.values()) == [True, True, True, "NotImplemented"], "this has changed"
EOF
