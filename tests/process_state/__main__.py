"""Print what a release has and docs/process-state.csv lacks, and the other way round.

python -m process_state PROJECT FOLDER ...

A folder is what would stand on PYTHONPATH: of ROLL's checkout that is two. Exits with 1 if there is anything.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .table import FILE, PACKAGES, news, read

if len(sys.argv) < 3 or sys.argv[1] not in PACKAGES:
    sys.exit(f"usage: python -m process_state {{{','.join(PACKAGES)}}} FOLDER ...")
found = news(sys.argv[1], map(Path, sys.argv[2:]), read(FILE.read_text()))
print("\n".join(found))
sys.exit(1 if found else 0)
