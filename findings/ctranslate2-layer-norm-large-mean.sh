#!/usr/bin/env bash
# CTranslate2 4.8.5 (2026-11-29): LayerNorm on a CPU loses all digits of a row whose mean is
# large.
#
# Expected: 1e-3 at mean 1e4, as in PyTorch, whose checkpoints CTranslate2 converts.
# Seen: the CPU kernel takes the variance in one pass. The error is 2e-3 at mean 100, 0.3 at 1000,
# and 1200 at 1e4. The model is a decoder without attention and feed-forward (their weights are 0)
# and with the identity as its projection, so that its logits are the last LayerNorm of the
# embedding. An epsilon that is not given is 1e-5 for LayerNorm and 1e-6 for RMSNorm.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" ctranslate2==4.8.5 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import os

import ctranslate2
import numpy as np
from ctranslate2.specs import transformer_spec

SIZE = 64


def logits(embedding, rms):
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        1, 1, pre_norm=True, rms_norm=rms
    )
    zeros, square = np.zeros(SIZE, np.float32), np.zeros((SIZE, SIZE), np.float32)
    decoder, layer = spec.decoder, spec.decoder.layer[0]
    decoder.scale_embeddings = False
    decoder.embeddings.weight = embedding
    decoder.position_encodings.encodings = square
    for norm in (decoder.layer_norm, layer.self_attention.layer_norm, layer.ffn.layer_norm):
        norm.gamma = np.ones(SIZE, np.float32)
        if not rms:
            norm.beta = zeros
    inputs = layer.self_attention.linear[0]
    inputs.weight = np.zeros((3 * SIZE, SIZE), np.float32)
    inputs.bias = np.zeros(3 * SIZE, np.float32)
    for linear in (layer.self_attention.linear[1], layer.ffn.linear_0, layer.ffn.linear_1):
        linear.weight, linear.bias = square, zeros
    decoder.projection.weight, decoder.projection.bias = np.eye(SIZE, dtype=np.float32), zeros
    spec.register_vocabulary([f"t{i}" for i in range(SIZE)])
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "t0", "t1", "t2"
    spec.validate()
    spec.optimize()
    os.makedirs("model", exist_ok=True)
    spec.save("model")
    tokens = [f"t{i}" for i in range(8)]
    return np.array(ctranslate2.Generator("model").forward_batch([tokens]))[0].astype(np.float64)


def normalized(x, eps, rms=False):
    x = x[:8].astype(np.float64)
    x = x if rms else x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


errors = []
for mean in (0, 100, 1000, 1e4):
    x = np.random.default_rng(0).normal(mean, 1, (SIZE, SIZE)).astype(np.float32)
    errors.append(np.abs(logits(x, False) - normalized(x, 1e-5)).max())
    print(f"mean {mean:g}: {errors[-1]:.1e}")
small = (1e-3 * np.random.default_rng(0).normal(0, 1, (SIZE, SIZE))).astype(np.float32)
default = [
    np.abs(logits(small, rms) - normalized(small, eps, rms)).max()
    for rms, eps in ((False, 1e-5), (True, 1e-6))
]
print(f"defaults of epsilon, 1e-5 and 1e-6: {default[0]:.1e}, {default[1]:.1e}")
assert errors[0] < 1e-5 and errors[2] > 0.05 and errors[3] > 100, "this has changed"
assert max(default) < 1e-5, "the defaults of epsilon have changed"
EOF
