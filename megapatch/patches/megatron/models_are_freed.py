"""A model that the program has dropped is freed, with its optimizer, its buffers and its process groups.

Symptom   memory and process groups of a deleted model stay for good, silently: with a mixture of experts that has
          trained once, and with an fp32 model with the distributed optimizer, all of it, and with it the groups of
          its layout. Of any other model the modules of its rotary embedding, their tables (64 MiB each for 131,072
          positions of 128 in fp32) and their context-parallel group.
Upstream  NVIDIA/Megatron-LM#2774 is the symptom; in 0.12 to 0.19. DDP's hooks in autograd's graph refer to DDP.
          A tensor with a graph that a module or an optimizer keeps, such as the last `probs` of a dispatcher or
          the shards of fp32 parameters, closes a cycle through C++, which Python's garbage collection does not
          see. RotaryEmbedding.forward is cached for the class, with the module in its key.
Seam      DistributedDataParallel's hooks are made of a weak reference to it, and its module refers to it, in a
          cycle that garbage collection sees. Rotary tables are cached by a weak reference to their module, as many
          as before, and forgotten when one of their modules is freed.
Limits    the program has to refer to the DistributedDataParallel or its module during a backward pass. Models that
          were built before the patch was applied are not freed, nor those of FSDP. With the audit on, its hooks
          refer to a model until the graph goes. A garbage collection frees them.
Cost      about 0.05 us for each parameter in each backward pass, and 0.4 us for each look at a rotary table.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, cannot_run, gone

DDP = "DistributedDataParallel"
MAKE_HOOK = "_make_backward_post_hook"
EMBEDDINGS = "megatron.core.models.common.embeddings"
WRAPPED_BY = "_megapatch_wrapped_by"
CLEAR, INFO, PARAMETERS = "cache_clear", "cache_info", "cache_parameters"


def diagnose_hooks(module: ModuleType) -> Verdict:
    """Make a real hook of an object, and look whether the hook keeps it."""
    make = unpatched(getattr(getattr(module, DDP, None), MAKE_HOOK, None))
    if make is None:
        return gone(f"{DDP}.{MAKE_HOOK}", module)
    ddp = StandIn(config=StandIn(), ddp_config=StandIn())
    reference = weakref.ref(ddp)
    try:
        hook = make(ddp, StandIn())
    except Exception as error:
        return cannot_run(f"{MAKE_HOOK}()", error)
    del ddp
    if not callable(hook):
        return Verdict(UNKNOWN, f"expected {MAKE_HOOK}() to return a hook")
    if reference() is None:
        return Verdict(FIXED, "hooks in the graph do not keep their model")
    return Verdict(NEEDED, "hooks in autograd's graph keep their model")


def diagnose_tables(name: str, module: ModuleType) -> Verdict:
    """Look at the real forward(): its class has a cache, or none."""
    forward = unpatched(getattr(module.__dict__.get(name), "__dict__", {}).get("forward"))  # not nn.Module's
    if forward is None:
        return gone(f"{name}.forward", module)
    if not hasattr(forward, PARAMETERS):
        return Verdict(FIXED, f"{name}.forward() is not cached for the class")
    return Verdict(NEEDED, f"the cache of {name}.forward() keeps each module that it was called with")


class _WrappedBy(list[Any]):
    """What wraps a module, in the module's dictionary: a table beside it would keep both. Not in its copies."""

    def __deepcopy__(self, memo: object) -> list[Any]:
        return []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return list, ()


def refer_weakly(make_hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_hook)
    def patched_make_backward_post_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self).__weakrefoffset__ == 0:
            return make_hook(self, *args, **kwargs)
        wrapped_by = getattr(getattr(self, "module", None), "__dict__", {}).setdefault(WRAPPED_BY, _WrappedBy())
        if not wrapped_by or wrapped_by[-1] is not self:
            wrapped_by.append(self)
        return make_hook(weakref.proxy(self), *args, **kwargs)

    return patched_make_backward_post_hook


def cache_weakly(forward: Any) -> Callable[..., Any]:
    plain = forward.__wrapped__
    compiler = sys.modules["torch"].compiler

    def compute(module: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        return plain(module(), *args, **kwargs)

    table: Any = functools.lru_cache(**forward.cache_parameters())(compute)

    def forget(_: Any) -> None:
        table.cache_clear()

    @functools.wraps(forward)
    def patched_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiler.is_compiling():  # compiled code looks through a cache
            return plain(self, *args, **kwargs)
        return table(weakref.ref(self, forget), *args, **kwargs)

    for name in (CLEAR, INFO, PARAMETERS):  # Megatron and its users clear the cache by them
        setattr(patched_forward, name, getattr(table, name))
    return patched_forward


def _tables(module: str, name: str) -> Site:
    return Site(
        module=f"{EMBEDDINGS}.{module}",
        diagnose=functools.partial(diagnose_tables, name),
        replace={f"{name}.forward": cache_weakly},
    )


PATCH = Patch(
    name="megatron.models-are-freed",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/2774",
    sites=(
        Site(
            module="megatron.core.distributed.distributed_data_parallel",
            diagnose=diagnose_hooks,
            replace={f"{DDP}.{MAKE_HOOK}": refer_weakly},
        ),
        _tables("rotary_pos_embedding", "RotaryEmbedding"),
        _tables("yarn_rotary_pos_embedding", "YarnRotaryEmbedding"),
    ),
)
