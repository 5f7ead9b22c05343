"""The contract that every patch has to keep, checked against the real upstream code.

    from megapatch.testing import check_contract

    def works():                     # at module level; raises without the patch, returns with it
        ...

    def test_my_patch():
        check_contract({PATCH: works})

Every check runs in new processes (`run_ranks`), with only the given patches.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping

from .._engine.engine import Engine
from .._engine.settings import Settings
from ..patch import Patch, Status
from . import _import_orders, _invariants
from ._added_parameter import lost, with_added_parameter
from ._ranks import run_ranks

Scenario = Callable[[], object]

# The megapatch that is active in the processes is switched off: an installed patch would be applied twice.
_ALONE = {"MEGAPATCH_DISABLE": "*", "MEGAPATCH_ONLY": "", "MEGAPATCH_STRICT": "", "MEGAPATCH_AUDIT": ""}


def check_contract(scenarios: Mapping[Patch, Scenario], timeout: float = 300.0) -> None:
    """Check that patches keep the contract.

    - the defect shows without the patch, and not with it
    - `import megapatch` before, during and after the import of the target, from another thread, after
      `from x import f`, twice, after a restore or a reload: the same targets are replaced, once
    - 1000 `apply()` in 64 threads change nothing; `restore()` puts everything back, the identical objects
    - the replacement is a plain function with the original's signature that pickles and copies
    - the diagnosis leaves no trace, needs no process group, and gives the same verdict on patched code
    - a keyword that upstream adds to a target reaches the original
    - the patch has a sentence on its repair, and a link to the report of the defect

    Args:
        scenarios: for each patch a function without arguments that provokes the defect: it raises without the
            patch and returns with it. It runs in a process of its own, with CUDA stubs and a gloo group of one
            rank. If the diagnosis says that the patch is not needed, it has to return without it, too. Patch and
            function are at module level; the function imports the modules to patch, not the top of the file.
        timeout: seconds for each group of processes.

    Raises:
        AssertionError: the message lists everything that is broken.
    """
    patches = tuple(scenarios)
    problems = [f"{patch.name}: {text}" for patch in patches for text in _undocumented(patch)]
    problems += _import_orders.problems(
        run_ranks(_import_orders.run, len(_import_orders.ORDERS), patches, env=_ALONE, timeout=timeout)
    )
    (kept,) = run_ranks(_invariants.run, 1, patches, env=_ALONE, timeout=timeout)
    problems += kept
    for patch, scenario in scenarios.items():
        (unpatched,) = run_ranks(_without, 1, patch, scenario, env=_ALONE, timeout=timeout)
        (patched,) = run_ranks(_with_added_parameter, 1, patches, patch, scenario, env=_ALONE, timeout=timeout)
        if patched:
            (as_it_is,) = run_ranks(_with, 1, patches, patch, scenario, env=_ALONE, timeout=timeout)
            patched = as_it_is or patched
        problems += [f"{patch.name}: {text}" for text in (*unpatched, *patched)]
    assert not problems, "the contract is broken:\n" + "\n".join(problems)


def _undocumented(patch: Patch) -> list[str]:
    found = []
    if not patch.summary.endswith("."):
        found.append("the first line of its docstring is not a sentence")
    if patch.upstream is not None and not patch.upstream.startswith("https://"):
        found.append(f"its upstream is not the URL of an issue or pull request: {patch.upstream}")
    return found


def _without(rank: int, world_size: int, patch: Patch, scenario: Scenario) -> list[str]:
    """Check that the scenario fails exactly if the diagnosis says NEEDED."""
    needed = _is_needed(patch)
    error = _error(scenario)
    if needed and error is None:
        return ["its scenario works without the patch, although the diagnosis says that it is needed"]
    if not needed and error is not None:
        return [
            f"its scenario fails without the patch, although the diagnosis says that it is not needed:\n{error}"
        ]
    return []


def _with(rank: int, world_size: int, patches: tuple[Patch, ...], patch: Patch, scenario: Scenario) -> list[str]:
    """Check that the scenario works with the patches."""
    error = _error_with(patches, patch, scenario)
    return [f"its scenario fails with the patch:\n{error}"] if error else []


def _with_added_parameter(
    rank: int, world_size: int, patches: tuple[Patch, ...], patch: Patch, scenario: Scenario
) -> list[str]:
    """Check that it works, too, when each target has a keyword more, with which everybody calls it."""
    error = _error_with(tuple(map(with_added_parameter, patches)), patch, scenario)
    if error:
        return [f"its scenario fails once upstream adds a keyword to its targets, which it must pass on:\n{error}"]
    return lost()


def _error_with(patches: tuple[Patch, ...], patch: Patch, scenario: Scenario) -> str | None:
    """Return the scenario's error with all patches in place of which it, or the patch, imports a target."""
    Engine(patches, Settings()).activate()
    _import_orders.import_targets([patch])
    return _error(scenario)


def _is_needed(patch: Patch) -> bool:
    """Return whether a site's diagnosis says NEEDED; nothing stays patched."""
    engine = Engine([patch], Settings())
    engine.activate()
    _import_orders.import_targets([patch])
    needed = any(record.status is Status.APPLIED for record in engine.records)
    engine.restore()
    return needed


def _error(scenario: Scenario) -> str | None:
    try:
        scenario()
    except BaseException as error:  # torch's CheckpointException is not an Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return traceback.format_exc()
    return None
