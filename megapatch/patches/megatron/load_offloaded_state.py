"""Optimizer state that is loaded has its own step count, and reaches the copies of an offloaded optimizer.

Symptom   without Transformer Engine and Apex, where the distributed optimizer has torch's AdamW, loading its state
          in place in buckets (dp_reshardable) keeps the step count of before, silently, and in one tensor for all
          parameters, which then counts up once a parameter: 30 instead of 3, for 14 parameters. Other formats
          raise KeyError: 'step', and parameters in fp32 "a view of a leaf Variable that requires grad".
          With optimizer_cpu_offload, loading optimizer state ends with a KeyError that shows a parameter or says
          'step', unless use_precision_aware_optimizer is on, too. Where it loads, as in buckets, training
          continues from weights rounded to the model's precision and from the step count of before, silently: in
          a new process from step 1, with Adam's averages of many steps.
Upstream  SkyRL#1403 is a workaround; in 0.12 to 0.19. Main at d98e8a64 has the first KeyError repaired, and loads
          buckets silently as above.
Seam      three class attributes. HybridDeviceOptimizer._sync_hdo_state_to_sub_optimizers: the original now finds
          parameters in fp32 among those that it updates. DistributedOptimizer's
          _set_main_param_and_optimizer_states: the original gets the state that a format leaves out, and the
          right step, in a tensor of the parameter's own. Its sharded_state_dict prepares a load by loading the
          present state; afterwards each parameter has its step tensor again.
Limits    in 0.14 and 0.16 torch may refuse to read the classes of optimizers in a checkpoint: pass them to
          torch.serialization.add_safe_globals().
          An inner optimizer with a step() of its own, other than torch's, keeps the one tensor for all.
          Without Transformer Engine and Apex the optimizers of both devices have one class, and Megatron moves the
          loaded state of both to the CPU: the next step raises where only a part is offloaded.
          CI has parameters that say they are on a GPU; it was tried on a GPU with 0.16.1, half of them offloaded.
Numbers   change after a load in buckets with torch's AdamW, and after one that left the copies as they were: to
          those of a run that continued.
Cost      one more copy of the main parameters while state of an offloaded optimizer is loaded; nothing in a step.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..._mcore.known import arguments_of
from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, answering_none, expect_none, running, unmet
from ._stand_ins import hybrid_with_copy

MODULE = "megatron.core.optimizer.distrib_optimizer"
HYBRID = "HybridDeviceOptimizer"
SYNC = "_sync_hdo_state_to_sub_optimizers"
SET = "_set_main_param_and_optimizer_states"
LOAD_BUCKETS = ("load_parameter_state_from_dp_reshardable", "load_parameter_state_from_fs_bucket_space")
LOADED_STEP = 2.0
"""Of a diagnosis."""
RELIED_ON = ("param_to_inner_param", "param_to_fp32_param", "param_update_in_fp32")


def diagnose(module: ModuleType) -> Verdict:
    """Let the real methods load the state of one parameter in fp32, of which a made-up optimizer has a copy."""
    optimizer = getattr(module, "DistributedOptimizer", None)
    load = next((name for name in LOAD_BUCKETS if hasattr(optimizer, name)), LOAD_BUCKETS[0])
    expect_none(
        *unmet.attributes(f"{MODULE}:", "torch"),
        *unmet.attributes(f"{MODULE}:DistributedOptimizer", load),
        *unmet.names(f"{MODULE}:DistributedOptimizer.{SET}", "model_param_group_index_map", "param_groups"),
        *unmet.parameters(f"{MODULE}:DistributedOptimizer.{SET}", "model_param", "tensors"),
        *unmet.names(f"{MODULE}:{HYBRID}.{SYNC}", "_update_fp32_params_by_new_state"),
        *unmet.names(f"{MODULE}:{HYBRID}._update_fp32_params_by_new_state", *RELIED_ON[1:], "master_param"),
        *unmet.names(f"{MODULE}:{HYBRID}._init_sub_optimizers", *RELIED_ON[:2]),
        *unmet.names(f"{MODULE}:DistributedOptimizer.load_state_dict", "step"),
        *unmet.names(f"{MODULE}:DistributedOptimizer.sharded_state_dict", "load_state_dict"),
    )
    with running(f"{SYNC}()"):
        try:
            reached = _copy_after_sync(module)
        except KeyError:
            return Verdict(NEEDED, "loading state raises KeyError for parameters that are in fp32 already")
    if not reached:
        return Verdict(NEEDED, "copies of parameters that are in fp32 already keep the weights from before a load")
    with running(f"{load}()"):
        if not _synchronizes(module, load):
            return Verdict(NEEDED, f"{load}() does not update the copies, and takes over the step count of before")
        step = _step_after(module, load)
    if step != LOADED_STEP:
        return Verdict(NEEDED, f"{load}() takes over the step count of before")
    return Verdict(FIXED, "what is loaded reaches the copies, and the step count is the loaded one")


def _copy_after_sync(module: ModuleType) -> bool:
    parameter, held = module.torch.ones(1), module.torch.zeros(1)
    hybrid = hybrid_with_copy(
        module,
        parameter,
        held,
        fp32_param_to_orig_param={},
        defaults={"cpu_optimizer_cls": SimpleNamespace},
        state={parameter: {"master_param": module.torch.ones(1)}},
        cpu_optimizers=[SimpleNamespace(param_groups=[{"params": [held]}], state={})],
        gpu_optimizer=None,
    )
    unpatched(module.HybridDeviceOptimizer._sync_hdo_state_to_sub_optimizers)(hybrid)
    return bool(held.item() == 1)


def _synchronizes(module: ModuleType, load: str) -> bool:
    """Return whether loading buckets, of which there are none, ends with an update of the copies."""
    calls: list[str] = []
    hybrid = object.__new__(answering_none(module.HybridDeviceOptimizer))
    vars(hybrid).update({SYNC: lambda: calls.append(SYNC), "state": {}, "param_groups": []})
    sizes: dict[str, Any] = {"per_bucket_numel": [], "per_bucket_numel_unpadded": []}
    optimizer = StandIn(optimizer=hybrid, gbuf_ranges=[], buffers=[], **sizes)
    unpatched(getattr(module.DistributedOptimizer, load))(optimizer, dict(sizes))
    return bool(calls)


def _step_after(module: ModuleType, load: str) -> float:
    """Return the step count of a parameter that is loaded in buckets, which hold one of before."""
    tensor, full = module.torch.zeros(1), module.torch.full
    state = {"step": full((), LOADED_STEP), "exp_avg": full((1,), 1.0)}  # as load_state_dict() leaves it
    buckets = [[{"param": full((1,), 1.0), **state, "step": full((), 1.0), "padding": False}]]
    sizes: dict[Any, Any] = {"per_bucket_numel": [], "per_bucket_numel_unpadded": []}
    optimizer = object.__new__(answering_none(module.DistributedOptimizer))
    set_tensors = functools.partial(unpatched(getattr(module.DistributedOptimizer, SET)), optimizer)
    inner: dict[str, Any] = {"state": {tensor: state}, "param_groups": [{"params": [tensor]}], SYNC: lambda: None}
    vars(optimizer).update({**sizes, SET: set_tensors})
    vars(optimizer).update(
        optimizer=StandIn(**inner),
        model_param_group_index_map={"name": (0, 0)},
        gbuf_ranges=[{"dtype": [{"param_map": {"name": StandIn(gbuf_local=range(1))}}]}],
        buffers=[StandIn(buckets=[StandIn(numel_unpadded=1)])],
        config=StandIn(),
        ddp_config=StandIn(),
    )
    unpatched(getattr(module.DistributedOptimizer, load))(optimizer, {**sizes, 0: {"dtype": buckets}})
    return float(state["step"].item())


def update_copies_in_fp32(sync: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sync)
    def patched_sync_hdo_state_to_sub_optimizers(self: Any, *args: Any, **kwargs: Any) -> Any:
        fp32 = self.param_to_fp32_param
        native = {
            parameter: held for parameter, held in self.param_to_inner_param.items() if parameter not in fp32
        }
        if not native or not self.param_update_in_fp32:
            return sync(self, *args, **kwargs)
        states = [(self.state[parameter], parameter) for parameter in native if self.state.get(parameter)]
        for state, parameter in states:
            state["master_param"] = parameter  # it was loaded: into the model, or by the distributed optimizer
        try:
            with temporarily_set(self, param_to_fp32_param={**native, **fp32}):
                return sync(self, *args, **kwargs)
        finally:
            for state, parameter in states:
                state["master_param"] = native[parameter]  # as after a step

    return patched_sync_hdo_state_to_sub_optimizers


def set_all_but_the_step(set_tensors: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_tensors)
    def patched_set_main_param_and_optimizer_states(
        self: Any, model_param: Any, tensors: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(tensors, dict):
            return set_tensors(self, model_param, tensors, *args, **kwargs)
        parameter = _main_param(self, model_param)
        state = {} if parameter is None else self.optimizer.state.get(parameter, {})
        is_offloaded = hasattr(self.optimizer, SYNC)
        if "step" in state:
            # load_state_dict() has set the right one, in one tensor for all. Buckets hold the one that was there
            # when loading began, other formats none, which the original takes for an error.
            if not is_offloaded and hasattr(state["step"], "clone") and _counts_for_each(self.optimizer):
                state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        if is_offloaded:  # the original sets all that is in the state
            own = {key: tensors["param"] if key == "master_param" else value for key, value in state.items()}
            tensors = {**own, **tensors}
        with sys.modules["torch"].no_grad():  # parameters in fp32 are views of the model's
            result = set_tensors(self, model_param, tensors, *args, **kwargs)
        if is_offloaded:
            held = self.optimizer.param_to_inner_param[parameter]
            if held is not parameter:
                held.data.copy_(tensors["param"])
        return result

    return patched_set_main_param_and_optimizer_states


def _main_param(optimizer: Any, model_param: Any) -> Any:
    """Return the tensor that is stepped for this parameter; None with Megatron-FSDP, which has no such map."""
    where = getattr(optimizer, "model_param_group_index_map", {}).get(model_param)
    return where and optimizer.optimizer.param_groups[where[0]]["params"][where[1]]


def give_each_its_step(sharded_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(sharded_state_dict)

    @functools.wraps(sharded_state_dict)
    def patched_sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if arguments_of(signature, (self, *args), kwargs).get("is_loading") is not True:
            return sharded_state_dict(self, *args, **kwargs)
        try:
            return sharded_state_dict(self, *args, **kwargs)
        finally:
            if _counts_for_each(self.optimizer):
                _give_each_its_step(self.optimizer)

    return patched_sharded_state_dict


def _counts_for_each(inner: Any) -> bool:
    """Return whether an optimizer is stepped by torch's Adam, which counts up in each parameter's own tensor.

    One with a step() of its own may have one count for all. An offloaded one has Adam's of its own.
    """
    optim = sys.modules["torch"].optim  # which wraps step() of each class for its profiler
    step = inspect.unwrap(getattr(type(inner), "step", _counts_for_each))
    return hasattr(inner, SYNC) or step in (inspect.unwrap(optim.Adam.step), inspect.unwrap(optim.AdamW.step))


def _give_each_its_step(inner: Any) -> None:
    """Clone a step tensor that several parameters share: the optimizer counts up in place."""
    seen: set[int] = set()
    for state in getattr(inner, "state", {}).values():
        if isinstance(state, dict) and hasattr(state.get("step"), "clone"):
            if id(state["step"]) in seen:
                state["step"] = state["step"].clone()
            seen.add(id(state["step"]))


PATCH = Patch(
    name="megatron.load-offloaded-state",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1403",
    changes_numbers=True,
    sites=(
        Site(
            MODULE,
            diagnose,
            replace={
                f"{HYBRID}.{SYNC}": update_copies_in_fp32,
                f"DistributedOptimizer.{SET}": set_all_but_the_step,
                "DistributedOptimizer.sharded_state_dict": give_each_its_step,
            },
        ),
    ),
)
