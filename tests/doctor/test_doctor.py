"""megapatch doctor in processes of its own: what it tells, where, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import TimeoutExpired

import pytest
from rigs.command import run, terminal

from megapatch._cli.doctor import examination
from megapatch._cli.doctor.issue import markdown
from megapatch._cli.doctor.origins import Package
from megapatch._engine.advice import ISSUE_TRACKER
from megapatch._reporting.report import PatchReport, Report, SiteReport, make_report
from megapatch.patch import NotAsExpected, PatchInfo, Status
from megapatch.patches import PATCHES
from megapatch.patches._catalogue import RETIRED
from megapatch.patches._diagnosis import running
from megapatch.reach._run.site import sitecustomize

# A stand-in for Megatron where only the command line is under test.
DDP = """
class DistributedDataParallel:
    def disable_forward_pre_hook(self): pass
    def enable_forward_pre_hook(self): pass
    def __init__(self): pass
"""


def reason_of(error):
    """Return the reason of a diagnosis whose code raises."""
    with pytest.raises(NotAsExpected) as refused, running("f()"):
        raise error
    return str(refused.value)


def family(name):
    """All patches of a family, as the text has them."""
    return f"{name}.* ({sum(patch.family == name for patch in PATCHES)})"


def test_doctor_refuses_code_that_looks_like_nothing_known(fake_megatron):
    shown = run("doctor", path=fake_megatron(DDP))
    assert shown.returncode == 1
    assert "not in place: megatron.forward-pre-hook" in shown.stderr
    assert "refused" in shown.stdout
    assert shown.stdout.count("not-installed: ") == 1  # what has no module here shares a line
    assert f"{family('nemo_rl')}, {family('roll')}" in " ".join(shown.stdout.split())  # wherever lines end
    assert "there is no such module" not in shown.stdout


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MEGAPATCH_DISABLE", "megatron.lauder", "MEGAPATCH_DISABLE: no patch is called 'megatron.lauder'"),
        (
            "MEGAPATCH_ONLY",
            "@same",
            "MEGAPATCH_ONLY: no selection of patches is called '@same'; known: @same-numbers",
        ),
        ("MEGAPATCH_AUDIT_EVERY", "x", "MEGAPATCH_AUDIT_EVERY=x: expected a number of steps"),
        ("MEGAPATH_ONLY", "x", "MEGAPATH_ONLY is set and means nothing to megapatch"),
        ("MEGAPATCH_REPORT", "/dev/null/x", "MEGAPATCH_REPORT=/dev/null/x: expected a folder in which ranks can"),
    ],
)
def test_a_bad_setting_is_said_once(fake_megatron, variable, value, said):
    audit = {"MEGAPATCH_AUDIT": "1"} if "AUDIT" in variable else {}
    shown = run("doctor", "--no-import", path=fake_megatron(DDP), **{variable: value}, **audit)
    assert shown.returncode == 2 and shown.stderr.count(said) == 1
    if not audit and variable != "MEGAPATCH_REPORT":  # other commands begin with it, as a WARNING
        assert run("list", **{variable: value}).stderr.count(said) == 1


def test_without_a_dependency_the_exit_code_is_that_of_a_bad_environment(tmp_path):
    (tmp_path / "wrapt.py").write_text("raise ModuleNotFoundError('no wrapt', name='wrapt')")
    shown = run("doctor", path=tmp_path)
    said = "megapatch needs wrapt, which is not installed here: pip install wrapt\n"
    assert (shown.returncode, shown.stdout, shown.stderr) == (2, "", said)
    imported = run("-c", "import megapatch", path=tmp_path)
    assert imported.returncode == 1 and "ModuleNotFoundError: no wrapt" in imported.stderr


def test_every_key_of_the_json_is_documented(fake_megatron):
    """A new key belongs in the table of docs/doctor.md; when one goes or changes its meaning, SCHEMA grows."""
    page = (Path(__file__).parents[2] / "docs/doctor.md").read_text()

    def keys(value):
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from keys(part)
        yield from value if isinstance(value, dict) else ()

    found = json.loads(run("doctor", "--json", path=fake_megatron(DDP), MEGAPATCH_ONLY="megatron.*").stdout)
    del found["versions"]  # its keys are distributions
    assert {"packages", "patches", "settings", "reach", "problems"} < found.keys()
    assert [key for key in set(keys(found)) if f"`{key}`" not in page] == []


def test_on_a_terminal_no_line_is_longer_than_it_is_wide(fake_megatron):
    path = {"PYTHONPATH": os.pathsep.join([str(fake_megatron(DDP)), os.environ.get("PYTHONPATH", "")])}
    with terminal(80) as (output, read):
        command = [sys.executable, "-m", "megapatch", "doctor"]
        subprocess.run(command, env={**os.environ, **path}, stdout=output, stderr=output, timeout=120, check=False)
    lines = read.decode().splitlines()
    assert "refused      megatron.forward-pre-hook" in lines
    assert b"\x1b" not in read  # no colours, whatever NO_COLOR says
    # A path is not wrapped, so that it can be copied.
    assert not [line for line in lines if len(line) > 80 and " " in line.strip() and os.sep not in line]


NOISE = """
import atexit, os, subprocess, sys
print("noise of print")
os.write(1, b"noise of a descriptor\\n")
subprocess.run(["echo", "noise of a child"])
sys.__stdout__.write("noise of a second name\\n")
atexit.register(print, "noise at the end")
"""


def test_whatever_a_target_writes_to_descriptor_1_the_json_is_clean(fake_megatron):
    shown = run("doctor", "--json", path=fake_megatron(NOISE + DDP))
    assert json.loads(shown.stdout)["exit_code"] == shown.returncode == 1
    for what in ("print", "a descriptor", "a child", "a second name"):
        assert f"noise of {what}\n" in shown.stderr
    assert "noise at the end" in shown.stderr


def test_a_refusal_says_what_is_at_risk_and_what_to_do(fake_megatron):
    only = {"MEGAPATCH_ONLY": "megatron.forward-pre-hook", "MEGAPATCH_DISABLE": "slime.*"}
    shown = run("doctor", path=fake_megatron(DDP), **only)
    assert shown.returncode == 1
    assert "\nmegatron.forward-pre-hook: at risk: " in shown.stderr
    assert shown.stderr.endswith(
        "to run without: MEGAPATCH_DISABLE=slime.*,megatron.forward-pre-hook\n"
        f"to report: `megapatch doctor --report` writes a file to attach ({ISSUE_TRACKER})\n"
    )
    assert "megatron.train-reentry: at risk" not in shown.stderr
    accepted = run(
        "doctor", path=fake_megatron(DDP), **only | {"MEGAPATCH_DISABLE": "slime.*,megatron.forward-pre-hook"}
    )
    assert accepted.returncode == 0
    assert "at risk" not in accepted.stderr


def test_a_report_for_an_issue(fake_megatron, tmp_path):
    home = tmp_path / "home" / "alice"
    home.mkdir(parents=True)
    file = home / "report.md"
    megatron = fake_megatron(f"x = 'a b'\nraise RuntimeError('{home}/secret is not there')")
    core = megatron / "megatron" / "core"
    (core / "optimizer").mkdir()
    (core / "optimizer" / "__init__.py").touch()
    (core / "optimizer" / "optimizer.py").write_text("class MixedPrecisionOptimizer: pass\n")
    settings = {
        "HOME": str(home),
        "API_TOKEN": "hunter2",
        "MEGAPATCH_DISABLE": "slime.*",
        "MEGAPATCH_TOKEN": "hunter3",
    }
    shown = run("doctor", "--report", str(file), path=megatron, **settings)
    text = file.read_text()
    assert f"report written to {file}; read it through" in shown.stderr
    assert "| megatron-core |" in text and "| python | " in text
    assert "- `MEGAPATCH_DISABLE=slime.*`" in text and "\ndisabled: slime.*" in text
    assert "cannot be imported: RuntimeError\n" in text
    assert f"exit code {shown.returncode}." in text
    assert "- MEGAPATCH_TOKEN is set and means nothing" in text
    for secret in ("hunter", "alice", str(home), "API_TOKEN"):
        assert secret not in text
    before = file.read_text()
    again = run("doctor", "--report", str(file), path=megatron, **settings)
    assert (again.returncode, again.stdout) == (2, "")
    *_, last = again.stderr.splitlines()  # after the warning of the variable
    assert last == f"{file} exists already; name another file: megapatch doctor --report FILE"
    assert file.read_text() == before
    printed = run("doctor", "--report", "-", path=megatron, **settings)
    assert printed.stdout == before
    assert "report written" not in printed.stderr
    nowhere = run("doctor", "--no-import", "--json", "--report", str(tmp_path / "no/such/file"), path=megatron)
    assert nowhere.returncode == 2
    assert nowhere.stderr.endswith("no/such/file cannot be written: No such file or directory\n")
    assert json.loads(nowhere.stdout)["schema"] == 1


def test_a_report_has_the_tracebacks(fake_megatron):
    script = (
        "import sys\nfrom megapatch.patches.megatron import forward_pre_hook as patch\n"
        "def broken(module): raise ZeroDivisionError('in a diagnosis')\n"
        "vars(patch.PATCH.sites[0]).update(diagnose=broken)\n"
        "from megapatch._engine.engine import this_process\n"
        "from megapatch._cli.main import main\nsys.exit(main(['doctor', '--report', '-']))"
    )
    shown = run("-c", script, path=fake_megatron(DDP))
    _, _, failed = shown.stdout.partition(": failed\n    ZeroDivisionError\n      megapatch/_engine/")
    assert "\n      <string>:3 in broken\n" in failed


SECRETS = (
    '{"token": "zq1"}',
    "token=zq2",
    "Cookie: id=zq3",
    "MYSQL_PWD=zq4",
    "curl -u me:zq5",
    "docker login -p zq6",
    "https://hooks.example/services/T0/zq7",
    "https://x.example/c?sv=1&sig=zq8",
    "/home/zq9/run.py",
    "zq10",
    "[!zq11]*",
    "zqError",
    "x\nzqError: zq12",
    "Command '['serve', '--hf-token', 'zq13']' returned non-zero exit status 1.",
    "login(token='zq14')",
    'x\n  File "/home/zq15.py", line 1, in zq16',
)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_report_has_nothing_that_is_not_known_to_be_fine(secret, monkeypatch):
    """No list of shapes of secrets: others' sentences, values and paths are not in it."""
    monkeypatch.setenv("MEGAPATCH_TOKEN", secret)
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # a folder above the one that an import takes
    trace = f'Traceback\n  File "{__file__}", line 7, in f\n    g("{secret}")\nValueError: {secret}\n{secret}'
    sites = [
        SiteReport("a.b", status, reason, None, ("a.b:f",), (secret,), (secret,), (secret,), trace)
        for status, reason in (
            (Status.FAILED, f"ValueError: {secret}"),
            (Status.FAILED, f"TimeoutExpired: {secret}"),
            (Status.PENDING, f"cannot be imported: Odd: {secret}"),
            (Status.REFUSED, reason_of(TimeoutExpired(secret, 1))),
            (Status.REFUSED, reason_of(KeyError(secret))),
            (Status.REFUSED, reason_of(AttributeError(f"module 'a.b' has no attribute 'c': {secret}"))),
            (Status.FAILED, f"NameError: name 'x' is not defined. {secret}"),
            (Status.FAILED, f"AttributeError: 'X' object has no attribute 'y'. {secret}"),
        )
    ]
    patches = tuple(
        PatchReport(PatchInfo(name, secret, secret, ("a.b",), True), (site,))
        for name in ("megatron.a", "acme.b")
        for site in sites
    )
    found = examination.Examination(
        report=Report(patches, {"torch": secret}),
        packages=[Package("torch", secret, "vcs", secret, secret)],
        settings=[(f"MEGAPATCH_{name}", secret, secret) for name in ("REPORT", "DISABLE", "AUDIT_ACCEPT")],
        reach={"Ray": secret},
        problems=[secret],
        exit_code=1,
    )
    text = markdown(found)
    assert "zq" not in text
    assert "failed       megatron.a\n  a.b: failed\n    ValueError\n    replaced a.b:f\n    rebound: 1\n" in text
    assert "    TimeoutExpired\n" in text
    assert "\n      doctor/test_doctor.py:7 in f\n" in text
    assert "    cannot be imported: Odd\n" in text and "MEGAPATCH_TOKEN is set and means nothing" in text
    assert "    expected f() to run on a stand-in; it raises TimeoutExpired\n" in text
    assert "raises AttributeError: module 'a.b' has no attribute 'c'\n" in text  # names are no values
    assert "    NameError: name 'x' is not defined\n" in text
    assert "    AttributeError: 'X' object has no attribute 'y'\n" in text


def test_a_report_has_the_words_of_settings_that_megapatch_knows(monkeypatch):
    monkeypatch.setitem(RETIRED, "megatron.retired", "0.20")
    values = {
        "DISABLE": "slime.*,megatron.train-reentry,megatron.retired",
        "ONLY": "@same-numbers",
        "AUDIT": "raise",
    }
    values |= {"AUDIT_ACCEPT": "fresh-counts", "AUDIT_EVERY": "7", "STRICT": "1", "REPORT": "/scratch/r"}
    found = examination.Examination(
        report=make_report([]),
        packages=[
            Package("torch", "2.13.0+cpu", "installed", "", None),
            Package("x", "1 (source)", "", "", "ab" * 20),
            Package("y", None, "checkout", "", None),
        ],
        settings=[(f"MEGAPATCH_{name}", value, "") for name, value in values.items()],
        reach={},
        problems=[],
        exit_code=0,
    )
    nowhere = (SiteReport("a", Status.NOT_INSTALLED, "", None, (), (), (), (), None),)
    names = [PatchReport(PatchInfo(patch.name, "", None, (), False), nowhere) for patch in PATCHES]
    text = markdown(found._replace(report=found.report._replace(patches=tuple(names))))
    assert "| torch | 2.13.0+cpu | installed | - |" in text and f"| x | 1 (source) |  | {'ab' * 20} |" in text
    assert "| y | - | checkout | - |" in text
    for name, value in values.items():
        assert f"- `MEGAPATCH_{name}={value if name != 'REPORT' else '(left out)'}`" in text


def test_every_reason_that_ends_with_an_exception_is_worded_alike():
    """`running` has the words by which a report leaves the message out."""
    folder = Path(examination.__file__).parents[2] / "patches"
    ends = re.compile(r"(Verdict|NotAsExpected)\(.*\{(type\()?error")
    worded = [path.name for path in folder.rglob("*.py") if ends.search(path.read_text())]
    assert worded == ["_diagnosis.py"]


def test_doctor_tells_why_for_each_site(fake_megatron):
    shown = run("doctor", "--json", path=fake_megatron(DDP), MEGAPATCH_ONLY="megatron.rerun-state-dict")
    told = {
        site["module"]: (site["status"], site["reason"])
        for one in json.loads(shown.stdout)["patches"]
        if one["name"] in ("megatron.rerun-state-dict", "megatron.nested-no-sync")
        for site in one["sites"]
    }
    for module in ("megatron.core.rerun_state_machine", "megatron.core.dist_checkpointing.validation"):
        assert told[module] == ("not-installed", "there is no such module to import")
    off = ("disabled", "not named by MEGAPATCH_ONLY=megatron.rerun-state-dict")
    assert told["megatron.core.distributed.distributed_data_parallel"] == off


def test_the_quick_view_imports_nothing(fake_megatron):
    shown = run("doctor", "--no-import", path=fake_megatron("raise SystemExit('imported')"))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "megatron.forward-pre-hook" in shown.stdout and "not imported yet" in shown.stdout
    assert shown.stdout.endswith("\nnothing was diagnosed, so this does not say whether all is well\n")


def test_doctor_does_not_pass_over_a_bad_environment(fake_megatron):
    environment = {"STRICT": "maybe", "DISABLE": "megatron.*,slime", "DISABEL": "*", "XYZ": "1"}
    shown = run(
        "doctor", path=fake_megatron(DDP), **{f"MEGAPATCH_{name}": one for name, one in environment.items()}
    )
    assert shown.returncode == 2
    for sentence in (
        "MEGAPATCH_DISABLE: no patch is called 'slime'; ",
        "MEGAPATCH_STRICT=maybe is neither 1 nor 0",
        "MEGAPATCH_DISABEL is set and means nothing to megapatch; did you mean MEGAPATCH_DISABLE?",
        "MEGAPATCH_XYZ is set and means nothing to megapatch; known are "
        "MEGAPATCH_{DISABLE,ONLY,STRICT,AUDIT,AUDIT_EVERY,AUDIT_ACCEPT,REPORT,QUIET,NO_ENTRY_POINTS}",
        f"disabled on purpose: {family('megatron')} (switched off by MEGAPATCH_DISABLE=megatron.*)",
    ):
        assert sentence in shown.stderr
    assert "Traceback" not in shown.stderr
    told = " ".join(shown.stdout.split())
    assert f"MEGAPATCH_DISABLE=megatron.*,slime keeps off {family('megatron')}" in told
    assert "MEGAPATCH_STRICT=maybe makes a patch that is not in place an error" in told


@pytest.mark.parametrize(
    ("variable", "said"),
    [("MEGAPATCH_DISABLE", "keeps off acme.x"), ("MEGAPATCH_ONLY", "keeps off everything but acme.x")],
)
def test_a_selection_is_shown_as_the_patches_that_it_stands_for(variable, said):
    patches = (PatchInfo("acme.x", "x", None, ("m",)), PatchInfo("acme.y", "y", None, ("m",), True))
    report = Report(tuple(PatchReport(patch, ()) for patch in patches), {})
    assert examination._settings({variable: "@same-numbers"}, report) == [(variable, "@same-numbers", said)]


IMPORTS = {
    "distributed/distributed_data_parallel.py": "print('noise')\n" + DDP,  # refused
    "rerun_state_machine.py": "raise SystemExit('this wants a GPU')",
    "dist_checkpointing/strategies/torch.py": "import no_such_torch",
    "dist_checkpointing/strategies/fully_parallel.py": "import no_such_torch",
}


def test_a_target_that_cannot_be_imported_hides_no_other(fake_megatron):
    core = fake_megatron(DDP) / "megatron" / "core"
    for name, source in IMPORTS.items():
        (core / name).parent.mkdir(parents=True, exist_ok=True)
        (core / name).write_text(source)
    shown = run("doctor", "--json", path=core.parent.parent, MEGAPATCH_STRICT="1")
    found = json.loads(shown.stdout)
    sites = {site["module"]: site for patch in found["patches"] for site in patch["sites"]}
    assert shown.returncode == found["exit_code"] == 1  # DDP is refused
    assert sites["megatron.core.distributed.distributed_data_parallel"]["status"] == "refused"
    for module, more, why in (
        ("rerun_state_machine", "", "SystemExit: this wants a GPU"),
        (
            "dist_checkpointing.strategies.fully_parallel",
            ", with 1 other module,",
            "ModuleNotFoundError: No module named 'no_such_torch'",
        ),
    ):
        site = sites[f"megatron.core.{module}"]
        assert (site["status"], site["reason"]) == ("pending", f"cannot be imported: {why}")
        sentence = f"megatron.core.{module}{more} is installed but cannot be imported: {why}"
        assert sentence in found["problems"] and sentence in shown.stderr
    assert shown.stderr.count("no_such_torch") == 1 and "Traceback" not in shown.stderr


def test_a_target_that_kills_the_process_is_named(fake_megatron):
    shown = run("doctor", path=fake_megatron("import os\nos.kill(os.getpid(), 11)"))
    assert shown.returncode == -11
    assert "Segmentation fault" in shown.stderr and "distributed_data_parallel.py" in shown.stderr


def test_each_way_in_is_told_from_facts(tmp_path, monkeypatch):
    def told(ray="2.51.1", off=False, **environment):
        return examination.routes(make_report([]), ray, [], off, environment)

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    nothing_here = told(ray=None)
    assert nothing_here["Ray"] == "not installed"
    assert nothing_here["megapatch run"].endswith("in every Python process below it")
    assert "switched off" in told(off=True)["entry points"]
    (tmp_path / "sitecustomize.py").touch()
    below = {sitecustomize.TARGETS: "megatron.core"}
    shadowed = f"; another sitecustomize runs as well: {tmp_path / 'sitecustomize.py'}"
    assert told()["megapatch run"].endswith(f"below it{shadowed}")
    lost = "is not on the path: someone has replaced PYTHONPATH"
    assert told(**below)["megapatch run"].endswith(f"{sitecustomize.HERE} {lost}{shadowed}")
    monkeypatch.setattr(sys, "path", [sitecustomize.HERE, str(tmp_path)])
    assert told(**below)["megapatch run"].endswith(f"; this process is below one{shadowed}")


def test_a_finder_that_raises_for_an_unknown_name_fails_no_report():
    script = """
import sys, megapatch
class Picky:
    def find_spec(self, name, path=None, target=None):
        if name in ("megatron", "nemo_rl", "skyrl", "slime"):
            raise KeyError(name)
sys.meta_path.append(Picky())
assert str(megapatch.report())
"""
    shown = run("-c", script)
    assert (shown.returncode, shown.stderr) == (0, "")
