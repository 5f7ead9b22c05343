"""Roll out a prompt group, and again if that fails."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable

from ._in_flight import Rollout
from ._rollouts import Rollouts
from ._supply import Supply

log = logging.getLogger("megapatch")


async def roll_out(
    rollouts: Rollouts,
    supply: Supply,
    group_id: Hashable,
    generate: Callable[[], Awaitable[object]],
    attempts: int,
) -> bool:
    """Do what `TrainPump.roll_out` says."""
    for attempt in range(1, attempts + 1):
        failure: Exception | None = None
        rollout: Rollout | None = None
        try:
            async with rollouts.begun(group_id) as rollout:
                await generate()
                return True
        except Exception as error:
            failure = error
            if rollout is None or rollout.claimed:  # it failed after all samples were there
                raise
        with rollouts.between_attempts(group_id):
            try:
                is_here = not await supply.drop_in_part(group_id)
            except Exception as error:
                raise error from failure
        if failure is not None:
            if is_here or attempt == attempts:
                raise failure
            log.warning(
                "attempt %d of %d to roll out prompt group %r failed, and it begins again: %s: %s",
                *(attempt, attempts, group_id, type(failure).__name__, failure),
            )
        if attempt < attempts:
            rollouts.retries += 1
    return False
