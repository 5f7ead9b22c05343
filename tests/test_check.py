"""megapatch.check() in ranks, and megapatch doctor on what they wrote: all alike, or who differs in what."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
import time

import pytest
from rigs.command import run
from rigs.engine import TARGET, make_engine, make_patch
from rigs.where import needs_megatron

import megapatch
from megapatch import _ranks
from megapatch._engine.record import Off
from megapatch._reporting import check as module
from megapatch._reporting.check import compare_files
from megapatch._reporting.report import PatchReport, Report, SiteReport, make_report
from megapatch._versions import exact_version
from megapatch.patch import ABSENT, PatchInfo, Status, Verdict

DDP = "megatron.core.distributed.distributed_data_parallel"


def checking(rank, world_size, differing=None):
    import importlib
    import os

    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)  # what a launcher says
    importlib.import_module(DDP)
    megapatch.apply()
    if rank == differing:
        megapatch.restore("megatron.nested-no-sync")
    before, sys.stderr = sys.stderr, io.StringIO()
    try:
        megapatch.check("any", argument=True)
        megapatch.check()  # as hooks are called: again and again
        return sys.stderr.getvalue()
    finally:
        sys.stderr = before


@needs_megatron
def test_ranks_write_what_they_found_and_rank_0_says_it(tmp_path):
    from megapatch.testing import run_ranks

    alike, not_alike = tmp_path / "alike", tmp_path / "not alike"
    said = run_ranks(checking, 2, env={"MEGAPATCH_REPORT": str(alike)})
    assert said[1] == "" and len(said[0].splitlines()) == 1
    assert said[0].startswith(f"megapatch {exact_version()}, digest ")
    assert " patches applied" in said[0] and said[0].endswith("; alike on 2 ranks\n")
    shown = run("doctor", str(alike))
    assert (shown.returncode, shown.stderr) == (0, "")
    # The folder's path stands in a line of its own if it is long.
    assert " ".join(shown.stdout.split()).startswith(f"2 ranks in {alike} ")
    assert shown.stdout.endswith("\nall ranks are alike, and every patch that they need is in place\n")

    said = run_ranks(checking, 2, 1, env={"MEGAPATCH_REPORT": str(not_alike)})
    expected = f"megatron.nested-no-sync at {DDP} is applied"
    assert f"; NOT ALIKE on 2 ranks: {expected}" in said[0] and "disabled on rank 1" in said[0]
    shown = run("doctor", "--json", str(not_alike))
    assert shown.returncode == 1
    (sentence,) = json.loads(shown.stdout)["differing"]
    assert sentence.startswith(expected) and "disabled on rank 1" in sentence


def checking_on_one_of_two(rank, world_size):
    from datetime import timedelta

    from megapatch._reporting import agreement

    agreement._PATIENCE = timedelta(seconds=0.5)
    if rank == 0:
        with pytest.raises(megapatch.InconsistentError, match=r"rank 1 did not come within 0\.5 seconds"):
            megapatch.check()


@needs_megatron
def test_a_rank_that_does_not_call_it_is_named_and_the_others_leave_their_files(tmp_path):
    from megapatch.testing import run_ranks

    run_ranks(checking_on_one_of_two, 2, env={"MEGAPATCH_REPORT": str(tmp_path)})
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.json"]


def checking_strictly(rank, world_size):
    with pytest.raises(megapatch.InconsistentError, match="megapatch is not the same on all ranks"):
        checking(rank, world_size, 1)


@needs_megatron
def test_strict_is_an_error_on_each_rank():
    from megapatch.testing import run_ranks

    run_ranks(checking_strictly, 2, env={"MEGAPATCH_STRICT": "1"})


def test_without_ranks_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(module, "_done", [])
    monkeypatch.setattr(module, "place", lambda: (0, 8, False))
    for _ in range(2):  # not done until torch.distributed is there
        megapatch.check()
        assert capsys.readouterr().err.endswith(
            "ranks are not compared, as torch.distributed is not initialized\n"
        )
    monkeypatch.setattr(module, "place", lambda: (3, 8, False))
    megapatch.check()
    assert capsys.readouterr().err == ""


def write(folder, rank, size, patches=(), attempt=0, **facts):
    data = {
        "rank": rank,
        "size": size,
        "began": attempt,
        "facts": {name: [value, ""] for name, value in facts.items()},
    }
    (folder / f"rank-{rank:05}{f'-{attempt}' * (attempt > 0)}.json").write_text(
        json.dumps({**data, "report": {"digest": "d", "patches": patches}})
    )


def test_a_thousand_ranks(tmp_path):
    for rank in range(1000):
        write(tmp_path, rank, 1000, **{f"p{number} at m": "applied" for number in range(60)}, torch="2.13.0")
    assert compare_files(tmp_path) == ([f"1000 ranks in {tmp_path}", "digest d on ranks 0-999"], [], [], [])
    for rank in (3, 4, 5, 700):
        write(tmp_path, rank, 1000, torch="2.6.0")
    write(tmp_path, 9, 1000, **{"p7 at m": "refused"}, torch="2.13.0")
    assert compare_files(tmp_path).differing == [
        "p7 at m is applied on ranks 0-2, 6-8, 10-699, 701-999; refused on rank 9",
        "torch is 2.13.0 on ranks 0-2, 6-699, 701-999; 2.6.0 on ranks 3-5, 700",
    ]


def test_the_files_of_an_earlier_run_are_not_taken_for_this_ones(tmp_path):
    for rank, size in ((0, 4), (1, 2)):
        write(tmp_path, rank, size, torch="2.13.0")
    compared = compare_files(tmp_path)
    assert compared.differing == ["number of ranks is 4 on rank 0; 2 on rank 1"]
    assert compared.unreadable == [f"ranks 2-3 left no file in {tmp_path}"]


def test_what_is_missing_or_cannot_be_read_is_not_alike(tmp_path):
    write(tmp_path, 0, 4)
    write(tmp_path, 2, 4)
    (tmp_path / "rank-00001.json").write_text("{")
    shown = run("doctor", str(tmp_path))
    assert shown.returncode == 2 and "alike" not in shown.stdout
    assert "rank-00001.json cannot be read: JSONDecodeError" in shown.stderr
    assert f"ranks 1, 3 left no file in {tmp_path}" in shown.stderr
    (tmp_path / "empty").mkdir()
    shown = run("doctor", str(tmp_path / "empty"))
    assert (shown.returncode, shown.stderr.count("holds no rank-*.json")) == (2, 1)
    assert "megapatch audit" not in shown.stderr
    (tmp_path / "empty" / "audit-00000.json").touch()
    shown = run("doctor", str(tmp_path / "empty"))
    assert (shown.returncode, shown.stderr.count(f"megapatch audit {tmp_path / 'empty'}")) == (2, 1)


def test_an_earlier_run_does_not_speak_for_a_rank_that_died(tmp_path):
    for rank in range(2):
        write(tmp_path, rank, 2)
    write(tmp_path, 1, 2, attempt=1)
    shown = run("doctor", str(tmp_path))
    assert shown.returncode == 2 and "alike" not in shown.stdout
    assert f"attempt 2 of 2: rank 0 left no file in {tmp_path}" in shown.stderr and "attempt 1" not in shown.stderr
    write(tmp_path, 0, 2, attempt=1, torch="2.6.0")
    shown = run("doctor", "--json", str(tmp_path))
    found = json.loads(shown.stdout)
    assert shown.returncode == 0 and found["differing"] == found["unreadable"] == []
    assert f"attempt 2 of 2, 1970-01-01 00:00:01 UTC: 2 ranks in {tmp_path}" in found["common"]


def test_a_process_writes_over_its_own_file_alone(tmp_path, monkeypatch):
    for pid in (7, 7, 8):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(pid))
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        module.write_file(tmp_path, make_report([]), 0, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000-1.json", "rank-00000.json"]
    attempts = [sentence[:14] for sentence in compare_files(tmp_path).common[::2]]
    assert attempts == ["attempt 1 of 2", "attempt 2 of 2"]


PATCH = {"name": "a.patch", "status": "failed", "reason": "so"}
REPORT = {"digest": "d", "patches": []}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"size": float("inf")}, "Infinity is not a number"),
        ({"size": 10**12}, "expected a rank of at most 1048576, found rank 1 of 1000000000000"),
        ({"size": True}, "found rank 1 of True"),
        ({"rank": 2}, "found rank 2 of 2"),
        ({"rank": -1}, "found rank -1 of 2"),
        ({"rank": 1.0}, "found rank 1.0 of 2"),
        ({"size": "9" * 1000}, "found rank 1 of 999"),
        ({"rank": {"x": 1}}, "expected a rank"),
        ({"facts": {"torch": ["", {"x": 1}]}}, "expected text, found dict"),
        ({"facts": []}, "expected an object, found list"),
        ({"began": 2**34}, "expected a time in seconds since 1970"),
        ({"began": -1}, "expected a time in seconds since 1970"),
        ({"report": REPORT | {"digest": ["d"]}}, "expected text, found list"),
        ({"report": REPORT | {"patches": [PATCH | {"status": "new"}]}}, "'new' is not a valid Status"),
        ({"report": REPORT | {"patches": [PATCH | {"name": None}]}}, "expected text, found NoneType"),
        (None, "it is not a regular file"),
    ],
)
def test_a_file_of_another_form_is_one_line(tmp_path, fields, says):
    write(tmp_path, 0, 2)
    path = tmp_path / "rank-00001.json"
    if fields is None:
        os.mkfifo(path)
    else:
        path.write_text(json.dumps({"rank": 1, "size": 2, "facts": {}, "report": REPORT} | fields))
    started = time.monotonic()
    sentence, missing = compare_files(tmp_path).unreadable
    assert sentence.startswith(f"{path} cannot be read: ") and says in sentence and len(sentence) < 600
    assert missing == f"rank 1 left no file in {tmp_path}" and time.monotonic() - started < 5


def test_a_patch_that_is_in_place_on_no_rank_is_not_well(tmp_path):
    patch = {"name": "a.patch", "reason": "module m replaced it"}
    for rank, status in enumerate(("overwritten", "overwritten", "applied", "refused")):
        write(tmp_path, rank, 4, patches=[patch | {"status": status}])
    shown = run("doctor", str(tmp_path))
    assert shown.returncode == 1 and "alike" not in shown.stdout
    assert "\na.patch is overwritten (module m replaced it) on ranks 0-1\n" in shown.stdout
    assert "\na.patch is refused (module m replaced it) on rank 3\n" in shown.stdout


def test_where_no_patch_is_applied_yet_it_says_when_to_call_it(monkeypatch, capsys):
    monkeypatch.setattr(module, "_done", [])
    monkeypatch.setattr(module, "make_report", lambda records: make_report([]))
    megapatch.check()
    assert ": no patch applied as yet: call check() when Megatron has been imported" in capsys.readouterr().err


def test_where_it_is_not_too_early_it_does_not_say_so(monkeypatch, capsys, modules):
    """All are off, as in a second copy of megapatch; or none is needed by the code that was loaded."""
    name = modules.write(TARGET)
    for why, said in ((Off.SECOND_COPY, ": another copy of megapatch is active in this process\n"), (None, "\n")):
        engine = make_engine(make_patch(name, diagnose=lambda _: Verdict(ABSENT, "it has no such feature")))
        for record in engine.records if why else ():
            record.stay_away(why)
        importlib.import_module(name)
        engine.activate()
        monkeypatch.setattr(module, "_done", [])
        monkeypatch.setattr(module, "make_report", lambda _, engine=engine: make_report(engine.records))
        megapatch.check()
        assert capsys.readouterr().err.endswith(f": no patch applied{said}")


def test_a_folder_that_cannot_be_written_to_does_not_stop_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "_done", [])
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGAPATCH_REPORT", str(tmp_path / "file"))
    megapatch.check()
    assert f"MEGAPATCH_REPORT={tmp_path / 'file'}: rank 0 cannot write there: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "size"),
    [
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ],
)
def test_each_launchers_rank_and_number_of_ranks_are_known(monkeypatch, rank, size):
    for name in (*_ranks.RANKS, *_ranks._SIZES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.setenv(rank, "3")
    monkeypatch.setenv(size, "8")
    assert _ranks.place() == (3, 8, False)


def test_only_if_all_are_off_that_is_why_none_is_applied():
    off = SiteReport("m", Status.DISABLED, "switched off", None, (), (), (), (), None)
    waiting = off._replace(status=Status.PENDING, reason="not imported yet")
    elsewhere = off._replace(status=Status.NOT_INSTALLED, reason="there is no such module to import")
    for sites, said in (
        *[((off,), ": switched off"), ((off, elsewhere), ": switched off")],
        *[((off, waiting), " as yet: call check() when"), ((off, off._replace(status=Status.MISSED)), ", NOT in")],
    ):
        report = Report((PatchReport(PatchInfo("acme.x", "x", None, ("m",)), sites),), {})
        assert f": no patch applied{said}" in module._line(report)


def test_sites_of_the_audit_are_not_counted_as_patches():
    site = SiteReport("m", Status.APPLIED, "it watches", "needed", (), (), (), (), None)
    for status, said in ((Status.APPLIED, " as yet"), (Status.REFUSED, ", NOT in place: audit.x")):
        watching = PatchReport(PatchInfo("audit.x", "x", None, ("m",)), (site._replace(status=status),))
        assert f": no patch applied{said}" in module._line(Report((watching,), {}))
