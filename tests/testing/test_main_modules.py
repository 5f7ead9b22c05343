"""run_ranks with functions of `__main__`, however Python was started; and what it says where that cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading

import pytest
from rigs.where import needs_megatron

from megapatch.errors import MisuseError
from megapatch.testing import run_ranks

pytestmark = [pytest.mark.thorough, pytest.mark.nightly]  # each starts a Python of its own, with torch

# The server has nothing to import, and the children do not import torch: each program is run once.
PROGRAM = """
    import json, multiprocessing, multiprocessing.forkserver, sys
    FROM_BESIDE = None
    {relative}

    class Reply(dict):
        pass

    def job(rank, world_size):
        return Reply(
            main=(__name__, getattr(__spec__, "name", None), __package__),
            beside=FROM_BESIDE,
            is_main=sys.modules["__main__"].job is job and sys.modules["__mp_main__"].job is job,
        )

    if __name__ == "__main__":
        from megapatch.testing import run_ranks

        multiprocessing.set_forkserver_preload([])
        multiprocessing.forkserver.ensure_running()
        (reply,) = run_ranks(job, 1)
        assert isinstance(reply, Reply)
        print(json.dumps(reply))
"""


def program(relative=""):
    return textwrap.dedent(PROGRAM).format(relative=relative)


def run(*arguments, **options):
    options = {"capture_output": True, "text": True, "check": False, "timeout": 300, **options}
    return subprocess.run([sys.executable, *map(str, arguments)], **options)


def reply_of(*arguments, **options):
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout)
    assert reply.pop("is_main")
    return reply


# ------------------------------------------------------------------------------------- what works
def test_a_script(tmp_path):
    (tmp_path / "script.py").write_text(program())
    assert reply_of(tmp_path / "script.py") == {"main": ["__mp_main__", None, None], "beside": None}


@pytest.mark.parametrize(("name", "module"), [("acme.module", "acme.module"), ("acme", "acme.__main__")])
def test_a_module_that_python_m_runs(tmp_path, name, module):
    folder = tmp_path / "acme"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "beside.py").write_text("FROM_BESIDE = 'beside'\n")
    for file in ("module.py", "__main__.py"):
        (folder / file).write_text(program("from .beside import FROM_BESIDE"))
    reply = reply_of("-m", name, cwd=tmp_path)
    assert reply == {"main": ["__mp_main__", module, "acme"], "beside": "beside"}


SAVES = """
    import sys
    from megapatch.testing import init_parallel, run_ranks

    def save(rank, world_size, folder):
        import torch
        from megatron.core import dist_checkpointing
        init_parallel()
        from_offsets = dist_checkpointing.ShardedTensor.from_rank_offsets
        whole = from_offsets("w", torch.full((2,), rank), (0, rank, world_size))
        dist_checkpointing.save({"w": whole}, folder)
        return dist_checkpointing.load_tensors_metadata(folder)["w"].global_shape

    if __name__ == "__main__":
        print(run_ranks(save, 2, sys.argv[1]))
"""


@needs_megatron
def test_a_script_saves_a_checkpoint(tmp_path):
    """Save with Megatron, which in some releases starts a process each time."""
    from rigs.megatron.save import has_working_writer

    if not has_working_writer():
        pytest.skip("the writer of megatron-core 0.12 does not work with this torch")
    (tmp_path / "script.py").write_text(textwrap.dedent(SAVES))
    (tmp_path / "checkpoint").mkdir()
    done = run(tmp_path / "script.py", tmp_path / "checkpoint")
    assert done.stdout == "[(4,), (4,)]\n", done.stderr


# -------------------------------------------------------------------------------- what cannot work
NO_FILE = """
from megapatch.testing import run_ranks
def job(rank, world_size): ...

run_ranks(job, 1)
"""


@pytest.mark.parametrize("arguments", [("-c", NO_FILE), ("-",), ("-i",)])
def test_without_a_file_the_call_says_what_to_do(arguments):
    done = run(*arguments, input="" if "-c" in arguments else NO_FILE)
    (said,) = [line for line in done.stderr.splitlines() if "errors.MisuseError: " in line]
    assert "sends job to other processes" in said
    assert "found none" in said and "%%writefile jobs.py" in said


def test_what_pickle_refuses_the_call_refuses():
    def inner(rank, world_size): ...

    for arguments in [(inner, 1), (lambda rank, world_size: None, 1), (reply_of, 1, threading.Lock())]:
        with pytest.raises(MisuseError, match=r"found that pickle cannot.*Expected functions at module level"):
            run_ranks(*arguments)


CARELESS = """
    import multiprocessing, multiprocessing.forkserver, sys
    from megapatch.testing import run_ranks

    {under}
        def job(rank, world_size): ...

        multiprocessing.set_forkserver_preload([])
        multiprocessing.forkserver.ensure_running()
        run_ranks(job, 1, timeout=60)
"""


@pytest.mark.parametrize(
    ("under", "error", "advice"),
    [
        ("if True:", "called while a rank imports", 'put it under if __name__ == "__main__":'),
        ('if __name__ == "__main__":', "found no job there", "Expected it at module level"),
    ],
)
def test_a_script_without_a_guard_or_with_its_job_under_it(tmp_path, under, error, advice):
    (tmp_path / "script.py").write_text(textwrap.dedent(CARELESS).format(under=under))
    said = run(tmp_path / "script.py").stderr
    assert said.count("MisuseError: ") == 1  # and no ranks of ranks
    assert error in said and advice in said
