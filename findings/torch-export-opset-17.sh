#!/usr/bin/env bash
# torch 2.15.0 (2026-11-29): torch.onnx.export(..., opset_version=17) writes opset 18 for an
# RMSNorm and 17 for a LayerNorm.
#
# Expected: the opset that was asked for, or an error.
# Seen: the exporter builds opset 18 and converts down if it can. RMSNorm's ReduceMean has its
# axes as an input, which has no conversion to 17, so the file stays at 18; the only sign is a
# logged warning. A reader that knows opset 17, where axes are an attribute, may take the mean of
# everything.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  torch==2.15.0 onnx==1.23.2 onnxscript==0.7.2
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import contextlib
import io
import logging
import warnings

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
import onnx
import torch

opsets = {}
for norm in (torch.nn.LayerNorm(64).eval(), torch.nn.RMSNorm(64, eps=1e-5).eval()):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.onnx.export(norm, (torch.randn(2, 64),), "norm.onnx", opset_version=17, dynamo=True)
    model = onnx.load("norm.onnx")
    opsets[type(norm).__name__] = model.opset_import[0].version
    print(type(norm).__name__, opsets[type(norm).__name__], [n.op_type for n in model.graph.node])
assert opsets == {"LayerNorm": 17, "RMSNorm": 18}, "this has changed"
EOF
