"""Under -O Megatron's assertions are gone and what they caught is silent: patches have to see and repair that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.command import run
from rigs.megatron.grad_ready import needs_learning

TESTS = Path(__file__).parents[2]
pytestmark = [pytest.mark.thorough, pytest.mark.nightly]  # Python keeps no compiled files for -O here: slow


def test_no_patch_is_refused():
    """With assertions none is either: test_verdicts.py has the verdicts."""
    shown = json.loads(run("doctor", "--json", MEGAPATCH_ONLY="megatron.*", PYTHONOPTIMIZE="1").stdout)
    sites = {
        (patch["name"], site["module"]): (site["status"], site["reason"])
        for patch in shown["patches"]
        for site in patch["sites"]
        if site["status"] in ("refused", "failed")
    }
    assert sites == {}
    assert "applied" in [patch["status"] for patch in shown["patches"]]


@needs_learning
def test_what_was_an_assertion_is_repaired():
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    shown = subprocess.run(
        [sys.executable, "-O", "-m", "rigs.megatron.without_assertions"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout.splitlines()[-1])
    assert found["assertions"] is False
    assert found["repaired"] == pytest.approx(found["expected"], rel=1e-5)
    assert found["defect"][1] != pytest.approx(found["expected"][1], rel=1e-2)  # reduced before its last pass
    assert (found["hooks, defect"], found["hooks, repaired"]) == (2, 1)
