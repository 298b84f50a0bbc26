#!/usr/bin/env python3
"""The figures of `cargo bench` as tables, one for each pass and place, in Markdown.

    cargo bench                          # figures in target/criterion
    python3 benches/table.py

and of several runs, with PyTorch's figures if benches/bench_torch.py has left any:

    for run in 1 2 3; do cargo bench -- --save-baseline $run; done
    python3 benches/table.py --runs 1 2 3 --against torch_layer_norm

Times are criterion's medians in microseconds. Of several runs a cell has the median, and in square
brackets the least and the largest. In round brackets is the rate as a share of another's in the
same run: of the copy's for the layer's passes, of the block's without normalizations for a block.
Rates are the bytes that the pass must move a second, or tokens a second. `--against` names another
contender for all.

`backward, kernels alone` is `backward` less `autograd_alone`, what candle's autograd costs around
an op whose gradients are ready: on a GPU it means something where the rows keep it busy longer than
the CPU takes to queue the work. Contenders with a residual have none: autograd adds more around
them. PyTorch's autograd has no such passes, so PyTorch's figures there are those of `backward`.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import NamedTuple

KERNELS = "backward, kernels alone"
HEADS = ["heads_forward", "heads_step"]
BLOCKS = ["block_train", "block_evaluate", "decode", "prompt"]
PASSES = [
    "forward_train",
    "forward_eval",
    "backward",
    KERNELS,
    "train_step_through_autograd",
    *HEADS,
    *BLOCKS,
]
DTYPES = ["f32", "bf16", "f16"]


class Id(NamedTuple):
    """What a bench measured."""

    pass_: str
    contender: str
    dtype: str
    shape: str
    place: str


class Figure(NamedTuple):
    nanoseconds: float
    """Bytes that the pass must move, or tokens."""
    amount: int

    @property
    def rate(self):
        return self.amount / self.nanoseconds


def torch_figures(criterion, run):
    """Where benches/bench_torch.py leaves the figures of a run."""
    return criterion / "torch" / f"{run}.json"


def read(criterion, run):
    """Every figure of a run below criterion's folder, by Id."""
    figures = {}
    for path in criterion.glob(f"*/*/{run}/benchmark.json"):
        benchmark = json.loads(path.read_text())
        (amount,) = benchmark["throughput"].values()
        estimates = json.loads(path.with_name("estimates.json").read_text())
        figure = Figure(estimates["median"]["point_estimate"], amount)
        figures[Id(*benchmark["full_id"].split("/"))] = figure
    theirs = torch_figures(criterion, run)
    if theirs.exists():
        for id, figure in json.loads(theirs.read_text()).items():
            figures[Id(*id.split("/"))] = Figure(*figure)
    for id, figure in list(figures.items()):
        if id.pass_ != "backward" or id.place == "cuda_call":
            continue
        alone = figures.get(id._replace(contender="autograd_alone"))
        if id.contender.startswith("torch"):
            figures[id._replace(pass_=KERNELS)] = figure
        elif not id.contender.startswith("residual") and alone:
            rest = figure.nanoseconds - alone.nanoseconds
            if rest > 0:
                figures[id._replace(pass_=KERNELS)] = figure._replace(nanoseconds=rest)
    return figures


def share(figures, id, against):
    """The rate as a share of that of another contender, if the run has it."""
    against = against or ("none" if id.pass_ in BLOCKS else "copy")
    other = figures.get(id._replace(contender=against))
    if against == "copy":
        # There is one copy, which stands among the forwards.
        copied = "heads_forward" if id.pass_ in HEADS else "forward_train"
        other = figures.get(id._replace(contender=against, pass_=copied))
    return figures[id].rate / other.rate if other and id.contender != against else None


def cell(runs, id, against):
    """A contender's time and its share, over the runs that have it."""
    having = [figures for figures in runs if id in figures]
    if not having:
        return "–"
    times = [figures[id].nanoseconds / 1e3 for figures in having]
    text = f"{statistics.median(times):.1f}"
    if len(times) > 1:
        text += f" [{min(times):.1f}–{max(times):.1f}]"
    if id.contender == "copy":
        return f"{text} ({statistics.median(figures[id].rate for figures in having):.0f} GB/s)"
    shares = [share(figures, id, against) for figures in having]
    shares = [share for share in shares if share is not None]
    return text + (f" ({statistics.median(shares):.0%})" if shares else "")


def table(runs, pass_, place, against):
    """One pass in one place, as lines of Markdown; none where nothing was measured."""
    ids = {id for figures in runs for id in figures if (id.pass_, id.place) == (pass_, place)}
    if not ids:
        return []

    # The copy comes first, for others are held against it, and then the layer.
    def by_name(contender):
        return (contender != "copy", not contender.startswith("power_norm"), contender)

    def by_size(row):
        dtype, shape = row
        return (DTYPES.index(dtype), *map(int, shape.split("x")))

    contenders = sorted({id.contender for id in ids}, key=by_name)
    lines = [f"### {pass_}, {place}", "", "| dtype | shape | " + " | ".join(contenders) + " |"]
    lines.append("|---|---|" + "--:|" * len(contenders))
    for dtype, shape in sorted({(id.dtype, id.shape) for id in ids}, key=by_size):
        cells = [
            cell(runs, Id(pass_, contender, dtype, shape, place), against)
            for contender in contenders
        ]
        lines.append(f"| {dtype} | {shape} | " + " | ".join(cells) + " |")
    return lines + [""]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    places = "t1, t2, cuda, cuda_call; all that were measured, if not named"
    parser.add_argument("--place", nargs="+", help=places)
    runs = "what cargo bench's --save-baseline named; the last run, if not named"
    parser.add_argument("--runs", nargs="+", default=["new"], help=runs)
    parser.add_argument("--against", metavar="CONTENDER", help="whose rate others are shares of")
    parser.add_argument("--criterion", type=Path, default=Path("target/criterion"))
    args = parser.parse_args()

    runs = [read(args.criterion, run) for run in args.runs]
    places = {id.place for figures in runs for id in figures}
    if not places:
        parser.error(f"no figures of cargo bench in {args.criterion}")
    for place in args.place or sorted(places):
        for pass_ in PASSES:
            for line in table(runs, pass_, place, args.against):
                print(line)


if __name__ == "__main__":
    main()
