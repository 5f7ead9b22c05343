"""NeMo-RL's weight synchronizers take the version of the weights that they sync.

Symptom   TypeError: a controller that does `await synchronizer.sync_weights(version)`, as NeMo-RL's first
          SingleController does, calls a plain function that takes no version and returns nothing to await.
Upstream  NVIDIA-NeMo/RL#3266 has changed the controller. On main from 2026-07-14 to 07-25 it does not fit the
          synchronizers; no release has it. v0.7.0 and main have the same synchronizers, for controllers that
          were written like it.
Seam      adds __getattribute__ to WeightSynchronizer: every transport has a sync_weights() of its own, and users
          may have more. The method that an object has by that name takes a version, too, as its one argument
          by position. In an event loop the result is a coroutine, and the sync runs in a thread, as main's
          controller has it now; elsewhere it is the original's result. Calls without a version, and synchronizers
          that take one themselves, are left as they are.
Limits    in an event loop nothing is synced before the coroutine is awaited. The version goes nowhere, as no
          generation of NeMo-RL's takes one, and a WARNING says so once: call rollout_manager.set_weight_version()
          after a sync, as main's controller does.
Numbers   stay: with a version there was a TypeError.
Cost      a microsecond for each attribute of a synchronizer.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

from ..._pausing.blocking import is_in_loop
from ..._version import see
from ...patch import FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, gone, unmet

MODULE = "nemo_rl.weight_sync.interfaces"
SYNCHRONIZER, SYNC = "WeightSynchronizer", "sync_weights"
LOOKUP = "__getattribute__"


def diagnose(module: ModuleType) -> Verdict:
    """Read the signature, as running it needs a policy and engines."""
    synchronizer = getattr(module, SYNCHRONIZER, None)
    if synchronizer is None:
        return gone(SYNCHRONIZER, module)
    path = f"{MODULE}:{SYNCHRONIZER}.{SYNC}"
    sync = getattr(synchronizer, SYNC, None)
    if not unmet.parameters(path, "version"):
        return Verdict(FIXED, f"{SYNC}() takes a version")
    missing = unmet.parameters(path, "timer")
    if inspect.iscoroutinefunction(sync):
        missing.append(f"{path} as a plain function")
    if vars(synchronizer).get(LOOKUP) not in (None, looked_up):
        missing.append(f"{SYNCHRONIZER} without {LOOKUP}")
    expect_none(*missing)
    return Verdict(NEEDED, f"{SYNC}() takes no version")


def looked_up(self: Any, name: str) -> Any:
    """Look up an attribute; sync_weights() accepts a version."""
    found = object.__getattribute__(self, name)
    if name == SYNC and isinstance(found, MethodType):
        return accepting_version(found)
    return found


def accepting_version(sync: MethodType) -> Callable[..., Any]:
    @functools.wraps(sync)
    def patched_sync(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or not isinstance(args[0], int) or _accepts(sync, args, kwargs):
            return sync(*args, **kwargs)
        _warn_once()
        return _without_version(sync, kwargs)

    return patched_sync


def _without_version(sync: MethodType, kwargs: dict[str, Any]) -> Any:
    call = functools.partial(sync, **kwargs)
    return _in_thread(call) if is_in_loop() else call()


def _accepts(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


@functools.cache
def _warn_once() -> None:
    logging.getLogger("megapatch").warning(
        "%s() was given a version, which goes nowhere: samples bear it only if the controller passes it on to "
        "NeMo-RL's RolloutManager" + see("sync-version"),
        SYNC,
    )


async def _in_thread(call: Callable[[], Any]) -> Any:
    import asyncio

    return await asyncio.to_thread(call)


PATCH = Patch(
    name="nemo_rl.sync-weights-version",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/3266",
    sites=(Site(MODULE, diagnose, add={f"{SYNCHRONIZER}.{LOOKUP}": f"{__name__}:looked_up"}),),
)
