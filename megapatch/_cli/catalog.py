"""megapatch list and megapatch explain: the patches, as their docstrings and sites describe them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from typing import Any

from .._engine.advice import sections
from .._engine.engine import this_process
from .._reporting import terminal
from ..errors import MegapatchError
from ..patch import Patch
from ..patches import PATCHES

SCHEMA = 1
"""Version of the JSON of both commands. It grows when a key is removed or changes its meaning."""


def list_patches(markdown: bool, as_json: bool = False) -> int:
    """Print one line for each patch, in the catalogue's order."""
    if markdown:
        terminal.write(markdown_table(PATCHES))
        return 0
    this_process().load_all()
    patches = this_process().patches
    if as_json:
        _write_json([_summary(patch) for patch in patches])
        return 0
    width = max(len(patch.name) for patch in patches)
    for patch in patches:
        terminal.write(f"{patch.name:{width}}  {patch.summary}")
    return 0


def markdown_table(patches: Iterable[Patch]) -> str:
    """Return a table of patches: name, what each makes right, where its defect was reported."""
    rows = ["| patch | what it makes right | upstream | changes numbers |", "| --- | --- | --- | --- |"]
    for patch in patches:
        numbers = "yes" if patch.changes_numbers else "no"
        rows.append(f"| `{patch.name}` | {patch.summary} | <{patch.upstream}> | {numbers} |")
    return "\n".join(rows)


def explain(names: Sequence[str], as_json: bool = False) -> int:
    """Print everything about the named patches, from their docstrings and sites."""
    this_process().load_all()
    try:
        chosen = this_process().named(*names)
    except MegapatchError as error:
        terminal.note(str(error))
        return 2
    patches = [patch for patch in this_process().patches if patch.name in chosen]
    if as_json:
        _write_json([_description(patch) for patch in patches])
        return 0
    for patch in patches:
        terminal.write(f"{patch.name}: {inspect.cleandoc(patch.doc)}\n")
        terminal.write(f"Link      {patch.upstream}")
        if "Numbers" not in sections(patch.doc):  # its own words are more precise
            changed = "changed" if patch.changes_numbers else "not changed"
            terminal.write(f"Numbers   {changed} in a run that did not crash")
        for site in patch.sites:
            terminal.write(f"Site      {site.module}{': ' * bool(site.paths)}{', '.join(site.paths)}")
        terminal.write()
    return 0


def names_and_globs() -> list[str]:
    """Return the names of megapatch's own patches, and a glob for each family."""
    return [*(patch.name for patch in PATCHES), *dict.fromkeys(f"{patch.family}.*" for patch in PATCHES)]


def _summary(patch: Patch) -> dict[str, Any]:
    return {
        "name": patch.name,
        "family": patch.family,
        "summary": patch.summary,
        "upstream": patch.upstream,
        "changes_numbers": patch.changes_numbers,
    }


def _description(patch: Patch) -> dict[str, Any]:
    return {
        **_summary(patch),
        "sections": {heading.lower(): text for heading, text in sections(patch.doc).items()},
        "sites": [{"module": site.module, "targets": list(site.paths)} for site in patch.sites],
    }


def _write_json(patches: list[dict[str, Any]]) -> None:
    terminal.write(json.dumps({"schema": SCHEMA, "patches": patches}, indent=2))
