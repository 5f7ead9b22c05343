"""slime's and miles' train() and save() can be called in any order, once per rollout.

Symptom   with --overlap-grad-reduce the second rollout dies on "When overlap_grad_reduce is True,
          config.no_sync_func must be None" (the first has left its own no_sync there). With
          --overlap-param-gather as well, save() after a rollout, and the next rollout once the assertion is out
          of the way, die on a KeyError with the model's repr. After an exception in train() the next call fails,
          or silently trains from parameters that were stepped but not gathered.
Upstream  THUDM/slime#1779; pull requests #1857 (leaves save() broken) and #2066 (only the assertion) are open.
          The code is the same in every slime from v0.1.0 to v0.3.1 and on main, and in miles.
Seam      train() and save() of megatron_utils.model, rebound in actor.py, which holds them by name. At entry, a
          no_sync_func that is a model chunk's own no_sync is removed (a user's meets slime's assertion as
          before), and after an earlier call reduces left under way are waited for and parameters not
          gathered since the last step are gathered. After an exception the config's hooks are as before the call.
          train_one_step() is replaced as well: if it raises before the optimizer has stepped, a router's counts
          and expert bias, losses that wait to be logged, and the fp16 loss scale are as before the step.
          megatron.forward-pre-hook makes switching the forward pre-hooks safe; this patch needs it.
Limits    The promises for exceptions hold when it was raised on all ranks: if it was raised on one rank only,
          the others wait for it in a collective, as without megapatch. After it the parameters are gathered by
          the next train(), save() or forward pass; anything else that reads them before, such as a weight
          sync or a backup, finds them as the exception left them.
          Megatron's FSDP meets slime's own assertion: slime only takes DistributedDataParallel.
          --manual-gc leaves Python's garbage collector off for the life of the actor.
          An exception in the optimizer that comes once it has begun to change parameters cannot be undone.
Numbers   change after an exception, to those of a process in which the interrupted step never began.
Cost      once a call, a look at the config's hooks, and no gather beyond slime's own. In a step of a dense model
          10 us, and with a mixture of experts copies of its biases and logged losses, about 0.1 ms on a CPU.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.known import arguments_of, is_model
from ...patch import NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, unmet
from ..megatron._around_train import (
    NO_SYNC_ASSERTION,
    finish_earlier_call,
    gather_other_steps,
    leaving_nothing_if_dropped,
    without_own_no_sync,
)

_trained: weakref.WeakSet[Any] = weakref.WeakSet()
"""The model chunks that train() was called with, which may have something to finish from then on."""


def diagnose(module: ModuleType) -> Verdict:
    """Read the real functions: running them needs process groups, a model and Megatron's global arguments."""
    train, save = f"{module.__name__}:train", f"{module.__name__}:save"
    expect_none(
        *unmet.parameters(train, "model"),
        *unmet.names(train, "get_model_config", "no_sync_func", NO_SYNC_ASSERTION, "disable_forward_pre_hook"),
        *unmet.parameters(f"{module.__name__}:train_one_step", "model", "optimizer"),
        *unmet.parameters(save, "model"),
        *unmet.names(save, "disable_forward_pre_hook", "enable_forward_pre_hook"),
        *unmet.attributes(f"{module.__name__}:", "get_model_config"),
    )
    return Verdict(NEEDED, f"train() asserts that {NO_SYNC_ASSERTION}, and never clears the one it sets")


def make_reentrant(train: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(train)
    module = sys.modules[train.__module__]

    @functools.wraps(train)
    def patched_train(*args: Any, **kwargs: Any) -> Any:
        model = arguments_of(signature, args, kwargs).get("model")
        if not is_model(model):
            return train(*args, **kwargs)
        _finish_earlier_call(model)
        _trained.update(model)
        with without_own_no_sync(module.get_model_config(model[0]), model):
            return train(*args, **kwargs)

    return patched_train


def finish_train_before_save(save: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(save)

    @functools.wraps(save)
    def patched_save(*args: Any, **kwargs: Any) -> Any:
        if is_model(model := arguments_of(signature, args, kwargs).get("model")):
            _finish_earlier_call(model)
        return save(*args, **kwargs)

    return patched_save


def _finish_earlier_call(model: Any) -> None:
    """Finish it if there was one, or steps of others. Errors while loading should not spread to all ranks."""
    if any(chunk in _trained for chunk in model):
        finish_earlier_call(model)
    else:
        gather_other_steps(model)


PATCH = Patch(
    name="slime.train-reentry",
    doc=__doc__,
    upstream="https://github.com/THUDM/slime/issues/1779",
    sites=tuple(
        Site(
            f"{framework}.backends.megatron_utils.model",
            diagnose,
            replace={
                "train": make_reentrant,
                "train_one_step": leaving_nothing_if_dropped,
                "save": finish_train_before_save,
            },
        )
        for framework in ("slime", "miles")
    ),
    changes_numbers=True,
)
