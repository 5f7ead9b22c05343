"""megapatch demo, as a user runs it, on the megatron-core that is installed."""

from __future__ import annotations

import re

import pytest
from rigs.command import run

from megapatch._versions import find_module

HAS_CORE = find_module("megatron.core") is not None
HAS_TRAIN = find_module("megatron.training") is not None
needs_megatron = pytest.mark.skipif(not HAS_CORE, reason="megatron-core is not installed")


@needs_megatron
def test_the_repaired_run_equals_the_plain_one():
    shown = run("demo")
    assert (shown.returncode, shown.stderr) == (0, "")
    failures = (
        ["config.no_sync_func must be None", "AssertionError: timer has already been started", "KeyError"]
        if HAS_TRAIN
        else ["KeyError", "needs\nmegatron-core 0.17 or later"]
    )
    for text in failures:
        assert text in shown.stdout
    rows = re.findall(r"^  (with megapatch|no overlap) +([\d. ]+)$", shown.stdout, re.MULTILINE)
    assert [title for title, _ in rows] == ["with megapatch", "no overlap"]
    assert len(rows[0][1].split()) == len(rows[1][1].split()) == 6
    assert "the same run" in shown.stdout


@needs_megatron
@pytest.mark.thorough
def test_it_fails_when_nothing_is_repaired():
    shown = run("demo", MEGAPATCH_DISABLE="megatron.forward-pre-hook")
    assert shown.returncode == 1
    assert "KeyError" in shown.stderr


@needs_megatron
def test_runs_that_differ_are_not_the_same(capsys):
    import torch

    from megapatch._cli.demo import Outcome, _compare

    def run_with(value):
        return Outcome(parameters={"weight": torch.tensor([1.0, value])})

    assert _compare(Outcome(), run_with(2.0), run_with(2.000001), "")
    assert not _compare(Outcome(), run_with(2.0), run_with(2.0001), "")
    assert "1.0e-04: NOT the same run" in capsys.readouterr().out


def test_without_torch_it_says_what_to_install():
    script = (
        "import sys, megapatch._cli.demo as demo\n"
        "demo.find_module = lambda name: None if name == 'torch' else object()\n"
        "sys.exit(demo.main())"
    )
    shown = run("-c", script)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == 'the demo needs torch: pip install "megapatch[demo]"\n'


def test_with_a_megatron_that_is_too_old_it_says_what_it_needs(fake_megatron):
    path = fake_megatron("")
    (path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 11\nPATCH = 0\n")
    script = (
        "import sys, megapatch._cli.demo as demo; demo.find_module = lambda name: object(); sys.exit(demo.main())"
    )
    shown = run("-c", script, path=path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == "the demo needs megatron-core 0.12 or later; this is 0.11.0 (source)\n"


@pytest.mark.skipif(HAS_CORE, reason="megatron-core is installed")
def test_where_torch_is_really_missing():
    shown = run("demo")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "megatron-core: pip install" in shown.stderr
