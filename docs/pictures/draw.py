#!/usr/bin/env python3
"""Draws the README's pictures: axes.svg, and speed.svg from the README's table of speeds.

    python3 docs/pictures/draw.py
"""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
README = FOLDER.parent.parent / "README.md"
FONT = 'font-family="sans-serif"'
BLUE, ORANGE, GREY, INK = "#1f77b4", "#f2a65a", "#e8e8e8", "#222222"


def text(x, y, words, size=13, anchor="start", weight="normal"):
    return (
        f'<text x="{x}" y="{y}" {FONT} font-size="{size}" fill="{INK}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{words}</text>'
    )


def box(x, y, width, height, color, stroke="none"):
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{color}" stroke="{stroke}"/>'
    )


def save(name, width, height, parts):
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">'
    )
    parts = [head, box(0, 0, width, height, "white"), *parts, "</svg>"]
    (FOLDER / name).write_text("\n".join(parts) + "\n")


def grid(left, top, rows, columns, color):
    """Tokens downwards, channels to the right."""
    cell = 16
    return [
        box(left + column * cell, top + row * cell, cell, cell, color(row, column), "white")
        for row in range(rows)
        for column in range(columns)
    ]


def axes():
    """Which numbers a statistic averages over, by color."""
    rows, columns, cell = 6, 8, 16
    row_of_one, column_of_one = 2, 3
    one_token = lambda row, column: BLUE if row == row_of_one else GREY
    one_channel = lambda row, column: BLUE if column == column_of_one else GREY
    divided = lambda row, column: ORANGE if column == column_of_one else GREY
    panels = [
        ("LayerNorm", [(one_token, "")],
         ["mean and variance of one token,", "over its channels"]),
        ("BatchNorm", [(one_channel, "")],
         ["mean and variance of one channel,", "over the tokens of this batch"]),
        ("PowerNorm", [(one_channel, "batch t−2"), (one_channel, "t−1"), (divided, "t")],
         ["mean square of one channel, over the tokens of past batches;", "no mean is subtracted"]),
    ]
    parts, left = [], 40
    for name, batches, lines in panels:
        parts.append(text(left, 28, name, 16, weight="bold"))
        x = left
        for color, label in batches:
            parts += grid(x, 50, rows, columns, color)
            parts.append(box(x, 50, columns * cell, rows * cell, "none", "#888888"))
            parts.append(text(x + columns * cell / 2, 162, label or "channels", 12, "middle"))
            x += columns * cell + 10
        parts += [text(left, 190 + 18 * i, line) for i, line in enumerate(lines)]
        left += 245
    parts += [
        box(40, 226, 12, 12, BLUE),
        text(58, 237, "averaged over"),
        box(170, 226, 12, 12, ORANGE),
        text(188, 237, "divided by the average of the batches before it"),
        f'<text x="28" y="98" {FONT} font-size="12" fill="{INK}" text-anchor="middle" '
        f'transform="rotate(-90 28 98)">tokens</text>',
    ]
    save("axes.svg", 960, 252, parts)


def speeds():
    """The README's table of speeds: a row's name, and its numbers in milliseconds."""
    section = README.read_text().split("## Speed")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    titles = [cell.strip() for cell in rows[0][1:]]
    for cells in rows[2:]:
        numbers = [re.match(r"[\d.]+", cell.strip()) for cell in cells[1:]]
        yield cells[0].strip(), {
            title: float(number.group()) for title, number in zip(titles, numbers) if number
        }


def speed():
    table = dict(speeds())
    parts, top = [], 14
    for title in next(iter(table.values())):
        top += 24
        parts.append(text(12, top, f"{title}, ms", 15, weight="bold"))
        bars = [(name, times[title]) for name, times in table.items() if title in times]
        most = max(time for _, time in bars)
        for name, time in bars:
            top += 22
            color = BLUE if name.startswith("PowerNorm") else "#9a9a9a"
            parts.append(text(228, top, name.replace("`", ""), 12, "end"))
            parts.append(box(236, top - 12, 430 * time / most, 15, color))
            parts.append(text(242 + 430 * time / most, top, f"{time:g}", 12))
        top += 10
    save("speed.svg", 760, top + 12, parts)


axes()
speed()
