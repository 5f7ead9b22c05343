"""After a normal call all state is as without megapatch, but for what a patch declares; and after one refused."""

from __future__ import annotations

import pytest
from rigs.megatron.save import minor
from rigs.where import chosen

from megapatch.patches import PATCHES

from . import runs
from .calls import CALLS
from .states import by_mark, differences, in_words, record

pytestmark = pytest.mark.skipif(minor() < 16, reason="older Megatrons lack half of what these programs do")

DECLARED = {attribute: patch.name for patch in PATCHES for attribute, _ in patch.leaves}
PAIRS = [(program, layout) for program, (_, layouts) in CALLS.items() for layout in layouts]
SHARE = 8
"""In CI one of so many programs and layouts runs."""


@pytest.fixture(scope="module")
def records(request, tmp_path_factory):
    """Return a function: the records of these pairs, plain and with megapatch, made with those of all tests."""
    found = {runs.PLAIN: {}, runs.PATCHED: {}}

    def of(pairs):
        wanted = [each for each in PAIRS if each in pairs or each in chosen(request, "program", "layout")]
        for mode, known in found.items():
            if missing := [pair for pair in wanted if pair not in known]:
                known.update(record(missing, mode, tmp_path_factory.mktemp("saves"), PATCHES))
        return [(found[runs.PLAIN][pair], found[runs.PATCHED][pair]) for pair in pairs]

    return of


@pytest.mark.parametrize(
    ("program", "layout"),
    [pytest.param(*pair, marks=() if n % SHARE == 0 else pytest.mark.nightly) for n, pair in enumerate(PAIRS)],
)
def test_after_each_call_all_state_is_the_same(records, program, layout):
    ((plain, patched),) = records([(program, layout)])
    for mode, text in (("plain", plain), ("with megapatch", patched)):
        assert not isinstance(text, str), f"failed, {mode}: {text}"
    left = by_mark(differences(plain, patched)).get("", ())
    assert not left, in_words(left)


@pytest.mark.nightly
def test_each_declaration_shows(records):
    found = [each for pair in records(PAIRS) for each in differences(*pair)]
    in_place = {
        target.partition(":")[0] for _, patched in records(PAIRS) for _, _, places in patched for target in places
    }
    expected = {attribute for attribute, patch in DECLARED.items() if patch in in_place}
    assert set(by_mark(found)) - {""} == expected


@pytest.mark.nightly
def test_each_patched_function_is_called(records):
    patched = [rank for _, patched in records(PAIRS) for rank in patched]
    called, in_place = ({target for rank in patched for target in rank[number]} for number in (1, 2))
    assert in_place - called == set(NOT_CALLED) & in_place


NOT_CALLED = {
    "megatron.saves-of-one-step: megatron.core.dist_checkpointing.strategies.async_utils"
    ":PersistentAsyncCaller.schedule_async_call": "a persistent worker takes a GPU",
    "megatron.load-offloaded-state: megatron.core.optimizer.distrib_optimizer"
    ":HybridDeviceOptimizer._sync_hdo_state_to_sub_optimizers": "each load that comes to it is what it repairs",
}
"""Patched functions that no program calls, with the reason."""
if minor() < 18:
    NOT_CALLED |= {
        "megatron.rerun-state-dict: megatron.core.rerun_state_machine"
        ":RerunStateMachine.state_dict": "its result is what the patch repairs",
        "megatron.gathered-when-read: megatron.core.resharding.refit"
        ":reshard_model_weights": "the program is for the refits of 0.17 and later",
        "megatron.torch-fsdp2-finalize: megatron.core.distributed"
        ":TorchFullyShardedDataParallel.finish_grad_sync": "the program takes 0.17",
        "megatron.save-plan-cache: megatron.core.dist_checkpointing.strategies.fully_parallel"
        ":FullyParallelSaveStrategyWrapper.apply_saving_parallelization": "the programs save without that wrapper",
    }
