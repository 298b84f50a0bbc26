#!/usr/bin/env bash
# pnnx 20261020, ncnn 1.0.20261020, torch 2.15.0 (2026-11-29): an RMSNorm with PyTorch's default
# epsilon reaches ncnn with epsilon 0.
#
# Expected: eps=None means f32's machine epsilon, 1.2e-7, which pnnx writes.
# Seen: pnnx writes 0. Rows of 1e-3 are off by 6 %, and a row of zeros is NaN where PyTorch gives
# 0. With eps=1e-5 the outputs agree.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  pnnx==20261020 ncnn==1.0.20261020 torch==2.15.0 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import subprocess
import sys
import warnings

import ncnn
import numpy as np
import torch

warnings.simplefilter("ignore")
torch.manual_seed(0)


def difference(eps, x):
    model = torch.nn.RMSNorm(64, eps=eps).eval()
    torch.jit.trace(model, x).save("model.pt")
    command = [sys.executable, "-c", "import pnnx; pnnx.pnnx()", "model.pt", "inputshape=[1,8,64]"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = open("model.ncnn.param").read().splitlines()
    line = next(line for line in lines if line.startswith("RMSNorm"))
    net = ncnn.Net()
    assert net.load_param("model.ncnn.param") == 0 and net.load_model("model.ncnn.bin") == 0
    extractor = net.create_extractor()
    extractor.input("in0", ncnn.Mat(x[0].numpy()).clone())
    y = np.array(extractor.extract("out0")[1])
    return line.split("out0")[1].strip(), np.abs(y - model(x)[0].detach().numpy()).max()


rows = torch.randn(1, 8, 64) * 1e-3
results = [difference(1e-5, rows), difference(None, rows), difference(None, torch.zeros(1, 8, 64))]
for name, (line, off) in zip(("eps=1e-5", "eps=None", "eps=None, zeros"), results):
    print(f"{name}: ncnn has {line!r}, difference {off:.2g}")
assert results[0][1] < 1e-5 and results[1][1] > 0.01 and np.isnan(results[2][1]), "this has changed"
EOF
