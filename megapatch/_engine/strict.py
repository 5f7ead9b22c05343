"""MEGAPATCH_STRICT: a site that needs attention is an error, and stays one.

An import hook that raises fails only the import during which it ran: the next one would succeed, unpatched.
So the target's module is kept out for good, by a finder that raises for it. The error is not an ImportError,
which code around optional imports would swallow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ..errors import StrictError
from ..patch import Status
from .record import Record
from .settings import DISABLE, STRICT


class _KeepsOut:
    """An import finder that raises for the modules in `errors` and finds no others."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self.errors:
            raise StrictError(self.errors[name])


_finder = _KeepsOut()


def raise_for(records: Iterable[Record]) -> None:
    """Raise for sites that need attention, now and at every later import of them.

    Raises:
        StrictError: if there are any.
    """
    bad = [record for record in records if record.status.needs_attention]
    for record in bad:
        if record.status not in (Status.OVERWRITTEN, Status.MISSED):  # that module has long been in use
            for name in record.modules:
                _keep_out(name, _not_in_place([record]))
    if bad:
        raise StrictError(_not_in_place(bad))


def _not_in_place(records: Iterable[Record]) -> str:
    """Say which patches are not in place, why, and how to do without them."""
    return "; ".join(
        f"{record.name} is {record.status.value} at {record.where}: {record.reason} "
        f"({STRICT} makes this an error; {DISABLE}={record.name} does without the patch)"
        for record in records
    )


def _keep_out(name: str, error: str) -> None:
    """Make every later import of the module raise StrictError; unload it if it is loaded."""
    _finder.errors[name] = error
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = sys.modules.pop(name, None)
    parent, _, child = name.rpartition(".")
    if module is not None and vars(sys.modules.get(parent, object)).get(child) is module:
        delattr(sys.modules[parent], child)  # `from parent import child` would find it there
