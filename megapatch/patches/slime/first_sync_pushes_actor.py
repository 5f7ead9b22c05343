"""slime's weight sync pushes the actor's weights, whichever model's are loaded.

Symptom   with a reference, teacher or old actor and without --offload-train, the first update_weights() silently
          pushes that model's weights: the first rollout is the reference's. Where a run starts from the
          reference's weights they are the same; after a resume reward drops, and KL and gradient norm jump.
Upstream  THUDM/slime#2224, #1903, open; in all releases from v0.1.0 to v0.3.1 and on main. miles switches back.
Seam      MegatronTrainRayActor.update_weights: init() loads the other models into the live one and switches back
          with --offload-train only. It is already running when --custom-megatron-init-path activates megapatch, so
          the switch, slime's own _switch_model("actor"), comes right before the push.
Limits    slime up to v0.2.1 has no _switch_model() and does not note which model is loaded: refused there. A
          save_model() before the first train() still saves the model loaded last. With --offload-train nothing
          is done: the weights are not on the GPU then, and slime has switched by itself.
Numbers   change in the first rollout after a resume, and so in the training on it. Where all models have the
          same weights they stay.
Cost      one copy of the weights from the CPU, before the first sync; later syncs find the actor's weights.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, Patch, Site, Verdict, unpatched
from .._diagnosis import expect_none, gone, unmet

ACTOR = "MegatronTrainRayActor"
LOAD, SWITCH, TAG = "load_other_checkpoint", "_switch_model", "_active_model_tag"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real methods: running them needs GPUs, checkpoints and rollout engines."""
    actor: Any = getattr(module, ACTOR, None)
    if not hasattr(actor, LOAD):
        return gone(f"{ACTOR}.{LOAD}", module)
    path = f"{module.__name__}:{ACTOR}"
    missing = unmet.attributes(path, "init", "update_weights", SWITCH)
    if not missing:
        missing = [
            *unmet.parameters(f"{path}.{SWITCH}", "target_tag"),
            *_missing_names(actor, SWITCH, TAG, "weights_backuper", "restore"),
            *_missing_names(actor, LOAD, TAG, "weights_backuper", "backup"),
        ]
    expect_none(*missing)
    init = _undecorated(actor.init)
    if not _places(init, LOAD):
        expect_none(f"{LOAD} in {path}.init")
    if _always_switches_back(init):
        return Verdict(FIXED, "init() always switches back to the actor's weights")
    return Verdict(
        NEEDED, "init() leaves the weights of the model that it loaded last, and the first sync pushes them"
    )


def _undecorated(method: Any) -> Any:
    """Return the method without megapatch's replacement, and without slime's timers and miles' logs."""
    return inspect.unwrap(unpatched(method))


def _missing_names(actor: Any, method: str, *names: str) -> list[str]:
    mentioned = _undecorated(getattr(actor, method)).__code__.co_names
    return [f"{name} in {actor.__name__}.{method}" for name in names if name not in mentioned]


def _always_switches_back(init: Callable[..., Any]) -> bool:
    """Tell whether no branch after the last load leads around the switch to the actor that follows it."""
    loaded = _places(init, LOAD)[-1]
    after = [each for each in dis.get_instructions(init) if each.offset > loaded]
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return any(
        place > loaded and not any(each.opcode in jumps and each.offset < place < each.argval for each in after)
        for place in _places(init, SWITCH)
    )


def _places(function: Callable[..., Any], name: str) -> list[int]:
    return [each.offset for each in dis.get_instructions(function) if each.argval == name]


def switch_to_actor(update_weights: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update_weights)
    def patched_update_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        # with debug_rollout_only, init() has returned before there is a model
        if getattr(self, TAG, "actor") != "actor" and not self.args.offload_train:
            self._switch_model("actor")
        return update_weights(self, *args, **kwargs)

    return patched_update_weights


PATCH = Patch(
    name="slime.first-sync-pushes-actor",
    doc=__doc__,
    upstream="https://github.com/THUDM/slime/issues/2224",
    sites=tuple(
        Site(
            f"{framework}.backends.megatron_utils.actor",
            diagnose,
            replace={f"{ACTOR}.update_weights": switch_to_actor},
        )
        for framework in ("slime", "miles")
    ),
    changes_numbers=True,
)
