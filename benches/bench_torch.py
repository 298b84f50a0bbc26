#!/usr/bin/env python3
"""Times PyTorch's normalizations as `cargo bench` times this crate's, for the same tables.

    python3 -m venv venv && venv/bin/pip install torch
    cargo bench                          # leaves its figures in target/criterion
    venv/bin/python benches/bench_torch.py         # leaves its own beside them
    python3 benches/table.py                       # prints both

For figures to publish, the two take turns, and both keep freed memory. With an allocator that
returns it to the system, each output page-faults again, which is a large part of a call's time on a
CPU.

    export MIMALLOC_PURGE_DELAY=-1
    for run in 1 2 3 4 5; do
      cargo bench -- --save-baseline $run
      LD_PRELOAD=libjemalloc.so.2 \
        MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0 \
        venv/bin/python benches/bench_torch.py --run $run
    done
    python3 benches/table.py --runs 1 2 3 4 5

(Debian's package is libjemalloc2.) On an NVIDIA GPU both take `--device cuda` or its like:

    cargo bench --features cuda --bench power_norm -- '/cuda$'
    venv/bin/python benches/bench_torch.py --device cuda

A figure is the median of repeated calls after a warm-up. Ids are those of benches/power_norm.rs and
benches/block.rs. Contenders: `torch_layer_norm`, `torch_rms_norm`, and `torch_power_norm`, which is
the layer in PyTorch's operations, one at a time. `..._compiled` is what torch.compile makes of one.
On a GPU, `torch_negate` is an element-wise kernel, which shows what a pass can reach at best, and
`liger_rms_norm` and `liger_layer_norm` are Liger's kernels, where `pip install liger-kernel` was run.
`backward` is the gradient of that call alone, through autograd. The transformer block has PyTorch's
own attention; `torch_none` is the block without its normalizations.

On a GPU calls queue up between two events, and take their inputs in turn from more memory than an
L2 holds, as the benches do.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from table import Figure, Id, torch_figures
from torch.nn.functional import (
    gelu,
    layer_norm,
    linear,
    rms_norm,
    scaled_dot_product_attention,
)

CPU_SHAPES = ["4096x512"]
GPU_SHAPES = ["256x1024", "4096x1024", "4096x4096", "32768x1024", "32768x4096", "32768x8192"]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
EPS = 1e-5

# As benches/power_norm.rs has them.
GPU_INPUT_BYTES = 256 << 20
GPU_GRAPH_BYTES = 2 << 30
GPU_GRAPHS = 64

# Seconds that the calls of one figure should take.
BUDGET = 1.0
GPU_BUDGET = 0.3

# The block of benches/block.rs.
BATCH, TIME, WIDTH, HEADS = 8, 128, 512, 8


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


def median(sample, least, budget):
    """The median of at least `least` samples, and of more until `budget` seconds are over."""
    warm_up = 2
    times = []
    end = time.perf_counter() + budget
    while len(times) < warm_up + least or (len(times) < 200 and time.perf_counter() < end):
        times.append(sample())
    return statistics.median(times[warm_up:])


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

    def passes(self, forward, parameters):
        """The time of each pass: of `forward(x)`, of its gradient for x and `parameters`."""

        def run(turn, _=None):
            return forward(self.x(turn))

        def evaluate(turn, _):
            with torch.no_grad():
                forward(self.x(turn))

        def gradient(turn, y):
            torch.autograd.grad(y, [self.x(turn), *parameters], self.dy)

        return {
            "forward_train": self.median(run),
            "forward_eval": self.median(evaluate),
            "backward": self.median(gradient, run),
            "train_step_through_autograd": self.median(lambda turn, _: gradient(turn, run(turn))),
        }

    def median(self, call, setup=lambda turn: None):
        """The median time of `call(turn, setup(turn))` in nanoseconds, set-up not included."""
        if not self.on_gpu:
            return median(lambda: self.cpu_sample(call, setup), 5, BUDGET)
        return median(lambda: self.gpu_sample(call, setup), 10, GPU_BUDGET)

    def cpu_sample(self, call, setup):
        ready = setup(0)
        start = time.perf_counter_ns()
        call(0, ready)
        return time.perf_counter_ns() - start

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
        return 1e6 * start.elapsed_time(end) / self.batch


def liger(weight, bias):
    """Liger's normalizations, if it is installed. They take contiguous gradients."""
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError:
        return {}

    def rms(x):
        return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)

    def ln(x):
        return LigerLayerNormFunction.apply(x, weight, bias, EPS)

    return {"liger_rms_norm": (rms, [weight]), "liger_layer_norm": (ln, [weight, bias])}


def measure(device, dtype, rows, cols, compiled):
    """The time of each pass of each contender, in nanoseconds."""
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
        "torch_layer_norm": (ln, [weight, bias]),
        "torch_rms_norm": (rms, [weight]),
        "torch_power_norm": (pn(forward_pass, backward_pass), [weight, bias]),
    }
    if bench.on_gpu:
        contenders["torch_negate"] = (torch.neg, [])
        contenders |= liger(weight, bias)
    if compiled:
        # The compiler counts the shapes it meets, and at some number leaves a function as it is.
        torch.compiler.reset()
        functions = (ln, forward_pass, backward_pass)
        fused = [torch.compile(function, dynamic=False) for function in functions]
        contenders["torch_layer_norm_compiled"] = (fused[0], [weight, bias])
        contenders["torch_power_norm_compiled"] = (pn(*fused[1:]), [weight, bias])
    figures = {}
    for name, contender in contenders.items():
        try:
            for pass_, nanoseconds in bench.passes(*contender).items():
                # The layer's own forward in evaluation is another: it moves nothing.
                if pass_ != "forward_eval" or not name.startswith("torch_power_norm"):
                    figures[pass_, name] = nanoseconds
        # A compiler that does not work here, memory that does not suffice.
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return figures


def bytes_moved(pass_, rows, cols, dtype):
    """As `Pass::bytes_moved` of benches/power_norm.rs has it."""
    forward, backward = 2, 3
    tensors = {
        "forward_train": forward,
        "forward_eval": forward,
        "backward": backward,
        "train_step_through_autograd": forward + backward,
    }
    return tensors[pass_] * rows * cols * dtype.itemsize


def measure_block():
    """The time of a transformer block, forward and backward and in evaluation."""

    def parameter(*shape):
        return (torch.randn(*shape) * 0.02).requires_grad_()

    query_key_value, project = parameter(3 * WIDTH, WIDTH), parameter(WIDTH, WIDTH)
    expand, contract = parameter(4 * WIDTH, WIDTH), parameter(WIDTH, 4 * WIDTH)
    linears = [query_key_value, project, expand, contract]
    xs = torch.randn(BATCH, TIME, WIDTH).requires_grad_()
    figures = {}
    for name in ["torch_layer_norm", "torch_none"]:
        affine = [(parameter(WIDTH), parameter(WIDTH)) for _ in range(2)]

        def norm(i, xs):
            return layer_norm(xs, (WIDTH,), *affine[i], EPS) if name != "torch_none" else xs

        def block(xs):
            heads = linear(norm(0, xs), query_key_value).view(BATCH, TIME, 3, HEADS, -1)
            mixed = scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4))
            xs = xs + linear(mixed.transpose(1, 2).reshape(BATCH, TIME, WIDTH), project)
            hidden = gelu(linear(norm(1, xs), expand), approximate="tanh")
            return xs + linear(hidden, contract)

        used = [*linears, *(sum(affine, ()) if name != "torch_none" else ())]
        ones = torch.ones(BATCH, TIME, WIDTH)

        def train():
            torch.autograd.grad(block(xs), [xs, *used], ones)

        def evaluate():
            with torch.no_grad():
                block(xs)

        def timed(call):
            start = time.perf_counter_ns()
            call()
            return time.perf_counter_ns() - start

        for pass_, call in [("block_train", train), ("block_evaluate", evaluate)]:
            figures[pass_, name] = median(lambda: timed(call), 10, 3 * BUDGET)
    return figures


def measure_heads(dtype, width):
    """The times of an RMSNorm of queries in a fused projection, as benches/heads.rs has them."""
    projected = torch.randn(8, 512, 3 * 16 * width).to(dtype).requires_grad_()
    weight = torch.ones(width, dtype=dtype).requires_grad_()
    dy = torch.ones(8, 16, 512, width, dtype=dtype)

    def forward():
        queries = projected.view(8, 512, 3 * 16, width).transpose(1, 2)[:, :16]
        return rms_norm(queries, (width,), weight, 1e-6)

    def step():
        torch.autograd.grad(forward(), [projected, weight], dy)

    def timed(call):
        start = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - start

    calls = {"heads_forward": forward, "heads_step": step}
    return {pass_: median(lambda: timed(call), 5, BUDGET) for pass_, call in calls.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the CPU")
    shapes = "as 4096x512; those that cargo bench takes, if not named"
    parser.add_argument("--shapes", nargs="*", help=shapes)
    dtypes = "f32 and bf16 on a CPU and all on a GPU, if not named"
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help=dtypes)
    parser.add_argument("--no-heads", action="store_true", help="not the norm of heads")
    parser.add_argument("--no-block", action="store_true", help="not the transformer block")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="time torch.compile too; on a GPU, if not said",
    )
    parser.add_argument("--run", default="new", help="as cargo bench's --save-baseline")
    parser.add_argument("--criterion", type=Path, default=Path("target/criterion"))
    args = parser.parse_args()

    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU")
    compiled = on_gpu if args.compile is None else args.compile
    shapes = (GPU_SHAPES if on_gpu else CPU_SHAPES) if args.shapes is None else args.shapes
    dtypes = args.dtypes or (list(DTYPES) if on_gpu else ["f32", "bf16"])

    name = f" on {torch.cuda.get_device_name()}" if on_gpu else ""
    print(f"PyTorch {torch.__version__}{name}", file=sys.stderr)
    path = torch_figures(args.criterion, args.run)
    # Figures of earlier calls stay.
    figures = json.loads(path.read_text()) if path.exists() else {}
    for threads in [None] if on_gpu else args.threads:
        place = "cuda"
        if threads:
            torch.set_num_threads(threads)
            place = f"t{threads}"
        for shape in shapes:
            rows, cols = map(int, shape.split("x"))
            for dtype in dtypes:
                times = measure(args.device, DTYPES[dtype], rows, cols, compiled)
                for (pass_, contender), nanoseconds in times.items():
                    amount = bytes_moved(pass_, rows, cols, DTYPES[dtype])
                    id = Id(pass_, contender, dtype, shape, place)
                    figures["/".join(id)] = Figure(nanoseconds, amount)
        if not (on_gpu or args.no_heads):
            rows = 8 * 16 * 512
            for dtype in dtypes:
                for width in [64, 128]:
                    size = rows * width * DTYPES[dtype].itemsize
                    times = measure_heads(DTYPES[dtype], width)
                    for (pass_, nanoseconds), arrays in zip(times.items(), [2, 5]):
                        id = Id(pass_, "torch_rms_norm", dtype, f"{rows}x{width}", place)
                        figures["/".join(id)] = Figure(nanoseconds, arrays * size)
        if not (on_gpu or args.no_block):
            tokens = BATCH * TIME
            for (pass_, contender), nanoseconds in measure_block().items():
                id = Id(pass_, contender, "f32", f"{tokens}x{WIDTH}", place)
                figures["/".join(id)] = Figure(nanoseconds, tokens)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
