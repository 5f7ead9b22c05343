"""The table of programs, each with the layouts in which it runs, and what a patch is meant to change of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from .layouts import LAYOUTS, here

PROGRAMS: dict[str, Program] = {}
LONGEST = 40
"""Seconds that a program may take."""


class Program(NamedTuple):
    """A function of a `Run`, which does what people do."""

    function: Any
    layouts: tuple[str, ...]
    changed: dict[str, tuple[str, ...]]  # by patch, the kinds of values that it is meant to change

    def kinds(self, layout):
        """Return the kinds of values that differ with megapatch in this layout, each of which has to."""
        found = {kind for kinds in self.changed.values() for kind in kinds}
        # of overlapping ones a run records parameters only once they are gathered, as weights
        return found - {"parameters"} if LAYOUTS[layout].options.get("overlap_param_gather") else found


def program(*layouts, changed=None):
    """Put the function into the table, by its name."""

    def add(function):
        name = function.__name__.replace("_", " ")
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(function, layouts, changed or {})
        return function

    return add


def pairs():
    """Return all (program, layout) that this Megatron can run."""
    return [(name, layout) for name, entry in PROGRAMS.items() for layout in here(entry.layouts)]


def in_ci(pairs):
    """Return those that CI runs: each program in the layout met least so far."""
    found = {}
    for number, program in enumerate(dict(pairs)):
        layouts = [layout for name, layout in pairs if name == program]
        turn = number % len(layouts)
        found[program] = min(layouts[turn:] + layouts[:turn], key=[*found.values()].count)
    return set(found.items())
