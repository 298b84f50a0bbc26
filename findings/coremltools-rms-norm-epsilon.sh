#!/usr/bin/env bash
# coremltools 9.0, torch 2.15.0 (2026-11-29): RMSNorm is converted with an epsilon that is
# relative to the row's largest element, and a default epsilon of 1e-5.
#
# Expected: x / sqrt(mean(x^2) + eps), with eps=None as PyTorch's 1.2e-7.
# Seen: the row is divided by its largest magnitude before the squares and the epsilon, which
# avoids overflow and changes the function: for rows of 1e-3 and eps 1e-5 the outputs are three
# times PyTorch's, and a row of zeros is 0/0. LayerNorm keeps its epsilon in f32. In half, which
# is the default, an epsilon of 1e-12 becomes 6e-8. The converted program is evaluated with NumPy
# here, so that the script also runs on Linux.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  coremltools==9.0 torch==2.15.0 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import logging
import warnings

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
import coremltools as ct
import numpy as np
import torch


def convert(model, precision):
    traced = torch.jit.trace(model.eval(), torch.ones(1, 8, 64))
    converted = ct.convert(
        traced,
        inputs=[ct.TensorType(name="x", shape=(1, 8, 64))],
        minimum_deployment_target=ct.target.iOS17,
        compute_precision=precision,
        skip_model_load=True,
    )
    operations = converted._mil_program.functions["main"].operations
    return [op for op in operations if op.op_type != "const"]


FUNCTIONS = {
    "abs": lambda x: np.abs(x),
    "reduce_max": lambda x, axes, keep_dims: x.max(tuple(axes), keepdims=keep_dims),
    "reduce_mean": lambda x, axes, keep_dims: x.mean(tuple(axes), keepdims=keep_dims),
    "real_div": lambda x, y: x / y,
    "square": lambda x: x * x,
    "add": lambda x, y: x + y,
    "sqrt": lambda x: np.sqrt(x),
    "mul": lambda x, y: x * y,
}


def evaluate(operations, x):
    values = {"x": x}
    for op in operations:
        inputs = {k: v.val if v.val is not None else values[v.name] for k, v in op.inputs.items()}
        values[op.outputs[0].name] = FUNCTIONS[op.op_type](**inputs)
    return values[operations[-1].outputs[0].name]


full, half = ct.precision.FLOAT32, ct.precision.FLOAT16
torch.manual_seed(0)
rows = torch.randn(1, 8, 64) * 1e-3
norm = torch.nn.RMSNorm(64, eps=1e-5)
operations = convert(norm, full)
ratio = np.abs(evaluate(operations, rows.numpy())).max() / norm(rows).abs().max().item()
with np.errstate(invalid="ignore"):
    zeros = evaluate(operations, np.zeros((1, 8, 64), np.float32))
print([op.op_type for op in operations])
print(f"rows of 1e-3: {ratio:.2f} times PyTorch's outputs; zeros: {zeros[0, 0, 0]}")


def added(operations):
    return [float(op.y.val) for op in operations if op.op_type == "add"]


default = added(convert(torch.nn.RMSNorm(64), full))
epsilons = [
    float(convert(torch.nn.LayerNorm(64, eps=1e-12), precision)[0].epsilon.val)
    for precision in (full, half)
]
print(f"eps=None became {default}; LayerNorm's 1e-12: {epsilons}")
assert ratio > 2 and np.isnan(zeros).all(), "RMSNorm has changed"
assert np.allclose(default, [1e-5]) and np.isclose(epsilons[0], 1e-12), "an epsilon has changed"
assert 5e-8 < epsilons[1] < 7e-8, "half has changed"
EOF
