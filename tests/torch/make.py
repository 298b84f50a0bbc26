#!/usr/bin/env python3
"""The PyTorch side of tests/interchange.rs.

    python3 -m venv venv && venv/bin/pip install torch numpy safetensors
    venv/bin/python tests/torch/make.py                    # writes the checkpoints beside this file
    venv/bin/python tests/torch/make.py --check model.pt   # does PyTorch take this one?

The checkpoints are of a model with two layers. `tests/fixtures` recorded their states from the
released code: `encoder.norm` during the warm-up of `fairseq_g3_padded`, and `decoder.norm` at the
end of `fairseq_g1`.

fairseq.pt   as fairseq saves it: the model under "model", among objects that are no tensors
legacy.pt    the same in the format of PyTorch before 1.6, which was that of the released code
half.pt      a state dict alone, of the model in half precision

`--check` is for a checkpoint in which both layers are at the end of their recordings.
"""

import argparse
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

HERE = Path(__file__).parent
RECORDINGS = {"encoder.norm": "fairseq_g3_padded", "decoder.norm": "fairseq_g1"}
STEPS = {"encoder.norm": 3, "decoder.norm": 12}


class Norm(nn.Module):
    """What a state dict of the released MaskPowerNorm holds, and the evaluation of it."""

    def __init__(self, size, groups, eps):
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.register_buffer("running_phi", torch.ones(1, size, 1, 1))
        self.register_buffer("ema_gz", torch.zeros(1, size, 1, 1))
        self.register_buffer("iters", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        x = x.unflatten(-1, (self.groups, -1))
        x = (x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()).flatten(-2)
        return self.weight * x / (self.running_phi.flatten() + self.eps).sqrt() + self.bias


def recording(layer):
    return safe_open(HERE.parent / "fixtures" / f"{RECORDINGS[layer]}.safetensors", "pt")


def empty_model():
    model = nn.ModuleDict()
    for layer in RECORDINGS:
        with recording(layer) as file:
            config = file.metadata()
        part, name = layer.split(".")
        norm = Norm(int(config["size"]), int(config["groups"]), float(config["eps"]))
        model[part] = nn.ModuleDict({name: norm})
    return model


def model():
    """The model, each layer after its step."""
    model = empty_model()
    for layer, step in STEPS.items():
        with recording(layer) as file:
            state = {
                "weight": file.get_tensor("weight"),
                "bias": file.get_tensor("bias"),
                "running_phi": file.get_tensor(f"running_phi.{step}").reshape(1, -1, 1, 1),
                "ema_gz": file.get_tensor(f"ema_gz.{step}").reshape(1, -1, 1, 1),
                "iters": torch.tensor([step]),
            }
        model.get_submodule(layer).load_state_dict(state)
    return model


class AverageMeter:
    """Has the name of fairseq.meters.AverageMeter, which a reader of the checkpoint lacks."""

    __module__ = "fairseq.meters"

    def __init__(self):
        self.sum, self.count = 12.5, 70000


class Trap:
    """Ends a reader that makes the calls a file asks for."""

    def __reduce__(self):
        return sys.exit, ("the checkpoint's code was run",)


def fairseq_checkpoint(model):
    """A checkpoint in fairseq's arrangement."""
    for name in ("fairseq", "fairseq.meters"):
        sys.modules[name] = ModuleType(name)
    sys.modules["fairseq.meters"].AverageMeter = AverageMeter
    moments = {"step": 3, "exp_avg": torch.zeros(8), "exp_avg_sq": torch.ones(8)}
    return {
        "args": argparse.Namespace(
            arch="transformer", lr=[0.0005], warmup_updates=4, seed=-1, clip_norm=None
        ),
        "model": model.state_dict(),
        "optimizer_history": [{"criterion_name": "CrossEntropyCriterion", "num_updates": 3}],
        "extra_state": {
            "train_iterator": {"epoch": 1, "iterations_in_epoch": 3},
            "train_meters": OrderedDict(train_loss=AverageMeter()),
            "val_loss": None,
            "trap": Trap(),
        },
        "last_optimizer_state": {
            "state": {0: moments},
            "param_groups": [{"betas": (0.9, 0.98), "params": [0]}],
        },
    }


def make():
    checkpoint = fairseq_checkpoint(model())
    torch.save(checkpoint, HERE / "fairseq.pt")
    torch.save(checkpoint, HERE / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(model().half().state_dict(), HERE / "half.pt")


def check(path):
    """Fails unless the file fits a model exactly, which then evaluates as recorded."""
    model = empty_model()
    is_safetensors = path.endswith(".safetensors")
    state = load_file(path) if is_safetensors else torch.load(path, weights_only=True)
    model.load_state_dict(state, strict=True)
    for layer in RECORDINGS:
        norm = model.get_submodule(layer)
        with recording(layer) as file:
            steps = int(file.metadata()["steps"])
            x, expected = file.get_tensor("eval_x").float(), file.get_tensor("eval_y").float()
        bound = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(norm(x), expected, rtol=0, atol=bound)
        assert norm.iters.tolist() == [steps], f"{layer}: {norm.iters} steps, expected {steps}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", metavar="FILE")
    args = parser.parse_args()
    check(args.check) if args.check else make()
