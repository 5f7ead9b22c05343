"""megatron.saves-of-one-step: real saves by a real persistent worker. It is forked: it would ask for a GPU."""

from __future__ import annotations

import functools
import importlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of
from rigs.diagnosed_code import made_up, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.failing_saves import NVRX, WRITERS
from rigs.megatron.options import UNPATCHED
from rigs.megatron.save import BASE, Saves, has_working_writer, prepare, tree

from megapatch.patches.megatron.saves_of_one_step import PATCH, diagnose, hand_over_copies

pytestmark = pytest.mark.skipif(not has_working_writer(), reason="0.12's writer does not work with this torch")


def module_of(writer):
    return importlib.import_module(f"{NVRX}.core" if writer == "nvrx" else PATCH.sites[0].module)


def after(file, write, *args, **kwargs):
    """Write when the trainer has gone on."""
    while not file.exists():
        time.sleep(0.01)
    return write(*args, **kwargs)


def save_and_train_on(rank, folder, writer):
    """Change all tensors after a save was scheduled and before it is written; return what the checkpoint has."""
    from multiprocessing import get_context

    module, saves = module_of(writer), Saves(rank, folder / writer, cached=False, writer=writer)
    state = tree(rank, BASE, 7)
    path, request = saves.plan_tree(state, 7)
    (leaves,), go = state["nested"], folder / f"{writer}-{rank}"
    request = request._replace(async_fn=functools.partial(after, go, request.async_fn))
    queue = module.AsyncCallsQueue(persistent=True)
    with mock.patch.object(module.mp, "get_context", return_value=get_context("fork")):
        queue.schedule_async_request(request)
    for name in ("weights", "shared"):
        leaves[name].data.add_(1)
    go.touch()
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return saves.load(SimpleNamespace(path=path, step=7, parts=BASE))


def verdicts(writer):
    module = module_of(writer)

    def copies(self, async_req):
        (tensor,) = async_req.preload_fn.args[0]
        queue = self.queue
        queue.put(async_req._replace(preload_fn=type(async_req.preload_fn)(len, [tensor.clone()])))

    def hands_over_nothing(self, async_req):
        return self.process

    return verdicts_of(
        diagnose, module, made_up(module.PersistentAsyncCaller, "schedule_async_call", copies, hands_over_nothing)
    )


def job(rank, world_size, folder):
    folder = Path(folder)
    if rank == 0:
        folder.mkdir()
    prepare()
    for writer in WRITERS:
        yield writer, functools.partial(save_and_train_on, rank, folder, writer)
        yield f"verdicts on {writer}", functools.partial(verdicts, writer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saves")


without = cells_of(job, 2, folder="without", env=UNPATCHED)
patched = cells_of(job, 2, folder="patched")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.quick
def test_a_checkpoint_has_the_tensors_of_its_step(without, patched, writer):
    assert all(found[writer] is not None for found in without)
    assert [found[writer] for found in patched] == [None, None]


class Request(NamedTuple):
    async_fn_args: Any
    preload_fn: Any


def test_each_tensor_on_the_cpu_is_copied_once_and_all_else_is_handed_over_as_it_is():
    """The arguments are a state, as those of NVRx's TorchAsyncCheckpoint, which saves with torch.save()."""
    step, shared, elsewhere = torch.nn.Parameter(torch.ones(1)), torch.ones(1), torch.ones(1, device="meta")
    item, shared = SimpleNamespace(of=step), shared.share_memory_()
    state = {"optimizer": [{"step": step}, {"step": step}], "shared": shared, "elsewhere": elsewhere}
    request = Request((state, item), functools.partial(dict, [step], name="names"))
    handed = hand_over_copies(lambda self, async_req: async_req)(None, request)

    (copied, found), preload = handed.async_fn_args, handed.preload_fn
    (first, second), ((third,),) = copied["optimizer"], preload.args
    assert first["step"] is second["step"] is third and third.equal(step)
    assert (
        third.data_ptr() != step.data_ptr() and not third.requires_grad
    )  # which only a leaf could be pickled with
    assert copied["shared"] is shared and copied["elsewhere"] is elsewhere and found is item
    assert (preload.func, preload.keywords) == (dict, {"name": "names"})
    assert request.async_fn_args[0] is state and state["optimizer"][0]["step"] is step


@pytest.mark.parametrize("writer", WRITERS)
def test_verdicts(patched, writer):
    expected = {
        "copies": ("fixed", "gets copies"),
        "hands_over_nothing": ("unknown", "expected schedule_async_call() to run"),
    }
    assert_verdicts(patched[0][f"verdicts on {writer}"], expected)
