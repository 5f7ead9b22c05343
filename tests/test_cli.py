"""The command line in processes of its own: output, errors, exit codes."""

from __future__ import annotations

import json

import pytest
from command import run

from megapatch.catalog import PATCHES

# A stand-in for Megatron where only the command line is under test.
DDP = """
class DistributedDataParallel:
    def disable_forward_pre_hook(self): pass
    def enable_forward_pre_hook(self): pass
    def __init__(self): pass
"""


def test_importing_megapatch_imports_neither_torch_nor_megatron():
    script = "import sys, megapatch; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron')])"
    assert run("-c", script).stdout == "[]\n"


def test_activate_takes_and_ignores_arguments():
    assert run("-c", "import megapatch; megapatch.activate(1, model=None)").returncode == 0


@pytest.mark.parametrize("command", ["", "doctor", "list", "explain", "demo"])
def test_help(command):
    shown = run(*command.split(), "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "usage: megapatch" in shown.stdout


def test_bad_usage_exits_with_2():
    for arguments in (["docter"], ["doctor", "--jsn"], ["explain"], []):
        shown = run(*arguments)
        assert shown.returncode == 2
        assert "usage: megapatch" in shown.stderr


def test_list_names_every_patch():
    shown = run("list")
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [patch.name for patch in PATCHES]


def test_explain_tells_all_about_a_patch():
    shown = run("explain", "megatron.train-reentry")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(
        "megatron.train-reentry: megatron.training.training.train() can be called again"
    )
    for told in (
        "\nSymptom   a second train() dies",
        "\nUpstream  unfixed in",
        "\nSeam      the module function",
        "\nLimits    needs megatron.forward-pre-hook",
        "\nCost      once a call",
        "\nLink      https://github.com/THUDM/slime/issues/1779",
        "\nNumbers   not changed",
        "\nSite      megatron.training.training: train",
    ):
        assert told in shown.stdout


def test_explain_takes_globs():
    shown = run("explain", "*.nested-*", "megatron.rerun-state-dict")
    assert shown.returncode == 0
    assert shown.stdout.count("\nSymptom ") == 2
    assert shown.stdout.count("\nSite ") == 3


def test_explain_of_an_unknown_name_tells_what_is_near():
    shown = run("explain", "megatron.train-rentry")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith(
        "no patch is called 'megatron.train-rentry'; did you mean megatron.train-reentry"
    )


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
    only = {"MEGAPATCH_ONLY": "megatron.nested-no-sync"}  # the others say what they think of the rest of it
    shown = run("doctor", path=fake_megatron("import no_such_torch"), **only)
    assert shown.returncode == 2
    assert "cannot be imported: ModuleNotFoundError: No module named 'no_such_torch'" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_doctor_keeps_standard_output_for_the_json(fake_megatron):
    shown = run("doctor", "--json", path=fake_megatron("print('noise')\n" + DDP))
    told = json.loads(shown.stdout)
    assert told["schema"] == 1
    assert told["patches"][0]["status"] == "refused"
    assert "noise" in shown.stderr


def test_doctor_tells_why_for_each_site(fake_megatron):
    shown = run("doctor", path=fake_megatron(DDP), MEGAPATCH_ONLY="megatron.rerun-state-dict")
    text = " ".join(shown.stdout.split())
    for module in ("megatron.core.rerun_state_machine", "megatron.core.dist_checkpointing.validation"):
        assert f"at {module}: not-installed, there is no such module to import" in text
    assert "at megatron.core.distributed.distributed_data_parallel" in text
    assert "not named by MEGAPATCH_ONLY=megatron.rerun-state-dict" in text


def test_the_quick_view_imports_nothing(fake_megatron):
    shown = run("doctor", "--no-import", path=fake_megatron("raise SystemExit('imported')"))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "megatron.forward-pre-hook" in shown.stdout and "not imported yet" in shown.stdout
    assert shown.stdout.endswith("all well: nothing was judged\n")


def test_a_megatron_that_is_too_old_is_named(fake_megatron):
    path = fake_megatron(DDP)
    (path / "megatron" / "core" / "package_info.py").write_text(
        "MAJOR, PATCH = 0, 0\nMAJOR = 0\nMINOR = 9\nPATCH = 0\n"
    )
    shown = run("doctor", path=path)
    assert shown.returncode == 1
    assert "(megatron-core 0.9.0 (source) is too old: megapatch is tested with 0.12 to 0.19)" in shown.stderr
    assert "Traceback" not in shown.stderr + shown.stdout


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"MEGAPATCH_DISABLE": "megatron.*,slime"}, "MEGAPATCH_DISABLE: no patch is called 'slime'; "),
        ({"MEGAPATCH_STRICT": "maybe", "MEGAPATCH_DISABLE": "*"}, "MEGAPATCH_STRICT=maybe is neither 1 nor 0"),
    ],
)
def test_doctor_does_not_pass_over_a_bad_environment(fake_megatron, environment, sentence):
    shown = run("doctor", path=fake_megatron(DDP), **environment)
    assert shown.returncode == 2
    assert sentence in shown.stderr
    assert "Traceback" not in shown.stderr


def test_an_old_python_is_told_in_one_sentence():
    script = "import sys; sys.version_info = (3, 9, 1); sys.version = '3.9.1 (old)'; import megapatch"
    shown = run("-c", script)
    assert shown.returncode == 1
    assert shown.stderr.splitlines()[-1] == "ImportError: megapatch needs Python 3.10 or later; this is 3.9.1"


def test_doctor_without_anything_to_patch(tmp_path):
    script = (
        "import sys, megapatch.versions as v; v.find_module = lambda name: None\n"
        "import megapatch.engine as e; e.find_module = v.find_module\n"
        "from megapatch.cli import main; sys.exit(main(['doctor']))"
    )
    shown = run("-c", script)
    assert shown.returncode == 2
    assert "nothing to patch is installed" in shown.stderr
