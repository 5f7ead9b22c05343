"""Commands that ask upstream: how a test ended on all ranks, and since when a diagnosis refuses."""

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
def repository(tmp_path, monkeypatch):
    """A clone with 21 commits, of which a diagnosis refuses those that have a number of at least 13."""

    def git(*arguments):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, check=True, env={**os.environ, "GIT_COMMITTER_DATE": date})

    date = ""
    git("init", "--quiet", "--initial-branch=main")
    (tmp_path / "megatron").mkdir()
    for number in range(21):
        (tmp_path / "megatron/number").write_text(str(number))
        date = f"2026-01-{number + 1:02}T12:00:00Z"
        git("add", ".")
        git("commit", "--quiet", f"--message=number {number}")

    def verdicts_on(project, folder):
        with open(f"{folder}/megatron/number") as file:
            return {
                ("patch", "module"): SimpleNamespace(verdict="unknown" if int(file.read()) >= 13 else "needed")
            }

    monkeypatch.setattr(branches, "verdicts_on", verdicts_on)
    return branches.Repository(str(tmp_path))


def test_the_first_commit_that_is_refused_is_found_by_a_few_looks(repository):
    first = repository.first_refused(("patch", "module"), repository.commit("main"))
    assert repository.git("log", "-1", "--format=%s", first) == "number 13"
    assert len(repository.looked) < 8


def test_a_refusal_without_a_beginning_is_said_so(repository, monkeypatch):
    monkeypatch.setattr(branches, "HISTORY", 4)
    assert repository.first_refused(("patch", "module"), repository.commit("main")) is None


def test_a_repository_is_asked_for_branches_and_dates(repository):
    repository.git("branch", "core_r0.9.0")
    repository.git("branch", "core_r0.19.0")
    assert repository.heads() == ["main", "core_r0.19.0"]
    assert repository.commit("core_r0.9.0") == repository.commit("main")
    assert repository.git("log", "-1", "--format=%s", repository.commit("2026-01-05")) == "number 3"
