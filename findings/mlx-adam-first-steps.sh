#!/usr/bin/env bash
# mlx 0.32.4 (2026-11-29): the first steps of Adam and AdamW are up to 6.6 times the learning rate.
#
# Expected: with a constant gradient each step is the learning rate, as in PyTorch, optax and
# candle, where Adam divides both running means by 1 − βᵗ.
# Seen: `bias_correction` is off by default, so both means are too small at first, and the mean of
# squares, by which a step is divided, for longer. The first step is 3.2 learning rates, the 12th
# 6.6, and the 500th still 1.6. A learning rate that was tuned elsewhere, without a warm-up, is too
# large by that much.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import mlx.core as mx
import mlx.optimizers as optimizers

RATE = 2.0**-7


def steps(optimizer, count=600):
    """The steps of one weight whose gradient is always 0.5, in learning rates."""
    weights, taken = {"w": mx.array([0.0])}, []
    for _ in range(count):
        before = weights["w"].item()
        weights = optimizer.apply_gradients({"w": mx.array([0.5])}, weights)
        taken.append((before - weights["w"].item()) / RATE)
    return taken


for name, kind, options in (
    ("Adam", optimizers.Adam, {}),
    ("AdamW", optimizers.AdamW, {"weight_decay": 0.0}),
):
    corrected = steps(kind(RATE, bias_correction=True, **options))
    default = steps(kind(RATE, **options))
    largest = max(default)
    print(
        f"{name}: corrected {min(corrected):.3f} to {max(corrected):.3f} learning rates; by default"
        f" {default[0]:.2f}, then up to {largest:.2f} in step {default.index(largest) + 1},"
        f" and {default[499]:.2f} in step 500"
    )
    assert max(abs(step - 1) for step in corrected) < 0.01, "the corrected steps have changed"
    assert abs(default[0] - 3.16) < 0.01 and abs(largest - 6.57) < 0.02, "this has changed"
EOF
