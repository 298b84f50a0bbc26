#!/usr/bin/env python3
"""Checkpoints of models with PowerNorm layers, from PyTorch to candle and back.

    python3 -m venv venv && venv/bin/pip install torch numpy safetensors
    venv/bin/python scripts/torch_checkpoint.py to-candle checkpoint_best.pt model.safetensors
    venv/bin/python scripts/torch_checkpoint.py to-torch model.safetensors model.pt

`to-candle` reads what `torch.save` of any version wrote: a state dict, or a dictionary with one
under "model", as fairseq's checkpoints are. It imports nothing that the file names, so it needs
neither fairseq nor trust in the file. Its output is for `VarMap::load`, once the model is built, or
for a `VarBuilder` over safetensors.

`to-torch` reads what `VarMap::save` wrote. It writes the state dict that a model with the released
MaskPowerNorm takes in `load_state_dict`. fairseq wants it inside a checkpoint of its own:

    checkpoint = torch.load("checkpoint_best.pt", weights_only=False)
    checkpoint["model"] = torch.load("model.pt")
    torch.save(checkpoint, "checkpoint_candle.pt")
"""

import argparse
import pickle
import sys
import warnings
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file


class Inert:
    """Replaces an object that is no tensor, such as fairseq's arguments and meters."""

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass


class TensorUnpickler(pickle.Unpickler):
    """Makes tensors and the dictionaries they are in. It imports and calls nothing else that a file
    may name."""

    TRUSTED = {
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_tensor_v2"),
    }

    def find_class(self, module, name):
        storage = module == "torch" and name.isidentifier() and name.endswith("Storage")
        if storage or (module, name) in self.TRUSTED:
            return super().find_class(module, name)
        return Inert


def read_checkpoint(path):
    """The tensors of a model by name."""
    reader = SimpleNamespace(
        __name__="pickle",
        Unpickler=TensorUnpickler,
        load=lambda file, **kwargs: TensorUnpickler(file, **kwargs).load(),
    )
    checkpoint = torch.load(path, map_location="cpu", weights_only=False, pickle_module=reader)
    if isinstance(checkpoint, dict) and isinstance(checkpoint.get("model"), dict):
        checkpoint = checkpoint["model"]
    tensors = {}
    if isinstance(checkpoint, dict):
        tensors = {
            name: value.detach()
            for name, value in checkpoint.items()
            if isinstance(value, torch.Tensor)
        }
    if not tensors:
        raise ValueError("no tensors")
    return tensors


def is_statistic(name):
    """ψ² and ν/(1−α_b), which PyTorch's layer holds as [1, C, 1, 1] and candle's as [C]."""
    return name.rpartition(".")[2] in ("running_phi", "ema_gz")


def to_candle(tensors):
    converted = {}
    for name, tensor in tensors.items():
        if is_statistic(name):
            tensor = tensor.flatten()
            # The layer keeps moving averages in single precision, also in a half-precision model.
            if tensor.dtype in (torch.float16, torch.bfloat16):
                tensor = tensor.float()
        # safetensors has no strides and no shared memory, which tied embeddings have.
        converted[name] = tensor.clone(memory_format=torch.contiguous_format)
    # candle's layer also records its group scaling. 0 says that it is not known.
    converted.update({name: torch.zeros(1, dtype=torch.int64) for name in groups_of(tensors)})
    return converted


def to_torch(tensors):
    not_theirs = groups_of(tensors)
    return {
        name: tensor.reshape(1, -1, 1, 1) if is_statistic(name) else tensor
        for name, tensor in tensors.items()
        if name not in not_theirs
    }


def groups_of(tensors):
    """The names under which candle's layers record their group scaling. PyTorch's layer has no such
    tensor."""
    return {
        name.removesuffix("running_phi") + "groups"
        for name in tensors
        if name.rpartition(".")[2] == "running_phi"
    }


def or_exit(path, expected, run):
    """Runs `run`, and ends with one line if it fails: a broken file can raise anything."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        line = (reason.strip().splitlines() or [type(error).__name__])[0]
        sys.exit(f"{path}: expected {expected}, got {line}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("direction", choices=["to-candle", "to-torch"])
    parser.add_argument("source")
    parser.add_argument("target")
    args = parser.parse_args()
    if args.direction == "to-candle":
        expected = "a state dict of torch.save, or a dictionary with one under 'model'"
        tensors = or_exit(args.source, expected, lambda: to_candle(read_checkpoint(args.source)))
        or_exit(args.target, "a file to write", lambda: save_file(tensors, args.target))
    else:
        expected = "a safetensors file of VarMap::save"
        tensors = or_exit(args.source, expected, lambda: to_torch(load_file(args.source)))
        or_exit(args.target, "a file to write", lambda: torch.save(tensors, args.target))


if __name__ == "__main__":
    main()
