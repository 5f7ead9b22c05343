"""Count the lines of megapatch that a training process loads, with Megatron alone and with the audit as well.

    python benchmarks/lines_loaded.py [--modules]

Each process imports megapatch and every module of Megatron's that patches target, as far as this release has
them. `--modules` prints the modules with their lines. Exits with 1 if a promised limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

LIMITS = {"Megatron alone": ("", 9_800), "with the audit": ("1", 16_000)}
"""By process: MEGAPATCH_AUDIT, and the most lines that it may load."""

PROCESS = """
import contextlib, importlib, json, sys
import megapatch
from megapatch.patches._catalogue import CATALOGUE

for name in dict.fromkeys(name for names in CATALOGUE["megatron"].values() for name in names):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
files = {n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "megapatch"}
print(json.dumps({name: len(open(file).readlines()) for name, file in files.items() if file}))
"""


def lines_loaded(audit: str) -> dict[str, int]:
    """Return the lines of each module of megapatch that a process has loaded."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPATCH_")}
    command = [sys.executable, "-c", PROCESS]
    environment |= {"MEGAPATCH_AUDIT": audit} if audit else {}
    shown = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, int] = json.loads(shown.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", action="store_true", help="print the modules, too")
    with_modules = parser.parse_args().modules
    are_kept = True
    for title, (audit, limit) in LIMITS.items():
        found = lines_loaded(audit)
        total = sum(found.values())
        are_kept &= total <= limit
        print(f"{title}: {total:,} lines in {len(found)} modules (limit {limit:,})")
        for name in sorted(found, key=found.__getitem__, reverse=True) if with_modules else ():
            print(f"  {found[name]:6,} {name}")
    return 0 if are_kept else 1


if __name__ == "__main__":
    sys.exit(main())
