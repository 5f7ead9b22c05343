"""megatron.save-plan-cache: saves that reuse a plan, by the real dist_checkpointing at 2 ranks."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED
from rigs.megatron.save import (
    BASE,
    DISTRIBUTED,
    LOCAL,
    MORE,
    SHARED,
    STATE_ON_ONE,
    TENSOR_ON_ONE,
    Saves,
    minor,
    planning,
    prepare,
)

from megapatch.patches.megatron.save_plan_cache import _changed_anywhere
from megapatch.testing import RanksFailed

# What is saved, by the names of its parts: first and until the plan is validated, and then.
CHANGES = {
    "unchanged": (BASE, BASE),
    "added on one rank": (BASE, STATE_ON_ONE),
    "removed on all": (MORE, BASE),
    "wider": (BASE, {**BASE, "shared": {"replicated": True, "size": 6}}),
    "another dtype": (BASE, {**BASE, "weights": {"dtype": torch.float64}}),
    "another offset": (BASE, {**BASE, "weights": {"swapped": True}}),
}
# Without the patch one rank fails here, and the other waits for it.
ON_ONE = {
    "removed on one rank": (STATE_ON_ONE, BASE),
    "another replica": (BASE, {**BASE, "shared": {"replicated": True, "main": 1}}),
}
# With the distribution of --ckpt-fully-parallel-save.
PARALLEL = {
    "unchanged": (BASE, BASE),
    "added": (BASE, SHARED),
    "added on one rank": (BASE, TENSOR_ON_ONE),
    "removed on one rank": (TENSOR_ON_ONE, BASE),
}


# ------------------------------------------------------------------------------------------ without the patch
def defects(rank, world_size, folder):
    prepare()
    found = {name: Saves(rank, folder).change(*parts, saves=1) for name, parts in CHANGES.items()}
    found["parallel"] = Saves(rank, folder, parallel=True).change(*PARALLEL["added"], saves=1)
    torch.save(found, f"{folder}/found-{rank}")
    saves = Saves(rank, folder)
    saves.plan_often(STATE_ON_ONE)
    saves.plan(BASE).request.execute_sync()


# ------------------------------------------------------------------------------------------ with it
def repaired(rank, world_size, folder):
    prepare()
    for name, parts in {**CHANGES, **ON_ONE}.items():
        yield name, lambda parts=parts: Saves(rank, folder).change(*parts)
    for name, parts in PARALLEL.items():
        yield ("parallel", name), lambda parts=parts: Saves(rank, folder, parallel=True).change(*parts)


@pytest.fixture(scope="module")
def unpatched(folder):
    """Return each rank's findings, and how the last of it ended."""
    (folder / "unpatched").mkdir()
    with pytest.raises(RanksFailed) as failed:
        run_with_megatron(defects, 2, f"{folder}/unpatched", env=UNPATCHED)
    return [torch.load(folder / f"unpatched/found-{rank}") for rank in range(2)], failed.value


patched = cells_of(repaired, 2, folder="patched")


# ------------------------------------------------------------------------------------------ without the patch
LOST = {
    "added on one rank": "Missing key in checkpoint state_dict: new/shard_0_1",
    "removed on all": "ValueError: Could not find FQN: 'new'",
    "wider": "Global shape mismatch for loaded (torch.Size([4])) and expected ((6,)) tensor for key shared",
    "another dtype": "weights is torch.float32 by its metadata",
    "another offset": "Could not find shard at" if minor() < 15 else "weights is tensor",
    "parallel": "new from model not in state dict",
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.quick
def test_without_the_patch_a_change_is_lost(unpatched, name):
    _, saves = zip(*[found[name] for found in unpatched[0]], strict=True)
    # Where each rank loads on its own (from 0.18 on), one that lacks nothing does not know.
    assert any(LOST[name] in problem for problem, _ in saves if problem)
    assert all(calls == {} for _, calls in saves)


def test_without_the_patch_what_is_gone_on_one_rank_hangs_the_other(unpatched):
    _, failed = unpatched
    assert list(failed.failures) == [1]
    assert "ValueError: Could not find FQN: 'new/shard_0_1'" in failed.failures[1]
    assert "execute_sync" in failed.waiting[0]


# ------------------------------------------------------------------------------------------ with it
def test_an_unchanged_structure_is_planned_once_as_without_the_patch(unpatched, patched):
    for rank, (before, found) in enumerate(zip(unpatched[0], patched, strict=True)):
        assert before["unchanged"] == (planning(rank, 2, **LOCAL), (None, {}))
        saves = (None, planning(rank, 0, 1))
        assert found["unchanged"] == (planning(rank, 2, 3, **LOCAL), saves, saves)


@pytest.mark.parametrize("name", [name for name in (*CHANGES, *ON_ONE) if name != "unchanged"])
@pytest.mark.quick
def test_a_change_is_planned_once_by_all_ranks_and_saved(patched, name):
    for rank, found in enumerate(patched):
        assert found[name] == (
            planning(rank, 2, 3, **LOCAL),
            (None, planning(rank, 1, 1, **LOCAL)),
            (None, planning(rank, 1, 1)),
        )


@pytest.mark.parametrize("name", PARALLEL)
def test_a_change_is_distributed_once_by_all_ranks_and_saved(patched, name):
    afresh = {**LOCAL, **DISTRIBUTED}
    for rank, found in enumerate(patched):
        changed = name != "unchanged"
        assert found["parallel", name] == (
            planning(rank, 2, 6, **afresh),
            (None, planning(rank, changed, 2, **(afresh if changed else {}))),
            (None, planning(rank, changed, 2)),
        )


def of_256_ranks(tensor, op=torch.distributed.ReduceOp.SUM):
    """Reduce what 256 ranks alike hold: in 8 bits their sum is 0."""
    if op == torch.distributed.ReduceOp.SUM:
        tensor.mul_(torch.tensor(256).to(tensor.dtype))


def test_a_change_on_256_ranks_is_a_change():
    with (
        mock.patch("torch.distributed.get_backend", return_value="gloo"),
        mock.patch("torch.distributed.all_reduce", of_256_ranks),
    ):
        assert _changed_anywhere(SimpleNamespace(), [("a",)], cached=True)
