"""`megapatch run`: what it starts, and how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from rigs.run import environment, run, start
from rigs.where import needs_megatron

from megapatch.reach import _run
from megapatch.reach._run.site.sitecustomize import HERE, TARGETS


def test_every_kind_of_child_and_no_process_without_a_target(project, copied):
    env = environment(copied, project)
    shown = run(sys.executable, project / "children.py", env=env, cwd=project)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == [
        *(f"{how} hello you!" for how in ("spawn", "forkserver", "program.py", "-m", "-c")),
        "[]",
    ]
    assert start(sys.executable, project / "program.py", env=env).stdout == "hello you\n"


PROCESS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"interrupted\\n"))  # in the middle of a print, too
print(os.getpid(), sys.argv[1:], sys.stdin.readline().strip(), flush=True)
while True: time.sleep(0.1)  # a signal right before signal.pause() would not end that
"""


def test_the_command_takes_the_place_of_the_process():
    words = ["--", "-h", "", "a b", "--json"]
    command = [sys.executable, "-m", "megapatch", "run", "--", sys.executable, "-c", PROCESS, *words]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as process:
        try:
            process.stdin.write("from standard input\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{process.pid} {words} from standard input\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == -signal.SIGTERM
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_exit_codes_and_signals_are_the_commands():
    assert run("sh", "-c", "exit 7", env=environment()).returncode == 7
    # Python ignores it; a command that inherits that writes into broken pipes.
    assert run("sh", "-c", "kill -PIPE $$; echo alive", env=environment()).returncode == -signal.SIGPIPE


def test_a_command_that_cannot_be_started(tmp_path):
    (tmp_path / "plain").write_text("echo\n")
    (tmp_path / "stray").write_text("#!/no/such/interpreter\n")
    (tmp_path / "bare").write_text("echo\n")
    for name in ("stray", "bare"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "locked").mkdir(mode=0o000)  # on PATH: to others than root, whose exec says "permission denied"
    commands = [
        [],
        [""],
        ["no-such-command"],
        *([f"./{name}"] for name in ("absent", "plain/x", "stray", "plain", "bare")),
    ]
    script = f"from megapatch.reach._run import launch\nprint([launch(words) for words in {commands}])"
    path = f"{os.environ['PATH']}{os.pathsep}{tmp_path / 'locked'}"
    shown = start(sys.executable, "-c", script, env=environment(PATH=path), cwd=tmp_path)
    assert shown.stdout == "[2, 2, 127, 127, 127, 127, 126, 126]\n"
    told = shown.stderr.splitlines()
    assert told[0] == told[1]
    for line, sentence in zip(told[1:], [
        "Give a command after `--`, as in: megapatch run -- torchrun train.py",
        "no-such-command: no such command. Give a program on PATH, or its path.",
        "./absent: no such command. Give a program on PATH, or its path.",
        "./plain/x: no such command.",
        "./stray cannot be started: the interpreter in its first line does not exist.",
        "./plain cannot be started: [Errno 13] Permission denied: './plain'. A script is started by",
        "./bare cannot be started: [Errno 8] Exec format error: './bare'. A script is started by",
    ], strict=True):  # fmt: skip
        assert line.startswith("megapatch run: ") and sentence in line


def test_once_as_it_starts_it_says_what_it_reaches():
    shown = run(sys.executable, "-c", "pass", env=environment(MEGAPATCH_QUIET="0"))
    assert shown.stderr == f"megapatch run: {_run.REACH}\n"


@pytest.mark.parametrize(
    ("command", "sign"),
    [
        ("/opt/bin/python3.11 -u -IB -m train", "with -E, -I or -S"),
        ("nohup python -S train.py", "with -E, -I or -S"),
        ("python -m train -E", None),
        ("python train.py -I", None),
        ("torchrun -S train.py", None),
        ("env -i python train.py", "drops"),
        ("/usr/bin/env -v B=1 -uPYTHONPATH bash train.sh", "drops"),
        ("env A=1 - python train.py", "drops"),
        ("env -u X python train.py", None),
        ("bash -c PYTHONPATH=/new python train.py", "replaces"),
        ("env PYTHONPATH=/new:$PYTHONPATH_OLD python", "replaces"),
        ("bash -c MY_PYTHONPATH=/new PYTHONPATH=$(pwd):${PYTHONPATH} python", None),
        ("ray job submit -- python train.py", "the cluster starts the job"),
        ("ray job submit -- python train.py --custom-megatron-init-path megapatch.activate", None),
        ("ray job list", None),
    ],
)
def test_signs_in_the_command_that_it_reaches_nothing(command, sign):
    told = _run.out_of_reach(command.split())
    assert [sign in text for text in told] == [True] * bool(sign)


def test_pythonpath_keeps_what_it_held_and_gets_no_empty_part():
    def path(before):
        return _run.reaching(before, {"b", "a"})["PYTHONPATH"].split(os.pathsep)

    assert path({}) == path({"PYTHONPATH": ""}) == [HERE]
    assert path({"PYTHONPATH": "/a::/b"}) == [HERE, "/a", "", "/b"]
    assert path({"PYTHONPATH": f"/a{os.pathsep}{HERE}"}) == path({"PYTHONPATH": "/a"}) == [HERE, "/a"]
    assert _run.reaching({"OTHER": "1"}, {"b", "a"}) == {"OTHER": "1", "PYTHONPATH": HERE, TARGETS: "a,b"}


def test_the_targets_are_those_of_all_patches(project):
    inner = [sys.executable, "-m", "megapatch", "run", "--", "sh", "-c", f'echo "$PYTHONPATH"; echo "${TARGETS}"']
    path, targets = run(*inner, env=environment(project)).stdout.splitlines()
    assert path.split(os.pathsep)[:2] == [HERE, str(project)] and path.count(HERE) == 1
    assert {"greeter", "greeter2", "megatron.training.training"} < set(targets.split(","))


@needs_megatron  # which imports neither: the tests beside it are faster without
def test_torchrun_with_a_real_megatron(project):
    script = project / "rank.py"
    script.write_text(
        "import os, megatron.core.distributed.distributed_data_parallel, sys\n"
        "told = {one.patch.name: one.status.value for one in sys.modules['megapatch'].report().patches}\n"
        "line = f\"rank {os.environ['RANK']} {told['megatron.forward-pre-hook']}\\n\"\n"
        "os.write(1, line.encode())\n"  # at once: print's several writes mix with the other rank's
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    shown = run(*torchrun, script, env=environment())
    assert shown.returncode == 0, shown.stderr
    assert sorted(line for line in shown.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 applied",
        "rank 1 applied",
    ]
    assert "megapatch run" not in shown.stderr


def test_audit_is_set_for_the_command():
    inner = [sys.executable, "-c", "import os; print(os.environ['MEGAPATCH_AUDIT'])"]
    command = [sys.executable, "-m", "megapatch", "run", "--audit", "--", *inner]
    for given, expected in ({}, "1"), ({"MEGAPATCH_AUDIT": "raise"}, "raise"):
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **given}, check=True)
        assert ran.stdout.strip() == expected
