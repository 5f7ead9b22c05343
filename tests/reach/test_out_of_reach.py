"""Processes that `megapatch run` cannot reach, as seen from command lines, environments and scripts."""

from __future__ import annotations

import os
import sys

import pytest

from megapatch.reach._run import launch
from megapatch.reach._run.out_of_reach import DROPPED, findings, of_command, of_process, of_ray_job, of_script
from megapatch.reach._run.site.sitecustomize import HERE

KEPT = {"PYTHONPATH": f"/new{os.pathsep}{HERE}"}
REPLACED_PATH = {"PYTHONPATH": "/root/Megatron-LM"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("PYTHONPATH=/root/Megatron-LM torchrun \\", True),
        ('export PYTHONPATH="${MILES_DIR}:${MEGATRON_PATH}"', True),
        ('    \\"PYTHONPATH\\": \\"/root/Megatron-LM/:${SCRIPT_DIR}\\",', True),
        ("""  "PYTHONPATH": "/root/Megatron-LM/",""", True),
        ("unset PYTHONPATH", True),
        ("unset A PYTHONPATH", True),
        ("unset -v 'PYTHONPATH' B", True),
        ("unset A PYTHONPATH_OLD", False),
        ("unset -f PYTHONPATH", False),
        ("export -n PYTHONPATH", True),
        ("declare +x PYTHONPATH", True),
        ("export PYTHONPATH", False),
        ("PYTHONPATH=/new  # not $PYTHONPATH", True),
        ("true # PYTHONPATH=/new, don't", False),
        ("echo a#b; PYTHONPATH=/new python $PYTHONPATH/x.py", True),
        ("PYTHONPATH=/new:$PYTHONPATH_OLD python", True),
        ("PYTHONPATH='$PYTHONPATH:/new' python", True),
        ("PYTHONPATH=$(pwd):$PYTHONPATH python", False),
        ('PYTHONPATH="$(cd "$(dirname "$0")" && pwd)":$PYTHONPATH python', False),
        ("OLD=$PYTHONPATH; export PYTHONPATH=/new:$OLD", False),
        ("if true; then PYTHONPATH=/new python x.py; fi", True),
        ("bash -lc 'cd /x && PYTHONPATH=/new python x.py'", True),
        ("bash -c 'PYTHONPATH=/new:$PYTHONPATH python x.py'", False),
        ("OUT=$(PYTHONPATH=/new python x.py)", True),
        ("eval 'unset PYTHONPATH'", True),
        ("sudo PYTHONPATH=/new python x.py", True),
        ("cat <<EOF\nit's PYTHONPATH\nEOF\nPYTHONPATH=/new python", True),
        ("cat <<'EOF'\nit's\nEOF\nPYTHONPATH=/new:$PYTHONPATH python", False),
        ("python x.py 2>&1 | tee log; PYTHONPATH=/new torchrun", True),
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
    assert bool(list(findings(line, HERE))) is found


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
        ("env -i 'python' train.py", True),
        ("srun env -i python train.py", True),
        ("bash -c 'env -i python train.py'", True),
    ],
)
def test_lines_that_drop_pythonpath(line, found, monkeypatch, tmp_path):
    (tmp_path / "git").write_bytes(b"\x7fELF")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [kind for kind, _ in findings(line)] == [DROPPED] * found
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
        ("env -S python", None),
        ("$PYTHON -I train.py", "-I"),
        ("nohup python3.12 -I train.py", "-I"),
        ("pip install python-tools -I", None),
    ],
)
def test_python_options_that_keep_it_out(command, flag):
    told = of_command(command.split())
    assert [f"with {flag} " in line for line in told] == ([True] if flag else [])
    assert [kind for kind, _ in findings(f"then {command} # -I")] == [flag] * bool(flag)


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (["python", "train.py"], REPLACED_PATH),
        (["/usr/bin/python3", "train.py"], {}),
        ("cd /x && python3 train.py", {}),
        (b"python3 train.py", {}),
        (["bash", "train.sh"], REPLACED_PATH),
        (["bash", "-c", "python train.py"], {}),
        (["./script"], REPLACED_PATH),
        ("PYTHONPATH=/root/Megatron-LM torchrun train.py", KEPT),
        (["env", "PYTHONPATH=/new", "torchrun"], KEPT),
        (["python", "-I", "train.py"], KEPT),
        (["./isolated"], KEPT),
        (["nohup", "python", "train.py"], {}),
        ("exec python -I train.py", KEPT),
        ("unset A PYTHONPATH; python train.py", KEPT),
        (["python", "train.py"], None),
    ],
)
def test_processes_that_are_cut_off(command, environment, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/new")  # what the process has that starts it
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script").write_text("#!/usr/bin/python\n")
    (tmp_path / "isolated").write_text("#!/usr/bin/env -S python3 -I\n")
    (line,) = of_process(command, environment, HERE)
    assert "megapatch is not active" in line


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (["python", "train.py"], KEPT),
        ("PYTHONPATH=/new:$PYTHONPATH python train.py", KEPT),
        (["git", "clone", "python-tools"], {}),
        (["nvidia-smi"], REPLACED_PATH),
        ("git status", REPLACED_PATH),
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


def test_each_message_says_what_to_do():
    (dropped,) = of_script("env -i python train.py", "x.sh")
    assert dropped.startswith(
        "x.sh drops PYTHONPATH (line 1): megapatch is not active there. Pass on PYTHONPATH and"
    )
    assert "Keep the old value" not in dropped
    replaced, flag = of_script("true\nPYTHONPATH=/new python\n\n  python -I x.py\npython3 -I y.py", "x.sh")
    assert replaced.startswith("x.sh sets PYTHONPATH without $PYTHONPATH in it (line 2): ")
    assert flag == (
        "x.sh starts a Python (line 4, 5): with -I Python ignores PYTHONPATH or sitecustomize, so megapatch is "
        "not active there. Drop the option."
    )
    for command in (["env", "-i", "python", "train.py"], ["bash", "-c", "env -i python train.py"]):
        (line,) = launch.warnings(command)
        assert line.startswith("the command drops PYTHONPATH (line 1): ")


def test_no_word_is_cut_in_two():
    token = "--api-key=" + "s" * 40
    (line,) = of_process(["python", "x" * 60, token, "y"], REPLACED_PATH, HERE)
    assert f"`python {'x' * 60} ...`" in line


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
