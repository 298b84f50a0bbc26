#!/usr/bin/env bash
# optax 0.2.8 (2026-11-30): in a model whose layers are stacked, as for a scan, contrib.muon steps
# the norms' scales as a matrix and the kernels by Adam.
#
# Expected: the steps that the same layers get one by one, as is so with Adam: Muon for kernels, Adam
# for the scales of norms and for biases.
# Seen: by default Muon takes what has two dimensions, which here are the scales and biases of all
# layers, (layers, channels). A layer's scale then depends on the other layers: where the second
# layer's gradient becomes ten times the first one's, the first one's step falls to a ninth. Its
# steps are a sixth as long. The kernels, of three dimensions, get Adam, at Muon's learning rate: the
# largest singular value of a step is 23 learning rates instead of 1.2. Nothing is reported.
# `muon_weight_dimension_numbers` sets it right.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  optax==0.2.8 flax==0.12.8 jax==0.10.2 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" JAX_PLATFORMS=cpu python3 - <<'EOF'
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

LAYERS, CHANNELS, RATE = 12, 64, 0.01


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(CHANNELS, rngs=rngs)
        self.linear = nnx.Linear(CHANNELS, CHANNELS, use_bias=False, rngs=rngs)


@nnx.split_rngs(splits=LAYERS)
@nnx.vmap(in_axes=0, out_axes=0)
def build(rngs):
    return Block(rngs)


stacked = nnx.state(build(nnx.Rngs(0)), nnx.Param)
stacked = {"scale": stacked["norm"]["scale"][...], "kernel": stacked["linear"]["kernel"][...]}
print({name: value.shape for name, value in stacked.items()})
single = {name: list(value) for name, value in stacked.items()}
draw = np.random.default_rng(0)
gradients = {
    name: jnp.asarray(draw.normal(0, 1, value.shape), jnp.float32)
    for name, value in stacked.items()
}


def steps(parameters, gradients, **options):
    optimizer = optax.contrib.muon(RATE, **options)
    updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
    return {name: np.stack(value) / RATE for name, value in updates.items()}


def one_by_one(gradients):
    return steps(single, {name: list(value) for name, value in gradients.items()})


def size(values):
    return float(np.sqrt(np.mean(values**2)))


def largest(updates):
    return float(np.linalg.svd(updates["kernel"], compute_uv=False).max())


# The scale of layer 1 gets ten times layer 0's gradient. Layer 0's own gradient stays.
scale = gradients["scale"]
changed = gradients | {"scale": scale.at[1].set(10 * scale[0])}
found = {}
for name, take in (("stacked", lambda g: steps(stacked, g)), ("one by one", one_by_one)):
    before, after = take(gradients), take(changed)
    ratio = size(after["scale"][0]) / size(before["scale"][0])
    found[name] = size(before["scale"]), ratio, largest(before)
    print(
        f"{name}: scales' steps {found[name][0]:.2f} learning rates; layer 0's falls to"
        f" {ratio:.2f} of it; largest singular value of a kernel's step {found[name][2]:.1f}"
    )
numbers = {
    "scale": None,
    "kernel": optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2),
}
right = steps(stacked, gradients, muon_weight_dimension_numbers=numbers)
expected = one_by_one(gradients)
error = max(float(np.abs(right[name] - expected[name]).max()) for name in right)
print(f"with dimension numbers: within {error:.0e} of one by one")
assert error < 1e-3, "the control has changed"
size_one, ratio_one, largest_one = found["one by one"]
assert abs(ratio_one - 1) < 1e-3 and largest_one < 1.3, "the control has changed"
size_all, ratio_all, largest_all = found["stacked"]
assert size_all < size_one / 4 and ratio_all < 0.2 and largest_all > 15, "this has changed"
EOF
