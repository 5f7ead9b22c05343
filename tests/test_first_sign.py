"""The first sign of life on standard error, and the INFO line that says which patches were applied, and where."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import types
from pathlib import Path

import pytest
from rigs.command import run
from rigs.engine import TARGET, activated, make_engine, make_patch
from rigs.where import needs_megatron

from megapatch import _version
from megapatch._engine import first_sign
from megapatch.patch import UNKNOWN, Verdict

DDP = "megatron.core.distributed.distributed_data_parallel"
PATCHED = f"import megapatch, {DDP}, megatron.core.rerun_state_machine"
MEGATRON = "sys.modules.update(dict.fromkeys(('torch', 'megatron.core'), types.ModuleType('any')))"
UNPATCHED = f"import megapatch, sys, types; {MEGATRON}"
APPLIED = f"megapatch {_version.__version__} applies patches; print(megapatch.report()) lists them"
NONE = f"megapatch {_version.__version__} applied no patch in this process; `megapatch doctor` says why"


def signs(*statements, **environment):
    shown = run("-c", "\n".join(statements), **environment)
    assert shown.returncode == 0, shown.stderr
    return [line for line in shown.stderr.splitlines() if line.startswith("megapatch")]


def test_the_page_shows_both_lines():
    page = (Path(__file__).parents[1] / "docs" / "settings.md").read_text()
    shown = page.partition("```text\nmegapatch ")[2].partition("\n```")[0].replace("\nmegapatch ", "\n")
    assert [re.sub(r"^\S+", _version.__version__, line) for line in shown.splitlines()] == [
        line.removeprefix("megapatch ") for line in (APPLIED, NONE)
    ]


@needs_megatron
def test_the_first_patches_are_one_line():
    (line,) = signs(PATCHED)
    assert line == APPLIED


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {"SLURM_PROCID": "0"}, {"PMI_RANK": "0"}])
def test_a_process_with_megatron_and_without_patches_says_so_at_exit(environment):
    assert signs(UNPATCHED, **environment) == [NONE]


def test_a_driver_without_megatron_says_nothing():
    assert signs(UNPATCHED.replace(", 'megatron.core'", ",")) == []


@pytest.mark.parametrize(
    "environment",
    [
        {"MEGAPATCH_QUIET": "1"},
        {"RANK": "37"},
        {"SLURM_PROCID": "37"},
        {"PMI_RANK": "37"},
        {"RANK": "37", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_RANK": "37", "SLURM_PROCID": "0"},  # mpirun in a batch script
    ],
)
def test_quiet_processes_and_other_ranks_say_nothing(environment):
    assert signs(UNPATCHED, **environment) == []


@pytest.mark.parametrize(
    "statement",
    [
        "logging.basicConfig(level=logging.INFO)",
        "logging.basicConfig(); logging.getLogger('megapatch').setLevel('DEBUG')",
    ],
)
def test_where_a_handler_takes_info_nothing_is_said(statement):
    assert signs("import logging", statement, UNPATCHED) == []


@pytest.mark.parametrize(
    "statement",
    [
        "logging.basicConfig()",  # at WARNING
        "logging.basicConfig(level=logging.INFO); logging.getLogger('megapatch').propagate = False",
        "logging.basicConfig(level=logging.INFO); logging.getLogger().handlers[0].setLevel('WARNING')",
        "import megapatch, logging.config; logging.config.dictConfig({'version': 1, 'root': {'level': 'INFO'}})",
    ],
)
def test_logging_that_shows_no_info_does_not_count(statement):
    assert signs("import logging", statement, UNPATCHED) == [NONE]


def test_the_audits_own_functions_are_no_patches(modules, capsys):
    """They are installed below all patches."""
    name = modules.write(TARGET)
    engine = activated(quiet_value="")
    engine.install_below([make_patch(name)])
    assert importlib.import_module(name).greet("you") == "hello you!"
    assert capsys.readouterr().err == ""


def test_who_only_imports_megapatch_sees_nothing():
    assert signs("import megapatch") == []


def test_children_leave_it_to_their_parent():
    fork = "import os; os.fork() or sys.exit(); os.wait()"
    spawn = "import multiprocessing; multiprocessing.process._parent_process = object()"
    assert signs(UNPATCHED, fork) == [NONE]
    assert signs(UNPATCHED, spawn) == []
    assert signs(UNPATCHED, spawn, RANK="0", WORLD_SIZE="2") == []  # a rank has started it


SPAWNED = "import multiprocessing, os; multiprocessing.process._parent_process = object()"
SIGNED = """
import megapatch
from megapatch._engine.engine import this_process
sign = this_process().first_sign
sign.applied()
import logging
logging.basicConfig(level=logging.INFO)
print("megapatch" if sign.is_heard() else "", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("statement", "environment", "expected"),
    [
        ("", {}, [APPLIED, "megapatch"]),
        (SPAWNED, {}, ["megapatch"]),  # nobody knows its rank yet
        (f"{SPAWNED}; os.environ.update(RANK='0', WORLD_SIZE='2')", {}, [APPLIED, "megapatch"]),
        (SPAWNED, {"RANK": "0", "WORLD_SIZE": "2"}, []),  # a rank has started it
        (SPAWNED, {"OMPI_COMM_WORLD_RANK": "0"}, []),
    ],
)
def test_a_child_of_multiprocessing_says_it_where_it_is_known_to_be_rank_0(statement, environment, expected):
    assert signs("import sys", statement, SIGNED, **environment) == expected


def test_without_a_standard_error_nothing_breaks_and_standard_output_stays_clean():
    shown = run("-c", f"{UNPATCHED}; sys.stderr = None")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "")


def test_an_engine_says_it_once(modules, capsys):
    inner, outer = modules.write(TARGET), modules.write(TARGET)
    activated(make_patch(inner), make_patch(outer, name="test.outer"), quiet_value="")
    assert capsys.readouterr().err == ""
    for name in (inner, outer):
        importlib.import_module(name)
    said = capsys.readouterr().err
    assert said == f"{APPLIED}\n"


@pytest.mark.parametrize("disabled", [True, False])
def test_a_refusal_that_logging_does_not_show_is_said(modules, monkeypatch, capsys, disabled):
    """As where dictConfig() has disabled all loggers that it does not name."""
    monkeypatch.setattr(logging.getLogger("megapatch"), "disabled", disabled)
    refused = make_patch(modules.write(TARGET), diagnose=lambda module: Verdict(UNKNOWN, "as it happens"))
    engine = activated(refused, quiet_value="")
    importlib.import_module(name := refused.sites[0].module)
    engine.apply()
    problem = (
        f"megapatch {_version.__version__}: test.louder is refused at {name}; print(megapatch.report()) lists"
    )
    assert capsys.readouterr().err.count(problem) == disabled


def test_handlers_that_show_nothing_do_not_count():
    log = logging.Logger("nobody's")
    assert first_sign._takes(log, logging.WARNING)  # by logging's last resort
    log.addHandler(logging.NullHandler())
    assert not first_sign._takes(log, logging.WARNING)


def test_the_command_line_has_reports_of_its_own(fake_megatron):
    with_torch = "import sys, types; sys.modules.setdefault('torch', types.ModuleType('torch'))"
    assert "applied" not in run("doctor", path=fake_megatron(with_torch)).stderr


def test_nothing_is_said_of_a_problem_either(capsys, monkeypatch):
    log = logging.getLogger("nobody's")
    monkeypatch.setattr(log, "disabled", True)
    for hushed in (False, True):
        sign = first_sign.FirstSign(log, quiet=False)
        if hushed:
            sign.hush()
        sign.not_in_place("a problem")
        assert ("a problem" in capsys.readouterr().err) != hushed


def test_it_fits_into_a_line(monkeypatch, capsys):
    monkeypatch.setattr(first_sign, "__version__", "0.10.10+g9c2b1f9.changed")
    first_sign.FirstSign(logging.getLogger("nobody's"), quiet=False).applied()
    for name in ("torch", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    first_sign.FirstSign(logging.getLogger("nobody's"), quiet=False)._none_applied(os.getpid())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= 100


# ------------------------------------------------------------------------ the INFO line
@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.message for record in caplog.records if record.levelno == logging.INFO]


def test_it_names_the_patches_and_the_module_once(modules, said):
    name = modules.write(TARGET)
    engine = activated(
        make_patch(name), make_patch(name, "Greeter.greet", name="test.method", changes_numbers=True)
    )
    assert said() == []  # nothing is applied to a module that nobody has imported
    importlib.import_module(name)
    engine.activate()
    engine.apply()
    assert said() == [f"megapatch applied test.louder, test.method (changes numbers) to {name}"]


def test_where_the_module_is_there_already(modules, said):
    name = modules.write(TARGET)
    importlib.import_module(name)
    make_engine(make_patch(name)).activate()
    assert said() == [f"megapatch applied test.louder to {name}"]


def test_nothing_is_said_of_what_is_off_or_not_installed(modules, said):
    name = modules.write(TARGET)
    importlib.import_module(name)
    make_engine(make_patch(name), make_patch("nowhere", name="test.nowhere"), disable=("test.louder",)).activate()
    assert said() == []


def test_modules_that_import_each_other_are_one_line(modules, said):
    inner = modules.write(TARGET)
    outer = modules.write(f"import {inner}\n{TARGET}")
    activated(make_patch(inner), make_patch(outer, name="test.outer"))
    importlib.import_module(outer)
    assert said() == [f"megapatch applied test.louder to {inner}; test.outer to {outer}"]


def test_what_is_too_long_for_a_line_is_counted(modules, said):
    names = [modules.write(TARGET) for _ in range(4)]
    patches = {f"test.{'long-' * 12}{number}": name for number, name in enumerate(names)}
    outer = modules.write("".join(f"import {name}\n" for name in names) + TARGET)
    make_engine(
        *(make_patch(name, name=patch, changes_numbers=name == names[0]) for patch, name in patches.items()),
        make_patch(outer, name="test.outer"),
    ).activate()
    importlib.import_module(outer)
    (message,) = said()
    first, *lines = message.splitlines()
    assert first == "megapatch applied 5 patches to 5 modules, 1 of which may change numbers:"
    applied = [f"  {patch} to {name}" for patch, name in patches.items()]
    applied[0] = applied[0].replace(" to", " (changes numbers) to")
    assert lines == [*applied, f"  test.outer to {outer}"]


def test_what_no_handler_has_taken_comes_with_the_first_message_that_one_takes(modules, caplog):
    targets = {name: modules.write(TARGET) for name in ("test.first", "test.second", "test.third")}
    first, second, third = targets.values()
    engine = activated(*(make_patch(target, name=name) for name, target in targets.items()))
    for name in (first, second):
        importlib.import_module(name)
    assert not caplog.records
    engine.restore("test.second")
    caplog.set_level(logging.INFO)
    importlib.import_module(third)
    (record,) = caplog.records
    assert record.message == f"megapatch applied test.first to {first}; test.third to {third}"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_announces(modules, said, monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    name = modules.write(TARGET)
    activated(make_patch(name))
    importlib.import_module(name)
    assert len(said()) == (rank == "0")


def test_an_outer_import_that_fails_keeps_nothing_back(modules, said):
    inner = modules.write(TARGET)
    outer = modules.write(f"import {inner}\nraise RuntimeError\n")
    engine = activated(make_patch(inner), make_patch(outer, name="test.outer"))
    with pytest.raises(RuntimeError):
        importlib.import_module(outer)
    engine.apply()
    assert said() == [f"megapatch applied test.louder to {inner}"]
