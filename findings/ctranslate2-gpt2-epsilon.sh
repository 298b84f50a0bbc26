#!/usr/bin/env bash
# CTranslate2 4.8.5, transformers 5.24.0, torch 2.15.0 (2026-11-29): the converter drops GPT-2's
# layer_norm_epsilon.
#
# Expected: the model's configuration is carried over, as it is for Llama (`rms_norm_eps`).
# Seen: the epsilon in CTranslate2's file is null, which means 1e-5. A model with another one
# gives other logits, without a warning: with 1e-2 they agree with PyTorch's at 1e-5 to six
# digits.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  ctranslate2==4.8.5 transformers==5.24.0 torch==2.15.0 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import json
import warnings

warnings.simplefilter("ignore")
import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import transformers as converters
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, layer_norm_epsilon=1e-2,
    bos_token_id=0, eos_token_id=1,
)
model = GPT2LMHeadModel(config).eval()


class Tokenizer:
    bos_token, eos_token, unk_token = "t0", "t1", "t2"


loader = type(converters._MODEL_LOADERS["GPT2Config"])()
spec = loader.get_model_spec(model)
spec.register_vocabulary([f"t{i}" for i in range(64)])
loader.set_config(spec.config, model, Tokenizer())
spec.validate()
spec.optimize()
spec.save(".")
epsilon = json.load(open("config.json"))["layer_norm_epsilon"]
ids = [3, 5, 7, 9]
logits = np.array(ctranslate2.Generator(".").forward_batch([[f"t{i}" for i in ids]]))[0]


def difference(eps):
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = eps
    with torch.no_grad():
        return np.abs(model(torch.tensor([ids])).logits[0].numpy() - logits).max()


own, other = difference(1e-2), difference(1e-5)
print(f"epsilon in the file: {epsilon}; off by {own:.2g} from the model, {other:.1e} from 1e-5's")
assert epsilon is None and own > 0.1 and other < 1e-5, "this has changed"
EOF
