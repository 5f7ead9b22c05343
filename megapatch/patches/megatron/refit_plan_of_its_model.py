"""A refit uses a plan that was made for its models, not one of other models in the same layout.

Symptom   a process refits a second pair of models, of another size, in the layout of the first one: it gets the
          first pair's plan. Parameters that the first pair does not have are never sent, silently: with 2 layers
          first and 4 layers then, 46% of all elements.
Upstream  not reported; from 0.17 on, and on main. The plans of megatron.core.resharding.refit are kept for the
          process by rank, sizes of both layouts and number of experts. clear_plan_cache() is there, and is not
          called between models. 0.16 keeps a plan with its model.
Seam      the module function that makes the key: the key gains what the models' configurations say of their
          parameters. That is the same on all ranks of a model, so all ranks make a new plan, which is a
          collective, or none does.
Limits    models of one configuration whose parameters differ in something else, such as a value head in place of
          the output layer, share a plan as before: call clear_plan_cache() between them, on all ranks.
Numbers   change for refits with another model's plan, to those of a process that makes no other refit.
Cost      a plan for each pair of models that differ; some microseconds a refit.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.known import NN_MODULE, arguments_of, is_a
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, before_release, gone, running

MODULE = "megatron.core.resharding.refit"
KEY = "_build_plan_cache_key"
CORES = ("src_core", "tgt_core")
OF_CONFIG = (
    "num_layers",
    "mtp_num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "moe_ffn_hidden_size",
    "gated_linear_unit",
    "add_bias_linear",
)
OF_MODEL = ("vocab_size", "share_embeddings_and_output_weights")


def diagnose(module: ModuleType) -> Verdict:
    """Make the keys of two pairs of models that differ in their numbers of layers, and of one of them twice."""
    make = unpatched(getattr(module, KEY, None))
    if make is None:
        return gone(KEY, module, before_release("megatron-core", "0.17"))
    group = StandIn(rank=lambda: 0, size=lambda: 1)
    pairs = [(_core(layers), _core(layers)) for layers in (2, 2, 4)]  # all alive: an id is one model's
    with running(f"{KEY}()"):
        two, again, four = (make(*pair, None, group=group) for pair in pairs)
        with_experts = make(*pairs[0], 8, group=group)
    if two == with_experts:
        return Verdict(UNKNOWN, f"expected {KEY}() to tell numbers of experts apart")
    if two != again:
        return Verdict(FIXED, f"{KEY}() tells models apart")
    if two != four:
        return Verdict(FIXED, f"{KEY}() looks at the models' configurations")
    return Verdict(NEEDED, "plans are kept by layout, for all models")


def _core(layers: int) -> Any:
    return StandIn(pg_collection=StandIn(), config=StandIn(num_layers=layers))


def tell_models_apart(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def patched_build_plan_cache_key(*args: Any, **kwargs: Any) -> Any:
        key = make(*args, **kwargs)
        call = arguments_of(signature, args, kwargs)
        cores = [call.get(name) for name in CORES]
        return (key, *map(_facts, cores)) if any(is_a(core, NN_MODULE) for core in cores) else key

    return patched_build_plan_cache_key


def _facts(core: Any) -> tuple[str, ...]:
    """Return what is known of a model's parameters, the same on all ranks; nothing where there is no model."""
    config = getattr(core, "config", None)
    of_config = [repr(getattr(config, name, None)) for name in OF_CONFIG]
    return (*of_config, *(repr(getattr(core, name, None)) for name in OF_MODEL))


PATCH = Patch(
    name="megatron.refit-plan-of-its-model",
    doc=__doc__,
    upstream=None,
    changes_numbers=True,
    sites=(Site(MODULE, diagnose, replace={KEY: tell_models_apart}),),
    leaves=(("refit._plan_cache", "its keys say what the models' configurations do"),),
)
