"""The table of programs, each with the layouts in which it runs, and what a patch is meant to change of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from .layouts import LAYOUTS, here

PROGRAMS: dict[str, Program] = {}
OFTEN, SELDOM, LONGEST = 2, 5, 40
"""CI runs one in so many of the programs, and of those that run seldom; seconds that a program may take."""


class Program(NamedTuple):
    """A function of a `Run`, which does what people do."""

    function: Any
    layouts: tuple[str, ...]
    changed: dict[str, tuple[str, ...]]  # by patch, the kinds of values that it is meant to change
    seldom: bool  # whether CI runs one of several such programs

    def kinds(self, layout):
        """Return the kinds of values that differ with megapatch in this layout, each of which has to."""
        found = {kind for kinds in self.changed.values() for kind in kinds}
        # of overlapping ones a run records parameters only once they are gathered, as weights
        return found - {"parameters"} if LAYOUTS[layout].options.get("overlap_param_gather") else found


def program(*layouts, changed=None, seldom=False):
    """Put the function into the table, by its name."""

    def add(function):
        name = function.__name__.replace("_", " ")
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(function, layouts, changed or {}, seldom)
        return function

    return add


def pairs():
    """Return all (program, layout) that this Megatron can run."""
    return [(name, layout) for name, entry in PROGRAMS.items() for layout in here(entry.layouts)]


def in_ci(pairs):
    """Return those that CI runs: every second program in the layout met least so far, of some one in SELDOM."""
    found = {}
    programs = dict(pairs)
    seldom = [name for name in programs if PROGRAMS[name].seldom]
    often = [name for name in programs if name not in seldom]
    for number, program in enumerate([*often[::OFTEN], *seldom[::SELDOM]]):
        layouts = [layout for name, layout in pairs if name == program]
        turn = number % len(layouts)
        found[program] = min(layouts[turn:] + layouts[:turn], key=[*found.values()].count)
    return set(found.items())
