"""Correct trainers: the usual ones, of which nothing is found, and those of which something is noted.

The grid in tests/no_harm has others, in more layouts.
"""

from __future__ import annotations

from .batches import BATCHES
from .bending import BENDING
from .loops import LOOPS
from .on_purpose import ON_PURPOSE
from .optimizers import OPTIMIZERS
from .usual import USUAL
from .weights import WEIGHTS

TABLES = (USUAL, ON_PURPOSE, BATCHES, WEIGHTS, OPTIMIZERS, LOOPS, BENDING)
CORRECT = {name: trainer for table in TABLES for name, trainer in table.rows.items()}
