#!/usr/bin/env bash
# pytorch_optimizer 4.1.0 (2026-11-30): the first step of SRMM makes every weight 29 % smaller.
#
# Expected: a step of about the learning rate times the gradient, and none where the gradient is 0.
# Seen: the optimizer replaces the weights by their running mean, which starts at 0 instead of at the
# weights. The first mean has a factor of 1/√2, so that weights of 1, as of a new norm, become 0.707
# whatever the gradient and the learning rate are. A trained network comes out of the first step
# of a fine-tuning as another one: three linear layers of one return 0.35 of what they did.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  pytorch_optimizer==4.1.0 torch==2.15.0 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import pytorch_optimizer
import torch

torch.manual_seed(0)
for rate in (1e-2, 1e-8):
    for gradient in (0.0, 0.1):
        norm = torch.nn.RMSNorm(8, eps=1e-5)
        optimizer = pytorch_optimizer.SRMM(norm.parameters(), lr=rate)
        taken = []
        for _ in range(3):
            norm.weight.grad = torch.full((8,), gradient)
            optimizer.step()
            taken.append(norm.weight[0].item())
        shown = " ".join(f"{weight:.4f}" for weight in taken)
        print(f"learning rate {rate}, gradient {gradient}: the norm's weights are {shown}")
        assert abs(taken[0] - 0.5**0.5) < 0.01 * (rate == 1e-2) + 1e-6, "this has changed"

layers = [torch.nn.Linear(16, 16, bias=False) for _ in range(3)]
model = torch.nn.Sequential(*layers)
x = torch.randn(64, 16)
before = model(x).detach()
optimizer = pytorch_optimizer.SRMM(model.parameters(), lr=1e-8)
model(x).square().mean().backward()
optimizer.step()
ratio = (model(x).detach().norm() / before.norm()).item()
print(f"three layers return {ratio:.3f} of what they did")
assert abs(ratio - 0.5**1.5) < 0.01, "this has changed"
EOF
