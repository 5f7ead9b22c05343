"""The audit's report: it leads to the line, and each rank leaves it as soon as there is something."""

from __future__ import annotations

import _thread
import contextlib
import json
import linecache
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from rigs.audit import idle_audit
from rigs.cells import AUDITED
from rigs.command import run
from rigs.imported import run_with_megatron
from rigs.log import Log
from rigs.megatron.options import GRADS, UNPATCHED, Interrupted, raising_half_way
from rigs.mistakes.table import MISTAKES

import megapatch
from megapatch import audit
from megapatch.audit._findings import Ledger, repairs
from megapatch.audit._report import make, statuses
from megapatch.audit._timeline import KEPT, Timeline
from megapatch.patch import Status
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

REPORT = "MEGAPATCH_REPORT"


def left(folder, rank):
    """Return the report that a rank has left by now; None if there is none."""
    path = Path(folder, f"audit-{rank:05}.json")
    return json.loads(path.read_text()) if path.exists() else None


def model_of(mistake):
    init_parallel(**mistake.layout)
    return tiny_gpt(layers=4, **mistake.options)


# ------------------------------------------------------------------------ files of ranks
def leaving(rank, world_size, folder):
    """Return what is in this rank's file before and after the first step, after the finding, and at the end."""
    mistake = MISTAKES["swapped on one rank only"]
    model, seen = model_of(mistake), [left(folder, rank)]
    for step in range(3):
        mistake.take_step(model, step)
        if step != 1:
            seen.append(left(folder, rank))
    audit.stop()
    return [*seen, left(folder, rank)], str(audit.report())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports") / "made by the first"
    return folder, run_ranks(leaving, 2, str(folder), env={**UNPATCHED, **AUDITED, REPORT: str(folder)})


def test_each_rank_leaves_its_report_as_soon_as_there_is_something(ranks):
    for rank, ((before, first, found, ended), _) in enumerate(ranks[1]):
        assert before is None
        assert (first["rank"], first["size"], first["steps"], first["findings"]) == (rank, 2, 1, [])
        assert "ranks-agree" in [finding["rule"] for finding in found["findings"]]
        assert [each["ended"] for each in (first, found, ended)] == [False, False, True]
        assert ended["steps"] == 3 and ended["settings"] == {"every": 1, "raises": False, "accepted": []}
        assert [event["step"] for event in ended["events"]["model"]["first"]] == [0]
        assert not list(ranks[0].glob("*.part"))


def test_the_report_leads_to_the_line(ranks):
    for (*_, ended), shown in ((seen[-4:], shown) for seen, shown in ranks[1]):
        for finding in ended["findings"]:
            file, _, rest = finding["where"][-1].partition(":")
            number, _, function = rest.partition(" in ")
            assert function == "swapped_on_one_rank"
            assert linecache.getline(file, int(number)).strip() == "model.train_step(step)"
            assert f"  at {finding['where'][-1]}" in shown
            assert finding["causes"] and finding["patches"][0]["reason"] == "switched off by MEGAPATCH_DISABLE=*"
            assert finding["step"] == finding["last_step"] == 2


def test_the_command_shows_it_once(ranks, tmp_path):
    page = tmp_path / "page.html"
    shown = run("audit", str(ranks[0]), "--html", str(page))
    assert shown.returncode == 1
    assert shown.stdout.count("\nranks-agree: ranks 0-1, after 2 optimizer steps\n") == 1
    assert shown.stdout.count("\nmain-params-agree (a note): rank 1, after 2 optimizer steps\n") == 1
    assert "(ranks 0-1)" in shown.stdout and "swapped_on_one_rank" in page.read_text()
    data = json.loads(run("audit", "--json", str(ranks[0])).stdout)
    assert [(each["rule"], each["ranks"]) for each in data["found"]] == [
        ("ranks-agree", [0, 1]),
        ("main-params-agree", [1]),
    ]


def writing_now_and_then(rank, world_size, folder):
    """Return how many steps the file of this rank tells of after each of six, and after a minute."""
    model, seen, clock = model_of(MISTAKES["the optimizer steps twice"]), [], time.monotonic
    for step in range(7):
        with mock.patch.object(time, "monotonic", lambda later=61 * (step == 6): clock() + later):
            model.train_step(step)
        seen.append(left(folder, rank)["steps"])
    return seen


def test_a_report_is_at_most_about_a_minute_old(tmp_path):
    env = {**UNPATCHED, **AUDITED, REPORT: str(tmp_path)}
    assert run_ranks(writing_now_and_then, 1, str(tmp_path), env=env) == [[1, 2, 2, 4, 4, 4, 7]]


def not_writable(rank, world_size):
    log, mistake = Log(), MISTAKES["the optimizer steps twice"]
    model = model_of(mistake)
    for step in range(3):
        mistake.take_step(model, step)
    audit.stop()
    return len(audit.findings()), [text for text in log.texts if "no report is left" in text]


def test_a_folder_that_cannot_be_written_to_is_one_warning(tmp_path):
    (tmp_path / "a file").touch()
    folder = str(tmp_path / "a file" / "below")
    ((count, warnings),) = run_ranks(not_writable, 1, env={**UNPATCHED, **AUDITED, REPORT: folder})
    assert count == 1
    assert len(warnings) == 1 and warnings[0].startswith(
        f"audit: no report is left in {folder}: NotADirectoryError"
    )


PROGRAM = "from megapatch import audit; audit._PROCESS.ledger.report('stepped-once', 'again', 'it steps again')"


def test_it_is_left_at_the_end_of_the_process_and_only_by_one_that_trains(tmp_path):
    environment = {"MEGAPATCH_AUDIT": "1", REPORT: str(tmp_path / "reports")}
    shown = run("-c", "import megapatch", **environment)
    assert shown.returncode == 0 and not (tmp_path / "reports").exists()
    shown = run("-c", PROGRAM, **environment)
    assert shown.returncode == 0, shown.stderr
    data = left(tmp_path / "reports", 0)
    assert data["ended"] and [finding["rule"] for finding in data["findings"]] == ["stepped-once"]
    assert run("-c", PROGRAM, **environment).returncode == 0  # which does not write over it
    assert {file.name for file in (tmp_path / "reports").iterdir()} == {"audit-00000.json", "audit-00000-1.json"}


# ------------------------------------------------------------------------ lines
def lines_of(rank, world_size, folder):
    """Return, by rule, the source lines that findings name."""
    named = {}

    def take(*more):
        found = [*audit.findings(), *audit.notes()]
        named.update((each.rule, _source(each.where[-1])) for each in found)
        audit.clear()

    mistake = MISTAKES["stages have one seed"]
    model = model_of(mistake)
    mistake.take_step(model, 0)
    take()
    mistake = MISTAKES["swapped on one rank only"]
    model = model_of(mistake)
    mistake.take_step(model, 0)
    mistake.take_step(model, 1)  # and no step after it: the difference is found as the findings are asked for
    take()
    model = tiny_gpt(layers=4, **GRADS)
    with contextlib.suppress(Interrupted), raising_half_way(model, 0):
        model.forward_backward(0)
    model.train_step(1)
    take()
    return named


def _source(where):
    file, _, rest = where.partition(":")
    return linecache.getline(file, int(rest.partition(" in ")[0])).strip()


def test_findings_that_are_made_later_name_the_line_of_their_event():
    for named in run_with_megatron(lines_of, 2, "", env={**UNPATCHED, **AUDITED}):
        assert named["stages-differ"] == "model_parallel_cuda_manual_seed(1)"
        assert named["ranks-agree"] == "model.train_step(step)"
        if "hooks-balanced" in named:
            assert named["hooks-balanced"] == "model.forward_backward(0)"


def test_where_there_is_no_code_of_the_user_it_is_that_of_the_latest_call(nothing_left):
    of = idle_audit()
    done = threading.Event()

    def call():
        for part in of.parts:
            if part.name == "audit.calls":
                part.begin_call(None)

    call()
    of.ledger.changed = done.set
    _thread.start_new_thread(of.ledger.report, ("stepped-once", "again", "x"))  # as autograd's: without frames
    assert done.wait(10)
    assert of.ledger.findings()[0].where[-1].endswith("in call")


# ------------------------------------------------------------------------ patches
def missing_here(rank, world_size):
    init_parallel()
    patches = megapatch.report().patches
    applied = [patch.patch.name for patch in patches if patch.status is Status.APPLIED]
    others = [
        patch.patch.name for patch in patches if not any(site.status is Status.APPLIED for site in patch.sites)
    ]
    before = repairs(applied)
    megapatch.restore(applied[0])
    after = repairs(applied)
    megapatch.restore()  # those that are not needed, too
    return applied[0], before, after, repairs(others)


def test_a_patch_is_named_where_it_is_needed_and_not_in_place():
    ((name, before, after, others),) = run_with_megatron(missing_here, 1)
    assert before == () and others == ()
    assert [repair.name for repair in after] == [name]
    assert after[0].reason.startswith("restored in this process")


# ------------------------------------------------------------------------ the timeline and the rules
def test_the_timeline_keeps_the_first_and_the_last_events_of_each_kind():
    timeline = Timeline()
    timeline.add("load", 0)
    for step in range(10_000):
        timeline.add("save", step, str(step))
    data = timeline.to_dict()
    assert list(data) == ["load", "save"] and data["load"]["count"] == 1
    assert data["save"]["count"] == 10_000
    assert [event["step"] for event in data["save"]["first"]] == list(range(KEPT))
    assert [event["step"] for event in data["save"]["last"]] == list(range(10_000 - KEPT, 10_000))
    assert data["save"]["first"][0]["where"].endswith(
        "in test_the_timeline_keeps_the_first_and_the_last_events_of_each_kind"
    )
    assert len(json.dumps(data)) < 20_000


def test_without_an_audit_there_is_a_report():
    code = (
        "import json; from megapatch.audit import report; print(json.dumps(report().to_dict())); print(report())"
    )
    data, text, *_ = run("-c", code).stdout.splitlines()
    report = json.loads(data)
    assert (report["settings"], report["steps"], report["ended"]) == (None, 0, True)
    assert {rule["status"] for rule in report["rules"]} == {"not watched"}
    assert text == "nothing found in 0 optimizer steps on rank 0"


def test_its_digest_is_that_of_the_patches_though_it_loads_no_family_that_is_not_installed():
    code = (
        "import importlib.util, sys, megapatch\n"
        "print(megapatch.audit.report().digest)\n"
        "found = 'megapatch.patches.areal' in sys.modules\n"
        "print(found == (importlib.util.find_spec('areal') is not None))\n"
        "print(megapatch.report().digest)\n"
    )
    digest, is_lazy, whole, *_ = run("-c", code).stdout.splitlines()
    assert digest == whole and is_lazy == "True"


def test_what_became_of_the_rules(ranks):
    for (*_, ended), _ in ranks[1]:
        status = {rule["name"]: rule["status"] for rule in ended["rules"]}
        assert list(status) == list(audit.RULES)
        assert status["ranks-agree"] == "broken" and status["reduced-once"] == "kept"
        assert status["weights-synced"] == "not watched"
        assert status["every-chunk-steps"] == "kept"  # whose part replaces nothing
        reasons = {rule["name"]: rule["reason"] for rule in ended["rules"]}
        assert reasons["saved-what-is"] == "no saves of a model"


def test_a_note_that_is_accepted_and_secrets():
    ledger = Ledger(("schedule-once",))
    ledger.report("schedule-once", "twice", "x")
    ledger.report("resumed", "x", "failed: https://me:hunter2@host/ token=hf_0123456789abcdefghij")
    report = make(ledger, None, statuses(ledger, None), ended=False)
    assert {rule.name: rule.status for rule in report.rules}["schedule-once"] == "accepted"
    assert "hunter2" not in json.dumps(report.to_dict()) + str(report)
    assert "0123456789" not in json.dumps(report.to_dict()) + str(report)
