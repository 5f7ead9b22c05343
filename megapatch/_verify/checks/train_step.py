"""Megapatch's additions: steps of several calls by TrainStep, and the audit that watches all checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from ..check import DP, Check, Layout, expect, same
from ._steps import BOTH, OVERLAP, SHARDED

CUTS = ((1, 3), (4,), (2, 1, 1))
"""Each step's four microbatches, in calls."""
BIASED: dict[str, Any] = {
    "experts": 4,
    "config": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.1,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1.0,
    },
}
"""Experts whose routers have a bias that moves in each step: what a dropped step can leave, with its gradients."""


def steps_in_pieces(layout: Layout = DP) -> float:
    """Make steps by TrainStep, and count the reduces of each; against Megatron's own steps of one call."""
    layout.set_up()
    largest = 0.0
    for options, plain, loss in (
        (OVERLAP, {}, {"two_tuple": True}),
        (BOTH, SHARDED, {"two_tuple": True}),
        ({**OVERLAP, "per_token_loss": True}, {"per_token_loss": True}, {"masked": True}),
    ):
        model, reference = layout.model(**options), layout.model(**plain)
        for step, cut in enumerate(CUTS):
            counts = _Reduces()
            with counts.counted():
                norm = _step(model, step, cut, loss, counts)
            expected = reference.train_step(step, num_microbatches=sum(cut), **loss).grad_norm
            expect(abs(norm - expected) <= 1e-5 * expected, f"gradient norm {norm} instead of {expected}")
            expect(counts.all == counts.groups, f"{counts.all} reduces of {counts.groups} bucket groups in a step")
        model.gather_parameters()
        largest = max(largest, same(model.parameters(), reference.parameters(), "parameters"))
    return largest


def reduce_in_the_last_call(layout: Layout = DP) -> None:
    """Say which call is the last: every bucket group is reduced during its backward pass, not after it."""
    layout.set_up()
    model = layout.model(**OVERLAP)
    for step, cut in enumerate(CUTS):
        counts = _Reduces()
        with counts.counted():
            _step(model, step, cut, {"two_tuple": True}, counts, last=True)
        # Megatron learns in the first step, and in the second what of it was a single call.
        overlaps = counts.before_finish == counts.groups == counts.all
        expect(step < 2 or overlaps, f"{counts.before_finish} of {counts.groups} are reduced before finish()")


def dropped_step(layout: Layout = DP) -> float:
    """Leave a TrainStep by an exception after its reduce, and step on; against a run without that step."""
    layout.set_up()
    largest = 0.0
    biased = () if "tp" in layout.sizes else ({**OVERLAP, **BIASED},)  # Megatron wants sequence parallelism there
    for options in (BOTH, *biased):
        model, reference = layout.model(**options), layout.model(**options)
        for trained in (model, reference):
            trained.train_step(0)
        with contextlib.suppress(_Dropped):
            _step(model, 1, (2, 2), {"two_tuple": True}, _Reduces(), last=True, dropped=True)
        for trained in (model, reference):
            trained.train_step(2)
            trained.gather_parameters()
        largest = max(largest, same(model.parameters(), reference.parameters(), "parameters after a dropped step"))
    return largest


class _Dropped(Exception):
    """Leaves a step before the optimizer."""


class _Reduces:
    """Counts the reduces of bucket groups that begin, and which of them before finish()."""

    def __init__(self) -> None:
        self.all = self.before_finish = self.groups = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        from unittest import mock

        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

        start = Group.start_grad_sync

        def counting(group: Any, *args: Any, **kwargs: Any) -> Any:
            before = group.grad_reduce_handle
            result = start(group, *args, **kwargs)
            self.all += group.grad_reduce_handle is not before
            return result

        with mock.patch.object(Group, "start_grad_sync", counting):
            yield


def _step(
    model: Any,
    step: int,
    cut: tuple[int, ...],
    loss: Any,
    counts: _Reduces,
    last: bool = False,
    dropped: bool = False,
) -> float:
    from ...testing._data import forward_step
    from ...train_step import TrainStep

    batches = iter(model.microbatches(step, sum(cut)))
    with TrainStep(model.chunks, model.optimizer) as train_step:
        for index, size in enumerate(cut, start=1):
            train_step.forward_backward(
                forward_step_func=partial(forward_step, **loss),
                data_iterator=iter([next(batches) for _ in range(size)]),
                num_microbatches=size,
                last=last and index == len(cut),
                seq_length=model.seq,
                micro_batch_size=2,
            )
        if dropped:
            raise _Dropped
        counts.before_finish = counts.all
        result = train_step.finish()
    counts.groups = sum(len(chunk.bucket_groups + chunk.expert_parallel_bucket_groups) for chunk in model.chunks)
    return float(result.grad_norm or 0.0)


def audit_of_a_broken_step(layout: Layout = DP) -> None:
    """Begin a step without zeroing the gradients of the last one, which the audit has to find."""
    from ... import audit

    layout.set_up()
    audit.start(every=1)
    model = layout.model()
    model.train_step(0)
    expect(not audit.findings(), f"the audit has found something in a plain step: {audit.findings()}")
    model.forward_backward(1)
    model.optimizer.step()
    found = [finding.rule for finding in audit.findings()]
    expect(found == ["fresh-gradients"], f"the audit has found {found} instead of fresh-gradients")
    audit.clear()


CHECKS = (
    Check(
        "train-step",
        steps_in_pieces,
        "parameters after steps of several calls by TrainStep, with Megatron's own steps of one call",
        layouts=True,
    ),
    Check("train-step-overlap", reduce_in_the_last_call),
    Check(
        "train-step-dropped",
        dropped_step,
        "parameters after a step that was dropped and another one, with those without the dropped one",
        layouts=True,
    ),
    Check("audit", audit_of_a_broken_step),
)
