"""Search for sequences after which a process differs from one that has done only what counts.

Prints each one that differs, as short as it gets, to be pasted into a test. Exits with 0 if none differs, with 1
if one does. The defects in way_back/known.py are left out, unless --unpatched runs Megatron as it is.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from rigs.megatron.options import UNPATCHED

from .known import is_free
from .layouts import layouts_here
from .search import drawn, run, shrunk

BATCH = 40


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m way_back", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="for how long (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="where to begin (default: 0)")
    parser.add_argument("--layout", action="append", choices=layouts_here(), help="only this one; may be repeated")
    parser.add_argument("--unpatched", action="store_true", help="Megatron as it is, with what is known")
    options = parser.parse_args()
    env = UNPATCHED if options.unpatched else {}
    allowed = (lambda *_: True) if options.unpatched else is_free
    end, shown, count = time.monotonic() + 60 * options.minutes, set(), 0
    for number in itertools.count(options.seed):
        if time.monotonic() > end:
            break
        found = run(drawn(number, BATCH, options.layout or layouts_here(), allowed), env)
        count += len(found)
        for sequence, differences in found.items():
            for kind in differences:
                if time.monotonic() > end or (sequence.layout, kind) in shown:
                    continue
                shown.add((sequence.layout, kind))
                shorter, words = shrunk(sequence, kind, env)
                print(f"{kind}: {words}\n    {shorter!r}", flush=True)
    print(f"{count} sequences, {len(shown)} kinds of differences by layout")
    return bool(shown)


if __name__ == "__main__":
    sys.exit(main())
