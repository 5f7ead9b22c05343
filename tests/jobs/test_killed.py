"""Jobs that are killed at each fifth of a step and of a save, and resume from what they have left.

They save after each step: every fourth checkpoint stays, the others are for recovery (non-persistent), and all are
asynchronous. Each life resumes from no older step than that of the last save that was finalized, and its state is
that of this step in a run that is not killed, bit by bit: parameters, optimizer and schedule, on each rank.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from rigs.jobs.flags import BOTH, FLAGS
from rigs.jobs.job import JOBS, run_alone
from rigs.jobs.kills import SAVE, STEP
from rigs.megatron.options import needs_training
from rigs.megatron.save import minor

from jobs.test_pretrain_bridge import pytestmark as needs_bridge

POINTS = [
    *((event, count, late) for late in (False, True) for count in (2, 3) for event in STEP),
    *((event, count, count > 1) for count in (1, 2) for event in SAVE),
]
"""An event, its number in a life, and whether writers are late."""
PLAIN = FLAGS.replace("--save-interval 2", "").replace("--save ck", "") + "--train-iters 400 --eval-interval 1000"
PLAIN += " --attention-dropout 0 --hidden-dropout 0"
SAVES = "--save ck --load ck --save-interval 4 --non-persistent-save-interval 1 --non-persistent-ckpt-type global"
ASYNC = f"--async-save --use-persistent-ckpt-worker {'--async-strategy mcore' if minor() > 16 else ''}"
FOLDERS = {"save": "ck", "load": "ck", "save_interval": 4, "non_persistent_save_interval": 1, "most_recent_k": 2}


class Job(NamedTuple):
    """A script, its flags without a checkpoint, those with which it saves and resumes, and what it takes."""

    script: str
    straight: Any
    saves: Any
    needs: pytest.MarkDecorator = needs_training


JOB = {
    "Megatron": Job("pretrain_gpt.py", f"{PLAIN} {BOTH}", f"{PLAIN} {BOTH} {SAVES} {ASYNC}"),
    "Megatron, fp32": Job("pretrain_gpt.py", PLAIN, f"{PLAIN} {SAVES} {ASYNC}"),
    "Bridge": Job(
        "pretrain_bridge.py",
        {"save": None, "save_interval": None},
        {**FOLDERS, "non_persistent_ckpt_type": "global", "async_save": True},
        needs_bridge,
    ),
}
FIFTH = [("tracked", 5, True)]
DEFECTS = {
    "megatron.tracked-checkpoint-stays": ("Megatron", [*FIFTH, ("requested", 2, True)], (5, None, False, True)),
    "megatron.saves-of-one-step": ("Megatron, fp32", FIFTH, (5, 5, False, True)),
    "megatron.asked-step-loaded": ("Megatron", FIFTH, (5, 5, True, False)),
}
"""By patch, a job, where it is killed, and what is found without the patch: the step of the last finalized save,
that of the next life, whether its state was right, and whether the step that was asked for was loaded."""


class Life(NamedTuple):
    """What a life began with.

    killed     where the one before was killed
    finalized  the step of the last save of all before that was finalized
    resumed    the step with which it began; or None, if it did not
    is_right   whether each rank has in each step the state of the run that is not killed
    """

    killed: tuple | None
    finalized: int
    resumed: int | None
    is_right: bool


def lives(folder, job, points, **environment):
    """Kill a job at each of the points, and return what the next lives began with.

    Returns:
        the lives after each kill, one that asks for the oldest checkpoint, and the step of that one
    """
    made = [
        *({"flags": job.saves, "point": (event, count), "late": late} for event, count, late in points),
        {"flags": job.saves, "steps": 2},
        {"flags": job.saves, "steps": 1, "asked": True},
    ]
    made = [{"name": f"life-{number}", **life} for number, life in enumerate(made)]
    alive = {"name": "straight", "flags": job.straight, "steps": 3 * len(points) + 8}
    (folder / "lives.json").write_text(json.dumps([alive, *made]))
    printed = run_alone(folder, JOBS / "killed.py", str(JOBS / job.script), "lives.json", env=environment)
    *_, (_, _, asked) = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    expected = [states(notes(folder, "straight", rank)) for rank in (0, 1)]
    found, finalized = [], 0
    for killed, life in zip([None, *points, None], made, strict=True):
        of_ranks = [notes(folder, life["name"], rank) for rank in (0, 1)]
        each = [states(found_of_rank) for found_of_rank in of_ranks]
        is_right = all(
            mine and mine.items() <= theirs.items() for mine, theirs in zip(each, expected, strict=True)
        )
        if "point" in life:
            assert {"killed": life["point"][0]} in of_ranks[0], f"{life} has ended elsewhere"
        found.append(Life(killed, finalized, min(each[0], default=None), is_right))
        finalized = max([finalized, *(note["finalized"] for note in of_ranks[0] if "finalized" in note)])
    return found[:-1], found[-1], asked


def notes(folder, name, rank):
    file = folder / f"{name}-{rank}.log"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def states(found):
    """Return the digests of a life's states by step."""
    return {note["step"]: note["state"] for note in found if "state" in note}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [pytest.param(name, marks=job.needs) for name, job in JOB.items()])
def test_no_finalized_save_is_lost(tmp_path, name):
    found, last, asked = lives(tmp_path, JOB[name], POINTS, JOB_IMPORT="1")
    print(*found, sep="\n")
    wrong = [life for life in found if not life.is_right or life.resumed < life.finalized]
    assert not wrong, wrong
    assert found[-1].resumed > 5
    assert (last.resumed, last.is_right) == (asked, True)


@pytest.mark.nightly
@needs_training
@pytest.mark.parametrize("patch", DEFECTS)
def test_it_is_without_a_patch(tmp_path, patch):
    name, points, expected = DEFECTS[patch]
    found, last, asked = lives(tmp_path, JOB[name], points, JOB_IMPORT="1", MEGAPATCH_DISABLE=patch)
    life = found[-1]
    assert (life.finalized, life.resumed, life.is_right, last.resumed == asked) == expected
