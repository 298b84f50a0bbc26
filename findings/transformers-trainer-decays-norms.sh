#!/usr/bin/env bash
# transformers 5.24.0 (2026-11-29): Trainer applies weight decay to the norms of some models.
#
# Expected: none, as the help of `weight_decay` says that LayerNorm is left out. In Llama, Gemma,
# T5 and BERT no weight of a norm decays.
# Seen: besides torch.nn.LayerNorm, a parameter is left out by its name. "layers.0.norm.weight" is,
# "norm_f.weight", "ln_1.weight", "norm1.weight" and "normalization.weight" are not. So the last
# norm of Mamba and Mamba 2, the first of Pixtral, the vision norms of Qwen 2.5-VL, all of ImageGPT
# and every BatchNorm of ResNet decay. Mamba's A_log and D decay as well; its authors leave these
# two out.
set -euo pipefail

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --no-compile --target "$dir/lib" \
  transformers==5.24.0 torch==2.15.0 numpy==2.4.6
cd "$dir"
PYTHONPATH="$dir/lib" HF_HUB_OFFLINE=1 python3 - <<'EOF'
import transformers as hf
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

hf.logging.set_verbosity_error()
text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 16}
heads = {"num_attention_heads": 2}
special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
mamba = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 16} | special
configs = {
    "Llama": hf.LlamaConfig(**text, **heads, **special),
    "Gemma": hf.GemmaConfig(**text, **heads, **special, num_key_value_heads=1, head_dim=16),
    "BERT": hf.BertConfig(**text, **heads),
    "T5": hf.T5Config(d_model=32, d_ff=32, d_kv=16, num_layers=1, num_heads=2, vocab_size=16),
    "Mamba": hf.MambaConfig(**mamba),
    "Mamba 2": hf.Mamba2Config(**mamba, num_heads=4, head_dim=16, n_groups=1),
    "Pixtral": hf.PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, **heads
    ),
    "Qwen 2.5-VL": qwen.Qwen2_5_VLVisionConfig(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32
    ),
    "ImageGPT": hf.ImageGPTConfig(n_embd=32, n_layer=1, n_head=2, vocab_size=16),
    "ResNet": hf.ResNetConfig(hidden_sizes=[8], depths=[1], embedding_size=8),
}
found = {}
for name, config in configs.items():
    vision = name == "Qwen 2.5-VL"
    kind = qwen.Qwen2_5_VisionTransformerPretrainedModel if vision else hf.AutoModel.from_config
    model = kind(config)
    vectors = {n for n, p in model.named_parameters() if p.dim() == 1 or n.endswith("A_log")}
    found[name] = vectors.intersection(hf.Trainer.get_decay_parameter_names(None, model))
    print(f"{name}: {', '.join(sorted(found[name])) or 'nothing'}")
state_space = {"layers.0.mixer.A_log", "layers.0.mixer.D", "norm_f.weight"}
assert not any(found[name] for name in ("Llama", "Gemma", "BERT", "T5")), "the control has changed"
assert found["Mamba"] == found["Mamba 2"] == state_space, "this has changed"
assert found["Pixtral"] == {"ln_pre.weight"}, "this has changed"
assert found["Qwen 2.5-VL"] == {
    "blocks.0.norm1.weight",
    "blocks.0.norm2.weight",
    "merger.ln_q.weight",
}, "this has changed"
assert found["ImageGPT"] == {"h.0.ln_1.weight", "h.0.ln_2.weight", "ln_f.weight"}
assert found["ResNet"] and all(name.endswith("normalization.weight") for name in found["ResNet"])
EOF
