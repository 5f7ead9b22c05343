"""hooks-balanced: a forward-backward call leaves what it found.

Symptom   a call that was interrupted, or a no_sync() that was entered twice, leaves hooks or flags behind; the
          next call reduces gradients in every microbatch, or in none.
Upstream  NVIDIA-NeMo/RL#3660, THUDM/slime#1779.
Seam      the three functions that get_forward_backward_func() returns.
Limits    the model config's hooks, no_sync() and forward pre-hooks of the chunks; not what a trainer keeps
          itself.
Cost      some microseconds a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .._mcore.bucket_groups import bucket_groups, chunks_of
from ..patch import Patch
from . import _scales, _tokens
from ._findings import LEDGER, observes
from ._sites import site

SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)


def watch_call(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def patched_forward_backward(*args: Any, **kwargs: Any) -> Any:
        chunks = chunks_of(kwargs.get("model")) or []
        if not chunks:
            return schedule(*args, **kwargs)
        before = _snapshot(chunks)
        trains = not kwargs.get("forward_only")
        if trains:
            _scales.note_call(chunks, chunks[0].config)
        _tokens.begin_call(trains)
        try:
            return schedule(*args, **kwargs)
        finally:
            _tokens.end_call()
            _compare(before, _snapshot(chunks))

    return patched_forward_backward


@observes
def _snapshot(chunks: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in vars(chunks[0].config).items():
        if name.endswith("_func"):
            found[f"config.{name}"] = list(value) if isinstance(value, list) else value
    for number, chunk in enumerate(chunks):
        found[f"the forward pre-hooks of chunk {number}"] = bool(
            getattr(chunk, "remove_forward_pre_hook_handles", None)
        )
        found[f"no_sync() of chunk {number}"] = [group.is_last_microbatch for group in bucket_groups(chunk)]
    return found


@observes
def _compare(before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
    if before is None or after is None:
        return
    changed = [name for name, value in after.items() if name not in before or before[name] != value]
    if changed:
        LEDGER.report("hooks-balanced", "call", f"a forward-backward call did not put back {', '.join(changed)}")


PATCH = Patch(
    name="audit.calls",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/3660",
    sites=(site("megatron.core.pipeline_parallel.schedules", dict.fromkeys(SCHEDULES, watch_call)),),
)
