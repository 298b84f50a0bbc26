"""Writes docs/paper.md, its tables and pictures, and what other pages take from the recorded files.

    python3 docs/paper/write.py           writes them
    python3 docs/paper/write.py --check   fails if they say anything else

A template has expressions in braces, such as {CD("power", "layer")}, which results.py defines.
The pictures are drawn by draw.py. Numbers outside of braces are settings and quotations.
"""

import re
import sys
import textwrap
from pathlib import Path

import draw
import results

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# What is written: a file, how its part begins and what comes after it, and the template.
TEXTS = [
    ("docs/paper.md", None, None, "findings.md.in"),
    ("docs/paper/tables.md", None, None, "tables.md.in"),
    ("docs/paper/reproduce.md", None, None, "reproduce.md.in"),
    ("docs/guide/choosing.md", None, None, "choosing.md.in"),
    ("README.md", "## PowerNorm\n", "## ", "powernorm.md.in"),
    ("docs/guide/training.md", "## Which settings\n", "## ", "settings.md.in"),
]

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
EXPRESSION = re.compile(r"\{([^{}]+)\}")


class Template:
    """The text, and how many of its numbers come from the records, and how many are given."""

    def __init__(self, path):
        self.path, self.computed, self.given = path, 0, 0

    def line(self, line):
        def value(match):
            try:
                value = str(eval(match[1], vars(results)))
            except Exception as error:
                sys.exit(f"{self.path.name}: {{{match[1]}}}: {error!r}")
            self.computed += len(NUMBER.findall(value))
            return value

        # Code and links have names, and no results.
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", EXPRESSION.sub("", line))
        self.given += len(NUMBER.findall(prose))
        return EXPRESSION.sub(value, line)

    def text(self):
        blocks = []
        for block in re.split(r"(^```.*?^```$)", self.path.read_text(), flags=re.M | re.S):
            if block.startswith("```"):
                blocks.append(block)
                continue
            blocks += [self.paragraph(part) for part in re.split(r"(\n\n+)", block)]
        return "".join(blocks)

    def paragraph(self, text):
        """A table or a heading as it is, and prose in lines of 100 columns."""
        if not text.strip() or text.lstrip()[0] in "|#!<":
            return "\n".join(self.line(line) for line in text.split("\n"))
        start, end = re.match(r"\n*", text)[0], re.search(r"\n*$", text)[0]
        items = re.split(r"\n(?=- )", text.strip("\n"))
        return start + "\n".join(map(self.wrapped, items)) + end

    def wrapped(self, item):
        indent = "  " if item.startswith("- ") else ""
        text = self.line(" ".join(item.split()))
        return textwrap.fill(
            text,
            100,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )


def replaced(page, begins, after, text):
    """The page with `text` as the part that begins so, up to the line that begins with `after`."""
    if begins is None:
        return text
    begin = page.index("\n" + begins) + 1
    end = page.index("\n" + after, begin) + 1
    return page[:begin] + text + page[end:]


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    texts, templates = {}, []
    for file, begins, after, name in TEXTS:
        path, template = ROOT / file, Template(HERE / name)
        page = "" if begins is None else texts.get(path) or path.read_text()
        texts[path] = replaced(page, begins, after, template.text())
        templates.append(template)
    for path, text in (texts | draw.pictures()).items():
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            show(path, text)
    for template in templates:
        print(
            f"{template.path.name}: {template.computed} numbers follow from the records, "
            f"{template.given} are settings and quotations"
        )


def show(path, text):
    """Fails with the first line that differs."""
    theirs = path.read_text().splitlines() if path.exists() else []
    ours = text.splitlines()
    for i in range(max(len(theirs), len(ours))):
        pair = [lines[i] if i < len(lines) else "(the end)" for lines in (theirs, ours)]
        if pair[0] != pair[1]:
            sys.exit(
                f"{path.relative_to(ROOT)}, line {i + 1}, does not follow from the records:\n"
                f"  it says {pair[0]}\n  and not {pair[1]}"
            )


if __name__ == "__main__":
    main()
