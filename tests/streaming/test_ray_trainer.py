"""RayTrainer on a real Ray: two ranks of real megatron-core, and ranks that fail in many ways."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import pytest
from rigs.where import needs_megatron

from megapatch.errors import MisuseError
from megapatch.reach.ray import assert_consistent
from megapatch.streaming import RayTrainer, RolloutBuffer, StepTrainer, StreamingConfig, TrainPump

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning"),  # Ray's own
    pytest.mark.usefixtures("local_ray"),
]

RANKS = [{"num_cpus": 0}] * 2


class Generation:
    def __init__(self):
        self.told = []

    async def pause_generation(self): ...

    async def resume_generation(self): ...

    async def sync_weights(self): ...

    def set_weight_version(self, version):
        self.told.append(version)


def pumped(trainer, groups, per_step=1):
    """A pump with these groups in its buffer; that buffer."""
    buffer, generation = RolloutBuffer(), Generation()
    config = StreamingConfig(generations_per_prompt=1, target_prompt_groups_per_step=per_step, max_staleness=9)

    async def fill():
        for key, data in enumerate(groups):
            await buffer.put(key, {"group_id": key, "weight_version": 0}, data)

    asyncio.run(fill())
    return TrainPump(config, trainer, buffer, generation, generation), buffer


# ------------------------------------------------------------------------------------------ ranks without a model
class Rank:
    """Says what it was called with; fails where the data names its rank."""

    def __init__(self, rank, world_size):
        self.rank, self.calls = rank, []
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MINE")
        self.environment = {name: os.environ.get(name) for name in names}

    def begin_train_step(self):
        self.calls.append("begin")

    def train_microbatch(self, data):
        self.calls.append(data)
        if self.rank in data:
            raise ValueError(f"rank {self.rank} fails")

    def finish_train_step(self):
        self.calls.append("finish")
        return {"rank": self.rank}

    def abort_train_step(self):
        self.calls.append("abort")

    def known(self):
        calls, self.calls = self.calls, []
        return self.environment, calls

    def die(self, which):
        if self.rank == which:
            os._exit(1)


def broken(rank, world_size):
    if rank == 1:
        raise ValueError("cannot build")
    threading.Event().wait()  # as in a collective that the other never comes to


def outcome(awaitable):
    async def caught():
        try:
            return await awaitable
        except Exception as error:
            return error

    return asyncio.run(caught())


def calls_of(trainer):
    return [calls for _, calls in outcome(trainer.on_all_ranks("known"))]


@pytest.fixture(scope="module")
def trainer(local_ray):
    return RayTrainer(
        Rank, [{"num_cpus": 0, "runtime_env": {"env_vars": {"MINE": str(rank)}}} for rank in range(2)]
    )


def test_ranks_are_told_who_they_are_and_called_as_one(trainer):
    pump, _ = pumped(trainer, ["a", "b"], per_step=2)
    outcome(pump.run(1))
    (first, calls), (second, same) = outcome(trainer.on_all_ranks("known"))
    assert calls == same == ["begin", ["a"], ["b"], "finish"]
    assert (first["RANK"], second["RANK"]) == (first["MINE"], second["MINE"]) == ("0", "1")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        assert first[name] == second[name], name
    assert first["WORLD_SIZE"] == "2" and int(first["MASTER_PORT"]) > 0
    assert_consistent(trainer.actors)


def test_a_reference_to_data_arrives_as_data_and_rank_0_tells_the_result(trainer):
    async def step():
        await trainer.begin_train_step()
        await trainer.train_microbatch(ray.put(["there"]))
        return await trainer.finish_train_step()

    assert outcome(step()) == {"rank": 0}
    assert calls_of(trainer) == [["begin", ["there"], "finish"]] * 2


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_an_exception_on_any_rank_aborts_on_all(trainer, failing):
    async def step():
        await trainer.begin_train_step()
        await trainer.train_microbatch(list(failing))

    error = outcome(step())
    assert isinstance(error, ValueError) and "fails" in str(error)
    if sys.version_info >= (3, 11):
        (note,) = error.__notes__
        assert note.startswith("train_microbatch() failed on rank") and ("; then on rank" in note) == (
            len(failing) == 2
        )
    assert calls_of(trainer) == [["begin", list(failing), "abort"]] * 2


def is_gone(name):
    """Ray ends actors in its own time."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            ray.get_actor(name)
        except ValueError:
            return True
    return False


def test_a_rank_that_cannot_be_built_ends_the_others():
    with pytest.raises(ValueError, match="cannot build"):
        RayTrainer(broken, [{"num_cpus": 0, "name": "first"}, {"num_cpus": 0}])
    assert is_gone("first")
    with pytest.raises(MisuseError, match="actor_options"):
        RayTrainer(Rank, [])


def test_a_rank_that_has_died_is_told_by_each_call(caplog):
    trainer = RayTrainer(Rank, RANKS)
    pump, buffer = pumped(trainer, ["a"])
    assert isinstance(outcome(trainer.on_all_ranks("die", 1)), ray.exceptions.RayActorError)
    assert isinstance(outcome(pump.step()), ray.exceptions.RayActorError)
    assert "abort_train_step() failed, too" in caplog.text
    assert (pump.version, len(buffer.samples())) == (0, 1)


# ------------------------------------------------------------------------------------------ real megatron-core
GROUPS = 6
PER_STEP = 3
BAD = "bad"


class Policy(StepTrainer):
    """A rank of a tiny GPT, in the layout that it was told last."""

    def __init__(self, rank, world_size):
        import torch.distributed

        from megapatch.testing import install_cuda_stubs, use_one_gloo_thread

        install_cuda_stubs()
        use_one_gloo_thread()
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method="env://")
        self.rank = rank

    def lay_out(self, layout):
        from megapatch import TrainStep
        from megapatch.testing import init_parallel

        init_parallel(**layout)
        self.model = self.new_model()
        super().__init__(TrainStep(self.model.chunks, self.model.optimizer), self.part)

    def new_model(self):
        from megapatch.testing import tiny_gpt

        return tiny_gpt(per_token_loss=True, overlap_grad_reduce=True)

    def part(self, data):
        """Of a group's 4 microbatches those of this data parallel rank."""
        from functools import partial

        from megapatch.testing._data import forward_step

        (group,) = data
        if group == BAD and self.rank == 1:
            raise ValueError("bad data")
        mine = self.microbatches([0 if group == BAD else group])
        return {
            "forward_step_func": partial(forward_step, masked=True),
            "data_iterator": iter(mine),
            "num_microbatches": len(mine),
            "seq_length": self.model.seq,
            "micro_batch_size": 2,
        }

    def microbatches(self, groups):
        from megatron.core import parallel_state

        size = 4 // parallel_state.get_data_parallel_world_size()
        return [one for group in groups for one in self.model.microbatches(group, size)]

    def parameters(self):
        return {name: value.numpy() for name, value in self.model.parameters().items()}

    def largest_difference_to_megatrons_own(self, steps):
        trained, self.model = self.model, self.new_model()
        for groups in steps:
            self.model.train_step(microbatches=self.microbatches(groups), masked=True)
        own, ours = self.model.parameters(), trained.parameters()
        return max(float((own[name] - ours[name]).abs().max()) for name in own)


@pytest.fixture(scope="module")
def ranks(local_ray):
    return RayTrainer(Policy, RANKS)


@needs_megatron
def test_two_ranks_of_megatron_in_any_layout_make_megatrons_own_steps(ranks):
    found = {}
    for name, layout in {"dp": {}, "tp": {"tp": 2}, "pp": {"pp": 2}}.items():
        outcome(ranks.on_all_ranks("lay_out", layout))
        pump, _ = pumped(ranks, range(GROUPS), PER_STEP)
        assert outcome(pump.run(2)) is None
        steps = [range(PER_STEP), range(PER_STEP, GROUPS)]
        differences = outcome(ranks.on_all_ranks("largest_difference_to_megatrons_own", steps))
        assert max(differences) < 1e-6, name
        found[name] = outcome(ranks.on_all_ranks("parameters"))
    whole, same = found["dp"]
    stages = {**found["pp"][0], **found["pp"][1]}
    assert whole.keys() == same.keys() == stages.keys()
    for name, value in whole.items():
        assert (value == same[name]).all(), name
        assert abs(value - stages[name]).max() < 1e-5, name


@needs_megatron
def test_what_fails_on_one_rank_of_megatron_leaves_no_gradient_on_any(ranks):
    outcome(ranks.on_all_ranks("lay_out", {}))
    pump, buffer = pumped(ranks, [0, BAD], 2)
    error = outcome(pump.step())
    assert isinstance(error, ValueError) and "bad data" in str(error)
    assert list(buffer.samples()) == [0, 1]
    pump, _ = pumped(ranks, [1, 2], 2)
    assert outcome(pump.step()) is None
    differences = outcome(ranks.on_all_ranks("largest_difference_to_megatrons_own", [[1, 2]]))
    assert max(differences) < 1e-6
