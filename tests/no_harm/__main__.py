"""Run the grid, or pairs of it whose names have the given texts in them, and print what differs."""

from __future__ import annotations

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
        other = runs.run(chosen, runs.PATCHED, f"{folder}/other")
    for program, layout in chosen:
        words = different(plain[program, layout], other[program, layout])
        if words.keys() != (expected := PROGRAMS[program].kinds(layout)):
            print((program, layout), "expected", expected, words, flush=True)
    print(len(chosen), "programs", time.monotonic() - begin, "s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
