#!/usr/bin/env bash
# safetensors 0.8.0 (2026-11-29): safetensors.numpy writes a bf16 file that it cannot read.
#
# Expected: bf16 is rejected by both, or read back as ml_dtypes.bfloat16, the dtype it was given.
# Seen: `save` writes BF16, and `load` of the same bytes is a KeyError. Through JAX, whose arrays
# have the same NumPy dtype, the file loads.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.6.0 jax==0.10.2
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import json
import struct

import ml_dtypes
import numpy as np
import safetensors.flax
import safetensors.numpy

data = safetensors.numpy.save({"norm.weight": np.ones(8, ml_dtypes.bfloat16)})
header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
print("written:", header["norm.weight"]["dtype"])
try:
    read = str(safetensors.numpy.load(data)["norm.weight"].dtype)
except KeyError as error:
    read = f"KeyError {error}"
flax = np.asarray(safetensors.flax.load(data)["norm.weight"]).dtype
print(f"read: {read}, through JAX: {flax}")
assert header["norm.weight"]["dtype"] == "BF16" and read == "KeyError 'BF16'", "this has changed"
assert flax == ml_dtypes.bfloat16, "JAX's reader has changed"
EOF
