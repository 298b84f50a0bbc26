#!/usr/bin/env bash
# pytorch_optimizer 4.1.0 (2026-11-30): the first steps of Ranger go uphill.
#
# Expected: no step, or one down the running mean of the gradients, until the variance is known well
# enough to divide by it, as in the same library's RAdam and in torch.optim.RAdam.
# Seen: with the default `degenerated_to_sgd=False` the step size is then minus the learning rate,
# which RAdam takes as a sign to skip the step and Ranger takes as it is. So the first five steps
# of each run climb, by the gradient times the learning rate. From a weight of 1 with the loss w²/2 and
# a learning rate of 0.1, w is 1.55 after them, and it stays above 1 for 52 steps.
# `degenerated_to_sgd=True` descends.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  pytorch_optimizer==4.1.0 torch==2.15.0 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import pytorch_optimizer
import torch

RATE = 0.1


def weights(kind, count=60, **options):
    """A weight that starts at 1, after each of the first steps on its square / 2."""
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer, taken = kind([weight], lr=RATE, **options), []
    for _ in range(count):
        optimizer.zero_grad()
        (weight.square() / 2).sum().backward()
        optimizer.step()
        taken.append(weight.detach().mean().item())
    return taken


found = {
    "Ranger": weights(pytorch_optimizer.Ranger),
    "Ranger, foreach=False": weights(pytorch_optimizer.Ranger, foreach=False),
    "Ranger, degenerated_to_sgd": weights(pytorch_optimizer.Ranger, degenerated_to_sgd=True),
    "RAdam": weights(pytorch_optimizer.RAdam),
    "torch.optim.RAdam": weights(torch.optim.RAdam),
}
for name, taken in found.items():
    below = next((step for step, weight in enumerate(taken) if weight < 1), len(taken)) + 1
    print(f"{name}: {' '.join(f'{w:.3f}' for w in taken[:6])}; below 1 in step {below}")
for name, taken in found.items():
    climbs = name in ("Ranger", "Ranger, foreach=False")
    assert all(a < b for a, b in zip([1.0] + taken, taken[:5])) == climbs, "this has changed"
    assert (taken[4] > 1.5) if climbs else (taken[4] <= 1), "this has changed"
EOF
