"""The command line in processes of its own and on a terminal: output, errors, exit codes; pages and examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from rigs.command import run, terminal

from megapatch._cli.main import main
from megapatch.patches import PATCHES
from megapatch.patches._catalogue import CATALOGUE


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("megapatch", {"megapatch.streaming", "megapatch.audit", "asyncio", "ray", "torch", "megatron"}),
        ("megapatch.weight_sync", {"asyncio", "ray", "torch"}),
        ("megapatch.streaming", {"ray", "torch"}),
    ],
)
def test_an_import_imports_nothing_that_it_may_do_without(module, others):
    before = "import sys, wrapt; before = set(sys.modules)"  # wrapt may import asyncio
    shown = run("-c", f"{before}; import {module}; print({others} & (set(sys.modules) - before))")
    assert shown.stdout == "set()\n"


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
        "megapatch.patches.nemo_rl._split_step.worker",
        "dataclasses",
    )  # each costs 1 ms or more
    assert not set(late) & set(loaded)


def test_activate_takes_and_ignores_arguments():
    assert run("-c", "import megapatch; megapatch.activate(1, model=None)").returncode == 0


@pytest.mark.parametrize("command", ["", "doctor", "verify", "audit", "list", "explain", "run", "demo"])
def test_help(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    shown = capsys.readouterr()
    assert "usage: megapatch" in shown.out and shown.err == ""
    assert "\nexit codes:" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


def test_list_names_every_patch():
    shown = run("list")
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [patch.name for patch in PATCHES]
    assert [line.endswith(" (changes numbers)") for line in lines] == [patch.changes_numbers for patch in PATCHES]


def test_list_of_a_property_and_of_names(capsys):
    for names in (["@same-numbers"], ["verl.*", "@same-numbers"]):
        assert main(["list", *names]) == 0
        expected = [p.name for p in PATCHES if not p.changes_numbers or (p.family == "verl" and len(names) > 1)]
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == expected
    assert main(["list", "@same"]) == 2
    assert capsys.readouterr() == ("", "no selection of patches is called '@same'; known: @same-numbers\n")


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
        "\nNumbers   change in a first call",
        "\nSite      megatron.training.training: train",
    ):
        assert told in shown.stdout


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_explain_speaks_of_numbers_once(patch, capsys):
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


@pytest.mark.parametrize(
    ("arguments", "usage", "problem"),
    [
        ("", "", "required: COMMAND"),
        ("docter", "", "invalid choice: 'docter'"),
        ("doctor extra", "doctor ", "expected a folder with the files of ranks, found none at extra"),
        (
            "doctor --json --report -",
            "doctor ",
            "--json and --report - both write to standard output",
        ),
        ("explain", "explain ", "required: NAME"),
        ("list --json", "list ", "unrecognized arguments: --json"),
        ("run --strict", "run ", "unrecognized arguments: --strict"),
        *(
            (f"verify --timeout={no}", "verify ", f"invalid time limit: {no}")
            for no in ("0", "-1", "nan", "inf", "soon")
        ),
    ],
)
def test_bad_usage_shows_the_commands_own_usage(arguments, usage, problem, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"usage: megapatch {usage}")
    assert f"megapatch {usage}".rstrip() + ": error: " in shown.err and problem in shown.err


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


def test_explain_of_a_name_with_none_near_lists_the_families():
    shown = run("explain", "xyz")
    assert shown.returncode == 2 and "; known patches: areal.*, megatron.*, " in shown.stderr
    assert len(shown.stderr) < 200 and "slime.*" in shown.stderr


def test_an_old_python_is_told_in_one_sentence():
    script = "import sys; sys.version_info = (3, 9, 1); sys.version = '3.9.1 (old)'; import megapatch"
    shown = run("-c", script)
    assert shown.returncode == 1
    assert shown.stderr.splitlines()[-1] == "ImportError: megapatch needs Python 3.10 or later; this is 3.9.1"


@pytest.mark.parametrize(("command", "kind"), [("doctor", "rank"), ("audit", "audit")])
@pytest.mark.parametrize("text", ['{"rank": 0, "size": 1, "began": Infinity}', "[" * 100_000])
def test_a_file_of_others_that_cannot_be_read_is_a_sentence_and_2(tmp_path, capsys, command, kind, text):
    file = tmp_path / f"{kind}-00000.json"
    file.write_text(text)
    assert main([command, str(tmp_path)]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert said.startswith(f"{file} cannot be read: ")


# ------------------------------------------------------------------------ on a terminal
PAGES = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("columns", [70, 100, 120])
def test_lists_and_explanations_are_as_wide_as_the_terminal(columns):
    known = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with terminal(columns) as (output, written):
        for command in (["list"], ["explain", "*"]):
            subprocess.run([sys.executable, "-m", "megapatch", *command], stdout=output, env=known, check=True)
    lines = written.decode().splitlines()
    assert max(len(line) for line in lines if len(line.split()) > 2) <= columns  # a heading, a long name
    assert not [line for line in lines if line.startswith(" ") and not line.startswith("  ")]
    words = " ".join(" ".join(lines).split())
    for patch in PATCHES:
        assert words.count(" ".join(patch.summary.split())) >= 2
        assert " ".join(patch.doc.split("Cost ")[-1].split()) in words


def test_elsewhere_a_patch_is_a_line():
    assert len(run("list", COLUMNS="60").stdout.splitlines()) == len(PATCHES)


def test_a_pth_file_does_nothing_once_megapatch_is_gone(tmp_path):
    """The lines of docs/reach.md, run as they are."""
    text = (PAGES / "reach.md").read_text()
    lines = text.partition("## A .pth file")[2].partition("```sh\n")[2].partition("```")[0]
    venv.create(tmp_path / "env", symlinks=True)
    folder = str(tmp_path / "env" / "bin")
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env = {**known, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", lines], env=env, check=True)
    (tmp_path / "megapatch.py").write_text("print('imported')")
    for path, expected in ((tmp_path, "imported\n"), ("", "")):
        done = subprocess.run(
            [f"{folder}/python", "-c", "pass"],
            env=env | {"PYTHONPATH": str(path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert (done.stdout, done.stderr) == (expected, "")


def test_every_example_that_looks_runnable_is_and_imports_what_is_promised():
    for path in (Path(__file__).parents[1] / "examples").glob("*.py"):
        text = path.read_text()
        runs = (f"python examples/{path.name}" in text and "__name__" in text) or "main()" in text
        assert path.name.startswith("_") or runs, path.name
        assert "megapatch._" not in text and "megapatch.testing._" not in text, path.name


def test_the_blocks_of_pages_use_no_name_before_it_is_defined():
    """A class of a block's own, used above its definition, as docs/slime.md once did."""
    for page in PAGES.glob("*.md"):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for name in re.findall(r"^(?:class|def) (\w+)", block, re.MULTILINE):
                defined = re.search(rf"^(?:class|def) {name}\b", block, re.MULTILINE).start()
                top = [line for line in block[:defined].splitlines() if line[:1].strip()]
                assert not [line for line in top if re.search(rf"\b{name}\(", line)], (page.name, name)
