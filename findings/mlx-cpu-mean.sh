#!/usr/bin/env bash
# mlx 0.32.4 with mlx-cpu (2026-11-29): on a CPU, means are summed in order, and LayerNorm loses
# digits with the width.
#
# Expected: pairwise or blocked sums, as in NumPy and PyTorch, whose error hardly grows with the
# width.
# Seen: of 16384 numbers around 1000, the mean is off by 3e-3 (NumPy in f32: 4e-5), and
# LayerNorm's outputs by as much; of 512 numbers by 4e-4.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import mlx.core as mx
import mlx.nn as nn
import numpy as np

mx.set_default_device(mx.cpu)
errors = []
for size in (512, 16384):
    x = np.random.default_rng(0).normal(1000, 1, (4, size)).astype(np.float32)
    wide = x.astype(np.float64)
    mean = wide.mean(-1, keepdims=True)
    expected = (wide - mean) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    norm = np.abs(np.array(nn.LayerNorm(size)(mx.array(x))) - expected).max()
    means = np.abs(np.array(mx.mean(mx.array(x), -1, keepdims=True)) - mean).max()
    numpy = np.abs(x.mean(-1, keepdims=True) - mean).max()
    errors.append((norm, means, numpy))
    print(f"{size}: LayerNorm {norm:.1e}, mean {means:.1e}, NumPy's mean {numpy:.1e}")
norm, means, numpy = errors[1]
assert means > 10 * numpy and norm > 3 * errors[0][0], "this has changed"
EOF
