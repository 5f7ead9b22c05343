"""Measure what `megapatch run` adds to the start of a Python process that never imports a target.

    python benchmarks/run_startup.py

Starts Python in turns, plain and with the environment of `megapatch run`, hundreds of times. Prints medians side
by side and the promised limit; exits with 1 if the limit is broken. The times of whole processes are shown, but
they vary by more than the difference that is sought. The limit applies to the time inside a process, from before
to after Python looks for a sitecustomize.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

from megapatch._engine.engine import this_process
from megapatch.reach._run import reaching

LIMIT = 1e-3  # seconds
ROUNDS = 200
PROGRAMS = {"pass": "pass", "import json": "import json", "import subprocess": "import subprocess"}

# The last thing that site does when Python starts. With -S it is left to us.
INSIDE = """
import os, sys, time
start = time.perf_counter()
try: import sitecustomize
except ImportError: pass
print(time.perf_counter() - start)
"""


def whole_processes(kinds: dict[str, dict[str, str]]) -> None:
    print(f"{'a process':20} {'plain':>10} {'with run':>10} {'ratio':>7}   medians of {ROUNDS}, ms")
    for title, program in PROGRAMS.items():
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):  # in turns, so that a busy machine slows both
            for kind, environment in kinds.items():
                start = time.perf_counter()
                subprocess.run([sys.executable, "-c", program], env=environment, check=True)
                seconds[kind].append(time.perf_counter() - start)
        plain, with_run = (statistics.median(values) for values in seconds.values())
        print(f"{title:20} {plain * 1e3:10.2f} {with_run * 1e3:10.2f} {with_run / plain:7.3f}")


def inside(kinds: dict[str, dict[str, str]]) -> bool:
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind, environment in kinds.items():
            command = [sys.executable, "-S", "-c", INSIDE]
            shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            seconds[kind].append(float(shown.stdout))
    plain, with_run = (statistics.median(values) for values in seconds.values())
    print(f"{'the part that differs':20} {plain * 1e3:9.2f} {with_run * 1e3:10.2f} {with_run / plain:7.3f}")
    added = with_run - plain
    kept = added <= LIMIT
    print(f"  megapatch run adds {added * 1e3:.2f} ms; at most {LIMIT * 1e3:.0f}: {'kept' if kept else 'BROKEN'}")
    return kept


def main() -> bool:
    with tempfile.TemporaryDirectory() as cache:  # compiled, like installed packages
        plain = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH"):
            plain.pop(name, None)
        targets = {module for record in this_process().records for module in record.modules}
        kinds = {"plain": plain, "with run": reaching(plain, targets)}
        whole_processes(kinds)
        return inside(kinds)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
