"""The picture of docs/streaming.md, drawn from the table beside it, which a test holds to the simulation.

python -m rigs.streaming.bias_picture      writes docs/rollout_bias.svg
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[3] / "docs"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 56, 16, 40, 48
MOST_X, MOST_Y = 14, 4  # seconds
COLORS = {"windowed": "#e45756", "ready_first": "#f58518", "weight_fifo": "#4c78a8"}


class Row(NamedTuple):
    """A row of the table: of one policy and staleness, the mean seconds."""

    pick: str
    max_staleness: int
    generated: float
    trained: float
    step: float


def rows():
    """Read the table."""
    row = re.compile(r"\| `(\w+)` \| (\d+) \| ([\d.]+) \([\d.]+\) \| ([\d.]+) \([\d.]+\) \| \d+% \| ([\d.]+) \|")
    found = row.findall((DOCS / "streaming.md").read_text())
    return [Row(pick, int(staleness), *map(float, seconds)) for pick, staleness, *seconds in found]


def x(seconds):
    return round(LEFT + seconds / MOST_X * (WIDTH - LEFT - RIGHT), 1)


def y(seconds):
    return round(HEIGHT - BOTTOM - seconds / MOST_Y * (HEIGHT - TOP - BOTTOM), 1)


def text(at_x, at_y, words, anchor="middle", color="#333", more=""):
    return f'<text x="{at_x}" y="{at_y}" text-anchor="{anchor}" fill="{color}"{more}>{words}</text>'


def line(x1, y1, x2, y2, color="#ddd", more=""):
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}"{more}/>'


def axes():
    for seconds in range(0, MOST_X + 1, 2):
        yield line(x(seconds), y(0), x(seconds), y(MOST_Y))
        yield text(x(seconds), y(0) + 16, seconds)
    for seconds in range(MOST_Y + 1):
        yield line(x(0), y(seconds), x(MOST_X), y(seconds))
        yield text(LEFT - 8, y(seconds) + 4, seconds, "end")
    yield text(x(MOST_X / 2), HEIGHT - 12, "wall time of a step, s")
    middle = y(MOST_Y / 2)
    turned = f' transform="rotate(-90 16 {middle})"'
    yield text(16, middle, "mean duration of a trained rollout, s", more=turned)


def points(table):
    for pick, color in COLORS.items():
        for row in (row for row in table if row.pick == pick):
            at = x(row.step), y(row.trained)
            yield f'<circle cx="{at[0]}" cy="{at[1]}" fill="{color}" r="5"/>'
            yield label(row, *at, color)


def label(row, at_x, at_y, color):
    """Return the point's name, where there is room for it."""
    name = f"{row.pick} {row.max_staleness}"
    if row.pick == "weight_fifo":
        return text(at_x, at_y - 10, row.max_staleness, color=color)
    if name == "windowed 1":
        return text(at_x, at_y - 10, name, color=color)
    return text(at_x + 10, at_y + 4, name, "start", color)


def picture(table):
    """Return the SVG."""
    generated = max(row.generated for row in table if row.pick == "weight_fifo")
    drawn = [
        text(
            LEFT,
            20,
            "Policies and their max_staleness: to the left is fast, on the dashed line is no bias",
            "start",
        ),
        *axes(),
        line(x(0), y(generated), x(MOST_X), y(generated), "#333", ' stroke-dasharray="5 4"'),
        text(x(MOST_X) - 4, y(generated) + 18, "all rollouts that ended", "end"),
        text(x(5.6), y(generated) - 10, "weight_fifo", color=COLORS["weight_fifo"]),
        *points(table),
    ]
    style = 'font-family="sans-serif" font-size="12"'
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>", ""])


if __name__ == "__main__":
    (DOCS / "rollout_bias.svg").write_text(picture(rows()))
