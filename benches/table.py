#!/usr/bin/env python3
"""The figures of `cargo bench` as tables, one for each pass and place, in Markdown.

    cargo bench --features cuda --bench power_norm -- '/cuda$'   # figures in target/criterion
    python3 benches/table.py --place cuda

Times are criterion's medians in microseconds. In brackets: the bytes that the pass must move a
second, as a share of those that `copy` moves on the same rows. `backward, kernels alone` is
`backward` less `autograd_alone`, what candle's autograd costs around an op whose gradients are
ready: on a GPU it means something where the rows keep it busy longer than the CPU takes to queue
the work. Contenders with a residual have none: autograd adds more around them.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

PASSES = ["forward_train", "forward_eval", "backward", "train_step_through_autograd"]
KERNELS = "backward, kernels alone"
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
    bytes: int

    @property
    def rate(self):
        """Gigabytes a second."""
        return self.bytes / self.nanoseconds


def read(criterion):
    """Every figure below criterion's folder, by Id."""
    figures = {}
    for path in criterion.glob("*/*/new/benchmark.json"):
        benchmark = json.loads(path.read_text())
        if "Bytes" not in benchmark["throughput"]:
            continue  # block.rs counts tokens.
        estimates = json.loads(path.with_name("estimates.json").read_text())
        figures[Id(*benchmark["full_id"].split("/"))] = Figure(
            estimates["median"]["point_estimate"], benchmark["throughput"]["Bytes"]
        )
    for id, figure in list(figures.items()):
        rest = figures.get(id._replace(contender="autograd_alone"))
        alone = rest and figure.nanoseconds - rest.nanoseconds
        comparable = id.place != "cuda_call" and not id.contender.startswith("residual")
        if id.pass_ == "backward" and comparable and alone and alone > 0:
            figures[id._replace(pass_=KERNELS)] = figure._replace(nanoseconds=alone)
    return figures


def table(figures, pass_, place):
    """One pass in one place, as lines of Markdown; none where nothing was measured."""
    here = {id: figure for id, figure in figures.items() if (id.pass_, id.place) == (pass_, place)}
    if not here:
        return []
    # Each pass is held against the copy of the forward; the layer comes next.
    contenders = {id.contender for id in here} - {"copy"}
    contenders = sorted(contenders, key=lambda name: (not name.startswith("power_norm"), name))
    contenders = ["copy", *contenders]
    lines = [f"### {pass_}, {place}", "", "| dtype | shape | " + " | ".join(contenders) + " |"]
    lines.append("|---|---|" + "--:|" * len(contenders))
    rows = {(id.dtype, id.shape) for id in here}

    def order(row):
        dtype, shape = row
        return (DTYPES.index(dtype), *map(int, shape.split("x")))

    for dtype, shape in sorted(rows, key=order):
        copy = figures.get(Id("forward_train", "copy", dtype, shape, place))
        cells = [f"{copy.nanoseconds / 1e3:.1f} ({copy.rate:.0f} GB/s)" if copy else "–"]
        for contender in contenders[1:]:
            figure = here.get(Id(pass_, contender, dtype, shape, place))
            share = f" ({figure.rate / copy.rate:.0%})" if figure and copy else ""
            cells.append(f"{figure.nanoseconds / 1e3:.1f}{share}" if figure else "–")
        lines.append(f"| {dtype} | {shape} | " + " | ".join(cells) + " |")
    return lines + [""]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    places = "t1, t2, cuda, cuda_call; all that were measured, if not named"
    parser.add_argument("--place", nargs="+", help=places)
    parser.add_argument("--criterion", type=Path, default=Path("target/criterion"))
    args = parser.parse_args()

    figures = read(args.criterion)
    if not figures:
        parser.error(f"no figures of cargo bench in {args.criterion}")
    for place in args.place or sorted({id.place for id in figures}):
        for pass_ in [*PASSES, KERNELS]:
            for line in table(figures, pass_, place):
                print(line)


if __name__ == "__main__":
    main()
