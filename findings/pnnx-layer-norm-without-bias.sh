#!/usr/bin/env bash
# pnnx 20261020, ncnn 1.0.20261020, torch 2.15.0 (2026-11-29): a LayerNorm without a bias converts
# without an error to a file that ncnn does not load.
#
# Expected: ncnn's LayerNorm with the weight and a bias of zeros, or an error of pnnx.
# Seen: pnnx ends with status 0 and writes a layer `F.layer_norm`, which ncnn does not have, so
# that `load_param` returns -1. With a bias, or with a weight of ones, which is dropped, the file
# loads.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  pnnx==20261020 ncnn==1.0.20261020 torch==2.15.0
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import subprocess
import sys
import warnings

import ncnn
import torch

warnings.simplefilter("ignore")
torch.manual_seed(0)


def convert(bias):
    model = torch.nn.LayerNorm(64, bias=bias).eval()
    model.weight.data = torch.rand(64) + 0.5
    torch.jit.trace(model, torch.randn(1, 8, 64)).save("model.pt")
    command = [sys.executable, "-c", "import pnnx; pnnx.pnnx()", "model.pt", "inputshape=[1,8,64]"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    layers = [line.split()[0] for line in open("model.ncnn.param").read().splitlines()[2:]]
    return layers, ncnn.Net().load_param("model.ncnn.param")


results = {bias: convert(bias) for bias in (True, False)}
for bias, (layers, status) in results.items():
    print(f"bias={bias}: {layers}, load_param returns {status}")
assert results[True] == (["Input", "LayerNorm"], 0), "with a bias this has changed"
assert "F.layer_norm" in results[False][0] and results[False][1] != 0, "this has changed"
EOF
