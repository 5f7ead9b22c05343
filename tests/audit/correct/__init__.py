"""Correct trainers: the usual ones, of which nothing is found, and those of which something is noted.

The grid in tests/no_harm has others, and so has tests/audit/test_quiet.py.
"""

from __future__ import annotations

from .on_purpose import ON_PURPOSE
from .usual import USUAL

CORRECT = {**USUAL, **ON_PURPOSE}
