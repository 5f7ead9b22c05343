"""Measure what megapatch costs: a patched call, the import, the search for holders of a patched function.

    python benchmarks/overhead.py

Prints times of one run side by side, and judges by their ratios; exits with 1 if a promised limit is broken. Times
are the best of many, because other load on the machine can only add to them. Needs megapatch. If torch is
installed, the search runs in a process that has imported it.
"""

from __future__ import annotations

import functools
import json
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
from megapatch._engine.target import ReplacedTarget
from megapatch.patches._catalogue import CATALOGUE

# Ratios, as times differ from machine to machine, and on a busy one from minute to minute.
CLOSURE_LIMIT, PROXY_LIMIT = 1.1, 0.3  # of a call of a bare closure, and of what a wrapt proxy adds to a call
IMPORT_LIMIT = 0.12  # of importing wrapt
FAMILIES_LIMIT = 1.25  # with 80 patches more
SEARCH_LIMIT, LOOK_LIMIT = 0.05, 0.001  # of importing torch


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
    added = {name: value - best["plain"] for name, value in best.items()}
    return all(
        [
            _limit("a patched call, of a bare closure's", best["patched"] / best["closure"], CLOSURE_LIMIT),
            _limit("what it adds, of what a proxy adds", added["patched"] / added["wrapt proxy"], PROXY_LIMIT),
        ]
    )


IMPORT = """
import json, sys, time, types
catalogue = types.ModuleType("megapatch.patches._catalogue")  # in the place of megapatch's own
catalogue.CATALOGUE, catalogue.of_family = json.loads(sys.argv[1]), tuple
sys.modules[catalogue.__name__] = catalogue
start = time.perf_counter(); import wrapt; wrapt_done = time.perf_counter(); import megapatch
print(wrapt_done - start, time.perf_counter() - wrapt_done)
"""
MORE = {
    f"family{family}": {f"family{family}.patch-{n}": [f"family{family}.module{n}"] for n in range(8)}
    for family in range(10)
}


def imports() -> bool:
    with tempfile.TemporaryDirectory() as cache:  # compiled, like installed packages
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        kinds = {"megapatch": CATALOGUE, "ten families more": {**CATALOGUE, **MORE}}
        runs = {name: [] for name in kinds}
        for _ in range(22):
            for name, catalogue in kinds.items():
                command = [sys.executable, "-c", IMPORT, json.dumps(catalogue)]
                shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                runs[name].append([float(value) for value in shown.stdout.split()])
    of_wrapt = min(wrapt_alone for wrapt_alone, _ in runs["megapatch"][2:])
    best = {name: min(value for _, value in values[2:]) for name, values in runs.items()}
    print("\nimports")
    print(f"  {'wrapt':17} {of_wrapt * 1e3:7.1f} ms")
    for name, value in best.items():
        print(f"  {name:17} {value * 1e3:7.1f} ms  {value / of_wrapt:5.2f} x wrapt")
    more = best["ten families more"] / best["megapatch"]
    return all(
        [
            _limit("import megapatch, of import wrapt", best["megapatch"] / of_wrapt, IMPORT_LIMIT),
            _limit("with ten families more, of that", more, FAMILIES_LIMIT),
        ]
    )


def search() -> bool:
    start = time.perf_counter()
    try:
        import torch  # noqa: F401
    except ImportError:
        print("\n(torch is not installed: the search for holders runs over the other modules)")
    importing = time.perf_counter() - start
    of_search = _best(lambda: holders.find([plain]))
    target = ReplacedTarget("benchmark.call", sys.modules[__name__], "plain", closure)
    of_look = _best(lambda: target.may_be_held)
    names = sum(len(vars(module)) for module in sys.modules.values() if hasattr(module, "__dict__"))
    print(f"\nholders, {len(sys.modules)} modules with {names} names")
    print(f"  {'import torch':12} {importing * 1e3:7.1f} ms")
    print(f"  {'a search':12} {of_search * 1e3:7.1f} ms, for what something else refers to")
    print(f"  {'a look':12} {of_look * 1e6:7.1f} us, whether something does")
    return all(
        [
            _limit("a search, of import torch", of_search / importing, SEARCH_LIMIT),
            _limit("a look, of import torch", of_look / importing, LOOK_LIMIT),
        ]
    )


def _best(function) -> float:
    return min(timeit.repeat(function, number=1, repeat=21))


def _limit(what: str, ratio: float, limit: float) -> bool:
    kept = ratio <= limit
    print(f"  {what}: {ratio:.5f}; at most {limit:g}: {'kept' if kept else 'BROKEN'}")
    return kept


if __name__ == "__main__":
    sys.exit(0 if all([calls(), imports(), search()]) else 1)
