"""killed.py SCRIPT FILE: one life of a job after the other, forked from one process that has imported everything.

FILE has in JSON the lives: a name, the flags, where the kill comes (see rigs.jobs.kills), and whether the oldest
checkpoint that is complete is asked for. For each life it prints its name, whether it came to that point, and the
step that was asked for. Each begins where the checkpoints in the working directory let it.
"""

import contextlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

if os.environ.get("JOB_IMPORT"):
    import megapatch  # noqa: F401 (as docs/megatron.md has it)
RANKS = 2


def main(script, file):
    job = runpy.run_path(script, run_name="job")
    call = of_bridge(job) if "settings" in job else of_megatron(script, job)
    for life in json.loads(Path(file).read_text()):
        asked = oldest() if life.get("asked") else None
        print(json.dumps([life["name"], live(call, life, asked), asked]), flush=True)


def of_megatron(script, job):
    def call(flags, asked):
        sys.argv = [script, *flags.split(), *(["--ckpt-step", str(asked)] if asked else [])]
        job["main"]()

    return call


def of_bridge(job):
    def call(flags, asked):
        job["torch"].distributed.init_process_group("gloo")
        job["pretrain"](job["settings"](400, **flags, **({"ckpt_step": asked} if asked else {})), job["step"])

    return call


def oldest():
    return min((int(found.parent.name[5:]) for found in Path("ck").glob("iter_*/.metadata")), default=None)


def live(call, life, asked):
    """Run a life in a session of its own, and return whether it came to its kill or its last step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    leader = os.fork()
    if leader == 0:
        os.setsid()
        for rank in range(RANKS):
            os.fork() or be_a_rank(call, life, asked, rank, port)
        os._exit(any(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(RANKS)))
    code = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    return code in (0, -signal.SIGKILL)


def be_a_rank(call, life, asked, rank, port):
    from rigs.jobs.kills import Follower

    try:
        of_all = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, **of_all}.items():
            os.environ[name] = str(value)
        output = os.open(f"{life['name']}-{rank}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        Follower(life.get("point"), life.get("late"), f"{life['name']}-{rank}.log", life.get("steps")).install()
        call(life["flags"], asked)
    except BaseException:
        traceback.print_exc()
    finally:  # a rank ends in Follower
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
