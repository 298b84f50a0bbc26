"""Draws the pictures of docs/paper.md and its tables from language.jsonl. write.py writes them.

`final` has each contender's test loss minus LayerNorm's after 30 epochs, with its 95 % interval.
`curves` has validation losses over 30 epochs, and `words-30` the same minus LayerNorm's from the
same seed: the mean over seeds, and their range as an area. `sweep` has the final validation loss
by learning rate.
"""

import json
import math
import sys
from statistics import mean

from results import (
    FREE,
    FREE_RATES,
    FULL,
    HERE,
    LANGUAGE,
    RIVALS,
    SWEPT,
    bounds,
    contender_pairs,
    free_swept,
    number,
    sweep,
)

sys.path.insert(0, str(HERE.parent / "pictures"))
from svg import dot, path, picture, text  # noqa: E402

STEPS = {name: study["--steps"] for name, study in json.load(open(HERE / "studies.json")).items()}
NAMES = {"LN": "LayerNorm", "PN": "PowerNorm", "PN-V": "PN-V", "BN": "BatchNorm"}
COLORS = {
    "LN": "edge",
    "PN": "blue",
    "PN-V": "orange",
    "BN": "green",
    "RMSNorm": "purple",
    "DyT": "gold",
    "Derf": "gold",
}
WITHOUT = " without group scaling"


def named(name):
    """A contender's name in a picture, and its color."""
    norm = name.removesuffix(WITHOUT)
    return NAMES.get(norm, norm) + name[len(norm) :], COLORS[norm]


def differences(study, run, base_study, base):
    """Points of a line: step, mean, least and most over seeds. And how many seeds."""
    curves, bases = curves_of(study, run), curves_of(base_study, base)
    seeds = sorted(curves.keys() & bases.keys())
    points = []
    for step in sorted({step for seed in seeds for step in curves[seed]}):
        found = [seed for seed in seeds if step in curves[seed] and step in bases[seed]]
        values = [curves[seed][step] - bases[seed][step] for seed in found]
        if values:
            points.append((step, mean(values), min(values), max(values)))
    return points, len(seeds)


def curves_of(study, run):
    """By seed, and by step. The last evaluation is that of the tables, over more batches than the
    others. An evaluation just before it is left out."""
    found = [r for r in LANGUAGE if (r["study"], r["run"]) == (study, run) and r.get("val")]
    end = STEPS[study]
    return {
        r["seed"]: {step: loss for step, loss in r["val"] if step < 0.98 * end} | {end: r["val_loss"]}
        for r in found
    }


def ticks(low, high):
    """Round numbers from `low` to `high`, about five."""
    steps = (digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5))
    step = min(steps, key=lambda step: abs((high - low) / step - 5))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 9) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def signed(value):
    sign = "−" if value < 0 else "+" if value > 0 else ""
    return sign + f"{abs(value):g}"


def apart(heights, gap=16):
    """These heights, moved as little as possible so that no two are nearer than `gap`."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    clusters = []  # (sum of heights minus places in the cluster, members)
    for i in order:
        clusters.append([heights[i], [i]])
        while len(clusters) > 1:
            (above, first), (below, second) = clusters[-2:]
            bottom_of_above = above / len(first) + gap * len(first)
            if below / len(second) >= bottom_of_above:
                break
            total = above + below - gap * len(first) * len(second)
            clusters[-2:] = [[total, first + second]]
    placed = list(heights)
    for total, members in clusters:
        for place, i in enumerate(members):
            placed[i] = total / len(members) + gap * place
    return placed


class Chart:
    """Axes in a part of a picture, and lines with labels beside their ends."""

    def __init__(self, x_range, y_range, left=64, width=472, top=56, height=276, margin=0.05):
        (self.x_low, self.x_high), (low, high) = x_range, y_range
        self.left, self.width, self.top, self.height = left, width, top, height
        self.low, self.high = low - margin * (high - low), high + margin * (high - low)
        self.parts, self.ends = [], []

    def x(self, value):
        return self.left + self.width * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value):
        return self.top + self.height * (self.high - value) / (self.high - self.low)

    def axes(self, x_title, x_ticks, shown):
        right, bottom = self.left + self.width, self.top + self.height
        self.parts.append(text(self.left + self.width / 2, bottom + 40, x_title, 13, "middle"))
        for value in ticks(self.low, self.high):
            color = "edge-line" if value == 0 else "faint-line"
            self.parts.append(path(f"M{self.left} {self.y(value):.1f}H{right}", color))
            self.parts.append(text(self.left - 6, self.y(value) + 4, shown(value), 13, "end"))
        for value, label in x_ticks:
            self.parts.append(path(f"M{self.x(value):.1f} {bottom}v4", "edge-line"))
            self.parts.append(text(self.x(value), bottom + 20, label, 13, "middle"))

    def area(self, points, color):
        """Of points (x, least, most)."""
        edge = [(self.x(x), self.y(least)) for x, least, _ in points]
        edge += [(self.x(x), self.y(most)) for x, _, most in reversed(points)]
        self.parts.append(path(edge, color, ' fill-opacity="0.18"'))

    def line(self, points, color, label=None, dots=False, dashed=False):
        at = [(self.x(x), self.y(y)) for x, y in points]
        more = ' stroke-width="2"' + ' stroke-dasharray="6 4"' * dashed
        self.parts.append(path(at, f"{color}-line", more))
        if dots:
            self.parts += [dot(x, y, color) for x, y in at]
        if label:
            self.ends.append((at[-1], color, label))

    def labels(self):
        """Beside the ends of the lines, and apart from each other."""
        heights = apart([y for (_, y), *_ in self.ends])
        edge = self.left + self.width + 14
        for ((x, y), color, label), height in zip(self.ends, heights):
            self.parts.append(path([(x + 5, y), (edge, height)], f"{color}-line"))
            self.parts.append(text(edge + 4, height + 4, label, 13, color=color))


def titles(title, line):
    return [text(16, 24, title, 15, weight="bold"), text(16, 44, line, 13)]


def words_30():
    lines = {
        norm: differences(f"words-30-{norm}", f"{norm}-scale1", "words-30-layer", "layer-scale1")
        for norm in FULL
        if norm != "layer"
    }
    every = [point for points, _ in lines.values() for point in points]
    epochs = lambda step: 30 * step / STEPS["words-30-layer"]
    chart = Chart((0, 30), (min(p[2] for p in every), max(p[3] for p in every)), top=60)
    chart.axes("epochs", [(epoch, f"{epoch}") for epoch in range(0, 31, 5)], signed)
    for norm, (points, _) in lines.items():
        area = [(epochs(step), least, most) for step, _, least, most in points]
        chart.area(area, COLORS[FULL[norm]])
    for norm, (points, seeds) in lines.items():
        line = [(epochs(step), middle) for step, middle, *_ in points]
        chart.line(line, COLORS[FULL[norm]], f"{NAMES[FULL[norm]]}, {seeds} seeds")
    chart.line([(0, 0), (30, 0)], COLORS["LN"], NAMES["LN"])
    chart.labels()
    ends = {NAMES[FULL[norm]]: signed(round(points[-1][1], 3)) for norm, (points, _) in lines.items()}
    title = "Words, 30 epochs: validation loss minus LayerNorm's"
    about = "nats per word, from the same seeds; lower is better; areas are ranges over seeds"
    return picture(
        HERE / "words-30",
        720,
        384,
        title,
        "A line for each normalization over 30 epochs. After the last step the mean is "
        + ", ".join(f"{end} for {name}" for name, end in ends.items())
        + " nats per word.",
        titles(title, about) + chart.parts,
    )


def final():
    """A forest plot: a row for each contender, from the lowest mean to the highest."""
    rows = sorted(contender_pairs().items(), key=lambda row: mean(row[1].values()))
    limits = [bounds(list(pairs.values())) for _, pairs in rows]
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    left, width, top, step = 306, 300, 84, 30
    x = lambda value: left + width * (value - low) / (high - low)
    title = "Words, 30 epochs: test loss minus LayerNorm's"
    about = "1.4M parameters, Multi30k English; nats per word, lower is better; dots are seeds"
    bottom = top + step * len(rows) - 6
    parts = titles(title, about)
    parts.append(text(x(0), top - 20, "LayerNorm", 13, "middle", color="edge"))
    parts.append(text(left + width + 20, top - 20, "mean (95 %, uncorrected)", 13))
    for value in ticks(low, high):
        color = "edge-line" if value == 0 else "faint-line"
        parts.append(path(f"M{x(value):.1f} {top - 14}V{bottom}", color))
        parts.append(text(x(value), bottom + 18, signed(value), 13, "middle"))
    spoken = []
    for i, ((name, pairs), (least, most)) in enumerate(zip(rows, limits)):
        (label, color), y = named(name), top + step * i + 6
        middle = mean(pairs.values())
        parts.append(text(left - 14, y + 4, f"{label}, {len(pairs)} seeds", 13, "end"))
        parts.append(path(f"M{x(least):.1f} {y}H{x(most):.1f}", f"{color}-line", ' stroke-width="2"'))
        ends = f"M{x(least):.1f} {y - 5}v10M{x(most):.1f} {y - 5}v10"
        parts.append(path(ends, f"{color}-line", ' stroke-width="2"'))
        parts += [dot(x(value), y - 8, color, 2) for value in pairs.values()]
        parts.append(dot(x(middle), y, color, 5))
        of = lambda value: number(value, 3, True)
        shown = f"{of(middle)} ({of(least)} to {of(most)})"
        parts.append(text(left + width + 20, y + 4, shown, 13))
        spoken.append(f"{label} {shown}")
    description = "A row for each contender, with the mean and its interval: " + "; ".join(spoken) + "."
    return picture(HERE / "final", 836, bottom + 32, title, description, parts)


# Contenders of the absolute curves: study, run.
CURVES = {
    "BN": ("words-30-batch", "batch-scale1"),
    "DyT": ("words-30-none-dyt", "dyt-noscale"),
    "LN": ("words-30-layer", "layer-scale1"),
    "PN": ("words-30-power", "power-scale1"),
    "RMSNorm": ("words-30-none-rms", "rms-noscale"),
}


def curves():
    """Absolute losses: all epochs but the first, and the last third again on a finer scale."""

    def points(study, run):
        """Means over seeds, of the evaluations on the way. They take fewer batches than the last
        one, whose loss is the tables', so that one would end each line in a step."""
        found = [r["val"] for r in LANGUAGE if (r["study"], r["run"]) == (study, run)]
        by_step = {step: [dict(val)[step] for val in found] for step, _ in found[0]}
        return [(30 * step / STEPS[study], mean(losses)) for step, losses in by_step.items()]

    lines = {name: points(*run) for name, run in CURVES.items()}

    def panel(first, last, epochs, left, width):
        shown = {n: [p for p in line if first - 0.5 <= p[0]] for n, line in lines.items()}
        losses = [loss for line in shown.values() for _, loss in line]
        chart = Chart((first, last), (min(losses), max(losses)), left, width, top=60)
        chart.axes("epochs", [(epoch, f"{epoch}") for epoch in epochs], lambda v: f"{v:.2f}")
        return chart, shown

    seeds = {name: len(curves_of(*run)) for name, run in CURVES.items()}
    ends = [curve[STEPS[CURVES["LN"][0]]] for curve in curves_of(*CURVES["LN"]).values()]
    whole, shown = panel(2, 30, range(5, 31, 5), 58, 280)
    for name, line in shown.items():
        whole.line(line, COLORS[name])
    end, shown = panel(20, 30, range(20, 31, 2), 402, 250)
    for name, line in shown.items():
        end.line(line, COLORS[name], f"{named(name)[0]}, {seeds[name]} seeds")
    end.labels()
    title = "Words, 30 epochs: validation loss, from epoch 2 and from epoch 20"
    about = "nats per word, mean over seeds; lower is better; each part has its own scale"
    last = ", ".join(f"{line[-1][1]:.3f} for {named(n)[0]}" for n, line in lines.items())
    note = (
        "Evaluations in training take fewer batches than the tables' final ones, in which "
        f"LayerNorm has {mean(ends):.3f}."
    )
    return picture(
        HERE / "curves",
        826,
        404,
        title,
        f"Lines that fall together. The last evaluation in training is {last} nats per word. {note}",
        titles(title, about) + whole.parts + end.parts + [text(16, 394, note, 13)],
    )


def sweep_chart():
    """Two parts on one scale: with group scaling of one group, and without."""
    with_groups = {name: sweep(run) for run, name in SWEPT.items()}
    without = {name: free_swept(norm) for norm, name in (FREE | RIVALS).items()}
    parts = []
    of_part = {}
    for part, swept in (("with", with_groups), ("without", without)):
        of_part[part] = {
            name: sorted((float(r), loss) for r, loss in losses.items() if "none" not in r)
            for name, losses in swept.items()
        }
    # DyT and Derf are so far above the others that they would flatten them.
    high = [name for name in RIVALS.values() if name != "RMSNorm"]
    left_out = {name: of_part["without"].pop(name) for name in high}
    # Group scaling with one group does not change LayerNorm, so its line is in both parts.
    of_part["without"]["LN"] = of_part["with"]["LN"]
    every = [loss for part in of_part.values() for line in part.values() for _, loss in line]
    rates = [float(rate) for rate in FREE_RATES]
    best = {}
    for part, left in (("with", 58), ("without", 470)):
        limits = (math.log(rates[0]), math.log(rates[-1])), (min(every), max(every))
        chart = Chart(*limits, left, 250, top=84)
        x_ticks = [(math.log(rate), f"{rate:g}") for rate in rates]
        chart.axes("peak learning rate", x_ticks, lambda value: f"{value:.2f}")
        heading = {"with": "with group scaling", "without": "without group scaling"}[part]
        chart.parts.append(text(left, 72, heading, 13, weight="bold"))
        for name, line in of_part[part].items():
            at = [(math.log(rate), loss) for rate, loss in line]
            chart.line(at, COLORS[name], named(name)[0], dots=True)
            best[f"{named(name)[0]} {part}"] = min(line, key=lambda point: point[1])
        chart.labels()
        parts += chart.parts
    lowest = {name: min(line, key=lambda point: point[1]) for name, line in left_out.items()}
    beyond = " and ".join(f"{name} ({loss:.2f} at {rate:g})" for name, (rate, loss) in lowest.items())
    title = "Words, 2 epochs: final validation loss by peak learning rate"
    about = (
        "nats per word, one seed, both parts on one scale; lower is better. Group scaling with one "
        "group does not change LayerNorm"
    )
    note = f"Not shown, because even their lowest losses are above: {beyond}."
    return picture(
        HERE / "sweep",
        836,
        434,
        title,
        "The best rates are "
        + ", ".join(f"{rate:g} for {name}" for name, (rate, _) in best.items())
        + f". {note}",
        titles(title, about) + parts + [text(16, 424, note, 13)],
    )


def pictures():
    """All of them: the files' texts by path."""
    return final() | curves() | words_30() | sweep_chart()
