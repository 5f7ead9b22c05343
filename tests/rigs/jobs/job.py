"""Run a whole job by torchrun, plain and with megapatch, and read what it prints and leaves.

    plain, patched = both_ways(folder, SCRIPT, "--train-iters 5 --save ck")
    assert_alike(plain, patched)

Nothing of a job is left running when this returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent.parent
JOBS = TESTS / "jobs"
TIMEOUT = 1200
RUN = ("-m", "megapatch", "run", "--", sys.executable)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--redirects=3")
IN_RAY = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "300000",  # a busy machine takes more than the 30 s of both
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_niceness": "0",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "WANDB_MODE": "disabled",
}
PRINTED = re.compile(
    "|".join(
        (
            r"iteration +\d+/ +\d+ .*?(?=\|Number|\n)",
            r"(?:validation|test) loss at iteration .*",
            r"successfully (?:saved|loaded) checkpoint .*",
            r"exiting program at iteration \d+",
            r"\w+Error: .*",
            r"JOB .*",
            r"(?:step|rollout) \d+: \{.*\}",
        )
    )
)
"""What counts of the lines that a rank prints; steps and rollouts are slime's."""
VARYING = re.compile(r"(elapsed time per iteration \(ms\)|toks/s(/gpu)?): [\d.]+")


@dataclass(frozen=True)
class Ended:
    """How a job has ended.

    code     its exit code
    printed  losses, norms, rates, validation and errors of each rank
    saved    names of the files of its checkpoints
    left     what the processes run that were still running
    notes    how many processes came to an orderly end
    applied  the patches that were in any of them
    """

    code: int
    printed: dict[str, list[str]]
    saved: list[str]
    left: list[str]
    notes: int
    applied: set[str] = field(compare=False)
    folder: Path = field(compare=False)

    def lines(self, beginning):
        """Return those that a job in a Ray has printed and that begin so."""
        return [line for line in self.printed["all"] if line.startswith(beginning)]


def both_ways(folder, script, flags, **options):
    """Run a job plain and with megapatch, each in a folder below this one; return both ends.

    They run at the same time, but for jobs in a Ray, which have twice as many processes.
    """
    _of_make()  # once, before two jobs do
    with ThreadPoolExecutor(1 if "reach" in options else 2) as pool:
        plain = pool.submit(run, folder / "plain", script, flags, with_megapatch=False, **options)
        patched = pool.submit(run, folder / "patched", script, flags, with_megapatch=True, **options)
        return plain.result(), patched.result()


def run(folder, script, flags, *, with_megapatch, ranks=2, env=(), reach=None, paths=()):
    """Run a job in a folder of its own; in the same one again it is a job that resumes.

    reach   of a job that starts a Ray of its own: more flags, with which its workers import megapatch
    paths   folders for PYTHONPATH
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("ended-*"), *folder.glob("logs/**/*.log")):
        old.unlink()
    torchrun = [*TORCHRUN, f"--log-dir={folder}/logs", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(RUN if with_megapatch else ()), *torchrun, str(script), *flags.split()]
    if reach is not None:
        command = [sys.executable, str(script), *flags.split(), *(reach.split() if with_megapatch else ())]
        env = {**IN_RAY, **dict(env)}
    with (folder / "log").open("w") as log:
        output = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        job = subprocess.Popen(
            command, cwd=folder, env=_environment(folder, env, paths), start_new_session=True, **output
        )
        try:
            code = job.wait(TIMEOUT)
        finally:
            left = _end_what_is_left(folder, patience=1 if reach is None else 60)
    notes = [json.loads(note.read_text()) for note in folder.glob("ended-*")]
    assert all((applied is not None) == with_megapatch for applied in notes), notes
    files = [*folder.glob("logs/**/*.log"), *([] if reach is None else [folder / "log"])]
    logs = {"/".join(path.parts[-2:]): path.read_text(errors="replace") for path in files}
    printed = {
        name: [VARYING.sub("", line).strip() for line in PRINTED.findall(text)] for name, text in logs.items()
    }
    if reach is not None:  # its processes have names of their own each time
        printed = {"all": sorted(line for lines in printed.values() for line in lines)}
    return Ended(
        code=code,
        printed=printed,
        saved=sorted(path.relative_to(folder).as_posix() for path in folder.glob("ck*/**/*")),
        left=left,
        notes=len(notes),
        applied={name for applied in notes for name in applied or ()},
        folder=folder,
    )


def run_alone(folder, script, *arguments, env):
    """Run a script without torchrun, and return what it prints."""
    command = [sys.executable, str(script), *arguments]
    with (folder / "printed").open("w") as printed, (folder / "log").open("w") as log:
        output = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": log}
        try:
            subprocess.run(
                command, cwd=folder, env=_environment(folder, env), check=True, timeout=3 * TIMEOUT, **output
            )
        finally:
            _end_what_is_left(folder)
    return (folder / "printed").read_text()


def assert_same_training(plain, patched, steps, patch):
    """Compare how two trainings in a Ray have ended, after so many steps, the second with this patch in place."""
    assert plain.code == 0
    assert len(plain.lines("JOB step")) == steps
    assert patch in patched.applied
    assert_alike(plain, patched)


def assert_alike(plain, patched, meant=()):
    """Compare how two jobs have ended, and all elements of their checkpoints and Hugging Face exports.

    meant   parts of names: elements with them differ, and have to
    """
    ends = [
        (each.name, getattr(plain, each.name), getattr(patched, each.name))
        for each in fields(Ended)
        if each.compare
    ]
    assert not (unlike := [end for end in ends if end[1] != end[2]]), unlike

    def saved(name):
        paths = sorted(plain.folder.glob(f"ck*/{name}"))
        return [(path, patched.folder / path.relative_to(plain.folder)) for path in paths]

    exports = saved("**/*.safetensors")
    assert all(path.read_bytes() == other.read_bytes() for path, other in exports), exports
    checkpoints = saved("iter_*")
    found = differences(checkpoints)
    assert [beside(names, meant) for names in found] == [[]] * len(checkpoints), found
    assert all(beside(names, [part]) != names for names in found for part in meant), found


def beside(names, parts):
    """Return the names that have none of the parts."""
    return [name for name in names if not any(part in name for part in parts)]


def differences(checkpoints):
    """Return for each pair of checkpoints the elements that differ, tensors or not; another process reads them."""
    pairs = [str(folder) for pair in checkpoints for folder in pair]
    command = [sys.executable, "-m", "rigs.jobs.checkpoints", *pairs]
    found = subprocess.run(command, cwd=TESTS, env=_environment(), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def _environment(folder="", more=(), paths=()):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEGAPATCH_", "PYTEST_"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(HERE / "startup"), *map(str, paths), os.environ.get("PYTHONPATH")])
        ),
        "PYTHONWARNINGS": "ignore",  # Megatron's own
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "JOB_FOLDER": str(folder),
        **_of_make(),
        **dict(more),
    }


# ------------------------------------------------------------------------------------------ a checkout
def of_checkout(name):
    """Return the path of a file in the Megatron-LM that MEGATRON_CHECKOUT names, or None."""
    folder = os.environ.get("MEGATRON_CHECKOUT")
    return Path(folder, name) if folder else None


@cache
def _of_make():
    """Return the variables with which a checkout's `make` finds Python and torch's pybind11; let it run once."""
    helpers = of_checkout("megatron/core/datasets")
    if helpers is None:
        return {}
    torch = Path(find_spec("torch").origin).parent
    variables = {
        "CPLUS_INCLUDE_PATH": os.pathsep.join([str(torch / "include"), sysconfig.get_path("include")]),
        "MAKEFLAGS": f"CPPFLAGS= LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}",
    }
    subprocess.run(["make", "-C", helpers], env={**os.environ, **variables}, check=True)
    return variables


# ------------------------------------------------------------------------------------------ what is left running
def _end_what_is_left(folder, patience=1):
    """Kill the processes of the job in this folder that are left, and return what each runs.

    They are known by their environment: torchrun gives each rank a session of its own, and Ray each process.
    """
    for _ in range(patience):  # some are about to end
        if _of_job(folder):
            time.sleep(1)
    commands = {}
    while left := _of_job(folder):
        for process in left:
            with contextlib.suppress(OSError):  # it has ended
                command = (process / "cmdline").read_text().split("\0")
                os.kill(int(process.name), signal.SIGKILL)
                commands[process.name] = re.sub(r"\d+", "N", " ".join(command[1:]))
        time.sleep(0.1)
    return sorted(commands.values())


def _of_job(folder):
    variable, found = f"JOB_FOLDER={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # somebody else's, or it has ended
            if variable in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
    return found
