"""Measure what megapatch costs: a patched call, the import, the search for holders of a patched function.

    python benchmarks/overhead.py

Prints times of one run side by side, their ratios, and the promised limits; exits with 1 if a limit is broken.
Times are the best of many, because other load on the machine can only add to them. Needs megapatch. If torch is
installed, the search runs in a process that has imported it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
import timeit
import types

import wrapt

from megapatch import NEEDED, Patch, Site, Verdict
from megapatch._engine import holders
from megapatch._engine.engine import Engine
from megapatch._engine.settings import Settings

CALL_LIMIT, IMPORT_LIMIT, SWEEP_LIMIT = 200e-9, 10e-3, 20e-3  # seconds


def plain(tensor, scale=1.0):
    return tensor


def closure(function):
    @functools.wraps(function)
    def patched_function(*args, **kwargs):
        return function(*args, **kwargs)

    return patched_function


def patched(function):
    """Return the function as the engine installs it."""
    module = types.ModuleType("megapatch_benchmark")
    module.function = function
    sys.modules[module.__name__] = module
    site = Site(module.__name__, lambda module: Verdict(NEEDED, ""), {"function": closure})
    Engine([Patch("benchmark.call", "A call.", "", (site,))], Settings()).activate()
    assert module.function is not function
    return module.function


def proxy(function):
    return wrapt.FunctionWrapper(function, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))


def calls() -> bool:
    kinds = {"plain": plain, "closure": closure(plain), "patched": patched(plain), "wrapt proxy": proxy(plain)}
    number, seconds = 50_000, {name: [] for name in kinds}
    for _ in range(21):  # in turns, so that a busy machine slows all of them
        for name, function in kinds.items():
            seconds[name].append(timeit.timeit(lambda f=function: f(1, scale=2.0), number=number) / number)
    best = {name: min(values) for name, values in seconds.items()}
    print("a call")
    for name, value in best.items():
        print(f"  {name:12} {value * 1e9:7.0f} ns  {value / best['plain']:5.2f} x plain")
    return _limit("a patched call adds", best["patched"] - best["plain"], CALL_LIMIT, "ns", 1e9)


IMPORT = """
import time
start = time.perf_counter(); import wrapt; wrapt_done = time.perf_counter(); import megapatch
print(wrapt_done - start, time.perf_counter() - wrapt_done)
"""


def imports() -> bool:
    with tempfile.TemporaryDirectory() as cache:  # compiled, like installed packages
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        runs = []
        for _ in range(22):
            shown = subprocess.run(
                [sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True
            )
            runs.append([float(value) for value in shown.stdout.split()])
    of_wrapt, of_megapatch = (min(values) for values in zip(*runs[2:], strict=True))
    print("\nimports")
    print(f"  {'wrapt':12} {of_wrapt * 1e3:7.1f} ms")
    print(f"  {'megapatch':12} {of_megapatch * 1e3:7.1f} ms  {of_megapatch / of_wrapt:5.2f} x wrapt")
    return _limit("import megapatch adds", of_megapatch, IMPORT_LIMIT, "ms", 1e3)


def sweep() -> bool:
    start = time.perf_counter()
    try:
        import torch  # noqa: F401
    except ImportError:
        print("\n(torch is not installed: the search for holders runs over the other modules)")
    importing = time.perf_counter() - start
    seconds = []
    for _ in range(21):
        start = time.perf_counter()
        found = holders.find([plain])
        seconds.append(time.perf_counter() - start)
    assert found
    best, names = (
        min(seconds),
        sum(len(vars(module)) for module in sys.modules.values() if hasattr(module, "__dict__")),
    )
    print(f"\nholders, {len(sys.modules)} modules with {names} names")
    print(f"  {'import torch':12} {importing * 1e3:7.1f} ms")
    print(f"  {'a search':12} {best * 1e3:7.1f} ms  {best / importing:7.4f} x import torch")
    return _limit("a search, once for all patches of a module, takes", best, SWEEP_LIMIT, "ms", 1e3)


def _limit(what: str, value: float, limit: float, unit: str, scale: float) -> bool:
    kept = value <= limit
    print(f"  {what} {value * scale:.1f} {unit}; at most {limit * scale:.0f}: {'kept' if kept else 'BROKEN'}")
    return kept


if __name__ == "__main__":
    sys.exit(0 if all([calls(), imports(), sweep()]) else 1)
