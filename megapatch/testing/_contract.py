"""The contract that every patch has to keep, checked against the real upstream code.

    from megapatch.testing import check_contract

    def works():                     # at module level; raises without the patch, returns with it
        ...

    def test_my_patch():
        check_contract({PATCH: works})

Every check runs in new processes (`run_ranks`), with only the given patches.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from .._engine.engine import Engine
from .._engine.settings import Settings
from ..patch import Patch, Site, Status
from . import _import_orders, _invariants
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
    error = _error_with(tuple(map(_with_keyword, patches)), patch, scenario)
    if error:
        return [f"its scenario fails once upstream adds a keyword to its targets, which it must pass on:\n{error}"]
    return _lost()


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


# ---------------------------------------------------------------------------- a keyword that upstream adds
_KEYWORD = "added_upstream"

# Attribute paths of targets whose replacement was called, and of those whose original then got the keyword.
_called: set[str] = set()
_reached: set[str] = set()


def _with_keyword(patch: Patch) -> Patch:
    """Return the same patch, whose targets take one keyword more and are always called with it."""
    return Patch(
        patch.name, patch.doc, patch.upstream, tuple(map(_site_with_keyword, patch.sites)), patch.changes_numbers
    )


def _lost() -> list[str]:
    """Return the targets whose replacement called the original without the keyword, in words."""
    return [f"{path} does not pass on a keyword that upstream may add" for path in sorted(_called - _reached)]


def _site_with_keyword(site: Site) -> Site:
    replace = {path: _factory(f"{site.module}:{path}", make) for path, make in site.replace.items()}
    return Site(site.module, site.diagnose, replace, {**site.add}, site.rebuild)


def _factory(path: str, make: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    def make_with_parameter(original: Any) -> Callable[..., Any]:
        if not inspect.isfunction(original):
            return make(original)
        replacement = make(_accepting(path, original))

        @functools.wraps(replacement)
        def called_with_keyword(*args: Any, **kwargs: Any) -> Any:
            return replacement(*args, **{_KEYWORD: True, **kwargs})

        vars(called_with_keyword)["__wrapped__"] = original  # the real one, for inspect.signature()
        return called_with_keyword

    return make_with_parameter


def _accepting(path: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def accepting(*args: Any, **kwargs: Any) -> Any:
        _called.add(path)
        if kwargs.pop(_KEYWORD, False):
            _reached.add(path)
        return original(*args, **kwargs)

    signature = inspect.signature(original)
    parameters = list(signature.parameters.values())
    added = inspect.Parameter(_KEYWORD, inspect.Parameter.KEYWORD_ONLY, default=False)
    at = len(parameters) - any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    vars(accepting)["__signature__"] = signature.replace(parameters=[*parameters[:at], added, *parameters[at:]])
    return accepting
