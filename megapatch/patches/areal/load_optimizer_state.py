"""A recovered run has the optimizer state that was saved.

Symptom   up to Megatron 0.15 a recovered run begins with Adam's moments at 0, silently: the checkpoint has them,
          and they are not asked for. From Megatron 0.16 on the save raises: "ShardedTensor.flattened_range is not
          supported."
Upstream  areal-project/AReaL#1468 (issue #1341), after 1.0.4: is_loading in loads, and dp_reshardable.
Seam      class attributes of MegatronCheckpointManager. While load_checkpoint() runs, the optimizer's
          sharded_state_dict() gets is_loading, with which Megatron makes the state that is to be loaded. While
          generate_state_dict() runs, and this Megatron rejects flattened ranges, it gets upstream's metadata.
          AReaL passes neither: arguments that it does pass are not touched.
Limits    dp_reshardable checkpoints can be loaded with the same layout only, as upstream's.
          A checkpoint of Megatron up to 0.15 cannot be loaded with a later one: Megatron says which keys it lacks.
          The learning rate's schedule is saved, and loaded only with use_checkpoint_opt_param_scheduler, which is
          False: set it, or the schedule begins again.
Numbers   change in runs that are recovered: to those of a run that was not interrupted.
Cost      none, but for the memory of the state, which the first step would have taken.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import StandIn, expect_none, running, torch_stand_in, unmet, with_globals

MODULE = "areal.engine.megatron_utils.checkpointer"
MANAGER = "MegatronCheckpointManager"
GENERATE = "generate_state_dict"
LOAD = "load_checkpoint"
STATE = "sharded_state_dict"
MAPPING = "megatron.core.dist_checkpointing.mapping"


def _passing(manager: Any, **arguments: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the manager's optimizer is asked for its state with these arguments, too."""
    if manager.optimizer is None or not arguments:
        return contextlib.nullcontext()
    asked = functools.partial(getattr(manager.optimizer, STATE), **arguments)
    return temporarily_set(manager.optimizer, **{STATE: asked})


def _sharding() -> dict[str, Any]:
    """Return the arguments with which this Megatron can save a distributed optimizer."""
    # The layout that is Megatron's default needs flat tensors, which 0.16 no longer saves.
    if hasattr(sys.modules[MAPPING].ShardedTensor, "from_rank_offsets_flat"):
        return {}
    return {"metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}


def with_sharding(generate_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate_state_dict)
    def patched_generate_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _passing(self, **_sharding()):
            return generate_state_dict(self, *args, **kwargs)

    return patched_generate_state_dict


def asking_for_all(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_checkpoint)
    def patched_load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _passing(self, is_loading=True):
            return load_checkpoint(self, *args, **kwargs)

    return patched_load_checkpoint


# ------------------------------------------------------------------------------------------ the diagnosis
def diagnose(module: ModuleType) -> Verdict:
    """Load with the real methods, up to where the checkpoint is read; the optimizer notes its arguments."""
    manager = f"{module.__name__}:{MANAGER}"
    expect_none(
        *unmet.parameters(f"{manager}.{GENERATE}", "with_optimizer"),
        *unmet.parameters(f"{manager}.{LOAD}", "local_path", "with_optimizer"),
        *unmet.reads(f"{manager}.{GENERATE}", "optimizer", STATE),
        *unmet.reads(f"{manager}.{LOAD}", GENERATE, "load_dist_checkpointing"),
    )
    with running(f"{LOAD}()"):
        asked = _asked_by(vars(module)[MANAGER])
    if len(asked) != 1:
        return Verdict(
            UNKNOWN, f"expected a load to ask the optimizer for its state once; it does {len(asked)} times"
        )
    if asked[0].get("is_loading"):
        return Verdict(FIXED, "a load says so when it asks for the optimizer's state")
    return Verdict(NEEDED, "a load asks the optimizer for its state as a save does, so moments are not loaded")


class _Read(Exception):
    """The checkpoint would be read now."""


def _asked_by(manager: Any) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def read(*args: Any, **kwargs: Any) -> None:
        raise _Read

    torch = torch_stand_in(distributed=StandIn(barrier=lambda *args, **kwargs: None))
    stand_in = StandIn(model=[], wait_async_saves=lambda *args: None)
    stand_in.optimizer = StandIn(**{STATE: lambda state, **given: asked.append(given)})
    stand_in.generate_state_dict = MethodType(with_globals(getattr(manager, GENERATE), torch=torch), stand_in)
    load = with_globals(getattr(manager, LOAD), torch=torch, load_dist_checkpointing=read)
    with contextlib.suppress(_Read):
        load(stand_in, None, with_model=False, with_optimizer=True, with_rng=False)
    return asked


PATCH = Patch(
    name="areal.load-optimizer-state",
    doc=__doc__,
    upstream="https://github.com/areal-project/AReaL/pull/1468",
    changes_numbers=True,
    sites=(
        Site(
            MODULE, diagnose, replace={f"{MANAGER}.{GENERATE}": with_sharding, f"{MANAGER}.{LOAD}": asking_for_all}
        ),
    ),
)
