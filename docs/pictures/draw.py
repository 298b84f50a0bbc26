#!/usr/bin/env python3
"""Draws speed.svg of the README, from the records of times on a CPU and of what a model asks of a GPU
and from the guide's table of memory, and axes.svg of docs/paper.md.

    python3 docs/pictures/draw.py           draws them
    python3 docs/pictures/draw.py --check   fails if they show anything else
"""

import re
import sys
from pathlib import Path

from svg import box, path, picture, text

FOLDER = Path(__file__).parent
PERFORMANCE = FOLDER.parent / "guide" / "performance.md"
RESULTS = FOLDER.parent.parent / "benches" / "results"
CPU, MODEL = RESULTS / "cpu.md", RESULTS / "model.md"
CELL, ROWS, COLUMNS = 16, 6, 8


def grid(left, top, row=None, column=None, color="blue", opacity=1.0):
    """Tokens downwards and channels to the right, with one row or one column in a color."""
    width, height = COLUMNS * CELL, ROWS * CELL
    parts = [box(left, top, width, height, "faint")]
    more = f' fill-opacity="{opacity}"'
    if row is not None:
        parts.append(box(left, top + row * CELL, width, CELL, color, more))
    if column is not None:
        parts.append(box(left + column * CELL, top, CELL, height, color, more))
    lines = [f"M{left + i * CELL} {top}v{height}" for i in range(1, COLUMNS)]
    lines += [f"M{left} {top + i * CELL}h{width}" for i in range(1, ROWS)]
    parts.append(path("".join(lines), "page-line"))
    parts.append(path(f"M{left} {top}h{width}v{height}h-{width}z", "edge-line"))
    return parts


def axes():
    """Which numbers a statistic averages over, by color. In two rows, so that it is narrow."""
    token, channel = {"row": 2}, {"column": 3}
    past = lambda opacity: {**channel, "opacity": opacity}
    now = {**channel, "color": "orange"}
    wide = COLUMNS * CELL + 10
    rows = [
        [
            (40, "LayerNorm, RMSNorm", [(token, "channels")],
             ["each token, over its channels: mean", "and variance in LayerNorm, the", "mean square in RMSNorm"]),
            (330, "BatchNorm", [(channel, "channels")],
             ["each channel, over the tokens of this", "batch: mean and variance; running", "ones in evaluation"]),
        ],
        [
            (40, "PowerNorm, step 1", [(token, "channels")],
             ["group scaling: each", "token, over its", "channels (RMSNorm)"]),
            (40 + wide + 56, "PowerNorm, step 2", [(past(0.4), "batch t−2"), (past(0.75), "batch t−1"), (now, "batch t")],
             ["each channel, over the tokens of past batches:", "the mean square, in which older batches weigh less", "(in the warm-up, of this batch instead)"]),
        ],
    ]
    parts, top = [], 0
    for panels in rows:
        parts.append(text(28, top + 94, "tokens", 13, "middle", more=f' transform="rotate(-90 28 {top + 94})"'))
        for left, name, batches, lines in panels:
            parts.append(text(left, top + 28, name, 16, weight="bold"))
            x = left
            for cells, label in batches:
                parts += grid(x, top + 46, **cells)
                parts.append(text(x + COLUMNS * CELL / 2, top + 160, label, 13, "middle"))
                x += wide
            parts += [text(left, top + 188 + 18 * i, line, 14) for i, line in enumerate(lines)]
        top += 250
    parts += [
        box(40, top, 12, 12, "blue"),
        text(58, top + 11, "averaged over", 14),
        box(190, top, 12, 12, "orange"),
        text(208, top + 11, "divided by the average of the batches before it", 14),
    ]
    description = (
        "Grids of tokens and channels. LayerNorm and RMSNorm average over one token's channels. "
        "BatchNorm averages over one channel of this batch. PowerNorm has two steps: the first is "
        "RMSNorm's, and the second averages over one channel of past batches and divides this batch "
        "by the root of the result."
    )
    title = "The axes that LayerNorm, BatchNorm and PowerNorm average over"
    return picture(FOLDER / "axes", 664, top + 30, title, description, parts)


def table(markdown):
    """The first table: its header, and its rows."""
    lines = markdown[markdown.index("\n|") :].lstrip().split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def times(threads=1):
    """Milliseconds of a forward and backward in f32, from the record: the median, the smallest and
    the largest run, by the record's name of a layer."""
    section = f"\n### train_step_through_autograd, t{threads}\n"
    header, *rows = table(CPU.read_text().split(section)[1])
    [cells] = [row for row in rows if row[:2] == ["f32", "4096x512"]]
    for name, cell in zip(header[2:], cells[2:]):
        found = re.match(r"([\d.]+) \[([\d.]+)–([\d.]+)\]", cell)
        if found:
            yield name, [float(number) / 1000 for number in found.groups()]


def memory():
    """Bytes that a layer keeps for its backward, from the guide: by layer, in f32 and in bf16."""
    section = PERFORMANCE.read_text().split("\n## Memory\n")[1]
    for cells in table(section)[1:]:
        numbers = [int(re.match(r"[\d,]+", cell)[0].replace(",", "")) for cell in cells[1:]]
        for name in re.findall(r"PowerNorm|`\w+`", cells[0]):
            yield name.strip("`"), numbers


def counted(dtype):
    """Launches of kernels and MiB of their sectors that the normalizations add to a step of a model
    without any, counted on softgpu: by layer."""
    header, *rows = table(MODEL.read_text().split(f"\n### {dtype}\n")[1])
    columns = [header.index(name) for name in ("launches", "of sectors")]
    numbers = {row[0].strip("`"): [float(row[column]) for column in columns] for row in rows}
    none = numbers.pop("none")
    return {name: [a - b for a, b in zip(of, none)] for name, of in numbers.items()}


def steps():
    """Milliseconds of a step of a GPT in f32: by layer, with candle's GELU and with this crate's, the
    least, the smallest and the largest run."""
    for name, *cells in table(MODEL.read_text().split("\n### Whole steps in f32\n")[1])[1:]:
        of = [re.match(r"(\d+) \[(\d+)–(\d+)\]", cell).groups() for cell in cells]
        yield name.strip("`"), [[float(number) for number in numbers] for numbers in of]


# A bar's name, its layer in the record of steps, and whether the GELU is this crate's.
STEPS = [
    ("layer_norm, ops::gelu", "layer_norm", True),
    ("layer_norm", "layer_norm", False),
    ("rms_norm", "rms_norm", False),
    ("candle layer_norm_slow", "layer_norm_slow", False),
]

# A bar's name, its layer in the record of times, and its layer in the table of memory.
BARS = [
    ("layer_norm", "layer_norm", "layer_norm"),
    ("rms_norm", "rms_norm", "rms_norm"),
    ("candle layer_norm_slow", "layer_norm_slow", "layer_norm_slow"),
    ("candle rms_norm_slow", "rms_norm_slow", "rms_norm_slow"),
    ("PyTorch LayerNorm", "torch_layer_norm", None),
    ("PyTorch RMSNorm*", "torch_rms_norm", None),
]
LEFT, WIDTH = 186, 138  # of the bars


def panel(top, heading, bars):
    """Bars with a heading: each has a name, a label, a length and its smallest and largest."""
    parts = [text(12, top, heading, 15, weight="bold")]
    longest = max(high for *_, high in bars)
    color = lambda name: {"candle": "grey", "PyTorch": "gold"}.get(name.split()[0], "blue")
    x = lambda value: LEFT + WIDTH * value / longest
    for name, label, value, low, high in bars:
        top += 26
        parts.append(text(LEFT - 8, top, name, 14, "end"))
        parts.append(box(LEFT, top - 13, max(x(value) - LEFT, 1.5), 17, color(name)))
        if low != high:
            middle = top - 4.5
            parts.append(path(f"M{x(low):.1f} {middle}H{x(high):.1f}", "ink-line"))
            parts.append(path(f"M{x(low):.1f} {middle - 4}v8M{x(high):.1f} {middle - 4}v8", "ink-line"))
        parts.append(text(x(high) + 6, top, label, 14))
    return parts, top


def speed():
    """Narrow, with large letters, so that a phone shows it."""
    of, kept, added = dict(times()), dict(memory()), counted("f32")
    parts = [text(12, 26, "LayerNorm and RMSNorm in training", 17, weight="bold")]
    legend = ((12, "blue", "this crate"), (122, "grey", "candle"), (208, "gold", "PyTorch"))
    for x, key, label in legend:
        parts += [box(x, 42, 13, 13, key), text(x + 19, 54, label, 14)]
    parts.append(text(312, 54, "lower is better", 14))

    panels = [("CPU, f32: forward and backward with autograd, ms", [])]
    for name, record, _ in BARS:
        value, low, high = of[record]
        label = f"{value:.1f} ({low:.1f} to {high:.1f})"
        panels[-1][1].append((name, label, value, low, high))
    whole = dict(steps())
    panels.append(("CPU, f32: a whole step of a GPT, ms", []))
    for name, record, our_gelu in STEPS:
        value, low, high = whole[record][our_gelu]
        panels[-1][1].append((name, f"{value:.0f}", value, low, high))
    names = [(name, layer) for name, _, layer in BARS if layer]
    panels.append(("CPU, f32: kept besides the input for the backward", []))
    for name, layer in names:
        size = kept[layer][0] / 1e6
        label = f"{size:.0f} MB" if size > 1 else f"{size * 1000:.1f} kB"
        panels[-1][1].append((name, label, *[size] * 3))
    panels.append(("GPU, f32, counted: traffic added to a GPT's step", []))
    for name, layer in names:
        launches, traffic = added[layer]
        label = f"{traffic:.0f} MiB, {launches:.0f} launches"
        panels[-1][1].append((name, label, *[traffic] * 3))
    top = 50
    for heading, bars in panels:
        more, top = panel(top + 38, heading, bars)
        parts += more

    notes = [
        "CPU: inputs of 4096 × 512, one thread of an AMD EPYC (Zen 5),",
        "2026-11-27; times are the median and the range of five runs.",
        "candle 0.11.1 with mimalloc, PyTorch 2.15 with jemalloc. The",
        "GPT has 4 blocks of 256 channels, 1024 tokens a step: a Zen 4,",
        "2026-11-29, least of two runs.",
        "GPU: counted on an emulator, 2026-11-28, not timed. Traffic of",
        "kernels, autograd and AdamW included, that five normalizations",
        "add to a GPT of 2 blocks of 384 channels on 256 tokens.",
        "candle's fused layers are left out: they have no gradient.",
        "* PyTorch runs it as several operations on a CPU.",
    ]
    parts += [text(12, top + 34 + 19 * i, line, 14) for i, line in enumerate(notes)]
    described = ", ".join(f"{name.strip('*')} {of[record][0]:.1f} ms" for name, record, _ in BARS)
    of_steps = ", ".join(f"{name} {whole[of][gelu][0]:.0f} ms" for name, of, gelu in STEPS)
    traffic = ", ".join(f"{name} {added[layer][1]:.0f} MiB" for name, layer in names)
    description = (
        f"Bars. A forward and backward of 4096 × 512 in f32 on one thread takes: {described}. A whole "
        f"step of a GPT takes: {of_steps}. For "
        "the backward this crate's layers keep 4.8 kB, and candle's slow ones 17 to 34 MB. On a GPU "
        f"five normalizations add to a step of a GPT in f32: {traffic}."
    )
    title = "LayerNorm and RMSNorm in training: time and memory on a CPU, traffic on a GPU"
    return picture(FOLDER / "speed", 500, top + 223, title, description, parts)


for file, drawn in (axes() | speed()).items():
    if sys.argv[1:] != ["--check"]:
        file.write_text(drawn)
    elif not file.exists() or file.read_text() != drawn:
        sys.exit(f"{file.name} is out of date: run python3 docs/pictures/draw.py")
