"""The table of programs, each with the layouts in which it runs, and what a patch is meant to change of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from .layouts import here

PROGRAMS: dict[str, Program] = {}


class Program(NamedTuple):
    """A function of a `Run`, which does what people do, and what differs with megapatch: kinds, by layout."""

    function: Any
    layouts: tuple[str, ...]
    patch: str = ""
    changes: tuple[str, ...] = ()  # kinds of values that differ, if there is a patch that is meant to change them


def program(*layouts, patch="", changes=()):
    """Put the function into the table, by its name."""

    def add(function):
        name = function.__name__.strip("_").replace("_", " ")
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(function, layouts, patch, changes)
        return function

    return add


def pairs():
    """Return all (program, layout) that this Megatron can run."""
    return [(name, layout) for name, entry in PROGRAMS.items() for layout in here(entry.layouts)]
