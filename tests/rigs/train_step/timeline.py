"""A profiler's view of a forward-backward call: the reduces that begin in it, and a picture."""

from __future__ import annotations

REDUCES = ("nccl", "c10d::allreduce")
WIDTH, HEIGHT, LEFT = 1000, 24, 100


def reduces_of(events):
    return [event for event in events if event[0].startswith(REDUCES)]


def backward_of(events):
    """Return the events of the backward pass: autograd's on CPU; on a GPU all kernels that reduce nothing."""
    found = [event for event in events if event[0].startswith("autograd::engine::evaluate_function")]
    return found or [event for event in events if event not in reduces_of(events)]


def hidden(events):
    """Return the number of reduces that begin before the backward pass ends."""
    end = max(end for _, _, end in backward_of(events))
    return sum(start < end for _, start, _ in reduces_of(events))


def timeline(events):
    """Draw reduces and backward pass as bars over time, as SVG."""
    rows = (("reduce", "#c33", reduces_of(events)), ("backward", "#36c", backward_of(events)))
    first = min(start for *_, bars in rows for _, start, _ in bars)
    scale = WIDTH / max(1e-9, max(end for *_, bars in rows for *_, end in bars) - first)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + LEFT}" height="{2 * HEIGHT}">']
    for row, (title, color, bars) in enumerate(rows):
        lines.append(f'<text x="0" y="{(row + 0.7) * HEIGHT}" font-size="14">{title}</text>')
        for _, start, end in bars:
            x, y, width = LEFT + (start - first) * scale, row * HEIGHT + 4, max(1, (end - start) * scale)
            lines.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT - 8}" fill="{color}"/>')
    return "\n".join([*lines, "</svg>", ""])
