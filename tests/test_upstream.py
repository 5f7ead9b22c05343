"""Commands that ask upstream: how a test ended on all ranks, and what the diagnoses refuse."""

from __future__ import annotations

import json
import os
import subprocess
from types import SimpleNamespace

import pytest
from upstream import __main__ as tests_of_upstream
from upstream import branches


def _write(folder, rank, *lines):
    (folder / f"{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_test_ends_as_on_its_worst_rank(tmp_path):
    well = {"outcome": "passed", "calls": {"zero_tokens": 2}, "why": ""}
    begins = [{"test": name} for name in ("well", "failed", "hangs", "late")]
    _write(tmp_path, 0, *begins, {"test": "well", **well}, {"test": "failed", **well}, {"test": "hangs", **well})
    _write(tmp_path, 1, *begins[:3], {"test": "well", **well}, {"test": "failed", "outcome": "failed", "why": "7"})

    results = tests_of_upstream._results(tmp_path, 2)

    assert results["well"] == ("passed", {"zero_tokens": 4}, "")
    assert {name: (end.outcome, end.why) for name, end in results.items() if name != "well"} == {
        "failed": ("failed", "7"),
        "hangs": ("failed", "did not end"),
        "late": ("failed", "did not end"),
    }


def test_a_test_differs_that_ends_otherwise_or_in_one_way_only():
    passed, failed = map(tests_of_upstream.Ended, ("passed", "failed"))
    without = {"same": passed, "worse": passed, "better": failed, "gone": passed}
    with_megapatch = {"same": passed, "worse": failed, "better": passed, "new": passed}
    assert tests_of_upstream.different(without, with_megapatch) == ["better", "gone", "new", "worse"]


def test_it_counts_the_tests_that_reached_a_patch():
    by_test = {"a": {"zero_tokens": 3, "rerun_state_dict": 1}, "b": {"zero_tokens": 1}, "c": {}}
    ends = {test: tests_of_upstream.Ended("passed", calls) for test, calls in by_test.items()}
    said = tests_of_upstream.reached([ends, ends])
    assert "patch: zero_tokens 4, rerun_state_dict 2." in said
    assert "Not reached: asked_step_loaded, aux_loss" in said


def test_a_test_that_differs_once_of_three_times_does_not_count(tmp_path):
    passed, failed = map(tests_of_upstream.Ended, ("passed", "failed"))

    def run_suite(files, folder, patched):
        once = patched and folder.parent == tmp_path
        return {"f.py::once": failed if once else passed, "f.py::always": failed if patched else passed}

    _, differ = tests_of_upstream.compare(run_suite, ["f.py", "g.py"], tmp_path)
    assert differ == ["f.py::always"]


def test_known_differences_have_a_reason():
    assert tests_of_upstream.expected("# what\na.py::b[c d]  because of it\n") == {"a.py::b[c d]": "because of it"}
    assert all(tests_of_upstream.expected(tests_of_upstream.DIFFERENCES.read_text()).values())


@pytest.fixture
def repository(tmp_path):
    """A clone with a commit on each of five days."""

    def git(*arguments):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, check=True, env={**os.environ, "GIT_COMMITTER_DATE": date})

    date = ""
    git("init", "--quiet", "--initial-branch=main")
    (tmp_path / "megatron").mkdir()
    for number in range(5):
        (tmp_path / "megatron/number").write_text(str(number))
        date = f"2026-01-{number + 1:02}T12:00:00Z"
        git("add", ".")
        git("commit", "--quiet", f"--message=number {number}")
    return branches.Repository(str(tmp_path))


def test_a_refusal_is_printed_and_the_exit_code(repository, monkeypatch, capsys):
    def verdicts_on(project, folder):
        with open(f"{folder}/megatron/number") as file:
            verdict = "unknown" if file.read() == "4" else "needed"
        return {("a.patch", "a.module"): SimpleNamespace(verdict=verdict, reason="as it is")}

    monkeypatch.setattr(branches, "verdicts_on", verdicts_on)
    for name, code in (("2026-01-05", 0), ("main", 1)):
        monkeypatch.setattr("sys.argv", ["branches", repository.path, name])
        assert branches.main() == code
    assert capsys.readouterr().out.endswith("a.patch at a.module: refused on main: as it is\n")


def test_a_repository_is_asked_for_branches_and_dates(repository):
    repository.git("branch", "core_r0.9.0")
    repository.git("branch", "core_r0.19.0")
    assert repository.heads() == ["main", "core_r0.19.0"]
    assert repository.commit("core_r0.9.0") == repository.commit("main")
    assert repository.git("log", "-1", "--format=%s", repository.commit("2026-01-05")) == "number 3"
