"""On the fake GPU: steps of several calls, steps given up, reads and the audit; and mutants of our code."""

from __future__ import annotations

import contextlib
import linecache
from collections import Counter
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch

import megapatch
from megapatch import audit
from megapatch._mcore import bucket_groups
from megapatch.patches.megatron import parameters_without_gradients
from megapatch.train_step import TrainStep
from megapatch.weight_sync import gathered_parameters
from rigs.fake_gpu import gpu
from rigs.megatron.gathers import wrong
from rigs.megatron.options import BOTH, Interrupted, Log, raising_half_way
from rigs.train_step.layouts import model_of
from rigs.train_step.models import MEAN, in_pieces

PACKAGE = str(Path(megapatch.__file__).parent)
CUT = (1, 1)


@contextlib.contextmanager
def our_waits():
    """Yield a Counter of the lines of megapatch that wait, filled at the end; the models of tests are not it."""
    found = Counter()
    with gpu.waits_by_line() as lines:
        yield found
    for (path, line), count in lines.items():
        ours = path.startswith(PACKAGE) and not path.startswith(f"{PACKAGE}/testing/")
        if ours or path == __file__:  # where the mutants are
            found[linecache.getline(path, line).strip()] += count


def finite(model):
    model.gather_parameters()
    assert all(parameter.isfinite().all() for parameter in model.parameters().values())


# ------------------------------------------------------------------------ steps
def steps(layout, options, loss, **settings):
    """Make steps of several calls, the last one known or not; return the waits of the last."""
    model = model_of(layout, options)
    step = TrainStep(model.chunks, model.optimizer, **settings)
    cut = [size * layout.get("vpp", 1) for size in CUT]
    for number in range(3):
        with our_waits() as waits, step:
            in_pieces(step, model, number, cut, loss, last=number == 1)
            step.finish()
    finite(model)
    return dict(waits)


def given_up(options, by_hand=False, around=contextlib.nullcontext):
    """Give a step up during its last backward pass, and make another."""
    model = model_of({}, {**options, "layers": 4})
    step = TrainStep(model.chunks, model.optimizer)
    for number in range(3):
        if number:
            with suppress(Interrupted), around(), raising_half_way(model, 0):
                if by_hand:
                    model.zero_grad()
                    model.forward_backward(number, num_microbatches=1, **MEAN)
                else:
                    with step:
                        in_pieces(step, model, number, (1,), MEAN, last=True)
        if by_hand:
            model.train_step(number)
            continue
        with step:
            in_pieces(step, model, number, CUT, MEAN, last=True)
            step.finish()
    finite(model)


@contextlib.contextmanager
def in_a_side_stream():
    """Work in a stream of one's own, which has waited for the usual one, and for which nobody waits."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


@contextlib.contextmanager
def backward_in_a_side_stream():
    """Leave the side stream with an exception, as autograd leaves the streams of a backward pass."""
    from megatron.core.pipeline_parallel import schedules

    original = schedules.backward_step

    def backward_step(*args, **kwargs):
        with in_a_side_stream():
            return original(*args, **kwargs)

    with mock.patch.object(schedules, "backward_step", backward_step):
        yield


def reduced_from_another_stream():
    """Have a group wait for its turn whose gradients came in another stream than those of the group before it."""
    first, second = (mock.Mock(params=[], is_first_batch=True) for _ in range(2))
    line = parameters_without_gradients.Line([first, second])
    gradient = torch.zeros(4, device="cuda")
    with in_a_side_stream():
        gradient.add_(1)
        line.start(second, lambda group: torch.distributed.all_reduce(gradient))
    line.start(first, lambda group: None)
    return gradient.tolist()


# ------------------------------------------------------------------------ a reader, and the audit
def read():
    """Read the parameters after each step, in place."""
    plain, model = model_of({}, {**BOTH, "overlap_param_gather": False}), model_of({}, BOTH)
    for number in range(3):
        plain.train_step(number)
        model.train_step(number)
        with our_waits() as waits:
            gathered_parameters(model.chunks)
        assert wrong(model.parameters(), plain.parameters()) == 0
    return dict(waits)


def audited(every):
    """Return where the audit waits in the seventh step, and what it says of itself: it compares after 4 and 8."""
    log = Log()
    audit.start(every=every)
    try:
        model = model_of({}, BOTH)
        for number in range(7):
            with our_waits() as waits:
                model.train_step(number)
        assert audit.findings() == []
    finally:
        audit.stop()
    return dict(waits), [text for text in log.texts if "failed" in text]


# ------------------------------------------------------------------------ mutants: each breaks our code in a place
def settled_without_handles(ddp):
    for group in bucket_groups.bucket_groups(ddp):
        group.grad_reduce_handle = None


def settled_without_streams(ddp):
    for group in bucket_groups.bucket_groups(ddp):
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None


def finished_without_waiting(groups):
    for group in groups:
        group.start_param_sync()
        group.param_gather_handle = None


def scaled_by_a_number(weighing):
    """Multiply losses by a number that is read from the GPU."""

    def scaling(self, scale):
        scaled = weighing(self, scale)
        return lambda tensor, *args, **kwargs: scaled(tensor * float(tensor.new_ones(())), *args, **kwargs)

    return scaling


def reduced_on_the_host(self, device):
    count = torch.tensor([self.count], dtype=torch.float64)
    torch.distributed.all_reduce(count, group=self.parallel.get_data_parallel_group())
    return float(count)
