"""doctor --probe, interrupted: no child is left, and it does not wait for them. And what it takes for SECONDS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from rigs.command import heed_ctrl_c, run

from megapatch._cli.main import make_parser

HANGS = """
import os, pathlib, time
pathlib.Path({folder!r}, str(os.getpid())).touch()
time.sleep(600)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_interrupted_it_ends_its_children_and_itself(fake_megatron, tmp_path, number, code):
    folder = tmp_path / "children"
    folder.mkdir()
    path = fake_megatron(HANGS.format(folder=str(folder)))
    search = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    doctor = subprocess.Popen(
        [sys.executable, "-m", "megapatch", "doctor", "--probe", "500"],
        env={**os.environ, "PYTHONPATH": search},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=heed_ctrl_c,
    )
    while not (children := list(folder.iterdir())):
        assert doctor.poll() is None
        time.sleep(0.05)  # until another process has started
    begin = time.monotonic()
    doctor.send_signal(number)  # to it alone, as `kill` does
    assert doctor.wait(60) == code
    assert time.monotonic() - begin < 30  # a child would sleep for minutes
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(int(child.name), 0)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "1e300"])
def test_a_time_limit_that_is_none(seconds, capsys):
    with pytest.raises(SystemExit, match="2"):
        make_parser().parse_args(["doctor", f"--probe={seconds}"])
    shown = capsys.readouterr()
    assert "--probe: invalid" in shown.err and shown.out == ""


def test_a_finder_that_raises_for_an_unknown_name_fails_no_report():
    script = """
import sys, megapatch
class Picky:
    def find_spec(self, name, path=None, target=None):
        if name in ("megatron", "nemo_rl", "skyrl", "slime"):
            raise KeyError(name)
sys.meta_path.append(Picky())
assert str(megapatch.report())
"""
    shown = run("-c", script)
    assert (shown.returncode, shown.stderr) == (0, "")
