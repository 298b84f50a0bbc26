#!/usr/bin/env bash
# equinox 0.13.8 (2026-11-29): RMSNorm has a bias by default.
#
# Expected: a weight only, as in the paper (https://arxiv.org/abs/1910.07467), PyTorch, flax, MLX
# and Keras.
# Seen: `use_bias=True`. A model that is built with the default has twice the parameters in its
# norms, which a checkpoint without them leaves at 0 and training moves.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" equinox==0.13.8 jax==0.10.2
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import equinox as eqx
import jax

default = [leaf.shape for leaf in jax.tree.leaves(eqx.filter(eqx.nn.RMSNorm(8), eqx.is_array))]
plain = eqx.nn.RMSNorm(8, use_bias=False)
plain = [leaf.shape for leaf in jax.tree.leaves(eqx.filter(plain, eqx.is_array))]
print(f"by default {default}, with use_bias=False {plain}")
assert default == [(8,), (8,)] and plain == [(8,)], "this has changed"
EOF
