"""What `megapatch run` cannot reach, as seen from command lines, environments and scripts."""

from __future__ import annotations

import os
import sys

import pytest

from megapatch.reach._run import launch
from megapatch.reach._run.out_of_reach import drops, of_flags, of_process, of_ray_job, of_script, replaces
from megapatch.reach._run.site.sitecustomize import HERE

KEPT = {"PYTHONPATH": f"/new{os.pathsep}{HERE}"}
REPLACED = {"PYTHONPATH": "/root/Megatron-LM"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("PYTHONPATH=/root/Megatron-LM torchrun \\", True),
        ('export PYTHONPATH="${MILES_DIR}:${MEGATRON_PATH}"', True),
        ('    \\"PYTHONPATH\\": \\"/root/Megatron-LM/:${SCRIPT_DIR}\\",', True),
        ("""  "PYTHONPATH": "/root/Megatron-LM/",""", True),
        ("unset PYTHONPATH", True),
        ("env -u X PYTHONPATH= python", True),
        ("A=$PYTHONPATH PYTHONPATH=/new python", True),
        ("PYTHONPATH=/new:$PYTHONPATH python", False),
        ('export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"', False),
        ('\\"PYTHONPATH\\": \\"/new:${PYTHONPATH}\\"', False),
        ("PYTHONPATH+=:/new", False),
        ("MY_PYTHONPATH=/new", False),
        ('if [ "$PYTHONPATH" = "" ]', False),
        (": ${PYTHONPATH:=/new}", False),
        ("echo PYTHONPATH", False),
        (f"PYTHONPATH=/new:{HERE} python", False),
    ],
)
def test_lines_that_replace_pythonpath(line, found):
    assert replaces(line, HERE) is found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("env -i python train.py", True),
        ("env -u PYTHONPATH python3 train.py", True),
        ("exec /usr/bin/env -uPYTHONPATH A=1 bash train.sh", True),
        ("env --unset=PYTHONPATH $PYTHON train.py", True),
        ("env - PATH=$PATH python train.py", True),
        ("env -i git status", False),
        ("env -u X python train.py", False),
        ("env A=1 python train.py", False),
        ('env -i PYTHONPATH="$PYTHONPATH" python train.py', False),
        ("python train.py -i", False),
    ],
)
def test_lines_that_drop_pythonpath(line, found, monkeypatch, tmp_path):
    (tmp_path / "git").write_bytes(b"\x7fELF")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert drops(line) is found
    assert bool(of_process(line, KEPT, HERE)) is found
    assert bool(of_script(line, "run.sh")) is found


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("python -I train.py", "-I"),
        ("/opt/bin/python3.11 -uIE -m train", "-uIE"),
        ("numactl -N 0 python3 -X dev -W ignore -S train.py", "-S"),
        ("python -Xdev --check-hash-based-pycs always -E -", "-E"),
        ("python train.py -I", None),
        ("python -m train -E", None),
        ("python -uc -I", None),
        ("python -WI -XS -X E train.py", None),
        ("python - -I", None),
        ("torchrun -S train.py", None),
    ],
)
def test_python_options_that_keep_it_out(command, flag):
    told = of_flags(command.split())
    assert [f"with {flag} " in line for line in told] == ([True] if flag else [])


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (["python", "train.py"], REPLACED),
        (["/usr/bin/python3", "train.py"], {}),
        ("cd /x && python3 train.py", {}),
        (b"python3 train.py", {}),
        (["bash", "train.sh"], REPLACED),
        (["bash", "-c", "python train.py"], {}),
        (["./script"], REPLACED),
        ("PYTHONPATH=/root/Megatron-LM torchrun train.py", KEPT),
        (["env", "PYTHONPATH=/new", "torchrun"], KEPT),
        (["python", "-I", "train.py"], KEPT),
        (["python", "train.py"], None),
    ],
)
def test_processes_that_are_cut_off(command, environment, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/new")  # what the process has that starts it
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script").write_text("#!/usr/bin/python\n")
    (line,) = of_process(command, environment, HERE)
    assert "megapatch is not active" in line


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (["python", "train.py"], KEPT),
        ("PYTHONPATH=/new:$PYTHONPATH python train.py", KEPT),
        (["git", "clone", "python-tools"], {}),
        (["nvidia-smi"], REPLACED),
        ("git status", REPLACED),
        (["bash", "-c", "nvidia-smi"], {}),
        ([sys.executable, "train.py", "-I"], KEPT),
        (iter(["python"]), {}),
        (["python", "train.py"], None),
    ],
)
def test_processes_that_are_not(command, environment, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", HERE)
    assert of_process(command, environment, HERE) == []


def test_ray_jobs():
    submit = ["python", "/usr/bin/ray", "job", "submit"]
    (line,) = of_ray_job([*submit, "--", "python", "train.py"], HERE)
    assert "the cluster starts it, not this command. Give its runtime env" in line
    (line,) = of_ray_job([*submit, '--runtime-env-json={"env_vars": {"PYTHONPATH": "/root/Megatron-LM/"}}'], HERE)
    assert "its runtime env replaces PYTHONPATH" in line
    for taken_care_of in (
        '{"worker_process_setup_hook": "a.b"}',
        "--custom-megatron-init-path megapatch.activate",
    ):
        assert of_ray_job([*submit, taken_care_of], HERE) == []
    assert of_ray_job(["python", "job", "submit"], HERE) == of_ray_job(["ray", "submit"], HERE) == []


SCRIPT = """#!/bin/bash
# PYTHONPATH=/root/Megatron-LM in a comment
RUNTIME_ENV_JSON="{
  \\"env_vars\\": {
    \\"PYTHONPATH\\": \\"/root/Megatron-LM/\\"
  }
}"
PYTHONPATH=/root/Megatron-LM torchrun convert.py
ray job submit --runtime-env-json="${RUNTIME_ENV_JSON}" -- python3 train.py
"""


def test_scripts(tmp_path, monkeypatch):
    script = tmp_path / "train it.sh"
    script.write_text(SCRIPT)
    told = of_script(SCRIPT, str(script))
    assert len(told) == 1 and told[0].startswith(
        f"{script} sets PYTHONPATH without $PYTHONPATH in it (line 5, 8): "
    )
    assert "A Ray job: give its runtime env " in told[0]
    assert launch.warnings(["bash", "-ex", str(script), "-c"]) == told
    assert launch.warnings(["nohup", "/bin/sh", str(script)]) == told
    assert launch.warnings([str(script)]) == []  # cannot be executed
    script.chmod(0o755)
    assert launch.warnings([str(script)]) == told
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.warnings(["train it.sh"]) == told
    for first in ("#!/usr/bin/env python", "not by bash"):
        script.write_text(SCRIPT.replace("#!/bin/bash", first))
        assert launch.warnings(["train it.sh"]) == []
    assert launch.warnings(["bash", "-c", "true\nPYTHONPATH=/new python train.py"])[0].startswith(
        "the command sets PYTHONPATH without $PYTHONPATH in it (line 2): megapatch is not active there."
    )
    assert (
        launch.warnings(["bash", str(tmp_path / "absent.sh")]) == launch.warnings(["torchrun", "train.py"]) == []
    )
    assert launch.warnings(["python", "-I", "train.py"]) != []
