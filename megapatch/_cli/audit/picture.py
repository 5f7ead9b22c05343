"""The timeline of a summary as an SVG: over the steps of the run a row for each finding and kind of event."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from ..._printable import one_line
from ..._ranks import numbered
from ...audit._summary import Summary
from ...audit._words import happened, sentences, when

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 1160, 330, 24, 34, 26
_MOST_ROWS = 60
_MOST_LETTERS = 48  # of a label, in the columns left of the plot
_COLORS = {
    "finding": ("#c62828", "#ff8a80"),
    "note": ("#b26a00", "#ffc168"),
    "exception": ("#7b1fa2", "#d7a3ec"),
    "load": ("#1565c0", "#82b1ff"),
    "save": ("#2e7d32", "#90d494"),
    "export": ("#5d6d1e", "#c5d86d"),
    "forward-only": ("#8d8d6e", "#c9c9a8"),
    "offload": ("#4e5d94", "#a9b5e6"),
    "swap": ("#a0522d", "#e3a77f"),
    "sync": ("#00737f", "#7fd6de"),
    "model": ("#555555", "#bbbbbb"),
}
"""By kind of row: in light and in dark surroundings."""


class _Row(NamedTuple):
    """A row of the picture.

    Attributes:
        kind: of `_COLORS`.
        label: left of it.
        title: the text that a browser shows where the mouse is.
        steps: the marks.
        is_span: whether the marks are one span, from the first to the last.
    """

    kind: str
    label: str
    title: str
    steps: list[int]
    is_span: bool


def picture(summary: Summary) -> str:
    """Return the SVG; a reader's own colours, light or dark, decide about its colours."""
    rows = list(_rows(summary))
    left_out = len(rows) - _MOST_ROWS
    rows = rows[:_MOST_ROWS]
    bottom = _TOP + _ROW * max(len(rows), 1)
    height = bottom + (44 if left_out > 0 else 26)
    drawn = [*_axis(summary.steps, bottom)]
    for number, row in enumerate(rows):
        drawn += _draw(row, _TOP + _ROW * number + _ROW // 2, summary.steps)
    if left_out > 0:
        drawn.append(_text(_LEFT - 12, bottom + 34, f"and {left_out} more rows", "end"))
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    look = 'class="timeline" font-family="sans-serif" font-size="13" role="img" aria-label="timeline"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>'
    background = '<rect class="back" width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, f"<style>{_style()}</style>", background, *drawn, "</svg>", ""])


def _style() -> str:
    """Return the colours of dark surroundings; those of light ones are attributes, which every viewer knows."""
    dark = "".join(f".timeline .{kind}{{fill:{color}}}" for kind, (_, color) in _COLORS.items())
    return (
        "@media(prefers-color-scheme:dark){"
        f".timeline text{{fill:#ddd}}.timeline .back{{fill:#16181c}}.timeline line{{stroke:#3a3d44}}{dark}}}"
    )


def _rows(summary: Summary) -> Iterator[_Row]:
    for found in summary.found:
        kind = "note" if found.is_note else "finding"
        title = f"{found.rule}: {when(found)}. {' '.join(sentences(found))}"
        for span in found.spans:
            label = f"{found.rule}{' (note)' * found.is_note}, {numbered('rank', span.ranks)}"
            yield _Row(kind, label, title, [span.step, span.last_step], True)
    for events in summary.events:
        label = f"{events.kind}, {numbered('rank', events.ranks)}"
        yield _Row(events.kind, label, happened(events), events.steps, False)


def _x(step: int, steps: int) -> float:
    return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / max(steps, 1), 1)


def _axis(steps: int, bottom: int) -> Iterator[str]:
    yield _text(_LEFT - 12, _TOP - 14, "optimizer steps", "end")
    for step in _ticks(steps):
        x = _x(step, steps)
        yield f'<line x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{bottom}" stroke="#ddd"/>'
        yield _text(x, _TOP - 14, f"{step:,}")


def _ticks(steps: int) -> list[int]:
    """Return up to ten round numbers of steps, from 0 on."""
    sizes = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    distance = next(size for size in sizes if steps // size <= 10)
    return list(range(0, steps + 1, distance))


def _draw(row: _Row, y: int, steps: int) -> Iterator[str]:
    # A kind that this megapatch does not know has the colour of a model.
    kind = row.kind if row.kind in _COLORS else "model"
    look = f'class="{kind}" fill="{_COLORS[kind][0]}"'
    label = one_line(row.label)
    short = label if len(label) <= _MOST_LETTERS else f"{label[: _MOST_LETTERS - 1]}…"
    yield f"<g><title>{escape(one_line(row.title))}</title>"
    yield _text(_LEFT - 12, y + 5, short, "end")
    first, last = _x(min(row.steps, default=0), steps), _x(max(row.steps, default=0), steps)
    if row.is_span:
        place = f'x="{round(first - 4, 1)}" y="{y - 7}" width="{round(last - first + 8, 1)}" height="14"'
        yield f'<rect {look} {place} rx="3"/>'
    else:
        for step in dict.fromkeys(row.steps):
            yield f'<circle {look} cx="{_x(step, steps)}" cy="{y}" r="5"/>'
    yield "</g>"


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#222">{escape(words)}</text>'
