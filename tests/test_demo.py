"""megapatch demo, as a user runs it, on the megatron-core that is installed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rigs.command import heed_ctrl_c, run
from rigs.where import needs_megatron

from megapatch._cli import demo
from megapatch._python.finding import find_module

README = Path(__file__).parent.parent / "README.md"
HAS_CORE = find_module("megatron.core") is not None
HAS_TRAIN = find_module("megatron.training") is not None


@needs_megatron
def test_the_repaired_run_equals_the_plain_one():
    shown = run("demo")
    assert (shown.returncode, shown.stderr) == (0, "")
    failures = (
        ["config.no_sync_func must be None", "AssertionError: timer has already been started", "KeyError"]
        if HAS_TRAIN
        else ["KeyError", "needs megatron-core 0.17 or later"]
    )
    for text in failures:
        assert text in " ".join(shown.stdout.split())
    rows = re.findall(r"^  (with megapatch|no overlap) +([\d. ]+)$", shown.stdout, re.MULTILINE)
    assert [title for title, _ in rows] == ["with megapatch", "no overlap"]
    assert len(rows[0][1].split()) == len(rows[1][1].split()) == 6
    assert "the same run" in shown.stdout
    assert "megatron.forward-pre-hook: Forward pre-hooks can be" in shown.stdout
    assert ("megatron.train-reentry: megatron.training" in shown.stdout) == HAS_TRAIN
    assert "NOT APPLIED" not in shown.stdout
    assert "10 to 60 s" in shown.stdout.partition("  running")[0]
    assert max(map(len, shown.stdout.splitlines())) <= 80
    if HAS_TRAIN:  # otherwise the README shows another story
        block = README.read_text().partition("```text\nwithout megapatch\n")[2].partition("```")[0]
        words = [line for line in block.splitlines() if not re.search(r"\d\.\d|^  \.\.\.$", line)]
        assert len(words) > 10
        assert [line for line in words if line not in shown.stdout.splitlines()] == []


@pytest.fixture
def repaired_with(monkeypatch, capfd):
    """Return a function that runs the demo with other settings of its repaired run: exit code, output, errors.

    In this process, whose ranks have a server already; the test above runs it as a user does.
    """

    def run_demo(**settings):
        monkeypatch.setattr(demo, "REPAIRED", {**demo.REPAIRED, **settings})
        code = demo.demo()
        return code, *capfd.readouterr()

    for name in [name for name in os.environ if name.startswith("MEGAPATCH_")]:
        monkeypatch.delenv(name)
    return run_demo


@needs_megatron
@pytest.mark.thorough
@pytest.mark.nightly
@pytest.mark.parametrize("lacking", (demo.TRAIN if HAS_TRAIN else demo.HOOKS).repaired_by)
def test_it_fails_without_any_of_the_patches_that_it_names(lacking, repaired_with):
    code, _, errors = repaired_with(MEGAPATCH_DISABLE=lacking)
    assert code == 1
    assert "KeyError" in errors or "AssertionError" in errors


@needs_megatron
@pytest.mark.thorough
def test_the_patches_that_it_names_are_enough_and_settings_of_the_shell_are_ignored(repaired_with, monkeypatch):
    names = (demo.TRAIN if HAS_TRAIN else demo.HOOKS).repaired_by
    monkeypatch.setenv("MEGAPATCH_ONLY", "slime.*")
    code, shown, errors = repaired_with(MEGAPATCH_ONLY=",".join(names))
    assert (code, errors) == (0, "")
    assert "MEGAPATCH_ONLY=slime.* is set. The demo ignores it" in " ".join(shown.split())
    assert "applied as well" not in shown


@needs_megatron
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ctrl_c_is_one_line_and_leaves_no_process():
    marker = f"MEGAPATCH_TEST_{os.getpid()}_{time.monotonic_ns()}"
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MEGAPATCH_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "megapatch", "demo"],
        env={**environment, "DEMO_MARKER": marker},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    shown = ""
    while "running" not in shown:
        shown += process.stdout.read(1)
    assert until(lambda: importing_torch(marker))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of the group
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert until(lambda: not processes_with(marker)), processes_with(marker)


def until(holds, seconds=60):
    """Wait until this holds; return whether it did in time."""
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def processes_with(marker):
    """By folder, the command lines of processes that have this text in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (folder / "environ").read_bytes():
                found[folder] = (folder / "cmdline").read_bytes()
    return found


def importing_torch(marker):
    """Whether the ranks' server imports torch: Ctrl-C must not make it print a traceback."""
    servers = [folder for folder, command in processes_with(marker).items() if b"forkserver" in command]
    with contextlib.suppress(OSError):
        return any(b"/torch/" in (folder / "maps").read_bytes() for folder in servers)
    return False


@needs_megatron
def test_runs_that_differ_are_not_the_same(capsys):
    import torch

    from megapatch._cli.demo import Outcome

    def run_with(value):
        return Outcome(parameters={"weight": torch.tensor([1.0, value])})

    assert demo._compare(Outcome(), run_with(2.0), run_with(2.000001))
    assert not demo._compare(Outcome(), run_with(2.0), run_with(2.0001))
    assert "1.0e-04: NOT the same run" in capsys.readouterr().out


def test_without_torch_it_says_what_to_install():
    script = (
        "import sys, megapatch._cli.demo as demo, megapatch._verify.world as world\n"
        "world.find_module = lambda name: None if name == 'torch' else object()\n"
        "sys.exit(demo.demo())"
    )
    shown = run("-c", script)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == f"the demo needs torch: pip install {demo.requirement('demo')}\n"


def test_with_a_megatron_that_is_too_old_it_says_what_it_needs(fake_megatron):
    path = fake_megatron("")
    (path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 11\nPATCH = 0\n")
    script = (
        "import sys, megapatch._cli.demo as demo, megapatch._verify.world as world; "
        "world.find_module = lambda name: object(); sys.exit(demo.demo())"
    )
    shown = run("-c", script, path=path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == "the demo needs megatron-core 0.12 or later; this is 0.11.0 (source)\n"


@pytest.mark.skipif(HAS_CORE, reason="megatron-core is installed")
def test_where_torch_is_really_missing():
    shown = run("demo")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "megatron-core: pip install" in shown.stderr
