#!/usr/bin/env bash
# OpenVINO 2026.4.1 (2026-11-29): the Python API returns a bf16 output as a float16 array of the
# same bits.
#
# Expected: an error, an array of integers or ml_dtypes.bfloat16, since NumPy has no bf16.
# Seen: `result.dtype` is float16, and the bits of bf16 2, 4, -6 and 1 are read as 2, 2.25, -2.375
# and 1.875. No warning. `.view(np.uint16)` and a shift by 16 bits give the numbers.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" openvino==2026.4.1 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import numpy as np
import openvino as ov
import openvino.opset13 as op

x = op.parameter([4], ov.Type.bf16, name="x")
compiled = ov.Core().compile_model(ov.Model([op.add(x, x)], [x]), "CPU")
bits = (np.array([1, 2, -3, 0.5], np.float32).view(np.uint32) >> 16).astype(np.uint16)
y = compiled([ov.Tensor(bits, [4], ov.Type.bf16)])[0]
right = (y.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
print(f"OpenVINO's type {compiled.output(0).element_type}, NumPy's {y.dtype}: {y}, should be {right}")
assert right.tolist() == [2, 4, -6, 1], "the sum has changed"
assert y.dtype == np.float16 and y.tolist() == [2, 2.25, -2.375, 1.875], "this has changed"
EOF
