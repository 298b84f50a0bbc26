#!/usr/bin/env bash
# x_transformers 2.31.10, torch 2.15.0 (2026-11-30): in half, RMSNorm and ScaleNorm make NaN of a row
# of zeros, and zeros of a large row.
#
# Expected: a row of zeros stays zeros, and an RMS of 1 otherwise, as in f32 and bf16, and as
# torch.nn.RMSNorm has it in half.
# Seen: the norm is torch.nn.functional.normalize, whose epsilon of 1e-12 is 0 in half, so that zeros
# are divided by 0. The length of a row overflows from an RMS of 65,504/√channels on, 2895 for 512
# channels, and the row becomes zeros. In an encoder with `use_rmsnorm=True` one token of zeros, such
# as a silent frame, makes all tokens of its sequence NaN. None of the norms takes an epsilon.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  x_transformers==2.31.10 torch==2.15.0 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch
from x_transformers import Encoder
from x_transformers.x_transformers import RMSNorm, ScaleNorm, SimpleRMSNorm

CHANNELS = 512


def plain(channels):
    return torch.nn.RMSNorm(channels, eps=1e-5)


draw = torch.randn(CHANNELS, generator=torch.Generator().manual_seed(0))
draw = draw / draw.square().mean().sqrt()
rows = torch.stack([draw, 0 * draw, 3000 * draw])
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for kind in (RMSNorm, ScaleNorm, SimpleRMSNorm, plain):
        with torch.no_grad():
            y = kind(CHANNELS).to(dtype)(rows.to(dtype)).float()
        one, zeros, large = y.square().mean(-1).sqrt().tolist()
        print(f"{dtype} {kind.__name__}: RMS {one:.3f}, of zeros {zeros}, of 3000 {large:.3f}")
        assert abs(one - 1) < 0.01, "the control has changed"
        if dtype == torch.float16 and kind is not plain:
            assert zeros != zeros and large == 0, "this has changed"
        else:
            assert zeros == 0 and abs(large - 1) < 0.01, "the control has changed"

x = torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(1))
x[1, 9] = 0
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    torch.manual_seed(0)
    encoder = Encoder(dim=64, depth=1, heads=2, use_rmsnorm=True).eval().to(dtype)
    with torch.no_grad():
        lost = encoder(x.to(dtype)).isnan().any(-1).sum(-1).tolist()
    print(f"{dtype}: NaN are {lost[0]} of 10 tokens, and {lost[1]} where one token is zeros")
    assert lost == ([0, 10] if dtype == torch.float16 else [0, 0]), "this has changed"
EOF
