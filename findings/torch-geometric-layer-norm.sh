#!/usr/bin/env bash
# torch_geometric 2.8.1 (2026-11-30): LayerNorm by default normalizes a graph as a whole, and has
# another formula without `batch` than with it.
#
# Expected: the outputs of torch.nn.LayerNorm, which has the same name, parameters and defaults. And
# that `batch`, which assigns the nodes to graphs, changes nothing where there is one graph.
# Seen: the mean and the deviation are those of all nodes and channels, so the weights of a trained
# model give something else in the LayerNorm of another library. `mode="node"` is
# torch.nn.LayerNorm. With `batch` a graph is divided by sqrt(variance + ε), as in the documentation;
# without, by deviation + ε. At a deviation of 1e-3 the outputs without are 3.3 times those with, at
# 1e-4 29 times. So a model that was trained on batches and then runs on a single graph changes.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  torch_geometric==2.8.1 torch==2.15.0 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch
from torch_geometric.nn import GraphNorm, LayerNorm

NODES, CHANNELS = 10, 64
draw = torch.randn(NODES, CHANNELS, generator=torch.Generator().manual_seed(0))
draw[5:] += 3  # nodes with another mean than the others
batch = torch.zeros(NODES, dtype=torch.long)
layer, reference = LayerNorm(CHANNELS), torch.nn.LayerNorm(CHANNELS)
names = [[name for name, _ in norm.named_parameters()] for norm in (layer, reference)]
assert names[0] == names[1] and layer.eps == reference.eps, "the defaults have changed"
with torch.no_grad():
    graph = (layer(draw) - reference(draw)).abs().max().item()
    node = (LayerNorm(CHANNELS, mode="node")(draw) - reference(draw)).abs().max().item()
print(f"difference to torch.nn.LayerNorm: {graph:.2f} by default, {node:.0e} with mode='node'")
assert graph > 1 and node < 1e-5, "this has changed"

for deviation, expected in ((1.0, 1.0), (1e-2, 1.05), (1e-3, 3.29), (1e-4, 28.8)):
    x = deviation * (draw - draw.mean()) / draw.std()
    ratio = []
    for norm in (layer, GraphNorm(CHANNELS)):
        with torch.no_grad():
            ratio.append((norm(x).norm() / norm(x, batch).norm()).item())
    print(
        f"deviation {deviation}: LayerNorm without batch {ratio[0]:.3f} times the one with,"
        f" GraphNorm {ratio[1]:.3f}"
    )
    assert abs(ratio[0] / expected - 1) < 0.05, "this has changed"
    assert abs(ratio[1] - 1) < 1e-4, "the control has changed"
EOF
