"""Steps cut into calls: when their gradients are reduced, and their results with and without overlap."""

import contextlib
import sys
from pathlib import Path
from unittest import mock

import pytest

from megapatch._python.finding import find_module
from megapatch.testing import tiny_gpt
from rigs.megatron.options import GRADS, assert_same_parameters

BUFFER = Path(find_module("megatron.core").origin).parent / "distributed" / "param_and_grad_buffer.py"
needs_learning = pytest.mark.skipif(
    "golden_per_param_grad_ready_counts" not in BUFFER.read_text(), reason="this Megatron learns nothing (to 0.15)"
)


class Reduces:
    """Counts the bucket groups that begin to reduce before they are finished, and those that do so when finished.

    at_once: each is reduced before anything else happens, as a fast network has it. Otherwise what a pass adds
    later may still come in, by chance, and a reduce that is too early may come to the right numbers.
    """

    def __init__(self, at_once=False):
        self.early = self.late = 0
        self.at_once = at_once
        self.finishing = False
        self.group = sys.modules["megatron.core.distributed.param_and_grad_buffer"]._ParamAndGradBucketGroup
        self.ddp = sys.modules["megatron.core.distributed.distributed_data_parallel"].DistributedDataParallel
        self.start, self.finish = self.group.start_grad_sync, self.ddp.finish_grad_sync

    @contextlib.contextmanager
    def counted(self):
        def start(group, *args, **kwargs):
            before = group.grad_reduce_handle
            self.start(group, *args, **kwargs)
            if group.grad_reduce_handle is not before:
                self.late += self.finishing
                self.early += not self.finishing
                if self.at_once:
                    group.grad_reduce_handle.wait()

        def finish(ddp, *args, **kwargs):
            self.finishing = True
            self.finish(ddp, *args, **kwargs)
            self.finishing = False

        with (
            mock.patch.object(self.group, "start_grad_sync", start),
            mock.patch.object(self.ddp, "finish_grad_sync", finish),
        ):
            yield

    def when(self, groups):
        return {(groups, 0): "early", (0, groups): "late"}.get((self.early, self.late), "some")


def finish_nothing(*args, **kwargs):
    """Do nothing, as SkyRL's own function, which finishes at the end of the step."""


def one_step(model, step, kind, cut, at_once=False):
    """Call the schedule, then step; return (gradient norm, gradients, when they were reduced)."""
    config = model.config
    finalize = config.finalize_model_grads_func
    for name, parameter in model.chunks[0].module.named_parameters():  # before zero_grad() ends the last step
        parameter.requires_grad_(not ("frozen" in kind and str(step) in kind and "layers.0" in name))
    model.zero_grad()
    reduces = Reduces(at_once)
    with contextlib.ExitStack() as restored, reduces.counted():
        restored.callback(setattr, config, "finalize_model_grads_func", finalize)
        for index, count in enumerate(cut):
            last = index == len(cut) - 1
            finishes = last or kind == "each"
            config.finalize_model_grads_func = (
                finish_nothing if kind == "later" else finalize if finishes else None
            )
            with contextlib.ExitStack() as outer:
                if kind == "no_sync" and not last:
                    outer.enter_context(model.chunks[0].no_sync())
                model.forward_backward(10 * step + index, num_microbatches=count)
        if kind == "later":
            finalize(model.chunks, None)
    gradients = model.gradients()
    _, norm, _ = model.optimizer.step()
    groups = [group for chunk in model.chunks for group in chunk.bucket_groups]
    return float(norm), gradients, reduces.when(len(groups))


def run_case(kind, cuts, options, *expected, overlap=True, layers=2, at_once=False):
    """Return the steps before the first that fails, that one's message, and the parameters at the end."""
    model = tiny_gpt(layers=layers, **options, **(GRADS if overlap else {}))
    if kind == "all count":
        model.config.no_sync_func = None
    steps, error = [], None
    for step, cut in enumerate(cuts):
        try:
            steps.append(one_step(model, step, kind, cut, at_once))
        except AssertionError as raised:
            error = str(raised)
            break
    return steps, error, model.parameters()


def assert_as_without_overlap(found, expected, options=()):
    """Compare gradients, unless the optimizer is distributed (then a rank has a part of them), and parameters."""
    (steps, error, parameters), (expected_steps, _, expected_parameters) = found, expected
    assert error is None
    for (norm, gradients, _), (expected_norm, expected_gradients, _) in zip(steps, expected_steps, strict=True):
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        if "use_distributed_optimizer" not in options:
            assert_same_parameters(gradients, expected_gradients)
    assert_same_parameters(parameters, expected_parameters)
