#!/usr/bin/env python3
"""PyTorch's normalizations at the shapes of `cargo bench`, beside this crate's layer.

    python3 -m venv venv && venv/bin/pip install torch
    CANDLE_POWERNORM_BENCH=full cargo bench      # leaves its figures in target/criterion
    venv/bin/python benches/compare_torch.py     # prints one table, times in milliseconds

An allocator that keeps freed memory spares outputs the system's clearing of pages, a large part of
their time on a CPU. The benches have one, so PyTorch must: before the last command goes

    LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0

(Debian's package is libjemalloc2), and before `cargo bench` MIMALLOC_PURGE_DELAY=-1. And on an
NVIDIA GPU

    cargo bench --features cuda --bench power_norm -- '/cuda$'
    venv/bin/python benches/compare_torch.py --device cuda

Each cell is the median of repeated calls after a warm-up. `torch PN` is the layer in PyTorch's
operations, one at a time; `LN comp` and `PN comp` are LayerNorm and that layer as torch.compile
fuses them. `ours/X` divides the layer's time by that of X: below 1, the layer is faster. Forwards
are calls in training mode; `backward` is the gradient of that call alone, through autograd.
candle's autograd makes passes of its own around any op: they are in ours, and taken out of it in
`backward, ours alone` (see table.py).

On a GPU calls queue up between two events, and take their inputs in turn from more memory than an
L2 holds, as the benches do.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from table import KERNELS, Id, read
from torch.nn.functional import layer_norm, rms_norm

CPU_SHAPES = ["256x512", "1000x300", "4096x512", "4096x4096", "32768x1024"]
GPU_SHAPES = ["256x1024", "4096x1024", "32768x1024", "32768x2048", "32768x4096", "32768x8192"]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
EPS = 1e-5

# As benches/power_norm.rs has them.
GPU_INPUT_BYTES = 256 << 20
GPU_GRAPH_BYTES = 2 << 30
GPU_GRAPHS = 64

# Seconds that the calls of one cell should take.
BUDGET = 1.5
GPU_BUDGET = 0.3


def forward_pass(x, weight, bias, phi):
    """The layer after its warm-up, one group. Moves ψ²."""
    x32 = x.float()
    inv_scale = torch.rsqrt(x32.square().mean(1, keepdim=True) + EPS)
    x_tilde = x32 * inv_scale
    inv_rms = torch.rsqrt(phi + EPS)
    batch_phi = x_tilde.square().mean(0)
    y = x_tilde * (inv_rms * weight) + bias
    phi.mul_(0.9).add_(batch_phi, alpha=0.1)
    return y.to(x.dtype), inv_scale, inv_rms, batch_phi


def backward_pass(dy, x, weight, inv_scale, inv_rms, batch_phi, nu):
    """The paper's approximate gradient. Moves ν."""
    dy32 = dy.float()
    x_tilde = x.float() * inv_scale
    x_hat = x_tilde * inv_rms
    dweight = (dy32 * x_hat).sum(0)
    dx_tilde = (dy32 * weight - nu * x_hat) * inv_rms
    dx = inv_scale * (dx_tilde - x_tilde * (dx_tilde * x_tilde).mean(1, keepdim=True))
    gamma = batch_phi * inv_rms.square()
    nu.mul_((1 - 0.1 * gamma).clamp(min=0)).add_(weight * dweight / len(dy), alpha=0.1)
    return dx.to(dy.dtype), dweight.to(weight.dtype), dy32.sum(0).to(weight.dtype)


def power_norm(run_forward, run_backward):
    """The two passes as one differentiable call of (x, weight, bias, phi, nu)."""

    class PowerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, phi, nu):
            y, *saved = run_forward(x, weight, bias, phi)
            ctx.save_for_backward(x, weight, *saved)
            ctx.nu = nu
            return y

        @staticmethod
        def backward(ctx, dy):
            return *run_backward(dy, *ctx.saved_tensors, ctx.nu), None, None

    return PowerNorm.apply


class Bench:
    """The data of one dtype and shape, and the times of calls on it."""

    def __init__(self, device, dtype, rows, cols):
        self.on_gpu = device == "cuda"
        size = rows * cols * dtype.itemsize
        inputs = -(-GPU_INPUT_BYTES // size) if self.on_gpu else 1
        self.batch = min(max(GPU_GRAPH_BYTES // size, 1), GPU_GRAPHS)

        def random():
            return torch.randn(rows, cols, device=device).to(dtype)

        self.xs = [random().requires_grad_() for _ in range(inputs)]
        self.dy = random()
        self.weight = torch.ones(cols, dtype=dtype, device=device).requires_grad_()
        self.bias = torch.zeros(cols, dtype=dtype, device=device).requires_grad_()
        self.phi = torch.ones(cols, device=device)
        self.nu = torch.zeros(cols, device=device)

    def x(self, turn):
        return self.xs[turn % len(self.xs)]

    def forward_and_backward(self, forward, parameters):
        """The times of `forward(x)` and of its gradient for x and `parameters`."""

        def run(turn, _=None):
            return forward(self.x(turn))

        def gradient(turn, y):
            torch.autograd.grad(y, [self.x(turn), *parameters], self.dy)

        return self.median_ms(run), self.median_ms(gradient, run)

    def copy(self):
        """The time of a copy, as that of a forward; there is no gradient."""
        target = torch.empty_like(self.dy)
        return self.median_ms(lambda turn, _: target.copy_(self.x(turn).detach())), None

    def median_ms(self, call, setup=lambda turn: None):
        """The median time of `call(turn, setup(turn))`, set-up not included."""
        sample, least, budget = self.cpu_sample, 5, BUDGET
        if self.on_gpu:
            sample, least, budget = self.gpu_sample, 10, GPU_BUDGET
        warm_up = 2
        times = []
        end = time.perf_counter() + budget
        while len(times) < warm_up + least or (len(times) < 200 and time.perf_counter() < end):
            times.append(sample(call, setup))
        return statistics.median(times[warm_up:])

    def cpu_sample(self, call, setup):
        ready = setup(0)
        start = time.perf_counter()
        call(0, ready)
        return 1e3 * (time.perf_counter() - start)

    def gpu_sample(self, call, setup):
        """A call's share of many that are queued."""
        ready = [setup(turn) for turn in range(self.batch)]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for turn in range(self.batch):
            call(turn, ready[turn])
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / self.batch


def measure(device, dtype, rows, cols, compiled):
    """Forward and backward times of each contender, by column."""
    bench = Bench(device, dtype, rows, cols)
    weight, bias = bench.weight, bench.bias

    def ln(x):
        return layer_norm(x, (cols,), weight, bias, EPS)

    def rms(x):
        return rms_norm(x, (cols,), weight, EPS)

    def pn(*passes):
        apply = power_norm(*passes)
        return lambda x: apply(x, weight, bias, bench.phi, bench.nu)

    contenders = {
        "torch LN": (ln, [weight, bias]),
        "torch RMS": (rms, [weight]),
        "torch PN": (pn(forward_pass, backward_pass), [weight, bias]),
    }
    if compiled:
        # The compiler counts the shapes it meets, and at some number leaves a function as it is.
        torch.compiler.reset()
        functions = (ln, forward_pass, backward_pass)
        fused = [torch.compile(function, dynamic=False) for function in functions]
        contenders["LN comp"] = (fused[0], [weight, bias])
        contenders["PN comp"] = (pn(*fused[1:]), [weight, bias])
    figures = {"copy": bench.copy()}
    for name, contender in contenders.items():
        try:
            figures[name] = bench.forward_and_backward(*contender)
        # A compiler that does not work here, memory that does not suffice.
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            figures[name] = (None, None)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the CPU")
    shapes = "as 4096x512; those of the benches, if not named"
    parser.add_argument("--shapes", nargs="+", help=shapes)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="time torch.compile too; on a GPU, if not said",
    )
    parser.add_argument("--criterion", type=Path, default=Path("target/criterion"))
    args = parser.parse_args()

    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU")
    compiled = on_gpu if args.compile is None else args.compile
    shapes = args.shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES)
    ours = read(args.criterion)
    # Label, what of ours it is, and which of a contender's two figures.
    passes = [
        ("forward", "forward_train", 0),
        ("backward", "backward", 1),
        ("backward, ours alone", KERNELS, 1),
    ]
    if on_gpu:
        del passes[1]
    others = ["torch LN", "torch RMS", "torch PN"]
    ratios = {"ours/LN": "torch LN"}
    if compiled:
        others += ["LN comp", "PN comp"]
        ratios |= {"ours/LN comp": "LN comp", "ours/PN comp": "PN comp"}

    def cell(value):
        return f"{value:14.4f}" if value is not None else f"{'-':>14}"

    name = f" on {torch.cuda.get_device_name()}" if on_gpu else ""
    print(f"PyTorch {torch.__version__}{name}; times in ms, forward and backward")
    columns = ["copy", *others, "ours", *ratios]
    print(f"{'':40}" + "".join(f"{column:>14}" for column in columns))
    for threads in [None] if on_gpu else args.threads:
        if threads:
            torch.set_num_threads(threads)
        place = "cuda" if on_gpu else f"t{threads}"
        for dtype in args.dtypes:
            for shape in shapes:
                rows, cols = map(int, shape.split("x"))
                figures = measure(args.device, DTYPES[dtype], rows, cols, compiled)
                for label, pass_, index in passes:
                    us = ours.get(Id(pass_, "power_norm_g1", dtype, shape, place))
                    us = us and us.nanoseconds / 1e6
                    cells = [figures["copy"][0], *(figures[other][index] for other in others), us]
                    for rival in ratios.values():
                        theirs = figures[rival][index]
                        cells.append(us / theirs if us and theirs else None)
                    row = f"{place} {dtype:4} {shape} {label}"
                    print(f"{row:40}" + "".join(map(cell, cells)), flush=True)


if __name__ == "__main__":
    main()
