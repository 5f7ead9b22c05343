"""The environment variables that say whose code is tested; conftest.py has the table of them."""

from __future__ import annotations

import os


def folder_in(variable: str) -> str | None:
    """Return the folder that the variable names, or None. conftest.py has checked that it is of the right kind."""
    return os.environ.get(variable) or None
