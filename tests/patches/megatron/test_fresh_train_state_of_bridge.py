"""Megatron-Bridge's own saves and loads: the patches of DISABLED."""

from __future__ import annotations

import importlib
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from rigs.cells import cells_of
from rigs.diagnosed_sources import verdict_of, words
from rigs.megatron.bridge import find_bridge, needs_bridge
from rigs.megatron.bridge_loads import BridgeRun

DISABLED = ",".join(
    f"megatron.{name}"
    for name in (
        "asked-step-loaded",
        "finetune-for-one-load",
        "fresh-train-state",
        "recovery-before-pretrained",
        "tracked-checkpoint-stays",
    )
)
MODULE = "megatron.bridge.training.checkpointing"
pytestmark = needs_bridge


def shared_folder():
    """Return a folder that all ranks have, and that ends with the process of the first one."""
    names = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(names, src=0)
    return names[0]


def differences(found, expected):
    """Return step and samples of both, and the parts of all elements that differ of parameters and moments."""

    def part(those, these):
        differ = [(one != other).float().mean() for one, other in zip(those, these, strict=True)]
        return float(torch.stack(differ).mean())

    return {
        "steps": (found.step, expected.step),
        "samples": (found.samples, expected.samples),
        "parameters": part(found.parameters.values(), expected.parameters.values()),
        "moments": part(found.moments, expected.moments),
    }


def load_again():
    """Load step 2, train two steps, and load it again."""
    run = BridgeRun(shared_folder())
    run.loop.train(2)
    saved = run.save()
    run.load()
    run.loop.train(2)
    run.load()
    return differences(run.found(), saved)


def load_the_latest():
    """Load step 2, save step 5, train, and load the latest."""
    run = BridgeRun(shared_folder())
    run.loop.train(2)
    run.save()
    run.load()
    run.loop.train(3)
    saved = run.save()
    run.loop.train(2)
    run.load()
    return differences(run.found(), saved)


def start_from_pretrained():
    """Start from a checkpoint of another run, save step 2, train two steps, and load step 2."""
    base = BridgeRun(pretrained := shared_folder())
    base.loop.train(1)
    weights = base.save().parameters
    run = BridgeRun(shared_folder(), pretrained)
    run.load()
    start = run.found()
    started = {
        "start": start.step,
        "weights": all(start.parameters[name].equal(weights[name]) for name in weights),
    }
    started["setting"] = run.settings.finetune
    run.loop.train(2)
    saved = run.save()
    run.loop.train(2)
    run.load()
    return {**differences(run.found(), saved), **started}


def load_that_raises():
    run = BridgeRun("no such folder", "none either")
    with pytest.raises(FileNotFoundError):
        run.load()
    return run.settings.finetune


def peft_hook():
    """Return the setting after the hook that loads PEFT's base model, what fails in the hook after that, and how a
    load of a later step 2 differs."""
    setup = importlib.import_module("megatron.bridge.training.setup")
    base = BridgeRun(pretrained := shared_folder())
    base.loop.train(1)
    base.save()
    run = BridgeRun(shared_folder(), pretrained)
    run.loop.state.cfg.peft = object()
    hook = setup._create_peft_pre_wrap_hook(run.loop.state.cfg, run.loop.state)
    try:
        hook(run.loop.model.chunks)
    except TypeError as error:  # an object() cannot transform a model
        found = {"setting": run.settings.finetune, "error": str(error)}
    run.loop.state.cfg.peft = None
    run.loop.train(2)
    saved = run.save()
    run.loop.train(2)
    run.load()
    return {**differences(run.found(), saved), **found}


def recover():
    """Load where there are a pretrained checkpoint and one for recovery."""
    base = BridgeRun(pretrained := shared_folder())
    base.loop.train(1)
    base.save()
    run = BridgeRun(shared_folder(), pretrained)
    run.settings.non_persistent_ckpt_type = "global"
    run.loop.train(2)
    saved = run.save(non_persistent_ckpt=True)
    run.loop.train(2)
    run.load()
    return differences(run.found(), saved)


def ask_for_a_step():
    """Ask for step 2 where a checkpoint for recovery is of step 4."""
    run = BridgeRun(shared_folder())
    run.settings.non_persistent_ckpt_type = "global"
    run.loop.train(2)
    saved = run.save()
    run.loop.train(2)
    run.save(non_persistent_ckpt=True)
    run.settings.ckpt_step = 2
    run.load()
    return differences(run.found(), saved)


def saves_in_turn(finalize):
    """Return the checkpoints there are as each of three asynchronous saves has begun, and what was tracked.

    A save is finalized by `finalize(run)`, as the call that trains the next step ends at the latest.
    """
    run, found = BridgeRun(folder := Path(shared_folder())), []
    run.settings.async_save, run.settings.most_recent_k = True, 1
    run.settings.use_persistent_ckpt_worker = False  # it takes a GPU
    for _ in range(3):
        run.loop.train(1)
        tracked = folder / "latest_checkpointed_iteration.txt"
        found.append(tracked.read_text() if tracked.exists() else "")
        run.settings.save = str(folder)
        run.loop.state.initialize_async_checkpoint_worker()  # train() has ended that of the save before
        queue = run.loop.state.async_calls_queue
        queue.maybe_finalize_async_calls = partial(only_blocking, queue.maybe_finalize_async_calls)
        run.save()
        for thread in threading.enumerate():
            if "remove_iter_ckpts" in thread.name:
                thread.join()
        torch.distributed.barrier()
        found.append(sorted(int(name.name[5:]) for name in folder.glob("iter_*")))
        finalize(run)
    return found


def only_blocking(finalize, blocking=False, **options):
    """Finalize saves when train() waits for them: writing takes longer than a step."""
    return finalize(blocking, **options) if blocking else []


def finalized_at_once():
    return saves_in_turn(
        lambda run: run.checkpointing.maybe_finalize_async_save(run.loop.state, run.settings, blocking=True)
    )


def finalized_as_a_call_ends():
    return saves_in_turn(lambda run: None)


def verdicts():
    from megapatch.patches.megatron.finetune_for_one_load import PATCH
    from megapatch.patches.megatron.fresh_train_state import diagnose

    module = importlib.import_module(MODULE)
    found = [words(verdict_of(diagnose, module))]
    return found + [words(site.diagnose(importlib.import_module(site.module))) for site in PATCH.sites[1:]]


def recovers():
    from megapatch.patches.megatron.recovery_before_pretrained import PATCH

    _, *sites = PATCH.sites
    (verdict,) = {words(site.diagnose(importlib.import_module(site.module)))[0] for site in sites}
    return verdict


def verdicts_on_saves():
    from megapatch.patches.megatron._tracked_checkpoint_of_bridge import diagnose_tracker
    from megapatch.patches.megatron.tracked_checkpoint_stays import diagnose

    module = importlib.import_module(MODULE)
    return words(verdict_of(diagnose, module))[0], words(verdict_of(diagnose_tracker, module))[0]


CELLS = (
    load_again,
    load_the_latest,
    start_from_pretrained,
    load_that_raises,
    peft_hook,
    recover,
    ask_for_a_step,
    finalized_at_once,
    finalized_as_a_call_ends,
    verdicts,
    verdicts_on_saves,
    recovers,
)
RIGHT = {"parameters": 0, "moments": 0}


def job(rank, world_size):
    for cell in CELLS:
        yield cell.__name__, partial(cell)


without = cells_of(job, 2, setup=find_bridge, env={"MEGAPATCH_DISABLE": DISABLED})
ranks = cells_of(job, 2, setup=find_bridge)


def test_without_the_patches_a_second_load_has_another_step_than_its_weights(without):
    for found in without:
        assert found["load_again"] == {"steps": (4, 2), "samples": (32, 16), **RIGHT}
        latest = found["load_the_latest"]
        assert latest["steps"][0] != 5 == latest["steps"][1]
        assert latest["parameters"] > 0.9
        after = found["start_from_pretrained"]
        assert after["steps"] == (0, 2) and after["moments"] > 0.9
        assert found["peft_hook"]["steps"] == (0, 2) and found["peft_hook"]["moments"] > 0.9
        assert found["ask_for_a_step"]["steps"] == (4, 2) and found["ask_for_a_step"]["moments"] > 0.9
        assert found["recover"]["steps"] == ((0, 2) if found["recovers"] == "needed" else (2, 2))


def test_each_load_is_that_of_a_new_process(ranks):
    for found in ranks:
        assert found["load_again"] == {"steps": (2, 2), "samples": (16, 16), **RIGHT}
        assert found["load_the_latest"] == {"steps": (5, 5), "samples": (40, 40), **RIGHT}


def test_the_load_after_a_start_from_pretrained_has_all(ranks):
    for found in ranks:
        start = {"start": 0, "weights": True, "setting": True}
        assert found["start_from_pretrained"] == {"steps": (2, 2), "samples": (16, 16), **RIGHT, **start}
        assert found["load_that_raises"] is False
        hook = {"setting": True, "error": "'object' object is not callable"}
        assert found["peft_hook"] == {"steps": (2, 2), "samples": (16, 16), **RIGHT, **hook}


def test_the_checkpoint_that_was_asked_for_is_loaded(ranks):
    for found in ranks:
        assert found["recover"] == found["ask_for_a_step"] == {"steps": (2, 2), "samples": (16, 16), **RIGHT}


def test_a_checkpoint_stays_while_its_successor_is_written(without, ranks):
    right = ["", [1], "1", [1, 2], "2", [2, 3]]
    removes, tracks = without[0]["verdicts_on_saves"]
    if removes == "needed":
        assert without[0]["finalized_at_once"] == ["", [1], "1", [2], "2", [3]]
        later = ("2", "3") if tracks == "needed" else ("1", "2")
        assert without[0]["finalized_as_a_call_ends"] == ["", [1], later[0], [2], later[1], [3]]
    for found in ranks:
        assert found["finalized_at_once"] == found["finalized_as_a_call_ends"] == right


def test_verdicts(without, ranks):
    for found in (*without, *ranks):
        assert [verdict for verdict, _ in found["verdicts"]] == ["needed"] * 3
