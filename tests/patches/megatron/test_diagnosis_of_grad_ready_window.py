"""Verdicts of megatron.grad-ready-window's diagnosis on the real code, on repaired and of unknown code."""

import importlib
import inspect

from rigs.diagnosed_code import of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts


def verdicts(rank, world_size):
    """By case: (verdict, reason); and whether Megatron's code speaks of what it has learned."""
    from megapatch.patches.megatron.grad_ready_window import diagnose

    module = importlib.import_module("megatron.core")
    buffer = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    group = buffer._ParamAndGradBucketGroup

    def takes_nothing(self): ...

    def learns_nothing(self, param):
        self.params_with_grad.add(param)

    def reduces_every_pass(self, param):
        self.per_param_grad_ready_counts[param] = self.per_param_grad_ready_counts.get(param, 0) + 1
        if not self.is_first_batch and self.golden_per_param_grad_ready_counts == {param: 1}:
            self.start_grad_sync()

    def reduces_what_is_left(self):
        if self.grad_reduce_handle is None:
            self.start_grad_sync()

    def never_early(self, param): ...

    changes = {
        "other groups": (group, "__init__", takes_nothing),
        "never early": (group, "register_grad_ready", never_early),
        "half repaired": (group, "finish_grad_sync", reduces_what_is_left),
        "learns nothing": [(group, "__init__", takes_nothing), (group, "register_grad_ready", learns_nothing)],
        "repaired": [
            (group, "register_grad_ready", reduces_every_pass),
            (group, "finish_grad_sync", reduces_what_is_left),
        ],
    }
    learns = "golden_per_param_grad_ready_counts" in inspect.getsource(buffer)
    return verdicts_of(diagnose, module, changes), learns


def test_diagnosis():
    patched, learns = of_a_rank(verdicts)
    if not learns:  # up to 0.15
        assert patched["as it is"] == ("absent", "Megatron does not learn how often gradients become ready")
        assert patched["never early"][0] == "unknown"
        return
    expected = {
        "as it is": (
            "needed",
            "reduced in pass 1; after a first step of two, a step of one fails with AssertionError",
        ),
        "learns nothing": ("absent", "does not learn"),
        "other groups": ("unknown", "params_with_grad in megatron.core.distributed."),
        "never early": ("unknown", "the later one fails with AssertionError"),
        "half repaired": ("needed", "in pass 1; after a first step of two, a step of one is reduced in finish"),
        "repaired": ("fixed", "after the last"),
    }
    assert_verdicts(patched, expected)
