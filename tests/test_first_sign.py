"""The first sign of life, on standard error: where logging shows none, once in a process, on rank 0."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import types

import pytest
from rigs.command import run
from rigs.engine import TARGET, activated, make_patch
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
    return [line for line in shown.stderr.splitlines() if line.startswith("megapatch ")]


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


@needs_megatron
def test_the_audits_own_functions_are_no_patches():
    sign = signs("import megapatch, megatron.core.optimizer", MEGAPATCH_AUDIT="1", MEGAPATCH_DISABLE="*")
    assert sign == [NONE]


def test_who_only_imports_megapatch_sees_nothing():
    assert signs("import megapatch") == []


def test_children_leave_it_to_their_parent():
    fork = "import os; os.fork() or sys.exit(); os.wait()"
    spawn = "import multiprocessing; multiprocessing.process._parent_process = object()"
    assert signs(UNPATCHED, fork) == [NONE]
    assert signs(UNPATCHED, spawn) == []


@needs_megatron
def test_a_child_of_multiprocessing_says_it_where_it_is_known_to_be_rank_0():
    spawn = "import multiprocessing, os; multiprocessing.process._parent_process = object()"
    assert signs(spawn, PATCHED) == []
    assert signs(spawn, "os.environ.update(RANK='0', WORLD_SIZE='2')", PATCHED) == [APPLIED]


@needs_megatron
@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        pytest.param({"OMPI_COMM_WORLD_RANK": "0"}, marks=pytest.mark.nightly),
    ],
)
def test_a_process_that_a_rank_has_started_announces_nothing(environment):
    spawn = "import logging, multiprocessing; multiprocessing.process._parent_process = object()"
    assert signs(spawn, PATCHED, **environment) == []
    shown = run("-c", f"{spawn}; logging.basicConfig(level=logging.INFO); {PATCHED}", **environment)
    assert "megapatch" not in shown.stderr


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


def test_it_fits_into_a_line(monkeypatch, capsys):
    monkeypatch.setattr(first_sign, "__version__", "0.10.10+g9c2b1f9.changed")
    first_sign.FirstSign(logging.getLogger("nobody's"), quiet=False).applied()
    for name in ("torch", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    first_sign.FirstSign(logging.getLogger("nobody's"), quiet=False)._none_applied(os.getpid())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= 100
