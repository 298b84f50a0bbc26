#!/usr/bin/env bash
# onnxruntime 1.32.0 (2026-11-29): onnxruntime.transformers.float16 raises a small epsilon when it
# converts a model.
#
# Expected: the constants of a norm in primitives are kept in f32, or rounded: 1e-12 to 0 in half.
# Seen: constants below the least half, 6e-8, become 6e-8, without a warning. An RMSNorm with
# epsilon 1e-12 then divides rows of 1e-5 by 24 times the right number. The attribute of
# LayerNormalization and RMSNormalization stays as it is.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import warnings

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

warnings.simplefilter("ignore")
SIZE = 64
x = (1e-5 * np.random.default_rng(0).normal(0, 1, (4, SIZE))).astype(np.float32)


def build(nodes, constants):
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n in ("x", "y")]
    constants = [numpy_helper.from_array(np.array(v, np.float32), n) for n, v in constants.items()]
    graph = helper.make_graph(nodes, "norm", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def run(model):
    providers = ["CPUExecutionProvider"]
    session = ort.InferenceSession(model.SerializeToString(), providers=providers)
    return np.abs(session.run(None, {"x": x})[0]).max()


primitives = build(
    [
        helper.make_node("Mul", ["x", "x"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["mean"], axes=[-1]),
        helper.make_node("Add", ["mean", "eps"], ["sum"]),
        helper.make_node("Sqrt", ["sum"], ["root"]),
        helper.make_node("Div", ["x", "root"], ["y"]),
    ],
    {"eps": 1e-12},
)
before = run(primitives)
half = convert_float_to_float16(primitives, keep_io_types=True)
eps = next(float(numpy_helper.to_array(i)) for i in half.graph.initializer if i.name == "eps")
after = run(half)
node = helper.make_node("LayerNormalization", ["x", "weight"], ["y"], epsilon=1e-12)
operator = convert_float_to_float16(build([node], {"weight": np.ones(SIZE)}), keep_io_types=True)
attribute = next(
    a.f for n in operator.graph.node for a in n.attribute if a.name == "epsilon"
)
print(f"epsilon 1e-12 became {eps:.2e}: largest output {after:.2f}, before {before:.2f}")
print(f"LayerNormalization's attribute: {attribute:.0e}")
assert 5e-8 < eps < 7e-8 and after < before / 10, "this has changed"
assert attribute == np.float32(1e-12), "the attribute has changed"
EOF
