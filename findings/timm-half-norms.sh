#!/usr/bin/env bash
# timm 1.0.31 (2026-11-30): in half, RmsNorm2d, SimpleNorm, SimpleNorm2d and FilterResponseNorm make
# zeros of inputs around 400; RmsNorm, LayerNorm and LayerNorm2d do not.
#
# Expected: an RMS of about 1, as in f32 and bf16, and as RmsNorm has it in half for the same numbers.
# Seen: they square in half, where 256² overflows, and divide by infinity. RmsNorm and the layer
# norms are PyTorch's, which compute in f32. SimpleNormFp32 and RmsNormFp32 are right as well.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  timm==1.0.31 torchvision==0.29.2 torch==2.15.0 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" HF_HUB_OFFLINE=1 python3 -W ignore - <<'EOF'
import torch
from timm import layers

CHANNELS = 64
draw = 400 * torch.randn(2, CHANNELS, 4, 4, generator=torch.Generator().manual_seed(0))
wrong = {"RmsNorm2d", "SimpleNorm", "SimpleNorm2d", "FilterResponseNormAct2d"}
right = {"LayerNorm", "LayerNorm2d", "RmsNorm", "RmsNormFp32", "SimpleNormFp32"}
for name in sorted(wrong | right):
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        options = {"act_layer": torch.nn.Identity} if name == "FilterResponseNormAct2d" else {}
        norm = getattr(layers, name)(CHANNELS, **options).to(dtype)
        x = draw if "2d" in name else draw.permute(0, 2, 3, 1)
        with torch.no_grad():
            found.append(norm(x.to(dtype)).float().square().mean().sqrt().item())
    print(f"{name}: f32 {found[0]:.3f}, bf16 {found[1]:.3f}, f16 {found[2]:.3f}")
    assert min(found[:2]) > 0.5, "the control has changed"
    assert (found[2] < 0.3) if name in wrong else (abs(found[2] - found[0]) < 0.01), name
EOF
