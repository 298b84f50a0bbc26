#!/usr/bin/env python3
"""PyTorch's normalizations at the shapes of `cargo bench`, beside this crate's layer.

    python3 -m venv venv && venv/bin/pip install torch
    cargo bench                                  # leaves its figures in target/criterion
    venv/bin/python benches/compare_torch.py     # prints one table, times in milliseconds

Each cell is the median of repeated calls after a warm-up. `ours/LN` divides the layer's time by that of
PyTorch's LayerNorm: below 1, the layer is faster. Forwards are calls in training mode; `backward` is the
gradient of that call alone, through autograd on both sides.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

SHAPES = [(256, 512), (4096, 512), (4096, 4096), (32768, 1024)]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
EPS = 1e-5


class PowerNorm(torch.autograd.Function):
    """The layer after its warm-up, one group, in PyTorch's operations."""

    @staticmethod
    def forward(ctx, x, weight, bias, phi, nu):
        x32 = x.float()
        inv_scale = torch.rsqrt(x32.square().mean(1, keepdim=True) + EPS)
        x_tilde = x32 * inv_scale
        inv_rms = torch.rsqrt(phi + EPS)
        batch_phi = x_tilde.square().mean(0)
        y = x_tilde * (inv_rms * weight) + bias
        ctx.save_for_backward(x_tilde, inv_scale, inv_rms, weight, batch_phi, nu)
        phi.mul_(0.9).add_(batch_phi, alpha=0.1)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x_tilde, inv_scale, inv_rms, weight, batch_phi, nu = ctx.saved_tensors
        dy32 = dy.float()
        x_hat = x_tilde * inv_rms
        dweight = (dy32 * x_hat).sum(0)
        dx_tilde = (dy32 * weight - nu * x_hat) * inv_rms
        dx = inv_scale * (dx_tilde - x_tilde * (dx_tilde * x_tilde).mean(1, keepdim=True))
        gamma = batch_phi * inv_rms.square()
        nu.mul_((1 - 0.1 * gamma).clamp(min=0)).add_(weight * dweight / len(dy), alpha=0.1)
        return dx.to(dy.dtype), dweight, dy32.sum(0), None, None


def median_ms(call, setup=lambda: ()):
    """The median time of `call(*setup())`, set-up not included."""
    times = []
    budget = time.perf_counter() + 1.5
    while len(times) < 5 or (len(times) < 200 and time.perf_counter() < budget):
        arguments = setup()
        start = time.perf_counter()
        call(*arguments)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def measure(rows, cols, dtype):
    """Forward and backward times of each contender, by name."""
    x = torch.randn(rows, cols).to(dtype).requires_grad_()
    dy = torch.randn(rows, cols).to(dtype)
    weight = torch.ones(cols, dtype=dtype).requires_grad_()
    bias = torch.zeros(cols, dtype=dtype).requires_grad_()
    phi, nu = torch.ones(cols), torch.zeros(cols)
    contenders = {
        "layer_norm": lambda: torch.nn.functional.layer_norm(x, (cols,), weight, bias, EPS),
        "rms_norm": lambda: torch.nn.functional.rms_norm(x, (cols,), weight, EPS),
        "power_norm": lambda: PowerNorm.apply(x, weight.float(), bias.float(), phi, nu),
    }
    copied = torch.empty_like(dy)
    figures = {"copy": (median_ms(lambda: copied.copy_(dy)), None)}
    for name, forward in contenders.items():
        backward = median_ms(
            lambda y: torch.autograd.grad(y, [x, weight], dy), lambda: (forward(),)
        )
        figures[name] = (median_ms(forward), backward)
    return figures


def ours(criterion, benchmark, dtype, rows, cols, threads):
    """Criterion's median in milliseconds, or None where `cargo bench` has not left one."""
    name = f"power_norm_g1_{dtype}_{rows}x{cols}_t{threads}"
    path = criterion / benchmark / name / "new" / "estimates.json"
    if not path.exists():
        return None
    return json.loads(path.read_text())["median"]["point_estimate"] / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shapes", nargs="+", default=[f"{r}x{c}" for r, c in SHAPES])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--criterion", type=Path, default=Path("target/criterion"))
    args = parser.parse_args()

    def cell(value):
        return f"{value:10.3f}" if value is not None else f"{'-':>10}"

    print(f"PyTorch {torch.__version__}; times in ms, forward and backward")
    columns = ["copy", "torch LN", "torch RMS", "torch PN", "ours", "ours/LN"]
    print(f"{'':28}" + "".join(f"{column:>10}" for column in columns))
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in args.dtypes:
            for shape in args.shapes:
                rows, cols = map(int, shape.split("x"))
                figures = measure(rows, cols, DTYPES[dtype])
                for index, name in enumerate(["forward_train", "backward"]):
                    us = ours(args.criterion, name, dtype, rows, cols, threads)
                    cells = [figures["copy"][0]]
                    cells += [
                        figures[other][index] for other in ("layer_norm", "rms_norm", "power_norm")
                    ]
                    cells += [us, us / cells[1] if us is not None else None]
                    label = f"t{threads} {dtype:4} {rows}x{cols} {name.split('_')[0]}"
                    print(f"{label:28}" + "".join(map(cell, cells)))


if __name__ == "__main__":
    main()
