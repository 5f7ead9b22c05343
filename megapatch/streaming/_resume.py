"""The state of a pump in a checkpoint, and how another pump continues from it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import MisuseError
from ._calls import perform
from ._groups import Group, Groups
from ._parts import require, whole_version

if TYPE_CHECKING:
    from ._optimizer_step import OptimizerSteps
    from ._rollouts import Rollouts

FORMAT = 1
"""Grows when an older megapatch could not read a state."""


def check_format(name: str, state: Mapping[str, Any]) -> None:
    """Raise MisuseError for the state of another format."""
    found = state.get("format") if isinstance(state, Mapping) else None
    if found != FORMAT:
        raise MisuseError(
            f"{name} has the format {found!r}; expected {FORMAT}. Load it with the megapatch that wrote it"
        )


def as_plain(computed: Mapping[Group, Any]) -> list[tuple[Hashable, tuple[Hashable, ...], int | None, Any]]:
    """Return groups and their data without types of this package, which a later release may lack."""
    return [(group.group_id, group.keys, group.weight_version, data) for group, data in computed.items()]


async def load(
    state: Mapping[str, Any], buffer: Any, steps: OptimizerSteps, rollouts: Rollouts
) -> tuple[int, list[Hashable]]:
    """Load a pump's state into its parts; return the version, and the groups to be rolled out again."""
    check_format("the pump's state", state)
    version = whole_version(state["version"])
    if "buffer" in state:
        require("buffer", buffer, "load_state_dict")
        await perform(buffer.load_state_dict, state["buffer"])
    computed = {Group(group_id, tuple(keys), its): data for group_id, keys, its, data in state["computed"]}
    incomplete, groups = await steps.restore(version, computed)
    ended, again = sort_out(state["rollouts"], incomplete, groups)
    rollouts.restore(version, ended)
    return version, again


def sort_out(
    rollouts: Sequence[tuple[Hashable, bool]], incomplete: Sequence[Group], groups: Groups
) -> tuple[list[Group], list[Hashable]]:
    """Return the rollouts that are complete in a buffer, and the groups to be rolled out again.

    Args:
        rollouts: a group, and whether it had not ended.
        incomplete: groups that the buffer had in part.
        groups: those that the buffer has.
    """
    ended, again = [], []
    in_part = {group.group_id: None for group in incomplete}
    for group_id, is_running in rollouts:
        if (group := groups.whole(group_id)) is not None:
            ended.append(group)
        elif is_running or group_id in in_part:  # and not one that a filter has dropped
            again.append(group_id)
        in_part.pop(group_id, None)
    return ended, again + list(in_part)
