"""In every order of importing, activating and patching, megapatch's function is in place or the status says that
it is not: alone, with import hooks of others, and under programs that change how modules are imported."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.import_orders import HOOKS, LEFT_OUT, TARGET, Expected, orders

import megapatch

HERE = Path(__file__).parent
UNDER_PYTEST = "import py\nfrom rigs.import_orders import main\ndef test_orders(): main()\n"
DRIVER = ["-m", "rigs.import_orders"]
PROGRAMS = {  # with what each needs besides itself
    "megapatch run": (["megapatch", "run", "--", sys.executable, *DRIVER], "megapatch"),
    "ddtrace-run": (["ddtrace-run", sys.executable, *DRIVER], "ddtrace"),
    "coverage run": (
        # It deletes this file first: os.devnull, if root runs it.
        [sys.executable, "-m", "coverage", "run", "--data-file", "coverage.data", *DRIVER],
        "coverage",
    ),
    "debugpy": (
        [sys.executable, "-m", "debugpy", "--listen", "0", "--configure-subProcess", "False", *DRIVER],
        "debugpy",
    ),
    "pytest": ([sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_it.py"], "py"),
}


def run(command, folder, longest, hook=""):
    """Return what the driver prints; the folder is the working directory, with a test that is the driver."""
    (folder / "test_it.py").write_text(UNDER_PYTEST)
    path = [str(HERE), str(Path(megapatch.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    quiet = {"DD_TRACE_ENABLED": "false", "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false"}
    scripts = os.path.dirname(sys.executable)
    done = subprocess.run(
        command,
        cwd=folder,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("MEGAPATCH_")},
            **quiet,
            "LONGEST": str(longest),
            "HOOK": hook,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"orders"')]
    assert answers, done.stderr
    return json.loads(answers[0])


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(("longest", "orders"), [(2, 194), pytest.param(3, 794, marks=NIGHTLY)])
def test_every_order(tmp_path, longest, orders):
    assert run([sys.executable, *DRIVER], tmp_path, longest) == {"orders": orders, "problems": []}


@pytest.mark.parametrize(("longest", "orders"), [(1, 68), pytest.param(2, 388, marks=NIGHTLY)])
@pytest.mark.parametrize("hook", HOOKS)
def test_every_order_with_an_import_hook_of_others(hook, longest, orders, tmp_path):
    pytest.importorskip(hook)
    assert run([sys.executable, *DRIVER], tmp_path, longest, hook) == {"orders": orders, "problems": []}


@pytest.mark.parametrize(("longest", "orders"), [(1, 34), pytest.param(2, 194, marks=NIGHTLY)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_order_under(program, longest, orders, tmp_path):
    command, needed = PROGRAMS[program]
    if importlib.util.find_spec(needed) is None or (
        needed == "py" and not hasattr(pytest.importorskip("py"), "path")
    ):
        pytest.skip(f"{needed} is not installed")
    assert run(command, tmp_path, longest) == {"orders": orders, "problems": []}


def test_no_order_is_made_twice():
    made = list(orders())
    assert len(made) == len(set(made)) == 794
    assert all(LEFT_OUT.values())


def test_what_is_expected_of_some_orders_said_in_words():
    def after(order):
        expected = Expected()
        for event in order:
            expected.do(event)
        return expected.chain, expected.held, expected.statuses

    assert after("TA") == after("AT") == ("!", None, ("applied",))
    assert after("THA") == ("!", (1, "!"), ("applied",))  # the holder is rebound
    assert after("THFA") == ("?!", (1, ""), ("applied",))  # it holds what someone else has wrapped
    assert after("ATF") == ("!?", None, ("applied",))
    assert after("ATG") == ("!~", None, ("applied",))
    assert after("ATGRG") == ("~", None, ("overwritten",))
    assert after("ATR") == ("", None, ("missed",))
    assert after("ATD") == ("!", None, ("applied",))
    assert TARGET not in sys.modules
