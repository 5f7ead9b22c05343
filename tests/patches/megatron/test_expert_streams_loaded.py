"""megatron.expert-streams-loaded on the real tracker, of two expert ranks."""

import copy
import importlib
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of
from rigs.log import Log
from rigs.megatron.options import UNPATCHED, needs_training

from megapatch.testing import init_parallel

MODULE = "megatron.core.tensor_parallel.random"
EXPERTS = "expert-parallel-rng"
SAYS = "another one: expected one that was seeded with"


def random_module():
    return importlib.import_module(MODULE)


def tracker():
    return random_module().get_cuda_rng_tracker()


def new_tracker():
    """Make a new one, as a tracker warns once."""
    vars(random_module()).update(_CUDA_RNG_STATE_TRACKER=None, _CUDA_RNG_STATE_TRACKER_INITIALIZED=False)
    random_module().initialize_rng_tracker()


def seed(number):
    new_tracker()
    random_module().model_parallel_cuda_manual_seed(number)


def draw():
    with tracker().fork(EXPERTS):
        return torch.rand(4, device="cuda")


def same_on_both(tensor):
    found = [torch.empty_like(tensor) for _ in range(2)]
    torch.distributed.all_gather(found, tensor)
    return torch.equal(*found)


def of_the_first():
    """Return the first rank's states, as a checkpoint has them for all."""
    saved = [copy.deepcopy(tracker().get_states())]
    torch.distributed.broadcast_object_list(saved, 0)
    return saved[0]


def of_its_own():
    return copy.deepcopy(tracker().get_states())


def load(save, *, seeds=(1, 1), draws=3):
    """Save, draw, and load into a process of another seed: what is said, and whether the ranks draw the same."""
    seed(seeds[0])
    draw()
    saved = save()
    seed(seeds[1])
    for _ in range(draws):
        draw()
    log = Log()
    tracker().set_states(saved)
    return log.texts, same_on_both(draw())


def load_again():
    """Load another rank's states twice, with the rank's own in between."""
    seed(1)
    own, saved = of_its_own(), of_the_first()
    log = Log()
    for states in (saved, own, saved):
        tracker().set_states(states)
    return log.texts


def recompute():
    """Recompute a function that draws from the experts' stream; the reference does not recompute."""
    from megatron.core.tensor_parallel import checkpoint

    def drop(x):
        with tracker().fork(EXPERTS):
            return torch.nn.functional.dropout(x, 0.5) * x

    log, found = Log(), []
    for run in (drop, lambda x: checkpoint(drop, False, x)):
        seed(1)
        x = torch.arange(64.0, device="cuda", requires_grad=True)
        output = run(x)
        draw()  # of a later layer
        output.sum().backward()
        found.append((x.grad.tolist(), draw().tolist()))
    return log.texts, found[0] == found[1]


def job(rank, world_size):
    init_parallel(ep=2)
    yield "first", lambda: load(of_the_first)
    yield "first, another seed", lambda: load(of_the_first, seeds=(1, 7))
    yield "own", lambda: load(of_its_own)
    yield "own, another seed", lambda: load(of_its_own, seeds=(1, 7))
    yield "own, at once", lambda: load(of_its_own, draws=0)
    yield "again", load_again
    yield "recompute", recompute
    init_parallel()
    yield "no expert parallelism", lambda: load(of_the_first)


unpatched = cells_of(job, 2, env=UNPATCHED)
patched = cells_of(job, 2)
OF_THE_FIRST = ["first", "first, another seed"]


@pytest.mark.parametrize("case", OF_THE_FIRST)
@pytest.mark.quick
def test_without_the_patch_nothing_is_said(unpatched, case):
    assert [found[case] for found in unpatched] == [([], True)] * 2


@pytest.mark.parametrize("case", OF_THE_FIRST)
@pytest.mark.quick
def test_a_rank_that_loads_another_ones_streams_says_so(patched, case):
    (texts, same), (of_the_second, same_there) = (found[case] for found in patched)
    assert texts == [] and same and same_there
    (text,) = of_the_second
    assert f"{SAYS} 1125, found 1025." in text
    assert "#expert-streams" in text


@pytest.mark.parametrize("case", ["own", "own, another seed", "own, at once"])
def test_a_rank_that_loads_its_own_streams_says_nothing(patched, case):
    assert [found[case] for found in patched] == [([], False)] * 2


def test_it_is_said_once(patched):
    assert [len(found["again"]) for found in patched] == [0, 1]


def test_recomputation_says_nothing_and_draws_the_same(patched):
    assert [found["recompute"] for found in patched] == [([], True)] * 2


def test_without_expert_parallelism_ranks_share_their_streams(patched):
    assert [found["no expert parallelism"] for found in patched] == [([], True)] * 2


def by_megatron(folder, each_its_own):
    """Save by Megatron's own get_rng_state(), and load as its load_checkpoint() does."""
    from megatron.core import dist_checkpointing, mpu
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.training import checkpointing

    def state():
        groups = mpu.get_tensor_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
        return {"rng_state": checkpointing.get_rng_state("torch_dist", *groups)}

    args = SimpleNamespace(data_parallel_random_init=each_its_own)
    model_parallel_cuda_manual_seed(1)
    with mock.patch.object(checkpointing, "get_args", return_value=args):
        os.makedirs(folder, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state(), folder)
        model_parallel_cuda_manual_seed(1)
        loaded = dist_checkpointing.load(state(), folder)["rng_state"]
    log = Log()
    get_cuda_rng_tracker().set_states(
        loaded[mpu.get_data_parallel_rank() if each_its_own else 0]["rng_tracker_states"]
    )
    return [text for text in log.texts if "expert-streams-loaded" in text]


def saving(rank, world_size, folder):
    init_parallel(ep=2)
    for each_its_own in (True, False):  # the second one warns, and a tracker warns once
        yield each_its_own, lambda own=each_its_own: by_megatron(f"{folder}-{own}", own)


saved = cells_of(saving, 2, folder="patched")


@needs_training
def test_the_second_rank_loads_the_first_ones(saved):
    of_the_first, (text,) = (found[False] for found in saved)
    assert of_the_first == []
    assert "expected one that was seeded with 1125, found 1025." in text


@needs_training
def test_with_data_parallel_random_init_each_rank_loads_its_own(saved):
    assert [found[True] for found in saved] == [[], []]
