"""nemo_rl.reference-model-rollback: a policy whose use_reference_model() raised trains on as if it had not.

At 2 ranks on CPU, on the checkout's own Megatron and DTensor workers, or on our imitations.
"""

import contextlib
import functools
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from rigs.diagnosed_sources import verdict_of
from rigs.imported import run_with_megatron
from rigs.megatron.options import Interrupted
from rigs.nemo_rl import dtensor as nemo_dtensor
from rigs.nemo_rl.dtensor import SECOND, WORKERS, find_workers, module_of
from rigs.nemo_rl.steps import LAYOUTS, differences, trained_gpt, whole

from megapatch.patch import FIXED, NEEDED, UNKNOWN, UNSUPPORTED
from megapatch.patches.nemo_rl import reference_model_rollback
from megapatch.testing import init_parallel

pytestmark = pytest.mark.thorough

NAME = "nemo_rl.reference-model-rollback"
MEGATRON = ("dp2", "dp2, distributed optimizer, both")


def swap_that_raises(worker, seen):
    """Raise with the reference in place, and add to `seen` what is left of the swap."""
    sampling = SimpleNamespace(top_k=5, top_p=0.9, temperature=1.0)
    hooks = has_hooks(worker)
    with mock.patch.object(worker, "sampling_params", sampling):
        with contextlib.suppress(Interrupted):
            with worker.use_reference_model():
                at_reference = local_tensors(worker)
                raise Interrupted
            raise AssertionError("the exception did not reach the caller")
        seen["sampling"] = worker.sampling_params is not sampling
    now = local_tensors(worker)
    seen["weights"] = all(torch.equal(now[name], value) for name, value in at_reference.items())
    seen["hooks"] = has_hooks(worker) != hooks
    seen["timers"] = bool(getattr(getattr(worker, "timer", None), "_start_times", None))
    seen["gradients"] = not torch.is_grad_enabled()


def local_tensors(worker):
    found = {name: one for name, one in worker.model.state_dict().items() if torch.is_tensor(one)}
    return {name: getattr(one, "_local_tensor", one).detach().clone() for name, one in found.items()}


def has_hooks(worker):
    return bool(getattr(worker.model, "remove_forward_pre_hook_handles", None))


def and_swap(seen):
    def take_step(worker, step, loss):
        told = whole(worker, step, loss)
        if step == 0:
            swap_that_raises(worker, seen)
        return told

    return take_step


def on_megatron(layout, take_step):
    where, options = LAYOUTS[layout]
    init_parallel(**where)
    return trained_gpt(options, "nll", take_step)


def on_dtensor(name, take_step):
    worker = nemo_dtensor.worker_for(name)
    module = module_of(name)
    worker.reference_model_state_dict = module.get_cpu_state_dict(worker.model.state_dict().items())
    unpinned = functools.partial(without_pinning, module.get_cpu_state_dict)
    with mock.patch.object(module, "get_cpu_state_dict", unpinned):
        return nemo_dtensor.trained(worker, "nll", take_step)


def without_pinning(get_cpu_state_dict, tensors, pin_memory):
    assert pin_memory  # which needs a GPU
    return get_cpu_state_dict(tensors)


def compared(rank, world_size):
    """Return what was left of each swap, and how far training on is from a run without any."""
    found = {}
    with contextlib.redirect_stdout(None):
        for run, cases in ((on_megatron, MEGATRON), (on_dtensor, WORKERS)):
            for case in cases:
                seen = {}
                expected, got = run(case, whole), run(case, and_swap(seen))
                found[case] = seen, differences(got, expected)["parameters"]
    return found


def test_a_policy_whose_swap_raised_trains_on_as_if_it_had_not():
    for found in run_with_megatron(compared, 2, setup=find_workers):
        assert len(found) == len(MEGATRON) + len(WORKERS)
        assert {case: (left, far) for case, (left, far) in found.items() if any(left.values()) or far} == {}


def test_without_the_patch_it_is_left_with_the_reference():
    for found in run_with_megatron(compared, 2, setup=find_workers, env={"MEGAPATCH_DISABLE": NAME}):
        for case, (left, far) in found.items():
            assert (left["weights"], left["sampling"]) == (True, True), case
            assert far > 1e-3, case
        assert found["dp2, distributed optimizer, both"][0]["hooks"]


# ------------------------------------------------------------------------------------------------ diagnoses
class Leaves:
    @contextlib.contextmanager
    def use_reference_model(self):
        self.model.state_dict()
        yield
        self.model.state_dict()


class Restores:
    @contextlib.contextmanager
    def use_reference_model(self):
        self.model.state_dict()
        try:
            yield
        finally:
            self.model.load_state_dict(self.reference_state_dict)


class Plain:
    def use_reference_model(self): ...


class Breaks:
    @contextlib.contextmanager
    def use_reference_model(self):
        yield self.unheard_of


def actor(cls):
    """As Ray makes one."""
    return SimpleNamespace(
        __ray_metadata__=SimpleNamespace(modified_class=SimpleNamespace(__ray_actor_class__=cls))
    )


@pytest.mark.parametrize(
    ("names", "kind", "reason"),
    [
        ({"Impl": Leaves}, NEEDED, "leaves the reference's weights"),
        ({"Impl": Restores}, FIXED, "restores the policy's weights"),
        ({"": actor(Leaves)}, UNSUPPORTED, "is Ray's actor class itself"),
        ({"Impl": Plain}, UNKNOWN, "contextlib.contextmanager"),
        ({"Impl": Breaks}, UNKNOWN, "unheard_of"),
    ],
)
def test_it_says_what_it_found(monkeypatch, names, kind, reason):
    module = ModuleType(f"nemo_rl.models.policy.workers.{SECOND}")
    vars(module).update({f"DTensorPolicyWorkerV2{name}": cls for name, cls in names.items()})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = verdict_of(reference_model_rollback.diagnose, module)
    assert (found.kind, reason in found.reason) == (kind, True), found
