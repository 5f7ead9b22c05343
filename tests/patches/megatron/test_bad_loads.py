"""Megatron's distributed checkpoints that are bad: what raises, and what a load that raises leaves, at 2 ranks."""

import inspect

import pytest
from rigs.loads import bad_loads
from rigs.megatron.options import quick_writer
from rigs.megatron.save import minor, strategies

from megapatch.testing import run_ranks
from megapatch.testing._model import _gpt_of

pytestmark = pytest.mark.skipif(minor() < 16, reason="torch does not read the checkpoints of Megatron up to 0.15")


def tree(model, schedule, loading):
    gpt = _gpt_of(model.chunks[0])
    weights = gpt.sharded_state_dict()
    optimizer = model.optimizer.sharded_state_dict(
        dict(weights), is_loading=loading, metadata={"distrib_optim_sharding_type": "dp_reshardable"}
    )
    return {"model": weights, "optimizer": optimizer, "schedule": schedule.state_dict()}


def save(model, schedule, path):
    from megatron.core import dist_checkpointing

    strategy = strategies("torch").TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    arguments = {"validate_access_integrity": False}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        arguments["async_strategy"] = "mcore"
    dist_checkpointing.save(tree(model, schedule, False), path, strategy, **arguments)


def load(model, schedule, path):
    from megatron.core import dist_checkpointing

    read = dist_checkpointing.load(tree(model, schedule, True), path)
    _gpt_of(model.chunks[0]).load_state_dict(read["model"], strict=False)
    model.optimizer.load_state_dict(read["optimizer"])
    schedule.load_state_dict(read["schedule"])


def job(rank, world_size, folder):
    quick_writer()
    return bad_loads(rank, folder, save, load)


def test_a_bad_checkpoint_raises_and_a_good_one_makes_all_right(tmp_path):
    ranks = run_ranks(job, 2, str(tmp_path), timeout=300)
    for found in ranks:
        error, text, changed, _ = found["open step"]
        assert error == "MisuseError" and "has loaded nothing" in text and not changed
        error, text, *_ = found["no step of the schedule"]
        assert error == "KeyError" and "lacks 'num_steps'. Found: max_lr, " in text
        assert found["more layers"][0] == "CheckpointException"
        assert all(right for *_, right in found.values())
    # From 0.18 on Megatron reads with no_dist=True: the rank that does not read the file goes on.
    errors = [found["truncated"][0] for found in ranks]
    assert errors == [None if minor() >= 18 else "CheckpointException", "CheckpointException"]
