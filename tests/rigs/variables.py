"""The environment variables with which a user says whose code is tested; conftest.py has the table of them."""

from __future__ import annotations

import os


def folder_in(variable: str) -> str | None:
    """Return the folder that the variable names, or None. conftest.py has seen to it that it is the right kind."""
    return os.environ.get(variable) or None
