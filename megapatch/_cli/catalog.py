"""megapatch list and megapatch explain: the patches, as their docstrings and sites describe them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from .._engine.engine import this_process
from .._reporting import terminal
from ..errors import MegapatchError
from ..patch import Patch, PatchInfo

_ALIGNED = 10
"""Columns before the text of a docstring's sections."""
_HEADING = re.compile("[A-Z][a-z]+ {2,}")
_PARAGRAPH_ENDS = re.compile(r"\n(?! )")


def list_patches() -> int:
    """Print one line for each patch, in the catalogue's order."""
    patches = _all_patches()
    rows, columns = [(patch.name, patch.summary) for patch in patches], terminal.columns_of_a_terminal()
    # In a narrow table a summary would have few words a line.
    narrow = columns is not None and columns < max(len(name) for name, _ in rows) + 40
    terminal.write("\n".join(terminal.table(rows, columns, widest=2 if narrow else None)))
    return 0


def explain(names: Sequence[str]) -> int:
    """Print everything about the named patches, from their docstrings and sites."""
    patches = _all_patches()
    try:
        chosen = this_process().roster.matching_names(*names)
    except MegapatchError as error:
        terminal.note(str(error))
        return terminal.COULD_NOT_LOOK
    for patch in [patch for patch in patches if patch.name in chosen]:
        columns = terminal.columns_of_a_terminal()
        for paragraph in _PARAGRAPH_ENDS.split(f"{patch.name}: {inspect.cleandoc(patch.doc)}"):
            _write_fitted(paragraph, _ALIGNED if _HEADING.match(paragraph) else 0, columns)
        terminal.write()
        _write_fitted(f"Link      {patch.upstream or 'none: not reported'}", _ALIGNED, columns)
        if "Numbers" not in patch.sections:  # its own words are more precise
            changed = "changed" if patch.changes_numbers else "not changed"
            terminal.write(f"Numbers   {changed} in a run that did not crash")
        for module, paths in _sites(patch):
            _write_fitted(f"Site      {module}{': ' * bool(paths)}{', '.join(paths)}", _ALIGNED, columns)
        terminal.write()
    return 0


def _write_fitted(text: str, indent: int, columns: int | None) -> None:
    """Print text as it is, or, where a line of it is longer than a terminal, filled again."""
    if columns and max(map(len, text.splitlines()), default=0) > columns:
        first = text[:indent] if text[indent - 1 : indent] == " " else ""
        rest = " ".join(text[len(first) :].split())
        text = "\n".join(terminal.wrapped(rest, columns, first, " " * indent))
    terminal.write(text)


def _all_patches() -> list[PatchInfo]:
    """Return all patches; of those that are off, or cannot be loaded, the known facts."""
    this_process().load_all()
    return list(this_process().roster.known_patches)


def _sites(patch: PatchInfo) -> list[tuple[str, tuple[str, ...]]]:
    """Return the module and the targets of each site; of a patch that is not loaded the targets are not known."""
    if isinstance(patch, Patch):
        return [(site.module, site.paths) for site in patch.sites]
    return [(module, ()) for module in patch.modules]
