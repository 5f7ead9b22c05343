"""The command line in processes of its own: output, errors, exit codes."""

from __future__ import annotations

import json

import pytest
from command import run

# A stand-in for Megatron where only the command line is under test.
DDP = """
class DistributedDataParallel:
    def disable_forward_pre_hook(self): pass
    def enable_forward_pre_hook(self): pass
    def __init__(self): pass
"""


@pytest.fixture
def fake_megatron(tmp_path):
    folder = tmp_path / "megatron" / "core" / "distributed"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()

    def write(source):
        (folder / "distributed_data_parallel.py").write_text(source)
        return tmp_path

    return write


def test_importing_megapatch_imports_neither_torch_nor_megatron():
    script = "import sys, megapatch; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron')])"
    assert run("-c", script).stdout == "[]\n"


def test_activate_takes_and_ignores_arguments():
    assert run("-c", "import megapatch; megapatch.activate(1, model=None)").returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["list", "--help"], ["demo", "--help"]])
def test_help(arguments):
    shown = run(*arguments)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "usage: megapatch" in shown.stdout


def test_bad_usage_exits_with_2():
    for arguments in (["docter"], ["doctor", "--jsn"]):
        shown = run(*arguments)
        assert shown.returncode == 2
        assert "usage: megapatch" in shown.stderr


def test_list_names_every_patch():
    shown = run("list")
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [
        "megatron.forward-pre-hook",
        "megatron.train-reentry",
    ]


def test_doctor_refuses_code_that_looks_like_nothing_known(fake_megatron):
    shown = run("doctor", path=fake_megatron(DDP))
    assert shown.returncode == 1
    assert "not in place: megatron.forward-pre-hook" in shown.stderr
    assert "refused" in shown.stdout


def test_doctor_says_what_was_switched_off_and_accepts_it(fake_megatron):
    shown = run("doctor", path=fake_megatron(DDP), MEGAPATCH_DISABLE="megatron.*")
    assert shown.returncode == 0
    assert "disabled on purpose: megatron.forward-pre-hook" in shown.stderr
    assert "MEGAPATCH_DISABLE=megatron.*" in shown.stderr


def test_doctor_says_what_cannot_be_imported(fake_megatron):
    shown = run("doctor", path=fake_megatron("import no_such_torch"))
    assert shown.returncode == 2
    assert "cannot be imported: ModuleNotFoundError: No module named 'no_such_torch'" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_doctor_keeps_standard_output_for_the_json(fake_megatron):
    shown = run("doctor", "--json", path=fake_megatron("print('noise')\n" + DDP))
    told = json.loads(shown.stdout)
    assert told["schema"] == 1
    assert told["patches"][0]["status"] == "refused"
    assert "noise" in shown.stderr


def test_doctor_without_anything_to_patch(tmp_path):
    script = (
        "import sys, megapatch.versions as v; v.find_module = lambda name: None\n"
        "import megapatch.engine as e; e.find_module = v.find_module\n"
        "from megapatch.cli import main; sys.exit(main(['doctor']))"
    )
    shown = run("-c", script)
    assert shown.returncode == 2
    assert "nothing to patch is installed" in shown.stderr
