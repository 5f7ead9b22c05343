"""TrainStep, a reader of parameters and the audit on a fake GPU: devices, streams, and waits of the host.

Each layout of two ranks makes steps of several calls; some are given up. Nothing mixes devices, nothing uses what
another stream still writes, no result has NaN, and our code waits for the GPU where docs/benchmarks.md says.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
from rigs.cells import run_cells
from rigs.fake_gpu import MixedDevices, Race, install
from rigs.megatron.options import GRADS
from rigs.train_step.layouts import CASES, INSTANCES, NOT_KNOWN_HERE, TWO_INSTANCES, in_layouts
from rigs.train_step.models import MEAN, allow_sequence_parallel
from rigs.train_step.on_fake_gpu import (
    audited,
    backward_in_a_side_stream,
    finished_without_waiting,
    given_up,
    read,
    reduced_from_another_stream,
    reduced_on_the_host,
    scaled_by_a_number,
    settled_without_handles,
    settled_without_streams,
    steps,
)
from rigs.turns import chosen, with_nightly

import megapatch
from megapatch._mcore import param_gathers
from megapatch.audit._audit import Audit
from megapatch.patches.megatron import parameters_without_gradients
from megapatch.train_step import _megatron, _normalization
from megapatch.train_step._normalization import LossScaling

pytestmark = pytest.mark.thorough

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
MUTATED = ("dp2, mean", "pp2")  # of ON_TWO, those that mutants run


def expected_waits(name):
    _, layout, options, _ = {**ON_TWO, **ON_FOUR}[name]
    lines = [TOTAL_TOKENS] * bool(options.get("per_token_loss"))
    lines += [AGREED] * bool({"pp", "tp"} & layout.keys())
    return dict(Counter(lines))


# ------------------------------------------------------------------------ mutants: each breaks our code in a place
BACKEND, NORMALIZATION = _megatron.MegatronStep, _normalization.Normalization
SCALING = scaled_by_a_number(LossScaling._weighing)
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
    "a wait in each microbatch": (LossScaling, "_weighing", SCALING, ("steps", "dp2, mean"), None),
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
    for name in MUTATED:
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


def job(rank, world_size, names):
    allow_sequence_parallel()
    logging.getLogger("megapatch").setLevel(logging.ERROR)
    todo = scenarios()
    for name, layout, options, loss in in_layouts(_of(ON_TWO, names), world_size):
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


def on_four(rank, world_size, names):
    allow_sequence_parallel()
    for name, layout, options, loss in in_layouts(_of(ON_FOUR, names), world_size):
        yield ("steps", name), partial(steps, layout, options, loss)


def _of(cases, names):
    return {name: case for name, case in cases.items() if name in names}


@pytest.fixture(scope="module")
def ranks(request):
    return run_cells(job, 2, {*chosen(request, "name"), *MUTATED}, setup=install)


@pytest.fixture(scope="module")
def four_ranks(request):
    return run_cells(on_four, 4, chosen(request, "name"), setup=install)


@pytest.mark.parametrize("name", with_nightly([*ON_TWO, *ON_FOUR], always=MUTATED))
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
