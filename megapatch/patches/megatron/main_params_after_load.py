"""Weights that are loaded without optimizer state are those that the next optimizer step starts from.

Symptom   with bf16 or fp16, a load of the model without its optimizer is undone by the next optimizer.step(),
          silently: load_state_dict() fills the model, the optimizer's fp32 main parameters keep their values, and
          the step writes them over the loaded weights. A new process gets its initial weights back, and one that
          goes back to a checkpoint stays where it was.
          With overlap_param_gather, a load after a forward pass that raised is undone by the gathers that it left
          under way: whoever waits for them writes them over the loaded weights.
Upstream  NovaSky-AI/SkyRL#2149 (open); in 0.12 to 0.19. Megatron leaves it to callers, which have
          optimizer.reload_model_params(). Its own load_checkpoint(), slime, miles and ms-swift call that. SkyRL
          with load_optimizer_states=False, verl with load_contents=["model"] and AReaL with with_optim=False do
          not.
Seam      load_state_dict() of MegatronModule and of the data-parallel wrappers notes which parameters a load that
          succeeded has changed. Optimizers look at that before they step, and before their state is saved: if any
          loaded parameter differs from its main parameter, rounded, the main parameters of all of its kind that
          were loaded are taken from the model. After both were loaded, in any order, and after weights were
          swapped for others and back, nothing differs, and main parameters keep every bit. A load of main
          parameters after that of the weights settles it, whatever the weights are.
          Reloading only the elements that differ is not an option: with a small learning rate most weights round
          to the same bf16 number for many steps, so most of the discarded training would stay. Reloading at the
          load is not either: it would round the main parameters of a model whose weights are swapped.
          A load waits for gathers under way before it begins; parameters that it loads whole need not be gathered.
Limits    a load that changes no bf16 number looks like a swap there and back: the main parameters keep their bits.
          Ranks do not ask each other, and judge four kinds of parameters apart, so that copies of a parameter stay
          the same: those that tensor-parallel ranks hold alike, tied embeddings, experts, and the others, which
          are also new where one of the first two is.
          Optimizer state that is saved while other weights are swapped in is taken for that of a load: it has
          their main parameters, and those that were there lose the bits that bf16 has not.
          Where the weights of a checkpoint are not those of its optimizer, as saved before a gather, training
          continues from the weights if the optimizer is loaded first, if its load changes no main parameter, or
          if other weights are swapped in and out before the first step.
          Weights that come into a model otherwise than by load_state_dict() of a MegatronModule or a data-parallel
          wrapper are not seen, such as those of a Hugging Face model that a bridge loads, or by load_state_dict()
          of a plain module around the model or inside it: call optimizer.reload_model_params() after it (the audit
          finds the step in which that lacks). Adam's moments do not change. Left alone are FP8 parameters,
          Megatron-FSDP, a step that is replayed from a CUDA graph, and, with use_precision_aware_optimizer, main
          parameters that are not in fp32 (store_param_remainders keeps less than half a bf16 step of the old
          ones). The parts for that optimizer, and for an offloaded one, are not tested.
Numbers   change after a load of weights alone, to those of a new process that loads the same.
Cost      about 0.1 us in each optimizer step. The step after a load compares the loaded parameters, for which the
          host waits once.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from types import ModuleType
from typing import Any

from ..._mcore.changes import Changes
from ..._mcore.main_params import GROUPS, SHARDS, differing, has_memory, pairs, samples, stale_pairs
from ..._mcore.param_gathers import finish_gathers, overlapping_ddps, record_loaded
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import (
    cannot_run,
    lacking,
    missing_attributes,
    missing_names,
    missing_reads,
)
from ._chained import CHILDREN, children_of
from ._load_of_a_stand_in import MODULES, load_one, steps_around_a_load

OPTIMIZERS = "megatron.core.optimizer"
WRAPPERS = "megatron.core.distributed.data_parallel_base"
FLOAT16 = "optimizer.Float16OptimizerWithFloat16Params"
DISTRIBUTED = "distrib_optimizer.DistributedOptimizer"
CHAINED = "optimizer.ChainedOptimizer"
GRADS = "_copy_model_grads_to_main_grads"
"""The first call of a step in an optimizer with main parameters, in prepare_grads()."""
INNER = "param_to_inner_param"
"""The copies of a HybridDeviceOptimizer, by the parameters that it steps."""

LOADED = "_megapatch_loaded"
"""Attribute of a parameter: the number of the last load that changed it."""
SEEN = "_megapatch_loads_seen"
"""Attribute of an optimizer: the number of the last load that its main parameters agree with."""

SETTLES = "_megapatch_load_settles"
"""Attribute of an optimizer: when its state was loaded, the last load's number, and its main parameters."""

_loads = 0
"""Number of the last load."""
_said = False

logger = logging.getLogger("megapatch")


# ------------------------------------------------------------------------ the model: what was loaded?
def diagnose_modules(module: ModuleType) -> Verdict:
    """Load a parameter with the real MegatronModule, and see whether torch counts that as a change."""
    if missing := missing_attributes(f"{MODULES}:MegatronModule", "load_state_dict"):
        return lacking(missing)
    parameter = sys.modules["torch"].nn.Parameter(sys.modules["torch"].zeros(1))
    try:
        load_one(module.MegatronModule, parameter)
    except Exception as error:
        return cannot_run("load_state_dict()", error)
    if parameter.item() == 1 and parameter._version:
        return Verdict(NEEDED, "optimizers do not learn that weights were loaded")
    return Verdict(UNKNOWN, "expected load_state_dict() to change a parameter in place; it does not")


def diagnose_wrappers(module: ModuleType) -> Verdict:
    """Read the real wrapper: it passes the load on."""
    missing = missing_reads(f"{WRAPPERS}:_BaseDataParallel.load_state_dict", "module", "load_state_dict")
    return lacking(missing) if missing else Verdict(NEEDED, "optimizers do not learn that weights were loaded")


def note_loaded(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_state_dict)
    def patched_load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        ddps = overlapping_ddps(self)
        for ddp in ddps:
            finish_gathers(ddp)  # they would write over what is loaded
        changes = Changes(self.parameters())
        result = load_state_dict(self, *args, **kwargs)
        changed = changes.made()
        _note(changed)
        for ddp in ddps:
            record_loaded(ddp, changed)
        return result

    return patched_load_state_dict


def _note(parameters: list[Any]) -> None:
    global _loads
    if parameters:
        _loads += 1
        for parameter in parameters:
            setattr(parameter, LOADED, _loads)


# ------------------------------------------------------------------------ the optimizers: do they agree?
def diagnose_optimizers(module: ModuleType) -> Verdict:
    """Let the real optimizer step before and after the real load of a parameter in bf16."""
    missing = [
        *missing_names(f"{OPTIMIZERS}.optimizer:Float16OptimizerWithFloat16Params.__init__", *GROUPS),
        *missing_names(f"{OPTIMIZERS}.distrib_optimizer:DistributedOptimizer.__init__", *SHARDS),
        *missing_attributes(f"{OPTIMIZERS}:{DISTRIBUTED}", "_get_model_param_range_map"),
        *missing_reads(f"{OPTIMIZERS}.optimizer:MixedPrecisionOptimizer.prepare_grads", GRADS),
        *missing_names(f"{OPTIMIZERS}.optimizer:ChainedOptimizer.__init__", CHILDREN),
    ]
    for path in PATCH.sites[0].replace:
        owner, _, name = path.rpartition(".")
        missing += missing_attributes(f"{OPTIMIZERS}:{owner}", name)
    if missing:
        return lacking(missing)
    try:
        stepped, loaded = steps_around_a_load(module.optimizer)
    except Exception as error:
        return cannot_run("step_with_ready_grads()", error)
    if (stepped, loaded) == (2, 2):
        return Verdict(NEEDED, "the first step after a load puts the weights from before back into the model")
    if (stepped, loaded) == (2, 1):
        return Verdict(FIXED, "the first step after a load starts from the loaded weights")
    return Verdict(
        UNKNOWN,
        f"expected a step to put its main parameter, 2, into the model; found {stepped:g}, then {loaded:g}",
    )


def settle_by_state(init: Callable[..., Any]) -> Callable[..., Any]:
    """Let a load of main parameters settle the loads of the model before it."""

    @functools.wraps(init)
    def patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if hook := getattr(self.optimizer, "register_load_state_dict_post_hook", None):
            hook(functools.partial(_begin_to_settle, weakref.ref(self)))

    return patched_init


def _begin_to_settle(owner: weakref.ref[Any], inner: Any) -> None:
    """Called by torch's optimizer once its state was loaded. Main parameters come afterwards, or not at all."""
    optimizer = owner()
    if optimizer is not None and vars(optimizer).get(SEEN, 0) != _loads:
        setattr(optimizer, SETTLES, (_loads, samples(optimizer)))


def _end_to_settle(optimizer: Any) -> None:
    loads, before = vars(optimizer).pop(SETTLES, (0, ()))
    if not loads:
        return
    now = samples(optimizer)
    is_known = len(before) == len(now) and all(one is not None for one in (*before, *now))
    if not is_known or any(differing(list(zip(before, now, strict=True)))):
        setattr(optimizer, SEEN, loads)


def agree_first(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let main parameters agree with the loads of the model before the method uses them."""

    @functools.wraps(method)
    def patched_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__.get(SEEN, 0) != _loads:
            _agree(self)
        return method(self, *args, **kwargs)

    return patched_method


def _agree(optimizer: Any) -> None:
    children = list(children_of(optimizer))
    for child in children:
        _end_to_settle(child)
    loaded = [triple for child in children for triple in _loaded_pairs(child)]
    copies = [pair for child in children for pair in _copies(child)]
    if not all(has_memory(tensor) for _, *tensors in loaded for tensor in tensors):
        return  # offloaded by a framework: it cannot step now either
    if stale := stale_pairs(loaded):
        _say()
        for model, main in stale:
            main.copy_(model)
    for (main, copy), differs in zip(copies, differing(copies), strict=True):
        if differs:
            copy.copy_(main)
    for each in (optimizer, *children):
        setattr(each, SEEN, _loads)


def _loaded_pairs(optimizer: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each parameter that was loaded since, this rank's part of it, and its main parameter."""
    for parameter, model, main in pairs(optimizer):
        if _is_newer(parameter, optimizer) and main is not None:
            yield parameter, model, main.data


def _copies(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each main parameter of an offloaded optimizer and the copy that it steps, if something was loaded."""
    copies = getattr(optimizer.optimizer, INNER, {})
    groups = (getattr(optimizer, name, ()) for name in (SHARDS[0], "model_fp32_groups"))
    if copies and any(_is_newer(each, optimizer) for each in chain.from_iterable(chain.from_iterable(groups))):
        yield from ((main.data, copy.data) for main, copy in copies.items() if copy is not main)


def _is_newer(parameter: Any, optimizer: Any) -> bool:
    return bool(getattr(parameter, LOADED, 0) > vars(optimizer).get(SEEN, 0))


def _say() -> None:
    global _said
    if not _said:
        _said = True
        logger.info(
            "megatron.main-params-after-load: weights were loaded without optimizer state; main parameters follow"
        )


PATCH = Patch(
    name="megatron.main-params-after-load",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/issues/2149",
    changes_numbers=True,
    sites=(
        Site(
            module=OPTIMIZERS,
            diagnose=diagnose_optimizers,
            replace={
                "optimizer.MixedPrecisionOptimizer.__init__": settle_by_state,
                f"{FLOAT16}.{GRADS}": agree_first,
                f"{FLOAT16}.state_dict": agree_first,
                f"{DISTRIBUTED}.{GRADS}": agree_first,
                f"{DISTRIBUTED}.state_dict": agree_first,
                f"{CHAINED}.prepare_grads": agree_first,
                f"{CHAINED}.state_dict": agree_first,
                f"{CHAINED}.sharded_state_dict": agree_first,
            },
        ),
        Site(module=MODULES, diagnose=diagnose_modules, replace={"MegatronModule.load_state_dict": note_loaded}),
        Site(
            module=WRAPPERS,
            diagnose=diagnose_wrappers,
            replace={"_BaseDataParallel.load_state_dict": note_loaded},
        ),
    ),
)
