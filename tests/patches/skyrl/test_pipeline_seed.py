"""skyrl.pipeline-seed: SkyRL's own strategy in a real pipeline of 2 stages, for each release."""

import functools
import random
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from rigs.megatron.options import attempt
from rigs.skyrl.releases import has_correctness_fixes, needs_skyrl

from megapatch import apply, restore
from megapatch.patches.skyrl.pipeline_seed import MODULES
from megapatch.testing import destroy_parallel

pytestmark = needs_skyrl

SEED = 42


def new_strategy(release, pp=1):
    sizes = dict(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=pp,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
    )
    return release.module_of(MODULES).MegatronStrategy(SimpleNamespace(**sizes), seed=SEED)


def seeds():
    """Return the seeds of Python, NumPy and torch, and Megatron's tracker for CUDA, by a made-up CUDA."""
    state, python = random.getstate(), None
    for seed in range(SEED, SEED + 1001):
        random.seed(seed)
        if random.getstate() == state:
            python = seed
    random.setstate(state)
    return python, int(numpy.random.get_state()[1][0]), torch.initial_seed(), MODEL_PARALLEL[-1]


MODEL_PARALLEL = []


def prepare():
    from megatron.core import parallel_state, tensor_parallel

    restore()  # megapatch's replacement could not be, below another one
    initialize = parallel_state.initialize_model_parallel

    @functools.wraps(initialize)
    def accepting(*args, pipeline_model_parallel_split_rank=None, **kwargs):
        """Take the argument of skyrl-train 0.2.0, which megatron-core had up to 0.13."""
        initialize(*args, **kwargs)

    parallel_state.initialize_model_parallel = accepting
    apply()
    seed_all = tensor_parallel.model_parallel_cuda_manual_seed

    @functools.wraps(seed_all)
    def watched(seed, *args, **kwargs):
        MODEL_PARALLEL.append(seed)
        seed_all(seed, *args, **kwargs)

    tensor_parallel.model_parallel_cuda_manual_seed = watched


def set_up(release, pp):
    destroy_parallel()
    strategy = new_strategy(release, pp)
    strategy.setup_distributed()
    return strategy


def found_by(rank, world_size, release):
    prepare()
    restore()
    strategy_class = release.module_of(MODULES).MegatronStrategy
    set_up(release, 2)
    found = {"without": seeds()}
    early = strategy_class(None)  # built before the patch
    apply()
    strategy = set_up(release, 2)
    found["with"], found["seed"] = seeds(), strategy.seed
    for name, again in (("again", strategy), ("early", early)):
        again.set_seed(seed=SEED)
        found[name] = seeds()
    destroy_parallel()
    with mock.patch.object(torch.cuda, "device_count", return_value=0):  # else Megatron wants a layout
        found["before"] = attempt(strategy.set_seed, 7), torch.initial_seed()
    return found


@pytest.fixture(scope="module")
def ranks(release):
    return release.ranks(found_by, 2, release)


def test_stages_differ_and_calls_do_not_add_up(release, ranks):
    for stage, found in enumerate(ranks):
        of_stage = (SEED + 100 * stage,) * 4
        assert found["without"] == (of_stage if has_correctness_fixes(release) else (SEED,) * 4)
        assert found["with"] == found["again"] == found["early"] == of_stage
        assert found["seed"] == SEED


def test_without_model_parallel_the_seed_is_what_it_was(release, ranks):
    for found in ranks:
        if has_correctness_fixes(release):
            (error, _), _ = found["before"]
            assert error == "AssertionError"  # their own
        else:
            assert found["before"] == ((None, None), 7)
