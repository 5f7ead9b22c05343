"""The outcomes of the ways in which the two runs of a check can end, without running anything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megapatch._verify import in_ranks, results
from megapatch._verify.check import Check
from megapatch._verify.in_ranks import PatchStatus, ScenarioResult
from megapatch._verify.results import Results
from megapatch.errors import RanksFailed, RanksTimedOut
from megapatch.patch import Status
from megapatch.patches._catalogue import CATALOGUE

APPLIED = PatchStatus("applied", "the defect is there")
FIXED = PatchStatus("not-needed", "upstream has repaired it")
DEFECT = RanksFailed(
    "", {1: "Traceback\nmegapatch._verify.check.DefectSeen: dp: gradients differ by 0.3"}, {0: ""}
)
BROKE = RanksFailed(
    "", {0: "Traceback\nmegapatch._verify.in_ranks.ScenarioFailed: in the layout dp: OSError: no"}, {}
)
LATE = RanksTimedOut("rank 0 of 2 did not finish within 9 s:\nin a collective")
WELL = [ScenarioResult({"dp": 0.0, "pp2": None}, (), 1.0), ScenarioResult({"dp": 1e-8, "pp2": None}, (), 1.0)]
AUDITED = [WELL[0], ScenarioResult({"dp": 0.0}, ("reduced-once: twice",), 1.0)]


class Stand:
    """A world of two ranks, in which the runs without megapatch and with it end as they are told."""

    size, device, leads = 2, "cpu", True

    def __init__(self, without, with_it):
        self.endings = {True: without, False: with_it}
        self.runs = []

    def run(self, function, *args, env, timeout):
        self.runs.append(env)
        ending = self.endings[env["MEGAPATCH_AUDIT"] == "" and env.get("MEGAPATCH_DISABLE") == "*"]
        if isinstance(ending, Exception):
            raise ending
        return ending


def row_of(without, with_it, patch_status=APPLIED, **options):
    world, row = Stand(without, with_it), results.Row("megatron.a", results.UNDECIDED, text=results.UNFINISHED)
    check = Check("megatron.a", lambda layout: None, **options)
    results.run_check(check, row, world, patch_status, 9.0, lambda text: None)
    return row, world


@pytest.mark.parametrize(
    ("without", "with_it", "outcome", "says"),
    [
        (DEFECT, WELL, results.REPAIRED, "dp: gradients differ by 0.3"),
        (WELL, WELL, results.NOT_SEEN, ""),
        (DEFECT, DEFECT, results.WRONG, "with megapatch: dp: gradients differ by 0.3"),
        (DEFECT, BROKE, results.WRONG, "OSError: no"),
        (DEFECT, LATE, results.WRONG, "did not finish within 9 s"),
        (DEFECT, AUDITED, results.WRONG, "the audit has found: reduced-once: twice"),
        (BROKE, WELL, results.UNDECIDED, "ended otherwise: in the layout dp: OSError: no"),
        (LATE, WELL, results.UNDECIDED, "did not finish"),
    ],
)
def test_the_outcome_of_an_applied_patch(without, with_it, outcome, says):
    row, _ = row_of(without, with_it)
    assert row.outcome == outcome
    assert says in row.text
    assert row.is_bad == (outcome != results.REPAIRED)


def test_a_patch_that_is_not_needed_has_to_work_without_one():
    row, world = row_of(DEFECT, WELL, FIXED)
    assert (row.outcome, row.seen, row.text, len(world.runs)) == (results.NOT_NEEDED, None, FIXED.reason, 1)
    assert row_of(DEFECT, DEFECT, FIXED)[0].outcome == results.WRONG


def test_what_megapatch_adds_has_no_defect_to_be_seen():
    row, world = row_of(DEFECT, WELL, None)
    assert (row.outcome, row.seen, row.text, len(world.runs)) == (results.RIGHT, None, "", 1)


def test_a_check_that_lacks_what_it_needs_is_not_bad():
    lacking = RanksFailed("", {0: "Traceback\nmegapatch._verify.check.CannotRunHere: vLLM is not installed"}, {})
    row, _ = row_of(WELL, lacking, None)
    assert (row.outcome, row.repaired, row.text) == (results.CANNOT, None, "vLLM is not installed")
    assert not row.is_bad


def test_the_largest_difference_of_any_rank_counts_and_the_audit_watches_where_it_may():
    row, world = row_of(DEFECT, WELL)
    assert (row.difference, row.layouts) == (1e-8, ["dp", "pp2"])
    assert [env["MEGAPATCH_AUDIT"] for env in world.runs] == ["", "1"]
    row, world = row_of(DEFECT, WELL, audited=False)
    assert [env["MEGAPATCH_AUDIT"] for env in world.runs] == ["", ""]


@pytest.mark.parametrize(
    ("status", "has_check", "outcome"),
    [
        ("not-installed", True, results.NOT_HERE),
        ("failed", True, results.NOT_IN_PLACE),
        ("refused", True, results.NOT_IN_PLACE),
        ("overwritten", False, results.NOT_IN_PLACE),
        ("missed", False, results.NOT_IN_PLACE),
        ("disabled", True, "disabled"),
        ("unsupported", True, "unsupported"),
        ("pending", True, results.CANNOT),
        ("applied", False, results.NO_CHECK),
        ("not-needed", False, results.NOT_NEEDED),
        ("applied", True, None),
        ("not-needed", True, None),
    ],
)
def test_what_needs_no_run(status, has_check, outcome):
    row = results.without_a_run("megatron.a", PatchStatus(status, "why"), has_check)
    assert outcome == (row and row.outcome)
    if row and outcome != results.NO_CHECK:
        assert "why" in row.text
        assert row.is_bad == (outcome == results.NOT_IN_PLACE)


def test_a_site_that_is_not_in_place_tells_more_than_one_that_is():
    for statuses in ("applied", "failed"), ("not-installed", "applied"):
        assert min(map(Status, statuses), key=in_ranks._most_telling).value == statuses[-1]


def shown(*rows, **fields):
    return Results({"torch": "2.13.0"}, "CPU", "gloo", 2, list(rows), **fields)


def test_the_table():
    repaired = row_of(DEFECT, WELL)[0]
    off = results.Row("megatron.b", "disabled", text="switched off by MEGAPATCH_DISABLE=megatron.b")
    here = [results.Row(f"roll.{name}", results.NOT_HERE) for name in ("grad-scale", "overflow-is-skipped")]
    here.append(results.Row("skyrl.grad-scale", results.NOT_HERE))
    found = shown(repaired, off, *here)
    text = found.text(80)
    assert "2 processes on CPU (gloo)" in " ".join(text.split())
    assert "megatron.a  repaired  yes          well            equal to 1e-08\n" in text
    assert "megatron.b: disabled: switched off by MEGAPATCH_DISABLE" in text
    assert "not here, as it is not installed: roll.*, skyrl.grad-scale\n" in text
    assert "all well: 1 defect was seen without megapatch and repaired with it; switched off: megatron.b" in text
    assert found.exit_code == 0


def test_the_page_shows_what_is_printed():
    """As `megapatch verify megatron.nested-no-sync train-step` in the first ten minutes."""
    rows = [
        results.Row(name, outcome, seen, repaired=True, difference=0.0)
        for name, outcome, seen in (
            ("megatron.nested-no-sync", results.REPAIRED, True),
            ("train-step", results.RIGHT, None),
        )
    ]
    printed = shown(*rows).text(100)
    page = (Path(__file__).parents[2] / "docs/first-ten-minutes.md").read_text()
    assert f"```text\n{printed.partition(chr(10) * 2)[2]}\n```" in page


def test_verifys_own_page_shows_what_is_printed():
    """But for the widths of columns: the page leaves lines out."""
    page = (Path(__file__).parents[2] / "docs/verify.md").read_text()
    block = page.partition("## A run")[2].partition("```text\n")[2].partition("```")[0]
    cells = [re.split(" {2,}", line) for line in block.splitlines() if line.count("  ") >= 4]
    texts = dict(re.findall(r"^(\S+): (?:not needed|cannot run): (.*)$", block, re.MULTILINE))
    seen, well, numbers = {"yes": True}, {"well": True}, {"equal": 0.0}
    rows = [
        results.Row(name, outcome, seen.get(met), well.get(how), numbers.get(differ), text=texts.get(name, ""))
        for name, outcome, met, how, differ in cells[1:]
    ]
    away = [family for family in CATALOGUE if family != "megatron"]
    rows += [results.Row(name, results.NOT_HERE) for family in away for name in CATALOGUE[family]]
    printed = shown(*rows).text(100)
    printed = printed.partition("\n\n")[2].partition("all well")[0]
    assert [line.split() for line in printed.splitlines()] == [
        line.split() for line in block.partition("\n\n")[2].partition("all well")[0].splitlines() if line != "..."
    ]


def test_what_is_wrong_is_in_the_table_in_the_last_line_and_in_the_exit_code():
    found = shown(row_of(DEFECT, LATE)[0], row_of(DEFECT, WELL, None)[0])
    assert "megatron.a: WRONG: with megapatch: rank 0 of 2 did not finish within 9 s:" in found.text(200)
    assert found.text(200).endswith("NOT WELL: megatron.a")
    assert found.exit_code == 1


def test_what_was_known_when_it_was_stopped():
    found = shown(row_of(DEFECT, WELL)[0], stopped="interrupted")
    assert found.text(80).endswith("not finished: interrupted; 1 check went well before, 0 did not")
    assert found.exit_code == 1


def test_what_is_not_here_is_not_well():
    found = shown(results.Row("skyrl.grad-scale", results.NOT_HERE))
    assert found.text(200).endswith(
        "nothing was verified: none of what these patches are for is installed: skyrl.grad-scale"
    )
    assert found.exit_code == 2


def test_json_has_all_of_it():
    found = json.loads(json.dumps(shown(row_of(DEFECT, WELL)[0]).to_dict()))
    assert (found["schema"], found["exit_code"], found["processes"]) == (1, 0, 2)
    assert found["step_seconds"] is found["cost"] is None  # keys of the schema
    assert found["checks"][0] == {
        "name": "megatron.a",
        "outcome": "repaired",
        "seen": True,
        "repaired": True,
        "difference": 1e-8,
        "compares": "",
        "layouts": ["dp", "pp2"],
        "cost": None,
        "seconds": found["checks"][0]["seconds"],
        "text": "without megapatch: dp: gradients differ by 0.3",
    }
