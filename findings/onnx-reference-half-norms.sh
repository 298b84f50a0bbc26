#!/usr/bin/env bash
# onnx 1.23.2 (2026-11-29): the reference evaluator computes LayerNormalization and
# RMSNormalization of half inputs in half.
#
# Expected: `stash_type`, 1 by default, says that the statistics are taken in f32, and this
# evaluator is what other runtimes are compared with.
# Seen: squares of numbers above 256 overflow to infinity, so every output of a row around 300 is
# 0. ONNX Runtime's outputs have half's precision. In bf16 nothing overflows, and
# LayerNormalization is off by 0.17 in outputs of 4, because sums are kept in bf16.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6 ml_dtypes==0.6.0
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import warnings

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, reference

warnings.simplefilter("ignore")  # overflow
SIZE = 512


def model(operator, dtype):
    inputs = ["x", "weight"] + (["bias"] if operator == "LayerNormalization" else [])
    weights = [
        helper.make_tensor("weight", dtype, [SIZE], [1.0] * SIZE),
        helper.make_tensor("bias", dtype, [SIZE], [0.0] * SIZE),
    ]
    graph = helper.make_graph(
        [helper.make_node(operator, inputs, ["y"], epsilon=1e-5, stash_type=1)],
        "norm",
        [helper.make_tensor_value_info("x", dtype, [8, SIZE])],
        [helper.make_tensor_value_info("y", dtype, [8, SIZE])],
        weights[: len(inputs) - 1],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def error(y, x, centre):
    x = x.astype(np.float64)
    x = x - x.mean(-1, keepdims=True) if centre else x
    return np.abs(y.astype(np.float64) - x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)).max()


random = np.random.default_rng(0).normal(0, 1, (8, SIZE))
for operator in ("LayerNormalization", "RMSNormalization"):
    centre = operator == "LayerNormalization"
    x = (300 * random).astype(np.float16)
    half = model(operator, TensorProto.FLOAT16)
    y = reference.ReferenceEvaluator(half).run(None, {"x": x})[0]
    session = ort.InferenceSession(half.SerializeToString(), providers=["CPUExecutionProvider"])
    runtime = error(session.run(None, {"x": x})[0], x, centre)
    x = random.astype(ml_dtypes.bfloat16)
    evaluator = reference.ReferenceEvaluator(model(operator, TensorProto.BFLOAT16))
    bf16 = error(evaluator.run(None, {"x": x})[0], x, centre)
    print(f"{operator}: largest output in half {np.abs(y).max()}; ONNX Runtime's error {runtime:.1e}")
    print(f"  error in bf16 {bf16:.2f}")
    assert not y.any() and runtime < 3e-3 and bf16 > 0.05, "this has changed"
EOF
