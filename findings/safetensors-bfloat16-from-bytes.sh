#!/usr/bin/env bash
# safetensors 0.8.0 with NumPy and with JAX (2026-11-29): `load` of bytes cannot read bf16, and
# `load_file` of the same bytes can.
#
# Expected: both read what `save` wrote, or both fail.
# Seen: `safetensors.numpy.load` and `safetensors.flax.load` are a KeyError 'BF16'. `load_file`
# and `safe_open` give ml_dtypes.bfloat16.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.6.0 jax==0.10.2 flax==0.12.8
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import ml_dtypes
import numpy as np
import safetensors.flax
import safetensors.numpy

data = safetensors.numpy.save({"weight": np.ones(8, ml_dtypes.bfloat16)})
with open("norm.safetensors", "wb") as file:
    file.write(data)


def outcome(load, source):
    try:
        return str(load(source)["weight"].dtype)
    except KeyError as error:
        return f"KeyError {error}"


results = {
    f"{module.__name__}.{name}": outcome(getattr(module, name), source)
    for module in (safetensors.numpy, safetensors.flax)
    for name, source in (("load", data), ("load_file", "norm.safetensors"))
}
print(results)
assert list(results.values()) == ["KeyError 'BF16'", "bfloat16"] * 2, "this has changed"
EOF
