"""Run the grid, or pairs of it whose names have the given texts in them, and print what differs."""

from __future__ import annotations

import os
import sys
import tempfile
import time

from . import runs
from .compare import different
from .table import PROGRAMS, pairs


def main() -> int:
    chosen = [pair for pair in pairs() if all(text in " in ".join(pair) for text in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        plain = runs.run(chosen, runs.PLAIN, f"{folder}/plain")
        other = runs.run(chosen, os.environ.get("MODE", runs.PATCHED), f"{folder}/other")
    for pair in chosen:
        words = different(plain[pair], other[pair])
        if words.keys() != PROGRAMS[pair[0]].kinds:
            print(pair, "expected", PROGRAMS[pair[0]].kinds, words, flush=True)
    print(len(chosen), "programs", time.monotonic() - begin, "s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
