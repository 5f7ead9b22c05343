"""Reading parameters after a step returns that step's parameters, on every rank.

Symptom   with the distributed optimizer and overlap_param_gather, optimizer.step() leaves each data-parallel rank
          with its own new shard of the parameters beside the others' old ones, until the next forward pass
          gathers them. A checkpoint or an export in between is a mixture, silently: with two ranks half of it is
          one step old. NeMo-RL's default configurations have the option on.
Upstream  unfixed in 0.12 to 0.19 and on main. Megatron's own train() gathers before a save; all else is left to
          callers. NVIDIA-NeMo/RL#4086 does it there; verl, ms-swift, AReaL and SkyRL do not.
Seam      three kinds. (1) Calls that all ranks make gather first: save_checkpoint() of Megatron and
          Megatron-Bridge, generate_state_dict(), MegatronModule.sharded_state_dict(), once for the module that is
          called, the refit of a separate model for inference (megatron.core.resharding), and the exporters of
          Megatron-Bridge, mbridge and mcore-bridge.
          Exporters are generators, often made before the step and read after it, so they gather at their first
          `next`. mcore-bridge's LoRA layers gather before they are merged: unmerged with newer adapters, the base
          weights would be changed for good.
          (2) DistributedDataParallel's state_dict() and state_dict_for_save_checkpoint(), and
          generate_state_dict() for the format "torch", may be called by one rank alone, where a gather would hang:
          they raise a MisuseError that names the function to call.
          (3) DistributedOptimizer's step, the bucket groups' start_param_sync() and broadcast_params(), which all
          ranks make together, record whether a gather is due. A load, which one rank may make alone, does not.
          Megatron's flag is cleared before the step, not by it: a gather between a backward pass and the step
          would be the last one, and the next forward pass would run on old shards.
Limits    reading an unwrapped model's own state_dict() or its parameters is not seen: call
          `megapatch.weight_sync.gathered_parameters(model)` on all ranks before it. Nor is a gather by hand, by
          torch's collectives: state_dict() raises after it. Call sharded_state_dict() on all ranks of a
          data-parallel group, as dist_checkpointing does. Models that gathered_parameters() refuses, saves and
          exports refuse, too: with reuse_grad_buf_for_mxfp8_param_ag, from an offloaded buffer, and for a
          layer-wise optimizer, whose parameters sharded_state_dict() and generate_state_dict() leave alone.
          DistributedDataParallel gets a state_dict() of its own: wrappers that are later put on that of its base
          class do not see its calls.
Numbers   change where something was read before it was gathered, to those of a run without overlap_param_gather,
          to the last bit. Those of training do not change.
Cost      about 0.1 us a bucket group in a step. No gather in addition, but with virtual pipeline stages and
          align_param_gather, where Megatron gathers at the start of each call whatever came before.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.bucket_groups import DDP, GROUP, bucket_groups
from ..._mcore.known import arguments_of
from ..._mcore.param_gathers import (
    OPTIMIZER_MODULE,
    RECORDS,
    STEPPED,
    ddps_in,
    ddps_left,
    gather_params,
    record_gathered,
    record_step,
    refuse_stale_read,
)
from ...patch import FIXED, NEEDED, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, expect_none, reads_in_order, resolve, running, unmet
from .._readers import GATHERS, Reader, ReadingSite

OPTIMIZER = f"{OPTIMIZER_MODULE}:DistributedOptimizer"
CONVERSION = "megatron.bridge.models.conversion"
SAVE = Reader("save_checkpoint", "model")
SHARDED = Reader("MegatronModule.sharded_state_dict", "self", reads=("_save_to_state_dict", "named_children"))
LEGACY = "torch"
"""The format of checkpoints for which one data-parallel rank alone collects the state."""


# ------------------------------------------------------------------------ the optimizer: is a gather due?
def diagnose_optimizer(module: ModuleType) -> Verdict:
    """Read the real step: running it needs process groups and a model."""
    expect_none(*unmet.names(f"{OPTIMIZER}.__init__", "model_chunks"))
    step = inspect.unwrap(module.DistributedOptimizer.step_with_ready_grads)  # of torch.no_grad()
    if not reads_in_order(step, "overlap_param_gather"):
        expect_none(f"overlap_param_gather in {OPTIMIZER}.step_with_ready_grads")
    return Verdict(
        NEEDED, "with overlap_param_gather a step leaves its parameters to be gathered, and no one knows"
    )


def record_birth(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for chunk in _overlapping_chunks(self):
            for group in bucket_groups(chunk):
                if group not in STEPPED:
                    record_gathered(group)  # nothing has stepped yet

    return patched_init


def record_steps(step_with_ready_grads: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step_with_ready_grads)
    def patched_step_with_ready_grads(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step_with_ready_grads(self, *args, **kwargs)
        for chunk in _overlapping_chunks(self):
            record_step(chunk)
        return result

    setattr(patched_step_with_ready_grads, RECORDS, True)
    return patched_step_with_ready_grads


def _overlapping_chunks(optimizer: Any) -> list[Any]:
    if getattr(optimizer.config, "optimizer_cuda_graph", False):
        return []  # a replayed graph steps without running any code
    # Chunks of Megatron-FSDP have no bucket groups.
    return [chunk for chunk in optimizer.model_chunks if hasattr(chunk, "bucket_groups")]


# ------------------------------------------------------------------------ DistributedDataParallel
def diagnose_ddp(module: ModuleType) -> Verdict:
    """Call the real readers on a stand-in, and see whether they gather."""
    expect_none(
        *unmet.names(f"{GROUP}.__init__", "param_gather_handle", "param_gather_dispatched"),
        *unmet.parameters(f"{GROUP}.finish_param_sync", "skip_next_bucket_dispatch"),
        *unmet.names(f"{GROUP}.finish_grad_sync", "param_gather_dispatched"),
        *unmet.attributes(GROUP, "start_param_sync"),
        *unmet.attributes(DDP, "broadcast_params", "state_dict", "state_dict_for_save_checkpoint"),
    )
    ddp = resolve(DDP)
    gathers: list[str] = []
    missing: list[str] = []
    with running("state_dict and state_dict_for_save_checkpoint"):
        for reader in ("state_dict", "state_dict_for_save_checkpoint"):
            stand_in = _stand_in(lambda *args, reader=reader, **kwargs: gathers.append(reader))
            unpatched(getattr(ddp, reader))(stand_in)
            missing += [] if stand_in.module.reads else [f"module.{reader} called by {reader}"]
    expect_none(*missing)
    if len(set(gathers)) == 2:
        return Verdict(FIXED, "state_dict and state_dict_for_save_checkpoint gather the parameters")
    return Verdict(NEEDED, "state_dict and state_dict_for_save_checkpoint read parameters that are not gathered")


def _stand_in(gather: Callable[..., Any]) -> StandIn:
    """Return just enough of a DistributedDataParallel whose parameters wait to be gathered, for its readers."""
    methods = dict.fromkeys(GATHERS, gather)
    group = StandIn(**methods, param_gather_handle=None, param_gather_dispatched=False)
    reads: list[Any] = []
    names = ("state_dict", "state_dict_for_save_checkpoint")
    module = StandIn(reads=reads, **dict.fromkeys(names, lambda **kwargs: reads.append(kwargs)))
    config = StandIn(overlap_param_gather=True, use_distributed_optimizer=True)
    groups = {"bucket_groups": [group], "expert_parallel_bucket_groups": []}
    return StandIn(**methods, **groups, module=module, ddp_config=config)


def record_gathers(start_param_sync: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start_param_sync)
    def patched_start_param_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = start_param_sync(self, *args, **kwargs)
        if self in STEPPED:
            record_gathered(self)
        return result

    return patched_start_param_sync


def record_broadcasts(broadcast_params: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(broadcast_params)
    def patched_broadcast_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = broadcast_params(self, *args, **kwargs)
        for group in bucket_groups(self):
            if group in STEPPED:
                record_gathered(group)  # by a collective of all its ranks: they have the same parameters
        return result

    return patched_broadcast_params


def refuse_stale(reader: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reader)
    def patched_reader(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_stale_read(self, f"{reader.__name__}()")
        return reader(self, *args, **kwargs)

    return patched_reader


def gather_for_shards(sharded_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Gather once for the called module; its own calls of submodules belong to that call."""
    asked = threading.local()

    @functools.wraps(sharded_state_dict)
    def patched_sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(asked, "outermost", False):
            return sharded_state_dict(self, *args, **kwargs)
        _gather_for_shards(ddps_left(self))
        asked.outermost = True
        try:
            return sharded_state_dict(self, *args, **kwargs)
        finally:
            asked.outermost = False

    return patched_sharded_state_dict


def _gather_for_shards(ddps: list[Any]) -> None:
    """Gather, but for a layer-wise optimizer, which may not have stepped yet: a load asks for the shards, too."""
    gather_params(ddp for ddp in ddps if ddp.ddp_config.use_distributed_optimizer)


# ------------------------------------------------------------------------ checkpoints
def gather_for_state(generate_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(generate_state_dict)

    @functools.wraps(generate_state_dict)
    def patched_generate_state_dict(*args: Any, **kwargs: Any) -> Any:
        given = arguments_of(signature, args, kwargs)
        ddps = ddps_in(given.get("model"))
        if ddps and getattr(given["args"], "ckpt_format", None) == LEGACY:
            for ddp in ddps:
                refuse_stale_read(ddp, "generate_state_dict()")
        else:
            _gather_for_shards(ddps)
        return generate_state_dict(*args, **kwargs)

    return patched_generate_state_dict


def diagnose_checkpointing(module: ModuleType) -> Verdict:
    """Read both functions of Megatron's checkpointing."""
    path = f"{module.__name__}:generate_state_dict"
    expect_none(*unmet.parameters(path, "args", "model"), *unmet.names(path, "ckpt_format"))
    return SAVE.diagnose(module)


def _exporter(path: str, model: str = "megatron_model") -> Reader:
    return Reader(path, model, stream=True)


PATCH = Patch(
    name="megatron.gathered-when-read",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/4086",
    changes_numbers=True,
    sites=(
        Site(
            OPTIMIZER_MODULE,
            diagnose_optimizer,
            replace={
                "DistributedOptimizer.__init__": record_birth,
                "DistributedOptimizer.step_with_ready_grads": record_steps,
            },
        ),
        Site(
            "megatron.core.distributed",
            diagnose_ddp,
            replace={
                "param_and_grad_buffer._ParamAndGradBucketGroup.start_param_sync": record_gathers,
                "distributed_data_parallel.DistributedDataParallel.broadcast_params": record_broadcasts,
                "distributed_data_parallel.DistributedDataParallel.state_dict": refuse_stale,
                "distributed_data_parallel.DistributedDataParallel.state_dict_for_save_checkpoint": refuse_stale,
            },
        ),
        Site(
            "megatron.training.checkpointing",
            diagnose_checkpointing,
            replace={SAVE.path: SAVE.gather_first, "generate_state_dict": gather_for_state},
        ),
        Site("megatron.core.transformer.module", SHARDED.diagnose, replace={SHARDED.path: gather_for_shards}),
        ReadingSite("megatron.bridge.training.checkpointing", SAVE),
        ReadingSite("megatron.core.resharding.refit", Reader("reshard_model_weights", "src_model")),
        ReadingSite(f"{CONVERSION}.model_bridge", _exporter("MegatronModelBridge.stream_weights_megatron_to_hf")),
        ReadingSite(
            f"{CONVERSION}.peft_bridge", _exporter("MegatronPeftBridge.stream_adapter_weights_megatron_to_hf")
        ),
        ReadingSite(
            f"{CONVERSION}.quant_bridge",
            _exporter("MegatronQuantizationBridge.stream_weights_megatron_to_hf_quant"),
        ),
        ReadingSite("mbridge.core.bridge", _exporter("Bridge.export_weights", "models")),
        ReadingSite("mcore_bridge.bridge.gpt_bridge", _exporter("GPTBridge.export_weights", "mg_models")),
        # It adds a layer's adapters to its base weights, for an export; unmerge() subtracts them again.
        ReadingSite(
            "mcore_bridge.tuners.lora", Reader("LoraParallelLinear.merge", "self", reads=("get_delta_weights",))
        ),
    ),
)
