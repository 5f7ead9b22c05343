"""verl trains with virtual pipeline stages and overlap_grad_reduce.

Symptom   MegatronEngine.initialize() fails with "When overlap_grad_reduce is True, config.no_sync_func must be
          None": register_megatron_training_hooks() sets the hooks of the model's config once for each chunk, and
          at the second chunk finds its own hook of the first. With any number of chunks a second call for the
          same model fails likewise.
Upstream  verl-project/verl#7380 (open); in 0.6.1 to 0.9.1 and on main.
Seam      the module's function, and with it the names under which the engine and older workers import it. It is
          called chunk by chunk, each time without the no_sync_func that Megatron's DistributedDataParallel made;
          the hooks that it sets for each chunk become the list that Megatron's interleaved schedule takes.
Limits    a no_sync_func that is not DistributedDataParallel's own is left in place, so verl still refuses it.
          Under python -O, which removes the assertion, there is no defect.
Cost      once a model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..._mcore.known import is_model
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import expect_none, running, unmet

MODULE = "verl.utils.megatron_utils"
REGISTER = "register_megatron_training_hooks"
HOOKS = ("no_sync_func", "grad_sync_func", "param_sync_func")
"""Those that Megatron's interleaved schedule takes as a list, one for each chunk."""


def diagnose(module: ModuleType) -> Verdict:
    """Call the real function twice for one stand-in of a chunk, and once for two."""
    expect_none(
        *unmet.parameters(f"{module.__name__}:{REGISTER}", "model", "optimizer"),
        *unmet.attributes(f"{module.__name__}:", "DDP"),
    )
    register = unpatched(getattr(module, REGISTER))
    failing = []
    for what, chunks, calls in (("the second chunk", 2, 1), ("the second call", 1, 2)):
        model, optimizer = _stand_ins(module.DDP, chunks)
        with running(REGISTER):
            try:
                for _ in range(calls):
                    register(model, optimizer)
            except AssertionError:
                failing.append(what)
                continue
        if not callable(_first(model[0].config.no_sync_func)):
            return Verdict(UNKNOWN, f"expected {REGISTER}() to set no_sync_func for overlap_grad_reduce")
    if failing:
        return Verdict(NEEDED, f"with overlap_grad_reduce {REGISTER}() fails at {' and at '.join(failing)}")
    return Verdict(FIXED, f"{REGISTER}() takes several chunks and several calls")


def _stand_ins(ddp: type, chunks: int) -> tuple[list[Any], SimpleNamespace]:
    """Return just enough of a model whose chunks share a config, and of its optimizer."""
    config = SimpleNamespace(**dict.fromkeys(HOOKS))
    flags = SimpleNamespace(overlap_grad_reduce=True, overlap_param_gather=False, align_param_gather=False)
    chunk = type("Chunk", (ddp,), {"__init__": lambda self: None, "config": config, "ddp_config": flags})
    optimizer = SimpleNamespace(scale_loss=None, config=SimpleNamespace(overlap_param_gather=False))
    return [chunk() for _ in range(chunks)], optimizer


def _first(hook: Any) -> Any:
    return hook[0] if isinstance(hook, list) else hook


def register_chunk_by_chunk(register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def patched_register_megatron_training_hooks(
        model: list[Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_model(model):
            return register(model, optimizer, *args, **kwargs)
        from megatron.core.utils import get_model_config

        config = get_model_config(model[0])
        before = {name: getattr(config, name) for name in HOOKS}
        fresh = {**before, "no_sync_func": None} if _is_of_ddp(before["no_sync_func"]) else before
        found: dict[str, list[Any]] = {name: [] for name in HOOKS}
        result = None
        try:
            for chunk in model:
                for name in HOOKS:
                    setattr(config, name, fresh[name])
                result = register([chunk], optimizer, *args, **kwargs)
                for name in HOOKS:
                    if getattr(config, name) is not fresh[name]:
                        found[name].append(getattr(config, name))
        finally:  # where it failed, or has set nothing, the hooks are what they were
            vars(config).update(before)
        for name, hooks in found.items():
            if hooks:
                setattr(config, name, hooks if len(model) > 1 else hooks[0])
        return result

    return patched_register_megatron_training_hooks


def _is_of_ddp(hook: Any) -> bool:
    """Whether these are DistributedDataParallel's own methods, of this model's chunks or of former ones."""
    from megatron.core.distributed import DistributedDataParallel

    hooks = hook if isinstance(hook, list) else [hook]
    return all(inspect.ismethod(one) and isinstance(one.__self__, DistributedDataParallel) for one in hooks)


PATCH = Patch(
    name="verl.training-hooks",
    doc=__doc__,
    upstream="https://github.com/verl-project/verl/pull/7380",
    sites=(Site(MODULE, diagnose, replace={REGISTER: register_chunk_by_chunk}),),
)
