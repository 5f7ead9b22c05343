"""The command line in processes of its own: output, errors, exit codes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from rigs.command import run

from megapatch.patches import PATCHES
from megapatch.patches._catalogue import CATALOGUE


def test_importing_megapatch_imports_neither_torch_nor_megatron():
    script = "import sys, megapatch; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron')])"
    assert run("-c", script).stdout == "[]\n"


def test_no_family_is_imported_before_one_of_its_targets(tmp_path):
    (tmp_path / "slime/backends/megatron_utils").mkdir(parents=True)
    (tmp_path / "slime/backends/megatron_utils/model.py").write_text("")
    script = (
        "import megapatch, sys\n"
        "def families(): return [name for name in sys.modules if name.count('.') == 2 and '.patches.' in name]\n"
        "print(families()); import slime.backends.megatron_utils.model; print(families())"
    )
    before, after = run("-c", script, path=tmp_path).stdout.splitlines()
    assert not any(f"'megapatch.patches.{family}'" in before for family in CATALOGUE)
    assert "'megapatch.patches.slime'" in after
    assert not any(f"'megapatch.patches.{family}'" in after for family in ("nemo_rl", "skyrl"))


def test_what_needs_a_model_is_loaded_with_the_first_one():
    script = (
        "import wrapt, sys; before = set(sys.modules); import megapatch; megapatch.report(); "
        "print(*sorted({*sys.modules} - before))"
    )
    loaded = run("-c", script).stdout.split()
    assert "megapatch.patches.nemo_rl.split_train_step" in loaded
    late = (
        "megapatch.train_step",
        "megapatch._nemo_rl_split_step.worker",
        "dataclasses",
    )  # each costs 1 ms or more
    assert not set(late) & set(loaded)


def test_activate_takes_and_ignores_arguments():
    assert run("-c", "import megapatch; megapatch.activate(1, model=None)").returncode == 0


@pytest.mark.parametrize("command", ["", "doctor", "verify", "list", "explain", "run", "demo"])
def test_help(command):
    shown = run(*command.split(), "--help", COLUMNS="80")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "usage: megapatch" in shown.stdout
    assert "\nexit codes:" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_bad_usage_exits_with_2():
    both = ["doctor", "--json", "--report", "-"]
    for arguments in (["docter"], ["doctor", "--jsn"], ["explain"], [], both, ["list", "--json"]):
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


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_explain_speaks_of_numbers_once(patch, capsys):
    from megapatch._cli.main import main

    assert main(["explain", patch.name]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Numbers")]
    assert line in patch.doc or patch.changes_numbers == ("not changed" not in line)


@pytest.mark.parametrize(
    "command", ["explain *", "list", "list --help", "doctor --no-import", "doctor --json --no-import"]
)
def test_a_reader_that_has_gone_is_no_error(command):
    """As with `| head -1`, which may close the pipe before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = start(*command.split(), stdout=closed)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "command", ["list", "explain *", "--help", "doctor --no-import", "doctor --json --no-import"]
)
def test_a_full_disk_is_one_line_on_standard_error(command):
    with open("/dev/full", "w") as full:
        done = start(*command.split(), stdout=full)
    assert done.returncode == 2
    assert done.stderr == "megapatch: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", ["list", "explain megatron.nested-no-sync"])
def test_without_docstrings(command):
    shown = run(*command.split(), PYTHONOPTIMIZE="2")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "megatron.nested-no-sync" in shown.stdout and "-OO" in shown.stdout


def test_without_standard_output(fake_megatron):
    """Closed from the start, as with `>&-`: who asked does not get the answer."""
    path = os.pathsep.join([str(fake_megatron("")), os.environ.get("PYTHONPATH", "")])
    for command in ("list", "doctor --no-import"):
        shell = subprocess.run(
            ["sh", "-c", f'"$0" -m megapatch {command} >&-', sys.executable],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (shell.returncode, shell.stderr) == (
            2,
            "megapatch: the output cannot be written: standard output is closed\n",
        )


def test_bad_usage_of_a_command_shows_its_own_usage():
    for arguments in (["doctor", "extra"], ["run", "--strict"], ["list", "--jsn"]):
        shown = run(*arguments)
        assert (shown.returncode, shown.stdout) == (2, "")
        assert shown.stderr.startswith(f"usage: megapatch {arguments[0]} ")
        problem = (
            "expected a folder with the files of ranks, found none at extra"
            if arguments[0] == "doctor"
            else f"unrecognized arguments: {arguments[1]}"
        )
        assert shown.stderr.endswith(f"megapatch {arguments[0]}: error: {problem}\n")


def start(*arguments, stdout):
    mine = ("MEGAPATCH_", "PYTHONUNBUFFERED")
    known = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    return subprocess.run(
        [sys.executable, "-m", "megapatch", *arguments],
        env=known,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


# Stands for argcomplete, which finds the parser's subcommands and arguments itself.
COMPLETER = """
import argparse, os
def autocomplete(parser):
    (commands,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    (names,) = [each for each in commands.choices["explain"]._actions if each.dest == "names"]
    print(*names.completer(prefix="", action=names, parser=parser, parsed_args=None))
    os._exit(0)
"""


def test_names_and_globs_complete(tmp_path):
    (tmp_path / "argcomplete.py").write_text(COMPLETER.replace("os._exit", "print(end='', flush=True); os._exit"))
    shown = run("explain", path=tmp_path, _ARGCOMPLETE="1")
    assert {"megatron.train-reentry", "megatron.*", "slime.*"} <= set(shown.stdout.split())
    assert "argcomplete" not in run("-c", "import sys, megapatch._cli.main; print(*sys.modules)").stdout.split()


def test_a_shell_that_completes_without_argcomplete_here_runs_nothing(tmp_path):
    (tmp_path / "argcomplete.py").write_text("raise ImportError")
    assert run("list", path=tmp_path, _ARGCOMPLETE="1").stdout == ""


@pytest.mark.skipif(importlib.util.find_spec("argcomplete") is None, reason="argcomplete is not installed")
def test_argcomplete_completes(tmp_path):
    line = "megapatch explain megatron.t"
    answers = tmp_path / "answers"
    environment = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": " "}
    run("explain", **environment, _ARGCOMPLETE_STDOUT_FILENAME=str(answers))
    assert answers.read_text().split() == ["megatron.train-reentry"]


@pytest.mark.parametrize("name", ["megapatch.__main__", "megapatch._cli.main"])
def test_the_entries_have_argcompletes_mark(name):
    with open(importlib.util.find_spec(name).origin, encoding="utf-8") as file:
        assert file.readline() == "# PYTHON_ARGCOMPLETE_OK\n"


def test_explain_takes_globs():
    shown = run("explain", "*.nested-*", "megatron.rerun-state-dict", "nemo_rl.split-train-step")
    assert shown.returncode == 0
    assert shown.stdout.count("\nSymptom ") == 3
    assert shown.stdout.count("\nSite ") == 5
    # known there, and left alone: no targets
    assert "\nSite      nemo_rl.models.policy.megatron_policy_worker\n" in shown.stdout


def test_explain_of_an_unknown_name_tells_what_is_near():
    shown = run("explain", "megatron.train-rentry")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith(
        "no patch is called 'megatron.train-rentry'; did you mean megatron.train-reentry"
    )


def test_an_old_python_is_told_in_one_sentence():
    script = "import sys; sys.version_info = (3, 9, 1); sys.version = '3.9.1 (old)'; import megapatch"
    shown = run("-c", script)
    assert shown.returncode == 1
    assert shown.stderr.splitlines()[-1] == "ImportError: megapatch needs Python 3.10 or later; this is 3.9.1"
