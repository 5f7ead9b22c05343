"""Weight syncs with a real engine (`tox -e vllm,sglang`). Without one: its row, and what is asked of one."""

from __future__ import annotations

import copy
import json

import pytest
from rigs.command import run
from rigs.where import needs_megatron

from megapatch._python.finding import find_module
from megapatch._verify.check import CannotRunHere, DefectSeen
from megapatch._verify.checks import weight_sync
from megapatch._verify.checks._syncs import LONG

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
here = {package for package in ENGINES if find_module(package) is not None}


def rows():
    shown = run("verify", "--json", "--processes", "1", "weight-sync-*")
    found = {row["name"]: (row["outcome"], row["text"]) for row in json.loads(shown.stdout)["checks"]}
    return shown.returncode, {package: found[f"weight-sync-{package}"] for package in ENGINES}


@needs_megatron
@pytest.mark.thorough
@pytest.mark.skipif(bool(here), reason="an engine is installed")
def test_without_an_engine_it_cannot_run_and_says_so():
    code, found = rows()
    assert code == 0
    assert found == {package: ("cannot run", f"{name} is not installed") for package, name in ENGINES.items()}


@needs_megatron
@pytest.mark.skipif(not here, reason="no engine is installed")
def test_syncs_of_a_real_engine_go_well():
    code, found = rows()
    assert code == 0
    assert {package: found[package] for package in here} == dict.fromkeys(here, ("right", ""))


@pytest.mark.parametrize("package", ENGINES)
def test_an_engine_that_lacks_what_is_asked_of_it_is_too_old(package, tmp_path, monkeypatch):
    asked = weight_sync.ASKED[package]
    for module in asked:
        (tmp_path / module.replace(".", "/")).mkdir(parents=True)
        (tmp_path / module.replace(".", "/") / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for module, (name, reason) in asked.items():
        if name:
            with pytest.raises(CannotRunHere, match=f"^{reason}$"):
                weight_sync.weight_syncs(package)
            (tmp_path / module.replace(".", "/") / "__init__.py").write_text(name)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("", "no output"),
        ("loading\nKilled", "Killed"),
        ("Traceback\n  File x\nModuleNotFoundError: No module named 'k'\n\n[12:00] ended", "No module named 'k'"),
        ("(EngineCore pid=7) torch.OutOfMemoryError: CUDA out of memory\nstopped", "OutOfMemoryError: CUDA"),
    ],
)
def test_of_an_engine_that_does_not_start_the_error_is_told(output, says):
    assert says in weight_sync._last_error(output)


def sync(mode, fails):
    kept, aborted = [[1] * LONG, "length"], [[1] * 4, "abort"]
    return {
        "mode": mode,
        "fails": fails,
        "raised": "Interrupted" if fails else "",
        "paused": True,
        "at_pause": [4, 4],
        "after_load": [4, 4],
        "in_flight": [kept, kept] if mode == "keep" else [aborted, aborted],
        "answers": [[7], [8]] if fails else [[5], [6]],
    }


WELL = {
    "old": [[1], [2]],
    "new": [[5], [6]],
    "syncs": [sync(mode, fails) for mode in ("abort", "keep") for fails in (True, False)],
}


def test_an_engine_that_works_passes():
    weight_sync.assert_syncs(WELL)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"old": [[1], None]}, "before any sync a request was not answered"),
        ({"old": [[5], [6]]}, "nothing can be seen"),
        ({"syncs": []}, "no sync was made"),
    ],
)
def test_what_is_asked_of_the_engine(fields, says):
    with pytest.raises(DefectSeen, match=says):
        weight_sync.assert_syncs({**WELL, **fields})


@pytest.mark.parametrize(
    ("number", "fields", "says"),
    [
        (0, {"raised": ""}, "raises half way .* raised nothing"),
        (1, {"raised": "EngineDeadError"}, "raised EngineDeadError"),
        (1, {"paused": False}, "generation was not paused"),
        (2, {"at_pause": [4, LONG]}, "requests were not in flight"),
        (2, {"at_pause": [0, 4]}, "requests were not in flight"),
        (2, {"after_load": [4, 5]}, "tokens were made in the pause"),
        (0, {"in_flight": [None, [[1] * 4, "abort"]]}, "1 of 2 requests in flight never ended"),
        (2, {"in_flight": [[[1] * 9, "abort"], [[1] * LONG, "length"]]}, r"ended with \[\(9, 'abort'\)"),
        (0, {"answers": [[7], None]}, "requests after it are not answered"),
        (1, {"answers": [[5], [7]]}, "not those of an engine that started with the new weights"),
        (3, {"answers": [[1], [2]]}, r"mode='keep'\)\): tokens after it are not"),
    ],
)
def test_what_is_asked_of_each_sync(number, fields, says):
    found = copy.deepcopy(WELL)
    found["syncs"][number].update(fields)
    with pytest.raises(DefectSeen, match=says):
        weight_sync.assert_syncs(found)
