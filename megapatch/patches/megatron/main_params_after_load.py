"""Weights that come from a checkpoint without optimizer state are those that the next optimizer step starts from.

Symptom   with bf16 or fp16, a load of the model without its optimizer is undone by the next optimizer.step(),
          silently: load_state_dict() fills the model, the optimizer's fp32 main parameters keep their values, and
          the step writes them over the loaded weights. A new process gets its initial weights back, and one that
          goes back to a checkpoint stays where it was.
          With overlap_param_gather, a load after a forward pass that raised is undone by the gathers that it left
          under way: waiting for them writes them over the loaded weights.
Upstream  NovaSky-AI/SkyRL#2149 (open); in 0.12 to 0.19. Megatron leaves it to callers, which have
          optimizer.reload_model_params(). Its own load_checkpoint(), slime, miles and ms-swift call that. SkyRL
          with load_optimizer_states=False, verl with load_contents=["model"] and AReaL with with_optim=False do
          not.
Seam      dist_checkpointing.load() notes the tensors that it returns. load_state_dict() of MegatronModule and of
          the data-parallel wrappers notes which parameters it has changed, and whether from such tensors.
          Optimizers look at that before they step. If weights differ from the rounded main parameters, they were
          restored or swapped in for a while (quantization-aware training); the step cannot tell which. Two facts
          together are taken for a restore: the weights come from a checkpoint, and gradients have changed since
          the load. Then main parameters follow. Otherwise they are left alone, as without megapatch.
          Either way one WARNING per calling line says what was assumed, and how to choose:
          optimizer.reload_model_params() restores, `with megapatch.weight_sync.lent_weights():` lends.
          Where nothing differs nothing is said or done: after weights and optimizer were loaded, in any order,
          and after weights were swapped for others and back.
          Reloading only the elements that differ is not an option: with a small learning rate most weights round
          to the same bf16 number for many steps, so most of the discarded training would stay. Reloading at the
          load is not either: it would round the main parameters of a model whose weights are swapped.
          A load waits for gathers under way before it begins.
Limits    weights that come from elsewhere are not restored, but warned of: a copy in memory, torch.load(), tensors
          of a checkpoint that were cast or moved. Call optimizer.reload_model_params() after such a load.
          Optimizer state that is saved between such a load and the next step is that from before the load.
          A load that changes no bf16 number looks like a swap there and back: the main parameters keep their bits.
          Ranks do not ask each other, and look at four kinds of parameters apart, so that copies stay the same.
          Only load_state_dict() of a MegatronModule or a data-parallel wrapper is seen, not the weights that a
          bridge takes from a Hugging Face model (the audit finds the step that lacks a reload).
          Adam's moments do not change. Left alone are FP8 parameters, Megatron-FSDP, a step that is replayed from
          a CUDA graph, and, with use_precision_aware_optimizer, main parameters that are not in fp32. The parts
          for that optimizer, and for an offloaded one, are not tested.
Numbers   change after a load of weights alone from a checkpoint, to those of a new process that loads the same.
Cost      about 0.2 us in each optimizer step. The step after a load compares the loaded parameters, for which the
          host waits once.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from ..._mcore.changes import Changes, count_of
from ..._mcore.main_params import CHILDREN, GROUPS, SHARDS, are_lent, children_of
from ..._mcore.param_gathers import finish_gathers, overlapping_ddps, record_loaded
from ..._mcore.side_table import SideTable
from ..._python.dotted import find
from ..._python.places import user_line
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import expect_none, running, unmet
from ._stand_ins import MODULES, load_one, steps_around_a_load

OPTIMIZERS = "megatron.core.optimizer"
WRAPPERS = "megatron.core.distributed.data_parallel_base"
CHECKPOINTS = "megatron.core.dist_checkpointing.serialization"
FLOAT16 = "optimizer.Float16OptimizerWithFloat16Params"
DISTRIBUTED = "distrib_optimizer.DistributedOptimizer"
CHAINED = "optimizer.ChainedOptimizer"
GRADS = "_copy_model_grads_to_main_grads"
"""The first call of a step in an optimizer with main parameters, in prepare_grads()."""

NEVER = -1
_read = SideTable()
"""Of a tensor that dist_checkpointing.load() has returned: how often it had been changed by then."""
_loaded = SideTable()
"""Of a parameter: the last load that changed it."""
_seen = SideTable()
"""Of an optimizer: the number of the last load that its main parameters agree with."""

_loads = 0
"""Number of the last load."""


# ------------------------------------------------------------------------ checkpoints: what was read?
def diagnose_checkpoints(module: ModuleType) -> Verdict:
    expect_none(*unmet.parameters(f"{CHECKPOINTS}:load", "sharded_state_dict", "checkpoint_dir"))
    return Verdict(NEEDED, "optimizers do not learn that a checkpoint was read")


def note_read(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def patched_load(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        for tensor in _tensors_in(result):
            _read.set(tensor, count_of(tensor))
        return result

    return patched_load


def _tensors_in(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        state = tuple(state.values())
    if isinstance(state, list | tuple):
        for part in state:
            yield from _tensors_in(part)
    elif isinstance(state, sys.modules["torch"].Tensor):
        yield state


def _is_as_read(state_dict: Any) -> bool:
    tensors = list(_tensors_in(state_dict))
    return bool(tensors) and all(_read.get(tensor, NEVER) == count_of(tensor) for tensor in tensors)


# ------------------------------------------------------------------------ the model: what was loaded?
def diagnose_modules(module: ModuleType) -> Verdict:
    """Load a parameter with the real MegatronModule, and see whether torch counts that as a change."""
    expect_none(*unmet.attributes(f"{MODULES}:MegatronModule", "load_state_dict"))
    parameter = sys.modules["torch"].nn.Parameter(sys.modules["torch"].zeros(1))
    with running("load_state_dict()"):
        load_one(module.MegatronModule, parameter)
    if parameter.item() == 1 and parameter._version:
        return Verdict(NEEDED, "optimizers do not learn that weights were loaded")
    return Verdict(UNKNOWN, "expected load_state_dict() to change a parameter in place; it does not")


def diagnose_wrappers(module: ModuleType) -> Verdict:
    """Read the real wrapper: it passes the load on."""
    expect_none(*unmet.reads(f"{WRAPPERS}:_BaseDataParallel.load_state_dict", "module", "load_state_dict"))
    return Verdict(NEEDED, "optimizers do not learn that weights were loaded")


class _Load:
    """One load of weights.

    Attributes:
        number: of all loads of the process, from 1 on.
        line: of the user's code that loads.
    """

    def __init__(self, number: int, line: str, of_checkpoint: bool, parameters: list[Any]) -> None:
        self.number, self.line = number, line
        self._of_checkpoint = of_checkpoint
        self._gradients = [(weakref.ref(parameter), *_gradient(parameter)) for parameter in parameters]

    def is_restore(self) -> bool:
        """Return whether a step that comes now should start from what was loaded: the seam's two facts."""
        now = ((reference(), gradient, count) for reference, gradient, count in self._gradients)
        return self._of_checkpoint and any(
            (found := _gradient(parameter))[0] is not gradient or found[1] != count
            for parameter, gradient, count in now
            if parameter is not None
        )


def _gradient(parameter: Any) -> tuple[weakref.ref[Any] | None, int | None]:
    """Return a reference, which keeps no gradient alive, to a parameter's, and how often that was changed."""
    gradient = vars(parameter).get("main_grad", parameter.grad)
    return (None, None) if gradient is None else (weakref.ref(gradient), count_of(gradient))


def note_loaded(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_state_dict)
    def patched_load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        ddps = overlapping_ddps(self)
        for ddp in ddps:
            finish_gathers(ddp)  # they would write over what is loaded
        changes, of_checkpoint = Changes(self.parameters()), _is_as_read(state_dict)
        result = load_state_dict(self, state_dict, *args, **kwargs)
        changed = changes.made()
        if not are_lent():
            _note(changed, of_checkpoint)
        for ddp in ddps:
            record_loaded(ddp, changed)
        return result

    return patched_load_state_dict


def _note(parameters: list[Any], of_checkpoint: bool) -> None:
    global _loads
    if not parameters:
        return
    _loads += 1
    load = _Load(_loads, user_line(), of_checkpoint, parameters)
    for parameter in parameters:
        _loaded.set(parameter, load)


# ------------------------------------------------------------------------ the optimizers: do they agree?
def diagnose_optimizers(module: ModuleType) -> Verdict:
    """Let the real optimizer step before and after the real load of a parameter in bf16."""
    missing = [
        *unmet.names(f"{OPTIMIZERS}.optimizer:Float16OptimizerWithFloat16Params.__init__", *GROUPS),
        *unmet.names(f"{OPTIMIZERS}.distrib_optimizer:DistributedOptimizer.__init__", *SHARDS),
        *unmet.attributes(f"{OPTIMIZERS}:{DISTRIBUTED}", "_get_model_param_range_map"),
        *unmet.reads(f"{OPTIMIZERS}.optimizer:MixedPrecisionOptimizer.prepare_grads", GRADS),
        *unmet.names(f"{OPTIMIZERS}.optimizer:ChainedOptimizer.__init__", CHILDREN),
    ]
    for kind in (FLOAT16, DISTRIBUTED):
        missing += unmet.reads(f"{OPTIMIZERS}:{kind}.load_state_dict", "load_state_dict")
    for path in PATCH.sites[0].replace:
        owner, _, name = path.rpartition(".")
        missing += unmet.attributes(f"{OPTIMIZERS}:{owner}", name)
    expect_none(*missing)
    with running("step_with_ready_grads()"):
        stepped, loaded = steps_around_a_load(find(module, "optimizer"))
    if (stepped, loaded) == (2, 2):
        return Verdict(NEEDED, "the first step after a load puts the weights from before back into the model")
    if (stepped, loaded) == (2, 1):
        return Verdict(FIXED, "the first step after a load starts from the loaded weights")
    return Verdict(
        UNKNOWN,
        f"expected a step to put its main parameter, 2, into the model; found {stepped:g}, then {loaded:g}",
    )


def settle_by_state(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Let a load of the optimizer settle the loads of the model before it.

    A hook of torch's on the inner optimizer is not an option: where that is pickled whole, so is the hook.
    """

    @functools.wraps(load_state_dict)
    def patched_load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_state_dict(self, *args, **kwargs)
        _seen.set(self, _loads)
        return result

    return patched_load_state_dict


def agree_first(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let main parameters agree with the loads of the model before a step uses them."""

    @functools.wraps(method)
    def patched_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _seen.get(self, 0) != _loads:
            _agree(self)
        return method(self, *args, **kwargs)

    return patched_method


def _agree(optimizer: Any) -> None:
    children = list(children_of(optimizer))
    if any(_seen.get(child, 0) != _loads for child in children):
        from ._weights_alone import agree  # where the optimizer was not loaded after the weights

        if not agree(children, _newer):
            return
    for each in (optimizer, *children):
        _seen.set(each, _loads)


def _newer(parameter: Any, optimizer: Any) -> _Load | None:
    """Return the last load that changed the parameter, unless the optimizer has agreed with it."""
    load: _Load | None = _loaded.get(parameter)
    return load if load is not None and load.number > _seen.get(optimizer, 0) else None


PATCH = Patch(
    name="megatron.main-params-after-load",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/issues/2149",
    changes_numbers=True,
    sites=(
        Site(
            OPTIMIZERS,
            diagnose_optimizers,
            replace={
                f"{FLOAT16}.load_state_dict": settle_by_state,
                f"{DISTRIBUTED}.load_state_dict": settle_by_state,
                f"{FLOAT16}.{GRADS}": agree_first,
                f"{DISTRIBUTED}.{GRADS}": agree_first,
                f"{CHAINED}.prepare_grads": agree_first,
            },
        ),
        Site(MODULES, diagnose_modules, replace={"MegatronModule.load_state_dict": note_loaded}),
        Site(CHECKPOINTS, diagnose_checkpoints, replace={"load": note_read}),
        Site(WRAPPERS, diagnose_wrappers, replace={"_BaseDataParallel.load_state_dict": note_loaded}),
    ),
)
