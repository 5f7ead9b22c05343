"""megatron.save-fails-everywhere: saves of which one rank's part fails, by the real code at 2 ranks."""

import contextlib
import functools
import importlib
import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of
from rigs.diagnosed_code import made_up, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.failing_saves import CORE, WRITERS, Failing, full_disk, has_manifests, no_folder_for, wait_until
from rigs.megatron.options import UNPATCHED, attempt
from rigs.megatron.save import ALONE, has_working_writer, minor

from megapatch.patches.megatron.save_fails_everywhere import Failure
from megapatch.testing import init_parallel

pytestmark = pytest.mark.skipif(not has_working_writer(), reason="0.12's writer does not work with this torch")

SOON = timedelta(seconds=2)
"""How long a rank waits for one that is known not to come."""


# ------------------------------------------------------------------------------------------ without the patch
class Waiting(Failing):
    """The same, where a rank that waits for one that has failed gives up soon."""

    def metadata(self):
        wrapper = importlib.import_module("torch.distributed.checkpoint.utils")._DistWrapper
        gather = wrapper.gather_object

        def gather_object(*args):
            found = gather(*args)
            if self.rank == 1:
                wait_until(SOON)
            return found

        with (
            mock.patch.object(wrapper, "gather_object", gather_object),
            mock.patch.object(self.module.FileSystemWriterAsync, "finish", full_disk),
        ):
            return attempt(self.at_once)

    def config(self):
        planned = self.plan()
        tensors, config, *_ = planned.request.finalize_fns
        arguments = list(planned.request.async_fn_args)
        if planned.request.preload_fn:
            arguments[1] = planned.request.preload_fn()
        planned.request.async_fn(*arguments, **planned.request.async_fn_kwargs)
        tensors()
        if self.rank:
            wait_until(SOON)
        with no_folder_for("core", "CONFIG_FNAME"):
            return attempt(config)

    def trainers_function(self):
        return attempt(self.later, functools.partial(wait_until, SOON) if self.rank else full_disk)


def new_world(rank, world_size, folder, name):
    """Make a new default group: one in which a rank has given up is of no use any more."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.makedirs(folder, exist_ok=True)
    store = torch.distributed.FileStore(f"{folder}/{name}", world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=ALONE)


def waiting(rank, world_size, folder):
    init_parallel()
    for name in ("metadata", "config", "trainers_function"):
        new_world(rank, world_size, f"{folder}/worlds", name)
        yield f"{name}, without the patch", getattr(Waiting(rank, f"{folder}/{name}"), name)


def failing(rank, world_size, folder):
    init_parallel()
    wait_until(ALONE)
    for writer in WRITERS:
        here = Failing(rank, folder, writer)
        yield (writer, "logged"), here.logged
        for when, save in (("later", here.later), ("at once", here.at_once)):
            yield (writer, when, "metadata"), functools.partial(here.without_metadata, save)
            yield (writer, when, "config"), functools.partial(here.without_config, save)
            yield (writer, when, "left"), lambda here=here: here.left
            if has_manifests():
                yield (writer, when, "manifest"), functools.partial(here.without_manifest, save)
        yield (writer, "trainer's"), functools.partial(here.in_trainers_function, {0})
        yield (writer, "trainer's of both"), functools.partial(here.in_trainers_function, {0, 1})
        yield (writer, "results"), here.without_results
        yield (writer, "unwritten"), here.unwritten
        yield (writer, "interrupted"), here.interrupted
        yield (writer, "asked"), here.asked
    yield "diagnosis", diagnosis


def finalize_first(async_calls):
    """As in March 2025: the queue has the functions in the place of their request."""
    _, _, finalize_fns = async_calls.popleft()
    for finalize in finalize_fns:
        finalize()


def keeps_functions(self, blocking=False):
    finalize_first(self.async_calls)


def meets_the_others_before(self, blocking=False):
    torch.distributed.barrier()
    finalize_first(self.async_calls)


def meets_the_others_afterwards(self, blocking=False):
    try:
        finalize_first(self.async_calls)
    except Exception:
        torch.distributed.barrier()
        raise


def raises_another_error(self, blocking=False):
    try:
        finalize_first(self.async_calls)
    except Exception as error:
        raise ValueError("finalize") from error


def says_nothing(self, blocking=False):
    with contextlib.suppress(Exception):
        finalize_first(self.async_calls)


VERDICTS = {
    keeps_functions: ("needed", "leaves the others to wait for it"),
    meets_the_others_before: ("needed", "leaves the others to wait for it"),
    meets_the_others_afterwards: ("fixed", "meets the others"),
    raises_another_error: ("unknown", "to raise where its work fails"),
    says_nothing: ("unknown", "to raise where its work fails"),
}


def diagnosis():
    from megapatch.patches.megatron._diagnoses_of_save_failures import diagnose_queue

    module = importlib.import_module(f"{CORE}.strategies.async_utils")
    changes = made_up(module.AsyncCallsQueue, "maybe_finalize_async_calls", *VERDICTS)
    return verdicts_of(diagnose_queue, module, changes)


unpatched = cells_of(waiting, 2, folder="unpatched", env=UNPATCHED)
patched = cells_of(failing, 2, folder="patched")
each_writer = pytest.mark.parametrize("writer", WRITERS)


# ------------------------------------------------------------------------------------------ the checks
FULL, GONE = ("OSError", "No space left on device"), ("FileNotFoundError", "gone/")


@pytest.mark.parametrize("name", ["metadata", "config", "trainers_function"])
@pytest.mark.quick
def test_without_the_patch_a_rank_waits_for_one_that_has_failed(unpatched, name):
    (error, _), (of_other, waited) = (found[f"{name}, without the patch"] for found in unpatched)
    assert error == (GONE if name == "config" else FULL)[0]
    assert of_other == "RuntimeError"
    assert "imed out" in waited


@each_writer
@pytest.mark.parametrize("when", ["later", "at once"])
@pytest.mark.parametrize(("what", "fails"), [("metadata", FULL), ("config", GONE), ("manifest", GONE)])
@pytest.mark.quick
def test_a_save_that_fails_on_one_rank_fails_on_the_others(patched, writer, when, what, fails):
    if what == "manifest" and (writer, when, what) not in patched[0]:
        pytest.skip("this Megatron has no manifests")
    assert_failed_everywhere([found[writer, when, what] for found in patched], *fails)


@each_writer
@pytest.mark.parametrize("when", ["later", "at once"])
def test_a_save_that_failed_does_not_look_complete(patched, writer, when):
    assert {"metadata.json", "integrity.json"}.isdisjoint(patched[0][writer, when, "left"])


def test_the_first_of_several_errors_is_raised():
    failure = Failure()
    for error in (OSError("the cause"), ValueError("what followed from it")):
        with failure.kept():
            raise error
    with pytest.raises(OSError, match="the cause"):
        failure.raise_everywhere()


@each_writer
def test_only_the_rank_that_failed_logs_its_error_and_once(patched, writer):
    (text,), of_other = (found[writer, "logged"] for found in patched)
    assert "on this rank a save failed with OSError: [Errno 28] No space left on device;" in text
    assert of_other == []


@each_writer
def test_the_same_in_a_function_of_the_trainers(patched, writer):
    ended = [found[writer, "trainer's"] for found in patched]
    assert_failed_everywhere(ended, *FULL)
    assert [ran.count("the trainer's") for _, _, (*_, ran) in ended] == [0, 1]


def assert_failed_everywhere(ended, own, text):
    (error, found, after), (of_other, of_others, after_others) = ended
    assert (error, of_other) == (own, "MegapatchError")
    assert text in found
    assert f"the save failed on another rank: rank 0 raised {own}: " in of_others
    assert text in of_others
    assert_goes_on(after, after_others)


def assert_goes_on(*ranks):
    for waiting, *lost, _ in ranks:
        assert waiting == 0  # to be finalized
        assert lost == [None, None]  # of a synchronous save, and of one by the queue


@each_writer
def test_each_rank_that_failed_raises_its_own_error(patched, writer):
    for found in patched:
        error, text, after = found[writer, "trainer's of both"]
        assert (error, text) == ("OSError", "[Errno 28] No space left on device")
        assert_goes_on(after)


@each_writer
@pytest.mark.parametrize("what", ["results", "unwritten"])
def test_what_upstream_raises_on_rank_0_is_raised_on_the_other(patched, writer, what):
    (error, found, after), (of_other, _, after_others) = (ranks[writer, what] for ranks in patched)
    assert error == "CheckpointException"
    assert of_other in ("CheckpointException", "MegapatchError")  # upstream's own, from 0.14 on, or ours
    assert ("No space left on device" if what == "results" else "Worker failure") in found
    assert_goes_on(after, after_others)


@each_writer
def test_an_exit_is_not_waited_with(patched, writer):
    for found in patched:
        error, _, after, met = found[writer, "interrupted"]
        assert (error, met) == ("SystemExit", 0)
        assert_goes_on(after)


@each_writer
def test_the_costs_are_those_that_the_patch_states(patched, writer):
    for found in patched:
        assert found[writer, "asked"] == [2 if minor() >= 15 else 3, 4]


def test_the_verdict_on_a_queue_is_by_what_its_ranks_do(patched):
    assert_verdicts(patched[0]["diagnosis"], {queue.__name__: verdict for queue, verdict in VERDICTS.items()})
