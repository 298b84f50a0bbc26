#!/usr/bin/env python3
"""The model of benches/model.rs in PyTorch: the same shapes, text, optimizer and table.

    python3 -m venv venv && venv/bin/pip install torch
    venv/bin/python benches/model_torch.py                        # 4 x 256 on a CPU, in f32
    venv/bin/python benches/model_torch.py --dtype bf16 --threads 2
    venv/bin/python benches/model_torch.py --device cuda --fused-attention
    venv/bin/python benches/model_torch.py --test                 # a tiny model, once

Columns are those of benches/model.rs, which says what they mean, and for figures to compare the two
run one after the other on the same machine. On a CPU keep freed memory in both, as the head of
benches/bench_torch.py does.

Operations run one at a time, without torch.compile. Attention is made of the same operations as in
candle, so that what differs is how fast each is. With --fused-attention it is PyTorch's own.
Weights are drawn as PyTorch's layers draw them, so losses are not those of candle.
"""

import argparse
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

# As benches/model.rs has them.
HEAD = 64
EPS = 1e-5
LEARNING_RATE = 3e-4

NORMS = {
    "torch_layer_norm": lambda width: nn.LayerNorm(width, EPS),
    "torch_rms_norm": lambda width: nn.RMSNorm(width, EPS),
    "torch_none": lambda width: nn.Identity(),
}


class Block(nn.Module):
    """Attention and two linear layers, each of which reads the normalized residual stream."""

    def __init__(self, width, norm, fused_attention):
        super().__init__()
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)
        self.fused_attention = fused_attention

    def forward(self, stream, mask):
        stream = stream + self.attention(self.norm_1(stream), mask)
        hidden = gelu(self.expand(self.norm_2(stream)), approximate="tanh")
        return stream + self.contract(hidden)

    def attention(self, xs, mask):
        batch, time, width = xs.shape
        heads = self.query_key_value(xs).view(batch, time, 3, width // HEAD, HEAD)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if self.fused_attention:
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(2, 3) * HEAD**-0.5
            mixed = torch.softmax(scores + mask, dim=-1) @ value
        return self.project(mixed.transpose(1, 2).reshape(batch, time, width))


class Gpt(nn.Module):
    """From tokens [batch, time] to logits of the next ones, [batch, time, vocabulary]."""

    def __init__(self, args, norm):
        super().__init__()
        width = args.width
        self.tokens = nn.Embedding(args.vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(args.context, width))
        blocks = (Block(width, norm, args.fused_attention) for _ in range(args.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm(width)
        self.output = nn.Linear(width, args.vocabulary, bias=False)
        # A large negative number where a token would see a later one.
        mask = (torch.tril(torch.ones(args.context, args.context)) - 1) * 1e9
        self.register_buffer("mask", mask)

    def forward(self, tokens):
        stream = self.tokens(tokens) + self.positions
        for block in self.blocks:
            stream = block(stream, self.mask)
        return self.output(self.norm(stream))


class Contender:
    """A model in training, and its measurements."""

    def __init__(self, args, name, text):
        torch.manual_seed(1)
        self.name = name
        self.device = args.device
        self.model = Gpt(args, NORMS[name]).to(args.device, DTYPES[args.dtype])
        # As benches/model.rs has it.
        eps = 1e-4 if args.dtype == "f16" else 1e-8
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, eps=eps)
        self.tokens = text[:-1].view(args.batch, args.context)
        self.next = text[1:]
        self.steps, self.evaluations, self.losses = [], [], []

    def loss(self):
        # Sums of half precision would be too coarse.
        return cross_entropy(self.model(self.tokens).flatten(0, 1).float(), self.next)

    def step(self):
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def evaluate(self):
        with torch.no_grad():
            self.model(self.tokens)

    def warm_up(self):
        """Counts the variables that a backward reaches, and takes the first two steps."""
        self.loss().backward()
        parameters = list(self.model.parameters())
        reached = [one for one in parameters if one.grad is not None and one.grad.any()]
        self.trained = f"{len(reached)} of {len(parameters)}"
        self.optimizer.zero_grad()
        self.losses.append(self.step().item())
        self.peak = (gpu_peak if self.device == "cuda" else cpu_peak)(self.step)
        self.evaluate()

    def time(self):
        milliseconds, loss = self.timed(self.step)
        self.steps.append(milliseconds)
        self.losses.append(loss.item())
        self.evaluations.append(self.timed(self.evaluate)[0])

    def timed(self, work):
        """The milliseconds that work takes, and its result."""
        start = time.perf_counter()
        result = work()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3, result

    def row(self):
        cells = [f"`{self.name}`"]
        for times in (self.steps, self.evaluations):
            cells += [f"{min(times):.2f}", f"{statistics.median(times):.2f}"]
        cells += [f"{self.peak / 2**20:.1f}", self.trained]
        cells.append(f"{self.losses[0]:.3f} → {self.losses[-1]:.3f}")
        return f"| {' | '.join(cells)} |"


def gpu_peak(step):
    """The most bytes that a step allocates at once, beyond those that already are."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cpu_peak(step):
    """The same, from the allocations that PyTorch's profiler sees."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def tokens(count, vocabulary):
    """A text that looks drawn by chance, as benches/model.rs has it."""
    return [(i * 2_654_435_761 % 2**32 >> 7) % vocabulary for i in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--norms", type=lambda text: text.split(","), default=list(NORMS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--batch", type=int, default=8, help="texts")
    parser.add_argument("--context", type=int, default=128, help="tokens of a text")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--fused-attention", action="store_true")
    parser.add_argument("--test", action="store_true", help="one round of a tiny model")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU")
    if args.test:
        args.layers, args.width, args.rounds = 1, HEAD, 1
        args.batch, args.context, args.vocabulary = 2, 8, 16
    torch.set_num_threads(args.threads)

    name = f" on {torch.cuda.get_device_name()}" if args.device == "cuda" else ""
    print(f"PyTorch {torch.__version__}{name}", file=sys.stderr)
    print(
        f"GPT of {args.layers} x {args.width}, {args.batch} x {args.context} tokens of "
        f"{args.vocabulary}, {args.dtype}{', fused attention' if args.fused_attention else ''}\n"
    )
    text = torch.tensor(tokens(args.batch * args.context + 1, args.vocabulary))
    contenders = [Contender(args, name, text.to(args.device)) for name in args.norms]
    for contender in contenders:
        contender.warm_up()
    for _ in range(args.rounds):
        for contender in contenders:
            contender.time()
    print(
        "| normalization | step, ms: least | median | evaluation, ms: least | median "
        "| peak, MiB | trained | loss |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for contender in contenders:
        print(contender.row())


if __name__ == "__main__":
    main()
