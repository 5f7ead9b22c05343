"""skyrl.pipeline-seed: SkyRL's own strategy in real pipelines: of 2 stages for each release, of 4 for one."""

import functools
import random
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from rigs.diagnosed_code import GONE, made_up, verdicts_of
from rigs.megatron.options import attempt
from rigs.releases import status_of
from rigs.skyrl.releases import RELEASES, has_correctness_fixes, needs_skyrl

from megapatch import apply, restore
from megapatch.patches.skyrl.pipeline_seed import MODULES, diagnose
from megapatch.testing import destroy_parallel, tiny_gpt

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
    original = vars(strategy_class)["set_seed"]
    set_up(release, 2)
    found = {"without": seeds()}
    early = strategy_class(None)  # built before the patch
    apply()
    found["untouched"], found["status"] = (
        vars(strategy_class)["set_seed"] is original,
        status_of("skyrl.pipeline-seed"),
    )
    strategy = set_up(release, 2)
    found["with"], found["seed"] = seeds(), strategy.seed
    for name, again in (("again", strategy), ("early", early)):
        again.set_seed(seed=SEED)
        found[name] = seeds()
    destroy_parallel()
    with mock.patch.object(torch.cuda, "device_count", return_value=0):  # else Megatron wants a layout
        found["before"] = attempt(strategy.set_seed, 7), torch.initial_seed()
    found["verdicts"] = verdicts(release.module_of(MODULES))
    return found


def verdicts(module):
    def takes_nothing(self): ...

    def sets_up_by_stage(self, mpu):
        self.set_seed(self.seed + 100 * mpu.get_pipeline_model_parallel_rank())

    changes = {
        **made_up(module.MegatronStrategy, "set_seed", takes_nothing),
        **made_up(module.MegatronStrategy, "setup_distributed", sets_up_by_stage),
    }
    return verdicts_of(diagnose, module, {**changes, "none": (module, "MegatronStrategy", GONE)})


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


def test_verdict(release, ranks):
    fixed = has_correctness_fixes(release)
    for found in ranks:
        assert found["status"] == ("not-needed" if fixed else "applied")
        assert found["untouched"] is fixed
        kinds = {name: kind for name, (kind, _) in found["verdicts"].items()}
        assert kinds.pop("as it is") == ("fixed" if fixed else "needed")
        assert kinds == {"takes_nothing": "unknown", "sets_up_by_stage": "fixed", "none": "unknown"}
        assert "parameter seed of " in found["verdicts"]["takes_nothing"][1]


# ------------------------------------------------------------------------------------------ four processes
def in_four(rank, world_size, release):
    prepare()
    set_up(release, 4)
    found = {"seeds": seeds()}
    for name in ("with", "without"):
        set_up(release, 2)
        found[name] = dropped()
        restore()
    return found


def dropped():
    """Where the first dropout of this stage drops, in a real step: the embedding's, or the first layer's."""
    model, masks = tiny_gpt(config={"hidden_dropout": 0.5}), []
    dropout = torch.nn.functional.dropout

    def watched(x, p=0.5, training=True, inplace=False):
        result = dropout(x, p, training, inplace)
        if p:
            masks.append(result.detach() == 0)
        return result

    with mock.patch.object(torch.nn.functional, "dropout", watched):
        model.forward_backward()
    return masks[0]


@pytest.fixture(scope="module")
def four():
    """The newest release with the defect."""
    defective = [release for release in RELEASES if not has_correctness_fixes(release)]
    if not defective:
        pytest.skip("no release with the defect is here")
    return defective[-1].ranks(in_four, 4, defective[-1])


@pytest.mark.parametrize("stage", range(4))
def test_seed_of_each_of_four_stages(four, stage):
    assert four[stage]["seeds"] == (SEED + 100 * stage,) * 4


def test_dropout_differs_by_stage_and_agrees_across_data_parallel_peers(four):
    first, peer, second, peer_of_second = [found["with"] for found in four]  # two stages of two ranks
    assert torch.equal(first, peer)
    assert torch.equal(second, peer_of_second)
    assert not torch.equal(first, second)
    assert 0.3 < (first ^ second).float().mean() < 0.7


def test_without_the_patch_dropout_repeats(four):
    first, _, second, _ = [found["without"] for found in four]
    assert torch.equal(first, second)
