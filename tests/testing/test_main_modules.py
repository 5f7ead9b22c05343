"""run_ranks with functions of `__main__`, however Python was started; and what it says where that cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading

import pytest
from rigs.needs import needs_megatron

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

    def tell(queue):
        queue.put((__name__, getattr(__spec__, "name", None)))

    def start(how, target):
        context = multiprocessing.get_context(how)
        queue = context.SimpleQueue()
        process = context.Process(target=target, args=(queue,))
        process.start()
        process.join(60)
        return process.exitcode, None if queue.empty() else queue.get()

    def job(rank, world_size, hows):
        target = tell if {by_file} else id  # multiprocessing does not load __main__ of a package or a zip file
        return Reply(
            main=(__name__, getattr(__spec__, "name", None), __package__),
            beside=FROM_BESIDE,
            is_main=sys.modules["__main__"].job is job and sys.modules["__mp_main__"].job is job,
            children={{how: start(how, target) for how in hows}},
        )

    if __name__ == "__main__":
        from megapatch.testing import run_ranks

        multiprocessing.set_forkserver_preload([])
        multiprocessing.forkserver.ensure_running()
        (reply,) = run_ranks(job, 1, sys.argv[1:])
        assert isinstance(reply, Reply)
        print(json.dumps(reply))
"""
BESIDE = "from .beside import FROM_BESIDE"
IN_A_CHILD = [0, ["__mp_main__", None]]


def program(relative="", by_file=True):
    return textwrap.dedent(PROGRAM).format(relative=relative, by_file=by_file)


def run(*arguments, **options):
    options = {"capture_output": True, "text": True, "check": False, "timeout": 300, **options}
    return subprocess.run([sys.executable, *map(str, arguments)], **options)


def reply_of(*arguments, **options):
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout)
    assert reply.pop("is_main")
    return reply


@pytest.fixture
def package(tmp_path):
    """A folder with a package `acme`: a module and a `__main__`, which import from the module beside them."""
    folder = tmp_path / "src" / "acme"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "beside.py").write_text("FROM_BESIDE = 'beside'\n")
    (folder / "module.py").write_text(program(BESIDE))
    (folder / "__main__.py").write_text(program(BESIDE, by_file=False))
    return folder


# ------------------------------------------------------------------------------------- what works
def test_a_script_starts_processes_in_its_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(program())
    assert reply_of(script, "spawn", "forkserver") == {
        "main": ["__mp_main__", None, None],
        "beside": None,
        "children": {"spawn": IN_A_CHILD, "forkserver": IN_A_CHILD},
    }


@pytest.mark.parametrize(
    ("name", "module", "child"),
    [("acme.module", "acme.module", [0, ["__mp_main__", "acme.module"]]), ("acme", "acme.__main__", [0, None])],
)
def test_a_module_that_python_m_runs(package, name, module, child):
    assert reply_of("-m", name, "spawn", cwd=package.parent) == {
        "main": ["__mp_main__", module, "acme"],
        "beside": "beside",
        "children": {"spawn": child},
    }


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
