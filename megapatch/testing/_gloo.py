"""Gloo groups whose collectives end in the order in which they began, and which do not crash torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# The names of a group's settings are private in Python (seen in torch 2.13 and 2.15).
_PRIVATE = ("_devices", "_threads", "_timeout")


@functools.cache  # the second time there is nothing to do
def use_one_gloo_thread() -> bool:
    """Give each gloo group that this process makes from now on one worker thread, where torch gives it two.

    The two threads of a group write the same string without a lock. With torch 2.13 to 2.15 the process may end
    with SIGSEGV or SIGABRT, minutes later and elsewhere, once a collective with a long name has run, such as the
    coalesced gathers of overlap_param_gather. docs/upstream/gloo-last-completed-work.md has the cause. `run_ranks`
    calls this itself; call it before `torch.distributed.init_process_group()` in a world that you make by hand.

    With one thread, a group's collectives run one after the other, as on an NCCL stream. Waiting inside a callback
    of one for another of the same group would never end.

    Returns:
        Whether new groups will have one thread. False without gloo, and with a torch whose private names differ.
    """
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return False
    group = torch.distributed.ProcessGroupGloo
    options = getattr(group, "_Options", None)
    if options is None or not all(hasattr(options, name) for name in _PRIVATE):
        return False
    # The class stays the same object: torch asks isinstance(), and C++ returns groups of it.
    group.__init__ = _with_one_thread(group.__init__)
    return True


def _with_one_thread(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def patched_init(self: Any, store: Any, rank: int, size: int, options: Any = None, **settings: Any) -> None:
        if isinstance(options, timedelta):  # the other signature: a timeout in this place
            settings["timeout"], options = options, None
        # A field of the same name stands for each other argument: torch 2.15 has enable_reconfigure.
        fields = {"_timeout" if name == "timeout" else name: value for name, value in settings.items()}
        if options is None and all(hasattr(self._Options, name) for name in fields):
            options, settings = self._Options(), {}
            for name, value in {"_devices": _devices(), "_threads": 1, **fields}.items():
                setattr(options, name, value)
        if options is not None:
            init(self, store, rank, size, options, **settings)
        else:  # a later torch's argument: as torch has it
            init(self, store, rank, size, **settings)

    return patched_init


@functools.cache
def _devices() -> list[Any]:
    """Return the network devices that torch itself would take, which all groups of this process share.

    torch makes each group devices of its own, each of which has a thread that looks a hundred times a second
    whether there is anything to do: a process with many groups would spend a tenth of its time so.
    """
    from torch.distributed import ProcessGroupGloo

    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    create = ProcessGroupGloo.create_device
    return [create(interface=name) for name in names] or [ProcessGroupGloo.create_default_device()]
