"""megapatch doctor in processes of its own: what it tells, where, and its exit codes."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from command import run

from megapatch import probe, routes
from megapatch.catalog import PATCHES
from megapatch.reach.site import sitecustomize
from megapatch.report import make_report

ROOT = Path(__file__).parent

# A stand-in for Megatron where only the command line is under test.
DDP = """
class DistributedDataParallel:
    def disable_forward_pre_hook(self): pass
    def enable_forward_pre_hook(self): pass
    def __init__(self): pass
"""


def family(name):
    """All patches of a family, as the text has them."""
    return f"{name}.* ({sum(patch.family == name for patch in PATCHES)})"


def test_doctor_refuses_code_that_looks_like_nothing_known(fake_megatron):
    shown = run("doctor", path=fake_megatron(DDP))
    assert shown.returncode == 1
    assert "not in place: megatron.forward-pre-hook" in shown.stderr
    assert "refused" in shown.stdout
    assert shown.stdout.count("not-installed: ") == 1  # what has no module here shares a line
    assert f"{family('nemo_rl')}, {family('skyrl')}" in shown.stdout
    assert "there is no such module" not in shown.stdout


def test_doctor_says_what_was_switched_off_and_accepts_it(fake_megatron):
    shown = run("doctor", path=fake_megatron(DDP), MEGAPATCH_DISABLE="megatron.*")
    assert shown.returncode == 0
    assert (
        f"disabled on purpose: {family('megatron')} (switched off by MEGAPATCH_DISABLE=megatron.*)" in shown.stderr
    )


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
        "MEGAPATCH_{DISABLE,ONLY,STRICT,NO_ENTRY_POINTS}",
        f"disabled on purpose: {family('megatron')} (switched off by MEGAPATCH_DISABLE=megatron.*)",
    ):
        assert sentence in shown.stderr
    assert "Traceback" not in shown.stderr
    told = " ".join(shown.stdout.split())
    assert f"MEGAPATCH_DISABLE=megatron.*,slime keeps off {family('megatron')}" in told
    assert "MEGAPATCH_STRICT=maybe what needs attention is an error" in told


def test_doctor_without_anything_to_patch(tmp_path):
    script = (
        "import sys, megapatch.versions as v; v.find_module = lambda name: None\n"
        "import megapatch.engine as e; e.find_module = v.find_module\n"
        "from megapatch.cli import main; sys.exit(main(['doctor']))"
    )
    shown = run("-c", script)
    assert shown.returncode == 2
    assert "nothing to patch is installed" in shown.stderr


IMPORTS = {
    "distributed/distributed_data_parallel.py": "print('noise')\n" + DDP,  # refused
    "optimizer/__init__.py": "import os\nos.kill(os.getpid(), 11)",
    "rerun_state_machine.py": "raise SystemExit('this wants a GPU')",
    "dist_checkpointing/strategies/torch.py": "import os, sys\nprint('last words', file=sys.stderr)\nos._exit(0)",
    "dist_checkpointing/strategies/fully_parallel.py": "import no_such_torch",
}


def test_a_probe_survives_every_import(fake_megatron):
    core = fake_megatron(DDP) / "megatron" / "core"
    for name, source in IMPORTS.items():
        (core / name).parent.mkdir(parents=True, exist_ok=True)
        (core / name).write_text(source)
    shown = run("doctor", "--json", "--probe", path=core.parent.parent, MEGAPATCH_STRICT="1")
    told = json.loads(shown.stdout)
    sites = {site["module"]: site for one in told["patches"] for site in one["sites"]}
    assert shown.returncode == told["exit_code"] == 1  # DDP is refused
    assert sites["megatron.core.distributed.distributed_data_parallel"]["status"] == "refused"
    assert "noise" not in shown.stderr
    for module, why in {
        "optimizer": "the process died of SIGSEGV (it said nothing)",
        "rerun_state_machine": "SystemExit: this wants a GPU",
        "dist_checkpointing.strategies.torch": "the process ended with exit code 0 (last words)",
        "dist_checkpointing.strategies.fully_parallel": "ModuleNotFoundError: No module named 'no_such_torch'",
    }.items():
        site = sites[f"megatron.core.{module}"]
        assert (site["status"], site["reason"]) == ("pending", f"cannot be imported: {why}")
        assert f"megatron.core.{module} is installed but cannot be imported: {why}" in told["problems"]
        assert f"megatron.core.{module} is installed but cannot be imported: {why}" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_probe_does_not_wait_for_ever(modules, tmp_path):
    name = modules.write("import time\nprint('begun', flush=True)\ntime.sleep(1000)")
    assert probe._ask([name], 1, str(tmp_path)) == ([], "not done after 1 s")


ACME = """
import functools
from megapatch import NEEDED, UNKNOWN, Patch, Site, Verdict
import rival  # patches the target before megapatch does

def louder(greet):
    @functools.wraps(greet)
    def replacement(*args):
        return greet(*args) + "!"
    return replacement

def needed(module):
    return Verdict(NEEDED, "it is too quiet")

SITES = tuple(Site(module, needed, replace={"greet": louder}) for module in ("acme_target", "acme_other"))
LOST = (Site("acme_target", lambda module: Verdict(UNKNOWN, "it looks like nothing known")),)
PATCHES = (
    Patch("acme.louder", "Loud.", "https://example.com/1", SITES, changes_numbers=True),
    Patch("acme.lost", "Lost.", "https://example.com/2", LOST),
)
"""

RIVAL = """
import functools, acme_target

def wrap(greet):
    @functools.wraps(greet)
    def wrapper(*args):
        return greet(*args)
    return wrapper

held = [wrap(acme_target.greet)]
alias = acme_target.greet = held[0]
"""

# With `python -S`: what is installed here is none of the golden file's business.
RUN = """
import sys
sys.path[:1] = {path!r}
from megapatch.cli import main
sys.exit(main())
"""


@pytest.fixture
def machine(tmp_path):
    """A made-up environment: runs doctor in it."""
    site, slime, acme = tmp_path / "site", tmp_path / "slime", tmp_path / "acme"

    def write(path, text=""):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def distribute(name, version, **files):
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file, text in {"RECORD": "", **files}.items():
            write(info / file.replace("__", "."), text)

    for name in ("wrapt", "packaging", "megapatch"):
        spec = importlib.util.find_spec(name)
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).symlink_to(Path(spec.origin).parent)
    distribute("wrapt", "1")
    distribute("packaging", "2")
    for package in ("torch", "ray", "megatron/core", "megatron/core/distributed", "megatron/bridge"):
        write(
            site / package / "__init__.py", "raise ImportError('none here')" if package in ("torch", "ray") else ""
        )
    write(site / "megatron/core/distributed/distributed_data_parallel.py", DDP)
    distribute("torch", "2.9.1")
    distribute("ray", "2.51.1")
    distribute("megatron-core", "0.16.1")
    vcs = {"url": "https://example.com/bridge.git", "vcs_info": {"vcs": "git", "commit_id": "b" * 40}}
    distribute("megatron-bridge", "0.4.0", direct_url__json=json.dumps(vcs))
    write(slime / "slime/__init__.py")
    write(slime / ".git/HEAD", "ref: refs/heads/main\n")
    write(slime / ".git/packed-refs", f"{'c' * 40} refs/heads/main\n")
    write(acme / "acme_patches.py", ACME)
    write(acme / "rival.py", RIVAL)
    for name in ("acme_target", "acme_other"):
        write(acme / f"{name}.py", "def greet(name):\n    return name\n")
    write(acme / ".git/HEAD", "a" * 40)
    editable = {"url": acme.as_uri(), "dir_info": {"editable": True}}
    entry = "[megapatch.patches]\nacme_target = acme_patches:PATCHES\n"
    distribute("acme", "1.0", entry_points__txt=entry, direct_url__json=json.dumps(editable))
    (tmp_path / "cwd").mkdir()

    write(tmp_path / "run.py", RUN.format(path=[str(site), str(slime), str(acme)]))
    mine = ("MEGAPATCH_", "RAY_", "PYTHON", "COLUMNS")

    def doctor(*arguments, output=subprocess.PIPE, **environment):
        known = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        return subprocess.run(
            [sys.executable, "-S", str(tmp_path / "run.py"), "doctor", *arguments],
            cwd=tmp_path / "cwd",
            env={**known, **environment},
            stdout=output,
            stderr=output,
            text=True,
            timeout=120,
            check=False,
        )

    return doctor


def golden(told, folder):
    """What doctor has told, without what varies by machine, and of the patches a few."""
    told["digest"] = re.sub("[0-9a-f]{16}", "(16 digits)", told["digest"])
    told["versions"] |= {name: "(any)" for name in ("megapatch", "wrapt")}
    for one in told["packages"]:
        if one["name"] in ("python", "megapatch", "wrapt", "packaging"):
            one.update(version="(any)", origin="(any)", path="(any)", commit="(any)")
    kept = ("acme.louder", "acme.lost", "megatron.nested-no-sync", "slime.train-reentry")
    told["patches"] = [one for one in told["patches"] if one["name"] in kept]
    told["problems"] = [
        text for text in told["problems"] if text.partition(" at ")[0].endswith(kept) or ":" not in text
    ]
    text = json.dumps(told, indent=2).replace(str(folder.resolve()), "(folder)")
    return re.sub(r"\d+ modules", "(some) modules", text) + "\n"


def test_the_json_is_as_in_the_golden_file_with_a_probe_as_well(machine, tmp_path):
    """A new key belongs into the README's table, too; when one goes or changes its meaning, SCHEMA grows."""
    expected = (ROOT / "golden/doctor.json").read_text()
    set_here = {
        "MEGAPATCH_DISABLE": "megatron.nested-*",
        "MEGAPATCH_STRIKT": "1",
        "RAY_RUNTIME_ENV_HOOK": "some.hook",
    }
    for arguments in (["--json"], ["--json", "--probe"]):
        shown = machine(*arguments, **set_here)
        assert shown.returncode == 1, shown.stderr
        text = golden(json.loads(shown.stdout), tmp_path)
        (tmp_path / "doctor.json").write_text(text)
        assert text == expected, f"if this is meant: {tmp_path / 'doctor.json'} is the new one"


def test_every_key_of_the_golden_file_is_documented():
    readme = (ROOT.parent / "README.md").read_text()

    def keys(value):
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from keys(one)
        yield from value if isinstance(value, dict) else ()

    told = json.loads((ROOT / "golden/doctor.json").read_text())
    del told["versions"]  # its keys are distributions
    for key in set(keys(told)):
        assert f"`{key}`" in readme, key


def test_each_way_in_is_told_from_facts(tmp_path, monkeypatch):
    def told(ray="2.51.1", off=False, **environment):
        return routes.routes(make_report([]), ray, [], off, environment)

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (nothing_here, ray_alone) = told(ray=None), told()
    assert nothing_here["Ray"] == "not installed"
    assert nothing_here["megapatch run"].endswith("in every Python process below it")
    assert "switched off" in told(off=True)["entry points"]
    job = {"runtime_env": {"worker_process_setup_hook": "some.hook"}}
    assert told(RAY_JOB_CONFIG_JSON_ENV_VAR="{}")["Ray"] == ray_alone["Ray"] + "; this is the driver of a Ray job"
    assert told(RAY_JOB_CONFIG_JSON_ENV_VAR=json.dumps(job))["Ray"].endswith(
        " with a hook of its own (some.hook): take compose_into_init(), Ray refuses two"
    )
    (tmp_path / "sitecustomize.py").touch()
    below = {sitecustomize.TARGETS: "megatron.core"}
    shadowed = f"; the sitecustomize that is here runs as well: {tmp_path / 'sitecustomize.py'}"
    assert told()["megapatch run"].endswith(f"below it{shadowed}")
    lost = "is not on the path: someone has replaced PYTHONPATH"
    assert told(**below)["megapatch run"].endswith(f"{sitecustomize.HERE} {lost}{shadowed}")
    monkeypatch.setattr(sys, "path", [sitecustomize.HERE, str(tmp_path)])
    assert told(**below)["megapatch run"].endswith(f"; this process is below one{shadowed}")


def test_on_a_terminal_no_line_is_longer_than_it_is_wide(machine, tmp_path):
    ours, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    read = bytearray()

    def reading():
        with contextlib.suppress(OSError):  # nobody has the other end open any more
            while part := os.read(ours, 4096):
                read.extend(part)

    thread = threading.Thread(target=reading)
    thread.start()
    machine(output=terminal, MEGAPATCH_DISABLE="megatron.nested-*")
    os.close(terminal)
    thread.join()
    os.close(ours)
    lines = read.decode().replace(str(tmp_path), "/some/folder").splitlines()
    assert "refused      megatron.forward-pre-hook" in lines
    assert not [
        line for line in lines if len(line) > 80 and " " in line.strip()
    ]  # what is to be copied stays whole
    assert any(line.startswith("not in place: ") for line in lines[-12:])  # what is wrong comes last
