"""Draws the pictures of docs/paper.md from language.jsonl: python3 docs/paper/draw.py

Validation losses less LN's from the same seed, over the steps: the mean over seeds, and their range
as an area.
"""

from statistics import mean

from results import FULL, HERE, LANGUAGE

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 120, 36, 44

# Okabe and Ito's, which colour-blind people tell apart; their yellow is too light for a line.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"]


def differences(study, run, base_study, base):
    """Points of a line: step, mean, least and most over seeds."""
    curves, bases = curves_of(study, run), curves_of(base_study, base)
    points = []
    for step in sorted({step for curve in curves.values() for step in curve}):
        values = [
            curve[step] - bases[seed][step]
            for seed, curve in curves.items()
            if step in curve and step in bases.get(seed, {})
        ]
        if values:
            points.append((step, mean(values), min(values), max(values)))
    return points


def curves_of(study, run):
    """By seed, and by step."""
    found = [r for r in LANGUAGE if (r["study"], r["run"]) == (study, run) and r.get("val")]
    return {r["seed"]: dict(map(tuple, r["val"])) for r in found}


def ticks(low, high):
    """Round numbers from `low` to `high`, about five."""
    steps = (digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5))
    step = min(steps, key=lambda step: abs((high - low) / step - 5))
    first = int(low // step) + (low % step > 0)
    return [round(i * step, 9) for i in range(first, int(high // step) + 1)]


def shown(value):
    text = f"{abs(value):g}"
    return ("−" if value < 0 else "+" if value > 0 else "") + text


def apart(heights, gap=15):
    """These heights, from the top, moved so that no two are nearer than `gap`."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for above, below in zip(order, order[1:]):
        placed[below] = max(placed[below], placed[above] + gap)
    excess = max(0, max(placed) - (HEIGHT - BOTTOM))
    return [height - excess for height in placed]


def chart(name, title, lines):
    """Writes a chart of lines with labels. At most five."""
    lines = [(label, points) for label, points in lines if points]
    if not lines:
        return
    if len(lines) > len(COLORS):
        raise ValueError(f"{name}: {len(lines)} lines")
    all_points = [point for _, points in lines for point in points]
    last = max(step for step, *_ in all_points)
    low = min([0] + [point[2] for point in all_points])
    high = max([0] + [point[3] for point in all_points])
    margin = 0.05 * (high - low)
    low, high = low - margin, high + margin
    x = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * step / last
    y = lambda value: TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)
    text = lambda x, y, what, more="": f'<text x="{x:.1f}" y="{y:.1f}" {more}>{what}</text>'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        text(LEFT, 20, title, 'font-size="14"'),
        text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 8, "steps", 'text-anchor="middle"'),
    ]
    for value in ticks(low, high):
        at, color = y(value), "#888" if value == 0 else "#ddd"
        out.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="{color}"/>')
        out.append(text(LEFT - 6, at + 4, shown(value), 'text-anchor="end"'))
    for step in ticks(0, last):
        out.append(text(x(step), HEIGHT - BOTTOM + 18, f"{step:g}", 'text-anchor="middle"'))
    labels = apart([y(points[-1][1]) for _, points in lines] + [y(0)])
    for color, (label, points), at in zip(COLORS, lines, labels):
        place = lambda step, value: f"{x(step):.1f} {y(value):.1f}"
        edge = [place(step, least) for step, _, least, _ in points]
        edge += [place(step, most) for step, _, _, most in reversed(points)]
        out.append(f'<path d="M{"L".join(edge)}Z" fill="{color}" fill-opacity="0.15"/>')
        line = "L".join(place(step, middle) for step, middle, _, _ in points)
        out.append(f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        out.append(text(WIDTH - RIGHT + 8, at + 4, label, f'fill="{color}"'))
    out.append(text(WIDTH - RIGHT + 8, labels[-1] + 4, "LN", 'fill="#555"'))
    (HERE / f"{name}.svg").write_text("\n".join(out + ["</svg>"]) + "\n")


LN_SCALE1 = "layer-scale1"


def main():
    rates = {"1e-3": "1e-3", "2e-3": "2e-3", "4e-3": "4e-3", "8e-3": "8e-3"}
    rates["2e-3-none"] = "2e-3, no warm-up"
    chart(
        "sweep",
        "PN less LN at the same learning rate, nats a word; 4e-3 over all its seeds",
        [
            (label, differences(f"sweep-{rate}", "power-scale1", f"sweep-{rate}", LN_SCALE1))
            for rate, label in rates.items()
        ],
    )
    chart(
        "words-30",
        "Words, 30 epochs: validation loss less LN's, nats a word",
        [
            (name, differences(f"words-30-{norm}", f"{norm}-scale1", "words-30-layer", LN_SCALE1))
            for norm, name in FULL.items()
            if norm != "layer"
        ],
    )


if __name__ == "__main__":
    main()
