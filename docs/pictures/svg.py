"""What the pictures of README and docs/paper.md share: colors for light and dark pages, and text.

A picture names its colors by classes, such as `ink` or `blue`. It is written twice, as `NAME.svg`
with the colors of a light page and as `NAME-dark.svg`, and a page shows the right one with
`<picture>`. One file with both would follow the reader's operating system, also where a site such
as GitHub is set to the other theme, and then stand as a dark box on a light page.
"""

from html import escape

# Name: on a light page, and on a dark one. Those of lines are near Okabe and Ito's, which
# colour-blind people tell apart.
COLORS = {
    "page": ("#ffffff", "#0d1117"),
    "ink": ("#222222", "#e6edf3"),
    "faint": ("#e8e8e8", "#30363d"),
    "edge": ("#777777", "#9198a1"),
    "blue": ("#0072b2", "#56b4e9"),
    "orange": ("#d55e00", "#f0883e"),
    "green": ("#008a64", "#3fc99a"),
    "purple": ("#a8458a", "#dd93c4"),
    "gold": ("#946c00", "#e0b83e"),
    "grey": ("#9a9a9a", "#7d8590"),
}


def style(page):
    rules = "".join(
        f".{name}{{fill:{colors[page]}}}.{name}-line{{fill:none;stroke:{colors[page]}}}"
        for name, colors in COLORS.items()
    )
    return f"<style>text{{font-family:sans-serif}}{rules}</style>"


def picture(path, width, height, title, description, parts):
    """The two files of a picture: their texts by path. Screen readers read title and description."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title desc">'
    )

    def file(page):
        lines = [
            head,
            f'<title id="title">{escape(title, False)}</title>',
            f'<desc id="desc">{escape(description, False)}</desc>',
            style(page),
            box(0, 0, width, height, "page"),
            *parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    return {path.with_suffix(".svg"): file(0), path.with_name(f"{path.stem}-dark.svg"): file(1)}


def text(x, y, words, size=13, anchor="start", weight="normal", color="ink", more=""):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{color}" font-size="{size}" '
        f'text-anchor="{anchor}" font-weight="{weight}"{more}>{escape(words, False)}</text>'
    )


def box(x, y, width, height, color, more=""):
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'class="{color}"{more}/>'
    )


def dot(x, y, color, radius=3.5, more=""):
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{color}"{more}/>'


def path(points, color, more=""):
    """A line through points, or along a path that is given as text."""
    if not isinstance(points, str):
        points = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="{points}" class="{color}"{more}/>'
