"""nemo_rl.split-train-step-dtensor: the classes that get the four methods, Ray's among them, and the verdicts.

Without a checkout it is our imitation of the first worker.
"""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
from rigs.nemo_rl.dtensor import CLASSES, WORKERS, find_workers, module_of

from megapatch.patch import VerdictKind
from megapatch.patches._ray_actors import class_of
from megapatch.patches.nemo_rl.split_train_step_dtensor import diagnose
from megapatch.testing import run_ranks

pytestmark = pytest.mark.thorough

METHODS = ("begin_train_step", "train_microbatch", "finish_train_step", "abort_train_step")


def methods(rank, world_size):
    """Of each worker, and of its actor class: which of the four it has."""
    found = {}
    for name in WORKERS:
        module = module_of(name)
        worker = getattr(module, CLASSES[name])
        actor = getattr(module, CLASSES[name].removesuffix("Impl"))
        if isinstance(actor, type):  # the imitation's, without Ray
            known = dir(actor)
        else:
            known = actor.__ray_metadata__.method_meta.methods
            assert issubclass(class_of(actor), worker)
        found[name] = [[one for one in METHODS if hasattr(worker, one)], [one for one in METHODS if one in known]]
    return found


class Strange:
    """Not like the worker."""

    def train(self, data):
        return data


def verdicts():
    """Of each worker's module as it is, and of modules that are not like it."""
    found = {}
    for name in WORKERS:
        module, worker = module_of(name), CLASSES[name]
        actor = worker.removesuffix("Impl")
        named = functools.partial(SimpleNamespace, __name__=module.__name__)
        own = type(worker, (Strange,), dict.fromkeys(METHODS, Strange.train))
        others = {
            "it": module,
            "with its own": named(**{worker: own}),
            "strange": named(**{worker: Strange}),
            "the actor alone": named(**{actor: Strange}),
            "nothing": named(),
        }
        found[name] = {what: diagnose(one) for what, one in others.items()}
        with mock.patch.object(module, "BatchedDataDict", Strange):
            found[name]["strange data"] = diagnose(module)
    return found


def describe(rank, world_size):
    return {"methods": methods(rank, world_size), "verdicts": verdicts()}


@pytest.fixture(scope="module")
def described():
    (found,) = run_ranks(describe, 1, setup=find_workers)
    return found


def test_without_the_patch_there_is_train_alone():
    (found,) = run_ranks(methods, 1, setup=find_workers, env={"MEGAPATCH_DISABLE": "*"})
    assert found == {name: [[], []] for name in WORKERS}


def test_the_actor_class_has_them_too(described):
    assert described["methods"] == {name: [list(METHODS), list(METHODS)] for name in WORKERS}


def test_says_what_it_found(described):
    found = described["verdicts"]
    expected = {
        "it": VerdictKind.NEEDED,
        "with its own": VerdictKind.FIXED,
        "strange": VerdictKind.UNKNOWN,
        "the actor alone": VerdictKind.UNSUPPORTED,
        "nothing": VerdictKind.UNKNOWN,
        "strange data": VerdictKind.UNKNOWN,
    }
    for name in WORKERS:
        assert {what: verdict.kind for what, verdict in found[name].items()} == expected
        assert "zero_grad in Strange.train" in found[name]["strange"].reason
