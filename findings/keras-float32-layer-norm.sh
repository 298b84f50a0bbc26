#!/usr/bin/env bash
# keras 3.15.1 on JAX 0.10.2 (2026-11-29): LayerNormalization(dtype="float32") of a half input
# returns f32 numbers that were rounded to half on the way.
#
# Expected: f32 precision, which is why one sets a layer's dtype to f32 in a model of mixed
# precision; RMSNormalization has it.
# Seen: every output is a half or bf16 number, cast to f32 at the end.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  keras==3.15.1 jax==0.10.2 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax.numpy as jnp
import keras
import numpy as np

for dtype in (jnp.float16, jnp.bfloat16):
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (8, 512)), dtype)
    rounded = {}
    for layer in (keras.layers.LayerNormalization, keras.layers.RMSNormalization):
        y = layer(dtype="float32")(x)
        assert y.dtype == jnp.float32
        rounded[layer.__name__] = bool((y.astype(dtype).astype(jnp.float32) == y).all())
    print(dtype.__name__, "every output is a number of the input's dtype:", rounded)
    expected = {"LayerNormalization": True, "RMSNormalization": False}
    assert rounded == expected, "this has changed"
EOF
