#!/usr/bin/env bash
# tinygrad 0.14.0 (2026-11-29): LayerNorm of half inputs squares in half, and RMSNorm does not.
#
# Expected: both take their statistics in f32, as PyTorch's do.
# Seen: deviations above 256 overflow when they are squared, so LayerNorm's outputs are all 0,
# with f32 weights too, for which the output's dtype is f32. RMSNorm casts its input first and is
# right. DEV=PYTHON needs no compiler.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" tinygrad==0.14.0 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import os

os.environ["DEV"] = "PYTHON"
import numpy as np
from tinygrad import Tensor, dtypes, nn

x = (300 * np.random.default_rng(0).normal(0, 1, (2, 64))).astype(np.float16)
wide = x.astype(np.float64)
centred = wide - wide.mean(-1, keepdims=True)
results = {}
for name, norm, rows, eps in (
    ("LayerNorm", nn.LayerNorm(64), centred, 1e-5),
    ("RMSNorm", nn.RMSNorm(64), wide, 1e-6),
):
    y = norm(Tensor(x))
    expected = rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + eps)
    values = y.cast(dtypes.float).numpy()
    results[name] = np.abs(values).max(), np.abs(values - expected).max()
    print(f"{name}: {y.dtype}, largest output {results[name][0]:.3g}, error {results[name][1]:.1e}")
assert results["LayerNorm"][0] == 0 and results["RMSNorm"][1] < 3e-3, "this has changed"
EOF
