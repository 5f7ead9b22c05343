"""What has to be right around a call of train(), Megatron's or a framework's copy, so that the next one works.

Such a function sets hooks on the model config and leaves them there, and takes the forward pre-hooks of
DistributedDataParallel off and puts them on again. An exception leaves it in the middle of all that.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ...patch import MegapatchError, unpatched
from . import bucket_groups

NO_SYNC_ASSERTION = "config.no_sync_func must be None"
"""In the text of the assertion that a second call meets where overlap_grad_reduce is on."""


def finish_earlier_call(model: Sequence[Any]) -> None:
    """Finish what an earlier call has left open, so that this one begins from gathered parameters.

    A collective where something is open: an exception on all ranks leaves it open on all.
    Raises MegapatchError where gathering is not possible any more (reuse_grad_buf_for_mxfp8_param_ag).
    """
    for chunk in _ddp_chunks(model):
        bucket_groups.settle_grad_reduces(chunk)
        bucket_groups.finish_param_gathers(chunk)
        if chunk.ddp_config.overlap_param_gather and bucket_groups.has_ungathered_params(chunk):
            raise MegapatchError(
                "train() was interrupted after an optimizer step and before the parameters were gathered. With "
                "reuse_grad_buf_for_mxfp8_param_ag that cannot be made up for, and this call would go on with "
                "old parameters: load a checkpoint in a new process"
            )


@contextlib.contextmanager
def config_hooks_kept(config: Any, model: Sequence[Any]) -> Iterator[None]:
    """Around the call: it finds no no_sync_func of its own making, and nothing that a user set is lost.

    After an exception all hooks of the config are what they were, and parameters that are not gathered yet will
    be by the next forward pass or `finish_earlier_call`; the exception itself may be one rank's alone, so there
    is no collective in here.
    """
    hooks = {name: value for name, value in vars(config).items() if name.endswith("_func")}
    if is_own_no_sync(config.no_sync_func, model):
        config.no_sync_func = None
    try:
        yield
    except BaseException:
        for name, value in hooks.items():
            setattr(config, name, value)
        for chunk in _ddp_chunks(model):
            bucket_groups.forget_interrupted_window(chunk)
            bucket_groups.gather_in_next_forward(chunk)
        raise
    if config.param_sync_func is None:  # set aside by a call in which no step succeeded
        config.param_sync_func = hooks["param_sync_func"]


def is_own_no_sync(hook: Any, model: Sequence[Any]) -> bool:
    """Whether the hook is what train() itself sets: the no_sync of a model chunk, or a list of them.

    A bound method taken before a late activation does not equal one taken after it, so parts are compared.
    """
    hooks = hook if isinstance(hook, list) else [hook]
    own = [chunk.no_sync for chunk in model if hasattr(chunk, "no_sync")]
    return bool(hooks) and all(any(_same_method(one, other) for other in own) for one in hooks)


def _same_method(one: Any, other: Any) -> bool:
    return (
        inspect.ismethod(one)
        and inspect.ismethod(other)
        and one.__self__ is other.__self__
        and unpatched(one.__func__) is unpatched(other.__func__)
    )


def _ddp_chunks(model: Sequence[Any]) -> list[Any]:
    ddp = sys.modules[bucket_groups.MODULE].DistributedDataParallel
    return [chunk for chunk in model if isinstance(chunk, ddp)]
