#!/usr/bin/env bash
# mlx 0.32.4 (2026-11-29): GroupNorm puts other channels into a group than PyTorch does.
#
# Expected: of 8 channels in 2 groups, the first four are one group, as in PyTorch, flax and ONNX.
# Seen: by default the even channels are one and the odd ones the other. Parameters have the same
# names and shapes, so weights from elsewhere load, and outputs are off by 1.8. The option
# `pytorch_compatible=True` gives the expected groups.
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
CHANNELS, GROUPS = 8, 2
x = np.random.default_rng(0).normal(0, 1, (2, 5, CHANNELS)).astype(np.float32)
x *= np.arange(1, CHANNELS + 1, dtype=np.float32)


def expected(members):
    """Each group of channels, normalized over these channels and all positions."""
    y = np.empty(x.shape)
    for channels in members:
        group = x[..., channels].astype(np.float64)
        mean = group.mean((1, 2), keepdims=True)
        y[..., channels] = (group - mean) / np.sqrt(group.var((1, 2), keepdims=True) + 1e-5)
    return y


halves = np.split(np.arange(CHANNELS), GROUPS)
strided = [np.arange(first, CHANNELS, GROUPS) for first in range(GROUPS)]
for options, right in (({}, strided), ({"pytorch_compatible": True}, halves)):
    y = np.array(nn.GroupNorm(GROUPS, CHANNELS, **options)(mx.array(x)))
    errors = [np.abs(y - expected(members)).max() for members in (halves, strided)]
    print(f"{options}: {errors[0]:.1e} from halves, {errors[1]:.1e} from even and odd channels")
    assert np.abs(y - expected(right)).max() < 1e-4 and max(errors) > 0.5, "this has changed"
EOF
