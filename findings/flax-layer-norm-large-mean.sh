#!/usr/bin/env bash
# flax 0.12.8, jax 0.10.2 (2026-11-29): LayerNorm and jax.nn.standardize lose all digits of a row
# whose mean is large.
#
# Expected: an error near f32's rounding of the input, 1e-3 at mean 1e4, as with NumPy in f32.
# Seen: flax's default takes the variance as E[x^2] - E[x]^2 (`use_fast_variance=True`). At mean
# 1e4 and deviation 1 the difference is all rounding and is clipped at 0, so that 1/sqrt(eps) =
# 1000 multiplies the row: outputs of some 4000 where 4 is right. The nnx layer has the same
# default. `use_fast_variance=False` is off by 5e-4. jax.nn.standardize has no such option.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" flax==0.12.8 jax==0.10.2
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

x = np.random.default_rng(0).normal(1e4, 1, (8, 512)).astype(np.float32)
wide = x.astype(np.float64)
centred = wide - wide.mean(-1, keepdims=True)
expected = centred / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)


def error(y):
    return float(np.abs(np.asarray(y, np.float64) - expected).max())


def linen(**options):
    layer = nn.LayerNorm(**options)
    return layer.apply(layer.init(jax.random.key(0), x), x)


fast, slow = error(linen()), error(linen(use_fast_variance=False))
module = error(nnx.LayerNorm(512, rngs=nnx.Rngs(0))(jnp.asarray(x)))
standardized = error(jax.nn.standardize(jnp.asarray(x), epsilon=1e-6))
print(f"linen {fast:.0f}, nnx {module:.0f}, without the fast variance {slow:.1e}")
print(f"jax.nn.standardize {standardized:.0f}")
assert fast > 100 and module > 100 and standardized > 100 and slow < 1e-2, "this has changed"
EOF
