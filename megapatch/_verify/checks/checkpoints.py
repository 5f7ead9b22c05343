"""Checkpoints that lack something, or that are read as another one."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from ..check import DP, Check, Layout, expect, the_defect
from ._steps import BOTH

STRATEGIES = "megatron.core.dist_checkpointing.strategies"


def idle_rerun_state(layout: Layout = DP) -> None:
    """Ask an idle rerun state machine for its part of a checkpoint, and load strictly without that."""
    layout.set_up()
    rerun = import_module("megatron.core.rerun_state_machine")
    machine = rerun.RerunStateMachine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    state = machine.state_dict(None, "torch_dist")
    expect(state is not None, "a checkpoint has no rerun state as long as no rerun is pending")
    validation = import_module("megatron.core.dist_checkpointing.validation")
    with the_defect(Exception, says="rerun_state_machine_state"):
        validation.maybe_report_missing_and_unexpected_keys({"rerun_state_machine_state"}, set())


def fault_that_went_away(layout: Layout = DP) -> None:
    """Ask whether to save after a fault that its rerun in place has not repeated."""
    rerun = import_module("megatron.core.rerun_state_machine")
    machine = rerun.RerunStateMachine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    machine.state = rerun.RerunState.RERUNNING_IN_PLACE
    checkpoint, leave, _ = machine.should_checkpoint_and_exit()
    expect(leave, "the job does not end after the fault")
    expect(not checkpoint, "a checkpoint is saved in the middle of a rerun, which cannot be resumed")


def structure_that_grows(layout: Layout = DP) -> None:
    """Plan two saves, of which the second has a key more; nothing is written."""
    layout.set_up()
    with tempfile.TemporaryDirectory(prefix="megapatch-verify-") as folder:
        _plan_twice(folder)


def _plan_twice(folder: str) -> None:
    import os

    import torch

    leaf = import_module("megatron.core.dist_checkpointing.mapping").ShardedObject
    module = import_module(f"{STRATEGIES}.torch")
    strategy = module.TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    kwargs = {"async_strategy": "mcore"} if hasattr(strategy, "_metadata_cache") else {}
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for save, keys in enumerate((["one"], ["one", "two"])):
        path = os.path.join(folder, str(save))
        os.mkdir(path)
        strategy.async_save({key: leaf(key, "data", (ranks,), (rank,)) for key in keys}, path, **kwargs)
        planned = [item.index.fqn for item in strategy.cached_local_plan.items]
        expected = [f"{key}/shard_{rank}_{ranks}" for key in keys]
        expect(planned == expected, f"save {save + 1} has {planned} instead of {expected}")


def overwritten_checkpoint(layout: Layout = DP) -> None:
    """Overwrite a checkpoint in its folder, and read its metadata before and after."""
    import torch
    from torch.distributed import checkpoint

    reader = import_module(f"{STRATEGIES}.cached_metadata_filesystem_reader").CachedMetadataFileSystemReader
    with tempfile.TemporaryDirectory(prefix="megapatch-verify-") as folder:
        for key in ("first", "second"):
            checkpoint.save({key: torch.ones(1)}, checkpoint_id=folder, no_dist=True)
            found = list(reader(folder).read_metadata().state_dict_metadata)
            expect(found == [key], f"the checkpoint has the key {key!r}, and is read with {found}")


def save_given_up(layout: Layout = DP) -> None:
    """Prepare two saves, and give up the first one when it has been written."""
    from multiprocessing import get_context

    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

    module: Any = import_module(f"{STRATEGIES}.filesystem_async")
    item = WriteItem(MetadataIndex("key"), WriteItemType.BYTE_IO)
    plan = SavePlan([item], storage_data=SimpleNamespace(prefix="__0_"))
    common = module._results_queue
    # Megatron would spawn the manager, which takes seconds.
    module._results_queue = get_context("fork").Manager().Queue()
    try:
        writers = [module.FileSystemWriterAsync(folder, thread_count=1) for folder in ("one", "another")]
        for writer in writers:
            writer.prepare_write_data(plan, SimpleNamespace(resolve_data=lambda item: "data"))
        writers[0].results_queue.put({0: ["of a save that was given up"]})
        expect(writers[1].results_queue.empty(), "a save finds the results of one that was given up before it")
        writers[0].retrieve_write_results()
    finally:
        module._results_queue = common


def changed_as_it_is_written(layout: Layout = DP) -> None:
    """Hand a tensor on the CPU over to a persistent worker, and change it before the worker looks."""
    import torch

    from ...patches.megatron.saves_of_one_step import caller_of

    module, tensor = import_module(f"{STRATEGIES}.async_utils"), torch.ones(1)
    handed: list[Any] = []
    layout.set_up()
    request = module.AsyncRequest(len, (), [], preload_fn=functools.partial(len, [tensor]))
    module.PersistentAsyncCaller.schedule_async_call(caller_of(handed.append), request)
    tensor.zero_()
    (value,) = handed[0].preload_fn.args[0]
    expect(value.item() == 1, "a worker writes a tensor of the CPU as it is after the step that was saved")


def failed_save(layout: Layout = DP) -> None:
    """Finalize a save whose metadata cannot be written, on every rank, and count how often it meets the others."""
    from unittest import mock

    import torch
    from torch.distributed.checkpoint import FileSystemWriter, utils

    layout.set_up()
    module = import_module(f"{STRATEGIES}.state_dict_saver")
    failures, met = [], []
    reduce = torch.distributed.all_reduce

    def finish(*args: Any) -> None:
        failures.append(True)
        raise OSError("No space left on device")

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        met.extend(failures)
        return reduce(*args, **kwargs)

    writer: Any = FileSystemWriter("never written")
    writer.retrieve_write_results, writer.finish = list, finish
    # Each rank takes itself for the one that writes, so that none waits for another that has raised.
    ranks = utils._DistWrapper(None, use_dist=False, coordinator_rank=0)
    with mock.patch.object(torch.distributed, "all_reduce", all_reduce), contextlib.suppress(OSError):
        module.save_state_dict_async_finalize(writer, object(), ranks)
    assert failures, "the metadata were not to be written"
    expect(bool(met), "a rank that cannot write metadata raises, and leaves the others to wait for it")


def states_in_buckets(layout: Layout = DP) -> None:
    """Prepare a save of the optimizer's state as fully_reshardable, from several buckets."""
    from ...testing._model import _gpt_of

    layout.set_up()
    model = layout.model(**BOTH)
    model.train_step(0)
    model.gather_parameters()
    optimizer = getattr(model.optimizer, "chained_optimizers", [model.optimizer])[0]
    if not hasattr(optimizer, "sharded_param_state_fully_reshardable"):
        return  # before 0.15
    sharded = _gpt_of(model.chunks[0]).sharded_state_dict(metadata={})
    states = optimizer.sharded_param_state_fully_reshardable(sharded, metadata={})
    parameters = [parameter for buffer in optimizer.buffers for parameter in buffer.param_index_map]
    wrong = sum(bool((states[index]["param"].data.cuda() != each).any()) for index, each in enumerate(parameters))
    expect(not wrong, f"{wrong} of {len(parameters)} parameters are saved with others' states")


def strides_in_metadata(layout: Layout = DP) -> None:
    """Learn a tensor's shape from metadata as torch keeps them from 2.14 on."""
    import torch

    module = import_module(f"{STRATEGIES}.torch")
    tensor: Any = SimpleNamespace(dtype=torch.float32, strides=(1,))
    storage = module.TensorStorageMetadata(tensor, torch.Size([2]), [])
    strategy = object.__new__(module.TorchDistLoadShardedStrategy)
    with the_defect(TypeError, says="strides"):
        found = strategy.load_tensors_metadata("", SimpleNamespace(state_dict_metadata={"key": storage}))
    assert list(found) == ["key"]


CHECKS = (
    Check("megatron.save-plan-cache", structure_that_grows),
    Check("megatron.fresh-metadata", overwritten_checkpoint),
    Check("megatron.fully-reshardable-states", states_in_buckets),
    Check("megatron.own-save-results", save_given_up),
    Check("megatron.save-fails-everywhere", failed_save),
    Check("megatron.saves-of-one-step", changed_as_it_is_written),
    Check("megatron.rerun-state-dict", idle_rerun_state),
    Check("megatron.rerun-transient-fault", fault_that_went_away),
    Check("megatron.strict-loads-with-new-torch", strides_in_metadata),
)
