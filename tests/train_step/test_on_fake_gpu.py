"""TrainStep, a reader of parameters and the audit on a fake GPU: devices, streams, and waits of the host.

Each layout of two ranks makes steps of several calls; some are given up. Nothing mixes devices, nothing uses what
another stream still writes, no result has NaN, and our code waits for the GPU where docs/benchmarks.md says.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from rigs.cells import run_cells
from rigs.fake_gpu import MixedDevices, Race, gpu, install
from rigs.megatron.gathers import wrong
from rigs.megatron.options import BOTH, GRADS, Interrupted, Log, raising_half_way
from rigs.train_step.layouts import CASES, INSTANCES, NOT_KNOWN_HERE, TWO_INSTANCES, in_layouts, model_of
from rigs.train_step.models import MEAN, allow_sequence_parallel, in_pieces

import megapatch
from megapatch import audit
from megapatch._mcore import bucket_groups, param_gathers
from megapatch.audit._audit import Audit
from megapatch.patches.megatron import parameters_without_gradients
from megapatch.train_step import TrainStep, _megatron, _normalization
from megapatch.weight_sync import gathered_parameters

pytestmark = pytest.mark.thorough

PACKAGE = str(Path(megapatch.__file__).parent)
CUT = (1, 1)
TOTAL_TOKENS = "self.normalizer = float(self.num_tokens)  # finalize has summed it over all ranks"
TOTAL_COUNT = "return float(count)"
AGREED = "failed, *values = found.tolist()"
TWO = {"two instances": (2, TWO_INSTANCES, INSTANCES, MEAN)}
ON_TWO = {name: case for name, case in {**CASES, **TWO}.items() if case[0] == 2}
ON_FOUR = {  # a spawn of its own: one for each kind of group that two ranks do not have
    name: CASES[name]
    for name in (
        "pp2 dp2, tied embeddings, both, tokens",
        "pp2 vpp2 dp2, both, aligned",
        "tp2 ep2",
        "cp2 dp2, both, tokens",
        "dp4, two optimizer instances, both",
        "ep2 dp2, both, tokens",
    )
}


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


def expected_waits(name):
    _, layout, options, _ = {**ON_TWO, **ON_FOUR}[name]
    lines = [TOTAL_TOKENS] * bool(options.get("per_token_loss"))
    lines += [AGREED] * bool({"pp", "tp"} & layout.keys())
    return dict(Counter(lines))


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
        line.start(second, partial(torch.distributed.all_reduce, gradient))
    line.start(first, lambda: None)
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
    """Return where the audit waits in the third step, and what it says of itself."""
    log = Log()
    audit.start(every=every)
    try:
        model = model_of({}, BOTH)
        for number in range(3):
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


def scaled_by_a_number(of_backend):
    """Multiply losses by a number that is read from the GPU."""

    def scaling(self, scale, loss, others):
        scaled = of_backend(self, scale, loss, others)
        return lambda tensor, *args, **kwargs: scaled(tensor * float(tensor.new_ones(())), *args, **kwargs)

    return scaling


def reduced_on_the_host(self, device):
    count = torch.tensor([self.count], dtype=torch.float64)
    torch.distributed.all_reduce(count, group=self.parallel.get_data_parallel_group())
    return float(count)


BACKEND, NORMALIZATION = _megatron.MegatronBackend, _normalization.Normalization
SCALING = scaled_by_a_number(BACKEND._scaling)
MUTANTS = {  # patched: object, name, by what; then what notices it, and how
    "reduces not waited for": (
        *(parameters_without_gradients, "settle_grad_reduces", settled_without_handles),
        *("given up by hand", Race),
    ),
    "stream of reduces not waited for": (
        *(parameters_without_gradients, "settle_grad_reduces", settled_without_streams),
        *("given up by hand, two instances", Race),
    ),
    "streams not waited for": (torch.cuda, "synchronize", lambda: None, "given up in a side stream", Race),
    "reduced too early": (
        *(parameters_without_gradients, "_after_this_stream", lambda start: start),
        *("reduced from another stream", Race),
    ),
    "gathers not waited for": (param_gathers, "_finish", finished_without_waiting, "read", (Race, AssertionError)),
    "result on the host": (BACKEND, "_device", lambda self: "cpu", ("steps", "pp2"), MixedDevices),
    "count on the host": (NORMALIZATION, "_total_count", reduced_on_the_host, ("steps", "count"), MixedDevices),
    "a wait in each microbatch": (BACKEND, "_scaling", SCALING, ("steps", "dp2, mean"), None),
    "the audit compares in each step": (Audit, "is_due", lambda self: True, ("audit", 100), None),
}


def scenarios():
    found = {
        "given up": partial(given_up, GRADS),
        "given up, two instances": partial(given_up, INSTANCES),
        "given up by hand, two instances": partial(given_up, INSTANCES, by_hand=True),
        "given up by hand": partial(given_up, GRADS, by_hand=True),
        "given up in a side stream": partial(given_up, {}, around=backward_in_a_side_stream),
        "reduced from another stream": reduced_from_another_stream,
        "read": read,
        ("audit", 100): partial(audited, 100),
        ("audit", 1): partial(audited, 1),
        ("steps", "count"): partial(steps, {}, GRADS, None, expected_count=100.0),
    }
    for name in ("dp2, mean", "pp2"):
        found["steps", name] = partial(steps, *ON_TWO[name][1:])
    return found


LAYOUT_OF = {("steps", "pp2"): {"pp": 2}} | {
    name: TWO_INSTANCES for name in ("given up, two instances", "given up by hand, two instances")
}


def noticed(scenario, target, name, mutant, kinds):
    with contextlib.ExitStack() as stack:
        stack.callback(torch.cuda.synchronize)  # for the scenarios after it
        stack.enter_context(mock.patch.object(target, name, mutant))
        if kinds is None:
            return scenario()
        with pytest.raises(kinds) as caught:
            scenario()
    return type(caught.value).__name__


def job(rank, world_size):
    allow_sequence_parallel()
    logging.getLogger("megapatch").setLevel(logging.ERROR)
    todo = scenarios()
    for name, layout, options, loss in in_layouts(ON_TWO, world_size):
        yield ("steps", name), partial(steps, layout, options, loss)
    rest = [(name, scenario) for name, scenario in todo.items() if name[1] not in ON_TWO]
    mutated = [
        (("mutant", name), partial(noticed, todo[scenario], target, attribute, mutant, kinds), scenario)
        for name, (target, attribute, mutant, scenario, kinds) in MUTANTS.items()
    ]
    cells = [(name, scenario, name) for name, scenario in rest] + mutated
    for current in ({}, TWO_INSTANCES, {"pp": 2}):
        megapatch.testing.init_parallel(**current)
        for name, compute, scenario in cells:
            if LAYOUT_OF.get(scenario, {}) == current:
                yield name, compute


def on_four(rank, world_size):
    allow_sequence_parallel()
    for name, layout, options, loss in in_layouts(ON_FOUR, world_size):
        yield ("steps", name), partial(steps, layout, options, loss)


@pytest.fixture(scope="module")
def ranks():
    return run_cells(job, 2, setup=install)


@pytest.fixture(scope="module")
def four_ranks():
    return run_cells(on_four, 4, setup=install)


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_steps_wait_where_they_have_to_and_mix_and_race_nowhere(request, name):
    for found in request.getfixturevalue("ranks" if name in ON_TWO else "four_ranks"):
        if ("steps", name) not in found:
            pytest.skip(NOT_KNOWN_HERE)
        assert found["steps", name] == expected_waits(name)


def test_a_step_by_counts_waits_for_its_total(ranks):
    assert [found["steps", "count"] for found in ranks] == [{TOTAL_COUNT: 1}] * 2


@pytest.mark.parametrize("name", [name for name in scenarios() if "given up" in name])
def test_a_step_that_is_given_up_leaves_nothing_in_flight(ranks, name):
    assert [found[name] for found in ranks] == [None, None]


def test_a_group_that_waits_is_reduced_after_its_gradients(ranks):
    assert [found["reduced from another stream"] for found in ranks] == [[2.0] * 4] * 2


def test_a_read_waits_for_gathers_on_the_gpu_only(ranks):
    assert [found["read"] for found in ranks] == [{}, {}]


def test_the_audit_waits_where_it_compares_and_nowhere_else(ranks):
    for found in ranks:
        assert found["audit", 100] == ({}, [])
        lines, bugs = found["audit", 1]
        assert lines and not bugs


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(ranks, name):
    *_, scenario, kinds = MUTANTS[name]
    for found in ranks:
        if kinds is None:
            assert found["mutant", name] != found[scenario]
        else:
            assert found["mutant", name] in str(kinds)
