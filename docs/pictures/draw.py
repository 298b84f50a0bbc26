#!/usr/bin/env python3
"""Draws the README's pictures: axes.svg, and speed.svg from the guide's table of times on a CPU.

    python3 docs/pictures/draw.py           draws them
    python3 docs/pictures/draw.py --check   fails if they show anything else
"""

import re
import sys
from pathlib import Path

from svg import box, path, picture, text

FOLDER = Path(__file__).parent
PERFORMANCE = FOLDER.parent / "guide" / "performance.md"
CELL, ROWS, COLUMNS = 16, 6, 8
# How the names of this crate's layers begin in the table.
OURS = ("PowerNorm", "`layer_norm`", "`rms_norm`")


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
    """Which numbers a statistic averages over, by color."""
    token, channel = {"row": 2}, {"column": 3}
    past = lambda opacity: {**channel, "opacity": opacity}
    now = {**channel, "color": "orange"}
    panels = [
        ("LayerNorm, RMSNorm", [(token, "channels")],
         ["each token, over its channels:", "mean and variance in LayerNorm,",
          "the mean square in RMSNorm"]),
        ("BatchNorm", [(channel, "channels")],
         ["each channel, over the tokens", "of this batch: mean and variance;",
          "running ones in evaluation"]),
        ("PowerNorm, after group scaling",
         [(past(0.4), "batch t−2"), (past(0.75), "batch t−1"), (now, "batch t")],
         ["each channel, over the tokens of past batches, of which",
          "older ones weigh less: the mean square. By default each",
          "token is first divided by its own, as in RMSNorm"]),
    ]
    parts, left = [], 40
    for name, batches, lines in panels:
        parts.append(text(left, 28, name, 16, weight="bold"))
        x = left
        for cells, label in batches:
            parts += grid(x, 46, **cells)
            parts.append(text(x + COLUMNS * CELL / 2, 160, label, 13, "middle"))
            x += COLUMNS * CELL + 10
        parts += [text(left, 188 + 18 * i, line) for i, line in enumerate(lines)]
        left += 256
    parts += [
        box(40, 248, 12, 12, "blue"),
        text(58, 259, "averaged over"),
        box(170, 248, 12, 12, "orange"),
        text(188, 259, "divided by the average of the batches before it"),
        text(28, 94, "tokens", 13, "middle", more=' transform="rotate(-90 28 94)"'),
    ]
    description = (
        "Three grids of tokens and channels. LayerNorm and RMSNorm average over one token's "
        "channels. BatchNorm averages over one channel of this batch. PowerNorm averages over one "
        "channel of past batches, and divides this batch by the result."
    )
    title = "The axes that LayerNorm, BatchNorm and PowerNorm average over"
    return picture(FOLDER / "axes", 1000, 276, title, description, parts)


def speeds():
    """The guide's first table of times on a CPU: a row's name, and its numbers in milliseconds."""
    section = PERFORMANCE.read_text().split("\n## On a CPU\n")[1]
    table = section[section.index("\n|") :].lstrip().split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()]
    titles = [cell.strip() for cell in rows[0][1:]]
    for cells in rows[2:]:
        numbers = [re.match(r"[\d.]+", cell.strip()) for cell in cells[1:]]
        yield cells[0].strip(), {
            title: number.group() for title, number in zip(titles, numbers) if number
        }


def speed():
    table = dict(speeds())
    parts = [text(12, 26, "Milliseconds on one thread, in f32; lower is better. Each part has its own scale.", 13)]
    top = 36
    for title in next(iter(table.values())):
        top += 26
        parts.append(text(12, top, title, 15, weight="bold"))
        bars = [(name, times[title]) for name, times in table.items() if title in times]
        most = max(float(time) for _, time in bars)
        for name, time in bars:
            top += 22
            width = 430 * float(time) / most
            color = "blue" if name.startswith(OURS) else "grey"
            parts.append(text(228, top, name.replace("`", ""), 13, "end"))
            parts.append(box(236, top - 12, width, 15, color))
            parts.append(text(242 + width, top, time, 13))
        # The part's scale: a tick at each round number of milliseconds.
        top += 10
        unit = next(u for u in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if most / u <= 5)
        marks = [i * unit for i in range(int(most / unit) + 1)]
        at = [236 + 430 * mark / most for mark in marks]
        parts.append(path(f"M236 {top}H666" + "".join(f"M{x:.1f} {top}v4" for x in at), "edge-line"))
        top += 16
        parts += [text(x, top, f"{mark:g}", 11, "middle") for x, mark in zip(at, marks)]
        top += 6
    description = (
        "Bars for the guide's table of times on a CPU. This crate's forwards and evaluations are "
        "the shortest. Its layer_norm takes a fifteenth of layer_norm_slow's time for a forward "
        "and backward. In a whole block the bars hardly differ."
    )
    title = "Times of normalizations on a CPU"
    return picture(FOLDER / "speed", 760, top + 12, title, description, parts)


for file, drawn in (axes() | speed()).items():
    if sys.argv[1:] != ["--check"]:
        file.write_text(drawn)
    elif not file.exists() or file.read_text() != drawn:
        sys.exit(f"{file.name} is out of date: run python3 docs/pictures/draw.py")
